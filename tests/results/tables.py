"""Markdown tables of finished runs. spec.py reads which tables there are, results.py makes the runs.

A run is a line of runs.jsonl:

    command   including the repeat
    columns   {'epoch': [0, 2, 4], 'R@1': [...], ...}: one value per evaluation, the first before training. s+, s- and
              R@K with K > 1 have the last value only, as have the minutes of a table with `epochs`
    steps     per epoch
    measured  {'alignment': 0.44, ...}, metrics of the trained network; only for tables with `measured`
    commit, machine, torch

In all functions, `runs` is {command: run}; `found`, from `runs_of`, is {row: {repeat: run}} of one table; `quantity`
is a function run -> value, or None if the run lacks it.
"""
import re
from statistics import mean, variance
from typing import Callable, NamedTuple

from spec import PAPER

from eval import interval

# {metric of a trained network: digits shown}
METRICS = {'alignment': 2, 'uniformity': 2, 'utilization': 2, 'utilization, mixed': 2, 'P(Pos)': 2, 'Fig. 2': 2,
           'NMI': 1}


# ---- quantities of a run


def before(key):
    """Value before training"""
    return lambda run: run['columns'][key][0]


def last(key):
    return lambda run: run['columns'][key][-1]


def gain(key):
    return lambda run: run['columns'][key][-1] - run['columns'][key][0]


def gap(run):
    """s+ - s- after the last epoch"""
    return last('s+')(run) - last('s-')(run)


def after(epoch, key):
    """Value after this epoch; None if the run was not evaluated then"""
    def quantity(run):
        epochs = run['columns']['epoch']
        return run['columns'][key][epochs.index(epoch)] if epoch in epochs else None
    return quantity


def best(run):
    """Highest R@1 after any epoch"""
    return max(run['columns']['R@1'][1:])


def best_minus_last(run):
    return best(run) - last('R@1')(run)


def reached(key):
    """Epoch or minutes of the first evaluation that has 95% of the last MAP@R"""
    def quantity(run):
        evaluations = zip(run['columns'][key], run['columns']['MAP@R'])
        return next(value for value, map_at_r in evaluations if map_at_r >= 0.95 * last('MAP@R')(run))
    return quantity


def measured(key, less=0):
    """Metric of the trained network minus a constant; None if it was not measured"""
    def quantity(run):
        found = run.get('measured', {}).get(key)
        return None if found is None else found - less
    return quantity


def stop(run, epoch):
    """The run, cut off after this epoch"""
    end = run['columns']['epoch'].index(epoch) + 1
    return run | dict(columns={key: values[:end] for key, values in run['columns'].items()})


# ---- values of one row of a table


def runs_of(table, runs):
    """{row: {repeat: run}} of the finished runs"""
    found = {}
    for name, row in table.rows.items():
        commands = {repeat: f'{row.command} {repeat}' for repeat in row.repeats}
        found[name] = {repeat: runs[command] for repeat, command in commands.items() if command in runs}
    return found


def per_repeat(of_row, quantity):
    """{repeat: run} -> {repeat: value}"""
    found = {repeat: quantity(run) for repeat, run in of_row.items()}
    return {repeat: value for repeat, value in found.items() if value is not None}


def differences(found, row, base, quantity):
    """{repeat: row minus base}, for the repeats that both have"""
    ours, theirs = (per_repeat(found.get(name, {}), quantity) for name in (row, base))
    return {repeat: value - theirs[repeat] for repeat, value in ours.items() if repeat in theirs}


def counted(values):
    """{repeat: value} -> the values that a confidence interval counts. If several seeds are combined with folds, each
    seed counts once, by the mean over its folds, because most images are in several of its folds."""
    seeds = {}
    for repeat, value in values.items():
        seeds.setdefault(repeat.partition('--seed')[2], []).append(value)
    return [mean(of_seed) for of_seed in seeds.values()] if len(seeds) > 1 else list(values.values())


def cell(values, digits=1, bold=False):
    """Mean and 95% CI as text. With `bold`, it is bold if there are at least three values and the CI excludes 0."""
    if not values:
        return ''
    middle, half = interval(values)
    text = f'{round(middle, digits) + 0:.{digits}f}'                     # + 0 makes 0.0 of -0.0
    text += '' if half is None else f' ± {half:.{digits}f}'
    return f'**{text}**' if bold and len(values) > 2 and abs(middle) > half else text


# ---- tables. A table is a list of rows, and a row a list of cells; the first row is the header.


class Column(NamedTuple):
    title: str
    quantity: Callable
    digits: int = 1
    compared: bool = True       # whether differences of two rows show it as well
    interval: bool = True


LAST_EPOCH = [
    Column('R@1 before', before('R@1'), compared=False, interval=False),
    Column('R@1', last('R@1')),
    Column('gain', gain('R@1'), compared=False),
    Column('MAP@R before', before('MAP@R'), compared=False, interval=False),
    Column('MAP@R', last('MAP@R')),
    Column('gain', gain('MAP@R'), compared=False),
    Column('s+', last('s+'), 2, compared=False),
    Column('s-', last('s-'), 2, compared=False),
    Column('s+ - s-', gap, 2)]
BEST_EPOCH = [
    Column('last epoch', last('R@1')),
    Column('best epoch', best),
    Column('best - last', best_minus_last),
    Column('epochs to 95%', reached('epoch')),
    Column('minutes to 95%', reached('minutes'))]


def markdown(rows):
    """Markdown lines of a table"""
    lines = [f'| {" | ".join(map(str, cells))} |' for cells in rows]
    return [lines[0], '|---' * len(rows[0]) + '|', *lines[1:]]


def grid(found, pairs, columns, title=''):
    """A table with a row for each name in `found`, and below them the differences `pairs`"""
    rows = [[title, 'runs', *(column.title for column in columns)]]
    for name, of_row in found.items():
        cells = []
        for column in columns:
            values = counted(per_repeat(of_row, column.quantity))
            if values and not column.interval:
                values = [mean(values)]
            cells.append(cell(values, column.digits))
        rows.append([name, len(of_row), *cells])
    for row, base in pairs:
        values = [counted(differences(found, row, base, column.quantity)) for column in columns]
        cells = [cell(of_column, column.digits, bold=True) if column.compared else ''
                 for of_column, column in zip(values, columns)]
        rows.append([f'{row} - {base}', max(map(len, values)), *cells])
    return rows


def with_commands(rows, table):
    """Append the columns that are written by hand: values of a paper, repeats of single rows, commands."""
    by_hand = {}                                # {column: {row: cell}}
    for column in PAPER:
        by_hand[column] = {name: row.paper[column] for name, row in table.rows.items() if column in row.paper}
    by_hand['repeats'] = {name: f'`{row.own_repeats}`' for name, row in table.rows.items() if row.own_repeats}
    by_hand['command'] = {name: f'`{row.typed}`' for name, row in table.rows.items()}
    columns = [column for column, cells in by_hand.items() if cells]
    header, *others = rows
    return [[*header, *columns], *([*cells, *(by_hand[column].get(cells[0], '') for column in columns)]
                                   for cells in others)]


def section(table, tables, runs):
    """Lines of a table on its page: its settings, its values, and what its runs took"""
    found = runs_of(table, runs)
    further = []
    columns = {column for row in table.rows.values() for column in row.paper}
    if 'paper' in columns:
        first = with_paper(table, found)
        further = selected_by_folds(table, tables, runs) if table.folds else []
    elif 'paper, separated' in columns:
        first = with_paper_on_folds(table, found, runs)
    elif table.epochs:
        first = by_epoch(table, found, 'MAP@R')
        if not any(tables.get(other.folds) is table for other in tables.values()):     # folds select by MAP@R only
            further = ['', *markdown(by_epoch(table, found, 'R@1'))]
        further += selected_by_folds(table, tables, runs) if table.folds else []
    else:
        first = grid(found, table.pairs, LAST_EPOCH)
        further = [*(metrics(table, found) if table.measured else []), *best_epochs(table, found)]
    return [table.settings, '', *markdown(with_commands(first, table)), '', where_run(found), *further]


def by_epoch(table, found, key):
    columns = [Column(str(epoch), after(epoch, key)) for epoch in table.epochs]
    return grid(found, table.pairs, columns, f'{key} after epoch')


def where_run(found):
    """One sentence about the runs of a table: number, time, machine"""
    every = [run for of_row in found.values() for run in of_row.values()]
    if not every:
        return 'Not run yet.'
    minutes = [last('minutes')(run) for run in every]
    span, hours = f'{min(minutes):.1f} to {max(minutes):.1f} minutes', f'{sum(minutes) / 60:.2g} hours'
    machines = ' or '.join(sorted({run['machine'] for run in every}))
    return f'{len(every)} runs of {span}, {hours} in all, each on {machines}.'


def metrics(table, found):
    """Lines of a table with the metrics of the trained networks"""
    every = [run for of_row in found.values() for run in of_row.values()]
    keys = [key for key in METRICS if every and all(key in run.get('measured', {}) for run in every)]
    if not keys:
        return []
    return ['', *markdown(grid(found, table.pairs, [Column(key, measured(key), METRICS[key]) for key in keys]))]


def best_epochs(table, found):
    """Lines of a table that compares last and best epoch, and says how fast the runs learn; [] for folds, and if a run
    has fewer than five evaluations"""
    every = [run for of_row in found.values() for run in of_row.values()]
    on_folds = any('--fold' in repeat for row in table.rows.values() for repeat in row.repeats)
    if on_folds or not every or min(len(run['columns']['epoch']) for run in every) < 5:
        return []
    return ['', 'R@1 of these runs after the last epoch, and after the epoch that is best on the test set, which many',
            'papers report (Reality Check, Section 2.3); and the first evaluation with 95% of the final MAP@R:', '',
            *markdown(grid(found, table.pairs, BEST_EPOCH))]


# ---- selection by cross-validation


class Choice(NamedTuple):
    on_folds: float         # highest mean MAP@R of the method on the folds
    steps_on_folds: int     # steps after which it is reached
    epoch: int              # in this table: the evaluation nearest to it in steps
    steps: int              # steps at this evaluation; both are '' if the row has not been run


def method(row):
    """METHOD of a row `METHOD @ SETTING`: these rows are settings of one method"""
    return row.split(' @ ')[0]


def candidates(folds, runs):
    """[(row, steps, mean MAP@R)] of a table of folds, for each row and each evaluation that all its folds have"""
    found = []
    for row, of_row in runs_of(folds, runs).items():
        if len(of_row) < len(folds.rows[row].repeats):
            continue
        run = next(iter(of_row.values()))
        for epoch in run['columns']['epoch']:
            values = per_repeat(of_row, after(epoch, 'MAP@R'))
            if len(values) == len(of_row):
                found.append((row, epoch * run['steps'], mean(values.values())))
    return found


def choose(table, tables, runs):
    """{row: Choice}: for each method of a table, the setting and evaluation with the highest mean MAP@R on the folds"""
    best_of = {}                                # {method: candidate}
    for candidate in candidates(tables[table.folds], runs):
        name = method(candidate[0])
        if name not in best_of or candidate[2] > best_of[name][2]:
            best_of[name] = candidate
    chosen = {}
    for name in map(method, table.rows):
        if name in best_of:
            row, steps, map_at_r = best_of[name]
            chosen[row] = Choice(map_at_r, steps, *nearest(table, runs_of(table, runs).get(row), steps))
    return chosen


def nearest(table, of_row, steps):
    """Epoch of the evaluation of a row that is nearest to this number of steps, and its steps"""
    if not of_row:
        return '', ''
    run = next(iter(of_row.values()))
    epochs = table.epochs or run['columns']['epoch']
    epoch = min(epochs, key=lambda epoch: abs(epoch * run['steps'] - steps))
    return epoch, epoch * run['steps']


def stopped(table, tables, runs):
    """{row: {repeat: run}}: the selected rows, with their runs cut off after the selected epoch"""
    found = runs_of(table, runs)
    return {row: {repeat: stop(run, choice.epoch) for repeat, run in found.get(row, {}).items()
                  if choice.epoch in run['columns']['epoch']} for row, choice in choose(table, tables, runs).items()}


def selected_by_folds(table, tables, runs):
    """Lines of a table with the selected rows at the selected epoch"""
    chosen, found = choose(table, tables, runs), stopped(table, tables, runs)
    if not chosen:
        return []
    pairs = [(row, base) for row, base in table.pairs if row in found and base in found]
    rows = grid(found, pairs, [Column('MAP@R', last('MAP@R')), Column('R@1', last('R@1'))])
    rows[0][2:2] = ['MAP@R on folds', 'steps on folds', 'steps']
    for cells in rows[1:]:
        choice = chosen.get(cells[0])
        cells[2:2] = [f'{choice.on_folds:.1f}', choice.steps_on_folds, choice.steps] if choice else ['', '', '']
    return ['', f'At the step with the highest mean MAP@R in cross-validation (`{table.folds}`), or the evaluation '
            'nearest to it:', '', *markdown(rows)]


# ---- tables of the papers


def with_paper(table, found):
    """Our R@1 over seeds, and its difference to the paper's"""
    rows = grid(found, table.pairs, [Column('last epoch', last('R@1')), Column('best on the test set', best)])
    rows[0].append('last epoch - paper')
    for cells in rows[1:]:
        row = table.rows.get(cells[0])
        paper = float(row.paper['paper']) if row else 0
        cells.append(cell([last('R@1')(run) - paper for run in found[cells[0]].values()]) if row else '')
    return rows


def with_paper_on_folds(table, found, runs):
    """Our R@1, RP and MAP@R over folds, which eval.py has joined, and the difference to the paper's R@1"""
    rows = [['', 'runs', 'separated: R@1, RP, MAP@R', 'R@1 - paper', 'concatenated: R@1, RP, MAP@R', 'R@1 - paper']]
    for name, row in table.rows.items():
        cells = [name, len(found[name])]
        for n, setting in enumerate(('separated', 'concatenated')):
            joined = runs.get(f'eval.py {row.command}')
            if joined:
                ours = [joined['columns'][key][n] for key in ('R@1', 'RP', 'MAP@R')]
                paper = float(row.paper[f'paper, {setting}'].split(', ')[0])
                cells += [', '.join(f'{value:.2f}' for value in ours), f'{ours[0] - paper:.1f}']
            else:
                cells += ['', '']
        rows.append(cells)
    return rows


# ---- spread of seeds


def spread(runs):
    """Lines of a table: standard deviation of R@1 and MAP@R over the seeds of the same command"""
    groups = {}                                 # {data: {command: [run of each seed]}}
    for command, run in runs.items():
        if '--seed' in command and '--fold' not in command:
            data = re.search(r'--data (\S+)', command)
            of_data = groups.setdefault(f'`{data[1] if data else "shapes"}`', {})
            of_data.setdefault(re.sub(r' --seed \d+', '', command), []).append(run)
    rows = [['data', 'commands', 'runs', 'R@1', 'MAP@R']]
    for data, commands in groups.items():
        repeated = [of_command for of_command in commands.values() if len(of_command) > 2]
        if repeated:
            deviations = [pooled_deviation([[last(key)(run) for run in of_command] for of_command in repeated])
                     for key in ('R@1', 'MAP@R')]
            rows.append([data, len(repeated), sum(map(len, repeated)), *(f'{value:.2f}' for value in deviations)])
    return markdown(rows)


def pooled_deviation(groups):
    """Pooled standard deviation of groups of values, each around its own mean"""
    squares = sum((len(group) - 1) * variance(group) for group in groups)
    return (squares / sum(len(group) - 1 for group in groups)) ** 0.5
