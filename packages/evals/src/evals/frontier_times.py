"""Measured times of the frontier's points: a decode step of the whole model, with each method and budget in turns.

Rivals and the oracle are not timed: their selectors are written for quality here, not for speed.
"""

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from hashtrain.config import ModelShape
from hashtrain.demo import model_path
from hashtrain.models import load_model
from sparse_decode import HashSelector, RecentSelector, attach
from transformers import DynamicCache, PreTrainedModel

from evals.frontier import Point
from evals.machine import environment
from evals.methods import DENSE, LoadedMethod, load_methods
from evals.result import read_json, write_json
from evals.rivals import RIVALS
from evals.runner import model_identity
from evals.study import FrontierCommand
from evals.tasks.throughput import fill
from evals.timing import Turn, in_turns, nothing, quantiles

STEPS, WARMUP, REPEATS = 8, 2, 5

Times = dict[str, Any]
"""`tokens` in the cache, `dtype`, `environment`, and `steps`: for each name `ms`, `low` and `high`."""


def clocked(command: FrontierCommand, config: Mapping[str, Any], found: Sequence[Point]) -> Times:
    """Measure the points' times and store them as times.json.

    Args: config: of the runs.
    Raises: ValueError with one sentence if the model is not that of the runs, or a hasher is missing.
    """
    model, _ = load_model(model_path(command.model), torch.float32)
    if (identity := model_identity(model)) != config["model_identity"]:
        raise ValueError(f"--model must be the model of the runs, {config['model_identity']}, got {identity}")
    names = dict.fromkeys(point.method for point in found)
    loaded = load_methods([name for name in names if name not in RIVALS], command.hashers, model.config)
    methods = {m.name: m for m in loaded if isinstance(m.selector, HashSelector | RecentSelector)}
    dense = {*range(config["dense_layers"]), *config.get("dense_at", ())}
    half: PreTrainedModel = cast(Any, model).to(torch.bfloat16)
    times = measure(half, methods, found, dense, command.tokens or config["context"])
    command.out.mkdir(parents=True, exist_ok=True)
    write_json(command.out / "times.json", times)
    return times


@torch.inference_mode()
def measure(
    model: PreTrainedModel,
    methods: Mapping[str, LoadedMethod],
    found: Sequence[Point],
    dense: set[int],
    tokens: int,
    seed: int = 0,
) -> Times:
    """Time a decode step of the model with `tokens` random keys and values, dense and at the points of `methods`.

    Args: dense: layers that stay dense at every point.
    Returns: the median of a turn's steps in milliseconds: the mean over turns and its 95 % interval.
    """
    cache = DynamicCache(config=model.config)
    fill(cache, ModelShape.of(model.config), tokens, 1, model.dtype, seed, str(model.device))
    token = torch.zeros(1, 1, dtype=torch.int64, device=model.device)

    def turn(attached: Callable[[], contextlib.AbstractContextManager[object]]) -> Turn:
        stack = contextlib.ExitStack()

        def finish() -> None:
            stack.close()
            cache.crop(-(WARMUP + STEPS))

        def step(_: int) -> object:
            return cast(Any, model)(token, past_key_values=cache, use_cache=True).logits

        return Turn(lambda: cast(None, stack.enter_context(attached())), step, finish)

    def sparse(method: LoadedMethod, point: Point) -> Callable[[], contextlib.AbstractContextManager[object]]:
        layers = dense | set(getattr(method.selector, "dense_layers", ()))
        how: Any = {"dense_layers": layers, "remainder": method.remainder}
        return lambda: attach(model, method.selector, point.reads, **how)

    turns = {DENSE: turn(contextlib.nullcontext)}
    turns |= {name_of(point): turn(sparse(methods[point.method], point)) for point in found if point.method in methods}
    sync = torch.cuda.synchronize if model.device.type == "cuda" else nothing
    steps = {name: quantiles(of, seed)["p50_ms"] for name, of in in_turns(turns, STEPS, WARMUP, REPEATS, sync).items()}
    return {
        "tokens": tokens,
        "dtype": str(model.dtype).removeprefix("torch."),
        "environment": environment(str(model.device)),
        "steps": {name: {"ms": of.mean, "low": of.low, "high": of.high} for name, of in steps.items()},
    }


def name_of(point: Point) -> str:
    """Return the name of a point's step in stored times."""
    return f"{point.line} at {100 * point.budget:g} %"


def taken(times: Times, found: Sequence[Point]) -> list[float | None]:
    """Return the milliseconds of each point's step, None where it is not timed."""
    return [times["steps"].get(name_of(point), {}).get("ms") for point in found]


def described(times: Times) -> str:
    """Return how times were measured, for a note and the label of an axis."""
    machine = times["environment"]
    return (
        f"{times['tokens']:,} random keys, {times['dtype']}, {machine['processor']}, {machine['threads']} threads "
        f"(dense {times['steps'][DENSE]['ms']:.1f} ms)"
    )


def read(path: Path) -> Times:
    """Read stored times. Raises: ValueError with one sentence if the file holds none."""
    remedy = "measure them with `evals frontier --clock`"
    times = read_json(path, remedy)
    steps, machine = times.get("steps"), times.get("environment")
    good = isinstance(machine, dict) and {"processor", "threads"} <= machine.keys()
    good = good and isinstance(times.get("tokens"), int) and isinstance(steps, dict) and DENSE in steps
    if not good or not all(map(_is_time, cast(dict[str, Any], steps).values())):
        raise ValueError(f"{path} holds no times of steps; {remedy}")
    return times


def _is_time(of: Any) -> bool:
    ms = of.get("ms") if isinstance(of, dict) else None
    return isinstance(ms, float | int) and math.isfinite(ms) and ms > 0
