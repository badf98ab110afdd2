"""The recipe of each benchmark, stated a second time, as papers and released code have it; and those of the demo.

A row that changes in a script must be changed here too, on purpose.
"""
import pytest
from conftest import SCRIPTS
from test_losses import LOSSES
from test_wiring import CASES

import common
import train_ms

KEYS = ('optimizer lr weight_decay momentum epochs batch_size per_class schedule decay_epochs decay_rate warmup clip '
        'dim pool freeze_bn image_size resize min_crop jitter').split()
#                 optim  lr     wd   mom  ep  batch K  schedule st rate wu clip dim pool    frozen crop from area jit
RECIPES = {
    'train_contrastive': '''
        cub       adam   1e-4   1e-4 0    60  100   0  step     10 0.1  5  10   512 avg+max True   224  256  0.08 0
        cars      adam   1e-4   1e-4 0    60  100   0  step     10 0.1  5  10   512 avg+max True   224  256  0.08 0
        sop       adam   3e-5   1e-4 0    60  100   5  step     10 0.25 5  10   512 avg+max False  224  256  0.08 0
        inshop    adam   1e-4   1e-4 0    60  100   5  step     5  0.25 1  10   512 avg+max False  224  256  0.08 0''',
    'train_ms': '''
        cub       adam   3e-5   5e-4 0    41  80    5  step     16 0.1  0  0    512 avg     True   227  256  0.16 0
        cars      adam   3e-5   5e-4 0    30  80    5  step     12 0.1  0  0    512 avg     True   227  256  0.16 0
        sop       adam   6e-4   1e-4 0    60  100   5  step     20 0.25 1  10   512 avg+max False  224  256  0.08 0
        inshop    adam   6e-4   1e-4 0    60  100   5  step     20 0.25 1  10   512 avg+max False  224  256  0.08 0''',
    'train_proxy_anchor': '''
        cub       adamw  1e-4   1e-4 0    60  120   0  step     5  0.5  5  10   512 avg+max True   224  256  0.08 0
        cars      adamw  1e-4   1e-4 0    60  120   0  step     10 0.5  5  10   512 avg+max True   224  256  0.08 0
        sop       adamw  6e-4   1e-4 0    60  180   0  step     20 0.25 1  10   512 avg+max False  224  256  0.08 0
        inshop    adamw  6e-4   1e-4 0    60  180   0  step     20 0.25 1  10   512 avg+max False  224  256  0.08 0''',
    'train_proxynca_pp': '''
        cub       adam   4e-3   0    0    40  32    4  step     20 0.1  5  10   512 max     False  256  288  0.08 0
        cars      adam   4e-3   0    0    40  32    4  step     20 0.1  5  10   512 max     False  256  288  0.08 0
        sop       adam   2.4e-2 0    0    80  192   3  step     40 0.1  5  10   512 max     False  256  288  0.08 0
        inshop    adam   2.4e-2 0    0    80  192   3  constant 40 0.1  5  10   512 max     False  256  288  0.08 0''',
    'train_ccl': '''
        cub       sgd    0.02   5e-4 0    30  128   0  cosine   10 0.5  0  0    512 avg     True   256  288  0.16 0.25
        cars      sgd    0.05   5e-4 0    100 128   0  cosine   10 0.5  0  0    512 avg     True   256  288  0.16 0.25
        sop       sgd    0.003  5e-4 0.99 100 128   0  cosine   10 0.5  0  0    512 avg     False  256  288  0.16 0
        inshop    sgd    0.006  5e-4 0.99 100 128   0  cosine   10 0.5  0  0    512 avg     False  256  288  0.16 0''',
    'train_metrix': '''
        cub       adamw  1e-4   1e-4 0    100 100   0  step     10 0.5  5  10   512 avg+max True   224  256  0.08 0
        cars      adamw  1e-4   1e-4 0    100 100   0  step     10 0.5  5  10   512 avg+max True   224  256  0.08 0
        sop       adamw  3e-5   1e-4 0    100 100   5  step     10 0.25 1  10   512 avg+max False  224  256  0.08 0
        inshop    adamw  1e-4   1e-4 0    100 100   5  step     10 0.25 1  10   512 avg+max False  224  256  0.08 0''',
    'train_hse': '''
        cub       adamw  1e-4   1e-4 0    60  80    5  step     10 0.5  5  10   512 avg+max True   224  256  0.08 0
        cars      adamw  1e-4   1e-4 0    60  80    5  step     10 0.5  5  10   512 avg+max True   224  256  0.08 0
        sop       adamw  3e-4   1e-4 0    60  120   5  step     10 0.25 1  10   512 avg+max False  224  256  0.08 0
        inshop    adamw  3e-4   1e-4 0    60  120   5  step     10 0.25 1  10   512 avg+max False  224  256  0.08 0'''}

# What the rows of single losses change, and the flags of the methods: datasets, flags, values
OTHERS = {
    'train_contrastive': [
        ('shapes', '', dict(form='distance', pos_margin=0, neg_margin=0.5, power=1, margin=0.5, reduction='mean'))],
    'train_ms': [
        ('shapes cub cars', '', dict(alpha=2, beta=50, lam=0.5, epsilon=0.1)),
        ('sop inshop', '', dict(alpha=17.97, beta=75.66, lam=0.77, epsilon=0.39))],
    'train_proxy_anchor': [
        ('shapes folder', '', dict(alpha=32, delta=0.1, proxy_lr_mult=10)),
        ('cub cars sop inshop', '', dict(alpha=32, delta=0.1, proxy_lr_mult=100))],
    'train_proxynca_pp': [
        ('shapes folder', '', dict(loss='proxynca_pp', temperature=1 / 9, proxy_lr_mult=10, eps=1e-8,
                                   optimizer='adamw', pool='max')),
        ('shapes cub', '--loss proxynca', dict(temperature=2)),
        ('cub', '--protocol reality-check --loss proxynca', dict(temperature=1 / 13.98)),
        ('cub cars inshop', '', dict(proxy_lr_mult=1e5, eps=1)), ('sop', '', dict(proxy_lr_mult=1e4, eps=1))],
    'train_ccl': [
        ('shapes', '', dict(s=16, margin=0, lam=2, smoothing=0.1, mu=0.9, dropout=0, pool='avg', variant='ccl')),
        ('shapes', '--variant center_loss', dict(lam=0.03)), ('cub', '--variant center_loss', dict(lam=0.03, lr=0.02)),
        ('cub', '--protocol reality-check --variant center_loss', dict(lam=0.03, per_class=1)),
        ('cub', '--protocol reality-check', dict(lam=2, center_lr_mult=4500)),
        ('cub cars', '', dict(dropout=0.2, smoothing=0.1, s=16, margin=0, lam=2)), ('sop inshop', '', dict(dropout=0))],
    'train_metrix': [
        ('shapes', '', dict(
            loss='ms', mixup=['feature'], pairs='both', hard_negatives=['auto'], alpha=2, strength=0.4, beta=18,
            gamma=75, m=0.77, epsilon=0.39, reduction='mean', proxy_alpha=32, delta=0.1, temperature=1 / 9)),
        ('shapes', '--loss proxy_anchor', dict(proxy_lr_mult=10)),
        ('cub', '--loss proxy_anchor', dict(proxy_lr_mult=100)),
        ('cub', '--protocol reality-check --loss proxy_anchor', dict(proxy_lr_mult=6000, m=0.77)),
        ('shapes folder', '--loss contrastive', dict(m=0.5)),
        ('cub', '--protocol reality-check --loss contrastive', dict(m=0.5)),
        ('cub cars', '--loss contrastive', dict(m=0.5, decay_rate=0.1)),
        ('sop', '--loss contrastive', dict(m=0.5, decay_rate=0.25, warmup=5)),
        ('inshop', '--loss contrastive', dict(m=0.5, decay_rate=0.25, warmup=1))],
    'train_hse': [
        ('shapes folder', '', dict(loss='ms', alpha=0.05, temperature=0.1, kind='cutmix', num=2, combinations=1,
                                   axis='top-bottom', mask_size=16, hybrids='replace')),
        ('cub', '', dict(alpha=0.05, mask_size=50)), ('inshop', '', dict(alpha=0.3)),
        ('sop', '', dict(alpha=0.3, hybrids='append', combinations=12)),
        ('shapes folder', '--loss proxy_anchor', dict(alpha=2, proxy_lr_mult=10)),
        ('cub cars', '--loss proxy_anchor', dict(alpha=2, batch_size=128, per_class=8, proxy_lr_mult=100)),
        ('sop', '--loss proxy_anchor', dict(alpha=2, batch_size=120, per_class=5, hybrids='append')),
        ('shapes', '--loss epshn', dict(alpha=0.1)), ('sop inshop', '--loss epshn', dict(alpha=1)),
        ('cub', '--loss epshn', dict(alpha=0.1, batch_size=128, per_class=8, hybrids='replace', combinations=1)),
        ('cars', '--loss epshn', dict(alpha=0.1, batch_size=128, per_class=16)),
        ('cub', '--loss npair', dict(alpha=0.1, dim=64, batch_size=128, per_class=8)),
        ('sop cars inshop', '--loss npair', dict(dim=64)), ('cub', '--loss contrastive', dict(alpha=0.1, per_class=8)),
        ('cub', '--protocol reality-check', dict(alpha=0.05)),
        ('cub', '--protocol reality-check --loss epshn', dict(alpha=0.1)),
        ('cub', '--protocol reality-check --loss proxy_anchor', dict(alpha=2, proxy_lr_mult=6000))]}
DEMO = dict(arch='resnet18', weights='none', freeze_bn=False, dim=128, batch_size=64, lr=2e-3, clip=0,
            schedule='cosine', warmup=0, weight_decay=1e-4, flip=True, jitter=0, seed=0, steps=0, optimizer='adamw')


def value(text):
    if text in ('True', 'False'):
        return text == 'True'
    return float(text) if text[0].isdigit() else text


@pytest.mark.parametrize('script', SCRIPTS)
def test_every_script_has_its_recipes_losses_and_flags_tested(script):
    """What a further script of a paper needs beside SCRIPTS"""
    assert script in RECIPES and script in OTHERS, f'{script} is not tested: state its recipes here'
    tested = any(loss.startswith(script.removeprefix('train_')) for loss in LOSSES)
    assert tested, f'{script} is not tested: add its loss to LOSSES, test_losses.py'
    wired = {case[0].__name__ for case in CASES}
    assert script in wired, f'{script} is not tested: add its flags to CASES, test_wiring.py'


@pytest.mark.parametrize('script', RECIPES)
def test_the_recipe_of_all_four_benchmarks(script):
    get_args = __import__(script).get_args
    for line in RECIPES[script].strip().splitlines():
        dataset, *values = line.split()
        args = get_args(['--dataset', dataset])
        for key, expected in zip(KEYS, map(value, values), strict=True):
            assert getattr(args, key) == expected, f'{script} {dataset}: {key}'
        assert (args.arch, args.weights, args.flip, args.eval_every) == \
            ('resnet50', 'imagenet', True, 5 if dataset in ('sop', 'inshop') else 1)
        # The recipes with crops of at least 0.16 of the area cut them from the resized image.
        assert args.crop_from == ('resized' if args.min_crop == 0.16 else 'original'), f'{script} {dataset}'
    for datasets, flags, expected in OTHERS[script]:
        for dataset in datasets.split():
            args = get_args(['--dataset', dataset, *flags.split()])
            for key, wanted in expected.items():
                assert getattr(args, key) == wanted, f'{script} --dataset {dataset} {flags}: {key}'


@pytest.mark.parametrize('script', RECIPES)
def test_the_recipe_of_the_demo(script):
    get_args = __import__(script).get_args
    shapes, folder = get_args([]), get_args(['--dataset', 'folder'])
    for key, expected in DEMO.items():
        assert getattr(shapes, key) == getattr(folder, key) == expected, key
    keys = 'image_size resize min_crop epochs eval_every'.split()
    assert [getattr(shapes, key) for key in keys] == [32, 32, 1.0, 8, 4]
    assert [getattr(folder, key) for key in keys] == [64, 64, 0.5, 10, 1]
    assert shapes.per_class == (0 if script in ('train_ccl', 'train_proxy_anchor', 'train_proxynca_pp') else 4)
    assert folder.per_class == (0 if script == 'train_ccl' else 4)


# Section 3.1 of the Reality Check, and the released configuration where it is silent
REALITY_CHECK = dict(dim=128, freeze_bn=True, image_size=227, resize=256, crop_from='resized', min_crop=0.16,
                     batch_size=32, optimizer='rmsprop', lr=1e-6, momentum=0.9, weight_decay=1e-4, schedule='constant',
                     warmup=0, clip=0, fold='0/4', eval_every=1, patience=10, epochs=1000, steps=0, flip=True, jitter=0,
                     pool='avg')
ONE_PER_CLASS = ('train_proxy_anchor', 'train_proxynca_pp', 'train_ccl')


@pytest.mark.parametrize('script', RECIPES)
def test_the_protocol_replaces_the_recipe_of_a_dataset(script, capsys):
    get_args = __import__(script).get_args
    for dataset in ('cub', 'cars', 'sop', 'inshop', 'folder'):
        weights = ['--weights', 'imagenet'] if dataset == 'folder' else []
        args = get_args(['--dataset', dataset, '--protocol', 'reality-check', *weights])
        assert 'this is --fold 0/4, one of four' in capsys.readouterr().out
        for key, expected in REALITY_CHECK.items():
            assert getattr(args, key) == expected, f'{script} {dataset}: {key}'
        assert args.arch == 'resnet50' and args.per_class == (1 if script in ONE_PER_CLASS else 4)
        assert getattr(args, 'proxy_lr_mult', 6000) == 6000 and getattr(args, 'dropout', 0) == 0
    args = get_args('--dataset sop --protocol reality-check --fold 2/4 --lr 1e-5 --batch-size 64 --image-size 114'
                    .split())
    assert (args.fold, args.lr, args.batch_size, args.image_size, args.resize) == ('2/4', 1e-5, 64, 114, 129)
    assert capsys.readouterr().out == ''


@pytest.mark.parametrize('flags', ['', '--dataset folder', '--dataset cub --weights none'])
def test_the_protocol_is_refused_without_pretrained_weights(flags):
    with pytest.raises(common.UsageError, match='--protocol reality-check fine-tunes.*pretrained weights'):
        train_ms.get_args(['--protocol', 'reality-check', *flags.split()])
