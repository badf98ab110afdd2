"""--download. The download itself is torchvision's, and is replaced here."""
import os
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torchvision

import common
import train_ms
from common import UsageError


def unpack(url, folder, md5):
    """In place of the download: makes the folder of the dataset, and another file"""
    Path(folder, Path(url).stem, 'images').mkdir(parents=True)
    Path(folder, 'attributes.txt').touch()


@pytest.mark.parametrize('dataset, folder', [('cub', 'CUB_200_2011'), ('sop', 'Stanford_Online_Products')])
def test_an_archive_is_downloaded_once_and_leaves_nothing_else(tmp_path, monkeypatch, dataset, folder):
    get, row = Mock(side_effect=unpack), common.DATASETS[dataset]
    monkeypatch.setattr(torchvision.datasets.utils, 'download_and_extract_archive', get)
    for _ in range(2):
        common.download(dataset, tmp_path / 'new/data')     # folders that do not exist yet
        assert os.listdir(tmp_path / 'new/data') == [folder]
        assert os.listdir(tmp_path / 'new/data' / folder) == ['images']
    [call] = get.call_args_list
    assert call.args[0] == row['url'] and call.kwargs == dict(md5=row['md5'])


@pytest.mark.parametrize('error', [OSError('no route'), EOFError('cut')])
def test_a_failed_download_ends_in_one_line_and_leaves_nothing(tmp_path, monkeypatch, error):
    def fail(*args, **options):
        unpack(*args, **options)
        raise error
    monkeypatch.setattr(torchvision.datasets.utils, 'download_and_extract_archive', fail)
    with pytest.raises(UsageError, match=f'^cannot download https:.*: {error}; .* unpack it in {tmp_path}/data$'):
        common.download('cub', tmp_path / 'data')
    assert os.listdir(tmp_path / 'data') == []


def test_other_datasets_are_not_downloaded(tmp_path):
    with pytest.raises(UsageError, match='^--download is for cub and sop, not for cars'):
        common.download('cars', tmp_path / 'x')


def test_the_main_process_downloads_before_the_others_load(monkeypatch):
    order = []
    monkeypatch.setattr(common, 'world_size', lambda: 2)
    monkeypatch.setattr(common.distributed, 'broadcast_object_list', lambda box: order.append('wait'))
    monkeypatch.setattr(common, 'download', lambda *args: order.append('download'))
    data = SimpleNamespace(train=True)
    monkeypatch.setattr(common, 'load_dataset', lambda *args, **options: order.append('load') or data)
    args = train_ms.get_args(['--dataset', 'cub', '--download', '--device', 'cpu'])
    for rank, expected in ((0, ['download', 'wait', 'load']), (1, ['wait', 'load'])):
        order.clear()
        monkeypatch.setattr(common, 'rank', lambda rank=rank: rank)
        common.dataset_from(args)
        assert order == expected
