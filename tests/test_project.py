"""The structure of the project: imports, and words that common.py must not contain."""
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
    for word in ('contrastive', 'proxy', 'proxies', 'mixup', 'species', 'hybrid', 'miner', *SCRIPTS):
        assert word not in text, f'common.py says {word!r}'


@pytest.mark.parametrize('name', ['common', 'eval', *SCRIPTS])
def test_no_script_imports_another(name):
    assert not re.search(r'^\s*(from|import) +train_', (ROOT / f'{name}.py').read_text(), re.M)
