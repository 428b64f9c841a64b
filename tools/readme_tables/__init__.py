"""The generated tables: one function per table, one file per topic; those of plain rows are described in TOML."""

import pathlib
from collections.abc import Callable
from functools import partial

from readme_tables import gpu, quality, reach, robustness, speed
from readme_tables.described import DESCRIBED

BLOCKS: dict[str, Callable[[pathlib.Path], str]] = {
    **DESCRIBED,
    "headline": quality.headline,
    "second-short": quality.short_table,
    "needs": speed.needs,
    "demo": quality.demo,
    "second": quality.second,
    "beside-paper": quality.beside_paper,
    "speed": speed.speed,
    "serving": speed.serving,
    "serving-checks": speed.serving_checks,
    "llama-cpp": speed.llama_cpp,
    "rivals": quality.rivals,
    "ablations": quality.ablations,
    **{name.replace("_", "-"): partial(reach.table, name) for name in reach.MODELS},
    "training-step": speed.training_step,
    "hashcore-index-recall": speed.index_recall,
    "hashcore-index-times": speed.index_times,
    "families": robustness.families,
    "fuzz": robustness.fuzz,
    "transformers-tests": robustness.transformers_tests,
    "gpu-layers": gpu.layers,
    "gpu-kernels": gpu.kernels,
    "gpu-search": gpu.search,
    "gpu-decode": gpu.decode,
}
"""By name: each returns Markdown, a table or sentences, of stored results. Raises: ValueError if one is missing."""
