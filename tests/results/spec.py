"""Reads the tables that a results page specifies. results.py makes their runs and fills in the values.

A page is Markdown. A table begins with a line of settings, and ends with a comment:

    **Table `mixup`**, repeats `--seed 0..2`, flags `--epochs 4`

    | | command |
    |---|---|
    | none | `train_metrix.py --mixup none` |
    | feature | `train_metrix.py --mixup feature` |
    | feature - none | |

    <!-- end -->

A row has a name and a command, or its name is the difference of two rows. results.py inserts columns of values between
name and command, and further tables after the first one; any other text in the block is lost. So write by hand: the
settings and, in the first table, the names, the commands in backticks, and the paper's values. A new row needs no other
cells. The settings:

    repeats   Each command is run with each of these flags: `--seed 0..2` are three repeats, `--fold 0..3/4 --seed 1..2`
              are eight; further repeats follow after a comma. A cell of a row may hold repeats for this row only.
    flags     Flags for all commands of the table, inserted after the name of the script.
    epochs    The evaluations that are kept and shown: `0 2 4 9`. Without it, all are kept, and the last one is shown.
    folds     The name of a table with the same rows on folds, for cross-validation: it selects the best row and epoch
              by MAP@R. Rows `METHOD @ SETTING` of both tables are settings of one method.
    measured  `yes`: the trained networks are analysed (eval.py --analyse, fig2.py).

A table that repeats a table of a paper also has columns of PAPER: the paper's R@1 or, on folds, its R@1, RP and MAP@R,
separated and concatenated; and `where` they are printed.
"""
import re
from itertools import zip_longest
from typing import NamedTuple

import common

OTHERS = ('<!-- claims -->', '<!-- spread -->', '<!-- patches -->')      # first lines of other generated blocks
END = '<!-- end -->'
SETTINGS = ('repeats', 'flags', 'epochs', 'folds', 'measured')
PAPER = ('paper', 'paper, separated', 'paper, concatenated', 'where')


class Row(NamedTuple):
    command: str            # complete, without `python` and the repeat
    repeats: list           # [flags]
    typed: str = ''         # the command as written on the page
    own_repeats: str = ''   # as written on the page; '' if the row has the repeats of its table
    paper: dict = {}        # {column of PAPER: text}


class Table(NamedTuple):
    rows: dict              # {name: Row}
    pairs: list = []        # [(row, row that is subtracted)]
    epochs: list = []       # evaluations that are kept and shown; []: all are kept
    folds: str = ''         # name of the table that selects by cross-validation
    measured: bool = False
    settings: str = ''      # the first line of the table
    place: str = ''         # page and line, for error messages


class Block(NamedTuple):
    """Lines of a page from the first line of a table up to its end, exclusive"""
    page: str
    number: int             # line number of the first line
    lines: list

    def place(self, offset=0):
        return f'{self.page}, line {self.number + offset}'


def mistake(place, text):
    raise common.UsageError(f'{place}: {text}')


def read_tables(pages):
    """{name: Table} of the pages, a list of files. An error in one of them raises UsageError with page and line."""
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
            mistake(table.place, f'folds `{table.folds}` is not a table')
    return tables


def blocks(page):
    """[Block] of a page. A block begins with **Table or with a line of OTHERS, and ends with <!-- end -->."""
    found, start = [], None
    lines = page.read_text().splitlines()
    for number, line in enumerate(lines, 1):
        if line == END:
            if not start:
                mistake(f'{page.name}, line {number}', f'{END} without a table before it')
            found.append(Block(page.name, start, lines[start - 1:number - 1]))
            start = None
        elif line.startswith('**Table') or line in OTHERS:
            if start:
                break
            start = number
    if start:
        mistake(f'{page.name}, line {start}', f'the block that begins here does not end with {END}')
    return found


def first_table(block):
    """First Markdown table of a block -> header [cell], rows [(place, [cell])]"""
    found = []
    for offset, line in enumerate(block.lines):
        if line.startswith('|'):
            cells = line.strip().removeprefix('|').removesuffix('|').split('|')
            found.append((block.place(offset), [cell.strip() for cell in cells]))
        elif found:
            break
    if len(found) < 2 or set(''.join(found[1][1])) != {'-'}:
        mistake(block.place(), 'a table must follow, with a header and a line |---|---| below it')
    return found[0][1], found[2:]


def read_table(block):
    """Block that begins with **Table -> name, Table"""
    name, settings = read_settings(block)
    header, lines = first_table(block)
    rows, pairs = {}, []
    for place, cells in lines:
        if ' - ' in cells[0]:
            if '`' in ''.join(cells):
                mistake(place, f'{cells[0]!r} is a difference of two rows, so it has no command and no repeats')
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
    """First line of a table -> name, {setting: text}"""
    name = re.match(r'\*\*Table `([\w-]+)`\*\*', block.lines[0])
    settings = dict(re.findall(r', (\w+) `([^`]*)`', block.lines[0]))
    rewritten = ''.join(f', {key} `{text}`' for key, text in settings.items())
    if not name or name[0] + rewritten != block.lines[0]:               # then a part of it was not parsed
        mistake(block.place(), 'a table begins with **Table `NAME`**, repeats `--seed 0..2`, and more settings like it')
    for key, text in settings.items():
        if key not in SETTINGS:
            mistake(block.place(), f'{key} is not a setting of a table; these are {", ".join(SETTINGS)}')
        if key == 'epochs' and not re.fullmatch(r'\d+( \d+)*', text):
            mistake(block.place(), f'epochs are integers with spaces between them, `0 2 4`, and not `{text}`')
        if key == 'measured' and text != 'yes':
            mistake(block.place(), f'measured is `yes`, or left out, and not `{text}`')
    return name[1], settings


def read_row(place, header, cells, settings):
    """Row with a command -> Row"""
    quoted = [cell.strip('`') for cell in cells[1:] if cell.startswith('`')]
    commands = [text for text in quoted if not text.startswith('--')]
    own = ', '.join(text for text in quoted if text.startswith('--'))
    if len(commands) != 1 or '.py' not in commands[0]:
        mistake(place, f'row {cells[0]!r} needs a command in backticks, as `train_ms.py --lr 1e-4`')
    repeats = expand(own or settings.get('repeats', ''))
    if not repeats:
        mistake(place, f'row {cells[0]!r} needs repeats, its own or those in the settings: `--seed 0..2`')
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
        if ends := re.search(r'(\d+)\.\.(\d+)', flags):
            for n in range(int(ends[1]), int(ends[2]) + 1):
                repeats += expand(f'{flags[:ends.start()]}{n}{flags[ends.end():]}')
        else:
            repeats.append(flags)
    return repeats
