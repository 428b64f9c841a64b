"""One run from text to stored hashers: capture, train layer by layer, calibrate, evaluate on held-out text, save."""

import contextlib
import json
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console

import hashtrain
from hashtrain.artefact.hasher import Hasher
from hashtrain.config import RECENT, SINK, HasherConfig, ModelShape
from hashtrain.demo import DEMO, base_model
from hashtrain.evaluation.budgets import head_shares
from hashtrain.evaluation.cost import layer_costs, layer_shares, steps_of
from hashtrain.evaluation.evaluate import failing, summarise
from hashtrain.files.atomic import write_text
from hashtrain.layers import starts_from_data
from hashtrain.machine.distribute import ALONE, Ranks, init_distributed
from hashtrain.machine.workers import run_jobs
from hashtrain.reporting.progress import live, open_board, require_board, tracking
from hashtrain.reporting.report import card, draw, draw_bits, draw_by_head, quality_table
from hashtrain.reporting.worst import worst_lines
from hashtrain.run.estimate import estimate
from hashtrain.run.job import LayerJob, LayerResult, make, result, training_of
from hashtrain.run.kernels import compile_kernels
from hashtrain.run.prepare import Prepared, prepare
from hashtrain.run.sources import loaded, make_all
from hashtrain.run.stream import train_all
from hashtrain.run.workfolder import begin, end, locked
from hashtrain.settings.recipes import Recipe
from hashtrain.settings.toml import as_toml, environment
from hashtrain.settings.train_command import TrainCommand

# Requested values: the first two are stored as found; the others change no result or are stored per hasher.
_NOT_IN_METRICS = {
    *("contexts", "held_out", "workers", "checkpoint_seconds", "learning_rate", "dry_run", "tensorboard", "stream"),
    *("backbone_memory",),
}


def run(command: TrainCommand, console: Console, capture_only: bool = False) -> dict[str, Any]:
    """Run the command and return its metrics; everything is stored below `command.out`.

    Under torchrun all processes call this together. Rank 0 stores and returns the metrics; the others return {}.

    Args:
        capture_only: stop after the captures; they stay in the working folder for the run that continues.
    Raises: ValueError or OSError with one sentence, before anything is written, if the input cannot be used.
    """
    with init_distributed(command.device) as ranks:
        try:
            return _run(command, console if ranks.first else Console(quiet=True), ranks, capture_only)
        finally:
            loaded.cache_clear()


def _run(command: TrainCommand, console: Console, ranks: Ranks, capture_only: bool) -> dict[str, Any]:
    began = time.monotonic()
    prepared = prepare(command, ranks)
    _announce(prepared, console)
    if command.tensorboard:
        require_board()
    hashers = {c.name: Hasher(_config(prepared, c), command.seed) for c in command.recipes}
    jobs = _jobs(prepared, hashers)
    if command.dry_run:
        found = estimate(prepared, jobs, prepared.workers * ranks.world)
        console.print("\n".join([f"hashers: {', '.join(hashers)}", *found.lines()]), highlight=False)
        return {"dry_run": asdict(found)}
    with locked(command.out) if ranks.first else contextlib.nullcontext():
        if ranks.first:
            names = {path.name for job in jobs for path in (job.finished, job.unfinished)}
            begin(command.out, as_toml(command), names)
            prepared.keep()
        ranks.barrier()
        if not (command.out / ".work" / "run.toml").is_file():
            raise ValueError(f"{command.out} is not shared: expected a folder that all processes can read and write")
        if capture_only or not _trains_first(command):
            _capture(prepared, console)
        if capture_only:
            return {"captured": len(prepared.train.contexts) + len(prepared.validation.contexts)}
        if not command.stream:
            loaded.cache_clear()  # free the model's memory for training
        _make_layers(prepared, jobs, console)
        ranks.barrier()
        if not ranks.first:
            return {}
        metrics = _settings(prepared)
        metrics["hashers"] = _collect(prepared, hashers, jobs, console)
        metrics["seconds"] = round(time.monotonic() - began, 1)
        _store(prepared, hashers, metrics)
        end(command.out)
    for heads in ("query_head", "kv_head"):
        console.print(quality_table(metrics, heads))
    for line in worst_lines(metrics):
        console.print(line, highlight=False)
    return metrics


def _announce(prepared: Prepared, console: Console) -> None:
    """Print what will be trained, and whether the text is shorter than requested."""
    command, shape, validation = prepared.command, prepared.shape, prepared.validation
    # With --stream the contexts are tokenised while it trains, so their number is not known yet.
    count = f"up to {command.contexts}" if command.stream else str(len(prepared.contexts))
    console.print(
        f"{command.model}: {shape.num_layers} layers, {shape.num_query_heads} query / {shape.num_kv_heads} KV heads of "
        f"{shape.head_dim}; {count} contexts of {command.context} tokens to train on, "
        f"{len(validation.contexts)} held out, for contexts of up to {prepared.reach}; {prepared.disk / 1e9:.1f} GB of "
        "disk while it runs"
    )
    if not command.stream:
        _say_if_fewer(prepared, console)
    if (held := len(validation.contexts)) < command.held_out:
        console.print(f"the held-out text has {held} contexts; {command.held_out} were requested")


def _say_if_fewer(prepared: Prepared, console: Console) -> None:
    if (count := len(prepared.contexts)) < prepared.command.contexts:
        console.print(f"the text has {count} training contexts; {prepared.command.contexts} were requested")


def _store(prepared: Prepared, hashers: Mapping[str, Hasher], metrics: dict[str, Any]) -> None:
    """Write the hashers, the figures, the settings and the metrics."""
    command = prepared.command
    for name, hasher in hashers.items():
        hasher.save_pretrained(command.out / name, card(hasher.config, name, metrics))
    draw(metrics, command.out / "training.png")
    draw_bits(metrics, command.out / "bits.png")
    draw_by_head(metrics, command.out / "heads.png", "iou_by_head", "IoU, held out")
    low = "5th percentile of the rows' mass, held out"
    draw_by_head(metrics, command.out / "worst.png", "low_by_head", low)
    write_text(command.out / "config.toml", as_toml(command))
    write_text(command.out / "environment.json", json.dumps(environment(prepared.device), indent=1) + "\n")
    write_text(command.out / "metrics.json", json.dumps(metrics, indent=1) + "\n")


def _jobs(prepared: Prepared, hashers: dict[str, Hasher]) -> list[LayerJob]:
    """List every layer of every hasher, longest jobs first."""
    command = prepared.command
    alike = [
        (c, n) for c in sorted(command.recipes, key=lambda c: not c.trained) for n in range(prepared.shape.num_layers)
    ]
    return [
        LayerJob(
            command=command,
            recipe=recipe,
            config=hashers[recipe.name].config,
            layer=layer,
            data=prepared.train.stored,
            validation=prepared.validation.stored,
            source=json.dumps(prepared.identities, sort_keys=True),
            folder=command.out / ".work" / "layers",
            device=prepared.device,
            ranks=prepared.ranks if command.spread == "data" else ALONE,
            evaluator=number % prepared.ranks.world if command.spread == "data" else 0,
        )
        for number, (recipe, layer) in enumerate(alike)
    ]


def _trains_first(command: TrainCommand) -> bool:
    """Whether training needs no stored capture, so that captures, which calibration reads, can be made after it."""
    return command.stream and not any(starts_from_data(recipe.variant) for recipe in command.recipes)


def _capture(prepared: Prepared, console: Console) -> None:
    """Store the captures that are still missing."""
    command, lacking = prepared.command, sum(len(source.lacking) for source in prepared.sources)
    with ThreadPoolExecutor(1) as beside, tracking(console, lacking) as advance:
        compiling = beside.submit(compile_kernels) if prepared.device == "cpu" and prepared.workers > 1 else None
        work = (command.model_path, prepared.device, prepared.sources, prepared.workers)
        make_all(*work, advance, prepared.ranks, command.backbone_memory)
        if compiling:
            compiling.result()  # raises what it raised


def _make_layers(prepared: Prepared, jobs: Sequence[LayerJob], console: Console) -> None:
    """Train and evaluate this process's share of the unfinished layers."""
    command, ranks = prepared.command, prepared.ranks
    together = command.spread == "data" and ranks.world > 1
    mine, workers = (jobs, 1) if together else (ranks.shard(jobs), prepared.workers)
    board = open_board(command.out / "tensorboard") if command.tensorboard else None
    steps = sum(command.steps * job.recipe.trained for job in mine)
    if command.stream:
        with tracking(console, steps) as advance:
            report = live(command.out / "metrics.jsonl", advance, board)
            model, _ = loaded(command.model_path, prepared.device, command.backbone_memory)
            train_all(model, prepared.contexts, mine, prepared.reads, report, prepared.reach)
        if _trains_first(command):
            _capture(prepared, console)
        loaded.cache_clear()
    with tracking(console, steps + len(mine)) as advance:
        if mine:
            run_jobs(make, mine, workers, live(command.out / "metrics.jsonl", advance, board))


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
    failing = {
        name: [number for number, layer in enumerate(layers) if layer.repair.failing]
        for name, layers in by_name.items()
    }
    costs = _costs(prepared, hashers, failing, console)
    if prepared.command.stream:
        _say_if_fewer(prepared, console)
    for name, hasher in hashers.items():
        if hasher.config.training:
            training = {**hasher.config.training, "contexts": len(prepared.contexts)}
            hasher.config = replace(hasher.config, training=training)
        first = prepared.command.dense_layers
        dense = costs.get(name, {}).get("dense", []) if first is None else range(first)
        if len(dense) < prepared.shape.num_layers:
            hasher.config = replace(hasher.config, dense_layers=tuple(dense))
        if name in costs:
            shares = layer_shares(costs[name]["layers"], hasher.dense_layers)
            hasher.config = replace(hasher.config, layer_shares=shares)
    return {
        name: {**_found(layers, hashers[name].dense_layers), **({"cost": costs[name]} if name in costs else {})}
        for name, layers in by_name.items()
    }


def _costs(
    prepared: Prepared, hashers: dict[str, Hasher], failing: Mapping[str, Sequence[int]], console: Console
) -> dict[str, dict[str, Any]]:
    """Measure the cost of every layer on training contexts, for every hasher made from data, and its heads' shares.

    Args:
        failing: by hasher, the layers with heads that fail on training rows.
    """
    command = prepared.command
    drawn = {c.name for c in command.recipes if not c.trained and c.variant != "transform"}
    coded = {name: hasher for name, hasher in hashers.items() if hasher.layer(0).has_codes and name not in drawn}
    if not coded:
        return {}
    model, _ = loaded(command.model_path, prepared.device, command.backbone_memory)
    contexts, costs = prepared.train.contexts, dict[str, dict[str, Any]]()
    steps = steps_of(model, contexts, command.seed, prepared.reach)
    with tracking(console, (prepared.shape.num_layers + 1) * len(coded)) as advance:
        for name, hasher in coded.items():
            costs[name] = layer_costs(steps, hasher.to(prepared.device), command.fraction, advance, failing[name])
            shares = head_shares(model, hasher, prepared.train.stored, command.fraction, command.seed)
            hasher.config = replace(hasher.config, head_shares=shares)
            advance("shares of heads", 1)
    return costs


def _config(prepared: Prepared, recipe: Recipe) -> HasherConfig:
    command = prepared.command
    count = command.contexts if command.stream else len(prepared.contexts)  # `_collect` corrects it
    trained = record_of(command, recipe, count, prepared.device) if recipe.trained else {}
    revision = getattr(prepared.model_config, "_commit_hash", None)
    made = recipe.trained or starts_from_data(recipe.variant)  # the others know no positions
    return config_of(command, recipe, prepared.shape, trained, revision, prepared.reach if made else None)


def config_of(
    command: TrainCommand,
    recipe: Recipe,
    shape: ModelShape,
    trained: dict[str, Any],
    revision: str | None = None,
    reach: int | None = None,
) -> HasherConfig:
    """Return the config of a recipe's hasher.

    Args:
        trained: its training settings (`record_of`); revision: of the base model, if known.
        reach: the longest context that it is made for; None if it is not made from contexts.
    """
    return HasherConfig(
        variant=recipe.variant,
        shape=shape,
        bits=recipe.bits or command.bits,
        planes=command.planes or 0,
        hidden=width_of(recipe, shape),
        init=recipe.init,
        residual=recipe.residual,
        estimator=recipe.estimator,
        gamma=recipe.gamma,
        training=trained,
        reach=reach,
        base_model=base_model(command.model),
        base_revision=revision,
    )


def width_of(recipe: Recipe, shape: ModelShape) -> int:
    """Return the hidden width of a recipe's hash functions: its own, or the variant's default."""
    return recipe.hidden or (max(128, 2 * shape.head_dim) if recipe.variant == "paper" else 128)


def record_of(command: TrainCommand, recipe: Recipe, contexts: int, device: str) -> dict[str, Any]:
    """Return a hasher's training settings, to be stored with its weights."""
    settings = asdict(training_of(command, recipe, device))
    del settings["chunk"]  # does not change the result
    return {**settings, "context": command.context, "contexts": contexts}


def _found(layers: list[LayerResult], dense: Sequence[int]) -> dict[str, Any]:
    whole = [layer.losses for layer in layers if layer.losses and not layer.stopped]
    stopped = {str(number): layer.stopped for number, layer in enumerate(layers) if layer.stopped}
    found: dict[str, Any] = {"losses": whole, **({"stopped": stopped} if stopped else {})}
    found["dense_layers"] = list(dense)
    found["repaired"] = {
        str(number): {str(head): what for head, what in sorted(layer.repair.taken.items())}
        for number, layer in enumerate(layers)
        if layer.repair.taken
    }
    found["failing"] = failing([layer.quality["kv_head"] for layer in layers], dense)
    return {**found, **summarise([layer.quality for layer in layers], dense)}


def _settings(prepared: Prepared) -> dict[str, Any]:
    command = prepared.command
    corpus = (
        ", ".join(p.name if p.exists() else str(p) for p in command.text) or "this machine's Python standard library"
    )
    return {
        "version": hashtrain.__version__,
        "model": command.model if command.model == DEMO else Path(command.model).name,
        "layers": prepared.shape.num_layers,
        "corpus": corpus,
        "contexts": len(prepared.contexts),
        "held_out": len(prepared.validation.contexts),
        **{k: v for k, v in asdict(command).items() if isinstance(v, int | float) and k not in _NOT_IN_METRICS},
        "sink": SINK,
        "recent": RECENT,
        "learning_rates": {c.name: command.learning_rate or c.learning_rate for c in command.recipes if c.trained},
    }
