"""Filters choose the rows that SQL says, and are nothing but conditions on rows."""

import datetime as dt
import multiprocessing
import os
import threading
import time
from decimal import Decimal

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mmcl.index.filters import asked, check_where, matching

NAN = float("nan")
TABLE = pa.table(
    {
        "year": [2000, None, 2020, -5],
        "price": [1.5, NAN, None, 2.0],
        "title": ["rock", "Ü 한 🎈", None, "it's"],
        "good": [True, False, None, True],
        "tags": [["a", "b"], [], None, [None, "c"]],
        "place": [{"city": "Ulm", "at": {"x": 1}}, None, {"city": None, "at": {"x": 2}}, {"city": "Rom", "at": None}],
        "day": [dt.date(2024, 2, 29), None, dt.date(1, 1, 1), dt.date(9999, 12, 31)],
        "seen": [dt.datetime(2024, 1, 1, 0, 30), None, dt.datetime(1969, 1, 1), dt.datetime(2100, 1, 1)],
        "zoned": pa.array([1704069000, None, 0, 1], pa.timestamp("s", "Asia/Seoul")),  # the first: as in `seen`, UTC
        "cost": pa.array([Decimal("0.10"), None, Decimal("0.30"), Decimal("-9.99")], pa.decimal128(5, 2)),
        "large": [2**63 - 1, None, -(2**63), 0],
        "positive": pa.array([2**64 - 1, None, 0, 1], pa.uint64()),
        "single": pa.array([0.1, None, NAN, 2], pa.float32()),
        "blob": [b"\x00\xff", None, b"", b"x"],
        "color": pa.array(["red", None, "red", "blue"]).dictionary_encode(),
        "note": pa.array(["a", None, "b", ""], pa.large_string()),
        "nothing": pa.nulls(4),
        "select": [1, 2, 3, 4],
        'a "b" c': [1, 2, 3, 4],
        "größe": [1, 2, 3, 4],
        "now": [1, 2, 3, 4],
    }
)
COUNT = len(TABLE)

CHOSEN = [
    ("year >= 2000", [0, 2]),
    ("YEAR >= 2000", [0, 2]),
    ("NOT (year > 2000)", [0, 3]),
    ("year <> 2000", [2, 3]),
    ("year IS NULL", [1]),
    ("year IN (2000, -5)", [0, 3]),
    ("year NOT IN (2000, NULL)", []),
    ("year BETWEEN 2000 AND 2020", [0, 2]),
    ("year / 2 = -2.5 OR year % 1000 = 20", [2, 3]),
    ("price > 1.5", [1, 3]),  # NaN is the largest number
    ("isnan(price)", [1]),
    ("price IS NOT NULL AND NOT isnan(price)", [0, 3]),
    ("title = 'Ü 한 🎈'", [1]),
    ("title LIKE '%''%'", [3]),
    ("lower(title) LIKE 'ü%'", [1]),
    ("good", [0, 3]),
    ("NOT good", [1]),
    ("good IS NOT TRUE", [1, 2]),
    ("list_contains(tags, 'a')", [0]),
    ("NOT list_contains(tags, 'a')", [1, 3]),
    ("'c' IN tags", [3]),
    ("len(tags) = 0", [1]),
    ("len(list_filter(tags, lambda tag: tag > 'a')) = 1", [0, 3]),
    ("place.city = 'Ulm'", [0]),
    ("place.at.x >= 1", [0, 2]),
    ("day = '2024-02-29'", [0]),
    ("day > DATE '2024-01-01'", [0, 3]),
    ("year(day) = 1", [2]),
    ("seen < '2024-01-01 00:30:01'", [0, 2]),
    ("zoned = '2024-01-01 00:30:00'", [0]),
    ("zoned = '2024-01-01 09:30:00+09'", [0]),
    ("zoned = seen", [0]),
    ("cost = 0.1", [0]),
    ("cost + 0.2 = 0.3", [0]),
    ("large = 9223372036854775807", [0]),
    ("large < -9223372036854775807", [2]),
    ("large > 9223372036854775808", []),
    ("positive = 18446744073709551615", [0]),
    ("single = 0.1", [0]),
    ("blob = '\\x00\\xFF'::BLOB", [0]),
    ("color = 'red'", [0, 2]),
    ("note < 'b'", [0, 3]),
    ("nothing IS NULL", [0, 1, 2, 3]),
    ("nothing > 1", []),
    ("nothing", []),
    ('"select" = 2', [1]),
    ('"a ""b"" c" = 3', [2]),
    ("größe > 3", [3]),
    ("now = 1", [0]),  # a column, not the function
    ("CASE WHEN year > 2000 THEN good IS NULL ELSE year < 0 END", [2, 3]),
    ("coalesce(good, year = 2020)", [0, 2, 3]),
    ("title COLLATE nocase = 'ROCK'", [0]),
    ("year = 2000 -- not OR true", [0]),
    ("year = /* or */ 2000", [0]),
    ("TRUE", [0, 1, 2, 3]),
    ("1 = 2", []),
    ("NULL", []),
    (("year = ?", [2020]), [2]),
    (("year = $2 OR year = $1", (2020, -5)), [2, 3]),
    (("year = $y OR title = $t", {"y": 2020, "t": "rock"}), [0, 2]),
    (("year IN ?", [[2000, -5]]), [0, 3]),
    (("year IN ?", [np.array([2000, 2020])]), [0, 2]),
    (("list_contains(tags, ?)", ["c"]), [3]),
    (("year = ?", [None]), []),
    (("year = ?", [np.int16(2020)]), [2]),
    (("price > ?", [np.float32(1.75)]), [1, 3]),
    (("price = ?", [NAN]), [1]),
    (("good = ?", [np.bool_(False)]), [1]),
    (("day = ?", [dt.date(2024, 2, 29)]), [0]),
    (("seen = ?", [dt.datetime(1969, 1, 1)]), [2]),
    (("zoned = ?", [dt.datetime(2024, 1, 1, 0, 30, tzinfo=dt.UTC)]), [0]),
    (("cost = ?", [Decimal("0.10")]), [0]),
    (("blob = ?", [b"\x00\xff"]), [0]),
    (("title = ?", ["x' OR TRUE --"]), []),
    (("title = ?", ["it's"]), [3]),
    (["year = ?", [2020]], [2]),
]


@pytest.mark.parametrize(("where", "rows"), CHOSEN, ids=str)
def test_rows_are_those_of_sql(where, rows):
    keep = matching(TABLE, where)
    assert keep.dtype == bool and keep.shape == (COUNT,)
    assert np.flatnonzero(keep).tolist() == rows


@pytest.mark.parametrize(("where", "rows"), CHOSEN, ids=str)
def test_a_file_gives_the_rows_of_its_table(where, rows, tmp_path):
    pq.write_table(TABLE, tmp_path / "a [1] é.parquet", row_group_size=3)
    assert np.flatnonzero(matching(tmp_path / "a [1] é.parquet", where)).tolist() == rows


@pytest.mark.parametrize("names", [[], ["year"]], ids=str)
@pytest.mark.parametrize("where", ["id = 12 OR id < 10", ("ID IN ?", [[12, 9, 9]])], ids=str)
def test_ids_are_a_column(names, where):
    ids = np.array([9, 2**63 - 1, 12, 10])
    assert matching(TABLE.select(names), where, ids).tolist() == [True, False, True, False]
    texts = np.array(["q", "ü", "", "q'"], object)
    assert matching(TABLE.select(names), ("id = ? OR id = ?", ["q'", "ü"]), texts).tolist() == [
        False,
        True,
        False,
        True,
    ]
    assert matching(TABLE.select(names), "TRUE", texts).all()


def test_ids_beside_a_column_of_that_name_are_refused(tmp_path):
    table = pa.table({"id": [1, 2], "ID": [5, 6]})
    assert matching(table, "id = 2").tolist() == [False, True]
    assert matching(table.select(["ID"]), '"ID" = 5', np.array([7, 8])).tolist() == [True, False]
    pq.write_table(table, tmp_path / "a.parquet")
    for source in (table, tmp_path / "a.parquet"):
        with pytest.raises(ValueError, match="a table without a column 'id'"):
            matching(source, "id = 2", np.array([1, 2]))
    with pytest.raises(ValueError, match="4 rows of metadata need 4 ids, got 2"):
        matching(TABLE, "id = 2", np.array([1, 2]))


def test_names_that_differ_in_case_are_told_apart_or_refused():
    table = pa.table({"a": [1, 2], "A": [2, 1], "É": [1, 2], "é": [2, 1]})
    assert matching(table, "a = 1").tolist() == [True, False]
    assert matching(table, "A = 1").tolist() == [False, True]
    assert matching(table, "é = 1 AND É = 2").tolist() == [False, True]  # DuckDB folds ASCII only
    with pytest.raises(ValueError, match=r"DuckDB cannot tell columns \['a', 'A'\] apart"):
        matching(table, "a = A")
    with pytest.raises(ValueError, match=r"apart; name one, exactly"):
        matching(table.rename_columns(["aB", "Ab", "c", "d"]), "ab = 1")


@pytest.mark.parametrize("where", ["year > 1", "TRUE", "good", "list_contains(tags, 'a')", "nothing IS NULL"])
def test_no_rows(where):
    assert matching(TABLE.slice(0, 0), where).shape == (0,)
    assert matching(TABLE.slice(0, 0), where, np.empty(0, object)).shape == (0,)
    assert matching(TABLE.schema.empty_table(), where, np.empty(0, np.int64)).shape == (0,)


NO_CONDITION = [
    ("", "where is an empty condition"),
    (" \n", "where is an empty condition"),
    ("-- year > 1", "syntax error"),
    (None, "where must be a DuckDB SQL condition such as 'year >= 2020', or .*, got None"),
    (7, "got 7"),
    (("year > 1",), "where must be"),
    (("year > ?", [1], 2), "where must be"),
    (("year > ?", 1), r"where 'year > \?': its parameters must be a list for \? and \$1, or a dict for \$name, got 1"),
    (("year > ?", "1"), "got '1'"),
    (("year > $a", {1: 2}), r"a dict for \$name, got {1: 2}"),
    ("title = '\ud800'", "cannot be written as UTF-8"),
    (("title = ?", ["\ud800"]), r"where 'title = \?': '\\ud800' cannot be written as UTF-8"),
    (("title = $a", {"a": ["\ud800"]}), "cannot be written as UTF-8"),
    ("year >", "where 'year >': syntax error"),
    ("title = 'a", "unterminated"),
    ("(year > 1", "syntax error"),
    ("year > 1)", "syntax error"),
    ("year > 1) OR (year < 1", "syntax error"),
    ("year > 1 /*", "unterminated"),
    ("year > 1;", "must be one condition, without ';'"),
    ("year > 1; DROP TABLE x", "must be one condition, without ';'"),
    ("year > 1 ORDER BY year", "must be one condition, without ';' and clauses such as ORDER BY"),
    ("year > 1 LIMIT 1", "must be one condition"),
    ("year > 1 UNION SELECT 1", "must be one condition"),
    ("year > 1 GROUP BY year", "must be one condition"),
    ("year, good", "syntax error"),
    ("SELECT 1", "syntax error"),
    ("COPY (SELECT 1) TO 'x'", "syntax error"),
    ("ATTACH 'x.db' AS x", "syntax error"),
    ("PRAGMA version", "syntax error"),
    ("(SELECT TRUE)", "subqueries are refused"),
    ("EXISTS (FROM '/etc/passwd')", "subqueries are refused; to look in a list, write year IN"),
    ("year IN (SELECT 1)", "subqueries are refused"),
    ("year = ANY ([1, 2])", "subqueries are refused"),
    ("read_csv('/etc/passwd')", "read_csv is a table function"),
    ("read_text('/etc/passwd') = 'a'", "read_text is a table function"),
    ("getenv('HOME') = 'a'", "there is no function 'getenv'"),
    ("current_setting('threads') = 1", "current_setting is refused"),
    ("list_filter(tags, lambda t: t = current_setting('TimeZone')) = []", "current_setting is refused"),
    ("random() < 0.5", "random is refused: its answer does not depend on the row alone; pass a value as parameter"),
    ("uuid()::VARCHAR > 'a'", "uuid is refused"),
    ("nextval('a') = 1", "nextval is refused"),
    ("day > current_date", "current_date is refused"),
    ("seen > Today()", "today is refused"),
    ("user = 'me'", "user is refused"),
    ("count(*) > 1", "count_star is an aggregate: a condition is tested on one row at a time"),
    ("year > avg(year)", "avg is an aggregate"),
    ("geomean(year) > 1", "geomean: avg is an aggregate"),  # a macro of DuckDB
    ("row_number() OVER () < 3", "window functions are refused"),
    ("max(year) OVER () = year", "window functions are refused"),
    ("row_number() < 3", "row_number is a window function"),
    ("unnest([TRUE, FALSE])", "unnest is a table function"),
    ("generate_subscripts([1], 1) = 1", "unnest is a table function"),
    ("*", r"\* stands for several columns"),
    ("COLUMNS('y.*') > 1", r"\* stands for several columns"),
    ("#1 > 1", "name the column in place of its number"),
    ("DEFAULT", "DEFAULT"),
    ("year", "where 'year' is BIGINT, not a condition; compare it with something"),
    ("year + 1", r"where 'year \+ 1' is BIGINT"),
    ("title", "is VARCHAR, not a condition"),
    ("tags", r"is VARCHAR\[\], not a condition"),
    ("1", "is INTEGER, not a condition"),
    (("?", [1]), "is INTEGER, not a condition"),
    ("lowr(title) = 'a'", "there is no function 'lowr'; did you mean 'lower'?"),
    ("yaer > 1", r"where 'yaer > 1': there is no metadata column 'yaer'; columns are \['year', 'price', 'title', "),
    ("yaer.x > 1", "there is no metadata column 'yaer'"),
    ("TRUE OR yaer", "there is no metadata column 'yaer'"),
    ("place.town = 'Ulm'", 'Could not find key "town" in struct'),
    ("year > 'rock'", "where \"year > 'rock'\": Could not convert string 'rock' to INT64$"),
    ("title > 5", "Cannot compare values of type VARCHAR and type INTEGER_LITERAL - an explicit cast is required$"),
    ("lower(year) = 'a'", "No function matches the given name and argument types 'lower.BIGINT.'.*casts.$"),
    ("title::INTEGER = 1", "Could not convert string 'rock' to INT32"),
    ("year % 0 = 1", "Division by zero"),
    ("large * large > 1", "Overflow"),
    ("year > ?", "Values were not provided for the following parameters: 1"),
    (("year > ?", [1, 2]), "excess parameters: 2"),
    (("year > 1", [1]), "Expected 0, got 1"),
    (("year > $a", {"b": 1}), "excess parameters: b"),
    (("year > ?", [len]), "Unable to transform python value of type"),
    (("year > ?", ["rock"]), "Could not convert string 'rock' to INT64"),
    ("-".join(["year"] * 600) + " > 1", "is nested too deep|Max expression depth"),
    ("year > 1 AND " * 30 + "year >", r"^where '.{190,200}'\.\.\.: syntax error"),
]


@pytest.mark.parametrize(("where", "reason"), NO_CONDITION, ids=lambda value: ascii(value)[:60])
def test_what_is_no_condition_on_rows_is_refused_with_a_reason(where, reason):
    with pytest.raises(ValueError, match=reason) as caught:
        matching(TABLE, where)
    assert "\n" not in str(caught.value).replace(str(where), "")
    assert "LINE 1" not in str(caught.value)


@pytest.mark.parametrize("kind", [pa.float16(), pa.decimal256(50, 2)], ids=str)
def test_columns_that_duckdb_cannot_read_are_named_where_they_are_used(kind):
    table = pa.table(
        {"odd": pa.array([1.0]).cast(pa.float16()) if kind == pa.float16() else pa.nulls(1, kind), "a": [1]}
    )
    assert matching(table, "a = 1").all()
    with pytest.raises(
        ValueError, match=f"DuckDB reads no {'halffloat' if kind == pa.float16() else 'decimal256'}.*'odd'"
    ):
        matching(table, "odd > 1")


@pytest.mark.parametrize(
    "query",
    [
        "FROM read_text('/etc/passwd')",
        "FROM '/etc/passwd'",
        "COPY (SELECT 1) TO '/nonexistent/x.csv'",
        "ATTACH '/nonexistent/x.db'",
        "INSTALL httpfs",
        "LOAD httpfs",
        "SET enable_external_access = true",
        "SET threads = 1",
        "FROM TABLE_OF_THIS_TEST",
    ],
)
def test_even_a_query_would_reach_nothing(query):
    TABLE_OF_THIS_TEST = TABLE  # noqa: F841 - DuckDB finds variables by name, if it may
    with pytest.raises(duckdb.Error, match="disabled|locked|does not exist"):
        asked(query)


def test_check_where_gives_expression_and_plain_parameters():
    assert check_where("a = 1") == ("a = 1", [])
    assert check_where(("a = ?", (np.int64(3), np.array(["x"])))) == ("a = ?", [3, ["x"]])
    assert check_where(["a = $x", {"x": np.float32(0.5)}]) == ("a = $x", {"x": 0.5})
    assert type(check_where(("a = ?", [np.int64(3)]))[1][0]) is int
    with pytest.raises(ValueError, match="where must be"):
        check_where(np.array([True]))


@pytest.fixture(scope="module")
def wide():
    """A million rows in chunks: numbers in no order, and every seventh missing."""
    values = np.random.default_rng(0).integers(0, 1000, 1_000_000)
    column = pa.array(values, mask=np.arange(len(values)) % 7 == 0)
    return pa.table({"a": pa.chunked_array([column.slice(start, 77_777) for start in range(0, len(values), 77_777)])})


def test_order_is_that_of_the_rows_over_many_blocks(wide, tmp_path):
    expected = wide["a"].to_pandas().gt(500).to_numpy()
    assert (matching(wide, "a > 500") == expected).all()
    pq.write_table(wide, tmp_path / "wide.parquet", row_group_size=100_001)
    assert (matching(tmp_path / "wide.parquet", "a > 500") == expected).all()
    ids = np.arange(len(wide))[::-1].copy()
    assert (matching(wide, "id < 10 OR a > 500", ids) == (expected | (ids < 10))).all()


def test_a_million_rows_take_no_python_object_each(wide):
    """10 ms on two cores; a loop over the rows would take seconds."""
    matching(wide, "a > 1")
    start = time.perf_counter()
    matching(wide, "a > 500 AND a % 2 = 0")
    assert time.perf_counter() - start < 1


def test_many_threads_filter_at_once(wide):
    values, failures = wide["a"].to_numpy()[:50_000], []
    part = wide.slice(0, 50_000)

    def search(number):
        for value in range(number, number + 10):
            if not (matching(part, ("a = ?", [value])) == (values == value)).all():
                failures.append(value)

    threads = [threading.Thread(target=search, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def in_tokyo():
    os.environ["TZ"] = "Asia/Tokyo"
    time.tzset()
    return matching(TABLE, "zoned = '2024-01-01 00:30:00' AND zoned = seen").tolist()


def test_a_forked_process_filters_too_and_its_time_zone_does_not_matter():
    matching(TABLE, "year > 1")
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert pool.apply_async(in_tokyo).get(timeout=60) == [True, False, False, False]
