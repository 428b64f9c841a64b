"""The demo model in the wheel: a small Llama-architecture code model, so that everything runs offline."""

from pathlib import Path

DEMO = "demo"
"""The `--model` name of the model that ships with hashtrain."""


def demo_model_path() -> Path:
    """Return the folder of the demo model, for `AutoModelForCausalLM.from_pretrained`."""
    return Path(__file__).parent / "model"


def model_path(name: str) -> str:
    """Return the argument of `from_pretrained` for a --model: the folder of `demo`, or the name itself."""
    return str(demo_model_path()) if name == DEMO else name


def base_model(name: str) -> str:
    """Name the base model in an artefact: a full hub id, or a local folder without its path."""
    return "hashtrain demo" if name == DEMO else Path(name).absolute().name if Path(name).is_dir() else name
