"""Claims of the papers, and whether our runs replicate them.

Each line of the table after <!-- claims --> is a claim. Four of its cells are written by hand: the claim, its source,
the difference that the paper reports, and in the last cell `TABLE`, ROW - BASE: the two rows that are compared. Add
`: QUANTITY`, one of QUANTITIES, if the claim is not about R@1. Leave out BASE if the quantity is already a difference.
A verdict that replaces the one of `verdict` follows after a semicolon.
"""
import re
from collections import Counter
from statistics import mean
from typing import NamedTuple

from spec import first_table, mistake
from tables import before, cell, counted, differences, last, markdown, measured, per_repeat, runs_of, stopped

from eval import interval


class Claim(NamedTuple):
    text: str
    source: str             # paper and table
    reported: str           # difference in the paper; '> 0' or '< 0' if only its sign can be compared
    table: str
    row: str
    base: str = ''          # the row that is subtracted; '' if the quantity is already a difference
    quantity: str = 'R@1'
    verdict: str = ''       # replaces the verdict that follows from the interval
    what: str = ''          # text of the last cell


def used(run):
    """Utilization by all training examples, clean and mixed (without mixup, all are clean)"""
    return measured('utilization' if '--mixup none' in run['command'] else 'utilization, mixed')(run)


# {quantity that a claim may be about: function of a run}. With SELECTED, rows and epoch are those selected by
# cross-validation.
SELECTED = ' selected by cross-validation'
OF_MEASURED_TABLES = {'alignment': measured('alignment'), 'uniformity': measured('uniformity'),
                      'utilization by all examples': used, 'P(Pos) - 0.5': measured('P(Pos)', less=0.5),
                      'distance of the curves - 0.1': measured('Fig. 2', less=0.1)}
QUANTITIES = {'R@1': last('R@1'), 'MAP@R': last('MAP@R'),
              'R@1' + SELECTED: last('R@1'), 'MAP@R' + SELECTED: last('MAP@R')} | OF_MEASURED_TABLES


def read_claims(block, tables):
    """[Claim] of a block of a page. An error raises UsageError with page and line."""
    found = []
    for place, cells in first_table(block)[1]:
        if len(cells) < 4 or not re.fullmatch(r'[<>] 0|-?\d+(\.\d+)?', cells[2]):
            mistake(place, 'a claim has a text, a source, the difference reported (a number, > 0 or < 0), and its rows')
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
            mistake(place, f'{claim.quantity!r} is not a quantity; these are {", ".join(QUANTITIES)}')
        if claim.quantity.endswith(SELECTED) and not tables[claim.table].folds:
            mistake(place, f'table `{claim.table}` names no folds')
        if claim.quantity in OF_MEASURED_TABLES and not tables[claim.table].measured:
            mistake(place, f'table `{claim.table}` is not measured')
        found.append(claim)
    return found


def runs_that_count(claim, tables, runs):
    """{row: {repeat: run}} of the table of a claim"""
    table = tables[claim.table]
    return stopped(table, tables, runs) if claim.quantity.endswith(SELECTED) else runs_of(table, runs)


def values_of(claim, found):
    """The quantity of a claim, one value per repeat (see `counted`)"""
    quantity = QUANTITIES[claim.quantity]
    if claim.base:
        return counted(differences(found, claim.row, claim.base, quantity))
    return counted(per_repeat(found.get(claim.row, {}), quantity))


def verdict(reported, values):
    """Compare the 95% CI of our differences `values` with 0 and with the difference that the paper reports."""
    sign = -1 if reported[0] in '-<' else 1
    middle, half = interval([sign * value for value in values])
    if middle + half < 0:
        return 'opposite sign'
    found = 'replicated' if middle - half > 0 else 'inconclusive'
    if reported[0] in '<>':
        return found
    if middle + half < sign * float(reported):
        return found + '; smaller than reported'
    return found + '; larger than reported' if middle - half > sign * float(reported) else found


def below_untrained(claim, found):
    """Whether both rows of a claim on R@1 end below the network before training, so that a gain is a smaller loss"""
    if 'R@1' not in claim.quantity or not claim.base:
        return False
    quantity = QUANTITIES[claim.quantity]
    return all(mean(per_repeat(found[row], quantity).values()) < mean(per_repeat(found[row], before('R@1')).values())
               for row in (claim.row, claim.base))


def judged(claim, tables, runs):
    """The cells of a claim that follow from runs: our difference, the number of pairs, and the verdict"""
    found = runs_that_count(claim, tables, runs)
    values = values_of(claim, found)
    if len(values) < 2:
        return ['', len(values), 'not run yet']
    text = claim.verdict or verdict(claim.reported, values)
    if below_untrained(claim, found):
        text += '; both below the untrained network'
    in_percent = 'R@1' in claim.quantity or 'MAP@R' in claim.quantity
    return [cell(values, 1 if in_percent else 2), len(values), text]


def section(claims, tables, runs):
    """Lines of the table of claims, and of the counts of its verdicts"""
    rows = [['claim', 'source', 'paper', 'ours', 'pairs', 'verdict', 'table, difference']]
    rows += [[*claim[:3], *judged(claim, tables, runs), claim.what] for claim in claims]
    return ['<!-- claims -->', '', *markdown(rows), '', count_verdicts(rows[1:])]


def count_verdicts(rows):
    different = len({cells[0].split(':')[0] for cells in rows})
    given = Counter(cells[5].split(';')[0] for cells in rows).most_common()
    counts = ', '.join(f'{number} *{name}*' for name, number in given)
    return (f'These are {len(rows)} comparisons on {different} claims: {counts}. If no method had any effect, one '
            f'interval in twenty would exclude 0 by chance.')
