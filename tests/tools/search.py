"""Searches hyper-parameters by the mean validation MAP@R of the folds, as the Reality Check does (Section 3.3).

    pip install optuna
    python tests/tools/search.py train_ms.py --trials 10                            # on shapes
    python tests/tools/search.py train_ms.py --dataset cub --data data --protocol reality-check --storage sqlite:///ms.db

All flags that are not named here go to the script. With --storage, a search that was stopped goes on when it is started
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


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     allow_abbrev=False)
    parser.add_argument('script', choices=list(RANGES))
    parser.add_argument('--trials', type=common.at_least(1), default=50, help='to add; the Reality Check has 50')
    parser.add_argument('--folds', type=int, default=4, help='each a run of every trial')
    parser.add_argument('--storage', help='database that keeps the trials, sqlite:///FILE or one on a server')
    options, flags = parser.parse_known_args(argv)
    try:
        import optuna
    except ImportError:
        parser.exit(2, 'error: the search is that of Optuna: pip install optuna\n')
    script = importlib.import_module(options.script.removesuffix('.py'))
    script.get_args([*flags, '--fold', f'0/{options.folds}'])           # a mistake shows before the first trial

    def score(trial):
        chosen = [f'{flag}={trial.suggest_float(flag, low, high, log=log)}'
                  for flag, (low, high, log) in RANGES[options.script].items()]
        try:
            rows = [script.main([*flags, *chosen, '--fold', f'{n}/{options.folds}']) for n in range(options.folds)]
        except common.NotFinite:                                        # a bad setting, but no reason to stop
            return 0.0
        return sum(row['MAP@R'] for row in rows) / len(rows)

    study = optuna.create_study(study_name=' '.join([options.script, *flags, f'--folds {options.folds}']),
                                storage=options.storage, direction='maximize', load_if_exists=True)
    # A machine that joins later must not draw what the first one drew.
    study.sampler = optuna.samplers.TPESampler(seed=len(study.trials))
    study.optimize(score, options.trials)
    best = ' '.join(f'{flag} {value:.4g}' for flag, value in study.best_params.items())
    finished = sum(trial.value is not None for trial in study.trials)
    print(f'best of {finished} trials: MAP@R {study.best_value:.2f} with python {options.script} {best}')
    return study


if __name__ == '__main__':
    common.cli(main)
