"""Whole runs of the command on a tiny model: streaming, interruptions and workers do not change the result."""

import importlib.util
import json

import pytest
import torch
from hashtrain import Hasher
from hashtrain.cli import main
from hashtrain.evaluation import budgets, remainder
from hashtrain.layers import transform
from hashtrain.reporting import report
from hashtrain.run import pipeline, repair, sources, stream
from hashtrain.run import prepare as prepare_module
from hashtrain_runs import FIGURES, command


def test_a_run_stores_hashers_that_load_and_ends_with_json(folder, tiny_config, tmp_path, capsys, monkeypatch):
    for name in FIGURES:
        monkeypatch.setattr(pipeline, name, getattr(report, name))
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
    for figure in ("training.png", "heads.png", "bits.png"):
        assert (tmp_path / "run" / figure).read_bytes().startswith(b"\x89PNG")
    assert not list((tmp_path / "run").glob(".work*"))
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert {(line["hasher"], line["layer"]) for line in lines} == {(name, n) for name in last["mean"] for n in (0, 1)}


@pytest.mark.slow
def test_tensorboard_gets_what_the_metrics_get(folder, tmp_path):
    pytest.importorskip("tensorboard", reason="hashtrain[tensorboard] is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert main(command(folder, tmp_path / "run", "--only", "planes", "--steps", "25", "--tensorboard")) == 0
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    found = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    steps = [(line["step"], line["loss"]) for line in lines if "loss" in line and line["layer"] == 1]
    events = [(event.step, event.value) for event in found.Scalars("planes/loss/1")]
    assert events == [(step, pytest.approx(loss, rel=1e-5)) for step, loss in steps]
    assert steps
    judged = {line["layer"]: line["iou"]["kv_head"] for line in lines if "iou" in line}
    assert {event.step: event.value for event in found.Scalars("planes/iou/kv_head")} == pytest.approx(judged, rel=1e-5)


@pytest.mark.slow
def test_a_streamed_run_makes_the_same_hashers_without_storing_what_it_trains_on(folder, tmp_path, monkeypatch, capsys):
    """Three contexts, of which the remainder may use one: the others are never on disk."""
    monkeypatch.setattr(prepare_module, "MAX_CONTEXTS", 1)
    monkeypatch.setattr(remainder, "MAX_CONTEXTS", 1)
    monkeypatch.setattr(transform, "CONTEXTS", 1)  # at most as many as are stored: test_reads.py
    monkeypatch.setattr(repair, "_CONTEXTS", 1)
    monkeypatch.setattr(budgets, "CONTEXTS", 1)
    found, kinds = [], ("--only", "lsh", "planes", "transform", "--contexts", "3", "--steps", "5", "--digits", "5")
    for more in ((), ("--stream",)):
        out = tmp_path / f"run{len(found)}"
        assert main(command(folder, out, *kinds, *more)) == 0
        metrics = json.loads((out / "metrics.json").read_text())
        del metrics["seconds"]
        lines = (out / "metrics.jsonl").read_text().splitlines()
        states = [Hasher.from_pretrained(out / name).state_dict() for name in ("lsh", "planes", "transform")]
        found.append((metrics, sorted(lines), states))
    (one, lines, mine), (other, others, theirs) = found
    assert one == other
    assert lines == others
    assert all(torch.equal(a[name], b[name]) for a, b in zip(mine, theirs, strict=True) for name in a)
    digits = [tensor for name, tensor in mine[2].items() if name.endswith("digits")]
    assert digits
    assert {int(tensor.max()) for tensor in digits} == {5}
    assert one["digits"] == 5
    capsys.readouterr()
    for more in ((), ("--stream",)):
        assert main(command(folder, tmp_path / "dry", *kinds, *more, "--dry-run")) == 0
        found.append(json.loads(capsys.readouterr().out.strip().splitlines()[-1])["dry_run"]["disk"])
    whole, keys, row = (512 * 2 * n * 32 * 2 for n in (8, 2, 4 / 512))  # of layers, heads, head_dim, bytes
    few = keys + 128 * (row + 2 * 4)  # two steps of 64 rows read each context
    assert found[2:] == [n * few + whole + keys + 4 * (row + 2 * 4) for n in (2, 0)]  # four rows are evaluated
    assert main(command(folder, tmp_path / "no", *kinds, "--stream", "--spread", "data")) == 2
    assert "use --spread layers" in capsys.readouterr().err


def test_a_model_that_does_not_fit_is_run_layer_by_layer_to_the_same_bits(folder, tmp_path, monkeypatch, capsys):
    pytest.importorskip("accelerate", reason="hashtrain[offload] is not installed")
    placed, original = [], sources.load_model

    def noted(*given):
        model, tokenizer = original(*given)
        placed.append(set(getattr(model, "hf_device_map", {"": "whole"}).values()))
        return model, tokenizer

    monkeypatch.setattr(sources, "load_model", noted)
    found = []
    for more in ((), ("--backbone-memory", "0.002")):
        out = tmp_path / f"run{len(found)}"
        assert main(command(folder, out, "--only", "planes", *more)) == 0
        found.append(Hasher.from_pretrained(out / "planes").state_dict())
    assert placed[0] == {"whole"}
    assert "disk" in placed[-1]  # the part that stays in the file
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(command(folder, tmp_path / "no", "--backbone-memory", "0.003")) == 2
    assert "uv pip install './packages/hashtrain[offload]'" in capsys.readouterr().err


@pytest.mark.slow
def test_a_streamed_run_goes_on_where_it_was_stopped(folder, tmp_path, monkeypatch):
    kinds = ("--only", "planes", "--contexts", "3", "--steps", "6", "--stream", "--checkpoint-seconds", "0")
    assert main(command(folder, tmp_path / "whole", *kinds)) == 0
    original, runs = stream.run_context, []

    def dies(model, ids, **how):
        runs.append(len(ids))
        if len(runs) == 4:
            raise OSError("the power went")
        return original(model, ids, **how)

    monkeypatch.setattr(stream, "run_context", dies)
    assert main(command(folder, tmp_path / "cut", *kinds)) == 2
    assert main(command(folder, tmp_path / "cut", *kinds)) == 0
    assert len(runs) == 4 + 3  # three steps were done, three remain
    whole, cut = (Hasher.from_pretrained(tmp_path / name / "planes").state_dict() for name in ("whole", "cut"))
    assert all(torch.equal(whole[name], cut[name]) for name in whole)


@pytest.mark.parametrize(("only", "first"), [("planes", "train"), ("transform", "capture")])
def test_streamed_training_begins_before_captures_unless_its_start_reads_them(
    only, first, folder, tmp_path, monkeypatch
):
    """Both have the same result as without --stream: above."""
    order = []
    for name, doing in (("make_all", "capture"), ("train_all", "train")):
        own = getattr(pipeline, name)

        def noted(*given, own=own, doing=doing):
            order.append(doing)
            return own(*given)

        monkeypatch.setattr(pipeline, name, noted)
    assert main(command(folder, tmp_path / "run", "--only", only, "--stream")) == 0
    assert sorted(order) == ["capture", "train"]
    assert order[0] == first


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


def test_a_stored_config_repeats_the_run_and_the_command_line_wins(folder, tmp_path):
    changed = ("--only", "lsh", "--bits", "64", "--fraction", "0.1", "--stream")
    assert main(command(folder, tmp_path / "one", *changed)) == 0
    stored = tmp_path / "one" / "config.toml"
    assert "stream = true\n" in stored.read_text()
    assert main(["train", "--config", str(stored), "--out", str(tmp_path / "two")]) == 0
    assert main([f"--config={stored}", "--out", str(tmp_path / "three"), "--bits", "32"]) == 0
    one, two, three = (Hasher.from_pretrained(tmp_path / name / "lsh") for name in ("one", "two", "three"))
    assert all(torch.equal(tensor, two.state_dict()[name]) for name, tensor in one.state_dict().items())
    assert (one.config.bits, three.config.bits) == (64, 32)
    assert json.loads((tmp_path / "two" / "metrics.json").read_text())["fraction"] == 0.1
    assert json.loads((tmp_path / "two" / "environment.json").read_text())["device"] == "cpu"


def test_capture_alone_is_gone_on_from_by_train(folder, tmp_path, monkeypatch):
    words = command(folder, tmp_path / "run", "--only", "lsh")
    assert main(["capture", *words]) == 0
    assert len(list((tmp_path / "run" / ".work").glob("*/*.safetensors"))) == 3
    monkeypatch.delattr("hashtrain.run.sources.capture_one")
    assert main(["train", *words]) == 0
