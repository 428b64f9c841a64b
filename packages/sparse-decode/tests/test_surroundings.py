"""An attached model in the hands of others: modes of torch, other types, copies, files, training, other settings."""

import copy
from importlib.util import find_spec

import pytest
import torch
from fake_gpu import fake_gpu
from hashtrain import Hasher, HasherConfig, ModelShape
from sparse_decode import Attachment, Budget, OracleSelector, RecentSelector, attach
from sparse_decode.select import HashSelector
from sparse_decode_doubles import Auditor, Calibrated, SignHasher, generate, hasher_for, prompts, tiny_model
from transformers import AutoModelForCausalLM, DynamicCache, StaticCache

WHOLE = Budget(1.0)


@pytest.mark.sample(1)
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


@pytest.mark.sample(6)
@pytest.mark.parametrize("variant", ["lsh", "paper", "planes", "transform", "oracle", "recent"])
def test_the_default_dtype_changes_nothing(variant, default_dtype):
    model, (ids, mask) = tiny_model(), prompts()
    others = {"oracle": OracleSelector, "recent": RecentSelector}

    def run():
        selector = others[variant]() if variant in others else hasher_for(model, variant)
        found = []
        with torch.no_grad(), Attachment(model, selector, Budget(0.3), sparse_rows=0):
            for kind in (lambda: DynamicCache(config=model.config), lambda: StaticCache(model.config, 40)):
                cache = kind()
                for first, last in ((0, 38), (38, 39), (39, 40)):
                    given = {"attention_mask": mask[:, :last], "past_key_values": cache}
                    found.append(model(ids[:, first:last], **given).logits)
        return torch.cat(found, 1)

    expected = run()
    default_dtype()
    assert torch.equal(run(), expected)


def test_the_default_device_changes_nothing():
    model, (ids, mask) = tiny_model(max_position_embeddings=2048), prompts((300, 190))
    expected = model(ids, attention_mask=mask).logits
    with attach(model), torch.device("meta"):
        torch.testing.assert_close(model(ids, attention_mask=mask).logits[mask.bool()], expected[mask.bool()])


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


@pytest.mark.parametrize(
    ("rule", "static", "compiled"),
    [
        *((rule, static, False) for rule in (None, 0) for static in (False, True)),
        pytest.param(None, True, True, marks=pytest.mark.slow),
    ],
)
def test_a_row_that_sees_nothing_is_as_in_dense_attention(rule, static, compiled):
    model, (ids, _) = tiny_model(), prompts((24,))
    seen = torch.ones(24, 24, dtype=torch.bool).tril()[20:].clone()
    seen[[1, 3]] = False

    def run():
        cache = StaticCache(config=model.config, max_cache_len=24) if static else DynamicCache(config=model.config)
        model(ids[:, :20], past_key_values=cache)
        step = torch.compile(model, backend="eager") if compiled else model
        return step(ids[:, 20:], past_key_values=cache, attention_mask=seen[None, None]).logits

    dense = run()
    with Attachment(model, SignHasher(), WHOLE, dense_layers=0, sparse_rows=rule):
        torch.testing.assert_close(run(), dense, atol=1e-4, rtol=1e-4)


def test_a_query_head_hasher_adds_the_remainder_too():
    model, (ids, _) = tiny_model(), prompts((40,))
    hasher = Hasher(HasherConfig("lsh", ModelShape.of(model.config)))
    with attach(model, HashSelector(hasher, True)) as attachment:
        assert not attachment.remainder
    for layer in hasher.layers:
        layer.remainder.copy_(Calibrated.coefficients)
    found = []
    for remainder in (True, False):
        how = {"sparse_rows": 0, "remainder": remainder}
        with Attachment(model, HashSelector(hasher, True), Budget(0.1), **how) as attachment:
            found.append(model(ids).logits)
            assert attachment.remainder == remainder
    assert not torch.allclose(*found, atol=1e-3)


# ---- Models whose layers are on several devices, and hashers that follow their keys there ----------------------------

PLACED = pytest.mark.skipif(find_spec("accelerate") is None, reason="transformers places models with accelerate")


@PLACED
def test_layers_placed_by_a_device_map_and_read_from_disk(tmp_path, monkeypatch):
    model = tiny_model("qwen3")
    model.save_pretrained(tmp_path / "model")
    hasher = hasher_for(model, "planes")
    places = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    places |= {f"model.layers.{layer}": "disk" if layer == 3 else "cpu" for layer in range(4)}
    placed = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", device_map=places, offload_folder=tmp_path / "disk"
    ).eval()
    assert placed.model.layers[3].self_attn.k_proj.weight.device.type == "meta"
    whole, (ids, mask) = AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval(), prompts()
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


def test_a_hasher_is_read_once_and_copied_to_the_device_of_the_keys():
    """The hasher itself stays where it is, and other selectors of it are its own."""
    hasher = Hasher(HasherConfig("planes", ModelShape(1, 2, 1, 16))).requires_grad_(False)
    selector, (k, q) = HashSelector(hasher), (torch.ones(1, heads, 1, 16) for heads in (1, 2))
    before = selector.encode_keys(0, k), selector.encode_queries(0, q)[0]
    there = selector.placed(0, torch.device("meta"))
    assert selector.placed(0, torch.device("meta")) is there
    assert {x.device.type for x in there.layer.state_dict().values()} == {"meta"}
    assert {x.device.type for x in hasher.state_dict().values()} == {"cpu"}
    for side in (hasher.layer(0).key, hasher.layer(0).query):
        for name, x in list(side.named_parameters()):
            setattr(side, name, torch.nn.Parameter(-x, requires_grad=False))
    assert torch.equal(selector.encode_keys(0, k), before[0])
    assert torch.equal(selector.encode_queries(0, q)[0], before[1])
    assert not torch.equal(copy.copy(selector).encode_keys(0, k), before[0])
