"""What tools/release.py checks: each rule is broken once, in a repository of two small packages."""

import subprocess

import pytest

TOOL = "release"
LOW, HIGH = "packages/low", "packages/high-up"


def project(name, version, dependencies=()):
    listed = ", ".join(f'"{one}"' for one in dependencies)
    return f'[project]\nname = "{name}"\nversion = "{version}"\ndependencies = [{listed}]\n'


FILES = {
    "pyproject.toml": project("whole", "1.0.0", ["low>=1.0,<2", "high-up>=2.1,<3"]),
    f"{LOW}/pyproject.toml": project("low", "1.0.0"),
    f"{LOW}/CHANGELOG.md": "# Changelog\n\n## 1.0.0\n\n- First.\n",
    f"{LOW}/src/low/__init__.py": "import os as system\nif system:\n    A = 1\nelse:\n    A, B = 2, 3\n",
    f"{LOW}/src/low/deep.py": "def f(): pass\nclass C: x = 1\n",
    f"{HIGH}/pyproject.toml": project("high-up", "2.1.0", ["numpy", "low>=1.0,<2"]),
    f"{HIGH}/CHANGELOG.md": "# Changelog\n\n## 2.1.0\n\n- Second `one`.\n# not a heading\n\n## 2.0.0\n\n- First.\n",
    f"{HIGH}/src/high_up/__init__.py": "import low.deep\nfrom low import A, B, deep\nfrom low.deep import C, f\n",
}


class Checkout:
    """A repository that a test may change."""

    def __init__(self, root):
        self.root = root
        self.git("init", "-q", "-b", "main")
        for path, text in FILES.items():
            self.write(path, text)
        self.commit()

    def git(self, *arguments):
        who = ["-c", "user.name=a", "-c", "user.email=a@example.invalid"]
        done = subprocess.run(["git", *who, *arguments], cwd=self.root, check=True, capture_output=True, text=True)
        return done.stdout.strip()

    def write(self, path, text):
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text(text)

    def replace(self, path, old, new):
        text = (self.root / path).read_text()
        assert old in text
        self.write(path, text.replace(old, new))

    def commit(self):
        self.git("add", ".")
        self.git("commit", "-q", "-m", "x")


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    for who in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{who}_NAME", "a")
        monkeypatch.setenv(f"GIT_{who}_EMAIL", "a@example.invalid")
    return Checkout(tmp_path)


def test_a_sound_repository_has_no_complaint(tool, checkout, capsys):
    assert tool.main(["--check"], checkout.root) == 0
    assert tool.main([], checkout.root) == 0
    assert "would tag high-up-v2.1.0" in capsys.readouterr().out
    assert checkout.git("tag") == ""


def raised(checkout):
    """A new version of the lower package, which has a new name, after a tag of the old one."""
    checkout.git("tag", "low-v1.0.0")
    checkout.replace(f"{LOW}/pyproject.toml", "1.0.0", "1.1.0")
    checkout.replace(f"{LOW}/CHANGELOG.md", "## 1.0.0", "## 1.1.0\n\n- New.\n\n## 1.0.0")
    checkout.replace(f"{LOW}/src/low/deep.py", "def f", "def new(): pass\ndef f")
    checkout.write(f"{HIGH}/src/high_up/__init__.py", "def late():\n    from low.deep import new\n")


BROKEN = {
    "form": (lambda c: c.replace(f"{LOW}/pyproject.toml", "1.0.0", "1.0"), "low: expected a version of the form"),
    "no version": (lambda c: c.replace(f"{LOW}/pyproject.toml", "1.0.0", "x"), "low: expected a version of the form"),
    "entry": (lambda c: c.replace(f"{LOW}/CHANGELOG.md", "1.0.0", "1.0.1"), "low: expected `## 1.0.0` at the top"),
    "no entry": (lambda c: c.write(f"{LOW}/CHANGELOG.md", "# Changelog\n"), "got 'no entry'"),
    "empty entry": (lambda c: c.write(f"{LOW}/CHANGELOG.md", "## 1.0.0\n\n## 0.9.0\n- a\n"), "to describe 1.0.0"),
    "lower than a tag": (lambda c: c.git("tag", "low-v1.0.1"), "low: expected at least version 1.0.1"),
    "not admitted": (lambda c: c.replace(f"{HIGH}/pyproject.toml", "low>=1.0", "low>=1.1"), "that includes 1.0.0"),
    "no upper bound": (lambda c: c.replace(f"{HIGH}/pyproject.toml", ",<2", ""), "a lower and an upper bound"),
    "no lower bound": (lambda c: c.replace(f"{HIGH}/pyproject.toml", ">=1.0,", ""), "a lower and an upper bound"),
    "wide": (lambda c: c.replace(f"{HIGH}/pyproject.toml", ",<2", ",<3"), "to end below the next major version, 2"),
    "the whole's": (lambda c: c.replace("pyproject.toml", "high-up>=2.1", "high-up>=2.2"), "whole needs high-up"),
    "unknown name": (lambda c: c.replace(f"{LOW}/src/low/deep.py", "class C", "class D"), "low.deep.C (src/high_up"),
    "unknown module": (lambda c: (c.root / f"{LOW}/src/low/deep.py").unlink(), "low.deep (src/high_up"),
    "a name newer than the range": (raised, "the oldest version of that range lacks low.deep.new"),
}  # fmt: skip


@pytest.mark.parametrize("rule", BROKEN)
def test_a_broken_rule_is_one_sentence(tool, checkout, capsys, rule):
    change, sentence = BROKEN[rule]
    change(checkout)
    assert tool.main(["--check"], checkout.root) == 1
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1
    assert sentence in said[0]


def test_a_raised_lower_bound_admits_the_newer_name(tool, checkout):
    raised(checkout)
    checkout.replace(f"{HIGH}/pyproject.toml", "low>=1.0,", "low>=1.1,")
    assert tool.complaints(checkout.root) == []


def test_tags_are_annotated_with_the_entry_and_made_once(tool, checkout, capsys):
    head = checkout.git("rev-parse", "HEAD")
    assert tool.main(["--tag", "--tested", head[:10]], checkout.root) == 0
    assert checkout.git("tag").split() == ["high-up-v2.1.0", "low-v1.0.0"]
    assert checkout.git("cat-file", "-t", "high-up-v2.1.0") == "tag"
    text = checkout.git("tag", "--list", "--format=%(contents)", "high-up-v2.1.0")
    assert text == "high-up 2.1.0\n\n- Second `one`.\n# not a heading"
    capsys.readouterr()
    assert tool.main(["--tag", "--tested", head], checkout.root) == 0
    assert capsys.readouterr().out == ""


def test_a_package_that_changed_after_its_tag_is_named(tool, checkout, capsys):
    assert tool.main(["--tag", "--tested", checkout.git("rev-parse", "HEAD")], checkout.root) == 0
    checkout.write(f"{LOW}/src/low/more.py", "")
    checkout.commit()
    capsys.readouterr()
    assert tool.main([], checkout.root) == 0
    assert capsys.readouterr().out.startswith("low has changed since low-v1.0.0")


def test_nothing_is_tagged_untested(tool, checkout, capsys):
    first = checkout.git("rev-parse", "HEAD")
    checkout.write("new", "")
    checkout.commit()
    for arguments in ([], ["--tested", first], ["--tested", checkout.git("rev-parse", "HEAD")[:3]]):
        assert tool.main(["--tag", *arguments], checkout.root) == 1
        assert "expected --tested" in capsys.readouterr().err
    assert checkout.git("tag") == ""


def test_nothing_is_tagged_from_a_dirty_tree(tool, checkout, capsys):
    checkout.write("new", "")
    assert tool.main(["--tag", "--tested", checkout.git("rev-parse", "HEAD")], checkout.root) == 1
    assert "expected a clean tree" in capsys.readouterr().err
    assert checkout.git("tag") == ""
