"""A CUDA device that is not there: torch's fake tensors say that they lie on it, and hold no numbers.

What would wait for the device, or mix devices, raises; what is left is counted. Nothing is launched, so results are
not seen here: the kernels have their host simulator, the arithmetic its tests on the CPU.
"""

import contextlib
import copy
import functools
from collections.abc import Iterator
from typing import NamedTuple
from unittest import mock

import hashcore
import torch
from hashcore.cuda import tensors
from hashtrain import Hasher, HasherConfig, ModelShape
from hashtrain.layers import LayerHasher
from sparse_decode import Budget, attach
from sparse_decode.select import HashSelector, QueryHeadHasher
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    Gemma2Config,
    GptOssConfig,
    LlamaConfig,
    PreTrainedConfig,
    Qwen3Config,
    cache_utils,
)
from transformers.integrations import moe

NOTHING = (
    "empty",
    "new_empty",
    "empty_like",
    "detach",
    "alias",
    "_unsafe_view",
    "device",
    "promote_types",
    "lift_fresh",
)
"""Operators that launch nothing, besides views."""


@contextlib.contextmanager
def fake_gpu() -> Iterator[FakeTensorMode]:
    """Make every new tensor a fake one on CUDA."""
    tensor = torch.tensor

    def without_numbers(data: object, **how: object) -> torch.Tensor:  # of none, torch would ask for a real device
        return torch.empty(0, **how) if data == [] else tensor(data, **how)

    calibrated = mock.patch.object(LayerHasher, "calibrated", property(lambda layer: True))  # it reads numbers
    grouped = mock.patch.object(moe, "_can_use_grouped_mm", return_value=True)  # it asks the device what it is
    empty = mock.patch.object(cache_utils.torch, "tensor", without_numbers)
    with FakeTensorMode() as mode, torch.device("cuda"), calibrated, grouped, empty:
        yield mode


def faked(hasher: Hasher, mode: FakeTensorMode) -> Hasher:
    """Copy a hasher whose weights are fake, in host memory: where a hasher that was loaded has them."""
    known: dict[int, object] = {id(x): mode.from_tensor(x) for x in (*hasher.buffers(), *hasher.parameters())}
    return copy.deepcopy(hasher, known)


class Operators(TorchDispatchMode):
    """Lists the operators that launch something, by name, and the copies between host and device."""

    def __init__(self) -> None:
        super().__init__()
        self.launching: list[str] = []
        self.copies: list[str] = []

    def __torch_dispatch__(self, func: OpOverload, types: object, args=(), kwargs=None) -> object:
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.split("::")[-1]
        given = [x for x in (*args, *(kwargs or {}).values()) if isinstance(x, torch.Tensor)]
        places = {x.device.type for x in given + [x for x in [out] if isinstance(x, torch.Tensor)]}
        if len(places) > 1:
            self.copies.append(name)
        if not func.is_view and name not in NOTHING:
            self.launching.append(name)
        return out


LAYERS, PROMPT = 2, 128
SIZES = {
    "vocab_size": 64,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
TENTH = Budget(0.1)
FULL = ["full_attention"] * LAYERS
CONFIGS = {
    "llama": LlamaConfig(**SIZES),
    "qwen3": Qwen3Config(**SIZES),
    "gemma2": Gemma2Config(**SIZES, layer_types=FULL),
    "gpt_oss": GptOssConfig(**SIZES, layer_types=FULL, num_local_experts=2, num_experts_per_tok=1),
}


def steps(
    config: PreTrainedConfig, selector: HashSelector | None, budget: Budget, count: int = 2, **how: object
) -> Operators:
    """Decode after a prompt; return the operators of the last step, dense if there is no selector.

    The prompt is dense: eager attention has a mask there, whose form a prefill looks at.
    """
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    cache, token = DynamicCache(config=config), torch.zeros(1, 1, dtype=torch.long)
    with torch.inference_mode():
        model(torch.zeros(1, PROMPT, dtype=torch.long), past_key_values=cache)
        attached = contextlib.nullcontext() if selector is None else attach(model, selector, budget, **how)
        with attached:
            for _ in range(count):
                with Operators() as seen:
                    model(token, past_key_values=cache)
    return seen


class Beyond(NamedTuple):
    """What a sparse layer does in a step beyond what a dense one does."""

    operators: float
    launches: float
    copies: int


def beyond_dense(
    config: PreTrainedConfig, variant: str, budget: Budget = TENTH, per_query_head: bool = False, remainder: bool = True
) -> Beyond:
    """Decode a token, and count; raises where something waits for the device."""
    hasher = Hasher(HasherConfig(variant, ModelShape.of(config)), 0)
    with fake_gpu() as mode:
        hasher = faked(hasher, mode)
        selector = HashSelector(QueryHeadHasher(hasher) if per_query_head else hasher)
        dense, sparse = steps(config, None, budget), steps(config, selector, budget, remainder=remainder)
    assert {"search", "gather"} <= set(sparse.launching)
    counts = [(len(found.launching), sum(map(launches_of, found.launching))) for found in (sparse, dense)]
    more = [(mine - theirs) / LAYERS for mine, theirs in zip(*counts, strict=True)]
    return Beyond(*more, len(sparse.copies) - len(dense.copies))


def launches_of(operator: str) -> int:
    """Say how often an operator launches a kernel; those of torch count as one."""
    return {"search": search_launches(), "hash_queries": 2, "gather": 2}.get(operator, 1)


@functools.cache
def search_launches(planes: int = 6) -> int:
    """Count the launches of a search of 128-bit codes."""
    query, keys = (torch.zeros(1, rows, 4, dtype=torch.int32, device="cpu") for rows in (planes, 4096))
    out = torch.zeros(1, 80, dtype=torch.int32, device="cpu"), torch.zeros(1, 80, dtype=torch.int64, device="cpu")
    seen: list[object] = []
    weights = hashcore.planes(torch.zeros(1, 128, device="cpu"), planes)[1]
    tensors.search(query, keys, 80, weights, tensors.Bounds(4096), *out, run=lambda found, _: seen.extend(found))
    return len(seen)
