"""Hubness: items that stand among the first of far more queries than others do, whatever is asked."""

from typing import Any

import numpy as np
from jaxtyping import Int

from mmcl.arrays import as_numpy


def k_occurrence(ids: Any, items: int) -> Int[np.ndarray, " items"]:
    """How many queries have each item among their k first.

    Args:
        ids: (nq, k) integers, the row numbers of the items that were found, each at most once a query; -1 is padding.
        items: how many there are.
    Returns: (items,) counts; they sum to nq * k where nothing is padded.
    Raises: ValueError for other shapes and types, and for an id outside -1 to items - 1, naming the query.
    Source: Radovanovic et al. 2010, section 2 (N_k).
    """
    array = as_numpy(ids)
    if array.dtype.kind not in "iu" or array.ndim != 2 or 0 in array.shape:
        raise ValueError(f"ids must be (queries, k) integers, not empty, got {array.shape} {array.dtype}")
    outside = ((array < -1) | (array >= items)).any(axis=1)
    if outside.any():
        raise ValueError(f"ids: query {int(outside.argmax())} names an item outside 0 to {items - 1}")
    return np.bincount(array[array >= 0], minlength=items)


def hubness_skew(ids: Any, items: int) -> float:
    """Skewness of the k-occurrence, E[(N_k - mean)^3] / std^3: above 0 where a few items are hubs.

    0 where all items are found equally often. Arguments and errors as in `k_occurrence`.
    Source: Radovanovic et al. 2010, eq. 1.
    """
    counts = k_occurrence(ids, items)
    centred = counts - counts.mean()
    spread = centred.std()
    return float((centred**3).mean() / spread**3) if spread > 0 else 0.0
