"""The shape of the project: what imports what, which words stand where, how long functions are."""
import ast
import re

import pytest
import worker
from conftest import ROOT, SCRIPTS


def test_importing_has_no_effect(tmp_path):
    names = ['common', 'eval', *SCRIPTS]
    assert worker.finish(worker.start(worker.import_all, names, where=tmp_path), tmp_path) == ['']
    assert [path.name for path in tmp_path.iterdir()] == ['output-0']


def test_common_names_no_method():
    text = (ROOT / 'common.py').read_text().lower()
    for word in ('contrastive', 'proxy', 'proxies', 'mixup', 'species', 'hybrid', 'miner', 'similarity loss'):
        assert word not in text, f'common.py says {word!r}'


@pytest.mark.parametrize('name', ['common', 'eval', *SCRIPTS])
def test_functions_are_short_and_a_script_begins_with_its_loss_and_imports_no_other(name):
    text = (ROOT / f'{name}.py').read_text()
    functions = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
    first = {f: f.body[1 if ast.get_docstring(f) else 0].lineno for f in functions}            # after the docstring
    assert [f.name for f in functions if f.end_lineno - first[f] >= 45] == []
    assert not re.search(r'^\s*(from|import) +train_', text, re.M)
    if name in SCRIPTS:
        assert min(f.lineno for f in functions if 'loss' in f.name) <= 60
        assert text.startswith(f'"""{name}.py -- ')
        assert text.endswith("if __name__ == '__main__':\n    common.cli(main)\n")
