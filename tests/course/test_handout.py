"""handout.py: starter code, the comparison, grading and points. `handout.py check` tests all solutions."""
import ast
import re
import time
from contextlib import suppress
from pathlib import Path

import compare
import grading
import handout
import making
import numpy as np
import pytest
import sandbox
import solutions
from conftest import ROOT
from exercises import EXERCISES


def test_starter_code_has_docstrings_and_graded_tests_but_no_solution(tmp_path):
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
    assert len(node.body) > 2, 'it is not an exercise here'
    tests = files['tests/papers/test_hse.py']
    assert 'def test_hse_eq9_' in tests and 'def test_epshn_' not in tests
    assert '`mine`' in files['README.md'] and '-k "metrix_eq2_"' in files['README.md']
    with pytest.raises(SystemExit, match='exists'):
        making.make(tmp_path / 'out', ['hybrid_loss'])


def test_each_exercise_refers_to_existing_functions_and_tests():
    """Each function has a docstring, each graded prefix a test, and each solution can be applied to the script."""
    files = making.handout(list(EXERCISES))
    for name, exercise in EXERCISES.items():
        for solution in (solutions.WRONG[name] | solutions.RIGHT[name] | solutions.PASSING.get(name, {})).values():
            assert making.with_solution(making.source(exercise.script), exercise.stubbed.split(), solution)
        for script, functions in exercise.solutions.items():
            found = making.functions_of(making.source(script), functions.split())
            assert len(found) == len(functions.split()) and all(ast.get_docstring(f) for f in found), script
        for node in making.functions_of(files[exercise.script], exercise.stubbed.split()):
            assert ast.unparse(node.body[1:]) == 'raise NotImplementedError', 'nothing of the solution is left'
        tests = files[exercise.tests]
        assert all(f'def test_{word.removeprefix("test_")}' in tests for word in exercise.graded.split(' or '))


def test_unknown_names_are_rejected(tmp_path, capsys):
    with pytest.raises(SystemExit) as error:
        handout.main(['make', str(tmp_path / 'out'), 'hybrid_los'])
    assert error.value.code == 2 and not list(tmp_path.iterdir())
    assert capsys.readouterr().err == f'error: hybrid_los is not an exercise; these are: {", ".join(EXERCISES)}\n'


def test_check_reports_a_solution_with_an_unexpected_result(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv('OMP_NUM_THREADS', '1')
    (what, mistake), *_ = solutions.WRONG['positivity_threshold'].items()
    right, *_ = solutions.RIGHT['positivity_threshold'].values()
    monkeypatch.setitem(solutions.WRONG, 'positivity_threshold', {what: mistake})
    monkeypatch.setitem(solutions.RIGHT, 'positivity_threshold', {'one': right, 'another': mistake})
    assert handout.main(['check', 'positivity_threshold']) == 1
    out = capsys.readouterr().out
    assert out.startswith('BAD positivity_threshold, right: another: ') and out.count('BAD') == 1
    assert '\n    expected  ' in out, 'why it fails'
    assert out.endswith('1 exercises, 1 wrong solutions, 0 that only pass the tests, 2 right ones: 1 with '
                        'unexpected results\n')


METRIX = (ROOT / 'train_metrix.py').read_text()
FLAWED = {'a.py': (), 'b.py': ('.logit()', '.log()'),
          'c.py': ('torch.as_tensor(lam, dtype=torch.float64).logit()', 'exit()')}


@pytest.fixture
def submissions(tmp_path, monkeypatch):
    """A folder with a right script, a wrong one, one that exits when its function is called and one that exits at
    import"""
    monkeypatch.setenv('OMP_NUM_THREADS', '1')
    text = (ROOT / 'train_metrix.py').read_text()
    (tmp_path / 'in').mkdir()
    for file, change in FLAWED.items():
        (tmp_path / 'in' / file).write_text(text.replace(*change) if change else text)
    (tmp_path / 'in/d.py').write_text('exit("at once")')
    return tmp_path / 'in'


def test_a_folder_is_graded_with_a_table_and_feedback(submissions, tmp_path, capsys):
    """A test function gives a point, for any number of parameters. Printed paths are relative to the folder."""
    handout.main(['grade', 'positivity_threshold', str(submissions), '--csv', str(tmp_path / 'grades.csv'),
                  '--feedback', str(tmp_path / 'feedback'), '--seed', '7'])
    seed, right, wrong, leaves, broken = capsys.readouterr().out.splitlines()
    assert seed == 'seed 7 of the random inputs'
    assert right == 'a.py: metrix_eq24 4/4, comparison 1/1, in all 5/5'
    assert re.search(r'^b.py: metrix_eq24 0/4, comparison 0/1, in all 0/5 \(.*\)$', wrong)
    assert re.search(r'^c.py: metrix_eq24 0/4, comparison 0/1, in all 0/5 \(SystemExit.*\)$', leaves)
    assert broken == ('d.py: metrix_eq24 0/4, comparison 0/1, in all 0/5 (submit the whole script: '
                      'positivity_threshold is not in this file)')
    table = (tmp_path / 'grades.csv').read_text().splitlines()
    assert table[0] == 'file,exercise,equation,points,of,seed,remarks' and len(table) == 9
    assert table[1:3] == ['a.py,positivity_threshold,metrix_eq24,4,4,7,', 'a.py,positivity_threshold,comparison,1,1,7,']
    texts = {path.name: path.read_text() for path in (tmp_path / 'feedback').iterdir()}
    assert sorted(texts) == ['a.txt', 'b.txt', 'c.txt', 'd.txt']
    assert texts['a.txt'] == 'positivity_threshold: 5 of 5 points\n'
    text = texts['b.txt']
    assert 'test_metrix_eq24_by_hand[0.5-18-75-0.77-0.77]  (metrix_eq24)\n    Metrix Eq. (24), lambda 0.5, ' in text
    assert '\n        expected  0.77\n        got       ' in text
    assert re.search(r'\d+ of \d+ random inputs have another value .*\n    positivity_threshold of lam', text)
    assert 'assert ' not in text and 'def ' not in text, 'no code of the tests'


def test_a_test_that_does_not_end_loses_only_its_point(submissions, monkeypatch):
    """If a test cannot be interrupted, the tests that have passed before still count."""
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
def test_child_processes_of_a_submission_are_killed(submissions, tmp_path):
    marker = tmp_path / 'pid'
    leave = (f'import os, time\nif not os.fork():\n    open({str(marker)!r}, "w").write(str(os.getpid()))\n'
             '    time.sleep(60)\n    os._exit(0)\n')
    exercise, files = EXERCISES['positivity_threshold'], making.handout(['positivity_threshold'])
    text = (ROOT / 'train_metrix.py').read_text()
    grading.results(exercise, files, text.replace('import random\n', f'{leave}import random\n', 1))
    pid = int(marker.read_text())
    for _ in range(100):                            # it may take a moment
        with suppress(FileNotFoundError):
            if Path(f'/proc/{pid}/stat').read_text().split()[2] != 'Z':
                time.sleep(0.1)
                continue
        return
    raise AssertionError('the process is still running')


def test_the_list_names_level_minutes_and_source(capsys):
    handout.main(['list'])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(EXERCISES)
    assert re.search(r'hybrid_loss +week 8 +level 2 +60 minutes +HSE Eq. \(7\), \(8\) and \(9\)', '\n'.join(lines))


@pytest.mark.parametrize('name, other', [('hybrid_loss', 'epshn_loss'), ('epshn_loss', 'hybrid_loss')])
def test_functions_with_lines_of_a_solution_are_stubbed_out_as_well(name, other):
    node, = making.functions_of(making.handout([name])['train_hse.py'], [other])
    assert ast.unparse(node.body[1]) == 'raise NotImplementedError'


def test_flawed_scripts_come_complete_and_without_tests(tmp_path):
    """The same seed makes the same mistake. Two exercises in one script are rejected."""
    for out, seed in ('a', '1'), ('b', '1'):
        handout.main(['make', str(tmp_path / out), '--flawed', seed, 'proxy_anchor_loss', 'triplet_loss'])
    files = {path.name: path.read_text() for path in (tmp_path / 'a').iterdir()}
    assert files == {path.name: path.read_text() for path in (tmp_path / 'b').iterdir()}
    assert sorted(files) == ['LICENSE', 'README.md', 'common.py', 'requirements.txt', 'train_proxy_anchor.py',
                             'train_triplet.py']
    with pytest.raises(SystemExit, match='one script'):
        handout.main(['make', str(tmp_path / 'c'), '--flawed', '1', 'hybrid_loss', 'epshn_loss'])


def test_flawed_scripts_have_no_traces_other_than_their_mistake():
    """Five seeds make five scripts. They have no unused names and no dead branches, and comments keep their columns."""
    for name, exercise in EXERCISES.items():
        original = making.source(exercise.script)
        scripts = making.mistakes(name)
        assert len({*scripts[:5], original}) == 6, name
        comments = {(line.index('# '), line[line.index('# '):]) for line in original.splitlines() if '  # ' in line}
        for script in scripts:
            assert not making.traces(script, original)
            changed = set(script.splitlines()) - set(original.splitlines())
            for line in changed:
                assert line.strip()
                if '   # ' in line:                 # after a longer line, a comment has two spaces before it
                    assert (line.index('# '), line[line.index('# '):]) in comments, line


def test_starter_code_stubs_out_later_exercises():
    """With keep, other exercises keep their solutions. The README lists further functions that are stubbed out."""
    def stubbed(names, script, keep=False):
        text = making.handout(names, keep)[script]
        return {node.name for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)
                and ast.unparse(node.body[-1]) == 'raise NotImplementedError'}
    assert stubbed(['proxynca_loss'], 'train_proxynca_pp.py') == {'proxynca_loss', 'proxynca_pp_loss'}
    assert stubbed(['proxynca_loss'], 'train_proxynca_pp.py', keep=True) == {'proxynca_loss'}
    assert stubbed(['proxynca_pp_loss'], 'train_proxynca_pp.py') == {'proxynca_pp_loss'}, 'the other one is earlier'
    assert stubbed(['mix_features'], 'train_metrix.py') >= {'mix_features', 'pair_labels', 'positivity_threshold', 'ms'}
    assert 'retrieval_metrics' not in stubbed(['mix_features'], 'common.py')
    page = making.page(['proxynca_loss'], making.handout(['proxynca_loss']))
    assert 'More functions end in `raise NotImplementedError`: `proxynca_pp_loss`.' in page


def test_weeks_in_the_readme_are_those_of_the_exercises():
    page = (ROOT / 'tests/course/README.md').read_text()
    for week in range(1, 9):
        row, = re.findall(rf'(?m)^\| {week} \|.*$', page)
        exercises = row.split('|')[4]
        assert {name for name, e in EXERCISES.items() if e.week == week} == {*re.findall('`(\\w+)`', exercises)}


# ---- the comparison


def test_the_comparison_detects_a_solution_that_only_passes_the_tests(monkeypatch):
    """The comparison reports the inputs that differ. The original has all points."""
    monkeypatch.setenv('OMP_NUM_THREADS', '1')
    grader = grading.Grader('utilization', 1)
    original = making.source('eval.py')
    (what, change), *_ = solutions.PASSING['utilization'].items()
    one = grader.grade(grading.read(grader.exercise, making.with_solution(original, ['utilization'], change).encode()))
    assert not one.failed and one.points == {'metrix_eq12': 4, 'comparison': 0}, what
    assert all(re.match(r'utilization of queries \[\d+, 3\] float32, examples \[[5-9]\d\d\d, 3\]', line)
               for line in one.differences), 'only where there are more examples'
    full = grader.grade(grading.read(grader.exercise, original.encode()))
    assert full.points == full.of and not full.why and not full.notes


@pytest.mark.parametrize('name', EXERCISES)
def test_a_seed_determines_the_calls_of_the_comparison(name):
    calls, same, others = (compare.random_calls(EXERCISES[name].sample, seed) for seed in (3, 3, 4))
    packed = [compare.packed(*call) for call in calls]
    assert packed == [compare.packed(*call) for call in same] != [compare.packed(*call) for call in others]
    assert len({compare.described(*call[:2]) for call in calls}) > 25
    assert len(compare.described(*calls[0][:2])) < 400


@pytest.mark.parametrize('dim', [3, 60, 669])
def test_perturbations_separate_duplicates_in_both_directions(dim):
    """The difference exceeds the error of float32: otherwise a maximum could select either duplicate."""
    z = np.random.default_rng(0).standard_normal((20, dim)).round(3)
    z[11] = z[4]
    gaps = []
    for number in range(30):
        one, other = (sandbox.unpack(compare.packed('f', dict(z=compare.Tensor(z, 'float32', 'unit')), 1, *move))[1][0]
                      for move in compare.moves(number))
        gaps.append([images[0] @ (images[4] - images[11]) for images in (one, other)])
        assert np.abs(one - other)[0].max() < 1e-5, 'other images are perturbed by about their floating-point error'
    assert (np.prod(gaps, axis=1) < 0).all() and (np.abs(gaps) > 1e-7).mean() > 0.9


def test_the_tolerance_depends_on_the_type():
    """The tolerance is relative to the largest value. Infinite values have to be infinite in both answers."""
    def answer(*values, types='torch.float32'):
        return [[], [types]], [np.array(values)]
    assert compare.differ(answer(100, 1), answer(100.05, 1.05), 'float32') == ''
    assert compare.differ(answer(100, 1), answer(100, 1.5), 'float64') == 'value: expected 1, got 1.5 at [1]'
    assert compare.differ(answer(np.inf, 1), answer(np.inf, 1), 'float64') == ''
    assert compare.differ(answer(1, 1), answer(1, np.nan), 'float32') == 'value: expected 1, got nan at [1]'
    assert 'types' in compare.differ(answer(1), answer(1, types='torch.float16'), 'float16')
    assert 'shapes' in compare.differ(answer(1), answer(1, 1), 'float32')
    assert compare.differ(answer(1), ('ValueError: no', []), 'float32') == 'ValueError: no'


def test_a_script_cannot_import_the_original(monkeypatch):
    """Modules with solutions cannot be imported, neither in the tests nor in the comparison. The attempt is
    reported."""
    monkeypatch.setenv('OMP_NUM_THREADS', '1')
    line = 'return torch.as_tensor(lam, dtype=torch.float64)'
    look = ('import sys, importlib.util\n'
            "    names = 'compare exercises grading handout making sandbox solutions eval'\n"
            '    found = [name for name in names.split() if name in sys.modules or importlib.util.find_spec(name)]\n'
            f'    assert not found\n    {line}')
    grader = grading.Grader('positivity_threshold', 0)
    for names in ("'compare", "'common compare"):
        text = METRIX.replace(line, look.replace("'compare", names))
        grade = grader.grade(grading.read(grader.exercise, text.encode()))
        assert sum(grade.points.values()) == (5 if names == "'compare" else 0), 'common can be imported'
        assert grade.notes == ['look at importlib, modules']


# ---- remarks and messages

@pytest.mark.parametrize('text, why', [
    (METRIX.replace('return pull + push\n', 'return pull +\n'), r'SyntaxError in line \d+: invalid syntax'),
    ('', 'submit the whole script: positivity_threshold is not in this file'),
    ('exit()', 'submit the whole script: positivity_threshold is not in this file'),
    ('\0', '.*null bytes')])
def test_the_reason_is_given_if_a_file_cannot_be_graded(text, why):
    script = grading.read(EXERCISES['positivity_threshold'], text.encode())
    assert re.fullmatch(why, script.why) and not script.text


def test_an_error_at_import_is_reported_once(submissions, tmp_path, capsys):
    (tmp_path / 'e.py').write_text('exit("early")\n' + METRIX)
    handout.main(['grade', 'positivity_threshold', str(tmp_path / 'e.py'), '--feedback', str(tmp_path / 'feedback')])
    assert 'in all 0/5 (SystemExit: early)' in capsys.readouterr().out
    text = (tmp_path / 'feedback/e.txt').read_text()
    assert text == 'positivity_threshold: 0 of 5 points\n\nSystemExit: early\n'


def test_other_changed_functions_are_reported_and_other_exercises_are_restored():
    """Changes of docstrings and layout are ignored. pair_labels is another exercise, and mix is not an exercise."""
    exercise = EXERCISES['positivity_threshold']
    text = METRIX.replace('    """lam x_i +', '    """Two').replace('x.index_select(0, i) + (1', 'x[i] + (1')
    text = making.stub_out(text, ['pair_labels', 'labelled_loss'])
    script = grading.read(exercise, text.encode())
    assert script.notes == ['also changed: mix']
    assert 'NotImplementedError' not in script.text and 'x[i] + (1' in script.text
    assert making.lines_of(script.text)[0] == making.lines_of(METRIX)[0]
    text = METRIX.replace('CUB = dict(dim=512', "CUB = dict(path='/home/me', dim=512")
    script = grading.read(exercise, text.encode())
    assert script.notes == ['look at /home/me', 'also changed: CUB']


def test_files_that_are_not_graded_are_listed(tmp_path, capsys):
    for path in ('anna/train_hse.py', 'ben/train_hse (1).py', 'carl.py', 'empty/x.txt', 'deep/er/x.py'):
        (tmp_path / path).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / path).write_text('')
    graded, others = grading.scripts_in([tmp_path], 'train_hse.py')
    assert [path.name for path in graded] == ['train_hse.py']
    assert {path.name for path in others} == {'train_hse (1).py', 'carl.py', 'x.py'}
    handout.main(['grade', 'hybrid_loss', str(tmp_path / 'empty')])
    handout.main(['grade', 'hybrid_loss', str(tmp_path / 'deep')])
    assert capsys.readouterr().out.splitlines() == [
        'empty: there is no .py file in this folder', 'deep: there is no .py file in this folder itself',
        'not graded: er/x.py']


# ---- points


@pytest.mark.parametrize('right, points', [
    ('by_hand gradient any half', dict(pa_eq1=3, pa_eq3=1)),
    ('by_hand gradient any', dict(pa_eq1=2, pa_eq3=1)),
    ('gradient any half', dict(pa_eq1=1, pa_eq3=1)),            # no worked example of Eq. (1) passes
    ('any half', dict(pa_eq1=1, pa_eq3=0))])
def test_if_no_worked_example_passes_the_other_tests_count_half(right, points):
    tests = {'by_hand': 'test_pa_eq1_by_hand', 'gradient': 'test_pa_eq3_closed_form_gradient',
             'any': 'test_pa_eq1_of_any_batch', 'half': 'test_pa_eq1_in_half_precision'}
    found, of = grading.points_of(list(tests.values()), [tests[word] for word in right.split()], 'proxynca_loss')
    assert found == points and of == dict(pa_eq1=3, pa_eq3=1)
