"""train_proxy_anchor.py against Proxy-Anchor Eq. (4), its form Eq. (5) and its gradient Eq. (6)."""
from math import cos, exp, log, radians

import torch
import torch.nn.functional as F
from conftest import on_circle, unit
from worked import expect, expect_gradients, expect_raised, moving

from train_proxy_anchor import proxy_anchor_loss

ALPHA, DELTA = 32.0, 0.1
IMAGES, LABELS, PROXIES = (0, 50, 130), [0, 0, 1], (20, 100, 160)
WHERE = 'of images at 0, 50 (class 0), 130 degrees (class 1), and proxies at 20, 100, 160'


def h(sign, alpha, delta):
    """exp(-alpha (s - delta)) for sign -1, exp(alpha (s + delta)) for 1, of proxy k and image i as [k][i]"""
    return [[exp(sign * alpha * (cos(radians(x - p)) + sign * delta)) for x in IMAGES] for p in PROXIES]


def test_pa_eq4_by_hand():
    """The third class has no image in the batch: its proxy only pushes. The length of proxies does not matter."""
    proxies = on_circle(*PROXIES) * torch.tensor([[0.1], [3.0], [50.0]])
    loss = proxy_anchor_loss(on_circle(*IMAGES), torch.tensor(LABELS), proxies, alpha=4.0)
    plus, minus = h(-1, 4.0, DELTA), h(1, 4.0, DELTA)
    pull = log(1 + plus[0][0] + plus[0][1]) + log(1 + plus[1][2])
    push = log(1 + minus[0][2]) + log(1 + minus[1][0] + minus[1][1]) + log(1 + sum(minus[2]))
    expect(loss, pull / 2 + push / 3, f'Proxy-Anchor Eq. (4) {WHERE}, of lengths 0.1, 3, 50, alpha 4, delta 0.1: the '
           'first sum is over the 2 classes present, the second over all 3')


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


def test_pa_eq6_closed_form_gradient():
    """By s(x,p): -alpha h+ / (|P+| (1 + sum h+)) for positives, alpha h- / (C (1 + sum h-)) for negatives."""
    (t, z), (u, p), y = moving(*IMAGES), moving(*PROXIES), torch.tensor(LABELS)
    proxy_anchor_loss(z, y, 3 * p, 4.0).backward()
    plus, minus, by_s = h(-1, 4.0, DELTA), h(1, 4.0, DELTA), torch.zeros(3, 3, dtype=torch.float64)
    for k in range(3):
        own = sum(plus[k][i] for i in range(3) if LABELS[i] == k)
        others = sum(minus[k][i] for i in range(3) if LABELS[i] != k)
        for i in range(3):
            if LABELS[i] == k:
                by_s[i, k] = -4 * plus[k][i] / (1 + own) / 2
            else:
                by_s[i, k] = 4 * minus[k][i] / (1 + others) / 3
    expect_gradients(by_s, f'Proxy-Anchor Eq. (6), {WHERE}, alpha 4', images=t, proxies=u)
