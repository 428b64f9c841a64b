"""Search embeddings with codes of a bit a number, without torch: recall, time and memory beside exact search.

    uv run packages/hashcore/benchmarks/embeddings.py --vectors embeddings.npy   # floats [n, D], by numpy.save
    uv run --with faiss-cpu packages/hashcore/benchmarks/embeddings.py           # a million random ones of 384 numbers
    uv run packages/hashcore/benchmarks/embeddings.py --count 100000 --queries 100   # a short one

Your own embeddings are centred; the last rows are the queries and are not indexed. The random ones are unit vectors of
MiniLM's size in clusters of 100, with centres and offsets from the same distribution. In the first set, all directions
have equal variance; the members of a cluster then have almost equal distances, which is the hardest case. In the
second, direction i has standard deviation i^-1/2, closer to learned embeddings. Exact search by cosine is the
reference. Both indexes run on one thread; times are processor time, medians of alternating runs. faiss is optional. A
million embeddings take about 3 GB of memory. The last line is JSON; --out stores it, --save the index.
"""

import argparse
import importlib.util
import json
import os
import pathlib
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}  # read when imported

import hashcore
import numpy as np
from machine import processor, rounded
from numpy.typing import NDArray

DIM = 384
MEMBERS = 100
K = 10
CHUNK = 50_000
SETS = {"equal": 0.0, "decaying": 0.5}  # name: exponent of the directions' standard deviations
RUNS = 15  # timed runs, after one warm-up

Vectors = NDArray[np.float32]


def clusters(count: int, exponent: float, seed: int) -> Iterator[Vectors]:
    """Yield endless chunks of unit vectors [CHUNK, DIM] around count / MEMBERS centres."""
    rng = np.random.default_rng(seed)
    spread = (np.arange(1, DIM + 1) ** -exponent).astype(np.float32)
    centres = rng.standard_normal((max(1, count // MEMBERS), DIM), np.float32)
    while True:
        chunk = centres[rng.integers(0, len(centres), CHUNK)] + rng.standard_normal((CHUNK, DIM), np.float32)
        chunk *= spread
        yield chunk / np.linalg.norm(chunk, axis=1, keepdims=True)


def drawn(count: int, queries: int, exponent: float, seed: int) -> tuple[Vectors, Vectors]:
    """Return random vectors and queries."""
    chunks, vectors = clusters(count, exponent, seed), np.empty((count, DIM), np.float32)
    for start in range(0, count, CHUNK):
        vectors[start : start + CHUNK] = next(chunks)[: count - start]
    return vectors, next(chunks)[:queries]


def read(path: pathlib.Path) -> Vectors:
    """Read vectors and scale them to length 1, but for zeros. Raises: ValueError if a file has none."""
    if path.exists() and not path.is_file():
        raise ValueError(f"--vectors must be a regular file, got {path}; name an .npy file of floats")
    try:
        vectors = np.load(path, allow_pickle=False)
    except OSError as error:
        raise ValueError(f"cannot read --vectors {path}: {error.strerror}; name an .npy file of floats") from None
    except (EOFError, ValueError):  # numpy's own message advises unpickling the file
        raise ValueError(f"--vectors must be an .npy file of floats as numpy.save writes it, got {path}") from None
    if vectors.ndim != 2 or not np.issubdtype(vectors.dtype, np.floating):
        raise ValueError(f"--vectors must be floats of shape [n, D], got {vectors.dtype} {list(vectors.shape)}")
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return (vectors / np.where(lengths > 0, lengths, 1)).astype(np.float32)


def build(vectors: Vectors, mean: Vectors | None) -> tuple[hashcore.BitIndex, float]:
    """Index vectors; return the index and the seconds that adding them took."""
    index = hashcore.BitIndex(vectors.shape[1], mean=mean)
    return index, seconds(lambda: [index.add(vectors[at : at + CHUNK]) for at in range(0, len(vectors), CHUNK)])


def exact(vectors: Vectors, queries: Vectors) -> NDArray[np.int64]:
    """Return the rows of the K largest inner products of each query, [Q, K]."""
    best = np.full((len(queries), K), -np.inf, np.float32)
    rows = np.zeros((len(queries), K), np.int64)
    for start in range(0, len(vectors), CHUNK):
        products = queries @ vectors[start : start + CHUNK].T
        top = np.argpartition(products, -min(K, products.shape[1]), axis=1)[:, -K:]
        best = np.concatenate([best, np.take_along_axis(products, top, 1)], axis=1)
        rows = np.concatenate([rows, top + start], axis=1)
        keep = np.argpartition(best, -K, axis=1)[:, -K:]
        best, rows = np.take_along_axis(best, keep, 1), np.take_along_axis(rows, keep, 1)
    return rows


def recall(found: NDArray[np.int64], wanted: NDArray[np.int64]) -> dict[str, float]:
    """Return the recall: mean over queries, and standard error."""
    shares = np.array([len(np.intersect1d(a, b)) / K for a, b in zip(found, wanted, strict=True)])
    return {"recall": float(shares.mean()), "error": float(shares.std(ddof=1) / np.sqrt(len(shares)))}


def seconds(work: Callable[[], Any]) -> float:
    """Return the processor time of one call."""
    start = time.process_time()
    work()
    return time.process_time() - start


def alternating(works: dict[str, Callable[[], Any]], runs: int = RUNS) -> dict[str, list[float]]:
    """Time all functions in turn, so that other load affects them equally."""
    for work in works.values():
        work()
    rounds = [{name: seconds(work) for name, work in works.items()} for _ in range(runs)]
    return {name: [times[name] for times in rounds] for name in works}


def recalls(index: hashcore.BitIndex, vectors: Vectors, queries: Vectors) -> list[dict[str, Any]]:
    """Measure the recall of code queries, of planes, and with rerank."""
    wanted = exact(vectors, queries)
    rows = [{"planes": 0, "rerank": None, **recall(index.search(index.encode(queries), K)[1], wanted)}]
    for rerank in (None, 4, 10):
        for planes in (1, 2, 3, 4) if rerank is None else (1, 3):
            originals = None if rerank is None else vectors
            _, ids = index.search(queries, K, planes=planes, rerank=rerank, vectors=originals)
            rows.append({"planes": planes, "rerank": rerank, **recall(ids, wanted)})
            print(f"  {planes} planes, rerank {rerank}: recall@{K} {rows[-1]['recall']:.3f}")
    return rows


def times(index: hashcore.BitIndex, vectors: Vectors, queries: Vectors) -> list[dict[str, Any]]:
    """Time one query and a batch against faiss on the same codes."""
    rows = []
    flat = faiss_flat(index)
    for count in (1, 64):
        batch = queries[:count]
        codes = index.encode(batch)
        works: dict[str, Callable[[], Any]] = {
            "codes": lambda codes=codes: index.search(codes, K),
            "1 plane": lambda batch=batch: index.search(batch, K, planes=1),
            "3 planes": lambda batch=batch: index.search(batch, K, planes=3),
            "3 planes, rerank 4": lambda batch=batch: index.search(batch, K, planes=3, rerank=4, vectors=vectors),
            "float32 products": lambda batch=batch: [vectors @ q for q in batch[:1]],
        }
        if flat is not None:
            octets = codes.view(np.uint8)
            agree(index, flat, codes)
            for mode in ("heap", "counting"):
                works[f"faiss {mode}"] = lambda octets=octets, mode=mode: search_faiss(flat, octets, mode)
        found = alternating(works, RUNS if count == 1 else 5)
        per_query = {name: statistics.median(spent) / count for name, spent in found.items() if "float32" not in name}
        per_query["float32 products"] = statistics.median(found["float32 products"])
        row: dict[str, Any] = {"queries": count, "milliseconds": {name: 1e3 * s for name, s in per_query.items()}}
        if flat is not None:
            rival = min(("faiss heap", "faiss counting"), key=lambda name: per_query[name])
            row["faiss_over_codes"] = statistics.median(
                a / b for a, b in zip(found[rival], found["codes"], strict=True)
            )
        rows.append(row)
        print(f"  {count} queries:", {name: f"{1e3 * s:.2f} ms" for name, s in per_query.items()})
    return rows


def faiss_flat(index: hashcore.BitIndex) -> Any:
    """Return faiss's flat binary index of the same codes, or None without faiss."""
    if importlib.util.find_spec("faiss") is None:
        return None
    import faiss

    faiss.omp_set_num_threads(1)
    flat = faiss.IndexBinaryFlat(index.bits)
    flat.add(index.codes.view(np.uint8))
    return flat


def search_faiss(flat: Any, octets: NDArray[np.uint8], mode: str) -> Any:
    flat.use_heap = mode == "heap"
    return flat.search(octets, K)


def agree(index: hashcore.BitIndex, flat: Any, codes: NDArray[np.int32]) -> None:
    """Check that both find codes at the same distances."""
    differing, _ = search_faiss(flat, codes.view(np.uint8), "heap")
    np.testing.assert_array_equal(index.bits - index.search(codes, K)[0], np.sort(differing, axis=1))


def file_figures(index: hashcore.BitIndex) -> dict[str, float]:
    """Save and load once; return the times and the file size."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "embeddings.hcb"
        return {
            "save_seconds": seconds(lambda: index.save(path)),
            "bytes": path.stat().st_size,
            "load_seconds": seconds(lambda: hashcore.BitIndex.load(path)),
            "load_unverified_seconds": seconds(lambda: hashcore.BitIndex.load(path, verify=False)),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vectors", type=pathlib.Path, help="an .npy file of floats [n, D]; default: random")
    parser.add_argument("--count", type=int, default=1_000_000, help="number of random embeddings")
    parser.add_argument("--queries", type=int, default=400, help="number of queries; of a file, its last rows")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", type=pathlib.Path, help="path for the index")
    parser.add_argument("--out", type=pathlib.Path, help="store the JSON in this file")
    given = parser.parse_args()
    try:
        own = None if given.vectors is None else read(given.vectors)
    except ValueError as error:
        parser.error(str(error))
    count = given.count if own is None else len(own) - given.queries
    if count < 10 * K or given.queries < 64:
        parser.error(f"expected 64 queries and {10 * K} embeddings at least, got {given.queries} and {count}")

    dim = DIM if own is None else own.shape[1]
    result: dict[str, Any] = {"count": count, "queries": given.queries, "seed": given.seed, "dim": dim}
    result |= {"members": MEMBERS, "k": K, "date": time.strftime("%Y-%m-%d"), "processor": processor()}
    for number, (name, exponent) in enumerate(SETS.items() if own is None else {"given": 0.0}.items()):
        if own is None:
            vectors, queries = drawn(count, given.queries, exponent, given.seed)
        else:
            vectors, queries = own[:count], own[count:]
        index, adding = build(vectors, None if own is None else vectors.mean(0))
        print(f"{name} directions" if own is None else f"{count:,} embeddings, {index.bits} bits")
        result.setdefault("recall", {})[name] = recalls(index, vectors, queries)
        if number == 0:
            result |= {"bits": index.bits, "add_microseconds": 1e6 * adding / count}
            result |= {"index_bytes": index.nbytes, "vector_bytes": vectors.nbytes, "file": file_figures(index)}
            result["times"] = times(index, vectors, queries)
    if given.save:
        index.save(given.save)  # one file, replaced atomically; hashcore.BitIndex.load memory-maps it
    result["peak_bytes"] = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if given.out:
        given.out.write_text(json.dumps(rounded(result), indent=1) + "\n")
    print(json.dumps(rounded(result)))


if __name__ == "__main__":
    main()
