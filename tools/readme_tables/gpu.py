"""Tables of docs/gpu.md: counts on a simulated GPU, and the times they predict for real ones."""

import pathlib
import sys
from collections.abc import Sequence

from evals.tables import Grid, to_markdown

from readme_tables.stored import stored

sys.path.append(str(pathlib.Path(__file__).resolve().parents[2] / "packages" / "sparse-decode" / "benchmarks"))
from gpu_model import CARDS, Layer, predicted_us

OPTIONS = {
    "heads": "a selection per query head",
    "shortlist": "a shortlist",
    "padded": "padding",
    "static": "a static cache",
    "host": "keys and values in host memory",
    "beam": "after beam search put rows in another order",
}
"""What the options of a case mean; all cases except those marked have the remainder."""


LENGTHS = (8_192, 32_768, 131_072, 524_288, 2_097_152)
LAYER = Layer()
SHORTLISTS = (5, 6)
"""Length of the shortlist, as a multiple of the selected keys."""


def step(results: pathlib.Path) -> str:
    """Return the table of a sparse layer's operations in a decode step beyond those of a dense one."""
    found = stored(results, "gpu_step")
    lines = [
        [_case(name), f"{count['operators']:g}", f"{count['launches']:g}", "0", f"{count['copies']}"]
        for name, count in found.items()
    ]
    header = ["hasher", "operators of torch", "launches", "waits for the device", "copies to or from it"]
    title = "A layer of a decode step beyond a dense one, one token, first token and last four always read"
    return to_markdown(Grid(title, header, [lines]))


def _case(name: str) -> str:
    """Describe a case: the variant and its options."""
    variant, *more = name.split("+")
    said = [f"`{variant}`", *(OPTIONS[option] for option in more if option != "remainder")]
    return ", ".join(said if "remainder" in more else [*said, "no remainder"])


def _predicted(steps: Sequence[tuple[float, int]]) -> list[str]:
    """Return the microseconds on each card of steps with these bytes and launches."""
    return [
        " / ".join(f"{predicted_us(size, launches, card.bytes_per_us):,.0f}" for size, launches in steps)
        for card in CARDS
    ]


def shortlist(results: pathlib.Path) -> str:
    """Return the table of the bytes that a search with a shortlist moves, and the predicted times of a layer."""
    launches = stored(results, "gpu_step")["transform+remainder"]["launches"]
    lines = []
    for tokens in LENGTHS:
        whole, *parts = (LAYER.search_bytes(tokens, shortlist=times) for times in (0, *SHORTLISTS))
        line = [f"{tokens:,}", f"{whole / 2**20:,.1f}", *(f"{x / 2**20:,.1f} ({x / whole:.2f})" for x in parts)]
        # A shortlist takes one launch more.
        steps = [(LAYER.sparse_bytes(tokens, shortlist=x), launches + (2 if x else 1)) for x in (0, *SHORTLISTS)]
        lines.append([*line, *_predicted(steps)])
    header = ["context", "MiB", *(f"MiB of {times} x" for times in SHORTLISTS), *(card.name for card in CARDS)]
    title = (
        f"Predicted, not measured: what a search moves, of all keys and of shortlists of {SHORTLISTS[0]} and "
        f"{SHORTLISTS[1]} times as many keys as are selected, first words side by side (and the share); and us "
        f"of the sparse layer above with each of them"
    )
    return to_markdown(Grid(title, header, [lines]))


def model(results: pathlib.Path) -> str:
    """Return the table of predicted microseconds of a layer's attention: dense, sparse, and sparse with a mask."""
    counted = stored(results, "gpu_step")
    plain, masked = (counted[f"transform{kind}+remainder"]["launches"] for kind in ("", "+static"))
    lines = []
    for tokens in LENGTHS:
        steps = (
            (LAYER.dense_bytes(tokens), 1),
            (LAYER.sparse_bytes(tokens), plain + 1),
            (LAYER.sparse_bytes(tokens, masked=True), masked + 1),
        )
        line = [f"{tokens:,}", *(f"{size / 2**20:,.1f}" for size, _ in steps)]
        lines.append([*line, *_predicted(steps)])
    header = ["context", "MiB dense", "MiB sparse", "MiB with a mask", *(card.name for card in CARDS)]
    title = (
        f"Predicted, not measured: microseconds of one layer's attention in a decode step, dense / sparse with the "
        f"remainder / the same with a mask, as a static cache has; {LAYER.query_heads} query and {LAYER.kv_heads} KV "
        f"heads of {LAYER.dim}, 16 bits, {100 * LAYER.fraction:g} %, in a CUDA graph"
    )
    return to_markdown(Grid(title, header, [lines]))
