"""Each numbered equation of the papers has a line and a test, which tests/equations.py finds. See also test_project.py.
"""
import re

import equations
import pytest
from conftest import ROOT


def test_every_equation_of_the_five_papers_has_lines_or_a_reason_and_a_test():
    lines, tests = equations.lines(), equations.tests()
    for paper, number in lines.keys() | tests.keys():
        assert number in equations.equations()[paper], f'{paper} has no equation ({number})'
    for paper in equations.SAYS:
        for number, (says, why) in equations.equations()[paper].items():
            assert bool(why) != ((paper, number) in lines), f'{paper} ({number}) {says}: either lines or a reason'
            assert (paper, number) in tests or 'left out' in why, f'{paper} ({number}) {says} has no test'


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
