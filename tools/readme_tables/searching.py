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


_PLACES = {"memory": "from memory", "cache": "from cache"}


def cpu_search(results: pathlib.Path) -> str:
    found = stored(results / "hashcore_cpu.json")
    title = (
        f"Microseconds of processor time to search {found['bits']}-bit codes for the best 2 % of the keys, one thread, "
        f"{found['processor']}, {found['date']}. Ratios are medians, of processor and (elapsed) time"
    )
    header = ["keys", "queries", "codes", "search", "faiss", "faiss / search"]
    header += ["score, torch.topk", "torch.topk / search"]
    bodies = [
        [
            [
                f"{row['n']:,}",
                str(row["queries"]),
                words,
                *(f"{at['microseconds'][name]:,.0f}" for name in ("search", at["faiss"])),
                _two_clocks(at["over_faiss"]),
                f"{at['microseconds']['torch.topk']:,.0f}",
                _two_clocks(at["over_torch"]),
            ]
            for row in found["search"]
            for at in [row[place]]
        ]
        for place, words in _PLACES.items()
    ]
    return to_markdown(Grid(title, header, bodies))


def cpu_pages(results: pathlib.Path) -> str:
    """Return the times of searches in pages beside those of contiguous keys."""
    found = stored(results / "hashcore_cpu.json")["pages"]
    first = found["rows"][0]
    title = (
        f"Microseconds of processor time to search {first['n']:,} keys a head for the best 2 %, in pages of "
        f"{first['page']} far apart in random order and contiguous, one thread, {found['processor']}, {found['date']}"
    )
    header = ["heads", "planes", "codes", "pages", "contiguous", "pages / contiguous"]
    bodies = [
        [
            [
                str(row["heads"]),
                str(row["planes"]),
                words,
                *(f"{row[place]['microseconds'][name]:,.0f}" for name in ("pages", "side by side")),
                _two_clocks(row[place]["over_side_by_side"]),
            ]
            for row in found["rows"]
        ]
        for place, words in _PLACES.items()
    ]
    return to_markdown(Grid(title, header, bodies))


def cpu_score(results: pathlib.Path) -> str:
    found = stored(results / "hashcore_cpu.json")
    group = found["score"][0]["group"]
    title = (
        f"Microseconds of processor time to score the same keys, and ratios as above. The group has {group} queries. "
        "The plain loop reads all codes without prefetching; the kernel prefetches, so it can be faster"
    )
    ratios = {
        "score / plain loop": "over_read",
        "group in one call / planes": "one call_over_grouped",
        f"{group} calls / planes": "calls_over_grouped",
    }
    works = {"read": "plain loop", "score": "score, 1 query", "grouped": "score, group in 3 planes"}
    bodies = [
        [
            [
                f"{row['n']:,}",
                words,
                *(f"{row[place]['microseconds'][name]:,.0f}" for name in works),
                *(_two_clocks(row[place][name]) for name in ratios.values()),
            ]
            for row in found["score"]
        ]
        for place, words in _PLACES.items()
    ]
    return to_markdown(Grid(title, ["keys", "codes", *works.values(), *ratios], bodies))


def _two_clocks(ratio: dict[str, float]) -> str:
    return f"{ratio['processor']:.2f} ({ratio['wall']:.2f})"
