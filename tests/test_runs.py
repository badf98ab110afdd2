"""Runs, checkpoints, the command line, and mistakes in use."""
import json
import math
import os
import pickle
import re
import signal
import subprocess
import sys
import time
from functools import partial

import pytest
import torch
import worker
from conftest import ROOT, SmallNet, draw_folder
from PIL import Image

import common
import train_ms
from common import UsageError


def rows_of(name):
    return [json.loads(line) for line in open(f'runs/{name}/log.jsonl')]


def saved(path):
    return torch.load(path, weights_only=True)


# ---- logs and folders


@pytest.mark.parametrize('script', ['train_ms', 'train_metrix'])
def test_two_steps_with_a_real_resnet(run, script):
    row = run(__import__(script), '--image-size', '32')
    assert row['epoch'] == 1 and 0 <= row['R@1'] <= 100 and math.isfinite(row['loss'])


def test_a_run_logs_one_flat_object_per_evaluated_epoch(run, small):
    run(train_ms, '--epochs', '5', '--steps', '0', '--eval-every', '2', '--name', 'mine')
    rows = rows_of('mine')
    assert [row['epoch'] for row in rows] == [0, 2, 4, 5], 'the last epoch is always evaluated'
    assert rows[0]['loss'] is None and [row['minutes'] for row in rows] == sorted(row['minutes'] for row in rows)
    wanted = {'epoch', 'loss', 'R@1', 'R@2', 'R@4', 'R@8', 'RP', 'MAP@R', 'images_per_second', 'minutes'}
    for row in rows:
        assert wanted <= row.keys() and not any(isinstance(value, (dict, list)) for value in row.values())


def test_the_table_has_a_header_a_row_per_epoch_and_what_it_means(run, small, capsys):
    run(train_ms, '--epochs', '2', '--steps', '0', '--eval-every', '2', '--name', 'mine')
    out = capsys.readouterr().out
    assert re.search(r'epoch +loss +R@1 +R@2 +R@4 +R@8 +MAP@R +s\+ +s- +no-pos +img/s +min', out)
    assert re.search(r'\n +0 +- +\d', out) and re.search(r'\n +1 +\d\.\d{4}( +-){7} +\d+% ', out)
    row = rows_of('mine')[-1]
    assert f'R@1 = {row["R@1"]:.1f}: for {row["R@1"]:.1f} % of the test images' in out
    assert 'none of these classes is in the training set.' in out
    assert out.endswith('Next: python eval.py --checkpoint runs/mine/last.pt\n')


def test_the_last_sentence_claims_no_more_than_is_known(tmp_path, monkeypatch, small, capsys):
    monkeypatch.chdir(tmp_path)
    draw_folder(tmp_path / 'photos/train', ['a', 'b'], per_class=4)
    draw_folder(tmp_path / 'photos/test', ['b', 'c'], per_class=4)
    flags = '--dataset folder --data photos --epochs 0 --device cpu --image-size 32'.split()
    train_ms.main(flags)
    assert '1 of its classes are in the training set as well' in capsys.readouterr().out
    (tmp_path / 'photos/test/b').rename(tmp_path / 'photos/test/d')
    train_ms.main([*flags, '--weights', 'some.pth'])
    assert 'the pretrained weights may have seen some' in capsys.readouterr().out


def test_default_names_count_up_and_an_explicit_one_is_refused(run, small):
    run(train_ms)
    run(train_ms)
    assert sorted(os.listdir('runs')) == ['ms-folder-1', 'ms-folder-2']
    with pytest.raises(UsageError, match='exists already'):
        run(train_ms, '--name', 'ms-folder-1')


@pytest.mark.parametrize('name', ['../up', 'a/b', '..', '.', '/tmp/x'])
def test_a_name_is_one_folder(run, name):
    with pytest.raises(UsageError, match='--name'):
        run(train_ms, '--name', name)


# ---- resuming


def stop_at(monkeypatch, epoch):
    """Ctrl-C when this epoch begins"""
    real = common.train_epoch

    def interrupted(args, run, *rest):
        if run.epoch + 1 == epoch:
            raise KeyboardInterrupt
        return real(args, run, *rest)
    monkeypatch.setattr(common, 'train_epoch', interrupted)


@pytest.mark.parametrize('script, flags', [
    ('train_ms', ''), ('train_proxy_anchor', '--optimizer rmsprop --momentum 0.5'), ('train_ccl', '--variant cluster'),
    ('train_ccl', '--variant center_loss --optimizer sgd --momentum 0.9'), ('train_metrix', '--mixup input embed'),
    ('train_hse', '--loss proxy_anchor')])
def test_a_resumed_run_repeats_the_uninterrupted_one(run, small, monkeypatch, capsys, script, flags):
    module, flags = __import__(script), [*flags.split(), '--epochs', '3', '--steps', '0', '--lr', '0.01']
    run(module, *flags, '--name', 'whole')
    with monkeypatch.context() as patch:
        stop_at(patch, 3)
        with pytest.raises(KeyboardInterrupt):
            run(module, *flags, '--name', 'halved')
    assert f'After a stop, this goes on: python {script}.py --resume runs/halved\n' in capsys.readouterr().out
    assert len(rows_of('halved')) == 3
    module.main(['--resume', os.path.abspath('runs/halved'), '--device', 'cpu'])
    timing = ('images_per_second', 'minutes')
    for one, other in zip(rows_of('whole'), rows_of('halved'), strict=True):
        assert all(one[key] == other[key] for key in one if key not in timing), (one, other)
    one, other = (saved(f'runs/{name}/last.pt') for name in ('whole', 'halved'))
    assert all(torch.equal(value, other['model'][key]) for key, value in one['model'].items())
    assert all(torch.equal(value, other['learned'][key]) for key, value in one['learned'].items())
    assert {**one['args'], 'data': ''} == {**other['args'], 'data': ''} and one['classes'] == other['classes']


def test_resume_takes_odd_folder_names_but_no_file(run, small):
    run(train_ms, '--epochs', '1', '--steps', '0', '--name', 'my [best] run')
    row = train_ms.main(['--resume', 'runs/my [best] run', '--epochs', '2', '--device', 'cpu'])
    assert row['epoch'] == 2 and os.listdir('runs') == ['my [best] run']
    with pytest.raises(UsageError, match='last.pt'):
        train_ms.main(['--resume', 'runs/my [best] run/last.pt', '--epochs', '3', '--device', 'cpu'])
    assert sorted(os.listdir('runs/my [best] run')) == ['last.pt', 'log.jsonl']


@pytest.mark.parametrize('schedule, flags, said', [
    ('cosine', '--epochs 2', True), ('cosine', '--steps 3', True), ('cosine', '--eval-every 2', False),
    ('constant', '--epochs 2 --steps 0', False)])
def test_resume_with_another_number_of_steps_says_that_it_is_another_run(run, small, capsys, schedule, flags, said):
    run(train_ms, '--epochs', '1', '--schedule', schedule, '--name', 'mine')
    train_ms.main(['--resume', 'runs/mine', *flags.split(), '--device', 'cpu'])
    assert ('the learning rate takes another course' in capsys.readouterr().out) == said


def test_a_resumed_run_needs_no_file_of_weights(run, small, monkeypatch):
    asked = []
    monkeypatch.setattr(common, 'load_resnet', lambda arch, weights: asked.append(weights) or SmallNet())
    run(train_ms, '--epochs', '1', '--steps', '0', '--name', 'mine', '--weights', 'gone.pth', '--arch', 'resnet18',
        '--resize', '32', '--warmup', '0', '--schedule', 'constant')
    train_ms.main(['--resume', 'runs/mine', '--epochs', '2', '--device', 'cpu'])
    assert asked == ['gone.pth', 'none'] and saved('runs/mine/last.pt')['args']['weights'] == 'gone.pth'


def test_a_made_up_checkpoint_does_not_choose_what_is_written(run, small):
    """Of its arguments only flags count, and no paths and no names of files."""
    run(train_ms, '--name', 'mine', '--no-flip', '--epsilon', 'off', '--fold', '0/3')
    parts = saved('runs/mine/last.pt')
    assert not {'cache', 'resume', 'name', 'device', 'show_batch', 'changed', 'script'} & parts['args'].keys()
    odd = dict(cache='/elsewhere', name='../x', resume='y', show_batch='z.png', script='train_ccl', changed=1, help=1)
    torch.save(parts | dict(args=odd | parts['args']), 'runs/mine/last.pt')
    args = train_ms.get_args(['--resume', 'runs/mine'])
    assert (args.flip, args.epsilon, args.dim, args.dataset, args.fold) == (False, 'off', 16, 'folder', '0/3')
    assert (args.cache, args.name, args.show_batch) == (common.Path('cache'), None, None)
    assert (args.resume, args.script, args.changed) == (common.Path('runs/mine'), 'train_ms', {'resume'})
    assert not hasattr(args, 'help')


# ---- checkpoints


def test_a_checkpoint_embeds_a_picture_as_the_run_did(run, folder):
    run(train_ms, '--name', 'mine', '--precision', 'fp32')
    model = common.load_checkpoint('runs/mine/last.pt', precision='fp32')
    data = common.load_dataset('folder', folder, 32, 32, 'cache')
    z = common.embed(model, data.query)
    with torch.no_grad():
        alone = model(model.transform(Image.open(folder / 'test/car0/0.jpg'))[None])
    assert z.dtype == torch.float32 and torch.allclose(alone[0], z[0], atol=1e-4)
    assert model.args['dataset'] == 'folder' and model.classes == [f'bird{i}' for i in range(6)]
    torch.nn.Linear(16, 2)(z).sum().backward()              # embeddings are tensors that can be learned from


class Malicious:
    def __reduce__(self):
        return os.system, ('touch hacked',)


def test_a_malicious_pickle_is_not_opened(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for save in (lambda file: pickle.dump(Malicious(), open(file, 'wb'), protocol=2),
                 lambda file: torch.save(Malicious(), file)):
        save('evil.pt')
        with pytest.raises(UsageError, match='evil.pt'):
            common.load_checkpoint('evil.pt')
        assert not os.path.exists('hacked')


def test_checkpoints_that_do_not_belong(run, small):
    """Damaged ones: tests/soak.py"""
    run(train_ms, '--name', 'mine')
    torch.save(saved('runs/mine/last.pt') | dict(script='train_other'), 'runs/mine/last.pt')
    with pytest.raises(UsageError, match='made by train_other.py'):
        train_ms.main(['--resume', 'runs/mine', '--device', 'cpu'])
    with pytest.raises(UsageError, match='there is no file'):
        common.load_checkpoint('absent.pt')


def test_an_epoch_is_saved_before_it_is_printed(run, small, monkeypatch):
    def broken_screen(self, row):
        raise BrokenPipeError
    monkeypatch.setattr(common.Run, 'show', broken_screen)
    with pytest.raises(BrokenPipeError):
        run(train_ms, '--name', 'mine')
    assert common.read_checkpoint('runs/mine')['epoch'] == 0 and len(rows_of('mine')) == 1


# ---- what may happen to a run folder


def test_what_a_killed_process_left_is_put_in_order(run, small):
    """A row that the log lost, a row that no checkpoint knows, and a temporary file."""
    run(train_ms, '--name', 'mine', '--epochs', '2', '--steps', '0')
    log = common.Path('runs/mine/log.jsonl')
    whole = log.read_text()
    common.Path('runs/mine/thesis.tmp').write_text('of the user')
    for left in (whole.split('\n')[0] + '\n', whole + whole.split('\n')[2].replace('"epoch": 2', '"epoch": 3'), '{"ep'):
        log.write_text(left)
        common.Path(f'runs/mine/log.jsonl.{2 ** 30}.tmp').write_text('half')
        train_ms.main(['--resume', 'runs/mine', '--device', 'cpu'])
        assert log.read_text() == whole and [path.name for path in log.parent.glob('*.tmp')] == ['thesis.tmp']


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
    assert len(steps) == noticed and saved('runs/broken/last.pt')['epoch'] == 0


@pytest.mark.parametrize('evaluated', [True, False])
def test_weights_that_are_no_numbers_do_not_overwrite_a_checkpoint(run, small, monkeypatch, evaluated):
    """In epochs without an evaluation too."""
    real = common.train_epoch

    def poisoned(args, run, *rest):
        row = real(args, run, *rest)
        if row['epoch'] == 2:
            with torch.no_grad():
                run.states['model'].linear.weight[0, 0] = float('nan')
        return row
    monkeypatch.setattr(common, 'train_epoch', poisoned)
    with pytest.raises(UsageError, match='NaN|not finite'):
        run(train_ms, '--epochs', '4', '--steps', '0', '--name', 'broken', '--eval-every', '1' if evaluated else '4')
    assert saved('runs/broken/last.pt')['epoch'] == 1


# ---- the command line


def test_defaults_follow_the_dataset_and_the_choice_and_help_shows_them(capsys):
    assert train_ms.get_args(['--dataset', 'cub']).lr == 3e-5
    assert train_ms.get_args(['--dataset', 'cub', '--image-size', '112']).resize == round(112 * 256 / 227)
    assert train_ms.get_args(['--dataset', 'cub', '--image-size', '112', '--resize', '200']).resize == 200
    with pytest.raises(SystemExit) as stop:
        train_ms.main(['--help', '--dataset', 'sop'])
    shown = ' '.join(capsys.readouterr().out.split())
    assert stop.value.code == 0 and 'learning rate (default: 0.0006)' in shown and '(default: 17.97)' in shown
    assert 'What differs from the paper' in shown
    parser = common.parser('train_x.py -- x')
    with pytest.raises(UsageError, match='no flag for learning_rate'):
        common.parse(parser, {'shapes': dict(learning_rate=1)}, [])


def test_rows_of_a_choice_come_over_those_of_the_dataset():
    def parsed(*argv):
        parser = common.parser('train_x.py -- x')
        parser.add_argument('--loss', default='a')
        parser.add_argument('--extra', type=int, default=1)
        rows = {'shapes': dict(extra=2), ('shapes', 'b'): dict(extra=3, lr=9.0)}
        return common.parse(parser, rows, list(argv))
    assert parsed().extra == 2 and parsed('--loss', 'b').extra == 3 and parsed('--loss=b').lr == 9
    assert parsed('--loss', 'b', '--extra', '4').extra == 4
    assert parsed('--loss', 'b', '--extra', '3').changed == {'loss'}, 'changed is what differs from its default'


def test_a_folder_has_two_recipes():
    """From scratch the small one; with pretrained weights that of CUB, whose rate does not ruin them."""
    small, fine_tuned = (train_ms.get_args(['--dataset', 'folder', *flags]) for flags in
                         ([], ['--weights', 'imagenet', '--arch', 'resnet18', '--image-size', '128']))
    assert (small.lr, small.freeze_bn, small.image_size, small.arch) == (2e-3, False, 64, 'resnet18')
    assert (fine_tuned.lr, fine_tuned.freeze_bn, fine_tuned.epochs, fine_tuned.pool) == (3e-5, True, 41, 'avg')
    assert (fine_tuned.image_size, fine_tuned.resize, fine_tuned.arch) == (128, round(128 * 256 / 227), 'resnet18')
    assert train_ms.get_args(['--dataset', 'folder', '--weights', 'none']).lr == 2e-3
    assert train_ms.get_args(['--dataset', 'folder', '--weights', 'absent.pth']).lr == 3e-5, 'no file is opened here'


def test_random_weights_on_a_benchmark_train_batchnorm():
    assert train_ms.get_args(['--dataset', 'cub']).freeze_bn is True
    assert train_ms.get_args(['--dataset', 'cub', '--weights', 'none']).freeze_bn is False
    assert train_ms.get_args(['--dataset', 'cub', '--weights', 'none', '--freeze-bn']).freeze_bn is True


@pytest.mark.parametrize('flags, message', [
    ('--dataset', 'expected one argument'), ('--batch-sise 3', 'unrecognized'), ('--loss x', 'unrecognized'),
    ('--device cuda:99', 'cuda:99'),
    ('--image-size 64 --resize 32', '--resize 32')])
def test_a_mistake_in_use_is_one_line(flags, message, tmp_path, monkeypatch):
    """main raises it like any other exception, so that a notebook can go on; the shell gets exit code 2."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError) as raised:
        train_ms.main(flags.split())
    assert message in str(raised.value) and '\n' not in str(raised.value)


def test_cli_turns_a_mistake_into_exit_code_2_and_ctrl_c_into_130(capsys, monkeypatch):
    def fails(error):
        def main():
            raise error
        return main
    class BackendCompilerFailed(RuntimeError):
        __module__ = 'torch._dynamo.exc'
    memory = 'error: not enough memory: lower --batch-size, or take --chunk, which needs --freeze-bn ({})\n'
    for error, code, text in (
            (UsageError('no such thing'), 2, 'error: no such thing\n'), (KeyboardInterrupt(), 130, 'stopped\n'),
            (OSError(28, 'No space left'), 2, 'error: OSError: [Errno 28] No space left\n'),
            (MemoryError(), 2, memory.format('')), (torch.OutOfMemoryError('2\nGiB'), 2, memory.format('2 GiB')),
            (RuntimeError("can't allocate memory"), 2, memory.format("can't allocate memory")),
            (RuntimeError('MPS backend out of memory'), 2, memory.format('MPS backend out of memory')),
            (BackendCompilerFailed('raised:\nno compiler'), 2,
             'error: --compile does not work here, leave it out: raised: no compiler\n')):
        with pytest.raises(SystemExit) as stop:
            common.cli(fails(error))
        assert stop.value.code == code and capsys.readouterr().err == text
    closed = []
    with monkeypatch.context() as patch:
        patch.setattr(torch.distributed, 'is_initialized', lambda: True)
        patch.setattr(torch.distributed, 'destroy_process_group', lambda: closed.append(True))
        common.cli(partial(print, 'done'))
    assert capsys.readouterr().out == 'done\n' and closed == [True], 'without a mistake it returns'
    for bug in (KeyError('out of memory'), torch.linalg.LinAlgError('singular'), ValueError('x')):
        with pytest.raises(type(bug)):                      # which keeps its traceback
            common.cli(fails(bug))


@pytest.mark.slow
def test_a_reader_that_leaves_costs_no_epoch(folder, tmp_path):
    (tmp_path / 'Vögel').symlink_to(folder)
    flags = ('--dataset folder --data Vögel --epochs 2 --image-size 32 --dim 8 --batch-size 8 --per-class 2 '
             '--device cpu --name mine').split()
    error, = worker.finish(worker.start(worker.print_to_a_reader_that_leaves, flags, where=tmp_path), tmp_path)
    assert error.startswith('error: BrokenPipeError') and 'Traceback' not in error
    rows = common.read_checkpoint(tmp_path / 'runs/mine')['rows']
    assert len((tmp_path / 'runs/mine/log.jsonl').read_text().splitlines()) == len(rows) > 0


@pytest.mark.slow
def test_ctrl_c_in_a_real_process_keeps_the_checkpoint(folder, tmp_path):
    flags = ['--dataset', 'folder', '--data', str(folder), '--epochs', '500', '--image-size', '32', '--batch-size', '8',
             '--per-class', '2', '--dim', '8', '--device', 'cpu', '--name', 'mine']
    # a shell starts background jobs deaf to Ctrl-C, and children inherit that: restore it
    process = subprocess.Popen([sys.executable, ROOT / 'train_ms.py', *flags], cwd=tmp_path, text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                               preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
    log, deadline = tmp_path / 'runs/mine/log.jsonl', time.time() + 60
    while not (log.exists() and len(log.read_text().splitlines()) > 1) and time.time() < deadline:
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    output = process.communicate(timeout=30)[0]
    assert process.returncode == 130 and '--resume runs/mine' in output and 'Traceback' not in output, output
    assert common.read_checkpoint(tmp_path / 'runs/mine')['epoch'] >= 1
