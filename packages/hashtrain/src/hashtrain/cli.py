"""The command line: `hashtrain [train] ...` and `hashtrain inspect FOLDER`."""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Union, cast

import tyro
from rich.console import Console

from hashtrain.plan import DEMO, TrainCommand
from hashtrain.usage import guarded


@dataclass(frozen=True)
class InspectCommand:
    """Read a hasher and print what it is."""

    folder: Annotated[Path, tyro.conf.Positional]
    """The hasher's folder."""


def main(arguments: list[str] | None = None) -> int:
    """Run one command. Returns 0, or 2 after one sentence on stderr if the input cannot be used."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given or (given[0].startswith("-") and given[0] not in ("-h", "--help")):
        given.insert(0, "train")
    return guarded("hashtrain", lambda: _run(given))


def _run(arguments: list[str]) -> int:
    command = _parse(arguments, TrainCommand())
    if isinstance(command, TrainCommand) and command.model != DEMO:  # whose defaults are others
        command = _parse(arguments, TrainCommand.for_model(command.model))
    return _train(command) if isinstance(command, TrainCommand) else _inspect(command)


def _parse(arguments: list[str], defaults: TrainCommand) -> TrainCommand | InspectCommand:
    kinds = (
        Annotated[TrainCommand, tyro.conf.subcommand("train", default=defaults)],
        Annotated[InspectCommand, tyro.conf.subcommand("inspect")],
    )
    return tyro.cli(
        cast(Any, Union)[kinds], args=arguments, prog="hashtrain", config=(tyro.conf.OmitSubcommandPrefixes,)
    )


def _train(command: TrainCommand) -> int:
    from transformers.utils import logging

    from hashtrain.pipeline import run

    if not sys.stderr.isatty():
        logging.disable_progress_bar()  # its redrawn line would fill a log file
    console = Console(stderr=not sys.stdout.isatty(), width=None if sys.stderr.isatty() else 120)
    metrics = run(command, console)
    if not metrics:  # one of torchrun's other processes
        return 0
    best = command.candidates[-1].name
    console.print(f"stored in {command.out}; next:\n{next_command(command)}", highlight=False, soft_wrap=True)
    last = {
        "out": str(command.out),
        "seconds": metrics["seconds"],
        "best": best,
        "mean": {
            name: {h: result[h]["mean"] for h in ("kv_head", "query_head")}
            for name, result in metrics["hashers"].items()
        },
    }
    print(json.dumps(last), flush=True)
    return 0


def next_command(command: TrainCommand) -> str:
    """Return the command that measures what this run made."""
    words = ["uv", "run", "evals", "ppl", "--documents", "4", "--hashers", str(command.out)]
    default = TrainCommand.for_model(command.model)
    if command.model != DEMO:
        words += ["--model", command.model]
    if command.text:
        words += ["--text", "TEXT-NOT-TRAINED-ON"]
    if command.context != default.context:
        words += ["--context", str(command.context)]
    if command.only != default.only:
        words += ["--methods", *command.only]
    return shlex.join(words)


def _inspect(command: InspectCommand) -> int:
    from hashtrain.hasher import Hasher

    hasher = Hasher.from_pretrained(command.folder)
    print(json.dumps({**asdict(hasher.config), "parameters": sum(t.numel() for t in hasher.state_dict().values())}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
