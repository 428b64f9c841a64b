"""Measure the demo model and write its card, README.md in the model's folder.

    uv run python tools/demo_model/card.py [MODEL_DIR]

Two tables: the loss of the same held-out tokens with increasing context, and the loss of a sequence of random
identifiers the first and the second time, with the copies near and far apart.
"""

import random
import sys
from importlib.metadata import metadata
from pathlib import Path

import torch
from hashtrain.data.corpus import HELD_OUT, HELD_OUT_TABLES, held_out_sources
from hashtrain.demo import demo_model_path
from hashtrain.files.atomic import write_text
from hashtrain.models import load_model
from rich.progress import track
from tokens import INSTALLED

FULL, SCORED = 4096, 256
CONTEXTS = (512, 2048, 4096)
GAPS = (64, 1024, 3500)
IDENTIFIERS = 24
CARD = """# The demo model

A {millions:.1f} M-parameter Llama-architecture code model, so that every command of this project runs offline on real
text: {config.num_hidden_layers} layers, hidden {config.hidden_size}, {config.num_attention_heads} query /
{config.num_key_value_heads} KV heads of {config.head_dim}, byte-level BPE of {config.vocab_size:,} tokens, context
{config.max_position_embeddings:,}, bf16. It is a test bed for attention, not an assistant. The weights are a committed
binary file of over 1 MB because nothing can be downloaded where this project is tested.

How it was trained: `docs/log.md` and `tools/demo_model/`; this card is written by `tools/demo_model/card.py`.

Held-out loss of the last {scored} of {full:,} tokens, in nats, {documents} documents, by the context they are seen in:

| {lengths} |
|{rule}
| {values} |

Does it look back? {identifiers} random identifiers, real code, the same identifiers again; loss in nats of the first
and of the second copy:

| tokens between | first copy | second copy |
|---|---|---|
{copies}

Training text: Python sources of the standard library (PSF-2.0) and of {sources}; the first part of the training also
saw pandas (BSD-3-Clause), datasets (Apache-2.0) and pydantic (MIT).

Never trained on: {held_out}.
"""


@torch.no_grad()
def losses(model, ids):
    """Return the loss of each token but the first, in nats."""
    logits = model(ids[None]).logits[0, :-1].float()
    return torch.nn.functional.cross_entropy(logits, ids[1:], reduction="none")


def by_context(model, documents):
    """Return the mean loss of the last SCORED of each document's first FULL tokens, by length of the context."""
    table = {context: [] for context in CONTEXTS}
    for ids in track(documents, "held-out loss"):
        for context in CONTEXTS:
            table[context].append(losses(model, ids[FULL - context :])[-SCORED:].mean().item())
    return {context: sum(values) / len(values) for context, values in table.items()}


def induction(model, tokenizer, documents):
    """Return the mean loss of random identifiers, first and second copy, by the tokens of real code in between."""
    rng = random.Random(0)
    table = {}
    for gap in GAPS:
        first, second = [], []
        for ids in track(documents, f"copies {gap} tokens apart"):
            names = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=6)) for _ in range(IDENTIFIERS)]
            run = torch.tensor(tokenizer("\n".join(names) + "\n").input_ids)
            size = len(run)
            found = losses(model, torch.cat([ids[:64], run, ids[64 : 64 + gap], run]))
            first.append(found[63 : 63 + size].mean().item())
            second.append(found[-size:].mean().item())
        table[gap] = (sum(first) / len(first), sum(second) / len(second))
    return table


def licence(package):
    """Return the licence as the package's metadata states it."""
    meta = metadata(package)
    for field in ("License-Expression", "License"):
        words = (meta.get_all(field) or [""])[0]
        if 0 < len(words) < 200:  # some packages put the full text of the licence here
            return words
    return ", ".join(c.rsplit(" :: ", 1)[-1] for c in meta.get_all("Classifier") or [] if c.startswith("License ::"))


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else demo_model_path()
    model, tokenizer = load_model(str(folder), torch.float32)
    texts = [torch.tensor(tokenizer(d.text, verbose=False).input_ids) for d in held_out_sources()]
    documents = [ids[:FULL] for ids in texts if len(ids) >= FULL]
    lengths = by_context(model, documents)
    copies = induction(model, tokenizer, documents)
    millions = sum(p.numel() for p in model.parameters()) / 1e6
    facts = {"millions": millions, "config": model.config, "scored": SCORED, "full": FULL, "identifiers": IDENTIFIERS}
    facts |= {"documents": len(documents), "rule": "---|" * len(lengths)}
    text = CARD.format(
        **facts,
        lengths=" | ".join(f"{context:,}" for context in lengths),
        values=" | ".join(f"{value:.3f}" for value in lengths.values()),
        copies="\n".join(f"| {gap:,} | {a:.2f} | {b:.2f} |" for gap, (a, b) in copies.items()),
        sources=", ".join(f"{package} ({licence(package)})" for package in INSTALLED),
        held_out=", ".join(f"`{name}`" for name in sorted((*HELD_OUT, *HELD_OUT_TABLES))),
    )
    write_text(folder / "README.md", text)
    print(text)


if __name__ == "__main__":
    main()
