"""train_proxy_anchor.py against Proxy-Anchor Eq. (4), its form Eq. (5) and its gradient Eq. (6)."""
from math import cos, exp, log, radians

import pytest
import torch
import torch.nn.functional as F
from conftest import on_circle

from train_proxy_anchor import new_proxies, proxy_anchor_loss

ALPHA, DELTA = 32.0, 0.1


def random_similarities(seed=0):
    """The loss is linear in z up to the similarities, so with the unit vectors as proxies s(x_i, p_k)
    is z_ik itself: a free (B, C) matrix, by which the loss can be differentiated."""
    s = 2 * torch.rand(6, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) - 1
    return s.requires_grad_(), torch.tensor([0, 0, 1, 3, 3, 3]), torch.eye(5, dtype=torch.float64)


def test_pa_eq4_by_hand():
    """Images at 0, 50 (class 0) and 130 (class 1); proxies at 20, 100 and, absent, 160 degrees."""
    z, y, proxies = on_circle(0, 50, 130), torch.tensor([0, 0, 1]), on_circle(20, 100, 160)
    alpha, delta = 4.0, 0.1
    s = [[cos(radians(x - p)) for x in (0, 50, 130)] for p in (20, 100, 160)]
    pull = [log(1 + exp(-alpha * (s[0][0] - delta)) + exp(-alpha * (s[0][1] - delta))),
            log(1 + exp(-alpha * (s[1][2] - delta)))]
    push = [log(1 + exp(alpha * (s[0][2] + delta))),
            log(1 + exp(alpha * (s[1][0] + delta)) + exp(alpha * (s[1][1] + delta))),
            log(1 + sum(exp(alpha * (s[2][i] + delta)) for i in range(3)))]
    loss = proxy_anchor_loss(z, y, proxies, alpha, delta)
    assert loss.item() == pytest.approx(sum(pull) / 2 + sum(push) / 3, abs=1e-12), \
        'Proxy-Anchor Eq. (4): first sum over the 2 classes present, second over all 3? + delta there?'


def test_pa_eq5_softplus_of_logsumexp():
    """The paper's rewriting: Softplus(LSE ...), each proxy over its own images and over all others."""
    def softplus(t):
        return F.softplus(t, threshold=1000)         # torch's own is t itself above 20

    s, y, proxies = random_similarities()
    pull = [softplus((-ALPHA * (s[y == k, k] - DELTA)).logsumexp(0)) for k in (0, 1, 3)]
    push = [softplus((ALPHA * (s[y != k, k] + DELTA)).logsumexp(0)) for k in range(5)]
    loss = proxy_anchor_loss(s, y, proxies)
    assert loss.item() == pytest.approx((sum(pull) / 3 + sum(push) / 5).item(), rel=1e-12)


def test_pa_eq6_closed_form_gradient():
    """By s(x,p): -alpha h+ / (|P+| (1 + sum h+)) for positives, alpha h- / (C (1 + sum h-)) for negatives."""
    s, y, proxies = random_similarities()
    proxy_anchor_loss(s, y, proxies).backward()
    h_plus = {(i, k): exp(-ALPHA * (s[i, k].item() - DELTA)) for i in range(6) for k in range(5) if y[i] == k}
    h_minus = {(i, k): exp(ALPHA * (s[i, k].item() + DELTA)) for i in range(6) for k in range(5) if y[i] != k}

    def of_proxy(h, k):
        return sum(value for (_, other), value in h.items() if other == k)

    for i in range(6):
        for k in range(5):
            if (i, k) in h_plus:
                expected = -ALPHA * h_plus[i, k] / (1 + of_proxy(h_plus, k)) / 3
            else:
                expected = ALPHA * h_minus[i, k] / (1 + of_proxy(h_minus, k)) / 5
            assert s.grad[i, k].item() == pytest.approx(expected, rel=1e-9), (i, k)


def test_pa_eq6_harder_images_get_more_gradient():
    """In the paper's words: the gradient is larger when x is harder than the others, for both kinds."""
    s = torch.tensor([[0.7, 0.0], [0.3, 0.1], [0.2, 0.6], [-0.2, 0.8]]).double().requires_grad_()
    y, proxies = torch.tensor([0, 0, 1, 1]), torch.eye(2, dtype=torch.float64)
    proxy_anchor_loss(s, y, proxies, alpha=8.0).backward()
    assert s.grad[1, 0] < s.grad[0, 0] < 0, 'the positive at 0.3 needs a stronger pull than that at 0.7'
    assert s.grad[2, 0] > s.grad[3, 0] > 0, 'the negative at 0.2 needs a stronger push than that at -0.2'


def test_pa_eq4_is_a_soft_maximum():
    """"Regarding Log-Sum-Exp as the max": a large scale leaves [delta - min s+]_+ and [max s- + delta]_+."""
    s, y, proxies = random_similarities(seed=1)
    alpha = 1e4
    hardest = sum((DELTA - s[y == k, k].min()).clamp_min(0) for k in (0, 1, 3)) / 3 \
        + sum((s[y != k, k].max() + DELTA).clamp_min(0) for k in range(5)) / 5
    loss = proxy_anchor_loss(s, y, proxies, alpha, DELTA)
    assert loss.item() / alpha == pytest.approx(hardest.item(), abs=1e-3)


def test_pa_eq4_two_classes():
    """Two orthogonal classes of two images, all on their proxies: cosines 1 and 0."""
    z, y, proxies = on_circle(0, 0, 90, 90), torch.tensor([0, 0, 1, 1]), on_circle(0, 90)
    expected = log(1 + 2 * exp(-ALPHA * (1 - DELTA))) + log(1 + 2 * exp(ALPHA * (0 + DELTA)))
    assert proxy_anchor_loss(z, y, proxies).item() == pytest.approx(expected, abs=1e-12)


def test_pa_eq4_one_class_has_nothing_to_push():
    z, y = on_circle(0, 60), torch.tensor([0, 0])
    only = log(1 + exp(-ALPHA * (1 - DELTA)) + exp(-ALPHA * (0.5 - DELTA)))
    assert proxy_anchor_loss(z, y, on_circle(0)).item() == pytest.approx(only, abs=1e-12)


def test_proxies_of_absent_classes_are_pushed_but_never_pulled():
    """Image at 0, its proxy at 0; an absent class's proxy at 40 degrees is turned away from the image."""
    proxies = on_circle(0, 40).requires_grad_()
    proxy_anchor_loss(on_circle(0), torch.tensor([0]), proxies).backward()
    moved = (proxies - 1e-3 * proxies.grad).detach()
    assert moved[1, 1] / moved[1, 0] > proxies[1, 1] / proxies[1, 0]


def test_new_proxies_have_the_authors_scale():
    """std sqrt(2 / C): 0.141 with the 100 classes of CUB, 0.0133 with the 11,318 of SOP."""
    torch.manual_seed(0)
    assert new_proxies(100, 512).std().item() == pytest.approx(0.1414, rel=0.02)
    assert new_proxies(11318, 16).std().item() == pytest.approx(0.0133, rel=0.02)
