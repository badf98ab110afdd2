"""The results page: commands, runs and tables."""
import json
import math
import re
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import patches
import pytest
import results
import torch
from conftest import unit
from experiments import EXPERIMENTS, Experiment

import common
import train_metrix

MINE = Experiment('mine', 'Two rows.', {'with': 'train_ms.py --alpha 3', 'without': 'train_ms.py'},
                  ['--seed 0', '--seed 1', '--seed 2'], '--epochs 2', [('with', 'without', 3.6)],
                  ('R@1 before', 'R@1', 's-', 'best R@1', 'best - last'))


def rows(before, *recalls):
    return [{'R@1': recall, 's-': recall / 100, 'minutes': epoch} for epoch, recall in enumerate([before, *recalls])]


def test_a_difference_is_over_the_repeats_that_both_rows_have():
    found = {'--alpha 3 --epochs 2 --seed 0': rows(1, 9, 6), '--alpha 3 --epochs 2 --seed 2': rows(11, 3, 8),
             '--epochs 2 --seed 0': rows(2, 3, 4), '--epochs 2 --seed 1': rows(1, 1, 99),
             '--epochs 2 --seed 2': rows(1, 1, 4)}
    runs = {f'train_ms.py {flags}': dict(rows=log, machine='a machine', precision='bf16', commit='abc')
            for flags, log in found.items()}
    lines = results.table(MINE, results.finished(MINE, runs))
    assert lines[2] == ('Two rows. Repeats: `--seed 0` to `--seed 2`; flags of all rows: `--epochs 2`.')
    assert lines[3] == '5 runs of 2.0 minutes. Machine: a machine, bf16. Code: abc.'
    assert lines[7] == ('| with | 2 | 6.0 ± 63.5 | 7.0 ± 12.7 | 0.07 ± 0.13 | 8.5 ± 6.4 | 1.5 ± 19.1 |  | '
                        '`train_ms.py --alpha 3` |'), 'the best epoch is one after training began'
    assert lines[9].startswith('| with - without | 2 | 4.5 ± 69.9 | 3.0 ± 12.7 |') and lines[9].endswith('| 3.6 |  |')
    of_one_row = {command: run for command, run in runs.items() if 'alpha' in command}
    shorter = results.table(MINE, results.finished(MINE, of_one_row))
    assert len(shorter) == len(lines) - 2, 'rows without a run are left out'
    assert results.table(MINE, results.finished(MINE, {})) == []


def test_the_sum_of_the_rates_of_a_run_and_of_its_recipe():
    run = dict(command='train_contrastive.py --dataset cub --epochs 9 --freeze-backbone-epochs 1 --decay-epochs 6',
               rows=[dict(epoch=8)])
    assert results.value('rates', run) == pytest.approx(5 + 2 * 0.1), 'the first of 8 epochs is frozen, 2 are decayed'
    assert results.value('rates, recipe', run) == pytest.approx(5 + 10 * 0.1 + 10 * 0.01 + 10 * (1e-3 + 1e-4 + 1e-5))


def test_an_interval_is_bold_if_three_values_exclude_0():
    assert results.cell([1, 1.1, 1.2], 'R@1', bold=True) == '**1.1 ± 0.2**' and results.cell([1, 1.1], 'R@1')[0] == '1'
    assert results.cell([1, 1.1], 'R@1', bold=True) == '1.1 ± 0.6'
    assert results.cell([1, -1, 0], 'R@1', bold=True)[0] == '0' and results.cell([-0.01, 0], 'R@1') == '0.0 ± 0.1'
    assert results.cell([7], 's+') == '7.00' and results.cell([], 's+') == ''


def test_the_pages_follow_from_the_runs(monkeypatch):
    """`python tests/results/results.py` writes them: the tables, and then the numbers of both pages."""
    written = []
    monkeypatch.setattr(Path, 'write_text', lambda path, text: written.append((path, text)))
    results.main([])
    assert [path.parent for path, _ in written] == [results.FOLDER, results.FOLDER, results.ROOT]
    for path, text in written:
        assert path.read_text() == text
        assert not re.search(r'^ *<!--\w', text, re.MULTILINE), 'such a line would end the paragraph'


def test_commands_of_experiments_are_understood_by_their_scripts_and_runs_are_of_experiments():
    wanted = {f'{experiment.command(row)} {repeat}' for experiment in EXPERIMENTS for row in experiment.rows
              for repeat in experiment.repeats}
    for command in wanted:
        script, *flags = command.split()
        if script == 'tests/results/patches.py':
            assert flags.pop(0) in patches.PATCHES
            script = 'train_metrix.py'
        import_module(script.removesuffix('.py')).get_args(flags)
    assert results.read_runs().keys() <= wanted, 'other runs are in no table'


@pytest.fixture
def trial(monkeypatch, tmp_path):
    """The experiment MINE in an empty folder; `made` has the commands that were started, of which `fails` fail."""
    trial = SimpleNamespace(made=[], fails=[], folder=tmp_path / 'results', readme=tmp_path / 'README.md')
    trial.folder.mkdir()
    (trial.folder / 'runs.jsonl').touch()
    (trial.folder / 'README.md').write_text('before\n<!-- tables -->\nold\n<!-- end -->\nafter\n')
    trial.readme.write_text('from <!--mine:with;R@1 before-->7 to <!--mine:with-->-1.5 ± 2.5. '
                            'Changed by <!--mine:with - without;s--->\n')
    for name, value in dict(ROOT=tmp_path, FOLDER=trial.folder, EXPERIMENTS=[MINE]).items():
        monkeypatch.setattr(results, name, value)

    def start(words, threads):
        if words[0] == 'eval.py':
            return SimpleNamespace(returncode=0, stdout=f'R@1 of {words[2]}\n{{"train R@1": 89.00001}}\n')
        *command, flag, folder = words
        trial.made.append((' '.join(command), flag, threads))
        path = tmp_path / 'runs' / folder.removeprefix('runs/')
        path.mkdir(parents=True, exist_ok=True)
        saved = dict.fromkeys(['script', 'transform', 'embedder', 'model']) | dict(args=dict(precision='bf16'))
        torch.save(saved, path / 'last.pt')
        log = [{'R@1': n + 1 / 3, 'MAP@R': 1.0, 's-': 0.5, 'epoch': n, 'minutes': 1.0, 'loss': None} for n in range(3)]
        (path / 'log.jsonl').write_text('\n'.join(map(json.dumps, log)))
        return SimpleNamespace(returncode=int(' '.join(command) in trial.fails), stdout='it went wrong')
    monkeypatch.setattr(results, 'start', start)
    monkeypatch.setattr(common, 'pick_precision', lambda name, device: name)
    return trial


def test_missing_runs_are_made_once_and_an_interrupted_one_is_resumed(trial, capsys):
    trial.fails = ['train_ms.py --epochs 2 --seed 1']
    with pytest.raises(common.UsageError, match='1 run failed, the first is: train_ms.py --epochs 2 --seed 1'):
        results.main(['mine'])
    assert [command for command, *_ in trial.made] == [
        f'train_ms.py{flags} --epochs 2 --seed {n}' for flags in (' --alpha 3', '') for n in range(3)]
    assert {flag for _, flag, _ in trial.made} == {'--name'} and 'it went wrong' in capsys.readouterr().out
    trial.fails = []
    results.main(['mine', '--jobs', '2'])
    assert trial.made[6:] == [('train_ms.py --epochs 2 --seed 1', '--resume', max(1, common.CORES // 2))]
    runs = [json.loads(line) for line in (trial.folder / 'runs.jsonl').read_text().splitlines()]
    assert not [*(trial.folder.parent / 'runs').iterdir()], 'a run whose line is deleted is made again, not resumed'
    assert len(runs) == 6 and runs[0].pop('train R@1') == 89
    assert runs[0].keys() == {'command', 'commit', 'machine', 'precision', 'torch', 'rows'}
    assert runs[0]['precision'] == 'bf16', 'that of the flags of the run'
    assert runs[0]['rows'][2] == {'R@1': 2.3333, 'MAP@R': 1, 's-': 0.5, 'epoch': 2, 'minutes': 1, 'loss': None}
    page = (trial.folder / 'README.md').read_text()
    assert page.startswith('before\n') and page.endswith('<!-- end -->\nafter\n') and '| without | 3 | 0.3' in page
    assert trial.readme.read_text() == (
        'from <!--mine:with;R@1 before-->0.3 ± 0.0 to <!--mine:with-->2.3 ± 0.0. '
        'Changed by <!--mine:with - without;s--->0.00 ± 0.00\n')


def test_a_single_row_is_made(trial):
    results.main(['mine:without'])
    assert [command for command, *_ in trial.made] == [f'train_ms.py --epochs 2 --seed {n}' for n in range(3)]


# ---- changed losses

def patched(name, pairs, z, y, hyper):
    """Clean loss plus 0.4 times the mixed loss of ms with embedding mixup, with a patch"""
    with mock.patch.multiple(train_metrix, **patches.PATCHES[name]()):
        clean = train_metrix.clean_loss('ms', z, y, epsilon=0.39, **hyper)
        torch.manual_seed(0)
        config = train_metrix.MixupConfig('embed', pairs, None, 2.0)
        return clean + 0.4 * train_metrix.mixed_loss(train_metrix.BaseLoss('ms', hyper), config, None, dict(embed=z), y)


@pytest.mark.parametrize('pairs', ['pos-neg', 'anc-neg'])
@pytest.mark.parametrize('name', ['push', 'softer', 'shared', 'hardest'])
def test_patches_change_the_mixed_loss_as_they_say(name, pairs):
    """Against loops over twelve vectors of five classes, one of which has a single vector"""
    z, y, m, beta, gamma = unit(12, 5), torch.tensor([0, 0, 0, 1, 1, 1, 2, 2, 3, 3, 3, 4]), 0.3, 3.0, 4.0
    torch.manual_seed(0)
    config = train_metrix.MixupConfig('embed', pairs, None, 2.0)
    i, j, lam, label, valid = train_metrix.mixed_pairs(config, z, y, torch.arange(12), 12)
    s, v = z @ z.T, z @ train_metrix.mix_embeddings(z, i, j, lam).T

    def term(scale, similarities, weights):                 # the sum in an exponential loss
        return sum(weight * math.exp(scale * (each - m)) for each, weight in zip(similarities, weights))

    total = 0
    for a in range(12):
        P = [p for p in range(12) if y[p] == y[a] and p != a]
        N = [n for n in range(12) if y[n] != y[a]]
        kept_p = [s[a, p] for p in P if s[a, p] - 0.39 < max(s[a, n] for n in N)]
        kept_n = [s[a, n] for n in N if P and s[a, n] + 0.39 > min(s[a, p] for p in P)]
        pull, push = term(-beta, kept_p, [1] * 99), term(gamma, kept_n, [1] * 99)
        V = [k for k in range(len(i)) if valid[a, k]]
        if name == 'hardest' and pairs == 'pos-neg' and P:
            least = min(P, key=lambda p: s[a, p])
            V = [k for k in V if least in (i[k], j[k])]
        shares = [label[a, k].item() for k in V]
        scales = dict(softer=(2.0, 10.0)).get(name, (beta, gamma))
        mixed = [term(scale, v[a, V].tolist(), weights)
                 for scale, weights in zip((-scales[0], scales[1]), (shares, [1 - share for share in shares]))]
        if name == 'shared':
            total += math.log1p(pull + 0.4 * mixed[0]) / beta + math.log1p(push + 0.4 * mixed[1]) / gamma
        else:
            total += math.log1p(pull) / beta + math.log1p(push) / gamma + 0.4 * math.log1p(mixed[1]) / scales[1]
            total += 0 if name == 'push' else 0.4 * math.log1p(mixed[0]) / scales[0]
    hyper = dict(beta=beta, gamma=gamma, m=m)
    assert patched(name, pairs, z, y, hyper).item() == pytest.approx(total / 12, rel=1e-5)


def test_the_released_loss_of_ms_reads_its_table_at_the_indices_of_images():
    """Against loops over its rows: one for each mined positive pair of an anchor and each of its mined negatives"""
    z, y, lam, m, beta, gamma = unit(10, 4, seed=2), torch.tensor([0, 0, 0, 1, 1, 1, 2, 2, 3, 4]), 0.3, 0.77, 18, 75
    s, B = z @ z.T, 10
    rows, clean, push = [], {}, {}                          # (anchor, positive, negative) of each mixed example
    for a in range(B):
        P = sorted((p for p in range(B) if y[p] == y[a] and p != a), key=lambda p, a=a: s[a, p])
        N = sorted((n for n in range(B) if y[n] != y[a]), key=lambda n, a=a: s[a, n])
        mined = [p for p in P if s[a, p] - 0.39 < s[a, N[-1]]]
        negatives = [n for n in N if P and s[a, n] + 0.39 > s[a, P[0]]]
        rows += [(a, P[0], n) for _ in mined for n in negatives]
        if mined:
            clean[a] = 1 + sum(math.exp(-beta * (s[a, p] - m)) for p in mined)
        if negatives:
            push[a] = math.log((1 - lam) * (1 + sum(math.exp(gamma * (s[a, n] - m)) for n in negatives))) / gamma
    v = [torch.nn.functional.normalize(lam * z[p] + (1 - lam) * z[n], dim=0) for _, p, n in rows]
    total = sum(push.values())
    for a in range(B):
        read = {p for anchor, p, _ in rows if anchor == a}
        mixed = [math.exp(-beta * (z[rows[a][0]] @ v[p] - m)) for p in read]   # of others
        inside = lam * clean.get(a, 0) + (0.4 * (1 + sum(mixed)) if mixed else 0)
        total += math.log(inside) / beta if inside else 0
    assert patches.released_ms_loss(z, y, lam).item() == pytest.approx(total / len(rows), rel=1e-9)


@pytest.mark.parametrize('pairs', ['pos-neg', 'anc-neg'])
def test_the_released_mixed_loss_of_contrastive(pairs):
    """Against loops: the first positive of the batch with all negatives, as often as an anchor has positives; anchors
    without a positive are mixed themselves"""
    f, y = torch.rand(7, 6, 2, 2, generator=torch.Generator().manual_seed(1)), torch.tensor([1, 0, 0, 0, 2, 1, 3])
    model = common.Embedder(trunk=torch.nn.Identity(), dim=5, input_shape=(6, 2, 2))
    z = model.head(f)
    torch.manual_seed(0)
    lam = torch.distributions.Beta(2.0, 2.0).sample()
    torch.manual_seed(0)
    config = train_metrix.MixupConfig('feature', pairs, None, 2.0)
    got = patches.released_contrastive()['mixed_loss'](None, config, model, dict(feature=f, embed=z), y)
    pull, push = [], []
    for a in range(7):
        P = [p for p in range(7) if y[p] == y[a] and p != a]
        if bool(P) == (pairs == 'pos-neg'):
            for n in (n for n in range(7) if y[n] != y[a]):
                v = model.head((lam * f[P[0] if P else a] + (1 - lam) * f[n])[None])[0]
                for _ in P or [a]:
                    pull.append((lam * (z[a] - v).norm()).item())
                    push.append(((1 - lam) * (0.5 - (z[a] - v).norm()).clamp_min(0)).item())
    nonzero = [part for part in push if part > 0]
    expected = sum(pull) / len(pull) + (sum(nonzero) / len(nonzero) if nonzero else 0)
    assert got.item() == pytest.approx(expected, rel=1e-4)


def test_a_patch_replaces_the_mixed_loss_while_the_script_runs(monkeypatch):
    real = train_metrix.mixed_loss
    monkeypatch.setattr(train_metrix, 'main', lambda flags: (flags, train_metrix.mixed_loss is real))
    assert patches.main(['push', '--seed', '3']) == (['--seed', '3'], False) and train_metrix.mixed_loss is real
    for flags in ('push --loss proxynca_pp', 'push --mixup none', 'shared --strength 0.8', 'hardest --pairs anc-neg'):
        with pytest.raises(common.UsageError, match='is for --loss ms|is for pos-neg'):
            patches.main(flags.split())


def test_a_patched_run_is_resumed_with_its_patch_only(folder, small, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    patches.main(f'push --dataset folder --data {folder} --batch-size 8 --epochs 0 --device cpu --name x'.split())
    assert 'with push --resume RUN' in capsys.readouterr().out
    with pytest.raises(common.UsageError, match='runs/x was made by metrix_push.py, not by train_metrix.py'):
        train_metrix.main(['--resume', 'runs/x'])
    patches.main(['push', '--resume', 'runs/x'])
