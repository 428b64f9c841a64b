"""The tables and figures of the paper, and our commands that reproduce them."""

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from string import Template
from typing import Any

from evals.compare import compare
from evals.grid import Grid
from evals.methods import PLANES, RIVAL_NAMES, TUNED, without_hasher
from evals.result import read_json
from evals.study import PaperCommand

_BY_SHAPE = ("codesize", "complexity", "throughput", "kernels")
"""Tasks that take a model's shape, and no model, hashers or documents."""
_ON_CPU = ("codesize", "complexity", "kernels")
"""Tasks that run no model."""


@dataclass(frozen=True)
class Item:
    """One table or figure.

    Attributes:
        name: as the paper numbers it, followed by `(PART)` if one figure takes several commands.
        title: what it shows.
        command: `evals TASK ...` without model, hashers and out; or that of another program, if none of our tasks
            measures it.
        differs: what differs from the paper, and why.
        documents: default number; 0 for tasks that take only a shape.
        paper: the paper's own numbers, if it prints some.
        against: (method, budget, other, its budget): differences to show, paired over documents.
        twice: also run it with --other-hashers, and show the difference.
        hub: whether its data come from a hub, so that --all skips it.
        stored: names of stored runs that show it, on any model, in the folder of --results.
        nothing_to_store: whether it is a drawing, a listing or a quotation, which no result can show.
    """

    name: str
    title: str
    command: str
    differs: tuple[str, ...]
    documents: int = 0
    paper: Grid | None = None
    against: tuple[tuple[str, float, str, float], ...] = ()
    twice: bool = False
    hub: bool = False
    stored: Sequence[str] = ()
    nothing_to_store: bool = False

    @property
    def task(self) -> str | None:
        """The command's task; None if it is another program's."""
        program, task, *_ = self.command.split()
        return task if program == "evals" else None

    def commands(self, settings: PaperCommand) -> list[list[str]]:
        """Return the commands. Raises: ValueError if there are none, or an option they need is missing."""
        if self.task is None:
            raise ValueError(f"{self.name} is shown by another program: {self.command}; {self.differs[0]}")
        if self.twice and settings.other_hashers is None:
            raise ValueError(
                f"{self.name} compares two sets of hashers: train one with `uv run hashtrain --text FOLDER --out "
                "OTHER` and give --other-hashers OTHER"
            )
        hashers = [settings.hashers, settings.other_hashers] if self.twice else [settings.hashers]
        count = str(settings.documents or self.documents)
        found = []
        for folder, made in zip(self.folders(settings), hashers, strict=True):
            words = [*self.command.split()[1:], "--out", str(folder)]
            if self.task not in _ON_CPU:
                words += ["--device", settings.device]
            if self.task not in _BY_SHAPE:
                words += ["--dtype", settings.dtype, "--model", settings.model, "--hashers", str(made)]
                words += ["--documents", count] if self.documents else []
            if self.task == "codelength" and settings.more_hashers:
                words += ["--more-hashers", *map(str, settings.more_hashers)]
            # Tuned rivals are measured where rivals are, by perplexity.
            if settings.tuned is not None and self.task == "ppl" and set(RIVAL_NAMES) & set(words):
                words += ["--tuned", str(settings.tuned)]
            found.append(words)
        return found

    def folders(self, settings: PaperCommand) -> list[Path]:
        """Return the folders of its runs."""
        name = self.name.replace(" ", "-").replace("(", "").replace(")", "")
        return [settings.out / name, *([settings.out / f"{name}-other"] if self.twice else [])]

    def lines(self, settings: PaperCommand) -> list[str]:
        """Format its commands for printing, with `OTHER` for missing options, or the other program's command."""
        if self.task is None:
            return [self.command]
        given = settings.other_hashers or Path("OTHER")
        return [" ".join(("evals", *words)) for words in self.commands(replace(settings, other_hashers=given))]

    def kept(self, settings: PaperCommand) -> list[Path]:
        """Return the stored results that show it: runs of its task which, on one model, have all its methods.

        An item with `twice` needs two.

        Raises: ValueError if a file is damaged.
        """
        files = [file for name in self.stored if (file := settings.results / f"{name}.json").is_file()]
        configs = {file: read_json(file, "store the run again").get("config", {}) for file in files}
        runs = {file: config for file, config in configs.items() if config.get("task") == self.task is not None}
        methods: dict[Any, set[str]] = {}
        for config in runs.values():
            methods.setdefault(config["model"], set()).update(config.get("methods", ()))
        wanted = set(self.values("--methods"))
        found = [file for file, config in runs.items() if wanted <= methods[config["model"]]]
        return found if len(found) > self.twice else []

    def lacking(self, settings: PaperCommand) -> list[str]:
        """Return the required hashers that are missing; tasks that take a shape need none."""
        if self.task in _BY_SHAPE:
            return []
        return without_hasher(self.values("--methods"), settings.hashers)

    def fitting(self, settings: PaperCommand) -> "Item":
        """Return the item without `planes` if that is all that the hashers lack, and it measures `transform`, too."""
        methods = self.values("--methods")
        if self.task in _BY_SHAPE or "transform" not in methods:
            return self
        other = [settings.other_hashers] if self.twice and settings.other_hashers is not None else []
        lacking = {name for folder in (settings.hashers, *other) for name in without_hasher(methods, folder)}
        if lacking != {"planes"}:
            return self
        words = [word for word in self.command.split() if word not in PLANES]
        against = tuple(pair for pair in self.against if not {pair[0], pair[2]} & set(PLANES))
        return replace(self, command=" ".join(words), against=against)

    def values(self, option: str) -> list[str]:
        """Return the values of an option of its command; none if it is not given."""
        words = self.command.split()
        start = words.index(option) + 1 if option in words else len(words)
        end = next((i for i in range(start, len(words)) if words[i].startswith("--")), len(words))
        return words[start:end]

    @property
    def number(self) -> str:
        """Its table or figure, without the part."""
        return self.name.partition(" (")[0]

    def differences(self, settings: PaperCommand) -> tuple[list[dict[str, Any]], list[Grid]]:
        """Return the paired differences from finished runs: as entries of `compare`, and as tables."""
        first, last = self.folders(settings)[0], self.folders(settings)[-1]
        pairs = list(self.against)
        if settings.tuned is not None:
            pairs += [(a, x, b + TUNED, y) for a, x, b, y in pairs if b in RIVAL_NAMES]
        found = [compare(first, first, (a, b), (x, y)) for a, x, b, y in pairs]
        if self.twice:
            found.append(compare(first, last, (None, None), (None, None)))
        return [entry for entries, _ in found for entry in entries], _joined([grid for _, grid in found])


def _items() -> tuple[Item, ...]:
    """Read every table and figure, in the paper's order: tables, then parts without a number, then figures."""
    data = tomllib.loads(Path(__file__).with_name("items.toml").read_text("utf-8"))
    words = {name: Template(text).safe_substitute(data["words"]) for name, text in data["words"].items()}
    found: list[Item] = []
    for given in data["items"]:
        if printed := given.pop("paper", None):
            title, header, *lines = printed
            given["paper"] = Grid(f"The paper's: {title}", header.split("|"), [[line.split("|") for line in lines]])
        given["command"] = Template(given["command"]).substitute(words)
        given["differs"] = tuple(Template(text).substitute(words) for text in given["differs"])
        given["against"] = tuple(map(tuple, given.get("against", ())))
        found.append(Item(**given))

    def place(item: Item) -> tuple[int, int]:
        kind, number, *_ = item.name.split()
        return ("table", "code", "figure").index(kind), int(number) if number.isdigit() else 0

    return tuple(sorted(found, key=place))


ITEMS = _items()
"""Every table and figure; those in the paper's own protocol follow those that suit the demo model."""


def _joined(grids: list[Grid]) -> list[Grid]:
    """Merge tables with the same title and header."""
    found: dict[tuple[str, ...], Grid] = {}
    for grid in grids:
        key = grid.title, *grid.header
        earlier = found.get(key)
        found[key] = grid if earlier is None else replace(earlier, sections=[*earlier.sections, *grid.sections])
    return list(found.values())
