"""Makes exercises of the project's functions, and grades what students write. `list` prints the exercises.

    python tests/course/handout.py list                 the exercises: level, minutes, equations
    python tests/course/handout.py make OUT NAME...     writes the folder OUT for students: these functions have no
                                                        bodies
        --flawed SEED                                   instead, each script has one of the wrong solutions in it, for
                                                        students to find and mend; the seed chooses which
    python tests/course/handout.py grade NAME FILE...   prints a line for each file: points for each equation, and
                                                        their sum. Of a folder, the scripts of this name in it are
                                                        graded, or else all its .py files
        --csv grades.csv                                writes file, exercise, equation, points, of
        --feedback DIR                                  writes a text for each file: which tests failed, and why
    python tests/course/handout.py check [NAME...]      tests solutions.py: wrong ones fail, right ones pass; -v
                                                        prints all

A student gets the folder, fills in the functions of the exercise, and hands in the whole script. `grade` tests this
file in a process of its own, with the tests of the project, and ends all that it leaves behind. It runs the file as it
is: do so where it can do no harm. A file can also forge its grade, by code that changes pytest: look at what has full
points.
"""
import argparse
import ast
import csv
import gc
import multiprocessing
import os
import random
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from symtable import symtable
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
LIMIT = 120                                         # seconds for the tests of one file, and for one of them
LIMIT_OF_A_TEST = 40


class Exercise(NamedTuple):
    script: str
    cut: str            # functions that the student writes, and their helpers that would give them away
    graded: str         # tests that are graded, as an expression for pytest -k
    level: int          # 1: a formula. 2: also masks, means or special cases. 3: also memory, or many rules
    minutes: int        # that a student of the second year may need
    source: str
    copies: dict = {}   # {script: functions that hold the same solution}
    akin: str = ''      # functions of the same script that share lines with the solution

    @property
    def functions(self):
        """Those to write, as a page names them"""
        return ', '.join(f'`{function}`' for function in self.cut.split())

    @property
    def solutions(self):
        """{script: functions that hold a solution}"""
        return {self.script: f'{self.cut} {self.akin}'} | self.copies

    @property
    def tests(self):
        others = {'common.py': 'tests/foundation/test_retrieval.py', 'eval.py': 'tests/evaluation/test_measures.py',
                  'train_triplet.py': 'tests/course/test_triplet.py'}
        return others.get(self.script, f'tests/papers/{self.script.replace("train_", "test_")}')


EXERCISES = {
    'triplet_loss': Exercise(
        'train_triplet.py', 'triplet_loss', 'rc_eq2_', 2, 60, 'Reality Check Eq. (2), in a script of one\'s own'),
    'contrastive_loss': Exercise(
        'train_contrastive.py', 'contrastive_loss mean_nonzero', 'rc_eq1_', 2, 45, 'Reality Check Eq. (1)',
        {'train_hse.py': 'contrastive_loss'}),
    'contrastive_similarity_loss': Exercise(
        'train_contrastive.py', 'contrastive_similarity_loss', 'metrix_eq1_', 2, 45, 'Metrix Eq. (1)',
        {'train_metrix.py': 'contrastive'}),
    'multi_similarity_loss': Exercise(
        'train_ms.py', 'multi_similarity_loss mine', 'metrix_eq2_', 2, 75,
        'Metrix Eq. (2); the miner from its docstring',
        {'train_metrix.py': 'ms clean_loss', 'train_hse.py': 'multi_similarity_loss'}),
    'proxy_anchor_loss': Exercise(
        'train_proxy_anchor.py', 'proxy_anchor_loss', 'pa_eq4_ or pa_eq6_', 2, 60,
        'Proxy-Anchor Eq. (4) and its gradient (6)',
        {'train_metrix.py': 'proxy_anchor clean_loss', 'train_hse.py': 'proxy_anchor_loss'}),
    'proxynca_loss': Exercise(
        'train_proxynca_pp.py', 'proxynca_loss', 'pa_eq1_ or pa_eq3_', 1, 30,
        'Proxy-Anchor Eq. (1) and its gradient (3)',
        {'train_ccl.py': 'scaled_proxynca_loss'}),
    'proxynca_pp_loss': Exercise(
        'train_proxynca_pp.py', 'proxynca_pp_loss', 'test_proxynca_pp_', 1, 30,
        'ProxyNCA++, as at the top of the script',
        {'train_metrix.py': 'proxynca_pp_of_queries'}),
    'center_contrastive_loss': Exercise(
        'train_ccl.py', 'center_contrastive_loss', 'ccl_eq5_ or ccl_eq8_ or ccl_eq11_', 2, 75,
        'CCL Eq. (5); (8) and (11) are special cases'),
    'positivity_threshold': Exercise(
        'train_metrix.py', 'positivity_threshold', 'metrix_eq24_', 1, 15, 'Metrix Eq. (24)'),
    'utilization': Exercise(
        'eval.py', 'utilization', 'metrix_eq12_', 1, 20, 'Metrix Eq. (12)', {'train_metrix.py': 'utilization'}),
    'pair_labels': Exercise(
        'train_metrix.py', 'pair_labels', 'metrix_eq8_', 2, 45, 'Metrix Eq. (8)'),
    'mix_features': Exercise(
        'train_metrix.py', 'mix_features max_of_mixed', 'metrix_eq4_feature_', 3, 120,
        'Metrix Eq. (4), without a tensor of all mixed feature maps'),
    'hybrid_loss': Exercise(
        'train_hse.py', 'hybrid_loss', 'hse_eq7_ or hse_eq8_ or hse_eq9_', 2, 60, 'HSE Eq. (7), (8) and (9)',
        akin='epshn_loss'),
    'epshn_loss': Exercise(
        'train_hse.py', 'epshn_loss', 'test_epshn_', 2, 60, 'its docstring; it is one L_m of HSE Eq. (10)',
        akin='hybrid_loss'),
    'retrieval_metrics': Exercise(
        'common.py', 'retrieval_metrics check_embeddings ranked_hits precisions',
        'rc_eq3_ or rc_eq4_ or test_retrieval_', 3, 150,
        'Reality Check Eq. (3) and (4); R@K and three rules from the docstring'),
}


# ---- what a hand-out holds


def functions_of(text, names):
    """The functions with these names, as nodes from top to bottom"""
    return [node for node in ast.parse(text).body if getattr(node, 'name', '') in names]


def cut(text, names):
    """Replaces the bodies of functions; docstrings stay."""
    lines = text.splitlines(keepends=True)
    for function in reversed(functions_of(text, names)):
        lines[function.body[0].end_lineno:function.end_lineno] = ['    raise NotImplementedError\n']
    return ''.join(lines)


def prune(text, words):
    """A file of tests with those whose name has one of the words, and with the statements that define what they use"""
    lines = text.splitlines(keepends=True)
    body = ast.parse(text).body
    ends = [0, *(node.end_lineno for node in body)]
    sources = {node: ''.join(lines[start:node.end_lineno]) for start, node in zip(ends, body)}
    symbols = {node: symtable(source, '', 'exec').get_symbols() for node, source in sources.items()}
    defined = {node: {symbol.get_name() for symbol in symbols[node] if symbol.is_assigned() or symbol.is_imported()}
               for node in body}
    keep = body[:1] + [node for node in body if getattr(node, 'name', '').startswith('test_')
                       and any(word in node.name for word in words)]
    for node in keep:                               # it grows on the way; fixtures are named by arguments
        used = {getattr(part, 'id', getattr(part, 'arg', '')) for part in ast.walk(node)}
        keep += [other for other in body if other not in keep and defined[other] & used]
    return ''.join(source for node, source in sources.items() if node in keep)


def source(path):
    """The text of a file of the project, or of a script of the course, which a hand-out has beside the others"""
    place = ROOT / path
    return (place if place.exists() else ROOT / 'tests/course' / path).read_text()


def local(text):
    """The files of the project that a file imports"""
    return [path for name in re.findall(r'(?m)^ *(?:from|import) (\w+)', text)
            for path in (f'{name}.py', f'tests/{name}.py') if (ROOT / path).exists()]


def solutions_in(path, names):
    """The functions of a script that hold a solution of one of these exercises"""
    return {function for name in names for function in EXERCISES[name].solutions.get(path, '').split()}


def with_imports(paths, text_of):
    """{path: text} of these files and of all that they import; text_of(path) is what a file holds"""
    paths = list(paths)
    files = {}
    for path in paths:                              # it grows on the way
        if path not in files:
            files[path] = text_of(path)
            paths += local(files[path])
    return files


def handout(names):
    """{path: text} of the files for these exercises: tests, scripts that they need, and what these import"""
    exercises = [EXERCISES[name] for name in names]

    def text_of(path):
        words = [word for e in exercises if path == e.tests for word in e.graded.split(' or ')]
        return prune(source(path), words) if words else cut(source(path), solutions_in(path, names))
    return with_imports(['tests/conftest.py', *(path for e in exercises for path in (e.script, e.tests))], text_of)


PAGE = """# Exercises

Write the bodies of these functions again. Their docstrings say what goes in and what comes out, and the top
of each script has the equations and the symbols. Helpers of your own may stand beside them; all else stays
as it is. Hand in the whole script. Level 1 is a formula, level 2 has masks and special cases as well, and
level 3 also limits on memory, or many rules.

| exercise | write | from | level | minutes | tests |
|---|---|---|---|---|---|
{rows}

Begin with `pip install -r requirements.txt`. The tests fail until the functions are written:
`python -m pytest` runs all of them. A test that fails names equation and input, and says what was expected.

What holds for every loss: classes may have any numbers and come in any order; the order of the images does not
matter; arguments stay as they are; half precision is raised to float32, and float64 stays; and the backward pass
ends in finite gradients, also where the loss is 0, the batch has one class or one image, or images are equal.

Each test is a point, whatever its number of parameters: all of them have to pass. A test may take {seconds} seconds,
and all together {limit}; what has passed by then counts.
"""


FLAWED = """# Find the mistake

In each of these scripts one function is wrong; all else is as it should be. Read it beside its docstring, the equations
at the top of the script, and the paper. Say in a sentence what is wrong, and for which input it shows. Mend the
function, and hand in the whole script.

| script | one of these functions is wrong | from | minutes |
|---|---|---|---|
{rows}

Begin with `pip install -r requirements.txt`. Tests are not in this folder: write one that fails before you mend.
"""


def flawed(names, seed):
    """{path: text} of whole scripts, each with a wrong solution in place of the right one. Those that change lines are
    taken; one that comes as a function of its own would show by its style."""
    from solutions import WRONG
    exercises = {name: EXERCISES[name] for name in names}
    if len({e.script for e in exercises.values()}) < len(names):
        raise SystemExit('error: two of these exercises are in one script, and a script gets one mistake')
    drawn = random.Random(seed)
    scripts = {}
    for name, e in exercises.items():
        mistakes = [mistake for mistake in WRONG[name].values() if not isinstance(mistake, str)]
        scripts[e.script] = hand_in(source(e.script), e.cut.split(), drawn.choice(mistakes))
    rows = [f'| `{e.script}` | {e.functions} | {e.source} | {e.minutes} |' for e in exercises.values()]
    return (with_imports(scripts, lambda path: scripts.get(path) or source(path))
            | {'README.md': FLAWED.format(rows='\n'.join(rows))})


def page(names):
    """What the students read about these exercises"""
    rows = []
    for name in names:
        e = EXERCISES[name]
        rows.append(f'| {name} | `{e.script}`: {e.functions} | {e.source} | {e.level} | {e.minutes} | '
                    f'`python -m pytest {e.tests} -k "{e.graded}"` |')
    return PAGE.format(rows='\n'.join(rows), seconds=LIMIT_OF_A_TEST, limit=LIMIT)


def make(out, names, seed=None):
    if Path(out).is_file() or Path(out).is_dir() and any(Path(out).iterdir()):
        raise SystemExit(f'error: {out} exists and is not empty')
    if Path(out).resolve().is_relative_to(ROOT):
        print(f'note: {out} lies in the project, whose own tests pytest cannot run beside it: take ../{Path(out).name}')
    files = flawed(names, seed) if seed is not None else handout(names) | {'README.md': page(names)}
    files |= {name: (ROOT / name).read_text() for name in ('requirements.txt', 'LICENSE')}
    write(out, files)
    print(f'{out}: {", ".join(sorted(files))}')


def write(folder, files):
    for path, text in files.items():
        Path(folder, path).parent.mkdir(parents=True, exist_ok=True)
        Path(folder, path).write_text(text)


# ---- running the tests


class Record:
    """A plugin of pytest that sends (test, '' or what went wrong) of each test when it ends, and puts a limit on it"""

    def __init__(self, send, seconds):
        self.send, self.seconds, self.broken = send, seconds, ''

    def pytest_collectreport(self, report):
        if report.failed:
            self.broken = report.longreprtext.strip().splitlines()[-1].removeprefix('E').strip()

    def pytest_internalerror(self, excinfo):        # sys.exit at the top of a script, for example
        self.broken = f'{type(excinfo.value).__name__}: {excinfo.value}'

    def pytest_runtest_setup(self, item):
        signal.signal(signal.SIGALRM, self.stop)
        signal.alarm(self.seconds)

    def stop(self, *_):
        raise TimeoutError(f'no end after {self.seconds} seconds')

    def pytest_runtest_logreport(self, report):
        if report.when == 'teardown':
            signal.alarm(0)
        if report.when == 'call' or report.failed:
            crash = getattr(report.longrepr, 'reprcrash', None)
            reason = crash.message if crash else str(report.longrepr)
            # What pytest adds to a text of ours is code of the test.
            reason = re.split(r'\n\s*assert ', reason)[0].removeprefix('AssertionError: ')
            self.send((report.nodeid.split('::')[-1], '' if report.passed else reason or 'AssertionError'))


def run_tests(folder, arguments, sender, seconds):
    """In a process of its own: the tests of a folder, in silence. Sends a pair for each, and (None, why) at the end."""
    os.setpgid(0, 0)                                # so that all that is started from here can be ended
    os.environ['PYTEST_DISABLE_PLUGIN_AUTOLOAD'] = '1'
    os.chdir(folder)
    sys.path[:] = [path for path in sys.path if not Path(path).resolve().is_relative_to(ROOT)]
    import pytest
    gc.freeze()                                     # pytest collects garbage, and torch has much to look through
    record = Record(sender.send, seconds)
    sys.stdout = sys.stderr = open(os.devnull, 'w')
    code = pytest.main([*arguments, '-q', '-p', 'no:cacheprovider', '--rootdir', folder], plugins=[record])
    sender.send((None, record.broken or f'pytest ended with code {int(code)}'))


def results(exercise, files, script, *options):
    """({test: '' or what went wrong}, why there are no more) where the exercise's script holds these bytes"""
    # On Linux, processes are forked from one that has torch already, which takes a tenth of the time.
    context = multiprocessing.get_context('forkserver' if sys.platform == 'linux' else 'spawn')
    context.set_forkserver_preload(['pytest', 'torch', 'torchvision.transforms.v2'])
    with tempfile.TemporaryDirectory() as folder:
        write(folder, files)
        Path(folder, exercise.script).write_bytes(script)
        receiver, sender = context.Pipe(duplex=False)
        arguments = [exercise.tests, '-k', exercise.graded, *options]
        given = folder, arguments, sender, LIMIT_OF_A_TEST
        process = context.Process(target=run_tests, args=given, daemon=True)
        process.start()
        sender.close()
        end = time.monotonic() + LIMIT
        tests = {}
        why = f'no end after {LIMIT} seconds'
        try:
            while receiver.poll(max(0, end - time.monotonic())):
                test, reason = receiver.recv()
                if test is None:
                    why = '' if tests else reason
                    break
                tests[test] = reason
        except EOFError:
            why = 'the process ended early'
        with suppress(OSError):                     # it ended by itself
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.join()
        return tests, why


def equation_of(test, name):
    """The equation that a test is about, by its name; that of the exercise where it names none"""
    return (re.match(r'test_([a-z]+_eq\d+)_', test) or ['', name])[1]


def scripts_in(paths, script):
    """Files as they are; of a folder the scripts of this name, at any depth, or else its .py files"""
    for path in map(Path, paths):
        yield from (sorted(path.rglob(script)) or sorted(path.glob('*.py'))) if path.is_dir() else [path]


def grade(name, paths, table=None, feedback=None):
    """Prints the points of each file. A graded test is a point, if it passes with all of its parameters."""
    exercise = EXERCISES[name]
    files = handout([name])
    every, why = results(exercise, files, source(exercise.script).encode())
    if why or any(every.values()):
        raise SystemExit(f'error: the project itself fails: {why or next(filter(None, every.values()))}')
    functions = list(dict.fromkeys(test.split('[')[0] for test in every))
    paths = list(scripts_in(paths, exercise.script))
    rows = []
    with ThreadPoolExecutor(2) as pool:
        scripts = [path.read_bytes() for path in paths]
        for path, (tests, why) in zip(paths, pool.map(partial(results, exercise, files), scripts)):
            failed = {test: tests.get(test, why or 'not run') for test in every}
            failed = {test: reason for test, reason in failed.items() if reason}
            right = [function for function in functions
                     if not any(test.split('[')[0] == function for test in failed)]
            points = Counter(equation_of(function, name) for function in right)
            of = Counter(equation_of(function, name) for function in functions)
            if not right and not why:               # one reason may be behind all
                why = Counter(reason.strip().splitlines()[-1] for reason in failed.values()).most_common(1)[0][0]
            print(f'{path}: ' + ', '.join(f'{equation} {points[equation]}/{of[equation]}' for equation in of)
                  + f', in all {len(right)}/{len(functions)}{why and f" ({why})"}', flush=True)
            rows += [[path, name, equation, points[equation], of[equation]] for equation in of]
            if feedback:
                write_feedback(Path(feedback), path, name, f'{len(right)} of {len(functions)} points', failed)
    if table:
        with open(table, 'w', newline='') as file:
            csv.writer(file).writerows([['file', 'exercise', 'equation', 'points', 'of'], *rows])


def write_feedback(folder, path, name, points, failed):
    """A text about one file: of each test that failed its name, its equation, and what was expected"""
    folder.mkdir(parents=True, exist_ok=True)
    parts = [f'{name}: {points}']
    for test, reason in failed.items():
        parts.append(f'{test}  ({equation_of(test, name)})\n    ' + reason.strip().replace('\n', '\n    '))
    text = folder / ('-'.join(part for part in path.with_suffix('').parts if part not in ('/', '..')) + '.txt')
    text.write_text('\n\n'.join(parts) + '\n')


def hand_in(text, names, solution):
    """A script with a solution: the source of functions, or pairs (old, new) that change one line of the project's"""
    if isinstance(solution, str):
        if not functions_of(solution, names):
            raise ValueError(f'none of {", ".join(names)} is written here: {solution}')
        return f'{text}\n\n{solution}'              # Python takes the later definition
    lines = text.splitlines(keepends=True)
    bodies = [''.join(lines[node.body[0].end_lineno:node.end_lineno]) for node in functions_of(text, names)]
    changed = bodies
    for old, new in zip(solution[::2], solution[1::2]):
        if sum(body.count(old) for body in changed) != 1:
            raise ValueError(f'{old!r} does not stand once in {", ".join(names)}')
        changed = [body.replace(old, new) for body in changed]
    for body, other in zip(bodies, changed):
        text = text.replace(body, other)
    return text


def check(names, verbose=0):
    """Whether all graded tests fail on what is cut, at least one on each wrong solution, and none on the others, where
    all other exercises are cut. Returns how many solutions are not as they should be."""
    from solutions import RIGHT, WRONG
    files = handout(list(EXERCISES))
    jobs = []
    bad = 0
    for name in names:
        exercise = EXERCISES[name]
        own = exercise.cut.split()
        whole = cut(source(exercise.script), solutions_in(exercise.script, EXERCISES) - {*own})
        jobs += [(name, 'cut', files[exercise.script]), (name, 'whole', whole)]
        for kind, solutions in ('right', RIGHT), ('wrong', WRONG):
            jobs += [(name, f'{kind}: {what}', hand_in(whole, own, s)) for what, s in solutions[name].items()]

    def run(job):
        name, what, text = job
        return results(EXERCISES[name], files, text.encode(), *['-x'] * what.startswith('wrong'))
    with ThreadPoolExecutor(2) as pool:
        for (name, what, _), (tests, why) in zip(jobs, pool.map(run, jobs)):
            failed = {test: text for test, text in tests.items() if text}
            if what == 'cut':
                good = len(failed) == len(tests) > 0
            else:
                good = bool(failed) if what.startswith('wrong') else not failed and not why
            bad += not good
            test, reason = next(iter(failed.items()), ('', ''))
            if verbose or not good:
                how = why or f'{len(failed)} of {len(tests)} tests fail {test}'
                print(f'{"ok " if good else "BAD"} {name}, {what}: {how}')
            if reason and (verbose > 1 or not good):
                print(reason)
    print(f'{len(names)} exercises, {sum("wrong" in job[1] for job in jobs)} wrong solutions, '
          f'{sum("right" in job[1] for job in jobs)} right ones: {bad} not as they should be')
    return bad


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest='command', required=True)
    commands.add_parser('list')
    command = commands.add_parser('make')
    command.add_argument('out', metavar='OUT')
    command.add_argument('names', metavar='NAME', nargs='+')
    command.add_argument('--flawed', type=int, metavar='SEED', help='whole scripts, each with a mistake to be found')
    command = commands.add_parser('grade')
    command.add_argument('names', metavar='NAME', nargs=1)
    command.add_argument('files', metavar='FILE', nargs='+')
    command.add_argument('--csv', metavar='FILE', help='file, exercise, equation, points, of')
    command.add_argument('--feedback', metavar='DIR', help='a text for each file: which tests failed, and why')
    command = commands.add_parser('check')
    command.add_argument('names', metavar='NAME', nargs='*')
    command.add_argument('-v', action='count', default=0, help='a line for each solution; twice: and why it fails')
    args = parser.parse_args(argv)
    os.environ['OMP_NUM_THREADS'] = '1'             # for the processes to come: two at a time, each on one core
    if args.command == 'list':
        for name, exercise in EXERCISES.items():
            print(f'{name:28} level {exercise.level} {exercise.minutes:4} minutes  {exercise.source}')
        return False
    for name in args.names:
        if name not in EXERCISES:
            parser.exit(2, f'error: {name} is no exercise; these are: {", ".join(EXERCISES)}\n')
    if args.command == 'make':
        make(args.out, args.names, args.flawed)
    elif args.command == 'grade':
        if missing := [path for path in args.files if not Path(path).exists()]:
            parser.exit(2, f'error: no such file: {missing[0]}\n')
        grade(args.names[0], args.files, args.csv, args.feedback)
    else:
        return check(args.names or list(EXERCISES), args.v) > 0


if __name__ == '__main__':
    sys.exit(main())
