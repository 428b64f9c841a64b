"""An attached model in the hands of others: modes of torch, other types, copies, files, training, other settings."""

import inspect

import pytest
import torch
import transformers
from fake_gpu import fake_gpu
from hashtrain import Hasher, HasherConfig, ModelShape
from sparse_decode import Budget, OracleSelector, QueryHeadHasher, RecentSelector, attach
from sparse_decode.attach import attach_rows
from sparse_decode.interface import register
from sparse_decode.model import NAMES
from sparse_decode.select import HashSelector
from sparse_decode_doubles import Calibrated, SignHasher, generate, prompts, tiny_model
from transformers import DynamicCache, StaticCache

WHOLE = Budget(1.0)


@pytest.mark.parametrize("hasher", [SignHasher(), Calibrated()])
@pytest.mark.parametrize("kv", ["device", "host"])
def test_a_prefix_prefilled_in_inference_mode_is_gone_on_with(hasher, kv):
    model, (ids, _) = tiny_model(), prompts((40,))
    dense = generate(model, ids)
    with attach(model, hasher, WHOLE, dense_layers=0, kv=kv):
        for batched in (False, True):
            cache = DynamicCache(config=model.config)
            with torch.inference_mode():
                model(ids[:, :30], past_key_values=cache)
                model(ids[:, 30:32], past_key_values=cache)
                if batched:  # which copies what was made in that mode
                    cache.batch_repeat_interleave(2)
                    cache.batch_select_indices(torch.tensor([0]))
            assert torch.equal(generate(model, ids, past_key_values=cache), dense)
        with torch.inference_mode():
            assert torch.equal(generate(model, ids), dense)


@pytest.mark.parametrize("hasher", [SignHasher(), Calibrated()])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_autocast(hasher, implementation):
    model, (ids, _) = tiny_model(implementation=implementation), prompts((40, 40))

    def run():
        cache = DynamicCache(config=model.config)  # a static one fails without us: it casts nothing
        with torch.autocast("cpu", torch.bfloat16):
            return [model(part, past_key_values=cache).logits[:, -1].float() for part in ids.split([36, 1, 1, 2], 1)]

    dense = run()
    with attach(model, hasher, WHOLE, dense_layers=0, remainder=False) as attachment:
        for found, expected in zip(run(), dense, strict=True):
            torch.testing.assert_close(found, expected, atol=0.15, rtol=0.05)
        assert attachment.density() == dict.fromkeys(range(4), 1.0)
    with attach(model, hasher, Budget(0.1), dense_layers=0):
        few = run()
    with attach(model, hasher, Budget(0.1), dense_layers=0, kv="host"):
        for found, expected in zip(run(), few, strict=True):
            torch.testing.assert_close(found, expected, atol=0.15, rtol=0.05)


def test_codes_are_the_same_inside_and_outside_of_autocast():
    model, (ids, _) = tiny_model(), prompts((40,))
    with attach(model, SignHasher(), Budget(), dense_layers=0) as attachment:
        inside, outside = DynamicCache(config=model.config), DynamicCache(config=model.config)
        model(ids, past_key_values=outside)
        for held, twin in zip(attachment.prepare(inside).layers, outside.layers, strict=True):
            with torch.autocast("cpu", torch.bfloat16):
                held.update(twin.keys, twin.values)
            assert torch.equal(held.codes, twin.codes)


@pytest.mark.parametrize("first", [torch.float32, torch.bfloat16])
def test_a_change_of_type_while_attached_is_as_without_us(first):
    other = torch.bfloat16 if first == torch.float32 else torch.float32
    model, (ids, _) = tiny_model().to(first), prompts((40,))
    dense = generate(model, ids), generate(model.to(other), ids)
    with attach(model.to(first), SignHasher(), WHOLE):
        assert torch.equal(generate(model, ids), dense[0])
        assert torch.equal(generate(model.to(other), ids), dense[1])


@pytest.fixture(params=[torch.bfloat16, torch.float64])
def default_dtype(request):
    """Another default dtype of torch, as a caller sets it who makes a model."""
    yield lambda: torch.set_default_dtype(request.param)
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("variant", ["lsh", "paper", "planes", "transform", "oracle", "recent"])
def test_the_default_dtype_changes_nothing(variant, default_dtype):
    model, (ids, mask) = tiny_model(), prompts()
    others = {"oracle": OracleSelector, "recent": RecentSelector}

    def run():
        if variant in others:
            selector = others[variant]()
        else:
            selector = Hasher(HasherConfig(variant, ModelShape.of(model.config)))
            for layer in selector.layers:
                layer.remainder.copy_(Calibrated.coefficients)
        found = []
        with torch.no_grad(), attach_rows(model, selector, Budget(0.3), sparse_rows=0):
            for kind in (lambda: DynamicCache(config=model.config), lambda: StaticCache(model.config, 40)):
                cache = kind()
                for first, last in ((0, 38), (38, 39), (39, 40)):
                    given = {"attention_mask": mask[:, :last], "past_key_values": cache}
                    found.append(model(ids[:, first:last], **given).logits)
        return torch.cat(found, 1)

    expected = run()
    default_dtype()
    assert torch.equal(run(), expected)


def test_float64_is_refused():
    with pytest.raises(ValueError, match=r"needs float32, bfloat16 or float16, got torch.float64; convert the model"):
        attach(tiny_model().double(), SignHasher())
    model = tiny_model()
    with attach(model, SignHasher()), pytest.raises(ValueError, match=r"got torch.float64; convert the model"):
        model.double()(prompts((40,))[0])  # at prefill


@pytest.mark.parametrize("name", ["sdpa", "eager"])
def test_another_attention_set_while_attached_is_refused_and_stays(name):
    model, (ids, _) = tiny_model(), prompts((40,))
    attachment = attach(model, SignHasher())
    model.set_attn_implementation(name)
    with pytest.raises(ValueError, match=rf'set to "{name}" while sparse attention is attached; call detach\(\)'):
        generate(model, ids)
    attachment.detach()
    assert model.config._attn_implementation == name
    generate(model, ids)


def test_attention_that_cannot_be_set_is_refused_and_nothing_is_changed(monkeypatch):
    model = tiny_model()
    monkeypatch.setattr(type(model.model), "_can_set_attn_implementation", classmethod(lambda cls: False))
    monkeypatch.setattr(type(model), "_can_set_attn_implementation", classmethod(lambda cls: False))
    with pytest.raises(ValueError, match='which keeps "sdpa"; leave this model dense'):
        attach(model, SignHasher())
    assert model.config._attn_implementation == "sdpa"
    assert not any(module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("checkpointing", [False, True])
def test_training_while_attached_has_the_gradients_of_the_dense_model(checkpointing):
    model, (ids, _) = tiny_model(attention_dropout=0.0).train(), prompts((40, 40))
    if checkpointing:
        getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()

    def gradients():
        model.zero_grad()
        with torch.enable_grad():
            model(ids, labels=ids).loss.backward()
        return [x.grad.clone() for x in model.parameters()]

    dense = gradients()
    with attach(model, SignHasher(), dense_layers=0):
        for found, expected in zip(gradients(), dense, strict=True):
            torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
def test_attention_weights_are_those_of_dense_calls_and_refused_for_sparse_rows(family):
    model, (ids, mask) = tiny_model(family, implementation="eager"), prompts((40, 33))
    options = {"output_attentions": True, "return_dict_in_generate": True}
    dense = model(ids, attention_mask=mask, output_attentions=True).attentions
    with attach(model, SignHasher(), WHOLE, dense_layers=0):
        found = model(ids, attention_mask=mask, output_attentions=True).attentions
        for one, other in zip(found, dense, strict=True):
            torch.testing.assert_close(one, other)
        with pytest.raises(ValueError, match="sparse rows have no attention weights; do not set output_attentions"):
            generate(model, ids, mask, **options)


def move(model, device, dtype):
    """What `model.to` does, which does not take fake tensors."""
    for module in model.modules():
        for name, x in module._parameters.items():
            module._parameters[name] = None if x is None else torch.nn.Parameter(x.to(device, dtype), False)
        for name, x in module._buffers.items():
            module._buffers[name] = None if x is None else x.to(device)


@pytest.mark.parametrize(
    ("device", "dtype", "message"),
    [
        ("meta", torch.float32, "runs on the CPU or on CUDA, got meta; move the model"),
        ("cuda", torch.float32, "float32"),
        ("cuda", torch.bfloat16, None),
    ],
)
def test_a_model_that_moves_while_attached_is_refused_with_the_prompt_or_works(device, dtype, message):
    hasher = Hasher(HasherConfig("planes", ModelShape.of(tiny_model().config)))
    with fake_gpu():
        model, ids = tiny_model(), torch.zeros(1, 20, dtype=torch.long)
        with attach(model, HashSelector(hasher), Budget(0.5)):
            model(ids)
            move(model, device, dtype)
            if message is None:
                cache = model(ids.to(device), use_cache=True).past_key_values
                assert model(ids[:, :1].to(device), past_key_values=cache).logits.device.type == device
            else:
                with pytest.raises(ValueError, match=message):
                    model(ids.to(device))


def masked(rows, n, blind, kind):
    """A causal mask [1, 1, rows, n] of the last rows, of which some see nothing."""
    seen = torch.ones(n, n, dtype=torch.bool).tril()[n - rows :].clone()
    seen[blind] = False
    return seen[None, None] if kind == "sdpa" else torch.where(seen, 0.0, torch.finfo(torch.float32).min)[None, None]


CACHES = [("sdpa", rule, static) for rule in (None, 0) for static in (False, True)]
COMPILED = [("sdpa", None, True)]


@pytest.mark.parametrize(
    ("implementation", "rule", "static", "compiled"),
    [*((*x, False) for x in CACHES), *(pytest.param(*x, True, marks=pytest.mark.slow) for x in COMPILED)],
)
def test_a_row_that_sees_nothing_is_as_in_dense_attention(implementation, rule, static, compiled):
    model, (ids, _) = tiny_model(implementation=implementation), prompts((24,))

    def run():
        cache = StaticCache(config=model.config, max_cache_len=24) if static else DynamicCache(config=model.config)
        model(ids[:, :20], past_key_values=cache)
        step = torch.compile(model, backend="eager") if compiled else model
        return step(ids[:, 20:], past_key_values=cache, attention_mask=masked(4, 24, [1, 3], implementation)).logits

    dense = run()
    with attach_rows(model, SignHasher(), WHOLE, dense_layers=0, sparse_rows=rule):
        torch.testing.assert_close(run(), dense, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("rule", [None, 0])
def test_a_mask_narrower_than_the_keys_is_refused_and_one_of_width_one_is_as_torch_takes_it(rule):
    model = tiny_model()
    attention = model.model.layers[3].self_attn
    states = torch.randn(1, 24, 64)
    rotary = model.model.rotary_emb(states, torch.arange(24)[None])

    def call(mask, cache):
        rotations = tuple(x[:, 20:] for x in rotary)
        return attention(states[:, 20:], position_embeddings=rotations, attention_mask=mask, past_key_values=cache)[0]

    def prefilled():
        cache = DynamicCache(config=model.config)
        parts = {"position_embeddings": tuple(x[:, :20] for x in rotary), "attention_mask": None}
        attention(states[:, :20], past_key_values=cache, **parts)
        return cache

    wide = torch.ones(1, 1, 4, 1, dtype=torch.bool)
    dense = call(wide, prefilled())
    with attach_rows(model, SignHasher(), WHOLE, sparse_rows=rule):
        torch.testing.assert_close(call(wide, prefilled()), dense, atol=1e-5, rtol=1e-5)
        cache = prefilled()
        with pytest.raises(ValueError, match=r"4 rows and 24 keys, got shape \(1, 1, 4, 12\)"):
            call(torch.ones(1, 1, 4, 12, dtype=torch.bool), cache)


def test_a_query_head_hasher_adds_the_remainder_too():
    model, (ids, _) = tiny_model(), prompts((40,))
    hasher = Hasher(HasherConfig("lsh", ModelShape.of(model.config)))
    with attach(model, QueryHeadHasher(hasher)) as attachment:
        assert not attachment.remainder
    for layer in hasher.layers:
        layer.remainder.copy_(Calibrated.coefficients)
    found = []
    for remainder in (True, False):
        with attach_rows(model, QueryHeadHasher(hasher), Budget(0.1), sparse_rows=0, remainder=remainder) as attachment:
            found.append(model(ids).logits)
            assert attachment.remainder == remainder
    assert not torch.allclose(*found, atol=1e-3)


def test_our_attention_takes_its_arguments_in_the_order_of_transformers_own():
    """Whoever wraps all attention functions, as kvpress does, hands the first six on by their places."""
    register()
    own = list(inspect.signature(transformers.AttentionInterface()["sdpa"]).parameters)
    for name in NAMES.values():
        assert list(inspect.signature(transformers.AttentionInterface()[name]).parameters)[:7] == own[:7]
    model = tiny_model()
    with attach(model, SignHasher()):
        assert model.config._attn_implementation == NAMES["sdpa"]
    assert type(model.config._attn_implementation) is str
    assert transformers.AutoConfig.for_model("llama")._attn_implementation != NAMES["sdpa"]
