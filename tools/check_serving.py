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
from dataclasses import dataclass, replace
from typing import Any

from serving_checks.jobs import LENGTHS, ask, differences, expected_counts, requests
from serving_checks.models import TINY, hash_of
from serving_checks.record import Record

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


def same(one: dict[str, Any], other: dict[str, Any]) -> list[int]:
    """Return of two engines how many requests of each pass, cold and warm, have equal tokens."""
    both = zip(one["tokens"], other["tokens"], strict=True)
    return [sum(a == b for a, b in zip(*passes, strict=True)) for passes in both]


def exact(case: Case) -> list[str]:
    wrong = []
    for page, chunk in case.pages:
        stock, ours = case.engine(None, page, chunk), case.engine(1.0, page, chunk)
        equal, count = same(stock, ours), len(case.prompts)
        say(
            f"whole budget, pages of {page}, chunks of {chunk}: equal cold {equal[0]}/{count}, warm "
            f"{equal[1]}/{count}; from prefixes {ours['cached']}; tokens read and seen {ours['counts']}"
        )
        case.record.add(what="100%", page=page, chunk=chunk, answers=2 * count, equal=sum(equal))
        if equal != [count, count] or ours["cached"] != stock["cached"] or not ours["cached"][1]:
            wrong.append(f"pages of {page}: tokens differ from vLLM without the plug-in")
        expected = expected_counts(case.prompts, NEW, 1.0)
        if ours["counts"] != [2 * case.heads * x for x in expected]:
            wrong.append(f"expected {expected} tokens per head and pass")
    return wrong


def against(
    case: Case, found: dict[str, Any], expected: dict[str, Any], what: str, fraction: float, below: int = 0
) -> list[str]:
    """Compare both passes of an engine with `attach`, and its counts with those computed from the lengths."""
    wrong = []
    for name, tokens in zip(("cold", "warm"), found["tokens"], strict=True):
        ties, others = differences(tokens, expected)
        equal = sum(a == b for a, b in zip(tokens, expected["tokens"], strict=True))
        say(
            f"{what}, {name}: {equal}/{len(tokens)} equal, {ties} differ at near-ties, {len(others)} elsewhere {others}"
        )
        wrong += others
        case.record.add(what=f"{what}, {name}", answers=len(tokens), equal=equal, ties=ties)
    if "counts" in found:
        say(f"density {found['counts'][0] / found['counts'][1]:.3f}")
        if found["counts"] != [2 * case.heads * x for x in expected_counts(case.prompts, NEW, fraction, below)]:
            wrong.append(f"{what}: {found['counts']} tokens")
    return wrong


def budgets(case: Case, fractions: tuple[float, ...] = (0.25, 0.02), below: int = 0) -> list[str]:
    wrong, since = [], f" from {below} tokens on" if below else ""
    for fraction in fractions:
        expected = case.attached(fraction, below)
        for page, chunk in case.pages[:2] if below else case.pages:
            what = f"{fraction:.0%}{since}, pages of {page}, chunks of {chunk}"
            wrong += against(case, case.engine(fraction, page, chunk, below), expected, what, fraction, below)
    return wrong


def crossing(case: Case) -> list[str]:
    """Compare with `attach` where requests begin below the break-even, reach it, or begin above it."""
    return budgets(case, (1.0, 0.25), BELOW)


def arrivals(case: Case) -> list[str]:
    return everywhere(case, "arriving at random", arrivals=True)


def ranks(case: Case) -> list[str]:
    return everywhere(case, "two ranks", more={"tensor_parallel_size": 2, "distributed_executor_backend": "mp"})


def everywhere(case: Case, what: str, **more: Any) -> list[str]:
    """Compare engines of a kind with vLLM's own at 100 %, and with `attach` at 25 and 2 %."""
    equal = sum(same(*(case.engine(fraction, 32, 64, 0, **more) for fraction in (None, 1.0))))
    count = 2 * len(case.prompts)
    say(f"whole budget, {what}: {equal} of {count} equal")
    case.record.add(what=f"100%, {what}", answers=count, equal=equal)
    wrong = [] if equal == count else [f"{what}: other tokens than vLLM without the plug-in"]
    for fraction in (0.25, 0.02):
        found, expected = case.engine(fraction, 32, 64, 0, **more), case.attached(fraction)
        wrong += against(case, found, expected, f"{fraction:.0%}, {what}", fraction)
    return wrong


def preemption(case: Case) -> list[str]:
    short = [[4] * (40 - len(p[:40])) + p[:40] for p in case.prompts]  # two pages each, which grow to five
    job: dict[str, Any] = {"prompts": short, "new": 100}
    stock, wrong, count = case.engine(None, 32, 256, **job), [], 2 * len(short)
    for fraction in (1.0, 0.02):
        tight = {"num_gpu_blocks_override": 30, "max_model_len": 512}  # room for 14 at the start, for 6 at the end
        ours = case.engine(fraction, 32, 256, **job, more=tight)
        ended = sum(len(tokens) == 100 for of_pass in ours["tokens"] for tokens in of_pass)
        row = {"what": f"{fraction:.0%}", "answers": count, "ended": ended, "preemptions": ours["preemptions"]}
        row |= {"equal": sum(same(stock, ours))} if fraction == 1.0 else {}
        case.record.add(**row)
        say(f"preemption: {row}")
        if ours["preemptions"] < PREEMPTED or ended < count or row.get("equal", count) < count:
            wrong.append(f"preemption at {fraction}: tokens changed or are missing, or there were too few")
    return wrong


def poison(case: Case) -> list[str]:
    wrong = []
    for fraction in (1.0, 0.02):
        how = {"more": {"enable_prefix_caching": False, "num_gpu_blocks_override": 300}}
        clean, poisoned = (case.engine(fraction, 32, 256, 0, **how, poison=on) for on in (False, True))
        row = {"what": f"{fraction:.0%}", "answers": 2 * len(case.prompts), "equal": sum(same(clean, poisoned))}
        case.record.add(**row, poisoned=poisoned["poisoned"])
        say(f"poison: {row}, {poisoned['poisoned']:,} pages")
        if row["equal"] < row["answers"] or not poisoned["poisoned"]:
            wrong.append(f"unowned pages are read at {fraction}")
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
    few = replace(case, prompts=requests(4000, LENGTHS[::4]), pages=PAGES[:1])
    return exact(few) + budgets(few, (0.02,))


PARTS: dict[str, Callable[[Case], list[str]]] = {
    of.__name__: of for of in (exact, budgets, crossing, arrivals, ranks, preemption, poison, others)
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hasher", help="a hasher of the demo model; default: an untrained one")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--quick", action="store_true", help="a part of exact and budgets")
    parser.add_argument("--out", type=pathlib.Path, help="file for what was found; its other parts are kept")
    given = parser.parse_args()
    from hashtrain.demo import demo_model_path

    model = str(demo_model_path())
    with tempfile.TemporaryDirectory() as folder:
        hasher, heads = hash_of(model, f"{folder}/hasher", given.hasher)
        record = Record(given.hasher)
        case = Case(model, hasher, requests(4000), heads, record)
        checks = {"quick": quick} if given.quick else {name: PARTS[name] for name in given.parts}
        record.run({name: functools.partial(check, case) for name, check in checks.items()}, given.out)
    say("\n".join(record.wrong) or "all well")
    return bool(record.wrong)


if __name__ == "__main__":
    sys.exit(main())
