"""What ids, metadata and models may be."""

from collections.abc import Iterable, Mapping
from io import BytesIO
from numbers import Integral
from typing import Any

import numpy as np
import pyarrow as pa

ID = "id"
MAX_ID = 2**63 - 1


def check_ids(ids: Any, count: int) -> np.ndarray:
    """(count,) int64 >= 0, or an object array of non-empty str; 0..count-1 for None.

    Raises: ValueError that names the id, and the row or rows.
    """
    if ids is None:
        return np.arange(count, dtype=np.int64)
    if isinstance(ids, str | bytes | Mapping) or not isinstance(ids, Iterable):
        raise ValueError(f"ids must be a sequence of integers or of strings, got {type(ids).__name__} {ids!r}")
    if not (isinstance(ids, np.ndarray) and ids.dtype.kind in "iu"):
        ids = np.array(plain_ids(ids), dtype=object)
    if ids.shape != (count,):
        raise ValueError(f"{count} items need {count} ids, got {ids.shape[0] if ids.ndim == 1 else ids.shape}")
    if ids.dtype == object and count and isinstance(ids[0], str):
        check_names(ids)
    else:
        ids = check_integers(ids)
    refuse_duplicates(ids)
    return ids


def plain_ids(ids: Iterable[Any]) -> list[Any]:
    """Python int or str, one kind; ValueError names the first that is neither, or of the other kind."""
    ids = ids.tolist() if hasattr(ids, "tolist") else list(ids)  # arrays, tensors, pandas
    ids = [key.as_py() if isinstance(key, pa.Scalar) else key for key in ids]
    kinds = {bool: "bool", str: "str"}
    for row, key in enumerate(ids):
        if isinstance(key, bool | np.bool_) or not isinstance(key, Integral | str):
            raise ValueError(f"ids must be integers or strings, got {key!r} ({type(key).__name__}) in row {row}")
        if isinstance(key, str) != isinstance(ids[0], str):
            first, other = (kinds.get(type(each), type(each).__name__) for each in (ids[0], key))
            raise ValueError(f"ids must be all integers or all strings: row 0 is {first}, row {row} is {other}")
    return ids


def check_names(ids: np.ndarray) -> None:
    """ValueError for an empty str, and for one that has no UTF-8."""
    for row, key in enumerate(ids):
        if not key:
            raise ValueError(f"the id in row {row} is an empty string")
        try:
            key.encode()
        except UnicodeEncodeError:
            raise ValueError(f"the id in row {row}, {key!r}, cannot be written as UTF-8") from None


def check_integers(ids: np.ndarray) -> np.ndarray:
    """As int64; ValueError for one below 0 or above 2^63 - 1."""
    outside = np.flatnonzero((ids < 0) | (ids > MAX_ID))
    if len(outside):
        row = int(outside[0])
        raise ValueError(f"ids must be between 0 and 2^63 - 1, got {ids[row]} in row {row}")
    return ids.astype(np.int64)


def refuse_duplicates(ids: np.ndarray) -> None:
    """ValueError that names an id that stands twice, and both rows."""
    if ids.dtype != object and len(np.unique(ids)) == len(ids):
        return
    seen: dict[Any, int] = {}
    for row, key in enumerate(ids.tolist()):
        if seen.setdefault(key, row) != row:
            raise ValueError(f"duplicate id {key!r} in rows {seen[key]} and {row}")


def check_metadata(metadata: Any, count: int) -> pa.Table:
    """A table of `count` rows from a dict of columns or a pyarrow.Table; without columns for None.

    Raises: ValueError that names the column.
    """
    if metadata is None:
        return pa.table({})
    if not isinstance(metadata, pa.Table):
        if not isinstance(metadata, Mapping):
            kind = type(metadata).__name__
            raise ValueError(f"metadata must be a dict of columns or a pyarrow.Table, got {kind}")
        metadata = {name: as_column(name, values) for name, values in metadata.items()}
    names = metadata.column_names if isinstance(metadata, pa.Table) else list(metadata)
    for name in names:
        if name == ID:
            raise ValueError("the metadata column 'id' is reserved; pass it as `ids`, or rename it")
        if names.count(name) > 1:
            raise ValueError(f"the metadata column {name!r} stands twice")
        if len(metadata[name]) != count:
            raise ValueError(f"metadata column {name!r} has {len(metadata[name])} rows, there are {count} items")
    table = metadata if isinstance(metadata, pa.Table) else pa.table(metadata)
    refuse_unstorable(table)
    return table.replace_schema_metadata(None)


def as_column(name: Any, values: Any) -> pa.Array | pa.ChunkedArray:
    """An arrow column in which NaN stays NaN and None is null."""
    if not isinstance(name, str):
        raise ValueError(f"metadata columns are named by strings, got {name!r}")
    if isinstance(values, pa.Array | pa.ChunkedArray):
        return values
    if isinstance(values, str | bytes) or not hasattr(values, "__len__"):
        raise ValueError(f"metadata column {name!r} must hold one value an item, got {values!r}")
    try:
        # a tensor, or a pandas series (which would turn NaN into null), goes by its values
        return pa.array(values.tolist() if hasattr(values, "detach") else values, from_pandas=False)
    except (pa.ArrowException, ValueError, TypeError, OverflowError) as error:
        raise ValueError(f"metadata column {name!r}: {error}") from None


def refuse_unstorable(table: pa.Table) -> None:
    """ValueError for a column of a type that parquet cannot hold, or that arrow cannot look up: now, not later."""
    import pyarrow.parquet as pq

    for name in table.column_names:
        try:
            pq.write_table(table.select([name]).slice(0, 0), BytesIO())
            table.select([name]).slice(0, 0).take(pa.array([], pa.int64()))
        except pa.ArrowException as error:
            kind = table.schema.field(name).type
            raise ValueError(f"metadata column {name!r} of type {kind} cannot be stored: {error}") from None


def listed(ids: Any) -> tuple[list[Any], bool]:
    """Ids as a list, and whether it was a single one."""
    if hasattr(ids, "tolist"):
        ids = ids.tolist()
    single = isinstance(ids, str | bytes) or not isinstance(ids, Iterable)
    return ([ids] if single else list(ids)), single


def check_model(model: Any) -> Any:
    """The model; ValueError where it is neither a score nor a model."""
    if not all(hasattr(model, name) for name in ("score", "encode", "fingerprint")):
        raise ValueError(f"expected a Score or a MultimodalModel, got {type(model).__name__}")
    return model


def refuse_fingerprint(theirs: str | None, ours: str | None, what: str) -> None:
    """ValueError where embeddings and model are known to differ, with both fingerprints."""
    if theirs is not None and ours is not None and theirs != ours:
        raise ValueError(
            f"{what} made with another model: its fingerprint is {theirs[:12]}..., this one's {ours[:12]}..."
        )
