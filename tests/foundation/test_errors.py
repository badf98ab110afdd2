"""Usage errors and failures of the machine: a one-line message, an exit code, and no lost epoch."""
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from functools import partial
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from conftest import ROOT, log_of

import common
import train_ms
from common import UsageError

MEMORY = 'the processes that read images ran out of memory, .*; try --workers 0'


@pytest.mark.parametrize('error, code, text', [
    (UsageError('no such thing'), 2, 'no such thing'), (KeyboardInterrupt(), 130, 'stopped'),
    (OSError(28, 'No space left'), 2, 'No space left'), (MemoryError(), 2, 'MemoryError'),
    (torch.OutOfMemoryError('2\nGiB'), 2, '2 GiB'), (RuntimeError("can't allocate memory"), 2, "can't allocate memory"),
    (RuntimeError('Caught\nDataLoader worker (pid 7) is killed by signal: Killed. '), 2, MEMORY),
    (RuntimeError('unable to write to file </torch_7_1>: No space left on device (28)'), 2, MEMORY),
    (RuntimeError('received 0 items of ancdata'), 2, MEMORY)])
def test_an_error_ends_in_one_line_and_exit_code_2_and_ctrl_c_in_130(capsys, error, code, text):
    with pytest.raises(SystemExit) as stop:
        common.cli(Mock(side_effect=error))
    message = capsys.readouterr().err
    assert stop.value.code == code and re.search(text, message) and message.count('\n') == 1


@pytest.mark.parametrize('closed', [True, False])
def test_a_script_runs_without_standard_output_and_with_the_stream_of_a_notebook(run, small, monkeypatch, closed):
    written = []
    bare = SimpleNamespace(write=written.append, flush=lambda: None)
    monkeypatch.setattr(sys, 'stdout', None if closed else bare)
    common.cli(partial(run, train_ms, '--name', 'mine'))
    assert common.read_checkpoint('runs/mine')['epoch'] == 1 and bool(written) != closed


@pytest.mark.parametrize('bug', [KeyError('x'), torch.linalg.LinAlgError('x'), ValueError('x'), RuntimeError('x')])
def test_a_bug_keeps_its_traceback(bug):
    with pytest.raises(type(bug)):
        common.cli(Mock(side_effect=bug))


def test_a_closed_pipe_loses_no_epoch(run, small, folder, monkeypatch, capsys):
    """An epoch is saved before it is printed. A terminal that cannot encode a letter does not stop the run."""
    common.Path('Vögel').symlink_to(folder)
    end, start = os.pipe()
    os.close(end)
    with suppress(BrokenPipeError), open(start, 'w', encoding='ascii') as out, pytest.raises(SystemExit):
        monkeypatch.setattr(sys, 'stdout', out)
        common.cli(partial(run, train_ms, '--data', 'Vögel', '--name', 'mine'))
    assert capsys.readouterr().err.startswith('error: [Errno 32] Broken pipe')
    assert common.read_checkpoint('runs/mine')['epoch'] == 0 and len(log_of('mine')) == 1


@pytest.mark.slow
def test_ctrl_c_in_a_real_process_keeps_the_checkpoint(folder, tmp_path):
    flags = '--dataset folder --epochs 500 --image-size 32 --batch-size 8 --per-class 2 --dim 8 --device cpu --name x'
    # a shell lets background jobs ignore SIGINT, and children inherit that: restore the default
    process = subprocess.Popen([sys.executable, ROOT / 'train_ms.py', *flags.split(), '--data', folder], cwd=tmp_path,
                               text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                               preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
    log, deadline = tmp_path / 'runs/x/log.jsonl', time.time() + 60
    while not (log.exists() and len(log.read_text().splitlines()) > 1) and time.time() < deadline:
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    output = process.communicate(timeout=30)[0]
    assert process.returncode == 130 and '--resume runs/x' in output and 'Traceback' not in output, output
    assert common.read_checkpoint(tmp_path / 'runs/x')['epoch'] >= 1
