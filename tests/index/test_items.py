"""Ids and metadata: what they may be, and that they come back as they went in."""

import datetime as dt

import numpy as np
import pyarrow as pa
import pytest
import torch

from mmcl.index import TupleIndex

NAN = float("nan")
COLUMNS = {
    "title": ["one", None, "셋 🎈", ""],
    "year": [1999, None, -3, 2**60],
    "price": [1.5, NAN, None, float("inf")],
    "day": [dt.date(2024, 2, 29), None, dt.date(1, 1, 1), dt.date(9999, 12, 31)],
    "at": [dt.datetime(2024, 1, 2, 3, 4, 5, 678901), None, dt.datetime(1970, 1, 1), dt.datetime(2100, 1, 1)],
    "good": [True, False, None, True],
    "tags": [["a", "b"], [], None, ["c"]],
    "blob": [b"\x00\xff", b"", None, b"x"],
    "nothing": [None, None, None, None],
}


@pytest.fixture
def small(make_score, unit_rows):
    """small(**options): four images."""

    def make(count=4, **options):
        return TupleIndex.build(make_score("sum_of_pairs", 2, 8), {"image": unit_rows(count, 8)}, **options)

    return make


def same(a, b):
    """Equal, and of one type; NaN equals NaN."""
    return type(a) is type(b) and (a == b or (a != a and b != b))


@pytest.mark.parametrize("make", [dict, pa.table])
def test_metadata_survives_search_and_disk(make, small, unit_rows, tmp_path):
    index = small(metadata=make(COLUMNS))
    index.save(tmp_path / "index")
    rows = [dict(zip(COLUMNS, values, strict=True)) for values in zip(*COLUMNS.values(), strict=True)]
    for each in (index, TupleIndex.load(tmp_path / "index")):
        hits = each.search({"audio": unit_rows(3, 8)}, k=6)
        for ids, metadata, listed in zip(hits.ids, hits.metadata, hits, strict=True):
            assert len(metadata) == 4
            for key, found in zip(ids, metadata, strict=False):
                assert all(same(found[name], rows[key][name]) for name in COLUMNS)
            for key, score, found in listed:
                assert type(key) is int
                assert type(score) is float
                assert same(found["title"], rows[key]["title"])
        assert each.info()["columns"] == list(COLUMNS)
        assert [row["title"] for row in each.get([2, 0])] == ["셋 🎈", "one"]


def test_without_metadata_every_hit_has_an_empty_dict(small, unit_rows):
    hits = small().search({"audio": unit_rows(2, 8)}, k=2)
    assert hits.metadata == [[{}, {}], [{}, {}]]


def test_numpy_columns_are_taken_by_value(small):
    index = small(metadata={"x": np.array([1.0, NAN, 3, 4], np.float32), "n": np.arange(4), "t": torch.arange(4)})
    assert index.get(2) == {"x": 3.0, "n": 2, "t": 2}
    assert index.get(1)["x"] != index.get(1)["x"]


STRINGS = ["b", "a", "ü 한", "10"]


@pytest.mark.parametrize(
    "ids",
    [
        None,
        [7, 0, 2**63 - 1, 5],
        np.array([3, 1, 2, 0], np.int32),
        np.array([3, 1, 2, 0], np.uint64),
        torch.tensor([4, 3, 2, 1]),
        pa.array([9, 8, 7, 6]),
        range(4, 8),
        STRINGS,
        np.array(STRINGS),
        np.array(STRINGS, dtype=object),
        pa.array(STRINGS),
    ],
    ids=str,
)
def test_ids_come_back_in_search_get_and_membership(ids, small, unit_rows, tmp_path):
    plain = list(range(4)) if ids is None else pa.array(ids).to_pylist() if not hasattr(ids, "tolist") else ids.tolist()
    index = small(ids=ids, metadata={"row": range(4)} | {"row": list(range(4))})
    index.save(tmp_path / "index")
    for each in (index, TupleIndex.load(tmp_path / "index")):
        hits = each.search({"audio": unit_rows(4, 8)}, k=5)
        assert hits.ids.dtype == (object if isinstance(plain[0], str) else np.int64)
        assert (hits.ids[:, 4] == ("" if isinstance(plain[0], str) else -1)).all()
        for ids_found, metadata in zip(hits.ids.tolist(), hits.metadata, strict=True):
            assert [plain[row["row"]] for row in metadata] == ids_found[:4]
        assert each.get(plain) == [{"row": row} for row in range(4)]
        assert each.get(plain[2]) == {"row": 2}
        assert each.get(plain[::-1])[0] == {"row": 3}
        assert all(key in each for key in plain)


def test_unknown_ids_are_named_and_not_members(small):
    index = small()
    for unknown in (4, -1, "0", True, 1.0, None, 2**70):
        assert unknown not in index
        if unknown is not None:
            with pytest.raises(KeyError, match=str(unknown)):
                index.get([0, unknown])
    named = small(ids=STRINGS)
    for unknown in ("", "c", 10):
        assert unknown not in named
        with pytest.raises(KeyError, match=repr(unknown)):
            named.get(unknown)
    assert index.get([]) == []
    assert index.get(np.int64(3)) == index.get(3)
    assert index.get(np.array([3, 1])) == [{}, {}]


@pytest.mark.parametrize(
    ("ids", "told"),
    [
        ([0, 1, 2, 1], "duplicate id 1 in rows 1 and 3"),
        (np.array([5, 5, 2, 1]), "duplicate id 5 in rows 0 and 1"),
        (["a", "b", "c", "a"], "duplicate id 'a' in rows 0 and 3"),
        ([0, 1, -1, 3], "-1 in row 2"),
        (np.array([0, 1, -1, 3]), "-1 in row 2"),
        ([0, 2**63, 2, 3], "9223372036854775808 in row 1"),
        (np.array([0, 2**63, 2, 3], np.uint64), "9223372036854775808 in row 1"),
        ([0, 1, 2, 2**80], "row 3"),
        ([0, "1", 2, 3], "row 0 is int, row 1 is str"),
        (["0", "1", 2, "3"], "row 0 is str, row 2 is int"),
        (["a", "", "c", "d"], "row 1 is an empty string"),
        (["a", "b", "\ud800", "d"], "row 2.*UTF-8"),
        ([True, False, 2, 3], "True.*row 0"),
        (np.array([True, False, True, False]), "True.*row 0"),
        ([0, 1, 2.0, 3], "2.0.*row 2"),
        (np.arange(4.0), "0.0.*row 0"),
        ([0, 1, None, 3], "None.*row 2"),
        ([0, 1, 2], "4 items need 4 ids, got 3"),
        ([0, 1, 2, 3, 4], "4 items need 4 ids, got 5"),
        (np.arange(8).reshape(4, 2), r"\(4, 2\)"),
        ("abcd", "sequence"),
        (b"abcd", "sequence"),
        (4, "sequence"),
        ({"a": 1}, "sequence"),
    ],
    ids=str,
)
def test_bad_ids_are_refused_by_name(ids, told, small):
    with pytest.raises(ValueError, match=told):
        small(ids=ids)


@pytest.mark.parametrize(
    ("metadata", "told"),
    [
        ({"a": [1, 2, 3]}, "'a' has 3 rows, there are 4 items"),
        (pa.table({"a": [1, 2, 3, 4, 5]}), "'a' has 5 rows, there are 4 items"),
        ({"id": [1, 2, 3, 4]}, "'id' is reserved"),
        (pa.table({"id": [1, 2, 3, 4]}), "'id' is reserved"),
        ({"a": [1, "x", 2, 3]}, "column 'a'"),
        ({"a": [object()] * 4}, "column 'a'"),
        ({"a": np.zeros((4, 2))}, "column 'a'"),
        ({"a": "text"}, "column 'a'"),
        ({"a": 3}, "column 'a'"),
        ({1: [1, 2, 3, 4]}, "named by strings, got 1"),
        (pa.table([[1, 2, 3, 4], [1, 2, 3, 4]], names=["a", "a"]), "'a' stands twice"),
        (pa.table({"a": pa.array([None] * 4, pa.month_day_nano_interval())}), "column 'a'.*cannot be stored"),
        ([{"a": 1}] * 4, "dict of columns"),
    ],
    ids=range(13),
)
def test_bad_metadata_is_refused_by_column(metadata, told, small):
    with pytest.raises(ValueError, match=told):
        small(metadata=metadata)


def test_metadata_is_looked_up_only_when_asked_for(small, unit_rows, monkeypatch):
    index = small(metadata=COLUMNS)

    def lookup(*_):
        raise AssertionError("looked up")

    monkeypatch.setattr("mmcl.index.items.Items.metadata_at", lookup)
    hits = index.search({"audio": unit_rows(3, 8)})
    assert hits.counts.tolist() == [4, 4, 4]
    with pytest.raises(AssertionError, match="looked up"):
        _ = hits.metadata
