"""train_ms.py -- Multi-Similarity loss: the harder a pair, the larger its gradient.

Wang, Han, Huang, Dong, Scott. Multi-Similarity Loss with General Pair Weighting for Deep Metric Learning. CVPR 2019.
arXiv:1904.06627. Equations, P(a) and N(a) are from the paper of Metrix (arXiv:2106.04990), Greek letters from MS.
Each image is an anchor. For it, Metrix Eq. (2) has a log-sum-exp over its positives, and one over its negatives. In
both, the hardest pair has the largest exponent, and so the largest gradient. The function `mine` drops the easy pairs.

    MS paper   in Metrix   code      flag        meaning
    S          s           s         -           (B, B) cosine similarities of L2-normalized embeddings z
    alpha      beta        alpha     --alpha     scaling of the positives: the larger, the more the hard ones dominate
    beta       gamma       beta      --beta      scaling factor of the negatives
    lambda     m           lam       --lam       positives should be above this similarity, negatives below
    epsilon    -           epsilon   --epsilon   tolerance of the miner: the larger, the more pairs it keeps

Beware of beta: Metrix's beta is alpha here, and its gamma is beta here. tests/papers/README.md lists all letters
that papers use for different things.

    python train_ms.py [--dataset cub --data data]
"""
import torch

import common


@common.loss            # inside, half precision becomes float32
def multi_similarity_loss(z, y, alpha=2.0, beta=50.0, lam=0.5, epsilon=None):
    """Metrix Eq. (2) in the Greek letters of MS, for an anchor a with its positives P(a) and its negatives N(a):

    l(a) = 1/alpha log(1 + sum_{p in P(a)} exp(-alpha (s(a,p) - lambda)))    pull
         + 1/beta  log(1 + sum_{n in N(a)} exp( beta  (s(a,n) - lambda)))    push

    P(a) are the other images of the class of a in the batch, N(a) the images of other classes. With a miner, both have
    only the pairs that it keeps. Each image of the batch is the anchor once, and the loss is the mean of l(a).

    z        (B, D) L2-normalized embeddings
    y        (B,)   class labels
    alpha    > 0
    beta     > 0
    lam      lambda, in [-1, 1]
    epsilon  tolerance of the miner, see mine(); None: no miner
    returns  scalar >= 0; an anchor without pairs adds 0

    The size of the gradient is the weight of a pair, the "pair weighting" of the paper's title. For a positive p and a
    negative n the gradient is
        dl(a)/ds(a,p) = -exp(-alpha (s(a,p) - lambda)) / (1 + sum over p' in P(a) of exp(-alpha (s(a,p') - lambda))),
        dl(a)/ds(a,n) =  exp( beta  (s(a,n) - lambda)) / (1 + sum over n' in N(a) of exp( beta  (s(a,n') - lambda))).
    So the weight of a negative rises with its own similarity to a, and falls as other negatives come closer.
    """
    y = common.check_labels(y, len(z))
    s = z @ z.T                                                          # (B, B)
    positive, negative = pairs(y) if epsilon is None else mine(s, y, epsilon)
    pull = log1p_sum_exp(-alpha * (s - lam), positive) / alpha           # (B,) Metrix Eq. (2), first term
    push = log1p_sum_exp(beta * (s - lam), negative) / beta              # (B,) Metrix Eq. (2), second term
    return (pull + push).mean()


def log1p_sum_exp(t, keep):
    """log(1 + sum of exp(t)) of each row, over the columns where keep is true; computed without overflow, as a
    log-sum-exp with a 0 appended to each row.  t, keep (B, B) -> (B,)"""
    t = t.masked_fill(~keep, float('-inf'))          # exp(-inf) = 0
    zero = t.new_zeros(len(t), 1)                    # exp(0) is the "1 +"
    return torch.cat([zero, t], dim=1).logsumexp(dim=1)


def pairs(y):
    """Masks of the positive and of the negative pairs, (B,) -> (B, B), (B, B). No image is paired with itself."""
    same = y[:, None] == y[None, :]                                      # (B, B)
    itself = torch.eye(len(y), dtype=torch.bool, device=y.device)        # by index: two copies of an image are a pair
    return same & ~itself, ~same


def mine(s, y, epsilon):
    """Masks (B, B) of the positive and of the negative pairs that the miner keeps, from similarities s (B, B) and class
    labels y (B,).

    It drops easy pairs. A positive is easy if it is more similar to the anchor than every negative, by epsilon or more.
    A negative is easy if it is less similar than every positive, by epsilon or more. So the miner keeps
        positives p with s(a,p) - epsilon < max_n s(a,n),
        negatives n with s(a,n) + epsilon > min_p s(a,p).
    An anchor without negatives keeps no positives, and an anchor without positives keeps no negatives.
    """
    positive, negative = pairs(y)
    # The hardest positive is the least similar one. Images that are no positives get inf, so they are not the minimum.
    hardest_positive = s.masked_fill(~positive, float('inf')).amin(dim=1, keepdim=True)     # (B, 1)
    hardest_negative = s.masked_fill(~negative, float('-inf')).amax(dim=1, keepdim=True)    # (B, 1)
    # Comparisons with NaN are false. So a pair with NaN is not easy: it is kept, and the loss becomes NaN.
    easy_positive = s - epsilon >= hardest_negative
    easy_negative = s + epsilon <= hardest_positive
    return positive & ~easy_positive, negative & ~easy_negative


# ---- recipes: the defaults of flags for each dataset; --help explains the flags

# What `python train_ms.py` runs: a small ResNet from scratch on the built-in dataset
SHAPES = dict(
    arch='resnet18', weights='none', pool='avg+max', dim=128, freeze_bn=False,
    image_size=32, resize=32, min_crop=1.0,
    epochs=10, batch_size=128, per_class=4,
    optimizer='adamw', lr=2e-3, weight_decay=1e-4, schedule='cosine', freeze_epochs=0, clip=0.0,
    eval_every=10, precision='fp32')
# The authors' settings, which they released for CUB only: 3,000 steps, with a decay after every 1,200. An epoch of CUB
# is 73 steps (5,864 images / 80), so the run has about 41 epochs, with a decay after every 16 of them.
CUB = dict(
    arch='resnet50', weights='imagenet', pool='avg', dim=512, freeze_bn=True,
    image_size=227, resize=256, crop_from='resized', min_crop=0.16,
    epochs=41, batch_size=80, per_class=5,
    optimizer='adam', lr=3e-5, weight_decay=5e-4, schedule='step', decay_epochs=16, decay_rate=0.1, freeze_epochs=0,
    clip=0.0)
# Settings and loss parameters of the MS baseline in the released code of Metrix
METRIX = dict(
    arch='resnet50', weights='imagenet', pool='avg+max', dim=512, freeze_bn=False,
    image_size=224, resize=256, min_crop=0.08,
    epochs=60, batch_size=100, per_class=5,
    optimizer='adam', lr=6e-4, weight_decay=1e-4, schedule='step', decay_epochs=20, decay_rate=0.25, freeze_epochs=1,
    clip=10.0, eval_every=5, alpha=17.97, beta=75.66, lam=0.77, epsilon=0.39)
DEFAULTS = {
    'shapes': SHAPES,
    # A folder with pretrained weights (--weights imagenet or FILE) has the recipe 'cub' instead, see common.recipe.
    'folder': SHAPES | common.FOLDER,
    'vectors': SHAPES | common.VECTORS | dict(epochs=3),
    'cub': CUB,
    'cars': CUB | dict(epochs=30, decay_epochs=12),             # our choice: about as many steps as on CUB
    'sop': METRIX,
    'inshop': METRIX,
    'reality-check': common.PROTOCOL,
}


def get_args(argv=None):
    parser = common.parser(__doc__, NOTES, __file__)
    add = parser.add_argument_group('Multi-Similarity').add_argument
    add('--alpha', type=float, default=2.0,
        help='scaling factor of the positives: the larger, the more the hardest (least similar) ones dominate')
    add('--beta', type=float, default=50.0,
        help='scaling factor of the negatives: the larger, the more the hardest (most similar) ones dominate')
    add('--lam', type=float, default=0.5,
        help='lambda: positives should be above this similarity, negatives below')
    add('--epsilon', type=common.number_or(float, 'off'), default=0.1,
        help='tolerance of the miner: the larger, the more pairs it keeps; off: no miner')
    args = common.parse(parser, DEFAULTS, argv)
    common.require_pairs(args)
    return args


def main(argv=None):
    args = get_args(argv)
    common.set_seed(args.seed)
    data = common.dataset_from(args)
    model = common.build(args, data=data)
    optimizer = common.make_optimizer(args, [dict(params=model.parameters())])
    epsilon = None if args.epsilon == 'off' else args.epsilon

    def step(images, labels):
        z = model(images)                                                # (B, D)
        return multi_similarity_loss(z, labels, args.alpha, args.beta, args.lam, epsilon)

    return common.train(args, model, data, step, optimizer)


NOTES = """
What differs from the paper
    1. The network is a ResNet-50, on CUB and Cars with average pooling, as in the authors' configuration of a
       ResNet-50. Their published results are from BN-Inception with max pooling.
    2. On CUB and Cars beta and lambda are those of the released code of Proxy-Anchor and of HSE:
                     here    released code of ms    paper, as two others code it
           beta      50      40                     50
           lambda    0.5     0.5                    1
    3. Sources of the other settings (on SOP and In-Shop, also of beta and lambda):
           CUB          the authors' configuration
           Cars         that of CUB, but 30 epochs of 100 steps, our choice. In issue 6 of the authors' repository a
                        user reports R@1 78.4 instead of the paper's 84.1. Another user advises batches above 450.
           SOP, In-Shop Metrix's commands for its MS baseline (github.com/billpsomas/metrix, b679703): Adam, a learning
                        rate of 6e-4, 60 epochs. For the settings that its paper reports (AdamW, 100 epochs, learning
                        rates of 3e-5 on SOP and 1e-4 on In-Shop), run train_metrix.py --mixup none instead.
    4. Metrix's code has alpha 17.97, beta 75.66, lambda 0.77 and epsilon 0.39 for all datasets. The Reality Check
       (arXiv:2003.08505) selected these for CUB by cross-validation, and 15.94, 156.61, 0.72 and 0.34 for SOP.
What differs from the released code (github.com/msight-tech/research-ms-loss, b68507d)
    5. The released code does not exclude the pair of an image with itself by its index. It drops all positives above a
       similarity of 1 - 1e-5, which includes exact duplicates.
    6. The released code fails if an anchor has no positives, or no negatives. Here an anchor without positives adds
       only its negative term, or 0 with the miner. In both codes the mean is over all anchors of the batch.
    7. The released code reports its best epoch on the test set.
Tables and figures of the paper
    The paper reports, with BN-Inception and 512 dimensions, R@1 65.7 on CUB, 84.1 on Cars, 78.2 on SOP and 89.7 on
    In-Shop, as quoted in Proxy-Anchor (Tables 2 to 4). Metrix (Table 2; ResNet-50, alpha 18, beta 75, lambda 0.77)
    reports 67.8 on CUB, 87.8 on Cars, 76.9 on SOP and 90.1 on In-Shop.
    Table 4 of the Reality Check needs --protocol reality-check and the values of its released results for CUB:
        MS+Miner   --alpha 17.97 --beta 75.66 --lam 0.77 --epsilon 0.39
        MS         --alpha 0.01 --beta 50.60 --lam 0.56 --epsilon off
"""


if __name__ == '__main__':
    common.cli(main)
