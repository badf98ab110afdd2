"""eval.py: sheets of queries, searching a photo, and saved embeddings."""
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import draw_folder, on_circle, rows_of
from PIL import Image

import common
import eval as evaluation
import train_ccl
import train_metrix
import train_ms

EVAL = ['--device', 'cpu', '--precision', 'fp32']


# ---- sheets

def picture(path):
    return np.asarray(Image.open(path)).astype(int)


def sheet(path, degrees, labels, top, hardest):
    """draw_queries of one-coloured images at these angles -> the picture, and the numbers of the images on it"""
    pixels = [np.full((6, 6, 3), 10 * i, np.uint8) for i in range(len(labels))]
    images = common.Images(pixels, torch.tensor(labels), 6, ['bird', 'car', 'bus', *'defghijkl'])
    data = SimpleNamespace(query=images, gallery=images)
    evaluation.draw_queries(path, data, on_circle(*degrees), None, top, hardest=hardest)
    return picture(path), (picture(path)[8::16, 8::16, 0] // 10).tolist()


def test_sheets_of_a_data_set(tmp_path):
    """Queries at 0, 5, 90, 100 and 170 degrees, each with its two nearest; in their order, and the hardest first."""
    degrees, labels = (0, 5, 90, 100, 170), [0, 0, 1, 0, 1]
    _, shown = sheet(tmp_path / 'all.png', degrees, labels, 2, hardest=False)
    assert shown == [[0, 1, 2], [1, 0, 2], [2, 3, 4], [3, 2, 4], [4, 3, 2]]
    # 3 has no match. The others have one, and their mistakes are at 10, 70, 85 and 90 degrees.
    expected = [[3, 2, 4], [2, 3, 4], [4, 3, 2], [1, 0, 2], [0, 1, 2]]
    found, shown = sheet(tmp_path / 'hard.png', degrees, labels, 2, hardest=True)
    assert shown == expected and found.shape == (5 * 16 + 2, 3 * 16 + 2, 3)
    tiles = found[2:, 2:].reshape(5, 16, 3, 16, 3).swapaxes(1, 2)           # each with the gap behind it
    for row, column in np.ndindex(5, 3):
        query, image, tile = expected[row][0], expected[row][column], np.full((16, 16, 3), 255)
        if column:
            tile[:14, :14] = (0, 160, 0) if labels[query] == labels[image] else (220, 0, 0)
        tile[4:10, 4:10] = 10 * image
        np.testing.assert_array_equal(tiles[row, column], tile)


def test_a_sheet_says_which_files_it_shows(tmp_path, capsys):
    """Row, class and path of each query; then similarity, class and path of each of its neighbours."""
    sheet(tmp_path / 'x.png', (0, 5, 90), [0, 0, 1], 2, hardest=False)
    assert capsys.readouterr().out.splitlines() == [
        'row 1    bird  image 0', '    0.996  bird  image 1', '    0.000  car  image 2',
        'row 2    bird  image 1', '    0.996  bird  image 0', '    0.087  car  image 2',
        f'2 queries and their nearest images: {tmp_path / "x.png"}']


def test_a_sheet_goes_through_all_classes(tmp_path):
    """Of 24 queries in the order of their classes, eight at equal distances"""
    _, shown = sheet(tmp_path / 'x.png', range(0, 240, 10), [i // 2 for i in range(24)], 1, hardest=False)
    assert [row[0] for row in shown] == [0, 3, 6, 9, 13, 16, 19, 23]


def test_queries_that_nothing_can_match_are_no_failures(tmp_path):
    """Images 2 and 3 are alone in their classes. --top may be more than there are."""
    _, shown = sheet(tmp_path / 'x.png', (0, 90, 91, 180), [0, 0, 1, 2], 9, hardest=True)
    assert sorted(row[0] for row in shown) == [0, 1] and [len(row) for row in shown] == [4, 4]


# ---- one's own images

def test_a_photo_is_searched_in_all_images_but_itself(tmp_path, monkeypatch, small, capsys):
    monkeypatch.chdir(tmp_path)
    draw_folder(tmp_path / 'birds', 'abcd', per_class=3)
    train_ms.main('--dataset folder --data birds --epochs 0 --image-size 24 --resize 32 --device cpu --name mine'
                  .split())
    capsys.readouterr()
    photo = str(tmp_path / 'birds/a/1.jpg')                 # the folder was named by a relative path
    nearest = evaluation.main(['--checkpoint', 'runs/mine', '--query', photo, '--top', '3', *EVAL])['nearest']
    model = common.load_checkpoint('runs/mine', precision='fp32')
    data = common.load_dataset('folder', 'birds', 32, 24, known=())
    assert len(data.query) == 12, 'classes of the training set are searched, too'
    z, place = common.embed(model, data.query), data.query.paths.tolist().index('birds/a/1.jpg')
    s = z @ z[place]
    s[place] = -2
    expected = s.topk(3)
    assert [row['path'] for row in nearest] == data.query.paths[expected.indices].tolist()
    assert [row['similarity'] for row in nearest] == pytest.approx(expected.values.tolist(), abs=1e-3)
    assert [row['label'] for row in nearest] == [row['path'].split('/')[1] for row in nearest]
    out = capsys.readouterr().out
    assert out.count('birds/') >= 3 and picture('runs/mine/query.png').shape == (24 + 12, 4 * (24 + 10) + 2, 3)


def test_a_photo_from_elsewhere(run, small, folder, tmp_path, capsys):
    """Of another size and shape; it is not one of the images, so all of them may be found."""
    run(train_ms, '--name', 'mine')
    Image.open(folder / 'test' / 'car1' / '2.jpg').resize((90, 70)).save(tmp_path / 'photo.png')
    flags = ['--checkpoint', 'runs/mine', '--query', 'photo.png', *EVAL]
    found = evaluation.main([*flags, '--top', '99', '--sheet', 'found.png'])['nearest']
    assert len({row['path'] for row in found}) == len(found) == 46 and (tmp_path / 'found.png').exists()
    shutil.copytree(folder / 'test', tmp_path / 'gallery')
    Image.open(folder / 'test' / 'car1' / '2.jpg').save(tmp_path / 'gallery' / 'car1' / 'query.png')
    data = ['--data', 'gallery', '--sheet', 'gallery/car1/query.png']
    for arguments in ([*flags, '--sheet', 'photo.png'], [*flags, *data], [*flags[:2], *EVAL, *data]):
        with pytest.raises(common.UsageError, match='would replace the photo'):
            evaluation.main(arguments)
    (tmp_path / 'one' / 'all').mkdir(parents=True)
    shutil.copy('photo.png', 'one/all/only.png')            # a collection need not be sorted into classes
    assert len(evaluation.main([*flags, '--data', 'one'])['nearest']) == 1
    with pytest.raises(common.UsageError, match='nothing to search in'):
        evaluation.main([*flags[:2], '--query', 'one/all/only.png', *EVAL, '--data', 'one'])
    (tmp_path / 'photo.png').write_text('no picture')
    with pytest.raises(common.UsageError, match='cannot read the image'):
        evaluation.main(flags)


def test_a_second_search_embeds_the_photos_alone(run, small, folder, tmp_path, monkeypatch):
    """Several photos at once, each found as if alone; images are embedded anew after the network or a file changed."""
    run(train_ms, '--name', 'mine')
    embedded = []
    embed = common.embed
    monkeypatch.setattr(common, 'embed', lambda model, images: embedded.append(len(images)) or embed(model, images))
    shutil.copytree(folder / 'test', 'gallery')
    Image.open('gallery/car1/2.jpg').resize((90, 70)).save('photo.png')
    photos = ['photo.png', 'gallery/car0/0.jpg', str(folder / 'test/car3/1.jpg')]
    flags = ['--checkpoint', 'runs/mine', '--data', 'gallery', *EVAL]
    single = [evaluation.main([*flags, '--query', photo]) for photo in photos]
    assert sorted(embedded) == [1, 1, 1, 8, 8], 'the images of the folder once, in the parts that a training decodes'
    assert single[1]['nearest'][0]['path'] != photos[1] and single[2]['nearest'][0]['path'] == 'gallery/car3/1.jpg'
    assert evaluation.main([*flags, '--query', *photos]) == dict(queries=single)
    assert embedded.pop() == 3 and picture('runs/mine/query.png').shape == (3 * (32 + 10) + 2, 6 * (32 + 10) + 2, 3)
    saved = common.read_file('runs/mine/last.pt')
    saved['model']['linear.weight'] *= torch.linspace(1, 2, 64)
    torch.save(saved, 'runs/mine/last.pt')
    for change, anew in ((lambda: None, [3, 8, 8]),
                         (lambda: Image.open('photo.png').save('gallery/car2/3.jpg'), [3, 8])):      # of one part
        change()
        embedded.clear()
        other = evaluation.main([*flags, '--query', *photos])['queries']
        assert sorted(embedded) == anew
        model = common.load_checkpoint('runs/mine', precision='fp32')
        data = common.load_dataset('folder', 'gallery', 32, 32, known=())
        s = embed(model, data.query) @ model(model.transform(Image.open(photos[2]))[None])[0]
        assert [row['similarity'] for row in other[2]['nearest']] == pytest.approx(s.topk(5).values.tolist(), abs=1e-3)
        assert other[2] != single[2]
    for file in (tmp_path / 'cache').glob('*.npy'):
        file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(common.UsageError, match='npy cannot be used; is it damaged'):
        evaluation.main([*flags, '--query', *photos])


@pytest.mark.parametrize('change', [
    lambda model, images: setattr(images, 'image_size', 20), lambda model, images: setattr(model, 'precision', 'bf16'),
    lambda model, images: model.linear.bias.data.add_(0.1)])
def test_kept_embeddings_are_those_of_this_crop_precision_and_network(small, folder, tmp_path, monkeypatch, change):
    model = common.Embedder('resnet18', 8, weights='none')
    images = common.load_dataset('folder', folder, 32, 32, tmp_path / 'cache').query
    first = evaluation.embed_once(model, images)
    monkeypatch.setattr(common, 'embed', None)                           # it is not asked again
    assert torch.equal(evaluation.embed_once(model, images), first)
    monkeypatch.setattr(common, 'embed', lambda *_: first + 1)
    change(model, images)
    assert torch.equal(evaluation.embed_once(model, images), first + 1)


def test_a_photo_is_searched_in_the_whole_folder_or_in_its_gallery(run, small, folder, tmp_path, capsys):
    run(train_ms, '--name', 'mine')
    photo = str(folder / 'train/bird0/0.jpg')
    flags = ['--checkpoint', 'runs/mine', '--query', photo, '--top', '99', *EVAL]
    assert len(evaluation.main(flags)['nearest']) == 45 and 'searched are all 46 images' in capsys.readouterr().out
    for name in ('query', 'gallery'):
        shutil.copytree(folder / 'test', tmp_path / 'shop' / name)
    shutil.copytree(folder / 'train', tmp_path / 'shop/train')
    assert len(evaluation.main([*flags, '--data', 'shop'])['nearest']) == 16
    assert f'searched are all 16 images of {"shop/gallery"}' in capsys.readouterr().out


@pytest.mark.parametrize('name, message', [
    ('https://example.org/a.jpg', 'is on the web'), ('photos', 'is a folder'), ('typo.jpg', 'there is no file')])
def test_what_is_no_photo_has_a_sentence_of_its_own(tmp_path, name, message):
    (tmp_path / 'photos').mkdir()
    path = Path(name) if ':' in name else tmp_path / name
    with pytest.raises(common.UsageError, match=message):
        evaluation.read_photos([path], 32, 32)


def test_a_photo_that_cannot_be_read_costs_no_decoding(run, small, folder, tmp_path):
    run(train_ms, '--name', 'mine')
    with pytest.raises(common.UsageError, match='there is no file typo.jpg'):
        evaluation.main(['--checkpoint', 'runs/mine', '--query', str(folder / 'test/car0/0.jpg'), 'typo.jpg',
                         '--cache', 'other', *EVAL])
    assert not (tmp_path / 'other').exists()


def test_a_final_network_searches_and_embeds_what_it_was_trained_on(run, small, tmp_path, capsys):
    """train/ alone: all classes train, and none is left to evaluate, neither then nor by eval.py."""
    draw_folder(tmp_path / 'x/train', 'abc', per_class=4)
    row = run(train_ms, '--data', 'x', '--name', 'mine', '--precision', 'fp32', '--epochs', '2', '--steps', '4')
    out = capsys.readouterr().out
    assert '12 training images of 3 classes, no test images, so nothing will be evaluated' in out
    assert 'All classes were trained on' in out and '--checkpoint runs/mine/last.pt --query PHOTO' in out
    assert [(one['epoch'], one['loss'] is None) for one in rows_of('mine')] == [(0, True), (1, False), (2, False)]
    assert row == rows_of('mine')[-1] and row['loss'] is not None and row['images_per_second'] > 0 and 'R@1' not in row
    flags = ['--checkpoint', 'runs/mine', *EVAL]
    with pytest.raises(common.UsageError, match='all its classes were in the training set'):
        evaluation.main(flags)
    assert len(evaluation.main([*flags, '--query', 'x/train/a/0.jpg', '--top', '99'])['nearest']) == 11
    assert evaluation.main([*flags, '--embed', 'x.npz'])['seen'] is True
    assert 'all 3 classes to evaluate were in the training set' in capsys.readouterr().err
    assert np.load('x.npz')['embeddings'].shape == (12, 16)
    draw_folder(tmp_path / 'y', 'ad', per_class=3)
    assert 'seen' not in evaluation.main([*flags, '--data', 'y', '--embed', 'y.npz'])
    assert train_ms.main(['--resume', 'runs/mine', '--epochs', '5', '--steps', '10'])['epoch'] == 5
    run(train_metrix, '--data', 'x', '--name', 'mixed', '--steps', '1')
    train_metrix.main(['--analyse', 'runs/mixed'])
    assert 'Eq. (25)' in capsys.readouterr().out


def test_a_pile_of_photographs_is_searched_and_embedded(run, small, tmp_path, capsys):
    """Images in no folders; nothing is measured, since they have no classes. A sheet beside the classes is no image."""
    run(train_ms, '--name', 'mine', '--precision', 'fp32')
    draw_folder(tmp_path / 'x', ['pile'], per_class=5)
    (tmp_path / 'x/pile/notes.txt').touch()
    flags = ['--checkpoint', 'runs/mine', '--data', 'x/pile', *EVAL]
    found = evaluation.main([*flags, '--query', 'x/pile/0.jpg', '--top', '9'])['nearest']
    assert sorted(row['path'] for row in found) == [f'x/pile/{i}.jpg' for i in range(1, 5)]
    assert evaluation.main([*flags, '--embed', 'x.npz']) == dict(checkpoint='runs/mine', dataset='folder')
    saved = np.load('x.npz')
    assert saved['embeddings'].shape == (5, 16) and saved['classes'].tolist() == ['']
    for more, reason in ([], 'the test set needs 2 classes or more, and has 1'), (['--embed', 'y.npz', '--analyse'], (
            '--analyse has no effect with x/pile, which has fewer than two classes')):
        with pytest.raises(common.UsageError, match=reason):
            evaluation.main([*flags, *more])
    draw_folder(tmp_path / 'x/pile', ['a', 'b'], per_class=2, seed=1)
    evaluation.main([*flags, '--embed', 'x.npz'])
    assert np.load('x.npz')['classes'].tolist() == ['a', 'b'], 'beside classes, images are none'


def test_saved_embeddings_have_unit_length(run, small, folder):
    """Also where those of the training have not"""
    run(train_ccl, '--name', 'mine', '--variant', 'center_loss')
    evaluation.main(['--checkpoint', 'runs/mine', '--embed', 'out.npz', *EVAL])
    saved, model = np.load('out.npz'), common.load_checkpoint('runs/mine', precision='fp32')
    z = common.embed(model, common.load_dataset('folder', folder, 32, 32).query)
    np.testing.assert_allclose(saved['embeddings'], torch.nn.functional.normalize(z, dim=1), atol=1e-6)
    assert [common.Path(path).parent.name for path in saved['paths']] == saved['classes'][saved['labels']].tolist()
    assert set(saved) == {'embeddings', 'labels', 'paths', 'classes'} and common.Path(saved['paths'][5]).is_file()
