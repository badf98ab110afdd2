"""Plots the runs of a table: python tests/results/results.py NAME --draw PNG. Needs matplotlib.

Also saves an image grid of HSE's hybrids, with flags of train_hse.py: python tests/results/draw.py hybrids.png --num 3
"""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from tables import after, per_repeat, runs_of
from torchvision.utils import save_image

import common
import train_hse
from eval import interval


def plot(table, runs, path):
    """Plot MAP@R by epoch for a table with `epochs`, R@1 for any other table, and save the figure as `path`."""
    from matplotlib.figure import Figure
    found = {row: of_row for row, of_row in runs_of(table, runs).items() if of_row}
    if table.epochs:
        panel_of = {row: row.split(', ')[0] if ', ' in row else '' for row in found}        # one panel per loss
        titles = list(dict.fromkeys(panel_of.values()))
        figure = Figure(figsize=(max(4, 2.5 * len(titles)), 3), layout='constrained')
        panels = figure.subplots(1, len(titles), sharey=True, squeeze=False)[0]
        for axes, title in zip(panels, titles):
            rows = {row: of_row for row, of_row in found.items() if panel_of[row] == title}
            plot_means(axes, title, rows, table.epochs)
        panels[0].set_ylabel('MAP@R on the test classes')
        panels[0].legend()
    else:
        figure = Figure(figsize=(8, 4.5), layout='constrained')
        plot_runs(figure.subplots(), found)
    figure.savefig(path, dpi=100)


def plot_means(axes, title, rows, epochs):
    """Mean and 95% CI of each row. The dotted line is the network before training."""
    for number, (row, of_row) in enumerate(rows.items()):
        found = [interval(list(per_repeat(of_row, after(epoch, 'MAP@R')).values())) for epoch in epochs]
        middle = [centre for centre, _ in found]
        low = [centre - (half or 0) for centre, half in found]
        high = [centre + (half or 0) for centre, half in found]
        axes.plot(epochs, middle, 'o-', color=f'C{number}', markersize=3, label=row.removeprefix(f'{title}, '))
        axes.fill_between(epochs, low, high, color=f'C{number}', alpha=0.2)
    axes.axhline(middle[0], color='grey', linestyle=':')
    axes.set(title=title, xlabel='epoch', xscale='symlog', xlim=(-0.2, 1.2 * epochs[-1]))
    axes.set_xticks(epochs[::2], map(str, epochs[::2]))
    axes.minorticks_off()


def plot_runs(axes, found):
    """Mean of each row, and its runs in a paler colour: a circle at the best epoch of a run, a square at the last."""
    for number, (row, of_row) in enumerate(found.items()):
        colour = f'C{number}'
        curves = [run['columns']['R@1'] for run in of_row.values()]
        epochs = next(iter(of_row.values()))['columns']['epoch']
        for curve in curves:
            best = max(range(1, len(curve)), key=curve.__getitem__)
            axes.plot(epochs, curve, '-', color=colour, alpha=0.3)
            axes.plot(epochs[best], curve[best], 'o', epochs[-1], curve[-1], 's', color=colour, alpha=0.3)
        axes.plot(epochs, [sum(values) / len(values) for values in zip(*curves)], color=colour, label=row)
    axes.set(xlabel='epoch', ylabel='R@1 on the test classes; circle: best epoch, square: last')
    axes.legend()


def save_hybrids(path='hybrids.png', *flags):
    """An image grid like Fig. 2 of HSE: each row has the source images of a hybrid, then their hybrids of all kinds."""
    args = train_hse.get_args(flags)
    common.set_seed(args.seed)
    unnormalized = common.make_test_transform(args.resize, args.image_size, mean=(0, 0, 0), std=(1, 1, 1))
    images = common.load_dataset(args.dataset, args.data, transform=unnormalized).train
    indices = next(iter(common.make_sampler(args, images.labels)))
    x = torch.stack([images[i][0] for i in indices])                     # (B, 3, S, S), from 0 to 1
    _, sources = train_hse.make_hybrids(x, images.labels[indices], num=args.num, per_class=args.per_class)
    source_images = x[sources[:8]]                                       # (at most 8, num, 3, S, S)
    hybrids = [train_hse.blend(source_images, kind, args.axis, args.mask_size)[:, None] for kind in train_hse.KINDS]
    x = torch.cat([source_images, *hybrids], dim=1)                      # (at most 8, num + 3, 3, S, S)
    save_image(x.flatten(0, 1), path, nrow=x.shape[1], pad_value=1)


if __name__ == '__main__':
    common.cli(lambda: save_hybrids(*sys.argv[1:]))
