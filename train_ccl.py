"""train_ccl.py -- Center Contrastive Loss: an image is contrasted with one learned centre per class.

Cai, Xiong, Tian. Center Contrastive Loss for Metric Learning. 2023. arXiv:2308.00458. The authors
announce code, but none was found. They say that it is adapted from the code of Boudiaf et al., A
unifying mutual information view of metric learning (ECCV 2020), which is called the base code here.

Idea
    A memory bank, which keeps embeddings of earlier batches, offers many samples to contrast with, but
    they go stale while the network changes. CCL keeps one vector per class instead, its centre, as a
    parameter that every step updates. A softmax over all centres separates the classes. But it pulls an
    image only weakly to its own centre, that of its class, once this centre is nearest by far. With
    two classes and s = 16, the derivative of this loss by the cosine with the own centre has size 8.0
    if both cosines are equal, and only 0.6 if the own one is larger by 0.2. The second term,
    the squared distance to the own centre, goes on pulling: it "minimizes the intra-class variations"
    (Section 3.2).

Equation, averaged over the batch
    CCL Eq. (5)    L = L_contrast + lambda L_center, where
                   L_contrast = -log( exp(s (c_y.x - m)) / (exp(s (c_y.x - m)) + sum_{j != y} exp(s c_j.x)) )
                   L_center   = ||x - c_y||^2
    In Eq. (2) L_contrast has no margin m. It comes in with the second line of Eq. (5), which joins both
    terms in one logarithm. Section 3.3 compares this loss with earlier ones: Eq. (6) to (9), (11), (14).

Symbols
    paper       here        flag          meaning
    x           z           -             (B, D) embeddings of unit length
    c_j, c_y    centers     -             (C, D) centres, normalised inside the loss; c_y is that of x's class
    s = 1/tau   s           --s           1 / temperature; the paper also calls it radius of the hypersphere
    m           margin      --margin      margin on the cosine of the own class
    lambda      lam         --lam         weight of the centre term
    epsilon     smoothing   --smoothing   label smoothing: the own class has the label 1 - epsilon, and each other
                                          class an equal part of epsilon
    mu          mu          --mu          weight of the old centre in Eq. (14), --variant cluster
    N           C           -             number of classes; in this file N is the number of images

Run
    python train_ccl.py                                     # offline, a few minutes on two CPU cores
    python train_ccl.py --lam 0                             # the paper's baseline NSoftmax, Eq. (8), smoothed
    python train_ccl.py --lam 0 --margin 0.1                # the same with the margin of CosFace, Eq. (11)
    python train_ccl.py --margin 0.1                        # like CCL* in Table 2, whose margin is not stated
    python train_ccl.py --variant proxynca                  # one of four other losses, see --help
    python train_ccl.py --dataset cub --data data           # the benchmark, on a GPU

Expect
    On shapes, the R@1 of the table in tests/results/demo.md. On 25 species of birds, a pretrained ResNet-18
    rises from 51.8 to 57.8 ± 3.9 (three seeds, 95 % interval; tests/results/fine-tuning.md).
    The paper (Table 2) reports, with ResNet-50, 512 dimensions and margin 0, R@1 71.8 on CUB, 89.6 on
    Cars, 82.3 on SOP and 92.1 on In-Shop; for its baseline 71.1, 87.7, 80.8 and 90.2.
"""
import torch
import torch.nn.functional as F

import common


def center_contrastive_loss(z, y, centers, s=16.0, margin=0.0, lam=2.0, smoothing=0.0, stop_grad=False):
    """L_contrast + lam * L_center, CCL Eq. (5).

    The first line of Eq. (5) is at the top of this file. The second line is lower by a constant, 2 lambda:
        -log( exp(s (c_y.x - m) + 2 lambda c_y.x) / (exp(s (c_y.x - m)) + sum_{j != y} exp(s c_j.x)) )
    Trap: 2 lambda c_y.x stands in the numerator alone. If the own logit of a softmax had it, the denominator would
    have it, too, which is another loss.

    z          (B, D) embeddings of unit length, or about that after dropout; half precision is raised to float32
    y          (B,)   class labels, 0 to C - 1
    centers    (C, D) one per class, of any length but 0
    s          > 0, inverse temperature
    margin     >= 0, on the cosine
    lam        >= 0, weight of the centre term
    smoothing  in [0, 1), of the labels of L_contrast, see smooth_labels
    stop_grad  True: L_contrast takes the centres as constants (Table 1), so that only L_center moves them
    returns    scalar, the mean over the batch, without overflow; >= 0 for z of unit length. With one class, C = 1,
               L_contrast is 0
    """
    z, centers = common.promote_dtypes(z, centers)
    c = F.normalize(centers, dim=1)                                      # (C, D)
    own = F.one_hot(y, len(c)).to(c.dtype)                               # (B, C)
    cosine = z @ (c.detach() if stop_grad else c).T                      # (B, C)
    logits = s * (cosine - margin * own)                                 # (B, C)
    # L_contrast (B,) without smoothing is
    #     -log( exp(s (c_y.x - m)) / (exp(s (c_y.x - m)) + sum_{j != y} exp(s c_j.x)) ).
    # For m = 0 it is the first line of Eq. (2), which the paper writes again as Eq. (8) and as Eq. (10). Eq. (8) is the
    # normalised softmax of the Reality Check only if s = 1 / temperature. With a margin it is Eq. (11). But Eq. (11)
    # subtracts m from s c_y.x, not from c_y.x. So its m is s times the m of Eq. (5).
    contrast = F.cross_entropy(logits, smooth_labels(y, len(c), smoothing, logits.dtype), reduction='none')
    # L_center (B,) is ||x - c_y||^2, the second line of Eq. (2), called Eq. (3) in the text. For x of unit length it is
    # 2 - 2 c_y.x, Eq. (4). After dropout x has another length, and the two differ. Here Eq. (4) is computed: it is
    # linear in x, so its expected value is the same with and without dropout.
    center_term = 2 - 2 * (z * c[y]).sum(dim=1)
    return (contrast + lam * center_term).mean()                         # Eq. (5)


def smooth_labels(y, num_classes, smoothing, dtype=torch.float32):
    """1 - smoothing for the own class, smoothing / (C - 1) for each other one.  (B,) -> (B, C)

    Torch's label_smoothing is another one: it shares `smoothing` among all C classes, the own one included. With a
    single class, that class gets 1.
    """
    other = smoothing / max(num_classes - 1, 1)
    extra = F.one_hot(y, num_classes).to(dtype) * (1 - num_classes * other)     # own minus other label
    return extra + other


def scaled_proxynca_loss(z, y, centers, s=16.0):
    """CCL Eq. (9), Proxy-NCA:  -log( exp(s c_y.x) / sum_{j != y} exp(s c_j.x) ),  averaged over the batch.

    The own class is not in the denominator, so the loss can be negative. Proxy-Anchor Eq. (1) has the cosines alone as
    exponents, without the factor s.

    The arguments are those of center_contrastive_loss. With a single class only the numerator is left.
    """
    z, centers = common.promote_dtypes(z, centers)
    logits = s * z @ F.normalize(centers, dim=1).T                       # (B, C)
    own = torch.arange(len(centers), device=y.device) == y[:, None]      # (B, C)
    if len(centers) == 1:
        return -logits.mean()
    others = logits.masked_fill(own, float('-inf'))                      # exp(-inf) is 0: the own class is out
    return (others.logsumexp(dim=1) - logits[own]).mean()                # Eq. (9), as a difference of logarithms


def center_loss(z, y, weight, bias, centers, lam=0.03, smoothing=0.0):
    """CCL Eq. (7), averaged over the batch. It is a whole loss, and not the term L_center of Eq. (5):
        -log( exp(W_y.x + b_y) / sum_j exp(W_j.x + b_j) ) + lambda ||x - c_y||^2
    The first term, cross-entropy of a linear classifier, is Eq. (6). Its weights W and the centres c are separate
    parameters.  x is z (B, D), not normalised, like centers (C, D); weight (C, D), bias (C,) -> scalar
    """
    z, weight, bias, centers = common.promote_dtypes(z, weight, bias, centers)
    logits = F.linear(z, weight, bias)                                   # (B, C)
    labels = smooth_labels(y, len(weight), smoothing, logits.dtype)      # (B, C)
    cross_entropy = F.cross_entropy(logits, labels, reduction='none')    # (B,)  Eq. (6)
    distance2 = (z - centers[y]).square().sum(dim=1)                     # (B,)
    return (cross_entropy + lam * distance2).mean()                      # Eq. (7)


def momentum_centers(centers, z, y, mu):
    """CCL Eq. (14): new c_y = mu c_y + (1 - mu) x_y. Here x_y is the mean embedding of class y in the batch. The
    centre of a class without images stays.

    centers (C, D), z (B, D), y (B,); mu in [0, 1] is the weight of the old centre. Returns new centres (C, D).
    """
    own = F.one_hot(y, len(centers)).to(centers.dtype)                   # (B, C)
    count = own.sum(dim=0)[:, None]                                      # (C, 1)
    mean = own.T @ z.to(centers.dtype) / count.clamp(min=1)              # (C, D)
    return torch.where(count > 0, mu * centers + (1 - mu) * mean, centers)      # Eq. (14)


def corrupt_labels(labels, noise, generator=None):
    """Wrong labels for a training set, two of the three kinds in Section 4.4 (the third is a dataset).

    labels     (N,) 0..C-1
    noise      symmetric:RATE  a share RATE of the images gets a label drawn uniformly from the other classes.
                               With 0.25, 0 0 1 1 2 2 3 3 becomes 0 0 1 3 2 2 0 3, say.
               longtail:RATE   random classes, together at most RATE of all images, are dissolved: the images
                               of each, in dataset order, are cut into groups of 5, and each group joins one of
                               the classes that remain. These are numbered anew, in random order.
                               An example with 0.25: class 1 is dissolved, its only group joins class 3, and
                               the classes 3, 0, 2 that remain get the numbers 0, 1, 2. Then 0 0 1 1 2 2 3 3
                               becomes 1 1 0 0 2 2 0 0.
    generator  None: torch's global generator
    returns    (N,) labels 0..C'-1; longtail leaves C' = C minus the number of dissolved classes
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
    order = torch.randperm(classes, generator=generator)                 # its first classes are dissolved
    images = torch.bincount(labels, minlength=classes)[order].cumsum(0)  # images in the first 1, 2, ... classes
    num_gone = min(int((images <= rate * total).sum()), classes - 2)     # two classes always remain
    new_number = torch.zeros(classes, dtype=torch.long)                  # of a class that remains
    new_number[order[num_gone:]] = torch.arange(classes - num_gone)
    new_labels = new_number[labels]
    for c in order[:num_gone].tolist():
        for group in (labels == c).nonzero()[:, 0].split(5):
            new_labels[group] = torch.randint(classes - num_gone, (1,), generator=generator)
    return new_labels


# The recipe of each dataset: defaults of the flags, explained at common.BASE.
# Section 4.2 states optimizer, learning rates, momentum, weight decay, batches, crops of 256 px, smoothing, and that
# CUB and Cars have frozen BatchNorm, dropout and colour jitter. The base code gives smallest crop, pooling, epochs,
# jitter of CUB, and the schedule. With momentum 0.99 the rate has to rise slowly, which this schedule does, and
# not --warmup. For Cars the base code has square crops, jitter 0.3 and a change of hue; here Cars is augmented like
# CUB. The paper does not say from which size its 256 px are cut (the base code mostly cuts 224 from 256); here it is
# 288 px, as in ProxyNCA++. Section 1 says that CCL converges with "one-fifth" of the epochs of earlier methods, such as
# Metrix. Metrix has 100, so this would be about 20.
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
    # Section 3.1 of the Reality Check (see common.py): a batch for classification losses has one image per class. In
    # the released results for CUB, the centres of a normalised softmax have about 4500 times --lr.
    'reality-check': dict(per_class=1, center_lr_mult=4500),
}
# The embeddings of center_loss are not normalised, and lie far from their centres. With lam = 2, the second term would
# give the network's weights a gradient about 60 times that of the first one (measured on shapes, before training). With
# 0.03 both are about equal.
DEFAULTS |= {(dataset, 'center_loss'): dict(lam=0.03) for dataset in DEFAULTS}

# The flags that each variant uses
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
    add('--variant', choices=list(USES), default='ccl', help='the loss; the end of this help explains them')
    add('--s', type=common.at_least(1e-3, float), default=16.0, help='inverse temperature')
    add('--margin', type=common.between(0, 2), default=0.0, help='m, margin on the cosine')
    add('--lam', type=common.at_least(0, float), default=2.0, help='lambda, weight of the centre term')
    add('--smoothing', type=common.between(0, 0.999), default=0.1, help='epsilon, label smoothing')
    add('--mu', type=common.between(0, 1), default=0.9, help='variant cluster: weight of the old centre')
    add('--center-lr-mult', type=common.at_least(0, float), default=1.0, help='factor on --lr for the centres')
    add('--dropout', type=common.between(0, 0.999), default=0.0, help='share of an embedding dropped before the loss')
    add('--label-noise', type=common.number_or(label_noise, 'none'), default='none',
        help='wrong training labels: symmetric:RATE or longtail:RATE')
    args = common.parse(parser, DEFAULTS, argv, uses={'variant': USES})
    if args.variant == 'stop_grad' and args.lam == 0:
        raise common.UsageError('--variant stop_grad --lam 0: the centres would never move, since only L_center '
                                'moves them; take --lam above 0, or --variant ccl')
    return args


def main(argv=None):
    args = get_args(argv)
    common.set_seed(args.seed)
    data = common.dataset_from(args)
    if args.label_noise != 'none':
        generator = torch.Generator().manual_seed(args.seed)
        data.train.labels = corrupt_labels(data.train.labels, args.label_noise, generator)
    classes = data.train.num_classes
    # The weights of the head start with torch's own initialisation, as in the base code.
    model = common.build(args, data=data, head_init='default', normalize=args.variant != 'center_loss')
    # All losses but center_loss see only the direction of a centre. If its length is r, its gradient is r times smaller
    # than at length 1, and a step of the same size turns it r times less. So with SGD it turns r^2 times more slowly.
    # If centres were drawn from N(0, 1), r^2 would be about D, 512 on the benchmarks, and they would hardly turn. This
    # is why they begin with length 1, in random directions.
    centers = F.normalize(torch.randn(classes, model.dim), dim=1).to(args.device)
    centers = torch.nn.Parameter(centers, requires_grad=args.variant != 'cluster')
    loss_params = dict(centers=centers)
    params = list(model.parameters())
    if args.variant == 'center_loss':
        classifier = loss_params['classifier'] = torch.nn.Linear(model.dim, classes).to(args.device)
        params += classifier.parameters()
    groups = [dict(params=params), dict(params=[centers], lr=args.lr * args.center_lr_mult)]
    # Of the optimizers here only SGD has Nesterov acceleration. torch refuses it without momentum, which CUB and Cars
    # do not have.
    nesterov = dict(nesterov=args.momentum > 0) if args.optimizer == 'sgd' else {}
    optimizer = common.make_optimizer(args, groups, **nesterov)

    def step(images, labels):
        z = model(images)                                                # (B, D)
        dropped = F.dropout(z, args.dropout)           # here and not in the model, so evaluation never drops
        if args.variant == 'proxynca':
            return scaled_proxynca_loss(dropped, labels, centers, args.s)
        if args.variant == 'center_loss':
            return center_loss(dropped, labels, classifier.weight, classifier.bias, centers, args.lam, args.smoothing)
        loss = center_contrastive_loss(dropped, labels, centers, args.s, args.margin, args.lam, args.smoothing,
                                       stop_grad=args.variant == 'stop_grad')
        if args.variant == 'cluster':                  # the loss holds a copy, so this is safe
            centers.copy_(momentum_centers(centers, z.detach(), labels, args.mu))
        return loss

    return common.train(args, model, data, step, optimizer, loss_params)


NOTES = """
Variants: CCL, and losses with which the paper compares it
    ccl           Eq. (5)
    proxynca      Eq. (9): the own class is not in the denominator
    center_loss   Eq. (7), on embeddings that are not normalised: classifier and centres are separate
    stop_grad     L_contrast takes the centres as constants, as in the first row of Table 1 (the second row is called
                  CCL, but has the numbers of CCL* in Table 2, so CCL there has a margin)
    cluster       Eq. (14): the centres are running means of embeddings, not parameters
What differs from the paper, or is not stated in it
    1. In the second case of the gradient that is printed below Eq. (10), the numerator should be
       exp(S(x, c) - S(x, c_y)), where S(x, c) is s c.x. Without margin and smoothing, L_contrast has this gradient.
    2. Label smoothing changes the labels of a softmax. L_center is not a softmax. Eq. (9) is not one either, since
       its denominator lacks the own class. So these two are not smoothed.
    3. The paper does not state the lambda of Table 2, the m of its CCL*, how the centres start, or the mu of Eq. (14).
       Lambda is 2 in Section 4.4 and Fig. 4. In Fig. 5, lambda 2 gives the R@1 that Table 2 has for SOP. What else the
       paper leaves open is in the comment above CUB = dict(...) in this file.
    4. --variant cluster averages the embeddings that a class has in the batch, and then applies Eq. (14).
    5. Label noise: the paper does not say whether symmetric noise may draw the own class; here it never does. Nor does
       it say what forms a cluster of long-tail noise; here 5 images in dataset order do.
    6. Dropout comes after the normalisation, as in the base code, and --dropout 0.2 divides what stays by 0.8. So in
       training an embedding has a length of about 1.118, and its inner product with a centre can exceed 1.
    7. center_loss is evaluated by cosine, without the PCA that Section 3.3.2 mentions.
    8. The paper calls stop_grad equivalent to cluster contrastive methods, which have Eq. (14), and Table 1 compares
       CCL with stop_grad in their place (Section 3.3.6). With plain SGD and without dropout, stop_grad and
       Eq. (14) turn a centre in the same direction. The step depends on mu in Eq. (14), and on the learning rate and
       lambda in stop_grad. Eq. (14) also changes the length of a centre. So both are here.
What differs from the base code (github.com/jeromerony/dml_cross_entropy, 787e863)
    9. The base code freezes the statistics of BatchNorm on all datasets. Here they are frozen on CUB and Cars, as
       in the paper, and not on SOP and In-Shop. The base code also has a BatchNorm without affine weights
       after the pooling on Cars, SOP and In-Shop, which is missing here. It has no weight
       decay on biases and on the affine weights of BatchNorm; here all weights decay alike. Its head starts with
       bias 0, here with torch's small random one. Its test images of Cars and SOP are squashed to squares. It
       reports its best epoch on the test set. Its smoothed loss is a KL divergence, which is lower than the
       cross-entropy here by a constant and has the same gradient.
Tables and figures of the paper
    Table 1: --variant stop_grad --margin M. Table 2: --lam 0 is the baseline, the defaults are CCL,
    --margin M is CCL*, where M is not stated.
    Table 3: --label-noise, with an Inception network there. Fig. 5: --lam and --margin. Fig. 6: --dim.
    With --protocol reality-check, --lam 0 --smoothing 0 is the normalised softmax of the Reality Check. With --margin
    added it is CosFace, whose centres have a rate of 2.5e-3 on CUB in the released results (--center-lr-mult 2500).
    In these results, each of the two losses has its own --s.
"""


if __name__ == '__main__':
    common.cli(main)
