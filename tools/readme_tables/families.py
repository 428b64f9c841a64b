"""The table of model families: which are taken, and why the others are not."""

import pathlib
import re

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
