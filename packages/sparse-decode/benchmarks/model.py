"""Time decode steps of a model of Qwen2.5-0.5B's shape on the CPU, sparse and dense. Prompts: see answers.py.

    uv run packages/sparse-decode/benchmarks/model.py --out docs/results/sparse_model_decode.json

Random weights in bfloat16, the fastest dtype on CPUs, untrained `transform` hashers with arbitrary remainder
coefficients, 2 % selected. With fewer than 24 layers, the vocabulary shrinks in the same proportion. Compares with the
fastest dense step we can write (caches that grow in place, the faster of two attention implementations that do not
repeat keys), and with Hugging Face's own. Caches are filled with the same random numbers and grow by one token per
step. The ratio is compared to the ratio of bytes read: weights, keys and values, over weights, codes and selected
tokens.

Steps alternate; times are processor time, ratios are medians over adjacent steps. The last line is JSON.
"""

import argparse
import copy
import json
import pathlib
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.nn.functional as F
from results import machine, store
from shapes import make_hasher, qwen
from sparse_decode import Attachment, Budget, attach
from sparse_decode.caches.buffer import GrowingBuffer
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

FRACTION = 0.02
DECODE = [(1, 32768, 1.4), (1, 131072, 2.3), (8, 32768, 3.4)]
"""Batch size, tokens, and the approximate ratio of bytes of the whole model."""
SHIPPED = 3  # steps of Hugging Face's own, which take seconds; the fastest counts
SHARE_ASKED = 0.85

Step = Callable[[], object]


class InPlaceLayer(DynamicLayer):
    """A cache layer that grows in place, like those of attached models, without codes."""

    def take(self, keys: Tensor, values: Tensor) -> None:
        """Initialise the layer with these keys and values."""
        self.lazy_initialization(keys, values)
        self._keys, self._values = GrowingBuffer(), GrowingBuffer()
        self.update(keys, values)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self._keys.append(key_states)
        self._values.append(value_states)
        self.keys, self.values = self._keys.view(), self._values.view()
        return self.keys, self.values


def group_as_rows(q: Tensor, k: Tensor, v: Tensor, scaling: float) -> Tensor:
    grouped = q.view(*k.shape[:2], -1, q.shape[3])
    return F.scaled_dot_product_attention(grouped, k, v, scale=scaling).view(q.shape)


def head_by_head(q: Tensor, k: Tensor, v: Tensor, scaling: float) -> Tensor:
    """Use one product per sequence and KV head: torch would copy keys for a batched product."""
    grouped, out = q.view(*k.shape[:2], -1, q.shape[3]), torch.empty_like(q)
    for b in range(k.shape[0]):
        for h in range(k.shape[1]):
            p = (grouped[b, h] @ k[b, h].T).mul_(scaling).softmax(-1)
            torch.mm(p, v[b, h], out=out.view(grouped.shape)[b, h])
    return out


@contextmanager
def dense_way(way: Callable[[Tensor, Tensor, Tensor, float], Tensor] | None) -> Iterator[None]:
    """Make "sdpa" this implementation of attention for decode steps; None keeps Hugging Face's own."""
    own = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def attention(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, scaling: float, **_: Any) -> Any:
        assert way is not None
        assert mask is None
        return way(q, k, v, scaling).transpose(1, 2), None

    if way is not None:
        ALL_ATTENTION_FUNCTIONS["sdpa"] = attention
    try:
        yield
    finally:
        ALL_ATTENTION_FUNCTIONS["sdpa"] = own


class Filled:
    """Creates caches of the same n random tokens."""

    def __init__(self, model: PreTrainedModel, batch: int, n: int):
        config = model.config
        self.model = model
        size = batch, config.num_key_value_heads, n, config.hidden_size // config.num_attention_heads
        self.kv = [
            tuple(torch.empty(size, dtype=model.dtype).normal_() for _ in range(2))
            for _ in range(config.num_hidden_layers)
        ]
        self.ids = torch.zeros(batch, 1, dtype=torch.long)

    def dense(self) -> DynamicCache:
        cache = DynamicCache(config=self.model.config)
        cache.layers = [InPlaceLayer() for _ in self.kv]
        for layer, kv in zip(cache.layers, self.kv, strict=True):
            cast(InPlaceLayer, layer).take(*kv)
        return cache

    def shipped(self) -> DynamicCache:
        cache = DynamicCache(config=self.model.config)
        for layer, kv in enumerate(self.kv):
            cache.update(*kv, layer)
        return cache

    def sparse(self, attachment: Attachment) -> DynamicCache:
        return attachment.prepare(self.shipped())

    def step(self, model: PreTrainedModel, cache: DynamicCache) -> Step:
        """Return a step of one token."""
        return lambda: model(self.ids, past_key_values=cache)


def seconds(step: Step) -> float:
    began = time.process_time()
    step()
    return time.process_time() - began


def interleaved(steps: dict[str, Step], repeats: int) -> dict[str, list[float]]:
    """Time steps in turn, after one of each as warm-up."""
    for step in steps.values():
        step()
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(repeats):
        for name, step in steps.items():
            times[name].append(seconds(step))
    return times


def compared(over: list[float], under: list[float]) -> dict[str, float]:
    """Return the median and the quartiles of the ratios of adjacent times."""
    low, middle, high = statistics.quantiles([a / b for a, b in zip(over, under, strict=True)], n=4)
    return {"ratio": middle, "low": low, "high": high}


def allowed(model: PreTrainedModel, batch: int, n: int) -> dict[str, float]:
    """Return the bytes read by a dense and by a sparse step, and their ratio."""
    config, layers = model.config, model.config.num_hidden_layers
    weights = sum(p.nbytes for p in model.parameters())
    token = 2 * config.hidden_size // config.num_attention_heads * model.dtype.itemsize
    whole, sparse = batch * config.num_key_value_heads * n * token, batch * config.num_key_value_heads * n * 16
    dense_bytes = weights + layers * whole
    sparse_bytes = weights + layers * (FRACTION * whole + sparse)
    return {"dense_bytes": dense_bytes, "sparse_bytes": sparse_bytes, "allowed": dense_bytes / sparse_bytes}


def twin(model: PreTrainedModel) -> PreTrainedModel:
    """Return a copy of a model that shares its weights."""
    return copy.deepcopy(model, {id(p): p for p in model.parameters()})


def decode(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    layers = given.layers
    model = qwen(layers)
    other, hasher = twin(model), make_hasher(model)
    attachment = attach(other, hasher, Budget(FRACTION), dense_layers=0)
    for batch, n, known in DECODE:
        bound = allowed(model, batch, n)
        print(f"batch {batch}, {n:,} tokens: ratio of bytes {bound['allowed']:.2f} (whole model {known})", flush=True)
        filled = Filled(model, batch, n)
        dense, sparse = filled.step(model, filled.dense()), filled.step(other, filled.sparse(attachment))
        ways: dict[str, float] = {}
        for way in (head_by_head, group_as_rows):
            with dense_way(way):
                ways[way.__name__] = min(interleaved({"": dense}, 2)[""])
        shipped = min(interleaved({"": filled.step(model, filled.shipped())}, SHIPPED)[""])
        name = min(ways, key=lambda way: ways[way])
        with dense_way(head_by_head if name == "head_by_head" else group_as_rows):
            times = interleaved({"sparse": sparse, "dense": dense}, given.repeats)
        found = compared(times["dense"], times["sparse"])
        share = {"share": found["ratio"] / bound["allowed"], "asked": SHARE_ASKED}
        taken = {f"{name}_ms": 1e3 * statistics.median(each) for name, each in times.items()}
        yield {
            "batch": batch,
            "n": n,
            "way": name,
            **taken,
            "shipped_ms": 1e3 * shipped,
            "shipped_steps": SHIPPED,
            **bound,
            **found,
            **share,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12, help="at most 24")
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=pathlib.Path)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    torch.manual_seed(0)
    sizes = {"figure": "decode", "layers": given.layers, "repeats": given.repeats}
    result: dict[str, Any] = {**sizes, "fraction": FRACTION, **machine(), "rows": []}
    with torch.no_grad():
        for row in decode(given):
            result["rows"].append(row)
            print(json.dumps(row), flush=True)
    store(result, given.out)


if __name__ == "__main__":
    main()
