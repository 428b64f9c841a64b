"""Nearest embeddings by bit codes, without torch: recall, time and memory, compared with exact search.

    uv run examples/bit_index.py                              # 50,000 random embeddings
    uv run examples/bit_index.py --vectors embeddings.npy     # your own: floats [n, D], as numpy.save writes them
    uv run examples/bit_index.py --vectors embeddings.npy --save embeddings.index

The last rows are the queries and are not indexed. Similarity is the cosine. Needs only hashcore.
"""

import argparse
import pathlib
import time
from collections.abc import Callable
from typing import TypeVar

import hashcore
import numpy as np
from numpy.typing import NDArray

K = 10
Vectors = NDArray[np.float32]
Found = TypeVar("Found")


def made_up(count: int, dim: int = 384) -> Vectors:
    """Draw clustered vectors [count, dim] with decreasing variance over dimensions, like learned embeddings."""
    rng = np.random.default_rng(0)
    centres = rng.standard_normal((count // 100 + 1, dim), np.float32)
    drawn = centres[rng.integers(0, len(centres), count)] + rng.standard_normal((count, dim), np.float32)
    return drawn * (np.arange(1, dim + 1) ** -0.5).astype(np.float32)


def unit(vectors: Vectors) -> Vectors:
    """Scale every row to length 1, so that inner products are cosines; zero rows stay zero."""
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return (vectors / np.where(lengths > 0, lengths, 1)).astype(np.float32)


def exact(queries: Vectors, stored: Vectors) -> NDArray[np.int64]:
    """Return the rows of the K largest inner products of each query, [Q, K], unordered."""
    return np.argpartition(queries @ stored.T, -K, axis=1)[:, -K:]


def timed(work: Callable[[], Found], repeats: int = 3) -> tuple[Found, float]:
    """Return the result of the work and its shortest time in seconds, after a first call that compiles."""
    found, times = work(), []
    for _ in range(repeats):
        begun = time.perf_counter()
        found = work()
        times.append(time.perf_counter() - begun)
    return found, min(times)


def recall(found: NDArray[np.int64], wanted: NDArray[np.int64]) -> float:
    """Return the mean share of the wanted rows that were found."""
    return float(np.mean([len(np.intersect1d(a, b)) / K for a, b in zip(found, wanted, strict=True)]))


def compare(vectors: Vectors, queries: int, save: pathlib.Path | None) -> dict[str, float]:
    """Search in several ways, print one line each, and return recall by way of searching."""
    stored, asked = vectors[:-queries], vectors[-queries:]
    # Codes are the signs after a random rotation, one bit per dimension: 1/32 of float32.
    index = hashcore.BitIndex.from_vectors(stored, centre=True)
    ways: dict[str, tuple[Callable[[], NDArray[np.int64]], int]] = {
        "exact": (lambda: exact(asked, stored), stored.nbytes),
        "1 plane": (lambda: index.search(asked, K, planes=1)[1], index.nbytes),
        # Stored vectors keep one bit per number. The query may keep three: its planes cost time, not memory.
        "3 planes": (lambda: index.search(asked, K, planes=3)[1], index.nbytes),
        # Codes find 40 candidates; the original vectors (in memory here, or a memory-mapped file) rerank them.
        "3 planes, rerank": (lambda: index.search(asked, K, rerank=4, vectors=stored)[1], index.nbytes),
    }
    print(f"{len(stored):,} embeddings of {stored.shape[1]} numbers, {queries} queries, {index.bits} bits")
    print(f"{'':18}{f'recall@{K}':>10}{'ms/query':>12}{'MB':>8}")
    recalls: dict[str, float] = {}
    wanted: NDArray[np.int64] | None = None
    for name, (search, size) in ways.items():
        found, seconds = timed(search)
        wanted = found if wanted is None else wanted
        recalls[name] = recall(found, wanted)
        print(f"{name:18}{recalls[name]:>10.3f}{1e3 * seconds / queries:>12.3f}{size / 1e6:>8.1f}")
    if save is not None:
        index.save(save)  # one file, replaced atomically; hashcore.BitIndex.load memory-maps it
        print(f"saved to {save}: {save.stat().st_size / 1e6:.1f} MB")
    return recalls


def main(arguments: list[str] | None = None) -> dict[str, float]:
    """Parse the arguments, compare, and return recall by way of searching."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vectors", type=pathlib.Path, help="an .npy file of floats [n, D]; default: random")
    parser.add_argument("--count", type=int, default=50_000, help="number of random embeddings")
    parser.add_argument("--queries", type=int, default=100, help="number of last rows to search for")
    parser.add_argument("--save", type=pathlib.Path, help="path for the index")
    given = parser.parse_args(arguments)
    if given.vectors is None:
        vectors = made_up(given.count)
    else:
        if given.vectors.exists() and not given.vectors.is_file():
            parser.error(f"--vectors must be a regular file, got {given.vectors}; name an .npy file of floats")
        try:
            vectors = np.load(given.vectors, allow_pickle=False)
        except OSError as error:
            parser.error(f"cannot read --vectors {given.vectors}: {error.strerror}; name an .npy file of floats")
        except (EOFError, ValueError):  # numpy's own message advises unpickling the file
            parser.error(f"--vectors must be an .npy file of floats as numpy.save writes it, got {given.vectors}")
    if vectors.ndim != 2 or not np.issubdtype(vectors.dtype, np.floating):
        parser.error(f"--vectors must be floats of shape [n, D], got {vectors.dtype} {list(vectors.shape)}")
    if given.queries < 1 or len(vectors) - given.queries < 4 * K:
        parser.error(f"expected a query and at least {4 * K} embeddings more, got {len(vectors)} and {given.queries}")
    return compare(unit(vectors.astype(np.float32)), given.queries, given.save)


if __name__ == "__main__":
    main()
