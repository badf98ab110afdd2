"""tests/tools/search.py: interrupted searches, and ranges."""
import re
from types import SimpleNamespace

import pytest
import search

import common


def test_a_search_can_be_continued_and_maximizes_the_mean_over_folds(small, folder, tmp_path, monkeypatch, capsys):
    pytest.importorskip('optuna')
    monkeypatch.chdir(tmp_path)
    flags = ('train_ms.py --folds 2 --storage sqlite:///trials.db --dataset folder --steps 1 --device cpu '
             f'--batch-size 4 --per-class 2 --image-size 32 --dim 16 --data {folder} --trials').split()
    search.main([*flags, '1'])
    study = search.main([*flags, '2'])
    assert len(study.trials) == 3 and len({trial.params['--alpha'] for trial in study.trials}) == 3
    assert study.best_value == max(trial.value for trial in study.trials)
    command = f'python train_ms.py --dataset folder --steps 1 .* --data {folder} --alpha'
    assert re.search(f'best of 3 trials: MAP@R {study.best_value:.2f} with {command}', capsys.readouterr().out)
    assert len(list((tmp_path / 'runs').iterdir())) == 6, 'two folds of three trials'
    assert search.main([*flags, '1', '--lr', '1e30']).best_value == 0, 'the score of a trial that diverges'


def test_every_searched_flag_belongs_to_its_script():
    for script, ranges in search.RANGES.items():
        for flag, (low, high, log) in ranges.items():
            assert low < high and (low > 0 or not log)
            for value in (low, high):
                __import__(script.removesuffix('.py')).get_args([f'{flag}={value}'])


def test_the_ranges_of_a_new_script():
    def ranges(*words, script='train_mine.py'):
        return search.ranges_of(SimpleNamespace(script=script, range=[word.split() for word in words]))
    assert ranges('alpha 0.1 10', 'lam -1 1') == {'--alpha': (0.1, 10, True), '--lam': (-1, 1, False)}
    assert ranges('alpha 1 2', script='train_ms.py') == {'--alpha': (1, 2, False)}, '--range replaces RANGES'
    for words, reason in (((), 'train_mine.py are searched'), (['alpha 1 x'], 'two numbers'), (['alpha 2 1'], 'lower')):
        with pytest.raises(common.UsageError, match=reason):
            ranges(*words)
