"""common.py -- all that the papers share and do not argue about.

Nothing here is a method: whatever a paper's method section mentions stands in the train_*.py script
of that paper. A student of the losses needs sections 4 to 6; the others can be skipped one by one.

    1. errors and files      UsageError, writing a file whole or not at all
    2. datasets              where the images of a benchmark lie, and whether they are all there
    3. images                decoded once to uint8; crops and flips, a batch at a time, on the device
    4. network               Embedder: trunk, pooling, head
    5. evaluation            embed, retrieval_metrics
    6. training              batches, optimizer, schedule, the loop
    7. runs and checkpoints  what a run leaves behind, and how it goes on
    8. command line          the flags of every script, their defaults per dataset

The alphabet of all files: B batch, D embedding size, C classes, P classes per batch, K images per
class, N images of a set, T positions of a feature map; x images, f features (B, c, h, w),
z embeddings (B, D), y labels (B,), s similarities.
"""
import argparse
import hashlib
import json
import math
import os
import random
import shutil
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import torch.nn.functional as F
import torchvision
from PIL import Image
from torch import nn
from torch.utils.data import BatchSampler, RandomSampler, Sampler
from torchvision import transforms

# ---- 1. errors and files ---------------------------------------------------------------------------


class UsageError(SystemExit, ValueError):
    """A mistake in use: one line that says what, where and what to do; exit code 2, no traceback.

    It is a SystemExit, so that a script ends by itself, and a ValueError, so that a program or a
    notebook that calls these functions can catch it like any other error.
    """

    def __init__(self, message):
        super().__init__(2)
        self.message = message
        print(f'error: {message}', file=sys.stderr)

    def __str__(self):
        return self.message


def live(text, done=False):
    """A line that is overwritten while work goes on; on anything but a terminal only its last state."""
    if sys.stdout.isatty():
        print(f'\r{text:<110}', end='\n' if done else '', flush=True)
    elif done:
        print(text, flush=True)


@contextmanager
def written_whole(path, what):
    """Opens a neighbour of `path` that takes its place at the end: a full disk or Ctrl-C costs nothing old."""
    path = Path(path)
    temporary = path.with_name(f'{path.name}.{os.getpid()}.tmp')
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, 'wb') as file:
            yield file
        os.replace(temporary, path)
    except (OSError, RuntimeError) as error:                # torch.save wraps a full disk in a RuntimeError
        cause = str(error.__context__ or error).split('\n')[0]
        old = 'the old one is unharmed' if path.exists() else 'nothing was left behind'
        raise UsageError(f'could not write {what} {path}: {cause}; {old}') from None
    finally:
        with suppress(OSError):
            temporary.unlink()


# ---- 2. datasets -----------------------------------------------------------------------------------

# ks: the K of Recall@K in the literature. counts: (images, classes) of each split, checked on loading.
# layout: what --data must hold. get: official sources only.
DATASETS = {
    'shapes': dict(ks=(1, 2, 4, 8)),
    'folder': dict(ks=(1, 2, 4, 8)),
    'cub': dict(
        ks=(1, 2, 4, 8), counts=dict(train=(5864, 100), query=(5924, 100)),
        layout='CUB_200_2011/ with images.txt and images/',
        get='download CUB_200_2011.tgz from https://www.vision.caltech.edu/datasets/cub_200_2011/ and run '
            'mkdir -p {root} && tar xzf CUB_200_2011.tgz -C {root}'),
    'cars': dict(
        ks=(1, 2, 4, 8), counts=dict(train=(8054, 98), query=(8131, 98)),
        layout='cars_annos.mat and car_ims/000001.jpg ... 016185.jpg',
        get='car_ims.tgz and cars_annos.mat are described at https://ai.stanford.edu/~jkrause/cars/car_dataset.html '
            '(often offline; the re-upload with folders cars_train/ and cars_test/ has other names and does '
            'not fit); run mkdir -p {root} && tar xzf car_ims.tgz -C {root}'),
    'sop': dict(
        ks=(1, 10, 100, 1000), counts=dict(train=(59551, 11318), query=(60502, 11316)),
        layout='Stanford_Online_Products/ with Ebay_train.txt and Ebay_test.txt',
        get='download Stanford_Online_Products.zip from https://cvgl.stanford.edu/projects/lifted_struct/ and run '
            'unzip Stanford_Online_Products.zip -d {root}'),
    'inshop': dict(
        ks=(1, 10, 20, 30, 40, 50),
        counts=dict(train=(25882, 3997), query=(14218, 3985), gallery=(12612, 3985)),
        layout='Eval/list_eval_partition.txt and Img/img/',
        get='from https://mmlab.ie.cuhk.edu.hk/projects/DeepFashion/InShopRetrieval.html download '
            'Eval/list_eval_partition.txt and Img/img.zip (not img_highres.zip) and run unzip img.zip -d {root}/Img'),
}


def read_cub(root):
    """Lines `<image id> <class>/<file>`; the class number is the prefix. train_test_split.txt belongs to
    the classification task and is not used: the first 100 classes train."""
    base, rows = root / 'CUB_200_2011', []
    for line in open(base / 'images.txt'):
        path = line.split()[1]
        name = path.split('/')[0]
        split = 'train' if int(name.split('.')[0]) <= 100 else 'query'
        if '/._' not in path:                               # left by macOS beside the real files
            rows.append((split, base / 'images' / path, name, None))
    return rows


def read_cars(root):
    """The .mat file's `annotations`: field 0 is the path, field 5 the class, 1 to 196. Field 6 (`test`)
    belongs to the classification task and is not used: the first 98 classes train."""
    try:
        from scipy.io import loadmat
    except ImportError:
        raise UsageError("Cars196's annotations need scipy: pip install 'torchvision[scipy]'") from None
    with open(root / 'cars_annos.mat', 'rb') as file:
        table = loadmat(file, squeeze_me=True)['annotations']
    return [('train' if int(row[5]) <= 98 else 'query', root / str(row[0]), f'{int(row[5]):03d}', None)
            for row in table]


def read_sop(root):
    """A header, then lines `image_id class_id super_class_id path`; the super-classes become groups."""
    base, rows = root / 'Stanford_Online_Products', []
    for split, file in (('train', 'Ebay_train.txt'), ('query', 'Ebay_test.txt')):
        for line in open(base / file).read().splitlines()[1:]:
            _, number, group, path = line.split()
            rows.append((split, base / path, f'{int(number):05d}', int(group) - 1))
    return rows


def read_inshop(root):
    """A count, a header, then lines `img/... id_00000001 train|query|gallery`. Train and test ids interleave."""
    lines = open(root / 'Eval' / 'list_eval_partition.txt').read().splitlines()[2:]
    rows = [line.split() for line in lines if line.strip()]
    return [(split, root / 'Img' / path, name, None) for path, name, split in rows]


def read_folder(root):
    """A class is a folder that directly holds images, at any depth. train/ and test/ (or query/ and
    gallery/) split it; without them the first half of the sorted classes trains, the rest tests."""
    splits = dict(train='train', test='query')
    if (root / 'query').is_dir() and (root / 'gallery').is_dir():
        splits = dict(train='train', query='query', gallery='gallery')
        if not (root / 'train').is_dir():
            raise UsageError(f'{root.resolve()} has query/ and gallery/, but no train/ beside them')
    if not all((root / part).is_dir() for part in splits):
        classes = classes_below(root)
        names = sorted(classes)
        half = len(names) // 2
        return [('train' if i < half else 'query', path, name, None)
                for i, name in enumerate(names) for path in classes[name]]
    found = {part: classes_below(root / part) for part in splits}
    shared = sorted(set(found['train']) & set().union(*(found[part] for part in splits if part != 'train')))
    if shared:
        others = ' and '.join(f'{part}/' for part in splits if part != 'train')
        print(f'warning: {len(shared)} classes stand in train/ and also in {others} (the first: {shared[0]}): '
              f'the result does not measure unseen classes', file=sys.stderr)
    return [(splits[part], path, name, None)
            for part in splits for name in sorted(found[part]) for path in found[part][name]]


def classes_below(root):
    """{path of the class below root: sorted paths of its images}"""
    classes = {}
    for folder, _, files in os.walk(root, followlinks=True):
        images = sorted(file for file in files if not file.startswith('._')         # left by macOS
                        and file.lower().endswith(torchvision.datasets.folder.IMG_EXTENSIONS))
        if images:
            classes[Path(folder).relative_to(root).as_posix()] = [Path(folder) / file for file in images]
    return classes


READERS = dict(cub=read_cub, cars=read_cars, sop=read_sop, inshop=read_inshop, folder=read_folder)


def list_images(name, root):
    """Reads a dataset's annotation, checks the published counts and that every image is there.

    Returns {split: (paths, class names, groups)} for the splits train, query and, if there is one, gallery.
    """
    root, facts = Path(root).expanduser(), DATASETS[name]
    wanted = facts.get('layout', 'folders of images, one per class')
    where = f'{name} is looked for in {root.resolve()}, which should hold {wanted}'
    if not root.is_dir():
        raise UsageError(f'{where}; there is no such folder. --data names it. '
                         + facts.get('get', '').format(root=root))
    try:
        rows = READERS[name](root)
    except UsageError:
        raise
    except FileNotFoundError as error:
        raise UsageError(f'{where}; {error.filename} is missing. ' + facts['get'].format(root=root)) from None
    except Exception as error:                              # cut, or a web page in its place
        raise UsageError(f'{where}; its annotation is damaged ({error}); unpack the original again') from None
    parts = {split: [row[1:] for row in rows if row[0] == split] for split in ('train', 'query', 'gallery')}
    splits = {split: tuple(zip(*part)) for split, part in parts.items() if part}
    for split, (images, classes) in facts.get('counts', {}).items():
        paths, names, _ = splits.get(split, ((), (), ()))
        if (len(paths), len(set(names))) != (images, classes):
            raise UsageError(f'{name} {split}: expected {images:,} images of {classes:,} classes, found '
                             f'{len(paths):,} of {len(set(names)):,} in {root.resolve()}; unpack the original again')
    for split in ('train', 'query'):
        found = len(set(splits[split][1])) if split in splits else 0
        if found < 2:
            raise UsageError(f'{name}: {split} has {found} class{"es" * (found != 1)}, at least two are needed. '
                             f'{where}; train/ and test/ with a folder per class make the split explicit')
    missing = [path for paths, _, _ in splits.values() for path in paths if not path.exists()]
    if missing:
        total = sum(len(paths) for paths, _, _ in splits.values())
        raise UsageError(f'{name}: {len(missing):,} of {total:,} images are missing, the first is {missing[0]}; '
                         f'the archive was unpacked in part. ' + facts.get('get', '').format(root=root))
    return splits


def load_dataset(name, root='data', resize=None, image_size=None, cache='cache'):
    """A dataset as an object with .train, .query and .gallery, each an `Images`.

    name        shapes, cub, cars, sop, inshop or folder
    root        folder that holds what the dataset's site unpacks; not used by shapes
    resize      shorter side of the stored images in pixels (default: 64 for shapes and folder, else 256)
    image_size  side of the square crops in pixels (default: resize * 7/8 for the benchmarks, else resize)
    cache       folder for the decoded images
    `gallery is query` where the test set is searched in itself. Train labels are 0..C-1; query and
    gallery share theirs.  Raises UsageError when files or counts are not as published.
    """
    small = name in ('shapes', 'folder')
    resize = resize or (64 if small else 256)
    image_size = image_size or (resize if small else resize * 7 // 8)
    if name not in DATASETS:
        raise UsageError(f'no dataset {name!r}; there are {", ".join(DATASETS)}')
    if resize < image_size:
        raise UsageError(f'--resize {resize} is smaller than --image-size {image_size}: crops are cut from that image')
    if name == 'shapes':
        return SimpleNamespace(name=name, **draw_shapes(resize, image_size))
    splits = list_images(name, root)
    data = SimpleNamespace(name=name)
    numbers = {}
    for split, (paths, names, groups) in splits.items():
        if split != 'gallery':                              # query and gallery are numbered together
            together = names + splits['gallery'][1] if split == 'query' and 'gallery' in splits else names
            numbers = {name: i for i, name in enumerate(sorted(set(together)))}
        pixels, sizes = decode(paths, resize, f'{name} {split}', root, cache)
        labels = torch.tensor([numbers[name] for name in names])
        groups = None if groups[0] is None else torch.tensor(groups)
        setattr(data, split, Images(pixels, sizes, labels, image_size, groups))
    data.gallery = getattr(data, 'gallery', data.query)
    return data


def draw_shapes(resize, image_size, classes=100, per_class=20):
    """The built-in dataset: 100 classes of shapes x 20 images for training, 100 other classes for the test.

    A class is a curve of Gielis' superformula, r(t) = (|cos(m t/4)|^n2 + |sin(m t/4)|^n3)^(-1/n1), with two
    colours and a pattern of stripes. Its members differ in rotation, scale, shift, aspect, brightness,
    background and noise, so that neither the pixels nor the colours alone tell the classes apart.
    """
    generator = torch.Generator().manual_seed(2022)

    def uniform(low, high, *shape):
        return low + (high - low) * torch.rand(*shape, generator=generator)

    def draw_class():
        """-> (n, 3, S, S) in [0, 1]"""
        n, m = per_class, int(torch.randint(2, 9, (1,), generator=generator))              # m lobes
        n1, n2, n3 = uniform(-0.6, 1.6, 1).exp(), uniform(-1.2, 2.2, 1).exp(), uniform(-1.2, 2.2, 1).exp()
        frequency, angle, colours = uniform(3, 9, 1), uniform(0, math.pi, 1), uniform(0, 1, 2, 3)
        t = torch.linspace(-math.pi, math.pi, 721)
        curve = ((m * t / 4).cos().abs() ** n2 + (m * t / 4).sin().abs() ** n3) ** (-1 / n1)
        curve = curve / curve.max()                                     # the longest lobe has length 1
        scale, aspect = uniform(0.5, 0.75, n, 1, 1), uniform(0.75, 1.33, n, 1, 1).sqrt()
        x, y = (grid[:, None] - uniform(-0.25, 0.25, 2, n, 1, 1)).unbind()                 # (n, S, S)
        turn = uniform(0, 2 * math.pi, n, 1, 1)
        x, y = ((turn.cos() * x + turn.sin() * y) / (scale * aspect),
                (turn.cos() * y - turn.sin() * x) / (scale / aspect))    # from the picture to the shape's frame
        radius = curve[((torch.atan2(y, x) + math.pi) / (2 * math.pi) * 720).round().long()]
        inside = torch.sigmoid((radius - torch.hypot(x, y)) * 20)[:, None]                 # (n, 1, S, S)
        stripes = torch.sigmoid(4 * torch.sin(frequency * (x * angle.cos() + y * angle.sin())))[:, None]
        first, second = (colours + uniform(-0.05, 0.05, n, 2, 3))[..., None, None].unbind(1)   # (n, 3, 1, 1)
        slope = (grid * uniform(-0.3, 0.3, n, 2, 1, 1)).sum(1, keepdim=True)               # (n, 1, S, S)
        background = uniform(0, 1, n, 1, 1, 1) + uniform(-0.25, 0.25, n, 3, 1, 1) + slope
        picture = background + inside * (second + stripes * (first - second) - background)
        picture = picture * uniform(0.6, 1.2, n, 1, 1, 1)
        return (picture + 0.03 * torch.randn(picture.shape, generator=generator)).clamp(0, 1)

    side = torch.linspace(-1, 1, resize)
    grid = torch.stack(torch.meshgrid(side, side, indexing='xy'))       # (2, S, S) x and y
    labels, sizes = torch.arange(classes).repeat_interleave(per_class), np.full((classes * per_class, 2), resize)
    train, test = (
        Images(torch.cat([(255 * draw_class()).byte().permute(0, 2, 3, 1) for _ in range(classes)]).numpy().reshape(-1),
               sizes, labels, image_size) for _ in ('train', 'test'))
    return dict(train=train, query=test, gallery=test)


def corrupt_labels(labels, spec, seed=0):
    """Wrong labels for the training set.

    symmetric:r  a share r of the images gets a label drawn evenly from the other classes
    longtail:r   open-set noise: random classes that hold a share r of the images disappear; their images,
                 in clusters of at most 5, are given to random classes that remain
    labels (N,) 0..C-1 -> (N,) 0..C'-1, with C' < C for longtail.
    """
    kind, _, rate = spec.partition(':')
    try:
        rate = float(rate)
        if kind not in ('symmetric', 'longtail') or not 0 <= rate < 1:
            raise ValueError
    except ValueError:
        raise UsageError(f'--label-noise {spec}: expected symmetric:RATE or longtail:RATE, 0 <= RATE < 1') from None
    generator = torch.Generator().manual_seed(seed)
    labels, classes, total = labels.clone(), int(labels.max()) + 1, len(labels)
    if kind == 'symmetric':
        wrong = torch.randperm(total, generator=generator)[:round(rate * total)]
        labels[wrong] = (labels[wrong] + torch.randint(1, classes, (len(wrong),), generator=generator)) % classes
        return labels
    order = torch.randperm(classes, generator=generator)
    held = torch.bincount(labels, minlength=classes)[order].cumsum(0)
    gone = int((held <= rate * total).sum().clamp(max=classes - 2))      # two classes always remain
    kept = order[gone:]
    renumber = torch.full((classes,), -1)
    renumber[kept] = torch.arange(len(kept))
    new = renumber[labels]
    for number in order[:gone].tolist():
        for cluster in (labels == number).nonzero()[:, 0].split(5):
            new[cluster] = torch.randint(len(kept), (1,), generator=generator)
    return new


# ---- 3. images -------------------------------------------------------------------------------------

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)                 # ImageNet's, RGB


def decode(paths, resize, what, root, cache):
    """Decodes images once, shorter side `resize`, into one memory-mapped file; the second run maps it at once.

    The file is [sizes: N x (height, width), int32][pixels: uint8, image after image, RGB]. Its name
    carries a hash of `resize` and of every file's path, length and time, so a changed image is decoded anew.
    Returns pixels (total,), sizes (N, 2).
    """
    stats = [os.stat(path) for path in paths]
    key = hashlib.sha256(repr([resize] + [(os.path.relpath(path, root), stat.st_size, stat.st_mtime_ns)
                                          for path, stat in zip(paths, stats)]).encode()).hexdigest()[:16]
    file, head = Path(cache) / f'{what.replace(" ", "-")}-{resize}-{key}.bin', 8 * len(paths)
    if not file.exists():
        print(f'{what}: reading {len(paths):,} images', flush=True)
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            try:
                sizes = np.array(list(pool.map(partial(stored, side=resize, pixels=False), paths)), dtype=np.int32)
                check_space(what, file, head + 3 * int(sizes.astype(np.int64).prod(axis=1).sum()))
                with written_whole(file, 'the decoded images') as out:
                    out.write(sizes.tobytes())
                    for start in range(0, len(paths), 512):                  # in pieces: the queue must not grow
                        for pixels in pool.map(partial(stored, side=resize), paths[start:start + 512]):
                            out.write(pixels.tobytes())
                        done = min(start + 512, len(paths))
                        live(f'{what}: decoded {done:,} of {len(paths):,}', done=done == len(paths))
            except Unreadable as error:
                raise UsageError(str(error)) from None
            except KeyboardInterrupt:
                pool.shutdown(cancel_futures=True)
                raise SystemExit(130) from None
    raw = np.memmap(file, dtype=np.uint8, mode='r')
    return raw[head:], np.array(raw[:head].view(np.int32).reshape(-1, 2))


def check_space(what, file, needed):
    """Says how much the decoded images take, and refuses if the disk has less."""
    print(f'{what}: {needed / 1e6:,.1f} MB of decoded images go to {file}', flush=True)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f'--cache {file.parent} cannot be made: {error}') from None
    free = shutil.disk_usage(file.parent).free
    if needed > free:
        raise UsageError(f'{what}: the decoded images need {needed / 1e9:.1f} GB, {file.parent.resolve()} has '
                         f'{free / 1e9:.1f} GB free; name another folder with --cache')


class Unreadable(Exception):
    """An image that cannot be decoded. Not yet a UsageError, which would print a line for each thread."""


def stored(path, side, pixels=True):
    """An image as it is stored, (height, width, 3) uint8; with pixels=False its (height, width), from the header."""
    try:
        with Image.open(path) as image:
            size = [side * n // min(image.size) for n in reversed(image.size)]      # shorter side = side
            return np.asarray(transforms.functional.resize(image.convert('RGB'), size)) if pixels else size
    except Exception as error:                              # each image format has errors of its own
        raise Unreadable(f'cannot read the image {path}: {error}; replace or remove it') from None


class Images:
    """N decoded images of any height and width, with their labels.

    pixels      uint8, all images one after the other, each (height, width, 3); may be memory-mapped
    sizes       (N, 2) height and width
    labels      (N,) LongTensor, 0..C-1
    image_size  side of the square crops that the network sees
    groups      (N,) super-classes, or None where the dataset has none
    """

    def __init__(self, pixels, sizes, labels, image_size, groups=None):
        self.pixels, self.sizes, self.labels = pixels, np.asarray(sizes), labels.long()
        self.image_size, self.groups = image_size, groups
        self.ends = 3 * self.sizes.astype(np.int64).prod(axis=1).cumsum()

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        """(height, width, 3) uint8"""
        height, width = self.sizes[i]
        end = self.ends[i]
        return self.pixels[end - 3 * height * width:end].reshape(height, width, 3)

    @property
    def num_classes(self):
        return int(self.labels.max()) + 1

    def canvas(self, indices, boxes):
        """These boxes, cut out, in the upper left corners of one (B, 3, H, W) uint8 tensor. The pixel after the
        last row and column repeats it, since crop() interpolates half a pixel over the edge."""
        boxes = boxes.int().tolist()
        height, width = (1 + max(box[i + 2] - box[i] for box in boxes) for i in (1, 0))
        canvas = np.zeros((len(indices), height, width, 3), dtype=np.uint8)
        for row, i, (left, top, right, bottom) in zip(canvas, indices, boxes):
            h, w = bottom - top, right - left
            row[:h, :w] = self[i][top:bottom, left:right]
            row[h, :w] = row[h - 1, :w]
            row[:h + 1, w] = row[:h + 1, w - 1]
        return torch.from_numpy(canvas).permute(0, 3, 1, 2)

    def centre_boxes(self, indices):
        """(B, 4) x1 y1 x2 y2 of the centre crops, as torchvision's CenterCrop places them."""
        size = self.image_size
        corners = [[round((w - size) / 2), round((h - size) / 2)] for h, w in self.sizes[indices].tolist()]
        corners = torch.tensor(corners, dtype=torch.float32)
        return torch.cat([corners, corners + size], dim=1)

    def random_boxes(self, indices, min_crop):
        """(B, 4) boxes of an area share between min_crop and 1 and a ratio between 3/4 and 4/3."""
        boxes = []
        for height, width in self.sizes[indices].tolist():
            shape = torch.empty(3, height, width, device='meta')        # only its size is looked at
            top, left, h, w = transforms.RandomResizedCrop.get_params(shape, (min_crop, 1.0), (3 / 4, 4 / 3))
            boxes.append([left, top, left + w, top + h])
        return torch.tensor(boxes, dtype=torch.float32)


def crop(canvas, boxes, size):
    """Resizes a box of each image: (B, 3, H, W) uint8, (B, 4) x1 y1 x2 y2 -> (B, 3, size, size) in [0, 1].

    roi_align averages bilinear samples on a grid as dense as the box's pixels, so shrinking averages
    instead of picking, and a box of exactly `size` pixels gives back the pixels.
    """
    number = torch.arange(len(boxes), device=boxes.device, dtype=boxes.dtype)[:, None]
    return torchvision.ops.roi_align(canvas.float(), torch.cat([number, boxes], 1), size, aligned=True) / 255


def batches(images, index_lists, device, augment=None):
    """Yields (x (B, 3, S, S) normalised, y (B,)) on the device for each list of indices.

    A thread copies the next batch out of the file while the device works on this one. It draws nothing:
    all random numbers come in the caller's thread, in a fixed order, so a resumed run draws the same.

    augment  None for centre crops, else an object with min_crop, no_flip and jitter
    """
    mean, std = (torch.tensor(values, device=device)[:, None, None] for values in (MEAN, STD))

    def send(t):                                            # pinned, or the copy would make the GPU wait
        return t.pin_memory().to(device, non_blocking=True) if device.type == 'cuda' else t.to(device)

    def place(canvas, boxes, flips, y):
        corners = boxes[:, [0, 1, 0, 1]]                    # the canvas holds the boxes alone
        canvas, boxes, flips, y = map(send, (canvas.result(), boxes - corners, flips, y))
        x = crop(canvas, boxes, images.image_size)
        x = torch.where(flips[:, None, None, None], x.flip(3), x)
        if augment and augment.jitter:
            jitter = transforms.ColorJitter(*[augment.jitter] * 3)      # brightness, contrast, saturation
            x = torch.stack([jitter(image) for image in x])             # each image its own
        return (x - mean) / std, y

    with ThreadPoolExecutor(1) as pool:
        waiting = None
        for indices in index_lists:
            boxes = images.random_boxes(indices, augment.min_crop) if augment else images.centre_boxes(indices)
            flips = torch.zeros(len(indices), dtype=torch.bool)
            if augment and not augment.no_flip:
                flips = torch.rand(len(indices)) < 0.5
            ready, waiting = waiting, (pool.submit(images.canvas, indices, boxes), boxes, flips, images.labels[indices])
            if ready:
                yield place(*ready)
        if waiting:
            yield place(*waiting)


# ---- 4. network ------------------------------------------------------------------------------------


class Embedder(nn.Module):
    """ResNet trunk -> pooling -> linear head -> unit sphere: the f of every paper here.

    arch        resnet18, resnet34, resnet50 or resnet101, torchvision's
    dim         D, the size of the embedding
    pool        avg, max, or avg+max (their sum) over the T = h x w positions
    weights     imagenet (IMAGENET1K_V1, the ones all papers started from), none, or a file
    freeze_bn   BatchNorm keeps its statistics and its affine weights, always
    layer_norm  LayerNorm without affine weights between pooling and head
    normalize   unit-length embeddings
    head_init   kaiming: normal, fan out, std sqrt(2 / D), five times torch's default; or default
    precision   bf16 runs the trunk, and only the trunk, in bfloat16; pooling, head and loss are float32
    """

    def __init__(self, arch='resnet50', dim=512, pool='avg+max', weights='imagenet', freeze_bn=True,
                 layer_norm=False, normalize=True, head_init='kaiming', precision='fp32'):
        super().__init__()
        self.config = dict(arch=arch, dim=dim, pool=pool, freeze_bn=freeze_bn, layer_norm=layer_norm,
                           normalize=normalize, head_init=head_init)
        self.pool, self.normalize, self.precision = pool, normalize, precision
        self.trunk = resnet_trunk(arch, weights)
        self.trunk.to(memory_format=torch.channels_last)
        channels = 512 if arch in ('resnet18', 'resnet34') else 2048
        self.norm = nn.LayerNorm(channels, elementwise_affine=False) if layer_norm else nn.Identity()
        self.linear = nn.Linear(channels, dim)
        if head_init == 'kaiming':
            nn.init.kaiming_normal_(self.linear.weight, mode='fan_out')
            nn.init.zeros_(self.linear.bias)
        self.frozen = [m for m in self.trunk.modules() if isinstance(m, nn.BatchNorm2d)] if freeze_bn else []
        for module in self.frozen:
            module.requires_grad_(False)
        self.trunk_weights = [p for p in self.trunk.parameters() if p.requires_grad]
        self.train()

    def train(self, mode=True):
        super().train(mode)
        for module in self.frozen:                          # train() would let the statistics move
            module.eval()
        return self

    def train_trunk(self, on):
        """Off during warm-up. Frozen BatchNorm is not in the list, so it stays frozen when warm-up ends."""
        for weight in self.trunk_weights:
            weight.requires_grad_(on)

    def features(self, x):
        """Images (B, 3, S, S) -> the last feature map (B, c, h, w), never negative."""
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.precision == 'bf16'):
            return self.trunk(x.contiguous(memory_format=torch.channels_last))

    def pool_features(self, f):
        """(B, c, h, w) -> (B, c), in float32 or better"""
        f = f.to(torch.promote_types(f.dtype, torch.float32))
        parts = dict(avg=F.adaptive_avg_pool2d, max=F.adaptive_max_pool2d)
        return sum(parts[name](f, 1) for name in self.pool.split('+')).flatten(1)

    def project(self, p):
        """Pooled features (B, c) -> embeddings (B, D), of unit length unless normalize=False"""
        z = self.linear(self.norm(p))
        return F.normalize(z, dim=1) if self.normalize else z

    def head(self, f):
        return self.project(self.pool_features(f))

    def forward(self, x):
        return self.head(self.features(x))


def resnet_trunk(arch, weights):
    """A torchvision ResNet without its last pooling and classifier, so that the feature map comes out."""
    if weights == 'imagenet':
        try:
            resnet = torchvision.models.get_model(arch, weights='IMAGENET1K_V1')
        except Exception as error:                          # urllib, http, hashes: each has its own
            url = torchvision.models.get_model_weights(arch)['IMAGENET1K_V1'].url
            raise UsageError(f'could not fetch the ImageNet weights {url} ({error}); fetch the file elsewhere and name '
                             f'it with --weights PATH, or take random ones with --weights none') from None
    else:
        resnet = torchvision.models.get_model(arch, weights=None)
    trunk = nn.Sequential()
    for name, module in list(resnet.named_children())[:-2]:
        trunk.add_module(name, module)
    if weights not in ('imagenet', 'none'):
        state = load_safely(weights)
        if not isinstance(state, dict):
            raise UsageError(f'--weights {weights} holds no weights')
        state = state.get('model', state)                   # a checkpoint of ours, or torchvision's state dict
        state = {str(key).removeprefix('trunk.'): value for key, value in state.items()
                 if not str(key).startswith(('fc.', 'linear.'))}
        fit(trunk, state, weights, arch)
    return trunk


def fit(module, state, path, what):
    """Loads weights strictly; a difference is told by its first names, not by a page of them."""
    own = module.state_dict()
    differ = [key for key in own if key not in state or own[key].shape != getattr(state[key], 'shape', None)]
    strange = [key for key in state if key not in own]
    if differ or strange:
        raise UsageError(f'{path} does not fit {what}: {len(differ)} weights are absent or of another shape '
                         f'{differ[:2]}, {len(strange)} are unknown {strange[:2]}; is it of another script, '
                         f'architecture or size?')
    module.load_state_dict(state)


def load_safely(path):
    """torch.load that runs no code from the file and says what is wrong with it."""
    try:
        return torch.load(path, map_location='cpu', weights_only=True)
    except FileNotFoundError:
        raise UsageError(f'there is no file {path}') from None
    except Exception as error:                              # damaged files fail in many ways
        reason = str(error).strip().split('\n')[0][:150]
        raise UsageError(f'{path} is damaged, or holds more than weights and was not opened, since such a file can '
                         f'run any code: {reason}') from None


# ---- 5. evaluation ---------------------------------------------------------------------------------


@torch.no_grad()
def embed(model, images, batch_size=128):
    """Embeddings of all images, centre crops, network in evaluation mode -> (N, D) float32 on the CPU."""
    device, training = next(model.parameters()).device, model.training
    model.eval()
    lists = torch.arange(len(images)).split(batch_size)
    z = torch.cat([model(x).float().cpu() for x, _ in batches(images, [part.tolist() for part in lists], device)])
    model.train(training)
    return z


@torch.no_grad()
def retrieval_metrics(query, query_labels, gallery=None, gallery_labels=None, ks=(1, 2, 4, 8)):
    """Recall@K, R-precision and MAP@R by exact search with the cosine similarity.

    query (N, D), query_labels (N,), gallery (G, D), gallery_labels (G,); without a gallery the queries are
    searched in themselves. Returns {'R@1': ..., 'RP': ..., 'MAP@R': ...} in percent.

    R@K    share of the queries with a match (same class) among their K nearest
    RP     share of matches among the R nearest, where R is how many matches the gallery holds
    MAP@R  Reality Check Eq. (3): 1/R sum_{i=1..R} P(i), with Reality Check Eq. (4): P(i) is the
           precision at i if the i-th retrieved is a match, else 0   (Musgrave et al., ECCV 2020)

    The rules that such code gets wrong: 1. a query is excluded by its index, not as 'the first hit', which
    a duplicate can be. 2. Among equal similarities non-matches come first, in a list retrieved from a
    shuffled gallery, so a collapsed network scores about chance and not 100. 3. A query without any match
    is a miss in R@K, is left out of RP and MAP@R, and is counted under 'unmatched'.
    """
    alone = gallery is None
    if alone:
        gallery, gallery_labels = query, query_labels
    if not len(query) or len(gallery) < 1 + alone:
        raise UsageError(f'nothing to retrieve: {len(query)} queries, {len(gallery)} images to search in')
    query_labels, gallery_labels = query_labels.to(query.device), gallery_labels.to(query.device)
    held = torch.bincount(gallery_labels, minlength=int(query_labels.max()) + 1)
    matches = held[query_labels] - int(alone)                            # (N,)  R of each query
    depth = min(max(*ks, int(matches.max())), len(gallery) - alone)
    recall, precision, average = {k: 0 for k in ks}, [], []
    for rows, hit in ranked_hits(query, query_labels, gallery, gallery_labels, depth, alone):
        for k in ks:
            recall[k] += int(hit[:, :k].any(dim=1).sum())
        r = matches[rows, None]                                          # (b, 1)
        hit, r = hit[r[:, 0] > 0], r[r[:, 0] > 0]
        rank = torch.arange(1, hit.shape[1] + 1, device=hit.device)
        hit = hit & (rank <= r)                                          # among the R nearest
        p = hit.cumsum(dim=1) / rank * hit                               # Reality Check Eq. (4)
        average += (p.sum(1) / r[:, 0]).tolist()                         # Reality Check Eq. (3)
        precision += (hit.sum(1) / r[:, 0]).tolist()
    metrics = {f'R@{k}': 100 * recall[k] / len(query) for k in ks}
    metrics |= {'RP': 100 * sum(precision) / max(1, len(precision)), 'MAP@R': 100 * sum(average) / max(1, len(average))}
    if len(average) < len(query):
        metrics['unmatched'] = len(query) - len(average)
    return metrics


def ranked_hits(query, query_labels, gallery, gallery_labels, depth, alone):
    """Yields, for a few thousand queries at a time, their rows and hit (b, depth): is the i-th nearest a match?"""
    shuffle = torch.randperm(len(gallery), generator=torch.Generator().manual_seed(0)).to(query.device)
    place = shuffle.argsort()                                            # where query i went
    gallery_labels = gallery_labels[shuffle]
    query, gallery = F.normalize(query.float(), dim=1), F.normalize(gallery[shuffle].float(), dim=1)
    search = searcher(gallery)
    for rows in torch.arange(len(query), device=query.device).split(max(1, min(4096, 2 ** 28 // len(gallery)))):
        similarity, found = search(query[rows], depth + int(alone))      # (b, depth [+ 1])
        if alone:
            drop = found == place[rows, None]
            drop[:, -1] |= ~drop.any(dim=1)                              # lost among equals: then the last goes
            similarity, found = similarity[~drop].view(-1, depth), found[~drop].view(-1, depth)
        hit = gallery_labels[found] == query_labels[rows, None]
        level = (similarity * 2 ** 20).round().long()                    # rounding errors must not break ties
        yield rows, hit.gather(1, (2 * level - hit.long()).argsort(dim=1, descending=True))


def searcher(gallery):
    """search(queries, k) -> (similarities, indices), both (b, k): faiss on the CPU where it can be, else torch."""
    if gallery.device.type == 'cpu' and sys.platform != 'darwin':        # there two OpenMPs in one process crash
        with suppress(ImportError):
            import faiss
            index = faiss.IndexFlatIP(gallery.shape[1])
            index.add(gallery.numpy())
            return lambda queries, k: tuple(torch.from_numpy(part) for part in index.search(queries.numpy(), k))
    return lambda queries, k: (queries @ gallery.T).topk(k, dim=1)


def mean_similarities(z, y):
    """Mean cosine of all positive and of all negative pairs, from class sums, without the (N, N) matrix."""
    z = F.normalize(z.double(), dim=1)
    sums = z.new_zeros(int(y.max()) + 1, z.shape[1]).index_add_(0, y, z)     # (C, D)
    within, n = sums.square().sum().item(), torch.bincount(y).double()
    pairs = n.square().sum().item()
    positive = (within - len(z)) / max(pairs - len(z), 1)
    negative = (z.sum(0).square().sum().item() - within) / max(len(z) ** 2 - pairs, 1)
    return positive, negative


def evaluate(model, data):
    """The metrics of a row: retrieval on the test set, and the mean similarities that explain it."""
    device = next(model.parameters()).device
    where = device if device.type == 'cuda' else 'cpu'
    z, gallery = embed(model, data.query), ()
    if data.gallery is not data.query:
        gallery = embed(model, data.gallery).to(where), data.gallery.labels
    metrics = retrieval_metrics(z.to(where), data.query.labels, *gallery, ks=DATASETS[data.name]['ks'])
    metrics['s+'], metrics['s-'] = mean_similarities(z, data.query.labels)
    if not math.isfinite(metrics['s-']):
        raise UsageError('the embeddings are not finite; the last checkpoint is unharmed; try a lower --lr')
    return metrics


# ---- 6. training -----------------------------------------------------------------------------------


class BalancedSampler(Sampler):
    """Batches of P classes x K images, class by class, as lists of indices.

    labels      (N,) class of each image
    batch_size  P x K; P shrinks to the number of classes if there are fewer
    per_class   K
    generator   torch.Generator, or None for torch's global one
    An epoch has N // (P K) batches. Classes are dealt from a shuffled deck, so that each comes up before
    any comes again; so are the images of a class. A class smaller than K repeats its images.
    """

    def __init__(self, labels, batch_size, per_class, generator=None):
        if per_class < 1 or batch_size < 1 or batch_size % per_class:
            raise UsageError(f'--batch-size {batch_size} is not a multiple of --per-class {per_class}')
        order, counts = labels.argsort(stable=True), torch.bincount(labels)
        self.members = [part.tolist() for part in order.split(counts.tolist()) if len(part)]
        self.per_class, self.generator = per_class, generator
        self.classes = min(batch_size // per_class, len(self.members))
        self.batches = max(1, len(labels) // (self.classes * per_class))
        single = int((counts == 1).sum())
        if single and per_class > 1:
            print(f'warning: {single} of {len(self.members)} training classes have one image: it is its own positive, '
                  f'in another crop', file=sys.stderr)

    def __len__(self):
        return self.batches

    def __iter__(self):
        def shuffled(items):
            return [items[i] for i in torch.randperm(len(items), generator=self.generator).tolist()]

        def deal(deck, items, count):
            """Takes `count` off the deck; what is left when it runs short comes first, then the others."""
            if len(deck) < count:
                deck += shuffled([item for item in items if item not in deck])
            while len(deck) < count:                        # fewer items than asked for: repeat them
                deck += shuffled(items)
            taken, deck[:] = deck[:count], deck[count:]
            return taken

        classes, decks = [], [[] for _ in self.members]
        for _ in range(self.batches):
            chosen = deal(classes, range(len(self.members)), self.classes)
            yield [i for c in chosen for i in deal(decks[c], self.members[c], self.per_class)]


def make_sampler(args, labels):
    """P x K batches, or uniform ones with --per-class 0, which drop an incomplete last batch."""
    if args.per_class:
        wanted, there = args.batch_size // args.per_class, len(labels.unique())
        if wanted > there and args.explicit & {'batch_size', 'per_class'}:
            raise UsageError(f'--batch-size {args.batch_size} --per-class {args.per_class} asks for {wanted} classes '
                             f'per batch, the training set has {there}; lower --batch-size or raise --per-class')
        return BalancedSampler(labels, args.batch_size, args.per_class)
    return BatchSampler(RandomSampler(labels), min(args.batch_size, len(labels)), drop_last=True)


def make_optimizer(args, groups, **options):
    """The optimizer that --optimizer names, over parameter groups that may carry a learning rate of their own."""
    kind = dict(adamw=torch.optim.AdamW, adam=torch.optim.Adam, sgd=torch.optim.SGD, rmsprop=torch.optim.RMSprop)
    if args.optimizer in ('sgd', 'rmsprop'):
        options = dict(momentum=args.momentum) | options
    return kind[args.optimizer](groups, lr=args.lr, weight_decay=args.weight_decay, **options)


def learning_rate_factor(iteration, args, per_epoch, total):
    """What the learning rates are multiplied with before this iteration, counted from 0."""
    if args.schedule == 'step':
        return args.decay_rate ** (iteration // per_epoch // args.decay_epochs)
    if args.schedule == 'cosine':                           # up to 100 iterations up, then half a cosine down to 0
        ramp = max(1, min(100, total // 10))
        return min((iteration + 1) / ramp, 0.5 * (1 + math.cos(math.pi * iteration / max(1, total))))
    return 1.0


def train(args, model, data, step, optimizer, learned=None, sampler=None):
    """Trains, evaluates, logs and saves. Returns the last row, a dict.

    step       step(images, labels) -> scalar loss: all that a method adds. images (B, 3, S, S) are the whole
               batch, augmented, normalised, on the device; labels (B,) too
    optimizer  over the model and whatever the method learns
    learned    {name: tensor or module}: what the method learns beside the model, for the checkpoint
    sampler    lists of indices; by default P x K or uniform batches, as --per-class says
    """
    learned = learned or {}
    sampler = sampler or make_sampler(args, data.train.labels)
    per_epoch = len(sampler)
    total = min(args.epochs * per_epoch, args.steps or math.inf)
    epochs = math.ceil(total / per_epoch)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, partial(learning_rate_factor, args=args, per_epoch=per_epoch, total=total))
    run = Run(args, model, learned, optimizer, schedule)
    describe(args, model, data, sampler, epochs, per_epoch, run)
    try:
        if run.epoch == 0 and not run.rows:
            run.record(dict(epoch=0, loss=None) | evaluate(model, data))
        while run.epoch < epochs:
            epoch = run.epoch + 1
            set_seed(args.seed * 100_003 + epoch)           # so a resumed epoch draws what it would have drawn
            model.train()
            model.train_trunk(epoch > args.warmup)
            steps = min(per_epoch, total - schedule.last_epoch)
            row = dict(epoch=epoch) | train_epoch(args, model, data, step, optimizer, schedule, sampler, steps, epoch)
            if epoch % args.eval_every == 0 or epoch == epochs:
                row |= evaluate(model, data)
            run.record(row, (epochs - epoch) / max(1, epoch - run.start))
    except KeyboardInterrupt:
        print(f'\nstopped; last.pt holds epoch {run.epoch}; go on with: python {args.script}.py --resume {run.folder}'
              if run.rows else '\nstopped before the first checkpoint')
        raise SystemExit(130) from None
    return run.conclude()


def train_epoch(args, model, data, step, optimizer, schedule, sampler, steps, epoch):
    """One pass over the sampler -> loss, images_per_second, no_positive (share of anchors without one)."""
    weights = [weight for group in optimizer.param_groups for weight in group['params']]
    losses, lonely, seen, start = [], 0, 0, time.time()
    lists = (indices for indices, _ in zip(sampler, range(steps)))
    for number, (x, y) in enumerate(batches(data.train, lists, args.device, augment=args), start=1):
        loss = step(x, y)
        optimizer.zero_grad()
        loss.backward()
        if args.clip:
            nn.utils.clip_grad_value_(weights, args.clip)
        optimizer.step()
        schedule.step()
        losses.append(loss.detach())
        lonely += (y[:, None] == y).sum(1).eq(1).sum()
        seen += len(y)
        if number % 20 == 0 or number == steps:             # a look at the loss makes a GPU wait: not every step
            values = torch.stack(losses)
            if not values.isfinite().all():
                first = int(values.isfinite().logical_not().nonzero()[0]) + 1
                raise UsageError(f'the loss is {values[first - 1].item()} at epoch {epoch}, step {first} of {steps}; '
                                 f'the last checkpoint is unharmed; try a lower --lr, or --precision fp32')
            live(f'{epoch:5d} {values.mean():8.4f}   step {number} of {steps}')
    return dict(loss=torch.stack(losses).mean().item(), no_positive=float(lonely) / seen,
                images_per_second=seen / (time.time() - start))


def describe(args, model, data, sampler, epochs, per_epoch, run):
    """The recipe in three lines, before anything runs."""
    batch = f'{sampler.classes} classes x {sampler.per_class}' if isinstance(sampler, BalancedSampler) else 'uniform'
    searched = '' if data.gallery is data.query else f' in {len(data.gallery):,}'
    print(f'{data.name}: {len(data.train):,} training images of {data.train.num_classes:,} classes, '
          f'{len(data.query):,}{searched} test images of {len(data.query.labels.unique()):,} classes\n'
          f'{args.arch} ({args.weights} weights, BatchNorm {"frozen" if args.freeze_bn else "trained"}), {args.pool} '
          f'pooling, {args.dim}-d; {args.image_size} px crops of {args.resize} px images; {args.optimizer}, '
          f'lr {args.lr:g}, {args.schedule}; batch {args.batch_size}, {batch}\n'
          f'{epochs} epochs of {per_epoch} steps, seed {args.seed}, {args.device} in {model.precision}, {run.folder}/')


# ---- 7. runs and checkpoints -----------------------------------------------------------------------


class Run:
    """What a run leaves behind: runs/<name>/ with log.jsonl (one JSON object per evaluated epoch) and last.pt."""

    def __init__(self, args, model, learned, optimizer, schedule):
        self.args, self.model, self.learned = args, model, as_module(learned)
        self.optimizer, self.schedule = optimizer, schedule
        self.epoch, self.rows, self.minutes = 0, [], 0.0
        self.columns = None
        if args.resume:
            self.folder, saved = Path(args.resume).parent, read_checkpoint(args.resume)
            fit(model, saved['model'], args.resume, 'this network')
            fit(self.learned, saved['learned'], args.resume, 'what this script learns beside the network')
            optimizer.load_state_dict(saved['optimizer'])
            schedule.load_state_dict(saved['schedule'])
            self.epoch, self.rows, self.minutes = saved['epoch'], saved['rows'], saved['minutes']
        else:
            self.folder = new_folder(args)
        self.start, self.since = self.epoch, time.time()

    def record(self, row, epochs_left=None):
        """Prints the row, adds it to log.jsonl if it was evaluated, and saves the checkpoint."""
        elapsed = (time.time() - self.since) / 60
        left = f'{elapsed * epochs_left:6.1f}m' if epochs_left is not None else ''
        row = row | dict(minutes=self.minutes + elapsed)
        if 'R@1' in row:
            self.rows.append(row)
        self.show(row, left)
        # the log is written from the checkpoint's rows, so after a crash both tell the same story
        save_checkpoint(self.folder / 'last.pt', self.args, self.model, epoch=row['epoch'], rows=self.rows,
                        minutes=row['minutes'], learned=self.learned.state_dict(),
                        optimizer=self.optimizer.state_dict(), schedule=self.schedule.state_dict())
        self.epoch = row['epoch']
        with written_whole(self.folder / 'log.jsonl', 'the log') as file:
            file.write(''.join(json.dumps(row) + '\n' for row in self.rows).encode())

    def show(self, row, left):
        if self.columns is None:
            self.columns = {key: '7.2f' for key in self.rows[0] if key.startswith(('R@', 'MAP'))}
            self.columns |= {'no_positive': '7.0%', 's+': '7.3f', 's-': '7.3f', 'images_per_second': '7.0f'}
            short = dict(no_positive='no-pos', images_per_second='img/s')
            print('epoch     loss' + ''.join(f'{short.get(key, key):>8}' for key in self.columns) + '    left')
        cells = [f'{row[key]:{form}}' if row.get(key) is not None else '      -' for key, form in self.columns.items()]
        loss = f'{row["loss"]:8.4f}' if row['loss'] is not None else '       -'
        live(f'{row["epoch"]:5d} {loss} ' + ' '.join(cells) + f' {left}', done=True)
        if row['epoch'] and row.get('s-', 0) > 0.98:
            print(f'      collapsed: the mean similarity of two images of different classes is {row["s-"]:.3f}, all '
                  f'embeddings are nearly one; lower --lr, or more --warmup')

    def conclude(self):
        row = self.rows[-1]
        print(f'R@1 = {row["R@1"]:.1f}: for {row["R@1"]:.1f} % of the test images, the most similar other image shows '
              f'the same class, though the network saw none of these classes in training.')
        if self.rows[0]['epoch'] == 0:
            print(f'Before training it was {self.rows[0]["R@1"]:.1f}.')
        if row.get('unmatched'):
            print(f'{row["unmatched"]} queries have no match in the gallery: misses in R@K, left out of RP and MAP@R.')
        print(f'Next: python eval.py --checkpoint {self.folder / "last.pt"}')
        return row


def as_module(learned):
    """{name: parameter, tensor or module} as one module, which shares them and can save and load itself."""
    module = nn.Module()
    for name, value in learned.items():
        if isinstance(value, (nn.Module, nn.Parameter)):
            setattr(module, name, value)
        else:
            module.register_buffer(name, value)
    return module


def new_folder(args):
    """runs/<name>/; the default name is script, dataset and the next free number."""
    numbered = (f'{args.script.removeprefix("train_")}-{args.dataset}-{number}' for number in count(1))
    for name in [args.name] if args.name else numbered:
        folder = Path('runs') / name
        try:
            folder.mkdir(parents=True, exist_ok=bool(args.name))
            return folder
        except FileExistsError:
            if not folder.is_dir():
                raise UsageError(f'{folder} is a file; choose another --name') from None
        except OSError as error:
            raise UsageError(f'cannot make the folder {folder}: {error}') from None


def save_checkpoint(path, args, model, **more):
    """Model, arguments, seed and versions, and whatever else is given; written whole or not at all."""
    kept = {key: value for key, value in vars(args).items() if isinstance(value, (int, float, str, bool, type(None)))}
    kept.pop('resume', None)
    versions = {name: str(version) for name, version in (
        ('python', sys.version.split()[0]), ('torch', torch.__version__), ('torchvision', torchvision.__version__))}
    with written_whole(path, 'the checkpoint') as file:
        torch.save(dict(script=args.script, args=kept, seed=args.seed, versions=versions, embedder=model.config,
                        model=model.state_dict(), **more), file)


def read_checkpoint(path):
    """The dict that save_checkpoint wrote; a run folder stands for its last.pt."""
    path = Path(path)
    saved = load_safely(path / 'last.pt' if path.is_dir() else path)
    if not isinstance(saved, dict) or not {'script', 'args', 'embedder', 'model'} <= set(saved):
        raise UsageError(f'{path} is no checkpoint of these scripts')
    return saved


def load_checkpoint(path, device='cpu', precision='auto'):
    """A trained Embedder, ready to embed: in evaluation mode, with its test transform and its arguments.

    model.transform(image) turns a PIL image into (3, S, S): model(model.transform(image)[None]) is its
    embedding, (1, D).  model.args is the dict of arguments that it was trained with.
    """
    saved, device = read_checkpoint(path), pick_device(device)
    model = Embedder(weights='none', precision=pick_precision(precision, device), **saved['embedder'])
    fit(model, saved['model'], path, saved['embedder']['arch'])
    model.args = saved['args']
    model.transform = transforms.Compose([
        lambda image: image.convert('RGB'), transforms.Resize(model.args['resize']),
        transforms.CenterCrop(model.args['image_size']), transforms.ToTensor(), transforms.Normalize(MEAN, STD)])
    return model.to(device).eval()


def set_seed(seed):
    random.seed(seed)
    np.random.seed(seed % 2 ** 32)
    torch.manual_seed(seed)                                 # every device


# ---- 8. command line -------------------------------------------------------------------------------

SMALL = dict(arch='resnet18', weights='none', freeze_bn=False, dim=128, image_size=64, resize=64, min_crop=0.5,
             epochs=10, batch_size=64, per_class=4, lr=2e-3, schedule='cosine', warmup=0, clip=0.0, eval_every=1)
LARGE = dict(arch='resnet50', weights='imagenet', freeze_bn=True, dim=512, image_size=224, resize=256, min_crop=0.08,
             epochs=60, batch_size=100, per_class=0, lr=1e-4, schedule='step', decay_epochs=10, decay_rate=0.5,
             warmup=5, clip=10.0, eval_every=1)
# Where classes are many and small, batches are balanced and BatchNorm is trained.
MANY = LARGE | dict(per_class=5, freeze_bn=False, warmup=1, eval_every=5)
BASE = dict(shapes=SMALL | dict(min_crop=1.0, batch_size=32, epochs=8, eval_every=4), folder=SMALL,
            cub=LARGE, cars=LARGE, sop=MANY, inshop=MANY)


class Parser(argparse.ArgumentParser):
    def error(self, message):
        raise UsageError(f'{self.prog}: {message}; --help lists the flags')


class Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Shows the docstring as it is, and every default."""


def at_least(low, kind=int):
    def check(text):
        value = kind(text)
        if not value >= low:
            raise ValueError
        return value
    check.__name__ = f'{kind.__name__} >= {low}'
    return check


def parser(doc):
    """The flags that all scripts share. `doc` is the script's docstring; its first word is the script's name."""
    p = Parser(prog=doc.split()[0], description=doc, formatter_class=Help, allow_abbrev=False)
    g = p.add_argument_group('data')
    g.add_argument('--dataset', choices=list(DATASETS), default='shapes', help='shapes is built in and needs no files')
    g.add_argument('--data', default='data', help="folder that holds what the dataset's site unpacks")
    g.add_argument('--cache', default='cache', help='folder for decoded images')
    g.add_argument('--image-size', type=at_least(8), help='side of the crops that the network sees, pixels')
    g.add_argument('--resize', type=at_least(8), help='shorter side of the stored images, pixels; follows --image-size')
    g.add_argument('--min-crop', type=float, help='smallest area of a training crop, as a share of the image')
    g.add_argument('--jitter', type=at_least(0, float), default=0.0, help='brightness, contrast, saturation, up to +-')
    g.add_argument('--no-flip', action='store_true', help='no horizontal flips in training')
    g.add_argument('--label-noise', default='', help='wrong training labels: symmetric:0.2 or longtail:0.25')
    g = p.add_argument_group('network')
    g.add_argument('--arch', choices=['resnet18', 'resnet34', 'resnet50', 'resnet101'], help='trunk')
    g.add_argument('--weights', help='imagenet, none, or a file')
    g.add_argument('--pool', choices=['avg', 'max', 'avg+max'], default='avg+max', help='pooling of the feature map')
    g.add_argument('--dim', type=at_least(1), help='size of the embedding')
    g.add_argument('--freeze-bn', action=argparse.BooleanOptionalAction, help='BatchNorm keeps statistics and weights')
    g = p.add_argument_group('training')
    g.add_argument('--epochs', type=at_least(0), help='passes over the training set')
    g.add_argument('--steps', type=at_least(0), default=0, help='stop after so many steps; 0: after --epochs')
    g.add_argument('--batch-size', type=at_least(1), help='images per batch, B')
    g.add_argument('--per-class', type=at_least(0), help='images per class in a batch, K; 0 draws images uniformly')
    g.add_argument('--optimizer', choices=['adamw', 'adam', 'sgd', 'rmsprop'], default='adamw', help='optimizer')
    g.add_argument('--lr', type=at_least(0, float), help='learning rate')
    g.add_argument('--weight-decay', type=at_least(0, float), default=1e-4, help='weight decay')
    g.add_argument('--momentum', type=at_least(0, float), default=0.0, help='of sgd and rmsprop')
    g.add_argument('--schedule', choices=['step', 'cosine', 'constant'], help='of the learning rate')
    g.add_argument('--decay-epochs', type=at_least(1), default=10, help='step: epochs between decays')
    g.add_argument('--decay-rate', type=at_least(0, float), default=0.5, help='step: factor of a decay')
    g.add_argument('--warmup', type=at_least(0), help='epochs in which only the head, and what the method learns, move')
    g.add_argument('--clip', type=at_least(0, float), help='largest gradient, by value; 0: no clipping')
    g = p.add_argument_group('run')
    g.add_argument('--seed', type=at_least(0), default=0, help='of everything random')
    g.add_argument('--device', default='auto', help='auto, cpu, cuda, cuda:1, mps')
    g.add_argument('--precision', choices=['auto', 'bf16', 'fp32'], default='auto', help='of the trunk')
    g.add_argument('--eval-every', type=at_least(1), help='epochs between evaluations')
    g.add_argument('--name', default='', help='folder below runs/; default: script, dataset, next free number')
    g.add_argument('--resume', nargs='?', const='', metavar='RUN',
                   help='go on with a run: its folder, or without a value that of --name, or the newest of this kind')
    return p


def parse(parser, DEFAULTS, argv=None):
    """Reads --dataset first, fills in its defaults (BASE, then the script's row), then reads all flags.

    With --resume the arguments of the checkpoint are the defaults. Returns a namespace with, beside the
    flags, script, explicit (the names of the flags that were typed) and device as a torch.device.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    script = Path(parser.prog).stem
    first = Parser(prog=parser.prog, add_help=False, allow_abbrev=False)
    first.add_argument('--dataset', default='shapes')
    first.add_argument('--name', default='')
    first.add_argument('--resume', nargs='?', const='')
    early = first.parse_known_args(argv)[0]
    defaults = BASE.get(early.dataset, {}) | DEFAULTS.get(early.dataset, {})
    checkpoint = None
    if early.resume is not None:
        checkpoint = find_run(early, script)
        saved = read_checkpoint(checkpoint)
        if saved['script'] != script:
            raise UsageError(f'{checkpoint} was made by {saved["script"]}.py, not by {script}.py')
        defaults = saved['args']
    known = {action.dest for action in parser._actions}
    unknown = [key for key in defaults if key not in known | {'script'}]
    if unknown:
        raise UsageError(f'{script}.py has no flag for {", ".join(unknown)}, which stands in its defaults')
    parser.set_defaults(**{key: value for key, value in defaults.items() if key in known})
    args = parser.parse_args(argv)
    typed = {token.split('=')[0] for token in argv}
    args.explicit = {action.dest for action in parser._actions if typed & set(action.option_strings)}
    args.script, args.resume = script, checkpoint
    if 'image_size' in args.explicit and 'resize' not in args.explicit:
        args.resize = round(args.image_size * defaults['resize'] / defaults['image_size'])
    if not 0 < args.min_crop <= 1:
        raise UsageError(f'--min-crop {args.min_crop} is no share of an image: it must lie in (0, 1]')
    if args.name and checkpoint is None and (Path('runs') / args.name / 'last.pt').exists():
        raise UsageError(f'runs/{args.name} exists already; choose another --name, or go on with it: '
                         f'--resume runs/{args.name}')
    free = {'resume', 'name', 'data', 'cache', 'epochs', 'steps', 'eval_every', 'device', 'precision'}
    changed = [key for key in args.explicit - free if checkpoint and getattr(args, key) != defaults.get(key)]
    if changed:
        raise UsageError(f'{checkpoint} was made with another --{changed[0].replace("_", "-")}; start a new run')
    args.device = pick_device(args.device)
    return args


def find_run(early, script):
    """The checkpoint that --resume means: the run or file it names, the run of --name, or the newest of this kind."""
    name = early.resume or early.name or f'{script.removeprefix("train_")}-{early.dataset}-*'
    if Path(name).is_file():
        return name
    found = [*Path().glob(f'{name}/last.pt')] if Path(name).is_dir() else [*Path('runs').glob(f'{name}/last.pt')]
    if not found:
        raise UsageError(f'--resume: there is no checkpoint {Path("runs") / name / "last.pt"}')
    return str(max(found, key=lambda path: path.stat().st_mtime))


def pick_device(name):
    """auto takes a GPU if there is one."""
    if str(name) == 'auto':
        name = 'cuda' if torch.cuda.is_available() else 'mps' if torch.backends.mps.is_available() else 'cpu'
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).strip().split('\n')[0]
        raise UsageError(f'--device {name} cannot be used here: {reason}') from None
    return device


def pick_precision(name, device):
    """auto takes bfloat16 where the hardware multiplies it: GPUs since Ampere, CPUs with AVX512-BF16."""
    if name != 'auto':
        return name
    if device.type == 'cuda':
        return 'bf16' if torch.cuda.is_bf16_supported(including_emulation=False) else 'fp32'
    supported = getattr(torch.cpu, '_is_avx512_bf16_supported', lambda: False)
    return 'bf16' if device.type == 'cpu' and supported() else 'fp32'


def load(args):
    """The dataset that the flags name, with label noise in its training labels if they ask for it."""
    data = load_dataset(args.dataset, args.data, args.resize, args.image_size, args.cache)
    if args.label_noise:
        data.train.labels = corrupt_labels(data.train.labels, args.label_noise, args.seed)
    return data


def build(args, **options):
    """The network that the flags name, on their device. `options` go to Embedder."""
    if args.device.type == 'cuda':
        torch.backends.cudnn.benchmark = True               # the batches of training have one shape
    return Embedder(args.arch, args.dim, args.pool, args.weights, args.freeze_bn,
                    precision=pick_precision(args.precision, args.device), **options).to(args.device)
