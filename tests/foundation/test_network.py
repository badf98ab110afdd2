"""common.Embedder: pooling, head, precision, frozen BatchNorm, trunks."""
import copy
import math
import sys
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torchvision
from conftest import SmallNet, numbered, small_embedder

import common
import eval as evaluation
import train_ms
from common import Embedder, UsageError


@pytest.mark.parametrize('pool', ['avg', 'max', 'avg+max'])
def test_embedder_pools_projects_and_normalises(pool):
    model, f = small_embedder(pool=pool), torch.randn(2, 512, 2, 3).relu()
    pooled = dict(avg=f.mean((2, 3)), max=f.amax((2, 3)))
    expected = F.normalize(model.linear(sum(pooled[part] for part in pool.split('+'))), dim=1)
    assert torch.allclose(model.head(f), expected, atol=1e-6)


def test_embedder_with_layer_norm_and_without_normalization():
    model, p = small_embedder(layer_norm=True, normalize=False), torch.randn(3, 512)
    normed = (p - p.mean(1, True)) / p.var(1, False, True).add(1e-5).sqrt()
    assert torch.allclose(model.project(p), model.linear(normed), atol=1e-5)
    assert torch.allclose(small_embedder().project(p).norm(dim=1), torch.ones(3))
    assert not list(model.norm.parameters())


def test_head_init():
    """Kaiming, fan out: std sqrt(2 / D), for D = 256 of 512 features twice the variance of fan in; bias 0."""
    head = Embedder('resnet18', 256, weights='none').linear
    assert head.weight.std().item() == pytest.approx(math.sqrt(2 / 256), rel=0.02) and not head.bias.any()
    default = Embedder('resnet18', 256, weights='none', head_init='default').linear
    assert default.weight.std().item() == pytest.approx(1 / math.sqrt(3 * 512), rel=0.02) and default.bias.any()


@pytest.mark.parametrize('precision', ['fp32', 'bf16'])
def test_embedder_pools_and_projects_in_float32(small, precision):
    """Pooling and head are float32: a mean over 49 values in bfloat16 would have only two decimal digits."""
    model, exact = small_embedder(precision=precision).eval(), small_embedder().eval()
    x = torch.randn(2, 3, 40, 40)
    f = model.features(x)
    assert f.dtype == (torch.bfloat16 if precision == 'bf16' else torch.float32)
    assert f.shape == (2, 64, 5, 5)
    assert model.pool_features(f).dtype == model(x).dtype == torch.float32
    assert torch.equal(model.pool_features(f), model.pool_features(f.float()))
    assert torch.equal(model(x), exact(x)) == (precision == 'fp32') and torch.allclose(model(x), exact(x), atol=0.05)
    grads = [torch.autograd.grad(each.features(x).square().sum(), each.trunk.conv2.weight)[0].flatten()
             for each in (model, exact)]
    assert F.cosine_similarity(*grads, dim=0) > 0.99


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16, torch.float64])
def test_a_network_in_another_precision_embeds(small, dtype):
    """As after model.half(). The images may be in float32; pooling, head and embeddings are at least float32."""
    model, images = small_embedder(layer_norm=True).eval(), numbered(3)
    images.transform = common.make_test_transform(32, 32)
    own = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 32 * 32, 4)).to(dtype)
    assert common.embed(own, images).shape == (6, 4)
    vectors = torch.randn(6, 9, dtype=torch.float64)
    for head in (Embedder('none', 5, input_shape=(9,)), Embedder('none', 5, input_shape=(9,)).to(dtype)):
        for items in (vectors, vectors.to(dtype)):
            assert common.embed(head, common.Images(items, range(6))).shape == (6, 5)
    with pytest.raises(RuntimeError):
        model(torch.zeros(1, 3, 32, 32, dtype=torch.uint8))
    before, x = common.embed(model, images), images[4][0][None]
    calls = []
    model.linear.register_forward_hook(lambda *_: calls.append(1))
    model.precision = 'bf16'
    after = common.embed(model.to(dtype), images)
    assert calls, 'the head is called, so that hooks and adapters of it run'
    assert F.cosine_similarity(before, after).min() > 0.999
    assert torch.allclose(model(x), model(x.to(dtype)), atol=1e-2) and model(x).dtype == max(
        dtype, torch.float32, key=lambda kind: torch.finfo(kind).bits)


@pytest.mark.parametrize('frozen', [0, 2])
@pytest.mark.parametrize('freeze', [True, False])
def test_frozen_batchnorm_keeps_its_statistics_and_trains_its_affine_weights_with_the_trunk(
        before_training, freeze, frozen):
    """Without --freeze-bn, the statistics change even while the trunk is frozen. An epoch has three steps."""
    held, seen = before_training(train_ms, '--epochs', '4', '--steps', '0', '--freeze-backbone-epochs', str(frozen),
                                 '--freeze-bn' if freeze else '--no-freeze-bn', '--epsilon', 'off'), []

    def step(x, y):
        seen.append({name: value.clone() for name, value in held.model.state_dict().items()})
        return held.step(x, y)
    common.train(held.args, held.model, held.data, step, held.optimizer)
    for number, (before, after) in enumerate(zip(seen, seen[1:])):
        same = {name.removeprefix('trunk.'): torch.equal(before[name], after[name]) for name in before}
        assert same['bn1.running_mean'] == same['bn1.running_var'] == freeze
        assert same['bn1.weight'] == same['bn2.bias'] == same['conv1.weight'] == (number < 3 * frozen), f'step {number}'
        assert not same['linear.weight'], 'the head is always trained'


def test_imagenet_weights_are_the_first_version(monkeypatch):
    """The weights are IMAGENET1K_V1, as in the papers. Without a connection, the error message names --weights FILE."""
    get_model = Mock(side_effect=OSError('no route'))
    monkeypatch.setattr(torchvision.models, 'get_model', get_model)
    with pytest.raises(UsageError, match='no ImageNet weights for resnet50: OSError no route; .* --weights FILE'):
        Embedder('resnet50')
    get_model.assert_called_once_with('resnet50', weights='IMAGENET1K_V1')


def test_a_page_in_place_of_downloaded_weights_is_one_line_with_its_folder(monkeypatch, tmp_path):
    monkeypatch.setenv('TORCH_HOME', str(tmp_path))
    file = tmp_path / 'hub/checkpoints/resnet18-f37072fd.pth'
    file.parent.mkdir(parents=True)
    file.write_text('<!DOCTYPE html><html><body>Please log in</body></html>')
    with pytest.raises(UsageError, match=f'no ImageNet weights for resnet18: .* delete a damaged one in {file.parent}'):
        Embedder('resnet18')


@pytest.mark.parametrize('training', [True, False])
def test_embed_keeps_the_training_mode_of_a_network(small, training):
    images = common.Images([np.zeros((16, 16, 3), np.uint8)], [0], transform=common.make_test_transform(16, 16))
    model = Embedder(dim=4, freeze_bn=False)
    before = model.trunk.bn1.running_mean.clone()
    model.train(training).trunk.bn1.eval()                  # frozen by a user
    common.embed(model, images)
    assert model.training == training and torch.equal(model.trunk.bn1.running_mean, before)
    assert not model.trunk.bn1.training
    images.transform = Mock(side_effect=KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        common.embed(model, images)
    assert model.training == training


@pytest.mark.parametrize('options', [dict(pool='mean'), dict(head_init='xavier'), dict(precision='fp16')])
def test_an_unknown_option_of_a_network_is_rejected(options):
    with pytest.raises(UsageError, match=' is not one of '):
        Embedder('none', input_shape=(4,), **options)


def test_float32_is_not_rounded_to_tf32_in_a_script(monkeypatch):
    """TF32 errs by 1e-3 in a cosine."""
    monkeypatch.setattr(torch.backends.cudnn, 'benchmark', False)
    torch.set_float32_matmul_precision('high')
    common.cli(lambda: None)
    assert torch.get_float32_matmul_precision() == 'highest'


@pytest.mark.parametrize('device, layout', [('cpu', torch.channels_last), ('meta', torch.contiguous_format)])
def test_channels_last_is_used_on_a_cpu_and_on_cuda_only(small, device, layout):
    """The device meta is an example of any other device, such as a Mac's GPU."""
    model = Embedder(weights='none', dim=4).place(device)
    assert model.trunk.conv2.weight.is_contiguous(memory_format=layout)


@pytest.fixture
def transformer(monkeypatch):
    """Replaces vit_b_16 by a vision transformer of one layer, for images of 32 x 32 pixels."""
    get_model = torchvision.models.get_model

    def get(arch, weights=None):
        return torchvision.models.VisionTransformer(32, 16, 1, 2, 8, 16) if arch == 'vit_b_16' else get_model(arch)
    monkeypatch.setattr(torchvision.models, 'get_model', get)


@pytest.mark.parametrize('arch, classifier, c', [('vit_b_16', 'heads.head', 8), ('shufflenet_v2_x0_5', 'fc', 1024)])
def test_another_network_loses_its_classifier_only(transformer, tmp_path, arch, classifier, c):
    """Weights of other architectures load from a torchvision file, or from a checkpoint, which has other keys."""
    torch.manual_seed(0)
    network = torchvision.models.get_model(arch).eval()
    torch.save(network.state_dict(), tmp_path / 'own.pth')
    model = Embedder(arch, 8, 'avg', tmp_path / 'own.pth', freeze_bn=c == 1024, input_shape=(3, 32, 32)).eval()
    x = torch.randn(2, 3, 32, 32)
    f = model.features(x)
    assert f.shape == (2, c, 1, 1)
    assert torch.allclose(network.get_submodule(classifier)(f.flatten(1)), network(x), atol=1e-5)
    assert torch.allclose(model(x), model.project(f.flatten(1)))
    torch.save(dict(model=model.state_dict()), tmp_path / 'checkpoint.pt')
    again = Embedder(arch, 4, 'avg', tmp_path / 'checkpoint.pt', input_shape=(3, 32, 32)).eval()
    assert torch.equal(again.features(x), f)


@pytest.mark.parametrize('prefix', ['', '_orig_mod.', 'trunk.', 'module.encoder_q.'])
@pytest.mark.parametrize('wrap', [dict, lambda saved: {'model': saved, 'epoch': 3},
                                  lambda saved: {'a': {'state': {0: torch.zeros(3)}}, 'b': {'net': saved}}])
def test_weights_load_from_any_dict_in_a_file_and_below_any_prefix(small, tmp_path, wrap, prefix):
    """The classifier, layers beside the network, and the count of batches, which old files lack, are left out."""
    file, network = tmp_path / 'weights.pth', SmallNet().state_dict()
    saved = {f'{prefix}{name}': value for name, value in network.items() if 'num_batches' not in name}
    torch.save(wrap(saved | {'projector.weight': torch.zeros(3), f'{prefix}fc.0.bias': torch.zeros(2)}), file)
    trunk = Embedder(dim=4, weights=file).trunk.state_dict()
    assert all(torch.equal(value, network[name]) for name, value in trunk.items())
    missing = {name: value for name, value in saved.items() if name != f'{prefix}conv2.weight'}
    for wrong, name in ((saved | {f'{prefix}conv2.more': torch.zeros(3)}, 'conv2.more'), (missing, 'conv2.weight')):
        torch.save(wrap(wrong), file)
        with pytest.raises(UsageError, match=f'weights.pth has weights of another --arch: .*, such as {name}$'):
            Embedder(dim=4, weights=file)


def test_of_several_networks_in_a_file_the_first_is_used_and_named(small, tmp_path, capsys):
    student, teacher = SmallNet().state_dict(), SmallNet().state_dict()
    torch.save({'student': {f'net.{name}': value for name, value in student.items()}, 'teacher': teacher},
               tmp_path / 'x.pth')
    trunk = Embedder(dim=4, weights=tmp_path / 'x.pth').trunk
    assert torch.equal(trunk.conv1.weight, student['conv1.weight'])
    assert 'x.pth has several such networks; the first is used, with the prefix net.' in capsys.readouterr().err
    torch.save({'mine': {'layer.weight': torch.zeros(3)}}, tmp_path / 'x.pth')
    with pytest.raises(UsageError, match='has no conv1.weight, the first .*; it has 2 names, such as mine, layer'):
        Embedder(dim=4, weights=tmp_path / 'x.pth')


@pytest.mark.parametrize('flags, message', [
    ('--arch resnet19', 'resnet19 is neither a classifier of torchvision, such as resnet50'),
    ('--arch squeezenet1_0', 'squeezenet1_0 has no linear classifier'),
    ('--arch vit_b_16 --image-size 64', 'takes no input of shape .*64, 64.*--image-size')])
def test_a_trunk_that_does_not_fit_is_rejected_in_one_line(transformer, flags, message):
    args = train_ms.get_args(['--device', 'cpu', *flags.split()])
    with pytest.raises(UsageError, match=message) as raised:
        common.build(args)
    assert '\n' not in str(raised.value)


def test_a_trunk_that_needs_larger_images_in_training_is_rejected_before_it():
    """As Inception's auxiliary classifier does. The forward pass in training mode changes no buffer, no generator."""
    class Trunk(SmallNet):
        def forward(self, x):
            f = self.bn1(F.dropout(self.conv1(x), 0.5, self.training))
            return F.conv2d(f, torch.ones(4, 16, 40, 40)) if self.training else f
    trunk, state = Trunk(), torch.get_rng_state()
    with pytest.raises(UsageError, match=r'no input of shape \(3, 32, 32\)'):
        Embedder(trunk=trunk, freeze_bn=False, input_shape=(3, 32, 32))
    assert torch.equal(torch.get_rng_state(), state)
    assert not trunk.bn1.running_mean.any() and not trunk.bn1.num_batches_tracked


def test_a_trunk_that_does_not_return_one_tensor_is_rejected():
    for output in ((torch.zeros(1, 3), 0), torch.zeros(1, 3, 4)):
        trunk = torch.nn.Module()
        trunk.forward = lambda x, output=output: output
        with pytest.raises(UsageError, match='^the trunk must return one tensor'):
            Embedder(trunk=trunk)


class Patches(torch.nn.Module):
    """Images (B, 3, S, S) -> (B, 12), or the feature map (B, 12, S / 8, S / 8)"""

    def __init__(self, pooled):
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 12, 8, stride=8)
        self.frozen = torch.nn.Parameter(torch.linspace(1, 2, 12), requires_grad=False)
        self.pooled = pooled

    def forward(self, x):
        f = self.conv(x) * self.frozen[:, None, None]
        return f.mean((2, 3)) if self.pooled else f


@pytest.fixture
def fake_timm(monkeypatch):
    """fake_timm(**configuration): a network of timm with this configuration, which is made for 518 px or img_size"""
    class Net(torch.nn.Module):
        def __init__(self, img_size=518):
            super().__init__()
            self.position = torch.nn.Parameter(torch.zeros(img_size // 14, img_size // 14))

        def forward(self, x):
            return (F.avg_pool2d(x, 14) + self.position).flatten(1)[:, :9]

    def fake(**config):
        config = SimpleNamespace(mean=(0.1, 0.2, 0.3), std=(1, 1, 1), input_size=(3, 518, 518), **config)
        monkeypatch.setitem(sys.modules, 'timm', SimpleNamespace(
            get_pretrained_cfg=lambda name: config,
            create_model=lambda name, pretrained, num_classes, **options: Net(**options)))
        return Net()
    return fake


def test_a_transformer_of_timm_is_made_for_the_image_size_and_reloaded_with_it(fake_timm, run):
    """Its own size, 518 px, would be 5.4 times the pixels of 224. Its mean and standard deviation are used."""
    fake_timm(fixed_input_size=True, classifier='head')
    flags = ['--arch', 'timm:dino', '--weights', 'none', '--freeze-bn']
    args = train_ms.get_args([*flags, '--device', 'cpu'])
    assert args.image_size == 224
    for transform in map(common.transforms_from(args).get, ('transform', 'train_transform')):
        assert list(transform.transforms[-1].mean) == [0.1, 0.2, 0.3], 'in training as in the test'
    record = run(train_ms, *flags, '--image-size', '98', '--name', 'x', '--precision', 'fp32')
    assert common.load_checkpoint('runs/x').trunk.position.shape == (7, 7)
    assert common.read_checkpoint('runs/x')['transform']['mean'] == (0.1, 0.2, 0.3)
    result = evaluation.main(['--checkpoint', 'runs/x', '--device', 'cpu'])
    assert result['s-'] == pytest.approx(record['s-'], abs=1e-5)
    fake_timm(fixed_input_size=False, classifier='head')
    assert train_ms.get_args([*flags, '--device', 'cpu']).image_size == 518


@pytest.mark.parametrize('classifier', ['head', ('head', 'head_dist')])
def test_all_heads_of_a_network_of_timm_are_left_out_of_its_weights(fake_timm, tmp_path, classifier):
    weights = fake_timm(classifier=classifier).state_dict()
    weights['position'] += 1
    heads = [classifier] if isinstance(classifier, str) else classifier
    torch.save(weights | {f'{name}.weight': torch.zeros(5, 9) for name in heads}, tmp_path / 'x.pth')
    assert common.make_trunk('timm:x', tmp_path / 'x.pth').position.eq(1).all()


@pytest.mark.slow
@pytest.mark.parametrize('arch', ['vit_small_patch14_dinov2.lvd142m', 'swin_tiny_patch4_window7_224.ms_in1k',
                                  'convnext_atto.d2_in1k'])
def test_backbones_of_timm_with_random_weights(run, arch):
    pytest.importorskip('timm')
    record = run(train_ms, '--arch', f'timm:{arch}', '--weights', 'none', '--image-size', '96', '--steps', '1',
                 '--name', 'x', '--precision', 'fp32')
    result = evaluation.main(['--checkpoint', 'runs/x', '--device', 'cpu'])
    assert result['MAP@R'] == pytest.approx(record['MAP@R'], abs=1e-3)


def test_an_unknown_model_of_timm_is_one_line(monkeypatch):
    timm = Mock()
    timm.get_pretrained_cfg.side_effect = [None, RuntimeError('Invalid pretrained tag')]        # as in timm 1.0
    for module, message in ((timm, 'timm has no model x'), (timm, 'Invalid pretrained'), (None, 'pip install timm')):
        monkeypatch.setitem(sys.modules, 'timm', module)
        with pytest.raises(UsageError, match=message):
            train_ms.get_args(['--device', 'cpu', '--arch', 'timm:x'])


@pytest.mark.parametrize('pooled', [True, False])
def test_any_module_as_trunk_is_trained_resumed_reloaded_and_evaluated(run, monkeypatch, pooled):
    """A weight that it froze stays frozen."""
    build = common.build
    monkeypatch.setattr(common, 'build', lambda args, data: build(args, data, trunk=Patches(pooled)))
    flags = ['--schedule', 'constant', '--epochs', '2', '--precision', 'fp32']
    run(train_ms, *flags, '--steps', '6', '--name', 'full')
    run(train_ms, *flags, '--steps', '3', '--name', 'mine')
    record = train_ms.main(['--resume', 'runs/mine', '--steps', '6', '--device', 'cpu'])
    full, mine = (common.load_checkpoint(f'runs/{name}', trunk=Patches(pooled)) for name in ('full', 'mine'))
    assert all(torch.equal(value, mine.state_dict()[name]) for name, value in full.state_dict().items())
    assert mine.trunk.frozen.equal(Patches(pooled).frozen)
    trunk = Patches(pooled)
    before = copy.deepcopy(trunk.state_dict())
    common.load_checkpoint('runs/mine', trunk=trunk)
    assert all(map(torch.equal, trunk.state_dict().values(), before.values())) and trunk.training
    data = common.dataset_from(train_ms.get_args(['--resume', 'runs/mine']))
    assert common.evaluate(mine, data).items() <= record.items()
    for load in (common.load_checkpoint, lambda path: evaluation.main(['--checkpoint', path])):
        with pytest.raises(UsageError, match='the trunk of runs/mine was made in Python: .*trunk=module'):
            load('runs/mine')


def test_resnet50_v1_has_its_strides_on_the_1x1_convolutions():
    """He et al. (2015); torchvision's network would load the same weights, and give other features."""
    trunk = common.make_trunk('resnet50_v1')
    strided = [name for name, layer in trunk.named_modules() if getattr(layer, 'stride', 1) == (2, 2)]
    assert strided == ['conv1'] + [f'layer{stage}.0.{layer}' for stage in (2, 3, 4)
                                   for layer in ('conv1', 'downsample.0')]
    with pytest.raises(UsageError, match='resnet50_v1.*--weights FILE'):
        common.make_trunk('resnet50_v1', 'imagenet')
    with pytest.raises(UsageError, match='vit_b_16_v1'):
        common.make_trunk('vit_b_16_v1')
