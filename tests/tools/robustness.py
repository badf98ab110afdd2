"""Robustness tests: hundreds of malformed and corrupted inputs. Prints those that are handled incorrectly.

    python tests/tools/robustness.py [group ...]

Run it after a change of how files or flags are read. Each group takes less than half a minute, except `faults`, which
kills processes: 5 to 15 minutes on a busy core. pytest runs a sample of the other groups: test_robustness.py.

A group yields cases (what, prepare, call, expected). prepare() makes files in an empty folder. Then, if
    expected is a list      call() must raise common.UsageError, with all words of the list in a one-line message
    expected is None        call() may return anything or raise UsageError, but no other exception, and must not hang
    expected is a function  it must be true of the result of call()
    otherwise               call() must return the expected value
If UsageError is raised, no file may have changed.
"""
import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from functools import partial
from itertools import product
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from PIL import Image

sys.path.insert(0, str(Path(__file__).parents[1]))

from conftest import make_folder

import common
import train_ms

SMALL = ('--arch resnet18 --dim 4 --image-size 17 --resize 17 --batch-size 4 --per-class 2 --device cpu '
         '--weights none --dataset folder --data x').split()


def encoded(image, suffix):
    """The content of an image file"""
    with io.BytesIO() as file:
        image.save(file, Image.registered_extensions()[suffix])
        return file.getvalue()


def noise(name, side=24):
    rng = np.random.default_rng(list(name.encode()))
    return Image.fromarray(rng.integers(0, 256, (side, side, 3), dtype=np.uint8))


def write(path, content):
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_bytes(content)


def make_classes(*classes):
    make_folder(Path('x'), classes, per_class=4)


def load():
    return common.load_dataset('folder', 'x', resize=16, image_size=16)


def images():
    """One unusual file among normal ones is decoded with the right colour, or the error names it."""
    def prepare(suffix, content):
        make_classes('b', 'c', 'd')
        write(f'x/a/unusual{suffix}', content)

    def case(what, suffix, content, expected):
        return f'{suffix} {what}', partial(prepare, suffix, content), lambda: load().train[0][0], expected

    def near(*colour):
        mean, std = np.array(common.MEAN), np.array(common.STD)
        return lambda x: np.abs(255 * (x.mean(dim=(1, 2)).numpy() * std + mean) - colour).max() < 25
    orange, grey = Image.new('RGB', (40, 30), (200, 90, 30)), near(115, 115, 115)
    for suffix, modes in {'.jpg': 'RGB L CMYK', '.png': 'RGB L LA RGBA P', '.ppm': 'RGB', '.bmp': 'RGB L P',
                          '.tif': 'RGB L RGBA CMYK P', '.webp': 'RGB RGBA'}.items():
        for mode in modes.split():
            expected = grey if mode[0] == 'L' else near(200, 90, 30)
            yield case(mode, suffix, encoded(orange.convert(mode), suffix), expected)
    for suffix, fraction in product(('.jpg', '.png', '.ppm', '.bmp', '.webp'), (0.01, 0.1, 0.3, 0.5, 0.7, 0.9)):
        content = encoded(noise('cut', 64), suffix)
        yield case(f'truncated at {fraction}', suffix, content[:int(fraction * len(content))], [f'unusual{suffix}'])
    for content in (b'', b'hello', b'<html>404</html>', bytes(5000), encoded(orange, '.gif'), b'%PDF-1.4\n',
                    b'%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\nshowpage\n'):
        yield case(f'with the content {content[:20]}', '.jpg', content, ['unusual.jpg'])
    for size in ((1, 1), (3, 2), (40, 1), (7, 200), (1, 500), (16_000, 20)):
        yield case(f'of size {size}', '.png', encoded(Image.new('RGB', size), '.png'), near(0, 0, 0))
    for suffix, seed in product(('.jpg', '.png', '.tif'), range(20)):
        content = np.frombuffer(encoded(noise('flip', 48), suffix), np.uint8).copy()
        places = np.random.default_rng(seed).integers(300 if seed % 2 else len(content), size=3)   # 300: the header
        content[places] ^= 1 << seed % 8
        yield case(f'with bits flipped, {seed}', suffix, content.tobytes(), None)


def folders():
    """Unusual files and links next to four normal classes, and unusual names. For the usual ones see
    test_datasets.py"""
    def prepare(make, *rest):
        make_classes('a', 'b', 'c', 'd')
        make(*rest)

    def found():
        """Class names of the training set and of the test set, and warnings"""
        with contextlib.redirect_stderr(io.StringIO()) as warnings:
            data = load()
        return data.train.classes, data.query.classes, warnings.getvalue()
    ignored = [(make_classes, name) for name in ('.ipynb_checkpoints', '.Trash', '.git/objects', 'a/.thumbnails')]
    strange = [(os.symlink, target, 'x/a/up') for target in ('.', '..', '../x', '../../')]
    strange += [(os.mkfifo, 'x/a/p.jpg'), (os.mkdir, 'x/a/f.jpg'), (os.symlink, 'gone', 'x/a/l.jpg')]
    for make in strange:
        yield f'{make[0].__name__} {make[1:]}', partial(prepare, *make), found, None
    for make in ignored:
        yield f'{make[0].__name__} {make[1:]}', partial(prepare, *make), found, (['a', 'b'], ['c', 'd'], '')
    for name in ('Vögel', 'a b', 'a[1]*', "it's", '鳥', 'a\nb', '-x', 'train2', '{x}', '%s', '~'):
        among = lambda result, name=name: name in result[0] + result[1]  # noqa: E731
        yield f'class {name!r}', partial(make_classes, name, 'zz/b', 'zz/c', 'zz/d'), found, among


BENCHMARKS = dict(                  # folder of the images; files, and their text with | between two; images and classes
    cub=('d/CUB_200_2011/images', ['d/CUB_200_2011/images.txt'],
         '1 001.A/1.jpg\n2 001.A/2.jpg\n3 002.B/3.jpg\n4 101.C/4.jpg\n5 101.C/5.jpg\n6 102.D/6.jpg\n',
         dict(train=(3, 2), query=(3, 2))),
    sop=('d/Stanford_Online_Products', [f'd/Stanford_Online_Products/Ebay_{side}.txt' for side in ('train', 'test')],
         'image_id class_id super_class_id path\n1 1 1 b/1.JPG\n2 1 1 b/2.JPG\n3 2 1 b/3.JPG\n'
         '|image_id class_id super_class_id path\n4 3 1 b/4.JPG\n5 3 1 b/5.JPG\n6 4 1 b/6.JPG\n',
         dict(train=(3, 2), query=(3, 2))),
    inshop=('d/Img', ['d/Eval/list_eval_partition.txt'],
            '7\nimage_name item_id evaluation_status\nimg/1.jpg id_1 train\nimg/2.jpg id_1 train\nimg/3.jpg id_2 '
            'train\nimg/4.jpg id_3 query\nimg/5.jpg id_3 gallery\nimg/6.jpg id_4 query\nimg/7.jpg id_4 gallery\n',
            dict(train=(3, 2), query=(2, 2), gallery=(2, 2))))
HARMLESS = {'nothing': ('', '', ''), 'crlf': ('\n', '\r\n', ''), 'blank lines': (r'(?<=\d\n)|\Z', ' \n\n', '')}
HARMFUL = {                         # a regular expression, its replacement in the text, and words of the message
    'empty': ('(?s).', '', ''), 'html': (r'(?s)\A.*\Z', '<html><body>404</body></html>', ''),
    'zeros': ('(?s).', '\0', ''), 'start': (r'(?s)(?<=\A.{40}).*', '', ''),
    '5 bytes less': (r'(?s).{5}\Z', '', ''), '12 bytes less': (r'(?s).{12}\Z', '', ''), 'latin-1': (r'2\.', 'é.', ''),
    'missing image': (r'3\.', '9.', '9. images are missing'), 'spaces': (r'3\.', '3 .', ''),
    'listed twice': (r'2\.(?=j|J)', '1.', '1. images are listed twice'), 'listed on both sides': (r'5\.', '1.', ''),
    'absolute': (r'\S+/3\.', '/tmp/3.', ''),
    'not a number': (r'101(?=\.)|(?<= )3(?= 1)|query', 'x', ''), 'columns gone': (r' \S+\n', '\n', ''),
    'more columns': ('\n', ' 7 7\n', ''), 'header gone': (r'\A.*\n', '', '')}


def annotations():
    """A small version of each benchmark, with corrupted annotations"""
    def prepare(name, pattern, replacement):
        base, files, text, _ = BENCHMARKS[name]
        for path in re.findall(r'\S+/\d\.\w+', text):
            write(Path(base, path), encoded(noise(path), '.jpg'))
        for file, part in zip(files, re.sub(pattern, replacement, text).split('|') * 2):
            write(file, part.encode('latin-1'))

    def listed(name):
        with mock.patch.dict(common.DATASETS[name], counts=BENCHMARKS[name][-1]):
            return len(common.load_dataset(name, 'd').train)
    for name, (corruption, (*change, said)) in product(BENCHMARKS, (HARMLESS | HARMFUL).items()):
        if (name, corruption) != ('cub', 'spaces'):  # a space would change the id, which is not the class
            expected = 3 if corruption in HARMLESS else [f'{name} cannot be loaded', *said.split('. ')]
            yield f'{name}, {corruption}', partial(prepare, name, *change), partial(listed, name), expected


def checkpoints():
    """A corrupted checkpoint is rejected with its name, and is not changed."""
    file, conv, deleted, intact = Path('runs/r/last.pt'), 'trunk.conv1.weight', 'deleted', {}

    def prepare(change, *rest):
        if not intact:                              # the same run for all cases
            make_classes('a', 'b', 'c', 'd')
            train_ms.main([*SMALL, '--name', 'r', '--epochs', '1'])
            intact.update({path: path.read_bytes() for path in Path().rglob('*') if path.is_file()})
        for path, content in intact.items():
            write(path, content)
        change(*rest)

    def edit(value, *keys):
        saved = inner = torch.load(file, weights_only=True)
        for key in keys[:-1]:
            inner = inner[key]
        inner[keys[-1]] = value
        if value is deleted:
            del inner[keys[-1]]
        torch.save(saved, file)

    def flip(at):
        content = bytearray(file.read_bytes())
        weights = torch.load(file, weights_only=True)['model']['linear.weight'].numpy().tobytes()
        content[content.index(weights) + at] ^= 1
        file.write_bytes(content)

    def truncate(fraction):
        file.write_bytes(file.read_bytes()[:int(fraction * file.stat().st_size)])
    uses = dict(                            # the call, required keys, keys whose type is checked, other values
        resume=(partial(train_ms.main, ['--resume', 'runs/r', '--device', 'cpu']),
                'optimizer loss_params', 'model optimizer loss_params', [(9, 'args', 'dim')]),
        load=(partial(common.load_checkpoint, 'runs/r'), 'transform', 'model transform',
              [({}, 'transform', 'resize')]))
    for use, (call, needed, typed, others) in uses.items():
        edits = [(deleted, key) for key in f'model args embedder script {needed}'.split()]
        edits += [*product((None, 'x', [1], 3.5), typed.split()), *others, (torch.ones(1), 'model', 'one too many')]
        edits += [(value, 'model', conv) for value in (torch.ones(1), 'x', None, deleted)]
        changes = [(edit, *arguments) for arguments in edits] + [(torch.save, [1, 2], file)]
        changes += [(flip, at) for at in (0, 100, 3000, 8000)]
        changes += [(truncate, fraction) for fraction in (0, 0.1, 0.5, 0.9, 0.999)]
        for change in changes:
            yield f'{use}: {change[0].__name__} {change[1:]}', partial(prepare, *change), call, ['runs/r']


def faults():
    """Processes that are killed, or cannot print, lose no epoch and print no traceback."""
    run = partial(subprocess.run, text=True, capture_output=True)
    command = [sys.executable, train_ms.__file__]
    small, uninterrupted = [*command, *SMALL, '--epochs', '6', '--name'], []

    def records(name):
        """The log, without times, which differ between runs"""
        log = [json.loads(line) for line in open(f'runs/{name}/log.jsonl')]
        return [{k: record[k] for k in record if k not in ('minutes', 'images_per_second')} for record in log]

    def stopped(number, seconds):
        """A run killed `seconds` after its first checkpoint, and resumed, has the log of an uninterrupted run."""
        if not uninterrupted:                       # the images are the same in all cases
            run([*small, 'full'], check=True)
            uninterrupted.extend(records('full'))
        process = subprocess.Popen([*small, 'killed'], text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        while not Path('runs/killed/last.pt').exists() and process.poll() is None:
            time.sleep(0.01)
        time.sleep(seconds)
        process.send_signal(number)
        output = process.communicate()[0]
        if process.returncode:
            output += run([*command, '--resume', 'runs/killed', '--device', 'cpu'], check=True).stderr
        assert 'Traceback' not in output and not list(Path('runs/killed').glob('*.tmp')), output
        return uninterrupted == records('killed')

    def at_the_shell(suffix, **variables):
        """The log has as many records as the checkpoint, or neither exists."""
        done = run(' '.join([*small, 'r', '--epochs', '3', suffix]), shell=True, env=os.environ | variables)
        assert 'Traceback' not in done.stderr and 'Exception ignored' not in done.stderr, done.stderr
        log, file = Path('runs/r/log.jsonl'), Path('runs/r/last.pt')
        return log.exists() == file.exists() and (
            not log.exists() or len(records('r')) == len(torch.load(file, weights_only=True)['rows']) > 0)
    calls = {f'{number.name} after {i / 25} s': partial(stopped, number, i / 25)
             for i, number in product(range(10), (signal.SIGKILL, signal.SIGINT))}
    calls |= {suffix: partial(at_the_shell, suffix) for suffix in (
        '> /dev/full', '| head -1', '| head -3', '| head -6', '| head -7', '| head -8')}
    calls['ASCII terminal'] = partial(at_the_shell, '', PYTHONIOENCODING='ascii', LC_ALL='C')
    for what, call in calls.items():
        yield what, partial(make_classes, 'a', 'b', 'c', 'd'), call, True


def retrieval():
    """Small retrieval problems, many with ties, against brute force"""
    def error(seed, gallery, equal):
        """The largest error of a metric. With `equal`, vectors are along the axes: many similarities are equal."""
        rng = np.random.default_rng(seed)
        n, g, dim = int(rng.integers(2, 14)), int(rng.integers(1, 14)), int(rng.integers(1, 5))

        def embeddings(m):
            z = rng.normal(size=(m, dim))
            if equal:
                z = np.eye(dim)[rng.integers(dim, size=m)] * rng.choice([-1, 1], size=(m, 1))
            return torch.tensor(z), torch.tensor(rng.integers(0, 4, m))
        q, qy = x, xy = embeddings(n)
        if gallery:
            x, xy = embeddings(g)
        ours = common.retrieval_metrics(q.float(), qy, *((x.float(), xy) if gallery else ()))
        s = torch.cosine_similarity(q[:, None], x, dim=2).numpy().round(12)
        # Ties rank non-matches first.
        ranked = [sorted((-s[i, j], bool(qy[i] == xy[j])) for j in range(len(x)) if gallery or j != i)
                  for i in range(n)]
        hits = [np.array([match for _, match in ranking]) for ranking in ranked]
        # Ties across the search depth are broken by a permutation, so the metrics may be higher, see the docstring.
        depth = max(8, *(hit.sum() for hit in hits))
        ties = any(len(ranking) > depth and ranking[depth - 1][0] == ranking[depth][0] for ranking in ranked)
        expected = {f'R@{k}': [hit[:k].any() for hit in hits] for k in (1, 2, 4, 8)}
        matched = [(hit, hit.sum()) for hit in hits if hit.any()]
        expected['RP'] = [hit[:r].mean() for hit, r in matched]
        expected['MAP@R'] = [(np.cumsum(hit) / np.arange(1, len(hit) + 1) * hit)[:r].mean() for hit, r in matched]
        errors = [ours[name] - 100 * np.mean(each or [0]) for name, each in expected.items()]
        return max(-min(errors), 0 if ties else max(errors))
    for case in product(range(160), (False, True), (False, True)):
        yield f'seed, gallery, equal {case}', list, partial(error, *case), lambda error: error < 1e-3


GROUPS = {group.__name__: group for group in (images, folders, annotations, checkpoints, faults, retrieval)}


def attempt(prepare, call, expected):
    """Runs a case in an empty folder -> None, or one line on what is wrong"""
    def late(*_):
        raise SystemExit('hangs')               # other exceptions may be turned into UsageError

    def files():
        found = [path for path in Path().rglob('*') if path.is_file()]
        return {path: path.stat().st_mtime_ns for path in found}
    silent = io.StringIO()
    signal.signal(signal.SIGALRM, late)
    signal.alarm(240)
    with (tempfile.TemporaryDirectory() as empty, pytest.MonkeyPatch.context() as patch,
          contextlib.redirect_stdout(silent), contextlib.redirect_stderr(silent)):
        patch.chdir(empty)
        try:
            prepare()
            before = files()
            try:
                result = call()
                assert expected(result) if callable(expected) else expected in (None, result), f'returned {result}'
            except common.UsageError as error:
                assert expected is None or isinstance(expected, list), f'rejected: {error}'
                assert all(word in str(error) for word in expected or []), f'unexpected message: {error}'
                assert '\n' not in str(error), f'more than one line: {error}'
                assert files() == before, f'rejected, but files are new or changed: {error}'
        except (Exception, SystemExit) as error:
            return ' '.join(f'{type(error).__name__}: {error}'.split())[:150]
        finally:
            signal.alarm(0)


if __name__ == '__main__':
    torch.set_num_threads(1)
    if not {*sys.argv[1:]} <= GROUPS.keys():
        sys.exit(f'{__doc__}\nGroups: {", ".join(GROUPS)}')
    for group in sys.argv[1:] or GROUPS:
        cases = list(GROUPS[group]())
        wrong = {what: reason for what, *case in cases if (reason := attempt(*case))}
        for what, reason in wrong.items():
            print(f'    {group}, {what}: {reason}')
        print(f'{group}: {len(cases)} cases, {len(wrong)} wrong', flush=True)
