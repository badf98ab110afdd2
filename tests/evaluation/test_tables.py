"""eval.py: metrics of a trained network, tables over seeds and folds, and comparisons."""
import json
import math
import sys

import numpy as np
import pytest
import torch
from conftest import make_folder, unit
from PIL import Image

import common
import eval as evaluation
import train_contrastive
import train_ms

EVAL = ['--device', 'cpu', '--precision', 'fp32']
FP32 = ['--checkpoint', 'runs/mine', *EVAL]


# ---- one network

@pytest.fixture
def trained(tmp_path, monkeypatch, small):
    """A folder `photos` without splits, and runs/mine, trained on the first half of its classes. Returns the last log
    record."""
    monkeypatch.chdir(tmp_path)
    make_folder(tmp_path / 'photos', 'abcdef', per_class=4)
    return train_ms.main('--dataset folder --data photos --steps 2 --device cpu --image-size 32 --batch-size 6 '
                         '--per-class 2 --resize 40 --name mine --precision fp32'.split())


def test_eval_repeats_the_last_record_and_ends_with_one_json_line(tmp_path, trained, capsys):
    """Without test/ in a folder, the second half of its classes is evaluated; with --whole, all classes."""
    make_folder(tmp_path / 'cars', 'cklm', per_class=4)
    result = evaluation.main(FP32)
    captured = capsys.readouterr()
    assert '12 queries of 3 classes, with themselves as the gallery' in captured.out and captured.err == ''
    metrics = ('R@1', 'R@2', 'R@4', 'R@8', 'RP', 'MAP@R', 's+', 's-')
    assert {key: result[key] for key in metrics} == {key: trained[key] for key in metrics}
    assert json.loads(captured.out.strip().split('\n')[-1]) == result
    assert result['dataset'] == 'folder' and 'alignment' not in result and 'unmatched' not in captured.out
    for flags, queries, seen in ([], '8 queries of 2', ''), (['--whole'], '16 queries of 4', '1 of the 4 classes'):
        evaluation.main([*FP32, '--dataset', 'folder', '--data', 'cars', *flags])
        captured = capsys.readouterr()
        assert f'{queries} classes' in captured.out and seen in captured.err and bool(seen) == bool(captured.err)
    saved = common.read_checkpoint('runs/mine')
    torch.save(saved | dict(args=saved['args'] | dict(steps=0, epochs=7)), 'runs/mine/last.pt')
    make_folder(tmp_path / 'photos', 'g', per_class=4)
    assert evaluation.main(FP32)['epoch'] == 1
    unfinished, changed = capsys.readouterr().err.splitlines()
    assert unfinished == 'warning: runs/mine is epoch 1 of 7: continue it with --resume'
    assert changed == f'warning: the test images in {tmp_path}/photos are not those that the run was evaluated on'
    evaluation.main([*FP32, '--whole'])
    assert 'not those that the run' not in capsys.readouterr().err, 'all images are other ones on purpose'
    for name in ('seed', 'epochs', 'steps'):                # a checkpoint for others may lack them
        del saved['args'][name]
    torch.save(saved, 'runs/mine/last.pt')
    assert 'R@1' in evaluation.main(FP32)


def test_the_ks_are_those_of_the_flag_and_1(trained):
    result = evaluation.main([*FP32, '--ks', '5', '3', '--analyse'])
    assert [key for key in result if key.startswith('R@')] == ['R@1', 'R@3', 'R@5']
    assert result['R@1'] == trained['R@1'] <= result['R@3'] <= result['R@5']


def test_other_images_of_the_training_classes_are_evaluated_with_a_warning(run, small, tmp_path, capsys):
    """The folders train/ and test/ have the same classes, as for a classifier."""
    make_folder(tmp_path / 'x/train', 'abc', per_class=4)
    make_folder(tmp_path / 'x/test', 'abcd', per_class=3, seed=1)
    record = run(train_ms, '--data', 'x', '--name', 'mine', '--precision', 'fp32')
    assert '3 of these classes are in the training set' in capsys.readouterr().out
    assert evaluation.main(FP32)['R@1'] == record['R@1']
    assert '3 of the 4 classes to evaluate were in the training set, so the metrics' in capsys.readouterr().err
    run(train_ms, '--data', 'x', '--name', 'other', '--seed', '1')
    capsys.readouterr()
    evaluation.main(['--checkpoint', 'runs/mine', 'runs/other', *EVAL])
    assert capsys.readouterr().err.count('3 of the 4 classes') == 2, 'in a table as well, for each network'


def test_another_dataset_needs_its_folder_and_the_built_in_one_has_none(run, small):
    run(train_ms, '--name', 'mine')
    with pytest.raises(common.UsageError, match='name the folder of --dataset cub with --data'):
        evaluation.main([*FP32, '--dataset', 'cub'])
    with pytest.raises(common.UsageError, match='shapes has no --data.*add --dataset folder'):
        evaluation.main([*FP32, '--dataset', 'shapes', '--data', 'photos'])
    with pytest.raises(common.UsageError, match='trained on x and y: name the images to evaluate'):
        evaluation.place_of_test_set(evaluation.get_args(FP32), [dict(dataset='cub', data=data) for data in 'xy'])
    args = evaluation.get_args([*FP32, '--dataset', 'shapes'])
    for trainings in ('x', 'xy'):
        trained = [dict(dataset='folder', data=data) for data in trainings]
        assert evaluation.place_of_test_set(args, trained)[0] == 'shapes'


def test_the_analysis_uses_the_test_set_and_the_training_images_of_the_network(tmp_path, trained):
    """Utilization is with respect to the training images, also if another folder is evaluated."""
    result = evaluation.main([*FP32, '--analyse'])
    model, load = common.load_checkpoint('runs/mine', precision='fp32'), common.load_dataset
    data = load('folder', 'photos', 40, 32)
    z, training = common.embed(model, data.query), common.embed(model, data.train)
    assert evaluation.training_images(model, workers=0).workers == 0
    threshold, accuracy = evaluation.best_threshold(z, data.query.labels)
    i, j = torch.triu_indices(len(z), len(z), offset=1)
    squared = (z[i] - z[j])[data.query.labels[i] == data.query.labels[j]].double().square().sum(dim=1)     # (pairs,)
    expected = {'alignment': squared.mean().item(), 'uniformity': evaluation.uniformity(z),
                'utilization': torch.cdist(z.double(), training.double()).square().amin(dim=1).mean().item(),
                'threshold': threshold, 'balanced accuracy': accuracy}
    assert {name: result[name] for name in expected} == pytest.approx(expected, abs=1e-5)
    make_folder(tmp_path / 'cars', 'mnop', per_class=2, seed=5)
    cars = evaluation.main([*FP32, '--analyse', '--data', 'cars'])
    z = common.embed(model, load('folder', 'cars', 40, 32).query)
    assert cars['utilization'] == pytest.approx(evaluation.utilization(z, training))
    (tmp_path / 'photos/a').rename('photos/z')
    with pytest.raises(common.UsageError, match='the training images, and those in photos are different'):
        evaluation.main([*FP32, '--analyse', '--data', 'cars'])


def test_a_checkpoint_for_others_has_no_path_of_the_images(tmp_path, trained):
    """As in the example of common.load_checkpoint. Then the images are in data/, the default of --data."""
    saved = common.read_checkpoint('runs/mine')
    del saved['optimizer'], saved['args']['data']
    torch.save(saved, 'network.pt')
    shared = ['--checkpoint', 'network.pt', *EVAL, '--precision', 'fp32']
    with pytest.raises(common.UsageError, match='folder cannot be loaded: there is no folder data'):
        evaluation.main(shared)
    assert evaluation.main([*shared, '--data', 'photos'])['R@1'] == trained['R@1']
    with pytest.raises(common.UsageError, match='folder cannot be loaded: there is no folder data'):
        evaluation.main([*shared, '--data', 'photos', '--analyse'])
    (tmp_path / 'photos').rename('data')
    assert evaluation.main([*shared, '--analyse'])['R@1'] == trained['R@1']


def test_a_duplicate_of_a_training_image_is_counted_and_named(trained, capsys):
    assert evaluation.main([*FP32, '--analyse'])['copies'] == 0
    assert 'copies:' not in capsys.readouterr().out
    Image.open('photos/a/0.jpg').save('photos/f/copy.png')
    assert evaluation.main([*FP32, '--analyse'])['copies'] == 1
    assert 'copies: 1 test images' in (text := capsys.readouterr().out)
    assert 'the first is photos/f/copy.png with photos/a/0.jpg; these are duplicates, or if uniformity' in text
    common.Path('photos/a/0.jpg').unlink()                  # does not help: the network has seen it
    evaluation.main([*FP32, '--analyse'])
    assert 'had 12 in training: utilization and copies are those of other images' in capsys.readouterr().err


def test_one_query_of_each_class(run, small, tmp_path, capsys):
    """Without two queries of one class there is no s+ and no alignment. The threshold is computed from gallery
    matches. Without any match there is nothing to measure."""
    for part, classes, per_class in (('train', 'tu', 4), ('query', 'xy', 1), ('gallery', 'xy', 3)):
        make_folder(tmp_path / 'one' / part, classes, per_class, seed=per_class)
    record = run(train_ms, '--name', 'mine', '--data', 'one', '--batch-size', '4')
    assert 's+' not in record and -1 <= record['s-'] <= 1
    result = evaluation.main(['--checkpoint', 'runs/mine', '--analyse', *EVAL])
    assert not {'s+', 'alignment'} & result.keys() and 'threshold' in result
    (tmp_path / 'one/gallery/x').rename(tmp_path / 'one/gallery/v')
    (tmp_path / 'one/gallery/y').rename(tmp_path / 'one/gallery/z')
    result = evaluation.main(['--checkpoint', 'runs/mine', '--analyse', '--sheet', 'x.png', *EVAL])
    assert not {'R@1', 'threshold', 'utilization'} & result.keys()
    assert 'no test image has a match' in capsys.readouterr().err and (tmp_path / 'x.png').exists()


# ---- means and confidence intervals

def test_interval_by_hand(monkeypatch):
    """The mean is 12 and the standard deviation 2; t with two degrees of freedom is 4.3027 at 97.5%."""
    middle, half = evaluation.interval([10, 12, 14])
    assert middle == 12 and half == pytest.approx(4.3027 * 2 / math.sqrt(3), abs=1e-3)
    assert evaluation.interval([7.5]) == (7.5, None)
    monkeypatch.setitem(sys.modules, 'scipy.stats', None)
    with pytest.raises(common.UsageError, match='pip install scipy'):
        evaluation.interval([1, 2])


def test_concatenation_gives_each_network_the_same_weight():
    """Each part is L2-normalized first, and so is the result: its cosine similarities are the means over the
    parts."""
    a, b = unit(5, dim=4, seed=1), unit(5, dim=6, seed=2)
    z = evaluation.concatenate([100 * a, 0.01 * b])
    assert z.shape == (5, 10)
    torch.testing.assert_close(z.double() @ z.double().T, (a @ a.T + b @ b.T) / 2, atol=1e-6, rtol=0)


@pytest.fixture
def runs(run, small):
    """Runs of two recipes with two seeds and two folds each, in runs/<recipe>-<seed>-<fold>"""
    for name, module, flags in (('ms', train_ms, ()), ('con', train_contrastive, ('--lr', '0.01'))):
        for seed in '01':
            for fold in '01':
                run(module, '--fold', f'{fold}/2', '--seed', seed, '--name', f'{name}-{seed}-{fold}',
                    '--precision', 'fp32', '--batch-size', '6', *flags)
    return lambda name: [f'runs/{name}-{seed}-{fold}' for seed in '01' for fold in '01']


def by_hand(name, folder, seed):
    """{setting: metrics} of the two folds of a recipe"""
    data = common.load_dataset('folder', folder, 32, 32)
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


def test_flags_that_do_not_change_results_are_not_part_of_the_recipe(run, small):
    """Seed, fold, and how a network is computed are not part of a recipe. All other differences make another recipe."""
    run(train_ms, '--name', 'x', '--freeze-bn')
    saved = common.read_checkpoint('runs/x')
    changes = [{}, dict(seed=1), dict(precision='bf16'), dict(workers=4), dict(compile=True), dict(data='y'),
               dict(eval_every=3), dict(dim=16.0), dict(dim=8), dict(freeze_bn=False)]
    for i, change in enumerate(changes):
        torch.save(saved | dict(args=saved['args'] | change), f'{i}.pt')
    runs = evaluation.read_runs([common.Path(f'{i}.pt') for i in range(10)])
    assert [run.recipe == runs[0].recipe for run in runs] == 8 * [True] + 2 * [False]
    assert list(evaluation.group([runs[0], *runs[8:]])) == [
        'ms dim=16 freeze_bn=True', 'ms dim=8 freeze_bn=True', 'ms dim=16 freeze_bn=False']


def test_a_run_that_was_made_longer_is_no_seed_of_the_longer_recipe(run, small):
    """Its learning rates were those of a shorter cosine schedule."""
    run(train_ms, '--name', 'long', '--epochs', '3', '--steps', '0')
    steps = common.read_checkpoint('runs/long')['step']
    for name, schedule in (('x', 'cosine'), ('y', 'constant')):
        run(train_ms, '--name', name, '--epochs', '1', '--steps', '0', '--schedule', schedule)
        for flags in (['--epochs', '3', '--steps', str(2 * steps // 3)], ['--steps', '0']):
            train_ms.main(['--resume', f'runs/{name}', *flags, '--device', 'cpu'])
    long, x, y = evaluation.read_runs([common.Path(f'runs/{name}') for name in ('long', 'x', 'y')])
    assert x.recipe - long.recipe == {('earlier_steps', f'{steps // 3} {2 * steps // 3}')} and x.epoch == 3
    assert 'earlier_steps' not in y.args


def test_the_best_epoch_has_the_flags_with_which_its_run_was_resumed(run, small):
    """The run may have been resumed after this epoch. Then seeds of one recipe have the same flags again."""
    run(train_ms, '--name', 'x', '--fold', '0/3')
    saved = common.read_checkpoint('runs/x/last.pt')
    torch.save(saved | dict(args=saved['args'] | dict(patience=99), epoch=5), 'runs/x/last.pt')
    [resumed] = evaluation.read_runs([common.Path('runs/x')])
    assert resumed.args['patience'] == 99 and resumed.epoch == saved['epoch']


def test_a_changed_copy_of_a_script_has_a_row_of_its_own(run, small):
    run(train_ms, '--name', 'x')
    torch.save(common.read_checkpoint('runs/x') | dict(script='ms'), 'copy.pt')
    runs = evaluation.read_runs([common.Path('runs/x'), common.Path('copy.pt')])
    assert list(evaluation.group(runs)) == ['ms', 'ms (ms.py)']


def test_runs_that_are_not_seeds_of_one_recipe(runs, run, tmp_path, capsys):
    """Runs with other classes, epochs or datasets are rejected. Runs without folds, or with another number of folds,
    are other recipes."""
    make_folder(tmp_path / 'other' / 'train', 'mnop', per_class=4)
    make_folder(tmp_path / 'other' / 'test', 'uvwx', per_class=4, seed=1)
    for name, flags in (('elsewhere', ['--data', str(tmp_path / 'other'), '--seed', '1']),
                        ('whole', []), ('third', ['--fold', '1/3'])):
        run(train_ms, '--name', name, '--precision', 'fp32', '--batch-size', '6', *flags)
    saved = common.read_checkpoint('runs/whole')
    torch.save(saved | dict(args=saved['args'] | dict(seed=2), epoch=0), 'stopped.pt')
    for other, message in (('runs/elsewhere', 'trained on different classes'), ('stopped.pt', 'different epochs')):
        with pytest.raises(common.UsageError, match=message):
            evaluation.main(['--checkpoint', 'runs/whole', other, '--data', str(tmp_path / 'other'), *EVAL])
    train_ms.main('--epochs 0 --image-size 17 --device cpu --name synthetic'.split())
    with pytest.raises(common.UsageError, match='trained on folder and shapes: name the images'):
        evaluation.main(['--checkpoint', 'runs/whole', 'runs/synthetic', *EVAL])
    rows = evaluation.main(['--checkpoint', 'runs/ms-0-0', 'runs/whole', 'runs/third', *EVAL])['rows']
    assert [row['recipe'] for row in rows] == ['ms folds=2', 'ms folds=none', 'ms folds=3']
    assert {row['setting'] for row in rows} == {'one network (16-dim)'} and rows[0]['R@1']['interval'] is None
    assert 'one seed of each recipe, so there is no confidence interval' in capsys.readouterr().out
    for flags, message in (
            ('ms-0-0 runs/ms-0-0', 'have the same recipe, seed and fold'),
            ('ms-0-0 runs/ms-0-1 runs/ms-1-0', 'different folds: seed 0 has fold 0/2, 1/2; seed 1 has fold'),
            ('ms-0-0 --against runs/ms-1-0', '--against has runs/ms-1-0, whose recipe is among those before it'),
            ('ms-0-0 --against runs/con-1-0', r'ms \(seed 0 has fold 0/2\); contrastive \(seed 1 has fold 0/2\)'),
            ('ms-0-0 --against runs/con-0-1', 'the same seeds and folds')):
        with pytest.raises(common.UsageError, match=message):
            evaluation.main([*f'--checkpoint runs/{flags}'.split(), *EVAL])


def test_queries_and_a_gallery_by_two_folds(run, small, tmp_path):
    """With two folds, the embeddings of queries and gallery are concatenated in the same way."""
    for part, classes, per_class in (('train', 'abcdefgh', 3), ('query', 'mno', 2), ('gallery', 'mnop', 3)):
        make_folder(tmp_path / 'shop' / part, classes, per_class, seed=per_class)
    for fold in '01':
        run(train_ms, '--data', 'shop', '--fold', f'{fold}/2', '--name', fold, '--precision', 'fp32')
    rows = evaluation.main(['--checkpoint', 'runs/0', 'runs/1', *EVAL])['rows']
    data = common.load_dataset('folder', 'shop', 32, 32)
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
    assert result['utilization'] == pytest.approx(expected), 'with training images, not with validation images'
    for name, images, n in (('query', data.query, 6), ('gallery', data.gallery, 12)):
        saved = np.load('x.npz' if name == 'query' else 'x-gallery.npz')
        assert saved['embeddings'].shape == (n, 16) and saved['labels'].tolist() == images.labels.tolist()
        assert all(f'/{name}/' in path for path in saved['paths'])
    assert Image.open('x.png').size == (6 * (32 + 10) + 2, 6 * (32 + 10) + 2)
