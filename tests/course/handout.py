"""Makes starter code for the exercises of the course, and grades submissions by the project's own tests.

    python tests/course/handout.py list                 the exercises: week, level, minutes, equations
    python tests/course/handout.py make OUT NAME...     writes the folder OUT for students: these functions are stubbed
                                                        out, and those of the same week and of later weeks
        --keep                                          other exercises keep their solutions
        --flawed SEED                                   instead, each script has a mistake, for students to find
    python tests/course/handout.py grade NAME FILE...   prints the points of each script by equation. In a folder,
                                                        scripts with the name of the exercise's script are graded, and
                                                        its own .py files
        --csv grades.csv                                writes file, equation, points, of, remark
        --feedback DIR                                  writes a text for each script: which tests failed, and why
    python tests/course/handout.py check [NAME...]      grades the original, solutions that are written differently, and
                                                        the mistakes of mistakes.py: each mistake must lose a point

Students submit the whole script. `grade` takes it with the original functions of all other exercises, and runs the
graded tests in a process of its own. It executes submissions: run it where they can do no harm.
"""
import argparse
import ast
import csv
import io
import multiprocessing
import os
import re
import sys
import tempfile
from argparse import ArgumentError
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stdout
from functools import lru_cache
from pathlib import Path
from xml.etree import ElementTree

from exercises import EXERCISES, ROOT

LIMIT = 120                                                 # seconds for the tests of one submission

# ---- starter code

parsed = lru_cache(ast.parse)


def source(path):
    """The text of a file of the project, or of a script of the course, which starter code has at the top level"""
    return next(place for place in (ROOT / path, ROOT / 'tests/course' / path) if place.exists()).read_text()


def functions(text, names):
    """{name: ast node} of these functions, and of methods named Class.method"""
    found = {}
    for node in parsed(text).body:
        members = node.body if isinstance(node, ast.ClassDef) else [node]
        prefix = f'{node.name}.' if isinstance(node, ast.ClassDef) else ''
        found |= {prefix + part.name: part for part in members if isinstance(part, ast.FunctionDef)}
    return {name: node for name, node in found.items() if name in names}


def lines_in(text):
    """The lines of a text as Python counts them. splitlines also splits at other characters, such as U+2028."""
    return io.StringIO(text).readlines()


def replace_functions(text, bodies):
    """The text with other lines for the functions {name: lines}, without decorators"""
    lines = lines_in(text)
    for name, node in sorted(functions(text, bodies).items(), key=lambda item: -item[1].lineno):
        lines[node.lineno - 1:node.end_lineno] = bodies[name]
    return ''.join(lines)


def lines_of(text, node):
    return lines_in(text)[node.lineno - 1:node.end_lineno]


def stub_out(text, names):
    """Replaces the bodies of functions by `raise NotImplementedError`; docstrings stay."""
    stubs = {}
    for name, node in functions(text, names).items():
        indent = ' ' * node.body[0].col_offset
        kept = node.body[0].end_lineno if ast.get_docstring(node) else node.body[0].lineno - 1
        stubs[name] = lines_of(text, node)[:kept - node.lineno + 1] + [f'{indent}raise NotImplementedError\n']
    return replace_functions(text, stubs)


def without_other_tests(text, words):
    """A test file without the tests whose names have none of these words"""
    others = [node for node in ast.parse(text).body if getattr(node, 'name', '').startswith('test_')
              and not any(word in node.name for word in words)]
    lines = lines_in(text)
    for node in reversed(others):
        first = min(part.lineno for part in [node, *node.decorator_list])
        del lines[first - 1:node.end_lineno]
    return ''.join(lines)


def handout(names, keep=False):
    """{path: text} of the starter code for these exercises: scripts, tests, and all project files that these import.
    Exercises of the same and of later weeks are stubbed out, too, unless `keep`, or tests of the named ones call them.
    """
    exercises = [EXERCISES[name] for name in names]
    week = min(e.week for e in exercises)
    hidden = [e for name, e in EXERCISES.items() if name in names or e.week >= week and not keep]
    written = {name for e in exercises for name in e.write.split()}
    needed = {name for e in exercises for name in e.needs.split()} - written
    paths = ['tests/conftest.py', *(path for e in exercises for path in (e.script, e.test_file))]
    files = {}
    for path in paths:                                      # grows during the loop
        if path not in files:
            words = [word for e in exercises if path == e.test_file for word in e.graded.split(' or ')]
            text = without_other_tests(source(path), words) if words else source(path)
            files[path] = stub_out(text, {name for e in hidden for name in e.stubbed(path)} - needed)
            paths += [other for module in re.findall(r'(?m)^ *(?:from|import) (\w+)', text)
                      for other in (f'{module}.py', f'tests/{module}.py') if (ROOT / other).exists()]
    return files


PAGE = """# Exercises

Write the bodies of these functions. Their docstrings describe arguments and results, and the top of each script
has the symbols. You may add helper functions; do not change anything else. Submit the whole script. Level 1 is a
formula, level 2 also has masks and special cases, and level 3 also has limits on memory, or many rules.

| exercise | write | from | level | minutes | tests |
|---|---|---|---|---|---|
{rows}

First run `pip install -r requirements.txt`. The tests fail until the functions are written. The message of a failed
test has the equation, the input and the expected value. Each test function gives a point, if it passes for all its
parameters; all tests together may take {limit} seconds. Other functions that end in `raise NotImplementedError` belong
to other exercises: the grading uses the originals.

Requirements on every loss: class labels may be any integers >= 0, in any order; the order of the images does not
matter; arguments are not modified; float64 stays float64 (the decorator upcasts half precision); gradients are finite,
even if the loss is 0, the batch has one class or one image, or images are equal.
"""

FLAWED = """# Find the mistake

In each of these scripts one function is wrong; everything else is right. Compare it with its docstring and the paper.
State in one sentence what is wrong, and for which input it makes a difference. Correct the function, and submit the
script. This folder has no tests: write one that fails, then correct the function.

| script | one of these functions is wrong | from | minutes |
|---|---|---|---|
{rows}
"""


def flawed(names, seed):
    """{path: text} of complete scripts, each with one of its mistakes, and common.py"""
    from mistakes import MISTAKES
    if len({EXERCISES[name].script for name in names}) < len(names):
        raise ArgumentError(None, 'two of these exercises are in one script, and a script has only one mistake')
    files = {'common.py': source('common.py')}
    for name in names:
        changes = list(MISTAKES[name].values())
        script = EXERCISES[name].script
        files[script] = changed(source(script), EXERCISES[name].write.split(), changes[seed % len(changes)])
    return files


def changed(text, names, solution):
    """A script with another solution: the source of functions, which is appended, or pairs of texts (old, new), which
    change lines of these functions"""
    if isinstance(solution, str):
        return f'{text}\n\n{solution}'
    heads, bodies = {}, {}
    for name, node in functions(text, names).items():
        lines, code = lines_of(text, node), node.body[bool(ast.get_docstring(node))].lineno - node.lineno
        heads[name], bodies[name] = ''.join(lines[:code]), ''.join(lines[code:])
    for old, new in zip(solution[::2], solution[1::2]):
        if sum(body.count(old) for body in bodies.values()) != 1:
            raise ValueError(f'{old!r} does not occur once in {", ".join(names)}')
        bodies = {name: body.replace(old, new) for name, body in bodies.items()}
    return replace_functions(text, {name: [heads[name] + body] for name, body in bodies.items()})


def make(out, names, seed=None, keep=False):
    if Path(out).is_file() or Path(out).is_dir() and any(Path(out).iterdir()):
        raise ArgumentError(None, f'{out} exists and is not empty')
    if Path(out).resolve().is_relative_to(ROOT):
        raise ArgumentError(None, f'{out} is in the project, whose tests would find it: use ../{Path(out).name}')
    rows = []
    for name in names:
        e = EXERCISES[name]
        functions_to_write = ', '.join(f'`{function}`' for function in e.write.split())
        cells = [f'`{e.script}`', functions_to_write, e.source, e.minutes] if seed is not None else [
            name, f'`{e.script}`: {functions_to_write}', e.source, e.level, e.minutes,
            f'`python -m pytest {e.test_file} -k "{e.graded}"`']
        rows.append('| ' + ' | '.join(map(str, cells)) + ' |')
    files = handout(names, keep) if seed is None else flawed(names, seed)
    files['README.md'] = (PAGE if seed is None else FLAWED).format(rows='\n'.join(rows), limit=LIMIT)
    write(out, files | {name: source(name) for name in ('requirements.txt', 'LICENSE')})
    print(f'{out}: {", ".join(sorted(files))}')


def write(folder, files):
    for path, text in files.items():
        Path(folder, path).parent.mkdir(parents=True, exist_ok=True)
        Path(folder, path).write_text(text)


# ---- grades

# Processes are forked from one that has imported torch, which saves most of the time of a grading.
CONTEXT = multiprocessing.get_context('forkserver' if sys.platform == 'linux' else 'spawn')
CONTEXT.set_forkserver_preload(['pytest', 'torch', 'torchvision.transforms.v2'])


def run_pytest(folder, test_file, graded, *options):
    """Runs the graded tests of a folder, and writes its report.xml. In a process of its own"""
    import pytest
    os.chdir(folder)
    sys.path[:] = [path for path in sys.path if not Path(path).resolve().is_relative_to(ROOT)]
    with open('output', 'w') as sys.stderr, redirect_stdout(sys.stderr):
        pytest.main([test_file, '-k', graded, '-q', '-p', 'no:cacheprovider', '--rootdir', folder,
                     '--junitxml', 'report.xml', *options])


def results(exercise, files, script, *options):
    """({test: '' or why it failed}, why there are no results) of the text of a script, in a folder with these files"""
    with tempfile.TemporaryDirectory() as folder:
        write(folder, files | {exercise.script: script})
        process = CONTEXT.Process(target=run_pytest, args=(folder, exercise.test_file, exercise.graded, *options),
                                  daemon=True)
        process.start()
        process.join(LIMIT)
        if process.is_alive():
            process.kill()
            return {}, f'no end after {LIMIT} seconds'
        report = Path(folder, 'report.xml')
        if not report.exists():
            return {}, 'the process ended early'
        tests, why = {}, ''
        for case in ElementTree.parse(report).iter('testcase'):
            failed = next((part for part in case if part.tag in ('failure', 'error', 'skipped')), None)
            reason = '' if failed is None else failed.get('message', '') or 'it failed'
            if (case.get('name') or '').startswith('test_'):
                name = case.get('name').split('[')[0]       # a point for all its parameters
                tests[name] = tests.get(name) or reason
            else:                                           # the test file cannot be imported
                why = f'{reason}: {(failed.text or "").strip().splitlines()[-1]}'
        return tests, '' if tests else why or 'there are no tests'


def submission(exercise, text):
    """A submitted script with the original functions of all other exercises. Raises SyntaxError or ValueError."""
    own, *_ = exercise.write.split()
    if own not in functions(text, [own]):
        raise ValueError(f'submit the whole script: {own} is not in this file')
    original = source(exercise.script)
    others = {name for e in EXERCISES.values() for name in e.stubbed(exercise.script)} - {*exercise.write.split()}
    return replace_functions(text, {name: lines_of(original, node)
                                    for name, node in functions(original, others).items()})


def points(tests, every, name):
    """{equation: [points, maximum]}, where the equation is in the name of a test"""
    found = {}
    for test in every:
        equation = (re.match(r'test_([a-z]+_eq\d+)_', test) or ['', name])[1]
        found.setdefault(equation, [0, 0])
        found[equation][0] += tests.get(test) == ''
        found[equation][1] += 1
    return found


def scripts_in(paths, script):
    """The files to grade. In a folder these are the scripts with this name at any depth, and its own .py files."""
    for path in map(Path, paths):
        if not path.exists():
            raise ArgumentError(None, f'no such file: {path}')
        found = [path] if path.is_file() else sorted({*path.rglob(script), *path.glob('*.py')})
        yield from filter(Path.is_file, found)


def grade(name, paths, table=None, feedback=None):
    """Prints the points of each script; writes a table and texts."""
    exercise, files, rows = EXERCISES[name], handout([name], keep=True), []
    scripts = list(scripts_in(paths, exercise.script))
    if not scripts:
        raise ArgumentError(None, f'there is no {exercise.script} in {", ".join(map(str, paths))}')
    if table and Path(table).exists():                      # it may be that of another exercise
        raise ArgumentError(None, f'{table} exists already: name another table')
    every, why = results(exercise, files, source(exercise.script))
    if why or any(every.values()):
        raise SystemExit(f'error: the project itself fails: {why or next(filter(None, every.values()))}')
    if table:                                               # a wrong path fails now
        write_table(table, [])
    if feedback:
        Path(feedback).mkdir(parents=True, exist_ok=True)
    for path in scripts:
        try:
            tests, why = results(exercise, files, submission(exercise, path.read_text('utf-8-sig')))
        except Exception as error:                          # one odd submission must not end the grading
            tests, why = {}, f'{type(error).__name__}: {error}'
        counted = points(tests, every, name)
        total = [sum(column) for column in zip(*counted.values())]
        shown = ', '.join(f'{equation} {got}/{of}' for equation, (got, of) in counted.items())
        print(f'{path}: {shown}, in all {total[0]}/{total[1]}' + f' ({why})' * bool(why), flush=True)
        rows += [[path, equation, got, of, why] for equation, (got, of) in counted.items()]
        if feedback:
            failed = [f'{test}\n    {reason}' for test, reason in tests.items() if reason]
            text = '\n\n'.join([f'{name}: {total[0]} of {total[1]} points', *filter(None, [why]), *failed]) + '\n'
            file = os.path.relpath(path.with_suffix('.txt')).replace(os.sep, '-')
            write(feedback, {f'{name}-{file[-180:].lstrip(".-")}': text})           # not longer than names may be
        if table:                                           # after each, so that an interruption loses no points
            write_table(table, rows)
    for path in filter(Path.is_dir, map(Path, paths)):
        folders = sorted(part for part in path.iterdir() if part.is_dir())
        if missing := [part.name for part in folders if not any(part.rglob(exercise.script))]:
            print(f'without a {exercise.script}: {", ".join(missing)}')


def write_table(path, rows):
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with open(path, 'w', newline='') as file:
        csv.writer(file).writerows([['file', 'equation', 'points', 'of', 'remark'], *rows])


def check(names, verbose=False):
    """Grades the original, other right solutions, starter code and mistakes. Returns how many results are wrong."""
    from mistakes import MISTAKES, RIGHT
    jobs = []
    for name in names:
        e = EXERCISES[name]
        original = source(e.script)
        jobs += [(name, 'right', 'original', original), (name, 'wrong', 'starter code', handout([name])[e.script])]
        for kind, solutions in ('right', RIGHT), ('wrong', MISTAKES):
            jobs += [(name, kind, what, changed(original, e.write.split(), solution))
                     for what, solution in solutions.get(name, {}).items()]
    files = {name: handout([name], keep=True) for name in names}
    bad = 0
    with ThreadPoolExecutor(2) as pool:
        found = pool.map(lambda job: results(EXERCISES[job[0]], files[job[0]], job[3], *['-x'] * (job[1] == 'wrong')),
                         jobs)
        for (name, kind, what, _), (tests, why) in zip(jobs, found):
            failed = [test for test, reason in tests.items() if reason]
            good = not (failed or why) if kind == 'right' else bool(failed)
            bad += not good
            if verbose or not good:
                print(f'{"ok " if good else "BAD"} {name}, {what}: {len(failed)} of {len(tests)} tests fail {why}')
    lost = sum(kind == 'wrong' and what != 'starter code' for _, kind, what, _ in jobs)
    print(f'{len(names)} exercises, {lost} mistakes, {bad} of {len(jobs)} results are not as they should be')
    return bad


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest='command', required=True)
    commands.add_parser('list')
    command = commands.add_parser('make')
    command.add_argument('out', metavar='OUT')
    command.add_argument('names', metavar='NAME', nargs='+', choices=EXERCISES)
    command.add_argument('--flawed', type=int, metavar='SEED', help='complete scripts, each with a mistake to be found')
    command.add_argument('--keep', action='store_true', help='other exercises of these files keep their solutions')
    command = commands.add_parser('grade')
    command.add_argument('name', metavar='NAME', choices=EXERCISES)
    command.add_argument('files', metavar='FILE', nargs='+')
    command.add_argument('--csv', metavar='FILE', help='file, equation, points, of, remark')
    command.add_argument('--feedback', metavar='DIR', help='a text for each script: which tests failed, and why')
    command = commands.add_parser('check')
    command.add_argument('names', metavar='NAME', nargs='*', choices=[*EXERCISES, []], default=[])
    command.add_argument('-v', action='store_true', help='print a line for each solution')
    args = parser.parse_args(argv)
    os.environ['OMP_NUM_THREADS'] = '1'                     # of the child processes
    try:
        if args.command == 'list':
            for name, e in EXERCISES.items():
                print(f'{name:28} week {e.week}  level {e.level} {e.minutes:4} minutes  {e.source}')
        elif args.command == 'make':
            if args.keep and args.flawed is not None:
                parser.error('--keep has no effect with --flawed')
            make(args.out, args.names, args.flawed, args.keep)
        elif args.command == 'grade':
            grade(args.name, args.files, args.csv, args.feedback)
        else:
            return check(args.names or list(EXERCISES), args.v) > 0
    except (ArgumentError, OSError) as error:
        parser.error(str(error))


if __name__ == '__main__':
    sys.exit(main())
