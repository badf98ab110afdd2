"""Benchmarks of speed and memory. Not collected by pytest.

    python tests/tools/bench.py               all of them; about two minutes with --quick
    python tests/tools/bench.py steps         a step of each script against the same network without a loss, the floor
    python tests/tools/bench.py loop          the shared loop against steps on batches in memory
    python tests/tools/bench.py files         loading crops of JPEG files of 500 x 375, as in CUB, against decoding them

What is compared runs in turn, several times, since the machine may be busy with other work, and the ratio of the median
times is printed. The backbone runs in bfloat16 where the hardware multiplies it, as on a benchmark. On a GPU: --arch
resnet50 --px 224, with and without --compile.
"""
import argparse
import os
import statistics
import sys
import tempfile
import time
from functools import partial
from importlib import import_module
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import torch.nn.functional as F
from PIL import Image

import common

SCRIPTS = ['train_contrastive', 'train_ms', 'train_proxy_anchor', 'train_proxynca_pp', 'train_ccl',
           'train_metrix --mixup none', 'train_metrix --mixup embed', 'train_metrix --mixup feature',
           'train_hse --alpha 0', 'train_hse']


def seconds(work):
    """Time of a call, with the work of the GPU"""
    def now():
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter()
    start = now()
    work()
    return now() - start


def in_turn(works, repeats):
    """{name: median seconds}; the functions run in turn, after a first round that is not counted."""
    rounds = [{name: seconds(work) for name, work in works.items()} for _ in range(repeats + 1)]
    return {name: statistics.median(times[name] for times in rounds[1:]) for name in works}


def random_data(options, batches):
    """Noise images, 4 per class, enough for this number of batches"""
    count = options.batch * batches
    pixels = torch.randint(0, 256, (count, options.px, options.px, 3), dtype=torch.uint8).numpy()
    images = common.Images(list(pixels), torch.arange(count) // 4,
                           train_transform=common.make_train_transform(options.px))
    return common.Splits('shapes', images, images)


def prepared(options, script, data):
    """What main() of a script passes to the training loop: args, model, step, optimizer, sampler"""
    script, *flags = script.split()
    flags += (f'--arch {options.arch} --weights none --image-size {options.px} --resize {options.px} --dim 512 '
              f'--batch-size {options.batch} --per-class 4 --freeze-bn --precision auto '
              f'--device {options.device}').split()
    flags += ['--compile'] * options.compile
    with mock.patch.object(common, 'train') as train, mock.patch.object(common, 'dataset_from', return_value=data):
        import_module(script).main(flags)
    args, model, _, step, optimizer, *_ = train.call_args.args
    return args, model, step, optimizer, train.call_args.kwargs.get('sampler')


def loader_of(args, data, sampler):
    """A started DataLoader of an epoch, and its steps"""
    sampler = sampler or common.make_sampler(args, data.train.labels)
    loader = common.make_loader(data.train, common.StepBatches(sampler, 0), args.device)
    steps = range(len(sampler))
    loader.batch_sampler.steps = steps
    return loader, steps


def train_on(batches, step, optimizer):
    for x, y in batches:
        loss = step(x, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def bench_steps(options):
    data = random_data(options, batches=1)
    for script in SCRIPTS:
        args, model, step, optimizer, sampler = prepared(options, script, data)
        loader, _ = loader_of(args, data, sampler)
        batch = [[part.to(args.device) for part in batch] for batch in loader][:1]
        works = dict(step=partial(train_on, batch, step, optimizer),
                     floor=partial(train_on, batch, lambda x, y, model=model: model(x).sum(), optimizer))
        took = in_turn(works, options.repeats)
        speed = len(batch[0][1]) / took['step']
        print(f'{script:28} step / floor {took["step"] / took["floor"]:.3f}, {speed:.0f} images a second '
              f'({options.arch}, {options.px} px, batch {options.batch}, {model.precision})', flush=True)


def bench_loop(options):
    data = random_data(options, batches=2 if options.quick else 6)
    args, _, step, optimizer, _ = prepared(options, 'train_ms', data)
    loader, steps = loader_of(args, data, None)
    ready = [[part.to(args.device) for part in batch] for batch in loader]

    def shared():
        common.train_epoch(args, loader, step, optimizer, 1, steps, 10 ** 9)
    took = in_turn(dict(shared=shared, bare=lambda: train_on(ready, step, optimizer)), options.repeats)
    print(f'loop / steps on batches in memory: {took["shared"] / took["bare"]:.2f}')


def bench_files(options):
    count = 300 if options.quick else 3000
    with tempfile.TemporaryDirectory() as folder:
        noise = 255 * F.interpolate(torch.rand(40, 3, 24, 32), (375, 500), mode='bicubic').clamp(0, 1)
        for i in range(count):
            path = Path(folder, f'{i * 40 // count:03}', f'{i}.jpg')
            path.parent.mkdir(exist_ok=True)
            Image.fromarray(noise[i % 40].byte().permute(1, 2, 0).numpy()).save(path, quality=95)
        data = common.load_dataset('folder', folder)
        args = argparse.Namespace(per_class=5, batch_size=100, device=common.pick_device(options.device))
        decoding = statistics.median(seconds(lambda path=path: common.to_rgb(path)) for path in data.train.paths[:50])
        loader, steps = loader_of(args, data, None)

        def load():
            return len([batch for batch in loader])
        took = in_turn(dict(load=load), options.repeats)['load'] / (100 * len(steps))
        print(f'crops of 224 px from JPEG files of 500 x 375 / only decoding: {took * os.cpu_count() / decoding:.2f}, '
              f'{1 / took:.0f} images a second')


BENCHES = dict(steps=bench_steps, loop=bench_loop, files=bench_files)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('what', nargs='*', metavar='NAME', choices=[*BENCHES, []], default=[])
    parser.add_argument('--arch', default='resnet18')
    parser.add_argument('--px', type=int, default=64)
    parser.add_argument('--batch', type=int, default=100)
    parser.add_argument('--repeats', type=int, default=5)
    parser.add_argument('--quick', action='store_true')
    parser.add_argument('--compile', action='store_true')
    parser.add_argument('--device', default='auto')
    options = parser.parse_args()
    if options.quick:
        options.repeats = 2
    for name in options.what or BENCHES:
        BENCHES[name](options)


if __name__ == '__main__':
    main()
