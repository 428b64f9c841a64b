"""Measure which part of an attached decode step is neither matrix products nor our kernel: the host's share.

    uv run packages/sparse-decode/benchmarks/host_share.py --out docs/results/host_share.json

SmolLM2-135M's shape with random weights in bfloat16, or a --shape; untrained `transform` hashers with arbitrary
remainder coefficients, every layer sparse. Milliseconds a layer, medians over steps:

    step       the whole step
    products   calls of torch's linear layers
    attention  calls of the attention modules, with their hooks and linear layers
    fused      the function that runs a layer's selection and attention in one call
    kernel     the compiled code in it
    host       step - products - kernel: Python, dispatch, and the model's small operators such as norms

The last line but one is the host's share of the same model without attention (its attention function returns the
queries): what attaching cannot change. Requirement: `host` is at most 0.35 ms at every length. The last line is JSON;
the exit status is 1 if the requirement is not met.
"""

import argparse
import pathlib
import statistics
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
from hashcore.cpu import threads
from never_slower import step_of
from results import machine, store
from shapes import SHAPES, make_hasher, make_model
from sparse_decode import Budget, attach
from sparse_decode.step import SparseLayer
from torch import Tensor
from transformers import AttentionInterface, DynamicCache, PreTrainedModel

LENGTHS = [1, 1024, 8192, 32768]
ASKED = 0.35
WARM_UP = 4
PARTS = "products", "attention", "fused", "kernel"
WITHOUT = "without"  # the name of an attention function that does not attend


@contextmanager
def timed(owner: Any, name: str, seconds: dict[str, float], part: str) -> Generator[None]:
    """Add the time in a function, an attribute of `owner`, to seconds[part]."""
    own: Callable[..., Any] = getattr(owner, name)
    was_there = name in vars(owner)

    def call(*given: Any, **named: Any) -> Any:
        began = time.perf_counter()
        try:
            return own(*given, **named)
        finally:
            seconds[part] += time.perf_counter() - began

    setattr(owner, name, call)
    try:
        yield
    finally:
        if was_there:
            setattr(owner, name, own)
        else:
            delattr(owner, name)


@torch.no_grad()
def measure(model: PreTrainedModel, n: int, repeats: int) -> dict[str, Any]:
    """Return the milliseconds of each part of a layer's step at a context of n random tokens."""
    config: Any = model.config
    size = 2, 1, config.num_key_value_heads, n, config.hidden_size // config.num_attention_heads
    drawn = [torch.empty(size, dtype=model.dtype).normal_() for _ in range(config.num_hidden_layers)]
    step, cache = step_of(model, drawn)
    seconds: dict[str, float] = {}
    found = {name: list[float]() for name in ("step", *PARTS, "host")}
    decoder: Any = model.get_decoder()
    with (
        timed(torch.nn.Linear, "forward", seconds, "products"),
        timed(type(decoder.layers[0].self_attn), "__call__", seconds, "attention"),
        timed(SparseLayer, "step", seconds, "fused"),
        timed(threads, "run", seconds, "kernel"),
    ):
        for _ in range(repeats + WARM_UP):
            seconds.update(dict.fromkeys(PARTS, 0.0))
            began = time.perf_counter()
            step()
            whole = time.perf_counter() - began
            cache.crop(-1)
            parts = {"step": whole, **seconds, "host": whole - seconds["products"] - seconds["kernel"]}
            for name, taken in parts.items():
                found[name].append(1e3 * taken / config.num_hidden_layers)
    return {"n": n, **{name: round(statistics.median(taken[WARM_UP:]), 4) for name, taken in found.items()}}


class KeepsNothing(DynamicCache):
    """A cache that returns new keys and values and forgets them."""

    def update(self, key_states: Tensor, value_states: Tensor, *given: Any, **named: Any) -> tuple[Tensor, Tensor]:
        return key_states, value_states


@torch.no_grad()
def without_attention(model: PreTrainedModel, repeats: int) -> float:
    """Return the host's milliseconds a layer of a step without attention: what attaching cannot change."""
    config: Any = model.config
    before: Any = config._attn_implementation
    AttentionInterface.register(WITHOUT, lambda module, query, *given, **named: (query.transpose(1, 2), None))
    config._attn_implementation = WITHOUT
    cache, seconds, taken = KeepsNothing(config=config), dict[str, float](), list[float]()
    given = {"position_ids": torch.tensor([[1]]), "past_key_values": cache, "use_cache": True}
    with timed(torch.nn.Linear, "forward", seconds, "products"):
        for _ in range(repeats + WARM_UP):
            seconds["products"] = 0.0
            began = time.perf_counter()
            model(torch.tensor([[5]]), **given)
            taken.append(time.perf_counter() - began - seconds["products"])
    config._attn_implementation = before
    return round(1e3 * statistics.median(taken[WARM_UP:]) / config.num_hidden_layers, 4)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="smollm2-135m")
    parser.add_argument("--layers", type=int, help="number of layers; default: those of the shape")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--repeats", type=int, default=100)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=pathlib.Path)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    torch.manual_seed(0)
    model = make_model(None, given.shape, given.layers)
    rows = []
    with attach(model, make_hasher(model), Budget()):
        for n in given.lengths:
            rows.append(measure(model, n, given.repeats))
            print(", ".join(f"{name} {taken:g}" for name, taken in rows[-1].items()), flush=True)
    own = without_attention(model, given.repeats)
    print(f"of host, the model's own without attention: {own:g}")
    missed = [row["n"] for row in rows if row["host"] > ASKED]
    about = {"model": given.shape, "layers": model.config.num_hidden_layers, **machine()}
    store(
        {**about, "asked": ASKED, "repeats": given.repeats, "model_alone": own, "missed": missed, "rows": rows},
        given.out,
    )
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
