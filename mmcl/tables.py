"""Tables of names that users choose from: one dict each, one error that lists what it holds."""

from collections.abc import Mapping
from typing import TypeVar

Entry = TypeVar("Entry")


def lookup(table: Mapping[str, Entry], name: str, what: str) -> Entry:
    """`table[name]`, or a KeyError that names the choices."""
    if name not in table:
        raise KeyError(f"unknown {what} {name!r}; choose from {sorted(table)}")
    return table[name]
