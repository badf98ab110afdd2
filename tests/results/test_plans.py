"""The list of tables and figures of the papers on plan.md, and estimates of what runs take"""
from pathlib import Path

import plans
import pytest
import results
import spec

import common

# The numbers of tables and figures in each paper, counted in its text
IN_PAPERS = {'Reality Check': (8, 3), 'Proxy-Anchor': (7, 14), 'Metrix': (7, 6), 'CCL': (3, 6), 'HSE': (4, 8)}


@pytest.fixture(scope='module')
def listed():
    return plans.read_list(results.FOLDER / 'plan.md')


@pytest.fixture(scope='module')
def specified():
    return spec.read_tables(results.pages())


def test_the_list_has_each_table_and_figure_of_the_papers_once(listed):
    names = sorted((paper, f'{kind} {n}') for paper, numbers in IN_PAPERS.items()
                   for kind, number in zip(('Table', 'Fig.'), numbers) for n in range(1, number + 1))
    assert sorted((entry.paper, entry.name) for entry in listed) == names


def test_an_entry_is_what_its_mark_says(listed, specified):
    """What is run has its runs or its file, what is planned has commands, what is left out has a reason and none."""
    runs = results.read_runs(results.RUNS)
    for entry in listed:
        wanted = plans.commands(entry, specified)
        if entry.status == 'run':
            files = [text for text in entry.quoted() if '/' in text]
            assert wanted.keys() <= runs.keys() and (wanted or files), entry
            assert all((results.ROOT / file).is_file() for file in files), entry
        elif entry.status == 'planned':
            of_trained_network = entry.how.endswith('`eval.py --checkpoint runs/NAME --sheet sheet.png`')
            assert wanted.keys() - runs.keys() or of_trained_network, entry
        else:
            assert len(entry.how) > 15 and not wanted, entry
        for text in entry.quoted():
            assert text in specified or '.py' in text, f'{entry.paper} {entry.name}: {text} is no table and no command'


def test_planned_commands_are_understood_by_their_scripts(listed, specified):
    """Scripts parse the planned commands. (Commands of tables: see test_results.py.)"""
    for entry in listed:
        for text in entry.quoted():
            if text.startswith('train_'):
                for command in plans.expand(text):
                    assert plans.read_flags(command).dataset in ('cub', 'cars', 'sop')


def test_tables_of_papers_are_in_the_list(listed, specified):
    """Each table with a column of a paper; those that show a script with its recipe are on two pages."""
    named = {text for entry in listed for text in entry.quoted()}
    of_papers = {name for name, table in specified.items() if any(row.paper for row in table.rows.values())}
    assert of_papers - named == {'cub', 'sop', 'inshop'}


def test_braces_stand_for_all_combinations():
    assert plans.expand('a.py --x {1,9} --n {0..2}') == [f'a.py --x {x} --n {n}' for x in (1, 9) for n in range(3)]
    assert plans.expand('a.py') == ['a.py']


def test_an_estimate_by_hand():
    """48 steps of 120 images for 60 epochs, and 61 evaluations of 5,924 images at a third of the cost; 44.4 MB an
    image."""
    cost = plans.estimate('train_proxy_anchor.py --dataset cub')
    assert cost[:3] == (1, 2880, 345600)
    assert cost.hours == pytest.approx((345600 + 61 * 5924 / 3) * 5.86e-3 / 3600)
    assert cost.memory == pytest.approx(120 * 11.1e6 * 4 / 1e9)
    larger = plans.estimate('train_proxy_anchor.py --dataset cub --image-size 448')
    assert larger.hours == pytest.approx(4 * cost.hours) and larger.memory == pytest.approx(4 * cost.memory)
    fold = plans.estimate('train_ms.py --dataset cub --protocol reality-check --fold 0/4')
    assert fold.steps == 1000 * (5864 * 3 // 4 // 32)
    assert plans.estimate('train_ms.py') == plans.Cost(1), 'nothing is known of shapes'
    assert cost + larger == plans.Cost(2, 5760, 691200, pytest.approx(5 * cost.hours), larger.memory)


def test_mixed_images_count():
    """A batch of 20 x 5 images with 3 hard negatives has 1,200 pos-neg and 300 anc-neg mixed images; on SOP a batch has
    12 x 5 hybrids of HSE."""
    def mixed(command):
        return plans.mixed_images(plans.read_flags(command), command)
    assert mixed('train_metrix.py --dataset sop --mixup input') == (750, 1200)
    assert mixed('train_metrix.py --dataset sop --mixup input feature') == (125, 400)
    assert mixed('train_metrix.py --dataset sop --mixup input --pairs pos-pos') == (200, 200)
    assert mixed('train_metrix.py --dataset sop --mixup input --loss proxy_anchor') == (300, 300)
    assert mixed('train_metrix.py --dataset sop --mixup feature') == (0, 0)
    assert mixed('tests/results/results.py --patched imix train_metrix.py --dataset sop --mixup input') == (100, 100)
    assert mixed('train_hse.py --dataset sop') == (60, 60) and mixed('train_hse.py --dataset sop --alpha 0') == (0, 0)


def test_the_list_is_printed_with_a_sum(capsys):
    results.main(['--plan'])
    out = capsys.readouterr().out.splitlines()
    assert len(out) == sum(map(sum, IN_PAPERS.values())) + 2
    assert any(line.startswith('planned   Metrix Table 6           69 runs, ') for line in out)
    assert out[-2].startswith('66 tables and figures: ') and 'runs, ' in out[-1]


def test_a_mistake_in_the_list_is_named_with_its_place(tmp_path):
    page = Path(tmp_path / 'plan.md')
    page.write_text('\n| paper | what | status | how |\n|---|---|---|---|\n'
                    '| Metrix | Table 1, 3 to 4 | planned | `x` |\n'
                    '| Metrix | Fig. 1 | soon | `x` |\n\n')
    with pytest.raises(common.UsageError, match='plan.md, line 5: '):
        plans.read_list(page)
    page.write_text(page.read_text().replace('soon', 'run'))
    assert [entry.name for entry in plans.read_list(page)] == ['Table 1', 'Table 3', 'Table 4', 'Fig. 1']
