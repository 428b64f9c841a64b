"""What is refused when an engine is configured, on stand-ins for its configuration and its platform."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
from hashtrain import Hasher, HasherConfig, ModelShape
from sparse_serve import plugin
from sparse_serve.refusals import require_serves
from transformers import LlamaConfig

MODEL = LlamaConfig(hidden_size=64, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2)


@pytest.fixture
def platform(monkeypatch):
    """vLLM's modules, as far as the plug-in looks at them."""
    found = SimpleNamespace(is_cpu=lambda: True, device_name="cpu", check_and_update_config=lambda config: None)
    names = ["vllm", "vllm.platforms", "vllm.v1", "vllm.v1.attention", "vllm.v1.attention.backends"]
    for name in [*names, "vllm.v1.attention.backends.registry"]:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["vllm.platforms"].current_platform = found
    registry, found.registered = sys.modules["vllm.v1.attention.backends.registry"], []
    registry.AttentionBackendEnum = SimpleNamespace(CPU_ATTN="CPU_ATTN")
    registry.register_backend = lambda *given: found.registered.append(given)
    return found


@pytest.fixture
def hasher(tmp_path):
    Hasher(HasherConfig("lsh", ModelShape.of(MODEL), bits=64), 0).save_pretrained(tmp_path)
    return str(tmp_path)


def config(asked):
    return SimpleNamespace(
        additional_config=asked,
        model_config=SimpleNamespace(use_mla=False, is_encoder_decoder=False, hf_text_config=MODEL),
        cache_config=SimpleNamespace(cache_dtype="auto"),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=1, pipeline_parallel_size=1, decode_context_parallel_size=1
        ),
        speculative_config=None,
        kv_transfer_config=None,
    )


REFUSED = {
    "latent attention": ("model_config.use_mla", True, "got multi-head latent attention; serve without it"),
    "an encoder": ("model_config.is_encoder_decoder", True, "decoders, got a model with an encoder"),
    "fp8": ("cache_config.cache_dtype", "fp8", "caches in the model's dtype, got fp8; use auto"),
    "drafts": ("speculative_config", object(), "one token per step, got speculative decoding; disable it"),
    "three ranks": ("parallel_config.tensor_parallel_size", 3, "a multiple of 3 KV heads for 3 ranks, got 2; use"),
    "stages": ("parallel_config.pipeline_parallel_size", 2, "got pipeline parallel"),
    "contexts": ("parallel_config.decode_context_parallel_size", 2, "got decode context parallel"),
    "a connector": ("kv_transfer_config", object(), "pages that stay in this process, got a KV connector"),
    "another model": ("model_config.hf_text_config", LlamaConfig(num_hidden_layers=2), "belongs to another model"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_served_is_refused_only_if_asked_for(name, platform, hasher):
    place, value, words = REFUSED[name]
    for asked in ({"spotlight": {"hasher": hasher}}, {}):
        given = config(asked)
        *parents, last = place.split(".")
        setattr(getattr(given, parents[0]) if parents else given, last, value)
        if asked:
            with pytest.raises(ValueError, match=words):
                require_serves(given)
        else:
            require_serves(given)


def test_a_gpu_is_refused(platform, hasher):
    platform.is_cpu, platform.device_name = lambda: False, "cuda"
    with pytest.raises(ValueError, match="needs vLLM's CPU platform, got cuda; serve without it"):
        require_serves(config({"spotlight": {"hasher": hasher}}))


def test_ranks_among_which_kv_heads_divide_pass(platform, hasher):
    given = config({"spotlight": {"hasher": hasher}})
    given.parallel_config.tensor_parallel_size = 2
    require_serves(given)


def test_a_layer_that_there_is_not_is_refused(platform, hasher):
    with pytest.raises(ValueError, match=r"below the model's 3 layers, got \[3\]"):
        require_serves(config({"spotlight": {"hasher": hasher, "dense_layers": [0, 3]}}))


def test_what_can_be_served_passes(platform, hasher):
    require_serves(config({"spotlight": {"hasher": hasher, "fraction": 0.1}}))


def test_registering_checks_every_configuration_once(platform, hasher):
    seen = []
    platform.check_and_update_config = seen.append
    plugin.register()
    plugin.register()
    assert platform.registered == [("CPU_ATTN", plugin.BACKEND)] * 2
    fine, wrong = config({}), config({"spotlight": {"hasher": hasher, "topk": 1}})
    platform.check_and_update_config(fine)
    assert seen == [fine]
    with pytest.raises(ValueError, match="got topk"):
        platform.check_and_update_config(wrong)


def test_elsewhere_than_on_the_cpu_nothing_is_replaced(platform):
    platform.is_cpu = lambda: False
    plugin.register()
    assert platform.registered == []
    assert platform.check_and_update_config.checks_spotlight
