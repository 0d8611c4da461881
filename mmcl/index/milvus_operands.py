"""What conditions compare, in Milvus's language: columns, constants, and what is computed of them."""

import datetime as dt
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from mmcl.index.filters import nodes
from mmcl.index.item_checks import ID

FIELD = "metadata"
TAKEN = (
    "Milvus takes columns, constants, = <> < <= > >=, AND, OR, NOT, IN, BETWEEN, IS [NOT] NULL, LIKE, + - * / % "
    "and list_contains"
)
ESCAPES = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n", "\r": "\\r", "\t": "\\t"})
KINDS: tuple[tuple[str, tuple[Callable[[pa.DataType], bool], ...]], ...] = (
    ("boolean", (pa.types.is_boolean,)),
    ("integer", (pa.types.is_integer,)),
    ("float64", (pa.types.is_float64,)),
    ("float32", (pa.types.is_float32,)),
    ("date", (pa.types.is_date,)),
    ("string", (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)),
    ("list", (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)),
)


class Value(NamedTuple):
    """An operand of a comparison."""

    text: str
    """In Milvus's language."""
    kind: str | None
    """Of `KINDS`; "decimal" for a literal such as 0.1, "id", another type's name, or None where it is not known."""
    columns: tuple[str, ...] = ()
    """Those that it is computed from, as `text`; none for a constant."""
    constant: Any = None
    items: str | None = None
    """Kind of the items, where it is a column of lists."""

    @property
    def is_column(self) -> bool:
        return self.columns == (self.text,)

    @property
    def is_null(self) -> bool:
        return not self.columns and self.constant is None


class Scope(NamedTuple):
    """What the names in an expression stand for."""

    columns: dict[str, Value]
    """By the name as it is written."""
    parameters: Mapping[str, Any]
    ids: str
    """Milvus's field of ids."""
    names: list[str]
    """Of all columns."""


def scope_of(
    tree: Any, meant: Mapping[str, str], types: Mapping[str, pa.DataType | None], given: Any, id_name: str
) -> Scope:
    """What names in a tree stand for; ValueError where parameters are not those that it names."""
    parameters = given if isinstance(given, dict) else {str(place): value for place, value in enumerate(given, 1)}
    asked = {node["identifier"] for node in nodes(tree) if node["type"] == "VALUE_PARAMETER"}
    if asked != set(parameters):
        raise ValueError(f"it names parameters {sorted(asked)}, given are {sorted(parameters)}")
    fields = {name: stored(name, kind) for name, kind in types.items()} | {ID: Value(id_name, "id", (id_name,))}
    return Scope({name: fields[column] for name, column in meant.items()}, parameters, id_name, list(fields))


def stored(name: str, kind: pa.DataType | None) -> Value:
    """A column of the metadata."""
    text = f"{FIELD}[{quoted(name)}]"
    return Value(text, kind_of(kind), (text,), items=kind_of(getattr(kind, "value_type", None)))


def kind_of(kind: pa.DataType | None) -> str | None:
    """Of `KINDS`; the type's own name where it is none of them, None where it tells nothing."""
    if kind is None or pa.types.is_null(kind):
        return None
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    return next((told for told, tests in KINDS if any(is_it(kind) for is_it in tests)), str(kind))


def quoted(text: str) -> str:
    """A string in Milvus's language."""
    return f'"{text.translate(ESCAPES)}"'


CONSTANTS: dict[type, tuple[str, Callable[[Any], bool], Callable[[Any], str]]] = {
    bool: ("boolean", lambda _: True, lambda value: str(value).lower()),
    int: ("integer", lambda value: -(2**63) <= value < 2**63, str),
    float: ("float64", math.isfinite, repr),
    str: ("string", lambda _: True, quoted),
    dt.date: ("date", lambda _: True, lambda value: quoted(value.isoformat())),
}
"""Kind, whether Milvus can hold a value, and how it is written."""


def constant(value: Any) -> Value:
    """A constant; ValueError for one that Milvus cannot hold."""
    if value is None or isinstance(value, list):
        return Value("NULL" if value is None else "the list", None if value is None else "list", (), value)
    if type(value) not in CONSTANTS:
        raise ValueError(f"{value!r} is no value in Milvus, which compares numbers, strings, booleans and dates")
    kind, fits, write = CONSTANTS[type(value)]
    if not fits(value):
        raise ValueError(f"{value!r} is no number in Milvus, which has those of 64 bits")
    return Value(write(value), kind, (), value)


def as_date(value: Value) -> Value:
    """A string as the date that it must be, in the one spelling that Milvus compares rightly."""
    try:
        day = dt.date.fromisoformat(value.constant)
    except ValueError:
        day = None
    if day is None or day.isoformat() != value.constant:
        raise ValueError(f"{value.text} must be a date such as '2024-02-29'")
    return constant(day)


def fitted(value: Value, other: Value) -> Value:
    """A constant as DuckDB turns it into the type of the column that it is compared with."""
    if value.columns or value.is_null:
        return value
    if other.kind == "date" and value.kind == "string":
        return as_date(value)
    if other.kind == "float32" and value.kind in ("integer", "decimal", "float64"):
        with np.errstate(over="ignore"):
            rounded = np.float32(value.constant)
        if value.kind == "float64" and float(rounded) != value.constant:
            raise ValueError(f"{value.text} is no float32 as {other.text} is; write it into the condition, or round it")
        return constant(float(str(rounded)))._replace(kind="float32")  # the shortest number that rounds to it
    return value


def operand(node: Any, scope: Scope) -> Value:
    """What is compared. ValueError where Milvus has no such thing."""
    kind = node["function_name"] if node["class"] == "FUNCTION" else node["type"]
    if kind not in OPERANDS:
        raise ValueError(f"{named(node)} is no value in Milvus. {TAKEN}")
    return OPERANDS[kind](node, scope)


def operands(node: Any, scope: Scope) -> list[Value]:
    """A function's arguments."""
    return [operand(argument["expression"], scope) for argument in node["arguments"]]


def named(node: Any) -> str:
    """A part of the tree as errors call it."""
    kind = node["function_name"] if node["class"] == "FUNCTION" else node["type"]
    return kind.removeprefix("OPERATOR_").removeprefix("COMPARE_").replace("_", " ") if kind.isupper() else kind


def column(node: Any, scope: Scope) -> Value:
    name, *inside = node["column_names"]
    if name not in scope.columns:
        raise ValueError(f"there is no metadata column {name!r} that Milvus can filter on; columns are {scope.names}")
    if inside:
        raise ValueError(f"{'.'.join(node['column_names'])}: Milvus compares whole columns, not their fields")
    return scope.columns[name]


LITERALS: dict[str, Callable[[str], Any]] = {
    "INTEGER": int,
    "NUMERIC": float,
    "STRING": str,
    "BOOLEAN": lambda text: text.lower() == "true",
    "NULL_LITERAL": lambda _: None,
}


def literal(node: Any, scope: Scope) -> Value:
    kind, text = node["literal"]["kind"], node["literal"]["text"]
    if kind not in LITERALS:
        raise ValueError(f"{text!r} is no value in Milvus. {TAKEN}")
    value = constant(LITERALS[kind](text))
    return value._replace(kind="decimal") if kind == "NUMERIC" and "e" not in text.lower() else value


def parameter(node: Any, scope: Scope) -> Value:
    return constant(scope.parameters[node["identifier"]])


def listed(node: Any, scope: Scope) -> Value:
    items = operands(node, scope)
    if any(item.columns for item in items):
        raise ValueError("Milvus takes lists of constants only")
    return constant([item.constant for item in items])


def cast(node: Any, scope: Scope) -> Value:
    value = operand(node["child"], scope)
    if node["type_expr"]["type_name"].upper() != "DATE" or value.columns or value.kind != "string":
        raise ValueError(f"CAST is no value in Milvus, unless to write DATE '2024-02-29'. {TAKEN}")
    return as_date(value)


def arithmetic(node: Any, scope: Scope) -> Value:
    sign, values = node["function_name"], operands(node, scope)
    if len(values) == 1:
        sign, values = "*", [*values, constant(-1 if sign == "-" else 1)]
    left, right = values
    if left.is_null or right.is_null:
        return constant(None)
    kind = computed_kind(sign, left, right)
    if left.columns or right.columns:
        return Value(f"({left.text} {sign} {right.text})", kind, left.columns + right.columns)
    return constant(ARITHMETIC[sign](left.constant, right.constant))


def computed_kind(sign: str, left: Value, right: Value) -> str | None:
    """Of a result; ValueError where DuckDB computes otherwise than Milvus."""
    kinds = {left.kind, right.kind}
    if not kinds <= {"integer", "float64", "decimal", "id", None}:
        told = " and ".join(sorted(map(str, kinds)))
        raise ValueError(f"{sign} of {told}: Milvus computes with integers and float64 only")
    if "decimal" in kinds and "float64" not in kinds and sign != "/":
        raise ValueError("DuckDB computes exactly with decimals, Milvus does not; write 0.1 as 1e-1, or as a parameter")
    if sign == "%" and not kinds <= {"integer", "id", None}:
        raise ValueError("Milvus computes % of integers only")
    if sign in "/%" and (right.columns or not right.constant):
        raise ValueError("DuckDB and Milvus differ in division by zero; divide by a constant")
    if sign == "/" or "float64" in kinds:
        return "float64"
    return "integer" if kinds == {"integer"} else None


def remainder(left: int, right: int) -> int:
    """Of a division towards zero, as DuckDB and Milvus divide integers."""
    return abs(left) % abs(right) * (1 if left >= 0 else -1)


ARITHMETIC: dict[str, Callable[[Any, Any], Any]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "%": remainder,
}
OPERANDS: dict[str, Callable[[Any, Scope], Value]] = {
    "COLUMN_REF": column,
    "VALUE_CONSTANT": literal,
    "VALUE_PARAMETER": parameter,
    "OPERATOR_CAST": cast,
    "list_value": listed,
    **dict.fromkeys(ARITHMETIC, arithmetic),
}
