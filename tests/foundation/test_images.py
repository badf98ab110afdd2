"""Images: decoding, the cache, crops, flips and colours."""
import os
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import draw_folder
from PIL import Image, ImageOps
from torchvision import transforms

import common
from common import UsageError

# ---- decoding

@pytest.mark.parametrize('mode, suffix', [('L', 'jpg'), ('CMYK', 'JPG'), ('LA', 'png'), ('RGBA', 'png'), ('P', 'PNG'),
                                          ('1', 'png'), ('RGB', 'webp')])
def test_every_image_becomes_rgb(tmp_path, mode, suffix):
    for name in 'abcd':
        (tmp_path / name).mkdir()
        Image.new('RGB', (20, 14), (200, 30, 60)).convert(mode).save(tmp_path / name / f'0.{suffix}')
    data = common.load_dataset('folder', tmp_path, 7, 7, tmp_path / 'cache')
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


def test_all_files_that_cannot_be_read_are_named_at_once(tmp_path, capsys):
    """Names with spaces and umlauts, too. Nothing is left of the cache, and the mended folder is decoded."""
    draw_folder(tmp_path / 'x', ['Vögel im Nest', 'b', 'c', 'd'], per_class=4)
    broken = [tmp_path / 'x' / name for name in ('Vögel im Nest/1.jpg', 'b/0.jpg', 'c/3.jpg')]
    for path in broken:
        path.write_bytes(path.read_bytes()[:300])
    paths = sorted((tmp_path / 'x').rglob('*.jpg'))
    with pytest.raises(UsageError, match='^3 of 16 images cannot be read; they are listed above'):
        common.load_dataset('folder', tmp_path / 'x', 8, 8, cache=tmp_path / 'cache')
    reasons = capsys.readouterr().err.splitlines()
    assert all(str(path) in reason for path, reason in zip(sorted(broken), sorted(reasons))) and len(reasons) == 3
    assert not list((tmp_path / 'cache').iterdir())
    for path in broken[:2]:
        path.unlink()
    paths = sorted((tmp_path / 'x').rglob('*.jpg'))
    with pytest.raises(UsageError, match='cannot read the image .*c/3.jpg: .*; replace or remove it'):
        common.decode(paths, 8, 'photos', tmp_path / 'cache')
    broken[2].unlink()
    assert len(common.decode(sorted((tmp_path / 'x').rglob('*.jpg')), 8, 'photos', tmp_path / 'cache')[1]) == 13


def test_a_cache_that_cannot_be_written_costs_time_and_no_result(tmp_path, capsys):
    draw_folder(tmp_path / 'x', 'abcd', per_class=2)
    (tmp_path / 'file').write_text('no folder')
    bad, good = (common.load_dataset('folder', tmp_path / 'x', cache=tmp_path / name) for name in ('file/x', 'cache'))
    for ours, theirs in ((bad.train, good.train), (bad.query, good.query)):
        assert all(map(np.array_equal, ours.pixels, theirs.pixels)) and ours.digests.tolist() == theirs.digests.tolist()
        assert ours.file is None
    err = capsys.readouterr().err
    assert err.count('warning: could not write') == 2 and 'take another --cache' in err and 'unharmed' not in err


def test_more_images_than_are_decoded_at_a_time_keep_their_order(tmp_path):
    """More than 512, each of a colour of its own"""
    paths = [tmp_path / f'{i}.ppm' for i in range(1030)]
    for i, path in enumerate(paths):
        path.write_bytes(b'P6 1 1 255\n' + bytes([i % 256, i // 256, 7]))
    pixels, *_ = common.decode(paths, 1, 'many', tmp_path)
    assert [each.tolist() for each in pixels] == [[[[i % 256, i // 256, 7]]] for i in range(1030)]


def test_a_damaged_cache_is_decoded_anew(tmp_path):
    draw_folder(tmp_path / 'x', 'abcd', per_class=2)
    load = lambda: common.load_dataset('folder', tmp_path / 'x', cache=tmp_path / 'cache').train.pixels  # noqa: E731
    pixels = [each.copy() for each in load()]        # it is mapped, and the file is going to change
    file = next((tmp_path / 'cache').glob('folder-train*.bin'))
    whole = file.read_bytes()
    for damaged in (whole[:-8], whole[:100], b'', whole + b'x', whole[:-4] + bytes(4)):
        file.write_bytes(damaged)
        assert all(map(np.array_equal, load(), pixels)) and file.read_bytes() == whole


def test_the_cache_is_of_the_same_files_in_the_same_place(tmp_path, capsys):
    """The length of a changed image may be as it was, and a program may put the old time back."""
    def draw(grey):
        for c in 'abcd':
            (tmp_path / 'x' / c).mkdir(parents=True, exist_ok=True)
            Image.new('RGB', (64, 64), (grey,) * 3).save(tmp_path / 'x' / c / '0.bmp')
            os.utime(tmp_path / 'x' / c / '0.bmp', (1, 1))

    def load(name='x', decodes=True, **sizes):
        image = common.load_dataset('folder', tmp_path / name, cache=tmp_path / 'cache', **sizes).train[0]
        assert ('folder train: decoding 2 images' in capsys.readouterr().out) == decodes
        return image
    draw(10)
    shutil.copytree(tmp_path / 'x', tmp_path / 'y', copy_function=os.link)
    assert load().mean() == 10
    assert load(decodes=False).mean() == 10
    load('y')
    assert len(load(resize=17, image_size=16)) == 17, 'another size is another file'
    draw(200)
    assert load().mean() == 200


def test_code_that_decodes_otherwise_has_an_effect(tmp_path, monkeypatch, capsys):
    """And the old files are named, once. The code stands in a file here, as inspect needs it."""
    draw_folder(tmp_path / 'x', 'abcd', per_class=2)
    load = lambda: common.load_dataset('folder', tmp_path / 'x', cache=tmp_path / 'cache').train  # noqa: E731
    before = load()
    capsys.readouterr()
    monkeypatch.setattr(common, 'to_rgb', inverted)
    after = load()
    out = capsys.readouterr().out
    assert np.abs(255 - before[0].astype(int) - after[0]).mean() < 1 and before.file != after.file
    assert f'The code that decodes has changed. What it left before may be deleted: {before.file}' in out
    assert load().file == after.file and capsys.readouterr().out == ''


def inverted(image):
    return ImageOps.invert(image.convert('RGB'))


# ---- crops and colours

def noise(*sizes, image_size=16):
    generator = torch.Generator().manual_seed(0)
    pixels = [torch.randint(256, (h, w, 3), generator=generator, dtype=torch.uint8) for h, w in sizes]
    return pixels, common.Images([p.numpy() for p in pixels], torch.arange(len(sizes)), image_size)


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
        for image, found in zip(x, jittered):
            order, *factors = transforms.ColorJitter.get_params((0.6, 1.4), (0.6, 1.4), (0.6, 1.4), None)
            for i in [i for i in order.tolist() if i < 3]:                  # 3 would be the hue
                image = steps[i](image, factors[i])
            assert torch.allclose(found, image, atol=1e-5)


def test_jitter_changes_each_image_by_at_most_this_much():
    """Of images of one grey, all pixels change by one factor, that of the brightness."""
    images = noise(*[(16, 16)] * 12)[1]
    for pixels in images.pixels:
        pixels[:] = 100
    jittered = back(only(images, augment=no_augmentation(jitter=0.5))[0])
    factors = jittered.mean(dim=(1, 2, 3)) / 100
    assert torch.allclose(jittered, 100 * factors[:, None, None, None].expand_as(jittered), atol=0.1)
    assert len({round(f, 3) for f in factors.tolist()}) == 12, 'each image has its own'
    assert 0.5 <= factors.min() < 0.8 and 1.2 < factors.max() <= 1.5


def test_jitter_reaches_training_batches_only():
    _, images = noise((16, 16), (16, 16))
    plain, _ = only(images, augment=no_augmentation())
    jittered, _ = only(images, augment=no_augmentation(jitter=0.5))
    assert torch.equal(plain, only(images)[0]) and (plain - jittered).abs().mean() > 0.05
