"""The kernels read nothing before or after the keys."""

import subprocess
import sys

import pytest

GUARDED = """
import ctypes, itertools, mmap, os
import hashcore
import numpy as np
from hashcore import reference

page = mmap.PAGESIZE
memory = mmap.mmap(-1, 18 * page)
buffer = np.frombuffer(memory, np.int32)
protect = ctypes.CDLL(None, use_errno=True).mprotect
protect.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
for at in (0, 17):
    assert protect(buffer.ctypes.data + at * page, page, 0) == 0, os.strerror(ctypes.get_errno())
inside = buffer[page // 4 : 17 * page // 4]
rng = np.random.default_rng(0)
inside[:] = rng.integers(-(2**31), 2**31, len(inside), np.int64)
if TOUCH:
    buffer[17 * page // 4]

for words, n, planes in itertools.product((1, 2, 3, 4, 5, 7, 8, 9, 12, 17), (1, 31, 32, 33, 65), (1, 3)):
    query, weights = rng.integers(-(2**31), 2**31, (planes, words), np.int64).astype(np.int32), (1, 2, 4)[:planes]
    for flat in (inside[: n * words], inside[-n * words :]):
        keys = flat.reshape(n, words)
        for view in (keys, keys[::-1], keys[::2], keys[:, -1:], keys[:, :1]):
            q = query[:, : view.shape[-1]]
            assert (hashcore.score(q, view, weights) == reference.score(q, view, weights)).all()
            found = hashcore.search(q, view, len(view), weights)
            assert (found[1] == reference.search(q, view, len(view), weights)[1]).all()
print("done")
"""


def run_guarded(touch: bool) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", f"TOUCH = {touch}\n{GUARDED}"], capture_output=True, text=True)


needs_mprotect = pytest.mark.skipif(sys.platform == "win32", reason="guard pages are made with mprotect")


@needs_mprotect
def test_nothing_outside_the_keys_is_read():
    done = run_guarded(touch=False)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


@needs_mprotect
def test_the_guard_pages_guard():
    assert run_guarded(touch=True).returncode < 0
