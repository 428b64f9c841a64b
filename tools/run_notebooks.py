"""Execute the notebooks of examples/ in a fresh kernel; nothing is written back.

    uv run --group notebook tools/run_notebooks.py              # exit code 1 if a cell fails or they take too long
    uv run --group notebook tools/run_notebooks.py --keep DIR   # keep the executed copies
    uv run --group notebook tools/run_notebooks.py --stored     # run nothing; exit code 1 if one is stored with outputs

A notebook must draw pictures and stay within LIMIT seconds of CPU time, which depends less on other load than elapsed
time does.
"""

import argparse
import os
import pathlib
import re
import resource
import sys
import tempfile
import time
from typing import Any

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

EXAMPLES = pathlib.Path(__file__).resolve().parent.parent / "examples"
LIMIT = 150.0  # of CPU time; a minute on an idle machine, up to 1.6 times that was seen on a busy one
PATIENCE = 600  # seconds of elapsed time per cell, on the busiest machine


def execute(path: pathlib.Path) -> tuple[Any, float]:
    """Run every cell in the notebook's folder. Returns: the executed notebook, and seconds of CPU time."""
    notebook = nbformat.read(path, as_version=4)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with tempfile.TemporaryDirectory() as home:  # without the user's settings and history
        settings = {"IPYTHONDIR": home, "JUPYTER_CONFIG_DIR": home, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        where = {"metadata": {"path": str(path.parent)}}
        client = NotebookClient(
            notebook, timeout=PATIENCE, startup_timeout=PATIENCE, kernel_name="python3", resources=where
        )
        client.execute(env={**os.environ, **settings})
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return notebook, sum(after[:2]) - sum(before[:2])


def pictures(notebook: Any) -> int:
    """Count the pictures that the cells drew."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return sum("image/png" in output.get("data", {}) for output in outputs)


def plain(text: str) -> str:
    """Return the first line of a message, without colour codes."""
    return re.sub(r"\x1b\[[\d;]*m", "", text).strip().partition("\n")[0]


def check(path: pathlib.Path, keep: pathlib.Path | None) -> str | None:
    """Execute one notebook and print a line. Returns: what is wrong with it."""
    begun = time.monotonic()
    try:
        notebook, seconds = execute(path)
    except CellExecutionError as error:
        return f"{path.name}: expected every cell to run, got {error.ename}: {plain(error.evalue)}; open it and run it"
    except (CellTimeoutError, DeadKernelError) as error:
        return f"{path.name}: expected every cell to end, got {plain(str(error))}"
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        whole = keep / f"{path.name}.new"
        nbformat.write(notebook, whole)
        whole.replace(keep / path.name)
    drawn = pictures(notebook)
    print(f"{path.name}: {drawn} pictures, {time.monotonic() - begun:.0f} s, {seconds:.0f} s of CPU time")
    if not drawn:
        return f"{path.name}: expected pictures, got none; end the cells that draw with plt.show()"
    if seconds > LIMIT:
        return f"{path.name}: expected at most {LIMIT:.0f} s of CPU time, got {seconds:.0f}; make it do less"
    return None


def stored(path: pathlib.Path) -> str | None:
    """Check a notebook as stored. Returns: what is wrong with it."""
    code = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    if any(cell.outputs or cell.execution_count is not None for cell in code):
        return f"{path.name}: expected no outputs and no counts, got some; clear all outputs before saving"
    return None if code else f"{path.name}: expected cells of code, got none"


def main(arguments: list[str] | None = None) -> int:
    """Execute all notebooks, or check them as stored. Returns 1, after a sentence for each problem."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", type=pathlib.Path, help="a folder for the executed copies")
    parser.add_argument("--stored", action="store_true", help="run nothing, check for stored outputs")
    parser.add_argument("notebooks", type=pathlib.Path, nargs="*", default=sorted(EXAMPLES.glob("*.ipynb")))
    given = parser.parse_args(arguments)
    found = [stored(path) if given.stored else check(path, given.keep) for path in given.notebooks]
    for line in filter(None, found):
        print(f"run_notebooks: {line}", file=sys.stderr)
    return int(not found or any(found))


if __name__ == "__main__":
    raise SystemExit(main())
