"""A run's report: the table and the sentences on the terminal, each hasher's card, its settings and environment."""

import json
import os
import platform
from typing import Any

import torch
import transformers
from rich.table import Table

import hashtrain
from hashtrain.config import HasherConfig
from hashtrain.run.settings import TrainCommand

Metrics = dict[str, Any]
_NAMED = 8


def quality_table(metrics: Metrics) -> Table:
    """Lay out how well each hasher selects in the layers that are sparse, and what all of it does to the output."""
    table = Table(
        box=None,
        pad_edge=False,
        title_justify="left",
        caption_justify="left",
        title=f"{100 * metrics['fraction']:g} % of the tokens selected, on held-out text",
        caption="IoU: overlap with exact selection. Attention: share of what that finds. In the worst head: its 5th "
        "percentile, and lost rows, which find less than half. KL: of the output from dense, with the remainder, nats, "
        "on training text.",
    )
    any_dense = any(found["dense_layers"] for found in metrics["hashers"].values())
    for title in ("hasher", "IoU", "attention", "worst head", "lost rows", "KL", *["dense layers"] * any_dense):
        table.add_column(title)
    for name, found in metrics["hashers"].items():
        dense, own = found["dense_layers"], found["kv_head"]
        layers = [layer for number, layer in enumerate(own["layers"]) if number not in dense]
        low, lost = min(at["low"] for at in layers), max(max(at["lost_by_head"]) for at in layers)
        means = f"{own['mean']['iou']:.3f}", f"{own['mean']['mass']:.3f}", f"{low:.2f}", f"{100 * lost:.2g} %"
        whole = f"{found['cost']['all']:.3f}" if "cost" in found else ""
        table.add_row(name, *means, whole, *[", ".join(map(str, dense)) or "none"] * any_dense)
    return table


def sentences(metrics: Metrics) -> list[str]:
    """Say of each hasher which heads fail, and which layers lost their remainder."""
    lines: list[str] = []
    for name, result in metrics["hashers"].items():
        failing = [f"layer {n} head {head}" for n, head in result["failing"]]
        failing = failing[:_NAMED] + ["..."] * (len(failing) > _NAMED)
        bare = [f"layer {n}" for n in result.get("cost", {}).get("bare", ())]
        said = {"heads that fail": failing, "without a remainder": bare}
        found = "; ".join(f"{what}: {', '.join(where)}" for what, where in said.items() if where)
        lines += [f"{name}: {found}"] if found else []
    return lines


def card(config: HasherConfig, name: str, metrics: Metrics) -> str:
    """Write a hasher's README: what it was made from, and how well it selects."""
    mean = metrics["hashers"][name]["kv_head"]["mean"]
    corpus, read = metrics["corpus"], f"{metrics['contexts']} contexts of {metrics['context']} tokens"
    untrained = f"Not trained; calibrated on text of {corpus}."
    trained = f"{metrics['steps']} steps per layer, {read} ({corpus})." if config.training else untrained
    base = f"base_model: {config.base_model}\n" if "/" in config.base_model else ""
    return f"""---
library_name: hashtrain
license: apache-2.0
{base}tags: [sparse-attention, kv-cache, hashing]
---
# Hasher `{name}` for `{config.base_model}`

Variant `{config.variant}`, {config.bits} bits, made by hashtrain {metrics["version"]}.
{trained}
For contexts of {"any length" if config.reach is None else f"up to {config.reach} tokens"}.
Layers that stay dense: {", ".join(map(str, config.dense_layers)) or "none"}.
On {metrics["held_out"]} held-out contexts, reading {metrics["fraction"]:.1%} of the visible tokens, the others find
{mean["iou"]:.3f} (IoU) of the tokens that exact attention weighs most, and {mean["mass"]:.3f} of their attention.

    from hashtrain import Hasher
    hasher = Hasher.from_pretrained("this/folder")
"""


def as_toml(command: TrainCommand) -> str:
    """Return the settings as TOML."""
    given = {key: value for key, value in vars(command).items() if value is not None}
    plain = {key: [*map(str, value)] if isinstance(value, tuple) else value for key, value in given.items()}
    return "".join(f"{key} = {json.dumps(x, ensure_ascii=False, default=str)}\n" for key, x in plain.items())


def environment(device: str) -> dict[str, Any]:
    """Return the software versions and the hardware of this run."""
    versions = {module.__name__: module.__version__ for module in (hashtrain, torch, transformers)}
    own = {"python": platform.python_version(), "system": platform.platform(), "cores": os.cpu_count()}
    return {**versions, **own, "device": torch.cuda.get_device_name(device) if device.startswith("cuda") else "cpu"}
