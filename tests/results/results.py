"""Makes the runs that the pages in this folder specify, and writes their results into the pages. No pytest file.

    python tests/results/results.py                  writes the tables of all pages from runs.jsonl
    python tests/results/results.py birds            makes the missing runs of this table, and prints it
    python tests/results/results.py birds --jobs 2   two runs at a time, each on half of the cores
    python tests/results/results.py birds --jobs 0   only prints
    python tests/results/results.py --plan           every table and figure of the papers: run, planned or left out
    python tests/results/results.py cub --plan       prints the missing commands, and their estimated time and memory
    python tests/results/results.py cub --jobs 4     on a machine with several GPUs, one GPU per job
    python tests/results/results.py cub --add '--steps 3 --arch resnet18'
                                                     a trial: more flags for all commands; runs and tables are written
                                                     to runs/trial.jsonl and runs/trial.md
    python tests/results/results.py --patched push train_metrix.py --mixup feature
                                                     a run with a changed training step, see patches.py
    python tests/results/results.py --vectors        writes the precomputed features for --dataset vectors

To add a run, add a row to a table of a page. To add a table, write it on a page (spec.py says how). To add a claim of a
paper, add a row to the table of claims in README.md (claims.py). Then run this file with the name of the table.

Each finished run becomes a line of runs.jsonl, with its commit and its evaluations, see tables.py. No two lines have
the same command. Values have six digits. A line has R@1, MAP@R and minutes of each evaluation, and R@K, s+ and s- of
the last one. For a table with `epochs` it has only R@1 and MAP@R of these epochs, and the last minutes and R@K. Loss,
RP and images per second are not kept: run the command again and read runs/NAME/log.jsonl.

An interrupted run continues at the next start. Its folder in runs/ is named after its command, so an unfinished run
starts again if its command is changed. A run that fails is named at the end and does not stop the others. When its line
is written, the checkpoints of a run in runs/ (100 to 150 MB each) may be deleted, except for the folds of a table of
a paper, which eval.py joins when all folds of a row are finished.

The data are expected in data/, which git ignores. cub50 holds the first 50 classes of CUB-200-2011. resnet18.pth is the
backbone of torchvision's IMAGENET1K_V1, with BatchNorm statistics that were re-estimated on 600 photographs, none of
them from CUB. birds holds features of that backbone, see store_vectors.
"""
import argparse
import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from hashlib import md5
from pathlib import Path
from queue import Queue

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

import claims
import draw
import patches
import plans
import spec
import tables
import torch

import common

ROOT = Path(__file__).parents[2]
FOLDER = Path(__file__).parent               # of the pages
RUNS = FOLDER / 'runs.jsonl'
TRIAL = ROOT / 'runs/trial.jsonl'


# ---- pages and finished runs


def pages():
    return sorted(FOLDER.glob('*.md'))


def read_runs(file):
    """{command: run} of the lines of a file"""
    return {run['command']: run for run in map(json.loads, file.read_text().splitlines())}


def add_run(run, file):
    with file.open('a') as lines:
        lines.write(json.dumps(run, separators=(',', ':')) + '\n')


def missing(table, runs):
    """Commands of a table, with their repeats, that have no run yet"""
    wanted = [f'{row.command} {repeat}' for row in table.rows.values() for repeat in row.repeats]
    return [command for command in dict.fromkeys(wanted) if command not in runs]


# ---- making runs


def start(words, **environment):
    """Run Python with these words in the project folder -> result of subprocess.run"""
    return subprocess.run([sys.executable, *words], cwd=ROOT, env=os.environ | environment,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def name_of(command):
    """Name of the folder of a run in runs/"""
    return 'results-' + md5(command.encode()).hexdigest()[:8]


def make(table, file, jobs):
    """Make the runs of a table that are missing in a file -> commands that failed"""
    commands = missing(table, read_runs(file))
    for command in commands:
        plans.read_flags(command)               # to report an error in any command before the first run
    for dataset in ('cub', 'sop'):              # the other datasets cannot be downloaded
        if any(f'--dataset {dataset}' in command for command in commands):
            common.download(dataset, ROOT / 'data')
    gpus = Queue()                              # GPU of each job; None on a machine without GPU
    for job in range(jobs):
        gpus.put(job % torch.cuda.device_count() if torch.cuda.is_available() else None)
    threads = max(1, os.cpu_count() // jobs)
    with ThreadPoolExecutor(jobs) as pool:
        made = pool.map(partial(run, table=table, file=file, threads=threads, gpus=gpus), commands)
    failed = [command for command, success in zip(commands, made) if not success]
    return failed + join_folds(table, file)


def run(command, table, file, threads, gpus):
    """Make one run of a table and write its line -> whether it succeeded"""
    name = name_of(command)
    folder = ROOT / 'runs' / name
    resumes = (folder / 'last.pt').exists()
    gpu = gpus.get()
    environment = {'OMP_NUM_THREADS': str(threads)}
    if gpu is not None:
        environment['CUDA_VISIBLE_DEVICES'] = str(gpu)
    done = start([*command.split(), *(['--resume', f'runs/{name}'] if resumes else ['--name', name])], **environment)
    printed, found = done.stdout, {}
    if table.measured and not done.returncode:
        done, found = measure(f'runs/{name}/last.pt', 'train_metrix.py' in command, environment)
    gpus.put(gpu)
    if done.returncode:
        print(f'{command}\n{done.stdout[-1000:]}', flush=True)
        return False
    line = line_of(command, folder / 'log.jsonl', table, printed, threads) | found
    add_run(line, file)
    recall, map_at_r, minutes = (tables.last(key)(line) for key in ('R@1', 'MAP@R', 'minutes'))
    print(f'{minutes:5.1f} min  R@1 {recall:5.2f}  MAP@R {map_at_r:5.2f}  {command}', flush=True)
    return True


def line_of(command, log, table, printed, threads):
    """The line of a run in runs.jsonl, from its log and its output"""
    records = [json.loads(line) for line in log.read_text().splitlines()]
    of_all = ['epoch', 'R@1', 'MAP@R', 'minutes']
    of_last = [key for key in records[-1] if key.startswith('R@') and key != 'R@1']
    if table.epochs:
        records = [record for record in records if record['epoch'] in table.epochs]
        of_all = ['epoch', 'R@1', 'MAP@R']
        of_last += ['minutes']
    else:
        of_last += ['s+', 's-']
    columns = {key: [rounded(record[key]) for record in records] for key in of_all}
    columns |= {key: [rounded(records[-1][key])] for key in of_last}
    columns['minutes'] = [round(minutes, 3) for minutes in columns['minutes']]
    commit = subprocess.run(['git', 'rev-parse', '--short', 'HEAD'], cwd=ROOT, capture_output=True, text=True).stdout
    machine = torch.cuda.get_device_name() if torch.cuda.is_available() else (
        f'{threads} of {os.cpu_count()} cores, {torch.backends.cpu.get_cpu_capability()}')
    return dict(command=command, commit=commit.strip(), machine=machine, torch=torch.__version__.split('+')[0],
                steps=steps_of(printed), columns=columns)


def steps_of(printed):
    """The number of steps in an epoch, from the output of a run"""
    return int(re.search(r' epochs of (\d+) batches of ', printed)[1])


def rounded(value):
    """The value with six digits"""
    return float(f'{value:.6g}') if isinstance(value, float) else value


def measure(checkpoint, mixes, environment):
    """Analyse the network of a run -> (the process that ended last, {'measured': metrics} for the line of the run)

    eval.py --analyse gives alignment, uniformity, utilization and NMI of the test images. If the run `mixes`, fig2.py
    gives the utilization with mixed examples and, from Fig. 2 of Metrix, P(Pos) of mixed examples with a label between
    0.5 and 0.6 and the largest difference of the two curves.
    """
    analysed = start(['eval.py', '--checkpoint', checkpoint, '--analyse'], **environment)
    if analysed.returncode:
        return analysed, {}
    found = json.loads(analysed.stdout.splitlines()[-1])
    metrics = {key: rounded(found[key]) for key in ('alignment', 'uniformity', 'utilization', 'NMI')}
    if not mixes:
        return analysed, dict(measured=metrics)
    analysed = start(['tests/results/fig2.py', checkpoint], **environment)
    if analysed.returncode:
        return analysed, {}
    mixed = re.search(r'([\d.]+) by these and the mixed ones', analysed.stdout)
    # Columns of a line: lambda, P(Pos) measured, P(Pos) by Eq. (25), mean similarity, threshold, pairs
    curves = [[*map(float, line.split())] for line in re.findall(r'(?m)^ +0\.\d5 .*$', analysed.stdout)]
    metrics['utilization, mixed'] = float(mixed[1])
    metrics['P(Pos)'] = next(positive for lam, positive, *_ in curves if lam == 0.55)
    metrics['Fig. 2'] = rounded(max(abs(positive - predicted) for _, positive, predicted, *_ in curves))
    return analysed, dict(measured=metrics)


def join_folds(table, file):
    """For a paper's table on folds: let eval.py join the folds of each row whose folds are all finished
    -> commands that failed"""
    runs, failed = read_runs(file), []
    for row in table.rows.values():
        command = f'eval.py {row.command}'
        finished = all(f'{row.command} {repeat}' in runs for repeat in row.repeats)
        if 'paper, separated' not in row.paper or not finished or command in runs:
            continue
        folders = [f'runs/{name_of(f"{row.command} {repeat}")}' for repeat in row.repeats]
        done = start(['eval.py', '--checkpoint', *folders])
        if done.returncode:
            print(f'{command}\n{done.stdout[-1000:]}', flush=True)
            failed.append(command)
            continue
        joined = json.loads(done.stdout.splitlines()[-1])['rows']
        columns = {key: [rounded(setting[key]['mean']) for setting in joined] for key in ('R@1', 'RP', 'MAP@R')}
        add_run(dict(command=command, columns=dict(setting=[setting['setting'] for setting in joined]) | columns), file)
    return failed


def store_vectors():
    """Write the pooled features (N, 512) of data/cub50, from data/resnet18.pth and crops of 128 px, to data/birds."""
    model = common.Embedder('resnet18', weights=ROOT / 'data/resnet18.pth', pool='avg')
    model.head = model.pool_features
    data = common.load_dataset('folder', ROOT / 'data/cub50', resize=146, image_size=128)
    for split, images in dict(train=data.train, test=data.query).items():
        with common.atomic_write(ROOT / f'data/birds/{split}.npz') as file:
            np.savez(file, embeddings=common.embed(model, images).numpy(), labels=images.labels.numpy(),
                     classes=np.array(images.classes), paths=np.array(images.paths))


# ---- pages


def read_pages():
    """{name: Table} and [Claim] of all pages. An error in a page raises UsageError with page and line."""
    specified = spec.read_tables(pages())
    claimed = [claim for page in pages() for block in spec.blocks(page) if block.lines[0] == '<!-- claims -->'
               for claim in claims.read_claims(block, specified)]
    return specified, claimed


def filled(page, specified, claimed, runs):
    """Text of a page with all its blocks generated anew"""
    lines = page.read_text().splitlines()
    for block in reversed(spec.blocks(page)):
        kind = block.lines[0]
        if kind == '<!-- claims -->':
            new = claims.section(claimed, specified, runs)
        elif kind == '<!-- spread -->':
            new = [kind, '', *tables.spread(runs)]
        elif kind == '<!-- patches -->':
            new = [kind, '', *(f'* `{name}`: {" ".join(patch.__doc__.split())}'
                               for name, patch in patches.PATCHES.items())]
        else:
            new = tables.section(specified[spec.read_settings(block)[0]], specified, runs)
        start = block.number - 1
        lines[start:start + len(block.lines)] = new
    return '\n'.join(lines) + '\n'


def write_pages(specified, claimed):
    runs = read_runs(RUNS)
    texts = {page: filled(page, specified, claimed, runs) for page in pages()}
    for page, text in texts.items():            # only now, so that an error in one page changes none
        page.write_text(text)


# ---- the command line


def with_flags(table, flags):
    """The table with more flags in each command, for a trial"""
    return table._replace(rows={name: row._replace(command=f'{row.command} {flags}')
                                for name, row in table.rows.items()})


def get_options(argv):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('tables', nargs='*', metavar='NAME')
    parser.add_argument('--jobs', type=common.at_least(0), default=1, help='runs at a time; 0: none')
    parser.add_argument('--draw', metavar='PNG', help='plot R@1 or MAP@R of a table by epoch (pip install matplotlib)')
    parser.add_argument('--plan', action='store_true', help='print the missing commands, and run nothing')
    parser.add_argument('--add', metavar='FLAGS', help='a trial with more flags, kept in runs/trial.jsonl and trial.md')
    return parser.parse_args(argv)


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ['--patched']:
        return patches.run_patched(argv[1:])
    if argv == ['--vectors']:
        return store_vectors()
    options = get_options(argv)
    specified, claimed = read_pages()
    for name in options.tables:
        if name not in specified:
            raise common.UsageError(f'{name} is not a table of the pages; these are {", ".join(specified)}')
    if not options.tables and options.plan:
        return plans.show_list(FOLDER / 'plan.md', specified, read_runs(RUNS))
    if not options.tables:
        return write_pages(specified, claimed)
    file, text = RUNS, []
    if options.add:
        file = TRIAL
        file.parent.mkdir(exist_ok=True)
        file.touch()
        specified = {name: with_flags(table, options.add) for name, table in specified.items()}
    failed = []
    for name in options.tables:
        if options.plan:
            plans.show_table(name, missing(specified[name], read_runs(file)))
            continue
        if options.jobs:
            failed += make(specified[name], file, options.jobs)
        lines = tables.section(specified[name], specified, read_runs(file))
        print('\n'.join(lines))
        text += lines
        if options.draw:
            draw.plot(specified[name], read_runs(file), options.draw)
    if options.add and text:
        TRIAL.with_suffix('.md').write_text('\n'.join(text) + '\n')
    if failed:
        raise SystemExit('\n'.join([f'error: {len(failed)} runs failed:', *failed]))


if __name__ == '__main__':
    common.cli(main)
