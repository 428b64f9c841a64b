"""What a reader of README.md wants to know first: how much worse, how much faster."""

import pathlib

from evals.result import Result

from readme_tables.quality import change
from readme_tables.stored import load, stored

OURS, WINDOW = "transform+remainder", "recent"
SECOND_MODEL = "SmolLM2-135M-Instruct"


def headline(results: pathlib.Path) -> str:
    """Two sentences: quality at the first budget of the stored runs, speed at the longest context of a whole model."""
    attention, model = (stored(results / f"sparse_{name}.json") for name in ("attention", "model_decode"))
    step = max((row for row in model["rows"] if row["batch"] == 1), key=lambda row: row["n"])
    layer = next(row for row in attention["rows"] if (row["n"], row["dtype"]) == (step["n"], "bfloat16"))
    demo, second = (load(results / f"{name}.json") for name in ("ppl_decode", "second_decode"))
    budget = demo.config["budgets"][0]
    return (
        f"- **How much worse:** reading {100 * budget:g} % of the tokens behind a dense prompt changes the perplexity "
        f"of {SECOND_MODEL} by {change(second, OURS)} ({_texts(second)}) and of the demo model by {change(demo, OURS)} "
        f"({_texts(demo)}); the last {100 * budget:g} % alone change them by {change(second, WINDOW)} and "
        f"{change(demo, WINDOW)}.\n"
        f"- **How much faster:** at {step['n']:,} tokens on a CPU core the attention of a decode step is "
        f"{layer['ratio']:.1f} times as fast as the fastest dense code we could write, and a whole model's step "
        f"{step['ratio']:.1f} times. No GPU was measured."
    )


def _texts(ppl: Result) -> str:
    return f"{ppl.config['documents']} texts of {ppl.config['context']:,} tokens"
