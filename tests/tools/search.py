"""Searches hyper-parameters by the mean validation MAP@R of the folds, as the Reality Check does (Section 3.3).

    pip install optuna
    python tests/tools/search.py train_ms.py --trials 10                            # on shapes
    python tests/tools/search.py train_ms.py --dataset cub --data data --protocol reality-check --storage sqlite:///ms.db
    python tests/tools/search.py train_mine.py --range alpha 0.1 10 --range margin 0 1

A range searches a flag of any script, a copied one too; if its ends are more than 0 and a factor of 100 or more apart,
the logarithm is searched. For the seven scripts there are RANGES, which hold where no --range is given. All other flags
that are not named here go to the script. With --storage, a search that was stopped goes on when it is started
again; and machines that name the same database, on one of them or on a server, share the trials. Each run keeps two
checkpoints in runs/, for a ResNet-50 of 0.3 GB each; they may be deleted while the search goes on. Not collected by
pytest.
"""
import argparse
import importlib
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import common  # noqa: E402

# {script: {flag: (lowest, highest, whether the logarithm is searched)}}. For ms these are the ranges in the
# documentation of the Reality Check's code, but for --beta: its best values there were 48 to 157.
RANGES = {
    'train_contrastive.py': {'--pos-margin': (-1, 1, False), '--neg-margin': (0, 2, False)},
    'train_ms.py': {'--alpha': (0.01, 50, True), '--beta': (1, 200, True), '--lam': (0, 1, False),
                    '--epsilon': (0, 1, False)},
    'train_proxy_anchor.py': {'--alpha': (1, 100, True), '--delta': (0, 0.5, False),
                              '--proxy-lr-mult': (1, 1e5, True)},
    'train_proxynca_pp.py': {'--temperature': (0.01, 2, True), '--proxy-lr-mult': (1, 1e5, True)},
    'train_ccl.py': {'--s': (1, 100, True), '--margin': (0, 0.5, False), '--lam': (0, 4, False),
                     '--center-lr-mult': (1, 1e5, True)},
    'train_metrix.py': {'--strength': (0, 1, False), '--alpha': (0.1, 10, True)},
    'train_hse.py': {'--alpha': (1e-3, 2, True), '--temperature': (0.05, 1, True)},
}


def ranges_of(options):
    """{flag: (low, high, log)} of --range, or else of RANGES"""
    if not options.range:
        if options.script not in RANGES:
            raise common.UsageError(f'which flags of {options.script} are searched? Say it with --range FLAG LOW HIGH')
        return RANGES[options.script]
    ranges = {}
    for flag, *ends in options.range:
        try:
            low, high = map(float, ends)
        except ValueError:
            raise common.UsageError(f'--range {flag} {" ".join(ends)}: the ends are two numbers') from None
        if not low < high:
            raise common.UsageError(f'--range {flag} {low:g} {high:g}: the first number must be the lower one')
        ranges[f'--{flag}'] = low, high, low > 0 and high >= 100 * low
    return ranges


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     allow_abbrev=False)
    parser.add_argument('script', help='train_ms.py, or any other script that is made like it')
    parser.add_argument('--range', nargs=3, action='append', metavar=('FLAG', 'LOW', 'HIGH'), default=[],
                        help='a flag to search, without its --, between these values; several times')
    parser.add_argument('--trials', type=common.at_least(1), default=50, help='to add; the Reality Check has 50')
    parser.add_argument('--folds', type=int, default=4, help='each a run of every trial')
    parser.add_argument('--storage', help='database that keeps the trials, sqlite:///FILE or one on a server')
    options, flags = parser.parse_known_args(argv)
    try:
        import optuna
    except ImportError:
        parser.exit(2, 'error: the search is that of Optuna: pip install optuna\n')
    ranges = ranges_of(options)
    path = Path(options.script)
    sys.path.insert(0, str(path.resolve().parent))
    script = importlib.import_module(path.stem)
    script.get_args([*flags, '--fold', f'0/{options.folds}'])           # a mistake shows before the first trial

    def score(trial):
        chosen = [f'{flag}={trial.suggest_float(flag, low, high, log=log)}'
                  for flag, (low, high, log) in ranges.items()]
        try:
            rows = [script.main([*flags, *chosen, '--fold', f'{n}/{options.folds}']) for n in range(options.folds)]
        except common.UsageError as error:
            if 'lower --lr' not in str(error):          # numbers that are not finite: a bad setting, no reason to stop
                raise
            return 0.0
        return sum(row['MAP@R'] for row in rows) / len(rows)

    typed = [' '.join(['--range', *words]) for words in options.range]      # another range is another search
    study = optuna.create_study(study_name=' '.join([options.script, *flags, *typed, f'--folds {options.folds}']),
                                storage=options.storage, direction='maximize', load_if_exists=True)
    # A machine that joins later must not draw what the first one drew.
    study.sampler = optuna.samplers.TPESampler(seed=len(study.trials))
    study.optimize(score, options.trials)
    best = ' '.join(f'{flag} {value:.4g}' for flag, value in study.best_params.items())
    finished = sum(trial.value is not None for trial in study.trials)
    command = ' '.join(['python', options.script, *flags, best])
    print(f'best of {finished} trials: MAP@R {study.best_value:.2f} with {command}')
    return study


if __name__ == '__main__':
    common.cli(main)
