"""The command line: `hashtrain [train|convert] ...`."""

import json
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console

from hashtrain import command_line
from hashtrain.demo import DEMO, base_model, model_path
from hashtrain.run.recipes import RECIPES
from hashtrain.run.settings import PAPER, TrainCommand
from hashtrain.usage import UsageError, guarded, require_folder


@dataclass(frozen=True)
class ConvertCommand:
    """Convert a published `.pth` list of hashers to this project's format. Example: `hashtrain convert hashers.pth
    --model NAME --out runs/published`."""

    file: Annotated[Path, tyro.conf.Positional]
    """The published file."""
    model: str
    """Folder or hub id of the model that it was trained for; `demo` is the model that ships with hashtrain."""
    out: Path
    """Folder for the hasher, which is stored below it as `paper`; pass it to `evals --hashers`."""


def main(arguments: list[str] | None = None) -> int:
    """Run one command. Returns 0, or 2 with one sentence on stderr if the input cannot be used."""
    return guarded("hashtrain", lambda: _run(list(sys.argv[1:] if arguments is None else arguments)))


_HELP = """Learned hashing of the KV cache: train hashers for a model.

Without a subcommand it trains: `hashtrain --model NAME` is `hashtrain train --model NAME`, and `hashtrain train --help`
lists the flags."""


def _run(arguments: list[str]) -> int:
    command = parse(arguments)
    require_folder(command.out)
    writes = isinstance(command, TrainCommand) and not command.dry_run
    if writes and command.model != DEMO and command.out == TrainCommand().out:
        raise UsageError(f"--model {command.model} needs --out FOLDER: {command.out} is for the demo's hashers")
    (act,) = (act for kind, act in COMMANDS.values() if kind is type(command))
    print(json.dumps(act(command)), flush=True)
    return 0


def parse(arguments: list[str]) -> Any:
    """Parse a command line, without checking that files exist.

    Raises: UsageError if a setting is invalid; SystemExit, after a message, if a command or setting is unknown.
    """
    given = _named(arguments)
    command = _parse(given, {})
    if isinstance(command, TrainCommand) and command.model != DEMO:  # other models have other defaults
        command = _parse(given, PAPER)
    return command


def _named(arguments: list[str]) -> list[str]:
    """Add the default command, `train`, if none is named."""
    general = ("-h", "--help", "--tyro-")  # --tyro-...: shell completion
    bare = not arguments or (arguments[0].startswith("-") and not arguments[0].startswith(general))
    return ["train", *arguments] if bare else arguments


def _parse(arguments: list[str], defaults: dict[str, Any]) -> Any:
    kinds = {name: kind for name, (kind, _) in COMMANDS.items()}
    kind = kinds.get(arguments[0], TrainCommand)
    default = kind(**defaults) if issubclass(kind, TrainCommand) else None
    return command_line.parse("hashtrain", arguments, kinds, _HELP, default)


def _convert(command: ConvertCommand) -> dict[str, Any]:
    from hashtrain.config import ModelShape
    from hashtrain.convert import convert
    from hashtrain.hasher import require_own
    from hashtrain.models import load_config

    made = command.out / "paper"  # the layout of `hashtrain`, which `evals --hashers` expects
    config = load_config(model_path(command.model))
    require_own(made, base_model(command.model), ModelShape.of(config))
    convert(command.file, config, made, base_model(command.model))
    return {"out": str(made)}


def _train(command: TrainCommand) -> dict[str, Any]:
    from hashtrain.run.pipeline import run

    console = Console(stderr=not sys.stdout.isatty(), width=None if sys.stderr.isatty() else 120)
    metrics = run(command, console)
    if "dry_run" in metrics:
        return metrics
    console.print(f"stored in {command.out}; next:\n{next_command(command)}", highlight=False, soft_wrap=True)
    mean = {name: result["kv_head"]["mean"] for name, result in metrics["hashers"].items()}
    best = max(mean, key=lambda name: mean[name]["iou"])
    return {"out": str(command.out), "seconds": metrics["seconds"], "best": best, "mean": mean}


def next_command(command: TrainCommand) -> str:
    """Return the command that evaluates the hashers of this run."""
    given: dict[str, list[str]] = {
        "--hashers": [str(command.out)],
        "--model": [command.model] * (command.model != DEMO),
        "--text": ["TEXT-NOT-TRAINED-ON"] * bool(command.text),
        # evals does not have the defaults of other models
        "--context": [str(command.context)] * (command.context != TrainCommand().context),
        "--dense-layers": [str(n) for n in (command.dense_layers,) if n is not None],
    }
    made = [recipe.name for recipe in command.recipes]
    if not {recipe.name for recipe in RECIPES} <= set(made):  # the default of evals needs all of these
        given["--methods"] = made
    words = [word for flag, values in given.items() if values for word in (flag, *values)]
    return shlex.join(["uv", "run", "evals", "ppl", "--documents", "4", *words])


COMMANDS: dict[str, tuple[Any, Callable[[Any], dict[str, Any]]]] = {
    "train": (TrainCommand, _train),
    "convert": (ConvertCommand, _convert),
}
"""By name, a command's settings, and what runs it and returns the last line of standard output as JSON."""
