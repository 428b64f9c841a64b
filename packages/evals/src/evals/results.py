"""Results in long form, one row per number, and the files of a run."""

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from hashtrain.files.untrusted import one_line, read_json_object

from evals.machine import own_versions


@dataclass(frozen=True)
class Row:
    """One number with everything it depends on."""

    task: str
    method: str
    variant: str
    bits: int | None
    budget: float | None
    """Share of the tokens to select; None for dense."""
    rule: str
    """What the budget is a share of: `visible`: each row's visible tokens, at least 1; `fixed`: the whole context, at
    least 20. With `tokens` the budget is a number of tokens. `as NAME`: as many as the method NAME took on the same
    context at that budget."""
    density: float | None
    """Measured: tokens attended to / tokens visible, over the sparse layers."""
    dense_layers: int
    sink: int
    recent: int
    phase: str
    """Sparse rows: `everywhere`; `decode`: those that predict an answer after a dense prefill; or `rows`: sampled from
    a dense pass."""
    metric: str
    value: float
    low: float | None
    """End of the 95 % interval over documents."""
    high: float | None
    n: int
    """Number of documents."""
    seed: int
    versions: str
    against: str | None = None
    """If given, the value is this row's method minus that one, paired over documents."""
    heads: str | None = None
    """One set per `kv_head` or per `query_head`."""
    layer: int | None = None
    """None: the mean over the sparse layers."""
    head: int | None = None
    """None: the mean over heads."""
    where: str | None = None
    """What else the number depends on, as text: a kind of exercise, a length, a part of a computation."""
    stderr: float | None = None
    """Standard error over items, if a benchmark reports it."""


@dataclass(frozen=True)
class Result:
    """A finished run: its settings, its environment, and its rows."""

    config: dict[str, Any]
    environment: dict[str, str]
    rows: list[Row]

    def select(self, **wanted: Any) -> list[Row]:
        """Return the rows with these values in these columns."""
        return [row for row in self.rows if all(getattr(row, name) == value for name, value in wanted.items())]

    def one(self, **wanted: Any) -> Row:
        """Return the only row with these values. Raises: ValueError if there is none, or more than one."""
        found = self.select(**wanted)
        if len(found) != 1:
            raise ValueError(f"expected one row with {wanted}, got {len(found)}")
        return found[0]


def versions() -> str:
    """Return the versions of this project's packages in one line."""
    return ", ".join(f"{name} {version}" for name, version in own_versions().items())


def write_json(path: Path, data: Any) -> None:
    """Replace a file by JSON, atomically."""
    from hashtrain.files.atomic import write_text  # imported here: it loads torch, which `--help` does not need

    write_text(path, json.dumps(data, indent=1, allow_nan=False) + "\n")


read_json = read_json_object


def rows_to_text(rows: list[Row]) -> str:
    """Format rows as a JSON table: column names once, then one line per row."""
    lines = ",\n".join(json.dumps(list(asdict(row).values()), allow_nan=False) for row in rows)
    return f'{{"columns": {json.dumps([f.name for f in fields(Row)])},\n"rows": [\n{lines}\n]}}\n'


def rows_from_json(data: dict[str, Any]) -> list[Row]:
    """Parse the table of `rows_to_text`. Raises: ValueError if the columns are not those of `Row`."""
    try:
        return [Row(**dict(zip(data["columns"], line, strict=True))) for line in data["rows"]]
    except (KeyError, TypeError, ValueError) as error:
        what = f"rows of another version of evals, or damaged: {one_line(error)}"
        raise ValueError(f"{what}; rerun the command") from error


def read_result(folder: Path) -> Result:
    """Read a finished run. Raises: ValueError if the folder holds none."""
    if not (folder / "rows.json").is_file():
        raise ValueError(f"no finished run in {folder}: expected rows.json there; rerun the command that began it")
    remedy = "rerun the command"
    config, software, rows = (read_json(folder / f"{name}.json", remedy) for name in ("config", "environment", "rows"))
    for name, data, texts in (("config", config, ["task"]), ("environment", software, list(software))):
        if wrong := [key for key in texts if not isinstance(data.get(key), str)]:
            raise ValueError(f"{folder / name}.json is corrupt ({wrong[0]} must be a string); {remedy}")
    try:
        return Result(config, software, rows_from_json(rows))
    except ValueError as error:
        raise ValueError(f"{folder / 'rows.json'}: {error}") from error
