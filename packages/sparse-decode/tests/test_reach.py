"""A context beyond the reach of its hasher is told, once."""

import warnings

import pytest
import torch
from sparse_decode import Budget, HashSelector, attach
from sparse_decode.attach import attach_rows
from sparse_decode.budget import LayerBudget
from sparse_decode_doubles import SignHasher, generate, prompts, tiny_model
from transformers import CompileConfig, DynamicCache, StaticCache

REACH, TOLD = 43, "longer than the 43 that its hasher was made for"


class Reaching(SignHasher):
    reach = REACH


@pytest.fixture
def model():
    return tiny_model()


def test_a_step_beyond_the_reach_warns_once(model):
    """The prompt has 40 tokens: the fourth generated one is the first beyond."""
    ids, mask = prompts((40,))
    with attach(model, Reaching(), Budget(0.1)):
        with warnings.catch_warnings(action="error"):
            generate(model, ids, mask, new_tokens=4)  # the last one is never put in
        with pytest.warns(UserWarning, match=f"a context of 44 tokens is {TOLD}") as found:
            generate(model, ids, mask, new_tokens=9)
    assert len(found) == 1
    assert "`hashtrain --reach 44`" in str(found[0].message)
    assert not any(module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_prompt_without_a_cache_warns_too(model, wrapped):
    hasher = HashSelector(Reaching()) if wrapped else Reaching()
    with attach_rows(model, hasher, LayerBudget(0.1), sparse_rows=0, dense_layers=1):
        with pytest.warns(UserWarning, match=TOLD):
            model(torch.arange(1, 51)[None])
        with warnings.catch_warnings(action="error"):
            model(torch.arange(1, 51)[None])


def test_a_static_cache_counts_as_long_as_it_has_room(model):
    for room, told in ((REACH, 0), (64, 1)):
        cache = StaticCache(config=model.config, max_cache_len=room)
        with warnings.catch_warnings(record=True) as found, attach(model, Reaching(), Budget(0.1)):
            warnings.simplefilter("always")
            for ids in (torch.arange(1, 41), torch.tensor([5]), torch.tensor([6])):
                model(ids[None], past_key_values=cache)
        assert len(found) == told


def test_a_hasher_without_a_reach_never_warns(model):
    assert not hasattr(SignHasher(), "reach")
    with warnings.catch_warnings(action="error"), attach(model, HashSelector(SignHasher()), Budget(0.1)):
        model(torch.arange(1, 96)[None], past_key_values=DynamicCache(config=model.config))


@pytest.mark.slow
def test_a_compiled_step_stays_one_graph(model):
    ids, mask = prompts((40,))
    how = CompileConfig(fullgraph=True, backend="eager")
    how._compile_all_devices = True
    with attach(model, Reaching(), Budget(0.1)), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        generate(model, ids, mask, new_tokens=4, cache_implementation="static", compile_config=how)
