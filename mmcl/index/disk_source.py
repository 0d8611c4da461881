"""Fused vectors that lie on disk as shards: read block by block, for one index or for several at once, or sampled."""

import functools
import itertools
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from jaxtyping import Float32, Int64

from mmcl.progress import counting
from mmcl.shards import EmbeddingShards

BLOCK_BYTES = 16 * 2**20
"""Of float32 vectors that are held at once."""
ARRAY_ROWS = 65536
"""Of arrays that count as a shard."""

Built = TypeVar("Built")
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

    def block(self, number: int, begin: int, stop: int) -> Rows:
        """Rows begin..stop of shard `number`."""
        return self._read(self.shards[number], slice(begin, stop), stop - begin, self.starts[number] + begin)

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


@dataclass(frozen=True)
class Pass:
    """What a build does with all vectors from a row on. Whoever reads them may do so for several builds at once."""

    doing: str
    vectors: Vectors
    take: Callable[[int, Rows], None]
    """Told every block with the number of its first row, in order."""
    first: int = 0


Steps = Generator[Pass, None, Built]
"""A build that stops wherever it needs a pass, goes on when that has been made, and returns what is built."""


def run_steps(builds: Sequence[Steps[Built]]) -> list[Built]:
    """Make the passes that builds over the same rows ask for, the first of all of them together, then the second.

    So there are as many passes as the build with the most of them needs, and a block is in memory once.
    """
    found: dict[int, Built] = {}
    try:
        while len(found) < len(builds):
            passes = []
            for number, steps in enumerate(builds):
                if number in found:
                    continue
                try:
                    passes.append(next(steps))
                except StopIteration as end:
                    found[number] = end.value
            if passes:
                make_passes(passes)
    finally:  # files that a build has open
        for steps in builds:
            steps.close()
    return [found[number] for number in range(len(builds))]


def make_passes(passes: Sequence[Pass]) -> None:
    """Read all rows once, block by block, and give each pass its vectors of them."""
    every = [each.vectors for each in passes]
    rows, starts = [shard.rows for shard in every[0].shards], every[0].starts
    first, step = min(each.first for each in passes), min(each.step for each in every)
    doing = " and ".join(dict.fromkeys(each.doing for each in passes))
    with counting(doing, len(every[0]), first, any(each.progress for each in every)) as advance:
        for number, (count, start) in enumerate(zip(rows, starts, strict=False)):
            for begin in range(max(first - start, 0), count, step):
                stop = min(begin + step, count)
                for each in passes:
                    wanted = max(begin, each.first - start)  # a build that was interrupted may be further than others
                    if wanted < stop:
                        each.take(start + wanted, each.vectors.block(number, wanted, stop))
                advance(stop - begin)


@dataclass(frozen=True)
class ArrayShards:
    """Arrays, memory-mapped ones too, as if they were shards."""

    arrays: Mapping[str, Any]
    """{modality: (n, d)}."""

    def shard_rows(self) -> list[int]:
        count = len(next(iter(self.arrays.values())))
        return [min(ARRAY_ROWS, count - start) for start in range(0, count, ARRAY_ROWS)]

    def read_rows(self, number: int, rows: Any, modalities: Iterable[str]) -> dict[str, Any]:
        """{modality: (n, d)}: rows of one shard, by their numbers in it or a slice."""
        start = number * ARRAY_ROWS
        wanted = slice(rows.start + start, rows.stop + start) if isinstance(rows, slice) else rows + start
        return {name: self.arrays[name][wanted] for name in modalities}


@dataclass(frozen=True)
class SharedShards:
    """Shards, or arrays, of which several indexes take some modalities each; `share` makes the first.

    A run of rows that they ask for one after the other is read once, and held until another one is asked for.
    """

    shards: Any
    modalities: tuple[str, ...]
    run: Callable[[int, int, int], dict[str, Any]]

    def select(self, modalities: Sequence[str]) -> "SharedShards":
        """The same rows, and what is held of them, with fewer modalities."""
        return SharedShards(self.shards, tuple(modalities), self.run)

    def shard_rows(self) -> list[int]:
        return list(self.shards.shard_rows())

    def read_rows(self, number: int, rows: Any) -> dict[str, Any]:
        """{modality: (n, d)}: rows of one shard, by their numbers in it or a slice."""
        if not isinstance(rows, slice):
            return dict(self.shards.read_rows(number, rows, self.modalities))
        found = self.run(number, rows.start, rows.stop)
        return {name: found[name] for name in self.modalities}


def share(shards: EmbeddingShards | ArrayShards, modalities: Sequence[str]) -> SharedShards:
    """Shards as one index reads them, or several that `select` some of these modalities."""

    @functools.lru_cache(maxsize=1)
    def run(number: int, begin: int, stop: int) -> dict[str, Any]:
        return shards.read_rows(number, slice(begin, stop), modalities)

    return SharedShards(shards, tuple(modalities), run)


def shard_blocks(
    shards: EmbeddingShards | SharedShards, fuse: Callable[[dict[str, Any], int], Rows]
) -> list[ShardBlocks]:
    """Shards of embeddings as vectors.

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
