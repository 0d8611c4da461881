"""Exact search at the speed of bfloat16, for CPUs with matrix units (AMX) and for GPUs.

What comes back is what float64 brute force over the float32 vectors finds, up to float64's own rounding: the same rows,
of equal scores the earlier, and the same scores, rounded to float32. The coarse scan only decides which rows are looked
at, and its bounds are proved (see `exact_rounding`), not estimated. A query whose best rows bfloat16 cannot tell apart
(thousands of near-ties, a query of zeros) is answered by brute force in float64: up to 5 times the float32 product, and
just as exact.
"""

import io
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float32, Int64
from torch import Tensor

from mmcl.index.devices import CPU, device_name
from mmcl.index.exact_rounding import CoarseRows, round_rows
from mmcl.index.exact_search import Stored, exact_search
from mmcl.index.mapped_file import MappedFile, MayBeMapped
from mmcl.index.workers import alone, thread_count

Rows = Float32[np.ndarray, "rows width"]
Found = tuple[Float32[np.ndarray, "nq k"], Int64[np.ndarray, "nq k"]]
FILE = "rows.npy"
BLOCK = 65536
MATRIX_UNITS = (8, 0)
"""The first compute capability of GPUs that multiply bfloat16."""


def exact_pays(device: str) -> bool:
    """Whether this device multiplies bfloat16 fast enough for two stages to be faster than FAISS's one.

    Args:
        device: as `check_device` returns it. An index cut into pieces for several GPUs is FAISS's.
    """
    name = device_name(device)
    if name == CPU:
        return torch.cpu._is_amx_tile_supported()
    if name == "cuda:all" or not torch.cuda.is_available():
        return False
    return torch.cuda.get_device_capability(name) >= MATRIX_UNITS


class ExactBackend(MayBeMapped):
    """Rows 0..n-1 of fused vectors, ranked by raw inner product. Nothing changes it: `rebuilt` makes another.

    It holds 6 bytes a coordinate, float32 and bfloat16, and 4 bytes a row; 2 bytes where float32 stays on the disk.
    On a GPU it holds both there. k is limited by memory alone: a search holds about 100 bytes per answer, and from
    n / 16 on it is brute force in float64.

    Args:
        rows: (n, width) float32, on the device that searches.
        mapped: the file that they lie in, where they are read from it as searches need them.
    """

    engine, factory, exact = "exact", "Exact", True

    def __init__(self, rows: Tensor, mapped: MappedFile | None = None):
        self.rows, self.mapped = rows, mapped
        self.width = self.padded_width = rows.shape[1]
        self._coarse: CoarseRows | None = None
        self._rounding = threading.Lock()

    @classmethod
    def build(cls, width: int, blocks: Iterable[Rows], device: str = CPU) -> "ExactBackend":
        """All vectors in order.

        Args:
            width: of the fused vectors.
            blocks: (rows, width) float32 each, in arrays of their own.
            device: as `check_device` returns it.
        Raises: ValueError naming a row that is not finite, or a device that is several.
        """
        backend = cls(torch.from_numpy(gathered(width, blocks)).to(one_device(device)))
        backend.coarse_rows()  # now, not in the first search
        return backend

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def held(self) -> Tensor:
        """What a file of it holds."""
        return self.rows

    def coarse_rows(self) -> CoarseRows:
        """The rows in bfloat16; made when they are first asked for."""
        with self._rounding:
            if self._coarse is None:
                self._coarse = round_rows(self.rows)
            return self._coarse

    @property
    def device(self) -> str:
        """Where searches run."""
        return str(self.rows.device)

    def moved(self, device: str) -> "ExactBackend":
        """The same on another device (see `check_device`). ValueError for several GPUs."""
        target = one_device(device)
        if target == self.rows.device:
            return self
        self.refuse_changed()
        return ExactBackend(self.rows.to(target))

    def search(self, queries: Rows, k: int, parameters: Mapping[str, Any], keep: np.ndarray | None = None) -> Found:
        """The k rows of largest inner product with each query.

        Args:
            queries: (nq, width) float32, finite.
            k: at most the number of rows.
            parameters: none.
            keep: (n,) bool, the rows that may be returned; None: all.
        Returns: scores (nq, k) float32 and row numbers (nq, k) int64, best first, -inf and -1 where there are none.
        """
        scores = np.full((len(queries), k), -np.inf, np.float32)
        rows = np.full((len(queries), k), -1, np.int64)
        keep = None if keep is None or keep.all() else keep
        wanted = min(k, len(self) if keep is None else int(np.count_nonzero(keep)))
        if wanted and len(queries):
            precise = torch.from_numpy(queries.astype(np.float64)).to(self.rows.device)
            mask = None if keep is None else torch.tensor(keep, device=self.rows.device)
            stored = Stored(self.rows, self.coarse_rows(), thread_count(self.rows.device))
            with alone():
                found, numbers = exact_search(stored, precise, wanted, mask)
            scores[:, :wanted], rows[:, :wanted] = found.float().cpu().numpy(), numbers.cpu().numpy()
        return scores, rows

    def check_parameters(self, parameters: Mapping[str, Any]) -> None:
        """ValueError for any: this type has none."""
        for name in parameters:
            raise ValueError(f"unknown search parameter {name!r} for factory {self.factory!r}; it has none")

    def check_vectors(self, rows: Rows) -> None:
        """Any finite float32 vector can be stored."""

    def vectors(self, rows: np.ndarray) -> Rows:
        """(len(rows), width) float32: what was added."""
        numbers = torch.tensor(np.asarray(rows, np.int64), device=self.rows.device)
        return self.rows.index_select(0, numbers).cpu().numpy()

    def rebuilt(self, keep: np.ndarray | None, added: Rows) -> "ExactBackend":
        """Another backend: the rows that are kept, renumbered in order, and `added` behind them."""
        self.refuse_changed()

        def blocks() -> Iterator[Rows]:
            for start in range(0, len(self), BLOCK):
                block = self.rows[start : start + BLOCK].cpu().numpy()
                yield block if keep is None else block[keep[start : start + BLOCK]]
            yield added

        return self.build(self.width, blocks(), self.device)

    def about(self) -> dict[str, Any]:
        """What `read` needs beside the file: nothing."""
        return {}

    def write(self, folder: Path) -> list[str]:
        """Write the float32 rows into a folder; returns the file's name. OSError where the disk is full."""
        self.refuse_changed()
        with open(folder / FILE, "wb") as file:
            np.save(file, self.rows.cpu().numpy(), allow_pickle=False)
        return [FILE]

    def stored_bytes(self) -> int:
        """How many bytes `write` writes."""
        header = io.BytesIO()
        np.lib.format.write_array_header_1_0(header, stated(len(self), self.width))
        return len(header.getvalue()) + self.rows.nbytes

    @classmethod
    def read(
        cls, folder: Path, factory: str, width: int, about: Mapping[str, Any], memory_map: bool = False
    ) -> "ExactBackend":
        """Read what `write` wrote.

        Args:
            memory_map: leave float32 on the disk, where only candidates are read; bfloat16 is made in memory by the
                first search.
        Raises: FileNotFoundError; ValueError naming a file that is damaged, or something else.
        """
        rows = torch.from_numpy(read_rows(folder / FILE, width, memory_map))
        if memory_map:
            return cls(rows, MappedFile(folder / FILE))
        backend = cls(rows)
        backend.coarse_rows()
        return backend


def one_device(device: str) -> torch.device:
    """ValueError for several."""
    if device == "cuda:all":
        raise ValueError("factory 'Exact' searches on one GPU; use device='cuda:0', or factory 'Flat' for all of them")
    return torch.device(device_name(device))


def gathered(width: int, blocks: Iterable[Rows]) -> Rows:
    """All blocks in one array; each is let go once it is copied."""
    parts = deque(blocks)
    rows = np.empty((sum(map(len, parts)), width), np.float32)
    start = 0
    while parts:
        part = parts.popleft()
        rows[start : start + len(part)] = part
        start += len(part)
    return rows


def stated(count: int, width: int) -> dict[str, Any]:
    """What the header of the file says."""
    return {"descr": "<f4", "fortran_order": False, "shape": (count, width)}


def read_rows(file: Path, width: int, memory_map: bool) -> Rows:
    """(n, width) float32 of a .npy file; ValueError naming the file where it is of another form or length.

    A mapped array is private to this process (copy on write): torch takes no arrays that are read-only.
    """
    with open(file, "rb") as opened:
        try:
            np.lib.format.read_magic(opened)
            shape, fortran, kind = np.lib.format.read_array_header_1_0(opened)
        except ValueError as error:
            raise ValueError(f"{file} is not a .npy file, or is damaged: {error}") from None
        if len(shape) != 2 or shape[1] != width or fortran or kind != np.dtype("<f4"):
            found = f"{kind} of shape {shape}" + (" in Fortran order" if fortran else "")
            raise ValueError(f"{file} holds {found}; expected rows of {width} float32")
        start, size = opened.tell(), file.stat().st_size
        expected = start + 4 * shape[0] * width
        if size != expected:
            raise ValueError(f"{file} is damaged: it has {size} bytes, its header says {expected}")
        if memory_map and shape[0]:
            return np.asarray(np.memmap(opened, np.float32, "c", start, shape))
        return np.fromfile(opened, np.float32).reshape(shape)
