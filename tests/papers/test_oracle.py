"""Losses and metrics against pytorch-metric-learning, in float64. Skipped if that is not installed."""
from functools import partial

import pytest
import torch
from cases import no_proxies
from conftest import unit
from train_triplet import triplet_loss

import common
from train_ccl import center_contrastive_loss
from train_contrastive import contrastive_loss, contrastive_similarity_loss
from train_hse import epshn_loss, npair_loss
from train_ms import multi_similarity_loss
from train_proxy_anchor import proxy_anchor_loss
from train_proxynca_pp import proxynca_pp_loss

pytest.importorskip('pytorch_metric_learning', reason='the comparison needs pip install pytorch-metric-learning')
from pytorch_metric_learning import distances, losses, miners, reducers  # noqa: E402
from pytorch_metric_learning.utils.accuracy_calculator import AccuracyCalculator  # noqa: E402

COSINE = distances.CosineSimilarity()


def with_miner(loss, miner):
    return lambda z, y, p: loss(z, y, miner(z, y))


def of_proxies(loss, held='proxies'):
    """Their loss as loss(z, y, p), with the proxies p in place of its parameters"""
    def value(z, y, p):
        delattr(loss, held)
        setattr(loss, held, p.T if held == 'W' else p)
        return loss(z, y)
    loss.cast_types = lambda dtype, device: None
    return value


def minus_one_for_each_anchor_with_positives(loss):
    """Their positive term is the mean of 1 - s, ours is the mean of -s, as in Metrix Eq. (1)."""
    def value(z, y, p):
        same = (y[:, None] == y).sum(dim=1)
        return loss(z, y) - (same > 1).double().mean()
    return value


def compared(C, D):
    """{name: (ours, theirs)}, each loss(z, y, p). Both count a pair as (a, b) and as (b, a), and have the same
    denominators, so no factor is needed."""
    return {
        'contrastive': (no_proxies(contrastive_loss), no_proxies(losses.ContrastiveLoss(0, 0.5))),
        'contrastive, both margins': (no_proxies(contrastive_loss, pos_margin=0.6, neg_margin=1.4),
                                      no_proxies(losses.ContrastiveLoss(0.6, 1.4))),
        'contrastive, similarity': (no_proxies(contrastive_similarity_loss, margin=0.2),
                                    minus_one_for_each_anchor_with_positives(losses.ContrastiveLoss(
                                        1, 0.2, distance=COSINE, reducer=reducers.PerAnchorReducer(
                                            aggregation_func=lambda x, _: x.sum(1) / (x > 0).sum(1).clamp_min(1))))),
        'ms': (no_proxies(multi_similarity_loss), no_proxies(losses.MultiSimilarityLoss(2, 50, 0.5))),
        'ms with miner': (no_proxies(multi_similarity_loss, alpha=3, beta=7, lam=0.2, epsilon=0.1),
                          with_miner(losses.MultiSimilarityLoss(3, 7, 0.2), miners.MultiSimilarityMiner(0.1))),
        'proxy_anchor': (proxy_anchor_loss, of_proxies(losses.ProxyAnchorLoss(C, D, 0.1, 32))),
        'proxy_anchor, soft': (partial(proxy_anchor_loss, alpha=3, delta=0.4),
                               of_proxies(losses.ProxyAnchorLoss(C, D, 0.4, 3))),
        'proxynca_pp': (proxynca_pp_loss, of_proxies(losses.ProxyNCALoss(C, D, softmax_scale=9))),    # 1 / temperature
        'ccl, NSoftmax': (partial(center_contrastive_loss, lam=0),
                          of_proxies(losses.NormalizedSoftmaxLoss(C, D, temperature=1 / 16), 'W')),
        'ccl, CosFace': (partial(center_contrastive_loss, lam=0, margin=0.2),
                         of_proxies(losses.CosFaceLoss(C, D, margin=0.2, scale=16), 'W')),
        'hse, epshn': (no_proxies(epshn_loss, temperature=1),
                       with_miner(losses.TripletMarginLoss(0, smooth_loss=True, distance=COSINE,
                                                           reducer=reducers.MeanReducer()),
                                  miners.BatchEasyHardMiner('easy', 'semihard', distance=COSINE))),
        'hse, npair': (no_proxies(npair_loss), no_proxies(losses.NPairsLoss())),
        'triplet': (no_proxies(triplet_loss), no_proxies(losses.TripletMarginLoss(0.1))),
    }


C, D = 6, 5
PAIRS = compared(C, D)
BATCHES = {'balanced': [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3], 'unbalanced': [0, 0, 0, 0, 0, 1, 1, 2, 3, 3, 3, 4],
           'one class': [2] * 6, 'no positives': [0, 1, 2, 3, 4]}           # class 5 is absent


@pytest.mark.parametrize('labels', BATCHES)
@pytest.mark.parametrize('name', PAIRS)
def test_value_and_gradients_match_the_other_library(name, labels):
    """The other library normalizes embeddings, so gradients of embeddings are compared without the radial component."""
    y = torch.tensor(BATCHES[labels])
    for seed in range(3):
        results = []
        for loss in PAIRS[name]:
            z, p = unit(len(y), D, seed).requires_grad_(), (2 * unit(C, D, seed + 9)).requires_grad_()
            value = loss(z, y, p)
            by_z, by_p = torch.autograd.grad(value, [z, p], materialize_grads=True)
            results.append([value, by_z - (by_z * z).sum(dim=1, keepdim=True) * z, by_p])
        for ours, theirs in zip(*results):
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


def test_metrics_match_the_other_library():
    z, y = unit(60, 4, dtype=torch.float32), torch.arange(60) % 12
    y[:9] = 0                                                               # classes of several sizes
    ours, names = common.retrieval_metrics(z, y), ('precision_at_1', 'r_precision', 'mean_average_precision_at_r')
    theirs = AccuracyCalculator(include=names, k='max_bin_count').get_accuracy(z, y)
    assert [ours[key] for key in ('R@1', 'RP', 'MAP@R')] == pytest.approx([100 * theirs[n] for n in names], abs=1e-4)
