"""Train some layers of a model's hashers and list all others as dense: an experiment of minutes.

    uv run tools/train_layers.py --layers 6 14 22 --model MODEL --text TRAIN --only linear-exact paper-exact \
        --context 2048 --contexts 10 --steps 800 --learning-rate 4e-3 --out runs/few

Every flag except --layers is one of `hashtrain train`. Queries and keys are captured in memory, only for those layers.
There is no evaluation, and no remainder is fitted: use `uv run evals iou` and `evals ppl` with the `--dense-at` of the
last line. Existing hashers are kept.
"""

import argparse
import json
import time
from dataclasses import replace
from typing import cast

import torch
from hashtrain.artefact.hasher import Hasher
from hashtrain.cli import parse
from hashtrain.config import ModelShape
from hashtrain.data.capture import run_context
from hashtrain.data.captured import Capture, InMemory
from hashtrain.data.corpus import contexts
from hashtrain.data.shares import room_for
from hashtrain.data.texts import read_texts
from hashtrain.files.atomic import write_text
from hashtrain.models import load_model
from hashtrain.run.job import training_of
from hashtrain.run.pipeline import config_of, record_of
from hashtrain.settings.recipes import Recipe
from hashtrain.settings.train_command import TrainCommand
from hashtrain.training.trainer import Training


class Several:
    """Contexts in memory, for some layers; reads like a `Capture`."""

    def __init__(self, contexts: list[InMemory]):
        self.contexts = contexts

    def __len__(self) -> int:
        return len(self.contexts)

    def keys(self, context: int, layer: int) -> tuple[torch.Tensor, float]:
        return self.contexts[context].keys(0, layer)

    def queries(self, context: int, layer: int, rows: torch.Tensor | None = None) -> torch.Tensor:
        return self.contexts[context].queries(0, layer, rows)


def captured(command: TrainCommand, layers: list[int]) -> tuple[ModelShape, Capture]:
    """Run the model over the contexts and keep q and k of some layers."""
    model, tokenizer = load_model(command.model_path, torch.float32, "cpu")
    read = read_texts(list(command.text), room=room_for(command.context * command.contexts), seed=command.seed)
    texts = contexts(read, tokenizer, command.context, command.contexts, command.seed)
    kept = []
    for ids in texts:
        tensors, scalings = run_context(model, ids)
        wanted = {f"{kind}.{layer}" for kind in "qk" for layer in layers}
        kept.append(InMemory({name: t.clone() for name, t in tensors.items() if name in wanted}, scalings))
    return ModelShape.of(model.config), cast(Capture, Several(kept))


def made(command: TrainCommand, recipe: Recipe, shape: ModelShape, data: Capture, layers: list[int]) -> Hasher:
    """Train the layers of one hasher."""
    trained = record_of(command, recipe, len(data), "cpu") if recipe.trained else {}
    config = config_of(command, recipe, shape, trained)
    config = replace(config, dense_layers=tuple(n for n in range(shape.num_layers) if n not in layers))
    hasher = Hasher(config, command.seed)
    for layer in layers:
        hasher.layer(layer).start(data, layer, command.digits or recipe.digits)
        if recipe.trained:
            began = time.monotonic()
            training = Training(hasher.layer(layer), layer, data, training_of(command, recipe, "cpu"))
            training.run()
            last = training.losses[-20:]
            print(
                f"{recipe.name}, layer {layer}: loss {sum(last) / len(last):.3f}, {time.monotonic() - began:.0f} s",
                flush=True,
            )
    return hasher


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", required=True, help="the layers to train")
    given, others = parser.parse_known_args()
    command = parse(["train", *others])
    assert isinstance(command, TrainCommand)
    torch.set_num_threads(1)
    shape, data = captured(command, given.layers)
    for recipe in command.recipes:
        if not (command.out / recipe.name / "config.json").is_file():
            hasher = made(command, recipe, shape, data, given.layers)
            hasher.save_pretrained(command.out / recipe.name, f"# `{recipe.name}`, layers {given.layers}\n")
    settings = {"layers": given.layers, "steps": command.steps, "context": command.context, "contexts": len(data)}
    write_text(command.out / "layers.json", json.dumps(settings) + "\n")
    dense = [n for n in range(shape.num_layers) if n not in given.layers]
    print("--dense-at " + " ".join(map(str, dense)))


if __name__ == "__main__":
    main()
