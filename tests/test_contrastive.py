"""train_contrastive.py against Reality Check Eq. (1), HSE Eq. (2) and Metrix Eq. (1)."""
from math import cos, radians, sin

import pytest
import torch
from conftest import on_circle

import common
import train_contrastive
from train_contrastive import contrastive_loss, contrastive_similarity_loss


def chord(degrees):
    """Distance of two points of the unit circle that are so many degrees apart"""
    return 2 * sin(radians(degrees) / 2)


def moving(*degrees):
    """Angles to differentiate by, and the points at them"""
    t = torch.tensor([radians(d) for d in degrees], dtype=torch.float64, requires_grad=True)
    return t, torch.stack([t.cos(), t.sin()], dim=1)


# ---- on distances


def test_rc_eq1_by_hand():
    """Points at 0, 20 (class 0) and 40, 100 (class 1); of four negative pairs only 20-40 is within 0.5."""
    z, y = on_circle(0, 20, 40, 100), torch.tensor([0, 0, 1, 1])
    assert chord(40) > 0.5 > chord(20)
    expected = (chord(20) + chord(60)) / 2 + (0.5 - chord(20))
    assert contrastive_loss(z, y).item() == pytest.approx(expected, abs=1e-12), \
        'Reality Check Eq. (1): is each term the mean over its non-zero entries?'


def test_rc_eq1_positive_margin():
    """A positive pair within m_pos = 0.4 is no longer a non-zero entry, so it leaves the mean too."""
    z, y = on_circle(0, 20, 40, 100), torch.tensor([0, 0, 1, 1])
    expected = (chord(60) - 0.4) + (0.5 - chord(20))
    assert contrastive_loss(z, y, pos_margin=0.4).item() == pytest.approx(expected, abs=1e-12)
    # a negative margin on positives, the Reality Check's best on CUB, adds a constant and no gradient
    shifted = contrastive_loss(z, y, pos_margin=-0.2)
    assert shifted.item() == pytest.approx(contrastive_loss(z, y).item() + 0.2, abs=1e-12)


@pytest.mark.parametrize('power', [1, 2])
def test_rc_eq1_closed_form_gradient(power):
    """On the circle d = 2 sin(t/2), so a pair t apart has d' = cos(t/2); by the chain rule the rest."""
    t, z = moving(0, 70, 90)
    contrastive_loss(z, torch.tensor([0, 0, 1]), power=power).backward()
    pull = power * chord(70) ** (power - 1) * cos(radians(35))
    push = -power * (0.5 - chord(20)) ** (power - 1) * cos(radians(10))
    expected = torch.tensor([-pull, pull - push, push], dtype=torch.float64)
    assert torch.allclose(t.grad, expected, atol=1e-12)


def test_rc_eq1_goal_reached_costs_nothing():
    """In the paper's words: positives nearer than one threshold, negatives farther than the other."""
    z, y = on_circle(0, 5, 90, 95).requires_grad_(), torch.tensor([0, 0, 1, 1])
    loss = contrastive_loss(z, y, pos_margin=0.1, neg_margin=1.2)
    loss.backward()
    assert chord(5) < 0.1 and chord(85) > 1.2
    assert loss.item() == 0 and torch.equal(z.grad, torch.zeros_like(z))


def test_hse_eq1_is_the_distance_of_two_points():
    d = train_contrastive.distances(on_circle(0, 50, 180))
    assert d.tolist() == [pytest.approx([chord(angle) for angle in angles], abs=1e-12)
                          for angles in ((0, 50, 180), (50, 0, 130), (180, 130, 0))]


def test_hse_eq2_by_hand():
    """The points of test_rc_eq1_by_hand, squared: d^2 for y = 1, (m - d)^2 for y = 0."""
    z, y = on_circle(0, 20, 40, 100), torch.tensor([0, 0, 1, 1])
    expected = (chord(20) ** 2 + chord(60) ** 2) / 2 + (0.5 - chord(20)) ** 2
    assert contrastive_loss(z, y, power=2).item() == pytest.approx(expected, abs=1e-12)


def test_hse_eq2_nearer_negatives_cost_more():
    """In the paper's words: large when anchor and negative are near, small when they are far."""
    y = torch.tensor([0, 1])
    values = [contrastive_loss(on_circle(0, a), y, power=2).item() for a in (0, 10, 20, 28, 40)]
    assert values == sorted(values, reverse=True) and values[0] == 0.5 ** 2 and values[-1] == 0


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
    """Points at 0, 20, 50 (class 0) and 70, 180 (class 1), margin cos 60 = 0.5."""
    z, y = on_circle(0, 20, 50, 70, 180), torch.tensor([0, 0, 0, 1, 1])
    c = {a: cos(radians(a)) for a in (20, 30, 50, 110)}
    n = 2 if reduction == 'mean' else 1                      # positives of an anchor of class 0
    anchors = [-(c[20] + c[50]) / n,                         # 0: its negatives are 70 and 180 degrees away
               -(c[20] + c[30]) / n + (c[50] - 0.5),         # 20: 70 is 50 degrees away, above the margin
               -(c[50] + c[30]) / n + (c[20] - 0.5),         # 50: 70 is 20 degrees away
               -c[110] + (c[50] - 0.5 + c[20] - 0.5) / n,    # 70: both 20 and 50 are above the margin
               -c[110]]                                      # 180
    loss = contrastive_similarity_loss(z, y, 0.5, reduction)
    assert loss.item() == pytest.approx(sum(anchors) / 5, abs=1e-12), \
        'Metrix Eq. (1): averaged over all anchors, no margin on positives?'


def test_metrix_eq1_closed_form_gradient():
    """By a similarity: -1 for a positive pair, 1 for a negative one above the margin, else 0."""
    t, z = moving(0, 80, 100)
    contrastive_similarity_loss(z, torch.tensor([0, 0, 1]), reduction='sum').backward()
    # every pair has two anchors, the mean is over three; ds/dt = -sin of the difference
    pull, push = 2 / 3 * sin(radians(80)), -2 / 3 * sin(radians(20))
    expected = torch.tensor([-pull, pull - push, push], dtype=torch.float64)
    assert torch.allclose(t.grad, expected, atol=1e-12)


def test_metrix_eq1_positives_have_no_margin():
    """At its best, all positives equal and all negatives opposite, an anchor costs -1, not 0."""
    z, y = on_circle(0, 0, 180, 180), torch.tensor([0, 0, 1, 1])
    assert contrastive_similarity_loss(z, y).item() == pytest.approx(-1, abs=1e-12)


def test_an_unknown_reduction_is_refused():
    with pytest.raises(ValueError, match='reduction'):
        contrastive_similarity_loss(on_circle(0, 10), torch.tensor([0, 0]), reduction='none')


# ---- the script


@pytest.mark.parametrize('flags', ['--margin 0.3', '--form similarity --power 2', '--form similarity --neg-margin 0.3'])
def test_a_flag_of_the_other_form_is_refused(flags):
    with pytest.raises(common.UsageError, match='no effect'):
        train_contrastive.get_args(flags.split())
