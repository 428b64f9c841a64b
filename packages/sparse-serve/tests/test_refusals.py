"""Configurations and settings that are rejected, on stand-ins for vLLM's config and platform."""

import contextlib
import sys
from types import ModuleType, SimpleNamespace

import pytest
from hashtrain import Hasher, HasherConfig, ModelShape
from sparse_decode.budget import LayerBudget
from sparse_serve import Settings, plugin
from sparse_serve.refusals import require_serves
from transformers import LlamaConfig

MODEL = LlamaConfig(hidden_size=64, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2)


@pytest.fixture
def platform(monkeypatch):
    """vLLM's modules, as far as the plug-in looks at them."""
    found = SimpleNamespace(is_cpu=lambda: True, is_cuda=lambda: False, device_name="cpu")
    found.check_and_update_config = lambda config: None
    names = ["vllm", "vllm.platforms", "vllm.v1", "vllm.v1.attention", "vllm.v1.attention.backends"]
    for name in [*names, "vllm.v1.attention.backends.registry"]:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["vllm.platforms"].current_platform = found
    registry, found.registered = sys.modules["vllm.v1.attention.backends.registry"], []
    custom = SimpleNamespace(name="CUSTOM", is_overridden=lambda: bool(found.registered))
    custom.get_path = lambda: found.registered[0][1]
    registry.AttentionBackendEnum = SimpleNamespace(CPU_ATTN="CPU_ATTN", CUSTOM=custom)
    registry.register_backend = lambda *given: found.registered.append(given)
    found.custom = custom
    return found


@pytest.fixture
def gpu(platform, monkeypatch):
    """A CUDA platform where kernels can be compiled."""
    platform.is_cpu, platform.is_cuda, platform.device_name = lambda: False, lambda: True, "cuda"
    monkeypatch.setattr("hashcore.cuda.program.require_compiler", lambda: None)
    return platform


@pytest.fixture
def hasher(tmp_path):
    Hasher(HasherConfig("lsh", ModelShape.of(MODEL), bits=64), 0).save_pretrained(tmp_path)
    return str(tmp_path)


def config(asked):
    ranks = [f"{kind}_parallel_size" for kind in ("tensor", "pipeline", "decode_context", "prefill_context")]
    return SimpleNamespace(
        additional_config=asked,
        model_config=SimpleNamespace(use_mla=False, is_encoder_decoder=False, hf_text_config=MODEL, max_model_len=4096),
        cache_config=SimpleNamespace(cache_dtype="auto"),
        parallel_config=SimpleNamespace(**dict.fromkeys(ranks, 1)),
        attention_config=SimpleNamespace(backend=None, backend_per_kind={}),
        speculative_config=None,
        kv_transfer_config=None,
        lora_config=None,
    )


NAMED = {"backend": SimpleNamespace(name="FLASHINFER"), "backend_per_kind": {}}
OF_A_KIND = {"backend": None, "backend_per_kind": {"x": SimpleNamespace(name="TRITON_ATTN")}}
REFUSED = {  # the platform, a place in the engine's config, what is there, words
    "latent attention": ("cpu", "model_config.use_mla", True, "got multi-head latent attention; serve without it"),
    "an encoder": ("cpu", "model_config.is_encoder_decoder", True, "decoders, got a model with an encoder"),
    "fp8": ("cpu", "cache_config.cache_dtype", "fp8", "caches in the model's dtype, got fp8; use auto"),
    "drafts": ("cpu", "speculative_config", object(), "one token per step, got speculative decoding; disable it"),
    "three ranks": ("cpu", "parallel_config.tensor_parallel_size", 3, "a multiple of 3 KV heads for 3 ranks, got 2;"),
    "stages": ("cpu", "parallel_config.pipeline_parallel_size", 2, "got pipeline parallel"),
    "contexts": ("cpu", "parallel_config.decode_context_parallel_size", 2, "got decode context parallel"),
    "prompts": ("cpu", "parallel_config.prefill_context_parallel_size", 2, "whole prompts, got prefill context"),
    "a connector": ("cpu", "kv_transfer_config", object(), "pages that stay in this process, got a KV connector"),
    "another model": ("cpu", "model_config.hf_text_config", LlamaConfig(num_hidden_layers=2), "belongs to another"),
    "a platform": ("tpu", "model_config.use_mla", False, "vLLM's CPU or CUDA platform, got tpu; serve without it"),
    "no compiler": ("broken", "model_config.use_mla", False, "needs cuda-core"),
    "a backend": ("cuda", "attention_config", SimpleNamespace(**NAMED), "got FLASHINFER; leave"),
    "a backend of a kind": ("cuda", "attention_config", SimpleNamespace(**OF_A_KIND), "got TRITON_ATTN"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_served_is_refused_only_if_asked_for(name, platform, hasher, monkeypatch):
    kind, place, value, words = REFUSED[name]
    platform.is_cpu, platform.is_cuda, platform.device_name = lambda: kind == "cpu", lambda: kind != "tpu", kind

    def compiler():
        if kind == "broken":
            raise ValueError("hashcore needs cuda-core")

    monkeypatch.setattr("hashcore.cuda.program.require_compiler", compiler)
    plugin.register()
    check = platform.check_and_update_config if kind == "cuda" else require_serves
    for asked in ({"spotlight": {"hasher": hasher}}, {}):
        given = config(asked)
        *parents, last = place.split(".")
        setattr(getattr(given, parents[0]) if parents else given, last, value)
        if asked:
            with pytest.raises(ValueError, match=words):
                check(given)
        else:
            check(given)


def test_what_can_be_served_passes(platform, hasher):
    given = config({"spotlight": {"hasher": hasher, "fraction": 0.1}})
    require_serves(given)
    given.parallel_config.tensor_parallel_size = 2  # KV heads divide among these
    require_serves(given)
    with pytest.raises(ValueError, match=r"below the model's 3 layers, got \[3\]"):
        require_serves(config({"spotlight": {"hasher": hasher, "dense_layers": [0, 3]}}))


def test_on_a_gpu_our_backend_is_registered_once_and_chosen_if_asked_for(gpu, hasher):
    plugin.register()
    plugin.register()
    assert gpu.registered == [(gpu.custom, plugin.GPU_BACKEND)]
    asked, other = config({"spotlight": {"hasher": hasher}}), config({})
    for given in (asked, other, asked):
        gpu.check_and_update_config(given)
    assert (asked.attention_config.backend, other.attention_config.backend) == (gpu.custom, None)


def test_another_plug_ins_backend_is_left_alone(gpu, hasher):
    gpu.registered.append((gpu.custom, "their.Backend"))
    plugin.register()
    assert len(gpu.registered) == 1
    gpu.check_and_update_config(config({}))
    with pytest.raises(ValueError, match=r"another plug-in has: their.Backend; remove one"):
        gpu.check_and_update_config(config({"spotlight": {"hasher": hasher}}))


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


def test_on_other_platforms_nothing_is_replaced(platform):
    platform.is_cpu = lambda: False
    plugin.register()
    assert platform.registered == []
    assert platform.check_and_update_config.checks_spotlight


def test_requests_beyond_the_reach_are_told(platform, tmp_path):
    """The hasher reaches 4,096 tokens, as long as requests may be."""
    Hasher(HasherConfig("lsh", ModelShape.of(MODEL), bits=64, reach=4096), 0).save_pretrained(tmp_path)
    given = config({"spotlight": {"hasher": str(tmp_path)}})
    require_serves(given)
    given.model_config.max_model_len = 4097
    with pytest.warns(UserWarning, match="a context of 4,097 tokens is longer than the 4,096"):
        require_serves(given)


def test_other_adapters_are_told(platform, tmp_path):
    """That of the hasher, if the model has none; those of requests; and not where a hasher depends on no model."""
    told = {("0" * 12, None): "adapter 0+, this one has none, unless", ("", 1): "no adapter, this one has those of its"}
    for made, lora in [*told, ("", None), (None, 1)]:
        Hasher(HasherConfig("lsh", ModelShape.of(MODEL), bits=64, adapter=made), 0).save_pretrained(tmp_path)
        given = config({"spotlight": {"hasher": str(tmp_path)}})
        given.lora_config = lora
        words = told.get((made, lora))
        with pytest.warns(UserWarning, match=words) if words else contextlib.nullcontext():
            require_serves(given)


# ---- Settings ------------------------------------------------------------------------------------------------------


def test_what_is_no_setting_is_refused():
    for given, words in (
        ("yes", "must be a mapping with a hasher, got str"),
        ({"fraction": 0.1}, "needs a hasher, the folder of a stored hasher, got none"),
        ({"hasher": ""}, "hasher must be the folder of a stored hasher, got ''"),
        ({"hasher": "x", "topk": 3}, "takes hasher, fraction, .*, got topk; remove"),
        ({"hasher": "x", "fraction": 2}, "fraction must be above 0 and at most 1, got 2"),
        ({"hasher": "x", "dense_below": 9}, "got dense_below; remove these"),
        ({"hasher": "x", "dense_layers": 2}, "must be a list of indices of layers, got 2"),
        ({"hasher": "x", "dense_layers": [-1]}, "must be a list of indices of layers, got"),
    ):
        with pytest.raises(ValueError, match=words):
            Settings.of({"spotlight": given})


def test_every_setting_arrives_and_defaults_are_those_of_the_budget():
    assert [Settings.of(none) for none in (None, {}, {"other": 1}, {"spotlight": None})] == [None] * 4
    assert Settings("x").budget == LayerBudget()
    with pytest.raises(ValueError, match=r"must be a LayerBudget, got 0\.02"):
        Settings("x", 0.02)
    given = dict(fraction=0.1, min_tokens=3, max_tokens=50, sink=2, recent=5)
    settings = Settings.of({"spotlight": {"hasher": "x", "dense_layers": [0, 2], **given}})
    assert settings == Settings("x", LayerBudget(**given), (0, 2))
