"""Time exact mode beside dense steps, at an acceptance that is given, and compare with what `pace` predicts.

    uv run packages/sparse-decode/benchmarks/exact_speed.py --out docs/results/exact_speed.json

Random weights of published shapes, caches of random numbers, untrained `transform` hashers: none affects the time of a
step, but drafts would be refused. So the number of accepted drafts is drawn: each is accepted with the chance that
SmolLM2 shows (docs/results/exact.json). All else is what `generate` does: drafts until `pace` has enough of them, one
dense pass over them and the token before, and the cache cropped to what was accepted.

transformers  a step of the model as it is
dense         a dense step of the attached model: our kernel, and a cache that grows in place
exact         a round of exact mode, as `pace` chooses; a dense step where it drafts none
k drafts      rounds that always draft k tokens, also where `pace` would not

Ways take turns in one process. Milliseconds a token are medians over the turns. `predicted` is the gain over dense
steps by `pace`'s costs. Requirement: exact mode makes at least 0.95 times the tokens of dense steps at every length.
The last line is JSON; the exit status is 1 if the requirement is not met.
"""

import argparse
import copy
import pathlib
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from never_slower import step_of
from results import machine, store
from shapes import SHAPES, make_hasher, make_model
from sparse_decode import Attachment, attach
from transformers import DynamicCache, PreTrainedModel

CASES = {"smollm2-135m": [8192, 32768], "qwen2.5-0.5b": [8192, 32768, 131072]}
ACCEPTED = 0.99
MOST = 8
ALWAYS = 2, 4
ASKED = 0.95
TURNS, TOKENS = 5, 8
LONGEST = 0.5  # seconds: slower dense steps are timed once a turn

Turn = Callable[[], tuple[float, int]]
"""Runs a way once: seconds, and tokens made."""


class Rounds:
    """Rounds of exact mode on a cache, with accepted drafts drawn at random.

    Attributes: seconds, counts: of each kind of pass, "draft" per token and "check" by number of rows.
    """

    def __init__(self, model: PreTrainedModel, attachment: Attachment, cache: DynamicCache, chance: float):
        assert attachment.drafts is not None
        self._model, self._cache, self._drafts = model, cache, attachment.drafts
        self._chance, self._draw = chance, random.Random(0)
        self.pace: Any = attachment.drafts.pace()
        self.passes: dict[str, list[float]] = {}

    def _pass(self, rows: int) -> None:
        n = self._cache.get_seq_length()
        ids, at = torch.zeros(1, rows, dtype=torch.long), torch.arange(n, n + rows)[None]
        self._model(ids, past_key_values=self._cache, position_ids=at)

    def round(self, drafts: int) -> tuple[float, int]:
        """Draft, check, and take the tokens back; return seconds and the number of tokens made."""
        n, began = self._cache.get_seq_length(), time.perf_counter()
        if drafts:
            with self._drafts.adding(self._cache):
                for _ in range(drafts):
                    self._pass(1)
        between = time.perf_counter()
        self._pass(drafts + 1)
        accepted = next((i for i in range(drafts) if self._draw.random() > self._chance), drafts)
        self._cache.crop(accepted - drafts)
        ended = time.perf_counter()
        self._cache.crop(n - self._cache.get_seq_length())
        if drafts:
            self.pace.learn(drafts, accepted)
            self.passes.setdefault("draft", []).append((between - began) / drafts)
        self.passes.setdefault(f"check {drafts + 1}", []).append(ended - between)
        return ended - began, accepted + 1

    def turn(self, drafts: int | None) -> tuple[float, int]:
        """Run rounds until enough tokens are made; drafts: in each round; None: as many as `pace` chooses."""
        seconds, tokens = 0.0, 0
        while tokens < TOKENS and (not tokens or drafts or seconds < LONGEST):
            taken, made = self.round(self.pace.next(self._cache.get_seq_length()) if drafts is None else drafts)
            seconds, tokens = seconds + taken, tokens + made
        return seconds, tokens


def plain_turn(model: PreTrainedModel, keys_values: list[torch.Tensor]) -> Turn:
    """Return a turn of the model as it is."""
    step, cache = step_of(model, keys_values)

    def turn() -> tuple[float, int]:
        began, tokens = time.perf_counter(), 0
        while tokens < TOKENS and (not tokens or time.perf_counter() - began < LONGEST):
            step()
            tokens += 1
        taken = time.perf_counter() - began
        cache.crop(-tokens)
        return taken, tokens

    return turn


@torch.no_grad()
def measure(model: PreTrainedModel, n: int, turns: int, chance: float) -> dict[str, Any]:
    """Time all ways in turn at a context of n random tokens."""
    config: Any = model.config
    size = 2, 1, config.num_key_value_heads, n, config.hidden_size // config.num_attention_heads
    drawn = [torch.empty(size, dtype=model.dtype).normal_() for _ in range(config.num_hidden_layers)]
    ours = copy.deepcopy(model, {id(p): p for p in model.parameters()})
    with attach(ours, make_hasher(model), exact=MOST) as attachment:
        plain = plain_turn(model, drawn)
        rounds = Rounds(ours, attachment, step_of(ours, drawn)[1], chance)
        del drawn
        ways: dict[str, Turn] = {"transformers": plain, "dense": lambda: rounds.turn(0)}
        ways["exact"] = lambda: rounds.turn(None)
        ways |= {f"{k} drafts": (lambda k=k: rounds.turn(k)) for k in ALWAYS}
        for way in ways.values():
            way()  # warm-up; and `pace` learns the acceptance
        rounds.passes.clear()
        taken: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(turns):
            for name, way in ways.items():
                seconds, tokens = way()
                taken[name].append(1e3 * seconds / tokens)
        return {"n": n, **_summary(taken, rounds, n, chance)}


def _summary(taken: dict[str, list[float]], rounds: Rounds, n: int, chance: float) -> dict[str, Any]:
    """Return medians, and the costs of passes in dense steps, measured and predicted."""
    costs, pace = rounds.pace._costs, rounds.pace
    gains = {name: [a / b for a, b in zip(taken["dense"], times, strict=True)] for name, times in taken.items()}
    passes = {name: statistics.median(times) for name, times in rounds.passes.items()}
    one = costs.check(n, 1)
    foreseen = {
        name: costs.draft(n) / one if name == "draft" else costs.check(n, int(name.split()[1])) / one for name in passes
    }
    drafted, gain = pace._best(n, chance)
    return {
        "ms": {name: round(statistics.median(times), 2) for name, times in taken.items()},
        "gain": {name: round(statistics.median(ratios), 3) for name, ratios in gains.items()},
        "chosen": pace.next(n),
        "predicted": {"drafts": drafted if gain > 1 else 0, "gain": round(max(1.0, gain), 3)},
        "passes": {
            name: {"measured": round(seconds / passes["check 1"], 3), "predicted": round(foreseen[name], 3)}
            for name, seconds in sorted(passes.items())
        },
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, help="default: all")
    parser.add_argument("--layers", type=int, help="number of layers; default: those of the shape")
    parser.add_argument("--lengths", type=int, nargs="+", help=f"default: {CASES}")
    parser.add_argument("--turns", type=int, default=TURNS)
    parser.add_argument("--accepted", type=float, default=ACCEPTED, help="chance of a draft to be accepted")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=pathlib.Path)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    torch.manual_seed(0)
    rows = []
    for shape, lengths in CASES.items():
        if given.shape not in (None, shape):
            continue
        model = make_model(None, shape, given.layers)
        for n in given.lengths or lengths:
            rows.append({"model": shape, **measure(model, n, given.turns, given.accepted)})
            print(rows[-1], flush=True)
    missed = [f"{row['model']} at {row['n']:,}" for row in rows if row["gain"]["exact"] < ASKED]
    about = {"asked": ASKED, "accepted": given.accepted, "most": MOST, "turns": given.turns, "missed": missed}
    store({**machine(), **about, "rows": rows}, given.out)
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
