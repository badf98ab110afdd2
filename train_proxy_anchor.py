"""train_proxy_anchor.py -- Proxy-Anchor loss: the proxy of each class is an anchor for the whole batch.

Kim, Kim, Cho, Kwak. Proxy Anchor Loss for Deep Metric Learning. CVPR 2020. arXiv:2003.13911

Idea
    A proxy is a learned vector that stands for one class. Losses on pairs of images use the relations
    between images, but there are very many pairs. Losses on pairs of an image and a proxy need few
    pairs, but before this paper the gradient of an image did not depend on the other images. In
    Proxy-Anchor the proxy is the anchor: it pulls all images of its class in the batch, and pushes all
    other images. The pull is the log of 1 plus a sum of exponentials, one for each image of the class,
    and an image's exponent grows as it moves away from the proxy. The push has the same form for the
    other images, but there the exponent grows as an image comes nearer. Such a log is a smooth maximum
    of 0 and the exponents. So the image with the largest exponent, the hardest one, gets the largest part of
    the gradient, and how large that part is depends on the other images of the batch.

Equation
    Proxy-Anchor Eq. (4)
    l(X) = 1/|P+| sum_{p in P+} log(1 + sum_{x in X_p+} exp(-alpha (s(x,p) - delta)))    pull
         + 1/|P|  sum_{p in P}  log(1 + sum_{x in X_p-} exp( alpha (s(x,p) + delta)))    push
    P are the proxies of all C classes, P+ those of the classes in the batch. X_p+ are the images of
    the batch that have the class of p, and X_p- are all other images of the batch.
    (Some copies of the paper print P- for P in Eq. (4) to (6). Section 3.1 defines P- for a single
    image: the proxies of all classes but its own. But Eq. (4) is not about a single image, and the
    released code sums over all C.) The first three equations of the paper, Proxy-NCA and its gradient,
    are explained in train_proxynca_pp.py.

Symbols
    paper    here      flag      meaning
    x        z         -         (B, D) embeddings of unit length
    p        proxies   -         (C, D) learned, of any length: normalised inside the loss
    s(x,p)   s         -         (C, B) cosine similarities
    alpha    alpha     --alpha   sharpness of the smooth maxima; it multiplies the gradient, Eq. (6)
    delta    delta     --delta   margin: positives should be above delta, negatives below -delta

Run
    python train_proxy_anchor.py                              # offline, a few minutes on two CPU cores
    python train_proxy_anchor.py --dataset cub --data data    # the benchmark, on a GPU

Expect
    On shapes, the R@1 of the table in tests/results/demo.md. On 25 species of birds, a pretrained ResNet-18
    rises from 52.8 to 59.9 ± 0.3 (three seeds, 95 % interval; tests/results/fine-tuning.md).
    The paper (Table 7) reports, with ResNet-50 and 512 dimensions, R@1 69.7 on CUB and 87.7 on Cars.
"""
import torch
import torch.nn.functional as F

import common


def proxy_anchor_loss(z, y, proxies, alpha=32.0, delta=0.1):
    """Proxy-Anchor Eq. (4): the pull is divided by the number of classes in the batch, the push by C.

    z        (B, D) embeddings of unit length; half precision is raised to float32
    y        (B,)   class labels, 0 to C - 1
    proxies  (C, D) one per class, of any length but 0; half precision is raised to float32
    alpha    > 0, sharpness of the smooth maxima
    delta    margin on the cosine
    returns  scalar >= 0, without overflow; the proxy of a class without an image in the batch only pushes

    Proxy-Anchor Eq. (5) is the same loss, written with other functions: log(1 + sum exp t) = softplus(log sum exp t).
    Proxy-Anchor Eq. (6) is its gradient, see Section 3.2. For an image x of the class of p it is
        dl/ds(x,p) = -(alpha / |P+|) h(x) / (1 + sum of h(x') over all images x' of this class in the batch),
    with h(x) = exp(-alpha (s(x,p) - delta)). So the pull on one image depends on how far the other images of its class
    are from p. For an image of another class, the sign is +, P replaces P+, h(x) = exp(alpha (s(x,p) + delta)), and
    the sum is over all images that are not of the class of p.
    """
    z, proxies = common.promote_dtypes(z, proxies)
    s = F.normalize(proxies, dim=1) @ z.T                                           # (C, B)
    # (C, B), in row c and column b: whether image b is of class c
    positive = torch.arange(len(proxies), device=y.device)[:, None] == y[None, :]
    num_present = positive.any(dim=1).sum()                                         # |P+|
    # Proxy-Anchor Eq. (4), first sum: 1/|P+| sum log(1 + sum exp(-alpha (s - delta))), without the 1/alpha of
    # train_ms.py. The gradient is Proxy-Anchor Eq. (6), see above. A class that is not in the batch adds log 1 = 0.
    pull = log1p_sum_exp(-alpha * (s - delta), positive).sum() / num_present
    # Proxy-Anchor Eq. (4), second sum, over all C classes: 1/|P| sum log(1 + sum exp(alpha (s + delta))). Trap: + delta
    # here, - delta above.
    push = log1p_sum_exp(alpha * (s + delta), ~positive).mean()
    return pull + push


def log1p_sum_exp(t, keep):
    """For each row: log(1 + sum of exp(t) over the columns where keep is true), without overflow. In Proxy-Anchor
    Eq. (5) this is written softplus(LSE(t)), where LSE is log of the sum of exp(t).

    t, keep (rows, columns) -> (rows,)
    """
    t = t.masked_fill(~keep, float('-inf'))          # exp(-inf) is 0, so these entries add nothing
    zero = t.new_zeros(len(t), 1)                    # exp(0) is the "1 +"; an empty sum gives log 1 = 0
    return torch.cat([zero, t], dim=1).logsumexp(dim=1)


def new_proxies(num_classes, dim):
    """Proxies (C, D) from a normal distribution, so that their directions are uniform on the sphere.

    Their std, sqrt(2 / C), is that of the authors' code. It does not change the loss, which sees only directions. It
    changes the speed of learning: Adam moves each coordinate by about the learning rate per step, so a longer
    proxy turns more slowly.
    """
    return torch.randn(num_classes, dim) * (2 / num_classes) ** 0.5


# The recipe of each dataset: defaults of the flags, explained at common.BASE.
# CUB and Cars are the authors' commands for ResNet-50, with the 60 epochs of their code. The paper has 40, and batches
# of 30 to 180 (Table 5). decay_epochs counts from the first epoch, but the trunk learns only after 5 epochs of warm-up.
# So on CUB the trunk begins with lr / 2, and has lr / 16 after the 20th epoch.
CUB = dict(dim=512, pool='avg+max', freeze_bn=True, min_crop=0.08, epochs=60, batch_size=120, per_class=0,
           optimizer='adamw', lr=1e-4, weight_decay=1e-4, schedule='step', decay_epochs=5, decay_rate=0.5,
           warmup=5, clip=10.0, proxy_lr_mult=100)
# The authors released commands for SOP and In-Shop with BN-Inception only. These rows use them with ResNet-50.
SOP = CUB | dict(freeze_bn=False, batch_size=180, lr=6e-4, decay_epochs=20, decay_rate=0.25, warmup=1)
DEFAULTS = {
    # In common.BASE, --lr is 2e-3 for shapes and folder, and 1e-3 for vectors: 20 and 10 times that of CUB. So a factor
    # of 10 is enough for the proxies. Random batches of shapes have about 55 classes instead of 16, and teach more
    # proxies.
    'shapes': dict(per_class=0, proxy_lr_mult=10),
    'folder': dict(proxy_lr_mult=10),
    'vectors': dict(proxy_lr_mult=10),
    'cub': CUB,
    'cars': CUB | dict(decay_epochs=10),
    'sop': SOP,
    'inshop': SOP,
    # In the Reality Check (see common.py) a batch for classification losses has one image per class (Section 3.1).
    # That paper has no Proxy-Anchor, so the rate of the proxies is that of its Proxy-NCA.
    'reality-check': dict(per_class=1, proxy_lr_mult=6000),
}


def get_args(argv=None):
    parser = common.parser(__doc__, NOTES, __file__)
    add = parser.add_argument_group('Proxy-Anchor').add_argument
    add('--alpha', type=common.at_least(1e-3, float), default=32.0, help='sharpness of the smooth maxima')
    add('--delta', type=common.between(-1, 1), default=0.1, help='margin on the cosine')
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
    1. In the main tables of the paper the network is BN-Inception; on the benchmarks here, a ResNet-50.
    2. The paper does not state the pooling, warm-up, clipping, the steps of the learning rate, weight
       decay, the size of batches in its main tables, or how BatchNorm trains. All of these are those of the
       released code, as are the 60 epochs on CUB and Cars. Weight decay also acts on the proxies. In
       issue 1 of its repository, an author says that max pooling beside average pooling adds about one
       point of R@1 on CUB and Cars.
What differs from the released code (github.com/tjddus9597/Proxy-Anchor-CVPR2020, 51db570)
    3. The released code reports its best epoch on the test set.
    4. With one or two classes the loss of the released code is wrong. It makes one-hot labels by
       label_binarize of scikit-learn, which returns a single column then, all zeros with one class.
Tables and figures of the paper
    Tables 5 and 6 vary --batch-size, Table 7 --arch and --image-size, Fig. 5 --dim, Fig. 6 --alpha and --delta. In the
    paper the network is BN-Inception, except in three rows of Table 7: GoogleNet, ResNet-50 and ResNet-101.
"""


if __name__ == '__main__':
    common.cli(main)
