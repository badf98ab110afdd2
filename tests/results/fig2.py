"""Fig. 2, Metrix Eq. (11) and (25), and the utilization, Eq. (12), for a network trained by train_metrix.py.

    python tests/results/fig2.py runs/metrix-shapes-1 --gamma 50 --m 0.5

prints how often mixed embeddings act as positives, and the utilization with and without mixed examples. Embeddings of
training images are mixed, in 20 batches sampled as in the run. The paper's Fig. 2 uses the whole dataset at epoch 0,
and its utilization the mixed examples of several epochs. If every s(a, v) is on the same side of the threshold, the
table shows no transition: choose --m near the mean s(a, v).
"""
import argparse
import sys
from itertools import islice
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

import common
import eval as evaluation
from train_metrix import MixupConfig, labelled_loss, mix_embeddings, mixed_pairs, positivity_threshold


def positivity(z, y, batches, alpha=2.0, beta=18.0, gamma=75.0, m=0.77):
    """Fig. 2: how often a mixed embedding acts as a positive of an anchor, for ms with embedding mixup, Eq. (11), (25):
    P(Pos(a, v)) = F_lambda(threshold of Eq. (24)), where F_lambda is the CDF of s(a, v) over all v with this lambda

    z (N, D), y (N,)  embeddings and classes of a dataset; batches  lists of indices into it
    Returns one tuple per bin of the label: (centre, measured, predicted, mean similarity, number of pairs (a, v)). The
    bins are 0.1 wide, which is our choice.
    measured   fraction of pairs whose derivative of the loss w.r.t. s(a, v) is <= 0
    predicted  fraction of pairs whose s(a, v) is at most the threshold for their label
    Eq. (24) and (25) assume only the mixed term, and an anchor with one mixed example; here each anchor has many.
    """
    hyper = dict(beta=beta, gamma=gamma, m=m)
    samples = []
    for index in batches:
        # float64: with beta and gamma of some hundreds, tiny derivatives would be 0 in float32, and count as <= 0.
        zb = z[index].double()                                                                  # (B, D)
        yb = y[index]                                                                           # (B,)
        config = MixupConfig('embed', 'pos-neg', None, alpha)
        i, j, lam, label, valid = mixed_pairs(config, zb, yb, torch.arange(len(yb)), len(yb))
        label = label.double()                                                                  # (B, M)
        s = (zb @ mix_embeddings(zb, i, j, lam.double()).T).requires_grad_()                    # (B, M)
        labelled_loss(s, label, valid, 'ms', **hyper).sum().backward()
        positive = s.grad <= 0                      # Pos(a, v), Section 3.6
        below = s <= positivity_threshold(label, **hyper)       # Eq. (11), (25): its mean is F_lambda at the threshold
        samples.append(torch.stack([label, positive, below, s.detach()])[:, valid])             # (4, pairs)
    samples = torch.cat(samples, dim=1)             # (4, all pairs): label, positive, below, s
    index = (samples[0] * 10).long().clamp_max(9)   # bin of the label, 0 to 9
    bins = []
    for n in index.unique().tolist():
        inside = samples[:, index == n]             # (4, pairs in this bin)
        _, measured, predicted, s = inside.mean(dim=1).tolist()             # predicted: Eq. (11), (25)
        bins.append((n / 10 + 0.05, measured, predicted, s, inside.shape[1]))
    return bins


def mixed_examples(z, y, batches, alpha):
    """Mixed embeddings of all pairs of different classes in each batch.  z (N, D), y (N,) -> (M of all batches, D)"""
    mixed = []
    for index in batches:
        config = MixupConfig('embed', 'anc-neg', None, alpha)
        i, j, lam, *_ = mixed_pairs(config, z[index], y[index], torch.arange(len(index)), len(index))
        mixed.append(mix_embeddings(z[index], i, j, lam))
    return torch.cat(mixed)


def get_args(argv=None):
    """Flags of the run; flags on the command line replace them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('run', type=Path, help='folder of the run, or a checkpoint')
    for flag in ('--alpha', '--beta', '--gamma', '--m'):
        parser.add_argument(flag, type=float, help='default: the value of the run')
    typed = {name: value for name, value in vars(parser.parse_args(argv)).items() if value is not None}
    saved = common.read_checkpoint(typed['run'])
    if saved['script'] != 'train_metrix':
        raise common.UsageError(f'{typed["run"]} was trained by {saved["script"]}.py, not by train_metrix.py')
    return argparse.Namespace(**saved['args'] | typed)


def main(argv=None):
    args = get_args(argv)
    common.set_seed(args.seed)
    model = common.load_checkpoint(args.run, 'auto')
    data = common.load_dataset(args.dataset, args.data, fold=args.fold, transform=model.transform)
    z = common.embed(model, data.train)
    y = data.train.labels
    batches = list(islice(common.make_sampler(args, y), 20))
    bins = positivity(z, y, batches, args.alpha, args.beta, args.gamma, args.m)
    print(f'P(Pos(a, v)) with beta {args.beta:g}, gamma {args.gamma:g}, m {args.m:g}: measured, and by Eq. (25)\n'
          '  lambda  measured  Eq. (25)  mean s(a, v)  threshold     pairs')
    for lam, measured, predicted, s, number in bins:
        threshold = positivity_threshold(lam, args.beta, args.gamma, args.m)
        print(f'{lam:8.2f} {measured:9.3f} {predicted:9.3f} {s:13.3f} {threshold:10.3f} {number:9d}')
    if data.query:
        q = common.embed(model, data.query)
        examples = torch.cat([z, mixed_examples(z, y, batches, args.alpha)])
        print(f'utilization, Eq. (12): {evaluation.utilization(q, z):.3f} by clean examples, '
              f'{evaluation.utilization(q, examples):.3f} by these and the mixed ones of {len(batches)} batches')
    return bins


if __name__ == '__main__':
    common.cli(main)
