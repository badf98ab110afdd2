"""train_proxy_anchor.py -- Proxy-Anchor loss: the proxy of each class is an anchor for the whole batch.

Kim, Kim, Cho, Kwak. Proxy Anchor Loss for Deep Metric Learning. CVPR 2020. arXiv:2003.13911
Each class has a learnable proxy. It attracts all images of its class in the batch and repels all others: Proxy-Anchor
Eq. (4). The harder an image is, compared with the others, the larger is its gradient, Eq. (6). Pair-based losses do
this as well, but compare many more pairs. Earlier proxy-based losses looked at each image separately.

    paper    code      flag      meaning
    x        z         -         (B, D) L2-normalized embeddings
    p        proxies   -         (C, D) learnable proxies, normalized inside the loss
    s(x,p)   s         -         (C, B) cosine similarities
    alpha    alpha     --alpha   scaling factor (inverse temperature of the log-sum-exp)
    delta    delta     --delta   margin: positives should be above delta, negatives below -delta

    python train_proxy_anchor.py --dataset cub --data data    # without flags: a small built-in dataset, on a CPU
"""
import torch
import torch.nn.functional as F

import common


def proxy_anchor_loss(z, y, proxies, alpha=32.0, delta=0.1):
    """Proxy-Anchor Eq. (4):

    l(X) = 1/|P+| sum_{p in P+} log(1 + sum_{x in X_p+} exp(-alpha (s(x,p) - delta)))    pull
         + 1/|P|  sum_{p in P}  log(1 + sum_{x in X_p-} exp( alpha (s(x,p) + delta)))    push

    P are the proxies of all C classes (note 3), P+ those of the classes in the batch. X_p+ are the images of the batch
    that have the class of p, and X_p- are all other images of the batch.

    z        (B, D) L2-normalized embeddings
    y        (B,)   class labels, 0 to C - 1
    proxies  (C, D) one per class, of any length but 0
    returns  scalar >= 0; half precision is upcast to float32

    Proxy-Anchor Eq. (5) is the same loss, with log(1 + sum exp t) written as softplus(log-sum-exp t).
    Proxy-Anchor Eq. (6) is its gradient, see Section 3.2. For an image x of the class of p it is
        dl/ds(x,p) = -(alpha / |P+|) h(x) / (1 + sum of h(x') over all images x' of this class in the batch),
    with h(x) = exp(-alpha (s(x,p) - delta)). So the gradient of an image depends on how far the other images of its
    class are from p. For an image x of another class it is
        dl/ds(x,p) = (alpha / |P|) h(x) / (1 + sum of h(x') over all images x' that are not of the class of p),
    with h(x) = exp(alpha (s(x,p) + delta)).
    """
    z, proxies = common.promote_dtypes(z, proxies)
    s = F.normalize(proxies, dim=1) @ z.T                                           # (C, B)
    # (C, B), in row c and column b: whether image b is of class c
    positive = torch.arange(len(proxies), device=y.device)[:, None] == y[None, :]
    num_present = positive.any(dim=1).sum()                                         # |P+|
    # Proxy-Anchor Eq. (4), first sum. A class that is not in the batch adds log 1 = 0. Proxy-Anchor Eq. (6) follows
    # from the derivative of the logarithm.
    pull = log1p_sum_exp(-alpha * (s - delta), positive).sum() / num_present
    # Proxy-Anchor Eq. (4), second sum, over all C classes. Note that it is + delta here, and - delta above.
    push = log1p_sum_exp(alpha * (s + delta), ~positive).mean()
    return pull + push


def log1p_sum_exp(t, keep):
    """Numerically stable log(1 + sum of exp(t) over the columns where keep is true), for each row: the softplus(LSE(t))
    of Proxy-Anchor Eq. (5), where LSE is log-sum-exp.  t, keep (C, B) -> (C,)"""
    t = t.masked_fill(~keep, float('-inf'))          # exp(-inf) = 0
    zero = t.new_zeros(len(t), 1)                    # exp(0) is the "1 +"
    return torch.cat([zero, t], dim=1).logsumexp(dim=1)


def new_proxies(num_classes, dim):
    """Proxies (C, D) from a normal distribution, so that their directions are uniform on the sphere.

    Their std, sqrt(2 / C), comes from the authors' code. The loss depends on their directions only, but the speed of
    learning depends on their length: Adam moves each coordinate by about the learning rate per step, so a longer proxy
    turns more slowly.
    """
    return torch.randn(num_classes, dim) * (2 / num_classes) ** 0.5


# Training recipes, see common.BASE. CUB and Cars are the authors' commands for ResNet-50, with the 60 epochs of their
# code. The paper has 40, and batches of 30 to 180 (Table 5). decay_epochs counts from the first epoch, but the backbone
# is frozen for the first 5. So on CUB the backbone starts at lr / 2, in epoch 6.
CUB = dict(dim=512, pool='avg+max', freeze_bn=True, min_crop=0.08, epochs=60, batch_size=120, per_class=0,
           optimizer='adamw', lr=1e-4, weight_decay=1e-4, schedule='step', decay_epochs=5, decay_rate=0.5,
           warmup=5, clip=10.0, proxy_lr_mult=100)
# The authors released commands for SOP and In-Shop with BN-Inception only. These rows use them with ResNet-50.
SOP = CUB | dict(freeze_bn=False, batch_size=180, lr=6e-4, decay_epochs=20, decay_rate=0.25, warmup=1)
DEFAULTS = {
    # In common.BASE, --lr is 2e-3 for shapes and folder, and 1e-3 for vectors: 20 and 10 times that of CUB. So a factor
    # of 10 is enough for the proxies. Random batches (per_class=0) of shapes have about 95 classes, and so attract
    # more proxies to their images than balanced batches of 32 classes. A frozen backbone in the first epoch (warmup)
    # takes a tenth less time for about the same R@1 (tests/results/README.md).
    'shapes': dict(per_class=0, proxy_lr_mult=10, warmup=1),
    'folder': dict(proxy_lr_mult=10),
    'vectors': dict(proxy_lr_mult=10),
    'cub': CUB,
    'cars': CUB | dict(decay_epochs=10),
    'sop': SOP,
    'inshop': SOP,
    # In the Reality Check (see common.py) a batch for classification losses has one image per class (Section 3.1).
    # It did not test Proxy-Anchor; the learning rate of the proxies is taken from its Proxy-NCA.
    'reality-check': dict(per_class=1, proxy_lr_mult=6000),
}


def get_args(argv=None):
    parser = common.parser(__doc__, NOTES, __file__)
    add = parser.add_argument_group('Proxy-Anchor').add_argument
    add('--alpha', type=common.at_least(1e-3, float), default=32.0, help='scaling factor of the similarities')
    add('--delta', type=common.between(-1, 1), default=0.1, help='margin on the cosine similarity')
    add('--proxy-lr-mult', type=common.at_least(0, float), default=100.0,
        help='learning rate of the proxies, as a multiple of --lr')
    return common.parse(parser, DEFAULTS, argv)


def main(argv=None):
    args = get_args(argv)
    common.set_seed(args.seed)
    data = common.dataset_from(args)
    model = common.build(args, data=data)
    proxies = torch.nn.Parameter(new_proxies(data.train.num_classes, model.dim).to(args.device))
    optimizer = common.make_optimizer(args, [
        dict(params=model.parameters()),
        dict(params=[proxies], lr=args.lr * args.proxy_lr_mult)])

    def step(images, labels):
        z = model(images)                                                           # (B, D)
        return proxy_anchor_loss(z, labels, proxies, args.alpha, args.delta)

    return common.train(args, model, data, step, optimizer, loss_params={'proxies': proxies})


NOTES = """
What differs from the paper
    1. In the main tables of the paper the network is BN-Inception; on the benchmarks here, a ResNet-50. With ResNet-50
       and 512 dimensions, Table 7 has R@1 69.7 on CUB and 87.7 on Cars.
    2. The paper does not state the pooling, the number of epochs with a frozen backbone, gradient clipping, the steps
       of the learning rate, weight decay, the batch size of its main tables, or how BatchNorm trains. All of these
       come from the released code, as do the 60 epochs on CUB and Cars. Weight decay also acts on the proxies. In
       issue 1 of its repository, an author says that max pooling in addition to average pooling adds about 1% of
       R@1 on CUB and Cars.
    3. Some copies of the paper print P- instead of P in Eq. (4) to (6). Section 3.1 defines P- for one image, as the
       proxies of all classes but its own. Eq. (4) is not about one image, and the released code sums over all C.
What differs from the released code (github.com/tjddus9597/Proxy-Anchor-CVPR2020, 51db570)
    4. The released code reports its best epoch on the test set.
    5. With one or two classes the loss of the released code is wrong. It makes one-hot labels by label_binarize of
       scikit-learn, which then returns a single column, all zeros with one class.
Tables and figures of the paper
    Tables 5 and 6 vary --batch-size, Table 7 --arch and --image-size, Fig. 5 --dim, Fig. 6 --alpha and --delta. In the
    paper the network is BN-Inception, except in three rows of Table 7: GoogleNet, ResNet-50 and ResNet-101.
    Eq. (1) to (3), Proxy-NCA and its gradient, are in train_proxynca_pp.py.
"""


if __name__ == '__main__':
    common.cli(main)
