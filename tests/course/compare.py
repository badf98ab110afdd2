"""The hidden comparison: on random legal inputs, a student's function has to say the same as the project's.

The inputs are drawn here, from a seed, by the functions of exercises.py. Two processes get the same numbers: one runs
the project's script, the other one what was handed in; each returns values and gradients as numbers, see sandbox.py.
Tests can be read, and a function can be written that passes them alone; which inputs are drawn here cannot be known.

Left out are inputs at which the function jumps, such as ties: there, rounding decides, and it differs between two ways
to compute the same. These are the inputs at which the project's own answer changes when they are moved a little, or
when it is computed in float64.
"""
import copy
import random
from typing import NamedTuple

import numpy as np
from sandbox import pack

DRAWS = 32                                          # inputs of an exercise; every fourth is drawn twice
# How far an answer may be from the project's, as a share of the largest number of the same output. Half precision is
# raised to float32, but a vector in half precision is not quite of unit length; and a hyper-parameter may be a float32.
TOLERANCE = {'float64': 1e-6, 'float32': 1e-3, 'float16': 5e-3, 'bfloat16': 2e-2}
GRADIENT = TOLERANCE | {'float16': 5e-2, 'bfloat16': 1e-1}                          # which has the type of the vectors
MOVED = {'float64': 1e-12, 'float32': 1e-6, 'float16': 1e-6, 'bfloat16': 1e-6}      # how far inputs are moved
COPY_MOVED = 100    # A copy of an image is moved this many times further, so that the two differ by more than rounding.
FLOOR = 0.01                                        # smaller numbers are compared as if the largest were this


class Tensor(NamedTuple):
    values: np.ndarray
    type: str                                       # of torch
    grad: str = ''      # 'any': the function is differentiated by it; 'unit': only within the sphere of unit vectors


def rounded(values, kind):
    """Numbers that this type of torch holds exactly, as float64"""
    if kind == 'bfloat16':                          # float32 without its last 16 bits
        bits = values.astype(np.float32).view(np.uint32) + 0x8000
        return (bits & 0xFFFF0000).view(np.float32).astype(np.float64)
    return values.astype(kind).astype(np.float64)


class Draw:
    """Random legal arguments, of one input after another. What is dealt from a deck comes up equally often."""

    def __init__(self, seed):
        self.choice = random.Random(seed)           # shapes, classes and hyper-parameters
        self.numbers = np.random.default_rng(seed)  # what fills them
        self.decks = {}

    def next(self):
        self.type = self.deal('type', 'float32', 'float32', 'float64', 'float16', 'bfloat16')

    def deal(self, name, *options):
        deck = self.decks.setdefault(name, [])
        if not deck:
            deck += self.choice.sample(options, len(options))
        return deck.pop()

    def size(self, name, *bands):
        return self.choice.randint(*self.deal(name, *bands))

    def sizes(self, name, largest=1500):
        """Two sizes: both small, both about 100, or one of them large, so that their product never is"""
        many, some, few = (largest * 2 // 3, largest), (65, 140), (2, 9)
        a, b = self.deal(name, (few, few), (few, (10, 64)), ((10, 64), few), (few, few), (few, many), (many, few),
                         (some, some))
        return self.choice.randint(*a), self.choice.randint(*b)

    def between(self, low, high):
        return self.choice.uniform(low, high)

    def scale(self, low, high):
        """A number of any magnitude from low to high"""
        return float(np.exp(self.choice.uniform(np.log(low), np.log(high))))

    def some(self, **arguments):
        """Most of these arguments: those that are left out have their defaults."""
        return {name: value for name, value in arguments.items() if self.choice.random() < 0.8}

    def tensor(self, values, kind=None, grad='any'):
        """In the type of this input, or in another one"""
        kind = kind or self.type
        return Tensor(rounded(np.asarray(values), kind), kind, grad)

    def integers(self, values):
        return Tensor(np.asarray(values, dtype=np.int64), 'int64')

    def mask(self, values):
        return Tensor(np.asarray(values, dtype=bool), 'bool')

    def other_type(self):
        """That of proxies beside images: the same, or float32 beside half precision"""
        return self.deal('other type', self.type, 'float32') if '16' in self.type else self.type

    # ---- labels and vectors

    def labels(self, n, classes=None):
        """n classes as an array. If `classes` is given, they are from 0 to classes - 1; otherwise they have any numbers
        from 0 on, among them some that are equal modulo a round number."""
        share = self.deal('images per class', 1, 2, 3, 8, 'a quarter', 'all')
        per_class = {'a quarter': n // 4 + 1, 'all': n}.get(share, share)
        kinds = -(-n // per_class)
        if classes is None:
            modulus = self.deal('modulus', 1, 1, 10, 100, 128, 256, 1000, 4096, 65536)
            numbers = self.choice.randrange(50) + modulus * np.arange(kinds)
            numbers = self.numbers.permutation(numbers % 200_000 if modulus * kinds < 200_000 else np.arange(kinds))
        else:
            kinds = min(kinds, classes)
            numbers = self.numbers.permutation(classes)[:kinds]
        y = numbers[np.arange(n) % kinds]
        order = self.deal('order', 'shuffled', 'shuffled', 'shuffled', 'sorted', 'in turn')
        return {'shuffled': self.numbers.permutation, 'sorted': np.sort, 'in turn': np.array}[order](y)

    def unit(self, n, dim, around=None):
        """n unit vectors: anywhere, or around the vector of their class"""
        z = self.numbers.standard_normal((n, dim))
        if around is not None:
            _, place = np.unique(around, return_inverse=True)
            means = self.numbers.standard_normal((place.max(initial=0) + 1, dim))
            z = self.deal('spread', 0.2, 0.5, 1, 2, 5) * z + means[place]
        return z / np.linalg.norm(z, axis=1, keepdims=True)

    def dim(self):
        return self.size('dim', (2, 2), (3, 3), (4, 9), (10, 40), (65, 140), (513, 700))

    def images(self, largest=200, apart=0.0):
        """Embeddings z and classes y of a batch. One that is less than `apart` from an earlier one is a copy of it."""
        # Few are large: a loop over all pairs in Python is right, and takes its time.
        n = self.size('images', (1, 1), (2, 4), (2, 4), (5, 9), (5, 9), (5, 9), (10, 30), (10, 30), (10, 30), (10, 30),
                      (31, 64), (31, 64), (65, min(110, largest)), (largest * 2 // 3, largest))
        y = self.labels(n)
        z = self.unit(n, self.dim(), y)
        for i in range(n):
            near = np.linalg.norm(z[:i] - z[i], axis=1) < apart
            if near.any():
                z[i] = z[near.argmax()]
        copy_of = self.deal('copies', 'none', 'none', 'one class', 'another class')
        if n > 3 and copy_of != 'none':
            a, b = self.choice.sample(range(n), 2)
            z[a] = z[b]                             # an exact copy is an image of its own
            y[a] = y[b] if copy_of == 'one class' else y[a]
        return self.tensor(z, grad='unit'), self.integers(y)

    def images_and_vectors(self):
        """Embeddings z, classes y from 0 on, and a vector of any length for each of the C classes"""
        n, classes = self.sizes('images and classes')
        if self.deal('one class', *[False] * 9, True):
            classes = 1
        y = self.labels(n, classes)
        dim = self.dim() if n * classes < 500 else self.choice.randint(2, 9)
        z = self.unit(n, dim, y)
        vectors = self.unit(classes, dim) * np.exp(self.numbers.uniform(-3, 3, (classes, 1)))
        return self.tensor(z, grad='unit'), self.integers(y), self.tensor(vectors, self.other_type())


def draw_calls(generator, seed):
    """Calls (function, arguments, slope) of an exercise. Every fourth is made twice with other numbers: an answer that
    was kept from before would show."""
    draw = Draw(seed)
    calls = []
    for number in range(DRAWS):
        state = copy.deepcopy((draw.choice, draw.decks))
        for again in range(1 + (number % 4 == 0)):
            if again:
                draw.choice, draw.decks = state
            draw.next()
            calls.append((*generator(draw), draw.scale(0.3, 3)))
    return calls


def moves(number):
    """How a call is moved: noise and its opposite. Two similarities that are equal are parted in both ways."""
    return [(sign, np.random.default_rng(number)) for sign in (1, -1)]


def packed(function, arguments, slope, sign=0, noise=None, exact=False):
    """The bytes of a call. With noise, floating-point numbers are moved by about their rounding, half precision is
    float32, and unit vectors are so again. If exact, the same numbers are float64."""
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
                values = np.where(values == np.round(values), values, moved)        # 0 and 1 are special shares
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


def differ(expected, got, kind, view=None, share=1.0):
    """'' if two answers agree, else what does not. Both are (what is plain, arrays) as `answer` of sandbox.py sends
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
        tolerance = share * (GRADIENT if what == 'gradient' else TOLERANCE)[kind]
        finite = np.abs(a[np.isfinite(a)])
        limit = tolerance * max(FLOOR, finite.max(initial=0))
        if a.shape != b.shape or not np.isclose(a, b, rtol=0, atol=limit, equal_nan=False).all():
            return f'{name}: ' + what_differs(a, b)
    return ''


def what_differs(a, b):
    if a.shape != b.shape:
        return 'another one'
    with np.errstate(invalid='ignore'):
        apart = np.where(a == b, 0, np.abs(a - b))
    index = np.unravel_index(np.nan_to_num(apart, nan=np.inf).argmax(), a.shape)
    place = f' at {[int(n) for n in index]}' if a.size > 1 else ''
    return f'expected {a[index]:.7g}, got {b[index]:.7g}{place}'


def described(function, arguments):
    """A call in a line: shapes and types of what is long, and the rest"""
    parts = []
    for name, value in arguments.items():
        if isinstance(value, Tensor):
            value = f'{list(value.values.shape)} {value.type}' if value.values.ndim else f'{value.values:.6g}'
        elif isinstance(value, float):
            value = f'{value:.6g}'
        parts.append(f'{name} {value}')
    return f'{function} of {", ".join(parts)}'
