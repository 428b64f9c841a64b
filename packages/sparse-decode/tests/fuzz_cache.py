"""A state machine of what is done to caches: attached layers against plain ones, and their codes against fresh ones.

    uv run tests/fuzz.py cache --seconds 3600

Each round takes a kind of layer and a random list of acts: append (also in another type, or in inference mode), crop,
reorder, repeat, select and reset by the layer's methods; crop, prune and scale by hand; numbers that are not finite in
one sequence; copies, pickles, another thread, a fork. After each one, keys and values are those of a plain layer to
which the same was done, and the codes and sums those of its keys; tensors that were kept are what they were.
`case` is the door for tests/fuzz.py.
"""

import copy
import os
import pickle
import random
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import hashcore
import numpy as np
import torch
from fuzz_places import somewhere
from sparse_decode.caches.cache import retype
from sparse_decode.caches.cache_encoder import Encoder
from sparse_decode.caches.growing import Owned
from sparse_decode.sums import Sums
from torch import Tensor
from transformers.cache_utils import DynamicLayer, LinearAttentionAndFullAttentionLayer, StaticLayer

ROUND = 40  # acts on one layer
ROOM = 64
WEIGHTS = torch.randint(0, 2, (2, 16, 128), generator=torch.Generator().manual_seed(0)).float() * 2 - 1
KINDS = {"dynamic": DynamicLayer, "host": DynamicLayer, "static": lambda: StaticLayer(ROOM)}
ALL_KINDS = {**KINDS, "hybrid": LinearAttentionAndFullAttentionLayer, "growing": DynamicLayer}
ANY = (
    *("append", "append", "append", "append", "append_poison", "reorder", "reset", "scale_in_place"),
    *("copy", "pickle", "attend", "thread", "fork"),
)
ACTS = (
    *(*ANY, "append_long", "append_type", "append_inference", "crop", "repeat", "select", "keep"),
    *("crop_by_hand", "prune_by_hand", "replace_by_equal"),
)
FEW = {"static": ANY}


def encode(k: Tensor) -> Tensor:
    return hashcore.pack(k @ WEIGHTS)  # whole numbers times signs: exact


def encoder_by(encode: Callable[[Tensor], Tensor]) -> Encoder:
    """Make an encoder that hashes keys by a function."""
    selector: Any = SimpleNamespace(encode_keys=lambda layer, k: encode(k))
    return Encoder(selector, 0)


class Pair:
    """An attached layer and a plain one, to which the same is done."""

    def __init__(self, kind: str, chance: random.Random):
        plain = ALL_KINDS[kind]
        self.kind, self.chance = kind, chance
        self.layers, self.owned = [plain(), plain()], Owned()
        self.kept = []
        self.starts = None  # of the sequences, behind their padding
        self.batch = chance.randint(1, 3)
        if chance.random() < 0.5:
            self.append(chance.randint(1, 6))  # filled before it is attached
        self.attach()

    def attach(self) -> None:
        encoder = None if self.kind == "growing" else encoder_by(lambda k: encode(k.float()))
        retype(self.layers[0], self.owned, encoder, self.kind == "host")

    @property
    def length(self) -> int:
        return int(self.layers[1].get_seq_length())

    def append(
        self, tokens: int, kind: torch.dtype = torch.float32, inference: bool = False, poison: float = 0
    ) -> None:
        if self.kind == "static" and self.length + tokens > ROOM:
            return
        draw = torch.Generator().manual_seed(self.chance.randrange(1 << 30))
        k, v = torch.randint(-4, 5, (2, self.batch, 2, tokens, 16), generator=draw).to(kind)
        if poison:
            k[self.chance.randrange(self.batch), :, -1, 3] = v[self.chance.randrange(self.batch), :, 0, 5] = poison
        with torch.inference_mode(inference and self.kind != "growing"):  # which is plain here: stuck, too
            found = self.layers[0].update(k.clone(), v.clone())
        expected = self.layers[1].update(k, v)  # which would be stuck with inference tensors
        n = self.length
        for one, other in zip(found, expected, strict=True):
            assert one.dtype == other.dtype
            assert same(one[:, :, :n], other[:, :, :n])

    def both(self, change: Callable[[Tensor], Tensor]) -> None:
        """Replace keys and values of both layers by a change of them."""
        for layer in self.layers:
            layer.keys, layer.values = change(layer.keys), change(layer.values)

    def act(self, name: str) -> None:
        chance, n = self.chance, self.length
        if name.startswith("append"):
            return self._append(name)
        if name == "reset":
            for layer in self.layers:
                layer.reset()
            self.starts = None
            self.batch = self.batch if self.kind == "static" else chance.randint(1, 3)
        elif n and name in ("crop", "reorder", "repeat", "select"):
            self._method(name)
        elif n and name in ("copy", "pickle"):
            self._copy(name)
        elif n and name == "scale_in_place":
            at, by = chance.randrange(n), chance.choice((-1, 0))
            for layer in self.layers:
                layer.keys[:, :, at] *= by
                layer.values[:, :, at] *= by
            self.kept.clear()  # they may be views of what was written
        elif n and name == "keep":
            self.kept += [(x, x.clone()) for x in (self.layers[0].keys, self.layers[0].values)]
        elif n and name.endswith("by_hand"):
            pruned = sorted(chance.sample(range(n), (n + 1) // 2))
            kept = list(range(chance.randint(1, n))) if name == "crop_by_hand" else pruned
            self.both(lambda x: x[:, :, kept])
        elif n and name == "replace_by_equal":
            self.both(Tensor.clone)
        elif n and name == "attend":
            self._attend()
        elif name in ("thread", "fork"):
            self._elsewhere(name)

    def _append(self, name: str) -> None:
        kind = self.chance.choice((torch.bfloat16, torch.float32)) if name == "append_type" else torch.float32
        tokens = self.chance.randint(17, 90) if name == "append_long" else self.chance.randint(1, 4)
        poison = self.chance.choice((torch.nan, torch.inf)) if name == "append_poison" else 0
        self.append(tokens, kind, name == "append_inference", poison)

    def _method(self, name: str) -> None:
        chance, rows = self.chance, list(range(self.batch))
        if name == "crop":
            if self.kind == "hybrid":
                return  # its recurrent state cannot be cropped
            call, given = "crop", -chance.randint(0, min(self.length - 1, 5))
        elif name == "reorder":
            rows = [chance.randrange(self.batch) for _ in rows]
            call, given = "reorder_cache", torch.tensor(rows)
        elif name == "repeat":
            given = chance.randint(1, 2) if self.batch < 5 else 1
            call, rows = "batch_repeat_interleave", [row for row in rows for _ in range(given)]
        else:
            rows = chance.sample(rows, chance.randint(1, self.batch))
            call, given = "batch_select_indices", torch.tensor(rows)
        for layer in self.layers:
            getattr(layer, call)(given)
        self.batch, self.starts = len(rows), None if self.starts is None else self.starts[rows]

    def _copy(self, way: str) -> None:
        before, stored = self.layers[0], pickle.dumps(self.layers[0])
        self.layers[0] = copy.deepcopy(before) if way == "copy" else pickle.loads(stored)
        before.reset()  # must not show in the copy
        if way == "pickle":
            assert b"sparse_decode" not in stored
            assert type(self.layers[0]) is type(self.layers[1])
            self.attach()

    def _elsewhere(self, way: str) -> None:
        """Append in another thread, or, one time in ten, in a fork, where it does not show here."""
        if way == "thread":
            thread = threading.Thread(target=torch.no_grad()(self.append), args=(2,))
            thread.start()
            return thread.join()
        if self.chance.random() < 0.9:
            return  # forks would take most of the time
        child = os.fork()
        if not child:
            torch.set_num_threads(1)  # the threads of torch are not copied
            wrong = 1
            try:
                self.append(1)
                self.check()
                wrong = 0
            finally:
                os._exit(wrong)
        assert os.waitpid(child, 0)[1] == 0

    def _attend(self) -> None:
        layer, n = self.layers[0], self.length
        if self.kind == "growing":
            return
        _ = layer.codes
        first = max(0, n - self.chance.randint(1, 3))
        if self.starts is None and self.chance.random() < 0.5:  # another text: other padding
            self.starts = torch.tensor([self.chance.randint(0, 3) for _ in range(self.batch)])
        k, v = (x[:, :, :n].float() for x in (layer.keys, layer.values))
        both = (
            [sums.advance(k, v, self.starts, end, k.device) for end in (first, n)][-1] for sums in (layer.sums, Sums())
        )
        finite = torch.stack([x.isfinite().flatten(1).all(1) for x in (k, v)]).all(0)
        for found, expected in zip(*both, strict=True):
            torch.testing.assert_close(found[finite], expected[finite], atol=1e-3, rtol=1e-4)

    def check(self) -> None:
        n = self.length
        assert int(self.layers[0].get_seq_length()) == n
        assert all(same(x, before) for x, before in self.kept)
        if not n:
            return
        keys, values = (x[:, :, :n] for x in (self.layers[0].keys, self.layers[0].values))
        assert same(keys, self.layers[1].keys[:, :, :n])
        assert same(values, self.layers[1].values[:, :, :n])
        if self.kind != "growing":
            assert torch.equal(self.layers[0].codes[:, :, :n], encode(keys.float()))


def same(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors have the same numbers, NaN in the same places."""
    return torch.equal(x.isnan(), y.isnan()) and torch.equal(x.nan_to_num(posinf=1e9), y.nan_to_num(posinf=1e9))


def run_round(seed: int, kind: str | None = None) -> int:
    """Do one round; returns the steps done. Raises: AssertionError with the acts so far if a law is broken."""
    chance = random.Random(seed)
    kind = kind or chance.choice(sorted(ALL_KINDS))
    pair, done = Pair(kind, chance), []
    for _ in range(ROUND):
        done.append(chance.choice(FEW.get(kind, ACTS)))
        try:
            pair.act(done[-1])
            if chance.random() < 0.7:  # not always: codes that nobody looks at are made later
                pair.check()
        except (AssertionError, RuntimeError, ValueError, TypeError, IndexError, AttributeError) as error:
            raise AssertionError(f"round {seed}, {kind}, after {', '.join(done)}: {error!r}") from error
    return ROUND


@somewhere
@torch.no_grad()
def case(rng: np.random.Generator) -> int:
    """Do one round that the generator draws; returns the steps done."""
    return run_round(int(rng.integers(1 << 62)))
