"""Mistakes that no tool makes from the syntax tree, and that a test must notice. By hand, not by pytest.

    python tests/tools/mutants.py                     # all of them
    python tests/tools/mutants.py train_hse warm-up   # those whose file, or line in the list, has one of these words

mutation.py, beside this file, changes operators, numbers and arguments wherever they stand. The list, mutants.txt, has
what is left: a gradient detached, a function or a flag replaced by another, a value of a recipe. A heading names a
file, and the test files that are likely to notice its mistakes. A line `old ==> new ## why` is a mistake; `old` stands
once in the file, and should quote little, so that renames seldom break it. Each mistake is made in a copy of the
project, and the tests run there until one fails: first those that the heading names, then the others. Where none fails,
the mutant survives: that line could be wrong without anybody noticing.

Whoever changes a line need not change the list. An entry whose `old` no longer stands in its file is named, and the
others are tried; mend it, or take it out, when you pass by. The exit code is 1 where one survives or does not fit.
"""
import ast
import faulthandler
import os
import shutil
import signal
import sys
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

ROOT = Path(__file__).parents[2]
SECONDS = 600                                               # a mistake may lead into a loop without an end
READERS = ['project', 'equations', 'handout', 'results']    # of the text: they would notice for the wrong reason


def read():
    """Yields (file, names of test files, old, new, why)"""
    for line in Path(__file__).with_name('mutants.txt').read_text().splitlines():
        if line.startswith('## '):
            file, first = line.removeprefix('## ').split(': ')
        else:
            change, why = line.split(' ## ')
            old, new = change.split(' ==>')
            yield file, first.split(), old, new.removeprefix(' '), why


def misfit(file, first, old, new):
    """Why an entry cannot be made, or None"""
    text = (ROOT / file).read_text()
    if text.count(old) != 1 or old == new:
        return f'it stands {text.count(old)} times in the file'
    if unknown := [name for name in first if name not in test_files()]:
        return f'there is no test_{unknown[0]}.py'
    with suppress(SyntaxError):
        ast.parse(text.replace(old, new))
        return None
    return 'what it becomes is no Python'


def test_files():
    """{name: path below the project} of tests/*/test_NAME.py"""
    return {path.stem.removeprefix('test_'): str(path.relative_to(ROOT)) for path in ROOT.glob('tests/**/test_*.py')}


def start(folder, file, first, old, new):
    """Starts a process that runs the tests in a copy with this mistake, and writes to folder/output -> its number"""
    if pid := os.fork():
        return pid
    os.setpgid(0, 0)
    copy = shutil.copytree(ROOT, folder / 'copy', ignore=shutil.ignore_patterns('.*', 'runs', 'cache', 'data'))
    (copy / file).write_text((copy / file).read_text().replace(old, new))
    os.chdir(copy)
    with open(folder / 'output', 'w') as sys.stdout:
        os.dup2(sys.stdout.fileno(), 1)
        os.dup2(sys.stdout.fileno(), 2)
        faulthandler.dump_traceback_later(SECONDS, exit=True)
        paths = test_files()
        others = sorted(paths.keys() - {*first, *READERS})
        options = '-xq --tb=no -p no:cacheprovider -p no:faulthandler --basetemp'.split() + [str(folder / 'pytest')]
        for names, quick in ((first, ['-m', 'not slow']), (first, ['-m', 'slow']), (others, [])):
            status = pytest.main(options + quick + [paths[name] for name in names])
            if status not in (0, pytest.ExitCode.NO_TESTS_COLLECTED):
                break
        else:
            status = 0
    os._exit(status)


def judge(pid, status, folder, file, why):
    """Prints which test noticed, and returns whether none did."""
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)                      # what tests that failed left running
    failed = [line for line in (folder / 'output').read_text().splitlines() if line.startswith(('FAILED', 'ERROR'))]
    verdict = failed[0].split(' - ')[0] if failed else 'it did not end' if status else 'SURVIVES'
    print(f'{file}: {why}: {verdict}', flush=True)
    return not status


def main(words):
    """Tries the mutants that have one of the words -> how many survive or do not fit"""
    os.environ['OMP_NUM_THREADS'] = '1'
    for name in ('faiss', 'scipy.io', 'scipy.stats', 'torchvision.transforms.v2'):
        import_module(name)                                 # once, because it takes seconds
    wanted = [row for row in read() if not words or any(word in ' '.join([row[0], *row[2:]]) for word in words)]
    waiting, running, alive = [], {}, []
    for row in wanted:
        if reason := misfit(*row[:-1]):
            print(f'{row[0]}: {row[-1]}: DOES NOT FIT: {reason}: {row[2]}', flush=True)
        else:
            waiting.append(row)
    tried = len(waiting)
    misfits = len(wanted) - tried
    while waiting or running:
        if waiting and len(running) < os.cpu_count():
            row, folder = waiting.pop(0), TemporaryDirectory()
            running[start(Path(folder.name), *row[:-1])] = row, folder
        else:
            try:
                pid, status = os.wait()
            except KeyboardInterrupt:                       # it reaches this process only
                for pid in running:
                    os.killpg(pid, signal.SIGKILL)
                sys.exit(130)
            (file, _, old, new, why), folder = running.pop(pid)
            if judge(pid, status, Path(folder.name), file, why):
                alive.append(f'    {file}: {why}\n        {old} ==> {new}')
            folder.cleanup()
    print(f'{len(alive)} of {tried} mutants survive; {misfits} of {len(wanted)} do not fit', *alive, sep='\n')
    return len(alive) + misfits


if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]) > 0)
