"""train_metrix.py against Metrix: the equations with numbers in them, loops from the paper, direct pooling."""
import os
import re
import sys
from math import cos, exp, log, radians
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from conftest import on_circle

import common
import train_contrastive
import train_metrix
import train_ms
import train_proxy_anchor
import train_proxynca_pp
from train_metrix import clean_loss, labelled_loss, mix_embeddings, mix_features, mixed_loss, mixtures

BETA, GAMMA, M = 18.0, 75.0, 0.77
Y = torch.tensor([0, 0, 0, 1, 1, 2, 2, 3])


def unit(n, d=6, seed=0, dtype=torch.float64):
    return F.normalize(torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=dtype), dim=1)


def shares(n, seed=0, dtype=torch.float64):
    return torch.rand(n, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def every_negative(y):
    return y[:, None] != y


def mixture_set(which, y, lam=None, hard=None):
    """V(a) of all anchors of a batch, every pair i < j a candidate"""
    i, j = torch.triu_indices(len(y), len(y), 1)
    lam = shares(len(i)) if lam is None else lam
    hard = every_negative(y) if hard is None else hard
    return i, j, lam, *mixtures(which, y, i, j, lam, y, torch.arange(len(y)), hard)


# ---- clean losses


@pytest.mark.parametrize('reduction', ['mean', 'sum'])
@pytest.mark.parametrize('labels', [Y, torch.zeros(8).long(), torch.arange(8), torch.tensor([0] * 7 + [1])],
                         ids=['mixed', 'one class', 'no positives', 'two classes'])
def test_metrix_eq1_is_contrastive_similarity_loss(labels, reduction):
    z = unit(8, 3)
    z[3] = torch.tensor([1.0, 0, 0])
    z[4] = torch.tensor([0, 1.0, 0])                        # a positive at cosine 0 counts as one
    ours = clean_loss('contrastive', z, labels, m=0.5, reduction=reduction)
    assert ours.item() == pytest.approx(
        train_contrastive.contrastive_similarity_loss(z, labels, 0.5, reduction).item(), abs=1e-12)


@pytest.mark.parametrize('epsilon', [None, 0.39])
@pytest.mark.parametrize('labels', [Y, torch.zeros(8).long(), torch.arange(8), torch.tensor([0] * 7 + [1])],
                         ids=['mixed', 'one class', 'no positives', 'two classes'])
def test_metrix_eq2_is_multi_similarity_loss(labels, epsilon):
    z = unit(8, 3).requires_grad_()
    ours = clean_loss('ms', z, labels, epsilon=epsilon)
    theirs = train_ms.multi_similarity_loss(z, labels, BETA, GAMMA, M, epsilon)
    assert ours.item() == pytest.approx(theirs.item(), abs=1e-12)
    assert torch.allclose(*(torch.autograd.grad(loss, z)[0] for loss in (ours, theirs)), atol=1e-12)


def test_proxy_losses_are_pinned_to_their_originals():
    z, proxies = unit(8), 3 * torch.randn(5, 6, dtype=torch.float64)
    assert clean_loss('proxy_anchor', z, Y, proxies).item() == pytest.approx(
        train_proxy_anchor.proxy_anchor_loss(z, Y, proxies).item(), abs=1e-12)
    assert clean_loss('proxynca_pp', z, Y, proxies).item() == pytest.approx(
        train_proxynca_pp.proxynca_pp_loss(z, Y, proxies).item(), abs=1e-12)


def test_metrix_eq3_by_hand():
    """One anchor at 0 degrees, positives at 30 and 60, negatives at 45 and 90: MS and contrastive."""
    z = on_circle(0, 30, 60, 45, 90)
    s, y, valid = z[:1] @ z[1:].T, torch.tensor([[1, 1, 0, 0]]), torch.ones(1, 4, dtype=torch.bool)
    p, n = [cos(radians(30)), cos(radians(60))], [cos(radians(45)), 0]
    ms = log(1 + sum(exp(-2 * (x - 0.5)) for x in p)) / 2 + log(1 + sum(exp(50 * (x - 0.5)) for x in n)) / 50
    assert labelled_loss(s, y, valid, 'ms', beta=2, gamma=50, m=0.5).item() == pytest.approx(ms, abs=1e-12)
    cont = -sum(p) + (n[0] - 0.5)                           # the negative at 90 degrees is below the margin
    assert labelled_loss(s, y, valid, 'contrastive', reduction='sum').item() == pytest.approx(cont, abs=1e-12)
    assert labelled_loss(s, y, valid, 'contrastive').item() == pytest.approx(-sum(p) / 2 + n[0] - 0.5, abs=1e-12)


# ---- Table 1: tau, sigma+, rho+, sigma-, rho- as printed, with plain exponentials

LOG1P, SAME = torch.log1p, lambda x: x
PRINTED = {
    'contrastive': (dict(m=0.3, reduction='sum'), SAME, SAME, lambda x: -x, SAME, lambda x: (x - 0.3).clamp_min(0)),
    'lifted': (dict(m=0.3), lambda x: x.clamp_min(0), torch.log, lambda x: (-x).exp(),
               torch.log, lambda x: (x - 0.3).exp()),
    'binomial': (dict(beta=3, gamma=4, m=0.3), SAME, LOG1P, lambda x: (-3 * (x - 0.3)).exp(),
                 LOG1P, lambda x: (4 * (x - 0.3)).exp()),
    'ms': (dict(beta=3, gamma=4, m=0.3), SAME, lambda x: LOG1P(x) / 3, lambda x: (-3 * (x - 0.3)).exp(),
           lambda x: LOG1P(x) / 4, lambda x: (4 * (x - 0.3)).exp()),
    # Proxy-Anchor Eq. (4), not the row as printed: + delta on negatives, no factors
    'proxy_anchor': (dict(alpha=3, delta=0.3), SAME, LOG1P, lambda x: (-3 * (x - 0.3)).exp(),
                     LOG1P, lambda x: (3 * (x + 0.3)).exp()),
    'nca': (dict(), SAME, lambda x: -torch.log(x), torch.exp, torch.log, torch.exp),
    'proxynca_pp': (dict(temperature=0.5), SAME, lambda x: -torch.log(x), lambda x: (x / 0.5).exp(),
                    torch.log, lambda x: (x / 0.5).exp()),
}


@pytest.mark.parametrize('kind', list(train_metrix.TABLE_1))
def test_metrix_eq7_table_1_row_by_row(kind):
    hyper, tau, sigma_pos, rho_pos, sigma_neg, rho_neg = PRINTED[kind]
    s = 2 * torch.rand(4, 9, dtype=torch.float64) - 1
    y, valid = torch.rand(4, 9, dtype=torch.float64), torch.rand(4, 9) < 0.8
    y[:, 0], y[:, 1] = 0, 1
    valid[:, 2] = True
    expected = tau(sigma_pos((y * rho_pos(s) * valid).sum(1)) + sigma_neg(((1 - y) * rho_neg(s) * valid).sum(1)))
    assert torch.allclose(labelled_loss(s, y, valid, kind, **hyper), expected, atol=1e-12)
    s.requires_grad_()
    assert torch.autograd.gradcheck(lambda s: labelled_loss(s, y, valid, kind, **hyper), s)


@pytest.mark.parametrize('kind', list(train_metrix.TABLE_1))
def test_a_side_without_examples_adds_nothing(kind):
    s = (2 * torch.rand(3, 4) - 1).requires_grad_()
    nothing = torch.zeros(3, 4, dtype=torch.bool)
    loss = labelled_loss(s, torch.rand(3, 4), nothing, kind)
    loss.sum().backward()
    assert torch.equal(loss, torch.zeros(3)) and torch.equal(s.grad, torch.zeros(3, 4))
    assert torch.equal(labelled_loss(torch.zeros(3, 0), torch.zeros(3, 0), nothing[:, :0], kind), torch.zeros(3))
    ones = torch.ones(3, 4)
    assert labelled_loss(s, ones, ~nothing, kind).isfinite().all()          # positives alone
    assert labelled_loss(s, 1 - ones, ~nothing, kind).isfinite().all()      # negatives alone


def test_an_unknown_hyper_parameter_is_an_error():
    with pytest.raises(TypeError, match='gamma'):
        labelled_loss(torch.zeros(1, 1), torch.ones(1, 1), torch.ones(1, 1).bool(), 'contrastive', gamma=2)


# ---- mixing


def test_metrix_eq4_input():
    x, lam = torch.rand(3, 3, 4, 4, dtype=torch.float64), torch.tensor([0.25, 0.5], dtype=torch.float64)
    mixed = train_metrix.mix(x, torch.tensor([0, 1]), torch.tensor([1, 2]), lam)
    assert torch.allclose(mixed[0], 0.25 * x[0] + 0.75 * x[1]) and torch.allclose(mixed[1], (x[1] + x[2]) / 2)


def test_metrix_eq4_embed():
    """A quarter of 0 degrees and three of 90, scaled to unit length"""
    lam = torch.tensor([0.25], dtype=torch.float64)
    v = mix_embeddings(on_circle(0, 90), torch.tensor([0]), torch.tensor([1]), lam)
    assert torch.allclose(v, torch.tensor([[1.0, 3.0]], dtype=torch.float64) / 10 ** 0.5)


def direct(f, i, j, lam, pool):
    """Eq. (4) with the whole (M, c, h, w) tensor"""
    lam = lam[:, None, None, None]
    mixed = lam * f[i] + (1 - lam) * f[j]
    parts = dict(avg=F.adaptive_avg_pool2d, max=F.adaptive_max_pool2d)
    return sum(parts[name](mixed, 1) for name in pool.split('+')).flatten(1)


@pytest.mark.parametrize('layer_norm', [False, True])
@pytest.mark.parametrize('ties', [False, True])
@pytest.mark.parametrize('pool', ['avg', 'max', 'avg+max'])
@pytest.mark.parametrize('dtype, tolerance', [(torch.float32, 1e-6), (torch.float64, 1e-12)])
def test_metrix_eq4_feature_is_direct_pooling(dtype, tolerance, pool, ties, layer_norm):
    f = torch.randn(8, 40, 3, 4, dtype=dtype).relu()
    if ties:
        f = (2 * f).round() / 2                             # many equal maxima, and channels of zeros
    i, j = train_metrix.cross_class_pairs(Y)
    lam = shares(len(i), dtype=dtype)
    lam[0], lam[1], lam[2] = 0, 1, 0.5
    grad = torch.randn(len(i), 40, dtype=dtype) / len(i)
    results = []
    for pooling in (mix_features, direct):
        leaf = f.clone().requires_grad_()
        p = pooling(leaf, i, j, lam, pool)
        (F.layer_norm(p, (40,)) if layer_norm else p).backward(grad)
        results.append((p.detach(), leaf.grad))
    (ours, our_grad), (theirs, their_grad) = results
    assert torch.allclose(ours, theirs, rtol=0, atol=tolerance), 'value'
    assert torch.allclose(our_grad, their_grad, rtol=0, atol=tolerance), 'gradient: the first maximum takes it'


def test_metrix_eq4_feature_in_chunks_of_any_order():
    """Large maps are mixed pair by pair; pairs may repeat and come in any order."""
    f = torch.randn(4, 2, 1100, 1000, requires_grad=True)   # 2.2 million values: one pair per chunk
    i, j, lam = torch.tensor([3, 0, 3]), torch.tensor([1, 2, 1]), torch.tensor([0.2, 0.7, 0.6])
    ours, theirs = (pooling(f, i, j, lam, 'max') for pooling in (mix_features, direct))
    assert torch.equal(ours, theirs)
    assert torch.allclose(*(torch.autograd.grad(p.sum(), f)[0] for p in (ours, theirs)), atol=1e-6)


def test_metrix_eq4_feature_gradcheck():
    f = torch.randn(3, 2, 2, 2, dtype=torch.float64, requires_grad=True)
    i, j, lam = torch.tensor([0, 0, 1]), torch.tensor([1, 2, 2]), shares(3)
    assert torch.autograd.gradcheck(lambda f: mix_features(f, i, j, lam), f)


def test_metrix_eq4_feature_keeps_little():
    """What autograd keeps grows with M x c, not with M x c x h x w."""
    kept = []
    f, (i, j) = torch.randn(20, 64, 8, 8, requires_grad=True), torch.triu_indices(20, 20, 1)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.nbytes) or t, lambda t: t):
        mix_features(f, i, j, shares(len(i)))
    assert 190 * 64 <= sum(kept) <= 2 * 190 * 64, 'a byte per maximum; the mixed maps would be 190 x 64 x 64 x 4'


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16])
def test_half_precision_is_raised(dtype):
    f = torch.randn(8, 5, 3, 3).relu().to(dtype).requires_grad_()
    i, j = train_metrix.cross_class_pairs(Y)
    p = mix_features(f, i, j, shares(len(i), dtype=torch.float32))
    p.sum().backward()
    assert p.dtype == torch.float32 and f.grad.dtype == dtype
    assert torch.allclose(p, direct(f.float(), i, j, shares(len(i), dtype=torch.float32), 'avg+max'), atol=1e-6)
    s = torch.tensor([[-1.0, 1.0]], dtype=dtype)            # exp(75 * 0.9) overflows half precision
    loss = labelled_loss(s, torch.tensor([[1, 0]]), torch.ones(1, 2).bool(), 'ms', m=0.1)
    assert loss.dtype == torch.float32 and loss.item() == pytest.approx(1.1 + 0.9, abs=1e-6)
    z, proxies = unit(8).to(dtype), unit(5, seed=1).to(dtype)
    for kind in train_metrix.HYPER:
        rest = dict(proxies=proxies) if 'proxy' in kind else {}
        loss, exact = (clean_loss(kind, z.to(d), Y, **{key: p.to(d) for key, p in rest.items()})
                       for d in (dtype, torch.float64))
        assert loss.dtype == torch.float32 and loss.item() == pytest.approx(exact.item(), rel=1e-4)
        args = SimpleNamespace(loss=kind, alpha=2.0)
        half = mixed_loss(args, 'embed', 'pos-neg', 2, {}, None, None, None, z, Y, **rest)
        assert half.dtype == torch.float32 and half.isfinite()
    lam = shares(len(i), dtype=torch.float32)
    assert torch.allclose(mix_embeddings(z, i, j, lam), mix_embeddings(z.float(), i, j, lam))


def test_an_unknown_pooling_is_an_error():
    with pytest.raises(KeyError, match='gem'):
        mix_features(torch.rand(2, 3, 2, 2), torch.tensor([0]), torch.tensor([1]), torch.rand(1), 'gem')


# ---- labels of mixtures


@pytest.fixture
def clean_labels(monkeypatch):
    """y and valid (4, 4) that the clean loss of classes 0, 0, 1, 0 hands to the generic one"""
    seen = []
    monkeypatch.setattr(train_metrix, 'labelled_loss', lambda s, y, valid, kind: seen.extend((y, valid)) or s.sum(1))
    clean_loss('ms', unit(4), torch.tensor([0, 0, 1, 0]))
    return seen


def test_metrix_eq5_positives_have_label_1_and_are_not_the_anchor(clean_labels):
    y, valid = clean_labels
    assert (y & valid).int().tolist() == [[0, 1, 0, 1], [1, 0, 0, 1], [0, 0, 0, 0], [1, 1, 0, 0]]


def test_metrix_eq6_negatives_have_label_0(clean_labels):
    y, valid = clean_labels
    assert (~y & valid).int().tolist() == [[0, 0, 1, 0], [0, 0, 1, 0], [1, 1, 0, 1], [0, 0, 1, 0]]


def test_metrix_eq8_labels():
    """Classes 0, 0, 1, 2; the pair (0, 2) with lambda 0.3, the pair (1, 3) with 0.6"""
    y, i, j = torch.tensor([0, 0, 1, 2]), torch.tensor([0, 1]), torch.tensor([2, 3])
    weights, valid = train_metrix.pair_labels(y, torch.tensor([0, 1, 2, 5]), i, j, torch.tensor([0.3, 0.6]))
    assert valid.tolist() == [[True, True], [True, False], [False, True], [False, False]]
    assert weights[0].tolist() == pytest.approx([0.3, 0.6])
    assert weights[1, 0].item() == pytest.approx(0.7) and weights[2, 1].item() == pytest.approx(0.4)


@pytest.mark.parametrize('which', ['pos-neg', 'anc-neg', 'pos-pos', 'neg-neg'])
def test_metrix_eq8_sets(which):
    """M(a) from the definitions: U+ x U-, S x U-, U+ x U+, U- x U-"""
    i, j, lam, weights, valid = mixture_set(which, Y)
    for a in range(len(Y)):
        P = [p for p in range(len(Y)) if Y[p] == Y[a] and p != a]
        N = [n for n in range(len(Y)) if Y[n] != Y[a]]
        first, second = {'pos-neg': (P, N), 'anc-neg': ([a], N), 'pos-pos': (P, P), 'neg-neg': (N, N)}[which]
        expected = {frozenset((p, n)) for p in first for n in second if p != n}
        assert {frozenset((i[m].item(), j[m].item())) for m in valid[a].nonzero()[:, 0]} == expected
        for m in valid[a].nonzero()[:, 0]:
            share = {'pos-pos': 1, 'neg-neg': 0}.get(which, lam[m] if Y[i[m]] == Y[a] else 1 - lam[m])
            assert weights[a, m] == share


@pytest.mark.parametrize('k', [None, 2])
def test_mochi_is_anc_neg_with_less_than_half_of_the_anchor_as_a_negative(k):
    hard = every_negative(Y)
    if k is not None:
        hard = hard & (torch.arange(8) % 3 == 0)            # some are hard, some are not
    i, j, lam, weights, valid = mixture_set('mochi', Y, hard=hard)
    for a in range(len(Y)):
        expected = set()
        for n in range(len(Y)):
            pair = ((i == min(a, n)) & (j == max(a, n))).nonzero()
            if n != a and hard[a, n]:
                share = lam[pair[0, 0]] if a < n else 1 - lam[pair[0, 0]]
                expected |= {pair[0, 0].item()} if share < 0.5 else set()
        assert set(valid[a].nonzero()[:, 0].tolist()) == expected
    assert valid.any() and (weights == 0).all(), 'negatives to all anchors'


def test_every_positive_is_mixed_and_every_anchor_serves():
    y = torch.arange(4).repeat_interleave(5)
    i, j, _, _, valid = mixture_set('pos-neg', y)
    for a in range(20):
        ends = set(i[valid[a]].tolist()) | set(j[valid[a]].tolist())
        assert ends == set(range(20)) - {a}, 'all four positives, all fifteen negatives'
    assert (mixture_set('anc-neg', y)[4].sum(1) == 15).all()
    lonely = torch.tensor([0, 1, 2, 2])                     # 0 and 1 have no positive: no pos-neg, still anc-neg
    assert mixture_set('pos-neg', lonely)[4].sum(1).tolist() == [0, 0, 2, 2]
    assert mixture_set('anc-neg', lonely)[4].sum(1).tolist() == [3, 3, 2, 2]


def run_mixed(monkeypatch, z, y, which, k=None, loss='ms', mixup='embed', alpha=2.0, **more):
    """mixed_loss with what it handed to labelled_loss and mix_embeddings"""
    seen = {}
    real_mix, real_loss = train_metrix.mix_embeddings, train_metrix.labelled_loss

    def spy_mix(ends, i, j, lam):
        seen.update(ends=ends, i=i, j=j, lam=lam)
        return real_mix(ends, i, j, lam)

    def spy_loss(s, weights, valid, *args, **kw):
        seen.update(s=s, weights=weights, valid=valid)
        return real_loss(s, weights, valid, *args, **kw)

    monkeypatch.setattr(train_metrix, 'mix_embeddings', spy_mix)
    monkeypatch.setattr(train_metrix, 'labelled_loss', spy_loss)
    args = SimpleNamespace(loss=loss, alpha=alpha)
    seen['loss'] = mixed_loss(args, mixup, which, k, {}, None, None, None, z, y, **more)
    return seen


@pytest.mark.parametrize('which', ['pos-neg', 'anc-neg'])
def test_hard_negatives_are_the_anchors_own_nearest(monkeypatch, which):
    z = on_circle(0, 5, 180, 20, 40, 60, 170, dtype=torch.float32)
    y = torch.tensor([0, 0, 0, 1, 2, 3, 1])
    seen = run_mixed(monkeypatch, z, y, which, k=2)
    for a in range(len(y)):
        order = sorted((n for n in range(len(y)) if y[n] != y[a]), key=lambda n: -(z[a] @ z[n]).item())
        ends = {frozenset((seen['i'][m].item(), seen['j'][m].item())) for m in seen['valid'][a].nonzero()[:, 0]}
        first = [p for p in range(len(y)) if y[p] == y[a] and p != a] if which == 'pos-neg' else [a]
        assert ends == {frozenset((p, n)) for p in first for n in order[:2]}


def test_a_mixture_that_no_anchor_has_is_not_embedded(monkeypatch):
    seen = run_mixed(monkeypatch, unit(8, dtype=torch.float32), Y, 'anc-neg', k=1)
    assert seen['valid'].any(0).all() and len(seen['i']) <= 8


def test_one_mixture_and_one_lambda_per_unordered_pair(monkeypatch):
    seen = run_mixed(monkeypatch, unit(8, dtype=torch.float32), Y, 'pos-neg')
    pairs = {frozenset(pair) for pair in zip(seen['i'].tolist(), seen['j'].tolist())}
    assert len(pairs) == len(seen['i']) == len(seen['lam'].unique()) and all(len(pair) == 2 for pair in pairs)


# ---- mixed losses


def loop_V(z, y, which, i, j, lam):
    """[(s(a, v), y)] of each anchor, from Eq. (8), in plain loops"""
    result = []
    for a in range(len(y)):
        result.append([])
        for p, n, share in zip(i.tolist(), j.tolist(), lam):
            if y[n] == y[a]:
                p, n, share = n, p, 1 - share               # mix_lambda(p, n) = mix_(1 - lambda)(n, p)
            if y[p] != y[a] or y[n] == y[a] or (p == a) != (which == 'anc-neg'):
                continue
            v = share * z[p] + (1 - share) * z[n]
            result[-1].append((float(z[a] @ v / v.norm()), float(share)))
    return result


@pytest.mark.parametrize('which', ['pos-neg', 'anc-neg'])
@pytest.mark.parametrize('number', [9, 13, 14, 15])
def test_metrix_eq9_eq13_eq14_eq15_against_loops(number, which):
    check_against_loops(number, which)


def check_against_loops(number, which):
    z = F.normalize(unit(8) + 1, dim=1)                     # similar enough for the margins to matter
    i, j, lam, weights, valid = mixture_set(which, Y)
    s = z @ mix_embeddings(z, i, j, lam).T
    V = loop_V(z, Y, which, i, j, lam)
    if number == 14:
        ours = labelled_loss(s, weights, valid, 'contrastive', m=0.5, reduction='sum')
        expected = [sum(-y * x for x, y in v) + sum((1 - y) * max(x - 0.5, 0) for x, y in v) for v in V]
    elif number == 15:
        ours = labelled_loss(s, weights, valid, 'ms')
        expected = [log(1 + sum(y * exp(-BETA * (x - M)) for x, y in v)) / BETA
                    + log(1 + sum((1 - y) * exp(GAMMA * (x - M)) for x, y in v)) / GAMMA for v in V]
    else:
        ours = labelled_loss(s, weights, valid, 'binomial', beta=3.0, gamma=4.0, m=0.2)
        expected = [log(1 + sum(y * exp(-3 * (x - 0.2)) for x, y in v))
                    + log(1 + sum((1 - y) * exp(4 * (x - 0.2)) for x, y in v)) for v in V]
    assert ours.tolist() == pytest.approx(expected, abs=1e-12)


def test_metrix_eq13_weights_are_lambda_and_its_complement():
    check_against_loops(13, 'pos-neg')


def test_metrix_eq14_contrastive():
    check_against_loops(14, 'pos-neg')


def test_metrix_eq15_multi_similarity():
    check_against_loops(15, 'anc-neg')


def test_mean_reduction_divides_by_the_terms_that_are_not_zero():
    """Three mixtures, y = 0.5, 0, 1: two positive terms; negative ones at 0.9 and 0.2, of which one is above 0.5"""
    s, y = torch.tensor([[0.9, 0.2, 0.7]]), torch.tensor([[0.5, 0.0, 1.0]])
    loss = labelled_loss(s, y, torch.ones(1, 3).bool(), 'contrastive')
    assert loss.item() == pytest.approx(-(0.5 * 0.9 + 0.7) / 2 + 0.5 * (0.9 - 0.5) / 1)


def test_pos_pos_has_no_negative_term_and_neg_neg_no_positive_one():
    z = F.normalize(unit(8) + 1, dim=1)
    for which, side in (('pos-pos', 0), ('neg-neg', 1)):
        i, j, lam, weights, valid = mixture_set(which, Y)
        s = z @ mix_embeddings(z, i, j, lam).T
        x = s.masked_fill(~valid, float('-inf')) if side else -s.masked_fill(~valid, float('inf'))
        scale, m = (GAMMA, M) if side else (BETA, -M)
        expected = (scale * (x - m)).exp().sum(1).log1p() / scale
        assert torch.allclose(labelled_loss(s, weights, valid, 'ms'), expected, atol=1e-12)


@pytest.mark.parametrize('kind', ['ms', 'contrastive'])
def test_lambda_1_is_a_clean_loss(kind):
    """Mixtures that are their first end: anc-neg and pos-neg become positives or negatives themselves."""
    z, y = unit(4), torch.tensor([0, 0, 1, 1])
    i, j = torch.tensor([0, 1, 2, 3]), torch.tensor([2, 2, 0, 0])
    lam = torch.ones(4, dtype=torch.float64)
    weights, valid = mixtures('pos-neg', y, i, j, lam, y, torch.arange(4), every_negative(y))
    s = z @ mix_embeddings(z, i, j, lam).T
    clean = labelled_loss(z @ z.T, y[:, None] == y, valid, kind)    # v_m is z_m here
    assert torch.allclose(labelled_loss(s, weights, valid, kind), clean, atol=1e-12)
    assert valid.any(1).all()


@pytest.fixture
def one_step(run, monkeypatch):
    """one_step(*flags): the loss of the script's step on a batch, and the sizes of what passed the trunk"""
    def one_step(*flags):
        seen, real = [], common.Embedder.features
        with monkeypatch.context() as patch:
            patch.setattr(common, 'train', lambda args, model, data, step, *rest: step)
            step = run(train_metrix, '--precision', 'fp32', *flags)
            patch.setattr(common.Embedder, 'features', lambda self, x: seen.append(len(x)) or real(self, x))
            images = torch.randn(8, 3, 32, 32, generator=torch.Generator().manual_seed(0))
            return step(images, torch.tensor([0, 0, 1, 1, 2, 2, 3, 3])).item(), seen
    return one_step


def test_metrix_eq10_adds_the_mixed_loss_with_its_strength(one_step, monkeypatch):
    monkeypatch.setattr(train_metrix, 'mixed_loss', lambda *args: 100.0)
    clean = one_step('--mixup', 'none')[0]
    assert one_step('--strength', '0.25')[0] - clean == pytest.approx(25, abs=1e-3)
    assert one_step()[0] - clean == pytest.approx(40, abs=1e-3), 'w = 0.4 by default'


def test_clean_images_pass_the_trunk_once(one_step):
    assert one_step('--mixup', 'feature')[1] == one_step('--mixup', 'embed')[1] == [8]
    clean, mixed = one_step('--mixup', 'input', '--pairs', 'anc-neg', '--hard-negatives', '1')[1]
    assert clean == 8 and 4 <= mixed <= 8, 'mixed images alone: one to a pair, or one each'


@pytest.mark.parametrize('loss', ['ms', 'contrastive', 'proxy_anchor', 'proxynca_pp'])
@pytest.mark.parametrize('which', ['pos-neg', 'anc-neg'])
def test_order_of_the_batch_does_not_matter(monkeypatch, loss, which):
    """With lambda = 1/2, which is the same for both orders of a pair"""
    half = SimpleNamespace(sample=lambda shape: torch.full(shape, 0.5).double())
    monkeypatch.setattr(train_metrix, 'Beta', lambda *a: half)
    z, proxies, order = unit(8), unit(5, seed=1), torch.tensor([3, 0, 7, 5, 1, 4, 2, 6])
    args = SimpleNamespace(loss=loss, alpha=2.0)
    rest = dict(proxies=proxies) if 'proxy' in loss else {}
    mixed, clean = [], []
    for o in (torch.arange(8), order):
        mixed.append(mixed_loss(args, 'embed', which, 2, {}, None, None, None, z[o], Y[o], **rest).item())
        clean.append(clean_loss(loss, z[o], Y[o], **rest).item())
    assert mixed[0] == pytest.approx(mixed[1], abs=1e-12) and clean[0] == pytest.approx(clean[1], abs=1e-12)


@pytest.mark.parametrize('loss', ['ms', 'contrastive', 'proxy_anchor', 'proxynca_pp'])
@pytest.mark.parametrize('which', ['pos-neg', 'anc-neg', 'pos-pos', 'neg-neg'])
@pytest.mark.parametrize('labels', [[0, 0, 0, 0], [0, 1, 2, 3], [0, 0, 0, 1], [0, 0, 1, 1]],
                         ids=['one class', 'no positives', 'a class of one image', 'two classes'])
def test_degenerate_batches_are_finite(loss, which, labels):
    z = torch.tensor([[1.0, 0], [1, 0], [0, 1], [-1, 0]], requires_grad=True)        # with a duplicate, and an opposite
    y, proxies = torch.tensor(labels), torch.randn(4, 2, requires_grad=True)
    rest = dict(proxies=proxies) if 'proxy' in loss else {}
    mixed = mixed_loss(SimpleNamespace(loss=loss, alpha=2.0), 'embed', which, None, {}, None, None, None, z, y, **rest)
    total = clean_loss(loss, z, y, **rest) + mixed
    total.backward()
    assert total.isfinite() and z.grad.isfinite().all()


def test_proxy_anchor_mixes_are_averaged_over_classes_present(monkeypatch):
    """Eq. (9) for proxies 0 and 2 of four, in loops"""
    z, y, proxies = unit(5), torch.tensor([0, 0, 2, 2, 2]), unit(4, seed=1)
    seen = run_mixed(monkeypatch, z, y, 'pos-neg', loss='proxy_anchor', proxies=proxies)
    total = 0
    for k in (0, 2):
        pull = push = 0
        for i, j, lam in zip(seen['i'], seen['j'], seen['lam'].double()):
            v = lam * z[i] + (1 - lam) * z[j]
            s, share = float(proxies[k] @ v / v.norm()), float(lam if y[i] == k else 1 - lam)
            pull, push = pull + share * exp(-32 * (s - 0.1)), push + (1 - share) * exp(32 * (s + 0.1))
        total += log(1 + pull) + log(1 + push)
    assert len(seen['i']) == 6 and seen['loss'].item() == pytest.approx(total / 2, rel=1e-6)


def test_proxy_anchor_anc_neg_mixes_the_proxy_with_its_negatives(monkeypatch):
    z, y, proxies = unit(5), torch.tensor([0, 0, 2, 2, 2]), unit(4, seed=1)
    seen = run_mixed(monkeypatch, z, y, 'anc-neg', loss='proxy_anchor', proxies=proxies)
    assert sorted(zip(seen['i'].tolist(), seen['j'].tolist())) == [(0, 6), (1, 6), (2, 5), (3, 5), (4, 5)]
    assert torch.allclose(seen['ends'][5:], proxies[[0, 2]])
    for m, j in enumerate(seen['j'].tolist()):
        assert seen['valid'][:, m].tolist() == [j == 5, j == 6]
        assert seen['weights'][j - 5, m] == 1 - seen['lam'][m]              # the proxy is the second end


def test_proxynca_pp_interpolates_the_target():
    v, proxies, lam = unit(2), unit(3, seed=1), torch.tensor([0.3, 0.6], dtype=torch.float64)
    first, second = torch.tensor([0, 1]), torch.tensor([2, 0])
    ours = train_metrix.interpolated_proxynca_pp(v, first, second, lam, proxies)
    target = torch.tensor([[0.3, 0, 0.7], [0.4, 0.6, 0]], dtype=torch.float64)
    assert ours.item() == pytest.approx(F.cross_entropy(18 * v @ proxies.T, target).item(), abs=1e-12)


# ---- Eq. (16)-(25): what a mixture does to its anchor


def mixed_ms(s, lam, beta, gamma, m):
    """Eq. (17): V(a) of a single mixture"""
    one = torch.ones_like(s, dtype=torch.bool)[:, None]
    return labelled_loss(s[:, None], lam[:, None], one, 'ms', beta=beta, gamma=gamma, m=m)


def grid():
    lam = torch.tensor([1e-6, 1e-3, 0.1, 0.3, 0.5, 0.7, 0.9, 1 - 1e-3, 1 - 1e-6], dtype=torch.float64)
    s = torch.linspace(-1, 1, 201, dtype=torch.float64)
    return torch.cartesian_prod(lam, s).unbind(1)


SETTINGS = [(18, 75, 0.77), (2, 50, 0.5), (1, 1, 0.0), (32, 32, 0.1)]


@pytest.mark.parametrize('lam, angle, sign', [(0.9, 40, 1), (0.1, 10, -1)])
def test_metrix_eq16_a_step_downhill_raises_s_where_the_derivative_is_negative(lam, angle, sign):
    a, v = on_circle(0, angle)
    v.requires_grad_()
    s = a @ v
    loss = mixed_ms(s[None], torch.tensor([lam], dtype=torch.float64), 18, 75, 0.77)[0]
    by_v, by_s = torch.autograd.grad(loss, (v, s))
    assert torch.allclose(by_v, by_s * a), 'the chain rule: the derivative of s by v is a'
    assert -by_s.sign() == sign == (a @ (v - 1e-3 * by_v) - s).sign()


@pytest.mark.parametrize('beta, gamma, m', SETTINGS)
def test_metrix_eq17_is_eq15_with_one_mixture(beta, gamma, m):
    lam, s = grid()
    pull = (1 + lam * (-beta * (s - m)).exp()).log() / beta
    push = (1 + (1 - lam) * (gamma * (s - m)).exp()).log() / gamma
    assert torch.allclose(mixed_ms(s, lam, beta, gamma, m), pull + push, atol=1e-12)


@pytest.mark.parametrize('beta, gamma, m', SETTINGS)
def test_metrix_eq18_derivative(beta, gamma, m):
    lam, s = grid()
    s.requires_grad_()
    ours, = torch.autograd.grad(mixed_ms(s, lam, beta, gamma, m).sum(), s)
    pull, push = lam * (-beta * (s - m)).exp(), (1 - lam) * (gamma * (s - m)).exp()
    assert torch.allclose(ours, -pull / (1 + pull) + push / (1 + push), atol=1e-12)


@pytest.mark.parametrize('beta, gamma, m', SETTINGS)
def test_metrix_eq19_to_eq23_are_the_same_condition(beta, gamma, m):
    lam, s = grid()
    t = s - m
    a, b, k = (gamma * t).exp(), (-beta * t).exp(), 1 - lam
    both = lam * k * ((gamma - beta) * t).exp()
    steps = [k * a / (1 + k * a) <= lam * b / (1 + lam * b),                        # (19)
             k * a * (1 + lam * b) <= lam * b * (1 + k * a),                        # (20)
             k * a + both <= lam * b + both,                                        # (21)
             ((beta + gamma) * t).exp() <= lam / k,                                 # (22)
             (beta + gamma) * t <= (lam / k).log()]                                 # (23)
    threshold = train_metrix.positivity_threshold(lam, beta, gamma, m)
    clear = (s - threshold).abs() > 1e-6                    # away from equality, where rounding decides
    for number, step in zip(range(19, 24), steps):
        # (19)-(21) lose the smaller side to rounding where it is 1e-16 of the other: compare where they can tell
        apart = clear & ((k * a).log() - (lam * b).log()).abs().lt(30)
        assert torch.equal(step[apart], (s <= threshold)[apart]), f'Eq. ({number})'


@pytest.mark.parametrize('beta, gamma, m', SETTINGS)
def test_metrix_eq24_threshold_is_where_the_derivative_changes_sign(beta, gamma, m):
    lam, s = grid()
    s.requires_grad_()
    mixed_ms(s, lam, beta, gamma, m).sum().backward()
    threshold = train_metrix.positivity_threshold(lam, beta, gamma, m)
    clear = (s - threshold).abs() > 1e-9
    assert torch.equal((s.grad <= 0)[clear], (s <= threshold)[clear]) and clear.sum() > 1500


def test_metrix_eq24_by_hand():
    assert train_metrix.positivity_threshold(0.5, 18, 75, 0.77).item() == pytest.approx(0.77)
    at_09 = train_metrix.positivity_threshold(0.9, 18, 75, 0.77).item()
    assert at_09 == pytest.approx(log(9) / 93 + 0.77, abs=1e-14), 'a Python float keeps its precision'
    lam = torch.linspace(0, 1, 101)
    threshold = train_metrix.positivity_threshold(lam, 18, 75, 0.77)
    assert (threshold.diff() > 0).all(), 'monotone in lambda'
    assert threshold[0] == -float('inf') and threshold[-1] == float('inf'), 'never positive at 0, always at 1'


def batches_of(y, n):
    generator = torch.Generator().manual_seed(0)
    return [torch.randperm(len(y), generator=generator)[:12].tolist() for _ in range(n)]


def test_metrix_eq11_positivity_follows_lambda_before_training():
    """As in Fig. 2, at epoch 0: similarities that do not know the classes, about as high as m"""
    y, z = torch.arange(6).repeat_interleave(8), unit(48, 256, dtype=torch.float32)
    z[:, 0] += 1.8                                          # cosines of 1.8^2 / (1 + 1.8^2) = 0.76
    torch.manual_seed(0)
    rows = train_metrix.positivity(F.normalize(z, dim=1), y, batches_of(y, 40))
    assert [row[0] for row in rows] == pytest.approx([0.05, 0.15, 0.25, 0.35, 0.45, 0.55, 0.65, 0.75, 0.85, 0.95])
    measured, predicted = [row[1] for row in rows], [row[2] for row in rows]
    assert measured[-1] > 0.99 and predicted[-1] > 0.8 and measured[0] < 0.6 and predicted[0] < 0.1


def test_metrix_eq25_is_exact_for_a_single_mixture():
    """Two classes, two images in one and one in the other: each V(a) of pos-neg has one mixture at most."""
    y = torch.tensor([0, 0, 1])
    z = on_circle(0, 40, 55, dtype=torch.float32)
    torch.manual_seed(0)
    rows = train_metrix.positivity(z, y, [[0, 1, 2]] * 200)
    assert len(rows) > 8 and all(row[1] == row[2] for row in rows)
    assert sum(row[3] for row in rows) == 400               # two anchors have one mixture each


# ---- the script

@pytest.mark.parametrize('mixup', ['input', 'feature', 'embed'])
@pytest.mark.parametrize('loss', ['contrastive', 'ms', 'proxy_anchor', 'proxynca_pp'])
def test_two_steps(run, loss, mixup):
    row = run(train_metrix, '--loss', loss, '--mixup', mixup)
    assert row['epoch'] >= 1 and 0 <= row['R@1'] <= 100


@pytest.mark.parametrize('flags', [
    '--mixup none --loss contrastive', '--mixup none', '--mixup none --loss proxy_anchor',
    '--mixup none --loss proxynca_pp', '--mixup input,feature,embed --hard-negatives 1,all,2',
    '--pairs pos-pos --mixup embed --per-class 4 --pool max', '--pairs neg-neg --hard-negatives 2 --loss contrastive',
    '--loss proxy_anchor --mixup embed --pairs anc-neg --pool avg',
    '--loss contrastive --mixup embed --pairs mochi --hard-negatives 100',
    '--loss proxy_anchor --mixup embed --pairs mochi'])
def test_a_step_of_other_settings(one_step, flags):
    assert all(abs(one_step(*flags.split())[0]) < 1e4 for _ in range(3))


def test_the_first_line_names_what_is_drawn(one_step, capsys):
    one_step('--loss', 'proxy_anchor', '--mixup', 'input,embed')
    first = capsys.readouterr().out.splitlines()[0]
    assert 'proxy_anchor' in first and 'input (pos-neg' in first and 'embed (pos-neg or anc-neg' in first
    one_step('--loss', 'proxynca_pp', '--mixup', 'input')
    assert 'input (queries, 3 negatives)' in capsys.readouterr().out.splitlines()[0]
    one_step('--pairs', 'pos-pos', '--mixup', 'input')
    assert 'input (pos-pos)' in capsys.readouterr().out.splitlines()[0]


@pytest.mark.parametrize('flags, reason', [
    ('--loss proxy_anchor --mixup input --pairs anc-neg', 'no input'),
    ('--loss proxy_anchor --pairs anc-neg', 'no feature'),
    ('--loss proxy_anchor --mixup embed,feature --pairs anc-neg', 'no embed,feature'),
    ('--loss proxynca_pp --pairs anc-neg', 'query'), ('--loss proxynca_pp --pairs pos-pos', 'query'),
    ('--strength -0.1', 'strength'), ('--alpha 0', 'alpha'), ('--alpha -2', 'alpha'), ('--hard-negatives 0', '>= 1'),
    ('--hard-negatives -3', '>= 1'), ('--hard-negatives few', '>= 1'), ('--hard-negatives 1,2', 'once or per'),
    ('--mixup pixels', 'input,feature,embed'), ('--mixup none,input', 'input,feature,embed'),
    ('--loss proxy_anchor --mixup input --pairs mochi', 'no input'),
    ('--loss proxynca_pp --pairs mochi', 'query'),
    ('--alpha inf', 'alpha'), ('--alpha nan', 'alpha'), ('--beta 0', 'beta.*>= 0.001'),
    ('--gamma -1', 'gamma.*>= 0.001'), ('--loss proxynca_pp --temperature 0', 'temperature.*>= 0.001'),
    ('--loss contrastive --gamma 3', '--gamma has no effect with --loss contrastive'),
    ('--loss contrastive --epsilon 0.1', '--epsilon has no effect with --loss contrastive'),
    ('--proxy-lr-mult 3', '--proxy-lr-mult has no effect with --loss ms'),
    ('--mixup none --pairs anc-neg', '--pairs has no effect with --loss ms --mixup none'),
    ('--mixup none --hard-negatives 2', '--hard-negatives has no effect'),
    ('--mixup none --strength 1', '--strength has no effect')])
def test_what_the_paper_does_not_define_is_refused(flags, reason):
    with pytest.raises(common.UsageError, match=reason):
        train_metrix.get_args(flags.split())


def test_defaults_are_the_papers():
    """Table 4, sections B.1, B.2 and 4.1"""
    rows = train_metrix.DEFAULTS
    assert [rows[name]['lr'] for name in ('cub', 'cars', 'sop', 'inshop')] == [1e-4, 1e-4, 3e-5, 1e-4]
    args = train_metrix.get_args('--dataset cub --mixup feature'.split())
    assert (args.loss, args.pairs, args.alpha, args.strength) == ('ms', 'both', 2, 0.4)
    assert (args.optimizer, args.weight_decay, args.epochs, args.decay_rate) == ('adamw', 1e-4, 100, 0.5)
    assert (args.batch_size, args.per_class, args.pool) == (100, 0, 'avg+max')
    assert train_metrix.TABLE_1['ms'][0] == dict(beta=18, gamma=75, m=0.77)
    assert train_metrix.TABLE_1['proxy_anchor'][0] == dict(alpha=32, delta=0.1)
    assert train_metrix.get_args('--dataset cub --loss contrastive'.split()).decay_rate == 0.1
    assert train_metrix.get_args('--dataset cub --loss contrastive --decay-rate 0.3'.split()).decay_rate == 0.3
    assert train_metrix.get_args('--dataset sop --loss contrastive'.split()).decay_rate == 0.25
    assert train_metrix.plan(args) == {'feature': (['pos-neg', 'anc-neg'], None)}
    assert train_metrix.plan(train_metrix.get_args(['--mixup', 'input,embed'])) == {
        'input': (['pos-neg', 'anc-neg'], 3), 'embed': (['pos-neg', 'anc-neg'], None)}


def test_metrix_eq12_utilization_never_grows_with_mixtures(run, capsys):
    run(train_metrix, '--name', 'x')
    capsys.readouterr()
    rows = train_metrix.main(['--analyse', 'runs/x/last.pt', '--device', 'cpu'])
    out = capsys.readouterr().out
    clean, mixed = (float(x) for x in re.findall(r'\d\.\d+', out.split('Eq. (12):')[1]))
    model = common.load_checkpoint('runs/x/last.pt')
    data = common.load(SimpleNamespace(**model.args))
    z, q = common.embed(model, data.train), common.embed(model, data.query)
    assert clean == pytest.approx((torch.cdist(q, z) ** 2).amin(1).mean().item(), abs=2e-3) and mixed <= clean
    assert len(rows) > 5 and 'P(Pos)' in out
    assert os.path.exists('runs/x/positivity.png') or 'pip install matplotlib' in out


@pytest.fixture
def drawn(monkeypatch):
    """The files that a stand-in for matplotlib was asked to write"""
    files = []
    axes = SimpleNamespace(plot=lambda *a: None, set=lambda **kw: None,
                           figure=SimpleNamespace(savefig=lambda path: files.append(str(path))))
    figure = SimpleNamespace(Figure=lambda: SimpleNamespace(subplots=lambda: axes))
    monkeypatch.setitem(sys.modules, 'matplotlib', SimpleNamespace(figure=figure))
    monkeypatch.setitem(sys.modules, 'matplotlib.figure', figure)
    return files


def test_the_figure_lies_in_the_run_folder_and_takes_the_typed_parameters(run, drawn, capsys, monkeypatch):
    run(train_metrix, '--name', 'start', '--epochs', '0')                  # Fig. 2 is before training
    hypers, positivity = [], train_metrix.positivity
    monkeypatch.setattr(train_metrix, 'positivity',
                        lambda *args, **hyper: hypers.append(hyper) or positivity(*args, **hyper))
    train_metrix.main(['--analyse', 'runs/start/last.pt', '--device', 'cpu'])
    typed = ['--beta', '2', '--gamma', '50', '--m', '0.5']
    train_metrix.main(['--analyse', 'runs/start', '--device', 'cpu', *typed])
    assert drawn == ['runs/start/positivity.png'] * 2 and drawn[0] in capsys.readouterr().out
    assert hypers == [{}, dict(beta=2, gamma=50, m=0.5)]
    monkeypatch.setattr(train_metrix, 'positivity', lambda *args, **hyper: [])
    assert train_metrix.main(['--analyse', 'runs/start', '--device', 'cpu']) == [] and len(drawn) == 2
