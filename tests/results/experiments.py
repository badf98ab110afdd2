"""The experiments on the results page, as data. results.py makes their runs and writes their tables.

To add a row, add its command. To add an experiment, add an Experiment. Then run `python tests/results/results.py NAME`.
"""
from typing import NamedTuple


class Experiment(NamedTuple):
    name: str
    about: str              # what the rows have in common, above the table
    rows: dict              # {name: command without python, the shared flags and the repeat}
    repeats: list           # each command is run with each of these flags
    flags: str = ''         # of all commands
    differences: list = []  # (row, row that is subtracted), or (row, row, difference in R@1 that the paper reports)
    columns: tuple = ('R@1 before', 'R@1', 'MAP@R before', 'MAP@R', 's+', 's-')     # see results.value
    papers: dict = {}       # {row: R@1 that its paper reports}

    def command(self, row):
        return f'{self.rows[row]} {self.flags}'.strip()


def seeds(number):
    return [f'--seed {n}' for n in range(number)]


def reduced(flags):
    """The flags of a run on CUB, with JPEG files of 256 px in data/256"""
    return flags.replace('--data data', '--data data/256')


FOLDS = [f'--fold {n}/4' for n in range(4)]
# All of CUB-200-2011: 100 classes for training (5,864 photographs), 100 for the test (5,924)
CUB = '--dataset cub --data data --freeze-backbone-epochs 1'
RESNET18 = '--weights data/resnet18.pth --arch resnet18 --image-size 112'
SMALL = f'{CUB} {RESNET18} --epochs 6 --eval-every 6'
# Metrix's commands for ms on CUB, with a fifth of their epochs. Those without mixup have the short schedule.
LONG = '--epochs 20 --decay-epochs 2'
SHORT = '--epochs 12 --decay-epochs 1'
MIXUP = f'{CUB} {RESNET18} --lr 3.3e-05 --eval-every 4'
RESNET50 = '--arch resnet50_v1 --weights data/resnet50_v1.pth'
FULL = f'--dataset cub --data data/full {RESNET50}'
# R@1 on CUB in the papers
PAPERS = {'proxy_anchor': 69.7, 'contrastive': 64.7, 'ms': 65.7, 'proxynca_pp': 69.0, 'ccl': 71.8, 'metrix': 71.4,
          'metrix, none': 67.8, 'hse': 67.6, 'hse, no hybrids': 65.7}
TUNED = '--per-class 4 --batch-size 128 --optimizer adamw --pool avg+max --freeze-backbone-epochs 0 --decay-rate 0.3'
STEP, FROZEN = '--schedule step', '--freeze-backbone-epochs 1 --eval-every 4'
BY_EPOCH = tuple(f'R@1 after {epoch}' for epoch in (4, 8, 12, 16, 20))
FLOWERS = ('--dataset folder --data data/flowers --weights data/resnet18.pth --arch resnet18 --image-size 96 '
           '--epochs 4 --decay-epochs 2 --eval-every 4 --freeze-backbone-epochs 1 --lr 3.3e-05')

# Mixup of ms with fewer mixed examples, and as released; and mixup of contrastive as released
MIXTURES = {
    'none': 'train_metrix.py --mixup none', 'feature': 'train_metrix.py --mixup feature',
    '3 negatives': 'train_metrix.py --mixup feature --hard-negatives 3',
    '20 negatives': 'train_metrix.py --mixup feature --hard-negatives 20',
    'strength 0.1': 'train_metrix.py --mixup feature --strength 0.1',
    'pos-neg': 'train_metrix.py --mixup feature --pairs pos-neg',
    'anc-neg': 'train_metrix.py --mixup feature --pairs anc-neg',
    'none, adam': 'train_metrix.py --mixup none --optimizer adam --weight-decay 1e-2',
    'released': 'tests/results/patches.py released --mixup embed --optimizer adam'}
CONTRASTIVE = {f'contrastive, {mixup}': 'tests/results/patches.py released_contrastive --loss contrastive '
               f'--mixup {mixup}' for mixup in ('none', 'feature')}
DIFFERENCES = [*((row, 'none') for row in [*MIXTURES][1:]), ('3 negatives', 'feature'), ('strength 0.1', 'feature'),
               ('released', 'none, adam'), ('contrastive, feature', 'contrastive, none', 2.7)]

EXPERIMENTS = [
    Experiment(
        'shapes', 'Each script without flags, one thread per run.',
        {'contrastive': 'train_contrastive.py', 'ms': 'train_ms.py', 'proxy_anchor': 'train_proxy_anchor.py',
         'proxynca_pp': 'train_proxynca_pp.py', 'ccl': 'train_ccl.py', 'metrix': 'train_metrix.py',
         'hse': 'train_hse.py', 'metrix, none': 'train_metrix.py --mixup none'},
        seeds(10), differences=[('metrix', 'metrix, none'), ('hse', 'ms'), ('proxy_anchor', 'ms')]),
    Experiment(
        'resnet50', 'CUB, photographs in full size, ResNet-50, 224 px (ProxyNCA++ and CCL 256). Each script with its '
        'recipe of CUB and a short schedule: eight epochs (`proxy_anchor` nine), the first with a frozen backbone (not '
        'in ms and CCL), and a step of the learning rate after six (`proxy_anchor`: after four and eight; early: after '
        'every two; CCL: its cosine). Tuned: batches and optimizer of `tuned_rates`, its best rate, after four epochs '
        'times 0.3. `rates`: sum of the rates of the backbone over the epochs in which it learns, as a multiple of the '
        'first.',
        {'proxy_anchor': 'train_proxy_anchor.py --epochs 9 --freeze-backbone-epochs 1 --eval-every 3 --decay-epochs 4',
         'contrastive': f'train_contrastive.py --epochs 8 {FROZEN} --decay-epochs 6',
         'ms': 'train_ms.py --epochs 8 --eval-every 4 --decay-epochs 6',
         'ccl': 'train_ccl.py --epochs 8 --eval-every 4',
         'proxynca_pp': f'train_proxynca_pp.py --epochs 8 {FROZEN} --decay-epochs 6',
         'metrix, none': f'train_metrix.py --mixup none --epochs 8 {FROZEN} --decay-epochs 6',
         'metrix': f'train_metrix.py --mixup feature --epochs 8 {FROZEN} --decay-epochs 6',
         'metrix, none, early': f'train_metrix.py --mixup none --epochs 8 {FROZEN} --decay-epochs 2',
         'metrix, early': f'train_metrix.py --mixup feature --epochs 8 {FROZEN} --decay-epochs 2',
         'hse, early': f'train_hse.py --epochs 8 {FROZEN} --decay-epochs 2'} | {
            f'{loss}, tuned': f'train_{loss}.py {TUNED} --lr {lr} --epochs 8 --decay-epochs 4 --eval-every 4'
            for loss, lr in (('contrastive', '4e-5'), ('ms', '8e-5'))},
        seeds(1), FULL, [('metrix', 'metrix, none', 3.6), ('metrix, early', 'metrix, none, early', 3.6)],
        ('rates, recipe', 'rates', 'R@1 before', 'R@1', 'best R@1', 'train R@1', 'R@8', 'MAP@R'),
        PAPERS | {f'{row}, early': reported for row, reported in PAPERS.items()}),
    Experiment(
        'tuned_rates', 'CUB, photographs in full size, ResNet-50, on the validation classes of a fold: which learning '
        'rate has the highest MAP@R with the batches of the tuned baselines of Liao et al.?',
        {f'{loss}, {lr}': f'train_{loss}.py {TUNED} --lr {lr} --epochs 4 --decay-epochs 2 --eval-every 4'
         for loss, rates in (('ms', ('5e-5', '8e-5', '1.6e-4')), ('contrastive', ('2e-5', '4e-5', '8e-5')))
         for lr in rates}, FOLDS[:1], FULL),
    Experiment(
        'resnet50_256', 'As `resnet50`, with photographs of 256 px and other schedules: `proxy_anchor` and '
        '`contrastive` have nearly the `rates` of their recipes, the others a third to 0.6. `proxynca_pp` was ended '
        'after 15 of 20 epochs, `hse, no hybrids` after 18 of 22, where `hse` has 63.1.',
        {row: f'{script} --epochs {epochs} --freeze-backbone-epochs {frozen} --eval-every {every}'
              + (f' --decay-epochs {decay}' if decay else '')
         for row, script, epochs, frozen, every, decay in (
             ('proxy_anchor', 'train_proxy_anchor.py', 25, 5, 7, 5),
             ('contrastive', 'train_contrastive.py', 20, 3, 5, 8),
             ('ms', 'train_ms.py', 20, 0, 5, 8),
             ('proxynca_pp', 'train_proxynca_pp.py', 20, 3, 5, 10),
             ('ccl', 'train_ccl.py', 18, 0, 5, None),
             ('metrix', 'train_metrix.py --mixup feature', 27, 3, 7, 4),
             ('metrix, none', 'train_metrix.py --mixup none', 27, 3, 7, 4),
             ('hse', 'train_hse.py', 22, 3, 6, 4),
             ('hse, no hybrids', 'train_hse.py --alpha 0', 22, 3, 6, 4))},
        seeds(1), f'--dataset cub --data data {RESNET50}',
        [('metrix', 'metrix, none', 3.6)], ('epochs', 'rates, recipe', 'rates', 'R@1 before', 'R@1', 'best R@1',
                                              'R@8', 'MAP@R'),
        PAPERS),
    Experiment(
        'heads', 'CUB. Only a linear head learns, on the pooled features of the frozen ResNet-50, which features.py '
        'writes. Each script with its recipe of vectors. The learning rate is the best of 1e-3, 3e-4, 1e-4 and 3e-5 on '
        'the validation classes of `--fold 0/4`, by MAP@R, without mixup.',
        {'contrastive': 'train_contrastive.py --lr 1e-4', 'ms': 'train_ms.py --lr 1e-4',
         'proxy_anchor': 'train_proxy_anchor.py --lr 3e-4', 'proxynca_pp': 'train_proxynca_pp.py --lr 3e-4',
         'ccl': 'train_ccl.py --lr 1e-4', 'ccl, lam 0': 'train_ccl.py --lam 0 --lr 1e-4'} | {
            f'metrix {loss}, {mixup}': f'train_metrix.py --loss {loss} --mixup {mixup} {flags}'
            for loss, flags in (('ms', '--lr 1e-4'), ('contrastive', '--m 0.5 --lr 1e-4'),
                                ('proxy_anchor', '--lr 3e-4'), ('proxynca_pp', '--lr 3e-4'))
            for mixup in ('none', 'embed')},
        seeds(10), '--dataset vectors --data data/heads --eval-every 100',
        [*((f'metrix {loss}, embed', f'metrix {loss}, none', paper) for loss, paper in (
            ('ms', 2.4), ('contrastive', 1.7), ('proxy_anchor', 0.9), ('proxynca_pp', 1.1))),
         ('ccl', 'ccl, lam 0', 0.7), ('proxy_anchor', 'ms', 2.7)]),
    Experiment(
        'recipes', 'CUB, ResNet-18, 112 px. Each script with its recipe of CUB, but fewer epochs.',
        {'contrastive': 'train_contrastive.py --decay-epochs 3 --lr 0.0001',
         'ms': 'train_ms.py --decay-epochs 3 --lr 9e-05',
         'proxy_anchor': 'train_proxy_anchor.py --decay-epochs 3 --lr 0.0001',
         'proxynca_pp': 'train_proxynca_pp.py --decay-epochs 3 --lr 0.012',
         'ccl': 'train_ccl.py --lr 0.02', 'ccl, lam 0': 'train_ccl.py --lam 0 --lr 0.02'},
        seeds(3), SMALL,
        [('proxy_anchor', 'ms', 2.7), ('proxy_anchor', 'contrastive'), ('ccl', 'ccl, lam 0', 0.7)]),
    Experiment(
        'metrix', "CUB, ResNet-18, 112 px. Mixup with three losses. The paper's differences are within Table 5 of "
        'Metrix.',
        {f'{loss}, {mixup}': f'train_metrix.py --loss {loss} --mixup {mixup} {flags}'
         for loss, flags, mixups in (('ms', '--lr 3.3e-05', ('none', 'feature', 'embed')),
                                     ('proxy_anchor', '--lr 0.0001', ('none', 'feature')),
                                     ('contrastive', '--m 0.5 --lr 0.0001', ('none', 'feature')))
         for mixup in mixups},
        seeds(3), f'{SMALL} --decay-epochs 3',
        [('ms, feature', 'ms, none', 3.6), ('ms, embed', 'ms, none', 2.4),
         ('proxy_anchor, feature', 'proxy_anchor, none', 1.5)]),
    Experiment(
        'margin', 'CUB, JPEG files of 256 px, ResNet-18, 112 px, on the validation classes of a fold: which margin of '
        'contrastive has the highest MAP@R without mixup? The paper does not state it.',
        {f'm {m}': f'train_metrix.py --loss contrastive --mixup none --m {m} --lr 1e-4 --decay-epochs 3'
         for m in (0.5, 0.6, 0.7, 0.8, 0.875)},
        ['--fold 0/4'], reduced(SMALL)),
    Experiment(
        'hse', "CUB, ResNet-18, 112 px. Hybrids with three losses. Differences in the paper: Table 2 of HSE.",
        {f'{loss}, {hybrids}': f'train_hse.py --loss {loss}{alpha} --lr {lr}'
         for loss, lr in (('ms', 3.3e-5), ('proxy_anchor', 1e-4), ('epshn', 3.3e-5))
         for hybrids, alpha in (('no hybrids', ' --alpha 0'), ('hybrids', ''))},
        seeds(3), f'{SMALL} --decay-epochs 3',
        [(f'{loss}, hybrids', f'{loss}, no hybrids', paper)
         for loss, paper in (('ms', 1.9), ('proxy_anchor', 1.2), ('epshn', 2.0))]),
    Experiment(
        'flowers', "Photographs of Oxford's 102 classes of flowers, of which the first half is for training. ms with "
        'feature mixup, and without its attraction (push).',
        {'none': 'train_metrix.py --mixup none', 'feature': 'train_metrix.py --mixup feature',
         'push': 'tests/results/patches.py push --mixup feature'},
        seeds(3), FLOWERS, [('feature', 'none'), ('push', 'none'), ('push', 'feature')]),
    Experiment(
        'mixup', 'CUB, ResNet-18, 112 px, ms. Why does feature mixup lower R@1? Schedules are those of the released '
        'commands for mixup (long) and without it (short), in a fifth of the epochs; all other rows have the long one. '
        'The changed losses are in patches.py.',
        {f'{mixup}, {name}': f'train_metrix.py --mixup {mixup} {schedule}'
         for name, schedule in (('long', LONG), ('short', SHORT)) for mixup in ('none', 'feature')} | {
            name: f'tests/results/patches.py {name} --mixup feature {LONG}'
            for name in ('shared', 'hardest', 'push')} | {
            f'{mixup}, {flags}': f'train_metrix.py --mixup {mixup} --{flags} {LONG}'
            for flags in ('m 0.5', 'per-class 5') for mixup in ('none', 'feature')},
        seeds(3), MIXUP,
        [('feature, long', 'none, long', 3.6), ('feature, short', 'none, short'), ('none, long', 'none, short'),
         ('feature, long', 'none, short'),
         *((patch, base) for patch in ('shared', 'hardest', 'push') for base in ('none, long', 'feature, long')),
         *((f'feature, {flags}', f'none, {flags}') for flags in ('m 0.5', 'per-class 5'))]),
    Experiment(
        'late', 'The runs of `mixup` by epoch: does mixup pay late?',
        {f'{mixup}, long': f'train_metrix.py --mixup {mixup} {LONG}' for mixup in ('none', 'feature')},
        seeds(3), MIXUP, [('feature, long', 'none, long')], BY_EPOCH),
    Experiment(
        'mixup_shapes', 'shapes, ms. The same questions. The recipe of shapes has 4 images per class; per-class 0 are '
        'random batches.',
        {'none': 'train_metrix.py --mixup none', 'feature': 'train_metrix.py'} | {
            patch: f'tests/results/patches.py {patch}' for patch in ('shared', 'hardest', 'push', 'softer')} | {
            f'{mixup}, {name}': f'train_metrix.py{flag} {flags}'
            for name, flags in (('m 0.5', '--m 0.5'), ('per-class 0', '--per-class 0'),
                                ('short', f'{STEP} {SHORT} {FROZEN}'), ('long', f'{STEP} {LONG} {FROZEN}'))
            for mixup, flag in (('none', ' --mixup none'), ('feature', ''))},
        seeds(5), differences=[
            ('feature', 'none'), *((patch, 'none') for patch in ('shared', 'hardest', 'push', 'softer')),
            *((patch, 'feature') for patch in ('hardest', 'push', 'softer')),
            *((f'feature, {name}', f'none, {name}') for name in ('m 0.5', 'per-class 0', 'short', 'long')),
            ('none, long', 'none, short'), ('feature, long', 'none, short')]),
    Experiment(
        'late_shapes', 'The runs of `mixup_shapes` by epoch.',
        {'none, long': f'train_metrix.py --mixup none {STEP} {LONG} {FROZEN}',
         'feature, long': f'train_metrix.py {STEP} {LONG} {FROZEN}'},
        seeds(5), differences=[('feature, long', 'none, long')], columns=BY_EPOCH),
    Experiment(
        'mixtures', 'CUB, JPEG files of 256 px, ResNet-18, 112 px. ms with fewer mixed examples, and the losses of the '
        'released code. ms has the long schedule, and contrastive a fifth of its released one.',
        {row: f'{command} --lr 3.3e-05 {LONG}' for row, command in MIXTURES.items()} | {
            row: f'{command} --lr 1e-4 --epochs 12 --decay-epochs 2' for row, command in CONTRASTIVE.items()}, seeds(3),
        reduced(f'{CUB} {RESNET18} --eval-every 20'), DIFFERENCES),
    Experiment(
        'mixtures_shapes', 'shapes. The same rows.', MIXTURES | CONTRASTIVE, seeds(5), '--device cpu', DIFFERENCES),
    Experiment(
        'noise', "shapes, with wrong training labels. The paper's differences, in Table 3, are between CCL and "
        'the NSoftmax of another paper, with Inception.',
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
        FOLDS, differences=[*((f'K = {k}, appended', f'K = {k}, none') for k in (2, 4, 8)),
                            ('K = 2, none', 'K = 4, none'), ('K = 8, none', 'K = 4, none')]),
]
