"""Damaged and forged files of BitIndex: none that was damaged is taken, and none of any kind does harm.

Damage is what disks and networks do: bits flipped, pieces cut, doubled, zeroed, moved, taken from another index, fields
of the header overwritten. A forger writes the right checksum below his header; what then is taken must be an index.
"""

import atexit
import functools
import hashlib
import tempfile
from pathlib import Path

import numpy as np
from hashcore import BitIndex
from hashcore.index import file

FIELDS = [(8, 4), (12, 4), (16, 8), (24, 8), (32, 8), (40, 8), (48, 4), (52, 4), (56, 4), (60, 4)]  # place, width
NUMBERS = [0, 1, 2, 7, 31, 255, 256, 2**20 + 1, 2**31 - 1, 2**63 - 1, 2**64 - 1]
NUMBERS += [1 << bits for bits in (16, 20, 31, 40, 58, 63)]


@functools.cache
def folder() -> Path:
    made = tempfile.TemporaryDirectory()
    atexit.register(made.cleanup)
    return Path(made.name)


@functools.cache
def whole() -> list[bytes]:
    """Files of every kind, two of each, and their bytes."""
    files = []
    for seed in range(2):
        rng = np.random.default_rng(seed)
        x = rng.normal(size=(9, 32)).astype(np.float32)
        made = [BitIndex.from_vectors(x, encoder="sign", keep=keep) for keep in (None, "float16", "float32")]
        made += [BitIndex.from_vectors(x, rng.permutation(50)[:9], centre=True), BitIndex(32), BitIndex(7, 64, seed=3)]
        made[-1].add(rng.normal(size=(3, 7)))
        for index in made:
            index.save(folder() / "whole")
            files.append((folder() / "whole").read_bytes())
    return files


def case(rng: np.random.Generator) -> int:
    """Write one damaged or forged file, open it in one way and use what is opened; return 1."""
    original = whole()[rng.integers(len(whole()))]
    data, forged = bytearray(original), bool(rng.random() < 0.25)
    for _ in range(int(rng.integers(1, 4))):
        (set_field if forged else damage)(rng, data)
    if forged:
        data[file.HEADER - file.DIGEST : file.HEADER] = hashlib.sha256(data[: file.HEADER - file.DIGEST]).digest()
    mapped, verify = bool(rng.random() < 0.5), bool(forged or rng.random() < 0.8)
    path = folder() / "damaged.index"
    path.unlink(missing_ok=True)  # an earlier one may still be mapped
    path.write_bytes(data)
    index = allowed(lambda: BitIndex.load(path, mmap=mapped, verify=verify), str(path))
    if index is None:
        return 1
    assert forged or not verify or bytes(data) in whole(), "a damaged file was taken"
    use(rng, index)
    return 1


def damage(rng, data: bytearray) -> None:
    """Change a piece of a file as an accident does."""
    at, length = int(rng.integers(len(data) + 1)), int(rng.choice([1, 4, 32, 64, 256]))
    other = whole()[rng.integers(len(whole()))]
    match rng.integers(9):
        case 0 if at < len(data):
            data[at] ^= 1 << int(rng.integers(8))
        case 1:
            del data[at : at + length]
        case 2:
            del data[at:]
        case 3:
            data[at:at] = rng.bytes(length)
        case 4:
            data[at:at] = data[at : at + length]
        case 5:
            data[at : at + length] = bytes(len(data[at : at + length]))
        case 6:
            data[at : at + length] = other[at : at + length]
        case 7:
            data[at:] = other[at:]
        case _:
            set_field(rng, data)


def set_field(rng, data: bytearray) -> None:
    """Overwrite a number of the header by another, rather one near it."""
    at, width = FIELDS[rng.integers(len(FIELDS))]
    before = int.from_bytes(data[at : at + width], "little")
    number = before + int(rng.integers(-2, 3)) if rng.random() < 0.5 else NUMBERS[rng.integers(len(NUMBERS))]
    data[at : at + width] = (number % 2 ** (8 * width)).to_bytes(width, "little")


def use(rng, index: BitIndex) -> None:
    """Do everything once with what was opened; its content may be wrong, so ValueError is an answer."""
    codes, count = index.codes, min(len(index), 3)
    assert codes.shape == (len(index), index.bits // 32)
    found, ids = index.search(codes[:2], count)
    assert found.shape == ids.shape == (len(codes[:2]), count)
    x = rng.normal(size=(2, index.dim)).astype(np.float32)
    for call in (
        lambda: index.search(x, count),
        lambda: index.search(x, count, rerank=2),
        lambda: index.add(x),
        lambda: index.remove(index.ids[:1]),
        lambda: index.save(folder() / "again"),
        lambda: index.add(x, [10**6, 10**6 + 1]),
    ):
        allowed(call)
    assert isinstance(repr(index), str)


def allowed(call, name: str = ""):
    """What a call returns, or None if it raises ValueError in one line that has the name."""
    try:
        return call()
    except ValueError as error:
        words = str(error)
    assert name in words
    assert "\n" not in words
    return None
