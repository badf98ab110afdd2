"""train_metrix.py against Metrix: worked examples of the equations, loops written from the paper, direct pooling."""
from functools import partial
from itertools import combinations, product
from math import exp, log

import pytest
import torch
import torch.nn.functional as F
from conftest import on_circle, unit
from torch.distributions import Beta
from worked import Largest, expect, expect_upcast

import common
import train_metrix
from train_metrix import MixupConfig, labelled_loss, mix_embeddings, mix_features, mixed_pairs


def lambdas(n, dtype=torch.float64):
    """n interpolation factors, the same at each call"""
    return torch.rand(n, generator=torch.Generator().manual_seed(0), dtype=dtype)


# ---- the generic loss

def test_metrix_eq3_by_hand():
    """The negative at -0.2 is below the margin; the positive at 0 counts; the last example is not valid."""
    s, y, valid = torch.tensor([[0.8, 0, 0.7, -0.2, 0.9]]), torch.tensor([[1, 1, 0, 0, 1]]), torch.ones(1, 5).bool()
    valid[0, 4] = False
    pull, push = exp(-2 * 0.3) + exp(-2 * -0.5), exp(9 * 0.2) + exp(9 * -0.7)
    for kind, hyper, expected in (
            ('ms', dict(beta=2, gamma=9, m=0.5), log(1 + pull) / 2 + log(1 + push) / 9),
            ('contrastive', dict(reduction='sum'), -(0.8 + 0) + (0.7 - 0.5)),
            ('contrastive', {}, -(0.8 + 0) / 2 + (0.7 - 0.5))):
        expect(labelled_loss(s.double(), y, valid, kind, **hyper), [expected],
               f'Metrix Eq. (3), positives at 0.8 and 0, negatives at 0.7 and -0.2, {kind}, {hyper}', 1e-6)


# Table 1: hyper-parameters, and tau, sigma+, rho+, sigma-, rho- as printed, without log-sum-exp
LOG1P, SAME = torch.log1p, lambda x: x
PRINTED = {
    'contrastive': (dict(m=0.3, reduction='sum'), SAME, SAME, lambda x: -x, SAME, lambda x: (x - 0.3).clamp_min(0)),
    'ms': (dict(beta=3, gamma=4, m=0.3), SAME, lambda x: LOG1P(x) / 3, lambda x: (-3 * (x - 0.3)).exp(),
           lambda x: LOG1P(x) / 4, lambda x: (4 * (x - 0.3)).exp()),
    # Proxy-Anchor Eq. (4), which differs from the row as printed: + delta for negatives, no factors
    'proxy_anchor': (dict(alpha=3, delta=0.3), SAME, LOG1P, lambda x: (-3 * (x - 0.3)).exp(),
                     LOG1P, lambda x: (3 * (x + 0.3)).exp()),
}
every_row = pytest.mark.parametrize('kind', list(train_metrix.TABLE_1))


def printed(kind, s, y, valid=1):
    """Eq. (7) with a row of Table 1, over the last dimension"""
    _, tau, sigma_pos, rho_pos, sigma_neg, rho_neg = PRINTED[kind]
    return tau(sigma_pos((y * rho_pos(s) * valid).sum(-1)) + sigma_neg(((1 - y) * rho_neg(s) * valid).sum(-1)))


@every_row
def test_metrix_eq7_table_1_row_by_row(kind):
    s = (2 * torch.rand(4, 9, dtype=torch.float64) - 1).requires_grad_()
    y, valid = torch.rand(4, 9, dtype=torch.float64), torch.rand(4, 9) < 0.8
    y[:, 0], y[:, 1] = 0, 1
    valid[:, 2] = True
    hyper = PRINTED[kind][0]
    expect(labelled_loss(s, y, valid, kind, **hyper), printed(kind, s, y, valid), f'Metrix Eq. (7), {kind}, {hyper}')
    assert torch.autograd.gradcheck(lambda s: labelled_loss(s, y, valid, kind, **hyper), s)


@every_row
def test_metrix_eq7_a_term_without_examples_is_0(kind):
    s, y, some = (2 * torch.rand(3, 4) - 1).requires_grad_(), torch.rand(3, 4), torch.ones(3, 4).bool()
    not_the_first = some & torch.tensor([[False], [True], [True]])
    for y_, valid in ((0 * y, some), (0 * y + 1, some), (y, not_the_first)):
        loss = labelled_loss(s, y_, valid, kind)
        grad, = torch.autograd.grad(loss.sum(), s)
        assert loss.isfinite().all() and grad.isfinite().all()
    assert loss[0] == 0 and not grad[0].any()
    assert torch.equal(labelled_loss(s[:, :0], y[:, :0], some[:, :0], kind), torch.zeros(3))


def test_metrix_eq7_in_half_precision():
    y = torch.tensor([[1, 0, 0.3, 0.6], [0, 0.5, 1, 0.2]])
    valid = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 1]]).bool()
    s = torch.tensor([[0.9, 0.8, 0.4, -0.2], [0.7, 0.95, 0.1, 0.85]], dtype=torch.float64)
    for kind in ('ms', 'contrastive'):
        expect_upcast(lambda s, kind=kind: labelled_loss(s, y, valid, kind), f'Metrix Eq. (7), {kind},', s)


def test_metrix_eq7_keeps_its_arguments_and_takes_masks_for_labels():
    """Labels may be the integers 0 and 1, or a mask of the positives."""
    s, mask, valid = lambdas(12).view(3, 4), torch.rand(3, 4) < 0.5, torch.rand(3, 4) < 0.8
    given = [t.clone() for t in (s, mask, valid)]
    expected = labelled_loss(s, mask.double(), valid, 'ms')
    for labels in (mask, mask.long(), mask.float()):
        expect(labelled_loss(s, labels, valid, 'ms'), expected, f'Metrix Eq. (7) with labels of {labels.dtype}')
    assert all(map(torch.equal, given, (s, mask, valid))), 'Metrix Eq. (7): the arguments were modified'


def test_metrix_eq9_over_mixed_examples_and_metrix_eq13_and_metrix_eq14_by_hand():
    """The first anchor has two mixed examples, the second anchor only the first. The weight of an example as a positive
    is its label y, and 1 - y as a negative. The loss of an anchor is a sum over its examples, not a mean. With
    reduction mean, the negative term is a mean over the examples above the margin, here one. If the examples are
    mixtures of a positive and a negative, this is Eq. (13) and (14)."""
    s = torch.tensor([[0.6, 0.9], [0.2, 0.8]], dtype=torch.float64)
    y = torch.tensor([[0.3, 0.8], [0.7, 0.2]], dtype=torch.float64)
    valid = torch.tensor([[True, True], [True, False]])
    pull, push = 0.3 * 0.6 + 0.8 * 0.9, 0.7 * (0.6 - 0.5) + 0.2 * (0.9 - 0.5)
    for reduction, m, first in (('sum', 0.5, -pull + push), ('mean', 0.7, -pull / 2 + 0.2 * (0.9 - 0.7))):
        expect(labelled_loss(s, y, valid, 'contrastive', m=m, reduction=reduction), [first, -0.7 * 0.2],
               'Metrix Eq. (9), (13), (14), mixed examples at 0.6 and 0.9 with labels 0.3 and 0.8, and one at 0.2 with '
               f'label 0.7, contrastive, margin {m}, {reduction}')


# ---- mixed examples

def test_metrix_eq4_input_and_embedding_by_hand():
    x, i, j = torch.rand(3, 3, 4, 4, dtype=torch.float64), torch.tensor([0, 1]), torch.tensor([1, 2])
    expect(train_metrix.mix(x, i, j, torch.tensor([0.25, 0.5])),
           torch.stack([0.25 * x[0] + 0.75 * x[1], (x[1] + x[2]) / 2]), 'Metrix Eq. (4), images, lambda 0.25 and 0.5')
    expect(mix_embeddings(on_circle(0, 90), i[:1], j[:1], torch.tensor([0.25])), [[0.1 ** 0.5, 0.9 ** 0.5]],
           'Metrix Eq. (4), embeddings at 0 and 90 degrees, lambda 0.25')


def direct(f, i, j, lam, pool):
    """Eq. (4) with the tensor (M, c, h, w) of all mixed maps"""
    lam = lam[:, None, None, None]
    mixed = lam * f[i] + (1 - lam) * f[j]
    parts = dict(avg=F.adaptive_avg_pool2d, max=F.adaptive_max_pool2d)
    return sum(parts[name](mixed, 1) for name in pool.split('+')).flatten(1)


def maps_and_pairs(dtype=torch.float64):
    """24 maps of 130 channels and 289 positions, more than the range of a byte, and 276 pairs of them in random order,
    with repetitions. All mixed maps together would have ten million values."""
    generator = torch.Generator().manual_seed(0)
    f = torch.randn(24, 130, 17, 17, generator=generator, dtype=dtype)
    i, j = torch.randint(24, (2, 276), generator=generator)
    return f, i, j, lambdas(276, dtype)


def with_gradient(pooled, f, *pairs):
    """The result of a function of maps, and its gradient with respect to the maps"""
    f = f.detach().clone().requires_grad_()
    p = pooled(f, *pairs)
    p.backward(torch.linspace(-1, 1, p.numel()).view(p.shape).to(p.dtype))
    return p.detach(), f.grad


def expect_direct_pooling(f, i, j, lam, pool):
    p, gradient = with_gradient(direct, f, i, j, lam, pool)
    found, its_gradient = with_gradient(mix_features, f, i, j, lam, pool)
    expect(found, p, f'Metrix Eq. (4), {pool}, of maps {list(f.shape)}')
    expect(its_gradient, gradient, f'the gradient of Metrix Eq. (4), {pool}: the first maximum')


@pytest.mark.parametrize('pool', ['avg', 'max', 'avg+max'])
def test_metrix_eq4_feature_is_direct_pooling(pool):
    """The result equals pooling of all mixed maps, also with lambda 0 or 1."""
    f, i, j, lam = maps_and_pairs()
    lam[:3] = torch.tensor([0, 1, 0.5])
    expect_direct_pooling(f, i, j, lam, pool)


@pytest.mark.parametrize('pool', ['avg', 'max', 'avg+max'])
def test_metrix_eq4_feature_takes_half_of_the_memory_of_all_mixed_maps(pool):
    """The limit applies to the largest tensor, and to the sum of the tensors that are saved for the backward pass."""
    f, i, j, lam = maps_and_pairs()
    f.requires_grad_()
    kept = {}

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.numel()
        return tensor
    with Largest() as largest, torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        mix_features(f, i, j, lam, pool).sum().backward()
    limit = len(i) * f[0].numel() // 2
    for number, what in (largest.values, 'in the largest tensor'), (sum(kept.values()), 'saved for the backward pass'):
        assert number < limit, (f'Metrix Eq. (4) of maps {list(f.shape)}, {len(i)} pairs: expected fewer than '
                                f'{limit:,} values {what}, got {number:,}')


def test_metrix_eq4_feature_of_equal_maxima():
    """Many values of a map are equal, and some channels are zero."""
    f, i, j, lam = maps_and_pairs()
    expect_direct_pooling((2 * f.relu()).round() / 2, i, j, lam, 'avg+max')


def test_metrix_eq4_feature_in_half_precision():
    f, i, j, lam = maps_and_pairs(torch.float32)
    expect_upcast(lambda f: mix_features(f, i, j, lam.to(f.dtype) if f.dtype == torch.float64 else lam),
                  'Metrix Eq. (4), features', f.relu())


# ---- labels

@pytest.fixture
def mixed(monkeypatch):
    """mixed(pairs, y, lam): the pairs of images of classes y, which are all anchors, with these interpolation factors,
    as {anchor: {(i, j): its label}}"""
    def mixed(pairs, y, lam=(), k=None, z=None, anchor=None, images=None):
        def sample(self, shape):
            assert (self.concentration1, self.concentration0) == (1.5, 1.5), 'lambda comes from Beta(alpha, alpha)'
            return torch.tensor([*lam, *[0.5] * 99], dtype=torch.float64)[:shape[0]]
        monkeypatch.setattr(Beta, 'sample', sample)
        y = torch.tensor(y)
        z, anchor = unit(len(y)) if z is None else z, torch.arange(len(y)) if anchor is None else torch.tensor(anchor)
        given = [t.clone() for t in (z, y, anchor)]
        i, j, shares, label, valid = mixed_pairs(MixupConfig('embed', pairs, k, 1.5), z, y, anchor, images or len(y))
        assert all(map(torch.equal, given, (z, y, anchor))), 'Metrix Eq. (8): the arguments were modified'
        assert i.shape == j.shape == shares.shape and label.shape == valid.shape == (len(anchor), len(i))
        assert valid.any(dim=0).all() and (i < j).all(), 'Metrix Eq. (8): each pair is of some anchor, and i < j'
        return {a: {(int(i[m]), int(j[m])): round(label[row, m].item(), 6) for m in valid[row].nonzero()[:, 0]}
                for row, a in enumerate(anchor.tolist())}
    return mixed


@pytest.mark.parametrize('pairs, expected', [
    ('pos-neg', {0: {(1, 2): 0.4, (1, 3): 0.1}, 1: {}, 2: {(0, 1): 0.3, (1, 3): 0.1}, 3: {(0, 1): 0.3, (1, 2): 0.4}}),
    ('anc-neg', {0: {(0, 1): 0.3}, 1: {(0, 1): 0.7, (1, 2): 0.6, (1, 3): 0.9}, 2: {(1, 2): 0.4}, 3: {(1, 3): 0.1}}),
    ('pos-pos', {0: {(2, 3): 1}, 1: {}, 2: {(0, 3): 1}, 3: {(0, 2): 1}})])
def test_metrix_eq8_by_hand(mixed, pairs, expected):
    """M(a) is U+(a) x U-(a) for pos-neg: one of the two has the class of a, and neither is a; the label is the share of
    this one. For anc-neg it is S(a) x U-(a): one of the two is a; the label is its share. For pos-pos it is U+(a) x
    U+(a): both have the class of a, and neither is a; the label is 1 for any lambda. Pairs of different classes are
    (0, 1), (1, 2), (1, 3), with lambda 0.3, 0.6, 0.9."""
    found = mixed(pairs, [5, 2, 5, 5], [0.3, 0.6, 0.9])
    assert found == expected, f'Metrix Eq. (8), {pairs}, classes 5, 2, 5, 5: expected {expected}, got {found}'


def test_metrix_eq8_of_the_hardest_negatives(mixed):
    """Images at 0 and 5 degrees are of class 0, images at 10, 20 and 90 degrees of class 1. With k = 1, the negatives
    of 0 and 5 are at 10, and the negatives of 10, 20, 90 are at 5. Only pairs that some anchor uses are returned.
    With k = 0 there are none."""
    found = mixed('anc-neg', [0, 0, 1, 1, 1], k=1, z=on_circle(0, 5, 10, 20, 90))
    expected = {0: [(0, 2)], 1: [(1, 2)], 2: [(1, 2)], 3: [(1, 3)], 4: [(1, 4)]}
    assert {a: [*pairs] for a, pairs in found.items()} == expected, f'Metrix Eq. (8) with k = 1: got {found}'
    assert not any(mixed('anc-neg', [0, 0, 1, 1, 1], k=0, z=on_circle(0, 5, 10, 20, 90)).values())


def test_an_anchor_with_fewer_negatives_than_k_has_no_others():
    """The first anchor has one negative, the second has none. The most similar candidates are no negatives."""
    s, negative = torch.tensor([[0.9, 0.8, 0.1], [0.3, 0.2, 0.1]]), torch.tensor([[False, False, True], [False] * 3])
    assert torch.equal(train_metrix.hardest_negatives(s, negative, k=2), negative)


def test_metrix_eq8_with_proxies_as_anchors(mixed):
    """Candidates 3 and 4 are the proxies of classes 0 and 7. A proxy is mixed with images only, and only in anc-neg."""
    y, more = [7, 0, 7, 0, 7], dict(anchor=[3, 4], images=3)
    found = {pairs: {a: [*each] for a, each in mixed(pairs, y, **more).items()} for pairs in ('pos-neg', 'anc-neg')}
    expected = {'pos-neg': {3: [(0, 1), (1, 2)], 4: [(0, 1), (1, 2)]}, 'anc-neg': {3: [(0, 3), (2, 3)], 4: [(1, 4)]}}
    assert found == expected, f'Metrix Eq. (8), images of classes 7, 0, 7, proxies of 0, 7: got {found}'


@pytest.mark.parametrize('y', [[3, 3], [3], [1, 2]])
def test_metrix_eq8_without_pairs(mixed, y):
    """One class has no negatives, and classes of one image have no positives."""
    assert not any(mixed('pos-neg', y).values()), f'Metrix Eq. (8), pos-neg, classes {y}: expected no pairs'


# ---- the mixed loss


# ms of Table 1 over mixed examples: similarities, and labels lambda
MIXED = 'mixed examples at 0.6, 0.9 with labels 0.3, 0.8, beta 2, gamma 9, m 0.7'


def two_mixed_examples():
    return (torch.tensor([[0.6, 0.9]], dtype=torch.float64, requires_grad=True),
            torch.tensor([[0.3, 0.8]], dtype=torch.float64))


def test_metrix_eq15_by_hand():
    """The weight of an example is lambda in the positive term, and 1 - lambda in the negative term."""
    s, y = two_mixed_examples()
    pull = 0.3 * exp(-2 * (0.6 - 0.7)) + 0.8 * exp(-2 * (0.9 - 0.7))
    push = 0.7 * exp(9 * (0.6 - 0.7)) + 0.2 * exp(9 * (0.9 - 0.7))
    terms = train_metrix.ms(s, y, 1 - y, 2, 9, 0.7)
    expect(torch.stack(terms), [[log(1 + pull) / 2], [log(1 + push) / 9]],
           f'Metrix Eq. (15), positive and negative term, {MIXED}')


def test_metrix_eq15_closed_form_gradient():
    """The derivative with respect to s is the weighted exponential of an example over 1 + the sum of all, for the
    negative term, minus the same for the positive term."""
    s, y = two_mixed_examples()
    pull, push = train_metrix.ms(s, y, 1 - y, 2, 9, 0.7)
    (pull.sum() + push.sum()).backward()
    p = [0.3 * exp(-2 * (0.6 - 0.7)), 0.8 * exp(-2 * (0.9 - 0.7))]
    n = [0.7 * exp(9 * (0.6 - 0.7)), 0.2 * exp(9 * (0.9 - 0.7))]
    expect(s.grad, [[b / (1 + sum(n)) - a / (1 + sum(p)) for a, b in zip(p, n)]],
           f'the gradient of Metrix Eq. (15), {MIXED}')


@pytest.mark.parametrize('dtype', [torch.float32, torch.float64])
def test_metrix_eq15_is_a_soft_maximum(dtype):
    """With large scales, a term is determined by its hardest mixed example with a weight above 0."""
    s, y = torch.tensor([[0.5, -0.9, 0.8, 0.95]], dtype=dtype), torch.tensor([[0.5, 0, 0.25, 1]], dtype=dtype)
    pull, push = train_metrix.ms(s, y, 1 - y, beta=1e4, gamma=1e4, m=0.7)
    expect(torch.stack([pull, push]), [[0.7 - 0.5], [0.8 - 0.7]], 'Metrix Eq. (15), mixed examples at 0.5, -0.9, 0.8, '
           '0.95 with labels 0.5, 0, 0.25, 1, m 0.7, beta and gamma 10,000: does exp() overflow?', 1e-3)


# ---- the step against loops

def loss_of(terms, kind):
    """Loss of one anchor by Table 1, Eq. (3), (7), (9), for its examples [(s, y)]"""
    if not terms:
        return 0
    s, y = zip(*terms)
    return printed(kind, torch.stack(s), torch.tensor(y, dtype=torch.float64))


def clean_by_loops(kind, z, y, proxies):
    if kind == 'proxynca_pp':
        return -(2 / 0.3 * z @ proxies.T).log_softmax(dim=1)[range(len(y)), y].mean()
    if kind == 'proxy_anchor':                              # its two sums have different denominators
        pull = [loss_of([(p @ z[i], 1) for i in range(len(y)) if y[i] == c], kind)
                for c, p in enumerate(proxies) if c in y]
        push = [loss_of([(p @ z[i], 0) for i in range(len(y)) if y[i] != c], kind) for c, p in enumerate(proxies)]
        return sum(pull) / len(pull) + sum(push) / len(push)
    total = 0
    for a in range(len(y)):
        P = [z[a] @ z[i] for i in range(len(y)) if y[i] == y[a] and i != a]             # Eq. (5)
        N = [z[a] @ z[i] for i in range(len(y)) if y[i] != y[a]]                        # Eq. (6)
        if kind == 'ms':                                    # the miner, only in the clean loss
            least, most = min(P, default=float('inf')), max(N)
            P, N = [s for s in P if s - 0.02 < most], [s for s in N if s + 0.02 > least]
        total = total + loss_of([(s, 1) for s in P] + [(s, 0) for s in N], kind)
    return total / len(y)


def mixed_by_loops(kind, embed, z, y, proxies, pairs, k, lam):
    """embed(i, j, lam_i): Eq. (4); lam: {(i, j): weight of i}, i < j, with indices of proxies after those of images"""
    if kind == 'proxynca_pp':
        s, terms = z @ z.T, []
        for (i, j), lam_i in lam.items():
            if any(k is None or (s[a] > s[a, n])[y != y[a]].sum() < k for a, n in ((i, j), (j, i))):
                log_p = (2 / 0.3 * proxies @ embed(i, j, lam_i)).log_softmax(0)         # among the k nearest of either
                terms.append(-lam_i * log_p[y[i]] - (1 - lam_i) * log_p[y[j]])
        return sum(terms) / len(terms)
    anchors = [(z[a], y[a], a) for a in range(len(y))]
    if kind == 'proxy_anchor':
        anchors = [(proxies[c], c, len(y) + c if pairs == 'anc-neg' else None) for c in range(3)]
    total = 0
    for anchor, label, own in anchors:
        P = [p for p in range(len(y)) if y[p] == label and p != own]
        N = sorted((n for n in range(len(y)) if y[n] != label), key=lambda n: -(anchor @ z[n]).item())[:k]
        V = []                                              # Eq. (8)
        for p, n in {'pos-neg': product(P, N), 'anc-neg': product([own], N), 'pos-pos': combinations(P, 2)}[pairs]:
            lam_p = lam[p, n] if p < n else 1 - lam[n, p]
            V.append((anchor @ embed(p, n, lam_p), 1 if pairs == 'pos-pos' else lam_p))
        total = total + loss_of(V, kind)
    return total / len(anchors)


# Hyper-parameters as in PRINTED and in the loops
HYPER = {'contrastive': '--m 0.3 --reduction sum --pool max', 'ms': '--beta 3 --gamma 4 --m 0.3 --epsilon 0.02',
         'proxy_anchor': '--proxy-alpha 3 --delta 0.3 --pool avg', 'proxynca_pp': '--temperature 0.3'}
MIXUP = ['--mixup input', '--mixup feature', '--mixup embed']
K = ['--hard-negatives all', '--hard-negatives 2']
STEPS = [*product(['contrastive', 'ms'], MIXUP, ['--pairs pos-neg', '--pairs anc-neg'], K),
         *product(['contrastive', 'ms', 'proxy_anchor'], MIXUP, ['--pairs pos-pos']),
         *product(['proxy_anchor'], MIXUP, ['--pairs pos-neg'], K),
         *product(['proxy_anchor'], ['--mixup embed'], ['--pairs anc-neg'], K),
         *product(['proxynca_pp'], MIXUP, K),
         *product(['ms'], ['--mixup feature --pool avg --pairs pos-neg'], [*K, 'LayerNorm']),
         *product(['proxynca_pp'], ['--mixup feature --pool avg'], K)]


@pytest.mark.parametrize('step', STEPS, ids=' '.join)
def test_metrix_eq5_and_metrix_eq6_and_metrix_eq9_and_metrix_eq10_the_step_equals_loops(
        before_training, monkeypatch, step):
    """The values are equal, and so are the gradients of all weights and proxies. Hyper-parameters are not the
    defaults."""
    def sample(self, shape):
        assert self.concentration1 == self.concentration0 == 1.5, 'lambda comes from Beta(alpha, alpha)'
        return torch.linspace(0.1, 0.85, *shape, dtype=torch.float64)
    monkeypatch.setattr(Beta, 'sample', sample)
    returned = []
    monkeypatch.setattr(train_metrix, 'mixed_pairs', lambda *args: returned.extend(mixed_pairs(*args)) or returned)
    kind = step[0]
    flags = [*HYPER[kind].split(), '--loss', *' '.join(step).split(), '--alpha', '1.5', '--strength', '0.7']
    flags += ['--per-class', '0']                           # pos-pos needs two positives of an anchor
    if 'LayerNorm' in flags:
        flags.remove('LayerNorm')
        monkeypatch.setattr(common, 'build', partial(common.build, layer_norm=True))
    held = before_training(train_metrix, *flags)
    args, model = held.args, held.model.double().eval()     # BatchNorm in evaluation mode: images are independent
    for proxies in held.loss_params.values():
        proxies.data = proxies.data.double()
    weights = [*model.parameters(), *held.loss_params.values()]
    y, images = torch.tensor([0, 1, 0, 2, 1, 0]), torch.randn(6, 3, 16, 16, dtype=torch.float64)

    loss = held.step(images, y)
    grads = torch.autograd.grad(loss, weights, allow_unused=True)

    f = [model.features(x[None]) for x in images]
    z = torch.cat([model.head(t) for t in f])
    proxies = F.normalize(held.loss_params['proxies'], dim=1) if held.loss_params else None
    candidates = z
    if kind == 'proxy_anchor' and args.pairs == 'anc-neg':
        candidates = torch.cat([z, proxies[:3]])
    i, j, shares, *_ = (t.tolist() for t in returned)
    lam = dict(zip(zip(i, j), shares))

    def embed(i, j, lam_i):                                 # Eq. (4)
        if args.mixup == ['input']:
            return model((lam_i * images[i] + (1 - lam_i) * images[j])[None])[0]
        if args.mixup == ['feature']:
            return model.head(lam_i * f[i] + (1 - lam_i) * f[j])[0]
        return F.normalize(lam_i * candidates[i] + (1 - lam_i) * candidates[j], dim=0)

    k = 2 if step[-1] == '--hard-negatives 2' else None
    expected = clean_by_loops(kind, z, y, proxies)
    expected = expected + 0.7 * mixed_by_loops(kind, embed, z, y, proxies, args.pairs, k, lam)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-9)
    for ours, theirs in zip(grads, torch.autograd.grad(expected, weights, allow_unused=True)):
        assert ours is theirs is None or torch.allclose(ours, theirs, rtol=1e-6, atol=1e-9)


def test_types_of_mixup_and_pairs_are_sampled_in_each_step(before_training, monkeypatch):
    sampled = []
    monkeypatch.setattr(train_metrix, 'mixed_loss', lambda base, config, *rest:
                        sampled.append(config[:3]) or torch.zeros(()))
    monkeypatch.setattr(torch.backends.cudnn, 'benchmark', True)
    held = before_training(train_metrix, '--mixup', 'input', 'embed')
    assert not torch.backends.cudnn.benchmark, 'the number of mixed images varies'
    for _ in range(60):
        held.step(torch.randn(4, 3, 32, 32), torch.tensor([0, 0, 1, 1]))
    choices = list(product([('input', 3), ('embed', None)], ['pos-neg', 'anc-neg']))
    assert len(set(sampled)) == len(choices)
    assert all(sampled.count((mixup, pairs, k)) >= 5 for (mixup, k), pairs in choices), 'all about equally often'


def test_the_trunk_computes_clean_images_once(before_training, monkeypatch):
    seen, real = [], common.Embedder.features
    monkeypatch.setattr(common.Embedder, 'features', lambda self, x: seen.append(len(x)) or real(self, x))
    for mixup in ('feature', 'embed', 'input'):
        held = before_training(train_metrix, '--mixup', mixup, '--pairs', 'anc-neg', '--hard-negatives', '1')
        seen.clear()
        held.step(torch.randn(8, 3, 32, 32), torch.arange(8) // 2)
        assert seen[0] == 8 and len(seen) == 1 + (mixup == 'input'), mixup
    assert 4 <= seen[1] <= 8, 'only mixed images, at least one per pair of images'


def test_a_single_mixed_image_is_left_out(before_training):
    """In a batch of classes 0, 0, 1, 2 there is one pair of positives. BatchNorm in training needs several images."""
    held = before_training(train_metrix, *'--loss proxy_anchor --mixup input --pairs pos-pos --per-class 0'.split())
    held.model.train()
    held.step(torch.randn(4, 3, 4, 4), torch.tensor([0, 0, 1, 2])).backward()


def test_an_unknown_mixup_is_rejected():
    z, pair = unit(3), torch.tensor([0])
    with pytest.raises(common.UsageError, match='mixup is input, feature or embed, and not '):
        train_metrix.mix_and_embed(MixupConfig('embedding', 'pos-neg', None, 2), None, dict(embed=z), pair, pair, z)


# ---- flags


BOTH = ['pos-neg', 'anc-neg']


@pytest.mark.parametrize('flags, expected', [
    ('', [('feature', BOTH, None)]), ('--mixup none', []), ('--strength 0', []),
    ('--loss proxy_anchor --strength 0 --batch-size 4 --per-class 4', []),
    ('--mixup input', [('input', BOTH, 3)]),
    ('--loss contrastive --mixup input feature embed',                              # the last row of Table 6
     [('input', BOTH, 1), ('feature', BOTH, None), ('embed', BOTH, None)]),
    ('--mixup input embed --hard-negatives 7', [('input', BOTH, 7), ('embed', BOTH, 7)]),
    ('--loss proxy_anchor --mixup input embed', [('input', ['pos-neg'], 3), ('embed', BOTH, None)]),
    ('--loss proxynca_pp --mixup feature', [('feature', ['anc-neg'], None)])])
def test_the_plan_follows_from_the_flags(flags, expected):
    choices = train_metrix.plan(train_metrix.get_args(flags.split()))
    assert [(choice[0].mixup, [config.pairs for config in choice], choice[0].k) for choice in choices] == expected
    assert all(config[:1] + config[2:] == choice[0][:1] + choice[0][2:] for choice in choices for config in choice)


@pytest.mark.parametrize('flags, reason', [
    ('--loss proxy_anchor --mixup embed feature --pairs anc-neg', 'no input'),
    ('--mixup none input', 'none cannot be combined'),
    ('--loss proxy_anchor --batch-size 4 --per-class 4', 'a batch of one class, which has no negative to mix'),
    ('--pairs pos-pos --per-class 2', '--per-class 0 or at least 3'),
    ('--pairs pos-pos --per-class 1 --loss proxy_anchor', '--per-class 0 or at least 2')])
def test_combinations_that_the_paper_does_not_define_are_rejected(flags, reason):
    with pytest.raises(common.UsageError, match=reason):
        train_metrix.get_args(flags.split())


# ---- the effect of a mixed example on its anchor

@pytest.mark.parametrize('beta, gamma, m', [(18, 75, 0.77), (2, 50, 0.5)])
def test_metrix_eq16_and_metrix_eq17_and_metrix_eq18_value_and_derivatives_for_one_mixed_example(beta, gamma, m):
    """A mixed example v has label lambda. The derivative of the loss with respect to v is its derivative with respect
    to s(a, v) times a."""
    lam, s = torch.cartesian_prod(torch.linspace(0.01, 0.99, 9), torch.linspace(-1, 1, 201)).double().unbind(1)
    a, v = on_circle(0)[0], torch.stack([s, (1 - s ** 2).sqrt()], dim=1).requires_grad_()
    one = torch.ones(len(s), 1).bool()
    loss = labelled_loss((v @ a)[:, None], lam[:, None], one, 'ms', beta=beta, gamma=gamma, m=m)
    pull, push = lam * (-beta * (s - m)).exp(), (1 - lam) * (gamma * (s - m)).exp()
    what = f'of one mixed example, beta {beta}, gamma {gamma}, m {m}'
    expect(loss, pull.log1p() / beta + push.log1p() / gamma, f'Metrix Eq. (17) {what}')
    by_s = -pull / (1 + pull) + push / (1 + push)
    expect(*torch.autograd.grad(loss.sum(), v), by_s[:, None] * a, f'Metrix Eq. (16), (18) {what}')


def test_metrix_eq19_and_metrix_eq20_and_metrix_eq21_and_metrix_eq22_and_metrix_eq23_are_the_condition_of_eq24():
    lam, t = torch.cartesian_prod(torch.linspace(0.1, 0.9, 9), torch.linspace(-1, 1, 100)).double().unbind(1)
    beta, gamma, m, k = 2, 5, 0.3, 1 - lam                  # t is s - m
    a, b, both = (gamma * t).exp(), (-beta * t).exp(), lam * k * ((gamma - beta) * t).exp()
    steps = [k * a / (1 + k * a) <= lam * b / (1 + lam * b),                        # (19)
             k * a * (1 + lam * b) <= lam * b * (1 + k * a),                        # (20)
             k * a + both <= lam * b + both,                                        # (21)
             ((beta + gamma) * t).exp() <= lam / k,                                 # (22)
             (beta + gamma) * t <= (lam / k).log()]                                 # (23)
    for number, step in zip(range(19, 24), steps):
        assert torch.equal(step, t + m <= train_metrix.positivity_threshold(lam, beta, gamma, m)), f'Eq. ({number})'


@pytest.mark.parametrize('lam, beta, gamma, m, expected', [
    (0.5, 18, 75, 0.77, 0.77), (0.9, 18, 75, 0.77, log(9) / 93 + 0.77), (0.1, 18, 75, 0.77, -log(9) / 93 + 0.77),
    (0.999, 18, 75, 0.77, log(999) / 93 + 0.77), (0.75, 2, 50, 0.5, log(3) / 52 + 0.5),
    (0.8, 1, 1, 0, log(4) / 2), (0.2, 32, 32, -0.1, -log(4) / 64 - 0.1)])
def test_metrix_eq24_by_hand(lam, beta, gamma, m, expected):
    got = float(train_metrix.positivity_threshold(torch.tensor(lam, dtype=torch.float64), beta, gamma, m))
    expect(got, expected, f'Metrix Eq. (24), lambda {lam:g}, beta {beta}, gamma {gamma}, m {m:g}', 1e-6)


def test_metrix_eq24_of_a_float_is_a_float64_tensor():
    got = train_metrix.positivity_threshold(0.9, 18, 75, 0.77)
    assert isinstance(got, torch.Tensor) and got.dtype == torch.float64, f'expected a float64 tensor, got {got!r}'
    expect(got, log(9) / 93 + 0.77, 'Metrix Eq. (24), lambda 0.9, beta 18, gamma 75, m 0.77', 1e-14)


def test_metrix_eq24_of_0_and_1_is_infinite():
    lam = torch.tensor([[0.0, 0.5, 1.0]])
    got = train_metrix.positivity_threshold(lam, 18, 75, 0.77)
    assert got.dtype == torch.float64, f'expected float64, got {got.dtype}'
    assert got.tolist() == [[-float('inf'), pytest.approx(0.77), float('inf')]], (
        f'Metrix Eq. (24), lambda 0, 0.5 and 1, m 0.77: expected -inf, 0.77, inf, got {got}')
    assert lam.tolist() == [[0, 0.5, 1]] and lam.dtype == torch.float32, 'its argument was modified'
