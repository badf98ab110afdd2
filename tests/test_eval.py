"""eval.py: the same numbers as the training run, and the measures of Metrix, section 4.3."""
import json
import math
import shutil
import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import draw_folder, on_circle, unit

import common
import eval as evaluation
import train_ms


def test_metrix_eq12_by_hand():
    """Queries at 0 and 90 degrees, examples at 60 and 200: nearest are 60 and 30 degrees away."""
    expected = ((2 - 2 * math.cos(math.radians(60))) + (2 - 2 * math.cos(math.radians(30)))) / 2
    assert evaluation.utilization(on_circle(0, 90), on_circle(60, 200)) == pytest.approx(expected, abs=1e-6)


def test_alignment_and_uniformity_against_loops():
    z, y = on_circle(0, 20, 70, 110, 200), torch.tensor([0, 0, 1, 1, 1])
    squared = torch.cdist(z, z).square()
    pairs = [(i, j) for i in range(5) for j in range(5) if i != j]
    aligned = [squared[i, j].item() for i, j in pairs if y[i] == y[j]]
    assert evaluation.alignment(z, y) == pytest.approx(sum(aligned) / len(aligned))
    spread = [math.exp(-2 * squared[i, j].item()) for i, j in pairs]
    assert evaluation.uniformity(z) == pytest.approx(math.log(sum(spread) / len(spread)))


def test_uniformity_is_over_all_images_however_many():
    """The second thousand lies elsewhere."""
    z = torch.cat([on_circle(0).expand(1024, 2), on_circle(180).expand(1024, 2)])
    assert evaluation.uniformity(z) == pytest.approx(math.log((1023 + 1024 * math.exp(-8)) / 2047), abs=1e-6)


def result_of(capsys):
    return json.loads(capsys.readouterr().out.strip().split('\n')[-1])


def test_eval_repeats_the_last_row_and_ends_with_one_json_line(run, small, capsys):
    row = run(train_ms, '--name', 'mine', '--precision', 'fp32', '--resize', '40')
    evaluation.main(['--checkpoint', 'runs/mine/last.pt', '--device', 'cpu', '--precision', 'fp32'])
    result = result_of(capsys)
    metrics = ('R@1', 'R@2', 'R@4', 'R@8', 'RP', 'MAP@R', 's+', 's-')
    assert {key: result[key] for key in metrics} == {key: row[key] for key in metrics}
    assert result['dataset'] == 'folder' and 'alignment' not in result


def test_a_folder_is_evaluated_without_the_training_classes(tmp_path, monkeypatch, small, capsys):
    """Of the run's own flat folder that is the test half, so the row of training; of another one, all classes."""
    monkeypatch.chdir(tmp_path)
    draw_folder(tmp_path / 'birds', list('abcdef'), per_class=4)
    draw_folder(tmp_path / 'cars', ['k', 'l', 'm', 'c'], per_class=4)
    row = train_ms.main('--dataset folder --data birds --steps 2 --device cpu --image-size 32 --batch-size 6 '
                        '--per-class 2 --name mine --precision fp32'.split())
    common_flags = ['--checkpoint', 'runs/mine', '--device', 'cpu', '--precision', 'fp32']
    evaluation.main(common_flags)
    out = capsys.readouterr().out
    assert '12 queries of 3 classes' in out and '3 classes were in the training set' in out
    assert json.loads(out.strip().split('\n')[-1])['MAP@R'] == row['MAP@R']
    evaluation.main([*common_flags, '--dataset', 'folder', '--data', 'cars'])
    assert '12 queries of 3 classes' in capsys.readouterr().out, 'c is the name of a training class'


def test_analyse_measures_the_test_set_and_its_distance_to_the_training_set(run, small, folder, capsys):
    run(train_ms, '--name', 'mine', '--precision', 'fp32')
    capsys.readouterr()
    evaluation.main(['--checkpoint', 'runs/mine', '--device', 'cpu', '--precision', 'fp32', '--analyse'])
    result = result_of(capsys)
    model = common.load_checkpoint('runs/mine', precision='fp32')
    data = common.load_dataset('folder', folder, 32, 32, 'cache')
    z, training = common.embed(model, data.query), common.embed(model, data.train)
    assert result['alignment'] == pytest.approx(evaluation.alignment(z, data.query.labels))
    assert (result['threshold'], result['balanced accuracy']) == pytest.approx(
        evaluation.best_threshold(z, data.query.labels))
    assert result['uniformity'] == pytest.approx(evaluation.uniformity(z))
    nearest = torch.cdist(z.double(), training.double()).square().amin(dim=1).mean().item()
    assert result['utilization'] == pytest.approx(nearest, abs=1e-5) and nearest > 1e-3


def test_the_standard_error_is_that_of_a_share():
    """Of 12 queries, half of which find a match first: 100 sqrt(0.5 x 0.5 / 12)"""
    images = SimpleNamespace(labels=torch.arange(12) % 3)
    data = SimpleNamespace(query=images, gallery=images)
    measures = evaluation.analyse(unit(12), unit(5, seed=1), data, {'R@1': 50.0})
    assert measures['standard error'] == pytest.approx(14.434, abs=1e-3)


def test_nmi_has_as_many_clusters_as_there_are_classes(monkeypatch, capsys):
    pytest.importorskip('faiss')
    images = SimpleNamespace(labels=torch.arange(30) % 3)
    z = on_circle(*[120 * i + i // 3 for i in range(30)]).float()       # three directions, and a class in each
    measures = evaluation.analyse(z, z, SimpleNamespace(query=images, gallery=images), {'R@1': 50.0})
    assert measures['NMI'] == pytest.approx(100)
    for owner, name, value in ((sys.modules, 'faiss', None), (vars(sys), 'platform', 'darwin')):
        with monkeypatch.context() as patch:
            patch.setitem(owner, name, value)
            without = evaluation.analyse(z, z, SimpleNamespace(query=images, gallery=images), {'R@1': 50.0})
        assert without.keys() == measures.keys() - {'NMI'} and 'NMI is left out' in capsys.readouterr().out


def test_training_images_that_have_moved_are_found_by_the_analysis(run, small, folder, tmp_path, capsys):
    run(train_ms, '--name', 'mine', '--precision', 'fp32')
    flags = ['--checkpoint', 'runs/mine', '--device', 'cpu', '--precision', 'fp32', '--analyse']
    before = evaluation.main(flags)
    shutil.copytree(folder, tmp_path / 'moved')
    parts = torch.load('runs/mine/last.pt', weights_only=True)
    torch.save(parts | dict(args=parts['args'] | dict(data='/nowhere')), 'runs/mine/last.pt')
    after = evaluation.main([*flags, '--data', str(tmp_path / 'moved')])
    assert after == before


def test_utilization_is_by_the_training_images_of_the_network(run, small, folder, tmp_path, monkeypatch, capsys):
    """Also where the network is evaluated on another dataset, or another folder"""
    run(train_ms, '--name', 'x')
    real, opened = common.load_dataset, []
    monkeypatch.setattr(common, 'load_dataset',
                        lambda name, root, *a, **kw: opened.append((name, root)) or real(name, root, *a, **kw))
    draw_folder(tmp_path / 'other', 'mnop', per_class=2, seed=5)
    evaluation.main('--checkpoint runs/x --dataset folder --data other --analyse --device cpu'.split())
    assert opened == [('folder', 'other'), ('folder', str(folder))]
    opened.clear()
    evaluation.main('--checkpoint runs/x --dataset shapes --analyse --device cpu'.split())
    assert [name for name, _ in opened] == ['shapes', 'folder']


def test_another_dataset_needs_its_folder(run, small):
    run(train_ms, '--name', 'mine')
    with pytest.raises(common.UsageError, match='training was on folder: .* --data'):
        evaluation.main(['--checkpoint', 'runs/mine', '--dataset', 'cub'])


def test_the_analysis_wants_the_images_of_the_training(tmp_path, monkeypatch, small):
    monkeypatch.chdir(tmp_path)
    draw_folder(tmp_path / 'birds', 'abcd', per_class=3)
    train_ms.main('--dataset folder --data birds --epochs 0 --image-size 17 --device cpu --name mine'.split())
    (tmp_path / 'birds').rename(tmp_path / 'gone')
    draw_folder(tmp_path / 'cars', 'mnop', per_class=3)
    with pytest.raises(common.UsageError, match='needs the training images, and cars has other ones: 2 cl.* m$'):
        evaluation.main('--checkpoint runs/mine --data cars --analyse --device cpu'.split())


def test_a_folder_beside_drawn_images_has_no_effect():
    """The likeliest mistake with images of one's own"""
    args = evaluation.get_args('--checkpoint x --data photos'.split())
    with pytest.raises(common.UsageError, match='--data has no effect with --dataset shapes.*add --dataset folder'):
        evaluation.place_of_test_set(args, [dict(dataset='shapes')])


def test_a_checkpoint_without_its_data_is_refused(tmp_path, small):
    model = common.Embedder('resnet18', dim=4, weights='none')
    common.save_checkpoint(tmp_path / 'x.pt', SimpleNamespace(script='train_ms', seed=0, resize=32, image_size=32),
                           model)
    for flags in ([], ['--against', str(tmp_path / 'x.pt')], ['--analyse']):
        with pytest.raises(common.UsageError):
            evaluation.main(['--checkpoint', str(tmp_path / 'x.pt'), '--device', 'cpu', *flags])
