"""The command line: `sparse-decode --prompt-file FILE ...` continues a text and reports speed, density and memory."""

import json
import sys
from typing import Any

from hashtrain.command_line import parse_settings
from hashtrain.usage import guarded
from rich.console import Console
from rich.table import Table

from sparse_decode.settings import GenerateCommand


def main(arguments: list[str] | None = None) -> int:
    """Run the command. Returns 0; 2 with one sentence on stderr if the input is invalid; 130 if interrupted."""
    return guarded("sparse-decode", lambda: _main(arguments))


def _main(arguments: list[str] | None) -> int:
    command = parse_settings("sparse-decode", sys.argv[1:] if arguments is None else arguments, GenerateCommand)
    from sparse_decode.streaming import generate  # torch and transformers load here, not for --help

    found = generate(command, sys.stdout)
    Console(stderr=not sys.stdout.isatty()).print(_table(found))
    print(json.dumps(found), flush=True)
    return 0


def _table(found: dict[str, Any]) -> Table:
    """Return a table with a column for each run."""
    runs = [name for name in ("sparse", "dense") if name in found]
    table = Table("", *runs, title=f"{found['prompt_tokens']:,} tokens of prompt")
    lines = {
        "new tokens": lambda run: f"{run['new_tokens']:,}",
        "tokens per second": lambda run: "-" if run["tokens_per_second"] is None else f"{run['tokens_per_second']:.1f}",
        "prefill": lambda run: f"{run['prefill_seconds']:.2f} s",
        "tokens from the session": lambda run: f"{run['stored_tokens']:,}",
        "density": lambda run: "-" if run["density"] is None else f"{100 * run['density']:.2f} %",
        "keys and values": lambda run: f"{run['kv_bytes'] / 2**20:.1f} MiB",
        "codes": lambda run: f"{run['code_bytes'] / 2**20:.1f} MiB",
    }
    for title, show in lines.items():
        table.add_row(title, *(show(found[name]) for name in runs))
    if "same_tokens" in found:
        table.add_row("tokens alike from the start", str(found["same_tokens"]), "")
    return table
