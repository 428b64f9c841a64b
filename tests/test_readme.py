"""READMEs: their tables are generated from stored runs, their code parses, and (once hashers are trained) runs."""

import ast
import json
import os
import pathlib
import re
import runpy
import subprocess

import pytest
from evals.runner import model_identity
from hashtrain.demo import demo_model_path
from hashtrain.models import load_model
from hashtrain.settings.recipes import ABLATIONS, EXACT, RECIPES
from hashtrain.settings.train_command import PAPER, TrainCommand

TOOL = "update_readme"
ROOT = pathlib.Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
READMES = [README, *sorted(ROOT.glob("docs/*.md")), *sorted(ROOT.glob("packages/*/README.md"))]
RESULTS = ROOT / "docs" / "results"
# Unrelated projects of these names exist in the public index: install by path.
FROM_INDEX = re.compile(
    r"(?:(?:pip install|uv add)(?:[ \t]+[^\s`&;|]+)*?|\binstall)"
    r"[ \t]+(?:the extra )?['\"`]?(?:hashcore|hashtrain|sparse[-_]decode|evals)(?![\w/.-])"
)
_SPLIT = re.compile(r"""["']\s*\n\s*f?["']""")  # one text over two lines of a source

readmes = pytest.mark.parametrize("readme", READMES, ids=lambda path: str(path.relative_to(ROOT)))


@pytest.fixture(scope="module")
def check(load):
    return load("tools", "check_readme")


@readmes
def test_tables_are_what_the_tool_renders(tool, readme):
    assert tool.render(readme.read_text()) == readme.read_text(), "run `uv run tools/update_readme.py`"


@readmes
def test_code_parses(check, readme):
    for block in check.blocks(readme.read_text(), "bash"):
        done = subprocess.run(["bash", "-n"], input=block.code, text=True, capture_output=True)
        assert done.returncode == 0, done.stderr
    for block in check.blocks(readme.read_text(), "python"):
        ast.parse(block.code)


@readmes
def test_nothing_of_ours_is_installed_by_name(readme):
    assert not FROM_INDEX.search(readme.read_text()), "write the path form: pip install ./packages/NAME"


def from_index(source: str) -> str | None:
    """Return the words of a source or document that install one of our packages by its name."""
    found = FROM_INDEX.search(_SPLIT.sub("", source))
    return found and found[0]


def test_no_message_and_no_document_installs_ours_by_name():
    places = ("packages/*/src", "packages/*/benchmarks", "examples", "tools", "docs")
    files = {path for place in places for folder in ROOT.glob(place) for path in folder.rglob("*")}
    files = {path for path in files if path.suffix in (".py", ".md", ".ipynb")} | set(ROOT.glob("*.md"))
    assert {"texts.py", "chat.py", "relock.py", "tutorial.md", "CONTRIBUTING.md"} <= {path.name for path in files}
    found = {str(path.relative_to(ROOT)): words for path in sorted(files) if (words := from_index(path.read_text()))}
    assert not found, "write the path form: uv pip install './packages/NAME[EXTRA]'"


def test_the_pattern_tells_names_from_paths():
    for line in (
        "pip install evals",
        "pip install -q 'torch' hashcore",
        "uv pip install --no-deps 'sparse-decode'",
        "uv pip install 'hashtrain[datasets]'",
        "not installed; install sparse-decode[flash] where",
        '"not installed: install the extra "\n    "`evals[lm-eval]`"',
    ):
        assert from_index(line), line
    for line in (
        "pip install uv && uv run evals ppl",
        "pip install ./packages/evals",
        "pip install uv",
        "uv run evals",
        "uv pip install './packages/hashtrain[datasets]'",
        "install it and run evals",
    ):
        assert not from_index(line), line


def test_as_many_families_are_tested_as_it_says():
    doubles = ast.parse((ROOT / "packages" / "sparse-decode" / "tests" / "sparse_decode_doubles.py").read_text())
    (made,) = [x.value for x in doubles.body if isinstance(x, ast.Assign) and ast.unparse(x.targets[0]) == "_CONFIGS"]
    (word,) = re.findall(r"(\w+) families in CI", README.read_text())
    assert {"fifteen": 15, "sixteen": 16, "seventeen": 17}[word] == len(made.keys)


def test_the_share_of_the_codes_is_what_they_take():
    code, pair = TrainCommand().bits // 8, 2 * 2 * 64  # bytes of a code, and of a 16-bit key and value of 64 numbers
    assert f"codes add {100 * code / pair:.0f} % to a cache at head size 64" in README.read_text()


def test_the_stored_times_are_of_the_commands_that_stand_there(check):
    stored = json.loads((RESULTS / "readme.json").read_text())
    run = [block for block in check.blocks(README.read_text(), "bash") if not block.skipped]
    assert [block["title"] for block in stored["blocks"]] == [block.title for block in run], "run tools/check_readme.py"


def test_a_figure_of_other_results_is_noticed(tool, tmp_path):
    for figure in tool.FIGURES:
        assert not figure.is_stale(), "run `uv run tools/update_readme.py`"
        for name in figure.inputs:
            (tmp_path / f"{name}.json").write_bytes((RESULTS / f"{name}.json").read_bytes() + b" ")
        assert figure.digest(tmp_path) != figure.digest()


def test_a_number_that_is_not_of_the_stored_result_is_noticed(tool, tmp_path):
    for path in RESULTS.glob("*.json"):
        text = path.read_text()
        (tmp_path / path.name).write_text(
            text.replace('"seconds": 2', '"seconds": 9') if path.stem == "readme" else text
        )
    assert tool.render(README.read_text(), tmp_path) != README.read_text()


def test_quality_was_measured_on_the_committed_model():
    model, _ = load_model(str(demo_model_path()))
    runs = json.loads((RESULTS / "demo.json").read_text())
    for name in ("everywhere", "decode"):
        assert runs[name]["config"]["model_identity"] == model_identity(model.float())


# Last, and only on request: it needs the hashers that `uv run hashtrain` leaves in runs/.
@pytest.mark.skipif(
    "README_HASHERS" not in os.environ, reason="README_HASHERS names a folder that `uv run hashtrain` wrote"
)
def test_the_example_generates(check, tmp_path, monkeypatch, capsys):
    (code,) = [b.code for b in check.blocks(README.read_text(), "python")]
    assert '"runs/demo/transform"' in code
    code = code.replace("runs/demo", os.environ["README_HASHERS"])
    monkeypatch.chdir(ROOT)
    (tmp_path / "example.py").write_text(code)
    runpy.run_path(str(tmp_path / "example.py"), run_name="__main__")
    densities = ast.literal_eval(capsys.readouterr().out.strip().rsplit("\n", 1)[1])
    assert densities
    # Layers have shares of their own; together they read what was asked, rounded down to whole tokens.
    assert 0.019 < sum(densities.values()) / len(densities) <= 0.02


def test_the_size_of_the_demo_model_is_the_committed_ones():
    model, _ = load_model(str(demo_model_path()))
    said = f"a code model of {sum(x.numel() for x in model.parameters()) / 1e6:.1f} M parameters"
    assert said in " ".join((ROOT / "README.md").read_text().split())


def test_every_hasher_has_the_learning_rate_that_was_found_best():
    best = json.loads((RESULTS / "learning_rates.json").read_text())["best"]
    assert best == {c.name: c.learning_rate for c in RECIPES + ABLATIONS if c.trained}
    assert {c.learning_rate for c in EXACT} == {PAPER["learning_rate"]}  # which is not ours to find
