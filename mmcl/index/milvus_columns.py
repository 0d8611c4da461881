"""New metadata columns in Milvus, none lost though several processes bring some at once.

Milvus has no way to change a property only if nobody else has meanwhile. So each writer writes down the columns that it
brings in a property of its own, and then reads what the others wrote down. Where two bring a column of one name and
different types, whoever sees the other's beside its own gives way: it takes its own back and looks again. At most one
of the two is refused then, and no row is stored whose column has another type.

A writer that ends before it could give way leaves a dispute. Nobody can tell whose rows are there, so others refuse to
write until one of the two properties is dropped.
"""

import random
import time
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pyarrow as pa

from mmcl.index.items import appended_table, is_open
from mmcl.index.milvus_about import COLUMNS, About, Brought, parts_of, place
from mmcl.index.milvus_client import Connection
from mmcl.index.milvus_values import documents, not_finite

LONGEST_WAIT_S = 0.5
PATIENCE_S = 10.0
"""A dispute that others do not settle in this time stays."""


def bring(
    connection: Connection, collection: str, writer: str, ids: np.ndarray, metadata: pa.Table
) -> tuple[About, list[str]]:
    """Have the collection know the columns of these rows; returns what is known of it, and each row's JSON.

    Args:
        writer: a name that no other has.
        ids: (n,) of the rows.
        metadata: n rows, or no columns.
    Raises: ValueError naming the column that does not fit the collection's, cannot be kept or is in dispute, or the
        item whose metadata is too long. The collection has no new columns then.
    """
    name, wait, given_up = COLUMNS + writer, LONGEST_WAIT_S / 64, time.monotonic() + PATIENCE_S
    while True:
        made, brought = parts_of(connection, collection)
        dispute = disputed(made, brought)
        if not dispute:
            about = made.joined(brought)
            table = appended_table(about.columns.empty_table(), 0, metadata, len(ids))
            texts = documents(table, ids.tolist())
            own = brought.get(name, Brought())
            more = with_columns(own, about, table)
            if more == own:
                return about, texts
            write_down(connection, collection, name, more)
            made, brought = parts_of(connection, collection)
            if brought.get(name) == more and not disputed(made, brought):
                return made.joined(brought), texts
            write_down(connection, collection, name, own)
        elif time.monotonic() > given_up:
            raise ValueError(f"{place(connection, collection)}: {dispute}; drop the property of a writer that is gone")
        time.sleep(random.uniform(0, wait))  # those who wait equally long meet again
        wait = min(2 * wait, LONGEST_WAIT_S)


def with_columns(own: Brought, about: About, table: pa.Table) -> Brought:
    """What a writer brought, and what of these rows is not known yet."""
    known = {field.name: field.type for field in about.columns}
    new = [field for field in table.schema if known.get(field.name) != field.type]
    if not new and not_finite(table) <= about.not_finite:
        return own
    fields = {field.name: field for field in [*own.columns, *new]}
    at = own.at | dict.fromkeys([field.name for field in new], time.time())
    unfit = own.not_finite | (not_finite(table) - about.not_finite)
    return replace(own, columns=pa.schema(list(fields.values())), at=at, not_finite=unfit)


def disputed(made: About, brought: Mapping[str, Brought]) -> str:
    """Which column has two types, and which properties say so; "" where none has."""
    kinds: dict[str, tuple[pa.DataType, str]] = {}
    for writer, columns in (("mmcl", made.columns), *((writer, each.columns) for writer, each in brought.items())):
        for field in columns:
            if is_open(field.type):
                continue
            kind, first = kinds.setdefault(field.name, (field.type, writer))
            if kind != field.type:
                return f"metadata column {field.name!r} is {kind} by property {first!r}, {field.type} by {writer!r}"
    return ""


def write_down(connection: Connection, collection: str, name: str, brought: Brought) -> None:
    properties = {name: brought.to_text()}
    connection.call("alter_collection_properties", collection_name=collection, properties=properties)
