"""What helps the next person stays true: decisions, CONTRIBUTING, the hooks before a commit, the citation."""

import pathlib
import re
import subprocess
import tomllib

import pytest
import yaml

ROOT = pathlib.Path(__file__).resolve().parent.parent
ADRS = sorted((ROOT / "docs" / "adr").glob("*.md"))
GUIDES = [ROOT / "CONTRIBUTING.md", ROOT / "examples" / "README.md", *ADRS]
HOOKS = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]

guides = pytest.mark.parametrize("path", GUIDES, ids=lambda path: str(path.relative_to(ROOT)))


def tracked():
    git = ["git", "-c", f"safe.directory={ROOT}", "ls-files", "--cached", "--others", "--exclude-standard"]
    return subprocess.run(git, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()


def test_decisions_are_numbered_once_and_short():
    assert len({path.name[:4] for path in ADRS}) == len(ADRS), "a number is never used again"
    for path in ADRS:
        text, number = path.read_text(), int(path.name[:4])
        assert text.startswith(f"# {number}. ")
        assert len(text.splitlines()) <= 40, f"{path.name} is longer than 40 lines: keep what was decided and why"
        assert {"## Question", "## Decision"} <= set(text.splitlines())


def test_decisions_cite_results_and_log_entries_that_exist():
    log = (ROOT / "docs" / "log.md").read_text()
    titles = {line.partition(": ")[2] for line in log.splitlines() if line.startswith("## ")}
    for path in ADRS:
        text = path.read_text()
        for name in re.findall(r"`results/(\w+\.json)`", text):
            assert (ROOT / "docs" / "results" / name).is_file(), f"{path.name} cites {name}"
        for quoted in re.findall(r'"([^"\n]+)"', " ".join(re.findall(r"\(docs/log\.md, ([^)]*)\)", text))):
            assert any(title.startswith(quoted) for title in titles), f"{path.name} cites {quoted!r} of the log"


@guides
def test_links_lead_somewhere(path):
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", path.read_text()):
        assert target.startswith("https://") or (path.parent / target).exists(), f"{path.name} links to {target}"


@guides
def test_files_it_names_exist(path):
    """`tools/x.py`, `tests/x.py`, and `test_x.py` of any package."""
    files = tracked()
    for name in re.findall(r"`(?:uv run [^`]*?)?((?:tools|tests|docs|packages)/[\w./-]+\.\w+)", path.read_text()):
        assert name in files, f"{path.name} names {name}"
    for name in re.findall(r"`(test_\w+\.py)`", path.read_text()):
        assert any(file.endswith(f"/{name}") for file in files), f"{path.name} names {name}"


def test_names_that_contributing_gives_are_those_of_the_code():
    code = "\n".join(
        (ROOT / p).read_text() for p in tracked() if p.endswith(".py") and p.startswith(("packages", "tools"))
    )
    text = (ROOT / "CONTRIBUTING.md").read_text()
    names = set(re.findall(r"`(_?[A-Z][A-Z_]{3,}|[A-Z][a-z]+(?:[A-Z][a-z]+)+|[a-z]+(?:_[a-z]+)+)`", text))
    assert {"BY_VARIANT", "LayerHasher", "soft_keys", "NoCodes", "RIVALS", "_CONFIGS"} <= names
    names.remove("trust_remote_code")  # which no code of ours may set
    assert not {name for name in names if not re.search(rf"\b{name}\b", code)}


def test_hooks_are_local_and_act_on_something():
    assert [repo["repo"] for repo in HOOKS] == ["local"], "hooks are not fetched"
    hooks = HOOKS[0]["hooks"]
    assert {"ruff-format", "ruff-check", "basedpyright", "pins", "tables", "secrets", "unfinished", "licences"} <= {
        hook["id"] for hook in hooks
    }
    files = tracked()
    for hook in hooks:
        assert hook["language"] in ("system", "pygrep")
        for tool in re.findall(r"\S+\.py", hook["entry"]):
            assert tool in files
        assert "files" not in hook or any(re.search(hook["files"], file) for file in files), hook["id"]


def test_the_citation_is_of_this_version():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert cited["version"] == project["version"]
    assert cited["license"] == project["license"]
    assert {"cff-version", "message", "title", "authors", "type"} <= set(cited)
    (paper,) = cited["references"]
    assert paper["identifiers"][0]["value"].removeprefix("arXiv:") in (ROOT / "README.md").read_text()


def test_the_type_checker_reads_every_package():
    included = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["basedpyright"]["include"]
    assert all(any(ROOT.glob(pattern)) for pattern in included)
    sources = {str(path.relative_to(ROOT)) for path in ROOT.glob("packages/*/src")}
    assert {"tools", "examples/*.py", *sources} == {path for path in included if "/benchmarks/" not in path}
