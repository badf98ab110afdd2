"""train_ms.py -- Multi-Similarity loss: every pair in the batch is weighted by how hard it is.

Wang, Han, Huang, Dong, Scott. Multi-Similarity Loss with General Pair Weighting for Deep Metric
Learning. CVPR 2019. The equation below carries its number in Metrix (Venkataramanan et al., ICLR
2022, arXiv:2106.04990), which restates it; tests are named after that number.

Idea
    An anchor has many positives and many negatives in a batch, and most teach nothing: the
    positive is close already, the negative far away. Two soft maxima over the similarities make
    the worst pairs count most: the gradient of a pair grows with its own violation *and* with
    its violation relative to the anchor's other pairs. A miner first drops the pairs that are
    easier than the hardest pair of the other kind.

Metrix Eq. (2)
    l(a) = 1/beta  log(1 + sum_{p in P(a)} exp(-beta  (s(a,p) - m)))       pull the positives
         + 1/gamma log(1 + sum_{n in N(a)} exp( gamma (s(a,n) - m)))       push the negatives
    The loss is the mean of l(a) over all B anchors of the batch.

Symbols
    MS paper    Metrix   here        flag        meaning
    S_ij        s(a,x)   s           -           (B, B) cosine similarities
    alpha       beta     alpha       --alpha     sharpness of the soft maximum over the positives
    beta        gamma    beta        --beta      sharpness of the soft maximum over the negatives
    lambda      m        lam         --lam       the similarity that both kinds are measured from
    epsilon     -        epsilon     --epsilon   slack of the miner; a negative number switches it off

Differs
    1. beta = 50, as two independent re-implementations have it; the authors' code has 40.
    2. Self is masked by index. The authors' code removes every pair above 1 - 1e-5 instead, which
       also removes exact duplicates, and it stops with an error on an anchor without a positive;
       here such an anchor adds its negative term (with the miner: zero) and counts in the mean.
    3. ResNet-50 with average pooling, as in the authors' ResNet configuration; their published
       numbers come from BN-Inception with max pooling. All BatchNorm layers are frozen entirely;
       theirs kept the affine weights in training.
    4. The authors released a configuration for CUB only. Cars uses the same one; SOP and In-Shop
       use the one that the Metrix authors released for their MS baseline.

Run
    python train_ms.py                                       # one minute on a laptop, offline
    python train_ms.py --dataset cub --data data             # the benchmark, on a GPU
    python train_ms.py --dataset cub --alpha 18 --beta 75 --lam 0.77 --epsilon 0.39   # as in Metrix

Expect
    shapes, seed 0: R@1 63.0 (untrained 6.9, pixels 6.9) in 82 s on two CPU cores. The benchmarks were
    not run here; the paper reports R@1 65.7 on CUB, 84.1 Cars, 78.2 SOP, 89.7 In-Shop (BN-Inception).
"""
import torch

import common

# One row per dataset: the authors' released recipe; the comment gives the paper's value, or the
# reason, where they part. What is not named here stands in common.BASE.
DEFAULTS = {
    'shapes': dict(),
    'folder': dict(),
    # 3,000 iterations of Adam, x0.1 after 1,200 and 2,400: 41 epochs of 73 batches, x0.1 every 16.
    'cub': dict(epochs=41, batch_size=80, per_class=5, optimizer='adam', lr=3e-5, weight_decay=5e-4,
                decay_epochs=16, decay_rate=0.1, warmup=0, pool='avg', image_size=227, min_crop=0.16),
    # not released: CUB's recipe (a reader reports that 84.1 needs batches above 450)
    'cars': dict(epochs=41, batch_size=80, per_class=5, optimizer='adam', lr=3e-5, weight_decay=5e-4,
                 decay_epochs=16, decay_rate=0.1, warmup=0, pool='avg', image_size=227, min_crop=0.16),
    # not released (batch 1000, says a reader of the appendix): the MS baseline of Metrix's code
    'sop': dict(epochs=60, batch_size=100, per_class=5, lr=6e-4, decay_epochs=20, decay_rate=0.25,
                warmup=1, freeze_bn=False),
    'inshop': dict(epochs=60, batch_size=100, per_class=5, lr=6e-4, decay_epochs=20, decay_rate=0.25,
                   warmup=1, freeze_bn=False),
}


def log1p_sum_exp(t, keep):
    """log(1 + sum_j exp t_ij) over the j with keep_ij, without overflow.  t, keep (A, V) -> (A,)"""
    t = t.masked_fill(~keep, float('-inf'))          # exp(-inf) = 0: the pair leaves no trace
    one = t.new_zeros(len(t), 1)                     # exp(0), the "1 +"; an empty sum gives log 1 = 0
    return torch.cat([one, t], dim=1).logsumexp(dim=1)


def pairs(y):
    """Who is positive, who negative for whom: two (B, B) bool masks. Self is in neither, by index."""
    same = y[:, None] == y[None, :]                                      # (B, B)
    itself = torch.eye(len(y), dtype=torch.bool, device=y.device)
    return same & ~itself, ~same


def mine(s, y, epsilon):
    """The pairs worth a gradient: harder, up to epsilon, than the hardest pair of the other kind.

    A negative n stays if s(a,n) + epsilon > min_p s(a,p), a positive p stays if
    s(a,p) - epsilon < max_n s(a,n). An anchor without positives, or without negatives, keeps none.

    s        (B, B) similarities
    y        (B,)   class labels
    epsilon  slack, in units of similarity
    returns  (B, B) bool mask of positives, (B, B) bool mask of negatives
    """
    positive, negative = pairs(y)
    hardest_positive = s.masked_fill(~positive, float('inf')).amin(dim=1, keepdim=True)     # (B, 1)
    hardest_negative = s.masked_fill(~negative, float('-inf')).amax(dim=1, keepdim=True)    # (B, 1)
    return (positive & (s - epsilon < hardest_negative),
            negative & (s + epsilon > hardest_positive))


def multi_similarity_loss(z, y, alpha=2.0, beta=50.0, lam=0.5, epsilon=None):
    """Multi-Similarity loss, Metrix Eq. (2), averaged over all B anchors.

    z        (B, D) embeddings of unit length; half precision is raised to float32
    y        (B,)   class labels
    alpha    > 0, sharpness on positives;  beta > 0, sharpness on negatives
    lam      similarity in [-1, 1] that pairs are measured from
    epsilon  slack of the miner; None takes all pairs
    returns  scalar >= 0; an anchor without any pair adds 0
    """
    z = z.to(torch.promote_types(z.dtype, torch.float32))
    s = z @ z.T                                                          # (B, B)
    positive, negative = pairs(y) if epsilon is None else mine(s, y, epsilon)
    # Metrix Eq. (2), first term: dominated by the least similar positives
    pull = log1p_sum_exp(-alpha * (s - lam), positive) / alpha           # (B,)
    # Metrix Eq. (2), second term: dominated by the most similar negatives
    push = log1p_sum_exp(beta * (s - lam), negative) / beta              # (B,)
    return (pull + push).mean()


def get_args(argv=None):
    parser = common.parser(__doc__)
    group = parser.add_argument_group('Multi-Similarity')
    group.add_argument('--alpha', type=float, default=2.0, help='sharpness on positives')
    group.add_argument('--beta', type=float, default=50.0, help='sharpness on negatives')
    group.add_argument('--lam', type=float, default=0.5, help='lambda, the similarity pairs are measured from')
    group.add_argument('--epsilon', type=float, default=0.1, help='slack of the miner; negative: no miner')
    return common.parse(parser, DEFAULTS, argv)


def main(argv=None):
    args = get_args(argv)
    common.set_seed(args.seed)
    data = common.load(args)
    model = common.build(args)
    optimizer = common.make_optimizer(args, [dict(params=model.parameters())])
    epsilon = args.epsilon if args.epsilon >= 0 else None

    def step(images, labels):
        return multi_similarity_loss(model(images), labels, args.alpha, args.beta, args.lam, epsilon)

    return common.train(args, model, data, step, optimizer)


if __name__ == '__main__':
    main()
