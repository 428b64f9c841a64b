"""Find out which tokens the worst rows of a hasher miss, and why.

    uv run tools/what_is_missed.py --model MODEL --hashers FOLDER/transform --out docs/results/missed.json

For each layer and KV head: the 5 % of the rows that find the least attention mass, the tokens of the exact selection
that they miss, and the share of the missed mass by cause (`CAUSES`). A token may have several causes, so shares may sum
to more than one. Beside it is the share that tokens of that kind have in the exact selection of the same rows: a cause
matters if it weighs more in what is missed. Without --text, held-out modules of Python's standard library are read.
"""

import argparse
import json
import pathlib
from typing import Any, NamedTuple

import torch
from evals.documents import load_documents
from hashtrain import Hasher
from hashtrain.data.capture import observe
from hashtrain.demo import DEMO, model_path
from hashtrain.evaluation.metrics import best, reading
from hashtrain.files.atomic import write_text
from hashtrain.layers.surrogate import quantised
from hashtrain.layers.transform import Transform
from hashtrain.models import load_model
from hashtrain.training.target import always_read, attention, top_count
from torch import Tensor

CAUSES = {
    "near": "the 5th to the 16th last token",
    "same token": "the row's own token, earlier",
    "separator": "line breaks and punctuation",
    "key norm": "keys among the longest 1 % of their head",
    "clipping": "found if key levels were not clipped",
    "rounding": "found if the query were not rounded",
    "other": "none of these",
}
KINDS = ("near", "same token", "separator", "key norm")
"""Causes that a token may have whether it is missed or not."""
COLUMNS = ("layer", "head", "low", "missed", *CAUSES)
WORST, FRACTION, NEAR, LONG = 0.05, 0.02, (5, 16), 0.99


class Shares(NamedTuple):
    """What the worst rows of each head miss."""

    low: Tensor  # [H]: 5th percentile of the mass found, relative to the exact selection's
    missed: Tensor  # [H]: mean share of that mass that the worst rows miss
    causes: Tensor  # [H, causes]: share of the missed mass by cause
    usual: Tensor  # [H, KINDS]: share that such tokens have in the searched part of the exact selection, over all rows


def kinds(ids: Tensor, positions: Tensor, k: Tensor, separators: Tensor) -> dict[str, Tensor]:
    """Mark the tokens of each kind, for KV heads H and rows R: bool, each broadcasts to [H, R, T].

    Args:
        ids: int64 [T]; positions: int64 [R]; k: [H, T, D]; separators: bool [T].
    """
    back = positions[:, None] - torch.arange(len(ids)) + 1  # 1: the row's own token
    norm = k.float().norm(dim=-1)
    return {
        "near": ((back >= NEAR[0]) & (back <= NEAR[1]))[None],
        "same token": (ids == ids[positions][:, None])[None],
        "separator": separators[None, None],
        "key norm": (norm > norm.quantile(LONG, dim=-1, keepdim=True))[:, None],
    }


def score_variants(layer: Transform, q: Tensor, k: Tensor) -> dict[str, Tensor]:
    """Return scores [1, Hkv, R, T] as `deployed`, without `clipping` of key levels, and without the query's `rounding`.

    Args:
        q: [1, Hq, R, D]; k: [1, Hkv, T, D].
    """
    weight, signs = layer.query_weight(q), layer.soft_keys(k)
    z, limit = layer.key(k), layer.layout().limit[:, None]
    level = 2 * torch.floor(z / 2) + 1
    beyond = (level - level.maximum(-limit).minimum(limit)) * (limit > 0)  # what clipping takes off
    by_coordinate = layer.by_group(layer.query(q)).sum(2)
    return {
        "deployed": layer.scores(q, k),
        "clipping": quantised(weight, layer.planes)[0] @ signs.mT + by_coordinate @ beyond.mT,
        "rounding": weight @ signs.mT,
    }


def shares(p: Tensor, counts: Tensor, always: Tensor, read: dict[str, Tensor], marks: dict[str, Tensor]) -> Shares:
    """Attribute what the worst rows miss.

    Args:
        p: attention of H heads' rows, [H, R, T], negative where invisible; counts: int64 [R], tokens that rows read.
        always: bool [R, T], those read without a search.
        read: bool [H, R, T] by variant of the score: `deployed`, `clipping`, `rounding`.
        marks: `kinds`.
    """
    exact = torch.zeros_like(read["deployed"])
    searched = p.masked_fill(always, -1.0)
    most = (counts - always.sum(-1)).clamp(min=0)
    order = searched.topk(int(most.max()), dim=-1).indices
    exact.scatter_(-1, order, (torch.arange(order.shape[-1]) < most[:, None]).expand_as(order))
    p = p.clamp(min=0)
    p = p / (p * (exact | always)).sum(-1, keepdim=True)
    found = (p * read["deployed"]).sum(-1)
    lost = exact & ~read["deployed"]
    marks = {**marks, **{name: lost & read[name] for name in ("clipping", "rounding")}}
    marks["other"] = ~torch.stack([mark.expand_as(lost) for mark in marks.values()]).any(0)
    rows = found.argsort(-1)[:, : max(1, round(WORST * p.shape[1]))]
    at = rows[:, :, None].expand(-1, -1, p.shape[-1])
    missed = (p * lost).gather(1, at)
    causes = [(missed * marks[name].expand_as(lost).gather(1, at)).sum((1, 2)) for name in CAUSES]
    usual = [((p * exact) * marks[name]).sum((1, 2)) for name in KINDS]
    whole, all_missed = (p * exact).sum((1, 2)), missed.sum((1, 2))
    return Shares(
        found.quantile(0.05, dim=-1),
        missed.sum(-1).mean(-1),
        torch.stack(causes, -1) / all_missed.clamp(min=1e-12)[:, None],
        torch.stack(usual, -1) / whole.clamp(min=1e-12)[:, None],
    )


def separators_of(tokenizer: Any, ids: Tensor) -> Tensor:
    """Mark the tokens [T] that are line breaks or punctuation: without a letter or digit, and not only spaces."""
    texts = {number: tokenizer.decode([number]) for number in ids.unique().tolist()}
    found = {n: not any(map(str.isalnum, text)) and bool(text.strip() or "\n" in text) for n, text in texts.items()}
    return torch.tensor([found[number] for number in ids.tolist()])


@torch.inference_mode()
def measure(
    model: Any, tokenizer: Any, hashers: list[Hasher], ids: Tensor, rows: int
) -> tuple[list[list[list[float]]], list[float]]:
    """Return for each hasher a line of `COLUMNS` per layer and head, and the mean over heads of the `usual` shares."""
    t = len(ids)
    positions = torch.randint(t // 4, t, (rows,), generator=torch.Generator().manual_seed(0))
    counts, always = top_count(positions + 1, FRACTION), always_read(positions, t)
    separators, unseen = separators_of(tokenizer, ids), torch.arange(t) > positions[:, None]
    lines: list[list[list[float]]] = [[] for _ in hashers]
    usual: list[Tensor] = []

    def sink(number: int, q: Tensor, k: Tensor, v: Tensor, scaling: float) -> None:
        own, marks = q[:, :, positions], kinds(ids, positions, k[0], separators)
        p = attention(own, k, positions, scaling)[0]
        for hasher, mine in zip(hashers, lines, strict=True):
            layer = hasher.layer(number)
            assert isinstance(layer, Transform)
            read = {
                name: reading(best(scores[0], unseen | always, (counts - always.sum(-1)).clamp(min=0)), always)
                for name, scores in score_variants(layer, own, k).items()
            }
            found = shares(p, counts, always, read, marks)
            values = torch.cat([found.low[:, None], found.missed[:, None], found.causes], 1).tolist()
            mine.extend([number, head, *(round(value, 4) for value in line)] for head, line in enumerate(values))
            usual.append(found.usual.mean(0))

    observe(model, ids, sink)
    return lines, [round(value, 4) for value in torch.stack(usual).mean(0).tolist()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEMO, help="a model folder; default: the demo model")
    parser.add_argument("--hashers", type=pathlib.Path, nargs="+", required=True, help="folders of `transform` hashers")
    parser.add_argument("--text", type=pathlib.Path, nargs="*", default=[], help="held-out text")
    parser.add_argument("--kind", default="Python", help="what the text is called in the table")
    parser.add_argument("--context", type=int, default=4096, help="tokens")
    parser.add_argument("--rows", type=int, default=400, help="rows, 5 %% of which are looked at")
    parser.add_argument("--out", type=pathlib.Path, required=True, help="JSON file; other runs in it are kept")
    given = parser.parse_args()
    torch.set_num_threads(1)
    hashers = [Hasher.from_pretrained(folder) for folder in given.hashers]
    for folder, hasher in zip(given.hashers, hashers, strict=True):
        if hasher.config.variant != "transform":
            parser.error(f"expected a hasher of variant transform, got {hasher.config.variant} in {folder}")
    model, tokenizer = load_model(model_path(given.model), torch.float32, "cpu")
    for hasher in hashers:
        hasher.require_match(model.config)
    (document,) = load_documents(given.text, tokenizer, given.context, 1, 0)
    lines, usual = measure(model, tokenizer, hashers, document.ids, given.rows)
    runs = json.loads(given.out.read_text())["runs"] if given.out.exists() else []
    for folder, heads in zip(given.hashers, lines, strict=True):
        what = {"model": pathlib.Path(given.model).name, "text": given.kind, "hasher": folder.name}
        runs = [run for run in runs if {name: run[name] for name in what} != what]
        runs.append({**what, "context": given.context, "rows": given.rows, "usual": usual, "heads": heads})
    runs.sort(key=lambda run: (run["model"], run["text"], run["hasher"]))
    write_text(given.out, as_text(runs))


def as_text(runs: list[dict[str, Any]]) -> str:
    """Format runs as JSON, one line per run and per head."""
    bodies = []
    for run in runs:
        head = json.dumps({name: value for name, value in run.items() if name != "heads"})
        bodies.append(head[:-1] + ', "heads": [\n' + ",\n".join(map(json.dumps, run["heads"])) + "]}")
    return f'{{"columns": {json.dumps(COLUMNS)}, "runs": [\n' + ",\n".join(bodies) + "\n]}\n"


if __name__ == "__main__":
    main()
