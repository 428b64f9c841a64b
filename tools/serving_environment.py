"""Run Python with vLLM's CPU engine and our plug-in, in a separate environment that is kept between runs.

    uv run --no-project tools/serving_environment.py tools/check_serving.py --quick
    uv run --no-project tools/serving_environment.py -m vllm.entrypoints.openai.api_server --help

The environment is given by packages/sparse-serve/requirements-cpu.txt, file by file, and stored in this user's cache in
a folder named by the hash of that file. Our own packages are read from this checkout; their metadata, by which the
plug-in is found, is installed for each run. If a wheel is not available, one loud line says so, and the exit code is 0:
nothing can be checked. Any other problem, such as a wheel with another hash, is an error. CI runs the first line above.
"""

import fcntl
import hashlib
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping

ROOT = pathlib.Path(__file__).resolve().parent.parent
REQUIREMENTS = ROOT / "packages" / "sparse-serve" / "requirements-cpu.txt"
OURS = ("hashcore", "hashtrain", "sparse-decode", "sparse-serve")
PYTHON = "3.11"
# uv's messages about a file that is missing, or an index that does not answer.
NOT_HAD = re.compile(
    r"error sending request|dns error|failed to (lookup|fetch|download)|timed? ?out|no version of|not found in the "
    r"package registry|no wheels with a matching|no interpreter found",
    re.I,
)


class NotHad(Exception):
    """A wheel, or Python itself, is not available here."""


def folder(environment: Mapping[str, str]) -> pathlib.Path:
    """Return the environment's folder."""
    home = environment.get("XDG_CACHE_HOME") or pathlib.Path(environment.get("HOME", tempfile.gettempdir())) / ".cache"
    digest = hashlib.sha256(REQUIREMENTS.read_bytes() + PYTHON.encode()).hexdigest()[:16]
    return pathlib.Path(home) / "spotlight-attention" / f"serving-{digest}"


def uv(*arguments: str | pathlib.Path) -> None:
    """Call uv. Raises: NotHad if a download is not available, SystemExit if anything else is wrong."""
    # uv also accepts pip's setting for a folder of wheels; without one, torch for CPUs comes from a separate index.
    how = {"UV_FIND_LINKS": os.environ.get("UV_FIND_LINKS") or os.environ.get("PIP_FIND_LINKS", "")}
    how |= {} if how["UV_FIND_LINKS"] else {"UV_TORCH_BACKEND": "cpu"}
    command = ["uv", *map(str, arguments)]
    away = tempfile.gettempdir()  # outside the checkout and its settings for pins: docs/adr/0001-host-free-pins.md
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, env=os.environ | how, cwd=away)
    if done.returncode and NOT_HAD.search(done.stderr):
        raise NotHad(" ".join(done.stderr.split())[-300:])
    if done.returncode:
        raise SystemExit(f"serving_environment: {' '.join(command)}: {done.stderr[-3000:]}")


def make(place: pathlib.Path) -> pathlib.Path:
    """Return the environment's Python; create the environment if needed. Concurrent callers wait."""
    place.parent.mkdir(parents=True, exist_ok=True)
    python, complete = place / "bin" / "python", place / "complete"
    with (place.parent / f"{place.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not complete.exists():
            uv("venv", "--quiet", "--clear", "--python", PYTHON, place)
            uv("pip", "sync", "--quiet", "--python", python, "--require-hashes", REQUIREMENTS)
            complete.touch()
    return python


def main() -> int:
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
        print(__doc__)
        return 2
    try:
        python = make(folder(os.environ))
    except NotHad as missing:
        print(f"!!!! NOT CHECKED: serving inside vLLM, whose CPU wheel is not available here: {missing}", flush=True)
        return 0
    packages = [ROOT / "packages" / name for name in OURS]
    with tempfile.TemporaryDirectory() as ours:
        uv("pip", "install", "--quiet", "--python", python, "--no-deps", "--target", ours, *packages)
        path = os.pathsep.join([*(str(package / "src") for package in packages), str(ROOT / "tools"), ours])
        # A separate cache for compiled kernels: another version of numba would invalidate the checkout's.
        settings = {"PYTHONPATH": path, "NUMBA_CACHE_DIR": str(python.parent.parent / "numba")}
        return subprocess.run([python, *sys.argv[1:]], env=os.environ | settings).returncode


if __name__ == "__main__":
    sys.exit(main())
