"""Fig. 2 and the utilization of Metrix (Sections 3.6 and 4.3), of a network that train_metrix.py trained.

    python tests/results/fig2.py runs/metrix-shapes-1 --gamma 50 --m 0.5

prints how often mixtures act as positives, and the utilization with and without mixed examples; draws the former where
matplotlib is installed. Mixed are embeddings of training images, in 20 batches like those of the run. The paper draws
Fig. 2 from the whole dataset at epoch 0, and measures utilization with the mixed examples of a number of epochs. If all
s(a, v) are above the threshold, or all below, there is no transition to see: take --m near the mean s(a, v).
"""
import argparse
import sys
from itertools import islice
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from torch.distributions import Beta

import common
import eval as evaluation
from train_metrix import cross_class_pairs, labelled_loss, mix_embeddings, pair_labels, positivity_threshold


def positivity(z, y, batches, alpha=2.0, beta=18.0, gamma=75.0, m=0.77):
    """Fig. 2: how often a mixture acts as a positive of an anchor, in ms with embedding mixing, Eq. (11) and (25):
    P(Pos(a, v)) = F_lambda(threshold of Eq. (24)), where F_lambda is the CDF of s(a, v) over the v with this lambda

    z (N, D), y (N,) are embeddings and classes of a set, batches lists of indices into it.
    Returns for bins of the label, 0.1 wide, which is our choice: (middle, measured, predicted, mean similarity, number
    of pairs (a, v)).
    measured is the share of pairs where the derivative of the loss by s(a, v) is <= 0. predicted is the share whose
    s(a, v) is at or below the threshold for its label. Eq. (24) and (25) are about the mixed term alone, of an anchor
    with one mixed example; here each anchor has many.
    """
    hyper = dict(beta=beta, gamma=gamma, m=m)
    samples = []
    for index in batches:
        # float64: with beta and gamma of some hundreds, tiny derivatives would be 0 in float32, and count as <= 0.
        zb = z[index].double()                                                                  # (B, D)
        yb = y[index]                                                                           # (B,)
        i, j = cross_class_pairs(yb)
        lam = Beta(alpha, alpha).sample(i.shape).double()
        pair_y, valid = pair_labels(yb, yb, i, j, lam)                                          # (B, M)
        anchor = torch.arange(len(yb))[:, None]
        valid = valid & (anchor != i) & (anchor != j)                                           # pos-neg pairs
        s = (zb @ mix_embeddings(zb, i, j, lam).T).requires_grad_()                             # (B, M)
        labelled_loss(s, pair_y, valid, 'ms', **hyper).sum().backward()
        positive = s.grad <= 0                      # Pos(a, v), Section 3.6
        below = s <= positivity_threshold(pair_y, **hyper)      # Eq. (11) and (25): F_lambda(threshold) is its mean
        samples.append(torch.stack([pair_y, positive, below, s.detach()])[:, valid])            # (4, pairs)
    samples = torch.cat(samples, dim=1)             # (4, all pairs): label, acts as a positive, below the threshold, s
    tenth = (samples[0] * 10).long().clamp_max(9)   # the tenth of [0, 1] in which the label lies, 0 to 9
    rows = []
    for n in tenth.unique().tolist():
        inside = samples[:, tenth == n]             # (4, those of this tenth)
        _, measured, predicted, s = inside.mean(dim=1).tolist()
        rows.append((n / 10 + 0.05, measured, predicted, s, inside.shape[1]))
    return rows


def mixed_examples(z, y, batches, alpha):
    """Mixtures of all pairs of different classes in each batch.  z (N, D), y (N,) -> (M of all batches, D)"""
    mixtures = []
    for index in batches:
        i, j = cross_class_pairs(y[index])
        mixtures.append(mix_embeddings(z[index], i, j, Beta(alpha, alpha).sample(i.shape)))
    return torch.cat(mixtures)


def draw(rows, path):
    """Fig. 2, from the rows of `positivity`"""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print('to draw the figure as well: pip install matplotlib')
        return
    lam, measured, predicted, *_ = zip(*rows)
    axes = Figure().subplots()
    axes.plot(lam, measured, 'o-', lam, predicted, 's--')
    axes.set(xlabel='lambda', ylabel='P(Pos(a, v)): measured (circles), Eq. (25) (squares)')
    axes.figure.savefig(path)
    print(f'the figure: {path}')


def get_args(argv=None):
    """The flags of the run, with those that were typed in their place"""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('run', type=Path, help='its folder, or a checkpoint')
    above_0 = common.at_least(1e-3, float)
    for flag, kind in {'--alpha': above_0, '--beta': above_0, '--gamma': above_0, '--m': common.between(-1, 1)}.items():
        parser.add_argument(flag, type=kind, help='if not given, that of the run')
    typed = {name: value for name, value in vars(parser.parse_args(argv)).items() if value is not None}
    saved = common.read_checkpoint(typed['run'])
    if saved['script'] != 'train_metrix':
        raise common.UsageError(f'{typed["run"]} was made by {saved["script"]}.py, not by train_metrix.py')
    return argparse.Namespace(**saved['args'] | typed)


def main(argv=None):
    args = get_args(argv)
    common.set_seed(args.seed)
    model = common.load_checkpoint(args.run, 'auto')
    data = common.load_dataset(args.dataset, args.data, fold=args.fold, transform=model.transform.transforms[-1])
    z = common.embed(model, data.train)
    y = data.train.labels
    batches = list(islice(common.make_sampler(args, y), 20))
    rows = positivity(z, y, batches, args.alpha, args.beta, args.gamma, args.m)
    print(f'P(Pos(a, v)) with beta {args.beta:g}, gamma {args.gamma:g}, m {args.m:g}: measured, and by Eq. (25)\n'
          '  lambda  measured  Eq. (25)  mean s(a, v)  threshold     pairs')
    for lam, measured, predicted, s, number in rows:
        threshold = positivity_threshold(lam, args.beta, args.gamma, args.m)
        print(f'{lam:8.2f} {measured:9.3f} {predicted:9.3f} {s:13.3f} {threshold:10.3f} {number:9d}')
    if data.query:
        q = common.embed(model, data.query)
        examples = torch.cat([z, mixed_examples(z, y, batches, args.alpha)])
        print(f'utilization, Eq. (12): {evaluation.utilization(q, z):.3f} by clean examples, '
              f'{evaluation.utilization(q, examples):.3f} by these and the mixed ones of {len(batches)} batches')
    if rows:                                        # there are none if no anchor has a mixture
        draw(rows, common.best_of(args.run).parent / 'positivity.png')
    return rows


if __name__ == '__main__':
    common.cli(main)
