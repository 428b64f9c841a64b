"""The command line: `sparse-decode --prompt-file FILE ...` continues a text and reports speed, density and memory."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro
from hashtrain.config import RECENT, SINK
from hashtrain.demo import DEMO, model_path
from hashtrain.usage import UsageError, guarded, require_counts
from rich.console import Console
from rich.table import Table

_REMEDY = "Use a prompt that stops in the middle of a text."


@dataclass(frozen=True)
class GenerateCommand:
    """Continue a text with sparse attention, streaming tokens, and print speed, density and memory."""

    prompt_file: Path
    """The prompt: a UTF-8 text file."""
    max_new_tokens: int = 200
    """Maximal number of tokens to generate; fewer if the model ends its text."""
    model: str = DEMO
    """A folder or hub id of a Hugging Face causal LM; `demo` is the model included in hashtrain."""
    hasher: str = "runs/demo/transform"
    """A hasher's folder, created by `uv run hashtrain`; `lsh`: untrained codes."""
    max_prompt_tokens: int | None = None
    """Use only this many tokens of the prompt, the last ones."""
    fraction: float = 0.02
    """Share of the visible tokens that a step reads, above 0 and at most 1."""
    min_tokens: int = 16
    """Minimal number of tokens that a step reads."""
    sink: int = SINK
    """Number of first tokens that are always read."""
    recent: int = RECENT
    """Number of last tokens that are always read."""
    shortlist: int | None = None
    """Score only about this many times the tokens to select by all bits, the best by their first 32 bits: faster at
    long context; 6 is usual."""
    values: float = 1.0
    """Share of the tokens read whose values are read, too: those with the highest attention. 0.33 allows a larger
    fraction at the same number of bytes."""
    dense_layers: int | None = None
    """Number of first layers that stay dense. Default: those that the hasher lists."""
    exact: int | None = None
    """Exact mode, with the output of dense attention: draft up to this many tokens (at most 15) with sparse attention,
    then check them in one dense pass. Drafts nothing where that would not be faster."""
    compare: bool = False
    """Also generate with dense attention, for comparison."""

    def __post_init__(self) -> None:
        require_counts(
            self,
            max_new_tokens=1,
            max_prompt_tokens=1,
            min_tokens=1,
            sink=0,
            recent=0,
            shortlist=1,
            dense_layers=0,
            exact=1,
        )
        if not 0 < self.fraction <= 1:
            raise UsageError(f"--fraction must be above 0 and at most 1, got {self.fraction}; 0.02 selects 2 %")
        if not 0 < self.values <= 1:
            raise UsageError(f"--values must be above 0 and at most 1, got {self.values}; 1 reads all values")

    @property
    def model_path(self) -> str:
        """The argument of `from_pretrained`."""
        return model_path(self.model)


def main(arguments: list[str] | None = None) -> int:
    """Run the command. Returns 0; 2 with one sentence on stderr if the input is invalid; 130 if interrupted."""
    return guarded("sparse-decode", lambda: _main(arguments))


def _main(arguments: list[str] | None) -> int:
    command = tyro.cli(GenerateCommand, args=arguments, prog="sparse-decode")
    from sparse_decode.streaming import generate  # torch and transformers load here, not for --help

    found = generate(command, sys.stdout)
    console = Console(stderr=not sys.stdout.isatty())
    console.print(_table(found))
    for sentence in _early_ends(found, command.max_new_tokens):
        console.print(sentence, highlight=False, soft_wrap=True)
    print(json.dumps(found), flush=True)
    return 0


def _table(found: dict[str, Any]) -> Table:
    """Return a table with a column for each run."""
    runs = [name for name in ("sparse", "exact", "dense") if name in found]
    table = Table("", *runs, title=f"{found['prompt_tokens']:,} tokens of prompt")
    lines = {
        "new tokens": lambda run: f"{run['new_tokens']:,}",
        "tokens per second": lambda run: "-" if run["tokens_per_second"] is None else f"{run['tokens_per_second']:.1f}",
        "prefill": lambda run: f"{run['prefill_seconds']:.2f} s",
        "density": lambda run: "-" if run["density"] is None else f"{100 * run['density']:.2f} %",
        "keys and values": lambda run: f"{run['kv_bytes'] / 2**20:.1f} MiB",
        "codes": lambda run: f"{run['code_bytes'] / 2**20:.1f} MiB",
    }
    for title, show in lines.items():
        table.add_row(title, *(show(found[name]) for name in runs))
    if "exact" in found:
        made = found["exact"]
        table.add_row("accepted of drafted", f"{made['accepted']:,} of {made['drafted']:,}", *[""] * (len(runs) - 1))
    if "same_tokens" in found:
        table.add_row("tokens alike from the start", str(found["same_tokens"]), "")
    return table


def _early_ends(found: dict[str, Any], most: int) -> list[str]:
    """Return a sentence for each run that generated fewer tokens than `most`."""
    said: list[str] = []
    for name in ("sparse", "exact", "dense"):
        if name in found and (made := found[name]["new_tokens"]) < most:
            none = "; speed and density are of the tokens after the first" if made == 1 else ""
            tokens = f"{made} token{'s' * (made != 1)} of at most {most}"
            said.append(f"{name}: the model ended its text after {tokens}{none}. {_REMEDY}")
    return said


if __name__ == "__main__":
    raise SystemExit(main())
