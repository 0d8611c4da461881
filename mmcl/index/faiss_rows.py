"""Rows of a FAISS index: chosen for a search, read back, and taken out for good."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Float32, Int64

from mmcl.index.faiss_factory import own_class, parts
from mmcl.index.faiss_files import in_memory
from mmcl.index.faiss_setup import load_faiss, prefer_faster_path

Found = tuple[Float32[np.ndarray, "nq k"], Int64[np.ndarray, "nq k"]]
Keep = Bool[np.ndarray, " rows"]


def nearest(queries: np.ndarray, vectors: np.ndarray, k: int) -> Found:
    """The k <= n rows of (n, width) float32 vectors with the largest inner products, by brute force."""
    faiss = load_faiss()
    prefer_faster_path(vectors.shape[1])
    return faiss.knn(queries, vectors, k, metric=faiss.METRIC_INNER_PRODUCT)


def at_rows(rows: np.ndarray, places: np.ndarray) -> Int64[np.ndarray, "nq k"]:
    """The row at each place; -1 where FAISS found none, as where the score is minus infinity."""
    return np.where(places < 0, -1, rows[places])


def padded(scores: np.ndarray, rows: np.ndarray, k: int) -> Found:
    """Both with k columns, -inf and -1 behind what there is."""
    count, there = rows.shape
    if there == k:
        return scores, rows
    wider = nothing_found(count, k)
    wider[0][:, :there], wider[1][:, :there] = scores, rows
    return wider


def best_of(parts: Sequence[tuple[np.ndarray, np.ndarray]], k: int) -> Found:
    """(nq, k) best of all parts, which have k columns or more together; of equal scores the earlier part's first."""
    scores, rows = (np.concatenate(each, axis=1) for each in zip(*parts, strict=True))
    order = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    return np.take_along_axis(scores, order, axis=1), np.take_along_axis(rows, order, axis=1)


def nothing_found(count: int, k: int) -> Found:
    """k times padding for each of `count` queries."""
    return np.full((count, k), -np.inf, np.float32), np.full((count, k), -1, np.int64)


def first_kept(scores: np.ndarray, rows: np.ndarray, keep: Keep, k: int) -> Found:
    """Of each query's best rows the first k that are kept, in their order; padded. Overwrites what it is given."""
    dropped = ~(keep[rows] & (rows >= 0))
    scores[dropped], rows[dropped] = -np.inf, -1
    if dropped[:, :k].any():
        each, order = np.arange(len(rows))[:, None], np.argsort(dropped, axis=1, kind="stable")[:, :k]
        scores, rows = scores[each, order], rows[each, order]
    return padded(scores[:, :k], rows[:, :k], k)


def selector(keep: Keep) -> Any:
    """What makes a FAISS search return these rows only."""
    return load_faiss().IDSelectorBitmap(np.packbits(keep, bitorder="little"))


def takes_selector(index: Any) -> bool:
    """Whether a search in this index can be told which rows may be returned."""
    faiss = load_faiss()
    index = own_class(index)
    if isinstance(index, faiss.IndexPreTransform):
        return takes_selector(index.index)
    if isinstance(index, faiss.IndexRefine):
        return takes_selector(index.base_index)
    if isinstance(index, faiss.IndexIVFAdditiveQuantizer):
        return False
    return isinstance(index, faiss.IndexIVF | faiss.IndexHNSW | faiss.IndexScalarQuantizer | faiss.IndexFlat)


def scans_faster_unselected(index: Any) -> bool:
    """Whether FAISS leaves the matrix product for a scan row by row, once a search is given a selector."""
    index = own_class(index)
    faiss = load_faiss()
    return isinstance(index, faiss.IndexFlat) or (
        isinstance(index, faiss.IndexPreTransform) and scans_faster_unselected(index.index)
    )


def lists_of(index: Any) -> list[Any]:
    """The IVF indexes inside whose vectors are read back through a map of rows to lists; none behind a refinement."""
    faiss = load_faiss()
    index = own_class(index)
    if isinstance(index, faiss.IndexRefine):
        return lists_of(index.refine_index)
    if isinstance(index, faiss.IndexPreTransform):
        return lists_of(index.index)
    return [index] if isinstance(index, faiss.IndexIVF) else []


def restore_decoders(index: Any) -> None:
    """Have fast-scan lists decode after they were read or copied: FAISS 1.15 leaves a null pointer there."""
    for part in parts(index):
        if isinstance(part, load_faiss().IndexIVFFastScan):
            part.fine_quantizer = part.pq if hasattr(part, "pq") else part.aq


def drop_rows(index: Any, keep: Keep) -> None:
    """Take out the rows that are not kept, in place; the others are renumbered in order."""
    faiss = load_faiss()
    index = own_class(index)
    if isinstance(index, faiss.IndexPreTransform):
        drop_rows(index.index, keep)
    elif isinstance(index, faiss.IndexRefine):
        drop_rows(index.base_index, keep)
        drop_rows(index.refine_index, keep)
    elif isinstance(index, faiss.IndexHNSW):  # a graph with holes finds less: it is built again over what is left
        vectors = index.reconstruct_batch(np.flatnonzero(keep))
        index.reset()
        index.add(vectors)
    else:
        index.remove_ids(selector(~keep))
        if isinstance(index, faiss.IndexIVF):
            renumber_lists(index, keep)
    index.ntotal = int(keep.sum())


def renumber_lists(ivf: Any, keep: Keep) -> None:
    """An IVF keeps its rows' numbers when some are taken out: close the gaps."""
    faiss = load_faiss()
    numbers = np.cumsum(keep) - 1
    lists = ivf.invlists
    for number in range(lists.nlist):
        size = lists.list_size(number)
        if size:
            ids = faiss.rev_swig_ptr(lists.get_ids(number), size)
            ids[:] = numbers[ids]


def copy_of(index: Any, memory_mapped: bool) -> Any:
    """A copy in memory that may be changed."""
    copy = in_memory(index) if memory_mapped else load_faiss().clone_index(index)
    for part in parts(copy):
        if isinstance(part, load_faiss().IndexIVF):
            part.set_direct_map_type(load_faiss().DirectMap.NoMap)
    return copy
