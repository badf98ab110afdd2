"""The exercises, one function each: what is cut and graded stands in its row, and its body draws a random legal input.

These inputs are for the hidden comparison, see compare.py. A function returns the name of what is called, and its
arguments; `draw` is a Draw.
"""
from pathlib import Path
from typing import Callable, NamedTuple

import numpy as np
from compare import Tensor

ROOT = Path(__file__).parents[2]


class Exercise(NamedTuple):
    script: str
    cut: str            # functions that the student writes, and their helpers that would give them away
    graded: str         # tests that are graded, as an expression for pytest -k
    week: int           # of the course, in README.md
    level: int          # 1: a formula. 2: also masks, means or special cases. 3: also memory, or many rules
    minutes: int        # that a student of the second year may need
    source: str
    draw: Callable      # of the hidden comparison
    copies: dict = {}   # {script: functions that hold the same solution}
    akin: str = ''      # functions of the same script that share lines with the solution
    view: Callable = None       # what counts of the outputs, where not all of them does

    @property
    def functions(self):
        """Those to write, as a page names them"""
        return ', '.join(f'`{function}`' for function in self.cut.split())

    @property
    def solutions(self):
        """{script: functions that hold a solution}"""
        return {self.script: f'{self.cut} {self.akin}'} | self.copies

    @property
    def tests(self):
        others = {'common.py': 'tests/foundation/test_retrieval.py', 'eval.py': 'tests/evaluation/test_metrics.py',
                  'train_triplet.py': 'tests/course/test_triplet.py'}
        return others.get(self.script, f'tests/papers/{self.script.replace("train_", "test_")}')


EXERCISES = {}


def exercise(script, graded, source, week, level, minutes, cut='', **more):
    """Enters the function that follows: an exercise of its name. `cut` names helpers, or other functions to write."""
    def enter(function):
        name = function.__name__
        EXERCISES[name] = Exercise(script, f'{name} {cut}'.strip(), graded, week, level, minutes, source, function,
                                   **more)
        return function
    return enter


# ---- week 1


@exercise('eval.py', 'metrix_eq12_', 'Metrix Eq. (12)', week=1, level=1, minutes=20)
def utilization(draw):
    queries, examples = draw.sizes('queries and examples', largest=9000)
    dim = draw.dim() if max(queries, examples) < 500 else 3
    y = draw.labels(queries + examples)
    z = draw.unit(queries + examples, dim, y) * draw.scale(0.1, 10)
    given = [draw.tensor(part, 'float32', grad='') for part in (z[:queries], z[queries:])]
    return 'utilization', dict(queries=given[0], examples=given[1])


@exercise('common.py', 'rc_eq3_ or rc_eq4_ or test_retrieval_',
          'Reality Check Eq. (3) and (4); R@K and three rules from the docstring', week=1, level=3, minutes=150,
          cut='check_embeddings ranked_hits precisions')
def retrieval_metrics(draw):
    within = draw.deal('within', True, False)
    if within:
        queries, gallery = draw.size('images', (2, 4), (5, 20), (5, 20), (60, 140), (200, 300)), 0
    else:
        queries, gallery = draw.sizes('queries and gallery', largest=9000)
    dim = draw.dim() if max(queries, gallery) < 500 else 3
    # A match at the end of a large gallery counts where there are many of them.
    y = draw.labels(queries + gallery, classes=5 if gallery > 500 else None)
    z = draw.unit(queries + gallery, dim, y) * np.exp(draw.numbers.uniform(-1, 1, (queries + gallery, 1)))
    given = dict(query=draw.tensor(z[:queries], 'float32', grad=''), query_labels=draw.integers(y[:queries]))
    if not within:
        given |= dict(gallery=draw.tensor(z[queries:], 'float32', grad=''),
                      gallery_labels=draw.integers(y[queries:]))
    ks = draw.choice.sample([1, 2, 3, 4, 8, 10, 16, 100], 3)
    return 'retrieval_metrics', given | draw.some(ks=ks)


# ---- weeks 2 and 3: losses on pairs


@exercise('train_contrastive.py', 'rc_eq1_', 'Reality Check Eq. (1)', week=2, level=2, minutes=45, cut='mean_nonzero',
          copies={'train_hse.py': 'contrastive_loss'})
def contrastive_loss(draw):
    z, y = draw.images(apart=0.02)      # the gradient of a distance jumps at 0, and near it rounding decides
    return 'contrastive_loss', dict(z=z, y=y) | draw.some(
        pos_margin=draw.between(-0.3, 0.8), neg_margin=draw.between(0.1, 1.6), power=draw.deal('power', 1, 2))


@exercise('train_contrastive.py', 'metrix_eq1_', 'Metrix Eq. (1)', week=2, level=2, minutes=45,
          copies={'train_metrix.py': 'contrastive'})
def contrastive_similarity_loss(draw):
    z, y = draw.images()
    return 'contrastive_similarity_loss', dict(z=z, y=y) | draw.some(
        margin=draw.between(-0.5, 0.9), reduction=draw.deal('reduction', 'mean', 'sum'))


@exercise('train_triplet.py', 'rc_eq2_', 'Reality Check Eq. (2), in a script of one\'s own', week=3, level=2,
          minutes=60)
def triplet_loss(draw):
    z, y = draw.images(largest=90)
    return 'triplet_loss', dict(z=z, y=y) | draw.some(
        margin=draw.between(0, 0.8), hardest=draw.deal('hardest', True, False))


@exercise('train_ms.py', 'metrix_eq2_', 'Metrix Eq. (2); the miner from its docstring', week=3, level=2, minutes=75,
          cut='mine', copies={'train_metrix.py': 'ms clean_loss', 'train_hse.py': 'multi_similarity_loss'})
def multi_similarity_loss(draw):
    z, y = draw.images()
    epsilon = draw.deal('epsilon', None, 0.0, draw.between(0, 0.5), draw.between(0, 0.5))
    if draw.deal('function', 'loss', 'loss', 'loss', 'mine') == 'mine':
        s = z.values @ z.values.T
        return 'mine', dict(s=draw.tensor((s + s.T) / 2, 'float64'), y=y, epsilon=epsilon or 0.0)
    return 'multi_similarity_loss', dict(z=z, y=y) | draw.some(
        alpha=draw.scale(0.3, 150), beta=draw.scale(1, 150), lam=draw.between(-0.5, 0.9), epsilon=epsilon)


# ---- weeks 4 to 6: losses with a vector for each class


@exercise('train_proxynca_pp.py', 'pa_eq1_ or pa_eq3_', 'Proxy-Anchor Eq. (1) and its gradient (3)', week=4, level=1,
          minutes=30, copies={'train_ccl.py': 'scaled_proxynca_loss'})
def proxynca_loss(draw):
    z, y, proxies = draw.images_and_vectors()
    return 'proxynca_loss', dict(z=z, y=y, proxies=proxies) | draw.some(temperature=draw.scale(0.1, 4))


@exercise('train_proxy_anchor.py', 'pa_eq4_ or pa_eq6_', 'Proxy-Anchor Eq. (4) and its gradient (6)', week=4, level=2,
          minutes=60, copies={'train_metrix.py': 'proxy_anchor clean_loss', 'train_hse.py': 'proxy_anchor_loss'})
def proxy_anchor_loss(draw):
    z, y, proxies = draw.images_and_vectors()
    return 'proxy_anchor_loss', dict(z=z, y=y, proxies=proxies) | draw.some(
        alpha=draw.scale(1, 150), delta=draw.between(-0.2, 0.5))


@exercise('train_proxynca_pp.py', 'test_proxynca_pp_', 'ProxyNCA++, from its docstring', week=5, level=1,
          minutes=30, copies={'train_metrix.py': 'proxy_logits mixed_loss'})
def proxynca_pp_loss(draw):
    z, y, proxies = draw.images_and_vectors()
    return 'proxynca_pp_loss', dict(z=z, y=y, proxies=proxies) | draw.some(temperature=draw.scale(0.01, 4))


@exercise('train_ccl.py', 'ccl_eq5_ or ccl_eq8_ or ccl_eq11_', 'CCL Eq. (5); (8) and (11) are special cases', week=6,
          level=2, minutes=75)
def center_contrastive_loss(draw):
    z, y, centers = draw.images_and_vectors()
    lam = draw.between(0, 4)
    if draw.deal('dropout', False, False, True):    # L_center may have two forms, which differ at other lengths
        z = draw.tensor(z.values * np.exp(draw.numbers.uniform(-0.2, 0.2, (len(z.values), 1))))
        lam = 0.0
    return 'center_contrastive_loss', dict(z=z, y=y, centers=centers, lam=lam) | draw.some(
        s=draw.scale(1, 150), margin=draw.deal('margin', 0.0, draw.between(0, 0.6)),
        smoothing=draw.deal('smoothing', 0.0, draw.between(0, 0.5)),
        stop_grad=draw.deal('stop_grad', False, False, True))


# ---- week 7: mixtures


@exercise('train_metrix.py', 'metrix_eq7_ or metrix_eq9_over_', 'Metrix Eq. (7), which is (9) over mixed examples',
          week=7, level=1, minutes=30)
def labelled_loss(draw):
    anchors, examples = draw.sizes('anchors and examples')
    kind = draw.deal('kind', 'ms', 'contrastive', 'proxy_anchor', 'binomial', 'lifted', 'nca', 'proxynca_pp', 'ms')
    y = draw.numbers.random((anchors, examples))
    y[draw.numbers.random(y.shape) < 0.3] = 0
    y[draw.numbers.random(y.shape) < 0.2] = 1
    labels = draw.deal('labels', 'float32', 'float32', 'int64', 'bool')
    y = draw.tensor(y, labels, grad='') if labels == 'float32' else Tensor(y > 0.5, labels)
    s = draw.tensor(draw.numbers.uniform(-1, 1, y.values.shape))
    valid = draw.mask(draw.numbers.random(y.values.shape) < draw.deal('share', 0.1, 0.8, 1))
    hyper = dict(ms=dict(beta=draw.scale(1, 100), gamma=draw.scale(1, 100), m=draw.between(-0.3, 0.9)),
                 contrastive=dict(m=draw.between(-0.3, 0.9), reduction=draw.deal('reduction', 'mean', 'sum')),
                 proxy_anchor=dict(alpha=draw.scale(1, 100), delta=draw.between(0, 0.5)),
                 proxynca_pp=dict(temperature=draw.scale(0.02, 2)), lifted=dict(m=draw.between(0, 0.9)))
    return 'labelled_loss', dict(s=s, y=y, valid=valid, kind=kind) | draw.some(**hyper.get(kind, {}))


@exercise('train_metrix.py', 'metrix_eq15_', 'Metrix Eq. (15)', week=7, level=2, minutes=45, cut='log1p_sum_exp',
          akin='log_sum_exp', copies={'train_ms.py': 'multi_similarity_loss', 'train_hse.py': 'multi_similarity_loss'})
def ms(draw):
    anchors, examples = draw.sizes('anchors and examples')
    positive = draw.numbers.random((anchors, examples))
    positive[draw.numbers.random(positive.shape) < 0.3] = 0
    positive[draw.numbers.random(positive.shape) < 0.2] = 1
    valid = draw.numbers.random(positive.shape) < draw.deal('share', 0.1, 0.8, 1)
    kind = draw.deal('type of s', 'float32', 'float64')                 # half precision is raised before
    weights = [draw.tensor(part * valid, kind, grad='') for part in (positive, 1 - positive)]
    if draw.deal('masks', False, False, True):
        weights = [draw.mask((positive > 0.5) & valid), draw.mask((positive <= 0.5) & valid)]
    s = draw.tensor(draw.numbers.uniform(-1, 1, positive.shape), kind)
    return 'ms', dict(s=s, positive=weights[0], negative=weights[1]) | draw.some(
        beta=draw.scale(1, 150), gamma=draw.scale(1, 150), m=draw.between(-0.3, 0.9))


@exercise('train_metrix.py', 'metrix_eq8_', 'Metrix Eq. (8)', week=7, level=2, minutes=45,
          view=lambda pair_y, valid: (np.where(valid, pair_y, 0), valid))      # other labels have no meaning
def pair_labels(draw):
    images, anchors = draw.sizes('images and anchors', largest=400)
    mixtures = draw.size('mixtures', (1, 4), (10, 40), (300, 2000))
    y = draw.labels(images + anchors)
    i, j = draw.numbers.integers(images, size=(2, mixtures))
    lam = draw.tensor(draw.numbers.random(mixtures), draw.deal('type of lambda', 'float32', 'float64'), '')
    return 'pair_labels', dict(y=draw.integers(y[:images]), anchor_y=draw.integers(y[images:]), i=draw.integers(i),
                               j=draw.integers(j), lam=lam)


@exercise('train_metrix.py', 'metrix_eq24_', 'Metrix Eq. (24)', week=7, level=1, minutes=30)
def positivity_threshold(draw):
    shape = draw.deal('shape', (), (1,), (7,), (3, 4), (2000,))
    lam = draw.numbers.random(shape) ** draw.choice.choice([1, 8])
    lam = 1 - lam if draw.deal('side', True, False) else lam
    lam = draw.tensor(lam, draw.deal('type of lambda', 'float32', 'float64'), '')
    if draw.deal('number', False, False, True):
        lam = draw.between(0.001, 0.999)
    return 'positivity_threshold', dict(lam=lam, beta=draw.scale(0.5, 200), gamma=draw.scale(0.5, 200),
                                        m=draw.between(-1, 1))


@exercise('train_metrix.py', 'metrix_eq4_feature_', 'Metrix Eq. (4), without a tensor of all mixed feature maps',
          week=7, level=3, minutes=90)
def mix_features(draw):
    images, pairs = draw.sizes('images and pairs', largest=400)
    large = images * pairs > 500
    c = draw.deal('few channels', 1, 3, 8) if large else draw.size('channels', (1, 9), (10, 70), (257, 300))
    h, w = (draw.choice.randint(1, 4 if large else 20) for _ in 'hw')
    f = draw.tensor(draw.numbers.standard_normal((images, c, h, w)) * draw.scale(0.1, 10))
    i, j = draw.numbers.integers(images, size=(2, pairs))
    lam = draw.tensor(draw.numbers.random(pairs), 'float64' if f.type == 'float64' else 'float32', grad='')
    return 'mix_features', dict(f=f, i=draw.integers(i), j=draw.integers(j), lam=lam) | draw.some(
        pool=draw.deal('pool', 'avg', 'max', 'avg+max'))


# ---- week 8: hybrids


@exercise('train_hse.py', 'hse_eq7_ or hse_eq8_ or hse_eq9_', 'HSE Eq. (7), (8) and (9)', week=8, level=2, minutes=60,
          akin='epshn_loss')
def hybrid_loss(draw):
    hybrids, images = draw.sizes('hybrids and images')
    if draw.deal('no hybrids', *[False] * 9, True):
        hybrids = 0
    dim = draw.dim() if hybrids * images < 500 else draw.choice.randint(2, 9)
    vectors = draw.unit(hybrids + images, dim, draw.labels(hybrids + images))
    weak = draw.numbers.random((hybrids, images)) < draw.deal('weak', 0.02, 0.3, 0.7)
    neither = draw.numbers.random((hybrids, images)) < draw.deal('neither', 0, 0, 0.5)
    return 'hybrid_loss', dict(
        h=draw.tensor(vectors[:hybrids], grad='unit'), z=draw.tensor(vectors[hybrids:], draw.other_type(), 'unit'),
        weak_positive=draw.mask(weak & ~neither), negative=draw.mask(~weak & ~neither)) | draw.some(
        alpha=draw.between(0, 3), temperature=draw.scale(0.01, 3))


@exercise('train_hse.py', 'test_epshn_', 'its docstring; it is one L_m of HSE Eq. (10)', week=8, level=2, minutes=60,
          akin='hybrid_loss')
def epshn_loss(draw):
    z, y = draw.images()
    return 'epshn_loss', dict(z=z, y=y) | draw.some(temperature=draw.scale(0.01, 3))
