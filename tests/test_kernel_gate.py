"""Which kernels tools/check_kernels.py compiles, and for what; compiling them all takes minutes."""

import json
from pathlib import Path

import pytest

TABLE = json.loads((Path(__file__).resolve().parent.parent / "docs" / "results" / "kernels.json").read_text())


@pytest.fixture
def gate(load, monkeypatch):
    tool = load("tools", "check_kernels")
    monkeypatch.setattr(tool, "compiler", lambda: TABLE["nvrtc"])
    return tool


def test_what_the_table_knows_is_compiled_for_one_architecture(gate):
    assert gate.jobs(TABLE, every=False) == [(program, gate.ARCHITECTURES[0]) for program in gate.PROGRAMS]
    assert len(gate.jobs(TABLE, every=True)) == len(gate.PROGRAMS) * len(gate.ARCHITECTURES)


def test_a_changed_source_is_compiled_for_all_architectures(gate, monkeypatch):
    one = gate.PROGRAMS[3]
    monkeypatch.setattr(one, "source", lambda: "another source")
    assert {arch for program, arch in gate.jobs(TABLE, every=False) if program == one} == set(gate.ARCHITECTURES)
    assert len(gate.jobs(TABLE, every=False)) == len(gate.PROGRAMS) + len(gate.ARCHITECTURES) - 1


def test_another_compiler_compiles_all(gate, monkeypatch):
    monkeypatch.setattr(gate, "compiler", lambda: "0.0")
    assert len(gate.jobs(TABLE, every=False)) == len(gate.PROGRAMS) * len(gate.ARCHITECTURES)


def test_no_kernel_of_the_table_is_over_its_budget(gate):
    loops = TABLE["instructions_per_key"]
    assert not gate.over_budget(loops)
    name = next(iter(loops))
    loops = {**loops, name: {**loops[name], "sm_90a": {"popc": 99, "lop3": 0}}}
    assert ["over" in line and "sm_90a" in line for line in gate.over_budget(loops)] == [True]
