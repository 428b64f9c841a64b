"""Train hash functions on a folder of text, step by step through the public functions.

    uv run examples/train_folder.py notes/                                          # for the demo model
    uv run examples/train_folder.py notes/ --model path/or/hub-id --out runs/mine

The main steps of `uv run hashtrain --text notes/`: capture, start, training, remainder. It leaves out positions beyond
the context, budgets by layer and head, and the costs of layers, so its hashers are worse: read it to see the parts, or
to combine them differently. Takes .txt, .md and .py files; .jsonl and .parquet with the extra `datasets`.
"""

import argparse
import pathlib
import tempfile

import torch
from hashtrain import Hasher, HasherConfig, ModelShape, TrainConfig, train_layer
from hashtrain.adapters import adapter_of
from hashtrain.data.capture import Capture, capture
from hashtrain.data.corpus import contexts, read_texts, split
from hashtrain.data.texts import room_for
from hashtrain.demo import DEMO, base_model, model_path
from hashtrain.evaluation.calibration import calibrate
from hashtrain.evaluation.metrics import layer_quality
from hashtrain.layers import LayerHasher
from hashtrain.models import load_model
from hashtrain.usage import guarded

VALIDATION = 8  # contexts
FRACTION = 0.02  # of the visible tokens: the budget for training and evaluation
DIGITS = 4  # most bits of one dimension; without training steps 5 find more


def evaluate(hasher: LayerHasher, layer: int, validation: Capture) -> tuple[float, float]:
    """Return IoU and attention mass of the hasher's selections on held-out contexts, each row's top 2 %."""
    tokens = validation.keys(0, layer)[0].shape[2]
    rows = torch.arange(tokens // 4, tokens, 16)  # early rows have budgets of a few tokens
    (quality,) = layer_quality([hasher], layer, validation, [rows] * len(validation), FRACTION)
    return quality.iou.mean().item(), quality.mass.mean().item()


def train(given: argparse.Namespace, folder: pathlib.Path) -> Hasher:
    """Train every layer, print its quality before and after, and return the hasher."""
    model, tokenizer = load_model(model_path(given.model))
    # 1. Text, split into training and validation texts, and cut into contexts of tokens.
    seen, unseen = split(read_texts(given.text, room=room_for(5 * given.context * (given.contexts + VALIDATION))))
    lots = (
        contexts(seen, tokenizer, given.context, given.contexts),
        contexts(unseen, tokenizer, given.context, VALIDATION),
    )
    # 2. Queries and keys of every layer, as attention sees them, stored on disk.
    learnt, validation = (capture(model, lot, folder / str(i), dtype=torch.bfloat16) for i, lot in enumerate(lots))
    print(f"{len(learnt)} contexts of {given.context} tokens to train on, {len(validation)} held out")
    # 3. A hasher of the model's shape, of the variant that works best on the demo model.
    shape, name = ModelShape.of(model.config), base_model(given.model)
    hasher = Hasher(HasherConfig("transform", shape, base_model=name, adapter=adapter_of(model)))
    settings = TrainConfig(
        FRACTION, given.steps, learning_rate=given.learning_rate, beta=4.0, min_position=given.context // 16
    )
    for number in range(hasher.config.shape.num_layers):
        layer = hasher.layer(number)
        # A start from two moments of queries and keys (eq. 18): good codes before any training step.
        layer.start(learnt, number, DIGITS)
        before = evaluate(layer, number, validation)
        # 4. Rank the target above other tokens (docs/algorithm.md, eq. 10). Layers are independent.
        train_layer(layer, number, learnt, settings)
        # 5. Fit the estimate of the remainder (eq. 15); `attach` then adds it back.
        calibrate(layer, number, learnt)
        after = evaluate(layer, number, validation)
        print(
            f"layer {number}: IoU {before[0]:.3f} -> {after[0]:.3f}, attention mass {before[1]:.3f} -> {after[1]:.3f}"
        )
    return hasher


def run(arguments: list[str] | None) -> int:
    """Parse the arguments, train and store."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=pathlib.Path, nargs="+", help="files and folders of text")
    parser.add_argument("--model", default=DEMO, help="folder or hub id; default: the demo model")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("runs/folder"), help="the hasher's folder")
    parser.add_argument("--context", type=int, default=2048, help="tokens per context")
    parser.add_argument("--contexts", type=int, default=40, help="most contexts to train on")
    parser.add_argument("--steps", type=int, default=300, help="optimiser steps per layer")
    parser.add_argument("--learning-rate", type=float, default=3e-3, help="peak; the default suits the demo model")
    given = parser.parse_args(arguments)
    if given.context < 64 or given.contexts < 1:
        parser.error(f"expected --context >= 64 and --contexts >= 1, got {given.context} and {given.contexts}")
    with tempfile.TemporaryDirectory() as folder:
        hasher = train(given, pathlib.Path(folder))
    # 6. The result: a folder with a config and one safetensors file.
    hasher.save_pretrained(given.out, card=f"Trained by examples/train_folder.py for {hasher.config.base_model}.\n")
    print(f"stored in {given.out}; next: uv run examples/attach_local.py --model {given.model} --hasher {given.out}")
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Run the example. Returns 0, or 2 with one sentence on stderr if the input cannot be used."""
    return guarded("train_folder", lambda: run(arguments))


if __name__ == "__main__":
    raise SystemExit(main())
