"""The Python of README.md runs, and its asserts hold."""

import pathlib
import re

import pytest

README = pathlib.Path(__file__).resolve().parent.parent / "README.md"
CODE = re.findall(r"^```python\n(.*?)^```$", README.read_text(encoding="utf-8"), re.M | re.S)


@pytest.mark.parametrize("block", range(len(CODE)))
def test_code_runs(block, tmp_path, monkeypatch):
    assert "assert" in CODE[block]
    monkeypatch.chdir(tmp_path)
    exec(compile(CODE[block], f"README.md, block {block}", "exec"), {})
