"""eval.py -- evaluates checkpoints: Recall@K, R-precision and MAP@R, tables over seeds and folds, image grids, search.

The metrics and their rules are explained at common.retrieval_metrics. They are in percent, except s+ and s-, which are
mean cosines. R@1 is what the Reality Check (Musgrave et al., ECCV 2020) calls P@1. The last line that is printed is
one JSON object, for programs.

The test set is that of --dataset and --data, by default that of the dataset that the network was trained on. In a
folder of images it is test/, or query/ with gallery/. Without these folders it is the second half of the classes.
--whole evaluates all images of a folder. If the network was trained on some of the classes, there is a warning, because
the metrics are inflated.

--embed saves embeddings. --query ranks all images of --data by their similarity to a photo. --data is a folder, or a
file that --embed wrote with the same network, so that only the photo has to be embedded:
    python eval.py --checkpoint runs/ms-folder-1 --data photos --whole --embed photos.npz
    python eval.py --checkpoint runs/ms-folder-1 --data photos.npz --query a.jpg b.jpg --top 5

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
    train R@1           R@1 of the training images, searched in themselves: far above R@1 of the test images, the
                        network has memorised its classes
    threshold           two images are called the same class if their similarity is at least this
    balanced accuracy   the mean of two fractions: of the positive pairs at or above the threshold, and of the negative
                        pairs below it. The threshold is the one with the highest balanced accuracy on the test images.
                        As it is chosen on them, the accuracy is optimistic.
    copies              number of test images whose nearest training image has a cosine above 0.9999. They are probable
                        duplicates (train-test leakage), unless the embeddings have collapsed
With a gallery, the test images of these metrics are the queries, but the pairs of the threshold are a query and an
image of the gallery. Left out are: uniformity of a single query, and alignment if no two queries have the same class.

Run
    python eval.py --checkpoint runs/ms-shapes-1 --analyse --sheet sheet.png --hardest
    python eval.py --checkpoint runs/ms-* runs/contrastive-*                     # a table, a row for each recipe
    python eval.py --checkpoint runs/metrix-cub-[123] --against runs/ms-cub-[123]
"""
import hashlib
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


def best_threshold(z, y, gallery=None, gallery_labels=None, steps=2000):
    """The similarity that best tells same from different: z (N, D), y (N,) -> threshold, accuracy

    A pair is two queries, or with a gallery (G, D) a query and an image of the gallery. It is called the same if its
    similarity is at least the threshold, one of `steps` values from -1 to just below 1. The accuracy, in percent, is
    balanced: the mean of the accuracy on positive pairs and of that on negative pairs.
    """
    others, labels = (z, y) if gallery is None else (gallery, gallery_labels.to(y.device))
    z, others = (F.normalize(t, dim=1) for t in (z, others))
    b = max(1, 2 ** 24 // len(others))                                   # queries at a time

    def count(s, positive):
        """(2 steps,) how many pairs have each similarity: first the negative pairs, then the positive ones"""
        level = ((s + 1) * steps / 2).long().clamp(0, steps - 1)
        return torch.bincount((level + steps * positive).flatten(), minlength=2 * steps)

    counts = sum(count(part @ others.T, part_labels[:, None] == labels)  # (b, G) at a time
                 for part, part_labels in zip(z.split(b), y.split(b)))
    if gallery is None:
        counts -= count(z.square().sum(dim=1), True)                     # each image with itself
    counts = counts.view(2, steps).double()
    # The fractions of negative and of positive pairs that are below each threshold, both (steps,)
    negative, positive = (counts.cumsum(dim=1) - counts) / counts.sum(dim=1, keepdim=True).clamp_min(1)
    accuracy = (negative + 1 - positive) / 2
    return 2 * int(accuracy.argmax()) / steps - 1, 100 * accuracy.max().item()


def analyse(z, training, data, result, gallery=None):
    """The metrics of --analyse -> {name: value}

    z (N, D), training (X, D)  embeddings of data.query and of the training set;  result  the metrics with R@1
    gallery (G, D)             embeddings of data.gallery; None if the queries are also the gallery
    """
    y = data.query.labels.to(z.device)
    p = result['R@1'] / 100
    metrics = {'standard error': 100 * (p * (1 - p) / len(y)) ** 0.5, 'utilization': utilization(z, training)}
    if len(y) > 1:
        metrics['uniformity'] = uniformity(z)
    if 's+' in result:
        metrics['alignment'] = 2 - 2 * result['s+']        # d^2 = 2 - 2 s, and s+ is the mean s of positive pairs
    metrics['threshold'], metrics['balanced accuracy'] = best_threshold(z, y, gallery, data.gallery.labels)
    return metrics


def count_copies(z, training, paths, training_paths):
    """How many test images, z (N, D), have a cosine above 0.9999 with one of training (X, D). Prints the first pair."""
    s, index = nearest(z, training)
    copies = (s > 0.9999).nonzero()[:, 0].tolist()
    if copies:
        print(f'copies: {len(copies)} test images have a cosine above 0.9999 with a training image, the first is '
              f'{paths[copies[0]]} with {training_paths[index[copies[0]]]}; these are duplicates, or if uniformity is '
              'near 0, the embeddings have collapsed')
    return len(copies)


# ---- image grids and search

WHITE = [1., 1., 1.]
GREEN = [0., 0.63, 0.]
RED = [0.86, 0., 0.]
BORDER = 4                                                  # width of a border, in pixels
ROWS = 8                                                    # queries in a grid, at most


def reject_replacing(outputs, inputs):
    """Raises UsageError if a file that is about to be written is one of the inputs. Both are paths."""
    inputs = {Path(file).resolve() for file in inputs}
    for path in outputs:
        if path.resolve() in inputs:
            raise UsageError(f'the output would replace {path}, an input; name another file')


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
    unnormalized = common.make_test_transform(model.args['resize'], model.args['image_size'], (0, 0, 0), (1, 1, 1))
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
    """A grid of ROWS queries: the hardest ones, or evenly spaced ones in the order of the classes."""
    k = min(top, len(data.gallery) - int(gallery is None))               # without the query itself
    if k < 1:
        raise UsageError('an image grid needs at least one image besides the query')
    s, index = (found.cpu() for found in nearest(z, gallery, k))         # both (N, k)
    hit = data.gallery.labels[index] == data.query.labels[:, None]
    matches = common.num_matches(data)                                   # (N,)
    rows = matches.nonzero()[:, 0]                          # the queries with a match,
    if not len(rows):                                       # or all queries if none has one
        rows = torch.arange(len(s))
    if hardest:     # lowest MAP@R first, R being at most k; of equal ones, the most similar mistake first
        _, map_at_r = common.precisions(hit, matches.clamp(1, k))                                   # (N,)
        mistake = s.masked_fill(hit, -1).amax(dim=1)                                                # (N,)
        rows = rows[mistake[rows].argsort(descending=True, stable=True)]
        rows = rows[map_at_r[rows].argsort(stable=True)][:ROWS]
    else:
        rows = rows[torch.linspace(0, len(rows) - 1, min(ROWS, len(rows))).long()]
    print_nearest(data.query, data.gallery, rows.tolist(), s[rows], index[rows])
    draw_grid(path, model, data.query, data.gallery, rows.tolist(), index[rows], hit[rows])


def answer_queries(args, model):
    """--query: prints the images nearest to each photo; with --sheet, draws them, too."""
    photos = common.Images(args.query, ['photo'] * len(args.query), transform=model.transform, workers=args.workers)
    z = common.embed(model, photos)                         # (Q, D), first, so that a wrong name is noticed at once
    dataset, folder = place_of_test_set(args, [model.args])
    if dataset in ('shapes', 'vectors'):
        raise UsageError(f'--query searches a folder of images, and not {dataset}: add --dataset folder --data FOLDER')
    if os.path.isfile(folder):
        arrays = common.read_npz(folder)
        if arrays.get('network') != fingerprint(model):
            raise UsageError(f'{folder} has the embeddings of another network: make it again with --embed')
        images = common.Images(arrays['paths'], arrays['labels'], arrays['classes'], transform=model.transform)
        gallery = torch.from_numpy(arrays['embeddings'])                 # (N, D)
    else:
        images = common.load_dataset(dataset, folder, whole=True, transform=model.transform,
                                     workers=args.workers).query
        gallery = common.embed(model, images)
    print(f'the gallery is {len(images):,} images of {folder}')
    s, index = nearest(z, gallery, min(args.top, len(images)))         # both (Q, k)
    print_nearest(photos, images, range(len(photos)), s, index)
    if args.sheet:
        reject_replacing([args.sheet], [*photos.paths, *images.paths])
        draw_grid(args.sheet, model, photos, images, range(len(photos)), index)
    found = [dict(query=photo, nearest=[
        dict(similarity=round(similarity, 4), label=images.classes[images.labels[i]], path=images.paths[i])
        for similarity, i in zip(*row)]) for photo, *row in zip(photos.paths, s.tolist(), index.tolist())]
    return found[0] if len(found) == 1 else dict(queries=found)


def save_embeddings(path, model, images, z):
    """An NPZ file with embeddings (N, D), labels (N,), the classes' names, paths (N,), and which network made them"""
    with common.atomic_write(path) as file:
        np.savez(file, embeddings=F.normalize(z, dim=1).cpu().numpy(), labels=images.labels.numpy(),
                 classes=np.array(images.classes), paths=np.array(images.paths), network=fingerprint(model))
    print(f'embeddings: {path}')


def gallery_file(path):
    """Where --embed saves the embeddings of the gallery, given where it saves those of the queries"""
    return path.with_stem(f'{path.stem}-gallery')


def fingerprint(model):
    """A hash of the weights and the options of a network"""
    _, transform = model.transform.transforms               # without to_rgb, whose repr is an address
    content = hashlib.sha256(repr([model.config, transform]).encode())
    for weight in model.state_dict().values():
        content.update(weight.cpu().numpy().tobytes())
    return content.hexdigest()


# ---- tables


def students_t():
    """Student's t distribution, of SciPy"""
    try:
        from scipy.stats import t
    except ImportError as error:
        raise UsageError('confidence intervals need scipy: pip install scipy') from error
    return t


def interval(values):
    """Mean of n values, and the half width of its 95% confidence interval by Student's t; None for n = 1"""
    n = len(values)
    return mean(values), students_t().ppf(0.975, n - 1) * stdev(values) / n ** 0.5 if n > 1 else None


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
        if 'seed' not in args:
            raise UsageError(f'{path} does not say its --seed, which a table needs')
        file = common.best_of(path)
        if file.name == 'best.pt' and file.with_name('last.pt').exists():
            # If the run was resumed with other flags, best.pt may be older and have the earlier flags.
            args = common.read_checkpoint(file.with_name('last.pt'))['args']
        fold = args.get('fold') or 'none'
        flags = args | dict(script=saved['script'], folds=fold.split('/')[-1])
        recipe = frozenset((flag, as_text(value)) for flag, value in flags.items() if flag not in common.RUN_FLAGS)
        runs.append(SimpleNamespace(path=path, script=saved['script'], args=args, seed=args['seed'], fold=fold,
                                    classes=saved.get('classes', []), epoch=saved.get('epoch'), recipe=recipe))
    return runs


def as_text(value):
    """The value of a flag as text, the same for 10 and 10.0, and for the same words in another order"""
    if isinstance(value, list):
        return ' '.join(sorted(map(str, value)))
    return f'{value:.12g}' if type(value) in (int, float) else str(value)


def group(runs):
    """{name of a recipe: {seed: {fold: run}}}, with seeds and folds in order. The name is the script with the flags in
    which the recipe differs from the others of this script. Raises UsageError if a mean over the runs is meaningless.
    """
    groups = {}
    for recipe in dict.fromkeys(run.recipe for run in runs):
        own = [run for run in runs if run.recipe == recipe]
        script = own[0].script
        shared = frozenset.intersection(*(run.recipe for run in runs if run.script == script))
        differs = [f'{flag}={value}' for flag, value in sorted(recipe - shared)]
        name = ' '.join([script.removeprefix('train_'), *differs])
        if name in groups:                                  # of ms.py, for example, a changed copy of train_ms.py
            name = f'{name} ({script}.py)'
        if len({frozenset(run.classes) for run in own}) > 1:
            raise UsageError(f'the networks of {name} were trained on different classes, so they are not seeds of '
                             'one recipe')
        if len({run.epoch for run in own if run.fold == 'none'}) > 1:
            raise UsageError(f'the runs of {name} stopped at different epochs: continue them with --resume')
        seeds = groups[name] = {}
        for run in sorted(own, key=attrgetter('seed', 'fold')):
            folds = seeds.setdefault(run.seed, {})
            if run.fold in folds:
                raise UsageError(f'{run.path} and {folds[run.fold].path} have the same recipe, seed and fold')
            folds[run.fold] = run
        if len({tuple(folds) for folds in seeds.values()}) > 1:
            raise UsageError(f'{name}: its seeds have different folds: {folds_of(seeds)}')
        if 1 < len(folds) < (blocks := int(run.fold.split('/')[-1])):
            common.warn(f'{name} has {len(folds)} of {blocks} folds')
    return groups


def folds_of(seeds):
    """{seed: {fold: run}} as text"""
    return '; '.join(f'seed {seed} has fold {", ".join(folds)}' for seed, folds in seeds.items())


def score_seed(args, runs):
    """{setting: row of metrics} of the networks of one recipe and seed, which differ in their folds"""
    rows, queries, galleries = [], [], []
    for run in runs:
        model = load_network(args, run.path)
        data = load_test_set(args, model, *place_of_test_set(args, [run.args]))
        if why := common.why_meaningless(data):
            raise UsageError(f'{why}, so there is nothing to measure')
        z, gallery = common.embed_test(model, data)
        row = common.score(data, z, gallery)
        print(f'{run.path}: R@1 {row["R@1"]:.2f}, MAP@R {row["MAP@R"]:.2f}', flush=True)
        rows.append(row)
        queries.append(z)
        galleries.append(gallery)
    average = {key: mean(row[key] for row in rows) for key in rows[0]}
    dim = z.shape[1]
    if len(runs) == 1:
        return {f'one network ({dim}-dim)': average}
    z = concatenate(queries)
    if gallery is not None:
        gallery = concatenate(galleries)
    return {f'separated ({dim}-dim)': average, f'concatenated ({z.shape[1]}-dim)': common.score(data, z, gallery)}


def differences(ours, theirs):
    """{setting: metrics} of one recipe minus another, for one seed. The settings of both are in the same order. Their
    embedding dimensions, which may differ, are left out."""
    return {setting.split(' (')[0]: {key: row[key] - other[key] for key in row}
            for (setting, row), other in zip(ours.items(), theirs.values())}


def show_table(scores):
    """Prints {recipe: {seed: {setting: row}}} as mean ± half width, a line for each setting, and returns the lines for
    JSON."""
    keys = ('R@1', 'RP', 'MAP@R')
    width = max(map(len, scores))
    print(f'{"":{width + 26}}' + ''.join(f'{key:>16}' for key in keys))
    lines = []
    for recipe, seeds in scores.items():
        for setting in next(iter(seeds.values())):
            rows = [row[setting] for row in seeds.values()]
            line = dict(recipe=recipe, setting=setting, seeds=list(seeds))
            text = f'{recipe:{width}}  {setting:24}'
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


def file_that_ends_in(ending):
    """An argparse type: a path with this ending, so that an output does not replace a checkpoint, for example"""
    def check(text):
        if not text.lower().endswith(ending):
            raise UsageError(f'{text} has to end in {ending}')
        return Path(text)
    return check


SINGLE = {                                                  # flags for one checkpoint
    '--analyse': dict(action='store_true', help='print the additional metrics described above'),
    '--embed': dict(type=file_that_ends_in('.npz'), metavar='NAME.npz',
                    help='save embeddings, labels, classes and paths; those of a gallery in NAME-gallery.npz'),
    '--sheet': dict(type=file_that_ends_in('.png'), metavar='PNG',
                    help='image grid of some queries and their nearest images'),
    '--hardest': dict(action='store_true', help='with --sheet: the queries with the worst results first'),
    '--query': dict(type=Path, nargs='+', metavar='PHOTO',
                    help='print the images nearest to each of these; --sheet draws them'),
    '--top': dict(type=common.at_least(1), default=5, help='number of nearest images in grids and for --query'),
}
FLAGS = {
    '--checkpoint': dict(type=Path, required=True, nargs='+', help='files, or run folders: best.pt or else last.pt'),
    '--against': dict(type=Path, nargs='+', default=[], help='checkpoints of another recipe, compared seed by seed'),
    '--dataset': dict(choices=list(common.DATASETS), help='default: the training dataset'),
    '--data': dict(type=os.path.expanduser, help='its folder, or with --query an NPZ file that --embed wrote; default: '
                                                 'the training folder'),
    '--whole': dict(action='store_true', help='evaluate all images of the folder, not only its test set'),
    '--ks': dict(type=common.at_least(1), nargs='+', help="K of Recall@K (1 is always included); default: the papers'"),
    '--device': common.FLAGS['machine']['--device'],
    '--precision': common.FLAGS['machine']['--precision'],
    '--workers': common.FLAGS['machine']['--workers'],
}


def get_args(argv=None):
    parser = common.Parser(prog='eval.py', description=__doc__, formatter_class=common.Help, allow_abbrev=False)
    parser.add_flags('evaluation', FLAGS)
    parser.add_flags('one checkpoint', SINGLE)
    args, typed = parser.parse_args(argv), parser.typed()
    if len(args.checkpoint) > 1 or args.against:
        common.reject(typed, [flag.removeprefix('--') for flag in SINGLE], 'several checkpoints')
    if args.query:
        common.reject(typed, ['analyse', 'embed', 'hardest', 'whole', 'ks'], '--query')
    elif not args.sheet:
        common.reject(typed, ['hardest', 'top'], 'no image grid: add --sheet')
    return args


def place_of_test_set(args, trainings):
    """Name and folder of the dataset to evaluate: --dataset and --data, or else as in `trainings`, dicts of flags"""
    names = {args.dataset or flags['dataset'] for flags in trainings}
    folders = {args.data or flags['data'] for flags in trainings}
    if len(names) > 1 or names != {'shapes'} and len(folders) > 1:
        places = sorted(names if len(names) > 1 else folders)
        raise UsageError(f'the networks were trained on {" and ".join(places)}: name the images to evaluate with '
                         '--dataset and --data')
    [name], folder = names, min(folders)
    if name == 'shapes' and args.data:
        raise UsageError('the built-in dataset shapes has no --data; for images of your own add --dataset folder')
    if args.dataset and not args.data and name not in ('shapes', *(flags['dataset'] for flags in trainings)):
        raise UsageError(f'name the folder of --dataset {name} with --data')
    return name, folder


def load_network(args, path):
    """The network of a checkpoint. Warns if its run was interrupted, unless it has a --fold: it may stop early."""
    model = common.load_checkpoint(path, args.device, args.precision)
    epoch, step = model.progress['epoch'], model.progress['step']
    epochs, steps = model.args.get('epochs', 0), model.args.get('steps', 0)
    finished = epoch is None or epoch >= epochs or 0 < steps <= step
    if not (finished or model.args.get('fold')):
        common.warn(f'{path} is epoch {epoch} of {epochs}: continue it with --resume')
    return model


def load_test_set(args, model, name, folder):
    """The Splits to evaluate. Warns of seen classes, and of other test images than those of the run."""
    if (name == 'vectors') != (model.config['arch'] == 'none'):
        expected = 'images' if name == 'vectors' else 'vectors'
        raise UsageError(f'--dataset {name} does not fit: the network was trained on {expected}')
    data = common.load_dataset(name, folder, whole=args.whole, transform=model.transform, workers=args.workers)
    if not data.query:
        raise UsageError(f'{folder} has no test set: --whole evaluates all its images')
    data.ks = sorted({1, *args.ks}) if args.ks else data.ks
    expected = model.progress['test_fingerprint']
    if expected and not (args.dataset or args.data or args.whole):
        if common.hash_of(data, data.query, data.gallery) != expected:
            common.warn(f'the test images in {os.path.abspath(folder)} are not those that the run was evaluated on')
    if seen := {*model.classes} & {*data.query.present}:
        common.warn(f'{len(seen)} of the {len(data.query.present)} classes to evaluate were in the training set, so '
                    'the metrics are inflated')
    return data


def evaluate_one(args):
    """Evaluates one checkpoint. Returns what the last line prints, a dict."""
    path = args.checkpoint[0]
    model = load_network(args, path)
    if model.config['arch'] == 'none' and (args.query or args.sheet):
        raise UsageError(f'{"--query" if args.query else "--sheet"} has no effect with vectors: it needs images')
    if args.query:
        return answer_queries(args, model)
    name, folder = place_of_test_set(args, [model.args])
    data = load_test_set(args, model, name, folder)
    if args.sheet:
        reject_replacing([args.sheet], [image for images in (data.train, data.query, data.gallery) if images
                                        for image in images.paths])
    if args.embed and name == 'vectors':
        reject_replacing([args.embed, gallery_file(args.embed)], Path(folder).glob('*.npz'))
    examples = training_images(model, args.workers) if args.analyse else None
    z, gallery = common.embed_test(model, data)
    result = dict(checkpoint=str(path), epoch=model.progress['epoch'], dataset=name)
    if name != 'shapes':
        result |= dict(data=folder)
    if why := common.why_meaningless(data):
        common.warn(f'{why}, so there is nothing to measure')
    else:
        metrics = common.score(data, z, gallery)
        if args.analyse:
            training = common.embed(model, examples).to(z.device)
            metrics |= analyse(z, training, data, metrics, gallery)
            metrics['train R@1'] = common.retrieval_metrics(training, examples.labels, ks=[1])['R@1']
            metrics['copies'] = count_copies(z, training, data.query.paths, examples.paths)
        where = '' if name == 'shapes' else f' in {folder}'
        print(f'{name}{where}: {len(data.query):,} queries of {len(data.query.present):,} classes, with '
              f'{"themselves as the gallery" if gallery is None else f"a gallery of {len(gallery):,} images"}')
        for key, value in metrics.items():
            print(f'{key:>17} {value:8}' if isinstance(value, int) else f'{key:>17} {value:8.3f}')
        if 'unmatched' in metrics:
            print('unmatched queries have no match in the gallery: misses in R@K, left out of RP and MAP@R')
        result |= metrics
    if args.embed:
        save_embeddings(args.embed, model, data.query, z)
        if gallery is not None:
            save_embeddings(gallery_file(args.embed), model, data.gallery, gallery)
    if args.sheet:
        draw_queries(args.sheet, model, data, z, gallery, args.top, args.hardest)
    return result


def training_images(model, workers):
    """The images that the network was trained on. Of other images in their place, only other classes or another number
    are noticed."""
    flags = model.args
    training = common.load_dataset(flags['dataset'], flags['data'], fold=flags.get('fold'),
                                   transform=model.transform, workers=workers).train
    if not training or {*training.classes} - {*model.classes}:
        raise UsageError(f'--analyse needs the training images, and those in {flags["data"]} are different')
    before = model.progress['train_images']
    if before not in (None, len(training)):
        common.warn(f'{flags["data"]} has {len(training)} training images, and had {before} in training: utilization '
                    'and copies are those of other images')
    return training


def evaluate_several(args):
    """The table of several checkpoints; with --against, the differences of two recipes as well. Returns a dict, too."""
    students_t()                                            # if SciPy is missing, fail now and not after the evaluation
    ours, theirs = read_runs(args.checkpoint), read_runs(args.against)
    if both := {run.recipe for run in ours} & {run.recipe for run in theirs}:
        example = next(run.path for run in theirs if run.recipe in both)
        raise UsageError(f'--against has {example}, whose recipe is among those before it')
    runs = ours + theirs
    recipes = group(runs)
    if args.against:
        pairs = [{seed: [*folds] for seed, folds in seeds.items()} for seeds in recipes.values()]
        if len(pairs) != 2 or pairs[0] != pairs[1]:
            raise UsageError('--against compares two recipes in the same seeds and folds, and these are '
                             + '; '.join(f'{name} ({folds_of(seeds)})' for name, seeds in recipes.items()))
    dataset, _ = place_of_test_set(args, [run.args for run in runs])
    scores = {}                                             # {recipe: {seed: {setting: row}}}
    for recipe, seeds in recipes.items():
        scores[recipe] = {seed: score_seed(args, folds.values()) for seed, folds in seeds.items()}
    if args.against:
        (first, a), (second, b) = scores.items()
        scores[f'{first} - {second}'] = {seed: differences(a[seed], b[seed]) for seed in a}
    counts = sorted({len(seeds) for seeds in recipes.values()})
    if counts == [1]:
        print(f'{dataset}: one seed of each recipe, so there is no confidence interval')
    else:
        print(f'{dataset}: the mean over {" or ".join(map(str, counts))} seeds, ± its 95% confidence interval')
    return dict(checkpoint=list(map(str, args.checkpoint)), against=list(map(str, args.against)), dataset=dataset,
                rows=show_table(scores))


def main(argv=None):
    args = get_args(argv)
    result = evaluate_several(args) if len(args.checkpoint) > 1 or args.against else evaluate_one(args)
    print(json.dumps(result))
    return result


if __name__ == '__main__':
    common.cli(main)
