"""A copy of a script with another name and another loss works like the seven scripts."""
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT

import common
import eval as evaluation
import train_proxy_anchor

FLAGS = '--image-size 32 --batch-size 8 --per-class 2 --dim 8 --device cpu'


@pytest.fixture
def mine(folder, small, tmp_path, monkeypatch):
    """main of train_mine.py, which is not in the directory of common.py; the working directory is a third one."""
    text = (ROOT / 'train_proxy_anchor.py').read_text()
    call = 'proxy_anchor_loss(z, labels, proxies, args.alpha, args.delta)'
    assert text.count(call) == 1
    text = text.replace(call, 'F.cross_entropy(args.scale * z @ proxies.T, labels)')
    parser = 'parser = common.parser(__doc__, NOTES, __file__)'
    assert text.count(parser) == 1
    text = text.replace(parser, parser + "\n    parser.add_argument('--scale', type=float, default=3.0)")
    (tmp_path / 'copies').mkdir()
    text = text.split('"""', 2)[2]                     # without docstring and NOTES
    text, notes = re.subn('NOTES = """.*?"""', 'NOTES = ""', text, flags=re.DOTALL)
    assert notes == 1
    (tmp_path / 'copies' / 'train_mine.py').write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path / 'copies'))
    monkeypatch.delitem(sys.modules, 'train_mine', raising=False)
    script = __import__('train_mine')
    yield lambda *flags: script.main([*FLAGS.split(), '--dataset', 'folder', '--data', str(folder), *flags])
    del sys.modules['train_mine']


def test_a_copied_script_trains_resumes_and_is_evaluated_under_its_own_name(mine, capsys):
    assert mine('--epochs', '1')['epoch'] == 1
    assert 'python train_mine.py --resume runs/mine-folder-1' in capsys.readouterr().out
    assert sys.modules['train_mine'].main(['--resume', 'runs/mine-folder-1', '--epochs', '2'])['epoch'] == 2
    saved = common.read_checkpoint('runs/mine-folder-1')
    assert saved['script'] == 'train_mine' and saved['args']['scale'] == 3
    # With the name of the original and another seed, it would be averaged with the runs of the original.
    torch.save(saved | dict(script='train_proxy_anchor', args=saved['args'] | dict(seed=1)), 'other.pt')
    rows = evaluation.main(['--checkpoint', 'runs/mine-folder-1', 'other.pt', '--device', 'cpu'])['rows']
    assert [row['recipe'] for row in rows] == ['mine', 'proxy_anchor'], 'not two seeds of one recipe'
    with pytest.raises(common.UsageError, match='runs/mine-folder-1 was made by train_mine.py'):
        train_proxy_anchor.main(['--resume', 'runs/mine-folder-1'])


def test_a_new_script_of_a_paper_is_found(tmp_path):
    """equations.py finds a new paper by the equations in the docstring of its script; without any, it finds none."""
    ignored = shutil.ignore_patterns('.*', 'runs', 'cache', 'data', 'assets')
    project = Path(shutil.copytree(ROOT, tmp_path / 'project', ignore=ignored))
    copy = (ROOT / 'train_ms.py').read_text().replace('Metrix Eq. (2)', 'Mine Eq. (31)')
    outputs = []
    for text in ('', 'def loss():\n    return 0    # Eq. (1)\n', copy):
        (project / 'train_mine.py').write_text(text)
        printed = subprocess.check_output([sys.executable, project / 'tests/equations.py'], text=True)
        outputs.append(set(printed.splitlines()))
    new, = outputs[2] - outputs[0]
    assert outputs[0] == outputs[1] and re.fullmatch(r'mine   \(31\) +train_mine.py:[\d,]+', new)
