"""The runs behind README's tables, and the tables. Not collected by pytest.

    python tests/results.py pilots           makes the runs of this table that results.jsonl lacks, and prints it
    python tests/results.py birds --jobs 2   two runs at a time, each on half of the cores
    python tests/results.py birds --jobs 0   only prints

A finished run becomes a line of tests/results.jsonl; a run that was stopped is resumed. Its checkpoint, of 100 to 150
MB, stays in runs/ and may be deleted then. Any row may be added to TABLES.
The data belong in data/, which git ignores. cub50 holds the first 50 classes of CUB-200-2011. resnet18.pth is the trunk
of torchvision's IMAGENET1K_V1 (its BatchNorm statistics were estimated anew on 600 photographs, none of them from CUB).
omniglot has the folders train, with the alphabets of images_background_small1, and test, with those of small2 that
small1 lacks: Japanese (katakana), Sanskrit and Tagalog.
"""
import argparse
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from hashlib import md5
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torchvision

from eval import interval

ROOT = Path(__file__).parents[1]
LINES = ROOT / 'tests' / 'results.jsonl'
SEEDS, FOLDS = [f'--seed {n}' for n in range(3)], [f'--fold {n}/4' for n in range(4)]

BIRDS = ('--dataset folder --data data/cub50 --weights data/resnet18.pth --arch resnet18 --image-size 112 '
         '--epochs 9 --warmup 1 --eval-every 9')
# Schedules by steps decay once in these nine epochs, after epoch 5, by the factor of the recipe.
STEP = BIRDS + ' --decay-epochs 5'
FIRST = {'contrastive': f'train_contrastive.py {STEP}', 'ms': f'train_ms.py {STEP}',
         'proxy_anchor': f'train_proxy_anchor.py {STEP}', 'proxynca_pp': f'train_proxynca_pp.py {STEP}',
         'ccl, lam 2': f'train_ccl.py {BIRDS}', 'ccl, lam 0': f'train_ccl.py {BIRDS} --lam 0',
         'metrix ms, none': f'train_metrix.py {STEP} --loss ms --mixup none',
         'hse ms, no hybrids': f'train_hse.py {STEP} --loss ms --alpha 0'}
RATES = {'contrastive': 1e-4, 'ms': 3e-5, 'proxy_anchor': 1e-4, 'proxynca_pp': 4e-3, 'ccl, lam 2': 0.02,
         'ccl, lam 0': 0.02, 'metrix ms, none': 1e-4, 'hse ms, no hybrids': 1e-4}       # those of the recipes
CHOSEN = {'contrastive': '3.3e-05', 'ms': '3e-05', 'proxy_anchor': '3.3e-05', 'proxynca_pp': '0.012',
          'ccl, lam 2': '0.02', 'ccl, lam 0': '0.02'}                   # by the table 'pilots'
# The pilots of train_metrix.py and train_hse.py have ms without mixing and without hybrids. All their rows take over
# that rate, which is also the one chosen for train_proxy_anchor.py and train_contrastive.py.
FINE = STEP + ' --lr 3.3e-05'
MIXING = [(loss, mixup) for loss in ('proxy_anchor', 'ms', 'contrastive') for mixup in ('none', 'feature', 'embed')]
MIXING += [('proxynca_pp', 'none'), ('proxynca_pp', 'feature')]
SCRATCH = {'alpha 0': 'hse.py --alpha 0', 'alpha 1e-9': 'hse.py --alpha 1e-9',
           'alpha 1e-9, append': 'hse.py --alpha 1e-9 --hybrids append', 'alpha 0.01': 'hse.py --alpha 0.01',
           'alpha 0.02': 'hse.py --alpha 0.02', 'alpha 0.05': 'hse.py --alpha 0.05',
           'alpha 0.05, append': 'hse.py --alpha 0.05 --hybrids append',
           'alpha 0.05, temperature 1': 'hse.py --alpha 0.05 --temperature 1',
           'none': 'metrix.py --mixup none', 'feature': 'metrix.py --mixup feature',
           'none, 16 epochs': 'metrix.py --mixup none --epochs 16',
           'feature, 16 epochs': 'metrix.py --mixup feature --epochs 16',
           'input': 'metrix.py --mixup input', 'input, clean BatchNorm': 'metrix.py --mixup input --clean-bn'}
SCRIPTS = ['contrastive', 'ms', 'proxy_anchor', 'proxynca_pp', 'ccl', 'metrix', 'hse']

# {table: (repeats of each command, {row: command}, [(row, row that it is compared with)])}
TABLES = {
    # One fold and one seed choose each learning rate, by the validation MAP@R.
    'pilots': (['--seed 0'], {f'{name}, lr {rate:.2g}': f'{FIRST[name]} --fold 0/4 --lr {rate:.2g}' for name in FIRST
                              for rate in (RATES[name] / 3, RATES[name], RATES[name] * 3)}, []),
    'birds': (SEEDS, {name: f'{FIRST[name]} --lr {CHOSEN[name]}' for name in CHOSEN},
              [(name, 'contrastive') for name in CHOSEN if name != 'contrastive'] + [('ccl, lam 2', 'ccl, lam 0')]),
    'metrix': (SEEDS, {f'{loss}, {mixup}': f'train_metrix.py {FINE} --loss {loss} --mixup {mixup}'
                       for loss, mixup in MIXING},
               [(f'{loss}, {mixup}', f'{loss}, none') for loss, mixup in MIXING if mixup != 'none']),
    # The same at the rate of the recipe, three times as high
    'fast': (SEEDS, {mixup: f'train_metrix.py {STEP} --lr 1e-4 --loss proxy_anchor --mixup {mixup}'
                     for mixup in ('none', 'feature')}, [('feature', 'none')]),
    'hse': (SEEDS, {f'{loss}, {what}': f'train_hse.py {FINE} --loss {loss}{flag}'
                    for loss in ('ms', 'proxy_anchor', 'epshn')
                    for what, flag in (('alone', ' --alpha 0'), ('hybrids', ''))},
            [(f'{loss}, hybrids', f'{loss}, alone') for loss in ('ms', 'proxy_anchor', 'epshn')]),
    'shapes': (SEEDS, {name: f'train_{name}.py' for name in SCRIPTS}, []),
    'omniglot': (SEEDS, {name: f'train_{name}.py --dataset folder --data data/omniglot' for name in SCRIPTS}, []),
    # From random weights. At alpha 1e-9 there are hybrids in the batch and in BatchNorm, but their loss weighs nothing.
    'scratch': (FOLDS, {name: f'train_{flags}' for name, flags in SCRATCH.items()},
                [(name, 'alpha 0') for name in SCRATCH if name.startswith('alpha ') and name != 'alpha 0']
                + [(name, 'none') for name in ('feature', 'input', 'input, clean BatchNorm')]
                + [('feature, 16 epochs', 'none, 16 epochs')]),
}


def finished():
    """{command: its line}"""
    lines = LINES.read_text().splitlines() if LINES.exists() else []
    return {line['command']: line for line in map(json.loads, lines)}


def run(command, threads):
    """Makes one run, and writes its line -> whether it succeeded"""
    name = 'results-' + md5(command.encode()).hexdigest()[:8]
    folder = ROOT / 'runs' / name
    words = command.split() + (['--resume', f'runs/{name}'] if (folder / 'last.pt').exists() else ['--name', name])
    done = subprocess.run([sys.executable, *words], cwd=ROOT, env=os.environ | {'OMP_NUM_THREADS': str(threads)},
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        print(f'{command}\n{done.stdout[-1000:]}', flush=True)
        return False
    rows = [json.loads(line) for line in (folder / 'log.jsonl').read_text().splitlines()]
    machine = torch.cuda.get_device_name() if torch.cuda.is_available() else (
        f'{threads} of {os.cpu_count()} cores, {torch.backends.cpu.get_cpu_capability()}')
    line = dict(command=command, before=rows[0], last=rows[-1], seconds=round(60 * rows[-1]['minutes']),
                machine=machine,
                recipe=next((text for text in done.stdout.splitlines() if ' batches of ' in text), ''),
                python=sys.version.split()[0], torch=torch.__version__, torchvision=torchvision.__version__)
    with LINES.open('a') as file:
        file.write(json.dumps(line) + '\n')
    print(f'{line["seconds"]:5d} s  R@1 {rows[-1]["R@1"]:5.2f}  MAP@R {rows[-1]["MAP@R"]:5.2f}  {command}', flush=True)
    return True


def cell(values):
    middle, half = interval(values)
    return f'{middle:.1f}' if half is None else f'{middle:.1f} ± {half:.1f}'


def show(repeats, commands, pairs):
    """Prints each row with its gain over the network before training; then, if there are pairs, their differences."""
    done = finished()
    lines = {row: {repeat: done[f'{command} {repeat}'] for repeat in repeats if f'{command} {repeat}' in done}
             for row, command in commands.items()}
    keys = ['R@1', 'MAP@R']
    print('| | R@1 | MAP@R | R@1, gain by training | MAP@R, gain by training | runs | minutes |')
    print('|---|---|---|---|---|---|---|')
    for row, runs in lines.items():
        if runs:
            cells = [cell([run['last'][key] for run in runs.values()]) for key in keys]
            cells += [cell([run['last'][key] - run['before'][key] for run in runs.values()]) for key in keys]
            minutes = sum(run['last']['minutes'] for run in runs.values()) / len(runs)
            print(f'| {row} | {" | ".join(cells)} | {len(runs)} | {minutes:.1f} |')
    if pairs:
        print('\n| difference, in pairs of the same seed or fold | R@1 | MAP@R | pairs |\n|---|---|---|---|')
    for row, base in pairs:
        both = sorted(lines[row].keys() & lines[base].keys())
        if both:
            cells = [cell([lines[row][r]['last'][key] - lines[base][r]['last'][key] for r in both]) for key in keys]
            print(f'| {row} - {base} | {" | ".join(cells)} | {len(both)} |')


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('tables', nargs='+', choices=list(TABLES))
    parser.add_argument('--jobs', type=int, default=1, help='runs at a time; 0: none')
    options = parser.parse_args()
    worked = []
    for repeats, commands, pairs in map(TABLES.get, options.tables):
        if options.jobs:
            done, wanted = finished(), [f'{command} {repeat}' for repeat in repeats for command in commands.values()]
            missing = [command for command in wanted if command not in done]
            with ThreadPoolExecutor(options.jobs) as pool:
                worked += pool.map(lambda command: run(command, max(1, os.cpu_count() // options.jobs)), missing)
        show(repeats, commands, pairs)
    sys.exit(not all(worked))


if __name__ == '__main__':
    main()
