"""train_proxynca_pp.py: ProxyNCA++ as its code has it, Proxy-NCA as Proxy-Anchor Eq. (1)-(3) writes it."""
from math import cos, exp, log, radians

import pytest
import torch
from conftest import on_circle, unit
from worked import expect, expect_gradients, expect_raised, moving

import train_ccl
import train_proxynca_pp
from train_proxynca_pp import new_proxies, proxynca_loss, proxynca_pp_loss

PROXIES = (20, 90, 150)
WHERE = 'of images at 0 (class 0), 70 degrees (class 1), and proxies at 20, 90, 150'


def images_and_proxies():
    return on_circle(0, 70), torch.tensor([0, 1]), 3 * on_circle(*PROXIES)


def s(image, *proxies):
    """Cosines of an image and some proxies, in degrees"""
    return [cos(radians(image - p)) for p in proxies]


# ---- ProxyNCA++


@pytest.mark.parametrize('temperature', [0.5, 1 / 9])
def test_proxynca_pp_by_hand(temperature):
    """Squared distances over T, the own proxy in the denominator too, a mean over the batch"""
    def likely(image):
        return [exp(-(2 - 2 * c) / temperature) for c in s(image, *PROXIES)]
    of_0, of_70 = likely(0), likely(70)
    expected = (-log(of_0[0] / sum(of_0)) - log(of_70[1] / sum(of_70))) / 2
    expect(proxynca_pp_loss(*images_and_proxies(), temperature), expected, f'ProxyNCA++ {WHERE}, T = {temperature:.3g}')


def test_proxynca_pp_default_temperature_is_a_scale_of_18_on_cosines():
    """All proxies alike: log C. Own proxy opposite, the other one on the image: 36. Perfect: nearly 0."""
    z, y = on_circle(0), torch.tensor([0])
    for proxies, expected in ((70, 70, 70), log(3)), ((180, 0), 36), ((0, 180), exp(-36)):
        expect(proxynca_pp_loss(z, y, on_circle(*proxies)), expected,
               f'ProxyNCA++ of an image at 0, and proxies at {proxies}, the first one its own, T = 1/9')


def test_proxynca_pp_closed_form_gradient():
    """dl/ds = 18/B (softmax probability - 1 for the own proxy): the pull fades as x comes near."""
    (t, z), (u, p) = moving(0, 70), moving(*PROXIES)
    proxynca_pp_loss(z, torch.tensor([0, 1]), 3 * p).backward()
    by_s = [[18 / 2 * (exp(18 * c) / sum(exp(18 * c) for c in s(x, *PROXIES)) - (k == i))
             for k, c in enumerate(s(x, *PROXIES))] for i, x in enumerate((0, 70))]
    expect_gradients(by_s, f'ProxyNCA++ {WHERE}, T = 1/9', images=t, proxies=u)


def test_proxynca_pp_without_overflow():
    """With T = 0.001, what is left is how much nearer the nearest other proxy is, in squared distance, over T."""
    loss = proxynca_pp_loss(on_circle(0, 70), torch.tensor([1, 1]), on_circle(*PROXIES), 1e-3)
    expect(loss, (2 * s(0, 20)[0] - 2 * s(0, 90)[0]) / 1e-3 / 2,
           'ProxyNCA++ of images at 0, 70 degrees, both of class 1, proxies at 20, 90, 150, T = 0.001')


def test_proxynca_pp_in_half_precision():
    z, y, proxies = images_and_proxies()
    expect_raised(lambda z, proxies: proxynca_pp_loss(z, y, proxies), 'ProxyNCA++', z, proxies)


def test_proxynca_with_a_temperature_is_that_of_ccl_and_of_the_reality_check(before_training):
    """Cosines times s are T = 2 / s; squared distances times a scale are T = 1 / scale."""
    z, p, y = on_circle(0, 50, 140), on_circle(10, 90, 200), torch.tensor([0, 1, 2])
    assert torch.isclose(proxynca_loss(z, y, p, 2 / 16) / 3, train_ccl.scaled_proxynca_loss(z, y, p, s=16.0))
    weight = (-13.98 * torch.cdist(z, p).square()).exp()
    by_hand = -(weight.diagonal() / (weight.sum(dim=1) - weight.diagonal())).log().sum()
    assert torch.isclose(proxynca_loss(z, y, p, 1 / 13.98), by_hand)
    for flags, temperature in (('', 2), ('--temperature 0.5', 0.5)):
        held = before_training(train_proxynca_pp, '--loss', 'proxynca', *flags.split())
        images, labels = torch.rand(4, 3, 32, 32), torch.tensor([0, 1, 2, 3])
        held.model.eval()
        expected = proxynca_loss(held.model(images), labels, held.learned['proxies'], temperature) / 4
        assert torch.isclose(held.step(images, labels), expected)


def test_networks_of_the_protocol_have_no_layer_norm(before_training):
    for flags, norm in ('', True), ('--protocol reality-check --weights imagenet --fold 0/3', False):
        held = before_training(train_proxynca_pp, *flags.split())
        assert isinstance(held.model.norm, torch.nn.LayerNorm) == norm


# ---- Proxy-NCA


def test_pa_eq1_by_hand():
    """A sum over the batch; only negative proxies in the denominator"""
    of_0, of_70 = ([exp(c) for c in s(x, *PROXIES)] for x in (0, 70))
    expected = -log(of_0[0] / (of_0[1] + of_0[2])) - log(of_70[1] / (of_70[0] + of_70[2]))
    expect(proxynca_loss(*images_and_proxies()), expected, f'Proxy-Anchor Eq. (1) {WHERE}')


def test_pa_eq1_with_other_temperatures_than_2():
    """The exponents are 2 s / T, since Eq. (1) is the case T = 2."""
    of_0, of_70 = ([exp(2 * c / 0.25) for c in s(x, *PROXIES)] for x in (0, 70))
    expected = -log(of_0[0] / (of_0[1] + of_0[2])) - log(of_70[1] / (of_70[0] + of_70[2]))
    expect(proxynca_loss(*images_and_proxies(), 0.25), expected, f'Proxy-Anchor Eq. (1), T = 0.25, {WHERE}')


def test_pa_eq1_one_class_leaves_the_pull():
    z = on_circle(0, 60).requires_grad_()
    loss = proxynca_loss(z, torch.tensor([0, 0]), on_circle(0))
    loss.backward()
    expect(loss, -1 - 0.5, 'Proxy-Anchor Eq. (1) of images at 0, 60 degrees, and a single proxy at 0')
    expect(z.grad.isfinite().all(), True, 'whether its gradient is finite')


def test_pa_eq1_in_half_precision():
    z, y, proxies = images_and_proxies()
    expect_raised(lambda z, proxies: proxynca_loss(z, y, proxies), 'Proxy-Anchor Eq. (1)', z, proxies)


def test_pa_eq2_is_a_pull_and_a_soft_maximum():
    """sum { -s(x,p+) + LSE s(x,p-) }; with two classes the LSE is over one proxy, so the loss is linear."""
    z, y, proxies = unit(4, seed=1), torch.tensor([0, 0, 1, 3]), unit(5)
    lse = [torch.stack([z[i] @ p for k, p in enumerate(proxies) if k != y[i]]).logsumexp(0) for i in range(4)]
    expect(proxynca_loss(z, y, proxies), sum(lse) - (z * proxies[y]).sum(), 'Proxy-Anchor Eq. (2)')
    two = proxynca_loss(on_circle(0, 60), torch.tensor([0, 1]), on_circle(0, 90))
    expect(two, (-1 + 0) + (-cos(radians(30)) + cos(radians(60))), 'Proxy-Anchor Eq. (2) with two classes')


def test_pa_eq3_closed_form_gradient():
    """-1 by the own proxy, whatever the distance; a softmax over the negative proxies by the others."""
    (t, z), (u, p) = moving(0, 70), moving(*PROXIES)
    proxynca_loss(z, torch.tensor([0, 1]), 3 * p).backward()
    by_s = [[-1 if k == i else exp(c) / sum(exp(n) for j, n in enumerate(s(x, *PROXIES)) if j != i)
             for k, c in enumerate(s(x, *PROXIES))] for i, x in enumerate((0, 70))]
    expect_gradients(by_s, f'Proxy-Anchor Eq. (3) {WHERE}', images=t, proxies=u)


# ---- the script


def test_new_proxies_have_the_authors_scale():
    torch.manual_seed(0)
    assert new_proxies(100, 512).std().item() == pytest.approx(1 / 8, rel=0.02)


def test_proxy_gradients_stay_below_the_clip():
    """2 / (T |p|) with |p| = sqrt(512) / 8 at the start: 6.4, so clipping by value at 10 changes nothing."""
    z, y = torch.zeros(2, 512), torch.tensor([0, 0])
    z[:, 0] = 1
    proxies = torch.zeros(2, 512)
    proxies[0, 1] = 512 ** 0.5 / 8                           # own proxy at a right angle
    proxies[1, 0] = 512 ** 0.5 / 8                           # the other one on the image
    proxynca_pp_loss(z, y, proxies.requires_grad_()).backward()
    assert proxies.grad.norm(dim=1).max().item() == pytest.approx(18 / (512 ** 0.5 / 8), rel=1e-4)
    assert 18 / (512 ** 0.5 / 8) < 6.5
