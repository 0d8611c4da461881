"""Metadata in JSON comes back as it went in; factory strings mean one index type each."""

import datetime as dt
import json
import math
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pytest

from mmcl.index.milvus_factory import TYPES, plan_of
from mmcl.index.milvus_rows import batches, literal
from mmcl.index.milvus_values import documents, filterable, not_finite, read_documents

UTC = dt.UTC
COLUMNS = {
    "bool": pa.array([True, None, False]),
    "int8": pa.array([1, -2, None], pa.int8()),
    "int64": pa.array([2**63 - 1, -(2**63), 2**53 + 1]),
    "uint64": pa.array([2**64 - 1, 0, None], pa.uint64()),
    "double": pa.array([math.nan, math.inf, -math.inf]),
    "finite": pa.array([0.1, -0.0, 5e-324]),
    "float": pa.array([0.1, math.nan, 3.4e38], pa.float32()),
    "half": pa.array(np.array([0.1, np.nan, 65504], np.float16)),
    "string": pa.array(["", "a'b\"c\\\0\u2028", None]),
    "large_string": pa.array(["nan", None, "é\U0001f600"], pa.large_string()),
    "date32": pa.array([dt.date(1, 1, 1), dt.date(9999, 12, 31), None]),
    "date64": pa.array([dt.date(1969, 12, 31), None, dt.date(2024, 2, 29)], pa.date64()),
    "time": pa.array([dt.time(1, 2, 3, 4), None, dt.time(0)]),
    "time32": pa.array([dt.time(23, 59, 59), None, dt.time(0)], pa.time32("s")),
    "timestamp": pa.array([dt.datetime(2020, 1, 1), dt.datetime(1, 1, 1, 1, 1, 1, 1), None]),
    "seconds": pa.array([dt.datetime(9999, 12, 31), None, dt.datetime(1900, 1, 1)], pa.timestamp("s")),
    "nanoseconds": pa.array([1, None, 1600000000123456789], pa.timestamp("ns")),
    "zoned": pa.array([dt.datetime(2020, 6, 1, tzinfo=UTC), None, None], pa.timestamp("us", "Europe/Berlin")),
    "duration": pa.array([dt.timedelta(1, 2, 3), None, dt.timedelta(-1)]),
    "decimal": pa.array([Decimal("1.10"), Decimal("-99999.99"), None]),
    "bytes": pa.array([b"\x00\xff", b"", None]),
    "fixed": pa.array([b"ab", b"cd", None], pa.binary(2)),
    "list": pa.array([[1.5, math.nan, None], [], None]),
    "dates": pa.array([[dt.date(2020, 1, 1)], [None], None]),
    "pair": pa.array([[1, 2], [3, 4], None], pa.list_(pa.int64(), 2)),
    "struct": pa.array([{"a": 1, "b": b"x"}, {"a": None, "b": None}, None]),
    "map": pa.array([[("k", dt.date(2020, 1, 1))], [], None], pa.map_(pa.string(), pa.date32())),
    "category": pa.array(["x", "y", None]).dictionary_encode(),
    "null": pa.nulls(3),
}
TABLE = pa.table(COLUMNS)


def test_every_type_comes_back_as_it_went_in():
    found = read_documents([json.loads(text) for text in documents(TABLE, [0, 1, 2])], TABLE.schema)
    assert repr(found) == repr(TABLE.to_pylist())  # repr: NaN equals NaN, and 1 is not 1.0


def test_every_type_comes_back_from_milvus(make, uri, vectors, queries):
    tuples = make(named=True)
    keys = ["a", "b", "c"]
    tuples.add(np.array(keys, object), vectors[:3], TABLE)
    assert repr(tuples.get(keys)) == repr(TABLE.to_pylist())
    tuples.compact()
    hits = tuples.search(queries[:1], 3, None, {})
    assert repr(hits.metadata[0]) == repr([TABLE.to_pylist()[keys.index(key)] for key in hits.ids[0]])
    opened = type(tuples).open(uri, tuples.collection, 8)
    assert repr(opened.get(keys)) == repr(TABLE.to_pylist()) and opened.columns == list(COLUMNS)
    opened.close()


def test_what_filters_compare_is_written_as_one_would_type_it():
    first = json.loads(documents(TABLE, [0, 1, 2])[0])
    wanted = {"float": 0.1, "half": 0.1, "date32": "0001-01-01", "category": "x", "double": "nan", "int64": 2**63 - 1}
    assert {name: first[name] for name in wanted} == wanted
    assert "null" not in first
    moments = pa.array(
        [dt.datetime(2020, 1, 1), dt.datetime(2019, 12, 31, 23, 59, 59, 999999), dt.datetime(2020, 1, 2)]
    )
    texts = [json.loads(text)["at"] for text in documents(pa.table({"at": moments}), [0, 1, 2])]
    assert np.argsort(texts).tolist() == [1, 0, 2]


def test_columns_that_a_filter_may_name():
    unfit = not_finite(TABLE)
    assert unfit == {"double", "float", "half"}
    plain = ["bool", "int8", "int64", "finite", "string", "large_string", "date32", "date64"]
    lists = ["list", "dates", "pair"]
    assert list(filterable(TABLE.schema, unfit)) == [*plain, *lists, "category", "null"]


@pytest.mark.parametrize(
    "column",
    [
        pa.array([(1, 2, 3)], pa.month_day_nano_interval()),
        pa.array([[(1, 2, 3)]], pa.list_(pa.month_day_nano_interval())),
        pa.array([{"a": (1, 2, 3)}], pa.struct({"a": pa.month_day_nano_interval()})),
    ],
    ids=["plain", "in a list", "in a struct"],
)
def test_a_type_that_cannot_be_kept_is_refused_by_column(column):
    with pytest.raises(ValueError, match="metadata column 'span': type month_day_nano_interval cannot be kept"):
        documents(pa.table({"span": column}), [0])


def test_metadata_beyond_the_limit_is_refused_by_id():
    at_most = pa.table({"text": ["x" * (65536 - len('{"text": ""}'))]})
    assert len(documents(at_most, ["a"])[0]) == 65536
    with pytest.raises(ValueError, match="metadata of item 'a' is 65537 bytes; Milvus takes 65536"):
        documents(pa.table({"text": [at_most["text"][0].as_py() + "x"]}), ["a"])


def test_batches_are_consecutive_and_bounded():
    sizes = [3, 3, 3, 9, 1, 1, 20, 1]
    parts = [sizes[part] for part in batches(sizes, 9)]
    assert parts == [[3, 3, 3], [9], [1, 1], [20], [1]]
    assert list(batches([], 9)) == []


def test_ids_are_written_in_milvus_language():
    assert literal(2**63 - 1) == "9223372036854775807"
    assert literal("a'b\"c\\\n") == '"a\'b\\"c\\\\\\n"'


@pytest.mark.parametrize(
    ("factory", "kind", "build", "exact"),
    [
        ("auto", "FLAT", {}, True),
        ("Flat", "FLAT", {}, True),
        ("IVF64,Flat", "IVF_FLAT", {"nlist": 64}, True),
        ("IVF64,SQ8", "IVF_SQ8", {"nlist": 64}, False),
        ("HNSW32", "HNSW", {"M": 32, "efConstruction": 200}, True),
        ("IVF64,PQ4", "IVF_PQ", {"nlist": 64, "m": 4, "nbits": 8}, False),
    ],
)
def test_factory_strings_and_their_index_types(factory, kind, build, exact):
    plan = plan_of(factory, 8, lite=False)
    assert (plan.type.name, plan.build, plan.type.exact) == (kind, build, exact)
    assert (
        plan.differences({"index_type": kind, "metric_type": "IP", **{name: str(n) for name, n in build.items()}}) == []
    )
    assert plan.differences({"index_type": "AUTOINDEX", "metric_type": "L2", **build}) == [
        f"index_type is 'AUTOINDEX', not {kind!r}",
        "metric_type is 'L2', not 'IP'",
    ]
    assert plan.differences(None) == ["there is no index on the vectors"]
    assert {row.name for row in TYPES} >= {kind}


@pytest.mark.parametrize(
    "factory", ["DISKANN", "GPU_CAGRA", "SCANN", "PQ8", "IVF64", "ivf64,flat", "IVF64,SQ8 ", "", None, 5]
)
def test_other_factory_strings_are_refused_with_the_choices(factory):
    with pytest.raises(ValueError, match=r"Milvus cannot build factory .*; choose from 'Flat', 'IVF64,Flat'"):
        plan_of(factory, 8, lite=False)


@pytest.mark.parametrize(
    ("factory", "reason"),
    [
        ("IVF0,Flat", "1 to 65536 for nlist"),
        ("IVF65537,SQ8", "1 to 65536 for nlist"),
        ("HNSW1", "2 to 2048 for M"),
        ("IVF4,PQ3", "3 sub-quantisers do not divide the width 8"),
    ],
)
def test_numbers_that_milvus_does_not_take_are_refused(factory, reason):
    with pytest.raises(ValueError, match=reason):
        plan_of(factory, 8, lite=False)


def test_search_parameters_in_milvus_terms():
    ivf, graph = plan_of("IVF16,Flat", 8, lite=False), plan_of("HNSW8", 8, lite=False)
    assert ivf.search({}, 10) == {}
    assert ivf.search({"nprobe": np.int64(99)}, 10) == {"nprobe": 16}
    assert graph.search({}, 10) == {"ef": 64}
    assert graph.search({"efSearch": 20}, 100) == {"ef": 100}  # Milvus refuses ef below k
    assert graph.search({"efSearch": 10**6}, 10) == {"ef": 32768}
    assert ivf.widest(5) == {"nprobe": 16} and graph.widest(5) == {"ef": 32768}
    assert plan_of("Flat", 8, lite=False).widest(5) == {}
