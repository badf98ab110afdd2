"""Mutation tests with mutmut, which changes the syntax tree. Run manually, not by pytest.

    pip install mutmut                                # 3.8 or newer; on Linux or a Mac
    python tests/tools/mutation.py train_ms           # a file; two minutes on two cores
    python tests/tools/mutation.py common.Embedder common.k_nearest          # classes and functions of a file
    python tests/tools/mutation.py common.k_nearest --tests retrieval        # only with these test files, faster

mutmut changes one operator, number, argument or string at a time, and runs the tests that reach the changed function.
Mutants that it cannot make are in mutants.txt. It reads its settings from the top directory of a project and writes
files there, so it runs in a copy. A mutant survives if no test fails. It is printed as a diff, unless EQUIVALENT has at
least as many equivalent mutants for its function. The exit code is 1 if one survives.
"""
import argparse
import ast
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections import Counter, defaultdict
from difflib import unified_diff
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parents[2]
SETTINGS = """
[mutmut]
source_paths=
    {files}
also_copy=
    {others}
# messages, which are not tested word by word
do_not_mutate_patterns=
    ^help=
    ^ *raise
    print\\(
    common\\.parser\\(
    add_argument_group\\(
# relative to the time of the tests without a change; a mutant may loop forever
timeout_multiplier=3
timeout_constant=10
pytest_add_cli_args_test_selection=
    -m
    not slow
    {tests}
"""
NOT_LINES = ('---', '+++', '@@ ')                # headers of a diff
NO_TESTS = 33                                   # exit code of mutmut for a function that no test calls
# Replacements before old and new are compared, for changes without effect: tests run on the CPU, float('INF') is
# float('inf'), and dim=1 is the default of normalize.
ANYWHERE = [(r',? *device=[\w.]+', ''), (r'\.to\((\w+\.device|None)\)', ''), (r"'(-?)INF'", r"'\1inf'"),
            (r', \)', ')'), (r'(F\.normalize\([\w.]+(\(\))?), dim=1\)', r'\1)')]
# {function: (number of its equivalent mutants, why)}. Renames inside a function do not matter.
EQUIVALENT = {
    'train_contrastive.distances': (2, '17 eps for 16, or < for <=, in the bound on the error of a distance'),
    'train_contrastive.mean_nonzero': (1, 'a pair comes twice, as (a, b) and (b, a), so a count of 1 does not occur'),
    'train_proxy_anchor.get_args': (2, 'each recipe has a --proxy-lr-mult, so the default of the flag is not used'),
    'train_proxynca_pp.get_args': (2, 'each recipe has a --proxy-lr-mult, so the default of the flag is not used'),
}


def tests_of(name):
    """Paths of the tests that are likely to detect mutants of a file"""
    if name.startswith('train_'):
        files = [f'papers/test_{part}.py' for part in (name.removeprefix('train_'), 'losses', 'wiring', 'recipes')]
        return files + [f'foundation/test_{part}.py' for part in ('command_line', 'training', 'vectors')]
    return ['evaluation'] if name == 'eval' else ['foundation', 'papers/test_wiring.py']


def without_decorators(text):
    """mutmut skips decorated functions, so the copy applies decorators in a separate line: f = decorator(f)"""
    lines = text.splitlines(keepends=True)
    for node in reversed(ast.parse(text).body):
        if isinstance(node, ast.FunctionDef) and node.decorator_list:
            lines[node.end_lineno:node.end_lineno] = [f'{node.name} = {ast.unparse(decorator)}({node.name})\n'
                                                      for decorator in reversed(node.decorator_list)]
            del lines[node.decorator_list[0].lineno - 1:node.lineno - 1]
    return ''.join(lines)


def patterns(names):
    """common.k_nearest, common.Embedder or common, as mutmut names their mutants"""
    for name in names:
        module, _, inside = name.partition('.')
        yield f'{module}.xǁ{inside}ǁ*' if inside[:1].isupper() else f'{module}.x_{inside}__*' if inside else f'{name}.*'


def function_of(mutant):
    """train_ms.x_mine__mutmut_3 -> train_ms.mine, common.xǁEmbedderǁhead__mutmut_1 -> common.Embedder.head"""
    return re.sub(r'^(\w+)\.x(_|ǁ)', r'\1.', mutant.split('__mutmut_')[0]).replace('ǁ', '.')


def results(copy, modules):
    """{mutant: exit code of its tests} of all mutants that were run"""
    codes = {}
    for module in modules:
        codes |= json.loads((copy / f'mutants/{module}.py.meta').read_text())['exit_code_by_key']
    return {mutant: code for mutant, code in codes.items() if code is not None}


def versions(copy, mutant):
    """Lines of the function of a mutant, without and with the change, after the replacements of ANYWHERE"""
    module, name = mutant.split('.')
    lines = (copy / f'mutants/{module}.py').read_text().splitlines()
    spans = json.loads((copy / f'mutants/{module}.py.spans').read_text())['spans']      # first and last line of each
    for key in (re.sub(r'mutmut_\d+$', 'mutmut_orig', name), name):
        first, last = spans[key]
        text = '\n'.join(lines[first - 1:last]).replace(key, 'f')
        for pattern, replacement in ANYWHERE:
            text = re.sub(pattern, replacement, text)
        yield text.splitlines()


def main(names, chosen):
    """Runs the mutants with the chosen test files, or with tests_of -> how many survive"""
    modules = sorted({name.split('.')[0] for name in names})
    start = time.time()
    with TemporaryDirectory() as folder:
        copy = shutil.copytree(ROOT, Path(folder, 'copy'), ignore=shutil.ignore_patterns('.*', 'runs', 'cache', 'data'))
        for module in modules:
            file = copy / f'{module}.py'
            text = without_decorators(file.read_text())
            file.write_text(re.sub(r',\s*help=', ',\nhelp=', text))        # in a separate line: mutmut skips it
        others = [path.name for path in copy.iterdir() if path.stem not in modules]
        tests = [f'tests/{path}' for path in dict.fromkeys(path for module in modules for path in tests_of(module))]
        if chosen:
            tests = [str(path.relative_to(ROOT)) for name in chosen for path in ROOT.glob(f'tests/*/test_{name}.py')]
        (copy / 'setup.cfg').write_text(SETTINGS.format(
            files='\n    '.join(f'{module}.py' for module in modules), others='\n    '.join(others),
            tests='\n    '.join(tests)))
        subprocess.run([sys.executable, '-m', 'mutmut', 'run', '--max-children', str(os.cpu_count()),
                        *patterns(names)], cwd=copy, env=os.environ | dict(OMP_NUM_THREADS='1'))
        codes = results(copy, modules)
        if not codes:
            sys.exit('mutmut ran no mutant, see above: tests fail without a change, or there is no such function')
        alive = defaultdict(list)
        equivalent = Counter()
        for mutant in (mutant for mutant, code in codes.items() if code in (0, NO_TESTS)):
            old, new = versions(copy, mutant)
            if old == new:
                equivalent[mutant.split('.')[0]] += 1
            else:
                changed = unified_diff(old, new, n=0, lineterm='')
                alive[function_of(mutant)].append('\n'.join(line for line in changed if line[:3] not in NOT_LINES))
    for function, diffs in alive.items():
        number, why = EQUIVALENT.get(function, (0, ''))
        equivalent[function.split('.')[0]] += min(number, len(diffs))
        if len(diffs) > number:
            print(f'\n{function}: {len(diffs)} survive, of which {number} are equivalent: {why}', *diffs, sep='\n')
    survive = Counter({module: 0 for module in modules})
    for module in modules:
        made = [code for mutant, code in codes.items() if mutant.startswith(f'{module}.')]
        detected = sum(code not in (0, NO_TESTS) for code in made)
        survive[module] = len(made) - detected - equivalent[module]
        print(f'{module}: {len(made)} mutants, {detected} detected, {equivalent[module]} equivalent, '
              f'{survive[module]} survive')
    print(f'{(time.time() - start) / 60:.0f} minutes')
    return survive.total()


if __name__ == '__main__':
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('names', nargs='+', help='train_ms, common.Embedder, common.k_nearest, ...')
    parser.add_argument('--tests', nargs='+', default=[], help='network, retrieval, ...')
    args = parser.parse_args()
    if not find_spec('mutmut'):
        sys.exit('mutmut is not installed: pip install mutmut')
    sys.exit(main(args.names, args.tests) > 0)
