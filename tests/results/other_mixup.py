"""Patches of train_metrix.py for Table 3 of Metrix, which compares it with the mixup of other papers; see patches.py.

Section 4.2 of Metrix says what was mixed. It does not say how the mixed examples entered the loss; here they have the
weight w of Eq. (10), and the clean loss stays. Proxy Synthesis replaces the loss, as in its code.
"""
import torch
import torch.nn.functional as F
from torch.distributions import Beta

import common
import train_metrix


def negatives_loss(base, s, valid):
    """The loss of examples that are negatives, Eq. (7) with label 0.  s, valid (A, V)"""
    return train_metrix.labelled_loss(s, torch.zeros_like(s), valid, base.kind, **base.hyper).mean()


def mochi_neg_neg(k):
    """MoCHi (Kalantidis et al., Hard Negative Mixing, NeurIPS 2020): mixed embeddings of two of an anchor's k hardest
    negatives are further negatives of it; lambda is uniform in (0, 1)"""
    def mixed_loss(base, config, model, levels, y):
        z = common.at_least_float32(levels['embed'])
        i, j = torch.triu_indices(len(y), len(y), 1, device=y.device)                           # (M,), (M,)
        v = train_metrix.mix_embeddings(z, i, j, torch.rand(len(i)).to(y.device))               # (M, D)
        hard = train_metrix.hardest_negatives(z @ z.T, y[:, None] != y, int(k))                 # (B, B)
        return negatives_loss(base, z @ v.T, hard[:, i] & hard[:, j])
    return dict(mixed_loss=mixed_loss)


def mochi_anc_neg(k):
    """MoCHi: mixed embeddings of an anchor and one of its k hardest negatives are further negatives of it; the anchor
    has the weight lambda, uniform in (0, 0.5)"""
    def mixed_loss(base, config, model, levels, y):
        z = common.at_least_float32(levels['embed'])
        lam = torch.rand(len(y), len(y), 1).to(z) / 2                                           # (B, B, 1)
        v = F.normalize(lam * z[:, None] + (1 - lam) * z, dim=2)                                # (B, B, D): a, n
        hard = train_metrix.hardest_negatives(z @ z.T, y[:, None] != y, int(k))                 # (B, B)
        return negatives_loss(base, (z[:, None] * v).sum(dim=2), hard)
    return dict(mixed_loss=mixed_loss)


def imix():
    """i-Mix (Lee et al., ICLR 2021): each image is mixed with a random image of another class, and the mixed one is an
    anchor: lambda times its loss with the class of the first, 1 - lambda times that with the class of the second. The
    two are not among its examples; lambda comes from Beta(alpha, alpha) as in Metrix"""
    def mixed_loss(base, config, model, levels, y):
        z, i = common.at_least_float32(levels['embed']), torch.arange(len(y), device=y.device)
        negative = y[:, None] != y                                                              # (B, B)
        if not negative.any():
            return z.new_zeros(())
        j = negative.float().cpu().multinomial(1)[:, 0].to(y.device)                            # (B,)
        lam = Beta(config.alpha, config.alpha).sample(i.shape).to(z)                            # (B,)
        v = train_metrix.mixed_embeddings(config, model, levels, i, j, lam)                     # (B, D)
        of_i, of_j = (y[end][:, None] == y for end in (i, j))                                   # (B, B), (B, B)
        pair_y = lam[:, None] * of_i + (1 - lam[:, None]) * of_j
        valid = (i[:, None] != i) & (j[:, None] != i)
        return train_metrix.labelled_loss(v @ z.T, pair_y, valid, base.kind, **base.hyper).mean()
    return dict(mixed_loss=mixed_loss)


def synthesis(alpha):
    """Proxy Synthesis (Gu et al., AAAI 2021; github.com/navervision/proxy-synthesis): each embedding is mixed with the
    one before it in the batch, and so are their proxies; unless both are of one class, the two results are a new class.
    One lambda for a batch, from Beta(alpha, alpha). Proxy-Anchor of all classes"""
    real = train_metrix.clean_loss

    def clean_loss(kind, z, y, proxies, **hyper):
        z, p = common.promote_dtypes(z, F.normalize(proxies, dim=1))
        j = torch.arange(len(y), device=y.device).roll(1)
        i = (y != y[j]).nonzero()[:, 0]                                                         # (M,)
        lam = Beta(alpha, alpha).sample().expand(len(i)).to(y.device)
        new_z, new_p = (train_metrix.mix_embeddings(t, i, j[i], lam) for t in (z, p[y]))        # (M, D), (M, D)
        new_y = len(p) + torch.arange(len(i), device=y.device)
        return real(kind, torch.cat([z, new_z]), torch.cat([y, new_y]), torch.cat([p, new_p]), **hyper)
    return dict(clean_loss=clean_loss)


PATCHES = {patch.__name__: patch for patch in (mochi_neg_neg, mochi_anc_neg, imix, synthesis)}
