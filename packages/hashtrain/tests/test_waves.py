"""Captures without unused queries, in waves: bit-identical hashers with a fraction of the disk."""

import json
from dataclasses import replace

import pytest
import torch
from hashtrain import Hasher, ModelShape, TrainConfig
from hashtrain.cli import main
from hashtrain.config import HasherConfig
from hashtrain.data.capture import capture_one, context_bytes
from hashtrain.data.captured import EVERYTHING, Capture, Kept
from hashtrain.evaluation import remainder
from hashtrain.hasher import make_layer
from hashtrain.layers import transform
from hashtrain.run import pipeline, waves
from hashtrain.run import prepare as prepare_module
from hashtrain.run.settings import PAPER, TrainCommand
from hashtrain.run.waves import Reads, training_reads
from hashtrain.training import choose
from hashtrain.training.train_config import rows_of_steps
from hashtrain.training.trainer import Training
from hashtrain_runs import command, stored

LLAMA_3_8B = ModelShape(32, 32, 8, 128)
SHAPE = ModelShape(2, 4, 2, 32)
READERS = [(remainder, "MAX_CONTEXTS"), (transform, "CONTEXTS"), (choose, "CONTEXTS")]
"""How many first contexts each part of a run reads whole."""


@pytest.fixture
def one_whole(monkeypatch):
    """Runs store only their first context whole, and no start, choice or calibration reads another one."""
    for module, name in ((prepare_module, "MAX_CONTEXTS"), *READERS):
        monkeypatch.setattr(module, name, 1)


def test_what_is_read_whole_is_stored_whole():
    assert max(getattr(*of) for of in READERS) <= prepare_module.MAX_CONTEXTS


@pytest.mark.parametrize(("variant", "heads"), [("planes", 2), ("paper", 4)])
@pytest.mark.parametrize("changes", [{}, {"loss": "reconstruction", "keys_first": 0.5}])
def test_the_rows_of_all_steps_are_known_before_the_first(variant, heads, changes, data, monkeypatch):
    config = replace(TrainConfig(steps=7, min_position=32, seed=3), **changes)
    wanted, read, original = rows_of_steps(config, 1, heads, 512), [], Capture.queries
    monkeypatch.setattr(Capture, "queries", lambda own, *at: read.append(at[2]) or original(own, *at))
    Training(make_layer(HasherConfig(variant, SHAPE, bits=32), 1, 0), 1, data, config).run()
    assert torch.equal(torch.stack(read).int(), wanted)


def test_rows_that_were_kept_are_those_of_all_queries(model, data, tmp_path):
    ids = torch.randint(0, 97, (512,), generator=torch.Generator().manual_seed(1))  # the first context of `data`
    kept = Kept((torch.tensor([3, 70, 511], dtype=torch.int32), torch.empty(0, dtype=torch.int32)), values=False)
    few = Capture(tmp_path, 1)
    capture_one(model, ids, few.file(0), kept=kept)
    rows = torch.tensor([511, 3, 511])
    assert torch.equal(few.queries(0, 0, rows), data.queries(0, 0, rows))
    assert torch.equal(data.queries(0, 0, rows), data.read(0, 0)[0][:, :, rows])
    assert torch.equal(few.keys(0, 1)[0], data.keys(0, 1)[0])
    for layer, asked, lost in ((0, torch.tensor([3, 4]), 4), (1, torch.tensor([9]), 9), (0, None, 0)):
        with pytest.raises(ValueError, match=f"but not of row {lost}; .*capture again"):
            few.queries(0, layer, asked)
    with pytest.raises(ValueError, match="damaged"):
        few.values(0, 0)


def test_hashers_are_the_same_bits_with_few_queries_and_in_waves(folder, tmp_path, monkeypatch, capsys, one_whole):
    """Four contexts, six steps: the disk that is given has room for the first context and one other."""
    words = ["--contexts", "4", "--steps", "6", "--rows", "32", "--only", "lsh", "planes", "transform"]

    def told(*more):
        capsys.readouterr()
        assert main(command(folder, tmp_path / "dry", *words, *more, "--dry-run")) == 0
        return json.loads(capsys.readouterr().out.strip().splitlines()[-1])["dry_run"]

    few, original, sizes = told(), pipeline.run_jobs, []
    other = context_bytes(SHAPE, 512, torch.bfloat16, 64, values=False)
    always = 2 * context_bytes(SHAPE, 512, torch.bfloat16)
    assert (few["disk"], few["waves"]) == (always + 3 * other, 1)
    room = f"{(always + 1.5 * other) / 1e9:.9f}"
    assert (told("--disk", room)["disk"], told("--disk", room)["waves"]) == (always + other, 6)

    def noted(*given):
        sizes.append(sum(path.stat().st_size for path in (tmp_path / "waves").glob(".work/[th]*/*.safetensors")))
        return original(*given)

    for name, more in (("few", ()), ("waves", ("--disk", room)), ("all", ())):
        with monkeypatch.context() as patch:
            patch.setattr(pipeline, "run_jobs", noted)
            if name == "all":
                patch.setattr(Reads, "kept", lambda reads, context: EVERYTHING)
            assert main(command(folder, tmp_path / name, *words, *more)) == 0
    assert stored(tmp_path / "few") == stored(tmp_path / "all") == stored(tmp_path / "waves")
    assert max(sizes) < always + other + 4 * 4096  # headers


@pytest.mark.parametrize("moment", [1, 4])
def test_a_run_in_waves_goes_on_in_the_wave_where_it_was_stopped(folder, tmp_path, monkeypatch, one_whole, moment):
    """Seven captures before, and as many as are left after."""
    words = ["--only", "planes", "--contexts", "4", "--steps", "6", "--checkpoint-seconds", "100"]
    assert main(command(folder, tmp_path / "whole", *words)) == 0
    other = context_bytes(SHAPE, 512, torch.bfloat16, 128, values=False)
    always = 2 * context_bytes(SHAPE, 512, torch.bfloat16)
    words += ["--disk", f"{(always + 1.5 * other) / 1e9:.9f}"]
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


def test_the_papers_schedule_takes_a_fifth_of_the_disk():
    """For Llama-3-8B a context of 8,192 tokens has 3.2 GB of queries, keys and values, and 64 of its rows are read."""
    given = TrainCommand(model="llama", **PAPER, only=("lsh", "paper", "planes", "transform"))
    reads = training_reads(given, LLAMA_3_8B, given.contexts, 32)
    every = context_bytes(LLAMA_3_8B, 8192, torch.bfloat16)
    assert reads.bytes(range(8192)) == pytest.approx(4.76e12, rel=0.01)
    assert reads.bytes(range(8192)) < 8192 * every / 5
    parts = waves.waves(reads, always := reads.bytes(range(32)), int(500e9))
    assert [step for part in parts for step in part] == [*range(8192)]
    assert all(always + len(part) * reads.bytes([32]) <= 500e9 for part in parts)
    with pytest.raises(OSError, match="not enough free disk for captures: expected 103"):
        waves.waves(reads, always, always)
