"""--dataset vectors: a linear head on precomputed features of any network. On resumed runs see test_runs.py."""
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import SCRIPTS

import common
from common import UsageError, load_dataset

FLAGS = '--dataset vectors --data v --device cpu --batch-size 8 --per-class 2'.split()


def write(path, classes, labels):
    """An NPZ file with a random vector for each of these positions in `classes`. Returns the vectors."""
    vectors = np.random.default_rng(0).normal(size=(len(labels), 6)) + 1
    np.savez(path, embeddings=vectors, labels=np.array(labels), classes=np.array(list(classes)))
    return torch.tensor(vectors).float()


@pytest.fixture(autouse=True)
def vectors(tmp_path, monkeypatch):
    """A folder v with 6 training and 4 test classes of 5 vectors, not sorted by class"""
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'v').mkdir()
    write('v/train.npz', 'abcdef', [5, 0, 1, 3, 2, 4] * 5)
    write('v/test.npz', 'ghij', [2, 0, 3, 1] * 5)


def test_vectors_keep_their_classes(tmp_path):
    """They keep the order of the file, and there is no augmentation. A file may lack some of its classes. A class has
    one number in the queries and in the gallery, but the Images of which Splits are made do not change."""
    query, gallery = write('v/query.npz', 'hgij', [2, 0, 3, 2]), write('v/gallery.npz', 'ghi', [2, 0, 1, 1])
    (tmp_path / 'v/test.npz').unlink()
    data = load_dataset('vectors', 'v')
    assert data.train.classes == list('abcdef') and data.query.classes == data.gallery.classes == list('ghij')
    assert data.query.labels.tolist() == [2, 1, 3, 2] and data.gallery.labels.tolist() == [2, 0, 1, 1]
    assert data.num_matches().tolist() == [1, 2, 0, 1] and data.query.present == list('hij')
    assert torch.equal(data.query.items, query) and torch.equal(data.gallery.items, gallery)
    assert torch.equal(common.Images(query.double(), 'hgij').items, query)
    for item in (1, (1, 7, 1)):
        assert torch.equal(data.query[item][0], query[1]) and data.query[item][1] == 1
    hashes = {common.hash_of(common.Images(query, list(labels))) for labels in ('aabb', 'abbb', 'ccdd', 'aabb')}
    assert len(hashes) == 3, 'a run is not resumed with other labels'
    common.Splits('mine', query=data.query, gallery=data.train)
    assert data.query.classes == list('ghij') and data.query.labels.tolist() == [2, 1, 3, 2]


@pytest.mark.parametrize('changed', [
    dict(embeddings=np.ones((21, 6))), dict(labels=np.array([-1, 1] * 10)), dict(labels=np.array([0, 4] * 10)),
    dict(embeddings=np.full((20, 6), 'x'))])
def test_arrays_that_do_not_fit_are_refused(changed):
    np.savez('v/test.npz', **dict(np.load('v/test.npz')) | changed)
    with pytest.raises(UsageError, match='^vectors cannot be loaded from v: '):
        load_dataset('vectors', 'v')


@pytest.mark.parametrize('script', [script for script in SCRIPTS if script != 'train_hse'])        # it needs images
def test_embeddings_begin_as_the_normalized_vectors_or_with_dim_as_the_seed_decides(monkeypatch, script):
    def start(*more):
        return __import__(script).main([*FLAGS, *more])
    monkeypatch.setattr(common, 'train', lambda args, model, *others, **options: model)
    data, model = load_dataset('vectors', 'v'), start()
    x = data.query.items
    torch.testing.assert_close(model.features(x).flatten(1), x / data.train.items.norm(dim=1).mean())
    torch.testing.assert_close(model(x), F.normalize(x, dim=1))
    first, same, other = (start('--dim', '6', '--seed', seed).linear.weight for seed in '774')
    assert torch.equal(first, same) and not torch.equal(first, other)
