"""Time the host side of one layer's decode step, with a driver that does nothing: encode, search and attend.

The remainder's sums, which not every attachment has, are listed separately.

    uv run tools/host_cost.py                                     # prints microseconds, the minimum of many rounds
    uv run tools/host_cost.py --out docs/results/host_cost.json   # for the table of docs/gpu.md

This needs no GPU: launches go to a stub that reports success, and the tensors are in host memory. Measured are Python,
torch's allocations and the packing of arguments: everything before a launch. The real driver's call, about a
microsecond per launch, and torch's dispatcher come on top.
"""

import argparse
import json
import pathlib
import sys
import timeit
from collections.abc import Callable

import hashcore
import torch
from evals.machine import processor
from hashcore.cuda import operands, tensor_search
from hashtrain import HasherConfig, ModelShape
from hashtrain.artefact.hasher import make_layer
from hashtrain.files.atomic import write_text
from hashtrain.layers.transform import Transform
from idle_driver import idle_driver
from sparse_decode.attention import gather
from sparse_decode.hashing import encode_cuda, encode_weights
from sparse_decode.unselected import remainder
from sparse_decode.unselected.sums import Rounded

KV_HEADS, GROUP, DIM, TOKENS, KEPT, BITS = 8, 4, 128, 4096, 82, 128
ROUNDS, CALLS = 30, 100
APART = "sums"


def calls() -> dict[str, Callable[[], object]]:
    """Return the calls of one layer of Llama-3-8B's shape."""
    layer = make_layer(HasherConfig("transform", ModelShape(1, KV_HEADS * GROUP, KV_HEADS, DIM)), 0, 0)
    assert isinstance(layer, Transform)
    encode_weights.place(layer)  # as for a hasher on a device
    q = torch.zeros(1, KV_HEADS * GROUP, 1, DIM, dtype=torch.bfloat16)
    k = torch.zeros(1, KV_HEADS, 1, DIM, dtype=torch.bfloat16)
    keys = torch.zeros(1, KV_HEADS, TOKENS, BITS // 32, dtype=torch.int32)
    new_code = keys[:, :, -1:]
    planes = torch.zeros(1, KV_HEADS, layer.planes, BITS // 32, dtype=torch.int32)
    out = (torch.zeros(1, KV_HEADS, KEPT, dtype=torch.int32), torch.zeros(1, KV_HEADS, KEPT, dtype=torch.int64))
    cache = torch.zeros(1, KV_HEADS, TOKENS, DIM, dtype=torch.bfloat16)
    plane_weights = tuple(1 << p for p in range(layer.planes))
    bounds, chosen = operands.Bounds(TOKENS, 0, 1, 4), out[1][:, :, None]

    def encode() -> None:
        known = encode_weights.placed[id(layer)]  # as `encode_cuda.step` finds it; it is forgotten with the layer
        encode_cuda.hash_step(k, known.key, q, known.query, known.digits, new_code, known.hows[0])

    def search() -> None:
        tensor_search.search(planes, keys, KEPT, plane_weights, bounds, *out)

    def attend() -> None:
        gather.attend(q, cache, cache, chosen, 0.1, None, None, ends=(1, 4), lse=False)

    keys_sum, values_sum = (torch.zeros(1, KV_HEADS, DIM, dtype=torch.float64) for _ in range(2))
    spread, slopes = torch.zeros(1, KV_HEADS, DIM, DIM), torch.zeros(KV_HEADS * GROUP)
    levels, scales = Rounded.of(spread)

    def add() -> None:
        remainder.add_token(q[:, :, 0], slopes, cache, cache, keys_sum, values_sum, spread, levels, scales, TOKENS - 1)

    return {"encode": encode, "search": search, "attend": attend, APART: add}


def least(call: Callable[[], object]) -> float:
    """Return the microseconds of a call: the minimum mean of many rounds, because other processes may interfere."""
    return min(timeit.repeat(call, repeat=ROUNDS, number=CALLS)) / CALLS * 1e6


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, help="JSON file to write")
    given = parser.parse_args()
    torch.set_num_threads(1)
    with idle_driver():
        found = {name: round(least(call), 1) for name, call in calls().items()}
    for name, microseconds in found.items():
        print(f"{name:8} {microseconds:6.1f} us")
    together = round(sum(found.values()) - found[APART], 1)
    text = json.dumps({**found, "together": together, "processor": processor(), "hashcore": hashcore.__version__})
    if given.out is not None:
        write_text(given.out, text + "\n")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
