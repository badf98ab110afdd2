"""train_hse.py against the equations of HSE; pixels of hybrids; EPSHN and N-pair; batches."""
from math import cos, exp, log, radians, sin
from unittest.mock import Mock

import pytest
import torch
from conftest import on_circle, unit
from worked import chord, expect, expect_gradients, expect_sound, moving

import common
import train_hse
from train_hse import (
    SuperclassSampler,
    blend,
    choose_classes,
    contrastive_loss,
    epshn_loss,
    hse_loss,
    hybrid_loss,
    make_hybrids,
    multi_similarity_loss,
    npair_loss,
)


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def batch(classes=5, per_class=3, height=8, width=8, shuffle=False):
    """Images of distinct values, so that each pixel shows which image it is from: (B, 3, h, w), (B,)"""
    labels = torch.arange(classes).repeat_interleave(per_class)
    if shuffle:
        labels = labels[torch.randperm(len(labels), generator=seeded())]
    return torch.rand(len(labels), 3, height, width, generator=seeded(1)), labels


# ---- the equations

def test_hse_eq3_is_mixup_in_equal_parts():
    x_a, x_b = torch.rand(2, 3, 5, 7, generator=seeded(), dtype=torch.float64)
    lam = 1 / 2
    assert torch.equal(blend(torch.stack([x_a, x_b])[None], 'mixup', 'top-bottom', 50)[0], lam * x_a + (1 - lam) * x_b)


IMAGES, WEAK = (0, 30, 100, 130, 60, 200), [True, True, True, True, False, False]
WHERE = 'weak positives at 0, 30, 100, 130 degrees, negatives at 60, 200'


def masks(*rows):
    """Rows that are True for weak positives -> masks of the weak positives and of the negatives, both (H, B)"""
    weak = torch.tensor(rows)
    return weak, ~weak


def l_hy(h, ewp, hn, temperature=0.1):
    """HSE Eq. (9), without alpha, of a hybrid, its easy weak positive and its hard negative, in degrees"""
    s_ewp, s_hn = (cos(radians(h - d)) / temperature for d in (ewp, hn))
    return -log(1 / (1 + exp(s_hn) / exp(s_ewp)))


def test_hse_eq9_and_hse_eq7_and_hse_eq8_by_hand():
    """The loss is the mean over three hybrids. For each, only its nearest negative, Eq. (7), and its nearest weak
    positive, Eq. (8), count. For the last hybrid, its nearest image, at 200 degrees, is in neither mask, and the others
    have negative similarities: an excluded image must not count as similarity 0."""
    weak, negative = masks(WEAK, [True, False, False, False, True, True], [True, True, False, False, False, False])
    negative[2, 5] = False
    loss = hybrid_loss(on_circle(70, 120, 260), on_circle(*IMAGES), weak, negative, alpha=0.7, temperature=0.5)
    parts = l_hy(70, 100, 60, 0.5), l_hy(120, 60, 130, 0.5), l_hy(260, 0, 130, 0.5)
    expect(loss, 0.7 * sum(parts) / 3, f'HSE Eq. (9) of hybrids at 70, 120, 260 degrees, images at {IMAGES}, weak '
           f'positives {weak.tolist()}, negatives {negative.tolist()}, alpha 0.7, temperature 0.5')


def test_hse_eq9_closed_form_gradient():
    """The derivative with respect to s_hn is alpha/T sigmoid(s_hn - s_ewp) over two hybrids, and
    its negative for s_ewp."""
    (t, z), (u, h) = moving(*IMAGES), moving(70, 20)
    hybrid_loss(h, z, *masks(WEAK, WEAK), alpha=0.7, temperature=0.5).backward()
    by_s = torch.zeros(2, 6, dtype=torch.float64)
    for row, (degrees, ewp, hn) in enumerate(((70, 100, 60), (20, 30, 60))):
        weight = 0.7 / 0.5 / 2 / (1 + exp((cos(radians(degrees - ewp)) - cos(radians(degrees - hn))) / 0.5))
        by_s[row, IMAGES.index(hn)], by_s[row, IMAGES.index(ewp)] = weight, -weight
    what = f'HSE Eq. (9) of hybrids at 70, 20, {WHERE}, alpha 0.7, temperature 0.5'
    expect_gradients(by_s, what, hybrids=u, images=t)


def test_hse_eq9_a_hybrid_without_candidates_counts_as_0():
    z, empty = on_circle(45, -40), torch.zeros(0, 2).bool()
    weak, negative = torch.tensor([[[1, 0], [0, 0], [1, 0], [0, 0]], [[0, 1], [0, 1], [0, 0], [0, 0]]]).bool()
    expect(hybrid_loss(on_circle(0, 0, 0, 0), z, weak, negative), l_hy(0, 45, -40) / 4, 'HSE Eq. (9) of hybrids at 0, '
           f'images at 45, -40, weak positives {weak.tolist()}, negatives {negative.tolist()}')
    expect(hybrid_loss(on_circle(0)[:0], z, empty, empty), 0, 'HSE Eq. (9) of no hybrids, two images')


def test_hse_eq9_of_any_batch():
    """The loss of images of classes 5, 0 and 2 with three hybrids, or none, satisfies expect_sound. Weak positives are
    of classes 0 and 5 for the first two hybrids, and only of class 5 for the third."""
    def loss(z, y, h):
        weak = torch.stack([y != 2, y != 2, y == 5])[:len(h)]
        return hybrid_loss(h, z, weak, ~weak)
    for h in (on_circle(70, 20, 190), on_circle(70)[:0]):
        expect_sound(loss, f'HSE Eq. (9) of {len(h)} hybrids', on_circle(0, 60, 30, 200, 100),
                     torch.tensor([5, 2, 0, 2, 5]), h)


@pytest.mark.parametrize('dtype, temperature', [(torch.float32, 1e-3), (torch.float64, 1e-4)])
def test_hse_eq9_is_numerically_stable(dtype, temperature):
    """exp() overflows above 88 in float32, and above 709 in float64; the exponents here are 234 and 2,340."""
    h, z = on_circle(0, dtype=dtype).requires_grad_(), on_circle(40, 0, dtype=dtype)
    loss = hybrid_loss(h, z, *masks([True, False]), temperature=temperature)
    what = f'HSE Eq. (9) of a hybrid at 0, weak positive at 40, negative at 0 degrees, temperature {temperature}'
    expect(loss, (1 - cos(radians(40))) / temperature, f'{what}, {dtype}', 1e-5)
    loss.backward()
    expect(h.grad * temperature, [[1 - cos(radians(40)), -sin(radians(40))]], f'its gradient, {dtype}', 1e-5)


def test_hse_eq10_and_hse_eq11_with_the_contrastive_loss_by_hand():
    """Two classes at 0 and 40 degrees, beyond the margin, a third at 20; the hybrid of the first two images at 25."""
    z, y, h = on_circle(0, 40, 20), torch.tensor([0, 1, 2]), on_circle(25)
    loss = hse_loss(contrastive_loss, z, y, h, torch.tensor([[0, 1]]), alpha=0.3, temperature=1)
    expect(loss, (0.5 - chord(20)) ** 2 + 0.3 * l_hy(25, 40, 20, 1), 'HSE Eq. (10), (11), alpha 0.3, temperature 1')


def test_without_hybrids_the_loss_is_the_base_loss():
    images, y = batch(classes=1)                                 # no hybrid is possible
    z, (hybrids, sources) = unit(3), make_hybrids(images, y)
    assert hybrids.shape == (0, 3, 8, 8) and sources.shape == (0, 2)
    assert hse_loss(multi_similarity_loss, z, y, z[:0], sources) == multi_similarity_loss(z, y)


# ---- hybrids

@pytest.mark.parametrize('options, owners', [
    (dict(kind='cutmix', num=2), '000 000 000 111 111 111'),
    (dict(kind='cutmix', num=3), '00 00 00 11 11 22 22'),
    (dict(kind='cutmix', num=2, axis='left-right'), '00011 00011'),
    (dict(kind='cutmix', num=4, axis='left-right'), '0000111222333 0000111222333'),
    (dict(kind='gridmask', num=2, mask_size=1), '010 101 010'),
    (dict(kind='gridmask', num=2, mask_size=3), '0001110 0001110 0001110 1110001'),
    (dict(kind='gridmask', num=3, mask_size=2), '0011220 0011220 1122001 1122001 2200112'),
    (dict(kind='gridmask', num=4, mask_size=2), '00112 00112 11223 11223 22330')])
def test_each_pixel_is_from_the_expected_source_image(options, owners):
    """Each text has the index of the source image for each pixel. Strips and blocks that do not fit are cropped."""
    owners = [[int(k) for k in line] for line in owners.split()]
    images, y = batch(height=len(owners), width=len(owners[0]), shuffle=True)
    hybrids, sources = make_hybrids(images, y, per_class=3, generator=seeded(), **options)
    for row, line in enumerate(owners):
        for column, k in enumerate(line):
            assert torch.equal(hybrids[:, :, row, column], images[sources[:, k], :, row, column])


@pytest.mark.parametrize('num', [2, 3, 4])
def test_nsize_and_cnum_count_hybrids_of_distinct_classes(num):
    images, y = batch(classes=8, shuffle=True)
    _, sources = make_hybrids(images, y, num=num, per_class=3, combinations=10, generator=seeded())
    assert sources.shape == (30, num)
    for combination in y[sources].view(10, 3, num):
        assert len(combination[0].unique()) == num
        assert (combination == combination[0]).all(), 'Nsize hybrids of one combination have the same classes'
    first = sources[:8 // num * 3].flatten()
    assert len(first.unique()) == len(first), 'no image is used twice before each class was used'


def test_hybrid_r_combines_image_r_of_each_class_and_a_small_class_repeats():
    images, y = batch(classes=2)
    _, sources = make_hybrids(images[:4], y[:4], num=2, per_class=3)
    assert sorted(sources.T.tolist()) == [[0, 1, 2], [3, 3, 3]]


def test_classes_of_a_hybrid_come_from_one_superclass_and_few_combinations_from_any():
    """The fourth superclass has one class only and cannot take part."""
    y, superclasses = torch.arange(13), torch.arange(13) // 4
    pairs = [superclasses[choose_classes(y, 2, 1, superclasses)[0]].tolist() for _ in range(60)]
    assert {tuple(pair) for pair in pairs} == {(0, 0), (1, 1), (2, 2)}


def test_hybrids_follow_from_the_generator_and_the_global_one_is_not_used():
    before = torch.get_rng_state()
    one, same, other = (make_hybrids(*batch(), combinations=9, generator=seeded(seed))[1] for seed in (7, 7, 8))
    assert torch.equal(one, same) and not torch.equal(one, other) and torch.equal(before, torch.get_rng_state())


# ---- base losses

def test_epshn_by_hand():
    """Images of class 2 are at 0, 50 and 91 degrees, of class 5 at 30 and 130, and of class 9 at 250. The two
    duplicates of class 0 at -50 are positives of each other."""
    z, y = on_circle(30, 0, -50, 91, 250, 50, -50, 130), torch.tensor([5, 2, 0, 2, 9, 2, 0, 5])
    angles = [                      # to the easy positive; to the nearest negative that is farther than this positive
        (50, 110),                  # at 0:   30 is nearer than the positive, -50 as near; both are skipped
        (41, 80),                   # at 50:  30 is skipped
        (41, 61),                   # at 91:  130, 39 away, is skipped; 30 remains
        (100, 140),                 # at 30:  0, 50, 91 and -50 are skipped
        (100, 120),                 # at 130: 91 and 50 are skipped
        (0, 50), (0, 50),           # at -50
    ]
    expected = sum(log(1 + exp((cos(radians(n)) - cos(radians(p))) / 0.1)) for p, n in angles) / 7
    expect(epshn_loss(z, y), expected, 'EPSHN at 0, 50, 91 (class 2), 30, 130 (5), 250 (9, without a positive), '
           '-50, -50 degrees (0)')


def test_epshn_without_anchors_is_0():
    loss = epshn_loss(on_circle(0, 40, 90), torch.tensor([5, 0, 2]))
    expect(loss, 0, 'EPSHN of three images of three classes')


def test_epshn_of_any_batch():
    expect_sound(epshn_loss, 'EPSHN', on_circle(30, 0, -50, 91, 250, 50, 130), torch.tensor([5, 2, 0, 2, 9, 2, 5]))


def test_epshn_closed_form_gradient():
    """The derivative with respect to s_n is sigmoid((s_n - s_p) / T) / T over the number of anchors, and
    its negative for s_p."""
    t, z = moving(0, 100, 40)
    epshn_loss(z, torch.tensor([5, 2, 5]), temperature=0.5).backward()
    by_s = torch.zeros(3, 3, dtype=torch.float64)
    for a, p, n in ((0, 2, 1), (2, 0, 1)):                       # the second image has no positive
        weight = 1 / 0.5 / 2 / (1 + exp((z[a] @ z[p] - z[a] @ z[n]).item() / 0.5))
        by_s[a, p], by_s[a, n] = -weight, weight
    expect_gradients(by_s, 'EPSHN at 0, 40 (class 5), 100 degrees (class 2), temperature 0.5', images=t)


def test_epshn_is_numerically_stable():
    """The negative of the anchor at 0 is slightly less similar than its easy positive. For the anchors at 10 and 80 the
    negative is more similar than the positive, so their loss is 0."""
    loss = epshn_loss(on_circle(0, 10.1, 10, 80), torch.tensor([5, 2, 5, 5]), temperature=1e-3)
    at_0 = log(1 + exp((cos(radians(10.1)) - cos(radians(10))) / 1e-3))
    expect(loss, at_0, 'EPSHN at 0, 10, 80 (class 5), 10.1 degrees (class 2), temperature 0.001')


def test_npair_by_hand():
    """Only the first two images of classes 0 and 1 count; a third image and a class of one image are ignored."""
    z, y = on_circle(0, 100, 140, 30, 10, 200), torch.tensor([0, 1, 1, 0, 0, 2])
    a, b = (0, 100), (30, 140)                                   # anchors and positives
    s = [[cos(radians(i - j)) for j in b] for i in a]
    expected = sum(log(sum(exp(v) for v in row)) - row[k] for k, row in enumerate(s)) / 2
    expect(npair_loss(z, y), expected, 'N-pair at 0, 30, 10 (class 0), 100, 140 (class 1), 200 degrees (class 2)')


# ---- the script

def test_superclass_sampler_takes_two_classes_of_each_superclass():
    labels = torch.arange(30).repeat_interleave(torch.arange(30) % 4 + 2)         # 2 to 5 images per class
    superclasses = labels % 3
    sampler = SuperclassSampler(labels, superclasses, batch_size=18, per_class=3)
    lists = list(sampler)
    assert len(lists) == len(sampler) == len(labels) // 18
    assert len({tuple(sorted(indices)) for indices in lists}) == len(lists), 'batches differ'
    for indices in lists:
        y, g = labels[indices], superclasses[indices]
        assert torch.bincount(g).tolist() == [6, 6, 6]
        assert sorted(torch.bincount(y).unique().tolist()) == [0, 3]
    last = {superclasses[indices[-1]].item() for indices in lists + list(sampler) + list(sampler)}
    assert last == {0, 1, 2}, 'any superclass can be last, whose images --hybrids replace drops'
    uneven = torch.arange(12).repeat_interleave(5)          # superclasses of 40, 10 and 10 images
    lists = list(SuperclassSampler(uneven, (uneven > 7).long() + (uneven > 9), batch_size=12, per_class=2))
    assert len(lists) == 60 // 12, 'the small superclasses are repeated'
    small = torch.arange(4).repeat_interleave(2)
    indices, = SuperclassSampler(small, small // 2, batch_size=12, per_class=3)
    assert sorted(small[indices].tolist()) == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3], 'fewer images than a batch'
    with pytest.raises(ValueError, match='multiple'):
        SuperclassSampler(labels, superclasses, batch_size=20, per_class=3)


def give_superclasses(monkeypatch, number):
    """From now on, loaded data have this number of superclasses: class c is in superclass c modulo number."""
    load = common.dataset_from

    def load_with_superclasses(args):
        data = load(args)
        data.train.superclasses = data.train.labels % number
        return data
    monkeypatch.setattr(common, 'dataset_from', load_with_superclasses)


def test_with_superclasses_every_hybrid_stays_inside_one(run, small, monkeypatch):
    """Batches have 2 superclasses x 2 classes x 2 images, with one combination per superclass and appended hybrids."""
    watched = Mock(wraps=hse_loss)
    give_superclasses(monkeypatch, 2)
    monkeypatch.setattr(train_hse, 'hse_loss', watched)
    run(train_hse, '--hybrids', 'append', '--combinations', '2')
    assert watched.call_count == 2
    for call in watched.call_args_list:
        _, _, y, _, sources, *_ = call.args
        first, second = y[sources].T
        assert len(y) == 8 and (first != second).all() and (first % 2 == second % 2).all()
        assert sorted((first % 2).tolist()) == [0, 0, 1, 1]


def test_a_fold_with_too_many_superclasses_ignores_them(run, small, monkeypatch):
    """With three superclasses, batches of 8 cannot have two classes of each: an error, except with --fold."""
    give_superclasses(monkeypatch, 3)
    with pytest.raises(common.UsageError, match='and 2 of each superclass, and there are .1, 1, 1.'):
        run(train_hse, '--hybrids', 'append')
    assert run(train_hse, '--hybrids', 'append', '--fold', '0/3')['epoch'] == 1


def test_masks_that_do_not_fit_the_images_are_rejected():
    """In images of 32 pixels, two by two blocks are from three of the four sources."""
    with pytest.raises(common.UsageError, match='cannot combine 4'):
        train_hse.get_args('--kind gridmask --mask-size 16 --num 4'.split())
    with pytest.raises(common.UsageError, match='cannot combine 2'):
        train_hse.get_args('--kind gridmask --mask-size 64'.split())


def test_an_unknown_kind_of_hybrids_is_rejected():
    with pytest.raises(ValueError, match='cutout'):
        blend(torch.zeros(1, 2, 3, 8, 8), 'cutout', 'top-bottom', mask_size=8)


@pytest.mark.parametrize('flags, needed, classes', [
    ('--num 3', 5, 4), ('--combinations 2', 5, 4), ('--num 4 --combinations 2 --batch-size 64', 7, 6),
    ('--combinations 4', 7, 4)])
def test_a_batch_without_negatives_is_rejected(run, small, flags, needed, classes):
    """The batch has 4 classes of 6. Hybrids replace one class for each combination."""
    with pytest.raises(common.UsageError, match=f'hybrids need {needed} classes in a batch.* there are .{classes}.:'):
        run(train_hse, *flags.split())


def test_hybrids_of_random_batches_are_rejected(run, small):
    with pytest.raises(common.UsageError, match='--per-class 0 gives random batches'):
        run(train_hse, '--loss', 'proxy_anchor', '--per-class', '0')
