"""Backbones that people change: LoRA adapters, quantised weights, other dtypes, compiled models."""

from dataclasses import replace

import pytest
import torch
from hashtrain import Hasher, HasherConfig, ModelShape
from hashtrain.adapters import adapter_of
from sparse_decode import Attachment, Budget, attach
from sparse_decode_doubles import Auditor, SignHasher, generate, prompts, tiny_model
from torch import nn

peft = pytest.importorskip("peft", reason="peft adapts the models of its users, and is no dependency")
TENTH = Budget(0.1, min_tokens=2, sink=0, recent=0)
# peft asks transformers by a name that transformers is about to drop.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


class EightBitLinear(nn.Module):
    """A linear layer as weight-only quantisers make them: whole numbers and scales, no floating-point `weight`."""

    def __init__(self, linear):
        super().__init__()
        scale = linear.weight.abs().amax(1, keepdim=True) / 127
        self.register_buffer("scale", scale)
        self.register_buffer("weight", (linear.weight / scale).round().to(torch.int8))
        self.bias = linear.bias

    def forward(self, x):
        return nn.functional.linear(x, self.weight.to(x.dtype) * self.scale.to(x.dtype), self.bias)


def quantised(model):
    for module in list(model.model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear):
                setattr(module, name, EightBitLinear(child))
    return model


def of_torchao(bits):
    """Quantise weights by torchao, which transformers would import in every process of ours if it was installed."""

    def change(model):
        torchao = pytest.importorskip("torchao.quantization", reason="`.ci/run` installs torchao for these tests alone")
        four = torchao.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=torchao.PerGroup(32))
        torchao.quantize_(model, torchao.Int8WeightOnlyConfig() if bits == 8 else four)
        return model

    return pytest.param(change, id=f"torchao-{bits}")


def adapted(model):
    """Add LoRA to the attention, with weights that matter."""
    torch.manual_seed(0)
    low_rank = peft.LoraConfig(r=4, target_modules=["q_proj", "k_proj", "v_proj"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(model, low_rank)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.normal_(0, 0.3)
    return model.eval()


@pytest.mark.parametrize("way", [{}, {"num_beams": 3}])
@pytest.mark.parametrize("change", [quantised, adapted, of_torchao(8), of_torchao(4)])
def test_changed_backbones_are_dense_at_a_full_budget_and_keep_the_laws(change, way, monkeypatch):
    model, (ids, mask) = change(tiny_model()), prompts()
    dense = generate(model, ids, mask, **way)
    assert not torch.equal(dense, generate(tiny_model(), ids, mask, **way)), "the change changes something"
    with attach(model, SignHasher(), Budget(1.0)):
        assert torch.equal(generate(model, ids, mask, **way), dense)
    auditor = Auditor(monkeypatch)
    with attach(model, SignHasher(), TENTH):
        generate(model, ids, mask, new_tokens=6, **way)
    assert auditor.steps == 4 * 5


def test_adapters_may_be_switched_while_attached():
    model, (ids, mask) = adapted(tiny_model()), prompts()
    with attach(model, SignHasher(), TENTH):
        with_adapter = generate(model, ids, mask)
        with model.disable_adapter():
            without = generate(model, ids, mask)
    with attach(tiny_model(), SignHasher(), TENTH) as attachment:
        assert torch.equal(generate(attachment.model, ids, mask), without)
    assert not torch.equal(with_adapter, without)


def test_a_hasher_made_for_another_adapter_says_so_once():
    model = adapted(tiny_model())
    made = HasherConfig("planes", ModelShape.of(model.config), hidden=16, adapter=adapter_of(model))
    attach(model, Hasher(made)).detach()
    attach(model, Hasher(replace(made, adapter=None))).detach()
    for other in (tiny_model(), model.unload()):
        with pytest.warns(UserWarning, match=r"this one has none, unless .* it may find less") as noted:
            attach(other, Hasher(made)).detach()
        assert len(noted) == 1
        assert noted[0].filename == __file__


def test_attaching_to_the_adapted_model_and_to_its_base_is_attaching_twice():
    model = adapted(tiny_model())
    with attach(model, SignHasher()), pytest.raises(ValueError, match="already attached"):
        attach(model.base_model.model, SignHasher())
    attach(model.base_model.model, SignHasher()).detach()


def test_a_model_compiled_by_its_owner_works():
    """Not `generate`'s own compilation, but torch.compile around the model, graph breaks allowed."""
    model, (ids, _) = tiny_model(num_hidden_layers=1), prompts((20,))
    with Attachment(model, SignHasher(), Budget(0.3, min_tokens=2), dense_layers=0, sparse_rows=0):
        plain = model(ids, use_cache=False).logits
        found = torch.compile(model, backend="eager", fullgraph=True)(ids, use_cache=False).logits
    torch.testing.assert_close(found, plain)
    with (
        Attachment(model, SignHasher(), dense_layers=0, sparse_rows=5),
        pytest.raises(Exception, match="sparse_rows=5"),
    ):
        torch.compile(model, backend="eager", fullgraph=True)(ids, use_cache=False)
