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

OF_EACH = ("remainder", "padded+remainder", "static+remainder")
_TRANSFORM = "", "remainder", "shortlist+remainder", "padded", "padded+remainder", "static", "static+remainder"
CASES = (
    *("lsh", "paper", "paper+heads", "planes", "planes+remainder"),
    *(f"transform+{kind}".rstrip("+") for kind in (*_TRANSFORM, "host+remainder", "beam+remainder")),
    *(f"{hasher}+{kind}" for hasher in ("transform+heads", "lsh", "paper") for kind in OF_EACH),
)


def main() -> int:
    found = {name: fake_gpu.counted(name)._asdict() for name in CASES}
    for name, count in found.items():
        print(f"{name}: {count['operators']} operators, {count['launches']} launches, {count['copies']} copies")
    write_text(ROOT / "docs" / "results" / "gpu_step.json", json.dumps(found, indent=1) + "\n")
    return update_readme.main([])


if __name__ == "__main__":
    raise SystemExit(main())
