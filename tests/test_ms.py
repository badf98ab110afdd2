"""train_ms.py against Multi-Similarity as Metrix Eq. (2) writes it."""
from math import cos, exp, log, radians

import pytest
import torch
from conftest import on_circle
from worked import expect, expect_gradients, expect_raised, moving

from train_ms import mine, multi_similarity_loss


def pull(*degrees, alpha=2.0, lam=0.5):
    """First term of Metrix Eq. (2) for positives that are so many degrees away"""
    return log(1 + sum(exp(-alpha * (cos(radians(d)) - lam)) for d in degrees)) / alpha


def push(*degrees, beta=50.0, lam=0.5):
    """Second term, for negatives"""
    return log(1 + sum(exp(beta * (cos(radians(d)) - lam)) for d in degrees)) / beta


def test_metrix_eq2_by_hand():
    """Points at 0, 30 (class 0) and 90 degrees (class 1): one positive pair, two negative ones."""
    loss = multi_similarity_loss(on_circle(0, 30, 90), torch.tensor([0, 0, 1]))
    anchors = [pull(30) + push(90), pull(30) + push(60), push(90, 60)]      # 90 has no positive
    expect(loss, sum(anchors) / 3, 'Metrix Eq. (2) at 0, 30 (class 0), 90 degrees (class 1), the mean of 3 anchors')


@pytest.mark.parametrize('alpha, beta, lam', [(2, 50, 0.5), (5, 3, -0.2)])
def test_metrix_eq2_sums_over_the_pairs_of_an_anchor(alpha, beta, lam):
    z, y = on_circle(0, 20, 50, 90, 200), torch.tensor([0, 0, 0, 1, 2])
    positives = (20, 50), (20, 30), (50, 30), (), ()
    negatives = (90, 200), (70, 180), (40, 150), (90, 70, 40, 110), (200, 180, 150, 110)
    anchors = [pull(*p, alpha=alpha, lam=lam) + push(*n, beta=beta, lam=lam) for p, n in zip(positives, negatives)]
    expect(multi_similarity_loss(z, y, alpha, beta, lam), sum(anchors) / 5,
           f'Metrix Eq. (2) at 0, 20, 50 (class 0), 90 (1), 200 degrees (2), alpha {alpha}, beta {beta}, lambda {lam}')


def test_metrix_eq2_closed_form_gradient():
    """The derivative by a similarity is a softmax weight over the anchor's pairs of that kind, and the one of "1 +"."""
    degrees, y = (0, 40, 70, 100), [0, 0, 0, 1]
    t, z = moving(*degrees)
    multi_similarity_loss(z, torch.tensor(y), alpha=2, beta=5, lam=0.5).backward()
    by_s, z = torch.zeros(4, 4, dtype=torch.float64), z.detach()
    for a in range(4):
        p = {i: exp(-2 * (z[a] @ z[i] - 0.5)) for i in range(4) if y[i] == y[a] and i != a}
        n = {i: exp(5 * (z[a] @ z[i] - 0.5)) for i in range(4) if y[i] != y[a]}
        for i in range(4):
            by_s[a, i] = (n.get(i, 0) / (1 + sum(n.values())) - p.get(i, 0) / (1 + sum(p.values()))) / 4
    expect_gradients(by_s, 'Metrix Eq. (2), 0, 40, 70 (class 0), 100 (class 1), alpha 2, beta 5, lambda 0.5', images=t)


def test_metrix_eq2_is_a_soft_maximum():
    """With scales of 10,000 only the hardest pair is left: [lambda - min s]_+ + [max s - lambda]_+."""
    loss = multi_similarity_loss(on_circle(0, 40, 70, 60), torch.tensor([0, 0, 0, 1]), 1e4, 1e4, 0.6)
    c = {d: cos(radians(d)) for d in (10, 20, 60, 70)}
    pulls = (0.6 - c[70]) + 0 + (0.6 - c[70])                    # at 0, 40, 70; at 60 there is no positive
    pushes = 0 + (c[20] - 0.6) + (c[10] - 0.6) + (c[10] - 0.6)   # 0 and 60 are too far from each other
    expect(loss, (pulls + pushes) / 4, 'Metrix Eq. (2) at 0, 40, 70 (class 0), 60 degrees (class 1), lambda 0.6, with '
           'scales of 10,000: does exp() overflow?', 1e-3)


def test_metrix_eq2_a_duplicate_is_a_positive():
    loss = multi_similarity_loss(on_circle(0, 0, 90), torch.tensor([0, 0, 1]))
    expect(loss, (2 * (pull(0) + push(90)) + push(90, 90)) / 3,
           'Metrix Eq. (2) at 0, 0 (class 0), 90 degrees (class 1): an image excludes itself by its index')


def test_metrix_eq2_in_half_precision():
    y = torch.tensor([0, 0, 0, 1, 1])
    expect_raised(lambda z: multi_similarity_loss(z, y, epsilon=0.1), 'Metrix Eq. (2)', on_circle(0, 20, 50, 90, 100))


# ---- the miner


def test_metrix_eq2_miner_keeps_what_is_harder_than_the_hardest_of_the_other_kind():
    """Of the anchor at 0, the hardest negative is at 40 (0.766), the hardest positive at 50 (0.643)."""
    z, y = on_circle(0, 25, 50, 40, 120), torch.tensor([0, 0, 0, 1, 1])
    kept = mine(z @ z.T, y, 0.05)
    expected = [[[0, 0, 1, 0, 0],                                # of 25 (0.906) and 50 the second
                 [1, 0, 1, 0, 0], [1, 1, 0, 0, 0], [0, 0, 0, 0, 1], [0, 0, 0, 1, 0]],
                [[0, 0, 0, 1, 0],                                # of 40 and 120 (-0.5) the first
                 [0, 0, 0, 1, 0], [0, 0, 0, 1, 0], [1, 1, 1, 0, 0], [0, 0, 1, 0, 0]]]
    for kind, mask, rows in zip(('positives', 'negatives'), kept, expected):
        assert mask.dtype == torch.bool, f'the miner returns bool masks, got {mask.dtype}'
        expect(mask, rows, f'the {kind} that the miner keeps, epsilon 0.05, of 0, 25, 50 (class 0), 40, 120 (class 1)')


def test_metrix_eq2_miner_keeps_no_pair_of_an_anchor_that_lacks_a_kind():
    """However large the tolerance: one class; all classes different; a class of one image"""
    for labels, positives, negatives in (([0, 0, 0], 0, 0), ([0, 1, 2], 0, 0), ([0, 0, 1], 2, 2)):
        z = on_circle(0, 40, 90)
        kept = [int(mask.sum()) for mask in mine(z @ z.T, torch.tensor(labels), 10.0)]
        expect(kept, [positives, negatives], f'positives, negatives that the miner keeps of classes {labels}')


@pytest.mark.parametrize('epsilon', [0.0, 0.1])
def test_metrix_eq2_with_the_miner(epsilon):
    """At 0 and at 170 all pairs are easy, so these two anchors add 0 to the mean of four."""
    loss = multi_similarity_loss(on_circle(0, 30, 45, 170), torch.tensor([0, 0, 1, 1]), epsilon=epsilon)
    expect(loss, (pull(30) + push(15) + pull(125) + push(45, 15)) / 4,
           f'Metrix Eq. (2) with epsilon {epsilon} at 0, 30 (class 0), 45, 170 degrees (class 1)')


def test_metrix_eq2_with_the_miner_no_positives_is_zero_and_still_in_the_graph():
    z = on_circle(0, 40, 90).requires_grad_()
    loss = multi_similarity_loss(z, torch.tensor([0, 1, 2]), epsilon=0.1)
    loss.backward()
    expect(loss, 0, 'Metrix Eq. (2) with the miner, three classes of one image')
    expect(z.grad, torch.zeros(3, 2), 'its gradient')
