"""One entry per script: losses, steps, recipes and flags, for the tests that apply to all papers. Other tests of a
script are in the file with its name."""
import random
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F

import train_ccl
import train_contrastive
import train_hse
import train_metrix
import train_ms
import train_proxy_anchor
import train_proxynca_pp


class Case(NamedTuple):
    losses: dict = {}       # {name: loss(z, y, p)}: z (B, D), y (B,); proxies, centres or hybrids p (C, D)
    steps: list = []        # [(flags, loss(images, labels, loss_params))]: no flag of a loss has its default value
    recipes: str = ''       # of the four benchmarks, from papers and released code: a line of values, see KEYS
    settings: list = []     # [(datasets, flags, values)]: flags of the method, and recipes that depend on flags
    per_class: tuple = (4, 4, 4)        # images per class: on shapes, in folders, and with --protocol reality-check
    shapes: tuple = (128, 10, 0)        # batch size and epochs on shapes, and those with a frozen backbone
    no_effect: list = []    # flags, the last of which has no effect with the others and the defaults
    rates: list = [('', [0.01])]        # [(flags, learning rates)]: of the network, and of proxies or centres
    starts: list = []       # [(flags, name, size)]: standard deviation of the initial proxies or centres of six classes


KEYS = ('optimizer lr weight_decay momentum epochs batch_size per_class schedule decay_epochs decay_rate '
        'freeze_epochs clip dim pool freeze_bn image_size resize min_crop jitter').split()


def embed(x):
    """Replaces the network: unit vectors that are far apart, and differentiable"""
    return F.normalize(x.flatten(1)[:, ::199][:, :16], dim=1)


def step(loss, *names, dropout=0.0, **options):
    """The loss of the embeddings, with dropout, and of the parameters of the loss with these names"""
    return lambda x, y, t: loss(F.dropout(embed(x), dropout), y, *(t[name] for name in names), **options)


def no_proxies(loss, **options):
    return lambda z, y, p: loss(z, y, **options)


def hybrids(z, y, p, **options):
    """The hybrid loss with the proxies as hybrids, and images of classes 0 and 1 as their weak positives"""
    weak = (y < 2).expand(len(p), len(y))
    return train_hse.hybrid_loss(p, z, weak, ~weak, **options)


def hybrids_by_hand(base_loss, alpha, temperature, stay, **options):
    """The step of HSE: the base loss of the first `stay` images, plus the loss of their hybrids"""
    def expected(images, labels, loss_params):
        images, labels = images[:stay], labels[:stay]
        h, sources = train_hse.make_hybrids(images, labels, **options)
        z = embed(images)
        weak = (labels[None, :, None] == labels[sources][:, None, :]).any(dim=2)
        extra = [loss_params['proxies']] if loss_params else []
        return base_loss(z, labels, *extra) + train_hse.hybrid_loss(embed(h), z, weak, ~weak, alpha, temperature)
    return expected


def metrix(kind, pairs, z, y, p, k=None, **hyper):
    """Clean plus mixed loss, with the same lambdas at each call"""
    torch.manual_seed(0)
    random.seed(0)
    proxies = dict(proxies=p) if 'proxy' in kind else {}
    base, config = train_metrix.BaseLoss(kind, hyper, **proxies), train_metrix.MixupConfig('embed', pairs, k, 2.0)
    clean = train_metrix.clean_loss(kind, z, y, **proxies, **hyper)
    return clean + 0.4 * train_metrix.mixed_loss(base, config, None, dict(embed=z), y)


#                 optim  lr     wd   mom  ep  batch K  schedule st rate wu clip dim pool    frozen crop from area jit
CASES = {
    'train_contrastive': Case(
        losses={
            'contrastive': no_proxies(train_contrastive.contrastive_loss),
            'contrastive, both margins': no_proxies(train_contrastive.contrastive_loss, pos_margin=0.3, neg_margin=0.9),
            'contrastive, squared': no_proxies(train_contrastive.contrastive_loss, power=2),
            'contrastive, similarity': no_proxies(train_contrastive.contrastive_similarity_loss),
            'contrastive, similarity, sum': no_proxies(train_contrastive.contrastive_similarity_loss, reduction='sum')},
        steps=[
            ('--pos-margin 0.3 --neg-margin 1.4 --power 2',
             step(train_contrastive.contrastive_loss, pos_margin=0.3, neg_margin=1.4, power=2)),
            ('--form similarity --margin -0.1 --reduction sum',
             step(train_contrastive.contrastive_similarity_loss, margin=-0.1, reduction='sum'))],
        recipes='''
        cub       adam   1e-4   1e-4 0    60  100   0  step     10 0.1  5  10   512 avg+max True   224  256  0.08 0
        cars      adam   1e-4   1e-4 0    60  100   0  step     10 0.1  5  10   512 avg+max True   224  256  0.08 0
        sop       adam   3e-5   1e-4 0    60  100   5  step     10 0.25 5  10   512 avg+max False  224  256  0.08 0
        inshop    adam   1e-4   1e-4 0    60  100   5  step     5  0.25 1  10   512 avg+max False  224  256  0.08 0''',
        settings=[
            ('cub', '', dict(form='distance', pos_margin=0, neg_margin=0.5, power=1, margin=0.5, reduction='mean')),
            ('folder', '', dict(neg_margin=0.5)), ('shapes', '', dict(neg_margin=1.0))],
        per_class=(2, 4, 4),
        no_effect=['--reduction sum', '--margin 0.1', '--form similarity --pos-margin 0.1',
                   '--form similarity --neg-margin 0.1', '--form similarity --power 2']),

    'train_ms': Case(
        losses={'ms': no_proxies(train_ms.multi_similarity_loss),
                'ms with miner': no_proxies(train_ms.multi_similarity_loss, epsilon=0.1)},
        steps=[
            ('--alpha 3 --beta 7 --lam 0.2 --epsilon 0.02',
             step(train_ms.multi_similarity_loss, alpha=3, beta=7, lam=0.2, epsilon=0.02)),
            ('--beta 2 --epsilon 0', step(train_ms.multi_similarity_loss, beta=2, epsilon=0.0)),
            ('--alpha 3 --epsilon off', step(train_ms.multi_similarity_loss, alpha=3))],
        recipes='''
        cub       adam   3e-5   5e-4 0    41  80    5  step     16 0.1  0  0    512 avg     True   227  256  0.16 0
        cars      adam   3e-5   5e-4 0    30  80    5  step     12 0.1  0  0    512 avg     True   227  256  0.16 0
        sop       adam   6e-4   1e-4 0    60  100   5  step     20 0.25 1  10   512 avg+max False  224  256  0.08 0
        inshop    adam   6e-4   1e-4 0    60  100   5  step     20 0.25 1  10   512 avg+max False  224  256  0.08 0''',
        settings=[
            ('shapes cub cars', '', dict(alpha=2, beta=50, lam=0.5, epsilon=0.1)),
            ('sop inshop', '', dict(alpha=17.97, beta=75.66, lam=0.77, epsilon=0.39))]),

    'train_proxy_anchor': Case(
        losses={'proxy_anchor': train_proxy_anchor.proxy_anchor_loss},
        steps=[('--alpha 5 --delta 0.3', step(train_proxy_anchor.proxy_anchor_loss, 'proxies', alpha=5, delta=0.3))],
        recipes='''
        cub       adamw  1e-4   1e-4 0    60  120   0  step     5  0.5  5  10   512 avg+max True   224  256  0.08 0
        cars      adamw  1e-4   1e-4 0    60  120   0  step     10 0.5  5  10   512 avg+max True   224  256  0.08 0
        sop       adamw  6e-4   1e-4 0    60  180   0  step     20 0.25 1  10   512 avg+max False  224  256  0.08 0
        inshop    adamw  6e-4   1e-4 0    60  180   0  step     20 0.25 1  10   512 avg+max False  224  256  0.08 0''',
        settings=[
            ('shapes folder', '', dict(alpha=32, delta=0.1, proxy_lr_mult=10)),
            ('cub cars sop inshop', '', dict(alpha=32, delta=0.1, proxy_lr_mult=100))],
        per_class=(0, 4, 1),
        shapes=(128, 10, 1),
        rates=[('', [0.01, 0.1]), ('--proxy-lr-mult 0.7', [0.01, 0.007])],
        starts=[('', 'proxies', (2 / 6) ** 0.5)]),

    'train_proxynca_pp': Case(
        losses={'proxynca_pp': train_proxynca_pp.proxynca_pp_loss, 'proxynca': train_proxynca_pp.proxynca_loss},
        steps=[
            ('--temperature 0.4', step(train_proxynca_pp.proxynca_pp_loss, 'proxies', temperature=0.4)),
            ('--loss proxynca --temperature 0.4',
             lambda x, y, t: train_proxynca_pp.proxynca_loss(embed(x), y, t['proxies'], 0.4) / len(y))],
        recipes='''
        cub       adam   4e-3   0    0    40  32    4  step     20 0.1  5  10   512 max     False  256  288  0.08 0
        cars      adam   4e-3   0    0    40  32    4  step     20 0.1  5  10   512 max     False  256  288  0.08 0
        sop       adam   2.4e-2 0    0    80  192   3  step     40 0.1  5  10   512 max     False  256  288  0.08 0
        inshop    adam   2.4e-2 0    0    80  192   3  constant 40 0.1  5  10   512 max     False  256  288  0.08 0''',
        settings=[
            ('shapes folder', '', dict(loss='proxynca_pp', temperature=1 / 9, proxy_lr_mult=10, eps=1e-8,
                                       optimizer='adamw', pool='max')),
            ('shapes cub', '--loss proxynca', dict(temperature=2)),
            ('cub', '--protocol reality-check --loss proxynca', dict(temperature=1 / 13.98)),
            ('cub cars inshop', '', dict(proxy_lr_mult=1e5, eps=1)), ('sop', '', dict(proxy_lr_mult=1e4, eps=1))],
        per_class=(0, 4, 1),
        no_effect=['--optimizer sgd --eps 1'],
        rates=[('--proxy-lr-mult 7', [0.01, 0.07])],
        starts=[('', 'proxies', 1 / 8)]),

    'train_ccl': Case(
        losses={
            'ccl': train_ccl.center_contrastive_loss,
            'ccl, margin and smoothing': partial(train_ccl.center_contrastive_loss, margin=0.2, smoothing=0.1),
            'ccl, proxynca': train_ccl.scaled_proxynca_loss,
            'ccl, center_loss': lambda z, y, p: train_ccl.center_loss(z, y, p, p[:, 0], p, lam=0.5, smoothing=0.1)},
        steps=[
            ('--s 5 --margin 0.2 --lam 0.7 --smoothing 0.3 --dropout 0.5',
             step(train_ccl.center_contrastive_loss, 'centers', dropout=0.5, s=5, margin=0.2, lam=0.7, smoothing=0.3)),
            ('--loss stop_grad --s 5 --margin 0.2 --lam 0.7 --smoothing 0.3', step(
                train_ccl.center_contrastive_loss, 'centers', s=5, margin=0.2, lam=0.7, smoothing=0.3, stop_grad=True)),
            ('--loss cluster --mu 1 --s 5 --margin 0.2 --lam 0.7 --smoothing 0.3',
             step(train_ccl.center_contrastive_loss, 'centers', s=5, margin=0.2, lam=0.7, smoothing=0.3)),
            ('--loss proxynca --s 5 --dropout 0.5',
             step(train_ccl.scaled_proxynca_loss, 'centers', dropout=0.5, s=5)),
            ('--loss center_loss --lam 0.7 --smoothing 0.3 --dropout 0.5', lambda x, y, t: train_ccl.center_loss(
                F.dropout(embed(x), 0.5), y, *t['classifier'].parameters(), t['centers'], 0.7, 0.3))],
        recipes='''
        cub       sgd    0.02   5e-4 0    30  128   0  cosine   10 0.5  0  0    512 avg     True   256  288  0.16 0.25
        cars      sgd    0.05   5e-4 0    100 128   0  cosine   10 0.5  0  0    512 avg     True   256  288  0.16 0.25
        sop       sgd    0.003  5e-4 0.99 100 128   0  cosine   10 0.5  0  0    512 avg     False  256  288  0.16 0
        inshop    sgd    0.006  5e-4 0.99 100 128   0  cosine   10 0.5  0  0    512 avg     False  256  288  0.16 0''',
        settings=[
            ('shapes', '', dict(s=16, margin=0, lam=2, smoothing=0.1, mu=0.9, dropout=0, pool='avg', loss='ccl')),
            ('shapes', '--loss center_loss', dict(lam=0.03)),
            ('cub', '--loss center_loss', dict(lam=0.03, lr=0.02)),
            ('cub', '--protocol reality-check --loss center_loss', dict(lam=0.03)),
            ('cub', '--protocol reality-check', dict(lam=2, center_lr_mult=4500)),
            ('cub cars', '', dict(dropout=0.2, smoothing=0.1, s=16, margin=0, lam=2)),
            ('sop inshop', '', dict(dropout=0))],
        per_class=(0, 0, 1),
        no_effect=['--loss cluster --center-lr-mult 2', '--loss center_loss --s 2',
                   '--loss center_loss --margin 0.1', '--loss proxynca --smoothing 0.2', '--mu 0.5',
                   '--loss stop_grad --mu 0.5', '--loss proxynca --lam 1'],
        rates=[('', [0.01, 0.01]), ('--loss center_loss --center-lr-mult 3', [0.01, 0.03])],
        starts=[('', 'centers', 1 / 20)]),

    'train_metrix': Case(
        losses={
            'metrix, contrastive, pos-neg': partial(metrix, 'contrastive', 'pos-neg'),
            'metrix, contrastive, anc-neg, sum': partial(metrix, 'contrastive', 'anc-neg', reduction='sum'),
            'metrix, ms, pos-neg, k = 2': partial(metrix, 'ms', 'pos-neg', k=2),
            'metrix, ms, anc-neg': partial(metrix, 'ms', 'anc-neg'),
            'metrix, ms, pos-pos': partial(metrix, 'ms', 'pos-pos'),
            'metrix, proxy_anchor, pos-neg': partial(metrix, 'proxy_anchor', 'pos-neg'),
            'metrix, proxy_anchor, anc-neg': partial(metrix, 'proxy_anchor', 'anc-neg'),
            'metrix, proxynca_pp': partial(metrix, 'proxynca_pp', 'anc-neg')},
        steps=[                                             # with mixup: see test_metrix.py
            ('--mixup none --epsilon off',
             step(train_ms.multi_similarity_loss, alpha=18, beta=75, lam=0.77)),
            ('--mixup none --gamma 2 --epsilon 0',
             step(train_ms.multi_similarity_loss, alpha=18, beta=2, lam=0.77, epsilon=0.0)),
            ('--mixup none --epsilon 0.02',
             step(train_ms.multi_similarity_loss, alpha=18, beta=75, lam=0.77, epsilon=0.02))],
        recipes='''
        cub       adamw  1e-4   1e-4 0    100 100   0  step     10 0.5  5  10   512 avg+max True   224  256  0.08 0
        cars      adamw  1e-4   1e-4 0    100 100   0  step     10 0.5  5  10   512 avg+max True   224  256  0.08 0
        sop       adamw  3e-5   1e-4 0    100 100   5  step     10 0.25 1  10   512 avg+max False  224  256  0.08 0
        inshop    adamw  1e-4   1e-4 0    100 100   5  step     10 0.25 1  10   512 avg+max False  224  256  0.08 0''',
        shapes=(96, 8, 0),
        settings=[
            ('shapes', '', dict(
                loss='ms', mixup=['feature'], pairs='both', hard_negatives='auto', alpha=2, strength=0.4, beta=18,
                gamma=75, m=0.77, epsilon=0.39, reduction='mean', proxy_alpha=32, delta=0.1, temperature=1 / 9)),
            ('shapes', '--loss proxy_anchor', dict(proxy_lr_mult=10)),
            ('cub', '--loss proxy_anchor', dict(proxy_lr_mult=100)),
            ('cub', '--protocol reality-check --loss proxy_anchor', dict(proxy_lr_mult=6000, m=0.77)),
            ('shapes folder', '--loss contrastive', dict(m=0.7)),
            ('cub', '--protocol reality-check --loss contrastive', dict(m=0.7)),
            ('cub cars', '--loss contrastive', dict(m=0.7, decay_rate=0.1)),
            ('sop', '--loss contrastive', dict(m=0.7, decay_rate=0.25, freeze_epochs=5)),
            ('inshop', '--loss contrastive', dict(m=0.7, decay_rate=0.25, freeze_epochs=1))],
        no_effect=['--loss proxynca_pp --epsilon 0.1', '--reduction sum', '--temperature 1',
                   '--loss contrastive --beta 3', '--loss proxy_anchor --m 0.2', '--mixup none --hard-negatives 2',
                   '--mixup none --alpha 1', '--mixup none --strength 1', '--strength 0 --alpha 1',
                   '--mixup none --pairs anc-neg', '--loss proxynca_pp --pairs anc-neg', '--proxy-lr-mult 3',
                   '--pairs pos-pos --hard-negatives 5'],
        rates=[('', [0.01]), ('--loss proxy_anchor', [0.01, 0.1]),
               ('--loss proxynca_pp --proxy-lr-mult 7', [0.01, 0.07])],
        starts=[('--loss proxy_anchor', 'proxies', (2 / 6) ** 0.5), ('--loss proxynca_pp', 'proxies', (2 / 6) ** 0.5)]),

    'train_hse': Case(
        losses={
            'hse, hybrids': hybrids,
            'hse, contrastive': no_proxies(train_hse.contrastive_loss),
            'hse, ms': no_proxies(train_hse.multi_similarity_loss),
            'hse, proxy_anchor': train_hse.proxy_anchor_loss,
            'hse, epshn': no_proxies(train_hse.epshn_loss),
            'hse, npair': no_proxies(train_hse.npair_loss)},
        steps=[
            ('--loss contrastive --alpha 3 --temperature 0.5 --kind mixup',
             hybrids_by_hand(train_hse.contrastive_loss, 3, 0.5, stay=6, kind='mixup', num=2, per_class=2)),
            ('--loss epshn --alpha 3 --kind gridmask --mask-size 31 --hybrids append --num 3',
             hybrids_by_hand(train_hse.epshn_loss, 3, 0.1, stay=8, kind='gridmask', mask_size=31, num=3, per_class=2)),
            ('--loss npair --alpha 3 --axis left-right --hybrids append --combinations 2',
             hybrids_by_hand(train_hse.npair_loss, 3, 0.1, stay=8, axis='left-right', num=2, per_class=2,
                             combinations=2)),
            ('--loss proxy_anchor', hybrids_by_hand(train_hse.proxy_anchor_loss, 2, 0.1, stay=6, num=2, per_class=2)),
            ('--batch-size 40 --combinations 2',    # of 8 images, the last two classes are dropped
             hybrids_by_hand(train_hse.multi_similarity_loss, 0.05, 0.1, stay=4, num=2, per_class=2, combinations=2)),
            ('--loss epshn --alpha 0', step(train_hse.epshn_loss))],
        recipes='''
        cub       adamw  1e-4   1e-4 0    60  80    5  step     10 0.5  5  10   512 avg+max True   224  256  0.08 0
        cars      adamw  1e-4   1e-4 0    60  80    5  step     10 0.5  5  10   512 avg+max True   224  256  0.08 0
        sop       adamw  3e-4   1e-4 0    60  120   5  step     10 0.25 1  10   512 avg+max False  224  256  0.08 0
        inshop    adamw  3e-4   1e-4 0    60  120   5  step     10 0.25 1  10   512 avg+max False  224  256  0.08 0''',
        settings=[
            ('shapes folder', '', dict(loss='ms', alpha=0.05, kind='cutmix', num=2, combinations=1, axis='top-bottom',
                                       mask_size=16, hybrids='replace')),
            ('shapes', '', dict(temperature=1)), ('folder cub cars sop inshop', '', dict(temperature=0.1)),
            ('cub', '', dict(alpha=0.05, mask_size=50)), ('inshop', '', dict(alpha=0.3)),
            ('sop', '', dict(alpha=0.3, hybrids='append', combinations=12)),
            ('shapes folder', '--loss proxy_anchor', dict(alpha=2, proxy_lr_mult=10)),
            ('cub cars', '--loss proxy_anchor', dict(alpha=2, batch_size=128, per_class=8, proxy_lr_mult=100)),
            ('sop', '--loss proxy_anchor', dict(alpha=2, batch_size=120, per_class=5, hybrids='append')),
            ('shapes', '--loss epshn', dict(alpha=0.1)), ('sop inshop', '--loss epshn', dict(alpha=1)),
            ('cub', '--loss epshn', dict(alpha=0.1, batch_size=128, per_class=8, hybrids='replace', combinations=1)),
            ('cars', '--loss epshn', dict(alpha=0.1, batch_size=128, per_class=16)),
            ('cub', '--loss npair', dict(alpha=0.1, dim=64, batch_size=128, per_class=8)),
            ('sop cars inshop', '--loss npair', dict(dim=64)),
            ('cub', '--loss contrastive', dict(alpha=0.1, per_class=8)),
            ('cub', '--protocol reality-check', dict(alpha=0.05)),
            ('cub', '--protocol reality-check --loss epshn', dict(alpha=0.1)),
            ('cub', '--protocol reality-check --loss proxy_anchor', dict(alpha=2, proxy_lr_mult=6000))],
        no_effect=['--alpha 0 --axis left-right', '--alpha 0 --kind gridmask', '--alpha 0 --num 3',
                   '--alpha 0 --combinations 2', '--alpha 0 --hybrids append', '--alpha 0 --temperature 1',
                   '--loss contrastive --proxy-lr-mult 3', '--loss epshn --proxy-lr-mult 3', '--mask-size 8',
                   '--kind mixup --axis left-right'],
        rates=[('--alpha 0 --per-class 0', [0.01]), ('--loss proxy_anchor --proxy-lr-mult 7', [0.01, 0.07])],
        starts=[('--loss proxy_anchor', 'proxies', (2 / 6) ** 0.5)]),
}


def each(field):
    """(script, *entry) for all entries of this field of all scripts, for pytest.mark.parametrize"""
    return [(script, *entry) for script, case in CASES.items() for entry in getattr(case, field)]
