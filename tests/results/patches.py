"""Runs train_metrix.py with a changed step: python tests/results/results.py --patched NAME train_metrix.py FLAGS

A patch is a function that returns replacements, by name, for functions of train_metrix.py. `softer:2:10:0.5` calls the
patch `softer` with three arguments. The page mixing.md lists the patches by their docstrings; those of other_mixup.py
are for Table 3 of Metrix.
"""
from unittest import mock

import other_mixup
import torch
import torch.nn.functional as F

import common
import train_metrix
import train_ms


def softer(beta, gamma, m):
    """mixed loss of ms with other beta, gamma and m; the clean loss keeps 18, 75 and 0.77"""
    real, hyper = train_metrix.mixed_loss, dict(beta=beta, gamma=gamma, m=m)
    return dict(mixed_loss=lambda base, *args: real(base._replace(kind='ms', hyper=hyper), *args))


def push():
    """mixed loss with its negative term only, `1 / gamma log(1 + sum (1 - y) exp(gamma (s - m)))`"""
    real = train_metrix.mixed_loss

    def labelled_loss(s, y, valid, kind, beta, gamma, m):
        exponents = gamma * (s - m) + ((1 - y) * valid).log()                                   # (A, V)
        return F.pad(exponents, (1, 0)).logsumexp(dim=1) / gamma                                # exp(0) is the 1

    def mixed_loss(*args):                                  # the clean loss keeps its positive term
        with mock.patch.object(train_metrix, 'labelled_loss', labelled_loss):
            return real(*args)
    return dict(mixed_loss=mixed_loss)


def released():
    """loss of the code released for ms with embedding mixup (github.com/billpsomas/metrix, b679703), instead of clean
    and mixed loss: mixed examples are positives only, and a mask selects wrong pairs, see `released_loss`"""
    def mixed_loss(base, config, model, levels, y):
        lam = torch.distributions.Beta(config.alpha, config.alpha).sample().item()              # one for the batch
        return released_loss(levels['embed'].float(), y, lam, **base.hyper)
    return dict(mixed_loss=mixed_loss, clean_loss=lambda *args, **kwargs: 0)


def released_loss(z, y, lam, beta, gamma, m, epsilon=0.39):
    """Loss of the code released for ms.  z (B, D) L2-normalized embeddings, y (B,) classes -> scalar

    The miner selects positives P(a) and negatives N(a) of each anchor a. For each positive and each n in N(a) there is
    a triplet (a, p, n), but p is always the least similar of P(a). Triplet r has the mixed embedding v = normalize(lam
    p + (1 - lam) n), which is a positive only. In the clean sums, lam and 1 - lam also multiply the 1 of log(1 + ...).
    The code has a mask of pairs (a, p) of images, but applies it to the matrix of all triplets and mixed embeddings.
    So image a selects triplet a, mostly of another anchor, and image p selects the mixed embedding of triplet p. Only
    the first B triplets are ever selected, and only they have clean sums, but the mean is over all M triplets.
    """
    B = len(y)
    s = z @ z.T                                                                                 # (B, B)
    positive, negative = train_ms.mine(s, y, epsilon)                                           # (B, B): P(a), N(a)
    sum_p = ((-beta * (s - m)).exp() * positive).sum(dim=1)                                     # (B,)
    sum_n = ((gamma * (s - m)).exp() * negative).sum(dim=1)                                     # (B,)
    a, _, n = (positive[:, :, None] & negative[:, None]).nonzero().unbind(dim=1)                # (M,)
    p = s.masked_fill(~positive, float('inf')).argmin(dim=1)[a]                                 # (M,)
    v = F.normalize(lam * z[p] + (1 - lam) * z[n], dim=1)                                       # (M, D)
    M = max(len(a), B)                                      # with fewer triplets than images, that code fails
    # Triplets without a term stay 0.
    pull = F.pad(lam * (1 + sum_p) * positive.any(dim=1), (0, M - B))                           # (M,)
    push = F.pad((1 - lam) * (1 + sum_n) * negative.any(dim=1), (0, M - B))                     # (M,)
    r, q = torch.stack([a, p], dim=1).unique(dim=0).unbind(dim=1)                               # where the mask is true
    inside = (r < len(a)) & (q < len(a))
    r, q = r[inside], q[inside]                             # each r occurs once, so each sum has one term
    misplaced = (z[a[r]] * v[q]).sum(dim=1)                 # anchor of triplet r, mixed embedding of triplet q
    mixed = torch.zeros_like(pull).index_add(0, r, 1 + (-beta * (misplaced - m)).exp())         # (M,)
    logs = [t.where(t > 0, torch.ones_like(t)).log() for t in (pull + 0.4 * mixed, push)]       # log 0 counts as 0
    return (logs[0] / beta + logs[1] / gamma).mean()


PATCHES = {patch.__name__: patch for patch in (softer, push, released)}
ALL = PATCHES | other_mixup.PATCHES


def run_patched(words):
    """Run NAME train_metrix.py FLAGS, given as a list of words."""
    patch, *arguments = words[0].split(':') if words else ['']
    if patch not in ALL or words[1:2] != ['train_metrix.py']:
        raise common.UsageError('--patched needs a patch and train_metrix.py; patches are ' + ', '.join(ALL))
    try:
        replaced = ALL[patch](*map(float, arguments))
    except (TypeError, ValueError):
        raise common.UsageError(f'{words[0]}: {patch} takes other arguments, see tests/results/patches.py') from None
    for function, replacement in replaced.items():
        setattr(train_metrix, function, replacement)
    train_metrix.main(words[2:])
