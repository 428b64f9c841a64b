"""Fixtures: our backends on stand-ins for vLLM, and their settings."""

import importlib
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

sys.path.insert(0, str(Path(__file__).parent))  # for the helper module, which importing tests by file does not find
sys.path += [str(Path(__file__).parents[2] / name / "tests") for name in ("hashcore", "sparse-decode")]  # their doubles

import pytest
import serve_doubles
from hashtrain import Hasher, HasherConfig, ModelShape
from serve_doubles import FLASH
from sparse_serve.served import Served


@pytest.fixture
def vllm(monkeypatch):
    """Stand-ins for vLLM's modules, by name."""
    for name in serve_doubles.MODULES:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    of = sys.modules
    of["vllm.config"].get_current_vllm_config = lambda: of["vllm.config"].current
    of["vllm.model_executor.models.utils"].extract_layer_index = int
    stock = of["vllm.v1.attention.backends.cpu_attn"]
    stock.CPUAttentionBackend = of[FLASH].FlashAttentionBackend = object
    stock.CPUAttentionBackendImpl, of[FLASH].FlashAttentionImpl = serve_doubles.Impl, serve_doubles.FlashImpl
    stock.CPUAttentionMetadataBuilder = serve_doubles.Builder
    of[FLASH].FlashAttentionMetadataBuilder = serve_doubles.FlashBuilder
    of["vllm.v1.attention.backend"].AttentionCGSupport = SimpleNamespace(UNIFORM_SINGLE_TOKEN_DECODE="uniform")
    of["vllm.v1.attention.backends.utils"].split_decodes_and_prefills = serve_doubles.split
    of["vllm.v1.kv_cache_interface"].FullAttentionSpec = serve_doubles.FullAttentionSpec
    for name in ("_shared", "_backend", "_gpu_backend"):
        monkeypatch.delitem(sys.modules, f"sparse_serve.{name}", raising=False)
    monkeypatch.setattr(Served, "latest", None)
    yield of
    for name in ("_shared", "_backend", "_gpu_backend"):
        sys.modules.pop(f"sparse_serve.{name}", None)


@pytest.fixture
def backend(vllm):
    return importlib.import_module("sparse_serve._backend")


@pytest.fixture
def gpu_backend(vllm):
    return importlib.import_module("sparse_serve._gpu_backend")


@pytest.fixture
def asked(tmp_path):
    shape = ModelShape(4, serve_doubles.QUERIES, serve_doubles.HEADS, serve_doubles.DIM)
    Hasher(HasherConfig("transform", shape, bits=32 * serve_doubles.WORDS), 0).save_pretrained(tmp_path)
    return {"spotlight": {"hasher": str(tmp_path), "dense_layers": [3]}}
