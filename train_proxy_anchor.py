"""train_proxy_anchor.py -- Proxy-Anchor loss: the proxy of each class is an anchor for the whole batch.

Kim, Kim, Cho, Kwak. Proxy Anchor Loss for Deep Metric Learning. CVPR 2020. arXiv:2003.13911
Each class has a learnable vector, its proxy. The proxy is an anchor: all images of the batch are compared with it. In
Proxy-Anchor Eq. (4) it attracts its positives, the images of its class, and repels its negatives, which are all others.
Each proxy has a term log(1 + sum of exp(t)) over its positives, and one over its negatives, where t is larger for
harder images (farther positives, closer negatives). Such a term is a smooth maximum of 0 and all t. So the hardest
image gets the largest gradient, Proxy-Anchor Eq. (6).

    paper    code      flag      meaning
    x        z         -         (B, D) L2-normalized embeddings
    p        proxies   -         (C, D) learnable proxies, normalized inside the loss
    s(x,p)   s         -         (C, B) cosine similarities
    alpha    alpha     --alpha   scaling factor: the larger, the more the hardest images dominate
    delta    delta     --delta   margin: positives should be above delta, negatives below -delta

B images in a batch, C classes, D dimensions; common.py lists such letters, and
tests/papers/README.md those that other papers use for other things.

    python train_proxy_anchor.py [--dataset cub --data data]
"""
import torch
import torch.nn.functional as F

import common


@common.loss            # inside, half precision becomes float32
def proxy_anchor_loss(z, y, proxies, alpha=32.0, delta=0.1):
    """Proxy-Anchor Eq. (4):

    l(X) = 1/|P+| sum_{p in P+} log(1 + sum_{x in X_p+} exp(-alpha (s(x,p) - delta)))    pull
         + 1/|P|  sum_{p in P}  log(1 + sum_{x in X_p-} exp( alpha (s(x,p) + delta)))    push

    P are the proxies of all C classes (not P-: see note 3 at the end), P+ those of the classes in the batch.
    X_p+ are the images of the batch that have the class of p, and X_p- are all other images of the batch.

    z        (B, D) L2-normalized embeddings
    y        (B,)   class labels, 0 to C - 1
    proxies  (C, D) one per class, of any non-zero norm
    returns  scalar >= 0

    Its gradient is Eq. (6). With h+(x) = exp(-alpha (s(x,p) - delta)) and h-(x) = exp(alpha (s(x,p) + delta)), it is
        dl/ds(x,p) = -alpha / |P+|  *  h+(x) / (1 + sum of h+ over X_p+)    for an image x of the class of p,
        dl/ds(x,p) =  alpha / |P|   *  h-(x) / (1 + sum of h- over X_p-)    for an image x of another class.
    So the gradient of a positive depends on the other positives of p, too, and that of a negative on the other
    negatives of p.
    """
    y = common.check_labels(y, len(z), len(proxies))
    s = F.normalize(proxies, dim=1) @ z.T                # (C, B): a row for each proxy, a column for each image
    positive = torch.arange(len(proxies), device=y.device)[:, None] == y[None, :]      # (C, B): image b has class c
    num_present = positive.any(dim=1).sum()                                            # |P+|
    # Eq. (4), first sum, here over all C classes: a class that is not in the batch adds log 1 = 0.
    pull = log1p_sum_exp(-alpha * (s - delta), positive).sum() / num_present
    # Eq. (4), second sum: the mean is over all C classes.
    push = log1p_sum_exp(alpha * (s + delta), ~positive).mean()
    return pull + push


def log1p_sum_exp(t, keep):
    """log(1 + sum of exp(t)) of each row, over the columns where keep is true; computed without overflow. This is the
    softplus(LSE(t)) of Eq. (5), where LSE is log-sum-exp.  t, keep (C, B) -> (C,)"""
    t = t.masked_fill(~keep, float('-inf'))          # exp(-inf) = 0
    zero = t.new_zeros(len(t), 1)                    # exp(0) is the "1 +"
    return torch.cat([zero, t], dim=1).logsumexp(dim=1)                     # Eq. (5)


def new_proxies(num_classes, dim):
    """Proxies (C, D) from a normal distribution, so that their directions are uniform on the sphere.

    Their std, sqrt(2 / C), comes from the authors' code. The loss depends on their directions only, but the speed of
    learning depends on their length: Adam moves each coordinate by about the learning rate per step, so a longer proxy
    turns more slowly.
    """
    return torch.randn(num_classes, dim) * (2 / num_classes) ** 0.5


# ---- recipes: the defaults of flags for each dataset; --help explains the flags

# What `python train_proxy_anchor.py` runs: a small ResNet from scratch on the built-in dataset
SHAPES = dict(
    arch='resnet18', weights='none', pool='avg+max', dim=128, freeze_bn=False,
    image_size=32, resize=32, min_crop=1.0,
    epochs=10, batch_size=128, per_class=0,
    optimizer='adamw', lr=2e-3, weight_decay=1e-4, schedule='cosine', freeze_epochs=1, clip=0.0,
    eval_every=10, precision='fp32', proxy_lr_mult=10)
# The authors' command for a ResNet-50, with the 60 epochs of their code (the paper has 40). The learning rate is halved
# every 5 epochs, also while the backbone is frozen: when the backbone begins to learn, in epoch 6, the rate is lr / 2.
CUB = dict(
    arch='resnet50', weights='imagenet', pool='avg+max', dim=512, freeze_bn=True,
    image_size=224, resize=256, min_crop=0.08,
    epochs=60, batch_size=120, per_class=0,
    optimizer='adamw', lr=1e-4, weight_decay=1e-4, schedule='step', decay_epochs=5, decay_rate=0.5, freeze_epochs=5,
    clip=10.0, proxy_lr_mult=100)
# The authors' commands for BN-Inception, the only ones that they released for SOP and In-Shop; here with a ResNet-50
SOP = CUB | dict(freeze_bn=False, batch_size=180, lr=6e-4, decay_epochs=20, decay_rate=0.25, freeze_epochs=1,
                 eval_every=5)
DEFAULTS = {
    'shapes': SHAPES,
    # A folder with pretrained weights (--weights imagenet or FILE) has the recipe 'cub' instead, see common.recipe.
    'folder': SHAPES | common.FOLDER,
    'vectors': SHAPES | common.VECTORS,
    'cub': CUB,
    'cars': CUB | dict(decay_epochs=10),
    'sop': SOP,
    'inshop': SOP,
    # --protocol reality-check follows Musgrave et al., A Metric Learning Reality Check, ECCV 2020. They did not test
    # Proxy-Anchor; the batches and the learning rate of the proxies, 6000 x 1e-6, are those of their Proxy-NCA.
    'reality-check': common.PROTOCOL | dict(per_class=1, proxy_lr_mult=6000),
}


def get_args(argv=None):
    parser = common.parser(__doc__, NOTES, __file__)
    add = parser.add_argument_group('Proxy-Anchor').add_argument
    add('--alpha', type=float, default=32.0, help='scaling factor of the similarities')
    add('--delta', type=float, default=0.1, help='margin on the cosine similarity')
    add('--proxy-lr-mult', type=float, help='learning rate of the proxies, as a multiple of --lr')
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
    1. The main tables of the paper use BN-Inception. The recipes of the benchmarks use a ResNet-50.
    2. The paper does not state pooling, frozen epochs, gradient clipping, decay of the learning rate, weight decay,
       the batch size of its main tables (Table 5 varies it from 30 to 180), or how BatchNorm trains. All of these come
       from the released code, as do the 60 epochs on CUB and Cars. Weight decay also acts on the proxies. In issue 1 of
       its repository, an author says that average plus max pooling gains about one point of R@1 on CUB and Cars, and
       that max pooling alone gains as much.
    3. Some copies of the paper print P- under the second sum of Eq. (4), and in Eq. (5) and (6). It has to be P, the
       set of all proxies, which the text below Eq. (4) defines; the released code averages over all C as well.
What differs from the released code (github.com/tjddus9597/Proxy-Anchor-CVPR2020, 51db570)
    4. The released code reports its best epoch on the test set.
    5. With one or two classes the loss of the released code is wrong. It makes one-hot labels by label_binarize of
       scikit-learn, which then returns a single column, all zeros with one class.
Tables and figures of the paper
    Table 7 reports R@1 69.7 on CUB and 87.7 on Cars, with ResNet-50 and 512 dimensions. Tables 5 and 6 vary
    --batch-size, Table 7 --arch and --image-size, Fig. 5 --dim, Fig. 6 --alpha and --delta. The network is BN-Inception
    except in three rows of Table 7: GoogLeNet, ResNet-50 and ResNet-101.
    Eq. (1) to (3), Proxy-NCA and its gradient, are in train_proxynca_pp.py.
"""


if __name__ == '__main__':
    common.cli(main)
