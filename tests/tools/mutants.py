"""Mutation tests: makes the changes of mutants.txt one by one, each of which a test must notice. Not run by pytest.

    python tests/tools/mutants.py                     # all of them
    python tests/tools/mutants.py train_hse frozen    # those whose file or entry has one of these words

The list has a detached gradient, a function or flag replaced by another, a value of a recipe. A heading names a file
and the test files that are likely to detect its mutants. A line `old ==> new ## why` is a mutant. `old` occurs once in
the file, and should be short, so that renames seldom break it. Each change is made in a copy of the project, and the
tests run there until one fails: first those of the heading, then the others. If none fails, the mutant survives.

After a change of the code, the list need not be updated at once: an entry whose `old` is no longer in its file is
reported, and the others are run. Then correct it or delete it. The exit code is 1 if a mutant survives or does not fit.
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
SECONDS = 600                                               # a mutant may loop forever
READERS = ['project', 'equations', 'handout', 'results']    # they read the source text, and would fail for any change


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
    """Why a mutant cannot be made, or None"""
    text = (ROOT / file).read_text()
    if text.count(old) != 1 or old == new:
        return f'it occurs {text.count(old)} times in the file'
    if unknown := [name for name in first if name not in test_files()]:
        return f'there is no test_{unknown[0]}.py'
    with suppress(SyntaxError):
        ast.parse(text.replace(old, new))
        return None
    return 'the result is not valid Python'


def test_files():
    """{name: path within the project} of tests/*/test_NAME.py"""
    return {path.stem.removeprefix('test_'): str(path.relative_to(ROOT)) for path in ROOT.glob('tests/**/test_*.py')}


def start(folder, file, first, old, new):
    """Starts a process that runs the tests in a copy with this change, and writes to folder/output -> its id"""
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
    """Prints which test failed, and returns whether none did."""
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)                      # processes that failed tests left running
    failed = [line for line in (folder / 'output').read_text().splitlines() if line.startswith(('FAILED', 'ERROR'))]
    verdict = failed[0].split(' - ')[0] if failed else 'it did not end' if status else 'SURVIVES'
    print(f'{file}: {why}: {verdict}', flush=True)
    return not status


def main(words):
    """Runs the mutants that have one of the words -> how many survive or do not fit"""
    os.environ['OMP_NUM_THREADS'] = '1'
    for name in ('scipy.io', 'scipy.stats', 'torchvision.transforms.v2'):
        import_module(name)                                 # only once, since it takes seconds
    wanted = [entry for entry in read() if not words or any(word in ' '.join([entry[0], *entry[2:]]) for word in words)]
    waiting, running, alive = [], {}, []
    for entry in wanted:
        if reason := misfit(*entry[:-1]):
            print(f'{entry[0]}: {entry[-1]}: DOES NOT FIT: {reason}: {entry[2]}', flush=True)
        else:
            waiting.append(entry)
    tried = len(waiting)
    misfits = len(wanted) - tried
    while waiting or running:
        if waiting and len(running) < os.cpu_count():
            entry, folder = waiting.pop(0), TemporaryDirectory()
            running[start(Path(folder.name), *entry[:-1])] = entry, folder
        else:
            try:
                pid, status = os.wait()
            except KeyboardInterrupt:                       # only this process gets it
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
