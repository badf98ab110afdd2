"""eval.py: the numbers of the training run again, tables over seeds and folds, and comparisons."""
import json
import math
import shutil
import sys

import numpy as np
import pytest
import torch
from conftest import draw_folder, unit
from PIL import Image

import common
import eval as evaluation
import train_contrastive
import train_ms

EVAL = ['--device', 'cpu', '--precision', 'fp32']
FP32 = ['--checkpoint', 'runs/mine', *EVAL]


# ---- one network

@pytest.fixture
def birds(tmp_path, monkeypatch, small):
    """A flat folder, a network that was trained on its first half, as runs/mine, and the row of its training"""
    monkeypatch.chdir(tmp_path)
    draw_folder(tmp_path / 'birds', 'abcdef', per_class=4)
    return train_ms.main('--dataset folder --data birds --steps 2 --device cpu --image-size 32 --batch-size 6 '
                         '--per-class 2 --resize 40 --name mine --precision fp32'.split())


def test_eval_repeats_the_last_row_without_the_training_classes_and_ends_with_one_json_line(tmp_path, birds, capsys):
    """Of the run's own flat folder the second half is evaluated, as in training; of another folder, all classes."""
    draw_folder(tmp_path / 'cars', 'klmc', per_class=4)
    result = evaluation.main(FP32)
    out = capsys.readouterr().out
    assert '12 queries of 3 classes, searched in themselves' in out and '3 classes were in the training set' in out
    metrics = ('R@1', 'R@2', 'R@4', 'R@8', 'RP', 'MAP@R', 's+', 's-')
    assert {key: result[key] for key in metrics} == {key: birds[key] for key in metrics}
    assert json.loads(out.strip().split('\n')[-1]) == result
    assert result['dataset'] == 'folder' and 'alignment' not in result and 'unmatched' not in out
    evaluation.main([*FP32, '--dataset', 'folder', '--data', 'cars'])
    assert '12 queries of 3 classes' in capsys.readouterr().out, 'c is the name of a training class'


def test_copies_are_warned_of_once_and_not_where_a_photo_is_searched(tmp_path, birds, capsys):
    shutil.copy(tmp_path / 'birds/e/0.jpg', tmp_path / 'birds/f/copy.jpg')
    for flags, warned in ([], 1), (['--analyse'], 1), (['--query', 'birds/a/0.jpg'], 0):
        capsys.readouterr()
        evaluation.main([*FP32, *flags])
        assert capsys.readouterr().err.count('files are copies of test images') == warned, flags


@pytest.mark.parametrize('side', ['test', 'val'])
def test_other_images_of_the_training_classes_are_evaluated_with_a_warning(run, small, tmp_path, capsys, side):
    """The usual layout of a classifier: train/ and val/ with the same classes. A class that is new comes alone."""
    draw_folder(tmp_path / 'x/train', 'abc', per_class=4)
    draw_folder(tmp_path / f'x/{side}', 'abc', per_class=3, seed=1)
    row = run(train_ms, '--data', 'x', '--name', 'mine', '--precision', 'fp32')
    assert '3 of its classes are in the training set as well' in capsys.readouterr().out
    assert evaluation.main(FP32)['seen'] is True
    result = evaluation.main([*FP32, '--sheet', 'sheet.png', '--embed', 'x.npz', '--analyse'])
    captured = capsys.readouterr()
    assert 'all 3 classes to evaluate were in the training set, which flatters' in captured.err
    assert json.loads(captured.out.strip().split('\n')[-1])['seen'] is True
    run(train_ms, '--data', 'x', '--name', 'other', '--precision', 'fp32', '--seed', '1')
    evaluation.main([*FP32[:2], 'runs/other', *EVAL])
    assert 'all 3 classes to evaluate were in the training set' in capsys.readouterr().err, 'in a table as well'
    assert result['R@1'] == row['R@1'] and len(np.load('x.npz')['labels']) == 9 and (tmp_path / 'sheet.png').exists()
    draw_folder(tmp_path / f'x/{side}', 'de', per_class=3, seed=2)
    result = evaluation.main([*FP32, '--embed', 'x.npz'])
    assert 'seen' not in result and np.load('x.npz')['classes'].tolist() == list('abcde')
    arrays = np.load('x.npz')
    new = torch.from_numpy(arrays['labels'] > 2)
    alone = common.retrieval_metrics(*(torch.from_numpy(arrays[key])[new] for key in ('embeddings', 'labels')))
    assert {key: result[f'new_{key}'] for key in alone} == alone and 0 < alone['R@1'] <= 100


def test_the_images_are_found_where_they_were_and_a_move_is_named(run, small, folder, tmp_path, monkeypatch, capsys):
    draw_folder(tmp_path / 'birds', 'abcd', per_class=4)
    run(train_ms, '--data', 'birds', '--name', 'mine')
    (tmp_path / 'sub').mkdir()
    monkeypatch.chdir(tmp_path / 'sub')
    evaluation.main(['--checkpoint', '../runs/mine', *EVAL])
    assert f'images: {tmp_path}/birds, as in the training' in capsys.readouterr().out
    (tmp_path / 'birds').rename(tmp_path / 'moved')
    with pytest.raises(common.UsageError, match='were in birds, which is not there: moved. pass --data NEW'):
        evaluation.main(['--checkpoint', '../runs/mine', *EVAL])
    evaluation.main(['--checkpoint', '../runs/mine', '--data', '../moved', *EVAL])


def test_a_test_set_that_is_partly_known_is_measured_twice_alike_in_run_and_evaluation(run, small, tmp_path, capsys):
    draw_folder(tmp_path / 'x', [f'train/{c}' for c in 'abcd'] + [f'test/{c}' for c in 'cdefg'], per_class=4)
    row = run(train_ms, '--data', 'x', '--name', 'mine', '--precision', 'fp32')
    said = f'for images of the others, among themselves, it is {row["new_R@1"]:.1f}'
    assert said in capsys.readouterr().out
    result = evaluation.main(FP32)
    out = capsys.readouterr().out
    assert '20 queries of 5 classes' in out and 'new_: queries of classes that were not in the training set' in out
    assert {key: row[key] for key in result if key in row} == {key: result[key] for key in result if key in row}
    assert 'new_MAP@R' in row and 'seen' not in result


def test_another_dataset_needs_its_folder_and_a_drawn_one_has_none(run, small):
    run(train_ms, '--name', 'mine')
    with pytest.raises(common.UsageError, match='training was on folder: .* --data'):
        evaluation.main([*FP32, '--dataset', 'cub'])
    with pytest.raises(common.UsageError, match='--data has no effect with --dataset shapes.*add --dataset folder'):
        evaluation.main([*FP32, '--dataset', 'shapes', '--data', 'photos'])
    args = evaluation.get_args([*FP32, '--dataset', 'shapes'])
    assert evaluation.place_of_test_set(args, [dict(dataset='folder', data='x')])[0] == 'shapes'


def test_the_analysis_is_of_the_test_set_and_by_the_training_images_of_the_network(tmp_path, birds):
    """It is so when another folder is evaluated, too. If the training images have moved, --data says where they are."""
    result = evaluation.main([*FP32, '--analyse'])
    model, load = common.load_checkpoint('runs/mine', precision='fp32'), common.load_dataset
    data = load('folder', 'birds', 40, 32)
    z, training = common.embed(model, data.query), common.embed(model, data.train)
    threshold, accuracy = evaluation.best_threshold(z, data.query.labels)
    i, j = torch.triu_indices(len(z), len(z), offset=1)
    squared = (z[i] - z[j])[data.query.labels[i] == data.query.labels[j]].double().square().sum(dim=1)     # (pairs,)
    expected = {'alignment': squared.mean().item(), 'uniformity': evaluation.uniformity(z),
                'utilization': torch.cdist(z.double(), training.double()).square().amin(dim=1).mean().item(),
                'threshold': threshold, 'balanced accuracy': accuracy}
    assert {name: result[name] for name in expected} == pytest.approx(expected, abs=1e-5)
    draw_folder(tmp_path / 'cars', 'mnop', per_class=2, seed=5)
    cars = evaluation.main([*FP32, '--analyse', '--data', 'cars'])
    z = common.embed(model, load('folder', 'cars', 40, 32, known=()).query)
    assert cars['utilization'] == pytest.approx(evaluation.utilization(z, training))
    (tmp_path / 'birds').rename('moved')
    assert evaluation.main([*FP32, '--analyse', '--data', 'moved']) == result
    with pytest.raises(common.UsageError, match='needs the training images, and cars has other ones: 2 cl.* m$'):
        evaluation.main([*FP32, '--analyse', '--data', 'cars'])


def test_one_query_of_each_class(run, small, tmp_path):
    """There are no two queries of one class, so nothing is said of their similarity; the threshold is about matches."""
    for part, classes, per_class in (('train', 'tu', 4), ('query', 'xy', 1), ('gallery', 'xy', 3)):
        draw_folder(tmp_path / 'one' / part, classes, per_class, seed=per_class)
    row = run(train_ms, '--name', 'mine', '--data', 'one', '--batch-size', '4')
    assert 's+' not in row and -1 <= row['s-'] <= 1
    result = evaluation.main(['--checkpoint', 'runs/mine', '--analyse', *EVAL])
    assert not {'s+', 'alignment'} & result.keys() and -1 < result['threshold'] < 1
    (tmp_path / 'one/gallery/x').rename(tmp_path / 'one/gallery/v')
    (tmp_path / 'one/gallery/y').rename(tmp_path / 'one/gallery/z')
    result = evaluation.main(['--checkpoint', 'runs/mine', '--analyse', '--sheet', 'x.png', *EVAL])
    assert result['unmatched'] == 2 and not {'threshold', 'balanced accuracy'} & result.keys()


# ---- means and intervals

def test_interval_by_hand(monkeypatch):
    """Mean 12, standard deviation 2; t with two degrees of freedom is 4.3027 at 97.5 %."""
    middle, half = evaluation.interval([10, 12, 14])
    assert middle == 12 and half == pytest.approx(4.3027 * 2 / math.sqrt(3), abs=1e-3)
    assert evaluation.interval([7.5]) == (7.5, None)
    monkeypatch.setitem(sys.modules, 'scipy.stats', None)
    with pytest.raises(common.UsageError, match='pip install scipy'):
        evaluation.interval([1, 2])


def test_concatenation_gives_each_network_the_same_weight():
    """Each part has unit length first, so a cosine of the whole is the mean of the cosines; the whole has, too."""
    a, b = unit(5, dim=4, seed=1), unit(5, dim=6, seed=2)
    z = evaluation.concatenate([100 * a, 0.01 * b])
    assert z.shape == (5, 10)
    torch.testing.assert_close(z.double() @ z.double().T, (a @ a.T + b @ b.T) / 2, atol=1e-6, rtol=0)


@pytest.fixture
def runs(run, small):
    """Two recipes, two seeds, two folds each, in runs/<recipe>-<seed>-<fold>"""
    for name, module, flags in (('ms', train_ms, ()), ('con', train_contrastive, ('--lr', '0.01'))):
        for seed in '01':
            for fold in '01':
                run(module, '--fold', f'{fold}/2', '--seed', seed, '--name', f'{name}-{seed}-{fold}',
                    '--precision', 'fp32', '--batch-size', '6', *flags)
    return lambda name: [f'runs/{name}-{seed}-{fold}' for seed in '01' for fold in '01']


def by_hand(name, folder, seed):
    """{setting: row} of the two folds of a recipe"""
    data = common.load_dataset('folder', folder, 32, 32, 'cache')
    parts = [common.embed(common.load_checkpoint(f'runs/{name}-{seed}-{fold}', precision='fp32'), data.query)
             for fold in '01']
    each = [common.retrieval_metrics(z, data.query.labels) for z in parts]
    z = torch.cat([torch.nn.functional.normalize(z, dim=1) for z in parts], dim=1)
    return {'separated (16-dim)': {key: (each[0][key] + each[1][key]) / 2 for key in each[0]},
            'concatenated (32-dim)': common.retrieval_metrics(z, data.query.labels)}


def test_the_table_over_seeds_and_folds_and_a_comparison_within_seeds(runs, folder, capsys):
    capsys.readouterr()
    result = evaluation.main(['--checkpoint', *reversed(runs('ms')), '--against', *runs('con'), *EVAL])
    out = capsys.readouterr().out
    assert json.loads(out.strip().split('\n')[-1]) == result and 'the mean over 2 seeds' in out
    ms, con = ([by_hand(name, folder, seed) for seed in '01'] for name in ('ms', 'con'))
    settings, shown = ['separated (16-dim)', 'concatenated (32-dim)'], iter(result['rows'])
    for recipe, table in ('ms', ms), ('contrastive', con), ('ms - contrastive', None):
        for setting in settings:
            row, name = next(shown), setting if table else setting.split()[0]
            assert (row['recipe'], row['setting'], row['seeds']) == (recipe, name, [0, 1])
            for key in ('R@1', 'RP', 'MAP@R'):
                first, second = ([seed[setting][key] for seed in table] if table else
                                 [a[setting][key] - b[setting][key] for a, b in zip(ms, con)])
                assert row[key]['mean'] == pytest.approx((first + second) / 2, abs=1e-4), (recipe, setting, key)
                assert row[key]['interval'] == pytest.approx(12.7062 * abs(first - second) / 2, abs=1e-3)
    row = result['rows'][1]['MAP@R']
    assert f'{row["mean"]:.2f} ± {row["interval"]:.2f}' in out


def test_where_and_how_a_network_computes_is_no_recipe(run, small):
    """Nor are seed and fold. Whatever else differs is one."""
    run(train_ms, '--name', 'x', '--freeze-bn')
    saved = common.read_checkpoint('runs/x')
    changes = [{}, dict(seed=1), dict(precision='bf16'), dict(chunk=4), dict(compile=True), dict(data='y'),
               dict(eval_every=3), dict(dim=8), dict(freeze_bn=False)]
    for i, change in enumerate(changes):
        torch.save(saved | dict(args=saved['args'] | change), f'{i}.pt')
    runs = evaluation.read_runs([common.Path(f'{i}.pt') for i in range(9)])
    assert [run.recipe == runs[0].recipe for run in runs] == 7 * [True] + 2 * [False]
    assert list(evaluation.group([runs[0], *runs[7:]])) == [
        'ms dim=16 freeze_bn=True', 'ms dim=8 freeze_bn=True', 'ms dim=16 freeze_bn=False']


def test_a_flag_that_was_added_later_makes_no_other_recipe_at_its_default(run, small):
    """The default is that of a checkpoint that has the flag; or where none stores defaults, that of common.FLAGS."""
    run(train_ms, '--name', 'x')
    saved = common.read_checkpoint('runs/x')
    assert saved['defaults']['lr'] == 2e-3 and saved['defaults']['dim'] == 128 and saved['args']['dim'] == 16
    old = {key: value for key, value in saved.items() if key != 'defaults'}
    old['args'] = {key: value for key, value in saved['args'].items() if key != 'jitter'}
    flag = dict(args=saved['args'] | dict(seed=1, focal=2), defaults=saved['defaults'] | dict(focal=2))
    for name, content in (('old', old), ('new', saved | flag), ('focal', saved | flag | dict(
            args=flag['args'] | dict(focal=3)))):
        torch.save(content, f'{name}.pt')
    runs = [common.Path(f'{name}.pt') for name in ('old', 'new', 'focal')]
    for order in (runs, runs[::-1]):
        assert sorted(evaluation.group(evaluation.read_runs(order))) == ['ms focal=2', 'ms focal=3']
    assert list(evaluation.group(evaluation.read_runs(runs[:2]))) == ['ms']


def test_runs_that_are_no_seeds_of_one_recipe(runs, run, tmp_path, capsys):
    """Other classes or epochs; networks of two datasets; runs on all classes or of another n beside folds"""
    draw_folder(tmp_path / 'other' / 'train', 'mnop', per_class=4)
    draw_folder(tmp_path / 'other' / 'test', 'uvwx', per_class=4, seed=1)
    for name, flags in (('elsewhere', ['--data', str(tmp_path / 'other'), '--seed', '1']),
                        ('whole', []), ('third', ['--fold', '1/3'])):
        run(train_ms, '--name', name, '--precision', 'fp32', '--batch-size', '6', *flags)
    saved = common.read_checkpoint('runs/whole')
    torch.save(saved | dict(args=saved['args'] | dict(seed=2), epoch=0), 'stopped.pt')
    for other, message in (('runs/elsewhere', 'trained on different classes'), ('stopped.pt', 'different epochs')):
        with pytest.raises(common.UsageError, match=message):
            evaluation.main(['--checkpoint', 'runs/whole', other, '--data', str(tmp_path / 'other'), *EVAL])
    train_ms.main('--epochs 0 --image-size 17 --device cpu --name drawn'.split())
    with pytest.raises(common.UsageError, match='training was on folder and shapes: .* --dataset'):
        evaluation.main(['--checkpoint', 'runs/whole', 'runs/drawn', *EVAL])
    rows = evaluation.main(['--checkpoint', 'runs/ms-0-0', 'runs/whole', 'runs/third', *EVAL])['rows']
    assert [row['recipe'] for row in rows] == ['ms folds=2', 'ms folds=none', 'ms folds=3']
    assert {row['setting'] for row in rows} == {'one network (16-dim)'} and rows[0]['R@1']['interval'] is None
    assert 'one seed of each recipe, so there is no interval' in capsys.readouterr().out
    for flags, message in (
            ('ms-0-0 runs/ms-0-0', 'have the same recipe, seed and fold'),
            ('ms-0-0 runs/ms-0-1 runs/ms-1-0', 'different folds: seed 0 has fold 0/2, 1/2; seed 1 has fold'),
            ('ms-0-0 --against runs/ms-1-0', r'two recipes .* these are ms \('),
            ('ms-0-0 --against runs/con-1-0', r'ms \(seed 0 has fold 0/2\); contrastive \(seed 1 has fold 0/2\)'),
            ('ms-0-0 --against runs/con-0-1', 'the same seeds and folds')):
        with pytest.raises(common.UsageError, match=message):
            evaluation.main([*f'--checkpoint runs/{flags}'.split(), *EVAL])


def test_all_networks_of_a_table_see_the_same_classes(tmp_path, monkeypatch, small):
    """Of a flat folder, what any of them was trained or validated on is left out for all."""
    monkeypatch.chdir(tmp_path)
    draw_folder(tmp_path / 'all', 'abcdefgh', per_class=3)
    draw_folder(tmp_path / 'few', 'efgh', per_class=3)
    for data, beta in (('all', '50'), ('few', '40')):
        train_ms.main(['--dataset', 'folder', '--data', data, '--epochs', '0', '--image-size', '32', '--device', 'cpu',
                       '--beta', beta, '--name', data])
    loaded, real = [], common.load_dataset
    monkeypatch.setattr(common, 'load_dataset', lambda *a, **kw: loaded.append(kw['known']) or real(*a, **kw))
    with pytest.raises(common.UsageError, match='were in all and few: name the folder'):
        evaluation.main(['--checkpoint', 'runs/all', 'runs/few', *EVAL])
    evaluation.main(['--checkpoint', 'runs/all', 'runs/few', '--data', 'all', *EVAL])
    assert loaded == [set('abcdef')], 'opened once'


def test_queries_and_a_gallery_by_two_folds(run, small, tmp_path):
    """Networks of two folds, joined: the queries are searched in the gallery, which is joined in the same way."""
    for part, classes, per_class in (('train', 'abcdefgh', 3), ('query', 'mno', 2), ('gallery', 'mnop', 3)):
        draw_folder(tmp_path / 'shop' / part, classes, per_class, seed=per_class)
    for fold in '01':
        run(train_ms, '--data', 'shop', '--fold', f'{fold}/2', '--name', fold, '--precision', 'fp32')
    rows = evaluation.main(['--checkpoint', 'runs/0', 'runs/1', *EVAL])['rows']
    data = common.load_dataset('folder', 'shop', 32, 32, known=())
    models = [common.load_checkpoint(f'runs/{fold}', precision='fp32') for fold in '01']
    z, gallery = (torch.cat([common.embed(model, part) for model in models], dim=1)
                  for part in (data.query, data.gallery))
    expected = common.retrieval_metrics(z, data.query.labels, gallery, data.gallery.labels)
    assert {key: rows[1][key]['mean'] for key in expected} == pytest.approx(expected)

    result = evaluation.main(['--checkpoint', 'runs/0', '--analyse', '--embed', 'x.npz', '--sheet', 'x.png', *EVAL])
    z, gallery = (common.embed(models[0], part) for part in (data.query, data.gallery))
    pairs = evaluation.best_threshold(z, data.query.labels, gallery, data.gallery.labels)
    assert (result['threshold'], result['balanced accuracy']) == pytest.approx(pairs)
    block = common.load_dataset('folder', 'shop', 32, 32, fold='0/2').train
    expected = evaluation.utilization(z, common.embed(models[0], block))
    assert result['utilization'] == pytest.approx(expected), 'by images that trained, and not by those that validated'
    saved = np.load('x.npz')
    assert saved['embeddings'].shape == (6, 16) and saved['gallery_embeddings'].shape == (12, 16)
    assert all('/gallery/' in path for path in saved['gallery_paths']) and '/query/' in saved['paths'][0]
    assert saved['gallery_labels'].tolist() == data.gallery.labels.tolist()
    assert Image.open('x.png').size == (6 * (32 + 10) + 2, 6 * (32 + 10) + 2)
