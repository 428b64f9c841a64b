"""Run transformers' generation tests with every causal model attached at 100 %, and list those that pass only dense.

    uv run --with parameterized --with httpx tests/check_transformers_tests.py path/to/transformers
    (the same) path/to/transformers --families llama qwen3 --out docs/results/transformers_tests.json

The path is a checkout of transformers, best at the tag of the installed version, whose source distribution lacks the
tests. Names that tests of another version import but the installed one lacks are replaced by stubs, and tests that use
one are skipped. Each family's tests run dense, and attached under both rules (`decode`, and every row). Tests that pass
dense and fail attached are listed, but those that ask for attention weights, which are refused. Mistral's run with full
attention. Exits 1 if any is listed.

pytest also loads this file, as a plugin that wraps `generate` of the models under test.
"""

import argparse
import ast
import contextlib
import importlib
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tempfile
import types
import unittest
import xml.etree.ElementTree as ET
from collections import Counter
from functools import wraps
from pathlib import Path
from typing import Any

from hashtrain.files.atomic import write_text

FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gemma2", "gpt_oss", "mixtral")
RULES = ("dense", "decode", "every-row")
TESTS = "generat or greedy or sampl or beam or assisted or lookup or cache or contrastive or left_pad"
VARIABLE = "SPARSE_DECODE_RULE"
REFUSED, ALLOWED = "sparse rows have no attention weights", ("passed", "refused")


def pytest_configure(config: Any) -> None:
    """Wrap `generate` as the environment variables say, inside pytest."""
    tests = Path.cwd() / "tests"
    stand_in([*tests.glob("*.py"), *tests.glob("generation/*.py")])
    _give_mistral_full_attention()
    rule = os.environ.get(VARIABLE, "dense")
    _wrap_generate(rule != "dense", None if rule == "decode" else 0)


def _give_mistral_full_attention() -> None:
    """Disable Mistral's sliding window unless a test sets it; by default all its layers have one."""
    from transformers import MistralConfig

    kind: Any = MistralConfig
    plain = kind.__init__

    @wraps(plain)
    def init(self: Any, *arguments: Any, **options: Any) -> None:
        plain(self, *arguments, **{"sliding_window": None, **options})

    kind.__init__ = init


def _wrap_generate(attached: bool, rows: Any) -> None:
    """Attach all models, and show the tokens that the testers' masks hide at the end: steps behind them are refused."""
    from hashtrain.models import text_decoder
    from sparse_decode import Attachment, Budget, LshSelector
    from transformers import GenerationMixin
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    listed: Any = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()  # names, or tuples of names
    causal = {name for names in listed for name in ((names,) if isinstance(names, str) else names)}
    owner: Any = GenerationMixin
    plain = owner.generate

    @wraps(plain)
    def generate(self: Any, *arguments: Any, **options: Any) -> Any:
        if (mask := options.get("attention_mask")) is not None and mask.ndim == 2 and not mask[:, -1].all():
            options["attention_mask"] = mask.new_ones(mask.shape)
        name = str(getattr(text_decoder(self).config, "_attn_implementation", ""))
        if not attached or type(self).__name__ not in causal or name not in ("sdpa", "eager"):
            return plain(self, *arguments, **options)
        attachment = Attachment(self, LshSelector(self.config), Budget(1.0), dense_layers=0, sparse_rows=rows)
        # A compiled graph belongs to one attachment, so keep it for the next call, which must not recompile.
        with contextlib.nullcontext() if options.get("compile_config") else attachment:
            return plain(self, *arguments, **options)

    owner.generate = generate


def stand_in(files: list[Path]) -> None:
    """Add stubs for names that the tests import but the installed transformers lacks; calling one skips the test.

    Tests of pipelines, which the models' tests would import, are left out: they need their own version's source.
    """
    pipelines = types.ModuleType("tests.test_pipeline_mixin")
    vars(pipelines)["PipelineTesterMixin"] = type("PipelineTesterMixin", (), {})
    sys.modules[pipelines.__name__] = pipelines
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "transformers":
                try:
                    module = importlib.import_module(str(node.module))
                except ModuleNotFoundError:
                    module = sys.modules.setdefault(str(node.module), types.ModuleType(str(node.module)))
                for name in (alias.name for alias in node.names):
                    if not hasattr(module, name):
                        setattr(module, name, type(name, (), {"__new__": _skip}))


def _skip(kind: type, *arguments: Any, **options: Any) -> Any:
    raise unittest.SkipTest(f"expected {kind.__name__} of transformers, found none in the installed version")


def outcomes(tree: Path, family: str, rule: str) -> dict[str, str]:
    """Run one family's tests under a rule; return "passed", "failed", "refused" or "skipped" by test.

    Raises: SystemExit if pytest ran none.
    """
    with tempfile.TemporaryDirectory(prefix="transformers-tests-") as folder:
        report = Path(folder) / "report.xml"
        mine = [str(Path(__file__).parent), str(tree)]
        paths = os.pathsep.join([*mine, *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {**os.environ, VARIABLE: rule, "PYTHONPATH": paths, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "pytest", f"tests/models/{family}", "-q", "-k", TESTS, "-o", "addopts="]
        command += ["-p", Path(__file__).stem, f"--junit-xml={report}", "-p", "no:cacheprovider"]
        done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
        if not report.is_file():
            raise SystemExit(f"pytest ran no test of {family}: {(done.stdout + done.stderr).strip()[-500:]}")
        found: dict[str, str] = {}
        for case in ET.parse(report).iter("testcase"):
            kinds, told = {child.tag for child in case}, " ".join(child.get("message", "") for child in case)
            verdict = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
            verdict = "refused" if verdict == "failed" and REFUSED in told else verdict
            found[f"{case.get('classname')}::{case.get('name')}"] = verdict
    if not found or set(found.values()) == {"failed"}:  # a file that cannot be imported is reported as one failure
        reason = (done.stdout + done.stderr).strip()[-500:]
        raise SystemExit(f"expected tests of {family} that run, got {len(found)} failures and no other: {reason}")
    return found


def version_of(tree: Path) -> str:
    """Return the version of a checkout, or "no version"."""
    file = tree / "src" / "transformers" / "__init__.py"
    found = re.search(r"^__version__ = \"(.+)\"$", file.read_text("utf-8") if file.is_file() else "", re.M)
    return found[1] if found else "no version"


def require(tree: Path, families: list[str]) -> None:
    """Raise SystemExit with one sentence if tests are missing."""
    wanted = [f"tests/models/{family}/test_modeling_{family}.py" for family in families]
    if lacks := [name for name in ("tests/generation/test_utils.py", *wanted) if not (tree / name).is_file()]:
        raise SystemExit(f"expected a checkout of transformers with {lacks[0]}, got {version_of(tree)} in {tree}")


def lost(found: dict[str, dict[str, str]]) -> dict[str, list[str]]:
    """Return by rule the tests that pass dense and do not pass attached, with what became of them."""
    passed = [test for test, was in found["dense"].items() if was == "passed"]
    return {
        rule: [f"{was} {test}" for test in passed if (was := found[rule].get(test, "not run")) not in ALLOWED]
        for rule in RULES[1:]
    }


def store(path: Path, tree: Path, families: dict[str, dict[str, dict[str, str]]]) -> None:
    """Store as JSON what became of each family's tests, of the version `tests_of`, and which were lost."""
    counts = {name: {rule: Counter(tests.values()) for rule, tests in own.items()} for name, own in families.items()}
    content = {"transformers": importlib.metadata.version("transformers"), "tests_of": version_of(tree)}
    content |= {"families": counts, "lost": {family: lost(own) for family, own in families.items()}}
    write_text(path, json.dumps(content, indent=1) + "\n")


def main(arguments: list[str]) -> int:
    """Compare dense and attached runs of each family; return 1 if a test passes dense and fails attached."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tree", type=Path)
    parser.add_argument("--families", nargs="+", default=list(FAMILIES))
    parser.add_argument("--out", type=Path, help="JSON file to write, anew after each family")
    options = parser.parse_args(arguments)
    tree = options.tree.resolve()
    require(tree, options.families)
    found = {}
    for family in options.families:
        own = found[family] = {rule: outcomes(tree, family, rule) for rule in RULES}
        passed = {rule: sum(verdict == "passed" for verdict in tests.values()) for rule, tests in own.items()}
        print(f"{family:10} " + ", ".join(f"{rule}: {count} pass" for rule, count in passed.items()), flush=True)
        for rule, tests in lost(own).items():
            for test in tests:
                print(f"  {rule}: {test}")
        if options.out is not None:
            store(options.out, tree, found)
    return int(any(any(lost(own).values()) for own in found.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
