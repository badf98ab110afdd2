"""eval.py -- evaluates checkpoints: Recall@K, R-precision and MAP@R, tables over seeds and folds, pictures.

The metrics and their rules are explained at common.retrieval_metrics. They are in percent. R@1 is what the Reality
Check (Musgrave et al., ECCV 2020) calls P@1. The last line that is printed is one JSON object, for programs.

Of a folder, all classes are evaluated except those that the networks were trained or validated on, whose names the
checkpoints hold. If it has train/ and test/ (or val/), only test/ is evaluated; if it has query/ and gallery/, the
images of query/ are searched in gallery/.

Several checkpoints give a table with a row for each recipe: the mean over its seeds, and the 95 % confidence interval
of that mean (Student's t). Networks of one recipe and seed that differ in their --fold count as one run, and give
two rows, as in Section 3.3 of the Reality Check:
    separated       each network for itself; the mean over the folds
    concatenated    the embeddings of an image by all folds, each of unit length, one behind the other
--against compares two recipes seed by seed: the mean difference, and its interval.

--analyse adds, for one checkpoint:
    standard error      of R@1, if the queries are taken as a random sample
    alignment           mean squared distance of two test images of one class; lower is better   (Wang and Isola, 2020)
    uniformity          log of the mean of exp(-2 d^2) over all pairs of test images; lower is better        (the same)
    utilization         mean squared distance of a test image to the nearest training image, Metrix Eq. (12);
                        lower is better (Venkataramanan et al., ICLR 2022, Section 4.3)
    NMI                 how well the clusters of k-means, as many as there are classes, agree with the classes. With
                        many classes it is high for any network: 80.8 for a random ResNet-50 on SOP (Reality Check,
                        Table 2)
    threshold           two images are called the same class if their similarity is at least this. It is the value
                        with the highest balanced accuracy on the test images, so that accuracy is optimistic.
    balanced accuracy   the mean of two shares: of the positive pairs at or above the threshold, and of the negative
                        pairs below it
Alignment needs two queries of one class, and the threshold a match; without them they are left out.

Run
    python eval.py --checkpoint runs/ms-shapes-1 --analyse --sheet sheet.png --hardest
    python eval.py --checkpoint runs/ms-folder-1 --query photo.jpg --top 5       # its nearest images
    python eval.py --checkpoint runs/ms-folder-1 --data photos --embed out.npz
    python eval.py --checkpoint runs/ms-* runs/contrastive-*                     # a table, a row for each recipe
    python eval.py --checkpoint runs/metrix-cub-[123] --against runs/ms-cub-[123]
"""
import argparse
import json
import sys
from functools import cache, partial
from glob import glob
from pathlib import Path
from statistics import mean, stdev

import numpy as np
import torch
import torch.nn.functional as F

import common

# ---- measures


def alignment(z, y):
    """Mean squared distance of all positive pairs.  z (N, D), y (N,) -> float from 0 to 4"""
    return 2 - 2 * common.mean_similarities(z, y)[0]


def uniformity(z, t=2.0):
    """log of the mean of exp(-t d^2) over all pairs of different images.  z (N, D) -> float from -4 t to 0

    Rows of z are taken in chunks, so that the (N, N) matrix never exists as a whole.
    """
    z = F.normalize(z.double(), dim=1)
    total = sum((2 * t * (rows @ z.T - 1)).exp().sum() for rows in z.split(1024))      # d^2 = 2 - 2 s
    # Of these pairs, N are an image with itself: d = 0, which adds exp(0) = 1 for each.
    return ((total - len(z)) / (len(z) * (len(z) - 1))).log().item()


def utilization(queries, examples):
    """Metrix Eq. (12): mean over the queries of the squared distance to the nearest example.

    u(Q, X) = 1/|Q| sum_{q in Q} min_{x in X} || f(q) - f(x) ||^2.  queries (Q, D), examples (X, D) -> float, 0 to 4
    Here X are the clean training images; train_metrix.py --analyse adds mixed ones.
    """
    s, _ = retrieve(queries, examples, 1)                                # (Q, 1) cosines
    return (2 - 2 * s).clamp(min=0).mean().item()                        # Metrix Eq. (12)


def normalized_mutual_information(a, b):
    """2 I(a; b) / (H(a) + H(b)), in percent, of two assignments of N images to groups.  a, b (N,) integers from 0"""
    joint = torch.bincount(a * (int(b.max()) + 1) + b, minlength=(int(a.max()) + 1) * (int(b.max()) + 1))
    joint = joint.view(int(a.max()) + 1, -1).double() / len(a)
    h_a, h_b, h = (torch.special.entr(p).sum().item() for p in (joint.sum(dim=1), joint.sum(dim=0), joint))
    return 100 * 2 * (h_a + h_b - h) / (h_a + h_b) if h_a + h_b else 100.0


def clusters(z, k):
    """The cluster of each image by the k-means of faiss, with a fixed seed.  z (N, D) -> (N,)"""
    if sys.platform == 'darwin':
        raise ImportError                                   # common.searcher says why
    import faiss
    z = F.normalize(z.float().cpu(), dim=1).numpy()
    kmeans = faiss.Kmeans(z.shape[1], k, niter=20, seed=1, min_points_per_centroid=1, max_points_per_centroid=len(z))
    kmeans.train(z)
    return torch.from_numpy(kmeans.index.search(z, 1)[1][:, 0])


def best_threshold(z, y, gallery=None, gallery_labels=None, steps=2000):
    """The similarity that best tells same from different: z (N, D), y (N,) -> threshold, accuracy

    The pairs are those of queries, or with a gallery (G, D) of a query and an image of it. A pair is called the same
    if its similarity is at least the threshold, one of `steps` values from -1 to 1. The accuracy, in percent, is
    balanced: the mean of those on positive and on negative pairs.
    """
    within = gallery is None
    z = F.normalize(z.float(), dim=1)
    gallery, labels = (z, y) if within else (F.normalize(gallery.float(), dim=1), gallery_labels.to(y.device))
    counts = torch.zeros(2 * steps, dtype=torch.long, device=z.device)   # of negative pairs, then of positive ones
    for rows in torch.arange(len(z), device=z.device).split(max(1, 2 ** 24 // len(gallery))):
        level = ((z[rows] @ gallery.T + 1) * steps / 2).long().clamp(0, steps - 1)      # (b, G)
        level += steps * (y[rows, None] == labels)
        if within:                                                       # no image with itself
            level = level[rows[:, None] != torch.arange(len(z), device=z.device)]
        counts += torch.bincount(level.flatten(), minlength=2 * steps)
    counts = counts.double().view(2, steps)
    # Of the negative and of the positive pairs, the shares below each threshold
    negative, positive = (counts.cumsum(dim=1) - counts) / counts.sum(dim=1, keepdim=True).clamp_min(1)
    accuracy = (negative + 1 - positive) / 2
    return 2 * int(accuracy.argmax()) / steps - 1, 100 * accuracy.max().item()


def analyse(z, training, data, result, gallery=None):
    """The measures of --analyse -> {name: number}

    z (N, D), training (X, D)  embeddings of data.query and of the training set;  result  the row with R@1
    gallery (G, D)             of data.gallery; None where queries are searched in themselves
    """
    y, p = data.query.labels.to(z.device), result['R@1'] / 100
    measures = {'standard error': 100 * (p * (1 - p) / len(y)) ** 0.5, 'uniformity': uniformity(z),
                'utilization': utilization(z, training)}
    if 's+' in result:
        measures['alignment'] = alignment(z, y)
    if result.get('unmatched', 0) < len(y):
        labels = None if gallery is None else data.gallery.labels
        measures['threshold'], measures['balanced accuracy'] = best_threshold(z, y, gallery, labels)
    try:
        measures['NMI'] = normalized_mutual_information(clusters(z, len(y.unique())), y.cpu())
    except ImportError:
        print('NMI is left out: its k-means needs faiss (pip install faiss-cpu), and does not run on a Mac')
    return measures


# ---- pictures

GREEN, RED, PLAIN = (0, 160, 0), (220, 0, 0), (255, 255, 255)
ROWS, BORDER = 8, 4                                         # queries on a sheet; width of a border, in pixels


def tile(images, i, colour):
    """The centre crop of an image, with a border: (3, S + 2 BORDER, S + 2 BORDER) uint8"""
    side = images.image_size + 2 * BORDER
    picture = torch.tensor(colour, dtype=torch.uint8).repeat(side, side, 1)
    images.crop(i, None, picture[BORDER:-BORDER, BORDER:-BORDER])
    return picture.permute(2, 0, 1)


def draw_sheet(path, queries, gallery, rows, index, hit=None):
    """A PNG with a query in each row, and then its nearest images: green border if of its class, red if not.

    queries, gallery  Images;  rows  the Q queries to draw
    index, hit        (Q, k) positions in the gallery, and whether they match; hit None: not known, no colours
    """
    tiles = []
    for row, query in enumerate(rows):
        tiles.append(tile(queries, query, PLAIN))
        tiles += [tile(gallery, i, PLAIN if hit is None else GREEN if hit[row, n] else RED)
                  for n, i in enumerate(index[row].tolist())]
    common.save_pictures(path, torch.stack(tiles) / 255, columns=index.shape[1] + 1)


def retrieve(z, gallery, k):
    """Similarities and positions of the k nearest of each query, (N, k); without a gallery the query is left out."""
    within = gallery is None
    z = F.normalize(z.float(), dim=1)
    gallery = z if within else F.normalize(gallery.float(), dim=1)
    itself = torch.arange(len(z), device=z.device) if within else None
    _, s, index = zip(*common.nearest(z, gallery, min(k, len(gallery) - within), itself))
    return torch.cat(s).cpu(), torch.cat(index).cpu()


def hardest_first(s, hit):
    """Order of the queries: those with the fewest matches first; of equal ones, the most similar mistake first.

    s, hit  (N, k) similarities of the nearest images, and whether they match
    """
    mistake = s.masked_fill(hit, -1).amax(dim=1)                         # (N,)
    # A quarter of a similarity is between -1/4 and 1/4, so it orders only queries with the same number of matches.
    return (hit.sum(dim=1) - mistake / 4).argsort(stable=True)


def sheet(path, data, z, gallery, top, hardest):
    """Draws ROWS queries: the hardest ones, or some at equal distances in the order of the classes."""
    s, index = retrieve(z, gallery, top)
    hit = data.gallery.labels[index] == data.query.labels[:, None]
    # A query without any match in the gallery is no failure of the network.
    within = int(gallery is None)
    matched = torch.bincount(data.gallery.labels, minlength=data.query.num_classes)[data.query.labels] > within
    order = hardest_first(s, hit) if hardest else torch.arange(len(s))
    order = order[matched[order]] if matched.any() else order
    if not hardest:
        order = order[torch.linspace(0, len(order) - 1, min(ROWS, len(order))).long()]
    rows = order[:ROWS].tolist()
    draw_sheet(path, data.query, data.gallery, rows, index[rows], hit[rows])
    print(f'{len(rows)} queries and their nearest images: {path}')


def search(args, model, images, path):
    """The images that are nearest to a photo. The photo itself, where it is one of them, is left out."""
    photo = common.read_image(args.query, model.args['resize'])
    here, places = args.query.resolve(), [Path(name).resolve() for name in images.paths]
    if path.resolve() in [here, *places]:
        raise common.UsageError(f'the drawing would replace the photo {path}; name another file with --sheet')
    query = common.Images(photo.reshape(-1), [photo.shape[:2]], torch.zeros(1), images.image_size)
    images = images.subset(torch.tensor([i for i, place in enumerate(places) if place != here]))
    s, index = retrieve(*(common.embed(model, part) for part in (query, images)), args.top)
    found = [dict(similarity=round(value, 4), label=images.classes[images.labels[i]], path=str(images.paths[i]))
             for value, i in zip(s[0].tolist(), index[0].tolist())]
    for row in found:
        print(f'{row["similarity"]:8.3f}  {row["label"]}  {row["path"]}')
    draw_sheet(path, query, images, [0], index)
    print(f'{args.query} and the images nearest to it: {path}')
    return dict(query=str(args.query), nearest=found)


def curves(args):
    """Draws R@1 and MAP@R of each run over its epochs, with matplotlib; with --fold those on the validation classes."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise common.UsageError('--curves needs matplotlib: pip install matplotlib') from None
    figure = Figure(figsize=(10, 4), layout='constrained')
    panels = dict(zip(('R@1', 'MAP@R'), figure.subplots(1, 2)))
    for path in args.checkpoint:
        saved = common.read_checkpoint(path)
        rows, part = saved.get('rows', []), 'validation' if saved['args'].get('fold') else 'test'
        name = (path if path.is_dir() else path.resolve().parent).name
        with common.distrusting(path):
            for key, axes in panels.items():
                axes.plot([row['epoch'] for row in rows], [row[key] for row in rows], '.-', label=f'{name} ({part})')
    for key, axes in panels.items():
        axes.set(xlabel='epoch', ylabel=f'{key}, %')
    axes.legend()
    with common.written_whole(args.curves) as file:
        figure.savefig(file, format='png')
    return dict(checkpoint=[str(path) for path in args.checkpoint], curves=str(args.curves))


# ---- tables

# Arguments in which the runs of a recipe may differ
NO_RECIPE = {'seed', 'fold', 'data', 'precision', 'eval_every', 'chunk', 'compile'}


def interval(values):
    """Mean of n numbers, and the half width of its 95 % confidence interval by Student's t; None for n = 1"""
    if len(values) < 2:
        return mean(values), None
    try:
        from scipy.stats import t
    except ImportError:
        raise common.UsageError('confidence intervals need scipy: pip install scipy') from None
    return mean(values), t.ppf(0.975, len(values) - 1) * stdev(values) / len(values) ** 0.5


def concatenate(parts):
    """Embeddings of the same images by several networks, one behind the other: (N, D) each -> (N, sum of all D)

    Each is scaled to unit length before, and the whole afterwards, as in Section 3.3 of the Reality Check.
    """
    return F.normalize(torch.cat([F.normalize(part.float(), dim=1) for part in parts], dim=1), dim=1)


def runs_of(paths):
    """{name of a recipe: {seed: {fold: checkpoint}}}, where fold is None or 'i/n'; the classes seen by any network; and
    the flags of each network, dicts.

    A recipe is the script with all flags but the seed and what does not change the method. Its name is the script's,
    with those flags in which it differs from other recipes of this script.
    """
    groups, seen, trained = {}, set(), []
    for path in paths:
        saved = common.read_checkpoint(common.best_of(path))
        flags, seen = saved['args'], seen | set(saved.get('classes', []))
        trained.append(flags)
        # The same classes, or runs on different folders would count as seeds of one recipe
        recipe = json.dumps([{name: flags[name] for name in sorted(flags.keys() - NO_RECIPE)},
                             sorted(saved.get('classes', []))])
        folds = groups.setdefault((saved['script'], recipe), {}).setdefault(flags.get('seed'), {})
        if flags.get('fold') in folds:
            raise common.UsageError(f'{path} and {folds[flags.get("fold")]} have the same recipe, seed and fold')
        folds[flags.get('fold')] = path
    named = {}
    for script, recipe in groups:
        flags = json.loads(recipe)[0]
        others = [json.loads(other)[0] for name, other in groups if name == script]
        differs = [f' {name}={flags[name]}' for name in flags if any(o.get(name) != flags[name] for o in others)]
        name = script.removeprefix('train_') + ''.join(differs)
        if name in named:
            raise common.UsageError(f'the networks of {name} were trained on different classes, so they are no seeds '
                                    'of one recipe')
        named[name] = groups[script, recipe]
    for name, seeds in named.items():
        counts = {str(fold).split('/')[-1] for folds in seeds.values() for fold in folds}       # n of i/n, or None
        if len(counts) > 1:
            raise common.UsageError(f'{name}: runs with --fold and without, or of different numbers of folds, cannot '
                                    'be one row')
        if len({frozenset(folds) for folds in seeds.values()}) > 1:
            raise common.UsageError(f'{name}: its seeds have different folds: ' + '; '.join(
                f'seed {seed}: {", ".join(sorted(map(str, folds)))}' for seed, folds in sorted(seeds.items())))
    return named, seen, trained


def score_runs(args, seeds, load):
    """{setting: {seed: row}} of one recipe; seeds {seed: {fold: checkpoint}} as in runs_of"""
    table = {}
    for seed, folds in sorted(seeds.items()):
        rows, queries, galleries = [], [], []
        for _, path in sorted(folds.items()):
            model = common.load_checkpoint(path, args.device, args.precision)
            data = load(model.args['resize'], model.args['image_size'])
            z, gallery = common.embed_test(model, data)
            rows.append(common.score(data, z, gallery))
            queries.append(z)
            galleries.append(gallery)
            print(f'{path}: R@1 {rows[-1]["R@1"]:.2f}, MAP@R {rows[-1]["MAP@R"]:.2f}', flush=True)
        each = f'separated ({z.shape[1]}-dim)' if len(folds) > 1 else f'one network ({z.shape[1]}-dim)'
        table.setdefault(each, {})[seed] = {key: mean(row[key] for row in rows) for key in rows[0]}
        if len(folds) > 1:
            z, gallery = concatenate(queries), None if gallery is None else concatenate(galleries)
            table.setdefault(f'concatenated ({z.shape[1]}-dim)', {})[seed] = common.score(data, z, gallery)
    return table


def show_table(rows):
    """Prints rows [recipe, setting, {seed: row}] as mean ± half width, and returns them for the JSON line."""
    keys, width, shown = ('R@1', 'RP', 'MAP@R'), max(len(name) for name, *_ in rows), []
    print(f'{"":{width + 26}}' + ''.join(f'{key:>16}' for key in keys))
    for name, setting, seeds in rows:
        values = {key: interval([row[key] for row in seeds.values()]) for key in next(iter(seeds.values()))}
        cells = [f'{middle:.2f}' + ('' if half is None else f' ± {half:.2f}') for middle, half in map(values.get, keys)]
        print(f'{name:{width}}  {setting:24}' + ''.join(f'{cell:>16}' for cell in cells))
        shown.append(dict(recipe=name, setting=setting, seeds=list(seeds)) |
                     {key: dict(mean=middle, interval=half) for key, (middle, half) in values.items()})
    return shown


def pair(named):
    """Refuses two groups of runs that cannot be compared seed by seed."""
    if len(named) != 2:
        raise common.UsageError(f'--against compares two recipes, and these are {len(named)}: {"; ".join(named)}')
    (first, a), (second, b) = named.items()
    if {seed: set(folds) for seed, folds in a.items()} != {seed: set(folds) for seed, folds in b.items()}:
        there = [', '.join(f'seed {seed} fold {fold}' for seed, folds in sorted(runs.items()) for fold in folds)
                 for runs in (a, b)]
        raise common.UsageError(f'--against compares runs of the same seeds and folds; of {first} there are '
                                f'{there[0]}; of {second} {there[1]}')


def compare(args):
    """The table of several checkpoints; with --against, the differences of two recipes as well."""
    interval([0, 1])                                        # if scipy is missing, that shows here and not at the end
    named, seen, trained = runs_of([*args.checkpoint, *args.against])
    if args.against:
        pair(named)
    datasets = sorted({flags.get('dataset', 'nothing') for flags in trained})
    if len(datasets) > 1 and not args.dataset:
        raise common.UsageError(f'these networks were trained on {" and ".join(datasets)}: say with --dataset, and '
                                '--data, where to evaluate them')
    dataset, load = loader(args, trained[0], seen)
    tables = {name: score_runs(args, seeds, load) for name, seeds in named.items()}
    rows = [(name, setting, seeds) for name, table in tables.items() for setting, seeds in table.items()]
    if args.against:
        (first, a), (second, b) = tables.items()            # settings in the same order; their dimensions may differ
        rows += [(f'{first} - {second}', setting.split(' (')[0], {seed: {key: ours[seed][key] - theirs[seed][key]
                  for key in theirs[seed]} for seed in ours}) for (setting, ours), theirs in zip(a.items(), b.values())]
    counts = sorted({len(seeds) for seeds in named.values()})
    print(f'{dataset}: the mean over {" or ".join(map(str, counts))} seeds, ± its 95 % confidence interval'
          if counts != [1] else f'{dataset}: one seed of each recipe, so there is no interval')
    return dict(checkpoint=list(map(str, args.checkpoint)), against=list(map(str, args.against)), dataset=dataset,
                rows=show_table(rows))


# ---- command line


def get_args(argv=None):
    parser = common.Parser(prog='eval.py', description=__doc__, allow_abbrev=False,
                           formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add('--checkpoint', type=Path, required=True, nargs='+', help='files, or run folders: best.pt or else last.pt')
    add('--against', type=Path, nargs='+', default=[], help='checkpoints of another recipe, compared seed by seed')
    add('--dataset', choices=list(common.DATASETS), help='if not given, that of the training')
    add('--data', help='its folder; if not given, that of the training')
    add('--cache', type=Path, default=Path('cache'), help='folder for decoded images')
    add('--analyse', action='store_true', help='the further measures above')
    archive = partial(common.new_file, suffix='.npz', start=b'PK', kind='an archive of numpy')
    add('--embed', type=archive, metavar='NPZ', help='save embeddings, labels, classes and paths')
    add('--sheet', type=common.new_picture, metavar='PNG', help='draw some queries and their nearest images')
    add('--hardest', action='store_true', help='sheet: the queries with the worst results first')
    add('--query', type=Path, metavar='PHOTO', help='print and draw the images nearest to this one')
    add('--top', type=common.at_least(1), default=5, help='sheet and query: how many nearest images')
    add('--curves', type=common.new_picture, metavar='PNG', help='draw the rows of the runs over the epochs, and stop')
    add('--device', default='auto', help='auto, cpu, cuda, cuda:1, mps')
    add('--precision', choices=['auto', 'bf16', 'fp32'], default='auto', help='of the trunk')
    args = parser.parse_args(argv)
    args.changed = {name for name, value in vars(args).items() if value != parser.get_default(name)}
    if args.curves:
        common.refuse(args, sorted(args.changed - {'checkpoint', 'curves'}), '--curves')
    if len(args.checkpoint) > 1 or args.against:
        common.refuse(args, ['analyse', 'embed', 'sheet', 'hardest', 'query', 'top'], 'several checkpoints')
    if args.query:
        common.refuse(args, ['analyse', 'embed', 'hardest'], '--query')
    if not args.sheet:
        common.refuse(args, ['hardest'], 'no sheet: take --sheet')
    if not (args.sheet or args.query):
        common.refuse(args, ['top'], 'nothing to draw: take --sheet or --query')
    args.checkpoint, args.against = ([found for path in paths for found in matching(path)]
                                     for paths in (args.checkpoint, args.against))
    return args


def matching(path):
    """The paths that a pattern like runs/ms-* stands for. Most shells resolve it before, but those of Windows do not.

    A path that exists is no pattern, and a pattern that nothing matches stays as it is.
    """
    return [path] if path.exists() else [Path(found) for found in sorted(glob(str(path)))] or [path]


def loader(args, trained, seen):
    """The name of the dataset to evaluate, and a function load(resize, image_size) that opens it"""
    if not {'dataset', 'data', 'resize', 'image_size'} <= trained.keys():
        raise common.UsageError('the checkpoint is not one of a run: it does not hold what the network was trained on')
    dataset = args.dataset or trained['dataset']
    if dataset not in ('shapes', trained['dataset']) and not args.data:
        raise common.UsageError(f'--dataset {dataset} is not what the network was trained on: say where it is, --data')
    if dataset == 'shapes':
        common.refuse(args, ['data'], '--dataset shapes, which is drawn; for images of your own add --dataset folder')

    @cache
    def load(resize, image_size):
        return common.load_dataset(dataset, args.data or trained['data'], resize, image_size, args.cache, seen)
    return dataset, load


def load_training(args, model):
    """The images that the network was trained on: where they were then, or in --data if that is not there any more"""
    trained = model.args
    where = trained['data'] if Path(trained['data']).expanduser().is_dir() else args.data or trained['data']
    training = common.load_dataset(trained['dataset'], where, trained['resize'], trained['image_size'], args.cache,
                                   fold=trained.get('fold')).train
    if new := set(training.classes) - set(model.classes):
        raise common.UsageError(f'--analyse needs the training images, and {where} has other ones: {len(new)} classes '
                                f'of its training set are new to the network, among them {min(new)}')
    return training


def save_embeddings(path, data, z, gallery):
    """An NPZ file with embeddings (N, D), labels (N,), paths (N,) and the classes' names; of a gallery as well"""
    arrays, count = dict(classes=np.array(data.query.classes)), 0
    for prefix, images, embeddings in (('', data.query, z), ('gallery_', data.gallery, gallery)):
        if embeddings is not None:
            arrays |= {f'{prefix}embeddings': F.normalize(embeddings, dim=1).cpu().numpy(),
                       f'{prefix}labels': images.labels.numpy(), f'{prefix}paths': images.paths}
            count += len(images)
    with common.written_whole(path) as file:
        np.savez(file, **arrays)
    print(f'embeddings of {count:,} images: {path}')


def main(argv=None):
    args = get_args(argv)
    if args.curves:
        result = curves(args)
    elif len(args.checkpoint) > 1 or args.against:
        result = compare(args)
    else:
        result = evaluate(args, args.checkpoint[0])
    print(json.dumps(result))
    return result


def evaluate(args, path):
    """One checkpoint: its metrics, and whatever the flags ask for"""
    model = common.load_checkpoint(path, args.device, args.precision)
    trained = model.args
    # What a photo is searched in need not be new to the network.
    dataset, load = loader(args, trained, () if args.query else model.classes)
    data = load(trained['resize'], trained['image_size'])
    if args.query:
        return search(args, model, data.gallery, args.sheet or (path if path.is_dir() else path.parent) / 'query.png')
    training = load_training(args, model) if args.analyse else None
    z, gallery = common.embed_test(model, data)
    result = common.score(data, z, gallery)
    if args.analyse:
        result |= analyse(z, common.embed(model, training).to(z.device), data, result, gallery)
    print(f'{dataset}: {len(data.query):,} queries of {len(data.query.labels.unique()):,} classes, searched in '
          f'{"themselves" if gallery is None else f"a gallery of {len(gallery):,} images"}')
    for name, value in result.items():
        print(f'{name:>17} {value:8}' if isinstance(value, int) else f'{name:>17} {value:8.3f}')
    if 'unmatched' in result:
        print('unmatched queries have no match in the gallery: misses in R@K, left out of RP and MAP@R')
    if args.embed:
        save_embeddings(args.embed, data, z, gallery)
    if args.sheet:
        sheet(args.sheet, data, z, gallery, args.top, args.hardest)
    return dict(checkpoint=str(path), dataset=dataset) | result


if __name__ == '__main__':
    common.cli(main)
