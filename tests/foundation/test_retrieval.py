"""common.retrieval_metrics, k_nearest and evaluate, against worked examples and Table 3 of the Reality Check."""
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import on_circle, unit
from worked import expect

import common
from common import UsageError, retrieval_metrics


def expect_metrics(found, expected, what):
    """The same keys, and the same percentages up to floating-point error"""
    assert found.keys() == expected.keys(), f'{what}: expected the keys {list(expected)}, got {list(found)}'
    for key in expected:
        expect(found[key], expected[key], f'{key}, {what}', 1e-5)


def points(*degrees):
    return on_circle(*degrees, dtype=torch.float32)


def ranked(hits, r):
    """Metrics of one query with r matches: those at the ranks in `hits`, and the others at the end of the ranking"""
    angles = [*range(1, 11), *range(50, 50 + r - len(hits))]
    labels = torch.tensor([int(angle not in hits and angle < 50) for angle in angles])
    return retrieval_metrics(points(0), torch.tensor([0]), points(*angles), labels, ks=(1,))


@pytest.mark.parametrize('hits, rp, map_at_r', [([1], 10, 10), ([1, 10], 20, 12), ([1, 2], 20, 20),
                                                (list(range(1, 11)), 100, 100)])
def test_rc_eq3_map_at_r_as_in_table_3(hits, rp, map_at_r):
    expect_metrics(ranked(hits, r=10), {'R@1': 100, 'RP': rp, 'MAP@R': map_at_r},
                   f'Reality Check Eq. (3): one query, R = 10, matches at the ranks {hits}')


def test_rc_eq4_by_hand_precision_counts_only_at_matches():
    expect_metrics(ranked([2, 3], r=3), {'R@1': 0, 'RP': 200 / 3, 'MAP@R': 100 * (0 + 1 / 2 + 2 / 3) / 3},
                   'Reality Check Eq. (4): one query, R = 3, matches at the ranks 2 and 3')


@pytest.mark.parametrize('ks', [(1, 2, 4), (2,), (3, 1)])
def test_rc_eq3_by_hand_of_five_queries(ks):
    """Each query ranks the other four. Class 5 is at 0, 7 and 30 degrees, R = 2; class 2 at 10 and 34, R = 1.

    query  ranking         matches at ranks     RP     MAP@R
    0      7, 10, 30, 34   1 (and 3, beyond R)  1/2    (1/1 + 0) / 2
    7      10, 0, 30, 34   2 (and 3)            1/2    (0 + 1/2) / 2
    30     34, 10, 7, 0    3 (and 4)            0      0
    10     7, 0, 30, 34    4                    0      0
    34     30, 10, 7, 0    2                    0      0
    """
    found = retrieval_metrics(points(10, 0, 34, 7, 30), torch.tensor([2, 5, 2, 5, 5]), ks=ks)
    recall = {1: 20, 2: 60, 3: 80, 4: 100}
    expect_metrics(found, {f'R@{k}': recall[k] for k in ks} | {'RP': 100 * (1 / 2 + 1 / 2) / 5,
                                                               'MAP@R': 100 * (1 / 2 + 1 / 4) / 5},
                   f'Reality Check Eq. (3): 0, 7, 30 (class 5), 10, 34 degrees (class 2), ks {ks}')


def test_retrieval_of_collapsed_embeddings_is_chance():
    """Of 199 equal images, of which 3 match, a fixed permutation chooses. The order of the classes does not matter."""
    z, y = torch.ones(200, 3), torch.arange(50).repeat_interleave(4)
    found, again = (retrieval_metrics(z, y) for _ in range(2))
    chance = 100 * (1 - math.comb(196, 8) / math.comb(199, 8))
    assert found['R@8'] == pytest.approx(chance, abs=5) and max(found['R@1'], found['RP']) < 5 and found == again


def test_retrieval_from_a_gallery_as_long_as_the_queries():
    """With a separate gallery, image i of the gallery is not query i, and is not excluded."""
    found = retrieval_metrics(points(0, 40, 80), torch.tensor([5, 2, 0]), points(1, 41, 81), torch.tensor([5, 2, 0]))
    expect_metrics(found, dict.fromkeys(['R@1', 'R@2', 'R@4', 'R@8', 'RP', 'MAP@R'], 100),
                   'queries at 0, 40, 80 degrees of classes 5, 2, 0, a gallery at 1, 41, 81 of the same classes')


def test_retrieval_excludes_a_query_by_its_index():
    """Each image has a duplicate of another class, whose similarity is as high as to the image itself."""
    z = torch.randn(30, 5, generator=torch.Generator().manual_seed(0))
    found = retrieval_metrics(torch.cat([z, z]), torch.cat([torch.arange(30) // 2, 100 + torch.arange(30) // 2]))
    expect(found['R@1'], 0, 'rule 1: R@1 where every image has a duplicate of another class')


def test_retrieval_of_a_query_without_a_match_is_a_miss_and_is_counted():
    found = retrieval_metrics(points(0, 90, 5), torch.tensor([2, 7, 2]), ks=(1, 2, 1))
    expect_metrics(found, {'R@1': 200 / 3, 'R@2': 200 / 3, 'RP': 100, 'MAP@R': 100, 'unmatched': 1},
                   'rule 3: 0, 5 (class 2), 90 degrees (class 7)')
    expect_metrics(retrieval_metrics(points(0), torch.tensor([2]), ks=(1, 2)),
                   {'R@1': 0, 'R@2': 0, 'RP': 0, 'MAP@R': 0, 'unmatched': 1}, 'rule 3: a single image')


def test_retrieval_where_no_query_has_a_match():
    """Without any match all metrics are 0. The labels of the queries are larger than the labels of the gallery."""
    gallery = points(0, 30, 60, 90), torch.tensor([0, 1, 0, 1])
    found = retrieval_metrics(points(0, 9), torch.tensor([7, 8]), *gallery)
    expect_metrics(found, {'R@1': 0, 'R@2': 0, 'R@4': 0, 'R@8': 0, 'RP': 0, 'MAP@R': 0, 'unmatched': 2},
                   'rule 3: queries of classes 7, 8, a gallery of classes 0, 1, 0, 1')


@pytest.mark.parametrize('ks', [(1,), (1, 2)])
def test_retrieval_of_a_match_that_is_hardly_nearer_finds_it(ks):
    """Only exactly equal similarities are ties: a cosine that is larger by 6e-7 comes first, for any K."""
    found = retrieval_metrics(points(0), torch.tensor([0]), points(20, 20.0001), torch.tensor([0, 1]), ks=ks)
    expect(found['R@1'], 100, f'R@1 of a query of class 0 at 0 degrees, images at 20 (class 0), 20.0001, ks {ks}')


def test_retrieval_of_many_queries():
    """4,400 queries take two blocks. Classes of 4 come first and of 2 last, so R differs between blocks."""
    labels = torch.cat([torch.arange(500).repeat_interleave(4), 500 + torch.arange(1200).repeat_interleave(2)])
    generator = torch.Generator().manual_seed(0)
    centres = F.normalize(torch.randn(1700, 32, generator=generator), dim=1)
    z = centres[labels] + 0.01 * torch.randn(4400, 32, generator=generator)
    found = retrieval_metrics(z, labels, ks=(1,))
    expect_metrics(found, {'R@1': 100, 'RP': 100, 'MAP@R': 100}, '4,400 images in classes')
    found = retrieval_metrics(z, labels, z, labels.flip(0), ks=(1,))
    assert max(found.values()) < 1, f'4,400 images with the labels of others: expected less than 1%, got {found}'
    expect(retrieval_metrics(z[:99], torch.arange(99), ks=(1,))['R@1'], 0, 'R@1 of 99 classes: each query is excluded')


def test_retrieval_leaves_its_arguments():
    given = [3 * points(0, 7, 30), torch.tensor([5, 2, 5]), 2 * points(10, 34), torch.tensor([2, 5])]
    kept = [t.clone() for t in given]
    retrieval_metrics(*given)
    retrieval_metrics(*given[:2])
    assert all(map(torch.equal, given, kept)), 'the arguments were modified'


def some(number, value=0.0):
    """Embeddings, one of which has this value in a coordinate, and labels"""
    z = torch.randn(number, 3)
    z[number // 2:number // 2 + 1, 1] = value
    return z, torch.arange(number) // 2


@pytest.mark.parametrize('what, queries, gallery', [
    ('no queries', some(0), some(5)), ('an empty gallery', some(3), some(0)),
    ('a NaN', some(6, math.nan), ()), ('an infinite query', some(6, math.inf), some(6)),
    ('a NaN in the gallery', some(6), some(6, math.nan))])
def test_retrieval_of_nothing_or_of_nonfinite_embeddings_is_an_error(what, queries, gallery):
    with pytest.raises(UsageError):
        found = retrieval_metrics(*queries, *gallery)
        raise AssertionError(f'{what}: expected a common.UsageError, got {found}')


@pytest.mark.parametrize('within', [True, False])
def test_k_nearest_against_the_matrix_of_all_cosines(within):
    """The search, in two blocks and with embeddings of any length, finds the k largest cosines. Within a set, each
    query is excluded."""
    z = torch.randn(4300, 5, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    query, gallery = (z, None) if within else (z[:4200], z[4200:])
    rows, s, index = map(torch.cat, zip(*common.k_nearest(query, gallery, 3)))
    cosines = F.normalize(query, dim=1) @ F.normalize(z if within else gallery, dim=1).T
    if within:
        cosines.fill_diagonal_(-2)
    expected = cosines.topk(3).values
    assert torch.equal(rows, torch.arange(len(query)))
    assert torch.allclose(s.double(), expected, atol=1e-6)
    assert torch.allclose(cosines.gather(1, index), expected, atol=1e-6), 'indices refer to the gallery'


def test_fewer_results_are_the_first_of_more_results():
    """Also of equal images, which crowd a query out of its own results"""
    z = torch.cat([torch.ones(10, 3), torch.eye(3)])
    found = {k: torch.cat([index for *_, index in common.k_nearest(z, None, k)]) for k in (1, 4, 12)}
    assert torch.equal(found[1], found[12][:, :1]) and torch.equal(found[4], found[12][:, :4])


def test_the_last_images_of_a_gallery_do_not_win_by_rounding():
    """All cosines of a query are equal, but the last columns of a product of matrices may be rounded differently."""
    z = unit(301, 64, dtype=torch.float32)
    labels = (torch.arange(1003) > 999).long()
    found = [retrieval_metrics(query[None], labels[-1:], z[:1].repeat(1003, 1), labels)['R@1'] for query in z[1:]]
    assert sum(found) / 300 < 5


def test_mean_similarities_by_hand():
    """Three vectors of different lengths are at 0 and 60 degrees (class 0) and at 120 degrees (class 1)."""
    z = on_circle(0, 60, 120) * torch.tensor([[0.1], [3], [9]], dtype=torch.float64)
    assert common.mean_similarities(z, torch.tensor([0, 0, 1])) == (pytest.approx(0.5), pytest.approx(0, abs=1e-9))
    assert common.mean_similarities(z, torch.arange(3)) == (None, pytest.approx(1 / 6)), 'there are no positive pairs'
    assert common.mean_similarities(z, torch.zeros(3, dtype=torch.long)) == (pytest.approx(1 / 6), None)


@pytest.mark.parametrize('gallery', [False, True])
@pytest.mark.parametrize('ks', [(1,), (4, 1), (1, 4, 8), (1, 4, 89)])
def test_retrieval_with_many_ties_matches_a_plain_loop(ks, gallery):
    """Similarities of vectors of +-1/2 are exact, and many are equal; the other vectors are random. So more images may
    equal the last result than there are results. No metric depends on another K."""
    generator = torch.Generator().manual_seed(0)
    z = torch.randint(2, (90, 4), generator=generator) - 0.5
    z[:55] = F.normalize(torch.randn(55, 4, generator=generator), dim=1)
    y = torch.randint(9, (90,), generator=generator)
    ranked_z, labels = (z.flip(0)[:70], y.flip(0)[:70]) if gallery else (z, y)
    position = torch.randperm(len(ranked_z), generator=torch.Generator().manual_seed(0)).argsort()
    first = dict.fromkeys([k for k in ks if k < len(ranked_z)], 0)
    rp, map_at_r, tied, pairs = [], [], 0, 0
    for q in range(90):
        others = [i for i in range(len(ranked_z)) if gallery or i != q]
        ranking = sorted((-(z[q] @ ranked_z[i]).item(), position[i].item(), bool(labels[i] == y[q])) for i in others)
        tied += sum(a[0] == b[0] for a, b in zip(ranking, ranking[1:]))
        pairs += len(ranking)
        hits = [hit for *_, hit in ranking]
        for k in first:
            first[k] += any(hits[:k])
        r = sum(hits)
        if r:
            rp.append(sum(hits[:r]) / r)
            map_at_r.append(sum(sum(hits[:i + 1]) / (i + 1) for i in range(r) if hits[i]) / r)
    assert 0.2 < tied / pairs < 0.6
    ours = common.retrieval_metrics(z, y, *((ranked_z, labels) if gallery else ()), ks=ks)
    expected = {f'R@{k}': 100 * n / 90 for k, n in first.items()}
    expected |= {'RP': 100 * np.mean(rp), 'MAP@R': 100 * np.mean(map_at_r)}
    assert {key: ours[key] for key in expected} == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize('names', [
    torch.tensor([-128, -1, 127], dtype=torch.int8), torch.tensor([2 ** 62, -2 ** 62, 7])])
def test_labels_may_be_any_integers(names):
    """The labels of the queries, of the gallery, or of both may have any integer type and any value."""
    z, y = torch.randn(30, 4, generator=torch.Generator().manual_seed(0)), torch.arange(30) % 3
    assert retrieval_metrics(z, names[y]) == retrieval_metrics(z, y)
    gallery, labels = z[:20].flip(0), y[:20].flip(0)
    expected = retrieval_metrics(z, y, gallery, labels)
    assert retrieval_metrics(z, names[y], gallery, names.long()[labels]) == expected


def test_labels_or_embeddings_that_do_not_fit_are_rejected():
    z, y = torch.eye(3), torch.tensor([0, 0, 1])
    for labels in (torch.tensor([0.0, 0.0, 1.0]), torch.tensor([0, 1]), y[:, None], [0, 0, 1], None):
        for arguments in ((z, labels), (z, y, z, labels)):
            with pytest.raises(UsageError, match=r'embeddings \(N, D\), and N integers as labels; these are .*3, 3'):
                retrieval_metrics(*arguments)
    for wrong in (z[0], z.numpy()):
        with pytest.raises(UsageError, match='^retrieval needs tensors .*as_tensor'):
            retrieval_metrics(wrong, y)
    for ks in (1, (), (0, 1), (1.5,), '1'):
        with pytest.raises(UsageError, match=r'^ks are the K of Recall@K, such as \(1, 2, 4, 8\), and not '):
            retrieval_metrics(z, y, ks=ks)
    with pytest.raises(UsageError, match=r'queries \(3, 3\) and gallery \(3, 2\) differ in dimension'):
        retrieval_metrics(z, y, z[:, :2], y)


def test_retrieval_with_another_search_function():
    """A search yields the queries in blocks, in any order. The one of this test returns the least similar images."""
    def farthest(query, gallery, k):
        for n in range(len(query) - 1, -1, -1):
            s, index = (query[n] @ gallery.T).topk(k, largest=False)
            yield torch.tensor([n]), -s[None], index[None]
    z, y = points(0, 180, 80), torch.tensor([0, 1, 1])
    found = retrieval_metrics(z, y, z[:2], torch.tensor([1, 0]), ks=(1,), search=farthest)
    expect_metrics(found, {'R@1': 200 / 3, 'RP': 200 / 3, 'MAP@R': 200 / 3},
                   'queries at 0, 180 and 80 degrees, the least similar of 0 and 180: 2 of 3 are matches')


def test_a_search_that_finds_nothing_or_the_query_itself():
    def same(index):
        return lambda query, gallery, k: [(torch.arange(3), torch.ones(3, k), torch.full((3, k), index))]
    z, y = points(0, 180, 80), torch.tensor([0, 1, 1])
    found = retrieval_metrics(z, y, ks=(1,), search=same(-1))           # as FAISS, where nothing is found
    expect_metrics(found, {'R@1': 0, 'RP': 0, 'MAP@R': 0, 'unmatched': 1}, 'nothing is found')
    with pytest.raises(UsageError, match='search has to exclude each query from its own results'):
        retrieval_metrics(z, y, ks=(1,), search=same(2))


def test_evaluate_ranks_the_gallery_and_not_the_queries():
    """Two queries of different classes have no match in each other, and each a match in the gallery."""
    query, gallery = common.Images(points(0, 90), ['a', 'b']), common.Images(points(91, 180, 1), ['b', 'c', 'a'])
    data = common.Splits('mine', query=query, gallery=gallery, ks=(1, 10, 50))
    model = torch.nn.Linear(2, 2, bias=False)
    torch.nn.init.eye_(model.weight)
    # Other Splits with these queries may number their classes differently.
    common.Splits('others', query=query, gallery=common.Images(points(5), ['0']))
    found = common.evaluate(model, data)
    assert [found[key] for key in ('R@1', 'R@10', 'R@50', 'MAP@R')] == [100] * 4 and found['s-'] == pytest.approx(0)
