"""Fixtures: our backend on stand-ins for vLLM, and its settings."""

import importlib
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

sys.path.insert(0, str(Path(__file__).parent))  # for the helper module, which importing tests by file does not find
sys.path.append(str(Path(__file__).parents[2] / "hashcore" / "tests"))  # for hostsim

import pytest
import serve_engine
from hashtrain import Hasher, HasherConfig, ModelShape
from sparse_serve.served import Served


@pytest.fixture
def backend(monkeypatch):
    """Our backend, on stand-ins for vLLM's modules."""
    for name in serve_engine.MODULES:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    ops = sys.modules["vllm"]._custom_ops = sys.modules["vllm._custom_ops"]
    ops.cpu_attn_reshape_and_cache = serve_engine.reshape_and_cache
    ops.cpu_attention_with_kv_cache = serve_engine.attention_with_kv_cache
    ops.cpu_attn_get_scheduler_metadata = lambda **given: None
    sys.modules["vllm"].envs = SimpleNamespace(VLLM_CPU_ATTN_SPLIT_KV=True)
    sys.modules["vllm.config"].get_current_vllm_config = lambda: sys.modules["vllm.config"].current
    sys.modules["vllm.model_executor.models.utils"].extract_layer_index = int
    stock = sys.modules["vllm.v1.attention.backends.cpu_attn"]
    stock.CPUAttentionBackend = object
    stock.CPUAttentionBackendImpl, stock.CPUAttentionMetadataBuilder = serve_engine.Impl, serve_engine.Builder
    sys.modules["vllm.v1.kv_cache_interface"].FullAttentionSpec = serve_engine.FullAttentionSpec
    monkeypatch.delitem(sys.modules, "sparse_serve._backend", raising=False)
    monkeypatch.setattr(Served, "latest", None)
    yield importlib.import_module("sparse_serve._backend")
    sys.modules.pop("sparse_serve._backend")


@pytest.fixture
def asked(tmp_path):
    Hasher(
        HasherConfig("lsh", ModelShape(4, 2 * serve_engine.HEADS, serve_engine.HEADS, serve_engine.DIM), bits=64), 0
    ).save_pretrained(tmp_path)
    return {"spotlight": {"hasher": str(tmp_path), "dense_layers": [3]}}
