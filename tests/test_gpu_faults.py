"""docs/gpu.md names a test for each fault that was found; each of them is there."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FAULT = re.compile(r"^\| .+ \| \[(test_\w+)\]\(\.\./([\w/-]+\.py)\) \|$", re.M)


def test_each_fault_has_the_test_that_is_named():
    section = (ROOT / "docs" / "gpu.md").read_text("utf-8").split("## Faults")[1].split("\n## ")[0]
    named = FAULT.findall(section)
    assert len(named) == section.count("\n| ") - 1, "a row names no test"
    for test, file in named:
        assert f"\ndef {test}(" in (ROOT / file).read_text("utf-8"), f"{file} has no {test}"
