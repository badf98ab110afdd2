"""Every flag: what it accepts, where it would have no effect, and what is printed about it."""
import re
import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import SCRIPTS, draw_folder

import common
import eval as evaluation
import train_contrastive
import train_ms
from common import UsageError

# The values next to the allowed ones. Everything else about a flag's values is argparse's business.
SHARED = {
    '--image-size': '7', '--resize': '7', '--min-crop': '0 1.1', '--jitter': '-0.1 1.1', '--dim': '0', '--epochs': '-1',
    '--steps': '-1', '--batch-size': '1', '--per-class': '-1', '--lr': '-1', '--weight-decay': '-1',
    '--momentum': '-0.1 1.1', '--decay-epochs': '0', '--decay-rate': '-0.1 1.1', '--warmup': '-1', '--clip': '-1',
    '--seed': f'-1 {2 ** 63}', '--eval-every': '0', '--patience': '0'}
OWN = {
    'train_contrastive': {'--margin': '-1.1 1.1', '--pos-margin': '-2.1 2.1', '--neg-margin': '-2.1 2.1',
                          '--power': '0 3'},
    'train_ms': {'--alpha': '0', '--beta': '0', '--lam': '-1.1 1.1', '--epsilon': '-2.1 2.1'},
    'train_proxy_anchor': {'--alpha': '0', '--delta': '-1.1 1.1', '--proxy-lr-mult': '-1'},
    'train_proxynca_pp': {'--temperature': '0', '--proxy-lr-mult': '-1', '--eps': '-1'},
    'train_ccl': {'--s': '0', '--margin': '-0.1 2.1', '--lam': '-1', '--smoothing': '-0.1 1', '--mu': '-0.1 1.1',
                  '--dropout': '-0.1 1'},
    'train_metrix': {'--alpha': '0', '--strength': '-1', '--beta': '0', '--gamma': '0', '--m': '-1.1 1.1',
                     '--epsilon': '-2.1 2.1', '--proxy-alpha': '0', '--delta': '-1.1 1.1', '--temperature': '0',
                     '--proxy-lr-mult': '-1', '--hard-negatives': '0'},
    'train_hse': {'--alpha': '-1', '--temperature': '0', '--num': '1 5', '--combinations': '0', '--mask-size': '0',
                  '--proxy-lr-mult': '-1'}}


@pytest.mark.parametrize('script', SCRIPTS)
def test_values_next_to_the_allowed_ones_are_refused(script):
    for flag, values in (SHARED | OWN[script]).items():
        for value in values.split():
            with pytest.raises(UsageError, match=f'argument {flag}'):
                __import__(script).get_args([f'{flag}={value}'])


@pytest.mark.parametrize('script, flags', [
    ('train_contrastive', '--reduction sum'), ('train_contrastive', '--margin 0.1'),
    ('train_contrastive', '--form similarity --pos-margin 0.1'),
    ('train_contrastive', '--form similarity --neg-margin 0.1'), ('train_contrastive', '--form similarity --power 2'),
    ('train_proxynca_pp', '--loss proxynca --temperature 1'), ('train_proxynca_pp', '--optimizer sgd --eps 1'),
    ('train_ccl', '--variant center_loss --s 2'), ('train_ccl', '--variant center_loss --margin 0.1'),
    ('train_ccl', '--variant proxynca --smoothing 0.2'), ('train_ccl', '--mu 0.5'),
    ('train_ccl', '--variant stop_grad --mu 0.5'),
    ('train_metrix', '--loss proxynca_pp --epsilon 0.1'), ('train_metrix', '--reduction sum'),
    ('train_metrix', '--temperature 1'), ('train_metrix', '--loss contrastive --beta 3'),
    ('train_hse', '--alpha 0 --axis left-right'), ('train_hse', '--alpha 0 --kind gridmask --mask-size 8'),
    ('train_hse', '--loss contrastive --proxy-lr-mult 3'), ('train_hse', '--loss epshn --proxy-lr-mult 3')])
def test_a_flag_without_effect_is_refused(script, flags):
    with pytest.raises(UsageError, match='has no effect with'):
        __import__(script).get_args(flags.split())


def test_a_dataset_of_fewer_classes_shrinks_the_batch_only_if_nothing_was_typed(before_training):
    args = before_training(train_ms).args
    labels = torch.arange(8) // 4                               # two classes
    for typed in ({'per_class'}, {'batch_size'}):
        args.changed = typed
        with pytest.raises(UsageError, match='asks for 4 classes per batch, the training set has 2'):
            common.make_sampler(args, labels)
    args.changed = set()
    assert common.make_sampler(args, labels).classes == 2


@pytest.mark.parametrize('script', SCRIPTS)
def test_the_seed_decides_the_network_that_a_script_starts_from(before_training, script):
    first, same, other = (before_training(__import__(script), '--seed', seed).model.linear.weight for seed in '774')
    assert torch.equal(first, same) and not torch.equal(first, other)


def test_home_and_cache_are_folders_of_ones_own(run, small, tmp_path, monkeypatch):
    monkeypatch.setenv('HOME', str(tmp_path))
    draw_folder(tmp_path / 'photos', 'abcdefgh', per_class=2)
    run(train_ms, '--data', '~/photos', '--cache', 'elsewhere', '--name', 'x')
    assert len(list((tmp_path / 'elsewhere').glob('*.bin'))) == 2 and not (tmp_path / 'cache').exists()
    evaluation.main(['--checkpoint', 'runs/x', '--cache', 'third', '--device', 'cpu'])
    assert len(list((tmp_path / 'third').glob('*.bin'))) == 1 and not (tmp_path / 'cache').exists()


# ---- what may change when a run goes on


def test_data_may_have_moved_and_eval_every_may_change(run, small, folder, tmp_path):
    run(train_ms, '--epochs', '3', '--steps', '0', '--name', 'x')
    (tmp_path / 'moved').symlink_to(folder)
    row = train_ms.main('--resume runs/x --data moved --cache other --eval-every 2 --epochs 4'.split())
    assert row['epoch'] == 4
    for flag, value in (('--lr', '1'), ('--alpha', '3'), ('--seed', '5'), ('--min-crop', '1')):
        with pytest.raises(UsageError, match=f'made with another {flag}'):
            train_ms.main(['--resume', 'runs/x', flag, value])


def test_steps_beyond_the_epochs_do_not_train_on(run, small):
    row = run(train_ms, '--epochs', '2', '--steps', '100')
    assert row['epoch'] == 2


# ---- what is printed


def test_the_recipe_that_is_printed_is_the_one_that_runs(run, small, capsys):
    run(train_ms, '--name', 'y', '--freeze-bn', '--resize', '40', '--lr', '0.03', '--seed', '3', '--precision', 'fp32',
        '--steps', '0', '--epochs', '2')
    out = capsys.readouterr().out
    assert out[out.index('folder: '):].split('\n')[:3] == [
        'folder: 30 training images of 6 classes, 16 test images of 4 classes',
        'resnet18, weights none, BatchNorm frozen, avg+max pooling, 16 dimensions, crops of 32 px from 40 px',
        'adamw, lr 0.03, schedule cosine, batches of 8 (2 images per class), 2 epochs of 3 steps, seed 3, cpu in fp32; '
        'runs/y/']
    run(train_ms, '--name', 'z', '--per-class', '0')            # two steps, which are a part of the first epoch
    out = capsys.readouterr().out
    assert 'BatchNorm trained' in out and 'batches of 8 (in random order), 1 epochs of 3 steps' in out
    assert re.search(r'cpu in (bf16|fp32); runs/z/', out)


def test_the_size_of_a_batch_is_printed_as_it_is(small, tmp_path, monkeypatch, capsys):
    """The recipe asks for 64 images, and three classes of 4 images are 12."""
    monkeypatch.chdir(tmp_path)
    draw_folder(tmp_path / 'x', list('abcdef'), per_class=5)
    train_ms.main('--dataset folder --data x --device cpu --steps 1 --image-size 16 --dim 4'.split())
    assert 'batches of 12 (4 images per class)' in capsys.readouterr().out


def test_a_line_that_will_be_overwritten_is_no_wider_than_the_screen(monkeypatch, capsys):
    monkeypatch.setattr(sys.stdout, 'isatty', lambda: True, raising=False)
    monkeypatch.setenv('COLUMNS', '20')
    common.live('x' * 50)
    common.live('y' * 50, done=True)
    assert capsys.readouterr().out == '\r' + 'x' * 19 + '\r' + 'y' * 50 + '\n'


def test_a_gallery_is_named_in_the_recipe_and_by_eval(run, small, tmp_path, capsys):
    draw_folder(tmp_path / 'shop/train', 'ab', per_class=3)
    draw_folder(tmp_path / 'shop/query', 'cde', per_class=1, seed=1)
    draw_folder(tmp_path / 'shop/gallery', 'cdf', per_class=2, seed=2)
    row = run(train_ms, '--data', str(tmp_path / 'shop'), '--batch-size', '4', '--name', 'x')
    out = capsys.readouterr().out
    assert 'folder: 6 training images of 2 classes, 3 in 6 test images of 3 classes' in out
    assert row['unmatched'] == 1 and '1 queries have no match in the gallery: misses in R@K' in out
    evaluation.main(['--checkpoint', 'runs/x', '--device', 'cpu'])
    out = capsys.readouterr().out
    assert 'folder: 3 queries of 3 classes, searched in a gallery of 6 images' in out
    assert 'unmatched queries have no match in the gallery: misses in R@K' in out
    run(train_ms, '--name', 'y')
    evaluation.main(['--checkpoint', 'runs/y', '--device', 'cpu'])
    out = capsys.readouterr().out
    assert 'searched in themselves' in out and 'unmatched' not in out


def test_the_summary_compares_the_result_with_the_network_before(run, small, monkeypatch, capsys):
    scores = iter([12.3, 45.6])
    monkeypatch.setattr(common, 'evaluate', lambda *_: {'R@1': next(scores), 'MAP@R': 1.0, 's-': 0.9, 's+': 0.95})
    run(train_ms)
    out = capsys.readouterr().out
    assert 'R@1 = 45.6: for 45.6 % of the test images' in out and 'Before training it was 12.3.' in out


@pytest.mark.parametrize('similarity, collapsed', [(0.99, True), (0.97, False)])
def test_only_a_trained_network_above_098_is_called_collapsed(run, small, monkeypatch, capsys, similarity, collapsed):
    similarities = iter([0.999, similarity])
    monkeypatch.setattr(common, 'evaluate', lambda *_: {'R@1': 1.0, 'MAP@R': 1.0, 's-': next(similarities), 's+': 1.0})
    run(train_ms)
    assert capsys.readouterr().out.count('collapse:') == collapsed


class Clock(SimpleNamespace):
    """A minute passes between any two looks at it."""
    now = 0.0

    def time(self):
        self.now += 60
        return self.now


def test_minutes_and_images_per_second(run, small, monkeypatch, capsys):
    monkeypatch.setattr(common, 'time', Clock())
    run(train_ms, '--epochs', '40', '--steps', '100', '--eval-every', '40', '--name', 'x')
    first, last = common.read_checkpoint('runs/x')['rows']
    assert first['minutes'] == 1 and last['minutes'] == 1 + 3 * 34, 'looks at start and end of an epoch, and after it'
    assert last['images_per_second'] == pytest.approx(8 / 60), 'the last epoch has one step of 8 images'
    assert last['no_positive'] == 0
    capsys.readouterr()
    train_ms.main(['--resume', 'runs/x', '--steps', '0'])
    assert common.read_checkpoint('runs/x')['minutes'] > last['minutes']


def test_the_estimate_is_in_minutes_and_comes_again_on_resume(before_training, monkeypatch, capsys):
    held = before_training(train_ms, '--batch-size', '2', '--per-class', '1')
    monkeypatch.setattr(common, 'time', Clock())
    sampler = [[0, 5]] * 30
    run = SimpleNamespace(epoch=4, start=4, total=150)
    schedule = SimpleNamespace(last_epoch=120, step=lambda: setattr(schedule, 'last_epoch', schedule.last_epoch + 1))
    row = common.train_epoch(held.args, run, held.data, sampler, held.step, held.optimizer, schedule)
    # after 20 steps, which took a minute, 10 are left
    assert '10 steps to come, about 0.5 min' in capsys.readouterr().out
    assert row['no_positive'] == 1 and row['images_per_second'] == pytest.approx(60 / 120)


def test_an_anchor_without_a_positive_is_counted_per_image_seen(run, small):
    row = run(train_contrastive, '--per-class', '1', '--batch-size', '4', '--steps', '2')
    assert row['no_positive'] == 1
