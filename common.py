"""common.py -- what the papers share and do not argue about.

What a paper's method section describes stands in the train_*.py of that paper. The Reality Check (Musgrave et al., A
Metric Learning Reality Check, ECCV 2020) is about how to compare methods: its metrics are in section 4 here, its
protocol in section 11. Four sections are worth reading beside any script:

    1. network        Embedder: trunk, pooling, linear head
    2. batches        which images meet in a batch
    3. training       optimizer, learning rate, the loop
    4. evaluation     Recall@K, R-precision, MAP@R

The others can be skipped: 5 images, and `batches` of crops; 6 reading, what a folder or an annotation holds; 7 roles,
which part of it trains, tests or is left out; 8 shapes, the built-in dataset; 9 runs: `evaluate`, logs, and what is
printed; 10 files: checkpoints, weights, writing; 11 command line: the flags that all scripts share, and their recipes;
12 putting together what the flags name; 13 devices and processes; 14 errors.

All files write shapes with these letters. Each script explains its further letters and symbols in a table.

    B  images in a batch      P  classes in a batch               x  images (B, 3, S, S)
    C  classes                K  images per class in a batch      f  feature maps (B, c, h, w)
    D  size of an embedding   S  side of a crop, in pixels        z  embeddings (B, D), of unit length
    N  images in a set        T  the h * w positions of a feature map with c channels
    G  images in a gallery, in which a query looks for matches    y  class labels (B,);  s  similarities
"""
import argparse
import hashlib
import inspect
import itertools
import json
import math
import os
import platform
import random
import shutil
import sys
import time
import unicodedata
import zipfile
from collections import Counter, OrderedDict
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cache, reduce
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile

try:
    import fcntl
except ImportError:                         # Windows has none
    fcntl = None
import numpy as np
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
import torchvision
from PIL import Image, ImageOps
from torch import distributed, nn
from torch.utils.data import BatchSampler, RandomSampler, Sampler
from torchvision import transforms
from torchvision.transforms import v2

# ---- 1. network ------------------------------------------------------------------------------------


class Embedder(nn.Module):
    """The network of every script: trunk -> pooling -> linear head -> unit length.

    arch        a classifier of torchvision without its last layers: resnet50, vit_b_16, convnext_tiny, ...; or none,
                for stored vectors, which are features of another network
    dim         D, size of the embedding
    pool        avg, max, or avg+max (their sum), over the T positions of the feature map
    weights     imagenet (torchvision's IMAGENET1K_V1), none (random), or the path of a file
    freeze_bn   the statistics and the affine weights of BatchNorm do not change in training
    layer_norm  LayerNorm without affine weights, between pooling and head
    normalize   embeddings are scaled to unit length
    head_init   kaiming: normal with std sqrt(2 / D). default: torch's own, which for ResNet-50 and D = 512
                is about five times smaller. identity, with D = c: embeddings begin as the pooled features
    precision   bf16: the trunk runs in bfloat16. Pooling, head and loss always run in float32.
    chunk       in training, the trunk takes so many images at a time, and computes each chunk once more in the
                backward pass. So it holds the activations of one chunk only. 0: the whole batch at once
    channels    of the input: 3 for images, and for stored vectors their size
    length      mean norm of the stored vectors for training; the trunk divides vectors by it
    """

    def __init__(self, arch='resnet50', dim=512, pool='avg+max', weights='imagenet', freeze_bn=True, layer_norm=False,
                 normalize=True, head_init='kaiming', precision='fp32', chunk=0, channels=3, length=1.0):
        super().__init__()
        # A checkpoint keeps this dict, from which the network can be built again.
        self.config = dict(arch=arch, dim=dim, pool=pool, freeze_bn=freeze_bn, layer_norm=layer_norm,
                           normalize=normalize, head_init=head_init, channels=channels, length=length)
        self.pool = pool
        self.normalize = normalize
        self.precision = precision
        self.chunk = chunk
        self.trunk, c = make_trunk(arch, weights, channels, length)
        self.norm = nn.LayerNorm(c, elementwise_affine=False) if layer_norm else nn.Identity()
        self.linear = nn.Linear(c, dim)
        initialise(self.linear, head_init)
        self.frozen = [m for m in self.trunk.modules() if isinstance(m, nn.BatchNorm2d)] if freeze_bn else []
        self.train_trunk(True)
        self.place('cpu')
        self.train()                        # so that frozen BatchNorm is in evaluation mode from the start

    def place(self, device):
        """Moves the network to a device, in the layout whose convolutions are fast there. Returns itself."""
        torch.set_float32_matmul_precision('highest')       # no TF32 for heads and losses: it errs by 1e-3
        self.to(device)
        kind = self.linear.weight.device.type
        # On a Mac's GPU, gradients of BatchNorm are wrong in channels_last in many releases (torch issue 175189).
        fast = kind == 'cpu' or (kind == 'cuda' and self.precision == 'bf16')
        self.layout = torch.channels_last if fast else torch.contiguous_format
        self.trunk.to(memory_format=self.layout)
        return self

    def train(self, mode=True):
        super().train(mode)
        for module in self.frozen:          # in training mode their statistics would follow the batches
            module.eval()
        return self

    def train_trunk(self, on):
        """Turns the trunk's gradients on or off; those of frozen BatchNorm are always off."""
        self.trunk.requires_grad_(on)
        for module in self.frozen:
            module.requires_grad_(False)

    def features(self, x):
        """Images (B, 3, S, S) -> last feature map (B, c, h, w) of a ResNet, after a ReLU, so never negative; of most
        other networks (B, c, 1, 1). Stored vectors (B, c, 1, 1) keep their shape, and are divided by `length`."""
        B, channels, *_ = x.shape
        if channels != self.config['channels']:
            raise UsageError(f'the network takes {self.config["channels"]} channels (3 of images, or the size of '
                             f'stored vectors), and got {channels}')
        # Gradients are on in training: then each process of torchrun takes its share of the batch, and a single
        # process takes all of it. Without gradients, `embed` has divided the images already.
        if torch.is_grad_enabled():
            x = x.tensor_split(world())[rank()]
        x = x.contiguous(memory_format=self.layout)
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.precision == 'bf16'):
            if self.chunk and torch.is_grad_enabled():
                f = torch.cat([torch.utils.checkpoint.checkpoint(self.trunk, chunk, use_reentrant=False)
                               for chunk in x.split(self.chunk)])
            else:
                f = self.trunk(x)
        return gather(f, B) if torch.is_grad_enabled() else f

    def pool_features(self, f):
        """Feature map (B, c, h, w) -> pooled features (B, c)"""
        f = at_least_float32(f)
        p = 0
        if 'avg' in self.pool:
            p = p + F.adaptive_avg_pool2d(f, 1)
        if 'max' in self.pool:
            p = p + F.adaptive_max_pool2d(f, 1)             # of equal maxima, the first takes the gradient
        return p.flatten(1)

    def project(self, p):
        """Pooled features (B, c) -> embeddings (B, D), of unit length unless normalize=False"""
        z = self.linear(self.norm(p))
        return F.normalize(z, dim=1) if self.normalize else z

    def head(self, f):
        """Feature map (B, c, h, w) -> embeddings (B, D): pooling, LayerNorm if there is one, linear head"""
        return self.project(self.pool_features(f))

    def forward(self, x):
        return self.head(self.features(x))


# ---- 2. batches ------------------------------------------------------------------------------------


class BalancedSampler(Sampler):
    """Batches of P classes x K images, class by class, as lists of indices.

    labels      (N,) class of each image
    batch_size  P times K; if there are fewer than P classes, a batch holds all of them and is smaller
    per_class   K
    generator   torch.Generator; None is torch's global one

    An epoch has N // B batches, at least one. A batch has no class twice, and no image twice unless its class has
    fewer than K. All classes, and all images of a class, come up about equally often.
    """

    def __init__(self, labels, batch_size, per_class, generator=None):
        if per_class < 1 or batch_size < 1 or batch_size % per_class:
            raise UsageError(f'--batch-size {batch_size} is not a multiple of --per-class {per_class}')
        order = labels.argsort(stable=True)
        counts = torch.bincount(labels)
        self.members = [part.tolist() for part in order.split(counts.tolist()) if len(part)]    # indices, per class
        self.per_class = per_class
        self.generator = generator
        self.classes = min(batch_size // per_class, len(self.members))
        self.batch_size = self.classes * per_class
        self.batches = max(1, len(labels) // self.batch_size)
        single = int((counts == 1).sum())
        if single and per_class > 1:
            print(f'warning: {single} of {len(self.members)} training classes have one image only: the sampler repeats '
                  f'it, so its positives are the same image again', file=sys.stderr)

    def __len__(self):
        return self.batches

    def __iter__(self):
        def deal(deck, items, number):
            """Takes `number` items from the top of a deck of cards. While the deck is too short, the items that are not
            in it, or all items if none is missing, are shuffled and put under it."""
            while len(deck) < number:
                others = [item for item in items if item not in deck]
                if not others:
                    others = items
                deck += [others[i] for i in torch.randperm(len(others), generator=self.generator).tolist()]
            return [deck.pop(0) for _ in range(number)]

        class_deck = []
        image_decks = [[] for _ in self.members]
        for _ in range(self.batches):
            classes = deal(class_deck, range(len(self.members)), self.classes)
            yield [i for c in classes for i in deal(image_decks[c], self.members[c], self.per_class)]


# ---- 3. training -----------------------------------------------------------------------------------


def learning_rate_factor(iteration, args, per_epoch, total):
    """What all learning rates are multiplied with at `iteration`, which runs from 0 to total - 1.

    step      --decay-rate to the power of the number of decays so far; one comes after every --decay-epochs epochs
    cosine    the lower one of two curves: half a cosine, which falls from 1 to 0 over the run, and a straight ramp,
              which rises to 1 over the first tenth of the run, or over 100 iterations if the tenth is longer
    constant  always 1.  For a schedule of your own, add a branch here and a choice of --schedule
    """
    if args.schedule == 'step':
        return args.decay_rate ** (iteration // per_epoch // args.decay_epochs)
    if args.schedule == 'cosine':
        ramp = max(1, min(100, total // 10))
        return min((iteration + 1) / ramp, 0.5 * (1 + math.cos(math.pi * iteration / max(1, total))))
    return 1.0


def train(args, model, data, step, optimizer, learned=None, sampler=None):
    """Trains, evaluates, logs and saves. Returns the last row of the log, a dict; with --fold the best row.

    step       step(images, labels) -> scalar loss, all that a method adds to the loop. images (B, 3, S, S), the whole
               batch, augmented and normalised, and labels (B,) are on the device. The backward pass runs after step
               returns, so step must change no tensor in place that the backward pass needs. args.step counts the
               steps before this one
    optimizer  over the weights of the model and of whatever else the method learns
    learned    {name: parameter or module}: what the method learns beside the model; it goes into the checkpoint
    sampler    yields lists of indices of equal length; None: the batches of --batch-size and --per-class
    """
    sampler = sampler or make_sampler(args, data.train.labels)
    per_epoch = len(sampler)
    total = min(args.epochs * per_epoch, args.steps or math.inf)         # steps of the whole run
    epochs = math.ceil(total / per_epoch)
    states = dict(model=model, optimizer=optimizer, learned=nn.ParameterDict(learned or {}))
    # A new run begins with epoch 0, an evaluation before training; a resumed one goes on after its last checkpoint.
    folder = args.resume or from_main_process(None if rank() else new_folder(args, data))
    with held(folder):                                      # no other run may use it
        first, rows, began = (resume(args, data, states, per_epoch, total) if args.resume else
                              begin(args, data, sampler, folder))
        print_recipe(args, model, data, sampler, epochs)
        for epoch in range(first, epochs + 1):
            if out_of_patience(args, rows):
                break
            row = dict(epoch=epoch, loss=None, images_per_second=None)
            if args.step < min(epoch * per_epoch, total):   # not in epoch 0, nor if a resumed run only evaluates
                set_seed(args.seed, epoch)
                model.train()
                model.train_trunk(epoch > args.warmup)      # in the first --warmup epochs, the trunk does not learn
                row |= train_epoch(args, data, sampler, step, optimizer, epoch, total)
            if epoch % args.eval_every == 0 or epoch == epochs:
                row |= evaluate(model, data)
            row['minutes'] = (time.time() - began) / 60
            row = from_main_process(row)                    # under torchrun, all take the row of the main process
            if 'R@1' in row or not data.query:              # evaluated, or there is no test set
                rows.append(row)
            # best.pt is written first: if the process is killed before last.pt is written, --resume repeats the epoch.
            if args.fold and epoch > 0 and best_row(rows) is row:
                save_epoch(folder / 'best.pt', args, data, states, row, rows)
            save_epoch(folder / 'last.pt', args, data, states, row, rows)
            write_log(folder, rows)
            show_row(args, data, folder, row, rows, titles=epoch == first)      # last, because printing may fail
    return summary(args, data, folder, rows)


def train_epoch(args, data, sampler, step, optimizer, epoch, total):
    """Trains an epoch, but stops when the run has had `total` steps. Returns its part of the row: loss;
    no_positive, the share of the anchors that have no positive in their batch; and images_per_second."""
    weights = [weight for group in optimizer.param_groups for weight in group['params']]
    steps = min(len(sampler), total - args.step)
    losses = []
    without_positive = 0
    start = time.time()
    lists = itertools.islice(sampler, steps)
    for number, (x, y) in enumerate(batches(data.train, lists, args.device, augment=args), start=1):
        for group in optimizer.param_groups:
            factor = learning_rate_factor(args.step, args, len(sampler), total)
            group['lr'] = group.setdefault('initial_lr', group['lr']) * factor      # initial_lr is set once, in step 1
        loss = step(x, y)
        optimizer.zero_grad()
        loss.backward()
        average_gradients(weights)                          # of the processes of torchrun, if there are any
        if args.clip:
            nn.utils.clip_grad_value_(weights, args.clip)
        optimizer.step()
        args.step += 1
        losses.append(loss.detach())
        same = (y[:, None] == y).sum(dim=1)                 # (B,) size of its class in the batch
        without_positive += (same == 1).sum()
        if number == 1 and steps > 1:                       # restart the clock: compiling and tuning slow down step 1
            start = time.time()
        if number % 20 == 0 or number == steps:             # rarely, because the program waits here for the GPU
            mean = torch.stack(losses).mean().item()
            if not math.isfinite(mean):
                raise NotFinite(f'the loss is {mean} at epoch {epoch}, step {number} of {steps} or in the 19 before; '
                                f'try a lower --lr, or --precision fp32')
            minutes = (time.time() - start) / max(1, number - 1) * (total - args.step) / 60
            show_progress(f'{epoch:7d} {mean:7.4f}   step {number} of {steps}; {minutes:.1f} min of training to come')
    size = len(y)                                           # all batches of an epoch have this size
    return dict(loss=mean, no_positive=float(without_positive) / (steps * size),
                images_per_second=max(1, steps - 1) * size / (time.time() - start))


# ---- 4. evaluation ---------------------------------------------------------------------------------


@torch.no_grad()
@torch.compiler.set_stance('force_eager')                   # --compile serves training alone
def embed(model, images, batch_size=128):
    """Embeddings of a whole set, from centre crops -> (N, D) float32 on the CPU, in the order of the images. `model` is
    any module with weights. It turns images (B, 3, S, S), normalised as for ImageNet, into (B, D)."""
    device = next(model.parameters()).device
    training = model.training
    model.eval()
    share = own_share(len(images))                          # a process that has none embeds one image, and drops it
    lists = BatchSampler(share or [0], batch_size, drop_last=False)
    z = torch.cat([model(x).float() for x, _ in batches(images, lists, device)])
    model.train(training)
    return gather(z[:len(share)], len(images)).cpu()


@torch.no_grad()
def retrieval_metrics(query, query_labels, gallery=None, gallery_labels=None, ks=(1, 2, 4, 8)):
    """Recall@K, R-precision and MAP@R, by exact search with the cosine similarity.

    query    (N, D), query_labels (N,);  without a gallery, the queries are also the gallery
    gallery  (G, D), gallery_labels (G,)
    returns  {'R@1': ..., 'RP': ..., 'MAP@R': ...} in percent; and the number 'unmatched' if it is not 0: see rule 3
    raises   UsageError if there is nothing to retrieve, or if an embedding is NaN or infinite
    A match of a query is another image of its class; R is the number of its matches among all images searched.
    R@K    share of the queries that have a match among their K nearest, for each K of `ks`
    RP     share of matches among the R nearest, averaged over the queries
    MAP@R  mean of P(i) over the R nearest, averaged over the queries. P(i) is the precision among the first i
           if the i-th is a match, and else 0: Reality Check Eq. (3) and (4)

    1. A query is excluded from its own results by its index, for the first result may be a copy of it.
    2. Among results with equal similarities, non-matches come first. (In float32, rounding may tell equal vectors
       apart.) If not all images of one similarity fit among the results, a fixed random order decides which do. So a
       network that maps all images to one point scores about chance or less, not 100.
    3. A query without a match is a miss in R@K and counts as 'unmatched'. RP and MAP@R are means of the others, or 0.
    """
    within = gallery is None                                             # the queries are also the gallery
    searched, searched_labels = (query, query_labels) if within else (gallery, gallery_labels)
    itself = int(within)                                                 # a query is no match of itself
    check_embeddings(query, query_labels, searched, searched_labels, itself)
    query_labels = query_labels.to(query.device)
    searched_labels = searched_labels.to(query.device)
    present = torch.bincount(searched_labels, minlength=int(query_labels.max()) + 1)    # (C,) images of each class
    matches = present[query_labels] - itself                             # (N,) R of each query
    depth = min(max(*ks, int(matches.max())), len(searched) - itself)    # enough for the largest K and R
    found = Counter()                                                    # {k: queries with a match among k results}
    precision, average = [], []                                          # RP and MAP@R of the queries with a match
    for rows, s, index in k_nearest(query, gallery, depth):              # b queries at a time
        hit = searched_labels[index] == query_labels[rows, None]         # (b, depth)
        hit = ranked_hits(s, hit)                                        # (b, depth)
        for k in ks:
            found[k] += int(hit[:, :k].any(dim=1).sum())
        matched = matches[rows] > 0                                      # (b,) rule 3
        rp, map_at_r = precisions(hit[matched], matches[rows][matched])
        precision += rp.tolist()
        average += map_at_r.tolist()
    metrics = {f'R@{k}': 100 * found[k] / len(query) for k in ks}
    metrics['RP'] = 100 * sum(precision) / max(1, len(precision))
    metrics['MAP@R'] = 100 * sum(average) / max(1, len(average))
    if len(average) < len(query):
        metrics['unmatched'] = len(query) - len(average)
    return metrics


def ranked_hits(s, hit):
    """Hits in the order of their similarities s, which are sorted already; where these are equal, non-matches first.
    s, hit (b, k) -> (b, k), which is hit, changed in place"""
    tied = (s[:, 1:] == s[:, :-1]).any(dim=1)                            # (b,) rows with equal similarities: mostly few
    # Two stable sorts: the second keeps the order of the first wherever similarities are equal.
    order = hit[tied].int().argsort(dim=1, stable=True)                  # non-matches, then matches
    by_s = s[tied].gather(1, order).argsort(dim=1, descending=True, stable=True)
    hit[tied] = hit[tied].gather(1, order).gather(1, by_s)
    return hit


def precisions(hit, r):
    """RP and MAP@R of each query, from 0 to 1.  hit (b, k) from ranked_hits; r (b,) its R, >= 1 -> (b,), (b,)"""
    hit = hit[:, :int(r.max())] if len(r) else hit                       # (b, largest R), to save time
    i = torch.arange(1, hit.shape[1] + 1, device=hit.device)             # the i of P(i)
    hit = hit & (i <= r[:, None])                                        # among the R nearest
    p = hit.cumsum(dim=1) / i * hit                                      # Reality Check Eq. (4)
    return hit.sum(dim=1) / r, p.sum(dim=1) / r                          # the second is Reality Check Eq. (3)


def k_nearest(query, gallery, k):
    """Yields, for b queries at a time, their rows (b,), and the cosines and positions of their k nearest, both (b, k).

    query    (N, D)
    gallery  (G, D), k at most G; or None: the queries are the gallery, each without itself, k at most N - 1
    """
    within = gallery is None
    query = F.normalize(query.float(), dim=1)
    gallery = query if within else F.normalize(gallery.float(), dim=1)
    # Files are sorted by class, and of equal similarities a search may return the first. So the gallery is shuffled.
    order = torch.randperm(len(gallery), generator=torch.Generator().manual_seed(0)).to(query.device)
    gallery = gallery[order]
    wanted = k + 1 if within else k                                      # one more, for the query itself
    faiss = import_faiss() if gallery.device.type == 'cpu' else None
    b = max(1, min(4096, 2 ** 28 // len(gallery)))                       # (b, G) similarities take 1 GiB at most
    for rows in torch.arange(len(query), device=query.device).split(b):
        if faiss:
            # It returns NumPy arrays, or tensors where another library has imported faiss.contrib.torch_utils.
            found = faiss.knn(query[rows], gallery, wanted, faiss.METRIC_INNER_PRODUCT)
            s, index = map(torch.as_tensor, found)                       # (b, wanted)
        else:
            s, index = (query[rows] @ gallery.T).topk(wanted, dim=1)
        index = order[index]
        if within:
            itself = index == rows[:, None]
            # If many images equal a query, it may be missing from its own results. Then the last result is dropped.
            itself[:, -1] |= ~itself.any(dim=1)
            s = s[~itself].view(-1, k)
            index = index[~itself].view(-1, k)
        yield rows, s, index


def mean_similarities(z, y):
    """Mean cosine of all positive and of all negative pairs, None if there are none; z (N, D), y (N,) -> two numbers"""
    z = F.normalize(z.double(), dim=1)
    counts = torch.bincount(y)                                           # (C,) images of each class
    sums = z.new_zeros(len(counts), z.shape[1]).index_add_(0, y, z)      # (C, D)
    # The squared length of a sum of vectors is the sum of the cosines of all their pairs (a, b), in a class as well as
    # in the whole set. N of these pairs have a = b: their cosines, 1 each, are subtracted.
    positive = sums.square().sum().item() - len(z)
    positives = counts.square().sum().item() - len(z)
    negative = z.sum(dim=0).square().sum().item() - len(z) - positive
    negatives = len(z) ** 2 - len(z) - positives
    return positive / positives if positives else None, negative / negatives if negatives else None


# ---- 5. images -------------------------------------------------------------------------------------

MEAN = (0.485, 0.456, 0.406)                                             # ImageNet's, RGB
STD = (0.229, 0.224, 0.225)


@dataclass(eq=False, repr=False)
class Images:
    """N decoded images of any height and width, with their labels; or N stored vectors in their place.

    pixels      a sequence of N arrays (height, width, 3), uint8; usually parts of a file mapped into memory
    labels      (N,) LongTensor, 0..C-1
    image_size  S, side of the square crops that the network gets
    classes     C names;  groups  (N,) super-classes, or None where the dataset has none
    paths       N names of files; 'image 0', ... where images are drawn and not read
    vectors     (N, c) features of any network; then there are no pixels
    digests     N hashes, equal for exact copies of a file;  file  that keeps the decoded images; or None
    """
    pixels: list
    labels: torch.Tensor
    image_size: int
    classes: list = ()
    groups: torch.Tensor = None
    paths: np.ndarray = ()
    vectors: torch.Tensor = None
    digests: np.ndarray = None
    file: Path = None

    def __post_init__(self):
        self.labels = self.labels.long()
        self.classes = [nfc(str(class_)) for class_ in self.classes]
        if not len(self.paths):
            self.paths = [f'image {i}' for i in range(len(self))]
        self.paths = np.array(self.paths).astype(str)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        """(height, width, 3) uint8"""
        return self.pixels[i]

    @property
    def num_classes(self):
        return int(self.labels.max()) + 1

    def subset(self, indices):
        """The images at these positions, a LongTensor (n,), or where a mask (N,) is true; their classes are numbered
        anew from 0."""
        kept, labels = self.labels[indices].unique(return_inverse=True)
        columns = {name: getattr(self, name) for name in ('groups', 'paths', 'vectors', 'digests')}
        rows = {name: values[indices] for name, values in columns.items() if values is not None}
        if self.pixels:
            rows['pixels'] = [self.pixels[i] for i in torch.arange(len(self))[indices].tolist()]
        return replace(self, labels=labels, classes=[self.classes[c] for c in kept.tolist() if self.classes], **rows)

    def crop(self, i, box, flip, out):
        """Writes a crop of image i to `out` (3, S, S): a box (top, left, height, width), or if None the centre."""
        x = torch.from_numpy(self[i]).permute(2, 0, 1)
        side = list(out.shape[1:])
        x = v2.functional.resized_crop(x, *box, side) if box else v2.functional.center_crop(x, side)
        out.copy_(x.flip(2) if flip else x)


@dataclass
class Dataset:
    """What load_dataset returns, or what is made by hand of Images. `train` and `evaluate` take either.

    name  of its runs, and in its checkpoints;  ks  the K of Recall@K, 1 among them
    train, query, gallery  Images, or None where there are none; queries without a gallery are searched in themselves
    known    names of the classes that the network was trained on; None: those of .train
    divided  False: one whole was cut into train and query by the names of its classes

    For example, with pictures in memory, and the recipe that train_ms.py has for a folder of images:

    >>> args = train_ms.get_args(['--dataset', 'folder', '--epochs', '5'])
    >>> data = common.Dataset('mine', common.images_from(pictures, labels, args.image_size),
    ...                       common.images_from(others, other_labels, args.image_size))
    >>> model = common.build(args)
    >>> optimizer = common.make_optimizer(args, [dict(params=model.parameters())])
    >>> def step(images, labels):
    ...     return train_ms.multi_similarity_loss(model(images), labels)
    >>> common.train(args, model, data, step, optimizer)
    >>> common.evaluate(common.load_checkpoint('runs/ms-mine-1'), data)
    """
    name: str
    train: Images = None
    query: Images = None
    gallery: Images = None
    ks: tuple = (1, 2, 4, 8)
    known: list = None
    divided: bool = True

    def __post_init__(self):
        self.gallery = self.gallery or self.query

    def new(self, images):
        """Of which images the class is new to the network, (N,) bool"""
        known = {*map(nfc, self.known or (self.train.classes if self.train else ()))}
        places_of_known = [i for i, class_ in enumerate(images.classes) if class_ in known]
        return ~torch.isin(images.labels, torch.tensor(places_of_known, dtype=torch.long))

    def twins(self):
        """Last parts of names, such as `apple` of `market/apple`, that train and query share although nobody said which
        is which: these may be the same classes."""
        train, query = ({class_.split('/')[-1] for class_ in part.classes} for part in (self.train, self.query))
        return set() if self.divided else train & query


def images_from(pictures, labels, image_size, resize=None, classes=None):
    """Images of PIL images and their labels, which are names or numbers.

    image_size  S;  resize  shorter side of the stored images, None: image_size
    classes     all labels, where query and gallery have them in common; None: those that stand in `labels`
    """
    pixels = [pixels_of(picture, resize or image_size) for picture in pictures]
    labels = np.asarray(labels).tolist()
    classes = sorted({*labels} if classes is None else classes)
    return Images(pixels, places(labels, classes), image_size, map(str, classes))


def places(names, classes):
    """The place of each name among the classes, a LongTensor (N,)"""
    numbers = {class_: i for i, class_ in enumerate(classes)}
    return torch.tensor([numbers[name] for name in names])


def batches(images, index_lists, device, augment=None):
    """Yields x (B, 3, S, S), normalised, or vectors (B, c, 1, 1), and y (B,), for each list of indices.

    augment  None for centre crops; else an object with min_crop, flip and jitter, the flags of these names

    Threads crop the next batch while the device works on this one. They draw no random numbers: all of these
    come from the caller's thread in a fixed order, whatever the number of threads. Under torchrun each process draws
    those of the whole batch, and crops a share of it in training; the shares are gathered as bytes.
    """
    if images.vectors is not None:
        for rows in index_lists:
            yield images.vectors[rows, :, None, None].to(device), images.labels[rows].to(device)
        return
    mean, std = (torch.tensor(values, device=device)[:, None, None] for values in (MEAN, STD))
    side = images.image_size
    gpu = device.type == 'cuda'

    def start(indices):
        boxes, flips = draw_crops([images[i].shape[:2] for i in indices], augment)
        rows = own_share(len(indices)) if augment else range(len(indices))
        # In memory the channels come last, as in the network. From pinned memory, copies need not wait for the GPU.
        x = torch.empty(len(rows), side, side, 3, dtype=torch.uint8, pin_memory=gpu).permute(0, 3, 1, 2)
        y = images.labels[indices]
        crops = pool.map(images.crop, *([column[i] for i in rows] for column in (indices, boxes, flips)), x)
        return x, y.pin_memory() if gpu else y, crops

    def finish(x, y, crops):
        list(crops)                                         # waits for the threads
        x = x.to(device, non_blocking=gpu)
        if augment:
            x = gather(x, len(y))
        x = x / 255                                         # (B, 3, S, S)
        if augment and augment.jitter:
            x = jitter_colours(x, augment.jitter)
        return (x - mean) / std, y.to(device, non_blocking=gpu)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        previous = None
        for indices in index_lists:
            batch = start(indices)                          # before the previous one is handed out
            if previous:
                yield finish(*previous)
            previous = batch
        if previous:
            yield finish(*previous)


def draw_crops(sizes, augment):
    """For images of these sizes, boxes (top, left, height, width) and flips as Images.crop takes them"""
    if not augment:
        return [None] * len(sizes), [False] * len(sizes)
    scale = (augment.min_crop, 1.0)
    ratio = (3 / 4, 4 / 3)
    # get_params reads the height and width alone, so these tensors need no pixels.
    boxes = [transforms.RandomResizedCrop.get_params(torch.empty(3, *size, device='meta'), scale, ratio)
             for size in sizes]
    return boxes, (torch.rand(len(sizes)) < (0.5 if augment.flip else 0)).tolist()


def jitter_colours(x, strength):
    """Changes brightness, contrast and saturation of x (B, 3, S, S), which is in [0, 1]. Each image has factors of its
    own, evenly from 1 - strength to 1 + strength. A further augmentation goes beside it, in `batches`."""
    jitter = v2.ColorJitter(strength, strength, strength)
    # In one call, all images would get the same factors. Rounding depends on the layout in memory, which torchrun
    # changes, so it is made the same.
    return torch.stack([jitter(image.contiguous()) for image in x])


def save_pictures(path, x, columns):
    """Writes a PNG file with the pictures x (n, 3, H, W), from 0 to 1, `columns` of them in a row."""
    with written_whole(path) as file:
        torchvision.utils.save_image(x, file, format='png', nrow=columns, pad_value=1)


def as_pictures(x):
    """Normalised crops (n, 3, S, S), as the network gets them, back to values from 0 to 1"""
    return x * x.new_tensor(STD)[:, None, None] + x.new_tensor(MEAN)[:, None, None]


def draw_batch(path, args, data, sampler):
    """Saves up to 64 crops of the first batch of training, as the network gets them; with --per-class, a row for each
    class."""
    set_seed(args.seed, epoch=1)
    x, _ = next(batches(data.train, itertools.islice(sampler, 1), args.device, augment=args))
    if not rank():
        save_pictures(path, as_pictures(x[:64]), columns=args.per_class if args.per_class > 1 else 8)


def decode(paths, resize, what, cache):
    """Decodes images, shorter side `resize`, into a file that later runs map into memory -> what read_decoded returns

    The file has a hash of the images' paths, lengths and times in its name, so that a changed image is decoded anew:
    st_ctime changes even if a program puts the old st_mtime back. It also has one of the code that makes pixels of an
    image, so that a change of this code has an effect.
    """
    stats = [(os.path.abspath(path), os.stat(path)) for path in paths]
    key = repr([(path, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns) for path, stat in stats])
    code = ''.join(map(inspect.getsource, (read_image, pixels_of, to_rgb)))
    key, code = (hashlib.sha256(text.encode()).hexdigest()[:16] for text in (key, code))
    name = f'{what.replace(" ", "-")}-{resize}-{key}'
    file = Path(cache) / f'{name}-{code}.bin'
    if found := read_decoded(file, len(paths)):
        return found
    print(f'{what}: decoding {len(paths):,} images into {file}', flush=True)
    if old := [str(path) for path in file.parent.glob(f'{name}*.bin') if path != file]:
        print(f'The code that decodes has changed. What it left before may be deleted: {", ".join(old)}')
    try:
        with written_whole(file) as out:
            decode_into(out, paths, resize)
    except NotWritten as error:
        print(f'warning: {error}; so nothing is kept, and the next start decodes again: take another --cache',
              file=sys.stderr)
        with TemporaryFile() as out:
            decode_into(out, paths, resize)
            return *read_decoded(out, len(paths))[:2], None
    return read_decoded(file, len(paths))


def decode_into(out, paths, resize):
    """Writes the pixels of all images, and then a row of STORED for each. Raises Unreadable for those that cannot be
    read, when all have been tried."""
    table = []
    errors = []

    def read(path):
        try:
            return read_image(path, resize), hashlib.sha256(Path(path).read_bytes()).hexdigest()
        except UsageError as error:
            errors.append(str(error))
            return np.empty((0, 0, 3), np.uint8), ''

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for start in range(0, len(paths), 512):             # in pieces, or memory would hold all images at once
            for pixels, digest in pool.map(read, paths[start:start + 512]):
                out.write(pixels.tobytes())
                table.append((digest[:32], pixels.shape[:2]))
            show_progress(f'{len(table):,} of {len(paths):,}, {out.tell() / 1e6:,.0f} MB', len(table) == len(paths))
    if errors:
        raise Unreadable(*sorted(errors))
    out.write(np.array(table, STORED).tobytes())
    out.flush()


# What stands behind the pixels, for each image: a hash of its file, height and width
STORED = np.dtype([('digest', 'S32'), ('size', np.int32, 2)])


def read_decoded(file, number):
    """The pixels of `number` images, as Images has them; the digests of their files; and the file of both. None if
    it is not there, or if its length does not agree with the sizes of the images."""
    length = number * STORED.itemsize                                    # of the table
    try:
        content = np.memmap(file, mode='c').view(np.ndarray)             # torch warns of arrays that are read-only
    except (OSError, ValueError):                                        # none, or empty
        return None
    if len(content) <= length:
        return None
    table = content[-length:].copy().view(STORED)
    ends = 3 * table['size'].prod(axis=1, dtype=np.int64).cumsum()       # where each image ends
    if ends[-1] != len(content) - length:
        return None
    parts = np.split(content, ends)
    return [part.reshape(*size, 3) for part, size in zip(parts, table['size'].tolist())], table['digest'], file


def read_image(path, side):
    """(height, width, 3) uint8, RGB, shorter side `side`"""
    try:
        # Only the formats of is_image_file, whatever a file is called: for some others PIL starts a program.
        with Image.open(path, formats=['JPEG', 'PNG', 'PPM', 'BMP', 'TIFF', 'WEBP']) as image:
            return pixels_of(image, side)
    except Exception as error:                              # every image format has errors of its own
        raise UsageError(f'cannot read the image {path}: {error}; replace or remove it') from None


def pixels_of(image, side):
    """A PIL image -> (height, width, 3) uint8, RGB, shorter side `side`"""
    return np.array(transforms.functional.resize(to_rgb(image), side))


def to_rgb(image):
    """A PIL image, upright as its EXIF data say, in 8-bit RGB; 16 and 32 bits of grey are scaled, not cut off."""
    image = ImageOps.exif_transpose(image)
    if image.mode[0] in 'IF':
        grey = np.asarray(image, dtype=np.float64)
        low = grey.min()
        high = grey.max()
        if image.mode[0] == 'I' and 0 <= low <= high <= 65535:
            low = 0
            high = 65535
        image = Image.fromarray((255 * (grey - low) / max(high - low, 1e-12)).round().astype(np.uint8))
    return image.convert('RGB')


# ---- 6. reading ------------------------------------------------------------------------------------

# What a folder or an annotation holds, before it is decided what serves for what. Readers yield (part, path, name of
# the class, super-class or vector or None), where a part is train, query, gallery, or whole where nothing divides it.


def read_cub(root):
    """Lines `<image id> <class>/<file>`, where a class starts with its number"""
    for _, path in split_lines(f'{root}/CUB_200_2011/images.txt'):
        if '/._' not in path:               # macOS leaves files `._<file>` beside the real ones
            # The first 100 classes train: train_test_split.txt belongs to another task, classification.
            part = 'train' if int(path[:3]) <= 100 else 'query'
            yield part, f'{root}/CUB_200_2011/images/{path}', path.split('/')[0], None


def read_cars(root):
    """The authors' .mat file, or a copy with rows of file, box and class. The first 98 classes train; both also divide
    the images of each class, for another task, classification."""
    rows = []                               # (path, number of the class)
    if (root / 'anno_train.csv').exists():
        for split in ('train', 'test'):
            paths = {path.name: path for path in (root / 'car_data/car_data' / split).glob('*/*')}
            for line in (root / f'anno_{split}.csv').read_text().split():
                file, *_, number = line.split(',')
                rows.append((paths[file], int(number)))
    else:
        from scipy.io import loadmat
        annotations = loadmat(f'{root}/cars_annos.mat', squeeze_me=True)['annotations']
        rows = [(f'{root}/{row[0]}', int(row[5])) for row in annotations]
    for path, number in rows:
        yield 'train' if number <= 98 else 'query', str(path), f'{number:03d}', None


def read_sop(root):
    """A header, then lines `image_id class_id super_class_id path`"""
    folder = f'{root}/Stanford_Online_Products'
    for part, file in (('train', 'Ebay_train.txt'), ('query', 'Ebay_test.txt')):
        for _, number, group, path in split_lines(f'{folder}/{file}')[1:]:
            yield part, f'{folder}/{path}', f'{int(number):05d}', int(group) - 1


def read_inshop(root):
    """A count, a header, then lines `img/... id_00000001 train|query|gallery`"""
    for path, class_, part in split_lines(f'{root}/Eval/list_eval_partition.txt')[2:]:
        yield part, f'{root}/Img/{path}', class_, None


def split_lines(path):
    """The words of each line, without empty lines"""
    return [line.split() for line in open(path, encoding='utf-8') if line.strip()]


def read_folder(root):
    """A class is a folder that holds images directly, at any depth; its name is its path below that of its part. Images
    that lie in no folder are one class without a name. But if there is a file files.txt, it names the images."""
    if (root / 'files.txt').exists():
        yield from read_list(root)
        return
    parts = parts_among(path for path in root.iterdir() if path.is_dir() and path.name[0] != '.')
    for part, path in (parts or dict(whole=root)).items():
        for image, class_ in images_below(path):
            yield part, image, class_, None


def read_list(root):
    """files.txt in UTF-8, with lines `path class part`: a path below `root`, which may have spaces; a class, which may
    not; and train, query or gallery, or test for query"""
    rows = []
    for number, line in enumerate((root / 'files.txt').read_text(encoding='utf-8-sig').splitlines(), start=1):
        if line.strip():
            path, *row = line.strip().rsplit(maxsplit=2)
            if len(row) < 2 or row[1] not in ('train', 'query', 'gallery', 'test'):
                raise ValueError(f'line {number} of files.txt is not: path class train|query|gallery')
            rows.append((row[1].replace('test', 'query'), f'{root}/{path}', row[0], None))
    check_files(root, [path for _, path, _, _ in rows])
    return rows


def read_vectors(root):
    """NPZ files take the place of folders; a single one, of any name but train.npz, is the whole."""
    files = list(root.glob('[!.]*.npz'))
    parts = parts_among(files)
    if not parts and len(files) != 1:
        raise ValueError(f'there are {len(files)} NPZ files, and none are train.npz and test.npz; .npy is not read')
    for part, path in (parts or dict(whole=files[0])).items():
        for row in vectors_in(path):
            yield part, *row


# Names of folders and files that are parts of a dataset, and the parts; which parts make a dataset; and what of them is
# read as query
PARTS = dict(train='train', training='train', test='test', testing='test', val='val', valid='val', validation='val',
             query='query', gallery='gallery')
LAYOUTS = (('train', 'query', 'gallery'), ('query', 'gallery'), ('train', 'test'), ('train', 'val'))
QUERIES = dict(test='query', val='query')


def part_name(path):
    return path.name.lower().removesuffix('.npz')


def parts_among(paths):
    """{part: path} of the folders or files that are read as parts: those of the first of LAYOUTS that is there, or
    train where it is alone; {} if all is one whole"""
    found = {}
    for path in paths:
        part = PARTS.get(part_name(path), path)
        if part in found:
            raise ValueError(f'{found[part].name} and {path.name} are both {part}')
        found[part] = path
    for layout in LAYOUTS:
        if {*layout} <= found.keys():
            unread = found.keys() & {*PARTS.values()} - {*layout}
            if 'test' in unread:
                raise ValueError('test and query are two test sets')
            for part in unread:
                print(f'{found[part]} is not read')
            return {QUERIES.get(part, part): found[part] for part in layout}
    return found if found.keys() == {'train'} else {}


def images_below(root):
    """(path, class) of the images in and below a folder, class by class; hidden files and folders are left out. Images
    in root itself, a sheet for example, are the class '' where there is no other, and else no class."""
    classes = {}                                            # {path below root: paths of its images}
    visited = set()
    unread = {}                                             # {path: why it is not read}

    def closed(error):
        unread[error.filename] = 'folders that cannot be opened'

    for folder, folders, files in os.walk(root, followlinks=True, onerror=closed):
        folders[:] = sorted(name for name in folders if name[0] != '.')     # the same order on every disk
        place = os.path.realpath(folder)
        if place in visited:                                # a link to a folder that was read already
            folders.clear()
            continue
        visited.add(place)
        name = Path(folder).relative_to(root).as_posix()
        for path in (os.path.join(folder, file) for file in sorted(files) if file[0] != '.'):
            if not os.path.isfile(path):
                unread[path] = 'dead links'
            elif torchvision.datasets.folder.is_image_file(path):
                classes.setdefault(name, []).append(path)
            elif name != '.' or not folders:                # HEIC files or videos of a phone, for example
                unread[path] = Path(path).suffix.lower() or 'without ending'
    if unread:
        counts = ', '.join(f'{number} {why}' for why, number in Counter(unread.values()).most_common(5))
        print(f'warning: {root}: {len(unread)} files are not read ({counts}), the first is {min(unread)}; convert '
              'images among them to JPEG', file=sys.stderr)
    alone = classes.pop('.', [])
    if not classes and alone:
        classes[''] = alone
    if not classes:
        raise ValueError(f'{root} holds no images')
    # Of train/apple and train/pear, say, it is train/ that was meant as a part.
    holders = Counter(folder for name in classes for folder in Path(name).parents if part_name(folder) in PARTS)
    for folder, number in holders.items():
        if number > 1:
            meant = root / (folder.parent if folder.parent.name else folder)
            raise ValueError(f'{root / folder} has the name of a part, and {number} classes in it, but is not read as '
                             f'a part here: did you mean --data {meant}?')
    return [(path, name) for name in sorted(classes) for path in classes[name]]


def vectors_in(path):
    """(name of an image, class, vector (c,)) of an NPZ file by save_vectors or eval.py --embed, class by class"""
    with distrusting(path), np.load(path) as saved:
        if 'gallery_labels' in saved:
            raise ValueError('it has a gallery, which should lie in gallery.npz, beside query.npz')
        embeddings = saved['embeddings'].astype(np.float32)              # (N, c)
        labels = saved['labels']                                         # (N,)
        classes = saved['classes'].astype(str)                           # (C,)
        paths = saved.get('paths', np.arange(len(labels)))               # (N,)
        check_vectors(embeddings, labels, classes, paths)
    return sorted(zip(map(str, paths), classes[labels].tolist(), embeddings), key=lambda row: row[1])


def check_vectors(embeddings, labels, classes, paths):
    """Raises ValueError where these are not N finite vectors (N, c), N labels that are places in `classes`, N paths."""
    if embeddings.ndim != 2 or labels.dtype.kind not in 'iu' or not embeddings.shape[:1] == labels.shape == paths.shape:
        raise ValueError('needed are N embeddings (N, c), N labels that are integers, and N paths; these are '
                         f'embeddings {embeddings.shape}, {labels.dtype} labels {labels.shape}, paths {paths.shape}')
    if not 0 <= labels.min() <= labels.max() < len(classes):
        raise ValueError(f'labels are from {labels.min()} to {labels.max()}, and should be places in `classes`, from 0 '
                         f'to {len(classes) - 1}')
    if not 0 < np.linalg.norm(embeddings, axis=1).mean() < np.inf:
        raise ValueError('some embeddings are NaN or infinite, or all are 0')


def save_vectors(folder, data, train, query=None, gallery=None, paths=()):
    """Writes vectors of a dataset, such as features of a network of your own, for --dataset vectors: train.npz, and
    test.npz; with a gallery query.npz and gallery.npz in place of the latter. For example, those of a vision
    transformer, without the rest of a classifier:

    >>> data = common.load_dataset('folder', 'my_photos', resize=256, image_size=224)
    >>> net = torchvision.models.vit_b_16(weights='IMAGENET1K_V1')     # any module: (B, 3, 224, 224) -> (B, c)
    >>> net.heads = torch.nn.Identity()
    >>> vectors = [common.embed(net, images) for images in (data.train, data.query) if images]
    >>> common.save_vectors('my_vectors', data, *vectors)

    Any script with --dataset vectors --data my_vectors then trains a linear head in seconds. Epoch 0 is the result of
    the features themselves: without --dim, the head begins as the identity. Folds and eval.py work as with images,
    unless they draw these. Files of your own need the arrays `embeddings` (N, c), `labels` (N,), from 0 on, and
    `classes`, their names.

    data                   what load_dataset returned
    train, query, gallery  (N, c), (Q, c), (G, c) vectors of its images, by any network: tensors or arrays. Query and
                           gallery are given where the dataset has them, and only there; a gallery, where it is another
                           set than the queries
    paths                  for each of these the names of its images, in the order of the vectors, which have to be
                           those of `data`; (): not compared
    Raises UsageError before anything is written.
    """
    names = ['train', 'test'] if data.gallery is data.query else ['train', 'query', 'gallery']
    parts = [data.train, data.query, data.gallery][:len(names)]
    files = {}
    for name, images, vectors, order in itertools.zip_longest(names, parts, (train, query, gallery), paths):
        if (images is None) != (vectors is None):
            raise UsageError('save_vectors needs those of data.query where there are queries, and of data.gallery '
                             'where this is not data.query')
        if images is None:
            continue
        files[name] = vector_arrays(images, vectors)
        try:
            check_vectors(**files[name])
            if order is not None and list(map(str, order)) != images.paths.tolist():
                raise ValueError('the images are in another order')
        except ValueError as error:
            raise UsageError(f'save_vectors, {name}: {error}') from None
    for name, arrays in files.items():
        with written_whole(Path(folder).expanduser() / f'{name}.npz') as file:
            np.savez(file, **arrays)


def vector_arrays(images, vectors):
    """What an NPZ file has of Images and their vectors (N, c): embeddings, labels, classes, paths"""
    return dict(embeddings=torch.as_tensor(vectors).float().cpu().numpy(), labels=images.labels.numpy(),
                classes=np.array(images.classes), paths=images.paths)


def download(name, root):
    """Fetches the archive of a dataset and unpacks it in the folder `root`, unless its own folder is there already."""
    url = DATASETS[name].get('url')
    if not url:
        raise UsageError(f'--download fetches cub and sop, not {name}; README says where cars and inshop come from')
    root = Path(root).expanduser().resolve()
    folder = root / Path(url).stem
    if folder.exists():
        return
    print(f'fetching {url} for {folder}', flush=True)
    try:
        root.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=root) as temporary:     # what is not whole stays there, and vanishes with it
            torchvision.datasets.utils.download_and_extract_archive(url, temporary, md5=DATASETS[name]['md5'])
            os.replace(Path(temporary) / folder.name, folder)
    except Exception as error:              # no connection, a wrong checksum, a cut archive, a full disk
        raise UsageError(f'cannot fetch {url}: {error}; fetch it in another way, and unpack it in {root}') from None


# ---- 7. roles --------------------------------------------------------------------------------------


def load_dataset(name, root='data', resize=None, image_size=None, cache='cache', known=None, fold=None, only=None):
    """A Dataset of files, or the built-in one.

    name        shapes, folder, vectors, cub, cars, sop or inshop
    root        folder that holds what the dataset's site unpacks;  cache  folder for the decoded images
    image_size  side of the square crops, pixels; None: that of the training recipes
    resize      shorter side of the stored images, pixels; None: as much larger than image_size as in the recipes
    known       only for an evaluation: names of the classes that the network was trained on, or (). Then .train is not
                read. Of a folder without train/ and test/, all other classes are the test set.
    fold        'i/n': the test set is not read, and block i of n of the training classes takes its place
    only        where nothing is measured, what the images are for: one class is enough then, all may be known, and
                nobody is warned of copies. 'train': nothing else is read. 'embed': the test set, or else all images.
                'search': what a photo is searched in, which is .gallery where the folder has one, and else .train and
                .query
    `gallery is query` where the test set is searched in itself. Both are None where a folder holds train/ alone. Train
    labels are 0..C-1; query and gallery share theirs. Raises UsageError if files or counts are not as published.
    """
    if name not in DATASETS:
        raise UsageError(f'there is no dataset {name!r}, but {", ".join(DATASETS)}; one that was made by hand is given '
                         'to common.train, with --resume as well, and to common.evaluate')
    image_size = image_size or BASE[name]['image_size']
    resize = resize or resize_for(BASE[name], image_size)
    if resize < image_size:
        raise UsageError(f'--resize {resize} is smaller than --image-size {image_size}: crops are cut from that image')
    if name == 'shapes':
        loaded = dict(zip(('train', 'query'), draw_shapes(resize, image_size)))
        divided = True
    else:
        parts, divided = list_images(name, root, known, fold, only)
        loaded = load_parts(name, parts, resize, image_size, cache)
        if not only:
            warn_of_copies(loaded)
    data = Dataset(name, **loaded, ks=DATASETS[name].get('ks', Dataset.ks), known=known, divided=divided)
    if fold:
        hold_out(data, fold)
    if known and not data.new(data.query).any():
        print(f'warning: {root}: all {len(data.query.classes)} classes to evaluate were in the training set, which '
              'flatters the result', file=sys.stderr)
    if not only and data.train and data.query and (twins := data.twins()):
        print(f'warning: {root} has no train/ and test/, and {len(twins)} classes of either half have one name, but '
              f'for the folders above it, the first is {min(twins)}: are they the same?', file=sys.stderr)
    return data


def list_images(name, root, known=None, fold=None, only=None):
    """{role: rows} of what is read, and whether it came in parts; a role is train, query or gallery, and the arguments
    are those of load_dataset."""
    root = Path(root).expanduser()
    try:
        parts = {}
        for part, path, class_, extra in DATASETS[name]['read'](root):
            parts.setdefault(part, []).append((path, nfc(class_), extra))
        divided = 'whole' not in parts
        own = 'counts' not in DATASETS[name]
        if not own:
            check_list(root, parts, DATASETS[name]['counts'])
        if only == 'search':                # in the parts that the training has decoded
            if 'gallery' in parts:
                parts = dict(gallery=parts['gallery'])
            elif not divided:
                parts = halves(parts['whole']) if len(classes_of(parts['whole'])) > 3 else dict(query=parts['whole'])
        elif known is not None:
            parts = to_evaluate(root, parts, {*map(nfc, known)}, only)
        else:
            if not divided:
                parts = halves(parts['whole'])
            check_overlap(root, parts, own)
            if fold or only == 'train':
                parts = dict(train=parts['train'])
        if not only:
            check_parts(root, parts)
    except Exception as error:              # a file is missing, cut short, or a web page under its name, for example
        raise UsageError(f'{name} cannot be loaded: {error}; {root.resolve()}, which --data names, should hold '
                         f'{DATASETS[name]["layout"]}, see README') from None
    return parts, divided


def nfc(name):
    """The name of a class as it is kept: a Mac may write the letter ö as an o and two dots."""
    return unicodedata.normalize('NFC', name)


def classes_of(rows):
    return {class_ for _, class_, _ in rows}


def halves(rows):
    """The first half of the sorted classes trains, the rest tests: of five classes, the one in the middle tests."""
    classes = sorted(classes_of(rows))
    if len(classes) < 4:
        raise ValueError(f'there are {len(classes)} classes, and without train/ and test/ at least 4 are needed')
    first = set(classes[:len(classes) // 2])
    return dict(train=[row for row in rows if row[1] in first], query=[row for row in rows if row[1] not in first])


def to_evaluate(root, parts, known, only):
    """Query and gallery: the test set, or where there is none, the classes that the network does not know. Unless
    nothing is measured, there must be some."""
    if 'query' in parts or 'gallery' in parts:
        return {role: parts[role] for role in ('query', 'gallery') if role in parts}
    rows = sum(parts.values(), [])                          # of the one part that there is
    new = [row for row in rows if row[1] not in known]
    if not (new or only):
        raise ValueError('all its classes were in the training set, or chose the epoch; other images of them can be '
                         'evaluated if they lie in test/ or val/, beside train/')
    if 0 < len(new) < len(rows):
        print(f'{root}: {len(classes_of(rows) & known)} classes were in the training set, or chose the epoch, and are '
              'left out')
    return dict(query=new or rows)


def check_list(root, parts, counts):
    """Raises ValueError where an annotation does not have the published counts, or where check_files does."""
    for part, expected in counts.items():
        found = len(parts[part]), len(classes_of(parts[part]))
        if found != expected:
            raise ValueError(f'{part} has (images, classes) {found}, expected are {expected}')
    check_files(root, [path for path, *_ in sum(parts.values(), [])])


def check_files(root, paths):
    """Raises ValueError where a list names an image twice, or images that are not below `root`, or not there."""
    twice = [path for path, times in Counter(map(os.path.normpath, paths)).items() if times > 1]
    outside = [path for path in paths if '..' in path.removeprefix(str(root)).split('/')]
    missing = [path for path in paths if not os.path.isfile(path)]
    for wrong, text in ((twice, 'are listed twice'), (outside, 'lie elsewhere'), (missing, 'are missing')):
        if wrong:
            raise ValueError(f'{len(wrong):,} of {len(paths):,} images {text}, the first is {wrong[0]}')


def check_overlap(root, parts, own):
    """Raises ValueError if a class trains and tests; in a folder of one's own, that is a warning."""
    if both := classes_of(parts.get('train', [])) & classes_of(parts.get('query', [])):
        text = f'{len(both)} classes are in the training set and in the test set, the first is {min(both)}'
        if not own:
            raise ValueError(text)
        print(f'warning: {root}: {text}', file=sys.stderr)


def check_parts(root, parts):
    """Raises ValueError if a training set or a test set has fewer than two classes. Warns if no query has a match."""
    for role, what in (('train', 'the training set'), ('query', 'the test set')):
        classes = len(classes_of(parts.get(role, [])))
        if classes < 2 and (role in parts or role == 'query' and 'gallery' in parts):
            raise ValueError(f'{what} needs 2 classes or more, and has {classes}')
    query = [class_ for _, class_, _ in parts.get('query', [])]
    found = classes_of(parts['gallery']) & {*query} if 'gallery' in parts else len(query) - len({*query})
    if query and not found:
        print(f'warning: {root}: nothing can be measured: no test image has another one of its class to be found',
              file=sys.stderr)


def joined(parts):
    """The Images of several sets as one; classes of one name are one class."""
    classes = sorted({class_ for part in parts for class_ in part.classes})
    names = [part.classes[label] for part in parts for label in part.labels.tolist()]
    return Images([pixels for part in parts for pixels in part.pixels], places(names, classes), parts[0].image_size,
                  classes, paths=np.concatenate([part.paths for part in parts]))


def load_parts(name, parts, resize, image_size, cache):
    """{role: Images} for what list_images returns. Images that cannot be read are named, of all roles at once."""
    loaded = {}
    broken = []
    for role, rows in parts.items():
        paths, names, extra = zip(*rows)
        # Query and gallery are numbered together.
        shared = rows if role == 'train' else parts.get('query', []) + parts.get('gallery', [])
        classes = sorted(classes_of(shared))
        labels = places(names, classes)
        if name == 'vectors':
            loaded[role] = Images([], labels, 1, classes, paths=paths, vectors=torch.tensor(np.stack(extra)))
            continue
        try:
            pixels, digests, file = decode(paths, resize, f'{name} {role}', cache)
        except Unreadable as error:
            broken += error.args
            continue
        groups = None if extra[0] is None else torch.tensor(extra)
        loaded[role] = Images(pixels, labels, image_size, classes, groups, paths, digests=digests, file=file)
    if len(broken) > 1:
        print(*broken, sep='\n', file=sys.stderr)
        total = sum(map(len, parts.values()))
        raise UsageError(f'{len(broken)} of {total:,} images cannot be read; they are listed above: replace or remove '
                         'them')
    if broken:
        raise UsageError(broken[0])
    return loaded


def warn_of_copies(parts):
    """Warns of test images that have an exact copy in any part {role: Images}: they are too easy."""
    originals = {}                                          # {digest: path}
    copies = []
    # In this order train is the last, so a copy in it is found as the copy of a test image.
    for role, images in sorted(parts.items()):
        if images.digests is None:
            return
        for digest, path in zip(images.digests.tolist(), images.paths.tolist()):
            if digest in originals:
                copies.append(f'{path}, a copy of {originals[digest]}')
            elif role != 'train':
                originals[digest] = path
    if copies:
        print(f'warning: {len(copies)} files are copies of test images, which flatters the result:', *copies[:20],
              *['...'] * (len(copies) > 20), sep='\n', file=sys.stderr)


def hold_out(data, fold):
    """Splits the training set of `data`: with a fold of 'i/n', block i of n blocks of classes validates, the others
    train. The blocks are contiguous, as in Section 3.3 of the Reality Check, and of equal size up to one class."""
    i, n = map(int, fold.split('/'))
    classes = data.train.num_classes
    block = torch.arange(classes) * n // classes                         # (C,)
    if torch.bincount(block, minlength=n).min() < 2:
        raise UsageError(f'--fold {fold} needs at least two classes in each block, of {classes} training classes')
    held = block[data.train.labels] == i                                 # (N,)
    data.query = data.gallery = data.train.subset(held)
    data.train = data.train.subset(~held)


# read: what finds the images. ks: the K of Recall@K in the literature, where they are not 1, 2, 4, 8. counts: the
# published numbers of images and classes of each part; without them it is data of one's own. layout: what the folder
# --data holds; README says where it comes from. url, md5: the archive that --download fetches, and its checksum; it
# unpacks to a folder of its own name.
DATASETS = dict(
    shapes={},
    folder=dict(read=read_folder,
                layout='a folder of images for each class; without train/ and test/, half of them are the test set'),
    vectors=dict(read=read_vectors,
                 layout='train.npz and test.npz, or one NPZ file, as save_vectors writes them'),
    cub=dict(read=read_cub, counts=dict(train=(5864, 100), query=(5924, 100)),
             layout='CUB_200_2011/ with images.txt and images/ (--download fetches CUB_200_2011.tgz, 1.1 GB)',
             url='https://data.caltech.edu/records/65de6-vp158/files/CUB_200_2011.tgz',
             md5='97eceeb196236b17998738112f37df78'),
    cars=dict(read=read_cars, counts=dict(train=(8054, 98), query=(8131, 98)),
              layout='cars_annos.mat and car_ims/, or anno_train.csv, anno_test.csv and car_data/car_data/'),
    sop=dict(ks=(1, 10, 100, 1000), read=read_sop, counts=dict(train=(59551, 11318), query=(60502, 11316)),
             layout='Stanford_Online_Products/ with Ebay_train.txt and Ebay_test.txt (--download fetches '
                    'Stanford_Online_Products.zip, 2.9 GB)',
             url='http://ftp.cs.stanford.edu/cs/cvgl/Stanford_Online_Products.zip',
             md5='7f73d41a2f44250d4779881525aea32e'),
    inshop=dict(ks=(1, 10, 20, 30, 40, 50), read=read_inshop, layout='Eval/list_eval_partition.txt and Img/img/',
                counts=dict(train=(25882, 3997), query=(14218, 3985), gallery=(12612, 3985))))


# ---- 8. shapes -------------------------------------------------------------------------------------


def superformula(m, n1, n2, n3):
    """Gielis' curve, r(t) = (|cos(m t/4)|^n2 + |sin(m t/4)|^n3)^(-1/n1), at 721 angles t from -pi to pi, scaled so that
    its longest lobe has length 1"""
    t = torch.linspace(-math.pi, math.pi, 721)
    angle = m * t / 4
    r = (angle.cos().abs() ** n2 + angle.sin().abs() ** n3) ** (-1 / n1)
    return r / r.max()


def draw_shapes(resize, image_size, classes=100, per_class=20):
    """The built-in dataset: 100 classes of shapes x 20 images for training, and 100 other classes for the test.

    A class is a curve of Gielis' superformula with two colours and a pattern of stripes. Its images differ in
    rotation, scale, shift, aspect, brightness, background and noise, so that neither pixels nor colours alone tell
    the classes apart.
    """
    generator = torch.Generator().manual_seed(2022)

    def uniform(low, high, *shape):
        return low + (high - low) * torch.rand(*shape, generator=generator)

    def draw_class(n):
        """-> (n, 3, S, S) in [0, 1]"""
        m = int(torch.randint(2, 9, (1,), generator=generator))         # lobes
        n1, n2, n3 = (uniform(low, high, 1).exp() for low, high in ((-0.6, 1.6), (-1.2, 2.2), (-1.2, 2.2)))
        frequency = uniform(3, 9, 1)
        angle = uniform(0, math.pi, 1)
        colours = uniform(0, 1, 2, 3)
        curve = superformula(m, n1, n2, n3)
        scale = uniform(0.5, 0.75, n, 1, 1)
        aspect = uniform(0.75, 1.33, n, 1, 1).sqrt()
        x, y = (grid[:, None] - uniform(-0.25, 0.25, 2, n, 1, 1)).unbind()   # (n, S, S)
        turn = uniform(0, 2 * math.pi, n, 1, 1)
        across = (turn.cos() * x + turn.sin() * y) / (scale * aspect)    # from the picture to the shape's frame
        along = (turn.cos() * y - turn.sin() * x) / (scale / aspect)
        radius = curve[((torch.atan2(along, across) + math.pi) / (2 * math.pi) * 720).round().long()]
        inside = torch.sigmoid((radius - torch.hypot(across, along)) * 20)[:, None]   # (n, 1, S, S)
        stripes = torch.sigmoid(4 * torch.sin(frequency * (across * angle.cos() + along * angle.sin())))[:, None]
        first, second = (colours + uniform(-0.05, 0.05, n, 2, 3))[..., None, None].unbind(1)   # (n, 3, 1, 1)
        slope = (grid * uniform(-0.3, 0.3, n, 2, 1, 1)).sum(1, keepdim=True)   # (n, 1, S, S)
        background = uniform(0, 1, n, 1, 1, 1) + uniform(-0.25, 0.25, n, 3, 1, 1) + slope
        picture = background + inside * (second + stripes * (first - second) - background)
        picture = picture * uniform(0.6, 1.2, n, 1, 1, 1)
        return (picture + 0.03 * torch.randn(picture.shape, generator=generator)).clamp(0, 1)

    def draw_set(name):
        pixels = torch.cat([(255 * draw_class(per_class)).byte().permute(0, 2, 3, 1) for _ in range(classes)])
        labels = torch.arange(classes).repeat_interleave(per_class)
        return Images(list(pixels.numpy()), labels, image_size, [f'{name} shape {i}' for i in range(classes)])

    side = torch.linspace(-1, 1, resize)
    grid = torch.stack(torch.meshgrid(side, side, indexing='xy'))       # (2, S, S) x and y
    return draw_set('training'), draw_set('test')


# ---- 9. runs ---------------------------------------------------------------------------------------

# A run is the folder runs/<name>/ with log.jsonl, a JSON object for each evaluated epoch, and last.pt; with --fold,
# best.pt is the epoch that has the highest MAP@R on the validation classes.


def new_folder(args, data):
    """Makes runs/<name>/; without --name it is script, dataset and the next free number."""
    if args.name:
        folder = Path('runs') / args.name
        folder.mkdir(parents=True, exist_ok=True)
        return folder
    for number in itertools.count(1):
        folder = Path('runs') / f'{args.script.removeprefix("train_")}-{data.name}-{number}'
        with suppress(FileExistsError):
            folder.mkdir(parents=True)
            return folder


@contextmanager
def held(folder):
    """Inside `with`, no other process gets the folder of this run: of two starts at once, the second ends in one line.
    The kernel frees a folder whose process has ended, however it ended."""
    if rank() or not fcntl:
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(f'{folder} belongs to a run that is going on: wait for it, or choose another '
                             '--name') from None
        except OSError:                                     # this disk has no locks
            pass
        yield
    finally:
        os.close(handle)


def evaluate(model, data):
    """What a row of the log says about the test set: the metrics, and the mean similarities s+ and s- of queries.
    Nothing if there is no test set."""
    return score(data, *embed_test(model, data)) if data.query else {}


def embed_test(model, data):
    """Embeddings of the queries (N, D), and of the gallery (G, D) or None where queries are searched in themselves"""
    device = next(model.parameters()).device
    where = device if device.type == 'cuda' else 'cpu'                   # there the search will run
    z = embed(model, data.query).to(where)
    if data.gallery is data.query:
        return z, None
    return z, embed(model, data.gallery).to(where)


def score(data, z, gallery=None):
    """The row of `evaluate` for embeddings as embed_test returns them; s+ is missing where no query has a positive.
    Where the network knows some of the classes, new_R@1 and so on are of the queries of new classes, among images of
    new classes. A further measure goes here, with a search of its own if it looks deeper: among ties, another depth
    moves R@1."""
    metrics = retrieval_metrics(z, data.query.labels, gallery, data.gallery.labels, data.ks)
    new = data.new(data.query)
    among = data.new(data.gallery)
    if not new.all() and new.sum() > 1 and among.any():
        searched = None if gallery is None else gallery[among]
        part = retrieval_metrics(z[new], data.query.labels[new], searched, data.gallery.labels[among], data.ks)
        metrics |= {f'new_{key}': value for key, value in part.items()}
    for key, value in zip(('s+', 's-'), mean_similarities(z, data.query.labels.to(z.device))):
        if value is not None:
            metrics[key] = value
    return metrics


def best_row(rows):
    """The row with the highest MAP@R, the first if there are several; epoch 0 only if there is no other"""
    return max(rows[1:] or rows, key=lambda row: row['MAP@R'])


def out_of_patience(args, rows):
    """With --fold: whether the last --patience evaluations were no better than one before them"""
    if not args.fold or not rows:
        return False
    since = len(rows) - 1 - rows.index(best_row(rows))                   # evaluations since the best one
    return since >= args.patience


def print_recipe(args, model, data, sampler, epochs):
    """What is going to run, before it runs: the data, the batches, and all flags."""
    part = 'validation' if args.fold else 'test'
    until = f' or until {args.patience} evaluations bring no gain' if args.fold else ''
    test = 'no test images, so nothing will be evaluated'
    if data.query:
        searched = '' if data.gallery is data.query else f' in {len(data.gallery):,}'
        test = f'{len(data.query):,}{searched} {part} images of {len(data.query.labels.unique()):,} classes'
    size = getattr(sampler, 'batch_size', args.batch_size)               # smaller where there are few classes
    print(f'{data.name}: {len(data.train):,} training images of {data.train.num_classes:,} classes, {test}\n'
          f'{epochs} epochs{until}, of {len(sampler)} batches of {size} images, on {args.device} in {model.precision}')
    print(', '.join(f'{name} {value}' for name, value in kept(args, vars(args)).items()))


def show_row(args, data, folder, row, rows, titles):
    """Prints a row of the table, '-' for what was not measured. Before the first one stand how the run goes on if it is
    stopped, which it can from now on, and titles."""
    measured = [key for key in rows[-1] if key.startswith(('R@', 'MAP@R', 's+', 's-'))]
    columns = [('epoch', 'epoch', 'd'), ('loss', 'loss', '.4f')]
    columns += [(key, key, '.3f' if key[0] == 's' else '.2f') for key in measured]
    columns += [('no-pos', 'no_positive', '.0%'), ('img/s', 'images_per_second', '.0f'), ('min', 'minutes', '.1f')]
    if titles:
        way = f'python {args.script}.py --resume {folder}'
        if data.name not in DATASETS:
            way = f'the flag --resume {folder}, and common.train with the same dataset'
        print(f'After a stop, this goes on: {way}')
        print(' '.join(f'{title:>7}' for title, _, _ in columns))
    cells = ['-' if row.get(key) is None else format(row[key], form) for _, key, form in columns]
    show_progress(' '.join(f'{cell:>7}' for cell in cells), done=True)
    if row['epoch'] and row.get('s-', 0) > 0.98:
        print('        collapse: all embeddings are almost one point; lower --lr, or raise --warmup')


def summary(args, data, folder, rows):
    """Prints what the result means, and how it was chosen. Returns its row: the last, or with --fold the best."""
    if not data.query:
        print('All classes were trained on, so there is no result. To search for a photo:\n'
              f'python eval.py --checkpoint {best_of(folder)} --query PHOTO')
        return rows[-1]
    best = best_row(rows)
    row = best if args.fold else rows[-1]
    new = ''
    if seen := len(data.query.labels[~data.new(data.query)].unique()):
        new = f'; {seen} of its classes are in the training set as well, which flatters this number'
        if 'new_R@1' in row:
            new += f': for images of the others, among themselves, it is {row["new_R@1"]:.1f}'
    elif not data.twins():
        new = '; none of these classes is in the training set'
        if args.weights != 'none' or data.train.vectors is not None:
            new += ', but the pretrained weights may have seen some'
    print(f'R@1 = {row["R@1"]:.1f}: for {row["R@1"]:.1f} % of the {"validation" if args.fold else "test"} images, the '
          f'most similar other image shows the same class{new}.\n'
          f'Before training it was {rows[0]["R@1"]:.1f}.')
    if args.fold:
        print(f'This is epoch {row["epoch"]}, which has the highest validation MAP@R; no test image was read.')
    elif best is not row and best['epoch']:
        print(f'(Epoch {best["epoch"]} had the highest MAP@R. To report it would be to choose on the test set.)')
    if row.get('unmatched'):
        print(f'{row["unmatched"]} queries have no match in the gallery: misses in R@K, left out of RP and MAP@R.')
    if data.name in DATASETS:
        print(f'Next: python eval.py --checkpoint {best_of(folder)}')
    else:
        print(f"Next: common.evaluate(common.load_checkpoint('{best_of(folder)}'), data)")
    return row


def show_progress(text, done=False):
    """A line that is overwritten while work goes on. Where output goes to no terminal, only its last state shows."""
    if sys.stdout.isatty():
        width = shutil.get_terminal_size().columns - 1      # a longer line would not be overwritten as a whole
        print(f'\r{text if done else text[:width]:<{width}}', end='\n' if done else '', flush=True)
    elif done:
        print(text, flush=True)


def set_seed(seed, epoch=None):
    """Seeds everything random. An epoch has a seed of its own, so that a resumed run draws what it would have drawn."""
    seed = seed if epoch is None else seed * 100_003 + epoch            # no epoch of another --seed has this one
    random.seed(seed)
    np.random.seed(seed % 2 ** 32)
    torch.manual_seed(seed % 2 ** 63)                       # of every device


# ---- 10. files -------------------------------------------------------------------------------------


def trained_on(args, data):
    """What a checkpoint says of its images. classes are those that the network knows; those of the validation belong to
    them, because they choose the epoch."""
    classes = data.train.classes + (data.query.classes if args.fold else [])
    return dict(classes=classes, images=len(data.train))


def save_epoch(path, args, data, states, row, rows):
    """Writes the checkpoint of an epoch, with whatever a run needs to go on behind it."""
    others = {name: part.state_dict() for name, part in states.items() if name != 'model'}
    save_checkpoint(path, args, states['model'], epoch=row['epoch'], step=args.step, rows=rows, minutes=row['minutes'],
                    **trained_on(args, data), **others)


def begin(args, data, sampler, folder):
    """What `resume` returns, of a run that begins now. Both set args.step, the steps of the run that are done. A
    picture of the first batch shows what will be trained on."""
    if data.train.vectors is None:
        draw_batch(folder / 'batch.png', args, data, sampler)
    args.dataset = data.name
    args.step = 0
    return 0, [], time.time()


def resume(args, data, states, per_epoch, total):
    """Loads the last checkpoint of a run into `states` and args.step -> the epoch to go on with, its rows, and the time
    of its start, moved so that the minutes of a row leave out the pause."""
    saved = read_checkpoint(args.resume / 'last.pt')
    if any(saved.get(name, value) != value for name, value in trained_on(args, data).items()):
        raise UsageError(f'{args.resume} was trained on other images than {args.data} holds; start a new run')
    with distrusting(args.resume):
        for name, part in states.items():
            part.load_state_dict(saved[name])
        epoch = saved['epoch']
        # Older checkpoints have the number of steps as torch's schedules call it.
        args.step = done = saved['step'] if 'step' in saved else saved['schedule']['last_epoch']
        rows = saved['rows']
        evaluated = rows[-1]['epoch']
        began = time.time() - 60 * saved['minutes']
    if done > total:
        raise UsageError(f'{args.resume} has {done} steps done, and --epochs and --steps ask for {total}')
    if done < total and done % per_epoch:
        raise UsageError(f'{args.resume} ended inside an epoch, after {done % per_epoch} of its {per_epoch} steps, and '
                         'cannot go on with other --steps or --epochs; start a new run')
    write_log(args.resume, rows)                            # exactly the rows of the checkpoint
    # With --eval-every 2, say, a run may have stopped after an epoch that was not evaluated. If --epochs makes this one
    # the last, it is evaluated now.
    first = epoch if done == total and evaluated < epoch else epoch + 1
    return first, rows, began


def write_log(folder, rows):
    """Writes the rows. Another tool that logs gets rows[-1] here, of each evaluated epoch."""
    if not rank():
        with written_whole(folder / 'log.jsonl') as file:
            file.write(''.join(json.dumps(row) + '\n' for row in rows).encode())


def kept(args, values):
    """What a checkpoint keeps of `values`, {flag: value}: no paths, see FLAGS"""
    return {name: value for name, value in values.items()
            if name in args.defaults.keys() - marked(args, 'here') and value is not None}


def save_checkpoint(path, args, model, **more):
    """Writes the model, what built it (script, arguments, defaults, seed, versions), and whatever else is given."""
    if rank():
        return
    if broken := [name for name, value in model.state_dict().items() if not value.isfinite().all()]:
        raise NotFinite(f'{broken[0]} is not finite; {path} stays as it was; try a lower --lr, or --precision fp32')
    versions = dict(python=sys.version.split()[0], torch=str(torch.__version__), torchvision=torchvision.__version__)
    with written_whole(path) as file:
        torch.save(dict(script=args.script, args=kept(args, vars(args)), defaults=kept(args, args.defaults),
                        data=str(Path(args.data).resolve()),
                        seed=args.seed, versions=versions, embedder=model.config, model=model.state_dict(), **more),
                   file)


def best_of(path):
    """The file that a run folder stands for: best.pt if there is one, else last.pt. A file stands for itself."""
    path = Path(path)
    if not path.is_dir():
        return path
    best = path / 'best.pt'
    return best if best.exists() else path / 'last.pt'


def read_checkpoint(path):
    """The dict that save_checkpoint wrote. A run folder stands for the file that best_of names."""
    saved = read_file(best_of(path))
    if not (isinstance(saved, dict) and isinstance(saved.get('args'), dict)
            and {'script', 'embedder', 'model'} <= saved.keys()):
        raise UsageError(f'{path} is no checkpoint of these scripts')
    saved['classes'] = [*map(nfc, saved.get('classes', []))]
    place = saved.get('data', '')                           # where it was, if what was typed leads elsewhere from here
    if os.path.isdir(place) and place != str(Path(saved['args']['data']).resolve()):
        saved['args']['data'] = place
    return saved


def load_checkpoint(path, device='cpu', precision='auto'):
    """A trained Embedder, ready to embed. A run folder stands for its best.pt if there is one, else for its last.pt.

    model.transform  turns a PIL image into (3, S, S); model(model.transform(image)[None]) is its embedding (1, D)
    model.args       the arguments of its training, a dict
    model.classes    names of its training classes, with --fold those of the validation block as well
    """
    saved = read_checkpoint(path)
    device = pick_device(device)
    with distrusting(path):
        model = Embedder(weights='none', precision=pick_precision(precision, device), **saved['embedder'])
        model.load_state_dict(saved['model'])
        model.args = saved['args']
        model.classes = saved['classes']
        model.transform = transforms.Compose([
            to_rgb, transforms.Resize(model.args['resize']), transforms.CenterCrop(model.args['image_size']),
            transforms.ToTensor(), transforms.Normalize(MEAN, STD)])
    return model.place(device).eval()


def read_file(path):
    """torch.load that runs no code from the file and verifies its checksums, which torch.load does not."""
    if not Path(path).is_file():
        raise UsageError(f'there is no file {path}')
    with distrusting(path):
        if zipfile.is_zipfile(path) and (broken := zipfile.ZipFile(path).testzip()):
            raise ValueError(f'the checksum of {broken} is wrong')
        return torch.load(path, map_location='cpu', weights_only=True)


@contextmanager
def distrusting(path):
    """Whatever goes wrong with the content of a file, which may be damaged or made up, becomes one line."""
    try:
        yield
    except Exception as error:
        name = type(error).__name__
        text = ' '.join(str(error).split())[:300]
        if name == 'UnpicklingError':                       # torch advises to open such a file all the same
            text = 'it is not a file of plain weights, and other files could run any code'
        raise UsageError(f'{path} cannot be used; is it damaged, or of another script? {name}: {text}') from None


def make_trunk(arch, weights, channels, length):
    """The trunk of an Embedder, and the channels c of its feature maps. A ResNet or RegNet loses its last two layers;
    of another network only the last linear layer is cut off, and its features are maps (B, c, 1, 1). With arch 'none'
    the trunk only divides stored vectors, maps (B, channels, 1, 1), by `length`."""
    if arch == 'none':
        return transforms.Normalize([0.0], [length]), channels          # (x - 0) / length
    network = load_network(arch, weights)
    name, linear = classifier(network)
    c = linear.in_features
    children = list(network.named_children())
    if [child for child, _ in children[-2:]] == ['avgpool', 'fc']:
        return nn.Sequential(OrderedDict(children[:-2])), c
    network.set_submodule(name, nn.Unflatten(1, (c, 1, 1)))
    return network, c


def classifier(network):
    """The last linear layer of a network, (name, layer)"""
    layers = [(name, layer) for name, layer in network.named_modules() if isinstance(layer, nn.Linear)]
    if not layers:
        raise UsageError(f'{type(network).__name__} has no linear classifier to be cut off: take another --arch')
    return layers[-1]


@cache
def describe_trunk(arch, image_size):
    """Whether a trunk has BatchNorm, and whether it has maps to pool, as a ResNet has. Raises UsageError if it takes no
    images of this size."""
    names = torchvision.models.list_models(module=torchvision.models)
    if arch not in names:
        raise UsageError(f'--arch {arch} is none of the {len(names)} classifiers of torchvision, such as resnet50, '
                         'convnext_tiny, efficientnet_b0, swin_t, vit_b_16')
    try:
        with torch.device('meta'):                          # shapes alone, without weights and numbers
            trunk, _ = make_trunk(arch, 'none', 3, 1.0)
    except NotImplementedError:                             # a RegNet needs numbers to find its shapes
        trunk, _ = make_trunk(arch, 'none', 3, 1.0)
    try:
        f = trunk.to('meta')(torch.empty(2, 3, image_size, image_size, device='meta'))
    except Exception as error:                              # every network has errors of its own
        raise UsageError(f'--arch {arch} does not take images of --image-size {image_size}: {error}') from None
    if not torch.is_tensor(f):
        raise UsageError(f'--arch {arch} returns {type(f).__name__} and not one tensor of features: take another')
    return any(isinstance(layer, nn.BatchNorm2d) for layer in trunk.modules()), isinstance(trunk, nn.Sequential)


def initialise(linear, head_init):
    """Fills the head of an Embedder, as it says at head_init."""
    if head_init == 'default':
        return
    nn.init.zeros_(linear.bias)
    if head_init == 'identity':
        nn.init.eye_(linear.weight)
    else:
        nn.init.kaiming_normal_(linear.weight, mode='fan_out')


def load_network(arch, weights):
    """A classifier of torchvision. A file of weights may be torchvision's or a checkpoint of these scripts."""
    if weights == 'imagenet':
        known = torchvision.models.get_model_weights(arch).__members__
        if 'IMAGENET1K_V1' not in known:
            raise UsageError(f'{arch} has no weights IMAGENET1K_V1, but {", ".join(known)}: take --weights FILE')
        try:
            return torchvision.models.get_model(arch, weights='IMAGENET1K_V1')
        except Exception as error:                          # no connection, a full disk, a wrong hash
            raise UsageError(f'cannot fetch {known["IMAGENET1K_V1"].url} ({error}); get it elsewhere, for --weights '
                             'FILE') from None
    network = torchvision.models.get_model(arch, weights=None)
    if weights != 'none':
        saved = read_file(weights)
        with distrusting(weights):
            name, linear = classifier(network)
            # The classifier will not be used, so it keeps its own. All other keys have to fit.
            own = {f'{name}.{key}': value for key, value in linear.state_dict().items()}
            trunk = {key.removeprefix('trunk.'): value for key, value in saved.get('model', saved).items()
                     if not key.startswith((f'{name}.', 'linear.'))}
            network.load_state_dict(trunk | own)
    return network


@contextmanager
def written_whole(path):
    """Writes a temporary file and renames it at the end, so a full disk or Ctrl-C leaves the old file intact."""
    path = Path(path)
    mark = f'{path.name}.{platform.node()}.'                # on a shared disk, other machines may write the same file
    temporary = path.with_name(f'{mark}{os.getpid()}.tmp')
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for left in path.parent.glob('*.tmp'):              # of this file, by a killed process of this machine
            process = left.stem.removeprefix(mark)
            if left.stem.startswith(mark) and process.isdigit():
                try:
                    os.getpgid(int(process))
                except ProcessLookupError:
                    left.unlink()
        with open(temporary, 'wb') as file:
            yield file
        os.replace(temporary, path)
    except BrokenPipeError:                                 # of stdout, not of the file
        raise
    except (OSError, RuntimeError) as error:                # torch.save reports a full disk as a RuntimeError
        if isinstance(error.__context__, KeyboardInterrupt):            # and Ctrl-C
            raise KeyboardInterrupt from None
        cause = str(error.__context__ or error).split('\n')[0]
        unharmed = '; what stood there before is unharmed' if os.path.exists(path) else ''
        raise NotWritten(f'could not write {path}: {cause}{unharmed}') from None
    finally:
        with suppress(OSError):
            temporary.unlink()


# ---- 11. command line ------------------------------------------------------------------------------

# A recipe is a row of defaults for flags. Those of the benchmarks are in the scripts, beside their papers, and name all
# settings of training. In the first `warmup` epochs the trunk does not train. `clip` bounds each entry of the
# gradients. per_class=0 means images in random order. A folder with pretrained weights takes the row of cub. Rates and
# epochs for vectors were chosen on four folds of features of birds by a ResNet-18 (tests/results).
DEMO = dict(arch='resnet18', weights='none', image_size=64, resize=64, freeze_bn=False, dim=128, min_crop=0.5,
            epochs=10, batch_size=64, per_class=4, lr=2e-3, schedule='cosine', warmup=0, clip=0.0, eval_every=1)
VECTORS = DEMO | dict(arch='none', image_size=1, resize=1, freeze_bn=True, pool='avg', dim=None, precision='fp32',
                      epochs=5, batch_size=100, per_class=5, lr=1e-3, schedule='constant')
BENCHMARK = dict(arch='resnet50', weights='imagenet', image_size=224, resize=256, eval_every=1)
BASE = dict.fromkeys(DATASETS, BENCHMARK) | dict(
    shapes=DEMO | dict(min_crop=1.0, batch_size=32, epochs=8, eval_every=4), folder=DEMO, vectors=VECTORS,
    sop=BENCHMARK | dict(eval_every=5), inshop=BENCHMARK | dict(eval_every=5))

# Section 3.1 of the Reality Check, in place of a script's recipe for the dataset; a script's row 'reality-check' is
# added. What the text does not name is taken from the released configuration: momentum, weight decay, and crops of at
# least 0.16 of the area (the text has "between 40 and 256" px). That configuration freezes the statistics of BatchNorm
# only, and has a patience of 9 evaluations on CUB, one every 200 steps; here it is evaluated every epoch.
PROTOCOL = dict(dim=128, pool='avg', freeze_bn=True, image_size=227, resize=256, min_crop=0.16, epochs=1000,
                batch_size=32, per_class=4, optimizer='rmsprop', lr=1e-6, momentum=0.9, weight_decay=1e-4,
                schedule='constant', warmup=0, clip=0.0, fold='0/4', eval_every=1)


def resize_for(row, image_size):
    """The shorter side of the stored images, in the recipe's ratio to the crop. A typed --resize leaves the crop."""
    return round(image_size * row['resize'] / row['image_size'])


class Parser(argparse.ArgumentParser):
    def add_flags(self, title, rows):
        """Adds a group of flags. A row is (name, marks, options of add_argument), see FLAGS."""
        group = self.add_argument_group(title)
        for name, marks, options in rows:
            group.add_argument(name, **options).marks = marks.split()

    def parse_args(self, argv=None):
        """The flags, with three more names: defaults, {flag: its default}; changed, the set of flags that differ from
        them; and marks, {flag: its marks}, of which a path always has `here`"""
        args = super().parse_args(argv)
        args.defaults = {name: self.get_default(name) for name in vars(args)}
        args.changed = {name for name, default in args.defaults.items() if getattr(args, name) != default}
        args.marks = {}
        for action in self._actions:
            is_path = action.type is Path or hasattr(action.type, 'suffix')
            args.marks[action.dest] = getattr(action, 'marks', []) + ['here'] * is_path
        return args

    def error(self, message):
        raise UsageError(f'{self.prog}: {message}; --help lists the flags')


def marked(args, *marks):
    """The flags that have one of these marks"""
    return {flag for flag, own in args.marks.items() if {*own} & {*marks}}


class Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Prints docstrings as they are, and the default of each flag."""


def between(low, high, kind=float):
    """An argparse type: a finite number from low to high, both included"""
    def check(text):
        value = kind(text)
        if not (low <= value <= high and value < math.inf):
            raise ValueError
        return value
    # argparse prints this name if the text is no such number.
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


def file_ending(suffix):
    """An argparse type: the path of a file that ends in `suffix`"""
    def check(text):
        if not text.lower().endswith(suffix):
            raise ValueError
        return Path(text)
    check.__name__ = f'{suffix} file'
    check.suffix = suffix
    return check


def block_of_blocks(text):
    """An argparse type: I/N with 0 <= I < N and N >= 2, as text"""
    i, n = map(int, text.split('/'))
    if not 0 <= i < n or n < 2:
        raise ValueError
    return f'{i}/{n}'


SWITCH = argparse.BooleanOptionalAction


def flag(name, marks='', **options):
    """A row of FLAGS"""
    return name, marks, options


# The flags that all scripts share, a row each: name; marks, which say what else must be known of it; and the options of
# argparse's add_argument.
#   images  means nothing for vectors, which have no images and no trunk
#   same    changes no number of a run, but for rounding: where and how it computes, and how often it looks (which with
#           --fold may change when it stops, and what is best)
#   seeds   may differ between the runs that eval.py takes for one recipe
#   longer  may differ when a run goes on
#   here    is about this start of the program, and not kept in a checkpoint; nor is any path
#   recipe  has no default here: each recipe has one
FLAGS = {
    'data': [
        flag('--dataset', choices=list(DATASETS), default='shapes',
             help='shapes: built in; folder: own images; vectors: features of any network'),
        flag('--data', 'same', type=os.path.expanduser, default='data',
             help="folder of classes or of NPZ files, or what the dataset's site unpacks"),
        # Up to 16 px, the last stage of a ResNet gets one pixel, and its gradients in bfloat16 are wrong on a CPU.
        flag('--image-size', 'images recipe', type=at_least(17),
             help='side of the crops that the network gets, pixels'),
        flag('--resize', 'images recipe', type=at_least(17),
             help='shorter side of the stored images, pixels; follows --image-size'),
        flag('--min-crop', 'images recipe', type=between(0.001, 1),
             help='smallest area of a training crop, share of the image'),
        flag('--jitter', 'images', type=between(0, 1), default=0.0,
             help='brightness, contrast, saturation: up to +- this'),
        flag('--flip', 'images', action=SWITCH, default=True, help='mirror half of the crops'),
    ],
    'network': [
        flag('--arch', 'images recipe', help='trunk: a classifier of torchvision, such as resnet18 or vit_b_16'),
        flag('--weights', 'images recipe', help='imagenet, none, or a file'),
        flag('--pool', 'images', choices=['avg', 'max', 'avg+max'], default='avg+max',
             help='pooling of the feature map'),
        flag('--dim', 'recipe', type=at_least(1), help='size of the embedding; None: that of the vectors'),
        flag('--freeze-bn', 'images recipe', action=SWITCH, help='BatchNorm keeps statistics and weights'),
    ],
    'training': [
        flag('--epochs', 'longer recipe', type=at_least(0), help='passes over the training set'),
        flag('--steps', 'longer', type=at_least(0), default=0, help='limit on the number of steps; 0: none'),
        flag('--batch-size', 'recipe', type=at_least(2), help='images in a batch, B'),
        flag('--per-class', 'recipe', type=at_least(0),
             help='images per class in a batch, K; 0: images in random order'),
        flag('--optimizer', choices=['adamw', 'adam', 'sgd', 'rmsprop'], default='adamw', help='optimizer'),
        flag('--lr', 'recipe', type=at_least(0, float), help='learning rate'),
        flag('--weight-decay', type=at_least(0, float), default=1e-4, help='weight decay'),
        flag('--momentum', type=between(0, 1), default=0.0, help='of sgd and rmsprop'),
        flag('--schedule', 'recipe', choices=['step', 'cosine', 'constant'], help='of the learning rate'),
        flag('--decay-epochs', type=at_least(1), default=10, help='schedule step: epochs between decays'),
        flag('--decay-rate', type=between(0, 1), default=0.5, help='schedule step: factor of a decay'),
        flag('--warmup', 'images recipe', type=at_least(0),
             help='first epochs, in which all but the trunk learns; it is no slow rise of the rate'),
        flag('--clip', 'recipe', type=at_least(0, float), help='clip gradients to +- this; 0: no clipping'),
    ],
    'run': [
        flag('--seed', 'seeds', type=between(0, 2 ** 63 - 1, int), default=0, help='of everything random'),
        flag('--compile', 'images same', action=SWITCH, default=False,
             help='torch.compile of the trunk: slow at first, then faster'),
        flag('--chunk', 'images same', type=at_least(0), default=0,
             help='images that the trunk takes at a time, to save memory; 0: all'),
        flag('--eval-every', 'same recipe', type=at_least(1), help='epochs between evaluations'),
        flag('--protocol', 'images', choices=['reality-check'],
             help='settings of the Reality Check, Section 3.1'),
        flag('--fold', 'seeds', type=block_of_blocks, metavar='I/N',
             help='block I (from 0) of N blocks of training classes validates, the others train; '
                  'the test set is not read'),
        flag('--patience', 'longer', type=at_least(1), default=10,
             help='fold: stop after so many evaluations without gain'),
        flag('--name', 'here', help='folder below runs/; default: script, dataset, next free number'),
        flag('--resume', type=Path, metavar='RUN', help='go on with the run in this folder'),
    ],
    'machine': [
        flag('--cache', 'images same', type=Path, default=Path('cache'), help='folder for decoded images'),
        flag('--download', 'same here', action='store_true', help='fetch cub or sop, if it is not in --data'),
        flag('--device', 'same here', default='auto', help='auto, cpu, cuda, cuda:1, mps'),
        flag('--precision', 'images same', choices=['auto', 'bf16', 'fp32'], default='auto',
             help='of the trunk; fp32 has TF32 convolutions on CUDA'),
    ],
}


def parser(doc, notes='', file=None):
    """A parser with the flags that all scripts share

    doc, notes  printed by --help before and behind the flags: a script's docstring, which may be missing, and more
    file        a script's __file__, whose name is the script's: checkpoints and run folders have it. So a copied script
                is a script of its own. None: the first word of `doc`
    """
    name = Path(file).name if file else (doc or 'script').split()[0]
    p = Parser(prog=name, description=doc, epilog=notes, formatter_class=Help, allow_abbrev=False)
    for title, rows in FLAGS.items():
        p.add_flags(title, rows)
    return p


def parse(parser, DEFAULTS, argv=None):
    """Reads the command line twice: to learn which recipe is meant, and then with that recipe as the defaults.

    DEFAULTS  a script's recipes: rows of defaults for flags, one per dataset; further rows under (dataset,
              choice) where a recipe also depends on the script's --loss or --variant
    Returns the flags as a namespace, with the further names of Parser.parse_args, and script; device is a
    torch.device. Under torchrun, processes join here.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    script = Path(parser.prog).stem
    asked = parser.parse_args([word for word in argv if word not in ('-h', '--help')])
    recipe, row = recipe_row(asked, DEFAULTS)
    if asked.resume and asked.resume.is_file():
        raise UsageError(f'--resume goes on with the run in a folder: {asked.resume.parent}, not {asked.resume}')
    run = asked.resume / 'last.pt' if asked.resume else getattr(asked, 'analyse', None)
    if run:
        saved = read_checkpoint(run)
        if saved['script'] != script:
            raise UsageError(f'{run} was made by {saved["script"]}.py, not by {script}.py')
        # Only what save_checkpoint writes: a made-up checkpoint must not choose which files are overwritten.
        row |= kept(asked, saved['args'])
    if unknown := sorted(row.keys() - asked.defaults.keys()):
        raise UsageError(f'{script}.py has no flag for {", ".join(unknown)}')
    parser.set_defaults(**row)
    args = parser.parse_args(argv)
    args.script = script
    missing = [typed(name) for name in sorted(marked(args, 'recipe') - row.keys()) if getattr(args, name) is None]
    if missing:
        raise UsageError(f'{script}.py has no recipe for {recipe}: add a row to its DEFAULTS, or pass '
                         + ', '.join(missing))
    check(args)
    if args.protocol and not (asked.fold or args.resume):
        print(f'--protocol {args.protocol}: this is --fold {args.fold}, one of four; run the others as well')
    args.device = pick_device(args.device)
    join_processes(args.device)
    return args


def recipe_row(asked, DEFAULTS):
    """Whose recipe it is, and the defaults that follow from it, after the first reading of the command line"""
    choice = getattr(asked, 'loss', None) or getattr(asked, 'variant', None)
    dataset = asked.dataset
    if dataset == 'folder' and asked.weights not in (None, 'none'):      # photographs for pretrained weights
        dataset = 'cub'
    row = BASE[dataset]
    recipe = dataset                                        # the script's row for it
    if asked.protocol:                                      # it replaces the recipe that the script has for the dataset
        row = row | PROTOCOL
        recipe = asked.protocol
    row = row | DEFAULTS.get(recipe, {}) | DEFAULTS.get((recipe, choice), {})
    if asked.image_size:
        row['resize'] = resize_for(row, asked.image_size)
    if asked.weights == 'none':                             # random weights cannot learn through frozen BatchNorm
        row['freeze_bn'] = False
    if dataset != 'vectors':
        batchnorm, maps = describe_trunk(asked.arch or row['arch'], asked.image_size or row['image_size'])
        if not batchnorm:
            row['freeze_bn'] = True                         # there is none to train, so nothing stands against --chunk
        if not maps:                                        # one position, so both kinds of pooling are the same
            row['pool'] = 'avg'
    if asked.fold:
        row['eval_every'] = 1
    return recipe, row


def check(args):
    """Refuses flags that have no effect, or that exclude each other."""
    if args.dataset == 'vectors':
        refuse(args, marked(args, 'images'), '--dataset vectors, which has no images and no trunk')
    else:
        batchnorm, maps = describe_trunk(args.arch, args.image_size)
        if not maps:
            refuse(args, ['pool'], f'--arch {args.arch}, whose features have one position')
        if not batchnorm:
            refuse(args, ['freeze_bn'], f'--arch {args.arch}, which has no BatchNorm')
        if args.chunk and not args.freeze_bn:
            raise UsageError('--chunk needs --freeze-bn: the statistics of trained BatchNorm would be those of the '
                             'chunks')
    refuse_unread(args, 'optimizer', sgd='momentum', rmsprop='momentum')
    refuse_unread(args, 'schedule', step='decay_epochs decay_rate')
    if args.dataset == 'shapes':
        refuse(args, ['data'], '--dataset shapes, which is drawn; for images of your own add --dataset folder')
    if not args.fold:
        refuse(args, ['patience'], 'the test set, which chooses nothing: take --fold')
    if args.protocol and args.weights == 'none':
        raise UsageError(f'--protocol {args.protocol} fine-tunes pretrained weights: --weights imagenet or a file')
    if args.resume:                         # a resumed run is the run that was stopped: its numbers may not change
        refuse(args, ['name'], '--resume')
        if fixed := sorted(args.changed - marked(args, 'same', 'longer') - {'resume'}):
            raise UsageError(f'{args.resume} was made with another {typed(fixed[0])}; start a new run')
        if args.changed & {'steps', 'epochs'} and args.schedule == 'cosine':
            print('note: with another number of steps the learning rate takes another course than without a stop')
    elif args.name:
        folder = Path('runs') / args.name
        if folder.resolve().parent != Path('runs').resolve():
            raise UsageError(f'--name {args.name} is not the name of one folder')
        if (folder / 'last.pt').exists():
            raise UsageError(f'{folder} exists already; choose another --name, or go on with it: --resume {folder}')


def typed(flag):
    """A flag's name as it is typed"""
    return f'--{flag.replace("_", "-")}'


def refuse(args, flags, because):
    """Refuses flags that were changed although they have no effect."""
    for flag in sorted(args.changed & {*flags}):
        raise UsageError(f'{typed(flag)} has no effect with {because}')


def refuse_unread(args, flag, **reads):
    """Refuses flags that are read with other values of `flag` only.

    reads  {a value of `flag`: the flags that are read with it, in one text}; what no value reads is not looked at
    """
    value = getattr(args, flag)
    unread = {*' '.join(reads.values()).split()} - {*reads.get(value, '').split()}
    refuse(args, unread, f'{typed(flag)} {value}')


# ---- 12. putting together --------------------------------------------------------------------------


def dataset_from(args):
    """The dataset that the flags name"""
    def load():
        if args.download:
            download(args.dataset, args.data)
        return load_dataset(args.dataset, args.data, args.resize, args.image_size, args.cache, fold=args.fold)

    if world() == 1:
        return load()
    patient = distributed.new_group(backend='gloo', timeout=timedelta(days=1))
    data = None if rank() else load()       # the main process decodes the images; the others may wait long for it
    distributed.barrier(patient)
    return data or load()


def make_sampler(args, labels):
    """Batches of P x K images; with --per-class 0 all images in random order, without an incomplete last batch"""
    if args.per_class:
        return BalancedSampler(labels, args.batch_size, args.per_class)
    return BatchSampler(RandomSampler(labels), min(args.batch_size, len(labels)), drop_last=True)


def build(args, data=None, **options):
    """The network that the flags name, on their device. `data` tells how many numbers c a stored vector has, which is
    --dim where it is not given, and the mean length of vectors; `options` go to Embedder."""
    if args.dataset == 'vectors':
        vectors = data.train.vectors                                     # (N, c)
        options |= dict(channels=vectors.shape[1], length=vectors.norm(dim=1).mean().item(), layer_norm=False)
        if args.dim is None:
            args.dim = vectors.shape[1]
            options['head_init'] = 'identity'       # before training, embeddings are the vectors, but for their length
    torch.backends.cudnn.benchmark = True                   # on CUDA; the batches of training have one shape
    weights = 'none' if args.resume else args.weights      # a resumed run has its weights in the checkpoint
    model = Embedder(args.arch, args.dim, args.pool, weights, args.freeze_bn,
                     precision=pick_precision(args.precision, args.device), chunk=args.chunk, **options)
    if world() > 1 and not args.freeze_bn:                  # statistics over the batches of all processes
        if args.device.type != 'cuda':
            raise UsageError('several processes on a CPU cannot share the statistics of BatchNorm: take --freeze-bn')
        model.trunk = nn.SyncBatchNorm.convert_sync_batchnorm(model.trunk)
    if args.compile:
        model.trunk.compile()                               # in place, so the names in a checkpoint stay as they are
    return model.place(args.device)


def make_optimizer(args, groups, **options):
    """The optimizer that --optimizer names, over parameter groups that may have a learning rate of their own."""
    kinds = dict(adamw=torch.optim.AdamW, adam=torch.optim.Adam, sgd=torch.optim.SGD, rmsprop=torch.optim.RMSprop)
    if args.optimizer in ('sgd', 'rmsprop'):
        options['momentum'] = args.momentum
    if args.optimizer != 'rmsprop':                         # torch has no fused RMSprop
        options['fused'] = args.device.type in ('cpu', 'cuda')
    return kinds[args.optimizer](groups, lr=args.lr, weight_decay=args.weight_decay, **options)


# ---- 13. devices and processes ---------------------------------------------------------------------

# What to type on which machine, beside the commands of README. Results stay the same up to rounding.
#   one large GPU    python SCRIPT --dataset cub --data data --compile
#                    torch.compile of the trunk. Not run yet
#   several GPUs     torchrun --nproc-per-node 4 SCRIPT --dataset sop --data data
#                    each process runs the trunk on a share of each batch, and computes the loss of the whole batch. Run
#                    as two processes on a CPU, which need --freeze-bn
#   a small GPU      python SCRIPT --dataset sop --data data --batch-size 1000 --freeze-bn --chunk 64
#                    a large batch by chunks: a second forward pass in place of memory. Needs --freeze-bn, which the
#                    recipe of SOP lacks. Run on a CPU
#   a Mac            --device cpu, where torch lacks something on its GPU. Not run yet
#   a notebook       start in a folder that outlives the session, since checkpoints go to runs/ below it; after a stop,
#                    main(['--resume', 'runs/first']) goes on with a run that had the flags --name first


def at_least_float32(t):
    """Raises half precision to float32, for a loss: exp() overflows float16 above 11, and bfloat16 has two to three
    digits. Other types stay as they are."""
    return t.to(torch.promote_types(t.dtype, torch.float32))


def same_precision(*tensors):
    """Raises all tensors to the widest type among them, and at least to float32. Returns them in a list."""
    dtype = reduce(torch.promote_types, (t.dtype for t in tensors), torch.float32)
    return [t.to(dtype) for t in tensors]


def pick_device(name):
    """auto takes a GPU if there is one. Under torchrun each process takes its own. A torch.device is checked, too."""
    name = str(name)
    if name == 'auto':
        name = 'cuda' if torch.cuda.is_available() else 'mps' if torch.backends.mps.is_available() else 'cpu'
    if name == 'cuda' and 'LOCAL_RANK' in os.environ:
        name = f'cuda:{os.environ["LOCAL_RANK"]}'
    try:
        if name.startswith('cuda:'):
            torch.cuda.set_device(name)     # before any tensor, or each process would take memory on the first GPU
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise UsageError(f'--device {name} cannot be used here: {str(error).strip().splitlines()[0]}') from None


def pick_precision(name, device):
    """auto takes bfloat16 where the hardware multiplies it: GPUs since Ampere, CPUs with AVX512-BF16."""
    if name != 'auto':
        return name
    supported = dict(cuda=lambda: torch.cuda.is_bf16_supported(including_emulation=False),
                     cpu=getattr(torch.cpu, '_is_avx512_bf16_supported', lambda: False))    # private; it may go
    return 'bf16' if device.type in supported and supported[device.type]() else 'fp32'


def import_faiss():
    """faiss, or None where it is missing, and on a Mac, where its OpenMP runtime and that of torch would crash"""
    if sys.platform != 'darwin':
        with suppress(ImportError):
            import faiss
            return faiss
    return None


# torchrun starts a script several times, once for each GPU. Each process draws the same batch, since all have the same
# seed. The trunk runs on a share of it, its feature maps are gathered, and every process computes the loss of the whole
# batch. So no script needs to know. The main process, of rank 0, prints and writes.


def world():
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


def rank():
    return distributed.get_rank() if world() > 1 else 0


def join_processes(device):
    """Under torchrun, finds the other processes. If one dies, torchrun ends the others."""
    if int(os.environ.get('WORLD_SIZE', 1)) > 1 and not distributed.is_initialized():
        options = dict(backend='nccl', device_id=device) if device.type == 'cuda' else dict(backend='gloo')
        distributed.init_process_group(timeout=timedelta(minutes=30), **options)
        if rank():
            sys.stdout = open(os.devnull, 'w')


def from_main_process(value):
    """The value that the main process has; the others wait for it."""
    box = [value]
    if world() > 1:
        distributed.broadcast_object_list(box)
    return box[0]


def own_share(total):
    """The positions, of 0 to total - 1, that are this process' share"""
    return torch.arange(total).tensor_split(world())[rank()].tolist()


def gather(f, total):
    """The shares of all processes, one behind the other: (B', ...) -> (total, ...), with gradients for the own one"""
    if world() == 1:
        return f
    if f.is_floating_point():
        f = at_least_float32(f)
    shares = torch.arange(total).tensor_split(world())
    padded = f.new_zeros(len(shares[0]), *f.shape[1:])      # all_gather takes one shape, and the first is the largest
    padded[:len(f)] = f.detach()
    gathered = [torch.empty_like(padded) for _ in shares]
    distributed.all_gather(gathered, padded)
    gathered = [part[:len(share)] for part, share in zip(gathered, shares)]
    gathered[rank()] = f
    if f.requires_grad:     # only this process has these gradients, and average_gradients divides by all processes
        f.register_hook(lambda grad: grad * world())
    return torch.cat(gathered)


def average_gradients(weights):
    if world() > 1:
        for weight in weights:
            if weight.grad is not None:
                distributed.all_reduce(weight.grad)
                weight.grad /= world()


# ---- 14. errors ------------------------------------------------------------------------------------


class UsageError(ValueError):
    """A mistake in use. Its text says in one line what is wrong, where, and what to do."""


class Unreadable(UsageError):
    """Images that cannot be read, a sentence for each"""


class NotWritten(UsageError):
    """A file cannot be written: the disk is full, say."""


class NotFinite(UsageError):
    """The loss, an embedding or a weight is NaN or infinite: the flags are legal, but training diverged."""


def check_embeddings(query, query_labels, searched, searched_labels, itself):
    """Raises UsageError if there is no query, or no image to search in beside the query itself (`itself` is 1 if it is
    among those searched, else 0), if an embedding is NaN or infinite, or a label is no integer from 0 on."""
    if len(query) == 0 or len(searched) <= itself:
        raise UsageError(f'nothing to retrieve: {len(query)} queries, {len(searched)} images to search in')
    for z, labels in ((query, query_labels), (searched, searched_labels)):
        if not z.isfinite().all():
            raise NotFinite('some embeddings are NaN or infinite; in training, a lower --lr may help')
        if labels.is_floating_point() or labels.shape != z.shape[:1] or labels.min() < 0:
            raise UsageError(f'labels are {len(z)} integers from 0 on, one for each embedding, and these are '
                             f'{labels.dtype} {tuple(labels.shape)}, the first is {labels.flatten()[:1].tolist()}')


def failure(error):
    """One line on an error that is a mistake in use, or a failure of the machine; None if it is a bug"""
    kind = type(error)
    text = ' '.join(str(error).split())[:500]
    full = isinstance(error, RuntimeError) and ('out of memory' in text or "can't allocate memory" in text)
    if full or isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return f'not enough memory: lower --batch-size, or take --chunk, which needs --freeze-bn ({text})'
    if kind.__module__.startswith(('torch._dynamo', 'torch._inductor')):
        return f'--compile does not work here, leave it out: {text}'
    if isinstance(error, UsageError):
        return text
    return f'{kind.__name__}: {text}' if isinstance(error, OSError) else None


def cli(main):
    """Runs a script from the shell. A mistake in use, or a failure of the machine, ends in one line and exit code 2,
    Ctrl-C in exit code 130. Anything else is a bug, and keeps its traceback."""
    sys.stdout = sys.stdout or open(os.devnull, 'w')        # where the shell has closed it
    sys.stdout.reconfigure(errors='replace')                # a terminal that lacks a letter must not end a run
    try:
        main()
        if world() > 1:
            distributed.destroy_process_group()
        sys.stdout.flush()
    except KeyboardInterrupt:
        print('stopped', file=sys.stderr)
        sys.exit(130)
    except Exception as error:
        if failure(error) is None:
            raise
        if isinstance(error, BrokenPipeError):              # the reader of stdout has left; nobody else may try
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        print(f'error: {failure(error)}', file=sys.stderr)
        sys.exit(2)
