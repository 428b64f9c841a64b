"""Machine code on disk is used again, in every process, until a file changes that the kernel is made of."""

import importlib
import os
import subprocess
import sys

import numba
import pytest
from hashcore.cpu import compiler_cache, parts, search_kernels, threads

FILES = {
    "__init__": "",
    "numbers": "OFFSET = 4\n",
    "plain": "def emit(value):\n    return value + 1\n",
    "unseen": "NUMBER = 1\n",
    "checked": "Number = int\n",
    "helper": """
from typing import TYPE_CHECKING

from llvmlite import ir
from numba.extending import intrinsic
from hashcore.cpu.parts import inner
from made_of_this import (
    numbers,  # a module
    plain as written,
)
from made_of_this.plain import emit

if TYPE_CHECKING:
    import made_of_this.checked

NUMBERS = {"first": 1, "second": 2}
WORD = ir.IntType(64)

class Number:
    @property
    def times(self):
        return ir.Constant(WORD, 2)

@intrinsic
def double(typing, x):
    return x(x), lambda context, builder, signature, given: builder.mul(given[0], Number().times)

@intrinsic
def more(typing, x):
    return x(x), lambda context, builder, signature, given: builder.add(given[0], ir.Constant(WORD, emit(0)))

LAST = NUMBERS["second"]

@inner
def add(x):
    return more(double(x)) + numbers.OFFSET + LAST
""",
    "kernels": """
from made_of_this.helper import add

def kernel(first, last):
    return add(first) + last
""",
}
RESULT = 7 * 2 + 1 + 4 + 2 + 10
CHANGES = {
    "a constant of a module": ("numbers", "OFFSET = 4", "OFFSET = 5", 1),
    "a value of a dict": ("helper", '"second": 2', '"second": 9', 7),
    "a function": ("helper", "more(double(x))", "x", -8),
    "what an intrinsic emits": ("plain", "value + 1", "value + 3", 2),
    "a property of a class": ("helper", "Constant(WORD, 2)", "Constant(WORD, 3)", 7),
    "how a function is compiled": ("helper", "@inner", '@__import__("numba").njit(inline="always")', 0),
}
"""What changes: the file, what is replaced by what, and by how much that changes the result."""


def forget():
    for function in (compiler_cache._digest, compiler_cache._imported, compiler_cache._file):
        function.cache_clear()


@pytest.fixture
def kernel(tmp_path, monkeypatch):
    """Return a function that writes the files, with one text replaced, and imports the kernel that they make."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setattr(compiler_cache, "OURS", ("hashcore", "made_of_this"))
    folder = tmp_path / "made_of_this"

    def written(name="kernels", old="", new=""):
        folder.mkdir(exist_ok=True)
        for file, text in FILES.items():
            assert file != name or old in text
            path = folder / f"{file}.py"
            path.write_text(text.replace(old, new, 1) if file == name else text, encoding="utf-8")
            os.utime(path, (1, 1))  # numba compares the kernel's own file
        for module in [module for module in sys.modules if module.startswith("made_of_this")]:
            monkeypatch.delitem(sys.modules, module)
        importlib.invalidate_caches()
        forget()
        return importlib.import_module("made_of_this.kernels").kernel

    yield written
    forget()


@pytest.mark.parametrize("change", CHANGES)
def test_what_a_change_makes_stale_is_compiled_again(kernel, change):
    *replaced, difference = CHANGES[change]
    first = threads.compiled(kernel())
    assert first(7, 10) == RESULT
    assert not first.stats.cache_hits
    again = threads.compiled(kernel("unseen", "1", "2"))
    assert again(7, 10) == RESULT
    assert again.stats.cache_hits
    other = threads.compiled(kernel(*replaced))
    assert other(7, 10) == RESULT + difference
    assert not other.stats.cache_hits


def test_the_files_are_those_that_are_imported_in_any_form(kernel):
    kernel()
    assert {file.stem for file in compiler_cache.files("made_of_this.kernels")} == {
        *("kernels", "helper", "numbers", "plain", "checked", "parts", "threads", "team", "compiler_cache")
    }
    stems = {file.stem for file in compiler_cache.files(search_kernels.__name__)}
    assert stems >= {"search_kernels", "score_vectors", "launch_plan", "intrinsics", "parts", "threads"}
    assert not stems & {"__init__", "ops", "torch_ops"}
    assert parts.__file__ in map(str, compiler_cache.files(search_kernels.__name__))


def test_another_process_uses_the_machine_code(kernel, tmp_path):
    """Its sets of strings have another order, if the digest depended on it."""
    kernel("helper", "@inner", '@__import__("numba").njit(fastmath={"reassoc", "contract", "nsz"})')
    code = "\n".join([
        "from hashcore.cpu import compiler_cache, threads",
        "compiler_cache.OURS = 'hashcore', 'made_of_this'",
        "from made_of_this.kernels import kernel",
        "made = threads.compiled(kernel)",
        "print(made(7, 10), sum(made.stats.cache_hits.values()))",
    ])  # fmt: skip
    found = []
    for seed in "123":
        settings = {"NUMBA_CACHE_DIR": str(tmp_path / "cache"), "PYTHONHASHSEED": seed, "PYTHONPATH": str(tmp_path)}
        found.append(subprocess.check_output([sys.executable, "-c", code], env={**os.environ, **settings}, text=True))
    assert found == [f"{RESULT} 0\n", f"{RESULT} 1\n", f"{RESULT} 1\n"]
