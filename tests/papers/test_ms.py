"""train_ms.py against the Multi-Similarity loss, Metrix Eq. (2)."""
from functools import partial
from math import cos, exp, log, radians

import pytest
import torch
from conftest import on_circle
from worked import expect, expect_gradients, expect_sound, moving

from train_ms import mine, multi_similarity_loss


def pull(*degrees, alpha=2.0, lam=0.5):
    """First term of Metrix Eq. (2) for positives at these angles from the anchor, in degrees"""
    return log(1 + sum(exp(-alpha * (cos(radians(d)) - lam)) for d in degrees)) / alpha


def push(*degrees, beta=50.0, lam=0.5):
    """Second term, for negatives"""
    return log(1 + sum(exp(beta * (cos(radians(d)) - lam)) for d in degrees)) / beta


@pytest.mark.parametrize('alpha, beta, lam', [(2, 50, 0.5), (5, 3, -0.2)])
def test_metrix_eq2_by_hand(alpha, beta, lam):
    """Two equal images are positives of each other: an anchor is excluded by its index. Two images have no positive."""
    z, y = on_circle(90, 0, 200, 50, 0), torch.tensor([2, 5, 0, 5, 5])
    positives = (0, 50), (0, 50), (50, 50), (), ()
    negatives = (90, 200), (90, 200), (40, 150), (90, 90, 40, 110), (200, 200, 150, 110)
    anchors = [pull(*p, alpha=alpha, lam=lam) + push(*n, beta=beta, lam=lam) for p, n in zip(positives, negatives)]
    expect(multi_similarity_loss(z, y, alpha, beta, lam), sum(anchors) / 5,
           f'Metrix Eq. (2) at 0, 0, 50 (class 5), 90 (2), 200 degrees (0), alpha {alpha}, beta {beta}, lambda {lam}')


def test_metrix_eq2_closed_form_gradient():
    """The derivative with respect to a similarity is a softmax weight over the positives, or negatives, and the 1 of
    "1 +"."""
    (t, z), y = moving(0, 100, 40, 70), torch.tensor([2, 0, 2, 2])
    multi_similarity_loss(z, y, alpha=2, beta=5, lam=0.5).backward()
    s, same = z.detach() @ z.detach().T, y[:, None] == y
    p = (-2 * (s - 0.5)).exp() * (same & ~torch.eye(4).bool())
    n = (5 * (s - 0.5)).exp() * ~same
    by_s = (n / (1 + n.sum(dim=1, keepdim=True)) - p / (1 + p.sum(dim=1, keepdim=True))) / 4
    expect_gradients(by_s, 'Metrix Eq. (2), 0, 40, 70 (class 2), 100 (class 0), alpha 2, beta 5, lambda 0.5', images=t)


def test_metrix_eq2_is_a_soft_maximum():
    """With scales of 10,000 only the hardest pair is left: [lambda - min s]_+ + [max s - lambda]_+."""
    loss = multi_similarity_loss(on_circle(60, 0, 40, 70), torch.tensor([0, 2, 2, 2]), 1e4, 1e4, 0.6)
    c = {d: cos(radians(d)) for d in (10, 20, 60, 70)}
    pulls = (0.6 - c[70]) + 0 + (0.6 - c[70])                    # at 0, 40, 70; at 60 there is no positive
    pushes = 0 + (c[20] - 0.6) + (c[10] - 0.6) + (c[10] - 0.6)   # 0 and 60 are too far from each other
    expect(loss, (pulls + pushes) / 4, 'Metrix Eq. (2) at 0, 40, 70 (class 2), 60 degrees (class 0), lambda 0.6, with '
           'scales of 10,000: does exp() overflow?', 1e-3)


@pytest.mark.parametrize('epsilon', [None, 0.1])
def test_metrix_eq2_of_any_batch(epsilon):
    expect_sound(partial(multi_similarity_loss, epsilon=epsilon), 'Metrix Eq. (2)',
                 on_circle(0, 90, 20, 100, 50, 200), torch.tensor([5, 0, 5, 0, 5, 2]))


# ---- the miner

def test_metrix_eq2_miner_keeps_what_is_harder_than_the_hardest_of_the_other_kind():
    """For the anchor at 0, the hardest negative is at 40 (0.766), and the hardest positive at 50 (0.643)."""
    z, y = on_circle(0, 40, 25, 120, 50), torch.tensor([5, 2, 5, 2, 5])
    kept = mine(z @ z.T, y, 0.05)
    expected = [[[0, 0, 0, 0, 1],                                # 50, but not 25 (0.906)
                 [0, 0, 0, 1, 0], [1, 0, 0, 0, 1], [0, 1, 0, 0, 0], [1, 0, 1, 0, 0]],
                [[0, 1, 0, 0, 0],                                # 40, but not 120 (-0.5)
                 [1, 0, 1, 0, 1], [0, 1, 0, 0, 0], [0, 0, 0, 0, 1], [0, 1, 0, 0, 0]]]
    for kind, mask, rows in zip(('positives', 'negatives'), kept, expected):
        assert mask.dtype == torch.bool, f'the miner returns bool masks, got {mask.dtype}'
        expect(mask, rows, f'the {kind} that the miner keeps, epsilon 0.05, of 0, 25, 50 (class 5), 40, 120 (class 2)')


def test_metrix_eq2_miner_keeps_no_pair_of_an_anchor_without_positives_or_negatives():
    """An anchor without positives, or without negatives, has no pairs, for any epsilon."""
    for labels, positives, negatives in (([5, 5, 5], 0, 0), ([5, 0, 2], 0, 0), ([2, 0, 2], 2, 2)):
        z = on_circle(0, 40, 90)
        kept = [int(mask.sum()) for mask in mine(z @ z.T, torch.tensor(labels), 10.0)]
        expect(kept, [positives, negatives], f'positives, negatives that the miner keeps of classes {labels}')


def test_metrix_eq2_miner_takes_an_exact_duplicate_for_a_positive():
    """An anchor is excluded by its index, not by a similarity of 1. With epsilon 2 all pairs are kept, except for
    the anchor without positives."""
    y = torch.tensor([5, 2, 5])
    positive, negative = mine(on_circle(0, 90, 0) @ on_circle(0, 90, 0).T, y, 2.0)
    what = 'that the miner keeps, epsilon 2, of 0, 0 (class 5), 90 degrees (class 2), in the order 5, 2, 5'
    expect(positive, [[0, 0, 1], [0, 0, 0], [1, 0, 0]], f'the positives {what}')
    expect(negative, [[0, 1, 0], [0, 0, 0], [0, 1, 0]], f'the negatives {what}')


@pytest.mark.parametrize('epsilon', [0.0, 0.1])
def test_metrix_eq2_with_the_miner(epsilon):
    """All pairs of the anchors at 0 and 170 are easy, so these two anchors add 0 to the mean of four."""
    loss = multi_similarity_loss(on_circle(45, 0, 170, 30), torch.tensor([2, 5, 2, 5]), epsilon=epsilon)
    expect(loss, (pull(30) + push(15) + pull(125) + push(45, 15)) / 4,
           f'Metrix Eq. (2) with epsilon {epsilon} at 0, 30 (class 5), 45, 170 degrees (class 2)')


def test_metrix_eq2_miner_drops_pairs_that_are_equally_hard():
    """All similarities of four axes are 0, so with epsilon 0 no pair is harder than the hardest of the other kind."""
    z, y = torch.eye(4).double(), torch.tensor([5, 2, 5, 2])
    kept = [int(mask.sum()) for mask in mine(z @ z.T, y, 0)]
    expect(kept, [0, 0], 'positives, negatives that the miner keeps of four orthogonal images of classes 5, 2, 5, 2')
    expect(multi_similarity_loss(z, y, epsilon=0), 0,
           'Metrix Eq. (2) with epsilon 0 of four orthogonal images of classes 5, 2, 5, 2')
