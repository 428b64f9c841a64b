"""Damaged and forged files of BitIndex: none that was damaged is taken, and none of any kind does harm.

A forger writes the right checksum below his header; what then is taken must be an index.
"""

import functools
import hashlib

import numpy as np
from fuzz_damage import NUMBERS, damaged, folder, found, one_of
from fuzz_places import somewhere
from hashcore import BitIndex
from hashcore.index import file

FIELDS = [(8, 4), (12, 4), (16, 8), (24, 8), (32, 8), (40, 8), (48, 4), (52, 4), (56, 4), (60, 4)]  # place, width


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
        made.append(BitIndex.from_codes(np.packbits(x[:, :24] > 0, axis=-1)))
        for index in made:
            index.save(folder() / "whole")
            files.append((folder() / "whole").read_bytes())
    return files


@somewhere
def case(rng: np.random.Generator) -> int:
    """Write one damaged or forged file, open it in one way and use what is opened; return 1."""
    forged = bool(rng.random() < 0.25)
    data = bytearray(one_of(rng, whole()))
    if forged or rng.random() < 0.2:
        for _ in range(int(rng.integers(1, 4))):
            set_field(rng, data)
    if forged:
        data[file.HEADER - file.DIGEST : file.HEADER] = hashlib.sha256(data[: file.HEADER - file.DIGEST]).digest()
    else:
        data = bytearray(damaged(rng, bytes(data), one_of(rng, whole())))
    mapped, verify = bool(rng.random() < 0.5), bool(forged or rng.random() < 0.8)
    path = folder() / "damaged.index"
    path.unlink(missing_ok=True)  # an earlier one may still be mapped
    path.write_bytes(data)
    index = found(lambda: BitIndex.load(path, mmap=mapped, verify=verify), str(path))
    if index is not None:
        assert forged or not verify or bytes(data) in whole(), "a damaged file was taken"
        use(rng, index)
    return 1


def set_field(rng, data: bytearray) -> None:
    """Overwrite a number of the header by another, rather one near it."""
    at, width = one_of(rng, FIELDS)
    before = int.from_bytes(data[at : at + width], "little")
    number = before + int(rng.integers(-2, 3)) if rng.random() < 0.5 else one_of(rng, NUMBERS)
    data[at : at + width] = (number % 2 ** (8 * width)).to_bytes(width, "little")


def use(rng, index: BitIndex) -> None:
    """Do everything once with what was opened; its content may be wrong, so ValueError in one line is an answer."""
    codes, count = index.codes, min(len(index), 3)
    assert codes.shape == (len(index), -(-index.bits // 32))
    scores, ids = index.search(codes[:2], count)
    assert scores.shape == ids.shape == (len(codes[:2]), count)
    x = rng.normal(size=(2, index.dim)).astype(np.float32)
    for call in (
        lambda: index.search(x, count),
        lambda: index.search(x, count, rerank=2),
        lambda: index.add(x),
        lambda: index.remove(index.ids[:1]),
        lambda: index.save(folder() / "again"),
        lambda: index.add(x, [10**6, 10**6 + 1]),
    ):
        found(call, "")
    assert isinstance(repr(index), str)
