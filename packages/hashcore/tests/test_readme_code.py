"""The Python of README.md runs, its asserts hold, and its table names every public function."""

import pathlib
import re

import hashcore
import pytest

README = pathlib.Path(__file__).resolve().parent.parent / "README.md"
CODE = re.findall(r"^```python\n(.*?)^```$", README.read_text(encoding="utf-8"), re.M | re.S)


@pytest.mark.parametrize("block", range(len(CODE)))
def test_code_runs(block, tmp_path, monkeypatch):
    assert "assert" in CODE[block]
    monkeypatch.chdir(tmp_path)
    exec(compile(CODE[block], f"README.md, block {block}", "exec"), {})


def test_every_public_name_is_in_the_tables():
    rows = "\n".join(line for line in README.read_text(encoding="utf-8").splitlines() if line.startswith("|"))
    functions = [name for name in hashcore.__all__ if name != "reference"]
    methods = [name for name in vars(hashcore.BitIndex) if not name.startswith("_")]
    missing = [name for name in functions + methods if not re.search(rf"`[^`]*\b{name}\b", rows)]
    assert not missing
