"""The settings of `sparse-decode`. This module does not import torch, so that --help is quick."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hashtrain.demo import DEMO
from hashtrain.usage import UsageError, require_counts, require_device_name

Dtype = Literal["float32", "bfloat16", "float16", "auto"]


@dataclass(frozen=True)
class GenerateCommand:
    """Continue a text, or answer a question about it, with sparse attention; print speed, density and memory. Example:
    `sparse-decode --model NAME --hasher runs/mine/transform --prompt-file report.txt --question "Who signed it?"`."""

    prompt_file: Path
    """The prompt: a UTF-8 text file."""
    question: str | None = None
    """Asked about the prompt, behind it and an empty line."""
    session: Path | None = None
    """File of the prompt's cache: written if there is none, else read, so that the prompt is not computed again."""
    max_new_tokens: int = 200
    """Maximal number of tokens to generate; fewer if the model ends its text."""
    model: str = DEMO
    """A folder or hub id of a Hugging Face causal LM; `demo` is the model included in hashtrain."""
    hasher: str = "runs/demo/transform"
    """A hasher's folder, created by `uv run hashtrain`; `lsh`: untrained codes."""
    prompt: Literal["exact", "sparse"] = "exact"
    """How the prompt attends: `sparse` is faster, loses a little, and needs bfloat16 on a CPU with AVX512_BF16."""
    fraction: float = 0.02
    """Share of the visible tokens that a step reads, above 0 and at most 1; 16 tokens at least."""
    compare: bool = False
    """Also generate with dense attention, for comparison."""
    device: str = "auto"
    """Device of the model: cpu, cuda, cuda:N, or auto (CUDA if available)."""
    dtype: Dtype | None = None
    """Type of the model's weights, queries, keys and values. Default: bfloat16 on CUDA, `auto` on the CPU: the stored
    type, but float32 where the CPU cannot multiply it."""

    def __post_init__(self) -> None:
        require_counts(self, max_new_tokens=1)
        require_device_name(self.device)
        if not 0 < self.fraction <= 1:
            raise UsageError(f"--fraction must be above 0 and at most 1, got {self.fraction}; 0.02 selects 2 %")
