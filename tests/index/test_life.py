"""Adding, replacing and removing items, under every type of index."""

import threading

import numpy as np
import pytest

from mmcl.index import TupleIndex
from mmcl.index.local import FOLD_ROWS
from mmcl.scores import SumOfPairs

STORED = ("image", "audio")


def take(items, rows):
    return {name: items[name][rows] for name in STORED}


def test_every_item_once_and_no_other_through_a_whole_life(factory, build, items, queries, tmp_path):
    index = build(rows=600, factory=factory)
    alive = set(range(600))

    def check(index):
        hits = index.search({"text": queries[:4]}, k=800)
        assert len(index) == len(alive)
        for ids, count in zip(hits.ids, hits.counts, strict=True):
            assert count == len(alive)
            assert set(ids[:count]) == alive
            assert (ids[count:] == -1).all()
        assert (hits.scores[:, len(alive) :] == -np.inf).all()
        assert all(key in index for key in list(alive)[:5])

    index.remove(list(range(50, 250)))
    alive -= set(range(50, 250))
    check(index)
    index.add(take(items, slice(600, 650)))
    alive |= set(range(600, 650))
    check(index)
    index.add(take(items, slice(60, 70)), ids=range(60, 70))  # removed before
    alive |= set(range(60, 70))
    index.upsert(take(items, slice(0, 20)), ids=range(20))
    check(index)
    index.save(tmp_path / "index")
    index = TupleIndex.load(tmp_path / "index")
    check(index)
    index.compact()
    check(index)
    index.remove(5)
    alive.remove(5)
    check(index)
    index.save(tmp_path / "index")
    check(TupleIndex.load(tmp_path / "index"))
    index.remove(sorted(alive))
    alive.clear()
    check(index)
    index.compact()
    check(index)
    index.add(take(items, slice(0, 30)), ids=range(30))
    alive |= set(range(30))
    check(index)
    index.compact()
    check(index)


def test_delete_the_ten_nearest_of_sixty_then_ask_for_one(factory, build, items, queries):
    rows = 60 if factory in ("Flat", "HNSW32", "SQ8", "SQfp16", "HNSW16,SQ8", "IVF16,Flat") else 300
    index = build(rows=rows, factory=factory)
    nearest = index.search({"text": queries[0]}, k=10)
    following = index.search({"text": queries[0]}, k=11).ids[0, 10]
    index.remove(nearest.ids[0])
    hits = index.search({"text": queries[0]}, k=1)
    assert hits.counts[0] == 1
    assert hits.ids[0, 0] not in nearest.ids[0]
    if factory == "Flat":
        assert hits.ids[0, 0] == following


@pytest.mark.parametrize(
    ("change", "error", "told"),
    [
        (lambda index, rows: index.add(rows, ids=[90, 3]), ValueError, r"id 3 \(row 1\).*upsert"),
        (lambda index, rows: index.add(rows, ids=[90, 90]), ValueError, "duplicate id 90"),
        (lambda index, rows: index.add(rows, ids=[90]), ValueError, "2 items need 2 ids"),
        (lambda index, rows: index.add(rows, ids=["a", "b"]), ValueError, "integers, these are strings: 'a'"),
        (lambda index, rows: index.add(rows, ids=[90, -1]), ValueError, "-1 in row 1"),
        (lambda index, rows: index.add({"image": rows["image"]}), ValueError, r"stores \['image', 'audio'\]"),
        (lambda index, rows: index.add(rows, metadata={"year": [1]}), ValueError, "'year' has 1 rows, there are 2"),
        (lambda index, rows: index.add(rows, metadata={"year": ["x", "y"]}), ValueError, "'year' holds int64.*string"),
        (lambda index, rows: index.upsert(rows, ids=None), ValueError, "upsert needs ids"),
        (lambda index, rows: index.remove([2, 99]), KeyError, "99"),
        (lambda index, rows: index.remove([2, "2"]), KeyError, "'2'"),
        (lambda index, rows: index.remove([True]), KeyError, "True"),
        (lambda index, rows: index.get([2, 99]), KeyError, "99"),
    ],
)
def test_refused_changes_change_nothing(change, error, told, build, items, queries):
    index = build(rows=20, metadata={"year": list(range(20))})
    before = index.search({"text": queries}, k=25)
    with pytest.raises(error, match=told):
        change(index, take(items, [30, 31]))
    after = index.search({"text": queries}, k=25)
    np.testing.assert_array_equal(before.ids, after.ids)
    assert len(index) == 20
    assert index.get(19) == {"year": 19}
    index.add(take(items, [30, 31]), metadata={"year": [5, None]})
    assert index.get([20, 21]) == [{"year": 5}, {"year": None}]


def test_a_bad_row_of_an_addition_is_named_and_nothing_is_stored(build, items):
    index = build(rows=20)
    rows = take(items, [1, 2, 3])
    rows["audio"] = rows["audio"].copy()
    rows["audio"][2] = np.nan
    with pytest.raises(ValueError, match="audio: row 2 holds NaN"):
        index.add(rows)
    assert len(index) == 20


def test_metadata_columns_come_and_stay(build, items, tmp_path):
    index = build(rows=3, metadata={"a": [1, 2, 3]})
    index.add(take(items, [5]), metadata={"b": ["x"]})
    index.add(take(items, [6]))
    index.add(take(items, [7]), metadata={"a": [7], "b": [None]})
    index.save(tmp_path / "index")
    for each in (index, TupleIndex.load(tmp_path / "index")):
        assert each.get([0, 3, 4, 5]) == [
            {"a": 1, "b": None},
            {"a": None, "b": "x"},
            {"a": None, "b": None},
            {"a": 7, "b": None},
        ]
    whole = build(rows=1)
    whole.add(take(items, [1]), metadata={"late": [2.5]})
    assert whole.get([0, 1]) == [{"late": None}, {"late": 2.5}]


def test_automatic_ids_are_never_given_twice(build, items, tmp_path):
    index = build(rows=5)
    index.remove(4)
    index.compact()
    index.save(tmp_path / "index")
    index = TupleIndex.load(tmp_path / "index")
    index.add(take(items, [1, 2]))
    assert [key for key in range(8) if key in index] == [0, 1, 2, 3, 5, 6]
    index.add(take(items, [1]), ids=[2**63 - 1])
    with pytest.raises(ValueError, match="beyond"):
        index.add(take(items, [1]))


def test_an_empty_index_takes_the_kind_of_its_first_ids(build, items, tmp_path):
    index = build(rows=0)
    index.save(tmp_path / "index")
    index = TupleIndex.load(tmp_path / "index")
    index.add(take(items, [1, 2]), ids=["a", "b"])
    assert "a" in index
    index.save(tmp_path / "index")
    assert "b" in TupleIndex.load(tmp_path / "index")


@pytest.mark.parametrize("factory", ["Flat", "IVF16,SQ8", "HNSW16", "SQ8"])
def test_many_added_rows_join_the_others(factory, build, unit_rows, queries, brute_force, make_score):
    index = build(rows=64, factory=factory)
    more = {name: unit_rows(FOLD_ROWS + 100, 16, seed) for seed, name in enumerate(STORED)}
    for start in range(0, FOLD_ROWS + 100, 1000):
        index.add({name: rows[start : start + 1000] for name, rows in more.items()})
    base = index._tuples.snapshot.base
    assert len(base) > FOLD_ROWS
    hits = index.search({"text": queries}, k=10)
    assert len(index) == 64 + FOLD_ROWS + 100
    found = brute_force(make_score("pairs_and_hadamard", 3, 16), more, {"text": queries})
    later = hits.ids >= 64
    true = np.take_along_axis(found, np.maximum(hits.ids - 64, 0), axis=1)
    np.testing.assert_allclose(hits.scores[later], true[later], atol=0.15 if "SQ8" in factory else 1e-3)


def test_added_values_beyond_a_quantiser_s_range_are_not_clipped(make_score, unit_rows):
    score = SumOfPairs(("a", "b"), 16, temperature=1.0)
    for factory in ("SQ8", "IVF4,SQ8", "HNSW16,SQ8", "SQ4", "PCA16,SQ8", "IVF4,PQ4x4,Refine(SQ8)", "MIPS,IVF4,SQ8"):
        index = TupleIndex.build(score, {"a": unit_rows(300, 16)}, factory=factory)
        long = 20 * unit_rows(10, 16, seed=5).numpy()
        index.add({"a": long})
        index.compact()
        hits = index.search({"b": unit_rows(1, 16, seed=6)}, k=310)
        true = long @ unit_rows(1, 16, seed=6).numpy()[0]
        scores = dict(zip(hits.ids[0].tolist(), hits.scores[0].tolist(), strict=True))
        np.testing.assert_allclose([scores[300 + i] for i in range(10)], true, atol=2.5 if "SQ4" in factory else 0.25)


def test_values_beyond_float16_are_refused_as_they_are_added(make_score, unit_rows):
    index = TupleIndex.build(SumOfPairs(("a", "b"), 16), {"a": unit_rows(30, 16)}, factory="SQfp16")
    rows = unit_rows(3, 16, seed=2)
    rows[1] *= 1e6
    with pytest.raises(ValueError, match="row 1.*float16"):
        index.add({"a": rows})
    assert len(index) == 30


@pytest.mark.parametrize("factory", ["MIPS,SQfp16", "MIPS,IVF4,SQfp16", "MIPS,HNSW16,SQfp16"])
def test_a_short_row_is_stored_beside_one_as_long_as_float16_holds(factory, unit_rows):
    """The coordinate that lifts the short one to the length of the long one is beyond float16."""
    short, long = unit_rows(60, 16).numpy(), np.full((40, 16), 30_000, np.float32)
    index = TupleIndex.build(SumOfPairs(("a", "b"), 16, temperature=1.0), {"a": long}, factory=factory)
    index.add({"a": short})
    index.compact()
    query, effort = unit_rows(1, 16, seed=3), {"nprobe": 4} if "IVF" in factory else {}
    expected = np.concatenate([long, short]) @ query.numpy()[0]
    found = index.search({"b": query}, k=100, **effort).scores[0]
    np.testing.assert_allclose(found, np.sort(expected)[::-1], atol=0.01, rtol=0.002)


@pytest.mark.parametrize("factory", ["Flat", "IVF16,Flat", "HNSW16"])
def test_every_answer_is_of_one_version_while_another_thread_writes(factory, build, items, queries):
    """The writer swaps one half of the ids for the other in one call each: an answer holds one half, whole."""
    index = build(rows=400, factory=factory)
    index.remove(np.arange(200, 400))
    halves = {frozenset(range(200)), frozenset(range(200, 400))}
    failures, done = [], threading.Event()

    def read():
        while not done.is_set():
            ids = index.search({"text": queries[:2]}, k=400, **({"nprobe": 16} if "IVF" in factory else {})).ids
            for row in ids:
                found = frozenset(row[row >= 0].tolist())
                # 200 .. 400 items: an upsert adds the half that is missing, a removal takes the other away
                if not any(half <= found for half in halves):
                    failures.append(sorted(found))

    readers = [threading.Thread(target=read) for _ in range(4)]
    for reader in readers:
        reader.start()
    try:
        for turn in range(12):
            coming, going = (np.arange(200, 400), np.arange(200))[:: 1 if turn % 2 == 0 else -1]
            index.upsert(take(items, coming), ids=coming)
            index.remove(going)
            if turn % 4 == 3:
                index.compact()
    finally:
        done.set()
        for reader in readers:
            reader.join()
    assert failures == []


def test_exact_is_flat_where_it_does_not_pay(build, queries, tmp_path, monkeypatch):
    """Built with matrix units and loaded without, or never built with them: the same answers."""
    expected = build(factory="Flat").search({"text": queries})
    monkeypatch.setattr("mmcl.index.exact_backend.exact_pays", lambda device: True)
    build(factory="Exact").save(tmp_path / "index")
    monkeypatch.setattr("mmcl.index.local_files.exact_pays", lambda device: False)
    monkeypatch.setattr("mmcl.index.exact_backend.exact_pays", lambda device: False)
    loaded, built = TupleIndex.load(tmp_path / "index"), build(factory="Exact")
    for index in (loaded, built):
        assert index.info()["factory"] == "Flat"
        hits = index.search({"text": queries})
        np.testing.assert_array_equal(hits.ids, expected.ids)
        np.testing.assert_allclose(hits.scores, expected.scores, rtol=1e-5)
    mapped = TupleIndex.load(tmp_path / "index", memory_map=True)
    np.testing.assert_array_equal(mapped.search({"text": queries}).ids, expected.ids)
