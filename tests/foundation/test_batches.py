"""Sampling of batches, and loading of images."""
import os
from unittest.mock import Mock

import pytest
import torch
from conftest import make_folder

import common
import train_ms
from common import BalancedSampler, UsageError


def test_sampler_batches_are_p_by_k_class_by_class():
    labels = torch.arange(12).repeat(9)[torch.randperm(108, generator=torch.Generator().manual_seed(0))]
    samplers = [BalancedSampler(labels, 12, 3, torch.Generator().manual_seed(seed)) for seed in (0, 0, 1)]
    sampled, again, other = map(list, samplers)
    assert sampled == again != other, 'the generator decides'
    assert len(sampled) == len(samplers[0]) == 108 // 12
    for batch in sampled:
        classes = labels[batch].view(4, 3)
        assert (classes == classes[:, :1]).all() and len(set(classes[:, 0].tolist())) == 4
        assert len(set(batch)) == 12, 'an image must not come twice'
    assert sorted(i for batch in sampled for i in batch) == list(range(108)), 'an epoch has every image once'


def test_sampler_takes_classes_left_over_from_a_permutation_first():
    """With 5 classes and two per batch, one class is left over from each permutation. It is used next, so four
    successive batches have all classes."""
    labels = torch.arange(800) % 5
    sampled = [set(labels[batch].tolist()) for batch in BalancedSampler(labels, 4, 2)]
    assert len(sampled) == 200 and all(set.union(*sampled[i:i + 4]) == set(range(5)) for i in range(197))


def test_sampler_repeats_images_of_small_classes_and_few_classes_shrink_the_batch(capsys):
    labels = torch.tensor([0, 0, 0, 0, 1, 2, 2])
    sampler = BalancedSampler(labels, 40, 4)
    assert '1 of 3 training classes have one image' in capsys.readouterr().err
    batch = next(iter(sampler))
    assert len(batch) == 12 and sorted(labels[batch].tolist()) == [0] * 4 + [1] * 4 + [2] * 4
    assert sorted(i for i in batch if labels[i] == 2) == [5, 5, 6, 6]
    assert len(BalancedSampler(torch.arange(24) % 2, 40, 4)) == 3, '24 images in batches of 8'
    BalancedSampler(labels, 2, 1)
    assert capsys.readouterr().err == '', 'with one image per class nothing is repeated'
    with pytest.raises(UsageError, match='--batch-size 10 is not a multiple of --per-class 4'):
        BalancedSampler(torch.arange(8) // 2, 10, 4)


def test_without_per_class_batches_are_random_and_drop_the_incomplete_last_one(before_training):
    held = before_training(train_ms, '--per-class', '0', '--batch-size', '7')
    lists = list(common.make_sampler(held.args, held.data.train.labels))
    assert [len(indices) for indices in lists] == [7] * 4, '30 images'
    assert len(set(sum(lists, []))) == 28 and sum(lists, []) != list(range(28)), 'no image twice, in random order'
    held.args.batch_size = 99
    assert [len(indices) for indices in common.make_sampler(held.args, held.data.train.labels)] == [30]


def test_the_fraction_of_anchors_without_a_positive():
    """An image that is repeated in a batch is not a positive of itself."""
    batches = common.StepBatches(None, 0)
    batches.batches = [[0, 1, 2, 3], [0, 0, 2, 2]]
    assert batches.without_positive(torch.tensor([0, 0, 1, 2])) == 6 / 8


def test_a_sampler_of_ones_own_may_yield_tensors_and_has_as_many_batches_as_its_length():
    batches = common.StepBatches([torch.tensor([0, 0, 4, 4])], seed=0)
    batches.start(1, range(1))
    assert batches.without_positive(torch.arange(5)) == 1
    with pytest.raises(common.UsageError, match='the sampler yields 1 batches, and its length is 1'):
        batches.start(1, range(2))


def test_the_number_of_worker_processes_is_that_of_the_flag(before_training):
    images = before_training(train_ms, '--workers', '1').data.train
    for part in (images, images.subset(torch.arange(3))):
        assert common.make_loader(part, [[0]], torch.device('cpu')).num_workers == 1


@pytest.mark.parametrize('cores', [1, 2])
def test_the_number_of_worker_processes_changes_nothing(tmp_path, monkeypatch, capsys, cores):
    """A crop follows from the seed, the step and the position. An image that cannot be read gives a one-line error."""
    make_folder(tmp_path, 'abcd', per_class=64, size=8)
    images = common.load_dataset('folder', tmp_path, image_size=16, whole=True).query
    batches = common.StepBatches(BalancedSampler(images.labels, 8, 2), 3)
    monkeypatch.setattr(os, 'sched_getaffinity', lambda process: range(cores), raising=False)
    loader = common.make_loader(images, batches, torch.device('cpu'))
    assert loader.num_workers == cores
    for epoch, steps in ((1, range(3)), (2, range(3, 5))):
        batches.start(epoch, steps)
        found = list(loader)
        assert len(found) == len(steps)
        for step, indices, (x, y) in zip(steps, batches.batches, found):
            crops = [images[i, 3, common.CROP, step, position] for position, i in enumerate(indices)]
            assert torch.equal(x, torch.stack([crop for crop, _ in crops])) and torch.equal(y, images.labels[indices])
    broken = images.items[batches.batches[0][0]]
    common.Path(broken).write_bytes(b'no image')
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 16 * 16, 2))
    for read in (lambda: list(loader), lambda: common.embed(net, images)):
        with pytest.raises(SystemExit, match='2'):
            common.cli(read)
        assert capsys.readouterr().err.startswith(f'error: cannot read the image {broken}')


@pytest.mark.parametrize('kind, waits', [('cuda', False), ('mps', True), ('cpu', True)])
def test_the_cpu_waits_for_a_copy_unless_it_is_to_cuda(kind, waits):
    """On a Mac, a source that is released before it is read gives other values."""
    t = Mock()
    common.to_device(t, torch.device(kind))
    t.to.assert_called_once_with(torch.device(kind), non_blocking=not waits)
