"""Draw the figures of docs/algorithm.md from queries, keys and values of the demo model.

    uv run tools/draw_algorithm.py --hasher runs/demo/transform

Writes docs/figures/digits.png, shortlist.png and remainder.png. The hasher comes from `uv run hashtrain`.
"""

import argparse
import math
import tempfile
from pathlib import Path
from typing import NamedTuple

import hashcore
import numpy as np
import torch
from evals.documents import load_documents
from evals.figures import COLOURS
from hashcore.reference import shortlisted
from hashtrain import Hasher
from hashtrain.data.capture import capture
from hashtrain.demo import demo_model_path
from hashtrain.evaluation.metrics import reading
from hashtrain.evaluation.remainder import add_remainder, linear_values, log_weight, measure
from hashtrain.files.atomic import replace
from hashtrain.layers.transform import Transform
from hashtrain.models import load_model
from hashtrain.training.target import logits, top_count
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

FIGURES = Path(__file__).resolve().parent.parent / "docs" / "figures"
CONTEXT, LAYER, FRACTION, TIMES = 4096, 4, 0.02, 6
OURS = "#009e73"


class Attended(NamedTuple):
    """Queries [1, Hq, T, D], keys and values [1, Hkv, T, D] of one layer and context, and its scaling."""

    q: Tensor
    k: Tensor
    v: Tensor
    scaling: float


def read_layer() -> Attended:
    """Run the demo model over held-out text and return what its layer computed."""
    model, tokenizer = load_model(str(demo_model_path()))
    document = load_documents([], tokenizer, CONTEXT, 1, seed=0)[0]
    with tempfile.TemporaryDirectory() as folder:
        data = capture(model, [document.ids], Path(folder))
        q, k, scaling = data.read(0, LAYER)
        return Attended(q.float(), k.float(), data.values(0, LAYER).float(), scaling)


def draw_digits(hasher: Transform, x: Attended, left: Axes, right: Axes) -> None:
    """Show how many digits each coordinate of a KV head has, and the levels of one coordinate."""
    digits = hasher.digits[0].long()
    order = digits.argsort(descending=True, stable=True)
    left.bar(range(len(order)), digits[order], color=COLOURS["transform"])
    left.set(xlabel="coordinate, most digits first", ylabel="bits of the code", xlim=(-1, len(order)))
    left.set_title(f"{hasher.bits} bits over the coordinates of one KV head", fontsize=10)
    three = int(order[(digits[order] == 3).nonzero()[0, 0]])  # three digits: enough to see, few enough to print
    z = hasher.key(x.k)[0, 0, :, three]
    right.hist(z.numpy(), bins=120, range=(-11, 11), color=COLOURS["transform"])
    top = right.get_ylim()[1]
    for number in range(8):
        right.text(2 * number - 7, 1.03 * top, f"{number:03b}", ha="center", fontsize=9, family="monospace")
        if number:
            right.axvline(2 * number - 8, color="black", linewidth=0.8)
    right.set(xlabel="z, in half steps", ylabel="keys", ylim=(0, 1.12 * top), xticks=range(-7, 8, 2))
    right.set_title("a coordinate of three bits: level (below) and digits (above)", fontsize=10)


def draw_shortlist(hasher: Transform, x: Attended, axes: Axes) -> None:
    """Show for one row each key's score by its first word and by all words."""
    planes, weights = hasher.encode_queries(x.q[:, :, -1:])
    codes = hasher.encode_keys(x.k)[:, :1]
    query, keys = planes[0, 0, 0].numpy(), codes[0, 0].numpy()
    whole = hashcore.score(query, keys, weights).ravel()
    words = np.ascontiguousarray(query[-4:, :1]), np.ascontiguousarray(keys[:, :1])
    first = hashcore.score(*words, weights[-4:]).ravel()
    k = int(top_count(CONTEXT, FRACTION))
    on = shortlisted(query, keys, k, weights, TIMES).ravel()
    best = np.zeros(CONTEXT, bool)
    best[np.argsort(-whole, kind="stable")[:k]] = True
    kinds = (
        (~on, "#bbbbbb", f"scored by the first word only: {100 * np.mean(~on):.0f} % of the keys"),
        (on & ~best, COLOURS["lsh"], "on the list, scored by all words"),
        (on & best, OURS, f"selected: {np.sum(on & best)} of the {k} best by all words"),
        (~on & best, COLOURS["planes"], f"missed by the list: {np.sum(~on & best)}"),
    )
    for which, colour, label in kinds:
        axes.scatter(first[which], whole[which], s=9, color=colour, label=label)
    axes.vlines(first[on].min() - 0.5, *axes.get_ylim(), color="black", linewidth=0.8)
    axes.set(xlabel="score by the first 32 bits", ylabel=f"score by all {hasher.bits} bits")
    axes.set_title(f"one row, {CONTEXT:,} keys, 2 % selected, a list of {TIMES} times as many", fontsize=10)
    low, high = axes.get_ylim()
    axes.set_ylim(low, high + 0.4 * (high - low))  # room for the legend
    axes.legend(frameon=False, fontsize=8, loc="upper left")


def draw_remainder(hasher: Transform, x: Attended, left: Axes, right: Axes) -> None:
    """Show what one row's selection leaves out, and by how much its replacement reduces the error of attention."""
    rows = torch.arange(CONTEXT // 2, CONTEXT, 32)
    q = x.q[:, :, rows]
    exact = logits(q, x.k, rows, x.scaling)[0]
    ((found, _, _, tokens),) = measure(hasher, q, x.k, rows, x.scaling, (FRACTION,), exact)
    taken = reading(tokens, torch.zeros(1, CONTEXT, dtype=torch.bool))[:, None]
    p = exact.softmax(-1)
    missed = p.masked_fill(taken, 0).sum(-1)
    of, head, row = np.unravel_index(int(missed.flatten().argsort()[missed.numel() // 2]), missed.shape)  # the median
    p_row, chosen = p[of, head, row], taken[of, 0, row]
    for which, colour, label in ((chosen, OURS, "selected"), (~chosen, "#999999", "left out: one more token")):
        order = p_row.argsort(descending=True)
        ranks = which[order].nonzero()[:, 0]
        share = float(p_row[which].sum())
        left.scatter(ranks + 1, p_row[order][ranks], s=8, color=colour, label=f"{label}, {100 * share:.0f} %")
    left.set(xscale="log", yscale="log", ylim=(1e-7, 1), xlabel="tokens by attention", ylabel="attention")
    left.set_title("the row that leaves out a median share", fontsize=10)
    left.legend(frameon=False, fontsize=8)

    values, heads = x.v[0, :, None], hasher.remainder.unflatten(0, (hasher.hkv, hasher.group))[:, :, None]
    dense = p @ values
    alone = exact.masked_fill(~taken, -math.inf).softmax(-1) @ values
    weight = log_weight(heads[..., :-1], found)
    lines = [("selection alone", COLOURS["paper"], alone)]
    mean, shift = ("and the mean value", COLOURS["lsh"], 0.0), ("and its shift (ours)", OURS, x.scaling)
    for label, colour, slope in (mean, shift):
        value = hasher.by_group(linear_values(q, x.k, x.v, rows, hasher.remainder[:, -1] * slope))[0]
        lines.append((label, colour, add_remainder(alone, found.lse, value, weight)))
    for label, colour, out in lines:
        error = ((out - dense).norm(dim=-1) / dense.norm(dim=-1)).flatten().sort().values
        right.plot(error, torch.linspace(0, 100, len(error)), color=colour, label=f"{label}: {error.mean():.3f}")
    right.set(xlabel="relative error of the attention output", ylabel="rows below, %", xlim=(0, 0.6), ylim=(0, 100))
    right.set_title("all heads, 64 rows of the second half; mean error", fontsize=10)
    right.legend(frameon=False, fontsize=8)
    right.grid(alpha=0.3)


@torch.no_grad()
def main() -> None:
    """Write the three figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hasher", type=Path, default=Path("runs/demo/transform"), help="a trained `transform`")
    hasher = Hasher.from_pretrained(parser.parse_args().hasher).layer(LAYER)
    if not isinstance(hasher, Transform):
        parser.error(f"--hasher must be a `transform` hasher, got {type(hasher).__name__}")
    x = read_layer()
    for name, draw, panels in (
        ("digits", draw_digits, 2),
        ("shortlist", draw_shortlist, 1),
        ("remainder", draw_remainder, 2),
    ):
        figure = Figure(figsize=(5 * panels, 3.6), layout="constrained")
        draw(hasher, x, *np.atleast_1d(figure.subplots(1, panels)))
        replace(FIGURES / f"{name}.png", lambda path, figure=figure: figure.savefig(path, dpi=100, format="png"))


if __name__ == "__main__":
    main()
