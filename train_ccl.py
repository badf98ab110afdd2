"""train_ccl.py -- Center Contrastive Loss: contrast with one learned centre per class, and go to it.

Cai, Xiong, Tian. Center Contrastive Loss for Metric Learning. arXiv 2023. The authors announced
code but none could be found; they adapt that of Boudiaf et al., A unifying mutual information view
of metric learning (ECCV 2020), here called the base code.

Idea
    A memory bank offers many samples to contrast with, but they go stale while the network moves.
    CCL keeps one vector per class instead, its centre, as a parameter that every step updates.
    A softmax over all centres separates the classes, but stops pulling an embedding as soon as its
    own centre is the nearest one. So a second term pulls it on: the squared distance to its centre.

Eq. (5), in two parts
    L = -log( exp(s (c_y.x - m)) / (exp(s (c_y.x - m)) + sum_{j != y} exp(s c_j.x)) )   L_contrast
        + lambda ||x - c_y||^2                                                          L_center
    Averaged over the batch. The centre term stands outside the softmax: written as one fraction it
    multiplies the numerator by exp(2 lambda c_y.x) and leaves the denominator as it is, so adding
    2 lambda c_y.x to the target logit of a cross-entropy would be another loss.

Symbols
    paper          here              flag          meaning
    x              z                 -             (B, D) embeddings of unit length
    c_j            centers           -             (C, D) centres, normalised inside the loss
    W, b           weight, bias      -             (C, D), (C,) the linear classifier of Eq. (6)
    s = 1/tau      s                 --s           radius of the hypersphere, inverse temperature
    m              margin            --margin      margin on the cosine of the own class
    lambda         lam               --lam         weight of the centre term
    epsilon        smoothing         --smoothing   label smoothing: probability given to other classes
    mu             mu                --mu          momentum of the centres in --variant cluster
    N              C                 -             number of classes (N elsewhere means images)

Variants: the paper's argument is the comparison with them
    --lam 0                 NSoftmax, Eq. (8), the paper's baseline
    --lam 0 --margin 0.1    CosFace, the large margin of Eq. (11)
    --margin 0.1            CCL* of Table 2: both parts of Eq. (5)
    --variant proxynca      Eq. (9): the own class is not in the denominator
    --variant center_loss   Eq. (7) on raw embeddings: classifier and centres are separate parameters
    --variant stop_grad     Table 1: L_contrast takes the centres as constants, L_center alone moves them
    --variant cluster       the centres are no parameters at all: running means, Eq. (14)

Differs
    1. The loss keeps the constant 2 lambda that Eq. (5) drops, so that it is zero at best.
    2. Eq. (11) subtracts m from the scaled similarity; here, as in Eq. (5), m is on the cosine: the
       m of Eq. (11) is s * margin, 16 times as large. Of the two gradients below Eq. (10) the second
       is misprinted: its numerator is exp(S(x, c) - S(x, c_y)).
    3. Smoothing concerns probabilities, so only the softmax is smoothed, not the centre term, and
       neither Eq. (9), which has none. A dropped-out x is longer than 1: the centre term stays
       2 - 2 c_y.x, whose mean dropout does not change, but can then fall below zero.
    4. m and lambda of Table 2 are not stated; --lam 2 --margin 0 is what the text names (Section
       4.4, Figure 4). Nor are epochs, schedule, pooling, jitter strength, the size before the crop,
       the start of the centres and mu: see DEFAULTS, new_centers and --help.
    5. --variant cluster averages the images that a class has in the batch, then applies Eq. (14)
       once. All BatchNorm layers of CUB and Cars are frozen entirely, weights included.

Run
    python train_ccl.py                                      # one minute on a laptop, offline
    python train_ccl.py --dataset cub --data data            # the benchmark, on a GPU
    python train_ccl.py --dataset cub --data data --label-noise symmetric:0.2      # Section 4.4;
                                                             # the other noise is longtail:0.25

Expect
    shapes, seed 0: R@1 72.7 (untrained 7.0, pixels 6.9) in about 80 s on two CPU cores. The benchmarks
    were not run here; the paper reports R@1 71.8 on CUB, 89.6 Cars, 82.3 SOP, 92.1 In-Shop at margin 0.
"""
import torch
import torch.nn.functional as F

import common

# Stated in the paper for all four: SGD, weight decay 5e-4, 128 random images, crops of 256 px. Not
# stated, hence from the base code: warm-up and half-cosine, crops of at least 0.16 of the image, no
# clipping, average pooling. Stated by neither: images of 288 px before the crop, as ProxyNCA++ has it.
BENCHMARK = dict(optimizer='sgd', weight_decay=5e-4, batch_size=128, per_class=0, schedule='cosine', warmup=0,
                 clip=0, pool='avg', image_size=256, resize=288, min_crop=0.16)

# One row per dataset. What is not named here stands in common.BASE.
DEFAULTS = {
    'shapes': dict(per_class=0, pool='avg'),
    'folder': dict(per_class=0, pool='avg'),
    # stated: no momentum, frozen BatchNorm, dropout, jitter. Base code: 30 epochs, strength 0.25.
    'cub': dict(BENCHMARK, lr=0.02, momentum=0.0, epochs=30, freeze_bn=True, dropout=0.2, jitter=0.25),
    # the same; base code: 100 epochs (its own jitter is 0.3, with a hue that the paper does not list)
    'cars': dict(BENCHMARK, lr=0.05, momentum=0.0, epochs=100, freeze_bn=True, dropout=0.2, jitter=0.25),
    # stated: momentum 0.99; BatchNorm is trained. Base code: 100 epochs.
    'sop': dict(BENCHMARK, lr=0.003, momentum=0.99, epochs=100, freeze_bn=False),
    'inshop': dict(BENCHMARK, lr=0.006, momentum=0.99, epochs=100, freeze_bn=False),
}

# Which of the loss's flags a variant reads; typing one of the others is a mistake.
READS = {'ccl': {'s', 'margin', 'lam', 'smoothing'}, 'stop_grad': {'s', 'margin', 'lam', 'smoothing'},
         'cluster': {'s', 'margin', 'lam', 'smoothing', 'mu'}, 'proxynca': {'s'},
         'center_loss': {'lam', 'smoothing'}}


def raised(z):
    """Half precision to float32; float64 stays float64."""
    return z.to(torch.promote_types(z.dtype, torch.float32))


def smooth_labels(y, num_classes, smoothing, dtype=torch.float32):
    """1 - smoothing for the own class, smoothing / (C - 1) for each other one; y (B,) -> (B, C).

    Not torch's label_smoothing, which spreads over all C classes, the own one included. The only
    class of a set with one class gets 1.
    """
    other = smoothing / max(num_classes - 1, 1)
    return F.one_hot(y, num_classes).to(dtype) * (1 - num_classes * other) + other


def cross_entropy(logits, y, smoothing=0.0):
    """-sum_j q_j log softmax_j, with q the smoothed labels.  logits (B, C), y (B,) -> (B,)"""
    q = smooth_labels(y, logits.shape[1], smoothing, logits.dtype)        # (B, C)
    return -(q * logits.log_softmax(dim=1)).sum(dim=1)


def center_contrastive_loss(z, y, centers, s=16.0, margin=0.0, lam=2.0, smoothing=0.0, stop_grad=False):
    """L_contrast + lam * L_center, Eq. (5) plus its constant 2 lam, averaged over the batch.

    z          (B, D) embeddings of unit length (longer after dropout); half precision is raised to float32
    y          (B,)   class labels, 0..C-1
    centers    (C, D) one per class, of any length but zero
    s          > 0, inverse temperature
    margin     >= 0, on the cosine; 0 for NSoftmax
    lam        >= 0, weight of the centre term; 0 for NSoftmax and CosFace
    smoothing  in [0, 1)
    stop_grad  take the centres as constants in L_contrast
    returns    scalar, >= 0 for unit z at smoothing 0
    """
    z = raised(z)
    c = F.normalize(centers.to(z.dtype), dim=1)                          # (C, D)
    own = F.one_hot(y, len(c))                                           # (B, C)
    cosine = z @ (c.detach() if stop_grad else c).T                      # (B, C)
    logits = s * (cosine - margin * own)                                 # (B, C)
    contrast = cross_entropy(logits, y, smoothing)       # (B,)  Eq. (11); at margin 0 Eq. (2), (8), (10)
    center = 2 - 2 * (z * c[y]).sum(dim=1)               # (B,)  Eq. (2), written as Eq. (4)
    return (contrast + lam * center).mean()              # Eq. (5) + 2 lam


def proxynca_loss(z, y, centers, s=16.0):
    """Eq. (9), averaged over the batch: a softmax without the own class, unbounded below.

    With a single class there is no denominator: the pull towards its centre is left.
    """
    z = raised(z)
    logits = s * z @ F.normalize(centers.to(z.dtype), dim=1).T           # (B, C)
    own = F.one_hot(y, len(centers)).bool()                              # (B, C)
    # why -inf: exp() of it is exactly 0, so the own class leaves no trace in value or gradient
    others = logits.masked_fill(own, float('-inf')).logsumexp(dim=1) if len(centers) > 1 else 0.0
    return (others - logits.gather(1, y[:, None])[:, 0]).mean()          # Eq. (9)


def center_loss(z, y, weight, bias, centers, lam=2.0, smoothing=0.0):
    """Eq. (7), averaged over the batch: a linear classifier, and centres that it knows nothing of.

    z (B, D) and centers (C, D) keep their length; weight (C, D), bias (C,); lam=0 is cross-entropy.
    """
    z = raised(z)
    logits = F.linear(z, weight.to(z.dtype), bias.to(z.dtype))           # (B, C)
    entropy = cross_entropy(logits, y, smoothing)                        # (B,)  Eq. (6)
    distance = (z - centers.to(z.dtype)[y]).square().sum(dim=1)          # (B,)
    return (entropy + lam * distance).mean()                             # Eq. (7)


def momentum_centers(centers, z, y, mu):
    """The centres after one batch: those of the classes present move to the mean of their images.

    centers (C, D), z (B, D), y (B,), mu in [0, 1] the part that stays; returns new centres (C, D)
    """
    own = F.one_hot(y, len(centers)).to(centers.dtype)                   # (B, C)
    count = own.sum(dim=0)[:, None]                                      # (C, 1)
    mean = own.T @ z.to(centers.dtype) / count.clamp(min=1)              # (C, D)
    return torch.where(count > 0, mu * centers + (1 - mu) * mean, centers)      # Eq. (14)


def new_centers(num_classes, dim):
    """Random directions, uniform on the sphere.

    why length 1: the loss sees only the direction of a centre, so one of length r turns r^2 times
    slower. Drawn from N(0, 1) as they are, r^2 = D = 512 and SGD would leave them where they start.
    trap: zeros, the base code's start, have no direction and a gradient of about 1e12.
    """
    return F.normalize(torch.randn(num_classes, dim), dim=1)


def get_args(argv=None):
    parser = common.parser(__doc__)
    group = parser.add_argument_group('Center Contrastive')
    group.add_argument('--variant', choices=list(READS), default='ccl', help='which loss; see above')
    group.add_argument('--s', type=common.at_least(1e-3, float), default=16.0, help='inverse temperature')
    group.add_argument('--margin', type=common.at_least(0, float), default=0.0,
                       help='m, margin on the cosine')
    group.add_argument('--lam', type=common.at_least(0, float), default=2.0,
                       help='lambda, weight of the centre term')
    group.add_argument('--smoothing', type=float, default=0.1, help='epsilon, label smoothing')
    group.add_argument('--mu', type=float, default=0.9, help='momentum of the centres of --variant cluster')
    group.add_argument('--dropout', type=float, default=0.0, help='on the embedding, before the loss')
    args = common.parse(parser, DEFAULTS, argv)
    for name in sorted(set.union(*READS.values()) - READS[args.variant]):
        if name in args.explicit:
            raise common.UsageError(f'--{name} has no effect with --variant {args.variant}')
    for name, high in ('smoothing', 1), ('dropout', 1), ('mu', 1):
        if not 0 <= getattr(args, name) < high:
            raise common.UsageError(f'--{name} {getattr(args, name)} is not in [0, {high})')
    if args.variant == 'stop_grad' and args.lam == 0:
        raise common.UsageError('--variant stop_grad --lam 0: L_center alone moves the centres, so they '
                                'would get no gradient; take --lam above 0, or --variant ccl')
    return args


def main(argv=None):
    args = get_args(argv)
    common.set_seed(args.seed)
    data = common.load(args)
    classes = data.train.num_classes
    model = common.build(args, head_init='default', normalize=args.variant != 'center_loss')
    centers = new_centers(classes, args.dim).to(args.device).requires_grad_(args.variant != 'cluster')
    learned = dict(centers=centers)
    params = [*model.parameters(), centers]            # one group: the centres share rate and decay
    if args.variant == 'center_loss':
        classifier = learned['classifier'] = torch.nn.Linear(args.dim, classes).to(args.device)
        params += classifier.parameters()
    # torch refuses Nesterov without momentum, and other optimizers do not know it
    nesterov = dict(nesterov=args.momentum > 0) if args.optimizer == 'sgd' else {}
    optimizer = common.make_optimizer(args, [dict(params=params)], **nesterov)

    def step(images, labels):
        z = model(images)
        x = F.dropout(z, args.dropout)                 # here, not in the model: evaluation never drops
        if args.variant == 'proxynca':
            return proxynca_loss(x, labels, centers, args.s)
        if args.variant == 'center_loss':
            return center_loss(x, labels, classifier.weight, classifier.bias, centers,
                               args.lam, args.smoothing)
        loss = center_contrastive_loss(x, labels, centers, args.s, args.margin, args.lam, args.smoothing,
                                       stop_grad=args.variant == 'stop_grad')
        if args.variant == 'cluster':
            centers.copy_(momentum_centers(centers, z.detach(), labels, args.mu))
        return loss

    return common.train(args, model, data, step, optimizer, learned=learned)


if __name__ == '__main__':
    main()
