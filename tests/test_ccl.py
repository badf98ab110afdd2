"""train_ccl.py against the equations of the Center Contrastive Loss paper."""
from math import cos, exp, log, radians, sin

import pytest
import torch
import torch.nn.functional as F
from conftest import on_circle, unit
from worked import expect, expect_gradients, expect_raised, moving

import common
import train_ccl
from train_ccl import center_contrastive_loss, center_loss, momentum_centers, scaled_proxynca_loss, smooth_labels

S = 16.0
IMAGES, LABELS, CENTERS = (0, 90), [0, 1], (60, 130, 270)
WHERE = 'of x at 0 (class 0), 90 degrees (class 1), and centres at 60, 130, 270, of length 5'


def images_and_centers():
    return on_circle(*IMAGES), torch.tensor(LABELS), 5 * on_circle(*CENTERS)


def contrast(image, label, s=S, margin=0.0):
    """First term of CCL Eq. (5) for an image at so many degrees"""
    scaled = [exp(s * (cos(radians(image - c)) - margin * (k == label))) for k, c in enumerate(CENTERS)]
    return -log(scaled[label] / sum(scaled))


def squared(degrees):
    """Squared distance of two points on the circle that are so many degrees apart, coordinate by coordinate"""
    return (1 - cos(radians(degrees))) ** 2 + cos(radians(90 - degrees)) ** 2


def four_by_three(seed=0):
    """Four unit embeddings of classes 0, 2, 2, 0 and three centres that are not of unit length."""
    return unit(4, seed=seed).requires_grad_(), torch.tensor([0, 2, 2, 0]), 3 * unit(3, seed=9 + seed).requires_grad_()


# ---- the loss and its two parts


def test_ccl_eq1_is_what_eq2_reduces_to():
    """InfoNCE of Eq. (1) with samples k in the place of centres: the centre term is all that is new."""
    tau, x, k = 1 / S, on_circle(10), on_circle(20, 100, 250)          # k_+ at 20 degrees
    infonce = -log(exp(cos(radians(10)) / tau) / sum(exp(cos(radians(d)) / tau) for d in (10, 90, 240)))
    expect(center_contrastive_loss(x, torch.tensor([0]), k, s=1 / tau, lam=0), infonce, 'CCL Eq. (1)')


def test_ccl_eq2_by_hand():
    loss = center_contrastive_loss(*images_and_centers(), lam=1)
    expect(loss, (contrast(0, 0) + contrast(90, 1) + squared(60) + squared(40)) / 2, f'CCL Eq. (2) {WHERE}')


def test_ccl_eq3_the_second_line_of_eq2_by_hand():
    """x at 0 degrees, its centre at 60: they are 1 apart."""
    x, y, centers = on_circle(0), torch.tensor([1]), 3 * on_circle(140, 60)
    both, alone = (center_contrastive_loss(x, y, centers, lam=lam) for lam in (5, 0))
    expect(both - alone, 5 * 1, 'CCL Eq. (3), times 5, of x at 0 and its centre at 60 degrees')


def test_ccl_eq4_is_linear_in_x():
    """2 - 2 c.x is the squared distance for unit x alone; for other x, as after dropout, it stays a line."""
    x, y, centers = on_circle(0, 0, 0), torch.tensor([0]), on_circle(60, 200)
    values = [center_contrastive_loss(k * x[:1], y, centers, s=1e-9, lam=1) - log(2) for k in (0, 1, 2)]
    expect(torch.stack(values), [2, 1, 0], 'CCL Eq. (4) of x at 0 degrees, 0, 1 and 2 long, its centre at 60', 1e-6)


@pytest.mark.parametrize('margin, lam', [(0, 2), (0.2, 0), (0.2, 1.5)])
def test_ccl_eq5_by_hand(margin, lam):
    loss = center_contrastive_loss(*images_and_centers(), S, margin, lam)
    expected = (contrast(0, 0, S, margin) + contrast(90, 1, S, margin) + lam * (squared(60) + squared(40))) / 2
    expect(loss, expected, f'CCL Eq. (5), first line, {WHERE}, s 16, margin {margin}, lambda {lam}', 1e-6)


def test_ccl_eq5_second_line():
    """The fraction as printed, whose numerator alone has exp(2 lambda c_y.x), drops the constant 2 lambda."""
    m, lam, printed = 0.2, 1.5, 0
    for image, label in zip(IMAGES, LABELS):
        own, *others = (cos(radians(image - c)) for c in (CENTERS[label], *CENTERS[:label], *CENTERS[label + 1:]))
        below = exp(S * (own - m)) + sum(exp(S * c) for c in others)
        printed -= log(exp(S * (own - m) + 2 * lam * own) / below) / 2
    loss = center_contrastive_loss(*images_and_centers(), S, m, lam)
    expect(loss, printed + 2 * lam, f'CCL Eq. (5), second line, plus 2 lambda, {WHERE}', 1e-6)


def test_ccl_eq5_closed_form_gradient():
    """s (softmax - 1) by the own cosine, s softmax by the others, and -2 lambda by the own one from the centre term"""
    (t, z), (u, c), margin = moving(*IMAGES), moving(*CENTERS), 0.1
    center_contrastive_loss(z, torch.tensor(LABELS), 5 * c, S, margin, lam=2.0).backward()
    by_s = []
    for image, own in zip(IMAGES, LABELS):
        scaled = [exp(S * (cos(radians(image - c)) - margin * (k == own))) for k, c in enumerate(CENTERS)]
        by_s.append([(S * (e / sum(scaled) - (k == own)) - 2 * 2 * (k == own)) / 2 for k, e in enumerate(scaled)])
    expect_gradients(by_s, f'CCL Eq. (5) {WHERE}, margin 0.1, lambda 2', 1e-5, images=t, centres=u)


def test_ccl_eq5_stop_grad():
    """The centre term alone moves centres, and only those of the batch; images have the same gradient as ever."""
    (t, z), (u, c), (same, x) = moving(*IMAGES), moving(*CENTERS), moving(*IMAGES)
    loss = center_contrastive_loss(z, torch.tensor(LABELS), 5 * c, lam=2.0, stop_grad=True)
    loss.backward()
    center_contrastive_loss(x, torch.tensor(LABELS), 5 * c.detach(), lam=2.0).backward()
    expect(loss, (contrast(0, 0) + contrast(90, 1)) / 2 + squared(60) + squared(40), f'CCL {WHERE}, stop_grad')
    expect(u.grad, [2 * sin(radians(60)), 2 * sin(radians(40)), 0],
           f'the derivatives by the angles of centres, CCL Eq. (5) {WHERE}, lambda 2, stop_grad')
    expect(t.grad, same.grad, 'those of the images, with and without stop_grad')


def test_ccl_eq5_smoothing():
    """0.8 for the own class and 0.1 for each other one; torch would give 0.0667 to all three. The centre term stays."""
    loss = center_contrastive_loss(*images_and_centers(), lam=2, smoothing=0.2)
    expected = 0
    for image, own in zip(IMAGES, LABELS):
        expected += sum((0.8 if k == own else 0.1) * contrast(image, k) for k in range(3)) / 2
    expect(loss, expected + 2 * (squared(60) + squared(40)) / 2, f'CCL Eq. (5) {WHERE}, lambda 2, smoothing 0.2', 1e-6)


def test_ccl_eq5_without_overflow():
    """With s = 1,000: perfect, and as bad as can be, with logits 2,000 apart and centres 2 away"""
    y = torch.tensor([0, 1])
    for degrees, expected in ((0, 180), 0), ((180, 0), 2000 + 2 * 2 ** 2):
        loss = center_contrastive_loss(on_circle(*degrees), y, on_circle(0, 180), s=1000, lam=2)
        expect(loss, expected, f'CCL Eq. (5) of x at {degrees}, their centres at (0, 180), s 1,000, lambda 2')


def test_ccl_eq5_in_half_precision():
    """The tolerance is that of x: of half precision, it is not quite of unit length."""
    z, y, centers = images_and_centers()
    expect_raised(lambda z, centers: center_contrastive_loss(z, y, centers, smoothing=0.1, margin=0.1), 'CCL Eq. (5)',
                  z, centers, tolerance=5e-3)


# ---- what the paper compares with


def test_ccl_eq6_cross_entropy_in_value_and_gradient():
    x = torch.tensor([[2.0, -1.0]], dtype=torch.float64, requires_grad=True)         # length left as it is
    weight = torch.tensor([[1.0, 0], [0, 1], [1, 1]], dtype=torch.float64)
    bias = torch.tensor([0.5, 0, -0.5], dtype=torch.float64)
    scores = [2.5, -1.0, 0.5]
    p = [exp(t) / sum(map(exp, scores)) for t in scores]
    loss = center_loss(x, torch.tensor([0]), weight, bias, torch.zeros(3, 2), lam=0)
    loss.backward()
    expect(loss, -log(p[0]), 'CCL Eq. (6)')
    expect(x.grad, [[(p[0] - 1) * 1 + p[2] * 1, p[1] * 1 + p[2] * 1]], 'the gradient of CCL Eq. (6), W^T (p - q)')


def test_ccl_eq7_adds_the_distance_to_centres_of_any_length():
    z, y, centers = four_by_three()
    z, weight, bias = 3 * z, torch.randn(3, 6, dtype=torch.float64), torch.randn(3, dtype=torch.float64)
    distance = sum((z[i] - centers[y[i]]).norm() ** 2 for i in range(4)) / 4
    loss = center_loss(z, y, weight, bias, centers, lam=0.5)
    expect(loss, F.cross_entropy(z @ weight.T + bias, y) + 0.5 * distance, 'CCL Eq. (7)')
    by_center, = torch.autograd.grad(loss, centers)
    expect(by_center[0], 0.5 * 2 * (2 * centers[0] - z[0] - z[3]) / 4, 'its gradient by a centre')
    expect(by_center[1], torch.zeros(6), 'the gradient of CCL Eq. (7) by the centre of an absent class')


@pytest.mark.parametrize('s', [16.0, 3.0])
def test_ccl_eq8_nsoftmax_is_lambda_and_margin_zero(s):
    loss = center_contrastive_loss(*images_and_centers(), s, margin=0, lam=0)
    expect(loss, (contrast(0, 0, s) + contrast(90, 1, s)) / 2, f'CCL Eq. (8) {WHERE}, s {s}')


def test_ccl_eq9_by_hand():
    x, centers = on_circle(0), 2 * on_circle(60, 90, 180)
    expected = -log(exp(S * cos(radians(60))) / (exp(0) + exp(-S)))
    expect(scaled_proxynca_loss(x, torch.tensor([0]), centers), expected,
           'CCL Eq. (9) of x at 0, centres at 60, 90, 180')


def by_similarity(similarities, loss, **options):
    """Value and gradient of a loss by S(x, c_0), S(x, c_1), ... for an x of class 0. With the axes of the space as
    centres and s = 1, an x that has the S as its coordinates has them as its similarities."""
    x = torch.tensor([similarities], dtype=torch.float64, requires_grad=True)
    value = loss(x, torch.tensor([0]), torch.eye(len(similarities), dtype=torch.float64), s=1.0, **options)
    return value, torch.autograd.grad(value, x)[0][0]


def test_ccl_eq9_gradient_is_minus_one_at_the_own_class():
    """However close x is; at the others it is a softmax over the others."""
    similarities = [5.0, 1.0, -2.0, 0.5]
    total = sum(exp(t) for t in similarities[1:])
    expect(by_similarity(similarities, scaled_proxynca_loss)[1], [-1] + [exp(t) / total for t in similarities[1:]],
           'the gradient of CCL Eq. (9)')


def test_ccl_eq10_value_and_both_gradients():
    """The second case with its numerator corrected: exp(S(x,c) - S(x,c_y)), not exp(S(x,c))."""
    similarities = [1.0, 0.3, -2.0, 1.5]
    excess = [exp(t - 1.0) for t in similarities[1:]]
    value, gradient = by_similarity(similarities, center_contrastive_loss, lam=0)
    expect(value, log(1 + sum(excess)), 'CCL Eq. (10)')
    expect(gradient, [-sum(excess) / (1 + sum(excess)), *(e / (1 + sum(excess)) for e in excess)], 'its gradient')


def test_ccl_eq11_margin():
    """Eq. (11) takes its m from the scaled similarity, so it is s times the margin on the cosine: here 16 x 0.2."""
    loss = center_contrastive_loss(*images_and_centers(), margin=0.2, lam=0)
    expected = 0
    for image, own in zip(IMAGES, LABELS):
        scaled = [exp(S * cos(radians(image - c)) - 3.2 * (k == own)) for k, c in enumerate(CENTERS)]
        expected -= log(scaled[own] / sum(scaled)) / 2
    expect(loss, expected, f'CCL Eq. (11) {WHERE}, s 16, margin 0.2', 1e-6)


def test_the_margin_is_as_exact_as_the_embeddings():
    loss = center_contrastive_loss(*images_and_centers(), margin=0.2, lam=0)
    expect(loss, (contrast(0, 0, S, 0.2) + contrast(90, 1, S, 0.2)) / 2, 'CCL in float64', 1e-12)


@pytest.mark.parametrize('margin', [0, 0.3])
@pytest.mark.parametrize('seed', range(3))
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
    expect(moved[0], 0.9 * before[0] + 0.1 * (z[0] + z[3]) / 2, 'CCL Eq. (14), mu 0.9, a class of two images')
    expect(moved[2], 0.9 * before[2] + 0.1 * (z[1] + z[2]) / 2, 'CCL Eq. (14), mu 0.9, a class of two images')
    assert torch.equal(moved[1], before[1]), 'class 1 is not in the batch'
    assert torch.equal(centers, before), 'new centres, the old ones untouched'


def test_ccl_eq14_is_a_gradient_step_on_the_centre_term():
    """Section 3.3.6: the direction of the running mean is that of SGD on ||x - c||^2, mu = 1 - 2 lr."""
    z, y, centers = four_by_three()
    classifier = torch.zeros(3, 6, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
    loss = center_loss(z, y, *classifier, centers, lam=1)
    lr = 0.05
    # the loss is a mean over 4 images, a centre's gradient over the 2 of its class: twice the rate
    descended = centers - 2 * lr * torch.autograd.grad(loss, centers)[0]
    expect(descended, momentum_centers(centers, z, y, mu=1 - 2 * lr), 'CCL Eq. (14) against a step of SGD')


def test_smoothed_labels_sum_to_one():
    q = smooth_labels(torch.tensor([2, 0]), 5, 0.1, torch.float64)
    expect(q[0], [0.1 / 4, 0.1 / 4, 1 - 0.1, 0.1 / 4, 0.1 / 4], 'smoothed labels of class 2 of 5')
    expect(q.sum(dim=1), [1, 1], 'their sum')
    assert smooth_labels(torch.tensor([0]), 1, 0.1).tolist() == [[1]]


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
    assert torch.equal(one.data.query.labels, before_training(train_ccl).data.query.labels), 'the test set stays'


@pytest.mark.parametrize('noise', ['pink:0.3', 'symmetric', 'symmetric:1', 'longtail:-0.1', 'symmetric:nan', ''])
def test_other_noise_is_refused(noise):
    with pytest.raises(common.UsageError, match='argument --label-noise'):
        train_ccl.get_args(['--label-noise', noise])


def test_centres_that_could_not_move_are_refused():
    with pytest.raises(common.UsageError, match='--lam 0: the centres would never move'):
        train_ccl.get_args(['--variant', 'stop_grad', '--lam', '0'])


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
    assert held.model.config['head_init'] == 'default', 'as torch has it'
    z = held.model.eval()(torch.rand(4, 3, 32, 32))
    assert not torch.allclose(z.norm(dim=1), torch.ones(4), atol=1e-3)
    network, centers = (group['params'] for group in held.optimizer.param_groups)
    assert len(centers) == 1 and centers[0] is held.learned['centers']
    assert all(any(p is q for q in network) for p in held.learned['classifier'].parameters())
    assert held.args.lam == 0.03, 'raw embeddings are far from their centres'


def test_classifier_and_centres_are_in_the_checkpoint(run, small):
    run(train_ccl, '--variant', 'center_loss', '--name', 'x')
    assert set(common.read_checkpoint('runs/x')['learned']) == {'centers', 'classifier.weight', 'classifier.bias'}
