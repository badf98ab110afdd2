"""Retrieval: the search and its metrics, against worked examples, Table 3 of the Reality Check, and a plain loop."""
import math
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import on_circle
from worked import expect

import common
from common import UsageError, retrieval_metrics


def expect_metrics(found, expected, what):
    """The same keys, and the same percentages up to floating-point error"""
    assert found.keys() == expected.keys(), f'{what}: expected the keys {list(expected)}, got {list(found)}'
    for key in expected:
        expect(found[key], expected[key], f'{key}, {what}', 1e-5)


def ranked(hits, r):
    """Metrics of one query with r matches: those at the ranks in `hits`, and the others at the end of the ranking"""
    angles = [*range(1, 11), *range(50, 50 + r - len(hits))]
    labels = torch.tensor([int(angle not in hits and angle < 50) for angle in angles])
    return retrieval_metrics(on_circle(0), torch.tensor([0]), on_circle(*angles), labels, ks=(1,))


@pytest.mark.parametrize('hits, rp, map_at_r', [([1], 10, 10), ([1, 10], 20, 12), ([1, 2], 20, 20),
                                                (list(range(1, 11)), 100, 100)])
def test_rc_eq3_map_at_r_as_in_table_3(hits, rp, map_at_r):
    expect_metrics(ranked(hits, r=10), {'R@1': 100, 'RP': rp, 'MAP@R': map_at_r},
                   f'Reality Check Eq. (3): one query, R = 10, matches at the ranks {hits}')


def test_rc_eq4_by_hand_precision_counts_only_at_matches():
    expect_metrics(ranked([2, 3], r=3), {'R@1': 0, 'RP': 200 / 3, 'MAP@R': 100 * (0 + 1 / 2 + 2 / 3) / 3},
                   'Reality Check Eq. (4): one query, R = 3, matches at the ranks 2 and 3')


def test_rc_eq3_by_hand_of_five_queries():
    """Each query ranks the other four. Class 5 is at 0, 7 and 30 degrees, R = 2; class 2 at 10 and 34, R = 1.

    query  ranking         matches at ranks     RP     MAP@R
    0      7, 10, 30, 34   1 (and 3, beyond R)  1/2    (1/1 + 0) / 2
    7      10, 0, 30, 34   2 (and 3)            1/2    (0 + 1/2) / 2
    30     34, 10, 7, 0    3 (and 4)            0      0
    10     7, 0, 30, 34    4                    0      0
    34     30, 10, 7, 0    2                    0      0
    """
    expect_metrics(retrieval_metrics(on_circle(10, 0, 34, 7, 30), torch.tensor([2, 5, 2, 5, 5]), ks=(3, 1)),
                   {'R@3': 80, 'R@1': 20, 'RP': 100 * (1 / 2 + 1 / 2) / 5, 'MAP@R': 100 * (1 / 2 + 1 / 4) / 5},
                   'Reality Check Eq. (3): 0, 7, 30 (class 5), 10, 34 degrees (class 2)')


@pytest.mark.parametrize('names', [torch.tensor([2 ** 62, -2 ** 62, 7, 3, 1, -5, 0, 99, 4]),
                                   torch.arange(-4, 5, dtype=torch.int8)])
@pytest.mark.parametrize('within', [True, False])
def test_retrieval_matches_a_plain_loop_for_any_integers_as_labels(within, names):
    """Embeddings have any norm, and classes any size. One query has no match, and K may exceed the gallery."""
    generator = torch.Generator().manual_seed(0)
    z, y = 3 * torch.randn(90, 4, generator=generator), torch.randint(8, (90,), generator=generator)
    y[50] = 8
    gallery, labels = (z, y) if within else (torch.randn(70, 4, generator=generator), y[:70] % 7)
    cosines = F.normalize(z, dim=1) @ F.normalize(gallery, dim=1).T
    rows = []
    for q, ranking in enumerate(cosines.argsort(dim=1, descending=True).tolist()):
        hits = [bool(labels[i] == y[q]) for i in ranking if not within or i != q]
        r = sum(hits) or math.nan
        p = [sum(hits[:i + 1]) / (i + 1) for i in range(sum(hits)) if hits[i]]
        rows.append([any(hits[:1]), any(hits[:4]), any(hits), len(p) / r, sum(p) / r])
    expected = dict(zip(('R@1', 'R@4', 'R@200', 'RP', 'MAP@R'), 100 * np.nanmean(rows, axis=0)))
    found = retrieval_metrics(z, names[y], *(() if within else (gallery, names.long()[labels])), ks=(1, 4, 200))
    expect_metrics(found, expected | {'unmatched': np.isnan(rows).any(axis=1).sum()}, f'90 queries, within {within}')


def test_retrieval_of_collapsed_embeddings_is_chance_and_of_a_perfect_model_100():
    """Of 199 equal images, of which 3 match, a fixed permutation chooses. The order of the classes does not matter."""
    y = torch.arange(50).repeat_interleave(4)
    found, again = (retrieval_metrics(torch.ones(200, 3), y) for _ in range(2))
    chance = 100 * (1 - math.comb(196, 8) / math.comb(199, 8))
    assert found['R@8'] == pytest.approx(chance, abs=5) and max(found['R@1'], found['RP']) < 5 and found == again
    expect_metrics(retrieval_metrics(F.one_hot(y), y, ks=(9,)), {'R@9': 100, 'RP': 100, 'MAP@R': 100}, 'one-hot')


def test_retrieval_excludes_a_query_by_its_index_and_only_without_a_gallery():
    """Each image has a duplicate of another class, whose similarity is as high as to the image itself."""
    z, y = torch.randn(30, 5, generator=torch.Generator().manual_seed(0)), torch.arange(30)
    found = retrieval_metrics(torch.cat([z, z]), torch.cat([y // 2, 100 + y // 2]))
    expect(found['R@1'], 0, 'rule 1: R@1 where every image has a duplicate of another class')
    expect_metrics(retrieval_metrics(z, y, z, y, ks=(1,)), {'R@1': 100, 'RP': 100, 'MAP@R': 100}, 'a gallery of copies')


def test_retrieval_of_a_query_without_a_match_is_a_miss_and_is_counted():
    found = retrieval_metrics(on_circle(0, 90, 5), torch.tensor([2, 7, 2]), ks=(1, 2))
    expect_metrics(found, {'R@1': 200 / 3, 'R@2': 200 / 3, 'RP': 100, 'MAP@R': 100, 'unmatched': 1},
                   'rule 3: 0, 5 (class 2), 90 degrees (class 7)')
    found = retrieval_metrics(on_circle(0, 9), torch.tensor([7, 8]), on_circle(0, 30), torch.tensor([0, 1]), ks=(1,))
    expect_metrics(found, {'R@1': 0, 'RP': 0, 'MAP@R': 0, 'unmatched': 2}, 'rule 3: no query has a match')


def test_retrieval_of_many_queries():
    """In a gallery of a million images, 140 queries are two blocks. The first 70 have three copies in it."""
    z, others = torch.randn(2 ** 20 + 140, 8, generator=torch.Generator().manual_seed(0)).tensor_split([140])
    copies = torch.cat([torch.arange(140), torch.arange(70), torch.arange(70)])
    labels = torch.cat([copies, torch.full((len(others),), 199)])
    found = retrieval_metrics(z, torch.arange(140), torch.cat([z[copies], others]), labels, ks=(1,))
    expect_metrics(found, {'R@1': 100, 'RP': 100, 'MAP@R': 100}, '140 queries and their copies among a million images')


@pytest.mark.parametrize('number, value', [(0, 0), (3, math.nan), (3, math.inf)])
def test_retrieval_of_nothing_or_of_nonfinite_embeddings_is_an_error(number, value):
    right, wrong = (torch.eye(3), torch.zeros(3).long()), (torch.eye(3)[:number], torch.zeros(number).long())
    wrong[0][1:2, 1] = value
    for arguments in (wrong, wrong + right, right + wrong):
        with pytest.raises(UsageError):
            found = retrieval_metrics(*arguments)
            raise AssertionError(f'{number} embeddings with {value}: expected a common.UsageError, got {found}')


def test_more_labels_than_embeddings_are_an_error():
    with pytest.raises(UsageError):
        retrieval_metrics(torch.eye(3), torch.arange(6))


@pytest.mark.parametrize('platform', ['linux', 'darwin'])
def test_the_search_finds_the_largest_cosines_with_faiss_and_with_torch_on_a_mac(monkeypatch, platform):
    z = F.normalize(torch.randn(300, 5, generator=torch.Generator().manual_seed(3)), dim=1)
    monkeypatch.setattr(sys, 'platform', platform)
    _, s, index = map(torch.cat, zip(*common.k_nearest(2 * z, None, 3)))
    expected, positions = (z @ z.T).fill_diagonal_(-2).topk(3)
    assert torch.equal(index, positions) and torch.allclose(s, expected, atol=1e-6)


def test_evaluate_ranks_the_gallery_and_its_mean_similarities_are_of_the_queries():
    """The queries are not the nearest images. Other Splits with these queries may number their classes differently."""
    query = common.Images(on_circle(0, 60, 120) * torch.tensor([[0.1], [3], [9]]), ['b', 'b', 'c'])
    data = common.Splits('mine', None, query, common.Images(on_circle(149, 29, 180, 1), ['c', 'b', 'a', 'b']), ks=(1,))
    common.Splits('others', None, query, common.Images(on_circle(5), ['0']))
    model = torch.nn.Linear(2, 2, bias=False)
    torch.nn.init.eye_(model.weight)
    expect_metrics(common.evaluate(model, data), {'R@1': 100, 'RP': 100, 'MAP@R': 100, 's+': 0.5, 's-': 0},
                   'queries at 0, 60 (class b) and 120 degrees (class c), a gallery at 1, 29 (b), 149 (c), 180 (a)')
    assert common.mean_similarities(query.items, torch.arange(3)).keys() == {'s-'}, 'there are no positive pairs'
