"""fig2.py: how often mixed embeddings act as positives, Metrix Eq. (11), (25); utilization with mixed examples."""
import re
from math import log

import fig2
import pytest
import torch
import torch.nn.functional as F
from conftest import on_circle, unit
from torch.distributions import Beta
from worked import expect

import common
import train_metrix
import train_ms


def test_metrix_eq11_and_metrix_eq25_by_hand(monkeypatch):
    """Class 0 has images at 0 and 40 degrees. For the anchor at 40, the mixed embedding at 42.1 is above the threshold
    of Eq. (24), 0.76. For the anchor at 0, the mixed embedding at 40.7 is below its threshold, 0.80."""
    monkeypatch.setattr(Beta, 'sample', lambda self, shape: torch.tensor([0.25, 0.95]))
    z, y = on_circle(0, 40, 55), torch.tensor([0, 0, 1])
    bins = fig2.positivity(z, y, [[0, 1, 2]] * 2)
    v = F.normalize(torch.stack([0.25 * z[0] + 0.75 * z[2], 0.95 * z[1] + 0.05 * z[2]]), dim=1)
    expect(bins, [[0.25, 0, 0, z[1] @ v[0], 2], [0.95, 1, 1, z[0] @ v[1], 2]],
           'lambda, Metrix Eq. (11) and (25), mean s(a, v), number of pairs', 1e-6)
    monkeypatch.setattr(Beta, 'sample', lambda self, shape: torch.tensor([1e-38, 1.0]))     # as for a small alpha
    edges = [(round(bin[0], 2), bin[-1]) for bin in fig2.positivity(z, y, [[0, 1, 2]])]
    assert edges == [(0.05, 1), (0.95, 1)], 'all pairs are counted'


def test_metrix_eq25_is_by_the_label_and_not_by_lambda(monkeypatch):
    """Points at 0, 10 (class 0), 60 and 95 degrees (class 1), lambda 0.08: the mixed embeddings lie near class 1, for
    which their label is 0.92 and the threshold 0.796. For the anchor at 95, two have similarities 0.76 and 0.77, below
    the threshold. For the anchor at 60, two have similarities of at least 0.87, above it."""
    monkeypatch.setattr(Beta, 'sample', lambda self, shape: torch.full(shape, 0.08))
    bins = fig2.positivity(on_circle(0, 10, 60, 95), torch.tensor([0, 0, 1, 1]), [[0, 1, 2, 3]])
    assert [(round(bin[0], 2), bin[2], bin[4]) for bin in bins] == [(0.05, 1, 4), (0.95, 0.5, 4)]


def test_positivity_at_large_scales_is_the_same_in_float32():
    """Most derivatives would underflow to 0 in float32; float64 keeps their signs."""
    z, y = unit(24, dim=8, dtype=torch.float32), torch.arange(24) // 3
    found = []
    for embeddings in (z, z.double()):
        torch.manual_seed(0)
        found.append(fig2.positivity(embeddings, y, [list(range(24))], 2.0, 300.0, 400.0, 0.3))
    assert found[0] == found[1]


def test_the_utilization_is_by_clean_and_mixed_examples_of_all_batches(run, small, monkeypatch, capsys):
    run(train_metrix, '--name', 'x', '--epochs', '0', '--batch-size', '6', '--per-class', '3')
    z, q, mixed = unit(30, dtype=torch.float32), unit(16, seed=1, dtype=torch.float32), []
    embeddings, real = iter([z, q]), fig2.mix_embeddings
    monkeypatch.setattr(common, 'embed', lambda *_: next(embeddings))
    monkeypatch.setattr(fig2, 'mix_embeddings', lambda *a: mixed.append(real(*a)) or mixed[-1])
    capsys.readouterr()
    fig2.main(['runs/x'])
    shown = re.search(r'Eq. \(12\): (\S+) by clean examples, (\S+) by', capsys.readouterr().out).groups()

    def nearest(*examples):
        return (torch.cdist(q, torch.cat(examples).float()) ** 2).amin(1).mean().item()
    assert len(mixed) == 10, 'five batches, for Fig. 2 and for the utilization'
    expect([float(x) for x in shown], [nearest(z), nearest(z, *mixed[5:])], 'Metrix Eq. (12), clean and mixed', 1e-3)
    assert nearest(z, *mixed[5:]) < nearest(z, mixed[-1]) - 0.002, 'not only the last batch'


def test_hyperparameters_default_to_the_values_of_the_run_and_a_table_is_printed(run, small, monkeypatch, capsys):
    run(train_metrix, *'--name start --epochs 0 --beta 7 --alpha 1.5'.split())
    taken, alphas, bins = [], [], [(0.25, 0.1, 0.2, 0.3, 7), (0.75, 0.4, 0.5, 0.6, 8)]
    monkeypatch.setattr(common, 'make_sampler', lambda *_: 30 * [[0]])
    monkeypatch.setattr(fig2, 'positivity', lambda z, y, batches, *hyper: taken.append((len(batches), *hyper)) or bins)
    monkeypatch.setattr(fig2, 'mixed_examples', lambda z, y, batches, alpha: alphas.append(alpha) or z)
    fig2.main(['runs/start'])
    assert [line.split() for line in capsys.readouterr().out.split('\n') if line.startswith('    0.')] == [
        ['0.25', '0.100', '0.200', '0.300', f'{log(1 / 3) / 82 + 0.77:.3f}', '7'],
        ['0.75', '0.400', '0.500', '0.600', f'{log(3) / 82 + 0.77:.3f}', '8']]
    fig2.main('runs/start/last.pt --gamma 50 --m 0.5 --alpha 3'.split())
    assert taken == [(20, 1.5, 7, 75, 0.77), (20, 3, 7, 50, 0.5)], '20 of 30 batches, alpha, beta, gamma, m'
    assert alphas == [1.5, 3]
    run(train_ms, '--name', 'ms', '--epochs', '0')
    with pytest.raises(common.UsageError, match='runs/ms was trained by train_ms.py'):
        fig2.main(['runs/ms'])
