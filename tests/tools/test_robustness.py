"""A sample of tests/tools/robustness.py, without the group that starts processes."""
import pytest
import robustness


@pytest.mark.filterwarnings('ignore:Tag data')                # PIL, for a corrupted TIFF
@pytest.mark.parametrize('group', [name for name in robustness.GROUPS if name != 'faults'])
def test_a_sample_of_the_group(group, small):
    cases = list(robustness.GROUPS[group]())[::dict(annotations=1, checkpoints=3, folders=3).get(group, 7)]
    wrong = {what: reason for what, *case in cases if (reason := robustness.attempt(*case))}
    assert len(cases) > 5 and not wrong
