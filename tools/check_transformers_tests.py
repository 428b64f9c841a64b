"""Run transformers' own generation tests with every causal model attached at 100 %: do any fail that pass dense?

    uv run --with parameterized --with httpx tools/check_transformers_tests.py path/to/transformers
    (the same) path/to/transformers --families llama qwen3
    (the same) path/to/transformers --other-version

The path is a source tree of the installed version of transformers, with tests/generation and tests/models. Its source
distribution carries neither, so it must be a checkout of the version's tag. Nothing is fetched. With `--other-version`
it may be of another tag: names that its tests import and the installed version lacks are stood in for, and a test that
uses one is skipped. Each family's tests run dense, and attached under both rules (`decode`, and every row); those that
pass dense and fail attached are named: what another version's tests expect otherwise fails dense, too. Mistral's are
run with full attention.
Exits 1 if there is one.

pytest loads this file as a plugin, too: it wraps `generate` of the models under test.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib
import importlib.metadata
import os
import subprocess
import sys
import tempfile
import types
import unittest
import xml.etree.ElementTree as ET
from functools import wraps
from pathlib import Path
from typing import Any

FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gemma2", "gpt_oss", "mixtral")
RULES = ("dense", "decode", "every-row")
TESTS = "generat or greedy or sampl or beam or assisted or lookup or cache or contrastive or left_pad"
VARIABLE = "SPARSE_DECODE_RULE"
OTHER = "SPARSE_DECODE_OTHER_TESTS"


def pytest_configure(config: Any) -> None:
    """Wrap `generate`, as the environment says: the plugin's side."""
    if other := os.environ.get(OTHER):
        stand_in(sorted(Path(other).glob("*.py")) + sorted(Path(other).glob("generation/*.py")))
    _let_mistral_see_all()
    rule = os.environ.get(VARIABLE, "dense")
    if rule != "dense":
        _attach_all("decode" if rule == "decode" else 0)


def _let_mistral_see_all() -> None:
    """Give Mistral full attention where a test does not say otherwise: by default all its layers slide."""
    from transformers import MistralConfig

    kind: Any = MistralConfig
    plain = kind.__init__

    @wraps(plain)
    def init(self: Any, *arguments: Any, **options: Any) -> None:
        plain(self, *arguments, **{"sliding_window": None, **options})

    kind.__init__ = init


def _attach_all(rows: Any) -> None:
    from hashtrain.models import text_decoder
    from sparse_decode import Budget, LshSelector, attach
    from transformers import GenerationMixin
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    causal = {name for names in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values() for name in _listed(names)}
    owner: Any = GenerationMixin
    plain = owner.generate

    @wraps(plain)
    def generate(self: Any, *arguments: Any, **options: Any) -> Any:
        name = str(getattr(text_decoder(self).config, "_attn_implementation", ""))
        if type(self).__name__ not in causal or name not in ("sdpa", "eager"):
            return plain(self, *arguments, **options)
        how = {"dense_layers": 0, "sparse_rows": rows, "max_decode_rows": 64 if rows else 1}
        attachment = attach(self, LshSelector(self.config), Budget(1.0), **how)
        # A compiled graph is that of one attachment: the next call, which must not compile again, finds it here.
        with contextlib.nullcontext() if options.get("compile_config") else attachment:
            return plain(self, *arguments, **options)

    owner.generate = generate


def stand_in(files: list[Path]) -> None:
    """Give transformers what test files import from it and the installed version lacks: a call of it skips a test.

    Tests of pipelines, which the models' tests would bring in, are left out: they import a version's own source.
    """
    pipelines = types.ModuleType("tests.test_pipeline_mixin")
    vars(pipelines)["PipelineTesterMixin"] = type("PipelineTesterMixin", (), {})
    sys.modules[pipelines.__name__] = pipelines
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "transformers":
                module = _module(str(node.module))
                for name in (each.name for each in node.names):
                    if not hasattr(module, name):
                        setattr(module, name, type(name, (), {"__new__": _skip}))


def _module(name: str) -> types.ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        return sys.modules.setdefault(name, types.ModuleType(name))


def _skip(kind: type, *arguments: Any, **options: Any) -> Any:
    raise unittest.SkipTest(f"expected {kind.__name__} of transformers, found none in the installed version")


def _listed(names: Any) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names)


def outcomes(tree: Path, family: str, rule: str, other: bool = False) -> dict[str, str]:
    """Run one family's tests under a rule; returns "passed", "failed" or "skipped" by test.

    Args:
        other: whether the tests may be another version's.
    Raises: SystemExit if pytest ran none.
    """
    with tempfile.TemporaryDirectory(prefix="transformers-tests-") as folder:
        report = Path(folder) / "report.xml"
        mine = [str(Path(__file__).parent), str(tree)]
        paths = os.pathsep.join([*mine, *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {**os.environ, VARIABLE: rule, "PYTHONPATH": paths, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        environment[OTHER] = str(tree / "tests") if other else ""
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
    if not found or set(found.values()) == {"failed"}:  # a file that cannot be imported is one failure
        reason = (done.stdout + done.stderr).strip()[-500:]
        raise SystemExit(f"expected tests of {family} that run, got {len(found)} failures and no other: {reason}")
    return found


def require_tests(tree: Path, families: list[str]) -> None:
    """Raise SystemExit with one sentence if the tests are not there."""
    wanted = [tree / "tests/generation/test_utils.py"]
    wanted += [tree / f"tests/models/{family}/test_modeling_{family}.py" for family in families]
    if missing := [path for path in wanted if not path.is_file()]:
        version = importlib.metadata.version("transformers")
        raise SystemExit(
            f"expected {missing[0].relative_to(tree)} in {tree}, found none: a source distribution lacks these; "
            f"give a checkout of transformers' tag v{version}, or another one's with --other-version"
        )


def main(arguments: list[str]) -> int:
    """Compare dense and attached runs of each family; 1 if a test passes dense and fails attached."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tree", type=Path)
    parser.add_argument("--families", nargs="+", default=list(FAMILIES))
    parser.add_argument("--other-version", action="store_true", help="the tests are not the installed version's")
    asked = parser.parse_args(arguments)
    tree = asked.tree.resolve()
    require_tests(tree, asked.families)
    broken = 0
    for family in asked.families:
        found = {rule: outcomes(tree, family, rule, asked.other_version) for rule in RULES}
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
