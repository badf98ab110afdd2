"""The experiments on the results page, as data. results.py makes their runs and writes their tables.

To add a row, add its command. To add an experiment, add an Experiment. Then run `python tests/results/results.py NAME`.
"""
from typing import NamedTuple


class Experiment(NamedTuple):
    name: str
    about: str              # what the rows have in common, above the table
    rows: dict              # {name: command without python, the shared flags and the repeat}
    repeats: list           # each command is run with each of these flags
    flags: str = ''         # flags of all commands, inserted after the name of the script
    differences: list = []  # (row, row that is subtracted), or (row, row, difference of R@1 that the paper reports)
    columns: tuple = ('R@1 before', 'R@1', 'MAP@R before', 'MAP@R', 's+', 's-')     # keys of results.COLUMNS

    def command(self, row):
        script, _, own = self.rows[row].partition('.py')
        return f'{script}.py' + f' {self.flags}' * bool(self.flags) + own


def seeds(number):
    return [f'--seed {n}' for n in range(number)]


FOLDS = [f'--fold {n}/4' for n in range(4)]
# The first 50 classes of CUB-200-2011 in data/cub50: 25 for training (1,402 photographs), 25 for the test (1,487)
CUB_50 = ('--dataset folder --data data/cub50 --weights data/resnet18.pth --arch resnet18 --image-size 112 --epochs 9 '
          '--freeze-backbone-epochs 1 --eval-every 9')

EXPERIMENTS = [
    Experiment(
        'shapes', 'Each script without flags, one thread per run.',
        {'contrastive': 'train_contrastive.py', 'ms': 'train_ms.py', 'proxy_anchor': 'train_proxy_anchor.py',
         'proxynca_pp': 'train_proxynca_pp.py', 'ccl': 'train_ccl.py', 'metrix': 'train_metrix.py',
         'hse': 'train_hse.py', 'metrix, none': 'train_metrix.py --mixup none'},
        seeds(10), differences=[('metrix', 'metrix, none'), ('hse', 'ms'), ('proxy_anchor', 'ms')]),
    Experiment(
        'birds', 'CUB-50. Each script with its recipe of CUB, but shorter.',
        {'contrastive': 'train_contrastive.py --decay-epochs 5 --lr 3.3e-05',
         'ms': 'train_ms.py --decay-epochs 5 --lr 3e-05',
         'proxy_anchor': 'train_proxy_anchor.py --decay-epochs 5 --lr 3.3e-05',
         'proxynca_pp': 'train_proxynca_pp.py --decay-epochs 5 --lr 0.012',
         'ccl, lam 2': 'train_ccl.py --lr 0.02', 'ccl, lam 0': 'train_ccl.py --lam 0 --lr 0.02'},
        seeds(3), CUB_50,
        [('proxy_anchor', 'ms', 2.7), ('proxy_anchor', 'contrastive'), ('ccl, lam 2', 'ccl, lam 0', 0.7)]),
    Experiment(
        'metrix', "CUB-50. Mixup with each loss; the paper's differences are from Table 5 of Metrix.",
        {f'{loss}, {mixup}': f'train_metrix.py --loss {loss} --mixup {mixup}'
         for loss in ('proxy_anchor', 'ms', 'contrastive', 'proxynca_pp') for mixup in ('none', 'feature', 'embed')
         if (loss, mixup) != ('proxynca_pp', 'embed')},
        seeds(3), f'{CUB_50} --decay-epochs 5 --lr 3.3e-05',
        [('proxy_anchor, feature', 'proxy_anchor, none', 1.5), ('proxy_anchor, embed', 'proxy_anchor, none', 0.9),
         ('ms, feature', 'ms, none', 3.6), ('ms, embed', 'ms, none', 2.4),
         ('contrastive, feature', 'contrastive, none', 2.7), ('contrastive, embed', 'contrastive, none', 1.7),
         ('proxynca_pp, feature', 'proxynca_pp, none', 1.3)]),
    Experiment(
        'hse', "CUB-50. Hybrids with each loss; the paper's differences are from Table 2 of HSE.",
        {f'{loss}, {hybrids}': f'train_hse.py --loss {loss}{alpha}' for loss in ('ms', 'proxy_anchor', 'epshn')
         for hybrids, alpha in (('no hybrids', ' --alpha 0'), ('hybrids', ''))},
        seeds(3), f'{CUB_50} --decay-epochs 5 --lr 3.3e-05',
        [(f'{loss}, hybrids', f'{loss}, no hybrids', paper)
         for loss, paper in (('ms', 1.9), ('proxy_anchor', 1.2), ('epshn', 2.0))]),
    Experiment(
        'push', 'shapes. Which part of the mixed loss of ms costs MAP@R? The changed losses are in patches.py.',
        {'none': 'train_metrix.py --mixup none', 'feature': 'train_metrix.py',
         'push': 'tests/results/patches.py push', 'softer': 'tests/results/patches.py softer'},
        seeds(5), differences=[('feature', 'none'), ('push', 'none'), ('softer', 'none'), ('push', 'feature'),
                               ('softer', 'feature')]),
    Experiment(
        'noise', "shapes, with wrong training labels; the paper's differences are from Table 3 of CCL, with Inception.",
        {'no noise, lam 2': 'train_ccl.py'} | {
            f'{noise}, lam {lam}': f'train_ccl.py --label-noise {noise}{flag}'
            for noise in ('symmetric:0.2', 'longtail:0.25') for lam, flag in ((2, ''), (0, ' --lam 0'))},
        seeds(5), differences=[('symmetric:0.2, lam 2', 'symmetric:0.2, lam 0', 13.0),
                               ('longtail:0.25, lam 2', 'longtail:0.25, lam 0', 12.3),
                               ('symmetric:0.2, lam 2', 'no noise, lam 2'),
                               ('longtail:0.25, lam 2', 'no noise, lam 2')]),
    Experiment(
        'course', 'shapes, on the four folds of the training classes: experiments B, C and D of the course.',
        {'margin 0.2': 'train_contrastive.py --neg-margin 0.2', 'margin 0.5': 'train_contrastive.py --neg-margin 0.5',
         'margin 1': 'train_contrastive.py', 'ms': 'train_ms.py',
         'proxies x 1': 'train_proxy_anchor.py --eval-every 1 --proxy-lr-mult 1',
         'proxies x 10': 'train_proxy_anchor.py --eval-every 1',
         'proxies x 100': 'train_proxy_anchor.py --eval-every 1 --proxy-lr-mult 100'},
        FOLDS, differences=[('margin 0.2', 'margin 1'), ('margin 0.5', 'margin 1'), ('ms', 'margin 1'),
                            ('proxies x 1', 'proxies x 10'), ('proxies x 100', 'proxies x 10')]),
    Experiment(
        'collapse', 'shapes, one fold: experiment E of the course. The recipe has a learning rate of 0.002.',
        {'lr 0.1': 'train_proxy_anchor.py --eval-every 1 --lr 0.1'}, FOLDS[:1]),
    Experiment(
        'speed', 'shapes, evaluated after each epoch: experiment F of the course.',
        {'ms': 'train_ms.py', 'ccl': 'train_ccl.py'}, seeds(3), '--eval-every 1',
        columns=('R@1', 'best R@1', 'best - last')),
    Experiment(
        'species', 'shapes, on the four folds, K images per class, hybrids appended: experiment H of the course.',
        {f'K = {k}, {hybrids}': f'train_hse.py --per-class {k} {flag}' for k in (2, 4, 8)
         for hybrids, flag in (('none', '--alpha 0'), ('appended', '--hybrids append'))},
        FOLDS, differences=[('K = 2, appended', 'K = 2, none'), ('K = 4, appended', 'K = 4, none'),
                            ('K = 8, appended', 'K = 8, none'), ('K = 2, none', 'K = 4, none'),
                            ('K = 8, none', 'K = 4, none')]),
]
