"""Each numbered equation of the papers has a line and a test, which tests/equations.py finds. See also test_project.py.
"""
import re

import equations
import pytest
from conftest import ROOT


def test_every_equation_of_the_five_papers_has_lines_or_a_reason_and_a_test():
    found, lines, tests = equations.formulas()[1], equations.lines(), equations.tests()
    assert not (lines.keys() | tests.keys()) - found.keys(), 'no such equation'
    for number, (*_, why) in found.items():
        assert bool(why) != (number in lines), f'{number}: either lines or a reason'
        assert number in tests or 'left out' in why, f'{number} has no test'


def test_formulas_have_balanced_braces_and_only_macros_that_github_typesets():
    known = {*'Delta alpha aligned arg begin beta cap cases cdot cup delta dfrac dots ell end exp frac gamma in lVert '
             'lambda le left ln log mathcal max min mu neq partial phi prime qquad quad rVert rho right sigma sim sum '
             'tau text theta tilde top widetilde'.split()}
    for number, (_, tex, *_) in equations.formulas()[1].items():
        bare = re.sub(r'\\[{}]', '', tex)
        assert tex and bare.count('{') == bare.count('}') and tex.count('\\left') == tex.count('\\right'), number
        assert {*re.findall(r'\\([A-Za-z]+)', tex)} <= known, number


def test_the_page_is_current():
    assert equations.PAGE.read_text() == equations.page(), 'run: python tests/equations.py --page'


def test_one_equation_is_printed_with_its_lines_and_tests(capsys):
    equations.main(['metrix', '24'])
    first, _, _, place, code, *rest = capsys.readouterr().out.splitlines()
    assert first == 'metrix (24): threshold of positivity'
    file, line = place.split(':')
    assert code == (ROOT / file).read_text().splitlines()[int(line) - 1] and '.logit() / (beta + gamma) + m' in code
    assert any('test_metrix_eq24_' in text for text in rest)
    with pytest.raises(SystemExit):
        equations.main(['rc', '5'])
