"""train_ccl.py against the equations of the Center Contrastive Loss paper."""
from functools import partial
from math import cos, exp, log, radians, sin

import pytest
import torch
import torch.nn.functional as F
from conftest import on_circle, unit
from worked import expect, expect_gradients, expect_sound, moving

import common
import train_ccl
from train_ccl import center_contrastive_loss, center_loss, momentum_centers, scaled_proxynca_loss

S = 16.0
IMAGES, LABELS, CENTERS = (0, 90, 40), [2, 0, 2], (60, 130, 270)
WHERE = 'of x at 0 (class 2), 90 (class 0), 40 degrees (class 2), and centres at 60, 130, 270, of length 5'


def images_and_centers():
    return on_circle(*IMAGES), torch.tensor(LABELS), 5 * on_circle(*CENTERS)


def contrast(image, label, s=S, margin=0.0):
    """First term of CCL Eq. (5) for an image at this angle, in degrees"""
    scaled = [exp(s * (cos(radians(image - c)) - margin * (k == label))) for k, c in enumerate(CENTERS)]
    return -log(scaled[label] / sum(scaled))


def mean_contrast(**options):
    return sum(contrast(image, label, **options) for image, label in zip(IMAGES, LABELS)) / 3


def mean_squared():
    """Mean squared distance of the images to their centres, coordinate by coordinate"""
    total = 0
    for image, label in zip(IMAGES, LABELS):
        degrees = image - CENTERS[label]
        total += (1 - cos(radians(degrees))) ** 2 + sin(radians(degrees)) ** 2
    return total / 3


def four_by_three():
    """Four L2-normalized embeddings of classes 0, 2, 2, 0, and three centres that are not normalized"""
    return unit(4), torch.tensor([0, 2, 2, 0]), 3 * unit(3, seed=9)


# ---- the loss and its two parts

def test_ccl_eq2_and_ccl_eq3_by_hand():
    """Eq. (3) is the second line of Eq. (2)."""
    both, contrast = (center_contrastive_loss(*images_and_centers(), lam=lam) for lam in (1, 0))
    expect(both, mean_contrast() + mean_squared(), f'CCL Eq. (2) {WHERE}')
    expect(both - contrast, mean_squared(), f'CCL Eq. (3) {WHERE}')


def test_ccl_eq4_is_linear_in_x():
    """2 - 2 c.x equals the squared distance only for unit vectors x. For other x, as after dropout, it remains
    linear."""
    x, y, centers = on_circle(0, 0, 0), torch.tensor([0]), on_circle(60, 200)
    values = [center_contrastive_loss(k * x[:1], y, centers, s=1e-9, lam=1) - log(2) for k in (0, 1, 2)]
    expect(torch.stack(values), [2, 1, 0], 'CCL Eq. (4) of x at 0 degrees, 0, 1 and 2 long, its centre at 60', 1e-6)


def test_ccl_eq5_and_ccl_eq11_by_hand():
    """The first term of Eq. (5) is Eq. (11), whose m is s times the margin of the cosine, here 16 x 0.2."""
    loss = center_contrastive_loss(*images_and_centers(), S, margin=0.2, lam=1.5)
    expect(loss, mean_contrast(margin=0.2) + 1.5 * mean_squared(),
           f'CCL Eq. (5), first line, {WHERE}, s 16, margin 0.2, lambda 1.5')


def test_ccl_eq5_of_embeddings_that_are_too_long():
    """Embeddings are not normalized in the loss: after dropout their norm differs from 1."""
    loss = center_contrastive_loss(1.118 * on_circle(*IMAGES), torch.tensor(LABELS), on_circle(*CENTERS), lam=0)
    expect(loss, mean_contrast(s=1.118 * S), f'CCL Eq. (5) {WHERE}, x of length 1.118, lambda 0', 1e-6)


def test_ccl_eq5_of_any_batch():
    z, y, centers = images_and_centers()
    for options in ({}, dict(margin=0.1, smoothing=0.2)):
        loss = partial(center_contrastive_loss, **options)
        expect_sound(loss, f'CCL Eq. (5), {options},', z, y, centers)
        expect_sound(loss, f'CCL Eq. (5), {options}, of a single centre,', z, 0 * y, centers[:1])


def test_ccl_eq5_closed_form_gradient():
    """The derivative with respect to the target cosine is s (softmax - 1) - 2 lambda, and s softmax for the others."""
    (t, z), (u, c), margin = moving(*IMAGES), moving(*CENTERS), 0.1
    center_contrastive_loss(z, torch.tensor(LABELS), 5 * c, S, margin, lam=2.0).backward()
    by_s = []
    for image, target in zip(IMAGES, LABELS):
        scaled = [exp(S * (cos(radians(image - c)) - margin * (k == target))) for k, c in enumerate(CENTERS)]
        by_s.append([(S * (e / sum(scaled) - (k == target)) - 2 * 2 * (k == target)) / 3
                     for k, e in enumerate(scaled)])
    expect_gradients(by_s, f'CCL Eq. (5) {WHERE}, margin 0.1, lambda 2', 1e-5, images=t, centres=u)


def test_ccl_eq5_stop_grad():
    """With stop_grad, only the centre term moves centres, and only of the classes in the batch. The gradient of the
    images is unchanged."""
    (t, z), (u, c), (same, x) = moving(*IMAGES), moving(*CENTERS), moving(*IMAGES)
    loss = center_contrastive_loss(z, torch.tensor(LABELS), 5 * c, lam=2.0, stop_grad=True)
    loss.backward()
    center_contrastive_loss(x, torch.tensor(LABELS), 5 * c.detach(), lam=2.0).backward()
    expect(loss, mean_contrast() + 2 * mean_squared(), f'CCL {WHERE}, stop_grad')
    by_angle = [0, 0, 0]                            # of lambda |x - c|^2 = 2 (2 - 2 cos(u - t)), over three images
    for image, target in zip(IMAGES, LABELS):
        by_angle[target] += 2 * 2 * sin(radians(CENTERS[target] - image)) / 3
    expect(u.grad, by_angle,
           f'derivatives with respect to the angles of centres, CCL Eq. (5) {WHERE}, lambda 2, stop_grad')
    expect(t.grad, same.grad, 'derivatives with respect to the angles of images, with and without stop_grad')


def test_ccl_eq5_smoothing():
    """The target class has label 0.8 and each other class 0.1; torch would add 0.0667 to all three. The centre term and
    the margin do not change."""
    for margin in (0, 0.15):
        loss = center_contrastive_loss(*images_and_centers(), lam=2, smoothing=0.2, margin=margin)
        expected = 0
        for image, target in zip(IMAGES, LABELS):
            logits = [S * (cos(radians(image - c)) - margin * (k == target)) for k, c in enumerate(CENTERS)]
            total = log(sum(map(exp, logits)))
            expected += sum((0.8 if k == target else 0.1) * (total - logit) for k, logit in enumerate(logits)) / 3
        expect(loss, expected + 2 * mean_squared(),
               f'CCL Eq. (5) {WHERE}, lambda 2, smoothing 0.2, margin {margin}', 1e-6)


def test_ccl_eq5_is_numerically_stable():
    """With s = 1,000, the best loss is 0. In the worst case the logits differ by 2,000, and the centres are 2 away."""
    y = torch.tensor([1, 0])
    for degrees, expected in ((180, 0), 0), ((0, 180), 2000 + 2 * 2 ** 2):
        loss = center_contrastive_loss(on_circle(*degrees), y, on_circle(0, 180), s=1000, lam=2)
        expect(loss, expected, f'CCL Eq. (5) of x at {degrees}, their centres at (180, 0), s 1,000, lambda 2')


# ---- losses that the paper compares with

def test_ccl_eq6_and_ccl_eq7_in_value_and_gradient():
    """There are two images of class 0. Neither they nor their centre (1, 1) are normalized."""
    x = torch.tensor([[2.0, -1.0], [0.0, 1.0]], dtype=torch.float64, requires_grad=True)
    weight = torch.tensor([[1.0, 0], [0, 1], [1, 1]], dtype=torch.float64)
    bias = torch.tensor([0.5, 0, -0.5], dtype=torch.float64)
    centers = torch.ones(3, 2, dtype=torch.float64, requires_grad=True)
    p = [[exp(t) / sum(map(exp, scores)) for t in scores] for scores in ([2.5, -1.0, 0.5], [0.5, 1.0, 0.5])]
    eq6 = -(log(p[0][0]) + log(p[1][0])) / 2
    expect(center_loss(x, torch.tensor([0, 0]), weight, bias, centers, lam=0), eq6, 'CCL Eq. (6)')
    loss = center_loss(x, torch.tensor([0, 0]), weight, bias, centers, lam=0.5)
    loss.backward()
    expect(loss, eq6 + 0.5 * (5 + 1) / 2, 'CCL Eq. (7), squared distances 5 and 1, lambda 0.5')
    by_score = torch.tensor([[q[0] - 1, *q[1:]] for q in p], dtype=torch.float64)
    from_center = torch.tensor([[1, -2], [-1, 0]])
    expect(x.grad, (by_score @ weight + 0.5 * 2 * from_center) / 2, 'the gradient of CCL Eq. (7), W^T (p - q) + ...')
    expect(centers.grad, [[0, 0.5 * 2 * (2 + 0) / 2], [0, 0], [0, 0]],
           'the gradient of the centres, two of absent classes')


def test_ccl_eq8_and_ccl_eq1_nsoftmax_is_lambda_and_margin_zero():
    """This is also InfoNCE of Eq. (1), with the centres as samples k and tau = 1/s."""
    loss = center_contrastive_loss(*images_and_centers(), s=3.0, margin=0, lam=0)
    expect(loss, mean_contrast(s=3.0), f'CCL Eq. (8) {WHERE}, s 3')


def test_ccl_eq9_by_hand():
    x, centers = on_circle(0), 2 * on_circle(60, 90, 180)
    expected = -log(exp(S * cos(radians(60))) / (exp(0) + exp(-S)))
    expect(scaled_proxynca_loss(x, torch.tensor([0]), centers), expected,
           'CCL Eq. (9) of x at 0, centres at 60, 90, 180')


def test_ccl_eq9_and_ccl_eq10_gradients():
    """With the coordinate axes as centres and s = 1, the coordinates of x are its similarities. The derivative of Eq.
    (9) with respect to the target similarity is always -1. For Eq. (10), the numerator of the paper's second case is
    corrected to exp(S(x,c) - S(x,c_y)); the paper has exp(S(x,c))."""
    x = torch.tensor([[1.0, 0.3, -2.0, 1.5]], dtype=torch.float64, requires_grad=True)
    y, axes = torch.tensor([0]), torch.eye(4, dtype=torch.float64)
    excess = [exp(t - 1.0) for t in (0.3, -2.0, 1.5)]
    eq9, eq10 = scaled_proxynca_loss(x, y, axes, s=1.0), center_contrastive_loss(x, y, axes, s=1.0, lam=0)
    expect(torch.autograd.grad(eq9, x)[0], [[-1] + [e / sum(excess) for e in excess]], 'the gradient of CCL Eq. (9)')
    expect(eq10, log(1 + sum(excess)), 'CCL Eq. (10)')
    p = [e / (1 + sum(excess)) for e in excess]
    expect(torch.autograd.grad(eq10, x)[0], [[-sum(p), *p]], 'the gradient of CCL Eq. (10)')


def test_ccl_eq12_and_ccl_eq13_bounds():
    """Eq. (13): max <= L_contrast <= max + log N, with the maximum of the differences Delta_j, where Delta_y = 0.
    Eq. (12) has the same bounds for the sum whose logarithm is the loss."""
    z, y, centers = four_by_three()
    for x, label in zip(z, y):
        similarity = S * F.normalize(centers, dim=1) @ x
        largest = (similarity - similarity[label]).max()
        loss = center_contrastive_loss(x[None], label[None], centers, S, lam=0)
        assert largest - 1e-9 <= loss <= largest + log(3) + 1e-9


def test_ccl_eq14_moves_the_centres_of_the_classes_present():
    z, y, centers = four_by_three()
    before = centers.clone()
    moved = momentum_centers(centers, z, y, mu=0.9)
    expected = [0.9 * before[0] + 0.1 * (z[0] + z[3]) / 2, before[1], 0.9 * before[2] + 0.1 * (z[1] + z[2]) / 2]
    expect(moved, torch.stack(expected), 'CCL Eq. (14), mu 0.9, two images of class 0, two of class 2')
    assert torch.equal(centers, before), 'the old centres are not modified'
    moved = momentum_centers(centers, z[:1], torch.tensor([1]), mu=0.9)
    expect(moved[1], 0.9 * before[1] + 0.1 * z[0], 'CCL Eq. (14), mu 0.9, one image of class 1')


# ---- the script

def test_symmetric_noise_changes_a_rounded_fraction_of_the_labels():
    for total, rate, wrong in (10, 0.19, 2), (40, 0.24, 10), (600, 0.25, 150):
        clean = torch.arange(total) % 20
        noisy = train_ccl.corrupt_labels(clean, f'symmetric:{rate}', torch.Generator().manual_seed(0))
        assert (noisy != clean).sum() == wrong and noisy.min() >= 0 and noisy.max() <= clean.max()
    assert len(((noisy - clean) % 20).unique()) == 20, 'sampled from all other classes'


def test_longtail_noise_dissolves_classes_into_clusters_of_five():
    clean = torch.arange(20).repeat_interleave(30)
    noisy = train_ccl.corrupt_labels(clean, 'longtail:0.25', torch.Generator().manual_seed(1))
    kept = noisy.unique()
    assert len(kept) == 15
    for c in range(20):
        expected = {c} if c in kept else {*kept.tolist()}
        assert {*noisy[clean == c].tolist()} <= expected, 'all other images keep their class'
        assert all(len(cluster.unique()) == 1 for cluster in noisy[clean == c].split(5))
    noisy = train_ccl.corrupt_labels(torch.arange(40) // 4, 'longtail:0.99', torch.Generator().manual_seed(1))
    assert len(noisy.unique()) == 2, 'two classes always remain'


def test_longtail_noise_dissolves_as_many_classes_as_have_at_most_the_fraction_of_the_images():
    """With classes of 1, 2, 4, ... images, the next class of the random order would exceed the fraction."""
    clean = torch.arange(8).repeat_interleave(2 ** torch.arange(8))
    for seed in range(20):
        noisy = train_ccl.corrupt_labels(clean, 'longtail:0.3', torch.Generator().manual_seed(seed))
        order = torch.randperm(8, generator=torch.Generator().manual_seed(seed)).tolist()
        sizes = [sum(2 ** c for c in order[:n]) for n in range(9)]
        expected = max(n for n in range(7) if sizes[n] <= 0.3 * len(clean))
        assert {*clean.tolist()} - {*noisy.tolist()} == {*order[:expected]}


def test_label_noise_follows_from_the_seed_and_dissolved_classes_have_no_centre(before_training):
    flags = '--label-noise', 'longtail:0.4', '--seed'
    one, same, other = (before_training(train_ccl, *flags, seed) for seed in '556')
    assert torch.equal(one.data.train.labels, same.data.train.labels)
    assert not torch.equal(one.data.train.labels, other.data.train.labels)
    assert len(one.loss_params['centers']) == one.data.train.num_classes == 4, 'of six'
    held = before_training(train_ccl, '--label-noise', 'symmetric:0', *flags[2:], '5').data.train
    for path, label in zip(one.data.train.paths, one.data.train.labels.tolist()):
        name = one.data.train.classes[label]
        assert name in path or held.classes[held.labels[held.paths.index(path)]] not in one.data.train.present
    assert {*one.data.train.classes} == {*held.classes}, 'a checkpoint names all classes whose images were seen'
    assert torch.equal(one.data.query.labels, before_training(train_ccl).data.query.labels), 'the test set has no noise'


def test_label_noise_that_changes_no_label_is_rejected(before_training):
    with pytest.raises(common.UsageError, match='--label-noise longtail:0.1 changes no label'):
        before_training(train_ccl, '--label-noise', 'longtail:0.1')


@pytest.mark.parametrize('noise', ['symmetric:10', 'longtail:25', 'symmetric:-0.1'])
def test_a_rate_of_label_noise_is_from_0_to_1(noise):
    with pytest.raises(common.UsageError, match='RATE from 0 to 1, not'):
        train_ccl.corrupt_labels(torch.arange(20), noise)


def test_centres_that_could_not_move_are_rejected():
    with pytest.raises(common.UsageError, match='--lam 0: the centres would never move'):
        train_ccl.get_args(['--loss', 'stop_grad', '--lam', '0'])


@pytest.mark.parametrize('momentum', [0.0, 0.9])
def test_nesterov_is_used_only_with_momentum(before_training, momentum):
    held = before_training(train_ccl, '--optimizer', 'sgd', '--momentum', str(momentum))
    assert all(group['nesterov'] == (momentum > 0) for group in held.optimizer.param_groups)


def test_cluster_centres_are_running_means_without_a_gradient(before_training):
    """The running means are of embeddings without dropout, which applies only to the loss."""
    held = before_training(train_ccl, '--loss', 'cluster', '--mu', '0.5', '--dropout', '0.5')
    images, labels, centers = torch.rand(8, 3, 32, 32), torch.arange(8) % 2, held.loss_params['centers']
    before, z = centers.clone(), held.model.eval()(images).detach()
    held.step(images, labels).backward()
    assert not centers.requires_grad and torch.equal(before[2:], centers[2:]), 'centres of absent classes do not move'
    for c in (0, 1):
        assert torch.allclose(centers[c], (before[c] + z[labels == c].mean(dim=0)) / 2, atol=1e-6)


def test_center_loss_has_raw_embeddings_of_a_head_as_torch_initialises_it(before_training):
    model = before_training(train_ccl, '--loss', 'center_loss').model
    assert model.linear.bias.any(), 'kaiming has a bias of 0'
    assert not torch.allclose(model.eval()(torch.rand(4, 3, 32, 32)).norm(dim=1), torch.ones(4), atol=1e-3)
