"""train_contrastive.py against Reality Check Eq. (1), HSE Eq. (2) and Metrix Eq. (1)."""
from functools import partial
from math import cos, radians

import pytest
import torch
import torch.nn.functional as F
from conftest import on_circle, unit
from worked import chord, expect, expect_gradients, expect_sound, moving

from train_contrastive import contrastive_loss, contrastive_similarity_loss, distances


def four_points():
    """Points at 0 and 20 degrees are of class 5, at 40 and 100 of class 2. Of four negative pairs, only 20 and 40 are
    closer than 0.5."""
    return on_circle(40, 0, 100, 20), torch.tensor([2, 5, 2, 5])


# ---- on distances

@pytest.mark.parametrize('margins, pull, push', [
    ({}, (chord(20) + chord(60)) / 2, 0.5 - chord(20)),
    (dict(pos_margin=0.4), chord(60) - 0.4, 0.5 - chord(20)),       # the other positive pair has zero loss
    (dict(pos_margin=-0.2), (chord(20) + chord(60)) / 2 + 0.2, 0.5 - chord(20)),        # no image is paired with itself
    (dict(pos_margin=0.5, neg_margin=1.3), chord(60) - 0.5, 1.3 - (chord(40) + chord(20) + chord(80)) / 3)])
def test_rc_eq1_by_hand(margins, pull, push):
    """Each term is the mean over its non-zero entries."""
    expect(contrastive_loss(*four_points(), **margins), pull + push,
           f'Reality Check Eq. (1) at 0, 20 (class 5), 40, 100 degrees (class 2), margins 0 and 0.5 {margins or ""}')


@pytest.mark.parametrize('power', [1, 2])
def test_rc_eq1_closed_form_gradient(power):
    """A pair at an angle t has the distance d = 2 sin(t/2), so d' = cos(t/2); the chain rule gives the gradient."""
    t, z = moving(0, 90, 70)
    contrastive_loss(z, torch.tensor([5, 0, 5]), power=power).backward()
    pull = power * chord(70) ** (power - 1) * cos(radians(35))
    push = -power * (0.5 - chord(20)) ** (power - 1) * cos(radians(10))
    expect(t.grad, [-pull, push, pull - push], 'Reality Check Eq. (1), gradient of the angles 0 (class 5), 90 '
           f'(class 0), 70 (class 5), power {power}')


def test_rc_eq1_a_term_without_pairs_is_0():
    """Two equal images of different classes violate the margin by its full value."""
    for degrees, labels, expected in ((20, [2, 2], chord(20)), (20, [5, 2], 0.5 - chord(20)), (0, [5, 2], 0.5)):
        loss = contrastive_loss(on_circle(0, degrees), torch.tensor(labels))
        expect(loss, expected, f'Reality Check Eq. (1) at 0, {degrees} degrees, of classes {labels}')


def test_rc_eq1_of_any_batch():
    for power in (1, 2):
        expect_sound(partial(contrastive_loss, power=power), 'Reality Check Eq. (1)',
                     on_circle(0, 40, 20, 100, 90), torch.tensor([5, 0, 5, 0, 2]))


def test_rc_eq1_and_hse_eq1_and_hse_eq2_with_the_power_of_2():
    """HSE Eq. (1) is the distance, and Eq. (2) the squared loss: d^2 for y = 1, (m - d)^2 for y = 0. Each entry is
    squared after the margin, before the mean."""
    d = [[chord(angle) for angle in angles] for angles in ((0, 50, 180), (50, 0, 130), (180, 130, 0))]
    expect(distances(on_circle(0, 50, 180)), d, 'HSE Eq. (1) at 0, 50, 180 degrees')
    for margin in (0, 0.2):
        expected = ((chord(20) - margin) ** 2 + (chord(60) - margin) ** 2) / 2 + (0.5 - chord(20)) ** 2
        expect(contrastive_loss(*four_points(), margin, power=2), expected, 'Reality Check Eq. (1), HSE Eq. (2) at 0, '
               f'20 (class 5), 40, 100 degrees (class 2), power 2, margins {margin} and 0.5')


@pytest.mark.parametrize('dtype', [torch.float32, torch.float64])
def test_distances_within_floating_point_error_count_as_0(dtype):
    """With three duplicates up to floating-point error and one other image, three pairs have a loss, not six."""
    for seed in range(20):
        a, b = unit(2, 512, seed, dtype)
        z = F.normalize(torch.stack([a, 1.7 * a, 3.1 * a, b]), dim=1).requires_grad_()
        loss = contrastive_loss(z, torch.zeros(4).long())
        loss.backward()
        assert loss.item() == pytest.approx((a - b).norm().item(), rel=1e-5), 'do distances of 0 count as non-zero?'
        # a duplicate has one of three distances, so its gradient has norm 1/3; the other image has all three
        assert z.grad.norm(dim=1).tolist() == pytest.approx([1 / 3, 1 / 3, 1 / 3, 1], rel=1e-4)


# ---- on similarities

@pytest.mark.parametrize('reduction', ['sum', 'mean'])
def test_metrix_eq1_by_hand(reduction):
    """Two equal images are positives of each other: an anchor is excluded by its index. The margin applies to
    negatives."""
    z, y = on_circle(70, 0, 270, 50, 180, 0), torch.tensor([5, 0, 2, 0, 5, 0])
    c = {a: cos(radians(a)) for a in (20, 50, 70, 110)}
    n, m = (2, 3) if reduction == 'mean' else (1, 1)         # positives of an anchor of class 0, active negatives of 70
    first = -(1 + c[50]) / n + (c[70] - 0.3)                 # 0: of 70, 180 and 270, only 70 is above the margin
    anchors = [first, first,
               -2 * c[50] / n + (c[20] - 0.3),               # 50: 70 is 20 degrees away
               -c[110] + (2 * (c[70] - 0.3) + c[20] - 0.3) / m,
               -c[110],                                      # 180
               0]                                            # 270: no positive, no active negative; still counted
    expect(contrastive_similarity_loss(z, y, 0.3, reduction), sum(anchors) / 6,
           f'Metrix Eq. (1) at 0, 0, 50 (class 0), 70, 180 (5), 270 degrees (2), margin 0.3, {reduction}')


@pytest.mark.parametrize('reduction', ['sum', 'mean'])
def test_metrix_eq1_closed_form_gradient(reduction):
    """The derivative with respect to a similarity is -1 for a positive pair, 1 for a negative pair above the margin,
    else 0, divided by the number of such pairs with reduction mean."""
    t, z = moving(0, 150, 100, 130)
    contrastive_similarity_loss(z, torch.tensor([2, 0, 2, 2]), reduction=reduction).backward()
    n = 2 if reduction == 'mean' else 1
    by_s = torch.tensor([[0, 0, -1, -1], [0, 0, 1, 1], [-1, n, 0, -1], [-1, n, -1, 0]]) / n / 4
    what = f'Metrix Eq. (1), 0, 100, 130 (class 2), 150 degrees (class 0), margin 0.5, {reduction}'
    expect_gradients(by_s, what, images=t)


def test_metrix_eq1_of_any_batch():
    expect_sound(contrastive_similarity_loss, 'Metrix Eq. (1)', on_circle(0, 40, 20, 100, 90),
                 torch.tensor([5, 0, 5, 0, 2]))
