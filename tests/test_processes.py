"""Several processes, as torchrun starts them, train the network that one process trains."""
import os
import socket
import subprocess
import sys

import pytest
import torch
from conftest import ROOT, SCRIPTS

import common
import train_ms


@pytest.fixture(scope='module')
def trained(folder, tmp_path_factory):
    """Folders of the runs by one process, and by two at once"""
    one, two = tmp_path_factory.mktemp('one'), tmp_path_factory.mktemp('two')
    with socket.socket() as probe:
        probe.bind(('127.0.0.1', 0))
        port = str(probe.getsockname()[1])
    started = []
    for where, rank, size in ((one, 0, 1), (two, 0, 2), (two, 1, 2)):
        env = os.environ | dict(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR='127.0.0.1',
                                MASTER_PORT=port, OMP_NUM_THREADS='1',
                                PYTHONPATH=os.pathsep.join([str(ROOT), str(ROOT / 'tests')]))
        started.append(subprocess.Popen([sys.executable, ROOT / 'tests' / 'worker.py', folder], cwd=where, env=env,
                                        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
    outputs = [process.communicate(timeout=300)[0] for process in started]
    assert not any(process.returncode for process in started), '\n'.join(outputs)
    return one, two, outputs


def weights(run):
    saved = torch.load(run / 'last.pt', weights_only=True)
    learned = {f'learned.{name}': value for name, value in saved['learned'].items()}
    return {**saved['model'], **learned}, saved['rows']


@pytest.mark.parametrize('script', SCRIPTS)
def test_ten_updates_by_two_processes_are_those_of_one(trained, script):
    """In float64; the rows of the evaluations as well, whose features are shared, too."""
    one, two, _ = trained
    (expected, rows), (found, other_rows) = weights(one / 'runs' / script), weights(two / 'runs' / script)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-9)
    assert len(rows) == len(other_rows) > 1
    for row, other in zip(rows, other_rows):
        assert {key: row[key] for key in ('R@1', 'RP', 'MAP@R')} == \
            pytest.approx({key: other[key] for key in ('R@1', 'RP', 'MAP@R')}, abs=1e-6)
        assert row['loss'] == pytest.approx(other['loss'], abs=1e-9)


@pytest.mark.parametrize('script', SCRIPTS)
def test_the_gradient_of_a_step_in_float32(trained, script):
    """With a learning rate of 1 and plain gradient descent, weights differ by as much as gradients."""
    one, two, _ = trained
    expected, found = weights(one / 'runs' / f'{script}-step')[0], weights(two / 'runs' / f'{script}-step')[0]
    before = weights(one / 'runs' / script)[0]
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-5)
    assert any((value - before[name]).abs().max() > 1e-4 for name, value in expected.items())


def test_the_main_process_prints_and_writes(trained):
    _, two, outputs = trained
    assert outputs[1].count('R@1 = ') == 14 and 'R@1' not in outputs[2]
    assert sorted(path.name for path in (two / 'runs').iterdir()) == sorted(
        name + end for name in SCRIPTS for end in ('', '-step'))
    assert not list(two.glob('runs/*/*.tmp'))


def test_processes_on_a_cpu_need_frozen_batchnorm(small, monkeypatch):
    args = train_ms.get_args(['--device', 'cpu'])
    monkeypatch.setattr(common, 'world', lambda: 2)
    with pytest.raises(common.UsageError, match='several processes on a CPU.*take --freeze-bn'):
        common.build(args)
