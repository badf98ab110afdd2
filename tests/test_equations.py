"""Each numbered equation of the papers has a line and a test, which tests/equations.py finds.
"""
import ast
import re

import equations


def test_every_equation_of_the_five_papers_has_lines_or_a_reason_and_a_test():
    found, lines, tests = equations.formulas()[1], equations.lines(), equations.tests()
    assert not (lines.keys() | tests.keys()) - found.keys(), 'no such equation'
    for number, (*_, why) in found.items():
        assert bool(why) != (number in lines), f'{number}: either lines or a reason'
        assert number in tests or 'left out' in why, f'{number} has no test'


def test_the_page_has_the_names_of_functions_and_of_their_variables():
    """A name on the page is in one of the functions that compute the equation."""
    for number, places in equations.lines().items():
        functions = ''
        for file, _, function, _ in places:
            assert function, f'{number}: a line of {file} outside of functions is said to compute it'
            source = (equations.ROOT / file).read_text()
            functions += ''.join(ast.get_source_segment(source, node) for node in ast.walk(ast.parse(source))
                                 if isinstance(node, ast.FunctionDef) and node.name == function)
        _, _, letters, _ = equations.formulas()[1][number]
        for name in re.findall(r'[A-Za-z_]\w*', ' '.join(re.findall('`(.*?)`', letters))):
            assert re.search(rf'\b{name}\b', functions), f'{number}: {name} is not in the code'


def test_the_page_is_current():
    assert equations.PAGE.read_text() == equations.page(), 'run: python tests/equations.py --page'
