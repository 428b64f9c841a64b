"""A CUDA device that is not there: torch's fake tensors say that they lie on it, and hold no numbers.

What would wait for the device, or mix devices, raises; what is left is counted. Nothing is launched, so results are
not seen here: the kernels have their host simulator, the arithmetic its tests on the CPU.
"""

import contextlib
import functools
import sys
from collections.abc import Iterator
from typing import NamedTuple
from unittest import mock

import hashcore
import torch
from hashcore.cuda import operands, tensor_search
from hashtrain import Hasher, HasherConfig, ModelShape
from hashtrain.layers import LayerHasher
from sparse_decode import attach
from sparse_decode.budget import LayerBudget
from sparse_decode.hashers import QueryHeadHasher
from sparse_decode.select import HashSelector
from sparse_decode.sums import Sums
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoModelForCausalLM,
    Cache,
    DynamicCache,
    Gemma2Config,
    GptOssConfig,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3MoeConfig,
    StaticCache,
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
    """Make every new tensor a fake one, on the device that is asked for: what nobody places is in host memory."""
    tensor = torch.tensor

    def without_numbers(data: object, **how: object) -> torch.Tensor:  # of none, torch would ask for a real device
        if data == []:
            return torch.empty(0, **how)
        # A number that torch knows would be copied to a real device.
        return torch.full((), data, **how) if type(data) is int else tensor(data, **how)

    calibrated = mock.patch.object(LayerHasher, "calibrated", property(lambda layer: True))  # it reads numbers
    grouped = mock.patch.object(moe, "_can_use_grouped_mm", _can)  # it asks the device what it is
    empty = mock.patch.object(cache_utils.torch, "tensor", without_numbers)
    compiler = mock.patch("sparse_decode.model.require_compiler")  # no kernel is compiled
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, calibrated, grouped, empty, compiler:
        yield mode


def _can(*_: object) -> bool:
    return True  # a mock cannot be compiled


@contextlib.contextmanager
def told(tokens: int) -> Iterator[None]:
    """Let the host read the length of a static cache: at its prompt, and where it is first seen."""
    length = mock.patch.object(FakeTensor, "__int__", create=True, return_value=tokens)
    anew = mock.patch.object(Sums, "_same", return_value=False)
    with length, anew:
        yield


@contextlib.contextmanager
def answered() -> Iterator[list[str]]:
    """Answer yes whenever the host asks the device something; list the functions that ask."""
    asking: list[str] = []

    def answer(_: torch.Tensor) -> bool:
        asking.append(sys._getframe(1).f_code.co_name)
        return True

    with mock.patch.object(FakeTensor, "__bool__", answer, create=True):
        yield asking


class Operators(TorchDispatchMode):
    """Lists the operators that launch something, by name, those of host memory, and the copies between both."""

    def __init__(self) -> None:
        super().__init__()
        self.launching: list[str] = []
        self.copies: list[str] = []
        self.on_host: list[str] = []
        """A CUDA graph would do them once, while it is captured."""
        self._stopped = False

    def forget(self) -> None:
        """Begin anew."""
        self.launching.clear()
        self.copies.clear()
        self.on_host.clear()

    def stop(self) -> None:
        """List nothing more."""
        self._stopped = True

    def counts(self) -> tuple[int, int, int]:
        """Return how many operators, launches and copies there were; call it outside of the mode."""
        return len(self.launching), sum(map(launches_of, self.launching)), len(self.copies)

    def __torch_dispatch__(self, func: OpOverload, types: object, args=(), kwargs=None) -> object:
        out = func(*args, **(kwargs or {}))
        if self._stopped:
            return out
        name = func._schema.name.split("::")[-1]
        given = [x for x in (*args, *(kwargs or {}).values()) if isinstance(x, torch.Tensor)]
        places = {x.device.type for x in given + [x for x in [out] if isinstance(x, torch.Tensor)]}
        if len(places) > 1 and func.namespace != "sparse_decode":  # our kernels read host memory where it is
            self.copies.append(name)
        if places == {"cpu"}:
            self.on_host.append(name)
        if not func.is_view and name not in NOTHING:
            self.launching.append(name)
        return out


PROMPT, ROWS, ROOM = 128, 2, 192
SIZES = {
    "vocab_size": 64,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
TENTH = LayerBudget(0.1)


def config_of(family: str, layers: int = 2) -> PreTrainedConfig:
    """Return a small model whose layers all see the whole context."""
    sizes = {**SIZES, "num_hidden_layers": layers}
    full = {"layer_types": ["full_attention"] * layers}
    experts = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 64}
    makers = {
        "llama": lambda: LlamaConfig(**sizes),
        "qwen3": lambda: Qwen3Config(**sizes),
        "qwen3_moe": lambda: Qwen3MoeConfig(**sizes, **experts),
        "gemma2": lambda: Gemma2Config(**sizes, **full),
        "gpt_oss": lambda: GptOssConfig(**sizes, **full, num_local_experts=2, num_experts_per_tok=1),
    }
    return makers[family]()


FAMILIES = "llama", "qwen3", "qwen3_moe", "gemma2", "gpt_oss"
KINDS = "plain", "padded", "static", "host", "beam"
"""Steps: of a dynamic cache, of a batch with padding, of a static cache and padding, of keys and values in host memory,
of rows that beam search puts in another order before each of them."""


def model_of(config: PreTrainedConfig) -> PreTrainedModel:
    """Make a model on the device."""
    with torch.device("cuda"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def cache_of(config: PreTrainedConfig, kind: str) -> Cache:
    """Make an empty cache."""
    return StaticCache(config=config, max_cache_len=ROOM) if kind == "static" else DynamicCache(config=config)


def mask_of(kind: str) -> torch.Tensor | None:
    """Make a mask of all tokens, as a tokeniser returns it for a batch with padding."""
    return torch.ones(ROWS, ROOM, dtype=torch.long, device="cuda") if kind in ("padded", "static") else None


def steps(
    config: PreTrainedConfig,
    selector: HashSelector | None,
    budget: LayerBudget,
    kind: str,
    whole: bool = True,
    **how: object,
) -> Operators:
    """Decode after a prompt; return the operators of the last of three steps, or of the last layer in it.

    Dense without a selector.

    The prompt is dense: eager attention has a mask there, whose form a prefill looks at. The first step sums what the
    remainder needs.
    """
    model = model_of(config)
    cache, mask = cache_of(config, kind), mask_of(kind)
    if kind == "host":
        how["kv"] = "host"
    beams = torch.zeros(ROWS, dtype=torch.long, device="cuda")

    def step(tokens: int, end: int) -> None:
        seen = None if mask is None else mask[:, :end]
        ids = torch.zeros(ROWS, tokens, dtype=torch.long, device="cuda")
        model(ids, attention_mask=seen, past_key_values=cache)

    with torch.inference_mode():
        step(PROMPT, PROMPT)
        with contextlib.nullcontext() if selector is None else attach(model, selector, budget, **how):
            with told(PROMPT + 1):
                step(1, PROMPT + 1)
            last = model.model.layers[-1]
            for end in (PROMPT + 2, PROMPT + 3):
                if kind == "beam":
                    cache.reorder_cache(beams)
                with Operators() as seen:
                    if not whole:
                        last.register_forward_pre_hook(lambda *_, seen=seen: seen.forget())
                        last.register_forward_hook(lambda *_, seen=seen: seen.stop())
                    step(1, end)
    return seen


class Beyond(NamedTuple):
    """What a sparse layer does in a step beyond what a dense one does."""

    operators: int
    launches: int
    copies: int
    """Between host and device; the host waits for none."""


def beyond_dense(
    family: str,
    variant: str,
    budget: LayerBudget = TENTH,
    kind: str = "plain",
    per_query_head: bool = False,
    remainder: bool = True,
) -> Beyond:
    """Decode a token, and count in the last layer; raises where something waits for the device.

    What a mask says is found once for all layers, by the first one.
    """
    config = config_of(family)
    hasher = Hasher(HasherConfig(variant, ModelShape.of(config)), 0)
    with fake_gpu():
        selector = HashSelector(QueryHeadHasher(hasher) if per_query_head else hasher)
        dense = steps(config, None, budget, kind, whole=False)
        sparse = steps(config, selector, budget, kind, whole=False, remainder=remainder)
    assert "gather" in sparse.launching
    ends = zip(sparse.counts(), dense.counts(), strict=True)
    return Beyond(*(mine - theirs for mine, theirs in ends))


def launches_of(operator: str) -> int:
    """Say how often an operator launches a kernel at a long context; those of torch count as one."""
    ours = {"search": search_launches(), "gather": 2}
    return ours.get(operator, 1)


@functools.cache
def search_launches(planes: int = 6) -> int:
    """Count the launches of a search of 128-bit codes."""
    query, keys = (torch.zeros(1, rows, 4, dtype=torch.int32, device="cpu") for rows in (planes, 4096))
    out = torch.zeros(1, 80, dtype=torch.int32, device="cpu"), torch.zeros(1, 80, dtype=torch.int64, device="cpu")
    seen: list[object] = []
    weights = hashcore.planes(torch.zeros(1, 128, device="cpu"), planes)[1]
    bounds = operands.Bounds(4096)
    tensor_search.search(query, keys, 80, weights, bounds, *out, run=lambda found, _: seen.extend(found))
    return len(seen)
