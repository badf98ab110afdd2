"""losses.py: the curves of assets/losses.png."""
import losses
import pytest
import torch
from worked import expect

import train_metrix


def test_the_gradient_of_the_contrastive_loss_is_one_over_the_distance():
    """The distance is d = sqrt(2 - 2 s), so d' = -1/d. A negative has a gradient only within the margin of 0.5,
    s > 0.875."""
    pull, push = losses.curves(losses.PANELS['contrastive (on distances)'])
    d = (2 - 2 * losses.S).sqrt()
    expect(pull, 1 / d, 'gradient of the contrastive loss on a positive', 1e-6)
    expect(push, (d < 0.5) / d, 'on a negative', 1e-6)


def test_the_gradient_of_proxynca_pp_is_a_softmax():
    """The gradient is 18 times the probability of the other proxy, which is at a similarity of 0.5."""
    pull, push = losses.curves(losses.PANELS['ProxyNCA++'])
    expect(pull, 18 * torch.sigmoid(18 * (0.5 - losses.S)), 'gradient of ProxyNCA++ on a positive', 1e-6)
    expect(push, 18 * torch.sigmoid(18 * (losses.S - 0.5)), 'on a negative', 1e-6)


@pytest.mark.parametrize('name', losses.PANELS)
def test_positives_are_attracted_and_negatives_repelled(name):
    pull, push = losses.curves(losses.PANELS[name])
    assert pull.min() > -1e-9 and push.min() > -1e-9 and min(pull.max(), push.max()) > 0.1


@pytest.mark.parametrize('label', [0.25, 0.5, 0.75])
def test_the_gradient_of_a_mixed_example_is_0_at_the_threshold(label):
    pull = losses.mixed_example(label)
    threshold = train_metrix.positivity_threshold(label, 18, 75, 0.77)
    assert torch.equal(pull > 0, losses.S < threshold)
