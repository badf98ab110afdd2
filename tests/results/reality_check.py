"""reality_check.py -- the losses of the Reality Check's tables that have no script of their own.

Musgrave, Belongie, Lim. A Metric Learning Reality Check. ECCV 2020. arXiv:2003.08505, Tables 4 to 8, made with
the library pytorch-metric-learning. P(a) are the other images of the class of anchor a in the batch, N(a) the images of
other classes. The defaults of a loss are its released settings for CUB, from docs/papers/mlrc.md in the repository
KevinMusgrave/powerful-benchmarker; those of the other tables are in the commands of papers.md and benchmarks.md.

Run
    python tests/results/reality_check.py --loss fastap                                     # on shapes, offline
    python tests/results/reality_check.py --loss fastap --dataset cub --protocol reality-check --fold 0/4
"""
import math
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path += [str(ROOT), str(ROOT / 'tests/course')]

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from train_triplet import DEFAULTS as RECIPES  # noqa: E402
from train_triplet import triplet_loss  # noqa: E402

import common  # noqa: E402
from train_contrastive import mean_nonzero, pairs  # noqa: E402

# Every loss takes L2-normalized embeddings z (B, D) and class labels y (B,), upcasts half precision to float32, and
# returns a scalar. A batch without the pairs that a loss needs has loss 0.


def ntxent_loss(z, y, temperature):
    """NT-Xent, or InfoNCE, with labels (Sohn, NIPS 2016; Chen et al., ICML 2020), averaged over positive pairs (a, p):
    -log( exp(s_ap / T) / (exp(s_ap / T) + sum_{n in N(a)} exp(s_an / T)) )"""
    z = common.at_least_float32(z)
    logits = z @ z.T / temperature                                                  # (B, B)
    positive, negative = pairs(y)
    others = logits.masked_fill(~negative, -1e9).logsumexp(dim=1, keepdim=True)     # (B, 1); exp(-1e9) is 0
    loss = F.softplus(others - logits) * positive                                   # (B, B): log(1 + exp(n - p))
    return loss.sum() / positive.sum().clamp_min(1)


def fastap_loss(z, y, bins):
    """FastAP (Cakir et al., Deep Metric Learning to Rank, CVPR 2019): 1 - average precision, averaged over the anchors
    that have positives. Squared distances, from 0 to 4, are counted in bins with linear weights:
    AP(a) = 1/|P(a)| sum_l h+_l H+_l / H_l, where h+ counts positives, h all images, and H+, H are their cumulative sums
    """
    z = common.at_least_float32(z)
    edges = torch.linspace(0, 4, bins + 1, dtype=z.dtype, device=z.device)          # (L,)
    weight = (1 - (2 - 2 * z @ z.T - edges[:, None, None]).abs() * bins / 4).clamp_min(0)       # (L, B, B)
    positive, negative = pairs(y)
    of_positives = (weight * positive).sum(dim=2)                                   # (L, B): h+
    below, all_below = (h.cumsum(dim=0) for h in (of_positives, (weight * (positive | negative)).sum(dim=2)))
    precision = below / all_below.clamp_min(1e-9)                                   # where H is 0, so is h+
    number = positive.sum(dim=1)                                                    # (B,)
    loss = 1 - (of_positives * precision).sum(dim=0) / number.clamp_min(1)
    return (loss * (number > 0)).sum() / (number > 0).sum().clamp_min(1)


def margin_loss(z, y, beta, margin):
    """Margin (Wu et al., Sampling Matters in Deep Embedding Learning, ICCV 2017), with a learnable boundary beta of
    positives and negatives, one for all classes (1,) or one for each (C,):
    [d_ap - beta + m]_+ and [beta - d_an + m]_+, summed over all triplets (a, p, n) and divided by the number of active
    terms. So a pair counts once for each triplet: a positive |N(a)| times, a negative |P(a)| times."""
    z, beta = common.promote_dtypes(z, beta)
    d = torch.cdist(z, z, compute_mode='donot_use_mm_for_euclid_dist')              # (B, B)
    boundary = beta.expand(len(y), 1) if len(beta) == 1 else beta[y][:, None]       # (B, 1)
    positive, negative = pairs(y)
    terms = [(d - boundary + margin).clamp_min(0) * positive, (boundary - d + margin).clamp_min(0) * negative]
    times = [of_anchor.sum(dim=1, keepdim=True) for of_anchor in (negative, positive)]          # (B, 1), (B, 1)
    active = sum(((term > 0) * n).sum() for term, n in zip(terms, times))
    return sum((term * n).sum() for term, n in zip(terms, times)) / active.clamp_min(1)


def arcface_loss(z, y, weights, margin, s):
    """ArcFace (Deng et al., CVPR 2019): softmax over s cos(theta_c) with class weights (C, D), where the target class
    has s cos(theta + m), m in degrees. Beyond theta = 180 - m, where that would rise again, it has s (cos(theta) -
    m sin(m)), m in radians, as in the authors' code."""
    z, weights = common.promote_dtypes(z, weights)
    m = math.radians(margin)
    cosine = z @ F.normalize(weights, dim=1).T                                      # (B, C)
    target = cosine.gather(1, y[:, None]).clamp(-1 + 1e-7, 1 - 1e-7)                # (B, 1); acos has no slope at 1
    theta = target.acos()
    moved = torch.where(theta <= math.pi - m, (theta + m).cos(), target - m * math.sin(m))
    return F.cross_entropy(s * cosine.scatter(1, y[:, None], moved), y)


def snr_loss(z, y, pos_margin, neg_margin, regularizer):
    """Contrastive loss of SNR distances (Yuan et al., Signal-to-Noise Ratio, CVPR 2019), d_ab = var(z_b - z_a) /
    var(z_a) with the variance over the D coordinates: [d_ap - m_pos]_+ and [m_neg - d_an]_+, each averaged over its
    active pairs, plus `regularizer` times the mean of |sum of the coordinates|"""
    z = common.at_least_float32(z)
    noise = (z[None] - z[:, None]).var(dim=2)                                       # (B, B)
    d = noise / z.var(dim=1, keepdim=True).clamp_min(1e-12)
    positive, negative = pairs(y)
    pull = mean_nonzero((d - pos_margin).clamp_min(0) * positive)
    push = mean_nonzero((neg_margin - d).clamp_min(0) * negative)
    return pull + push + regularizer * z.sum(dim=1).abs().mean()


def soft_triple_loss(z, y, centers, s, gamma, tau, margin):
    """SoftTriple (Qian et al., ICCV 2019) with K centres per class (C, K, D): softmax over s S_c, for the target class
    s (S_c - margin). S_c = sum_k q_k z.c_k is the similarity to a class, with q = softmax over k of z.c_k / gamma. Plus
    tau times the mean of |c_k - c_l| over pairs k < l of centres of a class, as in the library when the tables were
    made; the authors' code has half of that. Its lambda is s here."""
    z, centers = common.promote_dtypes(z, centers)
    c = F.normalize(centers, dim=2)                                                 # (C, K, D)
    to_centers = torch.einsum('bd,ckd->bck', z, c)                                  # (B, C, K)
    to_classes = ((to_centers / gamma).softmax(dim=2) * to_centers).sum(dim=2)      # (B, C)
    logits = s * (to_classes - margin * F.one_hot(y, len(c)).to(c.dtype))           # (B, C)
    loss = F.cross_entropy(logits, y)
    if tau == 0 or c.shape[1] == 1:
        return loss
    k, other = torch.triu_indices(c.shape[1], c.shape[1], 1, device=c.device)
    apart = (2 + 1e-5 - 2 * (c[:, k] * c[:, other]).sum(dim=2)).sqrt()              # (C, pairs), with a slope at 0
    return loss + tau * apart.mean()


LOSSES = dict(triplet=triplet_loss, ntxent=ntxent_loss, fastap=fastap_loss, margin=margin_loss, arcface=arcface_loss,
              snr=snr_loss, soft_triple=soft_triple_loss)
# The released settings for CUB. loss_lr is the learning rate of what the loss learns. Not among them is the number
# of centres: 10 is the default of the library today.
RELEASED = dict(
    triplet=dict(margin=0.0961), ntxent=dict(temperature=0.0091), fastap=dict(bins=17),
    margin=dict(margin=0.0878, beta=0.7838, loss_lr=1.31e-3), arcface=dict(margin=23.22, s=100.0, loss_lr=5.13e-3),
    snr=dict(pos_margin=0.3264, neg_margin=0.8446, regularizer=0.1382),
    soft_triple=dict(s=78.02, gamma=58.95, tau=0.3754, margin=0.4307, centers=10, loss_lr=5.37e-5))
USES = {loss: ' '.join(settings) for loss, settings in RELEASED.items()} | dict(margin='margin beta loss_lr beta_of')
CLASSIFICATION = ('arcface', 'soft_triple')         # one image per class in a batch, Section 3.1
DEFAULTS = RECIPES | {(dataset, loss): settings for dataset in (*RECIPES, 'reality-check')
                      for loss, settings in RELEASED.items()}
for loss in CLASSIFICATION:
    DEFAULTS['reality-check', loss] = RELEASED[loss] | dict(per_class=1)


def get_args(argv=None):
    parser = common.parser(__doc__, file=__file__)
    add = parser.add_argument_group('losses').add_argument
    number, above_0 = common.between(-1000, 1000), common.at_least(1e-6, float)
    add('--loss', choices=list(LOSSES), default='triplet', help='loss')
    add('--margin', type=number, help='m: a distance, of arcface an angle in degrees, of soft_triple a similarity')
    add('--temperature', type=above_0, help='ntxent: divides similarities')
    add('--bins', type=common.at_least(1), help='fastap: number of bins')
    add('--beta', type=number, help='margin: the boundary at the start')
    add('--beta-of', choices=['all', 'class'], default='all', help='margin: one boundary for all classes, or for each')
    add('--s', type=above_0, help='arcface, soft_triple: inverse temperature')
    add('--pos-margin', type=number, help='snr: positives closer than this have zero loss')
    add('--neg-margin', type=number, help='snr: negatives farther than this have zero loss')
    add('--regularizer', type=common.at_least(0, float), help='snr: weight of the regularizer')
    add('--gamma', type=above_0, help='soft_triple: divides similarities to centres')
    add('--tau', type=common.at_least(0, float), help='soft_triple: weight of the regularizer')
    add('--centers', type=common.at_least(1), help='soft_triple: centres per class')
    add('--loss-lr', type=common.at_least(0, float), help='learning rate of boundaries, weights or centres')
    args = common.parse(parser, DEFAULTS, argv, uses={'loss': USES})
    if args.loss not in CLASSIFICATION:
        common.require_two_classes(args)
    return args


def new_parameters(args, classes, dim):
    """What a loss learns, {name of its argument: tensor}. Weights and centres begin with length 1, our choice."""
    if args.loss == 'margin':
        return dict(beta=torch.full((classes if args.beta_of == 'class' else 1,), args.beta))
    if args.loss == 'arcface':
        return dict(weights=F.normalize(torch.randn(classes, dim), dim=1))
    if args.loss == 'soft_triple':
        return dict(centers=F.normalize(torch.randn(classes, args.centers, dim), dim=2))
    return {}


def main(argv=None):
    args = get_args(argv)
    common.set_seed(args.seed)
    data = common.dataset_from(args)
    model = common.build(args, data=data)
    loss_params = {name: torch.nn.Parameter(t.to(args.device))
                   for name, t in new_parameters(args, data.train.num_classes, model.dim).items()}
    groups = [dict(params=model.parameters())]
    if loss_params:                     # boundaries have no weight decay, as in the released runs
        decay = dict(weight_decay=0.0) if args.loss == 'margin' else {}
        groups.append(dict(params=[*loss_params.values()], lr=args.loss_lr, **decay))
    optimizer = common.make_optimizer(args, groups)
    hyper = {name: getattr(args, name) for name in RELEASED[args.loss] if name not in {'loss_lr', *loss_params}}

    def step(images, labels):
        return LOSSES[args.loss](model(images), labels, **loss_params, **hyper)

    return common.train(args, model, data, step, optimizer, loss_params=loss_params)


if __name__ == '__main__':
    common.cli(main)
