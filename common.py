"""common.py -- the code that all methods use: network, batches, training loop and evaluation.

Everything that is specific to a method is in its train_*.py. Sections 1 to 4 are worth reading next to any script:

    1. network        Embedder: backbone (trunk), pooling, linear head
    2. batches        which images are in a batch
    3. training       optimizer, learning rate, the loop; the training step is in train_epoch
    4. evaluation     Recall@K, R-precision, MAP@R

The others can be skipped:

    5. images         a torch Dataset with two transforms
    6. shapes         the built-in dataset
    7. datasets       which images are for training and which for the test
    8. runs           logs, checkpoints, files of weights, and what is printed
    9. command line   flags, and how recipes become their defaults
   10. devices, processes and randomness
   11. errors

The Reality Check is a paper (Musgrave et al., A Metric Learning Reality Check, ECCV 2020). Its metrics are in section
4, its protocol is in section 9.

All files write shapes with these letters. Each script explains its further symbols in a table.

    B  images in a batch      P  classes in a P x K batch         x  images (B, 3, S, S)
    C  classes                K  images per class in a batch      f  feature maps (B, c, h, w)
    D  embedding dimension    S  side of a crop, in pixels        z  L2-normalized embeddings (B, D)
    N  images in a set        G  images in a gallery              y  class labels (B,);  s  similarities
    c  channels of features   R  matches of a query               (In Recall@K, K is the number of nearest images.)

Every loss of the scripts has the decorator `loss` (section 10). Inside such a loss, floating-point arguments have at
least float32, autocast is off, and labels y of embeddings z have been checked. With torchrun, several processes share
the work: own_positions, own_share, gather, average_gradients and from_rank0 (section 10) divide it and collect the
results. With one process they change nothing.
"""
import argparse
import copy
import hashlib
import inspect
import itertools
import json
import math
import os
import random
import re
import shlex
import sys
import time
import unicodedata
import zipfile
from collections import Counter, OrderedDict
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from functools import partial, reduce, wraps
from numbers import Integral
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
import torch.nn.functional as F
import torchvision
from PIL import Image, ImageOps
from torch import distributed, nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Sampler
from torchvision.transforms import v2

# ---- 1. network ------------------------------------------------------------------------------------


class Embedder(nn.Module):
    """The network of every script: backbone (trunk) -> pooling -> linear head -> L2 normalization.

    arch         trunk: a classifier of torchvision (resnet50, vit_b_16, ...) or timm:NAME, without its last layers; or
                 none, for --dataset vectors, which are precomputed features. On resnet50_v1 see make_trunk
    dim          D, embedding dimension; None: as many as the trunk returns
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
        for value, allowed in ((pool, ('avg', 'max', 'avg+max')), (precision, ('bf16', 'fp32')),
                               (head_init, ('kaiming', 'default', 'identity'))):
            if value not in allowed:
                raise UsageError(f'{value!r} is not one of {", ".join(allowed)}')
        self.trunk = make_trunk(arch, weights, input_shape[-1]) if trunk is None else trunk
        self.pool = pool
        self.normalize = normalize
        self.precision = precision
        batchnorm = [m for m in self.trunk.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
        self.frozen_bn = batchnorm if freeze_bn else []
        c = self.count_channels(input_shape)
        self.dim = int(dim or c)
        self.norm = nn.LayerNorm(c, elementwise_affine=False) if layer_norm else nn.Identity()
        self.linear = nn.Linear(c, self.dim)
        initialise(self.linear, head_init)
        # A checkpoint contains this dict, from which the network can be built again.
        self.config = dict(arch=arch if trunk is None else 'module', dim=self.dim, pool=pool, freeze_bn=freeze_bn,
                           layer_norm=layer_norm, normalize=normalize, input_shape=tuple(input_shape))
        self.train()                        # all but frozen BatchNorm, see below

    @torch.no_grad()
    def count_channels(self, input_shape):
        """c, found by a forward pass of two blank inputs in evaluation mode. A pass in training mode comes before it:
        networks that need larger images there, or return several tensors, should fail here, not in the first step.
        Buffers and the state of the random generator are restored."""
        device = next(self.trunk.parameters(), torch.empty(0)).device       # a trunk for vectors has no parameters
        x = torch.zeros(2, *input_shape, device=device)
        buffers = [buffer.clone() for buffer in self.trunk.buffers()]
        try:
            with torch.random.fork_rng(devices=[]):
                self.train()
                self.features(x)
                self.trunk.eval()
                return self.features(x).shape[1]
        except UsageError:                                  # a ValueError, which the next line would catch
            raise
        except (RuntimeError, AssertionError, ValueError) as error:     # every network has errors of its own
            raise UsageError(f'the network takes no input of shape {tuple(input_shape)}: {error}; try another '
                             '--image-size or --arch') from error
        finally:
            for buffer, before in zip(self.trunk.buffers(), buffers):
                buffer.copy_(before)

    def place(self, device):
        """Moves the network to a device, in the memory format whose convolutions are fast there. Returns itself."""
        self.to(device)
        kind = self.linear.weight.device.type
        if kind == 'cpu' or (kind == 'cuda' and self.precision == 'bf16'):      # faster there; on a Mac see section 10
            self.trunk.to(memory_format=torch.channels_last)             # convolutions return it, if weights have it
        return self

    def train(self, mode=True):
        super().train(mode)
        for module in self.frozen_bn:       # in training mode their statistics would follow the batches
            module.eval()
        return self

    def features(self, x):
        """Images (B, 3, S, S) or vectors (B, c) -> features (B, c, h, w). Of the networks that make_trunk makes, only
        those that end in avgpool and fc, such as a ResNet, have h, w > 1."""
        share = own_share(x)                                # (B, 3, S, S), with torchrun a part of them
        dtype = next(self.trunk.parameters(), x).dtype      # not float32 after .half() or .bfloat16()
        if x.is_floating_point():       # uint8 images are not normalized: the trunk rejects them
            share = share.to(dtype)
        bf16 = self.precision == 'bf16' and dtype == torch.float32
        with torch.autocast(x.device.type, torch.bfloat16, enabled=bf16):
            f = self.trunk(share)
        if not torch.is_tensor(f) or f.ndim not in (2, 4):
            raise UsageError('the trunk must return one tensor (B, c) or (B, c, h, w), and returned '
                             f'{type(f).__name__} {tuple(getattr(f, "shape", ()))}: use another --arch')
        if f.ndim == 2:
            f = f[:, :, None, None]                         # (B, c, 1, 1)
        return f if len(f) == len(x) else gather(at_least_float32(f))    # (B, c, h, w); shares are gathered

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
        if p.shape[1] != self.linear.in_features:
            raise UsageError(f'the head takes {self.linear.in_features} features, and got {p.shape[1]}: it was built '
                             'for inputs of another shape')
        p = self.norm(p).to(next(self.linear.parameters(), p).dtype)    # not float32 after .half() or .double()
        z = at_least_float32(self.linear(p))
        return F.normalize(z, dim=1) if self.normalize else z

    def head(self, f):
        """Feature map (B, c, h, w) -> embeddings (B, D): pooling, LayerNorm if there is one, linear head, L2 norm"""
        return self.project(self.pool_features(f))

    def forward(self, x):
        return self.head(self.features(x))


class Rescale(nn.Module):
    """The trunk for vectors, which are features already: it divides them by their mean L2 norm in the training set. The
    function build sets this number."""

    def __init__(self):
        super().__init__()
        self.register_buffer('mean_norm', torch.ones(()))

    def forward(self, x):
        return x / self.mean_norm


def make_trunk(arch, weights='none', image_size=224):
    """A classifier without its last layers. Networks that end in avgpool and fc, such as a ResNet, lose both and return
    feature maps (B, c, h, w). All others lose only their last linear layer, and return (B, c). A network of timm with a
    fixed input size is made for `image_size`. In resnet50_v1 the first 1x1 convolution of a stage has stride 2, as in
    He et al. (2015) and in weights from Caffe and Keras; in torchvision's resnet50 it is the 3x3 convolution."""
    if arch == 'none':
        return Rescale()
    if arch.startswith('timm:'):
        timm, name, config = timm_model(arch)
        size = dict(img_size=image_size) if getattr(config, 'fixed_input_size', False) else {}
        with errors_explained(arch, weights):
            trunk = timm.create_model(name, pretrained=weights == 'imagenet', num_classes=0, **size)
        return load_weights(trunk, weights, config.classifier)
    name = arch.removesuffix('_v1')
    if name not in torchvision.models.list_models(module=torchvision.models):
        raise UsageError(f'--arch {arch} is neither a classifier of torchvision, such as resnet50, swin_t or vit_b_16, '
                         'nor timm:NAME')
    with errors_explained(arch, weights):
        if arch != name and weights == 'imagenet':
            raise ValueError(f'torchvision has weights of {name} only')
        network = torchvision.models.get_model(name, weights='IMAGENET1K_V1' if weights == 'imagenet' else None)
        if arch != name:
            for stage in (network.layer2, network.layer3, network.layer4):
                stage[0].conv1.stride, stage[0].conv2.stride = (2, 2), (1, 1)
    linear = [name for name, layer in network.named_modules() if isinstance(layer, nn.Linear)]
    if not linear:
        raise UsageError(f'--arch {arch} has no linear classifier that could be cut off')
    classifier = linear[-1]
    *body, (pooling, _), (last, _) = network.named_children()           # (name, layer) of each layer
    if (pooling, last) == ('avgpool', 'fc'):
        network = nn.Sequential(OrderedDict(body))
    else:
        network.set_submodule(classifier, nn.Identity())
    return load_weights(network, weights, classifier)


def initialise(linear, head_init):
    """Initializes the head of an Embedder, which explains head_init."""
    if head_init == 'default':
        return
    nn.init.zeros_(linear.bias)
    if head_init == 'identity':
        nn.init.eye_(linear.weight)
    else:
        nn.init.kaiming_normal_(linear.weight, mode='fan_out')


# ---- 2. batches ------------------------------------------------------------------------------------


class BalancedSampler(Sampler):
    """Batches of P classes x K images, class by class, as lists of indices.

    labels      (N,) class of each image
    batch_size  P times K. If there are fewer than P classes, a batch has all of them and is smaller.
    per_class   K
    generator   torch.Generator; None is torch's global one

    An epoch has N // B batches, at least one. The P classes of a batch are different, and so are its images, unless a
    class has fewer than K. Classes are taken from a random order of all classes. If fewer than P are left in it, the
    next batch begins with them, and goes on with the others in a new order. So all occur about equally often. The same
    holds for the images of a class.
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
            warn(f'{single} of {len(self.members)} training classes have one image only: the sampler repeats it')

    def __len__(self):
        return self.batches

    def __iter__(self):
        def take(queue, items, number):
            """Removes and returns the first `number` items of a queue. While it is too short, the items that are not in
            it are appended in random order, or all items if none is missing."""
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
    seed its augmentation. So methods with the same seed and kind of batches see the same batches and crops. The number
    of workers and processes, and --resume, do not affect them. EPOCH and CROP are constants of section 10.

    sampler  yields lists of indices of equal length; its random order comes from torch's global generator
    """

    def __init__(self, sampler, seed):
        self.sampler = sampler
        self.seed = seed
        self.steps = range(0)
        self.batches = []

    def start(self, epoch, steps):
        """Samples one batch for each step in the range `steps`."""
        self.steps = steps
        with seeded(self.seed, EPOCH, epoch):
            self.batches = [list(map(int, indices)) for indices in itertools.islice(self.sampler, len(steps))]
        if len(self.batches) < len(steps):
            raise UsageError(f'the sampler yields {len(self.batches)} batches, and its length is {len(self)}')

    def without_positive(self, labels):
        """The fraction of the images whose batch has no other image of their class"""
        labels = labels.tolist()
        number = 0
        for indices in self.batches:
            images = Counter(labels[i] for i in set(indices))            # different images of each class
            number += sum(images[labels[i]] == 1 for i in indices)
        return number / sum(map(len, self.batches))

    def __len__(self):
        return len(self.sampler)

    def __iter__(self):
        for step, indices in zip(self.steps, self.batches):
            # Images takes such a tuple as an index: that of the image, and the seed of its augmentation
            yield [(indices[position], self.seed, CROP, step, position) for position in own_positions(len(indices))]


def make_sampler(args, labels):
    """Batches of P x K images. With --per-class 0, all images in random order; an incomplete last batch is dropped."""
    if args.per_class:
        return BalancedSampler(labels, args.batch_size, args.per_class)
    return BatchSampler(RandomSampler(labels), min(args.batch_size, len(labels)), drop_last=True)


def make_loader(images, batch_sampler, device):
    """A DataLoader. Image files are read by one worker process per core, but at most one per 128 files. Images in
    memory and vectors need none."""
    workers = images.workers if images.are_files else 0
    if workers is None:
        workers = min(own_cores(), len(images) // 128)
    # Without a generator of its own, a DataLoader draws a number from torch's global one, and so changes it.
    return DataLoader(images, batch_sampler=batch_sampler, num_workers=workers, persistent_workers=workers > 0,
                      pin_memory=device.type == 'cuda', generator=torch.Generator())


# ---- 3. training -----------------------------------------------------------------------------------


def learning_rate_factor(t, args, per_epoch, total):
    """Multiplier of all learning rates at step t, from 0 to total - 1, by --schedule

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
    if args.optimizer != 'rmsprop':                         # torch has no fused RMSprop
        options['fused'] = args.device.type in ('cpu', 'cuda')
    return kinds[args.optimizer](groups, lr=args.lr, weight_decay=args.weight_decay, **options)


def write_log(folder, row, rows):
    """Writes the rows of all evaluated epochs to log.jsonl. To log elsewhere, pass train a function log(folder, row,
    rows) of your own; `row`, unused here, is that of the epoch that just ended, evaluated or not."""
    with atomic_write(folder / 'log.jsonl') as file:
        file.write(''.join(json.dumps(evaluated) + '\n' for evaluated in rows).encode())


def train(args, model, data, step, optimizer, loss_params=None, sampler=None, log=write_log):
    """Trains (in train_epoch), evaluates, logs and saves. Returns the last row of the log, or the best with --fold.

    step         step(images, labels) -> scalar loss, the part of the loop that a method defines. It gets the whole
                 batch on the device: images (B, 3, S, S), augmented and normalized, or vectors (B, c), and labels (B,).
                 The backward pass runs after step returns, so step must not change in place a tensor that it needs.
    optimizer    over the weights of the model and the learnable parameters of the loss
    loss_params  {name: parameter or module}: learnable parameters of the loss, saved in the checkpoint
    sampler      yields lists of indices of equal length; None: from --batch-size and --per-class
    log          log(folder, row, rows) is called after each epoch, with its row and the rows of all evaluated epochs
    """
    sampler = sampler or make_sampler(args, data.train.labels)
    loader = make_loader(data.train, StepBatches(sampler, args.seed), args.device)
    per_epoch = len(sampler)
    total = min(args.epochs * per_epoch, args.steps or math.inf)         # steps of the whole run
    epochs = math.ceil(total / per_epoch)
    states = dict(optimizer=optimizer, loss_params=nn.ParameterDict(loss_params or {}))
    about = about_data(args, data)
    if args.resume:
        folder = args.resume
        done, rows, start = load_run(args, about, model, states, per_epoch, total)
    else:
        folder = from_rank0(new_folder, args, data)
        done, rows, start = -1, [], time.time()             # not even epoch 0 is done
    print_recipe(args, model, data, sampler, epochs, folder)
    for epoch in range(done + 1, epochs + 1):               # epoch 0 is the evaluation before training
        if should_stop_early(args, rows):
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
        row = from_rank0(dict, row)                         # with torchrun, the row of the main process
        if 'R@1' in row or not data.query:                  # evaluated, or there is no test set
            rows.append(row)
        if rank() == 0:
            about |= dict(epoch=epoch, step=min(epoch * per_epoch, total), rows=rows, minutes=row['minutes'])
            save_epoch(folder, args, model, states, about)
            log(folder, *copy.deepcopy((row, rows)))        # copies, because log may change them
        show_row(row)                                       # last, because printing may fail
    return summary(args, data, folder, rows)


@contextmanager
def frozen(module):
    """Inside `with`, the weights of a module are not trained. After it, also after Ctrl-C, they are as before: a user
    may have frozen some of them."""
    trainable = [weight for weight in module.parameters() if weight.requires_grad]
    try:
        for weight in trainable:
            weight.requires_grad_(False)
        yield
    finally:
        for weight in trainable:
            weight.requires_grad_(True)


def train_epoch(args, loader, step, optimizer, epoch, steps, total):
    """Trains for `steps`, a range of the `total` steps of the run. Returns a part of the row: loss, images_per_second,
    and no_positive, the fraction of the images whose batch has no other image of their class."""
    weights = [weight for group in optimizer.param_groups for weight in group['params']]
    batches = loader.batch_sampler
    batches.start(epoch, steps)
    losses = []
    start = time.time()
    # `t` counts the steps of the whole run, from 0; `number` counts those of this epoch, from 1.
    for number, (batch, t) in enumerate(zip(loader, steps), start=1):
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
        if number % 20 == 0 or number == len(steps):        # only every 20 steps, because .item() waits for the GPU
            mean = torch.stack(losses).mean().item()        # of the epoch so far
            if not math.isfinite(mean):
                raise UsageError(f'the loss is {mean} at epoch {epoch}, step {number} of {len(steps)} or in the 19 '
                                 'before; try a lower --lr, or --precision fp32')
            left = (time.time() - start) / number * (total - t - 1) / 60
            show_progress(f'epoch {epoch:<3d}  loss {mean:<6.4g}  step {number} of {len(steps)}, {left:.1f} min left')
    return dict(loss=mean, no_positive=batches.without_positive(loader.dataset.labels),
                images_per_second=number * len(y) / (time.time() - start))


# ---- 4. evaluation ---------------------------------------------------------------------------------


@torch.no_grad()
@torch.compiler.set_stance('force_eager')                   # --compile is for training only
def embed(model, images, batch_size=128):
    """Embeddings of a whole set, with its test transform -> (N, D) float32 on the CPU, in the order of the images.
    `model` is any module with weights that turns images (B, 3, S, S) into (B, D)."""
    weight = next(model.parameters())
    training = {module: module.training for module in model.modules()}     # a user may have frozen some BatchNorm
    indices = own_positions(len(images), repeat_last=True)               # with torchrun, equally many each
    loader = make_loader(images, BatchSampler(indices, batch_size, drop_last=False), weight.device)
    try:
        model.eval()
        z = torch.cat([model(x.to(weight)).float() for x, _ in loader])     # on its device, in its precision
    finally:
        for module, mode in training.items():
            module.training = mode
    return gather(z)[:len(images)].cpu()


def k_nearest(query, gallery, k):
    """Exact search. For b queries at a time, yields their indices (b,), and the cosines and indices of their k nearest
    images of the gallery, both (b, k). Equal cosines, after rounding, are in a fixed random order of the gallery.

    query    (N, D)
    gallery  (G, D), with k <= G; or None: the queries are also the gallery, and each is excluded from its own results,
             with k <= N - 1
    """
    within = gallery is None                                             # the queries are also the gallery
    query = F.normalize(query.float(), dim=1)
    gallery = query if within else F.normalize(gallery.float(), dim=1)
    # The gallery is shuffled, because its images are sorted by class: the first of equally similar ones would all be of
    # one class.
    order = torch.randperm(len(gallery), generator=torch.Generator().manual_seed(0)).to(query.device)
    position = order.argsort()                                           # (G,) where each image is after the shuffle
    gallery = gallery[order]
    # Of equal cosines, topk returns any. So slightly more is subtracted from each later image, and the first one wins.
    # In float64, because these amounts are below the rounding error of a cosine in float32.
    tie_break = torch.arange(len(gallery), dtype=torch.float64, device=query.device) * 2 ** -50
    b = max(1, min(4096, 2 ** 25 // len(gallery)))                       # (b, G) in float64 takes 256 MiB at most
    for rows in torch.arange(len(query), device=query.device).split(b):
        with torch.autocast(query.device.type, enabled=False):
            s = query[rows] @ gallery.T                                  # (b, G)
        if within:
            s.scatter_(1, position[rows, None], -math.inf)               # each query itself
        found = s.double().sub_(tie_break).topk(k, dim=1).indices        # (b, k)
        yield rows, s.gather(1, found), order[found]


@torch.no_grad()
def retrieval_metrics(query, query_labels, gallery=None, gallery_labels=None, ks=(1, 2, 4, 8),
                      search=k_nearest):
    """Recall@K, R-precision and MAP@R, with the cosine similarity.

    query    (N, D), query_labels (N,);  without a gallery, the queries are also the gallery
    gallery  (G, D), gallery_labels (G,)
    search   a function like k_nearest, such as an approximate index or a re-ranking; index -1: nothing found
    returns  {'R@1': ..., 'RP': ..., 'MAP@R': ...} in percent; with 'unmatched', a count, if it is not 0: see rule 3
    raises   UsageError if there are no queries or no gallery, an embedding is NaN or infinite, or shapes do not agree

    A match of a query is another image of its class; R is the number of its matches in the gallery.
    R@K    percentage of the queries that have a match among their K nearest, for each K of `ks`
    RP     percentage of matches among the R nearest, averaged over the queries
    MAP@R  mean of P(i) over the R nearest, averaged over the queries. P(i) is the precision among the first i
           if the i-th is a match, and else 0: Reality Check Eq. (3) and (4)

    1. A query is excluded from its own results by its index, because the first result may be a duplicate of it.
    2. Among equal similarities, a fixed random order of the gallery decides. So collapsed embeddings, which are all
       equal, score about chance, not 100, and R@1 does not depend on the other `ks`.
    3. A query without a match is a miss in R@K and counts as 'unmatched'. RP and MAP@R are means over the other
       queries, 0 if there are none.
    """
    within = gallery is None                                             # the queries are also the gallery
    if within:
        gallery, gallery_labels = query, query_labels
    if not (np.iterable(ks) and len(ks) and all(isinstance(k, Integral) and k > 0 for k in ks)):
        raise UsageError(f'ks are the K of Recall@K, such as (1, 2, 4, 8), and not {ks!r}')
    check_embeddings(query, query_labels, gallery, gallery_labels)
    if query.device.type == 'mps':                                       # the GPU of a Mac has no float64
        query, gallery = query.cpu(), gallery.cpu()
    # Labels may be any integers; numbered anew, they can be counted.
    _, labels = torch.cat([query_labels.cpu().long(), gallery_labels.cpu().long()]).unique(return_inverse=True)
    query_labels, gallery_labels = labels.to(query.device).tensor_split([len(query)])
    present = torch.bincount(gallery_labels, minlength=int(labels.max()) + 1)           # (C,) images of each class
    own = int(within)                                                    # a query is not a match of itself
    matches = present[query_labels] - own                                # (N,) R of each query
    depth = int(min(max(*ks, int(matches.max())), len(gallery) - own))   # K for R@K, R for RP and MAP@R
    found = Counter()                                                    # {k: queries with a match among the k nearest}
    rps, maps = [], []                                                   # RP and MAP@R of the queries with a match
    for rows, _, index in search(query, None if within else gallery, depth):            # b queries at a time
        if within and (index == rows[:, None]).any():
            raise UsageError('search has to exclude each query from its own results')
        hit = (gallery_labels[index] == query_labels[rows, None]) & (index >= 0)        # (b, depth)
        for k in {*ks}:
            found[k] += int(hit[:, :k].any(dim=1).sum())
        matched = matches[rows] > 0                                      # (b,) rule 3
        rp, map_at_r = precisions(hit[matched], matches[rows][matched])
        rps += rp.tolist()
        maps += map_at_r.tolist()
    metrics = {f'R@{k}': 100 * found[k] / len(query) for k in ks}
    metrics['RP'] = 100 * sum(rps) / max(1, len(rps))
    metrics['MAP@R'] = 100 * sum(maps) / max(1, len(maps))
    if len(maps) < len(query):
        metrics['unmatched'] = len(query) - len(maps)
    return metrics


def check_embeddings(query, query_labels, gallery, gallery_labels):
    """Raises UsageError if there are no queries or no gallery, an embedding is NaN or infinite, or shapes differ."""
    for z, labels in ((query, query_labels), (gallery, gallery_labels)):
        if not (torch.is_tensor(z) and torch.is_tensor(labels) and z.ndim == 2 and labels.shape == z.shape[:1]
                and not labels.is_floating_point()):
            raise UsageError('retrieval needs tensors (torch.as_tensor): embeddings (N, D), and N integers as labels; '
                             f'these are {np.shape(z)} and {np.shape(labels)}, {getattr(labels, "dtype", "no tensor")}')
        if not z.isfinite().all():
            raise UsageError('some embeddings are NaN or infinite; in training, a lower --lr may help')
    if len(query) == 0 or len(gallery) == 0:
        raise UsageError(f'nothing to retrieve: {len(query)} queries, a gallery of {len(gallery)} images')
    if query.shape[1] != gallery.shape[1]:
        raise UsageError(f'queries {tuple(query.shape)} and gallery {tuple(gallery.shape)} differ in dimension')


def precisions(hit, r):
    """RP and MAP@R of each query, from 0 to 1.  hit (b, k), the nearest first; r (b,) its R, >= 1 -> (b,), (b,)"""
    i = torch.arange(1, hit.shape[1] + 1, device=hit.device)             # the i of P(i)
    hit = hit & (i <= r[:, None])                                        # among the R nearest
    p = hit.cumsum(dim=1) / i * hit                                      # Reality Check Eq. (4)
    return hit.sum(dim=1) / r, p.sum(dim=1) / r                          # the second is Reality Check Eq. (3)


def mean_similarities(z, y):
    """Mean cosine similarity of all positive and of all negative pairs, or None if there are none; z (N, D), y (N,)"""
    z = F.normalize(z.double(), dim=1)
    counts = torch.bincount(y)                                           # (C,) images of each class
    sums = z.new_zeros(len(counts), z.shape[1]).index_add_(0, y, z)      # (C, D)
    # The squared norm of a sum of unit vectors is the sum of the cosines of all their ordered pairs. The sums of the
    # classes give the positive pairs, the sum of the set gives all. Both include N pairs of an image with itself, which
    # are subtracted. Their cosine is 1, or 0 if an embedding is 0.
    own_sum = z.square().sum().item()
    positive_sum = sums.square().sum().item() - own_sum
    positives = counts.square().sum().item() - len(z)
    negative_sum = z.sum(dim=0).square().sum().item() - own_sum - positive_sum
    negatives = len(z) ** 2 - len(z) - positives
    return positive_sum / positives if positives else None, negative_sum / negatives if negatives else None


def embed_test(model, data):
    """Embeddings of the queries (N, D), and of the gallery (G, D) or None where the queries are the gallery"""
    device = next(model.parameters()).device
    where = device if device.type == 'cuda' else 'cpu'                   # where k_nearest runs
    z = embed(model, data.query).to(where)
    gallery = None if data.gallery is data.query else embed(model, data.gallery).to(where)
    return z, gallery


def score(data, z, gallery=None):
    """The metrics of a test set from the embeddings of embed_test, with s+ and s-, the mean cosine similarities of the
    positive and of the negative pairs of queries (left out if there are no such pairs)"""
    metrics = retrieval_metrics(z, data.query.labels, gallery, data.gallery.labels, data.ks)
    for key, value in zip(('s+', 's-'), mean_similarities(z, data.query.labels.to(z.device))):
        if value is not None:
            metrics[key] = value
    return metrics


def num_matches(data):
    """R of each query of a test set, (N,): its matches in the gallery, where a query is not a match of itself"""
    present = torch.bincount(data.gallery.labels, minlength=data.query.num_classes)     # (C,) images of each class
    return present[data.query.labels] - int(data.gallery is data.query)


def why_meaningless(data):
    """Why the metrics of a test set mean nothing, or ''"""
    if len({*data.query.present, *data.gallery.present}) < 2:
        return 'all test images have the same class'
    if not num_matches(data).any():
        return 'no test image has a match, another image of its class'
    return ''


def evaluate(model, data):
    """The metrics of the test set for a row of the log; {} if there is no test set"""
    return score(data, *embed_test(model, data)) if data.query else {}


# ---- 5. images -------------------------------------------------------------------------------------

# Pillow finds the format of a file by its content. Further formats of Pillow may start a program.
FORMATS = ['JPEG', 'PNG', 'PPM', 'BMP', 'TIFF', 'WEBP', 'GIF', 'AVIF']
ENDINGS = (*torchvision.datasets.folder.IMG_EXTENSIONS, '.gif', '.avif')
MEAN = (0.485, 0.456, 0.406)                                             # ImageNet's, RGB
STD = (0.229, 0.224, 0.225)


class Images(torch.utils.data.Dataset):
    """A torch Dataset of N images with labels, or of N vectors: precomputed features.

    items         N paths, PIL images or uint8 arrays (height, width, 3); or a tensor or array (N, c) of vectors
    labels        N classes, by name or number; or if `classes` is given, integers, which are positions in it
    classes       the names of the C classes; None: all labels, sorted
    superclasses  (N,) integers, or None
    paths         names of the images; None: their paths, or 'image 0', ...
    transform        PIL image -> (3, S, S), for tests;  None: make_test_transform()
    train_transform  the same for training;              None: make_train_transform()
    workers          processes that read files, 0: none; None: about one per core

    Both transforms may be replaced by any callable. images[i] is (transform(image), label). With further integers,
    images[i, ...] is (train_transform(image), label), and these integers are the seed. If a transform has an attribute
    min_side, large JPEG files are decoded at a reduced size, whose shorter side is not below it.
    """

    def __init__(self, items, labels, classes=None, superclasses=None, paths=None, transform=None,
                 train_transform=None, workers=None):
        if isinstance(items, np.ndarray) and items.ndim == 2:
            items = torch.as_tensor(items)
        self.is_vectors = torch.is_tensor(items)
        if self.is_vectors and items.ndim != 2:
            raise UsageError(f'a tensor of vectors is (N, c), and this one is {tuple(items.shape)}; images are a list '
                             'of paths, PIL images or uint8 arrays (height, width, 3)')
        if self.is_vectors:
            items = items.detach() if items.is_floating_point() else items.float()
            if not items.isfinite().all():
                raise UsageError('some vectors are NaN or infinite')
        self.items = items if self.is_vectors else list(items)          # by position, also those of a pandas column
        self.labels, self.classes = number_classes(labels, classes, len(items))
        self.superclasses = None if superclasses is None else torch.as_tensor(np.asarray(superclasses))
        self.are_files = len(items) > 0 and isinstance(self.items[0], (str, os.PathLike))
        if paths is None:
            paths = self.items if self.are_files else (f'image {i}' for i in range(len(items)))
        self.paths = list(map(str, paths))
        self.workers = workers
        self.transform = transform or make_test_transform()
        self.train_transform = train_transform or make_train_transform()

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, item):
        i, *seed = item if isinstance(item, tuple) else (item,)         # a tuple is from StepBatches, in training
        x = self.items[i]
        if not self.is_vectors:
            transform = self.train_transform if seed else self.transform
            image = to_rgb(x, getattr(transform, 'min_side', None))
            with seeded(*seed) if seed else nullcontext():
                x = transform(image)
        return x, self.labels[i]

    @property
    def num_classes(self):
        """C: labels are from 0 to C - 1. Queries and gallery share one numbering, so C counts the classes of both."""
        return int(self.labels.max()) + 1

    @property
    def present(self):
        """Names of the classes that these images show"""
        return [self.classes[c] for c in self.labels.unique()]

    def subset(self, indices):
        """The images at these positions, a LongTensor (n,), or where a mask (N,) is true; their classes are numbered
        anew from 0."""
        kept, labels = self.labels[indices].unique(return_inverse=True)
        positions = torch.arange(len(self))[indices].tolist()
        items = self.items[indices] if self.is_vectors else [self.items[i] for i in positions]
        superclasses = None if self.superclasses is None else self.superclasses[indices]
        return Images(items, labels, [self.classes[c] for c in kept.tolist()], superclasses,
                      [self.paths[i] for i in positions], self.transform, self.train_transform, self.workers)


def number_classes(labels, classes, count):
    """The labels of Images, checked -> (N,) LongTensor from 0 to C - 1, and the names of the C classes"""
    values = labels.tolist() if hasattr(labels, 'tolist') else labels            # a tensor is slow to iterate over
    labels = np.asarray(labels)
    try:
        if labels.dtype.kind in 'OU' and labels.shape == (count,):
            labels = np.array([plain(value) if isinstance(value, str) else value for value in values], object)
        if labels.shape != (count,) or any(value is None or value != value for value in values):
            raise UsageError(f'{count} images need as many labels, none of them missing; these are {labels.shape}')
        if classes is None:
            classes, labels = np.unique(labels, return_inverse=True)
        elif not {*labels.tolist()} <= {*range(len(classes))}:
            raise UsageError(f'with {len(classes)} classes, labels are positions from 0 to {len(classes) - 1}')
    except TypeError as error:                              # they cannot be compared
        kinds = ', '.join(sorted({type(value).__name__ for value in values}))
        raise UsageError(f'labels are of one type, as text or numbers, and these are of several: {kinds}') from error
    return torch.as_tensor(np.asarray(labels, np.int64)), list(map(plain, classes))


def plain(name):
    """The name of a class in one form of Unicode: files that were copied from a Mac may have another one."""
    return unicodedata.normalize('NFC', str(name))


def make_test_transform(resize=256, image_size=224, mean=MEAN, std=STD):
    """PIL image -> (3, S, S): the shorter side is resized to `resize` pixels, and the centre is cropped.

    A callable of your own may pad wide images to a square instead, so that nothing is lost:

    >>> square = make_test_transform(256, 256)
    >>> def padded(image):                  # a function with a name, because a lambda does not reach worker processes
    ...     return square(ImageOps.pad(image, (256, 256), color='white'))
    >>> data.query.transform = padded
    """
    return compose(resize, [v2.Resize(resize), v2.CenterCrop(image_size)], mean, std)


def make_train_transform(image_size=224, min_crop=0.08, flip=True, jitter=0.0, resize=None, mean=MEAN, std=STD):
    """PIL image -> (3, S, S): a random crop of at least the fraction `min_crop` of the area

    jitter  brightness, contrast and saturation are multiplied by factors from 1 - jitter to 1 + jitter
    resize  shorter side of the image before the crop; None: the image in full size
    For a further augmentation, add it to the list below, or replace .train_transform of Images.
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
    """A transform with these steps, which ends with a normalized tensor"""
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
    """Mean and standard deviation of the pixels that a network expects, and its image size or None: 224 for a vision
    transformer of timm, which make_trunk makes for any size."""
    if not arch.startswith('timm:'):
        return MEAN, STD, None
    *_, expected = timm_model(arch)
    return expected.mean, expected.std, 224 if getattr(expected, 'fixed_input_size', False) else expected.input_size[-1]


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
        with suppress(Exception):                           # metadata that cannot be read does not matter
            image = ImageOps.exif_transpose(image)
        if image.mode[0] in 'IF':
            image = Image.fromarray(to_8_bits(np.asarray(image)))
        if image.has_transparency_data:
            image = Image.alpha_composite(Image.new('RGBA', image.size, 'white'), image.convert('RGBA'))
        image = image.convert('RGB')
    except Exception as error:                              # every image format has errors of its own
        raise UsageError(f'cannot read the image {getattr(source, "shape", source)}: {error}; replace or remove it'
                         ) from error
    # Only the middle of a very long image is kept: resized by its shorter side, it could be of any length.
    width, height = (min(side, 16 * min(image.size)) for side in image.size)
    return v2.functional.center_crop(image, [height, width])


def to_8_bits(grey):
    """Grey values of 16 or 32 bits or floats -> uint8, from 0 for the smallest finite one to 255 for the largest"""
    finite = grey[np.isfinite(grey)]
    low, high = finite.min(), finite.max()
    if low == high:
        return np.zeros(grey.shape, np.uint8)
    scaled = np.interp(grey, (low, high), (0, 255))                      # infinite values become 0 or 255
    return np.nan_to_num(scaled).round().astype(np.uint8)


# ---- 6. shapes -------------------------------------------------------------------------------------


def superformula(m, n1, n2, n3):
    """Gielis' curve, r(t) = (|cos(m t/4)|^n2 + |sin(m t/4)|^n3)^(-1/n1), at 721 angles t from -pi to pi, scaled so that
    its longest lobe has length 1"""
    t = torch.linspace(-math.pi, math.pi, 721)
    angle = m * t / 4
    r = (angle.cos().abs() ** n2 + angle.sin().abs() ** n3) ** (-1 / n1)
    return r / r.max()


def draw_shapes(classes=200, per_class=20, size=64, **transforms):
    """The built-in dataset: 200 classes of shapes x 20 images for training, and 200 other classes for the test.

    A class is a curve of Gielis' superformula with two colours and a pattern of stripes. Its images differ in
    rotation, scale, shift, aspect, brightness, background and noise, so that the classes cannot be told apart by
    pixels or colours only.
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
        pixels = torch.cat([(255 * draw_class(per_class)).byte().permute(0, 2, 3, 1) for _ in range(classes)])
        labels = torch.arange(classes).repeat_interleave(per_class)
        return Images(list(pixels.numpy()), labels, [f'{name} shape {i}' for i in range(classes)], **transforms)

    side = torch.linspace(-1, 1, size)
    grid = torch.stack(torch.meshgrid(side, side, indexing='xy'))       # (2, S, S) x and y
    return dict(train=draw_set('training'), query=draw_set('test'))


# ---- 7. datasets -----------------------------------------------------------------------------------


class Splits:
    """Training and test set. load_dataset returns one; you can also make your own of Images.

    name  part of the names of its runs;  ks  the values of K in Recall@K, among them 1
    train, query, gallery  Images, or None if there are none; without a gallery, the queries are also the gallery.
                           With --fold, query is for validation, as in Splits(name, **hold_out(train, fold))

    For example, with PIL images in memory, a training script that was imported, and its recipe for a folder of images:

    >>> args = script.get_args(['--dataset', 'folder', '--epochs', '5', '--name', 'first'])
    >>> transforms = common.transforms_from(args)      # or your own; then also set .transform after load_checkpoint
    >>> data = common.Splits('mine', common.Images(images, labels, **transforms),
    ...                       common.Images(test_images, test_labels, **transforms))
    >>> with common.seeded(args.seed):                             # the initial weights
    ...     model = common.build(args, data=data)                  # or with trunk=module, for a network of your own
    >>> optimizer = common.make_optimizer(args, [dict(params=model.parameters())])
    >>> def step(images, labels):
    ...     return script.the_loss(model(images), labels)
    >>> common.train(args, model, data, step, optimizer)
    >>> common.evaluate(common.load_checkpoint('runs/first'), data)
    """

    def __init__(self, name, train=None, query=None, gallery=None, ks=(1, 2, 4, 8)):
        self.name = name
        self.train = train
        self.query = query
        self.gallery = query if gallery is None else gallery
        self.ks = ks
        self.has_test = query is not None                   # load_dataset: also with --fold, which does not read it
        for split, images in dict(train=train, query=query, gallery=gallery).items():
            if images is not None and not len(images):
                raise UsageError(f'{split} has no images; without this split, pass None')
        if gallery and not query:
            raise UsageError('there is a gallery, but there are no queries')
        if 1 not in ks:
            raise UsageError(f'the K of Recall@K include 1, and these are {ks}')
        if gallery and query.classes != gallery.classes:    # a class has one number in both
            classes = sorted({*query.classes, *gallery.classes})
            self.query, self.gallery = copy.copy(query), copy.copy(gallery)       # they may be part of other Splits
            for images in (self.query, self.gallery):
                images.labels = torch.tensor(list(map(classes.index, images.classes)))[images.labels]
                images.classes = classes


def load_dataset(name, root='data', resize=None, image_size=None, fold=None, whole=False, **options):
    """The Splits of a dataset: of files, or the built-in one.

    name        shapes, folder, vectors, cub, cars, sop or inshop
    root        folder that contains what the archives of the dataset unpack to
    image_size  side of the square crops, pixels; None: 32 for shapes, 64 for folder, 224 for the benchmarks
    resize      shorter side of test images before the centre is cropped; None: image_size, for benchmarks 8/7 of it
    fold        'i/n': block i of n of the training classes is the test set; the real test set is not used
    whole       all images are the test set, and .train is None
    options     arguments of Images; a transform among them has precedence over resize and image_size

    `gallery is query` if the queries are also the gallery. Training labels are 0..C-1; query and gallery use the same
    numbering. Raises UsageError if files or counts are not as published.
    """
    if name not in DATASETS:
        raise UsageError(f'there is no dataset {name!r}: choose one of {", ".join(DATASETS)}')
    usual = DATASETS[name].get('sizes', (256, 224))
    image_size = image_size or usual[1]
    resize = resize or round(image_size * usual[0] / usual[1])
    options = dict(transform=make_test_transform(resize, image_size),
                   train_transform=make_train_transform(image_size)) | options
    if whole and name == 'shapes':
        raise UsageError('--whole is for a folder of images, not for the built-in dataset shapes')
    splits = draw_shapes(**options) if name == 'shapes' else read_splits(name, root, whole, options)
    has_test = 'query' in splits
    if fold:
        splits = hold_out(splits.get('train'), fold)
    data = Splits(name, **splits, ks=DATASETS[name].get('ks', (1, 2, 4, 8)))
    data.has_test = has_test
    return data


def read_splits(name, root, whole, options):
    """{split: Images} of train, query and gallery, from the reader of a dataset. It yields (split, path, class, extra):
    extra is a superclass, a vector or None; split is 'unsplit' if there are no splits."""
    row = DATASETS[name]
    root = Path(root).expanduser()
    found = {}
    try:
        if not root.is_dir():
            raise FileNotFoundError(f'there is no folder {root}')
        for split, *image in row['read'](root):
            found.setdefault('query' if whole else split, []).append(image)
        if name != 'vectors':
            check_files([path for images in found.values() for path, *_ in images])
        splits = {}
        for split, images in found.items():
            paths, classes, extra = zip(*images)
            if name == 'vectors':
                splits[split] = Images(torch.from_numpy(np.stack(extra)), classes, paths=paths)
            else:
                superclasses = None if extra[0] is None else torch.tensor(extra)
                splits[split] = Images(paths, classes, superclasses=superclasses, **options)
        check_splits(splits, {} if whole else row.get('counts', {}))
    # A file is missing, incomplete, or a web page, for example; or SciPy is missing.
    except (OSError, ValueError, LookupError, ImportError) as error:
        raise UsageError(f'{name} cannot be loaded: {error}; --data {root} should have {row["layout"]}, see README'
                         ) from error
    if 'unsplit' in splits:                                 # the first half of the sorted classes is for training
        images = splits['unsplit']
        first = images.labels < images.num_classes // 2
        splits = dict(train=images.subset(first), query=images.subset(~first))
    return splits


def check_files(paths):
    """Raises ValueError if images are missing, or are listed twice."""
    missing = [path for path in paths if not os.path.isfile(path)]
    # A folder may have several names, as links. Links to one file may be meant: some tools store equal files once.
    folders = {folder: os.path.realpath(folder) for folder in {os.path.dirname(path) for path in paths}}
    real = Counter(os.path.join(folders[os.path.dirname(path)], os.path.basename(path)) for path in paths)
    twice = [path for path, times in real.items() if times > 1]
    for wrong, text in ((missing, 'are missing'), (twice, 'are listed twice')):
        if wrong:
            raise ValueError(f'{len(wrong):,} of {len(paths):,} images {text}, the first is {wrong[0]}')


def check_splits(splits, counts):
    """Raises ValueError if the counts (images, classes) are not as published, or too small. Warns of seen classes."""
    if not splits:
        raise ValueError('there are no images')
    found = {split: (len(images), images.num_classes) for split, images in splits.items()}
    if counts and found != counts:
        raise ValueError(f'(images, classes) are {found}, expected are {counts}')
    for split, least in dict(train=2, unsplit=4).items():
        if split in found and found[split][1] < least:
            raise ValueError(f'there are {found[split][1]} classes to train on, and at least {least} are needed'
                             ' (4 without train/ and test/: half of them are the test set)')
    if splits.keys() >= {'train', 'query'}:
        if both := {*splits['train'].classes} & {*splits['query'].classes}:
            warn(f'{len(both)} classes are in the training set and in the test set, the first is {min(both)}')


def hold_out(train, fold):
    """{split: Images} of a fold 'i/n' of the training set: block i of n blocks of classes is for validation, the others
    for training. The blocks are contiguous, as in Section 3.3 of the Reality Check, and of equal size up to one class.
    """
    i, n = map(int, block_of_blocks(fold).split('/'))
    classes = train.num_classes if train else 0
    block = torch.arange(classes) * n // classes                         # (C,)
    if torch.bincount(block, minlength=n).min() < 2:
        raise UsageError(f'--fold {fold} needs at least two classes in each block, of {classes} training classes')
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
            paths = {path.name: path for path in (root / 'car_data/car_data' / split).glob('*/*')}
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


def split_lines(path, maxsplit=-1):
    """The words of each line that is not empty; at most maxsplit + 1 words, of which the first may contain spaces"""
    try:
        return [line.rsplit(maxsplit=maxsplit) for line in open(path, encoding='utf-8-sig') if line.strip()]
    except UnicodeDecodeError as error:
        raise UsageError(f'{path} is not text in UTF-8: {error}') from error


def read_folder(root):
    """Images of your own, in one of these layouts:

    train/ and test/   each with a folder of images for each class, at any depth
    gallery/           in addition, if the images of test/ (or query/) are queries for a separate gallery
    none of these      a folder for each class; the first half of the sorted classes is for training, the rest the test
    files.txt          lines `path class split`: a path, absolute or below `root`, which may contain spaces; a class,
                       which may not; and train, test (or query), or gallery

    The name of a class is the path of its folder below the split. Images have one of ENDINGS, in section 5.
    """
    if (root / 'files.txt').exists():
        for row in split_lines(root / 'files.txt', maxsplit=2):
            if len(row) < 3 or row[2] not in ('train', 'query', 'gallery', 'test'):
                raise UsageError(f'{root}/files.txt: {" ".join(row)!r} is not: path class train|query|gallery')
            path, class_, split = row
            yield split.replace('test', 'query'), os.path.join(root, path), class_, None
        return
    folders = [path.name for path in root.iterdir() if path.is_dir() and not has_runs(path)]
    for split, name in find_splits(folders).items():
        for path, class_ in images_below(root / name):
            yield split, path, class_, None


def find_splits(names):
    """Which of these folders (or NPZ files, without their ending) is which split, as {split: name}. Splits are train,
    test (or query, if there is a gallery) and gallery. {'unsplit': '.'} if there are none: one class may have such a
    name."""
    names = {name for name in names if not is_hidden(name)}
    found = {'train', 'test', 'query', 'gallery'} & names
    if not ({'train', 'test'} <= found or {'query', 'gallery'} <= found or found and found == names):
        return dict(unsplit='.')
    if others := names - found:
        warn(f'{", ".join(sorted(others))} beside {", ".join(sorted(found))}: not read')
    if {'test', 'query'} <= found or len(found & {'query', 'gallery'}) == 1 and 'test' not in found:
        raise UsageError(f'there are {" and ".join(sorted(found))}: put queries into test, or query next to gallery')
    return {name.replace('test', 'query'): name for name in sorted(found)}


SERVICE_FOLDERS = ['lost+found', '__MACOSX', 'System Volume Information', '$RECYCLE.BIN', '@eaDir', '#recycle']


def is_hidden(name):
    """Whether a file or folder belongs to an operating system, a file server or a waste bin"""
    return name.startswith('.') or name in SERVICE_FOLDERS


def has_runs(path):
    """Whether this is a folder runs/ that these scripts wrote. It may be next to the images, and has image grids."""
    return path.name == 'runs' and any(path.rglob('log.jsonl'))


def images_below(root):
    """(path, class) of the images in and below a folder. If no folder below root has images, those in root itself are
    one class, '.'. Otherwise these are ignored, with a warning, and so are files that are not images, if they are in
    the folder of a class."""
    images, others = [], []

    def stop(error):
        raise error

    for folder, folders, files in os.walk(root, onerror=stop, followlinks=True):
        folders[:] = sorted(name for name in folders if not is_hidden(name) and not has_runs(Path(folder, name)))
        check_names(folder, folders)
        class_ = Path(folder).relative_to(root).as_posix()
        for name in sorted(files):
            if not is_hidden(name):
                is_image = name.lower().endswith(ENDINGS)
                (images if is_image else others).append((os.path.join(folder, name), class_))
    if not images:
        raise UsageError(f'there are no images in {root}')
    unread = [path for path, class_ in others if class_ != '.']
    if in_classes := [row for row in images if row[1] != '.']:
        unread += [path for path, class_ in images if class_ == '.']
        images = in_classes
    if unread:
        warn(f'{root}: {len(unread)} files are not read, the first is {unread[0]}; they are no images of a known kind '
             '(convert them to JPEG), or in no folder of a class')
    return images


def check_names(folder, names):
    """Raises UsageError if two folders look like different splits, but would be read as classes, because then the
    network would be trained on the test set. A single one may be a class."""
    words = {*('train training trainset trainval test tests testing testset holdout val valid validate validation dev '
               'eval evaluation query queries probe gallery').split()}
    # {folder: its word for a split, by the first three letters}, such as {test0: tes, testing_set: tes}
    looks = {name: word[:3].lower() for name in names for word in re.findall('[A-Z]?[a-z]+|[A-Z]+', name)
             if word.lower() in words}
    if len({*looks.values()}) > 1:
        raise UsageError(f'{" and ".join(looks)} in {folder} look like splits, but would be read as classes: rename '
                         'them to train and test, and let --data name the folder that has them; if they are classes, '
                         'rename one')


def read_vectors(root):
    """NPZ files instead of folders: train.npz, test.npz, ..., or a single one. They contain the arrays embeddings
    (N, c), labels (N,), which are positions in `classes`, and classes (C,); and optionally paths (N,). For example:

    >>> np.savez('my_vectors/train.npz', embeddings=z, labels=y, classes=names)

    Features of any network come from common.embed(network, images), or from eval.py --embed.
    """
    files = {path.stem: path for path in root.glob('[!.]*.npz')}
    splits = find_splits(files)
    if 'unsplit' in splits:
        if len(files) != 1:
            raise UsageError(f'there are {len(files)} NPZ files, but not train.npz and test.npz')
        splits = dict(unsplit=min(files))
    for split, name in splits.items():
        saved = read_npz(files[name])
        for i in saved['labels'].argsort(kind='stable').tolist():        # class by class
            yield split, saved['paths'][i], saved['classes'][saved['labels'][i]], saved['embeddings'][i]


def read_npz(path):
    """{embeddings, labels, classes, paths, ...} of an NPZ file. Raises UsageError if they do not fit."""
    with untrusted_file(path), np.load(path) as file:
        saved = dict(file)
        z = saved['embeddings'] = saved['embeddings'].astype(np.float32)
        labels = saved['labels']
        saved['classes'] = list(map(str, saved['classes']))
        saved['paths'] = list(map(str, saved.get('paths', range(len(labels)))))
        if not (z.ndim == 2 and z.shape[:1] == labels.shape == (len(saved['paths']),) and np.isfinite(z).all()
                and labels.dtype.kind in 'iu' and 0 <= labels.min() <= labels.max() < len(saved['classes'])):
            raise ValueError(f'needed are finite embeddings (N, c) and N labels, positions in `classes`; these are '
                             f'{z.shape}, {labels.dtype} {labels.shape} and {len(saved["classes"])} classes')
    return saved


def download(name, root):
    """Downloads the archive of a dataset and unpacks it in the folder `root`, unless its own folder is there."""
    url = DATASETS[name].get('url')
    if not url:
        raise UsageError(f'--download is for cub and sop, not for {name}; README says where cars and inshop come from')
    root = Path(root).expanduser().resolve()
    folder = root / Path(url).stem
    if folder.exists():
        return
    print(f'downloading {url} to {folder}', flush=True)
    try:
        root.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=root) as temporary:     # an incomplete download is deleted with it
            torchvision.datasets.utils.download_and_extract_archive(url, temporary, md5=DATASETS[name]['md5'])
            os.replace(Path(temporary) / folder.name, folder)
    except Exception as error:              # no connection, a wrong checksum, a cut archive, a full disk
        raise UsageError(f'cannot download {url}: {error}; get it in another way, and unpack it in {root}') from error


# read: function that yields the images. ks: the K of Recall@K in the literature, if not 1, 2, 4, 8. counts: published
# counts of images and classes of each split. layout: content of the folder --data; README says where to get it. url,
# md5: the archive for --download, and its checksum; it unpacks to a folder of its own name. sizes: the defaults of
# resize and image_size in load_dataset, if not 256 and 224. flags: defaults of flags that are no part of a training
# recipe.
DATASETS = dict(
    shapes=dict(sizes=(32, 32), flags=dict(eval_every=10, precision='fp32')),
    folder=dict(read=read_folder, sizes=(64, 64),
                layout='a folder of images for each class (without train/ and test/, half of them are the test set), '
                       'or files.txt'),
    vectors=dict(read=read_vectors, layout='train.npz and test.npz, or one NPZ file', flags=dict(precision='fp32')),
    cub=dict(read=read_cub, counts=dict(train=(5864, 100), query=(5924, 100)),
             layout='CUB_200_2011/ with images.txt and images/ (--download gets CUB_200_2011.tgz, 1.1 GB)',
             url='https://data.caltech.edu/records/65de6-vp158/files/CUB_200_2011.tgz',
             md5='97eceeb196236b17998738112f37df78'),
    cars=dict(read=read_cars, counts=dict(train=(8054, 98), query=(8131, 98)),
              layout='cars_annos.mat and car_ims/, or anno_train.csv, anno_test.csv and car_data/car_data/'),
    sop=dict(ks=(1, 10, 100, 1000), read=read_sop, flags=dict(eval_every=5),
             counts=dict(train=(59551, 11318), query=(60502, 11316)),
             layout='Stanford_Online_Products/ with Ebay_train.txt and Ebay_test.txt (--download gets '
                    'Stanford_Online_Products.zip, 2.9 GB)',
             url='http://ftp.cs.stanford.edu/cs/cvgl/Stanford_Online_Products.zip',
             md5='7f73d41a2f44250d4779881525aea32e'),
    inshop=dict(ks=(1, 10, 20, 30, 40, 50), read=read_inshop, flags=dict(eval_every=5),
                layout='Eval/list_eval_partition.txt and Img/img/',
                counts=dict(train=(25882, 3997), query=(14218, 3985), gallery=(12612, 3985))))


# ---- 8. runs ---------------------------------------------------------------------------------------

# A run is the folder runs/<name>/ with log.jsonl, a JSON object for each evaluated epoch, and last.pt; with --fold,
# best.pt is the epoch with the highest MAP@R on the validation classes.

EVAL = Path(__file__).with_name('eval.py')


def dataset_from(args):
    """The dataset that the flags name"""
    if args.download:
        from_rank0(download, args.dataset, args.data)
    data = load_dataset(args.dataset, args.data, fold=args.fold, **transforms_from(args))
    if not data.train:
        raise UsageError(f'{args.data} has no training set: put training classes into train/, see README')
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
        if not model.trunk.mean_norm:
            raise UsageError(f'all training vectors in {args.data} are 0')
    if world_size() > 1 and not args.freeze_bn:             # statistics over the batches of all processes
        if args.device.type != 'cuda':
            raise UsageError('several processes on a CPU cannot compute joint statistics of BatchNorm: add --freeze-bn')
        model.trunk = nn.SyncBatchNorm.convert_sync_batchnorm(model.trunk)
    if args.compile:
        try:
            torch.compile(lambda x: x + 1)(torch.zeros(2, device=args.device))
        except Exception as error:                          # no compiler, or one that fails
            raise UsageError(f'--compile needs a compiler that works: {str(error).splitlines()[0]}') from error
        model.trunk.compile()                               # in place, so the names in a checkpoint stay as they are
    return model.place(args.device)


def new_folder(args, data):
    """Makes runs/<name>/; without --name it is script, dataset and the next free number."""
    numbered = (f'{args.script.removeprefix("train_")}-{data.name}-{number}' for number in itertools.count(1))
    Path('runs').mkdir(exist_ok=True)                       # not below, where the error of a broken link is ignored
    for name in [args.name] if args.name else numbered:
        folder = Path('runs') / name
        with suppress(FileExistsError):
            folder.mkdir(parents=True)
            return folder
    resume = f', or --resume {folder}' if (folder / 'last.pt').exists() else ''
    raise UsageError(f'{folder} exists already; choose another --name{resume}')


def best_row(rows):
    """The row with the highest MAP@R, the first if there are several; epoch 0, rows[0], only if there is no other"""
    return max(rows[1:] or rows, key=lambda row: row['MAP@R'])


def should_stop_early(args, rows):
    """With --fold: whether the last --patience evaluations brought no improvement"""
    if not args.fold or not rows:
        return False
    since = len(rows) - 1 - rows.index(best_row(rows))                   # evaluations since the best one
    return since >= args.patience


def print_recipe(args, model, data, sampler, epochs, folder):
    """Prints what is going to run: the data, the batches, all flags, and how to resume the run."""
    part = 'validation' if args.fold else 'test'
    test = 'no test images, so nothing will be evaluated'
    if data.query:
        gallery = '' if data.gallery is data.query else f' with a gallery of {len(data.gallery):,}'
        test = f'{len(data.query):,}{gallery} {part} images of {len(data.query.present):,} classes'
    size = getattr(sampler, 'batch_size', args.batch_size)               # smaller where there are few classes
    print(f'{data.name}: {len(data.train):,} training images of {len(data.train.present):,} classes, {test}\n'
          f'{epochs} epochs of {len(sampler)} batches of {size} images, on {args.device} in {model.precision}')
    print(', '.join(f'{name} {value}' for name, value in saved_flags(args).items() if value is not None))
    if args.protocol:
        print(f'--protocol {args.protocol}: this is fold {args.fold}; a result is the mean over all folds')
    if data.query and (why := why_meaningless(data)):
        warn(f'{why}, so there is nothing to measure')
    if 0 < epochs <= args.freeze_epochs:
        warn(f'the backbone will not be trained: it is frozen for {args.freeze_epochs} epochs, and there are {epochs}')
    if data.name in DATASETS and args.file.is_file():       # else data or script are not from a file
        device = [] if pick_device('auto') == args.device else ['--device', args.device]       # a checkpoint has none
        print(f'To resume after an interruption: {shell_command(args.file, "--resume", folder, *device)}')


def shell_command(file, *words):
    """The command that runs a script with these words, to be copied into a shell. The script may be in any folder."""
    file = Path(file).resolve()
    if file.is_relative_to(Path.cwd()):
        file = file.relative_to(Path.cwd())
    return shlex.join(map(str, ['python', file, *words]))


def show_row(row):
    """Prints the main values of a row of the log."""
    keys = ('loss', 'R@1', 'MAP@R', 's+', 's-', 'no_positive', 'images_per_second', 'minutes')
    values = [f'{key} {row[key]:<6.4g}' for key in keys if row.get(key) is not None]
    show_progress('  '.join([f'epoch {row["epoch"]:<3d}', *values]), done=True)


def summary(args, data, folder, rows):
    """Prints what the result means. Returns its row: the last, or with --fold the best."""
    if not data.query:
        print('All classes were trained on, so there is no result.')
        if data.train.are_files:
            print(f'To search these images: {shell_command(EVAL, "--checkpoint", folder, "--query", "IMAGE")}')
        return rows[-1]
    row, part, chosen = rows[-1], 'test', ''
    if args.fold:
        row, part, chosen = best_row(rows), 'validation', ', which has the highest validation MAP@R'
    seen = {*data.query.present} & {*data.train.present}
    known = f'{len(seen)} of these classes are' if seen else 'none of these classes is'
    if why := why_meaningless(data):
        print(f'R@1 has no meaning: {why}.')
    else:
        print(f'R@1 = {row["R@1"]:.1f}: for {row["R@1"]:.1f}% of the {part} images, the most similar other image shows '
              f'the same class; {known} in the training set.\n'
              f'This is epoch {row["epoch"]}{chosen}. Before training it was {rows[0]["R@1"]:.1f}.')
    if not data.has_test:
        print('There are no other classes for a test. Next: the same without --fold, which trains on all classes.')
    elif data.name in DATASETS:
        print(f'Next: {shell_command(EVAL, "--checkpoint", best_of(folder))}')
    else:
        print(f'Next: common.evaluate(common.load_checkpoint({str(folder)!r}), data)')
    return row


def show_progress(text, done=False):
    """Prints a line. With done=False the next line overwrites this one, and nothing is printed to a file."""
    terminal = getattr(sys.stdout, 'isatty', bool)()        # a stream, or None, may lack it; bool() is False
    if done or terminal:
        print(f'{text:<79}' if terminal else text, end='\n' if done else '\r', flush=True)


def about_data(args, data):
    """What a checkpoint says about its images: the classes that were seen in training (with --fold, those of the
    validation block, too, because the epoch was selected on them), a hash of all images, and the number of training
    images and a hash of the test images, with which eval.py checks that it has the same ones"""
    return dict(classes=data.train.classes + (data.query.classes if args.fold else []),
                fingerprint=hash_of(data, data.train, data.query, data.gallery), train_images=len(data.train),
                test_fingerprint=hash_of(data, data.query, data.gallery) if data.query and not args.fold else None)


def hash_of(data, *sets):
    """A hash of the classes, labels and images of these sets of `data`, each Images or None. Of files it takes names
    and sizes, of shapes only names, because the pixels that are drawn differ slightly from CPU to CPU."""
    sets = list(filter(None, sets))
    content = [(images.classes, images.labels.tolist(),
                [(os.path.basename(path), images.are_files and os.path.getsize(path)) for path in images.paths])
               for images in sets]
    digest = hashlib.sha256(repr(content).encode())
    for images in sets:
        if images.is_vectors:
            digest.update(images.items.float().cpu().numpy().tobytes())          # NumPy has no bfloat16
        elif not images.are_files and data.name != 'shapes':
            for image in images.items:
                digest.update(np.asarray(image).tobytes())
    return digest.hexdigest()


def load_run(args, about, model, states, per_epoch, total):
    """Loads the last checkpoint of a run into the model and `states` -> its epoch, its rows, and a start time that
    excludes the interruption"""
    saved = read_checkpoint(args.resume / 'last.pt')
    with untrusted_file(args.resume):
        if saved['fingerprint'] != about['fingerprint']:
            raise UsageError(f'the images in {args.data} are not those that {args.resume} began with; start a new run')
        for name, part in dict(states, model=model).items():
            part.load_state_dict(saved[name])
        done = saved['step']
        if done > total or done < total and done % per_epoch:
            raise UsageError(f'{args.resume} has {done} steps done, {per_epoch} an epoch, and cannot continue with '
                             'these --steps and --epochs; start a new run')
        # The learning rates of a cosine schedule depend on the length: for eval.py, a run that was made longer is not a
        # seed of the longer recipe.
        earlier = saved['args'].get('earlier_steps', [])
        before = min(saved['args']['epochs'] * per_epoch, saved['args']['steps'] or math.inf)
        if args.schedule == 'cosine' and before != total:
            earlier = [*earlier, before]
        if earlier:
            args.earlier_steps = earlier
        from_rank0(write_log, args.resume, None, saved['rows'])         # it may have ended before it wrote the log
        return saved['epoch'], saved['rows'], time.time() - 60 * saved['minutes']


def saved_flags(args):
    """{flag: value} for a checkpoint: plain values, which excludes Path objects and the device"""
    values = {name: value.item() if isinstance(value, np.generic) else value for name, value in vars(args).items()}
    return {name: value for name, value in values.items()
            if value is None or isinstance(value, (bool, int, float, str, list))}


def save_checkpoint(path, args, model, states=None, **more):
    """Writes the model, its script and flags, the version of torch, the states of {name: part}, which are needed to
    resume the run, and whatever else is given."""
    if broken := [name for name, value in model.state_dict().items() if not value.isfinite().all()]:
        raise UsageError(f'{broken[0]} is NaN or infinite, and {path} was not written; try a lower --lr, or '
                         '--precision fp32')
    mean, std, _ = normalization(args.arch)
    transform = dict(resize=args.resize, image_size=args.image_size, mean=mean, std=std)
    more |= {name: part.state_dict() for name, part in (states or {}).items()}
    with atomic_write(path) as file:
        torch.save(dict(script=args.script, args=saved_flags(args), torch=str(torch.__version__), transform=transform,
                        embedder=model.config, model=model.state_dict(), **more), file)


def save_epoch(folder, args, model, states, about):
    """Writes last.pt and, with --fold, best.pt if no earlier epoch was as good."""
    # best.pt is first: if the process is killed before it writes last.pt, --resume repeats the epoch.
    if args.fold and about['epoch'] > 0 and best_row(about['rows'])['epoch'] == about['epoch']:
        save_checkpoint(folder / 'best.pt', args, model, states, **about)
    save_checkpoint(folder / 'last.pt', args, model, states, **about)


def best_of(path):
    """The checkpoint of a run folder: best.pt if there is one, else last.pt. The path of a file is not changed."""
    path = Path(path)
    if not path.is_dir():
        return path
    best = path / 'best.pt'
    return best if best.exists() else path / 'last.pt'


def read_checkpoint(path):
    """The dict that save_checkpoint wrote, from a file or a run folder"""
    saved = read_file(best_of(path))
    if not (isinstance(saved, dict) and {'script', 'args', 'transform', 'embedder', 'model'} <= saved.keys()):
        raise UsageError(f'{path} is not a checkpoint of these scripts')
    saved['args'].setdefault('data', 'data')                # the default of --data; see load_checkpoint on its deletion
    return saved


def load_checkpoint(path, device='cpu', precision='auto', trunk=None):
    """A trained Embedder, ready to embed, from a file or a run folder (its best.pt if there is one, else its last.pt)

    precision        auto: fp32 if the network was trained with --precision fp32, otherwise that of pick_precision
    trunk            if the network was built with Embedder(trunk=...), such a module; a copy of it gets the weights
    model.transform  converts an image (a path, a PIL image or an array) to (3, S, S);
                     model(model.transform(image)[None]) is its embedding (1, D)
    model.args       its training flags, a dict
    model.classes    names of its training classes, with --fold including the validation block
    model.progress   epoch and step after which it was saved; train_images and test_fingerprint, see about_data; a dict

    A checkpoint for others, without optimizer and path of the images:

    >>> saved = common.read_checkpoint('runs/first')
    >>> del saved['optimizer'], saved['args']['data']
    >>> torch.save(saved, 'network.pt')
    """
    saved = read_checkpoint(path)
    device = pick_device(device)
    if precision == 'auto' and saved['args'].get('precision') == 'fp32':
        precision = 'fp32'
    if saved['embedder']['arch'] == 'module' and trunk is None:
        raise UsageError(f'the trunk of {path} was made in Python: common.load_checkpoint(path, trunk=module) loads it')
    with untrusted_file(path), torch.random.fork_rng(devices=[]):       # weights are random first
        model = Embedder(weights='none', trunk=copy.deepcopy(trunk), precision=pick_precision(precision, device),
                         **saved['embedder'])
        model.load_state_dict(saved['model'])
        model.args = saved['args']
        model.classes = saved.get('classes', [])
        model.progress = {key: saved.get(key) for key in ('epoch', 'step', 'train_images', 'test_fingerprint')}
        transform = make_test_transform(**saved['transform'])
        model.transform = v2.Compose([partial(to_rgb, min_side=transform.min_side), transform])
        model.transform.min_side = transform.min_side       # so Images, which also calls to_rgb, can take it
    return model.place(device).eval()


def read_file(path):
    """torch.load that runs no code of the file, and verifies its checksums, which torch.load does not"""
    if not Path(path).is_file():
        raise UsageError(f'there is no file {path}')
    with untrusted_file(path):
        if zipfile.is_zipfile(path) and (broken := zipfile.ZipFile(path).testzip()):
            raise ValueError(f'the checksum of {broken} is wrong')
        return torch.load(path, map_location='cpu', weights_only=True)


@contextmanager
def untrusted_file(path):
    """Raises any error that is caused by a corrupted or untrusted file as a UsageError."""
    try:
        yield
    except (UsageError, PermissionError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        name = type(error).__name__
        text = ' '.join(str(error).split())[:300]
        if name == 'UnpicklingError' or 'weights_only' in text:     # torch recommends to open it all the same
            text = 'it is not a file of torch, or contains more than plain weights and could run any code'
        raise UsageError(f'{path} cannot be used; is it corrupted, or from another script? {name}: {text}') from error


@contextmanager
def atomic_write(path):
    """Writes a temporary file and then renames it, so that a full disk or Ctrl-C leaves the old file intact."""
    path = Path(path)
    temporary = path.parent / f'{path.name}.{os.getpid()}.tmp'
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, 'wb') as file:
            yield file
        os.replace(temporary, path)
    # torch.save reports a full disk as a RuntimeError, whose __context__ is the OSError.
    except (OSError, RuntimeError) as error:
        raise UsageError(f'could not write {path}: {error.__context__ or error}') from error
    finally:
        with suppress(OSError):                             # it is not there, or the disk is read-only
            temporary.unlink()


@contextmanager
def errors_explained(arch, weights):
    """Turns an error in making a network, or in getting its weights, into a UsageError."""
    try:
        yield
    except Exception as error:
        if weights != 'imagenet':
            raise UsageError(f'cannot make {arch}: {error}; try another --image-size or --arch') from error
        # Causes: no connection, no such weights, or a web page in place of the download
        raise UsageError(f'no ImageNet weights for {arch}: {type(error).__name__} {error}; name a file of them, '
                         f'--weights FILE, or delete a damaged one in {torch.hub.get_dir()}/checkpoints') from error


def load_weights(trunk, weights, classifier):
    """Loads a file of weights into a trunk: the state dict of such a network, or dicts that contain one at any depth.
    Its names may have a prefix, such as `module.`, `backbone.` or, in a checkpoint of these scripts, `trunk.`. Weights
    of the classifier, and of layers that the trunk does not have, are left out. All others must fit."""
    if weights in ('none', 'imagenet'):
        return trunk
    wanted = trunk.state_dict()
    with untrusted_file(weights):
        found = find_weights(read_file(best_of(weights)), wanted, weights)
        heads = [classifier] if isinstance(classifier, str) else classifier        # a distilled network has two
        layers = {name.split('.')[0] for name in wanted}
        found = {name: value for name, value in found.items()
                 if name.split('.')[0] in layers and not name.startswith(tuple(f'{head}.' for head in heads))}
        missing = [name for name in wanted.keys() - found.keys() if not name.endswith('num_batches_tracked')]
        if wrong := sorted([*missing, *(found.keys() - wanted.keys())]):
            raise UsageError(f'{weights} has weights of another --arch: {len(missing)} of {len(wanted)} are missing, '
                             f'and {len(wrong) - len(missing)} do not belong to it, such as {", ".join(wrong[:3])}')
        trunk.load_state_dict(found, strict=False)          # files of old versions lack num_batches_tracked
    return trunk


def dicts_in(saved):
    """A dict and the dicts that it contains, at any depth"""
    yield saved
    for value in saved.values():
        if isinstance(value, dict):
            yield from dicts_in(value)


def find_weights(saved, wanted, file):
    """{name without its prefix: value} of the network in `saved`. The first of the wanted names shows in which dict it
    is, and with which prefix. If there are several networks, it is the one whose names fit best."""
    first = next(iter(wanted))
    prefixes, networks, names = [], [], []
    for table in dicts_in(saved):
        table = {str(name): value for name, value in table.items()}
        names += table
        for prefix in [name.removesuffix(first) for name in table if f'.{name}'.endswith(f'.{first}')]:
            prefixes.append(prefix)
            networks.append({name.removeprefix(prefix): table[name] for name in table if name.startswith(prefix)})
    if not networks:
        raise UsageError(f'{file} has no {first}, the first weight of this --arch, with any prefix; it has '
                         f'{len(names)} names, such as {", ".join(names[:5])}')
    fitting = [len(network.keys() & wanted.keys()) - len(network.keys() - wanted.keys()) for network in networks]
    best = fitting.index(max(fitting))
    if fitting.count(max(fitting)) > 1:
        warn(f'{file} has several such networks; the first is used, with the prefix {prefixes[best] or "(none)"}')
    return networks[best]


def timm_model(arch):
    """timm, NAME and its pretrained configuration, for arch timm:NAME"""
    name = arch.removeprefix('timm:')
    try:
        import timm
        config = timm.get_pretrained_cfg(name)
    except ImportError as error:
        raise UsageError('--arch timm:NAME needs timm: pip install timm') from error
    except RuntimeError as error:                           # it has the model, but not the tag after the dot
        raise UsageError(f'--arch {arch}: {error}') from error
    if config is None:
        raise UsageError(f'timm has no model {name}')
    return timm, name, config


# ---- 9. command line -------------------------------------------------------------------------------

# The value of a flag is decided in this order, and the later overrides the earlier:
#   1. its default in FLAGS, or in get_args of the script;
#   2. `flags` of the dataset in DATASETS, for flags that are not part of a training recipe;
#   3. the script's DEFAULTS, its training recipes: the entry of the dataset (or protocol), of the --loss, of both;
#   4. what follows from other flags, in the function `recipe`: a typed image size scales --resize, for example;
#   5. with --resume, the flags of the run;
#   6. what was typed.
# Then parse raises UsageError for flags that have no effect, and for what would give a wrong result.

# Parts of the scripts' DEFAULTS. FOLDER and VECTORS replace values of shapes: for a folder of images without pretrained
# weights, and for vectors. PROTOCOL is Section 3.1 of the Reality Check.
FOLDER = dict(image_size=64, resize=64, min_crop=0.5, epochs=10, batch_size=64, per_class=4, freeze_epochs=0)
VECTORS = FOLDER | dict(arch='none', pool='avg', dim=None, freeze_bn=True, epochs=5, batch_size=100, per_class=5,
                        lr=1e-3, schedule='constant')
# What the text does not state comes from the released configuration: momentum, weight decay, and crops of at least 0.16
# of the area (the text has "between 40 and 256" px). That configuration freezes the statistics of BatchNorm only, and
# evaluates every 200 steps on CUB, with a patience of 9 evaluations (Cars: 500 steps, 14; SOP: 2,000 steps, 39). Here
# there is an evaluation every epoch, and a patience of 10, so runs on Cars and SOP stop several times earlier.
PROTOCOL = dict(arch='resnet50', weights='imagenet', pool='avg', dim=128, freeze_bn=True,
                image_size=227, resize=256, crop_from='resized', min_crop=0.16,
                epochs=1000, batch_size=32, per_class=4,
                optimizer='rmsprop', lr=1e-6, momentum=0.9, weight_decay=1e-4, schedule='constant', freeze_epochs=0,
                clip=0.0, fold='0/4', eval_every=1)

# Flags in which runs of one recipe may differ: seed and fold, and where and how a run is computed and evaluated
RUN_FLAGS = {'seed', 'fold', 'name', 'data', 'download', 'resume', 'device', 'precision', 'compile', 'workers',
             'eval_every'}
# Flags that may change when a run is resumed
RESUMABLE = RUN_FLAGS - {'seed', 'fold', 'name'} | {'epochs', 'steps', 'patience'}


class Parser(argparse.ArgumentParser):
    def add_flags(self, title, flags):
        """Adds a group of flags, {names: options of add_argument}."""
        group = self.add_argument_group(title)
        for names, options in flags.items():
            group.add_argument(*names.split(), **options)

    def parse_args(self, argv=None):
        self.argv = list(map(str, sys.argv[1:] if argv is None else argv))
        if any(re.fullmatch(r'(--[\w-]+=)?\s*', word) for word in self.argv):     # "" would be the working folder
            self.error('an argument is empty')
        return super().parse_args(self.argv)

    def typed(self):
        """{flag: as it was typed} of the flags on the command line that was parsed last"""
        words = {word.split('=')[0] for word in self.argv}
        return {action.dest: option for action in self._actions for option in action.option_strings if option in words}

    def error(self, message):
        raise UsageError(f'{self.prog}: {message}; --help lists the flags')


class Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Prints docstrings unchanged, and the default of each flag."""


def between(low, high, kind=float):
    """An argparse type: a finite number from low to high, both included"""
    def check(text):
        value = kind(text)
        if not (low <= value <= high and value < math.inf):
            raise ValueError
        return value
    # argparse prints this name if the text is not such a number.
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


def block_of_blocks(text):
    """An argparse type: I/N with 0 <= I < N and N >= 2, as text"""
    numbers = re.fullmatch(r'(\d+)/(\d+)', str(text))
    i, n = map(int, numbers.groups()) if numbers else (0, 0)
    if not (i < n and n >= 2):
        raise UsageError(f'a fold is I/N with I from 0 to N - 1 and N at least 2, and not {text!r}')
    return f'{i}/{n}'


def run_folder(text):
    """An argparse type: the folder of a run, from its path or that of a checkpoint in it"""
    path = Path(text)
    return path.parent if path.name in ('last.pt', 'best.pt') else path


SWITCH = argparse.BooleanOptionalAction
# The flags of all scripts, {title: {flag and aliases: options of add_argument}}. A flag without a default gets one from
# the recipe.
FLAGS = {
    'data': {
        '--dataset': dict(choices=list(DATASETS), default='shapes',
                          help='shapes: built in; folder: your own images; vectors: precomputed features'),
        '--data': dict(type=os.path.expanduser, default='data',
                       help='folder of classes, of NPZ files, or of the unpacked dataset, see README'),
        '--download': dict(action='store_true', help='download cub or sop to --data, unless it is there'),
        # Up to 16 px, a ResNet's last stage has an input of one pixel, and wrong gradients in bfloat16 on a CPU.
        '--image-size': dict(type=at_least(17), help='side of the square crops, pixels'),
        '--resize': dict(type=at_least(17), help='shorter side of the test images before their centre is cropped, '
                                                 'pixels; follows --image-size'),
        '--crop-from': dict(choices=['original', 'resized'], default='original',
                            help='training crops are taken from the image in full size, or after --resize'),
        '--min-crop': dict(type=between(0.001, 1), help='minimum area of a training crop, fraction of the image'),
        '--jitter': dict(type=between(0, 1), default=0.0, help='of ColorJitter: brightness, contrast, saturation'),
        '--flip': dict(action=SWITCH, default=True, help='flip half of the crops horizontally'),
    },
    'network': {
        '--arch': dict(help='backbone: a classifier of torchvision, such as resnet18 or vit_b_16, or timm:NAME'),
        '--weights': dict(help='initial weights of the backbone: imagenet, none (random), a file, or a run'),
        '--pool': dict(choices=['avg', 'max', 'avg+max'], default='avg+max', help='pooling of the feature map'),
        '--dim': dict(type=at_least(1), help='embedding dimension; default for vectors: their own'),
        '--freeze-bn': dict(action=SWITCH, help='BatchNorm uses its stored statistics, and does not update them'),
    },
    'training': {
        '--epochs': dict(type=at_least(0), help='passes over the training set'),
        '--steps': dict(type=at_least(0), default=0, help='maximum number of steps (iterations); 0: no maximum'),
        '--batch-size': dict(type=at_least(2), help='images in a batch, B'),
        '--per-class': dict(type=at_least(0), help='images per class in a batch, K; 0: random batches'),
        '--optimizer': dict(choices=['adamw', 'adam', 'sgd', 'rmsprop'], default='adamw', help='optimizer'),
        '--lr': dict(type=at_least(0, float), help='learning rate'),
        '--weight-decay': dict(type=at_least(0, float), default=1e-4, help='weight decay'),
        '--momentum': dict(type=between(0, 1), default=0.0, help='sgd and rmsprop: momentum'),
        '--schedule': dict(choices=['step', 'cosine', 'constant'], help='schedule of the learning rate'),
        '--decay-epochs': dict(type=at_least(1), default=10, help='schedule step: epochs between decays'),
        '--decay-rate': dict(type=between(0, 1), default=0.5, help='schedule step: factor of a decay'),
        '--freeze-backbone-epochs --freeze-epochs --warmup': dict(
            type=at_least(0), dest='freeze_epochs', metavar='N',
            help='freeze the backbone for this number of epochs (not a warmup of the learning rate)'),
        '--clip': dict(type=at_least(0, float), help='clip each entry of the gradients (clip_grad_value_); 0: no'),
    },
    'run': {
        '--seed': dict(type=between(0, 2 ** 63 - 1, int), default=0, help='random seed'),
        '--eval-every': dict(type=at_least(1), default=1, help='epochs between evaluations'),
        '--protocol': dict(choices=['reality-check'], help='settings of the Reality Check, Section 3.1'),
        '--fold': dict(type=block_of_blocks, metavar='I/N', help='block I (from 0) of N blocks of training classes '
                       'is for validation; the test set is not used'),
        '--patience': dict(type=at_least(1), default=10,
                           help='with --fold: stop after this number of evaluations without improvement'),
        '--name': dict(help='folder below runs/; default: script, dataset, next free number'),
        '--resume': dict(type=run_folder, metavar='RUN', help='continue the run in this folder; with other --epochs, '
                         '--schedule cosine is computed for the new length'),
    },
    'machine': {
        # A lambda, because pick_device is defined further down.
        '--device': dict(type=lambda name: pick_device(name), default='auto',
                         help='where to run: auto, cpu, cuda, cuda:1, mps'),
        '--precision': dict(choices=['auto', 'bf16', 'fp32'], default='auto',
                            help='precision of the backbone; fp32 allows TF32 convolutions on CUDA'),
        '--compile': dict(action=SWITCH, default=False, help='torch.compile of the backbone, with torch 2.7 or newer'),
        '--workers': dict(type=at_least(0), help='processes that read image files; default: at most one per core'),
    },
}
# {flag: {its value: [the flags that it uses]}}, where OTHER stands for all values that are not named. A typed flag that
# only another value uses is an error, because a sweep over it would be a sweep of identical runs.
OTHER = object()
USES = {
    'optimizer': dict(sgd=['momentum'], rmsprop=['momentum']),
    'schedule': dict(step=['decay_epochs', 'decay_rate']),
    'fold': {None: [], OTHER: ['patience']},
    'dataset': {'vectors': [], OTHER: ['image_size', 'resize', 'crop_from', 'min_crop', 'jitter', 'flip', 'weights',
                                       'pool', 'freeze_bn', 'freeze_epochs', 'precision']},
}


def parser(doc, notes='', file=None):
    """A parser with the flags of all scripts

    doc, notes  printed by --help before and after the flags
    file        a script's __file__: checkpoints and run folders are named after it. None: the first word of `doc`
    """
    file = Path(file or (doc or 'script').split()[0])
    p = Parser(prog=file.name, description=doc, epilog=notes, formatter_class=Help, allow_abbrev=False)
    for title, flags in FLAGS.items():
        p.add_flags(title, flags)
    p.set_defaults(script=file.stem, file=file)             # a checkpoint has the first, but no Path
    return p


def parse(parser, DEFAULTS, argv=None, uses=None):
    """Reads the command line twice: to learn which recipe is meant, and then with that recipe as the defaults.

    DEFAULTS  a script's recipes: dicts of defaults for flags, one per dataset (or protocol); further ones under a loss
              or (dataset, loss), where a recipe also depends on the script's --loss
    uses      which flags of the script have an effect with which others, in the form of USES
    Returns what was typed and what the recipe says as a namespace; device is a torch.device. With torchrun, the
    processes find each other here.
    """
    argv = sys.argv[1:] if argv is None else argv
    first = parser.parse_args([word for word in argv if word not in ('-h', '--help')])
    typed = parser.typed()
    asked = {flag: getattr(first, flag) for flag in typed}
    saved = saved_recipe(parser, typed, asked) if 'resume' in typed else {}
    loss = dict(loss=parser.get_default('loss'))            # the script's own, if none is typed
    row = recipe(loss | saved | asked, DEFAULTS) | saved
    if unknown := sorted(row.keys() - {action.dest for action in parser._actions}):
        raise UsageError(f'{parser.prog} has no flag for {", ".join(unknown)}')
    parser.set_defaults(**row)
    args = parser.parse_args(argv)                          # what is typed replaces the recipe
    if missing := [action.option_strings[0] for action in parser._actions
                   if action.container.title in ('data', 'network', 'training') and getattr(args, action.dest) is None
                   and (action.dest, args.dataset) != ('dim', 'vectors')]:
        raise UsageError(f'{parser.prog} has no recipe for {args.protocol or args.dataset}: add one to its DEFAULTS, '
                         f'or pass {", ".join(missing)}')
    reject_wrong_results(args, typed)
    for flag, users in [*USES.items(), *(uses or {}).items()]:
        value = getattr(args, flag)
        values = value if isinstance(value, list) else [value]
        used = {user for each in values for user in users.get(each, users.get(OTHER, []))}
        unused = {user for each in users.values() for user in each} - used
        reject(typed, unused, f'--{flag.replace("_", "-")} {" ".join(map(str, values))}')
    init_distributed(args.device)
    return args


def recipe(asked, DEFAULTS):
    """The defaults that follow from the flags {flag: value} that were asked for"""
    dataset = asked.get('dataset', 'shapes')
    if dataset == 'folder' and asked.get('weights', 'none') != 'none':      # it is like CUB: fine-tuning on photographs
        dataset = 'cub'
    name, loss = asked.get('protocol') or dataset, asked.get('loss')
    row = DATASETS[dataset].get('flags', {})
    for key in (name, loss, (name, loss)):                  # the later overrides the earlier
        row = row | DEFAULTS.get(key, {})
    image_size = asked.get('image_size') or normalization(asked.get('arch', ''))[2]
    if image_size and 'resize' in row:
        row |= dict(image_size=image_size, resize=round(image_size * row['resize'] / row['image_size']))
    if asked.get('weights') == 'none':                      # random weights cannot learn with frozen statistics
        row |= dict(freeze_bn=False)
    if 'fold' in asked:
        row |= dict(eval_every=1)
    return row


def saved_recipe(parser, typed, asked):
    """The flags of the run to resume, a dict. Raises UsageError if it is not a run of this script, or if a flag was
    typed that may not change."""
    reject(typed, ['name'], '--resume')
    run = asked['resume']
    if not (run / 'last.pt').is_file():
        raise UsageError(f'{run} has no last.pt, so it is not the folder of a run, or the run ended before its first '
                         'checkpoint: start a new run')
    saved = read_checkpoint(run / 'last.pt')
    if saved['script'] != Path(parser.prog).stem:
        raise UsageError(f'{run} was made by {saved["script"]}.py, not by {parser.prog}')
    flags = {action.dest for action in parser._actions} - {'name', 'download'}
    saved = {name: value for name, value in saved['args'].items() if name in flags}
    if fixed := [typed[name] for name, value in asked.items() if name not in RESUMABLE and saved.get(name) != value]:
        raise UsageError(f'{run} was made with another {fixed[0]}; start a new run')
    return saved


def reject_wrong_results(args, typed):
    """Raises UsageError for flags that would give a wrong result."""
    if args.dataset == 'shapes' and 'data' in typed:
        raise UsageError('--dataset shapes is built in and has no --data; for images of your own add --dataset folder')
    if (args.arch == 'none') != (args.dataset == 'vectors'):
        raise UsageError(f'--arch {args.arch} does not fit --dataset {args.dataset}: none is for vectors only')
    if args.resize < args.image_size:
        raise UsageError(f'--resize {args.resize} is smaller than --image-size {args.image_size}, the crop of it')
    if args.protocol and (args.weights == 'none' or args.dataset == 'shapes'):
        raise UsageError(f'--protocol {args.protocol} fine-tunes pretrained weights: --weights imagenet or a file')


def reject(typed, flags, because):
    """Raises UsageError if one of these flags was typed although it has no effect."""
    for flag in sorted(typed.keys() & set(flags)):
        raise UsageError(f'{typed[flag]} has no effect with {because}')


def require_pairs(args):
    """Raises UsageError if batches have no positive pairs, or no negative ones, for a loss over pairs."""
    if args.per_class == 1:
        raise UsageError('--per-class 1 gives batches without positive pairs, which this loss needs: raise it')
    if args.per_class and args.batch_size // args.per_class < 2:
        raise UsageError(f'--batch-size {args.batch_size} with --per-class {args.per_class} is a batch of one class, '
                         'but this loss compares classes: raise --batch-size')


# ---- 10. devices, processes and randomness ---------------------------------------------------------

# Commands for different machines. Without dropout in the backbone, results are the same up to floating-point error.
#   one large GPU    python SCRIPT --dataset cub --data data
#                    Run on an H200. With --compile (torch.compile of the trunk) it was not run yet
#   several GPUs     torchrun --nproc-per-node 4 SCRIPT --dataset sop --data data
#                    each process loads a part of each batch and runs the backbone on it, and computes the loss of
#                    the whole batch. Tested with two processes on a CPU, which need --freeze-bn
#   a Mac            --device cpu, if torch lacks an operation on its GPU. Not run yet. Its GPU gets no channels_last,
#                    because gradients of BatchNorm are wrong in it in many releases of torch (issue 175189)
#   a notebook       start in a folder that is kept, because checkpoints are in runs/ below it; after an interruption,
#                    main(['--resume', 'runs/first']) continues a run with the flags --name first


def to_device(t, device):
    """A tensor on a torch.device. On CUDA the CPU does not wait for the copy. On the GPU of a Mac it has to: there the
    source may be released before it is read, which gives other values without an error (torch issue 189690)."""
    return t.to(device, non_blocking=device.type == 'cuda')


def at_least_float32(t):
    """Raises half precision to float32: exp() overflows float16 above 11, and bfloat16 has two to three digits. Other
    types are not changed."""
    return t.to(torch.promote_types(t.dtype, torch.float32))


def loss(function):
    """A decorator for losses. Half precision among the arguments becomes float32, all floating-point tensors get the
    widest type among them, and autocast is off inside. Labels y of embeddings z (B, D) must be B integers. If another
    argument has one vector per class, (C, D), they must be from 0 to C - 1."""
    signature = inspect.signature(function)

    @wraps(function)
    def wrapped(*args, **kwargs):
        bound = signature.bind(*args, **kwargs)
        given = bound.arguments
        if 'z' in given and 'y' in given:
            given['y'] = check_labels(**given)
        tensors = {name: value for name, value in given.items() if torch.is_tensor(value)}
        dtype = reduce(torch.promote_types, (t.dtype for t in tensors.values()), torch.float32)
        given |= {name: t.to(dtype) for name, t in tensors.items() if t.is_floating_point()}
        with torch.autocast(next((t.device.type for t in tensors.values()), 'cpu'), enabled=False):
            return function(*bound.args, **bound.kwargs)
    return wrapped


def check_labels(z, y, **others):
    """The labels y of embeddings z as int64. Raises UsageError if they are not labels, see loss. On a CUDA device, the
    range of the labels is an assertion that runs there, because the CPU would have to wait for it: wrong labels end
    the process with a CUDA error, after the text is printed."""
    if not torch.is_tensor(z) or z.ndim != 2:
        raise UsageError(f'embeddings are a tensor (B, D), and these are {type(z).__name__} {np.shape(z)}')
    if not (torch.is_tensor(y) and y.shape == z.shape[:1] and not y.is_floating_point()):
        raise UsageError(f'labels are a tensor of {len(z)} integers, one for each embedding, and not '
                         f'{getattr(y, "dtype", type(y).__name__)} {tuple(np.shape(y))}')
    y = y.long()
    # Another argument (C, D) has a vector for each class.
    for C in {len(t) for t in others.values() if torch.is_tensor(t) and t.ndim == 2}:
        text = f'with {C} classes, labels are from 0 to {C - 1}'
        in_range = ((y >= 0) & (y < C)).all()
        if y.device.type not in ('cpu', 'mps'):             # torch has no such assertion for the GPU of a Mac
            torch._assert_async(in_range, text)
        elif not in_range:
            raise UsageError(f'{text}, and these are from {y.min()} to {y.max()}')
    return y


def pick_device(name):
    """auto is a GPU if there is one. With torchrun each process gets its own. A torch.device is returned as it is."""
    if isinstance(name, torch.device):
        return name
    if name == 'auto':
        name = 'cuda' if torch.cuda.is_available() else 'mps' if torch.backends.mps.is_available() else 'cpu'
    if name == 'cuda' and 'LOCAL_RANK' in os.environ:
        name = f'cuda:{os.environ["LOCAL_RANK"]}'
    try:
        if name.startswith('cuda:'):
            torch.cuda.set_device(name)     # before any tensor, or each process would take memory on the first GPU
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError, AttributeError) as error:      # the last: torch was built without CUDA
        raise UsageError(f'device {name} cannot be used here: {str(error).strip().splitlines()[0]}') from error


def pick_precision(name, device):
    """auto is bfloat16 if the hardware multiplies it: GPUs since Ampere, CPUs with AVX512-BF16."""
    if name != 'auto':
        return name
    supported = dict(cuda=lambda: torch.cuda.is_bf16_supported(including_emulation=False),
                     cpu=getattr(torch.cpu, '_is_avx512_bf16_supported', lambda: False))    # private; it may go
    return 'bf16' if device.type in supported and supported[device.type]() else 'fp32'


# All randomness of a run follows from its seed: the order of an epoch from (seed, EPOCH, epoch), what a step function
# samples from (seed, STEP, step), and the augmentation of an image from (seed, CROP, step, position in the batch). So
# all methods with the same seed and kind of batches see the same images and crops.
EPOCH, STEP, CROP = 1, 2, 3


def set_seed(*seeds, seed_torch=torch.manual_seed):
    """Seeds all random generators, on all devices, with a function of these integers."""
    seed = int(np.random.SeedSequence(seeds).generate_state(1, np.uint64)[0])
    random.seed(seed)
    np.random.seed(seed % 2 ** 32)
    seed_torch(seed)


@contextmanager
def seeded(*seeds):
    """set_seed inside `with`, after which the generators of torch (on the CPU), NumPy and Python are as before"""
    states = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        set_seed(*seeds, seed_torch=torch.default_generator.manual_seed)        # not the devices, which takes long
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])


# torchrun starts a script several times, once for each GPU. Each process loads a part of each batch, and the parts are
# gathered. Each runs the trunk on its part, or on all images if they cannot be divided evenly, as with a varying number
# of mixed images. The feature maps are gathered, and every process computes the loss of the whole batch. So the scripts
# need no code for several processes. The main process, of rank 0, prints and writes.


def world_size():
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


def rank():
    return distributed.get_rank() if world_size() > 1 else 0


def init_distributed(device):
    """With torchrun, finds the other processes. If one dies, torchrun ends the others."""
    # A cluster may set WORLD_SIZE alone; then this is a process like any other.
    from_torchrun = {'RANK', 'WORLD_SIZE', 'MASTER_ADDR', 'MASTER_PORT'} <= os.environ.keys()
    if from_torchrun and int(os.environ['WORLD_SIZE']) > 1 and not distributed.is_initialized():
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


def own_cores():
    """Cores that this process may use, at least 1. In a container or a batch job these are not all of the machine."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count()
    return max(1, cores // world_size())


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


class UsageError(ValueError, argparse.ArgumentTypeError):
    """A usage error. The message says in one line what is wrong, where, and what to do. As an ArgumentTypeError, it may
    be raised by the type of a flag, and argparse prints its message."""


def warn(text):
    if not rank():
        print(f'warning: {text}', file=sys.stderr)


def cli(main):
    """Runs a script from the shell. A usage error or a failure of the machine ends in one line and exit code 2, Ctrl-C
    in exit code 130. Anything else is a bug, and keeps its traceback. Only here are settings of the process changed."""
    torch.set_float32_matmul_precision('highest')           # no TF32 in heads, losses and retrieval: it errs by 1e-3
    torch.backends.cudnn.benchmark = True                   # on CUDA; the batches of training have one shape
    with suppress(AttributeError):                          # the stream of a notebook has no reconfigure
        sys.stdout.reconfigure(errors='replace')            # a character that a terminal lacks must not end a run
    try:
        main()
        if world_size() > 1:
            distributed.destroy_process_group()
    except KeyboardInterrupt:
        print('stopped', file=sys.stderr)
        sys.exit(130)
    except (UsageError, OSError, MemoryError, RuntimeError) as error:
        # An error in a process that reads images comes with its traceback, which is left out.
        text = ' '.join(str(error).rpartition('common.UsageError: ')[2].split()) or type(error).__name__
        if re.search(r'DataLoader worker \(pid|/torch_\d|shared memory|open files|ancdata', text):
            text = f'the processes that read images ran out of memory, of /dev/shm or of open files: {text[-200:]}; ' \
                   'try --workers 0'
        elif (isinstance(error, RuntimeError) and not isinstance(error, torch.OutOfMemoryError)
              and "can't allocate memory" not in text):     # on a CPU, torch raises a RuntimeError
            raise
        print(f'error: {text}', file=sys.stderr)
        sys.exit(2)
