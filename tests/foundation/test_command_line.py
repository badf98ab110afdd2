"""The command line: values of flags, flags without effect, recipes, and flags of resumed runs."""
import re
import sys

import pytest
import torch
from cases import CASES
from conftest import SCRIPTS, make_folder

import common
import eval as evaluation
import train_ms
from common import UsageError

# As in cases.py: values between the two signs < are allowed, among them the limits; those outside are rejected.
SHARED = {
    '--image-size': '16 < 17', '--resize': '16 < 17', '--min-crop': '0 < 0.001 1 < 1.1',
    '--jitter': '-0.1 < 0 1 < 1.1', '--dim': '0 < 1', '--epochs': '-1 < 0', '--steps': '-1 < 0',
    '--batch-size': '1 < 2', '--per-class': '-1 < 0',
    '--lr': '-1 x < 0', '--weight-decay': '-1 < 0', '--momentum': '-0.1 < 0 1 < 1.1', '--decay-epochs': '0 < 1',
    '--decay-rate': '-0.1 < 0 1 < 1.1', '--warmup': '-1 < 0', '--clip': '-1 < 0',
    '--workers': '-1 < 0', '--seed': f'-1 < 0 {2 ** 63 - 1} < {2 ** 63}', '--eval-every': '0 < 1',
    '--patience': '0 < 1',
    '--fold': '4/4 -1/4 0/1 0 1/2/3 a/b 0.5/2 < 0/2 3/4', '--dataset': 'flowers < shapes'}

LIMITS = {script: case.limits | (SHARED if script == 'train_ms' else {}) for script, case in CASES.items()}
LIMITS['eval'] = {'--top': '0 < 1', '--ks': '0 < 1', '--dataset': 'flowers < cub'}
NO_EFFECT = {script: case.no_effect for script, case in CASES.items()}
NO_EFFECT['train_ms'] = [
    '--momentum 0.9', '--schedule cosine --decay-epochs 3', '--schedule constant --decay-rate 0.3', '--patience 3',
    *(f'--dataset vectors {flag}' for flag in ('--image-size 64', '--resize 64', '--crop-from resized', '--min-crop 1',
                                               '--jitter 0.1', '--no-flip', '--weights none', '--pool max',
                                               '--freeze-bn', '--freeze-backbone-epochs 1', '--precision bf16'))]
NO_EFFECT['eval'] = ['b --analyse', 'b --sheet x.png', 'b --embed x.npz', 'b --query x.jpg', '--against b --analyse',
                     '--hardest', '--query x.jpg --analyse', '--query x.jpg --embed y.npz', '--query x.jpg --whole']


@pytest.mark.parametrize('script', LIMITS)
def test_values_that_a_flag_accepts_and_rejects(script):
    """Numeric flags reject NaN and infinity."""
    get_args, needed = __import__(script).get_args, ['--checkpoint', 'x'] if script == 'eval' else []
    for flag, line in LIMITS[script].items():
        below, allowed, above = [*line.split('<'), ''][:3]
        for value in [*f'{below} {above}'.split(), 'nan', 'inf', '-inf']:
            with pytest.raises(UsageError, match=f'argument [^:]*{flag}') as raised:
                get_args([*needed, f'{flag}={value}'])
            assert '\n' not in str(raised.value)
        for value in allowed.split():
            try:
                get_args([*needed, f'{flag}={value}'])
            except UsageError as error:                     # the flag may have no effect with these defaults
                assert not re.search(f'argument [^:]*{flag}', str(error))


@pytest.mark.parametrize('script, flags', [(script, flags) for script in NO_EFFECT for flags in NO_EFFECT[script]])
def test_a_flag_without_effect_is_rejected(script, flags):
    flag = re.findall('--[a-z-]+', flags)[-1]
    with pytest.raises(UsageError, match=f'{flag} has no effect with'):
        __import__(script).get_args(['--checkpoint', 'a'] * (script == 'eval') + flags.split())


@pytest.mark.parametrize('script', SCRIPTS)
def test_the_seed_decides_the_network_that_a_script_starts_from(before_training, script):
    first, same, other = (before_training(__import__(script), '--seed', seed).model.linear.weight for seed in '774')
    assert torch.equal(first, same) and not torch.equal(first, other)


@pytest.mark.parametrize('script', SCRIPTS)
def test_arguments_are_those_of_the_process_or_any_objects(script, monkeypatch):
    monkeypatch.setattr(sys, 'argv', [f'{script}.py', '--epochs', '7'])
    found = [__import__(script).get_args(argv) for argv in (None, ['--epochs', 7, '--device', torch.device('cpu')])]
    assert [args.epochs for args in found] == [7, 7]
    assert __import__(script).get_args(['--dataset', 'folder', '--data', 'x=']).data == 'x='


def test_data_are_where_the_flag_says(run, small, tmp_path, monkeypatch):
    """--data may begin with ~, and the folder may have moved when a run is resumed."""
    monkeypatch.setenv('HOME', str(tmp_path))
    make_folder(tmp_path / 'photos', 'abcdefgh', per_class=2)
    run(train_ms, '--data', '~/photos', '--epochs', '3', '--steps', '0', '--name', 'x', '--schedule', 'constant')
    evaluation.main(['--checkpoint', 'runs/x', '--device', 'cpu'])
    (tmp_path / 'photos').rename(tmp_path / 'moved')
    record = train_ms.main('--resume runs/x --data moved --eval-every 2 --epochs 4 --device cpu'.split())
    assert record['epoch'] == 4


@pytest.mark.parametrize('line', ['train_contrastive', 'train_ms', 'train_metrix', 'train_hse --loss epshn'])
def test_batches_without_positive_or_negative_pairs_are_rejected_if_the_loss_needs_them(line):
    script, *flags = line.split()
    get_args = __import__(script).get_args
    for size, message in ('4', '--batch-size 4 with --per-class 4 is a batch of one'), ('1', '--per-class 1 gives'):
        with pytest.raises(UsageError, match=message):
            get_args([*flags, '--batch-size', '4', '--per-class', size])
    assert get_args([*flags, '--batch-size', '8', '--per-class', '4']).per_class == 4


def test_a_missing_recipe_is_named_with_the_flags_that_it_would_have():
    """The message lists the flags without a default. An entry of DEFAULTS or the flags themselves supply the values."""
    recipe = {name: value for name, value in train_ms.CUB.items() if name not in ('lr', 'schedule')}

    def args(*flags):
        parser = common.parser('', file='train_mine.py')
        return common.parse(parser, {'sop': recipe}, ['--device', 'cpu', '--dataset', 'sop', *flags])
    with pytest.raises(UsageError, match='train_mine.py has no recipe for sop: .* or pass --lr, --schedule$'):
        args()
    assert args('--lr', '0.1', '--schedule', 'constant').lr == 0.1


def test_help_shows_the_defaults_of_the_dataset(capsys):
    with pytest.raises(SystemExit) as stop:
        train_ms.main(['--help', '--dataset', 'sop'])
    shown = ' '.join(capsys.readouterr().out.split())
    assert stop.value.code == 0 and 'learning rate (default: 0.0006)' in shown and 'differs from the paper' in shown


@pytest.mark.parametrize('flags, expected', [
    ('folder --weights none', dict(lr=2e-3, freeze_bn=False, image_size=64, arch='resnet18')),
    ('folder --weights absent.pth', dict(lr=3e-5, freeze_bn=True, epochs=41, pool='avg', image_size=227)),
    ('folder --weights imagenet --arch resnet18 --image-size 128', dict(lr=3e-5, arch='resnet18', resize=144)),
    ('cub --weights none', dict(freeze_bn=False)), ('cub --weights none --freeze-bn', dict(freeze_bn=True))])
def test_pretrained_weights_choose_the_recipe_of_a_folder_and_random_ones_train_batchnorm(flags, expected):
    """The learning rate for training from scratch would destroy pretrained weights."""
    args = train_ms.get_args(['--dataset', *flags.split()])
    assert {key: getattr(args, key) for key in expected} == expected


@pytest.mark.parametrize('script, flags, message', [
    ('train_ms', ['--data', ''], 'an argument is empty'), ('train_ms', ['--weights='], 'an argument is empty'),
    ('eval', ['--checkpoint', 'x', '--data', ' '], 'an argument is empty'),
    ('train_ms', ['--dataset'], 'expected one argument'), ('train_ms', ['--batch-siz', '3'], 'unrecognized'),
    ('train_ms', ['--device', 'cuda:99'], 'cuda:99'), ('train_ms', ['--data', 'x'], 'shapes is built in and has no'),
    ('train_ms', ['--image-size', '64', '--resize', '32'], '--resize 32'),
    ('train_ms', ['--arch', 'none'], 'none is for vectors only'),
    ('train_ms', ['--dataset', 'vectors', '--arch', 'resnet18'], 'none is for vectors only')])
def test_a_usage_error_is_one_line(script, flags, message):
    """An error is raised like any other, so that a notebook keeps running; a shell gets exit code 2."""
    with pytest.raises(UsageError, match=message) as raised:
        __import__(script).main(flags)
    assert '\n' not in str(raised.value)


def test_flags_that_may_change_with_resume_and_flags_that_may_not(run, small):
    """Where and how a run computes, and how long it is, may change; flags that would make it another run may not."""
    run(train_ms, '--name', 'x', '--fold', '0/3', '--freeze-bn', '--schedule', 'constant')
    saved = common.read_checkpoint('runs/x')
    torch.save(saved | dict(args=saved['args'] | dict(download=True)), 'runs/x/last.pt')
    before = vars(train_ms.get_args(['--resume', 'runs/x', '--device', 'cpu']))
    assert not before['download'], 'only if it is asked for again'
    for flags in ('--data y', '--epochs 9', '--steps 9', '--eval-every 3', '--patience 2', '--compile', '--device meta',
                  '--precision fp32', '--workers 2', '--download'):
        args = vars(train_ms.get_args(['--resume', 'runs/x', '--device', 'cpu', *flags.split()]))
        assert [name for name in args if args[name] != before[name]] == [flags.split()[0][2:].replace('-', '_')]
    for flags in ('--lr 1', '--alpha 3', '--seed 5', '--min-crop 1', '--dim 24', '--fold 1/3', '--no-flip'):
        flag = flags.split()[0]
        with pytest.raises(UsageError, match=f'made with another {flag}; start a new run'):
            train_ms.main(['--resume', 'runs/x', *flags.split()])
    for flags, message in ('runs/x --name y', '--name has no effect with --resume'), ('nowhere', 'has no last.pt'):
        with pytest.raises(UsageError, match=message):
            train_ms.main(['--resume', *flags.split()])
    torch.save(saved | dict(script='train_other'), 'runs/x/last.pt')
    with pytest.raises(UsageError, match='made by train_other.py'):
        train_ms.main(['--resume', 'runs/x'])
