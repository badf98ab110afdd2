"""Makes the starter code for students: scripts with stubbed-out functions, tests, and a README."""
import ast
import io
import random
import re
from functools import cache, lru_cache
from pathlib import Path
from symtable import symtable

from exercises import EXERCISES, ROOT

# Seconds for all tests of one file, and for one of them
LIMIT = 120
LIMIT_OF_A_TEST = 40


def lines_of(text):
    """Lines as counted by Python, with line endings"""
    return io.StringIO(text).readlines()


@lru_cache(100)
def parsed(text):
    return ast.parse(text)


def functions_of(text, names):
    """ast nodes of the top-level functions with these names"""
    return [node for node in parsed(text).body if getattr(node, 'name', '') in names]


def stub_out(text, names):
    """Replaces the bodies of functions by `raise NotImplementedError`; keeps docstrings."""
    lines = lines_of(text)
    for function in reversed(functions_of(text, names)):
        lines[function.body[0].end_lineno:function.end_lineno] = ['    raise NotImplementedError\n']
    return ''.join(lines)


def prune(text, words):
    """The part of a test file with the tests whose name has one of the words, and the definitions that they use"""
    lines = lines_of(text)
    body = ast.parse(text).body
    ends = [0, *(node.end_lineno for node in body)]
    sources = {node: ''.join(lines[start:node.end_lineno]) for start, node in zip(ends, body)}
    symbols = {node: symtable(source, '', 'exec').get_symbols() for node, source in sources.items()}
    defined = {node: {symbol.get_name() for symbol in symbols[node] if symbol.is_assigned() or symbol.is_imported()}
               for node in body}
    keep = body[:1] + [node for node in body if getattr(node, 'name', '').startswith('test_')
                       and any(word in node.name for word in words)]
    for node in keep:                               # grows during the loop; arguments are names of fixtures
        used = {getattr(part, 'id', getattr(part, 'arg', '')) for part in ast.walk(node)}
        keep += [other for other in body if other not in keep and defined[other] & used]
    return ''.join(source for node, source in sources.items() if node in keep)


def source(path):
    """The text of a file of the project, or of a script of the course, which starter code has at the top level"""
    place = ROOT / path
    return (place if place.exists() else ROOT / 'tests/course' / path).read_text()


def local(text):
    """The files of the project that a file imports"""
    return [path for name in re.findall(r'(?m)^ *(?:from|import) (\w+)', text)
            for path in (f'{name}.py', f'tests/{name}.py') if (ROOT / path).exists()]


def solutions_in(path, names):
    """The functions of a script that contain a solution of one of these exercises"""
    return {function for name in names for function in EXERCISES[name].solutions.get(path, '').split()}


def with_imports(paths, text_of):
    """{path: text} of these files and of all project files that they import; text_of(path) is the text of a file"""
    paths = list(paths)
    files = {}
    for path in paths:                              # grows during the loop
        if path not in files:
            files[path] = text_of(path)
            paths += local(files[path])
    return files


def later_exercises(names):
    """The other exercises of the first week among these, and of later weeks"""
    week = min(EXERCISES[name].week for name in names)
    return [name for name, e in EXERCISES.items() if e.week >= week and name not in names]


def handout(names, keep=False):
    """{path: text} of the starter code for these exercises: tests, scripts, and their imports. Exercises of the same
    and of later weeks are stubbed out, too, unless `keep`."""
    exercises = [EXERCISES[name] for name in names]
    hidden = [*names, *([] if keep else later_exercises(names))]

    def text_of(path):
        words = [word for e in exercises if path == e.tests for word in e.graded.split(' or ')]
        return prune(source(path), words) if words else stub_out(source(path), solutions_in(path, hidden))
    return with_imports(['tests/conftest.py', *(path for e in exercises for path in (e.script, e.tests))], text_of)


PAGE = """# Exercises

Write the bodies of these functions. Their docstrings describe arguments and results, and the top of each script
has the symbols. You may add helper functions; do not change anything else. Submit the whole script. Level 1 is a
formula, level 2 also has masks and special cases, and level 3 also has limits on memory, or many rules.

| exercise | write | from | level | minutes | tests |
|---|---|---|---|---|---|
{rows}

First run `pip install -r requirements.txt`. The tests fail until the functions are written: `python -m pytest`
runs all of them. The message of a failed test has the equation, the input and the expected value.
{others}
Requirements on every loss: class labels may be any integers >= 0, in any order; the order of the images does not
matter; arguments are not modified; half precision is upcast to float32, and float64 stays float64; gradients are
finite, even if the loss is 0, the batch has one class or one image, or images are equal.

Each test function gives a point, if it passes for all its parameters. A test may take {seconds} seconds, and all
tests together {limit}; those that have passed by then count. One more point is for random inputs of other sizes, types
and hyper-parameters, on which values and gradients must equal those of the original. Worked examples are the tests
named `by_hand` or `closed_form_gradient`. If an equation has worked examples and none passes, the formula is wrong,
and the remaining tests of this equation count half, rounded down.
"""

OTHERS = """
More functions end in `raise NotImplementedError`: {names}. They belong to other exercises.
Do not change them: if a graded test needs one, the grading uses the original.
"""

FLAWED = """# Find the mistake

In each of these scripts one function is wrong; everything else is right. Compare it with its docstring and the paper.
State in one sentence what is wrong, and for which input it makes a difference. Correct the function, and submit the
script.

| script | one of these functions is wrong | from | minutes |
|---|---|---|---|
{rows}

First run `pip install -r requirements.txt`. This folder has no tests: write one that fails, then correct the function.
"""


def page(names, files):
    """The README of starter code with these exercises and files"""
    rows = []
    to_write = set()
    for name in names:
        e = EXERCISES[name]
        to_write |= {*e.stubbed.split()}
        rows.append(f'| {name} | `{e.script}`: {e.functions} | {e.source} | {e.level} | {e.minutes} | '
                    f'`python -m pytest {e.tests} -k "{e.graded}"` |')
    others = [node.name for path, text in files.items() if path.endswith('.py') for node in parsed(text).body
              if isinstance(node, ast.FunctionDef) and node.name not in to_write
              and ast.unparse(node.body[-1]) == 'raise NotImplementedError']
    others = OTHERS.format(names=', '.join(f'`{name}`' for name in dict.fromkeys(others))) if others else ''
    return PAGE.format(rows='\n'.join(rows), seconds=LIMIT_OF_A_TEST, limit=LIMIT, others=others)


def with_solution(text, names, solution):
    """A script with a solution: the source of functions, or pairs (old, new) that change lines of the original"""
    if isinstance(solution, str):
        if not functions_of(solution, names):
            raise ValueError(f'none of {", ".join(names)} is defined in: {solution}')
        return f'{text}\n\n{solution}'              # the later definition is used
    lines = lines_of(text)
    bodies = [''.join(lines[node.body[0].end_lineno:node.end_lineno]) for node in functions_of(text, names)]
    changed = bodies
    for old, new in zip(solution[::2], solution[1::2]):
        if sum(body.count(old) for body in changed) != 1:
            raise ValueError(f'{old!r} does not occur once in {", ".join(names)}')
        changed = [body.replace(old, new) for body in changed]
    for body, other in zip(bodies, changed):
        text = text.replace(body, in_shape(body, other))
    return text


COMMENT = re.compile(r'(.*?)( +)(# .*\n)')


def in_shape(body, changed):
    """A changed function, formatted as by hand: comments keep their columns, and lines without code are removed."""
    places = [(number, match) for number, match in enumerate(map(COMMENT.fullmatch, lines_of(body))) if match]
    lines = []
    for number, line in enumerate(lines_of(changed)):
        match = COMMENT.fullmatch(line)
        same = [(abs(number - n), other.start(3)) for n, other in places if match and other[3] == match[3]]
        if same and match[1].strip():
            line = f'{match[1]}{" " * max(2, min(same)[1] - len(match[1]))}{match[3]}'
        lost = line != '\n' and not re.sub('#.*', '', line).strip() and line not in lines_of(body)
        lines += [] if lost else [line]
    return ''.join(lines)


def traces(text, original):
    """Signs in a script, other than the mistake, that it was changed: unused names, branches that are never taken,
    lines that are too long"""
    return signs(text) - signs(original)


@lru_cache(100)
def signs(text):
    tree = parsed(text)
    nodes = [*ast.walk(tree)]
    found = {line for line in lines_of(text) if len(line) > 121}
    found |= {ast.unparse(node) for node in nodes if isinstance(node, (ast.If, ast.IfExp))
              and isinstance(node.test, ast.Constant)}
    for function in [node for node in tree.body if isinstance(node, ast.FunctionDef)]:
        inside = [*ast.walk(function)]
        names = [node for node in inside if isinstance(node, ast.Name)]
        bound = {node.arg for node in inside if isinstance(node, ast.arg)}
        bound |= {node.id for node in names if isinstance(node.ctx, ast.Store)}
        used = {node.id for node in names if isinstance(node.ctx, ast.Load)}
        found |= {f'{function.name}: {name}' for name in bound - used}
        found |= {f'{function.name}: pass' for node in inside if isinstance(node, ast.Pass)}
    called = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    return found | {node.name for node in tree.body if isinstance(node, ast.FunctionDef)} - called


@cache
def mistakes(name):
    """Scripts with the wrong solutions that change lines and leave no other traces, always in the same random order. A
    rewritten function would be recognized by its style."""
    from solutions import WRONG
    e = EXERCISES[name]
    original = source(e.script)
    scripts = [with_solution(original, e.stubbed.split(), s) for s in WRONG[name].values() if isinstance(s, tuple)]
    scripts = [script for script in scripts if not traces(script, original)]
    return random.Random(name).sample(scripts, len(scripts))


def flawed(names, seed):
    """{path: text} of complete scripts, each with a wrong solution instead of the right one"""
    exercises = {name: EXERCISES[name] for name in names}
    if len({e.script for e in exercises.values()}) < len(names):
        raise SystemExit('error: two of these exercises are in one script, and a script has only one mistake')
    scripts = {e.script: mistakes(name)[seed % len(mistakes(name))] for name, e in exercises.items()}
    rows = [f'| `{e.script}` | {e.functions} | {e.source} | {e.minutes} |' for e in exercises.values()]
    return (with_imports(scripts, lambda path: scripts.get(path) or source(path))
            | {'README.md': FLAWED.format(rows='\n'.join(rows))})


def make(out, names, seed=None, keep=False):
    if Path(out).is_file() or Path(out).is_dir() and any(Path(out).iterdir()):
        raise SystemExit(f'error: {out} exists and is not empty')
    if Path(out).resolve().is_relative_to(ROOT):
        print(f'note: {out} is within the project, whose tests pytest would find, too: use ../{Path(out).name}')
    if seed is not None:
        files = flawed(names, seed)
    else:
        files = handout(names, keep)
        files['README.md'] = page(names, files)
    files |= {name: (ROOT / name).read_text() for name in ('requirements.txt', 'LICENSE')}
    write(out, files)
    print(f'{out}: {", ".join(sorted(files))}')


def write(folder, files):
    for path, text in files.items():
        Path(folder, path).parent.mkdir(parents=True, exist_ok=True)
        Path(folder, path).write_text(text)
