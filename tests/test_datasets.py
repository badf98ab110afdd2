"""Datasets and images: annotation files, folders, decoding, crops, colours, batches."""
import os
import platform
import re
import shutil
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import REAL_DATA, draw_folder
from PIL import Image
from torchvision import transforms

import common
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
    data = common.load_dataset(name, tmp_path, resize=8, cache=tmp_path / 'cache')
    assert {split: getattr(data, split).labels.tolist() for split in labels} == labels
    assert data.query.classes == data.gallery.classes == classes
    assert (data.gallery is data.query) == ('gallery' not in labels) and data.train[0].shape == (8, 10, 3)
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
    data = common.load_dataset('cars', tmp_path, resize=8, cache=tmp_path / 'cache')
    assert data.train.classes == ['001', '098'] and data.query.classes == ['099', '196']
    assert data.train.labels.tolist() == [1, 0, 1] and data.query.labels.tolist() == [1, 0, 0]
    monkeypatch.setitem(sys.modules, 'scipy.io', None)
    with pytest.raises(UsageError, match='cars cannot be loaded: .*scipy'):
        common.list_images('cars', tmp_path)


def test_published_counts_and_ks():
    """Images and classes as in the papers, and in README; K of Recall@K as in the literature"""
    assert {name: row['counts'] for name, row in common.DATASETS.items() if 'counts' in row} == dict(
        cub=dict(train=(5864, 100), query=(5924, 100)), cars=dict(train=(8054, 98), query=(8131, 98)),
        sop=dict(train=(59551, 11318), query=(60502, 11316)),
        inshop=dict(train=(25882, 3997), query=(14218, 3985), gallery=(12612, 3985)))
    ks = {name: row['ks'] for name, row in common.DATASETS.items()}
    assert ks == dict.fromkeys(ks, (1, 2, 4, 8)) | dict(sop=(1, 10, 100, 1000), inshop=(1, 10, 20, 30, 40, 50))


@pytest.mark.parametrize('name, file', [('cub', 'CUB_200_2011/images.txt'), ('cars', 'cars_annos.mat')])
def test_the_real_annotations_have_the_published_counts(monkeypatch, name, file):
    if not (REAL_DATA / name / file).exists():
        pytest.skip(f'{REAL_DATA / name / file} is not there')
    monkeypatch.setattr(common.Path, 'is_file', lambda path: True)              # as if the images were there
    assert common.list_images(name, REAL_DATA / name).keys() == {'train', 'query'}


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
    assert hasattr(data, 'train') == ('known' not in options)
    assert sorted(path.name.split('-')[1] for path in (tmp_path / 'cache').glob('*.bin')) == decoded.split()


# ---- folders

def names(rows):
    return [row[1] for row in rows]


@pytest.mark.parametrize('folders, train, test', [
    ('Latin/a Greek/beta Greek/alpha Latin/deep/b', 'Greek/alpha Greek/beta', 'Latin/a Latin/deep/b'),
    ('a b c d e', 'a b', 'c d e'), ('train/x train/y test/a test/b', 'x y', 'a b'),
    ('TRAIN/x TRAIN/y Val/a Val/b', 'x y', 'a b'), ('train/x train/y val/c val/d test/a test/b', 'x y', 'a b'),
    ('train/x test/a test/b', '', 'train needs 2 classes'),
    ('train/x train/y test/a', '', 'query needs 2 classes'), ('a b c', '', 'train needs 2 classes'),
    ('Train/x Train/y valid/x valid/y', '', 'train/ holds classes, but there is no test/ or val/')])
def test_which_classes_of_a_folder_train_and_which_test(tmp_path, folders, train, test):
    """Without train/ and test/, the first half of the sorted classes trains; of five, the one in the middle tests."""
    draw_folder(tmp_path, folders.split(), per_class=2)
    first = tmp_path / folders.split()[0]
    (first / 'notes.txt').write_text('no image')
    (first / '._0.jpg').write_bytes(b'resource fork')
    shutil.copy(first / '0.jpg', tmp_path / 'sheet.jpg')                        # as eval.py may draw one
    root = tmp_path / '..' / tmp_path.name                                      # as in --data ../photos
    if train:
        splits = common.list_images('folder', root)
        assert names(splits['train'])[::2] == train.split() and names(splits['query'])[::2] == test.split()
    else:
        with pytest.raises(UsageError, match=f'folder cannot be loaded: {test}'):
            common.list_images('folder', root)


def test_folder_with_query_and_gallery(tmp_path):
    draw_folder(tmp_path / 'train', ['a', 'b'], per_class=2)
    draw_folder(tmp_path / 'query', ['d', 'c', 'a9'], per_class=1)             # a9 has no match in the gallery
    draw_folder(tmp_path / 'gallery', ['b2', 'c', 'd'], per_class=2)
    data = common.load_dataset('folder', tmp_path, resize=16, cache=tmp_path / 'cache')
    assert data.query.labels.tolist() == [0, 2, 3] and data.gallery.labels.tolist() == [1, 1, 2, 2, 3, 3]
    assert data.query.classes == ['a9', 'b2', 'c', 'd'] and data.train.classes == ['a', 'b']
    shutil.rmtree(tmp_path / 'gallery')
    (tmp_path / 'gallery').mkdir()
    with pytest.raises(UsageError, match='nothing to search in: gallery/ has no images'):
        common.load_dataset('folder', tmp_path)


def test_classes_that_a_network_has_seen_are_left_out_of_a_folder(tmp_path, capsys):
    """Without train/ and test/ all other classes are the test set; with them, what test/ has beside."""
    draw_folder(tmp_path / 'flat', 'abcde', per_class=1)
    splits = common.list_images('folder', tmp_path / 'flat', known=['a', 'd', 'z'])
    assert names(splits['query']) == ['b', 'c', 'e'] and 'train' not in splits
    assert '2 classes were in the training set' in capsys.readouterr().out
    assert names(common.list_images('folder', tmp_path / 'flat', known=[])['query']) == list('abcde')
    with pytest.raises(UsageError, match='query needs 2 classes or more, and has'):
        common.list_images('folder', tmp_path / 'flat', known=['a', 'b', 'c', 'd'])
    draw_folder(tmp_path / 'split/train', 'ab', per_class=1)
    draw_folder(tmp_path / 'split/test', 'bcd', per_class=1)
    assert names(common.list_images('folder', tmp_path / 'split', known=['a', 'b'])['query']) == ['c', 'd']
    common.list_images('folder', tmp_path / 'split')
    assert '1 classes are in the training set and in the test set, the first is b' in capsys.readouterr().err


def test_copies_of_test_images_are_warned_about(tmp_path, capsys):
    """Whatever they are called. Copies within the training set do not flatter, and are nobody's business."""
    draw_folder(tmp_path / 'train', 'ab', per_class=3)
    draw_folder(tmp_path / 'test', 'cd', per_class=3, seed=1)
    shutil.copy(tmp_path / 'train/a/0.jpg', tmp_path / 'train/b/copy.jpg')
    picture = Image.new('RGB', (200, 200), 'white')
    for colour, name in enumerate(('train/a', 'test/c', 'test/d')):     # of 120 KB, and different in the last row only
        picture.putpixel((0, 0), (colour,) * 3)
        picture.save(tmp_path / name / 'x.bmp')
    common.list_images('folder', tmp_path)
    assert capsys.readouterr().err == ''
    shutil.copy(tmp_path / 'train/a/1.jpg', tmp_path / 'test/c/other.jpg')
    shutil.copy(tmp_path / 'test/d/2.jpg', tmp_path / 'test/d/again.jpg')
    common.list_images('folder', tmp_path)
    err = capsys.readouterr().err
    assert '2 files are copies of test images, which flatters the result; the first is' in err
    assert f'{tmp_path}/test/d/again.jpg, a copy of {tmp_path}/test/d/2.jpg' in err


def test_hidden_folders_links_and_pipes_are_no_classes(tmp_path, capsys):
    draw_folder(tmp_path / 'x', ['a', 'b', 'c', '.ipynb_checkpoints'], per_class=1)
    (tmp_path / 'x/b/up').symlink_to(tmp_path / 'x')
    (tmp_path / 'x/linked').symlink_to(draw_folder(tmp_path / 'y', ['e'], per_class=1, seed=1))
    os.mkfifo(tmp_path / 'x/a/pipe.jpg')
    (tmp_path / 'x/a/folder.jpg').mkdir()
    (tmp_path / 'x/licence.txt').write_text('beside the classes')
    splits = common.list_images('folder', tmp_path / 'x')
    assert names(splits['train'] + splits['query']) == ['a', 'b', 'c', 'linked/e'] and capsys.readouterr().err == ''
    (tmp_path / 'x/phone').mkdir()
    (tmp_path / 'x/phone/1.heic').write_bytes(b'a kind that PIL does not read')
    common.list_images('folder', tmp_path / 'x')
    assert 'warning: 1 folders hold files, but no images' in capsys.readouterr().err
    (tmp_path / 'x/phone/edited').mkdir()
    common.list_images('folder', tmp_path / 'x')
    assert 'warning: 1 folders hold files, but no images' in capsys.readouterr().err


def test_classes_and_images_do_not_depend_on_the_order_of_the_disk(tmp_path, monkeypatch):
    draw_folder(tmp_path, 'abcd', per_class=3)
    (tmp_path / 'a/link').symlink_to(tmp_path / 'd')        # one folder under two names: the first one counts

    def backwards(*args, walk=os.walk, **options):
        for folder, folders, files in walk(*args, **options):
            folders.sort(reverse=True)
            yield folder, folders, sorted(files, reverse=True)
    monkeypatch.setattr(os, 'walk', backwards)
    splits = common.list_images('folder', tmp_path)
    assert names(splits['train'] + splits['query']) == ['a'] * 3 + ['a/link'] * 3 + ['b'] * 3 + ['c'] * 3
    assert [row[0].name for row in splits['train']] == ['0.jpg', '1.jpg', '2.jpg'] * 2


# ---- decoding

@pytest.mark.parametrize('mode, suffix', [('L', 'jpg'), ('CMYK', 'JPG'), ('LA', 'png'), ('RGBA', 'png'), ('P', 'PNG'),
                                          ('1', 'png'), ('RGB', 'webp')])
def test_every_image_becomes_rgb(tmp_path, mode, suffix):
    for name in 'abcd':
        (tmp_path / name).mkdir()
        Image.new('RGB', (20, 14), (200, 30, 60)).convert(mode).save(tmp_path / name / f'0.{suffix}')
    data = common.load_dataset('folder', tmp_path, resize=7, cache=tmp_path / 'cache')
    assert data.train[0].shape == (7, 10, 3)


@pytest.mark.parametrize('kind, scale', [('uint16', 65535), ('int32', 65535), ('int32', 10 ** 6), ('float32', 3000)])
def test_deep_grey_is_scaled_and_not_cut_off(tmp_path, kind, scale):
    ramp = (np.linspace(0, 1, 40)[None] * np.ones((20, 1)) * scale).astype(kind)
    Image.fromarray(ramp).save(tmp_path / 'x.tif')
    pixels = common.read_image(tmp_path / 'x.tif', 20).astype(int)
    assert pixels.shape == (20, 40, 3) and np.abs(pixels[10, :, 0] - np.linspace(0, 255, 40)).max() < 2


def test_a_dark_picture_of_16_bits_stays_dark(tmp_path):
    grey = np.full((20, 20), 6554, np.uint16)
    for grey[0, 0] in 6554, 65535:                          # the second with a saturated pixel
        Image.fromarray(grey).save(tmp_path / 'x.png')
        assert common.read_image(tmp_path / 'x.png', 20)[10].mean() == pytest.approx(25.5, abs=1)


@pytest.mark.parametrize('form', ['eps', 'gif'])
def test_a_file_of_another_format_is_refused_whatever_its_name(tmp_path, form):
    """PIL would start Ghostscript for the first, and could read the second, but README lists neither."""
    Image.new('RGB', (32, 32)).save(tmp_path / 'x.jpg', form)
    with pytest.raises(UsageError, match='cannot read the image .*x.jpg: .*; replace or remove it'):
        common.read_image(tmp_path / 'x.jpg', 20)


def test_more_images_than_are_decoded_at_a_time_keep_their_order(tmp_path):
    """More than 512, each of a colour of its own"""
    paths = [tmp_path / f'{i}.ppm' for i in range(1030)]
    for i, path in enumerate(paths):
        path.write_bytes(b'P6 1 1 255\n' + bytes([i % 256, i // 256, 7]))
    pixels, sizes = common.decode(paths, 1, 'many', tmp_path)
    assert sizes.tolist() == [[1, 1]] * 1030
    assert pixels[:3 * 1030].reshape(-1, 3).tolist() == [[i % 256, i // 256, 7] for i in range(1030)]


def test_a_damaged_cache_is_decoded_anew(tmp_path):
    draw_folder(tmp_path / 'x', 'abcd', per_class=2)
    load = lambda: common.load_dataset('folder', tmp_path / 'x', cache=tmp_path / 'cache').train.pixels  # noqa: E731
    pixels = load().copy()                                  # it is mapped, and the file is going to change
    file = next((tmp_path / 'cache').glob('folder-train*.bin'))
    whole = file.read_bytes()
    for damaged in (whole[:-8], whole[:100], b'', whole + b'x', whole[:-4] + bytes(4)):
        file.write_bytes(damaged)
        assert np.array_equal(load(), pixels) and file.read_bytes() == whole


def test_the_cache_is_of_the_same_files_in_the_same_place(tmp_path, monkeypatch):
    """The length of a changed image may be as it was, and a program may put the old time back."""
    def draw(grey):
        for c in 'abcd':
            (tmp_path / 'x' / c).mkdir(parents=True, exist_ok=True)
            Image.new('RGB', (64, 64), (grey,) * 3).save(tmp_path / 'x' / c / '0.bmp')
            os.utime(tmp_path / 'x' / c / '0.bmp', (1, 1))

    def load(name='x', **sizes):
        return common.load_dataset('folder', tmp_path / name, cache=tmp_path / 'cache', **sizes).train[0]
    draw(10)
    shutil.copytree(tmp_path / 'x', tmp_path / 'y', copy_function=os.link)
    assert load().mean() == 10
    with monkeypatch.context() as patch:
        patch.setattr(common, 'read_image', None)           # to decode is an error now
        assert load().mean() == 10
        with pytest.raises(TypeError):
            load('y')
    assert len(load(resize=17, image_size=16)) == 17, 'another size is another file'
    draw(200)
    assert load().mean() == 200


@pytest.mark.parametrize('error', [OSError(28, 'No space left on device'), RuntimeError('No space left: torch.save')])
def test_a_full_disk_leaves_the_old_file_intact(tmp_path, error):
    (tmp_path / 'old').write_text('precious')
    with pytest.raises(UsageError, match='No space left.*unharmed'):
        with common.written_whole(tmp_path / 'old') as file:
            file.write(b'half')
            raise error
    assert (tmp_path / 'old').read_text() == 'precious' and not list(tmp_path.glob('*.tmp'))


def test_what_a_killed_process_left_of_a_file_is_removed_by_the_next_that_writes_it(tmp_path):
    """But not what a living process still writes, or one of another machine, and nothing of other files."""
    gone = subprocess.Popen([sys.executable, '-c', ''])
    gone.wait()
    here = platform.node()
    kept = [f'x.bin.{here}.{os.getppid()}.tmp', f'y.bin.{here}.{gone.pid}.tmp', f'x.bin.other.{gone.pid}.tmp',
            f'{gone.pid}.tmp', 'x.bin.tmp', f'x.bin.{here}.mine.tmp', f'x.bin.{here}.{gone.pid}']
    for name in (*kept, f'x.bin.{here}.{gone.pid}.tmp'):
        (tmp_path / name).touch()
    with common.written_whole(tmp_path / 'x.bin') as file:
        file.write(b'whole')
    assert {path.name for path in tmp_path.iterdir()} == {*kept, 'x.bin'}


@pytest.mark.parametrize('resize, image_size, expected', [
    (None, None, (256, 224)), (None, 112, (128, 112)), (128, None, (128, 112)), (300, 200, (300, 200))])
def test_sizes_follow_each_other_as_in_the_recipes(monkeypatch, resize, image_size, expected):
    rows = dict(train=[('x', 'a', None)], query=[('x', 'b', None)])
    monkeypatch.setattr(common, 'list_images', lambda *_, **__: rows)
    monkeypatch.setattr(common, 'decode', lambda paths, side, *rest: (None, [(side, side)]))
    train = common.load_dataset('cub', 'x', resize, image_size).train
    assert (train.sizes[0][0], train.image_size) == expected


def test_a_dataset_that_there_is_not():
    with pytest.raises(UsageError, match="there is no dataset 'flowers', but shapes, folder, cub"):
        common.load_dataset('flowers')


def test_shapes_is_fixed_disjoint_and_not_solved_by_pixels():
    """Another seed, or another drawing, would make all results of the README wrong."""
    data = common.load_dataset('shapes')
    assert len(data.train) == len(data.query) == 2000 and data.train[0].shape == (64, 64, 3)
    assert not set(data.train.classes) & set(data.query.classes) and len(data.train.classes) == 100
    means = [part.pixels.mean() for part in (data.train, data.query)]
    assert means == pytest.approx([115.36, 115.44], abs=0.03)
    pixels = torch.from_numpy(data.query.pixels.reshape(2000, 64, 64, 3)).float()
    # Other noise makes neighbouring pixels differ.
    assert pixels.diff(dim=1).abs().mean().item() == pytest.approx(8.860, abs=0.01)
    small = torch.nn.functional.avg_pool2d(pixels.permute(0, 3, 1, 2), 4).flatten(1)
    for z in (small, small - small.mean(1, keepdim=True)):
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


def test_flips_are_horizontal_for_half_of_the_images_each_by_itself():
    pixels, images = noise(*[(16, 16)] * 200)
    x, upright = only(images, augment=no_augmentation(flip=True))[0], torch.stack(pixels).permute(0, 3, 1, 2)
    same, mirrored = ((back(x) - side).abs().amax(dim=(1, 2, 3)) < 0.1 for side in (upright, upright.flip(3)))
    assert (same != mirrored).all() and 70 < mirrored.sum() < 130


def test_jitter_is_torchvisions_with_factors_of_each_image():
    """The order of the three steps is drawn; each blends like torchvision's functions of these names."""
    x = torch.rand(4, 3, 6, 6)
    steps = [transforms.functional.adjust_brightness, transforms.functional.adjust_contrast,
             transforms.functional.adjust_saturation]
    for seed in range(8):
        torch.manual_seed(seed)
        jittered = common.jitter_colours(x, 0.4)
        torch.manual_seed(seed)
        expected = x
        for i in torch.randperm(3).tolist():
            factors = 1 + 0.4 * (2 * torch.rand(4, 1, 1, 1) - 1).flatten()
            expected = torch.stack([steps[i](image, f.item()) for image, f in zip(expected, factors)])
        assert torch.allclose(jittered, expected, atol=1e-5)


def test_jitter_reaches_training_batches_only():
    _, images = noise((16, 16), (16, 16))
    plain, _ = only(images, augment=no_augmentation())
    jittered, _ = only(images, augment=no_augmentation(jitter=0.5))
    assert torch.equal(plain, only(images)[0]) and (plain - jittered).abs().mean() > 0.05
