"""Scores of many keys at once, in explicit LLVM vectors.

LLVM maps its vectors to the registers of the machine: with AVX-512, eight words are one register and their popcount is
one vpopcntq. Explicit vectors compile in a quarter of the vectoriser's time and need no remainder loops.
"""

# llvmlite is untyped.
# pyright: reportAttributeAccessIssue=false

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from hashcore.cpu.intrinsics import BYTE, HALF, LANES, POSITION, WORD, _add, _indices, _load, _prefetch, _splat

TILE_KEYS = 32  # keys per tile, whose two 64-bit words each fill eight AVX-512 registers
AHEAD = 8192  # prefetch distance in bytes: two memory pages

SHORT: Any = ir.IntType(16)
WORDS: Any = ir.VectorType(WORD, 8)
SCORES: Any = ir.VectorType(SHORT, LANES // 2)


@intrinsic
def score_128_bits(
    typing_context: Any, first: Any, second: Any, third: Any, fourth: Any, planes: Any, weights: Any, count: Any,
    threshold: Any, out: Any, like: Any,
):  # fmt: skip
    """Score LANES keys of two words each against the `count` planes of one row.

    Each quarter of the keys is contiguous, at its own address, so that keys may be in different pages. planes are the
    complemented planes, two words each; weights are uint32 and sum to at most (2^16 - 1) / 128. The scores are written
    to the address out in like's dtype. Returns a mask of the scores at or above the threshold, a uint16.

    The matches of a word, at most 64, fit a byte, so shifts merge eight vectors of counts into one. Then the two words
    of each key are added, and the bytes are permuted to key order. This takes some 70 operations per plane for 64 keys.
    """
    bits = like.dtype.bitwidth

    def emit(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        *quarters, planes, weights, count, threshold, out, _ = values
        totals = [cgutils.alloca_once(builder, SCORES) for _ in range(2)]
        _clear(builder, totals)
        with cgutils.for_range(builder, count) as plane:
            pair = _load(builder, builder.add(planes, builder.shl(plane.index, WORD(4))), ir.VectorType(WORD, 2))
            matches = _matching_bytes(builder, quarters, builder.shuffle_vector(pair, pair, _indices([0, 1] * 4)))
            _add_matches(builder, totals, matches, weights, plane.index)
        scores = builder.shuffle_vector(*map(builder.load, totals), _indices(range(LANES)))
        limit = _splat(builder, threshold, LANES)
        wide = ir.VectorType(ir.IntType(bits), LANES)
        place = builder.inttoptr(out, wide.as_pointer())
        builder.store(builder.zext(scores, wide) if bits > 16 else scores, place).align = bits // 8
        return builder.bitcast(builder.icmp_unsigned(">=", scores, limit), WORD)

    return types.uint64(*[POSITION] * 7, types.uint16, POSITION, like), emit


@intrinsic
def score_columns(
    typing_context: Any, keys: Any, step: Any, words: Any, planes: Any, weights: Any, count: Any, rows: Any, out: Any,
    offset: Any, like: Any,
):  # fmt: skip
    """Score TILE_KEYS keys with any number of words against several rows; `step`: bytes between columns of words.

    planes has the complemented `count` planes of each row; weights are uint32. out is an array of addresses, one per
    row: TILE_KEYS scores in like's dtype are written `offset` bytes after each. A key is loaded once for all rows.
    """
    bits = like.dtype.bitwidth

    def emit(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        keys, step, words, planes, weights, count, rows, out, offset, _ = values
        totals = [cgutils.alloca_once(builder, WORDS) for _ in range(0, TILE_KEYS, 8)]
        with cgutils.for_range(builder, rows) as row:
            _clear(builder, totals)
            with cgutils.for_range(builder, words) as word:
                column = builder.add(keys, builder.mul(step, word.index))
                x = [_load(builder, _add(builder, column, 64 * i), WORDS) for i in range(len(totals))]
                with cgutils.for_range(builder, count) as plane:
                    index = builder.add(builder.mul(row.index, count), plane.index)
                    index = builder.add(builder.mul(index, words), word.index)
                    a = _load(builder, builder.add(planes, builder.shl(index, WORD(3))), WORD)
                    weight = _load(builder, builder.add(weights, builder.shl(plane.index, WORD(2))), HALF)
                    # Zero-extended, a weight's product with a popcount is one vpmuludq.
                    a, weight = _splat(builder, a, 8), _splat(builder, builder.zext(weight, WORD), 8)
                    for total, key in zip(totals, x, strict=True):
                        matches = builder.mul(_popcount(builder, builder.xor(key, a)), weight)
                        builder.store(builder.add(builder.load(total), matches), total)
            address = _load(builder, builder.add(out, builder.shl(row.index, WORD(3))), WORD)
            address, vector = builder.add(address, offset), ir.VectorType(ir.IntType(bits), 8)
            for i, total in enumerate(totals):
                place = builder.inttoptr(_add(builder, address, bits * i), vector.as_pointer())
                builder.store(builder.trunc(builder.load(total), vector), place).align = bits // 8
        return context.get_dummy_value()

    return types.void(*[POSITION] * 9, like), emit


@intrinsic
def transpose(typing_context: Any, keys: Any, step: Any, last: Any, words32: Any, tile: Any):
    """Transpose TILE_KEYS keys of `words32` 32-bit words, `step` bytes apart: tile[v] gets 64-bit word v of all keys.

    tile is uint64 [ceil(words32 / 8) * 4, TILE_KEYS], zero-padded. Keys after index `last`, 0 <= last < TILE_KEYS, are
    copies of key `last`. Nothing outside the keys is read.
    """

    def emit(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        keys, step, last, words32, tile = values
        whole = builder.icmp_unsigned("==", last, WORD(TILE_KEYS - 1))
        with builder.if_else(whole) as (all_there, some_there):
            with all_there:
                _transpose(builder, keys, step, None, words32, tile)
            with some_there:
                _transpose(builder, keys, step, last, words32, tile)
        return context.get_dummy_value()

    return types.void(*[POSITION] * 5), emit


def _add_matches(builder: Any, totals: list[Any], matches: Any, weights: Any, plane: Any) -> None:
    """Add the matches of a plane, LANES bytes, times its weight to both halves of the scores."""
    weight = _load(builder, builder.add(weights, builder.shl(plane, WORD(2))), HALF)
    weight = _splat(builder, builder.trunc(weight, SHORT), LANES // 2)
    for total, places in zip(totals, (range(LANES // 2), range(LANES // 2, LANES)), strict=True):
        some = builder.zext(builder.shuffle_vector(matches, matches, _indices(places)), SCORES)
        builder.store(builder.add(builder.load(total), builder.mul(some, weight)), total)


def _matching_bytes(builder: Any, quarters: Any, pair: Any) -> Any:
    """Return the matches of LANES keys of two words with the two words of a plane, as a vector of bytes."""
    halves = []
    for half in (quarters[:2], quarters[2:]):
        merged = ir.Constant(WORDS, [0] * 8)
        for i in range(8):
            words = _load(builder, _add(builder, half[i // 4], 64 * (i % 4)), WORDS)
            counts = _popcount(builder, builder.xor(words, pair))
            merged = _shift_in(builder, counts, merged)
        halves.append(merged)
    # Words 2 j and 2 j + 1 of a half belong to key j of each of its eight vectors; the byte is the vector's number.
    first = builder.shuffle_vector(*halves, _indices([0, 8, 2, 10, 4, 12, 6, 14]))
    second = builder.shuffle_vector(*halves, _indices([1, 9, 3, 11, 5, 13, 7, 15]))
    matches = builder.bitcast(builder.add(first, second), ir.VectorType(BYTE, LANES))
    places = [16 * (i % 4) + 8 * (i // 32) + i % 32 // 4 for i in range(LANES)]
    return builder.shuffle_vector(matches, matches, _indices(places))


def _popcount(builder: Any, x: Any) -> Any:
    kind = x.type
    name = f"llvm.ctpop.v{kind.count}i{kind.element.width}"
    return builder.call(cgutils.get_or_insert_function(builder.module, ir.FunctionType(kind, [kind]), name), [x])


def _shift_in(builder: Any, x: Any, merged: Any) -> Any:
    """Shift the bytes of `merged` down by one and insert the lowest byte of x at the top: one vpshrd with AVX-512."""
    kind, lanes = x.type, x.type.count
    function = ir.FunctionType(kind, [kind] * 3)
    name = f"llvm.fshr.v{lanes}i{kind.element.width}"
    funnel = cgutils.get_or_insert_function(builder.module, function, name)
    return builder.call(funnel, [x, merged, ir.Constant(kind, [8] * lanes)])


def _transpose(builder: Any, keys: Any, step: Any, last: Any, words32: Any, tile: Any) -> None:
    """Transpose eight keys and four words at a time; keys after `last` are copies of it."""
    fours = builder.udiv(builder.add(words32, WORD(7)), WORD(8))
    with cgutils.for_range(builder, fours) as four, cgutils.for_range(builder, WORD(TILE_KEYS // 8)) as group:
        present = builder.trunc(builder.sub(words32, builder.mul(four.index, WORD(8))), HALF)
        mask = builder.icmp_unsigned("<", _indices(range(8)), _splat(builder, present, 8))
        rows = []
        for i in range(8):
            key = _add(builder, builder.mul(group.index, WORD(8)), i)
            if last is not None:
                key = builder.select(builder.icmp_unsigned("<", key, last), key, last)
            place = builder.add(builder.mul(key, step), builder.mul(four.index, WORD(32)))
            rows.append(_load_some(builder, builder.add(keys, place), mask))
            _prefetch(builder, _add(builder, builder.add(keys, place), AHEAD))
        # Each step exchanges one bit of the row index with the same bit of the column index.
        x = [builder.shuffle_vector(rows[i], rows[i + 4], _indices(range(8))) for i in range(4)]
        for distance, low in ((1, [0, 8, 2, 10, 4, 12, 6, 14]), (2, [0, 1, 8, 9, 4, 5, 12, 13])):
            high = _indices([i + distance for i in low])
            for i in (0, 2) if distance == 1 else (0, 1):
                pair = x[i], x[i + distance]
                x[i] = builder.shuffle_vector(*pair, _indices(low))
                x[i + distance] = builder.shuffle_vector(*pair, high)
        column = builder.add(tile, builder.mul(four.index, WORD(4 * 8 * TILE_KEYS)))
        column = builder.add(column, builder.mul(group.index, WORD(64)))
        for i, words in enumerate(x):
            place = builder.inttoptr(_add(builder, column, 8 * TILE_KEYS * i), WORDS.as_pointer())
            builder.store(words, place).align = 8


def _load_some(builder: Any, address: Any, mask: Any) -> Any:
    """Load the masked ones of eight 32-bit words, and 0 for the others, as four 64-bit words."""
    eight = ir.VectorType(HALF, 8)
    pointer = eight.as_pointer()
    function = ir.FunctionType(eight, [pointer, HALF, mask.type, eight])
    load = cgutils.get_or_insert_function(builder.module, function, "llvm.masked.load.v8i32.p0")
    arguments = [builder.inttoptr(address, pointer), HALF(4), mask, ir.Constant(eight, [0] * 8)]
    return builder.bitcast(builder.call(load, arguments), ir.VectorType(WORD, 4))


def _clear(builder: Any, totals: list[Any]) -> None:
    for total in totals:
        builder.store(ir.Constant(total.type.pointee, None), total)
