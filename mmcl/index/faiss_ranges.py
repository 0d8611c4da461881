"""What codes can hold: scalar quantisers clip silently beyond the range that training saw, half precision overflows."""

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from jaxtyping import Float32, Float64

from mmcl.index.faiss_factory import own_class
from mmcl.index.faiss_setup import load_faiss

Rows = Float32[np.ndarray, "rows width"]
BLOCK = 65536


def widen_ranges(index: Any, rows: np.ndarray, spare: float = 0.0) -> None:
    """Have every scalar quantiser inside hold all of these rows; the index must still be empty.

    A range that has to grow grows by `spare` of its width more: each time that codes are made anew costs half a step.
    """
    for sq, coordinates in quantised(index, rows):
        low, high = trained_range(sq)
        seen = [(block.min(axis=0), block.max(axis=0)) for block in coordinates if len(block)]
        if not seen:
            continue
        least, most = np.min([a for a, _ in seen], axis=0), np.max([b for _, b in seen], axis=0)
        if len(low) == 1:
            least, most = least.min(keepdims=True), most.max(keepdims=True)
        more = spare * (np.maximum(high, most) - np.minimum(low, least))
        low = np.where(least < low, least - more, low)
        high = np.where(most > high, most + more, high)
        load_faiss().copy_array_to_vector(np.concatenate([low, high - low]).astype(np.float32), sq.trained)


def clips(index: Any, rows: np.ndarray) -> bool:
    """Whether a scalar quantiser inside would clip a coordinate of these rows."""
    for sq, coordinates in quantised(index, rows):
        low, high = trained_range(sq)
        slack = 1e-5 * np.maximum(np.abs(low), np.abs(high))
        if any(((block < low - slack) | (block > high + slack)).any() for block in coordinates):
            return True
    return False


def trained_range(sq: Any) -> tuple[np.ndarray, np.ndarray]:
    """Lowest and highest value, of each coordinate or (1,) of all."""
    low, width = np.split(load_faiss().vector_to_array(sq.trained), 2)
    return low, low + width


def quantised(index: Any, rows: np.ndarray) -> Iterator[tuple[Any, Iterator[np.ndarray]]]:
    """Each trained scalar quantiser inside, with the blocks of coordinates that it would get for these rows."""
    faiss = load_faiss()
    index = own_class(index)
    if isinstance(index, faiss.IndexPreTransform):
        if any(True for _ in quantised(index.index, np.empty((0, index.index.d), np.float32))):
            yield from quantised(index.index, transformed(index, rows))
    elif isinstance(index, faiss.IndexRefine):
        yield from quantised(index.base_index, rows)
        yield from quantised(index.refine_index, rows)
    elif isinstance(index, faiss.IndexHNSW):
        yield from quantised(index.storage, rows)
    elif isinstance(index, faiss.IndexIVFScalarQuantizer) and has_range(index.sq):
        yield index.sq, (residuals(index, block) for block in blocks(rows))
    elif isinstance(index, faiss.IndexScalarQuantizer) and has_range(index.sq):
        yield index.sq, blocks(rows)


def transformed(index: Any, rows: np.ndarray) -> np.ndarray:
    """Rows after the linear maps in front of an index."""
    for number in range(index.chain.size()):
        rows = load_faiss().downcast_VectorTransform(index.chain.at(number)).apply_py(rows)
    return rows


def has_range(sq: Any) -> bool:
    """Whether this kind of code has a trained range (half precision has none)."""
    return sq.trained.size() > 0


def blocks(rows: np.ndarray) -> Iterator[np.ndarray]:
    """Rows, some thousands at a time."""
    return (rows[start : start + BLOCK] for start in range(0, len(rows), BLOCK))


def residuals(ivf: Any, rows: np.ndarray) -> np.ndarray:
    """What an IVF encodes: the row itself, or its difference from its list's centroid."""
    if not ivf.by_residual:
        return rows
    lists = ivf.quantizer.search(rows, 1)[1][:, 0]
    return rows - ivf.quantizer.reconstruct_batch(lists)


def squares(rows: Rows) -> Float64[np.ndarray, " rows"]:
    """Squared lengths; float64, so that lifting one vector does not depend on rounding."""
    return np.einsum("nd,nd->n", rows, rows, dtype=np.float64)


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
