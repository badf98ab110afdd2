"""Plots assets/losses.png: gradients of each loss on a positive and on a negative. Needs matplotlib.

    python tests/course/losses.py [PNG]

The curves are gradients of the scripts' loss functions with respect to one similarity, by autograd, with default
hyper-parameters (for train_metrix.py those of ms). A positive and a negative are compared with an anchor, a proxy or
centre, or a hybrid: one similarity varies, the other is fixed at 0.5. Each loss is divided by its largest gradient,
since only the shapes of curves can be compared between losses.
"""
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

import common
import train_ccl
import train_contrastive
import train_hse
import train_metrix
import train_ms
import train_proxy_anchor
import train_proxynca_pp

S = torch.linspace(-0.95, 0.99, 195, dtype=torch.float64)           # the similarity that varies
FIXED = 0.5                                                         # the other one
Y = torch.tensor([0, 0, 1])                                         # anchor, positive, negative


def three(positive, negative):
    """Anchor, positive and negative with these similarities to the anchor, as unit vectors (3, 3)"""
    return torch.tensor([[1, 0, 0], [positive, (1 - positive ** 2) ** 0.5, 0],
                         [negative, 0, (1 - negative ** 2) ** 0.5]], dtype=torch.float64)


def of_images(loss):
    """-> a function of the similarities of a positive and a negative to their anchor, which returns both gradients

    A loss of embeddings z depends only on S = z z^T, so its gradient with respect to z is (G + G^T) z, where G is the
    gradient with respect to S. Both entries of a pair count.
    """
    def gradients(positive, negative):
        z = three(positive, negative).requires_grad_()
        by_z, = torch.autograd.grad(loss(z, Y), z)
        return (by_z @ z.detach().inverse())[0, 1:]
    return gradients


def of_proxies(loss):
    """The same for an image of class 0, and two proxies (or centres) with these similarities to it, S = z p^T"""
    def gradients(positive, negative):
        z, *proxies = three(positive, negative)
        z = z[None].requires_grad_()
        p = torch.stack(proxies)
        by_z, = torch.autograd.grad(loss(z, Y[:1], p), z)
        return (by_z @ torch.linalg.pinv(p))[0]
    return gradients


def of_an_anchor(loss):
    """The same for an anchor that is not an image, but a proxy or a hybrid: loss(anchor, images)"""
    def gradients(positive, negative):
        anchor, *images = three(positive, negative)
        z = torch.stack(images).requires_grad_()
        by_z, = torch.autograd.grad(loss(anchor, z), z)
        return by_z @ anchor
    return gradients


def proxy_loss(proxy, z):
    """Proxy-Anchor with a second proxy, of the negative's class, opposite to the first. The similarity of an image to
    it is the negative of its similarity to the first, and adds to the gradient."""
    return train_proxy_anchor.proxy_anchor_loss(z, Y[1:], torch.stack([proxy, -proxy]))


def hybrid_loss(hybrid, z):
    """The hybrid loss of one hybrid, with the positive as its weak positive"""
    weak = torch.tensor([[True, False]])
    return train_hse.hybrid_loss(hybrid[None], z, weak, ~weak)


PANELS = {
    'contrastive (on distances)': of_images(train_contrastive.contrastive_loss),
    'Multi-Similarity': of_images(train_ms.multi_similarity_loss),
    'Proxy-Anchor': of_an_anchor(proxy_loss),
    'ProxyNCA++': of_proxies(train_proxynca_pp.proxynca_pp_loss),
    'CCL': of_proxies(train_ccl.center_contrastive_loss),
    'HSE: hybrid loss': of_an_anchor(hybrid_loss),
}


def curves(gradients):
    """Attraction of a positive and repulsion of a negative at the similarities S, normally >= 0"""
    pull = torch.stack([-gradients(s.item(), FIXED)[0] for s in S])
    push = torch.stack([gradients(FIXED, s.item())[1] for s in S])
    return pull, push


def mixed_example(label):
    """Attraction (> 0) or repulsion (< 0) of a mixed example with this label, from Eq. (15) for one mixed example, at
    S"""
    s = S[:, None].clone().requires_grad_()
    one = torch.ones_like(s)
    by_s, = torch.autograd.grad(train_metrix.labelled_loss(s, label * one, one.bool(), 'ms').sum(), s)
    return -by_s[:, 0]


def plot(path):
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise common.UsageError('the plot needs matplotlib: pip install matplotlib') from error
    figure = Figure(figsize=(10, 5.2), layout='constrained', dpi=100)
    panels = figure.subplots(2, 4).flatten()
    for axes, (name, gradients) in zip(panels, PANELS.items()):
        pull, push = curves(gradients)
        largest = max(pull.max(), push.max())
        axes.plot(S, pull / largest, 'C2', label='attraction of a positive')
        axes.plot(S, push / largest, 'C3--', label='repulsion of a negative')
        axes.set(title=name, xlim=(-1, 1), ylim=(-0.05, 1.1), xlabel='its similarity')
    axes = panels[6]
    axes.set_xlim(0.5, 1)
    for label, colour in ((0.25, 'C0'), (0.5, 'C1'), (0.75, 'C4')):
        axes.plot(S, mixed_example(label), colour, label=f'lambda {label}')
        threshold = train_metrix.positivity_threshold(label, 18, 75, 0.77)
        axes.plot(threshold, 0, 'o', color=colour)
    axes.axhline(0, color='grey', linewidth=0.5)
    axes.set(title='Metrix: a mixed example', xlabel='its similarity', ylim=(-1.1, 1.1),
             ylabel='repulsion     attraction')
    panels[0].set(ylabel='gradient / largest')
    panels[4].set(ylabel='gradient / largest')
    lines = [*zip(*panels[0].get_legend_handles_labels()), *zip(*axes.get_legend_handles_labels())]
    panels[7].axis('off')
    panels[7].legend(*zip(*lines), loc='center', title='circles: zero gradient, Eq. (24)')
    figure.savefig(path)


if __name__ == '__main__':
    common.cli(lambda: plot(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parents[2] / 'assets/losses.png'))
