"""Trains train_metrix.py with a changed mixed loss of ms: python tests/results/patches.py NAME FLAGS

push    only the negative term of Eq. (15), 1 / gamma log(1 + sum (1 - y) exp(gamma (s - m)))
softer  beta 2, gamma 10 and m 0.3 in the mixed loss; the clean loss keeps 18, 75 and 0.77
"""
import sys
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch.nn.functional as F

import common
import train_metrix


def push(mixed_loss):
    def labelled_loss(s, y, valid, kind, beta, gamma, m):
        exponents = gamma * (s - m) + ((1 - y) * valid).log()                                   # (A, V)
        return F.pad(exponents, (1, 0)).logsumexp(dim=1) / gamma                                # exp(0) is the 1

    def changed(*args):                                     # only here: the clean loss keeps its positive term
        with mock.patch.object(train_metrix, 'labelled_loss', labelled_loss):
            return mixed_loss(*args)
    return changed


def softer(mixed_loss):
    return lambda base, *args: mixed_loss(base._replace(hyper=dict(beta=2.0, gamma=10.0, m=0.3)), *args)


PATCHES = dict(push=push, softer=softer)


def main(argv=None):
    name, *flags = (sys.argv[1:] if argv is None else argv) or ['']
    if name not in PATCHES:
        raise common.UsageError(f'name a patch and then flags of train_metrix.py; patches are {", ".join(PATCHES)}')
    with mock.patch.object(train_metrix, 'mixed_loss', PATCHES[name](train_metrix.mixed_loss)):
        return train_metrix.main(flags)


if __name__ == '__main__':
    common.cli(main)
