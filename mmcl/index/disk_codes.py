"""Encoded rows on their way into the file of an index. Those of inverted lists wait beside it, part by part, each part
sorted by list, until a merge brings every list together."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from jaxtyping import Int64, UInt8

from mmcl.index.disk_layout import ROW_NUMBER, Layout, Leaf

PART_BYTES, PART_ROWS = 32 * 2**20, 2**18
"""The most of either that is sorted by list at once, and encoded again where a build is interrupted."""
MERGE_BYTES = 32 * 2**20
"""Of the lists that are brought together at once."""
NO_LISTS = np.empty(0, np.int64)


class Codes:
    """The encoded rows of all leaves of an index.

    Args:
        work: folder of the list parts.
        found: the leaves.
        layout: of the index's file.
    """

    def __init__(self, work: Path, found: list[Leaf], layout: Layout):
        self.leaves, self.layout = found, layout
        self.lists = {i: ListParts(work, leaf, i) for i, leaf in enumerate(found) if leaf.lists}
        self.waiting: dict[int, list[tuple[np.ndarray, np.ndarray]]] = {i: [] for i in self.lists}
        width = sum(each.leaf.row_bytes for each in self.lists.values())
        self.part_rows = min(PART_ROWS, PART_BYTES // width) if width else PART_ROWS

    def hold(self, parts: int, rows: int) -> bool:
        """Whether so much is in the list parts."""
        return all(each.hold(parts, rows) for each in self.lists.values())

    def begin(self, file: BinaryIO, total: int) -> None:
        """Write what does not depend on the rows. The file has its size from now on: by it a later build knows it."""
        file.truncate(self.layout.size)
        for offset, piece in self.layout.pieces:
            file.seek(offset)
            file.write(piece)
        for leaf, place in zip(self.leaves, self.layout.places, strict=True):
            if not leaf.lists:
                file.seek(place)
                file.write(leaf.head(NO_LISTS, total))

    def put(self, file: BinaryIO, row: int, rows: np.ndarray) -> None:
        """Encode rows as they are added, from number `row` on."""
        for number, (leaf, place) in enumerate(zip(self.leaves, self.layout.places, strict=True)):
            codes, lists = leaf.encode(rows)
            if lists is not None:
                self.waiting[number].append((codes, lists))
                continue
            file.seek(place + len(leaf.head(NO_LISTS, 0)) + row * leaf.row_bytes)
            file.write(codes.data)

    def end_part(self, file: BinaryIO, part: int, first: int) -> None:
        """Have the rows from number `first` on, which are part number `part`, on the disk itself."""
        for number, blocks in self.waiting.items():
            codes, lists = (np.concatenate(each) for each in zip(*blocks, strict=True))
            self.lists[number].append(part, first, codes, lists)
            blocks.clear()
        file.flush()
        os.fsync(file.fileno())

    def merge(self, file: BinaryIO, parts: int, total: int) -> None:
        """Write the inverted lists."""
        for number, each in self.lists.items():
            file.seek(self.layout.places[number])
            each.merge(file, parts, total)


@dataclass(frozen=True)
class ListParts:
    """Rows of one leaf, part by part: codes-0.bin, their rows in rows-0.bin, and how many each list has of each part in
    sizes-0.bin."""

    folder: Path
    leaf: Leaf
    number: int

    def append(
        self,
        part: int,
        first: int,
        codes: UInt8[np.ndarray, "rows bytes"],
        lists: Int64[np.ndarray, " rows"],
    ) -> None:
        """Write part number `part`, whose rows begin with `first`; it is on the disk itself when this returns."""
        order = np.argsort(lists, kind="stable")
        sizes = np.bincount(lists, minlength=self.leaf.lists).astype(ROW_NUMBER)
        write_at(self._file("codes"), first * self.leaf.index.code_size, codes[order])
        write_at(self._file("rows"), first * ROW_NUMBER.itemsize, (order + first).astype(ROW_NUMBER))
        write_at(self._file("sizes"), part * sizes.nbytes, sizes)

    def hold(self, parts: int, rows: int) -> bool:
        """Whether so many are there."""
        wanted = {"codes": rows * self.leaf.index.code_size, "rows": rows * ROW_NUMBER.itemsize}
        wanted["sizes"] = parts * self.leaf.lists * ROW_NUMBER.itemsize
        return all(self._file(name).is_file() and self._file(name).stat().st_size >= wanted[name] for name in wanted)

    def merge(self, file: BinaryIO, parts: int, rows: int) -> None:
        """Write the lists as FAISS reads them: head, then codes and rows of each list."""
        sizes = np.memmap(self._file("sizes"), ROW_NUMBER, "r", shape=(parts, self.leaf.lists))
        whole = sizes.sum(axis=0)
        file.write(self.leaf.head(whole, rows))
        begins = np.cumsum([0, *sizes.sum(axis=1)])[:-1]
        for first, last in groups(whole, MERGE_BYTES // self.leaf.row_bytes):
            counts = np.array(sizes[:, first:last])
            ends = begins + counts.sum(axis=1)
            order = np.argsort(np.repeat(np.tile(np.arange(last - first), parts), counts.ravel()), kind="stable")
            their_codes = self._read("codes", begins, ends)[order]
            their_rows = self._read("rows", begins, ends)[order]
            begins = ends
            stops = np.cumsum(whole[first:last])
            for start, stop in zip(stops - whole[first:last], stops, strict=True):
                file.write(their_codes[start:stop].data)
                file.write(their_rows[start:stop].data)

    def _file(self, name: str) -> Path:
        return self.folder / f"{name}-{self.number}.bin"

    def _read(self, name: str, begins: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """Rows begins..ends of each part, one part after the other."""
        kind = np.dtype((np.uint8, self.leaf.index.code_size)) if name == "codes" else ROW_NUMBER
        with open(self._file(name), "rb") as file:
            found = []
            for begin, end in zip(begins.tolist(), ends.tolist(), strict=True):
                file.seek(begin * kind.itemsize)
                found.append(np.fromfile(file, kind, end - begin))
        return np.concatenate(found)


def groups(sizes: Int64[np.ndarray, " lists"], limit: int) -> Iterator[tuple[int, int]]:
    """(first, last) of runs of lists with at most `limit` rows together, or one list with more."""
    first, held = 0, 0
    for number, size in enumerate(sizes.tolist()):
        if held and held + size > limit:
            yield first, number
            first, held = number, 0
        held += size
    yield first, len(sizes)


def write_at(path: Path, offset: int, rows: Any) -> None:
    """Write an array at an offset of a file, which is made where missing; on the disk itself when this returns."""
    with open(path, "r+b" if path.exists() else "wb") as file:
        file.seek(offset)
        file.write(np.ascontiguousarray(rows).data)
        file.flush()
        os.fsync(file.fileno())
