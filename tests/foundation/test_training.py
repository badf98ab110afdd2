"""The training loop: updates, schedules, seeds, time and NaN, against values computed by hand; and learning."""
import math
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import SCRIPTS, log_of, make_folder

import common
import train_ms
import train_proxy_anchor
from common import UsageError


def train_epoch(held, step, steps, epoch=1, total=99):
    """Trains for a range of steps, each on the images 0 and 5, with the arguments of the loop -> log record"""
    held.args.schedule = 'constant'
    loader = common.make_loader(held.data.train, common.StepBatches([[0, 5]] * 99, 0), held.args.device)
    return common.train_epoch(held.args, loader, step, held.optimizer, epoch, steps, total)


@pytest.fixture
def watched(before_training):
    """watched(module, *flags): trains on the small folder, three steps per epoch -> batch and learning rate of each"""
    def watched(module, *flags):
        held, seen = before_training(module, '--steps', '0', *flags), []

        def step(x, y):
            seen.append(SimpleNamespace(x=x, y=y, lr=held.optimizer.param_groups[0]['lr'], draw=torch.rand(()).item()))
            return held.step(x, y)
        common.train(held.args, held.model, held.data, step, held.optimizer, held.loss_params, held.sampler)
        return seen
    return watched


@pytest.mark.parametrize('clip, moved', [('2', [2, -2, 1.5]), ('0', [30, -30, 1.5])])
def test_gradients_are_clipped_by_value_at_plus_minus_clip(before_training, clip, moved):
    """The gradients of all parameter groups are clipped; with --clip 0, none is."""
    held = before_training(train_proxy_anchor, '--clip', clip, '--proxy-lr-mult', '1', '--weight-decay', '0',
                           '--optimizer', 'sgd', '--lr', '0.1')
    weights, slopes = (held.model.linear.bias, held.loss_params['proxies']), torch.tensor([30, -30, 1.5])
    before = [weight.detach().clone() for weight in weights]
    train_epoch(held, lambda x, y: sum((slopes * weight[..., :3]).sum() for weight in weights), range(3))
    for start, weight in zip(before, weights):
        found = (start - weight)[..., :3]
        torch.testing.assert_close(found, 3 * 0.1 * torch.tensor(moved).expand_as(found), rtol=0, atol=1e-5)


def test_the_step_schedule_decays_every_decay_epochs(watched):
    seen = watched(train_ms, *'--lr 0.001 --epochs 5 --schedule step --decay-epochs 2 --decay-rate 0.1'.split())
    assert [step.lr for step in seen] == pytest.approx([1e-3] * 6 + [1e-4] * 6 + [1e-5] * 3)


def test_the_cosine_schedule_rises_and_falls(watched):
    seen = watched(train_ms, *'--lr 0.001 --epochs 99 --steps 30 --schedule cosine'.split())
    ramp, cosine = [(i + 1) / 3 for i in range(30)], [0.5 * (1 + math.cos(math.pi * i / 30)) for i in range(30)]
    assert [step.lr for step in seen] == pytest.approx([0.001 * min(a, b) for a, b in zip(ramp, cosine)])
    args = train_ms.get_args([])
    factor = [common.learning_rate_factor(i, args, per_epoch=50, total=2000) for i in range(2000)]
    assert factor[0] == 0.01 and factor[49] == 0.5, 'a ramp of at most 100 steps'
    assert factor[1000] == pytest.approx(0.5) and factor[-1] < 1e-5


def test_the_loss_of_a_record_is_the_mean_over_its_steps(before_training):
    """Each step has two images of different classes, so no image has a positive."""
    held, losses, updates = before_training(train_ms), iter(range(60)), []
    held.optimizer.register_step_post_hook(lambda *_: updates.append(1))
    record = train_epoch(held, lambda x, y: next(losses) + 0 * held.model.linear.bias.sum(), range(60))
    assert record['loss'] == pytest.approx(59 / 2) and record['no_positive'] == 1 and len(updates) == 60


def test_after_a_run_that_ends_with_a_frozen_backbone_the_next_run_trains_it(before_training):
    held = before_training(train_ms, '--steps', '0', '--epochs', '2', '--freeze-backbone-epochs', '1')
    weights = dict(held.model.trunk.named_parameters())
    user_froze = weights.pop('bn1.bias').requires_grad_(False)

    def interrupted(x, y):
        assert not any(weight.requires_grad for weight in weights.values())
        raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        common.train(held.args, held.model, held.data, interrupted, held.optimizer)
    assert all(weight.requires_grad for weight in weights.values()) and not user_froze.requires_grad


def test_freezing_the_backbone_for_the_whole_run_gives_a_warning(watched, capsys):
    watched(train_ms, '--epochs', '3', '--freeze-backbone-epochs', '2')
    assert 'warning' not in capsys.readouterr().err
    watched(train_ms, '--epochs', '2', '--freeze-epochs', '2')
    assert 'warning: the backbone will not be trained' in capsys.readouterr().err


def test_missing_training_images_give_a_one_line_error(run, small, tmp_path):
    make_folder(tmp_path / 'mine/test', 'ab', per_class=2)
    with pytest.raises(UsageError, match='mine has no training set: put training classes into train/'):
        run(train_ms, '--data', 'mine')
    with pytest.raises(UsageError, match='--fold 0/2 needs at least two classes in each block, of 0'):
        run(train_ms, '--data', 'mine', '--fold', '0/2')


def test_a_run_has_the_given_number_of_steps_and_calls_log_after_each_epoch(before_training):
    """An epoch has three steps. The function gets the record of the epoch, and those that were evaluated."""
    held = before_training(train_ms, *'--epochs 5 --steps 7 --eval-every 2 --name x'.split())
    classes, logged = [], []

    def step(x, y):
        classes.append(len(y.unique()))
        return held.step(x, y)

    def log(folder, record, records):
        logged.append((str(folder), record['epoch'], [evaluated['epoch'] for evaluated in records]))
        record.clear()
    held.args.lr = np.float64(held.args.lr)                 # torch does not load numbers of NumPy
    common.train(held.args, held.model, held.data, step, held.optimizer, log=log)
    assert classes == [4] * 7, 'the batches of --batch-size 8 --per-class 2'
    assert logged == [('runs/x', epoch, epochs) for epoch, epochs in enumerate([[0], [0], [0, 2], [0, 2, 3]])]
    assert common.read_checkpoint('runs/x')['args']['lr'] == held.args.lr


def test_each_epoch_follows_from_the_seed(watched):
    one, same, other = (watched(train_ms, '--epochs', '2', '--seed', seed) for seed in '112')
    assert all(torch.equal(a.x, b.x) for a, b in zip(one, same))
    assert not any(torch.equal(a.x, b.x) for a, b in zip(one, other))
    orders = {str([step.y for step in steps]) for steps in (one[:3], one[3:], other[:3], other[3:])}
    assert len(orders) == 4, 'each epoch of each seed has batches of its own'
    assert len({step.draw for step in one + same + other}) == 12, 'random numbers of a step, from the seed and the step'


@pytest.mark.parametrize('one, other', [
    ('train_metrix --mixup none', 'train_metrix --mixup input feature --alpha 0.5'),
    ('train_ms', 'train_ccl --dropout 0.5 --jitter 0'), ('train_ms', 'train_hse --loss epshn --hybrids append')])
def test_methods_with_one_seed_train_on_the_same_batches_and_crops(watched, one, other):
    """Ten batches are bitwise identical, independent of other random numbers of the step or the loss."""
    found = []
    for line in (one, other):
        script, *flags = line.split()
        flags += '--epochs 9 --steps 10 --per-class 2 --min-crop 0.5'.split()
        found.append(watched(__import__(script), *flags))
    assert len(found[0]) == len(found[1]) == 10
    assert all(torch.equal(a.x, b.x) and torch.equal(a.y, b.y) for a, b in zip(*found))


@pytest.mark.parametrize('script', SCRIPTS)
def test_thirty_steps_raise_recall_on_unseen_classes(tmp_path, monkeypatch, small, script):
    """A small network is trained on 12 classes of shapes of 20 px, with the defaults of the script."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(common, 'draw_shapes', partial(common.draw_shapes, 12, 10, 20))
    flags = '--image-size 20 --steps 30 --epochs 99 --eval-every 99 --device cpu --precision fp32 --name x'
    after = __import__(script).main(flags.split())['R@1']
    before = common.read_checkpoint('runs/x')['rows'][0]['R@1']
    assert after > before + 3, f'{before} before, {after} after'


@pytest.mark.parametrize('name, kind', [('adam', torch.optim.Adam), ('adamw', torch.optim.AdamW),
                                        ('sgd', torch.optim.SGD), ('rmsprop', torch.optim.RMSprop)])
def test_optimizers_get_the_values_of_the_flags_and_are_fused_if_possible(before_training, name, kind):
    momentum = dict(momentum=0.9) if name in ('sgd', 'rmsprop') else {}
    flags = [f'--momentum={value}' for value in momentum.values()]
    optimizer = before_training(train_ms, f'--optimizer={name}', '--lr=0.01', '--weight-decay=0.1', *flags).optimizer
    assert type(optimizer) is kind and bool(optimizer.defaults.get('fused')) == (name != 'rmsprop')
    assert (dict(lr=0.01, weight_decay=0.1) | momentum).items() <= optimizer.param_groups[0].items()


@pytest.mark.slow
def test_compile_without_a_compiler_is_one_line_before_training(run, small, monkeypatch, tmp_path):
    for name, value in dict(CXX='no', PATH='no', TORCHINDUCTOR_CACHE_DIR=str(tmp_path / 'new')).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch._inductor.config.cpp, 'cxx', (None, 'no'))
    with pytest.raises(UsageError, match='^--compile needs a compiler that works: ') as raised:
        run(train_ms, '--compile', '--name', 'x')
    assert '\n' not in str(raised.value) and not common.Path('runs').exists()


@pytest.mark.skipif(torch.__version__ < '2.7', reason='torch 2.6 skips the frames of a torch.nn.Sequential')
@pytest.mark.parametrize('flags, graphs', [('', 1), ('--freeze-backbone-epochs 1', 2)])
def test_the_trunk_is_compiled_once_and_not_for_evaluations(run, small, monkeypatch, flags, graphs):
    """Evaluations, whose batches have other sizes, are not compiled. A frozen trunk has no gradients, which is a second
    graph. The names of weights stay as they are."""
    torch._dynamo.reset()
    compiled, real, compile = [], torch.compile, torch.nn.Module.compile

    def backend(graph, inputs):
        compiled.append(graph)
        return graph.forward
    monkeypatch.setattr(torch, 'compile', lambda part, **options: real(part, **options) if options else part)
    monkeypatch.setattr(torch.nn.Module, 'compile', lambda self: compile(self, backend=backend))
    run(train_ms, '--compile', '--epochs', '3', '--steps', '0', '--name', 'x', *flags.split())
    assert len(compiled) == graphs and 'trunk.conv1.weight' in common.read_checkpoint('runs/x')['model']


def test_minutes_and_images_per_second(run, small, monkeypatch):
    """The first of each three steps takes ten minutes, the others one. A resumed run adds to the minutes before. The
    minutes that are left are those of the whole run."""
    clock, steps, texts, real = SimpleNamespace(now=0.0), [], [], train_ms.multi_similarity_loss
    clock.time = lambda: clock.now

    def slow(*args, **kwargs):
        clock.now += 60 if len(steps) % 3 else 600
        steps.append(1)
        return real(*args, **kwargs)
    monkeypatch.setattr(common, 'time', clock)
    monkeypatch.setattr(train_ms, 'multi_similarity_loss', slow)
    run(train_ms, '--epochs', '1', '--steps', '0', '--name', 'x')
    train_ms.main(['--resume', 'runs/x', '--epochs', '40', '--steps', '4', '--device', 'cpu'])
    before, first, last = log_of('x')
    assert [record['minutes'] for record in (before, first, last)] == [0, 12, 22]
    assert first['images_per_second'] == pytest.approx(24 / 720) and last['images_per_second'] == pytest.approx(8 / 600)
    assert last['no_positive'] == 0
    steps.clear()
    monkeypatch.setattr(common, 'show_progress', lambda text, done=False: texts.append(text))
    run(train_ms, '--epochs', '2', '--steps', '4', '--name', 'y')
    assert 'step 3 of 3, 4.0 min left' in texts[1]


@pytest.mark.parametrize('bad_step, noticed', [(20, 20), (21, 40)])
def test_a_nan_loss_stops_the_run_within_twenty_steps(run, small, monkeypatch, bad_step, noticed):
    """The loss is checked every 20 steps; a NaN in any of them is detected."""
    make_folder(common.Path('many/train'), 'ab', per_class=40, size=8)
    make_folder(common.Path('many/test'), 'cd', per_class=2, size=8)
    steps, real = [], train_ms.multi_similarity_loss

    def loss(z, *rest):
        steps.append(1)
        return real(z, *rest) * (float('nan') if len(steps) == bad_step else 1)
    monkeypatch.setattr(train_ms, 'multi_similarity_loss', loss)
    with pytest.raises(UsageError, match=f'the loss is nan at epoch 1, step {noticed} of 40 or in the 19 before'):
        run(train_ms, '--data', 'many', '--name', 'broken', '--steps', '40', '--batch-size', '2', '--per-class', '0')
    assert len(steps) == noticed and common.read_checkpoint('runs/broken')['epoch'] == 0


def test_nan_weights_do_not_overwrite_a_checkpoint(run, small, monkeypatch):
    """NaN in the weights is detected after an epoch that is not evaluated."""
    def poisoned(args, loader, step, optimizer, epoch, *rest, real=common.train_epoch):
        record = real(args, loader, step, optimizer, epoch, *rest)
        if epoch == 2:
            optimizer.param_groups[0]['params'][-1].data[0] = float('nan')
        return record
    monkeypatch.setattr(common, 'train_epoch', poisoned)
    with pytest.raises(UsageError, match='NaN or infinite'):
        run(train_ms, '--epochs', '4', '--steps', '0', '--name', 'broken', '--eval-every', '4')
    assert common.read_checkpoint('runs/broken')['epoch'] == 1
