"""Compare search with a shortlist to search of all codes, on real keys and queries: time and recall.

    uv run packages/sparse-decode/benchmarks/shortlist.py --out docs/results/shortlist.json
    uv run packages/sparse-decode/benchmarks/shortlist.py --contexts 4 --rounds 2 --layers 2   # a short one

Keys of many held-out contexts are concatenated to one long context; queries are the last ones of the last context. One
thread searches the KV heads in turn, so that codes come from the last-level cache or from memory. The last line is
JSON; --out stores it.
"""

import argparse
import json
import os
import pathlib
import statistics
import time
from typing import Any

os.environ |= {"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}  # read when imported

import hashcore
import numpy as np
import torch
from hashtrain import Hasher
from hashtrain.data.capture import capturing
from hashtrain.data.corpus import contexts, held_out_sources
from hashtrain.demo import demo_model_path
from hashtrain.models import load_model
from results import machine, store
from torch import Tensor

FRACTION, TIMES = 0.02, (4, 5, 6, 8)


def operands(args: argparse.Namespace) -> dict[int, tuple[Tensor, Tensor, tuple[int, ...]]]:
    """Return codes [Hkv, N, W], planes [Hkv, Q, P, W] of the last queries and the planes' weights, by layer."""
    model, tokenizer = load_model(args.model or str(demo_model_path()))
    hasher = Hasher.from_pretrained(args.hasher)
    found: dict[int, list[tuple[Tensor, Tensor]]] = {layer: [] for layer in args.layers}

    def sink(layer: int, q: Tensor, k: Tensor, v: Tensor, scaling: float) -> None:
        if layer in found:
            found[layer].append((hasher.encode_keys(layer, k)[0], q[:, :, -args.queries :]))

    ids = contexts(held_out_sources(), tokenizer, args.context, args.contexts)
    with torch.no_grad(), capturing(model, sink):
        for i, context in enumerate(ids):
            print(f"context {i + 1} of {len(ids)}", flush=True)
            model(context[None])
    result = {}
    for layer, parts in found.items():
        planes, weights = hasher.encode_queries(layer, parts[-1][1])
        result[layer] = torch.cat([codes for codes, _ in parts], 1).contiguous(), planes[0].contiguous(), weights
    return result


def measured(codes: Tensor, planes: Tensor, weights: tuple[int, ...], rounds: int) -> dict[str, Any]:
    """Compare searches of one layer: microseconds per row, ratios, and recall of the exact selection."""
    heads, n, _ = codes.shape
    k, keys, queries = int(FRACTION * n), codes.numpy(), planes.numpy()
    spent: dict[int | None, list[float]] = {times: [] for times in (None, *TIMES)}
    shares: dict[int, list[float]] = {times: [] for times in TIMES}
    for turn in range(-1, rounds):
        for row in range(queries.shape[1]):
            for head in range(heads):
                exact = np.empty(0)
                for times in spent:
                    began = time.perf_counter()
                    _, found = hashcore.search(
                        queries[head, row], keys[head], k, weights, order="index", shortlist=times
                    )
                    if turn >= 0:
                        spent[times].append(time.perf_counter() - began)
                    elif times is None:
                        exact = found
                    else:
                        shares[times].append(float(np.isin(exact, found, assume_unique=True).mean()))
    full = spent[None]
    return {
        "n": n,
        "planes": len(weights),
        "microseconds": {str(times): 1e6 * statistics.median(at) for times, at in spent.items()},
        "ratio": {str(t): statistics.median(a / b for a, b in zip(full, spent[t], strict=True)) for t in TIMES},
        "found": {str(times): statistics.mean(at) for times, at in shares.items()},
        "found_worst": {str(times): min(at) for times, at in shares.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder; default: the demo model")
    parser.add_argument("--hasher", default="runs/demo/transform")
    parser.add_argument("--layers", type=int, nargs="+", default=[0, 1, 2, 3, 4, 5])
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--contexts", type=int, default=32)
    parser.add_argument("--queries", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=pathlib.Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for layer, given in operands(args).items():
        rows.append({"layer": layer, **measured(*given, args.rounds)})
        print(json.dumps(rows[-1]), flush=True)
    store({**machine(), "fraction": FRACTION, "rows": rows}, args.out)


if __name__ == "__main__":
    main()
