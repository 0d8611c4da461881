"""New columns in Milvus, brought by several clients at once: none is lost, none changes its type."""

import json
import math
import re
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pytest

from mmcl.index import milvus_columns
from mmcl.index.milvus import MilvusTuples
from mmcl.index.milvus_about import COLUMNS, About, Brought
from mmcl.index.milvus_ids import CLAIM


@pytest.fixture
def pair(make, uri):
    """Two clients of one collection."""
    first = make()
    second = MilvusTuples.open(uri, first.collection, 8)
    yield first, second
    second.close()


def one(number, **columns):
    return np.array([number]), np.full((1, 8), number + 1, np.float32), pa.table(columns)


@pytest.fixture
def overtake(monkeypatch):
    """overtake(act, at=0): `act()` happens right behind what the next writer reads for the `at`-th time."""

    def arrange(act, at=0):
        read, turns = milvus_columns.parts_of, iter(range(at + 1))

        def overtaken(*place):
            seen = read(*place)
            if next(turns) == at:
                monkeypatch.setattr(milvus_columns, "parts_of", read)
                act()
            return seen

        monkeypatch.setattr(milvus_columns, "parts_of", overtaken)

    return arrange


def test_two_clients_that_bring_columns_at_once_lose_none(pair, uri, overtake):
    first, second = pair
    overtake(lambda: second.upsert(*one(2, year=[1999])))
    first.upsert(*one(1, title=["a"]))
    third = MilvusTuples.open(uri, first.collection, 8)
    for tuples in (first, second, third):
        assert tuples.get([1, 2]) == [{"year": None, "title": "a"}, {"year": 1999, "title": None}]
        assert sorted(tuples.columns) == ["title", "year"]
        assert tuples.search(np.ones((1, 8), np.float32), 2, "year = 1999", {}).ids.tolist() == [[2, -1]]
    third.close()


def test_nan_of_one_client_is_known_though_another_wrote_at_once(pair, uri, overtake):
    first, second = pair
    first.upsert(*one(1, size=[1.0]))
    overtake(lambda: second.upsert(*one(2, size=[math.nan])))
    first.upsert(*one(3, title=["a"]))
    with pytest.raises(ValueError, match="cannot compare column 'size': it holds NaN or infinity"):
        first.search(np.ones((1, 8), np.float32), 2, "size > 0", {})


def test_of_two_types_at_once_the_one_that_was_there_first_stays_and_the_other_is_refused(pair, uri, overtake):
    first, second = pair
    overtake(lambda: second.upsert(*one(2, year=[1999], more=[True])))
    with pytest.raises(ValueError, match="column 'year' holds int64 in this index, and string does not fit"):
        first.upsert(*one(1, year=["1999"], title=["a"]))
    assert first.ids().tolist() == [2] and sorted(second.columns) == ["more", "year"]
    assert first.get([2]) == second.get([2]) == [{"year": 1999, "more": True}]


def test_what_a_writer_took_back_is_no_columns_type(pair, overtake, monkeypatch):
    """Both have written down a type for the column; one ends up in the collection, whichever gives way."""
    first, second = pair
    refused = []

    def meanwhile():
        try:
            second.upsert(*one(2, year=[1999]))
        except ValueError as error:
            refused.append(str(error))

    monkeypatch.setattr(milvus_columns, "PATIENCE_S", 1.0)
    overtake(meanwhile, at=1)  # the first has written, and read nothing of the second
    first.upsert(*one(1, year=["1999"]))
    assert refused and "column 'year' holds string in this index, and int64 does not fit" in refused[0]
    assert first.get([1]) == [{"year": "1999"}] and first.ids().tolist() == [1]


def test_columns_come_back_in_the_order_in_which_they_came(pair, monkeypatch):
    """Also those that one clock tick brought."""
    monkeypatch.setattr(milvus_columns.time, "time", lambda: 1.0)
    first, _ = pair
    first.upsert(*one(1, zone=[1], year=[2], artist=["x"]))
    assert list(first.get([1])[0]) == first.columns == ["zone", "year", "artist"]


def test_a_dispute_that_nobody_settles_names_both_properties(pair, monkeypatch):
    first, second = pair
    monkeypatch.setattr(milvus_columns, "PATIENCE_S", 0.0)
    for writer, kind in (("left", pa.int64()), ("right", pa.string())):
        gone = Brought(pa.schema([("year", kind)]), {"year": 1.0})
        first._rows.call("alter_collection_properties", properties={COLUMNS + writer: gone.to_text()})
    told = "column 'year' is int64 by property 'mmcl.columns.left', string by 'mmcl.columns.right'"
    with pytest.raises(ValueError, match=f"collection '{first.collection}' at .*{told}; drop the property of a writer"):
        second.upsert(*one(1, other=[1]))
    assert len(second) == 0
    second._rows.call("drop_collection_properties", property_keys=[COLUMNS + "right"])
    second.upsert(*one(1, year=[1]))
    assert second.get([1]) == [{"year": 1}]


def test_a_column_of_nulls_takes_the_type_that_comes(pair):
    first, second = pair
    first.upsert(*one(1, year=pa.nulls(1)))
    second.upsert(*one(2, year=[1999]))
    first.upsert(*one(3, year=pa.nulls(1)))
    assert first.get([1, 2, 3]) == [{"year": None}, {"year": 1999}, {"year": None}]
    with pytest.raises(ValueError, match="column 'year' holds int64"):
        first.upsert(*one(4, year=["x"]))


def test_known_columns_are_not_written_down_again(pair):
    first, second = pair
    first.upsert(*one(1, year=[1]))
    second.upsert(*one(2, year=[2]))
    second.upsert(*one(3))
    described = first._rows.call("describe_collection")["properties"]
    assert [name for name in described if name.startswith(COLUMNS)] == [COLUMNS + first._writer]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (COLUMNS + "x", "{"),
        (COLUMNS + "x", json.dumps({"columns": "AAAA", "at": {}, "not_finite": []})),
        (COLUMNS + "x", Brought(pa.schema([("year", pa.int64())])).to_text()),
        (CLAIM + "x", "12"),
        (CLAIM + "x", "12 soon"),
        (CLAIM + "x", "-1 1700000000"),
        ("mmcl", "nothing"),
        ("mmcl", json.dumps({"format_version": 2})),
    ],
)
def test_a_property_that_says_something_else_is_named(name, text, make, vectors):
    tuples = make()
    tuples._rows.call("alter_collection_properties", properties={name: text})
    told = f"its property {name!r} is {text[:80]!r}, which mmcl did not write"
    with pytest.raises(ValueError, match=f"collection {tuples.collection!r} at .*: {re.escape(told)}"):
        tuples.add(None, vectors[:1], pa.table({}))
    assert len(tuples) == 0


def test_collections_of_the_first_format_are_read_and_go_on(make, uri, vectors):
    """There the one property has columns and next id, and no writer has one of its own."""
    tuples = make()
    old = json.loads(About("Flat", pa.schema([("row", pa.int64())]), frozenset(), 7).to_text())
    tuples._rows.call("alter_collection_properties", properties={"mmcl": json.dumps(old | {"format_version": 1})})
    opened = MilvusTuples.open(uri, tuples.collection, 8)
    opened.add(None, vectors[:1], pa.table({"row": [5], "year": [1999]}))
    assert opened.ids().tolist() == [7] and opened.get([7]) == [{"row": 5, "year": 1999}]
    opened.close()


BRINGING = """
import sys
import numpy as np, pyarrow as pa
from mmcl.index.milvus import MilvusTuples
tuples = MilvusTuples.open(sys.argv[1], sys.argv[2], 8)
mark = int(sys.argv[3])
input()
for turn in range(8):
    table = pa.table({f"c{mark}_{turn}": [mark + turn], f"shared{turn}": [mark]})
    tuples.add(np.array([mark + turn]), np.full((1, 8), mark, np.float32), table)
"""


@pytest.mark.slow
def test_processes_that_bring_columns_at_once_lose_none(uris):
    tuples = MilvusTuples.create(uris["server"], "columns_at_once", 8, named=False)
    run = [sys.executable, "-c", BRINGING, uris["server"], "columns_at_once"]
    marks = [100, 200, 300]
    started = [subprocess.Popen([*run, str(mark)], stdin=subprocess.PIPE, text=True) for mark in marks]
    for process in started:
        process.stdin.write("go\n")
        process.stdin.flush()
    assert [process.wait() for process in started] == [0, 0, 0]
    ids = [mark + turn for mark in marks for turn in range(8)]
    rows = tuples.get(ids)
    assert set(tuples.columns) == {f"c{mark}_{t}" for mark in marks for t in range(8)} | {
        f"shared{t}" for t in range(8)
    }
    for key, row in zip(ids, rows, strict=True):
        turn, mark = key % 100, key - key % 100
        assert {name: value for name, value in row.items() if value is not None} == {
            f"c{mark}_{turn}": key,
            f"shared{turn}": mark,
        }
    tuples.close()
