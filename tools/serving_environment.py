"""Run Python with vLLM's engine for CPUs, and our plug-in: in an environment of its own, kept between runs.

    uv run --no-project tools/serving_environment.py tools/check_serving.py --quick
    uv run --no-project tools/serving_environment.py tools/check_server.py --seconds 60
    uv run --no-project tools/serving_environment.py -m vllm.entrypoints.openai.api_server --help

The environment is what packages/sparse-serve/requirements-cpu.txt says, file by file, in a folder of this user's cache
that is named by the hash of that file. Our own packages are read from this checkout; their names and versions, by which
the plug-in is found, are installed for one run. Where a wheel cannot be had, one loud line says so, and the exit code
is 0: there is nothing to check with. Anything else that goes wrong, a wheel with another hash say, is an error. CI runs
the first line above.
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
# What uv says of a file that is not there, or of an index that does not answer.
NOT_HAD = re.compile(
    r"error sending request|dns error|failed to (lookup|fetch|download)|timed? ?out|no version of|not found in the "
    r"package registry|no wheels with a matching|no interpreter found",
    re.I,
)


class NotHad(Exception):
    """A wheel, or Python itself, cannot be had here."""


def folder(environment: Mapping[str, str]) -> pathlib.Path:
    """Return where the environment is kept."""
    home = environment.get("XDG_CACHE_HOME") or pathlib.Path(environment.get("HOME", tempfile.gettempdir())) / ".cache"
    digest = hashlib.sha256(REQUIREMENTS.read_bytes() + PYTHON.encode()).hexdigest()[:16]
    return pathlib.Path(home) / "spotlight-attention" / f"serving-{digest}"


def uv(*arguments: str | pathlib.Path) -> None:
    """Call uv. Raises: NotHad if it cannot reach what it needs, SystemExit if anything else is wrong."""
    # pip's own setting for wheels in a folder is good for uv, too; without one torch for CPUs has an index of its own.
    how = {"UV_FIND_LINKS": os.environ.get("UV_FIND_LINKS") or os.environ.get("PIP_FIND_LINKS", "")}
    how |= {} if how["UV_FIND_LINKS"] else {"UV_TORCH_BACKEND": "cpu"}
    command = ["uv", *map(str, arguments)]
    away = tempfile.gettempdir()  # from the day that this checkout's own pins are of: docs/adr/0001-host-free-pins.md
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, env=os.environ | how, cwd=away)
    if done.returncode and NOT_HAD.search(done.stderr):
        raise NotHad(" ".join(done.stderr.split())[-300:])
    if done.returncode:
        raise SystemExit(f"serving_environment: {' '.join(command)}: {done.stderr[-3000:]}")


def make(place: pathlib.Path) -> pathlib.Path:
    """Return the environment's Python; make it if nobody has. Whoever comes second waits."""
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
        print(f"!!!! NOT CHECKED: serving inside vLLM, whose wheel for CPUs cannot be had here: {missing}", flush=True)
        return 0
    packages = [ROOT / "packages" / name for name in OURS]
    with tempfile.TemporaryDirectory() as ours:
        uv("pip", "install", "--quiet", "--python", python, "--no-deps", "--target", ours, *packages)
        path = os.pathsep.join([*(str(package / "src") for package in packages), str(ROOT / "tools"), ours])
        # Compiled kernels: another numba than the checkout's would throw that one's away.
        settings = {"PYTHONPATH": path, "NUMBA_CACHE_DIR": str(python.parent.parent / "numba")}
        return subprocess.run([python, *sys.argv[1:]], env=os.environ | settings).returncode


if __name__ == "__main__":
    sys.exit(main())
