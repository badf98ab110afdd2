"""Each numbered equation of the papers has a line and a test, which tests/equations.py finds.
"""
import equations


def test_every_equation_of_the_five_papers_has_lines_or_a_reason_and_a_test():
    found, lines, tests = equations.formulas()[1], equations.lines(), equations.tests()
    assert not (lines.keys() | tests.keys()) - found.keys(), 'no such equation'
    for number, (*_, why) in found.items():
        assert bool(why) != (number in lines), f'{number}: either lines or a reason'
        assert number in tests or 'left out' in why, f'{number} has no test'


def test_the_page_is_current():
    assert equations.PAGE.read_text() == equations.page(), 'run: python tests/equations.py --page'
