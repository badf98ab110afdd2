"""eval.py: image grids of queries, searching a photo, and saved embeddings."""
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import make_folder, on_circle
from PIL import Image

import common
import eval as evaluation
import train_ccl
import train_ms

EVAL = ['--device', 'cpu', '--precision', 'fp32']
MODEL = SimpleNamespace(saved=dict(transform=dict(resize=6, image_size=6, mean=common.MEAN, std=common.STD)))


def draw(path, queries, z, gallery, z_gallery, top, hardest):
    """Draws a grid of images of 6 x 6 pixels, with borders of 4 pixels, and 2 pixels between them. Returns its rows as
    text: the brightness of each image, then + if its border is green, - if it is red, nothing if it is white."""
    evaluation.draw_queries(path, MODEL, common.Splits('greys', None, queries, gallery), z, z_gallery, top, hardest)
    pixels = np.asarray(Image.open(path)).tolist()
    signs = {255: '', 0: '+', 219: '-'}                     # by the red of a border
    return [' '.join(f'{image[0]}{signs[border[0]]}' for image, border in zip(images[8::16], borders[3::16]))
            for images, borders in zip(pixels[8::16], pixels[3::16])]


def in_grey(values, labels):
    return common.Images([np.full((6, 6, 3), value, np.uint8) for value in values], labels)


@pytest.mark.parametrize('degrees, labels, top, hardest, rows', [
    pytest.param((0, 5, 90, 100, 170), [0, 0, 1, 0, 1], 2, False,
                 ['0 1+ 2-', '1 0+ 2-', '2 3- 4+', '3 2- 4-', '4 3- 2+'], id='in the order of the set'),
    # The nearest image of 2, 3 and 4 is a negative, 10, 10 and 70 degrees away; that of 0 and 1 is a positive.
    pytest.param((0, 5, 90, 100, 170), [0, 0, 1, 0, 1], 2, True,
                 ['2 3- 4+', '3 2- 4-', '4 3- 2+', '1 0+ 2-', '0 1+ 2-'], id='the hardest query first'),
    # Images 0 to 5 find two of their five matches, at both places. Images 6 and 7 find one match at two places.
    pytest.param((0, 1, 3, 7, 12, 18, 90, 91, 170, 95, 171), [*6 * [0], 1, 1, 1, 2, 2], 2, True,
                 ['8 10- 9-', '10 8- 9+', '9 7- 6-', '7 6+ 9-', '6 7+ 9-', '0 1+ 2+', '1 0+ 2+', '2 1+ 0+'],
                 id='a large class is not hard because few of its images are shown'),
    # The only match of 0 and of 1 is the nearest image. Images 2 and 4 find two matches, which are not the nearest.
    pytest.param((0, 1, 100, 102, 110, 119), [0, 0, 1, 2, 1, 1], 4, True,
                 ['2 3- 4+ 5+ 1-', '4 3- 5+ 2+ 1-', '5 4+ 3- 2+ 1-', '1 0+ 2- 3- 4-', '0 1+ 2- 3- 4-'],
                 id='a class of two images that find each other is not hard'),
    pytest.param([20 * (i // 2) + i % 2 for i in range(24)], [i // 2 for i in range(24)], 1, False,
                 ['0 1+', '3 2+', '6 7+', '9 8+', '13 12+', '16 17+', '19 18+', '23 22+'], id='all over the set'),
    # Images 2 and 3 are the only ones of their classes. --top may exceed the number of images.
    pytest.param((0, 80, 81, 180), [0, 0, 1, 2], 9, True, ['1 2- 0+ 3-', '0 1+ 2- 3-'], id='not without a match')])
def test_a_grid_shows_queries_and_their_nearest_images(tmp_path, degrees, labels, top, hardest, rows):
    queries, z = in_grey(range(len(labels)), labels), on_circle(*degrees)
    assert draw(tmp_path / 'x.png', queries, z, None, None, top, hardest) == rows


def test_a_grid_shows_the_queries_and_the_gallery_from_their_own_sets(tmp_path):
    queries, gallery = in_grey([50, 200], [0, 1]), in_grey([10, 20, 30], [1, 1, 0])
    shown = draw(tmp_path / 'x.png', queries, on_circle(0, 90), gallery, on_circle(80, 200, 5), 2, False)
    assert shown == ['50 30+ 10-', '200 10+ 30-']


def test_photos_are_compared_with_all_images_of_a_folder(run, small, tmp_path, capsys):
    """The gallery has the classes of the training set, too. A photo may be one of its images, or of another size."""
    make_folder(tmp_path / 'photos', 'abcd', per_class=3)
    run(train_ms, '--name', 'mine', '--data', 'photos', '--epochs', '0', '--image-size', '24', '--resize', '32')
    Image.open('photos/b/2.jpg').resize((90, 70)).save('other.png')
    photos = [str(tmp_path / 'photos/a/1.jpg'), 'other.png']
    flags = ['--checkpoint', 'runs/mine', '--query', *photos, '--top', '3', '--sheet', 'x.png', *EVAL]
    for flag in ['--analyse'], ['--embed', 'z.npz'], ['--hardest']:
        with pytest.raises(common.UsageError, match='--query finds images and evaluates nothing'):
            evaluation.main([*flags, *flag])
    found = evaluation.main(flags)['queries']
    model = common.load_checkpoint('runs/mine', precision='fp32')
    images = common.load_dataset('folder', 'photos', whole=True, transform=model.transform).query
    queries = common.embed(model, common.Images(photos, photos, transform=model.transform))
    s, index = (queries @ common.embed(model, images).T).topk(3)
    nearest = [[dict(similarity=pytest.approx(value, abs=1e-4), label=images.paths[i].split('/')[1],
                     path=images.paths[i]) for value, i in zip(*row)] for row in zip(s.tolist(), index.tolist())]
    assert found == [dict(query=photos[0], nearest=nearest[0]), dict(query=photos[1], nearest=nearest[1])]
    lines = [f'\n{one["similarity"]:9.3f}  {one["label"]}  {one["path"]}' for one in found[1]['nearest']]
    assert ''.join(['row 2    photo  other.png', *lines, '\n']) in capsys.readouterr().out
    grid = np.asarray(Image.open('x.png')).astype(int)
    assert grid.shape == (2 * (24 + 10) + 2, 4 * (24 + 10) + 2, 3) and (grid[4] == 255).all(), 'borders are white'
    assert (grid[6:30, 6:30] == grid[6:30, 40:64]).all(), 'the first row begins with the photo, and with its copy'


def test_an_output_never_replaces_an_input(run, small, tmp_path):
    run(train_ms, '--name', 'mine')
    make_folder(tmp_path / 'x', 'ab', per_class=2)
    Image.open('x/a/0.jpg').save('photo.png')
    Path('x/z-gallery.npz').touch()
    before = {path: path.read_bytes() for path in tmp_path.rglob('*.*')}
    for flags in ('--query photo.png --sheet photo.png', '--data x --sheet x/../x/a/1.jpg', '--data x --embed x/z.npz',
                  '--data x --sheet runs/mine/last.pt', '--data x --sheet runs/mine/log.jsonl'):
        with pytest.raises(common.UsageError, match='would replace .*, a file of the run or of the data'):
            evaluation.main(['--checkpoint', 'runs/mine', *flags.split(), *EVAL])
    assert {path: path.read_bytes() for path in tmp_path.rglob('*.*')} == before
    for _ in range(2):                                      # a grid in the folder of the run may be drawn again
        evaluation.main(['--checkpoint', 'runs/mine', '--sheet', 'runs/mine/grid.png', *EVAL])


def test_flags_reach_the_network_the_images_and_the_grid(run, small, folder, monkeypatch):
    run(train_ms, '--name', 'mine')
    used, embed, drawn = [], common.embed, []
    monkeypatch.setattr(common, 'embed', lambda model, images: (
        used.append((images.workers, model.precision)) or embed(model, images)))
    monkeypatch.setattr(evaluation, 'draw_queries', lambda *args: drawn.append(args[5:]))
    for flags in '--analyse --sheet x.png --top 1 --hardest', f'--query {folder}/test/car3/1.jpg':
        evaluation.main(f'--checkpoint runs/mine --device cpu --precision bf16 --workers 0 {flags}'.split())
    assert used == 4 * [(0, 'bf16')] and drawn == [(1, True)]   # test and training images; photo and gallery


def test_saved_embeddings_are_l2_normalized_and_those_of_a_gallery_have_a_file_of_their_own(run, small, tmp_path):
    """They are normalized even if the network is trained without normalization."""
    for part, classes, per_class in (('train', 'abcd', 3), ('query', 'mno', 2), ('gallery', 'nmop', 3)):
        make_folder(tmp_path / 'shop' / part, classes, per_class, seed=per_class)
    run(train_ccl, '--name', 'mine', '--loss', 'center_loss', '--data', 'shop')
    evaluation.main(['--checkpoint', 'runs/mine', '--embed', 'x.npz', *EVAL])
    model = common.load_checkpoint('runs/mine', precision='fp32')
    data = common.load_dataset('folder', 'shop', transform=model.transform)
    for file, images in ('x.npz', data.query), ('x-gallery.npz', data.gallery):
        saved, z = np.load(file), torch.nn.functional.normalize(common.embed(model, images), dim=1)
        np.testing.assert_allclose(saved['embeddings'], z, atol=1e-6)
        assert saved['paths'].tolist() == images.paths and saved['labels'].tolist() == images.labels.tolist()
        assert [Path(path).parent.name for path in saved['paths']] == saved['classes'][saved['labels']].tolist()
