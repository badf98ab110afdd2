"""eval.py: image grids of queries, searching a photo, and saved embeddings."""
import os
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import log_of, make_folder, on_circle
from PIL import Image

import common
import eval as evaluation
import train_ccl
import train_ms

EVAL = ['--device', 'cpu', '--precision', 'fp32']


# ---- image grids

def pixels_of(path):
    return np.asarray(Image.open(path)).astype(int)


def grid(path, degrees, labels, top, hardest):
    """draw_queries of one-coloured images at these angles -> pixels of the grid, and indices of the images in it"""
    pixels = [np.full((6, 6, 3), 10 * i, np.uint8) for i in range(len(labels))]
    images = common.Images(pixels, torch.tensor(labels), ['bird', 'car', 'bus', *'defghijkl'])
    model = SimpleNamespace(args=dict(resize=6, image_size=6))
    data = common.Splits('colours', query=images)
    evaluation.draw_queries(path, model, data, on_circle(*degrees), None, top, hardest=hardest)
    return pixels_of(path), (pixels_of(path)[8::16, 8::16, 0] // 10).tolist()


def test_image_grids_of_a_dataset(tmp_path):
    """Queries at 0, 5, 90, 100 and 170 degrees are shown with their two nearest images, in order or hardest first."""
    degrees, labels = (0, 5, 90, 100, 170), [0, 0, 1, 0, 1]
    _, shown = grid(tmp_path / 'all.png', degrees, labels, 2, hardest=False)
    assert shown == [[0, 1, 2], [1, 0, 2], [2, 3, 4], [3, 2, 4], [4, 3, 2]]
    # The nearest image of 2, 3 and 4 is a negative, 10, 10 and 70 degrees away; that of 0 and 1 is a positive.
    expected = [[2, 3, 4], [3, 2, 4], [4, 3, 2], [1, 0, 2], [0, 1, 2]]
    found, shown = grid(tmp_path / 'hard.png', degrees, labels, 2, hardest=True)
    assert shown == expected and found.shape == (5 * 16 + 2, 3 * 16 + 2, 3)
    tiles = found[2:, 2:].reshape(5, 16, 3, 16, 3).swapaxes(1, 2)           # each with the gap after it
    for row, column in np.ndindex(5, 3):
        query, image, tile = expected[row][0], expected[row][column], np.full((16, 16, 3), 255)
        if column:
            colour = evaluation.GREEN if labels[query] == labels[image] else evaluation.RED
            tile[:14, :14] = [round(255 * value) for value in colour]
        tile[4:10, 4:10] = 10 * image
        np.testing.assert_array_equal(tiles[row, column], tile)


def test_a_grid_shows_queries_from_their_own_set(tmp_path):
    queries, gallery = (common.Images([np.full((6, 6, 3), value, np.uint8) for value in values], values)
                        for values in ((0, 200), (10, 20, 30)))
    model = SimpleNamespace(args=dict(resize=6, image_size=6))
    evaluation.draw_grid(tmp_path / 'x.png', model, queries, gallery, [1], torch.tensor([[2, 0]]))
    assert pixels_of(tmp_path / 'x.png')[8::16, 8::16, 0].tolist() == [[200, 30, 10]]


def test_a_large_class_is_not_hard_because_few_of_its_images_are_shown(tmp_path):
    """Images 0 to 5 find two of their five matches, at both places. Images 6 and 7 find one match at two places."""
    degrees = (0, 1, 2, 3, 4, 5, 90, 91, 170, 95, 171)
    _, shown = grid(tmp_path / 'x.png', degrees, [*6 * [0], 1, 1, 1, 2, 2], 2, hardest=True)
    assert [tiles[0] for tiles in shown[2:]] == [9, 7, 6, 0, 1, 2]


def test_a_grid_has_queries_of_all_parts_of_the_dataset(tmp_path):
    """Eight of 24 queries, which are sorted by class, are shown at regular intervals."""
    _, shown = grid(tmp_path / 'x.png', range(0, 240, 10), [i // 2 for i in range(24)], 1, hardest=False)
    assert [tiles[0] for tiles in shown] == [0, 3, 6, 9, 13, 16, 19, 23]


def test_a_class_of_two_images_that_find_each_other_is_not_hard(tmp_path):
    """Images 0 and 1 have one match, the nearest. Image 5 has two among its four nearest, which are not the nearest."""
    _, shown = grid(tmp_path / 'x.png', (0, 1, 90, 91, 92, 178, 180, 181), [0, 0, 1, 1, 1, 1, 2, 2], 4, hardest=True)
    assert shown[0] == [5, 6, 7, 4, 3]


def test_queries_without_a_match_are_not_shown_as_failures(tmp_path):
    """Images 2 and 3 are the only ones of their classes. --top may exceed the number of images."""
    _, shown = grid(tmp_path / 'x.png', (0, 90, 91, 180), [0, 0, 1, 2], 9, hardest=True)
    assert sorted(tiles[0] for tiles in shown) == [0, 1] and [len(tiles) for tiles in shown] == [4, 4]


# ---- queries and saved embeddings

def test_a_photo_is_compared_with_all_images(tmp_path, monkeypatch, small, capsys):
    monkeypatch.chdir(tmp_path)
    make_folder(tmp_path / 'photos', 'abcd', per_class=3)
    train_ms.main('--dataset folder --data photos --epochs 0 --image-size 24 --resize 32 --device cpu --name mine'
                  .split())
    capsys.readouterr()
    photo = str(tmp_path / 'photos/a/1.jpg')                 # the folder was named by a relative path
    nearest = evaluation.main(['--checkpoint', 'runs/mine', '--query', photo, '--top', '3', *EVAL])['nearest']
    printed = capsys.readouterr().out
    model = common.load_checkpoint('runs/mine', precision='fp32')
    images = common.load_dataset('folder', 'photos', 32, 24, whole=True).query
    assert len(images) == 12, 'classes of the training set are in the gallery, too'
    z, place = common.embed(model, images), images.paths.index('photos/a/1.jpg')
    expected = (z @ z[place]).topk(3)
    assert expected.indices[0] == place, 'a photo of the gallery is its own first result'
    assert [result['path'] for result in nearest] == [images.paths[i] for i in expected.indices]
    assert [result['similarity'] for result in nearest] == pytest.approx(expected.values.tolist(), abs=1e-3)
    assert [result['label'] for result in nearest] == [result['path'].split('/')[1] for result in nearest]
    for result in nearest:
        assert f'{result["similarity"]:9.3f}  {result["label"]}  {result["path"]}\n' in printed
    assert sorted(os.listdir()) == ['photos', 'runs'] and sorted(os.listdir('runs/mine')) == ['last.pt', 'log.jsonl']


def test_a_photo_that_is_not_in_the_gallery(run, small, folder, tmp_path, capsys):
    """A query may have any size and shape."""
    run(train_ms, '--name', 'mine')
    Image.open(folder / 'test' / 'car1' / '2.jpg').resize((90, 70)).save(tmp_path / 'photo.png')
    flags = ['--checkpoint', 'runs/mine', '--query', 'photo.png', *EVAL]
    found = evaluation.main([*flags, '--top', '99', '--sheet', 'found.png'])['nearest']
    assert len({result['path'] for result in found}) == len(found) == 46 and (tmp_path / 'found.png').exists()
    shutil.copytree(folder / 'test', tmp_path / 'gallery')
    Image.open(folder / 'test' / 'car1' / '2.jpg').save(tmp_path / 'gallery' / 'car1' / 'query.png')
    data = ['--data', 'gallery', '--sheet', 'gallery/car1/query.png']
    for arguments in ([*flags, '--sheet', 'photo.png'], [*flags, *data], [*flags[:2], *EVAL, *data, '--whole']):
        with pytest.raises(common.UsageError, match='would replace .*, an input'):
            evaluation.main(arguments)
    (tmp_path / 'photo.png').write_text('not an image')
    with pytest.raises(common.UsageError, match='cannot read the image'):
        evaluation.main(flags)


def test_workers_reach_photos_searched_images_and_test_sets(run, small, folder, monkeypatch):
    run(train_ms, '--name', 'mine')
    used, embed = [], common.embed
    monkeypatch.setattr(common, 'embed', lambda model, images: used.append(images.workers) or embed(model, images))
    for query in ([], ['--query', str(folder / 'test/car3/1.jpg')]):
        evaluation.main(['--checkpoint', 'runs/mine', '--workers', '0', *query, *EVAL])
    assert used == [0, 0, 0]


def test_a_file_of_embeddings_is_searched_like_its_folder_and_only_photos_are_embedded(run, small, folder, monkeypatch):
    """Several photos have the same results as single ones."""
    run(train_ms, '--name', 'mine')
    flags = ['--checkpoint', 'runs/mine', *EVAL]
    evaluation.main([*flags, '--data', str(folder / 'test'), '--whole', '--embed', 'gallery.npz'])
    Image.open(folder / 'test/car1/2.jpg').resize((90, 70)).save('photo.png')
    photos = ['photo.png', str(folder / 'test/car3/1.jpg')]
    single = [evaluation.main([*flags, '--data', str(folder / 'test'), '--query', photo]) for photo in photos]
    embedded, embed = [], common.embed
    monkeypatch.setattr(common, 'embed', lambda model, images: embedded.append(len(images)) or embed(model, images))
    found = evaluation.main([*flags, '--data', 'gallery.npz', '--sheet', 'x.png', '--query', *photos])['queries']
    assert embedded == [2] and pixels_of('x.png').shape == (2 * (32 + 10) + 2, 6 * (32 + 10) + 2, 3)
    for one, other in zip(found, single, strict=True):
        assert one['query'] == other['query']
        for result, same in zip(one['nearest'], other['nearest'], strict=True):
            assert result == same | dict(similarity=pytest.approx(same['similarity'], abs=2e-4))


@pytest.mark.parametrize('change', [
    lambda saved: saved['embedder'].update(pool='avg'), lambda saved: saved['transform'].update(resize=40),
    lambda saved: saved['model']['linear.bias'].add_(0.1)])
def test_embeddings_of_another_network_are_rejected(run, small, change):
    """The network may differ in pooling, transform or weights. A file without the hash of its network is rejected,
    too."""
    run(train_ms, '--name', 'mine')
    evaluation.main(['--checkpoint', 'runs/mine', '--embed', 'x.npz', *EVAL])
    arrays = dict(np.load('x.npz'))
    flags = ['--query', arrays['paths'][0], *EVAL]
    assert len(evaluation.main(['--checkpoint', 'runs/mine', '--data', 'x.npz', *flags])['nearest']) == 5
    saved = common.read_checkpoint('runs/mine')
    change(saved)
    torch.save(saved, 'other.pt')
    del arrays['network']
    np.savez('y.npz', **arrays)
    for network, file in (('other.pt', 'x.npz'), ('runs/mine', 'y.npz')):
        with pytest.raises(common.UsageError, match=f'{file} has the embeddings of another network'):
            evaluation.main(['--checkpoint', network, '--data', file, *flags])


def test_a_network_trained_on_all_classes_searches_and_embeds_them(run, small, tmp_path, capsys):
    """If a folder has only train/, there is no test set. --whole evaluates the training classes with a warning."""
    make_folder(tmp_path / 'x/train', 'abc', per_class=4)
    record = run(train_ms, '--data', 'x', '--name', 'mine', '--epochs', '2', '--steps', '4')
    out = capsys.readouterr().out
    assert '12 training images of 3 classes, no test images, so nothing will be evaluated' in out
    assert 'All classes were trained on' in out and '--checkpoint runs/mine --query IMAGE' in out
    assert [(one['epoch'], one['loss'] is None) for one in log_of('mine')] == [(0, True), (1, False), (2, False)]
    assert record == log_of('mine')[-1] and 'R@1' not in record
    assert record['loss'] is not None and record['images_per_second'] > 0
    flags = ['--checkpoint', 'runs/mine', *EVAL]
    with pytest.raises(common.UsageError, match='x has no test set: --whole evaluates all its images'):
        evaluation.main(flags)
    assert len(evaluation.main([*flags, '--query', 'x/train/a/0.jpg', '--top', '99'])['nearest']) == 12
    assert 'R@1' in evaluation.main([*flags, '--whole', '--embed', 'x.npz'])
    assert '3 of the 3 classes to evaluate were in the training set' in capsys.readouterr().err
    assert np.load('x.npz')['embeddings'].shape == (12, 16)
    assert train_ms.main(['--resume', 'runs/mine', '--epochs', '5', '--steps', '10'])['epoch'] == 5


@pytest.mark.parametrize('flags, message', [
    ('--query x/pile/0.jpg --dataset shapes', '--query searches a folder of images, and not shapes: add --dataset'),
    ('--query x/pile/0.jpg --dataset vectors --data x', '--query searches a folder of images, and not vectors'),
    ('--data x/single --whole --sheet x.png', 'an image grid needs at least one image besides the query'),
    ('--sheet x.png', 'could not write x.png: '),
    ('--sheet runs/mine/last.pt', 'eval.py: argument --sheet: runs/mine/last.pt has to end in .png'),
    ('--embed x/pile/0.jpg', 'eval.py: argument --embed: x/pile/0.jpg has to end in .npz'),
    ('--top 3', '--top has no effect with no image grid')])
def test_mistakes_with_pictures(run, small, tmp_path, flags, message):
    run(train_ms, '--name', 'mine', '--epochs', '0')
    make_folder(tmp_path / 'x', ['pile'], per_class=2)
    make_folder(tmp_path / 'x', ['single'], per_class=1)
    (tmp_path / 'x.png').mkdir()
    with pytest.raises(common.UsageError, match=f'^{message}'):
        evaluation.main(['--checkpoint', 'runs/mine', *EVAL, *flags.split()])


def test_a_folder_without_classes_is_searched_and_embedded(run, small, tmp_path, capsys):
    """Images that are not in folders of classes can be a gallery. No metrics are computed, since there is one class."""
    run(train_ms, '--name', 'mine')
    make_folder(tmp_path / 'x', ['pile'], per_class=5)
    flags = ['--checkpoint', 'runs/mine', '--data', 'x/pile', *EVAL]
    found = evaluation.main([*flags, '--query', 'x/pile/0.jpg', '--top', '9'])['nearest']
    assert sorted(result['path'] for result in found) == [f'x/pile/{i}.jpg' for i in range(5)]
    assert evaluation.main([*flags, '--whole', '--embed', 'x.npz']) == dict(
        checkpoint='runs/mine', epoch=1, dataset='folder', data='x/pile')
    run(train_ms, '--name', 'other', '--seed', '1')
    with pytest.raises(common.UsageError, match='all test images have the same class, so there is nothing to measure'):
        evaluation.main(['--checkpoint', 'runs/mine', 'runs/other', *flags[2:], '--whole'])
    assert np.load('x.npz')['embeddings'].shape == (5, 16)
    assert 'all test images have the same class, so there is nothing to measure' in capsys.readouterr().err


def test_saved_embeddings_are_l2_normalized(run, small, folder):
    """They are normalized even if the network is trained without normalization."""
    run(train_ccl, '--name', 'mine', '--loss', 'center_loss')
    evaluation.main(['--checkpoint', 'runs/mine', '--embed', 'out.npz', *EVAL])
    saved, model = np.load('out.npz'), common.load_checkpoint('runs/mine', precision='fp32')
    z = common.embed(model, common.load_dataset('folder', folder, 32, 32).query)
    np.testing.assert_allclose(saved['embeddings'], torch.nn.functional.normalize(z, dim=1), atol=1e-6)
    assert [common.Path(path).parent.name for path in saved['paths']] == saved['classes'][saved['labels']].tolist()
    assert set(saved) == {'embeddings', 'labels', 'paths', 'classes', 'network'}
    assert common.Path(saved['paths'][5]).is_file()
