"""eval.py -- evaluates checkpoints: Recall@K, R-precision and MAP@R, tables over seeds and folds, image grids, search.

The metrics and their rules are explained at common.retrieval_metrics. They are in percent, except s+ and s-, which are
mean cosines. R@1 is what the Reality Check (Musgrave et al., ECCV 2020) calls P@1. The last line that is printed is
one JSON object, for programs.

The test set is that of --dataset and --data, by default that of the dataset that the network was trained on. In a
folder of images it is test/, or query/ with gallery/. Without these folders it is the second half of the classes.
--whole evaluates all images of a folder. If the network was trained on some of the classes, there is a warning, because
the metrics are inflated. --query ranks all images of the folder by their similarity to each photo.

Several checkpoints give a table with a row for each recipe (a script and its flags): the mean over its seeds, and the
95% confidence interval of that mean (Student's t). Networks of one recipe and seed that differ in their --fold count
as one run, and give two rows, as in Section 3.3 of the Reality Check:
    separated       each network separately; the mean over the folds
    concatenated    the concatenated L2-normalized embeddings of all folds
--against compares two recipes seed by seed: the mean difference, and its confidence interval.

--analyse adds, for one checkpoint:
    standard error      of R@1, if the queries are taken as a random sample
    alignment           mean squared distance of two test images of one class; lower is better   (Wang and Isola, 2020)
    uniformity          log of the mean of exp(-2 d^2) over all pairs of test images; lower is better  (Wang and Isola)
    utilization         mean squared distance of a test image to the nearest training image, Metrix Eq. (12);
                        lower is better (Venkataramanan et al., ICLR 2022, Section 4.3)
    train R@1           R@1 of the training images, searched in themselves: if it is far above R@1 of the test images,
                        the network has memorised its classes
    copies              number of test images whose nearest training image has a cosine above 0.9999. They are probable
                        duplicates (train-test leakage), unless the embeddings have collapsed
With a gallery, the test images of these metrics are the queries. Left out are: uniformity of a single query, and
alignment if no two queries have the same class.

Run
    python eval.py --checkpoint runs/ms-shapes-1 --analyse --sheet sheet.png --hardest
    python eval.py --checkpoint runs/ms-folder-1 --query a.jpg b.jpg --top 5
    python eval.py --checkpoint runs/ms-* runs/contrastive-*                     # a table, a row for each recipe
    python eval.py --checkpoint runs/metrix-cub-[123] --against runs/ms-cub-[123]
"""
import argparse
import json
import os
from operator import attrgetter
from pathlib import Path
from statistics import mean, stdev
from types import SimpleNamespace

import numpy as np
import torch
import torch.nn.functional as F
from torchvision.transforms import v2
from torchvision.utils import save_image

import common
from common import UsageError

# ---- metrics


def uniformity(z):
    """log of the mean of exp(-2 d^2) over all pairs of different images.  z (N, D) -> float from -8 to 0"""
    z = F.normalize(z.double(), dim=1)
    # -2 d^2 = -2 (2 - 2 s) = 4 (s - 1). In chunks of rows, so that the (N, N) matrix of s never exists as a whole.
    total = sum((4 * (rows @ z.T - 1)).exp().sum() for rows in z.split(1024))
    # Of these pairs, N are an image with itself, where s = 1, or 0 if an embedding is 0.
    own = (4 * (z.square().sum(dim=1) - 1)).exp().sum()
    return ((total - own) / (len(z) * (len(z) - 1))).log().item()


def nearest(queries, gallery, k=1):
    """Cosines and positions of the k nearest images of each query, as in common.k_nearest, both (Q, k)"""
    _, s, index = (torch.cat(parts) for parts in zip(*common.k_nearest(queries, gallery, k)))
    return s, index


def utilization(queries, examples):
    """Metrix Eq. (12): mean over the queries of the squared distance to the nearest example.

    u(Q, X) = 1/|Q| sum_{q in Q} min_{x in X} || f(q) - f(x) ||^2, where f(q) and f(x) are L2-normalized

    queries (Q, D), examples (X, D), of any norm -> float, from 0 to 4
    """
    s, _ = nearest(queries, examples)                                    # (Q, 1) cosines, Metrix Eq. (12): min over x
    return (2 - 2 * s).clamp(min=0).mean().item()                        # Metrix Eq. (12)


def analyse(z, result, training, images):
    """The metrics of --analyse -> {name: value}

    z (N, D), result          embeddings of the queries, and their metrics
    training (X, D), images   embeddings of the training images, and these Images
    """
    p = result['R@1'] / 100
    s, _ = nearest(z, training)
    metrics = {'standard error': 100 * (p * (1 - p) / len(z)) ** 0.5, 'utilization': utilization(z, training),
               'train R@1': common.retrieval_metrics(training, images.labels)['R@1'],
               'copies': int((s > 0.9999).sum())}
    if len(z) > 1:
        metrics['uniformity'] = uniformity(z)
    if 's+' in result:
        metrics['alignment'] = 2 - 2 * result['s+']        # d^2 = 2 - 2 s, and s+ is the mean s of positive pairs
    return metrics


# ---- image grids and search

WHITE = [1., 1., 1.]
GREEN = [0., 0.63, 0.]
RED = [0.86, 0., 0.]
BORDER = 4                                                  # width of a border, in pixels
ROWS = 8                                                    # queries in a grid, at most


def print_nearest(queries, gallery, rows, s, index):
    """Prints class and path of the queries in `rows` and of their nearest images, where s and index are (Q, k)."""
    for n, query in enumerate(rows):
        print(f'row {n + 1}    {queries.classes[queries.labels[query]]}  {queries.paths[query]}')
        for similarity, i in zip(s[n].tolist(), index[n].tolist()):
            print(f'{similarity:9.3f}  {gallery.classes[gallery.labels[i]]}  {gallery.paths[i]}')


def draw_grid(path, model, queries, gallery, rows, index, hit=None):
    """Writes a PNG: each row is a query and then its nearest images, with a green border if they are of its class, and
    a red one if not.

    queries, gallery  Images;  rows  the Q queries to draw
    index, hit        (Q, k) positions in the gallery, and whether they match; hit None: unknown, so all borders are
                      white
    """
    sizes = model.saved['transform'] | dict(mean=(0, 0, 0), std=(1, 1, 1))
    unnormalized = common.make_test_transform(**sizes)
    tiles = []
    for n, query in enumerate(rows):
        for column, i in enumerate([query, *index[n].tolist()]):
            images = gallery if column else queries
            colour = WHITE
            if column and hit is not None:
                colour = GREEN if hit[n, column - 1] else RED
            image = unnormalized(common.to_rgb(images.items[i], unnormalized.min_side))
            tiles.append(v2.functional.pad(image, BORDER, fill=colour))
    with common.atomic_write(path) as file:
        save_image(tiles, file, format='png', nrow=1 + index.shape[1], pad_value=1)
    print(f'{len(rows)} queries and their nearest images: {path}')


def draw_queries(path, model, data, z, gallery, top, hardest):
    """A grid of ROWS queries: the hardest ones, or evenly spaced ones of the test set."""
    k = min(top, len(data.gallery) - int(gallery is None))               # without the query itself
    s, index = (found.cpu() for found in nearest(z, gallery, k))         # both (N, k)
    hit = data.gallery.labels[index] == data.query.labels[:, None]
    matches = data.num_matches()                                         # (N,)
    rows = matches.nonzero()[:, 0]                          # the queries with a match
    if hardest:     # lowest MAP@R first, R being at most k; of equal ones, the most similar mistake first
        _, map_at_r = common.precisions(hit, matches.clamp(1, k))                                   # (N,)
        mistake = s.masked_fill(hit, -1).amax(dim=1)                                                # (N,)
        rows = rows[mistake[rows].argsort(descending=True, stable=True)]
        rows = rows[map_at_r[rows].argsort(stable=True)][:ROWS]
    else:
        rows = rows[torch.linspace(0, len(rows) - 1, min(ROWS, len(rows))).long()]
    print_nearest(data.query, data.gallery, rows.tolist(), s[rows], index[rows])
    draw_grid(path, model, data.query, data.gallery, rows.tolist(), index[rows], hit[rows])


def answer_queries(args, model, dataset, folder):
    """--query: prints the images nearest to each photo; with --sheet, draws them, too."""
    options = dict(transform=model.transform, workers=args.workers)
    photos = common.Images(args.query, ['photo'] * len(args.query), **options)
    z = common.embed(model, photos)                         # (Q, D), first, so that a wrong name is noticed at once
    images = common.load_dataset(dataset, folder, whole=True, **options).query
    print(f'the gallery is {len(images):,} images of {folder}')
    s, index = nearest(z, common.embed(model, images), min(args.top, len(images)))         # both (Q, k)
    print_nearest(photos, images, range(len(photos)), s, index)
    if args.sheet:
        draw_grid(args.sheet, model, photos, images, range(len(photos)), index)
    return dict(queries=[dict(query=photo, nearest=[
        dict(similarity=round(similarity, 4), label=images.classes[images.labels[i]], path=images.paths[i])
        for similarity, i in zip(*row)]) for photo, *row in zip(photos.paths, s.tolist(), index.tolist())])


def save_embeddings(path, images, z):
    """An NPZ file with embeddings (N, D), labels (N,), the classes' names, and paths (N,)"""
    with common.atomic_write(path) as file:
        np.savez(file, embeddings=F.normalize(z, dim=1).cpu().numpy(), labels=images.labels.numpy(),
                 classes=np.array(images.classes), paths=np.array(images.paths))
    print(f'embeddings: {path}')


# ---- tables


def interval(values):
    """Mean of n values, and the half width of its 95% confidence interval by Student's t; None for n = 1"""
    from scipy.stats import t
    n = len(values)
    return mean(values), (t.ppf(0.975, n - 1) * stdev(values) / n ** 0.5 if n > 1 else None)


def concatenate(parts):
    """L2-normalized embeddings of several networks, concatenated: (N, D) each -> (N, sum of all D)"""
    return F.normalize(torch.cat([F.normalize(part, dim=1) for part in parts], dim=1), dim=1)


def read_runs(paths):
    """The runs of checkpoints: objects with path, script, args, seed, fold ('i/n' or 'none'), classes, epoch, recipe. A
    recipe is a set of (flag, value), with the script and the n of --fold i/n, and without the flags in which the runs
    of one recipe may differ."""
    runs = []
    for path in paths:
        saved = common.read_checkpoint(path)
        args = saved['args']
        fold = args['fold'] or 'none'
        flags = args | dict(script=saved['script'], folds=fold.split('/')[-1])
        # 10 equals 10.0, and the order of the words in a list does not matter.
        recipe = frozenset((flag, ' '.join(sorted(value)) if isinstance(value, list) else value)
                           for flag, value in flags.items() if flag not in common.RUN_FLAGS)
        runs.append(SimpleNamespace(path=path, script=saved['script'], args=args, seed=args['seed'], fold=fold,
                                    classes=saved['classes'], epoch=saved['epoch'], recipe=recipe))
    return runs


def group(runs):
    """{name of a recipe: {seed: {fold: run}}}, with seeds and folds in order. The name is the script with the flags in
    which the recipe differs from the others of this script. Raises UsageError if a mean over the runs is meaningless.
    """
    groups = {}
    for recipe in dict.fromkeys(run.recipe for run in runs):
        own = [run for run in runs if run.recipe == recipe]
        script = own[0].script
        shared = frozenset.intersection(*(run.recipe for run in runs if run.script == script))
        name = ' '.join([script, *(f'{flag}={value}' for flag, value in sorted(recipe - shared))])
        if len({frozenset(run.classes) for run in own}) > 1:
            raise UsageError(f'the networks of {name} were trained on different classes, so they are no seeds of it')
        if len({run.epoch for run in own if run.fold == 'none'}) > 1:
            raise UsageError(f'the runs of {name} stopped at different epochs: continue them with --resume')
        seeds = groups[name] = {}
        for run in sorted(own, key=attrgetter('seed', 'fold')):
            folds = seeds.setdefault(run.seed, {})
            if run.fold in folds:
                raise UsageError(f'{run.path} and {folds[run.fold].path} have the same recipe, seed and fold')
            folds[run.fold] = run
        if len({tuple(folds) for folds in seeds.values()}) > 1:
            raise UsageError(f'the seeds of {name} have different folds: {folds_of(seeds)}')
        folds = next(iter(seeds.values()))                  # {fold: run}, the same folds in each seed
        if 1 < len(folds) < int(min(folds).split('/')[-1]):
            common.warn(f'{name} has only the folds {", ".join(folds)}')
    return groups


def folds_of(seeds):
    """{seed: [folds]} of {seed: {fold: run}}"""
    return {seed: [*folds] for seed, folds in seeds.items()}


def score_seed(args, place, runs):
    """{setting: row of metrics} of the networks of one recipe and seed, which differ in their folds"""
    rows, queries, galleries = [], [], []
    for run in runs:
        model = load_network(args, run.path)
        data = load_test_set(args, model, *place)
        z, gallery = common.embed_test(model, data)
        row = common.score(data, z, gallery)
        print(f'{run.path}: R@1 {row["R@1"]:.2f}, MAP@R {row["MAP@R"]:.2f}', flush=True)
        rows.append(row)
        queries.append(z)
        galleries.append(gallery)
    average = {key: mean(row[key] for row in rows) for key in rows[0]}
    if len(runs) == 1:
        return {'one network': average}
    z = concatenate(queries)
    if galleries[0] is not None:
        gallery = concatenate(galleries)
    return {'separated': average, 'concatenated': common.score(data, z, gallery)}


def differences(ours, theirs):
    """{setting: metrics} of one recipe minus another, for one seed"""
    return {setting: {key: row[key] - theirs[setting][key] for key in row} for setting, row in ours.items()}


def show_table(scores):
    """Prints {recipe: {seed: {setting: row}}} as mean ± half width, a line for each setting, and returns the lines for
    JSON."""
    keys = ('R@1', 'RP', 'MAP@R')
    width = max(map(len, scores))
    print(f'{"":{width}}  {"":12}  seeds' + ''.join(f'{key:>16}' for key in keys))
    lines = []
    for recipe, seeds in scores.items():
        for setting in next(iter(seeds.values())):
            rows = [row[setting] for row in seeds.values()]
            line = dict(recipe=recipe, setting=setting, seeds=list(seeds))
            text = f'{recipe:{width}}  {setting:12}  {len(rows):5}'
            for key in rows[0]:
                middle, half = interval([row[key] for row in rows])
                line[key] = dict(mean=middle, interval=half)
                if key in keys:                             # which are in this order in each row
                    cell = f'{middle:.2f}' if half is None else f'{middle:.2f} ± {half:.2f}'
                    text += f'{cell:>16}'
            print(text)
            lines.append(line)
    return lines


# ---- command line


def get_args(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=common.Help, allow_abbrev=False)
    add = parser.add_argument_group('evaluation').add_argument
    add('--checkpoint', type=Path, required=True, nargs='+', help='files, or run folders: best.pt or else last.pt')
    add('--against', type=Path, nargs='+', default=[], help='checkpoints of another recipe, compared seed by seed')
    add('--dataset', choices=list(common.DATASETS), help='default: the training dataset')
    add('--data', type=os.path.expanduser, help='its folder; default: the training folder')
    add('--whole', action='store_true', help='evaluate all images of the folder, not only its test set')
    add = parser.add_argument_group('one checkpoint').add_argument
    add('--analyse', action='store_true', help='print the additional metrics described above')
    add('--embed', type=Path, metavar='NPZ', help='save embeddings; those of a gallery in NAME-gallery.npz')
    add('--sheet', type=Path, metavar='PNG', help='image grid of some queries and their nearest images')
    add('--hardest', action='store_true', help='with --sheet: the queries with the worst results first')
    add('--query', nargs='+', metavar='PHOTO', help='print the images nearest to each of these; --sheet draws them')
    add('--top', type=int, default=5, help='number of nearest images in grids and for --query')
    common.add_machine_flags(parser)
    args = parser.parse_args(argv)
    if (len(args.checkpoint) > 1 or args.against) and (args.analyse or args.embed or args.sheet or args.query):
        raise UsageError('--analyse, --embed, --sheet and --query are for one checkpoint')
    if args.query and (args.analyse or args.embed or args.hardest):
        raise UsageError('--query finds images and evaluates nothing: leave out --analyse, --embed and --hardest')
    return args


def place_of_test_set(args, trainings):
    """Name and folder of the dataset to evaluate: --dataset and --data, or else as in `trainings`, dicts of flags"""
    names = {flags['dataset'] for flags in trainings}
    places = {(args.dataset or flags['dataset'], args.data or flags['data']) for flags in trainings}
    if len(places) > 1 or args.dataset and {args.dataset} != names and not args.data and args.dataset != 'shapes':
        raise UsageError(f'the networks were trained on {", ".join(sorted(names))}: name the images to evaluate with '
                         '--dataset and --data')
    [(name, folder)] = places
    if 'vectors' in {name, *names} and ({name} != names or args.sheet or args.query):
        raise UsageError('vectors need a network that was trained on vectors, and images one that was trained on '
                         'images; --sheet and --query are for images')
    if name == 'shapes' and (args.data or args.whole or args.query):
        raise UsageError('--data, --whole and --query are for images of your own: add --dataset folder')
    return name, folder


def load_network(args, path):
    """The network of a checkpoint. Warns if its run was interrupted; with --fold, best.pt alone does not say so."""
    model = common.load_checkpoint(path, args.device, args.precision)
    saved = model.saved
    if saved['args']['fold']:                               # best.pt may be from an earlier epoch than the last
        last = path / 'last.pt'
        if not last.exists():
            return model
        saved = common.read_checkpoint(last)
    flags, epoch = saved['args'], saved['epoch']
    finished = epoch >= flags['epochs'] or 0 < flags['steps'] <= saved['step']
    if not (finished or flags['fold'] and common.stops_early(saved['rows'], flags['patience'])):
        common.warn(f'{path} was interrupted after epoch {epoch} of {flags["epochs"]}: continue it with --resume')
    return model


def load_test_set(args, model, name, folder):
    """The Splits to evaluate. Warns of seen classes, and of other test images than those of the run."""
    saved = model.saved
    data = common.load_dataset(name, folder, whole=args.whole, transform=model.transform, workers=args.workers)
    if not data.query:
        raise UsageError(f'{folder} has no test set: --whole evaluates all its images')
    same = not (args.dataset or args.data or args.whole or saved['args']['fold'])
    if same and saved['hashes'][1:] != [common.hash_of(data.query), common.hash_of(data.gallery)]:
        common.warn(f'the test images in {os.path.abspath(folder)} are not those that the run was evaluated on')
    if seen := {*saved['classes']} & {*data.query.present}:
        common.warn(f'{len(seen)} of the {len(data.query.present)} classes to evaluate have names of training classes; '
                    'if they are the same, the metrics are inflated')
    return data


def reject_replacing(outputs, inputs):
    """Raises UsageError if a file that is about to be written is one of the inputs. Both are paths."""
    if replaced := {path.resolve() for path in outputs} & {Path(file).resolve() for file in inputs}:
        raise UsageError(f'the output would replace {min(replaced)}, a file of the run or of the data; name another '
                         'file')


def evaluate_one(args):
    """Evaluates one checkpoint. Returns what the last line prints, a dict."""
    [path] = args.checkpoint
    model = load_network(args, path)
    flags = model.saved['args']
    name, folder = place_of_test_set(args, [flags])
    outputs = [args.sheet] if args.sheet else []
    if args.embed:
        outputs += [args.embed, args.embed.with_stem(f'{args.embed.stem}-gallery')]
    if outputs:
        of_run = [path, path / 'log.jsonl', *path.glob('*.pt')]          # a grid in its folder may be drawn again
        reject_replacing(outputs, [*of_run, *Path(folder).rglob('*'), *(args.query or [])])
    if args.query:
        return answer_queries(args, model, name, folder)
    data = load_test_set(args, model, name, folder)
    z, gallery = common.embed_test(model, data)
    metrics = common.score(data, z, gallery)
    if args.analyse:
        images = common.load_dataset(flags['dataset'], flags['data'], fold=flags['fold'], transform=model.transform,
                                     workers=args.workers).train
        if common.hash_of(images, sizes=False) != model.saved['hashes'][0]:
            common.warn(f'the training images in {flags["data"]}, or their labels, are not those of the run, and so '
                        'utilization, train R@1 and copies may differ')
        metrics |= analyse(z, metrics, common.embed(model, images).to(z.device), images)
    print(f'{name}: {len(data.query):,} queries of {len(data.query.present):,} classes, with '
          f'{"themselves as the gallery" if gallery is None else f"a gallery of {len(gallery):,} images"}')
    for key, value in metrics.items():
        print(f'{key:>17} {value:8}' if isinstance(value, int) else f'{key:>17} {value:8.3f}')
    if 'unmatched' in metrics:
        print('unmatched queries have no match in the gallery: misses in R@K, left out of RP and MAP@R')
    if args.embed:
        save_embeddings(args.embed, data.query, z)
        if gallery is not None:
            save_embeddings(outputs[-1], data.gallery, gallery)
    if args.sheet:
        draw_queries(args.sheet, model, data, z, gallery, args.top, args.hardest)
    return dict(checkpoint=str(path), epoch=model.saved['epoch'], dataset=name, data=folder) | metrics


def evaluate_several(args):
    """The table of several checkpoints; with --against, the differences of two recipes as well. Returns a dict, too."""
    ours, theirs = read_runs(args.checkpoint), read_runs(args.against)
    recipes = group(ours + theirs)
    found = {name: folds_of(seeds) for name, seeds in recipes.items()}
    if args.against and (len(found) != 2 or len({*map(str, found.values())}) > 1):
        raise UsageError(f'--against compares two recipes in the same seeds and folds, and these are {found}')
    place = place_of_test_set(args, [run.args for run in ours + theirs])
    scores = {recipe: {seed: score_seed(args, place, folds.values()) for seed, folds in seeds.items()}
              for recipe, seeds in recipes.items()}         # {recipe: {seed: {setting: row}}}
    if args.against:
        (first, a), (second, b) = scores.items()
        scores[f'{first} - {second}'] = {seed: differences(a[seed], b[seed]) for seed in a}
    print(f'{place[0]}: the mean over the seeds, ± its 95% confidence interval if there are several')
    return dict(dataset=place[0], rows=show_table(scores))


def main(argv=None):
    args = get_args(argv)
    result = evaluate_several(args) if len(args.checkpoint) > 1 or args.against else evaluate_one(args)
    print(json.dumps(result))
    return result


if __name__ == '__main__':
    common.cli(main)
