"""--download, with archives from a local server."""
import hashlib
import io
import tarfile
import threading
import zipfile
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

import common
import train_ms
from common import UsageError

pytestmark = pytest.mark.filterwarnings('ignore:Python 3.14 will:DeprecationWarning')      # on tarfile in torchvision


def jpeg(seed):
    file = io.BytesIO()
    Image.fromarray(np.random.default_rng(seed).integers(0, 255, (20, 22, 3), np.uint8)).save(file, 'JPEG')
    return file.getvalue()


# Four classes of CUB and of SOP, two images each. The archive of CUB has another file next to its folder.
CUB = {f'CUB_200_2011/images/{c}/{i}.jpg': jpeg(i) for c in ('001.a', '002.b', '101.c', '102.d') for i in (0, 1)}
CUB |= {'CUB_200_2011/images.txt': '\n'.join(f'{n} {path[20:]}' for n, path in enumerate(CUB)).encode(),
        'attributes.txt': b'1'}
SOP = {f'Stanford_Online_Products/chair_final/{n}.JPG': jpeg(n) for n in range(8)}
SOP |= {f'Stanford_Online_Products/Ebay_{split}.txt': 'image_id class_id super_class_id path\n{}'.format('\n'.join(
    f'{n} {n // 2 + 1} 1 chair_final/{n}.JPG' for n in indices)).encode()
    for split, indices in (('train', range(4)), ('test', range(4, 8)))}


def packed():
    """{name of an archive: its bytes}"""
    tgz, zipped = io.BytesIO(), io.BytesIO()
    with tarfile.open(fileobj=tgz, mode='w:gz') as archive:
        for name, content in CUB.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    with zipfile.ZipFile(zipped, 'w') as archive:
        for name, content in SOP.items():
            archive.writestr(name, content)
    return {'CUB_200_2011.tgz': tgz.getvalue(), 'Stanford_Online_Products.zip': zipped.getvalue()}


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A server of both archives: `asked` has the paths of its requests, stop() shuts it down."""
    (tmp_path / 'site').mkdir()
    monkeypatch.chdir(tmp_path)
    asked = []

    class Handler(SimpleHTTPRequestHandler):
        def __init__(self, *args):
            super().__init__(*args, directory=tmp_path / 'site')

        def log_request(self, code='-', size='-'):
            asked.append(self.path)

        def log_error(self, *args):
            pass
    server = ThreadingHTTPServer(('127.0.0.1', 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    for dataset, (name, content) in zip(('cub', 'sop'), packed().items()):
        serve(tmp_path, monkeypatch, dataset, name, content, f'http://127.0.0.1:{server.server_port}/{name}')
    yield SimpleNamespace(asked=asked, stop=lambda: (server.shutdown(), server.server_close()))
    server.shutdown()
    server.server_close()


def serve(tmp_path, monkeypatch, dataset, name, content, url):
    (tmp_path / 'site' / name).write_bytes(content)
    entry = dict(url=url, md5=hashlib.md5(content).hexdigest(), counts=dict(train=(4, 2), query=(4, 2)))
    for key, value in entry.items():
        monkeypatch.setitem(common.DATASETS[dataset], key, value)


@pytest.mark.parametrize('dataset, folder', [('cub', 'CUB_200_2011'), ('sop', 'Stanford_Online_Products')])
def test_an_archive_is_downloaded_once_and_leaves_nothing_else(site, tmp_path, monkeypatch, dataset, folder):
    for _ in range(2):
        common.download(dataset, 'new/data')                # folders that do not exist yet
        assert [path.name for path in (tmp_path / 'new/data').iterdir()] == [folder]
    requests = len(site.asked)
    assert requests and all(folder in path for path in site.asked)
    data = common.load_dataset(dataset, 'new/data', 16, 16)
    assert (len(data.train), len(data.query)) == (4, 4)
    monkeypatch.setenv('HOME', str(tmp_path / 'new'))
    common.download(dataset, '~/data')
    assert len(site.asked) == requests


def spoil(what, site, tmp_path, monkeypatch):
    file = tmp_path / 'site/CUB_200_2011.tgz'
    if what == 'no server':
        site.stop()
    elif what == 'no file':
        file.unlink()
    elif what == 'wrong checksum':
        file.write_bytes(file.read_bytes()[:-1] + b'x')
    elif what == 'cut archive':
        content = file.read_bytes()[:-200]
        serve(tmp_path, monkeypatch, 'cub', file.name, content, common.DATASETS['cub']['url'])
    elif what == 'other content':
        with tarfile.open(file, 'w:gz') as archive:
            archive.addfile(tarfile.TarInfo('x'))
        monkeypatch.setitem(common.DATASETS['cub'], 'md5', hashlib.md5(file.read_bytes()).hexdigest())
    else:
        def full(*args):
            raise OSError(28, 'No space left on device')
        monkeypatch.setattr(common.os, 'replace', full)


@pytest.mark.parametrize('what', [
    'no server', 'no file', 'wrong checksum', 'cut archive', 'other content', 'full disk'])
def test_a_failed_download_ends_in_one_line_and_leaves_nothing(site, tmp_path, monkeypatch, what):
    (tmp_path / 'data').mkdir()
    spoil(what, site, tmp_path, monkeypatch)
    with pytest.raises(UsageError) as error:
        common.download('cub', 'data')
    text = str(error.value)
    assert text.startswith(f'cannot download {common.DATASETS["cub"]["url"]}: ') and '\n' not in text
    assert text.endswith(f'get it in another way, and unpack it in {tmp_path / "data"}')
    assert not list((tmp_path / 'data').iterdir())


@pytest.mark.parametrize('dataset', ['cars', 'inshop', 'shapes', 'folder', 'vectors'])
def test_other_datasets_are_not_downloaded(tmp_path, dataset):
    with pytest.raises(UsageError, match=f'^--download serves cub and sop, not {dataset}; README says'):
        common.download(dataset, tmp_path / 'x')
    assert not (tmp_path / 'x').exists()


@pytest.mark.parametrize('dataset, hint', [
    ('cub', '--download gets CUB_200_2011.tgz, 1.1 GB'),
    ('sop', '--download gets Stanford_Online_Products.zip, 2.9 GB')])
def test_the_message_on_missing_data_names_the_flag(tmp_path, dataset, hint):
    with pytest.raises(UsageError, match=f'^{dataset} cannot be loaded.*{hint}'):
        common.load_dataset(dataset, tmp_path)


def test_the_flag_is_not_saved_with_a_run(site, small, tmp_path):
    flags = ('--dataset cub --device cpu --image-size 18 --weights none --batch-size 4 --per-class 2 --name mine '
             '--freeze-backbone-epochs 0').split()
    with pytest.raises(UsageError, match='cub cannot be loaded'):
        train_ms.main(flags)
    train_ms.main([*flags, '--epochs', '1', '--download'])
    (tmp_path / 'data').rename(tmp_path / 'old')
    resume = '--resume runs/mine --epochs 2 --device cpu'.split()
    with pytest.raises(UsageError, match='cub cannot be loaded'):
        train_ms.main(resume)
    record = train_ms.main([*resume, '--download'])
    assert record['epoch'] == 2 and (tmp_path / 'data/CUB_200_2011').is_dir()


def test_under_torchrun_the_main_process_downloads_before_the_others_load(monkeypatch):
    """The other processes wait until the download has finished."""
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
