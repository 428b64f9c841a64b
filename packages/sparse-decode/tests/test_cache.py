"""Cache layers that carry codes or grow in place: plain ones in all but that, whatever is done to them."""

import copy

import pytest
import torch
from fuzz_cache import ALL_KINDS, KINDS, ROOM, encode, encoder_by, run_round
from sparse_decode import attach, interface
from sparse_decode.budget import LayerBudget
from sparse_decode.caches import buffer as buffers
from sparse_decode.caches.buffer import GrowingBuffer, in_huge_pages
from sparse_decode.caches.cache import our_type, retype
from sparse_decode.caches.cache_encoder import Encoder
from sparse_decode.caches.growing import GrowingLayer, Owned, revert
from sparse_decode_doubles import RoundedLayer, SignHasher, prompts, tiny_model
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer


@pytest.mark.sample(2)
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # of a fork beside threads, which is meant
@pytest.mark.parametrize("kind", ALL_KINDS)
def test_attached_layers_are_plain_ones_with_fresh_codes(kind):
    """The state machine for a moment; `fuzz_cache.py` runs it for as long as one likes."""
    assert sum(run_round(seed, kind) for seed in range(8)) == 320


def make(kind):
    return retype(KINDS[kind](), Owned(), encoder_by(encode), kind == "host")


class Counting(Encoder):
    """Lists how many tokens are hashed at a time."""

    def __init__(self):
        self.hashed = []
        super().__init__(self, 0)

    def encode_keys(self, layer, k):
        self.hashed.append(k.shape[2])
        return encode(k)


def update(layer, tokens, seed=0, batch=2):
    layer.update(
        *torch.randint(-4, 5, (2, batch, 2, tokens, 16), generator=torch.Generator().manual_seed(seed)).float()
    )


def check(layer):
    """The codes are those of the keys."""
    n = int(layer.get_seq_length())
    assert torch.equal(layer.codes[:, :, :n], encode(layer.keys[:, :, :n]))


def sums(layer, length):
    return layer.sums.advance(layer.keys, layer.values, None, length, torch.device("cpu"))


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_that_was_filled_before_is_taken_over_given_back_and_let_go(kind):
    layer, encoder, owned, others = KINDS[kind](), Counting(), Owned(), Owned()
    update(layer, 6)
    before, names = type(layer), set(vars(layer))
    assert retype(layer, owned, encoder, kind == "host") is layer
    for seed in range(3):
        check(layer)
        update(layer, 3, seed)
    check(layer)
    assert encoder.hashed == [1] * (kind == "static") + [6, 3, 3, 3]  # a static layer asks once for the codes' shape
    twin, taken = copy.deepcopy(layer), copy.deepcopy(layer)
    other = encoder_by(lambda k: ~encode(k))
    retype(taken, others, other)
    assert torch.equal(taken.codes[:, :, :15], ~encode(taken.keys[:, :, :15]))
    owned.release()  # of copies, too, but not of what another has taken over
    assert type(layer) is type(twin) is before
    assert not hasattr(layer, "encoder")
    assert not hasattr(twin, "encoder")
    assert taken.encoder is other
    revert(taken)
    assert type(taken) is before
    assert set(vars(taken)) == set(vars(layer)) == names
    update(taken, 1)


@pytest.mark.parametrize("kind", KINDS)
def test_appending_copies_nothing_and_codes_take_sixteen_bytes_per_token_and_head(kind):
    layer = make(kind)
    update(layer, 10)
    places = set()
    for seed in range(40):
        update(layer, 1, seed)
        places.add((layer.codes.data_ptr(), layer.keys.data_ptr(), layer.values.data_ptr()))
    assert len(places) == 1
    update(layer, ROOM - 50)
    assert layer.codes.nbytes == 2 * 2 * ROOM * 16
    assert layer.keys.nbytes == layer.values.nbytes == 2 * 2 * ROOM * 16 * 4


def test_what_a_static_layer_adds_stays_in_place_and_is_empty_after_a_reset():
    layer = make("static")
    update(layer, 6)
    sums(layer, 6)
    added = [layer.codes, *layer.sums.tensors]
    assert all(hasattr(x, "_dynamo_static_input_type") for x in added)  # as torch._dynamo.mark_static_address says it
    assert layer.codes.any()
    layer.reset()
    assert layer.codes is added[0]
    assert not layer.codes.any()
    layer.reorder_cache(torch.tensor([0]))  # of an empty layer: its room stays
    update(layer, 6, 1)
    check(layer)


def test_edits_in_inference_mode_of_what_was_made_there_are_noticed():
    def scale():
        layer.keys[:, :, 1:3] *= -1
        layer.values.add_(1)

    with torch.inference_mode():
        layer = DynamicLayer()
        update(layer, 9)
        retype(layer, Owned(), encoder_by(encode))
        check(layer)
        scale()
        check(layer)
    update(layer, 2, 1)
    scale()
    check(layer)


def test_other_layers_and_those_with_fewer_values_than_keys_are_refused():
    for other in (DynamicSlidingWindowLayer(8), RoundedLayer()):
        assert our_type(type(other)) is None
        with pytest.raises(ValueError, match=f"got {type(other).__name__}"):
            retype(other, Owned(), encoder_by(encode))
    layer = make("dynamic")
    update(layer, 6)
    layer.keys = layer.keys[:, :, :3]
    with pytest.raises(ValueError, match=r"as many keys as values, got \(2, 2, 3, 16\) and \(2, 2, 6, 16\)"):
        update(layer, 1)


def test_the_rows_of_a_filled_layer_go_to_the_host_and_come_back():
    with FakeTensorMode():  # tensors of a GPU that is not there
        layer = DynamicLayer()
        layer.update(*torch.zeros(2, 1, 2, 6, 16, device="cuda"))
        made = encoder_by(lambda k: torch.zeros(*k.shape[:3], 4, dtype=torch.int32, device=k.device))
        retype(layer, Owned(), made, on_host=True)
        assert {layer.keys.device.type, layer.values.device.type} == {"cpu"}
        assert layer.codes.device.type == "cuda"
        revert(layer)
        assert {layer.keys.device.type, layer.values.device.type} == {"cuda"}


def test_rows_of_other_sequences_and_of_other_types_are_refused():
    buffer = GrowingBuffer()
    buffer.append(torch.zeros(2, 1, 3, 16))
    with pytest.raises(ValueError, match="the cache holds 2 sequences of 1 heads, got 1 of 1 to append"):
        buffer.append(torch.ones(1, 1, 1, 16))
    model, ids = tiny_model(), prompts((40,))[0]
    with attach(model, SignHasher(), LayerBudget(0.1)):
        cache = DynamicCache(config=model.config)
        model(ids, past_key_values=cache)
        with pytest.raises(ValueError, match=r"one type, got torch\.bfloat16, torch\.float32"):
            model.bfloat16()(ids[:, :1], past_key_values=cache)


@pytest.mark.parametrize("below", [30, 1000])
def test_a_cache_carries_codes_from_the_break_even_on(below, monkeypatch):
    """Before, its layers are plain ones, then plain ones that grow; all are plain after detach."""
    model, ids = tiny_model(), prompts((40,))[0]
    monkeypatch.setattr(interface, "FROM", 20)
    cache, kinds = DynamicCache(config=model.config), []
    with attach(model, SignHasher(), LayerBudget(0.1, dense_below=below)) as attachment:
        for first, last in ((0, 10), (10, 11), (11, 20), (20, 21), (21, 35), (35, 36)):
            model(ids[:, first:last], past_key_values=cache)
            kinds.append({(type(layer), getattr(layer, "encoder", None) is not None) for layer in cache.layers})
        sizes = attachment.memory(cache)
    plain, growing, coded = {(DynamicLayer, False)}, {(GrowingLayer, False)}, {(GrowingLayer, True)}
    assert kinds == [plain, plain, plain, growing, *([coded] * 2 if below == 30 else [growing] * 2)]
    assert sizes == (4 * 2 * 2 * 36 * 16 * 4, 4 * 2 * 36 * 16 if below == 30 else 0)
    assert {type(layer) for layer in cache.layers} == {DynamicLayer}
    assert cache.get_seq_length() == 36


# ---- Where a growing buffer keeps its rows ---------------------------------------------------------------------------

MIB = 1 << 20


def rows(count, device="cpu"):
    return torch.arange(float(2 * count), device=device).view(1, 1, count, 2)


@pytest.mark.parametrize("host", [False, True])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("act", ["append", "adopt"])
def test_rows_are_on_their_device_or_the_host_and_pinned_only_there(host, device, act, monkeypatch):
    asked, empty = [], torch.empty
    with FakeTensorMode():  # tensors of a GPU that is not there
        buffer = GrowingBuffer(host)
        buffer.append(rows(9))  # an adopted row replaces them, an appended one follows
        buffer = buffer if act == "adopt" else GrowingBuffer(host)
        monkeypatch.setattr(torch, "empty", lambda *sizes, **how: (asked.append(how), empty(*sizes, **how))[1])
        getattr(buffer, act)(rows(3, device))
        assert buffer.view().device.type == ("cpu" if host else device)
        assert buffer.length == buffer.view().shape[2] == 3
    if act == "append":
        assert [how["pin_memory"] for how in asked] == [host and device == "cuda"]


def test_only_whole_huge_pages_of_long_rows_are_asked_for(monkeypatch):
    asked = []
    monkeypatch.setattr(buffers, "_advise", lambda: lambda *given: asked.append(given))
    x = torch.empty(9 * MIB + 123, dtype=torch.uint8)
    assert in_huge_pages(x) is x
    start, length, _ = asked.pop()
    assert start % (2 * MIB) == length % (2 * MIB) == 0
    assert x.data_ptr() <= start < start + length <= x.data_ptr() + len(x) < start + length + 4 * MIB
    in_huge_pages(torch.empty(9 * MIB, dtype=torch.uint8, device="meta"))
    buffer = GrowingBuffer()
    buffer.append(torch.zeros(1, 2, 40, 64))
    assert not asked
    buffer.append(torch.zeros(1, 2, 40_000, 64))
    assert len(asked) == 1
