"""The tool that runs transformers' own tests takes a checkout that has them, of the installed version."""

import json
from importlib.metadata import version

import pytest

TOOL = "check_transformers_tests"


@pytest.fixture
def checkout(tmp_path):
    """A folder of the form of a checkout, of a version."""

    def build(number):
        for name in ("generation/test_utils.py", "models/llama/test_modeling_llama.py"):
            (tmp_path / "tests" / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "tests" / name).write_text("")
        (tmp_path / "src" / "transformers").mkdir(parents=True)
        (tmp_path / "src" / "transformers" / "__init__.py").write_text(f'__version__ = "{number}"\n')
        return tmp_path

    return build


def test_a_checkout_of_another_version_is_refused_in_one_sentence(tool, checkout, monkeypatch):
    tree, asked = checkout("0.0.1"), []
    monkeypatch.setattr(tool, "outcomes", lambda *given: asked.append(given) or {})
    words = [str(tree), "--families", "llama"]
    with pytest.raises(SystemExit, match=f"transformers {version('transformers')}, .* got 0.0.1 in .*--other-version"):
        tool.main(words)
    assert not asked
    assert tool.main([*words, "--other-version"]) == 0
    assert asked


def test_a_checkout_of_the_installed_version_is_taken(tool, checkout, monkeypatch):
    tree = checkout(version("transformers"))
    monkeypatch.setattr(tool, "outcomes", lambda *given: {})
    assert tool.main([str(tree), "--families", "llama"]) == 0


def test_a_folder_without_the_tests_is_refused_in_one_sentence(tool, tmp_path):
    with pytest.raises(SystemExit, match=r"expected tests/generation/test_utils.py in .*, found none"):
        tool.main([str(tmp_path), "--families", "llama"])


@pytest.mark.parametrize("rule", ["decode", "every-row"])
def test_a_test_that_passes_dense_alone_fails_the_run(rule, tool, checkout, monkeypatch, capsys):
    tree = checkout(version("transformers"))
    monkeypatch.setattr(tool, "outcomes", lambda *given: {"one": "failed" if given[2] == rule else "passed"})
    assert tool.main([str(tree), "--families", "llama"]) == 1
    assert f"{rule}: failed one" in capsys.readouterr().out


def test_what_is_stored_is_what_was_counted_and_lost(tool, checkout, monkeypatch, tmp_path):
    tree, out = checkout(version("transformers")), tmp_path / "found.json"
    own = {"dense": {"one": "passed", "two": "failed"}, "decode": {"one": "failed", "two": "failed"}, "every-row": {}}
    monkeypatch.setattr(tool, "outcomes", lambda *given: own[given[2]])
    assert tool.main([str(tree), "--families", "llama", "--out", str(out)]) == 1
    assert json.loads(out.read_text()) == {
        "transformers": version("transformers"),
        "tests_of": version("transformers"),
        "families": {"llama": {"dense": {"passed": 1, "failed": 1}, "decode": {"failed": 2}, "every-row": {}}},
        "lost": {"llama": {"decode": ["failed one"], "every-row": ["not run one"]}},
    }
