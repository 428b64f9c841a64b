"""The headline of README.md: quality and speed in two sentences."""

import pathlib

from evals.result import Result

from readme_tables.quality import change
from readme_tables.stored import load, stored

OURS, WINDOW = "transform+remainder", "recent"
SECOND_MODEL = "SmolLM2-135M-Instruct"
SECOND_RUNS = {"English": "second_english", "Python": "second_python"}
"""Stored runs on the second model, after a dense prompt, by kind of text."""
BARE_RUNS = {kind: f"{name}_bare" for kind, name in SECOND_RUNS.items()}
"""The same without the tokens that every row reads."""
SHORT_RUNS = {
    f"{SECOND_MODEL}, English": ("second_english", "short_english", "values_english"),
    f"{SECOND_MODEL}, Python": ("second_python", "short_python", "values_python"),
    "demo model, Python": ("ppl_decode", "short_demo", "values_demo", "layers_demo"),
}
"""Stored runs after a dense prompt, by model and text: all codes, a shortlist, a shortlist with fewer values, and
these with budgets by layer."""
FRONTIER_RUNS = ("second_english", "short_english", "values_english")
"""Stored runs of one model and text with any budgets and settings, for quality against bytes."""


def headline(results: pathlib.Path) -> str:
    """Return two sentences: quality at the first budget of the stored runs, speed at the longest contexts."""
    attention, model = (stored(results / f"sparse_{name}.json") for name in ("attention", "model_decode"))
    step = max((row for row in model["rows"] if row["batch"] == 1), key=lambda row: row["n"])
    layer = next(row for row in attention["rows"] if (row["n"], row["dtype"]) == (step["n"], "bfloat16"))
    beside = max(stored(results / "llama_cpp.json")["rows"], key=lambda row: row["tokens"])
    ms = {name: taken["ms"] for name, taken in beside["steps"].items()}
    demo, second, python = (load(results / f"{name}.json") for name in ("ppl_decode", *SECOND_RUNS.values()))
    budget = demo.config["budgets"][0]
    lost, blind = ([change(run, method) for run in (second, python, demo)] for method in (OURS, WINDOW))
    if (texts := _texts(second)) != _texts(python):
        raise ValueError(f"the sentence needs as many texts of each kind, got {texts} and {_texts(python)}")
    return (
        f"- **How much worse:** reading {100 * budget:g} % of the tokens behind a dense prompt changes the perplexity "
        f"of {SECOND_MODEL} by {lost[0]} on English and {lost[1]} on Python ({texts} each), and of the demo model by "
        f"{lost[2]} ({_texts(demo)}); reading only the last {100 * budget:g} %, by {blind[0]}, {blind[1]} and "
        f"{blind[2]}.\n"
        f"- **How much faster:** at a context of {beside['tokens']:,} tokens, SmolLM2-135M takes {ms['ours']:.0f} ms "
        f"per token on two CPU cores (llama.cpp {ms['llama.cpp']:.0f}, transformers {ms['transformers']:,.0f}; 16-bit "
        f"weights). At {step['n']:,} tokens, attention is {layer['ratio']:.1f} times as fast as the fastest dense code "
        f"we could write, a whole model {step['ratio']:.1f} times. No GPU was measured."
    )


def _texts(ppl: Result) -> str:
    return f"{ppl.config['documents']} texts of {ppl.config['context']:,} tokens"
