"""Grades submissions by tests and by the hidden comparison of compare.py, each in a separate process."""
import ast
import csv
import io
import json
import multiprocessing
import os
import random
import re
import signal
import sys
import tempfile
import threading
import time
import tokenize
import types
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from typing import NamedTuple

import compare
import sandbox
from exercises import EXERCISES
from making import LIMIT, LIMIT_OF_A_TEST, functions_of, handout, lines_of, solutions_in, source, with_imports, write

# ---- processes

STARTING = threading.Lock()


def sent(what, files, limit, *arguments):
    """Yields the messages of a function of sandbox.py in a separate process, in a new folder with these files. Then
    kills the process and its children."""
    # On Linux, processes are forked from one that has imported torch, which takes a tenth of the time.
    context = multiprocessing.get_context('forkserver' if sys.platform == 'linux' else 'spawn')
    context.set_forkserver_preload(['pytest', 'torch', 'torchvision.transforms.v2'])
    with tempfile.TemporaryDirectory() as folder:
        write(folder, files)
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=what, args=(folder, sender, *arguments), daemon=True)
        start(process)
        sender.close()
        end = time.monotonic() + limit
        try:
            while receiver.poll(max(0, end - time.monotonic())):
                yield receiver.recv_bytes()
            raise TimeoutError(f'no end after {limit} seconds')
        except EOFError:
            raise ChildProcessError('the process ended early') from None
        finally:
            with suppress(OSError):                 # it ended by itself
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
            process.join()


def start(process):
    """Starts a process without __main__ of this one, so that it does not import modules that have the solutions."""
    with STARTING:
        main, sys.modules['__main__'] = sys.modules['__main__'], types.ModuleType('__main__')
        try:
            process.start()
        finally:
            sys.modules['__main__'] = main


def results(exercise, files, script, *options):
    """({test: '' or error}, why there are no more tests), where `script` is the text of the exercise's script"""
    arguments = [exercise.tests, '-k', exercise.graded, *options]
    messages = sent(sandbox.run_tests, files | {exercise.script: script}, LIMIT, arguments, LIMIT_OF_A_TEST)
    tests = {}
    with closing(messages):
        try:
            for message in messages:
                test, reason = json.loads(message)
                if test is None:
                    return tests, '' if tests else reason
                tests[test] = reason
        except (TimeoutError, ChildProcessError) as error:
            return tests, str(error)


def answers(files, script, calls):
    """Answers of a script to packed calls: (plain values, arrays) for each, or (error, [])"""
    messages = sent(sandbox.answer, files, 3 * LIMIT, script, calls)    # inputs may be large
    found = []
    with closing(messages):
        try:
            for message in messages:
                found.append(sandbox.unpack(message))
                if len(found) == len(calls):
                    return found
        except (TimeoutError, ChildProcessError) as error:
            # The first answer may be an error of the import.
            why = found[0] if found and isinstance(found[0][0], str) else (str(error), [])
            return found + [why] * (len(calls) - len(found))


class Comparison:
    """The random calls of an exercise for a seed, and the answers of the original"""

    def __init__(self, name, seed):
        self.exercise = EXERCISES[name]
        self.files = with_imports([self.exercise.script], source)
        calls = compare.random_calls(self.exercise.sample, seed)
        packed = [[compare.packed(*call), compare.packed(*call, exact=True),
                   *(compare.packed(*call, *move) for move in compare.moves(number))]
                  for number, call in enumerate(calls)]
        found = iter(answers(self.files, self.exercise.script, sum(packed, [])))
        self.calls = []
        for call, variants in zip(calls, packed):
            answer, *moved = [next(found) for _ in variants]
            kind = compare.precision(call[1])
            if isinstance(answer[0], str):
                raise ValueError(f'the project itself fails: {compare.described(*call[:2])}: {answer[0]}')
            if not any(self.differ(answer, (answer[0], arrays), kind, 0.3) for _, arrays in moved):
                self.calls.append((compare.described(*call[:2]), kind, variants[0], answer))
        self.left_out = len(calls) - len(self.calls)

    def differ(self, expected, got, kind, factor=1.0):
        return compare.differ(expected, got, kind, self.exercise.view, factor)

    def of(self, files, script):
        """The differences of a script from the original, a text for each input. `files` are the other files."""
        files = {path: text for path, text in files.items() if not path.startswith('tests/')}
        files = files | {self.exercise.script: script}
        found = answers(files, self.exercise.script, [bytes_ for _, _, bytes_, _ in self.calls])
        differences = []
        for (what, kind, _, answer), got in zip(self.calls, found):
            if difference := self.differ(answer, got, kind):
                differences.append(f'{what}: {difference}')
        return differences


# ---- submissions

# A formula needs none of these names. With them, a script can inspect its caller, or other files.
LOOKS_AROUND = {'modules', 'gc', 'inspect', '_getframe', 'currentframe', 'f_back', 'f_globals', 'f_locals', '__code__',
                '__globals__', '__closure__', '__subclasses__', '__dict__', 'globals', 'vars', 'ROOT', 'ctypes',
                'importlib', '__import__', 'exec', 'eval', 'compile', 'open', 'read_text', 'read_bytes', 'rglob',
                'environ', 'argv', 'getcwd', 'parents', 'subprocess', 'system', 'popen', 'multiprocessing', 'pytest',
                '_pytest', 'unittest', 'mock', 'marshal', 'pickle', 'atexit', 'settrace', 'setprofile', 'worked',
                'conftest'}
ABSOLUTE = re.compile(r'(/|~|[A-Za-z]:[/\\])\w')


class Script(NamedTuple):
    text: str           # with the original functions of other exercises
    why: str = ''       # why it cannot be graded
    notes: list = []    # remarks for the lecturer, which do not change the points


def names_in(tree):
    """How often a script uses each name: variables, attributes, imported modules, and absolute paths in strings"""
    used = Counter()
    for node in ast.walk(tree):
        used.update(getattr(node, field, '') for field in ('id', 'attr'))
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            dotted = [getattr(node, 'module', None) or '', *(alias.name for alias in node.names)]
            used.update(part for name in dotted for part in name.split('.'))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and ABSOLUTE.match(node.value):
            used[node.value] += 1
    return used


def definitions(tree):
    """{name: its top-level definition, as a dump of the ast without docstrings}"""
    found = {}
    for node in tree.body:
        for part in ast.walk(node):
            if isinstance(part, (ast.FunctionDef, ast.ClassDef)) and ast.get_docstring(part) is not None:
                part.body = part.body[1:]
        for target in getattr(node, 'targets', [node]):
            name = getattr(target, 'id', getattr(target, 'name', None))
            found |= {name: ast.dump(node)} if name else {}
    return found


def put_back(text, path, names):
    """A script with the original functions of these names"""
    lines = lines_of(text)
    original = lines_of(source(path))
    ours = {node.name: node for node in functions_of(source(path), names)}
    for node in reversed(functions_of(text, names)):
        lines[first_line(node):node.end_lineno] = original[first_line(ours[node.name]):ours[node.name].end_lineno]
    return ''.join(lines)


def first_line(node):
    return min(part.lineno for part in [node, *node.decorator_list]) - 1


def read(exercise, data):
    """A submission, given as bytes, as a Script"""
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
        text = io.TextIOWrapper(io.BytesIO(data), encoding).read()
        tree = ast.parse(text)
    except SyntaxError as error:
        return Script('', f'SyntaxError in line {error.lineno}: {error.msg}' if error.lineno else f'{error}')
    except (ValueError, RecursionError, MemoryError) as error:
        return Script('', f'this is not Python source: {error}')
    function, *_ = exercise.stubbed.split()
    if not functions_of(text, [function]):
        return Script('', f'submit the whole script: {function} is not in this file')
    original = ast.parse(source(exercise.script))
    others = solutions_in(exercise.script, EXERCISES) - {*exercise.stubbed.split()}
    around = {name for name in names_in(tree) - names_in(original) if name in LOOKS_AROUND or ABSOLUTE.match(name)}
    ours, theirs = definitions(original), definitions(tree)
    changed = [name for name in ours if name not in others and name not in exercise.stubbed.split()
               and ours[name] != theirs.get(name)]
    notes = [f'look at {", ".join(sorted(around))}'] if around else []
    notes += [f'also changed: {", ".join(changed)}'] if changed else []
    return Script(put_back(text, exercise.script, others), '', notes)


def scripts_in(paths, script):
    """-> files to grade, and .py files that are not graded. In a folder, the scripts with this name at any depth are
    graded, or else its .py files."""
    graded, others = [], []
    for path in map(Path, paths):
        found = sorted(path.rglob('*.py')) if path.is_dir() else [path]
        chosen = [file for file in found if file.name == script] if path.is_dir() else found
        chosen = chosen or [file for file in found if file.parent == path]
        graded += chosen
        others += [file for file in found if file not in chosen]
        if not chosen:
            print(f'{path.name}: there is no .py file in this folder' + ' itself' * bool(found))
    return graded, others


# ---- points

COMPARISON = 'comparison'
WORKED = re.compile(r'_by_hand|_closed_form_gradient')


def equation_of(test, name):
    """The equation of a test, from its name; the name of the exercise if there is none"""
    return (re.match(r'test_([a-z]+_eq\d+)_', test) or ['', name])[1]


def points_of(tests, right, name):
    """({equation: points}, {equation: maximum}) for all graded tests and those that passed. If an equation has worked
    examples and none of them passed, its other tests count half, rounded down."""
    worked = {equation_of(test, name) for test in tests if WORKED.search(test)}
    known = {equation_of(test, name) for test in right if WORKED.search(test)}
    points = dict.fromkeys((equation_of(test, name) for test in tests), 0)
    for equation in points:
        passed = [test for test in right if equation_of(test, name) == equation]
        examples = sum(1 for test in passed if WORKED.search(test))
        points[equation] = examples + (len(passed) - examples) // (1 if known == worked else 2)
    return points, Counter(equation_of(test, name) for test in tests)


class Grade(NamedTuple):
    points: dict        # {equation, or the comparison: points}
    of: dict            # the same: maximum
    failed: dict        # {test: error}
    differences: list   # of the comparison
    why: str            # why it could not be graded, or not completely
    notes: list

    def line(self):
        parts = [f'{part} {self.points[part]}/{of}' for part, of in self.of.items()]
        parts.append(f'in all {sum(self.points.values())}/{sum(self.of.values())}')
        remarks = '; '.join(filter(None, [self.why, *self.notes]))
        return ', '.join(parts) + (remarks and f' ({remarks})')


class Grader:
    """Grades submissions of an exercise. All have the same random inputs of the comparison."""

    def __init__(self, name, seed):
        self.name, self.exercise, self.seed = name, EXERCISES[name], seed
        self.files = handout([name], keep=True)
        self.every, why = results(self.exercise, self.files, source(self.exercise.script))
        if why or any(self.every.values()):
            raise SystemExit(f'error: the project itself fails: {why or next(filter(None, self.every.values()))}')
        self.comparison = Comparison(name, seed)

    def grade(self, script):
        """A Script -> its Grade"""
        tests, why, differences = {}, script.why, []
        if not why:
            tests, why = results(self.exercise, self.files, script.text)
            differences = self.comparison.of(self.files, script.text) if tests else []
        failed = {test: tests.get(test, '' if why else 'not run') for test in self.every if tests.get(test, 'no')}
        functions = list(dict.fromkeys(test.split('[')[0] for test in self.every))
        right = [function for function in functions if not any(test.split('[')[0] == function for test in failed)]
        points, of = points_of(functions, right, self.name)
        points[COMPARISON], of[COMPARISON] = int(bool(tests) and not differences), 1
        if not right and not why:                   # one error may be the cause of all
            why = Counter(reason.strip().splitlines()[-1] for reason in failed.values()).most_common(1)[0][0]
        return Grade(points, of, failed, differences, why, script.notes)

    def feedback(self, grade):
        """The feedback for a student: name and equation of each failed test, and the expected value"""
        parts = [f'{self.name}: {sum(grade.points.values())} of {sum(grade.of.values())} points']
        parts += filter(None, [grade.why, *(note for note in grade.notes if note.startswith('also changed'))])
        for test, reason in grade.failed.items():
            if reason:
                parts.append(f'{test}  ({equation_of(test, self.name)})\n    ' + reason.strip().replace('\n', '\n    '))
        if grade.differences:
            count = f'{len(grade.differences)} of {len(self.comparison.calls)}'
            parts.append(f'{count} random inputs have another value or gradient than the original. The first:\n    '
                         + grade.differences[0].replace(': ', '\n    '))
        return '\n\n'.join(parts) + '\n'


def grade(name, paths, table=None, feedback=None, seed=None):
    """Prints the points of each file, and writes a table and feedback"""
    seed = random.randrange(10 ** 6) if seed is None else seed
    graded, others = scripts_in(paths, EXERCISES[name].script)
    top = os.path.commonpath([os.path.abspath(path if path.is_dir() else path.parent) for path in map(Path, paths)])
    if others:
        print(f'not graded: {", ".join(os.path.relpath(path, top) for path in others)}')
    if not graded:
        return
    print(f'seed {seed} of the random inputs')
    names = [Path(os.path.relpath(path, top)) for path in graded]
    grader = Grader(name, seed)
    rows = []
    scripts = [read(grader.exercise, path.read_bytes()) for path in graded]         # ast is not safe in two threads
    with ThreadPoolExecutor(2) as pool:
        for path, one in zip(names, pool.map(grader.grade, scripts)):
            print(f'{path}: {one.line()}', flush=True)
            remarks = '; '.join(filter(None, [one.why, *one.notes]))
            rows += [[path, name, part, one.points[part], of, seed, remarks] for part, of in one.of.items()]
            if feedback:
                Path(feedback).mkdir(parents=True, exist_ok=True)
                text = Path(feedback) / ('-'.join(path.with_suffix('').parts) + '.txt')
                text.write_text(grader.feedback(one))
    if table:
        with open(table, 'w', newline='') as file:
            header = ['file', 'exercise', 'equation', 'points', 'of', 'seed', 'remarks']
            csv.writer(file).writerows([header, *rows])
