"""Every seventh case of tests/soak.py, but none that needs processes of its own."""
import pytest
import soak

import common


@pytest.mark.filterwarnings('ignore:Tag data')                # PIL on a damaged TIFF
@pytest.mark.parametrize('group', [name for name in soak.GROUPS if name != 'faults'])
def test_a_sample_of_the_group(group, monkeypatch, small):
    monkeypatch.setattr(soak, 'common', common)
    cases = list(soak.GROUPS[group]())[::7]
    wrong = {what: reason for what, *case in cases if (reason := soak.attempt(*case))}
    assert len(cases) > 5 and not wrong


def test_the_count_sees_what_goes_wrong(monkeypatch):
    monkeypatch.setattr(soak, 'common', common)

    def verdict(error, expected):
        def call():
            if error:
                raise error
            return 5
        return soak.attempt(soak.no_files, call, expected)
    refusal = common.UsageError('x y')
    assert verdict(None, []) == 'was accepted' and verdict(None, 6) == 'wrong: 5'
    assert verdict(ValueError('x'), []) == verdict(ValueError('x'), None) == 'ValueError: x'
    assert verdict(refusal, ['z']) == 'unclear: x y' and verdict(refusal, 5) == 'refused: x y'
    assert verdict(refusal, ['y']) is verdict(refusal, None) is verdict(None, None) is None
    assert verdict(common.UsageError('x\ny'), []) == 'unclear: x y'
    assert verdict(None, 5) is None
