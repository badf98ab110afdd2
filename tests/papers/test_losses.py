"""What every loss must do, over one table: all losses of all scripts, and the copies of base losses among them.

The equations themselves are tested script by script, in the files of these names.
"""
import random
from functools import partial

import pytest
import torch
from conftest import unit
from torch.distributions import Beta
from worked import expect_raised

import train_ccl
import train_contrastive
import train_hse
import train_metrix
import train_ms
import train_proxy_anchor
import train_proxynca_pp


def hybrids(z, y, p, **options):
    """The hybrid loss with the proxies as hybrids; classes 0 and 1 are their weak positives."""
    weak = (y < 2).expand(len(p), len(y))
    return train_hse.hybrid_loss(p, z, weak, ~weak, **options)


def metrix(kind, pairs, z, y, p, k=None, **hyper):
    """Clean and mixed loss, where each call draws the same lambdas"""
    torch.manual_seed(0)
    random.seed(0)
    proxies = dict(proxies=p) if 'proxy' in kind else {}
    base, config = train_metrix.BaseLoss(kind, hyper, **proxies), train_metrix.MixupConfig('embed', pairs, k, 2.0)
    mixed = train_metrix.mixed_loss(base, config, None, dict(embed=z), y)
    return train_metrix.clean_loss(kind, z, y, **proxies, **hyper) + 0.4 * mixed


def no_proxies(loss, **options):
    return lambda z, y, p: loss(z, y, **options)


# name: loss(z, y, p) for embeddings (B, D), labels (B,) and proxies, centres or hybrids (C, D)
LOSSES = {
    'contrastive': no_proxies(train_contrastive.contrastive_loss),
    'contrastive, both margins': no_proxies(train_contrastive.contrastive_loss, pos_margin=0.3, neg_margin=0.9),
    'contrastive, squared': no_proxies(train_contrastive.contrastive_loss, power=2),
    'contrastive, similarity': no_proxies(train_contrastive.contrastive_similarity_loss),
    'contrastive, similarity, sum': no_proxies(train_contrastive.contrastive_similarity_loss, reduction='sum'),
    'ms': no_proxies(train_ms.multi_similarity_loss),
    'ms with miner': no_proxies(train_ms.multi_similarity_loss, epsilon=0.1),
    'proxy_anchor': train_proxy_anchor.proxy_anchor_loss,
    'proxynca_pp': train_proxynca_pp.proxynca_pp_loss,
    'proxynca': train_proxynca_pp.proxynca_loss,
    'ccl': train_ccl.center_contrastive_loss,
    'ccl, margin and smoothing': partial(train_ccl.center_contrastive_loss, margin=0.2, smoothing=0.1),
    'ccl, proxynca': train_ccl.scaled_proxynca_loss,
    'ccl, center_loss': lambda z, y, p: train_ccl.center_loss(z, y, p, p[:, 0], p, lam=0.5, smoothing=0.1),
    'hse, hybrids': hybrids,
    'hse, contrastive': no_proxies(train_hse.contrastive_loss),
    'hse, ms': no_proxies(train_hse.multi_similarity_loss),
    'hse, proxy_anchor': train_hse.proxy_anchor_loss,
    'hse, epshn': no_proxies(train_hse.epshn_loss),
    'hse, npair': no_proxies(train_hse.npair_loss),
    'metrix, contrastive, pos-neg': partial(metrix, 'contrastive', 'pos-neg'),
    'metrix, contrastive, anc-neg, sum': partial(metrix, 'contrastive', 'anc-neg', reduction='sum'),
    'metrix, ms, pos-neg, k = 2': partial(metrix, 'ms', 'pos-neg', k=2),
    'metrix, ms, anc-neg': partial(metrix, 'ms', 'anc-neg'),
    'metrix, ms, pos-pos': partial(metrix, 'ms', 'pos-pos'),
    'metrix, proxy_anchor, pos-neg': partial(metrix, 'proxy_anchor', 'pos-neg'),
    'metrix, proxy_anchor, anc-neg': partial(metrix, 'proxy_anchor', 'anc-neg'),
    'metrix, proxynca_pp': partial(metrix, 'proxynca_pp', 'anc-neg'),
}
PROXIES = ('proxy', 'ccl', 'hse, hybrids')                           # in the names of losses that have some
every_loss = pytest.mark.parametrize('name', LOSSES)

BATCHES = {'one class': [0, 0, 0, 0], 'no positives': [0, 1, 2, 3], 'a class of one image': [0, 0, 0, 1],
           'two classes': [0, 0, 1, 1]}


@every_loss
def test_degenerate_batches_are_finite(name):
    """With a duplicate and an opposite among the images; with one, two or four classes, and equal proxies."""
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
def test_half_precision_is_raised_to_float32(name):
    """Positives opposed, negatives equal: exp() of the logits overflows float16."""
    z = torch.tensor([[1.0, 0], [-1, 0], [1, 0], [0.6, 0.8], [0, 1]])
    p, y = torch.tensor([[-1.0, 0], [1, 0], [0.8, 0.6]]), torch.tensor([0, 0, 1, 1, 2])
    expect_raised(lambda z, p: LOSSES[name](z, y, p), name, z, p)


@every_loss
def test_gradcheck(name):
    z, p, y = unit(7, 3, seed=3).requires_grad_(), (1.7 * unit(4, 3, seed=4)).requires_grad_(), [0, 0, 1, 1, 2, 2, 3]
    loss = LOSSES[name]
    inputs = (z, p) if any(word in name for word in PROXIES) else (z,)
    assert torch.autograd.gradcheck(lambda z, p=p: loss(z, torch.tensor(y), p), inputs)


@every_loss
def test_order_of_the_batch_does_not_matter(name, monkeypatch):
    """npair takes the first two images of a class, so these keep their order. Lambda is 1/2: a pair may be swapped."""
    monkeypatch.setattr(Beta, 'sample', lambda self, shape: torch.full(shape, 0.5))
    z, p, y = unit(8, 3), unit(4, 3, seed=1), torch.tensor([0, 0, 1, 1, 2, 2, 3, 1])
    order = torch.tensor([2, 0, 3, 4, 5, 1, 6, 7])
    assert LOSSES[name](z[order], y[order], p).item() == pytest.approx(LOSSES[name](z, y, p).item(), abs=1e-12)


@every_loss
def test_nan_embeddings_give_a_nan_loss(name):
    """Comparisons with NaN are false: a loss that masks by them would be finite, and training would go on."""
    y = torch.tensor([0, 0, 1, 1, 2, 2])
    assert LOSSES[name](torch.full((6, 3), float('nan')), y, unit(3, 3, dtype=torch.float32)).isnan()


@pytest.mark.parametrize('copy, original', [
    ('hse, ms', 'ms with miner'), ('hse, contrastive', 'contrastive, squared'), ('hse, proxy_anchor', 'proxy_anchor'),
    ('ccl, proxynca', 'proxynca')])
def test_copies_agree_with_their_originals(copy, original):
    """In value and gradient. (Those of train_metrix.py: test_metrix.py and test_wiring.py)"""
    y = torch.tensor([0, 0, 1, 1, 2, 2, 2, 3])
    for seed in range(5):
        z, p = unit(8, 3, seed).requires_grad_(), torch.randn(6, 3, dtype=torch.float64)
        one, other = LOSSES[copy](z, y, p), LOSSES[original](z, y, p)
        if copy == 'ccl, proxynca':                  # that of CCL has a scale, and is a mean
            one, other = train_ccl.scaled_proxynca_loss(z, y, p, s=1.0), other / len(y)
        assert torch.allclose(one, other, atol=1e-12)
        assert torch.allclose(*(torch.autograd.grad(loss, z)[0] for loss in (one, other)), atol=1e-12)


def test_an_unknown_reduction_is_refused():
    for loss in (train_contrastive.contrastive_similarity_loss, partial(train_metrix.clean_loss, 'contrastive')):
        with pytest.raises(ValueError, match='reduction'):
            loss(unit(3), torch.tensor([0, 0, 1]), reduction='max')
