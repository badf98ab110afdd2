"""The losses of reality_check.py against formulas that are written differently, pair by pair, in float64."""
import math
from functools import partial

import pytest
import reality_check
import torch
from conftest import unit
from train_triplet import triplet_loss
from worked import expect_sound, expect_upcast

import common

C, K, D = 5, 3, 6
BATCHES = {'balanced': [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3], 'unbalanced': [0, 0, 0, 0, 1, 1, 2, 3, 3, 4],
           'one class': [2] * 5, 'no positives': [0, 1, 2, 3]}


def anchors(y):
    """Yields each anchor with its positives and negatives, lists of indices."""
    for a, label in enumerate(y):
        others = [b for b in range(len(y)) if b != a]
        yield a, [b for b in others if y[b] == label], [b for b in others if y[b] != label]


def mean(values, number=None):
    number = len(values) if number is None else number
    return sum(values) / number if number else torch.zeros((), dtype=torch.float64)


def distance(x, z):
    return (x - z).square().sum().sqrt()


def triplet(z, y, p, margin):
    costs = [distance(z[a], z[p]) - distance(z[a], z[n]) + margin
             for a, positives, negatives in anchors(y) for p in positives for n in negatives]
    return mean([cost for cost in costs if cost > 0])


def ntxent(z, y, p, temperature):
    """As a cross-entropy: the first of the logits is that of the positive."""
    losses = []
    for a, positives, negatives in anchors(y):
        for b in positives:
            logits = torch.stack([z[a] @ z[other] / temperature for other in (b, *negatives)])
            losses.append(-logits.log_softmax(dim=0)[0])
    return mean(losses)


def fastap(z, y, p, bins):
    """As in the paper, from the ranks down: of each bin, its positives, and all images up to it"""
    def share(d2, edge):
        return torch.relu(1 - abs(d2 - edge) / (4 / bins))
    losses = []
    for a, positives, negatives in anchors(y):
        precision, found, seen = 0, 0, 0
        for edge in (4 * n / bins for n in range(bins + 1)):
            here = sum(share((z[a] - z[b]).square().sum(), edge) for b in positives)
            seen = seen + here + sum(share((z[a] - z[b]).square().sum(), edge) for b in negatives)
            found = found + here
            if here > 0:
                precision = precision + here * found / seen
        losses += [1 - precision / len(positives)] if positives else []
    return mean(losses)


def margin(z, y, beta, margin):
    """Over triplets"""
    terms = []
    for a, positives, negatives in anchors(y):
        boundary = beta[0] if len(beta) == 1 else beta[y[a]]
        for b in positives:
            for n in negatives:
                terms += [distance(z[a], z[b]) - boundary + margin, boundary - distance(z[a], z[n]) + margin]
    return mean([term for term in terms if term > 0])


def arcface(z, y, weights, margin, s):
    """With cos(theta + m) by the addition theorem"""
    losses, m = [], math.radians(margin)
    for x, label in zip(z, y):
        cosines = [x @ w / w.square().sum().sqrt() for w in weights]
        own = cosines[label]
        turned = own * math.cos(m) - (1 - own ** 2).sqrt() * math.sin(m)
        own = turned if own >= -math.cos(m) else own - m * math.sin(m)
        others = sum((s * (cosine - own)).exp() for c, cosine in enumerate(cosines) if c != label)
        losses.append(torch.log1p(others))
    return mean(losses)


def snr(z, y, p, pos_margin, neg_margin, regularizer):
    def ratio(a, b):
        noise, signal = z[b] - z[a], z[a]
        return (noise - noise.mean()).square().mean() / (signal - signal.mean()).square().mean()
    pull = [ratio(a, b) - pos_margin for a, positives, _ in anchors(y) for b in positives]
    push = [neg_margin - ratio(a, b) for a, _, negatives in anchors(y) for b in negatives]
    active = [mean([term for term in terms if term > 0]) for terms in (pull, push)]
    return sum(active) + regularizer * mean([abs(sum(x)) for x in z])


def soft_triple(z, y, centers, s, gamma, tau, margin):
    c = [[v / v.square().sum().sqrt() for v in of_class] for of_class in centers]
    losses = []
    for x, label in zip(z, y):
        classes = []
        for of_class in c:
            cosines = [x @ v for v in of_class]
            weights = [(cosine / gamma).exp() for cosine in cosines]
            classes.append(sum(w * cosine for w, cosine in zip(weights, cosines)) / sum(weights))
        own = classes[label] - margin
        losses.append(torch.log1p(sum((s * (one - own)).exp() for n, one in enumerate(classes) if n != label)))
    apart = [((v - w).square().sum() + 1e-5).sqrt() for of_class in c for n, v in enumerate(of_class)
             for w in of_class[:n]]
    return mean(losses) + tau * mean(apart)


# {name: (the loss, the other formula, shape of what it learns, settings)}
CASES = {
    'triplet': (triplet_loss, triplet, (0,), dict(margin=0.3)),
    'ntxent': (reality_check.ntxent_loss, ntxent, (0,), dict(temperature=0.2)),
    'fastap': (reality_check.fastap_loss, fastap, (0,), dict(bins=7)),
    'margin': (reality_check.margin_loss, margin, (1,), dict(margin=0.2)),
    'margin, per class': (reality_check.margin_loss, margin, (C,), dict(margin=0.1)),
    'arcface': (reality_check.arcface_loss, arcface, (C, D), dict(margin=23.22, s=4.0)),
    'arcface, a large margin': (reality_check.arcface_loss, arcface, (C, D), dict(margin=80.0, s=2.0)),
    'snr': (reality_check.snr_loss, snr, (0,), dict(pos_margin=0.3, neg_margin=2.5, regularizer=0.14)),
    'soft_triple': (reality_check.soft_triple_loss, soft_triple, (C, K, D),
                    dict(s=6.0, gamma=0.2, tau=0.4, margin=0.1)),
}


def learnable(shape, seed=0):
    """Boundaries, weights or centres, and for the other losses nothing, (0,)"""
    p = torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return p + 0.5 if len(shape) == 1 else p - 0.5


def applied(loss, shape, settings):
    """loss(z, y, p), whether or not it learns something"""
    return lambda z, y, p: loss(z, y, *([p] if shape != (0,) else []), **settings)


@pytest.mark.parametrize('batch', BATCHES)
@pytest.mark.parametrize('name', CASES)
def test_a_loss_and_its_gradient_are_those_of_the_other_formula(name, batch):
    """Gradients along the sphere: the squared distance 2 - 2 z.x of fastap holds for unit vectors only."""
    loss, formula, shape, settings = CASES[name]
    y = torch.tensor(BATCHES[batch])
    for seed in range(3):
        z, p = unit(len(y), D, seed).requires_grad_(), learnable(shape, seed).requires_grad_()
        found, wanted = applied(loss, shape, settings)(z, y, p), formula(z, y.tolist(), p, **settings)
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)
        gradients = [torch.autograd.grad(value + 0 * z.sum(), [z, p], materialize_grads=True)
                     for value in (found, wanted)]                      # the 0 is for a formula without any pair
        (ours, of_p), (theirs, wanted_of_p) = ((by_z - (by_z * z).sum(dim=1, keepdim=True) * z, by_p)
                                               for by_z, by_p in gradients)
        torch.testing.assert_close((ours, of_p), (theirs, wanted_of_p), rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize('name', CASES)
def test_a_loss_is_sound_for_any_batch(name):
    loss, _, shape, settings = CASES[name]
    vectors = [learnable(shape)] if shape != (0,) else []
    y = torch.tensor(BATCHES['unbalanced'])
    expect_sound(partial(loss, **settings), name, unit(len(y), D), y, *vectors)
    z = unit(len(y), D, dtype=torch.float32)
    expect_upcast(lambda z, *p: loss(z, y, *p, **settings), name, z, *[p.float() for p in vectors], tolerance=1e-3)


def test_released_settings_are_finite_and_are_the_defaults():
    """The losses are finite in float32, for example at a temperature of 0.0091 or s = 100"""
    y = torch.tensor(BATCHES['balanced'])
    for loss, settings in reality_check.RELEASED.items():
        args = reality_check.get_args(f'--loss {loss} --dataset cub --protocol reality-check --fold 0/4'.split())
        assert {name: getattr(args, name) for name in settings} == settings
        assert args.per_class == (1 if loss in ('arcface', 'soft_triple') else 4)
        p = {name: t.requires_grad_() for name, t in reality_check.new_parameters(args, C, D).items()}
        hyper = {name: value for name, value in settings.items() if name not in ('loss_lr', 'centers', 'beta')}
        z = unit(len(y), D, dtype=torch.float32).requires_grad_()
        value = reality_check.LOSSES[loss](z, y, **p, **hyper)
        value.backward()
        assert value.isfinite() and z.grad.isfinite().all() and all(t.grad.isfinite().all() for t in p.values()), loss


def test_a_flag_of_another_loss_is_refused():
    with pytest.raises(common.UsageError, match='--bins has no effect with --loss snr'):
        reality_check.get_args(['--loss', 'snr', '--bins', '3'])
    with pytest.raises(common.UsageError, match='--beta-of has no effect with --loss arcface'):
        reality_check.get_args(['--loss', 'arcface', '--beta-of', 'class'])


@pytest.mark.parametrize('flags, names', [
    ('--loss fastap', []), ('--loss margin --beta-of class --loss-lr 0.1', ['beta']),
    ('--loss arcface', ['weights']), ('--loss soft_triple --centers 2', ['centers'])])
def test_what_a_loss_learns_moves_at_its_own_rate(before_training, flags, names):
    got = before_training(reality_check, *flags.split())
    assert list(got.loss_params) == names
    before = {name: p.detach().clone() for name, p in got.loss_params.items()}
    images = torch.randn(8, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    got.step(images, torch.arange(8) // 2).backward()
    got.optimizer.step()
    assert all(not p.detach().equal(before[name]) for name, p in got.loss_params.items())
    if names:
        assert [group['lr'] for group in got.optimizer.param_groups] == [got.args.lr, got.args.loss_lr]


def of_library():
    """{name: the same loss of pytorch-metric-learning, as loss(z, y, p)}"""
    from pytorch_metric_learning import losses, regularizers

    def holding(loss, held):
        def value(z, y, p):
            delattr(loss, held)
            setattr(loss, held, p if held == 'beta' else p.flatten(0, -2).T)
            return loss(z, y)
        loss.cast_types = lambda dtype, device: None
        return value
    sparse = regularizers.SparseCentersRegularizer(C, K)
    soft = losses.SoftTripleLoss(C, D, K, la=6, gamma=0.2, margin=0.1, weight_regularizer=sparse, weight_reg_weight=0.8)
    contrastive = losses.SignalToNoiseRatioContrastiveLoss(
        pos_margin=0.3, neg_margin=2.5, embedding_reg_weight=0.14,
        embedding_regularizer=regularizers.ZeroMeanRegularizer())
    return {
        'ntxent': lambda z, y, p: losses.NTXentLoss(0.2)(z, y),
        'fastap': lambda z, y, p: losses.FastAPLoss(7)(z, y),
        'margin': holding(losses.MarginLoss(0.2), 'beta'), 'margin, per class': holding(losses.MarginLoss(0.1), 'beta'),
        'arcface': holding(losses.ArcFaceLoss(C, D, margin=23.22, scale=4), 'W'),
        'snr': lambda z, y, p: contrastive(z, y), 'soft_triple': holding(soft, 'fc')}


@pytest.mark.parametrize('name', ['ntxent', 'fastap', 'margin', 'margin, per class', 'arcface', 'snr', 'soft_triple'])
def test_values_are_those_of_the_other_library(name):
    """The library's regularizer of SoftTriple is half of what it was when the paper's tables were made, so it gets
    twice the weight."""
    pytest.importorskip('pytorch_metric_learning', reason='the comparison needs pip install pytorch-metric-learning')
    loss, _, shape, settings = CASES[name]
    y = torch.tensor(BATCHES['unbalanced'])
    for seed in range(3):
        z, p = unit(len(y), D, seed), learnable(shape, seed)
        torch.testing.assert_close(applied(loss, shape, settings)(z, y, p), of_library()[name](z, y, p), rtol=1e-5,
                                   atol=1e-6)
