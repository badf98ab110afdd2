"""train_proxynca_pp.py -- ProxyNCA++: softmax over class proxies with a low temperature, and max pooling.

Teh, DeVries, Taylor. ProxyNCA++: Revisiting and Revitalizing Proxy Neighborhood Component Analysis. ECCV 2020.
arXiv:2004.01113. Each class has a learnable vector, its proxy. The loss is cross-entropy with a softmax over the
proxies. Its predecessor, Proxy-NCA (Movshovitz-Attias et al., ICCV 2017; Eq. (1) to (3) of the paper of Proxy-Anchor,
arXiv:2003.13911), omits the positive proxy from the denominator, so that an image is attracted to its proxy with the
same force however close they are. ProxyNCA++ also has LayerNorm, and a higher learning rate of the proxies.
tests/papers/README.md lists the letters that other papers use for other things.

    paper    code          flag            meaning
    x        z             -               (B, D) L2-normalized embeddings
    p        proxies       -               (C, D) learnable proxies, normalized inside the loss
    s(x,p)   cosines()     -               (B, C) cosine similarities
    T        temperature   --temperature   divides -|x - p|^2 in the softmax; 1/9, or 2 with --loss proxynca

    python train_proxynca_pp.py [--dataset cub --data data]
"""
import torch
import torch.nn.functional as F

import common


@common.loss            # inside, half precision becomes float32
def proxynca_pp_loss(z, y, proxies, temperature=1 / 9):
    """ProxyNCA++ as in the authors' code. The positive proxy of x, p+, is that of the class of x:

    l(X) = mean_{x in X} -log( exp(-|x - p+|^2 / T) / sum_{p in P} exp(-|x - p|^2 / T) )

    P are the proxies of all C classes, so this is cross-entropy with a softmax over the classes. With L2-normalized x
    and p, |x - p|^2 is 2 - 2 s(x,p). The constant cancels in the softmax, so the logits are 2 s(x,p) / T; this is
    18 s(x,p) for T = 1/9. With T = 1 the logits would be from -2 to 2, so with 100 classes the largest possible
    probability would be 0.36.

    z            (B, D) L2-normalized embeddings
    y            (B,)   class labels, 0 to C - 1
    proxies      (C, D) one per class, of any non-zero norm
    temperature  > 0
    returns      scalar >= 0; 0 with one class
    """
    y = common.check_labels(y, len(z), len(proxies))
    return F.cross_entropy(2 / temperature * cosines(z, proxies), y)


@common.loss
def proxynca_loss(z, y, proxies, temperature=2.0):
    """Proxy-NCA, where p+ is the positive proxy of x, P- are all other proxies, and LSE is log-sum-exp:

    l(X) = sum_{x in X} -log( exp(s(x,p+)) / sum_{p- in P-} exp(s(x,p-)) )    Proxy-Anchor Eq. (1)
         = sum_{x in X} ( -s(x,p+) + LSE_{p- in P-} s(x,p-) )                 Proxy-Anchor Eq. (2)

    z, y, proxies  as in proxynca_pp_loss
    temperature    T > 0; the exponents are 2 s(x,p) / T, so T = 2 gives Eq. (1) as printed
    returns        scalar, a sum over the batch, can be negative; with one class, P- is empty and its term is left out

    Its gradient is Proxy-Anchor Eq. (3). With T = 2, dl/ds(x,p+) is always -1, however close x is to p+. And
    dl/ds(x,p-) is a softmax over P-: exp(s(x,p-)) / sum of exp(s(x,p')) over all p' in P-.
    """
    y = common.check_labels(y, len(z), len(proxies))
    logits = 2 / temperature * cosines(z, proxies)                             # (B, C)
    if len(proxies) == 1:
        return -logits.sum()
    positive = torch.arange(len(proxies), device=y.device) == y[:, None]       # (B, C): image b has class c
    others = logits.masked_fill(positive, float('-inf'))    # only P- is left, because exp(-inf) = 0
    logit = logits.gather(1, y[:, None])[:, 0]              # (B,) of p+
    # Proxy-Anchor Eq. (2), which equals Proxy-Anchor Eq. (1): LSE over P-, minus the logit of p+
    return (others.logsumexp(dim=1) - logit).sum()


def cosines(z, proxies):
    """Cosine similarities of L2-normalized embeddings z and proxies of any norm, (B, D), (C, D) -> (B, C)"""
    return z @ F.normalize(proxies, dim=1).T


def new_proxies(num_classes, dim):
    """Proxies (C, D) from a normal distribution with std 1/8, as in the authors' code.

    The loss depends on their directions only. The std sets how fast a proxy turns: a longer proxy turns more slowly.
    """
    return torch.randn(num_classes, dim) / 8


# ---- recipes: the defaults of flags for each dataset; --help explains the flags

# What `python train_proxynca_pp.py` runs: a small ResNet from scratch on the built-in dataset
SHAPES = dict(
    arch='resnet18', weights='none', pool='max', dim=128, freeze_bn=False,
    image_size=32, resize=32, min_crop=1.0,
    epochs=10, batch_size=128, per_class=0,
    optimizer='adamw', lr=2e-3, weight_decay=1e-4, schedule='cosine', freeze_epochs=0, clip=0.0,
    eval_every=10, precision='fp32', proxy_lr_mult=10)
# The released configurations, except schedule and dim (notes 1 to 3). They set Adam's eps to 1. Adam divides its step
# by eps + sqrt(v), where v is a running mean of squared gradients. With eps = 1 and small gradients the divisor is
# about 1, and Adam acts as SGD with momentum. It no longer scales small gradients up, so learning rates must be large:
# those of the proxies are 240 to 2,400.
CUB = dict(
    arch='resnet50', weights='imagenet', pool='max', dim=512, freeze_bn=False,
    image_size=256, resize=288, min_crop=0.08,
    epochs=40, batch_size=32, per_class=4,
    optimizer='adam', eps=1.0, lr=4e-3, weight_decay=0.0, schedule='step', decay_epochs=20, decay_rate=0.1,
    freeze_epochs=5, clip=10.0, proxy_lr_mult=1e5)
SOP = CUB | dict(epochs=80, batch_size=192, per_class=3, lr=2.4e-2, decay_epochs=40, proxy_lr_mult=1e4, eval_every=5)
# The entry of the --loss overrides that of the dataset (or of --protocol), and the entry of both overrides either.
DEFAULTS = {
    'shapes': SHAPES,
    # A folder with pretrained weights (--weights imagenet or FILE) has the recipe 'cub' instead, see common.recipe.
    'folder': SHAPES | common.FOLDER,
    'vectors': SHAPES | common.VECTORS | dict(epochs=12),
    'cub': CUB,
    'cars': CUB,
    'sop': SOP,
    'inshop': SOP | dict(schedule='constant', proxy_lr_mult=1e5),
    # A Metric Learning Reality Check (Musgrave et al., ECCV 2020) counts proxy losses as classification losses, whose
    # batches have one image per class. The learning rate of the proxies is the one in its results for Proxy-NCA on CUB.
    'reality-check': common.PROTOCOL | dict(per_class=1, proxy_lr_mult=6000),
    # With --loss proxynca: the same recipes with another temperature
    'proxynca': dict(temperature=2.0),
    ('reality-check', 'proxynca'): dict(temperature=1 / 13.98),         # 13.98 of the Reality Check: note 11
}


def get_args(argv=None):
    parser = common.parser(__doc__, NOTES, __file__)
    add = parser.add_argument_group('ProxyNCA++').add_argument
    add('--loss', choices=['proxynca_pp', 'proxynca'], default='proxynca_pp',
        help='proxynca: the loss of the predecessor, Proxy-NCA')
    add('--temperature', type=float, default=1 / 9,
        help='T, which divides the squared distances in the softmax')
    add('--proxy-lr-mult', type=float, help='learning rate of the proxies, as a multiple of --lr')
    add('--eps', type=float, default=1e-8, help='eps of adam, adamw and rmsprop; SGD has none')
    uses = {'optimizer': dict(adam=['eps'], adamw=['eps'], rmsprop=['eps'])}        # with sgd, --eps is an error
    return common.parse(parser, DEFAULTS, argv, uses)


def main(argv=None):
    args = get_args(argv)
    common.set_seed(args.seed)
    data = common.dataset_from(args)
    # As in the authors' code: LayerNorm before the head, and a head with PyTorch's default initialization. The networks
    # of the Reality Check have no LayerNorm, and common.build leaves it out for precomputed features.
    model = common.build(args, data=data, layer_norm=not args.protocol, head_init='default')
    proxies = torch.nn.Parameter(new_proxies(data.train.num_classes, model.dim).to(args.device))
    options = {} if args.optimizer == 'sgd' else dict(eps=args.eps)
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
    1. Except on In-Shop, the authors train twice. First they train on half of the training classes, and measure R@1 on
       the other half. They note the epochs after which R@1 stops rising, and the epoch with the highest R@1. Then they
       train on all training classes, lower the learning rate at the former, and stop at the latter. Here the
       schedule is fixed: 40 epochs (80 on SOP and In-Shop), the maximum in their code, and a learning rate that is
       multiplied by 0.1 after half of them. On In-Shop the learning rate is constant, as in their code.
    2. The authors first train only the head and the proxies for 5 epochs, then everything for 40 (or 80). Here the 5
       epochs are part of the 40 (or 80).
    3. The embedding dimension is 512, to compare with the other scripts. The released configurations have 2048 (--dim
       2048), and the paper reports both.
    4. The learning rates come from the released configurations. In issue 2 of their repository, the author says that
       those in the first version of the paper are misprints.
What differs from the released code (github.com/euwern/proxynca_pp, 217233d)
    5. The released code has a separate optimizer for the 5 epochs in which only the head and the proxies learn. Here it
       is one optimizer, so the running means of Adam carry over.
    6. The released code clips only the gradients of the network. Here those of the proxies are clipped, too. At the
       start this changes nothing: only entries above 10 are clipped, and the gradient of a proxy has a norm of at most
       2 / (T |p|), which is 6.4 for |p| = sqrt(512) / 8.
    7. The released commands split each batch over two GPUs, so BatchNorm gets half a batch. Here it gets all of it.
    8. The released code evaluates embeddings that are not L2-normalized, although training normalizes them.
    9. With one class the loss of the released code divides by 0, and with two classes it is wrong. It makes one-hot
       labels by label_binarize of scikit-learn, which then returns a single column.
   10. Proxy-NCA with T = 2 has gradients that are about 18 times smaller at the start than those of ProxyNCA++. On
       the benchmarks Adam has an eps of 1, so a step is about proportional to the gradient, and 18 times smaller, too.
       A fair comparison needs a higher --lr.
   11. Proxy-NCA in other papers:
           Reality Check, Section 1.3   has the positive proxy in the denominator, as ProxyNCA++. The code of this paper
                                        has 13.98 |x - p|^2 on CUB. To reproduce it, run the default --loss
                                        with --protocol reality-check --temperature 0.0715.
           CCL Eq. (9), train_ccl.py    Proxy-NCA with a scale s on the cosine similarities: T = 2 / s
   12. Metrix (Table 1) writes ProxyNCA++ with logits s(x,p) / T and without the positive proxy in the denominator. This
       script and train_metrix.py follow the authors' code.
Tables and figures of the paper
    CCL (Table 2) quotes for ResNet-50 and 512 dimensions: R@1 69.0 on CUB, 86.5 on Cars, 80.7 on SOP, 90.4 on In-Shop.
"""


if __name__ == '__main__':
    common.cli(main)
