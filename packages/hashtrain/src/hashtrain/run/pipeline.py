"""One run from text to stored hashers: capture, train layer by layer, calibrate, evaluate on held-out text, save."""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console

import hashtrain
from hashtrain.config import RECENT, SINK, HasherConfig
from hashtrain.data.capture import output_projections
from hashtrain.demo import DEMO, base_model, model_path
from hashtrain.device import here
from hashtrain.evaluation.cost import MOST_CONTEXTS, STEP_CONTEXTS, head_shares, layer_costs, layer_shares, steps_of
from hashtrain.evaluation.metrics import means
from hashtrain.files.atomic import save_tensors, write_text
from hashtrain.hasher import Hasher
from hashtrain.run.job import LayerJob, LayerResult, make, result
from hashtrain.run.prepare import Prepared, prepare
from hashtrain.run.progress import live, tracking
from hashtrain.run.recipes import Recipe
from hashtrain.run.report import as_toml, card, environment, quality_table, sentences
from hashtrain.run.settings import TrainCommand
from hashtrain.run.waves import loaded, make_all, training_of
from hashtrain.run.workers import run_jobs
from hashtrain.run.workfolder import begin, end, locked

# Requested values: the first two are stored as found; the others change no result or are stored per hasher.
_NOT_IN_METRICS = {"contexts", "held_out", "workers", "checkpoint_seconds", "learning_rate", "dry_run", "disk"}


def run(command: TrainCommand, console: Console) -> dict[str, Any]:
    """Run the command and return its metrics; everything is stored below `command.out`.

    Raises: ValueError or OSError with one sentence, before anything is written, if the input cannot be used.
    """
    try:
        return _run(command, console)
    finally:
        loaded.cache_clear()


def _run(command: TrainCommand, console: Console) -> dict[str, Any]:
    began = time.monotonic()
    prepared = prepare(command)
    _announce(prepared, console)
    hashers = {c.name: Hasher(_config(prepared, c), command.seed) for c in command.recipes}
    jobs = _jobs(prepared, hashers)
    if command.dry_run:
        return {"dry_run": {"hashers": [*hashers], "disk": prepared.disk, "waves": len(prepared.waves)}}
    with locked(command.out):
        begin(command.out, as_toml(command))
        # Not bound to a name: `loaded` is to hold the only copy, which `_train` frees.
        at = model_path(command.model), str(here(prepared.device))
        save_tensors(output_projections(loaded(*at)[0]), jobs[0].outputs)
        for wave in prepared.waves:
            _train(prepared, jobs, wave, console)
        metrics = _settings(prepared)
        metrics["hashers"] = _collect(prepared, hashers, jobs, console)
        metrics["seconds"] = round(time.monotonic() - began, 1)
        _store(prepared, hashers, metrics)
        end(command.out)
    console.print(quality_table(metrics))
    for line in sentences(metrics):
        console.print(line, highlight=False)
    return metrics


def _announce(prepared: Prepared, console: Console) -> None:
    """Print what will be trained, and whether the text is shorter than requested."""
    command, shape = prepared.command, prepared.shape
    count, held, far = (len(of.contexts) for of in (prepared.train, prepared.validation, prepared.far))
    several = f" ({prepared.corpus})" if len(command.text) > 1 else ""
    longer = f", {far} of {len(prepared.far.contexts[0])} to calibrate on" if far else ""
    console.print(
        f"{command.model}: {shape.num_layers} layers, {shape.num_query_heads} query / {shape.num_kv_heads} KV heads of "
        f"{shape.head_dim}; {count} contexts of {command.context} tokens to train on{several}{longer}, {held} held "
        f"out, for contexts of up to {prepared.reach}; {prepared.disk / 1e9:.1f} GB of disk while it runs"
    )
    if count < command.contexts:
        console.print(f"the text has {count} training contexts; {command.contexts} were requested")
    if held < command.held_out:
        console.print(f"the held-out text has {held} contexts; {command.held_out} were requested")


def _store(prepared: Prepared, hashers: Mapping[str, Hasher], metrics: dict[str, Any]) -> None:
    """Write the hashers, the settings and the metrics."""
    command = prepared.command
    for name, hasher in hashers.items():
        hasher.save_pretrained(command.out / name, card(hasher.config, name, metrics))
    write_text(command.out / "config.toml", as_toml(command))
    write_text(command.out / "environment.json", json.dumps(environment(str(here(prepared.device))), indent=1) + "\n")
    write_text(command.out / "metrics.json", json.dumps(metrics, indent=1) + "\n")


def _jobs(prepared: Prepared, hashers: dict[str, Hasher]) -> list[LayerJob]:
    """List every layer of every hasher, longest jobs first."""
    command = prepared.command
    return [
        LayerJob(
            command=command,
            recipe=recipe,
            config=hashers[recipe.name].config,
            layer=layer,
            data=prepared.train.stored,
            validation=prepared.validation.stored,
            source=prepared.identity,
            device=prepared.device,
            far=prepared.far.stored if prepared.far.contexts else None,
        )
        for recipe in sorted(command.recipes, key=lambda c: not c.trained)
        for layer in range(prepared.shape.num_layers)
    ]


def _train(prepared: Prepared, jobs: Sequence[LayerJob], wave: range, console: Console) -> None:
    """Capture the contexts of a wave, as far as they are missing, and train its steps of all layers."""
    command = prepared.command
    last = wave.stop == command.steps
    mine = [job for job in jobs if not job.finished.exists() and (last or job.steps_done < wave.stop)]
    if not mine and not last:
        return
    far, train, held = prepared.far, prepared.train, prepared.validation
    every = [(far, range(len(far.contexts))), (train, train.stored_in(wave)), (held, range(len(held.contexts)))]
    for of, numbers in every:
        of.drop(numbers)
    lots = [(of, of.lacking(numbers)) for of, numbers in every]  # the longest first
    with tracking(console, sum(len(numbers) for _, numbers in lots)) as advance:
        make_all(model_path(command.model), lots, prepared.workers, advance)
    loaded.cache_clear()  # free the model's memory for training
    steps = sum(max(0, wave.stop - job.steps_done) * job.recipe.trained for job in mine)
    with tracking(console, steps + last * len(mine)) as advance:
        parts = [replace(job, until=None if last else wave.stop) for job in mine]
        run_jobs(make, parts, prepared.workers, live(command.out / "metrics.jsonl", advance))


def _collect(
    prepared: Prepared, hashers: dict[str, Hasher], jobs: Sequence[LayerJob], console: Console
) -> dict[str, Any]:
    """Load all layers into their hashers, decide which stay dense, and return the results of each hasher."""
    by_name: dict[str, list[LayerResult]] = {name: [] for name in hashers}
    for job in jobs:
        found = result(job)
        by_name[job.recipe.name].append(found)
        hashers[job.recipe.name].layer(job.layer).load_state_dict(found.tensors)
        if found.stopped:
            console.print(f"{job.recipe.name}, layer {job.layer} {found.stopped}", highlight=False)
    costs = _costs(prepared, hashers, console)
    for name, hasher in hashers.items():
        dense = costs[name]["dense"] if name in costs else [*range(prepared.command.dense_layers or 0)]
        hasher.config = replace(hasher.config, dense_layers=tuple(dense))
        if name in costs:
            shares = layer_shares(costs[name]["layers"], hasher.config.dense_layers)
            errors = [found.errors[int(n not in costs[name]["bare"])] for n, found in enumerate(by_name[name])]
            heads = tuple(head_shares(own, prepared.command.fraction) for own in errors)
            hasher.config = replace(hasher.config, layer_shares=shares, head_shares=heads)
    return {
        name: {**_found(layers, hashers[name].config.dense_layers), **({"cost": costs[name]} if name in costs else {})}
        for name, layers in by_name.items()
    }


def _costs(prepared: Prepared, hashers: dict[str, Hasher], console: Console) -> dict[str, dict[str, Any]]:
    """Measure the cost of every layer on training contexts, for every hasher made from data."""
    command = prepared.command
    coded = {recipe.name: hashers[recipe.name] for recipe in command.recipes if recipe.seen}
    if not coded:
        return {}
    device = here(prepared.device)
    model, _ = loaded(model_path(command.model), str(device))
    train = prepared.train
    first = train.contexts[: min(max(STEP_CONTEXTS, train.corpora), MOST_CONTEXTS)]
    steps = steps_of(model, first, command.seed, prepared.reach)
    dense = None if command.dense_layers is None else range(command.dense_layers)
    with tracking(console, prepared.shape.num_layers * len(coded)) as advance:
        return {
            name: layer_costs(steps, hasher.to(device), command.fraction, advance, dense)
            for name, hasher in coded.items()
        }


def _config(prepared: Prepared, recipe: Recipe) -> HasherConfig:
    """Return the config of a recipe's hasher, with its training settings."""
    command, trained = prepared.command, dict[str, Any]()
    if recipe.trained:
        trained = asdict(training_of(command, recipe, prepared.device))
        trained |= {"context": command.context, "contexts": len(prepared.train.contexts)}
    wide = max(128, 2 * prepared.shape.head_dim) if recipe.variant == "paper" else 128
    own: dict[str, Any] = {"bits": command.bits, "hidden": wide, **recipe.config}
    return HasherConfig(
        variant=recipe.variant,
        shape=prepared.shape,
        planes=command.planes or 0,
        training=trained,
        reach=prepared.reach if recipe.seen else None,  # others know no positions
        adapter=prepared.adapter if recipe.seen else None,
        base_model=base_model(command.model),
        base_revision=getattr(prepared.model_config, "_commit_hash", None),
        **own,
    )


def _found(layers: list[LayerResult], dense: Sequence[int]) -> dict[str, Any]:
    quality = [layer.quality for layer in layers]
    stopped = {str(number): layer.stopped for number, layer in enumerate(layers) if layer.stopped}
    return {
        "losses": [layer.losses for layer in layers if layer.losses and not layer.stopped],
        **({"stopped": stopped} if stopped else {}),
        "dense_layers": list(dense),
        "failing": [(n, head) for n, own in enumerate(quality) if n not in dense for head in own["failing"]],
        "kv_head": {"layers": quality, "mean": means(quality, dense)},
    }


def _settings(prepared: Prepared) -> dict[str, Any]:
    command = prepared.command
    return {
        "version": hashtrain.__version__,
        "model": command.model if command.model == DEMO else Path(command.model).absolute().name,
        "layers": prepared.shape.num_layers,
        "corpus": prepared.corpus,
        "contexts": len(prepared.train.contexts),
        "held_out": len(prepared.validation.contexts),
        **{k: v for k, v in asdict(command).items() if isinstance(v, int | float) and k not in _NOT_IN_METRICS},
        "sink": SINK,
        "recent": RECENT,
        "learning_rates": {c.name: command.learning_rate or c.learning_rate for c in command.recipes if c.trained},
    }
