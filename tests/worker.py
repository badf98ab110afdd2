"""One process of test_processes.py: all seven scripts on a small network.

Started as torchrun starts a script, with RANK and WORLD_SIZE in the environment; without them it is the only process.
Ten updates in float64, as runs/<script>; one step of plain gradient descent in float32, as runs/<script>-step; and
runs/patience, in which each process measures something else.
"""
import os
import sys

import torch
from conftest import SCRIPTS, SmallNet

import common
import train_ms

# Batches of 9 images are not shared evenly by two processes.
SHARED = ('--dataset folder --device cpu --precision fp32 --image-size 32 --dim 16 --freeze-bn --batch-size 9 '
          '--per-class 3 --eval-every 2 --data').split()
FLAGS = {'train_ms': '--epsilon off', 'train_ccl': '--dropout 0.2', 'train_hse': '--loss epshn --hybrids append',
         'train_metrix': '--loss proxy_anchor --mixup input feature embed'}


def main(data):
    common.load_resnet = lambda arch, weights: SmallNet()
    for script in SCRIPTS:
        flags = [*SHARED, data, *FLAGS.get(script, '').split()]
        for dtype, more in ((torch.float64, f'--steps 10 --lr 1e-3 --name {script}'),
                            (torch.float32, f'--steps 1 --optimizer sgd --lr 1 --name {script}-step')):
            torch.set_default_dtype(dtype)
            __import__(script).main([*flags, *more.split()])
    measure = common.evaluate
    others_gain = 10.0 * int(os.environ.get('RANK', 0))     # from epoch to epoch, so their patience would not end
    common.evaluate = lambda model, data: measure(model, data) | {'MAP@R': 1.0 + others_gain * next(epochs)}
    epochs = iter(range(100))
    train_ms.main([*SHARED, data, *'--epochs 9 --fold 0/3 --patience 1 --batch-size 6 --name patience'.split()])


if __name__ == '__main__':
    main(sys.argv[1])
    if common.world() > 1:
        torch.distributed.destroy_process_group()
