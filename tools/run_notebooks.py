"""Execute the notebooks of examples/ in a fresh kernel; nothing is written back.

    uv run --group notebook tools/run_notebooks.py              # exit code 1 if a cell fails or they take too long
    uv run --group notebook tools/run_notebooks.py --keep DIR   # keep the executed copies, to look at

    uv run --group notebook tools/run_notebooks.py --stored     # run nothing; exit code 1 if one is stored with outputs

A notebook must draw pictures and stay within LIMIT seconds of processor time, which a busy machine changes less than it
changes the time by the clock.
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
LIMIT = 150.0  # of processor time; a minute of it on a quiet machine, 1.6 times that was seen on a busy one
PATIENCE = 600  # seconds by the clock for a cell, on the busiest machine


def execute(path: pathlib.Path) -> tuple[Any, float]:
    """Run every cell in the notebook's folder. Returns: the executed notebook, and seconds of processor time."""
    notebook = nbformat.read(path, as_version=4)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with tempfile.TemporaryDirectory() as home:  # no settings of this machine's user, and no history for him
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
    """Return the first line of a message, without colours."""
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
    print(f"{path.name}: {drawn} pictures, {time.monotonic() - begun:.0f} s, {seconds:.0f} s of processor time")
    if not drawn:
        return f"{path.name}: expected pictures, got none; end the cells that draw with plt.show()"
    if seconds > LIMIT:
        return f"{path.name}: expected at most {LIMIT:.0f} s of processor time, got {seconds:.0f}; do less in it"
    return None


def stored(path: pathlib.Path) -> str | None:
    """Look at a notebook as it is stored. Returns: what is wrong with it."""
    code = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    if any(cell.outputs or cell.execution_count is not None for cell in code):
        return f"{path.name}: expected no outputs and no counts, got some; clear all outputs before saving"
    return None if code else f"{path.name}: expected cells of code, got none"


def main(arguments: list[str] | None = None) -> int:
    """Execute them all, or look at them. Returns 1 after a sentence for each that is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", type=pathlib.Path, help="a folder for the executed copies")
    parser.add_argument("--stored", action="store_true", help="run nothing, look for outputs")
    parser.add_argument("notebooks", type=pathlib.Path, nargs="*", default=sorted(EXAMPLES.glob("*.ipynb")))
    given = parser.parse_args(arguments)
    found = [stored(path) if given.stored else check(path, given.keep) for path in given.notebooks]
    for line in filter(None, found):
        print(f"run_notebooks: {line}", file=sys.stderr)
    return int(not found or any(found))


if __name__ == "__main__":
    raise SystemExit(main())
