"""Run transformers' own generation tests with every causal model attached at 100 %: do any fail that pass dense?

    uv run --with parameterized tools/check_transformers_tests.py path/to/transformers
    uv run --with parameterized tools/check_transformers_tests.py path/to/transformers --families llama qwen3

The path is a source tree of the installed version of transformers, with tests/generation and tests/models. Its source
distribution carries neither, so it must be a checkout of the version's tag. Nothing is fetched. Each family's tests run
dense, and attached under both rules (`decode`, and every row); those that pass dense and fail attached are named.
Exits 1 if there is one.

pytest loads this file as a plugin, too: it wraps `generate` of the models under test.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from functools import wraps
from pathlib import Path
from typing import Any

FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gemma2", "gpt_oss", "mixtral")
RULES = ("dense", "decode", "every-row")
TESTS = "generat or greedy or sampl or beam or assisted or lookup or cache or contrastive or left_pad"
VARIABLE = "SPARSE_DECODE_RULE"


def pytest_configure(config: Any) -> None:
    """Wrap `generate`, as the environment says: the plugin's side."""
    rule = os.environ.get(VARIABLE, "dense")
    if rule != "dense":
        _attach_all("decode" if rule == "decode" else 0)


def _attach_all(rows: Any) -> None:
    from sparse_decode import Budget, LshSelector, attach
    from transformers import GenerationMixin
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    causal = {name for names in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values() for name in _listed(names)}
    owner: Any = GenerationMixin
    plain = owner.generate

    @wraps(plain)
    def generate(self: Any, *arguments: Any, **options: Any) -> Any:
        name = str(getattr(self.get_decoder().config, "_attn_implementation", ""))
        if type(self).__name__ not in causal or name not in ("sdpa", "eager"):
            return plain(self, *arguments, **options)
        whole, selector = Budget(1.0), LshSelector(self.config)
        with attach(self, selector, whole, dense_layers=0, sparse_rows=rows, decode_rows=64 if rows else 1):
            return plain(self, *arguments, **options)

    owner.generate = generate


def _listed(names: Any) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names)


def outcomes(tree: Path, family: str, rule: str) -> dict[str, str]:
    """Run one family's tests under a rule; returns "passed", "failed" or "skipped" by test.

    Raises: SystemExit if pytest ran none.
    """
    with tempfile.TemporaryDirectory(prefix="transformers-tests-") as folder:
        report = Path(folder) / "report.xml"
        paths = os.pathsep.join([str(Path(__file__).parent), str(tree)])
        environment = {**os.environ, VARIABLE: rule, "PYTHONPATH": paths, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "pytest", f"tests/models/{family}", "-q", "-k", TESTS, "-o", "addopts="]
        command += ["-p", Path(__file__).stem, f"--junit-xml={report}", "-p", "no:cacheprovider"]
        done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
        if not report.is_file():
            raise SystemExit(f"pytest ran no test of {family}: {(done.stdout + done.stderr).strip()[-500:]}")
        found: dict[str, str] = {}
        for case in ET.parse(report).iter("testcase"):
            kinds = {child.tag for child in case}
            verdict = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
            found[f"{case.get('classname')}::{case.get('name')}"] = verdict
    if not found:
        raise SystemExit(f"expected tests of {family} in {tree / 'tests' / 'models' / family}, found none")
    return found


def require_tests(tree: Path, families: list[str]) -> None:
    """Raise SystemExit with one sentence if the tests are not there."""
    wanted = [tree / "tests/generation/test_utils.py"]
    wanted += [tree / f"tests/models/{family}/test_modeling_{family}.py" for family in families]
    if missing := [path for path in wanted if not path.is_file()]:
        version = importlib.metadata.version("transformers")
        raise SystemExit(
            f"expected {missing[0].relative_to(tree)} in {tree}, found none: a source distribution lacks these; "
            f"give a checkout of transformers' tag v{version}"
        )


def main(arguments: list[str]) -> int:
    """Compare dense and attached runs of each family; 1 if a test passes dense and fails attached."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tree", type=Path)
    parser.add_argument("--families", nargs="+", default=list(FAMILIES))
    asked = parser.parse_args(arguments)
    tree = asked.tree.resolve()
    require_tests(tree, asked.families)
    broken = 0
    for family in asked.families:
        found = {rule: outcomes(tree, family, rule) for rule in RULES}
        passed = {rule: sum(verdict == "passed" for verdict in each.values()) for rule, each in found.items()}
        print(f"{family:10} " + ", ".join(f"{rule}: {count} pass" for rule, count in passed.items()), flush=True)
        for rule in RULES[1:]:
            lost = [test for test, was in found["dense"].items() if was == "passed" and found[rule].get(test) != was]
            broken += len(lost)
            for test in lost:
                print(f"  {rule}: {found[rule].get(test, 'not run')} {test}")
    return int(broken > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
