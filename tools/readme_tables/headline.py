"""What a reader of README.md wants to know first: how much worse, how much faster."""

import pathlib

from readme_tables.stored import load, stored

OURS, WINDOW = "transform+remainder", "recent"


def headline(results: pathlib.Path) -> str:
    """Two sentences: quality at the first budget of the stored runs, speed at the longest context of a whole model."""
    ppl = load(results / "ppl.json")
    budget, rule = ppl.config["budgets"][0], ppl.config["rules"][0]

    def worse(method: str) -> str:
        ratio = ppl.one(method=method, metric="perplexity_ratio", rule=rule, budget=budget).value
        return f"{100 * (ratio - 1):.1f} %"

    attention, model = (stored(results / f"sparse_{name}.json") for name in ("attention", "model_decode"))
    step = max((row for row in model["rows"] if row["batch"] == 1), key=lambda row: row["n"])
    layer = next(row for row in attention["rows"] if (row["n"], row["dtype"]) == (step["n"], "bfloat16"))
    return (
        f"- **How much worse:** reading {100 * budget:g} % of the tokens raises the perplexity of the demo model by "
        f"{worse(OURS)} ({ppl.config['context']:,} tokens); the last {100 * budget:g} % alone raise it by "
        f"{worse(WINDOW)}.\n"
        f"- **How much faster:** at {step['n']:,} tokens on a CPU core the attention of a decode step is "
        f"{layer['ratio']:.1f} times as fast as the fastest dense code we could write, and a whole model's step "
        f"{step['ratio']:.1f} times. No GPU was measured."
    )
