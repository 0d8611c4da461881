"""Tuples kept in this process: vectors, ids and metadata, added to and removed from while others search."""

import functools
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from mmcl.index.faiss_rows import at_rows, best_of, nearest, nothing_found
from mmcl.index.growing import Growing
from mmcl.index.hits import Hits, split_by
from mmcl.index.items import Items

FOLD_ROWS, FOLD_SHARE = 4096, 0.25
"""Vectors added since the last build are searched one by one; beyond this many they join the others."""
MASKS = 8


@dataclass(frozen=True, eq=False)
class Snapshot:
    """One consistent version: a search that holds it is not disturbed by what others add or remove."""

    base: Any
    """A backend; its rows come first."""
    added: Growing
    """(m, width) float32, behind the base's rows."""
    items: Items
    alive: np.ndarray
    """(n,) bool, of all rows; False where removed."""
    masks: dict[str, np.ndarray] = field(default_factory=dict)
    """The rows that the latest filters chose."""

    @functools.cached_property
    def count(self) -> int:
        """Items that are alive."""
        return int(np.count_nonzero(self.alive))

    @property
    def whole(self) -> bool:
        """Whether nothing is removed."""
        return self.count == len(self.alive)

    def chosen(self, where: Any) -> np.ndarray | None:
        """(n,) bool, the rows that are alive and satisfy a filter; None where those are all."""
        if where is None:
            return None if self.whole else self.alive
        from mmcl.index.filters import check_where, matching

        key = repr(check_where(where))
        mask = self.masks.get(key)
        if mask is None:
            table, ids = self.items.to_filter()
            mask = matching(table, where, ids) & self.alive
            if len(self.masks) >= MASKS:
                self.masks.clear()
            self.masks[key] = mask
        return mask


class LocalTuples:
    """Vectors by id, ranked by raw inner product.

    Searches run on a snapshot and never wait; whoever changes something makes the next snapshot, one after the other.

    Args:
        base: a backend, see `FaissBackend`.
        items: ids and metadata of its rows, and of the added ones.
        added: (m, width) float32 vectors behind the base's.
        alive: (n,) bool; None: all.
        next_id: the least integer that no item ever had.
    """

    def __init__(
        self,
        base: Any,
        items: Items,
        added: np.ndarray | None = None,
        alive: np.ndarray | None = None,
        next_id: int = 0,
    ):
        added = np.empty((0, base.width), np.float32) if added is None else added
        alive = np.ones(len(items), bool) if alive is None else alive
        self.snapshot = Snapshot(base, Growing(added), items, alive)
        self.next_id = max(next_id, beyond(items.ids))
        self.saved: Any = None
        """Where the base lies on disk, see `local_files.Saved`."""
        self._writing = threading.RLock()

    def __len__(self) -> int:
        return self.snapshot.count

    def __contains__(self, key: object) -> bool:
        return bool((self._rows(self.snapshot, [key]) >= 0).all())

    @property
    def factory(self) -> str:
        return self.snapshot.base.factory

    @property
    def exact(self) -> bool:
        return self.snapshot.base.exact

    @property
    def device(self) -> str:
        return self.snapshot.base.device

    def move(self, device: str) -> None:
        """Search on another device from now on; see `check_device`."""
        with self._writing:
            now = self.snapshot
            if device != now.base.device:
                self.snapshot = Snapshot(now.base.moved(device), now.added, now.items, now.alive)

    @property
    def named(self) -> bool:
        """Whether ids are str."""
        return self.snapshot.items.named

    @property
    def columns(self) -> list[str]:
        """Of the metadata."""
        return self.snapshot.items.metadata.column_names

    @property
    def stored_bytes(self) -> int:
        """Of the vectors, as they are written."""
        return self.snapshot.base.stored_bytes() + self.snapshot.added.rows.nbytes

    def saving(self) -> Any:
        """What writes this moment's version."""
        from mmcl.index.local_files import Saving

        return Saving(self)

    def check_parameters(self, parameters: Mapping[str, Any]) -> None:
        """ValueError for a search parameter that this type does not have."""
        self.snapshot.base.check_parameters(parameters)

    def search(self, queries: np.ndarray, k: int, where: Any, parameters: Mapping[str, Any]) -> Hits:
        """The k items of largest inner product with each of (nq, width) float32 queries."""
        now = self.snapshot
        keep = now.chosen(where)
        scores, rows = best_rows(now, queries, k, keep, parameters)
        counts = (rows >= 0).sum(axis=1)
        if counts.min(initial=k) < k:  # FAISS pads with the lowest number there is
            scores = np.where(rows < 0, np.float32(-np.inf), scores)

        def look_up() -> list[list[dict[str, Any]]]:
            return split_by(now.items.metadata_at(rows[rows >= 0]), counts)

        return Hits(now.items.ids_at(rows), scores, counts, look_up, now.base.exact)

    def verify(self, width: int) -> None:
        """ValueError where the parts disagree, with both figures."""
        now = self.snapshot
        if len(now.base) + len(now.added) != len(now.items):
            raise ValueError(f"{len(now.items)} items, yet {len(now.base) + len(now.added)} vectors")
        if now.base.width != width:
            raise ValueError(f"vectors of width {now.base.width}, yet the score's have {width}")

    def get(self, ids: list[Any]) -> list[dict[str, Any]]:
        """Metadata of ids; KeyError names one that is not there."""
        now = self.snapshot
        return now.items.metadata_at(self._known(now, ids))

    def vectors(self, ids: list[Any]) -> np.ndarray:
        """(n, width) float32 vectors as they are stored; KeyError names an id that is not there."""
        now = self.snapshot
        rows, base = self._known(now, ids), len(now.base)
        found = np.empty((len(rows), now.base.width), np.float32)
        early = rows < base
        found[early] = now.base.vectors(rows[early])
        found[~early] = now.added.rows[rows[~early] - base]
        return found

    def ids(self) -> np.ndarray:
        """(n,) ids of all items, in the order in which they were stored."""
        now = self.snapshot
        return now.items.ids[now.alive]

    def add(self, ids: np.ndarray | None, vectors: np.ndarray, metadata: pa.Table) -> None:
        """Store new items; None: the integers behind the largest that was ever there.

        Raises: ValueError naming an id that is there already, or is of the other kind, or a metadata column that does
            not fit; nothing is stored then.
        """
        with self._writing:
            now = self.snapshot
            ids = self._next_ids(now, len(vectors)) if ids is None else self._one_kind(now, ids)
            there = np.flatnonzero(self._alive_rows(now, now.items.find_checked(ids)) >= 0)
            if len(there):
                first = int(there[0])
                raise ValueError(
                    f"id {ids.tolist()[first]!r} (row {first}) is in the index already; upsert replaces it"
                )
            self._append(now, now.alive, ids, vectors, metadata)

    def upsert(self, ids: np.ndarray, vectors: np.ndarray, metadata: pa.Table) -> None:
        """Store items, in place of those that have their ids. ValueError as in `add`."""
        with self._writing:
            now = self.snapshot
            ids = self._one_kind(now, ids)
            rows = self._alive_rows(now, now.items.find_checked(ids))
            self._append(now, without(now.alive, rows[rows >= 0]), ids, vectors, metadata)

    def remove(self, ids: list[Any]) -> None:
        """Take items out; KeyError naming an id that is not there, and nothing is removed then."""
        with self._writing:
            now = self.snapshot
            alive = without(now.alive, self._known(now, ids))
            self.snapshot = Snapshot(now.base, now.added, now.items, alive)

    def compact(self) -> None:
        """Build the base anew from what is alive, in the order in which it was stored."""
        with self._writing:
            now = self.snapshot
            keep, base = now.alive, len(now.base)
            if now.whole and not len(now.added):
                return
            rebuilt = now.base.rebuilt(keep[:base], np.ascontiguousarray(now.added.rows[keep[base:]]))
            items = now.items if now.whole else now.items.kept(keep)
            nothing = Growing(np.empty((0, rebuilt.width), np.float32))
            self.snapshot = Snapshot(rebuilt, nothing, items, np.ones(len(items), bool))

    def _append(
        self, now: Snapshot, alive: np.ndarray, ids: np.ndarray, vectors: np.ndarray, metadata: pa.Table
    ) -> None:
        now.base.check_vectors(vectors)
        added, items = now.added.appended(vectors), now.items.appended(ids, metadata)
        alive = np.concatenate([alive, np.ones(len(ids), bool)])
        base = now.base
        if len(added) > max(FOLD_ROWS, FOLD_SHARE * len(base)) and not base.memory_mapped:
            base, added = base.rebuilt(None, added.rows), Growing(np.empty((0, base.width), np.float32))
        self.snapshot = Snapshot(base, added, items, alive)
        self.next_id = max(self.next_id, beyond(ids))

    def _next_ids(self, now: Snapshot, count: int) -> np.ndarray:
        if now.items.named and len(now.items):
            raise ValueError("the ids of this index are strings; give one for each new item as ids=[...]")
        if self.next_id + count > 2**63:
            raise ValueError(f"the ids from {self.next_id} on go beyond 2^63 - 1; give them as ids=[...]")
        return np.arange(self.next_id, self.next_id + count, dtype=np.int64)

    def _one_kind(self, now: Snapshot, ids: np.ndarray) -> np.ndarray:
        if len(ids) and len(now.items) and (ids.dtype == object) != now.items.named:
            theirs, ours = ("strings", "integers") if ids.dtype == object else ("integers", "strings")
            raise ValueError(f"the ids of this index are {ours}, these are {theirs}: {ids.tolist()[0]!r}")
        return ids if len(ids) else ids.astype(now.items.ids.dtype)

    def _rows(self, now: Snapshot, ids: list[Any]) -> np.ndarray:
        """(n,) rows of ids, -1 where there is no such item."""
        return self._alive_rows(now, now.items.find(ids))

    def _alive_rows(self, now: Snapshot, rows: np.ndarray) -> np.ndarray:
        return np.where(now.alive[rows], rows, -1) if len(now.alive) else rows

    def _known(self, now: Snapshot, ids: list[Any]) -> np.ndarray:
        rows = self._rows(now, ids)
        unknown = np.flatnonzero(rows < 0)
        if len(unknown):
            kind = "str" if now.items.named else "integers"
            raise KeyError(f"no item {ids[int(unknown[0])]!r}; ids of this index are {kind}")
        return rows


def best_rows(
    now: Snapshot, queries: np.ndarray, k: int, keep: np.ndarray | None, parameters: Mapping[str, Any]
) -> tuple[np.ndarray, np.ndarray]:
    """(nq, k) scores and rows of a snapshot, best first, padded by -inf and -1: the base's and the added ones'."""
    base, found = len(now.base), []
    early, late = (None, None) if keep is None else (keep[:base], keep[base:])
    if base and len(queries):
        found.append(now.base.search(queries, min(k, base), parameters, early))
    if len(now.added) and len(queries):
        added, numbers = now.added.rows, None
        if late is not None and not late.all():
            numbers = np.flatnonzero(late)
            added = added[numbers]
        if len(added):
            scores, rows = nearest(queries, added, min(k, len(added)))
            numbers = np.arange(len(added)) if numbers is None else numbers
            found.append((scores, at_rows(numbers + base, rows)))
    if len(found) == 1 and found[0][0].shape[1] == k:
        return found[0]
    return best_of([*found, nothing_found(len(queries), k)], k)


def without(alive: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """A copy of `alive` with these rows removed."""
    alive = alive.copy()
    alive[rows] = False
    return alive


def beyond(ids: np.ndarray) -> int:
    """The least integer above all integer ids."""
    return int(ids.max()) + 1 if len(ids) and ids.dtype != object else 0
