"""train_metrix.py -- Metrix: mixup for metric learning. A mixed example is partly a positive, partly a negative.

Venkataramanan, Psomas, Kijak, Amsaleg, Karantzalos, Avrithis. It Takes Two to Tango: Mixup for Deep Metric Learning.
ICLR 2022. arXiv:2106.04990. In metric learning, a label belongs to a pair: 1 for an anchor and a positive, 0 for an
anchor and a negative. Two examples are mixed as images, features or embeddings, Metrix Eq. (4). A positive mixed with a
negative has label lambda: it counts as a positive with weight lambda, and as a negative with weight 1 - lambda.

    paper    code       flag         meaning
    a        -          -            an anchor; A is the number of anchors
    x, x'    i, j       --pairs      (M,) indices of the two examples that are mixed, for M mixed examples
    y        pair_y     -            (A, M) labels of mixed examples, from 0 to 1. Class labels y are (B,)
    lambda   lam        --alpha      (M,) interpolation factors, from Beta(alpha, alpha)
    w        strength   --strength   weight of the mixed loss in Eq. (10), the mixup strength

    python train_metrix.py --dataset cub --mixup feature     # without flags: a small built-in dataset, on a CPU
"""
import random
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.distributions import Beta

import common


def labelled_loss(s, y, valid, kind, **hyper):
    """The generic loss, Eq. (7): an example is a positive with weight y, and a negative with weight 1 - y.

    l(a) = tau( sigma+( sum y rho+(s(a,x)) ) + sigma-( sum (1 - y) rho-(s(a,x)) ) )

    The sums are over the examples x of anchor a, with labels y: U(a), or V(a) if mixed. The functions are in TABLE_1.

    s        (A, V) similarities of A anchors and V examples, clean or mixed; half precision is upcast to float32
    y        (A, V) labels from 0 to 1, for each anchor
    valid    (A, V) bool, whether the example is one of the anchor's
    kind     key of TABLE_1;  hyper  hyper-parameters of this loss
    returns  (A,), the loss of each anchor; the term of the positives, or of the negatives, is 0 if there are none
    """
    s = common.at_least_float32(s)
    y = y.to(s.dtype)
    # Eq. (7); tau is the identity, except for lifted, which applies it itself. With labels 1 and 0, Eq. (5) and (6), it
    # is Eq. (3). Over mixed examples it is Eq. (9), which Eq. (13) writes out for pos-neg pairs.
    pull, push = TABLE_1[kind](s, y * valid, (1 - y) * valid, **hyper)                          # (A,), (A,)
    return pull + push


# ---- Table 1. A function has sigma and rho of one loss, and returns the two terms of Eq. (7), pull (A,) and push (A,).
# Its arguments are the similarities s, and the weights of the examples: `positive` is y and `negative` is 1 - y, both 0
# where an example is not valid, all (A, V). Masks work as weights of 1 and 0.


def contrastive(s, positive, negative, m=0.5, reduction='mean'):
    """The two sums of
    Eq. (1)   sum_p -s(a,p)           + sum_n [s(a,n) - m]+
    Eq. (14)  sum_v -lambda s(a,v)    + sum_v (1 - lambda) [s(a,v) - m]+    over the mixed examples v of pos-neg pairs

    With reduction='mean', the first sum is divided by the number of positives (weights above 0), and the second by the
    number of its terms that are not 0. Otherwise the mixed loss would outweigh the clean loss: in a batch of 20 classes
    x 5 images, an anchor has 4 + 95 clean pairs, and with pos-neg pairs 4 x 95 = 380 mixed examples.
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
    """The two terms of
    Eq. (2)   1/beta log(1 + sum_p exp(-beta (s(a,p) - m)))         + 1/gamma log(1 + sum_n exp(gamma (s(a,n) - m)))
    Eq. (15)  1/beta log(1 + sum_v lambda exp(-beta (s(a,v) - m)))  + 1/gamma log(1 + sum_v (1 - lambda) exp(gamma ...))
    where v are the mixed examples of pos-neg pairs
    """
    pull = log1p_sum_exp(-beta * (s - m), positive) / beta
    push = log1p_sum_exp(gamma * (s - m), negative) / gamma
    return pull, push


def proxy_anchor(s, positive, negative, alpha=32.0, delta=0.1):
    """The two logarithms of Proxy-Anchor Eq. (4), without its divisors. alpha is beta and gamma of Table 1, and delta
    is m. In Table 1, negatives have s - m in place of s + delta, and the terms have factors 1 / beta and 1 / gamma."""
    pull = log1p_sum_exp(-alpha * (s - delta), positive)
    push = log1p_sum_exp(alpha * (s + delta), negative)
    return pull, push


def log1p_sum_exp(t, weight):
    """Numerically stable log(1 + sum of weight * exp(t)) of each row.  (A, V), (A, V) -> (A,)"""
    # The weights, lambda and 1 - lambda in Eq. (15), enter here: weight exp(t) = exp(t + log weight), and exp(-inf) = 0
    # for a weight of 0. Each row is padded with a 0, because exp(0) is the "1 +".
    return F.pad(t + weight.log(), (1, 0)).logsumexp(dim=1)


def log_sum_exp(t, weight):
    """Numerically stable log(sum of weight * exp(t)) of each row; 0 for a row whose weights are all 0"""
    empty = (weight == 0).all(dim=1, keepdim=True)                                              # (A, 1)
    first = empty.float().log()         # log 1 = 0 for an empty row, the result; else log 0 = -inf, which adds nothing
    return torch.cat([first, t + weight.log()], dim=1).logsumexp(dim=1)


def nca(s, positive, negative):
    """-log sum_p exp(s(a,p)), and log sum_n exp(s(a,n))"""
    return -log_sum_exp(s, positive), log_sum_exp(s, negative)


TABLE_1 = {
    'contrastive': contrastive, 'ms': ms, 'proxy_anchor': proxy_anchor,
    # The following are not used in training, and complete Table 1. Training with ProxyNCA++ uses proxy_logits.
    'binomial': lambda s, positive, negative, beta=18.0, gamma=75.0, m=0.77: (
        log1p_sum_exp(-beta * (s - m), positive), log1p_sum_exp(gamma * (s - m), negative)),
    # Here tau is [.]+, so the first value is [.]+ of the sum of both terms, and the second is 0.
    'lifted': lambda s, positive, negative, m=0.5: (
        (log_sum_exp(-s, positive) + log_sum_exp(s - m, negative)).clamp_min(0), 0),
    'nca': nca,                                                         # and ProxyNCA
    # s / T as in Table 1; T = 1/9 comes from ProxyNCA++.
    'proxynca_pp': lambda s, positive, negative, temperature=1 / 9: nca(s / temperature, positive, negative)}


def clean_loss(kind, z, y, proxies=None, epsilon=None, **hyper):
    """The first term of Eq. (10), the clean loss of a batch z (B, D) with class labels y (B,) -> scalar. For ms and
    contrastive it is the mean of Eq. (3) over the anchors: positives have label 1, Eq. (5), and negatives 0, Eq. (6).

    kind     ms, contrastive, proxy_anchor or proxynca_pp;  hyper  its hyper-parameters
    proxies  (C, D), for the last two
    epsilon  tolerance of the miner of ms, which drops easy pairs as in train_ms.py; None: no miner. An anchor without
             positives keeps no negatives, because it has no hardest positive, and vice versa.
    """
    z = common.at_least_float32(z)
    if kind == 'proxynca_pp':
        # The denominator of this softmax includes the positive proxy, which Eq. (3) with the loss of Table 1 leaves
        # out. The logits are 2 s / T, and in Table 1 they are s / T.
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
        # Keep a positive if s - epsilon < hardest negative, and a negative if s + epsilon > hardest positive. This is
        # written as "not >=" and "not <=", because comparisons with NaN are false: so NaN pairs are kept, and the loss
        # becomes NaN as well.
        hardest_positive = s.masked_fill(~positive, float('inf')).amin(dim=1, keepdim=True)     # (B, 1)
        hardest_negative = s.masked_fill(~negative, float('-inf')).amax(dim=1, keepdim=True)    # (B, 1)
        positive = positive & ~(s - epsilon >= hardest_negative)
        negative = negative & ~(s + epsilon <= hardest_positive)
    # The anchor itself, and pairs that the miner dropped, are not valid.
    return labelled_loss(s, positive, positive | negative, kind, **hyper).mean()


def proxy_logits(v, proxies, temperature=1 / 9):
    """Logits of ProxyNCA++, -|v - p|^2 / temperature, for queries v (M, D) and normalized proxies p (C, D) -> (M, C)

    |v - p|^2 = |v|^2 + 1 - 2 v.p, and the softmax over the proxies cancels |v|^2 + 1.
    """
    v, proxies = common.promote_dtypes(v, proxies)
    return 2 / temperature * v @ F.normalize(proxies, dim=1).T


# ---- mixed examples, in the order of the equations


class MixupConfig(NamedTuple):
    mixup: str                                      # input, feature or embed
    pairs: str                                      # pos-neg, anc-neg or pos-pos
    k: int                                          # number of hardest negatives per anchor; None: all negatives
    alpha: float                                    # of Beta(alpha, alpha)
    clean_bn: bool = False                          # see --clean-bn


class BaseLoss(NamedTuple):
    kind: str                                       # key of TABLE_1
    hyper: dict                                     # its hyper-parameters
    proxies: torch.Tensor = None                    # (C, D)


def mixed_loss(base, config, model, levels, y):
    """The second term of Eq. (10), without w: the mean of Eq. (9) over the anchors -> scalar. With ProxyNCA++, it is a
    mean over the mixed examples, see note 5.

    base    a BaseLoss;  config  a MixupConfig;  y  (B,) class labels
    levels  the clean batch at the three levels of Eq. (4): dict(input=(B, 3, S, S), feature=(B, c, h, w), embed=(B, D))
    """
    z = common.at_least_float32(levels['embed'])
    cand_z, cand_y, anchor = candidates_and_anchors(base, z, y)                     # (E, D), (E,), (A,)
    anchor_z, anchor_y = cand_z[anchor], cand_y[anchor]                             # (A, D), (A,)
    # Eq. (8): pairs (i, j) of candidates, each with one lambda for all anchors. `valid` will select M(a), the pairs of
    # anchor a. Lambda is sampled on the CPU, because torch 2.6 has no Beta on a Mac's GPU.
    i, j = choose_pairs(config.pairs, y, cand_y)                                    # (M,), (M,)
    lam = Beta(config.alpha, config.alpha).sample(i.shape).to(y.device)             # (M,)
    if config.pairs == 'pos-pos':                   # two positives of a, so the label is 1
        positive = anchor_y[:, None] == cand_y                                      # (A, E)
        valid = positive[:, i] & positive[:, j]                                     # (A, M)
        pair_y = torch.ones_like(valid)
    else:
        pair_y, valid = pair_labels(cand_y, anchor_y, i, j, lam)                    # (A, M)
    # In anc-neg pairs, S(a) x U-(a), one of the two is the anchor; in pos-neg pairs, U+(a) x U-(a), and pos-pos pairs,
    # neither is.
    with_anchor = (anchor[:, None] == i) | (anchor[:, None] == j)                   # (A, M)
    valid = valid & (with_anchor if config.pairs == 'anc-neg' else ~with_anchor)
    if config.k:
        hard = hardest_negatives(anchor_z @ z.T, anchor_y[:, None] != y, config.k)  # (A, B)
        hard = F.pad(hard, (0, len(cand_y) - len(y)))                               # (A, E); a proxy is never hard
        valid = valid & (hard[:, i] | hard[:, j])
    used = valid.any(dim=0).nonzero()[:, 0]         # pairs that some anchor uses; now M is their number
    if not len(used):
        return z.new_zeros(())
    i, j, lam = i[used], j[used], lam[used]
    v = mixed_embeddings(config, model, dict(levels, embed=cand_z), i, j, lam)      # Eq. (4): (M, D)
    if base.kind == 'proxynca_pp':                  # a mixed example is a query; the anchors only chose the pairs
        logits = proxy_logits(v, base.proxies, **base.hyper)                        # (M, C)
        loss_i = F.cross_entropy(logits, y[i], reduction='none')                    # (M,)
        loss_j = F.cross_entropy(logits, y[j], reduction='none')                    # (M,)
        return (lam * loss_i + (1 - lam) * loss_j).mean()
    s = anchor_z @ v.T                                                              # (A, M)
    return labelled_loss(s, pair_y[:, used], valid[:, used], base.kind, **base.hyper).mean()        # Eq. (9)


def candidates_and_anchors(base, z, y):
    """The E candidates, which may be mixed, and the A anchors of the mixed loss, as indices of candidates

    z (B, D), y (B,) -> cand_z (E, D), cand_y (E,), anchor (A,)
    The B images are the candidates, and all of them are anchors. With Proxy-Anchor, the proxies of the classes in the
    batch are further candidates, after the images, and only they are anchors.
    """
    if base.kind != 'proxy_anchor':
        return z, y, torch.arange(len(y), device=y.device)
    present = y.unique()
    proxies = F.normalize(common.at_least_float32(base.proxies), dim=1)[present]
    anchor = len(y) + torch.arange(len(present), device=y.device)
    return torch.cat([z, proxies]), torch.cat([y, present]), anchor


def choose_pairs(pairs, y, cand_y):
    """All pairs i < j of candidates that may be in M(a) of some anchor a.  y (B,), cand_y (E,) -> (M,), (M,)"""
    if pairs == 'pos-pos':
        return torch.triu_indices(len(y), len(y), 1, device=y.device).unbind()  # mixed_loss keeps those of one class
    if pairs == 'pos-neg':
        return cross_class_pairs(y)
    i, j = cross_class_pairs(cand_y)
    not_two_proxies = i < len(y)                    # i < j and proxies come last, so at most j is a proxy
    return i[not_two_proxies], j[not_two_proxies]


def cross_class_pairs(y):
    """The M unordered pairs i < j of different classes.  y (B,) or (E,) -> (M,), (M,)"""
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
    """Eq. (4): embeddings v of M mixed examples. The mixed tensor passes through the rest of the network. -> (M, D)"""
    if config.mixup == 'input':                     # the paper's f(lam x + (1 - lam) x'); its f is the network
        x = mix(levels['input'], i, j, lam)
        if not config.clean_bn:
            return model(x)
        # With copies of the buffers, mixed images do not change the running statistics of BatchNorm.
        return torch.func.functional_call(model, {name: t.clone() for name, t in model.named_buffers()}, x)
    if config.mixup == 'feature':                   # f_m(lam g_m(x) + (1 - lam) g_m(x')), where f_m begins with pooling
        return model.project(mix_features(levels['feature'], i, j, lam, model.pool))
    return mix_embeddings(levels['embed'], i, j, lam)


def mix(x, i, j, lam):
    """lam x_i + (1 - lam) x_j for M pairs.  x (B, ...), i, j, lam (M,) -> (M, ...)"""
    lam = lam.view(-1, *[1] * (x.dim() - 1)).to(x.dtype)
    # On a CPU, index_select accumulates its gradient in a fixed order, so equal seeds give equal runs. x[i] does not.
    return lam * x.index_select(0, i) + (1 - lam) * x.index_select(0, j)


def mix_embeddings(z, i, j, lam):
    """Eq. (4), embedding mixup: lam f(x) + (1 - lam) f(x'), then L2-normalized (note 1).  z (B, D) -> (M, D)"""
    return F.normalize(mix(common.at_least_float32(z), i, j, lam), dim=1)


def mix_features(f, i, j, lam, pool='avg+max'):
    """Eq. (4), feature mixup: the pooled features of mixed maps, pool(lam f[i] + (1 - lam) f[j])

    f (B, c, h, w), i, j, lam (M,), pool avg, max or avg+max -> (M, c); half precision is upcast to float32
    With a ResNet-50 at 224 px and a batch of 100, the mixed maps of all pairs would take 2 GB. So they are computed for
    20 pairs at a time and without gradient, only to find the position of each channel's maximum. The values there are
    then taken from the two clean maps, and mixed with gradient: the result and its gradient are exact.
    """
    f = common.at_least_float32(f)
    p = 0
    if 'avg' in pool:                               # average pooling is linear: the averages can be mixed
        p = p + mix(f.mean(dim=(2, 3)), i, j, lam)                                  # (M, c)
    if 'max' in pool:                               # the maximum is the mixed value at its position
        h, w = f.shape[2:]
        lam = lam.to(f.dtype)[:, None]                                              # (M, 1)
        peaks = []
        with torch.no_grad():
            for i_, j_, lam_ in zip(i.split(20), j.split(20), lam.split(20)):
                mixed = f[j_].lerp_(f[i_], lam_[..., None, None])                   # (20, c, h, w), lam f_i + ...
                peaks.append(F.max_pool2d(mixed, (h, w), return_indices=True)[1].flatten(1))        # (20, c)
        peak = torch.cat(peaks)                                                     # (M, c), from 0 to h w - 1
        # Row n h w + q is image n at position q. On a CPU, the gradient of gather is deterministic, as in mix.
        values = f.permute(0, 2, 3, 1).flatten(0, 2)                                # (B h w, c)
        f_i, f_j = (values.gather(0, n[:, None] * (h * w) + peak) for n in (i, j))  # (M, c)
        p = p + f_j.lerp(f_i, lam)
    return p


# ---- analysis: Section 3.6


def positivity_threshold(lam, beta, gamma, m):
    """The similarity s(a, v) up to which a single mixed example v acts as a positive of its anchor a in ms: the
    right-hand side of Eq. (24). It is about the mixed loss only, without the clean loss in Eq. (10). Eq. (25) is,
    for a fixed lambda, the probability that s(a, v) is at most this threshold: see tests/results/fig2.py.

    lam      number or tensor, in [0, 1]: interpolation factor of the positive
    beta, gamma > 0, m: hyper-parameters of ms, Eq. (2)
    returns  tensor like lam, in float64; -inf for lam = 0, inf for lam = 1
    """
    return torch.as_tensor(lam, dtype=torch.float64).logit() / (beta + gamma) + m               # Eq. (24)


# ---- recipes and flags

# Training recipes, see common.BASE.
# From the paper (Table 4, Section B.1): epochs, batches, optimizer, learning rates, weight decay and decay rates. For
# ProxyNCA++ on CUB and Cars, no decay rate is stated: here it is the one of ms.
# From the released code: minimum crop scale, epochs with a frozen backbone (warmup), gradient clipping, proxies at 100
# times the learning rate, BatchNorm frozen on CUB and Cars, and a decay every 10 epochs, the default of that code.
# Different from the released code: its commands for contrastive with mixup freeze BatchNorm on SOP and In-Shop, and
# have a warmup of 5 on In-Shop.
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
    'shapes': dict(batch_size=96, epochs=8),        # 128 images, as in common.BASE, have 1.8 times as many pairs
    # As in train_proxy_anchor.py, but with 4 images per class (common.PROTOCOL), because pos-neg pairs need positives.
    'reality-check': dict(proxy_lr_mult=6000),
}
# Recipes of (dataset, loss) override those of the dataset. The paper does not state the margin of contrastive. The
# decay rates on CUB and Cars are from Section B.1, the warmup on SOP from the released commands.
CONTRASTIVE = dict(vectors=dict(epochs=3), cub=dict(decay_rate=0.1), cars=dict(decay_rate=0.1), sop=dict(warmup=5))
DEFAULTS |= {(dataset, 'contrastive'): dict(m=0.5) | CONTRASTIVE.get(dataset, {})
             for dataset in (*common.BASE, 'reality-check')}
DEFAULTS['vectors', 'proxynca_pp'] = dict(epochs=8)

# The flags that each loss uses. The alpha of proxy_anchor is --proxy-alpha, because --alpha is that of Beta.
USES = dict(contrastive='m reduction', ms='beta gamma m epsilon', proxy_anchor='proxy_alpha delta proxy_lr_mult',
            proxynca_pp='temperature proxy_lr_mult')


def plan(args):
    """Prints and returns what a step may mix: for each type of --mixup, MixupConfigs that differ in the set of pairs.
    Without mixup it returns []."""
    choices = []
    for mixup in args.mixup:
        if mixup == 'none':
            break
        sets = ['pos-neg', 'anc-neg'] if args.pairs == 'both' else [args.pairs]             # Section 4.1
        if args.loss == 'proxynca_pp':              # the anc-neg pairs of all anchors are all cross-class pairs
            sets = ['anc-neg']
        elif args.loss == 'proxy_anchor' and args.pairs == 'both' and mixup != 'embed':
            sets = ['pos-neg']                      # anc-neg would mix a proxy, which has no image or feature map
        k = args.hard_negatives
        if k == 'auto' and mixup == 'input':
            k = 1 if 'feature' in args.mixup else 3             # 3 is in Section B.2, 1 in Table 6 for {1, all}
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
    add('--hard-negatives', type=common.number_or(common.at_least(1), 'all', 'auto'), default='auto', metavar='K',
        help='number of hardest negatives per anchor that are mixed; auto: all; for input mixup 3, or 1 if feature '
             'is given as well')
    add('--alpha', type=above_0, default=2.0, help='lambda comes from Beta(alpha, alpha)')
    add('--strength', type=common.at_least(0, float), default=0.4, help='w, weight of the mixed loss (mixup strength)')
    add('--beta', type=above_0, default=18.0, help='ms: scaling factor of the positives')
    add('--gamma', type=above_0, default=75.0, help='ms: scaling factor of the negatives')
    add('--m', type=cosine, default=0.77, help='ms and contrastive: margin')
    add('--epsilon', type=common.number_or(common.between(-2, 2), 'off'), default=0.39,
        help='ms: tolerance of the miner in the clean loss; off: no miner')
    add('--reduction', choices=['mean', 'sum'], default='mean', help='contrastive: mean, or sum as in Eq. (1) and (14)')
    add('--proxy-alpha', type=above_0, default=32.0, help='proxy_anchor: scaling factor')
    add('--delta', type=cosine, default=0.1, help='proxy_anchor: margin')
    add('--temperature', type=common.at_least(1e-4, float), default=1 / 9, help='proxynca_pp: divides distances^2')
    # 10 here, and 100 on the benchmarks, because off the benchmarks --lr itself is 10 or 20 times larger.
    add('--proxy-lr-mult', type=common.at_least(0, float), default=10.0,
        help='learning rate of the proxies, as a multiple of --lr')
    add('--clean-bn', action=common.SWITCH, default=False,
        help='input mixup without --freeze-bn: mixed images do not change the running statistics of BatchNorm')
    args = common.parse(parser, DEFAULTS, argv, uses={'loss': USES})
    check(args, parser.typed(argv))
    return args


def check(args, typed):
    """Rejects flags that would have no effect on the loss, and what the paper leaves undefined."""
    if 'input' not in args.mixup or args.freeze_bn:
        common.reject(typed, ['clean_bn'], 'frozen BatchNorm, or without input mixup')
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
        raise common.UsageError('--mixup input mixes images; --dataset vectors has none: use --mixup feature')
    if args.loss == 'proxy_anchor' and args.pairs == 'anc-neg' and args.mixup != ['embed']:
        raise common.UsageError('--pairs anc-neg with --loss proxy_anchor mixes proxies, which have no input and no '
                                'feature map: use --mixup embed, or --pairs pos-neg')


def main(argv=None):
    args = get_args(argv)
    common.set_seed(args.seed)
    choices = plan(args)
    data = common.dataset_from(args)
    model = common.build(args, data=data)
    if 'input' in args.mixup:       # the number of mixed images varies, and cuDNN would benchmark each anew
        torch.backends.cudnn.benchmark = False
    groups = [dict(params=model.parameters())]
    loss_params = {}
    if 'proxy' in args.loss:                        # with proxies as in train_proxy_anchor.py
        C = data.train.num_classes
        proxies = torch.randn(C, model.dim) * (2 / C) ** 0.5
        loss_params = dict(proxies=torch.nn.Parameter(proxies.to(args.device)))                     # (C, D)
        groups.append(dict(params=[loss_params['proxies']], lr=args.lr * args.proxy_lr_mult))
    optimizer = common.make_optimizer(args, groups)
    # The arguments of the loss; proxy_alpha becomes alpha.
    hyper = {flag.removeprefix('proxy_'): getattr(args, flag) for flag in USES[args.loss].split()
             if flag not in ('epsilon', 'proxy_lr_mult')}
    epsilon = args.epsilon if args.loss == 'ms' and args.epsilon != 'off' else None

    def step(images, labels):
        f = model.features(images)                                      # (B, c, h, w), once per clean image
        z = model.head(f)                                               # (B, D)
        loss = clean_loss(args.loss, z, labels, epsilon=epsilon, **loss_params, **hyper)
        if choices:
            # The type of mixup and the set of pairs are sampled in each iteration, Sections B.4 and B.2.
            config = random.choice(random.choice(choices))
            base = BaseLoss(args.loss, hyper, **loss_params)
            levels = dict(input=images, feature=f, embed=z)
            loss = loss + args.strength * mixed_loss(base, config, model, levels, labels)           # Eq. (10)
        return loss

    return common.train(args, model, data, step, optimizer, loss_params)


NOTES = """
What differs from the paper
    1. Two examples are mixed once, with one lambda, and all anchors share the mixed example. Eq. (8) seems to sample
       lambda for each pair of each anchor. Section B.4 also mixes pos-pos pairs in both orders, and a positive with
       itself; here each pair is mixed once, and never an example with itself. Mixed embeddings are L2-normalized, as in
       the released code.
    2. Contrastive uses means where Eq. (1) and (14) have sums; --reduction sum is as printed.
    3. The clean loss of ms uses the miner of the released code, which the paper does not mention.
    4. Proxy-Anchor follows its own paper: s + delta on negatives, where Table 1 has s - m, and no factors 1 / beta and
       1 / gamma. Its mixed loss is the mean over the classes in the batch; by Eq. (10) it would be divided by all C
       proxies. Its anc-neg pairs exist in embedding mixup only: a proxy has no image or feature map.
    5. ProxyNCA++ follows its authors' code, see clean_loss. The positives and negatives of Table 1 are proxies, which
       input and feature mixup cannot mix, though the paper has results for both. Here a mixed example of two classes is
       a query with an interpolated target: lam CE(v, y_i) + (1 - lam) CE(v, y_j).
What differs from the released code: github.com/billpsomas/Metrix_ICLR22 (7ce730c) for contrastive, and
github.com/billpsomas/metrix (b679703) for ms, which has embedding mixup only
    6. Here all positives, all anchors and each anchor's own hard negatives are used. In feature and embedding mixup,
       the code for contrastive mixes only the first positive of each anchor (pos-neg), or only anchors that have no
       positive (anc-neg), and it uses the hard negatives of the first anchor for all anchors. The code for ms mixes
       only the least similar positive of each anchor.
    7. Both implementations sample one lambda for a batch, and use Adam. Both report the best epoch on the test set.
    8. The code for contrastive uses Euclidean distances with a margin of 0.5 (a cosine of 0.875), k = 1, 60 epochs, and
       w = 0.3 for anc-neg pairs of embeddings. It averages over all pairs of the batch with nonzero loss; here it is
       the mean for each anchor, and then over the anchors. Those without a positive, about 37 of 100 in random batches
       of CUB, count with a positive term of 0.
    9. The code for ms does not compute Eq. (15). Its mixed examples are in the positive term only. A mask that was made
       for pairs of an anchor and an image is applied to a matrix of anchors and mixed examples, so most of the selected
       mixed examples belong to other anchors.
   10. On CUB, the released command for ms with mixup trains 100 epochs and halves the learning rate every 10; the one
       without mixup trains 60 epochs and halves it every 5. Here both train 100 epochs, as in the paper, and halve the
       learning rate every 10.
Tables and figures of the paper
    Tables 2 and 5: --loss and --mixup. With ms and ResNet-50, Table 2 has R@1 67.8 on CUB without mixup, and 71.4 with
    feature mixup. Table 6 (Cars) and Table 7 (CUB, --dim 128), with --loss contrastive: --mixup, --pairs and
    --hard-negatives; the last row of both has --mixup input feature embed. Fig. 6 (Cars): --mixup and --strength, with
    contrastive. Fig. 2 (there at epoch 0) and utilization with mixed examples: tests/results/fig2.py. Section 4.3,
    with contrastive: eval.py --analyse. Neg-neg pairs (Section 3.5) and the other methods of Table 3 are left out.
Cost
    With batches of 20 x 5 images and k = 3, input mixup adds up to 300 (anc-neg) or 1,200 (pos-neg) images to the
    forward pass. Without --freeze-bn and --clean-bn, they count in the running statistics of BatchNorm. With several
    hundred images in a batch, --hard-negatives 40 saves time.
"""


if __name__ == '__main__':
    common.cli(main)
