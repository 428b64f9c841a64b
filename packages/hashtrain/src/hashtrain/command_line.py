"""Parse the command lines of all packages: one command for each class of settings, a frozen dataclass."""

from collections.abc import Mapping
from typing import Annotated, Any, TypeVar, Union, cast

import tyro

from hashtrain.usage import UsageError, did_you_mean

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
        raise UsageError(f"no command {did_you_mean([words[0]], commands)}")
    kinds = tuple(Annotated[kind, tyro.conf.subcommand(name)] for name, kind in commands.items())
    usual = tyro.MISSING_NONPROP if default is None else default
    return tyro.cli(cast(Any, Union)[kinds], args=words, prog=program, description=description, default=usual)


def parse_settings(program: str, words: list[str], kind: type[T], default: object = None) -> T:
    """Parse flags into settings of one class. Raises: as `parse`."""
    return tyro.cli(
        kind, args=words, prog=program, default=cast(T, tyro.MISSING_NONPROP if default is None else default)
    )
