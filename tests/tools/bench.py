"""What things cost, measured here and now. Not collected by pytest.

    python tests/tools/bench.py              all of them
    python tests/tools/bench.py loop         the shared loop against a bare forward/backward/optimizer loop
    python tests/tools/bench.py vectors      the same on stored vectors of 512 numbers
    python tests/tools/bench.py losses       loss time and value against pytorch-metric-learning, if installed
    python tests/tools/bench.py search       60,502 x 512 against one plain matrix product
    python tests/tools/bench.py decode       11,788 JPEG files of 500 x 375, as many as CUB has: first and second start
    python tests/tools/bench.py metrix       steps of train_metrix.py against clean ones; --px 224 --batch 400

Two things that are compared run in turn, several times, and the medians' ratio is printed: the machine may be busy with
other work. Memory is the most that was taken beyond what was there before; that of steps is measured on a GPU only.

Measured at commit 2abae0e, on two cores of a CPU that multiplies in bfloat16. `a step of X, to Y: 1.02` means that X
takes 1.02 times as long as Y.

    loop     a step of the shared loop, to the same step on crops that are ready (ResNet-18, 64 px, batches of
             100): 1.02 in float32, 1.06 to 1.09 in bfloat16. Making the crops takes 3 to 5 % of an epoch.
    losses   forward and backward, to pytorch-metric-learning 2.9 (batches of 100 and 500; 100 and 11,318 classes):
             contrastive 0.5 to 0.9, ms 0.3 to 0.4, Proxy-Anchor 0.5 to 0.9, ProxyNCA++ 0.5 to 0.7
    search   all metrics of 60,502 embeddings of 512 dimensions, to the bare product of the matrices: 0.96 (16 s, 0.5
             GB more memory); with K up to 1,000 1.44 (24 s, 0.7 GB)
    decode   the first start, to decoding on both cores and nothing else: 1.29 (18 s). The second start takes 0.9 s.
    metrix   a step with mixing, to one without (ResNet-50, 64 px): in batches of 20 x 5 embed 1.03 and feature 1.26,
             in batches of 80 x 5 embed 1.26 and feature 2.91
"""
import argparse
import os
import statistics
import sys
import tempfile
import time
from functools import partial
from importlib import import_module
from io import BytesIO
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import torch.nn.functional as F
from PIL import Image

import common


def now():
    """Seconds on a clock that waits until a GPU has done what it was told"""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def seconds(work):
    start = now()
    work()
    return now() - start


def in_turn(works, repeats):
    """{name: median seconds}; the works run in turn after one round of warming up."""
    rounds = [{name: seconds(work) for name, work in works.items()} for _ in range(repeats + 1)]
    return {name: statistics.median(times[name] for times in rounds[1:]) for name in works}


def more_memory(work, device):
    """The most that a call takes beyond what was there before, in GB: of a GPU, or of the machine, on Linux only"""
    def peak():
        if device.type == 'cuda':
            return torch.cuda.max_memory_allocated(device) / 2 ** 30
        return int(Path('/proc/self/status').read_text().split('VmHWM:')[1].split()[0]) / 2 ** 20
    if device.type == 'cuda':
        torch.cuda.reset_peak_memory_stats(device)
    elif sys.platform == 'linux':
        Path('/proc/self/clear_refs').write_text('5')
    else:
        return float('nan')
    before = peak()
    work()
    return peak() - before


def random_images(options, batches):
    """A dataset that has pictures of noise, 5 per class, enough for so many batches"""
    count = options.batch * batches
    pixels = torch.randint(0, 256, (count, options.px, options.px, 3), dtype=torch.uint8).numpy()
    images = common.Images(list(pixels), torch.arange(count) // 5, options.px)
    return argparse.Namespace(train=images, query=images, gallery=images, name='shapes')


def prepared(options, script, flags, data):
    """What a script's main() would hand to the loop: its flags, the step closure and its optimizer"""
    flags = f'{flags} --batch-size {options.batch} --per-class 5 --dim 512 --device {options.device}'.split()
    if data.name != 'vectors':
        flags += (f'--arch {options.arch} --weights none --image-size {options.px} --resize {options.px} '
                  f'--precision {options.precision}').split()
    with mock.patch.object(common, 'train') as train, mock.patch.object(common, 'dataset_from', return_value=data):
        import_module(script).main(flags)
    args, _, _, step, optimizer, *_ = train.call_args.args
    return args, step, optimizer


def train_on(batches, step, optimizer):
    """The bare loop"""
    for x, y in batches:
        loss = step(x, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def bench_vectors(options):
    """The shared loop on stored vectors, where a step is short: what the loop adds shows"""
    labels = torch.arange(60 * options.batch) // 5
    vectors = common.Images([], labels, 1, vectors=torch.randn(len(labels), 512))
    data = argparse.Namespace(train=vectors, query=vectors, gallery=vectors, name='vectors')
    time_loop(options, data, '--dataset vectors', f'vectors of 512 numbers, batch {options.batch}')


def bench_loop(options):
    """The shared loop (sampling, copying, cropping, checks) against steps on crops that lie ready."""
    precision = common.pick_precision(options.precision, common.pick_device(options.device))
    time_loop(options, random_images(options, batches=6), '',
              f'{options.arch}, {options.px} px, batch {options.batch}, {precision}')


def time_loop(options, data, flags, what):
    args, *trained = prepared(options, 'train_ms', flags, data)
    _, *trained_bare = prepared(options, 'train_ms', flags, data)
    args.schedule = 'constant'
    args.step = 0
    sampler = common.make_sampler(args, data.train.labels)
    ready = list(common.batches(data.train, sampler, args.device, augment=args))

    def shared():
        with mock.patch.object(common, 'show_progress'):
            common.train_epoch(args, data, sampler, *trained, epoch=0, total=10 ** 9)

    def loading():
        for _ in common.batches(data.train, sampler, args.device, augment=args):
            pass
    works = dict(shared=shared, bare=partial(train_on, ready, *trained_bare), loading=loading)
    took = in_turn(works, options.repeats)
    print(f'loop: {what}: shared {1e3 * took["shared"] / len(ready):.2f} ms a step, bare on ready batches '
          f'{1e3 * took["bare"] / len(ready):.2f} ms, ratio {took["shared"] / took["bare"]:.3f}; batches alone take '
          f'{took["loading"] / took["shared"]:.1%} of the time')


def bench_losses(options):
    """Value and time, forward and backward, on the same embeddings. These have no unit length, and ours are normalised
    in the time that is measured, because the other library's losses do that themselves."""
    try:
        from pytorch_metric_learning import losses, miners
    except ImportError:
        print('losses: pytorch-metric-learning is not installed; pip install pytorch-metric-learning')
        return
    import train_contrastive
    import train_ms
    import train_proxy_anchor
    import train_proxynca_pp
    device, D = common.pick_device(options.device), 512
    for B, C in ((100, 100), (500, 100), (100, 11318), (500, 11318)):
        torch.manual_seed(0)
        proxies = torch.randn(C, D, device=device, requires_grad=True)
        anchor = losses.ProxyAnchorLoss(C, D, 0.1, 32).to(device)
        nca = losses.ProxyNCALoss(C, D, softmax_scale=9).to(device)
        anchor.proxies.data = nca.proxies.data = proxies.detach().clone()
        miner, ms = miners.MultiSimilarityMiner(0.1), losses.MultiSimilarityLoss(2, 50, 0.5)
        pairs = {
            'contrastive': (train_contrastive.contrastive_loss, losses.ContrastiveLoss(0, 0.5)),
            'multi-similarity': (partial(train_ms.multi_similarity_loss, epsilon=0.1),
                                 lambda z, y, ms=ms, miner=miner: ms(z, y, miner(z, y))),
            'proxy-anchor': (partial(train_proxy_anchor.proxy_anchor_loss, proxies=proxies), anchor),
            'proxynca++': (partial(train_proxynca_pp.proxynca_pp_loss, proxies=proxies), nca)}
        y = torch.arange(B, device=device) // 5
        noise, centres = torch.randn(B, D, device=device), torch.randn(C, D, device=device)
        z = (3 * noise + centres[y]).requires_grad_()       # overlapping classes: every term is at work
        for name, (loss, theirs) in pairs.items():
            def ours(z, y, loss=loss):
                return loss(F.normalize(z, dim=1), y)
            took = in_turn({'ours': lambda f=ours, z=z, y=y: f(z, y).backward(),
                            'theirs': lambda f=theirs, z=z, y=y: f(z, y).backward()}, 7 * options.repeats)
            print(f'losses: B {B:3}, C {C:6,}, {name:16} ours {1e3 * took["ours"]:7.2f} ms, pytorch-metric-learning '
                  f'{1e3 * took["theirs"]:7.2f} ms, ratio {took["ours"] / took["theirs"]:.2f}; '
                  f'values {ours(z, y).item():.6f} {theirs(z, y).item():.6f}', flush=True)


def bench_decode(options, count=11788):
    """First start, in which images are decoded; and second one, until the first batch is there."""
    with tempfile.TemporaryDirectory() as folder:
        pictures = []
        for noise in torch.rand(40, 3, 24, 32):
            pixels = 255 * F.interpolate(noise[None], (375, 500), mode='bicubic')[0].clamp(0, 1)
            pictures.append(BytesIO())
            Image.fromarray(pixels.byte().permute(1, 2, 0).numpy()).save(pictures[-1], 'JPEG', quality=95)
        for i in range(count):
            path = Path(folder) / 'images' / f'{i * 200 // count:03}' / f'{i}.jpg'
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(pictures[i % 40].getvalue())
        load = partial(common.load_dataset, 'folder', Path(folder) / 'images', 256, 224, Path(folder) / 'cache')
        one = statistics.median(seconds(lambda: common.read_image(path, 256)) for _ in range(50))
        first, started = seconds(load), now()
        data = load()
        second = now() - started
        next(common.batches(data.train, [list(range(100))], torch.device('cpu')))
        print(f'decode: {count:,} JPEG files of 500 x 375, {len(pictures[0].getvalue()) / 1024:.0f} KB: first start '
              f'{first:.0f} s, {first / count * os.cpu_count() / one:.2f} times one image {1e3 * one:.1f} ms on '
              f'{os.cpu_count()} cores; second start {second:.2f} s, to the first batch '
              f'{now() - started:.2f} s')


def bench_search(options, n=60502, d=512):
    """All of retrieval_metrics on a test set as large as SOP's against the bare matrix product."""
    device = common.pick_device(options.device)
    y = torch.arange(n) // 5
    centres = torch.randn(int(y.max()) + 1, d)
    z = F.normalize(centres[y] + 2 * torch.randn(n, d), dim=1).to(device)

    def product():
        for rows in z.split(4096):
            rows @ z.T
    for ks in ((1, 2, 4, 8), (1, 10, 100, 1000)):
        metrics = partial(common.retrieval_metrics, z, y, ks=ks)
        more = more_memory(metrics, device)
        took = in_turn(dict(metrics=metrics, product=product), 1)
        print(f'search: {n:,} x {d}, K up to {ks[-1]}: metrics {took["metrics"]:.1f} s, one product '
              f'{took["product"]:.1f} s, ratio {took["metrics"] / took["product"]:.2f}; {more:.1f} GB more memory')


def bench_metrix(options):
    """Steps without and with mixing, in turn; on a GPU also the memory that the first step of each takes"""
    works, more, data = {}, {}, random_images(options, batches=2)
    for mixup in ('none', 'embed', 'feature'):
        args, step, optimizer = prepared(options, 'train_metrix', f'--freeze-bn --mixup {mixup}', data)
        crops = list(common.batches(data.train, [range(options.batch)], args.device, augment=args))
        works[mixup] = partial(train_on, crops, step, optimizer)
        more[mixup] = f', {more_memory(works[mixup], args.device):.2f} GB' if args.device.type == 'cuda' else ''
    took = in_turn(works, options.repeats)
    for mixup in works:
        print(f'metrix: {mixup:8} {options.arch}, {options.px} px, batch {options.batch:4}: {took[mixup]:.3f} s a step '
              f'({took[mixup] / took["none"]:.2f}){more[mixup]}', flush=True)


BENCHES = dict(loop=bench_loop, vectors=bench_vectors, losses=bench_losses, search=bench_search, decode=bench_decode,
               metrix=bench_metrix)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('what', nargs='*', metavar='NAME', choices=[*BENCHES, []], default=[])
    parser.add_argument('--arch', default='resnet50')
    parser.add_argument('--px', type=int, default=64)
    parser.add_argument('--batch', type=int, default=100)
    parser.add_argument('--repeats', type=int, default=3)
    parser.add_argument('--device', default='auto')
    parser.add_argument('--precision', default='auto')
    options = parser.parse_args()
    for name in options.what or BENCHES:
        BENCHES[name](options)


if __name__ == '__main__':
    main()
