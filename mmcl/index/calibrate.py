"""The effort of searches in an index that factory="auto" chose: measured when it is built, so that recall is kept.

Queries or a bank tell it. Without them random embeddings of the query modalities do, since no fixed share of the lists
keeps a recall: what 0.95 takes is between 0.01 and 0.4 of them, by the data (measured on 500,000 vectors).

Random queries point nowhere: they kept a recall of 0.95 on all kinds of vectors in `python
eval/benchmarks/auto_factory.py`, at up to 20 times the lists of true ones. They are no promise: where true queries
share a direction, as embeddings that are positive everywhere, or lie where items hardly differ, 0.95 on random ones
came to 0.84 and 0.56 on true ones. `index.reason` therefore says what set the effort.
"""

import sys
import warnings
from typing import Any

import numpy as np
import pyarrow as pa
from jaxtyping import Float32

from mmcl.index.bank import random_embeddings
from mmcl.index.building import Type
from mmcl.index.fusion import Fusion
from mmcl.index.items import Items
from mmcl.index.local import LocalTuples
from mmcl.index.tune import (
    EFFORTS,
    found_shares,
    most_lists,
    surely_reaches,
    true_best,
    tune_vectors,
)
from mmcl.index.tuple_index import TupleIndex

K, RANDOM_QUERIES, BANK_QUERIES = 10, 256, 512
ADVICE = "a guess for true ones, which may need far less (queries=, `mmcl index tune`)"


def settled(
    fusion: Fusion, ids: np.ndarray, kind: Type, queries: Any, recall_target: float, device: str, base: Any
) -> dict[str, Any]:
    """What the manifest says of the type of an index that is built and does not count yet, its effort measured.

    Args:
        ids: (n,) of the items.
        kind: the type as it was chosen.
        queries: {query modality: (nq, d)} embeddings, or None; see `fit_effort`.
        device: on which it will be searched.
        base: a backend of all vectors.
    """
    index = TupleIndex(fusion, LocalTuples(base, Items(ids, pa.table({}))))
    index._tuples.move(device)
    index.search_parameters, index.reason = dict(kind.parameters), kind.reason
    fit_effort(index, queries, recall_target, True)
    return {**kind.about(), "search_parameters": index.search_parameters, "reason": index.reason}


def fit_effort(index: TupleIndex, queries: Any, recall_target: float, encoded: Any = None) -> None:
    """Set `index.search_parameters` to the least effort that reaches a recall@10, of what was to reach one.

    Args:
        index: just built.
        queries: {query modality: rows}, true ones, as in `tune`; None: of a type that "auto" chose, the bank or random
            queries, and another type stays as it is.
    """
    if queries is not None:
        vectors, told = index._fusion.queries(queries, index.model, encoded), "queries set the effort"
    elif index.reason is None or not index.search_parameters:
        return
    elif index._fusion.bank is not None:
        vectors, told = bank_rows(index._fusion), "rows of the bank set the effort"
    else:
        vectors, told = None, f"random queries set the effort, {ADVICE}"
    if vectors is None:
        reached, recall = calibrate(index, random_queries(index._fusion), recall_target)
    else:
        result = tune_vectors(index, vectors, K, recall_target)
        reached, recall = result.reached, result.chosen.recall
    if index.reason is not None and index.search_parameters:
        index.reason += f"; at build {told}: recall {recall:.3f} of {recall_target:g}"
    if not reached:
        warnings.warn(
            f"no search parameters of factory {index.info()['factory']!r} surely reach recall@{K} {recall_target:g}: "
            f"the best, {index.search_parameters}, has {recall:.3f}; a type with larger codes or 'Flat' would",
            stacklevel=callers_level(),
        )


def callers_level() -> int:
    """`stacklevel` of who called this package, for a warning of the function that asks."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and str(frame.f_globals.get("__name__", "")).startswith("mmcl."):
        level, frame = level + 1, frame.f_back
    return level


def bank_rows(fusion: Fusion) -> Float32[np.ndarray, "nq width"]:
    """Some rows of the bank as queries."""
    bank: Any = fusion.bank
    return fusion.bank_queries(bank[np.linspace(0, len(bank) - 1, min(len(bank), BANK_QUERIES)).round().astype(int)])


def random_queries(fusion: Fusion) -> Float32[np.ndarray, "nq width"]:
    """Query vectors of random embeddings of all query modalities."""
    return fusion.queries(random_embeddings(fusion.query_modalities, fusion.score.dim, RANDOM_QUERIES), None, True)


def calibrate(index: TupleIndex, vectors: Float32[np.ndarray, "nq width"], recall_target: float) -> tuple[bool, float]:
    """Set the least effort that reaches a recall@10, the most there is where none does; returns whether, and what.

    In two steps, each of which stops as soon as it can, since an index may be large: first how many candidates full
    vectors have to rank, with all lists; they may cost half of what may be missed. Then how many lists.
    """
    k = min(K, len(index))
    truth = true_best(index, vectors, k, None, None)
    setting = {**index.search_parameters, "nprobe": most_lists(index)}

    def least(name: str, values: list[Any], target: float) -> tuple[bool, float]:
        for value in values:
            setting[name] = value
            shares = found_shares(index, vectors, k, setting, truth)
            if surely_reaches(shares, target):
                break
        return surely_reaches(shares, target), float(shares.mean())

    if "k_factor" in setting:
        least("k_factor", EFFORTS["k_factor"], (1 + recall_target) / 2)
    found = least("nprobe", list_steps(most_lists(index)), recall_target)
    index.search_parameters = setting
    return found


def list_steps(lists: int) -> list[int]:
    """Numbers of lists to try, 1.4 times more each, up to all."""
    steps = {round(lists / 2 ** (half / 2)) for half in range(17)}
    return sorted(step for step in steps if step)
