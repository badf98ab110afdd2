"""Makes the runs that the pages beside this file specify, and fills in their numbers. Not collected by pytest.

    python tests/results/results.py                  writes the numbers of all pages from the lines of runs.jsonl
    python tests/results/results.py pilots           makes the runs of this table that runs.jsonl lacks, and prints it
    python tests/results/results.py birds --jobs 2   two runs at a time, each on half of the cores
    python tests/results/results.py birds --jobs 0   only prints
    python tests/results/results.py --plan           every table and figure of the papers: run, planned or left out
    python tests/results/results.py cub --plan       prints the commands that runs.jsonl lacks, and what each takes
    python tests/results/results.py cub --jobs 4     on a machine with GPUs, each job has the next of them
    python tests/results/results.py cub --add '--steps 3 --arch resnet18'
                                                     a trial: more flags for all commands; runs and tables are written
                                                     to runs/trial.jsonl and runs/trial.md
    python tests/results/results.py --patched push train_metrix.py --mixup feature
                                                     a run whose step is changed, see patches.py
    python tests/results/results.py --vectors        writes the features that the tables of vectors need

For a run of your own, add a row to a table of a page; for a table of your own, write it on a page (spec.py says how);
for a claim of a paper, add a row to the table of claims in README.md (claims.py). Then start this with the name of the
table.

A finished run becomes a line of runs.jsonl, with its commit and its evaluations, see tables.py; no two lines have the
same command. Numbers have six digits. It has R@1, MAP@R and minutes of each evaluation, and of the last one each R@K,
s+ and s-; but of a table with `epochs` only R@1 and MAP@R of these epochs, and the last minutes and R@K. What the log
of a run has besides (loss, RP, images per second) is not kept: to have it, run the command again, and read
runs/NAME/log.jsonl. Old lines have no R@K but R@1. Their runs had other batches and crops (README.md says since which
commit), so a table that has some of them gets no new ones: first delete its lines, or give the new runs a table.

A run that was stopped goes on at the next start. Its folder in runs/ is named by its command, so an unfinished run
whose command is changed begins anew. A run that fails is named at the end, and does not stop the others. Once the line
is written, the checkpoints in runs/, of 100 to 150 MB each, may be deleted, but for those of folds in a table of
papers, which eval.py joins when all of a row are there.

The data belong in data/, which git ignores. cub50 holds the first 50 classes of CUB-200-2011. resnet18.pth is the trunk
of torchvision's IMAGENET1K_V1 (its BatchNorm statistics were estimated anew on 600 photographs, none of them from CUB).
omniglot has the folders train, with the alphabets of images_background_small1, and test, with those of small2 that
small1 lacks: Japanese (katakana), Sanskrit and Tagalog. flowers holds Oxford's 102 flowers, the official JPEG files of
each class in a folder from 001 to 102. cifar holds 50 classes of CIFAR-100, 300 images of each class in a folder of its
name. birds, omniglot_vectors and cifar_vectors hold features by that trunk, see store_vectors.
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
# Images of which features are stored: {folder of the features: folder of the images}, both in data/
IMAGES_OF = dict(birds='cub50', omniglot_vectors='omniglot', cifar_vectors='cifar')


# ---- what is there


def pages():
    return sorted(FOLDER.glob('*.md'))


def read_runs(file):
    """{command: run} of the lines of a file"""
    return {run['command']: run for run in map(json.loads, file.read_text().splitlines())}


def add_run(run, file):
    with file.open('a') as lines:
        lines.write(json.dumps(run, separators=(',', ':')) + '\n')


def missing(table, runs):
    """The commands of a table that have no run, each with its repeat"""
    wanted = [f'{row.command} {repeat}' for row in table.rows.values() for repeat in row.repeats]
    return [command for command in dict.fromkeys(wanted) if command not in runs]


# ---- making runs


def start(words, **environment):
    """Runs Python with these words in the folder of the project -> what subprocess.run returns"""
    return subprocess.run([sys.executable, *words], cwd=ROOT, env=os.environ | environment,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def name_of(command):
    """The name of a run in runs/"""
    return 'results-' + md5(command.encode()).hexdigest()[:8]


def make(table, file, jobs):
    """Makes the runs of a table that a file lacks -> the commands that failed"""
    commands = missing(table, read_runs(file))
    found = tables.runs_of(table, read_runs(file))
    if commands and any(tables.is_old(run) for of_row in found.values() for run in of_row.values()):
        raise common.UsageError(f'{table.place}: this table has runs with other batches and crops than new ones would '
                                'have: delete their lines in runs.jsonl, or add a table')
    for command in commands:
        plans.read_flags(command)               # so that a mistake in one of them is said before the first one runs
    for dataset in ('cub', 'sop'):              # the others have no address to download from
        if any(f'--dataset {dataset}' in command for command in commands):
            common.download(dataset, ROOT / 'data')
    gpus = Queue()                              # the GPU that each job may take; None on a machine without
    for job in range(jobs):
        gpus.put(job % torch.cuda.device_count() if torch.cuda.is_available() else None)
    threads = max(1, os.cpu_count() // jobs)
    with ThreadPoolExecutor(jobs) as pool:
        made = pool.map(partial(run, table=table, file=file, threads=threads, gpus=gpus), commands)
    failed = [command for command, success in zip(commands, made) if not success]
    return failed + join_folds(table, file)


def run(command, table, file, threads, gpus):
    """Makes one run of a table, and writes its line -> whether it succeeded"""
    name = name_of(command)
    folder = ROOT / 'runs' / name
    goes_on = (folder / 'last.pt').exists()
    gpu = gpus.get()
    environment = {'OMP_NUM_THREADS': str(threads)}
    if gpu is not None:
        environment['CUDA_VISIBLE_DEVICES'] = str(gpu)
    done = start([*command.split(), *(['--resume', f'runs/{name}'] if goes_on else ['--name', name])], **environment)
    printed, measures = done.stdout, {}
    if table.measured and not done.returncode:
        done, measures = measure(f'runs/{name}/last.pt', 'train_metrix.py' in command, environment)
    gpus.put(gpu)
    if done.returncode:
        print(f'{command}\n{done.stdout[-1000:]}', flush=True)
        return False
    line = line_of(command, folder / 'log.jsonl', table, printed, threads) | measures
    add_run(line, file)
    recall, map_at_r, minutes = (tables.last(key)(line) for key in ('R@1', 'MAP@R', 'minutes'))
    print(f'{minutes:5.1f} min  R@1 {recall:5.2f}  MAP@R {map_at_r:5.2f}  {command}', flush=True)
    return True


def line_of(command, log, table, printed, threads):
    """The line of runs.jsonl of a run, from its log and from what it printed"""
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    of_all = ['epoch', 'R@1', 'MAP@R', 'minutes']
    of_last = [key for key in rows[-1] if key.startswith('R@') and key != 'R@1']
    if table.epochs:
        rows = [row for row in rows if row['epoch'] in table.epochs]
        of_all = ['epoch', 'R@1', 'MAP@R']
        of_last += ['minutes']
    else:
        of_last += ['s+', 's-']
    columns = {key: [rounded(row[key]) for row in rows] for key in of_all}
    columns |= {key: [rounded(rows[-1][key])] for key in of_last}
    columns['minutes'] = [round(minutes, 3) for minutes in columns['minutes']]
    commit = subprocess.run(['git', 'rev-parse', '--short', 'HEAD'], cwd=ROOT, capture_output=True, text=True).stdout
    machine = torch.cuda.get_device_name() if torch.cuda.is_available() else (
        f'{threads} of {os.cpu_count()} cores, {torch.backends.cpu.get_cpu_capability()}')
    steps = re.search(r', of ([\d,]+) batches of ', printed)
    return dict(command=command, commit=commit.strip(), machine=machine, torch=torch.__version__.split('+')[0],
                steps=int(steps[1].replace(',', '')), columns=columns)


def rounded(value):
    """A number with six digits"""
    return float(f'{value:.6g}') if isinstance(value, float) else value


def measure(checkpoint, mixes, environment):
    """Analyses the network of a run -> (the process that ended last, what the line of the run has of it)

    From eval.py --analyse: alignment, uniformity and utilization of the test images, and NMI. From fig2.py, if the run
    `mixes`: utilization with mixed examples as well, and of Fig. 2 of Metrix P(Pos) for mixtures with a label between
    0.5 and 0.6, and the largest difference of the two curves.
    """
    analysed = start(['eval.py', '--checkpoint', checkpoint, '--analyse'], **environment)
    if analysed.returncode:
        return analysed, {}
    found = json.loads(analysed.stdout.splitlines()[-1])
    measures = {key: rounded(found[key]) for key in ('alignment', 'uniformity', 'utilization', 'NMI')}
    if not mixes:
        return analysed, dict(measured=measures)
    analysed = start(['tests/results/fig2.py', checkpoint], **environment)
    if analysed.returncode:
        return analysed, {}
    mixed = re.search(r'([\d.]+) by these and the mixed ones', analysed.stdout)
    # A line of a tenth of lambda: lambda, measured, by Eq. (25), mean similarity, threshold, pairs
    curves = [[*map(float, line.split())] for line in re.findall(r'(?m)^ +0\.\d5 .*$', analysed.stdout)]
    measures['utilization, mixed'] = float(mixed[1])
    measures['P(Pos)'] = next(share for lam, share, *_ in curves if lam == 0.55)
    measures['Fig. 2'] = rounded(max(abs(share - predicted) for _, share, predicted, *_ in curves))
    return analysed, dict(measured=measures)


def join_folds(table, file):
    """Evaluates the folds of each row of a paper's table together by eval.py, if all are there and have not been joined
    -> the commands that failed"""
    runs, failed = read_runs(file), []
    for row in table.rows.values():
        command = f'eval.py {row.command}'
        there = all(f'{row.command} {repeat}' in runs for repeat in row.repeats)
        if 'paper, separated' not in row.paper or not there or command in runs:
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
    """Writes pooled features (N, 512) of the images that are there, by data/resnet18.pth, crops of 128 px"""
    model = common.Embedder('resnet18', weights=ROOT / 'data/resnet18.pth', pool='avg')
    model.head = model.pool_features
    for name, folder in IMAGES_OF.items():
        if (ROOT / 'data' / folder).exists():
            data = common.load_dataset('folder', ROOT / 'data' / folder, resize=146, image_size=128)
            for split, images in dict(train=data.train, test=data.query).items():
                with common.atomic_write(ROOT / 'data' / name / f'{split}.npz') as file:
                    np.savez(file, embeddings=common.embed(model, images).numpy(), labels=images.labels.numpy(),
                             classes=np.array(images.classes), paths=np.array(images.paths))


# ---- pages


def read_pages():
    """{name: Table} and [Claim] of all pages; a mistake in one of them raises UsageError with page and line."""
    specified = spec.read_tables(pages())
    claimed = [claim for page in pages() for block in spec.blocks(page) if block.lines[0] == '<!-- claims -->'
               for claim in claims.read_claims(block, specified)]
    return specified, claimed


def filled(page, specified, claimed, runs):
    """The text of a page with the numbers of its blocks"""
    lines = page.read_text().splitlines()
    for block in reversed(spec.blocks(page)):
        kind = block.lines[0]
        if kind == '<!-- claims -->':
            new = claims.section(claimed, specified, runs)
        elif kind == '<!-- spread -->':
            new = [kind, '', *tables.spread(runs), '']
        elif kind == '<!-- patches -->':
            new = [kind, '', *(f'* `{name}`: {" ".join(patch.__doc__.split())}'
                               for name, patch in patches.PATCHES.items()), '']
        else:
            new = tables.section(specified[spec.read_settings(block)[0]], specified, runs)
        start = block.number - 1
        lines[start:start + len(block.lines)] = new
    return '\n'.join(lines) + '\n'


def write_pages(specified, claimed):
    runs = read_runs(RUNS)
    texts = {page: filled(page, specified, claimed, runs) for page in pages()}
    for page, text in texts.items():            # after all of them, so that a mistake leaves all pages as they are
        page.write_text(text)


# ---- the command line


def with_flags(table, flags):
    """The table of a trial, whose commands have more flags"""
    return table._replace(rows={name: row._replace(command=f'{row.command} {flags}')
                                for name, row in table.rows.items()})


def get_options(argv):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('tables', nargs='*', metavar='NAME')
    parser.add_argument('--jobs', type=common.at_least(0), default=1, help='runs at a time; 0: none')
    parser.add_argument('--draw', metavar='PNG', help='draw a table by epoch, R@1 or MAP@R (pip install matplotlib)')
    parser.add_argument('--draw-path', metavar='PNG', help='draw R@1 against MAP@R along the training')
    parser.add_argument('--plan', action='store_true', help='print what is missing, and make nothing')
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
            raise common.UsageError(f'{name} is no table of the pages; these are {", ".join(specified)}')
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
            draw.draw(specified[name], read_runs(file), options.draw)
        if options.draw_path:
            draw.draw_path(specified[name], read_runs(file), options.draw_path)
    if options.add and text:
        TRIAL.with_suffix('.md').write_text('\n'.join(text) + '\n')
    if failed:
        raise SystemExit('\n'.join([f'error: {len(failed)} runs failed:', *failed]))


if __name__ == '__main__':
    common.cli(main)
