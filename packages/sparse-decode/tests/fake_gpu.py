"""A CUDA device that is not there: torch's fake tensors say that they lie on it, and hold no numbers.

What would wait for the device, or mix devices, raises; what is left is counted. Nothing is launched, so results are
not seen here: the kernels have their host simulator, the arithmetic its tests on the CPU.
"""

import contextlib
from collections.abc import Iterator
from typing import NamedTuple
from unittest import mock

import sparse_decode_doubles
import torch
from hashtrain.layers import LayerHasher
from sparse_decode import attach
from sparse_decode.budget import LayerBudget
from sparse_decode.select import HashSelector
from sparse_decode.sums import Sums
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, Cache, DynamicCache, PreTrainedConfig, PreTrainedModel, StaticCache
from transformers.integrations import moe

NOTHING = {"empty", "new_empty", "empty_like", "detach", "alias", "_unsafe_view"}
NOTHING |= {"device", "promote_types", "lift_fresh"}
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
    empty = mock.patch.object(torch, "tensor", without_numbers)
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


class Operators(TorchDispatchMode):
    """Lists the operators that launch something, by name, those of host memory, and the copies between both."""

    def __init__(self) -> None:
        super().__init__()
        self.launching: list[str] = []
        self.copies: list[str] = []
        self.on_host: list[str] = []
        """A CUDA graph would do them once, while it is captured."""
        self._marks: list[tuple[int, int, int]] = []

    def _lists(self) -> tuple[list[str], list[str], list[str]]:
        return self.launching, self.copies, self.on_host

    def mark(self) -> None:
        """Remember how long the lists are."""
        self._marks.append(tuple(map(len, self._lists())))

    def between_marks(self) -> "Operators":
        """Return what was listed between the first two marks."""
        found = Operators()
        for mine, theirs, first, last in zip(self._lists(), found._lists(), *self._marks[:2], strict=True):
            theirs += mine[first:last]
        return found

    def counts(self) -> tuple[int, int, int]:
        """Return how many operators, launches and copies there were; call it outside of the mode."""
        launches = sum({"search": 2, "gather": 2}.get(name, 1) for name in self.launching)  # as test_paged.py has it
        return len(self.launching), launches, len(self.copies)

    def __torch_dispatch__(self, func: OpOverload, types: object, args=(), kwargs=None) -> object:
        out = func(*args, **(kwargs or {}))
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


def config_of(family: str) -> PreTrainedConfig:
    """Return a small model whose layers all see the whole context."""
    full = {"num_hidden_layers": 2, "layer_types": ["full_attention"] * 2}
    return sparse_decode_doubles.config_of(family, **full, hidden_size=128, intermediate_size=128, head_dim=64)


FAMILIES = "llama", "qwen3", "qwen3_moe", "gemma2", "gpt_oss"
KINDS = "plain", "padded", "static", "host", "beam"
"""Steps: of a dynamic cache, of a batch with padding, of a static cache and padding, of keys and values in host memory,
of rows that beam search puts in another order before each of them."""


class Tried:
    """A model on the device, a cache, and calls of it."""

    def __init__(self, config: PreTrainedConfig, kind: str) -> None:
        with torch.device("cuda"):
            self.model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
        static, self.kind = kind == "static", kind
        self.cache: Cache = StaticCache(config=config, max_cache_len=ROOM) if static else DynamicCache(config=config)

    def operands(self, tokens: int, end: int) -> dict[str, object]:
        """Make the arguments of a call; the mask is what a tokeniser returns for a batch with padding."""
        ids = torch.zeros(ROWS, tokens, dtype=torch.long, device="cuda")
        mask = torch.ones(ROWS, end, dtype=torch.long, device="cuda") if self.kind in ("padded", "static") else None
        return {"input_ids": ids, "attention_mask": mask, "past_key_values": self.cache}

    def call(self, tokens: int, end: int) -> None:
        self.model(**self.operands(tokens, end))


def steps(
    config: PreTrainedConfig, selector: HashSelector | None, budget: LayerBudget, kind: str, **how: object
) -> tuple[Operators, Operators]:
    """Decode after a dense prompt; return the operators of the last of three steps, and those of its last layer.

    Dense without a selector. Eager attention has a mask, whose form a prefill looks at; the first step sums what the
    remainder needs.
    """
    tried = Tried(config, kind)
    if kind == "host":
        how["kv"] = "host"
    beams = torch.zeros(ROWS, dtype=torch.long, device="cuda")
    with torch.inference_mode():
        tried.call(PROMPT, PROMPT)
        with contextlib.nullcontext() if selector is None else attach(tried.model, selector, budget, **how):
            with told(PROMPT + 1):
                tried.call(1, PROMPT + 1)
            last = tried.model.model.layers[-1]
            for end in (PROMPT + 2, PROMPT + 3):
                if kind == "beam":
                    tried.cache.reorder_cache(beams)
                with Operators() as whole:
                    handles = [
                        last.register_forward_pre_hook(lambda *_, whole=whole: whole.mark()),
                        last.register_forward_hook(lambda *_, whole=whole: whole.mark()),
                    ]
                    tried.call(1, end)
                for handle in handles:
                    handle.remove()
    return whole, whole.between_marks()


class Beyond(NamedTuple):
    """What a sparse layer does in a step beyond what a dense one does."""

    operators: int
    launches: int
    copies: int
    """Between host and device; the host waits for none."""


def beyond_dense(
    config: PreTrainedConfig, selector: HashSelector, budget: LayerBudget, kind: str, **how: object
) -> Beyond:
    """Decode a token, and count in the last layer; raises where something waits for the device.

    What a mask says is found once for all layers, by the first one. The step does nothing in host memory that a dense
    one does not: a CUDA graph would do it once, while it is captured. (Keys and values that are there apart.)
    """
    with fake_gpu():
        whole_dense, dense = steps(config, None, budget, kind)
        whole, sparse = steps(config, selector, budget, kind, **how)
    assert "gather" in sparse.launching
    assert kind == "host" or (whole.on_host, whole.copies) == (whole_dense.on_host, whole_dense.copies)
    return Beyond(*(mine - theirs for mine, theirs in zip(sparse.counts(), dense.counts(), strict=True)))
