"""Exercises of a course: folders for students, points for what they hand in, and a check of the tests themselves.

    python tests/handout.py make OUT NAME...     makes the folder OUT for the exercises that are named
    python tests/handout.py grade NAME FILE...   a line for each file: points for each equation, and in all
    python tests/handout.py check [NAME...]      whether tests catch what is wrong and accept what is right; -v: which

A student gets the folder, fills in the functions of the exercise, and hands in the whole script. `grade` tests this
file in a process of its own, with the tests of the project. It runs the file as it is: do so where it can do no harm.
"""
import argparse
import ast
import gc
import multiprocessing
import os
import re
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stderr, redirect_stdout
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
LIMIT = 120                                         # seconds for the tests of one file


class Exercise(NamedTuple):
    script: str
    cut: str            # functions that the student writes, and their helpers that would give them away
    graded: str         # a test is graded if its name has one of these words
    level: int          # 1: a formula. 2: also masks, means or special cases. 3: also memory, or many rules
    source: str
    copies: dict = {}   # {script: functions that hold the same solution}

    @property
    def solutions(self):
        """{script: functions that hold a solution}"""
        return {self.script: self.cut} | self.copies

    @property
    def tests(self):
        return 'test_retrieval.py' if self.script == 'common.py' else self.script.replace('train_', 'test_')


EXERCISES = {
    'contrastive_loss': Exercise(
        'train_contrastive.py', 'contrastive_loss mean_nonzero', 'rc_eq1_', 1, 'Reality Check Eq. (1)',
        {'train_hse.py': 'contrastive_loss'}),
    'contrastive_similarity_loss': Exercise(
        'train_contrastive.py', 'contrastive_similarity_loss', 'metrix_eq1_', 1, 'Metrix Eq. (1)',
        {'train_metrix.py': 'contrastive'}),
    'multi_similarity_loss': Exercise(
        'train_ms.py', 'multi_similarity_loss mine', 'metrix_eq2_', 2, 'Metrix Eq. (2); the miner from its docstring',
        {'train_metrix.py': 'ms clean_loss', 'train_hse.py': 'multi_similarity_loss'}),
    'proxy_anchor_loss': Exercise(
        'train_proxy_anchor.py', 'proxy_anchor_loss', 'pa_eq4_ pa_eq6_', 2, 'Proxy-Anchor Eq. (4) and its gradient (6)',
        {'train_metrix.py': 'proxy_anchor clean_loss', 'train_hse.py': 'proxy_anchor_loss'}),
    'proxynca_loss': Exercise(
        'train_proxynca_pp.py', 'proxynca_loss', 'pa_eq1_ pa_eq3_', 1, 'Proxy-Anchor Eq. (1) and its gradient (3)',
        {'train_ccl.py': 'scaled_proxynca_loss'}),
    'proxynca_pp_loss': Exercise(
        'train_proxynca_pp.py', 'proxynca_pp_loss', 'test_proxynca_pp_', 1, 'ProxyNCA++, as at the top of the script',
        {'train_metrix.py': 'proxynca_pp'}),
    'center_contrastive_loss': Exercise(
        'train_ccl.py', 'center_contrastive_loss', 'ccl_eq5_ ccl_eq8_ ccl_eq11_', 2,
        'CCL Eq. (5); (8) and (11) are special cases'),
    'positivity_threshold': Exercise(
        'train_metrix.py', 'positivity_threshold', 'metrix_eq24_', 1, 'Metrix Eq. (24)'),
    'pair_labels': Exercise(
        'train_metrix.py', 'pair_labels', 'metrix_eq8_', 2, 'Metrix Eq. (8)'),
    'mix_features': Exercise(
        'train_metrix.py', 'mix_features max_of_mixed', 'metrix_eq4_feature_', 3,
        'Metrix Eq. (4), without a tensor of all mixed feature maps'),
    'hybrid_loss': Exercise(
        'train_hse.py', 'hybrid_loss', 'hse_eq7_ hse_eq8_ hse_eq9_', 2, 'HSE Eq. (7), (8) and (9)'),
    'epshn_loss': Exercise(
        'train_hse.py', 'epshn_loss', 'test_epshn_', 2, 'its docstring; it is one L_m of HSE Eq. (10)'),
    'retrieval_metrics': Exercise(
        'common.py', 'retrieval_metrics', 'rc_eq3_ rc_eq4_ test_retrieval_', 3,
        'Reality Check Eq. (3) and (4); R@K and three rules from the docstring'),
}


# ---- what a hand-out holds


@cache
def parsed(text):
    return ast.parse(text).body


def functions_of(text, names):
    """The functions with these names, as nodes from top to bottom"""
    return [node for node in parsed(text) if getattr(node, 'name', '') in names]


def code_lines(lines, function):
    """The lines of a function behind its docstring, with the comments in front of its first statement: (first, end)"""
    if ast.get_docstring(function) and len(function.body) > 1:
        return function.body[0].end_lineno, function.end_lineno
    first = function.body[0].lineno - 1
    while lines[first - 1].strip().startswith('#'):
        first -= 1
    return first, function.end_lineno


def cut(text, names):
    """Replaces the bodies of functions; docstrings stay."""
    lines = text.splitlines(keepends=True)
    for function in reversed(functions_of(text, names)):
        first, end = code_lines(lines, function)
        lines[first:end] = ['    raise NotImplementedError\n']
    return ''.join(lines)


def prune(text, words):
    """A file of tests with those whose name has one of the words, and with the imports and names that they need"""
    lines, module = text.splitlines(keepends=True), ast.parse(text)
    body = module.body
    tests = [node for node in body if getattr(node, 'name', '').startswith('test_')]
    keep = [node for node in tests if any(word in node.name for word in words)]
    defined = {}                                    # of all names but those of tests, and of what is imported
    for node in body:
        targets = getattr(node, 'targets', [node] if hasattr(node, 'name') and node not in tests else [])
        defined |= {name.id if isinstance(name, ast.Name) else name.name: node
                    for target in targets for name in getattr(target, 'elts', [target])}
    used, todo = set(), list(keep)
    while todo:                                     # fixtures are named by arguments
        names = {getattr(part, 'id', getattr(part, 'arg', None)) for part in ast.walk(todo.pop())} - used
        used |= names
        new = {id(defined[name]): defined[name] for name in names & defined.keys()}.values()
        todo += new
        keep += new
    pieces, blank, last = [f'"""{ast.get_docstring(module)}"""\n'], 0, None
    for node in body[1:]:
        first = min([node.lineno, *(d.lineno for d in getattr(node, 'decorator_list', []))]) - 1
        source = ''.join(lines[first:node.end_lineno])
        blank = max(blank, not lines[first - 1].strip(), 2 * (hasattr(node, 'name') or hasattr(last, 'name')))
        if isinstance(node, ast.Import | ast.ImportFrom):
            number = len(node.names)
            node.names = [name for name in node.names if (name.asname or name.name.split('.')[0]) in used]
            source = source if len(node.names) == number else ast.unparse(node) + '\n'
        if node in keep or getattr(node, 'names', []):
            pieces.append('\n' * blank + source)
            blank, last = 0, node
    return ''.join(pieces)


def imported(text):
    """The modules that a file imports"""
    for node in (part for top in parsed(text) for part in ast.walk(top)):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module


def handout(names):
    """{path: text} of the files for these exercises: tests, scripts that they need, and what these import"""
    files, todo = {}, ['tests/conftest.py']
    for file in sorted({EXERCISES[name].tests for name in names}):
        words = [word for name in names if EXERCISES[name].tests == file for word in EXERCISES[name].graded.split()]
        files[f'tests/{file}'] = prune((ROOT / 'tests' / file).read_text(), words)
    todo += [EXERCISES[name].script for name in names] + [path for text in files.values() for path in local(text)]
    while todo:
        if (path := todo.pop()) not in files:
            files[path] = (ROOT / path).read_text()
            todo += local(files[path])
    for path in [path for path in files if '/' not in path]:
        files[path] = cut(files[path], solutions_in(path, names))
    return files


def local(text):
    """The files of the project that a file imports"""
    paths = [path for module in imported(text) for path in (f'{module}.py', f'tests/{module}.py')]
    return [path for path in paths if (ROOT / path).exists()]


def solutions_in(path, names):
    """The functions of a script that hold a solution of one of these exercises"""
    return {function for name in names for function in EXERCISES[name].solutions.get(path, '').split()}


def student_page(names):
    rows = [f'| {name} | `{e.script}`: {", ".join(f"`{f}`" for f in e.cut.split())} | {e.source} | {e.level} | '
            f'`python -m pytest tests/{e.tests} -k "{expression(e)}"` |'
            for name, e in ((name, EXERCISES[name]) for name in names)]
    return '\n'.join([
        '# Exercises', '',
        'Write the bodies of these functions again. Their docstrings say what goes in and what comes out, and the top',
        'of each script has the equations and the symbols. Helpers of your own may stand beside them; all else stays',
        'as it is. Hand in the whole script. Level 1 is a formula, level 2 has masks and special cases as well, and',
        'level 3 also limits on memory, or many rules.', '',
        '| exercise | write | from | level | tests |', '|---|---|---|---|---|', *rows, '',
        'Begin with `pip install -r requirements.txt`. The tests fail until the functions are written:',
        '`python -m pytest` runs all of them. A test that fails names equation and input, and says what was expected.',
        ''])


def make(out, names):
    out = Path(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise SystemExit(f'error: {out} exists')
    files = handout(names) | {'README.md': student_page(names)}
    files |= {name: (ROOT / name).read_text() for name in ('requirements.txt', 'LICENSE')}
    write(out, files)
    print(f'{out}: {", ".join(sorted(files))}')


def write(folder, files):
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)


# ---- running the tests


def expression(exercise):
    return ' or '.join(exercise.graded.split())


class Record:
    """A plugin of pytest that keeps {test: '' if it passed, else what went wrong} and why no test could be run"""

    def __init__(self):
        self.tests, self.broken = {}, ''

    def pytest_collectreport(self, report):
        if report.failed:
            self.broken = str(report.longrepr).strip().splitlines()[-1].removeprefix('E').strip()

    def pytest_runtest_logreport(self, report):
        if report.when == 'call' or report.failed:
            text = '' if report.passed else str(report.longreprtext).strip()
            self.tests[report.nodeid.split('::')[-1]] = text


def run_tests(folder, arguments, sender):
    """In a process of its own: the tests of a folder, in silence"""
    os.environ['PYTEST_DISABLE_PLUGIN_AUTOLOAD'] = '1'
    os.chdir(folder)
    sys.path[:] = [path for path in sys.path if not Path(path).resolve().is_relative_to(ROOT)]
    sys.dont_write_bytecode = True
    import pytest
    gc.freeze()                                     # pytest collects garbage, and torch has much to look through
    record = Record()
    with open(os.devnull, 'w') as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        code = pytest.main([*arguments, '-q', '-p', 'no:cacheprovider', '--rootdir', folder], plugins=[record])
    sender.send((record.tests, '' if record.tests else record.broken or f'no test was run, exit code {int(code)}'))


def results(exercise, files, text, *options):
    """({test: '' or what went wrong}, why there are none) for the text of the exercise's script"""
    # On Linux, processes are forked from one that has torch already, which takes a tenth of the time.
    linux = sys.platform == 'linux'
    context = multiprocessing.get_context('forkserver' if linux else 'spawn')
    if linux:
        context.set_forkserver_preload(['pytest', 'torch', 'torchvision.transforms.v2'])
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), files)
        (Path(folder) / exercise.script).write_bytes(text if isinstance(text, bytes) else text.encode())
        receiver, sender = context.Pipe(duplex=False)
        arguments = [f'tests/{exercise.tests}', '-k', expression(exercise), *options]
        process = context.Process(target=run_tests, args=(folder, arguments, sender), daemon=True)
        process.start()
        sender.close()
        try:
            return receiver.recv() if receiver.poll(LIMIT) else ({}, f'no end after {LIMIT} seconds')
        except EOFError:
            return {}, 'the process ended early'
        finally:
            process.kill()
            process.join()


def at_once(function, items):
    """Two at a time, in the order of the items"""
    with ThreadPoolExecutor(2) as pool:
        return pool.map(function, items)


def grade(name, paths):
    """Prints the points of each file. A test of the graded ones is a point."""
    exercise, files = EXERCISES[name], handout([name])
    texts = [path.read_bytes() for path in map(Path, paths)]
    every, why = results(exercise, files, (ROOT / exercise.script).read_text())
    if why or any(every.values()):
        raise SystemExit(f'error: the project itself fails: {why or list(filter(None, every.values()))[0]}')
    group = {test: (re.match(r'test_([a-z]+_eq\d+)_', test) or ['', name])[1] for test in every}
    for path, (tests, why) in zip(paths, at_once(lambda text: results(exercise, files, text), texts)):
        right = [test for test in every if tests.get(test, 'not run') == '']
        points = [f'{equation} {sum(group[test] == equation for test in right)}/{list(group.values()).count(equation)}'
                  for equation in dict.fromkeys(group.values())]
        print(f'{path}: {", ".join(points)}, in all {len(right)}/{len(every)}{why and f" ({why})"}', flush=True)


def hand_in(text, names, solution):
    """A script with a solution: the source of functions, or pairs (old, new) that change one line of the project's"""
    lines, nodes = text.splitlines(keepends=True), functions_of(text, names)
    if isinstance(solution, str):
        written = {node.name for node in ast.parse(solution).body}
        spans = [(node.lineno - 1, node.end_lineno) for node in nodes if node.name in written]
        for first, end in reversed(spans):
            lines[first:end] = []
        lines[spans[0][0]:spans[0][0]] = [solution.strip(), '\n\n\n']
        return ''.join(lines)
    spans = [code_lines(lines, node) for node in nodes]
    codes = [''.join(lines[first:end]) for first, end in spans]
    for old, new in zip(solution[::2], solution[1::2]):
        if sum(code.count(old) for code in codes) != 1:
            raise ValueError(f'{old!r} does not stand once in {", ".join(names)}')
        codes = [code.replace(old, new) for code in codes]
    for (first, end), code in reversed([*zip(spans, codes)]):
        lines[first:end] = [code]
    return ''.join(lines)


def check(names, verbose=False):
    """Whether all graded tests fail on what is cut, at least one on each wrong solution, and none on the others, where
    all other exercises are cut. Returns how many solutions are not as they should be."""
    from solutions import RIGHT, WRONG
    files, jobs, bad = handout(list(EXERCISES)), [], 0
    for name in names:
        exercise = EXERCISES[name]
        own = exercise.cut.split()
        whole = cut((ROOT / exercise.script).read_text(), solutions_in(exercise.script, EXERCISES) - {*own})
        jobs += [(exercise, name, 'cut', files[exercise.script]), (exercise, name, 'whole', whole)]
        for kind, solutions in ('right', RIGHT), ('wrong', WRONG):
            jobs += [(exercise, name, f'{kind}: {what}', hand_in(whole, own, s)) for what, s in solutions[name].items()]

    def run(job):
        exercise, _, what, text = job
        return results(exercise, files, text, *['-x'] * what.startswith('wrong'))

    for (_, name, what, _), (tests, why) in zip(jobs, at_once(run, jobs)):
        failed = {test: text for test, text in tests.items() if text}
        if what == 'cut':
            good = len(failed) == len(tests) > 0
        else:
            good = bool(failed) if what.startswith('wrong') else not failed and not why
        bad += not good
        if verbose or not good:
            first = next(iter(failed.items()), ('', ''))
            how = why or f'{len(failed)} of {len(tests)} tests fail {first[0]}'
            print(f'{"ok " if good else "BAD"} {name}, {what}: {how}')
            if first[1] and not good or verbose > 1:
                print(first[1])
    print(f'{len(names)} exercises, {sum("wrong" in job[2] for job in jobs)} wrong solutions, '
          f'{sum("right" in job[2] for job in jobs)} right ones: {bad} not as they should be')
    return bad


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest='command', required=True)
    command = commands.add_parser('make')
    command.add_argument('out', metavar='OUT')
    command.add_argument('names', metavar='NAME', nargs='+')
    command = commands.add_parser('grade')
    command.add_argument('names', metavar='NAME', nargs=1)
    command.add_argument('files', metavar='FILE', nargs='+')
    command = commands.add_parser('check')
    command.add_argument('names', metavar='NAME', nargs='*')
    command.add_argument('-v', action='count', default=0, help='a line for each solution; twice: and why it fails')
    args = parser.parse_args(argv)
    os.environ['OMP_NUM_THREADS'] = '1'             # for the processes to come: two at a time, each on one core
    for name in args.names:
        if name not in EXERCISES:
            parser.exit(2, f'error: {name} is no exercise; these are: {", ".join(EXERCISES)}\n')
    if args.command == 'make':
        make(args.out, args.names)
    elif args.command == 'grade':
        if missing := [path for path in args.files if not Path(path).is_file()]:
            parser.exit(2, f'error: no such file: {missing[0]}\n')
        grade(args.names[0], args.files)
    else:
        return int(check(args.names or list(EXERCISES), args.v) > 0)


if __name__ == '__main__':
    sys.exit(main())
