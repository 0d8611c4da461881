"""Filters on metadata: one DuckDB SQL condition, tested on every row.

A filter is an expression such as "year >= 2020 AND list_contains(tags, 'cat')", or (expression, parameters), whose
values DuckDB binds and nobody pastes. DuckDB parses the expression, which is refused unless it is one condition on
single rows; it then runs on a connection without files, network, extensions or settings of its own. The answer depends
on the row alone: not on chance, the clock or the machine (times without a zone are read as UTC).
"""

import difflib
import functools
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from jaxtyping import Bool

from mmcl.index.item_checks import ID
from mmcl.index.stored_table import StoredTable

VIEW = "items of the index"
"""A name that hides no column."""
MAX_THREADS = 4
LOCKED = {
    "enable_external_access": "false",
    "autoinstall_known_extensions": "false",
    "autoload_known_extensions": "false",
    "allow_community_extensions": "false",
    "python_enable_replacements": "false",
}
ROWWISE = "a condition is tested on one row at a time"
PARTS = {
    "SUBQUERY": "subqueries are refused; to look in a list, write year IN (1, 2) or list_contains(tags, 'a')",
    "WINDOW": f"window functions are refused: {ROWWISE}",
    "STAR": "* stands for several columns; name each one",
    "POSITIONAL_REFERENCE": "name the column in place of its number",
}
"""Why parts of DuckDB's syntax tree have no place in a condition on single rows."""
KINDS = {"aggregate": f"an aggregate: {ROWWISE}", "window": f"a window function: {ROWWISE}"}
ANSWERING = ("scalar", "macro", *KINDS)
"""Kinds of functions that stand in an expression; others of the same name are never called there."""
AMBIENT = """
age current_catalog current_database current_date current_localtime current_localtimestamp current_role current_schema
current_schemas current_setting current_time current_timestamp current_user get_current_time get_current_timestamp user
getvariable in_search_path localtime localtimestamp now today transaction_timestamp txid_current version
"""
"""Functions of the clock and the connection, some of them written without parentheses."""
OUTSIDE = "{} is refused: its answer does not depend on the row alone; pass a value as parameter"
UNKNOWN = re.compile(r'Referenced (?:column|table) "(.*?)" (?:was )?not found', re.DOTALL)


def check_where(where: Any) -> tuple[str, list[Any] | dict[str, Any]]:
    """The expression and its parameters.

    Args:
        where: an expression, or (expression, parameters): a list or tuple for ? or $1, a dict for $name, of Python's or
            numpy's values.
    Raises: ValueError that says what was expected.
    """
    expression, parameters = where if isinstance(where, list | tuple) and len(where) == 2 else (where, [])
    if not isinstance(expression, str):
        told = "where must be a DuckDB SQL condition such as 'year >= 2020', or (condition, parameters)"
        raise ValueError(f"{told}, got {where!r}")
    if not expression.strip():
        raise ValueError("where is an empty condition; leave it out to search among all items")
    named = parameters if isinstance(parameters, Mapping) else {}
    if not isinstance(parameters, list | tuple | Mapping) or not all(isinstance(name, str) for name in named):
        told = "its parameters must be a list for ? and $1, or a dict for $name"
        raise ValueError(f"{shown(expression)}: {told}, got {parameters!r}")
    try:
        expression.encode()
        values = {plain(name): plain(value) for name, value in named.items()}
        return expression, values or [plain(value) for value in parameters]
    except UnicodeEncodeError as error:
        raise ValueError(f"{shown(expression)}: {error.object!r} cannot be written as UTF-8") from None


def matching(source: pa.Table | StoredTable | Path, where: Any, ids: Any = None) -> Bool[np.ndarray, " n"]:
    """Which rows satisfy a condition; where it is NULL, it is not satisfied.

    Only the columns that it names are read: a table without a copy, a file batch by batch.

    Args:
        source: n rows of metadata, or a parquet file of them.
        where: see `check_where`.
        ids: (n,) int64, or str, of a table's rows: the condition may name them `id`, which no column may be called
            then. Without them, as in a file, `id` is a column like any other.
    Returns: (n,) bool in the order of the rows.
    Raises: ValueError that quotes the condition and says what is wrong with it; it lists the columns where another is
        named, and gives the type where it is no condition. Names are found whatever the case of their ASCII letters;
        of two that differ in nothing else, one must be written exactly, and alone.
    """
    expression, parameters = check_where(where)
    source = StoredTable(source) if isinstance(source, Path) else source
    names, count = source.stored_names if isinstance(source, StoredTable) else source.column_names, source.num_rows
    if ids is not None:
        if ID in names or not isinstance(source, pa.Table):
            raise ValueError("with ids, metadata must be a table without a column 'id'; leave ids out, or rename it")
        if names and len(ids) != count:
            raise ValueError(f"{count} rows of metadata need {count} ids, got {len(ids)}")
        names, count = [*names, ID], len(ids)
    used = columns_of(expression, names)
    if not used:
        return np.full(count, evaluated(None, expression, parameters, names)[0])
    keep = evaluated(scanned(source, used, ids), expression, parameters, names)
    assert len(keep) == count, f"{shown(expression)} has {len(keep)} values for {count} rows"
    return keep


def columns_of(expression: str, names: Sequence[str]) -> list[str]:
    """Which of these columns a condition names; ValueError as in `matching`."""
    return sorted(set(resolved(names, parsed(expression, names), expression).values()))


def scanned(source: pa.Table | StoredTable, used: Sequence[str], ids: Any) -> pa.Table | pa.RecordBatchReader:
    """What DuckDB reads: those columns, `ids` among them."""
    if isinstance(source, pa.Table):
        rows = pa.table({name: ids if name == ID and ids is not None else source[name] for name in used})
    else:
        rows = pa.RecordBatchReader.from_batches(source.schema_of(used), source.batches(used))
    for field in rows.schema:
        if pa.types.is_float16(field.type) or pa.types.is_decimal256(field.type):
            raise ValueError(f"DuckDB reads no {field.type}, as metadata column {field.name!r} is; cast it")
    return rows


def evaluated(
    rows: pa.Table | pa.RecordBatchReader | None, expression: str, parameters: Any, names: Sequence[str]
) -> Bool[np.ndarray, " n"]:
    """The condition of every row, or of none in particular where there are no `rows`."""
    import duckdb

    refused = (duckdb.ProgrammingError, duckdb.DataError, duckdb.NotSupportedError, duckdb.PermissionException)
    with closing(database(os.getpid()).cursor()) as cursor:
        try:
            if rows is not None:
                cursor.register(VIEW, rows)
            cursor.execute(statement(expression, rows is not None), parameters)
            kind = str(cursor.description[0][1])
            if kind not in ("BOOLEAN", '"NULL"'):
                raise ValueError(f"{shown(expression)} is {kind}, not a condition; compare it with something")
            (keep,) = cursor.fetchnumpy().values()
        except refused as error:
            raise ValueError(f"{shown(expression)}: {reason(error, names)}") from None
    return np.ma.filled(keep, False).astype(bool, copy=False)


def statement(expression: str, rows: bool = True) -> str:
    """The query of a condition: as a projection, it answers for every row, in order."""
    return f"SELECT ({expression}\n)" + (f' FROM "{VIEW}"' if rows else "")


def parsed(expression: str, names: Iterable[str]) -> dict[str, Any]:
    """The expression as DuckDB's syntax tree.

    Raises: ValueError where it is no single expression, or no condition on single rows with columns of these names.
    """
    try:
        bare, inside = syntax(f'SELECT 1 FROM "{VIEW}" WHERE {expression}\n'), syntax(statement(expression))
    except RecursionError:
        raise ValueError(f"{shown(expression)} is nested too deep") from None
    if bare["error"] and bare["error_type"] == "parser":
        raise ValueError(f"{shown(expression)}: {' '.join(bare['error_message'].split())}")
    if bare["error"] or inside["error"]:
        raise ValueError(f"{shown(expression)} must be one condition, without ';' and clauses such as ORDER BY")
    (condition,) = inside["statements"][0]["node"]["select_list"]
    if told := refusal(condition, {folded(name) for name in names}):
        raise ValueError(f"{shown(expression)}: {told}")
    return condition


def syntax(query: str) -> Any:
    """What DuckDB's parser makes of a query; under "error" whether it is none."""
    ((text,),) = asked("SELECT json_serialize_sql(?)", [query])
    return json.loads(text)


def refusal(tree: Any, columns: Iterable[bytes] = ()) -> str | None:
    """Why a tree is no condition on single rows with these (folded) columns; None where it is one."""
    for node in nodes(tree):
        told: str | None = PARTS.get(node["class"])
        if node["class"] == "FUNCTION":
            told = function_refusal(node["function_name"].lower())
        elif node["class"] == "COLUMN_REF" and folded(name := node["column_names"][0]) not in columns:
            told = OUTSIDE.format(name) if name.lower() in AMBIENT.split() else None
        if told:
            return told
    return None


@functools.lru_cache(1024)
def function_refusal(name: str) -> str | None:
    """Why a function has no place in a condition: it is unknown, looks at other rows, or does not look at rows."""
    overloads = functions().get(name, [])
    if not overloads:
        close = difflib.get_close_matches(name, functions(), 1)
        return f"there is no function {name!r}" + (f"; did you mean {close[0]!r}?" if close else "")
    answering = [overload for overload in overloads if overload[0] in ANSWERING]
    if not answering:
        return f"{name} is a {overloads[0][0]} function, which is no value of a row"
    for kind, stability, definition in answering:
        if kind in KINDS:
            return f"{name} is {KINDS[kind]}"
        if stability == "VOLATILE" or name in AMBIENT.split():
            return OUTSIDE.format(name)
        if definition and (told := refusal(syntax(f"SELECT {definition}")["statements"])):
            return f"{name}: {told}"
    return None


@functools.cache
def functions() -> dict[str, list[tuple[str, str | None, str | None]]]:
    """(kind, stability, definition of a macro) of all functions that this DuckDB has, by name."""
    listed = "SELECT DISTINCT lower(function_name), function_type, stability, macro_definition FROM duckdb_functions()"
    found: dict[str, list[tuple[str, str | None, str | None]]] = {}
    for name, *about in asked(listed):
        found.setdefault(name, []).append(tuple(about))
    return found


def nodes(tree: Any) -> Iterator[dict[str, Any]]:
    """All expressions in a tree."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, dict):
            if "class" in node:
                yield node
            waiting.extend(node.values())
        elif isinstance(node, list):
            waiting.extend(node)


def resolved(names: Iterable[str], tree: Any, expression: str) -> dict[str, str]:
    """{name as a tree writes it: the column that it means}; names of none, such as those of lambdas, are left out.

    Raises: ValueError for a name that means two columns, and for two that DuckDB takes for one.
    """
    columns: dict[bytes, list[str]] = {}
    for name in names:
        columns.setdefault(folded(name), []).append(name)
    meant: dict[str, str] = {}
    for node in nodes(tree):
        if node["class"] == "COLUMN_REF":
            name = node["column_names"][0]
            same = columns.get(folded(name), [])
            if len(same) > 1 and (name not in same or any(other in meant for other in same if other != name)):
                raise ValueError(f"{shown(expression)}: DuckDB cannot tell columns {same} apart; name one, exactly")
            if same:
                meant[name] = name if len(same) > 1 else same[0]
    return meant


def folded(name: str) -> bytes:
    """What DuckDB compares of a name: the case of ASCII letters does not count."""
    return name.encode().lower()


def plain(value: Any) -> Any:
    """A parameter as DuckDB takes it: numpy's values as Python's; UnicodeEncodeError for text without UTF-8."""
    value = value.tolist() if isinstance(value, np.generic | np.ndarray) else value
    if isinstance(value, str):
        value.encode()
    return [plain(each) for each in value] if isinstance(value, list | tuple) else value


def shown(expression: str) -> str:
    """The condition as errors quote it."""
    return f"where {expression!r}" if len(expression) <= 200 else f"where {expression[:200]!r}..."


def reason(error: Exception, names: Iterable[str]) -> str:
    """DuckDB's error in one line, without its kind and the query; for an unknown column, all columns."""
    if unknown := UNKNOWN.search(str(error)):
        return f"there is no metadata column {unknown[1]!r}; columns are {list(names)}"
    told = str(error).split("\n\nLINE ")[0].split("\tCandidate functions:")[0]
    return " ".join(told.split("Error: ", 1)[-1].split())


def asked(query: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
    """The rows of a query of our own."""
    with closing(database(os.getpid()).cursor()) as cursor:
        return cursor.execute(query, list(values)).fetchall()


@functools.cache
def database(process: int) -> Any:
    """A DuckDB in memory, locked down; one a process, as its threads do not survive a fork. Use it by its cursors."""
    import duckdb

    threads = min(MAX_THREADS, os.cpu_count() or 1)
    connection = duckdb.connect(":memory:", config={**LOCKED, "threads": str(threads)})
    connection.execute("SET GLOBAL TimeZone = 'UTC'")
    connection.execute("SET lock_configuration = true")
    return connection
