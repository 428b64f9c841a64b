"""Machine code on disk is used again until something changes that the kernel is made of."""

import importlib
import os
import subprocess
import sys

import numba
import pytest
from hashcore.cpu import compiler_cache, threads

FILES = {
    "plain": "OFFSET = 4\n\ndef emit(value):\n    return value + 1\n",
    "helper": """
import numba
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from hashcore.cpu.parts import inner
from made_of_this import plain
from made_of_this.plain import emit

NUMBERS = (1, 2)
UNUSED = 3

def number(value):
    return ir.Constant(ir.IntType(64), value)

def doubling(times):
    @intrinsic
    def doubled(typing, x):
        return x(x), lambda context, builder, signature, given: builder.mul(given[0], number(times))
    return doubled

double = doubling(2)

@intrinsic
def more(typing, x):
    return x(x), lambda context, builder, signature, given: builder.add(given[0], number(emit(0)))

@inner
def add(x):
    return more(double(x)) + plain.OFFSET + NUMBERS[1]

def unused():
    return 1
""",
    "kernels": """
from made_of_this.helper import add

def kernel(first, last):
    return add(first) + last
""",
}
CHANGES = {
    "a constant of a module": ("plain", "OFFSET = 4", "OFFSET = 5", 1),
    "a constant": ("helper", "(1, 2)", "(1, 9)", 7),
    "a function": ("helper", "more(double(x))", "x", -8),
    "what an intrinsic emits": ("plain", "value + 1", "value + 3", 2),
    "what an intrinsic closes over": ("helper", "doubling(2)", "doubling(3)", 7),
    "how a function is compiled": ("helper", "@inner", '@numba.njit(inline="always")', 0),
}
"""What changes: the file, what is replaced by what, and by how much that changes the result."""


@pytest.fixture
def kernel(tmp_path, monkeypatch):
    """Return a function that writes the files, with one text replaced, and imports the kernel that they make."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    folder = tmp_path / "made_of_this"

    def written(name="kernels", old="", new=""):
        folder.mkdir(exist_ok=True)
        for file, text in FILES.items():
            assert file != name or old in text
            path = folder / f"{file}.py"
            path.write_text(text.replace(old, new, 1) if file == name else text, encoding="utf-8")
            os.utime(path, (1, 1))  # numba compares the time of the kernel's own file
        for module in [module for module in sys.modules if module.startswith("made_of_this")]:
            monkeypatch.delitem(sys.modules, module)
        importlib.invalidate_caches()
        return importlib.import_module("made_of_this.kernels").kernel

    return written


@pytest.mark.parametrize("change", CHANGES)
def test_what_a_change_makes_stale_is_compiled_again(kernel, change):
    *replaced, difference = CHANGES[change]
    first = threads.compiled(kernel())
    assert first(7, 10) == 7 * 2 + 1 + 4 + 2 + 10
    assert not first.stats.cache_hits
    again = threads.compiled(kernel("helper", "UNUSED = 3", "UNUSED = 5"))
    assert again(7, 10) == first(7, 10)
    assert again.stats.cache_hits
    other = threads.compiled(kernel(*replaced))
    assert other(7, 10) == first(7, 10) + difference
    assert not other.stats.cache_hits


def test_another_process_finds_the_same():
    code = "from hashcore.cpu import compiler_cache as c, search_kernels as s; print(c.made_of(s.search_tasks))"
    seeds = [dict(os.environ, PYTHONHASHSEED=seed) for seed in "12"]
    found = {subprocess.check_output([sys.executable, "-c", code], env=seed, text=True) for seed in seeds}
    assert len(found) == 1


def test_how_parts_are_compiled_counts(monkeypatch):
    from hashcore.cpu import parts, search_kernels

    before = compiler_cache.made_of(search_kernels.search_tasks)
    monkeypatch.setattr(parts._Optimised, "get_pointer_to_function", lambda self, name: 1)
    assert compiler_cache.made_of(search_kernels.search_tasks) != before
