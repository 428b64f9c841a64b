"""The demo model in the wheel: a small Llama-architecture code model, so that everything runs offline."""

from pathlib import Path


def demo_model_path() -> Path:
    """Return the folder of the demo model, for `AutoModelForCausalLM.from_pretrained`."""
    return Path(__file__).parent / "model"
