"""Training with several processes, as started by torchrun, equals training with one process."""
import shutil

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
    (data / 'test/car0/3.jpg').unlink()                     # one process embeds the last of 15 test images twice
    single = worker.start(worker.train_all, str(data), where=one)
    outputs = worker.finish(worker.start(worker.train_all, str(data), where=two, size=2), two)
    worker.finish(single, one)
    return one / 'runs', two / 'runs', outputs


@pytest.mark.parametrize('script', SCRIPTS)
def test_four_updates_by_two_processes_match_those_by_one(trained, script):
    """Weights after plain gradient descent in float64 agree, and so do the metrics of the evaluations."""
    expected, found = (common.read_checkpoint(runs / script) for runs in trained[:2])
    for part in ('model', 'loss_params'):
        torch.testing.assert_close(found[part], expected[part], rtol=0, atol=1e-9)
    for row, other in zip(expected['rows'], found['rows'], strict=True):
        assert [row[key] for key in ('R@1', 'RP', 'MAP@R')] == [other[key] for key in ('R@1', 'RP', 'MAP@R')]
        assert row['loss'] == pytest.approx(other['loss'], abs=1e-6)


def test_the_main_process_prints_and_writes_and_all_processes_use_its_metrics(trained):
    _, runs, outputs = trained
    assert outputs[0].count('R@1 = ') == len(SCRIPTS) + 1 and 'R@1' not in outputs[1]
    assert sorted(path.name for path in runs.iterdir()) == sorted(['ms-folder-1', *SCRIPTS])
    rows = common.read_checkpoint(runs / 'ms-folder-1/last.pt')['rows']
    assert [row['MAP@R'] for row in rows] == [1.0] * 3, 'before training, the best, and one not better'


def test_processes_share_a_batch_evenly_and_the_statistics_of_batchnorm_and_have_a_gpu_each(small, monkeypatch):
    """This machine has fewer than 100 GPUs."""
    args, taken = train_ms.get_args(['--device', 'cpu', '--precision', 'fp32']), []
    monkeypatch.setenv('LOCAL_RANK', '99')
    monkeypatch.setattr(torch.cuda, 'set_device', taken.append)
    with pytest.raises(common.UsageError, match='--device cuda:99 cannot be used here'):
        common.pick_device('cuda')
    assert taken == ['cuda:99']
    monkeypatch.setattr(common, 'world_size', lambda: 2)
    assert isinstance(common.build(args).trunk.bn1, torch.nn.SyncBatchNorm)
    with_more = type('BatchNormAct2d', (torch.nn.BatchNorm2d,), {})      # torch would convert it, and drop what is more
    with pytest.raises(common.UsageError, match='the BatchNorm of this network cannot be trained: add --freeze-bn'):
        common.build(args, trunk=with_more(3))
    with pytest.raises(common.UsageError, match='2 processes cannot divide a batch of 3 images evenly'):
        common.own_positions(3)
