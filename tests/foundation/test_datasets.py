"""Datasets: annotation files, folders, folds, and the shapes that are drawn."""
import os
import re
import shutil
import sys
import unicodedata
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import REAL_DATA, draw_folder, numbered
from PIL import Image

import common
import train_ms
from common import UsageError, retrieval_metrics

# ---- annotation files

# Where the images lie; {file: its lines}; the labels of each split; the classes of the test set
FORMATS = {
    'cub': ('CUB_200_2011/images', {'CUB_200_2011/images.txt': [
        '1 001.A/x.jpg', '2 100.B/x.jpg', '3 100.B/._x.jpg', '4 101.C/x.jpg', '5 101.C/y.jpg', '6 200.D/x.jpg']},
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
    """A small version of a benchmark, as its site unpacks it"""
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
    """In CUB the first 100 classes train. Files that macOS leaves beside the images are no images."""
    unpack(name, tmp_path, monkeypatch)
    *_, labels, classes = FORMATS[name]
    data = common.load_dataset(name, tmp_path, 8, 8, tmp_path / 'cache')
    assert {split: getattr(data, split).labels.tolist() for split in labels} == labels
    assert data.query.classes == data.gallery.classes == classes
    assert (data.gallery is data.query) == ('gallery' not in labels) and data.train[0].shape == (8, 10, 3)
    assert data.ks == dict(sop=(1, 10, 100, 1000), inshop=(1, 10, 20, 30, 40, 50)).get(name, (1, 2, 4, 8))
    assert data.train.groups is None if name != 'sop' else data.train.groups.tolist() == [0, 3]
    monkeypatch.setitem(common.DATASETS[name], 'counts', dict(train=(9, 4)))
    with pytest.raises(UsageError, match=r'train has \(images, classes\) \(\d, \d\), expected are \(9, 4\)'):
        common.load_dataset(name, tmp_path)


def test_cars_official_format(tmp_path, monkeypatch):
    """The class decides the side. `test`, which is about another task, does not."""
    scipy_io = pytest.importorskip('scipy.io')
    monkeypatch.setitem(common.DATASETS['cars'], 'counts', dict(train=(3, 2), query=(3, 2)))
    fields = 'relative_im_path bbox_x1 bbox_y1 bbox_x2 bbox_y2 class test'.split()
    rows = np.empty(6, dtype=[(field, object) for field in fields])
    (tmp_path / 'car_ims').mkdir()
    for i, (class_, test) in enumerate([(196, 0), (98, 1), (1, 0), (99, 1), (98, 0), (99, 1)]):
        rows[i] = (f'car_ims/{i}.jpg', 150, 1, 1, 150, class_, test)
        Image.new('RGB', (16, 12)).save(tmp_path / f'car_ims/{i}.jpg')
    scipy_io.savemat(tmp_path / 'cars_annos.mat', dict(annotations=rows))
    data = common.load_dataset('cars', tmp_path, 8, 8, tmp_path / 'cache')
    assert data.train.classes == ['001', '098'] and data.query.classes == ['099', '196']
    assert data.train.labels.tolist() == [1, 0, 1] and data.query.labels.tolist() == [1, 0, 0]
    monkeypatch.setitem(sys.modules, 'scipy.io', None)
    with pytest.raises(UsageError, match='cars cannot be loaded: .*scipy'):
        common.list_images('cars', tmp_path)


def test_cars_as_a_folder_per_class(tmp_path, monkeypatch):
    """The copy has its images by class and by the other task's train/ and test/, which number them alike."""
    monkeypatch.setitem(common.DATASETS['cars'], 'counts', dict(train=(3, 2), query=(3, 2)))
    for split, numbers in (('train', [196, 98, 1]), ('test', [99, 98, 99])):
        rows = [f'0000{i}.jpg,39,116,569,375,{number}' for i, number in enumerate(numbers)]
        (tmp_path / f'anno_{split}.csv').write_text('\n'.join(rows) + '\n')
        for i, number in enumerate(numbers):
            folder = tmp_path / 'car_data/car_data' / split / f'Make {number} C-V Van'
            folder.mkdir(parents=True, exist_ok=True)
            Image.new('RGB', (16, 12), (number, i, 0)).save(folder / f'0000{i}.jpg', quality=100)
    data = common.load_dataset('cars', tmp_path, 8, 8, tmp_path / 'cache')
    assert data.train.classes == ['001', '098'] and data.query.classes == ['099', '196']
    assert [data.train.classes[c] for c in data.train.labels] == ['098', '001', '098']
    assert [data.query.classes[c] for c in data.query.labels] == ['196', '099', '099']
    for part in (data.train, data.query):                   # the red of an image is the number of its class
        assert [round(part[i][..., 0].mean()) for i in range(3)] == pytest.approx(
            [int(part.classes[c]) for c in part.labels], abs=2)
    (tmp_path / 'car_data/car_data/test/Make 98 C-V Van/00001.jpg').unlink()
    with pytest.raises(UsageError, match='cars cannot be loaded: .*00001.jpg'):
        common.load_dataset('cars', tmp_path)


def test_published_counts_and_ks():
    """Images and classes as in the papers, and in README; K of Recall@K as in the literature"""
    published = dict(
        cub=dict(train=(5864, 100), query=(5924, 100)), cars=dict(train=(8054, 98), query=(8131, 98)),
        sop=dict(train=(59551, 11318), query=(60502, 11316)),
        inshop=dict(train=(25882, 3997), query=(14218, 3985), gallery=(12612, 3985)))
    assert {name: common.DATASETS[name]['counts'] for name in published} == published
    ks = dict.fromkeys(['shapes', 'folder', 'vectors', 'cub', 'cars'], (1, 2, 4, 8))
    ks |= dict(sop=(1, 10, 100, 1000), inshop=(1, 10, 20, 30, 40, 50))
    assert {name: common.DATASETS[name].get('ks', common.Dataset.ks) for name in ks} == ks


@pytest.mark.parametrize('name, file', [('cub', 'CUB_200_2011/images.txt'), ('cars', 'cars_annos.mat')])
def test_the_real_annotations_have_the_published_counts(monkeypatch, name, file):
    if not (REAL_DATA / name / file).exists():
        pytest.skip(f'{REAL_DATA / name / file} is not there')
    monkeypatch.setattr(common.os.path, 'isfile', lambda path: True)            # as if the images were there
    assert common.list_images(name, REAL_DATA / name)[0].keys() == {'train', 'query'}


@pytest.mark.parametrize('name', ['cub', 'cars', 'sop', 'inshop', 'folder'])
def test_a_missing_dataset_says_where_what_and_how(name, tmp_path):
    for where in (tmp_path, tmp_path / 'nowhere'):
        with pytest.raises(UsageError, match=f'^{name} cannot be loaded: .*{where}, which --data names, should hold'):
            common.load_dataset(name, where)


@pytest.mark.parametrize('options, decoded, queries', [
    (dict(known=()), 'gallery query', 2), (dict(fold='0/2'), 'train', 2), ({}, 'gallery query train', 2)])
def test_only_what_is_used_is_decoded(tmp_path, monkeypatch, options, decoded, queries):
    """An evaluation reads no training images of a benchmark, and a fold no test images."""
    unpack('inshop', tmp_path / 'shop', monkeypatch)
    data = common.load_dataset('inshop', tmp_path / 'shop', 16, 16, tmp_path / 'cache', **options)
    assert len(data.query) == queries and (data.gallery is data.query) == ('fold' in options)
    assert (data.train is None) == ('known' in options)
    assert sorted(path.name.split('-')[1] for path in (tmp_path / 'cache').glob('*.bin')) == decoded.split()


# ---- folders of images

def names(rows):
    return [row[1] for row in rows]


@pytest.mark.parametrize('folders, train, test', [
    ('Latin/a Greek/beta Greek/alpha Latin/deep/b', 'Greek/alpha Greek/beta', 'Latin/a Latin/deep/b'),
    ('a b c d e', 'a b', 'c d e'), ('train/x train/y test/a test/b', 'x y', 'a b'),
    ('TRAIN/x TRAIN/y Val/a Val/b', 'x y', 'a b'), ('train/x train/y val/c val/d test/a test/b', 'x y', 'a b'),
    ('train/x test/a test/b', '', 'the training set needs 2 classes'),
    ('train/x train/y test/a', '', 'the test set needs 2 classes'),
    ('a b c', '', 'there are 3 classes, and without train/ and test/ at least 4 are needed'),
    ('Training/x Training/y valid/a valid/b', 'x y', 'a b'), ('train a b c', 'a b', 'c train'),
    ('shop/train/x shop/train/y shop/test/a shop/test/b', '', '.*shop/test has the name of a part.* --data .*/shop?'),
    ('train/x train/y training/z', '', 'train.* are both train'),
    ('test/a test/b', '', '.* did you mean --data .*/test?'),
    ('Train/x Train/y others/x others/y', '', '.*/Train has the name of a part, and 2 classes in it'),
    ('train/x', '', 'the training set needs 2 classes'), ('train/x train/y test', '', 'the test set needs 2 classes')])
def test_which_classes_of_a_folder_train_and_which_test(tmp_path, folders, train, test):
    """Without train/ and test/, the first half of the sorted classes trains; of five, the one in the middle tests."""
    draw_folder(tmp_path, folders.split(), per_class=2)
    first = tmp_path / folders.split()[0]
    (first / 'notes.txt').write_text('no image')
    (first / '._0.jpg').write_bytes(b'resource fork')
    shutil.copy(first / '0.jpg', tmp_path / 'sheet.jpg')                        # as eval.py may draw one
    root = tmp_path / '..' / tmp_path.name                                      # as in --data ../photos
    if train:
        splits = common.list_images('folder', root)[0]
        assert names(splits['train'])[::2] == train.split() and names(splits['query'])[::2] == test.split()
    else:
        with pytest.raises(UsageError, match=f'folder cannot be loaded: {test}'):
            common.list_images('folder', root)


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
    """listed(text): list_images of a folder whose files.txt holds this text; the images of LIST are there."""
    for line in LIST.split('\n'):
        if line:
            path = tmp_path / line.rsplit(maxsplit=2)[0]
            path.parent.mkdir(exist_ok=True)
            Image.new('RGB', (20, 20), (len(line) * 9, ord(path.name[0]), 0)).save(path)

    def listed(text, **options):
        (tmp_path / 'files.txt').write_text(text, encoding='utf-8')
        return common.list_images('folder', tmp_path, **options)[0]
    return listed


def test_a_list_of_files_says_which_class_and_which_part_each_image_has(listed, tmp_path):
    parts = listed(LIST)
    assert [(Path(path).relative_to(tmp_path).as_posix(), name) for path, name, _ in parts['train']] == [
        ('b 1.jpg', 'Greek/b'), ('a.jpg', 'Greek/b'), ('c/0.jpg', 'c'), ('c/1.jpg', 'c')]
    assert names(parts['query']) == names(parts['gallery']) == ['d', 'e']
    assert listed('\ufeff' + LIST.replace('query', 'test').replace('\n', '\r\n')) == parts
    assert listed(LIST, known=['c']) == {part: parts[part] for part in ('query', 'gallery')}
    without = listed(LIST.replace('gallery', 'test'))
    assert without.keys() == {'train', 'query'} and names(without['query']) == list('dede')
    data = common.load_dataset('folder', tmp_path, 20, 20, tmp_path / 'cache')
    assert len(data.query) == 4 and data.gallery is data.query and data.train.classes == ['Greek/b', 'c']
    assert listed('\n'.join(line for line in LIST.split('\n') if 'train' in line)).keys() == {'train'}


@pytest.mark.parametrize('old, new, message', [
    ('c/1.jpg c train', 'c/1.jpg c valid', 'line 4 of files.txt is not: path class train|query|gallery'),
    ('c/1.jpg c train', 'c/1.jpg', 'line 4 of files.txt is not'), ('c/1.jpg', 'c/2.jpg', '1 of 8 images are missing'),
    ('g.jpg', 'd.jpg', '1 of 8 images are listed twice'), ('g.jpg', './f.jpg', 'listed twice'),
    ('g.jpg', '../g.jpg', 'lie elsewhere'), ('query', 'gallery', 'the test set needs 2 classes or more, and has 0'),
    ('Greek/b', 'c', 'the training set needs 2 classes')])
def test_a_list_that_is_wrong_is_refused_in_one_line(listed, old, new, message):
    with pytest.raises(UsageError, match=re.escape(message)):
        listed(LIST.replace(old, new))


def test_a_folder_with_train_alone_has_no_test_set(tmp_path):
    """For a final network. A fold holds out some of its classes; to another network, they are new."""
    draw_folder(tmp_path / 'Train', 'abcd', per_class=2)
    (tmp_path / '.hidden').mkdir()
    load = partial(common.load_dataset, 'folder', tmp_path, 16, 16, tmp_path.with_name('cache'))
    data = load()
    assert data.train.classes == list('abcd') and data.query is data.gallery is None and not data.new(data.train).any()
    data = load(fold='0/2')
    assert data.train.classes == ['c', 'd'] and data.query.classes == ['a', 'b']
    assert load(known=['a', 'z']).query.classes == ['b', 'c', 'd'] and load(known=()).query.classes == list('abcd')
    with pytest.raises(UsageError, match='all its classes were in the training set'):
        load(known=list('abcd'))
    data = load(known=list('abcd'), only='embed')
    assert data.query.classes == list('abcd') and not data.new(data.query).any()


def test_folder_with_query_and_gallery(tmp_path):
    draw_folder(tmp_path / 'train', ['a', 'b'], per_class=2)
    draw_folder(tmp_path / 'query', ['d', 'c', 'a9'], per_class=1)             # a9 has no match in the gallery
    draw_folder(tmp_path / 'gallery', ['b2', 'c', 'd'], per_class=2)
    data = common.load_dataset('folder', tmp_path, 16, 16, tmp_path / 'cache')
    assert data.query.labels.tolist() == [0, 2, 3] and data.gallery.labels.tolist() == [1, 1, 2, 2, 3, 3]
    assert data.query.classes == ['a9', 'b2', 'c', 'd'] and data.train.classes == ['a', 'b']
    shutil.rmtree(tmp_path / 'gallery')
    (tmp_path / 'gallery').mkdir()
    with pytest.raises(UsageError, match='shop/gallery holds no images|gallery holds no images'):
        common.load_dataset('folder', tmp_path)


def test_classes_that_a_network_has_seen_are_left_out_of_a_folder(tmp_path, capsys):
    """Without train/ and test/ all other classes are the test set; with them, what test/ has beside."""
    draw_folder(tmp_path / 'flat', 'abcde', per_class=1)
    splits = common.list_images('folder', tmp_path / 'flat', known=['a', 'd', 'z'])[0]
    assert names(splits['query']) == ['b', 'c', 'e'] and 'train' not in splits
    assert '2 classes were in the training set' in capsys.readouterr().out
    assert names(common.list_images('folder', tmp_path / 'flat', known=[])[0]['query']) == list('abcde')
    with pytest.raises(UsageError, match='the test set needs 2 classes or more, and has 1'):
        common.list_images('folder', tmp_path / 'flat', known=['a', 'b', 'c', 'd'])
    with pytest.raises(UsageError, match='all its classes were in the training set, .* lie in test/ or val/'):
        common.list_images('folder', tmp_path / 'flat', known=list('abcde'))
    draw_folder(tmp_path / 'split/train', 'ab', per_class=1)
    draw_folder(tmp_path / 'split/test', 'bcd', per_class=1)
    assert names(common.list_images('folder', tmp_path / 'split', known=['a', 'b'])[0]['query']) == ['b', 'c', 'd']
    common.list_images('folder', tmp_path / 'split')
    assert '1 classes are in the training set and in the test set, the first is b' in capsys.readouterr().err


def test_what_is_not_read_is_named(tmp_path, capsys, monkeypatch):
    draw_folder(tmp_path, ['train/x', 'train/y', 'test/x', 'test/y', 'valid/x', 'valid/y'], per_class=2)
    (tmp_path / 'test/x/lost.jpg').symlink_to(tmp_path / 'nowhere.jpg')

    def closed(folder, walk=os.walk, onerror=None, **options):
        if folder == tmp_path / 'test':
            onerror(PermissionError(13, 'Permission denied', f'{folder}/secret'))
        return walk(folder, onerror=onerror, **options)
    monkeypatch.setattr(os, 'walk', closed)
    common.list_images('folder', tmp_path)
    captured = capsys.readouterr()
    assert f'{tmp_path}/valid is not read' in captured.out
    assert '2 files are not read (1 folders that cannot be opened, 1 dead links), the first is' in captured.err


def test_classes_that_may_be_the_same_are_not_called_new(run, small, tmp_path, capsys):
    """Of two markets' apples nobody said that they are two classes, as train/ and test/ would have."""
    for root in ('whole', 'split'):
        parts = ('a', 'b') if root == 'whole' else ('train/a', 'test/b')
        draw_folder(tmp_path / root, [f'{part}/{name}' for part in parts for name in ('apple', 'pear')], per_class=4)
        run(train_ms, '--data', root, '--name', root)
        captured = capsys.readouterr()
        assert ('2 classes of either half have one name' in captured.err) == (root == 'whole')
        assert ('none of these classes is in the training set' in captured.out) == (root == 'split')


def test_classes_are_one_however_unicode_composes_their_letters(run, small, tmp_path, capsys):
    """A Mac may write an o and two dots. Its checkpoint knows the class of this name on Linux."""
    composed, apart = (unicodedata.normalize(form, 'Möwe') for form in ('NFC', 'NFD'))
    assert composed != apart
    draw_folder(tmp_path / 'mac', [apart, 'Auto', 'Z', 'z'], per_class=4)
    draw_folder(tmp_path / 'linux', [composed, 'Auto', 'Z', 'z'], per_class=4, seed=1)
    run(train_ms, '--data', 'mac', '--name', 'x')
    data = common.load_dataset('folder', 'linux', 40, 32, known=common.load_checkpoint('runs/x').classes)
    assert data.query.classes == ['Z', 'z']
    typed = common.load_dataset('folder', 'linux', 40, 32, known=[apart, 'Auto'])
    assert typed.query.classes == ['Z', 'z'], 'names that come from elsewhere'
    assert common.load_dataset('folder', 'mac', 40, 32).train.classes[1] == composed
    draw_folder(tmp_path / 'linux', [apart], per_class=4, seed=1)
    data = common.load_dataset('folder', 'linux', 40, 32)
    assert data.train.classes + data.query.classes == ['Auto', composed, 'Z', 'z'] and len(data.train) == 12
    draw_folder(tmp_path / 'shop', [f'query/{apart}', 'query/a', f'gallery/{composed}', 'gallery/b'], per_class=2)
    data = common.load_dataset('folder', 'shop', 40, 32)
    assert data.query.labels.tolist() == [0, 0, 1, 1] and data.gallery.labels.tolist() == [0, 0, 2, 2]


def test_classes_of_one_image_are_said_to_measure_nothing(tmp_path, capsys):
    draw_folder(tmp_path, 'abcdef', per_class=1)
    common.list_images('folder', tmp_path)
    assert 'nothing can be measured' in capsys.readouterr().err
    draw_folder(tmp_path / 'shop', ['query/a', 'query/b', 'gallery/c'], per_class=2)
    common.list_images('folder', tmp_path / 'shop')
    assert 'nothing can be measured' in capsys.readouterr().err


def test_copies_of_test_images_are_warned_about(tmp_path, capsys):
    """Whatever they are called. Copies within the training set do not flatter, and are nobody's business."""
    draw_folder(tmp_path / 'train', 'ab', per_class=3)
    draw_folder(tmp_path / 'test', 'cd', per_class=3, seed=1)
    shutil.copy(tmp_path / 'train/a/0.jpg', tmp_path / 'train/b/copy.jpg')
    picture = Image.new('RGB', (200, 200), 'white')
    for colour, name in enumerate(('train/a', 'test/c', 'test/d')):     # of one length, and different in one pixel
        picture.putpixel((0, 0), (colour,) * 3)
        picture.save(tmp_path / name / 'x.bmp')
    def load(**options):
        common.load_dataset('folder', tmp_path, 16, 16, tmp_path.with_name('cache'), **options)
        return capsys.readouterr().err.splitlines()
    assert load() == []
    shutil.copy(tmp_path / 'train/a/1.jpg', tmp_path / 'test/c/other.jpg')
    shutil.copy(tmp_path / 'test/d/2.jpg', tmp_path / 'test/d/again.jpg')
    first, *copies = load()
    assert [first, *copies] == load(), 'also when nothing is decoded anew'
    assert len(load(known=())) == 2 and load(known=(), only='embed') == load(only='train') == []
    assert first == 'warning: 2 files are copies of test images, which flatters the result:'
    assert copies == [f'{tmp_path}/test/d/again.jpg, a copy of {tmp_path}/test/d/2.jpg',
                      f'{tmp_path}/train/a/1.jpg, a copy of {tmp_path}/test/c/other.jpg']
    for i in range(30):
        shutil.copy(tmp_path / 'test/d/2.jpg', tmp_path / f'test/d/again-{i}.jpg')
    assert len(load()) == 1 + 20 + 1, 'twenty, and dots for the others'


def test_hidden_folders_and_circular_links_are_no_classes(tmp_path, capsys):
    draw_folder(tmp_path / 'x', ['a', 'b', 'c', '.ipynb_checkpoints'], per_class=2)
    (tmp_path / 'x/b/up').symlink_to(tmp_path / 'x')
    (tmp_path / 'x/linked').symlink_to(draw_folder(tmp_path / 'y', ['e'], per_class=2, seed=1))
    (tmp_path / 'x/a/folder.jpg').mkdir()
    (tmp_path / 'x/licence.txt').write_text('beside the classes')
    splits = common.list_images('folder', tmp_path / 'x')[0]
    assert names(splits['train'] + splits['query']) == ['a'] * 2 + ['b'] * 2 + ['c'] * 2 + ['linked/e'] * 2
    assert capsys.readouterr().err == ''
    (tmp_path / 'x/phone').mkdir()
    (tmp_path / 'x/phone/1.heic').write_bytes(b'a kind that PIL does not read')
    common.list_images('folder', tmp_path / 'x')
    assert 'x/phone/1.heic; convert images among them to JPEG' in capsys.readouterr().err
    (tmp_path / 'x/phone/edited').mkdir()
    for name in ('2.HEIC', 'film.gif'):                     # beside images as well
        (tmp_path / 'x/a' / name).write_bytes(b'of another kind')
    common.list_images('folder', tmp_path / 'x')
    warning, = capsys.readouterr().err.splitlines()
    assert f'{tmp_path / "x"}: 3 files are not read (2 .heic, 1 .gif), the first is' in warning


def test_classes_and_images_do_not_depend_on_the_order_of_the_disk(tmp_path, monkeypatch):
    draw_folder(tmp_path, 'abcd', per_class=3)
    (tmp_path / 'a/link').symlink_to(tmp_path / 'd')        # one folder under two names: the first one counts

    def backwards(*args, walk=os.walk, **options):
        for folder, folders, files in walk(*args, **options):
            folders.sort(reverse=True)
            yield folder, folders, sorted(files, reverse=True)
    monkeypatch.setattr(os, 'walk', backwards)
    splits = common.list_images('folder', tmp_path)[0]
    assert names(splits['train'] + splits['query']) == ['a'] * 3 + ['a/link'] * 3 + ['b'] * 3 + ['c'] * 3
    assert [row[0].split('/')[-1] for row in splits['train']] == ['0.jpg', '1.jpg', '2.jpg'] * 2


# ---- sizes, names and shapes

@pytest.mark.parametrize('resize, image_size, expected', [
    (None, None, (256, 224)), (None, 112, (128, 112)), (300, None, (300, 224)), (300, 200, (300, 200))])
def test_the_stored_size_follows_the_crop_and_never_the_reverse(monkeypatch, resize, image_size, expected):
    rows = dict(train=[('x', 'a', None)], query=[('x', 'b', None)])
    monkeypatch.setattr(common, 'list_images', lambda *_, **__: (rows, True))
    monkeypatch.setattr(common, 'decode', lambda paths, side, *rest: ([np.empty((side, side, 3))], None, None))
    train = common.load_dataset('cub', 'x', resize, image_size).train
    assert (len(train[0]), train.image_size) == expected


def test_a_dataset_that_there_is_not():
    with pytest.raises(UsageError, match="there is no dataset 'flowers', but shapes, folder, vectors, cub"):
        common.load_dataset('flowers')


def test_shapes_is_fixed_disjoint_and_not_solved_by_pixels():
    """Another seed, or another drawing, would make all results of the README wrong."""
    data = common.load_dataset('shapes')
    assert len(data.train) == len(data.query) == 2000 and data.train[0].shape == (64, 64, 3)
    assert not set(data.train.classes) & set(data.query.classes) and len(data.train.classes) == 100
    means = [np.mean(part.pixels) for part in (data.train, data.query)]
    assert means == pytest.approx([115.36, 115.44], abs=0.03)
    pixels = torch.from_numpy(np.stack(data.query.pixels)).float()
    # Other noise makes neighbouring pixels differ.
    assert pixels.diff(dim=1).abs().mean().item() == pytest.approx(8.860, abs=0.01)
    small = torch.nn.functional.avg_pool2d(pixels.permute(0, 3, 1, 2), 4).flatten(1)
    for z in (small, small - small.mean(1, keepdim=True)):
        assert retrieval_metrics(z, data.query.labels)['R@1'] < 12


# ---- folds

def held_out(classes, fold):
    data = SimpleNamespace(train=numbered(classes))
    common.hold_out(data, fold)
    return data


@pytest.mark.parametrize('classes, n', [(8, 4), (11, 4), (30, 7)])
def test_blocks_are_contiguous_disjoint_and_cover_the_classes(classes, n):
    folds = [held_out(classes, f'{i}/{n}') for i in range(n)]
    blocks = [data.query.classes for data in folds]
    assert sum(blocks, []) == [f'class {c}' for c in range(classes)]
    assert max(map(len, blocks)) - min(map(len, blocks)) <= 1
    for i, data in enumerate(folds):
        assert data.train.classes == sum(blocks[:i] + blocks[i + 1:], [])
        for part in (data.train, data.query):
            assert part.labels.tolist() == (torch.arange(len(part)) // 2).tolist(), 'numbered anew from 0'
            assert part.num_classes == len(part.classes)
            numbers = [int(part[k].mean()) for k in range(len(part))]           # of the images: their pixels show it
            assert [part.classes[c] for c in part.labels] == [f'class {n // 2}' for n in numbers]
            assert part.groups.tolist() == [n // 6 for n in numbers]
            assert part.paths.tolist() == [f'image {n}' for n in numbers]
    with pytest.raises(UsageError, match='--fold 0/4 needs at least two classes in each block, of 7 training classes'):
        held_out(7, '0/4')


def test_no_image_of_the_test_set_is_read(tmp_path, monkeypatch, small):
    """They cannot even be decoded. And of a folder without train/ and test/, only the first half is used."""
    monkeypatch.chdir(tmp_path)
    draw_folder(tmp_path / 'x', 'abcdefghijkl', per_class=3)
    for c in 'ghijkl':
        for path in (tmp_path / f'x/{c}').iterdir():
            path.write_bytes(b'no image')
    flags = '--dataset folder --data x --image-size 32 --batch-size 8 --per-class 2 --device cpu --epochs 1'.split()
    assert train_ms.main([*flags, '--fold', '1/3', '--name', 'fold'])['epoch'] == 1
    saved = common.read_checkpoint('runs/fold')
    assert saved['classes'] == list('abefcd'), 'validation classes have been seen as well'
    with pytest.raises(UsageError, match='18 of 36 images cannot be read'):
        train_ms.main(flags)
