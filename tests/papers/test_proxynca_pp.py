"""train_proxynca_pp.py: ProxyNCA++ as in its released code, Proxy-NCA as in Proxy-Anchor Eq. (1) to (3)."""
from math import cos, exp, log, radians

import pytest
import torch
from conftest import on_circle, unit
from worked import expect, expect_gradients, expect_sound, moving

import train_proxynca_pp
from train_proxynca_pp import proxynca_loss, proxynca_pp_loss

IMAGES, LABELS, PROXIES = (0, 70, 200, 40), [2, 0, 5, 2], (90, 250, 20, 300, 130, 150)
WHERE = f'of images at {IMAGES} degrees, of classes {LABELS}, and proxies of 6 classes at {PROXIES}'


def images_and_proxies():
    return on_circle(*IMAGES), torch.tensor(LABELS), 3 * on_circle(*PROXIES)


def s(image, *proxies):
    """Cosines of an image and some proxies, in degrees"""
    return [cos(radians(image - p)) for p in proxies]


def powers(scale):
    """exp(scale s) of image i and proxy k as [i][k]"""
    return [[exp(scale * c) for c in s(image, *PROXIES)] for image in IMAGES]


# ---- ProxyNCA++

def test_proxynca_pp_by_hand():
    """A softmax of squared distances over T, with the positive proxy in the denominator, and a mean over the batch"""
    distances = [[(2 - 2 * c) / 0.5 for c in s(image, *PROXIES)] for image in IMAGES]
    expected = sum(-log(exp(-d[target]) / sum(exp(-d) for d in d)) for d, target in zip(distances, LABELS)) / 4
    expect(proxynca_pp_loss(*images_and_proxies(), 0.5), expected, f'ProxyNCA++ {WHERE}, T = 0.5')


def test_proxynca_pp_closed_form_gradient():
    """dl/ds is 18/B times the softmax probability, minus 18/B for the positive proxy: its gradient vanishes as x comes
    near."""
    (t, z), (u, p) = moving(*IMAGES), moving(*PROXIES)
    proxynca_pp_loss(z, torch.tensor(LABELS), 3 * p).backward()
    by_s = [[18 / 4 * (e / sum(row) - (k == target)) for k, e in enumerate(row)]
            for row, target in zip(powers(18), LABELS)]
    expect_gradients(by_s, f'ProxyNCA++ {WHERE}, T = 1/9', images=t, proxies=u)


def test_proxynca_pp_is_numerically_stable():
    """With T = 0.001, the loss is the difference of squared distances to the positive and the nearest proxy, over T."""
    loss = proxynca_pp_loss(on_circle(0, 70), torch.tensor([2, 2]), on_circle(150, 20, 90), 1e-3)
    expect(loss, (2 * s(0, 20)[0] - 2 * s(0, 90)[0]) / 1e-3 / 2,
           'ProxyNCA++ of images at 0, 70 degrees, both of class 2, proxies at 150, 20, 90, T = 0.001')


def test_proxynca_pp_of_any_batch():
    z, y, proxies = images_and_proxies()
    expect_sound(proxynca_pp_loss, 'ProxyNCA++', z, y, proxies)


def test_networks_of_the_protocol_have_no_layer_norm(before_training):
    for flags, norm in ('', True), ('--protocol reality-check --weights imagenet --fold 0/3', False):
        model = before_training(train_proxynca_pp, *flags.split()).model
        assert isinstance(model.norm, torch.nn.LayerNorm) == norm and model.linear.bias.any(), 'kaiming has a bias of 0'


def test_eps_reaches_the_optimizers_that_have_one(before_training):
    for optimizer in ('adam', 'adamw', 'rmsprop'):
        held = before_training(train_proxynca_pp, '--optimizer', optimizer, '--eps', '0.5')
        assert all(group['eps'] == 0.5 for group in held.optimizer.param_groups)
    assert 'eps' not in before_training(train_proxynca_pp, '--optimizer', 'sgd').optimizer.defaults


# ---- Proxy-NCA

@pytest.mark.parametrize('temperature', [2, 0.25])
def test_pa_eq1_by_hand(temperature):
    """The loss is a sum over the batch, with only negative proxies in the denominator. The logits 2 s / T are s for
    T = 2."""
    expected = sum(-log(row[target] / (sum(row) - row[target])) for row, target in zip(powers(2 / temperature), LABELS))
    loss = proxynca_loss(*images_and_proxies(), temperature)
    expect(loss, expected, f'Proxy-Anchor Eq. (1) {WHERE}, T = {temperature}')


def test_pa_eq1_of_one_class_has_only_the_positive_term():
    loss = proxynca_loss(on_circle(0, 60), torch.tensor([0, 0]), on_circle(0))
    expect(loss, -1 - 0.5, 'Proxy-Anchor Eq. (1) of images at 0, 60 degrees, and a single proxy at 0')


def test_pa_eq1_of_any_batch():
    z, y, proxies = images_and_proxies()
    expect_sound(proxynca_loss, 'Proxy-Anchor Eq. (1)', z, y, proxies)


def test_pa_eq2_is_a_positive_term_and_a_soft_maximum():
    """Eq. (2) is sum { -s(x,p+) + LSE s(x,p-) }."""
    z, y, proxies = unit(4, seed=1), torch.tensor([0, 0, 1, 3]), unit(5)
    lse = [torch.stack([z[i] @ p for k, p in enumerate(proxies) if k != y[i]]).logsumexp(0) for i in range(4)]
    expect(proxynca_loss(z, y, proxies), sum(lse) - (z * proxies[y]).sum(), 'Proxy-Anchor Eq. (2)')


def test_pa_eq3_closed_form_gradient():
    """The derivative is -1 for the positive proxy at any distance, and a softmax over the negative proxies for
    these."""
    (t, z), (u, p) = moving(*IMAGES), moving(*PROXIES)
    proxynca_loss(z, torch.tensor(LABELS), 3 * p).backward()
    by_s = [[-1 if k == target else e / (sum(row) - row[target]) for k, e in enumerate(row)]
            for row, target in zip(powers(1), LABELS)]
    expect_gradients(by_s, f'Proxy-Anchor Eq. (3) {WHERE}', images=t, proxies=u)
