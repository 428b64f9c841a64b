"""Kernel sources, macros and cubins; no GPU is needed."""

import itertools
import logging
import re
import sys

import pytest
from hashcore.cuda.source import HASHCORE_KERNELS, read_source

pytest.importorskip("cuda.core", reason="cuda-core comes with the extra hashcore[cuda]")
program = pytest.importorskip("hashcore.cuda.program")
Program, CompileError = program.Program, program.CompileError

KERNEL = '#include "own.cuh"\nextern "C" __global__ void kernel(int* out) { *out = VALUE + OWN; }\n'


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder of kernels of another package, and a cache of its own."""
    monkeypatch.setenv("HASHCORE_CACHE", str(tmp_path / "cache"))
    read_source.cache_clear()
    path = tmp_path / "kernels"
    path.mkdir()
    (path / "kernel.cu").write_text(KERNEL)
    (path / "own.cuh").write_text("#pragma once\nconstexpr int OWN = 1;\n")
    return path


def test_a_second_program_reads_the_cubin_from_disk(folder, monkeypatch):
    first = Program("kernel.cu", {"VALUE": 3}, folder).cubin("sm_90a")
    assert first.startswith(b"\x7fELF")
    monkeypatch.setattr(Program, "compile", lambda *_: pytest.fail("compiled again"))
    assert Program("kernel.cu", {"VALUE": "3"}, folder).cubin("sm_90a") == first


def test_the_key_covers_all_that_makes_the_cubin(folder):
    keys = [Program("kernel.cu", {"VALUE": 3}, folder).cache_key("sm_90a")]
    keys.append(Program("kernel.cu", {"VALUE": 4}, folder).cache_key("sm_90a"))
    keys.append(Program("kernel.cu", {"VALUE": 3}, folder).cache_key("sm_80"))
    for name in ("own.cuh", "kernel.cu"):
        path = folder / name
        path.write_text(path.read_text() + "// changed\n")
        read_source.cache_clear()
        keys.append(Program("kernel.cu", {"VALUE": 3}, folder).cache_key("sm_90a"))
    assert len(set(keys)) == 5


def test_an_error_has_the_kernel_the_architecture_and_the_compilers_words(folder):
    (folder / "own.cuh").write_text("\nconstexpr int OWN = undefined_name;\n")
    with pytest.raises(CompileError) as refused:
        Program("kernel.cu", {"VALUE": 3}, folder).cubin("sm_86")
    for part in ("kernel.cu -DVALUE=3", "sm_86", "own.cuh(2): error", "undefined_name"):
        assert part in str(refused.value)


def test_lines_keep_their_numbers_after_a_header(folder):
    (folder / "kernel.cu").write_text('\n#include "own.cuh"\n#include "own.cuh"\nundefined_name;\n')
    with pytest.raises(CompileError, match=r"kernel\.cu\(4\): error"):
        Program("kernel.cu", folder=folder).cubin("sm_80")


def test_another_package_includes_our_headers(folder):
    (folder / "kernel.cu").write_text(
        '#include "common.cuh"\nextern "C" __global__ void kernel(u32* out) { *out = xor3(1, 2, 4); }\n'
    )
    assert Program("kernel.cu", folder=folder).cubin("sm_80")


def test_a_missing_header_is_named(folder):
    (folder / "own.cuh").unlink()
    with pytest.raises(FileNotFoundError, match=r"expected own\.cuh in .*found none"):
        Program("kernel.cu", folder=folder).source()


def test_a_cache_that_cannot_be_written_is_reported_and_done_without(folder, monkeypatch, caplog):
    (folder / "file").write_text("")
    monkeypatch.setenv("HASHCORE_CACHE", str(folder / "file"))
    program._report_cache.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert Program("kernel.cu", {"VALUE": 3}, folder).cubin("sm_80")
    assert "set HASHCORE_CACHE to a writeable folder" in caplog.text


def body(source, name, text=None):
    """Return the body of a kernel, or of a function that it calls."""
    text = read_source(HASHCORE_KERNELS, source) if text is None else text
    if made := re.search(rf"^(\w+_KERNEL)\({name}, ", text, re.M):
        return re.search(rf"^#define {made[1]}\(.*?\) \{{ *\\?\n?(.*?)\n +\}}\n", text, re.M | re.S)[1]
    return re.search(rf"^[^\n;]*\b{name}\([^;{{]*\) \{{\n(.*?)\n\}}", text, re.M | re.S)[1]


def releases(source, name):
    """Whether a kernel calls let_dependents_start, itself or in the function that does its work."""
    text = body(source, name)
    called = set(re.findall(r"\b([a-z_]+)(?:<\w+>)?\(", text))
    known = [other for other in called if other in ("list_group", "select_row")]
    return any("let_dependents_start();" in part for part in (text, *(body(source, other) for other in known)))


def launched(group):
    """The launches of a search of 8 rows of 9,000 keys."""
    torch, found = pytest.importorskip("torch"), []
    from hashcore.cuda import operands, tensor_search

    query = torch.zeros(8, 3, 4, dtype=torch.int32)
    keys = torch.zeros(1 if group > 1 else 8, 9000, 4, dtype=torch.int32)
    out = torch.zeros(8, 5, dtype=torch.int32), torch.zeros(8, 5, dtype=torch.int64)
    tensor_search.search(query, keys, 5, (1, 2, 4), operands.Bounds(), *out, run=lambda one, _: found.extend(one))
    return found


@pytest.mark.parametrize("group", [1, 8])
def test_a_kernel_that_starts_early_waits_first_and_the_one_before_it_lets_it(group):
    """Else it would read what is not there yet, or start no earlier: a host simulator runs one after the other."""
    found = launched(group)
    assert [one.programmatic for one in found] == [True, True]
    for before, one in itertools.pairwise([found[0], *found]):
        if one.programmatic:
            assert releases(before.source, before.kernel), before.kernel
            assert body(one.source, one.kernel).lstrip(" \\\n").startswith("wait_for_predecessor();"), one.kernel
        else:
            assert "wait_for_predecessor" not in body(one.source, one.kernel)


def test_a_missing_compiler_is_one_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.core", None)
    with pytest.raises(ValueError, match=r"it is not installed.*pip install"):
        program.require_compiler()
