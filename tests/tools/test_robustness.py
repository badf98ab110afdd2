"""A sample of tests/tools/soak.py, but none that needs processes of its own."""
import pytest
import soak


@pytest.mark.filterwarnings('ignore:Tag data')                # PIL on a damaged TIFF
@pytest.mark.parametrize('group', [name for name in soak.GROUPS if name != 'faults'])
def test_a_sample_of_the_group(group, small):
    cases = list(soak.GROUPS[group]())[::dict(annotations=1, checkpoints=3, folders=3).get(group, 7)]
    wrong = {what: reason for what, *case in cases if (reason := soak.attempt(*case))}
    assert len(cases) > 5 and not wrong
