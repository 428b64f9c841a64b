"""docs/faults.md lists all faults that were found, and names tests of each that exist."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ROW = re.compile(r"^\| (\d+) \| (.+?[.]) \| (.+?[.]) \| (`.+`) \|$", re.M)
FAULTS = 34


def rows():
    """The rows of the table: (number, fault, mend, tests as path and name)."""
    text = (ROOT / "docs" / "faults.md").read_text("utf-8").partition("\n## ")[0]
    found = ROW.findall(text)
    assert len(found) == text.count("\n| ") - 1, "a row of the table has another form"
    return [
        (int(number), fault, mend, re.findall(r"`([\w/.-]+)::(\w+)`", tests)) for number, fault, mend, tests in found
    ]


def test_every_fault_has_one_row():
    assert [number for number, *_ in rows()] == list(range(1, FAULTS + 1))


def test_every_test_that_is_named_exists():
    for number, _, _, tests in rows():
        assert tests, f"fault {number} names no test"
        for path, name in tests:
            assert f"\ndef {name}(" in (ROOT / path).read_text("utf-8"), f"fault {number}: {path} has no {name}"
