"""Assertions for worked examples, which state what was expected; points on the unit circle by their angles."""
import itertools
from math import cos, radians, sin

import torch
from torch.utils._python_dispatch import TorchDispatchMode


def expect(got, expected, what, tolerance=1e-9):
    """Fails unless both are equal within the tolerance. The message has `what` was computed, and both values."""
    __tracebackhide__ = True
    got, expected = (torch.as_tensor(x, dtype=torch.float64).detach() for x in (got, expected))
    if got.shape == expected.shape and torch.allclose(got, expected, rtol=tolerance, atol=tolerance):
        return
    if got.shape == expected.shape and got.numel() > 40:
        index = (got - expected).abs().nan_to_num(float('inf')).argmax()
        what += f', at {[int(i) for i in torch.unravel_index(index, got.shape)]}'
        got, expected = got.flatten()[index], expected.flatten()[index]
    shapes = '' if got.shape == expected.shape else f' (shapes {list(expected.shape)} and {list(got.shape)})'
    raise AssertionError(f'{what}\n    expected  {rounded(expected)}\n    got       {rounded(got)}{shapes}')


def rounded(x):
    """A value, or a list of values, rounded to nine digits"""
    return [rounded(part) for part in x] if x.dim() else float(f'{x.item():.9g}')


def cosine(degrees):
    """Cosine similarity of two points on the unit circle, by their angle in degrees"""
    return cos(radians(degrees))


def chord(degrees):
    """Distance of two points on the unit circle, by their angle in degrees"""
    return 2 * sin(radians(degrees) / 2)


def moving(*degrees):
    """Angles (B,) in radians that require gradients, and the points on the unit circle at these angles (B, 2)"""
    t = torch.tensor([radians(d) for d in degrees], dtype=torch.float64, requires_grad=True)
    return t, torch.stack([t.cos(), t.sin()], dim=1)


def expect_gradients(by_s, what, tolerance=1e-9, **angles):
    """Compares the gradients of the angles with those that follow from by_s (A, B), the derivatives of the loss with
    respect to the similarities cos(t_i - u_k) of points at angles t (A,) and u (B,). With one set of angles, u is t."""
    __tracebackhide__ = True
    t, u = (*angles.values(), *angles.values())[:2]
    by_difference = -torch.as_tensor(by_s, dtype=torch.float64) * (t.detach()[:, None] - u.detach()).sin()
    expected = [by_difference.sum(dim=1), -by_difference.sum(dim=0)]
    expected = expected if len(angles) == 2 else [sum(expected)]
    for (name, angle), value in zip(angles.items(), expected):
        expect(angle.grad, value, f'derivatives with respect to the angles of {name}, {what}', tolerance)


def expect_upcast(loss, what, *tensors, tolerance=1e-4):
    """Half precision is upcast: the loss is float32, and equals the float64 loss of the same values. This also holds if
    only the first tensor has half precision and the others are float32."""
    __tracebackhide__ = True
    for dtype, others in itertools.product((torch.float16, torch.bfloat16), (None, torch.float32)):
        halves = [tensors[0].to(dtype), *(t.to(others or dtype) for t in tensors[1:])]
        got = loss(*halves)
        assert got.dtype == torch.float32, f'{what} of {dtype}: expected float32, got {got.dtype}'
        assert got.any(), f'{what} of {dtype}: expected a loss other than 0'
        expect(got, loss(*(t.double() for t in halves)), f'{what} of {dtype}, against float64', tolerance)


def expect_sound(loss, what, z, y, *vectors):
    """Requirements on every loss(z, y, *vectors), with embeddings z (B, D) of classes y (B,), and proxies, centres or
    hybrids: the order of the batch does not matter, arguments are not modified, float64 stays float64, and the
    gradients are finite for any batch, even if the loss is 0."""
    __tracebackhide__ = True
    value, gradients = value_and_gradients(loss, what, z, y, *vectors)
    if vectors and not len(vectors[0]):
        assert value == 0, f'{what}: expected 0, got {value}'
    else:
        assert any(g.any() for g in gradients), f'{what}: expected gradients other than 0'
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(1))
    other, moved = value_and_gradients(loss, what, z[order], y[order], *vectors)
    expect(other, value, f'{what}: the loss with the images in another order')
    gradients[0] = gradients[0][order]
    for one, same in zip(moved, gradients):
        expect(one, same, f'{what}: the gradients with the images in another order')
    classes = y.unique()
    first = (y[:, None] == classes).int().argmax(dim=0)                         # one image of each class
    batches = {'of one class': (z, y[:1].expand(len(y))), 'of a single image': (z[:1], y[:1]),
               'of one image per class': (z[first], classes), 'of equal images': (z[:1].expand(len(z), -1), y),
               'of equal images of one class': (z[:1].expand(2, -1), y[:1].expand(2))}
    for name, (images, labels) in batches.items():
        value_and_gradients(loss, f'{what} of a batch {name}', images, labels, *vectors)


def value_and_gradients(loss, what, z, y, *vectors):
    """The loss, and its gradients with respect to z and the vectors. All must be finite, and no argument modified."""
    __tracebackhide__ = True
    leaves = [t.detach().clone().requires_grad_() for t in (z, *vectors)]
    labels = y.clone()
    value = loss(leaves[0], labels, *leaves[1:])
    assert isinstance(value, torch.Tensor) and value.shape == (), f'{what}: expected a tensor without dimensions'
    assert value.dtype == z.dtype, f'{what}: expected {z.dtype}, got {value.dtype}'
    assert value.isfinite(), f'{what}: expected a finite loss, got {value}'
    assert value.requires_grad, f'{what}: expected a loss with a gradient, got a constant'
    value.backward()
    gradients = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]
    assert all(gradient.isfinite().all() for gradient in gradients), f'{what}: expected finite gradients'
    kept = [torch.equal(leaf, t) for leaf, t in zip([*leaves, labels], [z, *vectors, y])]
    assert all(kept), f'{what}: its arguments were modified'
    return value.detach(), gradients


class Largest(TorchDispatchMode):
    """Context manager: `values` is the size of the largest tensor that any operation inside it returns."""
    values = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        out = operation(*args, **(kwargs or {}))
        self.values = max([self.values, *(t.numel() for t in torch.utils._pytree.tree_leaves(out)
                                          if isinstance(t, torch.Tensor))])
        return out
