"""Measure how hashers made from short contexts do at longer ones, beside hashers made from contexts that long.

    uv run tools/measure_reach.py make MODEL --text TEXT --context 4096 --reach 8192 --out runs/reach/4096-reach
    uv run tools/measure_reach.py settle MODEL --text TEXT --context 4096 --reach 8192 --out runs/reach/4096-reach
    uv run tools/measure_reach.py measure MODEL --hashers runs/reach/* --texts TEXT ... --lengths 4096 8192 --out FILE

`make` runs the model once over contexts of one text and makes hashers from their queries and keys as `hashtrain` does:
the start of `transform`, and trained ones. `settle` decides which layers stay dense or without remainder. Whatever the
context and the reach, the number of tokens is the same. `measure` scores the last 256 rows of a text's first tokens
after a dense prompt. It runs the prompt once, and takes its first tokens for shorter lengths; what FILE already holds
is not measured again. `tools/draw_reach.py` draws the figure.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from evals.tasks.ppl import scored_rows
from hashtrain import Hasher, HasherConfig, ModelShape
from hashtrain.artefact.hasher import make_layer
from hashtrain.data.capture import replacing
from hashtrain.data.captured import Capture, InMemory
from hashtrain.data.corpus import token_ids
from hashtrain.data.offsets import offset
from hashtrain.evaluation.cost import layer_costs, steps_of
from hashtrain.evaluation.remainder import calibrate
from hashtrain.files.atomic import write_text
from hashtrain.models import load_model
from hashtrain.run.job import training_of
from hashtrain.run.pipeline import width_of
from hashtrain.settings.train_command import TrainCommand
from hashtrain.training.choose import choose
from hashtrain.training.trainer import Training
from safetensors.torch import load_file, save_file
from sparse_decode import HashSelector, LshSelector
from sparse_decode.attach import attach_rows
from sparse_decode.budget import LayerBudget
from sparse_decode.oracle import OracleSelector
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import DynamicCache, PreTrainedModel

SCORED, FRACTION, CHUNK = 256, 0.02, 2048
Layers = dict[int, list[tuple[Tensor, Tensor, Tensor, float]]]


def attention(layer: int, q: Tensor, k: Tensor, v: Tensor, scaling: float) -> Tensor:
    """Attend causally, the last row of q [B, Hq, Q, D] to all N keys [B, Hkv, N, D]: [B, Q, Hq, D].

    On a CPU torch takes half the time if each query head has its own keys.
    """
    rows, n, group = q.shape[2], k.shape[2], q.shape[1] // k.shape[1]
    keys, values = (x.repeat_interleave(group, 1) for x in (k, v))
    mask = None if rows == n else torch.ones(rows, n, dtype=torch.bool).tril(n - rows)
    out = scaled_dot_product_attention(q, keys, values, attn_mask=mask, is_causal=mask is None, scale=scaling)
    return out.transpose(1, 2)


@torch.inference_mode()
def prefilled(model: PreTrainedModel, ids: Tensor, first: int = 0, kept: Layers | None = None) -> DynamicCache:
    """Run a prompt, int64 [T], from position `first` on, in chunks; `kept` receives q, k, v and scaling by layer."""
    cache = DynamicCache(config=model.config)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, scaling: float) -> Tensor:
        if kept is not None:
            keys, values = (x[:, :, -q.shape[2] :].bfloat16() for x in (k, v))
            kept.setdefault(layer, []).append((q.bfloat16(), keys, values, scaling))
        return attention(layer, q, k, v, scaling)

    with replacing(model, attend):
        for at, piece in enumerate(ids.split(CHUNK)):
            start = first + CHUNK * at
            where = torch.arange(start, start + len(piece))[None]
            model(piece[None], past_key_values=cache, position_ids=where, logits_to_keep=1)
    return cache


class Contexts(Capture):
    """Captured contexts in memory."""

    def __init__(self, held: list[InMemory]):
        super().__init__(Path(), len(held))
        self.held: list[InMemory] = held

    def keys(self, context: int, layer: int) -> tuple[Tensor, float]:
        return self.held[context].keys(context, layer)

    def queries(self, context: int, layer: int, rows: Tensor | None = None) -> Tensor:
        return self.held[context].queries(context, layer, rows)

    def values(self, context: int, layer: int) -> Tensor:
        return self.held[context].values(context, layer)


def captured(model: PreTrainedModel, contexts: Iterator[tuple[Tensor, int]]) -> Contexts:
    """Capture contexts, each int64 [T], at their first positions."""
    held: list[InMemory] = []
    for ids, first in contexts:
        kept: Layers = {}
        prefilled(model, ids, first, kept)
        tensors = {
            f"{name}.{layer}": torch.cat(of_name, 2)
            for layer, parts in kept.items()
            for name, of_name in zip("qkv", zip(*(part[:3] for part in parts), strict=True), strict=True)
        }
        held.append(InMemory(tensors, {f"scaling.{layer}": repr(parts[0][3]) for layer, parts in kept.items()}))
        print(f"captured {len(held)} of {len(ids)} tokens at {first}", file=sys.stderr, flush=True)
    return Contexts(held)


def make(given: argparse.Namespace) -> None:
    """Make hashers from contexts of one text."""
    began = time.monotonic()
    model, tokenizer = load_model(given.model, torch.float32)
    ids = token_ids(given.text.read_text(encoding="utf-8"), tokenizer, given.tokens)[: given.tokens]
    lots = enumerate(ids.split(given.context))
    data = captured(model, ((lot, offset(number, given.context, given.reach)) for number, lot in lots))
    shape, reach = ModelShape.of(model.config), given.reach or given.context
    del model
    for name in given.only:
        command = TrainCommand(given.model, only=(name,), context=given.context, steps=given.steps, out=given.out)
        (recipe,) = command.recipes
        own = HasherConfig(
            recipe.variant,
            shape,
            **{"hidden": width_of(recipe, shape), **recipe.config},
            reach=reach,
            base_model=given.model,
        )
        hasher = Hasher(own)
        for number in range(shape.num_layers):
            layer = make_layer(own, number)
            layer.start(data, number, recipe.digits)
            if recipe.trained:
                training = Training(layer, number, data, training_of(command, recipe, "cpu"))
                training.run()
                others = {name: make_layer(own, number) for name in ("start", "keys")}
                others["start"].start(data, number, recipe.digits)
                others["keys"].load_state_dict(training.keys_trained or others["start"].state_dict())
                choose(layer, others, number, data, FRACTION)
            layer.round_matrices()
            calibrate(layer, number, data)
            hasher.layers[number] = layer
            print(f"{name}, layer {number}, {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
        hasher.save_pretrained(given.out / name)


def settle(given: argparse.Namespace) -> None:
    """Measure the layers of made hashers on the first contexts of their text, as the last step of `hashtrain`: store
    which stay dense, and drop remainders that make a layer worse."""
    model, tokenizer = load_model(given.model, torch.float32)
    ids = token_ids(given.text.read_text(encoding="utf-8"), tokenizer, given.tokens)[: given.tokens]
    steps = steps_of(model, ids.split(given.context), 0, given.reach)
    for path in sorted(given.out.glob("*/config.json")):
        hasher = Hasher.from_pretrained(path.parent)
        found = layer_costs(steps, hasher, FRACTION, lambda what, count: print(what, file=sys.stderr, flush=True))
        print(json.dumps({"hasher": path.parent.name, **found}), flush=True)
        hasher.config = replace(hasher.config, dense_layers=tuple(found["dense"]))
        hasher.save_pretrained(path.parent)


def methods(folders: list[Path], config: Any) -> Iterator[tuple[str, Any, bool]]:
    """Yield the name, the selector and whether the remainder is added, of every method."""
    yield "oracle", OracleSelector(), False
    yield "lsh", LshSelector(config), False
    for folder in folders:
        for path in sorted(folder.glob("*/config.json")):
            selector = HashSelector(Hasher.from_pretrained(path.parent))
            yield f"{folder.name}/{path.parent.name}", selector, False
            if path.parent.name != "paper":
                yield f"{folder.name}/{path.parent.name}+remainder", selector, True


@torch.inference_mode()
def measure(given: argparse.Namespace) -> None:
    """Score every method on every text at every length; store the rows after each length."""
    model, tokenizer = load_model(given.model, torch.float32)
    kept = json.loads(given.out.read_text(encoding="utf-8")) if given.out.is_file() else {"commands": [], "rows": []}
    rows: list[dict[str, Any]] = kept["rows"]
    commands = [*kept["commands"], " ".join(["uv", "run", "tools/measure_reach.py", *sys.argv[1:]])]
    for text in given.texts:
        ids = token_ids(text.read_text(encoding="utf-8"), tokenizer, max(given.lengths))[: max(given.lengths)]
        whole = prompt_of(model, ids[: max(given.lengths) - SCORED - 1], given.cache, f"{text.stem}.safetensors")
        for length in given.lengths:
            done = {row["method"] for row in rows if (row["text"], row["length"]) == (text.stem, length)}
            rows += scored(model, ids[:length], whole, given.hashers, text.stem, done)
            settings = {"model": Path(given.model).name, "scored": SCORED, "fraction": FRACTION}
            write_text(given.out, json.dumps({**settings, "commands": commands, "rows": rows}, indent=1) + "\n")


def prompt_of(model: PreTrainedModel, ids: Tensor, folder: Path | None, name: str) -> list[tuple[Tensor, Tensor]]:
    """Return the keys and values of a prompt by layer, bfloat16, from the folder if they are there."""
    file = None if folder is None else folder / name
    if file is not None and file.exists():
        held = load_file(file)
        return [(held[f"k.{i}"], held[f"v.{i}"]) for i in range(len(held) // 2)]
    layers: Any = prefilled(model, ids).layers
    found = [(layer.keys.bfloat16(), layer.values.bfloat16()) for layer in layers]
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        pairs = [pair for i, (k, v) in enumerate(found) for pair in ((f"k.{i}", k), (f"v.{i}", v))]
        save_file({name: x.contiguous() for name, x in pairs}, file)
    return found


def scored(
    model: PreTrainedModel,
    ids: Tensor,
    whole: list[tuple[Tensor, Tensor]],
    folders: list[Path],
    text: str,
    done: set[str],
) -> list[dict[str, Any]]:
    """Compare every method that is not done with dense attention on the last rows of ids [T]."""
    prompt = len(ids) - SCORED - 1
    cache = DynamicCache(config=model.config)
    for layer, parts in enumerate(whole):
        keys, values = (x[:, :, :prompt].float() for x in parts)
        cache.update(keys, values, layer)
    dense = scored_rows(model, ids, SCORED, cache)
    loss, found = dense.mean_loss(ids[-SCORED:]), list[dict[str, Any]]()
    for name, selector, whole_softmax in methods(folders, model.config):
        if name in done:
            continue
        how: dict[str, Any] = {"sparse_rows": prompt, "remainder": whole_softmax}
        with attach_rows(model, selector, LayerBudget(FRACTION, min_tokens=1), **how):
            nll, kl = dense.compare(scored_rows(model, ids, SCORED, cache), ids[-SCORED:])
        row = {"text": text, "length": len(ids), "method": name, "kl": kl, "nll": nll, "dense": loss}
        found.append({key: round(x, 5) if isinstance(x, float) else x for key, x in row.items()})
        print(json.dumps(found[-1]), flush=True)
    return found


def main() -> None:
    """Parse the arguments and run one of the commands."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    making, settling = commands.add_parser("make"), commands.add_parser("settle")
    making.set_defaults(act=make)
    settling.set_defaults(act=settle)
    for one in (making, settling):
        one.add_argument("--text", type=Path, required=True)
        one.add_argument("--tokens", type=int, default=32768)
        one.add_argument("--context", type=int, default=4096)
        one.add_argument("--reach", type=int)
    making.add_argument("--steps", type=int, default=100)
    making.add_argument("--only", nargs="+", default=["transform-start"])
    measuring = commands.add_parser("measure")
    measuring.set_defaults(act=measure)
    measuring.add_argument("--texts", type=Path, nargs="+", required=True)
    measuring.add_argument("--lengths", type=int, nargs="+", required=True)
    measuring.add_argument("--hashers", type=Path, nargs="+", default=[])
    measuring.add_argument("--cache", type=Path, help="folder for the keys and values of prompts")
    for one in (making, settling, measuring):
        one.add_argument("model")
        one.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    given.act(given)


if __name__ == "__main__":
    main()
