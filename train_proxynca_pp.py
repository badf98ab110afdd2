"""train_proxynca_pp.py -- ProxyNCA++: softmax over class proxies with a low temperature, and max pooling.

Teh, DeVries, Taylor. ProxyNCA++: Revisiting and Revitalizing Proxy Neighborhood Component Analysis. ECCV 2020.
arXiv:2004.01113. Proxy-NCA (Movshovitz-Attias et al., ICCV 2017) is written as in Proxy-Anchor, arXiv:2003.13911.
Each class has a learnable proxy, and the loss is a softmax over the proxies. In Proxy-NCA, see Proxy-Anchor Eq. (1),
the denominator omits the positive proxy, so the gradient of its similarity is always -1, Proxy-Anchor Eq. (3).
ProxyNCA++ includes the positive proxy, and has LayerNorm and a higher learning rate for the proxies.

    paper    code          flag            meaning
    x        z             -               (B, D) L2-normalized embeddings
    p        proxies       -               (C, D) learnable proxies, normalized inside the loss
    s(x,p)   cosines()     -               (B, C) cosine similarities
    T        temperature   --temperature   divides squared distances; 1/9, or 2 with --loss proxynca

    python train_proxynca_pp.py --dataset cub --data data    # without flags: a small built-in dataset, on a CPU
"""
import torch
import torch.nn.functional as F

import common


def proxynca_pp_loss(z, y, proxies, temperature=1 / 9):
    """ProxyNCA++ as in the authors' code, where p+ is the positive proxy of x, the proxy of its class:

    l(X) = mean_{x in X} -log( exp(-|x - p+|^2 / T) / sum_{p in P} exp(-|x - p|^2 / T) )

    P are the proxies of all C classes, so this is cross-entropy with a softmax over the classes. With L2-normalized x
    and p, |x - p|^2 is 2 - 2 s(x,p). The constant cancels in the softmax, so the logits are 2 s(x,p) / T; this is
    18 s(x,p) for T = 1/9. With T = 1 they would be between -2 and 2, and with many classes the probability of the
    positive proxy could not come close to 1.

    z            (B, D) L2-normalized embeddings
    y            (B,)   class labels, 0 to C - 1
    proxies      (C, D) one per class, of any length but 0
    temperature  > 0
    returns      scalar >= 0; 0 with one class; half precision is upcast to float32
    """
    return F.cross_entropy(2 / temperature * cosines(z, proxies), y)


def proxynca_loss(z, y, proxies, temperature=2.0):
    """Proxy-NCA, where p+ is the positive proxy of x, P- are all other proxies, and LSE is log-sum-exp:

    l(X) = sum_{x in X} -log( exp(s(x,p+)) / sum_{p- in P-} exp(s(x,p-)) )    Proxy-Anchor Eq. (1)
         = sum_{x in X} ( -s(x,p+) + LSE_{p- in P-} s(x,p-) )                 Proxy-Anchor Eq. (2)

    z, y, proxies  as in proxynca_pp_loss
    temperature    > 0; the exponents are 2 s(x,p) / T instead of s(x,p): equal for T = 2
    returns        scalar, a sum over the batch, can be negative; with one class, P- is empty and its term is left out

    Proxy-Anchor Eq. (3) is the gradient, with T = 2: dl/ds(x,p+) is always -1, however close x is to p+. dl/ds(x,p-) is
    a softmax over P-, exp(s(x,p-)) / sum of exp(s(x,p')) over all p' in P-.
    """
    logits = 2 / temperature * cosines(z, proxies)                             # (B, C)
    # (B, C), in row b and column c: whether image b is of class c
    own = torch.arange(len(proxies), device=y.device) == y[:, None]
    if len(proxies) == 1:
        return -logits.sum()
    others = logits.masked_fill(own, float('-inf'))                            # exp(-inf) = 0, so P- is left
    # Proxy-Anchor Eq. (2), whose derivative is Proxy-Anchor Eq. (3)
    return (others.logsumexp(dim=1) - logits[own]).sum()


def cosines(z, proxies):
    """Cosine similarities of L2-normalized embeddings z and proxies of any length, (B, D), (C, D) -> (B, C)"""
    z, proxies = common.promote_dtypes(z, proxies)
    return z @ F.normalize(proxies, dim=1).T


def new_proxies(num_classes, dim):
    """Proxies (C, D) from a normal distribution with std 1/8, as in the authors' code.

    The loss depends on their directions only. The std sets how fast a proxy turns: a longer proxy turns more slowly.
    """
    return torch.randn(num_classes, dim) / 8


# Training recipes, see common.BASE. The benchmarks use the released configurations, except schedule and dim (notes 1
# to 3). Adam divides its step by eps + sqrt(v), where v is a running mean of squared gradients. With eps = 1 and small
# gradients the divisor is about 1, so a step is about the learning rate times the gradient, as in SGD. Therefore the
# learning rates of the proxies are large: 240 to 2,400.
CUB = dict(dim=512, pool='max', freeze_bn=False, image_size=256, resize=288, min_crop=0.08, epochs=40, batch_size=32,
           per_class=4, optimizer='adam', eps=1.0, lr=4e-3, proxy_lr_mult=1e5, weight_decay=0.0, schedule='step',
           decay_epochs=20, decay_rate=0.1, warmup=5, clip=10.0)
SOP = CUB | dict(epochs=80, batch_size=192, per_class=3, lr=2.4e-2, proxy_lr_mult=1e4, decay_epochs=40)
DEFAULTS = {
    # The optimizer of these three is AdamW, the default, with its usual small eps, so 10 times --lr is enough for the
    # proxies. Random batches (per_class=0) of shapes have about 95 classes, and so attract more proxies to their images
    # than balanced batches of 32 classes.
    'shapes': dict(per_class=0, pool='max', proxy_lr_mult=10),
    'folder': dict(pool='max', proxy_lr_mult=10),
    'vectors': dict(proxy_lr_mult=10, epochs=12),
    'cub': CUB,
    'cars': CUB,
    'sop': SOP,
    'inshop': SOP | dict(proxy_lr_mult=1e5, schedule='constant'),
    # In the Reality Check (see common.py) a batch for classification losses has one image per class (Section 3.1). The
    # learning rate of the proxies, 6000 times --lr, is taken from its released results of Proxy-NCA on CUB.
    'reality-check': dict(per_class=1, proxy_lr_mult=6000),
}
# With --loss proxynca, the entry (dataset, proxynca) overrides the entry of the dataset.
DEFAULTS |= {(dataset, 'proxynca'): dict(temperature=2.0) for dataset in DEFAULTS}
DEFAULTS['reality-check', 'proxynca'] = dict(temperature=1 / 13.98)     # see note 11


def get_args(argv=None):
    parser = common.parser(__doc__, NOTES, __file__)
    add = parser.add_argument_group('ProxyNCA++').add_argument
    add('--loss', choices=['proxynca_pp', 'proxynca'], default='proxynca_pp',
        help='proxynca: the loss of the predecessor, Proxy-NCA')
    add('--temperature', type=common.at_least(1e-4, float), default=1 / 9,
        help='temperature of the softmax, which divides squared distances')
    add('--proxy-lr-mult', type=common.at_least(0, float), default=10.0,
        help='learning rate of the proxies, as a multiple of --lr')
    add('--eps', type=common.at_least(0, float), default=1e-8, help='eps of adam, adamw and rmsprop')
    uses = {'optimizer': dict(adam='eps', adamw='eps', rmsprop='eps')}        # SGD has no eps
    return common.parse(parser, DEFAULTS, argv, uses)


def main(argv=None):
    args = get_args(argv)
    common.set_seed(args.seed)
    data = common.dataset_from(args)
    # As in the authors' code: LayerNorm before the head, and a head with PyTorch's default initialization. The networks
    # of the Reality Check have no LayerNorm, and common.build leaves it out for precomputed features.
    model = common.build(args, data=data, layer_norm=not args.protocol, head_init='default')
    proxies = torch.nn.Parameter(new_proxies(data.train.num_classes, model.dim).to(args.device))
    options = {} if args.optimizer == 'sgd' else dict(eps=args.eps)           # SGD has no eps
    optimizer = common.make_optimizer(args, [
        dict(params=model.parameters()),
        dict(params=[proxies], lr=args.lr * args.proxy_lr_mult)], **options)

    def step(images, labels):
        z = model(images)                                                      # (B, D)
        if args.loss == 'proxynca':     # a mean, so that it does not depend on the batch size
            return proxynca_loss(z, labels, proxies, args.temperature) / len(labels)
        return proxynca_pp_loss(z, labels, proxies, args.temperature)

    return common.train(args, model, data, step, optimizer, loss_params={'proxies': proxies})


NOTES = """
What differs from the paper
    1. Except on In-Shop, the authors train twice. First they train on half of the training classes and measure R@1 on
       the other half. They note the epochs at which it stops rising, and its best epoch. Then they train on all
       training classes, lower the learning rate at the epochs noted, and stop at the best epoch. Here the schedule is
       fixed: 40 epochs (80 on SOP and In-Shop), the maximum in their code, and a learning rate that is multiplied by
       0.1 after half of them. On In-Shop the learning rate is constant, as in their code.
    2. The authors train only head and proxies for 5 epochs before the 40 (or 80). Here these are the first 5 of the 40
       (or 80), in which the backbone is frozen.
    3. The embedding dimension is 512, to compare with the other scripts. The released configurations have 2048 (--dim
       2048), and the paper reports both.
    4. The learning rates come from the released configurations. In issue 2 of their repository, the author says that
       the learning rates in the first version of the paper are misprints.
What differs from the released code (github.com/euwern/proxynca_pp, 217233d)
    5. The released code has a separate optimizer for the 5 epochs in which only head and proxies learn. Here it is one
       optimizer, so the running means of Adam carry over.
    6. The released code clips only the gradients of the network. Here the gradients of the proxies are clipped, too.
       This changes nothing at the start: the gradient of a proxy p is at most about 2 / (T |p|), and |p| is about
       sqrt(512) / 8 = 2.8. So the gradient is at most 6.4, below the clip value of 10.
    7. The released commands split each batch over two GPUs, so BatchNorm gets half a batch. Here it is one GPU.
    8. The released code evaluates embeddings that are not L2-normalized, although training normalizes them. Here
       evaluation uses cosine similarities.
    9. With one class the loss of the released code divides by 0, and with two classes it is wrong. It makes one-hot
       labels by label_binarize of scikit-learn, which then returns a single column.
About Proxy-NCA
   10. With --loss proxynca, T = 2 makes the gradients at the start about 18 times smaller than the gradients of
       ProxyNCA++. On the benchmarks Adam has eps = 1, so its steps are proportional to the gradients. A fair comparison
       needs a higher --lr for Proxy-NCA there.
   11. In the Reality Check (Section 1.3), Proxy-NCA is cross-entropy on Euclidean distances, so the positive proxy is
       in the denominator. In the library of its authors, pytorch-metric-learning, the distances are squared and
       multiplied by a scale, which is 13.98 in the released results on CUB. This is --protocol reality-check --loss
       proxynca_pp --temperature 0.0715. With --loss proxynca, the default temperature of this protocol is 1/13.98, too,
       but the positive proxy is not in the denominator.
   12. CCL Eq. (9), in train_ccl.py, is Proxy-NCA with a scale s on the cosine similarities. Here this is T = 2 / s.
About ProxyNCA++ in another paper
   13. In Metrix Eq. (3) with Table 1, ProxyNCA++ has logits s(x,p) / T, and the positive proxy is not in the
       denominator. Here, and in train_metrix.py, logits are 2 s(x,p) / T, and the positive proxy is in the denominator.
Results of the paper
    CCL (Table 2) quotes for ResNet-50 and 512 dimensions: R@1 69.0 on CUB, 86.5 on Cars, 80.7 on SOP, 90.4 on In-Shop.
    The released configurations have crops of 256 px, as the benchmarks here.
"""


if __name__ == '__main__':
    common.cli(main)
