"""Time decode steps of an attached model and of the plain model on the CPU, from a context length of one token up.

    uv run packages/sparse-decode/benchmarks/never_slower.py --out docs/results/never_slower.json
    uv run --with torchao packages/sparse-decode/benchmarks/never_slower.py --weights int8 --lengths 1024 8192

SmolLM2-135M's shape with random weights in bfloat16, or a folder with --model; --weights has torchao quantise them.
Untrained `transform` hashers with arbitrary remainder coefficients. `attached`: `attach`'s default budget, which keeps
short contexts dense; `dense layers`: attached, with `dense_below` above any context; `sparse`: with `dense_below` 0.
Caches are filled with random numbers.

Pairs of steps alternate in one process: an untimed step, then a timed one, as in a text, so that none finds the CPU's
caches full of another model's objects. Then both tokens are removed. Our caches copy their rows in the first step after
a removal, because what a cache has shown is never written again; in a text they copy them once in 64 tokens or more.
Times are processor time with one thread, else wall time; ratios are medians over adjacent steps. Requirement: an
attached step is at most 2 % slower at every length.
The last line is JSON; the exit status is 1 if the requirement is not met.
"""

import argparse
import copy
import pathlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from results import machine, store
from shapes import SHAPES, make_hasher, make_model
from sparse_decode import Budget, attach
from sparse_decode.budget import LayerBudget
from transformers import DynamicCache, PreTrainedModel

LENGTHS = [1, 16, 64, 256, 1024, 4096, 8192]
SLOWER_ASKED = 1.02
NEVER = 1 << 30
WARM_UP = 4

Step = Callable[[], object]


def attached_models(model: PreTrainedModel) -> dict[str, PreTrainedModel]:
    """Return the plain model and copies that are attached with different budgets; all share the same weights."""
    hasher, models = make_hasher(model), {"as it is": model}
    budgets = {"attached": None, "dense layers": LayerBudget(dense_below=NEVER), "sparse": Budget()}
    for name, budget in budgets.items():
        models[name] = copy.deepcopy(model, {id(p): p for p in model.parameters()})
        attach(models[name], hasher, budget)
    return models


def step_of(model: PreTrainedModel, keys_values: list[torch.Tensor]) -> tuple[Step, DynamicCache]:
    """Return a step at a context with these keys and values, and its cache."""
    cache = DynamicCache(config=model.config)
    for layer, (keys, values) in enumerate(keys_values):
        cache.update(keys.clone(), values.clone(), layer)
    n, ids = keys_values[0].shape[3], torch.zeros(1, 1, dtype=torch.long)
    return (lambda: model(ids, past_key_values=cache, position_ids=torch.full((1, 1), n))), cache


def interleaved(steps: dict[str, tuple[Step, DynamicCache]], repeats: int) -> dict[str, list[float]]:
    """Time pairs of steps in turn, removing their tokens from the cache; the first pairs are warm-up."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    for _ in range(repeats + WARM_UP):
        for name, (step, cache) in steps.items():
            step()
            began = clock()
            step()
            times[name].append(clock() - began)
            cache.crop(-2)
    return {name: taken[WARM_UP:] for name, taken in times.items()}


def compared(over: list[float], under: list[float]) -> dict[str, float]:
    """Return the median and the quartiles of the ratios of adjacent times."""
    low, middle, high = statistics.quantiles([a / b for a, b in zip(over, under, strict=True)], n=4)
    return {"ratio": round(middle, 4), "low": round(low, 4), "high": round(high, 4)}


@torch.no_grad()
def measure(models: dict[str, PreTrainedModel], n: int, repeats: int) -> dict[str, Any]:
    config = models["as it is"].config
    size = 2, 1, config.num_key_value_heads, n, config.hidden_size // config.num_attention_heads
    drawn = [torch.empty(size, dtype=models["as it is"].dtype).normal_() for _ in range(config.num_hidden_layers)]
    times = interleaved({name: step_of(model, drawn) for name, model in models.items()}, repeats)
    plain = times.pop("as it is")
    row = {"n": n, "as it is": {"ms": round(1e3 * statistics.median(plain), 2)}}
    for name, taken in times.items():
        row[name] = {"ms": round(1e3 * statistics.median(taken), 2), **compared(taken, plain)}
    return row


def quantised(model: PreTrainedModel, weights: str) -> PreTrainedModel:
    """Quantise the weights of a model's linear layers in place by torchao: one scale a row, or a group of 32."""
    from torchao.quantization import Int8WeightOnlyConfig, IntxWeightOnlyConfig, PerGroup, quantize_

    four_bits = IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(32))
    quantize_(model, Int8WeightOnlyConfig() if weights == "int8" else four_bits)
    return model


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder or hub id; default: random weights")
    parser.add_argument("--shape", choices=SHAPES, default="smollm2-135m")
    parser.add_argument("--layers", type=int, help="number of layers; default: those of the shape")
    parser.add_argument("--weights", choices=["bfloat16", "int8", "int4"], default="bfloat16")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--only", nargs="+", help="models to time; default: all")
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=pathlib.Path)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    torch.manual_seed(0)
    model = make_model(given.model, given.shape, given.layers)
    models = attached_models(model if given.weights == "bfloat16" else quantised(model, given.weights))
    models = {name: model for name, model in models.items() if name in ("as it is", *(given.only or models))}
    rows = []
    for n in given.lengths:
        rows.append(measure(models, n, given.repeats))
        line = ", ".join(f"{name} {found}" for name, found in rows[-1].items() if name != "n")
        print(f"{n:>7,} tokens: {line}", flush=True)
    missed = [row["n"] for row in rows if row.get("attached", {"ratio": 0})["ratio"] > SLOWER_ASKED]
    name = pathlib.Path(given.model).name if given.model else given.shape
    about = {
        "model": name,
        "weights": given.weights,
        "layers": models["as it is"].config.num_hidden_layers,
        **machine(),
    }
    store({**about, "asked": SLOWER_ASKED, "repeats": given.repeats, "missed": missed, "rows": rows}, given.out)
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
