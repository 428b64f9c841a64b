"""The generated tables: one function per table, one file per topic."""

import pathlib
from collections.abc import Callable
from functools import partial

from evals import report
from evals.grid import Grid, to_markdown
from evals.report import codelength_grid
from evals.result import Result

from readme_tables import (
    beside_paper,
    codes,
    decoding,
    errors,
    gpu,
    headline,
    paper,
    quality,
    reach,
    robustness,
    speed,
    training,
)
from readme_tables.described import DESCRIBED
from readme_tables.headline import SECOND_MODEL
from readme_tables.stored import named, stored


def second_ppl(result: Result) -> Grid:
    return report.ppl_grid(named(result, SECOND_MODEL))


BLOCKS: dict[str, Callable[[pathlib.Path], str]] = {
    **DESCRIBED,
    "headline": headline.headline,
    "second-short": headline.short_table,
    "glance": partial(quality.glance, quality.Measured("ppl", "ppl_decode", "training"), "demo model"),
    "second-glance": partial(quality.texts, headline.SECOND_RUNS, "second_training", SECOND_MODEL),
    "second-layers": partial(quality.training, "second_training", "kv_head"),
    "second-english": quality.of_run("second_english", second_ppl),
    "second-python": quality.of_run("second_python", second_ppl),
    "second-bare": partial(quality.always_read, headline.SECOND_RUNS, headline.BARE_RUNS, SECOND_MODEL),
    "speed": speed.speed,
    "needs": speed.needs,
    "iou": quality.of_run("iou", quality.iou("kv_head")),
    "iou-query-heads": quality.of_run("iou", quality.iou("query_head")),
    "ppl": quality.of_run("ppl", report.ppl_grid),
    "ppl-pairs": quality.of_run("ppl", lambda result: report.ppl_pairs_grid(result, "transform")),
    "ppl-pairs-remainder": quality.of_run("ppl", lambda result: report.ppl_pairs_grid(result, "transform+remainder")),
    "remainder": lambda results: to_markdown(training.remainder_grid(stored(results / "training.json"))),
    "ablations": lambda results: to_markdown(training.hashers_grid(stored(results / "ablations.json"))),
    "quest": quality.of_run("quest", report.ppl_grid),
    "magicpig": partial(quality.with_matches, "magicpig"),
    "rivals": quality.rivals,
    "ppl-decode": partial(quality.with_matches, "ppl_decode"),
    "paper-protocol": quality.of_run("ppl_paper_protocol", report.ppl_grid),
    "two-dense": quality.of_run("demo_two_dense", report.ppl_grid),
    "second-two-dense": quality.of_run("second_two_dense", second_ppl),
    "order": paper.order,
    "order-links": paper.sentences,
    "order-long": paper.longer,
    "why-paper": paper.why,
    "exact-quest": quality.of_run("exact_quest", report.ppl_grid),
    "exact-protocol": paper.protocol,
    "exact-second": paper.second,
    "exact-second-links": partial(paper.sentences, runs=paper.WHOLE),
    "exact-second-quest": quality.of_run("second_exact_quest", report.ppl_grid),
    "beside-paper": beside_paper.table,
    "beside-paper-differences": beside_paper.sentences,
    **{f"second-{name.replace('_', '-')}": partial(paper.plain, name, SECOND_MODEL) for name in paper.SECOND},
    "demo-iou": quality.of_run("demo_iou", quality.iou("kv_head")),
    "codelength-all": quality.of_run("codelength_all", codelength_grid),
    **{name.replace("_", "-"): partial(paper.plain, name, "demo") for name in paper.DEMO},
    **{name.replace("_", "-"): quality.of_run(name, report.ppl_grid) for name in paper.DEMO_PERPLEXITY},
    **{name.replace("_", "-"): quality.of_run(name, second_ppl) for name in paper.SECOND_PERPLEXITY},
    "suspects": paper.suspects,
    "best-form": paper.best_form,
    "missed": errors.missed,
    "bytes": partial(quality.bytes_read, headline.SHORT_RUNS, "behind a dense prompt"),
    "bytes-divided": partial(quality.bytes_read, headline.DIVIDED_RUNS, "behind a dense prompt"),
    "bytes-every": partial(quality.bytes_read, headline.EVERY_RUNS, headline.EVERY_ROWS),
    **{name.replace("_", "-"): partial(reach.table, name) for name in reach.MODELS},
    "rank-one": quality.of_run("rank_one", report.ppl_grid),
    "rank-one-second": quality.of_run("rank_one_smol", second_ppl),
    "output-errors": partial(errors.errors, errors.RUNS),
    "frontier": partial(quality.frontier, headline.FRONTIER_RUNS),
    "codes": partial(codes.codes, codes.RUNS),
    "codes-differences": partial(codes.differences, codes.RUNS),
    "codes-layers": partial(codes.layers, codes.RUNS[SECOND_MODEL], codes.ADDED),
    "code-lengths": quality.of_run("codelength", codelength_grid),
    "throughput": speed.throughput,
    "training-step": speed.training_step,
    "training": partial(quality.training, "training", "kv_head"),
    "training-query-heads": partial(quality.training, "training", "query_head"),
    "gpu-step": gpu.step,
    "gpu-model": gpu.model,
    "gpu-shortlist": gpu.shortlist,
    "serving": decoding.serving,
    "serving-checks": decoding.checks,
    "shortlist": decoding.shortlist,
    "exact": decoding.exact,
    "llama-cpp": decoding.beside_llama_cpp,
    "families": robustness.families,
    "fuzz": robustness.fuzz,
    "transformers-tests": robustness.transformers_tests,
    "hashcore-index-recall": decoding.index_recall,
    "hashcore-index-times": decoding.index_times,
}
"""By name: each returns Markdown, a table or sentences, of stored results. Raises: ValueError if one is missing."""
