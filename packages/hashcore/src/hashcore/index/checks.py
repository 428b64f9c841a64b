"""Checks of BitIndex's arguments. Messages say what was expected, what was passed, and what to do."""

from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from hashcore import arguments, validation

ENCODERS = ("rotation", "sign")
METRICS = ("dot", "cosine")
KEPT: dict[str | None, np.dtype[Any] | None] = {None: None, "float16": np.dtype("<f2"), "float32": np.dtype("<f4")}
LARGEST_DIM = LARGEST_BITS = 2**20
LARGEST_ID = 2**63 - 2  # so that the next id still fits int64


def integer(name: str, value: Any, low: int, high: int, remedy: str) -> int:
    """Return value as an int in low..high."""
    number = arguments.integer(name, value)
    if not low <= number <= high:
        raise ValueError(f"{name} must be in {low}..{high}, got {number}; {remedy}")
    return number


def choice(name: str, value: Any, allowed: Any) -> Any:
    """Return value after checking that it is one of `allowed`."""
    if not isinstance(value, str | None) or value not in allowed:
        wanted = ", ".join(map(repr, allowed))
        raise ValueError(f"{name} must be one of {wanted}, got {arguments.shown(value)}; choose one of them")
    return value


def bit_count(dim: int, bits: Any, encoder: str) -> int:
    """Return the length of the code: bits, or enough whole words for dim."""
    if bits is None:
        bits = -(-dim // 32) * 32 if encoder == "rotation" else dim
    bits = integer("bits", bits, 1, LARGEST_BITS, "choose another code length")
    if bits % 32:
        raise ValueError(
            f"bits must be a multiple of 32 (bits per word), got {bits}; "
            "choose another, or with encoder='sign' pad the vectors or use encoder='rotation'"
        )
    if encoder == "sign" and bits != dim:
        raise ValueError(
            f"encoder='sign' has one bit per dimension, got bits = {bits} for {dim} dimensions; "
            "use encoder='rotation' for another number of bits"
        )
    return bits


def is_codes(x: NDArray[Any]) -> bool:
    """Whether x has codes (int32 words) and not vectors (floats), by its dtype."""
    if x.dtype == np.int32:
        return True
    if x.dtype.kind == "f":
        return False
    raise TypeError(
        f"expected vectors of floats or codes of int32 words, got {x.dtype}; "
        "convert vectors with .astype('float32'), create codes with hashcore.pack"
    )


def last_dimension(name: str, x: NDArray[Any], size: int, rows: bool) -> None:
    """Raise ValueError unless the shape is [n, size] (rows) or [..., size]."""
    if (x.ndim != 2 if rows else x.ndim < 1) or x.shape[-1] != size:
        dims = f"[n, {size}]" if rows else f"[..., {size}]"
        raise ValueError(f"{name} must have shape {dims} for this index, got {list(x.shape)}; reshape or rebuild it")


def finite(name: str, x: NDArray[Any], first: int = 0) -> None:
    """Raise ValueError unless x is finite in float32; rows are counted from `first`."""
    if (row := _not_finite(x)) is not None:
        raise ValueError(
            f"{name} must be finite in float32, got NaN or infinity in row {first + row}; remove or repair it"
        )


def projected(name: str, x: NDArray[Any], first: int) -> None:
    """Raise ValueError if centring or rotating finite rows overflowed."""
    if (row := _not_finite(x)) is not None:
        raise ValueError(
            f"{name} must be small enough to be centred and rotated in float32, got an overflow in row {first + row}; "
            "scale them"
        )


def _not_finite(x: NDArray[Any]) -> int | None:
    """Return the first row of [n, D] that is not finite."""
    good = np.isfinite(x).all(axis=-1)
    return None if good.all() else int(np.argmin(good))


def fits(kept: NDArray[Any]) -> None:
    """Raise ValueError if stored vectors overflowed in their precision."""
    if not np.isfinite(kept).all():
        raise ValueError(f"vectors must fit {kept.dtype.name}, got larger numbers; scale them or use keep='float32'")


def rows_of(ids: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """Return ids as row numbers of the vectors passed for rerank."""
    if ids.size and int(ids.max()) >= count:
        raise ValueError(f"vectors= must have a row for every id, got {count} rows and id {ids.max()}; pass them all")
    return ids


def mean(value: Any, dim: int) -> NDArray[np.float32]:
    """Return a mean as finite float32 [dim]."""
    (array,), _ = arguments.host_arrays(mean=value)
    validation.real("mean", array, "[D]")
    if array.shape != (dim,):
        raise ValueError(f"mean must have shape [{dim}], got {list(array.shape)}; average the vectors over their rows")
    with np.errstate(over="ignore"):
        array = array.astype(np.float32)
    finite("mean", array[None])
    return array


def new_ids(ids: Any, count: int) -> NDArray[np.int64]:
    """Return ids as int64 [count] after checking that they are unique and not negative."""
    array = _id_array(ids)
    if array.shape != (count,):
        raise ValueError(f"expected one id for each of the {count} rows, got shape {list(array.shape)}; match them")
    if count and not 0 <= int(array.min()) <= int(array.max()) <= LARGEST_ID:
        raise ValueError(
            f"ids must be in 0..{LARGEST_ID}, got {int(array.min())}..{int(array.max())}; -1 marks an empty slot"
        )
    array = array.astype(np.int64)
    ordered = np.sort(array)
    if (twice := ordered[1:][ordered[1:] == ordered[:-1]]).size:
        raise ValueError(f"ids must be unique, got {twice[0]} twice; pass one id per row")
    return array


def known_ids(ids: Any) -> NDArray[np.int64]:
    """Return one or several ids as int64 [n] without duplicates."""
    array = _id_array(ids)
    if array.dtype == np.uint64 and array.size and int(array.max()) > LARGEST_ID:
        unknown(int(array.max()))
    return np.unique(array.astype(np.int64))


def unknown(number: int) -> NoReturn:
    """Raise ValueError for an id that is not in the index."""
    raise ValueError(f"ids must be in the index, got {number}, which is not; test with `id in index` first")


def _id_array(ids: Any) -> NDArray[Any]:
    if type(ids).__module__.partition(".")[0] == "torch":
        (ids,), _ = arguments.host_arrays(ids=ids)
    array = np.atleast_1d(np.asarray(ids))
    if array.size == 0 and array.dtype.kind == "f":  # an empty list
        array = array.astype(np.int64)
    if array.dtype.kind not in "iu" or array.ndim != 1:
        raise TypeError(f"ids must be integers in one dimension, got {array.dtype} {list(array.shape)}; flatten them")
    return array
