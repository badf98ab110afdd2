"""train_contrastive.py -- contrastive loss: positive pairs together, negative pairs apart by a margin.

Hadsell, Chopra, LeCun. Dimensionality Reduction by Learning an Invariant Mapping. CVPR 2006
Two images of one class are a positive pair and attract each other. Two images of different classes are a negative pair
and repel each other, unless they are farther apart than a margin. Three later papers, cited at the end, print three
forms of the loss: Reality Check Eq. (1) with distances, HSE Eq. (2) with squared distances, and Metrix Eq. (1) with
cosine similarities.
tests/papers/README.md lists the letters that other papers use for other things.

    paper             code         flag           meaning
    d_p, d_n          d            -              (B, B) distances between L2-normalized embeddings z, from 0 to 2
    s                 s            -              (B, B) cosine similarities; d^2 = 2 - 2 s
    m_pos             pos_margin   --pos-margin   a positive pair closer than this has zero loss
    m_neg; m in HSE   neg_margin   --neg-margin   a negative pair farther apart than this has zero loss
    m in Metrix       margin       --margin       a negative pair less similar than this has zero loss

    python train_contrastive.py [--dataset cub --data data]
"""
import torch

import common


@common.loss            # inside, half precision becomes float32
def contrastive_loss(z, y, pos_margin=0.0, neg_margin=0.5, power=1):
    """The mean loss of the positive pairs whose loss is not 0, plus that of the negative pairs whose loss is not 0.

    Reality Check Eq. (1), for a positive pair at distance d_p and a negative pair at distance d_n:
        L = [d_p - m_pos]_+ + [m_neg - d_n]_+,    where [t]_+ = max(t, 0)
    HSE Eq. (2) is power=2 and pos_margin=0. For one pair at distance d (y_pair is 1 if positive, 0 if negative):
        L = y_pair d^2 + (1 - y_pair) [m - d]_+^2

    Why two means? In a single one the positive pairs would hardly count: 100 random images of CUB have about 97
    positive and 9,800 negative pairs, if (a, b) and (b, a) are two pairs. Why only pairs with non-zero loss? Most
    negative pairs have zero loss, and a mean over all of them would be almost 0.

    z           (B, D) L2-normalized embeddings
    y           (B,)   class labels
    pos_margin  m_pos: a positive pair closer than this has zero loss
    neg_margin  m_neg: a negative pair farther apart than this has zero loss
    power       1 or 2, exponent of both hinges
    returns     scalar >= 0; a mean over no pairs is 0
    """
    y = common.check_labels(y, len(z))
    d = distances(z)                                                     # (B, B)
    positive, negative = pairs(y)
    # Reality Check Eq. (1), first term: [d_p - m_pos]_+. With power 2, first term of HSE Eq. (2)
    pull = (d - pos_margin).clamp_min(0).pow(power).masked_fill(~positive, 0)
    # Reality Check Eq. (1), second term: [m_neg - d_n]_+. With power 2, second term of HSE Eq. (2)
    push = (neg_margin - d).clamp_min(0).pow(power).masked_fill(~negative, 0)
    return mean_nonzero(pull) + mean_nonzero(push)


def pairs(y):
    """Masks of the positive and of the negative pairs, (B,) -> (B, B), (B, B). No image is paired with itself."""
    same = y[:, None] == y[None, :]                                      # (B, B)
    itself = torch.eye(len(y), dtype=torch.bool, device=y.device)        # by index: two copies of an image are a pair
    return same & ~itself, ~same


def distances(z):
    """Euclidean distances between all L2-normalized embeddings, (B, D) -> (B, B)

    The gradient of a distance is undefined at 0. So embeddings that are equal up to rounding get distance 0 and
    gradient 0. A negative pair at distance 0 has the largest loss, but no gradient.
    """
    s = z @ z.T                                                          # (B, B)
    length2 = s.diagonal()                           # squared norms, not exactly 1 if z was in half precision
    d2 = length2[:, None] + length2[None, :] - 2 * s
    # For close embeddings, d2 is the difference of two numbers near 2, so values below 16 eps can be rounding errors.
    # In float32, these are distances below 0.0014.
    floor = 16 * torch.finfo(d2.dtype).eps
    # sqrt has an infinite derivative at 0. So d2 is clamped, and masked_fill writes 0, without gradient.
    return d2.clamp_min(floor).sqrt().masked_fill(d2 <= floor, 0)        # HSE Eq. (1)


def mean_nonzero(t):
    """Mean of the entries of t that are not 0, or 0 if there are none. All entries have to be >= 0."""
    return t.sum() / (t > 0).sum().clamp_min(1)


@common.loss
def contrastive_similarity_loss(z, y, margin=0.5, reduction='mean'):
    """Metrix Eq. (1), for an anchor a with its positives P(a) and its negatives N(a):

    l(a) = sum_{p in P(a)} -s(a,p)  +  sum_{n in N(a)} [s(a,n) - m]_+

    Each image of the batch is the anchor once, and the loss is the mean of l(a). Only negatives have a margin, so
    positives are attracted even if they are close.

    z          (B, D) L2-normalized embeddings
    y          (B,)   class labels
    margin     m: a negative pair less similar than this has zero loss
    reduction  within l(a), 'sum': as printed; 'mean': the first sum is divided by the number of positives, the second
               by the number of negatives above the margin
    returns    scalar, can be negative; an anchor without pairs adds 0
    """
    y = common.check_labels(y, len(z))
    if reduction not in ('mean', 'sum'):
        raise ValueError(f"reduction is 'mean' or 'sum', not {reduction!r}")
    s = z @ z.T                                                          # (B, B)
    positive, negative = pairs(y)
    pull = -s.masked_fill(~positive, 0).sum(dim=1)                       # (B,) Metrix Eq. (1), first sum
    excess = (s - margin).clamp_min(0).masked_fill(~negative, 0)         # (B, B)
    push = excess.sum(dim=1)                                             # (B,) Metrix Eq. (1), second sum
    if reduction == 'mean':
        pull = pull / positive.sum(dim=1).clamp_min(1)
        push = push / (excess > 0).sum(dim=1).clamp_min(1)
    return (pull + push).mean()


# ---- recipes: the defaults of flags for each dataset; --help explains the flags

# What `python train_contrastive.py` runs: a small ResNet from scratch on the built-in dataset
SHAPES = dict(
    arch='resnet18', weights='none', pool='avg+max', dim=128, freeze_bn=False,
    image_size=32, resize=32, min_crop=1.0,
    epochs=10, batch_size=128, per_class=2,
    optimizer='adamw', lr=2e-3, weight_decay=1e-4, schedule='cosine', freeze_epochs=0, clip=0.0,
    eval_every=10, precision='fp32',
    neg_margin=1.0)                                         # how it was chosen: tests/results/README.md
# CUB and the other benchmarks: the contrastive baseline of Metrix (github.com/billpsomas/metrix, b679703)
CUB = dict(
    arch='resnet50', weights='imagenet', pool='avg+max', dim=512, freeze_bn=True,
    image_size=224, resize=256, min_crop=0.08,
    epochs=60, batch_size=100, per_class=0,
    optimizer='adam', lr=1e-4, weight_decay=1e-4, schedule='step', decay_epochs=10, decay_rate=0.1, freeze_epochs=5,
    clip=10.0, neg_margin=0.5)
SOP = CUB | dict(freeze_bn=False, per_class=5, decay_rate=0.25, eval_every=5)
DEFAULTS = {
    'shapes': SHAPES,
    # A folder with pretrained weights (--weights imagenet or FILE) has the recipe 'cub' instead, see common.recipe.
    'folder': SHAPES | common.FOLDER | dict(neg_margin=0.5),
    'vectors': SHAPES | common.VECTORS | dict(epochs=6, neg_margin=0.5),
    'cub': CUB,
    'cars': CUB,
    'sop': SOP | dict(lr=3e-5),
    'inshop': SOP | dict(decay_epochs=5, freeze_epochs=1),              # note 7
    'reality-check': common.PROTOCOL | dict(neg_margin=0.5),
}


def get_args(argv=None):
    parser = common.parser(__doc__, NOTES, __file__)
    add = parser.add_argument_group('Contrastive').add_argument
    add('--form', choices=['distance', 'similarity'], default='distance',
        help='loss on distances or on cosine similarities')
    add('--pos-margin', type=float, default=0.0,
        help='form distance: a positive pair closer than this has zero loss')
    add('--neg-margin', type=float,
        help='form distance: a negative pair farther apart than this has zero loss')
    add('--power', type=int, choices=[1, 2], default=1, help='form distance: exponent of both hinges')
    add('--margin', type=float, default=0.5,
        help='form similarity: a negative pair less similar than this has zero loss')
    add('--reduction', choices=['mean', 'sum'], default='mean',
        help='form similarity: mean or sum over the pairs of an anchor')
    # A flag that only one form uses is an error with the other.
    uses = {'form': dict(distance=['pos_margin', 'neg_margin', 'power'], similarity=['margin', 'reduction'])}
    args = common.parse(parser, DEFAULTS, argv, uses)
    common.require_pairs(args)
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
The later papers
    Reality Check: Musgrave, Belongie, Lim. A Metric Learning Reality Check. ECCV 2020. arXiv:2003.08505
    HSE: Yang et al. HSE: Hybrid Species Embedding for Deep Metric Learning. ICCV 2023
    Metrix: Venkataramanan et al. It Takes Two to Tango: Mixup for Deep Metric Learning. ICLR 2022. arXiv:2106.04990
What differs from the papers
    1. Hadsell et al. use the squared loss, times 1/2, on embeddings that are not L2-normalized. Their Y is 1 for a
       negative pair.
    2. HSE prints the squared loss (--power 2), Metrix the loss on cosine similarities (--form similarity --reduction
       sum). The released code of both papers uses unsquared distances, a margin of 0.5, and means over the pairs with
       non-zero loss. So does this script by default, but with a margin of 1 on shapes.
    3. A margin of 0.5 is not the same in both forms. A distance of 0.5 is a cosine similarity of 0.875, and a cosine
       similarity of 0.5 is a distance of 1.
    4. The paper of Metrix reports AdamW and 100 epochs. The recipes of the benchmarks use Adam and 60 epochs, as in
       its code.
    5. The Reality Check tunes both margins for each dataset, with BN-Inception. Its released values for CUB are m_pos
       = -0.20 and m_neg = 0.3841. A negative m_pos adds 0.20 to the loss of each positive pair. This constant has no
       gradient, but it gives pairs at distance 0 a non-zero loss, so that they count in the mean.
What differs from the released code (github.com/billpsomas/metrix, b679703)
    6. The released code reports its best epoch on the test set.
    7. The released command for In-Shop has a learning rate of 3e-5, but names SOP as its dataset. Here the rate is
       1e-4, as in Table 4 of Metrix.
Tables of the papers
    Metrix (Table 2), with ResNet-50 and 512 dimensions: R@1 64.7 on CUB, 81.6 on Cars, 74.9 on SOP, 86.4 on In-Shop.
    Reality Check (Tables 4 to 6), with 128 dimensions: R@1 59.7 on CUB, 69.8 on Cars, 69.3 on SOP, printed as P@1. With
    the concatenated embeddings of four networks: 68.1, 81.8, 73.1. To train one of these four on CUB (here a
    ResNet-50): --protocol reality-check --pos-margin -0.20 --neg-margin 0.3841
"""


if __name__ == '__main__':
    common.cli(main)
