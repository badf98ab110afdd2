"""Training with several processes, as started by torchrun, equals training with one process."""
import shutil
from types import SimpleNamespace

import pytest
import torch
import worker
from conftest import SCRIPTS

import common
import train_ms

pytestmark = pytest.mark.slow


@pytest.fixture(scope='module')
def trained(folder, tmp_path_factory):
    """Folders of the runs by one process, and by two processes; and the output of these two"""
    one, two = tmp_path_factory.mktemp('one'), tmp_path_factory.mktemp('two')
    data = shutil.copytree(folder, one / 'data')
    (data / 'test/car0/3.jpg').unlink()                         # 15 test images: one process embeds the last one twice
    single = worker.start(worker.train_all, str(data), where=one)
    together = worker.finish(worker.start(worker.train_all, str(data), where=two, size=2), two)
    worker.finish(single, one)
    return one, two, together


def weights(run):
    saved = common.read_checkpoint(run)
    learnable = {f'loss_params.{name}': value for name, value in saved['loss_params'].items()}
    return saved['model'] | learnable, saved['rows']


@pytest.mark.parametrize('script', SCRIPTS)
def test_four_updates_by_two_processes_match_those_by_one(trained, script):
    """Weights after plain gradient descent in float64 agree, and so do the metrics of the evaluations."""
    one, two, _ = trained
    (expected, records), (found, others) = weights(one / 'runs' / script), weights(two / 'runs' / script)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-9)
    assert len(records) == len(others) > 1
    for record, other in zip(records, others):
        for key in ('R@1', 'RP', 'MAP@R', 'loss'):
            assert record[key] == pytest.approx(other[key], abs=1e-6)


def test_the_main_process_prints_and_writes_and_all_processes_use_its_metrics(trained):
    """If each process stopped early by its own metrics, one would wait for the other forever."""
    _, two, outputs = trained
    assert outputs[0].count('R@1 = ') == len(SCRIPTS) + 1 and 'R@1' not in outputs[1]
    assert sorted(path.name for path in (two / 'runs').iterdir()) == sorted(['ms-folder-1', *SCRIPTS])
    assert not list(two.glob('runs/*/*.tmp'))
    records = weights(two / 'runs' / 'ms-folder-1' / 'last.pt')[1]
    assert [record['MAP@R'] for record in records] == [1.0] * 3, 'before training, the best, and one not better'


def test_a_batch_that_cannot_be_divided_evenly_is_rejected(monkeypatch):
    monkeypatch.setattr(common, 'world_size', lambda: 2)
    batches = common.StepBatches([[0, 1, 2]], 0)
    batches.start(1, range(1))
    with pytest.raises(common.UsageError, match='2 processes cannot divide a batch of 3 images evenly: change --batch'):
        next(iter(batches))


def test_each_process_selects_a_different_gpu(monkeypatch):
    """The device is set before a tensor is made. This machine has fewer than 100 GPUs."""
    taken = []
    monkeypatch.setenv('LOCAL_RANK', '99')
    monkeypatch.setattr(torch.cuda, 'set_device', taken.append)
    with pytest.raises(common.UsageError, match='device cuda:99 cannot be used here'):
        common.pick_device('cuda')
    assert taken == ['cuda:99']


def test_processes_synchronize_batchnorm_on_gpus_and_need_frozen_batchnorm_on_a_cpu(small, monkeypatch):
    args = train_ms.get_args(['--device', 'cpu', '--precision', 'fp32'])
    monkeypatch.setattr(common, 'world_size', lambda: 2)
    monkeypatch.setattr(common.Embedder, 'place', lambda model, device: model)
    with pytest.raises(common.UsageError, match='several processes on a CPU.*add --freeze-bn'):
        common.build(args)
    args.device = SimpleNamespace(type='cuda')
    kinds = {type(layer) for layer in common.build(args).trunk if hasattr(layer, 'running_mean')}
    assert kinds == {torch.nn.SyncBatchNorm}
