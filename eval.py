"""eval.py -- evaluates a checkpoint: Recall@K, R-precision, MAP@R, and what the embedding space looks like.

The metrics and their rules (self excluded by index, ties against the network, queries without a match)
are those of the training rows: common.retrieval_metrics. The last line is one JSON object, for programs.

--analyse adds the three measures of Metrix, section 4.3 (Venkataramanan et al., ICLR 2022), lower is better:

    alignment    mean squared distance of two test images of one class           (Wang and Isola, 2020)
    uniformity   log mean exp(-2 d^2) over all pairs of test images              (Wang and Isola, 2020)
    utilization  mean distance of a test image to the nearest training image, Metrix Eq. (12)

        u(Q, X) = 1/|Q| sum_{q in Q} min_{x in X} || f(q) - f(x) ||^2

Differs
    1. Eq. (12) can be read with the norm or with its square; here it is the square, as in alignment.
    2. Utilization by mixed examples needs mixing: train_metrix.py --analyse.

Run
    python eval.py --checkpoint runs/ms-shapes-1/last.pt
    python eval.py --checkpoint runs/ms-cub-1/last.pt --data /elsewhere --analyse
    python eval.py --checkpoint runs/ms-cub-1/last.pt --dataset folder --data my_photos
"""
import json

import torch.nn.functional as F

import common


def alignment(z, y):
    """Mean squared distance of all positive pairs.  z (N, D), y (N,) -> float in [0, 4]"""
    return 2 - 2 * common.mean_similarities(z, y)[0]


def uniformity(z, t=2.0):
    """log of the mean of exp(-t d^2) over all pairs of different images.  z (N, D) -> float in [-4 t, 0]

    Chunk by chunk: the (N, N) matrix is never whole.
    """
    z = F.normalize(z.double(), dim=1)
    total = sum((2 * t * (rows @ z.T - 1)).exp().sum() for rows in z.split(1024))      # d^2 = 2 - 2 s
    return ((total - len(z)) / (len(z) * (len(z) - 1))).log().item()


def utilization(queries, examples):
    """Metrix Eq. (12): mean over the queries of the squared distance to the nearest example.

    queries (Q, D), examples (X, D) -> float in [0, 4], lower is better
    """
    queries, examples = F.normalize(queries.float(), dim=1), F.normalize(examples.float(), dim=1)
    nearest = common.searcher(examples)(queries, 1)[0]                                  # (Q, 1) cosines
    return (2 - 2 * nearest).clamp(min=0).mean().item()                                 # Metrix Eq. (12)


def get_args(argv=None):
    parser = common.Parser(prog='eval.py', description=__doc__, formatter_class=common.Help, allow_abbrev=False)
    parser.add_argument('--checkpoint', required=True, help='runs/<name>/last.pt, or the folder')
    parser.add_argument('--dataset', choices=list(common.DATASETS), help='default: the one it was trained on')
    parser.add_argument('--data', help='default: where it was in training')
    parser.add_argument('--cache', default='cache', help='folder for decoded images')
    parser.add_argument('--analyse', action='store_true', help='alignment, uniformity, utilization')
    parser.add_argument('--device', default='auto', help='auto, cpu, cuda, cuda:1, mps')
    parser.add_argument('--precision', choices=['auto', 'bf16', 'fp32'], default='auto', help='of the trunk')
    return parser.parse_args(argv)


def main(argv=None):
    args = get_args(argv)
    model = common.load_checkpoint(args.checkpoint, args.device, args.precision)
    trained = model.args
    dataset = args.dataset or trained['dataset']
    root = args.data or trained['data']
    data = common.load_dataset(dataset, root, trained['resize'], trained['image_size'], args.cache)
    result = dict(checkpoint=str(args.checkpoint), dataset=dataset) | common.evaluate(model, data)
    if args.analyse:
        z = common.embed(model, data.query)
        result['alignment'] = alignment(z, data.query.labels)
        result['uniformity'] = uniformity(z)
        result['utilization'] = utilization(z, common.embed(model, data.train))
    print(f'{dataset}: {len(data.query):,} queries of {len(data.query.labels.unique()):,} classes, '
          f'{"searched in themselves" if data.gallery is data.query else f"{len(data.gallery):,} in the gallery"}')
    for name, value in list(result.items())[2:]:
        print(f'{name:>12} {value:8.3f}')
    if result.get('unmatched'):
        print('unmatched queries have no match in the gallery: misses in R@K, left out of RP and MAP@R')
    print(json.dumps(result))
    return result


if __name__ == '__main__':
    main()
