"""The headline of README.md: quality and speed in two sentences."""

import pathlib
from collections.abc import Sequence
from typing import Any

from evals.frontier import points
from evals.grid import Grid, to_markdown
from evals.result import Result
from hashtrain.settings.train_command import PAPER

from readme_tables.quality import HEAD_DIM, change, scores
from readme_tables.stored import load, stored

OURS, WINDOW = "transform+remainder", "recent"
SECOND_MODEL = "SmolLM2-135M-Instruct"
TRAINED_ON = 8192  # tokens, its max_position_embeddings
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
DIVIDED_RUNS = {"demo model, Python": tuple(f"divided_{how}" for how in ("not", "layers", "heads", "both"))}
"""Stored runs of one hasher after a dense prompt: a budget alike everywhere, by layer, by head, and both."""
EVERY_RUNS = {f"{SECOND_MODEL}, English": ("every_english",), f"{SECOND_MODEL}, Python": ("every_python",)}
EVERY_ROWS = "with every row sparse, the last 1,024 of 8,192 scored"
"""Stored runs with every row sparse, and what they score."""
FRONTIER_RUNS = ("second_english", "short_english", "values_english")
"""Stored runs of one model and text with any budgets and settings, for quality against bytes."""


def headline(results: pathlib.Path) -> str:
    """Return three points: quality at the first budget of the stored runs, speed, and speed of larger shapes."""
    attention, model = (stored(results / f"sparse_{name}.json") for name in ("attention", "model_decode"))
    step = max((row for row in model["rows"] if row["batch"] == 1), key=lambda row: row["n"])
    layer = next(row for row in attention["rows"] if (row["n"], row["dtype"]) == (step["n"], "bfloat16"))
    llama = stored(results / "llama_cpp.json")
    beside = {row["tokens"]: row["steps"] for row in llama["rows"]}
    names = "our dense code", f"llama.cpp's {_newest(llama['llama_cpp_uses'])} build", "transformers"
    first = _beside(beside, TRAINED_ON, names)
    demo, second, python = (load(results / f"{name}.json") for name in ("ppl_decode", *SECOND_RUNS.values()))
    budget = demo.config["budgets"][0]
    runs = (second, python, demo)
    lost = [_within(run, OURS) for run in runs]
    blind = [change(run, WINDOW) for run in runs]
    if (texts := _texts(second)) != _texts(python):
        raise ValueError(f"the sentence needs as many texts of each kind, got {texts} and {_texts(python)}")
    share = next(point.share for point in points([second], HEAD_DIM) if (point.method, point.budget) == (OURS, budget))
    return (
        f"- **How much worse:** after a dense prompt, perplexity [95 % interval] changes by {lost[0]} on English (a "
        f"sliding window: {blind[0]}) and {lost[1]} on Python ({blind[1]}): {SECOND_MODEL}, weights "
        f"rounded to 4 bits, {texts}. Demo model: {lost[2]} ({blind[2]}), {_texts(demo)}. A step reads the keys "
        f"and values of {100 * budget:g} % of the tokens; with all codes, {100 * share:.0f} % of the bytes. No larger "
        "model was measured.\n"
        f"- **How much faster:** on two cores of an {_processor(llama)}, 16-bit weights, a token of SmolLM2-135M takes "
        f"{first} and {_beside(beside, max(beside), NAMES)}; trained on {TRAINED_ON:,}. "
        f"{_lost(beside)} {_elsewhere(stored(results / 'llama_cpp_intel.json'), (TRAINED_ON, max(beside)))}\n"
        f"- **Random weights,** one core, {step['n']:,} tokens: attention is {layer['ratio']:.1f} times as fast as our "
        f"fastest dense code, a step of Qwen2.5-0.5B's shape ({model['layers']} of 24 layers) {step['ratio']:.1f} "
        "times."
    )


SHOWN = ("transform+remainder", "oracle", "transform", "paper", "lsh")
"""Methods of the table of README.md; docs/results.md has all."""


def short_table(results: pathlib.Path) -> str:
    """Return perplexity and KL of the second model after a dense prompt, for `SHOWN`."""
    runs = {kind: load(results / f"{name}.json") for kind, name in SECOND_RUNS.items()}
    first = next(iter(runs.values()))
    title = (
        f"{SECOND_MODEL}, {100 * first.config['budgets'][0]:g} % of the tokens, "
        f"the first and the last {first.config['recent']} among them: change from dense"
    )
    steps = stored(results / "second_training.json")["steps"]
    note = f"`paper`: the paper's MLP, trained for {steps} steps (the paper: {PAPER['steps']:,})."
    lines = [[name, *scores(runs.values(), name)] for name in SHOWN]
    header = ["method", *(name for kind in runs for name in (f"perplexity, {kind}", "KL, nats"))]
    return to_markdown(Grid(title, header, [lines], note))


OTHERS = ("ours, dense", "llama.cpp", "transformers")
NAMES = ("our dense code", "llama.cpp", "transformers")


def _beside(steps: dict[int, Any], tokens: int, names: Sequence[str]) -> str:
    """Return what a step takes at a length, for us and for `OTHERS`, by these names."""
    ms = {name: taken["ms"] for name, taken in steps[tokens].items()}
    others = ", ".join(f"{name} {ms[other]:,.0f}" for name, other in zip(names, OTHERS, strict=True))
    return f"{ms['ours']:.0f} ms at {tokens:,} ({others})"


def _elsewhere(run: dict[str, Any], lengths: tuple[int, int]) -> str:
    """Return a sentence on the same lengths on another processor."""
    steps = {row["tokens"]: row["steps"] for row in run["rows"]}
    taken = {name: " and ".join(f"{steps[n][name]['ms']:.0f}" for n in lengths) for name in ("ours", *OTHERS[1:])}
    return f"On an {_processor(run)}: {', '.join(f'{name} {ms}' for name, ms in taken.items())}."


def _lost(steps: dict[int, Any]) -> str:
    """Return a sentence on the longest context at which another program is faster."""
    ms = {(n, name): taken["ms"] for n, found in steps.items() for name, taken in found.items()}
    lost = [(n, name) for n, name in ms if not name.startswith("ours") and ms[n, name] < ms[n, "ours"]]
    if not lost:
        return "Ours is the fastest at all lengths that were measured."
    tokens, name = max(lost)
    return f"At {tokens:,}, {name} is faster."


def _processor(run: dict[str, Any]) -> str:
    """Name the processor of a run, without its maker's marks."""
    return run["processor"].replace("(R)", "").removesuffix(" Processor")


def _newest(instructions: list[str]) -> str:
    """Return the last of the AVX instruction sets that a program was built for."""
    return [name for name in instructions if name.startswith("AVX")][-1]


def _texts(ppl: Result) -> str:
    scored = ppl.config["scored"]
    part = "second half" if scored is None else f"last {scored:,} tokens"
    return f"the {part} of {ppl.config['documents']} texts of {ppl.config['context']:,}"


def _within(ppl: Result, method: str) -> str:
    """Return a method's change of perplexity at a run's first rule and budget, with its 95 % interval."""
    rule, budget = ppl.config["rules"][0], ppl.config["budgets"][0]
    found = ppl.one(method=method, metric="perplexity_ratio", rule=rule, budget=budget, against=None)
    if found.low is None or found.high is None:
        raise ValueError(f"expected an interval of the perplexity of {method}, got none")
    low, high = (f"{100 * (end - 1):+.1f}" for end in (found.low, found.high))
    return f"{change(ppl, method)} [{low}, {high}]"
