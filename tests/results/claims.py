"""What papers claim, and what the runs say of it.

Claims are rows of the table that begins with <!-- claims -->. Its writer gives four cells: the claim, the paper, the
difference there, and in the last one `TABLE`, ROW - BASE. If the quantity is not R@1, `: QUANTITY` follows, one of
QUANTITIES; if it is a difference already, there is no BASE. If the rule's verdict would be out of place, another one
follows, behind a semicolon.
"""
import re
from collections import Counter
from statistics import mean
from typing import NamedTuple

from spec import first_table, mistake
from tables import after, before, cell, counted, differences, last, markdown, measured, numbers, runs_of, stopped

from eval import interval


class Claim(NamedTuple):
    text: str
    paper: str
    there: str              # the paper's difference; '> 0' or '< 0' where it has no number, or one on another scale
    table: str
    row: str
    base: str = ''          # the row that is subtracted; '' if the quantity is a difference already
    quantity: str = 'R@1'
    verdict: str = ''       # in place of the rule's
    what: str = ''          # the last cell, as it is written


def used(run):
    """Utilization by all examples of the training: without mixing, there are no mixed ones"""
    return measured('utilization' if '--mixup none' in run['command'] else 'utilization, mixed')(run)


# What a claim may be about: {quantity: the number of a run}. `stopped by folds` is about the rows and the epoch that
# folds choose.
STOPPED = ' stopped by folds'
OF_MEASURED_TABLES = {'alignment': measured('alignment'), 'uniformity': measured('uniformity'),
                      'utilization by all examples': used, 'P(Pos) - 0.5': measured('P(Pos)', less=0.5),
                      'distance of the curves - 0.1': measured('Fig. 2', less=0.1)}
QUANTITIES = {'R@1': last('R@1'), 'MAP@R': last('MAP@R'), 'R@1 after epoch 2': after(2, 'R@1'),
              'R@1' + STOPPED: last('R@1'), 'MAP@R' + STOPPED: last('MAP@R')} | OF_MEASURED_TABLES


def read_claims(block, tables):
    """[Claim] of a block of a page; a mistake raises UsageError with its place."""
    found = []
    for place, cells in first_table(block)[1]:
        if len(cells) < 4 or not re.fullmatch(r'[<>] 0|-?\d+(\.\d+)?', cells[2]):
            mistake(place, 'a claim has a text, a paper, the difference there (a number, > 0 or < 0), and its rows')
        parts = re.fullmatch(r'`(.*?)`, (.*?)(?:; (.*))?', cells[-1])
        if not parts:
            mistake(place, f'the last cell of a claim is `TABLE`, ROW - BASE, and not {cells[-1]!r}')
        rows, _, quantity = parts[2].partition(': ')
        row, _, base = rows.partition(' - ')
        claim = Claim(*cells[:3], parts[1], row, base, quantity or 'R@1', parts[3] or '', cells[-1])
        if claim.table not in tables:
            mistake(place, f'there is no table `{claim.table}`')
        for name in (row, base):
            if name and name not in tables[claim.table].rows:
                mistake(place, f'table `{claim.table}` has no row {name!r}')
        if claim.quantity not in QUANTITIES:
            mistake(place, f'{claim.quantity!r} is no quantity; these are {", ".join(QUANTITIES)}')
        if claim.quantity.endswith(STOPPED) and not tables[claim.table].folds:
            mistake(place, f'table `{claim.table}` names no folds')
        if claim.quantity in OF_MEASURED_TABLES and not tables[claim.table].measured:
            mistake(place, f'table `{claim.table}` is not measured')
        found.append(claim)
    return found


def runs_that_count(claim, tables, runs):
    """{row: {repeat: run}} of the table of a claim"""
    table = tables[claim.table]
    return stopped(table, tables, runs) if claim.quantity.endswith(STOPPED) else runs_of(table, runs)


def values_of(claim, found):
    """What a claim is about, one number for each repeat that counts"""
    number = QUANTITIES[claim.quantity]
    if claim.base:
        return counted(differences(found, claim.row, claim.base, number))
    return counted(numbers(found.get(claim.row, {}), number))


def verdict(there, values):
    """Whether the interval of these differences lies on the paper's side of 0, and whether it holds the paper's number

    Where it lies on the other side, it excludes 0 and the paper's difference.
    """
    sign = -1 if there[0] in '-<' else 1
    middle, half = interval([sign * value for value in values])
    if middle + half < 0:
        return 'the other way here'
    found = 'seen here' if middle - half > 0 else 'not seen here'
    if there[0] in '<>':
        return found
    if middle + half < sign * float(there):
        return found + '; less than there'
    return found + '; more than there' if middle - half > sign * float(there) else found


def below_no_training(claim, found):
    """Whether both rows of a claim on R@1 end below the networks before training, so that a gain is a smaller loss"""
    if 'R@1' not in claim.quantity or not claim.base:
        return False
    number = QUANTITIES[claim.quantity]
    return all(mean(numbers(found[row], number).values()) < mean(numbers(found[row], before('R@1')).values())
               for row in (claim.row, claim.base))


def judged(claim, tables, runs):
    """The cells of a claim that follow from runs: what was found, in how many pairs, and the verdict"""
    found = runs_that_count(claim, tables, runs)
    values = values_of(claim, found)
    if len(values) < 2:
        return ['', len(values), 'not run yet']
    text = claim.verdict or verdict(claim.there, values)
    if below_no_training(claim, found):
        text += '; both below no training'
    in_percent = 'R@1' in claim.quantity or 'MAP@R' in claim.quantity
    return [cell(values, 1 if in_percent else 2), len(values), text]


def section(claims, tables, runs):
    """The table of claims, and how often each verdict is given, as lines"""
    rows = [['claim', 'paper', 'there', 'here', 'pairs', 'verdict', 'table, difference']]
    rows += [[*claim[:3], *judged(claim, tables, runs), claim.what] for claim in claims]
    return ['<!-- claims -->', '', *markdown(rows), '', count_verdicts(rows[1:]), '']


def count_verdicts(rows):
    different = len({cells[0].split(':')[0] for cells in rows})
    given = Counter(cells[5].split(';')[0] for cells in rows).most_common()
    counts = ', '.join(f'{number} *{name}*' for name, number in given)
    return (f'These are {len(rows)} comparisons on {different} claims: {counts}. If nothing had any effect, one '
            f'interval in twenty would exclude 0 by chance.')
