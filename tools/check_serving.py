"""Check sparse-serve inside vLLM, on the CPU, with the Python of an environment that has both.

    PYTHON tools/check_serving.py --hasher path/or/hasher/of/the/demo/model
    PYTHON tools/check_serving.py --hasher path/or/hasher --parts exact budgets crossing arrivals ranks
    PYTHON tools/check_serving.py --hasher path/or/hasher --out docs/results/serving_checks.json  # store what was found
    PYTHON tools/check_serving.py --quick          # what CI runs: an untrained hash, few engines

Every engine runs in its own process. exact: at a budget of 100 % the tokens match vLLM without the plug-in. budgets: at
25 and 2 % they match `attach`, except at near-ties. Each uses 16 ragged requests, two of them with a shared prefix,
twice: with a cold and with a warm prefix cache; pages of 32 and 128 tokens, with chunks of 64 and 2,048 each. crossing:
the same where requests reach a break-even, at 100 and 25 %. arrivals: the same at 100, 25 and 2 %, with requests that
arrive between the engine's steps. ranks: with tensor parallelism of 2. preemption: at least 20 preemptions, and all
tokens correct. poison: NaN and wrong codes in all unowned pages, at every step. others: tiny random models of other
families, with untrained hashes. Exit code 1, with a list, if anything is wrong. tools/check_server.py checks the
server.
"""

import argparse
import functools
import pathlib
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from serving_checks.compare import LENGTHS, differences, expected_counts, requests
from serving_checks.jobs import ask
from serving_checks.models import TINY, hash_of
from serving_checks.record import Record, how_made

NEW = 24
PREEMPTED = 20
BELOW = 210  # a break-even that some requests reach while they are answered
PAGES = ((32, 64), (128, 2048), (32, 2048), (128, 64))  # tokens per page, tokens per step


@dataclass(frozen=True)
class Case:
    """A model, its hasher, the prompts, and the number of its sparse layers times query heads."""

    model: str
    hasher: str
    prompts: list[list[int]]
    heads: int
    record: Record
    pages: tuple[tuple[int, int], ...] = PAGES

    def asked(self, fraction: float, below: int = 0) -> dict[str, Any]:
        return {"hasher": self.hasher, "fraction": fraction, "dense_below": below}

    def engine(self, fraction: float | None, page: int, chunk: int, below: int = 0, **more: Any) -> dict[str, Any]:
        """Run all prompts twice in one engine, at a budget, or without the plug-in."""
        job = {"model": self.model, "prompts": self.prompts, "new": NEW, "page": page, "chunk": chunk}
        return ask("engine", **(job | more), spotlight=None if fraction is None else self.asked(fraction, below))

    def attached(self, fraction: float, below: int = 0) -> dict[str, Any]:
        return ask("attached", model=self.model, prompts=self.prompts, new=NEW, spotlight=self.asked(fraction, below))


def say(text: str) -> None:
    print(text, flush=True)


def exact(case: Case) -> list[str]:
    wrong = []
    for page, chunk in case.pages:
        stock, ours = case.engine(None, page, chunk), case.engine(1.0, page, chunk)
        equal = [
            sum(a == b for a, b in zip(x, y, strict=True)) for x, y in zip(stock["tokens"], ours["tokens"], strict=True)
        ]
        count, expected = len(case.prompts), expected_counts(case.prompts, NEW, 1.0)
        say(
            f"whole budget, pages of {page}, chunks of {chunk}: equal cold {equal[0]}/{count}, warm "
            f"{equal[1]}/{count}; from prefixes {ours['cached']}; tokens read and seen {ours['counts']}"
        )
        case.record.add(what="100%", page=page, chunk=chunk, answers=2 * count, equal=sum(equal))
        good = equal == [count, count] and ours["cached"] == stock["cached"] and ours["cached"][1]
        wrong += [] if good else [f"pages of {page}: tokens differ from vLLM without the plug-in"]
        counts = [2 * case.heads * x for x in expected]
        wrong += [] if ours["counts"] == counts else [f"expected {expected} tokens per head and pass"]
    return wrong


def against(
    case: Case, found: dict[str, Any], expected: dict[str, Any], what: str, fraction: float, below: int = 0
) -> list[str]:
    """Compare both passes of an engine with `attach`, and its counts with those computed from the lengths."""
    wrong = []
    for name, tokens in zip(("cold", "warm"), found["tokens"], strict=True):
        ties, others = differences(tokens, expected)
        same = sum(a == b for a, b in zip(tokens, expected["tokens"], strict=True))
        say(f"{what}, {name}: {same}/{len(tokens)} equal, {ties} differ at near-ties, {len(others)} elsewhere {others}")
        wrong += others
        case.record.add(what=f"{what}, {name}", answers=len(tokens), equal=same, ties=ties)
    if "counts" in found:
        counts = [2 * case.heads * x for x in expected_counts(case.prompts, NEW, fraction, below)]
        say(f"density {found['counts'][0] / found['counts'][1]:.3f}")
        wrong += [] if found["counts"] == counts else [f"{what}: {found['counts']} tokens"]
    return wrong


def budgets(case: Case) -> list[str]:
    wrong = []
    for fraction in (0.25, 0.02):
        expected = case.attached(fraction)
        for page, chunk in case.pages:
            found, what = case.engine(fraction, page, chunk), f"{fraction:.0%}, pages of {page}, chunks of {chunk}"
            wrong += against(case, found, expected, what, fraction)
    return wrong


def crossing(case: Case) -> list[str]:
    """Compare with `attach` where requests begin below the break-even, reach it, or begin above it."""
    wrong = []
    for fraction in (1.0, 0.25):
        expected = case.attached(fraction, BELOW)
        for page, chunk in case.pages[:2]:
            found = case.engine(fraction, page, chunk, BELOW)
            what = f"{fraction:.0%} from {BELOW} tokens on, pages of {page}, chunks of {chunk}"
            wrong += against(case, found, expected, what, fraction, BELOW)
    return wrong


def arrivals(case: Case) -> list[str]:
    return everywhere(case, "arriving at random", arrivals=True)


def ranks(case: Case) -> list[str]:
    return everywhere(case, "two ranks", more={"tensor_parallel_size": 2, "distributed_executor_backend": "mp"})


def everywhere(case: Case, what: str, **more: Any) -> list[str]:
    """Compare engines of a kind with vLLM's own at 100 %, and with `attach` at 25 and 2 %."""
    stock, ours = (case.engine(fraction, 32, 64, 0, **more) for fraction in (None, 1.0))
    pairs = [(a, b) for x, y in zip(stock["tokens"], ours["tokens"], strict=True) for a, b in zip(x, y, strict=True)]
    equal = sum(a == b for a, b in pairs)
    say(f"whole budget, {what}: {equal} of {len(pairs)} equal")
    case.record.add(what=f"100%, {what}", answers=len(pairs), equal=equal)
    wrong = [] if equal == len(pairs) else [f"{what}: other tokens than vLLM without the plug-in"]
    for fraction in (0.25, 0.02):
        found = case.engine(fraction, 32, 64, 0, **more)
        wrong += against(case, found, case.attached(fraction), f"{fraction:.0%}, {what}", fraction)
    return wrong


def preemption(case: Case) -> list[str]:
    short = [[4] * (40 - len(p[:40])) + p[:40] for p in case.prompts]  # two pages each, which grow to five
    job: dict[str, Any] = {"prompts": short, "new": 100}
    stock = case.engine(None, 32, 256, **job)
    wrong = []
    for fraction in (1.0, 0.02):
        tight = {"num_gpu_blocks_override": 30, "max_model_len": 512}  # room for 14 at the start, for 6 at the end
        ours = case.engine(fraction, 32, 256, **job, more=tight)
        pairs = [
            (a, b) for x, y in zip(stock["tokens"], ours["tokens"], strict=True) for a, b in zip(x, y, strict=True)
        ]
        equal, ended = sum(a == b for a, b in pairs), sum(len(b) == 100 for _, b in pairs)
        same = f", {equal} as in vLLM without the plug-in" if fraction == 1.0 else ""
        say(f"{fraction:.0%}: {ours['preemptions']} preemptions, {ended}/{len(pairs)} ended{same}")
        row = {"what": f"{fraction:.0%}", "answers": len(pairs), "ended": ended, "preemptions": ours["preemptions"]}
        case.record.add(**row, **({"equal": equal} if fraction == 1.0 else {}))
        if ours["preemptions"] < PREEMPTED or ended < len(pairs) or (fraction == 1.0 and equal < len(pairs)):
            wrong.append(f"preemption at {fraction}: tokens changed or are missing, or there were too few")
    return wrong


def poison(case: Case) -> list[str]:
    wrong = []
    for fraction in (1.0, 0.02):
        how = {"more": {"enable_prefix_caching": False, "num_gpu_blocks_override": 300}}
        clean, poisoned = (case.engine(fraction, 32, 256, 0, **how, poison=on) for on in (False, True))
        pairs = [x for both in zip(clean["tokens"], poisoned["tokens"], strict=True) for x in zip(*both, strict=True)]
        equal = sum(a == b for a, b in pairs)
        same = equal == len(pairs)
        case.record.add(what=f"{fraction:.0%}", answers=len(pairs), equal=equal, poisoned=poisoned["poisoned"])
        say(f"poison at {fraction:.0%}, {poisoned['poisoned']:,} pages: {'nothing changes' if same else 'CHANGED'}")
        wrong += [] if same and poisoned["poisoned"] else [f"unowned pages are read at {fraction}"]
    return wrong


def others(case: Case) -> list[str]:
    wrong = []
    with tempfile.TemporaryDirectory() as folder:
        for name, make in TINY.items():
            say(f"{name}:")
            model, hasher, heads = make(f"{folder}/{name}")
            mine = Case(model, hasher, requests(512), heads, case.record, PAGES[:2])
            wrong += [f"{name}: {line}" for part in (exact, budgets) for line in part(mine)]
    return wrong


def quick(case: Case) -> list[str]:
    few = Case(case.model, case.hasher, requests(4000, LENGTHS[::4]), case.heads, case.record, PAGES[:1])
    return exact(few) + against(few, few.engine(0.02, 32, 64), few.attached(0.02), "2%", 0.02)


PARTS: dict[str, Callable[[Case], list[str]]] = {"exact": exact, "budgets": budgets}
PARTS |= {
    "crossing": crossing,
    "arrivals": arrivals,
    "ranks": ranks,
    "preemption": preemption,
    "poison": poison,
    "others": others,
}


def main() -> int:
    parser = argparse.ArgumentParser(description="Check sparse-serve inside vLLM.")
    parser.add_argument("--hasher", help="a hasher of the demo model; default: an untrained one")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--quick", action="store_true", help="a part of exact and budgets")
    parser.add_argument("--out", type=pathlib.Path, help="file for what was found; its other parts are kept")
    given = parser.parse_args()
    from hashtrain.demo import demo_model_path

    model = str(demo_model_path())
    with tempfile.TemporaryDirectory() as folder:
        hasher, heads = hash_of(model, f"{folder}/hasher", given.hasher)
        record = Record(model="demo", hash=how_made(given.hasher))
        case = Case(model, hasher, requests(4000), heads, record)
        checks = {"quick": quick} if given.quick else {name: PARTS[name] for name in given.parts}
        record.run({name: functools.partial(check, case) for name, check in checks.items()}, given.out)
    say("\n".join(record.wrong) or "all well")
    return bool(record.wrong)


if __name__ == "__main__":
    sys.exit(main())
