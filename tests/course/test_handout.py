"""handout.py: starter code, grades, and the mistakes that grading must notice."""
import ast
import csv

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
    assert len(tests) > 2 and all(tests.values()) and not why


def test_starter_code_is_written_to_an_empty_folder(tmp_path):
    handout.main(['make', str(tmp_path / 'a'), 'sampler', 'hybrid_loss'])
    page = (tmp_path / 'a/README.md').read_text()
    assert '`train_hse.py`: `hybrid_loss`' in page and '-k "test_sampler_"' in page
    with pytest.raises(SystemExit, match='is not empty'):
        handout.main(['make', str(tmp_path / 'a'), 'hybrid_loss'])


def test_submissions_are_graded_with_a_table(tmp_path, capsys):
    """Other exercises are restored. The wrong submission is right for beta = gamma, the last parameters of a test."""
    texts = {'restored': handout.replace_functions(METRIX, {'ms': ['def ms(t=1 / 0):', '    pass']}),
             'broken': 'def f(:', 'other': 'def f(): pass',
             'wrong': changed(METRIX, ['positivity_threshold'], ('beta + gamma', '2 * gamma')),
             'skipped': METRIX.replace(LINE, f'import pytest; pytest.skip()\n    {LINE}')}
    for name, text in texts.items():
        (tmp_path / f'{name}.py').write_text(text)
    handout.main(['grade', 'positivity_threshold', *(str(tmp_path / f'{name}.py') for name in [*texts, 'absent'])])
    head, restored, broken, other, wrong, skipped, absent = csv.reader(capsys.readouterr().out.splitlines())
    assert head == ['file', 'points', 'of', 'failed'] and restored == [str(tmp_path / 'restored.py'), '3', '3', '']
    assert [row[1:3] for row in (broken, other, skipped, absent)] == 4 * [['0', '3']]
    assert 'SyntaxError' in broken[3] and 'ImportError' in other[3] and 'FileNotFoundError' in absent[3]
    assert wrong[1] == '1' and 'test_metrix_eq24_by_hand' in wrong[3]


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
    with pytest.raises(ValueError, match='does not occur once'):
        changed(text, e.write.split(), ('a text of no script', ''))


def test_flawed_scripts_are_complete_and_follow_from_the_seed(tmp_path):
    for out, seed in ('a', '1'), ('b', '1'), ('c', '2'):
        handout.main(['make', str(tmp_path / out), '--flawed', seed, 'proxy_anchor_loss', 'triplet_loss'])
    a, b, c = ({path.name: path.read_text() for path in (tmp_path / out).iterdir()} for out in 'abc')
    assert a == b != c and a['train_proxy_anchor.py'] != source('train_proxy_anchor.py')
    assert sorted(a) == ['LICENSE', 'README.md', 'common.py', 'requirements.txt', 'train_proxy_anchor.py',
                         'train_triplet.py']
    with pytest.raises(SystemExit, match='one script'):
        handout.main(['make', str(tmp_path / 'd'), '--flawed', '1', 'hybrid_loss', 'epshn_loss'])
