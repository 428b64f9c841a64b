"""Find the best learning rate for each hasher on the demo model, and store the table.

    uv run tools/tune_learning_rates.py                     # every trained hasher
    uv run tools/tune_learning_rates.py linear group-xnor   # only these; other rows of the table are kept

Every hasher gets the same layers, steps and contexts; they are evaluated on validation contexts from the training text,
never on the held-out modules. Writes docs/results/learning_rates.json; copy the best ones to settings/recipes.py.
"""

import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

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


def evaluate(hasher, layer, data, command):
    """Return the mean IoU per KV head over the validation contexts."""
    generator, values = torch.Generator().manual_seed(1), []
    for context in range(len(data)):
        q, k, scaling = data.read(context, layer)
        rows = torch.randint(command.first_row, command.context, (ROWS,), generator=generator)
        values.append(hash_quality(hasher, q[:, :, rows], k, rows, command.fraction, scaling).iou.mean().item())
    return sum(values) / len(values)


@dataclass(frozen=True)
class Trial:
    """One training run: a hasher, a learning rate and a layer."""

    recipe: Recipe
    config: HasherConfig
    rate: float
    layer: int


def try_rate(job: tuple[Trial, TrainCommand, Capture, Capture], report: Report) -> float:
    """Train, and return the mean IoU on the validation contexts."""
    trial, command, train, check = job
    hasher = BY_VARIANT[trial.config.variant](trial.config, torch.Generator().manual_seed(trial.layer))
    settings = TrainConfig(steps=STEPS, learning_rate=trial.rate, loss=trial.recipe.loss, beta=trial.recipe.beta)
    hasher.start(train, trial.layer)
    train_layer(hasher, trial.layer, train, settings)
    report()
    return evaluate(hasher, trial.layer, check, command)


def _row(recipe: Recipe, rate: float, trials: list[Trial], found: list[float]) -> dict:
    of = [(t.layer, iou) for t, iou in zip(trials, found, strict=True) if t.recipe == recipe and t.rate == rate]
    by_layer = {layer: round(iou, 4) for layer, iou in of}
    mean = round(sum(by_layer.values()) / len(by_layer), 4)
    return {"hasher": recipe.name, "learning_rate": rate, "iou": mean, "by_layer": by_layer}


def _stored() -> list[dict]:
    return json.loads(OUT.read_text())["rows"] if OUT.is_file() else []


def main(names: list[str]) -> None:
    command = TrainCommand()
    model, tokenizer = load_model(command.model_path)
    # Another seed than the default run's, so that other documents come first.
    ids = contexts(python_sources(), tokenizer, command.context, TRAIN_CONTEXTS + VALIDATION_CONTEXTS, seed=1)
    known = {c.name: c for c in ALL if c.trained}
    if unknown := set(names) - set(known):
        raise SystemExit(f"expected names among {', '.join(known)}, got {', '.join(sorted(unknown))}")
    recipes = [known[name] for name in names or known]
    kept = [row for row in _stored() if row["hasher"] not in {c.name for c in recipes}]
    shape = ModelShape.of(model.config)
    config = {
        c.name: HasherConfig(c.variant, shape, c.bits or 128, init=c.init, estimator=c.estimator) for c in recipes
    }
    with tempfile.TemporaryDirectory() as scratch, Progress() as progress:
        task = progress.add_task("capture", total=len(ids))
        train = capture(model, ids[:TRAIN_CONTEXTS], Path(scratch) / "train", lambda: progress.advance(task))
        check = capture(model, ids[TRAIN_CONTEXTS:], Path(scratch) / "check", lambda: progress.advance(task))
        trials = [Trial(c, config[c.name], rate, layer) for c in recipes for rate in RATES for layer in LAYERS]
        task = progress.add_task("train", total=len(trials))
        jobs = [(trial, command, train, check) for trial in trials]
        found = run_jobs(try_rate, jobs, default_workers(), lambda: progress.advance(task))
    rows = kept + [_row(c, rate, trials, found) for c in recipes for rate in RATES]
    by_name: dict[str, list[dict]] = {}
    for row in rows:
        by_name.setdefault(row["hasher"], []).append(row)
    best = {name: max(of, key=lambda row: row["iou"])["learning_rate"] for name, of in by_name.items()}
    table = {"steps": STEPS, "contexts": TRAIN_CONTEXTS, "validation": VALIDATION_CONTEXTS, "rows": rows, "best": best}
    write_text(OUT, json.dumps(table, indent=1) + "\n")
    print(json.dumps(best))


if __name__ == "__main__":
    main(sys.argv[1:])
