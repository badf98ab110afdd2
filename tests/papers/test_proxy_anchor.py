"""train_proxy_anchor.py against Proxy-Anchor Eq. (4), its form Eq. (5) and its gradient Eq. (6)."""
from math import cos, exp, log, radians

import torch
import torch.nn.functional as F
from conftest import on_circle, unit
from worked import expect, expect_gradients, expect_sound, moving

from train_proxy_anchor import proxy_anchor_loss

ALPHA, DELTA = 32.0, 0.1
IMAGES, LABELS, PROXIES = (0, 130, 50, 200), [5, 2, 5, 0], (210, 60, 100, 300, 160, 20)
PRESENT = {5: (0, 2), 2: (1,), 0: (3,)}             # {class: the indices of its images}
WHERE = f'of images at {IMAGES} degrees, of classes {LABELS}, and proxies of 6 classes at {PROXIES}'


def h(sign, alpha, delta):
    """exp(-alpha (s - delta)) for sign -1, exp(alpha (s + delta)) for 1, of proxy k and image i as [k][i]"""
    return [[exp(sign * alpha * (cos(radians(x - p)) + sign * delta)) for x in IMAGES] for p in PROXIES]


def own(k):
    return PRESENT.get(k, ())


def others(k):
    return [i for i in range(len(IMAGES)) if i not in own(k)]


def test_pa_eq4_by_hand():
    """Three classes have no image in the batch: their proxies have only a negative term. The norm of proxies does not
    matter."""
    proxies = on_circle(*PROXIES) * torch.tensor([[0.1], [3.0], [50.0], [1.0], [2.0], [0.5]])
    loss = proxy_anchor_loss(on_circle(*IMAGES), torch.tensor(LABELS), proxies, alpha=4.0)
    plus, minus = h(-1, 4.0, DELTA), h(1, 4.0, DELTA)
    pull = sum(log(1 + sum(plus[k][i] for i in places)) for k, places in PRESENT.items())
    push = sum(log(1 + sum(minus[k][i] for i in others(k))) for k in range(6))
    expect(loss, pull / 3 + push / 6, f'Proxy-Anchor Eq. (4) {WHERE}, of any lengths, alpha 4, delta 0.1: the first '
           'sum is over the 3 classes present, the second over all 6')


def test_pa_eq4_of_a_batch_of_one_class():
    """The negative term is divided by the number of all proxies, 2, although the first proxy has no negatives. The
    second class has no image."""
    loss = proxy_anchor_loss(on_circle(0, 40), torch.tensor([0, 0]), on_circle(10, 100), 4.0)
    pull = log(1 + sum(exp(-4 * (cos(radians(d)) - DELTA)) for d in (10, 30)))
    push = log(1 + sum(exp(4 * (cos(radians(d)) + DELTA)) for d in (100, 60)))
    expect(loss, pull + push / 2,
           'Proxy-Anchor Eq. (4) of images at 0, 40, both of class 0, proxies at 10, 100 degrees, alpha 4, delta 0.1')


def test_pa_eq4_of_any_batch():
    expect_sound(proxy_anchor_loss, 'Proxy-Anchor Eq. (4)', on_circle(*IMAGES), torch.tensor(LABELS),
                 3 * on_circle(*PROXIES))


def test_pa_eq4_is_a_soft_maximum():
    """"Regarding Log-Sum-Exp as the max": a large scale leaves [delta - min s+]_+ and [max s- + delta]_+."""
    loss = proxy_anchor_loss(on_circle(*IMAGES), torch.tensor(LABELS), on_circle(*PROXIES), 1e4, 0.95)
    s = [[cos(radians(x - p)) for x in IMAGES] for p in PROXIES]
    pull = sum(max(0, 0.95 - min(s[k][i] for i in places)) for k, places in PRESENT.items())
    push = sum(max(0, 0.95 + max(s[k][i] for i in others(k))) for k in range(6))
    expect(loss / 1e4, pull / 3 + push / 6,
           f'Proxy-Anchor Eq. (4) over alpha, {WHERE}, alpha 10,000, delta 0.95: does exp() overflow?', 1e-3)


def test_pa_eq5_softplus_of_logsumexp():
    """The paper's rewriting: Softplus(LSE ...), each proxy over its own images and over all others."""
    z, y, proxies = unit(6, seed=1), torch.tensor([0, 0, 1, 3, 3, 3]), unit(5)
    s = z @ proxies.T
    pull = [F.softplus((-ALPHA * (s[y == k, k] - DELTA)).logsumexp(0), threshold=1000) for k in (0, 1, 3)]
    push = [F.softplus((ALPHA * (s[y != k, k] + DELTA)).logsumexp(0), threshold=1000) for k in range(5)]
    expect(proxy_anchor_loss(z, y, proxies), sum(pull) / 3 + sum(push) / 5, 'Proxy-Anchor Eq. (5)')


def test_pa_eq6_closed_form_gradient():
    """The derivative with respect to s(x,p) is -alpha h+ / (|P+| (1 + sum h+)) for positives, alpha h- / (C (1 + sum
    h-)) for negatives."""
    (t, z), (u, p), y = moving(*IMAGES), moving(*PROXIES), torch.tensor(LABELS)
    proxy_anchor_loss(z, y, 3 * p, 4.0).backward()
    plus, minus, by_s = h(-1, 4.0, DELTA), h(1, 4.0, DELTA), torch.zeros(4, 6, dtype=torch.float64)
    for k in range(6):
        for i in own(k):
            by_s[i, k] = -4 * plus[k][i] / (1 + sum(plus[k][j] for j in own(k))) / 3
        for i in others(k):
            by_s[i, k] = 4 * minus[k][i] / (1 + sum(minus[k][j] for j in others(k))) / 6
    expect_gradients(by_s, f'Proxy-Anchor Eq. (6), {WHERE}, alpha 4', images=t, proxies=u)
