"""Quality against bytes read: what is counted, what is best, and which runs can be combined."""

import dataclasses
import json

import pytest
from evals import cli
from evals.base_commands import PplCommand
from evals.frontier import points
from evals.result import Result, read_result, rows_from_json
from evals.tasks import ppl
from rich.console import Console
from sparse_decode import Budget
from sparse_decode.traffic import step_bytes

QUIET = Console(quiet=True)
HEAD_DIM = 32  # of the tiny model


@pytest.fixture(scope="module")
def runs(made, tmp_path_factory):
    """Two runs of the tiny model on the same contexts: in full, and with a shortlist and fewer values."""
    root = tmp_path_factory.mktemp("frontier")
    given = {
        "model": str(made.model),
        "hashers": made.hashers,
        "text": (made.text,),
        "documents": 2,
        "context": 128,
        "rules": ("visible",),
        "phase": "decode",
    }
    full = {"methods": ("oracle", "lsh", "transform+remainder", "quest"), "budgets": (0.5, 0.1)}
    less = {"methods": ("transform+remainder", "oracle"), "budgets": (0.2,), "shortlist": 2, "values": 0.5}
    for name, own in (("full", full), ("less", less)):
        ppl.run(PplCommand(**given, **own, out=root / name), QUIET)
    return root / "full", root / "less"


def test_bytes_are_those_of_what_was_read(runs):
    found = {(point.line, point.budget): point for point in points(map(read_result, runs), HEAD_DIM)}
    n = 128 - 32  # the middle of the scored half

    def share(count, **how):
        more = {key: how.pop(key) for key in ("bits", "remainder") if key in how}
        return step_bytes(n, Budget(count, **how), HEAD_DIM, **more).share

    assert found["lsh", 0.1].share == share(0.1, bits=64, remainder=False)
    assert found["transform+remainder", 0.5].share == share(0.5, bits=64)
    listed = found["transform+remainder, shortlist 2, values 50 %", 0.2]
    assert listed.share == share(0.2, bits=64, shortlist=2, values=0.5)
    assert found["oracle", 0.2].share == share(0.2, bits=0, remainder=False)  # a shortlist does not affect it
    (kept,) = read_result(runs[0]).select(method="quest", budget=0.5, metric="kl", against=None)
    assert found["quest", 0.5].share == share(kept.density, bits=2 * 16 * HEAD_DIM // 16, remainder=False)


def test_the_frontier_is_what_nothing_beats_in_both(runs):
    found = points(map(read_result, runs), HEAD_DIM)
    assert [point.share for point in found] == sorted(point.share for point in found)
    real = [point for point in found if point.method != "oracle"]
    best = [point for point in real if point.best]
    assert [point.kl.value for point in best] == sorted({point.kl.value for point in best}, reverse=True)
    for point in real:
        better = [other for other in best if other.share <= point.share and other.kl.value <= point.kl.value]
        assert better == [point] if point.best else better
    assert not any(point.best for point in found if point.method == "oracle")


def test_the_command_writes_a_table_and_a_figure(runs, made, tmp_path, capsys):
    words = ["frontier", *map(str, runs), "--model", str(made.model), "--out", str(tmp_path / "out")]
    assert cli.main(words) == 0
    last = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert last["frontier"]
    assert (tmp_path / "out" / "frontier.png").read_bytes()[:4] == b"\x89PNG"
    table = (tmp_path / "out" / "frontier.md").read_text()
    assert "transform+remainder, shortlist 2, values 50 %" in table


@pytest.mark.parametrize("name", ["context", "documents", "model_identity", "phase"])
def test_runs_of_other_protocols_are_refused(runs, made, tmp_path, capsys, name, monkeypatch):
    other = read_result(runs[1])
    changed = Result({**other.config, name: "another"}, other.environment, other.rows)
    from evals import result

    stored = {runs[0]: read_result(runs[0]), runs[1]: changed}
    monkeypatch.setattr(result, "read_result", stored.__getitem__)
    assert cli.main(["frontier", *map(str, runs), "--model", str(made.model), "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert f"the runs must have one model, text and protocol, got {name} " in error
    assert not (tmp_path / "out").exists()


def test_tuned_rivals_are_left_out(runs):
    result = read_result(runs[0])
    rows = [dataclasses.replace(row, method="quest-tuned") if row.method == "quest" else row for row in result.rows]
    found = points([Result(result.config, result.environment, rows)], HEAD_DIM)
    assert {point.method for point in found} == {"oracle", "lsh", "transform+remainder"}


def test_stored_runs_can_be_drawn(pytestconfig):
    """As in the figure of README.md."""
    folder = pytestconfig.rootpath / "docs" / "results"
    results = []
    for name in ("second_english", "short_english", "values_english"):
        data = json.loads((folder / f"{name}.json").read_text())
        results.append(Result(data["config"], data["environment"], rows_from_json(data)))
    best = [point for point in points(results, 64) if point.best]
    assert all(point.method.endswith("+remainder") for point in best if point.share > 0.03)
