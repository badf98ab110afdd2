"""eval.py: utilization, alignment and uniformity (Metrix, Section 4.3), and the same/different threshold."""
import math
from types import SimpleNamespace

import pytest
import torch
from conftest import on_circle
from worked import Largest, chord, cosine, expect

import common
import eval as evaluation


def test_metrix_eq12_is_a_mean_over_the_queries():
    """There may be more queries than examples, or fewer. An example may be the nearest of several queries, or of
    none."""
    queries, examples = (10, 20, 100, 300), (15, 0, 180)
    found = evaluation.utilization(on_circle(*queries), on_circle(*examples))
    nearest = [min(chord(q - e) ** 2 for e in examples) for q in queries]
    expect(found, sum(nearest) / 4, f'Metrix Eq. (12), queries at {queries}, examples at {examples} degrees', 1e-6)
    found = evaluation.utilization(on_circle(100), on_circle(*queries, 80))
    expect(found, 0, 'Metrix Eq. (12), a query at 100, one of the examples as well', 1e-6)


def test_metrix_eq12_of_embeddings_that_are_not_normalized():
    """Utilization is defined for L2-normalized embeddings, so the function normalizes its arguments."""
    queries, examples = torch.tensor([[3.0], [0.2]]) * on_circle(0, 90), 7 * on_circle(60, 200)
    kept = queries.clone(), examples.clone()
    found = evaluation.utilization(queries, examples)
    assert isinstance(found, float), f'expected a float, got {found!r}'
    expect(found, (chord(60) ** 2 + chord(30) ** 2) / 2, 'Metrix Eq. (12) of queries at 0, 90, examples at 60, 200, of '
           'lengths 3, 0.2 and 7', 1e-6)
    assert torch.equal(queries, kept[0]) and torch.equal(examples, kept[1]), 'the arguments were modified'


def test_metrix_eq12_of_many_examples():
    """The differences of all pairs of 500 queries and 5,000 examples, (500, 5,000, 64), would have 160 million values,
    and need too much memory for larger sets."""
    z = torch.nn.functional.normalize(torch.randn(5500, 64, generator=torch.Generator().manual_seed(0)), dim=1)
    expected = (2 - 2 * (z[:500] @ z[500:].T).amax(dim=1)).mean()
    with Largest() as largest:
        found = evaluation.utilization(z[:500], z[500:])
    expect(found, expected, 'Metrix Eq. (12) of 500 queries and 5,000 examples', 1e-4)
    assert largest.values < 3e7, f'Metrix Eq. (12): expected no tensor of 30,000,000 values, got {largest.values:,}'


def test_alignment_and_uniformity_by_hand():
    """Embeddings are at 0 and 60 degrees (class 0) and 180 degrees (class 1), with squared distances 1, 3 and 4 after
    normalization."""
    z = on_circle(0, 60, 180) * torch.tensor([[0.1], [3], [9]])
    images = SimpleNamespace(labels=torch.tensor([0, 0, 1]))
    before = {'R@1': 0.0, 's+': common.mean_similarities(z, images.labels)[0]}
    metrics = evaluation.analyse(z, z, SimpleNamespace(query=images, gallery=images), before)
    assert metrics['alignment'] == pytest.approx(1)
    expected = math.log((math.exp(-2) + math.exp(-6) + math.exp(-8)) / 3)
    assert metrics['uniformity'] == evaluation.uniformity(z) == pytest.approx(expected)


def test_uniformity_is_computed_over_all_images():
    """The second 1,024 images are opposite to the first."""
    z = torch.cat([on_circle(0).expand(1024, 2), on_circle(180).expand(1024, 2)])
    assert evaluation.uniformity(z) == pytest.approx(math.log((1023 + 1024 * math.exp(-8)) / 2047), abs=1e-6)


def test_an_embedding_that_is_zero_has_the_cosine_0_also_with_itself():
    z, y = torch.cat([on_circle(0, 60), torch.zeros(2, 2)]), torch.tensor([0, 0, 1, 1])
    assert common.mean_similarities(z, y) == pytest.approx((0.25, 0))
    assert evaluation.uniformity(z) == pytest.approx(math.log((math.exp(-2) + 5 * math.exp(-4)) / 6))
    threshold, accuracy = evaluation.best_threshold(z, y)
    assert accuracy == 75 and 0 < threshold <= 0.5


def test_the_best_threshold_by_hand():
    """Positive pairs are 4, 10, 66 and 70 degrees apart, negative pairs 20 to 100: two of four positives are
    accepted."""
    threshold, accuracy = evaluation.best_threshold(on_circle(0, 10, 30, 34, 100), torch.tensor([0, 0, 1, 1, 1]))
    assert accuracy == 75 and cosine(20) < threshold <= cosine(10)


def test_the_threshold_with_a_gallery_uses_pairs_of_a_query_and_a_gallery_image():
    """Matching pairs are 10 degrees apart, others 80 or 100. Pairs of queries, 90 degrees apart, do not count."""
    z, gallery = 9 * on_circle(0, 90), 9 * on_circle(10, 100, -80)      # not normalized
    threshold, accuracy = evaluation.best_threshold(z, torch.tensor([0, 1]), gallery, torch.tensor([0, 1, 2]))
    assert accuracy == 100 and cosine(80) < threshold <= cosine(10)
    swapped = evaluation.best_threshold(z, torch.tensor([0, 1]), gallery, torch.tensor([1, 0, 2]))[1]
    assert swapped < 70, 'labels of the gallery count'


def test_the_threshold_with_a_gallery_counts_exact_duplicates_in_it():
    """Positive pairs are 0, 0 and 75 degrees apart, negative pairs 15 to 90. With a threshold below 15 degrees, 2/3 of
    the positive and all negative pairs are classified correctly."""
    gallery, labels = on_circle(0, 90, 75, 20), torch.tensor([0, 1, 0, 2])
    _, accuracy = evaluation.best_threshold(on_circle(0, 90), torch.tensor([0, 1]), gallery, labels)
    assert accuracy == pytest.approx(100 * (2 / 3 + 1) / 2)


def test_the_threshold_of_thousands_of_images_uses_all_pairs():
    """The images are compared in two blocks: the first 4,096 have two classes, the others a third one."""
    y = torch.cat([torch.arange(4096) % 2, torch.full((400,), 2)])
    threshold, accuracy = evaluation.best_threshold(on_circle(0, 70, 200)[y], y)
    assert accuracy == 100 and cosine(70) < threshold
