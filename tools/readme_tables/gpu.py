"""Tables of docs/gpu.md: counts on a simulated GPU, and the times they predict for real ones."""

import pathlib
from typing import NamedTuple

from evals.grid import Grid, to_markdown
from hashcore.cuda import traffic

from readme_tables.stored import stored

CASES = {
    "planes": "`planes`, no remainder",
    "planes+remainder": "`planes`",
    "transform": "`transform`, no remainder",
    "transform+remainder": "`transform`",
    "transform+heads": "`transform`, a selection per query head, no remainder",
    "transform+padded": "`transform`, padding, no remainder",
    "transform+padded+remainder": "`transform`, padding",
    "transform+static": "`transform`, a static cache, no remainder",
    "transform+static+remainder": "`transform`, a static cache",
    "transform+host+remainder": "`transform`, keys and values in host memory",
    "transform+beam+remainder": "`transform`, after beam search put rows in another order",
}


class Card(NamedTuple):
    """A GPU and its memory bandwidth according to the data sheet, in TB/s."""

    name: str
    bandwidth: float


CARDS = (Card("A100 80 GB", 2.04), Card("H100", 3.35), Card("H200", 4.8), Card("L4", 0.3), Card("RTX 4090", 1.01))
LENGTHS = (8_192, 32_768, 131_072, 524_288, 2_097_152)
REACHED = 0.85
"""Share of the bandwidth reached by kernels that only read."""
LAUNCH_US = 2.0
"""Time of a dependent launch in a CUDA graph, in microseconds."""
KV_HEADS, QUERY_HEADS, DIM, BITS, HIDDEN, FRACTION = 8, 32, 128, 128, 128, 0.02

SHORTLISTS = (5, 6)
"""Length of the shortlist, as a multiple of the selected keys."""
PLANE_WEIGHTS = tuple(1 << plane for plane in range(6))
SMS = 132


def step(results: pathlib.Path) -> str:
    """Return the table of a sparse layer's operations in a decode step beyond those of a dense one."""
    found = stored(results / "gpu_step.json")
    lines = [
        [CASES[name], f"{count['operators']:g}", f"{count['launches']:g}", "0", f"{count['copies']}"]
        for name, count in found.items()
    ]
    header = ["hasher", "operators of torch", "launches", "waits for the device", "copies to or from it"]
    title = "A layer of a decode step beyond a dense one, one token, first token and last four always read"
    return to_markdown(Grid(title, header, [lines]))


def host(results: pathlib.Path) -> str:
    """Return the table of the host's time for the calls of a layer's step."""
    found = stored(results / "host_cost.json")
    calls = ("encode", "search", "attend", "together", "sums")
    title = f"Microseconds of the host for the calls of a layer's step, {found['processor']}, driver replaced by a stub"
    header = ["encode", "search", "attend", "together", "the remainder's sums"]
    return to_markdown(Grid(title, header, [[[f"{found[name]:.1f}" for name in calls]]]))


def layer_bytes(tokens: int, shortlist: int = 0) -> tuple[float, float]:
    """Return the bytes that a dense and a sparse layer of a step read and write: 16-bit keys and values."""
    dense = tokens * KV_HEADS * 2 * DIM * 2
    functions = 4 * (KV_HEADS + QUERY_HEADS) * (DIM * DIM + DIM * HIDDEN + HIDDEN * DIM)
    sums = 2 * 4 * KV_HEADS * DIM * DIM
    return dense, search_bytes(tokens, shortlist) + functions + sums + FRACTION * dense


def search_bytes(tokens: int, shortlist: int = 0) -> float:
    """Return the bytes that a layer's search moves; with a shortlist, first words are stored contiguously."""
    sizes = KV_HEADS, tokens, BITS // 32, PLANE_WEIGHTS, int(FRACTION * tokens), SMS
    return traffic.search(*sizes, shortlist=shortlist).total


def shortlist(results: pathlib.Path) -> str:
    """Return the table of the bytes that a search with a shortlist moves, and the predicted times of a layer."""
    launches = stored(results / "gpu_step.json")["transform+remainder"]["launches"]
    lines = []
    for tokens in LENGTHS:
        whole, parts = search_bytes(tokens), [search_bytes(tokens, times) for times in SHORTLISTS]
        line = [f"{tokens:,}", f"{whole / 2**20:,.1f}", *(f"{x / 2**20:,.1f} ({x / whole:.2f})" for x in parts)]
        for card in CARDS:
            rate = card.bandwidth * 1e6 * REACHED  # bytes per microsecond
            found = zip((0, *SHORTLISTS), (1, 2, 2), strict=True)
            line.append(
                " / ".join(f"{layer_bytes(tokens, x)[1] / rate + (launches + n) * LAUNCH_US:,.0f}" for x, n in found)
            )
        lines.append(line)
    header = ["context", "MiB", *(f"MiB of {times} x" for times in SHORTLISTS), *(card.name for card in CARDS)]
    title = (
        f"Predicted, not measured: what a search moves, of all keys and of shortlists of {SHORTLISTS[0]} and "
        f"{SHORTLISTS[1]} times as many keys as are selected, first words side by side (and the share); and us "
        f"of the sparse layer above with each of them"
    )
    return to_markdown(Grid(title, header, [lines]))


def model(results: pathlib.Path) -> str:
    """Return the table of predicted microseconds of a layer's attention, dense / sparse."""
    launches = stored(results / "gpu_step.json")["transform+remainder"]["launches"]
    lines = []
    for tokens in LENGTHS:
        dense, sparse = layer_bytes(tokens)
        line = [f"{tokens:,}", f"{dense / 2**20:,.1f}", f"{sparse / 2**20:,.1f}"]
        for card in CARDS:
            rate = card.bandwidth * 1e6 * REACHED  # bytes per microsecond
            times = dense / rate + LAUNCH_US, sparse / rate + (launches + 1) * LAUNCH_US
            line.append(f"{times[0]:,.0f} / {times[1]:,.0f}")
        lines.append(line)
    header = ["context", "MiB dense", "MiB sparse", *(card.name for card in CARDS)]
    title = (
        f"Predicted, not measured: microseconds of one layer's attention in a decode step, dense / sparse with the "
        f"remainder; {QUERY_HEADS} query and {KV_HEADS} KV heads of {DIM}, 16 bits, {100 * FRACTION:g} %, in a CUDA "
        f"graph"
    )
    return to_markdown(Grid(title, header, [lines]))
