"""Makes the folder that students get: scripts without the bodies of functions, tests, and a page."""
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
    """Lines as Python counts them, each with its end"""
    return io.StringIO(text).readlines()


@lru_cache(100)
def parsed(text):
    return ast.parse(text)


def functions_of(text, names):
    """The functions with these names, as nodes from top to bottom"""
    return [node for node in parsed(text).body if getattr(node, 'name', '') in names]


def cut(text, names):
    """Replaces the bodies of functions; docstrings stay."""
    lines = lines_of(text)
    for function in reversed(functions_of(text, names)):
        lines[function.body[0].end_lineno:function.end_lineno] = ['    raise NotImplementedError\n']
    return ''.join(lines)


def prune(text, words):
    """A file of tests with those whose name has one of the words, and with the statements that define what they use"""
    lines = lines_of(text)
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


def still_to_come(names):
    """The other exercises of the same week as the first of these, or of later ones"""
    week = min(EXERCISES[name].week for name in names)
    return [name for name, e in EXERCISES.items() if e.week >= week and name not in names]


def handout(names, keep=False):
    """{path: text} of the files for these exercises: tests, scripts that they need, and what these import. What is
    still to come in the course is cut as well, unless it is kept."""
    exercises = [EXERCISES[name] for name in names]
    hidden = [*names, *([] if keep else still_to_come(names))]

    def text_of(path):
        words = [word for e in exercises if path == e.tests for word in e.graded.split(' or ')]
        return prune(source(path), words) if words else cut(source(path), solutions_in(path, hidden))
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
{others}
What holds for every loss: classes may have any numbers from 0 on and come in any order; the order of the images
does not matter; arguments stay as they are; half precision is upcast to float32, and float64 stays; and the
backward pass ends in finite gradients, also where the loss is 0, the batch has one class or one image, or images
are equal.

Each test is a point, whatever its number of parameters: all of them have to pass. A test may take {seconds} seconds,
and all together {limit}; what has passed by then counts. One more point is for values and gradients on random inputs
of other sizes, types and hyper-parameters, which have to be those of the original. Worked examples are the tests
that are named `by_hand` or `closed_form_gradient`: where an equation has some, and none passes, what was written is
another equation, and each sum of all the other tests counts half, rounded down.
"""

OTHERS = """
More functions end in `raise NotImplementedError`: {names}. They belong to other exercises.
Leave them as they are; where a graded test needs one, it is there when the points are counted.
"""

FLAWED = """# Find the mistake

In each of these scripts one function is wrong; everything else is right. Read it next to its docstring and the paper.
Say in a sentence what is wrong, and for which input it shows. Correct the function, and submit the script.

| script | one of these functions is wrong | from | minutes |
|---|---|---|---|
{rows}

Begin with `pip install -r requirements.txt`. Tests are not in this folder: write one that fails before you mend.
"""


def page(names, files):
    """What the students read about these exercises, in a folder of these files"""
    rows = []
    own = set()
    for name in names:
        e = EXERCISES[name]
        own |= {*e.cut.split()}
        rows.append(f'| {name} | `{e.script}`: {e.functions} | {e.source} | {e.level} | {e.minutes} | '
                    f'`python -m pytest {e.tests} -k "{e.graded}"` |')
    others = [node.name for path, text in files.items() if path.endswith('.py') for node in parsed(text).body
              if isinstance(node, ast.FunctionDef) and node.name not in own
              and ast.unparse(node.body[-1]) == 'raise NotImplementedError']
    others = OTHERS.format(names=', '.join(f'`{name}`' for name in dict.fromkeys(others))) if others else ''
    return PAGE.format(rows='\n'.join(rows), seconds=LIMIT_OF_A_TEST, limit=LIMIT, others=others)


def hand_in(text, names, solution):
    """A script with a solution: the source of functions, or pairs (old, new) that change one line of the project's"""
    if isinstance(solution, str):
        if not functions_of(solution, names):
            raise ValueError(f'none of {", ".join(names)} is written here: {solution}')
        return f'{text}\n\n{solution}'              # Python takes the later definition
    lines = lines_of(text)
    bodies = [''.join(lines[node.body[0].end_lineno:node.end_lineno]) for node in functions_of(text, names)]
    changed = bodies
    for old, new in zip(solution[::2], solution[1::2]):
        if sum(body.count(old) for body in changed) != 1:
            raise ValueError(f'{old!r} does not stand once in {", ".join(names)}')
        changed = [body.replace(old, new) for body in changed]
    for body, other in zip(bodies, changed):
        text = text.replace(body, in_shape(body, other))
    return text


COMMENT = re.compile(r'(.*?)( +)(# .*\n)')


def in_shape(body, changed):
    """A function whose lines were changed, as a person would leave it: comments stay in their columns, and a line that
    has lost its code is gone."""
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
    """What shows in a script that it was changed, beside the mistake: names that are no longer used, branches that are
    never taken, lines that are too long"""
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
    """The wrong solutions that change lines and leave no other traces, as scripts; always in the same random order. One
    that comes as a function of its own would show by its style."""
    from solutions import WRONG
    e = EXERCISES[name]
    original = source(e.script)
    scripts = [hand_in(original, e.cut.split(), s) for s in WRONG[name].values() if isinstance(s, tuple)]
    scripts = [script for script in scripts if not traces(script, original)]
    return random.Random(name).sample(scripts, len(scripts))


def flawed(names, seed):
    """{path: text} of whole scripts, each with a wrong solution in place of the right one"""
    exercises = {name: EXERCISES[name] for name in names}
    if len({e.script for e in exercises.values()}) < len(names):
        raise SystemExit('error: two of these exercises are in one script, and a script gets one mistake')
    scripts = {e.script: mistakes(name)[seed % len(mistakes(name))] for name, e in exercises.items()}
    rows = [f'| `{e.script}` | {e.functions} | {e.source} | {e.minutes} |' for e in exercises.values()]
    return (with_imports(scripts, lambda path: scripts.get(path) or source(path))
            | {'README.md': FLAWED.format(rows='\n'.join(rows))})


def make(out, names, seed=None, keep=False):
    if Path(out).is_file() or Path(out).is_dir() and any(Path(out).iterdir()):
        raise SystemExit(f'error: {out} exists and is not empty')
    if Path(out).resolve().is_relative_to(ROOT):
        print(f'note: {out} lies in the project, whose own tests pytest cannot run beside it: take ../{Path(out).name}')
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
