"""common.Embedder and the samplers."""
import math
import platform
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torchvision
from PIL import Image

import common
import train_ms
from common import BalancedSampler, Embedder, UsageError


def small_embedder(arch='resnet18', **options):
    torch.manual_seed(0)
    return Embedder(arch, dim=8, weights='none', **options)


# ---- sampler

def test_balanced_batches_are_p_by_k_class_by_class():
    labels = torch.arange(12).repeat(9)[torch.randperm(108, generator=torch.Generator().manual_seed(0))]
    samplers = [BalancedSampler(labels, 12, 3, torch.Generator().manual_seed(seed)) for seed in (0, 0, 1)]
    drawn, again, other = map(list, samplers)
    assert drawn == again != other, 'the generator decides'
    assert len(drawn) == len(samplers[0]) == 108 // 12
    for batch in drawn:
        classes = labels[batch].view(4, 3)
        assert (classes == classes[:, :1]).all() and len(set(classes[:, 0].tolist())) == 4
        assert len(set(batch)) == 12, 'an image must not come twice'
    assert sorted(i for batch in drawn for i in batch) == list(range(108)), 'an epoch deals every image once'


def test_what_is_left_of_a_deck_is_dealt_first():
    """With 5 classes, two in a batch, a class is left over from each shuffled deck. It comes next, so none is missing
    in four successive batches."""
    labels = torch.arange(800) % 5
    drawn = [set(labels[batch].tolist()) for batch in BalancedSampler(labels, 4, 2)]
    assert len(drawn) == 200 and all(set.union(*drawn[i:i + 4]) == set(range(5)) for i in range(197))


def test_small_classes_repeat_and_few_classes_shrink_the_batch(capsys):
    labels = torch.tensor([0, 0, 0, 0, 1, 2, 2])
    sampler = BalancedSampler(labels, 40, 4)
    assert '1 of 3 training classes have one image' in capsys.readouterr().err
    batch = next(iter(sampler))
    assert len(batch) == 12 and sorted(labels[batch].tolist()) == [0] * 4 + [1] * 4 + [2] * 4
    assert sorted(i for i in batch if labels[i] == 2) == [5, 5, 6, 6]
    assert len(BalancedSampler(torch.arange(24) % 2, 40, 4)) == 3, '24 images in batches of 8'
    BalancedSampler(labels, 2, 1)
    assert capsys.readouterr().err == '', 'no class is wanted twice'
    with pytest.raises(UsageError, match='--batch-size 10 is not a multiple of --per-class 4'):
        BalancedSampler(torch.arange(8) // 2, 10, 4)


def test_without_per_class_batches_are_random_and_drop_the_incomplete_last_one(before_training):
    held = before_training(train_ms, '--per-class', '0', '--batch-size', '7')
    lists = list(common.make_sampler(held.args, held.data.train.labels))
    assert [len(indices) for indices in lists] == [7] * 4, '30 images'
    assert len(set(sum(lists, []))) == 28 and sum(lists, []) != list(range(28)), 'no image twice, in random order'
    held.args.batch_size = 99
    assert [len(indices) for indices in common.make_sampler(held.args, held.data.train.labels)] == [30]


# ---- network

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


def checkpoint(path, **options):
    model = small_embedder(**options).eval()
    args = SimpleNamespace(script='train_ms', seed=7, image_size=32, resize=40)
    common.save_checkpoint(path, args, model, classes=['a', 'b'])
    return model


@pytest.mark.parametrize('options', [
    dict(layer_norm=True), dict(normalize=False), dict(arch='resnet34'), dict(pool='max', head_init='default')])
def test_a_checkpoint_builds_the_network_that_it_is_of(tmp_path, small, options):
    model = checkpoint(tmp_path / 'x.pt', **options)
    again = common.load_checkpoint(tmp_path / 'x.pt', precision='fp32')
    x = torch.randn(2, 3, 32, 32)
    assert torch.equal(model(x), again(x)) and options.items() <= again.config.items() and again.classes == ['a', 'b']
    saved = common.read_checkpoint(tmp_path / 'x.pt')
    assert saved['seed'] == 7 and saved['versions'] == dict(
        python=platform.python_version(), torch=torch.__version__, torchvision=torchvision.__version__)
    for precision in ('fp32', 'bf16'):
        assert common.load_checkpoint(tmp_path / 'x.pt', precision=precision).precision == precision


def test_weights_from_a_file_and_weights_that_do_not_fit(tmp_path):
    """Torchvision's, with or without their last layer; or a checkpoint, whose head is not taken"""
    trunk = checkpoint(tmp_path / 'x.pt').trunk.state_dict()
    torch.save(trunk | {'fc.weight': torch.zeros(1000, 512), 'fc.bias': torch.zeros(1000)}, tmp_path / 'whole.pth')
    torch.save({name: value.half() for name, value in trunk.items()}, tmp_path / 'half.pth')
    torch.save({name: value for name, value in trunk.items() if name != 'conv1.weight'}, tmp_path / 'cut.pth')
    for file, tolerance in (('whole.pth', 0), ('half.pth', 1e-3), ('x.pt', 0)):
        model = Embedder('resnet18', 16, weights=str(tmp_path / file))
        for name, value in model.trunk.state_dict().items():
            torch.testing.assert_close(value, trunk[name], rtol=tolerance, atol=tolerance)
    for arch, file in (('resnet34', 'whole.pth'), ('resnet18', 'cut.pth')):
        with pytest.raises(UsageError, match=f'{file} cannot be used; is it damaged, or of another') as raised:
            Embedder(arch, weights=str(tmp_path / file))
        assert '\n' not in str(raised.value)


def test_a_checkpoint_cuts_the_crop_of_its_evaluation_from_any_picture(small, tmp_path):
    checkpoint(tmp_path / 'x.pt')
    transform = common.load_checkpoint(tmp_path / 'x.pt').transform
    half = np.zeros((40, 80), dtype=np.uint8)
    half[:, 24:40] = 255                                        # 40 px high: the left half of the centre crop is white
    x, white = transform(Image.fromarray(half)), (torch.arange(32) < 16).float().expand(3, 32, 32)
    assert x.shape == (3, 32, 32) and torch.allclose(common.as_pictures(x), white, atol=1e-6)
    turned = Image.fromarray(np.rot90(half).copy())
    turned.getexif()[0x0112] = 6                                # to be shown turned
    assert torch.equal(transform(turned), x)


def test_half_precision_is_raised_to_the_widest_type_around_it():
    half, double = torch.zeros(2, dtype=torch.bfloat16), torch.zeros(2, dtype=torch.float64)
    assert common.at_least_float32(half).dtype == torch.float32
    assert [t.dtype for t in common.at_least_float32(half, double)] == [torch.float64] * 2


@pytest.mark.parametrize('training', [True, False])
def test_embedding_leaves_a_network_in_the_mode_that_it_had(small, training):
    images = common.Images(np.zeros(768, np.uint8), [(16, 16)], torch.zeros(1), 16)
    model = Embedder(dim=4, freeze_bn=False)
    before = model.trunk.bn1.running_mean.clone()
    common.embed(model.train(training), images)
    assert model.training == training and torch.equal(model.trunk.bn1.running_mean, before)
    model(torch.randn(4, 3, 32, 32))
    assert torch.equal(model.trunk.bn1.running_mean, before) != training, 'BatchNorm follows the batches of training'


# ---- chunks

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


@pytest.mark.parametrize('device, layout', [('cpu', torch.channels_last), ('meta', torch.contiguous_format)])
def test_channels_come_last_only_where_that_is_right_and_fast(small, device, layout):
    """meta stands for any device but a CPU and CUDA, a Mac's GPU for example."""
    model = Embedder(weights='none', dim=4).place(device)
    assert model.layout == layout and model.trunk.conv2.weight.is_contiguous(memory_format=layout)
