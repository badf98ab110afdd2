"""The hidden comparison: on random inputs, a student's function must have the values and gradients of the original.

The functions of exercises.py sample the inputs from a seed. Two processes get the same inputs: one runs the project's
script, the other the submission. Each returns values and gradients as arrays, see sandbox.py. Students can read the
tests, and could write a function that only passes these; they cannot know the inputs of the comparison.

Inputs at which the function is discontinuous, such as ties, are excluded: there, the result depends on floating-point
error, which differs between implementations. These are inputs for which the original changes if they are perturbed
slightly, or if it is computed in float64.
"""
import copy
import random
from typing import NamedTuple

import numpy as np
from sandbox import pack

CALLS = 32                                          # inputs of an exercise; every fourth is sampled twice
# Largest deviation from the original, relative to the largest value of the same output. Half precision is upcast, but
# a vector rounded to half precision is not exactly L2-normalized; and a hyper-parameter may be a float32.
TOLERANCE = {'float64': 1e-6, 'float32': 1e-3, 'float16': 5e-3, 'bfloat16': 2e-2}
GRADIENT = TOLERANCE | {'float16': 5e-2, 'bfloat16': 1e-1}                      # a gradient has the type of its vectors
MOVED = {'float64': 1e-12, 'float32': 1e-6, 'float16': 1e-6, 'bfloat16': 1e-6}      # relative perturbation of inputs
COPY_MOVED = 100    # factor for duplicates, so that they differ by more than floating-point error
FLOOR = 0.01                                        # if the largest value is smaller, the deviation is relative to this


class Tensor(NamedTuple):
    values: np.ndarray
    type: str                                       # of torch
    grad: str = ''      # 'any': its gradient is compared; 'unit': only the component tangential to the unit sphere


def rounded(values, kind):
    """Values rounded to this torch type, as float64"""
    if kind == 'bfloat16':                          # float32 without its last 16 bits
        bits = values.astype(np.float32).view(np.uint32) + 0x8000
        return (bits & 0xFFFF0000).view(np.float32).astype(np.float64)
    return values.astype(kind).astype(np.float64)


class RandomInputs:
    """Samples random valid arguments, one input after another. choose() takes its options equally often."""

    def __init__(self, seed):
        self.python = random.Random(seed)           # shapes, classes and hyper-parameters
        self.numpy = np.random.default_rng(seed)  # values of tensors
        self.remaining = {}                         # {name: options of the current permutation}

    def next(self):
        self.type = self.choose('type', 'float32', 'float32', 'float64', 'float16', 'bfloat16')

    def choose(self, name, *options):
        """One of the options, sampled without replacement: a new permutation starts when all were used."""
        remaining = self.remaining.setdefault(name, [])
        if not remaining:
            remaining += self.python.sample(options, len(options))
        return remaining.pop()

    def size(self, name, *bands):
        return self.python.randint(*self.choose(name, *bands))

    def sizes(self, name, largest=1500):
        """Two sizes: both small, both about 100, or one of them large, so that their product is not too large"""
        many, some, few = (largest * 2 // 3, largest), (65, 140), (2, 9)
        a, b = self.choose(name, (few, few), (few, (10, 64)), ((10, 64), few), (few, few), (few, many), (many, few),
                           (some, some))
        return self.python.randint(*a), self.python.randint(*b)

    def between(self, low, high):
        return self.python.uniform(low, high)

    def scale(self, low, high):
        """A float between low and high, uniform in its logarithm"""
        return float(np.exp(self.python.uniform(np.log(low), np.log(high))))

    def some(self, **arguments):
        """Each of these arguments with probability 0.8; the others keep their defaults."""
        return {name: value for name, value in arguments.items() if self.python.random() < 0.8}

    def tensor(self, values, kind=None, grad='any'):
        """A Tensor in the type of this input, or in another type"""
        kind = kind or self.type
        return Tensor(rounded(np.asarray(values), kind), kind, grad)

    def integers(self, values):
        return Tensor(np.asarray(values, dtype=np.int64), 'int64')

    def mask(self, values):
        return Tensor(np.asarray(values, dtype=bool), 'bool')

    def other_type(self):
        """The type of proxies: the same as for images, or float32 with images in half precision"""
        return self.choose('other type', self.type, 'float32') if '16' in self.type else self.type

    # ---- labels and vectors

    def labels(self, n, classes=None):
        """n labels as an array, from 0 to classes - 1 if `classes` is given. Otherwise they are any integers >= 0,
        among them some that are equal modulo a power of 2 or of 10."""
        per_class = self.choose('images per class', 1, 2, 3, 8, 'a quarter', 'all')
        per_class = {'a quarter': n // 4 + 1, 'all': n}.get(per_class, per_class)
        count = -(-n // per_class)
        if classes is None:
            modulus = self.choose('modulus', 1, 1, 10, 100, 128, 256, 1000, 4096, 65536)
            values = self.python.randrange(50) + modulus * np.arange(count)
            values = self.numpy.permutation(values % 200_000 if modulus * count < 200_000 else np.arange(count))
        else:
            count = min(count, classes)
            values = self.numpy.permutation(classes)[:count]
        y = values[np.arange(n) % count]
        order = self.choose('order', 'shuffled', 'shuffled', 'shuffled', 'sorted', 'in turn')
        return {'shuffled': self.numpy.permutation, 'sorted': np.sort, 'in turn': np.array}[order](y)

    def unit(self, n, dim, around=None):
        """n unit vectors: uniform on the sphere, or around a random vector for each class in `around`"""
        z = self.numpy.standard_normal((n, dim))
        if around is not None:
            _, place = np.unique(around, return_inverse=True)
            means = self.numpy.standard_normal((place.max(initial=0) + 1, dim))
            z = self.choose('spread', 0.2, 0.5, 1, 2, 5) * z + means[place]
        return z / np.linalg.norm(z, axis=1, keepdims=True)

    def dim(self):
        return self.size('dim', (2, 2), (3, 3), (4, 9), (10, 40), (65, 140), (513, 700))

    def images(self, largest=200, apart=0.0):
        """Embeddings z and classes y of a batch. An embedding closer than `apart` to an earlier one becomes its
        duplicate."""
        # Few batches are large: a submission may loop over all pairs in Python, which takes time.
        n = self.size('images', (1, 1), (2, 4), (2, 4), (5, 9), (5, 9), (5, 9), (10, 30), (10, 30), (10, 30), (10, 30),
                      (31, 64), (31, 64), (65, min(110, largest)), (largest * 2 // 3, largest))
        y = self.labels(n)
        z = self.unit(n, self.dim(), y)
        for i in range(n):
            near = np.linalg.norm(z[:i] - z[i], axis=1) < apart
            if near.any():
                z[i] = z[near.argmax()]
        copy_of = self.choose('copies', 'none', 'none', 'one class', 'another class')
        if n > 3 and copy_of != 'none':
            a, b = self.python.sample(range(n), 2)
            z[a] = z[b]                             # an exact duplicate is another image
            y[a] = y[b] if copy_of == 'one class' else y[a]
        return self.tensor(z, grad='unit'), self.integers(y)

    def images_and_vectors(self):
        """Embeddings z, classes y from 0 to C - 1, and a vector of any norm for each of the C classes"""
        n, classes = self.sizes('images and classes')
        if self.choose('one class', *[False] * 9, True):
            classes = 1
        y = self.labels(n, classes)
        dim = self.dim() if n * classes < 500 else self.python.randint(2, 9)
        z = self.unit(n, dim, y)
        vectors = self.unit(classes, dim) * np.exp(self.numpy.uniform(-3, 3, (classes, 1)))
        return self.tensor(z, grad='unit'), self.integers(y), self.tensor(vectors, self.other_type())


def random_calls(generator, seed):
    """Calls (function, arguments, slope) of an exercise. Every fourth is made twice with other values of the same
    shape, which detects cached results."""
    rng = RandomInputs(seed)
    calls = []
    for number in range(CALLS):
        state = copy.deepcopy((rng.python, rng.remaining))
        for again in range(1 + (number % 4 == 0)):
            if again:
                rng.python, rng.remaining = state
            rng.next()
            calls.append((*generator(rng), rng.scale(0.3, 3)))
    return calls


def moves(number):
    """Two perturbations of a call: noise, and the negative of it. Equal similarities become unequal in both
    directions."""
    return [(sign, np.random.default_rng(number)) for sign in (1, -1)]


def packed(function, arguments, slope, sign=0, noise=None, exact=False):
    """A call as bytes. With noise, values are perturbed by about their floating-point error, half precision becomes
    float32, and unit vectors are normalized again. If exact, the same values are float64."""
    plain, arrays = {}, []
    for name, value in arguments.items():
        if isinstance(value, Tensor):
            values, kind, grad = value
            if noise and kind in MOVED:
                far = sign * MOVED[kind]
                if grad == 'unit':
                    _, first = np.unique(values, axis=0, return_index=True)
                    is_copy = ~np.isin(np.arange(len(values)), first)
                    far = far * np.where(is_copy, COPY_MOVED, 1)[:, None]
                    values = values / np.linalg.norm(values, axis=1, keepdims=True)
                moved = values * (1 + far * noise.standard_normal(values.shape))
                values = np.where(values == np.round(values), values, moved)        # 0 and 1 are special labels
                kind = 'float32' if '16' in kind else kind
            kind = 'float64' if exact and kind in MOVED else kind
            value = ['tensor', len(arrays), kind, grad]
            arrays.append(values)
        plain[name] = value
    return pack([function, plain, slope], arrays)


def precision(arguments):
    """The coarsest type among the arguments"""
    kinds = [value.type for value in arguments.values() if isinstance(value, Tensor) and value.type in MOVED]
    return next((kind for kind in ('bfloat16', 'float16', 'float32') if kind in kinds), 'float64')


def differ(expected, got, kind, view=None, factor=1.0):
    """'' if two answers agree, else the difference. Both are (plain values, arrays), as `answer` of sandbox.py sends
    them."""
    (plain, one), (other_plain, other) = expected, got
    if isinstance(other_plain, str):
        return other_plain
    for what, wanted, found in zip(('keys', 'types'), plain, other_plain):
        if wanted != found:
            return f'expected the {what} {", ".join(wanted)}, got {", ".join(found)}'
    types = plain[1]
    if any(a.shape != b.shape for a, b in zip(one, other)):
        return f'expected the shapes {[list(a.shape) for a in one]}, got {[list(b.shape) for b in other]}'
    if view:
        one, other = view(*one), view(*other)
    for a, b, what in zip(one, other, types):
        name = 'gradient' if what == 'gradient' else 'value'
        tolerance = factor * (GRADIENT if what == 'gradient' else TOLERANCE)[kind]
        finite = np.abs(a[np.isfinite(a)])
        limit = tolerance * max(FLOOR, finite.max(initial=0))
        if a.shape != b.shape or not np.isclose(a, b, rtol=0, atol=limit, equal_nan=False).all():
            return f'{name}: ' + what_differs(a, b)
    return ''


def what_differs(a, b):
    if a.shape != b.shape:
        return 'another shape'
    with np.errstate(invalid='ignore'):
        apart = np.where(a == b, 0, np.abs(a - b))
    index = np.unravel_index(np.nan_to_num(apart, nan=np.inf).argmax(), a.shape)
    place = f' at {[int(n) for n in index]}' if a.size > 1 else ''
    return f'expected {a[index]:.7g}, got {b[index]:.7g}{place}'


def described(function, arguments):
    """A call in one line: shapes and types of tensors, and other arguments"""
    parts = []
    for name, value in arguments.items():
        if isinstance(value, Tensor):
            value = f'{list(value.values.shape)} {value.type}' if value.values.ndim else f'{value.values:.6g}'
        elif isinstance(value, float):
            value = f'{value:.6g}'
        parts.append(f'{name} {value}')
    return f'{function} of {", ".join(parts)}'
