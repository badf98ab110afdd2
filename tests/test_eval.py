"""eval.py: the same numbers as the training run, and the measures of Metrix, section 4.3."""
import json
import math

import pytest
import torch
from conftest import on_circle

import eval as evaluation
import train_ms


def test_metrix_eq12_by_hand():
    """Queries at 0 and 90 degrees, examples at 60 and 200: nearest are 60 and 30 degrees away."""
    expected = ((2 - 2 * math.cos(math.radians(60))) + (2 - 2 * math.cos(math.radians(30)))) / 2
    assert evaluation.utilization(on_circle(0, 90), on_circle(60, 200)) == pytest.approx(expected, abs=1e-6)


def test_metrix_eq12_more_examples_never_hurt():
    z = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
    assert evaluation.utilization(z[:10], z[10:]) <= evaluation.utilization(z[:10], z[10:25])
    assert evaluation.utilization(z, z) == pytest.approx(0, abs=1e-6)


def test_alignment_and_uniformity_against_loops():
    z, y = on_circle(0, 20, 70, 110, 200), torch.tensor([0, 0, 1, 1, 1])
    squared = torch.cdist(z, z).square()
    pairs = [(i, j) for i in range(5) for j in range(5) if i != j]
    aligned = [squared[i, j].item() for i, j in pairs if y[i] == y[j]]
    assert evaluation.alignment(z, y) == pytest.approx(sum(aligned) / len(aligned))
    spread = [math.exp(-2 * squared[i, j].item()) for i, j in pairs]
    assert evaluation.uniformity(z) == pytest.approx(math.log(sum(spread) / len(spread)))


def test_a_collapsed_space_is_the_least_uniform():
    assert evaluation.uniformity(torch.ones(9, 4)) == pytest.approx(0, abs=1e-6)


def test_eval_repeats_the_last_row_and_ends_with_one_json_line(run, folder, capsys):
    row = run(train_ms, '--name', 'mine', '--precision', 'fp32')
    evaluation.main(['--checkpoint', 'runs/mine/last.pt', '--device', 'cpu', '--precision', 'fp32', '--analyse'])
    result = json.loads(capsys.readouterr().out.strip().split('\n')[-1])
    assert {key: result[key] for key in ('R@1', 'R@8', 'MAP@R')} == {key: row[key] for key in ('R@1', 'R@8', 'MAP@R')}
    assert result['dataset'] == 'folder' and {'alignment', 'uniformity', 'utilization'} <= result.keys()


@pytest.mark.parametrize('flags', [['--checkpoint', 'absent.pt'], [], ['--checkpoint', 'x', '--nonsense']])
def test_a_mistake_is_exit_code_2(flags, capsys):
    with pytest.raises(SystemExit) as stop:
        evaluation.main(flags)
    assert stop.value.code == 2 and len(capsys.readouterr().err.strip().split('\n')) == 1
