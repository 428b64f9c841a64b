"""Checks that raise an error for unsupported configurations, before the engine starts."""

# vLLM is no dependency of this package.
# pyright: reportMissingImports=false

import warnings
from typing import Any

from sparse_serve.settings import KEY, Settings


def require_serves(vllm_config: Any) -> None:
    """Raise ValueError if the plug-in is configured and does not support this engine's configuration.

    Args: vllm_config: a `vllm.config.VllmConfig`, after the platform has completed it.
    """
    settings = Settings.of(vllm_config.additional_config)
    model = vllm_config.model_config
    if settings is None or model is None:
        return
    from vllm.platforms import current_platform

    cpu, cuda = current_platform.is_cpu(), current_platform.is_cuda()
    cache, parallel = vllm_config.cache_config, vllm_config.parallel_config
    kind = str(cache.cache_dtype)
    for wrong, text in (
        (not (cpu or cuda), f"vLLM's CPU or CUDA platform, got {current_platform.device_name}; serve without it"),
        (model.use_mla, "models with keys and values per head, got multi-head latent attention; serve without it"),
        (model.is_encoder_decoder, "decoders, got a model with an encoder; serve without it"),
        (kind not in ("auto", "bfloat16", "float16", "float32"), f"caches in the model's dtype, got {kind}; use auto"),
        (vllm_config.speculative_config is not None, "one token per step, got speculative decoding; disable it"),
        (parallel.decode_context_parallel_size > 1, "whole contexts, got decode context parallel; use a size of 1"),
        (parallel.prefill_context_parallel_size > 1, "whole prompts, got prefill context parallel; use a size of 1"),
        (parallel.pipeline_parallel_size > 1, "all layers in one process, got pipeline parallel; use a size of 1"),
        (vllm_config.kv_transfer_config is not None, "pages that stay in this process, got a KV connector; remove it"),
    ):
        if wrong:
            raise ValueError(f"{KEY} needs {text}")
    if cuda:
        from hashcore.cuda.program import require_compiler

        require_compiler()
    _require_hasher(settings, vllm_config, parallel.tensor_parallel_size)


def _require_hasher(settings: Settings, vllm_config: Any, ranks: int) -> None:
    """Raise ValueError if the hasher is not for this model or these ranks.

    Warn if requests may pass its reach, or the model may have other LoRA adapters than the hasher was made with.
    """
    from hashtrain import Hasher
    from hashtrain.adapters import NONE, mismatch
    from hashtrain.data.offsets import beyond

    hasher, model = Hasher.from_pretrained(settings.hasher), vllm_config.model_config
    hasher.require_match(model.hf_text_config)
    if hasher.reach is not None and model.max_model_len > hasher.reach:
        warnings.warn(beyond(model.max_model_len, hasher.reach), stacklevel=2)
    made, lora = hasher.config.adapter, vllm_config.lora_config is not None
    if made or (lora and made is not None):
        warnings.warn(mismatch(made, "those of its requests" if lora else NONE), stacklevel=2)
    shape = hasher.config.shape
    if uneven := [n for n in (shape.at(i).num_kv_heads for i in range(shape.num_layers)) if n % ranks]:
        raise ValueError(f"{KEY} needs a multiple of {ranks} KV heads for {ranks} ranks, got {uneven[0]}; use fewer")
    layers = shape.num_layers
    if strangers := [layer for layer in settings.dense_layers or () if layer >= layers]:
        raise ValueError(f"{KEY}.dense_layers must be below the model's {layers} layers, got {strangers}")
