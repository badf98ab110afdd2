"""train_ccl.py against the equations of the Center Contrastive Loss paper."""
from math import cos, exp, log, pi

import pytest
import torch
import torch.nn.functional as F
from conftest import on_circle

import common
import train_ccl
from train_ccl import center_contrastive_loss, center_loss, momentum_centers, proxynca_loss, smooth_labels

S = 16.0


def four_by_three(seed=0):
    """Four unit embeddings of classes 0, 2, 2, 0 and three centres that are not of unit length."""
    generator = torch.Generator().manual_seed(seed)
    z = F.normalize(torch.randn(4, 5, generator=generator, dtype=torch.float64), dim=1)
    centers = 3 * torch.randn(3, 5, generator=generator, dtype=torch.float64)
    return z.requires_grad_(), torch.tensor([0, 2, 2, 0]), centers.requires_grad_()


def gradients(loss, *inputs):
    return torch.autograd.grad(loss, inputs, retain_graph=True, allow_unused=True)


def by_similarity(similarities, label, loss=center_contrastive_loss, **kw):
    """Value and gradient of L_contrast (or of another loss) by S(x, c_0), S(x, c_1), ...

    With the axes of the space as centres and s = 1, an x that has the S as its coordinates has
    them as its similarities.
    """
    x = torch.tensor([similarities], dtype=torch.float64, requires_grad=True)
    axes = torch.eye(len(similarities), dtype=torch.float64)
    value = loss(x, torch.tensor([label]), axes, s=1.0, **kw)
    return value.item(), gradients(value, x)[0][0].tolist()


# ---- the loss and its two parts

def test_ccl_eq1_is_what_eq2_reduces_to():
    """InfoNCE of Eq. (1) with samples k in the place of centres: the centre term is all that is new."""
    tau, x, k = 1 / S, on_circle(10), on_circle(20, 100, 250)          # k_+ at 20 degrees
    infonce = -log(exp(cos(pi * 10 / 180) / tau)
                   / sum(exp(cos(pi * d / 180) / tau) for d in (10, 90, 240)))
    assert center_contrastive_loss(x, torch.tensor([0]), k, s=1 / tau, lam=0).item() == pytest.approx(infonce)


def test_ccl_eq2_by_hand():
    """x at 0 and 90 degrees, centres at 60 (class 0), 150 (class 1) and 270 (class 2)."""
    x, centers, y = on_circle(0, 90), 5 * on_circle(60, 150, 270), torch.tensor([0, 1])
    c60, c30 = cos(pi / 3), cos(pi / 6)
    contrast = [-log(exp(S * c60) / (exp(S * c60) + exp(-S * c30) + exp(0))),
                -log(exp(S * c60) / (exp(S * c30) + exp(S * c60) + exp(-S)))]
    center = [(1 - c60) ** 2 + c30 ** 2, c30 ** 2 + (1 - c60) ** 2]      # coordinate by coordinate
    assert center_contrastive_loss(x, y, centers, lam=0).item() == pytest.approx(sum(contrast) / 2)
    both = center_contrastive_loss(x, y, centers, lam=1).item()
    assert both == pytest.approx((sum(contrast) + sum(center)) / 2)


def test_ccl_eq3_the_second_line_of_eq2_by_hand():
    """x at 0 degrees, its centre at 60: they are 1 apart."""
    x, y, centers = on_circle(0), torch.tensor([1]), 3 * on_circle(140, 60)
    both, contrast = (center_contrastive_loss(x, y, centers, lam=lam).item() for lam in (5, 0))
    assert both - contrast == pytest.approx(5 * 1)


def test_ccl_eq4_squared_distance_in_value_and_gradient():
    raw, y, centers = four_by_three()
    x, c = F.normalize(raw, dim=1), F.normalize(centers, dim=1)
    euclidean = (x - c[y]).square().sum(dim=1).mean()
    ours = center_contrastive_loss(x, y, centers, lam=1) - center_contrastive_loss(x, y, centers, lam=0)
    assert torch.allclose(ours, euclidean)
    # trap: by x itself the two differ along x (2x - 2c against -2c); by what x is normalised from, not
    for one, other in zip(gradients(ours, raw, centers), gradients(euclidean, raw, centers)):
        assert torch.allclose(one, other, atol=1e-12)


@pytest.mark.parametrize('margin, lam', [(0, 0), (0, 2), (0.2, 0), (0.2, 1.5)])
def test_ccl_eq5_to_the_constant(margin, lam):
    """The fraction as printed, plus 2 lambda: in value, and so in gradient."""
    z, y, centers = four_by_three()
    c = F.normalize(centers, dim=1)
    rows = []
    for x, label in zip(z, y):
        own = (S * (c[label] @ x - margin)).exp()
        others = sum((S * c[j] @ x).exp() for j in range(3) if j != label)
        rows.append(-((S * (c[label] @ x - margin) + 2 * lam * c[label] @ x).exp() / (own + others)).log())
    printed = sum(rows) / 4
    ours = center_contrastive_loss(z, y, centers, S, margin, lam)
    assert ours.item() == pytest.approx((printed + 2 * lam).item(), abs=1e-12)
    for one, other in zip(gradients(ours, z, centers), gradients(printed, z, centers)):
        assert torch.allclose(one, other, atol=1e-12)


def test_ccl_eq5_center_term_is_outside_the_softmax():
    z, y, centers = four_by_three()
    cosine = z @ F.normalize(centers, dim=1).T
    inside = F.cross_entropy(S * cosine + 4 * cosine * F.one_hot(y, 3), y) + 4
    assert not torch.allclose(center_contrastive_loss(z, y, centers, lam=2), inside, atol=0.1)


def test_ccl_eq5_is_contrast_plus_lambda_center_under_smoothing_too():
    """The centre term is never smoothed: its weight stays lambda, not (1 - epsilon) lambda."""
    z, y, centers = four_by_three()
    center = (z - F.normalize(centers, dim=1)[y]).square().sum(dim=1).mean()
    without = center_contrastive_loss(z, y, centers, margin=0.1, lam=0, smoothing=0.1)
    assert torch.allclose(center_contrastive_loss(z, y, centers, S, 0.1, 2.0, 0.1), without + 2 * center)


def test_loss_is_zero_at_best_on_unit_embeddings():
    y = torch.tensor([0, 1])
    perfect = center_contrastive_loss(on_circle(0, 180), y, on_circle(0, 180), s=100)
    assert 0 <= perfect.item() < 1e-12
    worst = center_contrastive_loss(on_circle(180, 0), y, on_circle(0, 180), s=100, lam=2)
    assert worst.item() == pytest.approx(200 + 2 * 2 ** 2), 'logits 200 apart, and centres 2 away'


# ---- what the paper compares with

def test_ccl_eq6_cross_entropy_in_value_and_gradient():
    x = torch.tensor([[2.0, -1.0]], dtype=torch.float64, requires_grad=True)         # length left as it is
    weight = torch.tensor([[1.0, 0], [0, 1], [1, 1]], dtype=torch.float64)
    bias = torch.tensor([0.5, 0, -0.5], dtype=torch.float64)
    scores = [2.5, -1.0, 0.5]
    p = [exp(t) / sum(map(exp, scores)) for t in scores]
    loss = center_loss(x, torch.tensor([0]), weight, bias, torch.zeros(3, 2), lam=0)
    assert loss.item() == pytest.approx(-log(p[0]))
    expected = [(p[0] - 1) * 1 + p[2] * 1, p[1] * 1 + p[2] * 1]                      # W^T (p - q)
    assert gradients(loss, x)[0][0].tolist() == pytest.approx(expected)


def test_ccl_eq7_adds_the_distance_to_centres_of_any_length():
    z, y, centers = four_by_three()
    z = (3 * z).detach().requires_grad_()
    weight, bias = torch.randn(3, 5, dtype=torch.float64), torch.randn(3, dtype=torch.float64)
    entropy = F.cross_entropy(z @ weight.T + bias, y)
    loss = center_loss(z, y, weight, bias, centers, lam=0.5)
    distance = sum((z[i] - centers[y[i]]).norm() ** 2 for i in range(4)) / 4
    assert torch.allclose(loss, entropy + 0.5 * distance)
    by_center, = gradients(loss, centers)
    assert torch.allclose(by_center[0], 0.5 * 2 * (2 * centers[0] - z[0] - z[3]) / 4)
    assert torch.equal(by_center[1], torch.zeros_like(by_center[1])), 'an absent class, and no softmax'


def test_ccl_eq8_nsoftmax_is_lambda_and_margin_zero():
    z, y, centers = four_by_three()
    nsoftmax = F.cross_entropy(S * z @ F.normalize(centers, dim=1).T, y)
    ours = center_contrastive_loss(z, y, centers, S, margin=0, lam=0)
    assert torch.allclose(ours, nsoftmax)
    for one, other in zip(gradients(ours, z, centers), gradients(nsoftmax, z, centers)):
        assert torch.allclose(one, other)


def test_ccl_eq9_by_hand():
    x, centers = on_circle(0), 2 * on_circle(60, 90, 180)
    expected = -log(exp(S * cos(pi / 3)) / (exp(0) + exp(-S)))
    assert proxynca_loss(x, torch.tensor([0]), centers).item() == pytest.approx(expected)


def test_ccl_eq9_gradient_is_minus_one_at_the_own_class():
    """However close x is; at the others it is a softmax over the others."""
    similarities = [5.0, 1.0, -2.0, 0.5]
    _, gradient = by_similarity(similarities, 0, proxynca_loss)
    total = sum(exp(t) for t in similarities[1:])
    assert gradient == pytest.approx([-1] + [exp(t) / total for t in similarities[1:]])


def test_ccl_eq10_value_and_both_gradients():
    """The second case with its numerator corrected: exp(S(x,c) - S(x,c_y)), not exp(S(x,c))."""
    similarities = [1.0, 0.3, -2.0, 1.5]
    excess = sum(exp(t - 1.0) for t in similarities[1:])
    value, gradient = by_similarity(similarities, 0, lam=0)
    assert value == pytest.approx(log(1 + excess))
    assert gradient[0] == pytest.approx(-excess / (1 + excess)), 'c = c_y'
    assert gradient[1:] == pytest.approx([exp(t - 1.0) / (1 + excess) for t in similarities[1:]]), 'c != c_y'
    assert sum(gradient) == pytest.approx(0, abs=1e-12)


def test_ccl_eq10_limits_of_the_gradient():
    """The bullets of Section 3.3.4, with s = 16 in the similarities: towards 0, and towards -1."""
    _, gradient = by_similarity([S, 0, 0, 0], 0, lam=0)                # near its own centre, far from others
    assert gradient[0] == pytest.approx(-3 * exp(-S), rel=1e-5) and abs(gradient[0]) < 1e-6
    _, gradient = by_similarity([0, S, S, S], 0, lam=0)                # the other way round
    assert gradient[0] == pytest.approx(-1, abs=1e-6)


def test_ccl_eq11_margin_in_value_and_gradient():
    """Eq. (11) takes m from the scaled similarity: s times the margin on the cosine."""
    similarities, m = [1.0, 0.3, -2.0, 1.5], 0.7
    excess = [exp(t - (1.0 - m)) for t in similarities[1:]]
    value, gradient = by_similarity(similarities, 0, margin=m, lam=0)
    assert value == pytest.approx(log(1 + sum(excess)))
    others = [e / (1 + sum(excess)) for e in excess]
    assert gradient == pytest.approx([-sum(others), *others])
    z, y, centers = four_by_three()
    cosine = z @ F.normalize(centers, dim=1).T
    shifted = F.cross_entropy(S * cosine - S * 0.2 * F.one_hot(y, 3), y)
    ours = center_contrastive_loss(z, y, centers, S, margin=0.2, lam=0)
    assert torch.allclose(ours, shifted), 'm = s * margin'


@pytest.mark.parametrize('margin', [0, 0.3])
@pytest.mark.parametrize('seed', range(5))
def test_ccl_eq12_and_eq13_bounds(seed, margin):
    """max <= L_contrast <= max + log N, the maximum over 0 and the N - 1 violations Delta_j."""
    z, y, centers = four_by_three(seed)
    for x, label in zip(z, y):
        similarity = S * F.normalize(centers, dim=1) @ x
        delta = (similarity - similarity[label] + S * margin).tolist()
        delta[label] = 0.0
        loss = center_contrastive_loss(x[None], label[None], centers, S, margin, lam=0).item()
        # Eq. (12) for the sum that the loss is the logarithm of, Eq. (13) for the loss itself
        assert exp(max(delta)) * (1 - 1e-9) <= exp(loss) <= 3 * exp(max(delta)) * (1 + 1e-9)
        assert max(delta) - 1e-9 <= loss <= max(delta) + log(3) + 1e-9


def test_ccl_eq14_moves_the_centres_of_the_classes_present():
    z, y, centers = four_by_three()
    before = centers.detach().clone()
    moved = momentum_centers(centers.detach(), z.detach(), y, mu=0.9)
    assert torch.allclose(moved[0], 0.9 * before[0] + 0.1 * (z[0] + z[3]) / 2)
    assert torch.allclose(moved[2], 0.9 * before[2] + 0.1 * (z[1] + z[2]) / 2)
    assert torch.equal(moved[1], before[1]), 'class 1 is not in the batch'
    assert torch.equal(centers, before), 'new centres, the old ones untouched'


def test_ccl_eq14_is_a_gradient_step_on_the_centre_term():
    """Section 3.3.6: the direction of the running mean is that of SGD on ||x - c||^2, mu = 1 - 2 lr."""
    z, y, centers = four_by_three()
    classifier = torch.zeros(3, 5, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
    loss = center_loss(z, y, *classifier, centers, lam=1)
    lr = 0.05
    # the loss is a mean over 4 images, a centre's gradient over the 2 of its class: twice the rate
    descended = centers - 2 * lr * gradients(loss, centers)[0]
    assert torch.allclose(descended, momentum_centers(centers, z, y, mu=1 - 2 * lr))


# ---- who gets a gradient

def test_absent_classes_are_moved_by_the_softmax_only():
    z, y, centers = four_by_three()                                     # class 1 is absent
    contrast, = gradients(center_contrastive_loss(z, y, centers, lam=0), centers)
    both, = gradients(center_contrastive_loss(z, y, centers, lam=2), centers)
    assert contrast[1].abs().max() > 1e-4, 'the softmax pushes every centre'
    assert torch.allclose((both - contrast)[1], torch.zeros(5, dtype=torch.float64), atol=1e-15)
    assert (both - contrast)[0].abs().max() > 1e-4, 'the centre term pulls those of the batch'


def test_stop_grad_cuts_the_contrast_off_the_centres_and_nothing_else():
    z, y, centers = four_by_three()

    def both(**kw):
        loss = center_contrastive_loss(z, y, centers, margin=0.1, smoothing=0.1, **kw)
        return loss, *gradients(loss, z, centers)
    full, no_contrast, contrast = both(), both(stop_grad=True), both(lam=0)
    assert torch.equal(full[0], no_contrast[0]) and torch.allclose(full[1], no_contrast[1])
    assert torch.equal(both(stop_grad=True, lam=0)[2], torch.zeros_like(centers))
    assert torch.allclose(no_contrast[2], full[2] - contrast[2]), 'what is left is the centre term'


# ---- label smoothing

def test_smoothed_labels_sum_to_one():
    q = smooth_labels(torch.tensor([2, 0]), 5, 0.1, torch.float64)
    assert q[0].tolist() == pytest.approx([0.1 / 4, 0.1 / 4, 1 - 0.1, 0.1 / 4, 0.1 / 4])
    assert q.sum(dim=1).tolist() == pytest.approx([1, 1])
    assert smooth_labels(torch.tensor([0]), 1, 0.1).tolist() == [[1]]


def test_smoothing_is_not_that_of_torch():
    """torch gives epsilon / C to all C classes: the same as ours for epsilon (C - 1) / C."""
    z, y, centers = four_by_three()
    logits = S * z @ F.normalize(centers, dim=1).T
    ours = center_contrastive_loss(z, y, centers, lam=0, smoothing=0.2)
    assert torch.allclose(ours, F.cross_entropy(logits, y, label_smoothing=0.2 * 3 / 2))
    assert not torch.allclose(ours, F.cross_entropy(logits, y, label_smoothing=0.2), atol=0.01)


# ---- the script


def test_new_centers_have_length_1():
    assert torch.allclose(train_ccl.new_centers(7, 5).norm(dim=1), torch.ones(7))


def test_symmetric_noise_moves_its_share_of_the_images_to_other_classes():
    clean = torch.arange(20).repeat_interleave(30)
    noisy = train_ccl.corrupt_labels(clean, 'symmetric:0.25', torch.Generator().manual_seed(1))
    assert (noisy != clean).float().mean() == 0.25 and int(noisy.max()) == 19
    assert len(noisy[noisy != clean].unique()) == 20, 'drawn from all other classes'
    assert torch.equal(noisy, train_ccl.corrupt_labels(clean, 'symmetric:0.25', torch.Generator().manual_seed(1)))


def test_longtail_noise_dissolves_classes_into_clusters_of_five():
    clean = torch.arange(20).repeat_interleave(30)
    noisy = train_ccl.corrupt_labels(clean, 'longtail:0.25', torch.Generator().manual_seed(1))
    assert int(noisy.max()) + 1 == 15
    gone = [c for c in range(20) if len(noisy[clean == c].unique()) > 1]
    assert len(gone) == 5
    for c in gone:
        assert all(len(cluster.unique()) == 1 for cluster in noisy[clean == c].split(5))
    kept = [noisy[clean == c][0].item() for c in range(20) if c not in gone]
    assert sorted(kept) == list(range(15)), 'what remains keeps its class'


def test_longtail_noise_leaves_two_classes():
    noisy = train_ccl.corrupt_labels(torch.arange(40) // 4, 'longtail:0.99', torch.Generator().manual_seed(1))
    assert noisy.unique().tolist() == [0, 1]


def test_the_noise_is_that_of_the_seed_and_dissolved_classes_have_no_centre(before_training):
    flags = '--label-noise', 'longtail:0.4', '--seed'
    one, same, other = (before_training(train_ccl, *flags, seed) for seed in '556')
    assert torch.equal(one.data.train.labels, same.data.train.labels)
    assert not torch.equal(one.data.train.labels, other.data.train.labels)
    assert len(one.learned['centers']) == one.data.train.num_classes == 4, 'of six'


def test_the_head_starts_as_torch_has_it(before_training):
    assert before_training(train_ccl).model.config['head_init'] == 'default'


@pytest.mark.parametrize('noise', ['pink:0.3', 'symmetric', 'symmetric:1', 'longtail:-0.1', 'symmetric:nan', ''])
def test_other_noise_is_refused(noise):
    with pytest.raises(common.UsageError, match='argument --label-noise'):
        train_ccl.get_args(['--label-noise', noise])


def test_label_noise_reaches_the_training_set_alone(before_training):
    clean = before_training(train_ccl).data
    noisy = before_training(train_ccl, '--label-noise', 'symmetric:0.5').data
    assert (noisy.train.labels != clean.train.labels).float().mean() == 0.5
    assert torch.equal(noisy.query.labels, clean.query.labels)


@pytest.mark.parametrize('flags', [
    '--variant proxynca --lam 1', '--variant center_loss --margin 0.1', '--mu 0.5', '--smoothing 1', '--s 0',
    '--s nan', '--lam -1', '--margin -0.1', '--variant stop_grad --lam 0'])
def test_what_a_variant_does_not_read_or_is_not_defined_for_is_refused(flags):
    with pytest.raises(common.UsageError):
        train_ccl.get_args(flags.split())


@pytest.mark.parametrize('momentum', [0.0, 0.9])
def test_nesterov_only_with_momentum(before_training, momentum):
    held = before_training(train_ccl, '--optimizer', 'sgd', '--momentum', str(momentum))
    assert all(group['nesterov'] == (momentum > 0) for group in held.optimizer.param_groups)


def test_centres_have_a_rate_of_their_own(before_training):
    for flags, times in ('', 1), ('--center-lr-mult 4500', 4500):
        held = before_training(train_ccl, *flags.split())
        network, centers = held.optimizer.param_groups
        assert centers['lr'] == times * network['lr'] and centers['params'][0] is held.learned['centers']


def test_dropout_is_in_the_step_and_not_in_the_model(before_training):
    images, labels = torch.rand(8, 3, 32, 32), torch.arange(8) % 4
    for dropout in '0', '0.5':
        held = before_training(train_ccl, '--dropout', dropout)
        held.model.eval()                              # BatchNorm fixed: only dropout is random
        with torch.no_grad():
            assert torch.equal(held.model(images), held.model(images))
            assert torch.equal(held.step(images, labels), held.step(images, labels)) == (dropout == '0')


def test_cluster_centres_are_running_means_without_a_gradient(before_training):
    # of embeddings as they are: dropout is for the loss alone
    held = before_training(train_ccl, '--variant', 'cluster', '--mu', '0.5', '--dropout', '0.5')
    images, labels = torch.rand(8, 3, 32, 32), torch.arange(8) % 2
    centers = held.learned['centers']
    before, z = centers.clone(), held.model.eval()(images).detach()
    held.step(images, labels).backward()               # the update in place spoils no graph
    assert not centers.requires_grad and torch.equal(before[2:], centers[2:]), 'absent classes stay'
    for c in (0, 1):
        assert torch.allclose(centers[c], (before[c] + z[labels == c].mean(dim=0)) / 2, atol=1e-6)


def test_center_loss_trains_raw_embeddings_a_classifier_and_centres(before_training):
    held = before_training(train_ccl, '--variant', 'center_loss')
    z = held.model.eval()(torch.rand(4, 3, 32, 32))
    assert not torch.allclose(z.norm(dim=1), torch.ones(4), atol=1e-3)
    network, centers = (group['params'] for group in held.optimizer.param_groups)
    assert len(centers) == 1 and centers[0] is held.learned['centers']
    assert all(any(p is q for q in network) for p in held.learned['classifier'].parameters())
    assert held.args.lam == 0.03, 'raw embeddings are far from their centres'


def test_classifier_and_centres_are_in_the_checkpoint(run, small):
    run(train_ccl, '--variant', 'center_loss', '--name', 'x')
    assert set(common.read_checkpoint('runs/x')['learned']) == {'centers', 'classifier.weight', 'classifier.bias'}
