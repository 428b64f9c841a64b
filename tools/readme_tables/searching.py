"""Tables of hashcore: recall and times of search."""

import pathlib

from evals.grid import Grid, to_markdown

from readme_tables.stored import stored


def index_recall(results: pathlib.Path) -> str:
    found = stored(results / "hashcore_index.json")
    sets = found["recall"]
    title = (
        f"Recall@{found['k']} of exact search by cosine, {found['count']:,} embeddings of {found['dim']} numbers in "
        f"{found['bits']} bits, {found['queries']} queries, mean and standard error"
    )
    lines = [
        [
            "code against code" if row["planes"] == 0 else f"{row['planes']} plane{'s' * (row['planes'] > 1)}",
            str(row["rerank"] or "-"),
            *(f"{at['recall']:.3f} ± {at['error']:.3f}" for at in rows),
        ]
        for row, rows in ((rows[0], rows) for rows in zip(*sets.values(), strict=True))
    ]
    return to_markdown(Grid(title, ["query", "rerank", *(f"{name} spread" for name in sets)], [lines]))


def index_times(results: pathlib.Path) -> str:
    found = stored(results / "hashcore_index.json")
    columns, file = found["times"], found["file"]
    index, vectors = (f"{found[name] / 1e6:,.0f} MB" for name in ("index_bytes", "vector_bytes"))
    verified, unverified = (1e3 * file[name] for name in ("load_seconds", "load_unverified_seconds"))
    title = (
        f"Milliseconds of processor time a query for the best {found['k']} of the same {found['count']:,} codes, one "
        f"thread, {found['processor']}, {found['date']}. The index takes {index}, the float32 vectors {vectors}. "
        f"Adding takes {found['add_microseconds']:.1f} us a vector, saving {file['save_seconds']:.2f} s, "
        f"loading from a warm cache {verified:.0f} ms with verification and {unverified:.1f} ms without"
    )
    names = columns[0]["milliseconds"]
    lines = [[name, *(f"{at['milliseconds'][name]:.2f}" for at in columns)] for name in names]
    ratios = ["faiss / BitIndex on codes, median ratio", *(f"{at['faiss_over_codes']:.2f}" for at in columns)]
    header = ["search", *(f"{at['queries']} quer{'y' if at['queries'] == 1 else 'ies'} a call" for at in columns)]
    return to_markdown(Grid(title, header, [lines, [ratios]]))
