"""Attention of one layer of a decode step: dense, and ours as a whole and by part; then the search of the paper.

32 query heads, 8 KV heads of 128, bfloat16, 2 % selected, remainder, `transform` with random weights, random keys.
Weights, keys and codes of a case differ from step to step and are larger than the L2 cache together.
"""

from typing import Any, NamedTuple

import hashcore
import torch
from hashtrain.config import RECENT, SINK
from timing import Stage
from torch import Tensor

HEADS, KV_HEADS, DIM, FRACTION = 32, 8, 128, 0.02
SIZES = (1, 131072), (1, 32768), (8, 32768), (1, 524288), (1, 8192), (8, 131072), (1, 2097152), (8, 524288)
SMALL = (1, 600), (2, 1200)
PAPER_KEYS = 524288


class Case(NamedTuple):
    """One set of tensors: a new token's key is the last of k."""

    q: Tensor
    k: Tensor
    v: Tensor
    codes: Tensor
    sums: Any


class Layer:
    """A layer's hash functions on the device, several times, so that their weights are not in the cache."""

    def __init__(self, device: str, copies: int):
        from hashtrain import HasherConfig, ModelShape
        from hashtrain.hasher import make_layer
        from sparse_decode.cuda import encode_weights

        config = HasherConfig("transform", ModelShape(1, HEADS, KV_HEADS, DIM), bits=128, hidden=128)
        original = make_layer(config, 0, 0).requires_grad_(False)
        original.round_matrices()
        self.copies = []
        for _ in range(copies):
            self.copies.append(encode_weights.place(original, torch.device(device)))
        self.coefficients = torch.full((HEADS, 5), 0.01, device=device)
        self.slopes = torch.full((HEADS,), 0.01, device=device)

    def case(self, batch: int, tokens: int) -> Case:
        from sparse_decode.sums import Sums

        device = self.slopes.device
        k, v = (torch.randn(batch, KV_HEADS, tokens, DIM, device=device, dtype=torch.bfloat16) for _ in range(2))
        q = torch.randn(batch, HEADS, 1, DIM, device=device, dtype=torch.bfloat16)
        codes = torch.randint(-(1 << 31), 1 << 31, (batch, KV_HEADS, tokens, 4), device=device).int()
        sums = Sums()
        sums.advance(k, v, None, 256, device)
        sums.length = tokens - 9  # as if they were of these: what the kernel does is the same
        return Case(q, k, v, codes, sums)


class Steps:
    """The steps of one size: each takes the number of a set of tensors."""

    def __init__(self, stage: Stage, layer: Layer, batch: int, tokens: int):
        self.stage, self.layer, self.tokens = stage, layer, tokens
        size = batch * tokens * KV_HEADS * DIM * 4
        self.sets = max(1, min(32, (6 << 30) // size)) if stage.cuda else 1
        self.cases = [layer.case(batch, tokens) for _ in range(self.sets)]
        self.count = max(1, int(FRACTION * tokens) - SINK - RECENT)
        self.new_keys = [case.k[:, :, -1:].contiguous() for case in self.cases]  # as a model makes them
        self.planes, self.weights = self.hash(0)
        self.found, self.means = self.search(0), self.sums(0)

    def hash(self, i: int) -> Any:
        from sparse_decode.cuda import encode

        case, own = self.cases[i], self.layer.copies[i % len(self.layer.copies)]
        if not self.stage.cuda:  # the operators of a step are for CUDA alone
            return own.layer.encode_queries(case.q)
        return encode.tokens(own, False, self.new_keys[i], case.codes[:, :, -1:], q=case.q)

    def search(self, i: int, planes: Tensor | None = None) -> Tensor:
        keys = self.cases[i].codes[:, :, None]
        found = hashcore.search(
            *(self.planes if planes is None else planes, keys, self.count, self.weights),
            order="index", sink=SINK, recent=RECENT,
        )  # fmt: skip
        return found[1]

    def sums(self, i: int) -> Any:
        from sparse_decode.cuda.sums import add_token

        q, k, v, _, sums = self.cases[i]
        return add_token(q[:, :, 0], self.layer.slopes, k, v, sums, None) if self.stage.cuda else None

    def attend(self, i: int, found: Tensor | None = None, means: Any = None) -> Tensor:
        from sparse_decode import attend
        from sparse_decode.cuda.gather import OPERATORS

        case, found = self.cases[i], self.found if found is None else found
        if not self.stage.cuda:
            return attend(case.q, case.k, case.v, found, DIM**-0.5)
        rest = [x[:, :, None] for x in (self.means if means is None else means)]
        given = case.q, case.k, case.v, found, DIM**-0.5, None, None, self.layer.coefficients, *rest, None
        return OPERATORS.gather(*given, SINK, RECENT, None, None)

    def whole(self, i: int) -> Tensor:
        return self.attend(i, self.search(i, self.hash(i)[0]), self.sums(i))

    def each(self, step: Any) -> list[Any]:
        return [lambda i=i: step(i) for i in range(self.sets)]


def dense_us(stage: Stage, cases: list[Case]) -> dict[str, float]:
    """Return the microseconds of torch's backends, without masks and repeated keys: the best is our measure."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    def attend(case: Case, backend: Any) -> Tensor:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(case.q, case.k, case.v, enable_gqa=True)

    backends = (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION) if stage.cuda else (SDPBackend.MATH,)
    found = {}
    for backend in backends:
        with stage.part(f"dense {backend.name}"):
            found[backend.name] = stage.graph_us(
                [lambda case=case, backend=backend: attend(case, backend) for case in cases]
            )
    return found


def measure(stage: Stage, layer: Layer, batch: int, tokens: int) -> None:
    """Write the row `layer` of one size."""
    steps = Steps(stage, layer, batch, tokens)
    parts = {"whole": steps.whole, "hash": steps.hash, "search": steps.search, "sums": steps.sums}
    row: dict[str, Any] = {"batch": batch, "tokens": tokens, "sets": steps.sets}
    for name, step in (parts | {"attend": steps.attend}).items():
        with stage.part(name, batch=batch, tokens=tokens):
            row[f"{name}_us"] = stage.graph_us(steps.each(step))
    row["eager_us"], row["host_us"] = stage.eager_us(steps.each(steps.whole) * max(1, 64 // steps.sets))
    dense = dense_us(stage, steps.cases)
    best = min(dense.values())
    stage.put("layer", **row, dense_us=best, dense=dense, speedup=best / row["whole_us"])


def paper(stage: Stage, tokens: int) -> None:
    """Write the rows `paper`: packing and search of 512K keys, for which the paper reports 100 us on an A100."""
    for rows in (1, KV_HEADS):
        shape = 4, rows, tokens
        keys = torch.randint(-(1 << 31), 1 << 31, (*shape, 4), device=stage.device).int()
        w = torch.randn(rows, 128, device=stage.device)
        x = torch.randn(rows, tokens, 128, device=stage.device, dtype=torch.bfloat16)
        found: dict[str, float] = {}
        for count in (1, 6):
            planes, weights = hashcore.planes(w, count, check=False)

            def search(i: int, planes: Tensor = planes, weights: tuple[int, ...] = weights, keys: Tensor = keys) -> Any:
                return hashcore.search(planes, keys[i], int(FRACTION * tokens), weights, order="index")

            found[f"search_{count}_us"] = stage.graph_us([lambda i=i, search=search: search(i) for i in range(4)])
        found["pack_all_us"] = stage.graph_us([lambda x=x: hashcore.pack(x)] * 4)
        stage.put("paper", rows=rows, tokens=tokens, **found)


def run(stage: Stage, sizes: tuple[tuple[int, int], ...] = ()) -> None:
    """Measure all sizes for which there is time, the most telling first."""
    layer = Layer(stage.device, 16 if stage.cuda else 1)  # 16: 60 MB
    for number, (batch, tokens) in enumerate(sizes or (SIZES if stage.cuda else SMALL)):
        if stage.left() < 8:
            stage.put("skipped", what=f"layer {batch} x {tokens}")
            continue
        with stage.part("layer", batch=batch, tokens=tokens):
            measure(stage, layer, batch, tokens)
        if number == 1:
            with stage.part("paper"):
                paper(stage, PAPER_KEYS if stage.cuda else 4096)
