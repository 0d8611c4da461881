"""What a search returns."""

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
from jaxtyping import Float32, Int64

from mmcl.index.items import Items


class Hits:
    """The k best items of each query, best first; iterate for one list of (id, score, metadata) a query.

    Args:
        items: of the index.
        scores: (nq, k) float32, -inf where there is no item.
        rows: (nq, k) row numbers, -1 where there is no item.
        exact: whether the scores are the score function's own, not estimates from quantised vectors.
    """

    kind = "score"
    """`scores` are values of the score function."""

    def __init__(self, items: Items, scores: Float32[np.ndarray, "nq k"], rows: Int64[np.ndarray, "nq k"], exact: bool):
        self.scores = scores
        self.ids = items.ids_at(rows)
        """(nq, k) int64, padded by -1; or str in an object array, padded by ""."""
        self.counts = (rows >= 0).sum(axis=1)
        """(nq,) how many of the k there are."""
        self.exact = exact
        self._items, self._row_numbers = items, rows

    def __len__(self) -> int:
        return len(self.scores)

    def __iter__(self) -> Iterator[list[tuple[int | str, float, dict[str, Any]]]]:
        for ids, scores, metadata in zip(self.ids.tolist(), self.scores.tolist(), self.metadata, strict=True):
            yield list(zip(ids, scores, metadata, strict=False))  # metadata ends where the padding begins

    def __repr__(self) -> str:
        nq, k = self.scores.shape
        return f"Hits({nq} queries, k={k}, exact={self.exact}, kind={self.kind!r})"

    @functools.cached_property
    def metadata(self) -> list[list[dict[str, Any]]]:
        """One list of dicts a query, without padding; looked up when first asked for."""
        found = self._items.metadata_at(self._row_numbers[self._row_numbers >= 0])
        ends = np.cumsum(self.counts).tolist()
        return [found[start:end] for start, end in zip([0, *ends], ends, strict=False)]
