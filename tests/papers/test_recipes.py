"""The recipes of the benchmarks, stated a second time from papers and released code; and the recipes of the demo.

Whoever changes a recipe in a script must change it in cases.py as well, on purpose.
"""
import pytest
from cases import CASES, KEYS
from conftest import SCRIPTS

DEMO = dict(arch='resnet18', weights='none', freeze_bn=False, dim=128, lr=2e-3, clip=0, schedule='cosine',
            weight_decay=1e-4, flip=True, jitter=0, seed=0, steps=0, optimizer='adamw')


def value(text):
    if text in ('True', 'False'):
        return text == 'True'
    return float(text) if text[0].isdigit() else text


def test_every_script_has_an_entry():
    assert CASES.keys() == {*SCRIPTS}, 'tests/papers/cases.py needs an entry for each script'
    for script, case in CASES.items():
        datasets = [line.split()[0] for line in case.recipes.strip().splitlines()]
        assert datasets == ['cub', 'cars', 'sop', 'inshop'], f'{script}: recipes'
        assert case.losses and case.steps, f'{script}: losses and steps'


@pytest.mark.parametrize('script', CASES)
def test_the_recipe_of_all_four_benchmarks(script):
    get_args = __import__(script).get_args
    for line in CASES[script].recipes.strip().splitlines():
        dataset, *values = line.split()
        args = get_args(['--dataset', dataset])
        for key, expected in zip(KEYS, map(value, values), strict=True):
            assert getattr(args, key) == expected, f'{script} {dataset}: {key}'
        assert (args.arch, args.weights, args.flip, args.eval_every) == \
            ('resnet50', 'imagenet', True, 5 if dataset in ('sop', 'inshop') else 1)
        # The recipes with crops of at least 0.16 of the area cut them from the resized image.
        assert args.crop_from == ('resized' if args.min_crop == 0.16 else 'original'), f'{script} {dataset}'
    for datasets, flags, expected in CASES[script].settings:
        for dataset in datasets.split():
            args = get_args(['--dataset', dataset, *flags.split()])
            for key, wanted in expected.items():
                assert getattr(args, key) == wanted, f'{script} --dataset {dataset} {flags}: {key}'


@pytest.mark.parametrize('script', CASES)
def test_the_recipe_of_the_demo(script):
    get_args = __import__(script).get_args
    shapes, folder = get_args([]), get_args(['--dataset', 'folder'])
    for key, expected in DEMO.items():
        assert getattr(shapes, key) == getattr(folder, key) == expected, key
    keys = 'image_size resize min_crop precision eval_every batch_size epochs freeze_epochs'.split()
    assert [getattr(shapes, key) for key in keys] == [32, 32, 1.0, 'fp32', 10, *CASES[script].shapes]
    assert [getattr(folder, key) for key in keys] == [64, 64, 0.5, 'auto', 1, 64, 10, 0]
    assert (shapes.per_class, folder.per_class) == CASES[script].per_class[:2]


# Section 3.1 of the Reality Check; what it does not specify is from the released configuration
REALITY_CHECK = dict(dim=128, freeze_bn=True, image_size=227, resize=256, crop_from='resized', min_crop=0.16,
                     batch_size=32, optimizer='rmsprop', lr=1e-6, momentum=0.9, weight_decay=1e-4, schedule='constant',
                     freeze_epochs=0, clip=0, fold='0/4', eval_every=1, patience=10, epochs=1000, steps=0, flip=True,
                     jitter=0, pool='avg')


@pytest.mark.parametrize('script', CASES)
def test_the_protocol_replaces_the_recipe_of_a_dataset(script):
    get_args = __import__(script).get_args
    for dataset in ('cub', 'cars', 'sop', 'inshop', 'folder'):
        weights = ['--weights', 'imagenet'] if dataset == 'folder' else []
        args = get_args(['--dataset', dataset, '--protocol', 'reality-check', *weights])
        for key, expected in REALITY_CHECK.items():
            assert getattr(args, key) == expected, f'{script} {dataset}: {key}'
        assert args.arch == 'resnet50' and args.per_class == CASES[script].per_class[2]
        assert getattr(args, 'proxy_lr_mult', 6000) == 6000 and getattr(args, 'dropout', 0) == 0
    args = get_args('--dataset sop --protocol reality-check --fold 2/4 --lr 1e-5 --batch-size 64 --image-size 114'
                    .split())
    assert (args.fold, args.lr, args.batch_size, args.image_size, args.resize) == ('2/4', 1e-5, 64, 114, 129)
