"""What `uv run pytest` leaves to CI."""

import pathlib

pytest_plugins = ("pytester",)
ROOT = pathlib.Path(__file__).parent.parent
TESTS = """
import pytest

@pytest.mark.sample({n})
@pytest.mark.parametrize("x", [*range(7), pytest.param(7, marks=pytest.mark.slow)])
def test(x):
    pass

def test_other():
    pass
"""


def test_a_sample_is_spread_over_the_cases_that_are_not_slow(pytester):
    pytester.makeconftest((ROOT / "conftest.py").read_text(encoding="utf-8"))
    for n, cases in ((1, [0]), (3, [0, 2, 5]), (7, list(range(7)))):
        pytester.makepyfile(TESTS.format(n=n))
        lines = pytester.runpytest("--collect-only", "-q", "-m", "not slow").outlines
        found = [line.partition("::")[2] for line in lines if "::" in line]
        assert found == [*(f"test[{case}]" for case in cases), "test_other"]
        assert len([line for line in pytester.runpytest("--collect-only", "-q").outlines if "::" in line]) == 9
