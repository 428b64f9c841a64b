"""Find each hasher's own best learning rate on the demo model, and store the table.

    uv run python tools/tune_learning_rates.py

Every hasher gets the same layers, steps and contexts; they are judged on validation contexts from the training text,
never on the held-out modules. Writes docs/results/learning_rates.json; the winners stand in hashtrain/plan.py.
"""

import json
import tempfile
from pathlib import Path

import torch
from hashtrain import HasherConfig, ModelShape, TrainConfig, train_layer
from hashtrain.atomic import write_text
from hashtrain.capture import capture
from hashtrain.corpus import contexts, python_sources
from hashtrain.layers import BY_VARIANT
from hashtrain.metrics import hash_quality
from hashtrain.models import load_model
from hashtrain.plan import CANDIDATES, TrainCommand
from rich.progress import Progress

RATES = (1e-3, 3e-3, 6e-3, 1e-2, 2e-2)
LAYERS = (2, 4)
STEPS, TRAIN_CONTEXTS, VALIDATION_CONTEXTS, ROWS = 300, 32, 8, 64
OUT = Path(__file__).parent.parent / "docs" / "results" / "learning_rates.json"


def judge(hasher, layer, data, command):
    """Mean IoU per KV head over the validation contexts."""
    generator, values = torch.Generator().manual_seed(1), []
    for context in range(len(data)):
        q, k, scaling = data.read(context, layer)
        rows = torch.randint(command.first_row, command.context, (ROWS,), generator=generator)
        values.append(hash_quality(hasher, q[:, :, rows], k, rows, command.fraction, scaling).iou.mean().item())
    return sum(values) / len(values)


def main() -> None:
    command = TrainCommand()
    model, tokenizer = load_model(command.model_path)
    # A seed of its own: other documents than the default run's come first.
    ids = contexts(python_sources(), tokenizer, command.context, TRAIN_CONTEXTS + VALIDATION_CONTEXTS, seed=1)
    candidates = [c for c in CANDIDATES if c.variant != "lsh"]
    rows = []
    with tempfile.TemporaryDirectory() as scratch, Progress() as progress:
        task = progress.add_task("capture", total=len(ids))
        train = capture(model, ids[:TRAIN_CONTEXTS], Path(scratch) / "train", lambda: progress.advance(task))
        check = capture(model, ids[TRAIN_CONTEXTS:], Path(scratch) / "check", lambda: progress.advance(task))
        task = progress.add_task("train", total=len(candidates) * len(RATES) * len(LAYERS))
        for candidate in candidates:
            shape = ModelShape.of(model.config)
            for rate in RATES:
                values = {}
                for layer in LAYERS:
                    config = HasherConfig(candidate.variant, shape, init=candidate.init)
                    hasher = BY_VARIANT[candidate.variant](config, torch.Generator().manual_seed(layer))
                    train_layer(hasher, layer, train, TrainConfig(steps=STEPS, learning_rate=rate))
                    values[layer] = round(judge(hasher, layer, check, command), 4)
                    progress.advance(task)
                mean = round(sum(values.values()) / len(values), 4)
                rows.append({"hasher": candidate.name, "learning_rate": rate, "iou": mean, "by_layer": values})
                progress.console.print(json.dumps(rows[-1]))
    best = {
        c.name: max((r for r in rows if r["hasher"] == c.name), key=lambda r: r["iou"])["learning_rate"]
        for c in candidates
    }
    facts = {"steps": STEPS, "contexts": TRAIN_CONTEXTS, "validation": VALIDATION_CONTEXTS, "rows": rows, "best": best}
    write_text(OUT, json.dumps(facts, indent=1) + "\n")
    print(json.dumps(best))


if __name__ == "__main__":
    main()
