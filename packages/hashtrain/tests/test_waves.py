"""Captures with few queries, in waves: bit-identical hashers with a fraction of the disk."""

import json

import pytest
import torch
from hashtrain import Hasher, ModelShape
from hashtrain.cli import main
from hashtrain.data import captured
from hashtrain.data.capture import capture_one, context_bytes
from hashtrain.data.captured import Capture
from hashtrain.evaluation import remainder
from hashtrain.layers import transform
from hashtrain.run import pipeline, waves
from hashtrain.run import prepare as prepare_module
from hashtrain.training import choose
from hashtrain_runs import command, stored

LLAMA_3_8B = ModelShape(32, 32, 8, 128)
SHAPE = ModelShape(2, 4, 2, 32)
READERS = [(remainder, "MAX_CONTEXTS"), (transform, "CONTEXTS"), (choose, "CONTEXTS")]
"""How many first contexts each part of a run reads whole."""


@pytest.fixture
def one_whole(monkeypatch):
    """Runs store only their first context whole, no start, choice or calibration reads another one, and contexts of 512
    tokens keep every eighth query."""
    for module, name in ((prepare_module, "MAX_CONTEXTS"), *READERS):
        monkeypatch.setattr(module, name, 1)
    monkeypatch.setattr(captured, "FEW", 60)


def test_what_is_read_whole_is_stored_whole():
    assert max(getattr(*of) for of in READERS) <= prepare_module.MAX_CONTEXTS


def test_queries_that_were_kept_are_those_of_all(model, data, tmp_path, monkeypatch):
    monkeypatch.setattr(captured, "FEW", 50)
    ids = torch.randint(0, 97, (512,), generator=torch.Generator().manual_seed(1))  # the first context of `data`
    few = Capture(tmp_path, 1)
    capture_one(model, ids, few.file(0), whole=False)
    rows = torch.tensor([510, 30, 510])
    assert (few.stride(0), data.stride(0)) == (10, 1)
    assert torch.equal(few.queries(0, 0, rows), data.queries(0, 0, rows))
    assert torch.equal(data.queries(0, 0, rows), data.read(0, 0)[0][:, :, rows])
    assert torch.equal(few.keys(0, 1)[0], data.keys(0, 1)[0])
    for asked in (torch.tensor([3]), None):
        with pytest.raises(ValueError, match=r"holds the queries of every 10th row alone; .*capture again"):
            few.queries(0, 0, asked)
    with pytest.raises(ValueError, match="damaged"):
        few.values(0, 0)
    size = few.file(0).stat().st_size
    assert 0 < size - context_bytes(SHAPE, 512, torch.bfloat16, whole=False) < 4096  # the header


def test_hashers_are_the_same_bits_in_waves(folder, tmp_path, monkeypatch, capsys, one_whole):
    """Four contexts, six steps: the disk that is given has room for the first context and one other."""
    words = ["--contexts", "4", "--steps", "6", "--rows", "32", "--only", "lsh", "planes", "transform"]

    def told(*more):
        capsys.readouterr()
        assert main(command(folder, tmp_path / "dry", *words, *more, "--dry-run")) == 0
        return json.loads(capsys.readouterr().out.strip().splitlines()[-1])["dry_run"]

    original, sizes = pipeline.run_jobs, []
    other = context_bytes(SHAPE, 512, torch.bfloat16, whole=False)
    always = 2 * context_bytes(SHAPE, 512, torch.bfloat16)
    room = f"{(always + 1.5 * other) / 1e9:.9f}"
    assert [told(*more)[what] for more in ((), ("--disk", room)) for what in ("disk", "waves")] == [
        *(always + 3 * other, 1),
        *(always + other, 6),
    ]

    def noted(*given):
        sizes.append(sum(path.stat().st_size for path in (tmp_path / "waves").glob(".work/[th]*/*.safetensors")))
        return original(*given)

    monkeypatch.setattr(pipeline, "run_jobs", noted)
    for name, more in (("all", ()), ("waves", ("--disk", room))):
        assert main(command(folder, tmp_path / name, *words, *more)) == 0
    assert stored(tmp_path / "all") == stored(tmp_path / "waves")
    assert max(sizes) < always + other + 4 * 4096  # headers


@pytest.mark.parametrize("moment", [1, 4])
def test_a_run_in_waves_goes_on_in_the_wave_where_it_was_stopped(folder, tmp_path, monkeypatch, one_whole, moment):
    """Seven captures before, and as many as are left after."""
    words = ["--only", "planes", "--contexts", "4", "--steps", "6", "--checkpoint-seconds", "100"]
    assert main(command(folder, tmp_path / "whole", *words)) == 0
    other = context_bytes(SHAPE, 512, torch.bfloat16, whole=False)
    words += ["--disk", f"{(2 * context_bytes(SHAPE, 512, torch.bfloat16) + 1.5 * other) / 1e9:.9f}"]
    original, made = waves.capture_one, []

    def dies(model, ids, path, *more, **how):
        made.append(path.name)
        if len(made) == 2 + moment:
            raise OSError("the power went")
        return original(model, ids, path, *more, **how)

    monkeypatch.setattr(waves, "capture_one", dies)
    assert main(command(folder, tmp_path / "cut", *words)) == 2
    assert main(command(folder, tmp_path / "cut", *words)) == 0
    numbers = [int(name[:5]) for name in made[2:]]  # after the first context and the held-out one
    wanted = [1, 2, 3, 1]  # steps 1, 2, 3, 5; context 0 is always there
    assert numbers == [*wanted[:moment], *wanted[moment - 1 :]]
    one, other = (Hasher.from_pretrained(tmp_path / name / "planes").state_dict() for name in ("whole", "cut"))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_the_papers_schedule_takes_a_fourth_of_the_disk(tmp_path):
    """For Llama-3-8B a context of 8,192 tokens has 3.2 GB of queries, keys and values, and 64 of its rows are read."""
    source = waves.Source("train", tmp_path, [torch.empty(8192)] * 8192, 32, LLAMA_3_8B, "", "cpu")
    assert source.bytes(range(8192)) == pytest.approx(5.58e12, rel=0.01)
    parts = waves.waves(source, 8192, always := source.bytes(range(32)), int(500e9))
    assert [step for part in parts for step in part] == [*range(8192)]
    assert all(always + len(part) * source.bytes([32]) <= 500e9 for part in parts)
    with pytest.raises(OSError, match="not enough free disk for captures: expected 103"):
        waves.waves(source, 8192, always, always)
