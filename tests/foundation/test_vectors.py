"""--dataset vectors: the features of any network, from NPZ files, through a head alone."""
import json
import os
import shutil

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import draw_folder, rows_of
from torch import nn

import common
import eval as evaluation
import train_ccl
import train_contrastive
import train_hse
import train_metrix
import train_ms
import train_proxy_anchor
import train_proxynca_pp
from common import UsageError

FLAGS = '--dataset vectors --device cpu --batch-size 8 --per-class 2'.split()


def write(path, classes, labels, c=6, seed=0, **more):
    """An NPZ file of vectors around a centre for each class, of lengths around 4, in the order of `labels`"""
    path.parent.mkdir(exist_ok=True)
    random = np.random.default_rng(seed)
    centres = random.normal(size=(len(classes), c)) + 1
    vectors = centres[labels] + random.normal(size=(len(labels), c))
    arrays = dict(embeddings=vectors.astype(np.float32), labels=np.array(labels), classes=np.array(list(classes)))
    np.savez(path, **arrays, **more)
    return arrays['embeddings']


@pytest.fixture
def vectors(tmp_path, monkeypatch):
    """A folder v with train.npz and test.npz, 6 and 4 classes of 5 vectors in no order"""
    monkeypatch.chdir(tmp_path)
    write(tmp_path / 'v/train.npz', 'abcdef', [5, 0, 1, 3, 2, 4] * 5)
    write(tmp_path / 'v/test.npz', 'ghij', [2, 0, 3, 1] * 5, seed=1)
    return tmp_path / 'v'


def load(folder, **options):
    return common.load_dataset('vectors', folder, **options)


# ---- files

def test_vectors_keep_their_classes_and_names(vectors):
    written = write(vectors / 'test.npz', 'hgij', [2, 0, 3, 2], paths=np.array(['two', 'zero', 'three', '2']))
    data = load(vectors)
    assert data.train.classes == list('abcdef') and len(data.train) == 30 and data.gallery is data.query
    assert data.query.classes == list('hij') and data.query.labels.tolist() == [0, 1, 1, 2]
    assert data.query.paths.tolist() == ['zero', 'two', '2', 'three'] and data.train.paths[0] == '1'
    np.testing.assert_array_equal(data.query.vectors.numpy(), written[[1, 0, 3, 2]])
    [(x, y)] = common.batches(data.query, [[3, 0]], torch.device('cpu'))
    assert x.shape == (2, 6, 1, 1) and y.tolist() == [2, 0]
    np.testing.assert_array_equal(x.flatten(1).numpy(), written[[2, 1]])


def test_a_gallery_a_single_file_and_folds(tmp_path):
    write(tmp_path / 'one/x.npz', 'bdca', [0, 1, 2, 3] * 3)
    data = load(tmp_path / 'one')
    assert (data.train.classes, data.query.classes) == (['a', 'b'], ['c', 'd']), 'one file is split into halves'
    data = load(tmp_path / 'one', known=['b'])
    assert data.query.classes == ['a', 'c', 'd'] and data.train is None
    write(tmp_path / 'more/train.npz', 'abcdef', [0, 1, 2, 3, 4, 5] * 2)
    write(tmp_path / 'more/query.npz', 'gh', [0, 1])
    gallery = write(tmp_path / 'more/gallery.npz', 'ghi', [2, 0, 1, 1])
    data = load(tmp_path / 'more')
    assert data.query.labels.tolist() == [0, 1] and data.gallery.labels.tolist() == [0, 1, 1, 2]
    np.testing.assert_array_equal(data.gallery.vectors.numpy(), gallery[[1, 2, 3, 0]])
    data = load(tmp_path / 'more', fold='1/3')
    assert data.train.classes == list('abef') and data.query.classes == list('cd') and data.gallery is data.query
    assert data.query.vectors.shape == (4, 6) and data.train.vectors.shape == (8, 6)


@pytest.mark.parametrize('changed, message', [
    (dict(embeddings=np.full((20, 6), np.nan)), 'test.npz cannot be used.* some embeddings are NaN or infinite'),
    (dict(embeddings=np.full((20, 6), 1e30)), 'some embeddings are NaN or infinite'),      # their squares are infinite
    (dict(embeddings=np.zeros((20, 6))), 'or all are 0'),
    (dict(embeddings=np.ones((20, 6, 1))), 'embeddings .20, 6, 1., int64 labels .20,., paths'),
    (dict(embeddings=np.ones((19, 6))), 'embeddings .19, 6., int64 labels .20,.'),
    (dict(embeddings=np.ones((21, 6))), 'embeddings .21, 6., int64 labels .20,.'),
    (dict(paths=np.array(['x'] * 21)), 'labels .20,., paths .21,.'),
    (dict(labels=np.array([-1, 1] * 10)), 'labels are from -1 to 1, and should be places'),
    (dict(labels=np.array([[0, 1]] * 10)), 'int64 labels .10, 2.'),
    (dict(labels=np.array([0, 4] * 10)), 'test.npz cannot be .* labels are from 0 to 4, .* places in .* from 0 to 3'),
    (dict(labels=np.array(list('abcd') * 5)), 'labels that are integers, .* these are .* <U1 labels'),
    (dict(gallery_labels=np.zeros(20, int)), 'it has a gallery, which should lie in gallery.npz'),
    (dict(labels=np.zeros(20, int)), 'the test set needs 2 classes or more, and has 1'),
    (dict(classes=np.array(['x', None, 1, 2])), 'Object arrays cannot be loaded')])
@pytest.mark.filterwarnings('ignore:overflow')
def test_files_that_are_wrong_end_in_one_line(vectors, changed, message):
    write(vectors / 'test.npz', 'ghij', [2, 0, 3, 1] * 5)
    np.savez(vectors / 'test.npz', **dict(np.load(vectors / 'test.npz')) | changed)
    with pytest.raises(UsageError, match=f'^vectors cannot be loaded: .*{message}.* should hold train.npz'):
        load(vectors)


def test_names_of_files_and_classes(vectors):
    (vectors / 'train.npz').rename(vectors / 'Train.npz')
    write(vectors / '._test.npz', 'xy', [0, 1])             # as macOS leaves them beside files
    arrays = dict(np.load(vectors / 'Train.npz'))
    np.savez(vectors / 'Train.npz', **arrays | dict(classes=np.arange(6)))
    assert load(vectors).train.classes == list('012345')
    (vectors / 'test.npz').unlink()
    data = load(vectors)
    assert data.train.classes == list('012345') and data.query is None, 'as a folder that has train/ alone'
    (vectors / 'Train.npz').rename(vectors / 'x.npz')
    assert load(vectors).train.classes == list('012'), 'numbers are names, in a file that is split as well'


def test_two_test_sets_are_refused(vectors):
    """The second one is left from vectors of another dataset, for example."""
    for name in ('query', 'gallery'):
        write(vectors / f'{name}.npz', 'gh', [0, 1] * 4)
    with pytest.raises(UsageError, match='^vectors cannot be loaded: test and query are two test sets'):
        load(vectors)


def test_files_that_are_missing_end_in_one_line(vectors):
    (vectors / 'test.npz').rename(vectors / 'other.npz')
    with pytest.raises(UsageError, match='^vectors cannot be loaded: there are 2 NPZ files'):
        load(vectors)
    np.savez(vectors / 'test.npz', x=1)
    with pytest.raises(UsageError, match='^vectors cannot be loaded: .*embeddings is not a file in the archive'):
        load(vectors)
    for path in vectors.iterdir():
        path.unlink()
    with pytest.raises(UsageError, match='^vectors cannot be loaded: there are 0 NPZ files'):
        load(vectors)


@pytest.mark.parametrize('gallery', [False, True])
def test_any_module_makes_vectors_of_images(tmp_path, gallery, monkeypatch):
    draw_folder(tmp_path / 'x/train', 'ab', per_class=3)
    draw_folder(tmp_path / ('x/query' if gallery else 'x/test'), 'cd', per_class=2, seed=1)
    if gallery:
        draw_folder(tmp_path / 'x/gallery', 'cde', per_class=2, seed=2)
    data = common.load_dataset('folder', tmp_path / 'x', 20, 18, tmp_path / 'cache')
    net = nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(12, 7))
    parts = [data.train, data.query, *[data.gallery] * gallery]
    made = [common.embed(net, images) for images in parts]
    monkeypatch.setenv('HOME', str(tmp_path))
    common.save_vectors('~/v', data, *made)
    again = load(tmp_path / 'v')
    for images, z, other in zip(parts, made, [again.train, again.query, again.gallery]):
        assert torch.equal(other.vectors, z) and torch.equal(other.labels, images.labels)
        assert other.classes == images.classes and other.paths.tolist() == images.paths.tolist()
    common.save_vectors(tmp_path / 'half', data, made[0].numpy(), *[z.bfloat16() for z in made[1:]])
    assert torch.equal(load(tmp_path / 'half').query.vectors, made[1].bfloat16().float())
    others = made[:2] if gallery else [*made, made[1]]
    with pytest.raises(UsageError, match='needs .* of data.gallery where this is not data.query'):
        common.save_vectors(tmp_path / 'other', data, *others)


def test_vectors_that_do_not_fit_the_images_are_not_written(tmp_path):
    draw_folder(tmp_path / 'x', ['train/a', 'train/b', 'test/a', 'test/c'], per_class=3)        # a trains and tests
    data = common.load_dataset('folder', tmp_path / 'x', 20, 18, tmp_path / 'cache')
    good = torch.rand(6, 4)
    paths = data.train.paths, data.query.paths
    for train, query, order, message in (
            (good[:5], good, (), 'save_vectors, train: .* embeddings .5, 4.'), (good, good[:, 0], (), 'test: needed'),
            (good, good / 0, (), 'test: some embeddings are NaN'), (good, None, (), 'needs those of data.query'),
            (good, good, paths[::-1], 'train: the images are in another order')):
        with pytest.raises(UsageError, match=message):
            common.save_vectors(tmp_path / 'v', data, train, query, paths=order)
        assert not (tmp_path / 'v').exists()
    common.save_vectors(tmp_path / 'v', data, good, good, paths=paths)
    assert load(tmp_path / 'v').query.classes == ['a', 'c'], 'with a warning, as of images'
    shutil.rmtree(tmp_path / 'x/test')
    data = common.load_dataset('folder', tmp_path / 'x', 20, 18, tmp_path / 'cache')
    common.save_vectors(tmp_path / 'alone', data, good)
    assert load(tmp_path / 'alone').query is None and len(load(tmp_path / 'alone').train) == 6


# ---- the network

def test_the_head_begins_as_the_identity_on_vectors_of_mean_length_1(vectors):
    data = load(vectors)
    args = train_ms.get_args([*FLAGS, '--data', 'v'])
    model = common.build(args, data=data)
    x = data.query.vectors[:, :, None, None]
    length = data.train.vectors.norm(dim=1).mean()
    torch.testing.assert_close(model.features(x), x / length)
    torch.testing.assert_close(model(x), F.normalize(data.query.vectors, dim=1))
    assert args.dim == 6 and [weight.shape for weight in model.parameters()] == [(6, 6), (6,)]
    common.save_checkpoint('x.pt', args, model)
    torch.testing.assert_close(common.load_checkpoint('x.pt').features(x), x / length)
    args = train_ms.get_args([*FLAGS, '--data', 'v', '--dim', '6'])
    weight = common.build(args, data=data).linear.weight
    assert not torch.equal(weight, torch.eye(6)), 'where --dim is given, it is random'


def test_before_training_the_result_is_that_of_the_vectors_at_any_scale(vectors):
    data = load(vectors)
    rows = []
    for scale in (1, 1000):
        for name in ('train', 'test'):
            arrays = dict(np.load(vectors / f'{name}.npz'))
            np.savez(vectors / f'{name}.npz', **arrays | dict(embeddings=arrays['embeddings'] * scale))
        train_proxy_anchor.main([*FLAGS, '--data', 'v', '--name', f'times-{scale}', '--epochs', '3'])
        rows.append([row['MAP@R'] for row in rows_of(f'times-{scale}')])
    raw = common.retrieval_metrics(data.query.vectors, data.query.labels)
    assert rows[0][0] == rows[1][0] == raw['MAP@R'] != rows[0][-1] == rows[1][-1]


@pytest.mark.parametrize('script', [train_contrastive, train_ms, train_proxy_anchor, train_proxynca_pp, train_ccl,
                                    train_metrix])
def test_each_script_begins_with_the_result_of_the_vectors(vectors, script):
    """Also where it has LayerNorm before the head, or a head of its own"""
    data = load(vectors)
    raw = common.retrieval_metrics(data.query.vectors, data.query.labels)
    row = script.main([*FLAGS, '--data', 'v', '--name', 'zero', '--epochs', '0'])
    assert row['MAP@R'] == raw['MAP@R'] and row['R@1'] == raw['R@1']


def test_a_network_says_which_inputs_it_takes(run, small, vectors):
    train_ms.main([*FLAGS, '--data', 'v', '--name', 'head', '--epochs', '1'])
    write(vectors / 'test.npz', 'gh', [0, 1] * 5, c=5)
    with pytest.raises(UsageError, match='takes 6 channels .3 of images, or the size of stored vectors., and got 5'):
        evaluation.main(['--checkpoint', 'runs/head'])
    run(train_ms, '--name', 'trunk')
    with pytest.raises(UsageError, match='runs/trunk was trained on folder: .* and one for images takes no vectors'):
        evaluation.main(['--checkpoint', 'runs/trunk', '--dataset', 'vectors', '--data', 'v'])
    with pytest.raises(UsageError, match='runs/head was trained on vectors: a network for .* takes no images'):
        evaluation.main(['--checkpoint', 'runs/head', '--dataset', 'shapes'])


def test_feature_mixing_mixes_the_vectors(vectors):
    """With one pair (0, 1) and lambda 0.25: (0.25 x_0 + 0.75 x_1) / length"""
    data = load(vectors)
    model = common.build(train_ms.get_args([*FLAGS, '--data', 'v']), data)
    x = data.query.vectors[:2]
    f = model.features(x[:, :, None, None])
    mixed = train_metrix.mix_features(f, torch.tensor([0]), torch.tensor([1]), torch.tensor([0.25]), model.pool)
    torch.testing.assert_close(mixed, (0.25 * x[:1] + 0.75 * x[1:]) / data.train.vectors.norm(dim=1).mean())


# ---- runs

@pytest.mark.parametrize('script, flags', [
    (train_ms, []), (train_proxynca_pp, []), (train_ccl, ['--variant', 'cluster']),
    (train_metrix, ['--loss', 'proxy_anchor']), (train_metrix, ['--mixup', 'embed', '--dim', '4'])])
def test_a_resumed_run_repeats_the_uninterrupted_one_and_eval_its_last_row(vectors, script, flags, capsys):
    flags = [*FLAGS, '--data', 'v', '--lr', '0.01', '--schedule', 'step', '--decay-epochs', '1', *flags]
    row = script.main([*flags, '--name', 'whole', '--epochs', '3'])
    script.main([*flags, '--name', 'halved', '--epochs', '2'])
    assert '30 training images of 6 classes, 20 test images of 4 classes' in capsys.readouterr().out
    script.main(['--resume', os.path.abspath('runs/halved'), '--epochs', '3'])
    for one, other in zip(rows_of('whole'), rows_of('halved'), strict=True):
        assert all(one[key] == other[key] for key in one.keys() - {'images_per_second', 'minutes'}), (one, other)
    script.main(['--resume', 'runs/halved', '--dataset', 'vectors'])       # naming the dataset again changes nothing
    result = evaluation.main(['--checkpoint', 'runs/halved', '--analyse', '--embed', 'out.npz'])
    assert result['MAP@R'] == row['MAP@R'] and result['uniformity'] < 0
    saved = np.load('out.npz')
    assert saved['embeddings'].shape == (20, 4 if '--dim' in flags else 6) and saved['classes'].tolist() == list('ghij')
    assert json.loads(capsys.readouterr().out.strip().split('\n')[-1]) == result


def test_vectors_on_folds_are_compared_seed_by_seed(vectors):
    for script, lr in ((train_ms, '0.01'), (train_metrix, '0.02')):
        for seed in '01':
            for fold in '01':
                script.main([*FLAGS, '--data', 'v', '--name', f'{script.__name__}-{seed}-{fold}', '--lr', lr,
                             '--fold', f'{fold}/2', '--seed', seed, '--epochs', '2'])
    ms, metrix = ([f'runs/{script}-{seed}-{fold}' for seed in '01' for fold in '01']
                  for script in ('train_ms', 'train_metrix'))
    result = evaluation.main(['--checkpoint', *ms, '--against', *metrix])
    assert [row['setting'] for row in result['rows']] == 2 * ['separated (6-dim)', 'concatenated (12-dim)'] + [
        'separated', 'concatenated']
    train_metrix.main(['--analyse', 'runs/train_metrix-0-0'])


# ---- flags

@pytest.mark.parametrize('flags', [
    '--cache x', '--image-size 32', '--resize 40', '--min-crop 0.4', '--jitter 0.2', '--no-flip',
    '--arch resnet18', '--weights imagenet', '--pool max', '--no-freeze-bn', '--warmup 1', '--precision bf16',
    '--compile', '--chunk 4', '--protocol reality-check'])
def test_flags_about_images_and_trunks_have_no_effect_on_vectors(flags):
    flag = flags.split()[0].replace('--no-', '--')
    with pytest.raises(UsageError, match=f'^{flag} has no effect with --dataset vectors, which has no images'):
        train_ms.get_args([*FLAGS, *flags.split()])


@pytest.mark.parametrize('script, flags, reason', [
    (train_metrix, '--mixup input embed', '--mixup input mixes images; --dataset vectors has none'),
    (train_hse, '', 'hybrids are joined images, and --dataset vectors has none')])
def test_methods_that_need_images_refuse_vectors(script, flags, reason):
    with pytest.raises(UsageError, match=reason):
        script.get_args(['--dataset', 'vectors', *flags.split()])


@pytest.mark.parametrize('flags', ['--sheet x.png', '--query a.jpg', '--cache x', '--precision bf16'])
def test_eval_draws_no_vectors_and_decodes_none(vectors, flags):
    train_ms.main([*FLAGS, '--data', 'v', '--name', 'mine', '--epochs', '0'])
    with pytest.raises(UsageError, match=f'{flags.split()[0]} has no effect with --dataset vectors'):
        evaluation.main(['--checkpoint', 'runs/mine', *flags.split()])
