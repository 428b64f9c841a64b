"""Find the best learning rate for each hasher on the demo model, and store the table.

    uv run tools/tune_learning_rates.py                     # every trained hasher
    uv run tools/tune_learning_rates.py linear group-xnor   # only these; other rows of the table are kept

Every hasher gets the same layers, steps and contexts; they are evaluated on validation contexts from the training text,
never on the held-out modules. Writes docs/results/learning_rates.json; copy the best ones to settings/recipes.py.
"""

import json
import sys
import tempfile
from pathlib import Path
from statistics import mean

import torch
from hashtrain import HasherConfig, ModelShape, TrainConfig, train_layer
from hashtrain.data.capture import Capture, capture
from hashtrain.data.corpus import contexts, python_sources
from hashtrain.evaluation.metrics import hash_quality
from hashtrain.files.atomic import write_text
from hashtrain.layers import BY_VARIANT
from hashtrain.machine.workers import Report, default_workers, run_jobs
from hashtrain.models import load_model
from hashtrain.settings.recipes import ALL, Recipe
from hashtrain.settings.train_command import TrainCommand
from rich.progress import Progress

RATES = (3e-4, 1e-3, 3e-3, 6e-3, 1e-2, 2e-2, 4e-2, 8e-2)
LAYERS = (2, 4)
STEPS, TRAIN_CONTEXTS, VALIDATION_CONTEXTS, ROWS = 300, 32, 8, 64
OUT = Path(__file__).parent.parent / "docs" / "results" / "learning_rates.json"


Trial = tuple[Recipe, float, int]
"""One training run: a hasher, a learning rate and a layer."""


def try_rate(trial: Trial, report: Report, given: tuple[TrainCommand, ModelShape, Capture, Capture]) -> float:
    """Train, and return the mean IoU per KV head over the validation contexts."""
    (recipe, rate, number), (command, shape, train, check) = trial, given
    config = HasherConfig(recipe.variant, shape, recipe.bits or 128, init=recipe.init, estimator=recipe.estimator)
    layer = BY_VARIANT[recipe.variant](config, torch.Generator().manual_seed(number))
    layer.start(train, number)
    how = TrainConfig(steps=STEPS, learning_rate=rate, loss=recipe.loss, beta=recipe.beta)
    train_layer(layer, number, train, how)
    generator, values = torch.Generator().manual_seed(1), []
    for context in range(len(check)):
        q, k, scaling = check.read(context, number)
        rows = torch.randint(command.first_row, command.context, (ROWS,), generator=generator)
        values.append(hash_quality(layer, q[:, :, rows], k, rows, command.fraction, scaling).iou.mean().item())
    report()
    return mean(values)


def main(names: list[str]) -> None:
    command, known = TrainCommand(), {recipe.name: recipe for recipe in ALL if recipe.trained}
    if unknown := set(names) - set(known):
        raise SystemExit(f"expected names among {', '.join(known)}, got {', '.join(sorted(unknown))}")
    recipes = [known[name] for name in names or known]
    model, tokenizer = load_model(command.model_path)
    # Another seed than the default run's, so that other documents come first.
    ids = contexts(python_sources(), tokenizer, command.context, TRAIN_CONTEXTS + VALIDATION_CONTEXTS, seed=1)
    trials: list[Trial] = [(recipe, rate, layer) for recipe in recipes for rate in RATES for layer in LAYERS]
    with tempfile.TemporaryDirectory() as scratch, Progress() as progress:
        task = progress.add_task("capture and train", total=len(ids) + len(trials))
        parts = {"train": ids[:TRAIN_CONTEXTS], "check": ids[TRAIN_CONTEXTS:]}
        data = [capture(model, x, Path(scratch) / name, lambda: progress.advance(task)) for name, x in parts.items()]
        given = command, ModelShape.of(model.config), *data
        found = run_jobs(try_rate, trials, default_workers(), lambda: progress.advance(task), given)
    table = json.loads(OUT.read_text()) if OUT.is_file() else {"rows": []}
    rows = [row for row in table["rows"] if row["hasher"] not in {recipe.name for recipe in recipes}]
    for at in range(0, len(trials), len(LAYERS)):
        (recipe, rate, _), ious = trials[at], [round(iou, 4) for iou in found[at : at + len(LAYERS)]]
        row = {"hasher": recipe.name, "learning_rate": rate, "iou": round(mean(ious), 4)}
        rows.append(row | {"by_layer": dict(zip(LAYERS, ious, strict=True))})
    ascending = sorted(rows, key=lambda row: row["iou"])
    best = {row["hasher"]: row["learning_rate"] for row in ascending}  # the last one of a hasher stays
    table = {"steps": STEPS, "contexts": TRAIN_CONTEXTS, "validation": VALIDATION_CONTEXTS, "rows": rows, "best": best}
    write_text(OUT, json.dumps(table, indent=1) + "\n")
    print(json.dumps(best))


if __name__ == "__main__":
    main(sys.argv[1:])
