"""train_proxy_anchor.py against Proxy-Anchor Eq. (4), its form Eq. (5) and its gradient Eq. (6)."""
from math import cos, exp, log, radians

import pytest
import torch
import torch.nn.functional as F
from conftest import on_circle, unit
from worked import expect, expect_gradients, expect_raised, moving

from train_proxy_anchor import new_proxies, proxy_anchor_loss

ALPHA, DELTA = 32.0, 0.1
IMAGES, LABELS, PROXIES = (0, 50, 130), [0, 0, 1], (20, 100, 160)
WHERE = 'of images at 0, 50 (class 0), 130 degrees (class 1), and proxies at 20, 100, 160'


def h(sign, alpha, delta):
    """exp(-alpha (s - delta)) for sign -1, exp(alpha (s + delta)) for 1, of proxy k and image i as [k][i]"""
    return [[exp(sign * alpha * (cos(radians(x - p)) + sign * delta)) for x in IMAGES] for p in PROXIES]


@pytest.mark.parametrize('alpha, delta', [(4.0, 0.1), (2.0, -0.3)])
def test_pa_eq4_by_hand(alpha, delta):
    """The third class has no image in the batch: its proxy only pushes."""
    loss = proxy_anchor_loss(on_circle(*IMAGES), torch.tensor(LABELS), on_circle(*PROXIES), alpha, delta)
    plus, minus = h(-1, alpha, delta), h(1, alpha, delta)
    pull = log(1 + plus[0][0] + plus[0][1]) + log(1 + plus[1][2])
    push = log(1 + minus[0][2]) + log(1 + minus[1][0] + minus[1][1]) + log(1 + sum(minus[2]))
    expect(loss, pull / 2 + push / 3, f'Proxy-Anchor Eq. (4) {WHERE}, alpha {alpha}, delta {delta}: the first sum '
           'is over the 2 classes present, the second over all 3')


def test_pa_eq4_length_of_a_proxy_does_not_matter():
    z, y, proxies = on_circle(*IMAGES), torch.tensor(LABELS), on_circle(*PROXIES)
    longer = proxies * torch.tensor([[0.01], [3.0], [500.0]])
    expect(proxy_anchor_loss(z, y, longer), proxy_anchor_loss(z, y, proxies),
           f'Proxy-Anchor Eq. (4) {WHERE}, whose lengths are 0.01, 3 and 500')


def test_pa_eq4_two_classes():
    """Two orthogonal classes of two images, all on their proxies: cosines 1 and 0."""
    loss = proxy_anchor_loss(on_circle(0, 0, 90, 90), torch.tensor([0, 0, 1, 1]), on_circle(0, 90))
    expect(loss, log(1 + 2 * exp(-ALPHA * (1 - DELTA))) + log(1 + 2 * exp(ALPHA * (0 + DELTA))),
           'Proxy-Anchor Eq. (4) of two images on each of two orthogonal proxies, alpha 32, delta 0.1')


def test_pa_eq4_one_class_has_nothing_to_push():
    loss = proxy_anchor_loss(on_circle(0, 60), torch.tensor([0, 0]), on_circle(0))
    expect(loss, log(1 + exp(-ALPHA * (1 - DELTA)) + exp(-ALPHA * (0.5 - DELTA))),
           'Proxy-Anchor Eq. (4) of images at 0, 60 degrees and the only proxy at 0, alpha 32, delta 0.1')


def test_pa_eq4_is_a_soft_maximum():
    """"Regarding Log-Sum-Exp as the max": a large scale leaves [delta - min s+]_+ and [max s- + delta]_+."""
    loss = proxy_anchor_loss(on_circle(*IMAGES), torch.tensor(LABELS), on_circle(*PROXIES), 1e4, 0.95)
    pull = (0.95 - cos(radians(30))) + (0.95 - cos(radians(30)))
    push = (cos(radians(110)) + 0.95) + (cos(radians(50)) + 0.95) + (cos(radians(30)) + 0.95)
    expect(loss / 1e4, pull / 2 + push / 3,
           f'Proxy-Anchor Eq. (4) over alpha, {WHERE}, alpha 10,000, delta 0.95: does exp() overflow?', 1e-3)


def test_pa_eq4_in_half_precision():
    expect_raised(lambda z, proxies: proxy_anchor_loss(z, torch.tensor(LABELS), proxies), 'Proxy-Anchor Eq. (4)',
                  on_circle(*IMAGES), 3 * on_circle(*PROXIES))


def test_pa_eq5_softplus_of_logsumexp():
    """The paper's rewriting: Softplus(LSE ...), each proxy over its own images and over all others."""
    z, y, proxies = unit(6, seed=1), torch.tensor([0, 0, 1, 3, 3, 3]), unit(5)
    s = z @ proxies.T
    pull = [F.softplus((-ALPHA * (s[y == k, k] - DELTA)).logsumexp(0), threshold=1000) for k in (0, 1, 3)]
    push = [F.softplus((ALPHA * (s[y != k, k] + DELTA)).logsumexp(0), threshold=1000) for k in range(5)]
    expect(proxy_anchor_loss(z, y, proxies), sum(pull) / 3 + sum(push) / 5, 'Proxy-Anchor Eq. (5)')


@pytest.mark.parametrize('alpha', [4.0, 32.0])
def test_pa_eq6_closed_form_gradient(alpha):
    """By s(x,p): -alpha h+ / (|P+| (1 + sum h+)) for positives, alpha h- / (C (1 + sum h-)) for negatives."""
    (t, z), (u, p), y = moving(*IMAGES), moving(*PROXIES), torch.tensor(LABELS)
    proxy_anchor_loss(z, y, 3 * p, alpha).backward()
    plus, minus, by_s = h(-1, alpha, DELTA), h(1, alpha, DELTA), torch.zeros(3, 3, dtype=torch.float64)
    for k in range(3):
        own = sum(plus[k][i] for i in range(3) if LABELS[i] == k)
        others = sum(minus[k][i] for i in range(3) if LABELS[i] != k)
        for i in range(3):
            if LABELS[i] == k:
                by_s[i, k] = -alpha * plus[k][i] / (1 + own) / 2
            else:
                by_s[i, k] = alpha * minus[k][i] / (1 + others) / 3
    expect_gradients(by_s, f'Proxy-Anchor Eq. (6), {WHERE}, alpha {alpha}', images=t, proxies=u)


# ---- the script


def test_new_proxies_have_the_authors_scale():
    """std sqrt(2 / C): 0.141 with the 100 classes of CUB, 0.0133 with the 11,318 of SOP."""
    torch.manual_seed(0)
    assert new_proxies(100, 512).std().item() == pytest.approx(0.1414, rel=0.02)
    assert new_proxies(11318, 16).std().item() == pytest.approx(0.0133, rel=0.02)
