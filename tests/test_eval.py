"""eval.py: the same numbers as the training run, and the measures of Metrix, section 4.3."""
import json
import math
import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import draw_folder, on_circle

import common
import eval as evaluation
import train_ms

FP32 = '--checkpoint runs/mine --device cpu --precision fp32'.split()


def test_metrix_eq12_by_hand():
    """Queries at 0 and 90 degrees, examples at 60 and 200: nearest are 60 and 30 degrees away."""
    expected = ((2 - 2 * math.cos(math.radians(60))) + (2 - 2 * math.cos(math.radians(30)))) / 2
    assert evaluation.utilization(on_circle(0, 90), on_circle(60, 200)) == pytest.approx(expected, abs=1e-6)


def test_alignment_and_uniformity_by_hand():
    """At 0 and 60 degrees (class 0) and 180 degrees (class 1), the squared distances are 1, 3 and 4 at any length."""
    z = on_circle(0, 60, 180) * torch.tensor([[0.1], [3], [9]])
    assert evaluation.alignment(z, torch.tensor([0, 0, 1])) == pytest.approx(1)
    assert evaluation.uniformity(z) == pytest.approx(math.log((math.exp(-2) + math.exp(-6) + math.exp(-8)) / 3))


def test_uniformity_is_over_all_images_however_many():
    """The second thousand lies elsewhere."""
    z = torch.cat([on_circle(0).expand(1024, 2), on_circle(180).expand(1024, 2)])
    assert evaluation.uniformity(z) == pytest.approx(math.log((1023 + 1024 * math.exp(-8)) / 2047), abs=1e-6)


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


def test_the_analysis_is_of_the_test_set_and_by_the_training_images_of_the_network(tmp_path, birds):
    """It is so when another folder is evaluated, too. If the training images have moved, --data says where they are."""
    result = evaluation.main([*FP32, '--analyse'])
    model, load = common.load_checkpoint('runs/mine', precision='fp32'), common.load_dataset
    data = load('folder', 'birds', 40, 32)
    z, training = common.embed(model, data.query), common.embed(model, data.train)
    threshold, accuracy = evaluation.best_threshold(z, data.query.labels)
    expected = {'alignment': evaluation.alignment(z, data.query.labels), 'uniformity': evaluation.uniformity(z),
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


def test_nmi_has_as_many_clusters_as_there_are_classes(monkeypatch, capsys):
    pytest.importorskip('faiss')
    images = SimpleNamespace(labels=torch.arange(30) % 3)
    z = on_circle(*[120 * i + i // 3 for i in range(30)]).float()       # three directions, and a class in each
    measures = evaluation.analyse(z, z, SimpleNamespace(query=images, gallery=images), {'R@1': 50.0})
    assert measures['NMI'] == pytest.approx(100)
    assert measures['standard error'] == pytest.approx(9.129, abs=1e-3), '100 sqrt(0.5 x 0.5 / 30)'
    for owner, name, value in ((sys.modules, 'faiss', None), (vars(sys), 'platform', 'darwin')):
        with monkeypatch.context() as patch:
            patch.setitem(owner, name, value)
            without = evaluation.analyse(z, z, SimpleNamespace(query=images, gallery=images), {'R@1': 50.0})
        assert without.keys() == measures.keys() - {'NMI'} and 'NMI is left out' in capsys.readouterr().out


def test_another_dataset_needs_its_folder_and_a_drawn_one_has_none(run, small):
    run(train_ms, '--name', 'mine')
    with pytest.raises(common.UsageError, match='training was on folder: .* --data'):
        evaluation.main([*FP32, '--dataset', 'cub'])
    with pytest.raises(common.UsageError, match='--data has no effect with --dataset shapes.*add --dataset folder'):
        evaluation.main([*FP32, '--dataset', 'shapes', '--data', 'photos'])
    args = evaluation.get_args([*FP32, '--dataset', 'shapes'])
    assert evaluation.place_of_test_set(args, [dict(dataset='folder', data='x')])[0] == 'shapes'
