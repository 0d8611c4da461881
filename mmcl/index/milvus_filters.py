"""Filters on metadata in Milvus's language, translated from DuckDB's syntax tree.

Metadata is one JSON field: `year >= 2020` becomes `metadata["year"] >= 2020`. The translation is true of exactly the
items of which the DuckDB condition is true, or it is refused. NULL is a missing key. What NOT makes of a comparison
with one differs among versions of Milvus; so NOT is pushed down into the comparisons (not < is >=), and where a missing
key might count as unequal, it is excluded first.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pyarrow as pa

from mmcl.index.filters import check_where, parsed, resolved, shown
from mmcl.index.item_checks import ID
from mmcl.index.milvus_operands import TAKEN, Scope, Value, constant, fitted, named, operand, operands, scope_of

SIGNS = {
    "COMPARE_EQUAL": "==",
    "COMPARE_NOTEQUAL": "!=",
    "COMPARE_LESSTHAN": "<",
    "COMPARE_LESSTHANOREQUALTO": "<=",
    "COMPARE_GREATERTHAN": ">",
    "COMPARE_GREATERTHANOREQUALTO": ">=",
}
OPPOSITES = {"==": "!=", "!=": "==", "<": ">=", ">=": "<", ">": "<=", "<=": ">"}
ON_CONSTANTS = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
LIKE_WITH_LIKE = "Milvus compares numbers, strings, booleans or dates with their like"


def to_milvus(where: Any, columns: Sequence[str] | Mapping[str, pa.DataType], id_name: str = "id") -> str:
    """A DuckDB condition in Milvus's language.

    Args:
        where: see `check_where`.
        columns: of the metadata that it may name besides `id`. With their types, comparisons are refused where DuckDB
            would refuse them, or turn one type into another, which Milvus does not.
        id_name: the field of the ids.
    Raises: ValueError that quotes the condition and says what Milvus does not take, or not in DuckDB's sense.
    """
    expression, given = check_where(where)
    types = dict(columns) if isinstance(columns, Mapping) else dict.fromkeys(columns)
    names = [*types, ID]
    tree = parsed(expression, names)
    meant = resolved(names, tree, expression)
    try:
        return condition(tree, True, scope_of(tree, meant, types, given, id_name))
    except ValueError as error:
        raise ValueError(f"{shown(expression)}: {error}") from None
    except RecursionError:
        raise ValueError(f"{shown(expression)} is nested too deep") from None


def condition(node: Any, wanted: bool, scope: Scope) -> str:
    """An expression that is true where a node of the tree has the wanted value; never where that is NULL."""
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
    if not value.is_null and value.kind not in ("boolean", None):
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
    if not value.is_column:
        raise ValueError("Milvus tests columns for NULL, nothing else")
    absent = (node["type"] == "OPERATOR_IS_NULL") == wanted
    if value.kind == "id":
        return constantly(not absent, scope)
    return f"{value.text} is {'null' if absent else 'not null'}"


def like(node: Any, wanted: bool, scope: Scope) -> str:
    value, pattern = operands(node, scope)
    wanted = wanted == (node["function_name"] == "~~")
    if not value.is_column or value.kind not in ("string", "id", None) or pattern.columns:
        raise ValueError("Milvus compares a column of strings with a constant pattern: title LIKE 'a%'")
    if pattern.is_null:
        return constantly(False, scope)
    if not isinstance(pattern.constant, str) or "\\" in pattern.constant:
        raise ValueError(f"LIKE {pattern.text}: a pattern is a string without \\, which Milvus takes for an escape")
    if not set("%_") & set(pattern.constant):
        return compared("==" if wanted else "!=", value, pattern, scope)
    text = f"{value.text} like {pattern.text}"
    return text if wanted else joined("and", [*present([value], scope), f"not ({text})"])


def contains(node: Any, wanted: bool, scope: Scope) -> str:
    whole, value = operands(node, scope)
    if whole.constant == []:
        return constantly(not wanted, scope)  # even NULL is not in it
    if isinstance(whole.constant, list):  # value IN a list that is a parameter; its NULLs do not count
        return member(value, [constant(item) for item in whole.constant if item is not None], wanted, scope)
    kinds = ("list",) if node["function_name"] == "contains" else ("list", None)  # it looks into strings as well
    constants = ("boolean", "integer", "decimal", "float64", "string", "date")
    if not whole.is_column or whole.kind not in kinds or value.columns or value.kind not in constants:
        raise ValueError("Milvus looks for one constant in a column of lists: list_contains(tags, 'a')")
    value = fitted(value, Value(whole.text, whole.items))
    if not comparable(whole.items, value.kind):
        raise ValueError(f"items of {whole.text} are {whole.items}, {value.text} is {value.kind}: {LIKE_WITH_LIKE}")
    text = f"json_contains_any({whole.text}, [{value.text}])"  # json_contains of Milvus Lite takes no negative numbers
    return text if wanted else joined("and", [*present([whole], scope), f"not ({text})"])


CONDITIONS: dict[str, Callable[[Any, bool, Scope], str]] = {
    **dict.fromkeys(("CONJUNCTION_AND", "CONJUNCTION_OR"), junction),
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
    """Whether a value is one of the items. Milvus Lite knows `in` for fields only, not for keys of JSON."""
    if value.kind == "id" and all(item.kind in ("integer", "string") and not item.columns for item in items):
        return f"{value.text} {'in' if wanted else 'not in'} [{', '.join(item.text for item in items)}]"
    tests = [bare_comparison("==" if wanted else "!=", value, item, scope) for item in items]
    if wanted:
        return joined("or", tests) or constantly(False, scope)
    return joined("and", [*present([value, *items], scope), *tests]) or constantly(not value.is_null, scope)


def compared(sign: str, left: Value, right: Value, scope: Scope) -> str:
    """A comparison, which is not true where a column is NULL."""
    text = bare_comparison(sign, left, right, scope)
    return joined("and", [*present([left, right], scope), text]) if sign == "!=" else text


def bare_comparison(sign: str, left: Value, right: Value, scope: Scope) -> str:
    """A comparison of which only != might be true where a column is NULL."""
    if left.is_null or right.is_null:
        return constantly(False, scope)
    left, right = fitted(left, right), fitted(right, left)
    if not comparable(left.kind, right.kind):
        raise ValueError(f"{left.text} is {left.kind}, {right.text} is {right.kind}: {LIKE_WITH_LIKE}")
    if left.columns or right.columns:
        return f"{left.text} {sign} {right.text}"
    return constantly(ON_CONSTANTS[sign](left.constant, right.constant), scope)


def comparable(one: str | None, other: str | None) -> bool:
    """Whether Milvus compares values of two kinds as DuckDB does."""
    kinds = {one, other}
    if kinds <= {"integer", "float64", "decimal", "id", None} or kinds <= {"string", "id", None}:
        return True
    return kinds - {None} in ({"float32"}, {"boolean"}, {"date"})


def present(values: Sequence[Value], scope: Scope) -> list[str]:
    """Tests that no column of theirs is NULL."""
    columns = dict.fromkeys(column for value in values for column in value.columns)
    return [f"{column} is not null" for column in columns if column != scope.ids]


def joined(word: str, parts: Sequence[str]) -> str:
    """Several tests as one; none is the empty string."""
    return f"({f' {word} '.join(parts)})" if len(parts) > 1 else "".join(parts)


def constantly(truth: bool, scope: Scope) -> str:
    """As a whole filter, Milvus takes neither true nor false."""
    return f"{scope.ids} {'not in' if truth else 'in'} []"
