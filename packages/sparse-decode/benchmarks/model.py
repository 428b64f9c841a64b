"""Time a model of the shape of Qwen2.5-0.5B on the CPU, attached and dense: whole steps, break-even, prefill.

    uv run packages/sparse-decode/benchmarks/model.py decode --out docs/results/sparse_model_decode.json
    uv run packages/sparse-decode/benchmarks/model.py break-even --out docs/results/sparse_model_break_even.json
    uv run packages/sparse-decode/benchmarks/model.py prefill --out docs/results/sparse_model_prefill.json

Random weights in bfloat16, which is the faster type here, untrained `transform` hashers with some remainder, 2 %
selected. A model of fewer than 24 layers has as small a share of the vocabulary: everything else is in proportion.

decode: against the fastest dense step we can write (caches that grow in place, the faster of two ways to attend without
repeating keys), and against Hugging Face's own. Caches are filled with random numbers; both steps read the same ones.
The ratio is held to what the bytes allow: weights and all keys and values, against weights, codes, what is selected,
and the dense layers (2 of 24). break-even: the model as it is against the attached one, sparse whatever the length, and
dense by `dense_below`. prefill: the same, for one prompt.

Steps take turns; times are processor time, ratios are medians of neighbours. The last line is JSON.
"""

from __future__ import annotations

import argparse
import copy
import json
import pathlib
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

import torch
import torch.nn.functional as F
from hashtrain import Hasher, HasherConfig, ModelShape
from hashtrain.atomic import write_text
from sparse_decode import Attachment, Budget, attach
from sparse_decode.buffer import GrowingBuffer
from sparse_decode.cache import CodedDynamicLayer
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel, Qwen2Config
from transformers.cache_utils import DynamicLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

LAYERS, VOCABULARY, FRACTION = 24, 151936, 0.02
DECODE = [(1, 32768, 1.3), (1, 131072, 2.1), (8, 32768, 2.8)]
"""Batch, tokens, and the ratio that the bytes of the whole model allow, about."""
LENGTHS = [512, 1024, 2048, 4096, 8192]
SHIPPED = 3  # steps of Hugging Face's own, which take seconds: the fastest counts
NEVER = 1 << 30
SHARE_ASKED, SLOWER_ASKED = 0.85, 1.03

Step = Callable[[], object]


def make_model(layers: int) -> PreTrainedModel:
    config = Qwen2Config(
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=layers,
        num_attention_heads=14,
        num_key_value_heads=2,
        vocab_size=VOCABULARY * layers // LAYERS,
        max_position_embeddings=1 << 20,
        tie_word_embeddings=True,
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def make_hasher(model: PreTrainedModel) -> Hasher:
    shape = ModelShape.of(model.config)
    hasher = Hasher(HasherConfig("transform", shape)).requires_grad_(False)
    for layer in range(shape.num_layers):
        hasher.layer(layer).remainder.copy_(torch.tensor([-1.0, 0.4, 0.5, 0.05, 0.1, 0.6]))
    return hasher


class InPlaceLayer(DynamicLayer):
    """A cache layer that grows in place, as the attached ones do, and carries nothing else."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self._keys.append(key_states)
        self._values.append(value_states)
        self.keys, self.values = self._keys.view(), self._values.view()
        return self.keys, self.values


def group_as_rows(q: Tensor, k: Tensor, v: Tensor, scaling: float) -> Tensor:
    grouped = q.view(*k.shape[:2], -1, q.shape[3])
    return F.scaled_dot_product_attention(grouped, k, v, scale=scaling).view(q.shape)


def head_by_head(q: Tensor, k: Tensor, v: Tensor, scaling: float) -> Tensor:
    """One product per sequence and KV head: torch copies keys to multiply those of several at once."""
    grouped, out = q.view(*k.shape[:2], -1, q.shape[3]), torch.empty_like(q)
    for b in range(k.shape[0]):
        for h in range(k.shape[1]):
            p = (grouped[b, h] @ k[b, h].T).mul_(scaling).softmax(-1)
            torch.mm(p, v[b, h], out=out.view(grouped.shape)[b, h])
    return out


@contextmanager
def dense_way(way: Callable[[Tensor, Tensor, Tensor, float], Tensor] | None) -> Iterator[None]:
    """Let "sdpa" be this way to attend in a step; None leaves Hugging Face's own."""
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
    """Caches of n random tokens that share their memory; each step's token is forgotten again."""

    def __init__(self, model: PreTrainedModel, batch: int, n: int):
        config = model.config
        self.model, self.batch, self.n = model, batch, n
        size = batch, config.num_key_value_heads, n, config.hidden_size // config.num_attention_heads
        self.kv = [tuple(grown(torch.empty(size, dtype=model.dtype).normal_()) for _ in range(2)) for _ in self.layers]
        self.ids = torch.zeros(batch, 1, dtype=torch.long)

    @property
    def layers(self) -> range:
        return range(self.model.config.num_hidden_layers)

    def dense(self) -> DynamicCache:
        cache = DynamicCache(config=self.model.config)
        cache.layers = [InPlaceLayer() for _ in self.layers]
        for layer, kv in zip(cache.layers, self.kv, strict=True):
            fill(layer, kv)
        return cache

    def shipped(self) -> DynamicCache:
        cache = DynamicCache(config=self.model.config)
        for layer, (keys, values) in enumerate(self.kv):
            cache.layers[layer].lazy_initialization(keys.view()[:, :, :1], values.view()[:, :, :1])
            cache.layers[layer].keys, cache.layers[layer].values = keys.view(), values.view()
        return cache

    def sparse(self, attachment: Attachment) -> DynamicCache:
        cache = attachment.prepare(DynamicCache(config=self.model.config))
        for index, kv in enumerate(self.kv):
            if not isinstance(cache.layers[index], CodedDynamicLayer):
                cache.layers[index] = InPlaceLayer()
            fill(cache.layers[index], kv)
        return cache

    def step(self, model: PreTrainedModel, cache: DynamicCache) -> Step:
        """Return a step after which the cache is as before."""

        def run() -> None:
            kept = [(layer.keys, layer.values) for layer in cache.layers]
            model(self.ids, past_key_values=cache)
            for layer, (keys, values) in zip(cache.layers, kept, strict=True):
                if isinstance(layer, InPlaceLayer):
                    layer._keys.truncate(self.n)
                    layer._values.truncate(self.n)
                elif isinstance(layer, CodedDynamicLayer):
                    layer.crop(-1)
                layer.keys, layer.values = keys, values

        return run


def grown(rows: Tensor) -> GrowingBuffer:
    """Hold rows with room for a few more."""
    buffer = GrowingBuffer()
    buffer.append(rows)
    return buffer


def fill(layer: Any, kv: tuple[GrowingBuffer, ...]) -> None:
    """Let a layer hold rows that others hold, too: random codes are as quick to score as those of the keys."""
    rows = [buffer.view() for buffer in kv]
    layer.lazy_initialization(rows[0][:, :, :1], rows[1][:, :, :1])
    twins = [GrowingBuffer(), GrowingBuffer()]
    for twin, buffer in zip(twins, kv, strict=True):
        twin.__dict__.update(buffer.__dict__)
    layer._keys, layer._values = twins
    if isinstance(layer, CodedDynamicLayer):
        shape = *rows[0].shape[:3], 4
        layer._codes = grown(torch.randint(-(1 << 31), 1 << 31, shape).to(torch.int32))
    layer.keys, layer.values = rows


def seconds(step: Step) -> float:
    began = time.process_time()
    step()
    return time.process_time() - began


def interleaved(steps: dict[str, Step], repeats: int) -> dict[str, list[float]]:
    """Time steps in turns, after one of each that warms them up."""
    for step in steps.values():
        step()
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(repeats):
        for name, step in steps.items():
            times[name].append(seconds(step))
    return times


def compared(over: list[float], under: list[float]) -> dict[str, float]:
    """Return the median and the quartiles of neighbours' ratios."""
    low, middle, high = statistics.quantiles([a / b for a, b in zip(over, under, strict=True)], n=4)
    return {"ratio": middle, "low": low, "high": high}


def allowed(model: PreTrainedModel, dense_layers: int, batch: int, n: int) -> dict[str, float]:
    """Return what the bytes allow: those of a dense and of a sparse step, and their ratio."""
    config, layers = model.config, model.config.num_hidden_layers
    weights = sum(p.nbytes for p in model.parameters())
    token = 2 * config.hidden_size // config.num_attention_heads * model.dtype.itemsize
    whole, sparse = batch * config.num_key_value_heads * n * token, batch * config.num_key_value_heads * n * 16
    dense_bytes = weights + layers * whole
    sparse_bytes = weights + dense_layers * whole + (layers - dense_layers) * (FRACTION * whole + sparse)
    return {"dense_bytes": dense_bytes, "sparse_bytes": sparse_bytes, "allowed": dense_bytes / sparse_bytes}


def twin(model: PreTrainedModel) -> PreTrainedModel:
    """Return another model with the same weights in the same memory."""
    return copy.deepcopy(model, {id(p): p for p in model.parameters()})


def decode(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    layers = given.layers
    model, dense_layers = make_model(layers), max(1, 2 * layers // LAYERS)
    other, hasher = twin(model), make_hasher(model)
    attachment = attach(other, hasher, Budget(FRACTION), dense_layers=dense_layers)
    for batch, n, known in DECODE:
        bound = allowed(model, dense_layers, batch, n)
        print(f"batch {batch}, {n:,} tokens: bytes allow {bound['allowed']:.2f} x (whole model {known})", flush=True)
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


def break_even(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Compare whole steps of the model as it is, attached and always sparse, and attached and dense."""
    model = make_model(given.layers)
    hasher, models = make_hasher(model), {"dense": model, "sparse": twin(model), "attached": twin(model)}
    attach(models["sparse"], hasher, Budget(FRACTION), dense_layers=0)
    attach(models["attached"], hasher, Budget(FRACTION, dense_below=NEVER), dense_layers=0)
    for n in given.lengths or LENGTHS:
        ids, steps = torch.zeros(1, n, dtype=torch.long), {}
        for name, each in models.items():
            cache = DynamicCache(config=each.config)
            each(ids, past_key_values=cache, logits_to_keep=1)
            steps[name] = lambda each=each, cache=cache, ids=ids: each(ids[:, :1], past_key_values=cache)
        times = interleaved(steps, given.repeats)
        row = {"n": n, "dense_ms": 1e3 * statistics.median(times["dense"]), "asked": SLOWER_ASKED}
        yield row | {name: compared(times[name], times["dense"]) for name in ("sparse", "attached")}


def prefill(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Compare the time to the first token of the model as it is and of the attached one, which hashes every key."""
    model = make_model(given.layers)
    models, steps = {"dense": model, "attached": twin(model)}, {}
    attach(models["attached"], make_hasher(model), Budget(FRACTION), dense_layers=0)
    for n in given.lengths or (8192, 32768):
        ids = torch.randint(0, model.config.vocab_size, (1, n))
        for name, each in models.items():
            steps[name] = lambda each=each, ids=ids: each(
                ids, past_key_values=DynamicCache(config=each.config), logits_to_keep=1
            )
        times = interleaved(steps, given.repeats)
        taken = {f"{name}_ms": 1e3 * statistics.median(each) for name, each in times.items()}
        yield {"n": n, **taken, **compared(times["attached"], times["dense"]), "asked": SLOWER_ASKED}


FIGURES = {"decode": (decode, 12, 11), "break-even": (break_even, 6, 200), "prefill": (prefill, 1, 5)}
"""Each figure, and its default layers and repeats."""


def processor() -> str:
    """Name the processor."""
    lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("figure", choices=FIGURES)
    parser.add_argument("--layers", type=int, help="of the 24; 12, 6 or 1 by default, as the figure needs")
    parser.add_argument("--lengths", type=int, nargs="+", help="contexts of break-even or prefill")
    parser.add_argument("--repeats", type=int, help="11, 200 or 5 by default")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=pathlib.Path)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    torch.manual_seed(0)
    facts = {"processor": processor(), "torch": torch.__version__, "date": f"{datetime.now(UTC):%Y-%m-%d}"}
    figure, layers, repeats = FIGURES[given.figure]
    given.layers, given.repeats = given.layers or layers, given.repeats or repeats
    sizes = {name: getattr(given, name) for name in ("figure", "layers", "repeats", "threads")}
    result: dict[str, Any] = {**sizes, "fraction": FRACTION, **facts, "rows": []}
    with torch.no_grad():
        for row in figure(given):
            result["rows"].append(row)
            print(json.dumps(row), flush=True)
    if given.out:
        write_text(given.out, json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
