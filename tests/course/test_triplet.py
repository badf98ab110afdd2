"""train_triplet.py, an exercise of the course, against Reality Check Eq. (2)."""
from functools import partial
from math import cos, radians

import pytest
import torch
import train_triplet
from conftest import on_circle
from train_triplet import triplet_loss
from worked import chord, expect, expect_sound, moving

import common


def test_rc_eq2_by_hand():
    """Of eight triplets, only the two with the anchor at 50 and the positive at 130 violate the margin of 0.1."""
    found = triplet_loss(on_circle(50, 0, 130, 20), torch.tensor([2, 5, 2, 5]))
    expect(found, chord(80) - (chord(50) + chord(30)) / 2 + 0.1, 'Reality Check Eq. (2) at 0, 20 (class 5), 50, 130 '
           'degrees (class 2), margin 0.1')


def test_rc_eq2_with_the_hardest_negative():
    """Each anchor and positive have one triplet. The nearest negatives of 0, 20, 35, 50, 130 are 50, 50, 50, 35, 35."""
    z, y = on_circle(50, 0, 130, 20, 35), torch.tensor([2, 5, 2, 5, 5])
    pairs = [(20, 50), (35, 50), (20, 30), (15, 30), (35, 15), (15, 15), (80, 15), (80, 95)]    # to p, and to n
    losses = [loss for p, n in pairs if (loss := chord(p) - chord(n) + 0.4) > 0]
    expect(triplet_loss(z, y, margin=0.4, hardest=True), sum(losses) / len(losses), 'Reality Check Eq. (2) at 0, 20, '
           '35 (class 5), 50, 130 degrees (class 2), margin 0.4, with the hardest negative of each anchor and positive')


@pytest.mark.parametrize('hardest', [False, True])
def test_rc_eq2_closed_form_gradient(hardest):
    """Points at 0 and 60 are of class 7, the point at 70 is of class 1. A pair at an angle t has d' = cos(t/2). Both
    anchors have one positive and one negative; only the triplet of the anchor at 60 has a loss."""
    t, z = moving(70, 0, 60)
    triplet_loss(z, torch.tensor([1, 7, 7]), margin=0.05, hardest=hardest).backward()
    pull, push = cos(radians(30)), cos(radians(5))
    expect(t.grad, [-push, -pull, pull + push], 'Reality Check Eq. (2), gradient of the angles 70 (class 1), 0, 60 '
           '(class 7), margin 0.05')


@pytest.mark.parametrize('hardest', [False, True])
def test_rc_eq2_of_any_batch(hardest):
    expect_sound(partial(triplet_loss, hardest=hardest), 'Reality Check Eq. (2)', on_circle(0, 50, 20, 130, 90),
                 torch.tensor([5, 2, 5, 2, 0]))


def test_rc_eq2_without_triplets_is_0():
    """One class has no negatives, different classes have no positives, and triplets with far negatives satisfy the
    margin."""
    expect(triplet_loss(on_circle(0, 3), torch.tensor([5, 2])), 0,
           'Reality Check Eq. (2) at 0 (class 5), 3 degrees (class 2), margin 0.1')
    for labels in ([3, 3, 3, 3], [3, 0, 1, 7]):
        for hardest in (False, True):
            expect(triplet_loss(on_circle(0, 10, 170, 180), torch.tensor(labels), hardest=hardest), 0,
                   f'Reality Check Eq. (2) at 0, 10, 170, 180 degrees, of classes {labels}')
    expect(triplet_loss(on_circle(0, 170, 10, 180), torch.tensor([5, 2, 5, 2])), 0,
           'Reality Check Eq. (2) at 0, 10 (class 5), 170, 180 degrees (class 2)')


@pytest.mark.parametrize('flags', [[], ['--hardest']])
def test_the_flags_reach_the_loss(run, small, monkeypatch, flags):
    seen = []
    monkeypatch.setattr(train_triplet, 'triplet_loss', lambda *args: seen.append(args[2:]) or triplet_loss(*args))
    run(train_triplet, '--margin', '0.3', *flags)
    assert seen == [(0.3, bool(flags))] * 2


def test_a_column_of_labels_is_an_error():
    """It would be compared with every label."""
    with pytest.raises(common.UsageError, match='labels of 2 embeddings'):
        triplet_loss(on_circle(0, 90), torch.tensor([[0], [1]]))
