"""State shared by the sparse layers of an engine: hasher, budget, and the room for codes in pages."""

# vLLM is no dependency of this package.
# pyright: reportMissingImports=false

import weakref
from dataclasses import replace
from typing import Any, ClassVar

from hashtrain import Hasher
from sparse_decode.budget import LayerBudget

from sparse_serve.settings import Settings


def shard_hasher(hasher: Hasher, rank: int, size: int) -> Hasher:
    """Slice a hasher by KV head, for one of `size` tensor-parallel ranks.

    Heads are the first dimension of each of its tensors, in the model's order. `refusals` has checked that they divide
    evenly; vLLM would give some to several ranks.
    """
    shares = tuple(own[len(own) // size * rank :][: len(own) // size] for own in hasher.config.head_shares)
    whole = hasher.config.shape
    shape = replace(
        whole,
        num_query_heads=whole.num_query_heads // size,
        num_kv_heads=whole.num_kv_heads // size,
        per_layer=tuple((hq // size, hkv // size, d) for hq, hkv, d in whole.per_layer),
    )
    part = Hasher(replace(hasher.config, shape=shape, head_shares=shares), seed=None)
    tensors = hasher.state_dict()
    part.load_state_dict({name: x.tensor_split(size)[rank].clone() for name, x in tensors.items()})
    return part.eval().requires_grad_(False)


def supports(spec: Any) -> bool:
    """Whether the layers of a cache spec attend causally to the whole context, from pages of keys and values.

    Subclasses are something else: sinks in pages of their own, latent attention, windows that keep a prefix.
    """
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    return (
        type(spec) is FullAttentionSpec
        and spec.sliding_window is None
        and spec.attention_chunk_size is None
        and spec.head_size == spec.head_size_v
        and not spec.non_causal
    )


class Served:
    """The sparse attention of one engine, for the heads of tensor-parallel rank `rank` of `size`.

    Attributes:
        latest: the instance of the engine whose layers were created last, for vLLM's question how large a page is,
            which it asks next and without an engine. `require_room` checks the answer.
    """

    latest: ClassVar["Served | None"] = None
    _known: ClassVar[dict[int, "Served"]] = {}

    def __init__(self, settings: Settings, rank: int = 0, size: int = 1) -> None:
        from sparse_decode.select import HashSelector  # imports numba, after vLLM has detected its compilers

        self.hasher: Hasher = Hasher.from_pretrained(settings.hasher)
        self.selector: HashSelector = HashSelector(self.hasher if size == 1 else shard_hasher(self.hasher, rank, size))
        self.budget: LayerBudget = settings.budget
        given = settings.dense_layers
        self.dense_layers: tuple[int, ...] = self.hasher.config.dense_layers if given is None else given
        self.words: int = self.hasher.config.bits // 32
        self._layers: list[Any] = []

    @classmethod
    def with_room(cls, spec: Any) -> Any:
        """Return a cache spec whose pages have room for codes in their tail, if the layers of `spec` can be sparse."""
        served = cls.latest
        if served is None or not supports(spec) or spec.page_size_padded is not None:
            return spec
        from sparse_decode.pages import tail_bytes

        others = spec.unpadded_page_size_bytes
        tail = tail_bytes(spec.block_size, spec.num_kv_heads, served.words, others)
        return replace(spec, page_size_padded=others + tail)

    @classmethod
    def of(cls, vllm_config: Any) -> "Served | None":
        """Return the instance of an engine; None if it is not configured.

        An engine is known by its compilation config, which holds its layers, and which copies of its config share.
        """
        settings = Settings.of(vllm_config.additional_config)
        if settings is None:
            return None
        engine = vllm_config.compilation_config
        if id(engine) not in cls._known:
            rank, size = 0, vllm_config.parallel_config.tensor_parallel_size
            if size > 1:
                from vllm.distributed import get_tensor_model_parallel_rank

                rank = get_tensor_model_parallel_rank()
            cls._known[id(engine)] = cls(settings, rank, size)
            weakref.finalize(engine, cls._known.pop, id(engine))
        return cls._known[id(engine)]

    def layer(self, index: int, impl: Any) -> Any:
        """Create the `sparse_decode.pages.PagedLayer` of one of vLLM's attention layers.

        Raises: ValueError if the layer does what sparse layers do not support.
        """
        from sparse_decode.pages import PagedLayer

        if impl.alibi_slopes is not None:
            raise ValueError("spotlight does not support attention biases, got a model with ALiBi; serve without it")
        if impl.kv_sharing_target_layer_name is not None:
            raise ValueError("spotlight does not support layers that share keys; serve without it")
        sinks = None if impl.sinks is None else impl.sinks.float()
        made = PagedLayer(index, self.selector, impl.scale, float(impl.logits_soft_cap) or None, sinks)
        self._layers.append(made)
        return made

    def counts(self) -> tuple[int, int]:
        """Return the numbers of selected and visible tokens so far, over layers, decode rows and query heads."""
        return sum(layer.selected for layer in self._layers), sum(layer.visible for layer in self._layers)

    def require_room(self, spec: Any) -> None:
        """Raise ValueError if pages of a cache spec have no room for codes after keys and values."""
        others = spec.unpadded_page_size_bytes
        needed = others + 4 * spec.block_size * spec.num_kv_heads * self.words
        if spec.page_size_bytes < needed:
            raise ValueError(
                f"spotlight needs pages of at least {needed} bytes, {others} of them for keys and values, got "
                f"{spec.page_size_bytes}, because vLLM resized them for other layers; serve without it"
            )
