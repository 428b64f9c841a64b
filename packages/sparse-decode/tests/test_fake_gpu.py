"""A decode step on a GPU that is not there: nothing waits for it, nothing is copied, and operators are counted."""

import json
import pathlib

import pytest
import torch
from fake_gpu import CONFIGS, PROMPT, TENTH, beyond_dense, fake_gpu, faked
from hashtrain import Hasher, HasherConfig, ModelShape
from sparse_decode import Budget, attach
from sparse_decode.select import HashSelector
from torch._subclasses.fake_tensor import DataDependentOutputException
from transformers import AutoModelForCausalLM, DynamicCache

STORED = json.loads((pathlib.Path(__file__).parents[3] / "docs" / "results" / "gpu_step.json").read_text("utf-8"))


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("variant", ["planes", "transform"])
def test_a_step_neither_waits_nor_copies(family, variant):
    found = beyond_dense(CONFIGS[family], variant)
    assert found.copies == 0
    assert found.operators <= STORED[f"{variant}+remainder"]["operators"]


@pytest.mark.parametrize("name", STORED)
def test_what_a_layer_does_is_what_is_stored(name):
    variant, *more = name.split("+")
    found = beyond_dense(CONFIGS["llama"], variant, per_query_head="heads" in more, remainder="remainder" in more)
    assert found._asdict() == STORED[name], "uv run tools/count_launches.py stores what is counted now"


@pytest.mark.parametrize("budget", [Budget(0.1, sink=0, recent=0), Budget(0.1, sink=4, recent=16), Budget(1.0)])
def test_whatever_is_always_read(budget):
    assert beyond_dense(CONFIGS["llama"], "transform", budget).operators <= STORED["transform+remainder"]["operators"]


def test_a_mask_still_waits():
    """Padding is not on the short way yet (docs/log.md, 2026-11-23): this test is to fail when it is."""
    config = CONFIGS["llama"]
    hasher = Hasher(HasherConfig("planes", ModelShape.of(config)), 0)
    with fake_gpu() as mode, torch.inference_mode():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
        mask, cache = torch.ones(2, PROMPT + 1, dtype=torch.long), DynamicCache(config=config)
        with attach(model, HashSelector(faked(hasher, mode)), TENTH, remainder=False):
            model(torch.zeros(2, PROMPT, dtype=torch.long), past_key_values=cache)
            with pytest.raises(DataDependentOutputException):
                model(torch.zeros(2, 1, dtype=torch.long), attention_mask=mask, past_key_values=cache)
