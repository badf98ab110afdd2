"""The runs behind tests/results.md, and that page. Not collected by pytest.

    python tests/results.py                  writes tests/results.md from tests/results.jsonl
    python tests/results.py pilots           makes the runs of this table that results.jsonl lacks, and prints it
    python tests/results.py birds --jobs 2   two runs at a time, each on half of the cores
    python tests/results.py birds --jobs 0   only prints
    python tests/results.py --patched push train_metrix.py --mixup feature     a run whose step is changed: see PATCHES

A finished run becomes a line of tests/results.jsonl, with its commit and all its evaluations; no two lines have the
same command. A run that was stopped goes on at the next start. Once its line is written, its checkpoints in runs/, of
100 to 150 MB each, may be deleted. Add a row to TABLES for a run of your own.
The data belong in data/, which git ignores. cub50 holds the first 50 classes of CUB-200-2011. resnet18.pth is the trunk
of torchvision's IMAGENET1K_V1 (its BatchNorm statistics were estimated anew on 600 photographs, none of them from CUB).
omniglot has the folders train, with the alphabets of images_background_small1, and test, with those of small2 that
small1 lacks: Japanese (katakana), Sanskrit and Tagalog.
"""
import argparse
import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from hashlib import md5
from pathlib import Path
from typing import NamedTuple
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.nn.functional as F
import torchvision

import common
import train_metrix
import train_ms
from eval import interval

ROOT = Path(__file__).parents[1]
LINES, PAGE = ROOT / 'tests' / 'results.jsonl', ROOT / 'tests' / 'results.md'

# ---- which runs there are


class Table(NamedTuple):
    title: str
    text: str           # what the table asks, and how it was made
    repeats: list       # flags; each command is run once with each of them
    rows: dict          # {row: command}
    pairs: list         # [(row, row that it is compared with)]


SEEDS, FOLDS = [f'--seed {n}' for n in range(3)], [f'--fold {n}/4' for n in range(4)]
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
SCRIPTS = ['contrastive', 'ms', 'proxy_anchor', 'proxynca_pp', 'ccl', 'metrix', 'hse']


def patched(name, command=FEATURE):
    return f'tests/results.py --patched {name} {command}'


def against(rows, *bases):
    """Each row compared with each base"""
    return [(row, base) for base in bases for row in rows if row not in bases]


def finished():
    """{command: its line}"""
    return {line['command']: line for line in map(json.loads, LINES.read_text().splitlines())}


def trials(script):
    """{trial: command} of the runs that `python tests/search.py SCRIPT` made, in their order; it writes flags with ="""
    own = [command for command in finished() if command.startswith(f'{script} ') and '=' in command]
    return {f'trial {n}': command for n, command in enumerate(dict.fromkeys(c.split(' --fold')[0] for c in own))}


SOFTER = {f'softer:{what}': patched(f'softer:{what}') for what in ['2:10:0.5', *SEARCH]}
TERM = {'push': patched('push'), 'contrast:0.5': patched('contrast:0.5'), 'strength 0.05': FEATURE + ' --strength 0.05'}
SEEDED = {name: (TERM | SOFTER)[name] for name in ('push', 'softer:2:10:0.3')}
HYBRIDS = {'alpha 0': '--alpha 0', 'alpha 0.05': '--alpha 0.05', 'alpha 0.05, append': '--alpha 0.05 --hybrids append'}
NOISY = {f'{noise}, lam {lam}': f'train_ccl.py --label-noise {noise} --lam {lam}'
         for noise in ('none', 'symmetric:0.2', 'longtail:0.25') for lam in (0, 2)}
MINED = {'mined': patched('mined'), 'embed': 'train_metrix.py --eval-every 2 --mixup embed',
         'released': patched('released', 'train_metrix.py --eval-every 2 --mixup embed --strength 1')}
TABLES = {
    'pilots': Table('Which learning rate?', '''
A third of the recipe's rate, the rate itself, and three times the rate: one seed, on the seven validation classes of
`--fold 0/4`. The rate with the highest MAP@R is the one of the next tables; for train_metrix.py and train_hse.py it was
searched without mixing and without hybrids. Except for ms and CCL it is the lowest or the highest of the three, so the
best rate may lie outside.''',
                    ['--seed 0'], {f'{name}, lr {rate:.2g}': f'{FIRST[name]} --fold 0/4 --lr {rate:.2g}'
                                   for name in FIRST for rate in (RATES[name] / 3, RATES[name], RATES[name] * 3)}, []),
    'birds': Table('Do losses matter?', '''
This is the question of the Reality Check. Each row is a recipe with its loss. Recipes differ in batches, pooling and
optimizer as well, so a difference is not one of losses alone. Every row gains over the network before training. As in
the Reality Check, the order in which the papers appeared does not show. For its centre term (lam 2), CCL reports a gain
of 0.7 points of R@1 on CUB, which these intervals neither show nor exclude.''',
                   SEEDS, TUNED, against(TUNED, 'contrastive') + [('ccl, lam 2', 'ccl, lam 0')]),
    'recipes': Table('Recipe or loss?', '''
Losses with the recipe of their own script, and with that of train_metrix.py, without mixing. There, contrastive is one
of cosines and not of distances, and ms has other parameters. Recipes matter at least as much as losses.''',
                     SEEDS, {name: TUNED[name] for name in TWICE}
                     | {f'{name}, as in train_metrix.py': METRIX[f'{name}, none'] for name in TWICE},
                     [(f'{name}, as in train_metrix.py', name) for name in TWICE]
                     + [('proxy_anchor, as in train_metrix.py', 'contrastive, as in train_metrix.py')]),
    'metrix': Table('Does mixing help?', '''
Metrix. The two sides of a difference differ in `--mixup` and in nothing else. Their learning rate, 3.3e-5, was chosen
for ms without mixing; for ms that favours the side without. With feature mixing the paper reports gains of R@1 on CUB
of 3.6 points for ms, 1.3 for Proxy-Anchor, 2.7 for contrastive and 1.3 for ProxyNCA++. The intervals here exclude
those of ms and of Proxy-Anchor; the wider one of ms in the table `again` does not. That does not refute the paper,
which trains a larger network on 100 classes for up to 100 epochs.''',
                    SEEDS, METRIX,
                    [(f'{loss}, {mixup}', f'{loss}, none') for loss, mixup in MIXING if mixup != 'none']),
    'fast': Table('Does mixing help at the rate of the recipe?',
                  'The rate of the recipe, 1e-4, is three times that of the table `metrix`.',
                  SEEDS, {f'proxy_anchor, {mixup}': f'train_metrix.py {FAST} --loss proxy_anchor --mixup {mixup}'
                          for mixup in ('none', 'feature')}, [('proxy_anchor, feature', 'proxy_anchor, none')]),
    'hse': Table('Do hybrids help?', '''
HSE. The two sides of a difference differ in `--alpha` and in nothing else. With alpha 0 there are no hybrids, and a
batch has a class more. The paper reports gains of R@1 on CUB of 1.9 points for ms, 1.2 for Proxy-Anchor and 2.5 for
EPSHN. The interval excludes that of EPSHN.''',
                 SEEDS, HSE, [(f'{loss}, hybrids', f'{loss}, alone') for loss in ('ms', 'proxy_anchor', 'epshn')]),
    'shapes': Table('The built-in dataset', '''
`shapes`, with defaults. Learning rates and epochs were chosen on this test set, so the table shows that each script
learns and how far apart its seeds are, and not which one is best. Rounding moves these numbers, too: on two cores,
train_metrix.py with seed 0 reached R@1 64.0, on one 60.7, and 58.5 when sums were written in another order.''',
                    SEEDS, {name: f'train_{name}.py' for name in SCRIPTS}, []),
    'omniglot': Table('Omniglot', '''
A folder of handwritten characters, with defaults: 136 characters of five alphabets train (2,720 images), 106 characters
of three other alphabets test. The defaults of a folder were chosen on `shapes`; nothing was chosen on Omniglot.''',
                      SEEDS, {name: f'train_{name}.py --dataset folder --data data/omniglot' for name in SCRIPTS}, []),
    'scratch': Table('Why do hybrids and mixing lose?', '''
On `shapes`, ms: one seed on the four folds of the training classes, measured on the validation classes. At alpha 1e-9
there are hybrids in the batch and in the statistics of BatchNorm, but their loss weighs nothing. `append` adds hybrids
to a batch; otherwise they replace one of its eight classes. Hybrids lose for two reasons: a class less in each batch,
and L_Hy itself. What enters the statistics of BatchNorm is not the reason, neither for hybrids nor for input mixing.
Mixing raises s-: feature mixing takes more than half of the gap s+ - s-, input mixing three tenths of it. Hybrids, at
any alpha and temperature here, leave the gap as it is.''',
                     FOLDS, {name: f'train_{flags}' for name, flags in SCRATCH.items()},
                     against([name for name in SCRATCH if name.startswith('alpha ')], 'alpha 0')
                     + [('alpha 1e-9, append', 'alpha 1e-9'), ('alpha 0.05, append', 'alpha 1e-9, append'),
                        ('alpha 0.05, append', 'alpha 0.05'), ('alpha 0.05, temperature 1', 'alpha 0.05')]
                     + against(('feature', 'input', 'input, clean BatchNorm'), 'none')
                     + [('feature, 16 epochs', 'none, 16 epochs')]),
    'term': Table('Another mixed term', '''
The mixed term only pushes, or is contrastive, or has an eighth of its weight. With all three, s- is lower than with
the paper's mixed term. Without the pull, MAP@R is higher than with feature mixing, and about as high as without
mixing; no row is beyond doubt better than no mixing.''',
                  FOLDS, BOTH | TERM, against(TERM, 'none', 'feature')),
    'push': Table('Other mixed terms, with three seeds', '''
Seeds 0, 1 and 2 on each of the four folds: mixtures that only push, of the table before, and the best row of the table
`search`, which chose it on these folds with seed 0. Feature mixing loses to no mixing. Without the term that pulls, or
with a softer mixed term, it loses nothing, or much less; nor does it gain. Pairs of one fold share their images, so the
12 are not independent. Of three means, one for each seed, the intervals are wider: MAP@R changes by -5.5 ± 2.6, by
-0.5 ± 2.4 and by -0.3 ± 2.0. Without seed 0, which chose it, the softer term has -0.8 ± 1.4.''',
                  [fold + seed for seed in ('', ' --seed 1', ' --seed 2') for fold in FOLDS],
                  BOTH | SEEDED, against(('feature', *SEEDED), 'none') + against(SEEDED, 'feature')),
    'again': Table('Mixtures that only push, on birds', '''
ms as in the table `metrix`: the same recipe, learning rate and nine epochs, run again. The pull is the smaller part of
what is lost here: 0.5 points of MAP@R out of 1.6. The interval of R@1 is several times as wide as in `metrix`: an
interval of three seeds is itself uncertain.''',
                   SEEDS, {'none': f'{AGAIN} none', 'feature': f'{AGAIN} feature',
                           'push': patched('push', f'{AGAIN} feature')},
                   [('feature', 'none'), ('push', 'none'), ('push', 'feature')]),
    'soft': Table('Softer parameters in both terms', '''
Beta 2, gamma 10 and m 0.5 in the clean and in the mixed term. The gap s+ - s- is larger than with the paper's
parameters. Mixing lowers it here, too, and yet loses little or nothing.''',
                  FOLDS, {'none': NONE + SOFT, 'feature': FEATURE + SOFT}, [('feature', 'none')]),
    'search': Table('Is there a mixed term that wins?', '''
The clean term of ms keeps beta 18, gamma 75 and m 0.77; the mixed term gets the three numbers in the name of the row.
With 2 and 10, s- is 0.52 at every m; with 18 and 75 it falls from 0.68 to 0.50 where m falls from 0.77 to 0.3. None
is beyond doubt better than no mixing. The best by MAP@R, 2, 10 and 0.3, was chosen by this table, and is repeated
with other seeds in the table `push`.''',
                    FOLDS, BOTH | SOFTER, [('feature', 'none'), *against(SOFTER, 'none', 'feature')]),
    'pairs': Table('Other pairs, and the released loss', '''
Mixtures of mined pairs only; embedding mixing; and the loss of the code that was released for ms with embedding
mixing, whose mixtures only pull. This one has the highest s- and loses most.''',
                   FOLDS, BOTH | MINED, against(MINED, 'none', 'feature')),
    'tuned': Table('A search of hyper-parameters', '''
`python tests/search.py train_ms.py --trials 10 --epochs 4 --eval-every 4`: Optuna chooses alpha, beta, lambda and
epsilon of ms by the mean MAP@R of the four folds; here are its ten trials and the defaults, one seed, 4 epochs.
Trial 4 is the best one, on the folds that chose it. Ten trials are few; the Reality Check has fifty. (One run was
paused, hence its 40.4 minutes.)''',
                   FOLDS, {'defaults': 'train_ms.py --epochs 4 --eval-every 4'} | trials('train_ms.py'), []),
    'input': Table('Input mixing', '''
Mixed images, with and without the term that pulls. The pull is what raises s- here, too: from 0.39 to 0.55, without it
to 0.41. Without the pull MAP@R is 1.9 ± 2.9 points higher. Four folds do not show that either row is worse than no
mixing.''',
                   FOLDS, {'none': NONE, 'input': INPUT, 'push': patched('push', INPUT)},
                   [('input', 'none'), ('push', 'none'), ('push', 'input')]),
    'hybrids': Table('Hybrids for twice as many epochs', '''
On `shapes`, ms with 16 epochs instead of 8: do hybrids help once the clean loss has little left to teach?''',
                     FOLDS, {row: f'train_hse.py --epochs 16 {flags}' for row, flags in HYBRIDS.items()},
                     [('alpha 0.05', 'alpha 0'), ('alpha 0.05, append', 'alpha 0')]),
    'noise': Table('The centre term of CCL and label noise', '''
On `shapes`: 20 % of the images get the label of another class, or classes with 25 % of the images dissolve into
clusters. In Table 3 of the paper lam 2 has an R@1 on CUB that is 13 and 12 points above NSoftmax, which is lam 0.''',
                   FOLDS, NOISY, [(row, row.replace('lam 2', 'lam 0')) for row in NOISY if 'lam 2' in row]),
    'centres': Table('The centre term of CCL in long training', 'On `shapes`, 60 epochs instead of 8.',
                     FOLDS, {f'lam {lam}': f'train_ccl.py --epochs 60 --eval-every 10 --lam {lam}' for lam in (0, 2)},
                     [('lam 2', 'lam 0')]),
    'long': Table('As long as the papers train', '''
Birds for 60 epochs, 840 steps, with the rate of the recipe and its schedule scaled to them. The commands released with
Metrix train ms for 60 epochs without mixing, where the rate is halved every 5, and for 100 with it, halved every 10: so
there is a row of 36 epochs, with a decay every 3, as well. `push` is the row of the table 'Another mixed term'. Rows
that are not shown have not been run. With one seed: without mixing, ms is best at epoch 24 and loses 1.3 points of R@1
after it; mixing prevents that, at a lower level. Proxy-Anchor does not overfit. Mixing raises its s- from 0.40 to 0.60,
and costs it nothing; that it gains is a matter of the best epoch on the test set, which is the twelfth. `--draw` has
drawn assets/epochs.png.''',
                  SEEDS, {f'ms, {mixup}': f'train_metrix.py {LONG} --mixup {mixup}' for mixup in ('none', 'feature')}
                  | {f'proxy_anchor, {mixup}': f'train_metrix.py {LONG} --loss proxy_anchor --mixup {mixup}'
                     for mixup in ('none', 'feature')}
                  | {'ms, push': patched('push', f'train_metrix.py {LONG} --mixup feature'),
                     'ms, none, 36 epochs': f'train_metrix.py {SHORTER} --mixup none'},
                  [('ms, feature', 'ms, none'), ('ms, push', 'ms, none'), ('ms, none, 36 epochs', 'ms, none'),
                   ('proxy_anchor, feature', 'proxy_anchor, none')]),
}
# What the page shows, in its order
CHAPTERS = [
    ('Fine-tuning on birds', '''
The first 50 classes of CUB-200-2011 are a folder: 25 classes train (1,402 photographs), the other 25 test (1,487). A
ResNet-18 starts from torchvision's ImageNet weights, in half precision and with statistics of BatchNorm that were
estimated anew on 600 other photographs; with torchvision's own file the numbers will differ. ImageNet has birds, so the
weights may have seen some of these species. Crops have 112 px. In the first of nine epochs only the head trains.
Schedules by steps decay once, after epoch 5. All else is the recipe of the script for CUB. The test set chose
nothing.''', ['pilots', 'birds', 'recipes', 'metrix', 'fast', 'again', 'hse', 'long']),
    ('From random weights', '', ['shapes', 'omniglot', 'scratch', 'hybrids', 'noise', 'centres', 'tuned']),
    ('Why does feature mixing lose?', '''
By Eq. (24) of Metrix, a mixture is at rest at the similarity m + ln(lambda / (1 - lambda)) / (beta + gamma). With the
paper's 18, 75 and 0.77 that is between 0.74 and 0.80 for every lambda from 0.05 to 0.95. So a mixture that is nearly a
pure negative is held at about 0.77 as well. These runs of ms on `shapes`, on its four folds with 8 epochs, ask whether
this keeps s- high, and whether that is what costs R@1.

It does keep s- high: 0.68 where mixtures pull and push, 0.74 where they only pull (`released`), and 0.38 where they
only push, as without mixing. The pull also costs most of what is lost here: without it little or nothing is lost
(`push`, three seeds), and the loss that only pulls loses most. But a high s- alone does not explain it. With beta 2
and gamma 10 in the mixed term, s- is 0.52 and nothing is lost (`push`); with Proxy-Anchor on birds mixing takes a
third of the gap s+ - s- and no R@1 in 840 steps (`long`). And on birds mixtures that only push lose 1.1 points of
MAP@R, and feature mixing 1.6 (`again`); there s- is 0.72 without mixing, too. So what else costs MAP@R on birds is
not found. No mixed term here is better than none; the best that was found loses nothing.

The baselines were run again for these tables. On one of the folds feature mixing then reached R@1 83.2, and 76.0 in the
table `scratch`, on another machine, with another torch and an earlier commit. So a run can move this far without a
change of the method, and differences of single folds say little.''',
     ['term', 'push', 'search', 'soft', 'pairs', 'input']),
]
HEAD = '''# Results

Written by `python tests/results.py` from tests/results.jsonl; do not edit this file.

`python tests/results.py NAME` makes those runs of a table that results.jsonl lacks; what has to lie in `data/` is
named at the top of tests/results.py. No benchmark has been run yet: there was no GPU, and no ImageNet weights of a
ResNet-50.

All numbers are of the last epoch. R@1 and MAP@R are in percent; s+ and s- are mean similarities of two images of the
same class and of different classes. *Before* is the network before training, *gain* the number minus that before.
*Runs* counts the seeds or folds, or both (table `push`). A number after ± is half of the 95 % confidence interval of
the mean (Student's t). Differences are taken between runs of the same seed or fold. A mean of three or more is in
bold if its interval excludes 0, which by chance happens to one difference in twenty. Machines are CPUs that multiply
in bfloat16, in which the trunk ran. A row's command is `python`, what stands in its last column, the flags that all
rows share, and `--seed` or `--fold`.
'''


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
    real, real_mixtures = train_metrix.mixed_loss, train_metrix.mixtures

    def mixed_loss(kind, hyper, mixup, pairs, k, alpha, model, images, f, z, y, **kwargs):
        kept, negatives_kept = train_ms.mine(z @ z.T, y, 0.39)                                  # (B, B)

        def mixtures(pairs, y, i, j, lam, anchor, anchor_y, negatives):
            weights, valid = real_mixtures(pairs, y, i, j, lam, anchor, anchor_y, negatives & negatives_kept)
            positive_end = torch.where(y[i] == anchor_y[:, None], i, j)                         # (A, M)
            return weights, valid & (kept.gather(1, positive_end) | (positive_end == anchor[:, None]))
        with mock.patch.object(train_metrix, 'mixtures', mixtures):
            return real(kind, hyper, mixup, pairs, k, alpha, model, images, f, z, y, **kwargs)
    return dict(mixed_loss=mixed_loss)


def released():
    """The released loss of ms with embedding mixing, in place of both terms: one lambda a batch; mined clean positives
    weigh lambda, mined clean negatives 1 - lambda, mixtures of these 0.4 as positives, and nothing as negatives"""
    def mixed_loss(kind, hyper, mixup, pairs, k, alpha, model, images, f, z, y):
        beta, gamma, m = hyper['beta'], hyper['gamma'], hyper['m']
        z, lam = z.float(), torch.distributions.Beta(alpha, alpha).sample().item()
        s = z @ z.T
        positive, negative = train_ms.mine(s, y, 0.39)                                          # (B, B)
        length = (lam ** 2 + (1 - lam) ** 2 + 2 * lam * (1 - lam) * s).sqrt()                   # of a mixture (p, n)
        mixed = (lam * s[:, :, None] + (1 - lam) * s[:, None]) / length                         # (anchor, p, n)
        both = positive[:, :, None] & negative[:, None]
        pull = torch.cat([-beta * (s - m) + (lam * positive).log(),
                          (-beta * (mixed - m) + (0.4 * both).log()).flatten(1)], dim=1)
        terms = (pull, beta), (gamma * (s - m) + ((1 - lam) * negative).log(), gamma)
        return sum(F.pad(exponents, (1, 0)).logsumexp(dim=1) / scale for exponents, scale in terms).mean()
    return dict(mixed_loss=mixed_loss, clean_loss=lambda *args, **kwargs: 0)


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


def run(command, threads):
    """Makes one run, and writes its line -> whether it succeeded"""
    name = 'results-' + md5(command.encode()).hexdigest()[:8]
    folder = ROOT / 'runs' / name
    words = command.split() + (['--resume', f'runs/{name}'] if (folder / 'last.pt').exists() else ['--name', name])
    done = subprocess.run([sys.executable, *words], cwd=ROOT, env=os.environ | {'OMP_NUM_THREADS': str(threads)},
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        print(f'{command}\n{done.stdout[-1000:]}', flush=True)
        return False
    rows = [json.loads(line) for line in (folder / 'log.jsonl').read_text().splitlines()]
    machine = torch.cuda.get_device_name() if torch.cuda.is_available() else (
        f'{threads} of {os.cpu_count()} cores, {torch.backends.cpu.get_cpu_capability()}')
    commit = subprocess.run(['git', 'rev-parse', '--short', 'HEAD'], cwd=ROOT, capture_output=True, text=True).stdout
    line = dict(command=command, commit=commit.strip(), before=rows[0], last=rows[-1], rows=rows,
                seconds=round(60 * rows[-1]['minutes']), machine=machine,
                recipe=next((text for text in done.stdout.splitlines() if ' batches of ' in text), ''),
                python=sys.version.split()[0], torch=torch.__version__, torchvision=torchvision.__version__)
    with LINES.open('a') as file:
        file.write(json.dumps(line) + '\n')
    print(f'{line["seconds"]:5d} s  R@1 {rows[-1]["R@1"]:5.2f}  MAP@R {rows[-1]["MAP@R"]:5.2f}  {command}', flush=True)
    return True


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


def tables(name):
    """The two tables of TABLES[name], rows and differences, as Markdown; [] if nothing can be compared yet"""
    runs, table = runs_of(name), TABLES[name]
    differences = {(row, base): [(lines['last'], runs[base][flag]['last']) for flag, lines in runs.get(row, {}).items()
                                 if flag in runs.get(base, {})] for row, base in table.pairs}
    if not runs or (differences and not any(differences.values())):
        return []
    every = [line for lines in runs.values() for line in lines.values()]
    minutes = sorted(line['last']['minutes'] for line in every)
    shared, own = flags_of({row: table.rows[row] for row in runs})
    out = [f'{len(every)} runs of {minutes[0]:.1f} to {minutes[-1]:.1f} minutes, each on '
           + ' or '.join(sorted({line['machine'] for line in every})) + '.'
           + (f' All rows share `{" ".join(shared)}`.' if shared else ''), '',
           '| | runs | R@1 before | R@1 | gain | MAP@R before | MAP@R | gain | s+ | s- | s+ - s- | command |',
           '|---' * 12 + '|']
    for row, lines in runs.items():
        before, last = ([line[when] for line in lines.values()] for when in ('before', 'last'))
        cells = []
        for key in ('R@1', 'MAP@R'):
            cells += [f'{sum(one[key] for one in before) / len(before):.1f}', cell([one[key] for one in last]),
                      cell([b[key] - a[key] for a, b in zip(before, last)])]
        cells += [cell([one[key] for one in last], 2) for key in ('s+', 's-')] + [cell(list(map(gap, last)), 2)]
        out.append(f'| {row} | {len(lines)} | {" | ".join(cells)} | `{own[row]}` |')
    if differences:
        out += ['', '| difference | pairs | R@1 | MAP@R | s+ - s- |', '|---' * 5 + '|']
    for (row, base), both in differences.items():
        if both:
            cells = [cell([a[key] - b[key] for a, b in both], bold=True) for key in ('R@1', 'MAP@R')]
            cells.append(cell([gap(a) - gap(b) for a, b in both], 2, bold=True))
            out.append(f'| {row} - {base} | {len(both)} | {" | ".join(cells)} |')
    return out


def choosing(name):
    """What choosing the best epoch on the test set is worth, as Markdown; [] unless all runs were evaluated often"""
    runs, table = runs_of(name), TABLES[name]
    every = [line for lines in runs.values() for line in lines.values()]
    if '--fold' in table.repeats[0] or not every or min(len(line.get('rows', [])) for line in every) < 5:
        return []
    rules = [lambda line: line['last']['R@1'], lambda line: max(row['R@1'] for row in line['rows'][1:])]
    found = {row: [[rule(line) for line in lines.values()] for rule in rules] for row, lines in runs.items()}
    for row, base in table.pairs:
        both = [flag for flag in runs.get(row, {}) if flag in runs.get(base, {})]
        if both:
            found[f'{row} - {base}'] = [[rule(runs[row][flag]) - rule(runs[base][flag]) for flag in both]
                                        for rule in rules]
    out = ['R@1 of the same runs by the last epoch, and by the epoch that is best on the test set, which papers often',
           'report (Reality Check, Section 2.3):', '',
           '| | runs | last epoch | best epoch | best - last |', '|---' * 5 + '|']
    for row, (last, best) in found.items():
        worth = [b - a for a, b in zip(last, best)]
        out.append(f'| {row} | {len(worth)} | {cell(last)} | {cell(best)} | {cell(worth)} |')
    return [*out, '']


def draw(name, path):
    """R@1 over the epochs of each row's runs; a circle at the best epoch, a square at the last. Needs matplotlib."""
    from matplotlib.figure import Figure
    figure = Figure(figsize=(8, 4.5), layout='constrained')
    axes = figure.subplots()
    for number, (row, lines) in enumerate(runs_of(name).items()):
        for repeat, line in enumerate(lines.values()):
            epochs, r = zip(*((one['epoch'], one['R@1']) for one in line.get('rows', [line['last']])))
            best = max(range(1, len(r)), key=r.__getitem__)
            axes.plot(epochs, r, color=f'C{number}', label='' if repeat else row)
            axes.plot(epochs[best], r[best], 'o', epochs[-1], r[-1], 's', color=f'C{number}')
    axes.set(xlabel='epoch', ylabel='R@1 on the test classes; circle: best epoch, square: last')
    axes.legend()
    figure.savefig(path)


def section(name):
    """A table with its title, its text and the changed steps of its rows, as lines of Markdown"""
    lines, table = tables(name), TABLES[name]
    if not lines:
        return []
    names = re.findall(r'--patched (\w+)', ' '.join(table.rows.values()))
    notes = [f'* `{patch}`: {" ".join(PATCHES[patch].__doc__.split())}' for patch in dict.fromkeys(names)]
    return [f'### {table.title}', '', f'`python tests/results.py {name}`', '', *table.text.strip().splitlines(), '',
            *notes, *([''] if notes else []), *lines, '', *choosing(name)]


def page():
    """The text of tests/results.md"""
    out = HEAD.splitlines() + ['']
    for title, text, names in CHAPTERS:
        sections = [line for name in names for line in section(name)]
        if sections:
            out += [f'## {title}', '', *text.strip().splitlines(), *([''] if text else []), *sections]
    return '\n'.join(out).rstrip() + '\n'


def main():
    if sys.argv[1:2] == ['--patched']:
        return run_patched(*sys.argv[2:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('tables', nargs='*', metavar='NAME', choices=[*TABLES, []], default=[])
    parser.add_argument('--jobs', type=int, default=1, help='runs at a time; 0: none')
    parser.add_argument('--draw', metavar='PNG', help='draw R@1 over the epochs of a table (pip install matplotlib)')
    options = parser.parse_args()
    if not options.tables:
        return PAGE.write_text(page())
    worked = []
    for name in options.tables:
        if options.jobs:
            done, table = finished(), TABLES[name]
            wanted = [f'{command} {flag}' for flag in table.repeats for command in table.rows.values()]
            missing = [command for command in wanted if command not in done]
            threads = max(1, os.cpu_count() // options.jobs)
            with ThreadPoolExecutor(options.jobs) as pool:
                worked += pool.map(partial(run, threads=threads), missing)
        print('\n'.join(tables(name) + choosing(name)))
        if options.draw:
            draw(name, options.draw)
    sys.exit(not all(worked))


if __name__ == '__main__':
    main()
