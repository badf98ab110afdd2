"""The shape of the project: what imports what, which words stand where, which equations have tests."""
import ast
import json
import re

import mutants
import pytest
import results
import worker
from conftest import ROOT, SCRIPTS


def test_importing_has_no_effect(tmp_path):
    names = [path.stem for path in ROOT.glob('*.py')]
    assert worker.finish(worker.start(worker.import_all, names, where=tmp_path), tmp_path) == ['']
    assert [path.name for path in tmp_path.iterdir()] == ['output-0']


def test_common_names_no_method():
    text = (ROOT / 'common.py').read_text().lower()
    for word in ('contrastive', 'proxy', 'proxies', 'mixup', 'species', 'hybrid', 'miner', 'similarity loss'):
        assert word not in text, f'common.py says {word!r}'


@pytest.mark.parametrize('name', ['common', 'eval', *SCRIPTS])
def test_functions_are_short_and_a_script_begins_with_its_loss_and_imports_no_other(name):
    text = (ROOT / f'{name}.py').read_text()
    functions = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
    assert [f.name for f in functions if f.end_lineno - f.lineno >= 45] == []
    assert not re.search(r'^\s*(from|import) +train_', text, re.M)
    if name in SCRIPTS:
        assert min(f.lineno for f in functions if 'loss' in f.name) <= 60
        assert text.startswith(f'"""{name}.py -- ')
        assert text.endswith("if __name__ == '__main__':\n    common.cli(main)\n")


def test_mutants_still_fit_their_files():
    """Each line that tests/mutants.txt changes stands once in its file, and what it becomes is Python still."""
    texts = {file: (ROOT / file).read_text() for file in {row[0] for row in mutants.read()}}
    parts = {file: ['\n'.join(text.split('\n')[node.lineno - 1:node.end_lineno]) for node in ast.parse(text).body]
             for file, text in texts.items()}
    for file, first, old, new, why in mutants.read():
        assert texts[file].count(old) == 1 and old != new and why, f'{old!r}, {texts[file].count(old)} times in {file}'
        ast.parse(next(part for part in parts[file] if old in part).replace(old, new))
        assert all((ROOT / 'tests' / f'test_{name}.py').exists() for name in first), first


def test_a_difference_is_that_of_the_row_to_its_base(monkeypatch):
    """A seed that only one of them has does not count."""
    def line(before, last):
        rows = [{'R@1': n, 'MAP@R': n, 's+': n / 10, 's-': 0, 'minutes': 1} for n in (before, last)]
        return dict(before=rows[0], last=rows[1], machine='a machine')
    runs = {'t.py --a 1 --c 0': line(1, 6), 't.py --a 2 --c 0': line(2, 4), 't.py --a 1 --c 1': line(1, 9)}
    rows = {'with': 't.py --a 1', 'without': 't.py --a 2', 'not run': 't.py --a 3'}
    table = results.Table(['--c 0', '--c 1'], rows, [('with', 'without'), ('not run', 'with')])
    monkeypatch.setattr(results, 'TABLES', {'made up': table})
    monkeypatch.setattr(results, 'finished', lambda: runs)
    out = '\n'.join(results.tables('made up'))
    assert '| without | 1 | 2.0 | 4.0 | 2.0 | 2.0 | 4.0 | 2.0 | 0.40 | 0.00 | 0.40 | `--a 2` |' in out
    assert '| with | 2 | 1.0 | 7.5 ± 19.1 | 6.5 ± 19.1 |' in out
    assert '| with - without | 1 | 2.0 | 2.0 | 0.20 |' in out and 'not run' not in out
    assert results.cell([1, 1.1, 1.2], bold=True) == '**1.1 ± 0.2**' and results.cell([1, -1], bold=True)[0] != '*'


def test_the_best_epoch_on_the_test_set_beside_the_last(monkeypatch, tmp_path):
    """The first number of a run is that of the network before training, which is no epoch to choose."""
    def line(*recalls):
        rows = [{'epoch': epoch, 'R@1': r} for epoch, r in enumerate(recalls)]
        return dict(rows=rows, last=rows[-1])
    runs = {'t.py --a 1 --seed 0': line(9, 5, 8, 7, 6), 't.py --a 2 --seed 0': line(9, 1, 2, 3, 4)}
    rows = {'with': 't.py --a 1', 'without': 't.py --a 2'}
    monkeypatch.setattr(results, 'TABLES', {'long': results.Table(['--seed 0'], rows, [('with', 'without')])})
    monkeypatch.setattr(results, 'finished', lambda: runs)
    assert results.choosing('long')[-4:-1] == [
        '| with | 1 | 6.0 | 8.0 | 2.0 |', '| without | 1 | 4.0 | 4.0 | 0.0 |',
        '| with - without | 1 | 2.0 | 4.0 | 2.0 |']
    pytest.importorskip('matplotlib')
    results.draw('long', tmp_path / 'x.png')
    assert (tmp_path / 'x.png').exists()


def test_the_page_of_results_is_that_of_the_finished_runs():
    page = results.page()
    assert page == results.PAGE.read_text(), 'write it: python tests/results.py'
    places = re.findall(r'(?m)^<!-- (?!end)(\w+) -->$', page)
    assert sorted(places) == sorted(results.TABLES)
    commands = [json.loads(line)['command'] for line in results.LINES.read_text().splitlines()]
    shown = {f'{command} {flag}' for table in results.TABLES.values() for command in table.rows.values()
             for flag in table.repeats}
    assert len(set(commands)) == len(commands) and set(commands) <= shown


@pytest.mark.parametrize('name', ['README.md', *(f'{script}.py' for script in SCRIPTS)])
def test_intervals_in_texts_stand_on_the_page_of_results(name):
    """A gain has a sign in README. Tables of eval.py, which have two digits, are examples of what it prints."""
    page = results.PAGE.read_text()
    for number in re.findall(r'-?\d+\.\d ± \d+\.\d\b', (ROOT / name).read_text()):
        assert number in page, f'{name}: {number}'


def test_the_commands_of_the_results_are_commands():
    """Each row of tests/results.py, as its script reads it"""
    for table in results.TABLES.values():
        for command in table.rows.values():
            script, *words = re.sub(r'^tests/results.py --patched \S+ ', '', command).split()
            words += [*table.repeats[0].split(), '--device', 'cpu']
            args = __import__(script.removesuffix('.py')).get_args(words)
            assert args.seed in range(3) and args.dataset in ('shapes', 'folder')
        assert {row for pair in table.pairs for row in pair} <= table.rows.keys()
