"""Sampling of batches, and loading of images."""
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
    assert sorted(i for batch in sampled for i in batch) == list(range(108)), 'an epoch has every image once'


def test_sampler_takes_classes_left_over_from_a_permutation_first():
    """Of 5 classes, two per batch, one is left over and is used next. So four successive batches have all classes."""
    labels = torch.arange(800) % 5
    sampled = [set(labels[batch].tolist()) for batch in BalancedSampler(labels, 4, 2)]
    assert len(sampled) == 200 and all(set.union(*sampled[i:i + 4]) == set(range(5)) for i in range(197))


def test_sampler_repeats_images_of_small_classes_and_few_classes_shrink_the_batch(capsys):
    labels = torch.tensor([0, 0, 0, 0, 1, 2, 2])
    batch = next(iter(BalancedSampler(labels, 40, 4)))
    assert '1 of 3 training classes have one image' in capsys.readouterr().err
    assert sorted(labels[batch].tolist()) == [0] * 4 + [1] * 4 + [2] * 4
    assert sorted(i for i in batch if labels[i] == 2) == [5, 5, 6, 6]
    assert len(BalancedSampler(torch.arange(30) % 2, 40, 4)) == 3, '30 images in batches of 8'
    with pytest.raises(UsageError, match='--batch-size 10 is not a multiple of --per-class 4'):
        BalancedSampler(labels, 10, 4)


def test_without_per_class_batches_are_random_and_drop_the_incomplete_last_one(before_training):
    held = before_training(train_ms, '--per-class', '0', '--batch-size', '7')
    lists = list(common.make_sampler(held.args, held.data.train.labels))
    assert [len(indices) for indices in lists] == [7] * 4, '30 images'
    assert len(set(sum(lists, []))) == 28 and sum(lists, []) != list(range(28)), 'no image twice, in random order'


@pytest.mark.filterwarnings('ignore:This DataLoader will create')
@pytest.mark.parametrize('workers', [0, 2])
def test_crops_follow_from_the_seed_the_step_and_the_position_for_any_number_of_workers(tmp_path, workers):
    images = common.load_dataset('folder', make_folder(tmp_path, 'abcd', per_class=8, size=8), whole=True,
                                 train_transform=common.make_train_transform(8), workers=workers).query
    batches = common.StepBatches(BalancedSampler(images.labels, 8, 2), seed=3)
    loader = common.make_loader(images, batches, torch.device('cpu'))
    assert loader.num_workers == workers
    for batches.epoch, batches.steps in ((1, range(3)), (2, range(3, 5))):
        chosen = [[i for i, *_ in batch] for batch in batches]
        for step, indices, (x, y) in zip(batches.steps, chosen, loader, strict=True):
            crops = [images[i, 3, common.CROP, step, position][0] for position, i in enumerate(indices)]
            assert torch.equal(x, torch.stack(crops)) and torch.equal(y, images.labels[indices])
