"""The results pages: their tables and figures, what they specify, and the commands that make them."""
import json
import math
import re
import shutil
from functools import cache
from types import SimpleNamespace

import claims
import draw
import patches
import plans
import pytest
import results
import spec
import tables
import torch
from conftest import ROOT, SCRIPTS

import common
import train_metrix
import train_ms


@cache
def on_pages():
    """{name: Table} and [Claim] of the project's pages"""
    return results.read_pages()


def table_of(rows, repeats, **more):
    """A table of {row: command}, with the same repeats for all rows"""
    return spec.Table({name: spec.Row(command, repeats, command) for name, command in rows.items()}, **more)


def run_of(command='', steps=1, measured=None, **columns):
    """A run. The keywords R, MAP, plus and minus are R@1, MAP@R, s+ and s-."""
    keys = dict(R='R@1', MAP='MAP@R', plus='s+', minus='s-')
    columns = {keys.get(key, key): values for key, values in columns.items()}
    length = len(next(iter(columns.values())))
    columns = dict(epoch=list(range(length)), minutes=[1] * length) | columns
    return dict(command=command, machine='a machine', steps=steps, columns=columns, measured=measured or {})


# ---- tables


def test_a_difference_is_row_minus_base():
    """A seed that only one of the two rows has is ignored."""
    def run(before, last):
        values = [before, last]
        return run_of(R=values, MAP=values, plus=[n / 10 for n in values], minus=[0, 0])
    runs = {'t.py --a 1 --c 0': run(1, 6), 't.py --a 2 --c 0': run(2, 4), 't.py --a 1 --c 1': run(1, 9)}
    rows = {'with': 't.py --a 1', 'without': 't.py --a 2', 'not run': 't.py --a 3'}
    pairs = [('with', 'without'), ('not run', 'with')]
    table = table_of(rows, ['--c 0', '--c 1'], pairs=pairs, settings='its settings')
    out = tables.section(table, {}, runs)
    assert out[0] == 'its settings' and '3 runs of 1.0 to 1.0 minutes, 0.05 hours in all, each on a machine.' in out
    assert '| without | 1 | 2.0 | 4.0 | 2.0 | 2.0 | 4.0 | 2.0 | 0.40 | 0.00 | 0.40 | `t.py --a 2` |' in out
    assert any(line.startswith('| with | 2 | 1.0 | 7.5 ± 19.1 | 6.5 ± 19.1 |') for line in out)
    assert '| with - without | 1 |  | 2.0 |  |  | 2.0 |  |  |  | 0.20 |  |' in out
    assert '| not run | 0 |' + '  |' * 9 + ' `t.py --a 3` |' in out and '| not run - with | 0 |' + '  |' * 10 in out
    assert tables.section(table._replace(measured=True), {}, {})[-1] == 'Not run yet.'
    assert tables.cell([1, 1.1, 1.2], bold=True) == '**1.1 ± 0.2**' and tables.cell([1, -1], bold=True)[0] != '*'


def test_the_best_epoch_on_the_test_set_next_to_the_last(tmp_path):
    """The evaluation before training is not a candidate for the best epoch."""
    def run(*recalls):
        minutes = [2 * epoch for epoch in range(5)]
        return run_of(R=list(recalls), MAP=[0, 1, 2, 3, 4], minutes=minutes, plus=[0] * 5, minus=[0] * 5)
    runs = {'t.py --a 1 --seed 0': run(9, 5, 8, 7, 6), 't.py --a 2 --seed 0': run(9, 1, 2, 3, 4)}
    table = table_of({'with': 't.py --a 1', 'without': 't.py --a 2'}, ['--seed 0'], pairs=[('with', 'without')])
    assert tables.section(table, {}, runs)[-3:] == [
        '| with | 1 | 6.0 | 8.0 | 2.0 | 4.0 | 8.0 |', '| without | 1 | 4.0 | 4.0 | 0.0 | 4.0 | 8.0 |',
        '| with - without | 1 | 2.0 | 4.0 | 2.0 | 0.0 | 0.0 |']
    runs['t.py --a 1 --seed 0']['columns']['MAP@R'][3] = 3.9
    assert tables.section(table, {}, runs)[-3].endswith('| 3.0 | 6.0 |')
    pytest.importorskip('matplotlib')
    draw.plot(table, runs, tmp_path / 'x.png')
    assert (tmp_path / 'x.png').exists()


def test_a_table_by_epoch(tmp_path):
    """Two rows and three seeds, one of which the second row lacks"""
    def run(*values):
        return run_of(epoch=[0, 2, 9], MAP=list(values), R=[2 * value for value in values])
    runs = {'t.py --a 1 --seed 0': run(9, 5, 8), 't.py --a 1 --seed 1': run(9, 7, 8),
            't.py --a 1 --seed 2': run(9, 6, 8),
            't.py --a 2 --seed 0': run(9, 4, 2), 't.py --a 2 --seed 1': run(9, 6, 1)}
    table = table_of({'ms, with': 't.py --a 1', 'ms, without': 't.py --a 2'}, [f'--seed {n}' for n in range(3)],
                     pairs=[('ms, with', 'ms, without')], epochs=[0, 2, 9])
    out = tables.section(table, {}, runs)
    assert '| MAP@R after epoch | runs | 0 | 2 | 9 | command |' in out
    assert '| ms, with | 3 | 9.0 ± 0.0 | 6.0 ± 2.5 | 8.0 ± 0.0 | `t.py --a 1` |' in out
    assert '| ms, with - ms, without | 2 | 0.0 ± 0.0 | 1.0 ± 0.0 | 6.5 ± 6.4 |  |' in out, 'in MAP@R'
    assert '| R@1 after epoch | runs | 0 | 2 | 9 |' in out
    assert '| ms, with - ms, without | 2 | 0.0 ± 0.0 | 2.0 ± 0.0 | 13.0 ± 12.7 |' in out, 'in R@1'
    pytest.importorskip('matplotlib')
    draw.plot(table, runs, tmp_path / 'x.png')
    assert (tmp_path / 'x.png').exists()


def test_cross_validation_selects_the_epoch_that_a_table_shows():
    """On two folds with 10 steps per epoch, the mean MAP@R is highest after epoch 2, or 20 steps. The nearest epoch of
    runs with 22 steps per epoch is 1. A row is left out if it has no folds, or lacks one."""
    runs = {'t.py --a 1 --fold 0/2': run_of(steps=10, MAP=[1, 5, 4]),
            't.py --a 1 --fold 1/2': run_of(steps=10, MAP=[1, 2, 6]),
            't.py --a 1 --seed 0': run_of(steps=22, MAP=[1, 7, 3], R=[10, 70, 30]),
            't.py --a 2 --seed 0': run_of(steps=22, MAP=[1, 2, 9], R=[10, 20, 90])}
    both = {'folds': table_of({'x': 't.py --a 1'}, ['--fold 0/2', '--fold 1/2'], epochs=[0, 1, 2]),
            'runs': table_of({'x': 't.py --a 1', 'y': 't.py --a 2'}, ['--seed 0'], pairs=[('y', 'x')],
                              epochs=[0, 1, 2], folds='folds')}
    assert tables.choose(both['runs'], both, runs) == {'x': tables.Choice(5, 20, 1, 22)}
    assert tables.section(both['runs'], both, runs)[-1] == '| x | 1 | 5.0 | 20 | 22 | 7.0 | 70.0 |'
    on_folds, on_seeds = (tables.section(both[name], both, runs) for name in ('folds', 'runs'))
    assert not any('R@1' in line for line in on_folds) and any('R@1 after epoch' in line for line in on_seeds)
    del runs['t.py --a 1 --fold 1/2']
    assert tables.choose(both['runs'], both, runs) == {}
    assert not any('steps on folds' in line for line in tables.section(both['runs'], both, runs))


def test_cross_validation_selects_setting_and_epoch_of_each_method_together():
    """`b @ 2` is best after epoch 1. `b @ 1` is better then on one fold, but worse on average, and stopped there. The
    table of seeds has a row `b @ 1`, which is not selected, and lacks `b @ 2`, which is."""
    folds = {'a @ 1': ([1, 3, 2], [1, 3, 2]), 'b @ 1': ([1, 2, 3], [1, 9]), 'b @ 2': ([1, 7, 6], [1, 7, 6])}
    commands = {row: f't.py --row {row.replace(" @ ", "")}' for row in folds}
    runs = {f'{commands[row]} --fold {n}/2': run_of(steps=10, MAP=values)
            for row, both in folds.items() for n, values in enumerate(both)}
    for row in ('a @ 1', 'b @ 1'):
        runs[f'{commands[row]} --seed 0'] = run_of(steps=10, MAP=[1, 4, 5], R=[1, 40, 50])
    of_folds = table_of(commands, ['--fold 0/2', '--fold 1/2'], epochs=[0, 1, 2])
    of_seeds = table_of({row: commands[row] for row in ('a @ 1', 'b @ 1')}, ['--seed 0'], epochs=[0, 1, 2],
                        folds='folds')
    both = dict(folds=of_folds, seeds=of_seeds)
    assert tables.choose(of_seeds, both, runs) == {'a @ 1': tables.Choice(3, 10, 1, 10),
                                                   'b @ 2': tables.Choice(7, 10, '', '')}
    out = tables.section(of_seeds, both, runs)
    assert out[-2:] == ['| a @ 1 | 1 | 3.0 | 10 | 10 | 4.0 | 40.0 |', '| b @ 2 | 0 | 7.0 | 10 |  |  |  |']


def test_folds_choose_a_setting_of_a_table_of_a_paper():
    """CCL* in Table 2 of CCL, whose margin is not stated: on the folds, 0.2 is better."""
    paper, runs = {'paper': '73.5'}, {}
    commands = {f'CCL* @ {m}': f't.py --margin {m}' for m in (0.1, 0.2)}
    for command, on_fold, on_test in zip(commands.values(), (5, 6), (70, 60)):
        runs[f'{command} --fold 0/4'] = run_of(steps=10, MAP=[1, on_fold])
        runs[f'{command} --seed 0'] = run_of(steps=10, MAP=[1, 2], R=[1, on_test])
    rows = {name: spec.Row(command, ['--seed 0'], command, '', paper) for name, command in commands.items()}
    both = dict(folds=table_of(commands, ['--fold 0/4']), seeds=spec.Table(rows, folds='folds'))
    out = tables.section(both['seeds'], both, runs)
    assert '| CCL* @ 0.1 | 1 | 70.0 | 70.0 | -3.5 | 73.5 | `t.py --margin 0.1` |' in out
    assert out[-1] == '| CCL* @ 0.2 | 1 | 6.0 | 10 | 10 | 2.0 | 60.0 |' and 'CCL* @ 0.1' not in ''.join(out[-4:])


def test_seeds_that_are_combined_with_folds_count_once():
    """Seed 0 has differences 1 and 3 on two folds, seed 1 has a difference of 5 on one."""
    values = {'--fold 0/2': 1, '--fold 1/2': 3, '--fold 0/2 --seed 1': 5}
    runs = {f't.py --a 1 {repeat}': run_of(R=[value]) for repeat, value in values.items()}
    runs |= {f't.py --a 2 {repeat}': run_of(R=[0]) for repeat in values}
    table = table_of({'with': 't.py --a 1', 'without': 't.py --a 2'}, list(values))

    def differences():
        return tables.counted(tables.differences(tables.runs_of(table, runs), 'with', 'without', tables.last('R@1')))
    assert differences() == [2, 5]
    del runs['t.py --a 1 --fold 0/2 --seed 1']
    assert differences() == [1, 3], 'with one seed, each fold counts'


def test_the_spread_of_seeds_is_a_pooled_deviation():
    """Two commands with deviations 1 and 3 around their own means: sqrt((2 * 1 + 2 * 9) / 4). Folds are ignored."""
    def runs_of(command, *values):
        return {f'{command} --seed {n}': run_of(R=[value], MAP=[0]) for n, value in enumerate(values)}
    runs = (runs_of('train_t.py --a 1', 1, 2, 3) | runs_of('train_t.py --a 2', 50, 53, 56)
            | runs_of('train_t.py --fold 0/4', 0, 50, 100)
            | runs_of('t.py --data data/cub50', 7, 7, 7) | runs_of('t.py --data data/omniglot', 1, 9))
    assert tables.spread(runs)[2:] == ['| `shapes` | 2 | 6 | 2.24 | 0.00 |', '| `data/cub50` | 1 | 3 | 0.00 | 0.00 |']


# ---- claims


def claim_of(row, base='', reported='3', **more):
    return claims.Claim('a claim', 'a paper', reported, 'x', row, base, what=f'`x`, {row} - {base}', **more)


def judge(claim, runs):
    """The cells of a claim on a table `x` with {row: {seed: run}}"""
    table = table_of({row: f't.py --a {row}' for row in runs}, ['--seed 0', '--seed 1'])
    named = {f't.py --a {row} --seed {seed}': run for row, of_row in runs.items() for seed, run in of_row.items()}
    return claims.judged(claim, dict(x=table), named)


def test_verdicts_on_claims():
    """The 95% CI of 1, 2, 3 is 2 ± 2.5, and the CI of 2, 2.1, 2.2 is 2.1 ± 0.2."""
    assert claims.verdict('2', [2, 2.1, 2.2]) == 'replicated'
    assert claims.verdict('1', [2, 2.1, 2.2]) == 'replicated; larger than reported'
    assert claims.verdict('3', [2, 2.1, 2.2]) == 'replicated; smaller than reported'
    assert claims.verdict('3', [1, 2, 3]) == 'inconclusive', "it includes 0 and the paper's value"
    assert claims.verdict('5', [1, 2, 3]) == 'inconclusive; smaller than reported'
    assert claims.verdict('3', [-2, -2.1, -2.2]) == 'opposite sign'
    assert claims.verdict('-2', [-2, -2.1, -2.2]) == 'replicated'
    assert claims.verdict('-0.5', [2, 2.1, 2.2]) == 'opposite sign'
    assert claims.verdict('-0.5', [-2, -2.1, -2.2]) == 'replicated; larger than reported'
    assert claims.verdict('> 0', [2, 2.1, 2.2]) == 'replicated' != claims.verdict('> 0', [1, 2, 3])
    assert claims.verdict('< 0', [-2, -2.1, -2.2]) == 'replicated'


def test_a_gain_between_two_networks_below_the_untrained_one_says_so():
    def runs_of(before, *last):
        return {n: run_of(R=[before, value], plus=[0, value]) for n, value in enumerate(last)}
    runs = {'with': runs_of(9, 5.0, 5.1), 'without': runs_of(9, 2.0, 2.2)}
    claim = claim_of('with', 'without', '> 0')
    assert judge(claim, runs)[1:] == [2, 'replicated; both below the untrained network']
    assert judge(claim._replace(verdict='other'), runs)[2] == 'other; both below the untrained network'
    runs['with'] = runs_of(9, 9.5, 9.6)
    assert judge(claim, runs)[2] == 'replicated'


def test_only_claims_on_r_at_1_are_compared_with_the_untrained_network():
    runs = {row: {n: run_of(R=[9, 1], measured=dict(alignment=value + n / 10)) for n in (0, 1)}
            for row, value in (('with', 5), ('without', 2))}
    assert judge(claim_of('with', 'without', '> 0', quantity='alignment'), runs) == ['3.00 ± 0.00', 2, 'replicated']


def test_a_claim_is_a_difference_of_two_rows_or_a_quantity_of_one():
    def run(*values, **more):
        return run_of('t.py', MAP=list(values), R=[2 * value for value in values], **more)
    runs = {'with': {0: run(1, 5, 9.4, 10, measured={'P(Pos)': 0.8}),
                     1: run(1, 9.5, 9.4, 10, measured={'P(Pos)': 0.9})},
            'without': {0: run(1, 2, 3, 4), 1: run(1, 4, 4, 4)}}
    claim = claim_of('with', 'without')
    assert judge(claim, runs) == ['12.0 ± 0.0', 2, 'replicated; larger than reported']
    assert judge(claim_of('with', quantity='P(Pos) - 0.5', reported='> 0'), runs)[0] == '0.35 ± 0.64', '0.3 and 0.4'
    used = {'utilization': 0.5, 'utilization, mixed': 0.4}
    for command, number in (('t.py --mixup none', 0.5), ('t.py --mixup feature', 0.4)):
        assert claims.QUANTITIES['utilization by all examples'](run_of(command, R=[1], measured=used)) == number
    del runs['without'][1]
    assert judge(claim, runs) == ['', 1, 'not run yet']


def test_a_claim_on_rows_selected_by_cross_validation():
    """Both rows are best on the fold after epoch 1, where the difference is 3 for each seed. Finally it is -5."""
    runs = {f't.py --a {row} --fold 0/2': run_of(MAP=[1, 2, 1]) for row in (1, 2)}
    for seed in (0, 1):
        runs[f't.py --a 1 --seed {seed}'] = run_of(MAP=[0, 0, 0], R=[1, 8 + seed, 1])
        runs[f't.py --a 2 --seed {seed}'] = run_of(MAP=[0, 0, 0], R=[1, 5 + seed, 6])
    rows = {'with': 't.py --a 1', 'without': 't.py --a 2'}
    both = dict(folds=table_of(rows, ['--fold 0/2']), x=table_of(rows, ['--seed 0', '--seed 1'], folds='folds'))
    claim = claim_of('with', 'without')
    assert claims.judged(claim._replace(quantity='R@1 selected by cross-validation'), both, runs)[0] == '3.0 ± 0.0'
    assert claims.judged(claim, both, runs)[0] == '-5.0 ± 0.0'


def test_verdicts_are_counted():
    cells = [['a: x', 'p', '3', '1', 2, 'replicated; smaller than reported', ''],
             ['a: y', 'p', '3', '1', 2, 'inconclusive', ''], ['b', 'p', '3', '1', 2, 'inconclusive', '']]
    assert claims.count_verdicts(cells).startswith(
        'These are 3 comparisons on 2 claims: 2 *inconclusive*, 1 *replicated*.')


# ---- the pages of the project


def test_the_results_pages_follow_from_the_finished_runs():
    specified, claimed = on_pages()
    runs = results.read_runs(results.RUNS)
    for page in results.pages():
        text = results.filled(page, specified, claimed, runs)
        assert text == page.read_text(), 'write it: python tests/results/results.py'
    others = [block.lines[0] for page in results.pages() for block in spec.blocks(page)
              if not block.lines[0].startswith('**Table')]
    assert sorted(others) == sorted(spec.OTHERS), 'each is on one page'
    commands = [json.loads(line)['command'] for line in results.RUNS.read_text().splitlines()]
    shown = {f'{row.command} {repeat}' for table in specified.values() for row in table.rows.values()
             for repeat in row.repeats}
    joined = {f'eval.py {row.command}' for table in specified.values() for row in table.rows.values() if row.paper}
    assert len(set(commands)) == len(commands)
    assert not set(commands) - shown - joined, 'runs of no table'


def test_a_value_that_does_not_follow_from_the_runs_is_corrected(tmp_path):
    """A value of a table, or a verdict, was changed by hand."""
    specified, claimed = on_pages()
    runs = results.read_runs(results.RUNS)
    for name, right, wrong in [('fine-tuning.md', '| **0.4 ± 0.2** |', '| **0.5 ± 0.2** |'),
                               ('README.md', '| opposite sign |', '| inconclusive |')]:
        text = (results.FOLDER / name).read_text()
        assert right in text
        (tmp_path / name).write_text(text.replace(right, wrong, 1))
        assert results.filled(tmp_path / name, specified, claimed, runs) == text


def test_links_between_pages_lead_to_existing_pages_and_sections():
    texts = {page.name: page.read_text() for page in results.pages()}
    anchors = {name: {re.sub(r'[^\w -]', '', title.lower()).replace(' ', '-')
                      for title in re.findall(r'(?m)^#+ (.*)$', text)} for name, text in texts.items()}
    for name, text in texts.items():
        assert len(text.splitlines()) <= 350, name
        for path, anchor in re.findall(r'\]\((?!http)([\w./-]*)#?([\w-]*)\)', text):
            assert (results.FOLDER / path).exists(), f'{name}: {path}'
            assert not anchor or anchor in anchors[path or name], f'{name}: {path}#{anchor}'
    assert all(name in texts['README.md'] for name in texts if name != 'README.md'), 'the first page links to all'


def test_intervals_in_the_text_of_a_page_are_in_a_table():
    """The table may be on any page, or in the commit that a paragraph names. A text may give a loss without its sign.
    Blocks of code show output of eval.py."""
    text = '\n\n'.join(re.sub(r'(?s)```.*?```', '', page.read_text()) for page in results.pages())
    of_commits = [part for part in text.split('\n\n') if re.search(r'\bcommit\s+[0-9a-f]{7}\b', part)]
    rows, others = [], []
    for line in text.splitlines():
        (rows if line.startswith('|') else others).append(line)
    found = re.findall(r'\d+\.\d+ ± \d+\.\d+', ' '.join(' '.join(others).split()))
    assert len(found) > 100
    in_tables = set(re.findall(r'\d+\.\d+ ± \d+\.\d+', ' '.join(' '.join([*rows, *of_commits]).split())))
    assert set(found) <= in_tables, set(found) - in_tables


@pytest.mark.parametrize('name', ['README.md', 'tests/course/README.md', *(f'{script}.py' for script in SCRIPTS)])
def test_intervals_in_other_texts_are_on_the_results_pages(name):
    """README gives a gain with its sign. Intervals with two digits are examples of the output of eval.py."""
    text = '\n'.join(page.read_text() for page in results.pages())
    for interval in re.findall(r'-?\d+\.\d ± \d+\.\d\b', (ROOT / name).read_text()):
        assert interval in text, f'{name}: {interval}'


def test_the_commands_of_the_pages_are_commands():
    """The script of each row parses its command."""
    for name, table in on_pages()[0].items():
        for row in table.rows.values():
            args = plans.read_flags(f'{row.command} {row.repeats[-1]}')
            assert args.dataset in ('shapes', 'folder', 'vectors', 'cub', 'cars', 'sop', 'inshop'), name
            assert args.seed == 0 or row.repeats[-1].endswith(f'--seed {args.seed}'), name
            patch = re.search(r'--patched (\w+)', row.command)
            assert not patch or patch[1] in patches.ALL
    with pytest.raises(common.UsageError, match='--no-such'):
        plans.read_flags('train_ms.py --no-such 3 --seed 0')


def test_the_steps_of_an_epoch_are_read_from_the_output_of_a_run(run, small, capsys):
    run(train_ms, '--epochs', '0')
    assert results.steps_of(capsys.readouterr().out) == 3, '30 images in batches of 8'


def test_a_command_that_its_script_does_not_understand_is_named_before_any_run(trial):
    table = table_of({'good': 'train_ms.py', 'bad': 'train_ms.py --no-such 3'}, ['--seed 0'])
    with pytest.raises(common.UsageError, match='unrecognized arguments: --no-such 3'):
        results.make(table, trial.file, 1)
    assert trial.made == []


def test_experiments_of_the_course_are_runs_on_the_results_pages():
    """The order of flags, and explicit defaults, are ignored."""
    def read(command):
        patch, script, words = re.match(r'(?:.*--patched (\S+) )?(train_\w+)\.py(.*)', command).groups()
        args = vars(__import__(script).get_args(words.split()))
        return patch, script, args
    page = (ROOT / 'tests/course/README.md').read_text()
    named = set(re.findall(r'`(\w+)`\)', page))
    rows = [read(f'{row.command} {repeat}') for name in named for row in on_pages()[0][name].rows.values()
            for repeat in row.repeats]
    commands = []
    for block in re.findall(r'(?s)```\n(.*?)```', page):
        for variable, values, loop in re.findall(r'for (\w+) in (.*?); do (.*?); done', block):
            commands += [loop.replace(f'${variable}', value) for value in values.split()]
        commands += re.findall(r'(?m)^python (?!tests/).*$', block)
    commands = [one for command in commands for one in command.split('; ')]
    assert len(commands) > 25 and named == {'shapes', 'course', 'speed', 'push', 'species'}
    for command in commands:
        assert read(command.removeprefix('python ')) in rows, command


def test_claims_in_the_readme_are_the_first_of_each_paper():
    """Columns of README: claim, source, paper, ours, verdict. The page also has the number of pairs and the table."""
    specified, claimed = on_pages()
    lines = claims.section(claimed, specified, results.read_runs(results.RUNS))
    page = [[*cells[:4], cells[5]] for cells in (line[2:-2].split(' | ') for line in lines[4:-2])]
    papers = {}
    for row in page:
        papers.setdefault(row[1].split(',')[0], []).append(row)
    wanted = [rows[0] for rows in papers.values()]
    text = (ROOT / 'README.md').read_text()
    verdict = re.compile(r'\| (replicated|inconclusive|opposite sign)(; .*)? \|$')
    shown = [line[2:-2].split(' | ') for line in text.splitlines() if verdict.search(line)]
    assert shown == wanted and len(papers) == 4 and len(page) == len(claimed)
    comparisons, counts = re.match(r'These are (.*?): (.*?)\. ', lines[-1]).groups()
    assert comparisons in ' '.join(text.split()) and counts in ' '.join(text.split())


# ---- what a page specifies


MINE = """# Mine

**Table `mine`**, repeats `--seed 0..1`, flags `--epochs 1`

| | command |
|---|---|
| none | `train_metrix.py --mixup none` |
| push | `tests/results/results.py --patched push train_metrix.py` | `--seed 3, --fold 0..1/4 --seed 5` |
| push - none | |

<!-- end -->

<!-- claims -->

| claim | source | paper | table, difference |
|---|---|---|---|
| it helps | a paper | 3.6 | `mine`, push - none |
| it is larger: a lot | a paper | < 0 | `mine`, push: MAP@R; not comparable |

<!-- end -->
"""


@pytest.fixture
def page(monkeypatch, tmp_path):
    """A page in a temporary folder that results.py takes for the folder of the pages"""
    monkeypatch.setattr(results, 'FOLDER', tmp_path)
    monkeypatch.setattr(results, 'RUNS', tmp_path / 'runs.jsonl')
    (tmp_path / 'runs.jsonl').touch()
    (tmp_path / 'page.md').write_text(MINE)
    return tmp_path / 'page.md'


def test_a_page_says_which_runs_there_are(page):
    specified, claimed = results.read_pages()
    rows, push = specified['mine'].rows, 'tests/results/results.py --patched push train_metrix.py'
    assert rows['none'].command == 'train_metrix.py --epochs 1 --mixup none'
    assert rows['push'].command == f'{push} --epochs 1'
    assert rows['none'].repeats == ['--seed 0', '--seed 1']
    assert rows['push'].repeats == ['--seed 3', '--fold 0/4 --seed 5', '--fold 1/4 --seed 5']
    assert spec.expand('--fold 0..1/4 --seed 5..6') == ['--fold 0/4 --seed 5', '--fold 0/4 --seed 6',
                                                        '--fold 1/4 --seed 5', '--fold 1/4 --seed 6']
    assert specified['mine'].pairs == [('push', 'none')]
    assert claimed[0][:8] == ('it helps', 'a paper', '3.6', 'mine', 'push', 'none', 'R@1', '')
    assert claimed[1][3:8] == ('mine', 'push', '', 'MAP@R', 'not comparable')


def test_a_page_that_is_written_twice_stays_as_it_is_and_takes_a_new_row(page):
    results.main([])
    once = page.read_text()
    assert once != MINE and '|  | runs | R@1 before |' in once and '`--seed 3, --fold 0..1/4 --seed 5`' in once
    results.main([])
    assert page.read_text() == once
    page.write_text(once.replace('| push - none |', '| new | `train_ms.py` |\n| push - none |'))
    assert results.read_pages()[0]['mine'].rows['new'].command == 'train_ms.py --epochs 1'
    results.main([])
    assert results.read_pages()[0]['mine'].rows['new'].typed == 'train_ms.py'


@pytest.mark.parametrize('old, new, place, text', [
    ('push - none | |', 'push - nothing | |', 9, "no row 'nothing'"),
    ('push - none | |', 'push - none | `train_ms.py` |', 9, 'so it has no command'),
    ('`train_metrix.py --mixup none`', '', 7, "row 'none' needs a command"),
    ('`train_metrix.py --mixup none`', '`--mixup none`', 7, "row 'none' needs a command"),
    ('| push - none | |\n', '| none | `train_ms.py` |\n', 9, "has a row 'none' already"),
    ('| push - none | |\n\n', '\n<!-- end -->\n\n**Table `mine`**\n\n| | c |\n|---|---|\n\n', 12,
     'there is a table `mine` already: page.md, line 3'),
    ('repeats `--seed 0..1`, ', '', 7, "row 'none' needs repeats"),
    ('flags `--epochs 1`', 'flag `--epochs 1`', 3, 'flag is not a setting'),
    ('flags `--epochs 1`', 'flags --epochs 1', 3, 'a table begins with'),
    ('flags `--epochs 1`', 'epochs `0, 1`', 3, 'epochs are integers'),
    ('flags `--epochs 1`', 'folds `yours`', 3, 'folds `yours` is not a table'),
    ('flags `--epochs 1`', 'measured `no`', 3, 'measured is `yes`'),
    ('| | command |\n|---|---|\n', '', 3, 'a table must follow'),
    ('<!-- end -->\n\n<!-- claims', '<!-- claims', 3, 'does not end'),
    ('| | command |\n|---|---|\n', '| | paper | command |\n|---|---|---|\n', 7, "in the column 'paper'"),
    ('`mine`, push - none', '`yours`, push - none', 17, 'there is no table `yours`'),
    ('`mine`, push - none', '`mine`, push - nothing', 17, "no row 'nothing'"),
    (': MAP@R', ': luck', 18, "'luck' is not a quantity"),
    (': MAP@R', ': R@1 selected by cross-validation', 18, 'names no folds'),
    (': MAP@R', ': P(Pos) - 0.5', 18, 'is not measured'),
    ('| 3.6 |', '| much |', 17, 'the difference reported'),
    ('`mine`, push - none', 'mine: push - none', 17, 'the last cell'),
])
def test_a_mistake_on_a_page_is_one_line_with_its_place(page, capsys, old, new, place, text):
    assert MINE.count(old) == 1
    page.write_text(MINE.replace(old, new))
    with pytest.raises(SystemExit) as stop:
        common.cli(lambda: results.main([]))
    error = capsys.readouterr().err
    assert stop.value.code == 2 and error.count('\n') == 1
    assert error.startswith(f'error: page.md, line {place}: ') and text in error
    assert page.read_text() == MINE.replace(old, new), 'nothing is written'


# ---- making runs


@pytest.fixture
def trial(monkeypatch, tmp_path):
    """Stub for runs, and a file for their lines. `outcome` is {command: whether it succeeds}, by default True."""
    outcome, made, file = {}, [], tmp_path / 'lines.jsonl'
    monkeypatch.setattr(results, 'ROOT', tmp_path)
    monkeypatch.setattr(results, 'RUNS', file)
    file.touch()
    monkeypatch.setattr(results.common, 'download', lambda *args: made.append(args))

    def start(words, **environment):
        command = ' '.join(words)
        made.append((command, environment))
        if words[0] == 'eval.py':
            rows = [{key: dict(mean=value, interval=None) for key, value in zip(('R@1', 'RP', 'MAP@R'), values)}
                    | dict(setting=setting) for setting, values in (('a', (50, 20, 10)), ('b', (60, 30, 20)))]
            return SimpleNamespace(returncode=0, stdout='a line\n' + json.dumps(dict(rows=rows)))
        folder = tmp_path / 'runs' / words[-1].removeprefix('runs/')
        folder.mkdir(parents=True, exist_ok=True)
        rows = [{'R@1': n, 'R@10': n + 5, 'R@1000': n + 9, 'MAP@R': n / 2, 's+': 0.5, 's-': 0.1234567, 'epoch': n,
                 'minutes': 1.0, 'img/s': 3} for n in (1, 70, 60)]
        (folder / 'log.jsonl').write_text('\n'.join(map(json.dumps, rows)))
        succeeds = outcome.get(command.split(' --name')[0], True)
        printed = '8 epochs of 1046 batches of 32 images, on cpu' if succeeds else 'it went wrong'
        return SimpleNamespace(returncode=not succeeds, stdout=printed)
    monkeypatch.setattr(results, 'start', start)
    return SimpleNamespace(outcome=outcome, made=made, file=file)


def test_a_table_of_two_rows_is_added_by_editing_one_page(trial, page, monkeypatch, capsys):
    monkeypatch.setattr(results, 'RUNS', trial.file)
    results.main(['mine'])
    assert '| none | 2 | 1.0 | 60.0 ± 0.0 | 59.0 ± 0.0 |' in capsys.readouterr().out
    assert [command.split(' --name')[0] for command, _ in trial.made][:3] == [
        'train_metrix.py --epochs 1 --mixup none --seed 0', 'train_metrix.py --epochs 1 --mixup none --seed 1',
        'tests/results/results.py --patched push train_metrix.py --epochs 1 --seed 3']
    results.main([])
    assert '| none | 2 | 1.0 | 60.0 ± 0.0 | 59.0 ± 0.0 |' in page.read_text()
    results.main(['mine'])
    assert len(trial.made) == 5, 'no run is made twice'


def test_a_line_has_the_columns_that_pages_show(trial):
    table = table_of({'x': 'train_ms.py'}, ['--seed 0'])
    assert results.make(table, trial.file, 1) == []
    line = results.read_runs(trial.file)['train_ms.py --seed 0']
    assert line['columns'] == {'epoch': [1, 70, 60], 'R@1': [1, 70, 60], 'MAP@R': [0.5, 35, 30], 'minutes': [1, 1, 1],
                               'R@10': [65], 'R@1000': [69], 's+': [0.5], 's-': [0.123457]}
    assert line['steps'] == 1046 and line['torch'] == torch.__version__.split('+')[0]
    assert {'commit', 'machine'} <= line.keys()
    trial.file.write_text('')
    shutil.rmtree(results.ROOT / 'runs')
    results.make(table._replace(epochs=[1, 60]), trial.file, 1)
    assert results.read_runs(trial.file)['train_ms.py --seed 0']['columns'] == {
        'epoch': [1, 60], 'R@1': [1, 60], 'MAP@R': [0.5, 30], 'R@10': [65], 'R@1000': [69], 'minutes': [1]}


def test_precomputed_features_are_written_as_the_tables_read_them(monkeypatch, tmp_path, folder):
    monkeypatch.setattr(results, 'ROOT', tmp_path)
    (tmp_path / 'data').mkdir()
    (tmp_path / 'data/cub50').symlink_to(folder)
    torch.manual_seed(0)
    torch.save(common.make_trunk('resnet18').state_dict(), tmp_path / 'data/resnet18.pth')
    results.store_vectors()
    data = common.load_dataset('vectors', tmp_path / 'data/birds')
    assert data.train.items.shape == (30, 512) and data.query.classes == [f'car{n}' for n in range(4)]
    assert data.query.paths[0].endswith('car0/0.jpg')


def test_an_interrupted_run_continues_in_its_folder(trial):
    table, folder = table_of({'x': 'train_ms.py'}, ['--seed 0', '--seed 1']), results.name_of('train_ms.py --seed 1')
    (results.ROOT / 'runs' / folder).mkdir(parents=True)
    (results.ROOT / 'runs' / folder / 'last.pt').touch()
    assert results.make(table, trial.file, 1) == []
    first, second = (command for command, _ in trial.made)
    assert re.fullmatch(r'train_ms.py --seed 0 --name results-\w{8}', first)
    assert second == f'train_ms.py --seed 1 --resume runs/{folder}'


def test_the_runs_of_a_papers_table_continue_after_a_failure_and_an_interruption(trial, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: True)
    monkeypatch.setattr(torch.cuda, 'device_count', lambda: 2)
    monkeypatch.setattr(torch.cuda, 'get_device_name', lambda: 'a card')
    table, bad = on_pages()[0]['cub'], 'train_ms.py --dataset cub --seed 1'
    trial.outcome[bad] = False
    assert results.make(table, trial.file, jobs=2) == [bad]
    assert 'it went wrong' in capsys.readouterr().out
    assert trial.made[0] == ('cub', results.ROOT / 'data'), 'the data are downloaded first'
    assert {environment['CUDA_VISIBLE_DEVICES'] for _, environment in trial.made[1:]} == {'0', '1'}
    assert len(trial.made) == 22 and results.missing(table, results.read_runs(trial.file)) == [bad]
    trial.outcome.clear()
    shutil.rmtree(results.ROOT / 'runs')
    assert results.make(table, trial.file, jobs=1) == [] and len(trial.made) == 24
    runs = results.read_runs(trial.file)
    assert results.missing(table, runs) == []
    assert ('| ms | 3 | 60.0 ± 0.0 | 70.0 ± 0.0 | -5.7 ± 0.0 | 65.7 | Multi-Similarity, with BN-Inception | '
            '`train_ms.py` |') in tables.section(table, {}, runs)


def test_folds_of_the_reality_check_are_joined_by_eval(trial):
    table = on_pages()[0]['reality-check-cub']
    bad = f'{table.rows["ms"].command} --fold 2/4 --seed 3'
    trial.outcome[bad] = False
    assert results.make(table, trial.file, jobs=1) == [bad]
    joined = [command for command, _ in trial.made if command.startswith('eval.py')]
    assert len(joined) == 13 and all(command.count('runs/results-') == 40 for command in joined)
    lines = tables.section(table, {}, results.read_runs(trial.file))
    assert lines[4].startswith('| contrastive | 40 | 50.00, 20.00, 10.00 | -9.7 | 60.00, 30.00, 20.00 | -8.1 | '
                               '59.73, 31.98, 21.18 | 68.13, 37.24, 26.53 | `train_contrastive.py')
    assert lines[15].startswith('| ms | 39 |  |  |  |  | 57.60, 30.84, 20.15 | 65.04, 35.40, 24.70 |')


def test_a_plan_says_what_is_missing(trial, capsys):
    results.main(['cub', '--plan'])
    out = capsys.readouterr().out.splitlines()
    assert '2,880 steps, 345,600 images, 0.8 h, 5 GB: python train_proxy_anchor.py --dataset cub --seed 0' in out
    assert len(out) == 22 and out[-1].startswith('cub: 21 runs, ')
    assert not trial.made


def test_a_trial_has_more_flags_and_separate_files(trial, monkeypatch, tmp_path):
    monkeypatch.setattr(results, 'TRIAL', tmp_path / 'runs/trial.jsonl')
    results.main(['hse-cub', '--add', '--steps 3 --arch resnet18'])
    assert not trial.file.read_text()
    lines = (tmp_path / 'runs/trial.jsonl').read_text().splitlines()
    assert len(lines) == 27 and all('--steps 3 --arch resnet18 --seed' in line for line in lines)
    assert '| npair, no hybrids | 3 | 60.0 ± 0.0 |' in (tmp_path / 'runs/trial.md').read_text()


def test_metrics_are_read_from_the_output_of_the_analyses(monkeypatch):
    """For a script without mixup, only the metrics of eval.py are read."""
    printed = {'eval.py': 'a line\n' + json.dumps({'alignment': 0.3, 'uniformity': -2, 'utilization': 0.5, 'NMI': 60}),
               'tests/results/fig2.py': """P(Pos(a, v)) with beta 18, gamma 75, m 0.77: measured, and by Eq. (25)
  lambda  measured  Eq. (25)  mean s(a, v)  threshold     pairs
    0.45     0.300     0.350         0.700      0.768     20000
    0.55     0.600     0.520         0.720      0.772     20000
utilization, Eq. (12): 0.500 by clean examples, 0.400 by these and the mixed ones of 20 batches
the figure: runs/x/positivity.png
"""}
    monkeypatch.setattr(results, 'start', lambda words, **_: SimpleNamespace(returncode=0, stdout=printed[words[0]]))
    done, found = results.measure('runs/x/last.pt', True, {})
    assert done.returncode == 0 and found == dict(measured={
        'alignment': 0.3, 'uniformity': -2, 'utilization': 0.5, 'NMI': 60, 'utilization, mixed': 0.4, 'P(Pos)': 0.6,
        'Fig. 2': pytest.approx(0.08)})
    assert results.measure('runs/x/last.pt', False, {})[1]['measured'].keys() == {
        'alignment', 'uniformity', 'utilization', 'NMI'}
    monkeypatch.setattr(results, 'start', lambda words, **_: SimpleNamespace(returncode=2, stdout=''))
    assert results.measure('runs/x/last.pt', True, {})[0].returncode == 2, 'it is reported as a failed run'


# ---- patches


def test_patches_change_the_mixed_loss_as_they_say(monkeypatch):
    """ms with embedding mixup, on twelve vectors of four classes"""
    z = torch.nn.functional.normalize(torch.randn(12, 5, generator=torch.Generator().manual_seed(0)), dim=1)
    y, hyper = torch.arange(12) // 3, dict(beta=18.0, gamma=75.0, m=0.77)
    config = train_metrix.MixupConfig('embed', 'pos-neg', None, 2.0)

    def loss(kind='ms', hyper=hyper):
        torch.manual_seed(0)
        return train_metrix.mixed_loss(train_metrix.BaseLoss(kind, hyper), config, None, dict(embed=z), y).item()

    def patched(name, *arguments):
        with monkeypatch.context() as context:
            for function, replacement in patches.PATCHES[name](*arguments).items():
                context.setattr(train_metrix, function, replacement)
            return loss()
    assert patched('softer', 2, 10, 0.5) == loss(hyper=dict(beta=2, gamma=10, m=0.5)) != loss()
    monkeypatch.setattr(train_metrix, 'labelled_loss', lambda s, y, valid, kind, **hyper: train_metrix.TABLE_1[kind](
        s, y * valid, (1 - y) * valid, **hyper)[1])
    only_push = loss()
    monkeypatch.undo()
    assert patched('push') == pytest.approx(only_push, rel=1e-5) and only_push < loss() / 2
    torch.manual_seed(0)
    lam = torch.distributions.Beta(2.0, 2.0).sample().item()
    assert patched('released') == patches.released_loss(z, y, lam, **hyper).item()
    assert patches.PATCHES['released']()['clean_loss']('ms', z, y) == 0, 'it replaces clean and mixed loss'


def test_a_patch_replaces_a_function_of_the_script(monkeypatch):
    """`softer` passes its three arguments to the mixed loss and ignores the flags."""
    seen = []
    monkeypatch.setattr(train_metrix, 'mixed_loss', lambda base, *args: seen.append((base.kind, base.hyper)))
    monkeypatch.setattr(train_metrix, 'main', lambda words: train_metrix.mixed_loss(
        train_metrix.BaseLoss('proxy_anchor', {})) or words)
    results.main(['--patched', 'softer:2:10:0.5', 'train_metrix.py', '--mixup', 'feature'])
    assert seen == [('ms', dict(beta=2, gamma=10, m=0.5))]
    for words in ([], ['push'], ['pull', 'train_metrix.py'], ['push', 'train_ms.py'], ['softer:2', 'train_metrix.py'],
                  ['softer:2:10:x', 'train_metrix.py']):
        with pytest.raises(common.UsageError):
            results.main(['--patched', *words])


def test_the_released_loss_of_ms_by_hand():
    """Four unit vectors of two classes, (0, 1) and (2, 3), all kept by the miner. The triplets (a, p, n) are (0, 1, 2),
    (0, 1, 3), (1, 0, 2), (1, 0, 3), (2, 3, 0), (2, 3, 1), (3, 2, 0), (3, 2, 1). The mask has entries (0, 1), (1, 0),
    (2, 3), (3, 2); triplets 0 and 1 have anchor 0, triplets 2 and 3 anchor 1."""
    z = [(math.cos(t), math.sin(t)) for t in (0.0, 0.7, 0.3, 1.1)]
    beta, gamma, m, lam = 3.0, 5.0, 0.6, 0.3

    def cosine(a, v):
        return (z[a][0] * v[0] + z[a][1] * v[1]) / math.hypot(*v)

    def mixed_embedding(p, n):
        return [lam * one + (1 - lam) * other for one, other in zip(z[p], z[n])]

    def plus(s):
        return math.exp(-beta * (s - m))

    def minus(s):
        return math.exp(gamma * (s - m))
    pull = [lam * (1 + plus(cosine(a, z[p]))) for a, p in enumerate((1, 0, 3, 2))]
    push = [(1 - lam) * (1 + sum(minus(cosine(a, z[n])) for n in others))
            for a, others in enumerate([(2, 3), (2, 3), (0, 1), (0, 1)])]
    # anchor 0 and triplet 1, anchor 0 and triplet 0, anchor 1 and triplet 3, anchor 1 and triplet 2
    mixed = [1 + plus(cosine(a, mixed_embedding(p, n))) for a, p, n in ((0, 1, 3), (0, 1, 2), (1, 0, 3), (1, 0, 2))]
    wanted = sum(math.log(a + 0.4 * b) / beta + math.log(c) / gamma for a, b, c in zip(pull, mixed, push)) / 8
    found = patches.released_loss(torch.tensor(z, dtype=torch.float64), torch.tensor([0, 0, 1, 1]), lam, beta, gamma, m,
                                  epsilon=2)
    assert found.item() == pytest.approx(wanted, abs=1e-15) and wanted == pytest.approx(0.2022, abs=1e-4)


def test_the_released_loss_of_few_triplets_is_finite():
    """One class, or classes of one image, give no triplets, and clean sums without a term."""
    z = torch.eye(4, dtype=torch.float64).requires_grad_()
    for y in ([0, 0, 0, 0], [0, 1, 2, 3], [0, 0, 0, 1]):
        loss = patches.released_loss(z, torch.tensor(y), 0.3, 18.0, 75.0, 0.77)
        loss.backward()
        assert loss.isfinite() and z.grad.isfinite().all()
