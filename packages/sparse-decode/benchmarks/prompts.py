"""How much sparse prompts lose: KL and perplexity of a text's last rows, against exact prompts, on the CPU.

    uv run packages/sparse-decode/benchmarks/prompts.py --model runs/smollm2 --text runs/text/handbook.txt

Each text is a context of consecutive tokens of the files, spread evenly over each. `behind`: the prompt is sparse, the
last rows are exact; `from`: the last rows are sparse, too. Decode steps are dense. The last line is JSON; in the file
of --out, a run replaces that of the same model and context.
"""

import argparse
import json
import math
import pathlib
import statistics
import time
from typing import Any

import torch
from hashtrain.models import pretrained
from results import machine, store
from shapes import make_model
from sparse_decode import attach
from sparse_decode.prompt import CHUNK, FRACTION
from torch import Tensor
from transformers import AutoTokenizer, DynamicCache, PreTrainedModel


def contexts(model: str, files: list[pathlib.Path], length: int, count: int) -> dict[str, Tensor]:
    """Return `count` contexts [1, length] of each file, by name. Raises: SystemExit if a file is too short."""
    tokenizer: Any = pretrained(AutoTokenizer, model)
    found: dict[str, Tensor] = {}
    for file in files:
        ids = tokenizer(file.read_text(), return_tensors="pt", verbose=False)["input_ids"]
        if (spare := ids.shape[1] - count * length) < 0:
            raise SystemExit(f"expected {count * length} tokens in {file}, got {ids.shape[1]}; lower --count")
        starts = [i * (length + spare // count) for i in range(count)]
        found |= {f"{file.stem} {i}": ids[:, start : start + length] for i, start in enumerate(starts)}
    return found


@torch.no_grad()
def last_rows(model: PreTrainedModel, ids: Tensor, rows: int, first: str, last: str) -> tuple[Tensor, float]:
    """Return the logits of the last rows, and the seconds that the rows before took.

    Args: first, last: "exact" or "sparse", for the rows before and for the last ones.
    """
    cache, cut, logits, began = DynamicCache(config=model.config), ids.shape[1] - rows, torch.empty(0), time.time()
    with attach(model, prompt=first):  # pyright: ignore[reportArgumentType]
        for start in range(0, cut, CHUNK):
            chunk = ids[:, start : min(cut, start + CHUNK)]
            model(chunk, past_key_values=cache, logits_to_keep=1)
    seconds = time.time() - began
    with attach(model, prompt=last):  # pyright: ignore[reportArgumentType]
        logits = model(ids[:, cut:], past_key_values=cache).logits
    return logits[0].float(), seconds


def compared(logits: Tensor, exact: Tensor, ids: Tensor) -> dict[str, float]:
    """Return the mean and the largest KL from exact in nats, and the change of perplexity."""
    a, b = exact.log_softmax(-1), logits.log_softmax(-1)
    kl, target = (a.exp() * (a - b)).sum(-1), ids[0, 1 - len(a) :, None]
    change = (a[:-1].gather(1, target) - b[:-1].gather(1, target)).mean().item()
    return {"kl": kl.mean().item(), "largest_kl": kl.max().item(), "perplexity": math.expm1(change)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a folder or hub id")
    parser.add_argument("--text", type=pathlib.Path, nargs="+", required=True, help="UTF-8 text files")
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--count", type=int, default=4, help="contexts of each file")
    parser.add_argument("--rows", type=int, default=1024, help="last rows that are compared")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=pathlib.Path)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    model = make_model(given.model, "", None)
    result: dict[str, Any] = {"model": pathlib.Path(given.model).name, "context": given.context, "rows": given.rows}
    result |= {"fraction": FRACTION, **machine(), "texts": []}
    for name, ids in contexts(given.model, given.text, given.context, given.count).items():
        exact, exact_s = last_rows(model, ids, given.rows, "exact", "exact")
        row: dict[str, Any] = {"text": name, "exact_s": exact_s}
        for way, last in (("behind", "exact"), ("from", "sparse")):
            logits, row["sparse_s"] = last_rows(model, ids, given.rows, "sparse", last)
            row[way] = compared(logits, exact, ids)
        result["texts"].append(row)
        print(
            name,
            *(f"{way} {row[way]['kl']:.4f} {row[way]['perplexity']:+.2%}" for way in ("behind", "from")),
            flush=True,
        )
    for way in ("behind", "from"):
        result[way] = {key: statistics.mean(row[way][key] for row in result["texts"]) for key in ("kl", "perplexity")}

    def other(run: dict[str, Any]) -> bool:
        return (run["model"], run["context"]) != (result["model"], result["context"])

    before = json.loads(given.out.read_text())["runs"] if given.out is not None and given.out.exists() else []
    store({"runs": [*filter(other, before), result]}, given.out)


if __name__ == "__main__":
    main()
