"""Where the rows of a FAISS index lie in its file, so that they can be put there without an index that holds them.

An index is a tree: linear maps and refinements around leaves. A leaf holds codes, in one array in the order of the rows
(Flat, SQ8, PQ16) or in inverted lists (IVF). The bytes around the codes do not depend on them, and how many bytes the
codes take follows from their number. FAISS itself writes what stands around them, and makes every code.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float32, Int64, UInt8

from mmcl.index.faiss_factory import own_class
from mmcl.index.faiss_files import serialised
from mmcl.index.faiss_setup import load_faiss

MARKED_ROWS = 64
"""Random rows by whose codes an array of codes is found in a file."""
ROW_NUMBER = np.dtype("<i8")


@dataclass(frozen=True)
class Leaf:
    """A part of an index that holds codes. It owns no memory: the caller keeps the index alive."""

    index: Any
    maps: tuple[Any, ...]
    """Linear maps that rows go through before."""

    in_memory: bool = False
    """Whether FAISS can only build it there: graphs, and codes repacked for fast scans."""

    @property
    def lists(self) -> int:
        """Inverted lists; 0 where the codes stand in the order of the rows."""
        return getattr(self.index, "nlist", 0)

    @property
    def row_bytes(self) -> int:
        """Of a row in the file."""
        return self.index.code_size + (ROW_NUMBER.itemsize if self.lists else 0)

    def mapped(self, rows: Float32[np.ndarray, "rows padded"]) -> Float32[np.ndarray, "rows mapped"]:
        """Rows after the linear maps."""
        for each in self.maps:
            rows = each.apply_py(rows)
        return rows

    def encode(
        self, rows: Float32[np.ndarray, "rows padded"]
    ) -> tuple[UInt8[np.ndarray, "rows bytes"], Int64[np.ndarray, " rows"] | None]:
        """Codes, and the list of each row where there are lists."""
        codes = self.index.sa_encode(self.mapped(rows))
        if not self.lists:
            return codes, None
        width = codes.shape[1] - self.index.code_size
        numbers = np.zeros((len(codes), ROW_NUMBER.itemsize), np.uint8)
        numbers[:, :width] = codes[:, :width]  # FAISS puts the list before the code, in as few bytes as it takes
        return np.ascontiguousarray(codes[:, width:]), numbers.view(ROW_NUMBER)[:, 0]

    def head(self, sizes: Int64[np.ndarray, " lists"], count: int) -> bytes:
        """What the file has before the codes of `count` rows, in lists of these sizes."""
        if self.lists:
            about = struct.pack("<4sQQ4sQ", b"ilar", self.lists, self.index.code_size, b"full", self.lists)
            return about + sizes.astype("<u8").tobytes()
        values = 4 if isinstance(self.index, load_faiss().IndexFlat) else 1  # flat rows are counted in float32
        return struct.pack("<Q", count * self.index.code_size // values)


@dataclass(frozen=True)
class Layout:
    """The file of an index with `count` rows."""

    pieces: list[tuple[int, bytes]]
    """What stands around the rows, and where."""
    places: list[int]
    """Where each leaf's head begins."""
    size: int


def leaves(index: Any, maps: tuple[Any, ...] = ()) -> Iterator[Leaf]:
    """The parts that hold codes, in the order of the file."""
    faiss = load_faiss()
    index = own_class(index)
    if isinstance(index, faiss.IndexPreTransform):
        chain = [faiss.downcast_VectorTransform(index.chain.at(number)) for number in range(index.chain.size())]
        yield from leaves(index.index, (*maps, *chain))
    elif isinstance(index, faiss.IndexRefine):
        yield from leaves(index.base_index, maps)
        yield from leaves(index.refine_index, maps)
    else:
        yield Leaf(index, maps, not (isinstance(index, faiss.IndexFlatCodes) or has_plain_lists(index)))


def has_plain_lists(index: Any) -> bool:
    """Whether rows are encoded one by one into inverted lists."""
    faiss = load_faiss()
    if not isinstance(index, faiss.IndexIVF) or isinstance(index, faiss.IndexIVFFlatDedup):
        return False
    return type(faiss.downcast_InvertedLists(index.invlists)) is faiss.ArrayInvertedLists


def lay_out(index: Any, found: list[Leaf], count: int) -> Layout:
    """Where everything stands in the file of an index once it has `count` rows.

    Args:
        index: trained; its leaves are empty but for those built in memory.
        found: the others.
        count: of rows.
    Raises: RuntimeError where FAISS writes a part in another way than this module knows.
    """
    faiss = load_faiss()
    marks = []
    for leaf in found:
        if leaf.lists:
            marks.append(struct.pack("<4sQQ4sQ", b"ilar", leaf.lists, leaf.index.code_size, b"sprs", 0))
            continue
        rows = np.random.default_rng(0).standard_normal((MARKED_ROWS, leaf.index.d), dtype=np.float32)
        leaf.index.add(rows)
        marks.append(leaf.head(np.empty(0, np.int64), MARKED_ROWS) + leaf.index.sa_encode(rows).tobytes())
    for part in tree(index):
        part.ntotal = count
    content = serialised(index)
    for leaf in found:
        leaf.index.reset()
    pieces, places, offset, read = [], [], 0, 0
    for leaf, mark in zip(found, marks, strict=True):
        if content.count(mark) != 1:
            raise RuntimeError(f"FAISS {faiss.__version__} writes {type(leaf.index).__name__} in an unknown way")
        start = content.index(mark)
        pieces.append((offset, content[read:start]))
        places.append(offset + start - read)
        offset = places[-1] + len(leaf.head(np.zeros(leaf.lists, np.int64), count)) + count * leaf.row_bytes
        read = start + len(mark)
    pieces.append((offset, content[read:]))
    return Layout(pieces, places, offset + len(content) - read)


def tree(index: Any) -> Iterator[Any]:
    """The index, and what refinements and linear maps stand around."""
    index = own_class(index)
    yield index
    for name in ("index", "base_index", "refine_index"):
        if hasattr(index, name):
            yield from tree(getattr(index, name))
