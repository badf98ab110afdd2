"""common.py -- what the papers share and do not argue about.

No method is in this file: whatever a paper's method section describes stands in the train_*.py of
that paper. Sections 1 to 4 are worth reading beside any script. The others bring images in and
results out, and can be skipped.

    1. network        Embedder: ResNet trunk, pooling, linear head
    2. batches        which images meet in a batch
    3. training       optimizer, learning rate, the loop
    4. evaluation     Recall@K, R-precision, MAP@R
    5. images         decoding, cropping, flipping
    6. datasets       from files to images and labels
    7. runs           logs, checkpoints, weights, resuming
    8. command line   the flags that all scripts share
    9. processes      one for each GPU, under torchrun
   10. errors

Letters in the shapes of all files. In a paper's formula a letter may mean something else: the table of symbols
in its script says what.

    B  images in a batch      P  classes in a batch               x  images (B, 3, S, S)
    C  classes                K  images per class in a batch      f  feature maps (B, c, h, w)
    D  size of an embedding   S  side of a crop, in pixels        z  embeddings (B, D), of unit length
    N  images in a set        T  positions, h w, of a feature map with c channels
    G  images in a gallery, which queries are searched in         y  class labels (B,);  s  similarities
"""
import argparse
import hashlib
import json
import math
import os
import pickle
import random
import shutil
import sys
import time
import zipfile
from collections import Counter, OrderedDict
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from copy import copy
from datetime import timedelta
from functools import partial, reduce
from itertools import count, islice
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import torch.nn.functional as F
import torchvision
from PIL import Image, ImageOps
from torch import distributed, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import BatchSampler, RandomSampler, Sampler
from torchvision import transforms
from torchvision.utils import save_image

try:
    import fcntl
except ImportError:                                         # Windows has no such locks
    fcntl = None

# ---- 1. network ------------------------------------------------------------------------------------


class Embedder(nn.Module):
    """The network of every script: ResNet trunk -> pooling -> linear head -> unit length.

    arch        resnet18, resnet34, resnet50 or resnet101, as torchvision builds them
    dim         D, size of the embedding
    pool        avg, max, or avg+max (their sum), over the T positions of the feature map
    weights     imagenet (torchvision's IMAGENET1K_V1), none (random), or the path of a file
    freeze_bn   the statistics and the affine weights of BatchNorm do not change in training
    layer_norm  LayerNorm without affine weights, between pooling and head
    normalize   embeddings are scaled to unit length
    head_init   kaiming: normal with std sqrt(2 / D). default: torch's own, which for ResNet-50 and D = 512
                is about five times smaller
    precision   bf16: the trunk runs in bfloat16. Pooling, head and loss always run in float32.
    chunk       in training, the trunk takes so many images at a time, and computes each chunk once more in the
                backward pass. So it never holds the activations of more images; 0: the whole batch at once
    """

    def __init__(self, arch='resnet50', dim=512, pool='avg+max', weights='imagenet', freeze_bn=True,
                 layer_norm=False, normalize=True, head_init='kaiming', precision='fp32', chunk=0):
        super().__init__()
        # A checkpoint keeps this dict, from which the network can be built again.
        self.config = dict(arch=arch, dim=dim, pool=pool, freeze_bn=freeze_bn, layer_norm=layer_norm,
                           normalize=normalize, head_init=head_init)
        self.pool, self.normalize, self.precision, self.chunk = pool, normalize, precision, chunk
        resnet = load_resnet(arch, weights)
        channels = resnet.fc.in_features                                 # c
        self.trunk = trunk_of(resnet)
        self.trunk.to(memory_format=torch.channels_last)
        self.norm = nn.LayerNorm(channels, elementwise_affine=False) if layer_norm else nn.Identity()
        self.linear = nn.Linear(channels, dim)
        if head_init == 'kaiming':
            nn.init.kaiming_normal_(self.linear.weight, mode='fan_out')
            nn.init.zeros_(self.linear.bias)
        self.frozen = [m for m in self.trunk.modules() if isinstance(m, nn.BatchNorm2d)] if freeze_bn else []
        for module in self.frozen:
            module.requires_grad_(False)
        self.trunk_weights = [p for p in self.trunk.parameters() if p.requires_grad]
        self.train()                        # once, so that frozen BatchNorm is in evaluation mode from the start

    def train(self, mode=True):
        super().train(mode)
        for module in self.frozen:          # in training mode their statistics would follow the batches
            module.eval()
        return self

    def train_trunk(self, on):
        """Turns the trunk's gradients on or off: they are off in the first --warmup epochs.

        Frozen BatchNorm is not among trunk_weights: it never trains."""
        for weight in self.trunk_weights:
            weight.requires_grad_(on)

    @contextmanager
    def keeping_statistics(self, on=True):
        """While it lasts, trained BatchNorm still normalises by the batch, but its running statistics stay."""
        layers = [module for module in self.trunk.modules() if on and hasattr(module, 'running_mean')]
        before = [layer.momentum for layer in layers]       # the share that a batch has in the running statistics
        for layer in layers:
            layer.momentum = 0.0
        yield
        for layer, momentum in zip(layers, before):
            layer.momentum = momentum

    def features(self, x):
        """Images (B, 3, S, S) -> last feature map (B, c, h, w); behind a ReLU, so never negative."""
        # Images up to 16 px stay in float32: they reach the last stage as one pixel, where bfloat16 gradients of
        # convolutions with stride 2 are wrong on a CPU, and at times NaN (seen in torch 2.14).
        bf16 = self.precision == 'bf16' and min(x.shape[2:]) > 16
        B = len(x)
        x = own_share(x).contiguous(memory_format=torch.channels_last)  # under torchrun; else the whole batch
        with torch.autocast(x.device.type, torch.bfloat16, enabled=bf16):
            if self.chunk and torch.is_grad_enabled():
                f = torch.cat([checkpoint(self.trunk, part, use_reentrant=False) for part in x.split(self.chunk)])
            else:
                f = self.trunk(x)
        return gather(f, B)

    def pool_features(self, f):
        """(B, c, h, w) -> (B, c)"""
        f = at_least_float32(f)
        pooling = dict(avg=F.adaptive_avg_pool2d, max=F.adaptive_max_pool2d)
        return sum(pooling[name](f, 1) for name in self.pool.split('+')).flatten(1)

    def project(self, p):
        """Pooled features (B, c) -> embeddings (B, D), of unit length unless normalize=False"""
        z = self.linear(self.norm(p))
        return F.normalize(z, dim=1) if self.normalize else z

    def head(self, f):
        """Feature map (B, c, h, w) -> embeddings (B, D): pooling, LayerNorm if there is one, linear head"""
        return self.project(self.pool_features(f))

    def forward(self, x):
        return self.head(self.features(x))


def trunk_of(resnet):
    """A torchvision ResNet without its last two children, which are its own pooling and classifier"""
    return nn.Sequential(OrderedDict(list(resnet.named_children())[:-2]))


def at_least_float32(*tensors):
    """Raises half precision to float32, and all tensors to the widest type among them, for a loss: exp() overflows
    float16 above 11, and bfloat16 has two to three digits. One tensor gives a tensor, several give a list."""
    dtype = reduce(torch.promote_types, (t.dtype for t in tensors), torch.float32)
    raised = [t.to(dtype) for t in tensors]
    return raised if len(raised) > 1 else raised[0]


# ---- 2. batches ------------------------------------------------------------------------------------


class BalancedSampler(Sampler):
    """Batches of P classes x K images, class by class, as lists of indices.

    labels      (N,) class of each image
    batch_size  P K; with fewer than P classes, a batch holds all classes and is smaller
    per_class   K
    generator   torch.Generator; None is torch's global one

    An epoch has N // (P K) batches, at least one. No batch has a class twice, and all classes come up about equally
    often. Nor has a batch an image twice, and the images of a class come up about equally often; only in a class of
    fewer than K images some repeat.
    """

    def __init__(self, labels, batch_size, per_class, generator=None):
        if per_class < 1 or batch_size < 1 or batch_size % per_class:
            raise UsageError(f'--batch-size {batch_size} is not a multiple of --per-class {per_class}')
        order, counts = labels.argsort(stable=True), torch.bincount(labels)
        self.members = [part.tolist() for part in order.split(counts.tolist()) if len(part)]    # indices, per class
        self.per_class, self.generator = per_class, generator
        self.classes = min(batch_size // per_class, len(self.members))
        self.batch_size = self.classes * per_class
        self.batches = max(1, len(labels) // self.batch_size)
        single = int((counts == 1).sum())
        if single and per_class > 1:
            print(f'warning: {single} of {len(self.members)} training classes have one image only: the sampler repeats '
                  f'it, so its positives are other crops of the same image', file=sys.stderr)

    def __len__(self):
        return self.batches

    def __iter__(self):
        def shuffled(items):
            return [items[i] for i in torch.randperm(len(items), generator=self.generator).tolist()]

        def deal(deck, items, number):
            """Takes `number` items from the top of a deck of cards. If fewer are left, all other items are shuffled and
            put below them; if there are fewer items than that, they repeat."""
            while len(deck) < number:
                deck += shuffled([item for item in items if item not in deck] or items)
            return [deck.pop(0) for _ in range(number)]

        class_deck, image_decks = [], [[] for _ in self.members]
        for _ in range(self.batches):
            classes = deal(class_deck, range(len(self.members)), self.classes)
            yield [i for c in classes for i in deal(image_decks[c], self.members[c], self.per_class)]


def make_sampler(args, labels):
    """Batches of P x K images. With --per-class 0: all images in random order, cut into batches; an incomplete last
    batch is dropped."""
    if not args.per_class:
        return BatchSampler(RandomSampler(labels), min(args.batch_size, len(labels)), drop_last=True)
    wanted, present = args.batch_size // args.per_class, len(labels.unique())
    # A small dataset may have fewer classes than the defaults ask for. That is an error only if they were typed.
    if wanted > present and args.changed & {'batch_size', 'per_class'}:
        raise UsageError(f'--batch-size {args.batch_size} --per-class {args.per_class} asks for {wanted} classes per '
                         f'batch, the training set has {present}; lower --batch-size or raise --per-class')
    return BalancedSampler(labels, args.batch_size, args.per_class)


# ---- 3. training -----------------------------------------------------------------------------------


def make_optimizer(args, groups, **options):
    """The optimizer that --optimizer names, over parameter groups that may have a learning rate of their own."""
    kinds = dict(adamw=torch.optim.AdamW, adam=torch.optim.Adam, sgd=torch.optim.SGD, rmsprop=torch.optim.RMSprop)
    if args.optimizer in ('sgd', 'rmsprop'):
        options = dict(momentum=args.momentum) | options
    if args.optimizer != 'rmsprop':                         # torch has no fused RMSprop
        options = dict(fused=args.device.type in ('cpu', 'cuda')) | options
    return kinds[args.optimizer](groups, lr=args.lr, weight_decay=args.weight_decay, **options)


def learning_rate_factor(iteration, args, per_epoch, total):
    """What all learning rates are multiplied with at `iteration`, which runs from 0 to total - 1.

    step      --decay-rate to the power of the number of decays, one every --decay-epochs
    cosine    half a cosine, from 1 to 0; but in the first tenth of the run, or the first 100 iterations if that is
              less, not more than a ramp from 0 to 1
    constant  1
    """
    if args.schedule == 'step':
        epoch = iteration // per_epoch
        return args.decay_rate ** (epoch // args.decay_epochs)
    if args.schedule == 'cosine':
        ramp = max(1, min(100, total // 10))
        return min((iteration + 1) / ramp, 0.5 * (1 + math.cos(math.pi * iteration / max(1, total))))
    return 1.0


def train(args, model, data, step, optimizer, learned=None, sampler=None):
    """Trains, evaluates, logs and saves. Returns the last row of the log, a dict; with --fold the best row.

    step       step(images, labels) -> scalar loss. This is all that a method adds to the loop. images
               (B, 3, S, S) are the whole batch, augmented and normalised; labels (B,); both on the device
    optimizer  over the weights of the model and of whatever else the method learns
    learned    {name: parameter or module}: what the method learns beside the model; it goes into the checkpoint
    sampler    yields lists of indices; None: the batches of --batch-size and --per-class
    """
    sampler = sampler or make_sampler(args, data.train.labels)
    if args.show_batch:
        return show_batch(args, data, sampler)
    per_epoch = len(sampler)
    total = min(args.epochs * per_epoch, args.steps or math.inf)
    epochs = math.ceil(total / per_epoch)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, partial(learning_rate_factor, args=args, per_epoch=per_epoch, total=total))
    parts = dict(model=model, optimizer=optimizer, schedule=schedule,
                 learned=nn.ParameterDict(learned or {}))   # a ParameterDict accepts modules, too
    folder = from_main_process(lambda: run_folder(args))
    # A Run (section 7) keeps the log and the checkpoint: it knows the evaluated rows, the epochs that are done, the
    # number of steps in all, and the epoch at which this process started.
    lock = nullcontext() if rank() else locked(folder)
    with lock, Run(args, folder, data, total, parts) as run, explaining(args):
        print_recipe(args, model, data, sampler, epochs, folder)
        if not run.rows:                                    # the network before training is epoch 0
            run.record(dict(epoch=0, loss=None, images_per_second=None) | evaluate(model, data))
        while run.epoch < epochs and not run.out_of_patience():         # run.record counts run.epoch up
            set_seed(seed_of(args, run.epoch + 1))
            model.train()
            model.train_trunk(run.epoch >= args.warmup)
            row = train_epoch(args, run, data, sampler, step, optimizer, schedule)
            if row['epoch'] % args.eval_every == 0 or row['epoch'] == epochs:
                row |= evaluate(model, data)
            run.record(row)
        run.print_summary()
    return run.result()


def seed_of(args, epoch):
    """Each epoch has a seed of its own, so a resumed run draws what the uninterrupted one would have drawn. The factor
    keeps the epochs of different --seed apart."""
    return args.seed * 100_003 + epoch


def train_epoch(args, run, data, sampler, step, optimizer, schedule):
    """Trains the next epoch of a run. Returns its row: epoch, loss, no_positive and images_per_second.

    no_positive is the share of anchors that have no positive in their batch.
    """
    weights = [weight for group in optimizer.param_groups for weight in group['params']]
    epoch, losses, without_positive, seen, start = run.epoch + 1, [], 0, 0, time.time()
    uncounted = 0                                           # images before `start`
    fresh = epoch in (run.start + 1, args.warmup + 1)       # the first epoch here, or the first that trains the trunk
    steps = min(len(sampler), run.total - schedule.last_epoch)          # last_epoch, torch's name, counts iterations
    lists = islice(sampler, steps)
    for number, (x, y) in enumerate(batches(data.train, lists, args.device, augment=args), start=1):
        loss = step(x, y)
        optimizer.zero_grad()
        loss.backward()
        average_gradients(weights)                          # over the processes of torchrun; else nothing
        if args.clip:
            nn.utils.clip_grad_value_(weights, args.clip)
        optimizer.step()
        schedule.step()
        losses.append(loss.detach())
        same = (y[:, None] == y).sum(dim=1)                             # (B,) images of one's class, oneself included
        without_positive += (same == 1).sum()
        seen += len(y)
        if args.compile and number == 1 and fresh:          # the trunk is compiled anew when it begins to train
            live(f'first step, with compiling: {time.time() - start:.0f} s; img/s leaves it out', done=True)
            start, uncounted = time.time(), seen
        if number % 20 == 0 or number == steps:             # rarely, because the program waits here for the GPU
            finite = torch.stack(losses).isfinite()
            if not finite.all():
                first = int(finite.logical_not().nonzero()[0])
                raise UsageError(f'the loss is {losses[first].item()} at epoch {epoch}, step {first + 1} of {steps}; '
                                 f'the last checkpoint is unharmed; try a lower --lr, or --precision fp32')
            live(f'{epoch:7d} {torch.stack(losses).mean():7.4f}   step {number} of {steps}')
        left = run.total - schedule.last_epoch
        if left and number == 20 and fresh:
            minutes = (time.time() - start) / number * left / 60
            live(f'{left:,} steps to come, about {minutes:.1f} min, not counting evaluations', done=True)
    return dict(epoch=epoch, loss=torch.stack(losses).mean().item(), no_positive=float(without_positive) / seen,
                images_per_second=(seen - uncounted) / (time.time() - start))


# ---- 4. evaluation ---------------------------------------------------------------------------------


@torch.no_grad()
def embed(model, images, batch_size=128):
    """Embeddings of a whole set, from centre crops -> (N, D) float32 on the CPU, in the order of the images."""
    device, training = next(model.parameters()).device, model.training
    model.eval()
    lists = [part.tolist() for part in torch.arange(len(images)).split(batch_size)]
    z = torch.cat([model(x).float().cpu() for x, _ in batches(images, lists, device)])
    model.train(training)
    return z


@torch.no_grad()
def retrieval_metrics(query, query_labels, gallery=None, gallery_labels=None, ks=(1, 2, 4, 8)):
    """Recall@K, R-precision and MAP@R, by exact search with the cosine similarity.

    query    (N, D), query_labels (N,);  without a gallery the queries are searched in themselves
    gallery  (G, D), gallery_labels (G,)
    returns  {'R@1': ..., 'RP': ..., 'MAP@R': ...} in percent; and 'unmatched', a number, if rule 3 applies

    A match of a query is another image of its class; R is the number of its matches in the gallery.
    R@K    share of the queries that have a match among their K nearest
    RP     share of matches among the R nearest, averaged over the queries
    MAP@R  mean of P(i) over the R nearest, averaged over the queries. P(i) is the precision among the first i
           if the i-th is a match, and else 0: Reality Check Eq. (3) and (4) (Musgrave et al., ECCV 2020)

    1. A query is excluded from its own results by its index. It is not always the first hit: that may be a
       duplicate.
    2. Among equal similarities, non-matches come first. Only retrieved images are put into this order; where more
       tie than are retrieved, a fixed random order decides which are. So a network that maps all images to one
       point scores about chance or less, not 100.
    3. A query without a match is a miss in R@K, is left out of RP and MAP@R, and is counted as 'unmatched'.
    """
    within = gallery is None                                             # queries are searched in themselves
    if within:
        gallery, gallery_labels = query, query_labels
    if not len(query) or len(gallery) < 1 + within:
        raise UsageError(f'nothing to retrieve: {len(query)} queries, {len(gallery)} images to search in')
    if not (query.isfinite().all() and gallery.isfinite().all()):
        raise UsageError('some embeddings are NaN or infinite; in training, a lower --lr may help')
    query_labels, gallery_labels = query_labels.to(query.device), gallery_labels.to(query.device)
    present = torch.bincount(gallery_labels, minlength=int(query_labels.max()) + 1)     # (C,) gallery images of a class
    matches = present[query_labels] - int(within)                        # (N,) R of each query
    depth = min(max(*ks, int(matches.max())), len(gallery) - within)    # enough for the largest K and R
    found, precision, average = {k: 0 for k in ks}, [], []
    for rows, s, index in k_nearest(query, None if within else gallery, depth):
        hit = gallery_labels[index] == query_labels[rows, None]          # (b, depth)
        hit = hit.gather(1, (s - 1e-6 * hit).argsort(dim=1, descending=True))           # rule 2
        for k in ks:
            found[k] += int(hit[:, :k].any(dim=1).sum())
        r = matches[rows]                                                # (b,)
        hit, r = hit[r > 0, :int(r.max())], r[r > 0, None]               # rule 3; r is now (b', 1)
        rank = torch.arange(1, hit.shape[1] + 1, device=hit.device)
        hit = hit & (rank <= r)                                          # among the R nearest
        p = hit.cumsum(dim=1) / rank * hit                               # Reality Check Eq. (4)
        average += (p.sum(dim=1) / r[:, 0]).tolist()                     # Reality Check Eq. (3)
        precision += (hit.sum(dim=1) / r[:, 0]).tolist()
    metrics = {f'R@{k}': 100 * found[k] / len(query) for k in ks}
    metrics |= {'RP': 100 * sum(precision) / max(1, len(precision)), 'MAP@R': 100 * sum(average) / max(1, len(average))}
    return metrics if len(average) == len(query) else metrics | dict(unmatched=len(query) - len(average))


def k_nearest(query, gallery, k):
    """Yields, for b queries at a time, their rows (b,), and the cosines and positions of their k nearest, both (b, k).

    query    (N, D)
    gallery  (G, D) and k at most G; or None: queries are searched in themselves, each without itself, k at most N - 1

    On a CPU the search is that of faiss, where it is installed; else a product of matrices.
    """
    within = gallery is None
    query = F.normalize(query.float(), dim=1)
    # Files are sorted by class, and of equal similarities a search returns the first. So the gallery is shuffled.
    gallery = query if within else F.normalize(gallery.float(), dim=1)
    order = torch.randperm(len(gallery), generator=torch.Generator().manual_seed(0)).to(query.device)
    gallery, search = gallery[order], matrix_search
    if gallery.device.type == 'cpu' and sys.platform != 'darwin':        # on a Mac, two OpenMP runtimes would crash
        with suppress(ImportError):
            from faiss import METRIC_INNER_PRODUCT, knn
            search = partial(knn, metric=METRIC_INNER_PRODUCT)
    for rows in torch.arange(len(query), device=query.device).split(max(1, min(4096, 2 ** 28 // len(gallery)))):
        s, index = map(torch.as_tensor, search(query[rows], gallery, k + within))       # (b, G) takes 1 GiB at most
        index = order[index]
        if within:
            drop = index == rows[:, None]                                # by index: a duplicate is another image
            drop[:, -1] |= ~drop.any(dim=1)                              # behind many duplicates, it was not found
            s, index = s[~drop].view(-1, k), index[~drop].view(-1, k)
        yield rows, s, index


def matrix_search(query, gallery, k):
    return (query @ gallery.T).topk(k, dim=1)


def mean_similarities(z, y):
    """Mean cosine of all positive pairs, and of all negative pairs; z (N, D), y (N,) -> two numbers.

    A number is None if there is no such pair. The cosines of all pairs of vectors, each with itself included, add up
    to the squared length of the sum of the vectors. So no (N, N) matrix is needed.
    """
    z, n = F.normalize(z.double(), dim=1), torch.bincount(y).double()    # n (C,) images of each class
    sums = z.new_zeros(len(n), z.shape[1]).index_add_(0, y, z)           # (C, D)
    # - len(z): the N pairs of a vector with itself are left out
    positive, pairs = sums.square().sum().item() - len(z), int(n.square().sum()) - len(z)
    negative, others = z.sum(dim=0).square().sum().item() - len(z) - positive, len(z) * (len(z) - 1) - pairs
    return positive / pairs if pairs else None, negative / others if others else None


def evaluate(model, data):
    """What a row of the log says about the test set: retrieval, and the mean similarities s+ and s- of queries.

    s+ is missing where no two queries have the same class.
    """
    return score(data, *embed_test(model, data))


def embed_test(model, data):
    """Embeddings of the queries (N, D), and of the gallery (G, D) or None where queries are searched in themselves.

    They are where the search will run: on a CUDA device if the model is on one, else on the CPU.
    """
    device = next(model.parameters()).device
    where = device if device.type == 'cuda' else 'cpu'
    z = embed(model, data.query).to(where)
    return z, None if data.gallery is data.query else embed(model, data.gallery).to(where)


def score(data, z, gallery=None):
    """The row of `evaluate` for these embeddings of data.query and, where it is apart, of data.gallery"""
    gallery_labels = None if gallery is None else data.gallery.labels
    metrics = retrieval_metrics(z, data.query.labels, gallery, gallery_labels, DATASETS[data.name]['ks'])
    similarities = zip(('s+', 's-'), mean_similarities(z, data.query.labels.to(z.device)))
    return metrics | {name: s for name, s in similarities if s is not None}


# ---- 5. images -------------------------------------------------------------------------------------

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)                 # ImageNet's, RGB


class Images:
    """N decoded images of any height and width, with their labels.

    pixels      uint8, image after image, each (height, width, 3); usually a file mapped into memory
    sizes       (N, 2) height and width
    labels      (N,) LongTensor, 0..C-1
    image_size  S, side of the square crops that the network gets
    classes     C names;  groups  (N,) super-classes, or None where the dataset has none
    paths       N names of files; 'image 0', ... where images are drawn and not read
    """

    def __init__(self, pixels, sizes, labels, image_size, classes=(), groups=None, paths=()):
        self.pixels, self.sizes, self.labels = pixels, np.asarray(sizes), labels.long()
        self.image_size, self.classes, self.groups = image_size, list(classes), groups
        self.paths = np.array([str(path) for path in paths] or [f'image {i}' for i in range(len(labels))])
        self.ends = 3 * self.sizes.astype(np.int64).prod(axis=1).cumsum()

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        """(height, width, 3) uint8"""
        height, width = self.sizes[i]
        return self.pixels[self.ends[i] - 3 * height * width:self.ends[i]].reshape(height, width, 3)

    @property
    def num_classes(self):
        return int(self.labels.max()) + 1

    def subset(self, indices):
        """The images at these positions, a LongTensor (n,), with their classes numbered anew from 0"""
        part, rows = copy(self), indices.numpy()
        part.sizes, part.ends, part.paths = self.sizes[rows], self.ends[rows], self.paths[rows]
        kept, part.labels = self.labels[indices].unique(return_inverse=True)
        part.classes = [self.classes[c] for c in kept.tolist()] if self.classes else []
        part.groups = None if self.groups is None else self.groups[indices]
        return part

    def crop(self, i, box, out):
        """Writes a crop of image i to `out` (S, S, 3): a box (top, left, height, width), or if None the centre."""
        side = len(out)
        top, left, height, width = box or (*(round((n - side) / 2) for n in self.sizes[i].tolist()), side, side)
        part = torch.from_numpy(np.array(self[i][top:top + height, left:left + width]))
        if (height, width) != (side, side):                 # resized as torchvision's transforms do it
            part = F.interpolate(part.permute(2, 0, 1)[None], (side, side), mode='bilinear', antialias=True)
            part = part[0].permute(1, 2, 0)
        out.copy_(part)


def batches(images, index_lists, device, augment=None):
    """Yields x (B, 3, S, S), normalised, and y (B,), both on the device, for each list of indices.

    augment  None for centre crops; else an object with min_crop, flip and jitter, the flags of these names

    Threads crop the next batch while the device works on this one. They draw nothing: all random numbers
    come from the caller's thread in a fixed order, whatever the number of threads.
    """
    mean, std = (torch.tensor(values, device=device)[:, None, None] for values in (MEAN, STD))
    gpu = device.type == 'cuda'

    def start(indices):
        boxes, flips = [None] * len(indices), torch.zeros(len(indices), dtype=torch.bool)
        if augment:
            scale, ratio = (augment.min_crop, 1.0), (3 / 4, 4 / 3)
            boxes = [transforms.RandomResizedCrop.get_params(torch.empty(3, *size, device='meta'), scale, ratio)
                     for size in images.sizes[indices].tolist()]
            flips = torch.rand(len(indices)) < (0.5 if augment.flip else 0)
        x = torch.empty(len(indices), images.image_size, images.image_size, 3, dtype=torch.uint8, pin_memory=gpu)
        return x, flips, images.labels[indices], pool.map(images.crop, indices, boxes, x)

    def finish(x, flips, y, crops):
        list(crops)                                         # waits for the threads
        if gpu:                                             # from pinned memory, copies need not wait for the GPU
            flips, y = flips.pin_memory(), y.pin_memory()
        x, flips, y = (t.to(device, non_blocking=gpu) for t in (x, flips, y))
        x = x.permute(0, 3, 1, 2) / 255                     # (B, 3, S, S)
        x = torch.where(flips[:, None, None, None], x.flip(3), x)
        if augment and augment.jitter:
            x = jitter_colours(x, augment.jitter)
        return (x - mean) / std, y

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        waiting = None
        for indices in index_lists:
            ready, waiting = waiting, start(indices)
            if ready:
                yield finish(*ready)
        if waiting:
            yield finish(*waiting)


def jitter_colours(x, strength):
    """Brightness, contrast and saturation as in torchvision's ColorJitter, each image with factors of its own.

    x (B, 3, S, S) in [0, 1]; factors lie evenly between 1 - strength and 1 + strength.
    """
    grey = transforms.functional.rgb_to_grayscale                        # (B, 3, S, S) -> (B, 1, S, S)
    # The three blend an image with black, with its mean grey and with its grey version, in an order drawn per batch.
    others = [torch.zeros_like, lambda x: grey(x).mean(dim=(1, 2, 3), keepdim=True), grey]
    for i in torch.randperm(3).tolist():
        factor = (1 + strength * (2 * torch.rand(len(x), 1, 1, 1) - 1)).to(x.device)
        x = (factor * x + (1 - factor) * others[i](x)).clamp(0, 1)
    return x


def save_pictures(path, x, columns):
    """Writes a PNG file with the pictures x (n, 3, H, W), from 0 to 1, `columns` of them in a row."""
    with written_whole(path) as file:
        save_image(x, file, format='png', nrow=columns, pad_value=1)


def as_pictures(x):
    """Normalised crops (n, 3, S, S), as the network gets them, back to values from 0 to 1"""
    return x * x.new_tensor(STD)[:, None, None] + x.new_tensor(MEAN)[:, None, None]


def show_batch(args, data, sampler):
    """Saves the crops of the first batch of training; with --per-class, a row for each class."""
    set_seed(seed_of(args, epoch=1))
    x, _ = next(batches(data.train, islice(sampler, 1), args.device, augment=args))
    save_pictures(args.show_batch, as_pictures(x), args.per_class if args.per_class > 1 else 8)
    print(f'{len(x)} training crops: {args.show_batch}')


def decode(paths, resize, what, cache):
    """Decodes images once, shorter side `resize`, into a file that the next run just maps into memory.

    The file holds the pixels of all images and then their sizes, (N, 2) int32. Its name has a hash of the
    images' paths, lengths and times, so that a changed image is decoded anew: st_ctime is set by the system
    at every change, even where a program puts the old st_mtime back. Returns pixels and sizes.
    """
    key = hashlib.sha256(repr(resize).encode())
    for path in paths:
        stat = os.stat(path)
        key.update(repr((os.path.abspath(path), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)).encode())
    file = Path(cache) / f'{what.replace(" ", "-")}-{resize}-{key.hexdigest()[:16]}.bin'
    if decoded := read_decoded(file, len(paths)):
        return decoded
    with locked(file.parent, wait=True):                    # of two runs, the second waits
        if decoded := read_decoded(file, len(paths)):
            return decoded
        if file.exists():
            print(f'{file} is damaged: decoding anew', file=sys.stderr)
        print(f'{what}: decoding {len(paths):,} images into {file}', flush=True)
        sizes = []
        with ThreadPoolExecutor(os.cpu_count()) as pool, written_whole(file) as out:
            for start in range(0, len(paths), 512):         # in pieces, or memory would hold all images at once
                for pixels in pool.map(partial(read_image, side=resize), paths[start:start + 512]):
                    out.write(pixels.tobytes())
                    sizes.append(pixels.shape[:2])
                live(f'{len(sizes):,} of {len(paths):,}, {out.tell() / 1e6:,.0f} MB', done=len(sizes) == len(paths))
            out.write(np.array(sizes, dtype=np.int32).tobytes())
    return read_decoded(file, len(paths))


def read_decoded(file, count):
    """Pixels and sizes from a file of `decode`; None if there is none, or its length is not what its sizes say."""
    length = file.stat().st_size if file.exists() else 0
    if length > 8 * count:
        raw = np.memmap(file, dtype=np.uint8, mode='r')
        sizes = np.array(raw[-8 * count:]).view(np.int32).reshape(-1, 2).astype(np.int64)
        # As floats, because the numbers of a damaged file may be too large for an integer.
        if (sizes > 0).all() and 3 * sizes.astype(float).prod(axis=1).sum() + 8 * count == length:
            return raw, sizes
    return None


def read_image(path, side):
    """(height, width, 3) uint8, RGB, shorter side `side`"""
    try:
        # Only the formats of IMG_EXTENSIONS, whatever a file is called: for some others PIL starts a program.
        with Image.open(path, formats=['JPEG', 'PNG', 'PPM', 'BMP', 'TIFF', 'WEBP']) as image:
            if max(image.size) > 50 * min(image.size):
                raise ValueError(f'{image.size[0]} x {image.size[1]} pixels, one side over 50 times the other')
            return np.asarray(transforms.functional.resize(to_rgb(image), side))
    except Exception as error:                              # every image format has errors of its own
        raise UsageError(f'cannot read the image {path}: {error}; replace or remove it') from None


def to_rgb(image):
    """A PIL image, upright as its EXIF data say, in 8-bit RGB; 16 and 32 bits of grey are scaled, not cut off."""
    image = ImageOps.exif_transpose(image)
    if image.mode[0] in 'IF':
        grey = np.asarray(image, dtype=np.float64)
        if not np.isfinite(grey).all():
            raise ValueError('some of its pixels are NaN or infinite')
        low, high = (0, 65535) if image.mode[0] == 'I' and 0 <= grey.min() and grey.max() <= 65535 else \
            (grey.min(), grey.max())
        image = Image.fromarray((255 * (grey - low) / max(high - low, 1e-12)).round().astype(np.uint8))
    return image.convert('RGB')


# ---- 6. datasets -----------------------------------------------------------------------------------

# ks: the K of Recall@K in the literature. counts: images and classes of each split, checked on loading.
DATASETS = {
    'shapes': dict(ks=(1, 2, 4, 8)),
    'folder': dict(ks=(1, 2, 4, 8), layout='a folder of images for each class'),
    'cub': dict(ks=(1, 2, 4, 8), counts=dict(train=(5864, 100), query=(5924, 100)),
                layout='CUB_200_2011/ with images.txt and images/',
                site='https://www.vision.caltech.edu/datasets/cub_200_2011/'),
    'cars': dict(ks=(1, 2, 4, 8), counts=dict(train=(8054, 98), query=(8131, 98)),
                 layout='cars_annos.mat and car_ims/000001.jpg ... 016185.jpg',
                 site='https://ai.stanford.edu/~jkrause/cars/car_dataset.html'),
    'sop': dict(ks=(1, 10, 100, 1000), counts=dict(train=(59551, 11318), query=(60502, 11316)),
                layout='Stanford_Online_Products/ with Ebay_train.txt and Ebay_test.txt',
                site='https://cvgl.stanford.edu/projects/lifted_struct/'),
    'inshop': dict(ks=(1, 10, 20, 30, 40, 50),
                   counts=dict(train=(25882, 3997), query=(14218, 3985), gallery=(12612, 3985)),
                   layout='Eval/list_eval_partition.txt and Img/img/',
                   site='https://mmlab.ie.cuhk.edu.hk/projects/DeepFashion/InShopRetrieval.html'),
}


def load_dataset(name, root='data', resize=None, image_size=None, cache='cache', known=None, fold=None):
    """A dataset as an object with .train, .query and .gallery, each an `Images`.

    name        shapes, cub, cars, sop, inshop or folder
    root        folder that holds what the dataset's site unpacks; not used by shapes
    resize      shorter side of the stored images, pixels;  image_size  side of the square crops. If only one of them
                is given, the other follows from it; if neither is, both are those of the training recipes.
    cache       folder for the decoded images
    known       for an evaluation, which reads no .train: names of the classes that a network knows; () for none.
                Of a folder, they are left out of the test set; without train/ and test/ all others belong to it.
    fold        'i/n': the test set is not read, and block i of n of the training classes takes its place
    `gallery is query` where the test set is searched in itself. Train labels are 0..C-1; query and gallery
    share theirs. Raises UsageError if files or counts are not as published.
    """
    if name not in DATASETS:
        raise UsageError(f'there is no dataset {name!r}, but {", ".join(DATASETS)}')
    scale = BASE[name]['resize'] / BASE[name]['image_size']
    image_size = image_size or (round(resize / scale) if resize else BASE[name]['image_size'])
    resize = resize or round(image_size * scale)
    if resize < image_size:
        raise UsageError(f'--resize {resize} is smaller than --image-size {image_size}: crops are cut from that image')
    if name == 'shapes':
        data = SimpleNamespace(name=name, **draw_shapes(resize, image_size))
        return hold_out(data, fold) if fold else data
    splits = list_images(name, root, known)
    if fold:
        splits = dict(train=splits['train'])
    if name == 'folder':
        warn_of_copies(splits)
    if known is not None:                                   # an evaluation need not wait for training images
        splits.pop('train', None)
    data = SimpleNamespace(name=name)
    for split, rows in splits.items():
        paths, classes, groups = zip(*rows)
        # Query and gallery are numbered together.
        together = rows if split == 'train' else splits['query'] + splits.get('gallery', [])
        numbers = {class_: i for i, class_ in enumerate(sorted({row[1] for row in together}))}
        pixels, sizes = decode(paths, resize, f'{name} {split}', cache)
        labels = torch.tensor([numbers[class_] for class_ in classes])
        groups = None if groups[0] is None else torch.tensor(groups)
        setattr(data, split, Images(pixels, sizes, labels, image_size, numbers, groups, paths))
    if fold:
        return hold_out(data, fold)
    data.gallery = getattr(data, 'gallery', data.query)
    return data


def hold_out(data, fold):
    """Splits the training set of `data`: block i of its n blocks of classes validates, the others train.

    fold  'i/n'. The blocks are contiguous in the order of the classes, and of equal size up to one class, as in
          Section 3.3 of the Reality Check, which has four.
    """
    i, n = map(int, fold.split('/'))
    block = torch.arange(data.train.num_classes) * n // data.train.num_classes          # (C,)
    if torch.bincount(block, minlength=n).min() < 2:
        raise UsageError(f'--fold {fold} needs at least two classes in each block, and there are '
                         f'{data.train.num_classes} training classes')
    held = block[data.train.labels] == i                                                # (N,)
    data.query = data.gallery = data.train.subset(held.nonzero()[:, 0])
    data.train = data.train.subset((~held).nonzero()[:, 0])
    return data


def list_images(name, root, known=None):
    """{split: rows [path, class name, super-class]} for train, query and, where there is one, gallery. Refuses counts
    that are not the published ones, and images that are not there."""
    root, facts = Path(root).expanduser(), DATASETS[name]

    def problem(text):
        site = f", see README and {facts['site']}" if 'site' in facts else ''
        return UsageError(f'{name}: {text}; {root.resolve()}, which --data names, should hold {facts["layout"]}{site}')

    if not root.is_dir():
        raise problem('there is no such folder')
    try:
        rows = read_folder(root, known) if name == 'folder' else READERS[name](root)
    except FileNotFoundError as error:
        raise problem(f'{error.filename} is missing') from None
    except ImportError:
        raise UsageError("the annotation of Cars196 needs scipy: pip install 'torchvision[scipy]'") from None
    except Exception as error:                              # cut short, or a web page under its name
        raise problem(f'its annotation is damaged ({error})') from None
    splits = {}
    for split, *row in rows:
        splits.setdefault(split, []).append(row)
    check_images(name, root, splits, known, problem)
    return splits


def check_images(name, root, splits, known, problem):
    """Raises problem(text) where counts are not the published ones, images are not there, or a test class trains."""
    facts, count = DATASETS[name], '{:,} images of {:,} classes'.format
    found = {split: (len(part), len({row[1] for row in part})) for split, part in splits.items()}
    for split, expected in facts.get('counts', {}).items():
        if found.get(split) != expected:
            raise problem(f'{split} has {count(*found.get(split, (0, 0)))}, expected are {count(*expected)}')
    if name == 'folder' and find_folders(root).keys() >= {'query', 'gallery'} and 'gallery' not in found:
        raise problem('there is nothing to search in: gallery/ has no images of classes that are new to the network')
    for split in ('train', 'query') if known is None else ('query',):
        if found.get(split, (0, 0))[1] < 2:
            raise problem(f'{split} has {count(*found.get(split, (0, 0)))}, at least two classes are needed')
    paths = [row[0] for part in splits.values() for row in part]
    for text, wrong in (('are listed twice', [path for path, n in Counter(paths).items() if n > 1]),
                        ('lie elsewhere', [path for path in paths
                                           if root not in path.parents or '..' in path.relative_to(root).parts]),
                        ('are missing', [path for path in paths if not path.is_file()])):
        if wrong:
            raise problem(f'{len(wrong):,} of {len(paths):,} images {text}, the first is {wrong[0]}')
    if both := {row[1] for row in splits.get('train', ())} & {row[1] for row in splits['query']}:
        error = problem(f'{len(both)} classes are in the training set and in the test set, the first is {min(both)}')
        if name != 'folder':
            raise error
        print(f'warning: {error}', file=sys.stderr)


def warn_of_copies(splits):
    """Warns of test images that have a copy in any split, as far as length and first bytes tell: they are too easy."""
    # In this order train is the last, so a copy in it is found as the copy of a test image.
    files = [(row[0], split) for split in sorted(splits) for row in splits[split]]
    lengths = [path.stat().st_size for path, _ in files]
    shared, first, copies = Counter(lengths), {}, []
    for (path, split), length in zip(files, lengths):
        if shared[length] > 1:                              # others need not be opened
            with open(path, 'rb') as file:
                start = length, file.read(2 ** 16)
            if start in first:
                copies.append((first[start], path))
            elif split != 'train':
                first[start] = path
    if copies:
        print(f'warning: {len(copies)} files are copies of test images, which flatters the result; the first is '
              f'{copies[0][1]}, a copy of {copies[0][0]}', file=sys.stderr)


def words(path):
    """The words of each line, without empty lines"""
    return [line.split() for line in open(path) if line.strip()]


def read_cub(root):
    """Lines `<image id> <class>/<file>`, where a class starts with its number. The first 100 classes train:
    train_test_split.txt belongs to another task, classification."""
    base, rows = root / 'CUB_200_2011', []
    for _, path in words(base / 'images.txt'):
        name = path.split('/')[0]
        if '/._' not in path:                               # macOS leaves such files beside the real ones
            rows.append(('train' if int(name.split('.')[0]) <= 100 else 'query', base / 'images' / path, name, None))
    return rows


def read_cars(root):
    """The .mat file's `annotations`: field 0 is the path, field 5 the class, 1 to 196. The first 98 classes
    train: field 6, `test`, belongs to another task, classification."""
    from scipy.io import loadmat
    with open(root / 'cars_annos.mat', 'rb') as file:
        table = loadmat(file, squeeze_me=True)['annotations']
    return [('train' if int(row[5]) <= 98 else 'query', root / str(row[0]), f'{int(row[5]):03d}', None)
            for row in table]


def read_sop(root):
    """A header, then lines `image_id class_id super_class_id path`"""
    base, rows = root / 'Stanford_Online_Products', []
    for split, file in (('train', 'Ebay_train.txt'), ('query', 'Ebay_test.txt')):
        for _, number, group, path in words(base / file)[1:]:
            rows.append((split, base / path, f'{int(number):05d}', int(group) - 1))
    return rows


def read_inshop(root):
    """A count, a header, then lines `img/... id_00000001 train|query|gallery`"""
    rows = words(root / 'Eval' / 'list_eval_partition.txt')[2:]
    return [(split, root / 'Img' / path, name, None) for path, name, split in rows]


READERS = dict(cub=read_cub, cars=read_cars, sop=read_sop, inshop=read_inshop)


def read_folder(root, known=None):
    """A class is a folder that holds images directly, at any depth; its name is its path.

    train/ and test/ (or val/), or train/, query/ and gallery/, split the classes. Without them the first half
    of the sorted classes trains and the rest tests; with `known`, classes that a network knows, all others test.
    """
    there = find_folders(root)
    train, test = there.get('train'), there.get('test', there.get('val'))
    if 'query' in there and 'gallery' in there:
        parts = dict(train=train, query=there['query'], gallery=there['gallery'])
    else:
        parts = dict(train=train, query=test) if train and test else None
    if parts:
        splits = {split: classes_below(part) if part else {} for split, part in parts.items()}
    else:
        classes = sorted(classes_below(root).items())
        half = len(classes) // 2 if known is None else 0
        splits = {'train': dict(classes[:half]), 'query': dict(classes[half:])}
    if known is not None:
        splits.pop('train')
        out = {name for names in splits.values() for name in names if name in known}
        splits = {split: {name: names[name] for name in names if name not in out} for split, names in splits.items()}
        if out:
            print(f'{root}: {len(out)} classes were in the training set of this network, or chose its epoch, and are '
                  f'left out')
    return [(split, path, name, None)
            for split, names in splits.items() for name in sorted(names) for path in names[name]]


def find_folders(root):
    """{name in lower case: path} of the folders in root"""
    return {path.name.lower(): path for path in root.iterdir() if path.is_dir()}


def classes_below(root):
    """{path of the class below root: sorted paths of its images}; hidden files and folders are left out."""
    classes, visited, other = {}, set(), []
    for folder, folders, files in os.walk(root, followlinks=True):
        if os.path.realpath(folder) in visited:             # a link to a folder that was read already
            folders.clear()
            continue
        visited.add(os.path.realpath(folder))
        folders[:] = sorted(name for name in folders if name[0] != '.')     # the same order on every disk
        paths = [Path(folder) / name for name in sorted(files) if name[0] != '.']
        images = [path for path in paths if path.is_file()
                  and path.suffix.lower() in torchvision.datasets.folder.IMG_EXTENSIONS]
        if images and Path(folder) != root:                 # files in root itself, a sheet for example, are no class
            classes[Path(folder).relative_to(root).as_posix()] = images
        elif paths and not images:
            other.append(folder)
    if other:
        print(f'warning: {len(other)} folders hold files, but no images of a kind that is read here; the first is '
              f'{other[0]}', file=sys.stderr)
    return classes


def draw_shapes(resize, image_size, classes=100, per_class=20):
    """The built-in dataset: 100 classes of shapes x 20 images for training, and 100 other classes for the test.

    A class is a curve of Gielis' superformula, r(t) = (|cos(m t/4)|^n2 + |sin(m t/4)|^n3)^(-1/n1), with two
    colours and a pattern of stripes. Its images differ in rotation, scale, shift, aspect, brightness,
    background and noise, so that neither pixels nor colours alone tell the classes apart.
    """
    generator = torch.Generator().manual_seed(2022)

    def uniform(low, high, *shape):
        return low + (high - low) * torch.rand(*shape, generator=generator)

    def draw_class():
        """-> (n, 3, S, S) in [0, 1]"""
        n, m = per_class, int(torch.randint(2, 9, (1,), generator=generator))              # m lobes
        n1, n2, n3 = uniform(-0.6, 1.6, 1).exp(), uniform(-1.2, 2.2, 1).exp(), uniform(-1.2, 2.2, 1).exp()
        frequency, angle, colours = uniform(3, 9, 1), uniform(0, math.pi, 1), uniform(0, 1, 2, 3)
        t = torch.linspace(-math.pi, math.pi, 721)
        curve = ((m * t / 4).cos().abs() ** n2 + (m * t / 4).sin().abs() ** n3) ** (-1 / n1)
        curve = curve / curve.max()                                     # the longest lobe has length 1
        scale, aspect = uniform(0.5, 0.75, n, 1, 1), uniform(0.75, 1.33, n, 1, 1).sqrt()
        x, y = (grid[:, None] - uniform(-0.25, 0.25, 2, n, 1, 1)).unbind()                 # (n, S, S)
        turn = uniform(0, 2 * math.pi, n, 1, 1)
        x, y = ((turn.cos() * x + turn.sin() * y) / (scale * aspect),
                (turn.cos() * y - turn.sin() * x) / (scale / aspect))    # from the picture to the shape's frame
        radius = curve[((torch.atan2(y, x) + math.pi) / (2 * math.pi) * 720).round().long()]
        inside = torch.sigmoid((radius - torch.hypot(x, y)) * 20)[:, None]                 # (n, 1, S, S)
        stripes = torch.sigmoid(4 * torch.sin(frequency * (x * angle.cos() + y * angle.sin())))[:, None]
        first, second = (colours + uniform(-0.05, 0.05, n, 2, 3))[..., None, None].unbind(1)   # (n, 3, 1, 1)
        slope = (grid * uniform(-0.3, 0.3, n, 2, 1, 1)).sum(1, keepdim=True)               # (n, 1, S, S)
        background = uniform(0, 1, n, 1, 1, 1) + uniform(-0.25, 0.25, n, 3, 1, 1) + slope
        picture = background + inside * (second + stripes * (first - second) - background)
        picture = picture * uniform(0.6, 1.2, n, 1, 1, 1)
        return (picture + 0.03 * torch.randn(picture.shape, generator=generator)).clamp(0, 1)

    def draw_set(name):
        pixels = torch.cat([(255 * draw_class()).byte().permute(0, 2, 3, 1) for _ in range(classes)])
        labels = torch.arange(classes).repeat_interleave(per_class)
        return Images(pixels.numpy().reshape(-1), np.full((len(labels), 2), resize), labels, image_size,
                      [f'{name} shape {i}' for i in range(classes)])

    side = torch.linspace(-1, 1, resize)
    grid = torch.stack(torch.meshgrid(side, side, indexing='xy'))       # (2, S, S) x and y
    train, test = draw_set('training'), draw_set('test')
    return dict(train=train, query=test, gallery=test)


# ---- 7. runs ---------------------------------------------------------------------------------------


class Run:
    """The folder of a run, runs/<name>/, with log.jsonl (a JSON object per evaluated epoch) and last.pt.

    With --fold, best.pt is the epoch with the highest MAP@R on the validation classes; without, nothing is chosen.

    epoch  epochs that are done;  start  the same when this process began;  rows  the evaluated ones
    total  steps of the whole run;  parts  {name: whatever has a state to save}, among them the model
    """

    def __init__(self, args, folder, data, total, parts):
        self.args, self.folder, self.data, self.total, self.parts = args, folder, data, total, parts
        self.epoch, self.rows, self.minutes, self.untitled = 0, [], 0.0, True
        if args.resume:
            saved, last = read_checkpoint(args.resume), folder / 'last.pt'
            with distrusting(args.resume):
                if saved['embedder'] != parts['model'].config:
                    raise ValueError('its network is not the one that its arguments describe')
                for name, part in parts.items():
                    load_state(part, saved[name])
                self.epoch, self.rows, self.minutes = int(saved['epoch']), list(saved['rows']), float(saved['minutes'])
                if not self.rows or any('R@1' not in row for row in self.rows):
                    raise ValueError('its rows are not those of a log')
            if args.resume != last and last.exists() and read_checkpoint(last).get('epoch', 0) > self.epoch:
                print(f'note: {last} holds a later epoch than {args.resume}, and will be overwritten')
            self.write_log()                                # exactly the rows of the checkpoint
        self.start, self.since = self.epoch, time.time()

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        if kind is KeyboardInterrupt and self.rows:
            print(f'\n{self.folder}/last.pt holds epoch {self.epoch}; go on with: '
                  f'python {self.args.script}.py --resume {self.folder}')

    def write_log(self):
        if rank():
            return
        with written_whole(self.folder / 'log.jsonl') as file:
            file.write(''.join(json.dumps(row) + '\n' for row in self.rows).encode())

    def record(self, row):
        """Saves a finished epoch before it prints it, so that an error in printing loses nothing."""
        row['minutes'] = self.minutes + (time.time() - self.since) / 60
        if 'R@1' in row:
            self.rows.append(row)
        states = {name: part.state_dict() for name, part in self.parts.items() if name != 'model'}
        # Validation classes have been seen as well, since they choose the epoch.
        classes = self.data.train.classes + (self.data.query.classes if self.args.fold else [])
        names = ['last.pt']
        if self.args.fold and row['epoch'] and row is self.best():
            names.insert(0, 'best.pt')      # first: if a kill comes between the two, a resumed run repeats this epoch
        for name in names:
            save_checkpoint(self.folder / name, self.args, self.parts['model'], classes=classes, epoch=row['epoch'],
                            rows=self.rows, minutes=row['minutes'], **states)
        self.epoch = row['epoch']
        self.write_log()
        self.show(row)

    def best(self):
        """The row with the highest MAP@R, the first if there are several; epoch 0 only if there is no other"""
        return max(self.rows[1:] or self.rows, key=lambda row: row['MAP@R'])

    def result(self):
        return self.best() if self.args.fold else self.rows[-1]

    def out_of_patience(self):
        """With --fold: whether the last --patience evaluations were no better than one before them"""
        return bool(self.args.fold) and len(self.rows) - 1 - self.rows.index(self.best()) >= self.args.patience

    def show(self, row):
        """Prints a row of the table, and before the first one its titles; '-' is what was not measured."""
        form = {'epoch': 'd', 'loss': '.4f', 's+': '.3f', 's-': '.3f', 'no_positive': '.0%',
                'images_per_second': '.0f', 'minutes': '.1f'}
        short = dict(no_positive='no-pos', images_per_second='img/s', minutes='min')
        keys = ['epoch', 'loss', *(key for key in self.rows[0] if key.startswith(('R@', 'MAP', 's+', 's-'))), *short]
        if self.untitled:
            print(' '.join(f'{short.get(key, key):>7}' for key in keys))
            self.untitled = False
        cells = ['-' if row.get(key) is None else format(row[key], form.get(key, '.2f')) for key in keys]
        live(' '.join(f'{cell:>7}' for cell in cells), done=True)
        if row['epoch'] and row.get('s-', 0) > 0.98:
            print(f'        collapse: the mean similarity of two images of different classes is {row["s-"]:.3f}: all '
                  f'embeddings are almost one point; lower --lr, or raise --warmup')

    def print_summary(self):
        """Says what the result means, how it was chosen, and what to do next."""
        row, best = self.result(), self.best()
        part = 'validation' if self.args.fold else 'test'
        both = set(self.data.train.classes) & set(self.data.query.classes)
        seen = (f'{len(both)} of its classes are in the training set as well, which flatters this number' if both else
                'none of these classes is in the training set' if self.args.weights == 'none' else
                'none of these classes is in the training set, but the pretrained weights may have seen some')
        print(f'R@1 = {row["R@1"]:.1f}: for {row["R@1"]:.1f} % of the {part} images, the most similar other image '
              f'shows the same class; {seen}.\nBefore training it was {self.rows[0]["R@1"]:.1f}.')
        if self.args.fold:
            print(f'This is epoch {row["epoch"]}, which has the highest validation MAP@R; no test image was read.')
        elif best is not row and best['epoch']:
            print(f'(Epoch {best["epoch"]} had the highest MAP@R, with R@1 {best["R@1"]:.1f}. To report it would be to '
                  f'choose on the test set.)')
        if row.get('unmatched'):
            print(f'{row["unmatched"]} queries have no match in the gallery: misses in R@K, left out of RP and MAP@R.')
        print(f'Next: python eval.py --checkpoint {best_of(self.folder)}')


def print_recipe(args, model, data, sampler, epochs, folder):
    """What is going to run, before it runs."""
    searched = '' if data.gallery is data.query else f' in {len(data.gallery):,}'
    size = getattr(sampler, 'batch_size', args.batch_size)  # smaller where there are few classes
    batch = f'{size} ({f"{args.per_class} images per class" if args.per_class else "in random order"})'
    until = f' or until {args.patience} evaluations bring no gain' if args.fold else ''
    print(f'{data.name}: {len(data.train):,} training images of {data.train.num_classes:,} classes, '
          f'{len(data.query):,}{searched} {"validation" if args.fold else "test"} images of '
          f'{len(data.query.labels.unique()):,} classes\n'
          f'{args.arch}, weights {args.weights}, BatchNorm {"frozen" if args.freeze_bn else "trained"}, {args.pool} '
          f'pooling, {args.dim} dimensions, crops of {args.image_size} px from {args.resize} px\n'
          f'{args.optimizer}, lr {args.lr:g}, schedule {args.schedule}, batches of {batch}, '
          f'{epochs} epochs of {len(sampler)} steps{until}, seed {args.seed}, {args.device} in {model.precision}; '
          f'{folder}/')


def run_folder(args):
    """runs/<name>/; without --name it is script, dataset and the next free number, and is made, so that no other run
    takes it."""
    if args.resume:
        return args.resume.parent
    if args.name:
        return Path('runs') / args.name
    for number in count(1):
        folder = Path('runs') / f'{args.script.removeprefix("train_")}-{args.dataset}-{number}'
        with suppress(FileExistsError):
            folder.mkdir(parents=True)
            return folder


def save_checkpoint(path, args, model, **more):
    """Writes the model, what built it (script, arguments, seed, versions), and whatever else is given.

    Weights that are NaN or infinite are refused, and `path` stays as it was.
    """
    if rank():                                              # the main process writes
        return
    broken = [name for name, value in model.state_dict().items() if not value.isfinite().all()]
    if broken:
        raise UsageError(f'the weights are not finite, {broken[0]} is the first; {path} is the last checkpoint before '
                         f'that; try a lower --lr, or --precision fp32')
    plain = (bool, int, float, str, list)                   # no paths: a checkpoint must not decide what is written
    kept = {key: value for key, value in vars(args).items() if isinstance(value, plain) and key != 'script'}
    versions = dict(python=sys.version.split()[0], torch=str(torch.__version__), torchvision=torchvision.__version__)
    with written_whole(path) as file:
        torch.save(dict(script=args.script, args=kept, seed=args.seed,
                        versions=versions, embedder=model.config, model=model.state_dict(), **more), file)


def read_checkpoint(path):
    """The dict that save_checkpoint wrote; a run folder stands for its last.pt."""
    path = Path(path)
    saved = read_file(path / 'last.pt' if path.is_dir() else path)
    if not isinstance(saved, dict) or not {'script', 'embedder', 'model'} <= set(saved) \
            or not isinstance(saved.get('args'), dict):
        raise UsageError(f'{path} is no checkpoint of these scripts')
    return saved


def best_of(path):
    """The checkpoint that stands for a run folder when it is evaluated: best.pt if there is one, else last.pt"""
    path = Path(path)
    return path / 'best.pt' if (path / 'best.pt').exists() else path / 'last.pt' if path.is_dir() else path


def load_checkpoint(path, device='cpu', precision='auto'):
    """A trained Embedder, ready to embed: in evaluation mode, with its test transform, arguments and classes.

    model.transform(image) turns a PIL image into (3, S, S): model(model.transform(image)[None]) is its
    embedding, (1, D).  model.args are the arguments of its training, a dict; model.classes the names of its
    training classes, with --fold those of the validation block as well. In a run folder it is best.pt, if there
    is one, and else last.pt.
    """
    path = best_of(path)
    saved, device = read_checkpoint(path), pick_device(device)
    with distrusting(path):
        model = Embedder(weights='none', precision=pick_precision(precision, device), **saved['embedder'])
        load_state(model, saved['model'])
        model.args, model.classes = dict(saved['args']), list(saved.get('classes', []))
        model.transform = transforms.Compose([
            to_rgb, transforms.Resize(model.args['resize']), transforms.CenterCrop(model.args['image_size']),
            transforms.ToTensor(), transforms.Normalize(MEAN, STD)])
    return model.to(device).eval()


def read_file(path):
    """torch.load that runs no code from the file and verifies its checksums, which torch.load does not."""
    if not Path(path).is_file():
        raise UsageError(f'there is no file {path}')
    with distrusting(path):
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as parts:
                if broken := parts.testzip():
                    raise ValueError(f'the checksum of {broken} is wrong')
        return torch.load(path, map_location='cpu', weights_only=True)


def load_resnet(arch, weights):
    """A torchvision ResNet. A file of weights may be torchvision's or a checkpoint of these scripts."""
    if weights == 'imagenet':
        try:
            return torchvision.models.get_model(arch, weights='IMAGENET1K_V1')
        except Exception as error:                          # no connection, a full disk, a wrong hash
            url = torchvision.models.get_model_weights(arch)['IMAGENET1K_V1'].url
            raise UsageError(f'the ImageNet weights {url} could not be fetched ({error}); download that file '
                             f'elsewhere and pass it with --weights FILE, or use --weights none') from None
    resnet = torchvision.models.get_model(arch, weights=None)
    if weights != 'none':
        saved = read_file(weights)
        with distrusting(weights):
            # The classifier will not be used. Loading is strict, so any other key that does not fit is an error.
            state = {key.removeprefix('trunk.'): value for key, value in saved.get('model', saved).items()
                     if not key.startswith(('fc.', 'linear.'))}
            load_state(trunk_of(resnet), state)         # trunk_of shares its modules with resnet
    return resnet


def load_state(part, state):
    """part.load_state_dict(state). Of a network, torch checks names and shapes; this adds: weights are real numbers."""
    for key, value in part.state_dict().items() if isinstance(part, nn.Module) else ():
        if value.is_floating_point() and key in state and not state[key].is_floating_point():
            raise ValueError(f'{key} is of type {state[key].dtype}')
    part.load_state_dict(state)


@contextmanager
def distrusting(path):
    """Whatever goes wrong with the content of a file, which may be damaged or made up, becomes one line."""
    try:
        yield
    except UsageError:
        raise
    except Exception as error:
        reason = 'it is not a file of plain weights, and other files could run any code' \
            if isinstance(error, pickle.UnpicklingError) else ' '.join(str(error).split())[:300]
        raise UsageError(f'{path} cannot be used; is it damaged, or of another script, --arch or --dim? '
                         f'{type(error).__name__}: {reason}') from None


@contextmanager
def locked(folder, wait=False):
    """Keeps other runs out of a folder while this one works in it, and removes what killed ones left there."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / '.lock', 'w') as file:               # the system lets go of it however the process ends
        if fcntl:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError:
                raise UsageError(f'{folder} is in use by another run') from None
        for left in folder.glob('*.*.[0-9]*.tmp'):          # as written_whole names them
            left.unlink()
        yield


@contextmanager
def written_whole(path):
    """Writes a temporary file and renames it at the end, so a full disk or Ctrl-C leaves the old file intact."""
    path = Path(path)
    temporary = path.with_name(f'{path.name}.{os.getpid()}.tmp')
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, 'wb') as file:
            yield file
        os.replace(temporary, path)
    except BrokenPipeError:                                 # from a print within the with block, not from this file
        raise
    except (OSError, RuntimeError) as error:                # torch.save reports a full disk as a RuntimeError
        cause = str(error.__context__ or error).split('\n')[0]
        raise UsageError(f'could not write {path}: {cause}; what stood there before is unharmed') from None
    finally:
        with suppress(OSError):
            temporary.unlink()


def live(text, done=False):
    """A line that is overwritten while work goes on. Where output goes to no terminal, only its last state shows."""
    if sys.stdout.isatty():
        width = shutil.get_terminal_size().columns - 1      # a longer line would not be overwritten as a whole
        print(f'\r{text if done else text[:width]:<{width}}', end='\n' if done else '', flush=True)
    elif done:
        print(text, flush=True)


def set_seed(seed):
    random.seed(seed)
    np.random.seed(seed % 2 ** 32)
    torch.manual_seed(seed % 2 ** 63)                       # of every device


# ---- 8. command line -------------------------------------------------------------------------------

# What the built-in shapes and a folder of images are trained with, when no pretrained weights are given.
DEMO = dict(arch='resnet18', weights='none', image_size=64, resize=64, freeze_bn=False, dim=128, min_crop=0.5,
            epochs=10, batch_size=64, per_class=4, lr=2e-3, schedule='cosine', warmup=0, clip=0.0, eval_every=1)
# Of the benchmarks only the network and the sizes are here: the recipes are in the scripts, beside their papers.
BENCHMARK = dict(arch='resnet50', weights='imagenet', image_size=224, resize=256, eval_every=1)
BASE = dict(shapes=DEMO | dict(min_crop=1.0, batch_size=32, epochs=8, eval_every=4), folder=DEMO,
            cub=BENCHMARK, cars=BENCHMARK, sop=BENCHMARK | dict(eval_every=5), inshop=BENCHMARK | dict(eval_every=5))


# Section 3.1 of the Reality Check, in place of a script's recipe for the dataset. Momentum and weight decay are those
# of the released configuration. So is the smallest crop, 0.16, which torchvision takes as a share of the area; the text
# has a side of 40 px, and 40 is 0.16 of 256, so perhaps a share of the side was meant. The network there is
# BN-Inception. A run ends by --patience, not by --epochs.
PROTOCOL = dict(dim=128, pool='avg', freeze_bn=True, image_size=227, resize=256, min_crop=0.16, epochs=1000,
                batch_size=32, per_class=4, optimizer='rmsprop', lr=1e-6, momentum=0.9, weight_decay=1e-4,
                schedule='constant', warmup=0, clip=0.0, fold='0/4', eval_every=1)


class Parser(argparse.ArgumentParser):
    def error(self, message):
        raise UsageError(f'{self.prog}: {message}; --help lists the flags')


class Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Prints docstrings as they are, and the default of each flag."""


def between(low, high, kind=float):
    """An argparse type: a finite number from low to high, both included"""
    def check(text):
        value = kind(text)
        if not (low <= value <= high and value < math.inf):
            raise ValueError
        return value
    check.__name__ = f'{kind.__name__} >= {low}' + (f' and <= {high}' if high < math.inf else '')
    return check


def at_least(low, kind=int):
    """An argparse type: a finite number from low on"""
    return between(low, math.inf, kind)


def number_or(number, *words):
    """An argparse type: one of these words, or what the type `number` accepts"""
    def check(text):
        return text if text in words else number(text)
    check.__name__ = ' or '.join([number.__name__, *words])
    return check


def parser(doc, notes=''):
    """The flags that all scripts share. The first word of `doc`, a script's docstring, is the script's name."""
    p = Parser(prog=doc.split()[0], description=doc, epilog=notes, formatter_class=Help, allow_abbrev=False)
    g = p.add_argument_group('data')
    g.add_argument('--dataset', choices=list(DATASETS), default='shapes',
                   help='shapes is built in; folder: your own images, a folder for each class')
    g.add_argument('--data', default='data', help="folder of classes, or what the dataset's site unpacks")
    g.add_argument('--cache', type=Path, default=Path('cache'), help='folder for decoded images')
    g.add_argument('--image-size', type=at_least(8), help='side of the crops that the network gets, pixels')
    g.add_argument('--resize', type=at_least(8), help='shorter side of the stored images, pixels; follows --image-size')
    g.add_argument('--min-crop', type=between(0.001, 1), help='smallest area of a training crop, share of the image')
    g.add_argument('--jitter', type=between(0, 1), default=0.0, help='brightness, contrast, saturation: up to +- this')
    g.add_argument('--flip', action=argparse.BooleanOptionalAction, default=True, help='mirror half of the crops')
    g = p.add_argument_group('network')
    g.add_argument('--arch', choices=['resnet18', 'resnet34', 'resnet50', 'resnet101'], help='trunk')
    g.add_argument('--weights', help='imagenet, none, or a file')
    g.add_argument('--pool', choices=['avg', 'max', 'avg+max'], default='avg+max', help='pooling of the feature map')
    g.add_argument('--dim', type=at_least(1), help='size of the embedding')
    g.add_argument('--freeze-bn', action=argparse.BooleanOptionalAction, help='BatchNorm keeps statistics and weights')
    g = p.add_argument_group('training')
    g.add_argument('--epochs', type=at_least(0), help='passes over the training set')
    g.add_argument('--steps', type=at_least(0), default=0, help='limit on the number of steps; 0: none')
    g.add_argument('--batch-size', type=at_least(2), help='images in a batch, B')
    g.add_argument('--per-class', type=at_least(0), help='images per class in a batch, K; 0: images in random order')
    g.add_argument('--optimizer', choices=['adamw', 'adam', 'sgd', 'rmsprop'], default='adamw', help='optimizer')
    g.add_argument('--lr', type=at_least(0, float), help='learning rate')
    g.add_argument('--weight-decay', type=at_least(0, float), default=1e-4, help='weight decay')
    g.add_argument('--momentum', type=between(0, 1), default=0.0, help='of sgd and rmsprop')
    g.add_argument('--schedule', choices=['step', 'cosine', 'constant'], help='of the learning rate')
    g.add_argument('--decay-epochs', type=at_least(1), default=10, help='schedule step: epochs between decays')
    g.add_argument('--decay-rate', type=between(0, 1), default=0.5, help='schedule step: factor of a decay')
    g.add_argument('--warmup', type=at_least(0), help='first epochs, in which all but the trunk learns')
    g.add_argument('--clip', type=at_least(0, float), help='clip gradients to +- this; 0: no clipping')
    add_run_flags(p)
    return p


def add_run_flags(p):
    """The flags of one run: where and how it computes, what validates, where it is kept"""
    g = p.add_argument_group('run')
    g.add_argument('--seed', type=between(0, 2 ** 63 - 1, int), default=0, help='of everything random')
    g.add_argument('--device', default='auto', help='auto, cpu, cuda, cuda:1, mps')
    g.add_argument('--precision', choices=['auto', 'bf16', 'fp32'], default='auto', help='of the trunk')
    g.add_argument('--compile', action=argparse.BooleanOptionalAction, default=False,
                   help='torch.compile of the trunk: a slow start, then perhaps faster steps')
    g.add_argument('--chunk', type=at_least(0), default=0,
                   help='saves memory: the trunk takes so many images at a time, with frozen BatchNorm; 0: all')
    g.add_argument('--eval-every', type=at_least(1), help='epochs between evaluations')
    g.add_argument('--protocol', choices=['reality-check'], help="settings of the Reality Check, Section 3.1")
    g.add_argument('--fold', type=fold, metavar='I/N',
                   help='block I (from 0) of N blocks of training classes validates, the others train; the test set is '
                        'not read')
    g.add_argument('--patience', type=at_least(1), default=10, help='fold: stop after so many evaluations without gain')
    g.add_argument('--name', type=run_name, help='folder below runs/; default: script, dataset, next free number')
    g.add_argument('--resume', type=Path, metavar='RUN', help='go on with a run: its folder, or a checkpoint')
    g.add_argument('--show-batch', type=file_ending('.png'), metavar='PNG', help='save a picture of the first batch, and stop')


def fold(text):
    """An argparse type: I/N with 0 <= I < N and N >= 2, as text"""
    i, n = map(int, text.split('/'))
    if not 0 <= i < n or n < 2:
        raise ValueError
    return f'{i}/{n}'


def run_name(text):
    """An argparse type: the name of one folder, as a Path"""
    if text in ('', '.', '..') or Path(text).name != text:
        raise ValueError
    return Path(text)


def file_ending(suffix):
    """An argparse type: the path of a file that ends in `suffix`"""
    def check(text):
        if not text.lower().endswith(suffix):
            raise ValueError
        return Path(text)
    check.__name__ = f'name that ends in {suffix} as'
    return check


def parse(parser, DEFAULTS, argv=None):
    """Reads the command line twice: to learn which recipe is meant, and then with that recipe as the defaults.

    DEFAULTS  a script's recipes: rows of defaults for flags, one per dataset; further rows under (dataset,
              choice) where a recipe also depends on the script's --loss or --variant
    Returns the flags as a namespace, with three more names: script; changed, the set of flags that differ from
    their defaults; and device as a torch.device. No file of weights is opened here. Under torchrun, this process joins
    the others.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    script = Path(parser.prog).stem
    first = parser.parse_args([word for word in argv if word not in ('-h', '--help')])
    row = recipe_row(first, DEFAULTS)
    if checkpoint := first.resume or getattr(first, 'analyse', None):
        row |= saved_arguments(parser, script, checkpoint)
    unknown = sorted(row.keys() - vars(first).keys())
    if unknown:
        raise UsageError(f'{script}.py has no flag for {", ".join(unknown)}')
    parser.set_defaults(**row)
    args = parser.parse_args(argv)
    args.changed = {name for name, value in vars(args).items() if value != parser.get_default(name)}
    args.script = script
    check(args)
    if args.protocol and not (first.fold or args.resume):
        print(f'--protocol {args.protocol}: this is --fold {args.fold}, one of four; run the others as well')
    args.device = join_processes(pick_device(args.device))
    return args


def check(args):
    """Refuses flags that have no effect, or that exclude each other."""
    if args.optimizer not in ('sgd', 'rmsprop'):
        refuse(args, ['momentum'], f'--optimizer {args.optimizer}')
    if args.schedule != 'step':
        refuse(args, ['decay_epochs', 'decay_rate'], f'--schedule {args.schedule}')
    if args.dataset == 'shapes':
        refuse(args, ['data'], '--dataset shapes, which is drawn; for images of your own add --dataset folder')
    if not args.fold:
        refuse(args, ['patience'], 'the test set, which chooses nothing: take --fold')
    if args.chunk and not args.freeze_bn:
        raise UsageError('--chunk needs --freeze-bn: the statistics of trained BatchNorm would be those of the chunks')
    if args.protocol and args.weights == 'none':
        raise UsageError(f'--protocol {args.protocol} fine-tunes, with a learning rate of {args.lr:g}: it needs '
                         'pretrained weights, --weights imagenet or a file')
    if args.resume:
        check_resume(args)
    if args.name and (Path('runs') / args.name / 'last.pt').exists():
        raise UsageError(f'runs/{args.name} exists already; choose another --name, or go on with it: '
                         f'--resume runs/{args.name}')


def recipe_row(first, DEFAULTS):
    """The defaults that follow from the first reading of the command line"""
    choice = getattr(first, 'loss', None) or getattr(first, 'variant', None)
    pretrained = first.weights not in (None, 'none')
    dataset = recipe = 'cub' if first.dataset == 'folder' and pretrained else first.dataset
    row = BASE[dataset]
    if first.protocol:                                      # it replaces the recipe that the script has for the dataset
        row, recipe = row | PROTOCOL, first.protocol
    row = row | DEFAULTS.get(recipe, {}) | DEFAULTS.get((recipe, choice), {})
    if first.image_size:
        row['resize'] = round(first.image_size * row['resize'] / row['image_size'])
    if first.weights == 'none':                             # random weights cannot learn through frozen BatchNorm
        row['freeze_bn'] = False
    if first.fold:
        row['eval_every'] = 1
    return row


def saved_arguments(parser, script, checkpoint):
    """The arguments in a checkpoint, read by the parser like typed ones, so that types and choices are checked.

    Paths are left out: a checkpoint does not decide which files are written.
    """
    saved = read_checkpoint(checkpoint)
    if saved['script'] != script:
        raise UsageError(f'{checkpoint} was made by {saved["script"]}.py, not by {script}.py')
    words = []
    for name in vars(parser.parse_args([])):
        flag, value = '--' + name.replace('_', '-'), saved['args'].get(name)
        if isinstance(value, bool):
            words += [flag if value else flag.replace('--', '--no-', 1)]
        elif isinstance(value, list):
            words += [flag, *map(str, value)]
        elif value is not None:
            words += [f'{flag}={value}']
    try:
        args = vars(parser.parse_args(words))
    except UsageError as error:
        raise UsageError(f'the arguments in {checkpoint} are damaged: {error}') from None
    return {name: args[name] for name in args if name in saved['args'] and not isinstance(args[name], Path)}


def check_resume(args):
    """A resumed run is the run that was stopped: only flags that leave its numbers alone may change."""
    if args.resume.is_dir():
        args.resume = args.resume / 'last.pt'
    refuse(args, ['name'], '--resume: the run keeps its folder')
    refuse(args, ['show_batch'], '--resume')
    free = {'resume', 'data', 'cache', 'epochs', 'steps', 'eval_every', 'patience', 'device', 'precision', 'chunk',
            'compile'}
    fixed = sorted(args.changed - free)
    if fixed:
        raise UsageError(f'{args.resume} was made with another --{fixed[0].replace("_", "-")}; start a new run')
    if args.changed & {'steps', 'epochs'} and args.schedule == 'cosine':
        print('note: with another number of steps the learning rate takes another course, so this is not the run '
              'that would have gone on without a stop')


def refuse(args, flags, because):
    """Refuses flags that were changed although they have no effect."""
    for flag in flags:
        if flag in args.changed:
            raise UsageError(f'--{flag.replace("_", "-")} has no effect with {because}')


def pick_device(name):
    """auto takes a GPU if there is one."""
    if str(name) == 'auto':
        name = 'cuda' if torch.cuda.is_available() else 'mps' if torch.backends.mps.is_available() else 'cpu'
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).strip().split('\n')[0]
        raise UsageError(f'--device {name} cannot be used here: {reason}') from None
    return device


def pick_precision(name, device):
    """auto takes bfloat16 where the hardware multiplies it: GPUs since Ampere, CPUs with AVX512-BF16."""
    if name != 'auto':
        return name
    if device.type == 'cuda':
        return 'bf16' if torch.cuda.is_bf16_supported(including_emulation=False) else 'fp32'
    supported = getattr(torch.cpu, '_is_avx512_bf16_supported', lambda: False)
    return 'bf16' if device.type == 'cpu' and supported() else 'fp32'


def dataset_from(args):
    """The dataset that the flags name"""
    with main_process_first():                              # it decodes the images, where this was not done before
        return load_dataset(args.dataset, args.data, args.resize, args.image_size, args.cache, fold=args.fold)


def build(args, **options):
    """The network that the flags name, on their device. `options` go to Embedder."""
    if args.device.type == 'cuda':
        torch.backends.cudnn.benchmark = True               # the batches of training have one shape
    # A resumed run has its weights in the checkpoint, and a picture of a batch needs none.
    weights = 'none' if args.resume or args.show_batch else args.weights
    model = Embedder(args.arch, args.dim, args.pool, weights, args.freeze_bn,
                     precision=pick_precision(args.precision, args.device), chunk=args.chunk, **options)
    if world() > 1 and not args.freeze_bn:                  # statistics over the batches of all processes
        if args.device.type != 'cuda':
            raise UsageError('several processes on a CPU cannot share the statistics of BatchNorm: take --freeze-bn')
        model.trunk = nn.SyncBatchNorm.convert_sync_batchnorm(model.trunk)
    if args.compile:
        model.trunk.compile()                               # in place, so the names in a checkpoint stay as they are
    return model.to(args.device)


# ---- 9. processes ----------------------------------------------------------------------------------

# torchrun starts a script several times, once for each GPU. Each process draws the same batch, since all have the same
# seed. The trunk runs on a share of it, its feature maps are gathered, and every process computes the loss of the whole
# batch. So no script needs to know. The main process, of rank 0, prints and writes.


def world():
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


def rank():
    return distributed.get_rank() if world() > 1 else 0


def join_processes(device):
    """Under torchrun, finds the other processes. Returns the device of this one."""
    if int(os.environ.get('WORLD_SIZE', 1)) < 2:
        return device
    if device.type == 'cuda':
        if int(os.environ['LOCAL_RANK']) >= torch.cuda.device_count():
            raise UsageError(f'there are {torch.cuda.device_count()} GPUs for {os.environ["LOCAL_WORLD_SIZE"]} '
                             'processes; lower --nproc-per-node')
        device = torch.device('cuda', int(os.environ['LOCAL_RANK']))
        torch.cuda.set_device(device)
    if not distributed.is_initialized():
        # Waiting for the main process to decode a large dataset must not end a run. If a process dies, torchrun ends
        # the others.
        distributed.init_process_group('nccl' if device.type == 'cuda' else 'gloo', timeout=timedelta(days=1))
        if rank():
            sys.stdout = open(os.devnull, 'w')
    return device


@contextmanager
def main_process_first():
    if rank():
        distributed.barrier()
    yield
    if world() > 1 and not rank():
        distributed.barrier()


def from_main_process(make):
    """What make() returns in the main process; it is called there only."""
    box = [None if rank() else make()]
    if world() > 1:
        distributed.broadcast_object_list(box)
    return box[0]


def own_share(x):
    """This process' share of a batch, (B, ...) -> (B', ...)"""
    return x.tensor_split(world())[rank()] if world() > 1 else x


def gather(f, total):
    """The shares of all processes, one behind the other: (B', ...) -> (total, ...), with gradients"""
    if world() == 1:
        return f
    shares = [len(part) for part in torch.arange(total).tensor_split(world())]
    return Gather.apply(at_least_float32(f), shares)


class Gather(torch.autograd.Function):
    """The feature maps of all processes. The gradient of a share is summed over the processes.

    Each process computes the same loss, so this sum is world() times its gradient. average_gradients corrects that: it
    divides the sum of the weights' gradients by world().
    """
    @staticmethod
    def forward(ctx, f, shares):
        ctx.shares = shares
        padded = f.new_zeros(max(shares), *f.shape[1:])     # all_gather takes tensors of one shape
        padded[:len(f)] = f
        parts = [torch.empty_like(padded) for _ in shares]
        distributed.all_gather(parts, padded)
        return torch.cat([part[:share] for part, share in zip(parts, shares)])

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous(memory_format=torch.contiguous_format).clone()
        distributed.all_reduce(grad)                        # the sum
        return grad.split(ctx.shares)[rank()], None


def average_gradients(weights):
    grads = [weight.grad for weight in weights if weight.grad is not None]
    if world() > 1 and grads:
        total = torch.cat([grad.flatten() for grad in grads])
        distributed.all_reduce(total)
        for grad, part in zip(grads, (total / world()).split([grad.numel() for grad in grads])):
            grad.copy_(part.view(grad.shape))


# ---- 10. errors ------------------------------------------------------------------------------------


class UsageError(ValueError):
    """A mistake in use. Its text says in one line what is wrong, where, and what to do."""


@contextmanager
def explaining(args):
    """Says what to do where memory is too small, or --compile does not work."""
    try:
        yield
    except RuntimeError as error:
        text = ' '.join(str(error).split())[:200]
        if isinstance(error, torch.OutOfMemoryError) or 'out of memory' in text or "can't allocate memory" in text:
            chunk = args.chunk or args.batch_size
            less = f' or --chunk, to {max(1, chunk // 4)} for example; it needs --freeze-bn' if chunk > 1 else ''
            raise UsageError(f'{args.device} has not enough memory; in training, a step has a batch of '
                             f'{args.batch_size} images{f" in chunks of {chunk}" if args.chunk else ""}; '
                             f'lower --batch-size{less}') from None
        if args.compile and type(error).__module__.startswith(('torch._dynamo', 'torch._inductor')):
            raise UsageError(f'--compile does not work here, leave it out: {text}') from None
        raise


def cli(main):
    """Runs a script from the shell. A mistake in use, or a failure of the machine, ends in one line and exit code 2,
    Ctrl-C in exit code 130. Anything else is a bug, and keeps its traceback."""
    sys.stdout.reconfigure(errors='replace')                # a terminal that lacks a letter must not end a run
    try:
        main()
        sys.stdout.flush()
    except KeyboardInterrupt:
        print('stopped', file=sys.stderr)
        sys.exit(130)
    except (UsageError, OSError, MemoryError, torch.OutOfMemoryError) as error:
        if isinstance(error, BrokenPipeError):              # the reader of stdout has left; nobody else may try
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        reason = ' '.join(str(error).split())[:500] or 'out of memory'
        kind = '' if isinstance(error, UsageError) else f'{type(error).__name__}: '
        print(f'error: {kind}{reason}', file=sys.stderr)
        sys.exit(2)
