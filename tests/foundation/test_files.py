"""Checkpoints, weights, and atomic writing of files."""
import os
import pickle
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import log_of, small_embedder
from PIL import Image

import common
import train_ms
from common import UsageError


def test_a_lack_of_memory_is_no_corrupted_file():
    for error in (MemoryError, torch.OutOfMemoryError):
        with pytest.raises(error), common.untrusted_file('x.pt'):
            raise error


def checkpoint(path, **options):
    model = small_embedder(**options).place(torch.device('cpu')).eval()
    args = train_ms.get_args(['--seed', '7', '--image-size', '32', '--resize', '40'])
    common.save_checkpoint(path, args, model, classes=['a', 'b'])
    return model


@pytest.mark.parametrize('options', [
    dict(layer_norm=True), dict(normalize=False), dict(arch='resnet34'), dict(pool='max')])
def test_a_loaded_checkpoint_is_the_saved_network(tmp_path, small, options):
    model = checkpoint(tmp_path / 'x.pt', **options)
    state = torch.get_rng_state()
    again = common.load_checkpoint(tmp_path / 'x.pt', precision='fp32')
    assert torch.equal(state, torch.get_rng_state())
    x = torch.randn(2, 3, 32, 32)
    assert torch.equal(model(x), again(x)) and options.items() <= again.config.items() and again.classes == ['a', 'b']
    saved = common.read_checkpoint(tmp_path / 'x.pt')
    assert saved['args']['seed'] == 7 and saved['script'] == 'train_ms' and saved['torch'] == str(torch.__version__)
    assert saved['transform'] == dict(resize=40, image_size=32, mean=common.MEAN, std=common.STD)


def test_a_checkpoint_has_its_test_transform(small, monkeypatch, tmp_path):
    """The transform takes a path, a PIL image or an array. Images takes it as well, and decodes large files small."""
    checkpoint(tmp_path / 'x.pt')
    transform = common.load_checkpoint(tmp_path / 'x.pt').transform
    half = np.zeros((40, 80), np.uint8)
    half[:, 24:40] = 255                                        # 40 px high: the left half of the centre crop is white
    white = (torch.arange(32) < 16).float().expand(3, 32, 32)
    mean, std = torch.tensor(common.MEAN)[:, None, None], torch.tensor(common.STD)[:, None, None]
    Image.fromarray(half).save(tmp_path / 'x.png')
    for image in (half, Image.fromarray(half), tmp_path / 'x.png'):
        x = transform(image)
        assert x.shape == (3, 32, 32) and torch.allclose(x * std + mean, white, atol=1e-6)
        assert torch.equal(common.Images([image], [0], transform=transform)[0][0], x)
    Image.new('RGB', (400, 400)).save(tmp_path / 'x.jpg')
    decoded = []
    monkeypatch.setattr(transform, 'transforms', [lambda image: decoded.append(image.size)])
    common.Images([tmp_path / 'x.jpg'], [0], transform=transform)[0]
    assert decoded == [(50, 50)], 'at an eighth of its size'


def test_a_checkpoint_embeds_an_image_as_the_run_did(run, folder):
    """A real ResNet-18 is loaded, and embeds an image as common.embed does."""
    run(train_ms, '--name', 'mine', '--precision', 'fp32')
    model = common.load_checkpoint('runs/mine/last.pt', precision='fp32')
    z = common.embed(model, common.load_dataset('folder', folder, 32, 32).query)
    with torch.no_grad():
        single = model(model.transform(folder / 'test/car0/0.jpg')[None])
    assert z.dtype == torch.float32 and torch.allclose(single[0], z[0], atol=1e-4)
    assert model.args['dataset'] == 'folder' and model.classes == [f'bird{i}' for i in range(6)]


class Malicious:
    def __reduce__(self):
        return os.system, ('touch hacked',)


def save_script(_, file):
    torch.jit.save(torch.jit.script(torch.nn.Identity()), file)


@pytest.mark.filterwarnings('ignore')                       # of torch, on TorchScript
@pytest.mark.parametrize('save', [partial(pickle.dump, protocol=2), torch.save, save_script])
def test_a_file_that_could_run_code_is_not_opened_and_no_message_recommends_it(tmp_path, monkeypatch, save):
    monkeypatch.chdir(tmp_path)
    with open('evil.pt', 'wb') as file:
        save(Malicious(), file)
    with pytest.raises(UsageError, match='evil.pt (?!.*weights_only=).* could run any code'):
        common.load_checkpoint('evil.pt')
    assert not os.path.exists('hacked')


@pytest.mark.parametrize('error, raised', [
    (OSError(28, 'No space left on device'), UsageError), (RuntimeError('No space left: torch.save'), UsageError),
    (KeyboardInterrupt('No space left'), KeyboardInterrupt)])
def test_a_full_disk_and_ctrl_c_leave_the_old_file_intact(tmp_path, error, raised):
    (tmp_path / 'old').write_text('precious')
    with pytest.raises(raised, match='No space left'):
        with common.atomic_write(tmp_path / 'old') as file:
            file.write(b'half')
            raise error
    assert (tmp_path / 'old').read_text() == 'precious' and not list(tmp_path.glob('*.tmp'))


def test_a_truncated_log_is_restored_when_the_run_is_resumed(run, small):
    """The checkpoint has all records."""
    run(train_ms, '--name', 'my [best] run', '--epochs', '1', '--steps', '0')
    records = log_of('my [best] run')
    Path('runs/my [best] run/log.jsonl').write_text('{"ep')
    train_ms.main(['--resume', 'runs/my [best] run', '--epochs', '2', '--device', 'cpu'])
    assert log_of('my [best] run')[:2] == records and len(log_of('my [best] run')) == 3
    assert os.listdir('runs') == ['my [best] run']
    Path('runs/my [best] run/log.jsonl').unlink()                       # interrupted after its last checkpoint
    train_ms.main(['--resume', 'runs/my [best] run', '--device', 'cpu'])
    assert len(log_of('my [best] run')) == 3
