"""The paper's training at Llama-3-8B's width, rehearsed on the CPU, takes the disk and memory that the plan says."""

from pathlib import Path

import pytest
from hashcore.atomic import replacing

TOOL = "rehearse_paper"
ROOT = Path(__file__).parent.parent


def require_planned(found):
    """Check measured against planned figures; the plan is an upper bound of the disk, without file headers."""
    planned, measured = found["planned"], found["measured"]
    assert 0.9 * planned["disk"] < measured["disk"] < 1.01 * planned["disk"] + (1 << 16)
    assert measured["memory"] < planned["memory"] + (1 << 30)  # modules, text and tokenizer come on top
    assert measured["model_memory"] > 2 * planned["model_memory"]  # float32 on the CPU, bfloat16 in the plan
    assert found["kl"] > 0


@pytest.mark.parametrize(("folder", "kind"), [("layers", "checkpoints"), ("train", "disk"), ("held", "disk")])
def test_a_file_that_replaces_another_takes_disk_beside_it(folder, kind, tool, tmp_path):
    path = tmp_path / "paper-exact" / folder / "00000.safetensors"
    path.parent.mkdir(parents=True)
    path.write_bytes(bytes(100))
    with replacing(path) as temporary:
        temporary.write_bytes(bytes(30))
        assert tool.stored(tmp_path) == {"disk": 0, "checkpoints": 0, kind: 130}
    assert tool.stored(tmp_path) == {"disk": 0, "checkpoints": 0, kind: 30}


@pytest.mark.parametrize(
    "narrow",
    [
        pytest.param(True, id="narrow", marks=pytest.mark.slow),
        pytest.param(False, id="full width", marks=pytest.mark.full),
    ],
)
def test_one_layer_is_trained_and_measured(narrow, tool, tmp_path):
    small = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    (tmp_path / "text.txt").write_text("\n".join(f"def name_{i}(x): return x * {i}" for i in range(6000)))
    found = tool.rehearse(tmp_path, 1024, 1, ["--text", tmp_path / "text.txt"], **(small if narrow else {}))
    assert (found["parameters"] > 200e6) is not narrow
    require_planned(found)
