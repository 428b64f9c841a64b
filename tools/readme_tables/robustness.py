"""The tables of docs/families.md: the families taken, transformers' own tests, fuzzers."""

import pathlib
import re

from evals.tables import Grid, to_markdown

from readme_tables.stored import stored

_TRIED = {
    "functions": "functions of `hashcore` on random arguments, against oracles of a few lines",
    "index": "`BitIndex`, against a list of its rows",
    "index-files": "damaged and forged files of `BitIndex`",
    "files": "other damaged and forged files: hashers, captures, checkpoints, runs, settings",
    "cache": "operations on caches that carry codes, against plain caches",
}
_RULES = {"dense": "dense", "decode": "attached, `decode`", "every-row": "attached, every row"}


def fuzz(results: pathlib.Path) -> str:
    """Return the table of fuzzers: what each tried, how much of it, and the seed that repeats it."""
    found = stored(results, "fuzz")
    rows = [
        [f"`{name}`: {what}", f"{run['checks']:,} {run['unit']}", f"{run['cases']:,}", str(run["seed"])]
        for name, what in _TRIED.items()
        if (run := found.get(name))
    ]
    title = "Fuzzers (`tests/fuzz.py`), each without a crash, a difference or a damaged file that was accepted:"
    return to_markdown(Grid(title, ["fuzzer", "tried", "cases", "seed"], [rows]))


def transformers_tests(results: pathlib.Path) -> str:
    """Return the table of transformers' tests: by family, how many pass dense and under each rule."""
    found = stored(results, "transformers_tests")
    rows = [[family, *(_passed(counts[rule]) for rule in _RULES)] for family, counts in found["families"].items()]
    lost = sum(len(tests) for rules in found["lost"].values() for tests in rules.values())
    title = (
        f"Generation tests of transformers {found['tests_of']} on transformers {found['transformers']}, with a budget "
        f"of 100 %: passed of those that ran. Tests that pass dense and fail attached: {lost}."
    )
    return to_markdown(Grid(title, ["family", *_RULES.values()], [rows]))


def _passed(counts: dict[str, int]) -> str:
    passed = counts.get("passed", 0)
    return f"{passed} of {passed + counts.get('failed', 0)}"


def families(results: pathlib.Path) -> str:
    """Return how many families of transformers are equal to dense at 100 %, and the others with their reasons."""
    found = stored(results, "families")
    outcomes: dict[str, list[str]] = found["families"]
    equal = [name for name, (verdict, _) in outcomes.items() if verdict == "equal"]
    reasons: dict[tuple[str, str], list[str]] = {}
    for name, (verdict, remark) in sorted(outcomes.items()):
        if verdict != "equal":
            reasons.setdefault((verdict, _shared(name, remark).replace("|", "\\|")), []).append(name)
    title = (
        f"Of the {len(outcomes)} causal families of transformers {found['transformers']}, as tiny random models, "
        f"{len(equal)} generate the same tokens attached at 100 % as dense: {', '.join(equal)}. The others:"
    )
    rows = [[", ".join(names), verdict, remark] for (verdict, remark), names in sorted(reasons.items())]
    return to_markdown(Grid(title, ["families", "outcome", "reason"], [rows]))


def _shared(name: str, remark: str) -> str:
    """Replace the names of a family and of its classes, so that families with the same reason share a line."""
    remark = remark.replace("`", "")  # some messages are cut off between two
    remark = re.sub(rf"^{re.escape(name)}\b", "the model", remark)
    remark = re.sub(r"\b[A-Z]\w+(Attention|Projection)\b", "its own module", remark)
    return re.sub(r"\b[A-Z]\w+(ForCausalLM|LMHeadModel|WithLMHead)\b", "the model", remark)
