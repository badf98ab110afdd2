"""Checkpoints, weights, and files that are written whole or not at all."""
import os
import pickle
import platform
import subprocess
import sys
from functools import partial

import numpy as np
import pytest
import torch
import torchvision
from conftest import small_embedder
from PIL import Image

import common
import train_ms
from common import Embedder, UsageError

# ---- checkpoints and weights

def checkpoint(path, **options):
    model = small_embedder(**options).eval()
    args = train_ms.get_args(['--seed', '7', '--image-size', '32', '--resize', '40'])
    common.save_checkpoint(path, args, model, classes=['a', 'b'])
    return model


@pytest.mark.parametrize('options', [
    dict(layer_norm=True), dict(normalize=False), dict(arch='resnet34'), dict(pool='max', head_init='default')])
def test_a_checkpoint_builds_the_network_that_it_is_of(tmp_path, small, options):
    model = checkpoint(tmp_path / 'x.pt', **options)
    again = common.load_checkpoint(tmp_path / 'x.pt', precision='fp32')
    x = torch.randn(2, 3, 32, 32)
    assert torch.equal(model(x), again(x)) and options.items() <= again.config.items() and again.classes == ['a', 'b']
    saved = common.read_checkpoint(tmp_path / 'x.pt')
    assert saved['seed'] == 7 and saved['versions'] == dict(
        python=platform.python_version(), torch=torch.__version__, torchvision=torchvision.__version__)
    for precision in ('fp32', 'bf16'):
        assert common.load_checkpoint(tmp_path / 'x.pt', precision=precision).precision == precision


def test_weights_from_a_file_and_weights_that_do_not_fit(tmp_path):
    """Torchvision's, with or without their last layer; or a checkpoint, whose head is not taken"""
    trunk = checkpoint(tmp_path / 'x.pt').trunk.state_dict()
    torch.save(trunk | {'fc.weight': torch.zeros(1000, 512), 'fc.bias': torch.zeros(1000)}, tmp_path / 'whole.pth')
    torch.save({name: value.half() for name, value in trunk.items()}, tmp_path / 'half.pth')
    torch.save({name: value for name, value in trunk.items() if name != 'conv1.weight'}, tmp_path / 'cut.pth')
    for file, tolerance in (('whole.pth', 0), ('half.pth', 1e-3), ('x.pt', 0)):
        model = Embedder('resnet18', 16, weights=str(tmp_path / file))
        for name, value in model.trunk.state_dict().items():
            torch.testing.assert_close(value, trunk[name], rtol=tolerance, atol=tolerance)
    for arch, file in (('resnet34', 'whole.pth'), ('resnet18', 'cut.pth')):
        with pytest.raises(UsageError, match=f'{file} cannot be used; is it damaged, or of another') as raised:
            Embedder(arch, weights=str(tmp_path / file))
        assert '\n' not in str(raised.value)


def test_a_checkpoint_cuts_the_crop_of_its_evaluation_from_any_picture(small, tmp_path):
    checkpoint(tmp_path / 'x.pt')
    transform = common.load_checkpoint(tmp_path / 'x.pt').transform
    half = np.zeros((40, 80), dtype=np.uint8)
    half[:, 24:40] = 255                                        # 40 px high: the left half of the centre crop is white
    x, white = transform(Image.fromarray(half)), (torch.arange(32) < 16).float().expand(3, 32, 32)
    assert x.shape == (3, 32, 32) and torch.allclose(common.as_pictures(x), white, atol=1e-6)
    turned = Image.fromarray(np.rot90(half).copy())
    turned.getexif()[0x0112] = 6                                # to be shown turned
    assert torch.equal(transform(turned), x)


def test_a_checkpoint_embeds_a_picture_as_the_run_did(run, folder):
    """With a real ResNet"""
    run(train_ms, '--name', 'mine', '--precision', 'fp32')
    model = common.load_checkpoint('runs/mine/last.pt', precision='fp32')
    z = common.embed(model, common.load_dataset('folder', folder, 32, 32, 'cache').query)
    with torch.no_grad():
        alone = model(model.transform(Image.open(folder / 'test/car0/0.jpg'))[None])
    assert z.dtype == torch.float32 and torch.allclose(alone[0], z[0], atol=1e-4)
    assert model.args['dataset'] == 'folder' and model.classes == [f'bird{i}' for i in range(6)]
    torch.nn.Linear(16, 2)(z).sum().backward()              # embeddings are tensors that can be learned from


class Malicious:
    def __reduce__(self):
        return os.system, ('touch hacked',)


@pytest.mark.parametrize('save', [partial(pickle.dump, protocol=2), torch.save])
def test_a_malicious_pickle_is_not_opened(tmp_path, monkeypatch, save):
    monkeypatch.chdir(tmp_path)
    with open('evil.pt', 'wb') as file:
        save(Malicious(), file)
    with pytest.raises(UsageError, match='evil.pt'):
        common.load_checkpoint('evil.pt')
    assert not os.path.exists('hacked')


# ---- what is written

@pytest.mark.parametrize('error', [OSError(28, 'No space left on device'), RuntimeError('No space left: torch.save')])
def test_a_full_disk_leaves_the_old_file_intact(tmp_path, error):
    (tmp_path / 'old').write_text('precious')
    with pytest.raises(UsageError, match='No space left.*unharmed'):
        with common.written_whole(tmp_path / 'old') as file:
            file.write(b'half')
            raise error
    assert (tmp_path / 'old').read_text() == 'precious' and not list(tmp_path.glob('*.tmp'))


@pytest.mark.parametrize('error', [None, RuntimeError('PytorchStreamWriter failed writing file')])
def test_ctrl_c_while_a_file_is_written_is_ctrl_c(tmp_path, error):
    """torch.save turns it into an error of its own when it comes in the middle of a write."""
    (tmp_path / 'old').write_text('precious')
    with pytest.raises(KeyboardInterrupt):
        with common.written_whole(tmp_path / 'old') as file:
            try:
                file.write(b'half')
                raise KeyboardInterrupt
            finally:
                if error:
                    raise error
    assert (tmp_path / 'old').read_text() == 'precious' and not list(tmp_path.glob('*.tmp'))


def test_a_reader_of_stdout_that_leaves_is_no_fault_of_the_file(tmp_path):
    with pytest.raises(BrokenPipeError), common.written_whole(tmp_path / 'x'):
        raise BrokenPipeError


def test_a_closed_stdout_ends_no_run(monkeypatch):
    monkeypatch.setattr(sys, 'stdout', None)
    common.cli(lambda: print('nobody reads this'))
    assert sys.stdout.name == os.devnull


@pytest.mark.slow
def test_what_a_killed_process_left_of_a_file_is_removed_by_the_next_that_writes_it(tmp_path):
    """But not what a living process still writes, or one of another machine, and nothing of other files."""
    gone = subprocess.Popen([sys.executable, '-c', ''])
    gone.wait()
    here = platform.node()
    kept = [f'x.bin.{here}.{os.getppid()}.tmp', f'y.bin.{here}.{gone.pid}.tmp', f'x.bin.other.{gone.pid}.tmp',
            f'{gone.pid}.tmp', 'x.bin.tmp', f'x.bin.{here}.mine.tmp', f'x.bin.{here}.{gone.pid}']
    for name in (*kept, f'x.bin.{here}.{gone.pid}.tmp'):
        (tmp_path / name).touch()
    with common.written_whole(tmp_path / 'x.bin') as file:
        file.write(b'whole')
    assert {path.name for path in tmp_path.iterdir()} == {*kept, 'x.bin'}


def test_what_a_killed_process_left_is_put_in_order(run, small):
    """A row that the log lost, and one that no checkpoint knows"""
    run(train_ms, '--name', 'my [best] run', '--epochs', '2', '--steps', '0')
    log = common.Path('runs/my [best] run/log.jsonl')
    whole = log.read_text()
    for left in (whole.split('\n')[0] + '\n', whole + whole.split('\n')[2].replace('"epoch": 2', '"epoch": 3'), '{"ep'):
        log.write_text(left)
        train_ms.main(['--resume', 'runs/my [best] run', '--device', 'cpu'])
        assert log.read_text() == whole
    assert os.listdir('runs') == ['my [best] run']
