"""common.Embedder: pooling, head, precision, frozen BatchNorm, trunks and their weights."""
import copy
import math
import sys
from collections import OrderedDict
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
import torchvision
from conftest import SmallNet, numbered, small_embedder
from torch import nn

import common
import train_ms
from common import Embedder, UsageError


@pytest.mark.parametrize('pool', ['avg', 'max', 'avg+max'])
def test_embedder_pools_projects_and_normalizes(small, pool):
    model, f = small_embedder(pool=pool), torch.randn(2, 64, 2, 3).relu()
    pooled = dict(avg=f.mean((2, 3)), max=f.amax((2, 3)))
    p = sum(pooled[part] for part in pool.split('+'))
    assert torch.allclose(model.head(f), F.normalize(model.linear(p), dim=1), atol=1e-6)
    model = small_embedder(pool=pool, layer_norm=True, normalize=False)
    normed = (p - p.mean(1, True)) / p.var(1, False, True).add(1e-5).sqrt()
    assert torch.allclose(model.head(f), model.linear(normed), atol=1e-5) and not list(model.norm.parameters())


@pytest.mark.parametrize('precision', ['fp32', 'bf16'])
def test_embedder_pools_and_projects_in_float32(small, precision):
    """Pooling and head are float32: a mean over 25 values in bfloat16 would have only two decimal digits."""
    model, exact = small_embedder(precision=precision).eval(), small_embedder().eval()
    x = torch.randn(2, 3, 40, 40)
    f = model.features(x)
    assert f.shape == (2, 64, 5, 5) and f.dtype == (torch.bfloat16 if precision == 'bf16' else torch.float32)
    assert model(x).dtype == torch.float32 and torch.equal(model.pool_features(f), model.pool_features(f.float()))
    assert torch.equal(model(x), exact(x)) == (precision == 'fp32') and torch.allclose(model(x), exact(x), atol=0.05)


def test_the_head_begins_with_the_variance_of_kaiming_fan_out(small):
    head = Embedder(dim=256, weights='none').linear
    assert head.weight.std().item() == pytest.approx(math.sqrt(2 / 256), rel=0.03) and not head.bias.any()
    default = Embedder(dim=256, weights='none', head_init='default').linear
    assert default.weight.abs().max() <= 64 ** -0.5 and default.bias.any(), "torch's own: uniform, 64 channels"


def test_compile_compiles_the_trunk_in_place(run, small, monkeypatch):
    """Names of weights in a checkpoint stay as they are."""
    compile = Mock()
    monkeypatch.setattr(nn.Module, 'compile', compile)
    run(train_ms, '--compile', '--name', 'x')
    compile.assert_called_once_with()
    assert 'trunk.conv1.weight' in common.read_checkpoint('runs/x')['model']


@pytest.mark.parametrize('freeze', [True, False])
def test_frozen_batchnorm_keeps_its_statistics_and_trains_its_affine_weights_with_the_trunk(before_training, freeze):
    """Without --freeze-bn, the statistics change even while the trunk is frozen. SGD has no momentum of it then."""
    held = before_training(train_ms, *'--steps 0 --epochs 4 --freeze-epochs 2 --optimizer sgd --momentum 0.9'.split(),
                           '--freeze-bn' if freeze else '--no-freeze-bn', '--epsilon', 'off')
    seen = []

    def step(x, y):
        seen.append(copy.deepcopy(held.model.state_dict()))
        return held.step(x, y)
    common.train(held.args, held.model, held.data, step, held.optimizer)
    for number, (before, after) in enumerate(zip(seen, seen[1:])):
        same = {name.removeprefix('trunk.'): torch.equal(before[name], after[name]) for name in before}
        assert same['bn1.running_mean'] == same['bn1.running_var'] == freeze
        assert same['bn1.weight'] == same['bn2.bias'] == same['conv1.weight'] == (number < 6), f'step {number}'
        assert not same['linear.weight'], 'the head is always trained'


def test_embed_keeps_the_order_of_the_images_and_the_training_mode_of_each_layer(small):
    images, model = numbered(3), small_embedder(freeze_bn=False)
    model.trunk.bn1.eval()                                  # a user may have frozen it
    z = common.embed(model, images, batch_size=4)
    assert model.training and model.trunk.bn2.training and not model.trunk.bn1.training
    expected = torch.cat([model.eval()(x[None]) for x, _ in images])
    assert torch.allclose(z, expected, atol=1e-5) and not torch.allclose(z, z.flip(0), atol=1e-3)


def test_networks_of_torchvision_are_resnets_with_its_first_weights_or_with_the_strides_of_v1(monkeypatch):
    """He et al. (2015): torchvision's resnet50 would load the same weights, and give other features."""
    strided = [name for name, layer in common.make_trunk('resnet50_v1').named_modules()
               if getattr(layer, 'stride', 1) == (2, 2)]
    assert strided == ['conv1', *(f'layer{i}.0.{layer}' for i in (2, 3, 4) for layer in ('conv1', 'downsample.0'))]
    get_model = Mock(return_value=SmallNet())
    monkeypatch.setattr(torchvision.models, 'get_model', get_model)
    common.make_trunk('resnet50', 'imagenet')
    get_model.assert_called_once_with('resnet50', weights='IMAGENET1K_V1')
    get_model.side_effect = [SmallNet(), nn.Sequential(nn.ReLU(), nn.ReLU())]
    for arch, weights, reason in (('resnet50_v1', 'imagenet', 'torchvision has weights of resnet50 only'),
                                  ('vgg16', 'none', 'it is no ResNet')):
        with pytest.raises(UsageError, match=f'cannot make --arch {arch} with --weights {weights}: {reason}'):
            common.make_trunk(arch, weights)


def test_a_network_of_timm_is_made_for_the_image_size_and_has_its_own_normalization(run, monkeypatch, tmp_path):
    """Here it is a convolution whose kernel has the size of the image. All its classifiers are left out of weights."""
    mean = (0.1, 0.2, 0.3)
    config = SimpleNamespace(mean=mean, std=(1, 1, 1), input_size=(3, 518, 518), fixed_input_size=True,
                             classifier=('head.fc', 'head_dist'))
    make = Mock(side_effect=lambda *_, img_size, **__: nn.Sequential(OrderedDict(head=nn.Conv2d(3, 9, img_size))))
    timm = SimpleNamespace(create_model=make, get_pretrained_cfg=dict(dino=config).get)
    monkeypatch.setitem(sys.modules, 'timm', timm)
    with pytest.raises(UsageError, match='timm knows no such network'):
        train_ms.get_args(['--arch', 'timm:dyno'])
    flags = ['--arch', 'timm:dino', '--device', 'cpu']
    args = train_ms.get_args(flags)
    assert args.image_size == 224, 'not 518 px, which would be 5.4 times the pixels'
    assert (*common.transforms_from(args)['train_transform'].transforms[-1].mean,) == mean
    run(train_ms, *flags, '--weights', 'imagenet', '--image-size', '98', '--per-class', '2', '--name', 'x')
    make.assert_called_once_with('dino', pretrained=True, num_classes=0, img_size=98)
    assert common.read_checkpoint('runs/x')['transform']['mean'] == mean
    trunk = common.load_checkpoint('runs/x').trunk.state_dict()
    torch.save(trunk | {'head.fc.bias': torch.zeros(5), 'head_dist.bias': torch.zeros(5)}, tmp_path / 'x.pth')
    assert torch.equal(common.make_trunk('timm:dino', tmp_path / 'x.pth', 98).head.weight, trunk['head.weight'])
    config.fixed_input_size = False
    assert train_ms.get_args(flags).image_size == 518


@pytest.mark.parametrize('pooling', [[], [nn.AdaptiveAvgPool2d(1), nn.Flatten()]])
def test_any_module_as_trunk_is_trained_but_for_weights_that_are_frozen_in_it_and_reloaded(run, monkeypatch, pooling):
    trunk, build = nn.Sequential(nn.Conv2d(3, 12, 8, stride=8), nn.BatchNorm2d(12), *pooling), common.build
    trunk[1].bias.requires_grad_(False)
    given = copy.deepcopy(trunk)
    monkeypatch.setattr(common, 'build', lambda args, data: build(args, data, trunk=trunk))
    row = run(train_ms, *'--name mine --precision fp32 --epsilon off --epochs 2 --steps 0 --freeze-epochs 1'.split())
    mine = common.load_checkpoint('runs/mine', trunk=given)
    assert torch.equal(mine.trunk[1].bias, given[1].bias) and not torch.equal(mine.trunk[1].weight, given[1].weight)
    data = common.dataset_from(train_ms.get_args(['--resume', 'runs/mine', '--device', 'cpu']))
    assert common.evaluate(mine, data).items() <= row.items()


@pytest.mark.parametrize('prefix', ['', 'module.encoder_q.'])
@pytest.mark.parametrize('wrap', [dict, lambda saved: dict(model=saved, epoch=3), lambda saved: dict(state_dict=saved),
                                  lambda saved: dict(student=dict(x=torch.zeros(1)), teacher=saved)])
def test_weights_load_from_a_state_dict_with_any_prefix_and_have_to_fit(small, tmp_path, wrap, prefix):
    """The classifier, layers beside the network, and the count of batches, which old files lack, are left out."""
    network = SmallNet().state_dict()
    saved = {f'{prefix}{name}': value for name, value in network.items() if 'num_batches' not in name}
    saved |= {'projector.weight': torch.zeros(3), f'{prefix}fc.0.bias': torch.zeros(2)}
    torch.save(wrap(saved), tmp_path / 'x.pth')
    trunk = Embedder('resnet18', weights=tmp_path / 'x.pth', freeze_bn=False).trunk.state_dict()
    assert all(torch.equal(value, network[name]) for name, value in trunk.items())
    missing = {name: value for name, value in saved.items() if name != f'{prefix}conv2.weight'}
    two_networks = {f'{student}.{name}': value for name, value in network.items() for student in 'ab'}
    for wrong in (missing, saved | {f'{prefix}bn1.more': torch.zeros(16)}, two_networks):
        torch.save(wrap(wrong), tmp_path / 'x.pth')
        with pytest.raises(UsageError, match='x.pth has not the weights of --arch resnet18: '):
            common.make_trunk('resnet18', tmp_path / 'x.pth')


def test_weights_of_a_run_are_those_of_its_arch(run, small):
    run(train_ms, '--name', 'x')
    trunk = common.load_checkpoint('runs/x').trunk.state_dict()
    assert all(map(torch.equal, common.make_trunk('resnet18', 'runs/x').state_dict().values(), trunk.values()))
    with pytest.raises(UsageError, match='runs/x has weights of --arch resnet18, not of resnet34'):
        common.make_trunk('resnet34', 'runs/x')
