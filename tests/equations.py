"""Finds the lines that compute an equation of a paper, and its tests.

    python tests/equations.py               # all numbered equations of the five papers
    python tests/equations.py metrix        # those of one paper: rc, pa, metrix, ccl, hse
    python tests/equations.py metrix 24     # one equation: formula, lines, and tests with their source
    python tests/equations.py --page        # writes the same, typeset, to tests/papers/README.md
    python -m pytest -k metrix_eq24_        # runs its tests; "_" at the end excludes longer numbers

rc is A Metric Learning Reality Check, pa Proxy-Anchor. A line computes an equation if its comment, or a comment above
it, has `Eq. (n)`; docstrings do not count. Tests are found by their names. An equation belongs to the paper named
before it, as in `Metrix Eq. (4)`, or else to the paper that the docstring of the file names first. The formulas are in
tests/papers/formulas.txt.
"""
import argparse
import ast
import re
from functools import cache
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from textwrap import dedent

ROOT = Path(__file__).parents[1]
PAGE = ROOT / 'tests/papers/README.md'
NAMED = re.compile(r'([A-Z][\w+]*(?:[ -][A-Z][\w+]*)*)\s+Eq\. \(')
COMMENT = re.compile(r'(?m)(?:^ *#.*\n)+|#.*')     # all lines of a comment: a name and `Eq.` may be on two


def key(name):
    """CCL -> ccl, Reality Check -> rc, Proxy-Anchor -> pa"""
    parts = re.findall('[A-Za-z]+', name)
    return (parts[0] if len(parts) == 1 else ''.join(part[0] for part in parts)).lower()


@cache
def heads():
    """{file: docstring} of the scripts, of the exercise, and of the script that measures Eq. (25) of Metrix"""
    others = ['common.py', 'eval.py', 'tests/course/train_triplet.py', 'tests/results/fig2.py']
    files = [*others, *(path.name for path in sorted(ROOT.glob('train_*.py')))]
    return {file: ast.get_docstring(ast.parse((ROOT / file).read_text())) or '' for file in files}


def cited(text, file):
    """{(paper, number)} in a text: `Eq. (2), (4)` and `Eq. (2) and (4)` are two, `Eq. (2) to (4)` are three."""
    found, own = set(), NAMED.findall(heads()[file])[:1]
    names = '|'.join(sorted({name for head in heads().values() for name in NAMED.findall(head)}))
    pattern = rf"(?:({names})(?:'s)?\s+)?Eqs?\. (\(\d+\)(?:(?:, | and |/| to |-)\(\d+\))*)"
    for name, listed in re.findall(pattern, text):
        for low, high in re.findall(r'\((\d+)\)(?:(?: to |-)\((\d+)\))?', listed):
            found |= {(key(paper), n) for paper in ([name] if name else own)
                      for n in range(int(low), int(high or low) + 1)}
    return found


@cache
def lines():
    """{(paper, number): [(file, line, function, statement)]}: the statements whose comments have this equation"""
    found = {}
    for file in heads():
        source = (ROOT / file).read_text()
        tree = ast.parse(source)
        statements = [node for node in ast.walk(tree) if isinstance(node, ast.stmt)]
        for comment in COMMENT.finditer(source, sum(map(len, source.splitlines(True)[:tree.body[0].end_lineno]))):
            first = source.count('\n', 0, comment.start()) + 1
            line = first + comment[0].count('\n')           # of the statement below, if the comment has its own lines
            around = sorted((node for node in statements if node.lineno <= line <= node.end_lineno),
                            key=lambda node: node.lineno)
            for equation in cited(re.sub(r'\n *# *', ' ', comment[0]), file) if around else ():
                function = next((node.name for node in around if isinstance(node, ast.FunctionDef)), '')
                text = '\n'.join(source.splitlines()[min(first, around[-1].lineno) - 1:around[-1].end_lineno][:8])
                found.setdefault(equation, []).append((file, around[-1].lineno, function, text))
    return {equation: list(dict.fromkeys(places)) for equation, places in found.items()}


@cache
def tests():
    """{(paper, number): [(file, line, source)]}: test_ccl_eq12_and_ccl_eq13_... is a test of two equations"""
    found = {}
    for path in sorted((ROOT / 'tests').rglob('test_*.py')):
        text = path.read_text()
        for node in ast.parse(text).body:
            equations = re.findall(r'(?:test|and)_([a-z]+)_eq(\d+)_', getattr(node, 'name', ''))
            if equations:
                start = min(part.lineno for part in [node, *node.decorator_list])
                source = '\n'.join(text.splitlines()[start - 1:node.end_lineno])
                for paper, number in equations:
                    found.setdefault((paper, int(number)), []).append((str(path.relative_to(ROOT)), start, source))
    return found


@cache
def formulas():
    """({paper: [title, authors, address]}, {(paper, number): (name, TeX, letters, why no line computes it)})"""
    papers, found = {}, {}
    for entry in PAGE.with_name('formulas.txt').read_text().split('\n\n')[1:]:
        if entry.startswith('# '):
            paper, *papers[paper] = entry[2:].split(' | ')
            continue
        first, *lines = entry.strip().splitlines()
        (paper, number), name = first.split(': ')[0].split(), first.split(': ', 1)[1]
        more = dict(line.split(': ', 1) for line in lines if line.startswith(('code: ', 'why: ')))
        tex = '\n'.join(line for line in lines if not line.startswith(('code: ', 'why: ')))
        found[paper, int(number)] = name, tex, more.get('code', ''), more.get('why', '')
    return papers, found


def where(places):
    """file:line,line of each file"""
    files = groupby(places, itemgetter(0))
    return ' '.join(f'{file}:{",".join(str(line) for _, line, *_ in group)}' for file, group in files)


def section(number):
    """An equation on the page"""
    name, tex, letters, why = formulas()[1][number]
    yield f'### Eq. ({number[1]}): {name}\n\n```math\n{tex}\n```\n'
    if letters:
        yield f'{letters}\n'
    if why:
        yield f'No line computes it: {why}.\n'
    for (file, function), places in groupby(lines().get(number, []), itemgetter(0, 2)):
        _, at, _, texts = zip(*places)
        links = ', '.join(f'[{line}](../../{file}#L{line})' for line in at)
        code = '\n'.join(re.sub(r'(?<=\S) {3,}#', '  #', dedent(text)) for text in texts)
        yield f'`{function}` in {file}, line {links}:\n\n```python\n{code}\n```\n'
    found = []
    for file, line, source in tests().get(number, []):
        test = re.sub('((test|and)_[a-z]+_eq[0-9]+_)+', '', re.search('def (test_.*?)[(]', source)[1])
        found.append(f'[{test.replace("_", " ")}](../../{file}#L{line})')
    if found:
        yield f'Tests: {", ".join(found)}.\n'


def page():
    """The text of tests/papers/README.md"""
    papers, found = formulas()
    computed = len(found.keys() & lines().keys())
    text = ['# The equations of the papers, their lines and their tests\n',
            f'{len(found)} numbered equations. Lines compute {computed} of them; for the other {len(found) - computed} '
            'there is a reason why not. $[t]_+$ is $\\max(0, t)$. Other letters have the same name in the code. '
            '`python tests/equations.py --page` writes this page.\n',
            ', '.join(f'[{title}](#{re.sub("[^a-z -]", "", title.lower()).replace(" ", "-")})'
                      for title, *_ in papers.values()) + '\n', PAGE.with_name('letters.md').read_text()]
    for paper, (title, authors, link) in papers.items():
        text.append(f'## {title}\n\n[{authors}]({link}). `python -m pytest -k {paper}_eq` runs its tests.\n')
        text += [part for number in found if number[0] == paper for part in section(number)]
    return '\n'.join(text)


def main(argv=None):
    papers, found = formulas()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('paper', nargs='?', choices=list(papers))
    parser.add_argument('number', nargs='?', type=int)
    parser.add_argument('--page', action='store_true', help=f'writes {PAGE.relative_to(ROOT)}')
    args = parser.parse_args(argv)
    if args.page:
        PAGE.write_text(page())
    elif args.number is None:
        for (paper, number), (name, _, _, why) in found.items():
            if args.paper in (None, paper):
                print(f'{paper:6} ({number:2})  {name:38}  {where(lines().get((paper, number), [])) or why}')
                if tested := tests().get((paper, number)):
                    print(' ' * 54 + where(tested))
    elif (args.paper, args.number) not in found:
        parser.error(f'{args.paper} has no equation ({args.number})')
    else:
        number = args.paper, args.number
        name, tex, _, why = found[number]
        print(f'{args.paper} ({args.number}): {name}' + (f'; no line computes it: {why}' if why else ''), tex, sep='\n')
        for file, line, *_, text in lines().get(number, []) + tests().get(number, []):
            print(f'\n{file}:{line}\n{text}')


if __name__ == '__main__':
    main()
