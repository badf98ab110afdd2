"""Trains train_metrix.py with another mixed loss: python tests/results/patches.py NAME FLAGS

FLAGS are those of train_metrix.py, such as --resume RUN. For ms:

push     only the negative term of Eq. (15), 1 / gamma log(1 + sum (1 - y) exp(gamma (s - m)))
softer   beta 2, gamma 10 and m 0.3 in the mixed loss; the clean loss keeps 18, 75 and 0.77
shared   clean and mixed examples share each logarithm: 1 / beta log(1 + sum_clean + w sum_mixed), and so for gamma
hardest  of the positives of an anchor, only the least similar one is mixed
released the loss of the released code for ms with embedding mixup (note 8 of train_metrix.py), which replaces the clean
         loss, too. Its optimizer is --optimizer adam, whose weight decay is added to the gradient.

For contrastive, with or without mixup:

released_contrastive  the losses of the released code for contrastive with feature mixup (notes 6 and 7)
"""
import sys
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import torch.nn.functional as F
from torch.distributions import Beta

import common
import train_contrastive
import train_metrix
import train_ms
from train_metrix import labelled_loss, mix_features, mixed_loss, mixed_pairs

STRENGTH = 0.4                                              # w, the default of --strength


def with_patched(name, function):
    """mixed_loss with another function of train_metrix; only here, because the clean loss calls it as well"""
    def changed(*args):
        with mock.patch.object(train_metrix, name, function):
            return mixed_loss(*args)
    return changed


def push():
    def negative_term(s, y, valid, kind, beta, gamma, m):
        exponents = gamma * (s - m) + ((1 - y) * valid).log()                                   # (A, V)
        return F.pad(exponents, (1, 0)).logsumexp(dim=1) / gamma                                # exp(0) is the 1
    return dict(mixed_loss=with_patched('labelled_loss', negative_term))


def softer():
    hyper = dict(beta=2.0, gamma=10.0, m=0.3)
    return dict(mixed_loss=lambda base, *args: mixed_loss(base._replace(hyper=hyper), *args))


def shared():
    clean = []                                              # what clean_loss passes to labelled_loss

    def keep(*args, **hyper):
        clean[:] = args
        return labelled_loss(*args, **hyper)

    def joined(s, y, valid, kind, **hyper):
        clean_s, clean_y, clean_valid, _ = clean
        weights = torch.cat([clean_valid.to(y.dtype), STRENGTH * valid], dim=1)
        loss = labelled_loss(torch.cat([clean_s, s], dim=1), torch.cat([clean_y.to(y.dtype), y], dim=1), weights, kind,
                             **hyper)
        # The script adds STRENGTH times the result to the clean loss. So only the loss with shared logarithms remains.
        return (loss - labelled_loss(*clean, **hyper)) / STRENGTH
    return dict(labelled_loss=keep, mixed_loss=with_patched('labelled_loss', joined))


def hardest():
    def fewer(config, z, y, anchor, num_images):
        i, j, lam, label, valid = mixed_pairs(config, z, y, anchor, num_images)
        if config.pairs == 'pos-neg':
            itself = anchor[:, None] == torch.arange(len(y), device=y.device)
            positive = (y[anchor][:, None] == y) & ~itself                                      # (A, E)
            least = (z[anchor] @ z.T).masked_fill(~positive, float('inf')).argmin(dim=1, keepdim=True)      # (A, 1)
            valid = valid & ((i == least) | (j == least))
        return i, j, lam, label, valid
    return dict(mixed_loss=with_patched('mixed_pairs', fewer))


# ---- the released code, with its bugs


def released_ms_loss(z, y, lam, beta=18.0, gamma=75.0, m=0.77):
    """The loss of a batch z (B, D), y (B,) with one lambda, clean and mixed -> scalar. For each mined positive pair
    (a, p), the least similar positive of a is mixed with each mined negative of a: M mixed examples, a row each.

    1 / beta  log( lam (1 + sum_clean) + 0.4 (1 + sum_mixed) )  +  1 / gamma  log( (1 - lam) (1 + sum_clean) )

    The table of the similarities of all M anchors and all M mixed examples is read at the indices of images, so that
    the sum of row a has examples of others. A part without pairs is 0, and the mean is over the M rows.
    """
    s = z @ z.T                                                                                 # (B, B)
    positive, negative = train_ms.mine(s, y, epsilon=0.39)
    a, p = positive.nonzero().unbind(dim=1)
    least = s.masked_fill(~positive, float('inf')).argmin(dim=1)                                # (B,)
    order = s.argsort(dim=1)                                # of the negatives of an anchor, the least similar first
    pair, place = negative.gather(1, order)[a].nonzero().unbind(dim=1)       # (M,), (M,): a positive pair, a negative
    a = a[pair]
    p, n = least[a], order[a, place]
    v = F.normalize(lam * z[p] + (1 - lam) * z[n], dim=1)                                       # (M, D)
    # Row r of the table belongs to the anchor a[r], and column c to the example v[c]. It is read at (a, p), of images.
    size = min(len(y), len(v))
    table = z[a[:size]] @ v[:size].T                                                            # (size, size)
    read = torch.zeros(len(y), len(y), dtype=torch.bool, device=z.device)
    read[a, p] = True
    read = read[:size, :size]

    def one_plus_sum(exponents, keep):
        """1 + sum of exp where keep is true, or 0 in a row without any; (R, C) -> (R,)"""
        return (1 + (exponents.exp() * keep).sum(dim=1)) * keep.any(dim=1)

    rows = z.new_zeros(max(len(v), len(y)))
    clean = rows.clone().index_put((torch.arange(len(y)),), one_plus_sum(-beta * (s - m), positive))
    mixed = rows.clone().index_put((torch.arange(size),), one_plus_sum(-beta * (table - m), read))
    pull = log_or_zero(lam * clean + 0.4 * mixed) / beta
    push = log_or_zero((1 - lam) * one_plus_sum(gamma * (s - m), negative)) / gamma
    return (pull.sum() + push.sum()) / len(rows)


def log_or_zero(t):
    """log t, or 0 without gradient where t is 0"""
    return t.masked_fill(t == 0, 1).log()


def released():
    """The script computes the clean loss, then adds STRENGTH times the mixed one. So the former becomes 0."""
    def whole(base, config, model, levels, y):
        lam = Beta(config.alpha, config.alpha).sample().item()
        return released_ms_loss(common.at_least_float32(levels['embed']), y, lam, **base.hyper) / STRENGTH
    return dict(clean_loss=lambda kind, z, *args, **options: 0 * z.sum(), mixed_loss=whole)


def released_contrastive():
    def clean(kind, z, y, *args, **options):
        return train_contrastive.contrastive_loss(z, y, neg_margin=0.5)

    def mixed(base, config, model, levels, y):
        """Of an anchor's positives only the first in the batch is mixed, with all negatives, as often as the anchor has
        positives. Anchors without a positive are mixed with all negatives, in half of the steps."""
        positive, negative = train_contrastive.pairs(y)
        count = positive.sum(dim=1)                                                             # (B,)
        first = torch.where(count > 0, positive.int().argmax(dim=1), torch.arange(len(y), device=y.device))
        anchors = count > 0 if config.pairs == 'pos-neg' else count == 0
        a, n = (negative & anchors[:, None]).nonzero().unbind(dim=1)                            # (M,), (M,)
        if not len(a):
            return 0 * levels['embed'].sum()
        lam = Beta(config.alpha, config.alpha).sample().to(y.device)        # one for the batch
        # Anchors of a class share mixed examples.
        (i, j), index = torch.stack([first[a], n]).unique(dim=1, return_inverse=True)
        v = model.project(mix_features(levels['feature'], i, j, lam.expand(len(i)), model.pool))[index]     # (M, D)
        d = (2 - 2 * (levels['embed'][a] * v).sum(dim=1)).clamp_min(1e-6).sqrt()                # (M,) distances
        weight = count[a].clamp_min(1)                      # a positive pair each
        parts = lam * d, (1 - lam) * (0.5 - d).clamp_min(0)
        return sum((weight * part).sum() / (weight * (part > 0)).sum().clamp_min(1) for part in parts)
    return dict(clean_loss=clean, mixed_loss=mixed)


PATCHES = dict(push=push, softer=softer, shared=shared, hardest=hardest, released=released,
               released_contrastive=released_contrastive)


def main(argv=None):
    name, *flags = (sys.argv[1:] if argv is None else argv) or ['']
    if name not in PATCHES:
        raise common.UsageError(f'name a patch and then flags of train_metrix.py; patches are {", ".join(PATCHES)}')
    # With a file of another name, train_metrix.py refuses to resume the run, and eval.py gives it a row of its own.
    with mock.patch.multiple(train_metrix, __file__=f'metrix_{name}.py', **PATCHES[name]()):
        args = train_metrix.get_args(flags)
        mixes = args.mixup != ['none'] and args.strength == STRENGTH
        loss, types = dict(released=('ms', ['embed']), released_contrastive=('contrastive', ['feature', 'none'])).get(
            name, ('ms', ['input', 'feature', 'embed']))
        if args.loss != loss or not {*args.mixup} <= {*types} or not mixes and 'none' not in types:
            raise common.UsageError(f'{name} is for --loss {loss}, --mixup {" or ".join(types)}, --strength {STRENGTH}')
        if name == 'hardest' and args.pairs in ('anc-neg', 'pos-pos'):
            raise common.UsageError('hardest is for pos-neg pairs')
        print(f'To resume after an interruption: this script with {name} --resume RUN')
        return train_metrix.main(flags)


if __name__ == '__main__':
    common.cli(main)
