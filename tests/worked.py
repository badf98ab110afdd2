"""What worked examples share: angles to differentiate by, and a comparison that says what was expected."""
from math import radians

import torch


def expect(got, expected, what, tolerance=1e-9):
    """Numbers, lists or tensors are equal up to rounding; or else an error says what: the equation and its input"""
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


def by_angles(by_s, t, u):
    """From the derivatives (A, B) of a loss by the cosines of t_i - u_k, those by the angles t (A,) and u (B,)"""
    sine = (t.detach()[:, None] - u.detach()).sin()
    by_s = torch.as_tensor(by_s, dtype=torch.float64)
    return -(by_s * sine).sum(dim=1), (by_s * sine).sum(dim=0)
