"""Launches that are kept from call to call are those that a fresh call makes, whatever else is called between."""

import ctypes
import threading

import pytest
import torch
from hashtrain import HasherConfig, ModelShape
from hashtrain.hasher import make_layer
from sparse_decode.cuda import encode, encode_weights, gather, sums
from sparse_decode.sums import FOLD, Sums

TABLES = encode._calls, gather._calls, sums._calls
HALF, OTHER = torch.bfloat16, torch.float16


def within(shape, dtype=HALF, room=0):
    """A tensor whose tokens, dimension 2, lie in memory for `room` more."""
    batch, heads, tokens, width = shape
    return torch.zeros(batch, heads, tokens + room, width, dtype=dtype)[:, :, :tokens]


def hashing(variant, bits=128):
    config = HasherConfig(variant, ModelShape(1, 8, 2, 64), bits=bits, hidden=128, planes=3)
    return encode_weights.found_in(make_layer(config, 0, 0).requires_grad_(False))


def hash_keys(variant="transform", batch=1, tokens=1, dtype=HALF, room=0, at=False, bits=128, heads=2):
    known, x = hashing(variant, bits), torch.zeros(batch, 2, tokens, 64, dtype=dtype)
    codes = within((batch, heads, tokens, known.hows[0].join * bits // 32), torch.int32, room)
    return encode.hash_keys, (x, known.key, known.digits, codes, torch.tensor(0) if at else None)


def hash_queries(variant="transform", batch=1, tokens=1, dtype=HALF, bits=128, heads=False, narrow=False, **how):
    known, x = hashing(variant, bits), torch.zeros(batch, 8, tokens, 64, dtype=dtype)
    weights = encode_weights._narrowed(known.query) if narrow else known.query
    return encode.hash_queries, (x, weights, known.digits, known.hows[heads]._replace(**how))


def hash_step(variant="transform", batch=1, dtype=HALF, room=0):
    known = hashing(variant)
    k, q = (torch.zeros(batch, heads, 1, 64, dtype=dtype) for heads in (2, 8))
    codes = within((batch, 2, 1, known.hows[0].join * 4), torch.int32, room)
    return encode.hash_step, (k, known.key, q, known.query, known.digits, codes, known.hows[0])


def attend(n=90, width=20, rooms=(0, 0), dtype=HALF, sets=2, scaling=0.1, ends=(1, 4), more=(), value_dim=64):
    q = torch.zeros(1, 8, 1, 64, dtype=dtype)
    k, v = within((1, 2, n, 64), dtype, rooms[0]), within((1, 2, n, value_dim), dtype, rooms[1])
    rest = [torch.zeros(x) for x in ((8, 5), (1, 2, 1, 64), (1, 8, 1, value_dim))]
    rest = [*rest, torch.ones(1, 1, dtype=torch.int64)] if "rest" in more else [None] * 4
    always = torch.zeros(1, 3, dtype=torch.int64) if "always" in more else None
    blocks = torch.zeros(1, 5, dtype=torch.int32) if "blocks" in more else None
    given = q, k, v, torch.zeros(1, sets, 1, width, dtype=torch.int64), scaling, None
    return gather.gather, (*given, torch.zeros(8) if "sinks" in more else None, *rest, *ends, always, blocks)


def add_token(n=19, rooms=(0, 0), dtype=HALF, padded=False, static=False, folds=False):
    q, slopes = torch.zeros(2, 4, 64, dtype=dtype), torch.zeros(4)
    k, v = (within((2, 2, n, 64), dtype, room) for room in rooms)
    state, interval = Sums.static(k, v).tensors, torch.zeros(2, 2, dtype=torch.int64)
    bounds = state[5:] if static else [state[5] if padded else None, None]
    given = *state[:5], *bounds, n - FOLD if folds else n - 1, interval if padded or static else None
    return sums.launch_sums, (q, slopes, k, v, *given)


CALLS = {
    hash_keys: (
        *({}, {"room": 5}, {"room": 9}, {"tokens": 3}, {"batch": 2}, {"dtype": OTHER}, {"at": True}),
        *({"variant": "planes"}, {"variant": "lsh"}, {"variant": "paper"}, {"bits": 64}, {"heads": 8}),
    ),
    hash_queries: (
        *({}, {"tokens": 3}, {"batch": 2}, {"dtype": OTHER}, {"variant": "planes"}, {"heads": True}, {"planes": 2}),
        *({"variant": "lsh"}, {"variant": "paper"}, {"bits": 64}, {"narrow": True}),
    ),
    hash_step: ({}, {"batch": 2}, {"dtype": OTHER}, {"variant": "lsh"}, {"variant": "paper"}, {"room": 5}),
    attend: (
        *({}, {"rooms": (6, 0)}, {"rooms": (0, 6)}, {"n": 93}, {"width": 200}, {"dtype": OTHER}, {"sets": 8}),
        *({"scaling": 0.2}, {"ends": (0, 0)}, {"value_dim": 32}, {"more": ("sinks",)}, {"more": ("rest",)}),
        *({"more": ("always",)}, {"n": 16, "more": ("always", "blocks")}),
    ),
    add_token: (
        *({}, {"rooms": (5, 0)}, {"rooms": (0, 5)}, {"n": 22}, {"dtype": OTHER}, {"padded": True}),
        *({"static": True}, {"folds": True}),
    ),
}


def said(argument, names):
    """What an argument of a kernel says: an address by its name, "new" for what the call allocated."""
    if isinstance(argument, ctypes.Structure):
        fields = [(name, kind, getattr(argument, name)) for name, kind in argument._fields_]
        return [
            (name, said(ctypes.c_void_p(value) if kind is ctypes.c_void_p else value, names))
            for name, kind, value in fields
        ]
    if isinstance(argument, ctypes.c_void_p):
        return names.get(argument.value, "new") if argument.value else None
    return getattr(argument, "value", argument)


def launched(call, given):
    """What is launched: all but the addresses of new memory."""
    seen, names = [], {}
    for number, x in enumerate(given):
        for place, one in enumerate(x if isinstance(x, list | tuple) else [x]):
            if isinstance(one, torch.Tensor):
                names[one.data_ptr()] = number, place

    def run(launches, device, folder=None):
        for one in launches:
            assert [ctypes.addressof(x) for x in one.arguments] == list(one.pointers)
            arguments = [said(x, names) for x in one.arguments]
            seen.append((one.source, one.macros, one.kernel, one.grid, one.threads, one.programmatic, arguments))

    call(*given, run=run)
    return seen


def anew(calls):
    """What each launches if nothing is kept."""
    found = []
    for one in calls:
        forget()
        found.append(launched(*one))
    forget()
    return found


def forget():
    for table in TABLES:
        table.found.clear()


@pytest.fixture
def nothing_described(monkeypatch):
    def forbid():
        for module in (encode, gather, sums):
            monkeypatch.setattr(module, "make_launch", lambda *_, **__: pytest.fail("described again"))

    return forbid


@pytest.mark.parametrize("make", CALLS)
def test_kept_launches_are_those_of_a_fresh_call(make, nothing_described):
    """Of other addresses, shapes, strides and types, each after all the others; then no form is described again."""
    made, elsewhere = ([make(**how) for how in CALLS[make]] for _ in range(2))
    fresh = anew(made)
    assert len({str(x) for x in fresh}) == len(fresh)
    for calls in (made, elsewhere):
        assert [launched(*one) for one in calls] == fresh
    assert [launched(*one) for one in reversed(made)] == fresh[::-1]
    nothing_described()
    assert [launched(*one) for one in made] == fresh


@pytest.mark.parametrize("make", CALLS)
def test_threads_keep_launches_of_their_own(make):
    assert launched(*make())
    other = []
    thread = threading.Thread(target=lambda: other.extend(len(table.found) for table in TABLES))
    assert any(len(table.found) for table in TABLES)
    thread.start()
    thread.join()
    assert other == [0] * len(TABLES)


GROWING = [
    (attend, range(1, 7), {}, True),
    (attend, range(90, 94), {"more": ("sinks", "rest")}, True),
    (attend, range(90, 93), {"more": ("always",)}, True),
    (add_token, range(19, 22), {}, True),
    (add_token, range(19, 22), {"padded": True}, True),
    (attend, (90, 91, 90, 91, 92), {}, False),  # tokens are taken off
    (attend, (3, 4, 300, 4, 301, 5, 302, 6), {}, False),  # two caches
]


@pytest.mark.parametrize(("make", "lengths", "how", "same_grid"), GROWING)
def test_launches_of_a_cache_that_grows_are_written_anew(make, lengths, how, same_grid, nothing_described):
    """A cache that has room for more: keys of other strides, where nobody keeps room, too."""
    made = [make(n=n, rooms=(400 - n, 0) if make is attend else (0, 400 - n), **how) for n in lengths]
    fresh = anew(made)
    assert launched(*made[0]) == fresh[0]
    if same_grid:
        nothing_described()
    assert [launched(*one) for one in made[1:]] == fresh[1:]
    assert not same_grid or sum(len(table.found) for table in TABLES) == 1


def test_a_budget_that_grows_with_the_cache_is_written_anew_until_it_needs_another_grid():
    made = [attend(n=90 + i, width=width) for i, width in enumerate((20, 20, 21, 22, 130, 131, 140))]
    assert [launched(*one) for one in made] == anew(made)
