"""Writes to Milvus: whole or refused by name, seen by the next search, never twice."""

import subprocess
import sys
import time

import numpy as np
import pyarrow as pa
import pytest

from mmcl.index import milvus_columns, milvus_ids
from mmcl.index.milvus import MilvusTuples

NASTY = [
    "a'b\"c\\",
    "é\U0001f600",
    "line\nbreak\ttab\r",
    "nul\0",
    "\x01\x08",
    " ",
    "in",
    "1",
    "%_",
    "\\",
    '"',
    "x" * 9999,
]
BIG = [0, 2**53, 2**53 + 1, 2**62, 2**63 - 2, 2**63 - 1]


def names(keys):
    return np.array(keys, object)


def table(count, **columns):
    return pa.table({"row": list(range(count)), **columns})


@pytest.mark.parametrize("keys", [NASTY, BIG], ids=["str", "int"])
def test_any_id_is_added_found_replaced_and_removed(keys, make, vectors, queries, check_search):
    named = isinstance(keys[0], str)
    tuples, array = make(named=named), np.array(keys, object if named else np.int64)
    tuples.add(array, vectors[: len(keys)], table(len(keys)))
    stored = dict(zip(keys, vectors))
    check_search(tuples, stored, queries, len(keys))
    assert tuples.get(keys[::-1]) == [{"row": row} for row in range(len(keys))][::-1]
    assert sorted(tuples.ids().tolist()) == sorted(keys)
    np.testing.assert_array_equal(tuples.vectors(keys), vectors[: len(keys)])
    for row, key in enumerate(keys):
        tuples.upsert(array[row : row + 1], vectors[100 + row : 101 + row], pa.table({"row": [-1]}))
        assert tuples.get([key]) == [{"row": -1}] and len(tuples) == len(keys) - row
        tuples.remove([key])
        assert key not in tuples
        del stored[key]
        check_search(tuples, stored, queries, len(keys))


@pytest.mark.parametrize("seed", [0, 1])
def test_a_history_of_writes_is_that_of_a_dict(seed, make, vectors, queries, check_search):
    """Never a removed or a repeated id, on whichever side of a flush its versions lie."""
    rng, tuples, stored = np.random.default_rng(seed), make(named=True), {}
    for _ in range(14):
        keys = [f"'{key}'" for key in rng.choice(12, size=4, replace=False)]
        rows = vectors[rng.choice(500, size=4)]
        step = rng.choice(["add", "upsert", "remove", "compact"], p=[0.2, 0.35, 0.35, 0.1])
        if step == "compact":
            tuples.compact()
        elif step == "remove":
            keys = [key for key in keys if key in stored]
            tuples.remove(keys)
            stored = {key: row for key, row in stored.items() if key not in keys}
        else:
            keys = [key for key in keys if step == "upsert" or key not in stored]
            getattr(tuples, step)(names(keys), rows[: len(keys)], table(len(keys)))
            stored |= dict(zip(keys, rows))
        assert len(tuples) == len(stored)
        check_search(tuples, stored, queries[:2], 15)


def test_all_removed_then_added_again(make, vectors, queries, fill, check_search):
    tuples = fill(make(), 60)
    tuples.remove(range(60))
    check_search(tuples, {}, queries, 3)
    tuples.add(np.array([5]), vectors[100:101], table(1))
    check_search(tuples, {5: vectors[100]}, queries, 3)


def test_a_known_id_is_not_added_and_nothing_with_it(make, vectors, queries, fill, check_search):
    tuples = fill(make(), 60)
    with pytest.raises(ValueError, match=r"id 7 \(row 1\) is in the index already"):
        tuples.add(np.array([99, 7]), vectors[:2], table(2))
    assert 99 not in tuples
    check_search(tuples, dict(enumerate(vectors[:60])), queries, 60)


@pytest.mark.parametrize("unknown", [60, -1, 2**63, True, 1.0, "1", None], ids=str)
def test_an_unknown_id_is_named_and_nothing_is_removed(unknown, make, vectors, fill):
    tuples = fill(make(), 3)
    for refuse in (tuples.remove, tuples.get, tuples.vectors):
        with pytest.raises(KeyError, match=f"no item {unknown!r}; ids of this index are integers"):
            refuse([0, unknown])
    assert unknown not in tuples and len(tuples) == 3 and 0 in tuples


def test_what_does_not_fit_is_refused_and_nothing_stored(make, vectors):
    tuples = make(named=True)
    for ids, rows, reason in (
        (np.array([1]), vectors[:1], "ids of this index are strings, these are integers: 1"),
        (names(["a"]), vectors[:1, :5], r"width 8, got shape \(1, 5\)"),
        (names(["a", "b"]), vectors[:1], "2 ids need 2 vectors, got 1"),
        (names(["é" * 40000]), vectors[:1], "80000 bytes; Milvus takes 65535"),
    ):
        for write in (tuples.add, tuples.upsert):
            with pytest.raises(ValueError, match=reason):
                write(ids, rows, pa.table({}))
    with pytest.raises(ValueError, match=r"width 8, got shape \(1, 5\)"):
        tuples.search(vectors[:1, :5], 1, None, {})
    with pytest.raises(ValueError, match="metadata of item 'a' is .* bytes; Milvus takes 65536"):
        tuples.add(names(["a"]), vectors[:1], pa.table({"text": ["x" * 65536]}))
    assert len(tuples) == 0 and tuples.columns == []


def test_columns_come_later_and_keep_their_type(make, uri, vectors, fill):
    tuples = fill(make(), 2)
    other = MilvusTuples.open(uri, tuples.collection, 8)
    other.add(np.array([2]), vectors[2:3], pa.table({"day": pa.array([19000], pa.date32())}))
    day = pa.scalar(19000, pa.date32()).as_py()
    assert tuples.get([0, 2]) == [{"row": 0, "day": None}, {"row": None, "day": day}]
    with pytest.raises(ValueError, match="metadata column 'row' holds int64 in this index, and string does not fit"):
        tuples.add(np.array([3]), vectors[:1], pa.table({"row": ["three"]}))
    assert len(tuples) == 3 and tuples.columns == ["row", "day"]
    tuples.upsert(np.array([2]), vectors[:1], pa.table({}))
    assert tuples.get([2]) == [{"row": None, "day": None}]
    other.close()


def test_ids_go_on_behind_the_largest_that_ever_was(make, uri, vectors):
    tuples = make()
    tuples.add(None, vectors[:3], table(3))
    tuples.upsert(np.array([9]), vectors[:1], table(1))
    tuples.remove([9, 0])
    opened = MilvusTuples.open(uri, tuples.collection, 8)
    opened.add(None, vectors[:2], pa.table({}))
    assert opened.ids().tolist() == [1, 2, 10, 11]
    opened.close()
    tuples.add(np.array([2**63 - 1]), vectors[:1], table(1))
    with pytest.raises(ValueError, match=r"go beyond 2\^63 - 1"):
        tuples.add(None, vectors[:1], table(1))
    with pytest.raises(ValueError, match="ids of this index are strings; give one for each"):
        make(named=True).add(None, vectors[:1], table(1))


def claims(tuples):
    """Writers whose claims the collection knows."""
    properties = tuples._rows.call("describe_collection")["properties"]
    names = [name.removeprefix(milvus_ids.CLAIM) for name in properties if name.startswith(milvus_ids.CLAIM)]
    return {name.rpartition(".")[0] or name for name in names}


def test_whoever_read_an_old_state_gives_way(make, uri, vectors, monkeypatch):
    """Between what one reads and what it writes, another has taken the same ids."""
    tuples, read = make(), milvus_ids.claimed
    tuples.add(None, vectors[:3], table(3))
    other = MilvusTuples.open(uri, tuples.collection, 8)

    def overtaken(*place):
        monkeypatch.setattr(milvus_ids, "claimed", read)
        before = read(*place)
        other.add(None, vectors[3:5], table(2))
        return before

    monkeypatch.setattr(milvus_ids, "claimed", overtaken)
    tuples.add(None, vectors[5:6], table(1))
    found = tuples.ids().tolist()
    assert len(found) == 6 and found[:5] == [0, 1, 2, 3, 4] and found[5] >= 5
    np.testing.assert_array_equal(tuples.vectors([0, 1, 2, 3, 4, found[5]]), vectors[:6])
    assert claims(tuples) == {tuples._writer, other._writer}
    other.close()


def test_claims_of_those_that_are_gone_hold_and_old_ones_are_forgotten_once_they_are_passed(make, vectors):
    tuples, day = make(), 24 * 3600
    ends = {"old": (4, time.time() - 2 * day), "high": (7, time.time() - 2 * day), "new": (5, time.time())}
    properties = {f"{milvus_ids.CLAIM}{name}": f"{end} {at:.0f}" for name, (end, at) in ends.items()}
    tuples._rows.call("alter_collection_properties", properties=properties)
    tuples.add(None, vectors[:2], table(2))
    assert tuples.ids().tolist() == [7, 8] and claims(tuples) == {"new", tuples._writer}
    tuples.add(None, vectors[:1], table(1))
    assert tuples.ids().tolist() == [7, 8, 9] and claims(tuples) == {"new", tuples._writer}


def test_the_highest_claim_stays_however_old_it_is(make, vectors):
    tuples, long_ago = make(), time.time() - 48 * 3600
    properties = {f"{milvus_ids.CLAIM}{name}": f"{end} {long_ago:.0f}" for name, end in (("low", 4), ("high", 7))}
    tuples._rows.call("alter_collection_properties", properties=properties)
    milvus_ids.forget(tuples._connection, tuples.collection, *milvus_ids.claimed(tuples._connection, tuples.collection))
    assert claims(tuples) == {"high"}
    tuples.add(None, vectors[:1], table(1))
    assert tuples.ids().tolist() == [7]


def test_ids_that_the_caller_gives_are_known_to_writers_that_read_before(make, uri, vectors, monkeypatch):
    """Whoever took ids meanwhile does not make the collection forget that 50 was one."""
    tuples, read = make(), milvus_columns.parts_of
    other = MilvusTuples.open(uri, tuples.collection, 8)

    def overtaken(*place):
        monkeypatch.setattr(milvus_columns, "parts_of", read)
        before = read(*place)
        other.upsert(np.array([50]), vectors[:1], pa.table({"there": [True]}))
        return before

    monkeypatch.setattr(milvus_columns, "parts_of", overtaken)
    tuples.upsert(np.array([3]), vectors[1:2], pa.table({"here": [1.5]}))
    third = MilvusTuples.open(uri, tuples.collection, 8)
    third.add(None, vectors[:1], pa.table({}))
    assert third.ids().tolist() == [3, 50, 51]
    assert third.get([3, 50]) == [{"there": None, "here": 1.5}, {"there": True, "here": None}]
    for each in (other, third):
        each.close()


ADDING = """
import sys
import numpy as np, pyarrow as pa
from mmcl.index.milvus import MilvusTuples
tuples = MilvusTuples.open(sys.argv[1], sys.argv[2], 8)
mark = float(sys.argv[3])
input()
for turn in range(20):
    tuples.add(None, np.full((3, 8), mark + turn, np.float32), pa.table({}))
"""


@pytest.mark.slow
def test_processes_that_add_at_once_lose_nothing(uris):
    """Every item of every process is there: no id was given to two."""
    tuples = MilvusTuples.create(uris["server"], "at_once", 8, named=False)
    run = [sys.executable, "-c", ADDING, uris["server"], "at_once"]
    marks = [100, 200, 300]
    started = [subprocess.Popen([*run, str(mark)], stdin=subprocess.PIPE, text=True) for mark in marks]
    for process in started:
        process.stdin.write("go\n")
        process.stdin.flush()
    assert [process.wait() for process in started] == [0, 0, 0]
    found = sorted(tuples.vectors(tuples.ids().tolist())[:, 0].tolist())
    assert found == sorted(3 * [mark + turn for mark in marks for turn in range(20)])
    tuples.close()


@pytest.mark.slow
def test_more_rows_than_one_request_takes(make, queries):
    n = 40_000
    tuples, rows = make(named=True), np.random.default_rng(2).normal(size=(n, 8)).astype(np.float32)
    keys = [f"'{row}" for row in range(n)]
    tuples.add(names(keys), rows, table(n))
    assert len(tuples) == n and set(tuples.ids().tolist()) == set(keys)
    hits = tuples.search(queries[:2], 16384, None, {})
    assert (hits.counts == 16384).all() and hits.ids[0, 0] == keys[int(np.argmax(rows @ queries[0]))]
    assert tuples.get(keys) == [{"row": row} for row in range(n)]
    with pytest.raises(ValueError, match=r"id \"'39999\" \(row 0\)"):
        tuples.add(names(keys[::-1]), rows, table(n))
    tuples.remove(keys[:-1])
    assert tuples.ids().tolist() == keys[-1:]
