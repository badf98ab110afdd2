"""handout.py: starter code, grades, and the mistakes that grading must notice."""
import ast
from contextlib import redirect_stderr
from io import StringIO

import handout
import mistakes
import pytest
from exercises import EXERCISES
from handout import changed, functions, source

METRIX = source('train_metrix.py')
LINE = 'return torch.as_tensor(lam, dtype=torch.float64).logit()'


def stubs(text, names):
    return {name for name, node in functions(text, names).items()
            if ast.unparse(node.body[-1]) == 'raise NotImplementedError'}


def test_starter_code_has_stubs_for_the_exercise_and_later_ones():
    """The docstrings stay. Methods can be exercises, too."""
    files, kept = handout.handout(['proxynca_loss']), handout.handout(['proxynca_loss'], keep=True)
    both = {'proxynca_loss', 'proxynca_pp_loss'}
    assert stubs(files['train_proxynca_pp.py'], both) == both
    assert stubs(kept['train_proxynca_pp.py'], both) == {'proxynca_loss'}, 'with --keep, later exercises are solved'
    assert stubs(files['common.py'], ['Embedder.forward', 'retrieval_metrics']) == {'Embedder.forward'}, 'by week'
    node = functions(files['train_proxynca_pp.py'], both)['proxynca_loss']
    assert 'Eq. (1)' in ast.get_docstring(node) and len(node.body) == 2
    tests = [part.name for part in ast.parse(files['tests/papers/test_proxynca_pp.py']).body
             if getattr(part, 'name', '').startswith('test_')]
    assert tests and all('pa_eq1_' in test or 'pa_eq3_' in test for test in tests)
    assert {'common.py', 'tests/conftest.py', 'tests/worked.py'} <= files.keys()


def test_a_right_solution_passes_in_the_starter_code():
    """The tests of labelled_loss call ms, another exercise of its week."""
    files, name = handout.handout(['labelled_loss']), 'labelled_loss'
    solved = handout.replace_functions(files['train_metrix.py'], {
        name: handout.lines_of(METRIX, functions(METRIX, [name])[name])})
    tests, why = handout.results(EXERCISES[name], files, solved)
    assert len(tests) > 2 and not any(tests.values()) and not why


def reject(message, *argv):
    """A mistake in use ends in one line and exit code 2."""
    shown = StringIO()
    with pytest.raises(SystemExit) as ended, redirect_stderr(shown):
        handout.main([*map(str, argv)])
    assert ended.value.code == 2 and message in shown.getvalue().splitlines()[-1]


def test_starter_code_is_written_to_an_empty_folder_outside_the_project(tmp_path):
    handout.main(['make', str(tmp_path / 'a'), 'sampler', 'hybrid_loss'])
    page = (tmp_path / 'a/README.md').read_text()
    assert '`train_hse.py`: `hybrid_loss`' in page and '-k "test_sampler_"' in page
    for out, message in ((tmp_path / 'a', 'is not empty'), (handout.ROOT / 'runs/x', 'is in the project'),
                         (tmp_path / 'a/README.md/b', 'Not a directory')):
        reject(message, 'make', out, 'hybrid_loss')
    reject('--keep has no effect', 'make', tmp_path / 'b', 'hybrid_loss', '--flawed', 1, '--keep')


def test_a_folder_is_graded_with_a_table_and_texts(tmp_path, capsys):
    """Other exercises are restored: a student who did not write them loses no points."""
    (tmp_path / 'in/train_metrix.py').mkdir(parents=True)               # a folder, not a script
    wrong = changed(METRIX, ['positivity_threshold'], ('+ m', '- m'))
    for name, text in {'a': handout.stub_out(METRIX, ['ms', 'labelled_loss']), 'b': wrong,
                       'c': 'def f(:', 'd': METRIX.replace(LINE, f'import pytest; pytest.skip()\n    {LINE}'),
                       'e': '# \u2028, a line separator\n' + METRIX}.items():
        (tmp_path / f'in/{name}.py').write_text(text)
    handout.main(['grade', 'positivity_threshold', str(tmp_path / 'in'), '--csv', str(tmp_path / 'new/grades.csv'),
                  '--feedback', str(tmp_path / 'texts')])
    *lines, without = capsys.readouterr().out.splitlines()
    assert without == 'without a train_metrix.py: train_metrix.py'
    right, wrong, broken, skipped, separator = [line.split('/in/')[1] for line in lines]
    assert right == 'a.py: metrix_eq24 3/3, in all 3/3'
    assert wrong.startswith('b.py: metrix_eq24 ') and 'in all 3/3' not in wrong
    assert broken.startswith('c.py: metrix_eq24 0/3, in all 0/3 (SyntaxError')
    assert skipped == 'd.py: metrix_eq24 0/3, in all 0/3' and separator.endswith('in all 3/3')
    table = tmp_path / 'new/grades.csv'
    assert len(table.read_text().splitlines()) == 6
    text = next((tmp_path / 'texts').glob('positivity_threshold-*in-b.txt')).read_text()
    assert 'test_metrix_eq24_by_hand\n    AssertionError: Metrix Eq. (24), lambda 0.5' in text
    assert 'expected  0.77' in text
    (tmp_path / 'none').mkdir()
    for message, *argv in (('no such file', 'absent'), ('there is no train_metrix.py', 'none', '--csv', 'x.csv'),
                           ('exists already', 'in', '--csv', table), ('exists', 'in/a.py', '--feedback', table)):
        reject(message, 'grade', 'positivity_threshold', *(tmp_path / word if word[0] != '-' else word
                                                           for word in map(str, argv)))
    assert len(table.read_text().splitlines()) == 6 and not (tmp_path / 'x.csv').exists()


def test_tests_that_do_not_end_are_stopped(monkeypatch):
    monkeypatch.setattr(handout, 'LIMIT', 3)
    exercise, files = EXERCISES['positivity_threshold'], handout.handout(['positivity_threshold'], keep=True)
    found = handout.results(exercise, files, METRIX.replace(LINE, f'while True: pass\n    {LINE}'))
    assert found == ({}, 'no end after 3 seconds')


@pytest.mark.parametrize('name', EXERCISES)
def test_mistakes_and_solutions_fit_the_scripts(name):
    e = EXERCISES[name]
    text = source(e.script)
    assert functions(text, e.write.split()).keys() == {*e.write.split()} and len(mistakes.MISTAKES[name]) > 4
    for solution in [*mistakes.MISTAKES[name].values(), *mistakes.RIGHT.get(name, {}).values()]:
        ast.parse(other := changed(text, e.write.split(), solution))
        assert other != text


def test_flawed_scripts_are_complete_and_follow_from_the_seed(tmp_path):
    for out, seed in ('a', '1'), ('b', '1'), ('c', '2'):
        handout.main(['make', str(tmp_path / out), '--flawed', seed, 'proxy_anchor_loss', 'triplet_loss'])
    a, b, c = ({path.name: path.read_text() for path in (tmp_path / out).iterdir()} for out in 'abc')
    assert a == b != c and a['train_proxy_anchor.py'] != source('train_proxy_anchor.py')
    assert sorted(a) == ['LICENSE', 'README.md', 'common.py', 'requirements.txt', 'train_proxy_anchor.py',
                         'train_triplet.py']
    reject('one script', 'make', tmp_path / 'd', '--flawed', 1, 'hybrid_loss', 'epshn_loss')
