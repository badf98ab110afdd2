"""What a page of results specifies: tables of runs. results.py makes the runs, and fills in their numbers.

A page is Markdown. A table begins with a line of settings, and ends with a comment:

    **Table `mixing`**, repeats `--seed 0..2`, flags `--epochs 4`

    | | command |
    |---|---|
    | none | `train_metrix.py --mixup none` |
    | feature | `train_metrix.py --mixup feature` |
    | feature - none | |

    <!-- end -->

A row has a name and a command, or it is a difference of two rows. results.py puts columns of numbers between name and
command, and further tables behind this one; what else stands there is lost. So a writer gives the line of settings and,
of the first table, the names, the commands in backticks, and what a paper has. A row that is added later needs no other
cells. The settings:

    repeats   Each command is run with each of these flags: `--seed 0..2` are three repeats, `--fold 0..3/4 --seed 1..2`
              are eight; a comma separates further ones. A row may have repeats of its own, in one of its cells.
    flags     Flags that all commands share. They stand behind the name of the script.
    epochs    The evaluations that are kept and shown: `0 2 4 9`. Without it, all are kept, and the last one is shown.
    folds     The name of a table with the same rows on folds, by which the best epoch and row are chosen. Rows
              `METHOD @ SETTING` of both tables are settings of one method.
    measured  `yes`: the networks are analysed when their training ends.

A table that repeats one of a paper has columns of PAPER as well: the paper's R@1; or, on folds, its R@1, RP and MAP@R,
separated and concatenated; and where they stand.
"""
import re
from itertools import zip_longest
from typing import NamedTuple

import common

OTHERS = ('<!-- claims -->', '<!-- spread -->', '<!-- patches -->')      # first lines of what else results.py writes
END = '<!-- end -->'
SETTINGS = ('repeats', 'flags', 'epochs', 'folds', 'measured')
PAPER = ('paper', 'paper, separated', 'paper, concatenated', 'where')


class Row(NamedTuple):
    command: str            # complete, but for `python` in front and a repeat behind
    repeats: list           # [flags]
    typed: str = ''         # the command as the page has it
    own_repeats: str = ''   # as the page has them; '' where the row has those of its table
    paper: dict = {}        # {column of PAPER: text}


class Table(NamedTuple):
    rows: dict              # {name: Row}
    pairs: list = []        # [(row, row that is subtracted)]
    epochs: list = []       # those that are kept and shown; [] is all
    folds: str = ''         # the name of a table
    measured: bool = False
    settings: str = ''      # the line that the table begins with
    place: str = ''         # page and line, for messages


class Block(NamedTuple):
    """Lines of a page from the first one of a table to its end, which is left out"""
    page: str
    number: int             # of the first line
    lines: list

    def place(self, offset=0):
        return f'{self.page}, line {self.number + offset}'


def mistake(place, text):
    raise common.UsageError(f'{place}: {text}')


def read_tables(pages):
    """{name: Table} of pages, which are files; a mistake in one of them raises UsageError with its place."""
    tables = {}
    for page in pages:
        for block in blocks(page):
            if block.lines[0].startswith('**Table'):
                name, table = read_table(block)
                if name in tables:
                    mistake(table.place, f'there is a table `{name}` already: {tables[name].place}')
                tables[name] = table
    for table in tables.values():
        if table.folds and table.folds not in tables:
            mistake(table.place, f'folds `{table.folds}` is no table')
    return tables


def blocks(page):
    """[Block] of a page: what begins with **Table or with one of OTHERS, and ends with <!-- end -->"""
    found, start = [], None
    lines = page.read_text().splitlines()
    for number, line in enumerate(lines, 1):
        if line == END:
            if not start:
                mistake(f'{page.name}, line {number}', f'{END} ends no table')
            found.append(Block(page.name, start, lines[start - 1:number - 1]))
            start = None
        elif line.startswith('**Table') or line in OTHERS:
            if start:
                break
            start = number
    if start:
        mistake(f'{page.name}, line {start}', f'what begins here does not end with {END}')
    return found


def first_table(block):
    """The first Markdown table of a block -> its header, [cell], and its rows, [(place, [cell])]"""
    found = []
    for offset, line in enumerate(block.lines):
        if line.startswith('|'):
            cells = line.strip().removeprefix('|').removesuffix('|').split('|')
            found.append((block.place(offset), [cell.strip() for cell in cells]))
        elif found:
            break
    if len(found) < 2 or set(''.join(found[1][1])) != {'-'}:
        mistake(block.place(), 'a table has to follow, with a header and a line |---|---| under it')
    return found[0][1], found[2:]


def read_table(block):
    """A block that begins with **Table -> its name, Table"""
    name, settings = read_settings(block)
    header, lines = first_table(block)
    rows, pairs = {}, []
    for place, cells in lines:
        if ' - ' in cells[0]:
            if '`' in ''.join(cells):
                mistake(place, f'{cells[0]!r} is a difference, by its name, so it has no command and no repeats')
            pairs.append(tuple(cells[0].split(' - ', 1)))
        elif cells[0] in rows:
            mistake(place, f'table `{name}` has a row {cells[0]!r} already')
        else:
            rows[cells[0]] = read_row(place, header, cells, settings)
    for place, cells in lines:
        for row in cells[0].split(' - ', 1):
            if row not in rows:
                mistake(place, f'{cells[0]!r} is a difference, but table `{name}` has no row {row!r}')
    epochs = [int(epoch) for epoch in settings.get('epochs', '').split()]
    return name, Table(rows, pairs, epochs, settings.get('folds', ''), settings.get('measured') == 'yes',
                       block.lines[0], block.place())


def read_settings(block):
    """The line that a table begins with -> its name, {setting: text}"""
    name = re.match(r'\*\*Table `([\w-]+)`\*\*', block.lines[0])
    settings = dict(re.findall(r', (\w+) `([^`]*)`', block.lines[0]))
    written_again = ''.join(f', {key} `{text}`' for key, text in settings.items())
    if not name or name[0] + written_again != block.lines[0]:           # then a part of it was not understood
        mistake(block.place(), 'a table begins with **Table `NAME`**, repeats `--seed 0..2`, and more settings like it')
    for key, text in settings.items():
        if key not in SETTINGS:
            mistake(block.place(), f'{key} is no setting of a table; these are {", ".join(SETTINGS)}')
        if key == 'epochs' and not re.fullmatch(r'\d+( \d+)*', text):
            mistake(block.place(), f'epochs are numbers with spaces between them, `0 2 4`, and not `{text}`')
        if key == 'measured' and text != 'yes':
            mistake(block.place(), f'measured is `yes`, or left out, and not `{text}`')
    return name[1], settings


def read_row(place, header, cells, settings):
    """A row that is no difference -> Row"""
    quoted = [cell.strip('`') for cell in cells[1:] if cell.startswith('`')]
    commands = [text for text in quoted if not text.startswith('--')]
    own = ', '.join(text for text in quoted if text.startswith('--'))
    if len(commands) != 1 or '.py' not in commands[0]:
        mistake(place, f'row {cells[0]!r} needs a command in backticks, as `train_ms.py --lr 1e-4`')
    repeats = expand(own or settings.get('repeats', ''))
    if not repeats:
        mistake(place, f'row {cells[0]!r} needs repeats, its own or those of its table: `--seed 0..2`')
    script, own_flags = re.match(r'(.*\.py)(.*)', commands[0]).groups()
    shared = f' {settings["flags"]}' if 'flags' in settings else ''
    paper = {column: cell for column, cell in zip_longest(header, cells, fillvalue='') if column in PAPER}
    for column, text in paper.items():
        wanted = {'where': '.+', 'paper': r'[\d.]+'}.get(column, r'[\d.]+, [\d.]+, [\d.]+')
        if not re.fullmatch(wanted, text):
            mistake(place, f'row {cells[0]!r} has {text!r} in the column {column!r}')
    return Row(script + shared + own_flags, repeats, commands[0], own, paper)


def expand(text):
    """`--fold 0..1/4 --seed 3, --seed 5` -> [--fold 0/4 --seed 3, --fold 1/4 --seed 3, --seed 5]"""
    repeats = []
    for flags in text.split(', ') if text else []:
        if numbers := re.search(r'(\d+)\.\.(\d+)', flags):
            for n in range(int(numbers[1]), int(numbers[2]) + 1):
                repeats += expand(f'{flags[:numbers.start()]}{n}{flags[numbers.end():]}')
        else:
            repeats.append(flags)
    return repeats
