"""Images: decoding, labels, the test and training transforms."""
import random

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision import transforms
from torchvision.transforms import v2

import common
from common import Images, UsageError, make_train_transform, to_rgb


def noise(height, width, seed=0):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8))


@pytest.mark.parametrize('mode, clear, ink, expected', [
    ('LA', (0, 0), (0, 255), (0, 0, 0)), ('RGBA', (9, 9, 9, 0), (255, 0, 0, 128), (255, 127, 127)),
    ('L', 8, 80, (80, 80, 80)), ('RGB', (1, 2, 3), (1, 2, 4), (1, 2, 4))])
def test_every_mode_becomes_rgb_with_white_where_it_is_transparent(tmp_path, mode, clear, ink, expected):
    image = Image.new(mode, (6, 4), clear)
    image.putpixel((2, 1), ink)
    image.save(tmp_path / 'x.png', **{} if mode in ('LA', 'RGBA') else dict(transparency=clear))
    rgb = to_rgb(tmp_path / 'x.png')
    assert rgb.mode == 'RGB' and rgb.getpixel((2, 1)) == expected and rgb.getpixel((0, 0)) == (255, 255, 255)


def test_an_image_is_rotated_according_to_its_exif_data(tmp_path):
    image = noise(20, 30)
    image.getexif()[0x0112] = 6                             # rotated by 90 degrees, clockwise
    image.save(tmp_path / 'x.png', exif=image.getexif())
    for source in (image, tmp_path / 'x.png'):
        np.testing.assert_array_equal(np.asarray(to_rgb(source)), np.rot90(np.asarray(image), -1))


def test_large_jpegs_are_decoded_at_a_reduced_size_but_not_below_min_side(tmp_path):
    noise(300, 400).save(tmp_path / 'x.jpg')
    for min_side, shorter in {None: 300, 20: 38, 75: 75, 76: 150, 900: 300}.items():
        assert min(to_rgb(tmp_path / 'x.jpg', min_side).size) == shorter
    small = common.make_test_transform(75, 32)
    images = Images([tmp_path / 'x.jpg'], ['a'], transform=small, train_transform=v2.PILToTensor())
    assert images[0, 1][0].shape == (3, 300, 400), 'without min_side, the full size'
    assert torch.equal(images[0][0], small(to_rgb(tmp_path / 'x.jpg', 75)))
    assert make_train_transform(32, min_crop=0.25).min_side == 64, 'the smallest crop has half the side'


@pytest.mark.parametrize('kind', ['uint16', 'int32', 'float32', 'eps'])
def test_more_than_8_bits_and_formats_that_start_a_program_are_refused(tmp_path, kind):
    """Pillow would clip the values, and start Ghostscript for EPS, whatever the name of the file."""
    image = noise(8, 8) if kind == 'eps' else Image.fromarray(np.full((8, 8), 300).astype(kind))
    image.save(tmp_path / 'x.jpg', 'eps' if kind == 'eps' else 'tiff')
    with pytest.raises(UsageError, match='^cannot read the image .*x.jpg: (it has more than 8 bits|cannot identify)'):
        to_rgb(tmp_path / 'x.jpg')


def test_labels_are_names_or_numbers_one_for_each_image():
    """A Mac writes names in another form of Unicode, and a column of a table may have floats instead of integers."""
    items = [noise(4, 4)] * 3
    for labels, classes in (('bab', ['a', 'b']), (torch.tensor([30, 4, 30]), ['4', '30']), ([2.0, 1.0, 2], ['1', '2']),
                            (np.array([2.5, 1, 2.5]), ['1', '2.5']), ([b'b', 'a', 'b'], ['a', 'b']),
                            (['caf\u00e9', 'a', 'cafe\u0301'], ['a', 'caf\u00e9'])):
        images = Images(items, labels)
        assert images.classes == classes and images.labels.tolist() == [1, 0, 1] and images.num_classes == 2
    images = Images(items, [2, 0, 2], classes=['cafe\u0301', 'y', 3.0])
    assert images.labels.tolist() == [2, 0, 2] and images.present == ['caf\u00e9', '3']
    for labels, classes in (('baba', None), ([0, 1, 2], 'xy'), ([-1, 0, 1], 'xy'), ([0, 0.5, 1], 'xy')):
        with pytest.raises(UsageError, match='^3 images of . classes need as many labels'):
            Images(items, labels, classes)


class Column(list):
    """As in a column of a shuffled table of pandas, column[key] is not the row at this position."""
    def __getitem__(self, key):
        return super().__getitem__([2, 0, 1, 5, 4, 3].index(key))


@pytest.mark.parametrize('index', [torch.tensor([5, 0]), torch.tensor([True, False, False, False, False, True])])
def test_a_subset_has_only_its_classes_and_the_same_options(index):
    images = Images(Column(noise(4, 4, i) for i in range(6)), Column('ccabba'), superclasses=torch.arange(6),
                    transform=np.asarray, train_transform=np.array, workers=3)
    part, chosen = images.subset(index), torch.arange(6)[index].tolist()
    assert part.classes == ['a', 'c'] and part.labels.tolist() == [0 if i == 5 else 1 for i in chosen]
    assert part.superclasses.tolist() == chosen and part.train_transform is np.array and part.workers == 3
    assert all((part[k][0] == np.asarray(noise(4, 4, i))).all() for k, i in enumerate(chosen))


def test_random_numbers_of_a_train_transform_follow_from_the_integers_only():
    images = Images([noise(4, 4)] * 2, ['a', 'b'],
                    train_transform=lambda image: [random.random(), np.random.rand(), torch.rand(()).item()])
    keys = (0, 1, 2, 3), (0, 1, 2, 4), (0, 1, 3, 3), (0, 2, 2, 3), (0, 1, 2), (1, 1, 2, 3)
    for number in zip(*(images[key][0] for key in keys)):
        assert len(set(number)) == 5 and number[0] == number[5], 'not from the image, nor from earlier random numbers'


def pixels_of(image):
    """Pixels normalized by the mean and standard deviation of ImageNet, in RGB, (3, S, S)"""
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    return (transforms.functional.to_tensor(image) - mean[:, None, None]) / std[:, None, None]


@pytest.mark.parametrize('resize', [None, 30])
def test_training_images_are_random_crops_half_of_them_flipped_and_test_images_centre_crops(resize):
    """Training crops are of the original or the resized image, with the boxes of torchvision's RandomResizedCrop."""
    image, boxes = noise(40, 60), transforms.RandomResizedCrop
    images = Images([image], ['a'], None, None, common.make_test_transform(18, 15),
                    make_train_transform(16, min_crop=0.2, resize=resize))
    expected = transforms.functional.center_crop(transforms.functional.resize(image, 18), [15, 15])
    assert torch.allclose(images[0][0], pixels_of(expected), atol=1e-5)
    image = transforms.functional.resize(image, resize) if resize else image
    flipped = []
    for seed in range(100):
        common.set_seed(seed)
        crop = transforms.functional.resized_crop(image, *boxes.get_params(image, (0.2, 1.0), (3 / 4, 4 / 3)), [16, 16])
        same = [torch.allclose(images[0, seed][0], x, atol=1e-5) for x in (pixels_of(crop), pixels_of(crop).flip(2))]
        assert any(same)
        flipped.append(same[1])
    assert 30 < sum(flipped) < 70
    [jitter] = [t for t in make_train_transform(16, jitter=0.5).transforms if isinstance(t, v2.ColorJitter)]
    assert jitter.brightness == jitter.contrast == jitter.saturation == (0.5, 1.5) and jitter.hue is None
