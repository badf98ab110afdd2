"""What things cost, measured here and now. Not collected by pytest.

    python tests/bench.py                    all of them
    python tests/bench.py loop               the shared loop against a bare forward/backward/optimizer loop
    python tests/bench.py losses             loss time and value against pytorch-metric-learning, if installed
    python tests/bench.py search             60,502 x 512 against one plain matrix product
    python tests/bench.py decode             11,788 JPEG files of 500 x 375, as many as CUB has: first and second start
    python tests/bench.py metrix             steps of train_metrix.py against clean ones; --px 224 --batch 400
    python tests/bench.py hse                steps of train_hse.py against its baseline

Two things that are compared run in turn, several times, and the medians' ratio is printed: the machine may be busy with
other work. Memory is the most that was taken beyond what was there before; that of steps is measured on a GPU only.

Measured at commit 2abae0e, on two cores of a CPU that multiplies in bfloat16. A ratio is a time divided by that of what
stands behind 'to'.

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
from io import BytesIO
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.nn.functional as F
from PIL import Image

import common


def seconds(work, device=None):
    """Wall time of one call, the device's queue included."""
    if device is not None and device.type == 'cuda':
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    work()
    if device is not None and device.type == 'cuda':
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def in_turn(works, repeats, device=None):
    """{name: median seconds}; the works run in turn after one round of warming up."""
    for work in works.values():
        seconds(work, device)
    times = {name: [] for name in works}
    for _ in range(repeats):
        for name, work in works.items():
            times[name].append(seconds(work, device))
    return {name: statistics.median(values) for name, values in times.items()}


def peak_memory(reset=False, device=None):
    """Most memory that this process has held so far, or since the last reset, in GB: that of a CUDA device, if one is
    given, or else of the machine, on Linux only"""
    if device is not None and device.type == 'cuda':
        if reset:
            torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.max_memory_allocated(device) / 2 ** 30
    if sys.platform != 'linux':
        return float('nan')
    if reset:
        Path('/proc/self/clear_refs').write_text('5')
    return int(Path('/proc/self/status').read_text().split('VmHWM:')[1].split()[0]) / 2 ** 20


def network_flags(options):
    return ['--arch', options.arch, '--weights', 'none', '--image-size', str(options.px), '--resize', str(options.px),
            '--batch-size', str(options.batch), '--per-class', '5', '--dim', '512', '--device', options.device,
            '--precision', options.precision]


def random_images(options, batches=2):
    """Pictures of noise, 5 per class, enough for so many batches."""
    count = options.batch * batches
    pixels = torch.randint(0, 256, (count * options.px * options.px * 3,), dtype=torch.uint8).numpy()
    labels = torch.arange(count) // 5
    return common.Images(pixels, [(options.px, options.px)] * count, labels, options.px)


def bench_loop(options):
    """The shared loop (sampling, copying, cropping, checks) against steps on crops that lie ready."""
    import train_ms
    args = train_ms.get_args(network_flags(options))
    data = argparse.Namespace(train=random_images(options, batches=6))
    sampler = common.make_sampler(args, data.train.labels)
    ready = list(common.batches(data.train, sampler, args.device, augment=args))

    def setup():
        model = common.build(args)
        optimizer = common.make_optimizer(args, [dict(params=model.parameters())])
        step = lambda x, y: train_ms.multi_similarity_loss(model(x), y, epsilon=0.1)  # noqa: E731
        return optimizer, step, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)

    shared_optimizer, shared_step, schedule = setup()
    optimizer, step, _ = setup()

    def shared():
        run = argparse.Namespace(epoch=0, start=-1, total=10 ** 9)
        common.train_epoch(args, run, data, sampler, shared_step, shared_optimizer, schedule)

    def bare():
        for x, y in ready:
            loss = step(x, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    def loading():
        for _ in common.batches(data.train, sampler, args.device, augment=args):
            pass
    took = in_turn(dict(shared=shared, bare=bare, loading=loading), options.repeats, args.device)
    precision = common.pick_precision(args.precision, args.device)
    print(f'loop: {options.arch}, {options.px} px, batch {options.batch}, {precision}: shared '
          f'{took["shared"] / len(ready):.3f} s a step, bare on ready crops {took["bare"] / len(ready):.3f} s, ratio '
          f'{took["shared"] / took["bare"]:.3f}; crops alone take {took["loading"] / took["shared"]:.1%} of the time')


def bench_losses(options):
    """Value and time, forward and backward, on the same embeddings."""
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
            'multi-similarity': (lambda z, y: train_ms.multi_similarity_loss(z, y, epsilon=0.1),
                                 lambda z, y, ms=ms, miner=miner: ms(z, y, miner(z, y))),
            'proxy-anchor': (lambda z, y, p=proxies: train_proxy_anchor.proxy_anchor_loss(z, y, p), anchor),
            'proxynca++': (lambda z, y, p=proxies: train_proxynca_pp.proxynca_pp_loss(z, y, p), nca)}
        y = torch.arange(B, device=device) // 5
        noise, centres = torch.randn(B, D, device=device), torch.randn(C, D, device=device)
        z = F.normalize(3 * noise + centres[y], dim=1).requires_grad_()  # overlapping classes: every term is at work
        for name, (ours, theirs) in pairs.items():
            took = in_turn({'ours': lambda f=ours, z=z, y=y: f(z, y).backward(),
                            'theirs': lambda f=theirs, z=z, y=y: f(z, y).backward()}, 7 * options.repeats, device)
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
        first, started = seconds(load), time.perf_counter()
        data = load()
        second = time.perf_counter() - started
        next(common.batches(data.train, [list(range(100))], torch.device('cpu')))
        print(f'decode: {count:,} JPEG files of 500 x 375, {len(pictures[0].getvalue()) / 1024:.0f} KB: first start '
              f'{first:.0f} s, {first / count * os.cpu_count() / one:.2f} times one image {1e3 * one:.1f} ms on '
              f'{os.cpu_count()} cores; second start {second:.2f} s, to the first batch '
              f'{time.perf_counter() - started:.2f} s')


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
        before = peak_memory(True, device)
        common.retrieval_metrics(z, y, ks=ks)
        more = peak_memory(device=device) - before
        took = in_turn({'metrics': lambda ks=ks: common.retrieval_metrics(z, y, ks=ks), 'product': product}, 1, device)
        print(f'search: {n:,} x {d}, K up to {ks[-1]}: metrics {took["metrics"]:.1f} s, one product '
              f'{took["product"]:.1f} s, ratio {took["metrics"] / took["product"]:.2f}; {more:.1f} GB more memory')


def script_step(options, kind):
    """The step closure that a script's main() would hand to the loop, and its optimizer."""
    name, _, variant = kind.partition(':')
    captured = {}

    def capture(args, model, data, step, optimizer, learned=None, sampler=None):
        captured.update(args=args, step=step, optimizer=optimizer)
    flags = dict(metrix=['--mixup', variant], hse=['--alpha', '0' if variant == 'baseline' else '0.1'])[name]
    images = random_images(options)
    data = argparse.Namespace(train=images, query=images, gallery=images, name='shapes')
    with mock.patch.multiple(common, train=capture, dataset_from=lambda args: data):
        __import__(f'train_{name}').main(network_flags(options) + ['--freeze-bn', *flags])
    indices = list(range(options.batch))
    x, y = next(common.batches(images, [indices], captured['args'].device, augment=captured['args']))

    def step():
        loss = captured['step'](x, y)
        captured['optimizer'].zero_grad()
        loss.backward()
        captured['optimizer'].step()
    return step, captured['args'].device


def bench_steps(options, kinds):
    """Steps of several kinds, in turn; on a GPU also the memory that the first step of each takes"""
    works, more = {}, {}
    for kind in kinds:
        works[kind], device = script_step(options, kind)
        before = peak_memory(True, device)
        works[kind]()
        more[kind] = f', {peak_memory(device=device) - before:.2f} GB' if device.type == 'cuda' else ''
    took = in_turn(works, options.repeats, device)
    for kind in kinds:
        print(f'{kind:16} {options.arch}, {options.px} px, batch {options.batch:4}: {took[kind]:.3f} s a step '
              f'({took[kind] / took[kinds[0]]:.2f}){more[kind]}', flush=True)


BENCHES = dict(loop=bench_loop, losses=bench_losses, search=bench_search, decode=bench_decode,
               metrix=partial(bench_steps, kinds=['metrix:none', 'metrix:embed', 'metrix:feature']),
               hse=partial(bench_steps, kinds=['hse:baseline', 'hse:hybrids']))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('what', nargs='*', choices=[*BENCHES, []], default=[])
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
