"""--download. The download itself is torchvision's, and is replaced here."""
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torchvision

import common
import train_ms
from common import UsageError


@pytest.fixture
def site(tmp_path, monkeypatch):
    """`asked` has the arguments of each download, which makes the folder of the dataset and another file, or raises
    `error`."""
    monkeypatch.chdir(tmp_path)
    site = SimpleNamespace(asked=[], error=None)

    def download(url, folder, md5):
        site.asked.append((url, md5))
        Path(folder, Path(url).stem).mkdir()
        Path(folder, 'attributes.txt').touch()
        if site.error:
            raise site.error
    monkeypatch.setattr(torchvision.datasets.utils, 'download_and_extract_archive', download)
    return site


@pytest.mark.parametrize('dataset, folder', [('cub', 'CUB_200_2011'), ('sop', 'Stanford_Online_Products')])
def test_an_archive_is_downloaded_once_and_leaves_nothing_else(site, tmp_path, dataset, folder):
    for _ in range(2):
        common.download(dataset, 'new/data')                # folders that do not exist yet
        assert os.listdir('new/data') == [folder]
    row = common.DATASETS[dataset]
    assert site.asked == [(row['url'], row['md5'])]


@pytest.mark.parametrize('error', [OSError('no route'), EOFError('cut')])
def test_a_failed_download_ends_in_one_line_and_leaves_nothing(site, tmp_path, error):
    site.error = error
    with pytest.raises(UsageError, match=f'^cannot download https:.*: {error}; .* unpack it in {tmp_path}/data$'):
        common.download('cub', 'data')
    assert os.listdir('data') == []


def test_other_datasets_are_not_downloaded(tmp_path):
    with pytest.raises(UsageError, match='^--download is for cub and sop, not for cars'):
        common.download('cars', tmp_path / 'x')


def test_the_main_process_downloads_before_the_others_load(monkeypatch):
    order = []
    monkeypatch.setattr(common, 'broadcast_from_rank0', lambda value: order.append('wait'))
    monkeypatch.setattr(common, 'download', lambda *args: order.append('download'))
    data = SimpleNamespace(train=True)
    monkeypatch.setattr(common, 'load_dataset', lambda *args, **options: order.append('load') or data)
    args = train_ms.get_args(['--dataset', 'cub', '--download', '--device', 'cpu'])
    for rank, expected in ((0, ['download', 'wait', 'load']), (1, ['wait', 'load'])):
        order.clear()
        monkeypatch.setattr(common, 'rank', lambda rank=rank: rank)
        common.dataset_from(args)
        assert order == expected
