"""Images: decoding, the test and training transforms, crops, flips and colours."""
import random
from contextlib import suppress

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision import transforms
from torchvision.transforms import v2

import common
from common import Images, UsageError, make_train_transform, to_8_bits, to_rgb


def noise(height, width, seed=0):
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(pixels)


@pytest.mark.parametrize('mode, suffix', [('L', 'jpg'), ('CMYK', 'JPG'), ('LA', 'png'), ('RGBA', 'png'), ('P', 'PNG'),
                                          ('1', 'png'), ('RGB', 'webp'), ('P', 'gif')])
def test_every_mode_becomes_rgb(tmp_path, mode, suffix):
    image = Image.new('RGB', (20, 14), (200, 30, 60)).convert(mode)
    image.save(tmp_path / f'x.{suffix}')
    rgb = to_rgb(tmp_path / f'x.{suffix}')
    assert rgb.mode == 'RGB' and rgb.size == (20, 14)
    assert np.abs(np.asarray(rgb).astype(int) - np.asarray(image.convert('RGB'))).max() < 8


@pytest.mark.parametrize('kind, largest', [('uint16', 1023), ('int32', 2 ** 20 - 1), ('float32', 0.01)])
def test_a_grey_ramp_of_any_depth_keeps_its_levels(tmp_path, kind, largest):
    ramp = (np.linspace(0, 1, 40)[None] * np.ones((20, 1)) * largest).astype(kind)
    Image.fromarray(ramp).save(tmp_path / 'x.tif')
    pixels = np.asarray(to_rgb(tmp_path / 'x.tif')).astype(int)
    assert pixels.shape == (20, 40, 3) and np.abs(pixels[10, :, 0] - np.linspace(0, 255, 40)).max() < 2


def test_grey_values_are_scaled_by_their_finite_range():
    nan, inf = np.nan, np.inf
    assert to_8_bits(np.array([[nan, -2, 0, 2, inf, -inf]], np.float32)).tolist() == [[0, 0, 128, 255, 255, 0]]
    assert to_8_bits(np.array([[-1024, 0, 1026]], np.int32)).tolist() == [[0, 127, 255]]     # as in a CT scan
    assert to_8_bits(np.array([[7, 7]], np.uint16)).tolist() == [[0, 0]]
    with pytest.raises(UsageError, match='cannot read the image'):
        to_rgb(np.array([[nan, nan]]))


@pytest.mark.parametrize('mode, clear, ink, expected', [
    ('LA', (0, 0), (0, 255), (0, 0, 0)), ('RGBA', (9, 9, 9, 0), (255, 0, 0, 128), (255, 127, 127)),
    ('L', 8, 80, (80, 80, 80)),
    ('RGB', (1, 2, 3), (1, 2, 4), (1, 2, 4)), ('P', 1, 0, (0, 0, 0))])
def test_transparent_pixels_become_white(tmp_path, mode, clear, ink, expected):
    """A mode has an alpha channel, or a transparent colour, or a transparent entry of its palette."""
    image = Image.new(mode, (6, 4), clear)
    if mode == 'P':
        image.putpalette([0, 0, 0, 9, 9, 9])
    image.putpixel((2, 1), ink)
    image.save(tmp_path / 'x.png', **{} if mode in ('LA', 'RGBA') else dict(transparency=clear))
    rgb = to_rgb(tmp_path / 'x.png')
    assert rgb.getpixel((2, 1)) == expected and rgb.getpixel((0, 0)) == (255, 255, 255)


def test_an_image_is_rotated_according_to_its_exif_data(tmp_path):
    image = noise(20, 30)
    image.getexif()[0x0112] = 6                             # rotated by 90 degrees, clockwise
    image.save(tmp_path / 'x.png', exif=image.getexif())
    turned = np.rot90(np.asarray(image), -1)
    for source in (image, tmp_path / 'x.png'):
        np.testing.assert_array_equal(np.asarray(to_rgb(source)), turned)


@pytest.mark.filterwarnings('ignore:Corrupt EXIF data')
@pytest.mark.parametrize('suffix', ['jpg', 'png'])
def test_corrupted_exif_data_are_ignored(tmp_path, suffix):
    noise(16, 24).save(tmp_path / f'x.{suffix}', exif=b'Exif\0\0II\x2a\0\xff\xff\xff\x7f')
    assert to_rgb(tmp_path / f'x.{suffix}').size == (24, 16)


@pytest.mark.parametrize('size, expected', [((2, 700), (2, 32)), ((900, 3), (48, 3)), ((160, 10), (160, 10))])
def test_a_thin_image_is_cropped_to_sixteen_times_its_shorter_side(size, expected):
    ramp = (np.arange(max(size)) * 255 // max(size)).astype(np.uint8)
    rgb = to_rgb(Image.fromarray(np.broadcast_to(ramp if size[0] > size[1] else ramp[:, None], size[::-1])))
    assert rgb.size == expected and np.asarray(rgb).mean() == pytest.approx(127, abs=2), 'its centre'


def test_large_jpegs_are_decoded_at_a_reduced_size_but_not_below_min_side(tmp_path):
    noise(300, 400).save(tmp_path / 'x.jpg')
    for min_side, shorter in {None: 300, 20: 38, 70: 75, 75: 75, 76: 150, 200: 300, 900: 300}.items():
        assert min(to_rgb(tmp_path / 'x.jpg', min_side).size) == shorter

    def transform(image):
        return image.size
    transform.min_side = 70
    images = Images([tmp_path / 'x.jpg'], ['a'], transform=transform, train_transform=lambda image: image.size)
    assert images[0][0] == (100, 75) and images[0, 1][0] == (400, 300), 'without min_side, the full size'
    assert common.make_test_transform(40, 32).min_side == 40
    assert make_train_transform(32, min_crop=0.25).min_side == 64, 'the smallest crop has half the side'
    assert make_train_transform(32, min_crop=0.25, resize=40).min_side == 40


def test_a_format_that_starts_a_program_is_rejected_whatever_the_name(tmp_path, monkeypatch):
    """PIL would start Ghostscript for EPS. A format that this version of PIL lacks does not matter."""
    monkeypatch.setattr(common, 'FORMATS', [*common.FORMATS, 'JPEG 2100'])
    Image.new('RGB', (32, 32)).save(tmp_path / 'x.jpg', 'eps')
    with pytest.raises(UsageError, match='cannot read the image .*x.jpg: cannot identify .*; replace or remove it'):
        to_rgb(tmp_path / 'x.jpg')


@pytest.mark.parametrize('suffix', ['jpg', 'ppm', 'tif'])
def test_a_truncated_file_is_rejected(tmp_path, suffix):
    path = tmp_path / f'Vögel im Nest.{suffix}'
    noise(40, 50).save(path)
    path.write_bytes(path.read_bytes()[:-300])
    with pytest.raises(UsageError, match='^cannot read the image .*Vögel im Nest.*; replace or remove it$'):
        to_rgb(path)


def test_labels_are_names_or_integers_one_for_each_image():
    items = [noise(4, 4, seed) for seed in range(3)]
    images = Images(items, ['b', 'a', 'b'])
    assert images.classes == ['a', 'b'] and images.labels.tolist() == [1, 0, 1] and images.num_classes == 2
    assert Images(items, torch.tensor([30, 4, 30])).classes == ['4', '30']
    images = Images(items, [2, 0, 2], classes=['x', 'y', 'z'])
    assert images.classes == ['x', 'y', 'z'] and images.labels.tolist() == [2, 0, 2]
    for labels in (['a'] * 4, [[1], [2], [3]], torch.tensor([0.0, 1.0, float('nan')]), ['a', None, 'b'], None):
        with pytest.raises(UsageError, match='^3 images need as many labels, none of them missing'):
            Images(items, labels)
    assert Images(items, np.array([2, 0, 2], object), classes=['x', 'y', 'z']).labels.tolist() == [2, 0, 2]
    tuples = np.empty(3, object)
    tuples[:] = [('a', 1), ('b', 2), ('a', 1)]
    with pytest.raises(UsageError, match='^3 images need as many labels, none of them missing'):
        Images(items, tuples)
    for labels in (['b', 1, 'b'], np.array([2, 'a', 2], object)):
        with pytest.raises(UsageError, match='^labels are of one type, .*, and these are of several: int, str$'):
            Images(items, labels)
    for labels in ([0, 1, 2], [-1, 0, 1], [0, 0.5, 1]):
        with pytest.raises(UsageError, match='^with 2 classes, labels are positions from 0 to 1$'):
            Images(items, labels, classes=['x', 'y'])


def test_columns_of_a_shuffled_table_are_read_by_position():
    class Column(list):
        """As a column of pandas, column[key] looks for the row with this label."""
        def __getitem__(self, key):
            return super().__getitem__([2, 0, 1].index(key))
    items = [noise(4, 4, seed) for seed in range(3)]
    images = Images(Column(items), Column('bab'), superclasses=Column([5, 6, 7]), transform=np.asarray)
    assert all((images[i][0] == np.asarray(items[i])).all() for i in range(3))
    assert images.labels.tolist() == [1, 0, 1] and images.superclasses.tolist() == [5, 6, 7]


def test_class_names_of_another_unicode_form_are_the_same_classes():
    one, two = (Images([noise(4, 4)] * 2, [name, 'x']) for name in ('caf\u00e9', 'cafe\u0301'))
    assert one.classes == two.classes == Images([noise(4, 4)], [0], ['cafe\u0301']).classes + ['x']
    assert Images([noise(4, 4)] * 2, ['caf\u00e9', 'cafe\u0301']).labels.tolist() == [0, 0]


def test_vectors_in_memory_are_finite_and_become_constants():
    assert Images(torch.ones(2, 3, dtype=torch.uint8), [0, 1]).items.dtype == torch.float32
    assert not Images(torch.ones(2, 3, requires_grad=True), [0, 1]).items.requires_grad
    assert Images(np.ones((2, 3), np.float32), [0, 1]).is_vectors
    with pytest.raises(UsageError, match='^some vectors are NaN or infinite$'):
        Images(torch.tensor([[0.0], [np.nan]]), [0, 1])


def test_a_tensor_of_images_is_rejected():
    with pytest.raises(UsageError, match='^a tensor of vectors is .*; images are a list of paths, PIL images or uint8'):
        Images(torch.zeros(2, 3, 8, 8), [0, 1])


@pytest.mark.parametrize('item', [np.zeros((3, 8, 8), np.uint8), np.zeros((8, 8, 3)), None, Image.new('La', (8, 8))])
def test_other_items_are_rejected_in_one_line(item):
    """Channels come first, pixels are floats, there is no image, or it has a mode that PIL does not convert."""
    with pytest.raises(UsageError, match='^cannot read the image .*; replace or remove it$'):
        to_rgb(item)


@pytest.mark.parametrize('index', [torch.tensor([5, 0]), torch.tensor([True, False, False, False, False, True])])
def test_a_subset_has_only_its_classes_and_the_same_transforms(index):
    images = Images([noise(4, 4, i) for i in range(6)], list('ccabba'), superclasses=torch.arange(6),
                    paths=list('uvwxyz'), transform=np.asarray, train_transform=np.array)
    part, chosen = images.subset(index), torch.arange(6)[index].tolist()
    assert part.classes == ['a', 'c'] and part.labels.tolist() == [0 if i == 5 else 1 for i in chosen]
    assert part.superclasses.tolist() == chosen and part.paths == ['uvwxyz'[i] for i in chosen]
    assert all((part[k][0] == images[i][0]).all() for k, i in enumerate(chosen))
    assert part.train_transform is np.array


def three_samples(image):
    return [random.random(), np.random.rand(), torch.rand(()).item()]


def generators():
    return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()


def test_random_numbers_of_a_train_transform_follow_from_the_integers_only():
    """The state of the generators of Python, NumPy and torch does not change."""
    images = Images([noise(4, 4)] * 2, ['a', 'b'], train_transform=three_samples)
    before = generators()
    samples = {key: images[(0, *key)][0] for key in ((1, 2, 3), (1, 2, 4), (1, 3, 3), (2, 2, 3), (1, 2))}
    assert generators() == before
    with suppress(KeyError), common.seeded(1):
        raise KeyError
    assert generators() == before
    common.set_seed(5)
    assert images[1, 1, 2, 3][0] == samples[1, 2, 3], 'not from the image, nor from earlier random numbers'
    for column in zip(*samples.values()):
        assert len(set(column)) == 5, 'each of the generators is seeded, with each of the integers'


def back(x):
    """Undoes the normalization by the mean and standard deviation of ImageNet, in RGB: (3, S, S) -> 0..255"""
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    return 255 * (x * std[:, None, None] + mean[:, None, None])


def pixels_of(image):
    return transforms.functional.pil_to_tensor(image).float()


@pytest.mark.parametrize('height, width', [(20, 31), (27, 16)])
def test_test_images_are_resized_and_their_centre_is_cropped(height, width):
    image = noise(height, width)
    x, _ = Images([image], ['a'], transform=common.make_test_transform(18, 15))[0]
    expected = transforms.functional.center_crop(transforms.functional.resize(image, 18), [15, 15])
    assert torch.allclose(back(x), pixels_of(expected), atol=1e-3)


@pytest.mark.parametrize('resize', [None, 30])
def test_training_crops_are_taken_from_the_original_or_the_resized_image(resize):
    """The crop boxes equal the boxes of torchvision's RandomResizedCrop with the same seed."""
    images = Images([noise(40, 60), noise(80, 50, 1)], ['a', 'b'], train_transform=make_train_transform(
        16, min_crop=0.2, flip=False, resize=resize))
    for i in (0, 1):
        image = images.items[i]
        if resize:
            image = transforms.functional.resize(image, resize)
        with common.seeded(9, i):
            box = transforms.RandomResizedCrop.get_params(image, (0.2, 1.0), (3 / 4, 4 / 3))
        expected = transforms.functional.resized_crop(image, *box, [16, 16])
        assert torch.allclose(back(images[i, 9, i][0]), pixels_of(expected), atol=1e-3)


def test_flips_are_horizontal_for_half_of_the_images():
    images = Images([noise(16, 16)], ['a'], train_transform=make_train_transform(16, min_crop=1.0))
    x, upright = torch.stack([back(images[0, i][0]) for i in range(200)]), pixels_of(images.items[0])
    same, mirrored = ((x - side).abs().amax(dim=(1, 2, 3)) < 0.1 for side in (upright, upright.flip(2)))
    assert (same != mirrored).all() and 70 < mirrored.sum() < 130


def test_jitter_is_of_brightness_contrast_and_saturation():
    [jitter] = [t for t in make_train_transform(16, jitter=0.5).transforms if isinstance(t, v2.ColorJitter)]
    assert jitter.brightness == jitter.contrast == jitter.saturation == (0.5, 1.5) and jitter.hue is None
