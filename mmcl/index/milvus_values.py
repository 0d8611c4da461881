"""Metadata as Milvus keeps it: one JSON object an item, read back by the arrow types of the columns.

What JSON has no word for is written so that it comes back as it went in:

    NaN, infinities                     "nan", "inf", "-inf"
    float32, float16                    the shortest number that rounds to it: 0.1, as one would type it
    dates, timestamps, decimals         as arrow prints them: "2024-02-29", "2024-02-29 12:00:00.000000" (in UTC)
    times of day, durations             how many of their unit
    bytes                               base64
    lists, structs, maps                lists, objects, lists of pairs
    None                                left out
"""

import base64
import json
import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

MAX_JSON = 65536
"""Bytes that Milvus allows for the metadata of one item."""

Convert = Callable[[Any, pa.DataType], Any]


def same(value: Any, _: pa.DataType) -> Any:
    return value


def float_to_json(value: float, kind: pa.DataType) -> float | str:
    if not math.isfinite(value):
        return str(float(value))
    return float(value) if pa.types.is_float64(kind) else float(str(np.dtype(kind.to_pandas_dtype()).type(value)))


def float_from_json(value: float | str, kind: pa.DataType) -> float:
    return float(np.dtype(kind.to_pandas_dtype()).type(value))


def printed(value: Any, kind: pa.DataType) -> str:
    if pa.types.is_timestamp(kind) and kind.tz:
        return pa.scalar(value, kind).cast(pa.timestamp(kind.unit)).cast(pa.string()).as_py()
    return pa.scalar(value, kind).cast(pa.string()).as_py()


def parsed(text: str, kind: pa.DataType) -> Any:
    if pa.types.is_timestamp(kind) and kind.tz:
        return pa.scalar(text).cast(pa.timestamp(kind.unit)).cast(kind).as_py()
    return pa.scalar(text).cast(kind).as_py()


def ticks(value: Any, kind: pa.DataType) -> int:
    return pa.scalar(value, kind).value


def of_ticks(value: int, kind: pa.DataType) -> Any:
    return pa.scalar(value, kind).as_py()


def base64_text(value: bytes, _: pa.DataType) -> str:
    return base64.b64encode(value).decode()


def bytes_of(text: str, _: pa.DataType) -> bytes:
    return base64.b64decode(text)


def list_to_json(value: list[Any], kind: Any) -> list[Any]:
    return [to_json(each, kind.value_type) for each in value]


def list_from_json(value: list[Any], kind: Any) -> list[Any]:
    return [from_json(each, kind.value_type) for each in value]


def struct_to_json(value: dict[str, Any], kind: Any) -> dict[str, Any]:
    return {field.name: to_json(value[field.name], field.type) for field in kind}


def struct_from_json(value: dict[str, Any], kind: Any) -> dict[str, Any]:
    return {field.name: from_json(value[field.name], field.type) for field in kind}


def pairs_to_json(value: Iterable[Any], kind: Any) -> list[Any]:
    return [[to_json(key, kind.key_type), to_json(each, kind.item_type)] for key, each in value]


def pairs_from_json(value: Iterable[Any], kind: Any) -> list[Any]:
    return [(from_json(key, kind.key_type), from_json(each, kind.item_type)) for key, each in value]


def category_to_json(value: Any, kind: Any) -> Any:
    return to_json(value, kind.value_type)


def category_from_json(value: Any, kind: Any) -> Any:
    return from_json(value, kind.value_type)


class Words(NamedTuple):
    """How values of some arrow types are written in JSON."""

    types: tuple[Callable[[pa.DataType], bool], ...]
    write: Convert
    read: Convert
    filterable: bool = False
    """Whether a filter on what is written chooses what a filter on the values would."""


is_a = pa.types
TEXT = (is_a.is_string, is_a.is_large_string, is_a.is_string_view)
BYTES = (is_a.is_binary, is_a.is_large_binary, is_a.is_fixed_size_binary, is_a.is_binary_view)
LISTS = (is_a.is_list, is_a.is_large_list, is_a.is_fixed_size_list)
WORDS = (
    Words((is_a.is_uint64,), same, same),  # Milvus compares in int64
    Words((is_a.is_null, is_a.is_boolean, is_a.is_integer, *TEXT), same, same, True),
    Words((is_a.is_floating,), float_to_json, float_from_json, True),
    Words((is_a.is_date,), printed, parsed, True),
    Words((is_a.is_timestamp, is_a.is_decimal), printed, parsed),
    Words((is_a.is_time, is_a.is_duration), ticks, of_ticks),
    Words(BYTES, base64_text, bytes_of),
    Words(LISTS, list_to_json, list_from_json),
    Words((is_a.is_map,), pairs_to_json, pairs_from_json),
    Words((is_a.is_struct,), struct_to_json, struct_from_json),
    Words((is_a.is_dictionary,), category_to_json, category_from_json),
)


def words(kind: pa.DataType) -> Words:
    """The row of `WORDS`; ValueError for a type without one."""
    for row in WORDS:
        if any(is_type(kind) for is_type in row.types):
            return row
    raise ValueError(f"type {kind} cannot be kept in Milvus; cast it, for instance to a string")


def to_json(value: Any, kind: pa.DataType) -> Any:
    """What `json` can write, of a value as arrow's `as_py` gives it."""
    return None if value is None else words(kind).write(value, kind)


def from_json(value: Any, kind: pa.DataType) -> Any:
    """Undo `to_json`."""
    return None if value is None else words(kind).read(value, kind)


def documents(table: pa.Table, ids: list[Any]) -> list[str]:
    """One JSON object a row, without its nulls.

    Raises: ValueError naming the column of a type that cannot be kept, or the item whose metadata is too long.
    """
    rows: list[dict[str, Any]] = [{} for _ in ids]
    for name in table.column_names:
        kind = table.schema.field(name).type
        check_type(name, kind)
        write = words(kind).write
        for row, value in zip(rows, table[name].to_pylist(), strict=True):
            if value is not None:
                row[name] = write(value, kind)
    texts = [json.dumps(row, ensure_ascii=False, allow_nan=False) for row in rows]
    for key, text in zip(ids, texts, strict=True):
        if len(text) > MAX_JSON // 4 and len(text.encode()) > MAX_JSON:
            raise ValueError(f"the metadata of item {key!r} is {len(text.encode())} bytes; Milvus takes {MAX_JSON}")
    return texts


def check_type(name: str, kind: pa.DataType) -> None:
    """ValueError naming the column, where its type or one inside it cannot be kept."""
    try:
        words(kind)
    except ValueError as error:
        raise ValueError(f"metadata column {name!r}: {error}") from None
    inner = [kind.value_type] if hasattr(kind, "value_type") else []
    inner += [kind.key_type, kind.item_type] if is_a.is_map(kind) else []
    inner += [field.type for field in kind] if is_a.is_struct(kind) else []
    for part in inner:
        check_type(name, part)


def read_documents(found: list[dict[str, Any]], schema: pa.Schema) -> list[dict[str, Any]]:
    """Rows with every column of the schema, None where an object lacks it."""
    readers = [(field.name, field.type, words(field.type).read) for field in schema]
    return [
        {name: None if row.get(name) is None else read(row[name], kind) for name, kind, read in readers}
        for row in found
    ]


def not_finite(table: pa.Table) -> set[str]:
    """Columns that hold NaN or an infinity: no comparison in Milvus would treat them as numbers.

    Items of a list may be either: a filter asks whether a number is among them, and no number equals those.
    """
    kinds = {field.name: decoded(field.type) for field in table.schema}
    floats = {name: table[name].cast(kind).cast(pa.float64()) for name, kind in kinds.items() if is_a.is_floating(kind)}
    return {name for name, values in floats.items() if pc.any(pc.invert(pc.is_finite(values))).as_py()}


def filterable(schema: pa.Schema, unfit: Iterable[str]) -> dict[str, pa.DataType]:
    """Columns that a filter may name: {name: type}; those of lists too, in which it looks for an item."""
    kinds = {field.name: decoded(field.type) for field in schema if field.name not in unfit}
    return {name: kind for name, kind in kinds.items() if words(item_type(kind)).filterable}


def decoded(kind: pa.DataType) -> pa.DataType:
    """What a column of categories holds; any other type as it is."""
    return kind.value_type if is_a.is_dictionary(kind) else kind


def item_type(kind: Any) -> pa.DataType:
    """Of a list's items; any other type as it is."""
    return kind.value_type if any(is_list(kind) for is_list in LISTS) else kind


def incomparable(schema: pa.Schema, unfit: Iterable[str]) -> dict[str, str]:
    """The other columns: {name: why no filter may name it}."""
    fit = filterable(schema, unfit)
    others = (field for field in schema if field.name not in fit)
    return {each.name: "it holds NaN or infinity" if each.name in unfit else f"it holds {each.type}" for each in others}


def schema_to_text(schema: pa.Schema) -> str:
    """An arrow schema, as a string."""
    return base64.b64encode(schema.serialize()).decode()


def schema_from_text(text: str) -> pa.Schema:
    """Undo `schema_to_text`."""
    return pa.ipc.read_schema(pa.py_buffer(base64.b64decode(text)))
