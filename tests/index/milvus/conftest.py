"""Small collections in Milvus Lite, in this process and on a server, and their brute-force answers."""

import itertools

import numpy as np
import pyarrow as pa
import pytest

from mmcl.index.milvus import MilvusTuples

WIDTH = 8
numbers = itertools.count()


@pytest.fixture(params=["lite", "server"])
def uri(request, uris):
    return uris[request.param]


@pytest.fixture
def make(uri):
    """make(named=False, factory="auto"): empty tuples of width 8, in a collection of their own."""
    made = []

    def create(named=False, **options):
        made.append(MilvusTuples.create(uri, f"c{next(numbers)}", WIDTH, named, **options))
        return made[-1]

    yield create
    for tuples in made:
        tuples.close()


@pytest.fixture(scope="session")
def vectors():
    """(500, 8) float32 of very different norms."""
    rng = np.random.default_rng(0)
    return (rng.normal(size=(500, WIDTH)) * rng.exponential(size=(500, 1))).astype(np.float32)


@pytest.fixture(scope="session")
def queries():
    return np.random.default_rng(1).normal(size=(7, WIDTH)).astype(np.float32)


@pytest.fixture(scope="session")
def fill(vectors):
    """fill(tuples, n): the tuples with items 0..n-1, and their numbers as metadata."""

    def add(tuples, n):
        tuples.add(np.arange(n), vectors[:n], pa.table({"row": list(range(n))}))
        return tuples

    return add


@pytest.fixture(scope="session")
def build_index():
    """build_index(tuples): Milvus Lite searches what is in memory one by one; an index is built of what is flushed."""

    def build(tuples):
        for step in ("release_collection", "flush", "load_collection"):
            tuples._rows.call(step)

    return build


@pytest.fixture(scope="session")
def check_search():
    """check_search(tuples, {id: vector}, queries, k): ids, scores and order are those of float64 brute force."""

    def check(tuples, stored, queries, k, **parameters):
        hits = tuples.search(queries, k, None, parameters)
        keys, found = list(stored), min(k, len(stored))
        rows = np.array([stored[key] for key in keys], np.float64).reshape(-1, WIDTH)
        truth, bound = queries.astype(np.float64) @ rows.T, 1e-5 * np.abs(queries) @ np.abs(rows.T)
        assert hits.counts.tolist() == [found] * len(queries)
        assert hits.scores.dtype == np.float32 and hits.ids.shape == hits.scores.shape == (len(queries), k)
        for row, ids in enumerate(hits.ids.tolist()):
            at = [keys.index(key) for key in ids[:found]]
            assert len(set(at)) == found
            best = np.sort(truth[row])[::-1][:found]
            assert (np.abs(hits.scores[row, :found] - truth[row, at]) <= bound[row, at]).all()
            assert (np.abs(best - truth[row, at]) <= 2 * bound[row].max(initial=0)).all()
            assert set(ids[found:]) <= {"" if tuples.named else -1}
            assert (hits.scores[row, found:] == -np.inf).all()
        return hits

    return check
