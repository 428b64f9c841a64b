"""Mutation tests of selection and caches: make one small change at a time, and see whether their tests notice.

    uv run tools/mutation.py                             # all targets; 20 minutes of one core
    uv run tools/mutation.py --target buffer --count 10  # ten mutants of one file

A mutant is a module with one change (`changes` lists the kinds), in a copy of its package's source that is imported
instead of the package. A forked process runs the target's tests on it. The mutant is killed if they fail, crash or take
too long. --seed draws the mutants. docs/results/mutation.json has the scores, every survivor, and a digest of the
changed file; `--stale` lists the targets whose file has changed since (CI prints them). `mutation_targets` has the
targets, and explains survivors whose change no test could detect.

We did not use mutmut: it calls each function through another one, which numba probably cannot compile.
"""

import argparse
import ast
import contextlib
import hashlib
import importlib
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from mutation_targets import EQUIVALENT, TARGETS, Target

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "docs" / "results" / "mutation.json"
MEMORY = 4 << 30  # bytes that a mutant may allocate beyond its process' initial memory


class Mutant(NamedTuple):
    """A module with one change: line number and text of the original, description, and the new source."""

    line: int
    text: str
    change: str
    source: str


class Change(NamedTuple):
    """A change: the node that gives its line, a description, and the new value of a field of `owner`."""

    at: Any
    label: str
    owner: ast.AST
    name: str
    value: Any


_PAIRS: tuple[tuple[type[Any], str, type[Any], str], ...] = (
    *((ast.Lt, "<", ast.LtE, "<="), (ast.Gt, ">", ast.GtE, ">="), (ast.Eq, "==", ast.NotEq, "!=")),
    *((ast.Is, "is", ast.IsNot, "is not"), (ast.In, "in", ast.NotIn, "not in"), (ast.And, "and", ast.Or, "or")),
    *((ast.BitAnd, "&", ast.BitOr, "|"), (ast.Add, "+", ast.Sub, "-")),
)
SWAPS: dict[type[Any], tuple[type[Any], str]] = {one: (other, f"{a} -> {b}") for one, a, other, b in _PAIRS}
SWAPS |= {other: (one, f"{b} -> {a}") for one, a, other, b in _PAIRS}
"""What replaces an operator, and the description of the change."""


def changes(node: ast.AST) -> Iterator[Change]:
    """Yield the possible changes to one node.

    Comparisons, and/or, &/| and +/- are replaced by their neighbour, integers are incremented, booleans are flipped,
    `not` is removed, a returned value becomes None, and statements are removed if later code can run without them.
    """
    if isinstance(node, ast.Compare):
        for place, operator in enumerate(node.ops):
            other, label = SWAPS[type(operator)]
            yield Change(node, label, node, "ops", [*node.ops[:place], other(), *node.ops[place + 1 :]])
    elif isinstance(node, ast.BinOp | ast.BoolOp | ast.AugAssign) and type(node.op) in SWAPS:
        other, label = SWAPS[type(node.op)]
        yield Change(node, label, node, "op", other())
    elif isinstance(node, ast.Constant) and type(node.value) in (int, bool):
        value = not node.value if isinstance(node.value, bool) else int(str(node.value)) + 1
        yield Change(node, f"{node.value} -> {value}", node, "value", value)
    elif isinstance(node, ast.Return) and not (node.value is None or ast.unparse(node.value) == "None"):
        yield Change(node, "return None", node, "value", ast.Constant(None))
    for name, value in ast.iter_fields(node):
        if _is_not(value):
            yield Change(value, "without not", node, name, value.operand)
        block: list[Any] = value if isinstance(value, list) else []
        for place, part in enumerate(block):
            if _is_not(part):
                yield Change(part, "without not", node, name, [*block[:place], part.operand, *block[place + 1 :]])
            elif isinstance(part, ast.stmt) and _removable(part):
                yield Change(part, "removed", node, name, [*block[:place], ast.Pass(), *block[place + 1 :]])


def _is_not(node: Any) -> bool:
    return isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)


def _removable(statement: ast.stmt) -> bool:
    """Whether later code can run without a statement; removing a name's first assignment would only raise NameError."""
    if isinstance(statement, ast.Expr):
        return isinstance(statement.value, ast.Call)
    if isinstance(statement, ast.Assign):
        stored = [x for target in statement.targets for x in ast.walk(target)]
        names = {x.id for x in stored if isinstance(x, ast.Name)}
        again = any(isinstance(x, ast.Name) and x.id in names for x in ast.walk(statement.value))
        return again or any(isinstance(x, ast.Attribute | ast.Subscript) for x in stored)
    return isinstance(statement, ast.AugAssign | ast.Raise | ast.Continue | ast.Break | ast.Delete)


def _nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Walk over executable nodes, without annotations, decorators and error messages."""
    yield node
    if isinstance(node, ast.Raise | ast.JoinedStr):
        return
    for name, value in ast.iter_fields(node):
        if name not in ("annotation", "returns", "decorator_list"):
            for part in value if isinstance(value, list) else [value]:
                if isinstance(part, ast.AST):
                    yield from _nodes(part)


def mutants(source: str, functions: tuple[str, ...] = ()) -> list[Mutant]:
    """Return every mutant of a module's functions and methods, or of those with these names, in order of lines."""
    tree, lines, found = ast.parse(source), source.splitlines(), []
    inside = [x for part in tree.body if isinstance(part, ast.ClassDef) for x in part.body]
    for function in (x for x in [*tree.body, *inside] if isinstance(x, ast.FunctionDef)):
        if functions and function.name not in functions:
            continue
        for change in [change for node in _nodes(function) for change in changes(node)]:
            kept = getattr(change.owner, change.name)
            setattr(change.owner, change.name, change.value)
            new = ast.unparse(ast.fix_missing_locations(tree))
            setattr(change.owner, change.name, kept)
            found.append(Mutant(change.at.lineno, lines[change.at.lineno - 1].strip(), change.label, new))
    times: Counter[tuple[int, str]] = Counter()
    for place, mutant in enumerate(found := sorted(found, key=lambda mutant: mutant.line)):
        times[mutant.line, mutant.change] += 1
        if (count := times[mutant.line, mutant.change]) > 1:  # the same change is possible twice in this line
            found[place] = mutant._replace(change=f"{mutant.change} #{count}")
    return found


def prepare(target: Target) -> None:
    """Import in this process what every mutant needs and none changes."""
    from hypothesis import Phase, settings

    phases = (Phase.explicit, Phase.generate)  # no shrinking: any failure is enough
    settings.register_profile("mutation", phases=phases, database=None, derandomize=True, deadline=None)
    settings.load_profile("mutation")
    for module in ("pytest", "hypothesis.stateful", "hypothesis.extra.numpy", "numba", *target.warm):
        importlib.import_module(module)
    importlib.import_module("numba").njit(lambda: 0)()  # the first compilation takes half a second more
    if target.package in sys.modules:
        raise RuntimeError(f"{target.package} must be imported from the copy, got it imported; run this target alone")


def run_tests(target: Target, copy: Path) -> int:
    """Run the target's tests on the copy of its package, in a child process; return 0 if they pass."""
    import numba
    import pytest

    # A mutant with compiled code gets its own cache; others share one.
    numba.config.CACHE_DIR = tempfile.mkdtemp(dir=copy) if target.compiles else str(copy / "numba")  # pyright: ignore
    sys.path.insert(0, str(copy))
    os.environ["PYTHONPATH"] = str(copy)
    path = importlib.import_module(target.module).__file__
    if path is None or not Path(path).is_relative_to(copy):
        raise RuntimeError(f"{target.module} must come from {copy}, got {path}; look at how it is installed")
    options = ["-qx", "-o", "addopts=", "--import-mode=importlib", "-p", "no:cacheprovider"]
    options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # warm modules are imported before pytest starts
    if target.leave:
        options += ["-k", " and ".join(f"not {name}" for name in target.leave)]
    return int(pytest.main([*options, *(str(ROOT / test) for test in target.tests)]))


def outcome(target: Target, copy: Path, seconds: float) -> str:
    """Fork, run the tests, and return how it ended: passed, failed, crashed or timed out."""
    sys.stdout.flush()
    if (child := os.fork()) == 0:
        _in_child(target, copy)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return "crashed" if os.WIFSIGNALED(status) else "failed" if status else "passed"
        time.sleep(0.02)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return "timed out"


def _in_child(target: Target, copy: Path) -> None:
    """Run the tests in a separate process group, with their output in a file, and exit the process."""
    code = 1
    try:
        os.setpgid(0, 0)
        log = os.open(copy / "log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        code = run_tests(target, copy)
    except BaseException:  # a mutant may raise anything
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(min(code, 1))


def draw(name: str, possible: list[Mutant], count: int, seed: int, again: dict[str, Any] | None) -> list[Mutant]:
    """Return the mutants to try: a random sample, or the survivors of an earlier measurement."""
    if again is not None:
        alive = {(x["line"], x["text"], x["change"]) for x in again["survivors"] + again["equivalent"]}
        return [mutant for mutant in possible if mutant[:3] in alive]
    numbers = random.Random(f"{seed} {name}").sample(range(len(possible)), min(count, len(possible)))
    return [possible[number] for number in sorted(numbers)]


def measure(name: str, target: Target, chosen: list[Mutant]) -> list[str]:
    """Try the mutants and return how each ended.

    Raises: SystemExit if the tests do not pass without a change.
    """
    prepare(target)
    ends: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "src"
        package, _, inside = target.file.partition("/src/")
        shutil.copytree(ROOT / package / "src", copy, ignore=shutil.ignore_patterns("__pycache__"))
        original = ast.parse((copy / inside).read_text(encoding="utf-8"))
        (copy / inside).write_text(ast.unparse(original), encoding="utf-8")  # in the same form as mutants
        if (unchanged := outcome(target, copy, 300)) != "passed":
            print((copy / "log").read_text(errors="replace")[-3000:], file=sys.stderr)
            raise SystemExit(f"the tests of {target.module} must pass without a change, they {unchanged}")
        begin = time.monotonic()
        outcome(target, copy, 300)  # again, to time it with cached machine code
        seconds, begin = 10 + 5 * (time.monotonic() - begin), time.monotonic()
        for number, mutant in enumerate(chosen, 1):
            (copy / inside).write_text(mutant.source, encoding="utf-8")
            ends.append(outcome(target, copy, seconds))
            left = (time.monotonic() - begin) / number * (len(chosen) - number)
            if ends[-1] == "passed":
                print(f"  survives: {target.file}:{mutant.line}: {mutant.text}  [{mutant.change}]")
            if number % 10 == 0:
                print(f"  {name}: {number} of {len(chosen)}, {left:.0f} s left")
    return ends


def digest(source: str) -> str:
    """Return the SHA-256 of a module's source; results for another source may not hold."""
    return hashlib.sha256(source.encode()).hexdigest()


def stale(results: dict[str, Any]) -> list[str]:
    """Return the targets whose module has changed since they were measured."""
    now = {name: digest((ROOT / target.file).read_text(encoding="utf-8")) for name, target in TARGETS.items()}
    return [name for name, text in now.items() if results.get(name, {}).get("sha256") != text]


def rerun(names: list[str]) -> str:
    """Return the commands that measure these targets."""
    return "run " + " && ".join(f"uv run tools/mutation.py --target '{name}'" for name in names)


def summary(
    target: Target, source: str, seed: int, chosen: list[Mutant], ends: list[str], before: dict[str, Any] | None
) -> dict[str, Any]:
    """Return a target's stored result; `before` is the earlier measurement in which all but the chosen ones ended."""
    ended = Counter(ends) + Counter(before["by"] if before else {})
    alive = [mutant for mutant, end in zip(chosen, ends, strict=True) if end == "passed"]
    place = target.file.rpartition("/src/")[2]
    found = [{"file": target.file, "line": m.line, "text": m.text, "change": m.change} for m in alive]
    reasons = [EQUIVALENT.get((place, m.text, m.change)) for m in alive]
    survivors = [one for one, reason in zip(found, reasons, strict=True) if reason is None]
    equivalent = [one | {"reason": reason} for one, reason in zip(found, reasons, strict=True) if reason]
    by = {end: ended[end] for end in ("failed", "crashed", "timed out")}
    killed = sum(by.values())
    return {
        "file": target.file,
        "sha256": digest(source),
        "functions": list(target.functions) or "all",
        "tests": list(target.tests),
        "seed": before["seed"] if before else seed,
        "possible": len(mutants(source, target.functions)),
        "tried": killed + len(alive),
        "killed": killed,
        "by": by,
        "score": round(killed / max(1, killed + len(survivors)), 4),
        "equivalent": equivalent,
        "survivors": survivors,
    }


def main() -> int:
    """Measure the targets, store the scores, and return 0 unless a survivor is unexplained."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", choices=TARGETS, help="one target; default: all")
    parser.add_argument("--count", type=int, help="mutants per target (60, or 24 of a slow one)")
    parser.add_argument("--seed", type=int, default=0, help="draws the mutants (0)")
    parser.add_argument("--again", action="store_true", help="try only the stored survivors, with the current tests")
    parser.add_argument("--out", type=Path, default=OUT, help="file for the scores (docs/results/mutation.json)")
    parser.add_argument("--stale", action="store_true", help="measure nothing; list targets that have changed")
    args = parser.parse_args()
    if args.stale:
        old = stale(json.loads(args.out.read_text(encoding="utf-8")))
        print(f"changed since measured: {', '.join(old)}; {rerun(old)}" if old else "all measured on this code")
        return 0
    single = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")  # forking with threads may hang
    os.environ |= dict.fromkeys(single, "1") | {"HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # plug-ins take a second to load, and these tests need none
    sys.dont_write_bytecode = True  # bytecode has timestamps in seconds: a mutant could load the previous one's
    sys.stdout.reconfigure(line_buffering=True)  # pyright: ignore[reportAttributeAccessIssue]
    results = json.loads(args.out.read_text(encoding="utf-8")) if args.out.is_file() else {}
    names = [args.target] if args.target else list(TARGETS)  # hashcore first, because sparse_decode imports it
    for name in names:
        target, before = TARGETS[name], results.get(name) if args.again else None
        if args.again and name in stale(results):
            raise SystemExit(
                f"--again needs {name} measured on the current {target.file}, which has changed; {rerun([name])}"
            )
        source = (ROOT / target.file).read_text(encoding="utf-8")
        possible = mutants(source, target.functions)
        chosen = draw(name, possible, target.count if args.count is None else args.count, args.seed, before)
        ends = measure(name, target, chosen)
        results[name] = summary(target, source, args.seed, chosen, ends, before)
        temporary = args.out.with_suffix(".new")
        ordered = {name: results[name] for name in TARGETS if name in results}
        temporary.write_text(json.dumps(ordered, indent=1) + "\n", encoding="utf-8")
        os.replace(temporary, args.out)
    print("target         tried of possible  killed  equivalent  survive   score")
    for name, x in ((name, results[name]) for name in names):
        counts = f"{x['tried']:5d} of {x['possible']:8d}  {x['killed']:6d}  {len(x['equivalent']):10d}"
        print(f"{name:14s} {counts}  {len(x['survivors']):7d}  {x['score']:6.1%}")
    return int(any(results[name]["survivors"] for name in names))


if __name__ == "__main__":
    sys.exit(main())
