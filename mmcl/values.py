"""Raw values or embeddings: told apart, checked, encoded."""

import contextlib
from collections.abc import Mapping
from numbers import Real
from typing import Any

import numpy as np
import torch
from jaxtyping import Float32, Float64
from torch import Tensor, nn

from mmcl.arrays import NORM_TOLERANCE, as_rows, off_unit_norm
from mmcl.inputs import input_length, is_prepared, take_rows
from mmcl.modes import evaluating

NORM_BLOCK = 65536
NO_MODEL = (
    "raw values are encoded by a model: TupleIndex.build(model, ...), or TupleIndex.load(path, model=...) for an index "
    "on disk"
)


def as_query(value: Any, name: str, model: Any = None) -> Any:
    """A batch of one from a single vector, number, string, image or dict; anything else is a batch already."""
    if isinstance(value, Mapping):
        return value if is_prepared(value) else [value]
    if isinstance(value, str | bytes) or not hasattr(value, "__len__"):
        return [value]
    flat = value.ndim == 1 if isinstance(value, np.ndarray | Tensor) else is_flat(value)
    if not flat or not is_numeric(value):
        return value
    if model is not None and prepares(model, name, value):  # numbers that are one raw value each, as categories are
        return value
    return value[None] if isinstance(value, np.ndarray | Tensor) else [value]


def is_flat(values: Any) -> bool:
    """Whether it is a list of numbers."""
    return len(values) > 0 and all(isinstance(each, Real) for each in values)


def prepares(model: Any, name: str, values: Any) -> bool:
    """Whether the model's encoder of the modality takes these as raw values of one row each."""
    try:
        model.prepare(name, values)
    except (AttributeError, TypeError, ValueError):
        return False
    return True


def is_encoded(value: Any, name: str, dim: int, model: Any, encoded: Any) -> bool:
    """Whether these are embeddings: what the caller says; without a model always; else unit rows of the right width.

    Raises: ValueError where raw values come without a model, and where unit rows might as well be raw values.
    """
    if encoded is not None and not isinstance(encoded, bool):
        raise ValueError(f"encoded must be True, False or None, got {encoded!r}")
    if model is None:
        if encoded is False or not is_numeric(value):
            raise ValueError(f"{name}: expected an array of numbers, got {described(value)}; {NO_MODEL}")
        return True
    if encoded is not None or not has_unit_rows(value, dim):
        return bool(encoded)
    if encodes_to_another(model, name, value[:1], dim):
        raise ValueError(
            f"{name}: these rows of norm 1 and width {dim} may be embeddings or raw values of the encoder, which takes "
            "that width too; say which with encoded=True or encoded=False"
        )
    return True


def encodes_to_another(model: Any, name: str, row: Any, dim: int) -> bool:
    """Whether the model's encoder takes this row as a raw value too, and makes another vector of it."""
    try:
        encoded = encode(model, {name: row}, dim)[name]
    except Exception:  # a user's module may raise anything on what it does not take
        return False
    return bool((encoded - as_embeddings(row, name, dim)).abs().max() > NORM_TOLERANCE)


def described(value: Any) -> str:
    """What kind of thing a value is, for an error."""
    kind = type(value).__name__
    return f"{kind} of {type(value[0]).__name__}" if isinstance(value, list | tuple) and len(value) else kind


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
    return floats and not any(off_unit_norm(as_rows(block, "")).any() for block in blocks)


def as_embeddings(value: Any, name: str, dim: int, start: int = 0) -> Float32[Tensor, "n dim"]:
    """(n, dim) float32 on the CPU, the caller's own memory where it is that already; errors count rows from `start`."""
    if isinstance(value, list | tuple) and not len(value):
        value = np.empty((0, dim), np.float32)
    rows = as_rows(value, name, dim).detach()
    single = rows.to("cpu", torch.float32)
    if rows.dtype == torch.float64:
        refuse_beyond_single(rows.cpu(), single, name, start)
    return single


def refuse_beyond_single(
    rows: Float64[Tensor, "n dim"], single: Float32[Tensor, "n dim"], name: str, start: int
) -> None:
    """ValueError for the first row that is finite and not zero, and not so in float32."""
    lost = single.isinf() & rows.isfinite() | (single == 0).all(dim=1, keepdim=True) & (rows != 0)
    if lost.any():
        row, column = (int(each) for each in lost.nonzero()[0])
        raise ValueError(f"{name}: row {row + start} holds {rows[row, column]:g}, which is beyond float32")


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
        return input_length(value)
    if isinstance(value, str | bytes | Mapping) or not hasattr(value, "__len__") or getattr(value, "ndim", 1) == 0:
        raise ValueError(f"{name}: expected one value a row, got {type(value).__name__}")
    return len(value)


def take(value: Any, start: int, end: int) -> Any:
    """Rows start..end of an array, a list, or prepared tensors."""
    return take_rows(value, slice(start, end)) if is_prepared(value) else value[start:end]
