"""The command line: recipes, flags without effect, and flags of resumed runs."""
import os
from pathlib import Path

import pytest
import torch
from cases import CASES
from conftest import SmallNet, make_folder

import common
import train_ms
from common import UsageError, read_checkpoint


@pytest.mark.parametrize('line, message', [
    *((f'{script} {flags}', f'{flags.split()[-2]} has no effect with --')
      for script, case in CASES.items() for flags in case.no_effect),
    *((f'train_ms {flags} 3', f'{flags.split()[-1]} has no effect with --') for flags in (
        '--momentum', '--optimizer adam --momentum', '--decay-rate', '--decay-epochs', '--patience')),
    *((f'{script} --batch-size 4 --per-class {per_class}', 'this loss compares') for per_class in (1, 4) for script in (
        'train_contrastive', 'train_ms', 'train_metrix', 'train_hse --loss epshn')),
    ('train_ms --data x', 'shapes is built in'), ('train_ms --image-size 64 --resize 32', '--resize 32 is smaller'),
    ('train_ms --device cuda:99', 'cuda:99 cannot be used'), ('train_hse --dataset vectors', 'vectors has none'),
    ('train_metrix --mixup input embed --dataset vectors', 'vectors has none'),
    ('train_ms --dataset cub', 'the recipe sets what is no flag of train_ms.py: learning_rate')])
def test_flags_without_effect_or_without_sense_and_unknown_flags_of_a_recipe_are_refused(monkeypatch, line, message):
    monkeypatch.setitem(train_ms.DEFAULTS, 'cub', train_ms.CUB | dict(learning_rate=1))
    script, *flags = line.split()
    with pytest.raises(UsageError, match=message):
        __import__(script).get_args(flags)


@pytest.mark.parametrize('flags, expected', [
    ('folder --weights none', dict(lr=2e-3, freeze_bn=False, image_size=64, arch='resnet18')),
    ('folder --weights absent.pth', dict(lr=3e-5, freeze_bn=True, epochs=41, pool='avg', image_size=227)),
    ('folder --weights imagenet --arch resnet18 --image-size 128', dict(lr=3e-5, arch='resnet18', resize=144)),
    ('cub --image-size 128 --resize 130 --lr 1 --per-class 2', dict(lr=1, image_size=128, resize=130, per_class=2)),
    ('cub --weights none', dict(freeze_bn=False)), ('cub --weights none --freeze-bn', dict(freeze_bn=True)),
    ('sop', dict(eval_every=5)), ('sop --fold 0/4', dict(eval_every=1))])
def test_some_flags_change_the_recipe_and_typed_flags_are_over_it(flags, expected):
    """The learning rate for training from scratch would destroy pretrained weights."""
    args = train_ms.get_args(['--dataset', *flags.split()])
    assert {key: getattr(args, key) for key in expected} == expected


def test_the_flags_of_images_reach_their_transforms():
    flags = '--image-size 20 --resize 30 --min-crop 0.4 --jitter 0.3 --workers 3'.split()
    original, resized = (common.transforms_from(train_ms.get_args([*flags, *more]))
                         for more in (['--no-flip'], ['--crop-from', 'resized']))
    crop, jitter, *_ = original['train_transform'].transforms
    assert (crop.size, crop.scale, jitter.brightness, original['workers']) == ((20, 20), (0.4, 1), (0.7, 1.3), 3)
    resize, _, flip, *_ = resized['train_transform'].transforms
    assert resize.size == resized['transform'].transforms[0].size == [30] and flip.p == 0.5


def test_flags_that_may_change_with_resume_and_flags_that_may_not(run, small, monkeypatch):
    """Where and how a run computes may change, and how long it is, unless the schedule depends on it. The file of
    pretrained weights, and the earlier place of the images, are not needed."""
    def resume(flags=''):
        return vars(train_ms.get_args(['--resume', 'runs/x', '--device', 'cpu', *flags.split()]))
    monkeypatch.setenv('HOME', os.getcwd())
    make_folder(Path('photos/train'), 'abcdefgh', per_class=2)
    torch.save(SmallNet().state_dict(), 'some.pth')
    run(train_ms, *'--name x --data ~/photos --weights some.pth --fold 0/3 --no-flip --schedule constant'.split())
    os.remove('some.pth')
    os.rename('photos', 'moved')
    before, saved = resume(), read_checkpoint('runs/x')
    assert saved['args'] | dict(resume=Path('runs/x'), device=before['device']) == before
    for flags in ('--data moved', '--epochs 9', '--steps 9', '--eval-every 3', '--patience 2', '--compile',
                  '--device meta', '--precision fp32', '--workers 2', '--download'):
        changed = [name for name, value in resume(flags).items() if value != before[name]]
        assert changed == [flags.split()[0][2:].replace('-', '_')]
    assert train_ms.main('--resume runs/x --data moved --device cpu'.split())['epoch'] == 1
    torch.save(saved | dict(args=saved['args'] | dict(schedule='cosine')), 'runs/x/last.pt')
    for flags in ('--lr 1', '--alpha 3', '--seed 5', '--dim 24', '--fold 1/3', '--flip', '--epochs 20', '--steps 20'):
        with pytest.raises(UsageError, match=f'made with another {flags.split()[0]}; start a new run'):
            resume(flags)
    torch.save(saved | dict(script='train_other'), 'runs/x/last.pt')
    with pytest.raises(UsageError, match='made by train_other.py'):
        resume()
