"""Every seventh case of tests/soak.py, but none that needs processes of its own."""
import pytest
import soak

import common


@pytest.mark.parametrize('group', [name for name in soak.GROUPS if name != 'faults'])
def test_a_sample_of_the_group(group, monkeypatch, small):
    monkeypatch.setattr(soak, 'common', common)
    cases = list(soak.GROUPS[group]())[::7]
    wrong = {what: reason for what, case in cases if (reason := soak.attempt(case))}
    assert len(cases) > 5 and not wrong


def test_the_count_sees_what_goes_wrong(monkeypatch):
    monkeypatch.setattr(soak, 'common', common)

    def raises(error):
        raise error
    assert soak.attempt(lambda: soak.refused(lambda: None)) == 'AssertionError: was accepted'
    assert soak.attempt(lambda: soak.refused(lambda: raises(ValueError('x')))) == 'ValueError: x'
    assert 'unclear' in soak.attempt(lambda: soak.refused(lambda: raises(common.UsageError('x')), 'y'))
    assert soak.attempt(lambda: soak.refused(lambda: raises(common.UsageError('x y')), 'y')) is None
