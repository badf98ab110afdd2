"""Which images meet in a batch: the samplers."""

import pytest
import torch

import common
import train_ms
from common import BalancedSampler, UsageError


def test_balanced_batches_are_p_by_k_class_by_class():
    labels = torch.arange(12).repeat(9)[torch.randperm(108, generator=torch.Generator().manual_seed(0))]
    samplers = [BalancedSampler(labels, 12, 3, torch.Generator().manual_seed(seed)) for seed in (0, 0, 1)]
    drawn, again, other = map(list, samplers)
    assert drawn == again != other, 'the generator decides'
    assert len(drawn) == len(samplers[0]) == 108 // 12
    for batch in drawn:
        classes = labels[batch].view(4, 3)
        assert (classes == classes[:, :1]).all() and len(set(classes[:, 0].tolist())) == 4
        assert len(set(batch)) == 12, 'an image must not come twice'
    assert sorted(i for batch in drawn for i in batch) == list(range(108)), 'an epoch deals every image once'


def test_what_is_left_of_a_deck_is_dealt_first():
    """With 5 classes, two in a batch, a class is left over from each shuffled deck. It comes next, so none is missing
    in four successive batches."""
    labels = torch.arange(800) % 5
    drawn = [set(labels[batch].tolist()) for batch in BalancedSampler(labels, 4, 2)]
    assert len(drawn) == 200 and all(set.union(*drawn[i:i + 4]) == set(range(5)) for i in range(197))


def test_small_classes_repeat_and_few_classes_shrink_the_batch(capsys):
    labels = torch.tensor([0, 0, 0, 0, 1, 2, 2])
    sampler = BalancedSampler(labels, 40, 4)
    assert '1 of 3 training classes have one image' in capsys.readouterr().err
    batch = next(iter(sampler))
    assert len(batch) == 12 and sorted(labels[batch].tolist()) == [0] * 4 + [1] * 4 + [2] * 4
    assert sorted(i for i in batch if labels[i] == 2) == [5, 5, 6, 6]
    assert len(BalancedSampler(torch.arange(24) % 2, 40, 4)) == 3, '24 images in batches of 8'
    BalancedSampler(labels, 2, 1)
    assert capsys.readouterr().err == '', 'no class is wanted twice'
    with pytest.raises(UsageError, match='--batch-size 10 is not a multiple of --per-class 4'):
        BalancedSampler(torch.arange(8) // 2, 10, 4)


def test_without_per_class_batches_are_random_and_drop_the_incomplete_last_one(before_training):
    held = before_training(train_ms, '--per-class', '0', '--batch-size', '7')
    lists = list(common.make_sampler(held.args, held.data.train.labels))
    assert [len(indices) for indices in lists] == [7] * 4, '30 images'
    assert len(set(sum(lists, []))) == 28 and sum(lists, []) != list(range(28)), 'no image twice, in random order'
    held.args.batch_size = 99
    assert [len(indices) for indices in common.make_sampler(held.args, held.data.train.labels)] == [30]
