"""Arrays for the fuzzers: anywhere in memory, and of every kind of number."""

import numpy as np

INTEGERS = [np.dtype(x) for x in "bBhHiIlL"]
REALS = [*INTEGERS, *(np.dtype(x) for x in ("?", "f2", "f4", "f8", "g"))]
SIZES = [0, 1, 1, 2, 3, 5, 31, 32, 33, 63, 64, 65, 97, 128, 130, 300, 1023, 1025, 2500, 9000]
NOISE = 0xA5

# ---- Arrays in memory ----------------------------------------------------------------------------------------------


def place(rng, shape, dtype, plain: bool, repeats: bool = False) -> np.ndarray:
    """Lay out an array at random in a buffer of noise; plain: as torch allows, aligned and forwards."""
    dtype, odd = np.dtype(dtype), rng.random() < 0.6
    axes = list(rng.permutation(len(shape))) if odd and rng.random() < 0.5 else list(reversed(range(len(shape))))
    strides, step, first = [0] * len(shape), dtype.itemsize, 0
    for axis in axes:
        if repeats and odd and rng.random() < 0.1:
            continue
        strides[axis] = step * (int(rng.integers(1, 4)) if odd and rng.random() < 0.3 else 1)
        step = strides[axis] * max(shape[axis], 1)
        if odd and not plain and rng.random() < 0.2:
            first += strides[axis] * max(shape[axis] - 1, 0)
            strides[axis] *= -1
    shift = 64 if not odd else 64 + dtype.itemsize * int(rng.integers(9)) + (not plain and rng.random() < 0.2)
    buffer = np.full(step + shift + 64, NOISE, np.uint8)
    return np.ndarray(shape, dtype, buffer, shift + first, strides)


def lay(rng, x, plain: bool, any_order: bool):
    """Copy an array to a place of its own; repeated axes keep their last items."""
    swapped = any_order and not plain and x.dtype.itemsize > 1 and rng.random() < 0.1
    there = place(rng, x.shape, x.dtype.newbyteorder("S") if swapped else x.dtype, plain, repeats=True)
    there[...] = x
    return there


# ---- What is in them -----------------------------------------------------------------------------------------------


def size(rng, most: int = 10**6) -> int:
    return min(int(rng.choice(SIZES)), most)


def lead(rng) -> tuple[int, ...]:
    return tuple(int(x) for x in rng.choice([0, 1, 2, 3, 4], rng.integers(4), p=[0.04, 0.2, 0.3, 0.3, 0.16]))


def part(rng, shape) -> tuple[int, ...]:
    """A shape that broadcasts to this one."""
    return tuple(1 if rng.random() < 0.3 else side for side in shape[rng.integers(len(shape) + 1) :])


def codes(rng, *shape):
    """Words: any, of few bits so that scores tie, or of all bits alike."""
    words = rng.integers(-(2**31), 2**31, shape)
    mask = rng.choice([-1, 0x11, 1, 0])
    return (words & mask if mask else np.where(words % 2 == 0, 0, -1)).astype(np.int32)


def reals(rng, shape, dtype):
    """Numbers of every size that a dtype has, its extremes among them."""
    kind = np.dtype(dtype).kind
    if kind == "b":
        return rng.random(shape) < 0.5
    if kind != "f":
        limits = np.iinfo(dtype)
        spread = int(rng.choice([1, 9, 100, 2**31]))
        x = rng.integers(max(-spread, limits.min), min(spread, limits.max), shape, dtype, endpoint=True)
        return np.where(rng.random(shape) < 0.05, rng.choice(np.array([limits.min, limits.max, 0], dtype), shape), x)
    limits = np.finfo(np.float16 if dtype == np.float16 else np.float32)
    with np.errstate(over="ignore", under="ignore"):
        x = (rng.normal(size=shape) * 10.0 ** rng.integers(-6, 5)).astype(dtype)
        extremes = [0.0, -0.0, limits.max, limits.min, limits.smallest_subnormal, -limits.tiny]
        return np.where(rng.random(shape) < rng.choice([0, 0.1]), rng.choice(np.array(extremes, dtype), shape), x)


def scores(rng, shape):
    """Integers of one dtype: close together, far apart, or at the ends of what it holds."""
    dtype = rng.choice(np.array(INTEGERS, object))
    limits = np.iinfo(dtype)
    spread = min(int(rng.choice([1, 9, 300, 4095, 4096, 70_000, 2**24, 2**40, 2**64])), limits.max - limits.min)
    low = int(rng.choice(np.array([limits.min, limits.max - spread, max(limits.min, -(spread // 2))], object)))
    steps = rng.integers(0, spread, shape, np.uint64, endpoint=True)
    return (steps + np.uint64(low % 2**64)).astype(dtype)


def bounds(rng, rows, n):
    """What each row asks for: one number, or an array of any integer dtype that broadcasts to the rows."""

    def drawn(most):
        if rng.random() < 0.5:
            return int(rng.integers(0, most + 1))
        dtype = rng.choice(np.array([t for t in INTEGERS if np.iinfo(t).max >= n], object))
        return rng.integers(0, most, part(rng, rows), endpoint=True).astype(dtype)

    lengths = drawn(n) if rng.random() < 0.5 else None
    shortest = n if lengths is None else int(np.min(lengths, initial=n))
    starts = drawn(shortest) if rng.random() < 0.4 else None
    sink, recent = (int(rng.choice([0, 0, 0, 1, 5, n, 2**40])) for _ in range(2))
    k = drawn(n) if rng.random() < 0.7 else int(rng.choice([0, n, min(n, 1)]))
    options = {"lengths": lengths, "starts": starts, "sink": sink, "recent": recent}
    return k, {name: value for name, value in options.items() if value is not None}
