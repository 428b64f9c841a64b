"""The file format of an index: one header, then arrays that can be memory-mapped. All little-endian.

    0    magic "hcBitIdx", version, header length
    16   length of the file, rows, next id, seed (-1: none)
    48   words of a code, dimensions of a vector, kind of kept vectors, flags
    64   SHA-256 of each section: mean, matrix, ids, codes, vectors
    224  SHA-256 of the 224 bytes above
    256  the sections in that order, each starting on a multiple of 64 and padded with zeros, which its digest covers

    mean     float32 [D]          if flag MEAN           codes    int32 [n, 32-bit words]
    matrix   float32 [D, 32 W]    if flag MATRIX         vectors  float16 or float32 [n, D], if kept
    ids      int64 [n]            flag ASCENDING: they ascend

Without a matrix a code has D bits, a multiple of 8; the bits after them are 0.

Offsets of sections are not stored but follow from shapes; their sum must equal the file's length before anything is
allocated or mapped. Every load verifies the header, mean and matrix; the other sections are verified by default.
"""

import hashlib
import math
import mmap
import os
import struct
from pathlib import Path
from typing import IO, Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from hashcore.atomic import replacing
from hashcore.index.encoder import Encoder
from hashcore.index.rows import LARGEST_ID, Rows

MAGIC = b"hcBitIdx"
VERSION = 1
FIELDS = struct.Struct("<8sII QQqq IIII")
DIGEST = 32
HEADER = 256
ALIGN = 64
SECTIONS = ("mean", "matrix", "ids", "codes", "vectors")
SMALL = ("mean", "matrix")  # verified by every load: every query reads all of them
MEAN, MATRIX, ASCENDING = 1, 2, 4
KEPT: dict[str | None, np.dtype[Any] | None] = {None: None, "float16": np.dtype("<f2"), "float32": np.dtype("<f4")}
KINDS = tuple(KEPT)
LARGEST = 2**20  # dimensions, and bits

Shapes = dict[str, tuple[tuple[int, ...], np.dtype[Any]]]


def write(path: str | os.PathLike[str], encoder: Encoder, rows: Rows) -> None:
    """Write all rows to path atomically; on any failure, path keeps its old content."""
    path, rows = Path(path), rows.alone()
    if path.is_dir():
        raise IsADirectoryError(f"expected a file to write, got the folder {path}; name a file in it")
    flags = MEAN * (encoder.mean is not None) + MATRIX * (encoder.matrix is not None) + ASCENDING * rows.ascending
    kept = KINDS.index(None if rows.vectors is None else rows.vectors.dtype.name)
    words = rows.codes.shape[1]
    shapes = _shapes(rows.count, words, encoder.dim, kept, flags)
    seed = -1 if encoder.seed is None else encoder.seed
    fields = FIELDS.pack(
        *(MAGIC, VERSION, HEADER, _length(shapes), rows.count, rows.next_id, seed, words, encoder.dim, kept, flags)
    )
    with replacing(path) as temporary, temporary.open("wb") as file:
        file.write(bytes(HEADER))
        columns = encoder.mean, encoder.matrix, rows.ids, rows.codes, rows.vectors
        digests = [_write_section(file, shapes[name], x) for name, x in zip(SECTIONS, columns, strict=True)]
        head = fields + b"".join(digests)
        file.seek(0)
        file.write(head + hashlib.sha256(head).digest())


def read(path: str | os.PathLike[str], mapped: bool, verify: bool) -> tuple[Encoder, Rows]:
    """Read an index. Raises: ValueError, before any allocation, for an invalid file."""
    path = Path(path)
    if path.is_dir():
        raise IsADirectoryError(f"expected a file that BitIndex.save wrote, got the folder {path}; name a file in it")
    if path.exists() and not path.is_file():  # opening a pipe would wait for a writer
        _refuse(path, "it is a pipe or a device, not a regular file")
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        header = file.read(HEADER)
        count, next_id, seed, words, dim, kept, flags, digests = _header(path, header, size)
        shapes = _shapes(count, words, dim, kept, flags)
        if _length(shapes) != size:
            _refuse(path, f"its header describes {_length(shapes)} bytes, got a file of {size}")
        data = _bytes(path, file, size, mapped)
    arrays, start = {}, HEADER
    for name, digest in zip(SECTIONS, digests, strict=True):
        shape, dtype = shapes[name]
        end = start + _padded(shape, dtype)
        if (verify or name in SMALL) and hashlib.sha256(data[start:end].data).digest() != digest:
            _refuse(path, f"the checksum of its {name} does not match")
        arrays[name] = data[start : start + _bytes_of(shape, dtype)].view(dtype).reshape(shape)
        start = end
    if verify:
        _check_ids(path, arrays["ids"], next_id, bool(flags & ASCENDING))
    mean, matrix = (arrays[name] if flags & flag else None for name, flag in (("mean", MEAN), ("matrix", MATRIX)))
    if any(x is not None and not np.isfinite(x).all() for x in (mean, matrix, arrays["vectors"] if verify else None)):
        _refuse(path, "it has numbers that are not finite")
    encoder = Encoder(dim, dim if matrix is None else 32 * words, mean, matrix, None if seed < 0 else seed)
    codes, vectors = arrays["codes"], arrays["vectors"] if kept else None
    if verify and encoder.padding and (codes != encoder.masked(codes)).any():
        _refuse(path, "its codes have more bits than its vectors have dimensions")
    return encoder, Rows(codes, arrays["ids"], vectors, count, next_id, bool(flags & ASCENDING))


def _shapes(count: int, words: int, dim: int, kept: int, flags: int) -> Shapes:
    """Return the shape and dtype of every section; absent sections have no rows."""
    real = np.dtype("<f4")
    return {
        "mean": ((dim if flags & MEAN else 0,), real),
        "matrix": ((dim if flags & MATRIX else 0, 32 * words), real),
        "ids": ((count,), np.dtype("<i8")),
        "codes": ((count, words), np.dtype("<i4")),
        "vectors": ((count if kept else 0, dim), KEPT[KINDS[kept]] or real),
    }


def _bytes_of(shape: tuple[int, ...], dtype: np.dtype[Any]) -> int:
    return dtype.itemsize * math.prod(shape)  # of Python's integers, which do not overflow for a corrupt header


def _padded(shape: tuple[int, ...], dtype: np.dtype[Any]) -> int:
    return -(-_bytes_of(shape, dtype) // ALIGN) * ALIGN


def _length(shapes: Shapes) -> int:
    return HEADER + sum(_padded(*section) for section in shapes.values())


def _write_section(file: IO[bytes], section: tuple[tuple[int, ...], np.dtype[Any]], column: Any) -> bytes:
    """Write an array, or nothing for None, and its padding; return the digest of both."""
    shape, dtype = section
    octets = np.ascontiguousarray([] if column is None else column, dtype).reshape(-1).view(np.uint8).data
    padding = bytes(_padded(shape, dtype) - _bytes_of(shape, dtype))
    file.write(octets)
    file.write(padding)
    digest = hashlib.sha256(octets)
    digest.update(padding)
    return digest.digest()


def _header(path: Path, header: bytes, size: int) -> tuple[int, int, int, int, int, int, int, list[bytes]]:
    """Check the header by itself and against the file's length, and return its fields."""
    if header[: len(MAGIC)] != MAGIC:
        _refuse(path, f"expected it to start with {MAGIC!r}, got {header[: len(MAGIC)]!r}")
    if len(header) < HEADER:
        _refuse(path, f"expected a header of {HEADER} bytes, got {len(header)}")
    _, version, length, stated, count, next_id, seed, words, dim, kept, flags = FIELDS.unpack_from(header)
    if (version, length) != (VERSION, HEADER):
        _refuse(path, f"expected format version {VERSION} with {HEADER} bytes of header, got {version} with {length}")
    if hashlib.sha256(header[:-DIGEST]).digest() != header[-DIGEST:]:
        _refuse(path, "the checksum of its header does not match")
    if stated != size:
        _refuse(path, f"expected {stated} bytes, got {size}")
    sound = (
        (1 <= words <= LARGEST // 32 and 1 <= dim <= LARGEST)
        and (kept < len(KINDS) and flags < 8)
        and (flags & MATRIX or (dim % 8 == 0 and words == -(-dim // 32)))
        and (0 <= next_id <= LARGEST_ID + 1 and seed >= -1)
    )
    if not sound:
        _refuse(path, f"its header has invalid values: {words} words, {dim} dimensions, next id {next_id}")
    digests = [header[at : at + DIGEST] for at in range(FIELDS.size, HEADER - DIGEST, DIGEST)]
    return count, next_id, seed, words, dim, kept, flags, digests


def _bytes(path: Path, file: IO[bytes], size: int, mapped: bool) -> NDArray[np.uint8]:
    """Return the file as read-only bytes, mapped or read."""
    if mapped:
        return np.frombuffer(mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ), np.uint8)
    file.seek(0)
    data = np.fromfile(file, np.uint8, size)
    if data.size != size:
        _refuse(path, f"expected {size} bytes, got {data.size}")
    data.flags.writeable = False
    return data


def _check_ids(path: Path, ids: NDArray[np.int64], next_id: int, ascending: bool) -> None:
    ordered = ids if ascending else np.sort(ids)
    if ids.size and not (ordered[0] >= 0 and ordered[-1] < next_id and (ordered[1:] > ordered[:-1]).all()):
        _refuse(path, "its ids are not unique numbers below its next id")


def _refuse(path: Path, reason: str) -> NoReturn:
    raise ValueError(f"{path} is not a usable BitIndex file: {reason}; save the index again or restore the file")
