"""Parse the command lines of all packages: one command for each class of settings, a frozen dataclass."""

from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from inspect import Parameter, Signature
from typing import Annotated, Any, TypeVar, Union, cast, get_type_hints

import docstring_parser
import tyro

from hashtrain.usage import UsageError, meant

T = TypeVar("T")


def parse(
    program: str, words: list[str], commands: Mapping[str, type], description: str = "", default: object = None
) -> Any:
    """Parse a command line that begins with the name of a command.

    Args:
        commands: by name, the settings of each command.
        description: for the help that lists the commands.
        default: settings in place of the class's own defaults; for the list of commands, of the one that needs no name.
    Raises: UsageError for an unknown command or an invalid setting; SystemExit, after a message, for an unknown flag,
        or after the help.
    """
    if words and words[0] in commands:  # parsed alone, so that an error about a flag points to the help that lists it
        return parse_settings(f"{program} {words[0]}", words[1:], commands[words[0]], default)
    if words and not words[0].startswith("-"):
        raise UsageError(f"no command {meant([words[0]], commands)}")
    kinds = tuple(Annotated[kind, tyro.conf.subcommand(name)] for name, kind in commands.items())
    usual = tyro.MISSING_NONPROP if default is None else default
    return tyro.cli(cast(Any, Union)[kinds], args=words, prog=program, description=description, default=usual)


def parse_settings(program: str, words: list[str], kind: type[T], default: object = None) -> T:
    """Parse flags into settings of one class. Raises: as `parse`."""
    return tyro.cli(_described(kind, default), args=words, prog=program)


def _described(kind: type[T], default: object) -> Callable[..., T]:
    """Return what makes settings of its arguments, each with its docstring as one paragraph and at most one default.

    Given the class, tyro would keep the source's line breaks, and add "(default: None)" where a text has told the
    default.
    """
    documented: dict[str, str] = {}
    for base in reversed(kind.__mro__[:-1]):
        documented |= {one.arg_name: one.description or "" for one in docstring_parser.parse_from_object(base).params}
    hints, parameters = get_type_hints(kind, include_extras=True), list[Parameter]()
    for field in fields(cast(Any, kind)):
        text = " ".join(documented.get(field.name, "").split())
        hint = "" if "Default" in text else _default
        own = Annotated[hints[field.name], tyro.conf.arg(help=text, help_behavior_hint=hint)]
        usual = Parameter.empty if field.default is MISSING else getattr(default, field.name, field.default)
        parameters.append(Parameter(field.name, Parameter.KEYWORD_ONLY, default=usual, annotation=own))

    def make(**given: Any) -> T:
        return kind(**given)

    make.__doc__, make.__name__ = kind.__doc__, kind.__name__
    make.__annotations__ = {one.name: one.annotation for one in parameters}
    cast(Any, make).__signature__ = Signature(parameters)
    return make


def _default(value: str) -> str:
    """Return what a help text says of a default; nothing of a setting that is not set."""
    return f"(default: {value})" if value not in ("", "None") else ""
