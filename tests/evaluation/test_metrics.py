"""eval.py: utilization (Metrix, Section 4.3) and the other metrics of --analyse, by hand."""
import math
from types import SimpleNamespace

import pytest
import torch
from conftest import on_circle
from worked import Largest, chord, expect

import common
import eval as evaluation


def test_metrix_eq12_is_a_mean_over_the_queries():
    """There may be more queries than examples, or fewer. An example may be nearest to several queries, or to none."""
    queries, examples = (10, 20, 100, 300), (15, 0, 180)
    found = evaluation.utilization(on_circle(*queries), on_circle(*examples))
    nearest = [min(chord(q - e) ** 2 for e in examples) for q in queries]
    expect(found, sum(nearest) / 4, f'Metrix Eq. (12), queries at {queries}, examples at {examples} degrees', 1e-6)
    found = evaluation.utilization(on_circle(100), on_circle(*queries, 80))
    expect(found, 0, 'Metrix Eq. (12), a query at 100, one of the examples as well', 1e-6)


def test_metrix_eq12_of_embeddings_that_are_not_normalized():
    queries, examples = torch.tensor([[3.0], [0.2]]) * on_circle(0, 90), 7 * on_circle(60, 200)
    found = evaluation.utilization(queries, examples)
    expect(found, (chord(60) ** 2 + chord(30) ** 2) / 2, 'Metrix Eq. (12) of queries at 0, 90, examples at 60, 200, of '
           'lengths 3, 0.2 and 7', 1e-6)


def test_metrix_eq12_of_many_examples():
    """The differences of all pairs, (500 queries, 5,000 examples, 64), would have 160 million values."""
    z = torch.nn.functional.normalize(torch.randn(5500, 64, generator=torch.Generator().manual_seed(0)), dim=1)
    expected = (2 - 2 * (z[:500] @ z[500:].T).amax(dim=1)).mean()
    with Largest() as largest:
        found = evaluation.utilization(z[:500], z[500:])
    expect(found, expected, 'Metrix Eq. (12) of 500 queries and 5,000 examples', 1e-4)
    assert largest.values < 3e7, f'Metrix Eq. (12): expected no tensor of 30,000,000 values, got {largest.values:,}'


def test_the_analysis_by_hand():
    """Queries are at 0 and 60 (class 0) and 180 degrees (class 1), with squared distances 1, 3 and 4. A training image
    half a degree away is a copy (the cosine is 0.99996), one a degree away is not. Three of four find their class."""
    z = on_circle(0, 60, 180) * torch.tensor([[0.1], [3], [9]])
    training, images = on_circle(0.5, 61, 98, 100), SimpleNamespace(labels=torch.tensor([0, 1, 1, 1]))
    result = {'R@1': 20.0, 's+': common.mean_similarities(z, torch.tensor([0, 0, 1]))['s+']}
    assert evaluation.analyse(z, result, training, images) == pytest.approx({
        'alignment': 1, 'uniformity': math.log((math.exp(-2) + math.exp(-6) + math.exp(-8)) / 3),
        'utilization': (chord(0.5) ** 2 + chord(1) ** 2 + chord(80) ** 2) / 3, 'train R@1': 75, 'copies': 1,
        'standard error': 100 * math.sqrt(0.2 * 0.8 / 3)}, abs=1e-6)
    of_one = evaluation.analyse(z[:1], {'R@1': 0.0}, training, images)
    assert not {'alignment', 'uniformity'} & of_one.keys(), 'one query has no pairs'


def test_uniformity_is_computed_over_all_pairs_of_images():
    """Of 2,050 images, the second 1,024 are opposite to the first. Two embeddings are 0; their cosines are 0."""
    z = torch.cat([on_circle(*[0] * 1024, *[180] * 1024), torch.zeros(2, 2)])
    total = 1024 * 1023 + 1024 ** 2 * math.exp(-8) + (2 * 2048 + 1) * math.exp(-4)
    assert evaluation.uniformity(z) == pytest.approx(math.log(total / (2050 * 2049 / 2)), abs=1e-9)
