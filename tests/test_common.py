"""common.py: datasets, images, sampler, network, retrieval, the loop, checkpoints and messages."""
import json
import math
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import SHARED, draw_folder, on_circle
from PIL import Image
from torchvision import transforms

import common
import train_ms
from common import BalancedSampler, Embedder, UsageError, retrieval_metrics

ROOT = Path(common.__file__).parent


def small_embedder(**options):
    torch.manual_seed(0)
    return Embedder('resnet18', dim=8, weights='none', **options)


# ---- retrieval ----------------------------------------------------------------------------------


def ranked(hits, r):
    """One query and r matches; the retrieved list has a match at each rank in `hits`, then the others."""
    wrong = [rank for rank in range(1, 11) if rank not in hits]
    order = [(rank, 0) for rank in hits] + [(rank, 1) for rank in wrong]
    order += [(50 + i, 0) for i in range(r - len(hits))]
    gallery = on_circle(*[rank for rank, _ in order], dtype=torch.float32)
    return retrieval_metrics(on_circle(0, dtype=torch.float32), torch.tensor([0]), gallery,
                             torch.tensor([label for _, label in order]))


@pytest.mark.parametrize('hits, rp, map_at_r', [([1], 10, 10), ([1, 10], 20, 12), ([1, 2], 20, 20),
                                                (list(range(1, 11)), 100, 100)])
def test_rc_eq3_map_at_r_as_in_table_3(hits, rp, map_at_r):
    found = ranked(hits, r=10)
    assert found['R@1'] == 100
    assert found['RP'] == pytest.approx(rp) and found['MAP@R'] == pytest.approx(map_at_r)


def test_rc_eq4_precision_counts_only_at_matches():
    """Matches at ranks 2 and 3 of R = 3: (0 + 1/2 + 2/3) / 3."""
    assert ranked([2, 3], r=3)['MAP@R'] == pytest.approx(100 * (1 / 2 + 2 / 3) / 3)


@pytest.mark.parametrize('with_gallery', [False, True])
def test_retrieval_equals_a_loop(with_gallery):
    generator = torch.Generator().manual_seed(1)
    z, y = F.normalize(torch.randn(60, 4, generator=generator), dim=1), torch.randint(7, (60,), generator=generator)
    query, rest = (z[:20], z[20:]) if with_gallery else (z, z)
    qy, gy = (y[:20], y[20:]) if with_gallery else (y, y)
    recall, rp, average = {1: 0, 4: 0}, [], []
    for i in range(len(query)):
        order = (query[i] @ rest.T).argsort(descending=True).tolist()
        if not with_gallery:
            order.remove(i)
        hit = [bool(gy[j] == qy[i]) for j in order]
        r = sum(hit)
        for k in recall:
            recall[k] += any(hit[:k])
        rp.append(sum(hit[:r]) / r)
        average.append(sum(sum(hit[:n]) / n for n in range(1, r + 1) if hit[n - 1]) / r)
    found = retrieval_metrics(query, qy, *((rest, gy) if with_gallery else ()), ks=(1, 4))
    expected = {f'R@{k}': 100 * v / len(query) for k, v in recall.items()}
    expected |= {'RP': 100 * np.mean(rp), 'MAP@R': 100 * np.mean(average)}
    assert found == pytest.approx(expected, abs=1e-3)


def test_a_collapsed_network_scores_about_chance():
    y = torch.arange(50).repeat_interleave(4)
    found = retrieval_metrics(torch.ones(200, 3), y)
    assert found['R@1'] < 5 and found['MAP@R'] < 5, 'equal embeddings must not count as hits'


def test_a_perfect_network_scores_100():
    y = torch.arange(5).repeat_interleave(3)
    found = retrieval_metrics(F.one_hot(y).float(), y)
    assert found == {'R@1': 100, 'R@2': 100, 'R@4': 100, 'R@8': 100, 'RP': 100, 'MAP@R': 100}


def test_every_image_duplicated_under_another_class_scores_zero():
    z = torch.randn(30, 5, generator=torch.Generator().manual_seed(0))
    found = retrieval_metrics(torch.cat([z, z]), torch.cat([torch.arange(30) // 2, 100 + torch.arange(30) // 2]))
    assert found['R@1'] == 0


def test_among_equals_non_matches_come_first():
    z = on_circle(0, 0, 0, 90, dtype=torch.float32)         # to image 0, image 1 (match) and 2 (not) are equal
    found = retrieval_metrics(z[:1], torch.tensor([0]), z[1:], torch.tensor([0, 1, 0]))
    assert found['R@1'] == 0 and found['R@2'] == 100


def test_a_query_without_a_match_is_a_miss_and_is_counted():
    z, y = on_circle(0, 5, 90, dtype=torch.float32), torch.tensor([0, 0, 1])
    found = retrieval_metrics(z, y)
    assert found['R@1'] == pytest.approx(200 / 3) and found['MAP@R'] == 100 and found['unmatched'] == 1


def test_the_torch_search_of_a_gpu_agrees_with_faiss(monkeypatch):
    z, y = torch.randn(200, 6, generator=torch.Generator().manual_seed(3)), torch.arange(200) % 20
    by_faiss = retrieval_metrics(z, y)
    monkeypatch.setitem(sys.modules, 'faiss', None)         # importing it now fails: torch searches, as on a GPU
    assert 'topk' in common.searcher(z).__code__.co_names
    assert retrieval_metrics(z, y) == by_faiss


def test_mean_similarities_against_the_matrix():
    z, y = on_circle(0, 20, 70, 110, 200), torch.tensor([0, 0, 1, 1, 1])
    s, same, other = z @ z.T, y[:, None] == y, ~torch.eye(5, dtype=torch.bool)
    positive, negative = common.mean_similarities(z, y)
    assert positive == pytest.approx(s[same & other].mean().item())
    assert negative == pytest.approx(s[~same].mean().item())


# ---- datasets -----------------------------------------------------------------------------------


def write_stand_ins(paths):
    """One small JPEG under many names: real annotation files, no real images."""
    source = None
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        if source is None:
            source = path
            Image.fromarray(np.full((12, 16, 3), 128, np.uint8)).save(source, 'JPEG')
        else:
            os.link(source, path)


@pytest.mark.skipif(not (SHARED / 'data/cub').exists(), reason='../shared/data/cub is not there')
def test_cub_counts_on_the_real_annotation(tmp_path, capsys):
    shutil.copytree(SHARED / 'data/cub', tmp_path, dirs_exist_ok=True)
    base = tmp_path / 'CUB_200_2011'
    names = [line.split()[1] for line in open(base / 'images.txt')]
    write_stand_ins([base / 'images' / name for name in names])
    (base / 'images/001.Black_footed_Albatross/._Black_Footed_Albatross_0046_18.jpg').write_bytes(b'resource fork')
    data = common.load_dataset('cub', tmp_path, resize=8, image_size=8, cache=tmp_path / 'cache')
    assert (len(data.train), data.train.num_classes) == (5864, 100)
    assert (len(data.query), data.query.num_classes) == (5924, 100)
    assert data.gallery is data.query and data.train.labels[0] == 0 and data.train[0].shape == (8, 10, 3)
    (base / 'images' / names[7]).unlink()
    with pytest.raises(UsageError, match='1 of 11,788 images are missing'):
        common.load_dataset('cub', tmp_path, resize=8, image_size=8, cache=tmp_path / 'cache')
    (base / 'images.txt').write_text(''.join(f'{i} {name}\n' for i, name in enumerate(names[:-5])))
    with pytest.raises(UsageError, match='expected 5,924 images of 100 classes, found 5,919'):
        common.load_dataset('cub', tmp_path)


@pytest.mark.skipif(not (SHARED / 'data/cars').exists(), reason='../shared/data/cars is not there')
def test_cars_counts_on_the_real_annotation(tmp_path):
    shutil.copy(SHARED / 'data/cars/cars_annos.mat', tmp_path)
    write_stand_ins([tmp_path / f'car_ims/{i:06d}.jpg' for i in range(1, 16186)])
    splits = common.list_images('cars', tmp_path)           # the pictures themselves: see CUB
    assert [(len(names), len(set(names))) for _, names, _ in splits.values()] == [(8054, 98), (8131, 98)]


def test_sop_official_format(tmp_path, monkeypatch):
    monkeypatch.setitem(common.DATASETS['sop'], 'counts', dict(train=(4, 2), query=(6, 3)))
    base = tmp_path / 'Stanford_Online_Products'
    rows = {'train': [(1, 1, 1), (2, 1, 1), (3, 2, 4), (4, 2, 4)],
            'test': [(5, 3, 1), (6, 3, 1), (7, 4, 2), (8, 4, 2), (9, 5, 12), (10, 5, 12)]}
    for split, lines in rows.items():
        write_stand_ins([base / f'bicycle_final/{i}_{split}.JPG' for i, _, _ in lines])
        text = ''.join(f'{i} {c} {g} bicycle_final/{i}_{split}.JPG\n' for i, c, g in lines)
        (base / f'Ebay_{split}.txt').write_text('image_id class_id super_class_id path\n' + text)
    data = common.load_dataset('sop', tmp_path, resize=8, cache=tmp_path / 'cache')
    assert data.train.labels.tolist() == [0, 0, 1, 1] and data.train.groups.tolist() == [0, 0, 3, 3]
    assert data.query.labels.tolist() == [0, 0, 1, 1, 2, 2]


def test_inshop_official_format(tmp_path, monkeypatch):
    monkeypatch.setitem(common.DATASETS['inshop'], 'counts', dict(train=(3, 2), query=(2, 2), gallery=(2, 2)))
    rows = [('a.jpg', 'id_00000002', 'train'), ('b.jpg', 'id_00000002', 'train'), ('c.jpg', 'id_00000007', 'query'),
            ('d.jpg', 'id_00000007', 'gallery'), ('e.jpg', 'id_00000005', 'train'), ('f.jpg', 'id_00000001', 'query'),
            ('g.jpg', 'id_00000001', 'gallery')]
    write_stand_ins([tmp_path / 'Img/img/WOMEN' / name for name, _, _ in rows])
    (tmp_path / 'Eval').mkdir()
    text = ''.join(f'img/WOMEN/{name}      {item}     {status}\n' for name, item, status in rows)
    (tmp_path / 'Eval/list_eval_partition.txt').write_text('7\nimage_name item_id evaluation_status\n' + text)
    data = common.load_dataset('inshop', tmp_path, resize=8, cache=tmp_path / 'cache')
    assert data.train.labels.tolist() == [0, 0, 1]
    assert data.query.labels.tolist() == [1, 0] and data.gallery.labels.tolist() == [1, 0]
    assert data.gallery is not data.query
    row = common.evaluate(small_embedder(), data)
    assert row['R@10'] == 100


def test_published_counts_of_the_large_sets():
    assert common.DATASETS['sop']['counts'] == dict(train=(59551, 11318), query=(60502, 11316))
    assert common.DATASETS['inshop']['counts'] == dict(train=(25882, 3997), query=(14218, 3985), gallery=(12612, 3985))


@pytest.mark.parametrize('name', ['cub', 'cars', 'sop', 'inshop', 'folder'])
def test_a_missing_dataset_says_where_what_and_how(name, tmp_path):
    with pytest.raises(UsageError) as error:
        common.load_dataset(name, tmp_path / 'nowhere')
    assert error.value.code == 2 and str(tmp_path) in str(error.value) and 'should hold' in str(error.value)
    if name != 'folder':
        assert 'https://' in str(error.value)
        with pytest.raises(UsageError, match='is missing'):
            common.load_dataset(name, tmp_path)


def test_folder_halves_the_sorted_classes_at_any_depth(tmp_path):
    draw_folder(tmp_path / 'photos', ['Greek/alpha', 'Greek/beta', 'Latin/a', 'Latin/deep/b'], per_class=2)
    (tmp_path / 'photos/Latin/a/._0.jpg').write_bytes(b'resource fork')
    (tmp_path / 'photos/Latin/a/notes.txt').write_text('no image')
    splits = common.list_images('folder', tmp_path / 'photos')
    assert splits['train'][1] == ('Greek/alpha',) * 2 + ('Greek/beta',) * 2
    assert splits['query'][1] == ('Latin/a',) * 2 + ('Latin/deep/b',) * 2


def test_folder_with_query_and_gallery(tmp_path):
    draw_folder(tmp_path / 'train', ['a', 'b'], per_class=2)
    draw_folder(tmp_path / 'query', ['d', 'c'], per_class=1)
    draw_folder(tmp_path / 'gallery', ['b2', 'c', 'd'], per_class=2)
    data = common.load_dataset('folder', tmp_path, resize=16, cache=tmp_path / 'cache')
    assert data.query.labels.tolist() == [1, 2] and data.gallery.labels.tolist() == [0, 0, 1, 1, 2, 2]


def test_a_class_in_train_and_test_is_warned_about(tmp_path, capsys):
    draw_folder(tmp_path / 'train', ['Greek/character01', 'b'], per_class=2)
    draw_folder(tmp_path / 'test', ['Greek/character01', 'c'], per_class=2)
    common.list_images('folder', tmp_path)
    assert 'Greek/character01' in capsys.readouterr().err


def test_fewer_than_two_classes_are_refused(tmp_path):
    draw_folder(tmp_path / 'train', ['a'], per_class=2)
    draw_folder(tmp_path / 'test', ['b', 'c'], per_class=2)
    with pytest.raises(UsageError, match='train has 1 class,'):
        common.load_dataset('folder', tmp_path)


@pytest.mark.parametrize('content', [b'no image at all', None], ids=['unreadable', 'truncated'])
def test_a_broken_image_is_named(tmp_path, content):
    draw_folder(tmp_path, ['a', 'b', 'c', 'd'], per_class=2, size=200)
    victim = tmp_path / 'b/1.jpg'
    victim.write_bytes(content or victim.read_bytes()[:-2000])
    with pytest.raises(UsageError, match='b/1.jpg'):
        common.load_dataset('folder', tmp_path, cache=tmp_path / 'cache')
    assert not list((tmp_path / 'cache').glob('*folder-train*')), 'half a cache must not stay'


@pytest.mark.parametrize('mode', ['L', 'LA', 'RGBA', 'CMYK', 'P', '1'])
def test_every_image_becomes_rgb(tmp_path, mode):
    suffix = 'jpg' if mode in ('L', 'CMYK') else 'png'
    for name in 'abcd':
        (tmp_path / name).mkdir()
        Image.new('RGB', (20, 14), (200, 30, 60)).convert(mode).save(tmp_path / name / f'0.{suffix}')
    data = common.load_dataset('folder', tmp_path, resize=7, cache=tmp_path / 'cache')
    assert data.train[0].shape == (7, 10, 3)


def test_the_second_run_reads_the_cache_and_a_changed_image_is_decoded_anew(tmp_path, monkeypatch):
    draw_folder(tmp_path / 'x', ['a', 'b', 'c', 'd'], per_class=2)
    load = lambda: common.load_dataset('folder', tmp_path / 'x', cache=tmp_path / 'cache')  # noqa: E731
    first = load()
    monkeypatch.setattr(common, 'stored', None)             # a second decoding would fail
    assert np.array_equal(load().train.pixels, first.train.pixels)
    monkeypatch.undo()
    Image.new('RGB', (30, 30), (0, 255, 0)).save(tmp_path / 'x/a/0.jpg')
    assert load().train[0].mean(axis=(0, 1))[1] > 250


def test_a_full_disk_is_refused_before_decoding_and_survived_while_writing(tmp_path, monkeypatch):
    draw_folder(tmp_path / 'x', ['a', 'b', 'c', 'd'], per_class=2)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, 'disk_usage', lambda path: usage._replace(free=100))
    with pytest.raises(UsageError, match='free; name another folder with --cache'):
        common.load_dataset('folder', tmp_path / 'x', cache=tmp_path / 'cache')
    (tmp_path / 'old').write_text('precious')
    with pytest.raises(UsageError, match='the old one is unharmed'):
        with common.written_whole(tmp_path / 'old', 'the checkpoint') as file:
            file.write(b'half')
            raise OSError(28, 'No space left on device')
    assert (tmp_path / 'old').read_text() == 'precious' and not list(tmp_path.glob('*.tmp'))


def test_shapes_is_fixed_disjoint_and_not_solved_by_pixels():
    data = common.load_dataset('shapes')
    assert len(data.train) == len(data.query) == 2000 and data.train[0].shape == (64, 64, 3)
    assert torch.equal(torch.from_numpy(data.query.pixels[:999].copy()),
                       torch.from_numpy(common.load_dataset('shapes').query.pixels[:999].copy()))
    pixels = torch.from_numpy(data.query.pixels.reshape(2000, -1)).float()
    assert retrieval_metrics(pixels, data.query.labels)['R@1'] < 10
    assert retrieval_metrics(pixels - pixels.mean(1, keepdim=True), data.query.labels)['R@1'] < 10


# ---- images -------------------------------------------------------------------------------------


def test_test_crops_are_torchvisions_centre_crops(tmp_path):
    generator = torch.Generator().manual_seed(0)
    sizes = [(20, 31), (27, 16), (16, 16)]
    pixels = [torch.randint(256, (h, w, 3), generator=generator, dtype=torch.uint8) for h, w in sizes]
    images = common.Images(torch.cat([p.flatten() for p in pixels]).numpy(), sizes, torch.tensor([0, 0, 1]), 15)
    x, y = next(common.batches(images, [[2, 0, 1]], torch.device('cpu')))
    for row, i in enumerate([2, 0, 1]):
        cropped = transforms.functional.center_crop(pixels[i].permute(2, 0, 1), [15, 15]).float() / 255
        assert torch.allclose(x[row], transforms.functional.normalize(cropped, common.MEAN, common.STD), atol=1e-5)
    assert y.tolist() == [1, 0, 0]


def test_a_small_image_beside_a_large_one_gets_no_black_border():
    sizes = [(16, 16), (40, 40)]
    pixels = np.full(sum(3 * h * w for h, w in sizes), 200, np.uint8)
    images = common.Images(pixels, sizes, torch.tensor([0, 1]), 24)
    boxes = torch.tensor([[0.0, 0, 16, 16], [3, 5, 40, 40]])             # one is enlarged, one shrunk
    x = common.crop(images.canvas([0, 1], boxes), boxes - boxes[:, [0, 1, 0, 1]], 24)
    assert torch.allclose(x * 255, torch.full_like(x, 200))


def test_a_training_crop_keeps_to_its_image_and_shrinking_averages():
    canvas = torch.zeros(1, 3, 40, 40, dtype=torch.uint8)
    canvas[:, :, ::2] = 200                                 # a fine grating: its mean is 100
    small = common.crop(canvas, torch.tensor([[4.0, 4, 36, 36]]), 8)
    assert (small * 255 - 100).abs().max() < 5, 'shrinking must average, not pick'
    images = common.Images(np.zeros(30 * 50 * 3, np.uint8), [(30, 50)], torch.tensor([0]), 16)
    boxes = torch.cat([images.random_boxes([0], 0.08) for _ in range(200)])
    assert (boxes[:, :2] >= 0).all() and (boxes[:, 2] <= 50).all() and (boxes[:, 3] <= 30).all()
    area = (boxes[:, 2:] - boxes[:, :2]).prod(1) / 1500
    assert 0.07 < area.min() and area.max() > 0.5


def test_batches_do_not_depend_on_the_copying_thread(folder, tmp_path):
    data = common.load_dataset('folder', folder, resize=24, cache=tmp_path)
    augment = train_ms.get_args(['--jitter', '0.2'])
    drawn = []
    for _ in range(2):
        common.set_seed(5)
        drawn.append([x for x, _ in common.batches(data.train, [[0, 1], [2, 3], [4, 5]], torch.device('cpu'), augment)])
    assert len(drawn[0]) == 3 and all(torch.equal(a, b) for a, b in zip(*drawn))


@pytest.mark.parametrize('spec, classes', [('symmetric:0.25', 20), ('longtail:0.25', 15)])
def test_label_noise(spec, classes):
    clean = torch.arange(20).repeat_interleave(30)
    noisy = common.corrupt_labels(clean, spec, seed=1)
    assert int(noisy.max()) + 1 == classes and torch.equal(noisy, common.corrupt_labels(clean, spec, seed=1))
    if classes == 20:
        assert (noisy != clean).float().mean() == 0.25
    else:
        gone = [c for c in range(20) if len(noisy[clean == c].unique()) > 1]
        assert len(gone) == 5 and all(len(noisy[clean == c].split(5)) == 6 for c in gone)
        kept = [c for c in range(20) if c not in gone]
        assert sorted(noisy[clean == c][0].item() for c in kept) == list(range(15)), 'what remains keeps its class'


# ---- sampler ------------------------------------------------------------------------------------


def test_balanced_batches_are_p_by_k_class_by_class():
    labels = torch.arange(12).repeat(9)[torch.randperm(108, generator=torch.Generator().manual_seed(0))]
    sampler = BalancedSampler(labels, 12, 3, torch.Generator().manual_seed(0))
    drawn = list(sampler)
    assert len(drawn) == len(sampler) == 108 // 12
    for batch in drawn:
        classes = labels[batch].view(4, 3)
        assert (classes == classes[:, :1]).all() and len(set(classes[:, 0].tolist())) == 4
        assert len(set(batch)) == 12, 'an image must not come twice'
    assert sorted(i for batch in drawn for i in batch) == list(range(108)), 'an epoch deals every image once'


def test_small_classes_repeat_and_few_classes_shrink_the_batch(capsys):
    labels = torch.tensor([0, 0, 0, 0, 1, 2, 2])
    sampler = BalancedSampler(labels, 40, 4)
    assert '1 of 3 training classes have one image' in capsys.readouterr().err
    batch = next(iter(sampler))
    assert len(batch) == 12 and sorted(labels[batch].tolist()) == [0] * 4 + [1] * 4 + [2] * 4
    assert sorted(i for i in batch if labels[i] == 2) == [5, 5, 6, 6]


def test_a_batch_that_does_not_divide_is_refused():
    with pytest.raises(UsageError, match='--batch-size 10 is not a multiple of --per-class 4'):
        BalancedSampler(torch.arange(8) // 2, 10, 4)


# ---- network ------------------------------------------------------------------------------------


@pytest.mark.parametrize('pool', ['avg', 'max', 'avg+max'])
def test_the_head_pools_projects_and_normalises(pool):
    model, f = small_embedder(pool=pool), torch.randn(2, 512, 2, 3).relu()
    pooled = dict(avg=f.mean((2, 3)), max=f.amax((2, 3)))
    expected = F.normalize(model.linear(sum(pooled[part] for part in pool.split('+'))), dim=1)
    assert torch.allclose(model.head(f), expected, atol=1e-6)
    assert torch.allclose(model.head(f), model.project(model.pool_features(f)))


def test_layer_norm_normalize_and_head_init():
    model, p = small_embedder(layer_norm=True, normalize=False, head_init='default'), torch.randn(3, 512)
    normed = (p - p.mean(1, True)) / p.var(1, False, True).add(1e-5).sqrt()
    assert torch.allclose(model.project(p), model.linear(normed), atol=1e-5)
    kaiming = Embedder('resnet18', 512, weights='none').linear.weight.detach()
    assert kaiming.std().item() == pytest.approx(math.sqrt(2 / 512), rel=0.02)
    assert model.linear.weight.std() < 1.1 / math.sqrt(3 * 512)


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
        model(torch.randn(4, 3, 32, 32)).square().sum(1).add(model.linear.weight.sum()).mean().backward()
        optimizer.step()
        assert not norms.keys() - model.state_dict().keys()
        assert all(torch.equal(model.state_dict()[name], value) for name, value in norms.items())
        assert on or torch.equal(before, model.trunk.conv1.weight), 'warm-up must leave the trunk alone'


def test_trained_batchnorm_moves():
    model = small_embedder(freeze_bn=False)
    before = model.trunk.bn1.running_mean.clone()
    model.train()(torch.randn(4, 3, 32, 32))
    assert not torch.equal(before, model.trunk.bn1.running_mean)


def test_weights_from_a_file_and_weights_that_do_not_fit(tmp_path):
    import torchvision
    resnet = torchvision.models.resnet18()
    torch.save(resnet.state_dict(), tmp_path / 'r18.pth')
    model = Embedder('resnet18', 8, weights=str(tmp_path / 'r18.pth'))
    assert torch.equal(model.trunk.conv1.weight, resnet.conv1.weight)
    with pytest.raises(UsageError, match='does not fit resnet34'):
        Embedder('resnet34', 8, weights=str(tmp_path / 'r18.pth'))


def test_imagenet_weights_offline_say_what_to_do(tmp_path, monkeypatch):
    def unreachable(*args, **kwargs):
        raise OSError('no route')
    monkeypatch.setenv('TORCH_HOME', str(tmp_path))
    monkeypatch.setattr(torch.hub, 'download_url_to_file', unreachable)
    with pytest.raises(UsageError, match='resnet50-0676ba61.pth.*--weights PATH'):
        Embedder('resnet50')


# ---- runs ---------------------------------------------------------------------------------------


def test_a_run_logs_one_flat_object_per_evaluated_epoch(run):
    run(train_ms, '--epochs', '2', '--steps', '0', '--name', 'mine')
    rows = [json.loads(line) for line in open('runs/mine/log.jsonl')]
    assert [row['epoch'] for row in rows] == [0, 1, 2] and rows[0]['loss'] is None
    wanted = {'epoch', 'loss', 'R@1', 'R@2', 'R@4', 'R@8', 'RP', 'MAP@R', 'images_per_second', 'minutes'}
    assert wanted <= rows[2].keys() and not any(isinstance(value, (dict, list)) for value in rows[2].values())


def test_the_row_explains_a_stuck_loss_and_names_a_collapse(run, capsys, monkeypatch):
    row = run(train_ms, '--per-class', '0', '--batch-size', '4')
    assert 0 < row['no_positive'] <= 1
    assert -1 <= row['s-'] <= 1 and -1 <= row['s+'] <= 1
    monkeypatch.setattr(Embedder, 'forward', lambda self, x: self.head(self.features(x)) * 1e-9 + 1)
    run(train_ms)
    assert 'collapsed' in capsys.readouterr().out


def test_a_resumed_run_equals_an_uninterrupted_one(run):
    run(train_ms, '--epochs', '3', '--steps', '0', '--name', 'whole', '--precision', 'fp32')
    log = open('runs/whole/log.jsonl').readlines()
    real = common.train_epoch

    def interrupted(*args):
        if args[-1] == 3:
            raise KeyboardInterrupt
        return real(*args)
    common.train_epoch = interrupted
    try:
        with pytest.raises(SystemExit) as stop:
            run(train_ms, '--epochs', '3', '--steps', '0', '--name', 'halved', '--precision', 'fp32')
    finally:
        common.train_epoch = real
    assert stop.value.code == 130 and len(open('runs/halved/log.jsonl').readlines()) == 3
    train_ms.main(['--resume', 'runs/halved', '--device', 'cpu'])
    timing = ('images_per_second', 'minutes')
    for one, other in zip(log, open('runs/halved/log.jsonl').readlines(), strict=True):
        one, other = json.loads(one), json.loads(other)
        assert all(one[key] == other[key] for key in one if key not in timing), (one, other)
    one, other = (torch.load(f'runs/{name}/last.pt', weights_only=True) for name in ('whole', 'halved'))
    assert all(torch.equal(value, other['model'][key]) for key, value in one['model'].items())


@pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a GPU')
def test_a_gpu_trains_and_finds_what_the_cpu_finds(run):
    row = run(train_ms, '--device', 'cuda')
    assert math.isfinite(row['loss'])
    z, y = torch.randn(200, 6, generator=torch.Generator().manual_seed(3)), torch.arange(200) % 20
    assert retrieval_metrics(z.cuda(), y) == pytest.approx(retrieval_metrics(z, y), abs=1e-3)


def test_resume_finds_the_newest_run_and_takes_more_epochs(run, folder):
    run(train_ms, '--epochs', '1', '--steps', '0')
    row = train_ms.main(['--dataset', 'folder', '--resume', '--epochs', '2', '--device', 'cpu'])
    assert row['epoch'] == 2 and os.listdir('runs') == ['ms-folder-1']


def test_default_names_count_up_and_an_explicit_one_is_refused(run, capsys):
    run(train_ms)
    run(train_ms)
    assert sorted(os.listdir('runs')) == ['ms-folder-1', 'ms-folder-2']
    with pytest.raises(SystemExit) as stop:
        run(train_ms, '--name', 'ms-folder-1')
    assert stop.value.code == 2 and 'exists already' in capsys.readouterr().err


def test_a_non_finite_loss_stops_with_epoch_and_step(run, monkeypatch):
    monkeypatch.setattr(train_ms, 'multi_similarity_loss', lambda z, *rest: z.sum() * float('nan'))
    with pytest.raises(UsageError, match='the loss is nan at epoch 1, step 1'):
        run(train_ms, '--name', 'broken')
    assert torch.load('runs/broken/last.pt', weights_only=True)['epoch'] == 0


def test_a_checkpoint_embeds_a_picture_as_the_run_did(run, folder):
    run(train_ms, '--name', 'mine', '--precision', 'fp32')
    model = common.load_checkpoint('runs/mine/last.pt', precision='fp32')
    data = common.load_dataset('folder', folder, resize=32, cache='cache')
    z = common.embed(model, data.query)
    with torch.no_grad():
        alone = model(model.transform(Image.open(folder / 'test/car0/0.jpg'))[None])
    assert z.dtype == torch.float32 and torch.allclose(alone[0], z[0], atol=1e-4)
    assert model.args['dataset'] == 'folder'


class Malicious:
    def __reduce__(self):
        return os.system, ('touch hacked',)


def test_a_malicious_pickle_is_not_opened(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for save in (lambda file: pickle.dump(Malicious(), open(file, 'wb'), protocol=2),
                 lambda file: torch.save(Malicious(), file)):
        save('evil.pt')
        with pytest.raises(UsageError, match='evil.pt'):
            common.load_checkpoint('evil.pt')
        assert not os.path.exists('hacked')


def test_checkpoints_that_do_not_belong(run, tmp_path):
    run(train_ms, '--name', 'mine')
    with pytest.raises(UsageError, match='made with another --dim; start a new run'):
        train_ms.main(['--resume', 'runs/mine', '--dim', '24', '--epochs', '5', '--steps', '0'])
    saved = torch.load('runs/mine/last.pt', weights_only=True)
    torch.save(saved | dict(args=saved['args'] | dict(arch='resnet34')), 'foreign.pt')
    with pytest.raises(UsageError, match='foreign.pt does not fit this network'):
        train_ms.main(['--resume', 'foreign.pt', '--device', 'cpu'])
    torch.save(saved | dict(script='train_other'), 'other.pt')
    with pytest.raises(UsageError, match='made by train_other.py'):
        train_ms.main(['--resume', 'other.pt'])
    torch.save(dict(something=1), 'strange.pt')
    with pytest.raises(UsageError, match='no checkpoint of these scripts'):
        common.load_checkpoint('strange.pt')
    with pytest.raises(UsageError, match='there is no file'):
        common.load_checkpoint('absent.pt')


def test_a_full_disk_does_not_cost_the_old_checkpoint(run, monkeypatch):
    run(train_ms, '--name', 'mine')

    def full(*args, **kwargs):
        raise RuntimeError('PytorchStreamWriter failed writing file')
    monkeypatch.setattr(torch, 'save', full)
    with pytest.raises(UsageError, match='the old one is unharmed'):
        train_ms.main(['--resume', 'runs/mine', '--epochs', '3', '--steps', '0', '--device', 'cpu'])
    assert common.read_checkpoint('runs/mine')['epoch'] >= 1


def test_embeddings_can_be_learned_from(folder, tmp_path):
    """A linear probe on embed()'s output needs tensors that autograd accepts."""
    data = common.load_dataset('folder', folder, resize=16, cache=tmp_path)
    z = common.embed(small_embedder(), data.query)
    torch.nn.Linear(8, 2)(z).sum().backward()


@pytest.mark.parametrize('damage', ['', 'one', '<html>404</html>'])
def test_a_damaged_annotation_is_named(tmp_path, damage):
    (tmp_path / 'CUB_200_2011').mkdir()
    (tmp_path / 'CUB_200_2011/images.txt').write_text(damage)
    (tmp_path / 'cars_annos.mat').write_text(damage)
    for name in ('cub', 'cars'):
        with pytest.raises(UsageError, match='damaged|expected'):
            common.load_dataset(name, tmp_path)


def test_query_and_gallery_without_train_are_refused(tmp_path):
    for part in ('query', 'gallery'):
        draw_folder(tmp_path / part, ['a', 'b'], per_class=1)
    with pytest.raises(UsageError, match='no train/'):
        common.load_dataset('folder', tmp_path)


@pytest.mark.parametrize('flags, message', [
    (['--dataset'], 'expected one argument'), (['--cache', __file__, '--dataset', 'folder', '--data', '.'], 'classes'),
    (['--dataset', 'flowers'], 'invalid choice'), (['--batch-sise', '3'], 'unrecognized'), (['--lr', 'x'], 'float'),
    (['--batch-size', '10', '--per-class', '4'], 'not a multiple'), (['--device', 'cuda:99'], 'cuda:99'),
    (['--min-crop', '0'], '--min-crop'), (['--image-size', '64', '--resize', '32'], '--resize 32'),
    (['--label-noise', 'pink:0.3'], 'symmetric:RATE'), (['--resume', 'nowhere'], 'no checkpoint'),
    (['--batch-size', '400', '--per-class', '2'], '200 classes per batch')])
def test_a_mistake_in_use_is_one_line_and_exit_code_2(flags, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        train_ms.main(flags)
    error = capsys.readouterr().err
    assert stop.value.code == 2 and message in error and len(error.strip().split('\n')) == 1


@pytest.mark.skipif(os.name == 'nt', reason='POSIX signals')
def test_ctrl_c_in_a_real_process_keeps_the_checkpoint(folder, tmp_path):
    flags = ['--dataset', 'folder', '--data', str(folder), '--epochs', '500', '--image-size', '32', '--batch-size', '8',
             '--per-class', '2', '--dim', '8', '--device', 'cpu', '--name', 'mine']
    # a shell starts background jobs deaf to Ctrl-C, and children inherit that: restore it
    process = subprocess.Popen([sys.executable, ROOT / 'train_ms.py', *flags], cwd=tmp_path, text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                               preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
    log, deadline = tmp_path / 'runs/mine/log.jsonl', time.time() + 60
    while not (log.exists() and len(log.read_text().splitlines()) > 1) and time.time() < deadline:
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    output = process.communicate(timeout=30)[0]
    assert process.returncode == 130 and '--resume runs/mine' in output and 'Traceback' not in output, output
    assert common.read_checkpoint(tmp_path / 'runs/mine')['epoch'] >= 1


def test_defaults_follow_the_dataset_and_unknown_ones_are_an_error():
    assert train_ms.get_args(['--dataset', 'cub']).lr == 3e-5
    assert train_ms.get_args(['--dataset', 'cub', '--image-size', '112']).resize == round(112 * 256 / 227)
    parser = common.parser('train_x.py -- x')
    with pytest.raises(UsageError, match='no flag for learning_rate'):
        common.parse(parser, {'shapes': dict(learning_rate=1)}, [])


def test_schedules():
    args = train_ms.get_args(['--schedule', 'cosine'])
    factor = [common.learning_rate_factor(i, args, per_epoch=50, total=2000) for i in range(2000)]
    assert factor[0] == 0.01 and factor[49] == 0.5 and factor[1000] == pytest.approx(0.5) and factor[-1] < 1e-5
    args = train_ms.get_args(['--schedule', 'step', '--decay-epochs', '2', '--decay-rate', '0.1'])
    assert [common.learning_rate_factor(i, args, 10, 60) for i in (0, 19, 20, 40)] == pytest.approx([1, 1, 0.1, 0.01])


# ---- the shape of the project -------------------------------------------------------------------


def test_importing_has_no_effect(tmp_path):
    """No output, no file, no CUDA, no seed."""
    names = [path.stem for path in ROOT.glob('*.py')]
    code = ('import random, sys; random.seed(1); before = random.getstate(); sys.argv = ["x", "--nonsense"]\n'
            f'import {", ".join(names)}, torch\n'
            'assert random.getstate() == before and not torch.cuda.is_initialized()')
    done = subprocess.run([sys.executable, '-c', code], cwd=tmp_path, env=os.environ | {'PYTHONPATH': str(ROOT)},
                          capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout == done.stderr == '' and not list(tmp_path.iterdir()), done.stderr


def test_common_names_no_method_and_no_script_imports_another():
    text = (ROOT / 'common.py').read_text().lower()
    for word in ('contrastive', 'proxy', 'proxies', 'mixup', 'species', 'hybrid', 'miner', 'similarity loss'):
        assert word not in text, f'common.py says {word!r}'
    for script in ROOT.glob('*.py'):
        assert not re.search(r'^\s*(from|import) +train_', script.read_text(), re.M), f'{script.name} imports a script'


PAPERS = {'train_contrastive': 'rc', 'train_ms': 'metrix', 'train_proxy_anchor': 'pa', 'train_proxynca_pp': 'pa',
          'train_ccl': 'ccl', 'train_metrix': 'metrix', 'train_hse': 'hse', 'common': 'rc', 'eval': 'metrix'}
SPOKEN = {'Reality Check': 'rc', 'Metrix': 'metrix', 'Proxy-Anchor': 'pa', 'Proxy-NCA': 'pa', 'CCL': 'ccl',
          'HSE': 'hse'}


def cited_equations(path):
    """{(paper key, number)}: `Eq. (2), (4)` counts twice; a paper named right before it takes it over."""
    names = '|'.join(SPOKEN)
    pattern = rf"(?:({names})(?:'s)? )?Eqs?\. ((?:\(\d+\)(?:[-/, ]|and|to)*)+)"
    found = set()
    for paper, numbers in re.findall(pattern, path.read_text()):
        for low, high in re.findall(r'\((\d+)\)(?:-\((\d+)\))?', numbers):
            for number in range(int(low), int(high or low) + 1):
                found.add((SPOKEN.get(paper, PAPERS[path.stem]), number))
    return found


@pytest.mark.parametrize('name', [name for name in PAPERS if (ROOT / f'{name}.py').exists()])
def test_every_cited_equation_has_a_test(name):
    tests = ' '.join(path.read_text() for path in (ROOT / 'tests').glob('test_*.py'))
    missing = [f'test_{key}_eq{number}_' for key, number in sorted(cited_equations(ROOT / f'{name}.py'))
               if f'def test_{key}_eq{number}_' not in tests]
    assert not missing, f'{name}.py cites equations without a test: {missing}'
