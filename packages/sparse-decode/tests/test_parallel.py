"""Models spread over ranks and devices: the tokens of one process."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import tensor_parallel
import torch
from hashtrain import Hasher, HasherConfig, ModelShape
from sparse_decode import Budget, HashSelector, QueryHeadHasher, RecentSelector, attach
from sparse_decode.hashing.encode_cuda import PlacedHasher
from sparse_decode.parallel import head_shard, shard, shard_hasher
from sparse_decode_doubles import Auditor, SignHasher, generate, prompts, tiny_model
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM
from transformers.utils import logging

PLACED = pytest.mark.skipif(find_spec("accelerate") is None, reason="transformers places models with accelerate")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Stored models and hashers."""
    logging.disable_progress_bar()
    folder = tmp_path_factory.mktemp("parallel")
    for family in tensor_parallel.FAMILIES:
        model = tiny_model(family)
        model.save_pretrained(folder / family)
        shares = ((0.5, 1.5), (1.5, 0.5), (0.8, 1.2), (1.0, 1.0))
        hasher = Hasher(HasherConfig("planes", ModelShape.of(model.config), hidden=16, head_shares=shares))
        for layer in range(4):  # some remainder, another one in each head: a rank must take its own
            shares = torch.linspace(0.3, 1.4, 4)[:, None]
            hasher.layer(layer).remainder.copy_(shares * torch.tensor([-1.0, 0.4, 0.5, 0.05, 0.1, 0.6]))
        hasher.save_pretrained(folder / f"{model.config.model_type}-hasher")
    yield folder
    logging.enable_progress_bar()


@PLACED
@pytest.mark.slow
def test_two_ranks_give_the_tokens_of_one_process(folder):
    expected = tensor_parallel.results(folder)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent), "OMP_NUM_THREADS": "1"}
    script = [str(Path(__file__).with_name("tensor_parallel.py")), str(folder)]
    done = subprocess.run([*torchrun, *script], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    for rank in (0, 1):
        found = json.loads((folder / f"rank{rank}.json").read_text())
        assert found.keys() == expected.keys()
        for case, value in expected.items():
            assert found[case] == value or case.endswith("density"), f"rank {rank}, {case}"
            if case.endswith("density"):  # of the heads of this rank
                assert found[case] == pytest.approx(value, abs=0.01)


@pytest.mark.parametrize("per_query_head", [False, True])
@pytest.mark.parametrize("variant", ["lsh", "paper", "planes", "transform"])
def test_a_slice_of_a_hasher_hashes_its_heads(variant, per_query_head):
    shape = ModelShape(2, 8, 4, 16)
    whole = Hasher(HasherConfig(variant, shape, bits=64, hidden=32))
    if variant == "transform":  # heads that differ
        digits = torch.tensor([[4.0 + head] * 8 + [4.0 - head] * 8 for head in range(4)])
        for layer in (0, 1):
            whole.layer(layer).load_state_dict({**whole.layer(layer).state_dict(), "digits": digits})
    q, k = torch.randn(1, 8, 3, 16), torch.randn(1, 4, 3, 16)
    wrap = QueryHeadHasher if per_query_head else lambda hasher: hasher
    for layer in (0, 1):
        codes = wrap(whole).encode_keys(layer, k).tensor_split(2, dim=1)
        planes = wrap(whole).encode_queries(layer, q)[0].tensor_split(2, dim=1)
        for rank in (0, 1):
            part = shard(wrap(whole), rank, 2)
            assert torch.equal(part.encode_keys(layer, k.tensor_split(2, dim=1)[rank]), codes[rank])
            assert torch.equal(part.encode_queries(layer, q.tensor_split(2, dim=1)[rank])[0], planes[rank])


def test_a_slice_of_a_hasher_has_the_remainder_of_its_query_heads():
    whole = Hasher(HasherConfig("planes", ModelShape(1, 8, 4, 16)))
    assert shard(HashSelector(whole), 1, 2).remainder(0) is None
    whole.layer(0).remainder.copy_(torch.arange(48.0).view(8, 6))
    for rank, heads in ((0, slice(4)), (1, slice(4, 8))):
        assert torch.equal(shard(HashSelector(whole), rank, 2).remainder(0), whole.remainder(0)[heads])


def test_a_slice_of_a_hasher_whose_layers_differ():
    shape = ModelShape(2, 8, 4, 16, {}, ((8, 4, 16), (8, 2, 32)))
    part = shard_hasher(Hasher(HasherConfig("planes", shape)), 1, 2)
    assert part.config.shape.per_layer == ((4, 2, 16), (4, 1, 32))
    assert part.encode_keys(1, torch.randn(1, 1, 3, 32)).shape[:3] == (1, 1, 3)


def test_what_cannot_be_sliced_is_refused():
    with pytest.raises(ValueError, match="KV heads must be a multiple of the ranks, got 4 for 3 ranks"):
        shard(Hasher(HasherConfig("lsh", ModelShape(1, 8, 4, 16))), 0, 3)
    with pytest.raises(ValueError, match="sliced by KV head, got SignHasher"):
        shard(HashSelector(SignHasher()), 0, 2)
    recent = RecentSelector()
    assert shard(recent, 0, 2) is recent


def test_ranks_without_a_whole_head_are_refused(monkeypatch):
    class Part(torch.nn.Parameter):
        def to_local(self):
            return self

    monkeypatch.setattr("sparse_decode.parallel.DTensor", Part)
    module = torch.nn.Module()
    module.k_proj = torch.nn.Linear(8, 8)
    module.k_proj.weight = Part(torch.zeros(8, 8))
    assert DTensor is not Part
    with pytest.raises(ValueError, match="the same number of whole KV heads, got 2 KV heads of 16 and 8 rows"):
        head_shard(module, ModelShape(1, 2, 2, 16))


def test_layers_of_a_hasher_follow_the_keys_to_their_device():
    placed = PlacedHasher(Hasher(HasherConfig("planes", ModelShape(2, 4, 2, 16))))
    assert placed.layer(0, torch.device("cpu")) is placed.hasher.layer(0)
    there = placed.layer(1, torch.device("meta"))
    assert {x.device.type for x in there.state_dict().values()} == {"meta"}
    assert placed.layer(1, torch.device("meta")) is there
    assert {x.device.type for x in placed.hasher.state_dict().values()} == {"cpu"}


@PLACED
def test_layers_placed_by_a_device_map_and_read_from_disk(folder, tmp_path, monkeypatch):
    places = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    places |= {f"model.layers.{layer}": "disk" if layer == 3 else "cpu" for layer in range(4)}
    placed = AutoModelForCausalLM.from_pretrained(folder / "qwen3", device_map=places, offload_folder=tmp_path).eval()
    assert placed.model.layers[3].self_attn.k_proj.weight.device.type == "meta"
    whole, (ids, mask) = AutoModelForCausalLM.from_pretrained(folder / "qwen3").eval(), prompts()
    hasher = Hasher.from_pretrained(folder / "qwen3-hasher")
    budget = Budget(0.1, min_tokens=2)
    with attach(whole, hasher, budget):
        expected = generate(whole, ids, mask, new_tokens=8)
    auditor = Auditor(monkeypatch)
    with attach(placed, hasher, budget) as attachment:
        assert torch.equal(generate(placed, ids, mask, new_tokens=8), expected)
        assert auditor.steps == 4 * 7
        assert attachment.layers == (0, 1, 2, 3)
        assert attachment.remainder
    assert torch.equal(generate(placed, ids, mask, new_tokens=8), generate(whole, ids, mask, new_tokens=8))


def replaced(x):
    x.data = x.data.clone()


@pytest.mark.parametrize("change", [lambda x: x.add_(1), lambda x: x.copy_(-x), replaced])
def test_a_copy_on_another_device_follows_the_weights(change):
    hasher = Hasher(HasherConfig("lsh", ModelShape(1, 2, 1, 16)))
    placed, other = PlacedHasher(hasher), torch.device("meta")
    first = placed.layer(0, other)
    assert placed.layer(0, other) is first
    weights = next(x for x in (*hasher.layer(0).parameters(), *hasher.layer(0).buffers()) if x.is_floating_point())
    change(weights)
    assert placed.layer(0, other) is not first
    second = placed.layer(0, other)
    hasher.load_state_dict(hasher.state_dict())
    assert placed.layer(0, other) is not second
    assert placed.layer(0, torch.device("cpu")) is hasher.layer(0)
