"""Errors at the command line: one line, an exit code, and no lost epoch."""
import shutil
import signal
import subprocess
import sys
from unittest.mock import Mock

import pytest
import torch
from conftest import ROOT

import common
import train_ms


@pytest.mark.parametrize('error, code, line', [
    (common.UsageError('no /torch_2/ here: try another'), 2, 'error: no /torch_2/ here: try another\n'),
    (OSError(28, 'No space left', '/torch_2/x'), 2, "error: [Errno 28] No space left: '/torch_2/x'\n"),
    (KeyboardInterrupt(), 130, ''), (ValueError('a bug'), None, ''), (RuntimeError('/torch_2/ is a bug'), None, '')])
def test_an_error_is_one_line_and_an_exit_code_or_keeps_its_traceback(capsys, error, code, line):
    with pytest.raises(SystemExit if code else type(error)) as stop:
        common.cli(Mock(side_effect=error))
    assert getattr(stop.value, 'code', None) == code and capsys.readouterr().err == line


def test_a_script_does_not_round_to_tf32(monkeypatch):
    """TF32 errs by 1e-3 in a cosine."""
    monkeypatch.setattr(torch.backends.cudnn, 'benchmark', False)
    torch.set_float32_matmul_precision('high')
    common.cli(lambda: None)
    assert torch.get_float32_matmul_precision() == 'highest'


def test_a_test_image_that_cannot_be_read_is_named_and_with_a_fold_no_test_image_is_read(run, small, folder, capsys):
    """The error is one of a worker process, and comes with its traceback."""
    shutil.copytree(folder, 'x')
    common.Path('x/test/car0/1.jpg').write_bytes(b'no image')
    with pytest.raises(SystemExit, match='2'):
        common.cli(lambda: run(train_ms, '--data', 'x', '--workers', '1'))
    *_, line = capsys.readouterr().err.splitlines()
    assert line.startswith('error: cannot read the image x/test/car0/1.jpg: cannot identify')
    run(train_ms, '--data', 'x', '--fold', '1/3', '--name', 'fold')
    assert common.read_checkpoint('runs/fold')['classes'][-2:] == ['bird2', 'bird3'], 'validation classes are seen, too'


@pytest.mark.slow
def test_ctrl_c_in_a_real_process_loses_no_epoch_that_was_printed(folder, tmp_path):
    flags = '--dataset folder --epochs 500 --batch-size 8 --workers 0 --device cpu --name x'
    # A shell lets background jobs ignore SIGINT, and children inherit that: the default is restored.
    process = subprocess.Popen([sys.executable, ROOT / 'train_ms.py', *flags.split(), '--data', folder], cwd=tmp_path,
                               text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                               preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
    output = ''
    for line in process.stdout:
        output += line
        if line.startswith('epoch 1 '):
            process.send_signal(signal.SIGINT)
            assert common.read_checkpoint(tmp_path / 'runs/x')['epoch'] >= 1
    assert process.wait(timeout=30) == 130 and 'Traceback' not in output, output
