"""train_ccl.py -- Center Contrastive Loss: a softmax over one centre per class, plus the distance to the centre.

Cai, Xiong, Tian. Center Contrastive Loss for Metric Learning. 2023. arXiv:2308.00458
Each class has a learnable centre. L_contrast in CCL Eq. (5) is -log p_y, where p_y is a softmax over the centres. Its
gradient with respect to c_y.x has magnitude s (1 - p_y): for s = 16 and two classes, 8.0 if both cosines are equal, 0.6
if c_y.x is 0.2 larger. L_center, the squared distance to c_y, still attracts the image to its centre then.

    paper      code     flag      meaning
    x          z        -         (B, D) L2-normalized embeddings; y is the target class of x
    c_j, c_y   centers  -         (C, D) learnable centres, normalized inside the loss; c_y is the positive centre
    s = 1/tau  s        --s       scaling factor: inverse temperature, radius of the hypersphere
    m          margin   --margin  margin on the cosine c_y.x
    lambda     lam      --lam     weight of L_center

    python train_ccl.py --dataset cub --data data    # without flags: a small built-in dataset, on a CPU
"""
import torch
import torch.nn.functional as F

import common


def center_contrastive_loss(z, y, centers, s=16.0, margin=0.0, lam=2.0, smoothing=0.0, stop_grad=False):
    """The mean over the batch of L = L_contrast + lambda L_center, CCL Eq. (5):

    L_contrast = -log p_y,  p_y = exp(s (c_y.x - m)) / (exp(s (c_y.x - m)) + sum_{j != y} exp(s c_j.x))
    L_center   = ||x - c_y||^2

    Other equations of the paper are parts of it:
        L_contrast, m = 0   Eq. (2), (8) and (10). Eq. (8), NSoftmax, is the normalized softmax of the Reality Check
                            with temperature 1 / s.
        L_contrast, m > 0   CosFace; and Eq. (11), whose m is outside of the scale, s c_y.x - m: it is s times this m
        L_center            the second line of Eq. (2), which the text calls Eq. (3)
    The second line of Eq. (5) is lower by the constant 2 lambda, with exp(2 lambda c_y.x) in the numerator only.

    z          (B, D) embeddings, L2-normalized before dropout
    y          (B,)   class labels, 0 to C - 1
    centers    (C, D) one per class, of any length but 0
    smoothing  in [0, 1), of the labels of L_contrast, see smooth_labels
    stop_grad  stops the gradient of L_contrast to the centres (Table 1), so that only L_center moves them
    returns    scalar, >= 0 for L2-normalized z; half precision is upcast to float32. With one class, L_contrast is 0.
    """
    z, centers = common.promote_dtypes(z, centers)
    c = F.normalize(centers, dim=1)                                      # (C, D)
    target = F.one_hot(y, len(c)).to(c.dtype)                            # (B, C)
    cosine = z @ (c.detach() if stop_grad else c).T                      # (B, C)
    logits = s * (cosine - margin * target)                              # (B, C)
    # L_contrast (B,): Eq. (2), or with a margin Eq. (11), whose m is s * margin
    contrast = F.cross_entropy(logits, smooth_labels(y, len(c), smoothing, logits.dtype), reduction='none')
    # L_center (B,): the right-hand side of Eq. (4), equal to Eq. (3) if x is L2-normalized, so not after dropout. It is
    # linear in x, so dropout does not change its expected value.
    center_term = 2 - 2 * (z * c[y]).sum(dim=1)
    return (contrast + lam * center_term).mean()                         # Eq. (5)


def smooth_labels(y, num_classes, smoothing, dtype=torch.float32):
    """1 - epsilon for the target class, epsilon / (C - 1) for each other class (Section 4.2, where C is called N, the
    number of centres, and epsilon is `smoothing`).  (B,) -> (B, C)

    label_smoothing of torch differs: it divides epsilon among all C classes, the target class included. With one class,
    that class gets 1.
    """
    other = smoothing / max(num_classes - 1, 1)
    target = F.one_hot(y, num_classes).bool()                            # (B, C)
    labels = torch.full(target.shape, other, dtype=dtype, device=y.device)
    return labels.masked_fill(target, 1 - (num_classes - 1) * other)


def scaled_proxynca_loss(z, y, centers, s=16.0):
    """Proxy-NCA as in CCL Eq. (9), averaged over the batch:

    -log( exp(s c_y.x) / sum_{j != y} exp(s c_j.x) )

    The target class is not in the denominator, so the loss can be negative. (In Proxy-Anchor Eq. (1), s is 1.)
    Arguments as in center_contrastive_loss. If there is one class only, the denominator is left out.
    """
    z, centers = common.promote_dtypes(z, centers)
    logits = s * z @ F.normalize(centers, dim=1).T                       # (B, C)
    target = torch.arange(len(centers), device=y.device) == y[:, None]   # (B, C)
    if len(centers) == 1:
        return -logits.mean()
    others = logits.masked_fill(target, float('-inf'))                   # exp(-inf) = 0
    return (others.logsumexp(dim=1) - logits[target]).mean()             # Eq. (9): -log(a / b) = log b - log a


def center_loss(z, y, weight, bias, centers, lam=0.03, smoothing=0.0):
    """The center loss, CCL Eq. (7), averaged over the batch. It is a loss of its own, not L_center of Eq. (5):

    -log( exp(W_y.x + b_y) / sum_j exp(W_j.x + b_j) ) + lambda ||x - c_y||^2

    The first term, Eq. (6), is the cross-entropy of a linear classifier. It and the centres are separate parameters.
    x is x~ in the paper: neither it nor the centres are normalized, so this lambda has another size than in Eq. (5).

    z (B, D) embeddings x; y (B,); weight (C, D) and bias (C,) of the classifier; centers (C, D) -> scalar
    """
    z, weight, bias, centers = common.promote_dtypes(z, weight, bias, centers)
    logits = F.linear(z, weight, bias)                                   # (B, C)
    labels = smooth_labels(y, len(weight), smoothing, logits.dtype)      # (B, C)
    cross_entropy = F.cross_entropy(logits, labels, reduction='none')    # (B,)  Eq. (6)
    distance2 = (z - centers[y]).square().sum(dim=1)                     # (B,)
    return (cross_entropy + lam * distance2).mean()                      # Eq. (7)


def momentum_centers(centers, z, y, mu):
    """CCL Eq. (14): new c_y = mu c_y + (1 - mu) x_y. Here x_y is the mean embedding of class y in the batch. The
    centre of a class without images is unchanged.

    centers (C, D), z (B, D), y (B,); mu in [0, 1] is the weight of the old centre. Returns new centres (C, D).
    """
    member = F.one_hot(y, len(centers)).to(centers.dtype)                # (B, C)
    count = member.sum(dim=0)[:, None]                                   # (C, 1)
    mean = member.T @ z.to(centers.dtype) / count.clamp(min=1)           # (C, D)
    return torch.where(count > 0, mu * centers + (1 - mu) * mean, centers)      # Eq. (14)


def corrupt_labels(labels, noise, generator=None):
    """Wrong labels for a training set, two of the three kinds in Section 4.4 (the third is Cars98N).

    labels     (N,) 0 to C - 1
    noise      symmetric:RATE  a fraction RATE of the images gets a random label of another class. For example, with
                               0.25, 0 0 1 1 2 2 3 3 becomes 0 0 1 3 2 2 0 3.
               longtail:RATE   classes are drawn at random and eliminated as long as they hold at most RATE of the
                               images. The images of each, in dataset order, are cut into clusters of 5, and each
                               cluster gets a random label of the classes that remain. Then the classes that remain
                               are numbered anew, in random order. For example, with 0.25, class 1 is eliminated, its
                               only cluster gets the label 3, and the classes 3, 0, 2 become 0, 1, 2. So
                               0 0 1 1 2 2 3 3 becomes 1 1 0 0 2 2 0 0.
    generator  None is torch's global one
    returns    (N,) labels, 0 to C - 1; with longtail 0 to R - 1, where R classes remain
    """
    kind, rate = noise.split(':')
    rate = float(rate)
    labels = labels.clone()
    total = len(labels)
    classes = int(labels.max()) + 1
    if kind == 'symmetric':
        chosen = torch.randperm(total, generator=generator)[:round(rate * total)]
        labels[chosen] += torch.randint(1, classes, (len(chosen),), generator=generator)
        return labels % classes                                          # adding any of 1..C-1 gives another class
    shuffled = torch.randperm(classes, generator=generator)
    images_so_far = torch.bincount(labels, minlength=classes)[shuffled].cumsum(0)
    num_eliminated = min(int((images_so_far <= rate * total).sum()), classes - 2)       # two classes always remain
    eliminated = shuffled[:num_eliminated]
    remaining = shuffled[num_eliminated:]
    new_number = torch.zeros(classes, dtype=torch.long)                  # (C,) 0 for now if eliminated
    new_number[remaining] = torch.arange(len(remaining))
    new_labels = new_number[labels]
    for c in eliminated:
        for cluster in (labels == c).nonzero()[:, 0].split(5):
            new_labels[cluster] = torch.randint(len(remaining), (1,), generator=generator)
    return new_labels


# Training recipes, see common.BASE. Where the settings come from:
#     optimizer, learning rates, momentum, weight decay, batches, crops of 256 px   Section 4.2
#     frozen BatchNorm, dropout and jitter on CUB and Cars                          Section 4.2
#     pool, min_crop, epochs, schedule, strength of the jitter on CUB               the base code, see NOTES
#     jitter on Cars   as on CUB. The base code has 0.3, a change of hue, and square crops.
#     resize           288 px, as in ProxyNCA++. The paper has no size; the base code mostly cuts 224 px from 256.
# The defaults of two flags: --s 16 is from Section 4.5, --smoothing 0.1 from Section 4.2.
# The paper states no number of epochs. Section 1 says "one-fifth" of the epochs of Metrix, which has 100, so about 20.
# Here it is the number of the base code, which has the same learning rates except on In-Shop. The schedule begins with
# a slow rise of the learning rate, which momentum 0.99 needs. (--warmup is something else: it freezes the backbone.)
CUB = dict(dim=512, pool='avg', freeze_bn=True, image_size=256, resize=288, crop_from='resized', min_crop=0.16,
           jitter=0.25, dropout=0.2, epochs=30, batch_size=128, per_class=0, optimizer='sgd', lr=0.02, momentum=0.0,
           weight_decay=5e-4, schedule='cosine', warmup=0, clip=0.0)
SOP = CUB | dict(freeze_bn=False, jitter=0.0, dropout=0.0, epochs=100, lr=0.003, momentum=0.99)
DEFAULTS = {
    'shapes': dict(per_class=0, pool='avg'),
    'folder': dict(per_class=0, pool='avg'),
    'vectors': dict(per_class=0, epochs=12),
    'cub': CUB,
    'cars': CUB | dict(epochs=100, lr=0.05),
    'sop': SOP,
    'inshop': SOP | dict(lr=0.006),
    # In the Reality Check (see common.py) a batch for classification losses has one image per class (Section 3.1). In
    # its released results for CUB, the learning rate of the centres of a normalized softmax is about 4500 times --lr.
    'reality-check': dict(per_class=1, center_lr_mult=4500),
}
# (dataset, loss) overrides dataset, see common.parse. The embeddings of center_loss are not normalized and lie far from
# the centres. With lam = 2, the second term of Eq. (7) would give the network's weights a gradient about 60 times that
# of the first term (on shapes, before training). With 0.03 both are about equal.
DEFAULTS |= {(dataset, 'center_loss'): dict(lam=0.03) for dataset in DEFAULTS}

# The flags that each loss uses
USES = dict(ccl='s margin lam smoothing center_lr_mult', stop_grad='s margin lam smoothing center_lr_mult',
            cluster='s margin lam smoothing mu', proxynca='s center_lr_mult',
            center_loss='lam smoothing center_lr_mult')


def label_noise(text):
    """An argparse type: symmetric:RATE or longtail:RATE, where RATE is from 0 to 0.999"""
    kind, rate = text.split(':')
    if kind not in ('symmetric', 'longtail'):
        raise ValueError
    return f'{kind}:{common.between(0, 0.999)(rate)}'


label_noise.__name__ = 'symmetric:RATE or longtail:RATE'                # argparse prints it


def get_args(argv=None):
    parser = common.parser(__doc__, NOTES, __file__)
    add = parser.add_argument_group('Center Contrastive').add_argument
    add('--loss', '--variant', choices=list(USES), default='ccl', help='the end of this help explains them')
    add('--s', type=common.at_least(1e-3, float), default=16.0, help='scaling factor, the inverse temperature 1/tau')
    add('--margin', type=common.between(0, 2), default=0.0, help='m, margin on the cosine with the positive centre')
    add('--lam', type=common.at_least(0, float), default=2.0, help='lambda, weight of L_center')
    add('--smoothing', type=common.between(0, 0.999), default=0.1, help='epsilon, label smoothing')
    add('--mu', type=common.between(0, 1), default=0.9, help='loss cluster: weight of the old centre')
    add('--center-lr-mult', type=common.at_least(0, float), default=1.0,
        help='learning rate of the centres, as a multiple of --lr')
    add('--dropout', type=common.between(0, 0.999), default=0.0, help='dropout probability, between embedding and loss')
    add('--label-noise', type=common.number_or(label_noise, 'none'), default='none',
        help='wrong training labels: symmetric:RATE or longtail:RATE')
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
        generator = torch.Generator().manual_seed(args.seed)
        data.train.labels = corrupt_labels(data.train.labels, args.label_noise, generator)
    classes = data.train.num_classes
    # The weights of the head have torch's default initialization, as in the base code.
    model = common.build(args, data=data, head_init='default', normalize=args.loss != 'center_loss')
    # All losses except center_loss depend only on the direction of a centre. For a centre of length r, the gradient
    # scales as 1/r, and a step of given length turns it by an angle of about 1/r: together 1/r^2. Centres from N(0, 1)
    # have r^2 of about D, 512 on the benchmarks, and would hardly turn. So they begin with length 1.
    centers = F.normalize(torch.randn(classes, model.dim), dim=1).to(args.device)
    centers = torch.nn.Parameter(centers, requires_grad=args.loss != 'cluster')     # cluster: updated in step
    loss_params = dict(centers=centers)
    params = list(model.parameters())
    if args.loss == 'center_loss':
        classifier = loss_params['classifier'] = torch.nn.Linear(model.dim, classes).to(args.device)
        params += classifier.parameters()
    groups = [dict(params=params), dict(params=[centers], lr=args.lr * args.center_lr_mult)]
    # Only SGD has Nesterov acceleration. torch rejects it without momentum, which CUB and Cars do not have.
    nesterov = dict(nesterov=args.momentum > 0) if args.optimizer == 'sgd' else {}
    optimizer = common.make_optimizer(args, groups, **nesterov)

    def step(images, labels):
        z = model(images)                                                # (B, D)
        dropped = F.dropout(z, args.dropout)           # not in the model, so evaluation has no dropout
        if args.loss == 'proxynca':
            return scaled_proxynca_loss(dropped, labels, centers, args.s)
        if args.loss == 'center_loss':
            return center_loss(dropped, labels, classifier.weight, classifier.bias, centers, args.lam, args.smoothing)
        loss = center_contrastive_loss(dropped, labels, centers, args.s, args.margin, args.lam, args.smoothing,
                                       stop_grad=args.loss == 'stop_grad')
        if args.loss == 'cluster':
            # The loss uses a normalized copy, so this in-place change does not affect backward.
            centers.copy_(momentum_centers(centers, z.detach(), labels, args.mu))
        return loss

    return common.train(args, model, data, step, optimizer, loss_params)


NOTES = """
Losses: CCL, and those with which the paper compares it
    ccl           Eq. (5)
    proxynca      Eq. (9)
    center_loss   Eq. (7), on embeddings that are not normalized
    stop_grad     first row of Table 1: no gradient of L_contrast to the centres
    cluster       Eq. (14): the centres are running means of embeddings, and have no gradient
R@1 in the paper (Table 2, ResNet-50, 512 dimensions)
    flags                    CUB    Cars   SOP    In-Shop
    --lam 0      baseline    71.1   87.7   80.8   90.2     NSoftmax, Eq. (8), with label smoothing
    none         CCL         71.8   89.6   82.3   92.1
    --margin M   CCL*        73.5   91.0   83.1   92.3     M is not stated
    --lam 0 --margin M is NSoftmax with the margin of CosFace, Eq. (11).
What differs from the paper, or is not stated in it
    1. In the second case of the gradient that is printed below Eq. (10), the numerator should be
       exp(S(x, c) - S(x, c_y)), where S(x, c) is s c.x. Without margin and smoothing, L_contrast has this gradient.
    2. Label smoothing needs a softmax. L_center has none, and neither has Eq. (9), whose denominator lacks the target
       class. So these two are not smoothed.
    3. Not stated: the lambda of Table 2, the m of CCL*, how the centres start, and the mu of Eq. (14). Lambda is 2 in
       Section 4.4 and Fig. 4, and in Fig. 5 lambda 2 gives the R@1 that Table 2 has for SOP.
    4. --loss cluster takes the mean of the embeddings that a class has in the batch as x_y of Eq. (14).
    5. Label noise: it is not stated whether symmetric noise may give an image its true class; here it does not. Nor is
       it stated what a cluster of long-tail noise is; here it is 5 images in dataset order.
    6. Section 4.2 freezes all BatchNorm layers on CUB and Cars. --freeze-bn freezes their running statistics only; the
       affine weights are trained.
    7. Dropout comes after the L2 normalization, as in the base code. With probability 0.2, the kept entries are
       divided by 0.8, so in training an embedding has a length of about 1.118, and its inner product with a centre can
       exceed 1.
    8. center_loss is evaluated by cosine, without the PCA that Section 3.3.2 mentions.
    9. Section 3.3.6 calls stop_grad equivalent to cluster contrastive methods, Eq. (14), and Table 1 has it in their
       place. They are not quite equal, so both are here:
       - With plain SGD and without dropout, both turn a centre in the same direction.
       - The size of the step depends on mu in Eq. (14), and on the learning rate and lambda in stop_grad.
       - Eq. (14) also changes the length of a centre.
   10. The second row of Table 1, called CCL, has the results of CCL* in Table 2. So it has a margin.
What differs from the base code (github.com/jeromerony/dml_cross_entropy, 787e863)
    The authors announce code, but none was found. They adapted that of Boudiaf et al., A unifying mutual information
    view of metric learning (ECCV 2020), called the base code here.
   11. BatchNorm: it freezes the statistics on all datasets; here they are frozen on CUB and Cars only. On Cars, SOP and
       In-Shop it has one more BatchNorm, without affine weights, after the pooling.
   12. Weight decay: it has none on biases and on the affine weights of BatchNorm; here all weights decay alike.
   13. Head: its bias starts at 0; here it has torch's small random values.
   14. Test images of Cars and SOP: it resizes them to squares, ignoring the aspect ratio.
   15. It reports its best epoch on the test set.
   16. Its smoothed loss is a KL divergence. It is lower than the cross-entropy here by a constant, with equal gradient.
Tables and figures of the paper
    Table 1: --loss stop_grad --margin M, and --margin M. Table 2: see above. Fig. 6: --dim.
    Table 3: --label-noise symmetric:0.1, symmetric:0.2, longtail:0.25 and longtail:0.5, in the paper with Inception.
    Fig. 5: on SOP, --margin from 0 to 0.4 in steps of 0.1, and --lam from 0 to 2 in steps of 0.5.
    With --protocol reality-check, --lam 0 --smoothing 0 is the normalized softmax of the Reality Check, and with
    --margin in addition its CosFace. In the released results each of the two has its own --s. On CUB the learning rate
    of the centres is 2.5e-3 in CosFace, which is --center-lr-mult 2500.
"""


if __name__ == '__main__':
    common.cli(main)
