"""train_proxynca_pp.py: ProxyNCA++ as its code has it, Proxy-NCA as Proxy-Anchor Eq. (1)-(3) writes it."""
from math import cos, exp, log, radians

import pytest
import torch
import torch.nn.functional as F
from conftest import on_circle

import common
import train_ccl
import train_proxynca_pp
from train_proxynca_pp import new_proxies, proxynca_loss, proxynca_pp_loss


def random_similarities():
    """The losses are linear in z up to the similarities, so with the unit vectors as proxies s(x_i, p_k)
    is z_ik itself: a free (B, C) matrix, by which a loss can be differentiated."""
    s = 2 * torch.rand(4, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64) - 1
    return s.requires_grad_(), torch.tensor([0, 0, 1, 3]), torch.eye(5, dtype=torch.float64)


# ---- ProxyNCA++


def test_proxynca_pp_by_hand():
    """Images at 0 (class 0) and 70 (class 1), proxies at 20, 90 and 150; squared distances, T = 1/2."""
    z, y, proxies = on_circle(0, 70), torch.tensor([0, 1]), on_circle(20, 90, 150)

    def d2(a, b):
        return 2 - 2 * cos(radians(a - b))

    of_0 = -log(exp(-d2(0, 20) / 0.5) / sum(exp(-d2(0, p) / 0.5) for p in (20, 90, 150)))
    of_70 = -log(exp(-d2(70, 90) / 0.5) / sum(exp(-d2(70, p) / 0.5) for p in (20, 90, 150)))
    assert proxynca_pp_loss(z, y, proxies, 0.5).item() == pytest.approx((of_0 + of_70) / 2, abs=1e-12), \
        'ProxyNCA++: squared distances over T, the positive proxy in the denominator, a mean over the batch?'


def test_default_temperature_is_a_scale_of_18_on_cosines():
    s, y, proxies = random_similarities()
    expected = F.cross_entropy(18 * s, y).item()
    assert proxynca_pp_loss(s, y, proxies).item() == pytest.approx(expected, rel=1e-12)


def test_distances_of_vectors_off_the_sphere():
    """|x|^2 is the same for all proxies, so -|x - p|^2 / T holds for any x, not for unit length only."""
    z = torch.tensor([[0.5, 2.0], [-1.0, 0.3]], dtype=torch.float64)
    y, proxies = torch.tensor([2, 0]), on_circle(20, 90, 150)
    expected = F.cross_entropy(-torch.cdist(z, proxies) ** 2 * 9, y).item()
    assert proxynca_pp_loss(z, y, proxies).item() == pytest.approx(expected, rel=1e-9)


def test_proxynca_pp_closed_form_gradient():
    """dl/ds = 18/B (softmax probability - 1 for the own proxy): the pull fades as x comes near."""
    s, y, proxies = random_similarities()
    proxynca_pp_loss(s, y, proxies).backward()
    for i in range(4):
        total = sum(exp(18 * s[i, j].item()) for j in range(5))
        for k in range(5):
            expected = 18 / 4 * (exp(18 * s[i, k].item()) / total - (y[i].item() == k))
            assert s.grad[i, k].item() == pytest.approx(expected, abs=1e-9), (i, k)


def test_pa_eq1_with_a_temperature_is_ccl_eq9_and_the_distances_of_the_reality_check(before_training):
    """Cosines times s are T = 2 / s; squared distances times a scale are T = 1 / scale."""
    z, p, y = on_circle(0, 50, 140), on_circle(10, 90, 200), torch.tensor([0, 1, 2])
    assert torch.isclose(proxynca_loss(z, y, p, 2 / 16) / 3, train_ccl.proxynca_loss(z, y, p, s=16.0))
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


def test_proxynca_pp_limits():
    """All proxies alike: log C. Own proxy opposite, the other one on the image: 36. Perfect: nearly 0."""
    z, y = on_circle(0, 0), torch.tensor([0, 1])
    assert proxynca_pp_loss(z, y, on_circle(70, 70, 70)).item() == pytest.approx(log(3), abs=1e-12)
    assert proxynca_pp_loss(z[:1], y[:1], on_circle(180, 0)).item() == pytest.approx(36, abs=1e-9)
    assert proxynca_pp_loss(z[:1], y[:1], on_circle(0, 180)).item() == pytest.approx(exp(-36), rel=1e-3)


# ---- Proxy-NCA


def test_pa_eq1_by_hand():
    """Images at 0 (class 0) and 70 (class 1), proxies at 20, 90 and 150; the own proxy not below."""
    z, y, proxies = on_circle(0, 70), torch.tensor([0, 1]), on_circle(20, 90, 150)
    c = {a: cos(radians(a)) for a in (20, 50, 80, 90, 150)}
    of_0 = -log(exp(c[20]) / (exp(c[90]) + exp(c[150])))
    of_70 = -log(exp(c[20]) / (exp(c[50]) + exp(c[80])))
    assert proxynca_loss(z, y, proxies).item() == pytest.approx(of_0 + of_70, abs=1e-12), \
        'Proxy-Anchor Eq. (1): a sum over the batch, only negative proxies in the denominator?'


def test_pa_eq2_is_a_pull_and_a_soft_maximum():
    """sum { -s(x,p+) + LSE s(x,p-) }; with two classes the LSE is over one proxy, so the loss is linear."""
    s, y, proxies = random_similarities()
    negatives = [torch.cat([s[i, :k], s[i, k + 1:]]) for i, k in enumerate(y)]
    expected = sum(-s[i, k] + negatives[i].logsumexp(0) for i, k in enumerate(y))
    assert proxynca_loss(s, y, proxies).item() == pytest.approx(expected.item(), rel=1e-12)
    two = proxynca_loss(on_circle(0, 60), torch.tensor([0, 1]), on_circle(0, 90))
    assert two.item() == pytest.approx((-1 + 0) + (-cos(radians(30)) + cos(radians(60))), abs=1e-12)


def test_pa_eq3_closed_form_gradient():
    """-1 by the own proxy, whatever the distance; a softmax over the negative proxies by the others."""
    s, y, proxies = random_similarities()
    proxynca_loss(s, y, proxies).backward()
    for i in range(4):
        negatives = sum(exp(s[i, j].item()) for j in range(5) if j != y[i])
        for k in range(5):
            expected = -1 if k == y[i] else exp(s[i, k].item()) / negatives
            assert s.grad[i, k].item() == pytest.approx(expected, abs=1e-12), (i, k)


def test_pa_eq3_pull_is_constant_where_proxynca_pp_fades():
    """The difference between the two losses: an image that lies on its proxy is still pulled, or not."""
    pulls = {}
    for loss in (proxynca_loss, proxynca_pp_loss):
        s = torch.tensor([[1.0, -1.0], [0.0, 0.0]], dtype=torch.float64, requires_grad=True)
        loss(s, torch.tensor([0, 0]), torch.eye(2, dtype=torch.float64)).backward()
        pulls[loss] = s.grad[:, 0].tolist()
    assert pulls[proxynca_loss] == pytest.approx([-1, -1], abs=1e-12)
    assert abs(pulls[proxynca_pp_loss][0]) < 1e-12 and pulls[proxynca_pp_loss][1] == pytest.approx(-18 / 2 / 2)


def test_one_class_leaves_the_pull_of_proxynca_and_nothing_of_proxynca_pp():
    z, y, proxies = on_circle(0, 60).requires_grad_(), torch.tensor([0, 0]), on_circle(0)
    loss = proxynca_loss(z, y, proxies)
    loss.backward()
    assert loss.item() == pytest.approx(-1 - 0.5, abs=1e-12) and torch.allclose(z.grad, -proxies.expand(2, 2))
    assert proxynca_pp_loss(z, y, proxies).item() == pytest.approx(0, abs=1e-12)


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


@pytest.mark.parametrize('flags', ['--temperature 0', '--optimizer sgd --eps 1'])
def test_flags_that_mean_nothing_are_refused(flags):
    with pytest.raises(common.UsageError):
        train_proxynca_pp.get_args(flags.split())
