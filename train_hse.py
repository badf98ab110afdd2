"""train_hse.py -- Hybrid Species Embedding: images joined from several classes, as anchors without a label.

Yang, Sun, Li, Chen, Cai, Song. HSE: Hybrid Species Embedding for Deep Metric Learning. ICCV 2023.

Idea
    Join images of two to four classes into one and it is hard by construction: it looks like its
    parents and is neither. It has no label, and half a label means little when the half that was
    pasted in may show only background. HSE asks less: the hybrid shall be nearer to *some* image of
    its parents' classes than to any image of the batch's other classes. The network has to see what
    hybrid and parent share; and only the one parent-class image that is nearest already is pulled.

Equations
    Eq. (7)   x_hn  = the nearest image to x_H that has none of its classes       hard negative
    Eq. (8)   x_ewp = the nearest image to x_H that has one of its classes        easy weak positive
    Eq. (9)   L_Hy  = -alpha log 1 / (1 + exp(s_hn) / exp(s_ewp)),   s_x = f(x_H) . f(x)
    Eq. (10)  L     = L_m + L_Hy,  L_m any loss on the labelled images; Eq. (11): the contrastive

Why the hybrid is the anchor (the paper's Table 1)
    hybrid         pulls a weak positive, pushes a negative: acts within and between classes
    weak positive  pulls the hybrid to its class, and the other parent to the other: a conflict
    negative       only pushes the hybrid away: nothing is learned within the classes

Symbols
    paper     here          flag            meaning
    x_H       hybrids, h    --kind          (H, 3, S, S) images, (H, D) their embeddings
    x_A, x_B  sources       --num           (H, num) positions of the joined images in the batch
    C(x_I)    y             -               (B,) labels
    Nsize     per_class     --per-class     images per class, and hybrids per combination
    Cnum      combinations  --combinations  how many sets of num classes: H = Nsize * Cnum
    alpha     alpha         --alpha         weight of L_Hy; 0 is the baseline L = L_m
    -         temperature   --temperature   divides the similarities in Eq. (9)

Differs
    1. Eq. (9) has no temperature. The released code divides the similarities by 0.1, which is what
       its alphas belong to, and so does the default here; --temperature 1 is the paper's letter.
    2. CutMix goes from top to bottom, as in the text; the released code cuts CUB and Cars from left
       to right (--axis left-right). The sources may be weak positives, as in that code.
    3. The released code takes the first classes of the batch, and on SOP may join two images of one
       class. Here labels decide: classes are drawn at random and distinct, the same for every loss.
    4. ResNet-50 also where the paper has BN-Inception (MS on CUB and Cars). It has no In-Shop.
    5. The contrastive loss squares its distances, as Eq. (2) has it; the released code does not.
       EPSHN keeps anchors with negative similarities; the released code drops them.

Run
    python train_hse.py                                          # a minute or two, offline
    python train_hse.py --alpha 0                                # its baseline
    python train_hse.py --show-hybrids hybrids.png               # a picture like Fig. 2
    python train_hse.py --dataset cub --data data --loss epshn   # the benchmark, on a GPU

Expect
    shapes, seed 0: R@1 54.8 (untrained 6.9, pixels 6.9) in about 90 s on two CPU cores; README compares
    it with its baseline. The benchmarks were not run here; the paper reports for MS R@1 67.6 on CUB
    and 82.0 on Cars (BN-Inception), 78.7 on SOP.
"""
import argparse
from functools import partial
from itertools import chain, repeat

import torch
import torch.nn.functional as F
from torchvision.utils import save_image

import common

KINDS, AXES = ('cutmix', 'mixup', 'gridmask'), ('top-bottom', 'left-right')
# One row per dataset; what is not named stands in common.BASE, which is the released recipe.
DEFAULTS = {
    'shapes': dict(mask_size=16), 'folder': dict(mask_size=16),
    'cub': dict(), 'cars': dict(), 'inshop': dict(),
    'sop': dict(lr=3e-4, decay_rate=0.25, hybrids='append', combinations=12),    # 60 hybrids beside 120
}
# On top of it, by L_m: alpha, batch_size, per_class (Nsize), dim. From Tables 2 and 3; alpha on SOP
# from the released commands, and their default of 0.1 where neither says anything. The command for
# Proxy-Anchor on Cars has alpha 0.5 and 120 = 30 x 4; the contrastive loss is in no table.
RECIPES = {
    'ms': dict(cub=(0.05, 80, 5, 512), cars=(0.05, 80, 5, 512), sop=(0.3, 120, 5, 512)),
    'contrastive': dict(cub=(0.1, 128, 8, 512), cars=(0.1, 128, 8, 512), sop=(0.1, 120, 5, 512)),
    'proxy_anchor': dict(cub=(2.0, 128, 8, 512), cars=(2.0, 128, 8, 512), sop=(2.0, 120, 5, 512)),
    'epshn': dict(cub=(0.1, 128, 8, 512), cars=(0.1, 128, 16, 512), sop=(1.0, 120, 5, 512)),
    'npair': dict(cub=(0.1, 128, 8, 64), cars=(0.1, 128, 8, 64), sop=(0.1, 120, 5, 64)),
}


def choose_classes(y, num, combinations, groups=None, generator=None):
    """Draw sets of num distinct classes; with groups, each set inside one group.  -> list of (num,)

    Sets are dealt from shuffled decks, so no class comes twice before all decks are used up.
    """
    groups = torch.zeros_like(y) if groups is None else groups
    pools = [pool for group in groups.unique() if len(pool := y[groups == group].unique()) >= num]
    chosen = []
    while pools and len(chosen) < combinations:
        dealt = []
        for pool in pools:
            deck = pool[torch.randperm(len(pool), generator=generator)]
            dealt += deck[:len(pool) // num * num].split(num)
        chosen += [dealt[i] for i in torch.randperm(len(dealt), generator=generator)]
    return chosen[:combinations]


def blend(parts, kind='cutmix', axis='top-bottom', mask_size=50):
    """Join num images into one.  parts (H, num, 3, h, w) -> (H, 3, h, w)"""
    num, (height, width) = parts.shape[1], parts.shape[-2:]
    if kind not in KINDS or axis not in AXES:
        raise ValueError(f'kind is one of {KINDS}, axis one of {AXES}; not {kind!r}, {axis!r}')
    if kind == 'mixup':
        return parts.mean(dim=1)                    # Eq. (3) with lambda = 1 - lambda = 1/2; 1/num for more
    row, column = torch.arange(height)[:, None], torch.arange(width)[None, :]
    if kind == 'gridmask':                          # blocks in turn; two images make a chessboard
        owner = (row // mask_size + column // mask_size) % num
    else:                                           # even strips: their widths differ by a pixel at most
        owner = row * num // height if axis == 'top-bottom' else column * num // width
    if owner.max() < num - 1:
        raise common.UsageError(f'no room for {num} images in {height} x {width} pixels; lower --mask-size')
    owner = owner.to(parts.device).expand(len(parts), 1, parts.shape[2], height, width)
    return parts.gather(1, owner).squeeze(1)        # each pixel from the image that owns it (H, 3, h, w)


def make_hybrids(images, labels, kind='cutmix', num=2, per_class=5, combinations=1, axis='top-bottom',
                 mask_size=50, groups=None, generator=None):
    """Hybrid species of a batch: per_class of them for each of so many combinations of num classes.

    Hybrid r joins image r of each class, and a class with fewer images starts over. Where there are
    fewer than num classes (in every group), there is no hybrid: H = 0.

    images     (B, 3, h, w), labels (B,); in any order
    kind       cutmix: even strips along axis; mixup: equal parts; gridmask: blocks of mask_size pixels
    groups     (B,) super-classes: the classes of a hybrid come from one; None: from the whole batch
    generator  draws the classes; None is torch's global one
    returns    hybrids (H, 3, h, w), sources (H, num): positions in images, all of different classes
    """
    y = labels.cpu()                                # the choice is small: one transfer instead of many
    sources = [torch.empty(0, num, dtype=torch.long)]
    for classes in choose_classes(y, num, combinations, None if groups is None else groups.cpu(), generator):
        members = [(y == c).nonzero()[:, 0] for c in classes]
        rows = [m[torch.arange(per_class) % len(m)] for m in members]
        sources.append(torch.stack(rows, dim=1))                         # (Nsize, num)
    sources = torch.cat(sources).to(images.device)                       # (H, num)
    return blend(images[sources], kind, axis, mask_size), sources


def raised(z):
    return z.to(torch.promote_types(z.dtype, torch.float32))             # half to float32; float64 stays


def nearest(s, allowed):
    """The similarity of each row's most similar allowed column, (A,), and whether there is one, (A,).

    On the sphere the least distance is the largest similarity. The choice is made on detached values
    and then read with its gradient: nothing but the chosen pair gets one.
    """
    index = s.detach().masked_fill(~allowed, float('-inf')).argmax(dim=1, keepdim=True)     # (A, 1)
    return s.gather(1, index).squeeze(1), allowed.any(dim=1)


def candidates(y, sources):
    """Who may be a weak positive, who a negative: two (H, B) bool masks.  y (B,), sources (H, num)"""
    weak_positive = (y[None, :, None] == y[sources][:, None, :]).any(dim=2)
    return weak_positive, ~weak_positive


def hybrid_loss(h, z, weak_positive, negative, alpha=1.0, temperature=0.1):
    """L_Hy, Eq. (9), averaged over the hybrids.

    h, z           (H, D) hybrids, (B, D) labelled images, unit length; half is raised to float32
    weak_positive  (H, B) bool, the candidates of Eq. (8);  negative  (H, B) bool, those of Eq. (7)
    temperature    > 0; 1 is the paper's letter, 0.1 the released code
    returns        scalar >= 0; a hybrid without any candidate on one of the sides adds 0 to the mean
    """
    s = raised(h) @ raised(z).T / temperature                            # (H, B)
    s_hn, has_hn = nearest(s, negative)                                  # Eq. (7)
    s_ewp, has_ewp = nearest(s, weak_positive)                           # Eq. (8)
    loss = -alpha * F.logsigmoid(s_ewp - s_hn)                         # Eq. (9): 1 / (1 + e^-t) = sigmoid(t)
    return (loss * (has_hn & has_ewp)).sum() / max(len(h), 1)            # no hybrid: 0, still in the graph


def hse_loss(base_loss, z, y, h, sources, alpha=1.0, temperature=0.1):
    """L = L_m + L_Hy. L_m sees labelled images alone, and a hybrid is no candidate for another."""
    # Eq. (10); with base_loss = contrastive_loss Eq. (11)
    return base_loss(z, y) + hybrid_loss(h, z, *candidates(y, sources), alpha, temperature)


# L_m, the base losses: z (B, D) of unit length, y (B,) labels
def pairs(y):
    """(B, B) bool masks of positives and negatives. Self is in neither, by index."""
    same = y[:, None] == y[None, :]                                      # (B, B)
    return same & ~torch.eye(len(y), dtype=torch.bool, device=y.device), ~same


def log1p_sum_exp(t, keep):
    """log(1 + sum_j exp t_ij) over the j with keep_ij.  (A, V) -> (A,)"""
    t = t.masked_fill(~keep, float('-inf'))
    return torch.cat([t.new_zeros(len(t), 1), t], dim=1).logsumexp(dim=1)


def multi_similarity_loss(z, y, alpha=2.0, beta=50.0, lam=0.5, epsilon=0.1):
    """Multi-Similarity with its miner; train_ms.py explains it."""
    s = raised(z) @ raised(z).T                                          # (B, B)
    positive, negative = pairs(y)
    hardest_positive = s.masked_fill(~positive, float('inf')).amin(dim=1, keepdim=True)
    hardest_negative = s.masked_fill(~negative, float('-inf')).amax(dim=1, keepdim=True)
    pull = log1p_sum_exp(-alpha * (s - lam), positive & (s - epsilon < hardest_negative)) / alpha
    push = log1p_sum_exp(beta * (s - lam), negative & (s + epsilon > hardest_positive)) / beta
    return (pull + push).mean()


def contrastive_loss(z, y, margin=0.5):
    """Eq. (2), each term averaged over its non-zero pairs; train_contrastive.py explains it."""
    s = raised(z) @ raised(z).T                                          # (B, B)
    d2 = s.diagonal()[:, None] + s.diagonal()[None, :] - 2 * s
    floor = 16 * torch.finfo(d2.dtype).eps                               # equal points: d = 0, no gradient
    d = torch.where(d2 > floor, d2.clamp_min(floor).sqrt(), 0)
    positive, negative = pairs(y)
    pull = d.square() * positive                                         # Eq. (2), y = 1
    push = (margin - d).relu().square() * negative                       # Eq. (2), y = 0
    return sum(term.sum() / (term > 0).sum().clamp_min(1) for term in (pull, push))


def proxy_anchor_loss(z, y, proxies, alpha=32.0, delta=0.1):
    """Proxy-Anchor with proxies (C, D); train_proxy_anchor.py explains it."""
    s = F.normalize(raised(proxies)) @ raised(z).T                       # (C, B)
    positive = torch.arange(len(proxies), device=y.device)[:, None] == y[None, :]
    pull = log1p_sum_exp(-alpha * (s - delta), positive)                 # (C,); 0 for an absent class
    push = log1p_sum_exp(alpha * (s + delta), ~positive)
    return pull.sum() / positive.any(dim=1).sum() + push.mean()


def epshn_loss(z, y, temperature=0.1):
    """Easy positive, semi-hard negative (Xuan et al., WACV 2020), averaged over the anchors with both.

    Of its class an anchor takes the most similar image, of the others the most similar below that."""
    s = raised(z) @ raised(z).T                                          # (B, B)
    positive, negative = pairs(y)
    s_p, has_p = nearest(s, positive)
    s_n, has_n = nearest(s, negative & (s < s_p[:, None]))
    keep = has_p & has_n
    return -(F.logsigmoid((s_p - s_n) / temperature) * keep).sum() / keep.sum().clamp_min(1)


def npair_loss(z, y):
    """N-pair (Sohn, NIPS 2016): tell a class's second image from the others' second, given its first.

    Cross-entropy over inner products, averaged over the classes of two images and more."""
    same = y[:, None] == y[None, :]                                      # (B, B)
    positive = (same.tril(-1).sum(dim=1) == 1).nonzero()[:, 0]           # one of its class came before
    anchor = same[positive].int().argmax(dim=1)                          # argmax finds the first
    s = raised(z)[anchor] @ raised(z)[positive].T                        # (P, P)
    return -s.log_softmax(dim=1).diagonal().sum() / max(len(s), 1)


class SuperClassSampler:
    """Batches with equally many classes of every super-class, K images each: on SOP 12 x 2 x 5 = 120."""

    def __init__(self, labels, groups, batch_size, per_class):
        self.members = [(groups == group).nonzero()[:, 0].tolist() for group in groups.unique()]
        if per_class < 1 or batch_size % (len(self.members) * per_class):
            raise common.UsageError(f'--batch-size must be a multiple of {len(self.members)} x --per-class')
        share, self.batches = batch_size // len(self.members), len(labels) // batch_size
        self.samplers = [common.BalancedSampler(labels[m], share, per_class) for m in self.members]

    def __len__(self):
        return self.batches

    def __iter__(self):
        streams = [chain.from_iterable(repeat(sampler)) for sampler in self.samplers]
        for _ in range(self.batches):
            parts = [[m[i] for i in next(stream)] for m, stream in zip(self.members, streams)]
            # in a new order each time: --hybrids replace drops the last images of a batch
            yield [i for p in torch.randperm(len(parts)).tolist() for i in parts[p]]


def show(args, data, sampler, hybridise):
    """A picture like Fig. 2: in a row some sources from a training batch, and all ways to join them."""
    images, labels = next(common.batches(data.train, [next(iter(sampler))], args.device, augment=args))
    _, sources = hybridise(images, labels)
    parts = images[sources[:8]]                                          # (8, num, 3, S, S)
    joined = [blend(parts, kind, args.axis, args.mask_size)[:, None] for kind in KINDS]
    x = torch.cat([parts, *joined], dim=1).flatten(0, 1)
    x = x * x.new_tensor(common.STD)[:, None, None] + x.new_tensor(common.MEAN)[:, None, None]
    with common.written_whole(args.show_hybrids, 'the picture') as file:
        save_image(x, file, format='png', nrow=args.num + len(KINDS), pad_value=1)


def get_args(argv=None):
    parser = common.parser(__doc__)
    add = parser.add_argument_group('HSE').add_argument
    add('--loss', choices=list(RECIPES), default='ms', help='L_m, the loss on labelled images')
    add('--alpha', type=common.at_least(0, float), default=0.1, help='weight of L_Hy; 0: no hybrids')
    add('--temperature', type=common.at_least(0.001, float), default=0.1, help='of L_Hy; the paper has 1')
    add('--kind', choices=KINDS, default='cutmix', help='how images are joined')
    add('--num', type=int, choices=(2, 3, 4), default=2, help='classes in a hybrid')
    add('--combinations', type=common.at_least(1), default=1, help='Cnum, sets of classes per batch')
    add('--axis', choices=AXES, default='top-bottom', help="order of CutMix's strips")
    add('--mask-size', type=common.at_least(1), default=50, help="side of GridMask's blocks, pixels")
    add('--hybrids', choices=('replace', 'append'), default='replace', help='the last images, or add to them')
    add('--show-hybrids', metavar='PNG', default='', help='save a picture of hybrids, and stop')
    peek = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    # read first, since defaults depend on it; '?' leaves a bare --loss for the real parser to report
    peek.add_argument('--loss', nargs='?', default='ms')
    recipe = RECIPES.get(peek.parse_known_args(argv)[0].loss, {})
    keys = 'alpha', 'batch_size', 'per_class', 'dim'
    rows = {name: row | dict(zip(keys, recipe.get(name, ()))) for name, row in DEFAULTS.items()}
    args = common.parse(parser, rows, argv)
    if args.show_hybrids:                           # which shows all kinds
        return args
    idle = [('axis', f'--kind {args.kind}')] * (args.kind != 'cutmix')
    idle += [('mask_size', f'--kind {args.kind}')] * (args.kind != 'gridmask')
    if args.alpha == 0:
        flags = 'temperature', 'kind', 'num', 'combinations', 'axis', 'mask_size', 'hybrids'
        idle = [(flag, '--alpha 0, which makes no hybrids') for flag in flags]
    for flag, reason in idle:
        if flag in args.explicit:
            raise common.UsageError(f'--{flag.replace("_", "-")} has no effect with {reason}')
    return args


def check_batch(args, num_classes, groups=None):
    """A hybrid needs num classes and one more for its negative, among the images that stay.

    With super-classes, groups (N,), it needs its num classes inside one of them.
    """
    classes = min(args.batch_size // args.per_class, num_classes) if args.per_class else 0
    classes -= args.combinations * (args.hybrids == 'replace')           # Nsize hybrids replace one class
    if args.alpha > 0 and classes <= args.num:
        raise common.UsageError(f'--num {args.num} needs {args.num + 1} classes in a batch, {classes} stay: '
                                'raise --batch-size, keep --per-class above 0')
    if args.alpha > 0 and groups is not None:
        count = len(groups.unique())
        classes = args.batch_size // count // args.per_class
        if classes < args.num:
            enough = count * args.num * args.per_class
            raise common.UsageError(f'--num {args.num} needs as many classes of each super-class in a batch, '
                                    f'{classes} come: raise --batch-size to {enough}')


def main(argv=None):
    args = get_args(argv)
    common.set_seed(args.seed)
    data = common.load(args)
    num_classes, y, groups = data.train.num_classes, data.train.labels, data.train.groups
    check_batch(args, num_classes, groups)
    sampler, super_class = common.make_sampler(args, y), torch.zeros(num_classes, dtype=torch.long)
    if groups is not None:                          # SOP
        sampler = SuperClassSampler(y, groups, args.batch_size, args.per_class)
        super_class[y] = groups                     # (C,); elsewhere all classes are in one

    def hybridise(images, labels):
        return make_hybrids(images, labels, args.kind, args.num, args.per_class, args.combinations,
                            args.axis, args.mask_size, groups=super_class[labels.cpu()])

    if args.show_hybrids:
        return show(args, data, sampler, hybridise)
    model = common.build(args)
    weights, learned = [dict(params=model.parameters())], {}
    if args.loss == 'proxy_anchor':                 # proxies and their rate as in train_proxy_anchor.py
        proxies = torch.randn(num_classes, args.dim) * (2 / num_classes) ** 0.5
        learned['proxies'] = torch.nn.Parameter(proxies.to(args.device))                # (C, D)
        weights.append(dict(params=[learned['proxies']], lr=100 * args.lr))
    base_loss = dict(ms=multi_similarity_loss, contrastive=contrastive_loss, epshn=epshn_loss,
                     npair=npair_loss, proxy_anchor=partial(proxy_anchor_loss, **learned))[args.loss]

    def step(images, labels):
        if args.alpha == 0:
            return base_loss(model(images), labels)
        if args.hybrids == 'replace':               # the last images leave before sources are chosen
            stay = len(images) - args.per_class * args.combinations
            images, labels = images[:stay], labels[:stay]
        hybrids, sources = hybridise(images, labels)
        z, h = model(torch.cat([images, hybrids])).split([len(images), len(hybrids)])   # (B, D), (H, D)
        return hse_loss(base_loss, z, labels, h, sources, args.alpha, args.temperature)

    return common.train(args, model, data, step, common.make_optimizer(args, weights), learned, sampler)


if __name__ == '__main__':
    main()
