"""train_metrix.py -- Metrix: mixup for metric learning. A mixed example is partly a positive, partly a negative.

Venkataramanan, Psomas, Kijak, Amsaleg, Karantzalos, Avrithis. It Takes Two to Tango: Mixup for Deep
Metric Learning. ICLR 2022. arXiv:2106.04990. Equations, tables, figures and sections are numbered as there.

Idea
    Mixup trains a classifier on two images mixed, with their labels mixed likewise. In metric learning a label belongs
    to a pair: an anchor and an image of its class, a positive, have label 1; an anchor and an image of another class,
    a negative, have label 0. So a mixed example of lambda times a positive and 1 - lambda times a negative has label
    lambda: it enters the loss's sum over positives with weight lambda, and its sum over negatives with 1 - lambda.

Equations
    Eq. (4)   three ways to mix: inputs (images), features (the last feature map) or embeddings
    Eq. (7)   l(a) = tau( sigma+( sum y rho+(s(a,x)) ) + sigma-( sum (1-y) rho-(s(a,x)) ) ),
              with sums over the examples (x, y) of anchor a, and functions from Table 1
    Eq. (8)   V(a), the mixed examples of anchor a with their labels: a positive and a negative of a are mixed
              (pos-neg pairs), or a itself and a negative (anc-neg pairs)
    Eq. (9)   l~(a): Eq. (7) over V(a); for contrastive (--reduction sum) Eq. (14), for Multi-Similarity (ms) Eq. (15)
    Eq. (10)  the mean over the anchors of l(a) + w l~(a)

Symbols
    paper     here          flag              meaning
    f, g_m    model, f      -                 the network is model; here f is g_m(x), the last feature map
    a, V(a)   A; M, valid   --pairs           A anchors, M mixed examples; valid (A, M) marks those in each V(a)
    x, x'     i, j          -                 (M,) indices of the two that are mixed, among E candidates
    y         pair_y        -                 (A, M) labels of mixed examples; y has classes, in labelled_loss labels
    lambda    lam           --alpha           (M,) interpolation factor, from Beta(alpha, alpha)
    w         strength      --strength        weight of the mixed loss
    k         k             --hard-negatives  how many of an anchor's hardest negatives are mixed
    m         m             --m               margin on s, of ms and contrastive
    beta      beta          --beta            scaling factor of ms for positives;  gamma, --gamma  for negatives
    T         temperature   --temperature     temperature of ProxyNCA++

Run
    python train_metrix.py                                   # offline, a few minutes on two CPU cores
    python train_metrix.py --dataset cub --mixup feature     # the benchmark, on a GPU
    python tests/results/fig2.py runs/metrix-shapes-1        # Fig. 2 and utilization, of a trained network

Expect, R@1 with ms    birds        CUB    Cars   SOP    In-Shop
    before training    52.8
    without mixup      57.2 ± 0.6   67.8   87.8   76.9   90.1
    feature mixup      55.8 ± 1.4   71.4   89.6   81.0   92.2
    25 species of birds are measured, see tests/results (ResNet-18, three seeds, 95 % intervals): mixup changes R@1 by
    -1.4 ± 0.8. So are shapes, see tests/results/demo.md. The others are the paper's Table 2 (ResNet-50, 512
    dimensions).
"""
import random
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.distributions import Beta

import common


def labelled_loss(s, y, valid, kind, **hyper):
    """The generic loss, Eq. (7): an example counts as a positive with weight y, as a negative with weight 1 - y.

    s        (A, V) similarities of A anchors and V examples, clean or mixed; upcast to at least float32
    y        (A, V) labels from 0 to 1, for each anchor
    valid    (A, V) bool, whether the anchor has this example
    kind     name of a row of TABLE_1;  hyper  hyper-parameters of that row
    returns  (A,), the loss of each anchor; if an anchor has no positives, or no negatives, that term is 0
    """
    s = common.at_least_float32(s)
    y = y.to(s.dtype)
    # Eq. (7): tau( sigma+( sum y rho+(s) ) + sigma-( sum (1 - y) rho-(s) ) ); tau is the identity, except for lifted.
    # Eq. (3) is Eq. (7) with the labels 1 and 0 of Eq. (5) and (6).
    # Eq. (9) is Eq. (7) over mixed examples. For pos-neg pairs it is written out as Eq. (13).
    pull, push = TABLE_1[kind](s, y * valid, (1 - y) * valid, **hyper)                          # (A,), (A,)
    return pull + push


# ---- Table 1: rows as functions of the similarities s, and of an example's weights: `positive` is y, and `negative` is
# 1 - y (both 0 if it is not valid), all (A, V). A mask serves as weights 1 and 0. A row is sigma and rho in one: it
# returns the two terms of Eq. (7), pull and push, both (A,). Proxy-Anchor follows Eq. (4) of its own paper.


def contrastive(s, positive, negative, m=0.5, reduction='mean'):
    """Pull and push, two sums:
    Eq. (1)   sum_p -s(a,p)           sum_n [s(a,n) - m]+
    Eq. (14)  sum_v -lambda s(a,v)    sum_v (1 - lambda) [s(a,v) - m]+

    'sum' is the equation as printed. 'mean' divides the first sum by the number of examples with y > 0, and the second
    by the number of those with y < 1 and s > m. As sums, the 4 x 95 = 380 mixed examples that an anchor has
    with pos-neg pairs in a batch of 20 classes x 5 images would outweigh its 99 clean pairs.
    """
    if reduction not in ('mean', 'sum'):
        raise ValueError(f"reduction is 'mean' or 'sum', not {reduction!r}")
    pull = -s * positive                                                # (A, V)
    push = (s - m).clamp_min(0) * negative                              # (A, V)
    if reduction == 'mean':
        pull = pull / (positive > 0).sum(dim=1, keepdim=True).clamp_min(1)
        push = push / (push > 0).sum(dim=1, keepdim=True).clamp_min(1)
    return pull.sum(dim=1), push.sum(dim=1)


def ms(s, positive, negative, beta=18.0, gamma=75.0, m=0.77):
    """Pull and push, two logarithms:
    Eq. (2)   1/beta log(1 + sum_p exp(-beta (s(a,p) - m)))           1/gamma log(1 + sum_n exp(gamma (s(a,n) - m)))
    Eq. (15)  1/beta log(1 + sum_v lambda exp(-beta (s(a,v) - m)))    1/gamma log(1 + sum_v (1 - lambda) exp(gamma ...))
    """
    pull = log1p_sum_exp(-beta * (s - m), positive) / beta
    push = log1p_sum_exp(gamma * (s - m), negative) / gamma
    return pull, push


def proxy_anchor(s, positive, negative, alpha=32.0, delta=0.1):
    """The two logarithms of Proxy-Anchor Eq. (4), without its divisors

    alpha is beta and gamma of Table 1, and delta is m. Table 1 has s - m also on negatives, where Proxy-Anchor has
    s + delta, and it has factors 1 / beta and 1 / gamma, which Proxy-Anchor has not.
    """
    pull = log1p_sum_exp(-alpha * (s - delta), positive)
    push = log1p_sum_exp(alpha * (s + delta), negative)
    return pull, push


def log1p_sum_exp(t, weight):
    """log(1 + sum of weight * exp(t)) of each row, without overflow.  (A, V), (A, V) -> (A,)"""
    # The weights, lambda and 1 - lambda in Eq. (15), enter here: weight exp(t) = exp(t + log weight). Where one is 0,
    # exp(-inf) = 0 is added. The 0 that pads a row is the exponent of the "1 +".
    return F.pad(t + weight.log(), (1, 0)).logsumexp(dim=1)


def log_sum_exp(t, weight):
    """log(sum of weight * exp(t)) of each row, without overflow; 0 for a row whose weights are all 0."""
    # The first column is log 0 = -inf, which adds nothing. Where all weights of a row are 0, it is log 1 = 0 instead.
    first = weight.any(dim=1, keepdim=True).logical_not().log()                                 # (A, 1)
    return torch.cat([first, t + weight.log()], dim=1).logsumexp(dim=1)


def nca(s, positive, negative):
    """-log sum_p exp(s(a,p)), and log sum_n exp(s(a,n))"""
    return -log_sum_exp(s, positive), log_sum_exp(s, negative)


TABLE_1 = {
    'contrastive': contrastive, 'ms': ms, 'proxy_anchor': proxy_anchor,
    # The rows from here on are for the reader; nothing below trains with them.
    'binomial': lambda s, positive, negative, beta=18.0, gamma=75.0, m=0.77: (
        log1p_sum_exp(-beta * (s - m), positive), log1p_sum_exp(gamma * (s - m), negative)),
    # Here tau is [.]+, so the first value is [.]+ of the sum of both terms, and the second is 0.
    'lifted': lambda s, positive, negative, m=0.5: (
        (log_sum_exp(-s, positive) + log_sum_exp(s - m, negative)).clamp_min(0), 0),
    'nca': nca,                                                         # and ProxyNCA
    # s / T as in Table 1; 1/9 is of ProxyNCA++. Training takes the softmax of proxy_logits instead.
    'proxynca_pp': lambda s, positive, negative, temperature=1 / 9: nca(s / temperature, positive, negative)}


def clean_loss(kind, z, y, proxies=None, epsilon=None, **hyper):
    """The first term of Eq. (10), the clean loss of a batch z (B, D) with class labels y (B,) -> scalar. For ms and
    contrastive, it is the mean of Eq. (3) over the anchors: positives have label 1, Eq. (5), and negatives 0, Eq. (6).
    With epsilon, the loss has only pairs kept by the miner. An anchor without positives keeps none, and adds 0.

    kind     ms, contrastive, proxy_anchor or proxynca_pp;  hyper  its hyper-parameters
    proxies  (C, D), for the last two;  epsilon  tolerance of the miner of ms, None: no miner
    """
    z = common.at_least_float32(z)
    if kind == 'proxynca_pp':
        # Unlike Eq. (3) with its row of Table 1, the denominator includes the positive proxy, and logits are 2 s / T.
        return F.cross_entropy(proxy_logits(z, proxies, **hyper), y)
    if kind == 'proxy_anchor':
        z, proxies = common.promote_dtypes(z, proxies)
        s = F.normalize(proxies, dim=1) @ z.T                                                   # (C, B)
        positive = torch.arange(len(proxies), device=y.device)[:, None] == y                    # (C, B)
        pull, push = proxy_anchor(s, positive, ~positive, **hyper)                              # (C,), (C,)
        return pull.sum() / positive.any(dim=1).sum() + push.mean()     # |P+| classes in the batch; |P| is C
    s = z @ z.T                                                                                 # (B, B)
    same = y[:, None] == y                                                                      # (B, B)
    positive = same & ~torch.eye(len(y), dtype=torch.bool, device=y.device)                     # P(a) in Eq. (5)
    negative = ~same                                                                            # N(a) in Eq. (6)
    if epsilon is not None:
        # The miner of train_ms.py, where it is explained. Both tests are written with "not", so that a pair whose
        # similarity is NaN is kept, and the loss shows it.
        hardest_positive = s.masked_fill(~positive, float('inf')).amin(dim=1, keepdim=True)     # (B, 1)
        hardest_negative = s.masked_fill(~negative, float('-inf')).amax(dim=1, keepdim=True)    # (B, 1)
        positive = positive & ~(s - epsilon >= hardest_negative)
        negative = negative & ~(s + epsilon <= hardest_positive)
    # Positives have label 1, the others 0. The anchor itself and pairs that the miner dropped are not valid.
    return labelled_loss(s, positive, positive | negative, kind, **hyper).mean()


def proxy_logits(v, proxies, temperature=1 / 9):
    """Logits of ProxyNCA++ for queries v (M, D) and proxies p (C, D) -> (M, C)

    They are -|v - p|^2 / temperature. The softmax over the proxies cancels |v|^2, and |p|^2 = 1: 2 v.p / temperature is
    left, which is linear in v.
    """
    v, proxies = common.promote_dtypes(v, proxies)
    return 2 / temperature * v @ F.normalize(proxies, dim=1).T


# ---- mixed examples, in the order of the equations


class MixupConfig(NamedTuple):
    """What a step mixes, and how"""
    mixup: str                                      # input, feature or embed
    pairs: str                                      # pos-neg, anc-neg or pos-pos
    k: int                                          # hardest negatives of each anchor that are mixed; None: all
    alpha: float                                    # of Beta(alpha, alpha)
    clean_bn: bool = False                          # as in --clean-bn


class BaseLoss(NamedTuple):
    """A base loss: the name of a row of TABLE_1, its hyper-parameters, and proxies (C, D) if it has any"""
    kind: str
    hyper: dict
    proxies: torch.Tensor = None


def mixed_loss(base, config, model, levels, y):
    """The second term of Eq. (10), without w: the mean of Eq. (9) over the anchors -> scalar

    base    a BaseLoss;  config  a MixupConfig;  y  (B,) class labels
    levels  the clean batch where it may be mixed: dict(input=images, feature=f, embed=z), (B, 3, S, S), (B, c, h, w)
            and (B, D)
    """
    z = common.at_least_float32(levels['embed'])
    cand_z, cand_y, anchor = candidates_and_anchors(base, z, y)                     # (E, D), (E,), (A,)
    anchor_z, anchor_y = cand_z[anchor], cand_y[anchor]                             # (A, D), (A,)
    # Eq. (8): the pairs M(a), with one lambda for each pair and for all anchors. It is sampled on the CPU, because
    # torch 2.6 has no Beta on a Mac's GPU.
    i, j = choose_pairs(config.pairs, y, cand_y)                                    # (M,), (M,)
    lam = Beta(config.alpha, config.alpha).sample(i.shape).to(y.device)             # (M,)
    pair_y, valid = pair_labels(cand_y, anchor_y, i, j, lam)                        # (A, M)
    if config.pairs == 'pos-pos':                   # two positives of a, so the label is 1
        positive = anchor_y[:, None] == cand_y                                      # (A, E)
        pair_y, valid = torch.ones_like(pair_y), positive[:, i] & positive[:, j]
    # In anc-neg pairs, one of the two is the anchor: S(a) x U-(a). In the others, as U+(a) x U-(a), neither is.
    with_anchor = (anchor[:, None] == i) | (anchor[:, None] == j)                   # (A, M)
    valid = valid & (with_anchor == (config.pairs == 'anc-neg'))
    if config.k:
        hard = hardest_negatives(anchor_z @ z.T, anchor_y[:, None] != y, config.k)  # (A, B)
        hard = F.pad(hard, (0, len(cand_y) - len(y)))                               # (A, E): a proxy is never one
        valid = valid & (hard[:, i] | hard[:, j])
    used = valid.any(dim=0).nonzero()[:, 0]         # only what some anchor uses is mixed; M counts these from here
    if not len(used):
        return z.new_zeros(())
    i, j, lam = i[used], j[used], lam[used]
    v = mixed_embeddings(config, model, dict(levels, embed=cand_z), i, j, lam)      # Eq. (4): (M, D)
    if base.kind == 'proxynca_pp':                  # a mixed example is a query; the anchors only chose the pairs
        logits = proxy_logits(v, base.proxies, **base.hyper)                        # (M, C)
        to_i, to_j = (F.cross_entropy(logits, y[end], reduction='none') for end in (i, j))          # (M,), (M,)
        return (lam * to_i + (1 - lam) * to_j).mean()
    s = anchor_z @ v.T                                                              # (A, M)
    return labelled_loss(s, pair_y[:, used], valid[:, used], base.kind, **base.hyper).mean()        # Eq. (9)


def candidates_and_anchors(base, z, y):
    """The E candidates that may be mixed, and which of them are the A anchors of the mixed loss
    The images are both. The anchors of Proxy-Anchor are the proxies of the classes in the batch; they follow the
    images.  z (B, D), y (B,) -> cand_z (E, D), cand_y (E,), and anchor (A,), indices into these
    """
    if base.kind != 'proxy_anchor':
        return z, y, torch.arange(len(y), device=y.device)
    present = y.unique()
    proxies = F.normalize(common.at_least_float32(base.proxies), dim=1)[present]
    anchor = len(y) + torch.arange(len(present), device=y.device)
    return torch.cat([z, proxies]), torch.cat([y, present]), anchor


def choose_pairs(pairs, y, cand_y):
    """Indices of all pairs i < j of candidates that some anchor may have in M(a), two images or an image and a proxy.
    y (B,), cand_y (E,) -> (M,), (M,)"""
    if pairs == 'pos-pos':
        return torch.triu_indices(len(y), len(y), 1, device=y.device).unbind()
    if pairs == 'pos-neg':
        return cross_class_pairs(y)
    i, j = cross_class_pairs(cand_y)
    with_image = i < len(y)
    return i[with_image], j[with_image]


def cross_class_pairs(y):
    """The M unordered pairs i < j of different classes.  (B,) -> (M,), (M,)"""
    return (y[:, None] != y).triu().nonzero().unbind(dim=1)


def pair_labels(y, anchor_y, i, j, lam):
    """Eq. (8): labels of M mixed examples for A anchors of classes anchor_y -> pair_y, valid; both (A, M)

    A mixed example is valid for an anchor if exactly one of the two, of classes y[i] and y[j], has the anchor's class.
    Its label, mixed from 1 and 0, is the interpolation factor of that one: lam for i, 1 - lam for j.
    """
    i_is_positive = anchor_y[:, None] == y[i]                                       # (A, M)
    j_is_positive = anchor_y[:, None] == y[j]                                       # (A, M)
    pair_y = torch.where(i_is_positive, lam, 1 - lam)                               # (A, M)
    return pair_y, i_is_positive ^ j_is_positive


def hardest_negatives(s, negatives, k):
    """Marks each anchor's k hardest negatives, those with the highest similarity.  (A, B), (A, B) -> (A, B) bool"""
    s = s.masked_fill(~negatives, float('-inf'))
    hardest = s.topk(min(k, s.shape[1]), dim=1).indices                             # (A, k)
    return negatives & torch.zeros_like(negatives).scatter(1, hardest, True)


def mixed_embeddings(config, model, levels, i, j, lam):
    """Eq. (4): embeddings v of M mixed examples. What is mixed passes through the rest of the network. -> (M, D)"""
    if config.mixup == 'input':                     # f(lam x + (1 - lam) x')
        # With --clean-bn, the images update copies of BatchNorm's running statistics.
        buffers = {name: t.clone() for name, t in model.named_buffers()} if config.clean_bn else {}
        return torch.func.functional_call(model, buffers, mix(levels['input'], i, j, lam))
    if config.mixup == 'feature':                   # f_m(lam g_m(x) + (1 - lam) g_m(x')), where f_m begins with pooling
        return model.project(mix_features(levels['feature'], i, j, lam, model.pool))
    return mix_embeddings(levels['embed'], i, j, lam)


def mix(x, i, j, lam):
    """lam x_i + (1 - lam) x_j for M pairs.  x (B, ...), i, j, lam (M,) -> (M, ...)"""
    lam = lam.view(-1, *[1] * (x.dim() - 1)).to(x.dtype)
    # On a CPU, index_select adds up its gradient in a fixed order, so equal seeds give equal runs. x[i] does not.
    return lam * x.index_select(0, i) + (1 - lam) * x.index_select(0, j)


def mix_embeddings(z, i, j, lam):
    """Eq. (4), embedding mixup: lam f(x) + (1 - lam) f(x'), L2-normalized.  z (B, D) -> (M, D)"""
    return F.normalize(mix(common.at_least_float32(z), i, j, lam), dim=1)


def mix_features(f, i, j, lam, pool='avg+max'):
    """Eq. (4), feature mixup: the pooled features of mixed maps, pool(lam f[i] + (1 - lam) f[j])
    f (B, c, h, w), upcast to at least float32; i, j, lam (M,); pool avg, max or avg+max -> (M, c)
    With a ResNet-50 at 224 px, the mixed maps of all pairs of a batch of 100 would take 2 GB. So they are made for a
    few pairs at a time, and only to find their maxima. Value and gradient are exact.
    """
    f = common.at_least_float32(f)
    p = 0
    if 'avg' in pool:                               # the average of a mixed map is that of two averages, mixed
        p = p + mix(f.mean(dim=(2, 3)), i, j, lam)                                  # (M, c)
    if 'max' in pool:                               # its maximum is the two maps at one position, mixed
        h, w = f.shape[2:]
        lam = lam.to(f.dtype)[:, None]                                              # (M, 1)
        peaks = []
        with torch.no_grad():
            for i_, j_, lam_ in zip(i.split(20), j.split(20), lam.split(20)):
                mixed = f[j_].lerp_(f[i_], lam_[..., None, None])                   # (20, c, h, w), in place of a copy
                peaks.append(F.max_pool2d(mixed, (h, w), return_indices=True)[1].flatten(1))        # (20, c)
        peak = torch.cat(peaks)                                                     # (M, c)
        maps = f.permute(0, 2, 3, 1).flatten(0, 2)                                  # (B T, c)
        f_i, f_j = (maps.gather(0, k[:, None] * (h * w) + peak) for k in (i, j))    # (M, c)
        p = p + f_j.lerp(f_i, lam)
    return p


# ---- analysis: Sections 3.6 and 4.3


def positivity_threshold(lam, beta, gamma, m):
    """The similarity s(a, v) up to which a single mixed example v acts as a positive of its anchor a in ms: the
    right-hand side of Eq. (24). Like Fig. 2, it is about the mixed term alone: l~(a) without l(a) of Eq. (10).

    lam      number or tensor, in [0, 1]: interpolation factor of the positive
    beta, gamma > 0, m: hyper-parameters of ms, Eq. (2)
    returns  tensor like lam, in float64; -inf for lam = 0, inf for lam = 1
    """
    return torch.as_tensor(lam, dtype=torch.float64).logit() / (beta + gamma) + m               # Eq. (24)


# ---- recipes and flags

# The recipe of each dataset: defaults of the flags, explained at common.BASE.
# Table 4 and Section B.1 state epochs, batches, optimizer, learning rates, weight decay and decay rates, but no decay
# rate for ProxyNCA++ on CUB and Cars, which gets that of ms. From the released code come smallest crop, warm-up,
# clipping, proxies at 100 times the learning rate, BatchNorm frozen on CUB and Cars, and decays every 10 epochs, the
# default there. Its commands for contrastive with mixup freeze BatchNorm on SOP and In-Shop, and have a warm-up of 5
# on In-Shop; here BatchNorm trains, and the warm-up is 1.
CUB = dict(dim=512, pool='avg+max', freeze_bn=True, min_crop=0.08,
           epochs=100, batch_size=100, per_class=0,
           optimizer='adamw', lr=1e-4, proxy_lr_mult=100, weight_decay=1e-4, clip=10.0,
           schedule='step', decay_epochs=10, decay_rate=0.5, warmup=5)
SOP = CUB | dict(freeze_bn=False, per_class=5, lr=3e-5, decay_rate=0.25, warmup=1)
DEFAULTS = {
    'cub': CUB,
    'cars': CUB,
    'sop': SOP,
    'inshop': SOP | dict(lr=1e-4),
    'reality-check': dict(proxy_lr_mult=6000),      # as train_proxy_anchor.py; --per-class stays 4, for pos-neg pairs
}
# What depends on the loss as well. The paper does not state the margin of contrastive.
CONTRASTIVE = dict(vectors=dict(epochs=3), cub=dict(decay_rate=0.1), cars=dict(decay_rate=0.1), sop=dict(warmup=5))
DEFAULTS |= {(dataset, 'contrastive'): dict(m=0.5) | CONTRASTIVE.get(dataset, {})
             for dataset in (*common.BASE, 'reality-check')}
DEFAULTS['vectors', 'proxynca_pp'] = dict(epochs=8)

# The flags that each loss uses. --proxy-alpha is alpha of proxy_anchor: --alpha is that of Beta.
USES = dict(contrastive='m reduction', ms='beta gamma m epsilon', proxy_anchor='proxy_alpha delta proxy_lr_mult',
            proxynca_pp='temperature proxy_lr_mult')


def plan(args):
    """Prints and returns what a step may mix: for each type of --mixup, MixupConfigs that differ in the set of pairs.
    [] without mixup"""
    choices = []
    for mixup, k in zip(args.mixup, args.hard_negatives * len(args.mixup)):     # one K serves all types
        if mixup == 'none':
            break
        sets = ['pos-neg', 'anc-neg'] if args.pairs == 'both' else [args.pairs]             # Section 4.1
        if args.loss == 'proxynca_pp':              # with all negatives, these are all cross-class pairs
            sets = ['anc-neg']
        elif args.loss == 'proxy_anchor' and args.pairs == 'both' and mixup != 'embed':
            sets = ['pos-neg']                      # the anchor is a proxy: it has no image and no feature map
        if k == 'auto' and mixup == 'input':
            k = 1 if 'feature' in args.mixup else 3     # 3 is in Section B.2, 1 in Table 6
        k = None if k in ('auto', 'all') or args.pairs == 'pos-pos' else k
        print(f'{args.loss}, {mixup} mixup: {" or ".join(sets)}' + (f', {k} hardest negatives' if k else ''))
        choices.append([MixupConfig(mixup, pairs, k, args.alpha, args.clean_bn) for pairs in sets])
    return choices


def get_args(argv=None):
    parser = common.parser(__doc__, NOTES, __file__)
    add = parser.add_argument_group('Metrix').add_argument
    above_0 = common.at_least(1e-3, float)
    cosine = common.between(-1, 1)
    add('--loss', choices=list(USES), default='ms', help='base loss')
    add('--mixup', nargs='+', choices=['none', 'input', 'feature', 'embed'], default=['feature'],
        help='what is mixed; if several are given, each iteration draws one')
    add('--pairs', choices=['both', 'pos-neg', 'anc-neg', 'pos-pos'], default='both',
        help='which pairs are mixed; both: each iteration draws pos-neg or anc-neg')
    add('--hard-negatives', nargs='+', type=common.number_or(common.at_least(1), 'all', 'auto'), default=['auto'],
        metavar='K', help='how many hardest negatives of an anchor are mixed: one K, or one for each type of --mixup; '
                          'auto is all, but for input 3, or 1 if feature is given as well')
    add('--alpha', type=above_0, default=2.0, help='lambda comes from Beta(alpha, alpha)')
    add('--strength', type=common.at_least(0, float), default=0.4, help='w, weight of the mixed loss')
    add('--beta', type=above_0, default=18.0, help='ms: scaling factor of the positives')
    add('--gamma', type=above_0, default=75.0, help='ms: scaling factor of the negatives')
    add('--m', type=cosine, default=0.77, help='ms and contrastive: margin')
    add('--epsilon', type=common.number_or(common.between(-2, 2), 'off'), default=0.39,
        help='ms: tolerance of the miner in the clean loss; off: no miner')
    add('--reduction', choices=['mean', 'sum'], default='mean', help='contrastive: mean or sum over examples')
    add('--proxy-alpha', type=above_0, default=32.0, help='proxy_anchor: scaling factor')
    add('--delta', type=cosine, default=0.1, help='proxy_anchor: margin')
    add('--temperature', type=common.at_least(1e-4, float), default=1 / 9, help='proxynca_pp: divides distances^2')
    # 100 on the benchmarks. Without pretrained weights, --lr is 20 times that of CUB, and on vectors 10 times.
    add('--proxy-lr-mult', type=common.at_least(0, float), default=10.0, help='rate of the proxies, times --lr')
    add('--clean-bn', action=common.SWITCH, default=False,
        help='input: the running statistics of trained BatchNorm are those of clean images only')
    args = common.parse(parser, DEFAULTS, argv, uses={'loss': USES})
    check(args, parser.typed(argv))
    return args


def check(args, typed):
    """Refuses flags that would have no effect on the loss, and what the paper leaves undefined."""
    if 'input' not in args.mixup or args.freeze_bn:
        common.reject(typed, ['clean_bn'], 'frozen BatchNorm, or where the network sees no mixed images')
    if args.pairs == 'pos-pos':
        common.reject(typed, ['hard_negatives'], '--pairs pos-pos')
    if args.loss == 'proxynca_pp':
        common.reject(typed, ['pairs'], '--loss proxynca_pp, where a mixed example is a query')
    if 'none' in args.mixup:
        common.reject(typed, ['pairs', 'hard_negatives', 'strength', 'alpha'], '--mixup none')
        if len(args.mixup) > 1:
            raise common.UsageError('--mixup none cannot be combined with other types')
    if 'proxy' not in args.loss:
        common.require_two_classes(args)
    if 'input' in args.mixup and args.dataset == 'vectors':
        raise common.UsageError('--mixup input mixes images; --dataset vectors has none: take --mixup feature')
    if len(args.hard_negatives) not in (1, len(args.mixup)):
        raise common.UsageError('--hard-negatives: give one K, or one for each of the types of --mixup')
    if args.loss == 'proxy_anchor' and args.pairs == 'anc-neg' and args.mixup != ['embed']:
        raise common.UsageError('--pairs anc-neg with --loss proxy_anchor mixes proxies, which have no input and no '
                                'feature map: take --mixup embed, or --pairs pos-neg')


def main(argv=None):
    args = get_args(argv)
    common.set_seed(args.seed)
    choices = plan(args)
    data = common.dataset_from(args)
    model = common.build(args, data=data)
    if 'input' in args.mixup:       # mixed images differ in number, and cudnn would time its algorithms anew
        torch.backends.cudnn.benchmark = False
    groups = [dict(params=model.parameters())]
    loss_params = {}
    if 'proxy' in args.loss:                        # with proxies as in train_proxy_anchor.py
        C = data.train.num_classes
        proxies = torch.randn(C, model.dim) * (2 / C) ** 0.5
        loss_params = dict(proxies=torch.nn.Parameter(proxies.to(args.device)))                     # (C, D)
        groups.append(dict(params=[loss_params['proxies']], lr=args.lr * args.proxy_lr_mult))
    optimizer = common.make_optimizer(args, groups)
    hyper = {flag.removeprefix('proxy_'): getattr(args, flag) for flag in USES[args.loss].split()
             if flag not in ('epsilon', 'proxy_lr_mult')}
    epsilon = args.epsilon if args.loss == 'ms' and args.epsilon != 'off' else None

    def step(images, labels):
        f = model.features(images)                                      # (B, c, h, w), once per clean image
        z = model.head(f)                                               # (B, D)
        loss = clean_loss(args.loss, z, labels, epsilon=epsilon, **loss_params, **hyper)
        if choices:
            # Sections B.4 and B.2: the type of mixup is drawn in each iteration, and so is the set of pairs.
            config = random.choice(random.choice(choices))
            base = BaseLoss(args.loss, hyper, **loss_params)
            levels = dict(input=images, feature=f, embed=z)
            loss = loss + args.strength * mixed_loss(base, config, model, levels, labels)           # Eq. (10)
        return loss

    return common.train(args, model, data, step, optimizer, loss_params)


NOTES = """
What differs from the paper
    1. Two examples are mixed once, with one lambda, and all anchors share the mixed example. Eq. (8) seems to draw
       lambda anew for each pair of each anchor, and U+(a)^2 of Section B.4 has each pos-pos pair in both orders, and a
       positive with itself. Mixed embeddings are L2-normalized here, as in the released code.
    2. Contrastive has means where Eq. (1) and (14) have sums; --reduction sum is as printed.
    3. The clean loss of ms has the miner of the released code, which the paper does not mention.
    4. Proxy-Anchor is that of its own paper: it has s + delta on negatives, where Table 1 has s - m, and no factors
       1 / beta and 1 / gamma. Its mixed loss is the mean over the classes in the batch; by Eq. (10) it would be divided
       by all C proxies. Its anc-neg pairs exist in embedding mixup only: a proxy has no image or feature map.
    5. ProxyNCA++ is that of its own paper: Eq. (3) with Table 1 has s / T, and leaves the positive proxy out of the sum
       over negatives; here logits are 2 s / T, and the softmax includes it. The positives and negatives of Table 1 are
       proxies, which input and feature mixup cannot mix, though the paper has results for both. Here a mixed example
       of two classes is a query with an interpolated target: lam CE(v, y_i) + (1 - lam) CE(v, y_j).
What differs from the released code: github.com/billpsomas/Metrix_ICLR22 (7ce730c) for contrastive, and
github.com/billpsomas/metrix (b679703) for ms, which has embedding mixup only
    6. All positives, all anchors and each anchor's own hard negatives take part. In the code for contrastive,
       feature and embedding mixup have only an anchor's first positive, anc-neg pairs only anchors without one, and
       hard negatives of the first anchor. In the code for ms, an anchor mixes its least similar positive alone.
    7. Both codes have one lambda for a batch, and Adam. Both report the best epoch on the test set.
    8. The code for contrastive has Euclidean distances, k = 1, 60 epochs, and w = 0.3 for anc-neg pairs of embeddings.
       It has the mean over all active pairs of the batch. Here it is over those of each anchor, and then over all
       anchors; one without positives, as about 37 of 100 in random batches of CUB, counts with a positive term of 0.
    9. The code for ms does not compute Eq. (15), see tests/results/why.md: mixed examples are positives only, and a
       mask over pairs of images is applied by position to a table of mixed examples, mostly of other anchors.
   10. On CUB, the command for ms with mixup trains 100 epochs and halves the rate every 10, that without mixup 60 and
       every 5. Here both train 100 epochs, as in the paper, and halve it every 10.
Tables and figures of the paper
    Tables 2 and 5: --loss and --mixup. Table 6 (Cars) and Table 7 (CUB, --dim 128), with --loss contrastive: --mixup,
    --pairs and --hard-negatives; the last row of both has --mixup input feature embed. Fig. 6 (Cars): --mixup and
    --strength, with contrastive. Fig. 2, and utilization with mixed examples: tests/results/fig2.py. Section 4.3, with
    contrastive: eval.py --analyse.
Cost
    With batches of 20 x 5 images and k = 3, input mixup sends up to 300 (anc-neg) or 1,200 (pos-neg) more images
    through the network. Unless --clean-bn is given, they count in the running statistics of trained BatchNorm. With
    several hundred images, --hard-negatives 40 saves time.
"""


if __name__ == '__main__':
    common.cli(main)
