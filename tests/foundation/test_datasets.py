"""Datasets: annotation files, folders of images, folds, and the synthetic shapes."""
import os
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import REAL_DATA, make_folder, numbered
from PIL import Image

import common
import train_ms
from common import UsageError, retrieval_metrics

# Folder of the images; {file: its lines}; the labels of each split; the classes of the test set
FORMATS = {
    'cub': ('CUB_200_2011/images', {'CUB_200_2011/images.txt': [
        '1 001.A/x.jpg', '2 100.B/x.jpg', '4 101.C/x.jpg', '5 101.C/y.jpg', '6 200.D/x.jpg']},
        dict(train=[0, 1], query=[0, 0, 1]), ['101.C', '200.D']),
    'sop': ('Stanford_Online_Products', {
        'Stanford_Online_Products/Ebay_train.txt': [
            'image_id class_id super_class_id path', '1 1 1 bicycle_final/1.JPG', '2 2 4 bicycle_final/2.JPG'],
        'Stanford_Online_Products/Ebay_test.txt': [
            'image_id class_id super_class_id path', '3 3 1 chair_final/3.JPG', '4 4 12 chair_final/4.JPG']},
        dict(train=[0, 1], query=[0, 1]), ['00003', '00004']),
    'inshop': ('Img', {'Eval/list_eval_partition.txt': [
        '8', 'image_name item_id evaluation_status', 'img/WOMEN/a.jpg      id_00000002     train',
        'img/b.jpg id_00000003 train', 'img/c.jpg id_00000007 query', 'img/d.jpg id_00000007 gallery',
        'img/e.jpg id_00000005 train', 'img/f.jpg id_00000001 query', 'img/g.jpg id_00000001 gallery',
        'img/h.jpg id_00000006 train']},
        dict(train=[0, 1, 2, 3], query=[1, 0], gallery=[1, 0]), ['id_00000001', 'id_00000007'])}


def unpack(name, root, monkeypatch):
    """A small version of a benchmark, with the layout of its archive"""
    monkeypatch.setitem(common.DATASETS[name], 'counts', {})
    base, annotations, *_ = FORMATS[name]
    for file, lines in annotations.items():
        for image in re.findall(r'\S+\.jpg', ' '.join(lines), re.I):
            (root / base / image).parent.mkdir(parents=True, exist_ok=True)
            Image.new('RGB', (16, 12)).save(root / base / image)
        (root / file).parent.mkdir(exist_ok=True)
        (root / file).write_text('\n'.join(lines))


@pytest.mark.parametrize('name', FORMATS)
def test_official_formats(tmp_path, monkeypatch, name):
    """The labels, classes and K of CUB, SOP and In-Shop follow their annotation files. Files of macOS are ignored."""
    unpack(name, tmp_path, monkeypatch)
    *_, labels, classes = FORMATS[name]
    counts = {split: (len(labels[split]), len({*labels[split]})) for split in labels}
    monkeypatch.setitem(common.DATASETS[name], 'counts', counts)
    data = common.load_dataset(name, tmp_path, 8, 8)
    assert {split: getattr(data, split).labels.tolist() for split in labels} == labels
    assert data.query.classes == data.gallery.classes == classes
    assert (data.gallery is data.query) == ('gallery' not in labels) and data.train[0][0].shape == (3, 8, 8)
    assert data.ks == dict(sop=(1, 10, 100, 1000), inshop=(1, 10, 20, 30, 40, 50)).get(name, (1, 2, 4, 8))
    assert data.train.superclasses is None if name != 'sop' else data.train.superclasses.tolist() == [0, 3]
    monkeypatch.setitem(common.DATASETS[name], 'counts', counts | dict(query=(9, 4)))
    with pytest.raises(UsageError, match='images, classes. are .*, expected are .*9, 4'):
        common.load_dataset(name, tmp_path)


def test_cars_official_format(tmp_path, monkeypatch):
    """Classes 1 to 98 are for training. The field `test`, which splits the images of a class, is ignored."""
    scipy_io = pytest.importorskip('scipy.io')
    monkeypatch.setitem(common.DATASETS['cars'], 'counts', dict(train=(3, 2), query=(3, 2)))
    fields = 'relative_im_path bbox_x1 bbox_y1 bbox_x2 bbox_y2 class test'.split()
    annotations = np.empty(6, dtype=[(field, object) for field in fields])
    for i, (class_, test) in enumerate([(196, 0), (98, 1), (1, 0), (99, 1), (98, 0), (99, 1)]):
        annotations[i] = (f'{i}.jpg', 150, 1, 1, 150, class_, test)
        (tmp_path / f'{i}.jpg').touch()
    scipy_io.savemat(tmp_path / 'cars_annos.mat', dict(annotations=annotations))
    data = common.load_dataset('cars', tmp_path)
    assert class_names(data.train) == ['098', '001', '098'] and class_names(data.query) == ['196', '099', '099']
    assert [Path(path).name for path in data.query.paths] == ['0.jpg', '3.jpg', '5.jpg']
    monkeypatch.setitem(sys.modules, 'scipy.io', None)
    with pytest.raises(UsageError, match='cars cannot be loaded: .*scipy'):
        common.load_dataset('cars', tmp_path)


def test_cars_as_a_folder_per_class(tmp_path, monkeypatch):
    """In this copy of Cars the images are in train/ and test/ of another task, which have the same file names."""
    monkeypatch.setitem(common.DATASETS['cars'], 'counts', dict(train=(3, 2), query=(3, 2)))
    for split, classes in (('train', [196, 98, 1]), ('test', [99, 98, 99])):
        lines = [f'0000{i}.jpg,39,116,569,375,{number}' for i, number in enumerate(classes)]
        (tmp_path / f'anno_{split}.csv').write_text('\n'.join(lines) + '\n')
        for i, number in enumerate(classes):
            path = tmp_path / f'car_data/car_data/{split}/Make {number} C-V Van/0000{i}.jpg'
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
    data = common.load_dataset('cars', tmp_path)
    assert class_names(data.train) == ['098', '001', '098'] and class_names(data.query) == ['196', '099', '099']
    for part in (data.train, data.query):
        folders = [Path(path).parent.name for path in part.paths]
        assert folders == [f'Make {int(name)} C-V Van' for name in class_names(part)]
    path.unlink()
    with pytest.raises(UsageError, match=f'^cars cannot be loaded: .*00002.jpg.*; --data {tmp_path} should have cars_'):
        common.load_dataset('cars', tmp_path)


def test_published_counts_of_images_and_classes():
    published = dict(
        cub=dict(train=(5864, 100), query=(5924, 100)), cars=dict(train=(8054, 98), query=(8131, 98)),
        sop=dict(train=(59551, 11318), query=(60502, 11316)),
        inshop=dict(train=(25882, 3997), query=(14218, 3985), gallery=(12612, 3985)))
    assert {name: common.DATASETS[name]['counts'] for name in published} == published


@pytest.mark.parametrize('name, file', [('cub', 'CUB_200_2011/images.txt'), ('cars', 'cars_annos.mat')])
def test_the_real_annotations_have_the_published_counts(monkeypatch, name, file):
    if not (REAL_DATA / name / file).exists():
        pytest.skip(f'{REAL_DATA / name / file} is not there')
    monkeypatch.setattr(common.os.path, 'isfile', lambda path: True)            # as if the images were there
    data = common.load_dataset(name, REAL_DATA / name)
    assert data.train and data.gallery is data.query


def class_names(images):
    """The class of each image"""
    return [images.classes[c] for c in images.labels.tolist()]


@pytest.mark.parametrize('folders, train, test', [
    ('Latin/a Greek/beta Greek/alpha Latin/deep/b', 'Greek/alpha Greek/beta', 'Latin/a Latin/deep/b'),
    ('a b c d e', 'a b', 'c d e'), ('train/x train/y val/c val/d test/a test/b', 'x y', 'a b'),
    ('train a b c', 'a b', 'c train'), ('train/x train/y test/b/front test/b/rear', 'x y', 'b/front b/rear'),
    ('test1 test2 test_3 test_4', 'test1 test2', 'test_3 test_4')])
def test_which_classes_of_a_folder_are_for_training_and_which_for_testing(tmp_path, folders, train, test):
    """Without train/ and test/, the first half of the sorted classes is for training; of five classes, two."""
    make_folder(tmp_path, folders.split(), per_class=2)
    first = tmp_path / folders.split()[0]
    (first / 'notes.txt').write_text('no image')
    (first / '._0.jpg').write_bytes(b'resource fork')
    shutil.copy(first / '0.jpg', tmp_path / 'sheet.jpg')                        # an image grid of eval.py
    data = common.load_dataset('folder', tmp_path / '..' / tmp_path.name)       # as in --data ../photos
    assert class_names(data.train)[::2] == train.split() and class_names(data.query)[::2] == test.split()
    assert data.gallery is data.query


@pytest.mark.parametrize('folders, message', [
    ('a b c', 'there are 3 classes to train on, and at least 4 are needed'),
    ('train/x test/a test/b', 'there are 1 classes to train on, and at least 2'),
    ('query/a query/b', 'there are query: put queries into test, or query next to gallery'),
    ('test/a query/a gallery/a', 'there are gallery and query and test: put queries'),
    ('TRAIN/x TRAIN/y Val/a Val/b', 'TRAIN and Val in {root} look like splits'),
    ('trainingSet/x trainingSet/y testSet/a', 'testSet and trainingSet in'),
    ('train2017/x my_val/y', 'my_val and train2017 in'),
    ('shop/train/x shop/train/y shop/test/a', 'test and train in {root}/shop look like splits')])
def test_folders_with_too_few_classes_or_unknown_splits_are_rejected(tmp_path, folders, message):
    make_folder(tmp_path, folders.split(), per_class=1)
    with pytest.raises(UsageError, match=f'^folder cannot be loaded: {message}'.replace('{root}', str(tmp_path))):
        common.load_dataset('folder', tmp_path)


@pytest.mark.parametrize('parts', ['a b c d', 'test/a test/b train/c train/d'])
def test_the_runs_of_these_scripts_are_no_images(tmp_path, parts, capsys):
    """The folder of the images is the working folder."""
    make_folder(tmp_path, parts.split(), per_class=1)
    before = common.load_dataset('folder', tmp_path)
    first = tmp_path / parts.split()[0]
    for run in (tmp_path / 'runs/mine', first / 'runs/mine'):
        shutil.copytree(first, run / 'more')
        (run / 'log.jsonl').touch()
    after = common.load_dataset('folder', tmp_path)
    assert before.query.paths == after.query.paths and before.train.paths == after.train.paths
    assert 'warning' not in capsys.readouterr().err


LIST = '''b 1.jpg Greek/b train
a.jpg Greek/b train
c/0.jpg c train
c/1.jpg c train

d.jpg d query
e.jpg e query
f.jpg d gallery
g.jpg e gallery
'''


@pytest.fixture
def listed(tmp_path):
    """listed(text): the Dataset of a folder whose files.txt has this text, and which has the images of LIST"""
    for line in LIST.split('\n'):
        if line:
            path = tmp_path / line.rsplit(maxsplit=2)[0]
            path.parent.mkdir(exist_ok=True)
            path.touch()

    def listed(text, encoding='utf-8', **options):
        (tmp_path / 'files.txt').write_text(text, encoding)
        return common.load_dataset('folder', tmp_path, **options)
    return listed


def test_files_txt_assigns_a_class_and_a_split_to_each_image(listed, tmp_path):
    data = listed(LIST)
    paths = [[Path(path).relative_to(tmp_path).as_posix() for path in images.paths]
             for images in (data.train, data.query, data.gallery)]
    assert paths == [['b 1.jpg', 'a.jpg', 'c/0.jpg', 'c/1.jpg'], ['d.jpg', 'e.jpg'], ['f.jpg', 'g.jpg']]
    assert class_names(data.train) == ['Greek/b', 'Greek/b', 'c', 'c']
    assert class_names(data.query) == class_names(data.gallery) == ['d', 'e']
    again = listed('\ufeff' + LIST.replace('query', 'test').replace('\n', '\r\n'))
    assert again.query.paths == data.query.paths and again.gallery.paths == data.gallery.paths
    absolute = ''.join(f'{tmp_path / line}\n' for line in LIST.splitlines() if line)
    assert listed(absolute).train.paths == data.train.paths
    data = listed(LIST.replace('gallery', 'test'))
    assert data.gallery is data.query and class_names(data.query) == list('dede')
    data = listed(LIST, whole=True)
    assert len(data.query) == 8 and data.query.classes == ['Greek/b', 'c', 'd', 'e'] and data.train is None


@pytest.mark.parametrize('old, new, message', [
    ('c/1.jpg c train', 'c/1.jpg c valid', "files.txt: 'c/1.jpg c valid' is not: path class train|query|gallery"),
    ('c/1.jpg c train', 'c/1.jpg', "files.txt: 'c/1.jpg' is not"), ('c/1.jpg', 'c/2.jpg', '1 of 8 images are missing'),
    ('f.jpg', 'a.jpg', '1 of 8 images are listed twice'), ('Greek/b', 'c', 'there are 1 classes to train on'),
    ('query', 'gallery', 'there is a gallery, but there are no queries')])
def test_a_wrong_files_txt_is_rejected_in_one_line(listed, old, new, message):
    for encoding, expected in (('utf-8', message), ('utf-16', 'files.txt is not text in UTF-8')):
        with pytest.raises(UsageError, match=re.escape(expected)) as raised:
            listed(LIST.replace(old, new), encoding)
        assert '\n' not in str(raised.value)


def test_empty_splits_and_recall_without_1_are_rejected():
    images, empty = common.Images(torch.eye(4), [0, 0, 1, 1]), common.Images([], [])
    for options, message in ((dict(gallery=empty), 'gallery has no images'), (dict(train=empty), 'train has no images'),
                             (dict(ks=(2, 4)), 'the K of Recall@K include 1')):
        with pytest.raises(UsageError, match=message):
            common.Splits('mine', query=images, **options)


def test_a_folder_with_only_train_has_no_test_set(tmp_path):
    """A fold holds out some of the training classes."""
    make_folder(tmp_path / 'train', 'abcd', per_class=2)
    data = common.load_dataset('folder', tmp_path)
    assert data.train.classes == list('abcd') and data.query is data.gallery is None
    data = common.load_dataset('folder', tmp_path, fold='0/2')
    assert data.train.classes == ['c', 'd'] and data.query.classes == ['a', 'b'] and data.gallery is data.query
    (tmp_path / 'test').mkdir()
    with pytest.raises(UsageError, match='^folder cannot be loaded: there are no images in .*/test'):
        common.load_dataset('folder', tmp_path)


def test_a_folder_with_queries_and_a_gallery(tmp_path):
    make_folder(tmp_path / 'train', ['a', 'b'], per_class=2)
    make_folder(tmp_path / 'test', ['d', 'c', 'a9'], per_class=1)              # a9 has no match in the gallery
    make_folder(tmp_path / 'gallery', ['b2', 'c', 'd'], per_class=2)
    data = common.load_dataset('folder', tmp_path)
    assert data.query.labels.tolist() == [0, 2, 3] and data.gallery.labels.tolist() == [1, 1, 2, 2, 3, 3]
    assert data.query.classes == data.gallery.classes == ['a9', 'b2', 'c', 'd'] and data.train.classes == ['a', 'b']


def test_a_whole_folder_is_the_test_set(tmp_path, capsys):
    make_folder(tmp_path, ['train/a', 'train/b', 'test/b', 'test/c'], per_class=1)
    common.load_dataset('folder', tmp_path)
    assert '1 classes are in the training set and in the test set, the first is b' in capsys.readouterr().err
    data = common.load_dataset('folder', tmp_path, whole=True)
    assert data.train is None and data.query.classes == ['a', 'b', 'c'] and class_names(data.query) == list('bcab')
    data = common.load_dataset('folder', tmp_path / 'train/a', whole=True)
    assert len(data.query) == 1 and data.query.classes == ['.'], 'images without a class'
    with pytest.raises(UsageError, match='--whole is for a folder of images'):
        common.load_dataset('shapes', whole=True)


def test_hidden_folders_are_not_classes(tmp_path):
    """Other names with signs are classes."""
    make_folder(tmp_path / 'train', ['#1', '$5', '@anna'], per_class=1)
    for name in ('.ipynb_checkpoints', '#recycle', '__MACOSX', 'System Volume Information'):
        make_folder(tmp_path, [name, f'train/{name}', f'train/#1/{name}'], per_class=1)
    assert common.load_dataset('folder', tmp_path).train.classes == ['#1', '$5', '@anna']


def test_folders_and_images_that_are_not_read_are_named(tmp_path, capsys):
    make_folder(tmp_path, 'train/a train/b val/a test/c test/d .cache/x'.split(), per_class=1)
    (tmp_path / 'train/a/1.GIF').touch()
    (tmp_path / 'test/licence.txt').write_text('next to the classes')
    (tmp_path / 'test/c/1.heic').write_bytes(b'a kind that PIL does not read')
    (tmp_path / 'test/1.jpg').touch()
    assert len(common.load_dataset('folder', tmp_path).train) == 3
    beside, unread = capsys.readouterr().err.splitlines()
    assert beside == 'warning: val beside test, train: not read'
    assert f'{tmp_path}/test: 2 files are not read, the first is {tmp_path}/test/c/1.heic' in unread


def test_classes_and_images_do_not_depend_on_the_order_of_directory_entries(tmp_path, monkeypatch):
    make_folder(tmp_path / 'x', 'abc', per_class=3)
    (tmp_path / 'x/a/link').symlink_to(make_folder(tmp_path / 'elsewhere', 'd', per_class=3) / 'd')

    def backwards(*args, walk=os.walk, **options):
        for folder, folders, files in walk(*args, **options):
            folders.sort(reverse=True)
            yield folder, folders, sorted(files, reverse=True)
    monkeypatch.setattr(os, 'walk', backwards)
    images = common.load_dataset('folder', tmp_path / 'x', whole=True).query
    assert class_names(images) == ['a'] * 3 + ['a/link'] * 3 + ['b'] * 3 + ['c'] * 3
    assert [path.split('/')[-1] for path in images.paths] == ['0.jpg', '1.jpg', '2.jpg'] * 4
    (tmp_path / 'x/b/3.jpg').symlink_to(tmp_path / 'x/c/0.jpg')                 # equal files may be stored once
    assert len(common.load_dataset('folder', tmp_path / 'x', whole=True).query) == 13
    (tmp_path / 'x/b/link').symlink_to(tmp_path / 'x/a')    # another name of a class is not another class
    with pytest.raises(UsageError, match='6 of 19 images are listed twice'):
        common.load_dataset('folder', tmp_path / 'x')


@pytest.mark.parametrize('resize, image_size, expected', [
    (None, None, (256, 224)), (None, 112, (128, 112)), (300, None, (300, 224)), (300, 200, (300, 200))])
def test_the_resized_side_follows_the_crop_and_never_the_reverse(tmp_path, monkeypatch, resize, image_size, expected):
    unpack('cub', tmp_path, monkeypatch)
    data = common.load_dataset('cub', tmp_path, resize, image_size, workers=0)
    assert (data.query.transform.min_side, data.query[0][0].shape[1], data.train[0, 1][0].shape[1]) == (
        *expected, expected[1])


def test_shapes_is_fixed_disjoint_and_not_solved_by_pixels():
    """The synthetic images must stay the same, since published results depend on them."""
    data = common.load_dataset('shapes')
    assert len(data.train) == len(data.query) == 4000 and data.train[0][0].shape == (3, 32, 32)
    assert not set(data.train.classes) & set(data.query.classes) and len(data.train.classes) == 200
    means = [np.mean(images.items) for images in (data.train, data.query)]
    assert means == pytest.approx([127.51, 126.32], abs=0.03)
    pixels = torch.from_numpy(np.stack(data.query.items)).float()
    # The difference of neighbouring pixels shows whether the noise is the same.
    assert pixels.diff(dim=1).abs().mean().item() == pytest.approx(47.66, abs=0.01)
    small = torch.nn.functional.avg_pool2d(pixels.permute(0, 3, 1, 2), 4).flatten(1)
    assert retrieval_metrics(small, data.query.labels)['R@1'] < 10


@pytest.mark.parametrize('classes, n', [(8, 4), (11, 4)])
def test_blocks_are_contiguous_disjoint_and_cover_the_classes(classes, n):
    folds = [common.hold_out(numbered(classes), f'{i}/{n}') for i in range(n)]
    blocks = [splits['query'].classes for splits in folds]
    assert sum(blocks, []) == [f'class {c}' for c in range(classes)]
    assert max(map(len, blocks)) - min(map(len, blocks)) <= 1
    for i, splits in enumerate(folds):
        assert splits['train'].classes == sum(blocks[:i] + blocks[i + 1:], [])
        for images in splits.values():
            assert images.labels.tolist() == (torch.arange(len(images)) // 2).tolist(), 'numbered anew from 0'
            indices = [int(image.mean()) for image in images.items]         # the pixels of an image are its index
            assert class_names(images) == [f'class {i // 2}' for i in indices]
    with pytest.raises(UsageError, match='--fold 0/4 needs at least two classes in each block, of 7 training classes'):
        common.hold_out(numbered(7), '0/4')
    with pytest.raises(UsageError, match="a fold is I/N with I from 0 to N - 1 and N at least 2, and not '4/4'"):
        common.hold_out(numbered(8), '4/4')


def test_a_run_on_a_fold_reads_no_image_of_the_test_set(tmp_path, monkeypatch, small):
    """The test images cannot be decoded here. Folds are made of the first half of the classes of an unsplit folder."""
    monkeypatch.chdir(tmp_path)
    make_folder(tmp_path / 'x', 'abcdefghijkl', per_class=3)
    for c in 'ghijkl':
        for path in (tmp_path / f'x/{c}').iterdir():
            path.write_bytes(b'no image')
    flags = '--dataset folder --data x --image-size 32 --batch-size 8 --per-class 2 --device cpu --epochs 1'.split()
    assert train_ms.main([*flags, '--fold', '1/3', '--name', 'fold'])['epoch'] == 1
    saved = common.read_checkpoint('runs/fold')
    assert saved['classes'] == list('abefcd'), 'validation classes have been seen as well'
    with pytest.raises(UsageError, match='cannot read the image x/g/0.jpg'):
        train_ms.main(flags)
