"""Atomic writes: all or nothing, the mode of the umask, no leftovers, no effect on other writers."""

import os
import shutil
import signal
import subprocess
import sys

import pytest
from hashcore import atomic
from hashcore.atomic import replacing, sweep

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


def test_a_write_that_fails_leaves_the_old_content(tmp_path):
    write(tmp_path / "file", b"old")

    def fail():
        with replacing(tmp_path / "file") as temporary:
            temporary.write_bytes(b"new")
            raise OSError("no space left on device")

    with pytest.raises(OSError, match="no space"):
        fail()
    assert (tmp_path / "file").read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]
