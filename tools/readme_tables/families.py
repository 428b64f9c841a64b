"""The table of model families: which are taken, and why the others are not."""

import pathlib

from evals.grid import Grid, to_markdown

from readme_tables.stored import stored


def families(results: pathlib.Path) -> str:
    """Return how many families of transformers are equal to dense at 100 %, and the others with their reasons."""
    found = stored(results / "families.json")
    outcomes: dict[str, list[str]] = found["families"]
    equal = [name for name, (verdict, _) in outcomes.items() if verdict == "equal"]
    reasons: dict[tuple[str, str], list[str]] = {}
    for name, (verdict, remark) in sorted(outcomes.items()):
        if verdict != "equal":
            reasons.setdefault((verdict, remark.replace("|", "\\|")), []).append(name)
    title = (
        f"Of the {len(outcomes)} causal families of transformers {found['transformers']}, as tiny random models, "
        f"{len(equal)} generate the same tokens attached at 100 % as dense: {', '.join(equal)}. The others:"
    )
    rows = [[", ".join(names), verdict, remark] for (verdict, remark), names in sorted(reasons.items())]
    return to_markdown(Grid(title, ["families", "outcome", "reason"], [rows]))
