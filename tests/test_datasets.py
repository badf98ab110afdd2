"""Datasets and images: annotation files, folders, decoding, crops, colours, batches."""
import os
import shutil
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import worker
from conftest import REAL_DATA, draw_folder
from PIL import Image
from torchvision import transforms

import common
from common import UsageError, retrieval_metrics

# ---- annotation files


def write_stand_ins(paths):
    """One small JPEG under many names: real annotation files, no real images."""
    source = None
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        if source is None:
            source = path
            Image.fromarray(np.full((12, 16, 3), 128, np.uint8)).save(source, 'JPEG')
        else:
            os.link(source, path)


@pytest.mark.parametrize('name, file, counts', [
    ('cub', 'CUB_200_2011/images.txt', [(5864, 100), (5924, 100)]),
    ('cars', 'cars_annos.mat', [(8054, 98), (8131, 98)])])
def test_counts_on_the_real_annotations(tmp_path, monkeypatch, name, file, counts):
    if not (REAL_DATA / name / file).exists():
        pytest.skip(f'{REAL_DATA / name / file} is not there')
    monkeypatch.setattr(common.Path, 'is_file', lambda path: True)              # as if the images were there
    splits = common.list_images(name, REAL_DATA / name)
    assert [(len(rows), len({row[1] for row in rows})) for rows in splits.values()] == counts


def test_cub_official_format(tmp_path, monkeypatch):
    """The first 100 classes train. Files that macOS leaves beside the images are none."""
    monkeypatch.setitem(common.DATASETS['cub'], 'counts', dict(train=(2, 2), query=(3, 2)))
    base = tmp_path / 'CUB_200_2011'
    names = ['001.A/x.jpg', '100.B/x.jpg', '101.C/x.jpg', '101.C/y.jpg', '200.D/x.jpg']
    write_stand_ins([base / 'images' / name for name in names])
    listed = [*names, '001.A/._x.jpg']
    (base / 'images.txt').write_text(''.join(f'{i} {name}\n' for i, name in enumerate(listed, start=1)))
    data = common.load_dataset('cub', tmp_path, resize=8, image_size=8, cache=tmp_path / 'cache')
    assert data.train.classes == ['001.A', '100.B'] and data.query.classes == ['101.C', '200.D']
    assert data.train.labels.tolist() == [0, 1] and data.query.labels.tolist() == [0, 0, 1]
    assert data.gallery is data.query and data.train[0].shape == (8, 10, 3)
    (base / 'images.txt').write_text('1 001.A/x.jpg\n2 101.C/x.jpg\n')
    with pytest.raises(UsageError, match=r'train has \(images, classes\) \(1, 1\), expected are \(2, 2\)'):
        common.load_dataset('cub', tmp_path)


def test_cars_official_format(tmp_path, monkeypatch):
    """The class decides the side. Neither the box does, nor `test`, which is about another task."""
    scipy_io = pytest.importorskip('scipy.io')
    monkeypatch.setitem(common.DATASETS['cars'], 'counts', dict(train=(3, 2), query=(3, 2)))
    fields = 'relative_im_path bbox_x1 bbox_y1 bbox_x2 bbox_y2 class test'.split()
    rows = np.empty(6, dtype=[(field, object) for field in fields])
    for i, (class_, test) in enumerate([(196, 0), (98, 1), (1, 0), (99, 1), (98, 0), (99, 1)]):
        box = [150, 150, 1, 1] if i % 2 else [1, 150, 150, 1]
        rows[i] = (f'car_ims/{i}.jpg', *box, class_, test)
    scipy_io.savemat(tmp_path / 'cars_annos.mat', dict(annotations=rows))
    write_stand_ins([tmp_path / f'car_ims/{i}.jpg' for i in range(6)])
    data = common.load_dataset('cars', tmp_path, resize=8, cache=tmp_path / 'cache')
    assert data.train.classes == ['001', '098'] and data.query.classes == ['099', '196']
    assert data.train.labels.tolist() == [1, 0, 1] and data.query.labels.tolist() == [1, 0, 0]
    monkeypatch.setitem(sys.modules, 'scipy.io', None)
    with pytest.raises(UsageError, match='cars cannot be loaded: .*scipy'):
        common.list_images('cars', tmp_path)


def test_sop_official_format(tmp_path, monkeypatch):
    monkeypatch.setitem(common.DATASETS['sop'], 'counts', dict(train=(4, 2), query=(6, 3)))
    base = tmp_path / 'Stanford_Online_Products'
    rows = {'train': [(1, 1, 1), (2, 1, 1), (3, 2, 4), (4, 2, 4)],
            'test': [(5, 3, 1), (6, 3, 1), (7, 4, 2), (8, 4, 2), (9, 5, 12), (10, 5, 12)]}
    for split, lines in rows.items():
        write_stand_ins([base / f'bicycle_final/{i}_{split}.JPG' for i, _, _ in lines])
        text = ''.join(f'{i} {c} {g} bicycle_final/{i}_{split}.JPG\n' for i, c, g in lines)
        (base / f'Ebay_{split}.txt').write_text('image_id class_id super_class_id path\n' + text)
    data = common.load_dataset('sop', tmp_path, resize=8, cache=tmp_path / 'cache')
    assert data.train.labels.tolist() == [0, 0, 1, 1] and data.train.groups.tolist() == [0, 0, 3, 3]
    assert data.query.labels.tolist() == [0, 0, 1, 1, 2, 2]


def test_inshop_official_format(tmp_path, monkeypatch):
    monkeypatch.setitem(common.DATASETS['inshop'], 'counts', dict(train=(3, 2), query=(2, 2), gallery=(2, 2)))
    rows = [('a.jpg', 'id_00000002', 'train'), ('b.jpg', 'id_00000002', 'train'), ('c.jpg', 'id_00000007', 'query'),
            ('d.jpg', 'id_00000007', 'gallery'), ('e.jpg', 'id_00000005', 'train'), ('f.jpg', 'id_00000001', 'query'),
            ('g.jpg', 'id_00000001', 'gallery')]
    write_stand_ins([tmp_path / 'Img/img/WOMEN' / name for name, _, _ in rows])
    (tmp_path / 'Eval').mkdir()
    text = ''.join(f'img/WOMEN/{name}      {item}     {status}\n' for name, item, status in rows)
    (tmp_path / 'Eval/list_eval_partition.txt').write_text('7\nimage_name item_id evaluation_status\n' + text)
    data = common.load_dataset('inshop', tmp_path, resize=8, cache=tmp_path / 'cache')
    assert data.train.labels.tolist() == [0, 0, 1]
    assert data.query.labels.tolist() == [1, 0] and data.gallery.labels.tolist() == [1, 0]
    assert data.gallery is not data.query
    assert data.query.classes == data.gallery.classes == ['id_00000001', 'id_00000007']


def test_published_counts():
    """Images and classes as in the papers, and in README"""
    assert {name: row['counts'] for name, row in common.DATASETS.items() if 'counts' in row} == dict(
        cub=dict(train=(5864, 100), query=(5924, 100)), cars=dict(train=(8054, 98), query=(8131, 98)),
        sop=dict(train=(59551, 11318), query=(60502, 11316)),
        inshop=dict(train=(25882, 3997), query=(14218, 3985), gallery=(12612, 3985)))


def test_a_name_that_no_dataset_has():
    with pytest.raises(UsageError, match="there is no dataset 'flowers', but shapes, folder, cub"):
        common.load_dataset('flowers')


@pytest.mark.parametrize('name', ['cub', 'cars', 'sop', 'inshop', 'folder'])
def test_a_missing_dataset_says_where_what_and_how(name, tmp_path):
    for where in (tmp_path, tmp_path / 'nowhere'):
        with pytest.raises(UsageError, match=f'{name} cannot be loaded: .*which --data names, should hold') as error:
            common.load_dataset(name, where)
        assert str(where) in str(error.value) and '\n' not in str(error.value)


def small_benchmark(root, monkeypatch, lines, images=8):
    """An In-Shop of four classes with these lines beside"""
    monkeypatch.setitem(common.DATASETS['inshop'], 'counts', {})
    rows = [f'img/{i}.jpg id_{i // 2} {split}' for i, split in enumerate(
        ['train', 'train', 'train', 'train', 'query', 'gallery', 'query', 'gallery'])]
    draw_folder(root / 'Img', ['img'], per_class=images)
    (root / 'Eval').mkdir()
    (root / 'Eval/list_eval_partition.txt').write_text('\n'.join(['8', 'names', *rows, *lines]))


# ---- folders


def names(rows):
    return [row[1] for row in rows]


@pytest.mark.parametrize('folders, train, test', [
    ('Latin/a Greek/beta Greek/alpha Latin/deep/b', 'Greek/alpha Greek/beta', 'Latin/a Latin/deep/b'),
    ('a b c d e', 'a b', 'c d e'), ('train/x train/y test/a test/b', 'x y', 'a b'),
    ('Train/x Train/y Test/a Test/b', 'x y', 'a b'), ('TRAIN/x TRAIN/y VAL/a VAL/b', 'x y', 'a b'),
    ('train/x train/y val/c val/d test/a test/b', 'x y', 'a b'), ('train/x test/a test/b', '', 'train has fewer than'),
    ('train/x train/y test/a', '', 'query has fewer than'), ('a b c', '', 'train has fewer than')])
def test_which_classes_of_a_folder_train_and_which_test(tmp_path, folders, train, test):
    """Without train/ and test/, the first half of the sorted classes trains; of five, the one in the middle tests."""
    draw_folder(tmp_path, folders.split(), per_class=2)
    (tmp_path / folders.split()[0] / 'notes.txt').write_text('no image')
    (tmp_path / folders.split()[0] / '._0.jpg').write_bytes(b'resource fork')
    shutil.copy(tmp_path / folders.split()[0] / '0.jpg', tmp_path / 'sheet.jpg')        # as eval.py may draw one
    if train:
        splits = common.list_images('folder', tmp_path)
        assert names(splits['train'])[::2] == train.split() and names(splits['query'])[::2] == test.split()
    else:
        with pytest.raises(UsageError, match=f'folder cannot be loaded: {test} two classes'):
            common.list_images('folder', tmp_path)


def test_suffixes_have_any_case(tmp_path):
    for c in 'abcd':
        (tmp_path / c).mkdir()
        Image.new('RGB', (9, 9)).save(tmp_path / c / '1.JPG')
        Image.new('RGB', (9, 9)).save(tmp_path / c / '2.webp')
    assert names(common.list_images('folder', tmp_path)['query']) == ['c', 'c', 'd', 'd']
    assert decoded(tmp_path / 'c/2.webp').shape == (20, 20, 3)


def test_folder_with_query_and_gallery(tmp_path):
    draw_folder(tmp_path / 'train', ['a', 'b'], per_class=2)
    draw_folder(tmp_path / 'query', ['d', 'c', 'a9'], per_class=1)             # a9 has no match in the gallery
    draw_folder(tmp_path / 'gallery', ['b2', 'c', 'd'], per_class=2)
    data = common.load_dataset('folder', tmp_path, resize=16, cache=tmp_path / 'cache')
    assert data.query.labels.tolist() == [0, 2, 3] and data.gallery.labels.tolist() == [1, 1, 2, 2, 3, 3]
    assert data.query.classes == ['a9', 'b2', 'c', 'd'] and data.train.classes == ['a', 'b']
    shutil.rmtree(tmp_path / 'train')
    with pytest.raises(UsageError, match='train has fewer than two classes'):
        common.load_dataset('folder', tmp_path)


def test_classes_that_a_network_has_seen_are_left_out_of_a_folder(tmp_path, capsys):
    """Without train/ and test/ all other classes are the test set; with them, what test/ has beside."""
    draw_folder(tmp_path / 'flat', ['a', 'b', 'c', 'd', 'e'], per_class=1)
    splits = common.list_images('folder', tmp_path / 'flat', known=['a', 'd', 'z'])
    assert names(splits['query']) == ['b', 'c', 'e'] and 'train' not in splits
    assert '2 classes were in the training set' in capsys.readouterr().out
    assert names(common.list_images('folder', tmp_path / 'flat', known=[])['query']) == ['a', 'b', 'c', 'd', 'e']
    draw_folder(tmp_path / 'split/train', ['a', 'b'], per_class=1)
    draw_folder(tmp_path / 'split/test', ['b', 'c', 'd'], per_class=1)
    assert names(common.list_images('folder', tmp_path / 'split', known=['a', 'b'])['query']) == ['c', 'd']
    with pytest.raises(UsageError, match='query has fewer than two classes'):
        common.list_images('folder', tmp_path / 'flat', known=['a', 'b', 'c', 'd'])


def test_a_class_in_train_and_test_is_warned_about(tmp_path, capsys):
    draw_folder(tmp_path / 'train', ['Greek/character01', 'b'], per_class=2)
    draw_folder(tmp_path / 'test', ['Greek/character01', 'c'], per_class=2, seed=1)
    common.list_images('folder', tmp_path)
    assert '1 classes are in the training set and in the test set, the first is Greek/character01' \
        in capsys.readouterr().err


@pytest.mark.parametrize('options, decoded, queries', [
    (dict(known=()), 'gallery query', 2), (dict(fold='0/2'), 'train', 4), ({}, 'gallery query train', 2)])
def test_only_what_is_used_is_decoded(tmp_path, monkeypatch, options, decoded, queries):
    """An evaluation reads no training images of a benchmark, and a fold no test images."""
    small_benchmark(tmp_path / 'shop', monkeypatch, ['img/8.jpg id_8 train', 'img/9.jpg id_9 train'], images=10)
    data = common.load_dataset('inshop', tmp_path / 'shop', 16, 16, tmp_path / 'cache', **options)
    assert len(data.query) == queries and (data.gallery is data.query) == ('fold' in options)
    assert hasattr(data, 'train') == ('known' not in options)
    assert sorted(path.name.split('-')[1] for path in (tmp_path / 'cache').glob('*.bin')) == decoded.split()


def test_copies_of_test_images_are_warned_about(tmp_path, capsys):
    """Whatever they are called. Copies within the training set do not flatter, and are nobody's business."""
    draw_folder(tmp_path / 'train', ['a', 'b'], per_class=3)
    draw_folder(tmp_path / 'test', ['c', 'd'], per_class=3, seed=1)
    shutil.copy(tmp_path / 'train/a/0.jpg', tmp_path / 'train/b/copy.jpg')
    for name in ('train/a/x.bmp', 'test/c/x.bmp', 'test/d/x.bmp'):           # equal in length, and different
        Image.fromarray(np.full((20, 20, 3), len(list(tmp_path.rglob('x.bmp'))), np.uint8)).save(tmp_path / name)
    common.load_dataset('folder', tmp_path, image_size=16, cache=tmp_path / '.cache')
    assert capsys.readouterr().err == ''
    shutil.copy(tmp_path / 'train/a/1.jpg', tmp_path / 'test/c/other.jpg')
    shutil.copy(tmp_path / 'test/d/2.jpg', tmp_path / 'test/d/again.jpg')
    common.load_dataset('folder', tmp_path, image_size=16, cache=tmp_path / '.cache')
    err = capsys.readouterr().err
    assert '2 files are copies of test images, which flatters the result; the first is' in err
    assert f'{tmp_path}/test/d/again.jpg, a copy of {tmp_path}/test/d/2.jpg' in err


def test_hidden_folders_links_and_pipes_are_no_classes(tmp_path, capsys):
    draw_folder(tmp_path / 'x', ['a', 'b', 'c', '.ipynb_checkpoints', '.Trash/d'], per_class=1)
    (tmp_path / 'x/b/up').symlink_to(tmp_path / 'x')
    (tmp_path / 'x/linked').symlink_to(draw_folder(tmp_path / 'y', ['e'], per_class=1, seed=1))
    os.mkfifo(tmp_path / 'x/a/pipe.jpg')
    (tmp_path / 'x/a/folder.jpg').mkdir()
    (tmp_path / 'x/a/gone.jpg').symlink_to('nowhere')
    splits = common.list_images('folder', tmp_path / 'x')
    assert names(splits['train'] + splits['query']) == ['a', 'b', 'c', 'linked/e'] and capsys.readouterr().err == ''
    (tmp_path / 'x/phone').mkdir()
    (tmp_path / 'x/phone/1.heic').write_bytes(b'a kind that PIL does not read')
    common.list_images('folder', tmp_path / 'x')
    assert 'warning: 1 folders hold files, but no images' in capsys.readouterr().err


def test_classes_and_images_do_not_depend_on_the_order_of_the_disk(tmp_path, monkeypatch):
    draw_folder(tmp_path, 'abcd', per_class=12)
    (tmp_path / 'a/link').symlink_to(tmp_path / 'd')        # one folder under two names: the first one counts
    walk = os.walk

    def backwards(*args, **options):
        for folder, folders, files in walk(*args, **options):
            folders.sort(reverse=True)
            yield folder, folders, sorted(files, reverse=True)

    monkeypatch.setattr(os, 'walk', backwards)
    splits = common.list_images('folder', tmp_path)
    assert names(splits['train']) == ['a'] * 12 + ['a/link'] * 12 and names(splits['query']) == ['b'] * 12 + ['c'] * 12
    assert [row[0].name for row in splits['train']] == sorted(f'{i}.jpg' for i in range(12)) * 2


# ---- decoding


@pytest.mark.parametrize('content', [b'no image at all', None], ids=['unreadable', 'truncated'])
def test_a_broken_image_is_named(tmp_path, content):
    draw_folder(tmp_path, ['a', 'b', 'c', 'd'], per_class=2, size=200)
    victim = tmp_path / 'b/1.jpg'
    victim.write_bytes(content or victim.read_bytes()[:-2000])
    with pytest.raises(UsageError, match='b/1.jpg'):
        common.load_dataset('folder', tmp_path, cache=tmp_path / 'cache')
    assert not list((tmp_path / 'cache').glob('*folder-train*')), 'half a cache must not stay'


@pytest.mark.parametrize('mode', ['L', 'LA', 'RGBA', 'CMYK', 'P', '1'])
def test_every_image_becomes_rgb(tmp_path, mode):
    suffix = 'jpg' if mode in ('L', 'CMYK') else 'png'
    for name in 'abcd':
        (tmp_path / name).mkdir()
        Image.new('RGB', (20, 14), (200, 30, 60)).convert(mode).save(tmp_path / name / f'0.{suffix}')
    data = common.load_dataset('folder', tmp_path, resize=7, cache=tmp_path / 'cache')
    assert data.train[0].shape == (7, 10, 3)


def decoded(path, side=20):
    return common.read_image(path, side)


@pytest.mark.parametrize('orientation', range(1, 9))
def test_photographs_are_turned_upright(tmp_path, orientation):
    """As the EXIF data of a camera say: the red corner is at the top left."""
    upright = np.zeros((30, 40, 3), np.uint8)
    upright[:15, :20, 0] = 255
    image, turn = Image.fromarray(upright), Image.Transpose
    stored = {1: image, 2: image.transpose(turn.FLIP_LEFT_RIGHT), 3: image.transpose(turn.ROTATE_180),
              4: image.transpose(turn.FLIP_TOP_BOTTOM), 5: image.transpose(turn.TRANSPOSE),
              6: image.transpose(turn.ROTATE_90), 7: image.transpose(turn.TRANSVERSE),
              8: image.transpose(turn.ROTATE_270)}[orientation]
    exif = Image.Exif()
    exif[0x0112] = orientation
    stored.save(tmp_path / 'x.jpg', exif=exif, quality=95)
    pixels = decoded(tmp_path / 'x.jpg', 30)
    assert pixels.shape == (30, 40, 3) and pixels[5, 5, 0] > 240 and pixels[5, 35, 0] < 15 and pixels[25, 5, 0] < 15


@pytest.mark.parametrize('kind, scale', [('uint16', 65535), ('int32', 65535), ('int32', 10 ** 6), ('float32', 1),
                                         ('float32', 3000)])
def test_deep_grey_is_scaled_and_not_cut_off(tmp_path, kind, scale):
    ramp = (np.linspace(0, 1, 40)[None] * np.ones((20, 1)) * scale).astype(kind)
    Image.fromarray(ramp).save(tmp_path / 'x.tif')
    pixels = decoded(tmp_path / 'x.tif').astype(int)
    assert pixels.shape == (20, 40, 3) and np.abs(pixels[10, :, 0] - np.linspace(0, 255, 40)).max() < 2


def test_a_dark_picture_of_16_bits_stays_dark(tmp_path):
    grey = np.full((20, 20), 6554, np.uint16)
    for grey[0, 0] in 6554, 65535:                          # the second with a saturated pixel
        Image.fromarray(grey).save(tmp_path / 'x.png')
        assert decoded(tmp_path / 'x.png')[10].mean() == pytest.approx(25.5, abs=1)


@pytest.mark.parametrize('form', ['eps', 'gif', 'ico', 'tga', None])
def test_a_file_of_another_format_is_refused_whatever_its_name(tmp_path, form):
    """For PostScript, PIL would start Ghostscript. The others it could read, but they are not listed."""
    if form:
        Image.new('RGB', (32, 32)).save(tmp_path / 'x.jpg', form)
    else:
        (tmp_path / 'x.jpg').write_bytes(b'')
    with pytest.raises(UsageError, match='cannot read the image .*x.jpg: .*; replace or remove it'):
        decoded(tmp_path / 'x.jpg')


def test_all_images_are_decoded_once_and_in_their_order(tmp_path, monkeypatch):
    """More than the 512 that are decoded at a time, each of a colour of its own"""
    read, seen = common.read_image, set()

    def once(path, side):
        assert path not in seen and not seen.add(path)
        return read(path, side)
    monkeypatch.setattr(common, 'read_image', once)
    paths = [tmp_path / f'{i}.ppm' for i in range(1030)]
    for i, path in enumerate(paths):
        path.write_bytes(b'P6 1 1 255\n' + bytes([i % 256, i // 256, 7]))
    pixels, sizes = common.decode(paths, 1, 'many', tmp_path)
    assert sizes.tolist() == [[1, 1]] * 1030
    assert pixels[:3 * 1030].reshape(-1, 3).tolist() == [[i % 256, i // 256, 7] for i in range(1030)]


def test_a_damaged_cache_is_decoded_anew(tmp_path, capsys):
    draw_folder(tmp_path / 'x', ['a', 'b', 'c', 'd'], per_class=2)
    load = lambda: common.load_dataset('folder', tmp_path / 'x', cache=tmp_path / 'cache')  # noqa: E731
    first = load().train
    pixels = first.pixels.copy()                            # it is mapped, and the file is going to change
    file = next((tmp_path / 'cache').glob('folder-train*.bin'))
    whole = file.read_bytes()
    for damaged in (whole[:-8], whole[:100], b'', whole + b'x', whole[:-4] + bytes(4)):
        file.write_bytes(damaged)
        again = load().train
        assert np.array_equal(again.pixels, pixels) and np.array_equal(again.sizes, first.sizes)
        assert f'decoding 4 images into {file}' in capsys.readouterr().out
        assert file.read_bytes() == whole


def test_folders_with_the_same_names_lengths_and_times_do_not_share_a_cache(tmp_path):
    for name, colour in (('one', 10), ('two', 200)):
        for c in 'abcd':
            (tmp_path / name / c).mkdir(parents=True)
            Image.new('RGB', (64, 64), (colour,) * 3).save(tmp_path / name / c / '0.bmp')
            os.utime(tmp_path / name / c / '0.bmp', (1, 1))
    means = [common.load_dataset('folder', tmp_path / name, cache=tmp_path / 'cache').train[0].mean()
             for name in ('one', 'two')]
    assert means == [10, 200]
    (tmp_path / 'one').rename(tmp_path / 'old')
    (tmp_path / 'two').rename(tmp_path / 'one')
    assert common.load_dataset('folder', tmp_path / 'one', cache=tmp_path / 'cache').train[0].mean() == 200


def test_the_cache_of_a_folder_belongs_to_its_place(tmp_path):
    """Even where all that the system says of the files is the same, because they are links to the same files"""
    draw_folder(tmp_path / 'one', 'abcd', per_class=1)
    shutil.copytree(tmp_path / 'one', tmp_path / 'two', copy_function=os.link)
    for number, name in enumerate(('one', 'two', 'one'), start=1):
        common.load_dataset('folder', tmp_path / name, cache=tmp_path / 'cache')
        assert len(list((tmp_path / 'cache').glob('*.bin'))) == 2 * min(number, 2)


@pytest.mark.slow
def test_two_processes_that_decode_at_once_both_succeed(tmp_path):
    draw_folder(tmp_path / 'x', ['a', 'b', 'c', 'd'], per_class=2)
    folders = tmp_path / 'one', tmp_path / 'two'
    for folder in folders:
        folder.mkdir()
    started = [worker.start(worker.load, 'folder', tmp_path / 'x', None, 16, tmp_path / 'cache', where=folder)
               for folder in folders]
    assert [worker.finish(*each)[0].split()[-1] for each in zip(started, folders)] == ['4', '4']
    files = sorted((tmp_path / 'cache').iterdir())
    assert len(files) == 2 and {file.suffix for file in files} == {'.bin'}, 'one of each split, and nothing else'


def test_the_second_run_reads_the_cache_and_a_changed_image_is_decoded_anew(tmp_path, monkeypatch):
    draw_folder(tmp_path / 'x', ['a', 'b', 'c', 'd'], per_class=2)
    load = lambda **sizes: common.load_dataset('folder', tmp_path / 'x', cache=tmp_path / 'cache', **sizes)  # noqa: E731
    first = load()
    monkeypatch.setattr(common, 'read_image', None)         # a second decoding would fail
    assert np.array_equal(load().train.pixels, first.train.pixels)
    monkeypatch.undo()
    assert load(resize=17, image_size=16).train[0].shape[0] == 17, 'another size is another file'
    Image.new('RGB', (30, 30), (0, 255, 0)).save(tmp_path / 'x/a/0.jpg')
    assert load().train[0].mean(axis=(0, 1))[1] > 250


@pytest.mark.parametrize('error', [OSError(28, 'No space left on device'), RuntimeError('No space left: torch.save')])
def test_a_full_disk_leaves_the_old_file_intact(tmp_path, error):
    (tmp_path / 'old').write_text('precious')
    with pytest.raises(UsageError, match='No space left.*unharmed'):
        with common.written_whole(tmp_path / 'old') as file:
            file.write(b'half')
            raise error
    assert (tmp_path / 'old').read_text() == 'precious' and not list(tmp_path.glob('*.tmp'))


def test_what_a_killed_process_left_of_a_file_is_removed_by_the_next_that_writes_it(tmp_path):
    """But not what a living process still writes, and nothing of other files."""
    gone = subprocess.Popen([sys.executable, '-c', ''])
    gone.wait()
    kept = [f'x.bin.{os.getppid()}.tmp', f'y.bin.{gone.pid}.tmp', f'x.bin.old.{gone.pid}.tmp', f'{gone.pid}.tmp',
            'x.bin.tmp', 'x.bin.mine.tmp', f'x.bin.{gone.pid}']
    for name in (*kept, f'x.bin.{gone.pid}.tmp'):
        (tmp_path / name).touch()
    with common.written_whole(tmp_path / 'x.bin') as file:
        file.write(b'whole')
    assert {path.name for path in tmp_path.iterdir()} == {*kept, 'x.bin'}


@pytest.mark.parametrize('resize, image_size, expected', [
    (None, None, (256, 224)), (None, 112, (128, 112)), (128, None, (128, 112)), (300, 200, (300, 200))])
def test_sizes_follow_each_other_as_in_the_recipes(tmp_path, monkeypatch, resize, image_size, expected):
    rows = dict(train=[('x', 'a', None)], query=[('x', 'b', None)])
    monkeypatch.setattr(common, 'list_images', lambda *_, **__: rows)
    monkeypatch.setattr(common, 'decode', lambda paths, side, *rest: (None, [(side, side)]))
    data = common.load_dataset('cub', tmp_path, resize, image_size)
    assert (data.train.sizes[0][0], data.train.image_size) == expected
    with pytest.raises(UsageError, match='--resize 100 is smaller than --image-size 120'):
        common.load_dataset('cub', tmp_path, 100, 120)


def test_shapes_is_fixed_disjoint_and_not_solved_by_pixels():
    data = common.load_dataset('shapes')
    assert len(data.train) == len(data.query) == 2000 and data.train[0].shape == (64, 64, 3)
    assert not set(data.train.classes) & set(data.query.classes) and len(data.train.classes) == 100
    # Another seed, or another drawing, would make all results of the README wrong.
    means = [np.asarray(part.pixels).mean() for part in (data.train, data.query)]
    assert means == pytest.approx([115.36, 115.44], abs=0.03)
    pixels = torch.from_numpy(data.query.pixels.reshape(2000, 64, 64, 3)).float()
    # And so would other noise, which makes neighbouring pixels differ.
    assert pixels.diff(dim=1).abs().mean().item() == pytest.approx(8.860, abs=0.01)
    pixels = torch.nn.functional.avg_pool2d(pixels.permute(0, 3, 1, 2), 4).flatten(1)
    for z in (pixels, pixels - pixels.mean(1, keepdim=True)):
        assert retrieval_metrics(z, data.query.labels)['R@1'] < 12


# ---- crops and colours


def noise(*sizes, image_size=16):
    generator = torch.Generator().manual_seed(0)
    pixels = [torch.randint(256, (h, w, 3), generator=generator, dtype=torch.uint8) for h, w in sizes]
    flat = torch.cat([p.flatten() for p in pixels]).numpy()
    return pixels, common.Images(flat, sizes, torch.arange(len(sizes)), image_size)


def no_augmentation(**changes):
    return SimpleNamespace(**dict(min_crop=1.0, flip=False, jitter=0.0) | changes)


def back(x):
    """Undoes the normalisation by ImageNet's mean and standard deviation, red first: (B, 3, S, S) -> 0..255"""
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    return 255 * (x * std[:, None, None] + mean[:, None, None])


def only(images, indices=None, augment=None):
    """The one batch of these images"""
    lists = [list(range(len(images))) if indices is None else indices]
    return next(common.batches(images, lists, torch.device('cpu'), augment))


def test_test_crops_are_torchvisions_centre_crops():
    pixels, images = noise((20, 31), (27, 16), (16, 16), image_size=15)
    x, y = only(images, [2, 0, 1])
    for row, i in enumerate([2, 0, 1]):
        cropped = transforms.functional.center_crop(pixels[i].permute(2, 0, 1), [15, 15])
        assert torch.allclose(back(x)[row], cropped.float(), atol=1e-3)
    assert y.tolist() == [2, 0, 1]


def test_training_crops_are_torchvisions_resized_crops():
    """To the rounding of uint8; the boxes are those that RandomResizedCrop draws from the same seed."""
    pixels, images = noise((40, 60), (50, 30), (32, 32))
    torch.manual_seed(3)
    x, _ = only(images, augment=no_augmentation(min_crop=0.2))
    torch.manual_seed(3)
    for i, image in enumerate(pixels):
        image = image.permute(2, 0, 1)
        box = transforms.RandomResizedCrop.get_params(image, (0.2, 1.0), (3 / 4, 4 / 3))
        expected = transforms.functional.resized_crop(image, *box, [16, 16], antialias=True)
        assert (back(x)[i] - expected.float()).abs().max() < 1.01


def test_shrinking_averages():
    image = np.zeros((32, 32, 3), np.uint8)
    image[::2] = 200                                        # a fine grating: its mean is 100
    images = common.Images(image.reshape(-1), [(32, 32)], torch.tensor([0]), 8)
    out = torch.empty(3, 8, 8, dtype=torch.uint8)
    images.crop(0, (0, 0, 32, 32), False, out)
    assert (out.float() - 100).abs().max() < 10, 'picking pixels gives 0 or 200'


def boxes_drawn(monkeypatch, min_crop, draws=300):
    _, images = noise((40, 60))
    drawn = []
    monkeypatch.setattr(common.Images, 'crop', lambda self, i, box, flip, out: drawn.append(box))
    torch.manual_seed(0)
    for _ in common.batches(images, [[0]] * draws, torch.device('cpu'), no_augmentation(min_crop=min_crop)):
        pass
    return torch.tensor(drawn).float()


@pytest.mark.parametrize('min_crop', [0.08, 0.5])
def test_crops_vary_in_area_ratio_and_place_and_keep_to_the_image(monkeypatch, min_crop):
    top, left, height, width = boxes_drawn(monkeypatch, min_crop).unbind(1)
    assert (top >= 0).all() and (left >= 0).all() and (top + height <= 40).all() and (left + width <= 60).all()
    area, ratio = height * width / 2400, width / height
    assert min_crop - 0.02 < area.min() < min_crop + 0.05 and area.max() > 0.85
    assert 0.72 < ratio.min() < 0.8 and 1.25 < ratio.max() < 1.55
    assert len(set(zip(top.tolist(), left.tolist()))) > 100


def test_flips_are_horizontal_for_half_of_the_images_each_by_itself():
    pixels, images = noise(*[(16, 16)] * 40)
    torch.manual_seed(0)
    flipped = 0
    for _ in range(5):
        x, _ = only(images, augment=no_augmentation(flip=True))
        for i, image in enumerate(pixels):
            same, mirrored = ((back(x)[i] - t.float()).abs().max() < 0.1
                              for t in (image.permute(2, 0, 1), image.permute(2, 0, 1).flip(2)))
            assert same != mirrored
            flipped += int(mirrored)
    assert 70 < flipped < 130
    x, _ = only(images, augment=no_augmentation(flip=False))
    assert all((back(x)[i] - image.permute(2, 0, 1).float()).abs().max() < 0.1 for i, image in enumerate(pixels))


def test_jitter_is_torchvisions_with_factors_of_each_image(monkeypatch):
    """The order of the three steps is drawn; each blends like torchvision's functions of these names."""
    x = torch.rand(4, 3, 6, 6)
    steps = [transforms.functional.adjust_brightness, transforms.functional.adjust_contrast,
             transforms.functional.adjust_saturation]
    orders = set()
    for seed in range(8):
        torch.manual_seed(seed)
        jittered = common.jitter_colours(x, 0.4)
        torch.manual_seed(seed)
        order, expected = torch.randperm(3).tolist(), x
        orders.add(tuple(order))
        for i in order:
            factors = 1 + 0.4 * (2 * torch.rand(4, 1, 1, 1) - 1).flatten()
            assert (factors > 0.6).all() and (factors < 1.4).all() and len(factors.unique()) == 4
            expected = torch.stack([steps[i](image, f.item()) for image, f in zip(expected, factors)])
        assert torch.allclose(jittered, expected, atol=1e-5)
    assert len(orders) > 2


def test_jitter_reaches_training_batches_only():
    _, images = noise((16, 16), (16, 16))
    plain, _ = only(images, augment=no_augmentation())
    jittered, _ = only(images, augment=no_augmentation(jitter=0.5))
    assert torch.equal(plain, only(images)[0]) and (plain - jittered).abs().mean() > 0.05


def test_batches_do_not_depend_on_the_threads(monkeypatch):
    _, images = noise(*[(20, 30)] * 6)
    drawn = []
    for threads in (1, 8):
        monkeypatch.setattr(os, 'cpu_count', lambda threads=threads: threads)
        common.set_seed(5)
        drawn.append([x for x, _ in common.batches(images, [[0, 1], [2, 3], [4, 5]], torch.device('cpu'),
                                                   no_augmentation(min_crop=0.2, flip=True, jitter=0.2))])
    assert len(drawn[0]) == 3 and all(torch.equal(a, b) for a, b in zip(*drawn))


def test_a_folder_may_be_named_by_a_way_up(tmp_path, monkeypatch):
    """--data ../photos; the images of a folder never lead out of it, wherever it lies."""
    draw_folder(tmp_path / 'photos', 'abcd', per_class=2)
    (tmp_path / 'project').mkdir()
    monkeypatch.chdir(tmp_path / 'project')
    assert len(common.load_dataset('folder', '../photos', 24, 24).train) == 4


def test_an_empty_gallery_is_not_the_queries(tmp_path):
    for part in ('train', 'query'):
        draw_folder(tmp_path / part, 'abcd', per_class=2)
    (tmp_path / 'gallery').mkdir()
    with pytest.raises(UsageError, match='nothing to search in: gallery/ has no images'):
        common.load_dataset('folder', tmp_path, 24, 24, tmp_path / 'cache')
