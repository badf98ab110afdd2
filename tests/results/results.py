"""The runs behind the page of results, README.md beside this file, and its tables. Not collected by pytest.

    python tests/results/results.py                  writes the tables of the page from the lines of runs.jsonl
    python tests/results/results.py pilots           makes the runs of this table that runs.jsonl lacks, and prints it
    python tests/results/results.py birds --jobs 2   two runs at a time, each on half of the cores
    python tests/results/results.py birds --jobs 0   only prints
    python tests/results/results.py cub --plan       prints the commands that runs.jsonl lacks, their steps and images
    python tests/results/results.py cub --jobs 4     on a machine with GPUs, each job has the next of them
    python tests/results/results.py cub --add '--steps 3 --arch resnet18'
                                                     a trial: more flags for all commands; lines and tables are written
                                                     to runs/trial.jsonl and runs/trial.md
    python tests/results/results.py --patched push train_metrix.py --mixup feature
                                                     a run whose step is changed: see PATCHES
    python tests/results/results.py --vectors        writes the features that the tables of vectors need

A finished run becomes a line of runs.jsonl, with its commit and its evaluations, of which the first is that of the
network before training; numbers have six digits, and no two lines have the same command. A run that was stopped goes on
at the next start. Its folder in runs/ is named by its command, so an unfinished run whose command is renamed begins
anew. A run that fails is named at the end, and does not stop the others. Once the line is written, the checkpoints in
runs/, of 100 to 150 MB each, may be deleted, but for those of folds in a table of papers, which eval.py joins when all
of a row are there. For a run of your own, add a row to TABLES; for a table of your own, add its place and the text
around it to the page, too; for a claim of a paper, add it to CLAIMS.

The data belong in data/, which git ignores. cub50 holds the first 50 classes of CUB-200-2011. resnet18.pth is the trunk
of torchvision's IMAGENET1K_V1 (its BatchNorm statistics were estimated anew on 600 photographs, none of them from CUB).
omniglot has the folders train, with the alphabets of images_background_small1, and test, with those of small2 that
small1 lacks: Japanese (katakana), Sanskrit and Tagalog. flowers holds Oxford's 102 flowers, the official JPEG files of
each class in a folder from 001 to 102. cifar holds 50 classes of CIFAR-100, 300 images of each class in a folder of its
name. birds, omniglot_vectors and cifar_vectors hold features by that trunk, see store_vectors.
"""
import argparse
import json
import os
import re
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from hashlib import md5
from importlib import import_module
from operator import itemgetter
from pathlib import Path
from queue import Queue
from statistics import mean, variance
from typing import NamedTuple
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import torch.nn.functional as F
import torchvision

import common
import train_metrix
import train_ms
from eval import interval

ROOT = Path(__file__).parents[2]
LINES = Path(__file__).with_name('runs.jsonl')
TRIAL = ROOT / 'runs/trial.jsonl'
PAGE = Path(__file__).with_name('README.md')

# ---- which runs there are


class Table(NamedTuple):
    repeats: list       # flags; each command is run once with each of them
    rows: dict          # {row: command}
    pairs: list         # [(row, row that it is compared with)]
    epochs: tuple = ()  # those whose rows are kept and shown; (): all are kept, and the last one is shown
    paper: dict = {}    # {row: (R@1, or (R@1, RP, MAP@R) of folds, separated and concatenated; where it stands)}
    folds: str = ''     # a table with the same rows on folds, by whose best epoch these runs are shown as well
    measured: bool = False      # whether networks are analysed when their training ends, see `measure`


TWENTY = [f'--seed {n}' for n in range(20)]
SEEDS, FOLDS = TWENTY[:3], [f'--fold {n}/4' for n in range(4)]
CROSSED = [fold + seed for seed in ('', ' --seed 1', ' --seed 2') for fold in FOLDS]     # three seeds on each fold
PHOTOS = '--dataset folder --data data/cub50 --weights data/resnet18.pth --arch resnet18 --image-size 112'
BIRDS = f'{PHOTOS} --epochs 9 --warmup 1 --eval-every 9'
# Schedules by steps decay once in these nine epochs, after epoch 5, by the factor of the recipe.
STEP = BIRDS + ' --decay-epochs 5'
FIRST = {'contrastive': f'train_contrastive.py {STEP}', 'ms': f'train_ms.py {STEP}',
         'proxy_anchor': f'train_proxy_anchor.py {STEP}', 'proxynca_pp': f'train_proxynca_pp.py {STEP}',
         'ccl, lam 2': f'train_ccl.py {BIRDS}', 'ccl, lam 0': f'train_ccl.py {BIRDS} --lam 0',
         'metrix ms, none': f'train_metrix.py {STEP} --loss ms --mixup none',
         'hse ms, no hybrids': f'train_hse.py {STEP} --loss ms --alpha 0'}
RATES = {'contrastive': 1e-4, 'ms': 3e-5, 'proxy_anchor': 1e-4, 'proxynca_pp': 4e-3, 'ccl, lam 2': 0.02,
         'ccl, lam 0': 0.02, 'metrix ms, none': 1e-4, 'hse ms, no hybrids': 1e-4}       # those of the recipes
CHOSEN = {'contrastive': '3.3e-05', 'ms': '3e-05', 'proxy_anchor': '3.3e-05', 'proxynca_pp': '0.012',
          'ccl, lam 2': '0.02', 'ccl, lam 0': '0.02'}                   # by the table 'pilots'
TUNED = {name: f'{FIRST[name]} --lr {CHOSEN[name]}' for name in CHOSEN}
# The pilots of train_metrix.py and train_hse.py have ms without mixing and without hybrids. All their rows take over
# that rate, which is also the one chosen for train_proxy_anchor.py and train_contrastive.py.
FINE, FAST = STEP + ' --lr 3.3e-05', STEP + ' --lr 1e-4'
MIXING = [(loss, mixup) for loss in ('proxy_anchor', 'ms', 'contrastive') for mixup in ('none', 'feature', 'embed')]
MIXING += [('proxynca_pp', 'none'), ('proxynca_pp', 'feature')]
METRIX = {f'{loss}, {mixup}': f'train_metrix.py {FINE} --loss {loss} --mixup {mixup}' for loss, mixup in MIXING}
HSE = {f'{loss}, {what}': f'train_hse.py {FINE} --loss {loss}{flag}' for loss in ('ms', 'proxy_anchor', 'epshn')
       for what, flag in (('alone', ' --alpha 0'), ('hybrids', ''))}
# Losses that have a script of their own, and a row in train_metrix.py
TWICE = ('contrastive', 'ms', 'proxy_anchor', 'proxynca_pp')
SCRATCH = {'alpha 0': 'hse.py --alpha 0', 'alpha 1e-9': 'hse.py --alpha 1e-9',
           'alpha 1e-9, append': 'hse.py --alpha 1e-9 --hybrids append', 'alpha 0.01': 'hse.py --alpha 0.01',
           'alpha 0.02': 'hse.py --alpha 0.02', 'alpha 0.05': 'hse.py --alpha 0.05',
           'alpha 0.05, append': 'hse.py --alpha 0.05 --hybrids append',
           'alpha 0.05, temperature 1': 'hse.py --alpha 0.05 --temperature 1',
           'none': 'metrix.py --mixup none', 'feature': 'metrix.py --mixup feature',
           'none, 16 epochs': 'metrix.py --mixup none --epochs 16',
           'feature, 16 epochs': 'metrix.py --mixup feature --epochs 16',
           'input': 'metrix.py --mixup input', 'input, clean BatchNorm': 'metrix.py --mixup input --clean-bn'}
# --eval-every 2 only adds rows to the log. It keeps these commands apart from those of 'scratch', which were run at an
# earlier commit.
NONE, FEATURE, INPUT = (f'train_metrix.py --eval-every 2 --mixup {mixup}' for mixup in ('none', 'feature', 'input'))
BOTH, SOFT = {'none': NONE, 'feature': FEATURE}, ' --beta 2 --gamma 10 --m 0.5'
SEARCH = ['18:75:0.3', '2:50:0.5', '2:10:0.3', '2:10:0.7', '5:25:0.5']
LONG = f'{PHOTOS} --epochs 60 --warmup 3 --eval-every 4 --decay-epochs 6'
SHORTER = f'{PHOTOS} --epochs 36 --warmup 3 --eval-every 4 --decay-epochs 3'
# Evaluated thrice, so that these commands differ from those of 'metrix', which were run at an earlier commit
AGAIN = (f'train_metrix.py {PHOTOS} --epochs 9 --warmup 1 --eval-every 3 --decay-epochs 5 --lr 3.3e-05 --loss ms '
         '--mixup')
FLOWERS = ('train_metrix.py --dataset folder --data data/flowers --weights data/resnet18.pth --arch resnet18 '
           '--image-size 96 --epochs 4 --warmup 1 --eval-every 4 --decay-epochs 2 --lr 3.3e-5 --mixup')
SCRIPTS = ['contrastive', 'ms', 'proxy_anchor', 'proxynca_pp', 'ccl', 'metrix', 'hse']


COURSE = {'margin 0.2': 'contrastive.py --neg-margin 0.2', 'margin 0.5': 'contrastive.py',
          'margin 1': 'contrastive.py --neg-margin 1', 'ms': 'ms.py',
          'proxies x 1': 'proxy_anchor.py --proxy-lr-mult 1', 'proxies x 10': 'proxy_anchor.py',
          'proxies x 100': 'proxy_anchor.py --proxy-lr-mult 100', 'lr 0.1': 'proxy_anchor.py --lr 0.1'}


# One step that changes nothing, with BatchNorm as it begins
UNTRAINED = '--steps 1 --lr 1e-30 --freeze-bn'
# As in 'metrix', but for an evaluation after epoch 4, which keeps these commands apart
MEASURED = f'{PHOTOS} --epochs 9 --warmup 1 --eval-every 4 --decay-epochs 5 --lr 3.3e-05'
SPACE = [('contrastive', mixup) for mixup in ('none', 'feature', 'embed')]
SPACE += [('ms', mixup) for mixup in ('none', 'feature')]
BATCHES = (30, 60, 120, 180)                              # 180 has 7 steps in an epoch
CONSTANT = ('--dataset folder --data data/cub50 --weights data/resnet18.pth --arch resnet18 --image-size 96 '
            '--epochs 16 --warmup 1 --eval-every 2 --schedule constant --lr 3e-4 --loss proxy_anchor')


# An epoch of these birds has 14 steps. So these are about 25, 50, 100, 200, 300, 600 and 1,000 steps.
KEPT = (0, 2, 4, 7, 14, 21, 43, 71)
STORED = '--dataset vectors --data data/birds'
# {folder of stored vectors: folder of the images that they are made of}, both in data/
IMAGES_OF = dict(birds='cub50', omniglot_vectors='omniglot', cifar_vectors='cifar')
MIXED = [(loss, mixup) for loss in ('proxy_anchor', 'ms', 'contrastive', 'proxynca_pp')
         for mixup in ('none', 'feature', 'embed')]
ON_VECTORS = {f'{loss}, {mixup}': f'train_metrix.py {STORED} --epochs 71 --loss {loss} --mixup {mixup}'
              for loss, mixup in MIXED}
POS_NEG = ON_VECTORS['proxy_anchor, embed'] + ' --pairs pos-neg'
OTHER_BRAKES = {f'{loss}, {flag}': f'train_metrix.py {STORED} --epochs 71 --loss {loss} --mixup none --{flag}'
                for loss in ('proxy_anchor', 'ms')
                for flag in ('weight-decay 0', 'weight-decay 1e-2', 'weight-decay 1', 'dim 64', 'dim 128', 'lr 3e-4')}


# ---- the papers' tables: {row: (command, R@1 on CUB, R@1 on Cars, where they stand)}. Networks are ResNets here; where
# the paper has BN-Inception, the row says so.

BN = ', with BN-Inception'
RECIPES = {'contrastive': ('train_contrastive.py', 64.7, 81.6, 'Metrix, Table 5'),
           'ms': ('train_ms.py', 65.7, 84.1, 'Multi-Similarity' + BN),
           'proxy_anchor': ('train_proxy_anchor.py', 69.7, 87.7, 'Proxy-Anchor, Table 7'),
           'proxynca_pp': ('train_proxynca_pp.py', 69.0, 86.5, 'ProxyNCA++, 512 dimensions'),
           'ccl': ('train_ccl.py', 71.8, 89.6, 'CCL, Table 2'),
           'metrix': ('train_metrix.py', 71.4, 89.6, 'Metrix, Table 2'),
           'hse': ('train_hse.py', 67.6, 82.0, 'HSE, Table 2' + BN)}
# R@1 on CUB and on Cars in Table 5 of Metrix: without mixing, with input, feature and embedding mixing
TABLE_5 = {'contrastive': ((64.7, 66.3, 67.4, 66.4), (81.6, 82.9, 85.1, 83.9)),
           'ms': ((67.8, 69.0, 71.4, 70.2), (87.8, 89.0, 89.6, 88.8)),
           'proxy_anchor': ((69.5, 70.5, 71.0, 70.4), (87.6, 88.2, 89.1, 88.9)),
           'proxynca_pp': ((69.1, 69.7, 70.4, 70.2), (86.6, 87.5, 88.5, 88.1))}
IN_TABLE_5 = {f'{loss}, {mixup}': (f'train_metrix.py --loss {loss} --mixup {mixup}', cub, cars, 'Metrix, Table 5')
              for loss, columns in TABLE_5.items()
              for mixup, cub, cars in zip(('none', 'input', 'feature', 'embed'), *columns)}
IN_HSE = {'npair, alone': ('train_hse.py --loss npair --alpha 0', 51.3, 64.2, 'HSE, Table 2'),
          'npair, hybrids': ('train_hse.py --loss npair', 52.5, 64.9, 'HSE, Table 2'),
          'epshn, alone': ('train_hse.py --loss epshn --alpha 0', 64.9, 83.1, 'HSE, Table 2, 16 images a class'),
          'epshn, hybrids': ('train_hse.py --loss epshn', 67.4, 84.8, 'HSE, Table 2'),
          'ms, alone': ('train_hse.py --loss ms --alpha 0', 65.7, 81.7, 'HSE, Table 2' + BN),
          'ms, hybrids': ('train_hse.py --loss ms', 67.6, 82.0, 'HSE, Table 2' + BN),
          'proxy_anchor, alone': ('train_hse.py --loss proxy_anchor --alpha 0', 69.4, 88.5, 'HSE, Table 2'),
          'proxy_anchor, hybrids': ('train_hse.py --loss proxy_anchor', 70.6, 89.6, 'HSE, Table 2')}
# Table 4 of the Reality Check: R@1, RP and MAP@R, separated and then concatenated; flags of the released results
TABLE_4 = {'contrastive': ('contrastive.py --pos-margin -0.2 --neg-margin 0.3841',
                           (59.73, 31.98, 21.18), (68.13, 37.24, 26.53)),
           'ms': ('ms.py --alpha 0.01 --beta 50.60 --lam 0.56 --epsilon off',
                  (57.60, 30.84, 20.15), (65.04, 35.40, 24.70)),
           'ms, miner': ('ms.py --alpha 17.97 --beta 75.66 --lam 0.77 --epsilon 0.39',
                         (59.41, 31.93, 21.01), (67.73, 37.37, 26.52)),
           'proxynca': ('proxynca_pp.py --loss proxynca_pp --temperature 0.0715',
                        (57.88, 30.16, 19.32), (65.69, 35.14, 24.21)),
           'normalised softmax': ('ccl.py --lam 0 --smoothing 0', (58.75, 31.75, 20.96), (65.65, 35.99, 25.25))}


def on_benchmark(rows, dataset):
    """Three seeds of rows (command, R@1 on CUB, R@1 on Cars, where they stand)"""
    column = dict(cub=1, cars=2)[dataset]
    return Table(SEEDS, {name: f'{row[0]} --dataset {dataset}' for name, row in rows.items()}, [],
                 paper={name: (row[column], row[3]) for name, row in rows.items()})


def other_vectors(name, epochs, kept):
    """Proxy-Anchor with and without mixing, and at a lower rate, on features of other images than birds"""
    rows = {flags: f'train_metrix.py --dataset vectors --data data/{name}_vectors --epochs {epochs} '
                   f'--loss proxy_anchor --mixup {flags}' for flags in ('none', 'feature', 'embed', 'none --lr 3e-4')}
    return Table(TWENTY[:8], rows, against(rows, 'none'), kept)


def patched(name, command=FEATURE):
    return f'tests/results/results.py --patched {name} {command}'


def against(rows, *bases):
    """Each row compared with each base"""
    return [(row, base) for base in bases for row in rows if row not in bases]


def finished():
    """{command: its line}"""
    return parsed(LINES.read_text())


@lru_cache(maxsize=1)
def parsed(text):
    """{command: its line}; kept, because each table and each claim asks for all lines"""
    return {line['command']: line for line in map(json.loads, text.splitlines())}


def trials(script):
    """{trial: command} of the runs that search.py made for a script, in their order; it writes flags with ="""
    own = [command for command in finished() if command.startswith(f'{script} ') and '=' in command]
    return {f'trial {n}': command for n, command in enumerate(dict.fromkeys(c.split(' --fold')[0] for c in own))}


SOFTER = {f'softer:{what}': patched(f'softer:{what}') for what in ['2:10:0.5', *SEARCH]}
TERM = {'push': patched('push'), 'contrast:0.5': patched('contrast:0.5'), 'strength 0.05': FEATURE + ' --strength 0.05'}
SEEDED = {name: (TERM | SOFTER)[name] for name in ('push', 'softer:2:10:0.3', 'contrast:0.5')}
HYBRIDS = {'alpha 0': '--alpha 0', 'alpha 0.05': '--alpha 0.05', 'alpha 0.05, append': '--alpha 0.05 --hybrids append'}
NOISY = {f'{noise}, lam {lam}': f'train_ccl.py --label-noise {noise} --lam {lam}'
         for noise in ('none', 'symmetric:0.2', 'longtail:0.25') for lam in (0, 2)}
MINED = {'mined': patched('mined'), 'embed': 'train_metrix.py --eval-every 2 --mixup embed',
         'released': patched('released', 'train_metrix.py --eval-every 2 --mixup embed --strength 1')}
TABLES = {
    'pilots': Table(['--seed 0'], {f'{name}, lr {rate:.2g}': f'{FIRST[name]} --fold 0/4 --lr {rate:.2g}'
                                   for name in FIRST for rate in (RATES[name] / 3, RATES[name], RATES[name] * 3)}, []),
    'birds': Table(SEEDS, TUNED, against(TUNED, 'contrastive') + [('ccl, lam 2', 'ccl, lam 0')]),
    'recipes': Table(SEEDS, {name: TUNED[name] for name in TWICE}
                     | {f'{name}, as in train_metrix.py': METRIX[f'{name}, none'] for name in TWICE},
                     [(f'{name}, as in train_metrix.py', name) for name in TWICE]
                     + against([f'{name}, as in train_metrix.py' for name in TWICE], 'ms, as in train_metrix.py')),
    'metrix': Table(SEEDS, METRIX,
                    [(f'{loss}, {mixup}', f'{loss}, none') for loss, mixup in MIXING if mixup != 'none']),
    'fast': Table(SEEDS, {f'proxy_anchor, {mixup}': f'train_metrix.py {FAST} --loss proxy_anchor --mixup {mixup}'
                          for mixup in ('none', 'feature')}, [('proxy_anchor, feature', 'proxy_anchor, none')]),
    'hse': Table(SEEDS, HSE, [(f'{loss}, hybrids', f'{loss}, alone') for loss in ('ms', 'proxy_anchor', 'epshn')]),
    'shapes': Table(SEEDS, {name: f'train_{name}.py' for name in SCRIPTS}
                    | {'metrix, none': 'train_metrix.py --mixup none', 'hse, none': 'train_hse.py --alpha 0'},
                    [('metrix', 'metrix, none'), ('hse', 'hse, none')]),
    'speed': Table(SEEDS, {name: f'train_{name}.py --eval-every 1' for name in SCRIPTS},
                   [('ccl', 'metrix'), ('proxy_anchor', 'ms')]),
    'course': Table(FOLDS, {row: f'train_{flags}' for row, flags in COURSE.items()},
                    [('margin 0.2', 'margin 0.5'), ('margin 1', 'margin 0.5'), ('ms', 'margin 0.5'),
                     ('proxies x 1', 'proxies x 10'), ('proxies x 100', 'proxies x 10'), ('lr 0.1', 'proxies x 10')]),
    'omniglot': Table(SEEDS, {name: f'train_{name}.py --dataset folder --data data/omniglot' for name in SCRIPTS}, []),
    'scratch': Table(FOLDS, {name: f'train_{flags}' for name, flags in SCRATCH.items()},
                     against([name for name in SCRATCH if name.startswith('alpha ')], 'alpha 0')
                     + [('alpha 1e-9, append', 'alpha 1e-9'), ('alpha 0.05, append', 'alpha 1e-9, append'),
                        ('alpha 0.05, append', 'alpha 0.05'), ('alpha 0.05', 'alpha 1e-9'),
                        ('alpha 0.05, temperature 1', 'alpha 0.05')]
                     + against(('feature', 'input', 'input, clean BatchNorm'), 'none')
                     + [('input, clean BatchNorm', 'input'), ('feature, 16 epochs', 'none, 16 epochs')]),
    'term': Table(FOLDS, BOTH | TERM, against(TERM, 'none', 'feature')),
    'push': Table(CROSSED, BOTH | SEEDED,
                  against(('feature', *SEEDED), 'none') + against(SEEDED, 'feature')),
    'again': Table(SEEDS, {'none': f'{AGAIN} none', 'feature': f'{AGAIN} feature',
                           'push': patched('push', f'{AGAIN} feature')},
                   [('feature', 'none'), ('push', 'none'), ('push', 'feature')]),
    'flowers': Table(SEEDS, {'none': f'{FLOWERS} none', 'feature': f'{FLOWERS} feature',
                             'push': patched('push', f'{FLOWERS} feature')},
                     [('feature', 'none'), ('push', 'none'), ('push', 'feature')]),
    'soft': Table(FOLDS, {'none': NONE + SOFT, 'feature': FEATURE + SOFT}, [('feature', 'none')]),
    'search': Table(FOLDS, BOTH | SOFTER, [('feature', 'none'), *against(SOFTER, 'none', 'feature')]),
    'pairs': Table(FOLDS, BOTH | MINED, against(MINED, 'none', 'feature')),
    'tuned': Table(FOLDS, {'defaults': 'train_ms.py --epochs 4 --eval-every 4'} | trials('train_ms.py'),
                   [('trial 4', 'defaults')]),
    'input': Table(FOLDS, {'none': NONE, 'input': INPUT, 'push': patched('push', INPUT)},
                   [('input', 'none'), ('push', 'none'), ('push', 'input')]),
    'hybrids': Table(FOLDS, {row: f'train_hse.py --epochs 16 {flags}' for row, flags in HYBRIDS.items()},
                     [*against(HYBRIDS, 'alpha 0'), ('alpha 0.05, append', 'alpha 0.05')]),
    'noise': Table(CROSSED, NOISY, [(row, row.replace('lam 2', 'lam 0')) for row in NOISY if 'lam 2' in row]),
    'centres': Table(FOLDS, {f'lam {lam}': f'train_ccl.py --epochs 60 --eval-every 10 --lam {lam}' for lam in (0, 2)},
                     [('lam 2', 'lam 0')]),
    'untrained': Table(SEEDS, {'shapes': f'train_ms.py {UNTRAINED}',
                               'omniglot': f'train_ms.py --dataset folder --data data/omniglot {UNTRAINED}'}, [],
                       measured=True),
    'space': Table(SEEDS, {f'{loss}, {mixup}': f'train_metrix.py {MEASURED} --loss {loss} --mixup {mixup}'
                           for loss, mixup in SPACE},
                   [(f'{loss}, {mixup}', f'{loss}, none') for loss, mixup in SPACE if mixup != 'none'], measured=True),
    'positivity': Table(SEEDS, {f'epoch {n}': f'train_metrix.py {PHOTOS} --mixup embed --epochs {n}' for n in (0, 1)},
                        [], measured=True),
    'vector_space': Table(TWENTY[:4], {f'{loss}, {mixup}': f'train_metrix.py {STORED} --epochs 14 --eval-every 14 '
                                                       f'--loss {loss} --mixup {mixup}'
                                   for loss in ('contrastive', 'ms') for mixup in ('none', 'feature')},
                          [(f'{loss}, feature', f'{loss}, none') for loss in ('contrastive', 'ms')], measured=True),
    'batches': Table(TWENTY, {f'batch {size}': f'train_proxy_anchor.py {STORED} --per-class 0 --batch-size {size} '
                                               '--epochs 16 --eval-every 16 --steps 90' for size in BATCHES},
                     [(f'batch {size}', 'batch 30') for size in BATCHES[1:]]),
    'batch_epochs': Table(TWENTY, {f'batch {size}': f'train_proxy_anchor.py {STORED} --per-class 0 --batch-size {size} '
                                                    '--epochs 4 --eval-every 4' for size in BATCHES},
                          [(f'batch {size}', 'batch 30') for size in BATCHES[1:]]),
    'species': Table(FOLDS, {f'K = {k}, {what}': f'train_hse.py --per-class {k} {flags}' for k in (2, 4, 8)
                             for what, flags in (('none', '--alpha 0'), ('appended', '--hybrids append'))},
                     [(f'K = {k}, appended', f'K = {k}, none') for k in (2, 4, 8)]
                     + [(f'K = {k}, none', 'K = 4, none') for k in (2, 8)]),
    'constant': Table(SEEDS, {mixup: f'train_metrix.py {CONSTANT} --mixup {mixup}'
                              for mixup in ('none', 'feature')},
                      [('feature', 'none')], (0, 2, 4, 6, 8, 10, 12, 14, 16)),
    'long': Table(SEEDS, {f'ms, {mixup}': f'train_metrix.py {LONG} --mixup {mixup}' for mixup in ('none', 'feature')}
                  | {f'proxy_anchor, {mixup}': f'train_metrix.py {LONG} --loss proxy_anchor --mixup {mixup}'
                     for mixup in ('none', 'feature')}
                  | {'ms, push': patched('push', f'train_metrix.py {LONG} --mixup feature'),
                     'ms, none, 36 epochs': f'train_metrix.py {SHORTER} --mixup none'},
                  [('ms, feature', 'ms, none'), ('ms, push', 'ms, none'), ('ms, push', 'ms, feature'),
                   ('ms, none, 36 epochs', 'ms, none'), ('proxy_anchor, feature', 'proxy_anchor, none')]),
    'vectors': Table(TWENTY, ON_VECTORS | {'proxy_anchor, embed, pos-neg': POS_NEG},
                     [(f'{loss}, {mixup}', f'{loss}, none') for loss, mixup in MIXED if mixup != 'none']
                     + [('proxy_anchor, embed, pos-neg', 'proxy_anchor, feature')], KEPT, folds='vector_folds'),
    'vector_folds': Table(FOLDS, {f'{loss}, {mixup}': f'train_metrix.py {STORED} --epochs 20 --patience 20 '
                                                      f'--loss {loss} --mixup {mixup}' for loss, mixup in MIXED}, [],
                          (0, 1, 2, 3, 4, 5, 6, 8, 10, 12, 14, 17, 20)),
    'omniglot_vectors': other_vectors('omniglot', 37, (0, 1, 2, 4, 8, 11, 22, 37)),
    'cifar_vectors': other_vectors('cifar', 13, (0, 1, 2, 3, 4, 8, 13)),
    'brakes': Table(TWENTY, {f'{loss}, none': ON_VECTORS[f'{loss}, none'] for loss in ('proxy_anchor', 'ms')}
                    | OTHER_BRAKES, [(row, f'{row.split(",")[0]}, none') for row in OTHER_BRAKES], KEPT),
    'vector_terms': Table(TWENTY, {'ms, none': ON_VECTORS['ms, none'], 'ms, feature': ON_VECTORS['ms, feature'],
                                   'ms, push': patched('push', ON_VECTORS['ms, feature']),
                                   'ms, softer': patched('softer:2:10:0.3', ON_VECTORS['ms, feature'])},
                          [('ms, feature', 'ms, none'), ('ms, push', 'ms, none'), ('ms, softer', 'ms, none'),
                           ('ms, push', 'ms, feature')], KEPT),
    'cub': on_benchmark(RECIPES, 'cub'), 'cars': on_benchmark(RECIPES, 'cars'),
    'metrix-cub': on_benchmark(IN_TABLE_5, 'cub'), 'metrix-cars': on_benchmark(IN_TABLE_5, 'cars'),
    'hse-cub': on_benchmark(IN_HSE, 'cub'),
    'reality-check-cub': Table(FOLDS, {name: f'train_{row[0]} --dataset cub --protocol reality-check'
                                       for name, row in TABLE_4.items()}, [],
                               paper={name: (row[1:], 'Reality Check, Table 4' + BN)
                                      for name, row in TABLE_4.items()}),
}


# ---- what the papers claim


class Claim(NamedTuple):
    text: str
    where: str          # where the paper says so
    paper: str          # its difference; '> 0' or '< 0' where it has no number, or one on another scale
    table: str          # of TABLES: where both rows stand
    row: str
    base: str           # the row that is subtracted; '' if the quantity is a difference already
    quantity: str = 'R@1'
    verdict: str = ''   # in place of the rule's, where the comparison is no test of the claim


def mixing_helps(how, gain, table, row, base, quantity='R@1'):
    # The table prints 1.3 for Proxy-Anchor with features: over 69.7, which is quoted, and not over its own 69.5.
    where = 'Metrix, Table 5' + (', which prints 1.3' if gain == '1.5' else '')
    return Claim(f'mixing raises R@1: {how}', where, gain, table, row, base, quantity)


FIG_2 = 'Metrix, Section A.2, at epoch 0'
CLAIMS = [
    mixing_helps('ms, features', '3.6', 'metrix', 'ms, feature', 'ms, none'),
    mixing_helps('ms, features, the same seeds on another machine', '3.6', 'again', 'feature', 'none'),
    mixing_helps('ms, features, 60 epochs', '3.6', 'long', 'ms, feature', 'ms, none'),
    mixing_helps('ms, features, photographs of flowers', '3.6', 'flowers', 'feature', 'none'),
    mixing_helps('ms, features, shapes', '3.6', 'push', 'feature', 'none'),
    mixing_helps('ms, features, a head stopped by folds', '3.6', 'vectors', 'ms, feature', 'ms, none',
                 'R@1 stopped by folds'),
    mixing_helps('ms, features, a head trained far too long', '3.6', 'vectors', 'ms, feature', 'ms, none'),
    mixing_helps('ms, embeddings', '2.4', 'metrix', 'ms, embed', 'ms, none'),
    mixing_helps('Proxy-Anchor, features', '1.5', 'metrix', 'proxy_anchor, feature', 'proxy_anchor, none'),
    mixing_helps('Proxy-Anchor, features, 60 epochs', '1.5', 'long', 'proxy_anchor, feature', 'proxy_anchor, none'),
    mixing_helps('Proxy-Anchor, features, the rate of the recipe', '1.5', 'fast', 'proxy_anchor, feature',
                 'proxy_anchor, none'),
    mixing_helps('Proxy-Anchor, features, a high rate without decay', '1.5', 'constant', 'feature', 'none'),
    mixing_helps('Proxy-Anchor, features, a head stopped by folds', '1.5', 'vectors', 'proxy_anchor, feature',
                 'proxy_anchor, none', 'R@1 stopped by folds'),
    mixing_helps('Proxy-Anchor, features, a head trained far too long', '1.5', 'vectors', 'proxy_anchor, feature',
                 'proxy_anchor, none'),
    mixing_helps('Proxy-Anchor, features, a head on ImageNet features of handwriting', '1.5', 'omniglot_vectors',
                 'feature', 'none'),
    mixing_helps('Proxy-Anchor, features, a head on ImageNet features of CIFAR-100', '1.5', 'cifar_vectors',
                 'feature', 'none'),
    mixing_helps('contrastive, features', '2.7', 'metrix', 'contrastive, feature', 'contrastive, none'),
    mixing_helps('ProxyNCA++, features, mixtures as queries', '1.3', 'metrix', 'proxynca_pp, feature',
                 'proxynca_pp, none'),
    Claim('mixed features are better than mixed embeddings: ms', 'Metrix, Table 5', '1.2', 'metrix', 'ms, feature',
          'ms, embed'),
    Claim('mixed features are better than mixed embeddings: Proxy-Anchor', 'Metrix, Table 5', '0.6', 'metrix',
          'proxy_anchor, feature', 'proxy_anchor, embed'),
    Claim('mixed features are better than mixed embeddings: contrastive', 'Metrix, Table 5', '1.0', 'metrix',
          'contrastive, feature', 'contrastive, embed'),
    Claim('with mixing, ms is better than Proxy-Anchor', 'Metrix, Table 5', '0.4', 'metrix', 'ms, feature',
          'proxy_anchor, feature'),
    Claim('mixed embeddings bring images of a class closer together: contrastive', 'Metrix, Section 4.3', '< 0',
          'space', 'contrastive, embed', 'contrastive, none', 'alignment'),
    Claim('mixed embeddings spread embeddings more evenly: contrastive', 'Metrix, Section 4.3', '< 0', 'space',
          'contrastive, embed', 'contrastive, none', 'uniformity'),
    Claim('test images are closer to the examples of a training with mixtures: contrastive', 'Metrix, Section 4.3',
          '-0.09', 'space', 'contrastive, feature', 'contrastive, none', 'utilization by all examples',
          'by construction'),
    Claim('a mixture that is 50 to 60 % positive mostly acts as a positive: ms', 'Metrix, Section A.2', '> 0', 'space',
          'ms, feature', '', 'P(Pos) - 0.5'),
    Claim('the two curves of Fig. 2 are less than 0.1 apart: ms, before training', FIG_2, '< 0', 'positivity',
          'epoch 0', '', 'distance of the curves - 0.1'),
    Claim('the two curves of Fig. 2 are less than 0.1 apart: ms, when the head has trained for an epoch', FIG_2, '< 0',
          'positivity', 'epoch 1', '', 'distance of the curves - 0.1'),
    Claim('the two curves of Fig. 2 are less than 0.1 apart: ms, after nine epochs', FIG_2, '< 0', 'space',
          'ms, feature', '', 'distance of the curves - 0.1'),
    Claim('hybrids raise R@1: ms', 'HSE, Table 2', '1.9', 'hse', 'ms, hybrids', 'ms, alone'),
    Claim('hybrids raise R@1: ms, shapes, 16 epochs', 'HSE, Table 2', '1.9', 'hybrids', 'alpha 0.05', 'alpha 0'),
    Claim('hybrids raise R@1: ms, shapes, 4 images per class, appended', 'HSE, Section 4.2.2, a ResNet-18', '> 0',
          'species', 'K = 4, appended', 'K = 4, none'),
    Claim('hybrids raise R@1: ms, shapes, 8 images per class, appended', 'HSE, Section 4.2.2, a ResNet-18', '> 0',
          'species', 'K = 8, appended', 'K = 8, none'),
    Claim('hybrids raise R@1: Proxy-Anchor', 'HSE, Table 2', '1.2', 'hse', 'proxy_anchor, hybrids',
          'proxy_anchor, alone'),
    Claim('hybrids raise R@1: EPSHN', 'HSE, Table 2', '2.0', 'hse', 'epshn, hybrids', 'epshn, alone'),
    Claim("CCL's centre term raises R@1", 'CCL, Table 2', '0.7', 'birds', 'ccl, lam 2', 'ccl, lam 0'),
    Claim("CCL's centre term raises R@1: shapes, 20 % of the labels wrong", 'CCL, Table 3, Inception', '13.0',
          'noise', 'symmetric:0.2, lam 2', 'symmetric:0.2, lam 0'),
    Claim("CCL's centre term raises R@1: shapes, classes of 25 % of the images split up", 'CCL, Table 3, Inception',
          '12.3', 'noise', 'longtail:0.25, lam 2', 'longtail:0.25, lam 0'),
    Claim('CCL learns faster than Metrix: shapes, Metrix with ms', 'CCL, Fig. 1', '> 0', 'speed', 'ccl', 'metrix',
          'R@1 after epoch 2'),
    Claim('Proxy-Anchor is better than ms', 'Proxy-Anchor, Table 2', '2.7', 'birds', 'proxy_anchor', 'ms'),
    Claim('Proxy-Anchor is better than ms: both with the recipe of Metrix', 'Proxy-Anchor, Table 2', '2.7', 'recipes',
          'proxy_anchor, as in train_metrix.py', 'ms, as in train_metrix.py'),
    Claim('Proxy-Anchor is better than ms: shapes', 'Proxy-Anchor, Table 2', '2.7', 'shapes', 'proxy_anchor', 'ms'),
    Claim('Proxy-Anchor is better than ms: Omniglot', 'Proxy-Anchor, Table 2', '2.7', 'omniglot', 'proxy_anchor', 'ms'),
    Claim('Proxy-Anchor learns faster than ms: shapes', 'Proxy-Anchor, Fig. 1, on Cars', '> 0', 'speed', 'proxy_anchor',
          'ms', 'R@1 after epoch 2'),
    Claim('batches of 120 are better than of 30: a head, as many epochs', 'Proxy-Anchor, Table 5', '2.6',
          'batch_epochs', 'batch 120', 'batch 30'),
    Claim('batches of 120 are better than of 30: a head, as many steps', 'Proxy-Anchor, Table 5', '2.6', 'batches',
          'batch 120', 'batch 30', verdict='another question'),
]


# ---- runs whose step is changed. A patch returns the functions of train_metrix.py that it replaces, by their names.


def with_kind(kind, **hyper):
    """mixed_loss with a kind and hyper-parameters of its own; the clean loss keeps those of the flags"""
    real = train_metrix.mixed_loss
    return dict(mixed_loss=lambda _kind, _hyper, *args, **kwargs: real(kind, hyper, *args, **kwargs))


def softer(beta, gamma, m):
    """`mixed_loss('ms', dict(beta=..., gamma=..., m=...), ...)`: the clean loss keeps 18, 75 and 0.77"""
    return with_kind('ms', beta=beta, gamma=gamma, m=m)


def contrast(m):
    """`mixed_loss('contrastive', dict(m=0.5), ...)`: the mixed loss is contrastive, the clean one is ms"""
    return with_kind('contrastive', m=m)


def push():
    """`1 / gamma log(1 + sum (1 - y) exp(gamma (s - m)))`: mixtures only push, without the term that pulls"""
    real = train_metrix.mixed_loss

    def labelled_loss(s, y, valid, kind, beta, gamma, m):
        exponents = gamma * (s - m) + ((1 - y) * valid).log()                                   # (A, V)
        return F.pad(exponents, (1, 0)).logsumexp(dim=1) / gamma                                # exp(0) is the 1

    def mixed_loss(*args, **kwargs):                        # the clean loss keeps its pull
        with mock.patch.object(train_metrix, 'labelled_loss', labelled_loss):
            return real(*args, **kwargs)
    return dict(mixed_loss=mixed_loss)


def mined():
    """`valid & mined`: what is mixed for an anchor are a positive and a negative that the miner keeps (epsilon 0.39)"""
    real, real_mixtures = train_metrix.mixed_loss, train_metrix.label_mixtures

    def mixed_loss(kind, hyper, mixing, model, images, f, z, y, **kwargs):
        kept, negatives_kept = train_ms.mine(z @ z.T, y, 0.39)                                  # (B, B)

        def label_mixtures(pairs, y, i, j, lam, anchor, anchor_y, negatives):
            pair_y, valid = real_mixtures(pairs, y, i, j, lam, anchor, anchor_y, negatives & negatives_kept)
            positive_end = torch.where(y[i] == anchor_y[:, None], i, j)                         # (A, M)
            return pair_y, valid & (kept.gather(1, positive_end) | (positive_end == anchor[:, None]))
        with mock.patch.object(train_metrix, 'label_mixtures', label_mixtures):
            return real(kind, hyper, mixing, model, images, f, z, y, **kwargs)
    return dict(mixed_loss=mixed_loss)


def released():
    """The loss of the code released for ms with embedding mixing (github.com/billpsomas/metrix, b679703), in place of
    both terms: mixtures only pull, and a mask meets wrong pairs, see `released_loss`"""
    def mixed_loss(kind, hyper, mixing, model, images, f, z, y):
        lam = torch.distributions.Beta(mixing.alpha, mixing.alpha).sample().item()              # one for the batch
        return released_loss(z.float(), y, lam, **hyper)
    return dict(mixed_loss=mixed_loss, clean_loss=lambda *args, **kwargs: 0)


def released_loss(z, y, lam, beta, gamma, m, epsilon=0.39):
    """What the code that was released for ms computes of unit embeddings z (B, D) with classes y (B,)

    Anchor a keeps the positives P(a) and negatives N(a) of the miner. For each of its positives and each n of N(a)
    there is a row (a, p, n), but p is always the least similar of P(a). Row r has the mixture v = unit(lam p + (1 -
    lam) n). In the clean sums, lam and 1 - lam also multiply the 1 of log(1 + ...). Mixtures are positives only.
    A mask of pairs (a, p), which are indices of images, is used on the table of all rows against all mixtures. So an
    image a stands for row a, which has another anchor, and an image p for the mixture of row p, and only the first B
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


PATCHES = {patch.__name__: patch for patch in (softer, contrast, push, mined, released)}


def run_patched(name, script, *words):
    """Runs train_metrix.py with flags, as PATCHES[name] changes it; `softer:2:10:0.5` gives a patch its numbers."""
    name, *numbers = name.split(':')
    if script != 'train_metrix.py' or name not in PATCHES:
        raise SystemExit(f'error: patches are of train_metrix.py, and are {", ".join(PATCHES)}')
    for function, replacement in PATCHES[name](*map(float, numbers)).items():
        setattr(train_metrix, function, replacement)
    common.cli(lambda: train_metrix.main(list(words)))


# ---- making them


def store_vectors():
    """Writes pooled features (N, 512) of the images that are there, by data/resnet18.pth, crops of 128 px"""
    model = common.Embedder('resnet18', weights=ROOT / 'data/resnet18.pth', pool='avg')
    model.head = model.pool_features
    for name, folder in IMAGES_OF.items():
        if (ROOT / 'data' / folder).exists():
            data = common.load_dataset('folder', ROOT / 'data' / folder, resize=146, image_size=128)
            common.save_vectors(ROOT / 'data' / name, data, common.embed(model, data.train),
                                common.embed(model, data.query))


def six_digits(rows):
    return [{key: float(f'{value:.6g}') if isinstance(value, float) else value for key, value in row.items()}
            for row in rows]


def name_of(command):
    return 'results-' + md5(command.encode()).hexdigest()[:8]


def run(command, table, threads, gpus):
    """Makes one run of a table, and writes its line -> whether it succeeded

    gpus  a queue of the numbers of the GPUs that are free; each run takes one
    """
    name = name_of(command)
    folder = ROOT / 'runs' / name
    words = command.split() + (['--resume', f'runs/{name}'] if (folder / 'last.pt').exists() else ['--name', name])
    gpu = gpus.get()
    environment = dict(OMP_NUM_THREADS=str(threads)) | ({} if gpu is None else dict(CUDA_VISIBLE_DEVICES=str(gpu)))
    done = start(words, **environment)
    measures = {}
    if table.measured and not done.returncode:
        done, measures = measure(done, f'runs/{name}/last.pt', 'train_metrix.py' in command, environment)
    gpus.put(gpu)
    if done.returncode:
        print(f'{command}\n{done.stdout[-1000:]}', flush=True)
        return False
    rows = [json.loads(line) for line in (folder / 'log.jsonl').read_text().splitlines()]
    if table.epochs:
        rows = [{key: row[key] for key in ('epoch', 'R@1', 'MAP@R', 's+', 's-', 'minutes')}
                for row in rows if row['epoch'] in table.epochs]
    if measures:
        rows[-1] |= measures
    machine = torch.cuda.get_device_name() if torch.cuda.is_available() else (
        f'{threads} of {os.cpu_count()} cores, {torch.backends.cpu.get_cpu_capability()}')
    commit = subprocess.run(['git', 'rev-parse', '--short', 'HEAD'], cwd=ROOT, capture_output=True, text=True).stdout
    line = dict(command=command, commit=commit.strip(), rows=six_digits(rows),
                seconds=round(60 * rows[-1]['minutes']), machine=machine,
                recipe=next((text for text in done.stdout.splitlines() if ' batches of ' in text), ''),
                python=sys.version.split()[0], torch=torch.__version__, torchvision=torchvision.__version__)
    write_line(line)
    print(f'{line["seconds"]:5d} s  R@1 {rows[-1]["R@1"]:5.2f}  MAP@R {rows[-1]["MAP@R"]:5.2f}  {command}', flush=True)
    return True


def start(words, **environment):
    return subprocess.run([sys.executable, *words], cwd=ROOT, env=os.environ | environment,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def measure(done, checkpoint, mixes, environment):
    """Measures the network of a run that is `done` -> (the process that ended last, {name: number})

    From eval.py --analyse: alignment, uniformity and utilization of the test images, and NMI. From train_metrix.py
    --analyse, if the run `mixes`: utilization with mixed examples as well, and of Fig. 2 of Metrix P(Pos) for mixtures
    with a label between 0.5 and 0.6, and the largest difference of the two curves.
    """
    analysed = start(['eval.py', '--checkpoint', checkpoint, '--analyse'], **environment)
    if analysed.returncode:
        return analysed, {}
    found = json.loads(analysed.stdout.splitlines()[-1])
    measures = {key: found[key] for key in ('alignment', 'uniformity', 'utilization', 'NMI')}
    if not mixes:
        return done, measures
    analysed = start(['train_metrix.py', '--analyse', checkpoint], **environment)
    if analysed.returncode:
        return analysed, {}
    mixed = re.search(r'([\d.]+) by these and the mixed ones', analysed.stdout)
    # A line of a tenth of lambda: lambda, measured, by Eq. (25), mean similarity, threshold, pairs
    curves = [[*map(float, line.split())] for line in re.findall(r'(?m)^ +0\.\d5 .*$', analysed.stdout)]
    measures['utilization, mixed'] = float(mixed[1])
    measures['P(Pos)'] = next(measured for lam, measured, *_ in curves if lam == 0.55)
    measures['Fig. 2'] = max(abs(measured - predicted) for _, measured, predicted, *_ in curves)
    return done, measures


def write_line(line):
    with LINES.open('a') as file:
        file.write(json.dumps(line) + '\n')


def join(command, repeats):
    """Evaluates the folds of a row together by eval.py, and writes a line of it -> whether it succeeded"""
    folders = [f'runs/{name_of(f"{command} {flag}")}' for flag in repeats]
    done = start(['eval.py', '--checkpoint', *folders])
    if done.returncode:
        print(f'eval.py {command}\n{done.stdout[-1000:]}', flush=True)
        return False
    rows = [{key: row[key]['mean'] for key in ('R@1', 'RP', 'MAP@R')} | {'setting': row['setting']}
            for row in json.loads(done.stdout.splitlines()[-1])['rows']]
    write_line(dict(command=f'eval.py {command}', rows=six_digits(rows)))
    return True


def missing(name):
    """The commands of a table that runs.jsonl lacks"""
    done, table = finished(), TABLES[name]
    wanted = [f'{command} {flag}' for flag in table.repeats for command in table.rows.values()]
    return [command for command in wanted if command not in done]


def make(name, jobs):
    """Makes what a table lacks -> the commands that failed"""
    table, commands = TABLES[name], missing(name)
    if any('--dataset cub' in command for command in commands):
        common.download('cub', ROOT / 'data')
    numbers = range(torch.cuda.device_count()) if torch.cuda.is_available() else [None]
    gpus = Queue()
    for job in range(jobs):
        gpus.put(numbers[job % len(numbers)])
    threads = max(1, os.cpu_count() // jobs)
    with ThreadPoolExecutor(jobs) as pool:
        worked = list(pool.map(partial(run, table=table, threads=threads, gpus=gpus), commands))
    failed = [command for command, success in zip(commands, worked) if not success]
    if table.paper and table.repeats == FOLDS:
        done = finished()
        for command in table.rows.values():
            there = all(f'{command} {flag}' in done for flag in table.repeats)
            if there and f'eval.py {command}' not in done and not join(command, table.repeats):
                failed.append(f'eval.py {command}')
    return failed


def plan(name):
    """Prints what a table lacks: commands, and how many steps and images each takes; with folds, at most."""
    commands, total = missing(name), 0
    for command in commands:
        script, *words = re.sub(r'^tests/results/results.py --patched \S+ ', '', command).split()
        args = import_module(script.removesuffix('.py')).get_args([*words, '--device', 'cpu'])
        counts = common.DATASETS[args.dataset].get('counts')
        size = ''
        if counts:
            images = counts['train'][0] * (3 / 4 if args.fold else 1)
            steps = args.epochs * max(1, int(images // args.batch_size))
            steps = min(steps, args.steps) if args.steps else steps
            total += steps
            size = f'{steps:,} steps, {steps * args.batch_size:,} images: '
        print(f'{size}python {command}')
    print(f'{name}: {len(commands)} runs' + (f', {total:,} steps' if total else ''))


# ---- the page


def cell(values, digits=1, bold=False):
    middle, half = interval(values)
    text = f'{round(middle, digits) + 0:.{digits}f}'                     # + 0 makes 0.0 of -0.0
    text += '' if half is None else f' ± {half:.{digits}f}'
    return f'**{text}**' if bold and len(values) > 2 and abs(middle) > half else text


def gap(row):
    return row['s+'] - row['s-']


def flags_of(rows):
    """What the commands of the rows share, and what is each row's own: [text], {row: text}"""
    parts = {row: re.split(' (?=--)', command) for row, command in rows.items()}
    shared = [part for part in next(iter(parts.values())) if all(part in other for other in parts.values())]
    return shared, {row: ' '.join(part for part in own if part not in shared) for row, own in parts.items()}


def runs_of(name):
    """{row: {flag of a repeat: line}} of the finished runs of a table; rows without any are left out"""
    done, table = finished(), TABLES[name]
    runs = {row: {flag: done[f'{command} {flag}'] for flag in table.repeats if f'{command} {flag}' in done}
            for row, command in table.rows.items()}
    return {row: lines for row, lines in runs.items() if lines}


def paired(found, row, base):
    """{repeat: (what a row has, what its base has)} for the repeats that both have; found is {row: {repeat: ...}}"""
    bases = found.get(base, {})
    return {flag: (one, bases[flag]) for flag, one in found.get(row, {}).items() if flag in bases}


def counted(found):
    """The numbers that count, of {repeat: number}: all of them; but where several seeds are crossed with folds, one for
    each seed, the mean over its folds, because folds share most of their images"""
    seeds = {}
    for flag, number in found.items():
        seeds.setdefault(flag.partition('--seed')[2], []).append(number)
    return [mean(numbers) for numbers in seeds.values()] if len(seeds) > 1 else list(found.values())


def last_rows(runs):
    """{row: {flag of a repeat: the last evaluation}} of what runs_of returns"""
    return {row: {flag: line['rows'][-1] for flag, line in lines.items()} for row, lines in runs.items()}


def tables(name):
    """The two tables of TABLES[name], rows and differences, as Markdown; [] if nothing can be compared yet"""
    runs, table = runs_of(name), TABLES[name]
    found = last_rows(runs)
    differences = {pair: paired(found, *pair) for pair in table.pairs}
    if not runs or (differences and not any(differences.values())):
        return []
    every = [line for lines in runs.values() for line in lines.values()]
    minutes = sorted(line['rows'][-1]['minutes'] for line in every)
    shared, own = flags_of({row: table.rows[row] for row in runs})
    out = [f'{len(every)} runs of {minutes[0]:.1f} to {minutes[-1]:.1f} minutes, each on '
           + ' or '.join(sorted({line['machine'] for line in every})) + '.'
           + (f' All rows share `{" ".join(shared)}`.' if shared else ''), '',
           '| | runs | R@1 before | R@1 | gain | MAP@R before | MAP@R | gain | s+ | s- | s+ - s- | command |',
           '|---' * 12 + '|']
    for row, lines in runs.items():
        before, last = ({flag: line['rows'][n] for flag, line in lines.items()} for n in (0, -1))
        cells = []
        for key in ('R@1', 'MAP@R'):
            cells += [f'{mean(one[key] for one in before.values()):.1f}',
                      cell(counted({flag: one[key] for flag, one in last.items()})),
                      cell(counted({flag: one[key] - before[flag][key] for flag, one in last.items()}))]
        cells += [cell(counted({flag: measured(one) for flag, one in last.items()}), 2)
                  for measured in (itemgetter('s+'), itemgetter('s-'), gap)]
        out.append(f'| {row} | {len(lines)} | {" | ".join(cells)} | `{own[row]}` |')
    if differences:
        out += ['', '| difference | pairs | R@1 | MAP@R | s+ - s- |', '|---' * 5 + '|']
    for (row, base), both in differences.items():
        if both:
            found = [counted({flag: measured(a) - measured(b) for flag, (a, b) in both.items()})
                     for measured in (itemgetter('R@1'), itemgetter('MAP@R'), gap)]
            cells = [cell(values, digits, bold=True) for values, digits in zip(found, (1, 1, 2))]
            out.append(f'| {row} - {base} | {len(found[0])} | {" | ".join(cells)} |')
    return out


# What is measured of a network, and with how many digits it is shown
MEASURES = {'alignment': 2, 'uniformity': 2, 'utilization': 2, 'utilization, mixed': 2, 'P(Pos)': 2, 'Fig. 2': 2,
            'NMI': 1}


def measures_of(name):
    """What was measured of the networks of a table, and the differences, as Markdown"""
    found = last_rows(runs_of(name))
    keys = [key for key in MEASURES if all(key in one for rows in found.values() for one in rows.values())]
    out = [f'| | runs | {" | ".join(keys)} |', '|---' * (len(keys) + 2) + '|']
    for row, rows in found.items():
        cells = [cell([one[key] for one in rows.values()], MEASURES[key]) for key in keys]
        out.append(f'| {row} | {len(rows)} | {" | ".join(cells)} |')
    for row, base in TABLES[name].pairs:
        if both := paired(found, row, base):
            cells = [cell([a[key] - b[key] for a, b in both.values()], MEASURES[key], bold=True) for key in keys]
            out.append(f'| {row} - {base} | {len(both)} | {" | ".join(cells)} |')
    return out


def by_epoch(name):
    """For a table with epochs: MAP@R and R@1 of its rows, and their differences, at each of them, as Markdown"""
    runs, table = runs_of(name), TABLES[name]
    if not runs:
        return []
    every = [line for lines in runs.values() for line in lines.values()]
    found = {row: {flag: {one['epoch']: one for one in line['rows']} for flag, line in lines.items()}
             for row, lines in runs.items()}
    shared, own = flags_of({row: table.rows[row] for row in runs})
    out = [f'{len(every)} runs, each on ' + ' or '.join(sorted({line['machine'] for line in every}))
           + f'. All rows share `{" ".join(shared)}`.', '']
    for key in ('MAP@R', 'R@1'):
        out += [f'| {key} after epoch | runs | {" | ".join(map(str, table.epochs))} | command |',
                '|---' * (len(table.epochs) + 3) + '|']
        for row, rows in found.items():
            cells = [cell([one[epoch][key] for one in rows.values()]) for epoch in table.epochs]
            out.append(f'| {row} | {len(rows)} | {" | ".join(cells)} | `{own[row]}` |')
        for row, base in table.pairs:
            if both := paired(found, row, base):
                cells = [cell([a[epoch][key] - b[epoch][key] for a, b in both.values()], bold=True)
                         for epoch in table.epochs]
                out.append(f'| {row} - {base} | {len(both)} | {" | ".join(cells)} | |')
        out.append('')
    return out[:-1]


def papers_on_folds(name):
    """For a table with numbers of a paper on folds: those, and ours, as Markdown, also where nothing has been run"""
    runs, table, done = runs_of(name), TABLES[name], finished()
    out = ['| | folds | setting | paper: R@1, RP, MAP@R | where | here: R@1, RP, MAP@R | R@1 - paper | command |',
           '|---' * 8 + '|']
    for row, command in table.rows.items():
        columns, where = table.paper[row]
        joined = done.get(f'eval.py {command}', {}).get('rows', [{}, {}])
        for setting, theirs, ours in zip(('separated', 'concatenated'), columns, joined):
            here = ', '.join(f'{ours[key]:.2f}' for key in ('R@1', 'RP', 'MAP@R')) if ours else 'not run yet'
            gain = f'{ours["R@1"] - theirs[0]:.1f}' if ours else ''
            cells = [row, len(runs.get(row, {})), setting, ', '.join(f'{number:.2f}' for number in theirs), where,
                     here, gain, f'`{command}`']
            out.append(f'| {" | ".join(map(str, cells))} |')
    return out


def papers(name):
    """The same for a table of seeds"""
    runs, table = runs_of(name), TABLES[name]
    out = ['| | runs | paper: R@1 | where | last epoch | best on the test set | last epoch - paper | command |',
           '|---' * 8 + '|']
    for row, command in table.rows.items():
        number, where = table.paper[row]
        lines = runs.get(row, {}).values()
        cells = ['not run yet', '', '']
        if lines:
            last = [line['rows'][-1]['R@1'] for line in lines]
            best = [max(one['R@1'] for one in line['rows'][1:]) for line in lines]
            cells = [cell(last), cell(best), cell([value - number for value in last])]
        out.append(f'| {row} | {len(lines)} | {number} | {where} | {" | ".join(cells)} | `{command}` |')
    return out


def steps_of(line):
    """Steps in an epoch, from what the run printed before it began"""
    return int(re.search(r'of ([\d,]+) batches of', line['recipe'])[1].replace(',', ''))


def stopping_epochs(name):
    """{row: (steps after which MAP@R is highest on the folds, the epoch here that is nearest in steps, its steps)}, of
    the rows that have runs on folds"""
    table = TABLES[name]
    chosen = runs_of(table.folds)
    found = {}
    for row, lines in runs_of(name).items():
        if row not in chosen:
            continue
        on_folds = list(chosen[row].values())
        means = {epoch: sum(one['MAP@R'] for line in on_folds for one in line['rows'] if one['epoch'] == epoch)
                 for epoch in TABLES[table.folds].epochs}
        wanted = max(means, key=means.get) * steps_of(on_folds[0])
        per_epoch = steps_of(next(iter(lines.values())))
        epoch = min(table.epochs, key=lambda e: abs(e * per_epoch - wanted))
        found[row] = (wanted, epoch, epoch * per_epoch)
    return found


def rows_when_stopped(name):
    """{row: {flag of a repeat: the evaluation at the epoch where the folds would stop}}"""
    runs = runs_of(name)
    return {row: {flag: one for flag, line in runs[row].items() for one in line['rows'] if one['epoch'] == epoch}
            for row, (_, epoch, _) in stopping_epochs(name).items()}


def stopped(name):
    """The rows of a table with epochs where the folds would stop, as Markdown"""
    found = rows_when_stopped(name)
    if not found:
        return []
    out = ['At the epoch that has the highest mean MAP@R on the folds, or rather the nearest one in steps:', '',
           '| | runs | steps on folds | steps | MAP@R | R@1 |', '|---' * 6 + '|']
    for row, (wanted, _, steps) in stopping_epochs(name).items():
        cells = [cell([one[key] for one in found[row].values()]) for key in ('MAP@R', 'R@1')]
        out.append(f'| {row} | {len(found[row])} | {wanted} | {steps} | {" | ".join(cells)} |')
    for row, base in TABLES[name].pairs:
        if both := paired(found, row, base):
            cells = [cell([a[key] - b[key] for a, b in both.values()], bold=True) for key in ('MAP@R', 'R@1')]
            out.append(f'| {row} - {base} | {len(both)} | | | {" | ".join(cells)} |')
    return out


def reached(line):
    """The first evaluation of a run with 95 % of its last MAP@R"""
    return next(row for row in line['rows'] if row['MAP@R'] >= 0.95 * line['rows'][-1]['MAP@R'])


def choosing(name):
    """What choosing the best epoch on the test set is worth, and how fast runs learn, as Markdown; [] unless all runs
    were evaluated often"""
    runs, table = runs_of(name), TABLES[name]
    every = [line for lines in runs.values() for line in lines.values()]
    shown_elsewhere = table.epochs or table.paper
    if shown_elsewhere or '--fold' in table.repeats[0] or not every or min(len(line['rows']) for line in every) < 5:
        return []
    rules = [lambda line: line['rows'][-1]['R@1'], lambda line: max(row['R@1'] for row in line['rows'][1:]),
             lambda line: reached(line)['epoch'], lambda line: reached(line)['minutes']]
    found = {row: [[rule(line) for line in lines.values()] for rule in rules] for row, lines in runs.items()}
    for row, base in table.pairs:
        if both := paired(runs, row, base):
            found[f'{row} - {base}'] = [[rule(a) - rule(b) for a, b in both.values()] for rule in rules]
    out = ['R@1 of the same runs by the last epoch, and by the epoch that is best on the test set, which papers often',
           'report (Reality Check, Section 2.3); and when a run first has 95 % of its last MAP@R:', '',
           '| | runs | last epoch | best epoch | best - last | epochs to 95 % | minutes to 95 % |', '|---' * 7 + '|']
    for row, (last, best, epochs, minutes) in found.items():
        worth = [b - a for a, b in zip(last, best)]
        cells = [cell(values) for values in (last, best, worth, epochs, minutes)]
        out.append(f'| {row} | {len(worth)} | {" | ".join(cells)} |')
    return [*out, '']


def draw(name, path):
    """Draws R@1 over the epochs: the mean of each row, and its runs in a paler colour. A circle marks a run's best
    epoch, and a square its last one. Needs matplotlib."""
    from matplotlib.figure import Figure
    figure = Figure(figsize=(8, 4.5), layout='constrained')
    axes = figure.subplots()
    for number, (row, lines) in enumerate(runs_of(name).items()):
        curves = []
        for line in lines.values():
            epochs, r = zip(*((one['epoch'], one['R@1']) for one in line['rows']))
            best = max(range(1, len(r)), key=r.__getitem__)
            axes.plot(epochs, r, '-', epochs[best], r[best], 'o', epochs[-1], r[-1], 's', color=f'C{number}', alpha=0.3)
            curves.append(r)
        axes.plot(epochs, [sum(one) / len(one) for one in zip(*curves)], color=f'C{number}', label=row)
    axes.set(xlabel='epoch', ylabel='R@1 on the test classes; circle: best epoch, square: last')
    axes.legend()
    figure.savefig(path)


def draw_epochs(name, path):
    """Draws MAP@R at the epochs of a table: a panel for each loss, and in it the mean and interval of each of its rows;
    the line is that of the network before training. Needs matplotlib."""
    from matplotlib.figure import Figure
    runs, table = runs_of(name), TABLES[name]
    losses = list(dict.fromkeys(row.split(', ')[0] for row in runs))
    figure = Figure(figsize=(2.5 * len(losses), 3), layout='constrained')
    panels = figure.subplots(1, len(losses), sharey=True, squeeze=False)[0]
    for axes, loss in zip(panels, losses):
        for number, row in enumerate(row for row in runs if row.split(', ')[0] == loss):
            values = [[one['MAP@R'] for line in runs[row].values() for one in line['rows'] if one['epoch'] == epoch]
                      for epoch in table.epochs]
            middle, half = zip(*((m, h or 0) for m, h in map(interval, values)))
            low, high = ([m + sign * h for m, h in zip(middle, half)] for sign in (-1, 1))
            axes.plot(table.epochs, middle, 'o-', color=f'C{number}', markersize=3, label=row.split(', ')[1])
            axes.fill_between(table.epochs, low, high, color=f'C{number}', alpha=0.2)
        axes.axhline(middle[0], color='grey', linestyle=':')
        axes.set(title=loss, xlabel='epoch', xscale='symlog', xlim=(-0.2, 1.2 * table.epochs[-1]))
        axes.set_xticks(table.epochs[::2], map(str, table.epochs[::2]))
        axes.minorticks_off()
    panels[0].set_ylabel('MAP@R on the test classes')
    panels[0].legend()
    figure.savefig(path, dpi=100)


def quantity(line, name):
    """A number of a finished run, by default that of its last evaluation"""
    rows = line['rows']
    last = rows[-1]
    if name == 'R@1 after epoch 2':
        return next(row['R@1'] for row in rows if row['epoch'] == 2)
    if name == 'utilization by all examples':       # those of the training: without mixing, there are no mixed ones
        return last['utilization' if '--mixup none' in line['command'] else 'utilization, mixed']
    if name == 'P(Pos) - 0.5':
        return last['P(Pos)'] - 0.5
    if name == 'distance of the curves - 0.1':
        return last['Fig. 2'] - 0.1
    return last[name]


def numbers(claim, row):
    """{repeat: number} of a row: the quantity that the claim is about"""
    if claim.quantity == 'R@1 stopped by folds':
        return {flag: one['R@1'] for flag, one in rows_when_stopped(claim.table).get(row, {}).items()}
    return {flag: quantity(line, claim.quantity) for flag, line in runs_of(claim.table).get(row, {}).items()}


def differences(claim):
    """What a claim is about, one number for each repeat that counts"""
    found = {row: numbers(claim, row) for row in (claim.row, claim.base)}
    if not claim.base:
        return counted(found[claim.row])
    return counted({flag: ours - theirs for flag, (ours, theirs) in paired(found, claim.row, claim.base).items()})


def below_no_training(claim):
    """Whether both rows of a claim on R@1 end below the networks before training, so that its gain is a smaller loss"""
    runs = runs_of(claim.table)
    return 'R@1' in claim.quantity and all(
        mean(numbers(claim, row).values()) < mean(line['rows'][0]['R@1'] for line in runs[row].values())
        for row in (claim.row, claim.base))


def verdict(paper, values):
    """Whether the interval of these differences lies on the paper's side of 0, and whether it holds its number

    Where it lies on the other side, it excludes 0 and the paper's difference.
    """
    sign = -1 if paper[0] in '-<' else 1
    middle, half = interval([sign * value for value in values])
    if middle + half < 0:
        return 'the other way here'
    found = 'seen here' if middle - half > 0 else 'not seen here'
    if paper[0] in '<>':
        return found
    there = sign * float(paper)
    if middle + half < there:
        return found + '; less than there'
    return found + '; more than there' if middle - half > there else found


def judged(claim):
    """The cells of a claim: what was found, in how many pairs, and the verdict"""
    values = differences(claim)
    if len(values) < 2:
        return '', len(values), 'not run yet'
    found = claim.verdict or verdict(claim.paper, values)
    if below_no_training(claim):
        found += '; both below no training'
    return cell(values, 1 if 'R@1' in claim.quantity else 2), len(values), found


def claims():
    """CLAIMS as Markdown, with what the runs say of them, and how often each verdict is given"""
    out = ['| claim | paper | there | here | pairs | verdict | table, difference |', '|---' * 7 + '|']
    given = Counter()
    for claim in CLAIMS:
        cells = judged(claim)
        given[cells[2].split(';')[0]] += 1
        what = claim.row + (f' - {claim.base}' if claim.base else '')
        what += '' if claim.quantity == 'R@1' else f': {claim.quantity}'
        out.append(f'| {claim.text} | {claim.where} | {claim.paper} | {" | ".join(map(str, cells))} | '
                   f'`{claim.table}`, {what} |')
    return [*out, '', counts_of_verdicts(given), '']


def counts_of_verdicts(given):
    """A sentence on {verdict: how many comparisons have it}"""
    different = len({claim.text.split(':')[0] for claim in CLAIMS})
    counts = ', '.join(f'{number} *{name}*' for name, number in given.most_common())
    return (f'These are {sum(given.values())} comparisons on {different} claims: {counts}. If nothing had any effect, '
            f'one interval in twenty would exclude 0 by chance.')


# Kinds of data, by a word of the commands; the first that fits counts. What is named '' is left out.
DATA = {UNTRAINED: '', '--dataset cub': '', '--dataset cars': '', 'data/birds': 'features of birds',
        'omniglot_vectors': 'features of Omniglot', 'cifar_vectors': 'features of CIFAR-100', 'data/cub50': 'birds',
        'data/flowers': 'flowers', 'data/omniglot': 'Omniglot', 'train_': 'shapes'}


def spread():
    """How much R@1 and MAP@R of the same command move from seed to seed, as Markdown"""
    seeds = {}                                      # {command: its last evaluations}
    for command, line in finished().items():
        if '--seed' in command and '--fold' not in command:
            seeds.setdefault(re.sub(r' --seed \d+', '', command), []).append(line['rows'][-1])
    groups = {data: [] for data in DATA.values()}
    for command, rows in seeds.items():
        if len(rows) > 2:
            groups[next(data for word, data in DATA.items() if word in command)].append(rows)
    out = ['| data | commands | runs | R@1 | MAP@R |', '|---' * 5 + '|']
    for data, found in groups.items():
        if data and found:
            moves = [pooled_deviation([[row[key] for row in rows] for rows in found]) for key in ('R@1', 'MAP@R')]
            out.append(f'| {data} | {len(found)} | {sum(map(len, found))} | {moves[0]:.2f} | {moves[1]:.2f} |')
    return [*out, '']


def pooled_deviation(groups):
    """The standard deviation that groups of numbers share, each around its own mean"""
    squares = sum((len(group) - 1) * variance(group) for group in groups)
    return (squares / sum(len(group) - 1 for group in groups)) ** 0.5


def section(name):
    """The changed steps of a table's rows, and its tables, as lines of Markdown"""
    names = dict.fromkeys(re.findall(r'--patched (\w+)', ' '.join(TABLES[name].rows.values())))
    notes = [f'* `{patch}`: {" ".join(PATCHES[patch].__doc__.split())}' for patch in names]
    if TABLES[name].paper:
        found = (papers_on_folds if TABLES[name].repeats == FOLDS else papers)(name)
    elif TABLES[name].epochs:
        found = by_epoch(name)
        if TABLES[name].folds and found:
            found += ['', *stopped(name)]
    else:
        found = tables(name)
        if TABLES[name].measured and found:
            found += ['', *measures_of(name)]
    return [*notes, *([''] if notes else []), *(found or ['Not run yet.']), '', *choosing(name)]


def page():
    """The text of the page, with its tables written anew: they stand between <!-- NAME --> and <!-- end -->"""
    others = dict(claims=claims, spread=spread)

    def written(found):
        lines = others[found[2]]() if found[2] in others else section(found[2])
        return '\n'.join([found[1], '', *lines, '<!-- end -->'])
    return re.sub(r'(?s)(<!-- ([\w-]+) -->).*?<!-- end -->', written, PAGE.read_text())


def main():
    if sys.argv[1:2] == ['--patched']:
        return run_patched(*sys.argv[2:])
    if sys.argv[1:] == ['--vectors']:
        return store_vectors()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('tables', nargs='*', metavar='NAME', choices=[*TABLES, []], default=[])
    parser.add_argument('--jobs', type=int, default=1, help='runs at a time; 0: none')
    parser.add_argument('--draw', metavar='PNG', help='draw a table by epoch, R@1 or MAP@R (pip install matplotlib)')
    parser.add_argument('--plan', action='store_true', help='print what is missing, and make nothing')
    parser.add_argument('--add', metavar='FLAGS', help='a trial with more flags, kept in runs/trial.jsonl and trial.md')
    options = parser.parse_args()
    if not options.tables:
        return PAGE.write_text(page())
    if options.add:
        try_out(options.add)
    failed = []
    for name in options.tables:
        if options.plan:
            plan(name)
            continue
        if options.jobs:
            failed += make(name, options.jobs)
        text = '\n'.join([f'# {name}', '', *section(name)])
        print(text)
        if options.add:
            with TRIAL.with_suffix('.md').open('a') as file:
                file.write(text + '\n')
        if options.draw:
            (draw_epochs if TABLES[name].epochs else draw)(name, options.draw)
    if failed:
        raise SystemExit('\n'.join([f'error: {len(failed)} runs failed:', *failed]))


def try_out(flags):
    """Adds flags to all commands, and keeps lines and tables of this trial apart from the others."""
    global LINES
    LINES = TRIAL
    TRIAL.parent.mkdir(exist_ok=True)
    TRIAL.touch()
    TRIAL.with_suffix('.md').write_text('')
    for name, table in TABLES.items():
        TABLES[name] = table._replace(rows={row: f'{command} {flags}' for row, command in table.rows.items()})


if __name__ == '__main__':
    common.cli(main)
