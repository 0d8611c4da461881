"""Filters in Milvus's language choose the same items as in DuckDB's, or are refused."""

import datetime as dt
import re

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pymilvus import DataType, MilvusClient

from mmcl.index.filters import matching
from mmcl.index.milvus_filters import to_milvus
from mmcl.index.milvus_values import documents

TABLE = pa.table(
    {
        "year": [2000, None, 2020, -5, 0, 2**53],
        "price": [1.5, None, 0.1, 2.0, -0.0, 1e300],
        "title": ["rock", "Ü 한 🎈", None, 'it\'s "so"\\', "", "two\nlines"],
        "good": [True, False, None, True, False, None],
        "tags": [["a", "b"], [], None, ["c"], ["a"], ['"']],
        "sizes": [[1, 2], [], None, [3], [1], [-1]],
        "days": [[dt.date(2024, 2, 29)], [], None, [dt.date(1, 1, 1)], [None], [dt.date(1, 1, 1), None]],
        "shares": pa.array([[0.1], [], None, [0.5, 0.1], [2.0], [None]], pa.list_(pa.float32())),
        "nested": [[[1]], [], None, [], [], []],
        "day": [dt.date(2024, 2, 29), None, dt.date(1, 1, 1), dt.date(9999, 12, 31), dt.date(1970, 1, 1), None],
        "single": pa.array([0.1, None, 0.3, 2, -0.1, 16777216], pa.float32()),
        "color": pa.array(["red", None, "red", "blue", "", "red"]).dictionary_encode(),
        "nothing": pa.nulls(6),
        'a "b" \\ c\n': [1, 2, 3, None, 5, 6],
        "größe": [1, 2, 3, 4, None, 6],
        "select": [None, 2, 3, 4, 5, 6],
    }
)
TYPES = {field.name: field.type for field in TABLE.schema}
NUMBERS, NAMES = np.array([9, 12, 0, 2**63 - 1, 5, 6]), np.array(["q", "ü", 'a"b', "\\", "it's", "q1"], object)


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    """Milvus Lite with collections as an index makes them: "names" of ids that are str, two more of integers."""
    client = MilvusClient(str(tmp_path_factory.mktemp("milvus") / "lite.db"))
    for name, kind in (("numbers", {}), ("names", {"max_length": 100}), ("changing", {})):
        schema = client.create_schema(auto_id=False, enable_dynamic_field=False)
        schema.add_field("id", DataType.VARCHAR if kind else DataType.INT64, is_primary=True, **kind)
        schema.add_field("vector", DataType.FLOAT_VECTOR, dim=2)
        schema.add_field("metadata", DataType.JSON)
        index = client.prepare_index_params(field_name="vector", index_type="FLAT", metric_type="IP")
        client.create_collection(name, schema=schema, index_params=index)
    yield client
    client.close()


@pytest.fixture(scope="module")
def store(client):
    """store(name, table, ids): have these items, and no others, in a collection."""

    def fill(name, table, ids):
        client.delete(name, filter='id != ""' if name == "names" else "id >= 0")
        rows = zip(ids.tolist(), documents(table, ids.tolist()), strict=True)
        client.upsert(name, [{"id": key, "vector": [1.0, 0.0], "metadata": text} for key, text in rows])

    return fill


@pytest.fixture(scope="module")
def found(client):
    """found(collection, expression): the ids that Milvus Lite finds."""

    def ids(name, expression):
        rows = client.query(name, filter=expression, output_fields=["id"], consistency_level="Strong")
        return {row["id"] for row in rows}

    return ids


@pytest.fixture(scope="module")
def same(store, found):
    """same(where, columns): how many items of `TABLE` DuckDB and Milvus choose alike, with ids of both kinds."""
    collections = {"numbers": NUMBERS, "names": NAMES}
    for name, ids in collections.items():
        store(name, TABLE, ids)

    def check(where, *columns, ids=("numbers", "names")):
        counts = set()
        for name in ids:
            keep = matching(TABLE, where, collections[name])
            for each in columns:
                assert found(name, to_milvus(where, each)) == set(collections[name][keep].tolist())
            counts.add(int(keep.sum()))
        return counts.pop()

    return check


SAME = [
    ("year >= 2000", 3),
    ("NOT (year > 2000)", 3),
    ("year <> 2000", 4),
    ("NOT (year <> 2000)", 1),
    ("2000 < year", 2),
    ("year = 2000.0", 1),
    ("price = 0.1", 1),
    ("year > price", 2),
    ("year IS NULL", 1),
    ("NOT (year IS NULL OR good)", 1),
    ("good", 2),
    ("NOT good", 2),
    ("NOT NOT good", 2),
    ("good = FALSE", 2),
    ("good <> TRUE", 2),
    ("good IS NOT NULL AND (good OR year = 0)", 3),
    ("NOT (good AND year > 0)", 3),
    ("year IN (2000, -5, NULL)", 2),
    ("year NOT IN (2000, -5)", 3),
    ("year NOT IN (2000, NULL)", 0),
    ("year IN (price, 2000)", 2),
    ("NULL IN (1)", 0),
    ("title IN ('rock', '')", 2),
    ("day IN ('2024-02-29', '0001-01-01')", 2),
    ("year BETWEEN -5 AND 2000", 3),
    ("year NOT BETWEEN -5 AND 2000", 2),
    ("year BETWEEN NULL AND 5", 0),
    ("year NOT BETWEEN NULL AND 5", 3),
    ("title LIKE 'r%k'", 1),
    ("title LIKE 'r_ck'", 1),
    ("title LIKE 'rock'", 1),
    ("title LIKE '%'", 5),
    ("title LIKE '% _ %'", 1),
    ("title LIKE 'two%'", 1),
    ("title LIKE '%\"%'", 1),
    ("title NOT LIKE '%o%'", 2),
    ("NOT (title NOT LIKE '%o%')", 3),
    ("title LIKE '[a-z]+.*%'", 0),
    ("title LIKE NULL", 0),
    ("title > 'r'", 3),
    ("title < 'Ü'", 4),
    ("color = 'red'", 3),
    ("list_contains(tags, 'a')", 2),
    ("NOT list_contains(tags, 'a')", 3),
    ("array_has(tags, '\"')", 1),
    ("list_contains(sizes, -1)", 1),
    ("year + 1 = 2001 OR year - 20 = 2000", 2),
    ("year * 2 + 1 > 4001", 2),
    ("-year = 5", 1),
    ("+year = -5", 1),
    ("year / 8 = 250", 1),
    ("year / 8 = 252.5", 1),
    ("price + 1e-1 = 0.2", 1),
    ("(year + NULL) = 3", 0),
    ("day >= '1970-01-01'", 3),
    ("day < DATE '1970-01-01'", 1),
    ("NOT (day = '1970-01-01')", 3),
    ("nothing IS NULL", 6),
    ("nothing > 1", 0),
    ("nothing = 'a' OR nothing", 0),
    ("NOT nothing", 0),
    ('"a ""b"" \\ c\n" >= 3', 3),
    ("größe = 2", 1),
    ("GRößE = 2", 1),
    ('"select" <> 2', 4),
    ("TRUE", 6),
    ("FALSE", 0),
    ("NULL", 0),
    ("NOT NULL", 0),
    ("1 + 1 = 2", 6),
    ("'a' > 'b' OR year = 0", 1),
    ("7 % 4 = 3 AND -7 % 4 = -3 AND year = 0", 1),
    ("TRUE AND NOT FALSE AND (year > 0 OR FALSE)", 3),
    ("id IS NULL", 0),
    ("id IS NOT NULL AND year > 0", 3),
    (("year = ?", [2020]), 1),
    (("year = ?", [None]), 0),
    (("year = $2 OR year = $1", [2020, -5]), 2),
    (("title = $t OR good = $g", {"t": 'it\'s "so"\\', "g": False}), 3),
    (("year IN ?", [[2000, None, 0]]), 2),
    (("year NOT IN ?", [[2000, 0]]), 3),
    (("NOT (year IN $y)", {"y": (2000, 0)}), 3),
    (("year IN ?", [[]]), 0),
    (("year NOT IN ?", [[]]), 6),
    (("year NOT IN ?", [[None]]), 5),
    (("NULL NOT IN ?", [[1]]), 0),
    (("title LIKE ?", ["%🎈"]), 1),
    (("list_contains(tags, ?)", ["c"]), 1),
    (("price > ?", [0.1]), 3),
    (("price < ?", [-1e-300]), 0),
    (("year >= ?", [np.int16(2000)]), 3),
    (("day > ?", [dt.date(2024, 2, 28)]), 2),
    (("good = ?", [True]), 2),
]
SAME_WITH_TYPES = [
    ("price * 0.5 > 0.7", 3),
    ("'a' IN tags", 2),
    ("list_contains(sizes, 2.0)", 1),
    ("list_contains(days, DATE '0001-01-01')", 2),
    ("NOT list_contains(days, '2024-02-29')", 4),
    ("list_contains(shares, 0.1)", 2),
    ("list_contains(shares, 0.5)", 1),
    ("list_contains(shares, 2)", 1),
    ("'a' NOT IN tags", 3),
    ("single = 0.1", 1),
    ("single IN (0.1, 0.3)", 2),
    ("single >= 0.3", 3),
    ("single = 16777217", 1),  # which is 2^24 as float32
    ("single < single", 0),
    (("single = ?", [np.float32(0.1)]), 1),
    (("single > ?", [0.5]), 2),
]


@pytest.mark.parametrize(("where", "count"), SAME, ids=lambda value: ascii(value)[:60])
def test_milvus_chooses_what_duckdb_chooses(where, count, same):
    assert same(where, TYPES, list(TYPES)) == count


@pytest.mark.parametrize(("where", "count"), SAME_WITH_TYPES, ids=lambda value: ascii(value)[:60])
def test_types_of_columns_let_more_be_translated(where, count, same):
    assert same(where, TYPES) == count


@pytest.mark.parametrize(
    ("where", "count"),
    [
        ("id > 6", 3),
        ("NOT (id > 6)", 3),
        ("id <> 9", 5),
        ("id BETWEEN 5 AND 9 AND NOT id = 6", 2),
        ("id IN (9, 12, 7)", 2),
        ("id NOT IN (9, 12, 7)", 4),
        ("id IN (9, NULL)", 1),
        ("id NOT IN (9, NULL)", 0),
        ("id IN (year, 9)", 1),
        (("id IN ?", [[9, 2**63 - 1]]), 2),
        (("id NOT IN ?", [[]]), 6),
        ("id - 3 = 6 OR id * 2 = 24", 2),
        ("ID = 9223372036854775807", 1),
        ("id = 9 AND year = 2000", 1),
        ("year IS NULL OR id = 0", 2),
    ],
    ids=str,
)
def test_numbers_as_ids(where, count, same):
    assert same(where, TYPES, list(TYPES), ids=["numbers"]) == count


@pytest.mark.parametrize(
    ("where", "count"),
    [
        ("id = 'q'", 1),
        ("id <> 'q'", 5),
        ("id >= 'q'", 3),
        ("id LIKE 'q%'", 2),
        ("id LIKE 'q'", 1),
        ("id LIKE '_' AND NOT id LIKE 'q_'", 3),
        ("id NOT LIKE 'q%'", 4),
        ("id IN ('it''s', 'ü', 'a\"b')", 3),
        ("id NOT IN ('\\')", 5),
        (("id = ? AND title IS NULL", ['a"b']), 1),
    ],
    ids=str,
)
def test_strings_as_ids(where, count, same):
    assert same(where, TYPES, list(TYPES), ids=["names"]) == count


NUMBERS_OF = {"i": st.integers(-3, 3), "f": st.sampled_from([-1.5, -0.0, 0.1, 0.5, 2.0])}
TEXTS = st.text("abA%_é", max_size=3)
COLUMNS = NUMBERS_OF | {"s": TEXTS, "b": st.booleans(), "l": st.lists(TEXTS, max_size=2)}
KINDS = {"i": pa.int64(), "f": pa.float64(), "s": pa.string(), "b": pa.bool_(), "l": pa.list_(pa.string())}


@st.composite
def tables(draw):
    rows = draw(st.integers(1, 6))
    columns = {name: draw(st.lists(st.none() | each, min_size=rows, max_size=rows)) for name, each in COLUMNS.items()}
    return pa.table({name: pa.array(values, KINDS[name]) for name, values in columns.items()})


def sql(text):
    return "'" + text.replace("'", "''") + "'"


def formed(pattern, *parts):
    return st.tuples(*parts).map(lambda given: pattern.format(*given))


def compared(part, signs=("=", "<>", "<", "<=", ">", ">=")):
    return formed("{} {} {}", part, st.sampled_from(signs), part)


def chosen(part):
    items = st.lists(part, min_size=1, max_size=3).map(", ".join)
    words = st.sampled_from(["IN", "NOT IN"])
    return formed("{} {} ({})", part, words, items) | formed("{} {} BETWEEN {} AND {}", part, NOT, part, part)


NOT = st.sampled_from(["", "NOT"])
NUMBER = st.recursive(
    st.sampled_from(["i", "f", "NULL"]) | st.integers(-3, 3).map(str) | NUMBERS_OF["f"].map("{:e}".format),
    lambda part: (
        formed("({} {} {})", part, st.sampled_from("+-*"), part)
        | formed("({} / {})", part, st.sampled_from(["2", "-4e-1"]))
        | formed("(- {})", part)
    ),
    max_leaves=3,
)
TEXT = st.sampled_from(["s", "NULL"]) | TEXTS.map(sql)
CONDITION = st.recursive(
    compared(NUMBER)
    | compared(TEXT)
    | compared(st.sampled_from(["b", "TRUE", "FALSE", "NULL"]), ("=", "<>"))
    | chosen(NUMBER)
    | chosen(TEXT)
    | formed("s {} LIKE {}", NOT, TEXTS.map(sql))
    | formed("{} IS {} NULL", st.sampled_from("ifsbl"), NOT)
    | formed("list_contains(l, {})", TEXTS.map(sql))
    | st.sampled_from(["b", "TRUE", "FALSE", "NULL"]),
    lambda part: formed("NOT ({})", part) | formed("({}) {} ({})", part, st.sampled_from(["AND", "OR"]), part),
    max_leaves=6,
)


def check_same(store, found, table, conditions):
    store("changing", table, ids := np.arange(len(table)))
    for where in conditions:
        rows = set(np.flatnonzero(matching(table, where, ids)).tolist())
        assert found("changing", to_milvus(where, KINDS)) == rows, where


@given(tables(), st.lists(CONDITION, min_size=1, max_size=5))
def test_any_condition_chooses_the_same_in_milvus(store, found, table, conditions):
    check_same(store, found, table, conditions)


@pytest.mark.slow
@settings(max_examples=500, derandomize=False)
@given(tables(), st.lists(CONDITION, min_size=1, max_size=5))
def test_many_conditions_choose_the_same_in_milvus(store, found, table, conditions):
    check_same(store, found, table, conditions)


SPECIAL = "\"'\\\n\r\t%_"
LETTERS = st.sampled_from(SPECIAL) | st.characters(codec="utf-8")


@given(st.text(LETTERS, min_size=1, max_size=5), st.text(LETTERS, max_size=5))
def test_any_name_and_any_text_is_escaped(store, found, name, text):
    name = name.replace("\0", "") or SPECIAL  # DuckDB takes no name with it
    table = pa.table({name: [text, text + "x", None]})
    store("changing", table, np.arange(3))
    column = '"' + name.replace('"', '""') + '"'
    for where, rows in (
        ((f"{column} = ?", [text]), {0}),
        ((f"{column} NOT IN (?)", [text]), {1}),
        (f"{column} <> {sql(text + 'x')}", {0}),
    ):
        assert found("changing", to_milvus(where, dict(zip(table.column_names, table.schema.types)))) == rows


def test_a_filter_reads_as_one_would_write_it():
    for where, text in {
        "year >= 2020": 'metadata["year"] >= 2020',
        "NOT (year < 2020 AND good)": '(metadata["year"] >= 2020 or metadata["good"] == false)',
        "title <> 'it''s'": '(metadata["title"] is not null and metadata["title"] != "it\'s")',
        "title LIKE 'a%'": 'metadata["title"] like "a%"',
        "Title IN ('a\"', 'b\\')": '(metadata["title"] == "a\\"" or metadata["title"] == "b\\\\")',
        "NOT list_contains(tags, 'a')": (
            '(metadata["tags"] is not null and not (json_contains_any(metadata["tags"], ["a"])))'
        ),
        "id IN (1, 2) AND year + 1 = 3": '(key in [1, 2] and (metadata["year"] + 1) == 3)',
        "TRUE": "key not in []",
    }.items():
        assert to_milvus(where, ["year", "title", "good", "tags"], id_name="key") == text


TAKEN = r"Milvus takes columns, constants, = <> .* and list_contains$"
REFUSED = [
    ("lower(title) = 'a'", f"lower is no value in Milvus. {TAKEN}"),
    ("contains(title, 'a')", "Milvus looks for one constant in a column of lists"),
    ("starts_with(title, 'a')", f"starts_with is no condition in Milvus. {TAKEN}"),
    ("title ILIKE 'a'", r"~~\* is no condition"),
    ("title || 'x' = 'a'", r"\|\| is no value"),
    ("CASE WHEN good THEN good END", "CASE EXPR is no condition"),
    ("year IS DISTINCT FROM 3", "DISTINCT FROM is no condition"),
    ("good IS TRUE", "NOT DISTINCT FROM is no condition"),
    ("year::VARCHAR = '2'", "CAST is no value in Milvus, unless to write DATE '2024-02-29'"),
    ("title COLLATE nocase = 'a'", "COLLATE is no value"),
    ("(year, price) = (1, 2)", "row is no value"),
    ("coalesce(year, 1) = 1", "COALESCE is no value"),
    ("title = x'ab'", "'ab' is no value"),
    ("(year > 1) = good", "GREATERTHAN is no value"),
    ("(year > 1) IS NULL", "GREATERTHAN is no value"),
    ("(year + 1) IS NULL", "Milvus tests columns for NULL"),
    ("1 IS NULL", "Milvus tests columns for NULL"),
    ("title LIKE good", "Milvus compares a column of strings with a constant pattern"),
    ("year LIKE '2%'", "Milvus compares a column of strings"),
    ("title LIKE '50\\%'", r"a pattern is a string without \\, which Milvus takes for an escape"),
    ("title LIKE 'a' ESCAPE '!'", "like_escape is no condition"),
    ("list_contains(tags, title)", "Milvus looks for one constant in a column of lists"),
    ("list_contains(sizes, 'a')", r"items of metadata\[\"sizes\"\] are integer, \"a\" is string"),
    ("list_contains(sizes, TRUE)", "are integer, true is boolean"),
    ("list_contains(nested, 1)", "are list, 1 is integer"),
    ("list_contains(tags, NULL)", "Milvus looks for one constant in a column of lists"),
    ("list_contains([price, 1], year)", "lists of constants only"),
    ("tags = ['a']", r"metadata\[\"tags\"\] is list, the list is list: Milvus compares numbers"),
    ("year > '2000'", r"metadata\[\"year\"\] is integer, \"2000\" is string: Milvus compares numbers, strings"),
    ("title > 5", "is string, 5 is integer"),
    (("title > ?", [5]), "is string, 5 is integer"),
    ("good = 1", "is boolean, 1 is integer"),
    ("id = TRUE", "id is id, true is boolean"),
    ("day = title", "is date, .* is string"),
    ("day > '2024-1-1'", r"\"2024-1-1\" must be a date such as '2024-02-29'"),
    ("day > 'soon'", "must be a date"),
    (
        ("day > ?", [dt.datetime(2024, 1, 1)]),
        "is no value in Milvus, which compares numbers, strings, booleans and dates",
    ),
    (("title > ?", [b"a"]), "is no value in Milvus"),
    (("price > ?", [float("nan")]), "nan is no number in Milvus"),
    (("price < ?", [float("inf")]), "inf is no number in Milvus"),
    ("price < 1e400", "inf is no number in Milvus"),
    ("year < 9223372036854775808", "9223372036854775808 is no number in Milvus, which has those of 64 bits"),
    (
        ("single > ?", [0.1]),
        r"0.1 is no float32 as metadata\[\"single\"\] is; write it into the condition, or round it",
    ),
    ("single > price", "is float32, .* is float64"),
    ("single * 2 > 1", r"\* of float32 and integer: Milvus computes with integers and float64 only"),
    ("year * 0.1 > 1", "DuckDB computes exactly with decimals, Milvus does not; write 0.1 as 1e-1"),
    ("0.1 + 0.2 = 0.3", "DuckDB computes exactly with decimals"),
    ("price % 2 = 1", "% of integers only"),
    ("price / year > 1", "DuckDB and Milvus differ in division by zero; divide by a constant"),
    ("year % 0 = 1", "differ in division by zero"),
    ("year // 2 = 1", "// is no value"),
    ("year", r"metadata\[\"year\"\] is integer, not a condition; compare it with something"),
    ("id", "id is id, not a condition"),
    ("good AND year", "is integer, not a condition"),
    ("year.x = 1", "year.x: Milvus compares whole columns, not their fields"),
    ("yaer > 1", r"there is no metadata column 'yaer' that Milvus can filter on; columns are \['year', .*, 'id'\]"),
    ("list_filter(tags, lambda x: x = 'a') = tags", "list_filter is no value"),
    (("year > ?", []), r"it names parameters \['1'\], given are \[\]"),
    (("year > ?", [1, 2]), r"it names parameters \['1'\], given are \['1', '2'\]"),
    (("year > $a", {"b": 1}), r"it names parameters \['a'\], given are \['b'\]"),
    ("year > now", "now is refused"),
    ("year IN (SELECT 1)", "subqueries are refused"),
    ("count(*) > 1", "count_star is an aggregate"),
    ("single < 1e300", "1e[+]300 is no float32"),
    ("NOT (" * 490 + "good" + ")" * 490, "is nested too deep|Max expression depth"),
    ("year >", "syntax error"),
    ("", "where is an empty condition"),
]


@pytest.mark.parametrize(("where", "reason"), REFUSED, ids=lambda value: ascii(value)[:60])
def test_what_milvus_does_not_take_in_that_sense_is_refused_with_a_reason(where, reason):
    with pytest.raises(ValueError, match=reason):
        to_milvus(where, TYPES)


def test_columns_of_types_without_json_words_are_not_compared():
    types = {"half": pa.float16(), "seen": pa.timestamp("us"), "blob": pa.binary(), "cost": pa.decimal128(5, 2)}
    for name, kind in types.items():
        with pytest.raises(ValueError, match=f"is {re.escape(str(kind))}, 1 is integer"):
            to_milvus(f"{name} = 1", types)


@pytest.fixture(scope="module")
def raw(client, store):
    """raw(expression): ids of what Milvus Lite finds of three items, the third without metadata."""
    table = pa.table({"n": [1, 0, None], "b": [True, False, None], "s": ["a", "a\n", None], "f": [3.0, -1.5, None]})

    def ask(expression):
        store("changing", table, np.array([1, 2, 3]))
        return {row["id"] for row in client.query("changing", filter=expression, output_fields=["id"])}

    return ask


def test_lite_faults_on_which_the_translation_rests(raw):
    """Where one of these fails, Milvus Lite has been mended, and the translation may do with less."""
    for lacking, told in {
        'metadata["n"] % 2 == 0': "unexpected character '%'",
        'metadata["n"] in [1, 2]': "left side of 'in' must be a field reference",
        'json_contains(metadata["n"], -1)': "unexpected token '-'",
        'metadata["b"]': "must evaluate to bool",
    }.items():
        with pytest.raises(Exception, match=told):
            raw(lacking)
    assert raw('not (json_contains(metadata["n"], 1))') == {1, 2, 3}  # a missing key included
    assert raw('metadata["b"] == 1') == {1}
    assert raw('metadata["n"] == false') == {2}
    assert raw('1 / metadata["n"] > 0') == {1}  # to DuckDB, 1 / 0 is infinity
    assert raw('metadata["f"] * 0.1 == 0.3') == set()
    assert raw('metadata["n"] > "a"') == set()


def test_lite_fault_a_last_newline_escapes_like(raw):
    """What is left: LIKE '%a' is true of an a and a newline, which neither DuckDB nor Milvus would choose."""
    assert raw(to_milvus("s LIKE '%a'", ["s"])) == {1, 2}
    assert matching(pa.table({"s": ["a", "a\n"]}), "s LIKE '%a'").tolist() == [True, False]
    assert raw(to_milvus("s LIKE 'a'", ["s"])) == {1}


def test_lite_fault_long_ids_are_not_compared_with_fractions(found, same):
    same("TRUE", TYPES)
    with pytest.raises(Exception, match="not in range"):
        found("numbers", to_milvus("id > 0.5", TYPES))


def test_remainders_are_translated_for_milvus_though_lite_cannot(raw):
    assert to_milvus("n % 2 = 1", {"n": pa.int64()}) == '(metadata["n"] % 2) == 1'
    with pytest.raises(Exception, match="unexpected character '%'"):
        raw(to_milvus("n % 2 = 1", ["n"]))
