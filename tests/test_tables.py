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


def test_nmi_against_its_definition():
    a, b = torch.tensor([0, 0, 0, 1, 1, 2]), torch.tensor([1, 1, 0, 0, 0, 0])

    def entropy(groups):
        shares = [groups.count(value) / len(groups) for value in set(groups)]
        return -sum(share * math.log(share) for share in shares)
    h_a, h_b, both = (entropy(x) for x in (a.tolist(), b.tolist(), list(zip(a.tolist(), b.tolist()))))
    expected = 200 * (h_a + h_b - both) / (h_a + h_b)
    assert evaluation.normalized_mutual_information(a, b) == pytest.approx(expected)
    assert evaluation.normalized_mutual_information(b, a) == pytest.approx(expected)
    assert 5 < expected < 95


@pytest.mark.parametrize('a, b, expected', [
    ([0, 0, 1, 1, 2], [2, 2, 0, 0, 1], 100),                # the same groups under other names
    ([0, 0, 1, 1], [0, 1, 0, 1], 0),                        # independent
    ([0, 0, 0], [0, 0, 0], 100),                            # one group each
    ([0, 3, 0, 3], [0, 1, 0, 1], 100)])                     # a number that no image has
def test_nmi_at_its_ends(a, b, expected):
    assert evaluation.normalized_mutual_information(torch.tensor(a), torch.tensor(b)) == pytest.approx(expected)


def test_clusters_are_directions_whatever_the_length():
    pytest.importorskip('faiss')
    z = on_circle(0, 2, 120, 122, 240, 242).float() * torch.tensor([1., 9, 1, 9, 1, 9])[:, None]
    assert len(set(evaluation.clusters(z, 3).view(3, 2).unbind())) == 3
    found = evaluation.clusters(z, 3).view(3, 2)
    assert (found[:, 0] == found[:, 1]).all() and found[:, 0].unique().numel() == 3


def test_the_best_threshold_by_trying_all():
    z, y = unit(30, dim=3, seed=3), torch.arange(30) % 3
    z = torch.nn.functional.normalize(z + 1.2 * torch.eye(3, dtype=z.dtype)[y], dim=1)
    s = z @ z.T
    i, j = (~torch.eye(30, dtype=torch.bool)).nonzero(as_tuple=True)
    same, s = y[i] == y[j], s[i, j]
    tried = [((s[same] >= t).double().mean() + (s[~same] < t).double().mean()).item() / 2
             for t in torch.linspace(-1, 1, 2001)[:-1]]
    threshold, accuracy = evaluation.best_threshold(z, y)
    assert accuracy == pytest.approx(100 * max(tried), abs=0.3) and 60 < accuracy < 99
    assert ((s[same] >= threshold).double().mean() + (s[~same] < threshold).double().mean()).item() * 50 == \
        pytest.approx(accuracy, abs=0.3)


def test_the_threshold_with_a_gallery_is_about_pairs_of_a_query_and_an_image_of_it():
    """Matches are 10 degrees apart, others 80 or 100; the queries, all of different classes, are 90 degrees apart."""
    z, gallery = on_circle(0, 90), on_circle(10, 100, -80)
    threshold, accuracy = evaluation.best_threshold(z, torch.tensor([0, 1]), gallery, torch.tensor([0, 1, 2]))
    assert accuracy == 100 and math.cos(math.radians(80)) < threshold <= math.cos(math.radians(10))
    swapped = evaluation.best_threshold(z, torch.tensor([0, 1]), gallery, torch.tensor([1, 0, 2]))[1]
    assert swapped < 70, 'labels of the gallery count'


def test_a_pair_at_the_threshold_is_the_same():
    """So the threshold is above all negative pairs, however near the two kinds are: 0 and 3 degrees apart."""
    z, y = on_circle(0, 0, 3, 3), torch.tensor([0, 0, 1, 1])
    threshold, accuracy = evaluation.best_threshold(z, y)
    assert math.cos(math.radians(3)) < threshold <= 1 and accuracy == 100


def test_the_threshold_of_thousands_of_images_is_by_all_their_pairs():
    """More than are compared at a time. The first 4,096 have two classes, the others a third one."""
    y = torch.cat([torch.arange(4096) % 2, torch.full((400,), 2)])
    threshold, accuracy = evaluation.best_threshold(on_circle(0, 70, 200)[y], y)
    assert accuracy == 100 and math.cos(math.radians(70)) < threshold


# ---- means and intervals


def test_interval_by_hand():
    """Mean 12, standard deviation 2; t with two degrees of freedom is 4.3027 at 97.5 %."""
    middle, half = evaluation.interval([10, 12, 14])
    assert middle == 12 and half == pytest.approx(4.3027 * 2 / math.sqrt(3), abs=1e-3)
    assert evaluation.interval([10, 14])[1] == pytest.approx(12.7062 * math.sqrt(8) / math.sqrt(2), abs=1e-3)
    assert evaluation.interval([7.5]) == (7.5, None)


def test_without_scipy_an_interval_says_what_to_install(monkeypatch):
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


def test_the_table_over_seeds_and_folds(runs, folder, capsys):
    capsys.readouterr()
    result = evaluation.main(['--checkpoint', *runs('ms'), *runs('con'), *EVAL])
    out = capsys.readouterr().out
    assert json.loads(out.strip().split('\n')[-1]) == result and 'the mean over 2 seeds' in out
    assert [(row['recipe'], row['setting']) for row in result['rows']] == [
        (name, setting) for name in ('ms', 'contrastive')
        for setting in ('separated (16-dim)', 'concatenated (32-dim)')]
    for row in result['rows']:
        name = {'ms': 'ms', 'contrastive': 'con'}[row['recipe']]
        expected = [by_hand(name, folder, seed)[row['setting']] for seed in '01']
        assert row['seeds'] == [0, 1]
        for key in ('R@1', 'RP', 'MAP@R'):
            values = [row[key] for row in expected]
            assert row[key]['mean'] == pytest.approx(sum(values) / 2, abs=1e-4), (row['recipe'], row['setting'], key)
            assert row[key]['interval'] == pytest.approx(12.7062 * abs(values[0] - values[1]) / 2, abs=1e-3)
    row = result['rows'][1]['MAP@R']
    assert f'{row["mean"]:.2f} ± {row["interval"]:.2f}' in out


def test_a_comparison_is_by_differences_within_a_seed(runs, folder, capsys):
    result = evaluation.main(['--checkpoint', *reversed(runs('ms')), '--against', *runs('con'), *EVAL])
    rows = {(row['recipe'], row['setting']): row for row in result['rows']}
    assert len(rows) == 6
    for setting, full in (('separated', 'separated (16-dim)'), ('concatenated', 'concatenated (32-dim)')):
        values = [by_hand('ms', folder, seed)[full]['MAP@R'] - by_hand('con', folder, seed)[full]['MAP@R']
                  for seed in '01']
        row = rows['ms - contrastive', setting]['MAP@R']
        assert row['mean'] == pytest.approx(sum(values) / 2, abs=1e-4)
        assert row['interval'] == pytest.approx(12.7062 * abs(values[0] - values[1]) / 2, abs=1e-3)


def test_single_networks_and_single_seeds(runs, capsys):
    """Networks without their other folds are a row each; recipes of one script are told apart by their flags."""
    result = evaluation.main(['--checkpoint', 'runs/ms-0-0', 'runs/con-0-0', *EVAL])
    out = capsys.readouterr().out
    assert 'one seed of each recipe, so there is no interval' in out
    assert [row['setting'] for row in result['rows']] == ['one network (16-dim)'] * 2
    assert result['rows'][0]['R@1']['interval'] is None
    data = common.read_checkpoint('runs/ms-0-0')['args']['data']
    train_ms.main([*'--dataset folder --epochs 0 --device cpu --image-size 32 --dim 16 --data'.split(),
                   data, *'--beta 20 --name other --fold 0/2'.split()])
    runs = evaluation.read_runs([common.Path('runs/ms-0-0'), common.Path('runs/other')])
    assert ' beta=50.0' in runs[0].recipe and ' beta=20.0' in runs[1].recipe and 'dim' not in runs[0].recipe


def test_where_and_how_a_network_computes_is_no_recipe(run, small):
    """Nor are seed and fold. Whatever else differs is one."""
    run(train_ms, '--name', 'x', '--freeze-bn')
    saved = common.read_checkpoint('runs/x')
    changes = [{}, dict(seed=1), dict(precision='bf16'), dict(chunk=4), dict(compile=True), dict(data='y'),
               dict(eval_every=3), dict(dim=8), dict(freeze_bn=False)]
    for i, change in enumerate(changes):
        torch.save(saved | dict(args=saved['args'] | change), f'{i}.pt')
    names = [run.recipe for run in evaluation.read_runs([common.Path(f'{i}.pt') for i in range(9)])]
    assert len(set(names[:7])) == 1 and len(set(names[6:])) == 3


NOT_TOGETHER = [
    ('--checkpoint runs/ms-0-0 runs/ms-0-0', 'have the same recipe, seed and fold'),
    ('--checkpoint runs/ms-0-0 runs/ms-0-1 runs/ms-1-0', 'different folds: seed 0 has fold 0/2, 1/2; seed 1 has fold'),
    ('--checkpoint runs/ms-0-0 --against runs/ms-1-0', r'two recipes .* these are ms \('),
    ('--checkpoint runs/ms-0-0 --against runs/con-1-0', r'ms \(seed 0 has fold 0/2\); contrastive \(seed 1 has fold'),
    ('--checkpoint runs/ms-0-0 --against runs/con-0-1', 'the same seeds and folds')]


def test_runs_that_do_not_go_together(runs):
    for flags, message in NOT_TOGETHER:
        with pytest.raises(common.UsageError, match=message):
            evaluation.main([*flags.split(), *EVAL])


def test_runs_that_are_no_seeds_of_one_recipe(runs, run, tmp_path):
    """Other classes under the same flags; networks of two datasets; runs on all classes or of another n beside folds"""
    draw_folder(tmp_path / 'other' / 'train', 'mnop', per_class=4)
    draw_folder(tmp_path / 'other' / 'test', 'uvwx', per_class=4, seed=1)
    for name, flags in (('elsewhere', ['--data', str(tmp_path / 'other'), '--seed', '1']),
                        ('whole', []), ('third', ['--fold', '1/3'])):
        run(train_ms, '--name', name, '--precision', 'fp32', '--batch-size', '6', *flags)
    with pytest.raises(common.UsageError, match='trained on different classes'):
        evaluation.main(['--checkpoint', 'runs/whole', 'runs/elsewhere', *EVAL])
    train_ms.main('--epochs 0 --image-size 17 --device cpu --name drawn'.split())
    with pytest.raises(common.UsageError, match='training was on folder and shapes: .* --dataset'):
        evaluation.main(['--checkpoint', 'runs/whole', 'runs/drawn', *EVAL])
    result = evaluation.main(['--checkpoint', 'runs/ms-0-0', 'runs/whole', 'runs/third', *EVAL])
    assert [row['recipe'] for row in result['rows']] == ['ms folds=2', 'ms folds=none', 'ms folds=3']


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
    evaluation.main(['--checkpoint', 'runs/all', 'runs/few', '--data', 'all', *EVAL])
    assert loaded == [set('abcdef')], 'opened once'


# ---- pictures


def picture(path):
    return np.asarray(Image.open(path)).astype(int)


def plain_images(colours, labels, side=6):
    """One-coloured images of side x side pixels"""
    pixels = np.concatenate([np.tile(np.uint8(colour), side * side) for colour in colours])
    return common.Images(pixels, [(side, side)] * len(colours), torch.tensor(labels), side,
                         [f'class {c}' for c in range(max(labels) + 1)])


def test_a_sheet_pixel_by_pixel(tmp_path):
    colours = [(10, 20, 30), (40, 50, 60), (70, 80, 90), (100, 110, 120)]
    images = plain_images(colours, [0, 0, 1, 1])
    index, hit = torch.tensor([[1, 2], [3, 0]]), torch.tensor([[True, False], [True, False]])
    evaluation.draw_sheet(tmp_path / 's.png', images, images, [0, 2], index, hit)
    found, border, gap = picture(tmp_path / 's.png'), evaluation.BORDER, 2
    tile = 6 + 2 * border
    assert found.shape == (2 * (tile + gap) + gap, 3 * (tile + gap) + gap, 3)
    expected = np.full_like(found, 255)
    for row, query in enumerate([0, 2]):
        for column, image in enumerate([query, *index[row].tolist()]):
            top, left = gap + row * (tile + gap), gap + column * (tile + gap)
            frame = (255, 255, 255) if column == 0 else (0, 160, 0) if hit[row, column - 1] else (220, 0, 0)
            expected[top:top + tile, left:left + tile] = frame
            expected[top + border:top + tile - border, left + border:left + tile - border] = colours[image]
    np.testing.assert_array_equal(found, expected)


def test_sheets_of_a_data_set(tmp_path):
    """Queries at 0, 5, 90, 100 and 170 degrees, each with its two nearest; in their order, and the hardest first."""
    images = plain_images([(40 * i,) * 3 for i in range(5)], [0, 0, 1, 0, 1])
    data = SimpleNamespace(query=images, gallery=images)
    z, border = on_circle(0, 5, 90, 100, 170), evaluation.BORDER
    evaluation.draw_queries(tmp_path / 'all.png', data, z, None, 2, hardest=False)
    evaluation.draw_queries(tmp_path / 'hard.png', data, z, None, 2, hardest=True)

    def shown(name):
        side = 6 + 2 * border + 2
        return (picture(tmp_path / name)[2 + border::side, 2 + border::side, 0] // 40)[:5, :3].tolist()
    assert shown('all.png') == [[0, 1, 2], [1, 0, 2], [2, 3, 4], [3, 2, 4], [4, 3, 2]]
    # Borders: the second column is the nearest image, the third the next one.
    colours = picture(tmp_path / 'hard.png')[2::6 + 2 * border + 2, 2::6 + 2 * border + 2][:5, 1:3, 0].tolist()
    assert colours == [[220, 220], [220, 0], [220, 0], [0, 220], [0, 220]]
    # 3 has no match. The others have one, and their mistakes are at 10, 70, 85 and 90 degrees.
    assert shown('hard.png') == [[3, 2, 4], [2, 3, 4], [4, 3, 2], [1, 0, 2], [0, 1, 2]]


def test_a_sheet_goes_through_all_classes(tmp_path):
    """Of 24 queries in the order of their classes, eight at equal distances"""
    images = plain_images([(10 * i,) * 3 for i in range(24)], [i // 2 for i in range(24)])
    data = SimpleNamespace(query=images, gallery=images)
    evaluation.draw_queries(tmp_path / 'x.png', data, on_circle(*range(0, 240, 10)), None, 1, hardest=False)
    side = 6 + 2 * evaluation.BORDER + 2
    shown = picture(tmp_path / 'x.png')[2 + evaluation.BORDER::side, 2 + evaluation.BORDER, 0] // 10
    assert shown[:8].tolist() == [0, 3, 6, 9, 13, 16, 19, 23]


def test_queries_that_nothing_can_match_are_no_failures(tmp_path):
    images = plain_images([(40 * i,) * 3 for i in range(4)], [0, 0, 1, 2])
    z = on_circle(0, 90, 91, 180)
    evaluation.draw_queries(tmp_path / 'x.png', SimpleNamespace(query=images, gallery=images), z, None, 9, hardest=True)
    side = 6 + 2 * evaluation.BORDER + 2
    shown = picture(tmp_path / 'x.png')
    assert shown.shape == (2 * side + 2, 4 * side + 2, 3), 'images 2 and 3 are alone in their classes'
    assert sorted((shown[2 + evaluation.BORDER::side, 2 + evaluation.BORDER, 0] // 40)[:2].tolist()) == [0, 1]


# ---- one's own images


def test_a_photo_is_searched_in_all_images_but_itself(tmp_path, monkeypatch, small, capsys):
    monkeypatch.chdir(tmp_path)
    draw_folder(tmp_path / 'birds', 'abcd', per_class=3)
    train_ms.main('--dataset folder --data birds --epochs 0 --image-size 24 --resize 32 --device cpu --name mine'
                  .split())
    capsys.readouterr()
    photo = str(tmp_path / 'birds/a/1.jpg')                 # the folder was named by a relative path
    result = evaluation.main(['--checkpoint', 'runs/mine', '--query', photo, '--top', '3', *EVAL])
    out = capsys.readouterr().out
    model = common.load_checkpoint('runs/mine', precision='fp32')
    data = common.load_dataset('folder', 'birds', 32, 24, known=())
    assert len(data.query) == 12, 'classes of the training set are searched, too'
    z = common.embed(model, data.query)
    place = data.query.paths.tolist().index('birds/a/1.jpg')
    s = z @ z[place]
    s[place] = -2
    expected = s.topk(3)
    assert [row['path'] for row in result['nearest']] == data.query.paths[expected.indices].tolist()
    assert [row['similarity'] for row in result['nearest']] == pytest.approx(expected.values.tolist(), abs=1e-3)
    assert [row['label'] for row in result['nearest']] == [row['path'].split('/')[1] for row in result['nearest']]
    assert out.count('birds/') >= 3 and picture('runs/mine/query.png').shape == (24 + 12, 4 * (24 + 10) + 2, 3)


def test_a_photo_from_elsewhere(run, small, folder, tmp_path, capsys):
    """Of another size and shape; it is not one of the images, so all of them may be found."""
    run(train_ms, '--name', 'mine')
    Image.open(folder / 'test' / 'car1' / '2.jpg').resize((90, 70)).save(tmp_path / 'photo.png')
    flags = ['--checkpoint', 'runs/mine', '--query', str(tmp_path / 'photo.png'), '--sheet', 'found.png', *EVAL]
    result = evaluation.main([*flags, '--top', '99'])
    assert len(result['nearest']) == 16 and (tmp_path / 'found.png').exists()
    assert len({row['path'] for row in result['nearest']}) == 16
    with pytest.raises(common.UsageError, match='would replace the photo'):
        evaluation.main([*flags[:4], '--sheet', str(tmp_path / 'photo.png'), *EVAL])
    assert Image.open(tmp_path / 'photo.png').size == (90, 70)
    shutil.copytree(folder / 'test', tmp_path / 'gallery')
    Image.open(folder / 'test' / 'car1' / '2.jpg').save(tmp_path / 'gallery' / 'car1' / 'query.png')
    for searched in (flags[:4], flags[:2]):
        with pytest.raises(common.UsageError, match='would replace the photo'):
            evaluation.main([*searched, '--data', 'gallery', '--sheet', 'gallery/car1/query.png', *EVAL])
    (tmp_path / 'photo.png').write_text('no picture')
    with pytest.raises(common.UsageError, match='cannot read the image'):
        evaluation.main(flags)


@pytest.mark.parametrize('module, flags', [(train_ms, ''), (train_ccl, '--variant center_loss')])
def test_saved_embeddings_have_unit_length(run, small, folder, module, flags):
    """Also where those of the training have not"""
    run(module, '--name', 'mine', *flags.split())
    evaluation.main(['--checkpoint', 'runs/mine', '--embed', 'out.npz', *EVAL])
    saved = np.load('out.npz')
    model = common.load_checkpoint('runs/mine', precision='fp32')
    data = common.load_dataset('folder', folder, 32, 32)
    z = torch.nn.functional.normalize(common.embed(model, data.query), dim=1)
    np.testing.assert_allclose(saved['embeddings'], z.numpy(), atol=1e-6)
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
    result = evaluation.main(['--checkpoint', 'runs/0', '--analyse', *EVAL])
    z, gallery = (common.embed(models[0], part) for part in (data.query, data.gallery))
    pairs = evaluation.best_threshold(z, data.query.labels, gallery, data.gallery.labels)
    assert (result['threshold'], result['balanced accuracy']) == pytest.approx(pairs)
    block = common.load_dataset('folder', 'shop', 32, 32, fold='0/2').train
    expected = evaluation.utilization(z, common.embed(models[0], block))
    assert result['utilization'] == pytest.approx(expected), 'by images that trained, and not by those that validated'


def test_one_query_of_each_class(run, small, tmp_path, capsys):
    """There are no two queries of one class, so nothing is said of their similarity; the threshold is about matches."""
    run(train_ms, '--name', 'mine')
    for part, seed, per_class in (('train', 0, 4), ('query', 1, 1), ('gallery', 2, 3)):
        draw_folder(tmp_path / 'one' / part, ['x', 'y'] if part != 'train' else ['t', 'u'], per_class, seed=seed)
    row = run(train_ms, '--name', 'other', '--data', 'one', '--batch-size', '4')
    assert 's+' not in row and -1 <= row['s-'] <= 1
    result = evaluation.main(['--checkpoint', 'runs/other', '--analyse', *EVAL])
    assert not {'s+', 'alignment'} & result.keys()
    assert -1 < result['threshold'] < 1
    shutil.rmtree(tmp_path / 'one' / 'gallery' / 'x')
    shutil.rmtree(tmp_path / 'one' / 'query' / 'y')
    draw_folder(tmp_path / 'one' / 'query', ['z'], 1)
    result = evaluation.main(['--checkpoint', 'runs/other', '--analyse', *EVAL])
    assert result['unmatched'] == 2 and not {'threshold', 'balanced accuracy'} & result.keys()


def test_saved_embeddings_of_a_gallery(run, small, tmp_path):
    run(train_ms, '--name', 'mine')
    for part, seed in (('train', 0), ('query', 1), ('gallery', 2)):
        draw_folder(tmp_path / 'three' / part, ['x', 'y'] if part != 'train' else ['t', 'u'], 2 + seed, seed=seed)
    evaluation.main(['--checkpoint', 'runs/mine', '--data', 'three', '--embed', 'out.npz', *EVAL, '--sheet', 's.png',
                     '--top', '3'])
    assert picture('s.png').shape == (6 * (32 + 10) + 2, 4 * (32 + 10) + 2, 3)
    saved = np.load('out.npz')
    assert saved['embeddings'].shape == (6, 16) and saved['gallery_embeddings'].shape == (8, 16)
    assert all('/gallery/' in path for path in saved['gallery_paths']) and '/query/' in saved['paths'][0]
    assert saved['gallery_labels'].tolist() == [0] * 4 + [1] * 4
