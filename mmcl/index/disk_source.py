"""Fused vectors that lie on disk as shards: read block by block, or sampled."""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float32, Int64

from mmcl.progress import counting
from mmcl.shards import EmbeddingShards

BLOCK_BYTES = 16 * 2**20
"""Of float32 vectors that are held at once."""

Rows = Float32[np.ndarray, "rows width"]


@dataclass(frozen=True)
class ShardBlocks:
    """The fused vectors of one shard, read from the disk whenever they are asked for."""

    rows: int
    read: Callable[[Any], Rows]
    """A slice, or the numbers, of some of its rows -> (n, width) float32."""


@dataclass(frozen=True)
class Vectors:
    """The vectors of all shards, numbered in their order."""

    shards: Sequence[ShardBlocks]
    width: int
    progress: bool = False
    """Show a bar while all are read."""

    def __len__(self) -> int:
        return sum(shard.rows for shard in self.shards)

    @property
    def starts(self) -> list[int]:
        """The row that each shard begins with, and the number of all."""
        return [0, *itertools.accumulate(shard.rows for shard in self.shards)]

    @property
    def step(self) -> int:
        """Rows of a block."""
        return max(1, BLOCK_BYTES // (4 * self.width))

    def blocks(self, doing: str, first: int = 0) -> Iterator[tuple[int, Rows]]:
        """All from row `first` on, block by block, each with the number of its first row."""
        with counting(doing, len(self), first, self.progress) as advance:
            for shard, start in zip(self.shards, self.starts, strict=False):
                for begin in range(max(first - start, 0), shard.rows, self.step):
                    rows = slice(begin, min(begin + self.step, shard.rows))
                    yield start + begin, self._read(shard, rows, rows.stop - begin, start + begin)
                    advance(rows.stop - begin)

    def sample(self, size: int, seed: int) -> Iterator[Rows]:
        """A random `size` of them (or all, where there are fewer), block by block; no others are read."""
        chosen = sample_rows(len(self), size, np.random.default_rng(seed))
        for shard, (start, stop) in zip(self.shards, itertools.pairwise(self.starts), strict=True):
            first, last = np.searchsorted(chosen, (start, stop)).tolist()
            for begin in range(first, last, self.step):
                rows = chosen[begin : min(begin + self.step, last)] - start
                yield self._read(shard, rows, len(rows), start)

    def first_rows(self) -> Rows:
        """(shards that are not empty, width)."""
        found = [
            self._read(shard, slice(0, 1), 1, start)
            for shard, start in zip(self.shards, self.starts, strict=False)
            if shard.rows
        ]
        return np.concatenate([np.empty((0, self.width), np.float32), *found])

    def _read(self, shard: ShardBlocks, rows: Any, count: int, row: int) -> Rows:
        found = shard.read(rows)
        if found.shape != (count, self.width):
            raise ValueError(f"from row {row}: expected vectors {(count, self.width)}, got {found.shape}")
        return found


def shard_blocks(shards: EmbeddingShards, fuse: Callable[[dict[str, np.ndarray], int], Rows]) -> list[ShardBlocks]:
    """Embedding shards as vectors.

    Args:
        shards: of the modalities that are stored.
        fuse: ({modality: (n, d)}, number of the first row) -> (n, width) float32; errors name the row.
    """

    def read(number: int, start: int, rows: Any) -> Rows:
        if isinstance(rows, slice):
            return fuse(shards.read_rows(number, rows), start + rows.start)
        try:
            return fuse(shards.read_rows(number, rows), start)
        except ValueError:  # these rows are no run: one by one, the first that is wrong is named by its number
            for row in rows:
                fuse(shards.read_rows(number, np.array([row])), start + int(row))
            raise

    counts = shards.shard_rows()
    starts = [0, *itertools.accumulate(counts)][:-1]
    numbered = enumerate(zip(counts, starts, strict=True))
    return [ShardBlocks(rows, functools.partial(read, number, start)) for number, (rows, start) in numbered]


def sample_rows(total: int, size: int, generator: np.random.Generator) -> Int64[np.ndarray, " sample"]:
    """Distinct numbers below `total`, ascending, every set of them as likely; in memory for `size`, not for `total`."""
    if 2 * size >= total:
        return np.sort(generator.permutation(total)[:size])
    found = np.empty(0, np.int64)
    while len(found) < size:
        found = np.union1d(found, generator.integers(0, total, size))
    return np.sort(generator.permutation(found)[:size])
