"""Retrieval metrics, from a matrix of scores or from ranked lists.

Conventions, the same in every function:

- The rank of a query is the rank of its best relevant item, counted from 1. Other relevant items never stand in its
  way.
- Ties count against the query: an irrelevant item with an equal score is ranked above. A constant score, which knows
  nothing, therefore gets the worst rank and not a lucky one.
- Recall@k is the hit rate of the retrieval papers: the share of queries with a relevant item among the first k.
- A query without any relevant item has no rank: ValueError. So has a row of scores with NaN.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int

from mmcl.arrays import as_numpy


def recall_at_k(scores: Any, relevant: Any, k: Any) -> float:
    """Share of queries with a relevant item among the first k (the hit rate; not the share of relevant items found).

    Args:
        scores: (nq, n), numpy, torch or lists; higher is better.
        relevant: (nq, n) bool, or (nq,) the index of the one right item.
        k: at least 1; a k past n finds everything.
    Raises: ValueError for shapes that do not fit, NaN, or a query without a relevant item, naming the row.
    """
    check_k(k)
    return float((best_ranks(scores, relevant) <= k).mean())


def mean_reciprocal_rank(scores: Any, relevant: Any) -> float:
    """Mean over queries of 1 / rank of the best relevant item. Arguments and errors as in `recall_at_k`."""
    return float((1.0 / best_ranks(scores, relevant)).mean())


def median_rank(scores: Any, relevant: Any) -> float:
    """Median over queries of the rank of the best relevant item. Arguments and errors as in `recall_at_k`."""
    return float(np.median(best_ranks(scores, relevant)))


def ndcg_at_k(scores: Any, gains: Any, k: Any) -> float:
    """Mean over queries of the discounted gain of the first k items over the best that any order reaches.

    The discount is 1 / log2(1 + rank). Items with equal scores are ordered from the lowest gain to the highest.

    Args:
        scores: (nq, n), higher is better.
        gains: (nq, n), finite and not negative, one above 0 in each row.
        k: at least 1; a k past n takes all items.
    Raises: ValueError for shapes that do not fit, NaN, or a query without gain, naming the row.
    Source: Jarvelin and Kekalainen 2002, with the discount log2(1 + rank) that is usual since.
    """
    check_k(k)
    scores = as_scores(scores)
    gains = as_gains(gains, scores.shape)
    found = discounted_sum(np.take_along_axis(gains, np.lexsort((gains, -scores), axis=1), axis=1), k)
    best = discounted_sum(-np.sort(-gains, axis=1), k)
    return float((found / best).mean())


def retrieval_report(scores: Any, relevant: Any, ks: Iterable[Any] = (1, 5, 10)) -> dict[str, float]:
    """`recall_at_<k>` for each k, `mrr`, `median_rank` and the number of `queries` and `items`, in one pass."""
    ks = tuple(ks)
    for k in ks:
        check_k(k)
    scores = as_scores(scores)
    ranks = best_ranks(scores, relevant)
    report = {f"recall_at_{k}": float((ranks <= k).mean()) for k in ks}
    report |= {"mrr": float((1.0 / ranks).mean()), "median_rank": float(np.median(ranks))}
    return report | {"queries": len(scores), "items": scores.shape[1]}


def recall_from_hits(found_relevant: Any, k: Any) -> float:
    """`recall_at_k` from ranked lists: the share of queries with a relevant item in their first k places.

    Args:
        found_relevant: (nq, depth) bool, whether the item in each place is relevant; False where a list is padded.
        k: 1 to depth.
    Raises: ValueError for a k past the lists' depth: what lies below is unknown.
    """
    return float(as_found(found_relevant, k).any(axis=1).mean())


def mrr_from_hits(found_relevant: Any, k: Any) -> float:
    """Mean over queries of 1 / first relevant place, 0 where the first k hold none (MRR@k). See `recall_from_hits`."""
    found = as_found(found_relevant, k)
    return float(np.where(found.any(axis=1), 1.0 / (1 + found.argmax(axis=1)), 0.0).mean())


def best_ranks(scores: Any, relevant: Any) -> Int[np.ndarray, " q"]:
    """Rank of each query's best relevant item: one more than the irrelevant items that score as much or more."""
    scores = as_scores(scores)
    relevant = as_relevant(relevant, scores.shape)
    best = scores.max(axis=1, keepdims=True, where=relevant, initial=-np.inf)
    return 1 + ((scores >= best) & ~relevant).sum(axis=1)


def discounted_sum(gains: Float[np.ndarray, "q n"], k: int) -> Float[np.ndarray, " q"]:
    """Sum of the first k gains, each divided by log2(1 + rank)."""
    first = gains[:, :k]
    return first @ (1.0 / np.log2(2.0 + np.arange(first.shape[1])))


def check_k(k: Any) -> None:
    """ValueError unless k is an integer of at least 1."""
    if isinstance(k, bool) or not isinstance(k, int | np.integer) or k < 1:
        raise ValueError(f"k must be an integer of at least 1, got {k!r}")


def as_scores(scores: Any) -> Float[np.ndarray, "q n"]:
    """(nq, n) float32 or float64 without NaN."""
    array = as_numpy(scores)
    if array.dtype.kind not in "fiub" or array.ndim != 2 or 0 in array.shape:
        raise ValueError(f"scores must be (queries, items) numbers, not empty, got {array.shape} {array.dtype}")
    array = array if array.dtype in (np.float32, np.float64) else array.astype(np.float64)
    refuse_rows(np.isnan(array).any(axis=1), "scores: row {} holds NaN")
    return array


def as_relevant(relevant: Any, shape: tuple[int, ...]) -> Bool[np.ndarray, "q n"]:
    """(nq, n) bool with a True in every row, from such a matrix or from (nq,) indices."""
    array = as_numpy(relevant)
    queries, items = shape
    if array.dtype.kind in "iu" and array.shape == (queries,):
        refuse_rows((array < 0) | (array >= items), f"relevant: row {{}} names an item outside 0 to {items - 1}")
        return array[:, None] == np.arange(items)
    if array.dtype != np.bool_ or array.shape != shape:
        raise ValueError(
            f"relevant must be {shape} bool or ({queries},) integers, to match scores {shape}; "
            f"got {array.shape} {array.dtype}"
        )
    refuse_rows(~array.any(axis=1), "relevant: query {} has no relevant item, so it has no rank")
    return array


def as_gains(gains: Any, shape: tuple[int, ...]) -> Float[np.ndarray, "q n"]:
    """(nq, n) float64, finite, not negative, and not all 0 in any row."""
    array = as_numpy(gains)
    if array.dtype.kind not in "fiub" or array.shape != shape:
        raise ValueError(f"gains must be numbers of shape {shape}, as scores; got {array.shape} {array.dtype}")
    array = array.astype(np.float64)
    refuse_rows(~(np.isfinite(array) & (array >= 0)).all(axis=1), "gains: row {} holds a negative or not finite gain")
    refuse_rows(~(array > 0).any(axis=1), "gains: query {} has no relevant item: every gain is 0")
    return array


def as_found(found_relevant: Any, k: Any) -> Bool[np.ndarray, "q k"]:
    """The first k places of (nq, depth) bool."""
    check_k(k)
    array = as_numpy(found_relevant)
    if array.dtype != np.bool_ or array.ndim != 2 or 0 in array.shape:
        raise ValueError(f"found_relevant must be (queries, depth) bool, not empty, got {array.shape} {array.dtype}")
    if k > array.shape[1]:
        raise ValueError(f"k = {k} asks past the lists' depth of {array.shape[1]}")
    return array[:, :k]


def refuse_rows(bad: Any, message: str) -> None:
    """ValueError that names the first bad row; bad: (q,) bool."""
    if bad.any():
        raise ValueError(message.format(int(bad.argmax())))
