"""Ids and metadata of the rows of an index."""

from collections.abc import Iterable
from numbers import Integral
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from mmcl.index.growing import Growing
from mmcl.index.item_checks import ID
from mmcl.index.stored_table import StoredTable

MAX_CHUNKS = 64
"""Tables of more pieces than this are joined into one: looking up a row passes all of them."""


class Places:
    """id -> row, for ids that were there from the start and for those that came since.

    The row of an id that was removed and added again is the newest one; whether a row is alive is for others to say.
    One object serves all snapshots of an index until rows are renumbered.
    """

    def __init__(self, ids: np.ndarray):
        self._ids = ids
        self._order: np.ndarray | None = None
        self._first: dict[str, int] | None = None
        self._since: dict[Any, int] = {}

    def find(self, ids: np.ndarray) -> np.ndarray:
        """(n,) row numbers, -1 where an id has none."""
        rows = self._rows_of_names(ids) if self._ids.dtype == object else self._rows_of_integers(ids)
        if self._since:
            newer = (self._since.get(key, -1) for key in ids.tolist())
            rows = np.maximum(rows, np.fromiter(newer, np.int64, len(ids)))
        return rows

    def add(self, ids: np.ndarray, start: int) -> None:
        """These ids stand in the rows from `start` on."""
        self._since.update(zip(ids.tolist(), range(start, start + len(ids)), strict=True))

    def _rows_of_names(self, ids: np.ndarray) -> np.ndarray:
        if self._first is None:
            self._first = {key: row for row, key in enumerate(self._ids.tolist())}
        return np.fromiter((self._first.get(key, -1) for key in ids.tolist()), np.int64, len(ids))

    def _rows_of_integers(self, ids: np.ndarray) -> np.ndarray:
        if not len(self._ids):
            return np.full(len(ids), -1, np.int64)
        if self._order is None:
            ordered = bool((self._ids[1:] > self._ids[:-1]).all())
            self._order = np.empty(0, np.int64) if ordered else np.argsort(self._ids, kind="stable")
        order = self._order if len(self._order) else None
        at = np.maximum(np.searchsorted(self._ids, ids, side="right", sorter=order) - 1, 0)  # of several the newest
        rows = at if order is None else order[at]
        return np.where(self._ids[rows] == ids, rows, -1)


class Items:
    """Row number <-> id, and row number -> metadata; a snapshot that later additions leave as it is.

    Args:
        ids: (n,) int64, or object array of str; see `check_ids`.
        metadata: n rows, or no columns at all; see `check_metadata`.
    """

    def __init__(self, ids: np.ndarray, metadata: Any):
        self._ids, self.metadata, self._places = Growing(ids), metadata, Places(ids)

    def __len__(self) -> int:
        return len(self._ids)

    @property
    def ids(self) -> np.ndarray:
        return self._ids.rows

    @property
    def named(self) -> bool:
        """Whether ids are str."""
        return self.ids.dtype == object

    def is_id(self, key: object) -> bool:
        """Whether it is of the kind of this index's ids: True == 1 and 1.0 == 1 would find integers otherwise."""
        if self.named:
            return isinstance(key, str)
        return isinstance(key, Integral) and not isinstance(key, bool) and abs(int(key)) < 2**63

    def find(self, keys: Iterable[Any]) -> np.ndarray:
        """(n,) the newest row of each id, alive or not; -1 where there is none, or it is no id of this index."""
        keys = list(keys)
        right = np.array([self.is_id(key) for key in keys], bool)
        asked = [key for key, good in zip(keys, right, strict=True) if good]
        rows = np.full(len(keys), -1, np.int64)
        rows[right] = self.find_checked(np.array(asked, self.ids.dtype))
        return rows

    def find_checked(self, ids: np.ndarray) -> np.ndarray:
        """`find` of an array of the right kind."""
        rows = self._places.find(ids)
        known = np.flatnonzero((rows >= 0) & (rows < len(self)))
        wrong = rows >= len(self)
        wrong[known] = self.ids[rows[known]] != ids[known]
        for at in np.flatnonzero(wrong):  # added to the index after this snapshot, or in vain
            before = np.flatnonzero(self.ids == ids[at])
            rows[at] = before[-1] if len(before) else -1
        return rows

    def ids_at(self, rows: np.ndarray) -> np.ndarray:
        """Ids of row numbers of any shape; -1, or "" among str, where a row number is -1."""
        nothing: Any = "" if self.named else -1
        if not len(self):
            return np.full(rows.shape, nothing, dtype=self.ids.dtype)
        found = self.ids[rows]
        found[rows < 0] = nothing
        return found

    def metadata_at(self, rows: np.ndarray) -> list[dict[str, Any]]:
        """A dict a row number; empty ones where there is no metadata."""
        if not self.metadata.column_names:
            return [{} for _ in rows]
        return self.metadata.take(pa.array(rows, pa.int64())).to_pylist()

    def appended(self, ids: np.ndarray, metadata: pa.Table) -> "Items":
        """A snapshot with more rows; ValueError for a metadata column of another type than the one there is."""
        if not len(self) and ids.dtype != self.ids.dtype:
            return Items(ids, metadata)
        grown = Items.__new__(Items)
        grown.metadata = appended_table(self.metadata, len(self), metadata, len(ids))
        grown._ids, grown._places = self._ids.appended(ids), self._places
        self._places.add(ids, len(self))
        return grown

    def kept(self, keep: np.ndarray) -> "Items":
        """The rows where `keep` (n,) is true, renumbered."""
        table = self.metadata.filter(pa.array(keep)).combine_chunks() if self.metadata.column_names else self.metadata
        return Items(self.ids[keep], table)

    def to_filter(self) -> tuple[Any, np.ndarray | None]:
        """Table and ids, or the file that has both, as a filter reads them."""
        return self.metadata, None if isinstance(self.metadata, StoredTable) else self.ids

    def to_table(self, start: int = 0, end: int | None = None) -> pa.Table:
        """Ids and metadata of rows start..end as one table."""
        ids = self.ids[start:end]
        column = pa.chunked_array([pa.array(ids, pa.large_string() if self.named else pa.int64())])
        part = self.metadata.slice(start, len(ids))
        return pa.table({ID: column, **{name: part[name] for name in part.column_names}})

    @classmethod
    def from_table(cls, table: pa.Table) -> "Items":
        """Undo `to_table`."""
        return cls(ids_of(table), table.drop_columns([ID]))

    @classmethod
    def from_file(cls, file: Path) -> "Items":
        """`to_table` written as parquet: ids in memory, metadata left in the file."""
        with open(file, "rb") as opened:
            parquet = pq.ParquetFile(opened)
            columns = [name for name in parquet.schema_arrow.names if name != ID]
            ids = ids_of(parquet.read([ID]))
        return cls(ids, StoredTable(file, columns) if columns else pa.table({}))

    @classmethod
    def from_parquet(cls, file: Path) -> "Items":
        """The same with all in memory. A path is opened here: arrow takes some names for addresses."""
        with open(file, "rb") as opened:
            return cls.from_table(pq.ParquetFile(opened).read())


def ids_of(table: pa.Table) -> np.ndarray:
    """The ids of a table that `to_table` made."""
    kind = object if pa.types.is_large_string(table.schema.field(ID).type) else np.int64
    return table[ID].to_numpy().astype(kind, copy=False)


def appended_table(table: Any, rows: int, more: Any, count: int) -> Any:
    """`more` (count rows) behind `table` (of `rows`); a column that one of them lacks is null there.

    Raises: ValueError for a column whose values do not fit the type that the index has.
    """
    fields = {field.name: field for field in table.schema}
    for field in more.schema:
        old = fields.get(field.name)
        fields[field.name] = field if old is None or is_open(old.type) else old
    if not fields:
        return table
    columns = {}
    for name, field in fields.items():
        parts = [column_as(part, name, field.type, size) for part, size in ((table, rows), (more, count))]
        columns[name] = pa.chunked_array([chunk for part in parts for chunk in part.chunks], field.type)
    joined = pa.table(columns)
    return joined.combine_chunks() if max(column.num_chunks for column in joined.columns) > MAX_CHUNKS else joined


def column_as(table: Any, name: str, kind: pa.DataType, rows: int) -> pa.ChunkedArray:
    """A column in this type, nulls where the table lacks it; ValueError where a value does not fit."""
    if name not in table.column_names:
        return pa.chunked_array([pa.nulls(rows, kind)])
    column = table[name]
    if column.type == kind:
        return column
    why = "its values would change"
    try:
        if keeps_values(column.type, kind):
            return column.cast(kind)
    except pa.ArrowException as error:
        why = str(error)
    raise ValueError(f"metadata column {name!r} holds {kind} in this index, and {column.type} does not fit: {why}")


def is_open(kind: pa.DataType) -> bool:
    """Whether no value has told yet what it holds: nulls, or lists without elements."""
    return pa.types.is_null(kind) or (pa.types.is_list(kind) and is_open(kind.value_type))


def keeps_values(kind: pa.DataType, wanted: pa.DataType) -> bool:
    """Whether a cast that arrow accepts gives back the very values: no number for a text, no rounding."""
    types = pa.types
    if types.is_list(kind) and types.is_list(wanted):
        return kind.value_type == wanted.value_type or keeps_values(kind.value_type, wanted.value_type)
    text = (types.is_string, types.is_large_string, types.is_dictionary)
    pairs = (
        (types.is_null(kind), True),
        (types.is_integer(kind), types.is_integer(wanted) or types.is_float64(wanted)),
        (types.is_floating(kind), types.is_float64(wanted)),
        (any(is_text(kind) for is_text in text), any(is_text(wanted) for is_text in text[:2])),
        (types.is_timestamp(kind), types.is_timestamp(wanted) and kind.tz == wanted.tz),
    )
    return any(here and there for here, there in pairs)
