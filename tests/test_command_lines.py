"""Whatever is typed: exit code 2 and a sentence, and nobody waits for it; output that nobody reads is no error."""

import importlib
import os
import pathlib
import re
import resource
import shlex
import subprocess
import sys
import time

import pytest
from evals import cli as evals_cli
from evals.cli import main as evals
from hashtrain import cli as hashtrain_cli
from hashtrain.cli import main as hashtrain
from hashtrain.command_line import parse_settings
from sparse_decode.cli import main as sparse_decode
from sparse_decode.settings import GenerateCommand

SECONDS = 10
HELP_SECONDS = 1.5  # of processor time; with torch and transformers it were 14
PROGRAMS = {"hashtrain": hashtrain, "evals": evals, "sparse-decode": sparse_decode}
KINDS = {
    "hashtrain": {name: kind for name, (kind, _) in hashtrain_cli.COMMANDS.items()},
    "evals": evals_cli.COMMANDS,
    "sparse-decode": {"": GenerateCommand},
}
"""The settings of every command, by program and name."""
HUGE = "9" * 29
NUMBERS = {  # flags that take whole numbers, and those that take shares
    "hashtrain": ("contexts held-out rows steps context workers dense-layers bits seed", "fraction learning-rate"),
    "sparse-decode": ("max-new-tokens", "fraction"),
    "evals ppl": ("documents dense-layers seed context", "budgets"),
    "evals throughput": ("contexts repeats steps batches seed", "budget"),
    "evals needle": ("lengths", "depths"),
}
OTHERS = {
    "hashtrain": [
        *("--device gpu", "--device cuda:x", "--only magic", "--spread thin", "--out {file}", "--model ./none"),
        *("--text none.txt", "--text {pipe}", "--text /dev/zero", "--modle demo"),
        *("convert none.pth --model demo --out {new}", "push none owner/name"),
    ],
    "sparse-decode": [
        *("", "--prompt-file none.txt", "--prompt-file {pipe}", "--prompt-file /dev/zero", "--prompt-file {binary}"),
        *("--prompt-file {file} --model ./none", "--prompt-file {file} --what 1", "--prompt-file {file} --device gpu"),
    ],
    "evals": [
        *("", "none", "ppl --methods magic", "ppl --rules none", "ppl --match quest", "ppl --device gpu"),
        *("ppl --out {file}", "ppl --model ./none", "iou --methods lsh+remainder", "report"),
        *("report none", "paper --table 1 --figure 1", "needle --depths 2"),
        "fidelity --new-tokens 4096 --context 64",
    ],
}


def lines():
    """Every bad command line: (program, words)."""
    for command, names in NUMBERS.items():
        program, *words = command.split()
        words += ["--prompt-file", "{file}"] * (program == "sparse-decode")
        for of_kind, values in zip(names, (("x", "1.5", "-1", HUGE), ("x", "nan", "-1", "inf")), strict=True):
            for name in of_kind.split():
                yield from ((program, [*words, f"--{name}", value]) for value in values)
    for program, given in OTHERS.items():
        yield from ((program, line.split()) for line in given)


LINES = list(lines())


@pytest.fixture(scope="module")
def places(folder):
    """What a command line may point at."""
    (folder / "text.txt").write_text("text")
    (folder / "binary").write_bytes(b"\xff\0")
    os.mkfifo(folder / "pipe")
    (folder / "loop").symlink_to(folder / "loop")
    (folder / "folder").mkdir()
    names = {"file": "text.txt", "binary": "binary", "pipe": "pipe", "loop": "loop", "folder": "folder", "new": "new"}
    return {name: str(folder / file) for name, file in names.items()}


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_bad_command_line_is_one_sentence(program, places, capsys, monkeypatch):
    for module in ("hashtrain.run.pipeline", "sparse_decode.streaming", "evals.tasks.ppl"):
        importlib.import_module(module)  # whose time is not a sentence's
    monkeypatch.chdir(places["folder"])
    wrong = []
    for _, words in [line for line in LINES if line[0] == program]:
        began = time.monotonic()
        try:
            code = PROGRAMS[program]([word.format(**places) for word in words])
        except SystemExit as leaving:  # of the parser, after its own words
            code = leaving.code
        said, took = capsys.readouterr().err, time.monotonic() - began
        sentence = (said.strip().splitlines() or [""])[-1].startswith(f"{program}: ") or "--help" in said
        if code != 2 or took > SECONDS or not sentence or "Traceback" in said or "[Errno" in said:
            wrong.append((words, code, round(took), said[-300:]))
    assert not wrong
    assert not list(pathlib.Path(places["folder"]).iterdir()), "something was written"


def used(*words):
    """Run Python on these words and return its processor seconds."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *words], check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@pytest.mark.parametrize("line", ["hashtrain convert", "evals throughput", "sparse_decode"])
def test_help_does_not_wait_for_torch(line):
    words = ["-m", *line.split(), "--help"]
    assert used(*words) < HELP_SECONDS or used(*words) < HELP_SECONDS  # the first may compile what was never imported


@pytest.mark.parametrize(("program", "name"), [(program, name) for program, kinds in KINDS.items() for name in kinds])
def test_the_help_of_every_command_ends_with_an_example_that_its_parser_takes(program, name):
    kind = KINDS[program][name]
    (line,) = re.findall(r"Example: `(.+)`\.$", " ".join(kind.__doc__.split()))
    first, *words = shlex.split(line)
    assert first == program
    assert isinstance(parse_settings(program, words[1:] if words[0] == name else words, kind), kind)


def test_a_hasher_is_imported_without_transformers_and_what_vllm_imports_first_without_numba():
    """vLLM's own compiler must look at the machine before numba does."""
    first = "import sys; from hashtrain import Hasher; assert Hasher and 'transformers' not in sys.modules; "
    served = ", ".join(f"sparse_serve.{name}" for name in ("plugin", "refusals", "batch", "served"))
    used("-c", f"{first} import {served}; assert 'numba' not in sys.modules")


def guarded(body, shell="", **settings):
    """Run `guarded` around a body in a process, with a piece of shell behind it: exit code and what stderr got."""
    script = f"import sys\nfrom hashtrain.usage import guarded\ndef call():\n    {body}\n    return 0\n"
    script += "raise SystemExit(guarded('it', call))"
    line = f'set -o pipefail; "$0" -c "$1" {shell}'
    words = ["bash", "-c", line, sys.executable, script]
    found = subprocess.run(words, capture_output=True, text=True, check=False, **settings)
    return found.returncode, found.stderr


def test_output_that_nobody_reads_any_more_ends_the_program_without_a_word():
    endless = "[print('x' * 99) for _ in range(99999)]"
    assert guarded(endless, "| head -n 1 > /dev/null") == (141, "")
    console = f"from rich.console import Console; c = Console(); {endless.replace('print', 'c.print')}"
    assert guarded(console, "| head -n 1 > /dev/null") == (141, "")
    assert guarded("print('one', flush=True); import time; time.sleep(0.3)", "| true")[1] == ""


def test_a_full_output_is_one_sentence():
    code, said = guarded("print('x' * 99999)", "> /dev/full")
    assert (code, said) == (2, "it: No space left on device; free some space and rerun the command\n")
    assert guarded("print('few')", "> /dev/full")[0] == 2


def test_an_interruption_is_130():
    heard = "import os, signal; signal.signal(signal.SIGINT, signal.default_int_handler)"  # a background job hears none
    assert guarded(f"{heard}; os.kill(os.getpid(), signal.SIGINT)") == (130, "it: stopped\n")
