"""eval.py -- evaluates a checkpoint: Recall@K, R-precision, MAP@R, and how its embeddings are spread.

The metrics and their rules are explained at common.retrieval_metrics. They are in percent. The last
line that is printed is one JSON object, for programs.

Of a folder, all classes are evaluated except those of the network's own training and validation set, whose
names the checkpoint holds. If the folder has train/ and test/ (or query/ and gallery/), only test/ is evaluated.

--analyse adds three measures that Metrix reports in Section 4.3 (Venkataramanan et al., ICLR 2022).
For each of them, lower is better.
    alignment    mean squared distance of two test images of one class           (Wang and Isola, 2020)
    uniformity   log of the mean of exp(-2 d^2) over all pairs of test images    (Wang and Isola, 2020)
    utilization  mean squared distance of a test image to the nearest training image, Metrix Eq. (12)

Run
    python eval.py --checkpoint runs/ms-shapes-1/last.pt
    python eval.py --checkpoint runs/ms-cub-1 --data /elsewhere --analyse
    python eval.py --checkpoint runs/ms-cub-1 --dataset folder --data my_photos
"""
import argparse
import json
from functools import partial
from pathlib import Path

import torch.nn.functional as F

import common


def alignment(z, y):
    """Mean squared distance of all positive pairs.  z (N, D), y (N,) -> float from 0 to 4"""
    return 2 - 2 * common.mean_similarities(z, y)[0]


def uniformity(z, t=2.0):
    """log of the mean of exp(-t d^2) over all pairs of different images.  z (N, D) -> float from -4 t to 0

    Rows of z are taken in chunks, so that the (N, N) matrix never exists as a whole.
    """
    z = F.normalize(z.double(), dim=1)
    total = sum((2 * t * (rows @ z.T - 1)).exp().sum() for rows in z.split(1024))      # d^2 = 2 - 2 s
    # Of these pairs, N are an image with itself: d = 0, which adds exp(0) = 1 for each.
    return ((total - len(z)) / (len(z) * (len(z) - 1))).log().item()


def utilization(queries, examples):
    """Metrix Eq. (12): mean over the queries of the squared distance to the nearest example.

    u(Q, X) = 1/|Q| sum_{q in Q} min_{x in X} || f(q) - f(x) ||^2.  queries (Q, D), examples (X, D) -> float, 0 to 4
    Here X are the clean training images; train_metrix.py --analyse adds mixed ones.
    """
    queries, examples = F.normalize(queries.float(), dim=1), F.normalize(examples.float(), dim=1)
    nearest = common.searcher(examples)(queries, 1)[0]                                  # (Q, 1) cosines
    return (2 - 2 * nearest).clamp(min=0).mean().item()                                 # Metrix Eq. (12)


def get_args(argv=None):
    parser = common.Parser(prog='eval.py', description=__doc__, allow_abbrev=False,
                           formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add('--checkpoint', type=Path, required=True, help='a file, or a run folder: its best.pt or else last.pt')
    add('--dataset', choices=list(common.DATASETS), help='if not given, that of the training')
    add('--data', help='its folder; if not given, that of the training')
    add('--cache', type=Path, default=Path('cache'), help='folder for decoded images')
    add('--analyse', action='store_true', help='alignment, uniformity and utilization')
    add('--device', default='auto', help='auto, cpu, cuda, cuda:1, mps')
    add('--precision', choices=['auto', 'bf16', 'fp32'], default='auto', help='of the trunk')
    return parser.parse_args(argv)


def main(argv=None):
    args = get_args(argv)
    model = common.load_checkpoint(args.checkpoint, args.device, args.precision)
    trained = model.args
    dataset = args.dataset or trained['dataset']
    if dataset not in ('shapes', trained['dataset']) and not args.data:
        raise common.UsageError(f'--dataset {dataset} is not what the network was trained on: say where it is, --data')
    data = args.data or trained['data']
    load = partial(common.load_dataset, resize=trained['resize'], image_size=trained['image_size'], cache=args.cache)
    test = load(dataset, data, seen=model.classes)
    result = common.evaluate(model, test)
    if args.analyse:
        z = common.embed(model, test.query)
        # Where the training found them, or in --data if that folder is not there any more
        where = trained['data'] if Path(trained['data']).expanduser().is_dir() else data
        training = load(trained['dataset'], where, fold=trained.get('fold')).train
        result |= dict(alignment=alignment(z, test.query.labels), uniformity=uniformity(z),
                       utilization=utilization(z, common.embed(model, training)))
    print(f'{dataset}: {len(test.query):,} queries of {len(test.query.labels.unique()):,} classes, searched in '
          f'{"themselves" if test.gallery is test.query else f"a gallery of {len(test.gallery):,} images"}')
    for name, value in result.items():
        print(f'{name:>12} {value:8}' if isinstance(value, int) else f'{name:>12} {value:8.3f}')
    if 'unmatched' in result:
        print('unmatched queries have no match in the gallery: misses in R@K, left out of RP and MAP@R')
    result = dict(checkpoint=str(args.checkpoint), dataset=dataset) | result
    print(json.dumps(result))
    return result


if __name__ == '__main__':
    common.cli(main)
