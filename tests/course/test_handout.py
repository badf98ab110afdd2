"""handout.py: what a hand-out holds, points, and the check, of one quick exercise. `check` does all of them."""
import ast
import re

import handout
import pytest
import solutions
from conftest import ROOT
from handout import EXERCISES


def test_a_hand_out_has_docstrings_and_graded_tests_but_no_solution(tmp_path):
    assert handout.main(['make', str(tmp_path / 'out'), 'multi_similarity_loss', 'hybrid_loss']) is None
    files = {str(path.relative_to(tmp_path / 'out')): path.read_text() for path in (tmp_path / 'out').rglob('*.*')}
    assert set(files) == {'README.md', 'requirements.txt', 'common.py', 'train_ms.py', 'train_hse.py',
                          'tests/conftest.py', 'tests/worked.py', 'tests/papers/test_ms.py',
                          'tests/papers/test_hse.py'}
    for script, function in (('train_ms.py', 'mine'), ('train_hse.py', 'hybrid_loss'),
                             ('train_hse.py', 'multi_similarity_loss')):
        node, = handout.functions_of(files[script], [function])
        docstring, body = node.body
        assert ast.get_docstring(node) and ast.unparse(body) == 'raise NotImplementedError'
    assert 'def most_similar' in files['train_hse.py']
    node, = handout.functions_of(files['common.py'], ['retrieval_metrics'])
    assert len(node.body) > 2, 'it is no exercise here'
    tests = files['tests/papers/test_hse.py']
    assert 'def test_hse_eq9_' in tests and 'def test_epshn_' not in tests
    assert '`mine`' in files['README.md'] and '-k "metrix_eq2_"' in files['README.md']
    with pytest.raises(SystemExit, match='exists'):
        handout.make(tmp_path / 'out', ['hybrid_loss'])


def test_each_exercise_names_what_there_is():
    """Each function has a docstring, each graded word a test, and each solution fits the project's lines."""
    files = handout.handout(list(EXERCISES))
    for name, exercise in EXERCISES.items():
        for solution in (solutions.WRONG[name] | solutions.RIGHT[name]).values():
            assert handout.hand_in((ROOT / exercise.script).read_text(), exercise.cut.split(), solution)
        for script, functions in exercise.solutions.items():
            found = handout.functions_of((ROOT / script).read_text(), functions.split())
            assert len(found) == len(functions.split()) and all(ast.get_docstring(f) for f in found), script
        for node in handout.functions_of(files[exercise.script], exercise.cut.split()):
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
    assert '\nE           expected  ' in out, 'why it fails'
    assert out.endswith('1 exercises, 1 wrong solutions, 2 right ones: 1 not as they should be\n')

    text = (ROOT / 'train_metrix.py').read_text()
    for file, content in (('a.py', text), ('b.py', text.replace('.logit()', '.log()')), ('c.py', 'exit()')):
        (tmp_path / file).write_text(content)
    handout.main(['grade', 'positivity_threshold', *map(str, sorted(tmp_path.iterdir()))])
    right, wrong, broken = capsys.readouterr().out.splitlines()
    assert re.search(r'a.py: metrix_eq24 ([1-9])/\1, in all \1/\1$', right)
    assert re.search(r'b.py: metrix_eq24 0/[1-9], in all 0/[1-9]$', wrong)
    assert broken.endswith(' (no test was run, pytest ended with code 3: can the file be imported?)')
    monkeypatch.setattr(handout, 'LIMIT', 1)
    exercise = EXERCISES['positivity_threshold']
    found = handout.results(exercise, handout.handout(['positivity_threshold']), b'while True: pass')
    assert found == ({}, 'no end after 1 seconds')
