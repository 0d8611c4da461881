"""Turn what a caller passes as embeddings into checked tensors, naming the modality and the row in every error."""

import contextlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

Embeddings = Mapping[str, Any]
"""{modality: (n, d) torch tensor, numpy array or nested list}; rows that belong together share their position."""

NORM_TOLERANCE = 1e-3
"""How far the norm of a unit row may be from 1: half precision stays well inside."""

Present = Mapping[str, Any]
"""{modality: (n,) bool}; False where the row lacks the modality. An unnamed modality is present everywhere."""


def check_modalities(names: Any) -> tuple[str, ...]:
    """At least two distinct, non-empty names, as a tuple."""
    if isinstance(names, str):
        raise TypeError(f"modalities must be a sequence of names such as ('image', 'text'), got the string {names!r}")
    names = tuple(names)
    wrong = [name for name in names if not isinstance(name, str) or not name]
    if wrong:
        raise ValueError(f"modality names must be non-empty strings, got {wrong[0]!r} in {names}")
    if len(set(names)) != len(names):
        raise ValueError(f"modality names must be distinct, got {names}")
    if len(names) < 2:
        raise ValueError(f"a score needs at least two modalities, got {names}")
    return names


def refuse_unknown(names: Iterable[str], known: Iterable[str], what: str = "embeddings") -> None:
    """KeyError that lists the known modalities when `names` holds another."""
    known = tuple(known)
    unknown = [name for name in names if name not in known]
    if unknown:
        raise KeyError(f"unknown modality {unknown[0]!r} in {what}; the modalities are {list(known)}")


def as_float_tensor(value: Any, name: str = "embeddings", device: torch.device | None = None) -> Tensor:
    """A float32 or float64 tensor of `value`; half precision and integers become float32. Never writes to `value`."""
    if not isinstance(value, Tensor):
        array = np.asarray(value)
        if array.dtype == object or array.dtype.kind not in "fiub":
            raise ValueError(f"{name}: expected numbers, got an array of dtype {array.dtype}")
        if array.dtype.newbyteorder("=") not in (np.float32, np.float64):
            array = array.astype(np.float32)
        value = as_tensor(array, device)
    if value.is_complex():
        raise ValueError(f"{name}: expected real numbers, got {value.dtype}")
    return value if value.dtype in (torch.float32, torch.float64) else value.float()


def as_tensor(value: Any, device: torch.device | None = None) -> Tensor:
    """`torch.as_tensor`, with a copy of the arrays that torch cannot share: read-only, oddly strided, byte-swapped."""
    if isinstance(value, np.ndarray):
        shared = all(step >= 0 and step % value.itemsize == 0 for step in value.strides)
        if not (shared and value.flags.writeable and value.dtype.isnative):
            value = value.astype(value.dtype.newbyteorder("="))
    return torch.as_tensor(value, device=device)


def same_precision(rows: Mapping[str, Tensor], like: Tensor | None = None) -> dict[str, Tensor]:
    """All rows in float64 where one of them, or `like`, is: so that they can be multiplied."""
    double = any(row.dtype == torch.float64 for row in (*rows.values(), *([] if like is None else [like])))
    return {name: row.double() if double else row for name, row in rows.items()}


def as_rows(value: Any, name: str, dim: int | None = None, device: torch.device | None = None) -> Tensor:
    """`value` as an (n, d) float tensor; ValueError names the modality and both shapes otherwise."""
    rows = as_float_tensor(value, name, device)
    if rows.ndim != 2:
        raise ValueError(f"{name}: expected shape (n, {dim or 'd'}), got {tuple(rows.shape)}")
    if dim is not None and rows.shape[1] != dim:
        raise ValueError(f"{name}: expected {dim} columns, got shape {tuple(rows.shape)}")
    return rows


def as_mask(mask: Any, name: str, count: int, device: torch.device) -> Tensor:
    """`mask` as an (n,) bool tensor."""
    mask = as_tensor(mask, device)
    if mask.dtype != torch.bool or mask.shape != (count,):
        raise ValueError(f"present[{name!r}] must be ({count},) bool, got {tuple(mask.shape)} {mask.dtype}")
    return mask


def same_length(rows: Mapping[str, Any]) -> int:
    """The row count that all modalities share; ValueError names two that differ."""
    counts = {name: len(value) for name, value in rows.items()}
    if len(set(counts.values())) > 1:
        first = next(iter(counts))
        other = next(name for name in counts if counts[name] != counts[first])
        raise ValueError(
            f"modalities must have the same number of rows: {first} has {counts[first]}, {other} has {counts[other]}"
        )
    return next(iter(counts.values()))


def refuse_bad_rows(rows: Tensor, name: str, offset: int = 0) -> None:
    """ValueError that names the first row holding NaN, infinity or only zeros."""
    if not len(rows):
        return
    norms = torch.linalg.vector_norm(rows.detach(), dim=1)
    least, most = norms.aminmax()  # NaN where there is one
    if least > 0 and most < torch.inf:
        return
    suspects = (~torch.isfinite(norms) | (norms == 0)).nonzero()[:, 0]  # of 1e30 and 1e-30 no norm is held, either
    seen = rows.detach()[suspects]
    bad = suspects[~torch.isfinite(seen).all(dim=1) | (seen == 0).all(dim=1)]
    if len(bad):
        row = int(bad[0])
        values = rows[row].detach()
        fault = "only zeros" if (values == 0).all() else "NaN" if values.isnan().any() else "an infinite value"
        raise ValueError(f"{name}: row {row + offset} holds {fault}; every embedding must be finite and not zero")


def off_unit_norm(rows: Tensor) -> Tensor:
    """(n,) bool: which rows have another norm than 1."""
    return (torch.linalg.vector_norm(rows.detach(), dim=1) - 1).abs() > NORM_TOLERANCE


def as_numpy(value: Any) -> np.ndarray:
    """`value` as a numpy array; tensors of any device and type, bfloat16 as float32."""
    if isinstance(value, Tensor):
        value = value.detach().cpu()
        return (value.float() if value.dtype == torch.bfloat16 else value).numpy()
    return np.asarray(value)


def full_precision(device: torch.device) -> contextlib.AbstractContextManager:
    """A context in which autocast lowers nothing: scores and losses are always at least float32."""
    return torch.autocast(device.type, enabled=False)
