"""The page of results: its tables, its picture, and the commands behind it."""
import json
import math
import re
import shutil
import sys
from types import SimpleNamespace

import pytest
import results
import torch
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
        rows = [{'epoch': epoch, 'R@1': r, 'MAP@R': epoch, 'minutes': 2 * epoch} for epoch, r in enumerate(recalls)]
        return dict(rows=rows)
    runs = {'t.py --a 1 --seed 0': line(9, 5, 8, 7, 6), 't.py --a 2 --seed 0': line(9, 1, 2, 3, 4)}
    rows = {'with': 't.py --a 1', 'without': 't.py --a 2'}
    monkeypatch.setattr(results, 'TABLES', {'long': results.Table(['--seed 0'], rows, [('with', 'without')])})
    monkeypatch.setattr(results, 'finished', lambda: runs)
    assert results.choosing('long')[-4:-1] == [
        '| with | 1 | 6.0 | 8.0 | 2.0 | 4.0 | 8.0 |', '| without | 1 | 4.0 | 4.0 | 0.0 | 4.0 | 8.0 |',
        '| with - without | 1 | 2.0 | 4.0 | 2.0 | 0.0 | 0.0 |']
    runs['t.py --a 1 --seed 0']['rows'][3]['MAP@R'] = 3.9
    assert results.choosing('long')[-4].endswith('| 3.0 | 6.0 |')
    pytest.importorskip('matplotlib')
    results.draw('long', tmp_path / 'x.png')
    assert (tmp_path / 'x.png').exists()


def test_a_table_by_epoch(monkeypatch, tmp_path):
    """Of two rows and three seeds, one of which the second row lacks"""
    def line(*values):
        rows = [{'epoch': epoch, 'MAP@R': value, 'R@1': 2 * value} for epoch, value in zip((0, 2, 9), values)]
        return dict(rows=rows, machine='a machine')
    runs = {'t.py --a 1 --seed 0': line(9, 5, 8), 't.py --a 1 --seed 1': line(9, 7, 8),
            't.py --a 1 --seed 2': line(9, 6, 8),
            't.py --a 2 --seed 0': line(9, 4, 2), 't.py --a 2 --seed 1': line(9, 6, 1)}
    table = results.Table([f'--seed {n}' for n in range(3)], {'ms, with': 't.py --a 1', 'ms, without': 't.py --a 2'},
                          [('ms, with', 'ms, without')], (0, 2, 9))
    monkeypatch.setattr(results, 'TABLES', {'x': table})
    monkeypatch.setattr(results, 'finished', lambda: runs)
    out = results.section('x')
    assert '| MAP@R after epoch | runs | 0 | 2 | 9 | command |' in out
    assert '| ms, with | 3 | 9.0 ± 0.0 | 6.0 ± 2.5 | 8.0 ± 0.0 | `--a 1` |' in out
    assert '| ms, with - ms, without | 2 | 0.0 ± 0.0 | 1.0 ± 0.0 | 6.5 ± 6.4 | |' in out, 'in MAP@R'
    assert '| ms, with - ms, without | 2 | 0.0 ± 0.0 | 2.0 ± 0.0 | 13.0 ± 12.7 | |' in out, 'in R@1'
    pytest.importorskip('matplotlib')
    results.draw_epochs('x', tmp_path / 'x.png')
    assert (tmp_path / 'x.png').exists()


def test_the_page_of_results_is_that_of_the_finished_runs():
    page = results.page()
    assert page == results.PAGE.read_text(), 'write it: python tests/results/results.py'
    places = re.findall(r'(?m)^<!-- (?!end)([\w-]+) -->$', page)
    assert sorted(places) == sorted([*results.TABLES, 'claims', 'spread'])
    commands = [json.loads(line)['command'] for line in results.LINES.read_text().splitlines()]
    shown = {f'{command} {flag}' for table in results.TABLES.values() for command in table.rows.values()
             for flag in table.repeats}
    joined = {f'eval.py {command}' for table in results.TABLES.values() if table.paper
              for command in table.rows.values()}
    assert len(set(commands)) == len(commands) and set(commands) <= shown | joined


@pytest.mark.parametrize('name', ['README.md', 'tests/course/README.md', *(f'{script}.py' for script in SCRIPTS)])
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
            assert args.seed in range(3) and args.dataset in ('shapes', 'folder', 'vectors', 'cub', 'cars')
        assert {row for pair in table.pairs for row in pair} <= table.rows.keys()
        assert not table.paper or table.paper.keys() == table.rows.keys()


def test_experiments_of_the_course_are_runs_on_the_page_of_results():
    """Whatever the order of the flags, and whether a default is typed"""
    def read(command):
        patch, script, words = re.match(r'(?:.*--patched (\S+) )?(train_\w+)\.py(.*)', command).groups()
        args = vars(__import__(script).get_args(words.split()))
        return patch, script, {flag: value for flag, value in args.items() if flag != 'changed'}
    page = (ROOT / 'tests/course/README.md').read_text()
    named = set(re.findall(r'`(\w+)`\)', page))
    rows = [read(f'{command} {flag}') for name in named for command in results.TABLES[name].rows.values()
            for flag in results.TABLES[name].repeats]
    commands = []
    for block in re.findall(r'(?s)```\n(.*?)```', page):
        for variable, values, loop in re.findall(r'for (\w+) in (.*?); do (.*?); done', block):
            commands += [loop.replace(f'${variable}', value) for value in values.split()]
        commands += re.findall(r'(?m)^python .*$', block)
    commands = [one for command in commands for one in command.split('; ')]
    assert len(commands) > 25 and named == {'shapes', 'course', 'speed', 'long', 'push', 'species'}
    for command in commands:
        assert read(command.removeprefix('python ')) in rows, command


@pytest.fixture
def trial(monkeypatch, tmp_path):
    """A place for lines, and a run that does nothing: {command: whether it succeeds}, which is True where not said"""
    outcome, made = {}, []
    monkeypatch.setattr(results, 'LINES', tmp_path / 'lines.jsonl')
    monkeypatch.setattr(results, 'ROOT', tmp_path)
    (tmp_path / 'lines.jsonl').touch()
    monkeypatch.setattr(results.common, 'download', lambda *args: made.append(args))

    def start(words, **environment):
        command = ' '.join(words)
        made.append((command, environment))
        if words[0] == 'eval.py':
            rows = [{key: dict(mean=value, interval=None) for key, value in zip(('R@1', 'RP', 'MAP@R'), numbers)}
                    | dict(setting=setting) for setting, numbers in (('a', (50, 20, 10)), ('b', (60, 30, 20)))]
            return SimpleNamespace(returncode=0, stdout='a line\n' + json.dumps(dict(rows=rows)))
        folder = tmp_path / 'runs' / words[-1]
        folder.mkdir(parents=True)
        rows = [{'R@1': n, 'MAP@R': n / 2, 'epoch': n, 'minutes': 1.0} for n in (1, 70, 60)]
        (folder / 'log.jsonl').write_text('\n'.join(map(json.dumps, rows)))
        return SimpleNamespace(returncode=not outcome.get(command.split(' --name')[0], True), stdout='it went wrong')
    monkeypatch.setattr(results, 'start', start)
    return SimpleNamespace(outcome=outcome, made=made)


def test_papers_tables_go_past_a_failure_and_on_after_a_stop(trial, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: True)
    monkeypatch.setattr(torch.cuda, 'device_count', lambda: 2)
    monkeypatch.setattr(torch.cuda, 'get_device_name', lambda: 'a card')
    bad = 'train_ms.py --dataset cub --seed 1'
    trial.outcome[bad] = False
    assert results.make('cub', jobs=2) == [bad]
    assert 'it went wrong' in capsys.readouterr().out
    assert trial.made[0] == ('cub', results.ROOT / 'data'), 'the data are fetched first'
    assert {environment['CUDA_VISIBLE_DEVICES'] for _, environment in trial.made[1:]} == {'0', '1'}
    assert len(trial.made) == 22 and results.missing('cub') == [bad]
    trial.outcome.clear()
    shutil.rmtree(results.ROOT / 'runs')
    assert results.make('cub', jobs=1) == [] == results.missing('cub') and len(trial.made) == 24
    assert ('| ms | 3 | 65.7 | Multi-Similarity, with BN-Inception | 60.0 ± 0.0 | 70.0 ± 0.0 | -5.7 ± 0.0 | '
            '`train_ms.py --dataset cub` |') in results.papers('cub')


def test_folds_of_the_reality_check_are_joined_by_eval(trial):
    bad = f'{results.TABLES["reality-check-cub"].rows["ms"]} --fold 2/4'
    trial.outcome[bad] = False
    assert results.make('reality-check-cub', jobs=1) == [bad]
    joined = [command for command, _ in trial.made if command.startswith('eval.py')]
    assert len(joined) == 4 and all(command.count('runs/results-') == 4 for command in joined)
    table = results.papers_on_folds('reality-check-cub')
    assert table[2].startswith('| contrastive | 4 | separated | 59.73, 31.98, 21.18 | Reality Check, Table 4, with '
                               'BN-Inception | 50.00, 20.00, 10.00 | -9.7 |')
    assert '| ms | 3 | concatenated | 65.04, 35.40, 24.70 |' in table[5] and '| not run yet |' in table[5]


def test_measures_are_read_from_what_the_analyses_print(monkeypatch):
    """Of a script that does not mix, eval.py's alone"""
    printed = {'eval.py': 'a line\n' + json.dumps({'alignment': 0.3, 'uniformity': -2, 'utilization': 0.5, 'NMI': 60}),
               'train_metrix.py': """P(Pos(a, v)) with beta 18, gamma 75, m 0.77: measured, and by Eq. (25)
  lambda  measured  Eq. (25)  mean s(a, v)  threshold     pairs
    0.45     0.300     0.350         0.700      0.768     20000
    0.55     0.600     0.520         0.720      0.772     20000
utilization, Eq. (12): 0.500 by clean examples, 0.400 by these and the mixed ones of 20 batches
the figure: runs/x/positivity.png
"""}
    monkeypatch.setattr(results, 'start', lambda words, **_: SimpleNamespace(returncode=0, stdout=printed[words[0]]))
    ended = SimpleNamespace(returncode=0)
    done, measures = results.measure(ended, 'runs/x/last.pt', True, {})
    assert done is ended and measures == {
        'alignment': 0.3, 'uniformity': -2, 'utilization': 0.5, 'NMI': 60, 'utilization, mixed': 0.4, 'P(Pos)': 0.6,
        'Fig. 2': pytest.approx(0.08)}
    assert results.measure(ended, 'runs/x/last.pt', False, {})[1].keys() == {
        'alignment', 'uniformity', 'utilization', 'NMI'}
    monkeypatch.setattr(results, 'start', lambda words, **_: SimpleNamespace(returncode=2, stdout=''))
    assert results.measure(ended, 'runs/x/last.pt', True, {})[0].returncode == 2, 'it is named as a run that failed'


def test_the_released_loss_of_ms_by_hand():
    """Four unit vectors of two classes, (0, 1) and (2, 3), which all pass the miner. The rows (a, p, n) are (0, 1, 2),
    (0, 1, 3), (1, 0, 2), (1, 0, 3), (2, 3, 0), (2, 3, 1), (3, 2, 0), (3, 2, 1). The mask has the places (0, 1), (1, 0),
    (2, 3), (3, 2); rows 0 and 1 have anchor 0, rows 2 and 3 anchor 1."""
    z = [(math.cos(t), math.sin(t)) for t in (0.0, 0.7, 0.3, 1.1)]
    beta, gamma, m, lam = 3.0, 5.0, 0.6, 0.3

    def cosine(a, v):
        return (z[a][0] * v[0] + z[a][1] * v[1]) / math.hypot(*v)

    def mixture(p, n):
        return [lam * one + (1 - lam) * other for one, other in zip(z[p], z[n])]

    def plus(s):
        return math.exp(-beta * (s - m))

    def minus(s):
        return math.exp(gamma * (s - m))
    pull = [lam * (1 + plus(cosine(a, z[p]))) for a, p in enumerate((1, 0, 3, 2))]
    push = [(1 - lam) * (1 + sum(minus(cosine(a, z[n])) for n in others))
            for a, others in enumerate([(2, 3), (2, 3), (0, 1), (0, 1)])]
    # of anchor 0 and row 1, anchor 0 and row 0, anchor 1 and row 3, anchor 1 and row 2
    mixed = [1 + plus(cosine(a, mixture(p, n))) for a, p, n in ((0, 1, 3), (0, 1, 2), (1, 0, 3), (1, 0, 2))]
    wanted = sum(math.log(a + 0.4 * b) / beta + math.log(c) / gamma for a, b, c in zip(pull, mixed, push)) / 8
    found = results.released_loss(torch.tensor(z, dtype=torch.float64), torch.tensor([0, 0, 1, 1]), lam, beta, gamma, m,
                                  epsilon=2)
    assert found.item() == pytest.approx(wanted, abs=1e-15) and wanted == pytest.approx(0.2022, abs=1e-4)


def test_the_released_loss_of_few_rows_is_finite():
    """One class, and classes of one image: no rows, and clean sums without a term"""
    z = torch.eye(4, dtype=torch.float64).requires_grad_()
    for y in ([0, 0, 0, 0], [0, 1, 2, 3], [0, 0, 0, 1]):
        loss = results.released_loss(z, torch.tensor(y), 0.3, 18.0, 75.0, 0.77)
        loss.backward()
        assert loss.isfinite() and z.grad.isfinite().all()


def test_a_gain_between_two_networks_below_no_training_says_so(monkeypatch):
    def lines(before, *last):
        return {f'--seed {n}': dict(rows=[{'R@1': before, 's+': 0}, {'R@1': value, 's+': value}])
                for n, value in enumerate(last)}
    runs = {'with': lines(9, 5.0, 5.1), 'without': lines(9, 2.0, 2.2)}
    monkeypatch.setattr(results, 'runs_of', lambda name: runs)
    claim = results.Claim('a claim', 'a paper', '> 0', 'x', 'with', 'without')
    assert results.judged(claim)[1:] == (2, 'seen here; both below no training')
    assert results.judged(claim._replace(quantity='s+'))[2] == 'seen here', 'it is about R@1 alone'
    assert results.judged(claim._replace(verdict='by construction'))[2] == 'by construction; both below no training'
    runs['with'] = lines(9, 9.5, 9.6)
    assert results.judged(claim)[2] == 'seen here'


def test_verdicts_on_claims():
    """The interval of 1, 2, 3 is 2 ± 2.5, that of 2, 2.1, 2.2 is 2.1 ± 0.2."""
    assert results.verdict('2', [2, 2.1, 2.2]) == 'seen here'
    assert results.verdict('1', [2, 2.1, 2.2]) == 'seen here; more than there'
    assert results.verdict('3', [2, 2.1, 2.2]) == 'seen here; less than there'
    assert results.verdict('3', [1, 2, 3]) == 'not seen here', 'it holds 0 and the number of the paper'
    assert results.verdict('5', [1, 2, 3]) == 'not seen here; less than there'
    assert results.verdict('3', [-2, -2.1, -2.2]) == 'the other way here'
    assert results.verdict('-2', [-2, -2.1, -2.2]) == 'seen here'
    assert results.verdict('-0.5', [2, 2.1, 2.2]) == 'the other way here'
    assert results.verdict('-0.5', [-2, -2.1, -2.2]) == 'seen here; more than there'
    assert results.verdict('> 0', [2, 2.1, 2.2]) == 'seen here' != results.verdict('> 0', [1, 2, 3])
    assert results.verdict('< 0', [-2, -2.1, -2.2]) == 'seen here'


def test_a_claim_is_a_difference_of_two_rows_or_a_quantity_of_one(monkeypatch):
    def line(*values, **more):
        return dict(command='t.py', rows=[{'epoch': epoch, 'MAP@R': value, 'R@1': 2 * value} | more
                                          for epoch, value in enumerate(values)])
    runs = {'t.py --a 1 --seed 0': line(1, 5, 9.4, 10), 't.py --a 1 --seed 1': line(1, 9.5, 9.4, 10, **{'P(Pos)': 0.9}),
            't.py --a 2 --seed 0': line(1, 2, 3, 4), 't.py --a 2 --seed 1': line(1, 4, 4, 4)}
    table = results.Table(['--seed 0', '--seed 1'], {'with': 't.py --a 1', 'without': 't.py --a 2'}, [])
    monkeypatch.setattr(results, 'TABLES', {'x': table})
    monkeypatch.setattr(results, 'finished', lambda: runs)
    claim = results.Claim('a claim', 'a paper', '3', 'x', 'with', 'without')
    assert results.differences(claim) == [12, 12]
    assert results.differences(claim._replace(quantity='R@1 after epoch 2')) == pytest.approx([12.8, 10.8])
    assert results.quantity(runs['t.py --a 1 --seed 1'], 'P(Pos) - 0.5') == pytest.approx(0.4)
    used = {'utilization': 0.5, 'utilization, mixed': 0.4}
    for command, number in (('t.py --mixup none', 0.5), ('t.py --mixup feature', 0.4)):
        assert results.quantity(dict(command=command, rows=[used]), 'utilization by all examples') == number
    monkeypatch.setattr(results, 'CLAIMS', [claim, claim._replace(text='not run', row='another')])
    assert results.claims()[2:4] == [
        '| a claim | a paper | 3 | 12.0 ± 0.0 | 2 | seen here; more than there | `x`, with - without |',
        '| not run | a paper | 3 |  | 0 | not run yet | `x`, another - without |']
    assert results.claims()[-2].startswith('These are 2 comparisons on 2 claims: 1 *seen here*, 1 *not run yet*.')


def test_folds_say_where_the_runs_of_a_table_stop(monkeypatch):
    """On two folds of 10 steps an epoch, the mean MAP@R is highest after epoch 2, so after 20 steps: that is epoch 1 of
    a run with 22. A row without folds is left out."""
    def line(per_epoch, values):
        rows = [{'epoch': epoch, 'MAP@R': value, 'R@1': 10 * value} for epoch, value in values.items()]
        return dict(rows=rows, recipe=f'9 epochs, of {per_epoch} batches of 4 images')
    runs = {'t.py --a 1 --fold 0/2': line(10, {0: 1, 1: 5, 2: 4}),
            't.py --a 1 --fold 1/2': line(10, {0: 1, 1: 2, 2: 6}),
            't.py --a 1 --seed 0': line(22, {0: 1, 1: 7, 2: 3}), 't.py --a 2 --seed 0': line(22, {0: 1, 1: 2, 2: 9})}
    rows = {'x': 't.py --a 1', 'y': 't.py --a 2'}
    monkeypatch.setattr(results, 'TABLES', {
        'folds': results.Table(['--fold 0/2', '--fold 1/2'], {'x': 't.py --a 1'}, [], (0, 1, 2)),
        'seeds': results.Table(['--seed 0'], rows, [('y', 'x')], (0, 1, 2), folds='folds')})
    monkeypatch.setattr(results, 'finished', lambda: runs)
    assert results.stopping_epochs('seeds') == {'x': (20, 1, 22)}
    assert results.stopped('seeds')[4:] == ['| x | 1 | 20 | 22 | 7.0 | 70.0 |']
    for command in list(runs)[:2]:
        del runs[command]
    assert results.stopped('seeds') == []


def test_seeds_that_are_crossed_with_folds_count_once(monkeypatch):
    """Seed 0 has differences 1 and 3 on two folds, seed 1 one of 5."""
    values = {' --fold 0/2': 1, ' --fold 1/2': 3, ' --fold 0/2 --seed 1': 5}
    runs = {f't.py --a 1{flag}': dict(command='', rows=[{'R@1': value}]) for flag, value in values.items()}
    runs |= {f't.py --a 2{flag}': dict(command='', rows=[{'R@1': 0}]) for flag in values}
    monkeypatch.setattr(results, 'TABLES', {
        'x': results.Table([flag.strip() for flag in values], {'with': 't.py --a 1', 'without': 't.py --a 2'}, [])})
    monkeypatch.setattr(results, 'finished', lambda: runs)
    assert results.differences(results.Claim('', '', '', 'x', 'with', 'without')) == [2, 5]
    del runs['t.py --a 1 --fold 0/2 --seed 1']
    assert results.differences(results.Claim('', '', '', 'x', 'with', 'without')) == [1, 3], 'one seed: folds count'


def test_claims_are_about_rows_that_there_are():
    for claim in results.CLAIMS:
        rows = results.TABLES[claim.table].rows
        assert claim.row in rows and (claim.base in rows or claim.base == '')
        assert claim.paper in ('< 0', '> 0') or float(claim.paper)


def test_claims_in_the_readme_are_the_first_of_each_paper_and_their_repetitions():
    """claim, paper, there, here, verdict; the page has the number of pairs and the table as well"""
    page = [[*cells[:4], cells[5]] for cells in (line[2:-2].split(' | ') for line in results.claims()[2:-3])]
    papers = {}
    for row in page:
        papers.setdefault(row[1].split(',')[0], []).append(row)
    wanted = [row for rows in papers.values() for row in rows
              if row is rows[0] or row[0] == f'{rows[0][0]}, the same seeds on another machine']
    text = (ROOT / 'README.md').read_text()
    shown = [line[2:-2].split(' | ') for line in text.splitlines() if re.search(r' here(; .*)? \|$', line)]
    assert shown == wanted and len(papers) == 4
    comparisons, counts = re.match(r'These are (.*?): (.*?)\. ', results.claims()[-2]).groups()
    assert comparisons in ' '.join(text.split()) and counts in ' '.join(text.split())


def test_how_much_seeds_move(monkeypatch):
    """Two commands with deviations 1 and 3 around their own means: sqrt((2 * 1 + 2 * 9) / 4). Folds do not count."""
    def lines(command, *values):
        return {f'{command} --seed {n}': dict(rows=[{'R@1': value, 'MAP@R': 0}]) for n, value in enumerate(values)}
    runs = (lines('train_t.py --a 1', 1, 2, 3) | lines('train_t.py --a 2', 50, 53, 56)
            | lines('train_t.py --fold 0/4', 0, 50, 100)
            | lines('t.py --data data/cub50', 7, 7, 7) | lines('t.py --data data/omniglot', 1, 9)
            | lines('t.py --dataset cub', 1, 50, 99))
    monkeypatch.setattr(results, 'finished', lambda: runs)
    assert results.spread()[2:-1] == ['| birds | 1 | 3 | 0.00 | 0.00 |', '| shapes | 2 | 6 | 2.24 | 0.00 |']


def test_a_plan_says_what_is_missing(trial, capsys):
    results.plan('cub')
    out = capsys.readouterr().out.splitlines()
    assert out[2] == '2,880 steps, 345,600 images: python train_proxy_anchor.py --dataset cub --seed 0'
    assert len(out) == 22 and out[-1].startswith('cub: 21 runs, ')
    assert not trial.made


def test_a_trial_has_more_flags_and_files_of_its_own(trial, monkeypatch, tmp_path):
    monkeypatch.setattr(results, 'TRIAL', tmp_path / 'runs/trial.jsonl')
    monkeypatch.setattr(results, 'TABLES', dict(results.TABLES))
    monkeypatch.setattr(sys, 'argv', 'results.py hse-cub --add'.split() + ['--steps 3 --arch resnet18'])
    results.main()
    assert not (tmp_path / 'lines.jsonl').read_text()
    lines = (tmp_path / 'runs/trial.jsonl').read_text().splitlines()
    assert len(lines) == 24 and all('--steps 3 --arch resnet18 --seed' in line for line in lines)
    assert '| npair, alone | 3 | 51.3 |' in (tmp_path / 'runs/trial.md').read_text()
