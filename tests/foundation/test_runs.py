"""Runs: log records, output, folders, resuming, the best epoch of a fold, and images in memory."""
import os
import re
import shutil

import numpy as np
import pytest
import torch
from conftest import SmallNet, log_of, make_folder, numbered
from PIL import Image

import common
import eval as evaluation
import train_ms
from common import UsageError


def test_a_run_logs_and_prints_a_record_per_epoch(run, small, capsys):
    """Each evaluated epoch is logged as a flat JSON object. The last epoch is always evaluated."""
    run(train_ms, '--epochs', '5', '--steps', '0', '--eval-every', '2', '--name', 'my run')
    records = log_of('my run')
    assert [record['epoch'] for record in records] == [0, 2, 4, 5] and records[0]['loss'] is None
    wanted = {'epoch', 'loss', 'R@1', 'R@2', 'R@4', 'R@8', 'RP', 'MAP@R', 'images_per_second', 'minutes'}
    for record in records:
        assert wanted <= record.keys() and not any(isinstance(value, (dict, list)) for value in record.values())
    out = capsys.readouterr().out
    assert re.search(r'\nepoch 0 +R@1 \d[\d.]* +MAP@R \d.* s\+ .* s- .* minutes 0', out)
    assert re.search(r'\nepoch 1 +loss \d[\d.]* +no_positive \d.* images_per_second \d', out), 'not evaluated'
    assert re.search(rf"python {common.EVAL.with_name('train_ms.py')} --resume 'runs/my run'( --device cpu)?\n", out)
    assert out.endswith(f"Next: python {common.EVAL} --checkpoint 'runs/my run/last.pt'\n")


@pytest.mark.parametrize('classes, per_class, why', [
    ('z', 4, 'all test images have the same class'),
    ('uvw', 1, 'no test image has a match, another image of its class')])
def test_a_test_set_on_which_nothing_can_be_measured_is_named(run, small, capsys, classes, per_class, why):
    make_folder(common.Path('x/train'), 'ab', per_class=4)
    make_folder(common.Path('x/test'), classes, per_class, seed=1)
    run(train_ms, '--epochs', '0', '--data', 'x', '--name', 'mine')
    out, err = capsys.readouterr()
    assert f'R@1 has no meaning: {why}.' in out and 'R@1 =' not in out
    evaluation.main(['--checkpoint', 'runs/mine', '--device', 'cpu'])
    assert err == capsys.readouterr().err == f'warning: {why}, so there is nothing to measure\n'


def test_default_names_are_numbered_and_an_existing_name_is_rejected(run, small):
    run(train_ms)
    run(train_ms)
    assert sorted(os.listdir('runs')) == ['ms-folder-1', 'ms-folder-2']
    os.makedirs('runs/mine')                                # of two runs that start at once, one makes the folder
    for name, advice in (('ms-folder-1', ', or --resume runs/ms-folder-1'), ('mine', '')):
        with pytest.raises(UsageError, match=f'runs/{name} exists already; choose another --name{advice}$'):
            run(train_ms, '--name', name)


def test_a_broken_link_in_place_of_runs_is_an_error(run, small):
    os.symlink('nowhere', 'runs')
    with pytest.raises(FileExistsError):
        run(train_ms)


def test_the_next_command_exists(run, small, capsys):
    """With train/ alone, there is no test set to evaluate after a fold, and nothing to search if these are vectors."""
    make_folder(common.Path('x/train'), 'abcdef', per_class=4)
    run(train_ms, '--data', 'x', '--fold', '0/3')
    assert 'Next: the same without --fold' in capsys.readouterr().out
    data = common.Splits('vectors', common.Images(torch.eye(4), [0, 0, 1, 1]))
    common.summary(None, data, 'runs/x', [{}])
    assert '--query' not in capsys.readouterr().out


def test_the_command_that_resumes_a_run_keeps_its_device(run, small, monkeypatch, capsys):
    real = common.pick_device                               # auto is another device than that of the run, cpu
    monkeypatch.setattr(common, 'pick_device', lambda name: torch.device('meta') if name == 'auto' else real(name))
    run(train_ms, '--name', 'y')
    assert 'train_ms.py --resume runs/y --device cpu\n' in capsys.readouterr().out


def test_the_printed_recipe_is_the_one_used(run, small, capsys):
    run(train_ms, '--name', 'y', '--freeze-bn', '--resize', '40', '--lr', '0.03', '--seed', '3', '--precision', 'fp32',
        '--steps', '0', '--epochs', '2')
    out = capsys.readouterr().out
    args = common.read_checkpoint('runs/y')['args']
    assert out[out.index('folder: '):].split('\n')[:3] == [
        'folder: 30 training images of 6 classes, 16 test images of 4 classes',
        '2 epochs of 3 batches of 8 images, on cpu in fp32',
        ', '.join(f'{flag} {value}' for flag, value in args.items() if value is not None)]
    assert (args['freeze_bn'], args['resize'], args['lr'], args['seed'], args['per_class']) == (True, 40, 0.03, 3, 2)
    run(train_ms, '--name', 'f', '--fold', '0/3', '--batch-size', '64')
    assert '1 epochs of 2 batches of 8 images' in capsys.readouterr().out, 'of the classes that there are'


def test_a_gallery_is_named_in_the_recipe_and_by_eval(run, small, tmp_path, capsys):
    for part, classes, per_class in (('train', 'ab', 3), ('query', 'cde', 1), ('gallery', 'acd', 2)):
        make_folder(tmp_path / 'shop' / part, classes, per_class, seed=per_class)
    record = run(train_ms, '--data', str(tmp_path / 'shop'), '--batch-size', '4', '--name', 'x')
    evaluation.main(['--checkpoint', 'runs/x', '--device', 'cpu'])
    out, err = capsys.readouterr()
    assert 'folder: 6 training images of 2 classes, 3 with a gallery of 6 test images of 3 classes' in out
    assert 'none of these classes is in the training set' in out and 'inflated' not in err, 'a is in the gallery only'
    assert record['unmatched'] == 1 and 'unmatched queries have no match in the gallery: misses in R@K' in out


@pytest.mark.parametrize('script, flags', [
    ('train_ms', '--epsilon off'), ('train_proxy_anchor', '--optimizer rmsprop --momentum 0.5'),
    ('train_ccl', '--dropout 0.2'), ('train_ccl', '--loss center_loss --optimizer sgd --momentum 0.9'),
    ('train_metrix', '--mixup input embed'), ('train_hse', '--loss proxy_anchor')])
def test_a_resumed_run_repeats_the_uninterrupted_one(run, small, capsys, script, flags):
    """A run of three epochs, each with another learning rate, is interrupted after the second. The resumed run has the
    same weights and records. Its random numbers (dropout, mixup, hybrids) do not depend on torch's global generator."""
    module, flags = __import__(script), f'--epochs 3 --lr 0.01 --schedule step --decay-epochs 1 {flags}'.split()
    run(module, *flags, '--steps', '0', '--name', 'full')
    run(module, *flags, '--steps', '6', '--name', 'halved')
    assert re.search(rf'To resume after an interruption: python .*/{script}.py --resume runs/halved( --device cpu)?\n',
                     capsys.readouterr().out)
    assert len(log_of('halved')) == 3
    torch.manual_seed(99)
    module.main(['--resume', os.path.abspath('runs/halved'), '--steps', '0', '--device', 'cpu'])
    for one, other in zip(log_of('full'), log_of('halved'), strict=True):
        assert all(one[key] == other[key] for key in one.keys() - {'images_per_second', 'minutes'}), (one, other)
    one, other = map(common.read_checkpoint, ('runs/full', 'runs/halved'))
    assert all(torch.equal(value, other['model'][key]) for key, value in one['model'].items())
    assert all(torch.equal(value, other['loss_params'][key]) for key, value in one['loss_params'].items())
    one['args'].pop('resume')
    assert {**one['args'], 'name': None} == other['args'] and one['classes'] == other['classes']


def test_a_run_that_ended_within_an_epoch_cannot_be_extended(run, small, capsys):
    """An epoch has three steps, and the run has four. Resumed with the same --steps, it prints its result again."""
    run(train_ms, '--name', 'x', '--steps', '4', '--epochs', '9')
    for flags in ('--steps 20', '--steps 0', '--epochs 3 --steps 0', '--steps 3', '--epochs 1'):
        with pytest.raises(UsageError, match='x has 4 steps done, 3 an epoch, and cannot continue with these --steps'):
            train_ms.main(['--resume', 'runs/x', *flags.split()])
    before = common.read_checkpoint('runs/x')
    capsys.readouterr()
    assert train_ms.main(['--resume', 'runs/x']) == before['rows'][-1]
    assert f'R@1 = {before["rows"][-1]["R@1"]:.1f}' in capsys.readouterr().out


def test_a_network_is_loaded_in_the_precision_of_its_training(run, small, monkeypatch):
    monkeypatch.setattr(common, 'pick_precision', lambda name, device: 'bf16' if name == 'auto' else name)
    run(train_ms, '--name', 'x', '--precision', 'fp32')
    run(train_ms, '--name', 'y')
    found = [common.load_checkpoint(f'runs/{name}').precision for name in 'xy']
    assert found == ['fp32', 'bf16'], 'auto is fp32 only if the network was trained with it'
    assert common.load_checkpoint('runs/x', precision='bf16').precision == 'bf16'


@pytest.mark.parametrize('change, one, other', [
    (shutil.copy, 'train/b/0.jpg', 'train/b/9.jpg'), (os.rename, 'train/b', 'train/a'),     # one more, another class
    (os.rename, 'test/f', 'test/h'), (shutil.copy, 'test/g/0.jpg', 'train/b/0.jpg')])       # in the test set; in a file
def test_a_run_is_resumed_only_with_the_same_images(run, small, tmp_path, change, one, other):
    make_folder(tmp_path / 'mine/train', 'bcde', per_class=4)
    make_folder(tmp_path / 'mine/test', 'fg', per_class=2)
    run(train_ms, '--name', 'x', '--data', 'mine')
    change(f'mine/{one}', f'mine/{other}')
    with pytest.raises(UsageError, match='the images in .*mine are not those that runs/x began with; start a new run'):
        train_ms.main(['--resume', 'runs/x', '--device', 'cpu'])


def test_the_hash_of_images_in_memory_and_of_vectors_depends_on_their_values():
    vectors, pixels = torch.rand(3, 4), np.ones((3, 8, 8, 3), np.uint8)
    for items, others in ((vectors, 2 * vectors), ([*pixels], [*2 * pixels])):
        one, other = (common.Splits('mine', common.Images(each, [0, 1, 1])) for each in (items, others))
        assert common.hash_of(one, one.train) == common.hash_of(one, None, one.train)
        assert common.hash_of(one, one.train) != common.hash_of(other, other.train)
    one.name = other.name = 'shapes'                        # the pixels of shapes depend on the CPU
    assert common.hash_of(one, one.train) == common.hash_of(other, other.train)
    one, other = (common.Splits('mine', common.Images(vectors, [0, 1, 1], paths=3 * [path]))
                  for path in (__file__, 'gone/test_runs.py'))
    assert common.hash_of(one, one.train) == common.hash_of(other, other.train)


def test_a_resumed_run_has_the_flags_of_its_checkpoint(run, small):
    """It does not need the file of pretrained weights."""
    torch.save(SmallNet().state_dict(), 'some.pth')
    run(train_ms, *'--name mine --no-flip --epsilon off --fold 0/3 --protocol reality-check --weights some.pth'.split())
    os.remove('some.pth')
    train_ms.main(['--resume', 'runs/mine/best.pt', '--device', 'cpu'])
    args = train_ms.get_args(['--resume', 'runs/mine'])
    assert (args.flip, args.epsilon, args.dim, args.dataset, args.fold) == (False, 'off', 16, 'folder', '0/3')
    assert (args.protocol, args.lr, args.optimizer, args.weights) == ('reality-check', 1e-6, 'rmsprop', 'some.pth')
    assert (args.resume, args.script, args.name) == (common.Path('runs/mine'), 'train_ms', None)


@pytest.fixture
def train_with(tmp_path, monkeypatch, small):
    """train_with(scores, *flags): main of a run on six classes whose evaluations give these values of MAP@R, the first
    before training, and a R@1 of 100 minus them"""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(common, 'draw_shapes', lambda **_: dict(train=numbered(6), query=numbered(6)))

    def train_with(scores, *flags):
        rows = ({'R@1': 100.0 - score, 'RP': 1.0, 'MAP@R': score} for score in scores)
        monkeypatch.setattr(common, 'evaluate', lambda model, data: next(rows))
        return train_ms.main([*'--image-size 17 --batch-size 4 --per-class 2 --dim 4 --device cpu'.split(), *flags])
    return train_with


def test_the_best_epoch_by_validation_is_saved(train_with, capsys):
    record = train_with([90, 10, 30, 20, 30], '--fold', '0/3', '--epochs', '4', '--name', 'x')
    assert record['epoch'] == 2 and record['MAP@R'] == 30, 'neither epoch 0 nor a later one that is not better'
    best = common.read_file('runs/x/best.pt')
    assert best['epoch'] == 2 and common.read_file('runs/x/last.pt')['epoch'] == 4
    assert torch.equal(common.load_checkpoint('runs/x').linear.weight, best['model']['linear.weight'])
    assert len(log_of('x')) == 5, 'evaluated after each epoch'
    out = capsys.readouterr().out
    assert 'R@1 = 70.0: for 70.0% of the validation images' in out and 'Before training it was 10.0.' in out
    assert 'This is epoch 2, which has the highest validation MAP@R' in out
    assert out.endswith('eval.py --checkpoint runs/x/best.pt\n') and '4 validation images of 2 classes' in out


def test_patience_ends_a_run(train_with):
    scores = [0, 10, 30, 20, 25, 40, 39, 38, 37, 36]
    flags = '--fold 0/3 --epochs 9 --patience'.split()
    assert train_with(scores, *flags, '3', '--name', 'x')['epoch'] == 5 and len(log_of('x')) == 9
    assert train_with(scores, *flags, '2', '--name', 'y')['epoch'] == 2 and len(log_of('y')) == 5
    # with more patience, the run can be resumed, and the best epoch is still known
    record = train_with(scores[5:], '--resume', 'runs/y', '--patience', '3')
    assert record['epoch'] == 5 and len(log_of('y')) == 9


def test_without_a_fold_the_last_epoch_is_the_result(train_with, capsys):
    record = train_with([0, 10, 30, 20], '--epochs', '3', '--eval-every', '1', '--name', 'x')
    assert record['epoch'] == 3 and not common.Path('runs/x/best.pt').exists()
    assert 'This is epoch 3. Before training it was 100.0' in capsys.readouterr().out


def test_a_run_killed_between_saving_best_and_last_can_be_resumed(train_with, monkeypatch):
    """best.pt is written first, so last.pt never refers to a best epoch that was not saved."""
    written = []

    def save(path, *positional, real=common.save_checkpoint, **named):
        if written == ['last.pt', 'best.pt', 'last.pt', 'best.pt']:
            raise KeyboardInterrupt
        written.append(path.name)
        real(path, *positional, **named)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(common, 'save_checkpoint', save)
        train_with([0, 10, 20, 5], '--fold', '0/3', '--epochs', '3', '--name', 'x')
    assert common.read_file('runs/x/last.pt')['epoch'] == 1 and common.read_file('runs/x/best.pt')['epoch'] == 2
    record = train_with([20, 5], '--resume', 'runs/x')
    assert record['epoch'] == 2 and common.read_file('runs/x/best.pt')['epoch'] == 2


def test_the_example_of_a_dataset_in_memory_trains_and_is_evaluated(tmp_path, monkeypatch, small, capsys):
    """The example in the docstring of common.Splits works. Its run has the name of the dataset, and can be resumed."""
    monkeypatch.chdir(tmp_path)
    lines = [line.strip() for line in common.Splits.__doc__.splitlines()]
    code = '\n'.join(line[4:] for line in lines if line.startswith(('>>> ', '... ')))
    pixels = np.random.default_rng(0).integers(0, 256, (96, 20, 24, 3), np.uint8)
    names = dict(images=[Image.fromarray(each) for each in pixels], labels=[*'abcdefgh'] * 12,
                 test_images=pixels[:24], test_labels=[*'ijkl'] * 6, common=common, script=train_ms)
    exec(code.replace('the_loss', 'multi_similarity_loss'), names)
    shown = capsys.readouterr().out
    assert len(log_of('first')) == 6 and 'mine: 96 training images of 8 classes' in shown
    assert "Next: common.evaluate(common.load_checkpoint('runs/first'), data)" in shown
    assert 'python' not in shown, 'no script knows this dataset'
    args = train_ms.get_args(['--resume', 'runs/first', '--epochs', '6'])
    record = common.train(args, names['model'], names['data'], names['step'], names['optimizer'])
    assert record['epoch'] == 6 and len(log_of('first')) == 7
