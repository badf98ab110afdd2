"""train_hse.py against the equations of HSE; hybrids pixel by pixel; base losses against their scripts."""
import shutil
from itertools import product
from math import cos, exp, log, pi

import numpy as np
import pytest
import torch
from conftest import on_circle, unit
from PIL import Image

import common
import train_hse
from train_hse import (
    SuperClassSampler,
    blend,
    candidates,
    choose_classes,
    contrastive_loss,
    epshn_loss,
    hse_loss,
    hybrid_loss,
    make_hybrids,
    multi_similarity_loss,
    npair_loss,
)

NUMS, SIZES = [2, 3, 4], [(8, 8), (7, 9), (13, 5), (32, 32)]


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def softplus(x):
    return log(1 + exp(x))


def batch(classes=5, per_class=3, height=8, width=8, shuffle=False):
    """Images of distinct values, so that a pixel tells where it comes from: (B, 3, h, w), (B,)"""
    labels = torch.arange(classes).repeat_interleave(per_class)
    if shuffle:
        labels = labels[torch.randperm(len(labels), generator=seeded())]
    return torch.rand(len(labels), 3, height, width, generator=seeded(1)), labels


# ---- the equations

def test_hse_eq2_by_hand():
    """0 and 40 degrees are one class, 20 another: a chord of 40 degrees has length 2 sin 20."""
    z, y, m = on_circle(0, 40, 20), torch.tensor([0, 0, 1]), 0.5
    pull = (2 * cos(pi / 2 - pi / 9)) ** 2                       # both ordered pairs alike: their mean
    push = (m - 2 * cos(pi / 2 - pi / 18)) ** 2                  # all four negative pairs alike
    assert contrastive_loss(z, y, m).item() == pytest.approx(pull + push, abs=1e-12), 'Eq. (2): [m - d]^2'


def test_hse_eq3_is_mixup_in_equal_parts():
    x_a, x_b = torch.rand(2, 3, 5, 7, generator=seeded(), dtype=torch.float64)
    lam = 1 / 2
    assert torch.equal(blend(torch.stack([x_a, x_b])[None], 'mixup')[0], lam * x_a + (1 - lam) * x_b)


def three_hybrids():
    """Labelled images at 0 and 30 (class 0), 100 and 130 (1), 60 (2), 200 (3); a hybrid of 0 and 1 at 70."""
    z, y = on_circle(0, 30, 100, 130, 60, 200), torch.tensor([0, 0, 1, 1, 2, 3])
    return on_circle(70), z, y, torch.tensor([[0, 2]])


def test_hse_eq7_nearest_of_the_other_classes():
    h, z, y, sources = three_hybrids()
    z.requires_grad_()
    hybrid_loss(h, z, *candidates(y, sources)).backward()
    assert z.grad[4].norm() > 0 and z.grad[5].norm() == 0, 'Eq. (7): 60 degrees is nearer to 70 than 200'


def test_hse_eq8_nearest_of_either_class():
    h, z, y, sources = three_hybrids()
    z.requires_grad_()
    hybrid_loss(h, z, *candidates(y, sources)).backward()
    assert z.grad[2].norm() > 0 and z.grad[[0, 1, 3]].norm() == 0, 'Eq. (8): 100 degrees is nearest to 70'


@pytest.mark.parametrize('temperature', [1.0, 0.1])
def test_hse_eq9_by_hand(temperature):
    h, z, y, sources = three_hybrids()
    s_hn, s_ewp, alpha = cos(pi / 18) / temperature, cos(pi / 6) / temperature, 0.7
    expected = -alpha * log(1 / (1 + exp(s_hn) / exp(s_ewp)))
    loss = hybrid_loss(h, z, *candidates(y, sources), alpha, temperature)
    assert loss.item() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize('temperature', [1.0, 0.1])
def test_hse_eq9_at_a_tie_is_alpha_log_2(temperature):
    z, y = on_circle(45, -45), torch.tensor([0, 1])
    loss = hybrid_loss(on_circle(0), z, (y == 0)[None], (y == 1)[None], 2.0, temperature)
    assert loss.item() == pytest.approx(2 * log(2), abs=1e-12)


def test_hse_eq9_is_a_softplus_averaged_over_hybrids():
    h, z, y = unit(4, seed=1), unit(12), torch.arange(4).repeat_interleave(3)
    sources = torch.tensor([[0, 3], [1, 4], [2, 5], [6, 9]])
    expected = 0
    for i in range(4):
        classes = y[sources[i]].tolist()
        s = [(float(h[i] @ z[j]), int(y[j]) in classes) for j in range(12)]
        s_hn, s_ewp = (max(v for v, weak in s if weak == side) for side in (False, True))
        expected += softplus((s_hn - s_ewp) / 0.1) / 4
    assert hybrid_loss(h, z, *candidates(y, sources)).item() == pytest.approx(expected, abs=1e-12)


def test_hse_eq10_adds_the_two_losses_on_the_labelled_images():
    h, z, y = unit(2, seed=1), unit(9), torch.arange(3).repeat_interleave(3)
    sources = torch.tensor([[0, 3], [1, 4]])
    expected = multi_similarity_loss(z, y) + hybrid_loss(h, z, *candidates(y, sources), 0.3)
    assert hse_loss(multi_similarity_loss, z, y, h, sources, 0.3) == expected


def test_hse_eq11_with_the_contrastive_loss_by_hand():
    """Two classes at 0 and 40 degrees, a third at 20; the hybrid of the first two images at 30."""
    z, y, h = on_circle(0, 40, 20), torch.tensor([0, 1, 2]), on_circle(30)
    chord = 2 * cos(pi / 2 - pi / 18)                            # 20 degrees; 40 are beyond the margin
    l_cont = (0.5 - chord) ** 2
    l_hy = 0.1 * log(1 + exp(cos(pi / 18)) / exp(cos(pi / 18)))  # both neighbours are 10 degrees away
    loss = hse_loss(contrastive_loss, z, y, h, torch.tensor([[0, 1]]), alpha=0.1, temperature=1)
    assert loss.item() == pytest.approx(l_cont + l_hy, abs=1e-12)


# ---- the hybrid loss

def test_gradient_reaches_hybrid_weak_positive_and_negative_and_nothing_else():
    """And its size at a tie is alpha / 2 / temperature per hybrid."""
    h, z, y, sources = three_hybrids()
    h, z = on_circle(80).requires_grad_(), z.requires_grad_()    # 100 and 60 are equally far now
    hybrid_loss(h, z, *candidates(y, sources), alpha=1, temperature=0.1).backward()
    touched = z.grad.norm(dim=1) > 0
    assert touched.tolist() == [False, False, True, False, True, False] and h.grad.norm() > 0
    assert torch.allclose(z.grad[4], 5 * h[0].detach()) and torch.allclose(z.grad[2], -5 * h[0].detach())


def test_masks_against_a_loop():
    _, y = batch(shuffle=True)
    sources = torch.tensor([[0, 1, 2], [5, 9, 14], [3, 7, 11]])
    weak, negative = candidates(y, sources)
    for i, row in enumerate(sources.tolist()):
        for j in range(len(y)):
            assert weak[i, j].item() == (y[j].item() in [y[k].item() for k in row])
            assert negative[i, j].item() != weak[i, j].item()
    assert weak[torch.arange(3)[:, None], sources].all(), 'the sources themselves may be weak positives'


@pytest.mark.parametrize('labels', [[0, 0, 1, 1], [0, 0, 0, 0]], ids=['no class left', 'a single class'])
def test_no_negative_left_contributes_zero_in_the_graph(labels):
    h, z = unit(2, seed=1).requires_grad_(), unit(4).requires_grad_()
    loss = hybrid_loss(h, z, *candidates(torch.tensor(labels), torch.tensor([[0, 2], [1, 3]])))
    loss.backward()
    assert loss.item() == 0 and h.grad.norm() == 0 and z.grad.norm() == 0


def test_one_hybrid_without_candidates_adds_zero_to_the_mean():
    h, z, y, sources = three_hybrids()
    weak, negative = candidates(y, sources)
    alone = hybrid_loss(h, z, weak, negative)
    nobody = torch.zeros_like(weak)
    both = hybrid_loss(torch.cat([h, h]), z, torch.cat([weak, nobody]), torch.cat([negative, negative]))
    assert both.item() == pytest.approx(alone.item() / 2)


def test_no_hybrid_at_all_is_the_base_loss():
    z, y = unit(6).requires_grad_(), torch.zeros(6, dtype=torch.long)
    images, _ = batch(classes=2)
    hybrids, sources = make_hybrids(images, y)                   # one class: nothing to join
    assert hybrids.shape == (0, 3, 8, 8) and sources.shape == (0, 2)
    loss = hse_loss(multi_similarity_loss, z, y, z[:0], sources)
    loss.backward()
    assert torch.equal(loss, multi_similarity_loss(z, y)) and z.grad.isfinite().all()


# ---- hybrids

@pytest.mark.parametrize('axis', ['top-bottom', 'left-right'])
def test_cutmix_pixel_by_pixel(axis):
    for num, (height, width) in product(NUMS, SIZES):
        check_cutmix(num, height, width, axis)


def check_cutmix(num, height, width, axis):
    images, y = batch(height=height, width=width, shuffle=True)
    hybrids, sources = make_hybrids(images, y, 'cutmix', num, 3, axis=axis, generator=seeded())
    side = height if axis == 'top-bottom' else width
    for hybrid, row in zip(hybrids, sources):
        counts = [0] * num
        for i in range(side):
            owner = int(i / side * num + 1e-9)                   # the strip that holds this line
            line = (slice(None), i) if axis == 'top-bottom' else (slice(None), slice(None), i)
            assert torch.equal(hybrid[line], images[row[owner]][line])
            counts[owner] += 1
        assert max(counts) - min(counts) <= 1, 'even strips'


@pytest.mark.parametrize('num', NUMS)
def test_mixup_pixel_by_pixel(num):
    images, y = batch(height=7, width=9, shuffle=True)
    hybrids, sources = make_hybrids(images, y, 'mixup', num, 3, generator=seeded())
    assert torch.allclose(hybrids, sum(images[sources[:, k]] for k in range(num)) / num)


@pytest.mark.parametrize('mask_size', [1, 2, 3])
def test_gridmask_pixel_by_pixel(mask_size):
    for num, (height, width) in product(NUMS, SIZES[:3]):
        check_gridmask(num, height, width, mask_size)


def check_gridmask(num, height, width, mask_size):
    images, y = batch(height=height, width=width, shuffle=True)
    hybrids, sources = make_hybrids(images, y, 'gridmask', num, 1, mask_size=mask_size, generator=seeded())
    for i in range(height):
        for j in range(width):
            owner = (i // mask_size + j // mask_size) % num      # neighbouring blocks differ
            assert torch.equal(hybrids[0, :, i, j], images[sources[0, owner], :, i, j])


@pytest.mark.parametrize('num', NUMS)
def test_sources_are_of_distinct_classes_wherever_they_stand(num):
    for seed in range(20):
        images, y = batch(classes=6, shuffle=True)
        y = y[torch.randperm(len(y), generator=seeded(seed))]
        _, sources = make_hybrids(images, y, num=num, per_class=3, combinations=4, generator=seeded(seed))
        assert sources.shape == (12, num)
        assert all(len(set(row)) == num for row in y[sources].tolist())


def test_nsize_and_cnum_count_hybrids():
    images, y = batch(classes=8, per_class=3)
    _, sources = make_hybrids(images, y, num=2, per_class=3, combinations=4, generator=seeded())
    assert sorted(sources.flatten().tolist()) == list(range(24)), 'each image is used once'
    for combination in y[sources].view(4, 3, 2):
        assert (combination == combination[0]).all(), 'Nsize hybrids of one combination share their classes'


def test_a_small_class_starts_over():
    images, y = batch(classes=2, per_class=3)
    _, sources = make_hybrids(images[:4], y[:4], num=2, per_class=3)
    column = sources[:, (y[sources[0]] == 1).nonzero().item()]
    assert column.tolist() == [3, 3, 3]


def test_classes_of_a_hybrid_come_from_one_super_class():
    images, y = batch(classes=7, shuffle=True)
    super_class = torch.tensor([0, 1, 0, 1, 2, 2, 3])            # 3 has one class only and cannot take part
    _, sources = make_hybrids(images, y, 'cutmix', 2, 3, 3, groups=super_class[y], generator=seeded())
    groups = super_class[y][sources]
    assert torch.equal(groups[:, 0], groups[:, 1]) and sorted(groups[::3, 0].tolist()) == [0, 1, 2]
    assert (y[sources][:, 0] != y[sources][:, 1]).all()


def test_the_generator_decides_and_the_global_one_is_left_alone():
    images, y = batch()
    before = torch.get_rng_state()
    one, two = (make_hybrids(images, y, generator=seeded(7))[1] for _ in range(2))
    assert torch.equal(one, two) and torch.equal(before, torch.get_rng_state())
    drawn = {tuple(c.tolist()) for seed in range(9) for c in choose_classes(y, 2, 1, generator=seeded(seed))}
    assert len(drawn) > 3, 'other seeds draw other classes'


def test_what_does_not_fit_is_refused():
    images, y = batch()
    with pytest.raises(ValueError, match='no room for 2 images'):
        make_hybrids(images, y, 'gridmask', mask_size=8)
    with pytest.raises(ValueError, match='cutout'):
        make_hybrids(images, y, 'cutout')


# ---- base losses

def test_epshn_by_hand():
    """Class 0 at 0, 50 and 91 degrees, class 1 at 30 and 130, the only image of class 2 at 250."""
    z, y = on_circle(0, 50, 91, 30, 130, 250), torch.tensor([0, 0, 0, 1, 1, 2])
    angles = [          # to the easy positive; to the most similar other image that is farther than that
        (50, 110),      # at 0:   30 is nearer than the positive and skipped
        (41, 80),       # at 50:  30 is skipped
        (41, 61),       # at 91:  130, 39 away, is skipped; 30 remains
        (100, 140),     # at 30:  0, 50 and 91 are skipped
        (100, 120),     # at 130: 91 and 50 are skipped
    ]
    terms = [softplus((cos(n * pi / 180) - cos(p * pi / 180)) / 0.1) for p, n in angles]
    assert epshn_loss(z, y).item() == pytest.approx(sum(terms) / 5, abs=1e-12), '250 has no positive'


def test_epshn_skips_a_negative_that_is_as_similar_as_the_positive():
    z = torch.tensor([[1, 0], [0.6, 0.8], [0.6, -0.8], [0, 1]], dtype=torch.float64)
    terms = [softplus(-0.6 / 0.1), softplus((-0.28 - 0.6) / 0.1)]            # the other two have no negative
    assert epshn_loss(z, torch.tensor([0, 0, 1, 1])).item() == pytest.approx(sum(terms) / 2, abs=1e-12)


def test_npair_by_hand():
    """Two classes; a third image of class 0 and a class of one image take no part."""
    z, y = on_circle(0, 100, 30, 140, 10, 200), torch.tensor([0, 1, 0, 1, 0, 2])
    a, b = (0, 100), (30, 140)                                   # anchors and positives
    rows = [[cos((i - j) * pi / 180) for j in b] for i in a]
    expected = sum(log(sum(exp(v) for v in row)) - row[k] for k, row in enumerate(rows)) / 2
    assert npair_loss(z, y).item() == pytest.approx(expected, abs=1e-12)


def test_npair_matches_anchor_and_positive_in_any_order():
    z, y = unit(8), torch.tensor([2, 0, 1, 0, 3, 2, 3, 1])
    order = torch.tensor([1, 3, 2, 7, 0, 5, 4, 6])               # class by class, first images first
    assert torch.allclose(npair_loss(z, y), npair_loss(z[order], y[order]))


def test_epshn_masks_self_by_index_not_by_value():
    """A duplicate is a positive like any other: anchor 0 has it at similarity 1."""
    z, y = on_circle(0, 0, 60), torch.tensor([0, 0, 1])
    assert epshn_loss(z, y).item() == pytest.approx(softplus((cos(pi / 3) - 1) / 0.1), abs=1e-12)


# ---- the script


def test_super_class_sampler_has_two_classes_of_each():
    labels = torch.arange(30).repeat_interleave(torch.arange(30) % 4 + 2)         # 2 to 5 images per class
    groups = labels % 3
    sampler = SuperClassSampler(labels, groups, batch_size=18, per_class=3)
    lists = list(sampler)
    assert len(lists) == len(sampler) == len(labels) // 18
    assert len({tuple(sorted(indices)) for indices in lists}) == len(lists), 'batches differ'
    for indices in lists:
        y, g = labels[indices], groups[indices]
        assert len(indices) == 18 and torch.bincount(g).tolist() == [6, 6, 6]
        assert sorted(torch.bincount(y).unique().tolist()) == [0, 3]
    last = {groups[indices[-1]].item() for indices in lists + list(sampler) + list(sampler)}
    assert last == {0, 1, 2}, 'whose images --hybrids replace drops'
    with pytest.raises(ValueError, match='multiple'):
        SuperClassSampler(labels, groups, batch_size=20, per_class=3)


def test_a_batch_of_a_small_dataset_loses_its_last_class_too(before_training, monkeypatch):
    """There are fewer images in it than --batch-size says."""
    labelled, base_loss = [], train_hse.multi_similarity_loss
    monkeypatch.setattr(train_hse, 'multi_similarity_loss', lambda z, y: labelled.append(y) or base_loss(z, y))
    held = before_training(train_hse, '--batch-size', '8')
    held.args.batch_size = 40
    held.step(torch.rand(8, 3, 32, 32), torch.arange(8) // 2)
    assert labelled[0].tolist() == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize('flags, seen', [
    ([], (6, 2)), (['--hybrids', 'append'], (8, 2)), (['--alpha', '0'], (8, 0)),
    (['--hybrids', 'append', '--combinations', '2'], (8, 4)), (['--batch-size', '12', '--combinations', '2'], (8, 4)),
], ids=['replace', 'append', 'baseline', 'append, Cnum 2', 'replace, Cnum 2'])
def test_who_goes_through_the_network_and_who_into_the_base_loss(before_training, monkeypatch, flags, seen):
    """Labelled images first, then (labelled, hybrids) of so many; the base loss gets the labelled ones alone."""
    through, labelled = [], []
    base_loss, forward = train_hse.multi_similarity_loss, common.Embedder.forward
    monkeypatch.setattr(train_hse, 'multi_similarity_loss', lambda z, y: labelled.append((z, y)) or base_loss(z, y))
    held = before_training(train_hse, *flags)
    monkeypatch.setattr(common.Embedder, 'forward', lambda self, x: through.append(x) or forward(self, x))
    held.model.eval()
    images = torch.rand(held.args.batch_size, 3, 32, 32)
    labels = torch.arange(len(images)) // 2
    held.step(images, labels)
    (x,), ((z, y),) = through, labelled
    assert len(x) == sum(seen) and len(z) == seen[0]
    assert torch.equal(x[:seen[0]], images[:seen[0]]), 'the last images are replaced, not the first'
    assert torch.equal(y, labels[:seen[0]])
    assert torch.allclose(z, held.model(images[:seen[0]]), atol=1e-6), 'under their own labels'


def give_super_classes(monkeypatch, number):
    """Data that are loaded from here on have so many super-classes, which the classes belong to in turn."""
    load = common.dataset_from

    def load_grouped(args):
        data = load(args)
        data.train.groups = data.train.labels % number
        return data
    monkeypatch.setattr(common, 'dataset_from', load_grouped)


def test_with_super_classes_every_hybrid_stays_inside_one(run, small, monkeypatch):
    """As on SOP: 2 super-classes x 2 classes x 2 images, one combination for each, hybrids appended."""
    seen = []
    give_super_classes(monkeypatch, 2)

    def watched(images, labels, *args, **kwargs):
        hybrids, sources = make_hybrids(images, labels, *args, **kwargs)
        seen.append((len(images), labels[sources]))
        return hybrids, sources

    monkeypatch.setattr(train_hse, 'make_hybrids', watched)
    run(train_hse, '--hybrids', 'append', '--combinations', '2')
    assert len(seen) == 2
    for n, y in seen:
        assert n == 8 and (y[:, 0] != y[:, 1]).all() and (y[:, 0] % 2 == y[:, 1] % 2).all()
        assert sorted((y[:, 0] % 2).tolist()) == [0, 0, 1, 1]


def test_a_fold_may_lack_super_classes_and_does_without_them(run, small, monkeypatch):
    """With three super-classes, batches of 8 cannot have equally many classes of each."""
    give_super_classes(monkeypatch, 3)
    with pytest.raises(common.UsageError, match='of each super-class'):
        run(train_hse, '--hybrids', 'append')
    assert run(train_hse, '--hybrids', 'append', '--fold', '0/3')['epoch'] == 1


def test_too_few_classes_of_a_super_class_are_refused():
    groups = torch.arange(12).repeat_interleave(9)
    for flags, enough in (('--num 3', 180), ('--num 4 --hybrids replace', 240)):
        args = train_hse.get_args(['--dataset', 'sop', *flags.split()])
        with pytest.raises(ValueError, match=f'raise --batch-size to {enough}'):
            train_hse.check_batch(args, 108, groups)
        args.batch_size = enough
        train_hse.check_batch(args, 108, groups)
    train_hse.check_batch(train_hse.get_args(['--dataset', 'sop']), 108, groups)


@pytest.mark.parametrize('flags, reason', [
    ('--kind mixup --axis left-right', '--axis has no effect with --kind mixup'),
    ('--mask-size 8', '--mask-size has no effect with --kind cutmix'),
    ('--alpha 0 --kind mixup', '--kind has no effect with --alpha 0'),
    ('--alpha 0 --num 3', '--num'), ('--alpha 0 --combinations 2', '--combinations'),
    ('--alpha 0 --hybrids append', '--hybrids'), ('--alpha 0 --temperature 1', '--temperature'),
    ('--proxy-lr-mult 3', '--proxy-lr-mult has no effect with --loss ms'),
    ('--kind gridmask --mask-size 64', '1 x 1 such blocks'), ('--kind gridmask --mask-size 63 --num 4', '2 x 2 such'),
    ('--dataset cub --kind gridmask --mask-size 250', '1 x 1 such blocks'),
    ('--show-hybrids x.png --mask-size 64', '1 x 1 such blocks'), ('--show-hybrids last.pt', 'PNG|show-hybrids'),
    ('--show-hybrids x.png --show-batch y.png', '--show-batch has no effect with --show-hybrids')])
def test_a_flag_without_effect_is_a_mistake(flags, reason):
    with pytest.raises(common.UsageError, match=reason):
        train_hse.get_args(flags.split())


@pytest.mark.parametrize('flags', ['--num 3 --mask-size 63', '--num 4 --mask-size 31', '--num 2 --mask-size 63'])
def test_gridmask_shows_all_parents_where_the_flags_are_accepted(flags):
    args = train_hse.get_args(['--kind', 'gridmask', *flags.split()])
    parts = torch.arange(args.num).float()[None, :, None, None, None].expand(1, args.num, 3, 64, 64)
    assert len(blend(parts, 'gridmask', mask_size=args.mask_size).unique()) == args.num


@pytest.mark.parametrize('flags', ['--num 4', '--num 3', '--combinations 2', '--per-class 0',
                                   '--alpha 0 --per-class 0 --show-hybrids x.png'])
def test_a_batch_with_no_negative_left_is_refused(run, small, flags):
    with pytest.raises(common.UsageError, match='stay'):
        run(train_hse, *flags.split())


def test_the_baseline_needs_no_classes_at_all(run, small):
    assert run(train_hse, '--alpha', '0', '--per-class', '0')['epoch'] >= 1


@pytest.mark.parametrize('axis', ['top-bottom', 'left-right'])
def test_the_picture_shows_sources_and_hybrids_in_their_colours(run, tmp_path, monkeypatch, axis):
    """One class is black, all others are white; the picture undoes the normalisation."""
    for c in 'abcd':
        (tmp_path / 'x' / c).mkdir(parents=True)
        for i in range(2):
            Image.new('RGB', (32, 32), (0 if c == 'a' else 255,) * 3).save(tmp_path / 'x' / c / f'{i}.png')
    monkeypatch.setattr(train_hse, 'choose_classes', lambda y, *_: [torch.tensor([0, 1])])
    monkeypatch.setattr(common, 'make_sampler', lambda args, labels: [[0, 1, 2, 3]])
    for split in ('train', 'test'):
        shutil.copytree(tmp_path / 'x', tmp_path / 'data' / split)
    run(train_hse, '--data', str(tmp_path / 'data'), '--show-hybrids', 'x.png', '--axis', axis, '--batch-size', '8',
        '--hybrids', 'append')
    picture = np.asarray(Image.open(tmp_path / 'x.png'))
    first, second, cutmix = (picture[2:34, 2 + 34 * i:34 + 34 * i, 0] for i in range(3))
    assert (first == 0).all() and (second == 255).all()
    half = cutmix[:16] if axis == 'top-bottom' else cutmix[:, :16]
    assert (half == 0).all() and cutmix.mean() == 127.5


def test_few_combinations_come_from_all_super_classes():
    y, groups = torch.arange(12), torch.arange(12) // 4
    first = {int(groups[train_hse.choose_classes(y, 2, 1, groups)[0][0]]) for _ in range(60)}
    assert first == {0, 1, 2}


@pytest.mark.parametrize('classes, fits', [(4, True), (3, False)])
def test_a_batch_of_few_classes_keeps_a_negative(before_training, classes, fits):
    """Hybrids replace one class, two are parents, so a fourth is needed; of the dataset, too."""
    args = before_training(train_hse).args
    args.batch_size, args.per_class = 64, 2
    if fits:
        return train_hse.check_batch(args, classes)
    with pytest.raises(common.UsageError, match='needs 3 classes among the images that stay in a batch, and 2 do'):
        train_hse.check_batch(args, classes)


def test_show_hybrids_writes_a_picture_and_stops(run, tmp_path):
    assert run(train_hse, '--show-hybrids', 'hybrids.png', '--num', '2') is None
    picture = Image.open(tmp_path / 'hybrids.png')
    assert picture.size == ((2 + 3) * (32 + 2) + 2, 2 * (32 + 2) + 2), '2 sources, 3 kinds; Nsize = 2 rows'
    assert not (tmp_path / 'runs').exists()
