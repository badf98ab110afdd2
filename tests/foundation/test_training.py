"""The training loop: updates, schedules, seeds, time and NaN, against values computed by hand."""
import math
from types import SimpleNamespace

import pytest
import torch
from conftest import log_of

import common
import train_ms
import train_proxy_anchor
from common import UsageError


@pytest.fixture
def watched(before_training, monkeypatch):
    """watched(module, *flags): trains, three steps of a minute per epoch -> x, y, learning rate, random draw of each"""
    clock = SimpleNamespace(now=0)
    monkeypatch.setattr(common, 'time', SimpleNamespace(time=lambda: clock.now))

    def watched(module, *flags):
        held, seen = before_training(module, '--steps', '0', *flags), []

        def step(x, y):
            clock.now += 60
            lr, draw = held.optimizer.param_groups[0]['lr'], torch.rand(()).item()
            seen.append(SimpleNamespace(x=x, y=y, lr=lr, draw=draw))
            return held.step(x, y)
        common.train(held.args, held.model, held.data, step, held.optimizer, held.loss_params, held.sampler)
        return seen
    return watched


def test_a_run_has_the_given_steps_evaluations_and_minutes(watched):
    """The last epoch is evaluated, too. A resumed run adds to the minutes before."""
    seen = watched(train_ms, *'--epochs 5 --steps 9 --eval-every 2 --schedule constant --name x'.split())
    assert [len(step.y.unique()) for step in seen] == [4] * 9, 'the batches of --batch-size 8 --per-class 2'
    watched(train_ms, *'--resume runs/x --steps 11'.split())
    assert [(row['epoch'], row['minutes']) for row in log_of('x')] == [(0, 0), (2, 6), (3, 9), (4, 11)]
    assert [row['images_per_second'] for row in log_of('x')[1:]] == pytest.approx([8 / 60] * 3)


@pytest.mark.parametrize('clip, moved', [('2', [2, -2, 1.5]), ('0', [30, -30, 1.5])])
def test_gradients_are_clipped_by_value_and_the_loss_of_a_row_is_the_mean_over_its_steps(before_training, clip, moved):
    """The gradients of all parameter groups are clipped; with --clip 0, none is."""
    held = before_training(train_proxy_anchor, *f'--clip {clip} --proxy-lr-mult 1 --weight-decay 0 --optimizer sgd '
                           '--lr 0.1 --schedule constant --batch-size 1 --per-class 0 --steps 22'.split())
    weights, slopes = (held.model.linear.bias, held.loss_params['proxies']), torch.tensor([30, -30, 1.5])
    before, losses = [weight.detach().clone() for weight in weights], []

    def step(x, y):
        loss = sum((slopes * weight[..., :3]).sum() for weight in weights)
        losses.append(loss.item())
        return loss
    row = common.train(held.args, held.model, held.data, step, held.optimizer)
    for start, weight in zip(before, weights):
        found = (start - weight)[..., :3]
        torch.testing.assert_close(found, 22 * 0.1 * torch.tensor(moved).expand_as(found), rtol=0, atol=1e-4)
    assert row['loss'] == pytest.approx(sum(losses) / 22) and losses[0] != losses[2]


def test_the_learning_rate_follows_the_schedule(watched):
    seen = watched(train_ms, *'--lr 0.001 --epochs 5 --schedule step --decay-epochs 2 --decay-rate 0.1'.split())
    assert [step.lr for step in seen] == pytest.approx([1e-3] * 6 + [1e-4] * 6 + [1e-5] * 3)
    seen = watched(train_ms, *'--lr 0.001 --epochs 99 --steps 31 --schedule cosine'.split())
    ramp, cosine = [(i + 1) / 3 for i in range(31)], [0.5 * (1 + math.cos(math.pi * i / 31)) for i in range(31)]
    assert [step.lr for step in seen] == pytest.approx([0.001 * min(a, b) for a, b in zip(ramp, cosine)])
    factor = [common.learning_rate_factor(t, train_ms.get_args([]), per_epoch=50, total=2000) for t in (0, 49)]
    assert factor == [0.01, 0.5], 'a ramp of at most 100 steps'


def test_a_run_that_is_interrupted_while_the_trunk_is_frozen_leaves_it_trainable(before_training):
    held = before_training(train_ms, '--freeze-backbone-epochs', '1')

    def interrupted(x, y):
        assert not any(weight.requires_grad for weight in held.model.trunk.parameters())
        raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        common.train(held.args, held.model, held.data, interrupted, held.optimizer)
    assert all(weight.requires_grad for weight in held.model.trunk.parameters())


def test_each_epoch_follows_from_the_seed_for_every_method(watched):
    """Batches and crops are bitwise identical, whatever random numbers the step or the loss of a method draws."""
    def train(line, seed):
        script, *flags = f'{line} --seed {seed} --epochs 4 --steps 10 --min-crop 0.5 --jitter 0'.split()
        return watched(__import__(script), *flags)
    one, other = train('train_ms', 1), train('train_ms', 2)
    for line in ('train_ms', 'train_metrix --mixup input feature --alpha 0.5', 'train_ccl --dropout 0.5',
                 'train_hse --loss epshn --hybrids append'):
        for a, b in zip(one, train(line, 1), strict=True):
            assert torch.equal(a.x, b.x) and torch.equal(a.y, b.y) and a.draw == b.draw, line
    assert not any(torch.equal(a.x, b.x) for a, b in zip(one, other, strict=True))
    assert len({str([step.y for step in steps[i:i + 3]]) for steps in (one, other) for i in (0, 3, 6)}) == 6, 'epochs'
    for t, step in enumerate(one):
        common.set_seed(1, common.STEP, t)
        assert step.draw == torch.rand(()).item(), 'random numbers of a step follow from the seed and the step'


@pytest.mark.parametrize('name, kind', [('adam', 'Adam'), ('adamw', 'AdamW'), ('sgd', 'SGD'), ('rmsprop', 'RMSprop')])
def test_optimizers_get_the_values_of_the_flags(before_training, name, kind):
    momentum = {} if 'adam' in name else dict(momentum=0.9)
    flags = f'--optimizer {name} --lr 0.01 --weight-decay 0.1 ' + ('--momentum 0.9' if momentum else '')
    held = before_training(train_ms, *flags.split())
    expected = dict(lr=0.01, weight_decay=0.1) | momentum
    assert type(held.optimizer).__name__ == kind and expected.items() <= held.optimizer.param_groups[0].items()


@pytest.mark.parametrize('part, bad_step, noticed', [('loss', 20, 20), ('loss', 21, 30), ('weight', 3, 30)])
def test_nan_ends_a_run_within_twenty_steps_and_is_not_saved(before_training, part, bad_step, noticed):
    """The loss is checked every 20 steps, and the weights at the end of an epoch, here of 30 steps."""
    held = before_training(train_ms, *'--batch-size 1 --per-class 0 --steps 0 --eval-every 4 --name x'.split())
    bias, steps = held.model.linear.bias, []

    def step(x, y):
        steps.append(y)
        if part == 'weight' and len(steps) == bad_step:
            bias.data[0] = math.nan
        return held.model.linear.weight.sum() * (math.nan if part == 'loss' and len(steps) == bad_step else 1)
    with pytest.raises(UsageError, match='the loss is nan at epoch 1|linear.bias is NaN'):
        common.train(held.args, held.model, held.data, step, held.optimizer)
    assert len(steps) == noticed and common.read_checkpoint('runs/x')['epoch'] == 0
