"""--dataset vectors: a linear head on precomputed features of any network, from NPZ files."""
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import SCRIPTS, log_of
from PIL import Image

import common
import eval as evaluation
import train_ccl
import train_hse
import train_metrix
import train_ms
from common import UsageError

FLAGS = '--dataset vectors --device cpu --batch-size 8 --per-class 2'.split()


def write(path, classes, labels, c=6, seed=0, **more):
    """An NPZ file of vectors around a centre of each class, with a norm of about 4, in the order of `labels`"""
    path.parent.mkdir(exist_ok=True)
    random = np.random.default_rng(seed)
    centres = random.normal(size=(len(classes), c)) + 1
    vectors = centres[labels] + random.normal(size=(len(labels), c))
    arrays = dict(embeddings=vectors.astype(np.float32), labels=np.array(labels), classes=np.array(list(classes)))
    np.savez(path, **arrays, **more)
    return arrays['embeddings']


@pytest.fixture
def vectors(tmp_path, monkeypatch):
    """A folder v with train.npz and test.npz, 6 and 4 classes of 5 vectors, not sorted by class"""
    monkeypatch.chdir(tmp_path)
    write(tmp_path / 'v/train.npz', 'abcdef', [5, 0, 1, 3, 2, 4] * 5)
    write(tmp_path / 'v/test.npz', 'ghij', [2, 0, 3, 1] * 5, seed=1)
    return tmp_path / 'v'


def load(folder):
    return common.load_dataset('vectors', folder)


def test_vectors_keep_their_classes_and_names(vectors):
    written = write(vectors / 'test.npz', 'hgij', [2, 0, 3, 2], paths=np.array(['two', 'zero', 'three', '2']))
    data = load(vectors)
    assert data.train.classes == list('abcdef') and len(data.train) == 30 and data.gallery is data.query
    assert data.query.classes == list('hij') and sorted(data.query.labels.tolist()) == [0, 1, 1, 2]
    order = [data.query.paths.index(name) for name in ('two', 'zero', 'three', '2')]
    assert data.query.labels[order].tolist() == [1, 0, 2, 1] and data.train.paths[0] == '1', 'the first one of class a'
    np.testing.assert_array_equal(data.query.items[order].numpy(), written)
    for item in (order[2], (order[2], 7, 1)):               # no augmentation
        x, y = data.query[item]
        assert y == 2 and x.numpy().tolist() == written[2].tolist()


def test_a_gallery_and_a_single_file(tmp_path):
    write(tmp_path / 'one/x.npz', 'bdca', [0, 1, 2, 3] * 3)
    data = load(tmp_path / 'one')
    assert (data.train.classes, data.query.classes) == (['a', 'b'], ['c', 'd']), 'a single file is split into halves'
    write(tmp_path / 'more/train.npz', 'abcdef', [0, 1, 2, 3, 4, 5] * 2)
    write(tmp_path / 'more/query.npz', 'gh', [0, 1])
    gallery = write(tmp_path / 'more/gallery.npz', 'ghi', [2, 0, 1, 1])
    data = load(tmp_path / 'more')
    assert data.query.labels.tolist() == [0, 1] and data.gallery.labels.tolist() == [0, 1, 1, 2]
    np.testing.assert_array_equal(data.gallery.items.numpy(), gallery[[1, 2, 3, 0]])


@pytest.mark.parametrize('changed', [
    dict(embeddings=np.full((20, 6), 1e40)),                # infinite in float32
    dict(embeddings=np.ones((20, 6, 1))), dict(embeddings=np.ones((19, 6))), dict(paths=np.array(['x'] * 21)),
    dict(labels=np.array([-1, 1] * 10)), dict(labels=np.array([0, 4] * 10)), dict(labels=np.array(list('abcd') * 5))])
@pytest.mark.filterwarnings('ignore:overflow')
def test_arrays_that_do_not_fit_end_in_one_line(vectors, changed):
    np.savez(vectors / 'test.npz', **dict(np.load(vectors / 'test.npz')) | changed)
    message = '^vectors cannot be loaded: .*test.npz cannot be used.* needed are finite embeddings .*; these are .*6'
    with pytest.raises(UsageError, match=message):
        load(vectors)


def test_vectors_that_are_all_zero_are_rejected(run, vectors):
    saved = dict(np.load(vectors / 'train.npz'))
    np.savez(vectors / 'train.npz', **saved | dict(embeddings=0 * saved['embeddings']))
    with pytest.raises(UsageError, match='^all training vectors in .* are 0$'):
        train_ms.main(['--dataset', 'vectors', '--data', str(vectors)])


def test_missing_or_corrupted_files_end_in_one_line(vectors):
    intact = (vectors / 'train.npz').read_bytes()
    for content in (intact[:-400], b'text'):
        (vectors / 'train.npz').write_bytes(content)
        with pytest.raises(UsageError, match='^vectors cannot be loaded: .*train.npz cannot be used') as raised:
            load(vectors)
        assert '\n' not in str(raised.value)
    np.savez(vectors / 'train.npz', classes=np.array(['x', None]))          # a pickle
    with pytest.raises(UsageError, match='^vectors cannot be loaded: .*train.npz cannot be used.*Object arrays'):
        load(vectors)
    (vectors / 'test.npz').rename(vectors / 'other.npz')
    (vectors / 'train.npz').rename(vectors / 'mine.npz')
    with pytest.raises(UsageError, match='^vectors cannot be loaded: there are 2 NPZ files'):
        load(vectors)


def test_the_head_starts_as_the_identity_on_vectors_of_mean_norm_1(vectors):
    data = load(vectors)
    args = train_ms.get_args([*FLAGS, '--data', 'v'])
    model = common.build(args, data=data)
    x = data.query.items
    length = data.train.items.norm(dim=1).mean()
    torch.testing.assert_close(model.features(x).flatten(1), x / length)
    torch.testing.assert_close(model(x), F.normalize(x, dim=1))
    assert model.dim == 6 and [weight.shape for weight in model.parameters()] == [(6, 6), (6,)]
    common.save_checkpoint('x.pt', args, model)
    torch.testing.assert_close(common.load_checkpoint('x.pt').features(x).flatten(1), x / length)
    args = train_ms.get_args([*FLAGS, '--data', 'v', '--dim', '6'])
    weight = common.build(args, data=data).linear.weight
    assert not torch.equal(weight, torch.eye(6)), 'with --dim, the initialization is random'


@pytest.mark.parametrize('script', [script for script in SCRIPTS if script != 'train_hse'])        # it needs images
def test_each_script_starts_with_the_metrics_of_the_vectors(vectors, script):
    """Before training, the metrics equal the metrics of the vectors, even with LayerNorm before the head."""
    data = load(vectors)
    raw = common.retrieval_metrics(data.query.items, data.query.labels)
    record = __import__(script).main([*FLAGS, '--data', 'v', '--name', 'zero', '--epochs', '0'])
    assert record['MAP@R'] == raw['MAP@R'] and record['R@1'] == raw['R@1']


def test_inputs_that_do_not_fit_the_network_are_rejected(run, small, vectors):
    train_ms.main([*FLAGS, '--data', 'v', '--name', 'head', '--epochs', '1'])
    run(train_ms, '--name', 'trunk')
    write(vectors / 'test.npz', 'gh', [0, 1] * 5, c=5)
    Image.new('RGB', (20, 20)).save('a.jpg')
    for flags, message in (
            ('head', 'the head takes 6 features, and got 5'),
            ('head --sheet x.png', '--sheet has no effect with vectors'),
            ('head --query a.jpg', '--query has no effect with vectors'),
            ('head --dataset shapes', '--dataset shapes does not fit: the network was trained on vectors'),
            ('trunk --dataset vectors --data v', '--dataset vectors does not fit: the network was trained on images')):
        with pytest.raises(UsageError, match=message):
            evaluation.main(f'--checkpoint runs/{flags}'.split())


@pytest.mark.parametrize('script, flags', [
    (train_ms, []), (train_ccl, ['--loss', 'cluster']), (train_metrix, ['--mixup', 'embed', '--dim', '4'])])
def test_a_resumed_run_and_eval_repeat_the_uninterrupted_run(vectors, script, flags, capsys):
    flags = [*FLAGS, '--data', 'v', '--lr', '0.01', '--schedule', 'step', '--decay-epochs', '1', *flags]
    record = script.main([*flags, '--name', 'full', '--epochs', '3'])
    script.main([*flags, '--name', 'halved', '--epochs', '2'])
    assert '30 training images of 6 classes, 20 test images of 4 classes' in capsys.readouterr().out
    script.main(['--resume', 'runs/halved', '--dataset', 'vectors', '--epochs', '3'])
    for one, other in zip(log_of('full'), log_of('halved'), strict=True):
        assert all(one[key] == other[key] for key in one.keys() - {'images_per_second', 'minutes'}), (one, other)
    assert record['MAP@R'] != log_of('full')[0]['MAP@R'], 'it has learned'
    result = evaluation.main(['--checkpoint', 'runs/halved', '--analyse', '--embed', 'out.npz'])
    assert result['MAP@R'] == record['MAP@R'] and result['uniformity'] < 0
    saved = np.load('out.npz')
    assert saved['embeddings'].shape == (20, 4 if '--dim' in flags else 6) and saved['classes'].tolist() == list('ghij')
    with pytest.raises(UsageError, match='the output would replace v/test.npz, an input'):
        evaluation.main(['--checkpoint', 'runs/halved', '--embed', 'v/test.npz'])


@pytest.mark.parametrize('script, flags, reason', [
    (train_metrix, '--mixup input embed', '--mixup input mixes images; --dataset vectors has none'),
    (train_hse, '', 'hybrids are composed of images, and --dataset vectors has none')])
def test_methods_that_need_images_reject_vectors(script, flags, reason):
    with pytest.raises(UsageError, match=reason):
        script.get_args(['--dataset', 'vectors', *flags.split()])
