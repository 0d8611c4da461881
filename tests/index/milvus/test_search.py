"""What a search in Milvus returns: all that there is, in order, with the scores of the vectors that were added."""

import datetime
import threading

import numpy as np
import pyarrow as pa
import pytest


def table(count, **columns):
    return pa.table({"row": list(range(count)), **columns})


@pytest.mark.parametrize("factory", ["auto", "IVF4,Flat", "HNSW16"])
def test_search_is_brute_force(factory, make, vectors, queries, fill, build_index, check_search):
    tuples = fill(make(factory=factory), 300)
    stored = dict(enumerate(vectors[:300]))
    effort = {"IVF4,Flat": {"nprobe": 4}, "HNSW16": {"efSearch": 300}}.get(factory, {})
    for prepare in (lambda _: None, build_index):
        prepare(tuples)
        assert tuples.exact
        hits = check_search(tuples, stored, queries, 5, **effort)
        assert [[found["row"] for found in per_query] for per_query in hits.metadata] == hits.ids.tolist()
    assert tuples.factory == {"auto": "Flat"}.get(factory, factory)


def test_quantised_scores_are_said_to_be_estimates(make, vectors, queries, fill, build_index):
    tuples = fill(make(factory="IVF4,SQ8"), 300)
    build_index(tuples)
    hits = tuples.search(queries, 5, None, {"nprobe": 4})
    truth = np.take_along_axis(queries @ vectors[:300].T, hits.ids, axis=1)
    assert not hits.exact
    np.testing.assert_allclose(hits.scores, truth, atol=0.05 * np.abs(truth).max())
    assert (hits.scores != truth).any()


def test_k_beyond_the_count_is_padded_and_beyond_the_limit_refused(make, vectors, queries, fill, check_search):
    tuples = make()
    check_search(tuples, {}, queries, 3)
    assert len(tuples) == 0 and tuples.ids().tolist() == [] and tuples.get([]) == []
    fill(tuples, 2)
    check_search(tuples, dict(enumerate(vectors[:2])), queries, 16384)
    assert tuples.search(queries[:0], 3, None, {}).ids.shape == (0, 3)
    with pytest.raises(ValueError, match=r"k = 16385 .*16384"):
        tuples.search(queries, 16385, None, {})


@pytest.mark.parametrize("factory", ["auto", "IVF16,Flat", "IVF16,SQ8", "HNSW4"])
def test_never_fewer_than_there_are(factory, make, queries, fill, build_index):
    """A list that is probed holds too few, a graph may not lead to all that match."""
    tuples = fill(make(factory=factory), 400)
    build_index(tuples)
    effort = {tuples._plan.type.effort: 1} if tuples._plan.type.effort else {}
    for where, rows in (
        (None, range(400)),
        ("row < 9", range(9)),
        ("row = 1 or row = 399", [1, 399]),
    ):
        for k in (9, 400):
            hits = tuples.search(queries, k, where, effort)
            assert hits.counts.tolist() == [min(k, len(rows))] * len(queries)
            assert all(set(ids[:count]) <= set(rows) for ids, count in zip(hits.ids.tolist(), hits.counts))
            assert all(len(set(ids[:count])) == count for ids, count in zip(hits.ids.tolist(), hits.counts))


def test_what_milvus_does_not_find_is_found_by_brute_force(make, vectors, queries, monkeypatch, fill, check_search):
    tuples = fill(make(factory="HNSW8"), 50)
    monkeypatch.setattr(tuples._rows, "nearest", lambda queries, *_, **__: [[] for _ in queries])
    monkeypatch.setattr("mmcl.index.milvus_rows.METADATA_BYTES", 2**20)  # blocks of 15 rows
    check_search(tuples, dict(enumerate(vectors[:50])), queries, 60)
    hits = tuples.search(queries, 3, "row >= 48", {})
    assert hits.counts.tolist() == [2] * 7 and set(hits.ids[:, :2].ravel()) == {48, 49}


@pytest.fixture
def found(make, vectors, queries):
    """found(where): ids of the items that meet a condition, of three with metadata of many types."""
    tuples = make()
    columns = {
        "day": pa.array([19000, 19001, None], pa.date32()),
        "score": [1.0, np.nan, None],
        "grade": pa.array([1.0, np.inf, None]).dictionary_encode(),
        "o": [b"x", b"y", None],
        "tags": [["new", "it's"], [], None],
        "sizes": pa.array([[0.1, np.nan], [2, None], []], pa.list_(pa.float32())),
        "days": [[datetime.date(2024, 2, 29)], [], None],
        "blobs": [[b"x"], [], None],
        "nested": [[[1]], [], None],
    }
    tuples.add(np.arange(3), vectors[:3], table(3, **columns))

    def search(where):
        hits = tuples.search(queries[:1], 3, where, {})
        return sorted(hits.ids[0, : hits.counts[0]].tolist())

    return search


@pytest.mark.parametrize(
    ("where", "ids"),
    [
        ("day > '2022-01-08'", [1]),
        ("list_contains(tags, 'new')", [0]),
        (("list_contains(tags, ?)", ["it's"]), [0]),
        ("not list_contains(tags, 'new')", [1]),
        ("tags is null or list_contains(sizes, 2)", [1, 2]),
        ("list_contains(sizes, 0.1) and row = 0", [0]),
        ("not list_contains(sizes, 2)", [0, 2]),
        ("list_contains(days, DATE '2024-02-29')", [0]),
    ],
)
def test_filters_look_into_lists_too(where, ids, found):
    assert found(where) == ids


@pytest.mark.parametrize(
    ("where", "told"),
    [
        ("score > 0", "Milvus cannot compare column 'score': it holds NaN or infinity"),
        ("grade > 0", "Milvus cannot compare column 'grade': it holds NaN or infinity"),
        ("row > 0 or O = 'x'", "Milvus cannot compare column 'o': it holds binary"),
        ("list_contains(blobs, 'x')", "Milvus cannot compare column 'blobs': it holds list<.*binary>"),
        ("list_contains(nested, 1)", "Milvus cannot compare column 'nested': it holds list<.*list<"),
        ("row || 'o' = 'score'", r"\|\| is no value in Milvus"),
        ("colour = 'o'", "there is no metadata column 'colour'"),
        ("tags = 'o'", "tags.* is list, .* is string"),
    ],
)
def test_filters_that_milvus_cannot_answer_blame_the_column_they_name(where, told, found):
    """And no other, whose name is somewhere in the text."""
    with pytest.raises(ValueError, match=told):
        found(where)


def test_search_parameters_are_checked_and_reach_the_index(make, vectors, queries, fill, build_index, check_search):
    tuples = fill(make(factory="IVF16,Flat"), 500)
    build_index(tuples)
    tuples.check_parameters({"nprobe": 3})
    best = check_search(tuples, dict(enumerate(vectors)), queries, 5, nprobe=16).scores
    few = tuples.search(queries, 5, None, {"nprobe": 1}).scores
    assert (few <= best + 1e-5).all() and (few < best - 1e-3).any()
    for given, reason in (
        (
            {"efSearch": 3},
            r"unknown search parameter 'efSearch' for factory 'IVF16,Flat' in Milvus; it has \['nprobe'\]",
        ),
        ({"nprobe": 0}, "nprobe must be an integer >= 1, got 0"),
        ({"nprobe": True}, "got True"),
    ):
        with pytest.raises(ValueError, match=reason):
            tuples.check_parameters(given)


def test_searches_of_other_threads_miss_nothing_while_one_writes(make, queries, fill):
    tuples, failures = fill(make(), 40), []

    def search():
        while writer.is_alive():
            found = tuples.search(queries[:1], 40, None, {})
            failures.extend(set(range(40)) - set(ids) for ids in found.ids.tolist() if set(range(40)) - set(ids))

    def write():
        for start in range(40, 100, 20):
            rows = np.arange(start, start + 20)
            tuples.upsert(rows, -100 * queries[:1].repeat(20, 0), table(20))
            tuples.compact()
            tuples.remove(rows.tolist())

    writer = threading.Thread(target=write)
    readers = [threading.Thread(target=search) for _ in range(2)]
    for thread in (writer, *readers):
        thread.start()
    for thread in (writer, *readers):
        thread.join()
    assert failures == [] and len(tuples) == 40
