"""Why the paper's codes cost more perplexity than untrained LSH with every row sparse: test each suspect alone.

    uv run tools/why_paper.py --model MODEL --hashers FOLDER --text TEXT --out docs/results/why_paper.json
    uv run tools/why_paper.py ... --best runs/best    # also its best fair form, which this made:
    uv run hashtrain --model MODEL --text TRAIN --only paper-rotation --first-trained 0 --steps 3200 --out runs/best

Each line of the result is one pass over one text: `excess` is its negative log-likelihood minus dense attention's, in
nats, over the second half. Suspects: rows that see few tokens (2 % is a token or two, and no hasher was trained on
them), tokens that must always be read, the budget's rule, and one selection per query head instead of the group's sum.
"""

import argparse
import json
import pathlib
from typing import Literal, NamedTuple

import torch
from evals.base_commands import Always
from evals.documents import load_documents
from evals.methods import load_methods
from evals.tasks.ppl import budget_of, scored_rows, sparse_rows
from hashtrain.files.atomic import write_text
from hashtrain.models import load_model

CONTEXT, DENSE_LAYERS = 4096, 2


class Suspect(NamedTuple):
    """Differences from the paper's protocol with a budget of the visible tokens."""

    heads: Literal["kv", "query"] = "kv"
    rule: str = "visible"
    sink: int = 0
    recent: int = 0
    first_dense: int | None = None


SUSPECTS = {
    "every row sparse, nothing read unasked": Suspect(),
    "first token and last four always read": Suspect(sink=1, recent=4),
    "rows of the first 256 tokens dense": Suspect(first_dense=256),
    "these dense, first token always read": Suspect(sink=1, first_dense=256),
    "budget of the full length": Suspect(rule="fixed"),
    "budget of the full length, first and last four read": Suspect(rule="fixed", sink=1, recent=4),
    "one selection per query head": Suspect(heads="query"),
    "one selection per query head, budget of the full length": Suspect(heads="query", rule="fixed"),
}
METHODS = ("lsh", "paper")
BEST = "paper-rotation"
"""The paper's hash from a rotation; trained on every row and with more steps, it is the best fair form."""


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("model", "hashers", "text", "out"):
        parser.add_argument(f"--{name}", required=True, type=str if name == "model" else pathlib.Path)
    parser.add_argument("--documents", type=int, default=2)
    parser.add_argument("--best", type=pathlib.Path, help=f"folder with a `{BEST}` in its best form")
    given = parser.parse_args()
    torch.set_num_threads(1)
    model, tokenizer = load_model(given.model, torch.float32, "cpu")
    methods = {m.name: m for m in load_methods(METHODS, given.hashers, model.config)}
    if given.best is not None:
        methods |= {m.name: m for m in load_methods((BEST,), given.best, model.config)}
    lines = []
    for number, document in enumerate(load_documents((given.text,), tokenizer, CONTEXT, given.documents, 0)):
        ids, scored = document.ids, CONTEXT // 2
        reference = scored_rows(model, ids, scored)
        dense = reference.mean_loss(ids[-scored:])
        for label, s in SUSPECTS.items():
            for name, method in methods.items():
                how = budget_of(s.rule, 0.02), Always(DENSE_LAYERS, s.sink, s.recent), s.first_dense
                found, attended = sparse_rows(model, ids, scored, method.for_heads(s.heads), *how)
                loss, kl = reference.compare(found, ids[-scored:])
                line = {"document": number, "suspect": label, "method": name, "excess": round(loss - dense, 4)}
                lines.append({**line, "kl": round(kl, 4), "density": round(attended.density, 5)})
                print(json.dumps(lines[-1]), flush=True)
    header = {"context": CONTEXT, "dense_layers": DENSE_LAYERS, "documents": given.documents}
    body = ",\n".join(json.dumps(line) for line in lines)
    write_text(given.out, f'{json.dumps(header)[:-1]}, "lines": [\n{body}\n]}}\n')


if __name__ == "__main__":
    main()
