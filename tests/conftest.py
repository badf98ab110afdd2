"""What several test files share: points on a circle, a tiny image folder, a way to run a script."""
import math
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image

sys.path.insert(0, str(Path(__file__).parents[1]))
SHARED = Path(__file__).parents[1] / '../shared'


def on_circle(*degrees, dtype=torch.float64):
    """Unit vectors at these angles, so that every cosine is the cosine of a difference of angles."""
    return torch.tensor([[math.cos(math.radians(d)), math.sin(math.radians(d))] for d in degrees], dtype=dtype)


def draw_folder(root, classes, per_class, size=24):
    """Noise around one colour per class: enough to tell classes apart, nothing to download."""
    generator = torch.Generator().manual_seed(0)
    for number, name in enumerate(classes):
        colour = torch.rand(3, 1, 1, generator=generator) * 255
        (root / name).mkdir(parents=True)
        for i in range(per_class):
            noisy = colour + 60 * torch.rand(3, size, size + number, generator=generator)
            pixels = noisy.clamp(0, 255).byte().permute(1, 2, 0).numpy()
            Image.fromarray(pixels).save(root / name / f'{i}.jpg')
    return root


@pytest.fixture(scope='session')
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp('folder')
    draw_folder(root / 'train', [f'bird{i}' for i in range(6)], per_class=5)
    draw_folder(root / 'test', [f'car{i}' for i in range(4)], per_class=4)
    return root


@pytest.fixture
def run(folder, tmp_path, monkeypatch):
    """run(module, *flags): two steps of a script on the tiny folder, in a directory of its own."""
    monkeypatch.chdir(tmp_path)

    def run(module, *flags):
        return module.main(['--dataset', 'folder', '--data', str(folder), '--steps', '2', '--device', 'cpu',
                            '--batch-size', '8', '--per-class', '2', '--image-size', '32', '--dim', '16', *flags])
    return run
