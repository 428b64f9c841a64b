"""Quality against bytes read: what is counted, what is best, and which runs can be combined."""

import dataclasses
import json

import pytest
from evals import cli, frontier_times
from evals.base_commands import PplCommand
from evals.frontier import points
from evals.result import Result, read_result, rows_from_json
from evals.tasks import ppl
from rich.console import Console
from sparse_decode import Budget
from sparse_decode.costs.traffic import step_bytes

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


def test_times_are_shown_beside_bytes(runs, made, tmp_path, capsys, monkeypatch):
    """Hashes, at each budget and with each setting, in turns with dense steps; the oracle and rivals are not timed."""
    kept = {}

    def in_turns(turns, steps, warmup, repeats, sync):
        for name, turn in turns.items():
            turn.prepare()
            turn.step(0)
            turn.finish()
            kept[name] = 0.001 * (len(kept) + 1)
        return {name: [[seconds] * steps] * repeats for name, seconds in kept.items()}

    monkeypatch.setattr(frontier_times, "in_turns", in_turns)
    monkeypatch.setattr(frontier_times, "STEPS", 1)
    monkeypatch.setattr(frontier_times, "WARMUP", 0)
    own = ["--model", str(made.model), "--hashers", str(made.hashers)]
    first, again = tmp_path / "first", tmp_path / "again"
    words = ["frontier", *map(str, runs), *own, "--clock", "--tokens", "96", "--out", str(first)]
    assert cli.main(words) == 0
    hashed = {"lsh at 50 %", "lsh at 10 %", "transform+remainder at 50 %", "transform+remainder at 10 %"}
    assert kept.keys() == {"dense", *hashed, "transform+remainder, shortlist 2, values 50 % at 20 %"}
    table = (first / "frontier.md").read_text()
    found = points(map(read_result, runs), HEAD_DIM)
    shown = [line.split("|")[-2].strip() for line in table.splitlines() if line.startswith("| ")][1:]
    named = [f"{1000 * kept[key]:.1f}" if (key := frontier_times.name_of(point)) in kept else "" for point in found]
    assert shown[-len(found) :] == named
    assert "96 random keys, bfloat16" in table
    assert "(dense 1.0 ms)" in table
    assert cli.main(["frontier", *map(str, runs), *own, "--times", str(first / "times.json"), "--out", str(again)]) == 0
    assert (again / "frontier.md").read_text() == table
    capsys.readouterr()


def test_times_of_another_model_are_not_measured(runs, made, tmp_path, capsys):
    words = ["frontier", *map(str, runs), "--hashers", str(made.hashers), "--clock", "--out", str(tmp_path / "out")]
    assert cli.main(words) == 2
    assert "--model must be the model of the runs" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("text", ["{}", '{"tokens": 8, "environment": {}, "steps": {"dense": {"ms": 1}}}', "[]", "x"])
def test_damaged_times_are_refused(runs, made, tmp_path, capsys, text):
    path = tmp_path / "times.json"
    path.write_text(text)
    words = [
        "frontier",
        *map(str, runs),
        "--model",
        str(made.model),
        "--times",
        str(path),
        "--out",
        str(tmp_path / "o"),
    ]
    assert cli.main(words) == 2
    assert "measure them with `evals frontier --clock`" in capsys.readouterr().err
