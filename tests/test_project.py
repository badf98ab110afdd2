"""The structure of the project: what a script needs, imports, words that common.py must not contain."""
import re

import equations
import pytest
import worker
from cases import CASES
from conftest import ROOT, SCRIPTS


def lacks(script):
    """Yields what is missing for a script of a paper"""
    file, test_file, case = f'{script}.py', f'tests/papers/test_{script.removeprefix("train_")}.py', CASES.get(script)
    if not (ROOT / test_file).exists():
        yield f'a test file, {test_file}'
    if not case:
        yield 'an entry in tests/papers/cases.py: losses, steps, recipes'
    else:
        yield from (f'{field} in its entry of cases.py' for field in ('losses', 'steps') if not getattr(case, field))
    for dataset in ('cub', 'cars', 'sop', 'inshop'):
        if dataset not in __import__(script).DEFAULTS:
            yield f'a recipe for {dataset} in DEFAULTS'
        elif case and not re.search(rf'(?m)^ *{dataset} ', case.recipes):
            yield f'{dataset} among the recipes in its entry of cases.py'
    if not equations.NAMED.search(equations.heads()[file]):
        yield 'the name of its paper, as in `Metrix Eq. (4)`, in its docstring'
    at_lines = {equation for equation, places in equations.lines().items() if file in {place[0] for place in places}}
    reasons = {number for number, (*_, why) in equations.formulas()[1].items() if why}
    in_head = equations.cited(equations.heads()[file], file) - reasons
    yield from (f'a line with Eq. ({n}) of {paper}, which its docstring names'
                for paper, n in sorted(in_head - at_lines))
    yield from (f'a test named test_{paper}_eq{n}_..., for the line with Eq. ({n})'
                for paper, n in sorted(at_lines - equations.tests().keys()))


def test_every_script_has_what_a_script_of_a_paper_needs():
    """The failure lists all that is missing; .github/CONTRIBUTING.md explains how to add it."""
    missing = [f'{script}.py lacks {what}' for script in SCRIPTS for what in lacks(script)]
    if missing:
        pytest.fail('\n'.join(missing), pytrace=False)


def test_importing_has_no_effect(tmp_path):
    names = ['common', 'eval', *SCRIPTS]
    assert worker.finish(worker.start(worker.import_all, names, where=tmp_path), tmp_path) == ['']
    assert [path.name for path in tmp_path.iterdir()] == ['output-0']


def test_common_names_no_method():
    text = (ROOT / 'common.py').read_text().lower()
    for word in ('contrastive', 'proxy', 'proxies', 'mixup', 'species', 'hybrid', 'miner', *SCRIPTS):
        assert word not in text, f'common.py says {word!r}'


@pytest.mark.parametrize('name', ['common', 'eval', *SCRIPTS])
def test_no_script_imports_another(name):
    assert not re.search(r'^\s*(from|import) +train_', (ROOT / f'{name}.py').read_text(), re.M)
