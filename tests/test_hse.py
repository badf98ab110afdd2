"""train_hse.py against the equations of HSE; hybrids pixel by pixel; base losses against their scripts."""
import shutil
from itertools import product
from math import cos, exp, log, pi, radians

import numpy as np
import pytest
import torch
from conftest import on_circle, unit
from PIL import Image
from worked import expect, expect_gradients, expect_raised, moving

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

def test_hse_eq3_is_mixup_in_equal_parts():
    x_a, x_b = torch.rand(2, 3, 5, 7, generator=seeded(), dtype=torch.float64)
    lam = 1 / 2
    assert torch.equal(blend(torch.stack([x_a, x_b])[None], 'mixup')[0], lam * x_a + (1 - lam) * x_b)


IMAGES, WEAK = (0, 30, 100, 130, 60, 200), [True, True, True, True, False, False]
WHERE = 'weak positives at 0, 30, 100, 130 degrees, negatives at 60, 200'


def masks(*rows):
    """Rows that are True where an image is a weak positive -> weak positives and negatives, (H, B) each"""
    weak = torch.tensor(rows)
    return weak, ~weak


def l_hy(h, ewp, hn, temperature=0.1):
    """HSE Eq. (9), without alpha, of a hybrid, its easy weak positive and its hard negative, in degrees"""
    s_ewp, s_hn = (cos(radians(h - d)) / temperature for d in (ewp, hn))
    return -log(1 / (1 + exp(s_hn) / exp(s_ewp)))


def test_hse_eq7_nearest_of_the_other_classes():
    t, z = moving(*IMAGES)
    hybrid_loss(on_circle(75), z, *masks(WEAK)).backward()
    touched = [d for d, grad in zip(IMAGES, t.grad) if grad.abs() > 1e-9]
    assert 60 in touched and 200 not in touched, \
        f'HSE Eq. (7): of a hybrid at 75 degrees and {WHERE}, expected a gradient for 60, got {touched}'


def test_hse_eq8_nearest_of_either_class():
    t, z = moving(*IMAGES)
    hybrid_loss(on_circle(75), z, *masks(WEAK)).backward()
    touched = [d for d, grad in zip(IMAGES, t.grad) if grad.abs() > 1e-9 and d not in (60, 200)]
    assert touched == [100], f'HSE Eq. (8): of a hybrid at 75 and {WHERE}, expected a gradient for 100, got {touched}'


@pytest.mark.parametrize('alpha, temperature', [(0.7, 1.0), (1.0, 0.1)])
def test_hse_eq9_by_hand(alpha, temperature):
    """The mean of three hybrids; for the last two all weak positives, or all images, are more than 90 degrees away."""
    rows = WEAK, [True, False, False, False, True, True], [False, True, False, False, True, True]
    loss = hybrid_loss(on_circle(70, 120, 290), on_circle(*IMAGES), *masks(*rows), alpha, temperature)
    parts = l_hy(70, 100, 60, temperature), l_hy(120, 60, 130, temperature), l_hy(290, 200, 0, temperature)
    expect(loss, alpha * sum(parts) / 3, f'HSE Eq. (9) of hybrids at 70, 120, 290 degrees, images at {IMAGES}, weak '
           f'positives {rows}, alpha {alpha}, temperature {temperature}')


def test_hse_eq9_of_opposite_images():
    """A similarity below 0 is the largest there is: an image that is not allowed must not count as 0."""
    loss = hybrid_loss(on_circle(0), on_circle(120, 180, 90), torch.tensor([[True, True, False]]),
                       torch.tensor([[False, True, False]]))
    expect(loss, l_hy(0, 120, 180), 'HSE Eq. (9) of a hybrid at 0, weak positives at 120, 180, the negative at 180, '
           'and an image at 90 degrees that is neither')


def test_hse_eq9_closed_form_gradient():
    """By s_hn alpha/T sigmoid(s_hn - s_ewp), by s_ewp the opposite; halved, since there are two hybrids."""
    (t, z), (u, h) = moving(*IMAGES), moving(70, 20)
    hybrid_loss(h, z, *masks(WEAK, WEAK), alpha=0.7, temperature=0.5).backward()
    by_s = torch.zeros(2, 6, dtype=torch.float64)
    for row, (degrees, ewp, hn) in enumerate(((70, 100, 60), (20, 30, 60))):
        weight = 0.7 / 0.5 / 2 / (1 + exp((cos(radians(degrees - ewp)) - cos(radians(degrees - hn))) / 0.5))
        by_s[row, IMAGES.index(hn)], by_s[row, IMAGES.index(ewp)] = weight, -weight
    what = f'HSE Eq. (9) of hybrids at 70, 20, {WHERE}, alpha 0.7, temperature 0.5'
    expect_gradients(by_s, what, hybrids=u, images=t)


@pytest.mark.parametrize('weak, negative', [([0, 0], [0, 1]), ([1, 0], [0, 0]), ([0, 0], [0, 0])])
def test_hse_eq9_a_hybrid_without_candidates_counts_as_0(weak, negative):
    z = on_circle(45, -40).requires_grad_()
    loss = hybrid_loss(on_circle(0, 0), z, torch.tensor([[1, 0], weak]).bool(), torch.tensor([[0, 1], negative]).bool())
    loss.backward()
    where = f'of hybrids at 0, 0, images at 45, -40, weak positives [1, 0], {weak}, negatives [0, 1], {negative}'
    expect(loss, l_hy(0, 45, -40) / 2, f'HSE Eq. (9) {where}')
    expect(z.grad.isfinite().all(), True, f'whether the gradient of HSE Eq. (9) is finite, {where}')


def test_hse_eq9_without_hybrids_is_0():
    nobody = torch.zeros(0, 2).bool()
    expect(hybrid_loss(on_circle(0)[:0], on_circle(0, 90), nobody, nobody), 0, 'HSE Eq. (9) of no hybrids, two images')


def test_hse_eq9_without_overflow():
    z, (weak, negative) = on_circle(40, 0), masks([True, False], [False, True])
    loss = hybrid_loss(on_circle(0, 0), z, weak, negative, temperature=1e-3)
    expect(loss, (1 - cos(radians(40))) / 1e-3 / 2,
           'HSE Eq. (9) of two hybrids at 0, images at 40, 0 degrees that change roles, temperature 0.001')


def test_hse_eq9_in_half_precision():
    expect_raised(lambda h, z: hybrid_loss(h, z, *masks(WEAK, WEAK)), 'HSE Eq. (9)', on_circle(70, 20),
                  on_circle(*IMAGES))


def test_hse_eq10_adds_the_two_losses_on_the_labelled_images():
    h, z, y = unit(2, seed=1), unit(9), torch.arange(3).repeat_interleave(3)
    sources = torch.tensor([[0, 3], [1, 4]])
    expected = multi_similarity_loss(z, y) + hybrid_loss(h, z, *candidates(y, sources), 0.3)
    assert hse_loss(multi_similarity_loss, z, y, h, sources, 0.3) == expected


def test_hse_eq11_with_the_contrastive_loss_by_hand():
    """Two classes at 0 and 40 degrees, a third at 20; the hybrid of the first two images at 30."""
    z, y, h = on_circle(0, 40, 20), torch.tensor([0, 1, 2]), on_circle(30)
    chord = 2 * cos(pi / 2 - pi / 18)                            # 20 degrees; 40 are beyond the margin
    loss = hse_loss(contrastive_loss, z, y, h, torch.tensor([[0, 1]]), alpha=0.1, temperature=1)
    expect(loss, (0.5 - chord) ** 2 + 0.1 * log(2), 'HSE Eq. (11): both neighbours of the hybrid are 10 degrees away')


# ---- candidates

def test_masks_against_a_loop():
    _, y = batch(shuffle=True)
    sources = torch.tensor([[0, 1, 2], [5, 9, 14], [3, 7, 11]])
    weak, negative = candidates(y, sources)
    for i, row in enumerate(sources.tolist()):
        for j in range(len(y)):
            assert weak[i, j].item() == (y[j].item() in [y[k].item() for k in row])
            assert negative[i, j].item() != weak[i, j].item()
    assert weak[torch.arange(3)[:, None], sources].all(), 'the sources themselves may be weak positives'


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

def cosine(degrees):
    return cos(radians(degrees))


@pytest.mark.parametrize('temperature', [0.1, 1.0])
def test_epshn_by_hand(temperature):
    """Class 0 at 0, 50 and 91 degrees, class 1 at 30 and 130, the only image of class 2 at 250."""
    z, y = on_circle(0, 50, 91, 30, 130, 250), torch.tensor([0, 0, 0, 1, 1, 2])
    angles = [          # to the easy positive; to the most similar other image that is farther than that
        (50, 110),      # at 0:   30 is nearer than the positive and skipped
        (41, 80),       # at 50:  30 is skipped
        (41, 61),       # at 91:  130, 39 away, is skipped; 30 remains
        (100, 140),     # at 30:  0, 50 and 91 are skipped
        (100, 120),     # at 130: 91 and 50 are skipped
    ]
    terms = [softplus((cosine(n) - cosine(p)) / temperature) for p, n in angles]
    expect(epshn_loss(z, y, temperature), sum(terms) / 5, 'EPSHN at 0, 50, 91 (class 0), 30, 130 (1), 250 degrees (2, '
           f'without a positive), temperature {temperature}')


def test_epshn_skips_a_negative_that_is_as_similar_as_the_positive():
    z = torch.tensor([[1, 0], [0.6, 0.8], [0.6, -0.8], [0, 1]], dtype=torch.float64)
    terms = [softplus(-0.6 / 0.1), softplus((-0.28 - 0.6) / 0.1)]            # the other two have no negative
    expect(epshn_loss(z, torch.tensor([0, 0, 1, 1])), sum(terms) / 2,
           'EPSHN of (1, 0), (0.6, 0.8) (class 0), (0.6, -0.8), (0, 1) (class 1)')


def test_epshn_masks_self_by_index_not_by_value():
    """A duplicate is a positive like any other: anchor 0 has it at similarity 1."""
    loss = epshn_loss(on_circle(0, 0, 60), torch.tensor([0, 0, 1]))
    expect(loss, softplus((cosine(60) - 1) / 0.1), 'EPSHN at 0, 0 (class 0), 60 degrees (class 1)')


def test_epshn_without_anchors_is_0():
    loss = epshn_loss(on_circle(0, 40, 90), torch.tensor([0, 1, 2]))
    expect(loss, 0, 'EPSHN of three images of three classes')


def test_epshn_closed_form_gradient():
    """By s_n sigmoid((s_n - s_p) / T) / T, by s_p the opposite, over the number of anchors."""
    t, z = moving(0, 40, 100)
    epshn_loss(z, torch.tensor([0, 0, 1]), temperature=0.5).backward()
    by_s = torch.zeros(3, 3, dtype=torch.float64)
    for a, p, n in ((0, 1, 2), (1, 0, 2)):                       # the third image has no positive
        weight = 1 / 0.5 / 2 / (1 + exp((z[a] @ z[p] - z[a] @ z[n]).item() / 0.5))
        by_s[a, p], by_s[a, n] = -weight, weight
    expect_gradients(by_s, 'EPSHN at 0, 40 (class 0), 100 degrees (class 1), temperature 0.5', images=t)


def test_epshn_without_overflow():
    """The hardest positive is not the easiest, and with a low temperature the loss is nearly 0."""
    loss = epshn_loss(on_circle(0, 10, 80, 90), torch.tensor([0, 0, 0, 1]), temperature=1e-3)
    expect(loss, 0, 'EPSHN at 0, 10, 80 (class 0), 90 degrees (class 1), temperature 0.001')


def test_epshn_in_half_precision():
    y = torch.tensor([0, 0, 0, 1, 1])
    expect_raised(lambda z: epshn_loss(z, y), 'EPSHN', on_circle(0, 45, 91, 30, 130))


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
    ('--proxy-lr-mult 3', '--proxy-lr-mult has no effect with --loss ms'),
    ('--kind gridmask --mask-size 64', '1 x 1 such blocks'), ('--kind gridmask --mask-size 63 --num 4', '2 x 2 such'),
    ('--dataset cub --kind gridmask --mask-size 250', '1 x 1 such blocks'),
    ('--show-hybrids x.png --mask-size 64', '1 x 1 such blocks'),
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
    assert run(train_hse, '--data', str(tmp_path / 'data'), '--show-hybrids', 'x.png', '--axis', axis, '--batch-size',
               '8', '--hybrids', 'append') is None and not (tmp_path / 'runs').exists(), 'it stops there'
    picture = np.asarray(Image.open(tmp_path / 'x.png'))
    first, second, cutmix = (picture[2:34, 2 + 34 * i:34 + 34 * i, 0] for i in range(3))
    assert (first == 0).all() and (second == 255).all()
    half = cutmix[:16] if axis == 'top-bottom' else cutmix[:, :16]
    assert (half == 0).all() and cutmix.mean() == 127.5
    assert picture.shape == (2 * (32 + 2) + 2, (2 + 3) * (32 + 2) + 2, 3), '2 sources, 3 kinds; Nsize = 2 rows'


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
