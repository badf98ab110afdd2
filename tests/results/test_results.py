"""The page of results: its tables, its picture, and the commands behind it."""
import json
import re

import pytest
import results
from conftest import ROOT, SCRIPTS


def test_a_difference_is_that_of_the_row_to_its_base(monkeypatch):
    """A seed that only one of them has does not count."""
    def line(before, last):
        rows = [{'R@1': n, 'MAP@R': n, 's+': n / 10, 's-': 0, 'minutes': 1} for n in (before, last)]
        return dict(rows=rows, machine='a machine')
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
        return dict(rows=rows)
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
    assert page == results.PAGE.read_text(), 'write it: python tests/results/results.py'
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
    """Each row of tests/results/results.py, as its script reads it"""
    for table in results.TABLES.values():
        for command in table.rows.values():
            script, *words = re.sub(r'^tests/results/results.py --patched \S+ ', '', command).split()
            words += [*table.repeats[0].split(), '--device', 'cpu']
            args = __import__(script.removesuffix('.py')).get_args(words)
            assert args.seed in range(3) and args.dataset in ('shapes', 'folder', 'vectors')
        assert {row for pair in table.pairs for row in pair} <= table.rows.keys()
