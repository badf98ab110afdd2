"""What of the papers is run, planned or left out, from the list on plan.md; and what the planned runs take.

    python tests/results/results.py --plan           every table and figure of the five papers, and a sum
    python tests/results/results.py --plan NAME      the commands that a table lacks

Time and memory are estimated, not measured. Time: an RTX 2080 Ti takes 586 ms for a batch of 100 images of 224 px in a
ResNet-50, and 817 ms with feature mixup (Metrix, Section B.3); other networks and sizes take as much more or less as
their multiplications do, and an image that is only evaluated a third. Memory: the outputs of convolutions and of their
BatchNorm, two bytes each, for all images of a step.
"""
import re
from contextlib import redirect_stdout
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import NamedTuple

import spec

import common
import train_metrix

PAPERS = ('Reality Check', 'Proxy-Anchor', 'Metrix', 'CCL', 'HSE')
STATUSES = ('run', 'planned', 'left out')
# {arch: multiplications and outputs of convolutions for an image of 224 px, in units of 1e9 and of 1e6}
NETWORKS = dict(resnet18=(1.8, 2.5), resnet50=(4.1, 11.1), resnet101=(7.8, 16.2), googlenet=(1.5, 3.2))


class Entry(NamedTuple):
    """A table or a figure of a paper"""
    paper: str
    name: str               # Table 3, Fig. 2
    status: str
    how: str                # tables of the pages, commands or files in backticks; or the reason why it is left out

    def quoted(self):
        return re.findall('`([^`]+)`', self.how)


class Cost(NamedTuple):
    runs: int = 0
    steps: int = 0
    images: int = 0         # of training
    hours: float = 0
    memory: float = 0       # of the largest run, GB

    def __add__(self, other):
        return Cost(*(a + b for a, b in zip(self[:4], other)), max(self.memory, other.memory))

    def __str__(self):
        return f'{self.runs:,} runs, {self.hours:,.0f} h, {self.memory:.0f} GB'


# ---- the list


def read_list(page):
    """[Entry] of the list on a page, whose header begins with | paper |. `Fig. 4, 7 to 10` are five figures."""
    lines = page.read_text().splitlines()
    start = lines.index('| paper | what | status | how |') + 2
    entries = []
    for number, line in enumerate(lines[start:], start + 1):
        if not line.startswith('|'):
            return entries
        paper, what, status, how = (cell.strip() for cell in line.strip('|').split('|'))
        if paper not in PAPERS or status not in STATUSES or not how:
            spec.mistake(f'{page.name}, line {number}', f'a paper is one of {PAPERS}, a status one of {STATUSES}')
        kind, numbers = what.split(' ', 1)
        for low, high in re.findall(r'(\d+)(?: to (\d+))?', numbers):
            entries += [Entry(paper, f'{kind} {n}', status, how) for n in range(int(low), int(high or low) + 1)]
    return entries


def expand(command):
    """`train_ms.py --dim {64,128} --seed {0..2}` -> six commands, one for each combination of the values"""
    parts = re.split(r'\{([^}]*)\}', command)
    values = [range_of(text) if n % 2 else [text] for n, text in enumerate(parts)]
    return [''.join(combination) for combination in product(*values)]


def range_of(text):
    if ends := re.fullmatch(r'(\d+)\.\.(\d+)', text):
        return [str(n) for n in range(int(ends[1]), int(ends[2]) + 1)]
    return text.split(',')


def commands(entry, specified):
    """{command: what it needs to be read}: those of the tables that an entry names, and those that it has itself"""
    found = {}
    for text in entry.quoted():
        if text in specified:
            for row in specified[text].rows.values():
                found |= {f'{row.command} {repeat}': f'{row.command} {row.repeats[0]}' for repeat in row.repeats}
        elif 'train_' in text:
            found |= {command: command for command in expand(text)}
    return found


# ---- what runs take


def read_flags(command):
    """The arguments that the script of a command reads from it; a mistake in its flags raises UsageError."""
    script, *words = re.sub(r'^tests/results/results.py --patched \S+ ', '', command).split()
    return import_module(Path(script).stem).get_args([*words, '--device', 'cpu'])


def mixed_images(args, command):
    """Mixed images and hybrids that a step sends through the network as well: their mean number, and the largest"""
    size, per_class = args.batch_size, args.per_class or 2      # about one positive in a random batch
    if 'train_hse' in command and args.alpha and args.hybrids == 'append':
        return args.combinations * args.per_class, args.combinations * args.per_class
    if 'input' not in getattr(args, 'mixup', []):
        return 0, 0
    if '--patched imix' in command:
        return size, size
    with redirect_stdout(None):             # plan prints what it returns
        [configs] = [configs for configs in train_metrix.plan(args) if configs[0].mixup == 'input']
    k = configs[0].k or size                # None is all of them, which are fewer than the batch
    positives = 1 if args.loss == 'proxy_anchor' else per_class - 1     # each image has one proxy
    numbers = {'pos-pos': size * (per_class - 1) // 2, 'anc-neg': size * k, 'pos-neg': size * k * positives}
    used = [numbers[config.pairs] for config in configs]
    return sum(used) / len(used) / len(args.mixup), max(used)


def estimate(command):
    """The Cost of a run, at most: a fold may stop earlier. Without hours where the number of images is not known"""
    args = read_flags(command)
    counts = common.DATASETS[args.dataset].get('counts')
    if not counts:
        return Cost(1)
    training, evaluated = counts['train'][0], sum(counts[part][0] for part in counts if part != 'train')
    if args.fold:
        training, evaluated = training * 3 // 4, training // 4
    steps = args.epochs * max(1, training // args.batch_size)
    steps = min(steps, args.steps) if args.steps else steps
    more, most = mixed_images(args, command)
    multiplications, outputs = NETWORKS[args.arch]
    area = (args.image_size / 224) ** 2
    slower = 817 / 586 if 'feature' in getattr(args, 'mixup', []) else 1
    seconds = 586 / 1000 / 100 * multiplications / NETWORKS['resnet50'][0] * area       # for an image
    passes = steps * (args.batch_size + more) * slower + evaluated * (1 + args.epochs / args.eval_every) / 3
    memory = (args.batch_size + most) * outputs * 1e6 * 4 * area / 1e9
    return Cost(1, steps, steps * args.batch_size, passes * seconds / 3600, memory)


def costs(wanted):
    """{command: Cost} of {command: a command that costs as much}"""
    of_kind = {like: estimate(like) for like in dict.fromkeys(wanted.values())}
    return {command: of_kind[like] for command, like in wanted.items()}


# ---- what is printed


def show_table(name, missing):
    """Prints what a table lacks: commands, and what each takes."""
    total = Cost()
    for command in missing:
        cost = estimate(command)
        total += cost
        size = f'{cost.steps:,} steps, {cost.images:,} images, {cost.hours:.1f} h, {cost.memory:.0f} GB: '
        print(f'{size if cost.steps else ""}python {command}')
    print(f'{name}: {total}, {total.steps:,} steps')


def show_list(page, specified, runs):
    """Prints every table and figure of the papers, and the sum of what is planned."""
    entries, planned = read_list(page), {}
    for entry in entries:
        text = entry.how
        if entry.status == 'planned':
            of_entry = {command: cost for command, cost in costs(commands(entry, specified)).items()
                        if command not in runs}
            planned |= of_entry
            names = [name for name in entry.quoted() if name in specified]
            start = f'python tests/results/results.py {" ".join(names)}; ' if names else ''
            text = f'{sum(of_entry.values(), Cost())}: {start}' + '; '.join(
                f'python {text}' for text in entry.quoted() if '.py' in text)
        print(f'{entry.status:9} {entry.paper + " " + entry.name:24} {text.rstrip("; ")}')
    statuses = ', '.join(f'{sum(entry.status == status for entry in entries)} {status}' for status in STATUSES)
    on_folds, others = (sum((cost for command, cost in planned.items() if ('--fold' in command) == folds), Cost())
                        for folds in (True, False))
    print(f'{len(entries)} tables and figures: {statuses}\n'
          f'planned, each command once, by estimate on an RTX 2080 Ti: {others}; and on folds, at most {on_folds}')
