"""Check the commands of the documentation: each is parsed by its real parser, and none is run."""

import ast
import contextlib
import io
import pathlib
import re
import shlex
import tomllib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from evals.cli import COMMANDS
from hashtrain import cli as hashtrain_cli
from hashtrain.command_line import parse, parse_settings
from hashtrain.usage import UsageError
from sparse_decode.settings import GenerateCommand
from torch.distributed.run import get_args_parser

ROOT = pathlib.Path(__file__).resolve().parents[2]
PLAIN = {
    *("apt-get", "basedpyright", "cd", "chmod", "cp", "curl", "dpkg", "git", "head", "mkdir", "nix", "pre-commit"),
    *("pip", "ruff"),
}
"""Third-party commands that are not checked."""
ENGINE = "tools/serving_environment.py"
"""Runs Python in an environment with an engine that is not installed here."""
Words = list[str]


class CommandError(Exception):
    """A problem with a command, as a sentence."""


def commands(code: str) -> Iterator[Words]:
    """Split shell code into simple commands, without comments and assignments."""
    code = re.sub(r"(^|\s)#.*$", r"\1", code.replace("\\\n", " "), flags=re.M)
    lexer = shlex.shlex(code, posix=True, punctuation_chars=";&|\n")
    lexer.whitespace, lexer.commenters, lexer.whitespace_split = " \t\r", "", True
    words: Words = []
    for word in [*lexer, "\n"]:
        if set(word) <= set(";&|\n"):
            while words and re.match(r"[A-Za-z_]\w*=", words[0]):
                del words[0]
            if words:
                yield words
            words = []
        else:
            words.append(word)


def problems(code: str) -> list[str]:
    """Return the problems of the commands of a bash block, a sentence each."""
    found = []
    for words in commands(code):
        try:
            _check(words)
        except CommandError as error:
            found.append(f"`{shlex.join(words)}`: {error}")
    return found


def _check(words: Words) -> None:
    program, arguments = words[0], words[1:]
    if "install" in words and program in ("pip", "uv"):
        _installed(words)
    elif program == "uv" and arguments[0] in ("run", "sync"):
        if left := _without_uv_options(arguments[1:]):
            _check(left)
    elif program in PARSERS:
        _parsed(PARSERS[program], arguments)
    elif program == "python":
        _python(arguments)
    elif program == ENGINE and arguments[0].endswith(".py"):
        _script(arguments[0], arguments[1:])
    elif program in ("pytest", "bash"):
        _paths([word for word in arguments if not word.startswith("-")])
    elif program.endswith(".py") and program != ENGINE:
        _script(program, arguments)
    elif program not in (*PLAIN, "uv", ENGINE):
        raise CommandError(f"expected a command that tools/docs_checks/commands.py supports, got {program}; add it")


def _without_uv_options(words: Words) -> Words:
    """Return what follows the options of `uv run` or `uv sync`, whose groups and extras must exist."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    extras = {*project["project"]["optional-dependencies"], *(extra for of in _packages().values() for extra in of)}
    names = {"--group": {*project["dependency-groups"]}, "--extra": extras, "--no-extra": extras}
    left = list(words)
    while left and left[0].startswith("-"):
        option = left.pop(0)
        value = left.pop(0) if option in (*names, "--with") and left else ""
        if option in names and value not in names[option]:
            raise CommandError(f"expected {option} {', '.join(sorted(names[option]))}, got {value!r}")
    return left


def _packages() -> dict[str, set[str]]:
    """Return the extras of each package, by its folder."""
    found = {}
    for path in ROOT.glob("packages/*/pyproject.toml"):
        project = tomllib.loads(path.read_text(encoding="utf-8"))["project"]
        found[f"./packages/{path.parent.name}"] = set(project.get("optional-dependencies", {}))
    return found


def _installed(words: Sequence[str]) -> None:
    packages = _packages()
    for word in (word for word in words if word.startswith("./")):
        path, _, extras = word.rstrip("]").partition("[")
        if path not in packages:
            raise CommandError(f"expected one of {', '.join(sorted(packages))}, got {path}")
        if unknown := {extra.strip() for extra in extras.split(",") if extra} - packages[path]:
            raise CommandError(f"expected extras among {', '.join(sorted(packages[path]))}, got {sorted(unknown)[0]}")


def _python(words: Words) -> None:
    if words[:2] == ["-m", "torch.distributed.run"]:
        launch = _parsed(get_args_parser().parse_args, words[2:])
        _python([*["-m"] * launch.module, launch.training_script, *launch.training_script_args])
    elif words[:1] == ["-m"] and words[1] in PARSERS:
        _check(words[1:])
    elif words and words[0].endswith(".py"):
        _script(words[0], words[1:])


def _script(name: str, words: Words) -> None:
    """Check each flag against the string constants of the script, which it passes to argparse."""
    _paths([name])
    nodes = ast.walk(ast.parse((ROOT / name).read_text(encoding="utf-8")))
    known = {"-h", "--help", *(node.value for node in nodes if isinstance(node, ast.Constant))}
    for word in words:
        flag = word.partition("=")[0]
        if re.match(r"--?[a-z]", flag) and flag not in known:
            raise CommandError(f"expected a flag of {name}, got {flag}")


def _paths(names: Sequence[str]) -> None:
    for name in names:
        if not (ROOT / name).exists():
            raise CommandError(f"expected a path of this repository, got {name}")


def _parsed(parser: Callable[[Words], Any], words: Words) -> Any:
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            return parser(words)
    except SystemExit as error:
        raise CommandError(f"its parser reports: {' '.join(said.getvalue().split())}") from error
    except (UsageError, ValueError) as error:
        raise CommandError(f"its parser reports: {error}") from error


PARSERS: dict[str, Callable[[Words], object]] = {
    "evals": lambda words: parse("evals", words, COMMANDS),
    "hashtrain": hashtrain_cli.parse,
    "sparse-decode": lambda words: parse_settings("sparse-decode", words, GenerateCommand),
}
