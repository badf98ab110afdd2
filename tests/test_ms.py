"""train_ms.py against Multi-Similarity as Metrix Eq. (2) writes it."""
from math import cos, exp, log, pi

import pytest
import torch
from conftest import on_circle

import train_ms
from train_ms import mine, multi_similarity_loss

ALPHA, BETA, LAM = 2.0, 50.0, 0.5


def test_metrix_eq2_by_hand():
    """Points at 0, 30 (class 0) and 90 degrees (class 1): one positive pair, two negative ones."""
    z, y = on_circle(0, 30, 90), torch.tensor([0, 0, 1])
    pull = log(1 + exp(-ALPHA * (cos(pi / 6) - LAM))) / ALPHA
    at_0 = pull + log(1 + exp(BETA * (0 - LAM))) / BETA
    at_30 = pull + log(1 + exp(BETA * (cos(pi / 3) - LAM))) / BETA
    at_90 = log(1 + exp(BETA * (0 - LAM)) + exp(BETA * (cos(pi / 3) - LAM))) / BETA     # no positive
    loss = multi_similarity_loss(z, y, ALPHA, BETA, LAM)
    assert loss.item() == pytest.approx((at_0 + at_30 + at_90) / 3, abs=1e-12), \
        'Metrix Eq. (2): is the "1 +" there, is the mean over all three anchors?'


def test_metrix_eq2_weight_of_a_pair():
    """The derivative by one similarity is a softmax weight over the anchor's pairs of that kind."""
    z, y = on_circle(0, 20, 50, 80, 120), torch.tensor([0, 0, 0, 1, 1])
    s = (z @ z.T).requires_grad_()
    positive, negative = train_ms.pairs(y)
    pull = train_ms.log1p_sum_exp(-ALPHA * (s - LAM), positive) / ALPHA
    push = train_ms.log1p_sum_exp(BETA * (s - LAM), negative) / BETA
    (pull + push)[0].backward()
    p = [exp(-ALPHA * (s[0, j].item() - LAM)) for j in (1, 2)]
    n = [exp(BETA * (s[0, j].item() - LAM)) for j in (3, 4)]
    expected = [0, -p[0] / (1 + sum(p)), -p[1] / (1 + sum(p)), n[0] / (1 + sum(n)), n[1] / (1 + sum(n))]
    assert torch.allclose(s.grad[0], torch.tensor(expected, dtype=torch.float64), atol=1e-12)


def test_metrix_eq2_is_a_soft_maximum():
    """With a large scale only the hardest pair is left: [lam - min s]_+ + [max s - lam]_+."""
    z, y = on_circle(0, 40, 70, 60), torch.tensor([0, 0, 0, 1])
    loss = multi_similarity_loss(z, y, 1e4, 1e4, 0.6)
    s = (z @ z.T).tolist()
    pull = max(0.6 - s[0][2], 0), max(0.6 - s[1][0], 0.6 - s[1][2], 0), max(0.6 - s[2][0], 0)
    push = max(s[0][3] - 0.6, 0), max(s[1][3] - 0.6, 0), max(s[2][3] - 0.6, 0), max(max(s[3][:3]) - 0.6, 0)
    assert loss.item() == pytest.approx((sum(pull) + sum(push)) / 4, abs=1e-3)


def test_miner_keeps_what_is_harder_than_the_hardest_of_the_other_kind():
    """Anchor at 0 degrees, positives at 10 and 60, negatives at 50 and 85; epsilon = 0.05."""
    z, y = on_circle(0, 10, 60, 50, 85), torch.tensor([0, 0, 0, 1, 1])
    positive, negative = mine(z @ z.T, y, 0.05)
    # hardest negative cos 50 = 0.643: cos 10 - 0.05 = 0.935 is above it, cos 60 - 0.05 = 0.45 below
    assert positive[0].tolist() == [False, False, True, False, False]
    # hardest positive cos 60 = 0.5: cos 50 + 0.05 = 0.693 is above it, cos 85 + 0.05 = 0.137 below
    assert negative[0].tolist() == [False, False, False, True, False]


def test_miner_with_infinite_slack_keeps_all_pairs_of_anchors_that_have_both_kinds():
    z, y = on_circle(0, 10, 60, 50), torch.tensor([0, 0, 0, 1])
    positive, negative = mine(z @ z.T, y, float('inf'))
    everything = train_ms.pairs(y)
    assert torch.equal(positive, everything[0])
    assert torch.equal(negative[:3], everything[1][:3]) and not negative[3].any()


def test_no_positives_with_the_miner_is_zero_and_still_in_the_graph():
    z = on_circle(0, 40, 90).requires_grad_()
    loss = multi_similarity_loss(z, torch.tensor([0, 1, 2]), epsilon=0.1)
    loss.backward()
    assert loss.item() == 0 and torch.equal(z.grad, torch.zeros_like(z))
