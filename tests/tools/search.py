"""Hyperparameter search by the mean validation MAP@R of the folds, as in the Reality Check, Section 3.3.

    pip install optuna
    python tests/tools/search.py train_ms.py --trials 10                            # on shapes
    python tests/tools/search.py train_ms.py --dataset cub --data data --protocol reality-check --storage sqlite:///ms.db
    python tests/tools/search.py train_mine.py --range alpha 0.1 10 --range margin 0 1

--range searches a flag of any script, between two limits. If both are positive and their ratio is at least 100, the
search is on a logarithmic scale. Without --range, the RANGES below are used for the seven scripts. All flags that are
not listed here are passed to the script. With --storage, an interrupted search continues when it is started again, and
machines that use the same database add to the same trials. Each run saves two checkpoints in runs/, of 0.3 GB each for
a ResNet-50; they may be deleted during the search. Not collected by pytest.
"""
import argparse
import importlib
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import common  # noqa: E402

# {script: {flag: (lowest, highest, logarithmic)}}. The ranges of ms are from the documentation of the Reality Check's
# code, except for --beta, whose best values there were 48 to 157.
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
    for flag, *limits in options.range:
        try:
            low, high = map(float, limits)
        except ValueError:
            raise common.UsageError(f'--range {flag} {" ".join(limits)}: the limits must be two numbers') from None
        if not low < high:
            raise common.UsageError(f'--range {flag} {low:g} {high:g}: the first limit must be the lower one')
        ranges[f'--{flag}'] = low, high, low > 0 and high >= 100 * low
    return ranges


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     allow_abbrev=False)
    parser.add_argument('script', help='train_ms.py, or any script with the same structure')
    parser.add_argument('--range', nargs=3, action='append', metavar=('FLAG', 'LOW', 'HIGH'), default=[],
                        help='search this flag, written without --, between these limits; may be repeated')
    parser.add_argument('--trials', type=common.at_least(1), default=50, help='trials to add; 50 in the Reality Check')
    parser.add_argument('--folds', type=int, default=4, help='number of folds: runs per trial')
    parser.add_argument('--storage', help='database of the trials, sqlite:///FILE or on a server')
    options, flags = parser.parse_known_args(argv)
    try:
        import optuna
    except ImportError:
        parser.exit(2, 'error: the search needs Optuna: pip install optuna\n')
    ranges = ranges_of(options)
    path = Path(options.script)
    sys.path.insert(0, str(path.resolve().parent))
    script = importlib.import_module(path.stem)
    script.get_args([*flags, '--fold', f'0/{options.folds}'])           # usage errors show before the first trial

    def score(trial):
        chosen = [f'{flag}={trial.suggest_float(flag, low, high, log=log)}'
                  for flag, (low, high, log) in ranges.items()]
        try:
            records = [script.main([*flags, *chosen, '--fold', f'{n}/{options.folds}']) for n in range(options.folds)]
        except common.UsageError as error:
            if 'lower --lr' not in str(error):          # a loss that is not finite: the score of the trial is 0
                raise
            return 0.0
        return sum(record['MAP@R'] for record in records) / len(records)

    typed = [' '.join(['--range', *words]) for words in options.range]      # with another range it is another search
    study = optuna.create_study(study_name=' '.join([options.script, *flags, *typed, f'--folds {options.folds}']),
                                storage=options.storage, direction='maximize', load_if_exists=True)
    # A machine that starts later must not sample the same values as the first one.
    study.sampler = optuna.samplers.TPESampler(seed=len(study.trials))
    study.optimize(score, options.trials)
    best = ' '.join(f'{flag} {value:.4g}' for flag, value in study.best_params.items())
    finished = sum(trial.value is not None for trial in study.trials)
    command = ' '.join(['python', options.script, *flags, best])
    print(f'best of {finished} trials: MAP@R {study.best_value:.2f} with {command}')
    return study


if __name__ == '__main__':
    common.cli(main)
