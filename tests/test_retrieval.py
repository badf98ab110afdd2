"""common.retrieval_metrics and what an evaluation reads, against loops, definitions and the Reality Check's Table 3."""
import math
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import on_circle

import common
from common import UsageError, retrieval_metrics


def ranked(hits, r):
    """One query and r matches; the retrieved list has a match at each rank in `hits`, then the others."""
    wrong = [rank for rank in range(1, 11) if rank not in hits]
    order = [(rank, 0) for rank in hits] + [(rank, 1) for rank in wrong]
    order += [(50 + i, 0) for i in range(r - len(hits))]
    gallery = on_circle(*[rank for rank, _ in order], dtype=torch.float32)
    return retrieval_metrics(on_circle(0, dtype=torch.float32), torch.tensor([0]), gallery,
                             torch.tensor([label for _, label in order]))


@pytest.mark.parametrize('hits, rp, map_at_r', [([1], 10, 10), ([1, 10], 20, 12), ([1, 2], 20, 20),
                                                (list(range(1, 11)), 100, 100)])
def test_rc_eq3_map_at_r_as_in_table_3(hits, rp, map_at_r):
    found = ranked(hits, r=10)
    assert found['R@1'] == 100
    assert found['RP'] == pytest.approx(rp) and found['MAP@R'] == pytest.approx(map_at_r)


def test_rc_eq4_precision_counts_only_at_matches():
    """Matches at ranks 2 and 3 of R = 3: (0 + 1/2 + 2/3) / 3."""
    assert ranked([2, 3], r=3)['MAP@R'] == pytest.approx(100 * (1 / 2 + 2 / 3) / 3)


@pytest.mark.parametrize('with_gallery', [False, True])
def test_retrieval_against_a_loop(with_gallery):
    generator = torch.Generator().manual_seed(1)
    z, y = F.normalize(torch.randn(60, 4, generator=generator), dim=1), torch.randint(7, (60,), generator=generator)
    query, rest = (z[:20], z[20:]) if with_gallery else (z, z)
    qy, gy = (y[:20], y[20:]) if with_gallery else (y, y)
    recall, rp, average = {1: 0, 4: 0}, [], []
    for i in range(len(query)):
        order = (query[i] @ rest.T).argsort(descending=True).tolist()
        if not with_gallery:
            order.remove(i)
        hit = [bool(gy[j] == qy[i]) for j in order]
        r = sum(hit)
        for k in recall:
            recall[k] += any(hit[:k])
        rp.append(sum(hit[:r]) / r)
        average.append(sum(sum(hit[:n]) / n for n in range(1, r + 1) if hit[n - 1]) / r)
    found = retrieval_metrics(query, qy, *((rest, gy) if with_gallery else ()), ks=(1, 4))
    expected = {f'R@{k}': 100 * v / len(query) for k, v in recall.items()}
    expected |= {'RP': 100 * np.mean(rp), 'MAP@R': 100 * np.mean(average)}
    assert found == pytest.approx(expected, abs=1e-3)


def test_a_collapsed_network_scores_about_chance():
    """Not 100, since equal embeddings are no hits; and not 0, since the gallery is searched in a shuffled order."""
    y = torch.arange(50).repeat_interleave(4)
    found = retrieval_metrics(torch.ones(200, 3), y)
    assert found['R@1'] < 5 and found['MAP@R'] < 5
    chance = 100 * (1 - math.comb(196, 8) / math.comb(199, 8))           # 8 of 199, of which 3 match
    assert abs(found['R@8'] - chance) < 5


def test_a_perfect_network_scores_100():
    y = torch.arange(5).repeat_interleave(3)
    found = retrieval_metrics(F.one_hot(y).float(), y)
    assert found == {'R@1': 100, 'R@2': 100, 'R@4': 100, 'R@8': 100, 'RP': 100, 'MAP@R': 100}


def test_every_image_duplicated_under_another_class_scores_zero():
    z = torch.randn(30, 5, generator=torch.Generator().manual_seed(0))
    found = retrieval_metrics(torch.cat([z, z]), torch.cat([torch.arange(30) // 2, 100 + torch.arange(30) // 2]))
    assert found['R@1'] == 0


def test_a_query_without_a_match_is_a_miss_and_is_counted():
    z, y = on_circle(0, 5, 90, dtype=torch.float32), torch.tensor([0, 0, 1])
    found = retrieval_metrics(z, y)
    assert found['R@1'] == pytest.approx(200 / 3) and found['MAP@R'] == 100 and found['unmatched'] == 1


@pytest.mark.parametrize('within', [True, False])
@pytest.mark.parametrize('library', ['faiss', 'torch'])
def test_k_nearest_against_the_matrix_of_all_cosines(monkeypatch, library, within):
    """By both searches, in two blocks, of embeddings of any length; within a set nobody finds oneself."""
    if library == 'torch':
        monkeypatch.setitem(sys.modules, 'faiss', None)     # importing it now fails: torch searches, as on a GPU
    z = torch.randn(4300, 5, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    query, gallery = (z, None) if within else (z[:4200], z[4200:])
    rows, s, index = map(torch.cat, zip(*common.k_nearest(query, gallery, 3)))
    cosines = F.normalize(query, dim=1) @ F.normalize(z if within else gallery, dim=1).T
    if within:
        cosines.fill_diagonal_(-2)
    expected = cosines.topk(3).values
    assert torch.equal(rows, torch.arange(len(query)))
    assert torch.allclose(s.double(), expected, atol=1e-6)
    assert torch.allclose(cosines.gather(1, index), expected, atol=1e-6), 'positions are those in the gallery'


def test_queries_beyond_the_first_block_have_their_own_labels_and_ranks():
    """4,400 queries take two blocks. Classes of 4 come first and of 2 last, so R differs between the blocks."""
    labels = torch.cat([torch.arange(500).repeat_interleave(4), 500 + torch.arange(1200).repeat_interleave(2)])
    generator = torch.Generator().manual_seed(0)
    centres = F.normalize(torch.randn(1700, 32, generator=generator), dim=1)
    z = centres[labels] + 0.01 * torch.randn(4400, 32, generator=generator)
    assert retrieval_metrics(z, labels, ks=(1,)) == {'R@1': 100, 'RP': 100, 'MAP@R': 100}
    assert max(retrieval_metrics(z, labels, z, labels.flip(0), ks=(1,)).values()) < 1, 'labels of other images'
    assert retrieval_metrics(z, torch.arange(4400), ks=(1,))['R@1'] == 0, 'nobody finds oneself'


def test_no_query_has_a_match():
    z = torch.randn(4, 3)
    row = retrieval_metrics(z[:2], torch.tensor([7, 8]), z, torch.tensor([0, 1, 0, 1]))
    assert row == {'R@1': 0, 'R@2': 0, 'R@4': 0, 'R@8': 0, 'RP': 0, 'MAP@R': 0, 'unmatched': 2}


def test_lengths_of_embeddings_do_not_matter():
    z, y = torch.randn(40, 4, generator=torch.Generator().manual_seed(0)), torch.arange(40) // 4
    longer = z * torch.linspace(0.1, 9, 40)[:, None]
    assert retrieval_metrics(longer, y) == retrieval_metrics(z, y)
    assert common.mean_similarities(longer, y) == pytest.approx(common.mean_similarities(z, y))


def test_mean_similarities_against_the_matrix():
    z, y = on_circle(0, 20, 70, 110, 200), torch.tensor([0, 0, 1, 1, 1])
    s, same, other = z @ z.T, y[:, None] == y, ~torch.eye(5, dtype=torch.bool)
    positive, negative = common.mean_similarities(z, y)
    assert positive == pytest.approx(s[same & other].mean().item())
    assert negative == pytest.approx(s[~same].mean().item())


def test_mean_similarities_of_no_pairs_are_none():
    z = on_circle(0, 90, 180)
    assert common.mean_similarities(z, torch.arange(3)) == (None, pytest.approx(-1 / 3))
    assert common.mean_similarities(z, torch.zeros(3, dtype=torch.long)) == (pytest.approx(-1 / 3), None)


@pytest.mark.parametrize('value', [math.nan, math.inf])
def test_embeddings_that_are_no_numbers_are_an_error(value):
    good, bad = torch.randn(6, 3), torch.randn(6, 3)
    bad[2, 1] = value
    y = torch.arange(6) // 2
    for arguments in ((bad, y), (bad, y, good, y), (good, y, bad, y)):
        with pytest.raises(UsageError, match='NaN or infinite'):
            retrieval_metrics(*arguments)


@pytest.mark.parametrize('queries, gallery', [(0, 5), (1, None), (3, 0)])
def test_nothing_to_retrieve_is_an_error(queries, gallery):
    parts = [torch.randn(queries, 3), torch.zeros(queries).long()]
    if gallery is not None:
        parts += [torch.randn(gallery, 3), torch.zeros(gallery).long()]
    with pytest.raises(UsageError, match='nothing to retrieve'):
        retrieval_metrics(*parts)


def coloured(colours, labels):
    """A set of 8 x 8 images, each of one colour"""
    pixels = np.repeat(np.array(colours, dtype=np.uint8), 64, axis=0)
    return common.Images(pixels.reshape(-1), [(8, 8)] * len(colours), torch.tensor(labels), 8)


class MeanColour(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.unused = torch.nn.Parameter(torch.zeros(1))

    def forward(self, x):
        return F.normalize(x.mean(dim=(2, 3)), dim=1)


def test_evaluate_searches_the_gallery_and_not_the_queries():
    """Two queries of different classes: in each other they find nothing, in the gallery each its own colour."""
    red, green, blue = (220, 20, 20), (20, 220, 20), (20, 20, 220)
    query, gallery = coloured([red, green], [0, 1]), coloured([blue, green, red], [2, 1, 0])
    data = SimpleNamespace(name='inshop', query=query, gallery=gallery)
    row = common.evaluate(MeanColour(), data)
    assert [row[f'R@{k}'] for k in (1, 10, 20, 30, 40, 50)] == [100] * 6 and row['MAP@R'] == 100
    data.query = coloured([red, blue], [0, 1])                           # the second finds its class last
    assert common.evaluate(MeanColour(), data)['R@1'] == 50


def test_evaluate_takes_the_k_of_the_dataset():
    data = coloured([(10 * i, 255 - 10 * i, 100) for i in range(20)], [i // 2 for i in range(20)])
    for name, ks in (('sop', (1, 10, 100, 1000)), ('cub', (1, 2, 4, 8)), ('cars', (1, 2, 4, 8)),
                     ('shapes', (1, 2, 4, 8)), ('folder', (1, 2, 4, 8))):
        row = common.evaluate(MeanColour(), SimpleNamespace(name=name, query=data, gallery=data))
        assert [key for key in row if key.startswith('R@')] == [f'R@{k}' for k in ks]
    assert row['s+'] > row['s-'], 'neighbours in colour are of one class'


@pytest.mark.parametrize('labels', [[0, 1], [1, 0]])
@pytest.mark.parametrize('query', [0, 20])
def test_of_two_that_tie_the_other_class_comes_first(query, labels):
    """Whichever the search returns first. A cosine that is larger by 1e-4 is no tie."""
    gallery, labels = on_circle(20, 20).float(), torch.tensor(labels)
    found = retrieval_metrics(on_circle(query).float(), torch.tensor([0]), gallery, labels, ks=(1, 2))
    assert (found['R@1'], found['R@2'], found['RP']) == (0, 100, 0)
    gallery = on_circle(*(20 + 0.02 * labels)).float()
    assert retrieval_metrics(on_circle(0).float(), torch.tensor([0]), gallery, labels, ks=(1,))['R@1'] == 100
