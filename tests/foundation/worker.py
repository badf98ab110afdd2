"""Functions for separate processes, which are forked from a server that has imported torch: this saves seconds."""
import multiprocessing
import os
import random
import socket
import sys
from functools import partial
from pathlib import Path

import torch
import torchvision

SHARED = ('--dataset folder --device cpu --precision fp32 --image-size 32 --dim 16 --freeze-bn --batch-size 8 '
          '--per-class 2 --eval-every 2 --workers 0 --data').split()
FLAGS = {'train_ms': '--epsilon off', 'train_ccl': '--dropout 0.2', 'train_hse': '--loss epshn --hybrids append',
         'train_metrix': '--loss proxy_anchor --mixup input feature embed'}

fresh = multiprocessing.get_context('forkserver')
fresh.set_forkserver_preload(['worker', 'scipy.io', 'torchvision.transforms.v2'])


def start(work, *args, where, size=1):
    """Starts `size` processes in the folder `where`, as torchrun would. They call work(*args), and print to files."""
    with socket.socket() as probe:
        probe.bind(('127.0.0.1', 0))
        variables = dict(TORCHELASTIC_RUN_ID='none', WORLD_SIZE=str(size), MASTER_ADDR='127.0.0.1',
                         MASTER_PORT=str(probe.getsockname()[1]))
    processes = [fresh.Process(target=run, args=(where, rank, variables, work, *args)) for rank in range(size)]
    for process in processes:
        process.start()
    return processes


def run(where, rank, variables, work, *args):
    os.environ.update(variables, RANK=str(rank), LOCAL_RANK=str(rank))
    os.chdir(where)
    torch.set_num_threads(1)
    sys.stdout = sys.stderr = open(f'output-{rank}', 'w', buffering=1)
    work(*args)


def finish(processes, where):
    """Waits for the processes, at most two minutes for each -> the output of each"""
    for process in processes:
        process.join(120)
        process.kill()
    outputs = [Path(where, f'output-{rank}').read_text() for rank in range(len(processes))]
    assert all(process.exitcode == 0 for process in processes), '\n'.join(outputs)
    return outputs


def train_all(data):
    """Runs all scripts on a small network, four steps of plain gradient descent in float64, as runs/<script>; and
    runs/ms-folder-1, in which each process computes a different MAP@R."""
    from conftest import SCRIPTS, SmallNet

    import common
    import train_ms
    features, evaluate = common.Embedder.features, common.evaluate
    torchvision.models.get_model = lambda arch, weights=None: SmallNet()
    torch.set_default_dtype(torch.float64)
    common.Embedder.features = lambda model, x: features(model, x.double())
    for script in SCRIPTS:
        flags = f'--steps 4 --optimizer sgd --lr 0.01 --name {script} {FLAGS.get(script, "")}'
        __import__(script).main([*SHARED, data, *flags.split()])
    # If each process used its own MAP@R, which rises in each epoch of the second, that one would not stop early.
    epochs, increase = iter(range(100)), 10.0 * int(os.environ['RANK'])
    common.evaluate = lambda model, data: evaluate(model, data) | {'MAP@R': 1.0 + increase * next(epochs)}
    common.cli(partial(train_ms.main, [*SHARED, data, *'--epochs 9 --fold 0/3 --patience 1 --batch-size 6'.split()]))
    assert not torch.distributed.is_initialized(), "gloo's threads may end in an error then"


def import_all(names):
    """Importing has no effect: no output, no file, no CUDA, no seed, and the command line is not parsed."""
    random.seed(1)
    torch.manual_seed(1)
    before, sys.argv = (random.getstate(), torch.get_rng_state().tolist()), ['x', '--nonsense']
    for name in names:
        __import__(name)
    assert (random.getstate(), torch.get_rng_state().tolist()) == before and not torch.cuda.is_initialized()
