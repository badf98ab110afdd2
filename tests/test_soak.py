"""A sample of tests/soak.py, but none that needs processes of its own."""
from unittest import mock

import pytest
import soak

import common


@pytest.mark.filterwarnings('ignore:Tag data')                # PIL on a damaged TIFF
@pytest.mark.parametrize('group', [name for name in soak.GROUPS if name != 'faults'])
def test_a_sample_of_the_group(group, monkeypatch, small):
    monkeypatch.setattr(soak, 'common', common)
    cases = list(soak.GROUPS[group]())[::dict(annotations=1, checkpoints=3, folders=3).get(group, 7)]
    wrong = {what: reason for what, *case in cases if (reason := soak.attempt(*case))}
    assert len(cases) > 5 and not wrong


@pytest.mark.parametrize('error, expected, verdict', [
    (None, [], 'was accepted'), (None, 6, 'wrong: 5'), (None, 5, None), (None, None, None),
    (ValueError('x'), [], 'ValueError: x'), (ValueError('x'), None, 'ValueError: x'),
    (common.UsageError('x y'), ['z'], 'unclear: x y'), (common.UsageError('x\ny'), [], 'unclear: x y'),
    (common.UsageError('x y'), 5, 'refused: x y'), (common.UsageError('x y'), ['y'], None)])
def test_the_count_sees_what_goes_wrong(monkeypatch, error, expected, verdict):
    monkeypatch.setattr(soak, 'common', common)
    call = mock.Mock(side_effect=error, return_value=5)
    assert soak.attempt(soak.no_files, call, expected) == verdict
