"""eval.py: tables over seeds and folds, comparisons, pictures, searching and saved embeddings."""
import json
import math
import shutil
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import draw_folder, on_circle, unit
from PIL import Image

import common
import eval as evaluation
import train_ccl
import train_contrastive
import train_ms

EVAL = ['--device', 'cpu', '--precision', 'fp32']


# ---- measures

@pytest.mark.parametrize('a, b, expected', [
    ([0, 0, 1, 1], [0, 0, 0, 1], 34.371),                   # in nats, 2 (0.6931 + 0.5623 - 1.0397) / (0.6931 + 0.5623)
    ([0, 0, 1, 1, 2], [2, 2, 0, 0, 1], 100),                # the same groups under other names
    ([0, 0, 1, 1], [0, 1, 0, 1], 0),                        # independent
    ([0, 0, 0], [0, 0, 0], 100),                            # one group each
    ([0, 3, 0, 3], [0, 1, 0, 1], 100)])                     # a number that no image has
def test_nmi_by_hand(a, b, expected):
    a, b = torch.tensor(a), torch.tensor(b)
    assert evaluation.normalized_mutual_information(a, b) == pytest.approx(expected, abs=1e-3)
    assert evaluation.normalized_mutual_information(b, a) == pytest.approx(expected, abs=1e-3)


def test_clusters_are_directions_whatever_the_length():
    pytest.importorskip('faiss')
    z = on_circle(0, 2, 120, 122, 240, 242).float() * torch.tensor([1., 9, 1, 9, 1, 9])[:, None]
    found = evaluation.clusters(z, 3).view(3, 2)
    assert (found[:, 0] == found[:, 1]).all() and found[:, 0].unique().numel() == 3


def cosine(degrees):
    return math.cos(math.radians(degrees))


def test_the_best_threshold_by_hand():
    """Positive pairs are 4, 10, 66 and 70 degrees apart, negative ones 20 to 100: it calls two of four the same."""
    threshold, accuracy = evaluation.best_threshold(on_circle(0, 10, 30, 34, 100), torch.tensor([0, 0, 1, 1, 1]))
    assert accuracy == 75 and cosine(20) < threshold <= cosine(10)


def test_the_threshold_with_a_gallery_is_about_pairs_of_a_query_and_an_image_of_it():
    """Matches are 10 degrees apart, others 80 or 100; the queries, all of different classes, are 90 degrees apart."""
    z, gallery = 9 * on_circle(0, 90), 9 * on_circle(10, 100, -80)      # of any length
    threshold, accuracy = evaluation.best_threshold(z, torch.tensor([0, 1]), gallery, torch.tensor([0, 1, 2]))
    assert accuracy == 100 and cosine(80) < threshold <= cosine(10)
    swapped = evaluation.best_threshold(z, torch.tensor([0, 1]), gallery, torch.tensor([1, 0, 2]))[1]
    assert swapped < 70, 'labels of the gallery count'


def test_the_threshold_of_thousands_of_images_is_by_all_their_pairs():
    """More than are compared at a time. The first 4,096 have two classes, the others a third one."""
    y = torch.cat([torch.arange(4096) % 2, torch.full((400,), 2)])
    threshold, accuracy = evaluation.best_threshold(on_circle(0, 70, 200)[y], y)
    assert accuracy == 100 and cosine(70) < threshold


# ---- means and intervals

def test_interval_by_hand(monkeypatch):
    """Mean 12, standard deviation 2; t with two degrees of freedom is 4.3027 at 97.5 %."""
    middle, half = evaluation.interval([10, 12, 14])
    assert middle == 12 and half == pytest.approx(4.3027 * 2 / math.sqrt(3), abs=1e-3)
    assert evaluation.interval([7.5]) == (7.5, None)
    monkeypatch.setitem(sys.modules, 'scipy.stats', None)
    with pytest.raises(common.UsageError, match='pip install scipy'):
        evaluation.interval([1, 2])


def test_concatenation_gives_each_network_the_same_weight():
    """Each part has unit length first, so a cosine of the whole is the mean of the cosines; the whole has, too."""
    a, b = unit(5, dim=4, seed=1), unit(5, dim=6, seed=2)
    z = evaluation.concatenate([100 * a, 0.01 * b])
    assert z.shape == (5, 10)
    torch.testing.assert_close(z.double() @ z.double().T, (a @ a.T + b @ b.T) / 2, atol=1e-6, rtol=0)


@pytest.fixture
def runs(run, small):
    """Two recipes, two seeds, two folds each, in runs/<recipe>-<seed>-<fold>"""
    for name, module, flags in (('ms', train_ms, ()), ('con', train_contrastive, ('--lr', '0.01'))):
        for seed in '01':
            for fold in '01':
                run(module, '--fold', f'{fold}/2', '--seed', seed, '--name', f'{name}-{seed}-{fold}',
                    '--precision', 'fp32', '--batch-size', '6', *flags)
    return lambda name: [f'runs/{name}-{seed}-{fold}' for seed in '01' for fold in '01']


def by_hand(name, folder, seed):
    """{setting: row} of the two folds of a recipe"""
    data = common.load_dataset('folder', folder, 32, 32, 'cache')
    parts = [common.embed(common.load_checkpoint(f'runs/{name}-{seed}-{fold}', precision='fp32'), data.query)
             for fold in '01']
    each = [common.retrieval_metrics(z, data.query.labels) for z in parts]
    z = torch.cat([torch.nn.functional.normalize(z, dim=1) for z in parts], dim=1)
    return {'separated (16-dim)': {key: (each[0][key] + each[1][key]) / 2 for key in each[0]},
            'concatenated (32-dim)': common.retrieval_metrics(z, data.query.labels)}


def test_the_table_over_seeds_and_folds_and_a_comparison_within_seeds(runs, folder, capsys):
    capsys.readouterr()
    result = evaluation.main(['--checkpoint', *reversed(runs('ms')), '--against', *runs('con'), *EVAL])
    out = capsys.readouterr().out
    assert json.loads(out.strip().split('\n')[-1]) == result and 'the mean over 2 seeds' in out
    ms, con = ([by_hand(name, folder, seed) for seed in '01'] for name in ('ms', 'con'))
    settings, shown = ['separated (16-dim)', 'concatenated (32-dim)'], iter(result['rows'])
    for recipe, table in ('ms', ms), ('contrastive', con), ('ms - contrastive', None):
        for setting in settings:
            row, name = next(shown), setting if table else setting.split()[0]
            assert (row['recipe'], row['setting'], row['seeds']) == (recipe, name, [0, 1])
            for key in ('R@1', 'RP', 'MAP@R'):
                first, second = ([seed[setting][key] for seed in table] if table else
                                 [a[setting][key] - b[setting][key] for a, b in zip(ms, con)])
                assert row[key]['mean'] == pytest.approx((first + second) / 2, abs=1e-4), (recipe, setting, key)
                assert row[key]['interval'] == pytest.approx(12.7062 * abs(first - second) / 2, abs=1e-3)
    row = result['rows'][1]['MAP@R']
    assert f'{row["mean"]:.2f} ± {row["interval"]:.2f}' in out


def test_where_and_how_a_network_computes_is_no_recipe(run, small):
    """Nor are seed and fold. Whatever else differs is one."""
    run(train_ms, '--name', 'x', '--freeze-bn')
    saved = common.read_checkpoint('runs/x')
    changes = [{}, dict(seed=1), dict(precision='bf16'), dict(chunk=4), dict(compile=True), dict(data='y'),
               dict(eval_every=3), dict(dim=8), dict(freeze_bn=False)]
    for i, change in enumerate(changes):
        torch.save(saved | dict(args=saved['args'] | change), f'{i}.pt')
    names = [run.recipe for run in evaluation.read_runs([common.Path(f'{i}.pt') for i in range(9)])]
    assert names == 7 * ['ms dim=16 freeze_bn=True'] + ['ms dim=8 freeze_bn=True', 'ms dim=16 freeze_bn=False']


def test_runs_that_are_no_seeds_of_one_recipe(runs, run, tmp_path, capsys):
    """Other classes or epochs; networks of two datasets; runs on all classes or of another n beside folds"""
    draw_folder(tmp_path / 'other' / 'train', 'mnop', per_class=4)
    draw_folder(tmp_path / 'other' / 'test', 'uvwx', per_class=4, seed=1)
    for name, flags in (('elsewhere', ['--data', str(tmp_path / 'other'), '--seed', '1']),
                        ('whole', []), ('third', ['--fold', '1/3'])):
        run(train_ms, '--name', name, '--precision', 'fp32', '--batch-size', '6', *flags)
    saved = common.read_checkpoint('runs/whole')
    torch.save(saved | dict(args=saved['args'] | dict(seed=2), epoch=0), 'stopped.pt')
    for other, message in (('runs/elsewhere', 'trained on different classes'), ('stopped.pt', 'different epochs')):
        with pytest.raises(common.UsageError, match=message):
            evaluation.main(['--checkpoint', 'runs/whole', other, '--data', str(tmp_path / 'other'), *EVAL])
    train_ms.main('--epochs 0 --image-size 17 --device cpu --name drawn'.split())
    with pytest.raises(common.UsageError, match='training was on folder and shapes: .* --dataset'):
        evaluation.main(['--checkpoint', 'runs/whole', 'runs/drawn', *EVAL])
    rows = evaluation.main(['--checkpoint', 'runs/ms-0-0', 'runs/whole', 'runs/third', *EVAL])['rows']
    assert [row['recipe'] for row in rows] == ['ms folds=2', 'ms folds=none', 'ms folds=3']
    assert {row['setting'] for row in rows} == {'one network (16-dim)'} and rows[0]['R@1']['interval'] is None
    assert 'one seed of each recipe, so there is no interval' in capsys.readouterr().out
    for flags, message in (
            ('ms-0-0 runs/ms-0-0', 'have the same recipe, seed and fold'),
            ('ms-0-0 runs/ms-0-1 runs/ms-1-0', 'different folds: seed 0 has fold 0/2, 1/2; seed 1 has fold'),
            ('ms-0-0 --against runs/ms-1-0', r'two recipes .* these are ms \('),
            ('ms-0-0 --against runs/con-1-0', r'ms \(seed 0 has fold 0/2\); contrastive \(seed 1 has fold 0/2\)'),
            ('ms-0-0 --against runs/con-0-1', 'the same seeds and folds')):
        with pytest.raises(common.UsageError, match=message):
            evaluation.main([*f'--checkpoint runs/{flags}'.split(), *EVAL])


def test_all_networks_of_a_table_see_the_same_classes(tmp_path, monkeypatch, small):
    """Of a flat folder, what any of them was trained or validated on is left out for all."""
    monkeypatch.chdir(tmp_path)
    draw_folder(tmp_path / 'all', 'abcdefgh', per_class=3)
    draw_folder(tmp_path / 'few', 'efgh', per_class=3)
    for data, beta in (('all', '50'), ('few', '40')):
        train_ms.main(['--dataset', 'folder', '--data', data, '--epochs', '0', '--image-size', '32', '--device', 'cpu',
                       '--beta', beta, '--name', data])
    loaded, real = [], common.load_dataset
    monkeypatch.setattr(common, 'load_dataset', lambda *a, **kw: loaded.append(kw['known']) or real(*a, **kw))
    with pytest.raises(common.UsageError, match='were in all and few: name the folder'):
        evaluation.main(['--checkpoint', 'runs/all', 'runs/few', *EVAL])
    evaluation.main(['--checkpoint', 'runs/all', 'runs/few', '--data', 'all', *EVAL])
    assert loaded == [set('abcdef')], 'opened once'


# ---- pictures

def picture(path):
    return np.asarray(Image.open(path)).astype(int)


def sheet(path, degrees, labels, top, hardest):
    """draw_queries of one-coloured images at these angles -> the picture, and the numbers of the images on it"""
    pixels = np.arange(len(labels), dtype=np.uint8).repeat(3 * 6 * 6) * 10
    images = common.Images(pixels, [(6, 6)] * len(labels), torch.tensor(labels), 6)
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
    assert len({row['path'] for row in found}) == len(found) == 16 and (tmp_path / 'found.png').exists()
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


def test_saved_embeddings_have_unit_length(run, small, folder):
    """Also where those of the training have not"""
    run(train_ccl, '--name', 'mine', '--variant', 'center_loss')
    evaluation.main(['--checkpoint', 'runs/mine', '--embed', 'out.npz', *EVAL])
    saved, model = np.load('out.npz'), common.load_checkpoint('runs/mine', precision='fp32')
    z = common.embed(model, common.load_dataset('folder', folder, 32, 32).query)
    np.testing.assert_allclose(saved['embeddings'], torch.nn.functional.normalize(z, dim=1), atol=1e-6)
    assert [common.Path(path).parent.name for path in saved['paths']] == saved['classes'][saved['labels']].tolist()
    assert set(saved) == {'embeddings', 'labels', 'paths', 'classes'} and common.Path(saved['paths'][5]).is_file()


def test_queries_and_a_gallery_by_two_folds(run, small, tmp_path):
    """Networks of two folds, joined: the queries are searched in the gallery, which is joined in the same way."""
    for part, classes, per_class in (('train', 'abcdefgh', 3), ('query', 'mno', 2), ('gallery', 'mnop', 3)):
        draw_folder(tmp_path / 'shop' / part, classes, per_class, seed=per_class)
    for fold in '01':
        run(train_ms, '--data', 'shop', '--fold', f'{fold}/2', '--name', fold, '--precision', 'fp32')
    rows = evaluation.main(['--checkpoint', 'runs/0', 'runs/1', *EVAL])['rows']
    data = common.load_dataset('folder', 'shop', 32, 32, known=())
    models = [common.load_checkpoint(f'runs/{fold}', precision='fp32') for fold in '01']
    z, gallery = (torch.cat([common.embed(model, part) for model in models], dim=1)
                  for part in (data.query, data.gallery))
    expected = common.retrieval_metrics(z, data.query.labels, gallery, data.gallery.labels)
    assert {key: rows[1][key]['mean'] for key in expected} == pytest.approx(expected)

    result = evaluation.main(['--checkpoint', 'runs/0', '--analyse', '--embed', 'x.npz', '--sheet', 'x.png', *EVAL])
    z, gallery = (common.embed(models[0], part) for part in (data.query, data.gallery))
    pairs = evaluation.best_threshold(z, data.query.labels, gallery, data.gallery.labels)
    assert (result['threshold'], result['balanced accuracy']) == pytest.approx(pairs)
    block = common.load_dataset('folder', 'shop', 32, 32, fold='0/2').train
    expected = evaluation.utilization(z, common.embed(models[0], block))
    assert result['utilization'] == pytest.approx(expected), 'by images that trained, and not by those that validated'
    saved = np.load('x.npz')
    assert saved['embeddings'].shape == (6, 16) and saved['gallery_embeddings'].shape == (12, 16)
    assert all('/gallery/' in path for path in saved['gallery_paths']) and '/query/' in saved['paths'][0]
    assert saved['gallery_labels'].tolist() == data.gallery.labels.tolist()
    assert picture('x.png').shape == (6 * (32 + 10) + 2, 6 * (32 + 10) + 2, 3)


def test_one_query_of_each_class(run, small, tmp_path):
    """There are no two queries of one class, so nothing is said of their similarity; the threshold is about matches."""
    for part, classes, per_class in (('train', 'tu', 4), ('query', 'xy', 1), ('gallery', 'xy', 3)):
        draw_folder(tmp_path / 'one' / part, classes, per_class, seed=per_class)
    row = run(train_ms, '--name', 'mine', '--data', 'one', '--batch-size', '4')
    assert 's+' not in row and -1 <= row['s-'] <= 1
    result = evaluation.main(['--checkpoint', 'runs/mine', '--analyse', *EVAL])
    assert not {'s+', 'alignment'} & result.keys() and -1 < result['threshold'] < 1
    (tmp_path / 'one/gallery/x').rename(tmp_path / 'one/gallery/v')
    (tmp_path / 'one/gallery/y').rename(tmp_path / 'one/gallery/z')
    result = evaluation.main(['--checkpoint', 'runs/mine', '--analyse', '--sheet', 'x.png', *EVAL])
    assert result['unmatched'] == 2 and not {'threshold', 'balanced accuracy'} & result.keys()
