"""Writes data/heads/train.npz and test.npz: the pooled features of CUB from the ResNet-50 before training, for `heads`.

    python tests/results/features.py
"""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np

import common


def main():
    device = common.pick_device('auto')
    data = common.load_dataset('cub', 'data')
    # The identity as head: embeddings are the pooled features, (N, 2048).
    model = common.Embedder('resnet50_v1', dim=None, weights='data/resnet50_v1.pth', head_init='identity',
                            normalize=False, precision=common.pick_precision('auto', device)).place(device)
    Path('data/heads').mkdir(exist_ok=True)
    for name, images in dict(train=data.train, test=data.query).items():
        with common.atomic_write(f'data/heads/{name}.npz') as file:
            np.savez(file, embeddings=common.embed(model, images).numpy(), labels=images.labels.numpy(),
                     classes=np.array(images.classes))


if __name__ == '__main__':
    common.cli(main)
