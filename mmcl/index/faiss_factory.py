"""FAISS factory strings: built for the raw inner product, or refused with a reason."""

import re
from collections.abc import Iterator
from typing import Any

from mmcl.index.faiss_setup import load_faiss

AUTO = "Flat"
MIPS = "MIPS,"
"""Before a factory string: one more coordinate lifts every item to the same length, queries have 0 there. Inner
products stay, while lists and graphs find their way as among unit vectors (Bachrach et al. 2014)."""
REFUSED = {
    "NSG": "nothing can be added to it once it is built; use HNSW",
    "L2norm": "it divides every vector by its norm, and the score would no longer be the model's",
    "ITQ": "it centres vectors and divides them by their norm, and the score would no longer be the model's",
    "PCAW": "it rescales the coordinates, which changes every inner product; use PCA or PCAR",
    "IDMap": "ids are kept beside the FAISS index; give them as `ids`",
    "SQ8_direct": "it rounds every coordinate to a whole number; use SQ8",
}
DIVISIBILITY = re.compile(r"'[^']*% *\w+ == 0\)?'")
"""In FAISS's error for a width that is no multiple of what a type needs."""
MAX_PADDED_WIDTH = 4096
OPQ_CODE_WORDS = 256
"""OPQ trains its rotation for 8-bit codes, whatever codes follow."""
FLOAT16_MAX = 65504.0


def new_faiss_index(factory: Any, width: int) -> Any:
    """An empty FAISS index for the raw inner product, of the least width >= `width` that its factory string takes.

    Raises: ValueError that quotes the string where FAISS does not know it, or where it changes inner products.
    """
    refuse_factory(factory)
    factory = factory.removeprefix(MIPS)
    for padded in range(width, max(2 * width, MAX_PADDED_WIDTH) + 1):
        try:
            index = load_faiss().index_factory(padded, factory, load_faiss().METRIC_INNER_PRODUCT)
        except (RuntimeError, MemoryError) as error:
            if DIVISIBILITY.search(str(error)):
                continue
            raise ValueError(f"FAISS cannot build factory {factory!r} for width {width}: {reason(error)}") from None
        if all(padded_for_training(transform) for transform in transforms(index)):
            refuse_other_metrics(index, factory)
            refuse_without_effort(index, factory)
            skip_polysemous_training(index)
            return index
    raise ValueError(f"factory {factory!r} fits no width from {width} to {max(2 * width, MAX_PADDED_WIDTH)}")


def refuse_factory(factory: Any) -> None:
    """ValueError for what is no factory string, and for parts that break the raw inner product."""
    if not isinstance(factory, str) or not factory.isascii():
        raise ValueError(f"factory must be a FAISS factory string such as 'IVF64,PQ16', got {factory!r}")
    for name, why in REFUSED.items():
        if any(part.startswith(name) for part in re.split(r"[,()]", factory)):
            raise ValueError(f"factory {factory!r}: {name} is refused: {why}")
    if re.search(r"(?<!\d)0+(?!\d)", factory):
        raise ValueError(f"factory {factory!r} asks for 0 of something; FAISS would crash on it")


def padded_for_training(transform: Any) -> bool:
    """OPQ finds out about its width in training only, after the k-means of everything before it."""
    return not hasattr(transform, "pq") or transform.d_out % transform.M == 0


def refuse_other_metrics(index: Any, factory: str) -> None:
    """ValueError where a part of the index does not rank by inner product: some FAISS types ignore the metric."""
    for part in parts(index):
        if part.metric_type != load_faiss().METRIC_INNER_PRODUCT:
            raise ValueError(
                f"FAISS builds factory {factory!r} with a {type(part).__name__} that ranks by another metric than the "
                "inner product; choose another type, such as 'IVF64,PQ16' or 'HNSW32,SQ8'"
            )


def refuse_without_effort(index: Any, factory: str) -> None:
    """ValueError for inverted lists of which FAISS cannot be told how many to probe."""
    for part in parts(index):
        if isinstance(part, load_faiss().IndexIVFAdditiveQuantizerFastScan):
            raise ValueError(f"factory {factory!r}: FAISS takes no nprobe for it; use a PQ such as 'IVF64,PQ16x4fs'")


def skip_polysemous_training(index: Any) -> None:
    """PQ orders its code words for a Hamming filter that no search here uses, in 100 times the rest's time."""
    for part in parts(index):
        if hasattr(part, "do_polysemous_training"):
            part.do_polysemous_training = False


def parts(index: Any) -> Iterator[Any]:
    """The index and every index inside it, as their own classes."""
    index = own_class(index)
    yield index
    for name in ("index", "base_index", "refine_index", "quantizer", "storage"):
        inner = getattr(index, name, None)
        if inner is not None:
            yield from parts(inner)


def own_class(index: Any) -> Any:
    """`index` as its own C++ class. It owns no memory: the caller keeps the outermost index alive meanwhile."""
    return load_faiss().downcast_index(index)


def transforms(index: Any) -> list[Any]:
    """The linear maps applied before the index proper."""
    faiss = load_faiss()
    found = []
    for part in parts(index):
        chain = getattr(part, "chain", None)
        found += [faiss.downcast_VectorTransform(chain.at(i)) for i in range(chain.size())] if chain else []
    return found


def rows_to_train(index: Any) -> int:
    """The fewest rows that its k-means take: one a list, and one a code word of each sub-quantiser."""
    needed = [1, *(part.nlist for part in parts(index) if hasattr(part, "nlist"))]
    for part in (*parts(index), *transforms(index)):
        if hasattr(part, "pq"):
            needed.append(part.pq.ksub if part.pq is not None else OPQ_CODE_WORDS)
    return max(needed)


def refuse_few_rows(index: Any, factory: Any, rows: int) -> None:
    """ValueError where an untrained index needs more rows to be trained on."""
    needed = rows_to_train(index)
    if rows < needed and not index.is_trained:
        raise ValueError(
            f"factory {factory!r} needs at least {needed} items to be trained on, got {rows}; "
            "choose fewer lists or bits, or 'Flat'"
        )


def remove_shifts(index: Any) -> None:
    """PCA subtracts the mean; inner products survive its rotation, not the shift, so the shift is taken out."""
    faiss = load_faiss()
    for transform in transforms(index):
        if isinstance(transform, faiss.PCAMatrix):
            transform.b.resize(0)
            transform.have_bias = False


def returns_own_scores(index: Any) -> bool:
    """Whether its scores are inner products of the vectors that were added, not of quantised or rotated ones."""
    faiss = load_faiss()
    index = own_class(index)
    if isinstance(index, faiss.IndexRefine):
        return returns_own_scores(index.refine_index)
    if isinstance(index, faiss.IndexHNSW | faiss.IndexNSG):
        return returns_own_scores(index.storage)
    return isinstance(index, faiss.IndexFlat | faiss.IndexIVFFlat)


def largest_value(index: Any) -> float:
    """The largest coordinate that float16 codes in this index can hold; a residual may be twice as large."""
    faiss = load_faiss()
    limit = float("inf")
    for part in parts(index):
        if hasattr(part, "sq") and part.sq.qtype == faiss.ScalarQuantizer.QT_fp16:
            limit = FLOAT16_MAX / (2 if getattr(part, "by_residual", False) else 1)
    return limit


def reason(error: Exception) -> str:
    """The end of a FAISS error, without the C++ names before it."""
    return " ".join(str(error).split()).rsplit("Error: ", 1)[-1].rsplit(".cpp:", 1)[-1]
