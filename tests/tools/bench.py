"""Benchmarks: time and memory, compared with goals. Not collected by pytest.

    python tests/tools/bench.py              all benchmarks, some minutes; about one minute with --quick
    python tests/tools/bench.py loop         the shared loop against a bare forward/backward/optimizer loop
    python tests/tools/bench.py vectors      the same on precomputed features of dimension 512
    python tests/tools/bench.py losses       losses against pytorch-metric-learning, if installed
    python tests/tools/bench.py search       all metrics against one matrix product, and against pytorch-metric-learning
    python tests/tools/bench.py query        eval.py --query with saved embeddings of 8,000 images
    python tests/tools/bench.py files        the DataLoader on JPEG files of 500 x 375, as in CUB, against decoding
    python tests/tools/bench.py metrix       steps of train_metrix.py against clean ones; --px 224 --batch 400

Two functions that are compared run in turn, several times, since the machine may be busy with other work, and the ratio
of their median times is printed. Memory is the increase of the peak; for steps it is measured only on a GPU. The exit
code is 1 if a goal is missed by more than 10%.
"""
import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import torch.nn.functional as F
from PIL import Image

import common

MISSED = []


def report(what, value, goal=None, more=''):
    """Prints a line of the table: a ratio or seconds, and the goal, an upper limit."""
    text = '' if goal is None else f'goal {goal:.2f}'
    if goal is not None and value > 1.1 * goal:
        MISSED.append(what)
        text += ', missed'
    print(f'{what:72} {value:6.2f}  {text:17} {more}', flush=True)


def now():
    """Time in seconds, after the GPU has finished its work"""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def seconds(work):
    start = now()
    work()
    return now() - start


def in_turn(works, repeats):
    """{name: median seconds}; the functions run in turn, after a first round that is not counted."""
    rounds = [{name: seconds(work) for name, work in works.items()} for _ in range(repeats + 1)]
    return {name: statistics.median(times[name] for times in rounds[1:]) for name in works}


def more_memory(work, device):
    """Increase of peak memory by a call, in GB: of a GPU, or of the machine (only on Linux)"""
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
    """A dataset of noise images, 5 per class, enough for this number of batches"""
    count = options.batch * batches
    pixels = torch.randint(0, 256, (count, options.px, options.px, 3), dtype=torch.uint8).numpy()
    images = common.Images(list(pixels), torch.arange(count) // 5,
                           train_transform=common.make_train_transform(options.px))
    return common.Dataset('shapes', images, images)


def prepared(options, script, flags, data):
    """The flags, the step function and the optimizer that a script's main() passes to the training loop"""
    flags = f'{flags} --batch-size {options.batch} --per-class 5 --dim 512 --device {options.device}'.split()
    if data.name != 'vectors':
        flags += (f'--arch {options.arch} --weights none --image-size {options.px} --resize {options.px} '
                  f'--precision {options.precision}').split()
    with mock.patch.object(common, 'train') as train, mock.patch.object(common, 'dataset_from', return_value=data):
        import_module(script).main(flags)
    args, _, _, step, optimizer, *_ = train.call_args.args
    return args, step, optimizer


def train_on(batches, step, optimizer):
    """A minimal training loop"""
    for x, y in batches:
        loss = step(x, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def bench_vectors(options):
    """The training loop on precomputed features, where steps are short, so that its overhead shows"""
    labels = torch.arange(60 * options.batch) // 5
    vectors = common.Images(torch.randn(len(labels), 512), labels)
    data = common.Dataset('vectors', vectors, vectors)
    time_loop(options, data, '--dataset vectors', f'features of dimension 512, batch {options.batch}', None)


def bench_loop(options):
    """The training loop (sampling, cropping, checks) against steps on crops that are in memory."""
    options = argparse.Namespace(**vars(options) | dict(arch='resnet18'))
    precision = common.pick_precision(options.precision, common.pick_device(options.device))
    time_loop(options, random_images(options, batches=2 if options.quick else 6), '',
              f'{options.arch}, {options.px} px, batch {options.batch}, {precision}', 1.03)


def time_loop(options, data, flags, what, goal):
    args, *trained = prepared(options, 'train_ms', flags, data)
    _, *trained_bare = prepared(options, 'train_ms', flags, data)
    args.schedule = 'constant'
    loader, steps = loader_of(data.train, options)
    loader.batch_sampler.start(1, steps)
    ready = [[part.to(args.device) for part in batch] for batch in loader]

    def shared():
        with mock.patch.object(common, 'show_progress'):
            common.train_epoch(args, loader, *trained, epoch=1, steps=steps, total=10 ** 9)
    works = dict(shared=shared, bare=partial(train_on, ready, *trained_bare), loading=loading(data.train, options))
    took = in_turn(works, options.repeats)
    report(f'loop / loop on batches in memory: {what}', took['shared'] / took['bare'], goal,
           f'{1e3 * took["shared"] / len(ready):.2f} ms a step; making batches {took["loading"] / took["shared"]:.1%}')


def bench_losses(options):
    """Value and time of forward and backward, on the same embeddings. These are not normalized, and our time includes
    normalization, since the losses of the other library include it."""
    if not find_spec('pytorch_metric_learning'):
        print('losses: pytorch-metric-learning is not installed; pip install pytorch-metric-learning')
        return
    sys.path[:0] = [str(Path(__file__).parents[1] / name) for name in ('', 'papers')]
    from test_oracle import compared
    device, D = common.pick_device(options.device), 512
    sizes = [(100, 100), (500, 100)] if options.quick else [(100, 100), (500, 100), (100, 11318), (500, 11318)]
    for B, C in sizes:
        torch.manual_seed(0)
        p = torch.randn(C, D, device=device, requires_grad=True)
        y = torch.arange(B, device=device) // 5
        noise, centres = torch.randn(B, D, device=device), torch.randn(C, D, device=device)
        z = (3 * noise + centres[y]).requires_grad_()       # overlapping classes: no term is 0
        for name in ('contrastive', 'ms with miner', 'proxy_anchor', 'proxynca_pp', 'ccl, CosFace'):
            loss, theirs = compared(C, D)[name]
            ours = partial(lambda loss, z, y, p: loss(F.normalize(z, dim=1), y, p), loss)
            took = in_turn({'ours': lambda f=ours, z=z, y=y, p=p: f(z, y, p).backward(),
                            'theirs': lambda f=theirs, z=z, y=y, p=p: f(z, y, p).backward()}, 7 * options.repeats)
            report(f'{name} / pytorch-metric-learning, B {B}, C {C:,}', took['ours'] / took['theirs'], 0.8,
                   f'{1e3 * took["ours"]:.2f} ms; values {ours(z, y, p).item():.6f} {theirs(z, y, p).item():.6f}')


def bench_files(options):
    """An epoch of training crops from JPEG files, without training, against only decoding the files on all cores"""
    count = 300 if options.quick else 3000
    with tempfile.TemporaryDirectory() as folder:
        images = []
        for noise in torch.rand(40, 3, 24, 32):
            pixels = 255 * F.interpolate(noise[None], (375, 500), mode='bicubic')[0].clamp(0, 1)
            images.append(Image.fromarray(pixels.byte().permute(1, 2, 0).numpy()))
        for i in range(count):
            path = Path(folder) / f'{i * 40 // count:03}' / f'{i}.jpg'
            path.parent.mkdir(exist_ok=True)
            images[i % 40].save(path, quality=95)
        train = common.load_dataset('folder', folder, 256, 224).train
        decoding = statistics.median(seconds(lambda path=path: common.to_rgb(path)) for path in train.paths[:50])
        took = statistics.median(seconds(loading(train, options)) for _ in range(options.repeats))
        report(f'crops of 224 px from {len(train):,} JPEG files of 500 x 375 / only decoding',
               took / len(train) * os.cpu_count() / decoding, None, f'{len(train) / took:.0f} images a second')


def loading(train, options):
    """A function that only loads the batches of an epoch"""
    loader, steps = loader_of(train, options)

    def load():
        loader.batch_sampler.start(1, steps)
        for _ in loader:
            pass
    load()                                          # worker processes start
    return load


def loader_of(train, options):
    """The DataLoader of a training set, and the range of steps of an epoch"""
    sampler = common.BalancedSampler(train.labels, options.batch, per_class=5)
    loader = common.make_loader(train, common.StepBatches(sampler, seed=0), common.pick_device(options.device))
    return loader, range(len(sampler))


def bench_search(options):
    """retrieval_metrics on test sets up to the size of SOP against one matrix product, and on a small one against the
    calculator of pytorch-metric-learning"""
    device = common.pick_device(options.device)

    def clustered(n, per_class, d=128):
        y = torch.arange(n) // per_class
        centres = torch.randn(int(y.max()) + 1, d)
        return F.normalize(centres[y] + 2 * torch.randn(n, d), dim=1).to(device), y.to(device)

    for n in (6000,) if options.quick else (6000, 20000, 60502):
        z, y = clustered(n, 5)

        def product(z=z):
            for block in z.split(4096):
                block @ z.T
        for ks in ((1, 2, 4, 8), (1, 10, 100, 1000)):
            metrics = partial(common.retrieval_metrics, z, y, ks=ks)
            more = more_memory(metrics, device)
            took = in_turn(dict(metrics=metrics, product=product), 1 if n > 20000 else options.repeats)
            report(f'metrics of {n:,} x 128, K up to {ks[-1]} / one matrix product', took['metrics'] / took['product'],
                   1.2 if n > 60000 else None, f'{took["metrics"]:.2f} s; {more:.1f} GB more memory')
    try:
        from pytorch_metric_learning.utils.accuracy_calculator import AccuracyCalculator
    except ImportError as error:
        print(f'the calculator of pytorch-metric-learning is not compared: {error}')
        return
    z, y = clustered(6000, 50)
    calculator = AccuracyCalculator(('precision_at_1', 'r_precision', 'mean_average_precision_at_r'), k='max_bin_count')
    took = in_turn(dict(ours=lambda: common.retrieval_metrics(z, y), theirs=lambda: calculator.get_accuracy(z, y)),
                   options.repeats)
    report('metrics of 6,000 x 128, K up to 8 / pytorch-metric-learning', took['ours'] / took['theirs'], 0.8,
           f'{took["ours"]:.2f} s')


def bench_query(options):
    """Total time of eval.py --query with saved embeddings"""
    root = Path(__file__).parents[2]
    with tempfile.TemporaryDirectory() as folder:
        for i in range(8000):
            path = Path(folder) / 'images' / f'{i // 100:03}' / f'{i}.ppm'
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b'P6 17 17 255\n' + os.urandom(3 * 17 * 17))

        def start(script, flags):
            subprocess.run([sys.executable, str(root / script), *flags.split()], cwd=folder, check=True,
                           stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        start('train_ms.py', '--dataset folder --data images --image-size 17 --steps 1 --epochs 1 --name x')
        start('eval.py', '--checkpoint runs/x --whole --embed x.npz')
        query = partial(start, 'eval.py', '--checkpoint runs/x --data x.npz --query images/000/0.ppm')
        took = in_turn(dict(query=query), options.repeats)
        report('eval.py --query with saved embeddings of 8,000 images, seconds', took['query'], 4.0)


def bench_metrix(options):
    """Steps without and with mixup, in turn; on a GPU also the memory of the first step of each"""
    data = random_images(options, batches=2)
    for loss in ('ms', 'proxy_anchor'):
        works, more = {}, {}
        for mixup in ('none', 'embed', 'feature'):
            flags = f'--freeze-bn --loss {loss} --mixup {mixup}'
            args, step, optimizer = prepared(options, 'train_metrix', flags, data)
            loader, _ = loader_of(data.train, options)
            loader.batch_sampler.start(1, range(1))
            crops = [[part.to(args.device) for part in batch] for batch in loader]
            works[mixup] = partial(train_on, crops, step, optimizer)
            more[mixup] = f', {more_memory(works[mixup], args.device):.2f} GB' if args.device.type == 'cuda' else ''
        took = in_turn(works, options.repeats)
        for mixup in ('embed', 'feature'):
            report(f'{loss}, {mixup} mixup / clean step, {options.arch}, {options.px} px, B {options.batch}',
                   took[mixup] / took['none'], 1.5, f'{took[mixup]:.3f} s{more[mixup]}')


BENCHES = dict(loop=bench_loop, vectors=bench_vectors, losses=bench_losses, search=bench_search, query=bench_query,
               files=bench_files, metrix=bench_metrix)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('what', nargs='*', metavar='NAME', choices=[*BENCHES, []], default=[])
    parser.add_argument('--arch', default='resnet50')
    parser.add_argument('--px', type=int, default=64)
    parser.add_argument('--batch', type=int, default=100)
    parser.add_argument('--repeats', type=int, default=3)
    parser.add_argument('--quick', action='store_true')
    parser.add_argument('--device', default='auto')
    parser.add_argument('--precision', default='auto')
    options = parser.parse_args()
    if options.quick:
        options.repeats = 1
    for name in options.what or BENCHES:
        BENCHES[name](options)
    if MISSED:
        print(f'{len(MISSED)} goals are missed by more than 10%')
    return int(bool(MISSED))


if __name__ == '__main__':
    sys.exit(main())
