"""Runs: logs, folders, resuming, the best epoch of a fold, and checkpoints."""
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import log_of, make_folder, results_of, small_embedder
from PIL import Image

import common
import eval as evaluation
import train_ms
from common import UsageError, read_checkpoint


def test_a_run_logs_and_prints_each_evaluated_epoch(run, small, capsys):
    """A record is a flat JSON object. The last epoch is always evaluated, and is the result of a run without a fold."""
    record = run(train_ms, '--epochs', '5', '--steps', '0', '--eval-every', '2', '--name', 'my run')
    first, *_, last = records = log_of('my run')
    assert [each['epoch'] for each in records] == [0, 2, 4, 5] and first['loss'] is None and record == last
    wanted = {'epoch', 'loss', 'R@1', 'R@2', 'R@4', 'R@8', 'RP', 'MAP@R', 'images_per_second', 'minutes'}
    assert all(wanted <= each.keys() and {*map(type, each.values())} <= {int, float, type(None)} for each in records)
    assert sorted(os.listdir('runs/my run')) == ['last.pt', 'log.jsonl']
    out = capsys.readouterr().out
    assert '30 training images of 6 classes, 16 test images\n15 steps, 3 in an epoch, on cpu' in out
    assert ', '.join(f'{flag} {value}' for flag, value in read_checkpoint('runs/my run')['args'].items()) in out
    assert re.search(r'\nepoch 1 +loss \d[\d.]* +images_per_second \d\S* +minutes \d+\.\d\n', out), 'not evaluated'
    assert re.search(rf'\nepoch 5 .* R@1 {last["R@1"]:.4g} +MAP@R {last["MAP@R"]:.4g} .* minutes \d+\.\d\n', out)
    assert f'R@1 = {last["R@1"]:.1f} after epoch 5, {first["R@1"]:.1f} before: ' in out
    assert '--resume runs/my run ' in out and out.endswith("eval.py --checkpoint 'runs/my run'\n")


def test_default_names_are_numbered_and_an_existing_run_is_never_replaced(run, small):
    run(train_ms)
    run(train_ms)
    with pytest.raises(UsageError, match='runs/ms-folder-1 exists already; choose another --name'):
        run(train_ms, '--name', 'ms-folder-1', '--epochs', '0')
    assert sorted(os.listdir('runs')) == ['ms-folder-1', 'ms-folder-2'] and len(log_of('ms-folder-1')) == 2


def write_vectors(path, classes):
    """An NPZ file with six random vectors of each class"""
    Path(path).parent.mkdir(exist_ok=True)
    np.savez(path, embeddings=torch.randn(24, 6), labels=torch.arange(24) % 4, classes=list(classes))


@pytest.mark.parametrize('line', [
    'train_ms --epsilon off', 'train_proxy_anchor --optimizer rmsprop --momentum 0.5', 'train_hse --loss proxy_anchor',
    'train_ccl --loss center_loss --dropout 0.2 --optimizer sgd --momentum 0.9', 'train_metrix --mixup input embed',
    'train_ms --dataset vectors --data v', 'train_ccl --dataset vectors --data v --loss cluster'])
def test_a_resumed_run_and_eval_repeat_the_uninterrupted_run(run, small, line):
    """A run of three epochs, each with another learning rate, is interrupted after the second. Random numbers (dropout,
    mixup, hybrids) do not depend on torch's global generator."""
    write_vectors('v/train.npz', 'abcd')
    write_vectors('v/test.npz', 'efgh')
    script, *flags = f'{line} --precision fp32 --epochs 3 --schedule step --decay-epochs 1'.split()
    script = __import__(script)
    record = run(script, *flags, '--steps', '0', '--name', 'full')
    run(script, *flags, '--steps', '6', '--name', 'halved')
    torch.manual_seed(99)
    script.main(['--resume', os.path.abspath('runs/halved'), '--steps', '0', '--device', 'cpu'])
    assert results_of('full') == results_of('halved') and len(log_of('full')) == 4
    one, other = map(read_checkpoint, ('runs/full', 'runs/halved'))
    for part in ('model', 'loss_params'):
        assert all(torch.equal(value, other[part][key]) for key, value in one[part].items())
    assert one['args'] | dict(name='halved') == other['args'] and one['classes'] == other['classes']
    assert evaluation.main(['--checkpoint', 'runs/halved', '--device', 'cpu'])['MAP@R'] == record['MAP@R']


@pytest.mark.parametrize('change, one, other', [
    (shutil.copy, 'train/b/0.jpg', 'train/b/9.jpg'), (os.rename, 'train/b', 'train/a'),     # one more, another class
    (os.rename, 'test/f', 'test/h'), (shutil.copy, 'train/b/0.jpg', 'test/g/0.jpg'),        # in the test set; in a file
    (shutil.copy, 'test/g/0.jpg', 'gallery/f/0.jpg'), (os.rename, 'train/b/0.jpg', 'train/b/00.jpg'),
    (shutil.copy, 'test.npz', 'train.npz')])
def test_a_run_is_resumed_only_with_the_same_images_or_vectors(run, small, change, one, other):
    for split, classes in (('train', 'bcde'), ('test', 'fg'), ('gallery', 'fg')):
        make_folder(Path('mine', split), classes, per_class=4)
    write_vectors('mine/train.npz', 'abcd')
    write_vectors('mine/test.npz', 'abcd')
    run(train_ms, '--name', 'x', '--data', 'mine', *(['--dataset', 'vectors'] if other == 'train.npz' else []))
    change(f'mine/{one}', f'mine/{other}')
    with pytest.raises(UsageError, match='the images in mine are not those that runs/x began with; start a new run'):
        train_ms.main(['--resume', 'runs/x', '--device', 'cpu'])


def test_a_run_is_resumed_after_a_damaged_training_image_was_replaced(run, small):
    for split, classes in (('train', 'bcde'), ('test', 'fg')):
        make_folder(Path('mine', split), classes, per_class=4)
    run(train_ms, '--name', 'x', '--data', 'mine', '--epochs', '1', '--schedule', 'step')
    Path('mine/train/b/0.jpg').write_bytes(Path('mine/train/b/1.jpg').read_bytes() + b'0')
    assert train_ms.main('--resume runs/x --epochs 2 --steps 0 --device cpu'.split())['epoch'] == 2


def test_a_run_that_ended_within_an_epoch_cannot_be_continued(run, small):
    """An epoch has three steps, and the run has four. Resumed with the same --steps, it returns its result again."""
    record = run(train_ms, '--name', 'x', '--steps', '4', '--epochs', '9', '--schedule', 'step')
    for flags in ('--steps 20', '--steps 0', '--epochs 3 --steps 0', '--steps 3', '--epochs 1'):
        with pytest.raises(UsageError, match='x has 4 steps done, 3 in an epoch, and cannot continue'):
            train_ms.main(['--resume', 'runs/x', '--device', 'cpu', *flags.split()])
    assert train_ms.main(['--resume', 'runs/x', '--device', 'cpu']) == record


@pytest.fixture
def scores(monkeypatch):
    """scores(a, b, ...): the evaluations of the next run give these values of MAP@R, the first before training."""
    def scores(*values):
        rows = ({'R@1': 100.0 - value, 'RP': 1.0, 'MAP@R': value} for value in values)
        monkeypatch.setattr(common, 'evaluate', lambda model, data: next(rows))
    return scores


def test_the_best_epoch_by_validation_is_saved_and_patience_ends_a_run(run, small, scores, capsys):
    """The best is neither epoch 0 nor a later one that is not better. With more patience, the run can be resumed."""
    scores(90, 10, 30, 20, 30)
    assert run(train_ms, *'--fold 0/3 --steps 0 --epochs 9 --patience 2 --name x'.split())['epoch'] == 2
    best, last = read_checkpoint('runs/x'), read_checkpoint('runs/x/last.pt')
    assert best['epoch'] == 2 and last['epoch'] == 4 and len(log_of('x')) == 5
    assert not torch.equal(best['model']['linear.weight'], last['model']['linear.weight'])
    assert 'R@1 = 70.0 after epoch 2, 10.0 before: the percentage of validation images' in capsys.readouterr().out
    scores(40, 39, 38, 37, 36)
    assert train_ms.main('--resume runs/x --patience 3 --device cpu'.split())['epoch'] == 5 and len(log_of('x')) == 9


@pytest.mark.parametrize('number, best', [(4, 1), (5, 2)])
def test_a_run_that_was_killed_while_it_saved_an_epoch_repeats_it(run, small, scores, monkeypatch, number, best):
    """The log is written first, then best.pt, then last.pt. A half-written checkpoint does not replace the old one."""
    def write(path, data, real=Path.write_bytes):
        written.append(path)
        checkpoints = [path for path in written if '.pt' in path.suffixes]
        real(path, data[:1000] if len(checkpoints) == number else data)
        if len(checkpoints) == number:
            raise KeyboardInterrupt
    written = []
    scores(0, 10, 20, 5)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Path, 'write_bytes', write)
        run(train_ms, *'--fold 0/3 --steps 0 --epochs 3 --name x'.split())
    assert [read_checkpoint(f'runs/x/{name}.pt')['epoch'] for name in ('last', 'best')] == [1, best]
    assert [row['epoch'] for row in log_of('x')] == [0, 1, 2]
    scores(20, 5)
    assert train_ms.main('--resume runs/x --device cpu'.split())['epoch'] == read_checkpoint('runs/x')['epoch'] == 2
    assert [row['MAP@R'] for row in log_of('x')] == [0, 10, 20, 5]


def test_on_a_full_disk_a_file_is_not_replaced_and_the_error_is_that_of_the_system(tmp_path):
    resource = pytest.importorskip('resource')              # Windows does not have it
    (tmp_path / 'x').write_text('old')
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        with pytest.raises(OSError, match='too large'), common.atomic_write(tmp_path / 'x') as file:
            torch.save(torch.zeros(999), file)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (tmp_path / 'x').read_text() == 'old'


@pytest.mark.parametrize('options', [dict(layer_norm=True), dict(normalize=False), dict(arch='resnet34', pool='max')])
def test_a_loaded_checkpoint_is_the_saved_network_with_its_transform(tmp_path, small, monkeypatch, options):
    """The transform takes a path, a PIL image or an array. A network that was trained in fp32 is loaded in fp32."""
    model, x = small_embedder(**options).eval(), torch.randn(2, 3, 32, 32)
    args = train_ms.get_args(['--seed', '7', '--image-size', '32', '--resize', '40', '--precision', 'fp32'])
    common.save_checkpoint(tmp_path / 'x.pt', args, dict(model=model), dict(classes=['a', 'b']))
    monkeypatch.setattr(common, 'pick_precision', lambda name, device: 'bf16' if name == 'auto' else name)
    again = common.load_checkpoint(tmp_path / 'x.pt')
    assert torch.allclose(model(x), again(x), atol=1e-5) and options.items() <= again.config.items()
    assert (again.precision, again.saved['args']['seed'], again.saved['classes']) == ('fp32', 7, ['a', 'b'])
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (50, 90, 3), np.uint8))
    image.save(tmp_path / 'x.png')
    for source in (np.asarray(image), image, tmp_path / 'x.png'):
        assert torch.equal(again.transform(source), common.make_test_transform(40, 32)(image))


def test_a_file_that_could_run_code_is_not_opened(tmp_path):
    torch.save(os.system, tmp_path / 'evil.pt')
    with pytest.raises(Exception, match='system'):
        read_checkpoint(tmp_path / 'evil.pt')


def test_the_example_of_images_in_memory_trains_and_is_evaluated(tmp_path, monkeypatch, small, capsys):
    """It is the one in the docstring of common.Splits. No script can evaluate this run, so none is named."""
    monkeypatch.chdir(tmp_path)
    lines = [line.strip() for line in common.Splits.__doc__.splitlines()]
    code = '\n'.join(line[4:] for line in lines if line.startswith(('>>> ', '... ')))
    pixels = np.random.default_rng(0).integers(0, 256, (96, 20, 24, 3), np.uint8)
    exec(code.replace('the_loss', 'multi_similarity_loss'), dict(
        images=[Image.fromarray(each) for each in pixels], labels=[*'abcdefgh'] * 12, test_images=list(pixels[:24]),
        test_labels=[*'ijkl'] * 6, common=common, script=train_ms))
    shown = capsys.readouterr().out
    assert len(log_of('first')) == 6 and 'mine: 96 training images of 8 classes' in shown and 'Next' not in shown
