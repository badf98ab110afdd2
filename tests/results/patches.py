"""Runs of train_metrix.py whose step is changed: python tests/results/results.py --patched NAME train_metrix.py FLAGS

A patch is a function that returns the functions of train_metrix.py, or the methods of common.Embedder, which it
replaces, by their names. `softer:2:10:0.5` gives the patch `softer` three numbers. The docstrings of the patches stand
on the page that is named why.md; those of other_mixup.py are for Table 3 of Metrix.
"""
from unittest import mock

import other_mixup
import torch
import torch.nn.functional as F

import common
import train_metrix
import train_ms


def with_kind(kind, **hyper):
    """mixed_loss with a kind and hyper-parameters of its own; the clean loss keeps those of the flags"""
    real = train_metrix.mixed_loss
    return dict(mixed_loss=lambda base, *args: real(base._replace(kind=kind, hyper=hyper), *args))


def softer(beta, gamma, m):
    """`BaseLoss('ms', dict(beta=..., gamma=..., m=...))` for `mixed_loss`: the clean loss keeps 18, 75 and 0.77"""
    return with_kind('ms', beta=beta, gamma=gamma, m=m)


def contrast(m):
    """`BaseLoss('contrastive', dict(m=0.5))` for `mixed_loss`: the mixed loss is contrastive, the clean one is ms"""
    return with_kind('contrastive', m=m)


def push():
    """`1 / gamma log(1 + sum (1 - y) exp(gamma (s - m)))`: mixtures only push, without the term that pulls"""
    real = train_metrix.mixed_loss

    def labelled_loss(s, y, valid, kind, beta, gamma, m):
        exponents = gamma * (s - m) + ((1 - y) * valid).log()                                   # (A, V)
        return F.pad(exponents, (1, 0)).logsumexp(dim=1) / gamma                                # exp(0) is the 1

    def mixed_loss(*args):                                  # the clean loss keeps its pull
        with mock.patch.object(train_metrix, 'labelled_loss', labelled_loss):
            return real(*args)
    return dict(mixed_loss=mixed_loss)


def mined():
    """`valid & mined`: what is mixed for an anchor are a positive and a negative that the miner keeps (epsilon 0.39)"""
    real, real_labels = train_metrix.mixed_loss, train_metrix.pair_labels

    def mixed_loss(base, config, model, levels, y):
        z = levels['embed']
        positives, negatives = train_ms.mine(z @ z.T, y, 0.39)                                  # (B, B)
        kept = positives | negatives | torch.eye(len(y), dtype=torch.bool, device=y.device)     # or the anchor itself

        def pair_labels(y, anchor_y, i, j, lam):            # the images are the anchors
            pair_y, valid = real_labels(y, anchor_y, i, j, lam)
            return pair_y, valid & kept[:, i] & kept[:, j]
        with mock.patch.object(train_metrix, 'pair_labels', pair_labels):
            return real(base, config, model, levels, y)
    return dict(mixed_loss=mixed_loss)


def released():
    """The loss of the code released for ms with embedding mixing (github.com/billpsomas/metrix, b679703), in place of
    both terms: mixtures only pull, and a mask meets wrong pairs, see `released_loss`"""
    def mixed_loss(base, config, model, levels, y):
        lam = torch.distributions.Beta(config.alpha, config.alpha).sample().item()              # one for the batch
        return released_loss(levels['embed'].float(), y, lam, **base.hyper)
    return dict(mixed_loss=mixed_loss, clean_loss=lambda *args, **kwargs: 0)


def released_loss(z, y, lam, beta, gamma, m, epsilon=0.39):
    """What the code that was released for ms computes of unit embeddings z (B, D) with classes y (B,)

    Anchor a keeps the positives P(a) and negatives N(a) of the miner. For each of its positives and each n of N(a)
    there is a row (a, p, n), but p is always the least similar of P(a). Row r has the mixture v = unit(lam p + (1 -
    lam) n). In the clean sums, lam and 1 - lam also multiply the 1 of log(1 + ...). Mixtures are positives only.
    A mask of pairs (a, p), which are indices of images, is used on the table of all rows against all mixtures. So an
    image a stands for row a, mostly of another anchor, and an image p for the mixture of row p, and only the first B
    rows have any. The mean is over all M rows, of which only the first B have clean sums.
    """
    B = len(y)
    s = z @ z.T                                                                                 # (B, B)
    positive, negative = train_ms.mine(s, y, epsilon)                                           # (B, B): P(a), N(a)
    sum_p = ((-beta * (s - m)).exp() * positive).sum(dim=1)                                     # (B,)
    sum_n = ((gamma * (s - m)).exp() * negative).sum(dim=1)                                     # (B,)
    a, _, n = (positive[:, :, None] & negative[:, None]).nonzero().unbind(dim=1)                # (M,)
    p = s.masked_fill(~positive, float('inf')).argmin(dim=1)[a]                                 # (M,)
    v = F.normalize(lam * z[p] + (1 - lam) * z[n], dim=1)                                       # (M, D)
    M = max(len(a), B)                                      # with fewer rows than images, that code fails
    # What has no term stays 0.
    pull = F.pad(lam * (1 + sum_p) * positive.any(dim=1), (0, M - B))                           # (M,)
    push = F.pad((1 - lam) * (1 + sum_n) * negative.any(dim=1), (0, M - B))                     # (M,)
    row, column = torch.stack([a, p], dim=1).unique(dim=0).unbind(dim=1)                        # where the mask is true
    inside = (row < len(a)) & (column < len(a))
    row, column = row[inside], column[inside]               # an image is in one row at most, so each sum has one term
    misplaced = (z[a[row]] * v[column]).sum(dim=1)          # of the anchor of a row and the mixture of another
    mixed = torch.zeros_like(pull).index_add(0, row, 1 + (-beta * (misplaced - m)).exp())       # (M,)
    logs = [t.where(t > 0, torch.ones_like(t)).log() for t in (pull + 0.4 * mixed, push)]       # log 0 counts as 0
    return (logs[0] / beta + logs[1] / gamma).mean()


def with_features(change):
    """Changes the features of a batch in training; those of an evaluation stay"""
    real = common.Embedder.features

    def features(self, x):
        f = real(self, x)
        return change(f) if torch.is_grad_enabled() else f
    return dict(features=features)


def dropout(p):
    """`F.dropout(f, p)`: in training, a share p of the numbers of each vector is 0"""
    return with_features(lambda f: F.dropout(f, p))


def noise(sigma):
    """`f + sigma / sqrt(c) * randn`: in training, vectors have noise of length sigma; theirs is 1, on average"""
    return with_features(lambda f: f + sigma / f.shape[1] ** 0.5 * torch.randn_like(f))


def smooth(epsilon):
    """`proxy_anchor(s, y, 1 - y)`, label smoothing: an image has label 1 - epsilon with the proxy of its class, and
    epsilon / (C - 1) with each other proxy"""
    real = train_metrix.proxy_anchor

    def proxy_anchor(s, positive, negative, **hyper):
        y = torch.where(positive, 1 - epsilon, epsilon / (len(s) - 1))                          # (C, B)
        return real(s, y, 1 - y, **hyper)
    return dict(proxy_anchor=proxy_anchor)


def scale(factor):
    """`factor * clean_loss(...)`: a larger loss without another direction"""
    real = train_metrix.clean_loss
    return dict(clean_loss=lambda *args, **kwargs: factor * real(*args, **kwargs))


PATCHES = {patch.__name__: patch for patch in (softer, contrast, push, mined, released, dropout, noise, smooth, scale)}
ALL = PATCHES | other_mixup.PATCHES


def run_patched(words):
    """Runs NAME train_metrix.py FLAGS, a list of words"""
    patch, *numbers = words[0].split(':') if words else ['']
    if patch not in ALL or words[1:2] != ['train_metrix.py']:
        raise common.UsageError('--patched needs a patch and train_metrix.py; patches are ' + ', '.join(ALL))
    try:
        replaced = ALL[patch](*map(float, numbers))
    except (TypeError, ValueError):
        raise common.UsageError(f'{words[0]}: {patch} takes other numbers, see tests/results/patches.py') from None
    for function, replacement in replaced.items():
        setattr(train_metrix if hasattr(train_metrix, function) else common.Embedder, function, replacement)
    train_metrix.main(words[2:])
