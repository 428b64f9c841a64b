"""BitIndex against a list of its rows: any history of additions, removals and copies, then searches of every kind."""

import copy
import pickle
import uuid

import numpy as np
from fuzz_arrays import codes, lay
from fuzz_damage import folder
from fuzz_places import somewhere
from hashcore import BitIndex, reference


@somewhere
def case(rng: np.random.Generator) -> int:
    """Build an index, change it and search it; return how many searches were compared."""
    dim, plain = 32 * int(rng.integers(1, 5)), bool(rng.random() < 0.5)
    keep = rng.choice([None, "float16", "float32"])
    index, known = BitIndex(dim, encoder="sign", keep=keep), {}
    others = []
    for _ in range(int(rng.integers(1, 6))):
        change(rng, index, known, dim, plain)
        if rng.random() < 0.3:  # from here on both change
            others.append((index, dict(known)))
            index = [copy.copy, copy.deepcopy, pickled, read_back][rng.integers(4)](index)
            change(rng, *others[-1], dim, plain)
    for each, rows in [*others, (index, known)]:
        assert list(each) == list(rows)
    return search(rng, *([*others, (index, known)][rng.integers(len(others) + 1)]), dim, plain)


def pickled(index):
    return pickle.loads(pickle.dumps(index))  # noqa: S301  what was pickled here


def read_back(index):
    """Save and load it: what is loaded lies in the file until it changes."""
    path = folder() / f"{uuid.uuid4()}.index"
    index.save(path)
    return BitIndex.load(path)


def change(rng, index, known, dim, plain):
    """Add or remove a few rows, by default or by ids of any order."""
    if known and rng.random() < 0.4:
        gone = rng.choice(np.array(list(known)), rng.integers(len(known) + 1), replace=False)
        index.remove(gone)
        for number in gone.tolist():
            del known[number]
        return
    count = int(rng.choice([0, 1, 7, 70, 900]))
    x = rng.integers(-3, 4, (count, dim)).astype(rng.choice([np.float16, np.float32, np.float64]))
    x = lay(rng, x, plain, any_order=True)
    if rng.random() < 0.5:
        ids, first = None, index._rows.next_id
        numbers = range(first, first + count)
    else:
        free = np.setdiff1d(np.arange(4000), np.array(list(known), np.int64))
        ids = lay(rng, rng.permutation(free)[:count], plain, any_order=False)
        ids = np.unique(ids) if len(np.unique(ids)) == count else rng.permutation(free)[:count]
        numbers = ids.tolist()
    index.add(x, ids)
    known |= {number: row.astype(np.float64) for number, row in zip(numbers, x, strict=True)}


def search(rng, index, known, dim, plain) -> int:
    """Search by codes, weighted planes, vectors, and exactly."""
    ids, x = np.array(list(known), np.int64), np.array(list(known.values())).reshape(len(known), dim)
    keys = reference.pack(x) if known else np.empty((0, dim // 32), np.int32)
    k = int(rng.integers(0, len(known) + 1))
    query = lay(rng, codes(rng, int(rng.integers(0, 4)), dim // 32), plain, any_order=False)
    same(index.search(query, k), reference.search(query, keys, k), ids)
    w = lay(rng, rng.integers(-9, 10, (int(rng.integers(1, 4)), dim)).astype(np.float32), plain, any_order=True)
    planes, weights = reference.planes(w, count := int(rng.integers(1, 9)))
    expected = reference.search(planes, keys, k, weights)
    same(index.search(w, k, planes=count), expected, ids)
    same(index.search(planes, k, weights=weights), expected, ids)
    chosen = rng.random(len(ids)) < rng.choice([0, 0.01, 0.5, 1])
    few = min(k, int(chosen.sum()))
    expected = reference.search(planes, keys[chosen], few, weights)
    name, which = ("ids", chosen) if rng.random() < 0.5 else ("without", ~chosen)
    given = {name: which if rng.random() < 0.3 else rng.permutation(ids[which])}
    same(index.search(planes, few, weights=weights, **given), expected, ids[chosen])
    if index.keep:
        cosine, exact = bool(rng.random() < 0.5), w.astype(np.float64) @ x.T
        if cosine:
            norms = np.sqrt((w.astype(np.float64) ** 2).sum(-1)[:, None] * (x**2).sum(-1))
            exact = np.divide(exact, norms, out=np.zeros_like(exact), where=norms > 0)
        found, at = index.search(w, k, rerank=len(ids) + 1, metric="cosine" if cosine else "dot")
        place = np.argsort(ids)[np.searchsorted(ids, at, sorter=np.argsort(ids))] if k else at
        np.testing.assert_allclose(found, np.take_along_axis(exact, place, -1), rtol=1e-6, atol=1e-6)
        best = -np.sort(-exact, axis=-1)[:, :k]
        np.testing.assert_allclose(found, best, rtol=1e-6, atol=1e-6)
    return 4 + bool(index.keep)


def same(found, expected, ids):
    scores, positions = expected
    np.testing.assert_array_equal(found[0], scores, strict=True)
    np.testing.assert_array_equal(found[1], ids[positions], strict=True)
