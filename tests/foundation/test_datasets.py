"""Datasets: annotation files of the benchmarks, folders of images, folds, downloads, and the built-in shapes."""
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision
from conftest import REAL_DATA, make_folder, numbered

import common
import train_ms
from common import UsageError, load_dataset

# {annotation file: its lines}; the labels of each split; the classes of the test set; K; the path of the first query
FORMATS = {
    'cub': ({'CUB_200_2011/images.txt': [
        '1 001.A/x.jpg', '2 100.B/x.jpg', '4 101.C/x.jpg', '5 101.C/y.jpg', '6 200.D/x.jpg']},
        dict(train=[0, 1], query=[0, 0, 1]), ['101.C', '200.D'], (1, 2, 4, 8), 'CUB_200_2011/images/101.C/x.jpg'),
    'sop': ({'Stanford_Online_Products/Ebay_train.txt': [
        'image_id class_id super_class_id path', '1 1 1 bicycle_final/1.JPG', '2 2 4 bicycle_final/2.JPG'],
        'Stanford_Online_Products/Ebay_test.txt': [
        'image_id class_id super_class_id path', '3 3 1 chair/3.JPG', '4 4 12 chair/4.JPG', '5 4 12 chair/5.JPG']},
        dict(train=[0, 1], query=[0, 1, 1]), ['00003', '00004'], (1, 10, 100, 1000),
        'Stanford_Online_Products/chair/3.JPG'),
    'inshop': ({'Eval/list_eval_partition.txt': [
        '6', 'image_name item_id evaluation_status', 'img/a.jpg  id_00000002  train', 'img/b.jpg id_00000003 train',
        'img/WOMEN/c.jpg id_00000007 query', 'img/d.jpg id_00000007 gallery', 'img/f.jpg id_00000001 query',
        'img/g.jpg id_00000001 gallery']},
        dict(train=[0, 1], query=[1, 0], gallery=[1, 0]), ['id_00000001', 'id_00000007'], (1, 10, 20, 30, 40, 50),
        'Img/img/WOMEN/c.jpg')}


def class_names(images):
    """The class of each image"""
    return [images.classes[c] for c in images.labels.tolist()]


@pytest.mark.parametrize('name', FORMATS)
def test_official_formats(tmp_path, monkeypatch, name):
    """A benchmark is refused if an image is missing, or the counts are not the published ones."""
    files, labels, classes, ks, first = FORMATS[name]
    for file, lines in files.items():
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text('\n'.join(lines))
    monkeypatch.setattr(common.os.path, 'isfile', bool)                         # all images are there
    with pytest.raises(UsageError, match='published are'):
        load_dataset(name, tmp_path)
    counts = {split: (len(labels[split]), len({*labels[split]})) for split in labels}
    monkeypatch.setitem(common.DATASETS[name], 'counts', counts)
    data = load_dataset(name, tmp_path)
    assert {split: getattr(data, split).labels.tolist() for split in labels} == labels
    assert data.query.classes == data.gallery.classes == classes and data.ks == ks
    assert data.query.paths[0] == f'{tmp_path}/{first}' and (data.gallery is data.query) == ('gallery' not in labels)
    assert name != 'sop' or data.train.superclasses.tolist() == [0, 3]
    monkeypatch.setattr(common.os.path, 'isfile', lambda path: path != f'{tmp_path}/{first}')
    with pytest.raises(UsageError, match=f'1 are missing.*{first}'):
        load_dataset(name, tmp_path)


def test_both_layouts_of_cars(tmp_path, monkeypatch):
    """Classes 1 to 98 are for training. The other splits, in which file names repeat, are for classification."""
    cars = [('train/D 196/1.jpg', 196), ('train/B 98/2.jpg', 98), ('train/A 1/3.jpg', 1), ('test/C 99/1.jpg', 99)]
    fields = [(name, object) for name in 'relative_im_path bbox_x1 bbox_y1 bbox_x2 bbox_y2 class test'.split()]
    annotations = np.array([(path, 150, 1, 1, 150, number, 'test' in path) for path, number in cars], fields)
    pytest.importorskip('scipy.io').savemat(tmp_path / 'cars_annos.mat', dict(annotations=annotations))
    for path, number in cars:
        (tmp_path / 'car_data/car_data' / path).parent.mkdir(parents=True)
        (tmp_path / 'car_data/car_data' / path).touch()
        with open(tmp_path / f'anno_{path.split("/")[0]}.csv', 'a') as file:
            file.write(f'{path[-5:]},39,116,569,375,{number}\n')
    monkeypatch.setitem(common.DATASETS['cars'], 'counts', dict(train=(2, 2), query=(2, 2)))
    monkeypatch.setattr(common.os.path, 'isfile', bool)
    for layout in ('car_data/car_data/test/C 99', 'test/C 99'):
        data = load_dataset('cars', tmp_path)
        assert class_names(data.train) == ['098', '001'] and class_names(data.query) == ['196', '099']
        assert data.query.paths[1] == f'{tmp_path}/{layout}/1.jpg'
        (tmp_path / 'anno_train.csv').unlink(missing_ok=True)           # then only the file of the authors is there


def test_published_counts_of_images_and_classes(monkeypatch):
    assert {name: row['counts'] for name, row in common.DATASETS.items() if 'counts' in row} == dict(
        cub=dict(train=(5864, 100), query=(5924, 100)), cars=dict(train=(8054, 98), query=(8131, 98)),
        sop=dict(train=(59551, 11318), query=(60502, 11316)),
        inshop=dict(train=(25882, 3997), query=(14218, 3985), gallery=(12612, 3985)))
    monkeypatch.setattr(common.os.path, 'isfile', bool)
    for name in ('cub', 'cars'):
        if (REAL_DATA / name).exists():                                         # real annotation files
            load_dataset(name, REAL_DATA / name)


@pytest.mark.parametrize('folders, train, test', [
    ('Latin/a Greek/beta Greek/alpha Latin/deep/b', 'Greek/alpha Greek/beta', 'Latin/a Latin/deep/b'),
    ('e b c d a', 'a b', 'c d e'), ('train/x train/y test/a test/b', 'x y', 'a b'), ('train a b c', 'a b', 'c train'),
    ('train/x train/y test/b/front test/b/rear', 'x y', 'b/front b/rear'),
    ('test1 test2 test_3 test_4', 'test1 test2', 'test_3 test_4'), ('train/x train/y', 'x y', ''),
    ('train/x train/y test/a test/b gallery/a', 'x y', 'a b'), ('train/x train/y query/a gallery/a', 'x y', 'a'),
    ('art_gallery bank church school train_station', 'art_gallery bank', 'church school train_station')])
def test_which_classes_of_a_folder_are_for_training_and_which_for_testing(tmp_path, folders, train, test):
    """Without train/ and test/, the first half of the sorted classes is for training; of five classes, two."""
    make_folder(tmp_path, folders.split(), per_class=2)
    data = load_dataset('folder', tmp_path)
    assert class_names(data.train)[::2] == train.split() and (test or data.query is None)
    assert not test or class_names(data.query)[::2] == test.split()
    assert len(data.gallery) == 2 if 'gallery/' in folders else data.gallery is data.query
    assert data.train.paths == sorted(data.train.paths)


@pytest.mark.parametrize('folders, message', [
    ('gallery/a train/x train/y', 'put queries'),
    ('test/a query/a gallery/a', 'put queries'), ('TRAIN/x TRAIN/y Val/a Val/b', 'look like splits'),
    ('trainingSet/x trainingSet/y testSet/a', 'look like'), ('train2017/x my_val/y', 'look like'),
    ('shop/train/x shop/test/a', 'test and train look like'), ('art_gallery bank school train_station', 'look like')])
def test_folders_with_unknown_splits_are_refused(tmp_path, folders, message):
    make_folder(tmp_path, folders.split(), per_class=1)
    with pytest.raises(UsageError, match=message):
        load_dataset('folder', tmp_path)


@pytest.mark.parametrize('folders', ['a b c', 'train/x test/a test/b', 'test/a test/b'])
def test_training_needs_two_classes_and_evaluation_does_not(tmp_path, folders):
    make_folder(tmp_path, folders.split(), per_class=2)
    assert load_dataset('folder', tmp_path).query.num_classes == 2
    with pytest.raises(UsageError, match='has not two classes for training'):
        common.dataset_from(train_ms.get_args(['--dataset', 'folder', '--data', str(tmp_path), '--device', 'cpu']))


def test_a_whole_folder_is_the_test_set(tmp_path):
    make_folder(tmp_path, ['train/a', 'train/b', 'test/b', 'test/c'], per_class=2)
    data = load_dataset('folder', tmp_path, whole=True)
    assert data.train is None and data.query.classes == ['a', 'b', 'c'] and len(data.query) == 8
    assert load_dataset('folder', tmp_path / 'train/a', whole=True).query.classes == ['.'], 'images without a class'


def test_classes_in_both_splits_and_a_test_set_without_matches_are_named(tmp_path, capsys):
    """The name of a class does not depend on its form of Unicode. A folder that is in both, by a link, is refused."""
    make_folder(tmp_path, ['train/a', 'train/cafe\u0301', 'test/caf\u00e9', 'test/d'], per_class=2)
    load_dataset('folder', tmp_path)
    shared = 'warning: 1 classes are in the training set and in the test set, the first is caf\u00e9\n'
    assert capsys.readouterr().err == shared
    for labels in ('aaa', 'abc'):
        common.Splits('mine', query=common.Images(torch.eye(3), list(labels)))
        assert 'the metrics mean nothing' in capsys.readouterr().err
    (tmp_path / 'train/link').symlink_to(tmp_path / 'test/d')
    with pytest.raises(UsageError, match='2 are listed twice'):
        load_dataset('folder', tmp_path)


def test_which_folders_and_files_are_not_read(tmp_path, capsys):
    """Service folders, thumbnails and runs of these scripts are left out silently, others are named."""
    make_folder(tmp_path, ['train/#1', 'train/$5', 'test/c', 'test/d', 'test/runs', 'val/a'], per_class=2)
    for name in ('runs', '.ipynb_checkpoints', '#recycle', '__MACOSX', 'System Volume Information', '@eaDir'):
        make_folder(tmp_path, [f'{name}/x', f'train/{name}/x', f'train/#1/{name}'], per_class=1)
    for name in ('runs/x/log.jsonl', 'train/runs/x/log.jsonl', 'train/#1/runs/log.jsonl', 'test/c/._0.jpg',
                 'train/#1/2.GIF', 'test/licence.txt', 'test/c/1.heic', 'test/1.jpg'):
        (tmp_path / name).touch()
    data = load_dataset('folder', tmp_path)
    assert class_names(data.train) == ['#1', '#1', '#1', '$5', '$5'] and data.query.classes == ['c', 'd', 'runs']
    beside, unread = capsys.readouterr().err.splitlines()
    assert beside == 'warning: val beside test, train: not read'
    assert f'{tmp_path}/test: 3 files are not read, such as {tmp_path}/test/1.jpg' in unread


def test_shapes_is_fixed_and_its_test_classes_are_others():
    """The synthetic images must stay the same, since published results depend on them."""
    data = load_dataset('shapes')
    assert len(data.train) == len(data.query) == 4000 and len({*data.train.classes, *data.query.classes}) == 400
    pixels = torch.from_numpy(np.stack(data.query.items)).float()
    noise = pixels.diff(dim=1).abs()                        # the difference of neighbouring pixels
    assert [np.mean(data.train.items), pixels.mean(), noise.mean()] == pytest.approx([127.51, 126.32, 47.66], abs=0.02)


def test_blocks_are_contiguous_disjoint_and_cover_the_classes():
    folds = [common.hold_out(numbered(11), f'{i}/4') for i in range(4)]
    blocks = [splits['query'].classes for splits in folds]
    assert sum(blocks, []) == [f'class {c}' for c in range(11)] and [*map(len, blocks)] == [3, 3, 3, 2]
    for i, splits in enumerate(folds):
        assert splits['train'].classes == sum(blocks[:i] + blocks[i + 1:], [])
        for images in splits.values():
            assert images.labels.unique().tolist() == [*range(len(images.classes))], 'numbered anew from 0'
            indices = [int(image.mean()) for image in images.items]         # the pixels of an image are its index
            assert class_names(images) == [f'class {i // 2}' for i in indices]
    for fold in ('4/4', '-1/4', '0/1', '0/6'):
        with pytest.raises(UsageError, match=f'--fold {fold} is not I/N'):
            common.hold_out(numbered(11), fold)


def test_an_interrupted_download_is_repeated(tmp_path, monkeypatch):
    """The archive is complete, but it was being unpacked."""
    (tmp_path / 'birds/train').mkdir(parents=True)
    shutil.make_archive(tmp_path / 'data/birds', 'zip', tmp_path, 'birds')
    monkeypatch.setitem(common.DATASETS, 'sop', dict(url='https://example.org/birds.zip', md5=None))

    def extract(archive, folder, *others):
        Path(folder, 'birds').mkdir(parents=True)
        raise KeyboardInterrupt
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(torchvision.datasets.utils, 'extract_archive', extract)
        common.download('sop', tmp_path / 'data')
    for _ in range(2):
        common.download('sop', tmp_path / 'data')
    assert (tmp_path / 'data/birds/train').is_dir()


def test_the_main_process_downloads_before_all_processes_load(monkeypatch):
    done, data = [], common.Splits('cub', numbered(4))
    monkeypatch.setattr(common, 'from_rank0', lambda *call: done.append(call))
    monkeypatch.setattr(common, 'load_dataset', lambda *args, **options: done.append('load') or data)
    common.dataset_from(train_ms.get_args('--dataset cub --data x --download --device cpu'.split()))
    assert done == [(common.download, 'cub', 'x'), 'load']
