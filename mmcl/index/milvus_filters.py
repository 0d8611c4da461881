"""Filters on metadata in Milvus's language, translated from DuckDB's syntax tree.

Metadata is one JSON field: `year >= 2020` becomes `metadata["year"] >= 2020`. The translation is true of exactly the
items of which the DuckDB condition is true, or it is refused. NULL is a missing key. What NOT makes of a comparison
with one differs among versions of Milvus, so NOT is pushed down into the comparisons (not < is >=), and where a missing
key might count as unequal, it is tested first.
"""

import datetime as dt
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from mmcl.index.filters import check_where, matching, nodes, parsed, resolved, shown
from mmcl.index.item_checks import ID

FIELD = "metadata"
TAKEN = (
    "Milvus takes columns, constants, = <> < <= > >=, AND, OR, NOT, IN, BETWEEN, IS [NOT] NULL, LIKE, + - * / % "
    "and list_contains"
)
SIGNS = {
    "COMPARE_EQUAL": "==",
    "COMPARE_NOTEQUAL": "!=",
    "COMPARE_LESSTHAN": "<",
    "COMPARE_LESSTHANOREQUALTO": "<=",
    "COMPARE_GREATERTHAN": ">",
    "COMPARE_GREATERTHANOREQUALTO": ">=",
}
OPPOSITES = {"==": "!=", "!=": "==", "<": ">=", ">=": "<", ">": "<=", "<=": ">"}
COMPARE = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
ARITHMETIC = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv, "%": math.fmod}
ESCAPES = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n", "\r": "\\r", "\t": "\\t"})
KINDS = (
    (pa.types.is_boolean, "boolean"),
    (pa.types.is_integer, "integer"),
    (pa.types.is_float64, "double"),
    (pa.types.is_floating, "single"),
    (pa.types.is_date, "date"),
    (
        lambda kind: pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind),
        "string",
    ),
    (lambda kind: pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind), "list"),
)


class Value(NamedTuple):
    """An operand of a comparison."""

    text: str
    """In Milvus's language."""
    kind: str | None
    """Of `KINDS`; "decimal" for a literal such as 0.1, "id", or None where it is not known."""
    columns: tuple[str, ...] = ()
    """Those that it is computed from, as `text`; none for a constant."""
    constant: Any = None


class Scope(NamedTuple):
    """What names in an expression stand for."""

    columns: dict[str, Value]
    """By the name as it is written."""
    parameters: dict[str, Any]
    ids: str
    """Milvus's field of ids."""
    names: list[str]
    """Of all columns."""


def to_milvus(where: Any, columns: Sequence[str] | Mapping[str, pa.DataType], id_name: str = "id") -> str:
    """A DuckDB condition in Milvus's language.

    Args:
        where: see `check_where`.
        columns: of the metadata that it may name besides `id`; with types, comparisons of unlike types are refused as
            DuckDB refuses them, or would turn one into the other, which Milvus does not.
        id_name: the field of the ids.
    Raises: ValueError that quotes the condition and names what Milvus does not take, or would not take as DuckDB does.
    """
    expression, given = check_where(where)
    types = dict(columns) if isinstance(columns, Mapping) else dict.fromkeys(columns)
    tree = parsed(expression, [*types, ID])
    meant = resolved([*types, ID], tree, expression)
    fields = {name: column_value(name, kind) for name, kind in types.items()} | {ID: Value(id_name, "id", (id_name,))}
    parameters = given if isinstance(given, dict) else {str(place): value for place, value in enumerate(given, 1)}
    scope = Scope({name: fields[column] for name, column in meant.items()}, parameters, id_name, list(fields))
    try:
        check_parameters(tree, parameters)
        translated = condition(tree, True, scope)
    except ValueError as error:
        raise ValueError(f"{shown(expression)}: {error}") from None
    if isinstance(columns, Mapping):
        matching(pa.schema(list(types.items())).empty_table(), where, pa.nulls(0))  # DuckDB's own refusals
    return translated


def condition(node: Any, wanted: bool, scope: Scope) -> str:
    """An expression that is true where a node of the tree is True, or where it is False; never where it is NULL."""
    kind = node["function_name"] if node["class"] == "FUNCTION" else node["type"]
    if kind not in CONDITIONS:
        raise ValueError(f"{named(node)} is no condition in Milvus. {TAKEN}")
    return CONDITIONS[kind](node, wanted, scope)


def junction(node: Any, wanted: bool, scope: Scope) -> str:
    both = (node["type"] == "CONJUNCTION_AND") == wanted
    return joined("and" if both else "or", [condition(child, wanted, scope) for child in node["children"]])


def negation(node: Any, wanted: bool, scope: Scope) -> str:
    return condition(node["children"][0], not wanted, scope)


def flag(node: Any, wanted: bool, scope: Scope) -> str:
    value = operand(node, scope)
    if value.kind not in ("boolean", None):
        raise ValueError(f"{value.text} is {value.kind}, not a condition; compare it with something")
    return compared("==", value, constant(wanted), scope)


def comparison(node: Any, wanted: bool, scope: Scope) -> str:
    sign = SIGNS[node["type"]]
    left, right = operand(node["left"], scope), operand(node["right"], scope)
    return compared(sign if wanted else OPPOSITES[sign], left, right, scope)


def between(node: Any, wanted: bool, scope: Scope) -> str:
    value, lower, upper = (operand(node[part], scope) for part in ("input", "lower", "upper"))
    signs = (">=", "<=") if wanted else ("<", ">")
    ends = [compared(sign, value, end, scope) for sign, end in zip(signs, (lower, upper), strict=True)]
    return joined("and" if wanted else "or", ends)


def among(node: Any, wanted: bool, scope: Scope) -> str:
    value, *items = (operand(child, scope) for child in node["children"])
    return member(value, items, wanted, scope)


def null_test(node: Any, wanted: bool, scope: Scope) -> str:
    value = operand(node["children"][0], scope)
    if value.columns != (value.text,):
        raise ValueError(f"IS NULL of {value.text or named(node)}: Milvus tests columns only")
    absent = (node["type"] == "OPERATOR_IS_NULL") == wanted
    if value.kind == "id":
        return constantly(not absent, scope)
    return f"{value.text} is {'' if absent else 'not '}null"


def like(node: Any, wanted: bool, scope: Scope) -> str:
    value, pattern = (operand(part["expression"], scope) for part in node["arguments"])
    wanted = wanted == (node["function_name"] == "~~")
    if pattern.columns or value.columns != (value.text,) or value.kind not in ("string", "id", None):
        raise ValueError("Milvus compares columns of strings with a constant pattern: title LIKE 'a%'")
    if pattern.constant is None:
        return constantly(False, scope)
    if not isinstance(pattern.constant, str) or "\\" in pattern.constant:
        raise ValueError(
            f"LIKE {pattern.text}: the pattern must be a string without \\, which Milvus takes for an escape"
        )
    if not set(pattern.constant) & {"%", "_"}:
        return compared("==" if wanted else "!=", value, pattern, scope)
    text = f"{value.text} like {pattern.text}"
    return text if wanted else joined("and", [*present(value, scope=scope), f"not ({text})"])


def contains(node: Any, wanted: bool, scope: Scope) -> str:
    whole, value = (operand(part["expression"], scope) for part in node["arguments"])
    if isinstance(whole.constant, list):
        return member(value, [constant(item) for item in whole.constant if item is not None], wanted, scope)
    named_list = node["function_name"] != "contains"  # which also looks for a part of a string
    if value.columns or whole.columns != (whole.text,) or not (whole.kind == "list" or named_list and not whole.kind):
        raise ValueError("Milvus looks for a constant in a column of lists: list_contains(tags, 'a')")
    if value.constant is None:
        return constantly(False, scope)
    text = f"json_contains({whole.text}, {value.text})"
    return text if wanted else joined("and", [*present(whole, scope=scope), f"not {text}"])


CONDITIONS: dict[str, Callable[[Any, bool, Scope], str]] = {
    "CONJUNCTION_AND": junction,
    "CONJUNCTION_OR": junction,
    "OPERATOR_NOT": negation,
    **dict.fromkeys(SIGNS, comparison),
    "COMPARE_BETWEEN": between,
    "COMPARE_IN": among,
    **dict.fromkeys(("OPERATOR_IS_NULL", "OPERATOR_IS_NOT_NULL"), null_test),
    **dict.fromkeys(("~~", "!~~"), like),
    **dict.fromkeys(("contains", "list_contains", "list_has", "array_contains", "array_has"), contains),
    **dict.fromkeys(("COLUMN_REF", "VALUE_CONSTANT", "VALUE_PARAMETER"), flag),
}


def member(value: Value, items: Sequence[Value], wanted: bool, scope: Scope) -> str:
    """Whether a value is one of the items; Milvus Lite knows `in` for fields only, not for keys of JSON."""
    if value.kind == "id" and all(item.kind in ("integer", "string") and not item.columns for item in items):
        return f"{value.text} {'in' if wanted else 'not in'} [{', '.join(item.text for item in items)}]"
    tests = [bare_comparison("==" if wanted else "!=", value, item, scope) for item in items]
    guards = [] if wanted else present(value, *items, scope=scope)
    return joined("or" if wanted else "and", guards + tests) if guards + tests else constantly(not wanted, scope)


def compared(sign: str, left: Value, right: Value, scope: Scope) -> str:
    """The comparison, which is not true where a column is NULL."""
    text = bare_comparison(sign, left, right, scope)
    return joined("and", [*present(left, right, scope=scope), text]) if sign == "!=" else text


def bare_comparison(sign: str, left: Value, right: Value, scope: Scope) -> str:
    if is_null(left) or is_null(right):
        return constantly(False, scope)
    left, right = fitted(left, right), fitted(right, left)
    if not comparable(left.kind, right.kind):
        raise ValueError(f"{left.text} is {left.kind}, {right.text} is {right.kind}: Milvus compares like with like")
    if left.columns or right.columns:
        return f"{left.text} {sign} {right.text}"
    return constantly(COMPARE[sign](left.constant, right.constant), scope)


def comparable(one: str | None, other: str | None) -> bool:
    kinds = {one, other}
    if "id" in kinds:
        return kinds <= {"id", "integer", "double", "decimal", "string", None}
    if None in kinds or kinds <= {"integer", "double", "decimal"}:
        return "list" not in kinds
    return len(kinds) == 1 and one in ("single", "string", "boolean", "date")


def fitted(value: Value, other: Value) -> Value:
    """A constant as DuckDB turns it into the type of the column that it is compared with."""
    if value.columns or is_null(value):
        return value
    if other.kind == "date" and value.kind == "string":
        return as_date(value)
    if other.kind == "single" and value.kind in ("integer", "decimal", "double"):
        rounded = np.float32(value.constant)
        if value.kind == "double" and rounded != value.constant:
            raise ValueError(f"{value.text} is no float32 as {other.text} is; write it into the condition, or round it")
        return constant(float(str(rounded)))._replace(kind="single")  # the shortest number that is rounded to it
    return value


def as_date(value: Value) -> Value:
    try:
        day = dt.date.fromisoformat(value.constant)
    except ValueError:
        day = None
    if day is None or day.isoformat() != value.constant:
        raise ValueError(f"{value.text} must be a date such as '2024-02-29'")
    return constant(day)


def operand(node: Any, scope: Scope) -> Value:
    """What is compared."""
    kind = node["function_name"] if node["class"] == "FUNCTION" else node["type"]
    if kind not in OPERANDS:
        raise ValueError(f"{named(node)} is no value in Milvus. {TAKEN}")
    return OPERANDS[kind](node, scope)


def column(node: Any, scope: Scope) -> Value:
    name, *inside = node["column_names"]
    if name not in scope.columns:
        raise ValueError(f"there is no metadata column {name!r} that Milvus can filter on; columns are {scope.names}")
    if inside:
        raise ValueError(f"{'.'.join(node['column_names'])}: Milvus compares whole columns, no fields of them")
    return scope.columns[name]


def literal(node: Any, scope: Scope) -> Value:
    kind, text = node["literal"]["kind"], node["literal"]["text"]
    if kind not in LITERALS:
        raise ValueError(f"{text!r} is no value in Milvus. {TAKEN}")
    value = constant(LITERALS[kind](text))
    return value._replace(kind="decimal") if kind == "NUMERIC" and "e" not in text.lower() else value


def parameter(node: Any, scope: Scope) -> Value:
    return constant(scope.parameters[node["identifier"]])


def listed(node: Any, scope: Scope) -> Value:
    items = [operand(part["expression"], scope) for part in node["arguments"]]
    if any(item.columns for item in items):
        raise ValueError("Milvus takes lists of constants only")
    return constant([item.constant for item in items])


def dated(node: Any, scope: Scope) -> Value:
    value = operand(node["child"], scope)
    if node["type_expr"]["type_name"].upper() != "DATE" or value.columns or value.kind != "string":
        raise ValueError(f"CAST is no value in Milvus, except of constant dates. {TAKEN}")
    return as_date(value)


def arithmetic(node: Any, scope: Scope) -> Value:
    sign, values = node["function_name"], [operand(part["expression"], scope) for part in node["arguments"]]
    if len(values) == 1:
        sign, values = "*", [*values, constant(-1 if sign == "-" else 1)]
    kinds = {value.kind for value in values}
    if any(map(is_null, values)):
        return constant(None)
    if not kinds <= {"integer", "double", "decimal", "id", None}:
        raise ValueError(f"Milvus does not compute {sign} of {' and '.join(sorted(map(str, kinds)))} as DuckDB does")
    if "decimal" in kinds and "double" not in kinds and sign != "/":
        raise ValueError("DuckDB computes exactly with decimals, Milvus does not; write 0.1 as 1e-1, or as a parameter")
    if sign == "%" and not kinds <= {"integer", "id", None}:
        raise ValueError("Milvus computes % of integers only")
    if sign in "/%" and (values[1].columns or not values[1].constant):
        raise ValueError("DuckDB and Milvus differ in division by zero; divide by a constant")
    kind = "double" if sign == "/" or "double" in kinds else "integer" if kinds == {"integer"} else None
    columns = values[0].columns + values[1].columns
    if not columns:
        return constant(ARITHMETIC[sign](values[0].constant, values[1].constant))
    return Value(f"({values[0].text} {sign} {values[1].text})", kind, columns)


OPERANDS: dict[str, Callable[[Any, Scope], Value]] = {
    "COLUMN_REF": column,
    "VALUE_CONSTANT": literal,
    "VALUE_PARAMETER": parameter,
    "OPERATOR_CAST": dated,
    "list_value": listed,
    **dict.fromkeys(ARITHMETIC, arithmetic),
}
LITERALS: dict[str, Callable[[str], Any]] = {
    "INTEGER": int,
    "NUMERIC": float,
    "STRING": str,
    "BOOLEAN": lambda text: text.lower() == "true",
    "NULL_LITERAL": lambda _: None,
}


def constant(value: Any) -> Value:
    """A constant; ValueError for one that Milvus cannot hold."""
    if value is None or isinstance(value, list):
        return Value("NULL" if value is None else "a list", "list" if value else None, (), value)
    if type(value) not in CONSTANTS:
        raise ValueError(f"{value!r} is no value in Milvus, which compares numbers, strings, booleans and dates")
    kind, fits, write = CONSTANTS[type(value)]
    if not fits(value):
        raise ValueError(f"{value!r} is no number in Milvus, which has those of 64 bits")
    return Value(write(value), kind, (), value)


def quoted(text: str) -> str:
    """A string in Milvus's language."""
    return f'"{text.translate(ESCAPES)}"'


CONSTANTS: dict[type, tuple[str, Callable[[Any], bool], Callable[[Any], str]]] = {
    bool: ("boolean", lambda _: True, lambda value: str(value).lower()),
    int: ("integer", lambda value: -(2**63) <= value < 2**63, str),
    float: ("double", math.isfinite, repr),
    str: ("string", lambda _: True, quoted),
    dt.date: ("date", lambda _: True, lambda value: quoted(value.isoformat())),
}


def column_value(name: str, kind: pa.DataType | None) -> Value:
    text = f"{FIELD}[{quoted(name)}]"
    if kind is None or pa.types.is_null(kind):
        return Value(text, None, (text,))
    return Value(text, next((told for fits, told in KINDS if fits(kind)), str(kind)), (text,))


def check_parameters(tree: Any, given: Mapping[str, Any]) -> None:
    named = {node["identifier"] for node in nodes(tree) if node["type"] == "VALUE_PARAMETER"}
    if named != set(given):
        raise ValueError(f"it names parameters {sorted(named)}, given are {sorted(given)}")


def is_null(value: Value) -> bool:
    return not value.columns and value.constant is None


def present(*values: Value, scope: Scope) -> list[str]:
    """Tests that no column of theirs is NULL."""
    columns = dict.fromkeys(column for value in values for column in value.columns)
    return [f"{column} is not null" for column in columns if column != scope.ids]


def joined(word: str, parts: Sequence[str]) -> str:
    return f"({f' {word} '.join(parts)})" if len(parts) > 1 else parts[0]


def constantly(truth: bool, scope: Scope) -> str:
    """Milvus takes no bare true or false as a filter."""
    return f"{scope.ids} {'not in' if truth else 'in'} []"


def named(node: Any) -> str:
    """A part of the tree, as one would name it."""
    if node["class"] in ("FUNCTION", "CASE", "LAMBDA"):
        return node.get("function_name", node["class"])
    return node["type"].removeprefix("OPERATOR_").removeprefix("COMPARE_").replace("_", " ")
