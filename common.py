"""common.py -- the code that all methods use: network, batches, training loop and evaluation.

Everything that is specific to a method is in its train_*.py. Sections 1 to 4 are worth reading next to any script:

    1. network        Embedder: backbone (trunk), pooling, linear head
    2. batches        which images are in a batch
    3. training       optimizer, learning rate, the loop; the training step is in train_epoch
    4. evaluation     Recall@K, R-precision, MAP@R

The others can be skipped: 5. images, 6. shapes (the built-in dataset), 7. datasets, 8. runs (logs and checkpoints),
9. command line (flags and recipes), 10. helpers of losses, devices, randomness and processes, 11. errors.

`Reality Check` is a paper (Musgrave et al., A Metric Learning Reality Check, ECCV 2020). Its metrics are in section
4, its protocol is in section 9. All files write shapes with these letters; each script explains its further symbols.

    B  images in a batch      P  classes in a batch               x  images (B, 3, S, S)
    C  classes                K  images per class in a batch      f  feature maps (B, c, h, w)
    D  embedding dimension    S  side of a crop, in pixels        z  L2-normalized embeddings (B, D)
    N  images in a set        G  images in a gallery              y  class labels (B,);  s  similarities
    c  channels of features   R  matches of a query               (In Recall@K, K is the number of nearest images.)

With torchrun, several processes share the work: own_positions, own_share, gather, average_gradients and from_rank0
(section 10) divide it and collect the results. With one process they change nothing.
"""
import argparse
import copy
import hashlib
import io
import json
import math
import os
import random
import re
import shlex
import sys
import time
import unicodedata
from collections import Counter, OrderedDict
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import cache, partial, wraps
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
import torchvision
from PIL import Image, ImageOps
from torch import distributed, nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler
from torchvision.transforms import v2

# ---- 1. network ------------------------------------------------------------------------------------


class Embedder(nn.Module):
    """The network of every script: backbone (trunk) -> pooling -> linear head -> L2 normalization.

    arch         the trunk: a ResNet of torchvision or timm:NAME, without its classifier; none for --dataset vectors
                 (precomputed features). On resnet50_v1 see make_trunk
    dim          D, embedding dimension; None: c, the number of channels that the trunk returns
    pool         avg, max, or avg+max (their sum), over the h * w positions of the feature map
    weights      imagenet (torchvision's IMAGENET1K_V1, or timm's pretrained weights), none (random), a file, or the
                 folder of a run
    freeze_bn    BatchNorm uses its stored mean and variance in training, too. Only these statistics are frozen: its
                 scale and shift are trained.
    layer_norm   LayerNorm without affine weights, between pooling and the linear head
    normalize    embeddings are L2-normalized
    trunk        any module (B, 3, S, S) -> (B, c) or (B, c, h, w), which replaces arch and weights
    head_init    kaiming: normal with std sqrt(2 / D). default: torch's own, which for ResNet-50 and D = 512
                 is about five times smaller. identity, with D = c: embeddings begin as the pooled features
    precision    bf16: the trunk runs in bfloat16. Pooling, linear head and loss run in float32.
    input_shape  of one input: (3, S, S), or (c,) of a vector
    """

    def __init__(self, arch='resnet50', dim=512, pool='avg+max', weights='imagenet', freeze_bn=True, layer_norm=False,
                 normalize=True, trunk=None, head_init='kaiming', precision='fp32', input_shape=(3, 224, 224)):
        super().__init__()
        self.trunk = make_trunk(arch, weights, image_size=input_shape[-1]) if trunk is None else trunk
        self.pool = pool
        self.normalize = normalize
        self.precision = precision
        batchnorm = [m for m in self.trunk.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
        self.frozen_bn = batchnorm if freeze_bn else []
        with torch.no_grad():
            self.trunk.cpu().eval()         # eval: this pass changes no statistics and draws no random numbers
            c = self.features(torch.zeros(1, *input_shape)).shape[1]
        self.dim = dim or c
        self.norm = nn.LayerNorm(c, elementwise_affine=False) if layer_norm else nn.Identity()
        self.linear = nn.Linear(c, self.dim)
        if head_init != 'default':
            nn.init.zeros_(self.linear.bias)
        if head_init == 'kaiming':
            nn.init.kaiming_normal_(self.linear.weight, mode='fan_out')
        if head_init == 'identity':
            nn.init.eye_(self.linear.weight)
        # A checkpoint contains this dict, from which the network can be built again.
        self.config = dict(arch=arch if trunk is None else 'module', dim=self.dim, pool=pool, freeze_bn=freeze_bn,
                           layer_norm=layer_norm, normalize=normalize, input_shape=tuple(input_shape))
        self.train()                        # all but frozen BatchNorm, see below

    def place(self, device):
        """Moves the network to a torch.device, in the memory format of fast convolutions. Returns itself."""
        self.to(device)
        if device.type != 'mps':            # on a Mac's GPU, BatchNorm has wrong gradients in it (torch issue 175189)
            self.trunk.to(memory_format=torch.channels_last)             # then convolutions return this format, too
        return self

    def train(self, mode=True):
        super().train(mode)
        for module in self.frozen_bn:       # in training mode their statistics would follow the batches
            module.eval()
        return self

    def features(self, x):
        """Images (B, 3, S, S) or vectors (B, c) -> features (B, c, h, w), where h = w = 1 if the trunk has pooled"""
        share = own_share(x)                                # (B, 3, S, S), with torchrun a part of them
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.precision == 'bf16'):
            f = self.trunk(share)
        if f.ndim == 2:
            f = f[:, :, None, None]                         # (B, c, 1, 1)
        if share is not x:                                  # with torchrun
            f = gather(at_least_float32(f))
        return f                                            # (B, c, h, w)

    def pool_features(self, f):
        """Feature map (B, c, h, w) -> pooled features (B, c). For h = w = 1, avg+max is twice the features."""
        f = at_least_float32(f)
        p = 0
        if 'avg' in self.pool:
            p = p + F.adaptive_avg_pool2d(f, 1)
        if 'max' in self.pool:
            p = p + F.adaptive_max_pool2d(f, 1)
        return p.flatten(1)

    def project(self, p):
        """Pooled features (B, c) -> embeddings (B, D), L2-normalized unless normalize=False"""
        z = self.linear(self.norm(p))
        return F.normalize(z, dim=1) if self.normalize else z

    def head(self, f):
        """Feature map (B, c, h, w) -> embeddings (B, D): pooling, LayerNorm if there is one, linear head, L2 norm"""
        return self.project(self.pool_features(f))

    def forward(self, x):
        return self.head(self.features(x))


class Rescale(nn.Module):
    """The trunk for vectors: it divides them by mean_norm, their mean L2 norm in the training set. `build` sets it."""

    def __init__(self):
        super().__init__()
        self.register_buffer('mean_norm', torch.ones(()))

    def forward(self, x):
        return x / self.mean_norm


def make_trunk(arch, weights='none', image_size=224):
    """The network that `arch` names, without its classifier.

    A ResNet, ResNeXt or Wide ResNet of torchvision loses its pooling, too, and returns feature maps (B, c, h, w). In
    resnet50_v1 the first 1x1 convolution of stages 2 to 4 has stride 2, as in He et al. (2015) and in weights from
    Caffe and Keras; in torchvision's resnet50 the 3x3 convolution has it. A network of timm returns (B, c). If its
    input size is fixed, as that of many transformers, it is made for `image_size`.
    """
    if arch == 'none':
        return Rescale()
    pretrained = weights == 'imagenet'
    classifier = 'fc'                                       # what is left out of a file of weights
    try:
        if arch.startswith('timm:'):
            import timm
            config = timm_config(arch)
            size = dict(img_size=image_size) if config.fixed_input_size else {}
            trunk = timm.create_model(arch[5:], pretrained=pretrained, num_classes=0, **size)
            classifier = config.classifier                  # a name, or a tuple of names
        else:
            name = arch.removesuffix('_v1')
            network = torchvision.models.get_model(name, weights='IMAGENET1K_V1' if pretrained else None)
            *body, pooling, last = network.named_children()              # (name, layer) of each layer
            if (pooling[0], last[0]) != ('avgpool', 'fc'):
                raise ValueError('it is no ResNet; other networks are in timm')
            trunk = nn.Sequential(OrderedDict(body))
            if arch != name:
                if pretrained:
                    raise ValueError(f'torchvision has weights of {name} only')
                for stage in (trunk.layer2, trunk.layer3, trunk.layer4):
                    stage[0].conv1.stride = (2, 2)
                    stage[0].conv2.stride = (1, 1)
    except (OSError, ValueError, RuntimeError) as error:    # no connection, no such network, or a damaged download
        raise UsageError(f'cannot make --arch {arch} with --weights {weights}: {error}; offline, name a file of weights'
                         ) from error
    return trunk if weights in ('none', 'imagenet') else load_weights(trunk, arch, weights, classifier)


def timm_config(arch):
    """What timm says of its network timm:NAME, such as the size and the normalization of its images"""
    import timm
    config = timm.get_pretrained_cfg(arch.removeprefix('timm:'))
    if not config:
        raise UsageError(f'--arch {arch}: timm knows no such network')
    return config


# ---- 2. batches ------------------------------------------------------------------------------------


class BalancedSampler:
    """Batches of P classes x K images, class by class, as lists of indices.

    labels      (N,) class of each image
    batch_size  P times K. If there are fewer than P classes, a batch has all of them and is smaller.
    per_class   K
    generator   torch.Generator; None is torch's global one

    An epoch has N // B batches, at least one. The P classes of a batch are different, and so are its images, unless a
    class has fewer than K. Classes are taken from a random order of all classes. If fewer than P are left, the next
    batch has these, and then others in a new order. So all classes occur about equally often. The same holds for the
    images of a class.
    """

    def __init__(self, labels, batch_size, per_class, generator=None):
        if per_class < 1 or batch_size < 1 or batch_size % per_class:
            raise UsageError(f'--batch-size {batch_size} is not a multiple of --per-class {per_class}')
        order = labels.argsort(stable=True)
        counts = torch.bincount(labels)
        self.members = [part.tolist() for part in order.split(counts.tolist()) if len(part)]    # one list per class
        self.per_class = per_class
        self.generator = generator
        self.classes = min(batch_size // per_class, len(self.members))
        self.batch_size = self.classes * per_class
        self.batches = max(1, len(labels) // self.batch_size)
        single = int((counts == 1).sum())
        if single and per_class > 1:
            warn(f'{single} of {len(self.members)} training classes have one image only: the sampler repeats it')

    def __len__(self):
        return self.batches

    def __iter__(self):
        def take(queue, items, number):
            """Removes and returns the first `number` items of a queue. A queue that is too short first gets the items
            that are not in it (all, if none is missing), in random order."""
            while len(queue) < number:
                others = [item for item in items if item not in queue] or items
                queue += [others[i] for i in torch.randperm(len(others), generator=self.generator).tolist()]
            return [queue.pop(0) for _ in range(number)]

        class_queue = []
        image_queues = [[] for _ in self.members]
        for _ in range(self.batches):
            classes = take(class_queue, range(len(self.members)), self.classes)
            yield [i for c in classes for i in take(image_queues[c], self.members[c], self.per_class)]


class StepBatches:
    """The batch sampler of a training DataLoader. A batch is a list of tuples: the index of an image, and integers that
    seed its augmentation. So methods with the same seed and sampler see the same batches and crops. The number of
    workers and processes, and --resume, do not affect them. On EPOCH and CROP see set_seed.

    sampler       yields equally long lists of indices; its random order comes from torch's global generator
    epoch, steps  set by train_epoch: the number of the epoch, and the range of its steps in the run
    """

    def __init__(self, sampler, seed):
        self.sampler = sampler
        self.seed = seed
        self.epoch = 0
        self.steps = range(0)

    def __len__(self):
        return len(self.sampler)

    def __iter__(self):
        set_seed(self.seed, EPOCH, self.epoch)
        batches = list(self.sampler)                        # all at once: loading an image seeds the generator, too
        for t, indices in zip(self.steps, batches):
            # The class Images (section 5) takes such a tuple as an index, and its end as the seed of the augmentation.
            yield [(int(indices[position]), self.seed, CROP, t, position) for position in own_positions(len(indices))]


def make_sampler(args, labels):
    """Batches of P x K images. With --per-class 0, all images in random order; an incomplete last batch is dropped."""
    if args.per_class:
        return BalancedSampler(labels, args.batch_size, args.per_class)
    return BatchSampler(RandomSampler(labels), min(args.batch_size, len(labels)), drop_last=True)


def make_loader(images, batch_sampler, device):
    """A DataLoader. Image files are read by worker processes; images in memory and vectors need none."""
    workers = images.workers if images.are_files else 0
    # Without a generator of its own, a DataLoader draws a number from torch's global one, and so changes it.
    return DataLoader(images, batch_sampler=batch_sampler, num_workers=workers, persistent_workers=workers > 0,
                      pin_memory=device.type == 'cuda', generator=torch.Generator())


# ---- 3. training -----------------------------------------------------------------------------------


def learning_rate_factor(t, args, per_epoch, total):
    """Multiplier of all learning rates by --schedule, at step t = 0, ..., total - 1

    step      multiplied by --decay-rate after every --decay-epochs epochs
    cosine    linear warmup over the first tenth of the run (at most 100 steps) and cosine decay from 1 to 0 over the
              whole run: the smaller of the two
    constant  always 1.  For a schedule of your own, add a branch here and a choice of --schedule
    """
    if args.schedule == 'step':
        return args.decay_rate ** (t // per_epoch // args.decay_epochs)
    if args.schedule == 'cosine':
        ramp = max(1, min(100, total // 10))
        return min((t + 1) / ramp, 0.5 * (1 + math.cos(math.pi * t / total)))
    return 1.0


def make_optimizer(args, groups, **options):
    """The optimizer that --optimizer names, over parameter groups that may have a learning rate of their own"""
    kinds = dict(adamw=torch.optim.AdamW, adam=torch.optim.Adam, sgd=torch.optim.SGD, rmsprop=torch.optim.RMSprop)
    if args.optimizer in ('sgd', 'rmsprop'):
        options['momentum'] = args.momentum
    # torch has no fused RMSprop, and its fused SGD with momentum fails on weights that were frozen at first.
    if args.optimizer != 'rmsprop' and not options.get('momentum'):
        options['fused'] = args.device.type in ('cpu', 'cuda')
    return kinds[args.optimizer](groups, lr=args.lr, weight_decay=args.weight_decay, **options)


def train(args, model, data, step, optimizer, loss_params=None, sampler=None):
    """Trains (in train_epoch), evaluates, logs and saves. Returns the last row of the log, or with --fold the one with
    the highest MAP@R.

    step         step(images, labels) -> scalar loss, the part of the loop that a method defines. It gets the whole
                 batch on the device: images (B, 3, S, S), augmented and normalized, or vectors (B, c), and labels (B,).
                 The backward pass runs after step returns, so step must not modify in place a tensor needed there.
    optimizer    over the weights of the model and the learnable parameters of the loss
    loss_params  {name: parameter or module}: learnable parameters of the loss, saved in the checkpoint
    sampler      yields equally long lists of indices; None: from --batch-size and --per-class
    """
    sampler = sampler or make_sampler(args, data.train.labels)
    loader = make_loader(data.train, StepBatches(sampler, args.seed), args.device)
    per_epoch = len(sampler)
    total = min(args.epochs * per_epoch, args.steps or math.inf)         # steps of the whole run
    epochs = math.ceil(total / per_epoch)
    parts = dict(model=model, optimizer=optimizer, loss_params=nn.ParameterDict(loss_params or {}))
    about = about_data(args, data)
    if args.resume:
        folder = args.resume
        done, rows, start = load_run(args, about, parts, per_epoch, total)
    else:
        folder = from_rank0(new_folder, args, data)
        done, rows, start = -1, [], time.time()             # done: the last epoch; 0 is the evaluation before training
    print_recipe(args, model, data, per_epoch, total, folder)
    for epoch in range(done + 1, epochs + 1):
        if args.fold and rows and stops_early(rows, args.patience):
            break
        row = dict(epoch=epoch, loss=None, images_per_second=None)
        if epoch:
            steps = range((epoch - 1) * per_epoch, min(epoch * per_epoch, total))
            model.train()
            with frozen(model.trunk) if epoch <= args.freeze_epochs else nullcontext():
                row |= train_epoch(args, loader, step, optimizer, epoch, steps, total)
        if epoch % args.eval_every == 0 or epoch == epochs:
            row |= evaluate(model, data)
        row['minutes'] = (time.time() - start) / 60
        row = from_rank0(dict, row)                         # all processes go on with the row of the main process
        if 'R@1' in row or not data.query:                  # evaluated, or there is no test set
            rows.append(row)
        if rank() == 0:
            about |= dict(epoch=epoch, step=min(epoch * per_epoch, total), rows=rows, minutes=row['minutes'])
            save_epoch(folder, args, parts, about)
        show_row(row)
    return summary(args, data, folder, rows)


@contextmanager
def frozen(module):
    """Inside `with`, the weights of a module are not trained. After it, also after Ctrl-C, they are as before: a user
    may have frozen some of them."""
    trainable = [weight for weight in module.parameters() if weight.requires_grad]
    try:
        module.requires_grad_(False)
        yield
    finally:
        for weight in trainable:
            weight.requires_grad_(True)


def train_epoch(args, loader, step, optimizer, epoch, steps, total):
    """Trains for `steps`, a range of the `total` steps of the run. Returns loss and images_per_second for the row."""
    weights = [weight for group in optimizer.param_groups for weight in group['params']]
    loader.batch_sampler.epoch = epoch
    loader.batch_sampler.steps = steps
    losses = []
    start = time.time()
    for batch, t in zip(loader, steps, strict=True):        # t counts the steps of the whole run, from 0
        x, y = (gather(to_device(part, args.device)) for part in batch)         # the whole batch, from all processes
        for group in optimizer.param_groups:
            initial = group.setdefault('initial_lr', group['lr'])       # set once, in step 0
            group['lr'] = initial * learning_rate_factor(t, args, len(loader), total)
        set_seed(args.seed, STEP, t)                        # for the random numbers that `step` draws
        loss = step(x, y)
        optimizer.zero_grad()
        loss.backward()
        average_gradients(weights)                          # of the processes of torchrun, if there are any
        if args.clip:
            nn.utils.clip_grad_value_(weights, args.clip)
        optimizer.step()
        losses.append(loss.detach())
        if len(losses) % 20 == 0 or t == steps[-1]:         # only every 20 steps, because .item() waits for the GPU
            mean = torch.stack(losses).mean().item()        # of the epoch so far
            if not math.isfinite(mean):
                raise UsageError(f'the loss is {mean} at epoch {epoch}, in step {len(losses)} or the 19 before; try a '
                                 'lower --lr, or --precision fp32')
    return dict(loss=mean, images_per_second=len(losses) * len(y) / (time.time() - start))


# ---- 4. evaluation ---------------------------------------------------------------------------------


@torch.no_grad()
def embed(model, images, batch_size=128):
    """Embeddings of a whole set, with its test transform -> (N, D) float32 on the CPU, in the order of the images.
    `model` is any module with weights that turns images (B, 3, S, S) into (B, D)."""
    device = next(model.parameters()).device
    training = {module: module.training for module in model.modules()}  # a user may have frozen some BatchNorm
    indices = own_positions(len(images), repeat_last=True)               # with torchrun, each process has equally many
    loader = make_loader(images, BatchSampler(indices, batch_size, drop_last=False), device)
    model.eval()
    z = torch.cat([model(x.to(device)).float() for x, _ in loader])
    for module, mode in training.items():
        module.training = mode
    return gather(z)[:len(images)].cpu()


def k_nearest(query, gallery, k):
    """Exact search. For b queries at a time, yields their indices (b,), and the cosines and indices of their k nearest
    images of the gallery, both (b, k).

    query    (N, D)
    gallery  (G, D), with k <= G; or None: the queries are also the gallery, and each is excluded from its own results,
             with k <= N - 1
    """
    within = gallery is None                                             # the queries are also the gallery
    query = F.normalize(query.float(), dim=1)
    gallery = query if within else gallery.float()
    # In a fixed random order, see 2 in retrieval_metrics
    order = torch.randperm(len(gallery), generator=torch.Generator().manual_seed(0)).to(query.device)
    gallery = gallery[order]
    if not within:
        F.normalize(gallery, dim=1, out=gallery)            # in place: this copy can be large
    at_once = max(1, 2 ** 27 // len(gallery))               # queries at once: 2^27 similarities take 0.5 GB
    for rows in torch.arange(len(query), device=query.device).split(at_once):
        s, found = search(query[rows], gallery, k + within)
        index = order[found]
        if within:      # drop the query from the k + 1 found, or the last one if k + 1 duplicates of it came before
            other = index != rows[:, None]
            other[:, -1] &= ~other.all(dim=1)
            s = s[other].view(len(rows), k)
            index = index[other].view(len(rows), k)
        yield rows, s, index


def search(query, gallery, k):
    """Inner products and indices of the k nearest: query (b, D), gallery (G, D) -> (b, k), (b, k), the nearest first"""
    # FAISS is faster on a CPU. On macOS, a process with torch and FAISS crashes, because each loads an OpenMP.
    if query.device.type == 'cpu' and sys.platform != 'darwin':
        import faiss
        s, index = faiss.knn(query.numpy(), gallery.numpy(), k, metric=faiss.METRIC_INNER_PRODUCT)
        return torch.from_numpy(s), torch.from_numpy(index)
    with torch.autocast(query.device.type, enabled=False):
        return (query @ gallery.T).topk(k, dim=1)


@torch.no_grad()
def retrieval_metrics(query, query_labels, gallery=None, gallery_labels=None, ks=(1, 2, 4, 8)):
    """Recall@K, R-precision and MAP@R, with the cosine similarity.

    query    (N, D), query_labels (N,);  without a gallery, the queries are also the gallery
    gallery  (G, D), gallery_labels (G,)
    returns  {'R@1': ..., 'RP': ..., 'MAP@R': ...} in percent; 'unmatched', a count (see 3), is added if it is not 0

    A match of a query is another image of its class; R is the number of its matches in the gallery.
    R@K    percentage of the queries that have a match among their K nearest, for each K of `ks`
    RP     percentage of matches among the R nearest, averaged over the queries
    MAP@R  mean of P(i) over the R nearest, averaged over the queries. P(i) is the precision among the first i
           if the i-th is a match, and else 0: Reality Check Eq. (3) and (4)

    1. A query is excluded from its own results by its index, because the first result may be a duplicate of it.
    2. The gallery is in a fixed random order, so that the order of equally similar images does not depend on their
       class. Collapsed embeddings, which are all equal, score about chance, not 100.
    3. A query without a match is a miss in R@K and counts as 'unmatched'. RP and MAP@R are means over the other
       queries, 0 if there are none.
    """
    within = gallery is None                                             # the queries are also the gallery
    if within:
        gallery, gallery_labels = query, query_labels
    for z, labels in ((query, query_labels), (gallery, gallery_labels)):
        if not len(z) or labels.shape != z.shape[:1] or not z.isfinite().all():
            raise UsageError(f'embeddings {tuple(z.shape)} with labels {tuple(labels.shape)}: none, or they do '
                             'not fit, or some embeddings are NaN; in training, a lower --lr may help')
    # Labels may be any integers; numbered anew, they can be counted.
    _, labels = torch.cat([query_labels.cpu(), gallery_labels.cpu()]).unique(return_inverse=True)
    query_labels, gallery_labels = labels.to(query.device).tensor_split([len(query)])
    counts = torch.bincount(gallery_labels, minlength=int(labels.max()) + 1)            # (C,) images of each class
    matches = counts[query_labels] - int(within)                         # (N,) R; a query is not a match of itself
    depth = min(max(*ks, int(matches.max())), len(gallery) - within)     # enough for the largest K and the largest R
    values = []
    for rows, _, index in k_nearest(query, None if within else gallery, depth):         # b queries at a time
        hit = gallery_labels[index] == query_labels[rows, None]          # (b, depth)
        recalls = [hit[:, :k].any(dim=1) for k in ks]                    # (b,) for each K of R@K
        values.append(torch.stack([*recalls, *precisions(hit, matches[rows])], dim=1))
    values = 100 * torch.cat(values).cpu().double()                      # (N, len(ks) + 2)
    metrics = {f'R@{k}': column.mean().item() for k, column in zip(ks, values.T)}
    matched = matches.cpu() > 0                                          # (N,) see 3
    rp, map_at_r = values[matched, -2:].sum(dim=0) / max(1, matched.sum())
    metrics |= {'RP': rp.item(), 'MAP@R': map_at_r.item()}
    if not matched.all():
        metrics['unmatched'] = int((~matched).sum())
    return metrics


def precisions(hit, r):
    """RP and MAP@R of each query, from 0 to 1.  hit (b, k), the nearest first; r (b,) its R -> (b,), (b,)"""
    i = torch.arange(1, hit.shape[1] + 1, device=hit.device)             # the i of P(i)
    hit = hit & (i <= r[:, None])                                        # among the R nearest
    p = hit.cumsum(dim=1) / i * hit                                      # Reality Check Eq. (4)
    return hit.sum(dim=1) / r, p.sum(dim=1) / r                          # the second is Reality Check Eq. (3)


def mean_similarities(z, y):
    """Mean cosine similarity of all positive pairs, s+, and of all negative pairs, s-. A mean of no pairs is left
    out.  z (N, D), y (N,) -> dict"""
    z = F.normalize(z.double(), dim=1)
    counts = torch.bincount(y)                                           # (C,) images of each class
    sums = z.new_zeros(len(counts), z.shape[1]).index_add_(0, y, z)      # (C, D)
    # The squared norm of a sum of unit vectors is the sum of the cosines of all their ordered pairs. The sums of the
    # classes give the positive pairs, the sum of the set gives all. Both include N pairs of an image with itself, which
    # are subtracted. Their cosine is 1, or 0 if an embedding is 0.
    own = z.square().sum()
    positive_sum = sums.square().sum() - own
    negative_sum = z.sum(dim=0).square().sum() - own - positive_sum
    positives = counts.square().sum() - len(z)
    negatives = len(z) ** 2 - len(z) - positives
    pairs = {'s+': (positive_sum, positives), 's-': (negative_sum, negatives)}
    return {name: (total / number).item() for name, (total, number) in pairs.items() if number}


def embed_test(model, data):
    """Embeddings of the queries (N, D), and of the gallery (G, D) or None where the queries are the gallery, on the
    device that searches them: a GPU of CUDA if the model is there, otherwise the CPU"""
    device = next(model.parameters()).device
    where = device if device.type == 'cuda' else 'cpu'
    z = embed(model, data.query).to(where)
    return z, None if data.gallery is data.query else embed(model, data.gallery).to(where)


def score(data, z, gallery=None):
    """The metrics of a test set from the embeddings of embed_test, and s+ and s- of the queries"""
    metrics = retrieval_metrics(z, data.query.labels, gallery, data.gallery.labels, data.ks)
    return metrics | mean_similarities(z, data.query.labels.to(z.device))


def evaluate(model, data):
    """The metrics of the test set for a row of the log; {} if there is no test set"""
    return score(data, *embed_test(model, data)) if data.query else {}


# ---- 5. images -------------------------------------------------------------------------------------

# Pillow finds the format of a file by its content. Further formats of Pillow may start a program.
FORMATS = ['JPEG', 'PNG', 'PPM', 'BMP', 'TIFF', 'WEBP', 'GIF', 'AVIF']
ENDINGS = (*torchvision.datasets.folder.IMG_EXTENSIONS, '.gif', '.avif')
MEAN = (0.485, 0.456, 0.406)                                             # ImageNet's, RGB
STD = (0.229, 0.224, 0.225)
CORES = len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count()    # for this process


class Images(torch.utils.data.Dataset):
    """A torch Dataset of N images with labels, or of N vectors: precomputed features.

    items            N paths, PIL images or uint8 arrays (height, width, 3); or a tensor (N, c) of vectors, which
                     become float32
    labels           N classes, by name or number; or if `classes` is given, integers, which are positions in it
    classes          the names of the C classes; None: all labels, sorted
    superclasses     LongTensor (N,), or None
    transform        PIL image -> (3, S, S), for tests;  None: make_test_transform()
    train_transform  the same for training;              None: make_train_transform()
    workers          processes that read files, 0: none; None: one per core, at most 8

    Both transforms may be replaced by any callable. images[i] is (transform(image), label). With further integers,
    images[i, ...] is (train_transform(image), label), and these integers are the seed. If a transform has an attribute
    min_side, large JPEG files are decoded at a reduced size, whose shorter side is not below it.
    """

    def __init__(self, items, labels, classes=None, superclasses=None, transform=None, train_transform=None,
                 workers=None):
        self.is_vectors = torch.is_tensor(items)
        if self.is_vectors and items.ndim != 2:
            raise UsageError(f'a tensor of vectors is (N, c), and this one is {tuple(items.shape)}; images are a list')
        self.items = items.float() if self.is_vectors else list(items)  # by position, also those of a pandas column
        self.are_files = len(items) > 0 and isinstance(self.items[0], (str, os.PathLike))
        self.paths = [str(item) if self.are_files else f'image {i}' for i, item in enumerate(self.items)]
        if classes is None:
            labels = labels.tolist() if hasattr(labels, 'tolist') else labels         # a tensor is slow to iterate over
            classes, labels = np.unique(list(map(one_form, labels)), return_inverse=True)
        self.classes = list(map(str, map(one_form, classes)))
        labels = torch.as_tensor(labels)
        if labels.shape != (len(items),) or not {*labels.tolist()} <= {*range(len(self.classes))}:
            raise UsageError(f'{len(items)} images of {len(self.classes)} classes need as many labels, from 0 to '
                             f'{len(self.classes) - 1}, and these are {labels}')
        self.labels = labels.long()                                      # (N,) from 0 to C - 1
        self.superclasses = superclasses
        self.transform = transform or make_test_transform()
        self.train_transform = train_transform or make_train_transform()
        self.workers = min(8, CORES) if workers is None else workers

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, item):
        i, *seed = item if isinstance(item, tuple) else (item,)         # a tuple is from StepBatches, in training
        x = self.items[i]
        if not self.is_vectors:
            transform = self.train_transform if seed else self.transform
            image = to_rgb(x, getattr(transform, 'min_side', None))
            if seed:                        # only the generator of the CPU, because to seed all devices takes long
                set_seed(*seed, seed_torch=torch.default_generator.manual_seed)
            x = transform(image)
        return x, self.labels[i]

    @property
    def num_classes(self):
        """C: labels are from 0 to C - 1."""
        return int(self.labels.max()) + 1

    @property
    def present(self):
        """Names of the classes that these images show"""
        return [self.classes[c] for c in self.labels.unique()]

    def subset(self, indices):
        """The images at these positions, a LongTensor (n,), or where a mask (N,) is true; their classes are numbered
        anew from 0."""
        kept, labels = self.labels[indices].unique(return_inverse=True)
        items = self.items[indices] if self.is_vectors else [self.items[i] for i in torch.arange(len(self))[indices]]
        superclasses = None if self.superclasses is None else self.superclasses[indices]
        return Images(items, labels, [self.classes[c] for c in kept], superclasses, self.transform,
                      self.train_transform, self.workers)


def one_form(label):
    """A class in one form: text in one form of Unicode (a Mac writes another one), and 1 instead of 1.0, which a column
    of a table has where a value is missing"""
    label = label.decode() if isinstance(label, bytes) else label
    if isinstance(label, str):
        return unicodedata.normalize('NFC', label)
    if label != label:
        raise UsageError('the label of an image is missing (NaN): leave the image out')
    return int(label) if label == label // 1 else label


def make_test_transform(resize=256, image_size=224, mean=MEAN, std=STD):
    """PIL image -> (3, S, S): the shorter side is resized to `resize` pixels, and the centre is cropped."""
    return compose(resize, [v2.Resize(resize), v2.CenterCrop(image_size)], mean, std)


def make_train_transform(image_size=224, min_crop=0.08, flip=True, jitter=0.0, resize=None, mean=MEAN, std=STD):
    """PIL image -> (3, S, S): a random crop of at least the fraction `min_crop` of the area

    jitter  brightness, contrast and saturation are multiplied by factors from 1 - jitter to 1 + jitter
    resize  shorter side of the image before the crop; None: the image in full size
    """
    steps = [v2.Resize(resize)] if resize else []
    steps += [v2.RandomResizedCrop(image_size, scale=(min_crop, 1))]
    if flip:
        steps += [v2.RandomHorizontalFlip()]
    if jitter:
        steps += [v2.ColorJitter(jitter, jitter, jitter)]
    # Large files may be decoded at a reduced size, but so that the smallest crop is hardly enlarged.
    return compose(resize or math.ceil(image_size / min_crop ** 0.5), steps, mean, std)


def compose(min_side, steps, mean, std):
    """A transform of these steps, which ends with a normalized tensor. On min_side, see Images."""
    steps += [v2.PILToTensor(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(mean, std)]
    transform = v2.Compose(steps)
    transform.min_side = min_side
    return transform


def transforms_from(args):
    """The transforms that the flags name, and --workers, as Images takes them"""
    mean, std, _ = normalization(args.arch)
    resize = args.resize if args.crop_from == 'resized' else None
    return dict(transform=make_test_transform(args.resize, args.image_size, mean, std),
                train_transform=make_train_transform(args.image_size, args.min_crop, args.flip, args.jitter, resize,
                                                     mean, std),
                workers=args.workers)


def normalization(arch):
    """Mean and standard deviation of pixels for a network, and its image size: None for torchvision; 224 if
    that of timm is fixed, because make_trunk makes the network for this size"""
    if not arch.startswith('timm:'):
        return MEAN, STD, None
    expected = timm_config(arch)
    return expected.mean, expected.std, 224 if expected.fixed_input_size else expected.input_size[-1]


def to_rgb(image, min_side=None):
    """A path, PIL image or array -> PIL image in 8-bit RGB, rotated as its EXIF data say, with white where it is
    transparent; the first one of an animation. Raises UsageError that names a file which cannot be read."""
    source = image
    try:
        if isinstance(source, np.ndarray):
            image = Image.fromarray(source)
        elif not isinstance(source, Image.Image):
            known = Image.registered_extensions().values()              # an older Pillow lacks AVIF
            image = Image.open(source, formats=[name for name in FORMATS if name in known])
            if min_side:
                image.draft('RGB', (min_side, min_side))                 # for JPEG files only
        image.load()                                        # raises what is wrong with the pixels, and closes the file
        image = ImageOps.exif_transpose(image)
        if image.mode[0] in 'IF':                           # Pillow would clip it
            raise ValueError('it has more than 8 bits per pixel and colour: convert it')
        if image.has_transparency_data:
            image = Image.alpha_composite(Image.new('RGBA', image.size, 'white'), image.convert('RGBA'))
        return image.convert('RGB')
    except MemoryError:
        raise
    except Exception as error:                              # every image format has errors of its own
        raise UsageError(f'cannot read the image {getattr(source, "shape", source)}: {error}; replace or remove it'
                         ) from error


# ---- 6. shapes -------------------------------------------------------------------------------------


def draw_shapes(**transforms):
    """The built-in dataset: 200 classes of shapes x 20 images for training, and 200 other classes for the test.

    A class is a curve of Gielis' superformula, r(t) = (|cos(m t/4)|^n2 + |sin(m t/4)|^n3)^(-1/n1), with two colours and
    a pattern of stripes. Its images differ in rotation, scale, shift, aspect, brightness, background and noise, so that
    the classes cannot be told apart by pixels or colours only.
    """
    generator = torch.Generator().manual_seed(2022)
    t = torch.linspace(-math.pi, math.pi, 721)
    side = torch.linspace(-1, 1, 64)
    grid = torch.stack(torch.meshgrid(side, side, indexing='xy'))       # (2, S, S) x and y

    def uniform(low, high, *shape):
        return low + (high - low) * torch.rand(*shape, generator=generator)

    def draw_class(n):
        """-> (n, 3, S, S) in [0, 1]"""
        m = int(torch.randint(2, 9, (1,), generator=generator))         # lobes
        n1, n2, n3 = (uniform(low, high, 1).exp() for low, high in ((-0.6, 1.6), (-1.2, 2.2), (-1.2, 2.2)))
        frequency = uniform(3, 9, 1)
        angle = uniform(0, math.pi, 1)
        colours = uniform(0, 1, 2, 3)
        curve = ((m * t / 4).cos().abs() ** n2 + (m * t / 4).sin().abs() ** n3) ** (-1 / n1)
        curve = curve / curve.max()                                     # its longest lobe has length 1
        scale = uniform(0.5, 0.75, n, 1, 1)
        aspect = uniform(0.75, 1.33, n, 1, 1).sqrt()
        x, y = (grid[:, None] - uniform(-0.25, 0.25, 2, n, 1, 1)).unbind()   # (n, S, S)
        turn = uniform(0, 2 * math.pi, n, 1, 1)
        across = (turn.cos() * x + turn.sin() * y) / (scale * aspect)    # from the image to the shape's frame
        along = (turn.cos() * y - turn.sin() * x) / (scale / aspect)
        radius = curve[((torch.atan2(along, across) + math.pi) / (2 * math.pi) * 720).round().long()]
        inside = torch.sigmoid((radius - torch.hypot(across, along)) * 20)[:, None]   # (n, 1, S, S)
        stripes = torch.sigmoid(4 * torch.sin(frequency * (across * angle.cos() + along * angle.sin())))[:, None]
        first, second = (colours + uniform(-0.03, 0.03, n, 2, 3))[..., None, None].unbind(1)   # (n, 3, 1, 1)
        slope = (grid * uniform(-0.3, 0.3, n, 2, 1, 1)).sum(1, keepdim=True)   # (n, 1, S, S)
        background = uniform(0, 1, n, 1, 1, 1) + uniform(-0.1, 0.1, n, 3, 1, 1) + slope
        image = background + inside * (second + stripes * (first - second) - background)
        image = image * uniform(0.8, 1.2, n, 1, 1, 1)
        return (image + 0.2 * torch.randn(image.shape, generator=generator)).clamp(0, 1)

    def draw_set(name):
        pixels = torch.cat([(255 * draw_class(20)).byte().permute(0, 2, 3, 1) for _ in range(200)])
        labels = torch.arange(200).repeat_interleave(20)
        return Images(list(pixels.numpy()), labels, [f'{name} shape {i}' for i in range(200)], **transforms)

    return dict(train=draw_set('training'), query=draw_set('test'))


# ---- 7. datasets -----------------------------------------------------------------------------------


class Splits:
    """Training and test set. load_dataset returns one; you can also make your own of Images.

    name  part of the names of its runs;  ks  the values of K in Recall@K, among them 1
    train, query, gallery  Images, or None if there are none; without a gallery, the queries are also the gallery.
                           With --fold, query is for validation, as in Splits(name, **hold_out(train, fold))

    For example, with PIL images in memory, a training script that was imported, and its recipe for a folder of images:

    >>> args = script.get_args(['--dataset', 'folder', '--epochs', '5', '--name', 'first'])
    >>> common.set_seed(args.seed)
    >>> transforms = common.transforms_from(args)      # or your own; then also set .transform after load_checkpoint
    >>> data = common.Splits('mine', common.Images(images, labels, **transforms),
    ...                       common.Images(test_images, test_labels, **transforms))
    >>> model = common.build(args, data)               # or with trunk=module, for a network of your own
    >>> optimizer = common.make_optimizer(args, [dict(params=model.parameters())])
    >>> common.train(args, model, data, lambda x, y: script.the_loss(model(x), y), optimizer)
    >>> common.evaluate(common.load_checkpoint('runs/first'), data)
    """

    def __init__(self, name, train=None, query=None, gallery=None, ks=(1, 2, 4, 8)):
        self.name = name
        self.train = train
        self.query = query
        self.gallery = gallery or query
        self.ks = ks
        if gallery and query.classes != gallery.classes:    # a class has one number in both
            classes = sorted({*query.classes, *gallery.classes})
            self.query, self.gallery = copy.copy(query), copy.copy(gallery)       # they may be part of other Splits
            for images in (self.query, self.gallery):
                images.labels = torch.tensor(list(map(classes.index, images.classes)))[images.labels]
                images.classes = classes
        if query and (len({*query.present, *self.gallery.present}) < 2 or not self.num_matches().any()):
            warn('the metrics mean nothing: all test images have the same class, or none has a match of its class')
        if train and query and (both := {*train.classes} & {*query.present}):
            warn(f'{len(both)} classes are in the training set and in the test set, the first is {min(both)}')

    def num_matches(self):
        """R of each query, (N,): its matches in the gallery, where a query is not a match of itself"""
        present = torch.bincount(self.gallery.labels, minlength=self.query.num_classes)     # (C,) images of each class
        return present[self.query.labels] - int(self.gallery is self.query)


def load_dataset(name, root='data', fold=None, whole=False, **options):
    """The Splits of a dataset. Raises UsageError if files are missing, or counts are not as published.

    name     shapes, folder, vectors, cub, cars, sop or inshop
    root     its folder, the --data in README
    fold     'i/n': block i of n of the training classes is the test set; the real test set is not used
    whole    all images are the test set, and .train is None (not for shapes)
    options  arguments of Images, such as transform
    """
    try:
        splits = draw_shapes(**options) if name == 'shapes' else read_splits(name, root, whole, options)
    except (OSError, ValueError, LookupError) as error:     # a file is missing or a web page, for example
        raise UsageError(f'{name} cannot be loaded from {root}: {error}; README says what has to be there') from error
    if fold:
        splits = hold_out(splits.get('train'), fold)
    return Splits(name, **splits, ks=DATASETS[name].get('ks', (1, 2, 4, 8)))


def read_splits(name, root, whole, options):
    """{split: Images} of train, query and gallery, from the reader of a dataset. It yields (split, path or vector,
    class, superclass or None)."""
    found = {}
    for split, *image in DATASETS[name]['read'](Path(root)):
        found.setdefault('query' if whole else split, []).append(image)
    if name != 'vectors':
        check_files([path for images in found.values() for path, *_ in images])
    splits = {}
    for split, images in found.items():
        items, classes, superclasses = zip(*images)
        items = torch.from_numpy(np.stack(items)) if name == 'vectors' else items
        superclasses = None if superclasses[0] is None else torch.tensor(superclasses)
        splits[split] = Images(items, classes, None, superclasses, **options)
    sizes = {split: (len(images), images.num_classes) for split, images in splits.items()}
    counts = DATASETS[name].get('counts')
    if counts and not whole and sizes != counts:
        raise ValueError(f'(images, classes) are {sizes}, published are {counts}')
    return splits


def check_files(paths):
    """Raises ValueError if images are missing, or listed twice."""
    missing = [path for path in paths if not os.path.isfile(path)]
    # A link to a folder would list its images twice. Links to a file are allowed: some tools store equal files once.
    real = cache(os.path.realpath)
    times = Counter((real(os.path.dirname(path)), os.path.basename(path)) for path in paths)
    twice = [os.path.join(*path) for path, count in times.items() if count > 1]
    if missing or twice:
        raise ValueError(f'of {len(paths):,} images {len(missing):,} are missing, and {len(twice):,} are listed twice, '
                         f'such as {[*missing, *twice][0]}')


def hold_out(train, fold):
    """{split: Images} of a fold 'i/n' of the training set: block i of n blocks of classes is for validation, the others
    for training. The blocks are contiguous, as in Section 3.3 of the Reality Check, and of equal size up to one class.
    """
    numbers = re.fullmatch(r'(\d+)/(\d+)', fold)
    i, n = map(int, numbers.groups()) if numbers else (0, 0)             # 0/0 is refused below
    classes = train.num_classes if train else 0
    block = torch.arange(classes) * n // classes                         # (C,)
    if not i < n or n < 2 or torch.bincount(block, minlength=n).min() < 2:
        raise UsageError(f'--fold {fold} is not I/N with I from 0 to N - 1, N at least 2, and at least two classes '
                         f'in each block, of {classes} for training')
    validates = block[train.labels] == i                                 # (N,)
    return dict(train=train.subset(~validates), query=train.subset(validates))


def read_cub(root):
    """Lines `<image id> <class>/<file>`, where a class starts with its number"""
    for _, path in split_lines(f'{root}/CUB_200_2011/images.txt'):
        # The first 100 classes are for training; train_test_split.txt is for another task, classification.
        split = 'train' if int(path[:3]) <= 100 else 'query'
        yield split, f'{root}/CUB_200_2011/images/{path}', path.split('/')[0], None


def read_cars(root):
    """The authors' .mat file, or a copy with lines of file, box and class. The first 98 classes are for training; the
    splits of both are for another task, classification."""
    rows = []                               # (path, number of the class)
    if (root / 'anno_train.csv').exists():
        for split in ('train', 'test'):
            paths = {path.name: path for path in root.glob(f'car_data/car_data/{split}/*/*')}
            for [line] in split_lines(root / f'anno_{split}.csv'):
                file, *_, number = line.split(',')
                rows.append((paths[file], number))
    else:
        from scipy.io import loadmat
        for file, *_, number, _ in loadmat(f'{root}/cars_annos.mat', squeeze_me=True)['annotations']:
            rows.append((root / file, number))
    for path, number in rows:
        yield 'train' if int(number) <= 98 else 'query', str(path), f'{int(number):03d}', None


def read_sop(root):
    """A header, then lines `image_id class_id super_class_id path`"""
    folder = f'{root}/Stanford_Online_Products'
    for split, file in (('train', 'Ebay_train.txt'), ('query', 'Ebay_test.txt')):
        for _, number, superclass, path in split_lines(f'{folder}/{file}')[1:]:
            yield split, f'{folder}/{path}', f'{int(number):05d}', int(superclass) - 1


def read_inshop(root):
    """A count, a header, then lines `img/... id_00000001 train|query|gallery`"""
    for path, class_, split in split_lines(f'{root}/Eval/list_eval_partition.txt')[2:]:
        yield split, f'{root}/Img/{path}', class_, None


def split_lines(path):
    return [line.split() for line in open(path, encoding='utf-8') if line.strip()]


def read_folder(root):
    """Images of your own, in one of these layouts:

    train/ and test/   each with a folder of images for each class, at any depth
    gallery/           in addition, if the images of test/ (or query/) are queries for a separate gallery; an image that
                       is in both finds itself
    none of these      a folder for each class; the first half of the sorted classes is for training, the rest the test

    The name of a class is the path of its folder below the split. Images have one of ENDINGS, in section 5.
    """
    folders = [path for path in root.iterdir() if path.is_dir() and is_read(path)]
    # A folder test/ without folders in it is perhaps a class of that name.
    if any(path.name in SPLITS and any(map(Path.is_dir, path.iterdir())) for path in folders):
        for split, name in find_splits(path.name for path in folders).items():
            for path, class_ in images_below(root / name):
                yield split, path, class_, None
    else:
        images = images_below(root)
        classes = sorted({class_ for _, class_ in images})
        first = {*classes[:len(classes) // 2]}
        for path, class_ in images:
            yield 'train' if class_ in first else 'query', path, class_, None


SPLITS = {'train', 'test', 'query', 'gallery'}


def find_splits(names):
    """Which of these folders (or NPZ files, without their ending) is which split, as {split: name}. Splits are train,
    test (or query) and gallery."""
    names = {*names}
    found = names & SPLITS
    if others := names - SPLITS:
        warn(f'{", ".join(sorted(others))} beside {", ".join(sorted(found))}: not read')
    if {'test', 'query'} <= found or 'gallery' in found and not found & {'test', 'query'}:
        raise ValueError(f'there are {" and ".join(sorted(found))}: put queries into test, or query next to gallery')
    return {name.replace('test', 'query'): name for name in sorted(found)}


def is_read(path):
    """Whether a file or folder may have images: it does not belong to an operating system, a file server (thumbnails)
    or a waste bin, and is no folder runs/ of these scripts, which can have image grids."""
    service = 'lost+found', '__MACOSX', 'System Volume Information', '$RECYCLE.BIN', '@eaDir', '#recycle'
    runs = path.name == 'runs' and any(path.rglob('log.jsonl'))
    return not (path.name.startswith('.') or path.name in service or runs)


def images_below(root):
    """(path, class) of the images in and below a folder. If no folder below root has images, those in root itself are
    one class, '.'. Files that are left out are named in a warning."""
    def stop(error):
        raise error

    files = []
    for folder, folders, names in os.walk(root, onerror=stop, followlinks=True):
        folders[:] = sorted(name for name in folders if is_read(Path(folder, name)))
        class_ = Path(folder).relative_to(root).as_posix()
        files += [(os.path.join(folder, name), class_) for name in sorted(names) if is_read(Path(folder, name))]
    images = [(path, class_) for path, class_ in files if path.lower().endswith(ENDINGS)]
    images = [(path, class_) for path, class_ in images if class_ != '.'] or images
    if not images:
        raise ValueError(f'there are no images in {root}')
    check_names({class_ for _, class_ in images})
    if unread := {*files} - {*images}:
        warn(f'{root}: {len(unread)} files are not read, such as {min(unread)[0]}; they are no images of a known kind '
             '(convert them to JPEG), or in no folder of a class')
    return images


def check_names(classes):
    """Raises ValueError if folders look like different splits, but would be read as classes, because then the network
    would be trained on the test set. One of many classes may have such a name."""
    word = re.compile('(?i)(?<![a-z])(train|test|val|dev|eval|holdout|query|gallery|probe)')
    folders = {}                                            # {path of a folder: names of the folders in it}
    for class_ in classes:
        for path in [Path(class_), *Path(class_).parents][:-1]:
            folders.setdefault(path.parent, set()).add(path.name)
    for names in folders.values():
        looks = {name: found[1].lower() for name in sorted(names) if (found := word.search(name))}
        if len({*looks.values()}) > 1 and 2 * len(looks) >= len(names):
            raise ValueError(f'the folders {" and ".join(looks)} look like splits: name them train and test, and name '
                             'the folder that has them with --data; if they are classes, rename one')


def read_vectors(root):
    """NPZ files train.npz, test.npz, ..., instead of folders, with the arrays embeddings (N, c), labels (N,), which are
    positions in `classes`, and classes (C,). Features of any network come from common.embed(network, images), or from
    eval.py --embed:

    >>> np.savez('my_vectors/train.npz', embeddings=z, labels=y, classes=names)
    """
    files = {path.stem: path for path in root.glob('[!.]*.npz')}
    for split, name in find_splits(files).items():
        saved = np.load(files[name])
        z, labels, names = saved['embeddings'].astype(np.float32), saved['labels'], saved['classes']
        if z.ndim != 2 or labels.shape != z.shape[:1] or labels.dtype.kind not in 'iu' or labels.min() < 0:
            raise ValueError(f'in {name}.npz embeddings {z.shape} do not fit labels {labels.shape}, which begin at 0')
        for vector, label in zip(z, labels):
            yield split, vector, names[label], None


def download(name, root):
    """Downloads the archive of a dataset and unpacks it in the folder `root`, unless its own folder is there."""
    row = DATASETS[name]
    if 'url' not in row:
        raise UsageError('--download is for cub and sop; README says where cars and inshop come from')
    folder = Path(row['url']).stem
    if not Path(root, folder).exists():
        unpacked = Path(root, 'unpacked')                   # perhaps in part, after Ctrl-C
        torchvision.datasets.utils.download_and_extract_archive(row['url'], root, unpacked, md5=row['md5'])
        os.replace(unpacked / folder, Path(root, folder))


# read: function that yields the images. ks: the K of Recall@K in the literature, if not 1, 2, 4, 8. counts: published
# counts of images and classes of each split. url, md5: the archive for --download, and its checksum; it unpacks to a
# folder of its own name.
DATASETS = dict(
    shapes={},
    folder=dict(read=read_folder),
    vectors=dict(read=read_vectors),
    cub=dict(read=read_cub, counts=dict(train=(5864, 100), query=(5924, 100)),
             url='https://data.caltech.edu/records/65de6-vp158/files/CUB_200_2011.tgz',
             md5='97eceeb196236b17998738112f37df78'),
    cars=dict(read=read_cars, counts=dict(train=(8054, 98), query=(8131, 98))),
    sop=dict(ks=(1, 10, 100, 1000), read=read_sop,
             counts=dict(train=(59551, 11318), query=(60502, 11316)),
             url='http://ftp.cs.stanford.edu/cs/cvgl/Stanford_Online_Products.zip',
             md5='7f73d41a2f44250d4779881525aea32e'),
    inshop=dict(ks=(1, 10, 20, 30, 40, 50), read=read_inshop,
                counts=dict(train=(25882, 3997), query=(14218, 3985), gallery=(12612, 3985))))


# ---- 8. runs ---------------------------------------------------------------------------------------

# A run is the folder runs/<name>/ with log.jsonl, a JSON object for each evaluated epoch, and last.pt; with --fold,
# best.pt is the epoch with the highest MAP@R on the validation classes.


def dataset_from(args):
    """The dataset that the flags name"""
    if args.download:
        from_rank0(download, args.dataset, args.data)
    data = load_dataset(args.dataset, args.data, fold=args.fold, **transforms_from(args))
    if not data.train or data.train.num_classes < 2:
        raise UsageError(f'{args.data} has not two classes for training: put them into train/, see README')
    return data


def build(args, data=None, **options):
    """The network that the flags name, on their device. `options` are passed to Embedder, such as trunk=module for a
    trunk of your own. With vectors, c and the mean norm come from `data`. Without --dim, the head then begins as the
    identity."""
    shape = (3, args.image_size, args.image_size)
    if args.dataset == 'vectors':
        vectors = data.train.items                                       # (N, c)
        shape = vectors.shape[1:]
        options['layer_norm'] = False
        if args.dim is None:                                # before training, embeddings are the normalized vectors
            options['head_init'] = 'identity'
    weights = 'none' if args.resume else args.weights       # those of a resumed run are in its checkpoint
    model = Embedder(args.arch, args.dim, args.pool, weights, args.freeze_bn, input_shape=shape,
                     precision=pick_precision(args.precision, args.device), **options)
    if args.dataset == 'vectors':
        model.trunk.mean_norm.copy_(vectors.norm(dim=1).mean())
    if world_size() > 1 and not args.freeze_bn:             # joint statistics of all processes; torch has them for CUDA
        kinds = {type(m) for m in model.trunk.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)}
        if not kinds <= {nn.BatchNorm1d, nn.BatchNorm2d}:   # those of timm may contain an activation, and would lose it
            raise UsageError('with torchrun, the BatchNorm of this network cannot be trained: add --freeze-bn')
        model.trunk = nn.SyncBatchNorm.convert_sync_batchnorm(model.trunk)
    if args.compile:
        model.trunk.compile()                               # in place, so the names in a checkpoint stay as they are
    return model.place(args.device)


def new_folder(args, data):
    """Makes runs/<name>/; without --name it is script, dataset and the next free number."""
    numbered = (f'{args.script.removeprefix("train_")}-{data.name}-{number}' for number in range(1, 10 ** 6))
    for name in ([args.name] if args.name else numbered):
        folder = Path('runs', name)
        if not folder.exists():
            folder.mkdir(parents=True)
            return folder
    raise UsageError(f'{folder} exists already; choose another --name, delete it, or continue this run with --resume '
                     f'{folder}')


def best_row(rows):
    """The row with the highest MAP@R, the first if there are several; epoch 0, rows[0], only if there is no other"""
    return max(rows[1:] or rows, key=lambda row: row['MAP@R'])


def stops_early(rows, patience):
    """Whether the best row is followed by at least `patience` others"""
    return len(rows) - 1 - rows.index(best_row(rows)) >= patience


def print_recipe(args, model, data, per_epoch, total, folder):
    """Prints what is going to run: the data, the steps, all flags, and how to resume the run."""
    print(f'{data.name}: {len(data.train):,} training images of {data.train.num_classes:,} classes, '
          f'{len(data.query or []):,} {"validation" if args.fold else "test"} images\n'
          f'{total:,} steps, {per_epoch:,} in an epoch, on {args.device} in {model.precision}')
    print(', '.join(f'{flag} {value}' for flag, value in saved_flags(args).items()))
    print(f'If this run is interrupted after its first evaluation, --resume {folder} continues it.')
    if 0 < total <= args.freeze_epochs * per_epoch:
        warn(f'the backbone will not be trained: it is frozen for {args.freeze_epochs} epochs')


def show_row(row):
    """Prints the main values of a row of the log."""
    values = [f'{key} {row[key]:<6.4g}' for key in ('loss', 'R@1', 'MAP@R', 's+', 's-', 'images_per_second')
              if row.get(key) is not None]
    print(f'epoch {row["epoch"]:<3d}', *values, f'minutes {row["minutes"]:.1f}', sep='  ', flush=True)


def summary(args, data, folder, rows):
    """Prints the result, its meaning and the next command. Returns its row: the last, or with --fold the best."""
    row = best_row(rows) if args.fold else rows[-1]
    if data.query:
        part = 'validation' if args.fold else 'test'
        others = 'other image' if data.gallery is data.query else 'image in the gallery'
        print(f'R@1 = {row["R@1"]:.1f} after epoch {row["epoch"]}, {rows[0]["R@1"]:.1f} before: the percentage '
              f'of {part} images whose most similar {others} shows the same class.')
    if data.query and data.name in DATASETS:                # eval.py knows no others
        evaluation = os.path.relpath(Path(__file__).with_name('eval.py'))
        print('Next:', shlex.join(['python', evaluation, '--checkpoint', str(folder)]))
    return row


def about_data(args, data):
    """What a checkpoint says about its images: the classes that were seen in training (with --fold, those of the
    validation block, too, because the epoch was selected on them), and a hash of each set, with which --resume and
    eval.py notice other images"""
    return dict(classes=data.train.classes + (data.query.classes if args.fold else []),
                hashes=[hash_of(data.train, sizes=False), hash_of(data.query), hash_of(data.gallery)])


def hash_of(images, sizes=True):
    """A hash of a set, its classes, labels and images (of files names and sizes, of vectors values); None of None. The
    pixels of images in memory are left out: those of shapes differ from CPU to CPU. A training set is hashed without
    sizes, because a damaged file, which may be read late in a run, can then be replaced before --resume."""
    if not images:
        return None
    files = [(os.path.basename(path), sizes and os.path.getsize(path)) for path in images.paths if images.are_files]
    digest = hashlib.sha256(repr((images.classes, images.labels.tolist(), files)).encode())
    if images.is_vectors:
        digest.update(images.items.numpy().tobytes())
    return digest.hexdigest()


def load_run(args, about, parts, per_epoch, total):
    """Loads the last checkpoint of a run into its parts -> its epoch, its rows, and a start time that excludes the
    interruption"""
    saved = read_checkpoint(args.resume / 'last.pt')
    if saved['hashes'] != about['hashes']:
        raise UsageError(f'the images in {args.data} are not those that {args.resume} began with; start a new run')
    if saved['step'] != min(saved['epoch'] * per_epoch, total):          # it is longer, or its last epoch is shorter
        raise UsageError(f'{args.resume} has {saved["step"]} steps done, {per_epoch} in an epoch, and cannot continue '
                         'with these --steps and --epochs; start a new run')
    for name, part in parts.items():
        part.load_state_dict(saved[name])
    return saved['epoch'], saved['rows'], time.time() - 60 * saved['minutes']


def saved_flags(args):
    """{flag: value} for a checkpoint, which cannot hold a torch.device or a Path"""
    return {name: value for name, value in vars(args).items() if name not in ('device', 'resume')}


def save_checkpoint(path, args, parts, about):
    """Writes the states of the parts of a run ({name: part}, among them the model), its script and flags, and what it
    says about its images and its progress."""
    model = parts['model']
    if broken := [name for name, value in model.state_dict().items() if not value.isfinite().all()]:
        raise UsageError(f'{broken[0]} is NaN or infinite, and {path} was not written; try a lower --lr, or '
                         '--precision fp32')
    mean, std, _ = normalization(args.arch)
    transform = dict(resize=args.resize, image_size=args.image_size, mean=mean, std=std)
    states = {name: part.state_dict() for name, part in parts.items()}
    with atomic_write(path) as file:
        torch.save(dict(script=args.script, args=saved_flags(args), transform=transform, embedder=model.config,
                        **about, **states), file)


def save_epoch(folder, args, parts, about):
    """Writes the log, last.pt and, with --fold, best.pt if no earlier epoch was as good."""
    # last.pt is last: if the process is killed before it is written, --resume repeats the epoch.
    with atomic_write(folder / 'log.jsonl') as file:
        file.write(''.join(json.dumps(row) + '\n' for row in about['rows']).encode())
    if args.fold and about['epoch'] > 0 and best_row(about['rows'])['epoch'] == about['epoch']:
        save_checkpoint(folder / 'best.pt', args, parts, about)
    save_checkpoint(folder / 'last.pt', args, parts, about)


@contextmanager
def atomic_write(path):
    """Opens a file in memory. When it is complete, it replaces `path`: a full disk or Ctrl-C leaves the old one."""
    file = io.BytesIO()         # torch.save to the disk would turn a full disk, or Ctrl-C, into other errors
    yield file
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(f'{path}.tmp').write_bytes(file.getbuffer())
    os.replace(f'{path}.tmp', path)


def read_checkpoint(path):
    """The dict that save_checkpoint wrote, from a file or a run folder (its best.pt if there is one, else its last.pt),
    or what any other file of torch contains. No code of the file is run."""
    path = Path(path)
    if path.is_dir():
        path = path / ('best.pt' if (path / 'best.pt').exists() else 'last.pt')
    return torch.load(path, map_location='cpu', weights_only=True)


def load_checkpoint(path, device='cpu', precision='auto', trunk=None):
    """A trained Embedder, ready to embed, from a file or a run folder (its best.pt if there is one, else its last.pt)

    precision        auto: fp32 if the network was trained with --precision fp32, otherwise that of pick_precision
    trunk            if the network was built with Embedder(trunk=...), such a module; a copy of it gets the weights
    model.transform  converts an image (a path, a PIL image or an array) to (3, S, S);
                     model(model.transform(image)[None]) is its embedding (1, D)
    model.saved      what the checkpoint says beside the weights, a dict: args (the training flags), classes (of the
                     training set), epoch, ...; see save_checkpoint and about_data
    """
    saved = read_checkpoint(path)
    device = pick_device(device)
    if precision == 'auto' and saved['args'].get('precision') == 'fp32':
        precision = 'fp32'
    if saved['embedder']['arch'] == 'module' and trunk is None:
        raise UsageError(f'the trunk of {path} was made in Python: common.load_checkpoint(path, trunk=module) loads it')
    model = Embedder(weights='none', trunk=copy.deepcopy(trunk), precision=pick_precision(precision, device),
                     **saved['embedder'])
    model.load_state_dict(saved['model'])
    transform = make_test_transform(**saved['transform'])
    model.transform = v2.Compose([partial(to_rgb, min_side=transform.min_side), transform])
    model.transform.min_side = transform.min_side           # so Images, which also calls to_rgb, can take it
    model.saved = {name: value for name, value in saved.items() if name not in ('model', 'optimizer', 'loss_params')}
    return model.place(device).eval()


def load_weights(trunk, arch, weights, classifier):
    """Loads a file of weights, or those of a run, into a trunk. The file has a state dict, perhaps under the key model,
    state_dict or teacher, whose names may have a prefix such as `module.`. Left out are the classifier (its name, or
    names) and layers that the trunk does not have, such as a head. All other names and shapes must fit."""
    saved = read_checkpoint(weights)
    if saved.get('embedder', {}).get('arch', arch) != arch:
        raise UsageError(f'{weights} has weights of --arch {saved["embedder"]["arch"]}, not of {arch}')
    for key in ('model', 'state_dict', 'teacher'):
        saved = saved.get(key, saved)
    wanted = trunk.state_dict()
    first = next(iter(wanted))
    # The prefix is what precedes the name of the first layer. For several networks there is none, and loading fails.
    prefix = os.path.commonprefix([name.removesuffix(first) for name in saved if f'.{name}'.endswith(f'.{first}')])
    layers = {name.split('.')[0] for name in wanted}
    found = {name.removeprefix(prefix): value for name, value in saved.items()}
    found = {name: value for name, value in found.items()
             if name.split('.')[0] in layers and not name.startswith(classifier)}
    try:
        trunk.load_state_dict(found)
    except RuntimeError as error:
        raise UsageError(f'{weights} has not the weights of --arch {arch}: {" ".join(str(error).split())[:300]}'
                         ) from error
    return trunk


# ---- 9. command line -------------------------------------------------------------------------------

# The value of a flag is decided in this order, and the later overrides the earlier:
#   1. its default in `parser`, or in get_args of the script;
#   2. the script's DEFAULTS, its training recipes: the entry of the dataset (or protocol), of the --loss, of both;
#   3. what follows from other flags, in the function `recipe`: a typed image size scales --resize, for example;
#   4. with --resume, the flags of the run;
#   5. what was typed.

# Parts of the scripts' DEFAULTS. FOLDER and VECTORS replace values of shapes: for a folder of images without pretrained
# weights, and for vectors. PROTOCOL is Section 3.1 of the Reality Check.
FOLDER = dict(image_size=64, resize=64, min_crop=0.5, epochs=10, batch_size=64, per_class=4, freeze_epochs=0,
              eval_every=1, precision='auto')
VECTORS = FOLDER | dict(arch='none', pool='avg', dim=None, freeze_bn=True, epochs=5, batch_size=100, per_class=5,
                        lr=1e-3, schedule='constant', precision='fp32')
# What the text does not state is from the released configuration; see tests/results/protocol.md.
PROTOCOL = dict(arch='resnet50', weights='imagenet', pool='avg', dim=128, freeze_bn=True,
                image_size=227, resize=256, crop_from='resized', min_crop=0.16,
                epochs=1000, batch_size=32, per_class=4,
                optimizer='rmsprop', lr=1e-6, momentum=0.9, weight_decay=1e-4, schedule='constant', freeze_epochs=0,
                clip=0.0, fold='0/4', eval_every=1)

# Flags in which runs of one recipe may differ: seed and fold, and where and how a run is computed and evaluated
RUN_FLAGS = {'seed', 'fold', 'name', 'data', 'download', 'resume', 'device', 'precision', 'compile', 'workers',
             'eval_every'}
# Flags that may change when a run is resumed
RESUMABLE = (RUN_FLAGS - {'seed', 'fold', 'name'}) | {'epochs', 'steps', 'patience'}

SWITCH = argparse.BooleanOptionalAction
OTHER = object()                            # in `uses` of parse: all values that are not named
# The `uses` of all scripts
USES = {'schedule': {'step': ['decay_epochs', 'decay_rate'], OTHER: []},
        'optimizer': {'sgd': ['momentum'], 'rmsprop': ['momentum'], OTHER: []},
        'fold': {None: [], OTHER: ['patience']}}


class Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Prints docstrings unchanged, and the default of each flag that has one."""

    def _get_help_string(self, action):
        return action.help if action.default in (None, []) else super()._get_help_string(action)


def number_or(kind, *words):
    """An argparse type: one of these words, or a number of this kind, int or float"""
    return lambda text: text if text in words else kind(text)


def parser(doc, notes='', file=None):
    """A parser with the flags of all scripts. Most flags without a default get one from the recipe.

    doc, notes  printed by --help before and after the flags
    file        a script's __file__: checkpoints and run folders are named after it. None: the first word of `doc`
    """
    file = Path(file or (doc or 'script').split()[0])
    p = argparse.ArgumentParser(prog=file.name, usage=f'python {file.name} [--help] [FLAG ...]', description=doc,
                                epilog=notes, formatter_class=Help, allow_abbrev=False)
    p.set_defaults(script=file.stem)

    add = p.add_argument_group('data').add_argument
    add('--dataset', choices=list(DATASETS), default='shapes', help='folder: your images; vectors: features of them')
    add('--data', type=os.path.expanduser, default='data', help='its folder, see README')
    add('--download', action='store_true', help='download cub or sop to --data, unless it is there')
    add('--image-size', type=int, help='side of the square crops, pixels')
    add('--resize', type=int, help='shorter side of test images before the crop, pixels; follows --image-size')
    add('--crop-from', choices=['original', 'resized'], default='original',
        help='what training crops are cut from, the original image or the resized one')
    add('--min-crop', type=float, help='minimum area of a training crop, fraction of the image')
    add('--jitter', type=float, default=0.0, help='of ColorJitter: brightness, contrast, saturation')
    add('--flip', action=SWITCH, default=True, help='flip half of the crops horizontally')

    add = p.add_argument_group('network').add_argument
    add('--arch', help='backbone: a ResNet of torchvision, such as resnet18, or timm:NAME')
    add('--weights', help='initial weights of the backbone: imagenet, none (random), a file, or a run')
    add('--pool', choices=['avg', 'max', 'avg+max'], help='pooling of the feature map')
    add('--dim', type=int, help='embedding dimension; default for vectors: their own')
    add('--freeze-bn', action=SWITCH, help='BatchNorm uses its stored statistics, and does not update them')

    add = p.add_argument_group('training').add_argument
    add('--epochs', type=int, help='passes over the training set')
    add('--steps', type=int, default=0, help='maximum number of steps (iterations); 0: no maximum')
    add('--batch-size', type=int, help='images in a batch, B')
    add('--per-class', type=int, help='images per class in a batch, K; 0: random batches')
    add('--optimizer', choices=['adamw', 'adam', 'sgd', 'rmsprop'], help='optimizer')
    add('--lr', type=float, help='learning rate')
    add('--weight-decay', type=float, help='weight decay')
    add('--momentum', type=float, default=0.0, help='sgd and rmsprop: momentum')
    add('--schedule', choices=['step', 'cosine', 'constant'],
        help='of the learning rate: step is multiplied by --decay-rate after every --decay-epochs epochs; cosine has a '
             'linear warmup of at most 100 steps, and decays to 0')
    add('--decay-epochs', type=int, default=10, help='schedule step: epochs between decays')
    add('--decay-rate', type=float, default=0.5, help='schedule step: factor of a decay')
    add('--freeze-backbone-epochs', '--freeze-epochs', '--warmup', type=int, dest='freeze_epochs', metavar='N',
        help='number of first epochs in which the backbone is frozen (not a warmup of the learning rate)')
    add('--clip', type=float, help='clip each entry of the gradients (clip_grad_value_); 0: no')

    add = p.add_argument_group('run').add_argument
    add('--seed', type=int, default=0, help='random seed')
    add('--eval-every', type=int, default=1, help='epochs between evaluations')
    add('--protocol', choices=['reality-check'], help='settings of the Reality Check, Section 3.1')
    add('--fold', metavar='I/N', help='validate on block I (from 0) of N blocks of training classes; no test set')
    add('--patience', type=int, default=10, help='with --fold: stop after so many evaluations without improvement')
    add('--name', help='folder below runs/; default: script, dataset, next free number')
    add('--resume', type=Path, metavar='RUN', help='continue the run in this folder')
    add('--compile', action=SWITCH, default=False, help='torch.compile of the backbone')
    add_machine_flags(p)
    return p


def add_machine_flags(p):
    """The flags of scripts and of eval.py that say where a network runs"""
    add = p.add_argument_group('machine').add_argument
    add('--device', default='auto', help='where to run: auto, cpu, cuda, cuda:1, mps')
    add('--precision', choices=['auto', 'bf16', 'fp32'], default='auto',
        help='precision of the backbone; fp32 allows TF32 convolutions on CUDA')
    add('--workers', type=int, help='processes that read image files; default: one per core, at most 8')


def parse(parser, DEFAULTS, argv=None, uses=None):
    """Reads the command line twice: to learn which recipe is meant, and then with that recipe as the defaults.

    DEFAULTS  a script's recipes: dicts of defaults for flags, one per dataset (or protocol); further ones under a loss
              or (dataset, loss), where a recipe also depends on the script's --loss
    uses      {flag: {its value: [flags that have an effect with it]}}, where OTHER stands for all values that are not
              named. A typed flag that only another value uses is an error, because a sweep over it would be a sweep of
              identical runs.
    Returns what was typed and what the recipe says as a namespace; device is a torch.device. With torchrun, the
    processes find each other here.
    """
    argv = sys.argv[1:] if argv is None else argv
    # What is not typed keeps the value `untyped`.
    untyped = object()
    blank = argparse.Namespace(**{action.dest: untyped for action in parser._actions})
    first = parser.parse_args([word for word in argv if word not in ('-h', '--help')], blank)
    typed = {flag: value for flag, value in vars(first).items() if value is not untyped and flag != 'script'}
    saved = saved_recipe(parser, typed) if 'resume' in typed else {}
    asked = dict(loss=parser.get_default('loss')) | saved | typed       # the script's own loss, if none is typed
    row = recipe(asked, DEFAULTS) | saved
    if unknown := row.keys() - vars(first).keys():
        raise UsageError(f'the recipe sets what is no flag of {parser.prog}: {", ".join(unknown)}')
    parser.set_defaults(**row)
    args = parser.parse_args(argv)                          # what is typed replaces the recipe
    if args.dataset == 'shapes' and 'data' in typed:
        raise UsageError('--dataset shapes is built in and has no --data; for images of your own add --dataset folder')
    if args.resize < args.image_size:
        raise UsageError(f'--resize {args.resize} is smaller than --image-size {args.image_size}, the crop of it')
    for flag, by_value in [*USES.items(), *(uses or {}).items()]:
        value = getattr(args, flag)
        values = value if isinstance(value, list) else [value]
        effective = {name for each in values for name in by_value.get(each, by_value.get(OTHER, []))}
        if unused := typed.keys() & {name for names in by_value.values() for name in names} - effective:
            raise UsageError(f'--{min(unused).replace("_", "-")} has no effect with --{flag} {value}')
    args.device = pick_device(args.device)
    init_distributed(args.device)
    return args


def recipe(asked, DEFAULTS):
    """The defaults that follow from the flags {flag: value} that were asked for"""
    dataset = asked.get('dataset', 'shapes')
    if dataset == 'folder' and asked.get('weights', 'none') != 'none':      # it is like CUB: fine-tuning on photographs
        dataset = 'cub'
    name, loss = asked.get('protocol') or dataset, asked.get('loss')
    row = {}
    for key in (name, loss, (name, loss)):                  # the later overrides the earlier
        row = row | DEFAULTS.get(key, {})
    image_size = asked.get('image_size') or normalization(asked.get('arch', ''))[2]     # typed, or of a network of timm
    if image_size:
        row |= dict(image_size=image_size, resize=round(image_size * row['resize'] / row['image_size']))
    if asked.get('weights') == 'none':                      # random weights cannot learn with frozen statistics
        row |= dict(freeze_bn=False)
    if 'fold' in asked:
        row |= dict(eval_every=1)
    return row


def saved_recipe(parser, typed):
    """The flags of the run to resume, a dict. Raises UsageError if it is not a run of this script, or if a flag was
    typed that may not change."""
    run = typed['resume']
    saved = read_checkpoint(run / 'last.pt')
    if saved['script'] != parser.get_default('script'):
        raise UsageError(f'{run} was made by {saved["script"]}.py, not by {parser.prog}')
    saved = saved['args']
    # The learning rates of a cosine depend on the length.
    may_change = RESUMABLE - {'epochs', 'steps'} if saved['schedule'] == 'cosine' else RESUMABLE
    if fixed := {flag for flag, value in typed.items() if saved.get(flag) != value} - may_change:
        raise UsageError(f'{run} was made with another --{min(fixed).replace("_", "-")}; start a new run')
    return saved | dict(download=False)


def require_pairs(args):
    """Raises UsageError if batches have no positive pairs, or no negative ones, for a loss over pairs."""
    if args.per_class == 1 or args.per_class and args.batch_size // args.per_class < 2:
        raise UsageError(f'--batch-size {args.batch_size} with --per-class {args.per_class}: this loss compares images '
                         'of one class, and classes, and needs two of each in a batch')


# ---- 10. helpers of losses, devices, randomness and processes --------------------------------------


def at_least_float32(t):
    """Raises half precision to float32: exp() overflows float16 above 11, and bfloat16 has two to three digits. Other
    types are not changed."""
    return t.to(torch.promote_types(t.dtype, torch.float32))


def loss(function):
    """A decorator for losses: half precision among the arguments becomes float32, and autocast is off inside."""
    def raised(value):
        return at_least_float32(value) if torch.is_tensor(value) and value.is_floating_point() else value

    @wraps(function)
    def wrapped(*args, **kwargs):
        devices = [value.device.type for value in (*args, *kwargs.values()) if torch.is_tensor(value)]
        with torch.autocast(devices[0], enabled=False):
            return function(*map(raised, args), **{name: raised(value) for name, value in kwargs.items()})
    return wrapped


def check_labels(y, B, C=None):
    """The class labels of B embeddings as int64, (B,). Raises UsageError if they are not B integers or, in a loss with
    one vector per class, not from 0 to C - 1. Other labels would give another number: a column (B, 1) is compared with
    every label, uint8 selects like a mask, and a label without a vector is ignored. On a GPU of CUDA the range is an
    assertion that runs there, because the CPU would have to wait for it."""
    if y.shape != (B,) or y.is_floating_point():
        raise UsageError(f'labels of {B} embeddings are {B} integers, and these are {y.dtype} {tuple(y.shape)}')
    y = y.long()
    if C is not None:
        text = f'with {C} classes, labels are from 0 to {C - 1}'
        in_range = ((y >= 0) & (y < C)).all()
        if y.device.type not in ('cpu', 'mps'):             # the GPU of a Mac has no such assertion
            torch._assert_async(in_range, text)
        elif not in_range:
            raise UsageError(f'{text}, and these are from {y.min()} to {y.max()}')
    return y


def to_device(t, device):
    """A tensor on a torch.device. On CUDA the CPU does not wait for the copy. On the GPU of a Mac it has to: there the
    source may be released before it is read, which gives other values without an error (torch issue 189690)."""
    return t.to(device, non_blocking=device.type == 'cuda')


def pick_device(name):
    """auto is a GPU if there is one. With torchrun each process gets its own. -> torch.device"""
    name = str(name)                                        # perhaps of a torch.device
    if name == 'auto':
        name = 'cuda' if torch.cuda.is_available() else 'mps' if torch.backends.mps.is_available() else 'cpu'
    if name == 'cuda':
        name = f'cuda:{os.environ.get("LOCAL_RANK", 0)}'
    try:
        if name.startswith('cuda'):
            torch.cuda.set_device(name)     # before any tensor, or each process would take memory on the first GPU
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:         # the second: torch was built without CUDA
        raise UsageError(f'--device {name} cannot be used here: {str(error).splitlines()[0]}') from error


def pick_precision(name, device):
    """auto is bfloat16 if the hardware multiplies it: GPUs since Ampere, CPUs with AVX512-BF16."""
    if name != 'auto':
        return name
    supported = dict(cuda=lambda: torch.cuda.is_bf16_supported(including_emulation=False),
                     cpu=getattr(torch.cpu, '_is_avx512_bf16_supported', lambda: False))    # private; it may go
    return 'bf16' if device.type in supported and supported[device.type]() else 'fp32'


# All randomness of a run follows from its seed: the order of an epoch from (seed, EPOCH, epoch), what a step function
# samples from (seed, STEP, step), and the augmentation of an image from (seed, CROP, step, position in the batch).
EPOCH, STEP, CROP = 1, 2, 3


def set_seed(*seeds, seed_torch=torch.manual_seed):
    """Seeds the random generators of Python, numpy and torch with a function of these integers."""
    seed = int(np.random.SeedSequence(seeds).generate_state(1, np.uint64)[0])
    random.seed(seed)
    np.random.seed(seed % 2 ** 32)
    seed_torch(seed)


# `torchrun --nproc-per-node 4 SCRIPT FLAGS` starts a script four times, once for each GPU. It was tested with two
# processes on a CPU, which need --freeze-bn. Each process loads a part of each batch, and the parts are gathered. Each
# runs the trunk on its part, or on all images if they cannot be divided evenly, as with a varying number of mixed
# images. The feature maps are gathered, and every process computes the loss of the whole batch. So the scripts need no
# code for several processes. The main process, of rank 0, prints and writes.


def world_size():
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


def rank():
    return distributed.get_rank() if world_size() > 1 else 0


def init_distributed(device):
    """With torchrun, finds the other processes. If one dies, torchrun ends the others."""
    # torchrun sets both variables; a cluster may set the second alone.
    several = 'TORCHELASTIC_RUN_ID' in os.environ and int(os.environ['WORLD_SIZE']) > 1
    if several and not distributed.is_initialized():
        options = dict(backend='nccl', device_id=device) if device.type == 'cuda' else dict(backend='gloo')
        distributed.init_process_group(timeout=timedelta(minutes=30), **options)
        if rank():
            sys.stdout = open(os.devnull, 'w')


def from_rank0(function, *args):
    """What a function returns in the main process, which alone calls it. The others wait."""
    box = [None if rank() else function(*args)]
    if world_size() > 1:
        distributed.broadcast_object_list(box)
    return box[0]


def own_positions(number, repeat_last=False):
    """Which of `number` images are those of this process. All processes have equally many: if the number cannot be
    divided, the last image is repeated, or UsageError is raised."""
    size = math.ceil(number / world_size())
    if number % world_size() and not repeat_last:
        raise UsageError(f'{world_size()} processes cannot divide a batch of {number} images evenly: change '
                         '--batch-size')
    return [min(i, number - 1) for i in range(rank() * size, (rank() + 1) * size)]


def own_share(x):
    """The images of a batch on which this process runs the trunk. In training these are a part, if the batch can be
    divided evenly. Otherwise they are all, as in embed, where each process has images of its own."""
    if world_size() == 1 or not torch.is_grad_enabled() or len(x) % world_size():
        return x
    return x.chunk(world_size())[rank()]


def gather(part):
    """Concatenates the equal parts of all processes, with gradients:  (B / world size, ...) -> (B, ...)"""
    if world_size() == 1:
        return part
    # torch.distributed.nn.functional.all_gather is deprecated, and its gradient is wrong for channels_last.
    part = part.contiguous()
    parts = [torch.empty_like(part) for _ in range(world_size())]
    distributed.all_gather(parts, part.detach())
    parts[rank()] = part
    if part.requires_grad:      # only this process has this gradient, and average_gradients divides by all processes
        part.register_hook(lambda grad: grad * world_size())
    return torch.cat(parts)


def average_gradients(weights):
    if world_size() > 1:
        for weight in weights:
            if weight.grad is not None:
                distributed.all_reduce(weight.grad)
                weight.grad /= world_size()


# ---- 11. errors ------------------------------------------------------------------------------------


class UsageError(ValueError):
    """A usage error. The message says in one line what is wrong, where, and what to do."""


def warn(text):
    if not rank():
        print(f'warning: {text}', file=sys.stderr)


def cli(main):
    """Runs a script from the shell. A usage error or an error of the system ends in one line and exit code 2, Ctrl-C in
    exit code 130. Anything else keeps its traceback."""
    torch.set_float32_matmul_precision('highest')           # no TF32 in heads, losses and retrieval: it errs by 1e-3
    torch.backends.cudnn.benchmark = True                   # on CUDA; the batches of training have one shape
    try:
        main()
        if world_size() > 1:
            distributed.destroy_process_group()
    except KeyboardInterrupt:
        sys.exit(130)
    except (UsageError, OSError) as error:
        # An error in a process that reads images comes with its traceback, which is left out.
        print('error:', str(error).rpartition('common.UsageError: ')[2].strip(), file=sys.stderr)
        sys.exit(2)
