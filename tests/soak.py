"""Many cases that may go wrong, counted: python tests/soak.py [--code FOLDER] [group ...]

Run by hand; tests/test_soak.py runs a sample. --code tries another version of the project. A case is right if what
it checks holds; or, for what should be refused, if the one exception is common.UsageError with one line that names the
culprit. Groups: images, folders, annotations, flags, checkpoints, faults, retrieval.
"""
import argparse
import contextlib
import importlib
import io
import itertools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zlib
from functools import partial
from pathlib import Path

import numpy as np
import torch
from PIL import Image

SCRIPTS = ['contrastive', 'ms', 'proxy_anchor', 'proxynca_pp', 'ccl', 'metrix', 'hse']
SMALL = ('--arch resnet18 --dim 4 --image-size 17 --resize 17 --batch-size 4 --per-class 2 --steps 2 --device cpu '
         '--weights none --dataset folder --data x --cache cache').split()
common = None                                               # the module of the version that is tried


def refused(call, *names):
    """Raises AssertionError unless `call` raises common.UsageError with one line that holds these names."""
    try:
        call()
    except common.UsageError as error:
        text = str(error)
        assert '\n' not in text and all(name in text for name in names), f'unclear: {text}'
    else:
        raise AssertionError('was accepted')


def accepted_or_refused(call, *names):
    with contextlib.suppress(common.UsageError):
        call()


def picture(seed=0, size=(24, 24)):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (*size[::-1], 3), dtype=np.uint8))


def folder(root, *classes, per_class=2, seed=0):
    for c, i in itertools.product(classes, range(per_class)):
        path = Path(root) / c / f'{i}.png'
        path.parent.mkdir(parents=True, exist_ok=True)
        picture(zlib.crc32(f'{path} {seed}'.encode())).save(path)


def load(**options):
    return common.load_dataset('folder', 'x', resize=16, image_size=16, cache='cache', **options)


# ---- images: one odd file among good ones


def images():
    def case(write, check=None):
        """check(pixels) of the odd image as it is decoded, None: the image must be refused by its name"""
        def run():
            folder('x', 'b', 'c', 'd')
            Path('x/a').mkdir()
            path = write(Path('x/a/odd'))
            if check is None:
                refused(load, path.name)
            else:
                data = load().train
                assert check(data[0].astype(float)), 'wrong pixels'
        return run

    def save(suffix, image, **options):
        def write(path):
            path = path.with_suffix(suffix)
            image.save(path, **options)
            return path
        return write

    def raw(suffix, content):
        def write(path):
            path = path.with_suffix(suffix)
            path.write_bytes(content)
            return path
        return write

    flat = Image.new('RGB', (40, 30), (200, 90, 30))
    near = lambda *colour: lambda p: np.abs(p.mean(axis=(0, 1)) - colour).max() < 25  # noqa: E731
    for suffix, modes in (('.jpg', 'RGB L CMYK'), ('.png', 'RGB L LA RGBA P 1'), ('.ppm', 'RGB'), ('.bmp', 'RGB L P'),
                          ('.tif', 'RGB L RGBA CMYK P'), ('.webp', 'RGB RGBA')):
        for mode in modes.split():
            grey = dict(L=near(115, 115, 115), LA=near(115, 115, 115)).get(mode, near(200, 90, 30))
            yield f'{suffix} {mode}', case(save(suffix, flat.convert(mode)), (lambda p: True) if mode == '1' else grey)
    ramp = np.linspace(0, 1, 40)[None] * np.ones((30, 1))
    for suffix, kind, scale in (('.png', np.uint16, 65535), ('.tif', np.uint16, 65535), ('.tif', np.int32, 65535),
                                ('.tif', np.int32, 10 ** 6), ('.tif', np.float32, 1), ('.tif', np.float32, 5000)):
        yield f'{suffix} {kind.__name__} up to {scale}', case(
            save(suffix, Image.fromarray((ramp * scale).astype(kind))),
            lambda p: p[:, :2].mean() < 20 and p[:, -2:].mean() > 235 and 100 < p.mean() < 155)
    corner = np.zeros((32, 32, 3), np.uint8)
    corner[:16, :16] = 255
    turns = [None, *Image.Transpose]
    for orientation, stored in ((1, None), (2, 0), (3, 3), (4, 1), (5, 5), (6, 2), (7, 6), (8, 4)):
        exif, image = Image.Exif(), Image.fromarray(corner)
        exif[0x0112] = orientation
        image = image if stored is None else image.transpose(turns[1:][stored])
        yield f'EXIF orientation {orientation}', case(
            save('.jpg', image, exif=exif, quality=95), lambda p: p[:6, :6].mean() > 230 and p[10:, 10:].mean() < 25)
    for suffix in ('.jpg', '.png', '.ppm', '.bmp', '.webp'):
        with io.BytesIO() as file:
            picture(1, (64, 64)).save(file, Image.registered_extensions()[suffix])
            whole = file.getvalue()
        for share in (0.01, 0.1, 0.3, 0.5, 0.7, 0.9):
            yield f'{suffix} cut at {share}', case(raw(suffix, whole[:int(share * len(whole))]))
    for name, content in (('empty', b''), ('text', b'hello'), ('html', b'<html>404</html>'), ('zeros', bytes(5000)),
                          ('EPS', b'%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\nshowpage\n'), ('GIF', b'GIF89a'),
                          ('PDF', b'%PDF-1.4\n')):
        for suffix in ('.jpg', '.png', '.tiff'):
            yield f'{name} as {suffix}', case(raw(suffix, content))
    for size in ((1, 1), (3, 2), (40, 1), (7, 200), (1, 500), (16_000, 20)):
        yield f'size {size}', case(save('.png', Image.new('RGB', size)), lambda p: p.size > 0)
    with io.BytesIO() as file:
        picture(2, (48, 48)).save(file, 'JPEG')
        whole = file.getvalue()
    for seed in range(30):
        broken = bytearray(whole)
        for _ in range(3):
            broken[random.Random(seed).randrange(len(broken))] ^= 1 << seed % 8

        def run(broken=bytes(broken)):
            folder('x', 'a', 'b', 'c', 'd')
            Path('x/a/odd.jpg').write_bytes(broken)
            accepted_or_refused(load)
        yield f'flipped bits {seed}', run


# ---- folders


def folders():
    def classes(expected, *, warned=None):
        def check():
            with contextlib.redirect_stderr(io.StringIO()) as err:
                splits = common.list_images('folder', 'x')
            found = [splits[split] for split in ('train', 'query')]
            # A first version returned columns instead of rows.
            found = [sorted(set(part[1] if isinstance(part, tuple) else list(zip(*part))[1])) for part in found]
            assert found == expected, f'{found}'
            assert warned is None or warned in err.getvalue(), f'no warning: {err.getvalue()!r}'
        return check

    def case(make, check):
        def run():
            make()
            check()
        return run
    two = [['a', 'b'], ['c', 'd']]
    plain = lambda: folder('x', 'a', 'b', 'c', 'd')  # noqa: E731
    yield 'plain', case(plain, classes(two))
    for name in ('.ipynb_checkpoints', '.Trash', '.git/objects', 'a/.thumbnails'):
        yield f'hidden {name}', case(lambda name=name: [plain(), folder('x', name)], classes(two))
    for target in ('.', '..', '../x', '../../'):
        yield f'link to {target}', case(lambda t=target: [plain(), Path('x/a/up').symlink_to(t)], classes(two))
    yield 'pipe', case(lambda: [plain(), os.mkfifo('x/a/p.jpg')], lambda: load())
    yield 'folder.jpg', case(lambda: [plain(), Path('x/a/f.jpg').mkdir()], lambda: load())
    yield 'dangling link', case(lambda: [plain(), Path('x/a/l.jpg').symlink_to('gone')], lambda: load())
    for train, test in (('train', 'test'), ('Train', 'Test'), ('train', 'val'), ('TRAIN', 'VAL')):
        def make(train=train, test=test):
            folder('x', f'{train}/y', f'{train}/z', f'{test}/a', f'{test}/b')
        yield f'{train} and {test}', case(make, classes([['y', 'z'], ['a', 'b']]))
    yield 'class on both sides', case(lambda: folder('x', 'train/a', 'train/b', 'test/b', 'test/c'),
                                      lambda: None if 'b' in said(load) else 1 / 0)
    for source, target in (('train/a/0.png', 'test/c/9.png'), ('test/c/0.png', 'test/d/9.png'),
                           ('test/d/1.png', 'test/d/8.png')):
        def make(source=source, target=target):
            folder('x', 'train/a', 'train/b', 'test/c', 'test/d')
            shutil.copy(f'x/{source}', f'x/{target}')
        yield f'copy {source} {target}', case(make, lambda: None if 'copy' in said(load) else 1 / 0)
    for suffix in ('.heic', '.gif', '.txt', '.raw'):
        def make(suffix=suffix):
            plain()
            Path('x/e').mkdir()
            Path(f'x/e/1{suffix}').write_bytes(b'unread')
        yield f'a class of {suffix}', case(make, lambda: None if 'x/e' in said(load) else 1 / 0)
    for name in ('Vögel', 'a b', 'a[1]*', "it's", '鳥', 'a\nb', '-x', 'train2'):
        yield f'class {name!r}', case(lambda n=name: folder('x', n, 'zz/b', 'zz/c', 'zz/d'), lambda: load())
    for names in ((), ('a',), ('a', 'b')):
        yield f'{len(names)} classes', case(lambda n=names: [Path('x').mkdir(), folder('x', *n)], lambda: refused(load))
    for changed in ('path', 'content', 'nothing'):
        def two_folders(changed=changed):
            for name, colour in (('x', 10), ('y', 10 if changed == 'nothing' else 200)):
                for c in 'abcd':
                    Path(name, c).mkdir(parents=True)
                    Image.new('RGB', (16, 16), (colour,) * 3).save(f'{name}/{c}/0.bmp')
                    os.utime(f'{name}/{c}/0.bmp', (1, 1))
            load()
            if changed == 'content':
                shutil.rmtree('x')
                os.rename('y', 'x')
            other = common.load_dataset('folder', 'y' if changed == 'path' else 'x', 16, 16, 'cache').train[0].mean()
            assert other == (10 if changed == 'nothing' else 200), 'another folder out of the cache'
        yield f'cache, changed: {changed}', two_folders
    for cut in (1, 8, 100, 1000):
        def damaged(cut=cut):
            plain()
            whole = load().train.pixels.copy()
            file = next(f for f in Path('cache').iterdir() if 'train' in f.name)
            file.write_bytes(file.read_bytes()[:-cut])
            assert np.array_equal(load().train.pixels, whole), 'damaged pixels'
        yield f'cache cut by {cut}', damaged


def said(call):
    with contextlib.redirect_stderr(io.StringIO()) as err:
        call()
    return err.getvalue()


# ---- annotations: a small version of each benchmark, and what may happen to its file


def annotations():
    def cub(lines):
        Path('d/CUB_200_2011').mkdir(parents=True)
        Path('d/CUB_200_2011/images.txt').write_bytes(lines)
        return 'd/CUB_200_2011/images'

    def sop(lines):
        base = Path('d/Stanford_Online_Products')
        base.mkdir(parents=True)
        half = lines.split(b'|')
        for name, part in zip(('Ebay_train.txt', 'Ebay_test.txt'), half * 2):
            (base / name).write_bytes(part)
        return base

    def inshop(lines):
        Path('d/Eval').mkdir(parents=True)
        Path('d/Eval/list_eval_partition.txt').write_bytes(lines)
        return 'd/Img'
    whole = dict(
        cub=b'1 001.A/1.jpg\n2 001.A/2.jpg\n3 002.B/3.jpg\n4 101.C/4.jpg\n5 101.C/5.jpg\n6 102.D/6.jpg\n',
        sop=b'image_id class_id super_class_id path\n1 1 1 b/1.JPG\n2 1 1 b/2.JPG\n3 2 1 b/3.JPG\n'
            b'|image_id class_id super_class_id path\n4 3 1 b/4.JPG\n5 3 1 b/5.JPG\n6 4 1 b/6.JPG\n',
        inshop=b'7\nimage_name item_id evaluation_status\nimg/1.jpg id_1 train\nimg/2.jpg id_1 train\n'
               b'img/3.jpg id_2 train\nimg/4.jpg id_3 query\nimg/5.jpg id_3 gallery\nimg/6.jpg id_4 query\n'
               b'img/7.jpg id_4 gallery\n')
    counts = dict(cub=dict(train=(3, 2), query=(3, 2)), sop=dict(train=(3, 2), query=(3, 2)),
                  inshop=dict(train=(3, 2), query=(2, 2), gallery=(2, 2)))
    damages = dict(
        none=lambda t: t, crlf=lambda t: t.replace(b'\n', b'\r\n'), blank_lines_at_the_end=lambda t: t + b'\n\n',
        empty=lambda t: b'', html=lambda t: b'<html><body>404</body></html>', zeros=lambda t: bytes(len(t)),
        cut_in_the_middle=lambda t: t[:len(t) // 2], cut_by_5=lambda t: t[:-5], cut_by_12=lambda t: t[:-12],
        latin_1=lambda t: t.replace(b'2.', b'\xe9.'), missing_image=lambda t: t.replace(b'3.', b'9.'),
        listed_twice=lambda t: t.replace(b'2.', b'1.'), listed_twice_elsewhere=lambda t: t.replace(b'5.', b'1.'),
        parent=lambda t: t.replace(b'3.', b'../../../../s/3.'), absolute=lambda t: re.sub(rb'\S+/3\.', rb'/tmp/3.', t),
        no_number=lambda t: t.replace(b'101.', b'x.').replace(b' 3 1', b' x 1').replace(b'query', b'ask'),
        columns_gone=lambda t: re.sub(rb' \S+\n', b'\n', t), more_columns=lambda t: t.replace(b'\n', b' 7 7\n'),
        class_on_both_sides=lambda t: t.replace(b'6 4 1', b'6 2 1').replace(b'id_4', b'id_2'),
        spaces=lambda t: t.replace(b'3.', b'3 .'), header_gone=lambda t: t[t.index(b'\n') + 1:])
    harmless = {'none', 'crlf', 'blank_lines_at_the_end'}
    for name, make in dict(cub=cub, sop=sop, inshop=inshop).items():
        for damage, change in damages.items():
            if (name, damage) == ('cub', 'class_on_both_sides') or (name, damage) == ('cub', 'spaces'):
                continue                                    # the number decides the side; an id is no class

            def run(name=name, make=make, change=change, damage=damage):
                base = Path(make(change(whole[name])))
                for path in re.findall(rb'\S+/\d\.\w+', whole[name]):
                    path = base / path.decode()
                    path.parent.mkdir(parents=True, exist_ok=True)
                    picture(int(path.stem)).save(path, 'JPEG')
                Path('s').mkdir()
                picture().save('s/3.jpg')
                facts = common.DATASETS[name]
                kept, facts['counts'] = facts['counts'], counts[name]
                try:
                    if damage in harmless:
                        assert len(common.list_images(name, 'd')['train']) == 3
                    else:
                        refused(lambda: common.list_images(name, 'd'), name)
                finally:
                    facts['counts'] = kept
            yield f'{name} {damage}', run


# ---- flags


def flags():
    for script in SCRIPTS:
        module = importlib.import_module(f'train_{script}')
        with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):
            module.get_args(['--help'])
        words = {'--data', '--cache', '--weights', '--name', '--device', '--resume', '--analyse', '--show-hybrids',
                 '--show-batch'}
        for flag in sorted(set(re.findall(r'^  (--[a-z-]+) [A-Z]', out.getvalue(), re.MULTILINE)) - words):
            for value in ('nan', 'inf', '-inf', '1e999', 'x', ''):
                yield f'{script} {flag}={value}', partial(refused, partial(module.get_args, [f'{flag}={value}']))
            for value in ('-1', '0', '1e30'):
                yield (f'{script} {flag}={value}',
                       partial(accepted_or_refused, partial(module.get_args, [f'{flag}={value}'])))


# ---- checkpoints


def checkpoints():
    def changed(change, use):
        def run():
            folder('x', 'a', 'b', 'c', 'd')
            main('ms', '--name', 'r', '--epochs', '1')
            whole = torch.load('runs/r/last.pt', weights_only=True)
            content = change(whole)
            if content is not None:
                torch.save(content, 'runs/r/last.pt')
            before = sorted(map(str, Path().rglob('*')))
            refused(lambda: main('ms', '--resume', 'runs/r', bare=True) if use == 'resume' else
                    common.load_checkpoint('runs/r'), 'runs/r')
            assert sorted(map(str, Path().rglob('*'))) == before, 'wrote files'
        return run

    def flip(whole, at):
        content = bytearray(Path('runs/r/last.pt').read_bytes())
        data = whole['model']['linear.weight'].numpy().tobytes()
        content[content.index(data) + at % len(data)] ^= 1
        Path('runs/r/last.pt').write_bytes(content)

    def cut(share):
        content = Path('runs/r/last.pt').read_bytes()
        Path('runs/r/last.pt').write_bytes(content[:int(share * len(content))])
    first = 'trunk.conv1.weight'
    for use in ('resume', 'load'):
        own = dict(resume=['rows', 'epoch', 'minutes', 'optimizer', 'schedule', 'learned'], load=[])[use]
        for key in ['model', 'args', 'embedder', 'script', *own]:
            yield f'{use}: {key} is missing', changed(lambda w, k=key: {n: w[n] for n in w if n != k}, use)
        own = dict(resume=['optimizer', 'schedule', 'learned'], load=['args', 'embedder'])[use]
        for key, value in itertools.product(['model', *own], (None, 'x', [1], 3.5)):
            yield f'{use}: {key} is {value!r}', changed(lambda w, k=key, v=value: w | {k: v}, use)
        for name, change in (('of another shape', lambda t: t[:1]), ('text', lambda t: 'x'), ('None', lambda t: None)):
            yield f'{use}: weights are {name}', changed(
                lambda w, c=change: w | dict(model=w['model'] | {first: c(w['model'][first])}), use)
        yield f'{use}: weights too many', changed(lambda w: w | dict(model=w['model'] | dict(x=torch.ones(1))), use)
        yield f'{use}: weights missing', changed(
            lambda w: w | dict(model={k: v for k, v in w['model'].items() if k != first}), use)
        for at in (0, 100, 3000, 8000):
            yield f'{use}: byte {at} flipped', changed(lambda w, a=at: flip(w, a), use)
        for share in (0, 0.1, 0.5, 0.9, 0.999):
            yield f'{use}: cut at {share}', changed(lambda w, s=share: cut(s), use)
        yield f'{use}: no checkpoint', changed(lambda w: [1, 2], use)
    for key, value in (('dim', 9), ('arch', 'resnet34')):
        yield f'resume: argument {key} {value}', changed(
            lambda w, k=key, v=value: w | dict(args=w['args'] | {k: v}), 'resume')


def main(script, *argv, bare=False):
    module = importlib.import_module(f'train_{script}')
    return module.main([*([] if bare else SMALL), *argv])


# ---- faults: real processes


def faults():
    def start(*argv, script='ms', **options):
        command = [sys.executable, f'{sys.path[0]}/train_{script}.py', *SMALL, '--steps', '0', *argv]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options)

    def rows(name):
        return [{k: row[k] for k in row if k not in ('minutes', 'images_per_second')}
                for row in map(json.loads, open(f'runs/{name}/log.jsonl'))]

    def killed(after, number):
        def run():
            folder('x', 'a', 'b', 'c', 'd', per_class=4)
            assert start('--name', 'whole', '--epochs', '6').wait() == 0
            process = start('--name', 'cut', '--epochs', '6')
            deadline = time.time() + 60
            while not Path('runs/cut/last.pt').exists() and time.time() < deadline:
                time.sleep(0.01)
            time.sleep(after)
            process.send_signal(number)
            output = process.communicate()[0]
            assert 'Traceback' not in output, output
            if process.returncode:
                again = [sys.executable, f'{sys.path[0]}/train_ms.py', '--resume', 'runs/cut', '--device', 'cpu']
                done = subprocess.run(again, capture_output=True, text=True)
                assert done.returncode == 0, done.stderr
            assert rows('whole') == rows('cut'), 'another course'
            assert not list(Path('runs/cut').glob('*.tmp')), 'left-overs'
        return run
    for i in range(10):
        yield f'kill -9 after {0.04 * i:.2f} s', killed(0.04 * i, signal.SIGKILL)
        yield f'Ctrl-C after {0.04 * i:.2f} s', killed(0.04 * i, signal.SIGINT)

    def one_line(suffix, **variables):
        def run():
            folder('x', 'a', 'b', 'c', 'd', per_class=4)
            shell = (f'{sys.executable} {sys.path[0]}/train_ms.py {" ".join(SMALL)} --epochs 3 --steps 0 --name r '
                     f'{suffix}')
            done = subprocess.run(['bash', '-c', shell], capture_output=True, text=True, env=os.environ | variables)
            assert 'Traceback' not in done.stderr and 'Exception ignored' not in done.stderr, done.stderr
            if not Path('runs/r/last.pt').exists():         # stopped before the first epoch
                assert not Path('runs/r/log.jsonl').exists(), 'a row without a checkpoint'
                return
            saved = torch.load('runs/r/last.pt', weights_only=True)
            assert len(rows('r')) == len(saved['rows']) > 0, 'an epoch was lost'
        return run
    for lines in (1, 3, 6, 7, 8):
        yield f'head -{lines}', one_line(f'| head -{lines}')
    yield 'full stdout', one_line('> /dev/full')
    yield 'ASCII terminal', one_line('', PYTHONIOENCODING='ascii', LC_ALL='C')

    for name in ('../r', 'a/b', '/tmp/r', '..', '.'):
        yield f'--name {name}', partial(refused, partial(main, 'ms', '--name', name))
    for name, content in (('runs/good/last.pt', b'checkpoint'), ('thesis.txt', b'text')):
        def overwrite(name=name, content=content):
            folder('x', 'a', 'b', 'c', 'd')
            Path(name).parent.mkdir(parents=True, exist_ok=True)
            Path(name).write_bytes(content)
            refused(lambda: main('hse', '--show-hybrids', name))
            assert Path(name).read_bytes() == content
        yield f'--show-hybrids {name}', overwrite


# ---- retrieval: small problems by brute force


def retrieval():
    def exact(seed, gallery, values):
        def run():
            rng = np.random.default_rng(seed)
            n, g, dim, ks = int(rng.integers(2, 14)), int(rng.integers(1, 14)), int(rng.integers(1, 5)), (1, 2, 4, 8)

            def draw(m):
                z = rng.normal(size=(m, dim)) if values == 'any' else rng.integers(-1, 2, size=(m, dim)).astype(float)
                z[(z == 0).all(axis=1), 0] = 1
                return z
            q, qy = draw(n), rng.integers(0, 4, n)
            x, xy = (draw(g), rng.integers(0, 4, g)) if gallery else (q, qy)
            arrays = [torch.tensor(a) for a in (q, qy, x, xy)[:4 if gallery else 2]]
            ours = common.retrieval_metrics(*(a.float() if a.dim() == 2 else a for a in arrays))
            q, x = (a / np.linalg.norm(a, axis=1, keepdims=True) for a in (q, x))
            expected, full = {f'R@{k}': [] for k in ks} | {'RP': [], 'MAP@R': []}, len(x) - (not gallery)
            ties = False
            for i in range(n):
                others = [j for j in range(len(x)) if gallery or j != i]
                s, hit = np.round(x[others] @ q[i], 5 if values == 'equal' else 12), qy[i] == xy[others]
                order = np.lexsort((hit, -s))               # by similarity, non-matches first
                s, hit = s[order], hit[order]
                r = hit.sum()
                depth = min(full, max(8, max(((xy == y).sum() - (not gallery)) for y in set(qy))))
                ties |= depth < full and s[depth - 1] == s[depth]
                for k in ks:
                    expected[f'R@{k}'].append(hit[:k].any())
                if r:
                    p = np.cumsum(hit) / (np.arange(len(hit)) + 1) * hit
                    expected['RP'].append(hit[:r].mean())
                    expected['MAP@R'].append(p[:r].sum() / r)
            for key, values_ in expected.items():
                value = 100 * np.mean(values_) if values_ else 0
                # Ties that go on beyond what is searched may score higher, as the docstring says.
                assert abs(ours[key] - value) < 1e-3 or ties and ours[key] >= value, f'{key} {ours[key]} {value}'
        return run
    for seed in range(160):
        for gallery, values in itertools.product((False, True), ('any', 'equal')):
            yield f'{seed} {gallery} {values}', exact(seed, gallery, values)
    for value in (float('nan'), float('inf')):
        for where in ('query', 'gallery'):
            def broken(value=value, where=where):
                q, x = torch.randn(6, 3), torch.randn(6, 3)
                (q if where == 'query' else x)[2, 1] = value
                y = torch.arange(6) // 2
                refused(lambda: common.retrieval_metrics(q, y, x, y))
            yield f'{value} in {where}', broken


GROUPS = dict(images=images, folders=folders, annotations=annotations, flags=flags, checkpoints=checkpoints,
              faults=faults, retrieval=retrieval)


def attempt(case, seconds=120):
    """Runs a case in a folder of its own -> None, or what went wrong"""
    def late(*_):
        raise TimeoutError(f'hangs for {seconds} s')
    here, before = os.getcwd(), signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        with tempfile.TemporaryDirectory() as tmp, contextlib.redirect_stdout(io.StringIO()):
            os.chdir(tmp)
            try:
                with contextlib.redirect_stderr(io.StringIO()):
                    case()
            finally:
                os.chdir(here)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        return f'{type(error).__name__}: {" ".join(str(error).split())[:150]}'
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def use(code):
    global common
    sys.path.insert(0, str(code))
    common = importlib.import_module('common')


if __name__ == '__main__':
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('groups', nargs='*', help=', '.join(GROUPS))
    parser.add_argument('--code', type=Path, default=Path(__file__).parents[1])
    options = parser.parse_args()
    use(options.code.resolve())
    torch.set_num_threads(1)
    for name in options.groups or GROUPS:
        tried = wrong = 0
        for what, case in GROUPS[name]():
            reason = attempt(case)
            tried, wrong = tried + 1, wrong + bool(reason)
            if reason:
                print(f'    {name}, {what}: {reason}')
        print(f'{name}: {tried} tried, {wrong} wrong', flush=True)
