"""A state machine of what is done to caches: attached layers against plain ones, and their codes against fresh ones.

    uv run packages/sparse-decode/tests/fuzz_cache.py --seconds 3600 --seed 7

Each round takes a kind of layer and a random list of acts: append (also in another type, or in inference mode), crop,
reorder, repeat, select and reset by the layer's methods; crop, prune and scale by hand; copies and pickles. After each
one, keys and values are those of a plain layer to which the same was done, and the codes and sums those of its keys.
`case` is the door for tools/fuzz.py.
"""

import copy
import pickle
import random
import sys
import time
from collections.abc import Callable

import numpy as np
import torch
from sparse_decode.caches.cache_encoder import Encoder
from sparse_decode.caches.cache_types import carry_codes
from sparse_decode.sums import Sums
from sparse_decode_layers import KINDS, ROOM, encode
from torch import Tensor
from transformers.cache_utils import LinearAttentionAndFullAttentionLayer

ROUND = 40  # acts on one layer
ALL_KINDS = {**KINDS, "hybrid": (LinearAttentionAndFullAttentionLayer, None)}
GROWING = ("dynamic", "host", "hybrid")  # may change in every way
ACTS = ("append",) * 4 + (
    "append_long",
    "append_type",
    "append_inference",
    "crop",
    "reorder",
    "repeat",
    "select",
    "reset",
    "crop_by_hand",
    "prune_by_hand",
    "scale_in_place",
    "replace_by_equal",
    "copy",
    "pickle",
    "attend",
)
FEW = {"static": ("append", "reorder", "reset", "scale_in_place", "copy", "pickle", "attend")}


class Pair:
    """An attached layer and a plain one, to which the same is done."""

    def __init__(self, kind: str, chance: random.Random):
        plain, self.coded = ALL_KINDS[kind]
        self.kind, self.chance = kind, chance
        self.layers = [plain(), plain()]
        self.batch = chance.randint(1, 3)
        if chance.random() < 0.5:
            self.append(chance.randint(1, 6))  # filled before it is attached
        self.attach()

    def attach(self) -> None:
        carry_codes(self.layers[0], Encoder(lambda k: encode(k.float())), self.coded)

    @property
    def length(self) -> int:
        return int(self.layers[1].get_seq_length())

    def append(self, tokens: int, kind: torch.dtype = torch.float32, inference: bool = False) -> None:
        if self.kind == "static" and self.length + tokens > ROOM:
            return
        draw = torch.Generator().manual_seed(self.chance.randrange(1 << 30))
        k, v = torch.randint(-4, 5, (2, self.batch, 2, tokens, 16), generator=draw).to(kind)
        with torch.inference_mode(inference):
            found = self.layers[0].update(k.clone(), v.clone())
        expected = self.layers[1].update(k, v)  # which would be stuck with inference tensors
        n = self.length
        for one, other in zip(found, expected, strict=True):
            assert one.dtype == other.dtype
            assert torch.equal(one[:, :, :n], other[:, :, :n])

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
        elif n and name.endswith("by_hand"):
            pruned = sorted(chance.sample(range(n), (n + 1) // 2))
            kept = list(range(chance.randint(1, n))) if name == "crop_by_hand" else pruned
            self.both(lambda x: x[:, :, kept])
        elif n and name == "replace_by_equal":
            self.both(Tensor.clone)
        elif n and name == "attend":
            self._attend()

    def _append(self, name: str) -> None:
        kind = self.chance.choice((torch.bfloat16, torch.float32)) if name == "append_type" else torch.float32
        tokens = self.chance.randint(17, 90) if name == "append_long" else self.chance.randint(1, 4)
        self.append(tokens, kind, name == "append_inference")

    def _method(self, name: str) -> None:
        chance = self.chance
        if name == "crop":
            tokens = chance.randint(0, min(self.length - 1, 5))
            calls = "crop", -tokens
            if self.kind == "hybrid":
                return  # its recurrent state cannot be cropped
        elif name == "reorder":
            calls = "reorder_cache", torch.tensor([chance.randrange(self.batch) for _ in range(self.batch)])
        elif name == "repeat":
            if self.batch > 4:
                return
            calls = "batch_repeat_interleave", chance.randint(1, 2)
            self.batch *= calls[1]
        else:
            rows = chance.sample(range(self.batch), chance.randint(1, self.batch))
            calls, self.batch = ("batch_select_indices", torch.tensor(rows)), len(rows)
        for layer in self.layers:
            getattr(layer, calls[0])(calls[1])

    def _copy(self, way: str) -> None:
        before = self.layers[0]
        self.layers[0] = copy.deepcopy(before) if way == "copy" else pickle.loads(pickle.dumps(before))
        before.reset()  # must not show in the copy
        if way == "pickle":
            self.attach()

    def _attend(self) -> None:
        layer, n = self.layers[0], self.length
        _ = layer.codes
        first = max(0, n - self.chance.randint(1, 3))
        k, v = (x[:, :, :n].float() for x in (layer.keys, layer.values))
        both = ([sums.advance(k, v, None, end, k.device) for end in (first, n)][-1] for sums in (layer.sums, Sums()))
        for found, expected in zip(*both, strict=True):
            torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-4)

    def check(self) -> None:
        n = self.length
        assert int(self.layers[0].get_seq_length()) == n
        if not n:
            return
        keys, values = (x[:, :, :n] for x in (self.layers[0].keys, self.layers[0].values))
        assert torch.equal(keys, self.layers[1].keys[:, :, :n])
        assert torch.equal(values, self.layers[1].values[:, :, :n])
        assert torch.equal(self.layers[0].codes[:, :, :n], encode(keys.float()))


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


@torch.no_grad()
def case(rng: np.random.Generator) -> int:
    """Do one round that the generator draws; returns the steps done."""
    return run_round(int(rng.integers(1 << 62)))


def run(seconds: float, seed: int) -> int:
    """Do rounds until the time is over; returns the steps done. Raises: AssertionError if a law is broken."""
    end, steps, number = time.monotonic() + seconds, 0, 0
    while not steps or time.monotonic() < end:
        steps += run_round(seed * 1_000_003 + number)
        number += 1
    return steps


if __name__ == "__main__":
    import argparse

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    with torch.no_grad():
        print(f"{run(asked.seconds, asked.seed):,} steps", file=sys.stderr)
