"""Compile every kernel for every architecture, without a GPU, and check its resources against a budget.

    uv run --group kernels --with nvidia-cuda-nvrtc==13.0.88 tools/check_kernels.py

Exit code 1 if a kernel uses local memory (spills, a stack frame), or other registers than docs/results/kernels.json
says, which `--update` writes. The compiler is the oldest that users have, that of torch 2.11: it refuses what newer
ones take. A program with the digest and compiler of the table gives the same machine code: it is compiled for one
architecture only.
"""

import argparse
import concurrent.futures
import hashlib
import importlib
import importlib.metadata
import json
import os
import pathlib
import re
import sys
from collections.abc import Mapping
from typing import Any

import torch
from hashcore.cuda.kernels import score_macros
from hashcore.cuda.program import Program
from hashtrain.files.atomic import write_text
from sparse_decode.cuda import gather, sums

ROOT = pathlib.Path(__file__).resolve().parent.parent
TABLE = ROOT / "docs" / "results" / "kernels.json"
UPDATE = "uv run --group kernels --with nvidia-cuda-nvrtc==13.0.88 tools/check_kernels.py --update"
ARCHITECTURES = ["sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120a"]

REGULAR = {count: tuple(1 << p for p in range(count)) for count in (1, 2, 3, 4, 5, 6, 8)}
"""Weights of planes by their number."""
OTHER = (1, 2, 1), (1, 2, 2), (1, 2, 4, 1), (5, 3)
"""Weights of groups, and without a pattern."""
PAGES: dict[str, int] = {"HASHCORE_PAGES": 1}
# Sizes of keys and values: of common models, with loads of every width, and the largest.
GATHERS = [
    *((size, size, torch.bfloat16) for size in (64, 80, 96, 128, 192, 256)),
    *((128, 128, torch.float16), (192, 128, torch.bfloat16), (256, 256, torch.float16)),
]


def scoring(
    *codes: tuple[int, tuple[int, ...]], tensor: bool = False, macros: Mapping[str, int] | None = None
) -> list[Program]:
    """Return the programs of score.cu for codes: words, and weights of the planes."""
    return [
        Program("score.cu", dict(score_macros(words, weights, tensor)) | dict(macros or {})) for words, weights in codes
    ]


def sparse(source: str, *macros: Mapping[str, str | int]) -> list[Program]:
    return [Program(source, dict(one), gather.KERNELS) for one in macros]


# All that are compiled at run time. Tensor cores count the bits of 3 to 7 planes of 128 bits where they are fast at it.
COUNTED = (*((4, REGULAR[count]) for count in (3, 4, 5, 6)), (4, OTHER[0]), (4, OTHER[2]))
PROGRAMS = [
    *map(Program, ("pack.cu", "planes.cu", "choose.cu")),
    Program("choose.cu", PAGES),
    *sparse("place.cu", {}),
    *scoring(*((4, REGULAR[count]) for count in (1, 3, 5, 6)), (2, REGULAR[3]), (8, REGULAR[3]), macros=PAGES),
    *scoring(*((4, REGULAR[count]) for count in (3, 6)), tensor=True, macros=PAGES),
    *sparse("gather.cu", *(dict(gather.macros(*sizes, paged=True)) for sizes in GATHERS)),
    *scoring(*((4, weights) for weights in (*REGULAR.values(), *OTHER))),
    *scoring(*((words, REGULAR[count]) for count in (3, 6) for words in (1, 2, 3, 8, 12, 16))),
    *scoring(*COUNTED, tensor=True),
    *sparse("encode.cu", *({"SPARSE_BF16": bf16, "SPARSE_NARROW": narrow} for bf16 in "01" for narrow in "01")),
    *sparse("moments.cu", *(dict(sums.defined(*sizes)) for sizes in GATHERS)),
    *sparse("gather.cu", *(dict(gather.macros(*sizes)) for sizes in GATHERS)),
    *sparse("gather.cu", *(dict(gather.macros(*sizes, group=16)) for sizes in (GATHERS[0], GATHERS[3], GATHERS[5]))),
]


def resources(log: str) -> dict[str, dict[str, int]]:
    """Parse registers, stack frame and spills of each kernel from the output of ptxas -v."""
    found: dict[str, dict[str, int]] = {}
    kernel = ""
    for line in log.splitlines():
        if named := re.search(r"Compiling entry function '(\w+)'", line):
            kernel = named[1]
            found[kernel] = {}
        elif frame := re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", line):
            found[kernel] |= {"stack": int(frame[1]), "spills": int(frame[2]) + int(frame[3])}
        elif used := re.search(r"Used (\d+) registers", line):
            found[kernel]["registers"] = int(used[1])
    return found


def jobs(known: dict[str, Any]) -> list[tuple[Program, str]]:
    """Return what to compile: changed programs for all architectures, others for one."""
    old = known.get("sources", {}) if known.get("nvrtc") == compiler() else {}
    count = {program: 1 if old.get(str(program)) == digest(program) else len(ARCHITECTURES) for program in PROGRAMS}
    return [(program, arch) for program in PROGRAMS for arch in ARCHITECTURES[: count[program]]]


def digest(program: Program) -> str:
    """Return a hash of everything that a program's machine code depends on, except architecture and compiler."""
    return hashlib.sha256(f"{program}\n{program.source()}".encode()).hexdigest()[:16]


def table(known: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Measure what is needed; return the table, and a sentence for each kernel that breaks a limit."""
    importlib.import_module("cuda.core")  # importing it first in two threads at once fails
    todo = jobs(known)
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        results = list(pool.map(lambda job: resources(job[0].compile(job[1], ptxas=["-v"])[1]), todo))
    registers: dict[str, dict[str, dict[str, int]]] = {}
    broken = []
    for (program, arch), used in zip(todo, results, strict=True):
        for kernel, found in sorted(used.items()):
            before = known.get("registers", {}).get(str(program), {}).get(kernel, {})
            of_kernel = registers.setdefault(str(program), {}).setdefault(kernel, dict(before))
            of_kernel[arch] = found["registers"]
            if found["stack"] or found["spills"]:
                broken.append(f"{kernel} of {program} on {arch} uses local memory: {found}; hold fewer values at once")
    sources = {str(program): digest(program) for program in PROGRAMS}
    return {"nvrtc": compiler(), "sources": sources, "registers": registers}, broken


def compiler() -> str:
    return importlib.metadata.version("nvidia-cuda-nvrtc")


def differences(old: Any, new: Any, at: str = "") -> list[str]:
    """List every entry in which two tables differ."""
    if not isinstance(old, dict) or not isinstance(new, dict):
        return [] if old == new else [f"{at}: {old} in the table, {new} now"]
    keys = [*old, *(key for key in new if key not in old)]
    return [line for key in keys for line in differences(old.get(key), new.get(key), f"{at}, {key}".strip(", "))]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--update", action="store_true", help="write the table instead of comparing with it")
    flags = parser.parse_args()
    known = json.loads(TABLE.read_text()) if TABLE.is_file() else {}
    new, broken = table(known)
    if flags.update and not broken:
        write_text(TABLE, json.dumps(new, indent=1) + "\n")
    elif not known:
        broken.append(f"expected {TABLE.relative_to(ROOT)}, found none; write it with {UPDATE}")
    elif not flags.update:
        broken += [f"{line}; if this is intended: {UPDATE}" for line in differences(known, new)]
    for line in broken:
        print(line, file=sys.stderr)
    kernels = sum(len(of) for of in new["registers"].values())
    print(f"{kernels} kernels for {len(ARCHITECTURES)} architectures, NVRTC {new['nvrtc']}: {len(broken)} problems")
    return int(bool(broken))


if __name__ == "__main__":
    sys.exit(main())
