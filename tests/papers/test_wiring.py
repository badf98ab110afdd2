"""From flag to loss: what `step` computes is the public loss function, called by hand with the values of the flags.

Metrix's step with mixtures, which has many parts, is compared with loops in test_metrix.py.
"""
import pytest
import torch
import torch.nn.functional as F

import common
import train_ccl
import train_contrastive
import train_hse
import train_metrix
import train_ms
import train_proxy_anchor
import train_proxynca_pp

LABELS = torch.tensor([0, 0, 1, 1, 2, 2, 3, 3])


def embed(x):
    """Stands for the network: unit vectors that are far apart, and through which gradients pass"""
    return F.normalize(x.flatten(1)[:, ::199][:, :16], dim=1)


def hybrids_by_hand(base_loss, alpha, temperature, stay, **options):
    """HSE's step: the last images leave the batch; the base loss of those that stay, plus the loss of their hybrids"""
    def expected(images, labels, learned):
        images, labels = images[:stay], labels[:stay]
        h, sources = train_hse.make_hybrids(images, labels, **options)
        z = embed(images)
        weak = (labels[None, :, None] == labels[sources][:, None, :]).any(dim=2)
        extra = [learned['proxies']] if learned else []
        return base_loss(z, labels, *extra) + train_hse.hybrid_loss(embed(h), z, weak, ~weak, alpha, temperature)
    return expected


def ccl(z, y, learned, **options):
    return train_ccl.center_contrastive_loss(z, y, learned['centers'], **options)


# (script, flags, loss(images, labels, learned)): between them, every flag of a loss at a value that is not its default
CASES = [
    (train_contrastive, '--pos-margin 0.3 --neg-margin 1.4 --power 2',
     lambda x, y, _: train_contrastive.contrastive_loss(embed(x), y, 0.3, 1.4, 2)),
    (train_contrastive, '--form similarity --margin -0.1 --reduction sum',
     lambda x, y, _: train_contrastive.contrastive_similarity_loss(embed(x), y, -0.1, 'sum')),
    (train_ms, '--alpha 3 --beta 7 --lam 0.2 --epsilon 0.02',
     lambda x, y, _: train_ms.multi_similarity_loss(embed(x), y, 3, 7, 0.2, 0.02)),
    (train_ms, '--beta 2 --epsilon 0', lambda x, y, _: train_ms.multi_similarity_loss(embed(x), y, 2, 2, 0.5, 0.0)),
    (train_ms, '--alpha 3 --epsilon off',
     lambda x, y, _: train_ms.multi_similarity_loss(embed(x), y, 3, 50, 0.5, None)),
    (train_proxy_anchor, '--alpha 5 --delta 0.3',
     lambda x, y, t: train_proxy_anchor.proxy_anchor_loss(embed(x), y, t['proxies'], 5, 0.3)),
    (train_proxynca_pp, '--temperature 0.4',
     lambda x, y, t: train_proxynca_pp.proxynca_pp_loss(embed(x), y, t['proxies'], 0.4)),
    (train_proxynca_pp, '--loss proxynca --temperature 0.4',
     lambda x, y, t: train_proxynca_pp.proxynca_loss(embed(x), y, t['proxies'], 0.4) / len(y)),
    (train_ccl, '--s 5 --margin 0.2 --lam 0.7 --smoothing 0.3',
     lambda x, y, t: ccl(embed(x), y, t, s=5, margin=0.2, lam=0.7, smoothing=0.3)),
    (train_ccl, '--variant stop_grad --s 5 --margin 0.2 --lam 0.7 --smoothing 0.3',
     lambda x, y, t: ccl(embed(x), y, t, s=5, margin=0.2, lam=0.7, smoothing=0.3, stop_grad=True)),
    (train_ccl, '--variant cluster --mu 1 --s 5 --margin 0.2 --lam 0.7 --smoothing 0.3',
     lambda x, y, t: ccl(embed(x), y, t, s=5, margin=0.2, lam=0.7, smoothing=0.3)),
    (train_ccl, '--variant proxynca --s 5 --dropout 0.5',
     lambda x, y, t: train_ccl.scaled_proxynca_loss(F.dropout(embed(x), 0.5), y, t['centers'], 5)),
    (train_ccl, '--variant center_loss --lam 0.7 --smoothing 0.3 --dropout 0.5', lambda x, y, t: train_ccl.center_loss(
        F.dropout(embed(x), 0.5), y, t['classifier'].weight, t['classifier'].bias, t['centers'], 0.7, 0.3)),
    (train_ccl, '--dropout 0.5', lambda x, y, t: ccl(F.dropout(embed(x), 0.5), y, t, s=16, lam=2, smoothing=0.1)),
    (train_metrix, '--mixup none --epsilon off', lambda x, y, _: train_ms.multi_similarity_loss(
        embed(x), y, 18, 75, 0.77, None)),
    (train_metrix, '--mixup none --gamma 2 --epsilon 0', lambda x, y, _: train_ms.multi_similarity_loss(
        embed(x), y, 18, 2, 0.77, 0.0)),
    (train_metrix, '--mixup none --epsilon 0.02', lambda x, y, _: train_ms.multi_similarity_loss(
        embed(x), y, 18, 75, 0.77, 0.02)),
    (train_hse, '--loss contrastive --alpha 3 --temperature 0.5 --kind mixup',
     hybrids_by_hand(train_hse.contrastive_loss, 3, 0.5, stay=6, kind='mixup', num=2, per_class=2)),
    (train_hse, '--loss epshn --alpha 3 --kind gridmask --mask-size 31 --hybrids append --num 3',
     hybrids_by_hand(train_hse.epshn_loss, 3, 0.1, stay=8, kind='gridmask', mask_size=31, num=3, per_class=2)),
    (train_hse, '--loss npair --alpha 3 --axis left-right --hybrids append --combinations 2',
     hybrids_by_hand(train_hse.npair_loss, 3, 0.1, stay=8, axis='left-right', num=2, per_class=2, combinations=2)),
    (train_hse, '--loss proxy_anchor',
     hybrids_by_hand(train_hse.proxy_anchor_loss, 2, 0.1, stay=6, num=2, per_class=2)),
    (train_hse, '--batch-size 40 --combinations 2',      # the batch has 8 images; two classes leave it, not the first
     hybrids_by_hand(train_hse.multi_similarity_loss, 0.05, 0.1, stay=4, num=2, per_class=2, combinations=2)),
    (train_hse, '--loss epshn --alpha 0', lambda x, y, _: train_hse.epshn_loss(embed(x), y)),
]


def weights(held):
    """What is learned beside the network"""
    return [weight for value in held.loss_params.values() for weight in
            (value.parameters() if isinstance(value, torch.nn.Module) else [value]) if weight.requires_grad]


@pytest.mark.parametrize('script, flags, by_hand', CASES, ids=[f'{c[0].__name__} {c[1]}' for c in CASES])
def test_step_is_the_loss_with_the_values_of_the_flags(before_training, script, flags, by_hand):
    """In value, in the gradient by the images, and in that by what is learned beside the network."""
    held = before_training(script, *flags.split())
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


@pytest.mark.parametrize('script, flags, rates', [
    (train_contrastive, '', [0.01]), (train_ms, '', [0.01]), (train_proxy_anchor, '', [0.01, 0.1]),
    (train_proxy_anchor, '--proxy-lr-mult 7', [0.01, 0.07]), (train_proxynca_pp, '--proxy-lr-mult 7', [0.01, 0.07]),
    (train_ccl, '', [0.01, 0.01]), (train_ccl, '--variant center_loss --center-lr-mult 3', [0.01, 0.03]),
    (train_metrix, '', [0.01]),
    (train_metrix, '--loss proxy_anchor', [0.01, 0.1]),
    (train_metrix, '--loss proxynca_pp --proxy-lr-mult 7', [0.01, 0.07]),
    (train_hse, '--alpha 0 --per-class 0', [0.01]), (train_hse, '--loss proxy_anchor --proxy-lr-mult 7', [0.01, 0.07])])
def test_everything_learned_is_in_the_optimizer_at_its_own_rate(before_training, script, flags, rates):
    held = before_training(script, '--lr', '0.01', *flags.split())
    groups = held.optimizer.param_groups
    assert [group['lr'] for group in groups] == pytest.approx(rates)
    assert len(rates) == 1 or len(groups[1]['params']) == 1, 'proxies and centres have a group of their own'
    learn = [id(weight) for group in groups for weight in group['params']]
    assert sorted(learn) == sorted(id(weight) for weight in [*held.model.parameters(), *weights(held)])


@pytest.mark.parametrize('loss', [train_contrastive.contrastive_loss, train_hse.contrastive_loss])
def test_positives_are_pulled_until_their_distance_is_that_of_rounding(loss):
    """In float32 that is 0.0014."""
    z = F.normalize(torch.tensor([[1.0, 0.0], [1.0, 0.0015]]), dim=1).requires_grad_()
    loss(z, torch.tensor([0, 0])).backward()
    assert z.grad.abs().max() > 0.4 * 0.0015 and z.grad.isfinite().all()


@pytest.mark.parametrize('optimizer', ['adam', 'adamw', 'rmsprop'])
def test_eps_reaches_the_optimizer_of_proxynca_pp(before_training, optimizer):
    held = before_training(train_proxynca_pp, '--optimizer', optimizer, '--eps', '0.5')
    assert all(group['eps'] == 0.5 for group in held.optimizer.param_groups)


@pytest.mark.parametrize('flags, expected', [
    ('--pool max --dim 24', dict(pool='max', dim=24, freeze_bn=False)), ('--pool avg', dict(pool='avg', dim=16)),
    ('--arch resnet34', dict(arch='resnet34')), ('--freeze-bn --chunk 3', dict(freeze_bn=True, chunk=3)),
    ('--precision fp32', dict(precision='fp32')), ('--precision bf16', dict(precision='bf16')),
    ('', dict(precision=common.pick_precision('auto', torch.device('cpu'))))])
def test_network_flags_reach_the_network(before_training, flags, expected):
    model = before_training(train_ms, *flags.split()).model
    found = model.config | dict(chunk=model.chunk, precision=model.precision)
    assert {key: found[key] for key in expected} == expected
    assert model(torch.randn(2, 3, 32, 32)).shape == (2, expected.get('dim', 16))


@pytest.mark.parametrize('script, flags, name, size', [
    (train_proxy_anchor, '', 'proxies', (2 / 6) ** 0.5), (train_proxynca_pp, '', 'proxies', 1 / 8),
    (train_ccl, '', 'centers', 1 / 20), (train_hse, '--loss proxy_anchor', 'proxies', (2 / 6) ** 0.5),
    (train_metrix, '--loss proxy_anchor', 'proxies', (2 / 6) ** 0.5),
    (train_metrix, '--loss proxynca_pp', 'proxies', (2 / 6) ** 0.5)])
def test_proxies_and_centres_start_and_decay_as_their_papers_code_has_it(before_training, script, flags, name, size):
    """For six classes. Their size decides how fast they turn; their mean, whether they start all over the sphere."""
    held = before_training(script, '--dim', '400', *flags.split())
    start = held.loss_params[name]
    assert len(start) == 6 and start.std().item() == pytest.approx(size, rel=0.05)
    assert abs(start.mean().item()) < size / 12
    assert len({group['weight_decay'] for group in held.optimizer.param_groups}) == 1, 'they decay, too'
