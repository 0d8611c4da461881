"""What a search in Milvus returns: all that there is, in order, with the scores of the vectors that were added."""

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
def test_never_fewer_than_there_are(factory, make, queries, raw_filters, fill, build_index):
    """A list that is probed holds too few, a graph may not lead to all that match."""
    tuples = fill(make(factory=factory), 400)
    build_index(tuples)
    effort = {tuples._plan.type.effort: 1} if tuples._plan.type.effort else {}
    for where, rows in (
        (None, range(400)),
        ("metadata['row'] < 9", range(9)),
        ("metadata['row'] == 1 or metadata['row'] == 399", [1, 399]),
    ):
        for k in (9, 400):
            hits = tuples.search(queries, k, where, effort)
            assert hits.counts.tolist() == [min(k, len(rows))] * len(queries)
            assert all(set(ids[:count]) <= set(rows) for ids, count in zip(hits.ids.tolist(), hits.counts))
            assert all(len(set(ids[:count])) == count for ids, count in zip(hits.ids.tolist(), hits.counts))


def test_what_milvus_does_not_find_is_found_by_brute_force(
    make, vectors, queries, raw_filters, monkeypatch, fill, check_search
):
    tuples = fill(make(factory="HNSW8"), 50)
    monkeypatch.setattr(tuples._rows, "nearest", lambda queries, *_, **__: [[] for _ in queries])
    monkeypatch.setattr("mmcl.index.milvus_rows.METADATA_BYTES", 2**20)  # blocks of 15 rows
    check_search(tuples, dict(enumerate(vectors[:50])), queries, 60)
    hits = tuples.search(queries, 3, 'metadata["row"] >= 48', {})
    assert hits.counts.tolist() == [2] * 7 and set(hits.ids[:, :2].ravel()) == {48, 49}


def test_filters_see_only_columns_that_mean_the_same_in_milvus(make, vectors, queries, raw_filters):
    tuples = make()
    columns = {
        "day": pa.array([19000, 19001], pa.date32()),
        "score": [1.0, np.nan],
        "blob": [b"x", b"y"],
        "size": [0.5, 2],
    }
    tuples.add(np.arange(2), vectors[:2], table(2, **columns))
    hits = tuples.search(queries, 2, 'metadata["day"] > "2022-01-08"', {})
    assert hits.ids[:, 0].tolist() == [1] * 7 and hits.counts.tolist() == [1] * 7
    assert list(raw_filters.columns) == ["row", "day", "size"]
    for name, why in (("score", "NaN or infinity"), ("blob", "binary")):
        with pytest.raises(ValueError, match=f"Milvus cannot compare column '{name}': it holds {why}"):
            tuples.search(queries, 2, f'metadata["{name}"] > 0', {})
    with pytest.raises(ValueError, match="unknown column 'colour'"):
        tuples.search(queries, 2, 'metadata["colour"] == 1', {})


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
