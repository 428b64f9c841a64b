"""The file of BitIndex: round trips, and detection of any damage."""

import hashlib
import os
import struct
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hashcore import BitIndex
from hashcore.index import file
from hypothesis import given, settings
from hypothesis import strategies as st

LAW = settings(deadline=None, max_examples=25)


def small_index(seed: int = 0, n: int = 5, dim: int = 8, **options) -> BitIndex:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, dim)).astype(np.float32)
    ids = rng.permutation(3 * n)[:n] if seed % 2 else None
    return BitIndex.from_vectors(x, ids, **options)


def everything(index: BitIndex):
    """What a caller can learn of an index, in plain values."""
    encoder = index._encoder
    x = np.random.default_rng(1).normal(size=(3, index.dim)).astype(np.float32)
    found = [index.search(x, len(index), planes=planes) for planes in (1, 3)]
    if index.keep:
        found.append(index.search(x, len(index), rerank=1))
    settings = (index.dim, index.bits, index.keep, encoder.seed, repr(index), index._rows.next_id, list(index))
    return settings, index.codes.tolist(), [(scores.tolist(), ids.tolist()) for scores, ids in found]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("indexes")


@pytest.fixture(scope="module", params=[{"keep": "float16", "centre": True}, {"encoder": "sign", "dim": 32}])
def whole(request, folder):
    """The bytes of a small file and what is in it."""
    path = folder / "whole"
    index = small_index(**request.param)
    index.save(path)
    return path.read_bytes(), everything(index)


def load(folder, data: bytes, **options) -> BitIndex:
    path = folder / "damaged"
    path.write_bytes(data)
    return BitIndex.load(path, **options)


@LAW
@given(
    *(st.integers(0, 99), st.integers(0, 40), st.sampled_from(["sign", "rotation"]), st.booleans()),
    *(st.sampled_from([None, "float16", "float32"]), st.booleans(), st.booleans(), st.sets(st.integers(0, 39))),
)
def test_what_is_saved_comes_back(folder, seed, n, how, centre, keep, mapped, verify, gone):
    index = small_index(seed, n, 32, encoder=how, centre=centre and n > 0, keep=keep)
    index.remove([i for i in gone if i in index])
    index.save(folder / "index")
    loaded = BitIndex.load(folder / "index", mmap=mapped, verify=verify)
    assert everything(loaded) == everything(index)
    loaded.save(folder / "again")
    assert (folder / "again").read_bytes() == (folder / "index").read_bytes()


@pytest.mark.parametrize("mapped", [True, False])
@pytest.mark.parametrize("seed", [0, 1])
def test_a_loaded_index_changes_as_the_one_it_came_from(folder, mapped, seed):
    index = small_index(seed, 20, keep="float16")
    index.save(folder / "index")
    before = (folder / "index").read_bytes()
    loaded = BitIndex.load(folder / "index", mmap=mapped)
    more = np.random.default_rng(3).normal(size=(4, 8)).astype(np.float32)
    for each in (index, loaded):
        each.remove(each.ids[3:7])
        each.add(more)
        each.add(more + 1, [500, 400, 300, 200])
        each.remove(400)
    assert everything(loaded) == everything(index)
    assert (folder / "index").read_bytes() == before


def test_a_mapped_index_reads_the_file_and_copies_nothing(folder):
    index = BitIndex.from_codes(np.zeros((200_000, 8), np.int32))
    index.save(folder / "large")
    for options in ({}, {"verify": False}):
        tracemalloc.start()
        loaded = BitIndex.load(folder / "large", **options)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < index.nbytes / 10
        assert not loaded._rows.codes.flags.owndata
    assert len(loaded) == 200_000


@pytest.mark.parametrize("mapped", [True, False])
def test_every_truncation_is_refused(folder, whole, mapped):
    data, _ = whole
    path = folder / "truncated"
    path.write_bytes(data)
    for size in reversed(range(len(data))):
        os.truncate(path, size)
        for verify in (True, False):
            with pytest.raises(ValueError, match="truncated is not a usable BitIndex file"):
                BitIndex.load(path, mmap=mapped, verify=verify)


def flips(folder, data: bytes, places: range, mask) -> Iterator[Path]:
    """Yield a file with one byte changed, for every place in turn."""
    path = folder / "flipped"
    path.write_bytes(data)
    with path.open("r+b", buffering=0) as changed:
        for at in places:
            os.pwrite(changed.fileno(), bytes([data[at] ^ mask(at)]), at)
            yield path
            os.pwrite(changed.fileno(), data[at : at + 1], at)


def test_every_flip_of_a_byte_is_refused(folder, whole):
    data, _ = whole
    for path in flips(folder, data, range(len(data)), lambda at: 1 << at % 8):
        with pytest.raises(ValueError, match="is not a usable BitIndex file"):
            BitIndex.load(path)


def sealed(data: bytes, **fields: int) -> bytes:
    """Return a file whose header says something else, with the right checksum of the header."""
    names = ["magic", "version", "header", "length", "count", "next_id", "seed", "words", "dim", "kept", "flags"]
    values = dict(zip(names, file.FIELDS.unpack_from(data), strict=True)) | fields
    head = file.FIELDS.pack(*values.values()) + data[file.FIELDS.size : file.HEADER - file.DIGEST]
    return head + hashlib.sha256(head).digest() + data[file.HEADER :]


def test_a_sparse_file_as_long_as_its_forged_header_says_is_refused(folder, whole):
    data, (config, *_) = whole
    shapes = file._shapes(10**6, config[1] // 32, config[0], file.KINDS.index(config[2]), file.MATRIX)
    forged = sealed(data, count=10**6, length=file._length(shapes), flags=file.MATRIX)
    path = folder / "sparse"
    path.write_bytes(forged)
    os.truncate(path, file._length(shapes))
    with pytest.raises(ValueError, match="checksum of its"):
        BitIndex.load(path)


def test_ids_that_no_index_has_are_refused(folder):
    for ids, next_id, flags in (([4, 4], 9, 0), ([-1, 2], 9, 0), ([3, 9], 9, 0), ([5, 2], 9, file.ASCENDING)):
        index = BitIndex.from_codes(np.zeros((2, 1), np.int32))
        index._rows = replace(index._rows, ids=np.array(ids), next_id=next_id, ascending=bool(flags))
        index.save(folder / "index")
        with pytest.raises(ValueError, match="its ids are not unique numbers below its next id"):
            BitIndex.load(folder / "index")


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "expected it to start with b'hcBitIdx', got b''"),
        (b"PK\x03\x04" + bytes(600), "expected it to start with b'hcBitIdx', got b'PK"),
        (b"hcBitIdx" + bytes(40), "expected a header of 256 bytes, got 48"),
        (b"hcBitIdx" + struct.pack("<II", 2, 256) + bytes(600), "expected format version 1 with 256 bytes of header, "),
    ],
)
def test_another_file_is_refused_in_words(folder, data, words):
    with pytest.raises(ValueError, match="save the index again or restore the file") as caught:
        load(folder, data)
    assert words in str(caught.value)


def test_a_folder_is_refused_with_what_to_do(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    with pytest.raises(IsADirectoryError, match="name a file in it"):
        BitIndex.load(folder)
    with pytest.raises(IsADirectoryError, match="name a file in it"):
        small_index().save(folder)
    assert os.listdir(tmp_path) == ["folder"]
    assert not os.listdir(folder)


def test_a_save_that_fails_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "index"
    small_index(0).save(path)
    before = path.read_bytes()

    def fail(*_):
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="no space"):
        small_index(1).save(path)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["index"]


def test_saving_over_the_mapped_file_leaves_the_mapped_index_as_it_was(tmp_path):
    path = tmp_path / "index"
    small_index(0, 30).save(path)
    mapped = BitIndex.load(path)
    before = everything(mapped)
    small_index(1, 3).save(path)
    assert everything(mapped) == before
    mapped.remove(mapped.ids[:4])
    mapped.save(path)
    assert everything(BitIndex.load(path)) == everything(mapped)


def test_a_file_of_version_1_still_loads(folder):
    """The bytes of one file, spelled out: a change of format must change the version."""
    fields = struct.pack("<8sIIQQqqIIII", b"hcBitIdx", 1, 256, 256 + 64 + 64, 2, 9, -1, 1, 32, 0, 4)
    ids = struct.pack("<qq", 3, 8) + bytes(48)
    codes = struct.pack("<ii", -1, 5) + bytes(56)
    digests = b"".join(hashlib.sha256(section).digest() for section in (b"", b"", ids, codes, b""))
    head = fields + digests
    data = head + hashlib.sha256(head).digest() + ids + codes
    index = load(folder, data)
    assert (index.ids.tolist(), index.codes.tolist(), index._rows.next_id) == ([3, 8], [[-1], [5]], 9)
    index.save(folder / "again")
    assert (folder / "again").read_bytes() == data


def test_only_a_regular_file_is_opened(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for place in (tmp_path / "pipe", "/dev/zero"):
        with pytest.raises(ValueError, match="it is a pipe or a device, not a regular file"):
            BitIndex.load(place)
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(OSError, match="loop"):
        BitIndex.load(tmp_path / "loop")


def test_without_verification_every_flip_up_to_the_matrix_is_refused(folder, whole):
    data, (settings, *_) = whole
    small = file.HEADER + (4 * 8 + 32 + 4 * 8 * 32 if "centred" in settings[4] else 0)
    for path in flips(folder, data, range(small), lambda at: 255):
        with pytest.raises(ValueError, match="is not a usable BitIndex file"):
            BitIndex.load(path, verify=False)
