"""train_metrix.py -- Metrix: mixup for metric learning. A mixed example is partly a positive, partly a negative.

Venkataramanan, Psomas, Kijak, Amsaleg, Karantzalos, Avrithis. It Takes Two to Tango: Mixup for Deep Metric Learning.
ICLR 2022. arXiv:2106.04990. Metrix Eq. (10) adds to a base loss (--loss) w times its value on mixed examples. In
this mixed loss, labels are relative to an anchor a: 1 for its positives, 0 for its negatives. Two examples are mixed,
as images, features or embeddings, Eq. (4), and so are their labels, Eq. (8). A positive mixed with a negative has the
share of the positive as its label: it counts as a positive with this weight, and as a negative with the rest. Three
kinds of pairs can be mixed for an anchor: pos-neg, a positive and a negative; anc-neg, the anchor itself and a
negative; pos-pos, two positives. The anchors are the images or, with Proxy-Anchor, the proxies of the classes in the
batch (in the clean loss, all proxies). The E candidates for mixing are the images and the anchors.
tests/papers/README.md lists the letters that other papers use for other things.

    paper    code       flag         meaning
    a        anchor     -            (A,) the A anchors, as indices of candidates
    x, x'    i, j       --pairs      (M,) the two candidates in each of the M mixed examples v; i < j: each pair once
    lambda   lam        --alpha      (M,) share of i, from Beta(alpha, alpha); in Eq. (13) to (15) it stands for y
    y        label      -            (A, M) share of the anchor's class in v: lam if i has it, 1 - lam if j, 1 if both
    -        y          -            (B,) class labels
    g_m(x)   f          -            (B, c, h, w) feature maps. In the paper, f is the network
    w        strength   --strength   weight of the mixed loss in Eq. (10), the mixup strength

    python train_metrix.py [--dataset cub --data data --mixup feature]
"""
import random
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.distributions import Beta

import common


@common.loss            # inside, half precision becomes float32
def labelled_loss(s, label, valid, kind, **hyper):
    """The generic loss, Eq. (7), where y is the argument `label`: an example counts as a positive with weight y, and as
    a negative with weight 1 - y.

    l(a) = tau( sigma+( sum y rho+(s(a,x)) ) + sigma-( sum (1 - y) rho-(s(a,x)) ) )

    The sums run over the examples of anchor a:
        clean ones, U(a), with labels 1 and 0       then this is Eq. (3)
        mixed ones, V(a), with labels from 0 to 1   then this is Eq. (9); with pos-neg pairs, Eq. (13)
    Table 1 has rho, sigma and tau of each loss. The functions in TABLE_1, below, compute the two terms sigma+(...) and
    sigma-(...) of three of its rows. In these rows rho+ decreases with the similarity, rho- increases with it (or is
    constant, below a margin), and tau is the identity.

    s        (A, n) similarities of A anchors and n examples, clean or mixed
    label    (A, n) labels from 0 to 1, for each anchor
    valid    (A, n) bool, whether the example is one of the anchor's
    kind     key of TABLE_1;  hyper  hyperparameters of this loss
    returns  (A,), the loss of each anchor; the term of the positives, or of the negatives, is 0 if there are none
    """
    label = label.to(s.dtype)                               # a mask becomes 1 and 0: 1 - mask is an error in torch
    pull, push = TABLE_1[kind](s, label * valid, (1 - label) * valid, **hyper)      # (A,), (A,)
    return pull + push                                                              # Eq. (3), (7), (9), (13)


# ---- Table 1. Each function is one of its rows; notes 2 and 4, at the end, say what differs. Its arguments are
# similarities s and weights of the examples, all (A, n): `pos_weight` is y, `neg_weight` is 1 - y, and both are 0 for
# examples that are not the anchor's. It returns the positive and the negative term of Eq. (7), both (A,).


def contrastive(s, pos_weight, neg_weight, m=0.5, reduction='mean'):
    """The two sums of
    Eq. (1)   sum_p -s(a,p)           + sum_n [s(a,n) - m]+                 where [t]+ = max(t, 0)
    Eq. (14)  sum_v -y s(a,v)         + sum_v (1 - y) [s(a,v) - m]+         over the mixed examples v of pos-neg pairs

    With sums, the mixed loss would dominate: in a batch of 20 classes x 5 images, an anchor has 4 + 95 clean examples,
    and 4 x 95 = 380 mixed ones of pos-neg pairs. So with reduction='mean', the first sum is divided by the number of
    examples with y > 0: the clean positives, or all mixed examples of the anchor. The second sum is divided by the
    number of its terms that are not 0, because examples below the margin add nothing.
    """
    if reduction not in ('mean', 'sum'):
        raise ValueError(f"reduction is 'mean' or 'sum', not {reduction!r}")
    pull = -s * pos_weight                                              # (A, n)  Eq. (1), (14), first sum
    push = (s - m).clamp_min(0) * neg_weight                            # (A, n)  Eq. (1), (14), second sum
    if reduction == 'mean':
        pull = pull / (pos_weight > 0).sum(dim=1, keepdim=True).clamp_min(1)
        push = push / (push > 0).sum(dim=1, keepdim=True).clamp_min(1)
    return pull.sum(dim=1), push.sum(dim=1)


def ms(s, pos_weight, neg_weight, beta=18.0, gamma=75.0, m=0.77):
    """The two terms of
    Eq. (2)   1/beta log(1 + sum_p exp(-beta (s(a,p) - m)))  +  1/gamma log(1 + sum_n exp(gamma (s(a,n) - m)))
    Eq. (15), the same with sums over mixed examples, whose weights y and 1 - y stand before the exponentials
    """
    pull = log1p_sum_exp(-beta * (s - m), pos_weight) / beta            # Eq. (2), (15), first term
    push = log1p_sum_exp(gamma * (s - m), neg_weight) / gamma           # Eq. (2), (15), second term
    return pull, push


def proxy_anchor(s, pos_weight, neg_weight, alpha=32.0, delta=0.1):
    """The two logarithms of Proxy-Anchor Eq. (4); its factors 1/|P+| and 1/|P| are in clean_loss.

    log(1 + sum_{x in X_p+} exp(-alpha (s(x,p) - delta)))  and  log(1 + sum_{x in X_p-} exp(alpha (s(x,p) + delta)))

    X_p+ are the images of the class of the proxy p, and X_p- all other images of the batch. With mixed examples, their
    weights stand before the exponentials, and mixed_loss averages both logarithms over the classes in the batch.
    Table 1 differs (note 4): it has s - m in the second logarithm, and factors 1/beta, 1/gamma.
    """
    pull = log1p_sum_exp(-alpha * (s - delta), pos_weight)              # Proxy-Anchor Eq. (4), first logarithm
    push = log1p_sum_exp(alpha * (s + delta), neg_weight)               # Proxy-Anchor Eq. (4), second logarithm
    return pull, push


def log1p_sum_exp(t, weight):
    """log(1 + sum of weight * exp(t)) of each row, computed without overflow.  (A, n), (A, n) -> (A,)"""
    # The weights y and 1 - y (lambda and 1 - lambda in Eq. (15)) enter here: weight exp(t) = exp(t + log weight), which
    # is exp(-inf) = 0 for the weight 0. Each row is padded with a 0, because exp(0) is the "1 +".
    return F.pad(t + weight.log(), (1, 0)).logsumexp(dim=1)


TABLE_1 = {'contrastive': contrastive, 'ms': ms, 'proxy_anchor': proxy_anchor}


@common.loss
def clean_loss(kind, z, y, proxies=None, epsilon=None, **hyper):
    """The first term of Eq. (10), the clean loss of a batch z (B, D) with class labels y (B,) -> scalar. For ms and
    contrastive it is the mean of Eq. (3) over the anchors.

    kind     ms, contrastive, proxy_anchor or proxynca_pp;  hyper  its hyperparameters
    proxies  (C, D), for the last two
    epsilon  tolerance of the miner of ms, as in train_ms.py; None: no miner
    """
    y = common.check_labels(y, len(z), None if proxies is None else len(proxies))
    if kind == 'proxynca_pp':
        # Table 1 has -log( exp(z.p / T) / sum over the negative proxies ), with a temperature T. Here the sum has all
        # proxies, as in a softmax, and the logits are 2 z.p / T.
        return F.cross_entropy(proxy_logits(z, proxies, **hyper), y)
    if kind == 'proxy_anchor':
        s = F.normalize(proxies, dim=1) @ z.T                                                   # (C, B)
        positive = torch.arange(len(proxies), device=y.device)[:, None] == y                    # (C, B)
        pull, push = proxy_anchor(s, positive, ~positive, **hyper)      # (C,), (C,); as weights, masks are 1 and 0
        # Proxy-Anchor Eq. (4): |P+| is the number of classes in the batch, and |P| is C (note 3 of train_proxy_anchor)
        return pull.sum() / positive.any(dim=1).sum() + push.mean()
    s = z @ z.T                                                                                 # (B, B)
    same = y[:, None] == y                                                                      # (B, B)
    positive = same & ~torch.eye(len(y), dtype=torch.bool, device=y.device)                     # P(a) in Eq. (5)
    negative = ~same                                                                            # N(a) in Eq. (6)
    if epsilon is not None:
        hardest_positive = s.masked_fill(~positive, float('inf')).amin(dim=1, keepdim=True)     # (B, 1)
        hardest_negative = s.masked_fill(~negative, float('-inf')).amax(dim=1, keepdim=True)    # (B, 1)
        # The miner drops easy pairs: positives above every negative by epsilon or more, and negatives below every
        # positive by epsilon or more. An anchor without positives keeps no negatives. As NaN >= x is false, ~ keeps a
        # pair with NaN, so that the loss shows it.
        positive = positive & ~(s - epsilon >= hardest_negative)
        negative = negative & ~(s + epsilon <= hardest_positive)
    # `positive` is the label, 1 or 0. The anchor itself, and the examples that the miner dropped, are not valid.
    return labelled_loss(s, positive, positive | negative, kind, **hyper).mean()                # Eq. (10), first term


@common.loss            # makes proxies float32, also those that mixed_loss takes from its argument `base`
def proxy_logits(v, proxies, temperature=1 / 9):
    """Logits of ProxyNCA++, 2 v.p / T, of embeddings v (M, D), where p are the proxies (C, D), L2-normalized -> (M, C).
    Their softmax is that of -|v - p|^2 / T, because |v - p|^2 = |v|^2 + 1 - 2 v.p, and |v|^2 + 1 is the same for all p.
    """
    return 2 / temperature * v @ F.normalize(proxies, dim=1).T


# ---- mixed examples


class MixupConfig(NamedTuple):
    mixup: str                                      # input, feature or embed
    pairs: str                                      # pos-neg, anc-neg or pos-pos
    k: int                                          # number of hardest negatives per anchor; None: all negatives
    alpha: float                                    # of Beta(alpha, alpha)


class BaseLoss(NamedTuple):
    kind: str                                       # key of TABLE_1, or proxynca_pp
    hyper: dict                                     # its hyperparameters
    proxies: torch.Tensor = None                    # (C, D)


@common.loss
def mixed_loss(base, config, model, levels, y):
    """The second term of Eq. (10), without w: the mean of Eq. (9) over the anchors -> scalar. An anchor without mixed
    examples adds 0. With ProxyNCA++, it is a mean over the mixed examples (note 5).

    base    a BaseLoss;  config  a MixupConfig;  y  (B,) class labels
    levels  the clean batch at the three levels of Eq. (4): dict(input=(B, 3, S, S), feature=(B, c, h, w), embed=(B, D))
    """
    y = common.check_labels(y, len(levels['embed']), None if base.proxies is None else len(base.proxies))
    # The decorator converts tensors among the arguments, but not those inside `levels` and `base`.
    z = common.at_least_float32(levels['embed'])                                    # (B, D)
    proxies = base.proxies if base.kind == 'proxy_anchor' else None     # the proxies of ProxyNCA++ are not mixed
    cand_z, cand_y, anchor = candidates_and_anchors(z, y, proxies)                  # (E, D), (E,), (A,)
    i, j, lam, label, valid = mixed_pairs(config, cand_z, cand_y, anchor, len(y))
    # There may be nothing to mix, for example if no anchor has a positive. A single mixed image is skipped, too: in
    # training, BatchNorm fails if a channel has a single value, as with small images.
    if len(i) < (2 if config.mixup == 'input' else 1):
        return 0 * z.sum()                                                          # 0, with a gradient for backward()
    # Candidates 0 to B - 1 are the images. Input and feature mixup mix no proxies (see plan()), so that i and j
    # are indices of images there.
    v = mix_and_embed(config, model, dict(levels, embed=cand_z), i, j, lam)         # (M, D)
    if base.kind == 'proxynca_pp':                  # note 5: classify each mixed example by its two classes
        logits = proxy_logits(v, base.proxies, **base.hyper)                        # (M, C)
        loss_i = F.cross_entropy(logits, cand_y[i], reduction='none')               # (M,)
        loss_j = F.cross_entropy(logits, cand_y[j], reduction='none')               # (M,)
        return (lam * loss_i + (1 - lam) * loss_j).mean()
    s = cand_z[anchor] @ v.T                                                        # (A, M)
    return labelled_loss(s, label, valid, base.kind, **base.hyper).mean()           # Eq. (10), second term, without w


def candidates_and_anchors(z, y, proxies=None):
    """The E candidates for mixing, and the A anchors among them

    z (B, D), y (B,), proxies (C, D) or None -> candidates (E, D), their classes (E,), anchor (A,)
    Without proxies, the B images are the candidates, and each is an anchor. With proxies, the candidates are the B
    images, then the proxies of the classes in the batch, and the anchors are these proxies.
    """
    if proxies is None:
        return z, y, torch.arange(len(y), device=y.device)
    present = y.unique()
    p = F.normalize(common.at_least_float32(proxies), dim=1)[present]
    anchor = len(y) + torch.arange(len(present), device=y.device)
    return torch.cat([z, p]), torch.cat([y, present]), anchor


def mixed_pairs(config, z, y, anchor, num_images):
    """Eq. (8): which pairs of candidates are mixed, with which label for each anchor

    config   a MixupConfig: `pairs` chooses M(a), the set of pairs of an anchor (here M is the number of all pairs);
             `k` limits the negatives of an anchor
    z, y     (E, D) candidates and their classes (E,); the first num_images are images, the others proxies
    anchor   (A,) the anchors, as indices of candidates
    returns  i, j (M,)     the pairs of all anchors, each once, with i < j
             lam (M,)      the share of i in the mixed example, from Beta(alpha, alpha)
             label (A, M)  lam if the positive (or the anchor) is i, 1 - lam if it is j; with pos-pos, 1
             valid (A, M)  whether a pair is one of the anchor's; if not, its label means nothing

    For example, take images 0 to 3 of classes a a b b, and pos-neg pairs. Anchor 0 has the positive 1, and the
    negatives 2 and 3. So its pairs are (1, 2) and (1, 3), with label lam. Anchor 3 has the pairs (0, 2) and (1, 2),
    with label 1 - lam. The pair (1, 2) belongs to both anchors: it is mixed once, and has label lam for anchor 0, and
    1 - lam for anchor 3.
    """
    E = len(y)
    itself = anchor[:, None] == torch.arange(E, device=y.device)                    # (A, E)  S(a): the anchor
    # (E,) False for proxies, which can be anchors, but not positives or negatives
    is_image = torch.arange(E, device=y.device) < num_images
    positive = (y[anchor][:, None] == y) & is_image & ~itself                       # (A, E)  P(a), Eq. (5)
    negative = (y[anchor][:, None] != y) & is_image                                 # (A, E)  N(a), Eq. (6)
    if config.k is not None:
        negative = hardest_negatives(z[anchor] @ z.T, negative, config.k)
    # Anchor a mixes each candidate of first[a] with each of second[a]. Both masks are (A, E).
    first, second = {'pos-neg': (positive, negative), 'anc-neg': (itself, negative),
                     'pos-pos': (positive, positive)}[config.pairs]
    # mixes[p, q]: whether some anchor has p in `first` and q in `second`. The matrix product counts these anchors.
    mixes = first.float().T @ second.float() > 0                                    # (E, E)
    # The order of p and q does not matter: the upper triangle has each pair once, with i < j.
    i, j = (mixes | mixes.T).triu(1).nonzero().unbind(dim=1)                        # (M,), (M,)
    # (M,) one lambda for each pair, for all anchors (note 1). Drawn on the CPU, it does not depend on the device.
    lam = common.to_device(Beta(config.alpha, config.alpha).sample(i.shape), y.device)
    # The pairs have i < j, so either of the two may be the one from `first`.
    valid = (first[:, i] & second[:, j]) | (second[:, i] & first[:, j])             # Eq. (8), M(a): (A, M)
    binary = positive | itself                      # (A, E)  labels before mixing, Eq. (5), (6): 1 or 0
    label = lam * binary[:, i] + (1 - lam) * binary[:, j]                           # Eq. (8), mix(y, y')
    return i, j, lam, label, valid


def hardest_negatives(s, negative, k):
    """Marks each anchor's k hardest negatives, those with the highest similarity.  (A, E), (A, E) -> (A, E) bool"""
    s = s.masked_fill(~negative, float('-inf'))
    hardest = s.topk(min(k, s.shape[1]), dim=1).indices                             # (A, k)
    # If an anchor has fewer than k negatives, topk returns other candidates as well. They are removed here.
    return negative & torch.zeros_like(negative).scatter(1, hardest, True)


def mix_and_embed(config, model, levels, i, j, lam):
    """Eq. (4): embeddings v of M mixed examples. The mixed tensor passes through the rest of the network. -> (M, D)"""
    if config.mixup == 'input':
        return model(mix(levels['input'], i, j, lam))       # Eq. (4), f(lam x + (1 - lam) x')
    if config.mixup == 'feature':
        # Eq. (4), f_m(lam g_m(x) + (1 - lam) g_m(x')): g_m is the backbone, f_m pooling (in mix_features) and project
        return model.project(mix_features(levels['feature'], i, j, lam, model.pool))
    if config.mixup == 'embed':
        return mix_embeddings(levels['embed'], i, j, lam)
    raise common.UsageError(f'mixup is input, feature or embed, and not {config.mixup!r}')


def mix(x, i, j, lam):
    """lam x_i + (1 - lam) x_j for M pairs.  x (n, ...), i, j, lam (M,) -> (M, ...)"""
    shape = [-1] + [1] * (x.dim() - 1)
    lam = lam.view(shape).to(x.dtype)                                               # (M, 1, ..., 1), to fit x
    # On a CPU, index_select accumulates its gradient in a fixed order, so equal seeds give equal runs. x[i] does not.
    return lam * x.index_select(0, i) + (1 - lam) * x.index_select(0, j)            # Eq. (4), mix


def mix_embeddings(z, i, j, lam):
    """Embedding mixup: lam f(x) + (1 - lam) f(x'), then L2-normalized (note 1).  z (E, D) -> (M, D)"""
    return F.normalize(mix(common.at_least_float32(z), i, j, lam), dim=1)           # Eq. (4)


def mix_features(f, i, j, lam, pool='avg+max'):
    """Feature mixup: pooled features of mixed maps.  f (B, c, h, w), i, j, lam (M,), pool avg, max or avg+max -> (M, c)

    In two plain lines, for avg+max, this is
        mixed = mix(f, i, j, lam).flatten(2)                                        # (M, c, h w)
        return mixed.mean(dim=2) + mixed.max(dim=2).values
    But with a ResNet-50 at 224 px and a batch of 100, the mixed maps of all pairs would take up to 2 GB. The lines
    below have the same result and gradient, and need not be read. They compute some mixed maps at a time, outside
    autograd, to find the position of each channel's maximum. At this position the two clean maps are read, and mixed.
    """
    f = common.at_least_float32(f)
    p = 0
    if 'avg' in pool:                               # average pooling is linear: the averages can be mixed
        p = p + mix(f.mean(dim=(2, 3)), i, j, lam)                                  # (M, c)
    if 'max' in pool:                               # the maximum is the mixed value at its position
        h, w = f.shape[2:]
        lam = lam.to(f.dtype)[:, None]                                              # (M, 1)
        peaks = []
        at_a_time = 20 if f.device.type == 'cpu' else 200       # 20 maps fit in a CPU's cache; a GPU wants few kernels
        with torch.no_grad():
            for i_, j_, lam_ in zip(i.split(at_a_time), j.split(at_a_time), lam.split(at_a_time)):
                mixed = f[j_].lerp_(f[i_], lam_[..., None, None])                   # lam f_i + (1 - lam) f_j
                peaks.append(F.max_pool2d(mixed, (h, w), return_indices=True)[1].flatten(1))
        peak = torch.cat(peaks)                                                     # (M, c), from 0 to h w - 1
        # values[n * h * w + q] are the features of image n at position q. On a CPU, the gradient of gather is
        # deterministic, as in mix.
        values = f.permute(0, 2, 3, 1).flatten(0, 2)                                # (B h w, c)
        f_i, f_j = (values.gather(0, n[:, None] * (h * w) + peak) for n in (i, j))  # (M, c)
        p = p + f_j.lerp(f_i, lam)
    return p


def positivity_threshold(lam, beta, gamma, m):
    """The threshold, the right-hand side of Eq. (24), Appendix A.2: if v is the only mixed example of an anchor, ms
    attracts v while s(a, v) is below this value. The probability that it does so, P(Pos(a, v)) in Eq. (25) and (11), is
    the fraction of the pairs (a, v) with this lambda whose similarity is at most the threshold. tests/results/fig2.py
    measures it; training does not use it.

    lam      number or tensor, in [0, 1]: share of the positive in v, which is its label
    beta, gamma > 0, m: hyperparameters of ms, Eq. (2)
    returns  tensor like lam, in float64; -inf for lam = 0, inf for lam = 1
    """
    # logit(lam) = ln(lam / (1 - lam))
    return torch.as_tensor(lam, dtype=torch.float64).logit() / (beta + gamma) + m               # Eq. (24)


# ---- recipes: the defaults of flags for each dataset; --help explains the flags

# What `python train_metrix.py` runs: a small ResNet from scratch on the built-in dataset. A batch of 128 images, as in
# the other scripts, would have 1.8 times as many pairs, and take longer.
SHAPES = dict(
    arch='resnet18', weights='none', pool='avg+max', dim=128, freeze_bn=False,
    image_size=32, resize=32, min_crop=1.0,
    epochs=8, batch_size=96, per_class=4,
    optimizer='adamw', lr=2e-3, weight_decay=1e-4, schedule='cosine', freeze_epochs=0, clip=0.0,
    eval_every=10, precision='fp32', proxy_lr_mult=10)
# The paper states network, size of the images, epochs, batches (per_class=0: random ones), optimizer, rates and weight
# decay (Sections 4.1 and B.1, Table 4). It states no decay rate for ProxyNCA++ on CUB and Cars; here it is that of ms.
# The rest is from the released commands: freeze_bn and freeze_epochs are those of the dataset, and min_crop, clip,
# proxy_lr_mult and decay_epochs are those of CUB for all datasets.
CUB = dict(
    arch='resnet50', weights='imagenet', pool='avg+max', dim=512, freeze_bn=True,
    image_size=224, resize=256, min_crop=0.08,
    epochs=100, batch_size=100, per_class=0,
    optimizer='adamw', lr=1e-4, weight_decay=1e-4, schedule='step', decay_epochs=10, decay_rate=0.5, freeze_epochs=5,
    clip=10.0, proxy_lr_mult=100)
SOP = CUB | dict(freeze_bn=False, per_class=5, lr=3e-5, decay_rate=0.25, freeze_epochs=1, eval_every=5)
# The entry of the --loss overrides that of the dataset (or of --protocol), and the entry of both overrides either.
DEFAULTS = {
    'shapes': SHAPES,
    # A folder with pretrained weights (--weights imagenet or FILE) has the recipe 'cub' instead, see common.recipe.
    'folder': SHAPES | common.FOLDER,
    'vectors': SHAPES | common.VECTORS,
    'cub': CUB,
    'cars': CUB,
    'sop': SOP,
    'inshop': SOP | dict(lr=1e-4),
    'reality-check': common.PROTOCOL | dict(proxy_lr_mult=6000),    # see train_proxy_anchor.py
    'contrastive': dict(m=0.7),                                     # chosen: note 7
    ('vectors', 'contrastive'): dict(epochs=3),
    ('cub', 'contrastive'): dict(decay_rate=0.1),
    ('cars', 'contrastive'): dict(decay_rate=0.1),
    ('sop', 'contrastive'): dict(freeze_epochs=5),                  # note 10
    ('vectors', 'proxynca_pp'): dict(epochs=8),
}

# USES is {flag: {its value: [flags that have an effect with it]}}, where OTHER stands for all other values. A typed
# flag without effect is an error, such as --delta with --loss ms, or --pairs with --mixup none. A flag that is listed
# under two flags has an effect only if both values allow it. The alpha of proxy_anchor is --proxy-alpha, because
# --alpha is that of Beta.
LOSSES = dict(contrastive=['pairs', 'm', 'reduction'], ms=['pairs', 'beta', 'gamma', 'm', 'epsilon'],
              proxy_anchor=['pairs', 'proxy_alpha', 'delta', 'proxy_lr_mult'],
              proxynca_pp=['temperature', 'proxy_lr_mult'])
PROXY_LOSSES = ('proxy_anchor', 'proxynca_pp')
USES = {'loss': LOSSES, 'mixup': {'none': [], common.OTHER: ['pairs', 'hard_negatives', 'strength', 'alpha']},
        'pairs': {'pos-pos': [], common.OTHER: ['hard_negatives']},
        'strength': {0: [], common.OTHER: ['pairs', 'hard_negatives', 'alpha']}}


def plan(args):
    """Prints and returns, for each type of --mixup, a list with a MixupConfig for each set of pairs. Without mixup, it
    only returns []. A step draws a type of mixup, and then a set of pairs, by default pos-neg or anc-neg."""
    if args.mixup == ['none'] or args.strength == 0:
        return []
    choices = []
    for mixup in args.mixup:
        # Which pairs: by default pos-neg or anc-neg, Section 4.1
        if args.loss == 'proxynca_pp':              # note 5: each image, as an anchor, is mixed with its negatives
            pairs = ['anc-neg']
        elif args.pairs != 'both':
            pairs = [args.pairs]
        elif args.loss == 'proxy_anchor' and mixup != 'embed':
            pairs = ['pos-neg']                     # anc-neg would mix a proxy, which has no image or feature map
        else:
            pairs = ['pos-neg', 'anc-neg']
        # How many negatives. auto: 3 in input mixup (Section B.2), or 1 if --mixup has feature as well (Table 6); the
        # other types take all. pos-pos mixes no negatives.
        k = None
        if args.hard_negatives not in ('auto', 'all'):
            k = args.hard_negatives
        elif args.hard_negatives == 'auto' and mixup == 'input' and args.pairs != 'pos-pos':
            k = 1 if 'feature' in args.mixup else 3
        print(f'{args.loss}, {mixup} mixup: {" or ".join(pairs)}' + ('' if k is None else f', {k} hardest negatives'))
        choices.append([MixupConfig(mixup, each, k, args.alpha) for each in pairs])
    return choices


def get_args(argv=None):
    parser = common.parser(__doc__, NOTES, __file__)
    add = parser.add_argument_group('Metrix').add_argument
    add('--loss', choices=list(LOSSES), default='ms', help='base loss')
    add('--mixup', nargs='+', choices=['none', 'input', 'feature', 'embed'], default=['feature'],
        help='what is mixed; if several are given, each step draws one')
    add('--pairs', choices=['both', 'pos-neg', 'anc-neg', 'pos-pos'], default='both',
        help='which pairs are mixed; both: each step draws pos-neg or anc-neg')
    add('--hard-negatives', type=common.number_or(int, 'all', 'auto'), default='auto', metavar='K',
        help='number of hardest negatives per anchor that are mixed; auto: 3 for input mixup (1 if it is combined with '
             'feature), otherwise all')
    add('--alpha', type=float, default=2.0, help='lambda comes from Beta(alpha, alpha)')
    add('--strength', type=float, default=0.4, help='w, weight of the mixed loss (mixup strength)')
    add('--beta', type=float, default=18.0, help='ms: scaling factor of the positives')
    add('--gamma', type=float, default=75.0, help='ms: scaling factor of the negatives')
    add('--m', type=float, default=0.77, help='ms and contrastive: margin')
    add('--epsilon', type=common.number_or(float, 'off'), default=0.39,
        help='ms: tolerance of the miner in the clean loss; off: no miner')
    add('--reduction', choices=['mean', 'sum'], default='mean', help='contrastive: mean, or sum as in Eq. (1) and (14)')
    add('--proxy-alpha', type=float, default=32.0, help='proxy_anchor: scaling factor')
    add('--delta', type=float, default=0.1, help='proxy_anchor: margin')
    add('--temperature', type=float, default=1 / 9,
        help='proxynca_pp: temperature of the softmax')
    add('--proxy-lr-mult', type=float, help='learning rate of the proxies, as a multiple of --lr')
    args = common.parse(parser, DEFAULTS, argv, USES)
    reject_impossible_mixup(args)
    return args


def reject_impossible_mixup(args):
    """Raises UsageError for mixup that is not possible."""
    if 'none' in args.mixup and len(args.mixup) > 1:
        raise common.UsageError('--mixup none cannot be combined with other types')
    if args.loss not in PROXY_LOSSES:
        common.require_pairs(args)
    # With proxies, a batch of one class is enough for the clean loss, but not for mixup, whose negatives are images.
    elif args.mixup != ['none'] and args.strength and args.pairs != 'pos-pos' and args.batch_size < 2 * args.per_class:
        raise common.UsageError(f'--batch-size {args.batch_size} with --per-class {args.per_class} is a batch of one '
                                'class, which has no negative to mix: raise --batch-size')
    least = 2 if args.loss == 'proxy_anchor' else 3         # two positives, and the anchor if it is an image
    if args.pairs == 'pos-pos' and 0 < args.per_class < least:
        raise common.UsageError(f'--pairs pos-pos mixes two positives: take --per-class 0 or at least {least}')
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
    if 'input' in args.mixup:       # the number of mixed images varies, and cuDNN would benchmark each number anew
        torch.backends.cudnn.benchmark = False
    groups = [dict(params=model.parameters())]
    loss_params = {}
    if args.loss in PROXY_LOSSES:                   # the proxies of both losses begin as in train_proxy_anchor.py
        C = data.train.num_classes
        proxies = torch.randn(C, model.dim) * (2 / C) ** 0.5
        loss_params = dict(proxies=torch.nn.Parameter(proxies.to(args.device)))                     # (C, D)
        groups.append(dict(params=[loss_params['proxies']], lr=args.lr * args.proxy_lr_mult))
    optimizer = common.make_optimizer(args, groups)
    hyper = dict(
        contrastive=dict(m=args.m, reduction=args.reduction),
        ms=dict(beta=args.beta, gamma=args.gamma, m=args.m),
        proxy_anchor=dict(alpha=args.proxy_alpha, delta=args.delta),
        proxynca_pp=dict(temperature=args.temperature))[args.loss]
    base = BaseLoss(args.loss, hyper, **loss_params)
    epsilon = args.epsilon if args.loss == 'ms' and args.epsilon != 'off' else None

    def step(images, labels):
        f = model.features(images)                                      # (B, c, h, w)
        z = model.head(f)                                               # (B, D)
        loss = clean_loss(base.kind, z, labels, base.proxies, epsilon, **base.hyper)
        if choices:
            # The type of mixup and the set of pairs are sampled in each step, Sections B.4 and B.2.
            config = random.choice(random.choice(choices))
            levels = dict(input=images, feature=f, embed=z)
            loss = loss + args.strength * mixed_loss(base, config, model, levels, labels)           # Eq. (10)
        return loss

    return common.train(args, model, data, step, optimizer, loss_params)


NOTES = """
What differs from the paper
    1. Each pair is mixed once, with the same lambda for all anchors. Eq. (8) seems to draw lambda anew for each anchor.
       In Section B.4, pos-pos contains both orders of a pair, and each positive with itself; here it does not. Of the
       pairs that Section 3.5 allows, neg-neg and anchor-positive are left out. Mixed embeddings are L2-normalized, as
       in the released code.
    2. Contrastive uses means where Eq. (1) and (14) have sums; --reduction sum is as printed.
    3. The clean loss of ms uses the miner of the released code, which the paper does not mention.
    4. Proxy-Anchor follows its own paper: it has s + delta on negatives (Table 1: s - m), and no factors 1/beta and
       1/gamma. Its mixed loss is averaged over the classes in the batch; Eq. (10), with all proxies as anchors, divides
       by C. A proxy has no image and no feature map, so anc-neg pairs exist in embedding mixup only. In input mixup,
       negatives are hard for the anchor, a proxy; in the paper, for an image.
    5. ProxyNCA++ follows its authors' code, see clean_loss. In Table 1, its positives and negatives are proxies. They
       have no image or feature map to mix, yet the paper reports input and feature mixup for this loss. Here a mixed
       example v is classified with two targets, by lam CE(v, y_i) + (1 - lam) CE(v, y_j), where CE is cross-entropy.
       The loss is averaged over the mixed examples. Each image is mixed with its negatives (anc-neg).
What differs from the released code (github.com/billpsomas/metrix: contrastive at 7ce730c, ms with embedding mixup at
b679703). It has feature mixup for contrastive only, no mixup for Proxy-Anchor, and no ProxyNCA++. It trains with Adam,
draws one lambda per batch, and reports the epoch that is best on the test set. tests/results/patches.py has its losses.
    6.                                here               code, contrastive               code, ms
       which positives are mixed      all                the first in the batch; in      the least similar one
                                                         input mixup, all
       which anchors have anc-neg     all                those without a positive        none
       hard negatives are those of    each anchor        in input mixup, the first       the miner
                                                         anchor (a bug)
       which terms have mixed ones    both               both                            the positive one (a bug)
       what is averaged               anchors (note 2)   values that are not 0           mixed examples
    7. The paper does not state the margin of contrastive. The one here has the highest MAP@R on the validation classes
       of a fold of CUB, without mixup (experiment `margin` in tests/results). The released code trains contrastive for
       60 epochs, with a margin of 0.5 on distances, which is 0.875 as a cosine. It mixes one hard negative in input
       mixup, and has w = 0.3 for anc-neg pairs in embedding mixup.
    8. Its positive term of ms has one logarithm for the sums over clean and over mixed examples, log(lam (1 + clean) +
       0.4 (1 + mixed)). Because of an indexing bug, less than 1% of the mixed examples are used, and nearly all of
       these are added to the sum of another anchor. The clean loss, too, is divided by the number of mixed examples,
       about 9,500 on CUB, instead of by 100 anchors. So gradients are about 95 times smaller than without mixup, and
       about as large as the weight decay that Adam adds.
    9. Its commands for ms on CUB      epochs                   learning rate           sum of rates after the freeze
       without mixup                   60                       1e-4, halved every 5    5e-4
       with mixup                      100 (its README: 60)     1e-4, halved every 10   15e-4
       So training with mixup has three times the sum of learning rates. On the other datasets, its two schedules are
       equal. Here both are that of the second row, with 100 epochs, as the paper states (Section B.1).
   10. Its other commands differ from the recipes here. For ms and Proxy-Anchor the rate decays every 5 epochs on Cars,
       and every 20 on SOP and In-Shop. Contrastive with mixup freezes BatchNorm on SOP and In-Shop, and the backbone
       for 5 epochs (here: the backbone, on SOP only). Without mixup, contrastive on In-Shop freezes the backbone for 1
       epoch, and decays every 5.
Tables and figures of the paper
    Table 5, CUB, ms         --dataset cub, with --mixup none, input, feature (the default) or embed; 100 epochs take
                             about a quarter of an hour on an H200, and a day on one CPU core
    Tables 2, 5              --dataset, --loss and --mixup choose a cell
    Tables 6, 7              --loss contrastive with --mixup, --pairs and --hard-negatives, in the last row
                             --mixup input feature embed; Table 6 has Cars, Table 7 CUB and --dim 128
    Fig. 6                   --dataset cars --loss contrastive --strength W
    Fig. 2, Section 4.3      tests/results/fig2.py; eval.py --analyse
"""


if __name__ == '__main__':
    common.cli(main)
