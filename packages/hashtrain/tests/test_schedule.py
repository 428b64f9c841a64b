"""`hashtrain plan`: the bytes that a run then takes, and a large model's schedule without its weights."""

import json

import pytest
from hashtrain.cli import main, parse
from hashtrain.run.schedule import DEVICES, schedule
from hashtrain.settings.recipes import EXACT
from hashtrain.settings.train_command import PAPER, TrainCommand
from hashtrain_runs import SMALL, command
from transformers import LlamaConfig

LLAMA_3_8B = LlamaConfig(
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    vocab_size=128256,
    max_position_embeddings=8192,
)


def test_a_plan_of_a_run_at_hand_is_what_its_dry_run_finds(folder, tmp_path, capsys):
    words = ["--only", "lsh", "paper", "paper-exact"]
    assert main(command(folder, tmp_path / "run", *words, "--dry-run")) == 0
    found = json.loads(capsys.readouterr().out.strip().splitlines()[-1])["dry_run"]
    assert main(["plan", "--model", str(folder / "model"), *SMALL, *words, "--out", str(tmp_path / "run")]) == 0
    told = json.loads(capsys.readouterr().out.strip().splitlines()[-1])["plan"]
    assert [told[n] for n in ("disk", "traffic")] == [found[n] for n in ("disk", "traffic")]
    assert 2 * told["model_memory"] == found["model_memory"]  # in float32, on the CPU
    assert not (tmp_path / "run").exists()


def test_the_papers_schedule_for_llama_3_8b_to_the_byte():
    given = parse(["plan", "--model", "x/y", "--only", "paper-exact"])
    assert (given.steps, given.contexts, given.context) == (8192, 8192, 8192)
    found = schedule(given, LLAMA_3_8B)
    assert found.parameters == 8_030_261_248
    # A context: keys of 32 layers x 8 heads x 128, and 64 rows of 32 heads with their numbers. The first 32 are whole.
    few = 32 * (2 * 128 * (8 * 8192 + 32 * 64) + 4 * 64)
    whole = 32 * 2 * 128 * (16 + 32) * 8192
    judged = given.held_out * 32 * (2 * 128 * (8 * 8192 + 32 * given.held_out_rows) + 4 * given.held_out_rows)
    assert found.disk == (8192 - 32) * few + 32 * whole + judged
    assert found.streamed_disk == 32 * whole + judged
    assert found.waves == 1
    assert found.step_memory < 1e9
    assert found.capture_flops == pytest.approx(8216 * (2 * 8.03e9 * 8192 + 32 * 2 * 8192**2 * 4096), rel=1e-3)
    assert list(found.hours) == list(DEVICES)
    slow, fast = found.hours["A100-80GB"], found.hours["H100-80GB"]
    assert 1 < slow[0] < 10
    assert fast[0] < slow[0]
    text = "\n".join(found.lines(given))
    assert f"{found.disk:,} bytes" in text
    assert "A4000-16GB" in text
    assert "--backbone-memory" in text.splitlines()[-1]


def test_waves_are_as_many_as_the_disk_makes_necessary():
    given = TrainCommand(model="x/y", **PAPER, only=("paper-exact",))
    whole = schedule(given, LLAMA_3_8B)
    rest = whole.disk - whole.streamed_disk
    assert schedule(given, LLAMA_3_8B, whole.disk).waves == 1
    assert schedule(given, LLAMA_3_8B, whole.disk - 1).waves == 2
    assert schedule(given, LLAMA_3_8B, whole.streamed_disk + rest / 9.5).waves == 10
    with pytest.raises(ValueError, match=r"--disk must be above the 116\.37 GB that are always stored, got 1\.00 GB"):
        schedule(given, LLAMA_3_8B, 1e9)


def test_more_hashers_take_more_and_down_projection_is_counted_too():
    one, all_of_them = (
        schedule(TrainCommand(model="x/y", **PAPER, only=names), LLAMA_3_8B)
        for names in (("paper-exact",), tuple(c.name for c in EXACT))
    )
    trained = sum(c.trained for c in EXACT)
    assert all_of_them.traffic == trained * one.traffic
    assert all_of_them.train_flops > 5 * one.train_flops
    # Targets per KV head draw separate rows.
    assert one.disk < all_of_them.disk < 1.2 * one.disk
