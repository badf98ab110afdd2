"""From flag to loss: `step` computes the public loss function with the values of the flags.

The step of Metrix with mixup, which has many parts, is compared with loops in test_metrix.py.
"""
import pytest
import torch
import torch.nn.functional as F
from cases import each, embed

import common
import train_contrastive
import train_hse
import train_ms

LABELS = torch.tensor([0, 0, 1, 1, 2, 2, 3, 3])


def weights(held):
    """Learnable parameters of the loss"""
    return [weight for value in held.loss_params.values() for weight in
            (value.parameters() if isinstance(value, torch.nn.Module) else [value]) if weight.requires_grad]


@pytest.mark.parametrize('script, flags, by_hand', each('steps'))
def test_step_is_the_loss_with_the_values_of_the_flags(before_training, script, flags, by_hand):
    """The values are equal, and so are the gradients with respect to the images and to the parameters of the loss."""
    held = before_training(__import__(script), *flags.split())
    held.model.forward = held.model.head = embed
    held.model.features = lambda x: x
    images = torch.randn(8, 3, 32, 32, generator=torch.Generator().manual_seed(1), requires_grad=True)
    results = []
    for loss in (held.step, lambda x, y: by_hand(x, y, held.loss_params)):
        torch.manual_seed(0)
        value = loss(images, LABELS)
        results.append((value, *torch.autograd.grad(value, [images, *weights(held)])))
    assert results[0][0] != 0 and results[0][1].abs().max() > 0
    for one, other in zip(*results, strict=True):
        assert torch.allclose(one, other, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize('script, flags, rates', each('rates'))
def test_all_parameters_are_in_the_optimizer_with_their_learning_rates(before_training, script, flags, rates):
    held = before_training(__import__(script), '--lr', '0.01', *flags.split())
    groups = held.optimizer.param_groups
    assert [group['lr'] for group in groups] == pytest.approx(rates)
    assert len(rates) == 1 or len(groups[1]['params']) == 1, 'proxies and centres have a group of their own'
    learn = [id(weight) for group in groups for weight in group['params']]
    assert sorted(learn) == sorted(id(weight) for weight in [*held.model.parameters(), *weights(held)])


@pytest.mark.parametrize('loss', [train_contrastive.contrastive_loss, train_hse.contrastive_loss])
def test_positives_are_attracted_down_to_the_floating_point_error_of_distances(loss):
    """Positives at a distance of 0.0015 have a gradient. In float32 the error of a distance is 0.0014."""
    z = F.normalize(torch.tensor([[1.0, 0.0], [1.0, 0.0015]]), dim=1).requires_grad_()
    loss(z, torch.tensor([0, 0])).backward()
    assert z.grad.abs().max() > 0.4 * 0.0015 and z.grad.isfinite().all()


@pytest.mark.parametrize('flags, expected', [
    ('--pool max --dim 24', dict(pool='max', dim=24, freeze_bn=False)), ('--pool avg', dict(pool='avg', dim=16)),
    ('--arch resnet34', dict(arch='resnet34')), ('--freeze-bn', dict(freeze_bn=True)),
    ('--precision fp32', dict(precision='fp32')), ('--precision bf16', dict(precision='bf16')),
    ('', dict(precision=common.pick_precision('auto', torch.device('cpu'))))])
def test_network_flags_reach_the_network(before_training, flags, expected):
    model = before_training(train_ms, *flags.split()).model
    found = model.config | dict(precision=model.precision)
    assert {key: found[key] for key in expected} == expected
    assert model(torch.randn(2, 3, 32, 32)).shape == (2, expected.get('dim', 16))


@pytest.mark.parametrize('script, flags, name, size', each('starts'))
def test_proxies_and_centres_start_and_decay_as_in_released_code(before_training, script, flags, name, size):
    """The norm of the initial proxies of six classes determines how fast they rotate. Their mean is near 0."""
    held = before_training(__import__(script), '--dim', '400', *flags.split())
    start = held.loss_params[name]
    assert len(start) == 6 and start.std().item() == pytest.approx(size, rel=0.05)
    assert abs(start.mean().item()) < size / 12
    assert len({group['weight_decay'] for group in held.optimizer.param_groups}) == 1, 'they have weight decay, too'
