"""Requirements on all losses of all scripts, which are listed in cases.py, and on duplicated base losses.

The equations are tested in one file per script.
"""
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from cases import CASES
from conftest import unit
from worked import expect_upcast

import common
import train_ccl
import train_contrastive
import train_metrix

LOSSES = {name: loss for case in CASES.values() for name, loss in case.losses.items()}
every_loss = pytest.mark.parametrize('name', LOSSES)

BATCHES = {'one class': [0, 0, 0, 0], 'no positives': [0, 1, 2, 3], 'a class of one image': [0, 0, 0, 1],
           'two classes': [0, 0, 1, 1]}


@every_loss
def test_degenerate_batches_are_finite(name):
    """Loss and gradients are finite with duplicate and opposite images, with one, two or four classes and equal
    proxies."""
    for what, labels in BATCHES.items():
        for classes in (1, 2, 4):
            y = torch.tensor(labels).clamp_max(classes - 1)
            z = torch.tensor([[1.0, 0], [1, 0], [0, 1], [-1, 0]], requires_grad=True)
            p = torch.tensor([[1.0, 0], [-1, 0], [0, 1], [1, 0]])[:classes].requires_grad_()
            loss = LOSSES[name](z, y, p)
            loss.backward()
            assert loss.shape == () and loss.isfinite(), (what, classes)
            assert all(t.grad is None or t.grad.isfinite().all() for t in (z, p)), (what, classes)


@every_loss
def test_half_precision_is_upcast_to_float32(name):
    """With opposite positives and equal negatives, exp() of the logits would overflow float16."""
    z = torch.tensor([[1.0, 0], [-1, 0], [1, 0], [0.6, 0.8], [0, 1]])
    p, y = torch.tensor([[-1.0, 0], [1, 0], [0.8, 0.6]]), torch.tensor([0, 0, 1, 1, 2])
    expect_upcast(lambda z, p: LOSSES[name](z, y, p), name, z, p)


@every_loss
def test_autocast_changes_nothing(name):
    """Inside torch.autocast the products of matrices would have two to three digits, and many pairs zero loss."""
    y, found = torch.arange(8) // 2, []
    for enabled in (False, True):
        z, p = (unit(n, 64, dtype=torch.float32, seed=n).requires_grad_() for n in (8, 4))
        torch.manual_seed(0)
        with torch.autocast('cpu', torch.bfloat16, enabled=enabled):
            loss = LOSSES[name](z, y, p)
        grads = torch.autograd.grad(loss, (z, p), allow_unused=True)
        found.append([loss.detach(), *(grad for grad in grads if grad is not None)])
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize('name', [name for name in LOSSES if name != 'hse, hybrids'])      # it has masks for labels
def test_labels_that_are_no_labels_are_rejected(name):
    z, p, y = unit(8).requires_grad_(), unit(4, seed=1).requires_grad_(), torch.arange(8) // 2
    has_proxies, = torch.autograd.grad(LOSSES[name](z, y, p), p, allow_unused=True)
    for kind in (torch.int32, torch.uint8):
        losses = []
        for labels in (y, y.to(kind)):
            torch.manual_seed(0)                     # mixed losses draw lambda
            losses.append(LOSSES[name](z, labels, p))
        assert torch.equal(*losses)
    for wrong in (y[:, None], y[None], y[1:], y.double()):
        with pytest.raises(common.UsageError, match='^labels of 8 embeddings are 8 integers'):
            LOSSES[name](z, wrong, p)
    if has_proxies is not None:
        for wrong in (y + 1, y - 1):
            with pytest.raises(common.UsageError, match='^with 4 classes, labels are from 0 to 3, and these are from'):
                LOSSES[name](z, wrong, p)


@pytest.mark.parametrize('name', [name for name in LOSSES if not name.startswith('metrix') and name != 'hse, npair'])
def test_no_loss_waits_for_a_gpu(name, monkeypatch):
    """A tensor on the device `meta` has no values, so reading one raises an error. Mixed losses, and N-pair, have to
    read how many pairs there are."""
    monkeypatch.setattr(torch, 'autocast', lambda *_, **__: nullcontext())         # it does not know this device
    z, p, y = unit(8).to('meta').requires_grad_(), unit(4).to('meta').requires_grad_(), torch.arange(8).to('meta')
    LOSSES[name](z, y, p).backward()
    assert z.grad.shape == z.shape


def test_wrong_labels_on_a_gpu_fail_an_assertion_on_the_device():
    """These labels are on the CPU and say that they are not, so torch raises its error at once."""
    class OnGPU(torch.Tensor):
        device = SimpleNamespace(type='cuda')
    y = torch.arange(8).as_subclass(OnGPU)
    common.check_labels(y, 8, 8)
    for wrong in (y + 1, y - 1):
        with pytest.raises(RuntimeError, match='with 8 classes, labels are from 0 to 7'):
            common.check_labels(wrong, 8, 8)


@every_loss
def test_gradcheck(name):
    z, p, y = unit(7, 3, seed=3).requires_grad_(), (1.7 * unit(4, 3, seed=4)).requires_grad_(), [0, 0, 1, 1, 2, 2, 3]
    assert torch.autograd.gradcheck(lambda z, p: LOSSES[name](z, torch.tensor(y), p), (z, p))


@every_loss
def test_nan_embeddings_give_a_nan_loss(name):
    """Comparisons with NaN are false: a loss that masks by them would be finite, and training would continue."""
    y = torch.tensor([0, 0, 1, 1, 2, 2])
    assert LOSSES[name](torch.full((6, 3), float('nan')), y, unit(3, 3, dtype=torch.float32)).isnan()


@pytest.mark.parametrize('copy, original', [
    ('hse, ms', 'ms with miner'), ('hse, contrastive', 'contrastive, squared'), ('hse, proxy_anchor', 'proxy_anchor'),
    ('ccl, proxynca', 'proxynca')])
def test_duplicated_losses_agree_with_their_originals(copy, original):
    """Value and gradient are equal. For train_metrix.py see test_metrix.py and test_wiring.py."""
    y = torch.tensor([2, 0, 1, 0, 2, 1, 2, 3])
    for seed in range(5):
        z, p = unit(8, 3, seed).requires_grad_(), torch.randn(6, 3, dtype=torch.float64)
        one, other = LOSSES[copy](z, y, p), LOSSES[original](z, y, p)
        if copy == 'ccl, proxynca':                  # CCL's Proxy-NCA has a scale, and is a mean
            one, other = train_ccl.scaled_proxynca_loss(z, y, p, s=1.0), other / len(y)
        assert torch.allclose(one, other, atol=1e-12)
        assert torch.allclose(*(torch.autograd.grad(loss, z)[0] for loss in (one, other)), atol=1e-12)


def test_an_unknown_reduction_is_rejected():
    for loss in (train_contrastive.contrastive_similarity_loss, partial(train_metrix.clean_loss, 'contrastive')):
        with pytest.raises(ValueError, match='reduction'):
            loss(unit(3), torch.tensor([0, 0, 1]), reduction='max')
