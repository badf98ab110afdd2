"""eval.py: metrics of a trained network, tables over seeds and folds, and comparisons."""
import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import make_folder, unit

import common
import eval as evaluation
import train_contrastive
import train_ms

EVAL = ['--device', 'cpu', '--precision', 'fp32']
MINE = ['--checkpoint', 'runs/mine', *EVAL]


@pytest.fixture
def trained(run, small, folder, tmp_path):
    """trained(*flags): makes runs/mine, trained on the folder `birds`. There is another folder, `cars`."""
    shutil.copytree(folder, tmp_path / 'birds')
    make_folder(tmp_path / 'cars', ['car5', 'car6', 'car7', 'car8'], per_class=4)
    return lambda *flags: run(train_ms, '--data', 'birds', '--name', 'mine', '--batch-size', '6', *EVAL, *flags)


def test_eval_repeats_the_last_record_of_a_run_and_ends_with_one_json_line(trained, capsys):
    record = trained('--resize', '40')
    capsys.readouterr()
    result = evaluation.main(MINE)
    captured = capsys.readouterr()
    assert result == dict(checkpoint='runs/mine', epoch=1, dataset='folder', data='birds') | {
        key: record[key] for key in ('R@1', 'R@2', 'R@4', 'R@8', 'RP', 'MAP@R', 's+', 's-')}
    assert json.loads(captured.out.splitlines()[-1]) == result and captured.err == ''
    assert '16 queries of 4 classes, with themselves as the gallery' in captured.out


def test_seen_classes_other_test_images_and_an_interrupted_run_are_warned_about(trained, capsys):
    trained()
    saved = common.read_checkpoint('runs/mine')
    for path, flags in (('runs/mine/last.pt', {}), ('fold.pt', dict(fold='0/2')), ('fold/last.pt', dict(fold='0/2')),
                        ('stopped/last.pt', dict(fold='0/2', patience=0))):             # it has stopped early
        Path(path).parent.mkdir(exist_ok=True)
        torch.save(saved | dict(args=saved['args'] | dict(steps=0, epochs=7) | flags), path)
    Path('birds/test/car1/0.jpg').rename('birds/test/car2/9.jpg')
    for flags, queries, *warnings in (
            ('runs/mine', '16 queries of 4', 'after epoch 1 of 7', 'are not those that the run was evaluated on'),
            ('runs/mine --whole', '46 queries of 10', 'after epoch 1 of 7', '6 of the 10 classes to evaluate have'),
            ('runs/mine --data cars', '8 queries of 2', 'after epoch 1 of 7'), ('fold.pt', '16 queries of 4'),
            ('fold', '16 queries of 4', 'after epoch 1 of 7'), ('stopped', '16 queries of 4')):
        capsys.readouterr()
        evaluation.main(['--checkpoint', *flags.split(), *EVAL])
        captured = capsys.readouterr()
        assert f'{queries} classes' in captured.out
        assert all(warning in line for warning, line in zip(warnings, captured.err.splitlines(), strict=True))


def test_the_analysis_uses_the_training_images_of_the_run_also_with_other_test_images(trained, capsys):
    """With --fold, its training images are those of its training classes."""
    trained('--fold', '0/2')
    model = common.load_checkpoint('runs/mine')
    images = common.load_dataset('folder', 'birds', fold='0/2', transform=model.transform).train
    shutil.copy(images.paths[7], 'cars/car8/copy.jpg')
    z, training = (common.embed(model, part) for part in (
        common.load_dataset('folder', 'cars', transform=model.transform).query, images))
    expected = evaluation.analyse(z, evaluation.main([*MINE, '--data', 'cars']), training, images)
    capsys.readouterr()
    result = evaluation.main([*MINE, '--data', 'cars', '--analyse'])
    assert {key: result[key] for key in expected} == pytest.approx(expected)
    assert result['copies'] == 1 and capsys.readouterr().err == ''
    Path(images.paths[7]).unlink()                          # does not help: the network has seen it
    evaluation.main([*MINE, '--data', 'cars', '--analyse'])
    assert 'the training images in birds, or their labels, are not those of the run' in capsys.readouterr().err


def test_interval_by_hand():
    """The mean is 12 and the standard deviation 2; t with two degrees of freedom is 4.3027 at 97.5%."""
    assert evaluation.interval([10, 12, 14]) == pytest.approx((12, 4.3027 * 2 / math.sqrt(3)), abs=1e-3)
    assert evaluation.interval([7.5]) == (7.5, None)


def test_concatenation_gives_each_network_the_same_weight():
    a, b = unit(5, dim=4, seed=1), unit(5, dim=6, seed=2)
    z = evaluation.concatenate([100 * a, 0.01 * b])
    torch.testing.assert_close(z @ z.T, (a @ a.T + b @ b.T) / 2)


def by_hand(script, seed):
    """The metrics of two folds on the folder x, (2, metrics): their mean, and those of the concatenated embeddings"""
    models = [common.load_checkpoint(f'runs/{script}-{seed}-{fold}') for fold in '01']
    data = common.load_dataset('folder', 'x', transform=models[0].transform)
    tests = [common.embed_test(model, data) for model in models]
    z, gallery = (None if parts[0] is None else torch.cat(parts, dim=1) for parts in zip(*tests))
    first, second, both = ([*common.score(data, *test).values()] for test in [*tests, (z, gallery)])
    return np.array([np.mean([first, second], axis=0), both])


@pytest.mark.parametrize('gallery', ['', 'omqnp'])
def test_the_table_over_seeds_and_folds_and_a_comparison_within_seeds(run, small, tmp_path, capsys, gallery):
    make_folder(tmp_path / 'x/test', 'mnop', per_class=4)
    make_folder(tmp_path / 'x/gallery', gallery, per_class=3, seed=1)
    scripts, runs = ['train_ms', 'train_contrastive'], [('1', '1'), ('0', '0'), ('1', '0'), ('0', '1')]
    for seed, fold in runs:
        for module in train_ms, train_contrastive:
            run(module, '--seed', seed, '--fold', f'{fold}/3', '--name', f'{module.__name__}-{seed}-{fold}',
                '--batch-size', '6', *EVAL)
    capsys.readouterr()
    ms, contrastive = ([f'runs/{script}-{seed}-{fold}' for seed, fold in runs] for script in scripts)
    result = evaluation.main(['--checkpoint', *ms, '--against', *contrastive, '--data', 'x', *EVAL])
    captured = capsys.readouterr()
    assert json.loads(captured.out.splitlines()[-1]) == result
    assert captured.err.splitlines() == [f'warning: {script} has only the folds 0/3, 1/3' for script in scripts]
    scores = np.array([[by_hand(script, seed) for seed in '01'] for script in scripts])     # (2, 2 seeds, 2, metrics)
    scores = np.concatenate([scores, scores[:1] - scores[1:]])                              # (3, 2 seeds, 2, metrics)
    found = np.array([[(value['mean'], value['interval']) for value in row.values() if isinstance(value, dict)]
                      for row in result['rows']]).reshape(3, 2, -1, 2)
    np.testing.assert_allclose(found[..., 0], scores.mean(axis=1), atol=1e-3)
    np.testing.assert_allclose(found[..., 1], 12.7062 * abs(scores[:, 0] - scores[:, 1]) / 2, atol=1e-3)
    assert [(row['recipe'], row['setting'].split()[0], row['seeds']) for row in result['rows']] == [
        (recipe, name, [0, 1]) for recipe in [*scripts, ' - '.join(scripts)] for name in ('separated', 'concatenated')]
    for row in result['rows']:
        assert f'{row["MAP@R"]["mean"]:.2f} ± {row["MAP@R"]["interval"]:.2f}' in captured.out
    [row] = evaluation.main(['--checkpoint', *ms[1:3], '--data', 'x', *EVAL])['rows']       # both are of fold 0
    of_fold = [evaluation.main(['--checkpoint', path, '--data', 'x', *EVAL])['RP'] for path in ms[1:3]]
    assert row['setting'] == 'one network' and row['RP']['mean'] == pytest.approx(sum(of_fold) / 2)


@pytest.fixture
def copy(trained):
    """copy(file, **changes): a copy of the checkpoint of a run with changes, for example of its flags"""
    trained('--freeze-bn')
    saved = common.read_checkpoint('runs/mine')

    def copy(file, **changes):
        flags = {flag: value for flag, value in changes.items() if flag not in saved}
        torch.save(saved | changes | dict(args=saved['args'] | dict(mixup=['input', 'feature']) | flags), file)
        return Path(file)
    return copy


def test_flags_that_do_not_change_results_are_not_part_of_the_recipe(copy):
    """Seed, fold, and how a network is computed are not part of a recipe. All other differences make another recipe."""
    same = [{}, dict(seed=1), dict(precision='bf16'), dict(workers=4), dict(compile=True), dict(data='y'),
            dict(eval_every=3), dict(dim=16.0), dict(mixup=['feature', 'input'])]
    others = [dict(dim=8), dict(script='train_copy'), dict(freeze_bn=False), dict(fold='0/4'), dict(fold='0/2')]
    runs = evaluation.read_runs([copy(f'{i}.pt', **changes) for i, changes in enumerate(same + others)])
    assert len({run.recipe for run in runs[:len(same)]}) == 1
    assert len({run.recipe for run in runs}) == 1 + len(others)
    assert list(evaluation.group([runs[0], *runs[9:11]])) == ['train_ms dim=16', 'train_ms dim=8', 'train_copy']


def test_vectors_and_images_are_not_exchanged(copy):
    copy('images')
    copy('vectors', dataset='vectors')
    for flags in ('images --dataset vectors --data v', 'vectors --dataset folder --data cars', 'vectors --sheet x.png',
                  'vectors --query x.png', 'vectors images --dataset folder --data cars'):
        with pytest.raises(common.UsageError, match='vectors need a network that was trained on vectors'):
            evaluation.main([*f'--checkpoint {flags}'.split(), *EVAL])


def test_runs_that_are_not_seeds_of_one_recipe_are_refused(copy):
    for file, changes in dict(a={}, stopped=dict(seed=2, epoch=0), other=dict(seed=2, classes=['a', 'b']),
                              elsewhere=dict(seed=2, data='cars'), a0=dict(fold='0/2'), a1=dict(fold='1/2'),
                              b0=dict(seed=1, fold='0/2'), c0=dict(dim=8, seed=1, fold='0/2'),
                              c1=dict(dim=8, fold='1/2')).items():
        copy(file, **changes)
    for files, message in (
            ('a stopped', 'different epochs'), ('a other', 'trained on different classes'),
            ('a elsewhere', 'name the images'), ('a --dataset cub', 'name the images'),
            ('a a', 'the same recipe, seed and fold'), ('a0 a1 b0', 'different folds'),
            ('a0 --against b0', 'compares two recipes'), ('a0 --against c0', 'the same seeds and folds'),
            ('a0 --against c1', 'the same seeds and folds')):
        with pytest.raises(common.UsageError, match=message):
            evaluation.main([*f'--checkpoint {files}'.split(), *EVAL])
