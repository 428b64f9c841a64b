"""The headline of README.md: quality and speed in two sentences."""

import pathlib
from typing import Any

from evals.grid import Grid, to_markdown
from evals.result import Result

from readme_tables.quality import cell, change
from readme_tables.stored import load, stored

OURS, WINDOW = "transform+remainder", "recent"
SECOND_MODEL = "SmolLM2-135M-Instruct"
SECOND_RUNS = {"English": "second_english", "Python": "second_python"}
"""Stored runs on the second model, after a dense prompt, by kind of text."""
BARE_RUNS = {kind: f"{name}_bare" for kind, name in SECOND_RUNS.items()}
"""The same without the tokens that every row reads."""
SHORT_RUNS = {
    f"{SECOND_MODEL}, English": ("second_english", "short_english", "values_english", "layers_english"),
    f"{SECOND_MODEL}, Python": ("second_python", "short_python", "values_python", "layers_python"),
    "demo model, Python": ("ppl_decode", "short_demo", "values_demo", "layers_demo"),
}
"""Stored runs after a dense prompt, by model and text: all codes, a shortlist, a shortlist with fewer values, and
these with budgets by layer."""
EVERY_RUNS = {f"{SECOND_MODEL}, English": ("every_english",), f"{SECOND_MODEL}, Python": ("every_python",)}
"""Stored runs with every row sparse."""
FRONTIER_RUNS = ("second_english", "short_english", "values_english")
"""Stored runs of one model and text with any budgets and settings, for quality against bytes."""


def headline(results: pathlib.Path) -> str:
    """Return two sentences: quality at the first budget of the stored runs, speed at the longest contexts."""
    attention, model = (stored(results / f"sparse_{name}.json") for name in ("attention", "model_decode"))
    step = max((row for row in model["rows"] if row["batch"] == 1), key=lambda row: row["n"])
    layer = next(row for row in attention["rows"] if (row["n"], row["dtype"]) == (step["n"], "bfloat16"))
    beside = {row["tokens"]: row["steps"] for row in stored(results / "llama_cpp.json")["rows"]}
    demo, second, python = (load(results / f"{name}.json") for name in ("ppl_decode", *SECOND_RUNS.values()))
    budget = demo.config["budgets"][0]
    lost, blind = ([change(run, method) for run in (second, python, demo)] for method in (OURS, WINDOW))
    if (texts := _texts(second)) != _texts(python):
        raise ValueError(f"the sentence needs as many texts of each kind, got {texts} and {_texts(python)}")
    return (
        f"- **How much worse:** the prompt is processed densely; then each step reads {100 * budget:g} % of the "
        f"tokens. The perplexity of {SECOND_MODEL} changes by {lost[0]} on English and {lost[1]} on Python "
        f"({texts} each), that of the demo model by {lost[2]} ({_texts(demo)}). A sliding window of the same size "
        f"costs {blind[0]}, {blind[1]} and {blind[2]}.\n"
        f"- **How much faster:** on two CPU cores with 16-bit weights, SmolLM2-135M takes, per token, "
        f"{_beside(beside, second.config['context'])} and {_beside(beside, max(beside))}. {_lost(beside)}"
        f"At {step['n']:,} tokens on one core (random weights), attention is {layer['ratio']:.1f} times as fast as the "
        f"fastest dense code we could write, a step of Qwen2.5-0.5B's shape with {model['layers']} layers "
        f"{step['ratio']:.1f} times. No GPU was measured."
    )


SHOWN = ("transform+remainder", "oracle", "transform", "paper", "lsh", "recent")
"""Methods of the table of README.md; docs/results.md has all."""


def short_table(results: pathlib.Path) -> str:
    """Return perplexity and KL of the second model after a dense prompt, for `SHOWN`."""
    runs = {kind: load(results / f"{name}.json") for kind, name in SECOND_RUNS.items()}
    first = next(iter(runs.values()))
    title = (
        f"{SECOND_MODEL}: dense prompt, then steps that read {100 * first.config['budgets'][0]:g} % of the visible "
        f"tokens in every layer; change from dense, {_texts(first)} of each kind, the last {first.config['scored']:,} "
        "scored"
    )
    lines = [
        [name, *(shown for run in runs.values() for shown in (change(run, name), f"{cell(run, name, 'kl'):.4f}"))]
        for name in SHOWN
    ]
    header = ["method", *(name for kind in runs for name in (f"perplexity, {kind}", "KL, nats"))]
    return to_markdown(Grid(title, header, [lines]))


def _beside(steps: dict[int, Any], tokens: int) -> str:
    """Return what a step takes at a length, for us and for others."""
    ms = {name: taken["ms"] for name, taken in steps[tokens].items()}
    others = ", ".join(f"{name} {ms[name]:,.0f}" for name in ("llama.cpp", "transformers"))
    return f"{ms['ours']:.0f} ms at {tokens:,} tokens ({others})"


def _lost(steps: dict[int, Any]) -> str:
    """Return a sentence on the longest context at which somebody else is faster, or nothing."""
    ms = {(n, name): taken["ms"] for n, found in steps.items() for name, taken in found.items()}
    lost = [(n, name) for n, name in ms if name != "ours" and ms[n, name] < ms[n, "ours"]]
    if not lost:
        return ""
    tokens, name = max(lost)
    return f"At {tokens:,} tokens, {name} is faster. "


def _texts(ppl: Result) -> str:
    return f"{ppl.config['documents']} texts of {ppl.config['context']:,} tokens"
