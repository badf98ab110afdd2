"""train_contrastive.py against Reality Check Eq. (1), HSE Eq. (2) and Metrix Eq. (1)."""
from math import cos, radians, sin

import pytest
import torch
from conftest import on_circle
from worked import expect, expect_gradients, expect_raised, moving

import train_contrastive
from train_contrastive import contrastive_loss, contrastive_similarity_loss


def chord(degrees):
    """Distance of two points of the unit circle that are so many degrees apart"""
    return 2 * sin(radians(degrees) / 2)


def four_points():
    """Of four negative pairs only 20 to 40 is within a distance of 0.5."""
    return on_circle(0, 20, 40, 100), torch.tensor([0, 0, 1, 1])


WHERE = 'at 0, 20 (class 0), 40, 100 degrees (class 1), negative margin 0.5'


# ---- on distances


def test_rc_eq1_by_hand():
    loss = contrastive_loss(*four_points())
    expect(loss, (chord(20) + chord(60)) / 2 + (0.5 - chord(20)),
           f'Reality Check Eq. (1) {WHERE}: each term is the mean over its non-zero entries')


@pytest.mark.parametrize('pos_margin, pull', [(0.4, chord(60) - 0.4), (-0.2, (chord(20) + chord(60)) / 2 + 0.2)])
def test_rc_eq1_positive_margin(pos_margin, pull):
    """A positive pair within 0.4 is no longer a non-zero entry, so it leaves the mean too; no image is its own pair."""
    loss = contrastive_loss(*four_points(), pos_margin=pos_margin)
    expect(loss, pull + 0.5 - chord(20), f'Reality Check Eq. (1) {WHERE}, positive margin {pos_margin}')


def test_rc_eq1_negative_margin():
    """Within a distance of 1.3 are three negative pairs: 40, 20 and 80 degrees apart."""
    loss = contrastive_loss(*four_points(), pos_margin=0.5, neg_margin=1.3)
    push = [1.3 - chord(40), 1.3 - chord(20), 1.3 - chord(80)]
    expect(loss, chord(60) - 0.5 + sum(push) / 3,
           'Reality Check Eq. (1) at 0, 20 (class 0), 40, 100 degrees (class 1), margins 0.5 and 1.3')


@pytest.mark.parametrize('power', [1, 2])
def test_rc_eq1_closed_form_gradient(power):
    """On the circle d = 2 sin(t/2), so a pair t apart has d' = cos(t/2); by the chain rule the rest."""
    t, z = moving(0, 70, 90)
    contrastive_loss(z, torch.tensor([0, 0, 1]), power=power).backward()
    pull = power * chord(70) ** (power - 1) * cos(radians(35))
    push = -power * (0.5 - chord(20)) ** (power - 1) * cos(radians(10))
    expect(t.grad, [-pull, pull - push, push], 'Reality Check Eq. (1), derivatives by the angles 0, 70 (class 0), 90 '
           f'(class 1), power {power}')


def test_rc_eq1_goal_reached_costs_nothing():
    """In the paper's words: positives nearer than one threshold, negatives farther than the other."""
    z, y = on_circle(0, 5, 90, 95).requires_grad_(), torch.tensor([0, 0, 1, 1])
    loss = contrastive_loss(z, y, pos_margin=0.1, neg_margin=1.2)
    loss.backward()
    expect(loss, 0, 'Reality Check Eq. (1) at 0, 5 (class 0), 90, 95 degrees (class 1), margins 0.1 and 1.2')
    expect(z.grad, torch.zeros(4, 2), 'its gradient')


def test_rc_eq1_a_term_without_pairs_is_0():
    for labels, expected in ([0, 0], chord(20)), ([0, 1], 0.5 - chord(20)):
        loss = contrastive_loss(on_circle(0, 20), torch.tensor(labels))
        expect(loss, expected, f'Reality Check Eq. (1) at 0, 20 degrees, of classes {labels}')


def test_rc_eq1_in_half_precision():
    z, y = four_points()
    expect_raised(lambda z: contrastive_loss(z, y), 'Reality Check Eq. (1)', z)


def test_hse_eq1_is_the_distance_of_two_points():
    d = train_contrastive.distances(on_circle(0, 50, 180))
    assert d.tolist() == [pytest.approx([chord(angle) for angle in angles], abs=1e-12)
                          for angles in ((0, 50, 180), (50, 0, 130), (180, 130, 0))]


def test_hse_eq2_by_hand():
    """Squared: d^2 for y = 1, (m - d)^2 for y = 0."""
    expected = (chord(20) ** 2 + chord(60) ** 2) / 2 + (0.5 - chord(20)) ** 2
    expect(contrastive_loss(*four_points(), power=2), expected, f'HSE Eq. (2) {WHERE}')


@pytest.mark.parametrize('dtype', [torch.float32, torch.float64])
def test_coinciding_positives_do_not_count(dtype):
    """Three copies and one other image, rounded in 512 dimensions: three pairs of distance d, not six."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        two = torch.nn.functional.normalize(torch.randn(2, 512, generator=generator).to(dtype), dim=1)
        z, y = two[[0, 0, 0, 1]].requires_grad_(), torch.zeros(4, dtype=torch.long)
        loss = contrastive_loss(z, y)
        loss.backward()
        d = (two[0] - two[1]).norm().item()
        assert loss.item() == pytest.approx(d, rel=1e-5), 'do pairs of distance 0 count as non-zero?'
        # each copy sees one distance of three: a gradient of length 1/3, the other image gets all three
        assert z.grad.norm(dim=1).tolist() == pytest.approx([1 / 3, 1 / 3, 1 / 3, 1], rel=1e-4)


def test_the_same_up_to_rounding_is_the_same():
    """One image twice in a batch: its embeddings may differ, but only by rounding."""
    generator = torch.Generator().manual_seed(0)
    once = torch.nn.functional.normalize(torch.randn(64, 512, generator=generator), dim=1)
    again = torch.nn.functional.normalize(1.7 * once, dim=1)
    assert not torch.equal(once, again)
    z, y = torch.cat([once, again]).requires_grad_(), torch.arange(64).repeat(2)
    loss = contrastive_loss(z, y, neg_margin=0.0)            # the only positives are the copies
    loss.backward()
    assert loss.item() == 0 and torch.equal(z.grad, torch.zeros_like(z))


def test_coinciding_negatives_cost_the_margin_and_have_no_direction():
    z = on_circle(30, 30).requires_grad_()
    loss = contrastive_loss(z, torch.tensor([0, 1]))
    loss.backward()
    assert loss.item() == 0.5 and torch.equal(z.grad, torch.zeros_like(z))


# ---- on similarities


@pytest.mark.parametrize('reduction', ['sum', 'mean'])
def test_metrix_eq1_by_hand(reduction):
    z, y = on_circle(0, 20, 50, 70, 180, 270), torch.tensor([0, 0, 0, 1, 1, 2])
    c = {a: cos(radians(a)) for a in (20, 30, 50, 110)}
    n = 2 if reduction == 'mean' else 1                      # positives of an anchor of class 0
    anchors = [-(c[20] + c[50]) / n,                         # 0: its negatives are 70, 180 and 90 degrees away
               -(c[20] + c[30]) / n + (c[50] - 0.5),         # 20: 70 is 50 degrees away, above the margin
               -(c[50] + c[30]) / n + (c[20] - 0.5),         # 50: 70 is 20 degrees away
               -c[110] + (c[50] - 0.5 + c[20] - 0.5) / n,    # 70: both 20 and 50 are above the margin
               -c[110],                                      # 180
               0]                                            # 270: no positive, and no near negative; it counts
    expect(contrastive_similarity_loss(z, y, 0.5, reduction), sum(anchors) / 6,
           f'Metrix Eq. (1) at 0, 20, 50 (class 0), 70, 180 (1), 270 degrees (2), margin 0.5, {reduction}')


def test_metrix_eq1_margin():
    loss = contrastive_similarity_loss(on_circle(0, 80), torch.tensor([0, 1]), margin=-0.3)
    expect(loss, cos(radians(80)) + 0.3, 'Metrix Eq. (1) at 0 (class 0), 80 degrees (class 1), margin -0.3')


@pytest.mark.parametrize('reduction', ['sum', 'mean'])
def test_metrix_eq1_closed_form_gradient(reduction):
    """By a similarity: -1 for a positive pair, 1 for a negative one above the margin, else 0; the mean divides."""
    t, z = moving(0, 100, 130, 150)
    contrastive_similarity_loss(z, torch.tensor([0, 0, 0, 1]), reduction=reduction).backward()
    n = 2 if reduction == 'mean' else 1
    by_s = torch.tensor([[0, -1, -1, 0], [-1, 0, -1, n], [-1, -1, 0, n], [0, 1, 1, 0]]) / n / 4
    what = f'Metrix Eq. (1), 0, 100, 130 (class 0), 150 degrees (class 1), margin 0.5, {reduction}'
    expect_gradients(by_s, what, images=t)


def test_metrix_eq1_positives_have_no_margin():
    """At its best, all positives equal and all negatives opposite, an anchor costs -1, not 0."""
    loss = contrastive_similarity_loss(on_circle(0, 0, 180, 180), torch.tensor([0, 0, 1, 1]))
    expect(loss, -1, 'Metrix Eq. (1) at 0, 0 (class 0), 180, 180 degrees (class 1): an image excludes itself by index')


def test_metrix_eq1_in_half_precision():
    z, y = four_points()
    expect_raised(lambda z: contrastive_similarity_loss(z, y), 'Metrix Eq. (1)', z)


def test_an_unknown_reduction_is_refused():
    with pytest.raises(ValueError, match='reduction'):
        contrastive_similarity_loss(on_circle(0, 10), torch.tensor([0, 0]), reduction='none')
