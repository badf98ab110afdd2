"""Shared by the test files: points on a circle, small images, a small network, and ways to run a script."""
import json
import math
import os
import sys

# Before torch is imported: one thread in each process, because on a busy machine threads wait for each other actively
os.environ['OMP_NUM_THREADS'] = '1'

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torchvision
from PIL import Image
from torch import nn

ROOT = Path(__file__).parents[1]
# the scripts; worker.py; the course; cases.py
sys.path[:0] = [str(ROOT), *(str(ROOT / 'tests' / name) for name in ('foundation', 'course', 'papers'))]

import common  # noqa: E402

# Annotation files, photographs and weights, which are not part of the project; some tests are skipped without them.
REAL_DATA = Path(os.environ.get('MINDML_DATA', ROOT / 'data'))
torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL = 0.5      # torch waits so long for worker processes that failed
SCRIPTS = sorted(path.stem for path in ROOT.glob('train_*.py'))


def pytest_configure(config):
    config.addinivalue_line('markers', 'slow: starts processes, or takes seconds; leave these out with -m "not slow"')


def on_circle(*degrees, dtype=torch.float64):
    """Unit vectors at these angles in degrees: the cosine similarity of two is the cosine of their difference."""
    return torch.tensor([[math.cos(math.radians(d)), math.sin(math.radians(d))] for d in degrees], dtype=dtype)


def unit(n, dim=6, seed=0, dtype=torch.float64):
    """n random unit vectors, (n, dim)"""
    z = torch.randn(n, dim, generator=torch.Generator().manual_seed(seed), dtype=dtype)
    return torch.nn.functional.normalize(z, dim=1)


def make_folder(root, classes, per_class, size=24, seed=0):
    """Write JPEG files, noise around one colour per class, of slightly different widths. Returns root."""
    generator = torch.Generator().manual_seed(seed)
    for number, name in enumerate(classes):
        colour = torch.rand(3, 1, 1, generator=generator) * 255
        (root / name).mkdir(parents=True)
        for i in range(per_class):
            noisy = colour + 60 * torch.rand(3, size, size + number, generator=generator)
            pixels = noisy.clamp(0, 255).byte().permute(1, 2, 0).numpy()
            Image.fromarray(pixels).save(root / name / f'{i}.jpg')
    return root


def numbered(classes, per_class=2):
    """Images of 2 x 2 pixels whose value is their index; superclasses in threes"""
    labels = torch.arange(classes * per_class) // per_class
    pixels = [np.full((2, 2, 3), i, np.uint8) for i in range(len(labels))]
    return common.Images(pixels, labels, [f'class {c}' for c in range(classes)], labels // 3)


def small_embedder(arch='resnet18', **options):
    """A network with the same random weights at each call"""
    torch.manual_seed(0)
    return common.Embedder(arch, dim=8, weights='none', **options)


def log_of(name):
    """The records in the log of a run, one dict per evaluated epoch"""
    return [json.loads(line) for line in open(f'runs/{name}/log.jsonl')]


def results_of(name):
    """The same records without their times"""
    times = ('minutes', 'images_per_second')
    return [{key: value for key, value in record.items() if key not in times} for record in log_of(name)]


@pytest.fixture(scope='session')
def folder(tmp_path_factory):
    """6 training classes of 5 images, 4 test classes of 4"""
    root = tmp_path_factory.mktemp('folder')
    make_folder(root / 'train', [f'bird{i}' for i in range(6)], per_class=5)
    make_folder(root / 'test', [f'car{i}' for i in range(4)], per_class=4, seed=1)
    return root


class SmallNet(nn.Module):
    """Two convolutions with BatchNorm that look like a torchvision ResNet to Embedder: pooling and fc come last."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 5, stride=2, padding=2)
        self.bn1 = nn.BatchNorm2d(16)
        self.relu1 = nn.ReLU()
        self.conv2 = nn.Conv2d(16, 64, 5, stride=4, padding=2)
        self.bn2 = nn.BatchNorm2d(64)
        self.relu2 = nn.ReLU()
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(64, 10)


@pytest.fixture
def small(monkeypatch):
    """Replaces every ResNet by a small network, for tests that do not depend on the trunk."""
    monkeypatch.setattr(torchvision.models, 'get_model', lambda arch, weights=None: SmallNet())


@pytest.fixture
def run(folder, tmp_path, monkeypatch):
    """run(module, *flags): two steps of a script on the small folder, in a temporary directory"""
    monkeypatch.chdir(tmp_path)

    def run(module, *flags):
        return module.main(['--dataset', 'folder', '--data', str(folder), '--steps', '2', '--device', 'cpu',
                            '--workers', '0', '--batch-size', '8', '--per-class', '2', '--image-size', '32',
                            '--dim', '16', *flags])
    return run


@pytest.fixture
def before_training(run, small, monkeypatch):
    """before_training(module, *flags): runs main up to the shared loop, and returns the arguments of the loop: args,
    model, data, step, optimizer, loss_params and sampler"""
    def train(args, model, data, step, optimizer, loss_params=None, sampler=None):
        return SimpleNamespace(args=args, model=model, data=data, step=step, optimizer=optimizer,
                               loss_params=loss_params or {}, sampler=sampler)

    def before_training(module, *flags):
        with monkeypatch.context() as patch:
            patch.setattr(common, 'train', train)
            return run(module, *flags)
    return before_training
