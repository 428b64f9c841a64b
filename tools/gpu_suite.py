"""Run everything that needs a GPU: correctness, memory checks and benchmarks, in less than nine minutes.

    uv run --extra cuda tools/gpu_suite.py --out gpu.json

If the packages are not installed, their sources are used, with whatever Python runs this. A part whose requirements are
missing is skipped and named. Each part runs in its own process and is stopped at its time limit, so that one that hangs
or corrupts the device affects only itself. Without a GPU the kernels run under the host simulator.

Prints a table, then JSON in the last line. Exit code: 1 if a part failed, or could not run on a machine with a GPU.
"""

import argparse
import importlib.metadata
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
SECONDS = 530  # for all parts together
SANITIZER_FAILED = 86
HASHCORE = ("torch", "numpy", "numba", "cuda.core", "cuda.bindings")
LEAST = {"torch": (2, 11), "cuda.core": (1, 0), "cuda.bindings": (13, 0), "transformers": (5, 17)}
SPARSE = (*HASHCORE, "transformers", "safetensors")
# Small tests, by pytest's -k, and the kernels that they launch: the sanitizer slows them down by a factor of 10 to 100.
LAUNCHED_BY = {
    "test_pack_equals_numpy": "pack_f32 pack_f64 pack_f16 pack_bf16 pack_u8 pack_i8 pack_i16 pack_i32 pack_i64",
    "test_planes_equal_numpy and 6": "planes_f32 planes_f16 planes_bf16 levels_f32 levels_f16 levels_bf16",
    "test_group_planes": "group_planes",
    "test_scores_equal_numpy and 0": "score_all score_pairs",
    "test_topk_equals_numpy and 2049": "count_32 select_32_64",
    "test_searches_equal_numpy and 9001 and weights0": "list_candidates select_64",
    "test_queries_without": "list_candidates_shared",
    "test_results_of_32_bits": "select_32 select_32_32",
    "test_equals_the_cpu and 600 and 7": "gather combine",
    "test_searches_in_pages and 16-2": "list_candidates select_64",
    "test_hashed_tokens and transform-64": "hash_tokens",
    "test_sums_of_a_static_cache": "add_token",
    "test_codes_go_to_their_slots": "place_codes",
}
EVERY_KERNEL = " or ".join(f"({tests})" for tests in LAUNCHED_BY)

TRAINING = ["--only", "lsh", "transform", "--context", "1024", "--contexts", "4", "--held-out", "2", "--steps", "50"]
HASHCORE_TESTS = ["packages/hashcore/tests/test_cuda.py", "packages/hashcore/tests/test_pages_on_gpu.py"]
SPARSE_TESTS = [
    "packages/sparse-decode/tests/test_gather_cuda.py",
    "packages/sparse-decode/tests/test_steps_cuda.py",
    "packages/sparse-decode/tests/test_paged_on_gpu.py",
]
GPU_TESTS = [*HASHCORE_TESTS, *SPARSE_TESTS]
EVALS_TESTS = "packages/evals/tests/test_device.py"


class Outcome(NamedTuple):
    """The outcome of a part: status is passed, failed, missing, unsupported or late."""

    status: str
    summary: str
    data: Any = None


class Part(NamedTuple):
    """A part of the suite: its name, its time limit, the modules it imports, and the function that runs it."""

    name: str
    seconds: float
    needs: tuple[str, ...]
    run: Callable[[float], Outcome]


class Done(NamedTuple):
    """The end of a command: its exit code, None if it was stopped, and its output."""

    code: int | None
    output: str


def command(arguments: list[str], seconds: float, **variables: str) -> Done:
    """Run a command from the repository's root; stop it and its children at the time limit."""
    sources = [str(path) for path in sorted(ROOT.glob("packages/*/src"))]
    path = os.pathsep.join([*sources, *filter(None, [os.environ.get("PYTHONPATH")])])
    with tempfile.TemporaryFile("w+") as log:
        files: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": subprocess.STDOUT}
        env = os.environ | {"PYTHONPATH": path} | variables
        process = subprocess.Popen(arguments, cwd=ROOT, env=env, start_new_session=True, **files)
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            code = None
        log.seek(0)
        return Done(code, log.read())


def pytest(seconds: float, arguments: list[str], wrapper: list[str], **variables: str) -> Outcome:
    """Run pytest; passed if a test passed and none failed."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        # Without pytest-xdist, which may be missing on a machine with a GPU, and would share the GPU.
        alone = ["-o", "addopts=--import-mode=importlib"]
        options = ["-q", "-x", "-W", "default", "-p", "no:cacheprovider", f"--junitxml={report}", *alone]
        python = [sys.executable, "-m", "pytest", *options, *arguments]
        done = command([*wrapper, *python], seconds, **variables)
        if done.code is None or not report.is_file():
            return _ended(done, seconds)
        suite = next(xml.etree.ElementTree.parse(report).getroot().iter("testsuite"))
    counts = {name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")}
    passed = counts["tests"] - counts["failures"] - counts["errors"] - counts["skipped"]
    summary = f"{passed} passed, {counts['skipped']} skipped"
    if done.code or not passed:
        return Outcome("failed", f"{summary}\n{tail(done.output)}", counts)
    return Outcome("passed", summary, counts)


def benchmark(seconds: float, script: str) -> Outcome:
    """Run a benchmark, whose last line is JSON with its targets."""
    done = command([sys.executable, script], seconds)
    if done.code != 0:
        return _ended(done, seconds)
    data = json.loads(done.output.strip().splitlines()[-1])
    bars = data["bars"]
    lines = [f"{bar['what']}: {bar['value']:.3g}, target {bar['asked']}" for bar in bars if not bar["met"]]
    return Outcome("passed", "\n".join([f"{len(bars) - len(lines)} of {len(bars)} targets met", *lines]), data)


def sanitized(tool: str, seconds: float) -> Outcome:
    """Run every kernel once under a tool of compute-sanitizer."""
    sanitizer = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if sanitizer is None:
        return Outcome("missing", "compute-sanitizer is neither on PATH nor in CUDA's folder")
    options = ["--tool", tool, "--error-exitcode", str(SANITIZER_FAILED), "--target-processes", "all"]
    arguments = ["-m", "cuda", *GPU_TESTS, "-k", EVERY_KERNEL]
    # Without torch's memory pool every tensor is its own allocation, so that out-of-bounds accesses are detected.
    outcome = pytest(seconds, arguments, [sanitizer, *options], PYTORCH_NO_CUDA_MEMORY_CACHING="1")
    if "Device not supported" in outcome.summary:
        return Outcome("unsupported", "compute-sanitizer does not support this device")
    return outcome


def simulated(package: str, names: tuple[str, ...], seconds: float) -> Outcome:
    if shutil.which("g++") is None:
        return Outcome("missing", "g++ is needed to build the kernels for the CPU")
    return pytest(seconds, [f"packages/{package}/tests/test_{name}.py" for name in names], [])


def training(seconds: float) -> Outcome:
    """Run a small version of the README's first command on the GPU: its dry run's prediction, then the run itself."""
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, "-m", "hashtrain", "--device", "cuda", "--out", f"{folder}/run", *TRAINING]
        dry = command([*words, "--dry-run"], seconds / 2)
        if dry.code != 0:
            return _ended(dry, seconds / 2)
        done = command(words, seconds - (time.perf_counter() - begun))
        if done.code != 0:
            return _ended(done, seconds)
        metrics = json.loads((Path(folder) / "run" / "metrics.json").read_text())
    predicted = [line.strip() for line in dry.output.splitlines() if line.startswith(("time to", "memory to"))]
    data = {"predicted": predicted, "seconds": metrics["seconds"]}
    return Outcome("passed", "\n".join([*predicted, f"took                 {metrics['seconds']:.0f} s in all"]), data)


def _ended(done: Done, seconds: float) -> Outcome:
    if done.code is None:
        return Outcome("late", f"stopped after {seconds:.0f} s: {tail(done.output, 1)}")
    return Outcome("failed", tail(done.output))


def decoding(seconds: float) -> Outcome:
    """Decode with an attached model; say by how much a layer is faster, beside what was predicted."""
    outcome = benchmark(seconds, "packages/sparse-decode/benchmarks/decode_gpu.py")
    if outcome.status != "passed":
        return outcome
    lines = []
    for row in outcome.data["rows"]:
        foreseen = row["predicted_to_save"]
        beside = "not predicted for this device" if foreseen is None else f"predicted {foreseen:.0f}"
        lines.append(f"{row['tokens']:,} tokens: a sparse layer saves {row['layer_saves']:.0f} us ({beside})")
    return outcome._replace(summary="\n".join([outcome.summary, *lines]))


def tests(*arguments: str) -> Callable[[float], Outcome]:
    return lambda seconds: pytest(seconds, ["-m", "cuda", *arguments], [])


def timed(script: str) -> Callable[[float], Outcome]:
    return lambda seconds: benchmark(seconds, f"packages/{script}")


GPU_PARTS = [
    Part("hashcore: equal to numpy, graphs, compile, operators", 95, (*HASHCORE, "pytest"), tests(*HASHCORE_TESTS)),
    Part("sparse_decode: kernels equal to the CPU", 55, (*SPARSE, "pytest"), tests(*SPARSE_TESTS)),
    Part("evals: every task on a model", 35, (*SPARSE, "evals", "pytest"), tests(EVALS_TESTS, "-k", "bfloat16")),
    Part("hashtrain: the README's first command, small", 50, (*SPARSE, "hashtrain", "rich", "tyro"), training),
    Part("sparse_decode: a model's steps, captured, compiled, timed", 60, (*SPARSE, "hashtrain"), decoding),
    Part("hashcore: benchmark of retrieval", 60, HASHCORE, timed("hashcore/benchmarks/gpu.py")),
    Part(
        "sparse_decode: benchmark of a step's attention", 70, SPARSE, timed("sparse-decode/benchmarks/attention_gpu.py")
    ),
    Part("kernels: compute-sanitizer memcheck", 43, (*SPARSE, "pytest"), partial(sanitized, "memcheck")),
    Part("kernels: compute-sanitizer racecheck", 42, (*SPARSE, "pytest"), partial(sanitized, "racecheck")),
]
_SIMULATED = partial(simulated, "hashcore", ("hostsim", "kernels", "torch_library"))
_SPARSE_SIMULATED = partial(simulated, "sparse-decode", ("gather", "encode_cuda", "moments"))
SIMULATED_PARTS = [
    Part("hashcore: simulated kernels", 400, ("torch", "numba", "pytest", "hypothesis"), _SIMULATED),
    Part("sparse_decode: simulated kernels", 200, ("torch", "numba", "pytest", "hypothesis"), _SPARSE_SIMULATED),
]


def tail(output: str, lines: int = 12) -> str:
    return "\n".join(output.strip().splitlines()[-lines:])


def missing(modules: tuple[str, ...]) -> list[str]:
    """Return the modules that this Python lacks, or has only in a version that is too old."""

    def found(module: str) -> bool:
        try:
            return importlib.util.find_spec(module) is not None
        except ModuleNotFoundError:  # its parent package is missing
            return False

    absent = [module for module in modules if not found(module)]
    for module, least in LEAST.items():
        if module in modules and module not in absent:
            version = importlib.metadata.version(module.replace(".", "-"))
            if tuple(map(int, version.split(".")[:2])) < least:
                absent.append(f"{module} {'.'.join(map(str, least))} (here is {version})")
    return absent


def environment() -> dict[str, Any] | None:
    """Return a description of the GPU, or None if there is none."""
    if missing(("torch",)):
        print("torch is not installed; without it no GPU can be used.", flush=True)
        return None
    script = f"import sys; sys.path.insert(0, {str(ROOT / 'packages' / 'hashcore' / 'benchmarks')!r})\n"
    script += "import json, torch, gpu_timing as timing\n"
    script += "print(json.dumps(timing.environment() if torch.cuda.is_available() else None))"
    done = command([sys.executable, "-c", script], 120)
    if done.code != 0:
        raise SystemExit(f"expected a description of the GPU, or none, got:\n{tail(done.output)}")
    return json.loads(done.output.strip().splitlines()[-1])


def run_part(part: Part, seconds: float) -> dict[str, Any]:
    begun = time.perf_counter()
    absent = missing(part.needs)
    if absent:
        outcome = Outcome("missing", f"not installed: {', '.join(absent)}")
    elif seconds < 5:
        outcome = Outcome("late", "no time was left")
    else:
        outcome = part.run(min(part.seconds, seconds))
    return {"part": part.name, "seconds": round(time.perf_counter() - begun, 1), **outcome._asdict()}


def run_parts(parts: list[Part], seconds: float) -> list[dict[str, Any]]:
    """Run the parts in order, each within its own time limit, and all within `seconds`."""
    begun, results = time.perf_counter(), []
    for part in parts:
        results.append(run_part(part, seconds - (time.perf_counter() - begun)))
        print(f"{results[-1]['status']:11}  {results[-1]['seconds']:6.1f} s  {part.name}", flush=True)
        for line in results[-1]["summary"].splitlines():
            print(f"    {line}", flush=True)
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description="Run everything that needs a GPU.")
    parser.add_argument("--out", type=Path, help="also write the JSON to this file")
    parser.add_argument("--only", default="", help="run only the parts whose name contains this")
    options = parser.parse_args()
    found = environment()
    print(f"GPU: {found}" if found else "No GPU was found: the kernels run under the host simulator.", flush=True)
    parts = [part for part in (GPU_PARTS if found else SIMULATED_PARTS) if options.only in part.name]
    results = run_parts(parts, SECONDS)
    report = json.dumps({"gpu": found, "parts": results})
    if options.out:
        temporary = options.out.with_suffix(".tmp")
        temporary.write_text(report + "\n")
        os.replace(temporary, options.out)
    print(report)
    return int(any(result["status"] not in ("passed", "unsupported") for result in results))


if __name__ == "__main__":
    sys.exit(main())
