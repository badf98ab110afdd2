"""train_ccl.py -- Center Contrastive Loss: cross-entropy over one centre per class, and the squared distance to it.

Cai, Xiong, Tian. Center Contrastive Loss for Metric Learning. 2023. arXiv:2308.00458
Each class has a learnable centre. The loss is L_contrast + lambda L_center, CCL Eq. (5). L_contrast is cross-entropy
with a softmax over the centres. It almost stops pulling an image x once c_y, the centre of its class y, is clearly
the nearest. With a label smoothing of 0.1, the script's default, it even pushes x away once p_y, the softmax at y, is
above 0.9. L_center, the squared distance to c_y, keeps pulling. For example, take two classes, s = 16, lambda = 2, no
margin and no smoothing. L_contrast pulls with a force |d L_contrast / d (c_y.x)| = s (1 - p_y). This is 8.0 where both
cosines are equal, and only 0.6 where c_y.x is larger by 0.2. lambda L_center always pulls with 2 lambda = 4.
tests/papers/README.md lists the letters that other papers use for other things.

    paper      code     flag      meaning
    x          z        -         (B, D) L2-normalized embeddings; y is the class of x
    c_j, c_y   centers  -         (C, D) learnable centres, normalized inside the loss; c_y is the one of the class of x
    s = 1/tau  s        --s       scaling factor: inverse temperature (in other scripts, s are the similarities)
    m          margin   --margin  margin on the cosine c_y.x
    lambda     lam      --lam     weight of L_center, or of the distance in Eq. (7) (--loss center_loss)

    python train_ccl.py [--dataset cub --data data]
"""
import torch
import torch.nn.functional as F

import common


@common.loss            # inside, half precision becomes float32
def center_contrastive_loss(z, y, centers, s=16.0, margin=0.0, lam=2.0, smoothing=0.0, stop_grad=False):
    """The mean over the batch of L = L_contrast + lambda L_center, CCL Eq. (5):

    L_contrast = -log p_y,   p_y = exp(s (c_y.x - m)) / (exp(s (c_y.x - m)) + sum_{j != y} exp(s c_j.x))
    L_center   = ||x - c_y||^2 = 2 - 2 c_y.x

    Note 1, at the end of this file, and the help of --loss say which flags give other equations of the paper.

    z          (B, D) L2-normalized embeddings (main applies dropout to them, so their length can differ from 1)
    y          (B,)   class labels, 0 to C - 1
    centers    (C, D) one per class, of any non-zero norm
    smoothing  epsilon in [0, 1), label smoothing in L_contrast, see smooth_labels. The script's default is 0.1.
    stop_grad  stops the gradient of L_contrast to the centres (Table 1), so that only L_center moves them
    returns    scalar, >= 0 for L2-normalized z. With one class, L_contrast is 0.
    """
    y = common.check_labels(y, len(z), len(centers))
    c = F.normalize(centers, dim=1)                                      # (C, D)
    positive = F.one_hot(y, len(c)).to(c.dtype)                          # (B, C)
    cosine = z @ (c.detach() if stop_grad else c).T                      # (B, C)
    logits = s * (cosine - margin * positive)                            # (B, C)
    # (B,)  L_contrast. Without smoothing it is -log p_y. With m = 0 this is Eq. (8), (10) and the first line of Eq.
    # (2). With m > 0 it is Eq. (11); the m of the paper is s m here.
    contrast = F.cross_entropy(logits, smooth_labels(y, len(c), smoothing, logits.dtype), reduction='none')
    # (B,)  L_center: Eq. (4), and the second line of Eq. (2), to which the paper refers as Eq. (3)
    center_term = 2 - 2 * (z * c[y]).sum(dim=1)
    return (contrast + lam * center_term).mean()                         # Eq. (5)


def smooth_labels(y, num_classes, smoothing, dtype=torch.float32):
    """1 - epsilon for the class y, epsilon / (C - 1) for each other class.  (B,) -> (B, C)

    Section 4.2; its N is C here, and its epsilon is `smoothing`. label_smoothing of torch differs: it divides epsilon
    among all C classes, y included.
    """
    other = smoothing / max(num_classes - 1, 1)
    positive = F.one_hot(y, num_classes).bool()                          # (B, C)
    labels = torch.full(positive.shape, other, dtype=dtype, device=y.device)
    return labels.masked_fill(positive, 1 - (num_classes - 1) * other)   # 1 - epsilon; 1 if there is only one class


# ---- losses that the paper compares with, chosen by --loss


@common.loss
def scaled_proxynca_loss(z, y, centers, s=16.0):
    """Proxy-NCA as in CCL Eq. (9), averaged over the batch:

    -log( exp(s c_y.x) / sum_{j != y} exp(s c_j.x) )

    The centre c_y is not in the denominator, so the loss can be negative. For s = 1, the sum over the batch is
    Proxy-NCA as in Proxy-Anchor Eq. (1).
    Arguments as in center_contrastive_loss. If there is only one class, the denominator is left out.
    """
    y = common.check_labels(y, len(z), len(centers))
    logits = s * z @ F.normalize(centers, dim=1).T                       # (B, C)
    if len(centers) == 1:
        return -logits.mean()
    positive = F.one_hot(y, len(centers)).bool()                         # (B, C)
    others = logits.masked_fill(positive, float('-inf'))                 # exp(-inf) = 0, Eq. (9): j != y
    logit = logits.gather(1, y[:, None])[:, 0]                           # (B,) s c_y.x
    return (others.logsumexp(dim=1) - logit).mean()                      # Eq. (9): -log(a / b) = log b - log a


@common.loss
def center_loss(z, y, weight, bias, centers, lam=0.03, smoothing=0.0):
    """CCL Eq. (7), the center loss of Wen et al. (2016), not L_center of Eq. (5). It is the mean over the batch of

    -log( exp(W_y.x~ + b_y) / sum_j exp(W_j.x~ + b_j) ) + lambda ||x~ - c_y||^2

    The first term, Eq. (6), is the cross-entropy of a linear classifier, which has parameters of its own. Neither the
    embeddings x~ nor the centres are normalized, so a useful lambda is much smaller than in Eq. (5).

    z (B, D) embeddings x~; y (B,); weight (C, D) and bias (C,) of the classifier; centers (C, D) -> scalar
    smoothing  of the first term, as in center_contrastive_loss
    """
    y = common.check_labels(y, len(z), len(centers))
    logits = F.linear(z, weight, bias)                                   # (B, C), Eq. (6)
    labels = smooth_labels(y, len(weight), smoothing, logits.dtype)      # (B, C)
    cross_entropy = F.cross_entropy(logits, labels, reduction='none')    # (B,)  Eq. (6)
    distance2 = (z - centers[y]).square().sum(dim=1)                     # (B,)
    return (cross_entropy + lam * distance2).mean()                      # Eq. (7)


def momentum_centers(centers, z, y, mu):
    """CCL Eq. (14): new c_y = mu c_y + (1 - mu) x_y. Here x_y is the mean embedding of class y in the batch. The
    centre of a class without images is unchanged.

    centers (C, D), z (B, D), y (B,); mu in [0, 1] is the weight of the old centre. Returns new centres (C, D), which
    are not normalized: the loss normalizes them.
    """
    y = common.check_labels(y, len(z), len(centers))
    positive = F.one_hot(y, len(centers)).to(centers.dtype)              # (B, C)
    count = positive.sum(dim=0)[:, None]                                 # (C, 1) images of each class
    mean = positive.T @ z / count.clamp_min(1)                           # (C, D)
    return torch.where(count > 0, mu * centers + (1 - mu) * mean, centers)      # Eq. (14)


# ---- recipes: the defaults of flags for each dataset; --help explains the flags

# What `python train_ccl.py` runs: a small ResNet from scratch on the built-in dataset
SHAPES = dict(
    arch='resnet18', weights='none', pool='avg', dim=128, freeze_bn=False,
    image_size=32, resize=32, min_crop=1.0,
    epochs=10, batch_size=128, per_class=0,
    optimizer='adamw', lr=2e-3, weight_decay=1e-4, schedule='cosine', freeze_epochs=0, clip=0.0,
    eval_every=10, precision='fp32')
# Section 4.2 states optimizer, learning rates, momentum, weight decay, batches (per_class=0 stands for random ones),
# and crops of 256 px. On CUB and Cars it adds frozen BatchNorm, dropout, and colour jitter of unknown strength. Table 2
# states arch and dim. Our choices are resize, and the strength of the jitter on Cars. The rest is from the code that
# the paper builds on (note 8).
CUB = dict(
    arch='resnet50', weights='imagenet', pool='avg', dim=512, freeze_bn=True,
    image_size=256, resize=288, crop_from='resized', min_crop=0.16, jitter=0.25,
    epochs=30, batch_size=128, per_class=0,
    optimizer='sgd', lr=0.02, momentum=0.0, weight_decay=5e-4, schedule='cosine', freeze_epochs=0, clip=0.0,
    dropout=0.2)
# A momentum of 0.99 needs the warmup of the cosine schedule, which keeps the first steps small.
SOP = CUB | dict(freeze_bn=False, jitter=0.0, dropout=0.0, epochs=100, lr=0.003, momentum=0.99, eval_every=5)
# The entry of the --loss overrides that of the dataset (or of --protocol).
DEFAULTS = {
    'shapes': SHAPES,
    # A folder with pretrained weights (--weights imagenet or FILE) has the recipe 'cub' instead, see common.recipe.
    'folder': SHAPES | common.FOLDER | dict(per_class=0),
    'vectors': SHAPES | common.VECTORS | dict(epochs=12, per_class=0),
    'cub': CUB,
    'cars': CUB | dict(epochs=100, lr=0.05),
    'sop': SOP,
    'inshop': SOP | dict(lr=0.006),
    # In the Reality Check, batches for classification losses have one image per class. In its released results for CUB,
    # the centres of normalized softmax have about 4500 times the learning rate of the network.
    'reality-check': common.PROTOCOL | dict(per_class=1, center_lr_mult=4500),
    # With lam = 2 the gradient of the squared distance would be about 60 times that of the cross-entropy (on shapes,
    # before training). With 0.03 they are about equal.
    'center_loss': dict(lam=0.03),
}


def corrupt_labels(labels, noise, generator=None):
    """Wrong labels for a training set, two of the three kinds in Section 4.4 (the third is Cars98N).

    labels     (N,) 0 to C - 1
    noise      symmetric:RATE  a fraction RATE of the images gets a random label of another class. For example, with
                               0.25, 0 0 1 1 2 2 3 3 becomes 0 0 1 3 2 2 0 3.
               longtail:RATE   random classes, which together have at most a fraction RATE of the images, are
                               dissolved: the images of each are cut into clusters of 5, and a cluster gets the label
                               of one random remaining class. For example, with 0.25, class 1 is one cluster and joins
                               class 3, so 0 0 1 1 2 2 3 3 becomes 0 0 3 3 2 2 3 3.
    generator  None is torch's global one
    returns    (N,) labels, 0 to C - 1; with longtail, no image has the label of a dissolved class
    """
    kind, rate = noise.split(':')
    rate = float(rate)
    if kind not in ('symmetric', 'longtail') or not 0 <= rate <= 1:
        raise common.UsageError(f'--label-noise is symmetric:RATE or longtail:RATE, RATE from 0 to 1, not {noise}')
    labels = labels.clone()
    total = len(labels)
    classes = int(labels.max()) + 1
    if kind == 'symmetric':
        chosen = torch.randperm(total, generator=generator)[:round(rate * total)]
        # Adding any of 1 to C - 1, modulo C, gives another class.
        labels[chosen] += torch.randint(1, classes, (len(chosen),), generator=generator)
        return labels % classes
    shuffled = torch.randperm(classes, generator=generator)
    images_so_far = torch.bincount(labels, minlength=classes)[shuffled].cumsum(0)
    num_dissolved = int((images_so_far <= rate * total).sum())           # the first classes that fit
    num_dissolved = min(num_dissolved, classes - 2)                      # two classes always remain
    dissolved, remaining = shuffled.tensor_split([num_dissolved])
    for c in dissolved:
        for cluster in (labels == c).nonzero()[:, 0].split(5):
            labels[cluster] = remaining[torch.randint(len(remaining), (1,), generator=generator)]
    return labels


def add_label_noise(images, noise, seed):
    """Gives the images of a training set wrong labels. Raises UsageError if none would change."""
    labels = corrupt_labels(images.labels, noise, torch.Generator().manual_seed(seed))
    rate = float(noise.split(':')[1])
    if rate > 0 and torch.equal(labels, images.labels):
        raise common.UsageError(f'--label-noise {noise} changes no label: with so few images, take a higher rate')
    # The remaining classes are numbered anew, from 0. The names of dissolved classes go to the end of the list, so that
    # eval.py counts them as seen in training.
    remaining, images.labels = labels.unique(return_inverse=True)
    remaining = remaining.tolist()
    dissolved = [c for c in range(len(images.classes)) if c not in remaining]
    images.classes = [images.classes[c] for c in remaining + dissolved]


# The flags that each loss uses; given with another loss, they are an error.
USES = dict(
    ccl=['s', 'margin', 'lam', 'smoothing', 'center_lr_mult'],
    stop_grad=['s', 'margin', 'lam', 'smoothing', 'center_lr_mult'],
    cluster=['s', 'margin', 'lam', 'smoothing', 'mu'],
    proxynca=['s', 'center_lr_mult'],
    center_loss=['lam', 'smoothing', 'center_lr_mult'])


def get_args(argv=None):
    parser = common.parser(__doc__, NOTES, __file__)
    add = parser.add_argument_group('Center Contrastive').add_argument
    add('--loss', choices=list(USES), default='ccl',
        help='ccl: Eq. (5); proxynca: Eq. (9); center_loss: Eq. (7); stop_grad: only L_center moves the centres; '
             'cluster: Eq. (14) moves them')
    add('--s', type=float, default=16.0, help='scaling factor, the inverse temperature 1/tau')
    add('--margin', type=float, default=0.0, help='m, margin on the cosine with the centre of the class')
    add('--lam', type=float, default=2.0,
        help='lambda, weight of L_center; with center_loss, that of Eq. (7)')
    add('--smoothing', type=float, default=0.1, help='epsilon, label smoothing')
    add('--mu', type=float, default=0.9, help='loss cluster: weight of the old centre')
    add('--center-lr-mult', type=float, default=1.0,
        help='learning rate of the centres, as a multiple of --lr')
    add('--dropout', type=float, default=0.0,
        help='probability of dropout, applied to the embedding before the loss')
    add('--label-noise', default='none', help='wrong training labels: symmetric:RATE or longtail:RATE')
    args = common.parse(parser, DEFAULTS, argv, uses={'loss': USES})
    if args.loss == 'stop_grad' and args.lam == 0:
        raise common.UsageError('--loss stop_grad --lam 0: the centres would never move, since only L_center moves '
                                'them; take --lam above 0, or --loss ccl')
    return args


def main(argv=None):
    args = get_args(argv)
    common.set_seed(args.seed)
    data = common.dataset_from(args)
    if args.label_noise != 'none':
        add_label_noise(data.train, args.label_noise, args.seed)
    classes = data.train.num_classes
    # The weights of the head have torch's default initialization, as in the code that the paper builds on.
    model = common.build(args, data=data, head_init='default', normalize=args.loss != 'center_loss')
    # A step of SGD turns a centre of length l by an angle proportional to 1 / l^2: the gradient has a factor 1 / l, and
    # the angle is about step / l. So centres from randn, of length sqrt(D), would turn D times more slowly than these.
    centers = F.normalize(torch.randn(classes, model.dim), dim=1).to(args.device)
    centers = torch.nn.Parameter(centers, requires_grad=args.loss != 'cluster')     # cluster: updated in step
    loss_params = dict(centers=centers)
    params = list(model.parameters())
    if args.loss == 'center_loss':
        classifier = loss_params['classifier'] = torch.nn.Linear(model.dim, classes).to(args.device)
        params += classifier.parameters()
    groups = [dict(params=params), dict(params=[centers], lr=args.lr * args.center_lr_mult)]
    # torch allows nesterov for SGD only, and only with momentum.
    nesterov = dict(nesterov=args.momentum > 0) if args.optimizer == 'sgd' else {}
    optimizer = common.make_optimizer(args, groups, **nesterov)

    def step(images, labels):
        z = model(images)                                                # (B, D)
        dropped = F.dropout(z, args.dropout)                             # note 5; it is always on: step is for training
        if args.loss == 'proxynca':
            return scaled_proxynca_loss(dropped, labels, centers, args.s)
        if args.loss == 'center_loss':
            return center_loss(dropped, labels, classifier.weight, classifier.bias, centers, args.lam, args.smoothing)
        loss = center_contrastive_loss(dropped, labels, centers, args.s, args.margin, args.lam, args.smoothing,
                                       stop_grad=args.loss == 'stop_grad')
        if args.loss == 'cluster':
            # The means are taken from z without dropout. To change the centres before backward() is safe, because the
            # loss uses their normalized copy.
            centers.copy_(momentum_centers(centers, z.detach(), labels, args.mu))
        return loss

    return common.train(args, model, data, step, optimizer, loss_params)


NOTES = """
What differs from the paper
    1. The second line of Eq. (5) is this loss minus the constant 2 lambda. Further equations, with --smoothing 0:
           (2) line 1, (8), (10)  --lam 0             NSoftmax, the normalized softmax of the Reality Check
           (11)                   --lam 0 --margin M  CosFace. Its m is s M: (11) subtracts it from s cos.
    2. In the second case of the gradient below Eq. (10), the numerator should be exp(S(x, c) - S(x, c_y)).
    3. Smoothing acts on the softmax terms. It does not act on L_center, or on Eq. (9), which is not a softmax.
    4. The paper does not state the following values.
         value                     here
         lambda of Table 2         It is 2, as in Section 4.4 and Fig. 4. The R@1 of SOP in Section 4.5.1 agrees.
         m of CCL*                 The default is 0, which is CCL: choose a --margin.
         mu of (14)                It is 0.9.
         how the centres start     They are random, and have length 1.
         symmetric noise           A chosen image always gets another class.
         clusters of long-tail     They are 5 consecutive images of a class.
         which x_y in (14)         It is the mean embedding of class y in the batch.
    5. Section 4.2 freezes all BatchNorm layers on CUB and Cars. --freeze-bn freezes only their statistics. Dropout is
       after the L2 normalization, as in the code that the paper builds on. With --dropout 0.2 an embedding has a length
       of about 1.118 in training, and 2 - 2 c_y.x is not the squared distance. center_loss is evaluated without the PCA
       of Section 3.3.2.
    6. Section 3.3.6 says that the first row of Table 1 (--loss stop_grad) and Eq. (14) (--loss cluster) are equivalent.
       With SGD, and without momentum and dropout, both turn a centre in the same direction, but by different angles: in
       stop_grad the angle depends on the learning rate and lambda, in cluster on mu.
    7. The second row of Table 1, called CCL, has the results of CCL* in Table 2. So it has a margin.
What differs from the released code
    8. The authors' code was not found. They adapted github.com/jeromerony/dml_cross_entropy (787e863). Pool, crop_from,
       min_crop, epochs, schedule and the jitter on CUB are from it. These settings differ: it freezes BatchNorm
       on all datasets, and on all but CUB another BatchNorm follows the pooling. It crops 224 px from 256 on CUB, and
       squashes Cars and SOP to 256 x 256. It uses 2048 dimensions, a jitter of 0.3 with hue on Cars, and no weight
       decay on biases and BatchNorm. It reports its best epoch on the test set.
Tables and figures of the paper
    Table 2, ResNet-50, R@1 on CUB, Cars, SOP, In-Shop:   --lam 0      baseline   71.1   87.7   80.8   90.2
                                                          no flag      CCL        71.8   89.6   82.3   92.1
                                                          --margin M   CCL*       73.5   91.0   83.1   92.3
    Table 1          first row: --loss stop_grad (the paper does not state its margin); second row: --margin M
    Table 3          --label-noise symmetric:0.1, symmetric:0.2, longtail:0.25, longtail:0.5 (the paper has Inception)
    Fig. 5, Fig. 6   --dataset sop with --margin 0 to 0.4 and --lam 0 to 2; --dim
    Reality Check    --dataset cub --protocol reality-check --lam 0 --smoothing 0, with --s 9.2 for normalized softmax,
                     and for CosFace with --s 100 --margin 0.62 --center-lr-mult 2500
"""


if __name__ == '__main__':
    common.cli(main)
