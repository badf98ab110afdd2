"""Each numbered equation of the papers has its line and its test; tests/equations.py finds them."""
import re

import equations
import pytest
from conftest import ROOT

NUMBERED = dict(rc=4, pa=6, metrix=25, ccl=14, hse=11)      # so many numbered equations each paper has
ALL = [(paper, number) for paper, last in NUMBERED.items() for number in range(1, last + 1)]


def test_every_equation_has_lines_or_a_reason_and_every_cited_one_has_a_test():
    assert {paper: len(says) for paper, says in equations.SAYS.items()} == NUMBERED
    lines, tests = equations.lines(), equations.tests()
    assert lines.keys() | tests.keys() <= set(ALL), 'an equation that its paper does not have'
    for paper, number in ALL:
        says, _, why = equations.SAYS[paper][number - 1].partition(' | ')
        assert bool(why) != ((paper, number) in lines), f'{paper} ({number}) {says}: lines, or a reason why none'
        assert (paper, number) in tests or 'left out' in why, f'{paper} ({number}) {says} has no test'


@pytest.mark.parametrize('file', equations.PAPER)
def test_equations_of_the_head_stand_in_the_code_too(file):
    """What the head of a script says of its own paper's equations also stands where they are computed."""
    head = re.match(r'""".*?"""', (ROOT / f'{file}.py').read_text(), re.S)[0]
    computed = {equation for equation, places in equations.lines().items() if f'{file}.py' in {p[0] for p in places}}
    named = {(paper, number) for paper, number in equations.cited(head, file) if paper == equations.PAPER[file]}
    assert named <= computed, 'these stand at no line'


def test_one_equation_is_printed_with_its_lines_and_tests(capsys):
    equations.main(['metrix', '24'])
    first, *places = capsys.readouterr().out.splitlines()
    assert first == 'metrix (24): threshold of positivity'
    file, line, _ = places[0].split(':', 2)
    text = (ROOT / file).read_text().splitlines()
    assert text[int(line) - 1].startswith('def positivity_threshold')
    assert any('test_metrix_eq24_' in place for place in places)
    with pytest.raises(SystemExit):
        equations.main(['rc', '5'])


def test_names_of_other_tests_do_not_match_minus_k_e_q():
    for path in (ROOT / 'tests').rglob('test_*.py'):
        for name in re.findall(r'^def (test_\w+)', path.read_text(), re.M):
            if path.name != 'test_equations.py':
                assert 'eq' not in name or re.match(r'test_[a-z]+_eq\d+_', name), f'{path.name}: {name}'
