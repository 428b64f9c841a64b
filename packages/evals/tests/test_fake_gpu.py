"""Every task's inner loop on a simulated GPU: tensors on two devices never meet, and each wait is attributed.

Fake tensors have no values, so those that the host reads are invented here, and recorded with the calling function.
Tensors are where the code puts them: those created without a device are in host memory, as in a run.
"""

import collections
import contextlib
import os
import sys
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from evals import metrics
from evals.base_commands import Always
from evals.speed import COMPILED, ThroughputCommand
from evals.synthetic import Exercise
from evals.tasks import answers, compiled, cones, iou, output_error, ppl, throughput
from fake_gpu import fake_gpu, faked_with, model_of, told
from hashtrain import Hasher
from hashtrain.demo import demo_model_path
from hashtrain.layers import LayerHasher
from sparse_decode import Budget
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoTokenizer, generation

LAYERS, SPARSE = 3, 2
"""Layers of the model, and how many of them are sparse."""
FOUND = 4
"""The number of entries that any mask selects, and the value of any integer read from the device."""
ROOTS = ("/src/hashcore/", "/src/hashtrain/", "/src/sparse_decode/", "/src/evals/", "/transformers/", "/lm_eval/")
ALWAYS = Always(dense_layers=1, dense_at=(), sink=1, recent=4)
"""The tokens that a row reads without a search."""


class Waits(TorchDispatchMode):
    """Invents the values that the host reads from the device, and counts the reads by caller."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: collections.Counter[str] = collections.Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "aten":
            with self:  # inference mode passes operators undecomposed
                parts = func.decompose(*args, **(kwargs or {}))
            if parts is not NotImplemented:
                return parts
        name, of = func._schema.name.split("::")[-1], args[0] if args else None
        made = self._made_up(name, args)
        on_device = isinstance(of, torch.Tensor) and of.device.type == "cuda"
        out = func(*args, **(kwargs or {})) if made is None else made
        to_host = name == "_to_copy" and on_device and out.device.type == "cpu"
        writes_by_mask = name.startswith("index_put") and any(_is_mask(x) for x in args[1])
        if on_device and (made is not None or to_host or writes_by_mask):
            self.note()
        return out

    def note(self) -> None:
        """Count a wait for the calling function."""
        self.seen[asker()] += 1

    @staticmethod
    def _made_up(name: str, args: tuple) -> object:
        """Return a result whose value, or number of rows, only the device knows; None for other operators."""
        of = args[0] if args else None
        if name == "_local_scalar_dense":
            return number_of(of.dtype)
        if name == "nonzero":
            return of.new_zeros(FOUND, of.ndim, dtype=torch.int64)
        if name == "unique_dim":
            return of[:FOUND].clone(), of.new_empty(0), of.new_empty(0)
        if name == "index" and any(_is_mask(x) for x in args[1]):
            at = []
            for x in args[1]:
                at += [x.new_zeros(FOUND, dtype=torch.int64)] * x.ndim if _is_mask(x) else [x]
            return torch.ops.aten.index.Tensor(of, at)
        return None


def number_of(kind: torch.dtype) -> float:
    """Invent a number. transformers asks only whether something must be done."""
    if kind == torch.bool:
        return not asker().startswith(("transformers", "blocks._require_causal"))
    return 0.5 if kind.is_floating_point else FOUND


def _is_mask(x: torch.Tensor | None) -> bool:
    return x is not None and x.dtype == torch.bool


def asker() -> str:
    """Return the innermost running function of ours, or of transformers."""
    frame = sys._getframe(1)
    while frame and (
        frame.f_code.co_name.startswith("<") or not any(root in frame.f_code.co_filename for root in ROOTS)
    ):
        frame = frame.f_back
    assert frame is not None, "nobody of ours asked"
    path = Path(frame.f_code.co_filename)
    module = "transformers" if "/transformers/" in str(path) else path.stem
    return f"{module}.{frame.f_code.co_name}"


@contextlib.contextmanager
def a_fake_run(loaded, names):
    """Make model, methods and context fake: the model on the device, everything else where a task has it."""
    chosen = {name: loaded.methods[name] for name in names}
    selectors = [s for m in chosen.values() for s in (m.selector, m.query_head_selector)]
    hashers = {id(h): h for s in selectors for h in held(s)}.values()
    with fake_gpu() as mode, Waits() as waits:

        def numpy(x: torch.Tensor, **_: object) -> np.ndarray:
            assert x.device.type == "cpu", "an array of a tensor on the device"
            return np.zeros(x.shape, str(x.dtype).removeprefix("torch."))

        model = model_of(loaded.model.config)
        ids = mode.from_tensor(loaded.ids)
        waits.seen.clear()

        def to_list(x: torch.Tensor) -> list:
            waits.note()
            return np.full(x.shape, number_of(x.dtype)).tolist()

        patches = mock.patch.multiple(FakeTensor, numpy=numpy, tolist=to_list)
        with patches:
            yield model, ids, faked_with(chosen, hashers, mode), waits.seen


def held(selector):
    """Return the hashers of a selector."""
    inner = getattr(selector, "hasher", None)
    while inner is not None and not isinstance(inner, Hasher):
        inner = inner.hasher
    return [] if inner is None else [inner]


def perplexity(model, ids, methods, phase):
    cells = [ppl.Cell(name, "visible", 0.1) for name in methods]
    ppl.measure(model, ids, cells, methods, ALWAYS, phase=phase)


def overlap(model, ids, methods, heads):
    iou.measure(model, ids, ROWS, [*methods.values()], (0.1,), ALWAYS, (heads,))


def errors(model, ids, methods, _):
    output_error.measure(model, ids, ROWS, [*methods.values()], (0.1,), ALWAYS)


def picture(model, ids, methods, _):
    cones.measure(model, ids, [*methods.values()], 0)


def answer(model, ids, methods, _):
    (method,) = methods.values()
    answers.read_answer(model, Exercise("single", 110, 0.5, ids[:100], ids[100:110], ""), method, 0.1, ALWAYS)


def continuation(model, ids, methods, _):
    (method,) = methods.values()
    with some_steps():
        answers.continue_greedily(model, ids[:100], STEPS, method, 0.1, ALWAYS)


def some_steps():
    """End a generation after some tokens: transformers asks for it at each of them."""
    left = iter([True] * STEPS + [False])
    return mock.patch.object(generation.GenerationMixin, "_has_unfinished_sequences", side_effect=left)


def ask_harness(kind, request, model, methods, rows):
    """Have lm-evaluation-harness send a request to the model with one method."""
    if os.environ.get("CI") != "true":
        pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed: `uv sync --group lm-eval`")
    from evals.harness.adapter import SparseLM
    from lm_eval.api.instance import Instance

    (method,) = methods.values()
    tokenizer = AutoTokenizer.from_pretrained(demo_model_path())
    lm = SparseLM(model, tokenizer, method, Budget(0.1), always=ALWAYS, sparse_rows=rows)
    getattr(lm, kind)([Instance(kind, {}, request, 0)], disable_tqdm=True)


def score_of_harness(model, ids, methods, rows):
    ask_harness("loglikelihood", ("value = 1\n" * 16, "print"), model, methods, rows)


def text_of_harness(model, ids, methods, rows):
    given = {"until": ["\n\n\n"], "max_gen_toks": STEPS, "do_sample": False}
    with some_steps():
        ask_harness("generate_until", ("import os\n" * 8, given), model, methods, rows)


ROWS = torch.tensor([40, 70, 127])
STEPS = 3
HASHES = ("lsh", "paper", "planes+remainder", "transform", "down-proj")
EVERY = ("oracle", "recent", *HASHES, "quest", "quest-heads", "magicpig-bare")
SELECT = ("oracle", "recent", "lsh", "paper", "planes", "transform", "down-proj", "quest")
CASES = [
    *((perplexity, name, phase) for name in EVERY for phase in ("everywhere", "decode")),
    *((overlap, name, heads) for name in SELECT for heads in ("kv_head", "query_head")),
    *((errors, name, None) for name in EVERY if name != "quest-heads"),
    *((picture, name, None) for name in ("planes", "transform")),
    *((call, name, None) for call in (answer, continuation) for name in ("dense", "planes+remainder", "magicpig")),
    *((score_of_harness, name, rows) for name in ("planes", "quest", "lsh") for rows in ("all", "continuation")),
    *((text_of_harness, name, rows) for name in ("planes", "lsh") for rows in ("all", "continuation")),
]
"""Tasks share these loops: `codelength` has `overlap`'s, `tune` and `suggest` have `perplexity`'s, `fidelity` has
`continuation`'s, `ruler` has `answer`'s and `needle` both, tasks of lm-evaluation-harness have those of the harness."""

SPAN = {"positions.visible_span": 1}
PAGES = {"quest._scores": 1, "oracle.best_floats": 3, "torch_ops._wanted": 1}
SELECTION = {
    "dense": {},
    "oracle": {**SPAN, "oracle.best_floats": 3},  # values and counts are copied, to be ranked on the host
    "recent": {**SPAN, "positions._by_rank": 2},
    "down": {**SPAN, "oracle.best_floats": 3},  # plain numbers, ranked as the exact ones are
    "quest": PAGES,
    "magicpig": {"magicpig._drawn": 3, "magicpig.select": 2, "torch_ops._wanted": 1},
}
"""Waits of a selector, each time it is asked about a block of rows."""
HASH = {**SPAN, "torch_ops._wanted": 1}
LOGITS = {"row_logits.mean_loss": 1, "row_logits.compare": 1, "metrics.mean_kl": 1}
BLOCK = {"plan._attend_block": 1, "calls._sparse": 1}
"""Waits of a layer for each block of rows, where more than one token of a sequence is new."""


def expected(task, name):
    """Return the waits of one context: for selections, for blocks of rows, and for reading results."""
    rival, dense = name.startswith("magicpig"), name == "dense"
    select = collections.Counter(SELECTION.get(name.split("-")[0], HASH))
    attend = collections.Counter({"magicpig.attend": 3} if rival else {})
    block = select + attend + collections.Counter({} if dense else BLOCK if rival else {**BLOCK, **SPAN})
    block += collections.Counter({"blocks._require_causal": 1} if name.endswith("+remainder") else {})
    totals = {} if dense else {"budget.totals": SPARSE}
    calls = STEPS if task is continuation and rival else 1  # its steps are such blocks too
    whole = {"output_error.attend": LAYERS, "output_error.read": 2, **dict.fromkeys(BLOCK, LAYERS)}
    each, times, more = {
        perplexity: (block, SPARSE, {**LOGITS, **totals}),
        overlap: (select, LAYERS, {"metrics.quality": LAYERS, "iou.by_layer": 6}),
        errors: (select + attend, LAYERS, whole),
        picture: ({}, 0, {"cones.geometry": LAYERS, "cones.picture": 2 * LAYERS, "cones.occupancy": 3 * LAYERS}),
        answer: (block, SPARSE, {"answers.read_answer": 1, **totals}),
        continuation: (block, SPARSE * calls, {"answers.continue_greedily": 1, **totals}),
        score_of_harness: (block, SPARSE, {"huggingface._loglikelihood_tokens": 2, **totals}),
        text_of_harness: (block, SPARSE, {"adapter._model_generate": 1, "huggingface.generate_until": 1, **totals}),
    }[task]
    return collections.Counter(more) + collections.Counter({where: times * n for where, n in each.items()})


@pytest.mark.sample(9)
@pytest.mark.parametrize(("task", "name", "more"), CASES)
def test_a_context_waits_where_results_are_read(loaded, task, name, more):
    with a_fake_run(loaded, [name]) as (model, ids, methods, seen):
        task(model, ids, methods, more)
    assert {where: n for where, n in seen.items() if not where.startswith("transformers")} == expected(task, name)


@contextlib.contextmanager
def a_fake_measurement(tmp_path, *methods):
    """Make a command that times steps, where torch says that the device has done its work."""
    sizes = {"contexts": (64,), "repeats": 1, "steps": 2, "warmup": 1, "bandwidth": 1.0, "dense_layers": 1}
    asked = ("synchronize", "reset_peak_memory_stats", "max_memory_allocated")
    with mock.patch.multiple(torch.cuda, **{name: lambda *_: 0 for name in asked}):
        yield ThroughputCommand(device="cuda", methods=methods, budget=0.1, out=tmp_path, **sizes)


def test_timed_steps_wait_for_nothing(loaded, tmp_path):
    named = ("sdpa", "planes", "recent")
    with a_fake_run(loaded, ["planes"]) as (model, _, methods, seen), a_fake_measurement(tmp_path, *named) as command:
        hasher = methods["planes"].selector.hasher
        throughput._measure(command, model, hasher, 64, 2, dict.fromkeys(named, 1), 1.0)
    assert seen == {"budget.totals": SPARSE * (len(named) - 1)}


@pytest.mark.slow
def test_timed_compiled_steps_wait_for_nothing(loaded, tmp_path, monkeypatch):
    """A wait in a step would break its graph, which is an error, or raise; only the counts are read, after all steps.

    The harness that invents numbers is no mode in which torch compiles, so that here all other reads raise.
    """
    read = []
    monkeypatch.setattr(compiled, "BACKEND", "eager")
    monkeypatch.setattr(FakeTensor, "tolist", lambda x: read.append(asker()) or [1] * len(x))
    hasher = loaded.methods["planes"].selector.hasher
    # As drawn: nothing is summed for a remainder. `fake_gpu` replaces this, too, so it is put back before that ends.
    drawn = mock.patch.object(LayerHasher, "calibrated", False)
    with fake_gpu(), drawn, told(64), a_fake_measurement(tmp_path, *COMPILED) as command, torch.no_grad():
        model = model_of(loaded.model.config)
        throughput._measure(command, model, hasher, 64, 2, dict.fromkeys(COMPILED, 1), 1.0)
    assert read == ["budget.totals"] * SPARSE


def test_a_wait_has_the_name_of_who_asked(monkeypatch):
    monkeypatch.setattr(metrics, "_CHUNK", 3)  # one row at a time
    with fake_gpu(), Waits() as waits:
        there = torch.ones(4, 3, device="cuda")
        metrics.mean_kl(there, there)
        metrics.mean_kl(*torch.ones(2, 4, 3))  # in host memory nothing waits
    assert waits.seen == {"metrics.mean_kl": 1}


def test_two_devices_never_meet():
    with fake_gpu(), pytest.raises(RuntimeError, match="two devices"):
        torch.ones(3, device="cuda") + torch.ones(3)
