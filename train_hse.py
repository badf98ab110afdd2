"""train_hse.py -- Hybrid Species Embedding: an image mixed from several classes is an anchor without a label.

Yang, Sun, Li, Chen, Cai, Song. HSE: Hybrid Species Embedding for Deep Metric Learning. ICCV 2023.
Images of two to four classes are mixed into a hybrid, which gets no label. L_Hy, HSE Eq. (9), pulls it to the nearest
image of its source classes (easy weak positive) and pushes it from the nearest image of another class (hard negative).
Pulling it to all weak positives could merge unrelated classes (Section 3.3.2).

    paper      code          flag            meaning
    x_H        hybrids, h    --kind          (H, 3, S, S) mixed images; h: (H, D) their embeddings
    x_A, x_B   sources       --num           (H, num) positions in the batch of the images that are mixed
    Nsize      per_class     --per-class     images per class in a batch, and hybrids per set of classes
    Cnum       combinations  --combinations  sets of `num` classes that are mixed, so H = Nsize Cnum
    alpha      alpha         --alpha         weight of L_Hy; 0: no hybrids

    python train_hse.py --dataset cub --data data --loss epshn    # without flags: a built-in dataset, on a CPU
"""
from functools import partial
from itertools import chain, repeat

import torch
import torch.nn.functional as F

import common


def hybrid_loss(h, z, weak_positive, negative, alpha=1.0, temperature=0.1):
    """The mean of L_Hy, HSE Eq. (9), over the hybrids:

    L_Hy = -alpha log( 1 / (1 + exp(s_hn) / exp(s_ewp)) )

    s_hn = f(x_H) . f(x_hn) is the inner product with the hard negative, HSE Eq. (7): of the images of other classes,
    the nearest to the hybrid x_H. s_ewp = f(x_H) . f(x_ewp) is the one with the easy weak positive, HSE Eq. (8): of the
    images of source classes, the nearest to x_H. The nearest image is the one with the largest inner product, since
    L2-normalized vectors have ||a - b||^2 = 2 - 2 a . b.

    h              (H, D) L2-normalized embeddings f(x_H) of the hybrids
    z              (B, D) L2-normalized embeddings of the labelled images
    weak_positive  (H, B) bool, images of source classes: Eq. (8) chooses one
    negative       (H, B) bool, images of other classes: Eq. (7) chooses one
    temperature    > 0, divides the inner products; 1 is Eq. (9) as printed, 0.1 the released code
    returns        scalar >= 0; half precision is upcast to float32. A hybrid without weak positives, or without
                   negatives, has zero loss, but still counts in the mean. Without hybrids, loss and gradient are 0.
    """
    h, z = common.promote_dtypes(h, z)
    s = h @ z.T / temperature                                            # (H, B)
    s_ewp, has_ewp = most_similar(s, weak_positive)                      # Eq. (8)
    s_hn, has_hn = most_similar(s, negative)                             # Eq. (7)
    # Algorithm 1 ends with the mean over both columns of log_softmax([s_ewp, s_hn]), which would be optimal at
    # s_ewp = s_hn. Eq. (9) is the first column only, which is computed here.
    loss = -alpha * F.logsigmoid(s_ewp - s_hn)                           # (H,) Eq. (9): sigmoid(t) = 1 / (1 + exp(-t))
    return (loss * (has_hn & has_ewp)).sum() / max(len(h), 1)


def most_similar(s, allowed):
    """For each row of s, its largest allowed entry, and whether any is allowed.  (n, B), (n, B) -> (n,), (n,)
    If no entry of a row is allowed, its value is arbitrary but finite, and must be multiplied by the second output."""
    index = s.masked_fill(~allowed, float('-inf')).argmax(dim=1, keepdim=True)              # (n, 1)
    return s.gather(1, index).squeeze(1), allowed.any(dim=1)


def candidates(y, sources):
    """For each hybrid, its weak positives (the sources are among them) and its negatives, as masks of the labelled
    images.  y (B,), sources (H, num) -> (H, B), (H, B) bool"""
    is_weak = y[sources][:, :, None] == y                                # (H, num, B)
    weak_positive = is_weak.any(dim=1)                                   # HSE Eq. (8): C(x) = C(x_A) or C(x) = C(x_B)
    return weak_positive, ~weak_positive                                 # HSE Eq. (7): neither


def hse_loss(base_loss, z, y, h, sources, alpha=1.0, temperature=0.1):
    """L = L_m + L_Hy, HSE Eq. (10). L_m is base_loss(z, y), on the labelled images only. With contrastive_loss this is
    HSE Eq. (11).  z (B, D), y (B,), h (H, D), sources (H, num) -> scalar"""
    return base_loss(z, y) + hybrid_loss(h, z, *candidates(y, sources), alpha, temperature)


# ---- hybrids
KINDS = ['cutmix', 'mixup', 'gridmask']


def make_hybrids(images, labels, kind='cutmix', num=2, per_class=5, combinations=1, axis='top-bottom',
                 mask_size=50, superclasses=None, generator=None):
    """Mixed sample data augmentation (MSDA): `per_class` hybrids for each of `combinations` sets of `num` classes.

    Hybrid r of a set mixes image r of each of its classes; a class with fewer images uses its first ones again. A
    superclass (if None: the batch) with fewer than `num` classes is skipped. If none is left, H = 0.

    images, labels  (B, 3, S, S), (B,); in any order
    kind            cutmix: `num` strips of about equal size, stacked vertically or side by side (axis);
                    mixup: the mean; gridmask: square blocks of mask_size pixels, from the sources in turn
    superclasses    (B,) or None: if given, only classes of one superclass are mixed
    generator       for the choice of classes; None is torch's global one
    returns         hybrids (H, 3, S, S); sources (H, num), positions in the batch, of different classes
    """
    y = labels.cpu()                                # choosing takes many small steps, which a CPU does faster
    sources = [y.new_empty(0, num)]                 # for H = 0
    for classes in choose_classes(y, num, combinations, superclasses, generator):
        columns = []
        for c in classes:
            members = (y == c).nonzero()[:, 0]
            columns.append(members[torch.arange(per_class) % len(members)])                 # (per_class,)
        sources.append(torch.stack(columns, dim=1))                                         # (per_class, num)
    sources = torch.cat(sources).to(images.device)                                          # (H, num)
    return blend(images[sources], kind, axis, mask_size), sources


def choose_classes(y, num, combinations, superclasses=None, generator=None):
    """Chooses `combinations` sets of `num` different classes; with superclasses, each set is from one of them.

    The classes of each superclass are shuffled and cut into sets of `num`, and all sets are shuffled. This is repeated
    until there are enough sets. On SOP a batch has 2 classes of each of 12 superclasses, so 12 combinations of num = 2
    take one set from each.  y (B,), superclasses (B,) or None -> list of (num,)
    """
    superclasses = torch.zeros_like(y) if superclasses is None else superclasses.cpu()
    usable = [y[superclasses == superclass].unique() for superclass in superclasses.unique()]
    usable = [classes for classes in usable if len(classes) >= num]
    chosen = []
    while usable and len(chosen) < combinations:
        sets = []
        for classes in usable:
            shuffled = classes[torch.randperm(len(classes), generator=generator)]
            sets += shuffled[:len(classes) // num * num].split(num)     # without a last, smaller set
        chosen += [sets[i] for i in torch.randperm(len(sets), generator=generator)]
    return chosen[:combinations]


def blend(parts, kind, axis, mask_size):
    """Mixes num images into one.  parts (H, num, 3, S, S) -> (H, 3, S, S)"""
    H, num, channels, height, width = parts.shape
    if kind == 'mixup':
        return parts.mean(dim=1)                    # with two images HSE Eq. (3) for lambda = 1/2
    row, column = torch.meshgrid(torch.arange(height), torch.arange(width), indexing='ij')      # (height, width) each
    layout = axis if kind == 'cutmix' else kind
    if layout == 'top-bottom':                      # source_index (height, width): which source gives each pixel
        source_index = row * num // height
    elif layout == 'left-right':
        source_index = column * num // width
    elif layout == 'gridmask':
        source_index = (row // mask_size + column // mask_size) % num       # with two sources, a checkerboard
    else:
        raise common.UsageError(f'{layout} is not a way to mix images')
    if source_index.max() < num - 1:                # a source got no pixel
        raise common.UsageError(f'{kind} cannot combine {num} images in {height} x {width} px: take '
                                'larger images, a smaller --num or, with gridmask, a smaller --mask-size')
    source_index = source_index.to(parts.device).expand(H, 1, channels, height, width)
    return parts.gather(1, source_index).squeeze(1)         # over dim num: (H, 3, S, S)


# ---- base losses L_m: z (B, D) L2-normalized, y (B,) -> scalar. Their own alpha is not the weight of L_Hy.


def pairs(y):
    """(B, B) bool masks of the positive and of the negative pairs. No image is paired with itself."""
    same = y[:, None] == y                                               # (B, B)
    return same & ~torch.eye(len(y), dtype=torch.bool, device=y.device), ~same


def log1p_sum_exp(t, keep):
    """For each row: log(1 + sum of exp(t) over the columns where keep is true).  (rows, columns) -> (rows,)"""
    # A column of 0 is added, since exp(0) = 1 is the "1 +". Columns with keep false become -inf, and exp(-inf) = 0.
    return F.pad(t.masked_fill(~keep, float('-inf')), (1, 0)).logsumexp(dim=1)


def multi_similarity_loss(z, y, alpha=2.0, beta=50.0, lam=0.5, epsilon=0.1):
    """Multi-Similarity with its miner; train_ms.py explains it."""
    z = common.at_least_float32(z)
    s = z @ z.T                                                          # (B, B)
    positive, negative = pairs(y)
    hardest_positive = s.masked_fill(~positive, float('inf')).amin(dim=1, keepdim=True)         # (B, 1)
    hardest_negative = s.masked_fill(~negative, float('-inf')).amax(dim=1, keepdim=True)        # (B, 1)
    # Keep a positive with s - epsilon < hardest negative, a negative with s + epsilon > hardest positive. Written as
    # not >= and not <=, since comparisons with NaN are false, and a NaN pair should be kept so that the loss shows it.
    positive &= ~(s - epsilon >= hardest_negative)
    negative &= ~(s + epsilon <= hardest_positive)
    pull = log1p_sum_exp(-alpha * (s - lam), positive) / alpha          # (B,)
    push = log1p_sum_exp(beta * (s - lam), negative) / beta             # (B,)
    return (pull + push).mean()


def contrastive_loss(z, y, neg_margin=0.5):
    """HSE Eq. (2): d^2 for a positive pair (the paper's y = 1; here y are class labels), [m - d]_+^2 for a negative one
    (y = 0). The released code has no squares. Positive and negative pairs are averaged separately, each over the pairs
    with non-zero loss; train_contrastive.py explains it."""
    z = common.at_least_float32(z)
    s = z @ z.T                                                          # (B, B)
    d2 = s.diagonal()[:, None] + s.diagonal() - 2 * s           # |z_i|^2 + |z_j|^2 - 2 z_i.z_j
    # sqrt has an infinite gradient at 0, so d2 within rounding error of 0 is replaced by a constant 0, whose gradient
    # is 0. clamp_min keeps the gradient of sqrt finite there too: where() multiplies it by 0, and 0 * inf is NaN.
    floor = 16 * torch.finfo(d2.dtype).eps
    d = torch.where(d2 <= floor, 0, d2.clamp_min(floor).sqrt())          # HSE Eq. (1): the Euclidean distance
    positive, negative = pairs(y)
    pull = d.square() * positive                                         # HSE Eq. (2), first term
    push = (neg_margin - d).clamp_min(0).square() * negative             # HSE Eq. (2), second term
    return sum(term.sum() / (term > 0).sum().clamp_min(1) for term in (pull, push))


def proxy_anchor_loss(z, y, proxies, alpha=32.0, delta=0.1):
    """Proxy-Anchor with proxies (C, D); train_proxy_anchor.py explains it."""
    z, proxies = common.promote_dtypes(z, proxies)
    s = F.normalize(proxies, dim=1) @ z.T                                # (C, B)
    positive = torch.arange(len(proxies), device=y.device)[:, None] == y         # (C, B)
    pull = log1p_sum_exp(-alpha * (s - delta), positive)                # (C,)
    push = log1p_sum_exp(alpha * (s + delta), ~positive)                # (C,)
    return pull.sum() / positive.any(dim=1).sum() + push.mean()


def epshn_loss(z, y, temperature=0.1):
    """Easy positive, semi-hard negative (Xuan et al., 2020). Mean over the anchors that have both; 0 if no anchor has.

    The positive of an anchor is the most similar image of its class. Its negative is the most similar one of those
    images of other classes that are less similar than the positive. With their similarities s_p and s_n, the anchor has
    the loss -log sigmoid((s_p - s_n) / temperature), which has the form of HSE Eq. (9).
    """
    z = common.at_least_float32(z)
    s = z @ z.T                                                          # (B, B)
    positive, negative = pairs(y)
    s_p, has_p = most_similar(s, positive)
    s_n, has_n = most_similar(s, negative & (s < s_p[:, None]))
    keep = has_p & has_n
    return -(F.logsigmoid((s_p - s_n) / temperature) * keep).sum() / keep.sum().clamp_min(1)


def npair_loss(z, y):
    """N-pair (Sohn, NIPS 2016): the first image of each class is an anchor, its positive is the second image, and its
    negatives are the second images of the other classes. Cross-entropy over cosine similarities, averaged over the P
    classes with two images or more in the batch."""
    z = common.at_least_float32(z)
    same = y[:, None] == y                                               # (B, B)
    rank = same.tril(-1).sum(dim=1)                 # (B,) 0 for the first image of a class, 1 for the second, ...
    second = (rank == 1).nonzero()[:, 0]                                 # (P,)
    first = (same[second] & (rank == 0)).nonzero()[:, 1]                 # (P,) columns, one in each row
    s = z[first] @ z[second].T                                           # (P, P)
    return -s.log_softmax(dim=1).diagonal().sum() / max(len(s), 1)


LOSSES = dict(ms=multi_similarity_loss, contrastive=contrastive_loss, proxy_anchor=proxy_anchor_loss, epshn=epshn_loss,
              npair=npair_loss)


class SuperclassSampler:
    """Batches with equally many classes of every superclass: on SOP 12 x 2 classes x 5 images = 120."""

    def __init__(self, labels, superclasses, batch_size, per_class):
        self.members = [(superclasses == superclass).nonzero()[:, 0] for superclass in superclasses.unique()]
        if per_class < 1 or batch_size % (len(self.members) * per_class):
            raise common.UsageError(f'--batch-size must be a multiple of {len(self.members)} x --per-class, and '
                                    '--per-class at least 1')
        self.batches = max(1, len(labels) // batch_size)
        share = batch_size // len(self.members)                          # images of each superclass in a batch
        self.samplers = [common.BalancedSampler(labels[m], share, per_class) for m in self.members]

    def __len__(self):
        return self.batches

    def __iter__(self):
        # The sampler of a small superclass ends before the epoch does, so it is started again and again.
        streams = [chain.from_iterable(repeat(sampler)) for sampler in self.samplers]
        for _ in range(self.batches):
            parts = [members[next(stream)] for members, stream in zip(self.members, streams)]
            # In random order: --hybrids replace drops the last images, which should not always be of one superclass.
            yield torch.cat([parts[number] for number in torch.randperm(len(parts))]).tolist()


# Training recipes, see common.BASE: HSE's released commands, for all base losses, and the batches of Tables 2 and 3
CUB = dict(dim=512, pool='avg+max', freeze_bn=True, min_crop=0.08, epochs=60, batch_size=128, per_class=8,
           optimizer='adamw', lr=1e-4, weight_decay=1e-4, schedule='step', decay_epochs=10, decay_rate=0.5, warmup=5,
           clip=10.0, proxy_lr_mult=100, mask_size=50)
SOP = CUB | dict(freeze_bn=False, batch_size=120, per_class=5, lr=3e-4, decay_rate=0.25, warmup=1, hybrids='append',
                 combinations=12)
DEFAULTS = {
    'cub': CUB,
    'cars': CUB,
    'sop': SOP,
    'inshop': SOP,                                  # the paper has no In-Shop
    'shapes': dict(temperature=1.0),                # Eq. (9) as printed, see tests/results/README.md
    'reality-check': dict(proxy_lr_mult=6000, mask_size=50),        # 4 images per class, for hybrids
}
# What depends on the base loss: (dataset, loss) overrides dataset, see common.parse.
#     alpha; images in a batch / per class   paper (Tables 2, 3)     released command   default here
#     ms             CUB, Cars               0.05; 80 / 5            not stated         0.05; 80 / 5
#                    SOP                     not stated; 120 / 5     0.3; 120 / 5       0.3; 120 / 5
#     proxy_anchor   CUB                     2; 128                  2; 128 / 8         2; 128 / 8
#                    Cars                    2; 128                  0.5; 120 / 4       2; 128 / 8
#                    SOP                     not stated; 120 / 5     2; 120             2; 120 / 5
#     epshn          CUB, Cars               not stated; 128 / 8, 16 not stated         0.1; 128 / 8 on CUB, 16 on Cars
#                    SOP                     not stated; 120 / 5     1; 120 / 5         1; 120 / 5
#     npair          CUB, Cars               not stated; 128 / 8     not stated         0.1; 128 / 8 (dim 64, Table 2)
# 0.1 is the released flag's default. In-Shop is like SOP; alpha of other datasets is like CUB. Functions have alpha=1.
for dataset in (*common.BASE, 'reality-check'):
    large = dataset in ('sop', 'inshop')
    DEFAULTS[dataset, 'ms'] = dict(alpha=0.3 if large else 0.05)
    DEFAULTS[dataset, 'proxy_anchor'] = dict(alpha=2.0)
    DEFAULTS[dataset, 'epshn'] = dict(alpha=1.0 if large else 0.1)
for dataset in ('cub', 'cars', 'sop', 'inshop'):
    DEFAULTS[dataset, 'npair'] = dict(dim=64)
for dataset in ('cub', 'cars'):
    DEFAULTS[dataset, 'ms'] |= dict(batch_size=80, per_class=5)
DEFAULTS['cars', 'epshn'] |= dict(per_class=16)


def get_args(argv=None):
    parser = common.parser(__doc__, NOTES, __file__)
    add = parser.add_argument_group('HSE').add_argument
    add('--loss', choices=list(LOSSES), default='ms', help='L_m')
    add('--alpha', type=common.at_least(0, float), default=0.1, help='weight of L_Hy; 0: no hybrids')
    add('--temperature', type=common.at_least(1e-3, float), default=0.1, help='in L_Hy; 1 is Eq. (9) as printed')
    add('--kind', choices=KINDS, default='cutmix', help='how images are mixed')
    add('--num', type=int, choices=[2, 3, 4], default=2, help='number of classes in a hybrid')
    add('--combinations', type=common.at_least(1), default=1, help='Cnum, number of sets of classes per batch')
    add('--axis', choices=['top-bottom', 'left-right'], default='top-bottom', help='cutmix: stacked, or side by side')
    add('--mask-size', type=common.at_least(1), default=16, help='gridmask: side of the blocks, pixels')
    add('--hybrids', choices=['replace', 'append'], default='replace', help='instead of the last images, or after them')
    add('--proxy-lr-mult', type=common.at_least(0, float), default=10.0,
        help='learning rate of the proxies, as a multiple of --lr')
    uses = {'loss': dict(proxy_anchor='proxy_lr_mult'), 'kind': dict(cutmix='axis', gridmask='mask_size')}
    args = common.parse(parser, DEFAULTS, argv, uses)
    check(args, parser.typed(argv))
    return args


def check(args, typed):
    """Rejects flags that would have no effect, and hybrids that cannot be made."""
    if args.dataset == 'vectors':
        raise common.UsageError('hybrids are composed of images, and --dataset vectors has none: use another script')
    if args.alpha == 0:
        common.reject(typed, 'temperature kind num combinations axis mask_size hybrids'.split(),
                      '--alpha 0, which makes no hybrids')
    if args.loss != 'proxy_anchor':
        common.require_two_classes(args)
    # A dry run with 0 hybrids: blend raises UsageError if a source would get no pixel.
    blend(torch.empty(0, args.num, 3, args.image_size, args.image_size), args.kind, args.axis, args.mask_size)


def check_batch(args, num_classes, num_superclasses):
    """Rejects a batch with fewer than `num` classes of each superclass, or without a class for a hybrid's negatives."""
    for_sources = args.num * num_superclasses
    # With `replace`, the hybrids of each set replace one class. Of the others, num are sources, one has the negatives.
    for_negatives = args.combinations * (args.hybrids == 'replace') + args.num + 1
    needed = max(for_sources, for_negatives)
    in_batch = min(num_classes, args.batch_size // args.per_class) if args.per_class else 0
    if in_batch < needed:
        of_each = f', {args.num} of each superclass' if num_superclasses > 1 else ''
        raise common.UsageError(f'hybrids need {needed} classes in a batch{of_each}, and there are {in_batch}: raise '
                                '--batch-size, or lower --num, --combinations or --per-class (above 0); --hybrids '
                                'append needs fewer, and --alpha 0 makes no hybrids')


def main(argv=None):
    args = get_args(argv)
    common.set_seed(args.seed)
    data = common.dataset_from(args)
    labels, superclasses, num_classes = data.train.labels, data.train.superclasses, data.train.num_classes
    # A fold may lack whole superclasses, or have few classes of one. So with --fold they are not used.
    if superclasses is None or args.fold:
        superclasses = torch.zeros_like(labels)                             # (N,), one superclass
    num_superclasses = len(superclasses.unique())
    if args.alpha > 0:
        check_batch(args, num_classes, num_superclasses)
    superclass_of = labels.new_zeros(num_classes)                           # (C,)
    superclass_of[labels] = superclasses
    sampler = SuperclassSampler(labels, superclasses, args.batch_size, args.per_class) if num_superclasses > 1 else None
    model = common.build(args, data=data)
    groups = [dict(params=model.parameters())]
    loss_params = {}
    if args.loss == 'proxy_anchor':                 # proxies as in train_proxy_anchor.py
        proxies = torch.randn(num_classes, model.dim) * (2 / num_classes) ** 0.5            # (C, D)
        proxies = loss_params['proxies'] = torch.nn.Parameter(proxies.to(args.device))
        groups.append(dict(params=[proxies], lr=args.lr * args.proxy_lr_mult))
    optimizer = common.make_optimizer(args, groups)
    base_loss = partial(LOSSES[args.loss], **loss_params)

    def step(images, labels):
        if args.alpha == 0:
            return base_loss(model(images), labels)
        if args.hybrids == 'replace':               # the last classes leave the batch, before sources are chosen
            stay = len(images) - args.per_class * args.combinations
            images, labels = images[:stay], labels[:stay]
        hybrids, sources = make_hybrids(images, labels, args.kind, args.num, args.per_class, args.combinations,
                                        args.axis, args.mask_size, superclass_of[labels.cpu()])
        z, h = model(torch.cat([images, hybrids])).tensor_split([len(images)])              # (B, D), (H, D)
        return hse_loss(base_loss, z, labels, h, sources, args.alpha, args.temperature)

    return common.train(args, model, data, step, optimizer, loss_params, sampler)


NOTES = """
Why a hybrid has no label (Section 3.2). Mixup gives it a mixed label, Eq. (4). But a pair-based loss, as in Eq. (5),
has to know whether a pair is positive or negative. Eq. (6) weights both terms by the mixed label, as Metrix does, but
that fits Mixup only: the part that CutMix takes from an image may show only its background.
Why the hybrid is the anchor (Table 1, Fig. 4). It pulls a weak positive and pushes a negative, so it uses the variation
within and between classes. With weak positives as anchors, each source class would pull the hybrid, and these pulls may
conflict. With negatives as anchors, the hybrid would only be pushed away.
R@1 of epshn without and with hybrids in Table 2: CUB 64.9, 67.4; Cars 83.1, 85.4. The 64.9 has 16 images per class, and
the 67.4 has 8 (with 16 it is 66.9). So repeat the 64.9 with --alpha 0 --per-class 16.
What differs from the paper, or is not stated in it
    1. Eq. (9) has no temperature. The released code divides the inner products by 0.1, and its values of alpha belong
       to that. --temperature 1 is Eq. (9) as printed, and the default on shapes: with 0.1, hybrids cost about 27
       points of R@1 there (tests/results/README.md).
    2. Sources: Algorithm 1, and the code on CUB and Cars, mix the first classes of the batch; here they are random, as
       in Section 1. Which of their images is not stated; here, as in the code, hybrid r mixes image r of each class.
    3. Replaced images: Algorithm 1, and the code on CUB and Cars, replace the last Nsize images, all of one class.
       Section 4 says random ones. Here they are the last ones, or none (--hybrids append, as in Table 3).
    4. For ms on CUB and Cars the paper uses BN-Inception; here it is a ResNet-50. The paper takes the learning rates of
       the base losses (Section 4); here they come from the released code.
    5. GridMask: where the blocks are is not stated. Here the sources take turns along rows and columns. Blocks of
       250 px (Table 4) need --image-size 256, and then 95% of the pixels come from one source.
    6. --alpha 0 replaces no image, so L_m sees all images of the batch. What the paper's baseline did is not stated.
    7. Section 4.2.1 has 16 images per class on CUB, 8 on Cars. In Table 2, 8 and 16 are better: the defaults of epshn.
What differs from the released code (github.com/SHQberserker/HSE, 6eb52ba)
    8. Its CutMix mixes two images only, on CUB and Cars a left and a right half (--axis left-right). Here strips are
       stacked vertically by default, as in Section 2.3.
    9. On SOP the code may mix two images of one class; here the classes of a hybrid always differ. With Proxy-Anchor it
       takes ten random images of each superclass, and the negatives of a hybrid are among these ten. Here a batch has
       two classes of each superclass. A hybrid mixes both, so all its negatives are of other superclasses.
   10. Its EPSHN drops an anchor whose positive or negative has a similarity of 0 or less. It leaves out positives above
       0.9999. It keeps a negative that is exactly as similar as the positive. Without an anchor it returns NaN.
Tables and figures of the paper
    Tables 2 and 3: --loss, --per-class and --alpha 0. Table 4: --loss epshn with --kind, --num and --mask-size. Fig. 2:
    tests/results/draw.py. Fig. 5: --arch resnet18 --batch-size 128 --per-class N, with losses that the text omits.
    Fig. 6: --loss ms --combinations N. Not reproduced: Fig. 1, 3 and 4 (diagrams), Fig. 7 (which part of a hybrid its
    easy weak positive comes from) and Fig. 8 (t-SNE).
"""


if __name__ == '__main__':
    common.cli(main)
