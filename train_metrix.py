"""train_metrix.py -- Metrix: mixup for metric learning. A mixture is positive and negative, by its label.

Venkataramanan, Psomas, Kijak, Amsaleg, Karantzalos, Avrithis. It Takes Two to Tango: Mixup for Deep
Metric Learning. ICLR 2022. arXiv:2106.04990. Equations and Table 1 are numbered as there.

Idea
    Mixup trains a classifier on a blend of two images and the same blend of their labels. In metric
    learning a label belongs to a pair: for an anchor, a positive has 1 and a negative 0. So a blend
    with a share lambda of a positive has the label lambda, and a loss made of a sum over positives
    and a sum over negatives takes it into both. Training then reaches the space between classes.

Equations
    Eq. (7)   l(a) = tau( sigma+( sum_(x,y) y rho+(s(a,x)) ) + sigma-( sum_(x,y) (1-y) rho-(s(a,x)) ) )
    Eq. (8)   V(a), mixtures: pos-neg mixes the positives of a, anc-neg a itself, with its negatives
    Eq. (10)  mean over anchors of l(a) + w l~(a), where l~ is Eq. (9): Eq. (7) over V(a)

Symbols
    paper         here          flag               meaning
    y             y, weights    -                  (A, V), (A, M) labels for A anchors; valid: who has it
    lambda        lam           --alpha            (M,) share of a pair's first end, Beta(alpha, alpha)
    w             strength      --strength         of the mixed loss
    k             k             --hard-negatives   an anchor's negatives that are mixed: the k nearest
    beta gamma m  beta gamma m  --beta ...         of MS; contrastive has m, Proxy-Anchor beta and m

Differs (the released code has contrastive and a part of MS, and departs from the paper)
    1. One lambda and one mixture per unordered pair, for all anchors; the code has one per batch. Mixed
       embeddings are scaled to unit length, as in the code.
    2. All positives, all anchors and each anchor's own hard negatives take part. In the code: the first
       positive, in anc-neg only anchors without positives, and an index into the wrong list.
    3. Contrastive divides each sum by its non-zero terms; else w would mean something else for 380 mixed
       terms beside 99 clean ones. --reduction sum is the paper's letter.
    4. Proxy-Anchor has s - m on positives, s + m on negatives and no 1/beta; Table 1 has s - m twice and
       adds the 1/beta. Its mixed loss is the mean over classes in the batch. Only embed mixing can mix
       a proxy.
    5. ProxyNCA++ is not specified: here a mixture is a query with an interpolated target,
       lam CE(v, y_i) + (1 - lam) CE(v, y_j), and there are no kinds of pairs. It is trained like the rest.
    6. Decay every 10 epochs, warm-up, frozen BatchNorm on CUB and Cars, clipping, proxies at 100 times
       the learning rate are the code's.

Left out
    Proxy Synthesis, which labels mixtures as new classes (Table 3).

Run
    python train_metrix.py                                                         # two minutes, offline
    python train_metrix.py --dataset cub --mixup feature                           # the benchmark
    python train_metrix.py --mixup input,feature,embed --hard-negatives 1,all,all  # Table 6
    python train_metrix.py --loss contrastive --mixup input --pairs anc-neg        # i-Mix, Table 3
    python train_metrix.py --loss contrastive --mixup embed --pairs mochi --hard-negatives 100
                                   # MoCHi, Table 3; its other form is --pairs neg-neg
    python train_metrix.py --analyse runs/metrix-cub-1/last.pt                     # utilization
    python train_metrix.py --dataset cub --epochs 0 --name start                   # before training:
    python train_metrix.py --analyse runs/start/last.pt                            # Fig. 2, at epoch 0

Expect
    shapes, seed 0: R@1 62.1 (untrained 6.9, pixels 6.9) in 85 s on two CPU cores; README compares it
    with its baseline. The benchmarks were not run here; the paper reports for MS with feature mixing
    R@1 71.4 on CUB, 89.6 Cars, 81.0 SOP, 92.2 In-Shop.
"""
import random
from functools import partial
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch.distributions import Beta

import common

# Table 4, section B.1. Contrastive decays by 0.1 on CUB and Cars. The rest stands in common.BASE.
DEFAULTS = {
    'shapes': dict(proxy_lr_mult=10),                                   # whose lr is 20 times that of CUB
    'folder': dict(proxy_lr_mult=10),
    'cub': dict(epochs=100, batch_size=100, per_class=0, lr=1e-4, weight_decay=1e-4, decay_rate=0.5),
    'cars': dict(epochs=100, batch_size=100, per_class=0, lr=1e-4, weight_decay=1e-4, decay_rate=0.5),
    'sop': dict(epochs=100, batch_size=100, per_class=5, lr=3e-5, weight_decay=1e-4, decay_rate=0.25),
    'inshop': dict(epochs=100, batch_size=100, per_class=5, lr=1e-4, weight_decay=1e-4, decay_rate=0.25),
}

# Table 1: hyper-parameters, tau, sigma+, rho+, sigma-, rho-. But for contrastive, rho is exponential: here
# stands its exponent, and sigma gets the logarithm of the sum, so that log(1 + X) is softplus(log X).
log1p_exp = partial(F.softplus, threshold=50)
TABLE_1 = {
    'contrastive': (dict(m=0.5, reduction='mean'), lambda x: x,                       # Eq. (1), Eq. (14)
                    lambda x, h: x, lambda x, h: -x,
                    lambda x, h: x, lambda x, h: (x - h.m).clamp_min(0)),
    'ms': (dict(beta=18.0, gamma=75.0, m=0.77), lambda x: x,                          # Eq. (2), Eq. (15)
           lambda x, h: log1p_exp(x) / h.beta, lambda x, h: -h.beta * (x - h.m),
           lambda x, h: log1p_exp(x) / h.gamma, lambda x, h: h.gamma * (x - h.m)),
    'proxy_anchor': (dict(alpha=32.0, delta=0.1), lambda x: x,                        # Differs, 4
                     lambda x, h: log1p_exp(x), lambda x, h: -h.alpha * (x - h.delta),
                     lambda x, h: log1p_exp(x), lambda x, h: h.alpha * (x + h.delta)),
    'binomial': (dict(beta=18.0, gamma=75.0, m=0.77), lambda x: x,
                 lambda x, h: log1p_exp(x), lambda x, h: -h.beta * (x - h.m),
                 lambda x, h: log1p_exp(x), lambda x, h: h.gamma * (x - h.m)),
    'lifted': (dict(m=0.5), lambda x: x.clamp_min(0),
               lambda x, h: x, lambda x, h: -x, lambda x, h: x, lambda x, h: x - h.m),
    'nca': (dict(), lambda x: x,
            lambda x, h: -x, lambda x, h: x, lambda x, h: x, lambda x, h: x),
    'proxynca_pp': (dict(temperature=1 / 9), lambda x: x,
                    lambda x, h: -x, lambda x, h: x / h.temperature,
                    lambda x, h: x, lambda x, h: x / h.temperature),
}


def raised(z):
    return z.to(torch.promote_types(z.dtype, torch.float32))            # half to float32; float64 stays


def labelled_loss(s, y, valid, kind, **hyper):
    """The generic loss, Eq. (7), over clean or mixed examples; each is positive by y, negative by 1 - y.

    s        (A, V) similarities of A anchors and V examples; half precision is raised to float32
    y        (A, V) labels in [0, 1];  valid  (A, V) bool, which examples an anchor has
    kind     a row of Table 1;  hyper  its hyper-parameters
    returns  (A,); a side without examples adds 0
    """
    defaults, tau, sigma_pos, rho_pos, sigma_neg, rho_neg = TABLE_1[kind]
    if unknown := set(hyper) - set(defaults):
        raise TypeError(f'{kind} takes {sorted(defaults)}, not {sorted(unknown)}')
    h = SimpleNamespace(**defaults | hyper)
    s = raised(s)
    y = y.to(s.dtype)

    # (A, V), (A, V) -> (A,);  counts  which terms the mean counts: all positives, negatives above m
    def side(weight, t, sigma, counts):
        weight = weight.masked_fill(~valid, 0)
        some = weight > 0
        if kind == 'contrastive':
            terms = (some & counts).sum(dim=1).clamp_min(1) if h.reduction == 'mean' else 1
            return sigma((weight * t).sum(dim=1) / terms, h)
        # log sum_v y e^t = logsumexp_v(t + log y): no overflow, and y = 0 leaves no trace
        empty = ~some.any(dim=1)
        total = (t + weight.log()).masked_fill(empty[:, None], 0).logsumexp(dim=1)
        return sigma(total, h).masked_fill(empty, 0)

    pull, push = rho_pos(s, h), rho_neg(s, h)
    # Eq. (3) with labels 0 and 1, Eq. (7) with any, Eq. (9) where the examples are mixtures
    return tau(side(y, pull, sigma_pos, True) + side(1 - y, push, sigma_neg, push > 0))


def interpolated_proxynca_pp(v, first, second, lam, proxies, temperature=1 / 9):
    """ProxyNCA++ for queries v (M, D) that are by lam of class `first`, by 1 - lam of `second` -> scalar

    Cross-entropy over all C proxies of -|v - p|^2 / T; of it only 2 v.p / T outlives the softmax.
    """
    v, proxies = raised(v), F.normalize(raised(proxies), dim=1)
    log_p = (2 / temperature * v @ proxies.T).log_softmax(dim=1)                                # (M, C)
    query = torch.arange(len(v), device=v.device)
    return -(lam * log_p[query, first] + (1 - lam) * log_p[query, second]).mean()


def clean_loss(kind, z, y, proxies=None, epsilon=None, **hyper):
    """The clean part of Eq. (10): embeddings z (B, D), labels y (B,), proxies (C, D) or None -> scalar"""
    z = raised(z)
    if kind == 'proxynca_pp':
        return interpolated_proxynca_pp(z, y, y, 1, proxies, **hyper)
    if kind == 'proxy_anchor':
        s = F.normalize(raised(proxies), dim=1) @ z.T                                           # (C, B)
        positive = torch.arange(len(proxies), device=y.device)[:, None] == y
        pull = labelled_loss(s, positive, positive, kind, **hyper).sum() / positive.any(dim=1).sum()
        return pull + labelled_loss(s, positive, ~positive, kind, **hyper).mean()
    s, positive = z @ z.T, y[:, None] == y                                                      # (B, B)
    negative = ~positive                                            # Eq. (6): label 0
    positive = positive & ~torch.eye(len(y), dtype=torch.bool, device=y.device)     # Eq. (5): label 1
    if epsilon is not None:
        # the miner keeps what is harder, up to epsilon, than the hardest of the other kind
        hardest_positive = s.masked_fill(~positive, float('inf')).amin(dim=1, keepdim=True)     # (B, 1)
        hardest_negative = s.masked_fill(~negative, float('-inf')).amax(dim=1, keepdim=True)    # (B, 1)
        positive = positive & (s - epsilon < hardest_negative)
        negative = negative & (s + epsilon > hardest_positive)
    return labelled_loss(s, positive, positive | negative, kind, **hyper).mean()


def mix(x, i, j, lam):
    """lam x_i + (1 - lam) x_j for M pairs.  x (B, ...), i, j, lam (M,) -> (M, ...)"""
    lam = lam.view(-1, *[1] * (x.dim() - 1)).to(x.dtype)
    return lam * x[i] + (1 - lam) * x[j]


def mix_embeddings(z, i, j, lam):
    """Eq. (4), embedding mixup: (B, D) -> (M, D), unit length"""
    return F.normalize(mix(raised(z), i, j, lam), dim=1)


class MaxOfMixed(torch.autograd.Function):
    """max_t of lam f_i(t) + (1 - lam) f_j(t), a few of the M pairs at a time.  f (B, c, h, w) -> (M, c)

    All that is kept is where each maximum was. The two values that made it get all of the gradient.
    """
    @staticmethod
    def forward(ctx, f, i, j, lam):
        chunk = max(1, 2 ** 22 // f[0].numel())                         # 2 x 16 MB of workspace
        best = f.new_empty(len(i), f.shape[1])                                          # (M, c)
        at = torch.empty_like(best, dtype=torch.uint8 if f[0, 0].numel() <= 256 else torch.int32)
        for a, b, share, value, t in zip(*(x.split(chunk) for x in (i, j, lam, best, at))):
            share = share[:, None, None, None]
            mixed = f[a].mul_(share).add_(f[b].mul_(1 - share))                         # (chunk, c, h, w)
            pooled, where = F.max_pool2d(mixed, mixed.shape[2:], return_indices=True)
            value.copy_(pooled.flatten(1))
            t.copy_(where.flatten(1))
        ctx.save_for_backward(i, j, lam, at)
        ctx.shape, ctx.chunk = f.shape, chunk
        return best

    @staticmethod
    def backward(ctx, grad):
        B, c, h, w = ctx.shape
        f_grad, channel = grad.new_zeros(B * h * w * c), torch.arange(c, device=grad.device)
        for a, b, share, t, g in zip(*(x.split(ctx.chunk) for x in (*ctx.saved_tensors, grad))):
            for end, part in ((a, share), (b, 1 - share)):
                where = (end[:, None] * (h * w) + t) * c + channel                      # (chunk, c)
                f_grad.scatter_add_(0, where.flatten(), (part[:, None] * g).flatten())
        return f_grad.view(B, h, w, c).permute(0, 3, 1, 2), None, None, None


def mix_features(f, i, j, lam, pool='avg+max'):
    """Eq. (4), feature mixup, as far as pooling: pool(lam f_i + (1 - lam) f_j), exact in value and gradient.

    f (B, c, h, w), half precision is raised to float32; i, j, lam (M,); pool avg, max or avg+max -> (M, c)
    Average pooling is linear: the pooled maps are mixed. The maximum is not, and no (M, c, h, w) is kept.
    """
    # channels last, where max_pool2d is many times faster on a CPU
    f = raised(f).contiguous(memory_format=torch.channels_last)
    pooled = dict(avg=lambda: mix(f.mean(dim=(2, 3)), i, j, lam),
                  max=lambda: MaxOfMixed.apply(f, i, j, lam.to(f.dtype)))
    return sum(pooled[name]() for name in pool.split('+'))


def cross_class_pairs(y):
    """The M unordered pairs i < j of different classes.  (B,) -> (M,), (M,)"""
    i, j = torch.triu_indices(len(y), len(y), 1, device=y.device)
    return i[y[i] != y[j]], j[y[i] != y[j]]


def pair_labels(y, anchor_y, i, j, lam):
    """Labels of the mixtures of pairs (i, j) for anchors of classes anchor_y (A,) -> weights, valid (A, M)

    The share of the end with the anchor's class: lam for i, 1 - lam for j; valid where just one end has it.
    """
    first, second = anchor_y[:, None] == y[i], anchor_y[:, None] == y[j]
    return torch.where(first, lam, 1 - lam), first ^ second


def mixtures(which, y, i, j, lam, anchor_y, anchor, hard):
    """V(a) of every anchor, Eq. (8) -> weights, valid (A, M)

    which   pos-neg, anc-neg, pos-pos, neg-neg or mochi;  y, anchor_y, i, j, lam  as in pair_labels
    anchor  (A,) the anchor's own index in y, -1 if it is not there;  hard  (A, B) negatives that may be mixed
    """
    own = (anchor[:, None] == i) | (anchor[:, None] == j)                               # (A, M)
    weights, valid = pair_labels(y, anchor_y, i, j, lam)
    if which == 'pos-pos':                                              # label 1: no negative term
        return torch.ones_like(weights), (anchor_y[:, None] == y[i]) & ~valid & ~own
    if which == 'neg-neg':                                              # label 0: no positive term
        return torch.zeros_like(weights), hard[:, i] & hard[:, j]
    valid = valid & (hard[:, i] | hard[:, j])       # of the two ends only the negative one can be hard
    if which == 'mochi':                            # label 0 for anc-neg that is mostly the negative
        return torch.zeros_like(weights), valid & own & (weights < 0.5)
    return weights, valid & (own if which == 'anc-neg' else ~own)                       # Eq. (8)


def mixed_loss(args, mixup, which, k, hyper, model, images, f, z, y, proxies=None):
    """The mixed part of Eq. (10), by a type of mixing, a kind of pairs, k negatives (None: all) -> scalar"""
    z = raised(z)
    anchors, anchor_y, anchor, ends, ends_y = z, y, torch.arange(len(y), device=y.device), z, y
    if args.loss == 'proxy_anchor':
        anchor_y = y.unique()                                           # (A,) classes in the batch
        anchors, anchor = F.normalize(raised(proxies), dim=1)[anchor_y], torch.full_like(anchor_y, -1)
        if which in ('anc-neg', 'mochi'):                               # proxies are mixed: append them
            anchor = len(y) + torch.arange(len(anchor_y), device=y.device)
            ends, ends_y = torch.cat([z, anchors]), torch.cat([y, anchor_y])
    hard = anchor_y[:, None] != y                                                       # (A, B)
    if k is not None:
        s = (anchors @ z.T).detach().masked_fill(~hard, float('-inf'))
        hard = hard & torch.zeros_like(hard).scatter(1, s.topk(min(k, len(y)), dim=1).indices, True)
    hard = F.pad(hard, (0, len(ends) - len(z)))                         # no proxy is a negative
    i, j = cross_class_pairs(ends_y)
    if which in ('pos-pos', 'neg-neg'):                                 # these may be within a class
        i, j = torch.triu_indices(len(y), len(y), 1, device=y.device)
    # of a tensor on the device, so that the draw is made there
    lam = Beta(*torch.full((2,), args.alpha, device=y.device)).sample(i.shape)
    weights, valid = mixtures(which, ends_y, i, j, lam, anchor_y, anchor, hard)
    used = valid.any(dim=0)
    i, j, lam, weights, valid = i[used], j[used], lam[used], weights[:, used], valid[:, used]
    if not len(i):                                                      # every V(a) is empty
        return 0
    if mixup == 'input':
        v = model(mix(images, i, j, lam))                               # Eq. (4), input mixup
    elif mixup == 'feature':
        v = model.project(mix_features(f, i, j, lam, model.pool))
    else:
        v = mix_embeddings(ends, i, j, lam)
    if args.loss == 'proxynca_pp':
        return interpolated_proxynca_pp(v, y[i], y[j], lam, proxies, **hyper)
    return labelled_loss(anchors @ v.T, weights, valid, args.loss, **hyper).mean()


def positivity_threshold(lam, beta, gamma, m):
    """The similarity up to which a mixture acts as a positive: right-hand side of Eq. (24)"""
    lam = lam if torch.is_tensor(lam) else torch.tensor(lam, dtype=torch.float64)
    return lam.logit() / (beta + gamma) + m


def positivity(z, y, batches, alpha=2.0, **hyper):
    """P(Pos(a, v)), Fig. 2, by MS on mixed embeddings -> [(lambda, measured, predicted, mixtures)]"""
    hyper, seen = TABLE_1['ms'][0] | hyper, []
    for index in batches:
        zb, yb = z[index].double(), y[index]                            # in float32, derivatives vanish
        i, j = cross_class_pairs(yb)
        lam = Beta(alpha, alpha).sample(i.shape).double()
        weights, valid = mixtures('pos-neg', yb, i, j, lam, yb, torch.arange(len(yb)), yb[:, None] != yb)
        s = (zb @ mix_embeddings(zb, i, j, lam).T).requires_grad_()                     # (B, M)
        labelled_loss(s, weights, valid, 'ms', **hyper).sum().backward()
        positive = s.grad <= 0                                          # Eq. (11)
        # Eq. (25): the share of s below the threshold is F_lambda there
        below = s <= positivity_threshold(weights, **hyper)
        seen.append(torch.stack([weights, positive, below])[:, valid])
    share, *both = torch.cat(seen, dim=1)
    bins = [(low / 10 + 0.05, (share * 10).long() == low) for low in range(10)]
    return [(centre, *(t[b].mean().item() for t in both), int(b.sum())) for centre, b in bins if b.any()]


def analyse(args):
    """Fig. 2 and utilization of a checkpoint on its dataset, printed; drawn too, where matplotlib is."""
    model = common.load_checkpoint(args.analyse, args.device)
    typed = {name: getattr(args, name) for name in args.explicit}
    saved = SimpleNamespace(**model.args | typed, explicit=args.explicit)
    data = common.load(saved)
    z, q, y = common.embed(model, data.train), common.embed(model, data.query), data.train.labels
    batches = list(islice(common.make_sampler(saved, y), 20))
    hyper = {name: vars(args)[name] for name in ('beta', 'gamma', 'm') if vars(args)[name] is not None}
    rows = positivity(z, y, batches, args.alpha, **hyper)
    print('lambda  P(Pos) measured  by Eq. (25)  mixtures')
    for row in rows:
        print('%6.2f %16.3f %12.3f %9d' % row)

    def nearest(x):                                                     # squared distance, (M, D) -> (N,)
        return 2 - 2 * common.searcher(x)(q, 1)[0][:, 0]

    clean = mixed = nearest(z)
    for index in batches:
        i, j = cross_class_pairs(y[index])
        lam = Beta(args.alpha, args.alpha).sample(i.shape)
        mixed = mixed.minimum(nearest(mix_embeddings(z[index], i, j, lam)))
    print(f'utilization, Eq. (12): {clean.mean():.3f}, with mixed examples {mixed.mean():.3f}')
    if not rows:                                                        # no anchor had a mixture
        return rows
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print('for the figure: pip install matplotlib')
        return rows
    axes = Figure().subplots()
    lam, *curves, _ = zip(*rows)
    axes.plot(lam, curves[0], 'o-', lam, curves[1], 's--')
    axes.set(xlabel='lambda', ylabel='P(Pos(a, v)): measured (circles), Eq. (25) (squares)')
    at = Path(args.analyse)                                             # a checkpoint or a run folder
    picture = (at if at.is_dir() else at.parent) / 'positivity.png'
    axes.figure.savefig(picture)
    print(f'the figure: {picture}')
    return rows


# --flag: hyper-parameter of labelled_loss
HYPER = {'contrastive': dict(m='m', reduction='reduction'), 'ms': dict(beta='beta', gamma='gamma', m='m'),
         'proxy_anchor': dict(beta='alpha', m='delta'), 'proxynca_pp': dict(temperature='temperature')}


def plan(args):
    """{type of mixing: (its kinds of pairs, k)}; refuses what the paper does not define."""
    types, ks = args.mixup.split(','), args.hard_negatives.split(',')
    if not 0 < args.alpha < float('inf'):
        raise common.UsageError(f'--alpha {args.alpha}: Beta(alpha, alpha) is there for 0 < alpha < inf')
    if types != ['none'] and len(set(types) & {'input', 'feature', 'embed'}) < len(types):
        raise common.UsageError(f'--mixup {args.mixup}: it is none, or some of input,feature,embed')
    numbers = [k for k in ks if k not in ('auto', 'all')]
    if len(ks) not in (1, len(types)) or not all(k.isdecimal() and int(k) for k in numbers):
        raise common.UsageError(f'--hard-negatives {args.hard_negatives}: all or a number >= 1, once or '
                                'per --mixup')
    if args.loss == 'proxynca_pp' and args.pairs != 'both':
        raise common.UsageError(f'--pairs {args.pairs} with proxynca_pp: its positives and negatives are '
                                'proxies (Table 1), so an example that is mixed can only be the query')
    if args.loss == 'proxy_anchor' and args.pairs in ('anc-neg', 'mochi') and set(types) != {'embed'}:
        raise common.UsageError(f'--pairs {args.pairs} with proxy_anchor: its anchors are proxies (Table 1), '
                                f'learned embeddings; there is no {args.mixup} of them to mix; take --pairs '
                                'pos-neg, or --mixup embed')
    result = {}
    for mixup, k in zip(types, ks * len(types)):
        kinds = ['pos-neg'] if args.loss == 'proxy_anchor' and mixup != 'embed' else ['pos-neg', 'anc-neg']
        kinds = ['anc-neg'] if args.loss == 'proxynca_pp' else kinds if args.pairs == 'both' else [args.pairs]
        result[mixup] = kinds, int(k) if k.isdecimal() else 3 if (k, mixup) == ('auto', 'input') else None
    return {} if args.mixup == 'none' else result


def get_args(argv=None):
    parser = common.parser(__doc__)
    add = parser.add_argument_group('Metrix').add_argument
    add('--loss', choices=list(HYPER), default='ms', help='base loss')
    add('--mixup', default='feature',
        help='none, or some of input,feature,embed: one drawn per iteration; input adds a pass of about 300 '
             'mixed images, at 20 x 5 with pos-neg of up to 1,200')
    add('--pairs', default='both', choices=['both', 'pos-neg', 'anc-neg', 'pos-pos', 'neg-neg', 'mochi'],
        help='both: pos-neg or anc-neg, drawn per iteration; mochi: anc-neg with less than half of the '
             'anchor, all negative')
    add('--hard-negatives', default='auto', help='k or all, once or per --mixup; auto: 3 for input, else all')
    add('--alpha', type=float, default=2.0, help='of Beta(alpha, alpha)')
    add('--strength', type=common.at_least(0, float), default=0.4, help='w, of the mixed loss')
    add('--beta', type=common.at_least(1e-3, float), help='ms 18, proxy_anchor 32')
    add('--gamma', type=common.at_least(1e-3, float), help='ms 75')
    add('--m', type=float, help='contrastive 0.5, ms 0.77, proxy_anchor 0.1')
    add('--reduction', choices=['mean', 'sum'], help='contrastive mean')
    add('--temperature', type=common.at_least(1e-3, float), help='proxynca_pp 1/9')
    add('--epsilon', type=float, default=0.39,
        help="slack of the MS miner, which is the code's and serves the clean loss alone; below 0: no miner")
    add('--proxy-lr-mult', type=float, default=100.0, help='lr of proxies, times --lr')
    add('--analyse', metavar='CHECKPOINT',
        help='positivity by MS with --beta, --gamma, --m, and utilization, of a model')
    args = common.parse(parser, DEFAULTS, argv)
    some = {'ms': 'epsilon', 'proxy_anchor': 'proxy_lr_mult', 'proxynca_pp': 'proxy_lr_mult'}
    read = {*HYPER[args.loss], some.get(args.loss)}
    idle = args.explicit & {*some.values()}.union(*HYPER.values()) - read
    idle |= args.explicit & {'pairs', 'hard_negatives', 'strength'} if args.mixup == 'none' else set()
    for flag in sorted(idle):
        raise common.UsageError(f'--{flag.replace("_", "-")} has no effect with --loss {args.loss} '
                                f'--mixup {args.mixup}')
    if args.loss == 'contrastive' and args.dataset in ('cub', 'cars'):
        args.decay_rate = args.decay_rate if args.resume or 'decay_rate' in args.explicit else 0.1
    plan(args)
    return args


def main(argv=None):
    args = get_args(argv)
    common.set_seed(args.seed)
    if args.analyse:
        return analyse(args)
    mixing = plan(args)
    names = []
    for mixup, (kinds, k) in mixing.items():
        what = 'queries' if args.loss == 'proxynca_pp' else ' or '.join(kinds)
        negatives = '' if kinds == ['pos-pos'] else f', {k or "all"} negatives'
        names.append(f'{mixup} ({what}{negatives})')
    print(f'Metrix: {args.loss}, mixing', '; '.join(names) or 'nothing')
    data = common.load(args)
    model = common.build(args)
    groups, learned = [dict(params=model.parameters())], {}
    if 'proxy' in args.loss:
        C = data.train.num_classes
        learned['proxies'] = torch.nn.Parameter((torch.randn(C, args.dim) * (2 / C) ** 0.5).to(args.device))
        groups.append(dict(params=[learned['proxies']], lr=args.lr * args.proxy_lr_mult))
    optimizer = common.make_optimizer(args, groups)
    hyper = {name: vars(args)[flag] for flag, name in HYPER[args.loss].items()
             if vars(args)[flag] is not None}
    epsilon = args.epsilon if args.loss == 'ms' and args.epsilon >= 0 else None

    def step(images, labels):
        f = model.features(images)                                      # (B, c, h, w), once per clean image
        z = model.head(f)                                                               # (B, D)
        loss = clean_loss(args.loss, z, labels, epsilon=epsilon, **learned, **hyper)
        if mixing:
            mixup, (kinds, k) = random.choice(list(mixing.items()))
            which = random.choice(kinds)                                # section B.2: drawn per iteration
            mixed = mixed_loss(args, mixup, which, k, hyper, model, images, f, z, labels, **learned)
            loss = loss + args.strength * mixed                         # Eq. (10)
        return loss

    return common.train(args, model, data, step, optimizer, learned)


if __name__ == '__main__':
    main()
