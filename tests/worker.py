"""Work for processes of their own, which start from one that has imported torch, in a fraction of a second.

torchrun would start them with RANK and WORLD_SIZE in the environment; here the test does.
"""
import multiprocessing
import os
import socket
import sys
import time
from functools import partial
from pathlib import Path
from threading import Thread

import torch

# Batches of 9 images are not shared evenly by two processes.
SHARED = ('--dataset folder --device cpu --precision fp32 --image-size 32 --dim 16 --freeze-bn --batch-size 9 '
          '--per-class 3 --eval-every 2 --data').split()
FLAGS = {'train_ms': '--epsilon off', 'train_ccl': '--dropout 0.2', 'train_hse': '--loss epshn --hybrids append',
         'train_metrix': '--loss proxy_anchor --mixup input feature embed'}

fresh = multiprocessing.get_context('forkserver')
fresh.set_forkserver_preload(['worker', 'scipy.io', 'torchvision.transforms.v2'])


def start(work, *args, where, size=1):
    """Starts `size` processes in the folder `where`, which write to output-<rank> there, and work(*args)."""
    with socket.socket() as probe:
        probe.bind(('127.0.0.1', 0))
        port = probe.getsockname()[1]
    variables = [dict(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR='127.0.0.1',
                      MASTER_PORT=str(port)) for rank in range(size)]
    processes = [fresh.Process(target=run, args=(Path(where), each, work, *args)) for each in variables]
    for process in processes:
        process.start()
    return processes


def run(where, variables, work, *args):
    os.environ.update(variables)
    os.chdir(where)
    torch.set_num_threads(1)
    sys.stdout = sys.stderr = open(f'output-{variables["RANK"]}', 'w', buffering=1)
    work(*args)
    if torch.distributed.is_initialized():                  # as cli does; gloo's threads may end in an error without it
        torch.distributed.destroy_process_group()


def finish(processes, where):
    """Waits for them, two minutes at most -> what each has printed"""
    end = time.time() + 120
    for process in processes:
        process.join(max(0, end - time.time()))
        process.kill()
        process.join()
    outputs = [Path(where, f'output-{rank}').read_text() for rank in range(len(processes))]
    assert not any(process.exitcode for process in processes), '\n'.join(outputs)
    return outputs


def train_all(data):
    """Seven scripts on a small network: four updates in float64, as runs/<script>; a step of plain gradient descent in
    float32, as runs/<script>-step; and without a name runs/ms-folder-1, for which each process measures something else.
    """
    from conftest import SCRIPTS, SmallNet

    import common
    import train_ms
    common.load_resnet = lambda arch, weights: SmallNet()
    for script in SCRIPTS:
        flags = [*SHARED, data, *FLAGS.get(script, '').split()]
        for dtype, more in ((torch.float64, f'--steps 4 --lr 1e-3 --name {script}'),
                            (torch.float32, f'--steps 1 --optimizer sgd --lr 1 --name {script}-step')):
            torch.set_default_dtype(dtype)
            __import__(script).main([*flags, *more.split()])
    measure = common.evaluate
    others_gain = 10.0 * int(os.environ['RANK'])            # from epoch to epoch, so their patience would not end
    common.evaluate = lambda model, data: measure(model, data) | {'MAP@R': 1.0 + others_gain * next(epochs)}
    epochs = iter(range(100))
    train_ms.main([*SHARED, data, *'--epochs 9 --fold 0/3 --patience 1 --batch-size 6'.split()])


def share_two_images():
    """Three processes: the last one has none of the images, and the same loss and gradients."""
    import common
    common.join_processes(torch.device('cpu'))
    x, weight = torch.arange(6.).view(2, 3), torch.ones(3, 4, requires_grad=True)
    f = common.gather(x.tensor_split(3)[common.rank()] @ weight, 2)
    f.pow(2).sum().backward()
    common.average_gradients([weight])
    assert torch.equal(f, x @ weight), f
    assert torch.equal(weight.grad, 2 * x.T @ x @ weight), weight.grad


def load(*args, **named):
    import common
    print(len(common.load_dataset(*args, **named).train))


def print_to_a_reader_that_leaves(flags):
    """The reader reads up to the first row, at a terminal that lacks letters."""
    import common
    import train_ms
    end, sys.stdout = (open(number, mode, encoding='ascii') for number, mode in zip(os.pipe(), 'rw'))

    def read():
        while end.readline().split()[:2] != ['0', '-']:
            pass
        end.close()
    Thread(target=read).start()
    try:
        common.cli(partial(train_ms.main, flags))
    except SystemExit as stop:
        assert stop.code == 2


def import_all(names):
    """Importing has no effect: no output, no file, no CUDA, no seed, and no reading of the command line."""
    import random
    random.seed(1)
    before, sys.argv = random.getstate(), ['x', '--nonsense']
    for name in names:
        __import__(name)
    assert random.getstate() == before and not torch.cuda.is_initialized()
