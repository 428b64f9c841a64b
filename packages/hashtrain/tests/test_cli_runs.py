"""Whole runs of the command on a tiny model: a stored config and workers do not change the result."""

import json

import pytest
import torch
from hashtrain import Hasher
from hashtrain.cli import main
from hashtrain_runs import command


def test_a_run_stores_hashers_that_load_and_ends_with_json(folder, tiny_config, tmp_path, capsys):
    assert main(command(folder, tmp_path / "run")) == 0
    captured = capsys.readouterr()
    last = json.loads(captured.out.strip().splitlines()[-1])
    assert set(last["mean"]) == {"lsh", "paper", "transform"}
    assert "uv run evals ppl" in captured.out + captured.err
    metrics = json.loads((tmp_path / "run" / "metrics.json").read_text())
    for name in last["mean"]:
        hasher = Hasher.from_pretrained(tmp_path / "run" / name)
        hasher.require_match(tiny_config())
        assert hasher.layer_shares == (() if name == "lsh" else (1.0, 1.0))  # layer 0 stays dense, one is left
        assert [len(own) for own in hasher.head_shares] == (
            [] if name == "lsh" else [hasher.config.shape.num_kv_heads] * 2
        )
        assert 0 < metrics["hashers"][name]["kv_head"]["mean"]["iou"] <= 1
    assert not list((tmp_path / "run").glob(".work*"))
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert {(line["hasher"], line["layer"]) for line in lines} == {(name, n) for name in last["mean"] for n in (0, 1)}


@pytest.mark.slow
def test_hashers_and_figures_do_not_depend_on_the_number_of_workers(folder, tmp_path):
    found = []
    for workers in ("1", "2"):
        out = tmp_path / workers
        assert main(command(folder, out, "--only", "lsh", "planes", "--workers", workers)) == 0
        metrics = json.loads((out / "metrics.json").read_text())
        del metrics["seconds"]
        found.append((metrics, Hasher.from_pretrained(out / "planes").state_dict()))
    (one, mine), (other, theirs) = found
    assert one == other
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
