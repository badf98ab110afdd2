"""Makes the runs of experiments.py that are missing, and writes the numbers of the pages.

    python tests/results/results.py               writes tables and numbers from runs.jsonl
    python tests/results/results.py hse           first makes the missing runs of this experiment
    python tests/results/results.py resnet50:ms         this row alone
    python tests/results/results.py hse --jobs 2        two runs at a time, each on half of the cores

Each finished run becomes a line of runs.jsonl: its command, commit, machine, precision of the backbone, version of
torch, the rows of its log, and R@1 of its training classes (`eval.py --analyse`). To repeat a run on another machine,
add --precision with that value to the command (not with vectors).
A run is found by its command. Interrupted, it continues at the next start, in a folder of runs/ that is named after its
command. A run that fails is named at the end, and does not stop the others.

On a page, `<!--hse:ms, hybrids-->` stands before a number: it is R@1 of this row of hse. A difference of two rows is
written `<!--hse:ms, hybrids - ms, no hybrids-->`, another column `<!--hse:ms, hybrids;MAP@R-->`; the columns `lowest`
and `highest` are R@1 of two of the runs.

The data are expected in data/, which git ignores:
    CUB_200_2011     --download
    flowers          Oxford's 102 classes of flowers: folders 001 to 102
    resnet18.pth     torchvision's IMAGENET1K_V1, with BatchNorm statistics of 600 other photographs
    resnet50_v1.pth  the ResNet-50 of Keras with weights of ImageNet, under the names of torchvision's layers
"""
import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from hashlib import md5
from importlib import import_module
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from experiments import EXPERIMENTS

import common
from eval import interval

ROOT = Path(__file__).parents[2]
FOLDER = Path(__file__).parent
BEGIN, END = '<!-- tables -->', '<!-- end -->'              # of the tables on the page
FLOAT = r'-?\d+(?:\.\d+)?'
NUMBER = rf'(<!--(\w+):([^;>]+)(?:;(.+?))?-->)(?:{FLOAT})?(?: ± {FLOAT})?'           # and the comment before it


# ---- runs

def read_runs():
    """{command: run} of runs.jsonl"""
    return {run['command']: run for run in map(json.loads, (FOLDER / 'runs.jsonl').read_text().splitlines())}


def make(experiment, jobs, row=None):
    """Makes the missing runs of an experiment, or of one of its rows. Returns the commands that failed."""
    rows = experiment.rows if row is None else [row]
    wanted = [f'{experiment.command(row)} {repeat}' for row in rows for repeat in experiment.repeats]
    missing = [command for command in dict.fromkeys(wanted) if command not in read_runs()]
    threads = max(1, common.CORES // jobs)
    with ThreadPoolExecutor(jobs) as pool:
        finished = pool.map(lambda command: make_run(command, threads), missing)
    return [command for command, success in zip(missing, finished) if not success]


def make_run(command, threads):
    """Makes one run and appends its line. Returns whether it succeeded."""
    name = 'results-' + md5(command.encode()).hexdigest()[:8]
    folder = ROOT / 'runs' / name
    place = ['--resume', f'runs/{name}']
    if not (folder / 'last.pt').exists():                   # it ended before its first checkpoint, or never began
        shutil.rmtree(folder, ignore_errors=True)
        place = ['--name', name]
    for words in ([*command.split(), *place], ['eval.py', '--checkpoint', f'runs/{name}', '--analyse']):
        done = start(words, threads)
        if done.returncode:
            print(f'{command}\n{done.stdout[-1000:]}', flush=True)
            return False
    analysis = json.loads(done.stdout.splitlines()[-1])
    rows = [json.loads(line) for line in (folder / 'log.jsonl').read_text().splitlines()]
    rows = [{key: round(value, 4) if isinstance(value, float) else value for key, value in row.items()} for row in rows]
    commit = subprocess.run(['git', 'rev-parse', '--short', 'HEAD'], cwd=ROOT, capture_output=True, text=True).stdout
    precision = common.pick_precision(common.read_checkpoint(folder)['args']['precision'], common.pick_device('auto'))
    run = dict(command=command, commit=commit.strip(), machine=machine(threads), precision=precision,
               torch=torch.__version__, rows=rows)
    run['train R@1'] = round(analysis['train R@1'], 4)
    with (FOLDER / 'runs.jsonl').open('a') as file:
        file.write(json.dumps(run) + '\n')
    shutil.rmtree(folder)                                   # to repeat a run, delete its line
    print(f'R@1 {rows[-1]["R@1"]:.2f}  MAP@R {rows[-1]["MAP@R"]:.2f}  {command}', flush=True)
    return True


def start(words, threads):
    """Runs Python with these words in the project. Returns the result of subprocess.run."""
    return subprocess.run([sys.executable, *words], cwd=ROOT, env=os.environ | {'OMP_NUM_THREADS': str(threads)},
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def machine(threads):
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f'{threads} of {os.cpu_count()} cores, {torch.backends.cpu.get_cpu_capability()}'


# ---- tables

DIGITS = {'epochs': 0, 's+': 2, 's-': 2}                    # of these columns; all others have one


def value(column, run):
    """What a column shows of one run: `R@1` is that of the last epoch, `R@1 after 8` that of epoch 8"""
    if column == 'train R@1':
        return run.get(column)                              # older lines do not have it
    if column.startswith('rates'):
        return sum_of_rates(run, of_recipe=column.endswith('recipe'))
    rows = run['rows']
    if column == 'epochs':
        return rows[-1]['epoch']
    if column == 'best R@1':
        return max(row['R@1'] for row in rows[1:])
    if column == 'best - last':
        return value('best R@1', run) - rows[-1]['R@1']
    if column.endswith(' before'):
        return rows[0][column.removesuffix(' before')]
    key, _, epoch = column.partition(' after ')
    return next(row[key] for row in rows if row['epoch'] == int(epoch)) if epoch else rows[-1][key]


def sum_of_rates(run, of_recipe=False):
    """The sum of the backbone's learning rates over the epochs in which it learns, as a multiple of --lr: of a run, or
    of the recipe of its dataset and loss"""
    script, *flags = run['command'].split()
    get_args = import_module(script.removesuffix('.py')).get_args
    args, epochs = get_args(flags), run['rows'][-1]['epoch']             # a few runs were ended early
    if of_recipe:
        loss = ['--loss', args.loss] if hasattr(args, 'loss') else []
        args = get_args(['--dataset', args.dataset, *loss])
        epochs = args.epochs
    steps = range(100 * args.freeze_epochs, 100 * epochs)                # as if an epoch had 100
    return sum(common.learning_rate_factor(t, args, 100, 100 * args.epochs) for t in steps) / 100


def finished(experiment, runs):
    """{row: {repeat: run}}"""
    return {row: {repeat: run for repeat in experiment.repeats
                  if (run := runs.get(f'{experiment.command(row)} {repeat}'))} for row in experiment.rows}


def numbers(found, column, row, base=None):
    """Values of a column in the runs of a row. With `base`: differences of two rows, over the repeats that both have"""
    if column in ('lowest', 'highest'):                     # R@1 of all runs
        return [dict(lowest=min, highest=max)[column](numbers(found, 'R@1', row))]
    if base is None:
        values = [value(column, run) for run in found[row].values()]
        return [each for each in values if each is not None]
    if column in ('epochs', 'train R@1') or column.startswith('rates'):
        return []
    both = [repeat for repeat in found[row] if repeat in found[base]]
    return [value(column, found[row][repeat]) - value(column, found[base][repeat]) for repeat in both]


def cell(values, column, bold=False):
    """Mean and 95% confidence interval. With `bold`, it is bold if there are at least three values, the interval
    excludes 0, and the rounded mean is not 0."""
    if not values:
        return ''
    digits = DIGITS.get(column, 1)
    middle, half = interval(values)
    rounded = round(middle, digits) + 0                                  # + 0 makes 0.0 of -0.0
    text = f'{rounded:.{digits}f}'
    text += '' if half is None else f' ± {half:.{digits}f}'
    return f'**{text}**' if bold and len(values) > 2 and abs(middle) > half and rounded else text


def table(experiment, found):
    """Lines of Markdown for the runs of finished(): what they have in common, a line for each row, and a line for each
    difference. Without runs, there is no line."""
    if not any(found.values()):
        return []
    paper = ['paper'] if experiment.papers or any(len(each) > 2 for each in experiment.differences) else []
    header = ['', 'runs', *experiment.columns, *paper, 'command']
    lines = [header, ['---'] * len(header)]
    for row, command in experiment.rows.items():
        if found[row]:
            cells = [cell(numbers(found, column, row), column) for column in experiment.columns]
            reported = [experiment.papers.get(row, '')] * len(paper)
            lines.append([row, len(found[row]), *cells, *reported, f'`{command}`'])
    for row, base, *reported in experiment.differences:
        values = {column: numbers(found, column, row, base) for column in experiment.columns}
        count = max(map(len, values.values()))
        if count:
            cells = [cell(differences, column, bold=True) for column, differences in values.items()]
            lines.append([f'{row} - {base}', count, *cells, *(reported or [''] * len(paper)), ''])
    lines = ['| ' + ' | '.join(map(str, cells)) + ' |' for cells in lines]
    return [f'### {experiment.name}', '', *about(experiment, found), '', *lines, '']


def about(experiment, found):
    """Lines about all runs of an experiment: what they have in common, their number, time, machine and commit"""
    first, *others = experiment.repeats
    text = f'{experiment.about} Repeats: `{first}`' + (f' to `{others[-1]}`' if others else '')
    text += f'; flags of all rows: `{experiment.flags}`.' if experiment.flags else '.'
    runs = [run for of_row in found.values() for run in of_row.values()]
    minutes = [run['rows'][-1]['minutes'] for run in runs]
    span = ' to '.join(dict.fromkeys(f'{value:.1f}' for value in (min(minutes), max(minutes))))
    machines = '; '.join(sorted({f'{run["machine"]}, {run["precision"]}' for run in runs}))
    commits = ', '.join(sorted({run['commit'] for run in runs}))
    return [text, f'{count(len(runs), "run")} of {span} minutes. Machine: {machines}. Code: {commits}.']


def count(number, noun):
    return f'{number} {noun}' if number == 1 else f'{number} {noun}s'


def write_pages():
    """The tables of the page README.md in this folder, and single numbers there and in the README of the project"""
    runs, page, readme = read_runs(), FOLDER / 'README.md', ROOT / 'README.md'
    before_tables, rest = page.read_text().split(BEGIN)
    _, after_tables = rest.split(END)
    found = {experiment.name: finished(experiment, runs) for experiment in EXPERIMENTS}
    tables = [line for experiment in EXPERIMENTS for line in table(experiment, found[experiment.name])]
    page.write_text(before_tables + '\n'.join([BEGIN, '', *tables, END]) + after_tables)

    def renewed(match):
        comment, experiment, rows, column = match.group(1, 2, 3, 4)
        column = column or 'R@1'
        return comment + cell(numbers(found[experiment], column, *rows.split(' - ')), column)
    for path in (page, readme):
        path.write_text(re.sub(NUMBER, renewed, path.read_text()))


def main(argv=None):
    experiments = {experiment.name: experiment for experiment in EXPERIMENTS}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [*experiments, *(f'{name}:{row}' for name, each in experiments.items() for row in each.rows)]
    parser.add_argument('names', nargs='*', metavar='NAME[:ROW]', choices=[*names, []], default=[])
    parser.add_argument('--jobs', type=int, default=1, help='runs at a time')
    options = parser.parse_args(argv)
    failed = []
    for name, _, row in (name.partition(':') for name in options.names):
        failed += make(experiments[name], options.jobs, row or None)
    write_pages()
    if failed:
        raise common.UsageError(f'{count(len(failed), "run")} failed, the first is: {failed[0]}')


if __name__ == '__main__':
    common.cli(main)
