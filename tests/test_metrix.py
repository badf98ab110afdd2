"""train_metrix.py against Metrix: the equations with numbers in them, loops from the paper, direct pooling."""
import random
import re
import sys
from math import cos, exp, log, radians
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from conftest import on_circle, unit
from torch.distributions import Beta
from torch.utils._python_dispatch import TorchDispatchMode
from worked import expect

import common
import train_contrastive
import train_metrix
import train_ms
from train_metrix import clean_loss, labelled_loss, mix_embeddings, mix_features, mixed_loss, mixtures

BETA, GAMMA, M = 18.0, 75.0, 0.77
Y = torch.tensor([0, 0, 0, 1, 1, 2, 2, 3])


def shares(n, seed=0, dtype=torch.float64):
    return torch.rand(n, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def mixture_set(pairs, y):
    """V(a) of all anchors of a batch, every pair i < j a candidate"""
    i, j = torch.triu_indices(len(y), len(y), 1)
    lam = shares(len(i))
    return i, j, lam, *mixtures(pairs, y, i, j, lam, torch.arange(len(y)), y, y[:, None] != y)


# ---- clean losses


LABELS = [Y, torch.zeros(8).long(), torch.arange(8), torch.tensor([0] * 7 + [1])]


@pytest.mark.parametrize('reduction', ['mean', 'sum'])
def test_metrix_eq1_is_contrastive_similarity_loss(reduction):
    z = unit(8, 3)
    z[3] = torch.tensor([1.0, 0, 0])
    z[4] = torch.tensor([0, 1.0, 0])                        # a positive at cosine 0 counts as one
    for labels in LABELS:
        ours = clean_loss('contrastive', z, labels, m=0.5, reduction=reduction)
        theirs = train_contrastive.contrastive_similarity_loss(z, labels, 0.5, reduction)
        assert ours.item() == pytest.approx(theirs.item(), abs=1e-12)


@pytest.mark.parametrize('epsilon', [None, 0.39])
def test_metrix_eq2_is_multi_similarity_loss(epsilon):
    z = unit(8, 3).requires_grad_()
    for labels in LABELS:
        ours = clean_loss('ms', z, labels, epsilon=epsilon)
        theirs = train_ms.multi_similarity_loss(z, labels, BETA, GAMMA, M, epsilon)
        assert ours.item() == pytest.approx(theirs.item(), abs=1e-12)
        assert torch.allclose(*(torch.autograd.grad(loss, z)[0] for loss in (ours, theirs)), atol=1e-12)


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
    nothing, ones = torch.zeros(3, 4, dtype=torch.bool), torch.ones(3, 4)
    loss = labelled_loss(s, torch.rand(3, 4), nothing, kind)
    loss.sum().backward()
    assert torch.equal(loss, torch.zeros(3)) and torch.equal(s.grad, torch.zeros(3, 4))
    assert torch.equal(labelled_loss(torch.zeros(3, 0), torch.zeros(3, 0), nothing[:, :0], kind), torch.zeros(3))
    one_has_none = torch.tensor([[False], [True], [True]]).expand(3, 4)
    for y, valid in ((ones, ~nothing), (1 - ones, ~nothing), (torch.rand(3, 4), one_has_none)):
        loss = labelled_loss(s, y, valid, kind)
        assert loss.isfinite().all() and torch.autograd.grad(loss.sum(), s)[0].isfinite().all()
        assert valid.all() or loss[0] == 0


def test_an_unknown_hyper_parameter_is_an_error():
    one = torch.ones(1, 1)
    with pytest.raises(TypeError, match='gamma'):
        labelled_loss(0 * one, one, one.bool(), 'contrastive', gamma=2)
    with pytest.raises(ValueError, match='reduction'):
        labelled_loss(0 * one, one, one.bool(), 'contrastive', reduction='max')


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


@pytest.mark.parametrize('pool, expected', [('avg', 1.75), ('max', 6), ('avg+max', 7.75)])
def test_metrix_eq4_feature_by_hand(pool, expected):
    """A quarter of one map and three quarters of the other: [[1, 0], [0, 6]]"""
    f = torch.tensor([[[[4.0, 0], [0, 0]]], [[[0, 0], [0, 8]]]], dtype=torch.float64, requires_grad=True)
    p = mix_features(f, torch.tensor([0]), torch.tensor([1]), torch.tensor([0.25], dtype=torch.float64), pool)
    p.sum().backward()
    what = f'of the maps [[4, 0], [0, 0]] and [[0, 0], [0, 8]], lambda 0.25, {pool}'
    expect(p, [[expected]], f'Metrix Eq. (4) {what}')
    avg, peak = ('avg' in pool) / 4, float('max' in pool)
    expect(f.grad, [[[[0.25 * avg] * 2, [0.25 * avg, 0.25 * (avg + peak)]]],
                    [[[0.75 * avg] * 2, [0.75 * avg, 0.75 * (avg + peak)]]]], f'the gradient of Metrix Eq. (4) {what}')


@pytest.mark.parametrize('pool', ['avg', 'max', 'avg+max'])
@pytest.mark.parametrize('dtype, tolerance', [(torch.float32, 1e-6), (torch.float64, 1e-12)])
@pytest.mark.parametrize('ties', [False, True])
def test_metrix_eq4_feature_is_direct_pooling(dtype, tolerance, pool, ties):
    """With many equal maxima and channels of zeros, too, and with what LayerNorm passes back."""
    i, j = train_metrix.cross_class_pairs(Y)
    lam = shares(len(i), dtype=dtype)
    lam[0], lam[1], lam[2] = 0, 1, 0.5
    f, grad = torch.randn(8, 40, 3, 4, dtype=dtype).relu(), torch.randn(len(i), 40, dtype=dtype) / len(i)
    f = (2 * f).round() / 2 if ties else f
    for after in (lambda p: p, lambda p: F.layer_norm(p, (40,))):
        values, grads = [], []
        for pooling in (mix_features, direct):
            leaf = f.clone().requires_grad_()
            values.append(pooling(leaf, i, j, lam, pool))
            after(values[-1]).backward(grad)
            grads.append(leaf.grad)
        what = f'of random maps (8, 40, 3, 4) of {dtype}, {"with" if ties else "without"} equal maxima, {pool}'
        expect(*values, f'Metrix Eq. (4) {what}', tolerance)
        expect(*grads, f'the gradient of Metrix Eq. (4) {what}: the first maximum takes it', tolerance)


def test_metrix_eq4_feature_in_chunks_of_any_order():
    """Large maps are mixed pair by pair; pairs may repeat and come in any order."""
    f = torch.randn(4, 2, 1100, 1000, requires_grad=True)   # 2.2 million values: one pair per chunk
    i, j, lam = torch.tensor([3, 0, 3]), torch.tensor([1, 2, 1]), torch.tensor([0.2, 0.7, 0.6])
    ours, theirs = (pooling(f, i, j, lam, 'max') for pooling in (mix_features, direct))
    expect(ours, theirs, 'Metrix Eq. (4) of maps (4, 2, 1100, 1000), pairs 3-1, 0-2, 3-1, max', 1e-6)
    expect(*(torch.autograd.grad(p.sum(), f)[0] for p in (ours, theirs)), 'the gradient of Metrix Eq. (4) there', 1e-6)


def test_metrix_eq4_feature_on_maps_of_more_than_256_positions():
    f = torch.zeros(2, 1, 17, 17)
    f[:, :, 16, 16] = 1                                          # position 288, which a byte cannot hold
    f.requires_grad_()
    mix_features(f, torch.tensor([0]), torch.tensor([1]), torch.tensor([0.25]), 'max').sum().backward()
    expect([f.grad[0, 0, 16, 16], f.grad[1, 0, 16, 16], f.grad.sum()], [0.25, 0.75, 1],
           'the gradient of Metrix Eq. (4) at the 289th position, and in all; lambda 0.25, max')


class Largest(TorchDispatchMode):
    """Notes the number of values in the largest tensor that an operation returns while it lasts."""
    values = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        out = operation(*args, **(kwargs or {}))
        self.values = max([self.values, *(t.numel() for t in torch.utils._pytree.tree_leaves(out)
                                          if isinstance(t, torch.Tensor))])
        return out


def test_metrix_eq4_feature_takes_little_memory():
    """What it takes grows with M x c, not with M x c x h x w: neither in one tensor nor in what the backward keeps."""
    f, (i, j), kept = torch.randn(40, 600, 8, 8, requires_grad=True), torch.triu_indices(40, 40, 1), {}

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.numel()
        return tensor
    with Largest() as largest, torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        mix_features(f, i, j, shares(len(i), dtype=torch.float32)).sum().backward()
    limit = len(i) * f[0].numel() // 4
    for number, what in (largest.values, 'in the largest tensor'), (sum(kept.values()), 'kept for the backward pass'):
        assert number < limit, (f'Metrix Eq. (4) of maps (40, 600, 8, 8), {len(i)} pairs: expected fewer than '
                                f'{limit:,} values {what}, got {number:,}')


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16])
def test_metrix_eq4_feature_in_half_precision(dtype):
    f = torch.randn(8, 5, 3, 3).relu().to(dtype).requires_grad_()
    i, j = train_metrix.cross_class_pairs(Y)
    lam = shares(len(i), dtype=torch.float32)
    p = mix_features(f, i, j, lam)
    p.sum().backward()
    assert p.dtype == torch.float32, f'Metrix Eq. (4) of {dtype}: expected float32, got {p.dtype}'
    expect(p, direct(f.float(), i, j, lam, 'avg+max'), f'Metrix Eq. (4) of {dtype}', 1e-6)


def test_mixed_embeddings_of_half_precision_are_raised():
    i, j = train_metrix.cross_class_pairs(Y)
    lam, z = shares(len(i), dtype=torch.float32), unit(8).half()
    expect(mix_embeddings(z, i, j, lam), mix_embeddings(z.float(), i, j, lam), 'mixed embeddings of float16', 1e-6)


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
    """A mixture is valid for the class of one of its ends, and labelled with the share of that end."""
    y, i, j = torch.tensor([0, 0, 1, 2]), torch.tensor([0, 1, 0]), torch.tensor([2, 3, 1])
    weights, valid = train_metrix.pair_labels(y, torch.tensor([0, 1, 2, 5]), i, j, torch.tensor([0.3, 0.6, 0.5]))
    what = 'Metrix Eq. (8): anchors of classes 0, 1, 2, 5; mixtures of classes 0-1, 0-2, 0-0, lambda 0.3, 0.6, 0.5'
    expect(valid, [[1, 1, 0], [1, 0, 0], [0, 1, 0], [0, 0, 0]], f'valid, {what}')
    expect(weights[valid], [0.3, 0.6, 0.7, 0.4], f'the weights of the valid ones, row by row, {what}', 1e-6)


@pytest.mark.parametrize('pairs', ['pos-neg', 'anc-neg', 'pos-pos'])
def test_metrix_eq8_sets(pairs):
    """M(a) from the definitions: U+ x U-, S x U-, U+ x U+"""
    i, j, lam, weights, valid = mixture_set(pairs, Y)
    for a in range(len(Y)):
        P = [p for p in range(len(Y)) if Y[p] == Y[a] and p != a]
        N = [n for n in range(len(Y)) if Y[n] != Y[a]]
        first, second = {'pos-neg': (P, N), 'anc-neg': ([a], N), 'pos-pos': (P, P)}[pairs]
        expected = sorted({(min(p, n), max(p, n)) for p in first for n in second if p != n})
        found = valid[a].nonzero()[:, 0].tolist()
        got = sorted((i[m].item(), j[m].item()) for m in found)
        what = f'Metrix Eq. (8), {pairs}, anchor {a} of classes {Y.tolist()}'
        assert got == expected, f'{what}: expected mixtures {expected}, got {got}'
        share = [1 if pairs == 'pos-pos' else lam[m] if Y[i[m]] == Y[a] else 1 - lam[m] for m in found]
        expect(weights[a, found], share, f'{what}: labels of the mixtures in the order of the batch', 1e-6)


# ---- mixed losses


both_kinds = pytest.mark.parametrize('pairs', ['pos-neg', 'anc-neg'])


def test_metrix_eq13_by_hand():
    """Mixtures of the positive 1 and the negative 2 of anchor 0: lambda among positives, the rest among negatives."""
    y, i, j, lam = torch.tensor([0, 0, 1]), torch.tensor([1, 1]), torch.tensor([2, 2]), shares(2)
    labels, valid = mixtures('pos-neg', y, i, j, lam, torch.tensor([0]), y[:1], (y != 0)[None])
    s = torch.tensor([[0.6, 0.9]], dtype=torch.float64)
    pull = sum(share * exp(-BETA * (v - M)) for share, v in zip(lam.tolist(), (0.6, 0.9)))
    push = sum((1 - share) * exp(GAMMA * (v - M)) for share, v in zip(lam.tolist(), (0.6, 0.9)))
    loss = labelled_loss(s, labels, valid, 'binomial', beta=BETA, gamma=GAMMA, m=M)
    assert loss.item() == pytest.approx(log(1 + pull) + log(1 + push), rel=1e-12)


@both_kinds
def test_metrix_eq9_by_binomial_deviance(pairs):
    check_against_loops(pairs, 'binomial', dict(beta=3.0, gamma=4.0, m=0.2))


@both_kinds
def test_metrix_eq14_contrastive(pairs):
    check_against_loops(pairs, 'contrastive', dict(m=0.5, reduction='sum'))


@both_kinds
def test_metrix_eq15_multi_similarity(pairs):
    """Printed for pos-neg pairs; for anc-neg it is the same sum over another V(a)."""
    check_against_loops(pairs, 'ms', dict(beta=BETA, gamma=GAMMA, m=M))


def check_against_loops(pairs, kind, hyper):
    z = F.normalize(unit(8) + 1, dim=1)                     # similar enough for the margins to matter
    i, j, lam, weights, valid = mixture_set(pairs, Y)
    ours = labelled_loss(z @ mix_embeddings(z, i, j, lam).T, weights, valid, kind, **hyper)
    for a in range(len(Y)):
        V = []                                              # [(s(a, v), y)] from Eq. (8)
        for p, n, share in zip(i.tolist(), j.tolist(), lam):
            if Y[n] == Y[a]:
                p, n, share = n, p, 1 - share               # mix_lambda(p, n) = mix_(1 - lambda)(n, p)
            if Y[p] == Y[a] and Y[n] != Y[a] and (p == a) == (pairs == 'anc-neg'):
                V.append((z[a] @ F.normalize(share * z[p] + (1 - share) * z[n], dim=0), share))
        expect(ours[a], loss_of(V, kind, SimpleNamespace(**hyper)), f'{kind}, {pairs}, anchor {a} of {Y.tolist()}')


def test_mean_reduction_divides_by_the_terms_that_are_not_zero():
    """Three mixtures, y = 0.5, 0, 1: two positive terms; negative ones at 0.9 and 0.2, of which one is above 0.5"""
    s, y = torch.tensor([[0.9, 0.2, 0.7]]), torch.tensor([[0.5, 0.0, 1.0]])
    loss = labelled_loss(s, y, torch.ones(1, 3).bool(), 'contrastive')
    assert loss.item() == pytest.approx(-(0.5 * 0.9 + 0.7) / 2 + 0.5 * (0.9 - 0.5) / 1)


def test_pos_pos_has_no_negative_term(monkeypatch):
    z = F.normalize(unit(8) + 1, dim=1)
    i, j, lam, weights, valid = mixture_set('pos-pos', Y)
    s = (z @ mix_embeddings(z, i, j, lam).T).masked_fill(~valid, float('inf'))
    expected = (-BETA * (s - M)).exp().sum(1).log1p() / BETA
    assert torch.allclose(labelled_loss(s.masked_fill(~valid, 0), weights, valid, 'ms'), expected, atol=1e-12)
    drawn, real = [], train_metrix.mix_embeddings
    monkeypatch.setattr(train_metrix, 'mix_embeddings', lambda z, *ends: drawn.append(ends) or real(z, *ends))
    mixed_loss('ms', {}, 'embed', 'pos-pos', None, 2.0, None, None, None, z, Y)
    (i, j, _), = drawn
    assert len(i) and (Y[i] == Y[j]).all(), 'the step draws these pairs within classes'


# ---- the whole step, against loops over anchors, pairs and terms that follow the paper's text


def loss_of(terms, loss, args):
    """Table 1 on the labelled examples of one anchor, [(s, y)], term by term: Eq. (3), (7), (9)"""
    positives, negatives = [(s, y) for s, y in terms if y > 0], [(s, 1 - y) for s, y in terms if y < 1]
    if loss == 'contrastive':                               # Eq. (1), (14)
        above = [(s - args.m, w) for s, w in negatives if s > args.m]
        pull, push = sum(-w * s for s, w in positives), sum(w * s for s, w in above)
        if args.reduction == 'mean':
            pull, push = pull / max(len(positives), 1), push / max(len(above), 1)
        return pull + push
    if loss in ('ms', 'binomial'):                          # Eq. (2), (15)
        pull = sum(w * torch.exp(-args.beta * (s - args.m)) for s, w in positives)
        push = sum(w * torch.exp(args.gamma * (s - args.m)) for s, w in negatives)
        scales = (args.beta, args.gamma) if loss == 'ms' else (1, 1)
    else:                                                   # Proxy-Anchor Eq. (4)
        alpha, delta, scales = args.proxy_alpha, args.delta, (1, 1)
        pull = sum(w * torch.exp(-alpha * (s - delta)) for s, w in positives)
        push = sum(w * torch.exp(alpha * (s + delta)) for s, w in negatives)
    return sum(torch.log(1 + side) / scale for side, scale in zip((pull, push), scales) if torch.is_tensor(side))


def clean_by_loops(z, y, proxies, args):
    if args.loss == 'proxynca_pp':
        return sum(-(2 / args.temperature * proxies @ z[i]).log_softmax(0)[y[i]] for i in range(len(y))) / len(y)
    if args.loss == 'proxy_anchor':                         # its two sums have divisors of their own
        pull = [loss_of([(p @ z[i], 1) for i in range(len(y)) if y[i] == k], 'proxy_anchor', args)
                for k, p in enumerate(proxies) if k in y]
        push = [loss_of([(p @ z[i], 0) for i in range(len(y)) if y[i] != k], 'proxy_anchor', args)
                for k, p in enumerate(proxies)]
        return sum(pull) / len(pull) + sum(push) / len(push)
    total = 0
    for a in range(len(y)):
        P = [z[a] @ z[i] for i in range(len(y)) if y[i] == y[a] and i != a]             # Eq. (5)
        N = [z[a] @ z[i] for i in range(len(y)) if y[i] != y[a]]                        # Eq. (6)
        if args.loss == 'ms':                               # the miner, on the clean loss alone
            least, most = min(P, default=None), max(N, default=None)
            P, N = ([s for s in P if most is not None and s - args.epsilon < most],
                    [s for s in N if least is not None and s + args.epsilon > least])
        total = total + loss_of([(s, 1) for s in P] + [(s, 0) for s in N], args.loss, args)
    return total / len(y)


def mixed_by_loops(embed, z, y, proxies, args, pairs, k, lam):
    """embed(i, j, share): Eq. (4); lam: {(i, j): the share of i}, i < j, proxies numbered after the images"""
    present = sorted(set(y.tolist()))
    if args.loss == 'proxynca_pp':
        s, terms = z @ z.T, []
        for (i, j), share in lam.items():
            chosen = [n for a, n in ((i, j), (j, i))
                      if k is None or (s[a] > s[a, n])[y != y[a]].sum() < k]            # among the k nearest of either
            if chosen:
                log_p = (2 / args.temperature * proxies @ embed(i, j, share)).log_softmax(0)
                terms.append(-share * log_p[y[i]] - (1 - share) * log_p[y[j]])
        return sum(terms) / len(terms)
    if args.loss == 'proxy_anchor':
        anchors = [(proxies[c], c, len(y) + n if pairs == 'anc-neg' else None) for n, c in enumerate(present)]
    else:
        anchors = [(z[a], y[a].item(), a) for a in range(len(y))]
    total = 0
    for anchor, label, own in anchors:
        N = sorted((n for n in range(len(y)) if y[n] != label), key=lambda n: -(anchor @ z[n]).item())[:k]
        P = [own] if pairs == 'anc-neg' else [p for p in range(len(y)) if y[p] == label and p != own]
        V = []                                              # Eq. (8)
        for p in P:
            for n in N:
                share = lam[p, n] if p < n else 1 - lam[n, p]
                v = embed(p, n, share)
                V.append((anchor @ v, share))
        total = total + (loss_of(V, args.loss, args) if V else 0)
    return total / len(anchors)


def step_flags():
    for mixup in ('input', 'feature', 'embed'):
        for k in ('all', '2'):
            for pairs in ('pos-neg', 'anc-neg'):
                for reduction in ('mean', 'sum'):
                    yield f'--loss contrastive --mixup {mixup} --pairs {pairs} --reduction {reduction}', k
                yield f'--loss ms --mixup {mixup} --pairs {pairs}', k
                if pairs == 'pos-neg' or mixup == 'embed':
                    yield f'--loss proxy_anchor --mixup {mixup} --pairs {pairs}', k
            yield f'--loss proxynca_pp --mixup {mixup}', k


@pytest.mark.parametrize('flags, k', list(step_flags()))
def test_metrix_eq10_the_step_equals_loops(before_training, monkeypatch, flags, k):
    """Value, and gradients by all weights and proxies. Hyper-parameters and w are not the defaults."""
    hyper = {'contrastive': '--m 0.6', 'ms': '--beta 5 --gamma 9 --m 0.7 --epsilon 0.02',
             'proxy_anchor': '--proxy-alpha 4 --delta 0.2', 'proxynca_pp': '--temperature 0.3'}[flags.split()[1]]
    held = before_training(train_metrix, *flags.split(), '--hard-negatives', k, *hyper.split(), '--strength', '0.7')
    args, model = held.args, held.model.double().eval()     # BatchNorm as at evaluation: each image by itself
    y, images = torch.tensor([0, 1, 0, 2, 1, 0]), torch.randn(6, 3, 16, 16, dtype=torch.float64)
    raw = held.learned['proxies'].data if held.learned else None
    if held.learned:
        raw = held.learned['proxies'].data = raw.double()
    monkeypatch.setattr(Beta, 'sample', lambda self, shape: torch.linspace(0.1, 0.85, *shape, dtype=torch.float64))
    weights = [*model.parameters(), *held.learned.values()]

    loss = held.step(images, y)
    grads = torch.autograd.grad(loss, weights, allow_unused=True)

    f = [model.features(x[None]) for x in images]
    z = torch.cat([model.head(t) for t in f])
    proxies = F.normalize(held.learned['proxies'], dim=1) if held.learned else None
    pairs = 'anc-neg' if args.pairs == 'both' else args.pairs
    ends, ends_y = z, y
    if args.loss == 'proxy_anchor' and pairs == 'anc-neg':
        ends, ends_y = torch.cat([z, proxies[:3]]), torch.cat([y, torch.arange(3)])
    keys = [(i, j) for i in range(len(ends_y)) for j in range(i + 1, len(ends_y)) if ends_y[i] != ends_y[j]]
    lam = dict(zip(keys, torch.linspace(0.1, 0.85, len(keys), dtype=torch.float64)))

    def embed(i, j, share):                                 # Eq. (4)
        if args.mixup == ['input']:
            return model((share * images[i] + (1 - share) * images[j])[None])[0]
        if args.mixup == ['feature']:
            return model.head(share * f[i] + (1 - share) * f[j])[0]
        return F.normalize(share * ends[i] + (1 - share) * ends[j], dim=0)

    expected = clean_by_loops(z, y, proxies, args)
    expected = expected + 0.7 * mixed_by_loops(embed, z, y, proxies, args, pairs, None if k == 'all' else int(k), lam)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-9)
    for ours, theirs in zip(grads, torch.autograd.grad(expected, weights, allow_unused=True)):
        assert ours is theirs is None or torch.allclose(ours, theirs, rtol=1e-6, atol=1e-9)


def test_clean_images_pass_the_trunk_once(before_training, monkeypatch):
    seen, real = [], common.Embedder.features
    monkeypatch.setattr(common.Embedder, 'features', lambda self, x: seen.append(len(x)) or real(self, x))
    for mixup, pairs in (('feature', 'both'), ('embed', 'both'), ('input', 'anc-neg')):
        held = before_training(train_metrix, '--mixup', mixup, '--pairs', pairs, '--hard-negatives', '1')
        held.step(torch.randn(8, 3, 32, 32), torch.tensor([0, 0, 1, 1, 2, 2, 3, 3]))
    assert seen[:3] == [8, 8, 8] and 4 <= seen[3] <= 8, 'mixed images alone: one to a pair, or one each'


def test_types_and_kinds_of_pairs_are_drawn_per_iteration(before_training, monkeypatch):
    drawn = []
    monkeypatch.setattr(train_metrix, 'mixed_loss', lambda kind, hyper, mixup, pairs, k, *rest, **more:
                        drawn.append((mixup, pairs, k)) or torch.zeros(()))
    held = before_training(train_metrix, '--mixup', 'input', 'embed')
    for _ in range(60):
        held.step(torch.randn(4, 3, 32, 32), torch.tensor([0, 0, 1, 1]))
    counts = {choice: drawn.count(choice) for choice in drawn}
    assert set(counts) == {(mixup, pairs, k) for mixup, k in (('input', 3), ('embed', None))
                           for pairs in ('pos-neg', 'anc-neg')}
    assert min(counts.values()) >= 5, 'all about equally often'


@pytest.mark.parametrize('alpha, spread', [('0.1', (0.4, 0.5)), ('2', (0.18, 0.28)), ('50', (0.03, 0.07))])
def test_lambda_comes_from_beta_alpha_alpha(before_training, monkeypatch, alpha, spread):
    shares = []
    real = train_metrix.mix_embeddings
    monkeypatch.setattr(train_metrix, 'mix_embeddings', lambda z, i, j, lam: shares.append(lam) or real(z, i, j, lam))
    held = before_training(train_metrix, '--mixup', 'embed', '--alpha', alpha)
    for _ in range(20):
        held.step(torch.randn(8, 3, 32, 32), torch.tensor([0, 0, 1, 1, 2, 2, 3, 3]))
    lam = torch.cat(shares)
    assert 0.4 < lam.mean() < 0.6 and spread[0] < lam.std() < spread[1]


def test_the_plan_is_printed(before_training, capsys):
    before_training(train_metrix, '--mixup', 'input', 'embed', '--hard-negatives', '4', 'all')
    assert 'ms, mixing input: pos-neg or anc-neg, 4 negatives\nms, mixing embed: pos-neg or anc-neg, all negatives\n' \
        in capsys.readouterr().out
    before_training(train_metrix, '--pairs', 'pos-pos')
    assert 'ms, mixing feature: pos-pos\n' in capsys.readouterr().out
    before_training(train_metrix, '--loss', 'proxynca_pp')
    assert 'proxynca_pp, mixing feature: queries, all negatives\n' in capsys.readouterr().out


def test_the_choice_of_plan():
    def plan(flags):
        return train_metrix.plan(train_metrix.get_args(flags.split()))
    assert plan('') == [('feature', ['pos-neg', 'anc-neg'], None)]
    assert plan('--mixup none') == []
    assert plan('--mixup input')[0][2] == 3
    assert plan('--loss contrastive --mixup input feature embed') == [
        ('input', ['pos-neg', 'anc-neg'], 1), ('feature', ['pos-neg', 'anc-neg'], None),
        ('embed', ['pos-neg', 'anc-neg'], None)], 'the last row of Table 6'
    assert plan('--mixup input embed --hard-negatives 7') == [
        ('input', ['pos-neg', 'anc-neg'], 7), ('embed', ['pos-neg', 'anc-neg'], 7)]
    assert plan('--loss proxy_anchor --mixup input embed') == [
        ('input', ['pos-neg'], 3), ('embed', ['pos-neg', 'anc-neg'], None)]
    assert plan('--loss proxynca_pp --mixup feature') == [('feature', ['anc-neg'], None)]


@pytest.mark.parametrize('flags, reason', [
    ('--loss proxy_anchor --mixup input --pairs anc-neg', 'no input'),
    ('--loss proxy_anchor --mixup embed feature --pairs anc-neg', 'no input'),
    ('--loss proxynca_pp --pairs anc-neg', 'query'), ('--hard-negatives 1 2', 'one for each'),
    ('--mixup pixels', 'mixup'), ('--mixup none input', 'none cannot be combined'),
    ('--loss contrastive --gamma 3', '--gamma has no effect with --loss contrastive'),
    ('--loss contrastive --epsilon 0.1', '--epsilon has no effect with --loss contrastive'),
    ('--delta 0.2', '--delta has no effect with --loss ms'),
    ('--proxy-lr-mult 3', '--proxy-lr-mult has no effect with --loss ms'),
    ('--mixup none --pairs anc-neg', '--pairs has no effect with --mixup none'),
    ('--pairs pos-pos --hard-negatives 5', '--hard-negatives has no effect with --pairs pos-pos')])
def test_what_the_paper_does_not_define_is_refused(flags, reason):
    with pytest.raises(common.UsageError, match=reason):
        train_metrix.get_args(flags.split())


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


@pytest.mark.parametrize('lam, expected', [(0.5, 0.77), (0.9, log(9) / 93 + 0.77), (0.1, -log(9) / 93 + 0.77)])
def test_metrix_eq24_by_hand(lam, expected):
    lam = torch.tensor(lam, dtype=torch.float64)
    got = float(train_metrix.positivity_threshold(lam, 18, 75, 0.77))
    expect(got, expected, f'Metrix Eq. (24), lambda {lam:g}, beta 18, gamma 75, m 0.77', 1e-6)


@pytest.mark.parametrize('beta, gamma, m', SETTINGS)
def test_metrix_eq24_threshold_is_where_the_derivative_changes_sign(beta, gamma, m):
    """Eq. (18), the derivative of ms over a single mixture: below 0 a little before it, above 0 a little after."""
    for lam in (0.001, 0.1, 0.3, 0.5, 0.7, 0.9, 0.999):
        threshold = float(train_metrix.positivity_threshold(torch.tensor(lam, dtype=torch.float64), beta, gamma, m))
        signs = []
        for t in (threshold - m - 1e-4, threshold - m + 1e-4):
            pull, push = lam * exp(-beta * t), (1 - lam) * exp(gamma * t)
            signs.append(push / (1 + push) > pull / (1 + pull))
        assert signs == [False, True], (f'Metrix Eq. (24), lambda {lam}, beta {beta}, gamma {gamma}, m {m}: got '
                                        f'{threshold:.6f}, but the derivative does not change its sign there')


def test_the_threshold_of_numbers_and_of_tensors():
    got = train_metrix.positivity_threshold(0.9, 18, 75, 0.77).item()
    assert got == pytest.approx(log(9) / 93 + 0.77, abs=1e-14), 'a Python float keeps its precision'
    threshold = train_metrix.positivity_threshold(torch.linspace(0, 1, 101), 18, 75, 0.77)
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
    assert sum(row[-1] for row in rows) == 400              # two anchors have one mixture each


def test_the_table_of_positivity_has_the_mean_similarity_of_anchors_and_mixtures(monkeypatch):
    z, y = on_circle(0, 40, 55), torch.tensor([0, 0, 1])
    monkeypatch.setattr(Beta, 'sample', lambda self, shape: torch.full(shape, 0.25))
    (row,) = train_metrix.positivity(z, y, [[0, 1, 2]])
    v = F.normalize(0.25 * z[[1, 0]] + 0.75 * z[[2, 2]], dim=1)                   # of anchor 0, of anchor 1
    assert row[3] == pytest.approx((z[:2] * v).sum(dim=1).mean().item(), abs=1e-12)


def test_metrix_eq12_utilization_by_clean_and_mixed_examples_of_all_batches(run, small, monkeypatch, capsys):
    """And the mean similarity stands beside Fig. 2's table."""
    run(train_metrix, '--name', 'x', '--batch-size', '6', '--per-class', '3')
    capsys.readouterr()
    mixtures, real = [], train_metrix.mix_embeddings
    monkeypatch.setattr(train_metrix, 'mix_embeddings', lambda *a: mixtures.append(real(*a)) or mixtures[-1])
    rows = train_metrix.main(['--analyse', 'runs/x', '--device', 'cpu'])
    out = capsys.readouterr().out
    clean, mixed = (float(x) for x in re.findall(r'\d\.\d+', out.split('Eq. (12):')[1].split('\n')[0]))
    model = common.load_checkpoint('runs/x/last.pt')
    data = common.dataset_from(train_metrix.get_args(['--analyse', 'runs/x']))
    z, q = common.embed(model, data.train), common.embed(model, data.query)
    def nearest(*examples):
        return (torch.cdist(q, torch.cat(examples).float()) ** 2).amin(1).mean().item()
    assert len(mixtures) == 10, 'five batches, for Fig. 2 and for the utilization'
    assert clean == pytest.approx(nearest(z), abs=2e-3) and mixed == pytest.approx(nearest(z, *mixtures[5:]), abs=1e-3)
    assert mixed < nearest(z, mixtures[-1]) - 0.002, 'not the last batch alone'
    assert len(rows) > 5 and 'mean s(a, v)' in out
    for _, measured, predicted, s, number in rows:
        assert 0 <= measured <= 1 and 0 <= predicted <= 1 and -1 <= s <= 1 and number > 0


def test_the_analysis_takes_the_runs_parameters_unless_others_are_typed(run, small, monkeypatch):
    run(train_metrix, '--name', 'start', '--epochs', '0', '--beta', '7', '--alpha', '1.5')
    run(train_metrix, '--name', 'pairs', '--epochs', '0', '--loss', 'contrastive')
    taken, drawn, positivity, real = [], [], train_metrix.positivity, train_metrix.Beta
    monkeypatch.setattr(train_metrix, 'positivity', lambda z, y, batches, *hyper: taken.append(hyper) or positivity(
        z, y, batches, *hyper))
    monkeypatch.setattr(train_metrix, 'Beta', lambda a, b: drawn.append((float(a), float(b))) or real(a, b))
    for flags in ('runs/start', 'runs/start/last.pt --gamma 50 --m 0.5', 'runs/pairs --m 0.77 --alpha 0.7'):
        train_metrix.main(['--analyse', *flags.split(), '--device', 'cpu'])
    assert taken == [(1.5, 7, 75, 0.77), (1.5, 7, 50, 0.5), (0.7, 18, 75, 0.77)], 'alpha, beta, gamma, m'
    assert set(drawn) == {(1.5, 1.5), (0.7, 0.7)}, 'for the figure, and for the utilization'
    with pytest.raises(common.UsageError, match='no margin of ms'):
        train_metrix.main(['--analyse', 'runs/pairs'])
    for flags in ('--strength 1', '--hard-negatives 3', '--lr 1'):
        with pytest.raises(common.UsageError, match='has no effect with --analyse'):
            train_metrix.main(['--analyse', 'runs/start', *flags.split()])


def test_the_table_of_the_analysis_is_what_was_measured(run, small, monkeypatch, capsys):
    run(train_metrix, '--epochs', '0', '--name', 'x')
    monkeypatch.setattr(train_metrix, 'positivity', lambda *_: [(0.25, 0.1, 0.2, 0.3, 7), (0.75, 0.4, 0.5, 0.6, 8)])
    capsys.readouterr()
    train_metrix.main(['--analyse', 'runs/x', '--device', 'cpu'])
    table = [line.split() for line in capsys.readouterr().out.split('\n') if line.startswith('    0.')]
    assert table == [['0.25', '0.100', '0.200', '0.300', f'{log(1 / 3) / 93 + 0.77:.3f}', '7'],
                     ['0.75', '0.400', '0.500', '0.600', f'{log(3) / 93 + 0.77:.3f}', '8']]


def test_the_figure_lies_in_the_run_folder(run, small, monkeypatch, capsys):
    """With a stand-in for matplotlib; without it there is a hint, and without mixtures nothing to draw."""
    files, curves = [], []
    axes = SimpleNamespace(plot=lambda *a: curves.extend(a), set=lambda **kw: None,
                           figure=SimpleNamespace(savefig=lambda path: files.append(str(path))))
    figure = SimpleNamespace(Figure=lambda: SimpleNamespace(subplots=lambda: axes))
    run(train_metrix, '--name', 'start', '--epochs', '0')
    rows = [(0.25, 0.1, 0.2, 0.3, 7), (0.75, 0.4, 0.5, 0.6, 8)]
    monkeypatch.setattr(train_metrix, 'positivity', lambda *_: rows)
    for module, hint in ((figure, 'the figure: runs/start/positivity.png'), (None, 'pip install matplotlib')):
        monkeypatch.setitem(sys.modules, 'matplotlib', module and SimpleNamespace(figure=figure))
        monkeypatch.setitem(sys.modules, 'matplotlib.figure', module)
        train_metrix.main(['--analyse', 'runs/start/last.pt', '--device', 'cpu'])
        assert hint in capsys.readouterr().out
    assert curves == [(0.25, 0.75), (0.1, 0.4), 'o-', (0.25, 0.75), (0.2, 0.5), 's--']
    rows.clear()
    assert train_metrix.main(['--analyse', 'runs/start', '--device', 'cpu']) == [] and len(files) == 1


def test_clean_statistics_are_those_of_clean_images(before_training):
    """Input mixing normalises mixtures by their own batch either way; only what the evaluation will use differs."""
    def statistics(*flags):
        torch.manual_seed(0)
        held = before_training(train_metrix, '--precision', 'fp32', *flags)
        torch.manual_seed(1)
        random.seed(1)
        x = torch.randn(8, 3, 32, 32, generator=torch.Generator().manual_seed(2))
        loss = held.step(x, torch.arange(8) // 2)
        momenta = {layer.momentum for layer in held.model.modules() if isinstance(layer, torch.nn.BatchNorm2d)}
        return loss.item(), held.model.trunk.bn1.running_mean, momenta
    (loss, mixed, _), (same, clean, momenta), (_, none, _) = (
        statistics(*flags.split()) for flags in ('--mixup input', '--mixup input --clean-bn', '--mixup none'))
    assert loss == same and momenta == {0.1}, 'the loss is the same, and the next clean batch counts again'
    torch.testing.assert_close(clean, none)
    assert (mixed - none).abs().max() > 1e-4


def test_batches_of_changing_size_are_not_timed_anew(before_training, monkeypatch):
    for mixup, timed in (('feature', True), ('input', False)):
        monkeypatch.setattr(torch.backends.cudnn, 'benchmark', True)
        before_training(train_metrix, '--mixup', mixup)
        assert torch.backends.cudnn.benchmark == timed
