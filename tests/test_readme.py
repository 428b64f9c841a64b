"""READMEs: their tables are generated, their code parses, and (once hashers are trained) the first example runs."""

import ast
import json
import os
import pathlib
import platform
import re
import runpy
import subprocess
import sys

import pytest
from hashtrain.demo import demo_model_path
from hashtrain.models import load_model
from hashtrain.settings.recipes import ABLATIONS, EXACT, RECIPES
from hashtrain.settings.train_command import PAPER, TrainCommand

TOOL = "update_readme"
ROOT = pathlib.Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
PAGES = ("results.md", "gpu.md", "families.md", "faults.md")
DOCS = [*(ROOT / "docs" / name for name in PAGES), *sorted(ROOT.glob("docs/results/*.md"))]
READMES = [README, *DOCS, *sorted(ROOT.glob("packages/*/README.md"))]
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


def test_the_tool_writes_every_readme(tool):
    assert tool.READMES == READMES


def test_a_table_without_its_result_is_an_error(tool, tmp_path):
    for name in tool.BLOCKS:
        with pytest.raises(ValueError, match=r"\.json"):
            tool.render(f"<!-- results:{name} -->\n<!-- end -->", tmp_path)


def test_a_malformed_block_is_an_error(tool):
    with pytest.raises(ValueError, match="malformed"):
        tool.render("<!-- results:iou -->\n")
    with pytest.raises(ValueError, match="unknown block"):
        tool.render("<!-- results:nothing -->\n<!-- end -->")


def test_a_block_is_filled_and_what_is_around_it_stays(tool):
    text = tool.render("before\n<!-- results:training -->\nold\n<!-- end -->\nafter\n")
    assert re.fullmatch(r"before\n<!-- results:training -->\n\n.*\| mean \|.*\n\n<!-- end -->\nafter\n", text, re.S)
    assert "old" not in text
    assert tool.render(text) == text


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


def test_what_is_run_and_what_is_not(check):
    text = (
        "```bash\necho one\n```\n<!-- not run: takes a day -->\n```bash\necho two\n```\n"
        "```python\nthree\n```\n```bash\nuse path/or/hub-id\n```\n<!-- not run: nothing follows -->\n\n"
        "```bash\necho five\n```\n"
    )
    found = check.blocks(text)
    assert [b.language for b in found] == ["bash", "bash", "python", "bash", "bash"]
    assert [bool(b.skipped) for b in found] == [False, True, False, True, False], "the mark stands directly above"
    assert found[1].skipped == "takes a day"
    assert [text.splitlines()[b.line - 1] for b in found] == [b.code.splitlines()[0] for b in found]


def test_every_block_of_the_readme_is_found_and_some_are_run(check):
    text = README.read_text()
    found = check.blocks(text)
    assert 2 * len(found) == len(re.findall(r"^```", text, re.M)), "a fence is not closed, or stands indented"
    run = [b.code for b in found if b.language == "bash" and not b.skipped]
    assert "uv run" in run[0]
    assert run[0].startswith("pip install uv")


def test_blocks_run_in_order_until_one_fails(check, tmp_path, capfd):
    (tmp_path / "clone").mkdir()
    codes = ["echo uv run > made", "cat made; test ! -e $HOME/x", "false; true", "touch never"]
    chosen = [(n, check.Block("bash", code, n)) for n, code in enumerate(codes, 1)]
    clean = check.environment(
        tmp_path, {"UV_INDEX_URL": "u", "PIP_CERT": "c", "https_proxy": "p", "VIRTUAL_ENV": "v"}, False
    )
    assert {"UV_INDEX_URL", "PIP_CERT", "https_proxy"} <= set(clean)
    assert "VIRTUAL_ENV" not in clean
    assert not any(pathlib.Path(clean["HOME"]).iterdir())
    with pytest.raises(ValueError, match=r"expected block 3 \(line 3\) to succeed, got exit code 1"):
        check.run_blocks(chosen, tmp_path, clean)
    assert (tmp_path / "block-2.txt").read_text() == "uv run\n"
    assert not (tmp_path / "clone" / "never").exists()
    assert len(capfd.readouterr().out.splitlines()) == 3
    assert check.run_blocks(chosen[:2], tmp_path, clean) >= 0
    assert check.run_blocks(chosen[1:2], tmp_path, clean) is None
    times = []
    check.run_blocks(chosen[:2], tmp_path, clean, times)
    check.store(tmp_path / "times.json", [block for _, block in chosen[:2]], times, tmp_path / "clone", sys.executable)
    stored = json.loads((tmp_path / "times.json").read_text())
    assert [block["title"] for block in stored["blocks"]] == codes[:2]
    assert stored["disk"] >= len("uv run\n")
    assert stored["python"] == platform.python_version()


def test_as_many_families_are_tested_as_it_says():
    doubles = ast.parse((ROOT / "packages" / "sparse-decode" / "tests" / "sparse_decode_doubles.py").read_text())
    (made,) = [x.value for x in doubles.body if isinstance(x, ast.Assign) and ast.unparse(x.targets[0]) == "_CONFIGS"]
    (word,) = re.findall(r"(\w+) families in CI", README.read_text())
    assert {"fifteen": 15, "sixteen": 16, "seventeen": 17}[word] == len(made.keys)


def test_the_share_of_the_codes_is_what_they_take():
    code, pair = TrainCommand().bits // 8, 2 * 2 * 64  # bytes of a code, and of a 16-bit key and value of 64 numbers
    assert f"codes add {100 * code / pair:.0f} % to a cache at head size 64" in README.read_text()


def test_the_stored_times_are_of_the_commands_that_stand_there(check):
    stored = json.loads((ROOT / "docs" / "results" / "readme.json").read_text())
    run = [block for block in check.blocks(README.read_text(), "bash") if not block.skipped]
    assert [block["title"] for block in stored["blocks"]] == [block.title for block in run], "run tools/check_readme.py"


@pytest.mark.parametrize("name", ["draw_overview", "draw_reach"])
def test_a_figure_is_of_the_stored_results(load, tmp_path, name):
    tool, stored = load("tools", name), load("tools", "stored_figure")
    assert stored.drawn_from(tool.OUT) == tool.digest(), f"run `uv run tools/{name}.py`"
    for name in tool.INPUTS:
        (tmp_path / name).write_bytes((tool.RESULTS / name).read_bytes() + b" ")
    (tmp_path / "drawn.png").write_bytes(tool.draw(tmp_path))
    assert stored.drawn_from(tmp_path / "drawn.png") == tool.digest(tmp_path) != tool.digest()


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
    assert all(0.019 < density <= 0.02 for density in densities.values())


def test_the_readme_is_read_in_a_minute():
    assert len(README.read_bytes()) <= 6 << 10


def test_the_size_of_the_demo_model_is_the_committed_ones():
    model, _ = load_model(str(demo_model_path()))
    said = f"a code model of {sum(x.numel() for x in model.parameters()) / 1e6:.1f} M parameters"
    assert said in " ".join((ROOT / "README.md").read_text().split())


def test_every_hasher_has_the_learning_rate_that_was_found_best():
    best = json.loads((ROOT / "docs" / "results" / "learning_rates.json").read_text())["best"]
    assert best == {c.name: c.learning_rate for c in RECIPES + ABLATIONS if c.trained}
    assert {c.learning_rate for c in EXACT} == {PAPER["learning_rate"]}  # which is not ours to find
