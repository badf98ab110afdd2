"""train_proxy_anchor.py -- Proxy-Anchor loss: each class proxy is an anchor for the whole batch.

Kim, Kim, Cho, Kwak. Proxy Anchor Loss for Deep Metric Learning. CVPR 2020. arXiv:2003.13911

Idea
    A proxy is a learned vector that stands for one class. Pairs of images say much about each
    other but there are too many of them; images paired with proxies are few, but no longer see
    each other. Here the proxy is the anchor: it pulls all images of its class and pushes all
    others, through a soft maximum over the batch, so that the image which is worst off *among
    the others of the batch* gets most of the gradient. There are C anchors and B images, and
    still images interact.

Proxy-Anchor Eq. (4)
    l(X) = 1/|P+| sum_{p in P+} log(1 + sum_{x in X_p+} exp(-alpha (s(x,p) - delta)))   pull
         + 1/|P|  sum_{p in P}  log(1 + sum_{x in X_p-} exp( alpha (s(x,p) + delta)))   push
    P+ are the proxies of classes in the batch, P all C proxies; X_p+ are the images of the class of
    p in the batch, X_p- all others.

Symbols
    paper     here      flag       meaning
    x         z         -          (B, D) embeddings of unit length
    p         proxies   -          (C, D) learned, any length: normalised inside the loss
    s(x,p)    s         -          (C, B) cosine similarities
    alpha     alpha     --alpha    scale: how sharply the worst image is preferred
    delta     delta     --delta    margin: positives are to lie above it, negatives below its negative

Differs
    1. The printed equation takes its second sum over a set P- that the paper never defines; the
       authors' code takes all C proxies, those of the batch included, and divides by C. So here.
    2. ResNet-50 with the authors' settings for it, where the paper's tables have BN-Inception.
       Average plus max pooling comes from their code (about +1 point, they say), not the paper.
    3. 60 epochs everywhere, as in their code; the paper has 40 on CUB and Cars. Theirs reports
       the best epoch on the test set; here the last one counts.
    4. Their code freezes BatchNorm on CUB and Cars, but its affine weights only during warm-up;
       here they stay frozen.
    5. SOP and In-Shop: settings were released for BN-Inception only, and are used as they are.

Run
    python train_proxy_anchor.py                                 # about a minute on a laptop, offline
    python train_proxy_anchor.py --dataset cub --data data       # the benchmark, on a GPU

Expect
    shapes, seed 0: R@1 67.8 (untrained 6.9, pixels 6.9) in 77 s on two CPU cores. The benchmarks were
    not run here; the authors report R@1 69.9 on CUB and 87.7 on Cars with ResNet-50.
"""
import torch
import torch.nn.functional as F

import common

# One row per dataset: the authors' released recipe; the comment gives the paper's value, or the
# reason, where they part. What is not named here stands in common.BASE.
DEFAULTS = {
    'shapes': dict(proxy_lr_mult=10),                # a network from scratch already learns 20 times faster
    'folder': dict(proxy_lr_mult=10),
    # paper: 40 epochs; batch 30 to 180 in its tables
    'cub': dict(epochs=60, batch_size=120, per_class=0, lr=1e-4, decay_epochs=5, decay_rate=0.5, warmup=5),
    'cars': dict(epochs=60, batch_size=120, per_class=0, lr=1e-4, decay_epochs=10, decay_rate=0.5, warmup=5),
    # released for BN-Inception
    'sop': dict(epochs=60, batch_size=180, per_class=0, lr=6e-4, decay_epochs=20, decay_rate=0.25,
                warmup=1, freeze_bn=False),
    'inshop': dict(epochs=60, batch_size=180, per_class=0, lr=6e-4, decay_epochs=20, decay_rate=0.25,
                   warmup=1, freeze_bn=False),
}


def log1p_sum_exp(t, keep):
    """log(1 + sum_j exp t_ij) over the j with keep_ij, without overflow.  t, keep (A, V) -> (A,)"""
    t = t.masked_fill(~keep, float('-inf'))          # exp(-inf) = 0: the image leaves no trace
    one = t.new_zeros(len(t), 1)                     # exp(0), the "1 +"; an empty sum gives log 1 = 0
    return torch.cat([one, t], dim=1).logsumexp(dim=1)


def proxy_anchor_loss(z, y, proxies, alpha=32.0, delta=0.1):
    """Proxy-Anchor loss, Proxy-Anchor Eq. (4).

    z        (B, D) embeddings of unit length; half precision is raised to float32
    y        (B,)   class labels, 0 to C - 1
    proxies  (C, D) one per class, of any length but zero; half precision is raised to float32
    alpha    > 0, scale;  delta  margin, a cosine
    returns  scalar >= 0; a class without an image in the batch only pushes
    """
    dtype = torch.promote_types(torch.promote_types(z.dtype, proxies.dtype), torch.float32)
    s = F.normalize(proxies.to(dtype), dim=1) @ z.to(dtype).T                       # (C, B)
    # by comparison: one-hot helpers elsewhere return one column for two classes
    positive = torch.arange(len(proxies), device=y.device)[:, None] == y[None, :]   # (C, B)
    present = positive.any(dim=1).sum()                                             # |P+|
    # Proxy-Anchor Eq. (4), first sum: a class that is not in the batch adds log 1 = 0
    pull = log1p_sum_exp(-alpha * (s - delta), positive).sum() / present
    # Proxy-Anchor Eq. (4), second sum, over all C. Trap: + delta here, - delta above
    push = log1p_sum_exp(alpha * (s + delta), ~positive).mean()
    return pull + push


def new_proxies(num_classes, dim):
    """Normal with std sqrt(2 / C), so uniform on the sphere once normalised.  -> (C, D)

    The std does not show in the loss but in the learning rate: Adam moves a coordinate by about lr
    per step, so longer proxies turn more slowly. It is the authors' value ("Kaiming, fan out").
    """
    return torch.randn(num_classes, dim) * (2 / num_classes) ** 0.5


def get_args(argv=None):
    parser = common.parser(__doc__)
    group = parser.add_argument_group('Proxy-Anchor')
    group.add_argument('--alpha', type=float, default=32.0, help='scale')
    group.add_argument('--delta', type=float, default=0.1, help='margin, a cosine')
    group.add_argument('--proxy-lr-mult', type=float, default=100.0,
                       help='learning rate of the proxies, in multiples of --lr')
    return common.parse(parser, DEFAULTS, argv)


def main(argv=None):
    args = get_args(argv)
    common.set_seed(args.seed)
    data = common.load(args)
    model = common.build(args)
    proxies = torch.nn.Parameter(new_proxies(data.train.num_classes, args.dim).to(args.device))
    optimizer = common.make_optimizer(args, [
        dict(params=model.parameters()),
        dict(params=[proxies], lr=args.lr * args.proxy_lr_mult)])      # paper, Sec. 4.2: x100

    def step(images, labels):
        return proxy_anchor_loss(model(images), labels, proxies, args.alpha, args.delta)

    return common.train(args, model, data, step, optimizer, learned={'proxies': proxies})


if __name__ == '__main__':
    main()
