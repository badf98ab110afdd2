"""common.Embedder: pooling, head, precision, frozen BatchNorm, chunks, trunks."""
import math
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torchvision
from conftest import small_embedder

import common
import eval as evaluation
import train_metrix
from common import Embedder, UsageError


@pytest.mark.parametrize('pool', ['avg', 'max', 'avg+max'])
def test_the_head_pools_projects_and_normalises(pool):
    model, f = small_embedder(pool=pool), torch.randn(2, 512, 2, 3).relu()
    pooled = dict(avg=f.mean((2, 3)), max=f.amax((2, 3)))
    expected = F.normalize(model.linear(sum(pooled[part] for part in pool.split('+'))), dim=1)
    assert torch.allclose(model.head(f), expected, atol=1e-6)


def test_layer_norm_and_normalize():
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
@pytest.mark.parametrize('side', [17, 64])
def test_precision_is_that_of_the_trunk_alone(precision, side):
    """Pooling and head are float32: pooled in bfloat16, means of 49 values would have two decimal digits."""
    model, exact = small_embedder(precision=precision).eval(), small_embedder().eval()
    x = torch.randn(4, 3, side, side)
    f = model.features(x)
    assert f.dtype == (torch.bfloat16 if precision == 'bf16' else torch.float32)
    assert f.shape == (4, 512, *[math.ceil(side / 32)] * 2)
    assert model.pool_features(f).dtype == model(x).dtype == torch.float32
    assert torch.equal(model.pool_features(f), model.pool_features(f.float()))
    assert torch.equal(model(x), exact(x)) == (precision == 'fp32') and torch.allclose(model(x), exact(x), atol=0.05)
    # Of 16 px, which --image-size refuses, a CPU's bfloat16 gradients are not even finite at times.
    grads = [torch.autograd.grad(each.features(x).square().sum(), each.trunk.layer4[0].conv1.weight)[0].flatten()
             for each in (model, exact)]
    assert F.cosine_similarity(*grads, dim=0) > 0.99


def test_frozen_batchnorm_stays_frozen_before_during_and_after_warm_up():
    model = small_embedder(freeze_bn=True)
    norms = {name: value.clone() for name, value in model.state_dict().items()
             if 'bn' in name or 'downsample.1' in name}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for on in (True, False, True):
        model.train()
        model.train_trunk(on)
        before = model.trunk.conv1.weight.clone()
        optimizer.zero_grad()
        model(torch.randn(4, 3, 32, 32)).sum().backward()
        optimizer.step()
        assert all(torch.equal(model.state_dict()[name], value) for name, value in norms.items())
        assert torch.equal(before, model.trunk.conv1.weight) == (not on), 'warm-up must leave the trunk alone'


def test_imagenet_weights_are_the_first_version_and_offline_it_says_what_to_do(monkeypatch):
    """IMAGENET1K_V1, from which the papers started"""
    get_model = Mock(side_effect=OSError('no route'))
    monkeypatch.setattr(torchvision.models, 'get_model', get_model)
    with pytest.raises(UsageError, match='resnet50-0676ba61.pth.*no route.*--weights'):
        Embedder('resnet50')
    get_model.assert_called_once_with('resnet50', weights='IMAGENET1K_V1')


def test_half_precision_is_raised_to_the_widest_type_around_it():
    half, double = torch.zeros(2, dtype=torch.bfloat16), torch.zeros(2, dtype=torch.float64)
    assert common.at_least_float32(half).dtype == torch.float32
    assert [t.dtype for t in common.same_precision(half, double)] == [torch.float64] * 2


@pytest.mark.parametrize('training', [True, False])
def test_embedding_leaves_a_network_in_the_mode_that_it_had(small, training):
    images = common.Images([np.zeros((16, 16, 3), np.uint8)], torch.zeros(1), 16)
    model = Embedder(dim=4, freeze_bn=False)
    before = model.trunk.bn1.running_mean.clone()
    common.embed(model.train(training), images)
    assert model.training == training and torch.equal(model.trunk.bn1.running_mean, before)
    model(torch.randn(4, 3, 32, 32))
    assert torch.equal(model.trunk.bn1.running_mean, before) != training, 'BatchNorm follows the batches of training'


# ---- chunks and layouts

@pytest.mark.parametrize('pool', ['avg', 'avg+max'])
def test_chunks_have_the_gradient_of_the_whole_batch(small, pool):
    """Also where the last chunk is smaller, and where feature maps are used directly. Evaluation has no chunks."""
    x = torch.randn(7, 3, 64, 64, generator=torch.Generator().manual_seed(1))
    found = []
    for chunk in (0, 3):
        model = small_embedder(freeze_bn=True, pool=pool, chunk=chunk).double()
        seen = []
        model.trunk.conv1.register_forward_hook(lambda _, inputs, __, seen=seen: seen.append(len(inputs[0])))
        f = model.features(x.double())
        (model.head(f) @ torch.arange(8.).double() + f.mean()).sum().backward()
        found.append([f.detach(), *(weight.grad for weight in model.parameters() if weight.requires_grad)])
        with torch.no_grad():
            model(x.double())
        assert seen == [*([3, 3, 1, 1, 3, 3] if chunk else [7]), 7], 'each chunk once more in the backward pass'
    for whole, chunks in zip(*found):
        torch.testing.assert_close(chunks, whole, rtol=1e-9, atol=1e-12)


def test_float32_is_not_rounded_to_tf32(small):
    """Some systems turn it on. Its errors of 1e-3 in a cosine would make equal embeddings differ."""
    torch.set_float32_matmul_precision('high')
    Embedder(weights='none', dim=4)
    assert torch.get_float32_matmul_precision() == 'highest'


@pytest.mark.parametrize('device, layout', [('cpu', torch.channels_last), ('meta', torch.contiguous_format)])
def test_channels_come_last_only_where_that_is_right_and_fast(small, device, layout):
    """meta stands for any device but a CPU and CUDA, a Mac's GPU for example."""
    model = Embedder(weights='none', dim=4).place(device)
    assert model.layout == layout and model.trunk.conv2.weight.is_contiguous(memory_format=layout)


# ---- other trunks

@pytest.mark.parametrize('arch, c, batchnorm', [('swin_t', 768, False), ('shufflenet_v2_x0_5', 1024, True)])
def test_another_network_loses_its_classifier_and_gives_maps_of_one_position(arch, c, batchnorm, tmp_path):
    """Its weights come from torchvision's file, or from a checkpoint of these scripts, which has other keys."""
    torch.manual_seed(0)
    network = torchvision.models.get_model(arch).eval()
    torch.save(network.state_dict(), tmp_path / 'own.pth')
    model = Embedder(arch, 8, 'avg', weights=tmp_path / 'own.pth').eval()
    x = torch.randn(2, 3, 32, 32)
    f = model.features(x)
    name, linear = common.classifier(network)
    assert f.shape == (2, c, 1, 1) and name.startswith(('head', 'fc'))
    assert torch.allclose(linear(f.flatten(1)), network(x), atol=1e-5)
    assert torch.allclose(model(x), model.project(f.flatten(1)))
    torch.save(dict(model=model.state_dict()), tmp_path / 'checkpoint.pt')
    again = Embedder(arch, 4, 'avg', weights=tmp_path / 'checkpoint.pt').eval()
    assert torch.equal(again.features(x), f) and not any(key.startswith(name) for key in again.trunk.state_dict())
    assert common.describe_trunk(arch, 32) == (batchnorm, False)
    assert common.describe_trunk('resnet18', 32) == common.describe_trunk('regnet_x_400mf', 32) == (True, True)
    with pytest.raises(UsageError, match='own.pth cannot be used'):
        Embedder('resnet18', 8, weights=tmp_path / 'own.pth')


@pytest.mark.parametrize('flags, message', [
    ('--arch resnet19', 'none of the .* classifiers of torchvision, such as resnet50'),
    ('--arch squeezenet1_0', 'SqueezeNet has no linear classifier'),
    ('--arch vit_b_16', 'vit_b_16 does not take images of --image-size 64: Wrong image height'),
    ('--arch swin_t --pool max', '--pool has no effect with --arch swin_t'),
    ('--arch swin_t --no-freeze-bn', '--freeze-bn has no effect with --arch swin_t, which has no BatchNorm'),
    ('--arch shufflenet_v2_x0_5 --chunk 2', '--chunk needs --freeze-bn')])
def test_a_trunk_that_does_not_fit_is_named_before_anything_is_read(flags, message):
    with pytest.raises(UsageError, match=message):
        train_metrix.get_args(flags.split())


@pytest.mark.filterwarnings('ignore:The default weight initialization')
def test_a_network_with_several_outputs_or_without_such_weights_is_refused():
    with pytest.raises(UsageError, match='googlenet returns GoogLeNetOutputs and not one tensor'):
        train_metrix.get_args(['--arch', 'googlenet', '--image-size', '96'])
    with pytest.raises(UsageError, match='vit_h_14 has no weights IMAGENET1K_V1, but IMAGENET1K_SWAG_E2E_V1'):
        common.load_network('vit_h_14', 'imagenet')


@pytest.mark.slow
def test_a_transformer_trains_mixes_resumes_and_is_evaluated(run, capsys):
    """It has no BatchNorm, so its chunks need none that is frozen."""
    flags = '--arch swin_t --chunk 3 --mixup input feature embed --name mine --epochs 1 --steps 3 --precision fp32'
    assert run(train_metrix, *flags.split())['epoch'] == 1
    shown = capsys.readouterr().out
    assert 'pool avg,' in shown and 'freeze_bn True' in shown
    assert train_metrix.main(['--resume', 'runs/mine', '--epochs', '2', '--steps', '6'])['epoch'] == 2
    result = evaluation.main(['--checkpoint', 'runs/mine', '--device', 'cpu', '--precision', 'fp32'])
    assert result['MAP@R'] == pytest.approx(common.read_checkpoint('runs/mine')['rows'][-1]['MAP@R'], abs=1e-3)
