"""--fold: class-disjoint blocks, the best epoch by validation, and a test set that is not read."""
import json

import numpy as np
import pytest
import torch
from conftest import draw_folder

import common
import train_ms
from common import UsageError


def numbered(classes, per_class=2):
    """Images of 2 x 2 pixels whose value is their index; super-classes in threes"""
    labels = torch.arange(classes * per_class) // per_class
    pixels, names = np.arange(len(labels), dtype=np.uint8).repeat(12), [f'class {c}' for c in range(classes)]
    return common.Images(pixels, [(2, 2)] * len(labels), labels, 17, names, labels // 3)


def held_out(classes, fold):
    data = common.SimpleNamespace(train=numbered(classes))
    common.hold_out(data, fold)
    return data


@pytest.mark.parametrize('classes, n', [(8, 4), (11, 4), (30, 7)])
def test_blocks_are_contiguous_disjoint_and_cover_the_classes(classes, n):
    folds = [held_out(classes, f'{i}/{n}') for i in range(n)]
    blocks = [data.query.classes for data in folds]
    assert sum(blocks, []) == [f'class {c}' for c in range(classes)]
    assert max(map(len, blocks)) - min(map(len, blocks)) <= 1
    for i, data in enumerate(folds):
        assert data.train.classes == sum(blocks[:i] + blocks[i + 1:], [])
        for part in (data.train, data.query):
            assert part.labels.tolist() == (torch.arange(len(part)) // 2).tolist(), 'numbered anew from 0'
            assert part.num_classes == len(part.classes)
            numbers = [int(part[k].mean()) for k in range(len(part))]           # of the images: their pixels show it
            assert [part.classes[c] for c in part.labels] == [f'class {n // 2}' for n in numbers]
            assert part.groups.tolist() == [n // 6 for n in numbers]
    with pytest.raises(UsageError, match='--fold 0/4 needs at least two classes in each block, of 7 training classes'):
        held_out(7, '0/4')


def test_no_image_of_the_test_set_is_read(tmp_path, monkeypatch, small):
    """They cannot even be decoded. And of a folder without train/ and test/, only the first half is used."""
    monkeypatch.chdir(tmp_path)
    draw_folder(tmp_path / 'x', 'abcdefghijkl', per_class=3)
    for c in 'ghijkl':
        for path in (tmp_path / f'x/{c}').iterdir():
            path.write_bytes(b'no image')
    flags = '--dataset folder --data x --image-size 32 --batch-size 8 --per-class 2 --device cpu --epochs 1'.split()
    assert train_ms.main([*flags, '--fold', '1/3', '--name', 'fold'])['epoch'] == 1
    saved = common.read_checkpoint('runs/fold')
    assert saved['classes'] == list('abefcd'), 'validation classes have been seen as well'
    with pytest.raises(UsageError, match='cannot read the image'):
        train_ms.main(flags)


# ---- the best epoch

@pytest.fixture
def train_with(tmp_path, monkeypatch, small):
    """train_with(scores, *flags): a run on six classes whose evaluations give these MAP@R, the first before training.

    Returns the row that main returns.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(common, 'draw_shapes', lambda *_: (numbered(6), numbered(6)))

    def train_with(scores, *flags):
        scores = iter(scores)
        monkeypatch.setattr(common, 'evaluate', lambda model, data: {
            'R@1': 50.0, 'RP': 1.0, 'MAP@R': next(scores), 's-': 0.0, 's+': 0.5})
        return train_ms.main([*'--image-size 17 --batch-size 4 --per-class 2 --dim 4 --device cpu'.split(), *flags])
    return train_with


def epochs_of(name):
    return [json.loads(line)['epoch'] for line in open(f'runs/{name}/log.jsonl')]


def test_the_best_epoch_by_validation_is_kept(train_with, capsys):
    row = train_with([90, 10, 30, 20, 30], '--fold', '0/3', '--epochs', '4', '--name', 'x')
    assert row['epoch'] == 2 and row['MAP@R'] == 30, 'neither epoch 0 nor a later one that is no better'
    best = common.read_file('runs/x/best.pt')
    assert best['epoch'] == 2 and common.read_checkpoint('runs/x')['epoch'] == 4
    assert torch.equal(common.load_checkpoint('runs/x').linear.weight, best['model']['linear.weight'])
    assert epochs_of('x') == [0, 1, 2, 3, 4], 'evaluated after each epoch'
    out = capsys.readouterr().out
    assert '% of the validation images' in out and 'This is epoch 2, which has the highest validation MAP@R' in out
    assert out.endswith('eval.py --checkpoint runs/x/best.pt\n') and '4 validation images of 2 classes' in out


def test_patience_ends_a_run(train_with):
    scores = [0, 10, 30, 20, 25, 40, 39, 38, 37, 36]
    flags = '--fold 0/3 --epochs 9 --patience'.split()
    assert train_with(scores, *flags, '3', '--name', 'x')['epoch'] == 5 and epochs_of('x') == list(range(9))
    assert train_with(scores, *flags, '2', '--name', 'y')['epoch'] == 2 and epochs_of('y') == list(range(5))
    # a resumed run goes on if there is more patience, and knows the best epoch
    row = train_with(scores[5:], '--resume', 'runs/y', '--patience', '3')
    assert row['epoch'] == 5 and epochs_of('y') == list(range(9))


def test_without_a_fold_the_last_epoch_counts_and_the_best_is_named(train_with, capsys):
    row = train_with([0, 10, 30, 20], '--epochs', '3', '--eval-every', '1', '--name', 'x')
    assert row['epoch'] == 3 and not common.Path('runs/x/best.pt').exists()
    assert '(Epoch 2 had the highest MAP@R' in capsys.readouterr().out
    train_with([0, 10, 30, 40], '--epochs', '3', '--eval-every', '1', '--name', 'y')
    assert 'had the highest' not in capsys.readouterr().out


def test_a_kill_between_best_and_last_costs_nothing(train_with, monkeypatch):
    """best.pt is written first, so last.pt never knows of a best epoch that is not there."""
    written = []

    def save(path, *positional, real=common.save_checkpoint, **named):
        if written == ['last.pt', 'best.pt', 'last.pt', 'best.pt']:
            raise KeyboardInterrupt
        written.append(path.name)
        real(path, *positional, **named)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(common, 'save_checkpoint', save)
        train_with([0, 10, 20, 5], '--fold', '0/3', '--epochs', '3', '--name', 'x')
    assert common.read_checkpoint('runs/x')['epoch'] == 1 and common.read_file('runs/x/best.pt')['epoch'] == 2
    row = train_with([20, 5], '--resume', 'runs/x')
    assert row['epoch'] == 2 and common.read_file('runs/x/best.pt')['epoch'] == 2
