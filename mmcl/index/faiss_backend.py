"""The vectors of a tuple index in FAISS: trained, added, searched, written and read."""

import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float32, Int64

from mmcl.index.devices import AUTO as AUTO_DEVICE
from mmcl.index.devices import CPU, GPU_K, device_name, on_gpus, refuse_large_k
from mmcl.index.faiss_factory import (
    AUTO,
    MIPS,
    largest_value,
    new_faiss_index,
    reason,
    refuse_few_rows,
    refuse_other_metrics,
    remove_shifts,
    returns_own_scores,
)
from mmcl.index.faiss_files import FILE, read_faiss, stored_bytes, write_faiss
from mmcl.index.faiss_params import check_parameters, filling_parameter, search_parameters
from mmcl.index.faiss_ranges import clips, refuse_beyond, squares, widen_ranges, with_offsets
from mmcl.index.faiss_rows import (
    at_rows,
    best_of,
    copy_of,
    drop_rows,
    first_kept,
    lists_of,
    nearest,
    nothing_found,
    padded,
    restore_decoders,
    scans_faster_unselected,
    selector,
    takes_selector,
)
from mmcl.index.faiss_setup import prefer_faster_path
from mmcl.index.mapped_file import MappedFile, MayBeMapped

Rows = Float32[np.ndarray, "rows width"]
Found = tuple[Float32[np.ndarray, "nq k"], Int64[np.ndarray, "nq k"]]
EXACT_SHARE, EXACT_SHARE_OF_SCANS = 0.2, 0.5
"""Where a filter leaves no more of the rows than this, all of those are looked at: below it graphs and lists find fewer
of them than they find without a filter; Flat is faster so. Measured: `python eval/benchmarks/filters.py`."""
EXACT_ROWS = 1024
AMONG_ROWS = 2**17
"""Read back at once to be looked at."""
SPARE = 0.25
"""Of a quantiser's range, beyond what outgrew it."""


class FaissBackend(MayBeMapped):
    """Rows 0..n-1 of fused vectors, ranked by raw inner product. Nothing changes it: `rebuilt` makes another.

    Args:
        index: a FAISS index whose every part ranks by inner product.
        factory: the string that it was built from.
        width: of the fused vectors; the index may be wider, the rest is zeros.
        norm: where the factory begins with "MIPS,": the length that one more coordinate lifts every vector to.
    """

    engine = "faiss"

    def __init__(self, index: Any, factory: str, width: int, norm: float | None = None):
        refuse_other_metrics(index, factory)
        restore_decoders(index)
        self.index, self.factory, self.width, self.norm = index, factory, width, norm
        self.exact = returns_own_scores(index)
        self._asked_device, self._on_gpus = CPU, None
        self._mapping = threading.Lock()

    @classmethod
    def build(cls, factory: Any, width: int, blocks: Iterable[Rows]) -> "FaissBackend":
        """Train on all fused vectors where the type needs it, and add them in order.

        Args:
            factory: FAISS factory string, "MIPS," and one, or "auto".
            width: of the fused vectors.
            blocks: (rows, width) float32 each, consumed one by one where no training needs them together.
        Raises: ValueError for an unknown factory, too few rows to train on, and values that the type cannot hold.
        """
        factory = AUTO if factory == "auto" else factory
        lifted = isinstance(factory, str) and factory.startswith(MIPS)
        index = new_faiss_index(factory, width + lifted)
        backend = cls(index, factory, width)
        if index.is_trained and not lifted:
            for row, block in with_offsets(blocks):
                backend._add(backend._stored(block, row))
            return backend
        rows = np.concatenate([np.empty((0, width), np.float32), *blocks])
        backend.norm = float(np.sqrt(squares(rows).max(initial=0))) if lifted else None
        rows = backend._stored(rows)
        backend._train(rows)
        widen_ranges(index, rows)
        backend._add(rows)
        return backend

    def __len__(self) -> int:
        return self.index.ntotal

    @property
    def padded_width(self) -> int:
        return self.index.d

    @property
    def held(self) -> Any:
        """What a file of it holds: the same on every device."""
        return self.index

    def search(self, queries: Rows, k: int, parameters: Mapping[str, Any], keep: np.ndarray | None = None) -> Found:
        """The k rows of largest inner product with each query.

        Where a search ends before it has seen k rows (few lists probed, a graph left early) it is repeated for those
        queries with twice the effort, until they are filled or all has been visited.

        Args:
            queries: (nq, width) float32.
            k: at most the number of rows.
            parameters: FAISS search parameters by name.
            keep: (n,) bool, the rows that may be returned; None: all.
        Returns: scores (nq, k) float32 and row numbers (nq, k) int64, best first, -inf and -1 where there are none.
        """
        if keep is None:
            return self._search(self._padded(queries), k, parameters, None, None)
        kept = int(np.count_nonzero(keep))
        share = EXACT_SHARE_OF_SCANS if scans_faster_unselected(self.index) else EXACT_SHARE
        few = kept <= max(EXACT_ROWS, share * len(keep))
        wanted = min(k, kept)
        if not wanted:
            return nothing_found(len(queries), k)
        if few and not (self.memory_mapped and lists_of(self.index)):  # lists on the disk are read one by one
            return padded(*self._among(queries, wanted, np.flatnonzero(keep)), k)
        padded_queries = self._padded(queries)
        if takes_selector(self.index) and not scans_faster_unselected(self.index):
            effort = filling_parameter(self.index)
            most = {effort[0]: effort[2]} if few and effort else {}
            return padded(*self._search(padded_queries, wanted, {**parameters, **most}, selector(keep), keep), k)
        return self._overfetched(padded_queries, k, wanted, parameters, keep)

    def check_parameters(self, parameters: Mapping[str, Any]) -> None:
        """ValueError for a search parameter that this type does not have."""
        check_parameters(self.index, self.factory, parameters)

    def moved(self, device: str) -> "FaissBackend":
        """The same on another device (see `check_device`); the CPU keeps its copy, for what GPUs cannot do.

        Raises: ValueError where GPUs lack the type; with "auto" it stays on the CPU then.
        """
        backend = FaissBackend(self.index, self.factory, self.width, self.norm)
        backend.mapped, backend._mapping = self.mapped, self._mapping  # of the one index both hold
        if device != CPU:
            try:
                backend._on_gpus = on_gpus(self.index, device)
            except ValueError:
                if device != AUTO_DEVICE:
                    raise
                return backend
            backend._asked_device = device
        return backend

    @property
    def device(self) -> str:
        """Where searches run."""
        return device_name(self._asked_device)

    def check_vectors(self, rows: Rows) -> None:
        """ValueError that names the first row which the codes of this type cannot hold."""
        refuse_beyond(largest_value(self.index), rows, self.factory, 0)

    def vectors(self, rows: np.ndarray) -> Rows:
        """(len(rows), width) float32: what is stored, decoded where it is quantised."""
        with self._mapping:
            for ivf in lists_of(self.index):
                if ivf.direct_map.no():
                    ivf.make_direct_map()
        found = self.index.reconstruct_batch(np.ascontiguousarray(rows, np.int64))
        return np.ascontiguousarray(found[:, : self.width])

    def rebuilt(self, keep: np.ndarray | None, added: Rows) -> "FaissBackend":
        """Another backend: the rows that are kept, renumbered in order, and `added` behind them."""
        self.refuse_changed()
        with self._mapping:
            index = copy_of(self.index, self.memory_mapped)
        if keep is not None and not keep.all():
            drop_rows(index, keep)
        backend = FaissBackend(index, self.factory, self.width, self.norm)
        more = backend._stored(added)
        if clips(index, more):
            rows = np.concatenate([backend._stored(backend.vectors(np.arange(len(backend)))), more])
            index.reset()
            widen_ranges(index, rows, SPARE)
            backend, more = FaissBackend(index, self.factory, self.width, self.norm), rows
        backend._add(more)
        return backend.moved(self._asked_device)

    def about(self) -> dict[str, Any]:
        """What `read` needs beside the files, JSON-serialisable."""
        return {"norm": self.norm}

    def write(self, folder: Path) -> list[str]:
        """Write into a folder; returns the files' names. OSError where the disk is full."""
        self.refuse_changed()
        with self._mapping:  # a map that is half made would be written, too
            return write_faiss(self.index, folder)

    def stored_bytes(self) -> int:
        """How many bytes `write` writes."""
        with self._mapping:
            return stored_bytes(self.index)

    @classmethod
    def read(
        cls, folder: Path, factory: str, width: int, about: Mapping[str, Any], memory_map: bool = False
    ) -> "FaissBackend":
        """Read what `write` wrote, or leave it on the disk (see `read_faiss`)."""
        backend = cls(read_faiss(folder, memory_map), factory, width, about["norm"])
        backend.mapped = MappedFile(folder / FILE) if memory_map else None
        return backend

    def _search(
        self, queries: Rows, k: int, parameters: Mapping[str, Any], chosen: Any, keep: np.ndarray | None
    ) -> Found:
        scores, rows = self._once(queries, k, parameters, chosen)
        short = np.flatnonzero(rows[:, -1] < 0)
        if not len(short):
            return scores, rows
        name, default, limit = filling_parameter(self.index) or ("", 0, 0)
        spent = int(parameters.get(name, default))
        parameters = {key: value for key, value in parameters.items() if key != "max_codes"}
        while len(short) and spent < limit:
            spent = min(2 * spent, limit)
            scores[short], rows[short] = self._once(queries[short], k, {**parameters, name: spent}, chosen)
            short = short[rows[short, -1] < 0]
        if len(short):  # rows of a graph, or lists in a graph, that no path reaches
            every = np.arange(len(self)) if keep is None else np.flatnonzero(keep)
            scores[short], rows[short] = self._among(queries[short, : self.width], k, every)
        return scores, rows

    def _once(self, queries: Rows, k: int, given: Mapping[str, Any], chosen: Any) -> Found:
        prefer_faster_path(self.index.d)
        engine = self.index if chosen is not None or self._on_gpus is None else self._engine(k, given)
        scores, rows = engine.search(queries, k, params=search_parameters(self.index, given, k, chosen))
        if rows[:, -1].min(initial=0) < 0:
            scores[rows < 0] = -np.inf
        return scores, rows

    def _engine(self, k: int, given: Mapping[str, Any]) -> Any:
        """The GPUs, where they can answer this."""
        for name, value in (("k", k), ("nprobe", min(int(given.get("nprobe", 1)), getattr(self.index, "nlist", 1)))):
            if value > GPU_K and self._asked_device != AUTO_DEVICE:
                refuse_large_k(value, name)
            if value > GPU_K:
                return self.index
        return self._on_gpus

    def _among(self, queries: Rows, k: int, rows: np.ndarray) -> Found:
        """By brute force over these rows; of equal scores the older row first."""
        queries = np.ascontiguousarray(queries)
        found = nothing_found(len(queries), k)
        for start in range(0, len(rows), AMONG_ROWS):
            part = rows[start : start + AMONG_ROWS]
            scores, places = nearest(queries, self.vectors(part), min(k, len(part)))
            found = best_of([found, (scores, at_rows(part, places))], k)
        return found

    def _overfetched(
        self, queries: Rows, k: int, wanted: int, parameters: Mapping[str, Any], keep: np.ndarray
    ) -> Found:
        """For types that cannot leave rows out: ask for more than k, and drop what is not kept."""
        share = np.count_nonzero(keep) / len(keep)
        fetch = min(len(self), int(1.2 * wanted / share) + 16)
        scores, rows = first_kept(*self._search(queries, fetch, parameters, None, None), keep, k)
        short = np.flatnonzero(rows[:, wanted - 1] < 0)
        while len(short) and fetch < len(self):
            fetch = min(len(self), 4 * fetch)
            found = self._search(queries[short], fetch, parameters, None, None)
            scores[short], rows[short] = first_kept(*found, keep, k)
            short = short[rows[short, wanted - 1] < 0]
        return scores, rows

    def _padded(self, rows: Rows) -> Float32[np.ndarray, "rows padded"]:
        missing = self.index.d - rows.shape[1]
        return np.ascontiguousarray(np.pad(rows, ((0, 0), (0, missing))) if missing else rows, dtype=np.float32)

    def _stored(self, rows: Rows, offset: int = 0) -> Float32[np.ndarray, "rows padded"]:
        """Rows as they are added: lifted, padded, and refused where the codes cannot hold them."""
        if self.norm is not None:
            rest = np.sqrt(np.maximum(self.norm**2 - squares(rows), 0)).astype(np.float32)
            rest = np.minimum(rest, largest_value(self.index))  # queries have zero here: scores stay as they are
            rows = np.concatenate([rows, rest[:, None]], axis=1)
        return self._padded(refuse_beyond(largest_value(self.index), rows, self.factory, offset))

    def _train(self, rows: Rows) -> None:
        if self.index.is_trained:
            return
        refuse_few_rows(self.index, self.factory, len(rows))
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
