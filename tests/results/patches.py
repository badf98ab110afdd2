"""Trains train_metrix.py with a changed mixed loss of ms: python tests/results/patches.py NAME FLAGS

FLAGS are those of train_metrix.py, such as --resume RUN.

push     only the negative term of Eq. (15), 1 / gamma log(1 + sum (1 - y) exp(gamma (s - m)))
softer   beta 2, gamma 10 and m 0.3 in the mixed loss; the clean loss keeps 18, 75 and 0.77
shared   clean and mixed examples share each logarithm: 1 / beta log(1 + sum_clean + w sum_mixed), and so for gamma
hardest  of the positives of an anchor, only the least similar one is mixed
"""
import sys
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import torch.nn.functional as F

import common
import train_metrix
from train_metrix import labelled_loss, mixed_loss, mixed_pairs

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


PATCHES = dict(push=push, softer=softer, shared=shared, hardest=hardest)


def main(argv=None):
    name, *flags = (sys.argv[1:] if argv is None else argv) or ['']
    if name not in PATCHES:
        raise common.UsageError(f'name a patch and then flags of train_metrix.py; patches are {", ".join(PATCHES)}')
    # With a file of another name, train_metrix.py refuses to resume the run, and eval.py gives it a row of its own.
    with mock.patch.multiple(train_metrix, __file__=f'metrix_{name}.py', **PATCHES[name]()):
        args = train_metrix.get_args(flags)
        if args.loss != 'ms' or args.mixup == ['none'] or args.strength == 0:
            raise common.UsageError(f'{name} changes the mixed loss of ms, and these flags give none')
        if name == 'shared' and args.strength != STRENGTH or name == 'hardest' and args.pairs in ('anc-neg', 'pos-pos'):
            raise common.UsageError(f'{name} is for --strength {STRENGTH} and pos-neg pairs')
        print(f'To resume after an interruption: {common.shell_command(__file__, name, "--resume", "RUN")}')
        return train_metrix.main(flags)


if __name__ == '__main__':
    common.cli(main)
