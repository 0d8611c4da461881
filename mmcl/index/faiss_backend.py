"""The vectors of a tuple index in FAISS: trained, added, searched, written and read."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, BinaryIO

import numpy as np
from jaxtyping import Float32, Int64

from mmcl.index.faiss_factory import (
    AUTO,
    largest_value,
    new_faiss_index,
    parts,
    reason,
    refuse_other_metrics,
    remove_shifts,
    returns_own_scores,
    rows_to_train,
)
from mmcl.index.faiss_params import check_parameters, filling_parameter, search_parameters
from mmcl.index.faiss_setup import load_faiss, prefer_faster_path

Rows = Float32[np.ndarray, "rows width"]
Found = tuple[Float32[np.ndarray, "nq k"], Int64[np.ndarray, "nq k"]]


class FaissBackend:
    """Rows 0..n-1 of fused vectors, ranked by raw inner product.

    Args:
        index: a FAISS index whose every part ranks by inner product.
        factory: the string that it was built from.
        width: of the fused vectors; the index may be wider, the rest is zeros.
    """

    def __init__(self, index: Any, factory: str, width: int):
        refuse_other_metrics(index, factory)
        self.index, self.factory, self.width = index, factory, width
        self.exact = returns_own_scores(index)

    @classmethod
    def build(cls, factory: Any, width: int, blocks: Iterable[Rows]) -> "FaissBackend":
        """Train on all fused vectors where the type needs it, and add them in order.

        Args:
            factory: FAISS factory string, or "auto".
            width: of the fused vectors.
            blocks: (rows, width) float32 each, consumed one by one where no training needs them together.
        Raises: ValueError for an unknown factory, too few rows to train on, and values that the type cannot hold.
        """
        factory = AUTO if factory == "auto" else factory
        index = new_faiss_index(factory, width)
        backend = cls(index, factory, width)
        limit = largest_value(index)
        blocks = (backend._padded(refuse_beyond(limit, block, factory, row)) for row, block in with_offsets(blocks))
        if index.is_trained and not any(isinstance(part, load_faiss().IndexNSG) for part in parts(index)):
            for block in blocks:
                index.add(block)
            return backend
        rows = np.concatenate([np.empty((0, index.d), np.float32), *blocks])
        backend._train(rows)
        backend._add(rows)
        return backend

    def __len__(self) -> int:
        return self.index.ntotal

    @property
    def padded_width(self) -> int:
        return self.index.d

    def search(self, queries: Rows, k: int, parameters: Mapping[str, Any]) -> Found:
        """The k rows of largest inner product with each query.

        Where a search ends before it has seen k rows (few lists probed, a graph left early) it is repeated for those
        queries with twice the effort, until they are filled or all has been visited.

        Args:
            queries: (nq, width) float32.
            k: at most the number of rows.
            parameters: FAISS search parameters by name.
        Returns: scores (nq, k) float32 and row numbers (nq, k) int64, best first, -1 where there are none.
        """
        check_parameters(self.index, self.factory, parameters)
        queries = self._padded(queries)
        scores, rows = self._search(queries, k, parameters)
        filling = filling_parameter(self.index)
        if filling is None:
            return scores, rows
        name, default, limit = filling
        effort = int(parameters.get(name, default))
        short = np.flatnonzero((rows < 0).any(axis=1))
        while len(short) and effort < limit:
            effort = min(2 * effort, limit)
            scores[short], rows[short] = self._search(queries[short], k, {**parameters, name: effort})
            short = short[(rows[short] < 0).any(axis=1)]
        return scores, rows

    def check_parameters(self, parameters: Mapping[str, Any]) -> None:
        """ValueError for a search parameter that this type does not have."""
        check_parameters(self.index, self.factory, parameters)

    def write(self, file: BinaryIO) -> None:
        """Write the index; OSError where the disk is full (FAISS's own file writer swallows that)."""
        faiss = load_faiss()
        faiss.write_index(self.index, faiss.PyCallbackIOWriter(file.write))

    def stored_bytes(self) -> int:
        """How many bytes `write` writes."""
        faiss, sizes = load_faiss(), []

        def count(part: bytes) -> int:
            sizes.append(len(part))
            return len(part)

        faiss.write_index(self.index, faiss.PyCallbackIOWriter(count))
        return sum(sizes)

    @classmethod
    def read(cls, file: BinaryIO, factory: str, width: int) -> "FaissBackend":
        """Read what `write` wrote."""
        faiss = load_faiss()
        return cls(faiss.read_index(faiss.PyCallbackIOReader(file.read)), factory, width)

    def _search(self, queries: Rows, k: int, given: Mapping[str, Any]) -> Found:
        prefer_faster_path(self.index.d)
        return self.index.search(queries, k, params=search_parameters(self.index, given, k))

    def _padded(self, rows: Rows) -> Float32[np.ndarray, "rows padded"]:
        missing = self.index.d - rows.shape[1]
        return np.ascontiguousarray(np.pad(rows, ((0, 0), (0, missing))) if missing else rows, dtype=np.float32)

    def _train(self, rows: Rows) -> None:
        if self.index.is_trained:
            return
        needed = rows_to_train(self.index)
        if len(rows) < needed:
            raise ValueError(
                f"factory {self.factory!r} needs at least {needed} items to be trained on, got {len(rows)}; "
                "choose fewer lists or bits, or 'Flat'"
            )
        prefer_faster_path(self.index.d)
        try:
            self.index.train(rows)
        except RuntimeError as error:
            told = f"FAISS cannot train factory {self.factory!r} on {len(rows)} items: {reason(error)}"
            raise ValueError(told) from None
        remove_shifts(self.index)

    def _add(self, rows: Rows) -> None:
        if len(rows):
            try:
                self.index.add(rows)
            except RuntimeError as error:
                told = f"FAISS cannot build factory {self.factory!r} of {len(rows)} items: {reason(error)}"
                raise ValueError(told) from None


def with_offsets(blocks: Iterable[Rows]) -> Iterator[tuple[int, Rows]]:
    """Each block with the number of its first row."""
    row = 0
    for block in blocks:
        yield row, block
        row += len(block)


def refuse_beyond(limit: float, block: Rows, factory: str, offset: int) -> Rows:
    """The block; ValueError that names the first row with a coordinate beyond the limit."""
    beyond = (
        np.flatnonzero((np.abs(block) > limit).any(axis=1)) if limit < np.inf and block.size else np.empty(0, np.int64)
    )
    if len(beyond):
        row = int(beyond[0])
        raise ValueError(
            f"row {row + offset}: its fused vector reaches {np.abs(block[row]).max():g}, beyond the {limit:g} that "
            f"float16 codes of factory {factory!r} hold; scale the embeddings down or choose another type"
        )
    return block
