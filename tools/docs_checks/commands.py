"""Check the commands of the documentation: each is parsed by its real parser, and none is run."""

import ast
import contextlib
import importlib.util
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
    *("ruff",),
}
"""Third-party commands that are not checked."""
ENGINE = "tools/serving_environment.py"
"""Runs Python in an environment with an engine that is not installed here."""
ENGINE_MODULE = "vllm.entrypoints.openai.api_server"
UV_FLAGS = {
    *("--no-project", "--no-sync", "--isolated", "--quiet", "-q", "--all-packages", "--all-groups", "--all-extras")
}
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


def problems(code: str, root: pathlib.Path = ROOT) -> list[str]:
    """Return the problems of the commands of a bash block, a sentence each."""
    found = []
    for words in commands(code):
        try:
            _check(words, root)
        except CommandError as error:
            found.append(f"`{shlex.join(words)}`: {error}")
    return found


def _check(words: Words, root: pathlib.Path) -> None:
    program, arguments = words[0], words[1:]
    if program == "uv":
        _uv(arguments, root)
    elif program == "pip" and arguments[:1] == ["install"]:
        _installed(arguments[1:], root)
    elif program in PARSERS:
        _parsed(PARSERS[program], arguments)
    elif program == "python" or (program == ENGINE and arguments[:2] != ["-m", ENGINE_MODULE]):
        _python(arguments, root)
    elif program == "pytest":
        _paths([word for word in arguments if not word.startswith("-")], root)
    elif program.endswith(".py") and program != ENGINE:
        _script(program, arguments, root)
    elif program not in (*PLAIN, ENGINE):
        raise CommandError(f"expected a command that tools/docs_checks/commands.py supports, got {program}; add it")


def _uv(words: Words, root: pathlib.Path) -> None:
    action, arguments = words[0], words[1:]
    if action == "pip" and arguments[:1] == ["install"]:
        _installed(arguments[1:], root)
    elif action == "pip" and arguments[:1] == ["sync"]:
        _paths([word for word in arguments if word.endswith(".txt")], root)
    elif action in ("run", "sync"):
        left = _without_uv_options(arguments, root)
        if action == "run" and not left:
            raise CommandError("expected a command after uv run, got none")
        if action == "sync" and left:
            raise CommandError(f"expected options of uv sync, got {left[0]}")
        if left:
            _check(left, root)
    elif action not in ("build", "venv"):
        raise CommandError(f"expected uv run, sync, venv, build, pip install or pip sync, got uv {action}")


def _without_uv_options(words: Words, root: pathlib.Path) -> Words:
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    names = {
        "--group": set(project["dependency-groups"]),
        "--extra": set(project["project"]["optional-dependencies"]),
        "--no-extra": {extra for package in _packages(root).values() for extra in package},
    }
    left = list(words)
    while left and left[0].startswith("-"):
        option = left.pop(0)
        if option in names:
            name = left.pop(0) if left else ""
            if name not in names[option]:
                raise CommandError(f"expected {option} {', '.join(sorted(names[option]))}, got {name!r}")
        elif option not in UV_FLAGS:
            raise CommandError(f"expected options of uv among {', '.join(sorted([*UV_FLAGS, *names]))}, got {option}")
    return left


def _packages(root: pathlib.Path) -> dict[str, set[str]]:
    """Return the extras of each package, by its folder."""
    found = {}
    for path in root.glob("packages/*/pyproject.toml"):
        project = tomllib.loads(path.read_text(encoding="utf-8"))["project"]
        found[f"./packages/{path.parent.name}"] = set(project.get("optional-dependencies", {}))
    return found


def _installed(words: Sequence[str], root: pathlib.Path) -> None:
    packages = _packages(root)
    for word in (word for word in words if word.startswith("./")):
        path, _, extras = word.rstrip("]").partition("[")
        if path not in packages:
            raise CommandError(f"expected one of {', '.join(sorted(packages))}, got {path}")
        if unknown := {extra.strip() for extra in extras.split(",") if extra} - packages[path]:
            raise CommandError(f"expected extras among {', '.join(sorted(packages[path]))}, got {sorted(unknown)[0]}")


def _python(words: Words, root: pathlib.Path) -> None:
    if words[:2] == ["-m", "torch.distributed.run"]:
        launch = _parsed(get_args_parser().parse_args, words[2:])
        _python([*["-m"] * launch.module, launch.training_script, *launch.training_script_args], root)
    elif words[:1] == ["-c"]:
        try:
            ast.parse(words[1])
        except SyntaxError as error:
            raise CommandError(f"its Python does not compile: {error}") from error
    elif words[:1] == ["-m"] and words[1] in PARSERS:
        _check(words[1:], root)
    elif words[:1] == ["-m"] and importlib.util.find_spec(words[1]) is None:
        raise CommandError(f"expected a module that is installed, got {words[1]}")
    elif words and words[0].endswith(".py"):
        _script(words[0], words[1:], root)


def _script(name: str, words: Words, root: pathlib.Path) -> None:
    """Check each flag against the string constants of the script, which it passes to argparse."""
    _paths([name], root)
    nodes = ast.walk(ast.parse((root / name).read_text(encoding="utf-8")))
    known = {"-h", "--help", *(node.value for node in nodes if isinstance(node, ast.Constant))}
    for word in words:
        flag = word.partition("=")[0]
        if re.match(r"--?[a-z]", flag) and flag not in known:
            raise CommandError(f"expected a flag of {name}, got {flag}")


def _paths(names: Sequence[str], root: pathlib.Path) -> None:
    for name in names:
        if not (root / name).exists():
            raise CommandError(f"expected a path of this repository, got {name}")


def _parsed(parse: Callable[[Words], Any], words: Words) -> Any:
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            return parse(words)
    except SystemExit as error:
        if error.code:
            raise CommandError(f"its parser reports: {' '.join(said.getvalue().split())}") from error
        raise CommandError("expected a command to run, got a request for help") from error
    except (UsageError, ValueError) as error:
        raise CommandError(f"its parser reports: {error}") from error


PARSERS: dict[str, Callable[[Words], object]] = {
    "evals": lambda words: parse("evals", words, COMMANDS),
    "hashtrain": hashtrain_cli.parse,
    "sparse-decode": lambda words: parse_settings("sparse-decode", words, GenerateCommand),
}
