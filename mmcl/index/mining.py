"""What an index tells about its own items: which are nearly the same, and which a query mistakes for its answer."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

import numpy as np

from mmcl.index.hits import Hits, split_by
from mmcl.index.tuple_index import TupleIndex

QUERIES = 256
"""Queries whose candidates are scored again at once."""
PAIRS = 16384
"""Pairs whose similarity is taken at once."""


@dataclass(frozen=True, eq=False)
class Pairs:
    """Pairs of items, the most similar first; iterate for (id, id, similarity). The first of two was stored first."""

    ids: np.ndarray
    """(pairs, 2) int64, or str in an object array."""
    similarities: np.ndarray
    """(pairs,) float32."""

    def __len__(self) -> int:
        return len(self.ids)

    def __iter__(self) -> Iterator[tuple[Any, Any, float]]:
        for (first, second), similarity in zip(self.ids.tolist(), self.similarities.tolist(), strict=True):
            yield first, second, similarity


def near_duplicates(index: TupleIndex, threshold: Any = 0.95, *, batch_size: Any = 2048) -> Pairs:
    """All pairs of stored items whose item vectors have a cosine of `threshold` or more; none is missed.

    Ranking by score would not do: item vectors differ in length, and few find themselves first. Vectors of zeros are
    similar to nothing (cosine 0). In a type that quantises, the vectors are the decoded ones: items that share a code
    are equal. Of an index with a bank, the vectors are without the bank's coordinate.

    O(n^2 * width) time. In memory: all n vectors in float32, 9 * batch_size^2 bytes, and the pairs found.

    Args:
        threshold: between -1 and 1.
        batch_size: items compared with as many others at once.
    Raises: ValueError for another threshold or batch size.
    """
    if isinstance(threshold, bool) or not isinstance(threshold, Real) or not -1 <= float(threshold) <= 1:
        raise ValueError(f"threshold must be between -1 and 1, got {threshold!r}")
    size = positive_integer(batch_size, "batch_size")
    ids = index._tuples.ids()
    rows = np.empty((len(ids), index.score.width), np.float32)
    for start in range(0, len(ids), size):
        vectors = index._tuples.vectors(ids[start : start + size].tolist())[:, : rows.shape[1]]
        rows[start : start + size] = about_unit_length(vectors)
    first, second, similarities = similar_pairs(rows, float(threshold), size)
    order = np.lexsort((second, first, -similarities))
    return Pairs(ids[np.stack([first, second], axis=1)[order]], similarities[order])


def about_unit_length(rows: np.ndarray) -> np.ndarray:
    """Rows times powers of two, which costs no precision, for a length between a half and 1; zeros stay."""
    exponents = np.frexp(lengths_of(rows))[1]
    return np.ldexp(rows, -exponents[:, None])


def similar_pairs(rows: np.ndarray, threshold: float, size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows i < j of (n, width) float32, about of unit length, with a cosine of at least `threshold`; and the cosines.

    float32 products find the candidates, with room for their error: at most `width` units of roundoff, and a few for
    the division (Higham 2002, section 3.1). What they are is taken in float64, so that it depends on no block, and
    equal rows have 1.
    """
    slack = (rows.shape[1] + 8) * 2.0**-24
    lengths = lengths_of(rows)
    floor = np.where(lengths > 0, lengths * (threshold - slack), threshold - slack).astype(np.float32)
    scale = np.where(lengths > 0, lengths, 1).astype(np.float32)
    found = [(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.float32))]
    for i in range(0, len(rows), size):
        for j in range(i, len(rows), size):
            products = rows[i : i + size] @ rows[j : j + size].T
            pairs = np.stack(np.nonzero(products >= floor[i : i + size, None] * scale[j : j + size]))
            pairs += [[i], [j]]
            pairs = pairs[:, pairs[0] < pairs[1]]
            for start in range(0, pairs.shape[1], PAIRS):
                first, second = pairs[:, start : start + PAIRS]
                similarities = cosines(rows[first], rows[second])
                good = similarities >= np.float32(threshold)
                found.append((first[good], second[good], similarities[good]))
    first, second, similarities = (np.concatenate(parts) for parts in zip(*found, strict=True))
    return first, second, similarities


def cosines(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """(n,) float32 cosines of rows, taken in float64; 0 where one has no length."""
    products = np.einsum("nd,nd->n", a, b, dtype=np.float64)
    lengths = np.sqrt(np.einsum("nd,nd->n", a, a, dtype=np.float64) * np.einsum("nd,nd->n", b, b, dtype=np.float64))
    return (products / np.where(lengths > 0, lengths, 1)).clip(-1, 1).astype(np.float32)


def lengths_of(rows: np.ndarray) -> np.ndarray:
    """(n,) float64."""
    return np.sqrt(np.einsum("nd,nd->n", rows, rows, dtype=np.float64))


def hard_negatives(
    index: TupleIndex,
    queries: Any,
    positives: Any,
    k: Any = 10,
    *,
    margin: Any = None,
    relative_margin: Any = None,
    skip: Any = 0,
    range_max: Any = 100,
    where: Any = None,
    encoded: Any = None,
    **parameters: Any,
) -> Hits:
    """The k items that each query ranks highest among those that are not its positives, to train against.

    What scores about as high as the positive is likely one that nobody marked. With a margin only items are taken that
    score below the positive's score less the margin; of several positives the lowest counts (positive-aware mining:
    Moreira et al. 2024, NV-Retriever; the margins are those of sentence-transformers' `mine_hard_negatives`).

    Scores, the positives' too, are inner products with the stored vectors in float64, decoded where they are
    quantised. So copies of a positive have its very score, and any margin, 0 too, leaves them out.

    Args:
        queries: as in `TupleIndex.search`.
        positives: for each query the id of its positive, or a list of ids.
        margin: in units of the score.
        relative_margin: share of the positive's score, 0.05 for 5 %: of its absolute value where that is negative.
        skip: leave out so many of the best that remain.
        range_max: how many of the best items that are no positives are looked at.
        where, encoded, parameters: as in `TupleIndex.search`.
    Returns: hits; where fewer than k remain, `hits.counts` says so. Their ids are the rows of a dataset that was
        indexed without ids: `dataset[hits.ids[0, 0]]` is the first query's hardest negative.
    Raises: KeyError naming the query row and the positive that is not in the index; ValueError for a query row without
        positives, senseless numbers, and what `TupleIndex.search` refuses.
    """
    k, skip = positive_integer(k, "k"), positive_integer(skip, "skip", least=0)
    depth = positive_integer(range_max, "range_max")
    if depth < k + skip:
        raise ValueError(f"range_max = {range_max} leaves no {k} items behind {skip} that are skipped; raise it")
    margins = [checked_margin(margin, "margin"), checked_margin(relative_margin, "relative_margin")]
    vectors = index._fusion.queries(queries, index.model, encoded)
    known = positives_of(positives, len(vectors), index)
    fetch = min(len(index), depth + max(map(len, known), default=0))
    parameters = {**index.search_parameters, **parameters}
    index._tuples.check_parameters(parameters)
    chosen: list[tuple[list[Any], np.ndarray]] = []
    for start in range(0, max(len(vectors), 1), QUERIES):
        part = slice(start, start + QUERIES)
        found = index._tuples.search(vectors[part], max(fetch, 1), where, parameters)
        for query, keys, count, good in zip(vectors[part], found.ids, found.counts, known[part], strict=True):
            rest = [key for key in keys[:count].tolist() if key not in good][:depth]
            chosen.append(negatives_of(index, query, rest, good, margins, slice(skip, skip + k)))
    return as_hits(index, chosen, k, found.ids.dtype)


def negatives_of(
    index: TupleIndex, query: np.ndarray, rest: list[Any], good: set[Any], margins: list[float | None], part: slice
) -> tuple[list[Any], np.ndarray]:
    """Of the ids in `rest` those in `part` of the ranks that score low enough, and their scores, best first."""
    rows = index._tuples.vectors([*good, *rest]).astype(np.float64)
    scores = (rows * query).sum(axis=1).astype(np.float32)
    lowest, scores = scores[: len(good)].min(), scores[len(good) :]
    absolute, relative = margins
    low = np.ones(len(rest), bool)
    if absolute is not None:
        low &= scores < lowest - absolute
    if relative is not None:
        low &= scores < lowest - relative * abs(lowest)
    order = np.argsort(-scores, kind="stable")
    order = order[low[order]][part]
    return [rest[row] for row in order], scores[order]


def positives_of(positives: Any, count: int, index: TupleIndex) -> list[set[Any]]:
    """The ids of each query's positives; errors name the query row."""
    if isinstance(positives, Mapping):
        raise ValueError("positives must be an id, or a list of ids, for each query in order; got a dict")
    found = [as_list(each) for each in as_list(positives)]
    if len(found) != count:
        raise ValueError(f"{count} queries need the positives of {count}, got {len(found)}")
    for row, ids in enumerate(found):
        if not ids:
            raise ValueError(f"query row {row} has no positives; leave it out")
        for key in ids:
            if key not in index:
                raise KeyError(f"query row {row}: no item {key!r} in this index to be its positive")
    return [set(ids) for ids in found]


def as_list(value: Any) -> list[Any]:
    """A list of what there are several of, or of the one."""
    value = value.tolist() if hasattr(value, "tolist") else value
    return list(value) if isinstance(value, Iterable) and not isinstance(value, str) else [value]


def as_hits(index: TupleIndex, chosen: list[tuple[list[Any], np.ndarray]], k: int, kind: np.dtype) -> Hits:
    """Ids, which are of this dtype, and scores of each query as hits, padded."""
    ids = np.full((len(chosen), k), "" if kind.kind == "O" else -1, kind)
    scores = np.full((len(chosen), k), -np.inf, np.float32)
    for row, (keys, values) in enumerate(chosen):
        ids[row, : len(keys)], scores[row, : len(keys)] = keys, values
    counts = np.array([len(keys) for keys, _ in chosen], np.int64)
    flat = [key for keys, _ in chosen for key in keys]
    return Hits(ids, scores, counts, lambda: split_by(index.get(flat), counts), index._tuples.exact, index.kind)


def positive_integer(value: Any, name: str, least: int = 1) -> int:
    """As int; ValueError otherwise."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise ValueError(f"{name} must be an integer >= {least}, got {value!r}")
    return int(value)


def checked_margin(value: Any, name: str) -> float | None:
    """As float; ValueError for what is no number >= 0."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 <= float(value) < np.inf:
        raise ValueError(f"{name} must be a number >= 0, got {value!r}")
    return float(value)
