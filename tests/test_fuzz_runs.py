"""Damaged and lying runs of evals, tables and settings: the law stands in fuzz_damage.py."""

import json
from dataclasses import astuple

import pytest
from evals.cli import main as evals
from evals.results import Result, Row, as_written, read_result, rows_to_text
from evals.runner import RunFolder
from evals.tables import grids
from fuzz_damage import LAW, altered, damaged, found
from hashtrain.settings.toml import with_config
from hashtrain.usage import UsageError
from hypothesis import given
from hypothesis import strategies as st

# Runs of evals.


ROW = Row("needle", "lsh", "lsh", 64, 0.1, "visible", 0.1, 1, 0, 0, "decode", "recall", 0.5, 0.4, 0.6, 2, 0, "1.0")
CONFIG = {"task": "needle", "model": "demo", "dense_layers": 1, "budgets": [0.1], "methods": ["lsh"], "seed": 0}
CELL = {"method": "lsh", "budget": 0.1, "kind": "word", "rouge_l": 0.5, "recall": 1.0, "substring": 1.0, "log_prob": -1}


@pytest.fixture(scope="module")
def run(folder):
    """The JSON values of a finished run's files."""
    rows = [ROW, Row(*astuple(ROW)[:1], "recent", "recent", None, *astuple(ROW)[4:])]
    files = {"config": CONFIG, "environment": {"python": "3.12"}, "rows": json.loads(rows_to_text(rows))}
    files |= {f"samples/000{i}": {"document": f"{i}", "tokens": "abc", "cells": [CELL, CELL]} for i in range(2)}
    (folder / "run" / "samples").mkdir(parents=True)
    for file, value in files.items():
        (folder / "run" / f"{file}.json").write_text(json.dumps(value))
    return files


def tables(run):
    """Format a run as `evals report` does."""
    with as_written(str(run)):
        return grids(read_result(run))


@LAW
@given(st.data())
def test_a_run_that_lies_is_refused_or_shown_as_it_is(folder, run, data):
    name = data.draw(st.sampled_from(sorted(run)))
    path = folder / "run" / f"{name}.json"
    text = data.draw(st.one_of(altered(run[name]), damaged(json.dumps(run[name]).encode())))
    path.write_bytes(text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text)
    try:
        read = found(lambda: read_result(folder / "run"), str(folder / "run"))
        if read is not None:
            assert isinstance(read, Result)
            assert all(row.value - row.value == 0 for row in read.rows)
            found(lambda: tables(folder / "run"), str(folder / "run"))
    finally:
        path.write_text(json.dumps(run[name]))


@LAW
@given(st.data())
def test_a_stored_sample_that_lies_is_refused_or_meant(folder, run, data):
    class Document:
        name, digest = "0", "abc"

    held = RunFolder(folder / "run", CONFIG)
    path = folder / "run" / "samples" / "0000.json"
    whole = run["samples/0000"]
    text = data.draw(st.one_of(altered(whole), damaged(json.dumps(whole).encode())))
    path.write_bytes(text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text)
    try:
        found(lambda: held.sample(0, Document(), lambda sample: sample["cells"], dict), "0000.json")
    finally:
        path.write_text(json.dumps(whole))


def test_a_figure_that_links_to_another_place_is_not_shown(folder, run, tmp_path, capsys):
    (tmp_path / "secret").write_text("secret")
    (folder / "run" / "figure.png").symlink_to(tmp_path / "secret")
    try:
        assert evals(["report", str(folder / "run"), "--out", str(tmp_path / "page")]) == 2
        assert "is a link to a place outside its folder" in capsys.readouterr().err
    finally:
        (folder / "run" / "figure.png").unlink()


# Settings.


TOML = b'bits = 64\nout = "runs/x"\nonly = ["planes", "lsh"]\nlearning_rate = 0.01\nstream = true\n'


@LAW
@given(st.one_of(damaged(TOML), st.sampled_from([b"a = " + b"[" * 9000, b"bits = " + b"9" * 5000, b'out = "--help"'])))
def test_settings_that_cannot_be_are_refused_or_meant(folder, content):
    path = folder / "damaged.toml"
    path.write_bytes(content)
    words = found(lambda: with_config(["train", "--config", str(path)]), "damaged.toml", UsageError)
    assert words is None or words[0] == "train"
    assert words is None or "--help" not in words
