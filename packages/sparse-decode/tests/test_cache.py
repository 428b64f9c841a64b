"""The law of the coded cache layers: their codes are those of their keys, after anything that is done to them."""

import copy

import hashcore
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from sparse_decode import cache
from sparse_decode.buffer import GrowingBuffer
from sparse_decode.cache import (
    CodedDynamicLayer,
    CodedQuantisedLayer,
    CodedStaticLayer,
    Encoder,
    carry_codes,
    coded_type,
    drop_codes,
)
from sparse_decode.offload import HostLayer
from sparse_decode.remainder import RunningMeans, StaticMeans
from sparse_decode_doubles import WholeNumberLayer
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, Fp8QuantizedLayer, StaticLayer

WEIGHTS = torch.randint(0, 2, (2, 16, 128), generator=torch.Generator().manual_seed(0)).float() * 2 - 1
ROOM = 64
KINDS = {
    "dynamic": (DynamicLayer, CodedDynamicLayer),
    "host": (DynamicLayer, HostLayer),
    "static": (lambda: StaticLayer(ROOM), CodedStaticLayer),
    "quantised": (lambda: WholeNumberLayer(residual_length=4), coded_type(WholeNumberLayer)),
}
RESIZABLE = ("dynamic", "host")


def encode(k):
    return hashcore.pack(k @ WEIGHTS)  # whole numbers times signs: exact


def make(kind, encoder=None):
    plain, coded = KINDS[kind]
    return carry_codes(plain(), encoder or Encoder(encode), coded)


def cached_keys(layer):
    """The keys the layer would attend to, and their number."""
    length = int(layer.get_seq_length())
    if isinstance(layer, CodedQuantisedLayer):
        return layer._all_keys()
    return layer.keys[:, :, :length]


def check(layer):
    length = int(layer.get_seq_length())
    if length:
        assert layer.codes.shape[2] == (ROOM if isinstance(layer, StaticLayer) else length)
        assert torch.equal(layer.codes[:, :, :length], encode(cached_keys(layer)))
    elif isinstance(layer, CodedDynamicLayer):
        assert not len(layer._codes)


def update(layer, tokens, seed, batch=2):
    # Cropped to nothing, or static, a layer keeps its batch size.
    batch = layer.keys.shape[0] if layer.is_initialized and layer.keys.dim() == 4 else batch
    k, v = torch.randint(-4, 5, (2, batch, 2, tokens, 16), generator=torch.Generator().manual_seed(seed)).float()
    before = int(layer.get_seq_length())
    keys, values = layer.update(k, v)
    assert int(layer.get_seq_length()) == before + tokens
    assert torch.equal(keys[:, :, before : before + tokens], k)
    assert torch.equal(values[:, :, before : before + tokens], v)


def stored(layer):
    """The keys and values the layer would attend to."""
    length = int(layer.get_seq_length())
    if isinstance(layer, CodedQuantisedLayer):
        values = layer._dequantize(layer._quantized_values)
        values = layer._apply_pending_reorder(values, values)[0]
        return layer._all_keys(), torch.cat([values, layer.values], dim=-2)
    return layer.keys[:, :, :length], layer.values[:, :, :length]


def check_means(layer, padding, rows):
    """The running means of the last rows are those of the whole cache: exactly, on whole numbers."""
    (k, v), length = stored(layer), int(layer.get_seq_length())
    seen = None if padding is None else torch.arange(length) >= padding[:, None]
    first = max(0, length - rows)
    found, expected = (means.rows(k, v, seen, first, length) for means in (layer.means, RunningMeans()))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


class Machine(RuleBasedStateMachine):
    kind = "dynamic"

    def __init__(self):
        super().__init__()
        self.layer = make(self.kind)
        self.padding = torch.zeros(2, dtype=torch.int64)

    @precondition(lambda self: self.length)
    @rule(rows=st.integers(1, 4), masked=st.booleans())
    def attend(self, rows, masked):
        check_means(self.layer, self.padding if masked or self.padding.any() else None, rows)

    @rule(padding=st.lists(st.integers(0, 3), min_size=8, max_size=8))
    def pad(self, padding):
        """Another text: other padding."""
        self.layer.reset()
        self.padding = torch.tensor(padding)[: len(self.padding)]

    @property
    def length(self):
        return int(self.layer.get_seq_length())

    @property
    def batch(self):
        return self.layer.codes.shape[0]

    @precondition(lambda self: self.length < ROOM - 4)
    @rule(tokens=st.integers(1, 4), seed=st.integers(0, 99))
    def update(self, tokens, seed):
        update(self.layer, tokens, seed, self.batch if self.length else len(self.padding))
        assert self.batch == len(self.padding)

    @precondition(lambda self: self.kind in RESIZABLE and self.length)
    @rule(tokens=st.integers(0, 4))
    def crop(self, tokens):
        self.layer.crop(-min(tokens, self.length))

    @rule()
    def reset(self):
        self.layer.reset()

    @precondition(lambda self: self.length)
    @rule(seed=st.integers(0, 99))
    def reorder(self, seed):
        draw = torch.Generator().manual_seed(seed)
        order = torch.randint(0, self.batch, (self.batch,), generator=draw)
        self.layer.reorder_cache(order)
        self.padding = self.padding[order]

    @precondition(lambda self: self.kind in RESIZABLE and self.length and self.batch < 8)
    @rule(repeats=st.integers(1, 3))
    def repeat(self, repeats):
        self.layer.batch_repeat_interleave(repeats)
        self.padding = self.padding.repeat_interleave(repeats)

    @precondition(lambda self: self.kind in RESIZABLE and self.length)
    @rule(seed=st.integers(0, 99), most=st.integers(1, 3))
    def select(self, seed, most):
        chosen = torch.randperm(self.batch, generator=torch.Generator().manual_seed(seed))[:most]
        self.layer.batch_select_indices(chosen)
        self.padding = self.padding[chosen]

    @precondition(lambda self: 0 < self.length < ROOM - 4)
    @rule(seed=st.integers(0, 99))
    def copy(self, seed):
        twin = copy.deepcopy(self.layer)
        update(self.layer, 1, seed, self.batch)  # must not show in the copy
        self.layer = twin

    @invariant()
    def codes_are_those_of_the_cached_keys(self):
        check(self.layer)


def machine(kind_name):
    made = type(f"{kind_name}Machine", (Machine,), {"kind": kind_name}).TestCase
    made.settings = settings(max_examples=40, stateful_step_count=20, deadline=None)
    return made


TestDynamic, TestHost, TestStatic, TestQuantised = (machine(kind) for kind in KINDS)


ACTS = {
    "update": lambda layer: update(layer, 3, 1, layer.codes.shape[0]),
    "crop": lambda layer: layer.crop(-2),
    "reorder_cache": lambda layer: layer.reorder_cache(torch.arange(layer.codes.shape[0]).flip(0)),
    "batch_repeat_interleave": lambda layer: layer.batch_repeat_interleave(2),
    "batch_select_indices": lambda layer: layer.batch_select_indices(torch.tensor([1])),
    "reset": lambda layer: layer.reset(),
}
OVERRIDES = {
    "dynamic": tuple(ACTS),
    "host": tuple(ACTS),
    "static": ("update", "reorder_cache", "lazy_initialization"),
    "quantised": ("update", "reorder_cache", "reset"),
}


def tour(kind):
    """Do everything that a layer of this kind allows, looking at its codes after each."""
    layer = make(kind)
    update(layer, 5, 0)
    check_all(layer)
    for name in ACTS if kind in RESIZABLE else ("update", "reorder_cache", "reset"):
        ACTS[name](layer)
        check(layer)
        # More tokens than were dropped, or stale sums would look too long and be made anew.
        update(layer, 40 if name == "reset" else 4, 7, layer.codes.shape[0] if layer.get_seq_length() else 3)
        check_all(layer)


def check_all(layer):
    check(layer)
    check_means(layer, None, 1)


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in OVERRIDES.items() for name in names])
def test_the_law_breaks_without(kind, name, monkeypatch):
    tour(kind)
    coded = KINDS[kind][1]
    owner = next(part for part in coded.__mro__ if name in vars(part))
    monkeypatch.setattr(owner, name, getattr(coded.plain, name))
    with pytest.raises((AssertionError, RuntimeError, IndexError, TypeError, AttributeError, ValueError)):
        tour(kind)


@pytest.mark.parametrize("kind", KINDS)
def test_each_key_is_hashed_once(kind):
    hashed = []

    def counting(k):
        hashed.append(k.shape[2])
        return encode(k)

    layer = make(kind, Encoder(counting))
    for seed in range(4):
        update(layer, 3, seed)
        _ = layer.codes
    assert hashed == [1] * (kind == "static") + [3, 3, 3, 3]  # a static layer asks once for the codes' shape


def test_keys_of_dense_steps_are_hashed_when_they_are_needed_and_in_their_order():
    hashed = []

    def counting(k):
        hashed.append(k.shape[2])
        return encode(k)

    layer = make("dynamic", Encoder(counting))
    update(layer, 20, 0)  # prefill: at once
    for seed in range(3):
        update(layer, 1, seed)
    layer.crop(-1)
    assert hashed == [20]
    update(layer, 30, 4)
    assert hashed == [20, 2, 30]
    assert torch.equal(layer.codes, encode(layer.keys))
    update(layer, 1, 5)
    layer.reorder_cache(torch.tensor([1, 0]))
    assert torch.equal(layer.codes, encode(layer.keys))
    assert hashed == [20, 2, 30, 1]


GUARDS = {"drop": RESIZABLE, "map_batch": tuple(KINDS), "reset": ("static",)}


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for name, kinds in GUARDS.items() for kind in kinds])
def test_the_means_break_without(kind, name, monkeypatch):
    owner = StaticMeans if kind == "static" else RunningMeans
    monkeypatch.setattr(owner, name, lambda *arguments: None)
    with pytest.raises(AssertionError):
        tour(kind)


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_sums_only_what_is_new(kind):
    layer = make(kind)
    update(layer, 9, 0)
    check_means(layer, None, 1)
    update(layer, 1, 1)
    k, v = stored(layer)
    expected = RunningMeans().rows(k, v, None, 9, 10)
    poisoned = (x.index_fill(2, torch.arange(9), torch.nan) for x in (k, v))
    for found, wanted in zip(layer.means.rows(*poisoned, None, 9, 10), expected, strict=True):
        assert torch.equal(found, wanted)


def test_a_long_prefill_is_hashed_in_pieces(monkeypatch):
    monkeypatch.setattr(cache, "_CHUNK", 20)
    hashed = []
    layer = make("dynamic", Encoder(lambda k: (hashed.append(k.shape[2]), encode(k))[1]))
    update(layer, 50, 0)
    check(layer)
    assert hashed == [20, 20, 10]


@pytest.mark.parametrize("kind", ["dynamic", "host", "static"])
def test_appending_copies_nothing_that_was_there(kind):
    layer = make(kind)
    update(layer, 10, 0)
    places = set()
    for seed in range(40):
        update(layer, 1, seed)
        places.add((layer.codes.data_ptr(), layer.keys.data_ptr(), layer.values.data_ptr()))
    assert len(places) == 1
    check(layer)


def test_codes_are_sixteen_bytes_per_token_and_head():
    for kind in KINDS:
        layer = make(kind)
        update(layer, ROOM, 0)
        kv, codes = layer.memory()
        assert codes == 2 * 2 * ROOM * 16
        assert kv == 2 * 2 * 2 * ROOM * 16 * (1 if kind == "quantised" else 4)


@pytest.mark.parametrize("kind", KINDS)
def test_retyping_keeps_the_object_and_can_be_undone(kind):
    plain, coded = KINDS[kind]
    layer = plain()
    update(layer, 3, 0)
    before = type(layer)
    names = set(vars(layer))
    assert carry_codes(layer, Encoder(encode), coded) is layer
    check(layer)
    update(layer, 2, 1)
    check(layer)
    carry_codes(layer, Encoder(lambda k: ~encode(k)))  # another hasher takes it over
    assert torch.equal(layer.codes[:, :, :5], ~encode(cached_keys(layer)))
    drop_codes(layer)
    assert type(layer) is before
    assert set(vars(layer)) == names
    update(layer, 1, 2)


@pytest.mark.parametrize("kind", KINDS)
def test_a_released_encoder_lets_go_of_copies_too_but_not_of_what_another_took_over(kind):
    first, second = Encoder(encode), Encoder(encode)
    layer = make(kind, first)
    update(layer, 3, 0)
    twin, taken = copy.deepcopy(layer), copy.deepcopy(layer)
    assert twin.encoder is first
    carry_codes(taken, second)
    first.release()
    assert type(layer) is type(twin) is layer.__class__
    assert not hasattr(layer, "encoder")
    assert not hasattr(twin, "encoder")
    check(taken)


def test_a_quantised_layer_filled_before_is_hashed_from_what_it_holds():
    layer = Fp8QuantizedLayer()
    update(layer, 6, 0)
    carry_codes(layer, Encoder(encode))
    assert torch.equal(layer.codes, encode(layer._dequantize(layer._quantized_keys)))


@pytest.mark.parametrize("act", ["crop", "batch_repeat_interleave", "batch_select_indices"])
def test_what_a_quantised_layer_cannot_do_is_refused(act):
    layer = make("quantised")
    update(layer, 9, 0)
    layer.crop(0)
    with pytest.raises(ValueError, match=r"a quantised cache cannot .* use DynamicCache\(\)"):
        ACTS[act](layer)


def test_other_layers_are_refused():
    assert coded_type(DynamicSlidingWindowLayer) is None
    with pytest.raises(ValueError, match="got DynamicSlidingWindowLayer"):
        carry_codes(DynamicSlidingWindowLayer(8), Encoder(encode))


@pytest.mark.parametrize("kind", KINDS)
def test_a_filled_layer_is_hashed_when_it_is_taken_over(kind):
    hashed = []
    plain, coded = KINDS[kind]
    layer = plain()
    update(layer, 6, 0)
    carry_codes(layer, Encoder(lambda k: (hashed.append(k.shape[2]), encode(k))[1]), coded)
    assert hashed == [1] * (kind == "static") + [6]
    check(layer)
    assert hashed == [1] * (kind == "static") + [6]


def test_the_rows_of_a_filled_layer_go_to_the_host_and_come_back():
    with FakeTensorMode():  # tensors of a GPU that is not there
        layer = DynamicLayer()
        layer.update(*torch.zeros(2, 1, 2, 6, 16, device="cuda"))
        carry_codes(
            layer, Encoder(lambda k: torch.zeros(*k.shape[:3], 4, dtype=torch.int32, device=k.device)), HostLayer
        )
        assert {layer.keys.device.type, layer.values.device.type} == {"cpu"}
        assert layer.codes.device.type == "cuda"
        drop_codes(layer)
        assert {layer.keys.device.type, layer.values.device.type} == {"cuda"}


@pytest.mark.parametrize("kind", KINDS)
def test_an_empty_layer_takes_no_memory(kind):
    assert make(kind).memory() == (0, 0)


def test_what_a_static_layer_adds_stays_in_place_and_is_empty_after_a_reset():
    layer = make("static")
    update(layer, 6, 0)
    check_means(layer, None, 1)
    added = [layer.codes, *layer.means.tensors]
    assert all(hasattr(x, "_dynamo_static_input_type") for x in added)  # as torch._dynamo.mark_static_address says it
    assert layer.codes.any()
    layer.reset()
    assert layer.codes is added[0]
    assert not layer.codes.any()


@pytest.mark.parametrize("kind", KINDS)
def test_after_a_reset_the_means_are_those_of_the_new_text(kind):
    layer = make(kind)
    update(layer, 6, 0)
    check_all(layer)
    layer.reset()
    update(layer, 9, 1)  # of as many sequences and longer: the sums of the old text would fit
    check_all(layer)


def test_reordering_an_empty_static_layer_leaves_its_room():
    layer = make("static")
    update(layer, 6, 0)
    layer.reset()
    layer.reorder_cache(torch.tensor([0]))
    update(layer, 6, 1)
    check(layer)


def test_a_buffer_without_rows_says_so():
    with pytest.raises(ValueError, match="empty"):
        GrowingBuffer().view()
    assert GrowingBuffer().nbytes == 0


def test_rows_of_others_are_never_written_to():
    theirs = torch.arange(12.0).view(1, 1, 6, 2)
    buffer, before = GrowingBuffer(), theirs.clone()
    buffer.adopt(theirs)
    buffer.truncate(4)
    buffer.append(torch.full((1, 1, 2, 2), -1.0))
    assert torch.equal(theirs, before)
    assert torch.equal(buffer.view()[0, 0, :, 0], torch.tensor([0.0, 2.0, 4.0, 6.0, -1.0, -1.0]))
    held = buffer.view()
    buffer.append(torch.zeros(1, 1, 1, 2))  # its own room is used
    assert buffer.view().data_ptr() == held.data_ptr()
