"""Makes starter code for exercises, and grades submissions. Each exercise is to write a function of the project.

    python tests/course/handout.py list                 the exercises: week, level, minutes, equations
    python tests/course/handout.py make OUT NAME...     writes the folder OUT for students: these functions are stubbed
                                                        out, and those of the same week and of later weeks
        --keep                                          other exercises keep their solutions
        --flawed SEED                                   instead, each script has a wrong solution, for students to find
                                                        and correct; the seed selects it
    python tests/course/handout.py grade NAME FILE...   prints a line for each file: points for each equation, and
                                                        their sum. In a folder, scripts with the name of the
                                                        exercise's script are graded, or else all its .py files
        --csv grades.csv                                writes file, exercise, equation, points, of, seed, remarks
        --feedback DIR                                  writes a text for each file: which tests failed, and why
        --seed SEED                                     uses the random inputs of an earlier grading again
    python tests/course/handout.py check [NAME...]      tests solutions.py: wrong ones fail, right ones pass; -v
                                                        prints all

A student gets the folder, writes the functions of the exercise, and submits the script. `grade` runs the tests of
the project on this file in a separate process, whose children are killed. Then it calls the function on random inputs
that are not in the starter code, and compares the results with the original, which runs in another process: one more
point. The README of the starter code explains how points are counted. `grade` executes submissions: run it where they
can do no harm.

Remarks do not change the points. They list names that a formula does not need, such as sys.modules or an absolute path,
and other functions that were changed: read these submissions.
"""
import argparse
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from exercises import EXERCISES
from grading import Comparison, grade, read, results
from making import handout, make, solutions_in, source, stub_out, with_solution


def check(names, verbose=0, seed=0):
    """Checks that all graded tests fail on starter code, at least one on each wrong solution, and none on right ones,
    with all other exercises stubbed out; and that the comparison finds solutions that only pass the tests, and no right
    ones. Returns the number of solutions for which this is not so."""
    from solutions import PASSING, RIGHT, WRONG
    jobs = []
    bad = 0
    for name in names:
        e = EXERCISES[name]
        to_write = e.stubbed.split()
        original = stub_out(source(e.script), solutions_in(e.script, EXERCISES) - {*to_write})
        jobs += [(name, 'starter code', handout([name])[e.script]), (name, 'original', original)]
        for kind, solutions in ('right', RIGHT), ('wrong', WRONG), ('passing', PASSING):
            jobs += [(name, f'{kind}: {what}', with_solution(original, to_write, solution))
                     for what, solution in solutions.get(name, {}).items()]
    jobs = [(name, what, read(EXERCISES[name], text.encode()).text) for name, what, text in jobs]
    files = handout(list(EXERCISES))

    comparisons = {}

    def run(job):
        """Failures, {test or 'comparison': why}, and the number of tests"""
        name, what, script = job
        tests, why = results(EXERCISES[name], files, script, *['-x'] * what.startswith('wrong'))
        failed = {test: reason for test, reason in tests.items() if reason} | ({'': why} if why else {})
        if what.startswith(('right', 'passing')):
            differences = comparisons[name].of(files, script)
            failed |= {'comparison': differences[0]} if differences else {}
        return failed, len(tests)
    with ThreadPoolExecutor(2) as pool:
        comparisons |= zip(names, pool.map(partial(Comparison, seed=seed), names))
        for (name, what, _), (failed, number) in zip(jobs, pool.map(run, jobs)):
            kind = what.split(':')[0]
            good = {'starter code': len(failed) == number > 0, 'wrong': len(failed) > 0,
                    'passing': [*failed] == ['comparison']}
            good = good.get(kind, not failed)
            bad += not good
            test, reason = next(iter(failed.items()), ('', ''))
            if verbose or not good:
                print(f'{"ok " if good else "BAD"} {name}, {what}: {len(failed)} of {number} tests fail {test}')
            if reason and (verbose > 1 or not good):
                print(reason)
    counts = {kind: sum(what.startswith(kind) for _, what, _ in jobs) for kind in ('wrong', 'passing', 'right')}
    print(f'{len(names)} exercises, {counts["wrong"]} wrong solutions, {counts["passing"]} that only pass the tests, '
          f'{counts["right"]} right ones: {bad} with unexpected results')
    return bad


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest='command', required=True)
    commands.add_parser('list')
    command = commands.add_parser('make')
    command.add_argument('out', metavar='OUT')
    command.add_argument('names', metavar='NAME', nargs='+')
    command.add_argument('--flawed', type=int, metavar='SEED', help='complete scripts, each with a mistake to be found')
    command.add_argument('--keep', action='store_true', help='other exercises of these files keep their solutions')
    command = commands.add_parser('grade')
    command.add_argument('names', metavar='NAME', nargs=1)
    command.add_argument('files', metavar='FILE', nargs='+')
    command.add_argument('--csv', metavar='FILE', help='file, exercise, equation, points, of, seed, remarks')
    command.add_argument('--feedback', metavar='DIR', help='a text for each file: which tests failed, and why')
    command.add_argument('--seed', type=int, help='seed of the random inputs; default: a random one, which is printed')
    command = commands.add_parser('check')
    command.add_argument('names', metavar='NAME', nargs='*')
    command.add_argument('-v', action='count', default=0, help='print a line for each solution; -vv: and why it fails')
    args = parser.parse_args(argv)
    os.environ['OMP_NUM_THREADS'] = '1'             # for the child processes: two at a time, each on one core
    if args.command == 'list':
        for name, e in EXERCISES.items():
            print(f'{name:28} week {e.week}  level {e.level} {e.minutes:4} minutes  {e.source}')
        return False
    for name in args.names:
        if name not in EXERCISES:
            parser.exit(2, f'error: {name} is not an exercise; these are: {", ".join(EXERCISES)}\n')
    if args.command == 'make':
        make(args.out, args.names, args.flawed, args.keep)
    elif args.command == 'grade':
        if missing := [path for path in args.files if not Path(path).exists()]:
            parser.exit(2, f'error: no such file: {missing[0]}\n')
        grade(args.names[0], args.files, args.csv, args.feedback, args.seed)
    else:
        return check(args.names or list(EXERCISES), args.v) > 0


if __name__ == '__main__':
    sys.exit(main())
