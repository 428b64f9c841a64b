"""Files: BitIndex's round trips and detection of any damage; atomic writes, all or nothing, without leftovers."""

import hashlib
import os
import shutil
import signal
import struct
import subprocess
import sys
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from hashcore import BitIndex, atomic
from hashcore.atomic import replacing, sweep
from hashcore.index import file
from hashcore.index.encoder import Encoder
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


@pytest.mark.parametrize("verify", [True, False])
def test_every_flip_of_a_byte_is_refused(folder, whole, verify):
    """Without verification every one up to the matrix."""
    data, (settings, *_) = whole
    small = file.HEADER + (4 * 8 + 32 + 4 * 8 * 32 if "centred" in settings[4] else 0)
    path = folder / "flipped"
    path.write_bytes(data)
    with path.open("r+b", buffering=0) as changed:
        for at in range(len(data) if verify else small):
            os.pwrite(changed.fileno(), bytes([data[at] ^ (1 << at % 8 if verify else 255)]), at)
            with pytest.raises(ValueError, match="is not a usable BitIndex file"):
                BitIndex.load(path, verify=verify)
            os.pwrite(changed.fileno(), data[at : at + 1], at)


def test_ids_that_no_index_has_are_refused(folder):
    for ids, next_id, flags in (([4, 4], 9, 0), ([-1, 2], 9, 0), ([3, 9], 9, 0), ([5, 2], 9, file.ASCENDING)):
        index = BitIndex.from_codes(np.zeros((2, 1), np.int32))
        index._rows = replace(index._rows, ids=np.array(ids), next_id=next_id, ascending=bool(flags))
        index.save(folder / "index")
        with pytest.raises(ValueError, match="its ids are not unique numbers below its next id"):
            BitIndex.load(folder / "index")


def test_numbers_that_are_not_finite_are_refused(folder):
    file.write(folder / "index", Encoder(8, 8, np.full(8, np.nan, np.float32)), small_index()._rows)
    with pytest.raises(ValueError, match="it has numbers that are not finite"):
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


def test_only_a_regular_file_is_opened(tmp_path):
    for call in (BitIndex.load, small_index().save):
        with pytest.raises(IsADirectoryError, match="name a file in it"):
            call(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    for place in (tmp_path / "pipe", "/dev/zero"):
        with pytest.raises(ValueError, match="it is a pipe or a device, not a regular file"):
            BitIndex.load(place)
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(OSError, match="loop"):
        BitIndex.load(tmp_path / "loop")
    assert sorted(os.listdir(tmp_path)) == ["loop", "pipe"]


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


KILLED = """
import os, pathlib, signal, sys
from hashcore.atomic import replacing, sweep
with replacing(pathlib.Path(sys.argv[1])) as temporary:
    temporary.write_bytes(b"half")
    temporary.with_name(".tmp123").touch()  # what another library left there
    os.kill(os.getpid(), signal.SIGKILL)
"""


def write(path, content: bytes) -> None:
    with replacing(path) as temporary:
        temporary.write_bytes(content)


def test_the_umask_of_the_process_is_never_changed(tmp_path, monkeypatch):
    old = os.umask(0o027)
    try:
        monkeypatch.setattr(os, "umask", lambda _: pytest.fail("another thread's new files would have the wrong mode"))
        write(tmp_path / "file", b"whole")
    finally:
        monkeypatch.undo()
        os.umask(old)
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o640


def test_what_a_killed_writer_left_goes_with_the_next_write(tmp_path):
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path / "killed")])
        assert done.returncode == -signal.SIGKILL
        assert len(os.listdir(tmp_path)) == 1
    write(tmp_path / "file", b"whole")
    assert os.listdir(tmp_path) == ["file"]


def test_what_is_being_written_stays(tmp_path):
    with replacing(tmp_path / "first") as temporary:
        temporary.write_bytes(b"first")
        write(tmp_path / "second", b"second")
        sweep(tmp_path)
    assert (tmp_path / "first").read_bytes() == b"first"
    assert sorted(os.listdir(tmp_path)) == ["first", "second"]


def test_what_only_looks_alike_stays(tmp_path):
    for name in (".hashcore-1", ".hashcore-0123456789abcdeX", "x.hashcore-0123456789abcdef"):
        (tmp_path / name).mkdir()
    (tmp_path / ".hashcore-0123456789abcdef").touch()  # no folder
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / ".hashcore-1123456789abcdef").symlink_to(tmp_path / "elsewhere")
    before = sorted(os.listdir(tmp_path))
    sweep(tmp_path)
    assert sorted(os.listdir(tmp_path)) == before


def test_a_workplace_that_is_swept_before_it_is_locked_is_made_again(tmp_path, monkeypatch):
    lock, calls = atomic.fcntl.flock, []

    def swept_first(handle, operation):
        if not calls:
            [made] = tmp_path.iterdir()
            shutil.rmtree(made)
        calls.append(handle)
        lock(handle, operation)

    monkeypatch.setattr(atomic.fcntl, "flock", swept_first)
    write(tmp_path / "file", b"whole")
    assert (tmp_path / "file").read_bytes() == b"whole"
    assert len(calls) == 2


def test_without_locks_files_are_written_and_nothing_is_swept(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError("no locks available")

    monkeypatch.setattr(atomic.fcntl, "flock", refuse)
    with replacing(tmp_path / "first") as temporary:
        temporary.write_bytes(b"first")
        write(tmp_path / "second", b"second")
    assert sorted(os.listdir(tmp_path)) == ["first", "second"]


def test_a_write_that_fails_leaves_the_old_content(tmp_path, monkeypatch):
    write(tmp_path / "file", b"old")

    def fail(*_):
        raise OSError("no space left on device")

    for moment in ("fsync", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(os, moment, fail)
            with pytest.raises(OSError, match="no space"):
                write(tmp_path / "file", b"new")
        assert (tmp_path / "file").read_bytes() == b"old"
        assert os.listdir(tmp_path) == ["file"]
