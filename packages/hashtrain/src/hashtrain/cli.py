"""The command line: `hashtrain [train|capture|plan|share|convert|inspect|push] ...`."""

import json
import shlex
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console

from hashtrain import command_line
from hashtrain.demo import DEMO, base_model, model_path
from hashtrain.settings.recipes import RECIPES
from hashtrain.settings.train_command import PAPER, TrainCommand
from hashtrain.usage import UsageError, guarded, require_counts, require_device_name, require_folder, require_seed


@dataclass(frozen=True)
class CaptureCommand(TrainCommand):
    """Only capture queries and keys; `train` with the same settings continues from there."""


@dataclass(frozen=True)
class PlanCommand(TrainCommand):
    """Compute the disk, the memory and a lower bound of the hours, on several GPUs, that `train` with these settings
    takes, from the model's config alone, without weights or text."""

    disk: float | None = None
    """GB available for captures; decides the number of waves."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.disk is not None and not 0 < self.disk < float("inf"):
            raise UsageError(f"--disk must be above 0, got {self.disk}")


@dataclass(frozen=True)
class ShareCommand:
    """Measure how a budget is best divided among the KV heads of each layer, and store it with a trained hasher.

    Training does this, too; a hasher that was trained before there were shares need not be trained anew.
    """

    folder: Annotated[Path, tyro.conf.Positional]
    """The hasher's folder; its weights do not change."""
    model: str = DEMO
    """Folder or hub id of the hasher's model; `demo` is the model that ships with hashtrain."""
    text: tuple[Path, ...] = ()
    """Text to measure on, as for `train`. Default: Python's standard library."""
    context: int = 4096
    """Tokens per context."""
    fraction: float = 0.02
    """The budget that is divided, of the visible tokens."""
    device: str = "cpu"
    """Device of the model: cpu, cuda, cuda:N, or auto (CUDA if available)."""
    seed: int = 0
    """Draws texts and rows."""

    def __post_init__(self) -> None:
        require_counts(self, context=512)
        require_seed(self.seed)
        require_device_name(self.device)
        if not 0 < self.fraction <= 1:
            raise UsageError(f"--fraction must be above 0 and at most 1, got {self.fraction}")


@dataclass(frozen=True)
class ConvertCommand:
    """Convert a published `.pth` list of hashers to this project's format."""

    file: Annotated[Path, tyro.conf.Positional]
    """The published file."""
    model: str
    """Folder or hub id of the model that it was trained for; `demo` is the model that ships with hashtrain."""
    out: Path
    """Folder for the hasher, which is stored below it as `paper`; pass it to `evals --hashers`."""


@dataclass(frozen=True)
class PushCommand:
    """Publish a hasher on the Hub."""

    folder: Annotated[Path, tyro.conf.Positional]
    """The hasher's folder."""
    repo_id: Annotated[str, tyro.conf.Positional]
    """OWNER/NAME; created if it does not exist."""
    private: bool = False
    """Whether a new repository is private."""


@dataclass(frozen=True)
class InspectCommand:
    """Read a hasher and print its config."""

    folder: Annotated[Path, tyro.conf.Positional]
    """The hasher's folder."""


def main(arguments: list[str] | None = None) -> int:
    """Run one command. Returns 0, or 2 with one sentence on stderr if the input cannot be used."""
    return guarded("hashtrain", lambda: _run(list(sys.argv[1:] if arguments is None else arguments)))


_HELP = """Learned hashing of the KV cache: train hashers for a model, inspect them, publish them.

Without a subcommand it trains: `hashtrain --model NAME` is `hashtrain train --model NAME`, and `hashtrain train --help`
lists the flags."""


def _run(arguments: list[str]) -> int:
    from hashtrain.settings.toml import with_config

    command = parse(with_config(_named(arguments)))
    if isinstance(command, TrainCommand | ConvertCommand):
        require_folder(command.out)
    if isinstance(command, TrainCommand) and not isinstance(command, PlanCommand):  # which writes nothing
        _require_own_out(command)
    (act,) = (act for kind, act in COMMANDS.values() if kind is type(command))
    if (line := act(command)) is not None:
        print(json.dumps(line), flush=True)
    return 0


def _require_own_out(command: TrainCommand) -> None:
    """Raise UsageError if the hashers of another model would be stored with those of the demo model."""
    if not command.dry_run and command.model != DEMO and command.out == TrainCommand().out:
        raise UsageError(f"--model {command.model} needs --out FOLDER: {command.out} is for hashers of the demo model")


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


def _console() -> Console:
    return Console(stderr=not sys.stdout.isatty(), width=None if sys.stderr.isatty() else 120)


def _capture(command: CaptureCommand) -> dict[str, Any]:
    from hashtrain.run.pipeline import run

    return {"out": str(command.out), **run(command, _console(), capture_only=True)}


def _plan(command: PlanCommand) -> dict[str, Any]:
    from hashtrain.models import load_config
    from hashtrain.run.schedule import schedule

    found = schedule(command, load_config(command.model_path), None if command.disk is None else 1e9 * command.disk)
    _console().print("\n".join(found.lines(command)), highlight=False, soft_wrap=True)
    return {"plan": asdict(found)}


def _share(command: ShareCommand) -> dict[str, Any]:
    from hashtrain.artefact.hasher import Hasher
    from hashtrain.data.capture import capture
    from hashtrain.data.corpus import contexts, python_sources, read_texts
    from hashtrain.evaluation.budgets import CONTEXTS, head_shares
    from hashtrain.machine.distribute import device_for
    from hashtrain.models import require_vocabulary
    from hashtrain.run.prepare import require_plain_attention
    from hashtrain.run.sources import loaded

    if not command.folder.is_dir():
        raise UsageError(f"there is no folder {command.folder}: expected the folder of a hasher, to store shares in it")
    device, hasher = str(device_for(command.device, 0)), Hasher.from_pretrained(command.folder)
    model, tokenizer = loaded(model_path(command.model), device)
    hasher.require_match(model.config)
    require_plain_attention(model.config)
    texts = read_texts(list(command.text), seed=command.seed) if command.text else python_sources()
    ids = contexts(texts, tokenizer, command.context, CONTEXTS, command.seed)
    require_vocabulary(model, *ids)
    with tempfile.TemporaryDirectory() as captured:
        stored = capture(model, ids, Path(captured), reach=hasher.reach)
        shares = head_shares(model, hasher.to(device), stored, command.fraction, command.seed)
    hasher.config = replace(hasher.config, head_shares=shares)
    hasher.save_pretrained(command.folder)
    return {"head_shares": shares}


def _convert(command: ConvertCommand) -> dict[str, Any]:
    from hashtrain.artefact.convert import convert
    from hashtrain.artefact.hasher import require_own
    from hashtrain.config import ModelShape
    from hashtrain.models import load_config

    made = command.out / "paper"  # the layout of `hashtrain`, which `evals --hashers` expects
    config = load_config(model_path(command.model))
    require_own(made, base_model(command.model), ModelShape.of(config))
    convert(command.file, config, made, base_model(command.model))
    words = ["uv", "run", "evals", "ppl", "--documents", "4", "--hashers", str(command.out), "--methods", "paper"]
    words += ["--model", command.model] if command.model != DEMO else []
    _console().print(f"stored in {made}; next:\n{shlex.join(words)}", highlight=False, soft_wrap=True)
    return _inspect(InspectCommand(made))


def _push(command: PushCommand) -> dict[str, Any]:
    from hashtrain.artefact.hasher import Hasher

    address = Hasher.from_pretrained(command.folder).push_to_hub(command.repo_id, private=command.private)
    return {"published": str(address)}


def _train(command: TrainCommand) -> dict[str, Any] | None:
    from hashtrain.run.pipeline import run

    console = _console()
    metrics = run(command, console)
    if not metrics or "dry_run" in metrics:  # none if this is not rank 0 of torchrun's processes
        return metrics or None
    console.print(f"stored in {command.out}; next:\n{next_command(command)}", highlight=False, soft_wrap=True)
    mean = {
        name: {h: result[h]["mean"] for h in ("kv_head", "query_head")} for name, result in metrics["hashers"].items()
    }
    return {"out": str(command.out), "seconds": metrics["seconds"], "best": _best(command, metrics), "mean": mean}


def _best(command: TrainCommand, metrics: dict[str, Any]) -> str:
    """Return the hasher with the highest IoU per KV head among those that can decode."""
    decoding = [c.name for c in command.recipes if c.variant != "down-proj"] or [c.name for c in command.recipes]
    return max(decoding, key=lambda name: metrics["hashers"][name]["kv_head"]["mean"]["iou"])


def next_command(command: TrainCommand) -> str:
    """Return the command that evaluates the hashers of this run."""
    words = ["uv", "run", "evals", "ppl", "--documents", "4", "--hashers", str(command.out)]
    if command.model != DEMO:
        words += ["--model", command.model]
    if command.text:
        words += ["--text", "TEXT-NOT-TRAINED-ON"]
    if command.context != TrainCommand().context:  # evals does not have the defaults of other models
        words += ["--context", str(command.context)]
    if command.dense_layers is not None:
        words += ["--dense-layers", str(command.dense_layers)]
    made = [c.name for c in command.recipes]
    if not {c.name for c in RECIPES} <= set(made):  # the default of evals needs all of these
        words += ["--methods", *made]
    return shlex.join(words)


def _inspect(command: InspectCommand) -> dict[str, Any]:
    from hashtrain.artefact.hasher import Hasher

    hasher = Hasher.from_pretrained(command.folder)
    return {**asdict(hasher.config), "parameters": sum(t.numel() for t in hasher.state_dict().values())}


COMMANDS: dict[str, tuple[Any, Callable[[Any], dict[str, Any] | None]]] = {
    "train": (TrainCommand, _train),
    "capture": (CaptureCommand, _capture),
    "plan": (PlanCommand, _plan),
    "share": (ShareCommand, _share),
    "convert": (ConvertCommand, _convert),
    "inspect": (InspectCommand, _inspect),
    "push": (PushCommand, _push),
}
"""By name, a command's settings, and what runs it and returns the last line of standard output as JSON."""

if __name__ == "__main__":
    raise SystemExit(main())
