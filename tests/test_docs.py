"""The checks of tools/build_docs.py pass what is right and find what is wrong. The build is a step of .ci/run."""

import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
EXTENSIONS = "docs/site/extensions"


@pytest.fixture(scope="module")
def commands(load):
    return load("tools", "docs_checks.commands")


@pytest.fixture(scope="module")
def links(load):
    return load("tools", "docs_checks.links")


@pytest.fixture(scope="module")
def pages(load):
    return load("tools", "docs_checks.pages")


@pytest.fixture(scope="module")
def public_names(load):
    pytest.importorskip("sphinx", reason="comes with the group docs")
    return load(EXTENSIONS, "public_names")


@pytest.mark.parametrize(
    "code",
    [
        "pip install uv && uv run hashtrain  # it's quick",
        "uv run hashtrain --model a/b --text FILE ... --out runs/x \\\n  --dry-run",
        "hashtrain push runs/mine/transform OWNER/NAME",
        "HF_HUB_OFFLINE=1 uv run evals ppl --budgets 0.02 0.01; uv run evals list",
        "uv run sparse-decode --prompt-file long.txt --compare",
        "uv run --group docs tools/build_docs.py",
        "uv run tools/update_readme.py --check",
        "uv run python -m torch.distributed.run --nproc-per-node 2 -m hashtrain --spread data",
        "uv run python -c '\nimport sys\nprint(sys.argv)  # both\n'",
        "uv sync --group docs",
        'uv pip install "./packages/hashcore[cuda]" ./packages/evals',
        "uv run pytest tests/test_docs.py",
        "uv venv path/or/it && uv pip sync --python path/or/it requirements.txt && curl -d '{}' http://localhost:8000",
        "uv run --no-project tools/serving_environment.py tools/check_serving.py --quick",
        "uv run --no-project tools/serving_environment.py -m vllm.entrypoints.openai.api_server --model x",
    ],
)
def test_commands_that_are_right_pass(commands, code):
    assert commands.problems(code) == []


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("uv run hashtrain --no-such 1", "no-such"),
        ("uv run hashtrain --bits 33", "multiple of 32"),
        ("uv run evals ppl --budgets nine", "nine"),
        ("uv run evals nothing", "nothing"),
        ("uv run sparse-decode --compare", "prompt-file"),
        ("uv run tools/update_readme.py --cheque", "got --cheque"),
        ("uv run tools/none.py", "got tools/none.py"),
        ("uv run python -m torch.distributed.run --nproc-per-mode 2 -m hashtrain", "nproc-per-mode"),
        ("uv run python -m torch.distributed.run -m hashtrain --no-such 1", "no-such"),
        ("uv run python -m no_such_module", "no_such_module"),
        ("uv run python -c 'x ='", "does not compile"),
        ("uv sync --group none", "got 'none'"),
        ("uv pip install ./packages/none", "got ./packages/none"),
        ("uv pip install './packages/hashcore[none]'", "got none"),
        ("uv run pytest tests/none.py", "got tests/none.py"),
        ("uv run hashtrain && frobnicate", "got frobnicate"),
        ("uv run evals ppl --help", "got a request for help"),
        ("uv pip sync none.txt", "got none.txt"),
        ("uv cache clean", "got uv cache"),
        ("uv run tools/serving_environment.py tools/check_serving.py --quicker", "got --quicker"),
    ],
)
def test_a_command_that_is_wrong_is_told(commands, code, said):
    (problem,) = commands.problems(code)
    assert said in problem


def test_code_keeps_its_line_numbers(pages):
    text = "# Title\n\n```python\na = 1\n```\n\n- item\n\n  ```python\n  b = 2\n  ```\n\n```bash\nls\n```\n"
    found = pages.blocks(text)
    assert [(block.language, block.line, block.code) for block in found] == [
        ("python", 4, "a = 1\n"),
        ("python", 10, "b = 2\n"),
        ("bash", 14, "ls\n"),
    ]
    assert pages.module(found).splitlines() == ["", "", "", "a = 1", "", "", "", "", "", "b = 2"]
    assert pages.module(found[2:]) == ""


def test_links_that_lead_somewhere_pass(links, tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "a.html").write_text('<h1 id="top"></h1><a href="sub/b.html#x&amp;y"></a><a href="https://e.org/"></a>')
    (tmp_path / "sub" / "b.html").write_text('<p id="x&amp;y"></p><a href="../a.html#top"></a><a href="#x&amp;y"></a>')
    found = links.check(tmp_path)
    assert found.problems == []
    assert found.external == {"https://e.org/": "a.html"}


@pytest.mark.parametrize(
    ("tag", "said"),
    [
        ('<a href="none.html"></a>', "link none.html"),
        ('<a href="#none"></a>', "link #none"),
        ('<a href="other.html#none"></a>', "link other.html#none"),
        ('<img src="none.png">', "link none.png"),
        ('<script src="https://e.org/x.js"></script>', "loads https://e.org/x.js"),
        ('<link rel="stylesheet" href="//e.org/x.css">', "loads //e.org/x.css"),
    ],
)
def test_a_link_that_leads_nowhere_is_told(links, tmp_path, tag, said):
    (tmp_path / "page.html").write_text(tag)
    (tmp_path / "other.html").write_text('<p id="some"></p>')
    (problem,) = links.check(tmp_path).problems
    assert said in problem


def test_a_folder_is_its_readme_or_its_first_page(load):
    pytest.importorskip("sphinx", reason="comes with the group docs")
    links = load(EXTENSIONS, "forge_links")
    pages = {"docs/adr/0002-b", "docs/adr/0001-a", "packages/x/README", "packages/x/CHANGELOG", "docs/log"}
    assert links.folder_of("docs/how-to/page", "../../packages/x") == "packages/x"
    assert links.page_for("packages/x", pages) == "packages/x/README"
    assert links.page_for("docs/adr", pages) == "docs/adr/0001-a"
    assert links.page_for("packages", pages) is None


def test_equations_are_numbered_from_1_without_a_gap(public_names):
    assert list(public_names.equations()) == [str(n) for n in range(1, len(public_names.equations()) + 1)]


def test_what_pages_and_examples_import_from_modules_is_in_the_reference(public_names):
    found = public_names.imported("hashtrain")
    assert ("hashtrain.demo", "demo_model_path") in found  # a page
    assert ("hashtrain.evaluation.metrics", "best") in found  # the notebook
    assert not {name for module, name in found if module == "hashtrain"}
    assert ("hashcore.cuda.source", "read_source") in public_names.imported("hashcore")  # one of several


def test_a_docstring_becomes_fields_with_links(public_names):
    lines = [
        "Do *it*.",
        "",
        "Args:",
        "    a, b: what `x_y`",
        "        goes on.",
        "Returns: int32 [B].",
        "Source: eq. 1 and 2.",
    ]
    assert public_names.to_rst(lines, {"1": "at#1", "2": "at#2"}) == [
        *("Do \\*it\\*.", "", "", ":Args:", "", "    * **a, b**: what `x_y`", "      goes on."),
        *("", ":Returns: int32 [B].", "", ":Source: eq. `1 <at#1>`__ and `2 <at#2>`__."),
    ]


def test_a_docstring_may_cite_only_what_there_is(public_names):
    with pytest.raises(ValueError, match=r"expected an equation of docs/algorithm\.md, 1, got 7"):
        public_names.to_rst(["See eq. 7."], {"1": "at"})


def test_every_equation_that_the_sources_cite_exists(public_names):
    known, cited = set(public_names.equations()), {}
    for path in sorted(ROOT.glob("packages/*/src/**/*")):
        if path.suffix in (".py", ".cu", ".cuh"):
            for found in public_names.EQUATIONS.finditer(path.read_text(encoding="utf-8")):
                cited.update(dict.fromkeys(re.findall(r"\d+", found[2]), path.name))
    assert len(cited) > 10
    assert {number: file for number, file in cited.items() if number not in known} == {}


def test_mathematics_survives_a_forge():
    """Forges read Markdown first: a backslash before punctuation would be gone when the formula is read."""
    for path in ROOT.glob("docs/**/*.md"):
        for formula in re.findall(r"\$\$(.*?)\$\$|(?<!\$)\$([^$\n]+)\$", path.read_text(encoding="utf-8"), re.S):
            assert not re.search(r"\\[^A-Za-z]", "".join(formula)), f"{path.name}: {formula}"


def test_an_unknown_command_of_latex_is_an_error(load):
    pytest.importorskip("sphinx", reason="comes with the group docs")
    mathml = load(EXTENSIONS, "mathml").mathml
    assert "<msub>" in mathml(r"s_k = \sum_{p} w_p", "block")
    with pytest.raises(Exception, match="expected LaTeX that latex2mathml knows"):
        mathml(r"\nosuchcommand{x}", "inline")
    with pytest.raises(Exception, match="expected LaTeX that latex2mathml knows"):
        mathml(r"x_", "inline")
