"""Directions of queries and keys, and how evenly hashes divide them (the paper's figure 2).

Angles are between random pairs: small angles among queries and among keys mean that each kind lies in a cone. Evenly
used bits have an entropy of 1; planes that miss the cones give less, and many keys share a code.
"""

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hashcore
import numpy as np
import torch
from hashtrain.data.capture import observe
from matplotlib.figure import Figure
from rich.console import Console
from torch import Tensor
from transformers import PreTrainedModel

from evals.commands import ConesCommand
from evals.documents import TokenDocument
from evals.figures import COLOURS, save
from evals.methods import DENSE, LoadedMethod
from evals.metrics import by_place
from evals.result import Result, Row
from evals.runner import finite
from evals.setup import Ready, Sample, each_document, finish, prepare, rows_of

ANGLES = ("angle_qq", "angle_kk", "angle_qk")
SPREAD = ("pc1_q", "pc1_k", "pc2_q", "pc2_k")
CODES = ("bit_entropy", "distinct_codes")
_POINTS = 200  # of each kind in the figure
_PAIRS = 4096


def run(command: ConesCommand, console: Console) -> Result:
    """Run the task: see `evals.tasks`."""
    ready = prepare(command, "cones", console)
    methods = [method for method in ready.methods if method.selector]
    names = [DENSE, *(method.name for method in methods)]

    def compute(number: int, document: TokenDocument, step: Callable[[str], None]) -> Sample:
        found = measure(ready.model, document.ids, methods, command.seed)
        step("layers")
        return found

    def check(sample: Sample) -> None:
        if list(sample["layers"]) != names:
            raise ValueError("its methods are not those of the run")
        for name, layers in sample["layers"].items():
            for layer in layers:
                for metric in CODES if name != DENSE else ANGLES + SPREAD:
                    finite(layer[metric])

    samples = each_document(command, ready, console, 1, check, compute)
    result = finish(command, ready, list(_rows(command, ready, samples)), console)
    draw_cones(result, samples[0]["points"], command.out / "figure.png")
    return result


def measure(model: PreTrainedModel, ids: Tensor, methods: list[LoadedMethod], seed: int) -> dict[str, Any]:
    """Measure the queries and keys of one context, ids int64 [T].

    Returns: `layers`: for dense attention and each hasher, a dictionary of numbers per layer, means over heads; and
        `points`: queries and keys of the middle layer's first KV head, projected on two principal components.
    """
    layers: dict[str, list[dict[str, float]]] = {name: [] for name in (DENSE, *(m.name for m in methods))}
    seen: list[dict[str, list[list[float]]]] = []

    def sink(layer: int, q: Tensor, k: Tensor, v: Tensor, scaling: float) -> None:
        generator = torch.Generator().manual_seed(seed * 1_000_003 + layer)
        q, k = q[0].float(), k[0].float()
        layers[DENSE].append(geometry(q, k, generator))
        seen.append(picture(q[0], k[0], generator))
        for method in methods:
            assert method.selector is not None
            layers[method.name].append(occupancy(method.selector.encode_keys(layer, k[None])[0]))

    observe(model, ids, sink)
    return {"layers": layers, "points": seen[len(seen) // 2]}


def geometry(q: Tensor, k: Tensor, generator: torch.Generator) -> dict[str, float]:
    """Measure mean angles of random pairs in degrees, and the shares of the first and second principal component.

    Args:
        q: [Hq, T, D]; k: [Hkv, T, D]. A query head is paired with its KV head. Components are those of the second
            moment, without centring, because a cone is a direction that all vectors share.
    """
    owner = torch.arange(q.shape[0]) * k.shape[0] // q.shape[0]
    found: dict[str, Tensor] = {}
    for name, a, b in (("qq", q, q), ("kk", k, k), ("qk", q, k[owner])):
        i, j = (torch.randint(a.shape[1], (_PAIRS,), generator=generator) for _ in range(2))
        kept = i != j  # the angle between a vector and itself is 0
        cosine = torch.nn.functional.cosine_similarity(a[:, i[kept]], b[:, j[kept]], dim=-1)
        found[f"angle_{name}"] = cosine.clamp(-1, 1).acos().mean().double() * (180 / math.pi)
    for name, x in (("q", q), ("k", k)):
        values = torch.linalg.svdvals(x.double()).square()
        share = (values / values.sum(-1, keepdim=True)).mean(0)
        found[f"pc1_{name}"], found[f"pc2_{name}"] = share[0], share[1] if len(share) > 1 else share.new_zeros(())
    return dict(zip(found, torch.stack([*found.values()]).tolist(), strict=True))


def occupancy(codes: Tensor) -> dict[str, float]:
    """Measure the mean entropy of a bit, and the share of codes that differ from all earlier ones.

    Args: codes: int32 [H, T, W].
    """
    p = hashcore.unpack(codes).double().mean(1)  # [H, bits]
    entropy = -(torch.special.xlogy(p, p) + torch.special.xlogy(1 - p, 1 - p)) / math.log(2)
    distinct = [len(torch.unique(head, dim=0)) / codes.shape[1] for head in codes]
    return {"bit_entropy": entropy.mean().item(), "distinct_codes": float(np.mean(distinct))}


def picture(q: Tensor, k: Tensor, generator: torch.Generator) -> dict[str, list[list[float]]]:
    """Project some queries [T, D] and keys [T, D] of one head on the principal components of both together."""
    both = torch.cat([q, k])
    centre = both.mean(0)
    axes = torch.linalg.svd((both - centre).double(), full_matrices=False).Vh[:2]
    drawn = torch.randperm(len(q), generator=generator)[:_POINTS]
    return {name: ((x[drawn] - centre).double() @ axes.T).tolist() for name, x in (("queries", q), ("keys", k))}


def _rows(command: ConesCommand, ready: Ready, samples: list[Sample]) -> Iterator[Row]:
    row = rows_of(command, ready, "rows", len(samples))
    for name in samples[0]["layers"]:
        for metric in ANGLES + SPREAD if name == DENSE else CODES:
            values = np.array([[layer[metric] for layer in sample["layers"][name]] for sample in samples])
            at: dict[str, Any] = {} if name == DENSE else {"budget": None, "rule": "visible", "density": None}
            for place, estimate in by_place(values, range(values.shape[1]), command.seed):
                yield row(name, metric, estimate, **place, **at)


def draw_cones(result: Result, points: dict[str, list[list[float]]], path: Path) -> None:
    """Draw one head's queries and keys, their angles by layer, and how evenly each hash uses its bits."""
    figure = Figure(figsize=(12, 3.6), layout="constrained")
    first, second, third = figure.subplots(1, 3)
    for name, colour in (("queries", "#d55e00"), ("keys", "#0072b2")):
        x, y = np.array(points[name]).T
        first.scatter(x, y, s=8, c=colour, label=name, alpha=0.6, linewidths=0)
    first.set(xlabel="first component", ylabel="second component", title="one head, middle layer")
    first.legend()
    for metric, label in zip(ANGLES, ("query and query", "key and key", "query and key"), strict=True):
        rows = [row for row in result.select(metric=metric) if row.layer is not None]
        second.plot([row.layer or 0 for row in rows], [row.value for row in rows], marker="o", label=label)
    second.set(xlabel="layer", ylabel="mean angle, degrees", title="random pairs")
    second.axhline(90, color="#999999", linewidth=1)
    second.legend(framealpha=0.6, fontsize="small")
    for name in dict.fromkeys(row.method for row in result.select(metric="bit_entropy")):
        rows = [row for row in result.select(metric="bit_entropy", method=name) if row.layer is not None]
        values = [row.value for row in rows]
        third.plot([row.layer or 0 for row in rows], values, marker="o", label=name, color=COLOURS.get(name))
    third.set(xlabel="layer", ylabel="entropy of a bit", title="key codes", ylim=(0, 1.03))
    third.legend()
    save(figure, path, 110)
