"""The mixup of other papers, in Table 3 of Metrix, against loops over anchors, in float64"""
import pytest
import torch
from conftest import unit
from other_mixup import PATCHES
from torch.distributions import Beta
from torch.nn.functional import normalize

import train_metrix

Y = torch.tensor([0, 0, 0, 1, 1, 2, 2, 3])
B = len(Y)


def patched(name, *numbers, z, mixup='embed', pictures=None):
    """The mixed loss of contrastive with margin 0.1, as sums"""
    base = train_metrix.BaseLoss('contrastive', dict(m=0.1, reduction='sum'))
    config = train_metrix.MixupConfig(mixup, 'pos-neg', None, 2.0)
    torch.manual_seed(0)
    model = torch.nn.Identity()
    return PATCHES[name](*numbers)['mixed_loss'](base, config, model, dict(input=pictures, embed=z), Y)


def expect_same(found, wanted, z):
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)
    ours, theirs = (torch.autograd.grad(value, z, retain_graph=True)[0] for value in (found, wanted))
    torch.testing.assert_close(ours, theirs, rtol=1e-7, atol=1e-9)


def hardest(z, a, k):
    """Indices of the k negatives of an anchor that are most similar to it"""
    return sorted((n for n in range(B) if Y[n] != Y[a]), key=lambda n: -(z[a] @ z[n]).item())[:k]


def push(similarity):
    return torch.relu(similarity - 0.1)


def test_mochi_of_two_negatives():
    z = unit(B).requires_grad_()
    found = patched('mochi_neg_neg', 3, z=z)
    torch.manual_seed(0)
    lam = torch.zeros(B, B, dtype=torch.float64)
    lam[tuple(torch.triu_indices(B, B, 1))] = torch.rand(B * (B - 1) // 2).double()
    wanted = 0
    for a in range(B):
        hard = sorted(hardest(z, a, 3))
        wanted += sum(push(z[a] @ normalize(lam[i, j] * z[i] + (1 - lam[i, j]) * z[j], dim=0))
                      for i in hard for j in hard if i < j) / B
    assert wanted > 0
    expect_same(found, wanted, z)


def test_mochi_of_an_anchor_and_a_negative():
    z = unit(B).requires_grad_()
    found = patched('mochi_anc_neg', 2, z=z)
    torch.manual_seed(0)
    lam = torch.rand(B, B, 1)[..., 0].double() / 2
    assert lam.max() < 0.5, 'the weight of the anchor'
    wanted = sum(push(z[a] @ normalize(lam[a, n] * z[a] + (1 - lam[a, n]) * z[n], dim=0))
                 for a in range(B) for n in hardest(z, a, 2)) / B
    expect_same(found, wanted, z)


def test_imix_contrasts_a_mixed_image_with_both_classes():
    """The network is the identity, so the embedding of a mixed image is a mixture of two vectors."""
    z, pictures = unit(B).requires_grad_(), unit(B, seed=1)
    found = patched('imix', z=z, mixup='input', pictures=pictures)
    torch.manual_seed(0)
    partner = (Y[:, None] != Y).float().multinomial(1)[:, 0].tolist()
    lam = Beta(2.0, 2.0).sample((B,)).double()
    wanted = 0
    for a, n in enumerate(partner):
        v = lam[a] * pictures[a] + (1 - lam[a]) * pictures[n]
        for label, weight in ((Y[a], lam[a]), (Y[n], 1 - lam[a])):
            for x in {*range(B)} - {a, n}:
                wanted += weight * (-(v @ z[x]) if Y[x] == label else push(v @ z[x])) / B
    expect_same(found, wanted, z)
    assert all(Y[a] != Y[n] for a, n in enumerate(partner))


def test_proxy_synthesis_adds_classes_to_proxy_anchor():
    """Image 0 follows image 7. Where two neighbours are of one class, there is no new class."""
    z, proxies = unit(B).requires_grad_(), unit(5, seed=2).requires_grad_()
    torch.manual_seed(0)
    found = PATCHES['synthesis'](0.4)['clean_loss']('proxy_anchor', z, Y, proxies, epsilon=None, alpha=4.0, delta=0.1)
    torch.manual_seed(0)
    lam = Beta(0.4, 0.4).sample().double()
    images, labels, classes = [*z], [*Y.tolist()], [*proxies]
    for i in range(B):
        if Y[i] != Y[i - 1]:
            images.append(normalize(lam * z[i] + (1 - lam) * z[i - 1], dim=0))
            one, other = (normalize(proxies[Y[n]], dim=0) for n in (i, i - 1))
            classes.append(lam * one + (1 - lam) * other)
            labels.append(len(classes) - 1)
    assert len(classes) == 5 + 4
    pull, away = [], []
    for c, proxy in enumerate(classes):
        cosines = [x @ normalize(proxy, dim=0) for x in images]
        own = [(-4 * (s - 0.1)).exp() for s, label in zip(cosines, labels) if label == c]
        pull += [torch.log1p(sum(own))] if own else []
        away.append(torch.log1p(sum((4 * (s + 0.1)).exp() for s, label in zip(cosines, labels) if label != c)))
    assert len(pull) == 8, 'class 4 is not in the batch'
    expect_same(found, sum(pull) / len(pull) + sum(away) / len(away), z)
    expect_same(found, sum(pull) / len(pull) + sum(away) / len(away), proxies)


@pytest.mark.parametrize('name, numbers', [('mochi_neg_neg', [9]), ('mochi_anc_neg', [9]), ('imix', [])])
def test_a_batch_of_one_class_adds_nothing(name, numbers, monkeypatch):
    monkeypatch.setattr(f'{__name__}.Y', torch.zeros(B, dtype=torch.long))
    z = unit(B).requires_grad_()
    found = patched(name, *numbers, z=z, mixup='input', pictures=unit(B))
    assert found.isfinite() and found == 0
