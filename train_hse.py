"""train_hse.py -- Hybrid Species Embedding: images joined from several classes serve as anchors without a label.

Yang, Sun, Li, Chen, Cai, Song. HSE: Hybrid Species Embedding for Deep Metric Learning. ICCV 2023.

Idea
    Join two to four images of different classes, the sources, into one image, the hybrid. It is hard to place: it
    looks like each source and is of none of their classes. A fraction of each source's label would mean little,
    because the part cut from an image may show only its background. So a hybrid has no label, and HSE asks for less:
    it should be nearer to some image of its sources' classes than to any image of another class in the batch. The
    hybrid and only one image of the sources' classes are pulled together, the one that is nearest anyway.

Equations
    HSE Eq. (7)     x_hn, hard negative: of the images that are of no source's class, the nearest to x_H
    HSE Eq. (8)     x_ewp, easy weak positive: of the images that are of a source's class, the nearest to x_H
    HSE Eq. (9)     L_Hy = -alpha log( 1 / (1 + exp(s_hn) / exp(s_ewp)) )
                    with the inner products s_hn = f(x_H) . f(x_hn) and s_ewp = f(x_H) . f(x_ewp)
    HSE Eq. (10)    L = L_m + L_Hy, with L_m any loss on the labelled images

Symbols
    paper       here          flag            meaning
    x_H         hybrids, h    --kind          (H, 3, S, S) images of H hybrids, (H, D) their embeddings
    x_A, x_B    sources       --num           (H, num) positions in the batch of the `num` sources
    f(x)        z             -               (B, D) L2-normalized embeddings of the labelled images
    C(x)        y             -               (B,) labels
    Nsize       per_class     --per-class     images per class in a batch
    Cnum        combinations  --combinations  sets of `num` classes that are joined. Each gives Nsize hybrids:
                                              hybrid r joins the r-th images of its classes. H = Nsize Cnum
    alpha       alpha         --alpha         weight of L_Hy; 0: no hybrids, the baseline L = L_m
    -           temperature   --temperature   divides the similarities in Eq. (9)

Run
    python train_hse.py                                          # offline, a few minutes on two CPU cores
    python train_hse.py --alpha 0                                # the baseline
    python train_hse.py --dataset cub --data data --loss epshn   # the benchmark, on a GPU

Expect, R@1          birds ms      CUB epshn             Cars epshn
    without hybrids  55.9 ± 2.5    64.9 (16 per class)   83.1 (16 per class)
    with hybrids     56.7 ± 1.6    67.4 (8 per class)    85.4 (16 per class)
    25 species of birds are measured, see tests/results (ResNet-18, three seeds, 95 % intervals), and so are shapes, see
    tests/results/demo.md. The others are the paper's Table 2 (ResNet-50, 512 dimensions); on CUB with hybrids and 16
    per class, it has 66.9.
"""
from functools import partial
from itertools import chain, repeat

import torch
import torch.nn.functional as F

import common


def hybrid_loss(h, z, weak_positive, negative, alpha=1.0, temperature=0.1):
    """L_Hy, HSE Eq. (9), averaged over the hybrids.

    h              (H, D) embeddings of the hybrids, L2-normalized like z
    z              (B, D) those of the labelled images; both are upcast to at least float32
    weak_positive  (H, B) bool, the images among which Eq. (8) chooses
    negative       (H, B) bool, the images among which Eq. (7) chooses
    alpha          >= 0, weight
    temperature    > 0; 1 is Eq. (9) as printed, 0.1 the released code
    returns        scalar >= 0. A hybrid without weak positives, or without negatives, counts as 0;
                   without any hybrids the loss is 0, and so is its gradient
    """
    h, z = common.promote_dtypes(h, z)
    s = h @ z.T / temperature                                            # (H, B)
    s_ewp, has_ewp = most_similar(s, weak_positive)                      # Eq. (8)
    s_hn, has_hn = most_similar(s, negative)                             # Eq. (7)
    # Eq. (9) is -alpha log(1 / (1 + exp(s_hn) / exp(s_ewp))). With t = s_ewp - s_hn, the argument of the logarithm is
    # 1 / (1 + exp(-t)), the sigmoid of t. (The mean in the last line of Algorithm 1 includes the log-probability of
    # s_hn, and would be least where s_ewp = s_hn, which cannot be meant.)
    loss = -alpha * F.logsigmoid(s_ewp - s_hn)                           # (H,)
    return (loss * (has_hn & has_ewp)).sum() / max(len(h), 1)


def most_similar(s, allowed):
    """For each row of s, its largest allowed similarity, and whether any is allowed: (n, B), (n, B) -> (n,), (n,)
    A row without an allowed entry returns one that is not allowed: a finite number, which can be multiplied by 0."""
    index = s.masked_fill(~allowed, float('-inf')).argmax(dim=1, keepdim=True)              # (n, 1)
    return s.gather(1, index).squeeze(1), allowed.any(dim=1)


def candidates(y, sources):
    """For each hybrid, the labelled images among which Eq. (8) and Eq. (7) choose: its weak positives, which include
    its sources, and its negatives.  y (B,), sources (H, num) -> (H, B), (H, B) bool"""
    weak_positive = (y[sources][:, :, None] == y).any(dim=1)             # HSE Eq. (8): C(x) = C(x_A) or C(x) = C(x_B)
    return weak_positive, ~weak_positive                                 # HSE Eq. (7): neither


def hse_loss(base_loss, z, y, h, sources, alpha=1.0, temperature=0.1):
    """L = L_m + L_Hy, HSE Eq. (10). L_m is base_loss(z, y), on the labelled images only. With contrastive_loss this is
    HSE Eq. (11).  z (B, D), y (B,), h (H, D), sources (H, num) -> scalar"""
    return base_loss(z, y) + hybrid_loss(h, z, *candidates(y, sources), alpha, temperature)


# ---- hybrids

KINDS = ['cutmix', 'mixup', 'gridmask']


def make_hybrids(images, labels, kind='cutmix', num=2, per_class=5, combinations=1, axis='top-bottom',
                 mask_size=50, superclasses=None, generator=None):
    """Hybrids of a batch: `per_class` of them for each of `combinations` sets of `num` classes.

    Hybrid r of a combination joins image r of each of its classes; a class with fewer images uses its first
    ones again. If there are fewer than `num` classes (of each superclass), no hybrid is made: H = 0.

    images, labels  (B, 3, S, S), (B,); in any order
    kind            cutmix: `num` strips of about equal size, above each other or side by side (axis);
                    mixup: the mean; gridmask: square blocks of mask_size pixels, from the images in turn
    superclasses    (B,): all classes of a hybrid are of the same one; None: of any
    generator       draws the classes; None is torch's global one
    returns         hybrids (H, 3, S, S); sources (H, num), positions in the batch, of different classes
    """
    y = labels.cpu()                                # choosing takes many small steps, which a CPU does faster
    sources = [y.new_empty(0, num)]
    for classes in choose_classes(y, num, combinations, superclasses, generator):
        members = [(y == c).nonzero()[:, 0] for c in classes]
        sources.append(torch.stack([m[torch.arange(per_class) % len(m)] for m in members], dim=1))  # (per_class, num)
    sources = torch.cat(sources).to(images.device)             # (H, num)
    return blend(images[sources], kind, axis, mask_size), sources


def choose_classes(y, num, combinations, superclasses=None, generator=None):
    """Draws `combinations` sets of `num` different classes; with superclasses, each set is from one of them.

    The classes of each superclass are shuffled and cut into sets of `num`, and all sets are drawn in random order;
    then again. So on SOP, where a batch has two classes of each of the 12 superclasses, each gives one combination.
    y (B,), superclasses (B,) or None -> list of (num,)
    """
    superclasses = torch.zeros_like(y) if superclasses is None else superclasses.cpu()
    pools = [y[superclasses == superclass].unique() for superclass in superclasses.unique()]
    pools = [pool for pool in pools if len(pool) >= num]
    chosen = []
    while pools and len(chosen) < combinations:
        dealt = []
        for pool in pools:
            deck = pool[torch.randperm(len(pool), generator=generator)]
            dealt += deck[:len(pool) // num * num].split(num)
        chosen += [dealt[i] for i in torch.randperm(len(dealt), generator=generator)]
    return chosen[:combinations]


def blend(parts, kind, axis, mask_size):
    """Joins num images into one.  parts (H, num, 3, S, S) -> (H, 3, S, S)"""
    H, num, channels, height, width = parts.shape
    if kind == 'mixup':
        return parts.mean(dim=1)                    # with two images HSE Eq. (3) for lambda = 1/2
    row = torch.arange(height)[:, None]
    column = torch.arange(width)
    owners = {'top-bottom': row * num // height,            # strips whose sizes differ by a pixel at most
              'left-right': column * num // width,
              'gridmask': (row // mask_size + column // mask_size) % num}   # the images in turn; with two a chessboard
    owner = owners[axis if kind == 'cutmix' else kind]      # which of the num images gives each pixel
    if owner.max() < num - 1:
        raise common.UsageError(f'{kind} has no room for {num} images in {height} x {width} px: lower --mask-size')
    owner = owner.to(parts.device).expand(H, 1, channels, height, width)
    return parts.gather(1, owner).squeeze(1)                # (H, 3, S, S), each pixel from the image that owns it


# ---- base losses L_m: z (B, D) L2-normalized, y (B,) -> scalar. Their parameters have the names and the defaults of
# their own scripts: alpha of multi_similarity_loss and of proxy_anchor_loss is not the weight of L_Hy.


def pairs(y):
    """(B, B) bool masks of the positive and of the negative pairs. No image is paired with itself."""
    same = y[:, None] == y                                               # (B, B)
    return same & ~torch.eye(len(y), dtype=torch.bool, device=y.device), ~same


def log1p_sum_exp(t, keep):
    """For each row: log(1 + sum of exp(t) over the columns where keep is true).  (rows, columns) -> (rows,)"""
    # exp(-inf) = 0 is added where keep is false. The 0 that pads a row is the exponent of the "1 +".
    return F.pad(t.masked_fill(~keep, float('-inf')), (1, 0)).logsumexp(dim=1)


def multi_similarity_loss(z, y, alpha=2.0, beta=50.0, lam=0.5, epsilon=0.1):
    """Multi-Similarity with its miner; train_ms.py explains it."""
    z = common.at_least_float32(z)
    s = z @ z.T                                                          # (B, B)
    positive, negative = pairs(y)
    hardest_positive = s.masked_fill(~positive, float('inf')).amin(dim=1, keepdim=True)         # (B, 1)
    hardest_negative = s.masked_fill(~negative, float('-inf')).amax(dim=1, keepdim=True)        # (B, 1)
    # "not >=" stands for "<", and "not <=" for ">": so a pair whose similarity is NaN stays, and shows in the loss.
    positive = positive & ~(s - epsilon >= hardest_negative)
    negative = negative & ~(s + epsilon <= hardest_positive)
    pull = log1p_sum_exp(-alpha * (s - lam), positive) / alpha          # (B,)
    push = log1p_sum_exp(beta * (s - lam), negative) / beta             # (B,)
    return (pull + push).mean()


def contrastive_loss(z, y, neg_margin=0.5):
    """HSE Eq. (2), of one pair: y d^2 + (1 - y) [m - d]_+^2, with y = 1 for a positive pair and 0 for a negative one.
    The released code does not square. Positive and negative pairs are averaged separately, each over those with a
    non-zero loss; train_contrastive.py explains it."""
    z = common.at_least_float32(z)
    s = z @ z.T                                                          # (B, B)
    d2 = s.diagonal()[:, None] + s.diagonal() - 2 * s           # |z_i|^2 + |z_j|^2 - 2 z_i.z_j
    floor = 16 * torch.finfo(d2.dtype).eps          # d2 up to this is rounding: distance and gradient are 0
    d = torch.where(d2 <= floor, 0, d2.clamp_min(floor).sqrt())          # HSE Eq. (1): the Euclidean distance
    positive, negative = pairs(y)
    pull = d.square() * positive                                         # HSE Eq. (2) for y = 1: d^2
    push = (neg_margin - d).clamp_min(0).square() * negative             # HSE Eq. (2) for y = 0: [m - d]_+^2
    return sum(term.sum() / (term > 0).sum().clamp_min(1) for term in (pull, push))


def proxy_anchor_loss(z, y, proxies, alpha=32.0, delta=0.1):
    """Proxy-Anchor with proxies (C, D); train_proxy_anchor.py explains it."""
    z, proxies = common.promote_dtypes(z, proxies)
    s = F.normalize(proxies, dim=1) @ z.T                                # (C, B)
    positive = torch.arange(len(proxies), device=y.device)[:, None] == y         # (C, B)
    pull = log1p_sum_exp(-alpha * (s - delta), positive)                # (C,), 0 for a class not in the batch
    push = log1p_sum_exp(alpha * (s + delta), ~positive)                # (C,)
    return pull.sum() / positive.any(dim=1).sum() + push.mean()


def epshn_loss(z, y, temperature=0.1):
    """Easy positive, semi-hard negative (Xuan et al., WACV 2020), averaged over the anchors that have both; else 0

    The positive of an anchor is the most similar image of its class. Its negative is the most similar one of those
    images of other classes that are less similar than this positive. With the similarities s_p and s_n to them, the
    anchor adds -log sigmoid((s_p - s_n) / temperature), which has the form of HSE Eq. (9).
    """
    z = common.at_least_float32(z)
    s = z @ z.T                                                          # (B, B)
    positive, negative = pairs(y)
    s_p, has_p = most_similar(s, positive)
    s_n, has_n = most_similar(s, negative & (s < s_p[:, None]))
    keep = has_p & has_n
    return -(F.logsigmoid((s_p - s_n) / temperature) * keep).sum() / keep.sum().clamp_min(1)


def npair_loss(z, y):
    """N-pair (Sohn, NIPS 2016): the first image of a class must find the second one among all second images.
    Cross-entropy over cosines, averaged over the P classes that have two images or more in the batch."""
    z = common.at_least_float32(z)
    same = y[:, None] == y                                               # (B, B)
    earlier = same.tril(-1).sum(dim=1)                                   # (B,) images of its class that come before
    positive = (earlier == 1).nonzero()[:, 0]                            # (P,) the second image of each class
    # (P,) the first image of that class: the only True in its row
    anchor = (same[positive] & (earlier == 0)).int().argmax(dim=1)
    s = z[anchor] @ z[positive].T                                        # (P, P)
    return -s.log_softmax(dim=1).diagonal().sum() / max(len(s), 1)


LOSSES = dict(ms=multi_similarity_loss, contrastive=contrastive_loss, proxy_anchor=proxy_anchor_loss, epshn=epshn_loss,
              npair=npair_loss)


class SuperclassSampler:
    """Batches with equally many classes of every superclass: on SOP 12 x 2 classes x 5 images = 120."""

    def __init__(self, labels, superclasses, batch_size, per_class):
        self.members = [(superclasses == superclass).nonzero()[:, 0].tolist() for superclass in superclasses.unique()]
        if per_class < 1 or batch_size % (len(self.members) * per_class):
            raise common.UsageError(f'--batch-size must be a multiple of {len(self.members)} x --per-class, and '
                                    '--per-class at least 1')
        self.batches = max(1, len(labels) // batch_size)
        share = batch_size // len(self.members)                          # images of each superclass in a batch
        self.samplers = [common.BalancedSampler(labels[m], share, per_class) for m in self.members]

    def __len__(self):
        return self.batches

    def __iter__(self):
        # A sampler of one superclass may end before the epoch does. So it is started again and again.
        streams = [chain.from_iterable(repeat(sampler)) for sampler in self.samplers]
        for _ in range(self.batches):
            parts = [[members[i] for i in next(stream)] for members, stream in zip(self.members, streams)]
            # Superclasses come in random order. Otherwise --hybrids replace, which drops the last images of a batch,
            # would always drop those of the same superclasses.
            yield [image for number in torch.randperm(len(parts)) for image in parts[number]]


# The recipe of each dataset: defaults of the flags, explained at common.BASE. The settings are those of HSE's released
# commands, for all base losses; the batch sizes are those of Tables 2 and 3.
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
    'reality-check': dict(proxy_lr_mult=6000, mask_size=50),        # per_class stays 4: 1 gives one hybrid
}
# What depends on the base loss. On CUB and Cars the paper states alpha for ms (0.05) and for Proxy-Anchor (2; the
# released command for Cars has 0.5, and batches of 30 classes x 4). On SOP alpha is that of the released commands.
# In-Shop is like SOP, and what is not a benchmark like CUB. Where neither paper nor commands say anything, alpha is
# 0.1, the default of the released flag. Batches and dimensions are the better ones of Table 2.
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
    add('--kind', choices=KINDS, default='cutmix', help='how images are joined')
    add('--num', type=int, choices=[2, 3, 4], default=2, help='number of classes in a hybrid')
    add('--combinations', type=common.at_least(1), default=1, help='Cnum, number of sets of classes per batch')
    add('--axis', choices=['top-bottom', 'left-right'], default='top-bottom',
        help='cutmix: strips above each other, or side by side')
    add('--mask-size', type=common.at_least(1), default=16, help='gridmask: side of the blocks, pixels')
    add('--hybrids', choices=['replace', 'append'], default='replace', help='instead of the last images, or after them')
    add('--proxy-lr-mult', type=common.at_least(0, float), default=10.0, help='rate of the proxies, times --lr')
    uses = {'loss': dict(proxy_anchor='proxy_lr_mult'), 'kind': dict(cutmix='axis', gridmask='mask_size')}
    args = common.parse(parser, DEFAULTS, argv, uses)
    check(args, parser.typed(argv))
    return args


def check(args, typed):
    """Refuses flags that would have no effect, and hybrids that cannot be made."""
    if args.dataset == 'vectors':
        raise common.UsageError('hybrids are composed of images, and --dataset vectors has none: take another script')
    if args.alpha == 0:
        flags = ['temperature', 'kind', 'num', 'combinations', 'axis', 'mask_size', 'hybrids']
        common.reject(typed, flags, '--alpha 0, which makes no hybrids')
    if args.loss != 'proxy_anchor':
        common.require_two_classes(args)
    # Blocks may be so large that one of the images would not show. blend refuses that here, before anything is read.
    blend(torch.empty(0, args.num, 3, args.image_size, args.image_size), args.kind, args.axis, args.mask_size)


def check_batch(args, num_classes, num_superclasses):
    """Refuses a batch with less than `num` classes of each superclass, or without a class for a hybrid's negative."""
    # The hybrids of one combination are as many as the images of one class, and so they replace one class.
    replaced = args.combinations * (args.hybrids == 'replace')
    needed = max(args.num + 1 + replaced, args.num * num_superclasses)
    in_batch = min(num_classes, args.batch_size // args.per_class) if args.per_class else 0
    if in_batch < needed:
        raise common.UsageError(f'hybrids need {needed} classes in a batch, {args.num} of each superclass, and there '
                                f'are {in_batch}: raise --batch-size, or lower --num, --combinations or --per-class '
                                '(above 0); --alpha 0 makes no hybrids')


def main(argv=None):
    args = get_args(argv)
    common.set_seed(args.seed)
    data = common.dataset_from(args)
    labels, superclasses, num_classes = data.train.labels, data.train.superclasses, data.train.num_classes
    # A fold may lack whole superclasses, or have few classes of one. So with --fold they are not used.
    if superclasses is None or args.fold:
        superclasses = torch.zeros_like(labels)                             # (N,), one superclass
    if args.alpha > 0:
        check_batch(args, num_classes, len(superclasses.unique()))
    superclass_of = labels.new_zeros(num_classes)                           # (C,)
    superclass_of[labels] = superclasses
    sampler = None                                                          # the usual one
    if superclasses.any():
        sampler = SuperclassSampler(labels, superclasses, args.batch_size, args.per_class)
    model = common.build(args, data=data)
    groups = [dict(params=model.parameters())]
    loss_params = {}
    if args.loss == 'proxy_anchor':                 # proxies as in train_proxy_anchor.py
        proxies = torch.randn(num_classes, model.dim) * (2 / num_classes) ** 0.5
        loss_params['proxies'] = torch.nn.Parameter(proxies.to(args.device))                # (C, D)
        groups.append(dict(params=[loss_params['proxies']], lr=args.lr * args.proxy_lr_mult))
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
Why the hybrid is the anchor (Table 1). A hybrid as the anchor pulls a weak positive and pushes a negative, so it acts
within and between classes. With weak positives as anchors, each source would pull the hybrid to its own class, and
these pulls may conflict. With negatives as anchors, the hybrid would only be pushed away.
What differs from the paper
    1. Eq. (9) has no temperature. The released code divides the similarities by 0.1, and the values of alpha in its
       commands belong to that. --temperature 1 is Eq. (9) as printed.
    2. Algorithm 1, and the code on CUB and Cars, join the first classes of the batch and replace its last Nsize images,
       which are of one class; by the text of Section 4, random images are replaced. Here, too, the last ones are
       replaced, or none (--hybrids append), as in Table 3. But the joined classes are random, as Section 1 says.
    3. The paper has BN-Inception for ms on CUB and Cars, and the learning rates of the base losses (Section 4); here
       the network is a ResNet-50, and the rates are those of the released code.
    4. GridMask: the paper does not say where the blocks are. With two images they form a chessboard here; with more,
       each diagonal of blocks is from one image. Blocks of 250 px (Table 4) need --image-size 256.
    5. --alpha 0 replaces no image, so the baseline's L_m sees the whole batch. The paper does not say what it did.
    6. The text of Section 4.2.1 has 16 images per class for CUB and 8 for Cars; Table 2 has its best results with 8
       and 16, which are the defaults.
What differs from the released code (github.com/SHQberserker/HSE, 6eb52ba)
    7. It has CutMix of two images only, and on CUB and Cars it joins a left and a right half (--axis left-right). Here
       CutMix joins a top and a bottom half by default, as the text says.
    8. On SOP it may join two images of one class. Here the classes of a hybrid always differ. With Proxy-Anchor it
       takes ten random images of each superclass, and negatives from the same ten. Here a batch has two classes of
       each superclass, which a hybrid joins, so all its negatives come from other superclasses.
    9. Its EPSHN drops an anchor whose positive or negative has a similarity of 0 or less, and positives above 0.9999,
       keeps negatives that are just as similar as the positive, and returns NaN if no anchor is left.
Tables and figures of the paper
    Tables 2 and 3: --loss, --per-class and --alpha 0. Table 4: --loss epshn with --kind, --num and --mask-size. Fig. 2:
    tests/results/draw.py. Fig. 5: --arch resnet18 --batch-size 128 --per-class N, with losses that the text omits.
    Fig. 6: --loss ms --combinations N.
"""


if __name__ == '__main__':
    common.cli(main)
