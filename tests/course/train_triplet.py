"""train_triplet.py -- triplet loss: an image should be nearer to its positives than to its negatives.

Musgrave, Belongie, Lim. A Metric Learning Reality Check. ECCV 2020. arXiv:2003.08505, Eq. (2); the loss is from
Weinberger, Blitzer, Saul. Distance Metric Learning for Large Margin Nearest Neighbor Classification. NIPS 2005 (Metrix
cites the longer version of Weinberger and Saul, JMLR 2009).

Equation
    Reality Check Eq. (2)
    L = [d_ap - d_an + m]_+
    for an anchor a, a positive p of its class and a negative n of another one; d are Euclidean distances.

This script is an exercise: in the starter code of handout.py, triplet_loss is stubbed out, and the script is next to
common.py. To run it here, add the directory of common.py to PYTHONPATH.

Run
    python train_triplet.py [--hardest]                 # offline, a few minutes on two CPU cores
"""
import argparse

import torch

import common


@common.loss            # inside, half precision becomes float32
def triplet_loss(z, y, margin=0.1, hardest=False):
    """Triplet loss on Euclidean distances, Reality Check Eq. (2), averaged over the triplets with non-zero loss.

    z        (B, D) L2-normalized embeddings
    y        (B,)   class labels, any integers
    margin   >= 0, m: the difference by which a negative should be farther from the anchor than the positive
    hardest  for each anchor and positive, use only the triplet with the nearest negative, instead of all triplets
    returns  scalar >= 0, the sum over all triplets of different images divided by the number of triplets with non-zero
             loss. If there is none, the loss and its gradient are 0. Finite for every batch
    """
    y = common.check_labels(y, len(z))
    d = torch.cdist(z, z, compute_mode='donot_use_mm_for_euclid_dist')              # (B, B)
    same = y[:, None] == y                                                          # (B, B)
    positive = same & ~torch.eye(len(y), dtype=torch.bool, device=y.device)
    if hardest:
        # An anchor without negatives has an infinite distance here, so its triplets have zero loss.
        d_an = d.masked_fill(same, float('inf')).amin(dim=1, keepdim=True)          # (B, 1)
        excess = d - d_an + margin                                                  # (B, B): a, p; Eq. (2)
        exists = positive
    else:
        excess = d[:, :, None] - d[:, None, :] + margin                             # (B, B, B): a, p, n; Eq. (2)
        exists = positive[:, :, None] & ~same[:, None, :]
    cost = excess.clamp_min(0).masked_fill(~exists, 0)                              # Reality Check Eq. (2)
    return cost.sum() / (cost > 0).sum().clamp_min(1)


# The recipes of train_contrastive.py, but always 4 or 5 images per class, because triplets need positives
SHAPES = dict(                 # what `python train_triplet.py` runs: ResNet-18 from scratch, 32 px
    arch='resnet18', weights='none', pool='avg+max', dim=128, freeze_bn=False,
    image_size=32, resize=32, min_crop=1.0,
    epochs=10, batch_size=128, per_class=4,
    optimizer='adamw', lr=2e-3, weight_decay=1e-4, schedule='cosine', freeze_epochs=0, clip=0.0,
    eval_every=10, precision='fp32')
CUB = dict(
    arch='resnet50', weights='imagenet', pool='avg+max', dim=512, freeze_bn=True,
    image_size=224, resize=256, min_crop=0.08,
    epochs=60, batch_size=100, per_class=5,
    optimizer='adam', lr=1e-4, weight_decay=1e-4, schedule='step', decay_epochs=10, decay_rate=0.1, freeze_epochs=5,
    clip=10.0)
DEFAULTS = {
    'shapes': SHAPES,
    'folder': SHAPES | common.FOLDER,
    'vectors': SHAPES | common.VECTORS,
    'cub': CUB,
    'cars': CUB,
    'sop': CUB | dict(freeze_bn=False, lr=3e-5, decay_rate=0.25),
    'inshop': CUB | dict(freeze_bn=False, decay_epochs=5, decay_rate=0.25, freeze_epochs=1),
}


def get_args(argv=None):
    parser = common.parser(__doc__, file=__file__)
    add = parser.add_argument_group('triplet').add_argument
    add('--margin', type=float, default=0.1, help='m, a distance')
    add('--hardest', action=argparse.BooleanOptionalAction, default=False,
        help='for each anchor and positive, use only the nearest negative')
    args = common.parse(parser, DEFAULTS, argv)
    common.require_pairs(args)
    return args


def main(argv=None):
    args = get_args(argv)
    common.set_seed(args.seed)
    data = common.dataset_from(args)
    model = common.build(args, data=data)
    optimizer = common.make_optimizer(args, [dict(params=model.parameters())])

    def step(images, labels):
        return triplet_loss(model(images), labels, args.margin, args.hardest)

    return common.train(args, model, data, step, optimizer)


if __name__ == '__main__':
    common.cli(main)
