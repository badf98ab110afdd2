"""Numbers of finished runs as Markdown tables. spec.py says which tables there are, and results.py makes the runs.

A run is a line of runs.jsonl:

    command   with its repeat
    columns   {'epoch': [0, 2, 4], 'R@1': [...], ...}, a number for each evaluation, the first before training; of s+,
              s- and R@K with K > 1 only the last one, and where a table has `epochs`, of the minutes, too
    steps     in an epoch
    measured  {'alignment': 0.44, ...}, of the network when its training had ended; only in tables that are measured
    commit, machine, torch

In all functions, `runs` is {command: run}; `found`, by `runs_of`, is {row: {repeat: run}} for one table; and `number`
is a function that takes a number from a run.
"""
import re
from statistics import mean, variance
from typing import Callable, NamedTuple

from spec import PAPER

from eval import interval

# What may be measured of a network, and with how many digits it is shown
MEASURES = {'alignment': 2, 'uniformity': 2, 'utilization': 2, 'utilization, mixed': 2, 'P(Pos)': 2, 'Fig. 2': 2,
            'NMI': 1}


# ---- numbers of a run


def is_old(run):
    """Whether it was made with other batches and crops than today, see README.md: such a run has no R@K but R@1"""
    return not any(key.startswith('R@') and key != 'R@1' for key in run['columns'])


def before(key):
    """What the network had before training"""
    return lambda run: run['columns'][key][0]


def last(key):
    return lambda run: run['columns'][key][-1]


def gain(key):
    return lambda run: run['columns'][key][-1] - run['columns'][key][0]


def gap(run):
    """s+ - s-, of the last epoch"""
    return last('s+')(run) - last('s-')(run)


def after(epoch, key):
    """The number after this epoch; None if the run was not evaluated then"""
    def number(run):
        epochs = run['columns']['epoch']
        return run['columns'][key][epochs.index(epoch)] if epoch in epochs else None
    return number


def best(run):
    """The highest R@1 after any epoch"""
    return max(run['columns']['R@1'][1:])


def best_minus_last(run):
    return best(run) - last('R@1')(run)


def reached(key):
    """The epoch, or the minutes, of the first evaluation that has 95 % of the last MAP@R"""
    def number(run):
        evaluations = zip(run['columns'][key], run['columns']['MAP@R'])
        return next(value for value, map_at_r in evaluations if map_at_r >= 0.95 * last('MAP@R')(run))
    return number


def measured(key, less=0):
    """What was measured of the network, less a constant; None if it was not"""
    def number(run):
        found = run.get('measured', {}).get(key)
        return None if found is None else found - less
    return number


def stop(run, epoch):
    """The run as it was after an epoch"""
    end = run['columns']['epoch'].index(epoch) + 1
    return run | dict(columns={key: values[:end] for key, values in run['columns'].items()})


def at_equal_map_at_r(ours, theirs):
    """R@1 at the end of a run, less that of another one where the MAP@R of that one last falls through the same value,
    drawn straight between evaluations; None if it does not"""
    wanted = last('MAP@R')(ours)
    map_at_r, recall = theirs['columns']['MAP@R'], theirs['columns']['R@1']
    falls = [n for n in range(len(recall) - 1) if map_at_r[n] >= wanted > map_at_r[n + 1]]
    if not falls:
        return None
    n = falls[-1]
    way = (map_at_r[n] - wanted) / (map_at_r[n] - map_at_r[n + 1])          # from evaluation n, 0, to the next one, 1
    return last('R@1')(ours) - (recall[n] + way * (recall[n + 1] - recall[n]))


# ---- numbers of a row


def runs_of(table, runs):
    """{row: {repeat: run}} of the finished runs"""
    found = {}
    for name, row in table.rows.items():
        commands = {repeat: f'{row.command} {repeat}' for repeat in row.repeats}
        found[name] = {repeat: runs[command] for repeat, command in commands.items() if command in runs}
    return found


def numbers(of_row, number):
    """{repeat: number} of {repeat: run}"""
    found = {repeat: number(run) for repeat, run in of_row.items()}
    return {repeat: value for repeat, value in found.items() if value is not None}


def differences(found, row, base, number):
    """{repeat: difference}, for the repeats that both rows have"""
    ours, theirs = (numbers(found.get(name, {}), number) for name in (row, base))
    return {repeat: value - theirs[repeat] for repeat, value in ours.items() if repeat in theirs}


def counted(values):
    """The numbers that count, of {repeat: number}: all of them. But where several seeds are crossed with folds, there
    is one for each seed, the mean over its folds, because folds share most of their images."""
    seeds = {}
    for repeat, value in values.items():
        seeds.setdefault(repeat.partition('--seed')[2], []).append(value)
    return [mean(of_seed) for of_seed in seeds.values()] if len(seeds) > 1 else list(values.values())


def cell(values, digits=1, bold=False):
    """Mean and 95 % interval as text; if `bold`, three numbers or more are in bold where the interval excludes 0."""
    if not values:
        return ''
    middle, half = interval(values)
    text = f'{round(middle, digits) + 0:.{digits}f}'                     # + 0 makes 0.0 of -0.0
    text += '' if half is None else f' ± {half:.{digits}f}'
    return f'**{text}**' if bold and len(values) > 2 and abs(middle) > half else text


# ---- tables. A table is a list of rows, and a row a list of cells; the first row is the header.


class Column(NamedTuple):
    title: str
    number: Callable
    digits: int = 1
    compared: bool = True       # whether it is shown for differences, too
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
    Column('epochs to 95 %', reached('epoch')),
    Column('minutes to 95 %', reached('minutes'))]


def markdown(rows):
    """Lines of Markdown of a table"""
    lines = [f'| {" | ".join(map(str, cells))} |' for cells in rows]
    return [lines[0], '|---' * len(rows[0]) + '|', *lines[1:]]


def grid(found, pairs, columns, title=''):
    """A table of all rows, and of all pairs below them"""
    rows = [[title, 'runs', *(column.title for column in columns)]]
    for name, of_row in found.items():
        cells = []
        for column in columns:
            values = counted(numbers(of_row, column.number))
            if values and not column.interval:
                values = [mean(values)]
            cells.append(cell(values, column.digits))
        rows.append([name, len(of_row), *cells])
    for row, base in pairs:
        values = [counted(differences(found, row, base, column.number)) for column in columns]
        cells = [cell(of_column, column.digits, bold=True) if column.compared else ''
                 for of_column, column in zip(values, columns)]
        rows.append([f'{row} - {base}', max(map(len, values)), *cells])
    return rows


def with_commands(rows, table):
    """Adds to a table what its writer gave: what a paper has, repeats of single rows, and commands"""
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
    """What a page has of a table, as lines: its settings, numbers, and where they come from"""
    found = runs_of(table, runs)
    further = []
    columns = {column for row in table.rows.values() for column in row.paper}
    if 'paper' in columns:
        first = beside_paper(table, found)
    elif 'paper, separated' in columns:
        first = beside_paper_on_folds(table, found, runs)
    elif table.epochs:
        first = by_epoch(table, found, 'MAP@R')
        second = with_equal_map_at_r(by_epoch(table, found, 'R@1'), table, found)
        further = ['', *markdown(second), *(by_folds(table, tables, runs) if table.folds else [])]
    else:
        first = grid(found, table.pairs, LAST_EPOCH)
        further = [*(measures(table, found) if table.measured else []), *best_epochs(table, found)]
    return [table.settings, '', *markdown(with_commands(first, table)), '', where_run(found), *further, '']


def by_epoch(table, found, key):
    columns = [Column(str(epoch), after(epoch, key)) for epoch in table.epochs]
    return grid(found, table.pairs, columns, f'{key} after epoch')


def with_equal_map_at_r(rows, table, found):
    """Adds to the differences of R@1 by epoch that at equal MAP@R, where all pairs have it"""
    equal = []
    for row, base in table.pairs:
        values = {repeat: at_equal_map_at_r(run, found[base][repeat]) for repeat, run in found[row].items()
                  if repeat in found[base]}
        equal.append('' if None in values.values() else cell(counted(values), bold=True))
    if not any(equal):
        return rows
    return [[*cells, text] for cells, text in zip(rows, ['at equal MAP@R', *[''] * len(found), *equal])]


def where_run(found):
    """A sentence on all runs of a table"""
    every = [run for of_row in found.values() for run in of_row.values()]
    if not every:
        return 'Not run yet.'
    minutes = [last('minutes')(run) for run in every]
    span, hours = f'{min(minutes):.1f} to {max(minutes):.1f} minutes', f'{sum(minutes) / 60:.2g} hours'
    machines = ' or '.join(sorted({run['machine'] for run in every}))
    return f'{len(every)} runs of {span}, {hours} in all, each on {machines}.'


def measures(table, found):
    """What was measured of the networks of a table, as lines"""
    every = [run for of_row in found.values() for run in of_row.values()]
    keys = [key for key in MEASURES if every and all(key in run.get('measured', {}) for run in every)]
    if not keys:
        return []
    return ['', *markdown(grid(found, table.pairs, [Column(key, measured(key), MEASURES[key]) for key in keys]))]


def best_epochs(table, found):
    """What choosing the best epoch on the test set is worth, and how fast runs learn, as lines; [] on folds, and unless
    all runs were evaluated often"""
    every = [run for of_row in found.values() for run in of_row.values()]
    on_folds = any('--fold' in repeat for row in table.rows.values() for repeat in row.repeats)
    if on_folds or not every or min(len(run['columns']['epoch']) for run in every) < 5:
        return []
    return ['', 'R@1 of the same runs by the last epoch, and by the epoch that is best on the test set, which papers',
            'often report (Reality Check, Section 2.3); and when a run first has 95 % of its last MAP@R:', '',
            *markdown(grid(found, table.pairs, BEST_EPOCH))]


# ---- what folds choose


class Choice(NamedTuple):
    on_folds: float         # the highest mean MAP@R of the method on the folds
    steps_on_folds: int     # after which it has that
    epoch: int              # in this table: the evaluation that is nearest in steps
    steps: int              # and its steps; both are '' where the row has not been run


def method(row):
    """Rows `METHOD @ SETTING` are settings of one method."""
    return row.split(' @ ')[0]


def candidates(folds, runs):
    """[(row, steps, mean MAP@R)] of a table of folds: each row and each evaluation that all folds of it have"""
    found = []
    for row, of_row in runs_of(folds, runs).items():
        if len(of_row) < len(folds.rows[row].repeats):
            continue
        run = next(iter(of_row.values()))
        for epoch in run['columns']['epoch']:
            values = numbers(of_row, after(epoch, 'MAP@R'))
            if len(values) == len(of_row):
                found.append((row, epoch * run['steps'], mean(values.values())))
    return found


def choose(table, tables, runs):
    """{row: Choice}: for each method of a table, the row and the evaluation with the highest mean MAP@R on the folds"""
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
    """The epoch of the runs of a row that is nearest to a number of steps, and its steps"""
    if not of_row:
        return '', ''
    run = next(iter(of_row.values()))
    epochs = table.epochs or run['columns']['epoch']
    epoch = min(epochs, key=lambda epoch: abs(epoch * run['steps'] - steps))
    return epoch, epoch * run['steps']


def stopped(table, tables, runs):
    """{row: {repeat: run}}: the rows that folds choose, with their runs as they were after the chosen epoch"""
    found = runs_of(table, runs)
    return {row: {repeat: stop(run, choice.epoch) for repeat, run in found.get(row, {}).items()
                  if choice.epoch in run['columns']['epoch']} for row, choice in choose(table, tables, runs).items()}


def by_folds(table, tables, runs):
    """The rows that folds choose, at the epoch that they choose, as lines"""
    chosen, found = choose(table, tables, runs), stopped(table, tables, runs)
    if not chosen:
        return []
    pairs = [(row, base) for row, base in table.pairs if row in found and base in found]
    rows = grid(found, pairs, [Column('MAP@R', last('MAP@R')), Column('R@1', last('R@1'))])
    rows[0][2:2] = ['MAP@R on folds', 'steps on folds', 'steps']
    for cells in rows[1:]:
        choice = chosen.get(cells[0])
        cells[2:2] = [f'{choice.on_folds:.1f}', choice.steps_on_folds, choice.steps] if choice else ['', '', '']
    return ['', f'At the epoch that has the highest mean MAP@R on the folds (`{table.folds}`), or rather the nearest',
            'one in steps:', '', *markdown(rows)]


# ---- papers


def beside_paper(table, found):
    """A table of seeds beside R@1 of a paper"""
    rows = grid(found, table.pairs, [Column('last epoch', last('R@1')), Column('best on the test set', best)])
    rows[0].append('last epoch - paper')
    for cells in rows[1:]:
        row = table.rows.get(cells[0])
        paper = float(row.paper['paper']) if row else 0
        cells.append(cell([last('R@1')(run) - paper for run in found[cells[0]].values()]) if row else '')
    return rows


def beside_paper_on_folds(table, found, runs):
    """A table of folds, which eval.py has joined, beside R@1, RP and MAP@R of a paper"""
    rows = [['', 'folds', 'separated: R@1, RP, MAP@R', 'R@1 - paper', 'concatenated: R@1, RP, MAP@R', 'R@1 - paper']]
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


# ---- chance


def spread(runs):
    """How much R@1 and MAP@R of the same command move from seed to seed, as lines"""
    groups = {}                                 # {data: {command: [run of each seed]}}
    for command, run in runs.items():
        if '--seed' in command and '--fold' not in command and '--lr 1e-30' not in command:     # that learns nothing
            data = re.search(r'--data (\S+)', command)
            shapes = '`shapes`, earlier version' if is_old(run) else '`shapes`'
            of_data = groups.setdefault(f'`{data[1]}`' if data else shapes, {})
            of_data.setdefault(re.sub(r' --seed \d+', '', command), []).append(run)
    rows = [['data', 'commands', 'runs', 'R@1', 'MAP@R']]
    for data, commands in groups.items():
        repeated = [of_command for of_command in commands.values() if len(of_command) > 2]
        if repeated:
            moves = [pooled_deviation([[last(key)(run) for run in of_command] for of_command in repeated])
                     for key in ('R@1', 'MAP@R')]
            rows.append([data, len(repeated), sum(map(len, repeated)), *(f'{move:.2f}' for move in moves)])
    return markdown(rows)


def pooled_deviation(groups):
    """The standard deviation that groups of numbers share, each around its own mean"""
    squares = sum((len(group) - 1) * variance(group) for group in groups)
    return (squares / sum(len(group) - 1 for group in groups)) ** 0.5
