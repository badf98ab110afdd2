"""Several processes, as torchrun starts them, train the network that one process trains."""
from datetime import timedelta
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
    """Folders of the runs by one process, and by two at once; and what these two print"""
    one, two = tmp_path_factory.mktemp('one'), tmp_path_factory.mktemp('two')
    alone = worker.start(worker.train_all, str(folder), where=one)
    together = worker.finish(worker.start(worker.train_all, str(folder), where=two, size=2), two)
    worker.finish(alone, one)
    return one, two, together


def weights(run):
    saved = common.read_checkpoint(run)
    return saved['model'] | {f'learned.{name}': value for name, value in saved['learned'].items()}, saved['rows']


@pytest.mark.parametrize('script', SCRIPTS)
def test_four_updates_by_two_processes_are_those_of_one(trained, script):
    """Plain gradient descent in float64. The evaluations, whose images are shared out as well, agree, too."""
    one, two, _ = trained
    (expected, rows), (found, other_rows) = weights(one / 'runs' / script), weights(two / 'runs' / script)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-9)
    assert len(rows) == len(other_rows) > 1
    for row, other in zip(rows, other_rows):
        for key in ('R@1', 'RP', 'MAP@R', 'loss'):
            assert row[key] == pytest.approx(other[key], abs=1e-9)


def test_the_main_process_prints_and_writes_and_its_row_is_that_of_all(trained):
    """If each process judged its own row, the one with more patience would wait for the other for ever."""
    _, two, outputs = trained
    assert outputs[0].count('R@1 = ') == len(SCRIPTS) + 1 and 'R@1' not in outputs[1]
    assert sorted(path.name for path in (two / 'runs').iterdir()) == sorted(['ms-folder-1', *SCRIPTS])
    assert not list(two.glob('runs/*/*.tmp'))
    rows = weights(two / 'runs' / 'ms-folder-1' / 'last.pt')[1]
    assert [row['MAP@R'] for row in rows] == [1.0] * 3, 'before training, the best, and one without gain'


def test_each_process_crops_and_embeds_its_share(folder, tmp_path):
    """Of 7 images three processes crop 3, 2 and 2; of a set of 2 images the third embeds none."""
    (tmp_path / 'one').mkdir()
    alone = worker.start(worker.crop_and_embed, str(folder), where=tmp_path / 'one')
    worker.finish(worker.start(worker.crop_and_embed, str(folder), where=tmp_path, size=3), tmp_path)
    worker.finish(alone, tmp_path / 'one')
    expected = torch.load(tmp_path / 'one/crops-0.pt')
    found = [torch.load(tmp_path / f'crops-{rank}.pt') for rank in range(3)]
    assert [each['crops'] for each in [expected, *found]] == [list(range(7)), [0, 1, 2], [3, 4], [5, 6]]
    for each in found:
        assert torch.equal(each['x'], expected['x']) and torch.equal(each['y'], expected['y'])
        for z, other in zip(each['embedded'], expected['embedded'], strict=True):
            torch.testing.assert_close(z, other, rtol=1e-5, atol=1e-5)
    assert len(expected['embedded'][0]) == 2 and len(expected['embedded'][1]) == 11


def test_how_long_processes_wait_for_each_other(small, folder, tmp_path, monkeypatch):
    """Half an hour, as long as an evaluation may take; but a day for the main process, which decodes the images"""
    waits = []
    monkeypatch.setenv('WORLD_SIZE', '2')
    monkeypatch.setattr(torch.distributed, 'init_process_group', lambda backend, timeout: waits.append(timeout))
    common.join_processes(torch.device('cpu'))
    monkeypatch.setattr(common, 'world', lambda: 2)
    monkeypatch.setattr(common, 'rank', lambda: 0)
    monkeypatch.setattr(torch.distributed, 'new_group', lambda backend, timeout: waits.append(timeout))
    monkeypatch.setattr(torch.distributed, 'barrier', lambda group: None)
    monkeypatch.delenv('WORLD_SIZE')
    common.dataset_from(train_ms.get_args(['--dataset', 'folder', '--data', str(folder), '--cache', str(tmp_path)]))
    assert waits == [timedelta(minutes=30), timedelta(days=1)]


def test_each_process_takes_a_gpu_of_its_own(monkeypatch):
    """Before it makes a tensor; here there are not as many as 100."""
    taken = []
    monkeypatch.setenv('LOCAL_RANK', '99')
    monkeypatch.setattr(torch.cuda, 'set_device', taken.append)
    with pytest.raises(common.UsageError, match='--device cuda:99 cannot be used here'):
        common.pick_device('cuda')
    assert taken == ['cuda:99']


def test_processes_share_the_statistics_of_batchnorm_on_gpus_and_need_frozen_ones_on_a_cpu(small, monkeypatch):
    args = train_ms.get_args(['--device', 'cpu', '--precision', 'fp32'])
    monkeypatch.setattr(common, 'world', lambda: 2)
    monkeypatch.setattr(common.Embedder, 'place', lambda model, device: model)
    with pytest.raises(common.UsageError, match='several processes on a CPU.*take --freeze-bn'):
        common.build(args)
    args.device = SimpleNamespace(type='cuda')
    kinds = {type(layer) for layer in common.build(args).trunk if hasattr(layer, 'running_mean')}
    assert kinds == {torch.nn.SyncBatchNorm}
