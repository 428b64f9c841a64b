"""Fill the tables of README.md, of pages of docs and of the packages' READMEs from docs/results.

    uv run tools/update_readme.py                                   # write the tables
    uv run tools/update_readme.py --from runs/demo runs/iou runs/ppl  # first store these runs, trimmed and rounded
    uv run tools/update_readme.py --from runs/codelength runs/ppl-decode runs/throughput  # decode: as ppl_decode
    uv run tools/update_readme.py --from runs/all=ablations runs/paper/table-2=quest  # under names of their own
    uv run tools/update_readme.py --from runs/smol=second_training                           # another model's
    uv run tools/update_readme.py --from runs/smol-en=second_english runs/smol-py=second_python
    uv run tools/update_readme.py --check                           # change nothing; exit 1 if a README is stale
    uv run packages/sparse-decode/benchmarks/attention.py --out docs/results/sparse_attention.json
    uv run packages/sparse-decode/benchmarks/model.py decode --out docs/results/sparse_model_decode.json
    uv run packages/sparse-decode/benchmarks/never_slower.py --out docs/results/never_slower.json
    uv run --group llama-cpp packages/sparse-decode/benchmarks/llama_cpp.py --out docs/results/llama_cpp.json
    uv run packages/sparse-decode/benchmarks/model.py prefill --out docs/results/sparse_model_prefill.json
    PYTHON packages/sparse-serve/benchmarks/throughput.py --out docs/results/serving.json  # as its text says
    uv run --with faiss-cpu packages/hashcore/examples/embeddings.py --out docs/results/hashcore_index.json
    uv run --with faiss-cpu packages/hashcore/benchmarks/cpu.py --cpu 1 --out docs/results/hashcore_cpu.json
    uv run tools/check_families.py --out docs/results/families.json
    uv run tools/fuzz.py cache --count 20000 --out docs/results/fuzz.json  # one fuzzer; those of others stay
    uv run tools/check_memory.py --out docs/results/memory.json
    (as its text says) tools/check_transformers_tests.py --out docs/results/transformers_tests.json

Tables are written between `<!-- results:NAME -->` and `<!-- end -->`; BLOCKS in readme_tables lists the names.
"""

import argparse
import difflib
import pathlib
import re
import sys

from hashtrain.files.atomic import write_text
from readme_tables import BLOCKS
from readme_tables.stored import RESULTS, store

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGES = ("results.md", "gpu.md", "families.md", "faults.md")
DOCS = [*(ROOT / "docs" / name for name in PAGES), *sorted(ROOT.glob("docs/results/*.md"))]
READMES = [ROOT / "README.md", *DOCS, *sorted(ROOT.glob("packages/*/README.md"))]
BLOCK = re.compile(r"(<!-- results:(\S+) -->\n)(.*?)(<!-- end -->)", re.S)


def render(text: str, results: pathlib.Path = RESULTS) -> str:
    """Return a README with every table filled. Raises: ValueError if a block or its result is unknown."""
    if text.count("<!-- results:") != len(BLOCK.findall(text)):
        raise ValueError("a results block is malformed: expected `<!-- results:NAME -->`, its lines, `<!-- end -->`")

    def fill(match: re.Match[str]) -> str:
        opening, name, _, end = match.groups()
        if name not in BLOCKS:
            raise ValueError(f"unknown block results:{name}: expected one of {', '.join(BLOCKS)}")
        return f"{opening}\n{BLOCKS[name](results)}\n\n{end}"

    return BLOCK.sub(fill, text)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if a README is stale")
    parser.add_argument("--from", dest="runs", nargs="+", default=[], help="RUN or RUN=NAME to store first")
    given = parser.parse_args(arguments)
    if given.check and given.runs:
        parser.error("--check changes nothing, --from stores runs: give only one of them")
    try:
        for run, _, name in (given_run.partition("=") for given_run in given.runs):
            print(f"stored {store(pathlib.Path(run), name=name).relative_to(ROOT)}")
        texts = {path: path.read_text(encoding="utf-8") for path in READMES}
        fresh = {path: render(text) for path, text in texts.items()}
    except (ValueError, OSError) as error:
        print(f"update_readme: {error}", file=sys.stderr)
        return 2
    stale = [path for path in READMES if texts[path] != fresh[path]]
    for path in stale:
        if given.check:
            before, after = texts[path].splitlines(True), fresh[path].splitlines(True)
            sys.stdout.writelines(difflib.unified_diff(before, after, str(path.relative_to(ROOT)), "fresh"))
        else:
            write_text(path, fresh[path])
    return int(given.check and bool(stale))


if __name__ == "__main__":
    raise SystemExit(main())
