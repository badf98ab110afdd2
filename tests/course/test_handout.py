"""handout.py: what a hand-out holds, points, and the check, of one quick exercise. `check` does all of them."""
import ast
import re
import time
from contextlib import suppress
from pathlib import Path

import compare
import grading
import handout
import making
import pytest
import solutions
from conftest import ROOT
from exercises import EXERCISES


def test_a_hand_out_has_docstrings_and_graded_tests_but_no_solution(tmp_path):
    assert handout.main(['make', str(tmp_path / 'out'), 'multi_similarity_loss', 'hybrid_loss']) is None
    files = {str(path.relative_to(tmp_path / 'out')): path.read_text() for path in (tmp_path / 'out').rglob('*.*')}
    assert set(files) == {'README.md', 'requirements.txt', 'common.py', 'train_ms.py', 'train_hse.py',
                          'tests/conftest.py', 'tests/worked.py', 'tests/papers/test_ms.py',
                          'tests/papers/test_hse.py'}
    for script, function in (('train_ms.py', 'mine'), ('train_hse.py', 'hybrid_loss'),
                             ('train_hse.py', 'multi_similarity_loss')):
        node, = making.functions_of(files[script], [function])
        docstring, body = node.body
        assert ast.get_docstring(node) and ast.unparse(body) == 'raise NotImplementedError'
    assert 'def most_similar' in files['train_hse.py']
    node, = making.functions_of(files['common.py'], ['retrieval_metrics'])
    assert len(node.body) > 2, 'it is no exercise here'
    tests = files['tests/papers/test_hse.py']
    assert 'def test_hse_eq9_' in tests and 'def test_epshn_' not in tests
    assert '`mine`' in files['README.md'] and '-k "metrix_eq2_"' in files['README.md']
    with pytest.raises(SystemExit, match='exists'):
        making.make(tmp_path / 'out', ['hybrid_loss'])


def test_each_exercise_names_what_there_is():
    """Each function has a docstring, each graded word a test, and each solution fits the project's lines."""
    files = making.handout(list(EXERCISES))
    for name, exercise in EXERCISES.items():
        for solution in (solutions.WRONG[name] | solutions.RIGHT[name] | solutions.PASSING.get(name, {})).values():
            assert making.hand_in(making.source(exercise.script), exercise.cut.split(), solution)
        for script, functions in exercise.solutions.items():
            found = making.functions_of(making.source(script), functions.split())
            assert len(found) == len(functions.split()) and all(ast.get_docstring(f) for f in found), script
        for node in making.functions_of(files[exercise.script], exercise.cut.split()):
            assert ast.unparse(node.body[1:]) == 'raise NotImplementedError', 'nothing of the solution is left'
        tests = files[exercise.tests]
        assert all(f'def test_{word.removeprefix("test_")}' in tests for word in exercise.graded.split(' or '))


def test_unknown_names_are_refused(tmp_path, capsys):
    with pytest.raises(SystemExit) as error:
        handout.main(['make', str(tmp_path / 'out'), 'hybrid_los'])
    assert error.value.code == 2 and not list(tmp_path.iterdir())
    assert capsys.readouterr().err == f'error: hybrid_los is no exercise; these are: {", ".join(EXERCISES)}\n'


def test_a_check_and_grades_of_a_quick_exercise(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv('OMP_NUM_THREADS', '1')
    (what, mistake), *_ = solutions.WRONG['positivity_threshold'].items()
    right, *_ = solutions.RIGHT['positivity_threshold'].values()
    monkeypatch.setitem(solutions.WRONG, 'positivity_threshold', {what: mistake})
    monkeypatch.setitem(solutions.RIGHT, 'positivity_threshold', {'one': right, 'another': mistake})
    assert handout.main(['check', 'positivity_threshold']) == 1
    out = capsys.readouterr().out
    assert out.startswith('BAD positivity_threshold, right: another: ') and out.count('BAD') == 1
    assert '\n    expected  ' in out, 'why it fails'
    assert out.endswith('1 exercises, 1 wrong solutions, 0 that only pass the tests, 2 right ones: 1 not as they '
                        'should be\n')


FLAWED = {'a.py': (), 'b.py': ('.logit()', '.log()'),
          'c.py': ('torch.as_tensor(lam, dtype=torch.float64).logit()', 'exit()')}


@pytest.fixture
def handed_in(tmp_path, monkeypatch):
    """A folder with a right script, a wrong one, one that exits where it is called and one that exits at once"""
    monkeypatch.setenv('OMP_NUM_THREADS', '1')
    text = (ROOT / 'train_metrix.py').read_text()
    (tmp_path / 'in').mkdir()
    for file, change in FLAWED.items():
        (tmp_path / 'in' / file).write_text(text.replace(*change) if change else text)
    (tmp_path / 'in/d.py').write_text('exit("at once")')
    return tmp_path / 'in'


def test_a_folder_is_graded_with_a_table_and_feedback(handed_in, tmp_path, capsys):
    """A test function is a point, however many parameters it has; names are those within the folder."""
    handout.main(['grade', 'positivity_threshold', str(handed_in), '--csv', str(tmp_path / 'grades.csv'),
                  '--feedback', str(tmp_path / 'feedback'), '--seed', '7'])
    seed, right, wrong, leaves, broken = capsys.readouterr().out.splitlines()
    assert seed == 'seed 7 of the random inputs'
    assert right == 'a.py: metrix_eq24 4/4, comparison 1/1, in all 5/5'
    assert re.search(r'^b.py: metrix_eq24 0/4, comparison 0/1, in all 0/5 \(.*\)$', wrong)
    assert re.search(r'^c.py: metrix_eq24 0/4, comparison 0/1, in all 0/5 \(SystemExit.*\)$', leaves)
    assert broken == ('d.py: metrix_eq24 0/4, comparison 0/1, in all 0/5 (hand in the whole script: '
                      'positivity_threshold is not in this file)')
    rows = (tmp_path / 'grades.csv').read_text().splitlines()
    assert rows[0] == 'file,exercise,equation,points,of,seed,remarks' and len(rows) == 9
    assert rows[1:3] == ['a.py,positivity_threshold,metrix_eq24,4,4,7,', 'a.py,positivity_threshold,comparison,1,1,7,']
    texts = {path.name: path.read_text() for path in (tmp_path / 'feedback').iterdir()}
    assert sorted(texts) == ['a.txt', 'b.txt', 'c.txt', 'd.txt']
    assert texts['a.txt'] == 'positivity_threshold: 5 of 5 points\n'
    text = texts['b.txt']
    assert 'test_metrix_eq24_by_hand[0.5-18-75-0.77-0.77]  (metrix_eq24)\n    Metrix Eq. (24), lambda 0.5, ' in text
    assert '\n        expected  0.77\n        got       ' in text
    assert re.search(r'\d+ of \d+ random inputs have another value .*\n    positivity_threshold of lam', text)
    assert 'assert ' not in text and 'def ' not in text, 'no code of the tests'


def test_an_endless_test_costs_its_point_alone(handed_in, monkeypatch):
    """And where a test cannot be ended, what has passed before counts."""
    monkeypatch.setattr(grading, 'LIMIT_OF_A_TEST', 1)
    exercise, files = EXERCISES['positivity_threshold'], making.handout(['positivity_threshold'])
    text = (ROOT / 'train_metrix.py').read_text()
    line = 'return torch.as_tensor(lam, dtype=torch.float64).logit()'
    tests, why = grading.results(exercise, files, text.replace(line, f'while beta == 1: pass\n    {line}'))
    assert why == '' and [reason for reason in tests.values() if reason] == ['TimeoutError: no end after 1 seconds']
    monkeypatch.setattr(grading, 'LIMIT', 6)
    stubborn = ('if beta == 1:\n        import signal\n        signal.signal(signal.SIGPROF, signal.SIG_IGN)\n'
                f'        while True: pass\n    {line}')
    tests, why = grading.results(exercise, files, text.replace(line, stubborn))
    assert why == 'no end after 6 seconds' and len(tests) > 2 and not any(tests.values())


@pytest.mark.skipif(not Path('/proc/self/stat').exists(), reason='there is no /proc')
def test_processes_that_a_file_leaves_behind_end_with_it(handed_in, tmp_path):
    marker = tmp_path / 'pid'
    leave = (f'import os, time\nif not os.fork():\n    open({str(marker)!r}, "w").write(str(os.getpid()))\n'
             '    time.sleep(60)\n    os._exit(0)\n')
    exercise, files = EXERCISES['positivity_threshold'], making.handout(['positivity_threshold'])
    text = (ROOT / 'train_metrix.py').read_text()
    grading.results(exercise, files, text.replace('import random\n', f'{leave}import random\n', 1))
    pid = int(marker.read_text())
    for _ in range(100):                            # it may take a moment to end
        with suppress(FileNotFoundError):
            if Path(f'/proc/{pid}/stat').read_text().split()[2] != 'Z':
                time.sleep(0.1)
                continue
        return
    raise AssertionError('it is still there')


def test_the_list_names_level_minutes_and_source(capsys):
    handout.main(['list'])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(EXERCISES)
    assert re.search(r'hybrid_loss +week 8 +level 2 +60 minutes +HSE Eq. \(7\), \(8\) and \(9\)', '\n'.join(lines))


@pytest.mark.parametrize('name, other', [('hybrid_loss', 'epshn_loss'), ('epshn_loss', 'hybrid_loss')])
def test_functions_that_share_lines_with_a_solution_are_cut_as_well(name, other):
    node, = making.functions_of(making.handout([name])['train_hse.py'], [other])
    assert ast.unparse(node.body[1]) == 'raise NotImplementedError'


def test_a_flawed_script_is_whole_has_one_mistake_and_no_tests(tmp_path):
    """The same seed makes the same mistake; the mended script is the project's, so it has full points."""
    for out, seed in ('a', '1'), ('b', '1'):
        handout.main(['make', str(tmp_path / out), '--flawed', seed, 'proxy_anchor_loss', 'triplet_loss'])
    files = {path.name: path.read_text() for path in (tmp_path / 'a').iterdir()}
    assert files == {path.name: path.read_text() for path in (tmp_path / 'b').iterdir()}
    assert sorted(files) == ['LICENSE', 'README.md', 'common.py', 'requirements.txt', 'train_proxy_anchor.py',
                             'train_triplet.py']
    found = set()
    for seed in range(20):
        for path, text in making.flawed(['proxy_anchor_loss'], seed).items():
            if path == 'train_proxy_anchor.py':
                changed = [line for line in text.splitlines() if line not in making.source(path).splitlines()]
                assert len(changed) == 1 and 'NotImplementedError' not in text
                found.add(changed[0])
    assert len(found) > 5
    with pytest.raises(SystemExit, match='one script'):
        handout.main(['make', str(tmp_path / 'c'), '--flawed', '1', 'hybrid_loss', 'epshn_loss'])
