"""What a search returns."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

Metadata = list[list[dict[str, Any]]]


class Hits:
    """The k best items of each query, best first; iterate for one list of (id, score, metadata) a query.

    Args:
        ids: (nq, k) int64, padded by -1; or str in an object array, padded by "".
        scores: (nq, k) float32, -inf where there is no item.
        counts: (nq,) how many of the k there are.
        look_up: gives the metadata, one list of dicts a query.
        exact: whether the scores are the score function's own, not estimates from quantised vectors.
        kind: "score", the score function's values; or "pmi", log p(query | item) / p(query) in nats, where the index
            has a bank.
    """

    def __init__(
        self,
        ids: np.ndarray,
        scores: np.ndarray,
        counts: np.ndarray,
        look_up: Callable[[], Metadata],
        exact: bool,
        kind: str = "score",
    ):
        self.ids, self.scores, self.counts = ids, scores, counts
        self.exact, self.kind = exact, kind
        self._look_up = look_up

    def __len__(self) -> int:
        return len(self.scores)

    def __iter__(self) -> Iterator[list[tuple[int | str, float, dict[str, Any]]]]:
        for ids, scores, metadata in zip(self.ids.tolist(), self.scores.tolist(), self.metadata, strict=True):
            yield list(zip(ids, scores, metadata, strict=False))  # metadata ends where the padding begins

    def __repr__(self) -> str:
        nq, k = self.scores.shape
        return f"Hits({nq} queries, k={k}, exact={self.exact}, kind={self.kind!r})"

    @functools.cached_property
    def metadata(self) -> Metadata:
        """One list of dicts a query, without padding; looked up when first asked for."""
        return self._look_up()


def split_by(flat: list[Any], counts: np.ndarray) -> list[list[Any]]:
    """Pieces of these lengths."""
    ends = np.cumsum(counts).tolist()
    return [flat[start:end] for start, end in zip([0, *ends], ends, strict=False)]
