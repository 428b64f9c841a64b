"""One stage of a GPU day, or the summary of what all have written.

python3 tools/gpu_day/run.py layer --out out --seconds 110
python3 tools/gpu_day/run.py layer --out out --sizes 1x131072 8x32768
python3 tools/gpu_day/run.py summary --out out
"""

import argparse
import importlib
import os
import xml.etree.ElementTree
from pathlib import Path


def summary(folder: Path) -> None:
    """Print each row, each failed test with its message, and how each stage ended."""
    if (tests := folder / "tests.xml").is_file():
        suite = next(xml.etree.ElementTree.parse(tests).getroot().iter("testsuite"))
        print({name: suite.get(name) for name in ("tests", "failures", "errors", "skipped", "time")})
        problems = [(case, case.find("failure"), case.find("error")) for case in suite.iter("testcase")]
        failed = [(case, a if a is not None else b) for case, a, b in problems if a is not None or b is not None]
        for case, problem in failed[:25]:
            first = (problem.get("message") or "").partition("\n")[0][:160] if problem is not None else ""
            print(f"FAILED {case.get('classname', '').split('.')[-1]}::{case.get('name')}: {first}")
        print(f"{len(failed)} tests failed")
    else:
        print("no tests.xml: the tests did not run to their end")
    for line in (folder / "results.jsonl").read_text().splitlines() if (folder / "results.jsonl").is_file() else ():
        print(line)
    for line in (folder / "day.log").read_text(errors="replace").splitlines():
        if line.startswith("[") and "] stage " in line:
            print(line)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=("facts", "layer", "model", "summary"))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=float(os.environ.get("SECONDS_LEFT", "100")))
    parser.add_argument("--sizes", nargs="*", default=[], help="of layer: batch x tokens, such as 8x32768")
    flags = parser.parse_args()
    if flags.stage == "summary":
        return summary(flags.out)
    import torch
    from evals.machine import environment
    from timing import Stage

    sizes = [tuple(int(part) for part in size.split("x")) for size in flags.sizes]
    stage, more = Stage(flags.device, flags.out, flags.seconds), (sizes,) if sizes else ()
    if flags.stage == "facts":
        return stage.put("facts", cuda=torch.version.cuda, **environment(flags.device))
    with stage.part(flags.stage):
        importlib.import_module(flags.stage).run(stage, *more)


if __name__ == "__main__":
    main()
