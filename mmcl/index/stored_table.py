"""Metadata that stays in its parquet file: single rows are read from there, and all only where all are needed."""

import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

GROUPS = 8
"""Row groups kept from the reads before."""


class StoredTable:
    """Some columns of a parquet file, in place of a `pyarrow.Table`; what it does not do itself the whole table does.

    The file stays open, and readable where its name is removed. Threads may read at once.
    """

    def __init__(self, file: Path, columns: list[str] | None = None):
        self.file = file
        self._content = pa.memory_map(str(file.absolute())).read_buffer()
        self._metadata = pq.read_metadata(pa.BufferReader(self._content))
        self._schema = self._reader().schema_arrow
        self.stored_names = self._schema.names
        """All columns of the file."""
        self.column_names = self.stored_names if columns is None else columns
        counts = [self._metadata.row_group(number).num_rows for number in range(self._metadata.num_row_groups)]
        self._ends = np.cumsum(counts, dtype=np.int64)
        self._group = functools.lru_cache(GROUPS)(self._read_group)

    @property
    def num_rows(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    @property
    def schema(self) -> pa.Schema:
        return self.schema_of(self.column_names)

    def schema_of(self, names: Sequence[str]) -> pa.Schema:
        """Of any columns of the file."""
        return pa.schema([self._schema.field(name) for name in names])

    def batches(self, names: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Any columns of the file, some rows after the other."""
        return (batch.select(names) for batch in self._reader().iter_batches(columns=list(names)))

    def take(self, rows: Any) -> pa.Table:
        """These rows, in their order."""
        rows = np.asarray(rows)
        groups = np.searchsorted(self._ends, rows, side="right")
        order = np.argsort(groups, kind="stable")
        parts = [self.schema.empty_table()]
        for group in np.unique(groups):
            start = self._ends[group - 1] if group else 0
            parts.append(self._group(int(group)).take(pa.array(rows[groups == group] - start)))
        back = np.empty(len(rows), np.int64)
        back[order] = np.arange(len(rows))
        return pa.concat_tables(parts).take(pa.array(back))

    @functools.cached_property
    def whole(self) -> pa.Table:
        """All rows, in memory."""
        return self._reader().read(self.column_names)

    def __getitem__(self, name: str) -> Any:
        return self.whole[name]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.whole, name)

    def _reader(self) -> pq.ParquetFile:
        return pq.ParquetFile(pa.BufferReader(self._content), metadata=self._metadata)

    def _read_group(self, group: int) -> pa.Table:
        return self._reader().read_row_group(group, self.column_names)
