"""Count the operations of a sparse layer's decode step on CUDA beyond those of a dense one, on a simulated GPU.

    uv run tools/count_launches.py            # write docs/results/gpu_step.json, and docs/gpu.md with it

The counts come from `packages/sparse-decode/tests/fake_gpu.py`; its tests compare the stored counts with the code.
"""

import importlib
import json
import pathlib
import sys

import update_readme
from hashtrain.files.atomic import write_text

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "packages" / "sparse-decode" / "tests"))
fake_gpu = importlib.import_module("fake_gpu")

CASES = (
    "planes",
    "planes+remainder",
    "transform",
    "transform+remainder",
    "transform+heads",
    "transform+padded",
    "transform+padded+remainder",
    "transform+static",
    "transform+static+remainder",
    "transform+host+remainder",
    "transform+beam+remainder",
)


def counted(name: str) -> dict[str, float]:
    """Count one case: the variant, followed by its options."""
    variant, *more = name.split("+")
    how = {"per_query_head": "heads" in more, "remainder": "remainder" in more}
    kind = next((kind for kind in fake_gpu.KINDS if kind in more), "plain")
    return fake_gpu.beyond_dense("llama", variant, kind=kind, **how)._asdict()


def main() -> int:
    found = {name: counted(name) for name in CASES}
    write_text(ROOT / "docs" / "results" / "gpu_step.json", json.dumps(found, indent=1) + "\n")
    return update_readme.main([])


if __name__ == "__main__":
    raise SystemExit(main())
