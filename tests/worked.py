"""What worked examples share: angles to differentiate by, and comparisons that say what was expected."""
from math import radians

import torch


def expect(got, expected, what, tolerance=1e-9):
    """Raises an error unless both are equal up to rounding. It names `what` was computed, and shows both values."""
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
    """A number, or the numbers of a list, with nine digits"""
    return [rounded(part) for part in x] if x.dim() else float(f'{x.item():.9g}')


def moving(*degrees):
    """Angles (B,) to differentiate by, and the points at them on the circle (B, 2)"""
    t = torch.tensor([radians(d) for d in degrees], dtype=torch.float64, requires_grad=True)
    return t, torch.stack([t.cos(), t.sin()], dim=1)


def expect_gradients(by_s, what, tolerance=1e-9, **angles):
    """Compares the gradients of the angles. by_s (A, B) has the derivatives of the loss by the similarities cos(t_i -
    u_k) of points at the angles t (A,) and u (B,). With one set of angles, u is t."""
    __tracebackhide__ = True
    t, u = (*angles.values(), *angles.values())[:2]
    by_difference = -torch.as_tensor(by_s, dtype=torch.float64) * (t.detach()[:, None] - u.detach()).sin()
    expected = [by_difference.sum(dim=1), -by_difference.sum(dim=0)]
    expected = expected if len(angles) == 2 else [sum(expected)]
    for (name, angle), value in zip(angles.items(), expected):
        expect(angle.grad, value, f'the derivatives by the angles of {name}, {what}', tolerance)


def expect_raised(loss, what, *tensors, tolerance=1e-4):
    """Tensors of half precision have a loss of float32, which is that of the same numbers in float64"""
    __tracebackhide__ = True
    for dtype in (torch.float16, torch.bfloat16):
        halves = [t.to(dtype) for t in tensors]
        got = loss(*halves)
        assert got.dtype == torch.float32, f'{what} of {dtype}: expected float32, got {got.dtype}'
        expect(got, loss(*(t.double() for t in halves)), f'{what} of {dtype}, against float64', tolerance)
