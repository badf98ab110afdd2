"""train_contrastive.py -- contrastive loss: positive pairs together, negative pairs apart by a margin.

Hadsell, Chopra, LeCun. Dimensionality Reduction by Learning an Invariant Mapping. CVPR 2006
Two images of one class are a positive pair and attract each other. Two images of different classes are a negative pair
and repel each other, unless they are farther apart than a margin. Three later papers (see NOTES) write this loss: with
distances in Reality Check Eq. (1), with their squares in HSE Eq. (2), with cosine similarities in Metrix Eq. (1).

    paper             code         flag           meaning
    d_p, d_n          d            -              (B, B) Euclidean distances of L2-normalized embeddings z, 0 to 2
    s                 s            -              (B, B) cosine similarities; d^2 = 2 - 2 s
    m_pos             pos_margin   --pos-margin   a positive pair closer than this has zero loss
    m_neg; m in HSE   neg_margin   --neg-margin   a negative pair farther apart than this has zero loss
    m in Metrix       margin       --margin       a negative pair less similar than this has zero loss

    python train_contrastive.py --dataset cub --data data    # without flags: a small built-in dataset, on a CPU
"""
import torch

import common


def contrastive_loss(z, y, pos_margin=0.0, neg_margin=0.5, power=1):
    """Reality Check Eq. (1), for a positive pair at distance d_p and a negative pair at distance d_n:

    L = [d_p - m_pos]_+ + [m_neg - d_n]_+,    where [t]_+ = max(t, 0)

    HSE Eq. (2), which is power=2 and pos_margin=0, for one pair at distance d, positive if y = 1 and negative if y = 0:

    L = y d^2 + (1 - y) [m - d]_+^2

    The loss of a batch is a mean over its positive pairs plus a mean over its negative pairs. In a single mean the
    positive pairs would hardly count: 100 random images of CUB have about 97 positive and 9,800 negative pairs, if
    (a, b) and (b, a) are two pairs. Most negative pairs have zero loss, and a mean over all of them would be almost 0.
    So each mean is over the pairs with non-zero loss only.

    z           (B, D) L2-normalized embeddings
    y           (B,)   class labels (not the y of HSE)
    pos_margin  m_pos, distance up to which a positive pair has zero loss
    neg_margin  m_neg, distance from which on a negative pair has zero loss
    power       1 or 2, exponent of both hinges
    returns     scalar >= 0; a mean over no pairs is 0; half precision is upcast to float32
    """
    d = distances(common.at_least_float32(z))                            # (B, B)  HSE Eq. (1)
    positive, negative = pairs(y)
    # Reality Check Eq. (1), first term; with power 2, first term of HSE Eq. (2)
    pull = (d - pos_margin).clamp_min(0).pow(power).masked_fill(~positive, 0)
    # Reality Check Eq. (1), second term; with power 2, second term of HSE Eq. (2)
    push = (neg_margin - d).clamp_min(0).pow(power).masked_fill(~negative, 0)
    return mean_nonzero(pull) + mean_nonzero(push)


def pairs(y):
    """Masks of the positive and of the negative pairs, (B,) -> (B, B), (B, B). No image is paired with itself."""
    same = y[:, None] == y[None, :]                                      # (B, B)
    itself = torch.eye(len(y), dtype=torch.bool, device=y.device)        # by index: two identical images are a pair
    return same & ~itself, ~same


def distances(z):
    """Euclidean distances between all L2-normalized embeddings, (B, D) -> (B, B)

    Embeddings that are equal, or differ by floating-point error only, have distance 0 and gradient 0, because the
    gradient of a distance is undefined there. A negative pair at distance 0 has the largest loss, but no gradient.
    """
    s = z @ z.T                                                          # (B, B)
    length2 = s.diagonal()                           # squared norms, not exactly 1 if z was in half precision
    d2 = length2[:, None] + length2[None, :] - 2 * s
    # For close embeddings, d2 is the difference of two values near 2, each with a floating-point error of about eps.
    # With some slack, a d2 up to 16 eps may be an error only. In float32, that is a distance up to 0.0014.
    floor = 16 * torch.finfo(d2.dtype).eps
    # The derivative of sqrt at 0 is infinite, and with where() only, the gradient would be 0 times infinity, which is
    # NaN. So d2 is clamped first. If d2 itself is NaN, d2 <= floor is false, and the NaN shows in the loss.
    return torch.where(d2 <= floor, 0, d2.clamp_min(floor).sqrt())


def mean_nonzero(t):
    """Mean of those entries of t that are above 0, or 0 if there are none"""
    return t.sum() / (t > 0).sum().clamp_min(1)


def contrastive_similarity_loss(z, y, margin=0.5, reduction='mean'):
    """Metrix Eq. (1), for an anchor a with its positives P(a) and its negatives N(a):

    l(a) = sum_{p in P(a)} -s(a,p)  +  sum_{n in N(a)} [s(a,n) - m]_+

    Each image of the batch is the anchor once, and the loss is the mean of l(a). Only negatives have a margin, so
    positives are attracted even if they are close.

    z          (B, D) L2-normalized embeddings
    y          (B,)   class labels
    margin     m, cosine similarity up to which a negative pair has zero loss
    reduction  'sum': the equation as printed; 'mean': the first sum is divided by the number of positives, the second
               sum by the number of negatives above the margin
    returns    scalar, can be negative; an anchor without pairs adds 0; half precision is upcast to float32
    """
    if reduction not in ('mean', 'sum'):
        raise ValueError(f"reduction is 'mean' or 'sum', not {reduction!r}")
    z = common.at_least_float32(z)
    s = z @ z.T                                                          # (B, B)
    positive, negative = pairs(y)
    pull = -s.masked_fill(~positive, 0).sum(dim=1)                       # (B,) Metrix Eq. (1), first sum
    excess = (s - margin).clamp_min(0).masked_fill(~negative, 0)         # (B, B)
    push = excess.sum(dim=1)                                             # (B,) Metrix Eq. (1), second sum
    if reduction == 'mean':
        pull = pull / positive.sum(dim=1).clamp_min(1)
        push = push / (excess > 0).sum(dim=1).clamp_min(1)
    return (pull + push).mean()


# Training recipes, see common.BASE. The benchmarks have the recipes of Metrix's contrastive baseline
# (github.com/billpsomas/metrix, b679703), except for lr on In-Shop.
CUB = dict(dim=512, pool='avg+max', freeze_bn=True, min_crop=0.08, epochs=60, batch_size=100, per_class=0,
           optimizer='adam', lr=1e-4, weight_decay=1e-4, schedule='step', decay_epochs=10, decay_rate=0.1,
           warmup=5, clip=10.0)
DEFAULTS = {
    'shapes': dict(neg_margin=1.0, per_class=2),    # how they were selected: tests/results/README.md
    'folder': dict(),
    'vectors': dict(epochs=6),
    'cub': CUB,
    'cars': CUB,
    'sop': CUB | dict(freeze_bn=False, per_class=5, lr=3e-5, decay_rate=0.25),
    # lr is 1e-4 as in Table 4 of Metrix. The released command has 3e-5, but also, by mistake, SOP as its dataset.
    'inshop': CUB | dict(freeze_bn=False, per_class=5, decay_epochs=5, decay_rate=0.25, warmup=1),
}


def get_args(argv=None):
    parser = common.parser(__doc__, NOTES, __file__)
    add = parser.add_argument_group('Contrastive').add_argument
    add('--form', choices=['distance', 'similarity'], default='distance',
        help='loss on distances or on cosine similarities')
    add('--pos-margin', type=common.between(-2, 2), default=0.0,
        help='form distance: a positive pair closer than this has zero loss')
    add('--neg-margin', type=common.between(-2, 2), default=0.5,
        help='form distance: a negative pair farther apart than this has zero loss')
    add('--power', type=int, choices=[1, 2], default=1, help='form distance: exponent of both hinges')
    add('--margin', type=common.between(-1, 1), default=0.5,
        help='form similarity: a negative pair less similar than this has zero loss')
    add('--reduction', choices=['mean', 'sum'], default='mean',
        help='form similarity: mean or sum over the pairs of an anchor')
    uses = {'form': dict(distance='pos_margin neg_margin power', similarity='margin reduction')}
    args = common.parse(parser, DEFAULTS, argv, uses)
    common.require_two_classes(args)
    return args


def main(argv=None):
    args = get_args(argv)
    common.set_seed(args.seed)
    data = common.dataset_from(args)
    model = common.build(args, data=data)
    optimizer = common.make_optimizer(args, [dict(params=model.parameters())])

    def step(images, labels):
        z = model(images)                                                # (B, D)
        if args.form == 'similarity':
            return contrastive_similarity_loss(z, labels, args.margin, args.reduction)
        return contrastive_loss(z, labels, args.pos_margin, args.neg_margin, args.power)

    return common.train(args, model, data, step, optimizer)


NOTES = """
The three later papers
    Reality Check: Musgrave, Belongie, Lim. A Metric Learning Reality Check. ECCV 2020. arXiv:2003.08505
    HSE: Yang et al. HSE: Hybrid Species Embedding for Deep Metric Learning. ICCV 2023
    Metrix: Venkataramanan et al. It Takes Two to Tango: Mixup for Deep Metric Learning. ICLR 2022. arXiv:2106.04990
What differs from the papers
    1. Hadsell et al. have the squared loss, times 1/2, on embeddings that are not L2-normalized. Their Y is 1 for a
       negative pair.
    2. HSE prints the squared loss (--power 2). Metrix prints the loss on cosine similarities (--form similarity
       --reduction sum). The code that both released has distances, not squared, with a margin of 0.5, and means over
       the pairs with non-zero loss. This is the default here.
    3. A margin of 0.5 is not the same in both forms. A distance of 0.5 is a cosine similarity of 0.875, and a cosine
       similarity of 0.5 is a distance of 1.
    4. The paper of Metrix has AdamW and 100 epochs. The benchmarks here have Adam and 60 epochs, as in its code.
    5. In the Reality Check, both margins are tuned for each dataset, with BN-Inception, 128 dimensions, and batches of
       8 classes with 4 images each. Its released results for CUB have m_pos = -0.20 and m_neg = 0.3841. With --power 1,
       m_pos = -0.20 adds the constant 0.20 to the loss of each positive pair, so the gradient is the same as with
       m_pos = 0. Positive pairs at distance 0 are an exception: their loss is not zero, so they count in the mean.
What differs from the released code (github.com/billpsomas/Metrix_ICLR22, 7ce730c)
    6. The released code reports its best epoch on the test set.
Results of the papers
    Metrix (Table 2), with ResNet-50 and 512 dimensions: R@1 64.7 on CUB, 81.6 on Cars, 74.9 on SOP, 86.4 on In-Shop.
    Reality Check (Tables 4 to 6), with 128 dimensions: R@1 59.7 on CUB, 69.8 on Cars, 69.3 on SOP, printed as P@1. With
    the concatenated embeddings of four networks: 68.1, 81.8, 73.1.
    Reality Check, Tables 4 to 6: --protocol reality-check, --pos-margin and --neg-margin; Table 2, the NMI of random
    networks: --weights none --epochs 0, then eval.py --analyse.
"""


if __name__ == '__main__':
    common.cli(main)
