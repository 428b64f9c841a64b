"""Every function of hashcore, on arguments drawn at random, against hashcore.reference: tolerance 0.

A case is one call: numpy or torch on the CPU, the latter also through the operators that torch.compile sees; arrays
anywhere in memory (axes in any order, gaps, backwards, repeated, unaligned, of the other byte order), empty ones,
extreme values, ragged rows. One in eight is spoilt first: then ValueError or TypeError in one line may come instead.
"""

import contextlib
from typing import Any, NamedTuple
from unittest import mock

import hashcore
import numpy as np
import torch
from fuzz_arrays import REALS, bounds, codes, lay, lead, part, reals, scores, size
from fuzz_places import somewhere
from hashcore import reference
from hashcore.cpu import threads


class Call(NamedTuple):
    """A call in numpy's terms: positional arguments, options by name, and which of them may be of any byte order."""

    function: str
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    any_order: bool = False


# ---- Calls ---------------------------------------------------------------------------------------------------------


def draw(rng) -> Call:
    """Draw a call that must succeed."""
    functions = ["pack", "unpack", "quantise", "planes", "group_planes", *["score", "topk", "search"] * 2]
    function = str(rng.choice(functions))
    words, shape = int(rng.choice([1, 2, 3, 4, 4, 4, 5, 8, 9])), lead(rng)
    match function:
        case "pack":
            x = reals(rng, (*shape, 32 * words), rng.choice(np.array(REALS, object)))
            if x.dtype.kind == "f":
                x = np.where(rng.random(x.shape) < 0.05, rng.choice([np.nan, np.inf, -np.inf], x.shape), x)
                with np.errstate(over="ignore"):
                    x = x.astype(rng.choice([np.float16, np.float32, np.float64]))
            return Call(function, (x,), {}, any_order=True)
        case "unpack":
            return Call(function, (codes(rng, *shape, words),), {})
        case "quantise" | "planes":
            last = 32 * words if function == "planes" else size(rng, 300) or 1
            w = reals(rng, (*shape, last), rng.choice(np.array(REALS, object)))
            options = {"check": False} if function == "planes" and rng.random() < 0.3 else {}
            if options and w.dtype.kind == "f":
                w = np.where(
                    rng.random(w.shape) < 0.1, np.array([np.nan, np.inf, -np.inf], w.dtype)[rng.integers(3)], w
                )
            return Call(function, (w, int(rng.integers(1, 9))), options, any_order=True)
        case "group_planes":
            return Call(function, (codes(rng, *shape, int(rng.integers(1, 20)), words),), {})
        case "topk":
            n = size(rng)
            shape = shape if n < 1000 else shape[:1]
            x = scores(rng, (*shape, n))
            k, options = bounds(rng, shape, n)
            return Call(function, (x, k), options, any_order=True)
    return drawn_comparison(rng, function, shape, words)


def drawn_comparison(rng, function, shape, words) -> Call:
    """Draw a score or a search."""
    n, count = size(rng), int(rng.choice([0, 1, 1, 2, 3, 5]))
    shape = shape if n < 1000 else shape[:1]
    weights, most = None, (2**31 - 1 if function == "score" else 2**16 - 1) // (32 * words)
    if rng.random() < 0.5:
        weights = tuple(int(x) for x in rng.integers(1, min(200, most // 5), count))
        if weights and rng.random() < 0.2:  # the largest score there may be
            weights = (*weights[1:], most - sum(weights[1:]))
    query, keys = codes(rng, *part(rng, shape), count, words), codes(rng, *part(rng, shape), n, words)
    rows = np.broadcast_shapes(query.shape[:-2], keys.shape[:-2])
    rows = rows if weights is not None else (*rows, count)
    if function == "score":
        return Call(function, (query, keys, weights), {})
    k, options = bounds(rng, rows, n)
    return Call(function, (query, keys, k, weights), {**options, "order": str(rng.choice(["best", "index"]))})


# ---- Cases ---------------------------------------------------------------------------------------------------------


@somewhere
def case(rng: np.random.Generator) -> int:
    """Make one call and compare it with its oracle; return 1, the calls made."""
    call = draw(rng)
    tensors = bool(rng.random() < 0.4) and not any(getattr(x, "dtype", None) == np.longdouble for x in call.arguments)
    arguments = [lay(rng, x, tensors, call.any_order) if isinstance(x, np.ndarray) else x for x in call.arguments]
    options = {k: lay(rng, x, tensors, True) if isinstance(x, np.ndarray) else x for k, x in call.options.items()}
    half = tensors and call.any_order and rng.random() < 0.3 and round_to_bfloat16(arguments[0])
    expected = oracle(call.function, arguments, {name: x for name, x in options.items() if name != "check"})
    spoilt = rng.random() < 0.125 and spoil(rng, arguments, options)
    refused, found = None, None
    grain, threads.GRAIN = threads.GRAIN, int(rng.choice([1 << 10, threads.GRAIN], p=[0.1, 0.9]))  # parts, or one
    try:
        found = made(rng, call.function, arguments, options, tensors, half)
    except (ValueError, TypeError) as error:
        refused = str(error)
    finally:
        threads.GRAIN = grain
    if refused is not None:
        assert spoilt, f"{call.function} refused what it should take: {refused}"
        assert "\n" not in refused
    elif not spoilt:
        compare(found, expected)
    return 1


def oracle(function, arguments, options):
    """What a call should return, as a tuple.

    The reference wants bounds that can be subtracted from, and codes of at least one row: of none, those of zeros are
    cut to the size.
    """
    first, *others = arguments
    rows = first.shape[: -2 if function == "group_planes" else -1]
    empty = 0 in first.shape and function not in ("score", "topk", "search")
    first = np.zeros([n or 1 for n in first.shape], first.dtype) if empty else first
    first = first.astype(first.dtype.newbyteorder("="), copy=False)
    bounds = {"k": others.pop(function == "search")} | options if function in ("topk", "search") else options
    weights = {"weights": others.pop()} if function == "search" else {}
    bounds = {name: x.astype(np.int64) if isinstance(x, np.ndarray) else x for name, x in bounds.items()}
    found = getattr(reference, function)(first, *others, **weights, **bounds)
    found, cut = found if isinstance(found, tuple) else (found,), tuple(map(slice, rows))
    return tuple(x[cut] if empty and isinstance(x, np.ndarray) else x for x in found)


def spoil(rng, arguments, options) -> bool:
    """Put something in place of an argument; say so, because it may still be right."""
    places = [(arguments, at) for at in range(len(arguments))] + [(options, x) for x in options if x != "check"]
    holder, key = places[rng.integers(len(places))]
    x = holder[key]
    hostile = [None, -1, 1.5, "a", 2**31, 2**63, 2**70, -(2**70), (), [1], np.zeros((2, 3)), np.int32(3)]
    if isinstance(x, np.ndarray) and x.ndim and rng.random() < 0.6:
        hostile = [x[..., :-1], x[0] if len(x) else x, x[None], x[..., None]]
        hostile += [x.astype(complex), np.zeros(x.shape, "f4")]
    holder[key] = hostile[rng.integers(len(hostile))]
    return True


def round_to_bfloat16(x) -> bool:
    """Round float32 in place, if it stays finite."""
    if x.dtype != np.float32 or not x.flags.writeable:
        return False
    rounded = torch.from_numpy(x).bfloat16().float().numpy()
    if not np.isfinite(rounded).all():
        return False
    x[...] = rounded
    return True


def made(rng, function, arguments, options, tensors, half):
    """Make the call on arrays, or on tensors over the same memory; return what came as a list."""
    traced = contextlib.nullcontext()
    if tensors:
        arguments = [tensor(x) for x in arguments]
        options = {name: tensor(x) for name, x in options.items()}
        if rng.random() < 0.25:  # by the operators that traced programs call
            traced = mock.patch.object(hashcore.ops.arguments, "for_torch", return_value=True)
        if half and isinstance(arguments[0], torch.Tensor) and arguments[0].dtype == torch.float32:
            arguments[0] = arguments[0].bfloat16()
    with traced:
        found = getattr(hashcore, function)(*arguments, **options)
    found = found if isinstance(found, tuple | list) else [found]
    assert all(isinstance(x, torch.Tensor if tensors else np.ndarray) for x in found[:2] if not isinstance(x, tuple))
    return [x.numpy() if isinstance(x, torch.Tensor) else x for x in found]


def tensor(x):
    """The tensor over an array's memory; anything else as it is."""
    return torch.from_numpy(x) if isinstance(x, np.ndarray) else x


def compare(found, expected):
    for ours, theirs in zip(found, expected, strict=True):
        if isinstance(theirs, np.ndarray):
            np.testing.assert_array_equal(ours, theirs, strict=True)
        else:
            assert ours == theirs
