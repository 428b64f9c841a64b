"""Captures without unused queries: bit-identical hashers with a fraction of the disk."""

import json
from dataclasses import replace

import pytest
import torch
from hashtrain import ModelShape, TrainConfig
from hashtrain.artefact.hasher import make_layer
from hashtrain.cli import main
from hashtrain.config import HasherConfig
from hashtrain.data import capture
from hashtrain.data.capture import capture_one, context_bytes
from hashtrain.data.captured import EVERYTHING, Capture, Kept
from hashtrain.evaluation import budgets, remainder
from hashtrain.layers import transform
from hashtrain.machine.distribute import Ranks
from hashtrain.run import prepare as prepare_module
from hashtrain.run import repair
from hashtrain.run.reads import Reads, training_reads, validation_reads
from hashtrain.settings.train_command import PAPER, TrainCommand
from hashtrain.training.rows import rows_of_steps
from hashtrain.training.trainer import Training
from hashtrain_runs import command, stored

LLAMA_3_8B = ModelShape(32, 32, 8, 128)
SHAPE = ModelShape(2, 4, 2, 32)
HEADER = 4096  # bytes of a file in addition to its tensors


@pytest.fixture
def one_whole(monkeypatch):
    """Runs store only their first context whole, and no start, calibration or repair reads another one."""
    for module, name in (
        (prepare_module, "MAX_CONTEXTS"),
        (remainder, "MAX_CONTEXTS"),
        (transform, "CONTEXTS"),
        (repair, "_CONTEXTS"),
        (budgets, "CONTEXTS"),
    ):
        monkeypatch.setattr(module, name, 1)


def files(out, name):
    """Return the capture files of a run that only captured."""
    return sorted((out / ".work" / name).glob("*.safetensors"))


def test_what_is_read_whole_is_stored_whole():
    assert (
        max(repair._CONTEXTS, transform.CONTEXTS, budgets.CONTEXTS)
        <= remainder.MAX_CONTEXTS
        == prepare_module.MAX_CONTEXTS
    )


@pytest.mark.parametrize(("variant", "heads"), [("planes", 2), ("paper", 4)])
@pytest.mark.parametrize("changes", [{}, {"rows": 100, "chunk": 64}, {"loss": "reconstruction", "keys_first": 0.5}])
@pytest.mark.parametrize("world", [1, 2])
def test_the_rows_of_all_steps_are_known_before_the_first(variant, heads, changes, world, data, monkeypatch):
    config = replace(TrainConfig(steps=7, min_position=32, seed=3), **changes)
    wanted, read, original = rows_of_steps(config, 1, heads, 512, world > 1), [], Capture.queries
    monkeypatch.setattr(Capture, "queries", lambda own, *at: read.append(at[2]) or original(own, *at))
    monkeypatch.setattr(Ranks, "all_reduce", lambda ranks, *tensors: None)
    monkeypatch.setattr(Ranks, "barrier", lambda ranks: None)
    layer = make_layer(HasherConfig(variant, SHAPE, bits=32), 1, 0)
    Training(layer, 1, data, config, ranks=Ranks(0, world)).run()
    assert torch.equal(torch.stack(read).int(), wanted[:, ::world])


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
        with pytest.raises(ValueError, match=f"but not of row {lost}: .*capture again"):
            few.queries(0, layer, asked)
    with pytest.raises(ValueError, match="damaged"):
        few.values(0, 0)
    size = few.file(0).stat().st_size
    assert 0 < size - (2 * 2 * 512 * 32 + 3 * 4 * 32) * 2 - 3 * 4 < HEADER


@pytest.mark.parametrize(
    "rows", [torch.tensor([3.0]), torch.tensor([[3]]), torch.tensor([512]), torch.tensor([-1]), torch.tensor([4, 4])]
)
def test_damaged_rows_are_one_sentence(rows, model, tmp_path):
    few, ids = Capture(tmp_path, 1), torch.arange(97).repeat(6)[:512]
    tensors, scalings = capture.run_context(model, ids, kept=Kept((torch.tensor([3, 4][: rows.numel()]).int(),) * 2))
    tensors["rows.1"] = rows.int() if rows.dtype == torch.int64 else rows
    capture.save_tensors(tensors, few.file(0), scalings)
    with pytest.raises(ValueError, match="rows that are not ascending and below 512; delete it"):
        few.queries(0, 1)


@pytest.mark.slow
@pytest.mark.parametrize("only", [("lsh", "paper", "planes", "transform"), ("paper", "paper-exact")])
def test_hashers_are_the_same_bits_and_the_disk_is_as_predicted(only, folder, tmp_path, monkeypatch, capsys, one_whole):
    words = ["--contexts", "4", "--steps", "6", "--rows", "32", "--only", *only]
    few, all_of_it = tmp_path / "few", tmp_path / "all"
    assert main(["capture", *command(folder, few, *words)]) == 0
    sizes = [path.stat().st_size for path in files(few, "train")]
    capsys.readouterr()
    assert main(command(folder, tmp_path / "dry", *words, "--dry-run")) == 0
    told = json.loads(capsys.readouterr().out.strip().splitlines()[-1])["dry_run"]
    taken = sum(sizes) + sum(path.stat().st_size for path in files(few, "held"))
    assert taken - 5 * HEADER < told["disk"] < 1.1 * taken  # rows that are drawn twice are stored once
    assert told["traffic"] == 6 * (len(only) - ("lsh" in only)) * context_bytes(SHAPE, 512, torch.bfloat16, 32, False)
    assert max(sizes[1:]) < sizes[0] / 2.5  # keys, 2 x 32 rows, and as many for `paper`, of 512
    assert main(command(folder, few, *words)) == 0
    monkeypatch.setattr(Reads, "kept", lambda reads, context: EVERYTHING)
    assert main(command(folder, all_of_it, *words)) == 0
    assert stored(few) == stored(all_of_it)


def test_another_schedule_captures_again_and_the_same_does_not(folder, tmp_path, monkeypatch, one_whole):
    def made(*more):
        assert main(["capture", *command(folder, tmp_path, "--contexts", "3", "--only", "planes", *more)]) == 0
        return [path.stat().st_mtime_ns for path in files(tmp_path, "train")]

    first = made("--steps", "3")
    assert made("--steps", "3", "--learning-rate", "0.1") == first
    assert all(now > before for now, before in zip(made("--steps", "4"), first, strict=True))
    many = made("--steps", "400")
    assert made("--steps", "500") == many, "all queries are stored: any schedule can read them"


def test_the_papers_schedule_takes_a_fifth_of_the_disk():
    """For Llama-3-8B a context of 8,192 tokens has 3.2 GB of queries, keys and values, and 64 of its rows are read."""
    given = TrainCommand(model="llama", **PAPER, only=("lsh", "paper", "planes", "transform"))
    reads = training_reads(given, LLAMA_3_8B, given.contexts, 32, shared=False)
    every = context_bytes(LLAMA_3_8B, 8192, torch.bfloat16)
    assert reads.bytes(range(8192)) < 8192 * every / 5
    assert reads.bytes(range(8192)) == pytest.approx(4.76e12, rel=0.01)
    assert reads.step_bytes < 0.6e9
    assert validation_reads(given, LLAMA_3_8B, 24).bytes(range(24)) < 24 * every / 5
    assert not TrainCommand().stream
    assert training_reads(TrainCommand(), SHAPE, 40, 32, shared=False).all_queries  # the demo reads each context often
