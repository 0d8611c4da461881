"""Raw values or embeddings: told apart, checked, encoded."""

import contextlib
from collections.abc import Mapping
from numbers import Real
from typing import Any

import numpy as np
import torch
from jaxtyping import Float32
from torch import Tensor, nn

from mmcl.arrays import as_rows
from mmcl.modes import evaluating

NORM_TOLERANCE = 1e-3
NORM_BLOCK = 65536
NO_MODEL = (
    "raw values are encoded by a model: TupleIndex.build(model, ...), or TupleIndex.load(path, model=...) for an index "
    "on disk"
)


def as_query(value: Any) -> Any:
    """One query as a batch of one: a vector, a string, an image; a batch as it is."""
    if isinstance(value, np.ndarray | Tensor):
        return value[None] if value.ndim == 1 and is_numeric(value) else value
    if isinstance(value, Mapping):
        return value if is_prepared(value) else [value]
    if isinstance(value, str | bytes) or not hasattr(value, "__len__"):
        return [value]
    return [value] if len(value) and all(isinstance(each, Real) for each in value) else value


def is_encoded(value: Any, name: str, dim: int, model: Any, encoded: Any) -> bool:
    """Whether these are embeddings: what the caller says; without a model always; else unit rows of the right width.

    Raises: ValueError where raw values come without a model.
    """
    if encoded is not None and not isinstance(encoded, bool):
        raise ValueError(f"encoded must be True, False or None, got {encoded!r}")
    if model is None:
        if encoded is False or not is_numeric(value):
            raise ValueError(f"{name}: {NO_MODEL}")
        return True
    return encoded if encoded is not None else has_unit_rows(value, dim)


def is_numeric(value: Any) -> bool:
    """Whether numpy sees an array of numbers in it."""
    if isinstance(value, Tensor):
        return True
    if isinstance(value, Mapping | str | bytes):
        return False
    try:
        return np.asarray(value).dtype.kind in "fiub"
    except (ValueError, TypeError):  # ragged rows
        return False


def has_unit_rows(value: Any, dim: int) -> bool:
    """Whether it is (n, dim) of floats with every row of norm 1."""
    if isinstance(value, list | tuple):
        if not (len(value) and isinstance(value[0], list | tuple | np.ndarray | Tensor) and is_numeric(value)):
            return False
        value = np.asarray(value)
    if not isinstance(value, np.ndarray | Tensor) or value.ndim != 2 or value.shape[1] != dim:
        return False
    floats = value.is_floating_point() if isinstance(value, Tensor) else value.dtype.kind == "f"
    blocks = (value[start : start + NORM_BLOCK] for start in range(0, len(value), NORM_BLOCK))
    return floats and all(unit_rows(as_rows(block, "")) for block in blocks)


def unit_rows(rows: Tensor) -> bool:
    """Whether every row has norm 1."""
    return bool(((torch.linalg.vector_norm(rows.detach(), dim=1) - 1).abs() <= NORM_TOLERANCE).all())


def as_embeddings(value: Any, name: str, dim: int) -> Float32[Tensor, "n dim"]:
    """(n, dim) float32 on the CPU, the caller's own memory where it is that already."""
    if isinstance(value, list | tuple) and not len(value):
        value = np.empty((0, dim), np.float32)
    return as_rows(value, name, dim).detach().to("cpu", torch.float32)


def encode(model: Any, values: Mapping[str, Any], dim: int, start: int = 0) -> dict[str, Tensor]:
    """Raw values through the model, in evaluation mode; errors say from which row they count, where it is not 0."""
    with evaluating(model) if isinstance(model, nn.Module) else contextlib.nullcontext(), torch.no_grad():
        try:
            rows = model.encode(dict(values))
        except Exception as error:
            if start:
                error.add_note(f"rows are counted from row {start} of all items")
            if any(is_numeric(value) for value in values.values()):
                error.add_note("these were taken for raw values; where they are embeddings already, pass encoded=True")
            raise
    return {name: as_embeddings(part, name, dim) for name, part in rows.items()}


def row_count(value: Any, name: str) -> int:
    """Rows of an array, a list, or a dict of prepared tensors."""
    if is_prepared(value):
        return len(next(iter(value.values())))
    if isinstance(value, str | bytes | Mapping) or not hasattr(value, "__len__") or getattr(value, "ndim", 1) == 0:
        raise ValueError(f"{name}: expected one value a row, got {type(value).__name__}")
    return len(value)


def take(value: Any, start: int, end: int) -> Any:
    """Rows start..end of an array, a list, or a dict of prepared tensors."""
    if is_prepared(value):
        return {key: part[start:end] for key, part in value.items()}
    return value[start:end]


def is_prepared(value: Any) -> bool:
    """Whether it is a dict of tensors, as a backbone takes them."""
    return isinstance(value, Mapping) and len(value) > 0 and all(isinstance(part, Tensor) for part in value.values())
