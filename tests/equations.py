"""Finds the lines that compute an equation of a paper, and its tests.

    python tests/equations.py               # all numbered equations of the five papers, and of further scripts
    python tests/equations.py metrix        # equations of one paper: rc, pa, metrix, ccl, hse
    python tests/equations.py metrix 24     # one equation: its lines, and its tests with their source
    python -m pytest -k metrix_eq24_        # runs its tests; "_" at the end excludes longer numbers

rc is A Metric Learning Reality Check, pa Proxy-Anchor. Lines are found by `Eq. (n)` in comments
and in docstrings of functions, tests by their names. The name of a paper is the text before an equation in the
docstring of a script, as in `Metrix Eq. (4)`, so a new script needs no entry here.
"""
import argparse
import ast
import re
from functools import cache
from itertools import groupby
from operator import itemgetter
from pathlib import Path

ROOT = Path(__file__).parents[1]

STEP = 'a step towards (24); tested as a property'
REASONING = 'a step of reasoning; tested as a property'
FIG2 = 'measured by tests/results/fig2.py'
# What each equation of the five papers says; if no line computes it, the reason after a bar. Others need no entry.
SAYS = {
    'rc': ['contrastive loss of distances', 'triplet loss | an exercise: tests/course/train_triplet.py',
           'MAP@R of one query', 'precision at a match, else 0'],
    'pa': ['Proxy-NCA', 'Proxy-NCA by log-sum-exp', 'gradient of Proxy-NCA', 'Proxy-Anchor',
           'Proxy-Anchor by softplus', 'gradient of Proxy-Anchor'],
    'metrix': ['contrastive loss of cosines', 'Multi-Similarity', 'generic loss', 'input, feature, embedding mixup',
               'positives have label 1', 'negatives have label 0', 'generic loss with labels',
               'the mixed examples of an anchor', 'mixed loss', 'clean plus w times mixed loss',
               f'probability of acting as positive | {FIG2}', 'utilization', 'mixed loss of positive-negative pairs',
               'mixed contrastive loss', 'mixed Multi-Similarity',
               f'chain rule through the similarity | {REASONING}', f'Eq. (15) for one mixed example | {STEP}',
               f'derivative of Eq. (17) | {STEP}', f'Eq. (18) rearranged | {STEP}',
               f'Eq. (19) without fractions | {STEP}', f'Eq. (20) multiplied out | {STEP}',
               f'Eq. (21) solved for the exponential | {STEP}', f'logarithm of Eq. (22) | {STEP}',
               'threshold of positivity', 'probability of acting as positive'],
    'ccl': ['contrast by a memory bank | earlier work; Eq. (2) is tested to have its form',
            'contrast by centres; squared distance', 'squared distance to the centre of its class',
            'squared distance by the cosine', 'CCL', 'cross-entropy', 'centre loss', 'NSoftmax', 'Proxy-NCA',
            'contrast by similarities', 'large margin',
            f'bounds of a sum of exponentials | {REASONING}', f'bounds of the contrast | {REASONING}',
            'centres as running means'],
    'hse': ['Euclidean distance', 'contrastive loss, squared', 'Mixup of two images',
            'mixed label | left out: a hybrid has no label',
            'Eq. (2) for a hybrid | left out: the paper argues that it has no label',
            'Eq. (2) with mixed labels | left out: this is the approach of Metrix, see train_metrix.py',
            'hard negative of a hybrid', 'easy weak positive of a hybrid', 'hybrid loss', 'sum of both losses',
            'the same with contrastive loss'],
}
# `Metrix Eq. (4)` in the docstring of a script. `Eq. (n)` without a name belongs to the paper that is named first.
NAMED = re.compile(r'([A-Z][\w+]*(?:[ -][A-Z][\w+]*)*)\s+Eq\. \(')
COMMENT = re.compile(r'(?m)(?:^ *#.*\n)+|#.*')     # all lines of a comment: a name and `Eq.` may be on two


def key(name):
    """CCL -> ccl, Reality Check -> rc, Proxy-Anchor -> pa"""
    parts = re.findall('[A-Za-z]+', name)
    return (parts[0] if len(parts) == 1 else ''.join(part[0] for part in parts)).lower()


@cache
def heads():
    """{file: docstring}"""
    files = [ROOT / 'common.py', ROOT / 'eval.py', *sorted(ROOT.glob('train_*.py'))]
    return {path.name: ast.get_docstring(ast.parse(path.read_text())) or '' for path in files}


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
    """{(paper, number): [(file, line, text of the comment or name of the function)]}, in docstrings and comments"""
    found = {}
    for file in heads():
        source = (ROOT / file).read_text()
        tree = ast.parse(source)
        places = [(node.lineno, f'def {node.name}', ast.get_docstring(node) or '') for node in
                  ast.walk(tree) if isinstance(node, ast.FunctionDef)]
        for comment in COMMENT.finditer(source):
            first = source[:comment.start()].count('\n')
            if first >= tree.body[0].end_lineno:                        # after the docstring of the file
                places.append((first + 1, source.splitlines()[first].strip(), re.sub(r'\n *# *', ' ', comment[0])))
        for number, line, text in sorted(places):
            for equation in cited(text, file):
                found.setdefault(equation, []).append((file, number, line))
    return found


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


def where(places):
    """file:line,line of each file"""
    files = groupby(places, itemgetter(0))
    return ' '.join(f'{file}:{",".join(str(line) for _, line, _ in group)}' for file, group in files)


def equations():
    """{paper: {number: (what it says, why no line computes it)}}: all of the five papers, of others those cited"""
    found = {paper: {n: tuple(text.partition(' | ')[::2]) for n, text in enumerate(texts, 1)}
             for paper, texts in SAYS.items()}
    for paper, number in sorted(lines().keys() | tests().keys()):
        if paper not in SAYS:
            found.setdefault(paper, {})[number] = '', ''
    return found


def main(argv=None):
    known = equations()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('paper', nargs='?', choices=list(known))
    parser.add_argument('number', nargs='?', type=int)
    args = parser.parse_args(argv)
    if args.number is not None and args.number not in known[args.paper]:
        parser.error(f'the equations of {args.paper} are {", ".join(map(str, known[args.paper]))}')
    code, checks = lines(), tests()
    for paper in [args.paper] if args.paper else known:
        for number, (says, why) in known[paper].items():
            computed, tested = code.get((paper, number), []), checks.get((paper, number), [])
            if args.number is None:
                print(f'{paper:6} ({number:2})  {says:38}  {where(computed) or why}')
                if tested:
                    print(' ' * 54 + where(tested))
            elif args.number == number:
                print(f'{paper} ({number}): {says}' + (f'; no line computes it: {why}' if why else ''))
                print(*(f'{file}:{line}: {shown}' for file, line, shown in computed), sep='\n')
                print(*(f'\n{file}:{line}\n{source}' for file, line, source in tested), sep='\n')


if __name__ == '__main__':
    main()
