"""Filtered searches: exactly the matching items, as many as there are, under every type."""

import datetime as dt
import json
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from mmcl.index import TupleIndex, faiss_backend, filters

EVAL = Path(__file__).parents[2] / "eval"
STORED = ("image", "audio")
NAN = float("nan")


@pytest.fixture
def metadata():
    rows = range(700)
    return {
        "year": [None if row % 50 == 0 else 1990 + row % 40 for row in rows],
        "genre": [("rock", "jazz", "국악")[row % 3] for row in rows],
        "price": [NAN if row % 7 == 0 else row / 10 for row in rows],
        "day": [dt.date(2024, 1, 1) + dt.timedelta(days=row) for row in rows],
        "rare": [row in (17, 401, 650) for row in rows],
    }


CONDITIONS = {
    "year >= 2020 and genre = 'rock'": lambda row, m: (m["year"][row] or 0) >= 2020 and row % 3 == 0,
    "rare": lambda row, m: m["rare"][row],
    "not rare": lambda row, m: not m["rare"][row],
    "genre = '국악'": lambda row, m: row % 3 == 2,
    "year is null": lambda row, m: row % 50 == 0,
    "day < '2024-01-05'": lambda row, m: row < 4,
    "id in (3, 650)": lambda row, m: row in (3, 650),
    "false": lambda row, m: False,
    "isnan(price)": lambda row, m: row % 7 == 0,
}


@pytest.mark.parametrize("where", CONDITIONS)
def test_each_type_returns_the_matching_items_and_all_of_them(where, factory, build, queries, metadata):
    index = build(factory=factory, metadata=metadata)
    index.remove([17, 4])
    right = {row for row in range(700) if CONDITIONS[where](row, metadata)} - {17, 4}
    for k in (1, 10, 700):
        hits = index.search({"text": queries[:5]}, k=k, where=where)
        assert (hits.counts == min(k, len(right))).all()
        for ids, count in zip(hits.ids, hits.counts, strict=True):
            assert len(set(ids[:count])) == count
            assert set(ids[:count]) <= right
            assert (ids[count:] == -1).all()


@pytest.mark.parametrize("factory", ["Flat", "IVF16,Flat", "HNSW32", "IVF16,PQ8x4,RFlat"])
@pytest.mark.parametrize("where", ["rare", "year >= 2020 and genre = 'rock'", "not rare"])
def test_exact_types_return_the_best_of_the_matching(
    where, factory, build, queries, metadata, items, brute_force, make_score
):
    stored = {name: items[name] for name in STORED}
    true = brute_force(make_score("pairs_and_hadamard", 3, 16), stored, {"text": queries})
    right = np.array([bool(CONDITIONS[where](row, metadata)) for row in range(700)])
    index = build(factory=factory, metadata=metadata)
    k = min(5, right.sum())
    best = np.argsort(-np.where(right, true, -np.inf), axis=1, kind="stable")[:, :k]
    effort = {"IVF16,Flat": {"nprobe": 16}, "HNSW32": {"efSearch": 700}}.get(factory, {})
    effort = {"nprobe": 16, "k_factor": 100.0} if "RFlat" in factory else effort
    np.testing.assert_array_equal(index.search({"text": queries}, k=k, where=where, **effort).ids, best)


def test_parameters_are_bound_and_never_pasted(build, queries):
    index = build(rows=3, metadata={"genre": ["rock", "' or true --", "jazz"]})
    hits = index.search({"text": queries[0]}, where=("genre = ?", ["' or true --"]))
    assert hits.ids[0, : hits.counts[0]].tolist() == [1]
    hits = index.search({"text": queries[0]}, where=("genre = $name", {"name": "jazz"}))
    assert hits.ids[0, : hits.counts[0]].tolist() == [2]
    assert index.search({"text": queries[0]}, where=("genre = ?", ["rock; drop"])).counts[0] == 0


@pytest.mark.parametrize(
    ("where", "told"),
    [
        ("yaer > 2000", "yaer.*year"),
        ("year", "not a condition|no condition|BIGINT|INTEGER"),
        ("year >", "year >"),
        ("1 = 1; drop table items", ";|one"),
        ("year in (select 1)", "subquer"),
        ("", "empty|condition"),
        (5, "where"),
        (("year > ?", []), "param"),
    ],
)
def test_conditions_that_are_none_are_refused(where, told, build, queries):
    index = build(rows=3, metadata={"year": [1, 2, 3]})
    with pytest.raises(ValueError, match=told):
        index.search({"text": queries[0]}, where=where)


def test_added_items_and_new_columns_are_filtered_too(build, items, queries, tmp_path):
    index = build(rows=10, metadata={"a": list(range(10))})
    index.add({name: items[name][20:22] for name in STORED}, metadata={"a": [100, 5], "b": ["x", None]})
    index.save(tmp_path / "index")
    for each in (index, TupleIndex.load(tmp_path / "index"), TupleIndex.load(tmp_path / "index", memory_map=True)):
        found = each.search({"text": queries[0]}, where="a >= 5 and b is null")
        assert set(found.ids[0, : found.counts[0]]) == {5, 6, 7, 8, 9, 11}
        assert each.search({"text": queries[0]}, where="b = 'x'").ids[0, 0] == 10
    named = build(rows=3, ids=["p", "q", "r"])
    assert named.search({"text": queries[0]}, where="id > 'p'").counts[0] == 2


def test_a_memory_mapped_index_filters_in_its_file(build, queries, metadata, tmp_path):
    build(metadata=metadata).save(tmp_path / "index")
    index = TupleIndex.load(tmp_path / "index", memory_map=True)
    found = index.search({"text": queries[0]}, where="rare")
    assert set(found.ids[0, : found.counts[0]]) == {17, 401, 650}
    assert "whole" not in vars(index._tuples.snapshot.items.metadata)


def test_a_filter_is_evaluated_once_a_version(build, queries, items, monkeypatch):
    index = build(rows=20, metadata={"a": list(range(20))})
    calls, matching = [], filters.matching
    monkeypatch.setattr(filters, "matching", lambda *given: calls.append(given) or matching(*given))
    for _ in range(3):
        index.search({"text": queries[0]}, where="a < 5")
    assert len(calls) == 1
    index.remove(0)
    assert index.search({"text": queries[0]}, where="a < 5").counts[0] == 4
    assert len(calls) == 2


def test_threads_filter_at_once(build, queries, metadata):
    index = build(metadata=metadata)
    failures = []

    def ask(genre, rest):
        for _ in range(20):
            found = index.search({"text": queries}, k=5, where=("genre = ?", [genre])).ids
            if (found % 3 != rest).any():
                failures.append(found)

    threads = [threading.Thread(target=ask, args=each) for each in (("rock", 0), ("jazz", 1), ("국악", 2))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


@pytest.mark.parametrize("factory", ["Flat", "HNSW16", "IVF16,Flat", "IVF16,PQ8x4,RFlat", "Exact"])
@pytest.mark.parametrize("block", [7, 2**17])
def test_a_fifth_of_the_rows_is_searched_exactly(
    factory, block, build, queries, brute_force, make_score, items, monkeypatch
):
    """However few lists a search probes, and in whatever parts the rows are read back."""
    monkeypatch.setattr("mmcl.index.faiss_backend.EXACT_ROWS", 0)
    monkeypatch.setattr("mmcl.index.faiss_backend.AMONG_ROWS", block)
    index = build(factory=factory, metadata={"fifth": np.arange(700) % 5 == 0})
    effort = {"nprobe": 1} if "IVF" in factory else {}
    hits = index.search({"text": queries}, k=20, where="fifth", **effort)
    stored = {name: items[name][::5] for name in STORED}
    scores = brute_force(make_score("pairs_and_hadamard", 3, 16), stored, {"text": queries})
    best = np.argsort(-scores, axis=1, kind="stable")[:, :20]
    np.testing.assert_array_equal(hits.ids, 5 * best)
    np.testing.assert_allclose(hits.scores, np.take_along_axis(scores, best, axis=1), atol=1e-4)


def test_the_share_is_the_one_that_was_measured():
    """From there on graphs and lists find as many of random rows as without a filter, and below they find fewer."""
    measured = json.loads((EVAL / "results" / "filters.json").read_text())
    assert measured["used"]["EXACT_SHARE"] == faiss_backend.EXACT_SHARE
    searched = {
        (row["factory"], row["share"]): row["searched"]["recall"]
        for row in measured["rows"]
        if row["kind"] == "random" and row["factory"] not in ("Flat", "SQ8")
    }
    for factory in {factory for factory, _ in searched}:
        assert searched[factory, 0.2] > searched[factory, 0.5] - 0.01
        assert searched[factory, 0.05] < searched[factory, 0.5] - 0.1


def test_the_measurement_runs_and_refuses_what_it_cannot_measure(tmp_path):
    command = [sys.executable, EVAL / "benchmarks" / "filters.py", "--rounds", "1", "--out", tmp_path, "--count"]
    subprocess.run([*command, "5000", "--shares", "0.1"], check=True, capture_output=True)
    rows = json.loads((tmp_path / "filters.json").read_text())["rows"]
    assert all(row["looked at"]["recall"] == 1 for row in rows if "SQ8" not in row["factory"])
    refused = subprocess.run([*command, "50"], check=False, capture_output=True, text=True)
    assert refused.returncode == 2
    assert "--count must be 5000 or more" in refused.stderr


def test_a_mapped_index_without_metadata_filters_by_the_ids_it_has_now(build, items, queries, tmp_path):
    build(rows=100).save(tmp_path / "index")
    index = TupleIndex.load(tmp_path / "index", memory_map=True)
    index.remove([0, 1])
    for _ in range(2):
        index.add({name: items[name][:2] for name in STORED})
        hits = index.search({"text": queries[:1]}, k=9, where="id < 4 or id >= 99")
        assert sorted(hits.ids[0, : hits.counts[0]]) == [2, 3, 99, *range(100, 100 + len(index) - 98)]
        index.compact()


def test_a_mapped_index_filters_in_its_file_also_when_another_version_took_its_place(build, items, queries, tmp_path):
    build(rows=100, metadata={"year": range(100)}).save(tmp_path / "index")
    mapped = TupleIndex.load(tmp_path / "index", memory_map=True)
    other = TupleIndex.load(tmp_path / "index")
    for year in range(5):
        other.remove([year])
        other.compact()
        other.save(tmp_path / "index")
        hits = mapped.search({"text": queries[:1]}, k=9, where=("year <= ?", [year]))
        assert hits.counts.tolist() == [year + 1]
    assert "whole" not in vars(mapped._tuples.snapshot.items.metadata), "metadata stays in the file"
