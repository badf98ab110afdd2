"""losses.py: the curves of assets/losses.png."""
import losses
import pytest
import torch
from worked import expect

import train_metrix


def test_the_pull_of_the_contrastive_loss_is_one_over_the_distance():
    """d = sqrt(2 - 2 s), so d' = -1/d; a negative is pushed only within the margin of 0.5, s > 0.875."""
    pull, push = losses.curves(losses.PANELS['contrastive (on distances)'])
    d = (2 - 2 * losses.S).sqrt()
    expect(pull, 1 / d, 'the pull of the contrastive loss', 1e-6)
    expect(push, (d < 0.5) / d, 'its push', 1e-6)


def test_the_pull_of_proxynca_pp_is_a_softmax():
    """18 times the probability of the other proxy, at a similarity of 0.5"""
    pull, push = losses.curves(losses.PANELS['ProxyNCA++'])
    expect(pull, 18 * torch.sigmoid(18 * (0.5 - losses.S)), 'the pull of ProxyNCA++', 1e-6)
    expect(push, 18 * torch.sigmoid(18 * (losses.S - 0.5)), 'its push', 1e-6)


@pytest.mark.parametrize('name', losses.PANELS)
def test_positives_are_pulled_and_negatives_pushed(name):
    pull, push = losses.curves(losses.PANELS[name])
    assert pull.min() > -1e-9 and push.min() > -1e-9 and min(pull.max(), push.max()) > 0.1


@pytest.mark.parametrize('label', [0.25, 0.5, 0.75])
def test_a_mixture_rests_at_its_threshold(label):
    pull = losses.mixture(label)
    rest = train_metrix.positivity_threshold(label, 18, 75, 0.77)
    assert torch.equal(pull > 0, losses.S < rest)


def test_the_picture_is_drawn(tmp_path):
    pytest.importorskip('matplotlib')
    losses.draw(tmp_path / 'x.png')
    assert (tmp_path / 'x.png').stat().st_size > 10_000
