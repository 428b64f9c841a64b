"""Formulas against numbers worked out by hand, and the two tasks that print them."""

import inspect

import pytest
from evals.commands import CodesizeCommand, ComplexityCommand
from evals.costs import Cost, dense_step, kept_bytes, kv_bytes, sparse_step
from evals.shapes import PRESETS, load_config, shape_of
from evals.speed import KernelsCommand, ThroughputCommand
from evals.tasks.formula import codesize, complexity
from hashtrain.config import HasherConfig, ModelShape
from hashtrain.usage import UsageError
from rich.console import Console

QUIET = Console(quiet=True)
SHAPE = ModelShape(1, 4, 2, 8)


def test_every_step_worked_out_by_hand():
    steps = sparse_step(SHAPE, n=100, k=10, bits=32, planes=3, hidden=16)
    # A function has 8 x 32 + 8 x 16 + 16 x 32 = 896 weights; four query heads and two keys use one each; the group's
    # two queries are added, 2 x 32 sums.
    assert steps["hash"] == Cost(2 * 896 * 6 + 64, 2 * (896 + 8) * 6 + 2 * 4 * 2 * 32)
    assert steps["pack"] == Cost(8 * 32, 4 * 2 * 64 + 4 * 8)
    # Per key, KV head and plane one word of xor, not, popcount, add; a code of 4 bytes is read, a score written.
    assert steps["score"] == Cost(100 * 2 * 3 * 4, 100 * 2 * (4 + 2))
    assert steps["select"] == Cost(400, 100 * 2 * 2 + 10 * 2 * 4)
    assert steps["gather"] == Cost(0, 10 * 2 * 2 * 8 * 2 + 10 * 2 * 4)
    assert steps["attend"] == Cost(4 * 10 * 4 * 8, 2 * 4 * 8 * 2)
    assert dense_step(SHAPE, 100) == Cost(4 * 100 * 4 * 8, 100 * 2 * 16 * 2 + 2 * 4 * 8 * 2)


def test_kept_bytes_worked_out_by_hand():
    shape = shape_of(load_config("qwen2.5-7b"))
    kept = kept_bytes(shape, 128)
    assert (shape.num_query_heads, shape.num_kv_heads, shape.head_dim) == (28, 4, 128)
    assert kv_bytes(shape) == 512
    one_a_kv_head = dict.fromkeys(("lsh", "linear", "group-xnor", "planes", "transform"), 16.0)
    fifteen = ("magicpig", "magicpig-sink", "magicpig-local", "magicpig-bare")
    magicpig = {**dict.fromkeys(fifteen, 100 * 15 / 8), "magicpig-10x150": 150 * 10 / 8}
    assert kept == {
        **{"oracle": 0, "recent": 0},
        **one_a_kv_head,
        "paper": 7 * 16,  # 21.9 % of the key-value pair
        "down-proj": 128 / 16 * 2,
        **{"quest": 2 * 128 * 2 / 16, "quest-heads": 2 * 128 * 2 / 16},
        **magicpig,
    }


@pytest.mark.parametrize("command", [ComplexityCommand, CodesizeCommand, ThroughputCommand, KernelsCommand])
def test_by_default_queries_have_the_planes_of_transform(command):
    found = {variant: HasherConfig(variant, SHAPE, bits=32).planes for variant in ("transform", "planes")}
    assert command().settings("task")["planes"] == found["transform"] != found["planes"]
    declared = next(kind for kind in command.__mro__ if "planes" in vars(kind))
    assert f"`planes` has {found['planes']}." in inspect.getsource(declared)  # its help


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_shapes(name):
    shape = shape_of(load_config(name))
    assert shape.head_dim == 128


def test_an_unknown_shape_is_one_sentence(tmp_path):
    for name in ("nothing", "./nothing"):
        with pytest.raises(ValueError, match="there is no folder of that name; use qwen"):
            load_config(name)
    with pytest.raises(ValueError, match=r"config\.json cannot be read"):
        load_config(str(tmp_path))


def test_complexity_stores_all_steps_and_their_sum(tmp_path):
    command = ComplexityCommand(contexts=(1000, 2000), out=tmp_path / "run")
    found = complexity(command, QUIET)
    steps = ("hash", "pack", "score", "select", "gather", "attend")
    total = sum(found.one(where=f"1000 tokens, {step}", metric="bytes").value for step in steps)
    assert found.one(where="1000 tokens, all steps", metric="bytes").value == total
    assert found.one(where="1000 tokens, attention", metric="bytes_of_dense").value == 1
    report = (tmp_path / "run" / "report.md").read_text()
    assert "1000 tokens, score" in report
    assert "model `qwen2.5-7b`, 128-bit codes, queries in 6 planes\n" in report
    assert complexity(command, QUIET) == found
    with pytest.raises(ValueError, match="other settings"):
        complexity(ComplexityCommand(contexts=(1000,), out=tmp_path / "run"), QUIET)


def test_codesize_stores_every_method(tmp_path):
    found = codesize(CodesizeCommand(shape="demo", out=tmp_path / "run"), QUIET)
    assert {row.method for row in found.rows} == kept_bytes(shape_of(load_config("demo")), 128).keys()
    assert found.one(method="planes", metric="share_of_kv").value == 16 / 256
    assert (tmp_path / "run" / "figure.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "make",
    [
        lambda: ComplexityCommand(bits=100),
        lambda: ComplexityCommand(budget=0.0),
        lambda: ComplexityCommand(contexts=(0,)),
        lambda: ComplexityCommand(contexts=(5, 5)),
        lambda: CodesizeCommand(planes=0),
    ],
)
def test_settings_that_cannot_be_used(make):
    with pytest.raises(UsageError, match="got"):
        make()
