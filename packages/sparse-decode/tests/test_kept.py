"""Launches that are kept from call to call are those that a fresh call makes, whatever else is called between."""

import ctypes
import pathlib
import sys
import threading

import pytest
import sparse_decode
import torch
from hashcore.cuda import operands, tensor_search, tensors
from hashtrain import HasherConfig, ModelShape
from hashtrain.artefact.hasher import make_layer
from sparse_decode.cuda import encode as encode_cuda
from sparse_decode.cuda import encode_weights, gather
from sparse_decode.sums import FOLD, Rounded
from sparse_decode.unselected import remainder

TABLES = encode_cuda._calls, gather._calls, remainder._calls, tensor_search._searches
HALF, OTHER = torch.bfloat16, torch.float16


def within(shape, dtype=HALF, room=0):
    """A tensor whose tokens, dimension 2, lie in memory for `room` more."""
    batch, heads, tokens, width = shape
    return torch.zeros(batch, heads, tokens + room, width, dtype=dtype)[:, :, :tokens]


def hashing(variant, bits=128):
    config = HasherConfig(variant, ModelShape(1, 8, 2, 64), bits=bits, hidden=128, planes=3)
    layer = make_layer(config, 0, 0).requires_grad_(False)
    return encode_weights.found_in(layer)


def hash_keys(variant="transform", batch=1, tokens=1, dtype=HALF, room=0, at=False, bits=128, heads=2):
    known, x = hashing(variant, bits), torch.zeros(batch, 2, tokens, 64, dtype=dtype)
    codes = within((batch, heads, tokens, known.hows[0].join * bits // 32), torch.int32, room)
    given = x, known.key, known.digits, codes, torch.tensor(0) if at else None
    return encode_cuda.hash_keys, given, {}


def hash_queries(variant="transform", batch=1, tokens=1, dtype=HALF, bits=128, heads=False, narrow=False, **how):
    known, x = hashing(variant, bits), torch.zeros(batch, 8, tokens, 64, dtype=dtype)
    weights = encode_weights._narrowed(known.query) if narrow else known.query
    return encode_cuda.hash_queries, (x, weights, known.digits, known.hows[heads]._replace(**how)), {}


def hash_step(variant="transform", batch=1, dtype=HALF, room=0):
    known = hashing(variant)
    k, q = (torch.zeros(batch, heads, 1, 64, dtype=dtype) for heads in (2, 8))
    codes = within((batch, 2, 1, known.hows[0].join * 4), torch.int32, room)
    return encode_cuda.hash_step, (k, known.key, q, known.query, known.digits, codes, known.hows[0]), {}


def attend(n=90, width=20, rooms=(0, 0), dtype=HALF, sets=2, scaling=0.1, ends=(1, 4), more=(), value_dim=64):
    q = torch.zeros(1, 8, 1, 64, dtype=dtype)
    k, v = within((1, 2, n, 64), dtype, rooms[0]), within((1, 2, n, value_dim), dtype, rooms[1])
    rest = {"ends": ends}
    if "always" in more:
        rest["always"] = torch.zeros(1, 3, dtype=torch.int64)
    if "left_out" in more:
        kinds = (8, 5), (1, 2, 1, 64), (1, 8, 1, value_dim)
        rest["left_out"] = [*(torch.zeros(x) for x in kinds), torch.ones(1, 1, dtype=torch.int64)]
    sinks = torch.zeros(8) if "sinks" in more else None
    indices = torch.zeros(1, sets, 1, width, dtype=torch.int64)
    return gather.attend, (q, k, v, indices, scaling, None, sinks), rest


def add_token(n=19, rooms=(0, 0), dtype=HALF, padded=0, folds=False):
    q, slopes = torch.zeros(2, 4, 64, dtype=dtype), torch.zeros(4)
    k, v = (within((2, 2, n, 64), dtype, room) for room in rooms)
    keys, spread = torch.zeros(2, 2, 64).double(), torch.zeros(2, 2, 64, 64)
    sums = keys, keys.clone(), spread, *Rounded.of(spread), n - FOLD if folds else n - 1
    shown = torch.ones(2, n + padded, dtype=torch.bool)[:, :n]
    rows = (torch.ones(2, 1, dtype=torch.int64), shown, shown[:, :-1]) if padded else ()
    return remainder.add_token, (q, slopes, k, v, *sums, *rows), {}


def search(n=300, k=20, room=0, wide=False, bounds=(300, 0, 1, 4), planes=3):
    query = torch.zeros(2, 3, planes, 4, dtype=torch.int32)
    keys = within((2, 3, n, 4), torch.int32, room)
    width = 20 if isinstance(k, torch.Tensor) else k
    scores = torch.zeros(2, 3, width, dtype=torch.int32)
    indices = torch.zeros(2, 3, width, dtype=torch.int64 if wide else torch.int32)
    weights = tuple(1 << p for p in range(planes))
    return tensor_search.search, (query, keys, k, weights, operands.Bounds(*bounds), scores, indices), {}


ROWS, WIDE = (torch.full((2, 1), 7, dtype=kind) for kind in (torch.int32, torch.int64))
CALLS = {
    "hash_keys": (
        *({}, {"room": 5}, {"room": 9}, {"tokens": 3}, {"batch": 2}, {"dtype": OTHER}, {"at": True}),
        *({"variant": "planes"}, {"variant": "lsh"}, {"variant": "paper"}, {"bits": 64}, {"heads": 8}),
    ),
    "hash_queries": (
        *({}, {"tokens": 3}, {"batch": 2}, {"dtype": OTHER}, {"variant": "planes"}, {"heads": True}, {"planes": 2}),
        *({"variant": "lsh"}, {"variant": "paper"}, {"bits": 64}, {"narrow": True}),
    ),
    "hash_step": ({}, {"batch": 2}, {"dtype": OTHER}, {"variant": "lsh"}, {"variant": "paper"}, {"room": 5}),
    "attend": (
        *(
            {},
            {"rooms": (6, 0)},
            {"rooms": (0, 6)},
            {"n": 93},
            {"width": 200},
            {"dtype": OTHER},
            {"sets": 8},
            {"scaling": 0.2},
        ),
        *({"ends": (0, 0)}, {"value_dim": 32}, {"more": ("sinks",)}, {"more": ("left_out",)}, {"more": ("always",)}),
    ),
    "add_token": (
        *({}, {"rooms": (5, 0)}, {"rooms": (0, 5)}, {"n": 22}, {"dtype": OTHER}, {"padded": 1}, {"padded": 3}),
        {"folds": True},
    ),
    "search": (
        *({}, {"room": 5}, {"room": 9}, {"n": 303}, {"k": 9}, {"wide": True}, {"bounds": (200, 3, 0, 0)}),
        *({"bounds": (ROWS,)}, {"bounds": (None, ROWS)}, {"k": ROWS}, {"planes": 2}),
        *({"bounds": (WIDE, ROWS)}, {"bounds": (ROWS, WIDE)}, {"k": WIDE}),
    ),
}
MAKE = {
    "hash_keys": hash_keys,
    "hash_queries": hash_queries,
    "hash_step": hash_step,
    "attend": attend,
    "add_token": add_token,
}
MAKE["search"] = search


def named(given):
    """Names of the addresses of what was given."""
    names = {}
    for number, x in enumerate(given):
        for place, one in enumerate(x if isinstance(x, list | tuple) else [x]):
            if isinstance(one, torch.Tensor):
                names[one.data_ptr()] = number, place
    return names


def said(argument, names):
    """What an argument of a kernel says: an address by its name, "new" for what the call allocated."""
    if isinstance(argument, ctypes.Structure):
        fields = [(name, kind, getattr(argument, name)) for name, kind in argument._fields_]
        return [
            (name, said(ctypes.c_void_p(value) if kind is ctypes.c_void_p else value, names))
            for name, kind, value in fields
        ]
    if isinstance(argument, ctypes.Array):
        return [said(x, names) for x in argument]
    if isinstance(argument, ctypes.c_void_p):
        return names.get(argument.value, "new") if argument.value else None
    return getattr(argument, "value", argument)


def launched(call, given, rest):
    """What is launched: all but the addresses of new memory."""
    names, seen = named((*given, *rest.values())), []

    def run(launches, device, folder=None):
        for one in launches:
            assert [ctypes.addressof(x) for x in one.arguments] == list(one.pointers)
            arguments = [said(x, names) for x in one.arguments]
            seen.append((one.source, one.macros, one.kernel, one.grid, one.threads, one.programmatic, arguments))

    call(*given, **rest, run=run)
    return seen


def forget():
    for table in TABLES:
        table.found.clear()


@pytest.mark.parametrize("name", CALLS)
def test_kept_launches_are_those_of_a_fresh_call(name):
    """Of other addresses, shapes, strides and types, each after all the others."""
    made = [MAKE[name](**how) for how in CALLS[name]]
    fresh = []
    for one in made:
        forget()
        fresh.append(launched(*one))
    assert len({str(x) for x in fresh}) == len(fresh)
    forget()
    elsewhere = [MAKE[name](**how) for how in CALLS[name]]
    for calls in (made, elsewhere):
        assert [launched(*one) for one in calls] == fresh
    assert [launched(*one) for one in reversed(made)] == fresh[::-1]


@pytest.mark.parametrize("name", CALLS)
def test_another_call_of_a_form_describes_nothing_again(name, monkeypatch):
    made = [MAKE[name](**how) for how in CALLS[name]]
    expected = [launched(*one) for one in made]
    for module in (encode_cuda, gather, remainder, tensors.kernels):
        monkeypatch.setattr(module, "make_launch", lambda *_, **__: pytest.fail("described again"))
    assert [launched(*one) for one in made] == expected


@pytest.mark.parametrize(
    ("name", "file"), [("hash_step", "encode_cuda"), ("add_token", "remainder"), ("attend", "gather")]
)
def test_another_launch_of_a_step_crosses_one_file_of_this_package(name, file):
    call, given, rest = MAKE[name]()
    crossed, layer = set(), make_layer(HasherConfig("transform", ModelShape(1, 8, 2, 64)), 0, 0).requires_grad_(False)
    if name == "hash_step":  # as for a hasher that has been placed on a device
        encode_weights.place(layer)
        known, (k, _, q, *_, codes, _) = encode_weights.placed[id(layer)], given
        given = k, known.key, q, known.query, known.digits, codes, known.hows[0]

    def note(frame, event, _):
        path = pathlib.Path(frame.f_code.co_filename)
        if event == "call" and pathlib.Path(sparse_decode.__file__).parent in path.parents:
            crossed.add(path.stem)

    call(*given, **rest, run=lambda *_: None)
    sys.setprofile(note)
    try:
        call(*given, **rest, run=lambda *_: None)
    finally:
        sys.setprofile(None)
    assert crossed == {file}


@pytest.mark.parametrize("name", CALLS)
def test_threads_keep_launches_of_their_own(name):
    one = MAKE[name]()
    table = [launched(*one) and len(table.found) for table in TABLES]
    other = []
    thread = threading.Thread(target=lambda: other.extend(len(table.found) for table in TABLES))
    thread.start()
    thread.join()
    assert any(table)
    assert other == [0] * len(TABLES)


def growing(name, lengths, **how):
    """Calls over a cache that has room for more: keys of other strides, where nobody keeps room, too."""
    rooms = {"attend": lambda n: {"rooms": (400 - n, 0)}, "add_token": lambda n: {"rooms": (0, 400 - n)}}
    rooms["search"] = lambda n: {"room": 9000 - n, "bounds": (n, 0, 1, 4)}
    return [MAKE[name](n=n, **rooms[name](n), **how) for n in lengths]


@pytest.mark.parametrize(
    ("name", "lengths", "how"),
    [
        ("attend", (1, 2, 3, 4, 5, 6), {}),
        ("attend", (90, 91, 92, 93), {"more": ("sinks", "left_out")}),
        ("attend", (90, 91, 92), {"more": ("always",)}),
        ("add_token", (19, 20, 21), {}),
        ("add_token", (19, 20, 21), {"padded": 3}),
        ("search", (298, 299, 300, 301), {}),
        ("search", (298, 299, 300), {"k": ROWS}),
    ],
)
def test_launches_of_a_cache_that_grows_are_written_anew(name, lengths, how, monkeypatch):
    made, fresh = growing(name, lengths, **how), []
    for one in made:
        forget()
        fresh.append(launched(*one))
    forget()
    assert launched(*made[0]) == fresh[0]
    for module in (gather, remainder, tensors.kernels):
        monkeypatch.setattr(module, "make_launch", lambda *_, **__: pytest.fail("described again"))
    assert [launched(*one) for one in made[1:]] == fresh[1:]
    assert [launched(*made[-1]), sum(len(table.found) for table in TABLES)] == [fresh[-1], 1]


@pytest.mark.parametrize(
    ("name", "lengths", "how"),
    [
        ("search", (2047, 2048, 2049, 2050, 2048, 2049), {}),  # a row has another part
        ("attend", (90, 91, 90, 91, 92), {}),  # tokens are taken off
        ("attend", (3, 4, 300, 4, 301, 5, 302, 6), {}),  # two caches
    ],
)
def test_launches_of_another_grid_are_described_anew(name, lengths, how, monkeypatch):
    monkeypatch.setattr(tensors, "SIMULATED_SMS", 24)  # enough to cut rows in parts
    made, fresh = growing(name, lengths, **how), []
    for one in made:
        forget()
        fresh.append(launched(*one))
    forget()
    assert [launched(*one) for one in made] == fresh
    forget()


def test_a_budget_that_grows_with_the_cache_is_written_anew_until_it_needs_another_grid():
    widths = (20, 20, 21, 22, 130, 131, 140)
    made = [attend(n=90 + i, width=width) for i, width in enumerate(widths)]
    made += [search(n=298 + i, k=width) for i, width in enumerate(widths)]
    fresh = []
    for one in made:
        forget()
        fresh.append(launched(*one))
    forget()
    assert [launched(*one) for one in made] == fresh
