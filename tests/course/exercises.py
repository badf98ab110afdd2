"""The exercises of the course: each is to write functions of the project. handout.py makes and grades them."""
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]


class Exercise(NamedTuple):
    script: str
    write: str          # functions that the student writes, and helpers that would reveal the solution
    graded: str         # the tests that are graded, as an expression for pytest -k
    week: int           # of the course, in README.md
    level: int          # 1: a formula. 2: also masks, means or special cases. 3: also memory, or many rules
    minutes: int        # for a second-year student
    source: str
    copies: dict = {}   # {script: functions that contain the same solution, and are stubbed out as well}
    tests: str = ''     # the test file, if it is not that of the script
    needs: str = ''     # functions of other exercises in this script that the graded tests call

    @property
    def test_file(self):
        return self.tests or f'tests/papers/{self.script.replace("train_", "test_")}'

    def stubbed(self, script):
        """The functions of a script that contain the solution"""
        return (f'{self.write} ' * (script == self.script) + self.copies.get(script, '')).split()


EXERCISES = {
    'utilization': Exercise('eval.py', 'utilization', 'metrix_eq12_', 1, 1, 20, 'Metrix Eq. (12)',
                            tests='tests/evaluation/test_metrics.py'),
    'retrieval_metrics': Exercise(
        'common.py', 'retrieval_metrics precisions',
        'rc_eq3_ or rc_eq4_ or test_retrieval_', 1, 3, 150,
        'Reality Check Eq. (3) and (4); R@K and three rules from the docstring',
        tests='tests/foundation/test_retrieval.py'),
    'sampler': Exercise(
        'common.py', 'BalancedSampler.__iter__', 'test_sampler_', 2, 2, 60, 'the docstring of the class',
        tests='tests/foundation/test_batches.py'),
    'contrastive_loss': Exercise(
        'train_contrastive.py', 'contrastive_loss mean_nonzero', 'rc_eq1_', 2, 2, 45, 'Reality Check Eq. (1)',
        {'train_hse.py': 'contrastive_loss'}),
    'contrastive_similarity_loss': Exercise(
        'train_contrastive.py', 'contrastive_similarity_loss', 'metrix_eq1_', 2, 2, 45, 'Metrix Eq. (1)',
        {'train_metrix.py': 'contrastive'}),
    'triplet_loss': Exercise(
        'train_triplet.py', 'triplet_loss', 'rc_eq2_', 3, 2, 60, 'Reality Check Eq. (2), in a separate script',
        tests='tests/course/test_triplet.py'),
    'multi_similarity_loss': Exercise(
        'train_ms.py', 'multi_similarity_loss mine', 'metrix_eq2_', 3, 2, 75,
        'Metrix Eq. (2); the miner from its docstring',
        {'train_metrix.py': 'ms clean_loss', 'train_hse.py': 'multi_similarity_loss'}),
    'embedder': Exercise(
        'common.py', 'Embedder.forward Embedder.head Embedder.project Embedder.pool_features', 'test_embedder_',
        4, 1, 30, 'the docstrings: pooling, linear head, L2 normalization', tests='tests/foundation/test_network.py'),
    'proxynca_loss': Exercise(
        'train_proxynca_pp.py', 'proxynca_loss', 'pa_eq1_ or pa_eq3_', 4, 1, 30,
        'Proxy-Anchor Eq. (1) and its gradient (3)', {'train_ccl.py': 'scaled_proxynca_loss'}),
    'proxy_anchor_loss': Exercise(
        'train_proxy_anchor.py', 'proxy_anchor_loss', 'pa_eq4_ or pa_eq6_', 4, 2, 60,
        'Proxy-Anchor Eq. (4) and its gradient (6)',
        {'train_metrix.py': 'proxy_anchor clean_loss', 'train_hse.py': 'proxy_anchor_loss'}),
    'proxynca_pp_loss': Exercise(
        'train_proxynca_pp.py', 'proxynca_pp_loss', 'test_proxynca_pp_', 5, 1, 30, 'ProxyNCA++, from its docstring',
        {'train_metrix.py': 'proxy_logits mixed_loss'}),
    'center_contrastive_loss': Exercise(
        'train_ccl.py', 'center_contrastive_loss', 'ccl_eq5_ or ccl_eq8_ or ccl_eq11_', 6, 2, 75,
        'CCL Eq. (5); (8) and (11) are special cases'),
    'labelled_loss': Exercise(
        'train_metrix.py', 'labelled_loss', 'metrix_eq7_ or metrix_eq9_over_', 7, 1, 30,
        'Metrix Eq. (7), which is (9) over mixed examples', needs='contrastive ms log1p_sum_exp proxy_anchor'),
    'ms': Exercise(
        'train_metrix.py', 'ms log1p_sum_exp', 'metrix_eq15_', 7, 2, 45, 'Metrix Eq. (15)',
        {'train_ms.py': 'multi_similarity_loss', 'train_hse.py': 'multi_similarity_loss'}),
    'mixed_pairs': Exercise('train_metrix.py', 'mixed_pairs', 'metrix_eq8_', 7, 3, 90,
                            'Metrix Eq. (8): pairs, lambda, labels and masks'),
    'positivity_threshold': Exercise('train_metrix.py', 'positivity_threshold', 'metrix_eq24_', 7, 1, 30,
                                     'Metrix Eq. (24)'),
    'mix_features': Exercise('train_metrix.py', 'mix_features', 'metrix_eq4_feature_', 7, 3, 90,
                             'Metrix Eq. (4), without a tensor of all mixed feature maps'),
    'hybrid_loss': Exercise('train_hse.py', 'hybrid_loss', 'hse_eq7_ or hse_eq8_ or hse_eq9_', 8, 2, 60,
                            'HSE Eq. (7), (8) and (9)', {'train_hse.py': 'epshn_loss'}),
    'epshn_loss': Exercise('train_hse.py', 'epshn_loss', 'test_epshn_', 8, 2, 60,
                           'its docstring; it is one L_m of HSE Eq. (10)', {'train_hse.py': 'hybrid_loss'}),
}
