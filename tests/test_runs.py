"""Runs, checkpoints, the command line, and mistakes in use."""
import json
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from unittest.mock import Mock

import pytest
import torch
from conftest import ROOT, SmallNet, draw_folder
from PIL import Image

import common
import train_ms
from common import UsageError


def rows_of(name):
    return [json.loads(line) for line in open(f'runs/{name}/log.jsonl')]


# ---- logs and folders

def test_a_run_logs_and_prints_a_row_per_epoch(run, small, capsys):
    """A flat object per evaluated epoch is logged, and the last epoch is always evaluated."""
    run(train_ms, '--epochs', '5', '--steps', '0', '--eval-every', '2', '--name', 'mine')
    rows = rows_of('mine')
    assert [row['epoch'] for row in rows] == [0, 2, 4, 5]
    assert rows[0]['loss'] is None and [row['minutes'] for row in rows] == sorted(row['minutes'] for row in rows)
    wanted = {'epoch', 'loss', 'R@1', 'R@2', 'R@4', 'R@8', 'RP', 'MAP@R', 'images_per_second', 'minutes'}
    for row in rows:
        assert wanted <= row.keys() and not any(isinstance(value, (dict, list)) for value in row.values())
    out = capsys.readouterr().out
    assert re.search(r'epoch +loss +R@1 +R@2 +R@4 +R@8 +MAP@R +s\+ +s- +no-pos +img/s +min', out)
    assert re.search(r'\n +0 +- +\d', out) and re.search(r'\n +1 +\d\.\d{4}( +-){7} +\d+% ', out)
    assert out.endswith('Next: python eval.py --checkpoint runs/mine/last.pt\n')


def test_the_summary_claims_no_more_than_is_known(run, small, capsys):
    draw_folder(common.Path('x/train'), 'ab', per_class=4)
    draw_folder(common.Path('x/test'), 'bc', per_class=4)
    for flags, said in (('--data x', '1 of its classes are in the training set as well, which flatters this number'),
                        ('', 'none of these classes is in the training set.'),
                        ('--weights some.pth', 'but the pretrained weights may have seen some.')):
        run(train_ms, '--epochs', '0', *flags.split())
        assert said in capsys.readouterr().out


def test_default_names_count_up_and_any_other_is_that_of_a_new_folder(run, small):
    run(train_ms)
    run(train_ms)
    assert sorted(os.listdir('runs')) == ['ms-folder-1', 'ms-folder-2']
    for name in ('ms-folder-1', '../up', 'a/b', '..', '.', '/tmp/x'):
        message = 'exists already' if name == 'ms-folder-1' else '--name .* is not the name of one folder'
        with pytest.raises(UsageError, match=message):
            run(train_ms, '--name', name)


# ---- resuming

@pytest.mark.parametrize('script, flags', [
    ('train_ms', ''), ('train_proxy_anchor', '--optimizer rmsprop --momentum 0.5'), ('train_ccl', '--variant cluster'),
    ('train_ccl', '--variant center_loss --optimizer sgd --momentum 0.9'), ('train_metrix', '--mixup input embed'),
    ('train_hse', '--loss proxy_anchor')])
def test_a_resumed_run_repeats_the_uninterrupted_one(run, small, capsys, script, flags):
    """Of three epochs, with another learning rate in each; the first part ends with the second epoch."""
    module, flags = __import__(script), f'--epochs 3 --lr 0.01 --schedule step --decay-epochs 1 {flags}'.split()
    run(module, *flags, '--steps', '0', '--name', 'whole')
    run(module, *flags, '--steps', '6', '--name', 'halved')
    assert f'After a stop, this goes on: python {script}.py --resume runs/halved\n' in capsys.readouterr().out
    assert len(rows_of('halved')) == 3
    module.main(['--resume', os.path.abspath('runs/halved'), '--steps', '0', '--device', 'cpu'])
    for one, other in zip(rows_of('whole'), rows_of('halved'), strict=True):
        assert all(one[key] == other[key] for key in one.keys() - {'images_per_second', 'minutes'}), (one, other)
    one, other = map(common.read_checkpoint, ('runs/whole', 'runs/halved'))
    assert all(torch.equal(value, other['model'][key]) for key, value in one['model'].items())
    assert all(torch.equal(value, other['learned'][key]) for key, value in one['learned'].items())
    assert {**one['args'], 'data': ''} == {**other['args'], 'data': ''} and one['classes'] == other['classes']


@pytest.mark.parametrize('schedule', ['cosine', 'constant'])
def test_resume_with_another_number_of_steps_says_that_it_is_another_run(run, small, capsys, schedule):
    run(train_ms, '--schedule', schedule, '--name', 'mine')
    for flag in ('--epochs', '--steps', '--eval-every'):
        train_ms.get_args(['--resume', 'runs/mine', flag, '9'])
        said = 'the learning rate takes another course' in capsys.readouterr().out
        assert said == (schedule == 'cosine' and flag != '--eval-every')


@pytest.mark.parametrize('classes, per_class', [('bcde', 5), ('abcde', 4)])
def test_a_run_goes_on_with_the_images_that_it_began_with(run, small, tmp_path, classes, per_class):
    """Not with more images, nor with other classes: with a new class a, it would train a and b, and test c."""
    draw_folder(tmp_path / 'mine', 'bcde', per_class=4)
    run(train_ms, '--name', 'x', '--data', 'mine')
    shutil.rmtree('mine')
    draw_folder(tmp_path / 'mine', classes, per_class)
    with pytest.raises(UsageError, match='runs/x was trained on other images than mine holds'):
        train_ms.main(['--resume', 'runs/x', '--device', 'cpu'])


def test_a_resumed_run_needs_no_file_of_weights(run, small, monkeypatch):
    asked = []
    monkeypatch.setattr(common, 'load_resnet', lambda arch, weights: asked.append(weights) or SmallNet())
    run(train_ms, '--name', 'mine', '--weights', 'gone.pth')
    train_ms.main(['--resume', 'runs/mine', '--steps', '4', '--device', 'cpu'])
    assert asked == ['gone.pth', 'none'] and common.read_checkpoint('runs/mine')['args']['weights'] == 'gone.pth'


def test_a_made_up_checkpoint_does_not_choose_what_is_written(run, small):
    """Of its arguments only flags count, and no paths and no names of files."""
    run(train_ms, *'--name mine --no-flip --epsilon off --fold 0/3 --protocol reality-check --weights imagenet'.split())
    parts = common.read_checkpoint('runs/mine')
    assert not {'cache', 'resume', 'name', 'device', 'show_batch', 'changed', 'script'} & parts['args'].keys()
    odd = dict(cache='/elsewhere', name='../x', resume='y', show_batch='z.png', script='train_ccl', changed=1, help=1)
    torch.save(parts | dict(args=odd | parts['args']), 'runs/mine/last.pt')
    args = train_ms.get_args(['--resume', 'runs/mine'])
    assert (args.flip, args.epsilon, args.dim, args.dataset, args.fold) == (False, 'off', 16, 'folder', '0/3')
    assert (args.protocol, args.lr, args.optimizer) == ('reality-check', 1e-6, 'rmsprop')
    assert (args.cache, args.name, args.show_batch) == (common.Path('cache'), None, None)
    assert (args.resume, args.script, args.changed) == (common.Path('runs/mine'), 'train_ms', {'resume'})
    assert not hasattr(args, 'help')
    torch.save(parts | dict(args=[1]), 'runs/mine/last.pt')
    with pytest.raises(common.UsageError, match='is no checkpoint of these scripts'):
        train_ms.get_args(['--resume', 'runs/mine'])


# ---- checkpoints and run folders

def test_a_checkpoint_embeds_a_picture_as_the_run_did(run, folder):
    """With a real ResNet"""
    run(train_ms, '--name', 'mine', '--precision', 'fp32')
    model = common.load_checkpoint('runs/mine/last.pt', precision='fp32')
    z = common.embed(model, common.load_dataset('folder', folder, 32, 32, 'cache').query)
    with torch.no_grad():
        alone = model(model.transform(Image.open(folder / 'test/car0/0.jpg'))[None])
    assert z.dtype == torch.float32 and torch.allclose(alone[0], z[0], atol=1e-4)
    assert model.args['dataset'] == 'folder' and model.classes == [f'bird{i}' for i in range(6)]
    torch.nn.Linear(16, 2)(z).sum().backward()              # embeddings are tensors that can be learned from


class Malicious:
    def __reduce__(self):
        return os.system, ('touch hacked',)


@pytest.mark.parametrize('save', [partial(pickle.dump, protocol=2), torch.save])
def test_a_malicious_pickle_is_not_opened(tmp_path, monkeypatch, save):
    monkeypatch.chdir(tmp_path)
    with open('evil.pt', 'wb') as file:
        save(Malicious(), file)
    with pytest.raises(UsageError, match='evil.pt'):
        common.load_checkpoint('evil.pt')
    assert not os.path.exists('hacked')


def test_what_a_killed_process_left_is_put_in_order(run, small):
    """A row that the log lost, and one that no checkpoint knows; temporary files: test_datasets.py"""
    run(train_ms, '--name', 'my [best] run', '--epochs', '2', '--steps', '0')
    log = common.Path('runs/my [best] run/log.jsonl')
    whole = log.read_text()
    for left in (whole.split('\n')[0] + '\n', whole + whole.split('\n')[2].replace('"epoch": 2', '"epoch": 3'), '{"ep'):
        log.write_text(left)
        train_ms.main(['--resume', 'runs/my [best] run', '--device', 'cpu'])
        assert log.read_text() == whole
    assert os.listdir('runs') == ['my [best] run']


# ---- NaN

@pytest.mark.parametrize('bad_step, noticed', [(2, 20), (20, 20), (21, 40)])
def test_a_loss_that_is_no_number_stops_within_twenty_steps(run, small, monkeypatch, bad_step, noticed):
    """At whichever step it comes, not only at the last one."""
    draw_folder(common.Path('many'), 'abcd', per_class=50, size=8)
    steps, real = [], train_ms.multi_similarity_loss

    def loss(z, *rest):
        steps.append(1)
        return real(z, *rest) * (float('nan') if len(steps) == bad_step else 1)
    monkeypatch.setattr(train_ms, 'multi_similarity_loss', loss)
    with pytest.raises(UsageError, match=f'the loss is nan at epoch 1, step {noticed} of 50 or up to 19 before'):
        run(train_ms, '--data', 'many', '--name', 'broken', '--steps', '50', '--batch-size', '2', '--per-class', '0')
    assert len(steps) == noticed and common.read_checkpoint('runs/broken')['epoch'] == 0


def test_weights_that_are_no_numbers_do_not_overwrite_a_checkpoint(run, small, monkeypatch):
    """An evaluation would notice them, too, so here these epochs have none."""
    real = common.train_epoch

    def poisoned(args, run, *rest):
        row = real(args, run, *rest)
        if row['epoch'] == 2:
            run.states['model'].linear.weight.data[0, 0] = float('nan')
        return row
    monkeypatch.setattr(common, 'train_epoch', poisoned)
    with pytest.raises(UsageError, match='not finite'):
        run(train_ms, '--epochs', '4', '--steps', '0', '--name', 'broken', '--eval-every', '4')
    assert common.read_checkpoint('runs/broken')['epoch'] == 1


# ---- the command line

def test_help_shows_the_defaults_of_the_dataset(capsys):
    with pytest.raises(SystemExit) as stop:
        train_ms.main(['--help', '--dataset', 'sop'])
    shown = ' '.join(capsys.readouterr().out.split())
    assert stop.value.code == 0 and 'learning rate (default: 0.0006)' in shown and '(default: 17.97)' in shown
    assert 'What differs from the paper' in shown


@pytest.mark.parametrize('flags, expected', [
    ('folder --weights none', dict(lr=2e-3, freeze_bn=False, image_size=64, arch='resnet18')),
    ('folder --weights absent.pth', dict(lr=3e-5, freeze_bn=True, epochs=41, pool='avg', image_size=227)),
    ('folder --weights imagenet --arch resnet18 --image-size 128', dict(lr=3e-5, arch='resnet18', resize=144)),
    ('cub --weights none', dict(freeze_bn=False)), ('cub --weights none --freeze-bn', dict(freeze_bn=True))])
def test_pretrained_weights_choose_the_recipe_of_a_folder_and_random_ones_train_batchnorm(flags, expected):
    """With the rate of training from scratch, pretrained weights would be ruined."""
    args = train_ms.get_args(['--dataset', *flags.split()])
    assert {key: getattr(args, key) for key in expected} == expected


@pytest.mark.parametrize('flags, message', [
    ('--dataset', 'expected one argument'), ('--batch-siz 3', 'unrecognized'), ('--device cuda:99', 'cuda:99'),
    ('--image-size 64 --resize 32', '--resize 32')])
def test_a_mistake_in_use_is_one_line(flags, message, tmp_path, monkeypatch):
    """main raises it like any other exception, so that a notebook can go on; the shell gets exit code 2."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError) as raised:
        train_ms.main(flags.split())
    assert message in str(raised.value) and '\n' not in str(raised.value)


class BackendCompilerFailed(RuntimeError):
    __module__ = 'torch._dynamo.exc'


MEMORY = 'error: not enough memory: lower --batch-size, or take --chunk, which needs --freeze-bn ({})\n'


@pytest.mark.parametrize('error, code, text', [
    (UsageError('no such thing'), 2, 'error: no such thing\n'), (KeyboardInterrupt(), 130, 'stopped\n'),
    (OSError(28, 'No space left'), 2, 'error: OSError: [Errno 28] No space left\n'),
    (MemoryError(), 2, MEMORY.format('')), (torch.OutOfMemoryError('2\nGiB'), 2, MEMORY.format('2 GiB')),
    (RuntimeError("can't allocate memory"), 2, MEMORY.format("can't allocate memory")),
    (RuntimeError('MPS backend out of memory'), 2, MEMORY.format('MPS backend out of memory')),
    (BackendCompilerFailed('raised:\nno compiler'), 2,
     'error: --compile does not work here, leave it out: raised: no compiler\n')])
def test_cli_turns_a_mistake_into_exit_code_2_and_ctrl_c_into_130(capsys, error, code, text):
    with pytest.raises(SystemExit) as stop:
        common.cli(Mock(side_effect=error))
    assert (stop.value.code, capsys.readouterr().err) == (code, text)


@pytest.mark.parametrize('bug', [KeyError('out of memory'), torch.linalg.LinAlgError('singular'), ValueError('x')])
def test_a_bug_keeps_its_traceback(bug):
    with pytest.raises(type(bug)):
        common.cli(Mock(side_effect=bug))


def test_a_reader_that_leaves_costs_no_epoch(run, small, folder, monkeypatch, capsys):
    """An epoch is saved before it is printed; and a terminal that lacks letters is no reason to stop."""
    common.Path('Vögel').symlink_to(folder)
    common.load_dataset('folder', 'Vögel', 32, 32, 'cache')     # it prints, too
    end, start = os.pipe()
    os.close(end)
    with open(start, 'w', encoding='ascii') as out, pytest.raises(SystemExit):
        monkeypatch.setattr(sys, 'stdout', out)
        common.cli(partial(run, train_ms, '--data', 'Vögel', '--name', 'mine'))
    assert capsys.readouterr().err.startswith('error: BrokenPipeError')
    assert common.read_checkpoint('runs/mine')['epoch'] == 0 and len(rows_of('mine')) == 1


@pytest.mark.slow
def test_ctrl_c_in_a_real_process_keeps_the_checkpoint(folder, tmp_path):
    flags = '--dataset folder --epochs 500 --image-size 32 --batch-size 8 --per-class 2 --dim 8 --device cpu --name x'
    # a shell starts background jobs deaf to Ctrl-C, and children inherit that: restore it
    process = subprocess.Popen([sys.executable, ROOT / 'train_ms.py', *flags.split(), '--data', folder], cwd=tmp_path,
                               text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                               preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
    log, deadline = tmp_path / 'runs/x/log.jsonl', time.time() + 60
    while not (log.exists() and len(log.read_text().splitlines()) > 1) and time.time() < deadline:
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    output = process.communicate(timeout=30)[0]
    assert process.returncode == 130 and '--resume runs/x' in output and 'Traceback' not in output, output
    assert common.read_checkpoint(tmp_path / 'runs/x')['epoch'] >= 1
