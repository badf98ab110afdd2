"""train_hse.py -- Hybrid Species Embedding: an image mixed from several classes is an anchor without a label.

Yang, Sun, Li, Chen, Cai, Song. HSE: Hybrid Species Embedding for Deep Metric Learning. ICCV 2023.
Images of two to four classes, the source classes, are mixed into a hybrid, which gets no label. Each image of a source
class is a weak positive of the hybrid. The hybrid loss L_Hy, HSE Eq. (9), pulls the hybrid to its nearest weak positive
and pushes it away from the nearest image of other classes in the batch. It is pulled only to the nearest: pulling it to
all its weak positives could merge unrelated classes (Section 3.3.2). The loss is L_m + L_Hy, HSE Eq. (10),
where L_m is any loss of the labelled images (--loss).
tests/papers/README.md lists the letters that other papers use for other things.

    paper      code          flag            meaning
    x_H        hybrids       --kind          (H, 3, S, S) H mixed images of S x S px; h (H, D): their embeddings f(x_H)
    x_A, x_B   sources       --num           (H, num) indices, in the batch, of the images mixed into each hybrid
    Cnum       combinations  --combinations  number of sets of `num` classes in a batch
    Nsize      per_class     --per-class     images of a class in a batch; a set gives Nsize hybrids: H = Nsize Cnum
    -          -             --hybrids       replace: they take the place of the last H images; append: all images stay
    alpha      alpha         --alpha         factor in L_Hy, Eq. (9); 0: no hybrids
    -          temperature   --temperature   T, by which the inner products in L_Hy are divided

    python train_hse.py [--dataset cub --data data --loss contrastive]
"""
from functools import partial
from itertools import chain, repeat

import torch
import torch.nn.functional as F

import common


@common.loss            # inside, half precision becomes float32
def hybrid_loss(h, z, weak_positive, negative, alpha=1.0, temperature=0.1):
    """The mean over the hybrids of L_Hy, HSE Eq. (9), here with a temperature T:

    L_Hy = -alpha log( 1 / (1 + exp(s_hn) / exp(s_ewp)) )

    s_hn   f(x_H) . f(x_H_hn) / T, the inner product of the hybrid x_H and the hard negative x_H_hn, Eq. (7), which is
           the nearest image of the classes that are not sources
    s_ewp  f(x_H) . f(x_H_ewp) / T, the inner product of the hybrid and the easy weak positive x_H_ewp, Eq. (8), which
           is the nearest image of the source classes
    Nearest means the largest inner product, since ||a - b||^2 = 2 - 2 a . b for L2-normalized vectors.

    h              (H, D) L2-normalized embeddings f(x_H) of the hybrids
    z              (B, D) L2-normalized embeddings of the labelled images
    weak_positive  (H, B) bool, images of source classes: Eq. (8) chooses one
    negative       (H, B) bool, images of other classes: Eq. (7) chooses one
    temperature    T > 0: 1 in the paper, 0.1 in the released code
    returns        scalar >= 0. A hybrid without negatives or without weak positives adds 0, but counts in the mean.
                   Without hybrids the loss is 0.
    """
    s = h @ z.T / temperature                                            # (H, B)
    s_hn, has_hn = most_similar(s, negative)                             # Eq. (7)
    s_ewp, has_ewp = most_similar(s, weak_positive)                      # Eq. (8)
    # 1 / (1 + exp(a) / exp(b)) = sigmoid(b - a)
    loss = -alpha * F.logsigmoid(s_ewp - s_hn)                           # (H,) Eq. (9)
    return (loss * (has_hn & has_ewp)).sum() / max(len(h), 1)


def most_similar(s, allowed):
    """The largest allowed entry of each row (0 if none is allowed), and whether one is.
    s, allowed (n, B) -> (n,), (n,) bool"""
    has = allowed.any(dim=1)
    largest = s.masked_fill(~allowed, float('-inf')).amax(dim=1)
    return largest.masked_fill(~has, 0), has


def hse_loss(base_loss, z, y, h, sources, alpha=1.0, temperature=0.1):
    """L = L_m + L_Hy, HSE Eq. (10). L_m is base_loss(z, y), on the labelled images only. With contrastive_loss as L_m
    this is HSE Eq. (11).  z (B, D), y (B,), h (H, D), sources (H, num) -> scalar"""
    l_m = base_loss(z, y)                                   # first: it checks y, with which the next line works
    same = y[sources][:, :, None] == y                                   # (H, num, B)
    weak_positive = same.any(dim=1)     # (H, B) Eq. (8): the class of one of the sources, and the sources themselves
    negative = ~weak_positive           # (H, B) Eq. (7): all others
    return l_m + hybrid_loss(h, z, weak_positive, negative, alpha, temperature)                 # Eq. (10), (11)


# ---- hybrids
KINDS = ['cutmix', 'mixup', 'gridmask']


def make_hybrids(images, labels, kind='cutmix', num=2, per_class=5, combinations=1, axis='top-bottom',
                 mask_size=50, superclasses=None, generator=None):
    """Mixed sample data augmentation (MSDA): `per_class` hybrids for each of `combinations` sets of `num` classes.

    Hybrid r of a set mixes the r-th image of each class of the set, in the order of the batch. A class with fewer than
    `per_class` images starts again at its first. If no set of `num` classes can be chosen, H = 0.

    images, labels  (B, 3, S, S), (B,); in any order
    kind            cutmix: `num` strips of about equal size, from top to bottom or left to right (axis), each cut from
                    one source, at the same place; mixup: the mean; gridmask: blocks of mask_size x mask_size pixels,
                    from the sources in turn
    superclasses    (B,) or None. If given, as on SOP (Section 4.2.1), the classes of a set are of one superclass, and
                    a superclass with fewer than `num` classes in the batch is skipped.
    generator       for the choice of classes; None is torch's global one
    returns         hybrids (H, 3, S, S); sources (H, num), positions in the batch, of different classes
    """
    y = labels.cpu().long()             # to choose classes takes many small operations, which are slow on a GPU
    sources = [y.new_empty(0, num)]                 # so that cat works if no set is chosen
    for classes in choose_classes(y, num, combinations, superclasses, generator):
        columns = []
        for c in classes:
            members = (y == c).nonzero()[:, 0]
            columns.append(members[torch.arange(per_class) % len(members)])                 # (per_class,)
        sources.append(torch.stack(columns, dim=1))                                         # (per_class, num)
    sources = common.to_device(torch.cat(sources), images.device)                           # (H, num)
    return blend(images[sources], kind, axis, mask_size), sources


def choose_classes(y, num, combinations, superclasses=None, generator=None):
    """Chooses `combinations` sets of `num` different classes. With superclasses (only SOP has them, its 12 product
    categories), all classes of a set are of one superclass.

    The classes of each superclass are shuffled and cut into sets of `num`, and all sets are shuffled. This is repeated
    until there are enough sets, so a set can occur again. A batch of SOP has 2 classes of each of the 12 superclasses,
    so with num = 2 and 12 combinations there is one set of each superclass.

    y (B,), superclasses (B,) or None -> list of (num,)
    """
    superclasses = torch.zeros_like(y) if superclasses is None else superclasses.cpu()
    groups = [y[superclasses == superclass].unique() for superclass in superclasses.unique()]
    groups = [classes for classes in groups if len(classes) >= num]
    chosen = []
    while groups and len(chosen) < combinations:
        sets = []
        for classes in groups:
            shuffled = classes[torch.randperm(len(classes), generator=generator)]
            sets += shuffled[:len(classes) // num * num].split(num)     # without a last, smaller set
        chosen += [sets[i] for i in torch.randperm(len(sets), generator=generator)]
    return chosen[:combinations]


def blend(parts, kind, axis, mask_size):
    """Mixes num images into one.  parts (H, num, 3, S, S) -> (H, 3, S, S)"""
    _, num, _, height, width = parts.shape
    if kind == 'mixup':
        return parts.mean(dim=1)        # equal shares (Section 2.3): with two images, this is HSE Eq. (3), lambda = 1/2
    row, column = torch.meshgrid(torch.arange(height), torch.arange(width), indexing='ij')      # (height, width) each
    # source_index (height, width): from which of the num sources each pixel is taken
    if kind == 'gridmask':
        source_index = (row // mask_size + column // mask_size) % num       # with two sources, a checkerboard
    elif (kind, axis) == ('cutmix', 'top-bottom'):
        source_index = row * num // height
    elif (kind, axis) == ('cutmix', 'left-right'):
        source_index = column * num // width
    else:
        raise common.UsageError(f'{kind} {axis} is not a way to mix images')
    if source_index.max() < num - 1:                # the last source has no pixel
        raise common.UsageError(f'{kind} cannot combine {num} images in {height} x {width} px: take '
                                'larger images, a smaller --num or, with gridmask, a smaller --mask-size')
    source_index = common.to_device(source_index, parts.device)[None, None, None]           # (1, 1, 1, height, width)
    # Dimension 1 is indexed, by one map for all hybrids and colours.
    return parts.take_along_dim(source_index, dim=1).squeeze(1)                             # (H, 3, S, S)


# ---- base losses L_m: z (B, D) L2-normalized, y (B,) -> scalar. Their alpha is not the weight of L_Hy.


def pairs(y):
    """Masks of the positive and of the negative pairs, (B,) -> (B, B), (B, B). No image is paired with itself."""
    same = y[:, None] == y                                               # (B, B)
    return same & ~torch.eye(len(y), dtype=torch.bool, device=y.device), ~same


def log1p_sum_exp(t, keep):
    """log(1 + sum of exp(t)) of each row, over the columns where keep is true.  t, keep (n, B) -> (n,)"""
    # Where keep is false, t becomes -inf, and exp(-inf) = 0. Each row is padded with a 0, because exp(0) is the "1 +".
    return F.pad(t.masked_fill(~keep, float('-inf')), (1, 0)).logsumexp(dim=1)


@common.loss
def multi_similarity_loss(z, y, alpha=2.0, beta=50.0, lam=0.5, epsilon=0.1):
    """Multi-Similarity with its miner, as train_ms.py has it on CUB"""
    y = common.check_labels(y, len(z))
    s = z @ z.T                                                          # (B, B)
    positive, negative = pairs(y)
    hardest_positive = s.masked_fill(~positive, float('inf')).amin(dim=1, keepdim=True)         # (B, 1)
    hardest_negative = s.masked_fill(~negative, float('-inf')).amax(dim=1, keepdim=True)        # (B, 1)
    # Easy pairs are dropped, see mine in train_ms.py. As NaN >= x is false, ~ keeps a pair with NaN in the loss.
    positive &= ~(s - epsilon >= hardest_negative)
    negative &= ~(s + epsilon <= hardest_positive)
    pull = log1p_sum_exp(-alpha * (s - lam), positive) / alpha           # (B,)
    push = log1p_sum_exp(beta * (s - lam), negative) / beta              # (B,)
    return (pull + push).mean()


@common.loss
def contrastive_loss(z, y, neg_margin=0.5):
    """HSE Eq. (2): d^2 for a positive pair, max(m - d, 0)^2 for a negative one; m is neg_margin. Positive and negative
    pairs are averaged separately, over the pairs with non-zero loss, as in train_contrastive.py."""
    y = common.check_labels(y, len(z))
    s = z @ z.T                                                          # (B, B)
    # |z_i|^2 + |z_j|^2 - 2 z_i.z_j, where the squared norms are not exactly 1 if z was in half precision
    d2 = s.diagonal()[:, None] + s.diagonal() - 2 * s
    # A d2 below 16 eps can be a rounding error: d is set to 0 there, without gradient. d2 is clamped before sqrt, whose
    # derivative at 0 is infinite.
    floor = 16 * torch.finfo(d2.dtype).eps
    d = d2.clamp_min(floor).sqrt().masked_fill(d2 <= floor, 0)           # HSE Eq. (1): the Euclidean distance
    positive, negative = pairs(y)
    pull = d.square() * positive                                         # HSE Eq. (2), first term
    push = (neg_margin - d).clamp_min(0).square() * negative             # HSE Eq. (2), second term
    return sum(term.sum() / (term > 0).sum().clamp_min(1) for term in (pull, push))


@common.loss
def proxy_anchor_loss(z, y, proxies, alpha=32.0, delta=0.1):
    """Proxy-Anchor with proxies (C, D), as in train_proxy_anchor.py"""
    y = common.check_labels(y, len(z), len(proxies))
    s = F.normalize(proxies, dim=1) @ z.T                                # (C, B)
    positive = torch.arange(len(proxies), device=y.device)[:, None] == y         # (C, B)
    pull = log1p_sum_exp(-alpha * (s - delta), positive)                # (C,)
    push = log1p_sum_exp(alpha * (s + delta), ~positive)                # (C,)
    # The positive term is a mean over the classes in the batch, the negative one over all C.
    return pull.sum() / positive.any(dim=1).sum() + push.mean()


@common.loss
def epshn_loss(z, y, temperature=0.1):
    """Easy positive, semi-hard negative (Xuan et al., 2020): the mean over the anchors that have a positive and a
    semi-hard negative, or 0 if none has.

    The positive of an anchor is the most similar image of its class, with similarity s_p. A negative is semi-hard if
    its similarity is below s_p; of these, the most similar one is taken, with similarity s_n. The loss of an anchor is
    -log sigmoid((s_p - s_n) / temperature), which has the form of HSE Eq. (9).
    """
    y = common.check_labels(y, len(z))
    s = z @ z.T                                                          # (B, B)
    positive, negative = pairs(y)
    s_p, has_p = most_similar(s, positive)
    s_n, has_n = most_similar(s, negative & (s < s_p[:, None]))
    keep = has_p & has_n
    return -(F.logsigmoid((s_p - s_n) / temperature) * keep).sum() / keep.sum().clamp_min(1)


@common.loss
def npair_loss(z, y):
    """N-pair (Sohn, NIPS 2016): the first image of each class is an anchor, the second image of the class is its
    positive, and the second images of the other classes are its negatives. The loss is the cross-entropy over cosine
    similarities, averaged over the P classes that have at least two images in the batch."""
    y = common.check_labels(y, len(z))
    same = y[:, None] == y                                               # (B, B)
    rank = same.tril(-1).sum(dim=1)                 # (B,) number of earlier images of its class
    second = (rank == 1).nonzero()[:, 0]                                 # (P,)
    first = (same[second] & (rank == 0)).nonzero()[:, 1]                 # (P,) each row of the mask has one True
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
        share = batch_size // len(self.members)                          # images of each superclass in a batch
        self.samplers = [common.BalancedSampler(labels[m], share, per_class) for m in self.members]
        # It is less than batch_size if a superclass has too few classes.
        self.batch_size = sum(sampler.batch_size for sampler in self.samplers)
        self.batches = max(1, len(labels) // self.batch_size)

    def __len__(self):
        return self.batches

    def __iter__(self):
        # Endless batches of each superclass: a sampler that ends is started again.
        streams = [chain.from_iterable(repeat(sampler)) for sampler in self.samplers]
        for _ in range(self.batches):
            parts = [members[next(stream)] for members, stream in zip(self.members, streams)]
            # In random order, because --hybrids replace drops the last images, which would always be of the last
            # superclass.
            yield torch.cat([parts[number] for number in torch.randperm(len(parts))]).tolist()


# ---- recipes: the defaults of flags for each dataset; --help explains the flags

# What `python train_hse.py` runs: a small ResNet from scratch on the built-in dataset
SHAPES = dict(
    arch='resnet18', weights='none', pool='avg+max', dim=128, freeze_bn=False,
    image_size=32, resize=32, min_crop=1.0,
    epochs=10, batch_size=128, per_class=4,
    optimizer='adamw', lr=2e-3, weight_decay=1e-4, schedule='cosine', freeze_epochs=0, clip=0.0,
    eval_every=10, precision='fp32', proxy_lr_mult=10, mask_size=16)
# Batches and dim are those of Tables 2 and 3, as far as these state them (note 8); mask_size is from Table 4. The rest
# is from the released code, and is used here for all base losses.
CUB = dict(
    arch='resnet50', weights='imagenet', pool='avg+max', dim=512, freeze_bn=True,
    image_size=224, resize=256, min_crop=0.08,
    epochs=60, batch_size=128, per_class=8,
    optimizer='adamw', lr=1e-4, weight_decay=1e-4, schedule='step', decay_epochs=10, decay_rate=0.5, freeze_epochs=5,
    clip=10.0, proxy_lr_mult=100, mask_size=50)
SOP = CUB | dict(freeze_bn=False, batch_size=120, per_class=5, lr=3e-4, decay_rate=0.25, freeze_epochs=1,
                 eval_every=5, hybrids='append', combinations=12)
# The entry of the --loss overrides that of the dataset (or of --protocol), and the entry of both overrides either.
DEFAULTS = {
    'shapes': SHAPES | dict(temperature=1.0),       # note 1
    # A folder with pretrained weights (--weights imagenet or FILE) has the recipe 'cub' instead, see common.recipe.
    'folder': SHAPES | common.FOLDER,
    'vectors': SHAPES | common.VECTORS,             # get_args refuses it: hybrids need images
    'cub': CUB,
    'cars': CUB,
    'sop': SOP,
    'inshop': SOP,                                  # the paper has no In-Shop
    'reality-check': common.PROTOCOL | dict(proxy_lr_mult=6000, mask_size=50),      # see train_proxy_anchor.py
    'ms': dict(alpha=0.05),                         # alpha is the weight of L_Hy
    'proxy_anchor': dict(alpha=2.0),
    ('cub', 'ms'): dict(batch_size=80, per_class=5),
    ('cars', 'ms'): dict(batch_size=80, per_class=5),
    ('sop', 'ms'): dict(alpha=0.3),
    ('inshop', 'ms'): dict(alpha=0.3),
    ('cars', 'epshn'): dict(per_class=16),
    ('sop', 'epshn'): dict(alpha=1.0),
    ('inshop', 'epshn'): dict(alpha=1.0),
    ('cub', 'npair'): dict(dim=64),
    ('cars', 'npair'): dict(dim=64),
    ('sop', 'npair'): dict(dim=64),
    ('inshop', 'npair'): dict(dim=64),
}


def get_args(argv=None):
    parser = common.parser(__doc__, NOTES, __file__)
    add = parser.add_argument_group('HSE').add_argument
    add('--loss', choices=list(LOSSES), default='ms', help='base loss L_m')
    add('--alpha', type=float, default=0.1, help='weight of L_Hy; 0: no hybrids')
    add('--temperature', type=float, default=0.1, help='T of L_Hy; 1 is Eq. (9) as printed')
    add('--kind', choices=KINDS, default='cutmix', help='how images are mixed')
    add('--num', type=int, choices=[2, 3, 4], default=2, help='number of classes in a hybrid')
    add('--combinations', type=int, default=1, help='Cnum, number of sets of classes per batch')
    add('--axis', choices=['top-bottom', 'left-right'], default='top-bottom',
        help='cutmix: strips are stacked (top-bottom) or side by side (left-right)')
    add('--mask-size', type=int, help='gridmask: side of the blocks, pixels')
    add('--hybrids', choices=['replace', 'append'], default='replace',
        help='replace the last images of the batch by hybrids, or append the hybrids to the batch')
    add('--proxy-lr-mult', type=float, help='learning rate of the proxies, as a multiple of --lr')
    # {flag: {its value: [flags that have an effect with it]}}, where OTHER stands for all other values. To type a flag
    # without effect is an error.
    uses = {'loss': dict(proxy_anchor=['proxy_lr_mult']), 'kind': dict(cutmix=['axis'], gridmask=['mask_size']),
            'alpha': {0: [], common.OTHER: 'temperature kind num combinations axis mask_size hybrids'.split()}}
    args = common.parse(parser, DEFAULTS, argv, uses)
    reject_impossible_hybrids(args)
    return args


def reject_impossible_hybrids(args):
    """Raises UsageError for hybrids that cannot be made, and for batches without pairs, which most losses need."""
    if args.dataset == 'vectors':
        raise common.UsageError('hybrids are composed of images, and --dataset vectors has none: use another script')
    if args.loss != 'proxy_anchor':
        common.require_pairs(args)
    if args.alpha > 0 and args.per_class == 0:
        raise common.UsageError('hybrids are mixed class by class, and --per-class 0 gives random batches: raise it, '
                                'or take --alpha 0')
    # A dry run with 0 hybrids: blend raises UsageError if a source would have no pixel.
    blend(torch.empty(0, args.num, 3, args.image_size, args.image_size), args.kind, args.axis, args.mask_size)


def reject_small_batches(args, superclass_of):
    """Raises UsageError if batches have too few classes for hybrids.  superclass_of (C,), the superclass of each class

    A batch needs `num` classes as sources and one of negatives. With --hybrids replace, the hybrids of each set replace
    one more class. With superclasses, a batch needs `num` classes of each.
    """
    sizes = superclass_of.unique(return_counts=True)[1]                     # the number of classes of each superclass
    in_batch = sizes.clamp_max(args.batch_size // (len(sizes) * args.per_class))        # those of them in a batch
    needed = args.num + 1 + (args.combinations if args.hybrids == 'replace' else 0)
    if in_batch.sum() < needed or in_batch.min() < args.num:
        raise common.UsageError(f'hybrids need {needed} classes in a batch and {args.num} of each superclass, and '
                                f'there are {in_batch.tolist()}: raise --batch-size, lower --per-class, --num or '
                                '--combinations, or take --alpha 0')


def main(argv=None):
    args = get_args(argv)
    common.set_seed(args.seed)
    data = common.dataset_from(args)
    labels, superclasses, num_classes = data.train.labels, data.train.superclasses, data.train.num_classes
    # With --fold, superclasses are ignored, because a fold may have too few classes of some superclass.
    if superclasses is None or args.fold:
        superclasses = torch.zeros_like(labels)                             # (N,)
    superclass_of = labels.new_zeros(num_classes)                           # (C,)
    superclass_of[labels] = superclasses                                    # images of a class write the same value
    if args.alpha > 0:
        reject_small_batches(args, superclass_of)
    has_superclasses = len(superclasses.unique()) > 1
    sampler = SuperclassSampler(labels, superclasses, args.batch_size, args.per_class) if has_superclasses else None
    model = common.build(args, data=data)
    groups = [dict(params=model.parameters())]
    loss_params = {}
    if args.loss == 'proxy_anchor':                 # with proxies as in train_proxy_anchor.py
        proxies = torch.randn(num_classes, model.dim) * (2 / num_classes) ** 0.5            # (C, D)
        loss_params = dict(proxies=torch.nn.Parameter(proxies.to(args.device)))
        groups.append(dict(params=[loss_params['proxies']], lr=args.lr * args.proxy_lr_mult))
    optimizer = common.make_optimizer(args, groups)
    base_loss = partial(LOSSES[args.loss], **loss_params)

    def step(images, labels):
        if args.alpha == 0:
            return base_loss(model(images), labels)
        # Batches are class by class (common.BalancedSampler), so `combinations` whole classes leave the batch.
        if args.hybrids == 'replace':
            stay = len(images) - args.per_class * args.combinations
            images, labels = images[:stay], labels[:stay]
        # The sources are chosen on the CPU. The labels are copied once: a copy waits for the GPU.
        y = labels.cpu()
        hybrids, sources = make_hybrids(images, y, args.kind, args.num, args.per_class, args.combinations, args.axis,
                                        args.mask_size, superclass_of[y])
        z, h = model(torch.cat([images, hybrids])).tensor_split([len(images)])              # (len(images), D), (H, D)
        return hse_loss(base_loss, z, labels, h, sources, args.alpha, args.temperature)

    return common.train(args, model, data, step, optimizer, loss_params, sampler)


NOTES = """
What differs from the paper
    1. Eq. (9) has no temperature. The released code divides by 0.1, with alphas chosen for it. On shapes
       the default is 1, as printed.
    2. The text says that alpha balances pulling and pushing. In Eq. (9), which is computed here, it weights both.
    3. Algorithm 1 averages both columns of log_softmax([s_ewp, s_hn]). That loss is smallest at s_ewp = s_hn. Here only
       the first column is used, which is Eq. (9).
    4. The paper does not say which images of two classes are mixed. Here, as in the released code, hybrid r mixes image
       r of each class. Algorithm 1 takes the first classes of a batch; here, as in Section 1, they are drawn at random.
    5. Algorithm 1, and the released code on CUB and Cars, put hybrids into the last Nsize places of a batch, the places
       of one class. Section 4 also has random places (not here), and appended hybrids (--hybrids append, as in Table
       3).
    6. For ms on CUB and Cars the paper uses BN-Inception, this script a ResNet-50. The paper uses the learning rates of
       the base losses (Section 4). Here they come from the released code.
    7. The paper does not say where the blocks of GridMask are. Here the sources take turns along rows and columns. A
       block of 250 px (Table 4) needs an --image-size above 250; with 256, 95% of the pixels are from one source.
    8. A cell is `alpha; batch size / images per class`. A dash means not stated, or no command. In-Shop has the values
       of SOP. On the four benchmarks npair has 64 dimensions. The paper has no results for contrastive. Here its alpha
       is 0.1, and its margin 0.5 as in the released code. (The released commands for SOP say 10 images per class, but
       the released sampler takes 5. For EPSHN, Section 4.2.1 names 16 images per class for CUB and 8 for Cars, but in
       Table 2 the best results have 8 and 16.)
                                  paper (Tables 2, 3)     released code        default here
         ms            CUB, Cars  0.05; 80 / 5            -                    0.05; 80 / 5
                       SOP        -; 120 / 5              0.3; 120 / 5         0.3; 120 / 5
         proxy_anchor  CUB        2; 128                  2; 128 / 8           2; 128 / 8
                       Cars       2; 128                  0.5; 120 / 4         2; 128 / 8
                       SOP        -; 120 / 5              2; 120               2; 120 / 5
         epshn         CUB, Cars  -; 128 / 8 or 16        -                    0.1; 128 / 8, on Cars 16
                       SOP        -; 120 / 5              1; 120 / 5           1; 120 / 5
         npair         CUB, Cars  -; 128 / 8              -                    0.1; 128 / 8
What differs from the released code (github.com/SHQberserker/HSE, 6eb52ba)
    9. The released code only has CutMix of two images, on CUB and Cars side by side (--axis left-right).
       On SOP its two images may be of one class, and with Proxy-Anchor, sources and negatives come from ten random
       images of one superclass. Here a batch of SOP has two classes of each superclass. Both are sources, so the
       negatives are of other superclasses.
   10. Its contrastive loss has no squares. Its EPSHN drops anchors whose positive or negative has a similarity of 0 or
       less, and positives above 0.9999. Its N-pair uses cosine similarities, as here; Sohn's uses inner products.
Tables and figures of the paper
    Tables 2 and 3   --loss and --per-class; rows marked * have --alpha 0. For EPSHN on CUB, R@1 is 64.9 without hybrids
                     (--per-class 16), and with them 66.9 (--per-class 16) or 67.4 (--per-class 8).
    Table 4          --loss epshn with --kind, --num, --mask-size
    Fig. 5           --arch resnet18 --batch-size 128 --per-class N; the paper does not name its loss
    Fig. 6           --loss ms --combinations N
"""


if __name__ == '__main__':
    common.cli(main)
