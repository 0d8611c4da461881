"""What a collection's properties say of it: all that Milvus itself does not know.

    mmcl                    as it was made: its factory; nobody writes it again
    mmcl.columns.WRITER     columns that a writer brought, see `milvus_columns`
    mmcl.ids.WRITER.TIME    ids that a writer took, see `milvus_ids`

Whoever writes a property replaces it, so no two writers write the same one: what they say is joined when it is read.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pyarrow as pa

from mmcl.index.items import is_open
from mmcl.index.milvus_client import Connection
from mmcl.index.milvus_values import schema_from_text, schema_to_text

PROPERTY, FORMAT_VERSION, READABLE = "mmcl", 2, (1, 2)
"""In version 1 the property was written again with every new column, and writers that met lost each other's."""
COLUMNS = "mmcl.columns."
"""What names of properties of columns begin with; a writer's own name follows."""
Said = TypeVar("Said")


class OtherFormatError(ValueError):
    """The property is of another version."""


@dataclass(frozen=True)
class Brought:
    """Columns that one writer brought."""

    columns: pa.Schema = field(default_factory=lambda: pa.schema([]))
    at: dict[str, float] = field(default_factory=dict)
    """{column: when, in seconds since 1970}."""
    not_finite: frozenset[str] = frozenset()
    """Columns, also of others, in which it stored NaN or an infinity."""

    def to_text(self) -> str:
        said = {"columns": schema_to_text(self.columns), "at": self.at, "not_finite": sorted(self.not_finite)}
        return json.dumps(said)

    @classmethod
    def from_text(cls, text: str) -> "Brought":
        """Undo `to_text`."""
        said = json.loads(text)
        columns, at = schema_from_text(said["columns"]), {name: float(said["at"][name]) for name in said["at"]}
        if set(columns.names) != set(at):
            raise ValueError(f"columns {columns.names}, and times of {list(at)}")
        return cls(columns, at, frozenset(map(str, said["not_finite"])))


@dataclass(frozen=True)
class About:
    """What is known of a collection."""

    factory: str
    columns: pa.Schema
    not_finite: frozenset[str] = frozenset()
    """Columns that ever held NaN or an infinity."""
    next_id: int = 0
    """Above the integer ids that there were when writers did not write them down themselves (version 1)."""

    def joined(self, brought: Mapping[str, Brought]) -> "About":
        """The same with what writers brought, in the order they did. Of columns that two brought at once the earlier
        counts.
        """
        fields = {each.name: each for each in self.columns}
        named = [(each.at[name], writer, name) for writer, each in brought.items() for name in each.columns.names]
        for _, writer, name in sorted(named, key=lambda each: each[:2]):  # those of one moment stay as they are
            if name not in fields or is_open(fields[name].type):
                fields[name] = brought[writer].columns.field(name)
        unfit = self.not_finite.union(*(each.not_finite for each in brought.values()))
        return About(self.factory, pa.schema(list(fields.values())), unfit, self.next_id)

    def to_text(self) -> str:
        return json.dumps(
            {
                "format_version": FORMAT_VERSION,
                "factory": self.factory,
                "columns": schema_to_text(self.columns),
                "not_finite": sorted(self.not_finite),
                "next_id": self.next_id,
            }
        )

    @classmethod
    def from_text(cls, text: str) -> "About":
        """Undo `to_text`; OtherFormatError for one of a version that is not known."""
        said = json.loads(text)
        if said.get("format_version") not in READABLE:
            readable = " and ".join(map(str, READABLE))
            raise OtherFormatError(f"has format version {said.get('format_version')!r}; this version reads {readable}")
        columns, unfit = schema_from_text(said["columns"]), frozenset(said["not_finite"])
        return cls(said["factory"], columns, unfit, int(said["next_id"]))


def place(connection: Connection, collection: str) -> str:
    """A collection as errors name it."""
    return f"collection {collection!r} at {connection.name}"


def read_about(connection: Connection, collection: str) -> About:
    """All that properties say of a collection of ours; ValueError naming one that is missing or says something else."""
    about, brought = parts_of(connection, collection)
    return about.joined(brought)


def parts_of(connection: Connection, collection: str) -> tuple[About, dict[str, Brought]]:
    """What the collection was made as, and what writers brought by the names of their properties."""
    properties = properties_of(connection, collection)
    where = place(connection, collection)
    return said(properties, PROPERTY, About.from_text, where), claims_of(properties, COLUMNS, Brought.from_text, where)


def properties_of(connection: Connection, collection: str) -> dict[str, str]:
    """All properties of one of our collections; ValueError where it lacks ours."""
    described = connection.call("describe_collection", collection_name=collection)
    properties: dict[str, str] = described.get("properties") or {}
    if PROPERTY not in properties:
        raise ValueError(
            f"{place(connection, collection)} was not made by mmcl: it lacks the property {PROPERTY!r} "
            f"and has the fields {kinds_of(described)}"
        )
    return properties


def claims_of(properties: Mapping[str, str], prefix: str, read: Callable[[str], Said], where: str) -> dict[str, Said]:
    """What all properties whose names begin so say; ValueError as in `said`."""
    return {name: said(properties, name, read, where) for name in properties if name.startswith(prefix)}


def said(properties: Mapping[str, str], name: str, read: Callable[[str], Said], where: str) -> Said:
    """What one property says; ValueError that names it where that is nothing of ours."""
    try:
        return read(properties[name])
    except OtherFormatError as error:
        raise ValueError(f"{where}: its property {name!r} {error}") from None
    except (ValueError, KeyError, TypeError, AttributeError, OSError, pa.ArrowException) as error:
        told = f"is {properties[name][:80]!r}, which mmcl did not write ({type(error).__name__}: {error})"
        raise ValueError(f"{where}: its property {name!r} {told}") from None


def kinds_of(described: Mapping[str, Any]) -> dict[str, str]:
    """{field: type} of a collection that Milvus describes."""
    return {field["name"]: field["type"].name for field in described["fields"]}
