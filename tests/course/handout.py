"""Makes starter code for the exercises of the course, and grades submissions by the project's own tests.

    python tests/course/handout.py list                 the exercises: week, level, minutes, equations
    python tests/course/handout.py make OUT NAME...     writes the folder OUT for students: these functions are stubbed
                                                        out, and those of the same week and of later weeks
        --keep                                          other exercises keep their solutions
        --flawed SEED                                   instead, each script has a mistake, for students to find
    python tests/course/handout.py grade NAME FILE...   prints a table in CSV: points, and which tests of a script fail
    python tests/course/handout.py check [NAME...]      grades the original, solutions that are written differently, and
                                                        the mistakes of mistakes.py: each mistake must lose a point

Students submit the whole script. `grade` takes it with the original functions of all other exercises, and runs the
graded tests in a process of its own. It executes submissions: run it where they can do no harm.
"""
import argparse
import ast
import csv
import multiprocessing
import os
import re
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stdout
from functools import lru_cache
from pathlib import Path
from xml.etree import ElementTree

from exercises import EXERCISES, ROOT
from mistakes import MISTAKES, RIGHT

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


def lines_of(text, node):
    return text.split('\n')[node.lineno - 1:node.end_lineno]


def replace_functions(text, bodies):
    """The text with other lines for the functions {name: lines}, without decorators"""
    lines = text.split('\n')
    for name, node in sorted(functions(text, bodies).items(), key=lambda item: -item[1].lineno):
        lines[node.lineno - 1:node.end_lineno] = bodies[name]
    return '\n'.join(lines)


def stub_out(text, names):
    """Replaces the bodies of functions by `raise NotImplementedError`; docstrings stay."""
    stubs = {}
    for name, node in functions(text, names).items():
        indent = ' ' * node.body[0].col_offset
        kept = node.body[0].end_lineno if ast.get_docstring(node) else node.body[0].lineno - 1
        stubs[name] = lines_of(text, node)[:kept - node.lineno + 1] + [f'{indent}raise NotImplementedError']
    return replace_functions(text, stubs)


def without_other_tests(text, words):
    """A test file without the tests whose names have none of these words"""
    others = [node for node in ast.parse(text).body if getattr(node, 'name', '').startswith('test_')
              and not any(word in node.name for word in words)]
    lines = text.split('\n')
    for node in reversed(others):
        first = min(part.lineno for part in [node, *node.decorator_list])
        del lines[first - 1:node.end_lineno]
    return '\n'.join(lines)


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
    if len({EXERCISES[name].script for name in names}) < len(names):
        sys.exit('error: two of these exercises are in one script, and a script has only one mistake')
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
        heads[name], bodies[name] = lines[:code], '\n'.join(lines[code:])
    for old, new in zip(solution[::2], solution[1::2]):
        if sum(body.count(old) for body in bodies.values()) != 1:
            raise ValueError(f'{old!r} does not occur once in {", ".join(names)}')
        bodies = {name: body.replace(old, new) for name, body in bodies.items()}
    return replace_functions(text, {name: [*heads[name], body] for name, body in bodies.items()})


def make(out, names, seed=None, keep=False):
    if Path(out).exists() and any(Path(out).iterdir()):
        sys.exit(f'error: {out} is not empty')
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
    """({test: whether it passes}, why there are no results) of the text of a script, in a folder with these files. A
    test passes if it does so for all its parameters."""
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
            name = case.get('name').split('[')[0]
            if name.startswith('test_'):
                tests[name] = tests.get(name, True) and failed is None
            else:                                           # the test file cannot be imported
                why = (failed.text or '').strip().splitlines()[-1]
        return tests, '' if tests else why


def submission(exercise, text):
    """A submitted script with the original functions of all other exercises"""
    original = source(exercise.script)
    others = {name for e in EXERCISES.values() for name in e.stubbed(exercise.script)} - {*exercise.write.split()}
    return replace_functions(text, {name: lines_of(original, node)
                                    for name, node in functions(original, others).items()})


def grade(name, paths):
    """Prints a table in CSV: a line for each script with its points, and the tests that fail, or why none ran."""
    exercise, files = EXERCISES[name], handout([name], keep=True)
    every, _ = results(exercise, files, source(exercise.script))
    table = csv.writer(sys.stdout, lineterminator='\n')
    table.writerow(['file', 'points', 'of', 'failed'])
    for path in paths:
        try:
            tests, why = results(exercise, files, submission(exercise, Path(path).read_text('utf-8-sig')))
        except (OSError, SyntaxError, ValueError) as error:             # must not end the grading of the others
            tests, why = {}, f'{type(error).__name__}: {error}'
        failed = [test for test in every if not tests.get(test)]
        table.writerow([path, len(every) - len(failed), len(every), why or ' '.join(failed)])
        sys.stdout.flush()


def check(names, verbose=False):
    """Grades the original, other right solutions, starter code and mistakes. Returns how many results are wrong."""
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
            failed = [test for test, passed in tests.items() if not passed]
            good = bool(failed) if kind == 'wrong' else bool(tests) and not failed and not why
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
    command = commands.add_parser('check')
    command.add_argument('names', metavar='NAME', nargs='*', choices=[*EXERCISES, []], default=[])
    command.add_argument('-v', action='store_true', help='print a line for each solution')
    args = parser.parse_args(argv)
    os.environ['OMP_NUM_THREADS'] = '1'                     # of the child processes
    if args.command == 'list':
        for name, e in EXERCISES.items():
            print(f'{name:28} week {e.week}  level {e.level} {e.minutes:4} minutes  {e.source}')
    elif args.command == 'make':
        make(args.out, args.names, args.flawed, args.keep)
    elif args.command == 'grade':
        grade(args.name, args.files)
    else:
        return check(args.names or list(EXERCISES), args.v) > 0


if __name__ == '__main__':
    sys.exit(main())
