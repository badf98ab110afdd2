"""The exercises, one function each: its decorator has what is stubbed out and graded, its body samples a random input.

These inputs are for the hidden comparison, see compare.py. A function returns the name of the function to call, and the
arguments; `rng` is a RandomInputs.
"""
from pathlib import Path
from typing import Callable, NamedTuple

import numpy as np
from compare import Tensor

ROOT = Path(__file__).parents[2]


class Exercise(NamedTuple):
    script: str
    stubbed: str        # functions that the student writes, and helpers that would reveal the solution
    graded: str         # tests that are graded, as an expression for pytest -k
    week: int           # of the course, in README.md
    level: int          # 1: a formula. 2: also masks, means or special cases. 3: also memory, or many rules
    minutes: int        # for a second-year student
    source: str
    sample: Callable    # random inputs for the hidden comparison
    copies: dict = {}   # {script: functions that contain the same solution}
    akin: str = ''      # functions of the same script with lines of the solution
    view: Callable = None       # the part of the outputs that is compared, if not all

    @property
    def functions(self):
        """The functions to write, for the page of the students"""
        return ', '.join(f'`{function}`' for function in self.stubbed.split())

    @property
    def solutions(self):
        """{script: functions that contain a solution}"""
        return {self.script: f'{self.stubbed} {self.akin}'} | self.copies

    @property
    def tests(self):
        others = {'common.py': 'tests/foundation/test_retrieval.py', 'eval.py': 'tests/evaluation/test_metrics.py',
                  'train_triplet.py': 'tests/course/test_triplet.py'}
        return others.get(self.script, f'tests/papers/{self.script.replace("train_", "test_")}')


EXERCISES = {}


def exercise(script, graded, source, week, level, minutes, stubbed='', **more):
    """Decorator: adds an exercise with the name of the function. `stubbed` has helpers, or other functions to write."""
    def enter(function):
        name = function.__name__
        EXERCISES[name] = Exercise(script, f'{name} {stubbed}'.strip(), graded, week, level, minutes, source, function,
                                   **more)
        return function
    return enter


# ---- week 1


@exercise('eval.py', 'metrix_eq12_', 'Metrix Eq. (12)', week=1, level=1, minutes=20)
def utilization(rng):
    queries, examples = rng.sizes('queries and examples', largest=9000)
    dim = rng.dim() if max(queries, examples) < 500 else 3
    y = rng.labels(queries + examples)
    z = rng.unit(queries + examples, dim, y) * rng.scale(0.1, 10)
    given = [rng.tensor(part, 'float32', grad='') for part in (z[:queries], z[queries:])]
    return 'utilization', dict(queries=given[0], examples=given[1])


@exercise('common.py', 'rc_eq3_ or rc_eq4_ or test_retrieval_',
          'Reality Check Eq. (3) and (4); R@K and three rules from the docstring', week=1, level=3, minutes=150,
          stubbed='check_embeddings ranked_hits precisions')
def retrieval_metrics(rng):
    within = rng.choose('within', True, False)
    if within:
        queries, gallery = rng.size('images', (2, 4), (5, 20), (5, 20), (60, 140), (200, 300)), 0
    else:
        queries, gallery = rng.sizes('queries and gallery', largest=9000)
    dim = rng.dim() if max(queries, gallery) < 500 else 3
    # With many matches, those at the end of a large gallery affect the metrics.
    y = rng.labels(queries + gallery, classes=5 if gallery > 500 else None)
    z = rng.unit(queries + gallery, dim, y) * np.exp(rng.numpy.uniform(-1, 1, (queries + gallery, 1)))
    given = dict(query=rng.tensor(z[:queries], 'float32', grad=''), query_labels=rng.integers(y[:queries]))
    if not within:
        given |= dict(gallery=rng.tensor(z[queries:], 'float32', grad=''),
                      gallery_labels=rng.integers(y[queries:]))
    ks = rng.python.sample([1, 2, 3, 4, 8, 10, 16, 100], 3)
    return 'retrieval_metrics', given | rng.some(ks=ks)


# ---- weeks 2 and 3: losses on pairs


@exercise('train_contrastive.py', 'rc_eq1_', 'Reality Check Eq. (1)', week=2, level=2, minutes=45,
          stubbed='mean_nonzero', copies={'train_hse.py': 'contrastive_loss'})
def contrastive_loss(rng):
    z, y = rng.images(apart=0.02)      # the gradient of a distance is discontinuous at 0
    return 'contrastive_loss', dict(z=z, y=y) | rng.some(
        pos_margin=rng.between(-0.3, 0.8), neg_margin=rng.between(0.1, 1.6), power=rng.choose('power', 1, 2))


@exercise('train_contrastive.py', 'metrix_eq1_', 'Metrix Eq. (1)', week=2, level=2, minutes=45,
          copies={'train_metrix.py': 'contrastive'})
def contrastive_similarity_loss(rng):
    z, y = rng.images()
    return 'contrastive_similarity_loss', dict(z=z, y=y) | rng.some(
        margin=rng.between(-0.5, 0.9), reduction=rng.choose('reduction', 'mean', 'sum'))


@exercise('train_triplet.py', 'rc_eq2_', 'Reality Check Eq. (2), in a separate script', week=3, level=2,
          minutes=60)
def triplet_loss(rng):
    z, y = rng.images(largest=90)
    return 'triplet_loss', dict(z=z, y=y) | rng.some(
        margin=rng.between(0, 0.8), hardest=rng.choose('hardest', True, False))


@exercise('train_ms.py', 'metrix_eq2_', 'Metrix Eq. (2); the miner from its docstring', week=3, level=2, minutes=75,
          stubbed='mine', copies={'train_metrix.py': 'ms clean_loss', 'train_hse.py': 'multi_similarity_loss'})
def multi_similarity_loss(rng):
    z, y = rng.images()
    epsilon = rng.choose('epsilon', None, 0.0, rng.between(0, 0.5), rng.between(0, 0.5))
    if rng.choose('function', 'loss', 'loss', 'loss', 'mine') == 'mine':
        s = z.values @ z.values.T
        return 'mine', dict(s=rng.tensor((s + s.T) / 2, 'float64'), y=y, epsilon=epsilon or 0.0)
    return 'multi_similarity_loss', dict(z=z, y=y) | rng.some(
        alpha=rng.scale(0.3, 150), beta=rng.scale(1, 150), lam=rng.between(-0.5, 0.9), epsilon=epsilon)


# ---- weeks 4 to 6: losses with a vector for each class


@exercise('train_proxynca_pp.py', 'pa_eq1_ or pa_eq3_', 'Proxy-Anchor Eq. (1) and its gradient (3)', week=4, level=1,
          minutes=30, copies={'train_ccl.py': 'scaled_proxynca_loss'})
def proxynca_loss(rng):
    z, y, proxies = rng.images_and_vectors()
    return 'proxynca_loss', dict(z=z, y=y, proxies=proxies) | rng.some(temperature=rng.scale(0.1, 4))


@exercise('train_proxy_anchor.py', 'pa_eq4_ or pa_eq6_', 'Proxy-Anchor Eq. (4) and its gradient (6)', week=4, level=2,
          minutes=60, copies={'train_metrix.py': 'proxy_anchor clean_loss', 'train_hse.py': 'proxy_anchor_loss'})
def proxy_anchor_loss(rng):
    z, y, proxies = rng.images_and_vectors()
    return 'proxy_anchor_loss', dict(z=z, y=y, proxies=proxies) | rng.some(
        alpha=rng.scale(1, 150), delta=rng.between(-0.2, 0.5))


@exercise('train_proxynca_pp.py', 'test_proxynca_pp_', 'ProxyNCA++, from its docstring', week=5, level=1,
          minutes=30, copies={'train_metrix.py': 'proxy_logits mixed_loss'})
def proxynca_pp_loss(rng):
    z, y, proxies = rng.images_and_vectors()
    return 'proxynca_pp_loss', dict(z=z, y=y, proxies=proxies) | rng.some(temperature=rng.scale(0.01, 4))


@exercise('train_ccl.py', 'ccl_eq5_ or ccl_eq8_ or ccl_eq11_', 'CCL Eq. (5); (8) and (11) are special cases', week=6,
          level=2, minutes=75)
def center_contrastive_loss(rng):
    z, y, centers = rng.images_and_vectors()
    lam = rng.between(0, 4)
    if rng.choose('dropout', False, False, True):    # two forms of L_center differ if z is not normalized
        z = rng.tensor(z.values * np.exp(rng.numpy.uniform(-0.2, 0.2, (len(z.values), 1))))
        lam = 0.0
    return 'center_contrastive_loss', dict(z=z, y=y, centers=centers, lam=lam) | rng.some(
        s=rng.scale(1, 150), margin=rng.choose('margin', 0.0, rng.between(0, 0.6)),
        smoothing=rng.choose('smoothing', 0.0, rng.between(0, 0.5)),
        stop_grad=rng.choose('stop_grad', False, False, True))


# ---- week 7: mixed examples


@exercise('train_metrix.py', 'metrix_eq7_ or metrix_eq9_over_', 'Metrix Eq. (7), which is (9) over mixed examples',
          week=7, level=1, minutes=30)
def labelled_loss(rng):
    anchors, examples = rng.sizes('anchors and examples')
    kind = rng.choose('kind', 'ms', 'contrastive', 'proxy_anchor', 'binomial', 'lifted', 'nca', 'proxynca_pp', 'ms')
    y = rng.numpy.random((anchors, examples))
    y[rng.numpy.random(y.shape) < 0.3] = 0
    y[rng.numpy.random(y.shape) < 0.2] = 1
    labels = rng.choose('labels', 'float32', 'float32', 'int64', 'bool')
    y = rng.tensor(y, labels, grad='') if labels == 'float32' else Tensor(y > 0.5, labels)
    s = rng.tensor(rng.numpy.uniform(-1, 1, y.values.shape))
    valid = rng.mask(rng.numpy.random(y.values.shape) < rng.choose('fraction', 0.1, 0.8, 1))
    hyper = dict(ms=dict(beta=rng.scale(1, 100), gamma=rng.scale(1, 100), m=rng.between(-0.3, 0.9)),
                 contrastive=dict(m=rng.between(-0.3, 0.9), reduction=rng.choose('reduction', 'mean', 'sum')),
                 proxy_anchor=dict(alpha=rng.scale(1, 100), delta=rng.between(0, 0.5)),
                 proxynca_pp=dict(temperature=rng.scale(0.02, 2)), lifted=dict(m=rng.between(0, 0.9)))
    return 'labelled_loss', dict(s=s, y=y, valid=valid, kind=kind) | rng.some(**hyper.get(kind, {}))


@exercise('train_metrix.py', 'metrix_eq15_', 'Metrix Eq. (15)', week=7, level=2, minutes=45, stubbed='log1p_sum_exp',
          akin='log_sum_exp', copies={'train_ms.py': 'multi_similarity_loss', 'train_hse.py': 'multi_similarity_loss'})
def ms(rng):
    anchors, examples = rng.sizes('anchors and examples')
    positive = rng.numpy.random((anchors, examples))
    positive[rng.numpy.random(positive.shape) < 0.3] = 0
    positive[rng.numpy.random(positive.shape) < 0.2] = 1
    valid = rng.numpy.random(positive.shape) < rng.choose('fraction', 0.1, 0.8, 1)
    kind = rng.choose('type of s', 'float32', 'float64')                 # half precision is upcast before
    weights = [rng.tensor(part * valid, kind, grad='') for part in (positive, 1 - positive)]
    if rng.choose('masks', False, False, True):
        weights = [rng.mask((positive > 0.5) & valid), rng.mask((positive <= 0.5) & valid)]
    s = rng.tensor(rng.numpy.uniform(-1, 1, positive.shape), kind)
    return 'ms', dict(s=s, positive=weights[0], negative=weights[1]) | rng.some(
        beta=rng.scale(1, 150), gamma=rng.scale(1, 150), m=rng.between(-0.3, 0.9))


@exercise('train_metrix.py', 'metrix_eq8_', 'Metrix Eq. (8)', week=7, level=2, minutes=45,
          view=lambda pair_y, valid: (np.where(valid, pair_y, 0), valid))      # labels that are not valid are arbitrary
def pair_labels(rng):
    images, anchors = rng.sizes('images and anchors', largest=400)
    mixed = rng.size('mixed examples', (1, 4), (10, 40), (300, 2000))
    y = rng.labels(images + anchors)
    i, j = rng.numpy.integers(images, size=(2, mixed))
    lam = rng.tensor(rng.numpy.random(mixed), rng.choose('type of lambda', 'float32', 'float64'), '')
    return 'pair_labels', dict(y=rng.integers(y[:images]), anchor_y=rng.integers(y[images:]), i=rng.integers(i),
                               j=rng.integers(j), lam=lam)


@exercise('train_metrix.py', 'metrix_eq24_', 'Metrix Eq. (24)', week=7, level=1, minutes=30)
def positivity_threshold(rng):
    shape = rng.choose('shape', (), (1,), (7,), (3, 4), (2000,))
    lam = rng.numpy.random(shape) ** rng.python.choice([1, 8])
    lam = 1 - lam if rng.choose('side', True, False) else lam
    lam = rng.tensor(lam, rng.choose('type of lambda', 'float32', 'float64'), '')
    if rng.choose('number', False, False, True):
        lam = rng.between(0.001, 0.999)
    return 'positivity_threshold', dict(lam=lam, beta=rng.scale(0.5, 200), gamma=rng.scale(0.5, 200),
                                        m=rng.between(-1, 1))


@exercise('train_metrix.py', 'metrix_eq4_feature_', 'Metrix Eq. (4), without a tensor of all mixed feature maps',
          week=7, level=3, minutes=90)
def mix_features(rng):
    images, pairs = rng.sizes('images and pairs', largest=400)
    large = images * pairs > 500
    c = rng.choose('few channels', 1, 3, 8) if large else rng.size('channels', (1, 9), (10, 70), (257, 300))
    h, w = (rng.python.randint(1, 4 if large else 20) for _ in 'hw')
    f = rng.tensor(rng.numpy.standard_normal((images, c, h, w)) * rng.scale(0.1, 10))
    i, j = rng.numpy.integers(images, size=(2, pairs))
    lam = rng.tensor(rng.numpy.random(pairs), 'float64' if f.type == 'float64' else 'float32', grad='')
    return 'mix_features', dict(f=f, i=rng.integers(i), j=rng.integers(j), lam=lam) | rng.some(
        pool=rng.choose('pool', 'avg', 'max', 'avg+max'))


# ---- week 8: hybrids


@exercise('train_hse.py', 'hse_eq7_ or hse_eq8_ or hse_eq9_', 'HSE Eq. (7), (8) and (9)', week=8, level=2, minutes=60,
          akin='epshn_loss')
def hybrid_loss(rng):
    hybrids, images = rng.sizes('hybrids and images')
    if rng.choose('no hybrids', *[False] * 9, True):
        hybrids = 0
    dim = rng.dim() if hybrids * images < 500 else rng.python.randint(2, 9)
    vectors = rng.unit(hybrids + images, dim, rng.labels(hybrids + images))
    weak = rng.numpy.random((hybrids, images)) < rng.choose('weak', 0.02, 0.3, 0.7)
    neither = rng.numpy.random((hybrids, images)) < rng.choose('neither', 0, 0, 0.5)
    return 'hybrid_loss', dict(
        h=rng.tensor(vectors[:hybrids], grad='unit'), z=rng.tensor(vectors[hybrids:], rng.other_type(), 'unit'),
        weak_positive=rng.mask(weak & ~neither), negative=rng.mask(~weak & ~neither)) | rng.some(
        alpha=rng.between(0, 3), temperature=rng.scale(0.01, 3))


@exercise('train_hse.py', 'test_epshn_', 'its docstring; it is one L_m of HSE Eq. (10)', week=8, level=2, minutes=60,
          akin='hybrid_loss')
def epshn_loss(rng):
    z, y = rng.images()
    return 'epshn_loss', dict(z=z, y=y) | rng.some(temperature=rng.scale(0.01, 3))
