"""Local tuples on disk. What has not changed since the last save is linked, not written again.

items.parquet               ids and metadata of the rows that the base holds
index.faiss or rows.npy     the base's vectors
added.npy, added.parquet    what was added since the base was built
removed.npy                 row numbers that were removed
"""

import os
import shutil
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from mmcl.index.devices import CPU
from mmcl.index.exact_backend import ExactBackend, exact_pays
from mmcl.index.faiss_backend import FaissBackend
from mmcl.index.fusion import FILES as FUSION_FILES
from mmcl.index.items import Items
from mmcl.index.local import LocalTuples
from mmcl.index.store import Digest, digest_of, sync
from mmcl.tables import lookup

ENGINES: dict[str, Any] = {"faiss": FaissBackend, "exact": ExactBackend}
GROUP_ROWS = 8192
"""Rows of a table that are written, and later read, at once: a memory-mapped index reads so many to show one."""
ITEMS, ADDED, ADDED_ITEMS, REMOVED = "items.parquet", "added.npy", "added.parquet", "removed.npy"


class Saved:
    """Where a base lies on disk, with the checksums of its files.

    Args:
        base: what they hold. Nothing of it is kept alive: what is rebuilt frees its memory.
        folder: that holds them.
        files: {name: size and SHA-256}, just written or checked.
    """

    def __init__(self, base: Any, folder: Path, files: Mapping[str, Digest]):
        self.held, self.folder, self.files = weakref.ref(base.held), folder.absolute(), files
        self.states = {name: state_of(self.folder / name) for name in files}

    def of(self, base: Any) -> bool:
        """Whether these files still hold this base, untouched as far as one sees without reading them."""
        found = {name: state_of(self.folder / name) for name in self.files}
        return self.held() is base.held and None not in found.values() and found == self.states


def state_of(file: Path) -> tuple[int, int, int] | None:
    """Number, size and time of the last change of a file, by which a change shows; None where there is none."""
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def about_base(base: Any) -> dict[str, Any]:
    """What the manifest says about a backend."""
    return {
        "backend": base.engine,
        "factory": base.factory,
        "exact": base.exact,
        "padded_width": base.padded_width,
        "engine": base.about(),
    }


class Saving:
    """One snapshot on its way to disk."""

    def __init__(self, tuples: LocalTuples):
        self.tuples, self.now = tuples, tuples.snapshot
        self.names: list[str] = []

    def about(self) -> dict[str, Any]:
        """What the manifest says about the tuples."""
        now = self.now
        return {
            **about_base(now.base),
            "count": now.count,
            "rows": len(now.items),
            "next_id": self.tuples.next_id,
            "columns": now.items.metadata.column_names,
        }

    def write(self, folder: Path) -> dict[str, Digest]:
        """Write the files; returns the checksums of those that were taken from the save before.

        Versions of one folder share their files; another folder gets its own, which a fault of the disk in this one
        leaves alone.
        """
        now, base = self.now, len(self.now.base)
        now.base.refuse_changed()
        known = self._taken_over(folder)
        if not known:
            write_table(folder / ITEMS, now.items.to_table(0, base))
            self.names = [ITEMS, *now.base.write(folder)]
        if len(now.added):
            write_array(folder / ADDED, now.added.rows)
            write_table(folder / ADDED_ITEMS, now.items.to_table(base))
        if not now.whole:
            write_array(folder / REMOVED, np.flatnonzero(~now.alive))
        return known

    def _taken_over(self, folder: Path) -> dict[str, Digest]:
        """The checksums of the files that were linked or copied; none where they have to be written anew.

        Raises: ValueError where a copy is not what was saved, and memory does not have it either.
        """
        saved = self.tuples.saved
        if saved is None or not saved.of(self.now.base):
            return {}
        here = saved.folder.parent.resolve() == folder.parent.resolve()
        for name, digest in saved.files.items():
            (link if here else copied)(saved.folder / name, folder / name)
            if not here and digest_of(folder / name) != digest:
                if self.now.base.memory_mapped:
                    raise ValueError(f"{saved.folder / name} is damaged: its SHA-256 is no longer what it was")
                return {}
        self.names = list(saved.files)
        return dict(saved.files)

    def done(self, folder: Path, files: Mapping[str, Digest]) -> None:
        """The version is on disk."""
        self.tuples.saved = Saved(self.now.base, folder, {name: files[name] for name in self.names})


def read_tuples(folder: Path, manifest: Mapping[str, Any], width: int, memory_map: bool) -> LocalTuples:
    """Undo `write_tuples`. ValueError where the files' counts disagree."""
    engine = lookup(ENGINES, manifest["backend"], "backend")
    base = engine.read(folder, manifest["factory"], width, manifest["engine"], memory_map)
    if isinstance(base, ExactBackend) and not memory_map and not exact_pays(CPU):
        base = FaissBackend.build("Flat", width, [base.vectors(np.arange(len(base)))])  # faster on this machine
    items = Items.from_file(folder / ITEMS) if memory_map else Items.from_parquet(folder / ITEMS)
    early = len(items)
    added = np.empty((0, width), np.float32)
    if ADDED in manifest["files"]:
        added = np.load(folder / ADDED, allow_pickle=False)
        more = Items.from_parquet(folder / ADDED_ITEMS)
        items = items.appended(more.ids, more.metadata)
    alive = np.ones(len(items), bool)
    if REMOVED in manifest["files"]:
        alive[np.load(folder / REMOVED, allow_pickle=False)] = False
    tuples = LocalTuples(base, items, added, alive, manifest["next_id"])
    found = (len(base) + len(added), len(items), len(tuples))
    stated = (manifest["rows"], manifest["rows"], manifest["count"])
    if len(base) != early or found != stated:
        told = "{} vectors, {} ids, {} not removed".format(*found)
        raise ValueError(f"{folder} is damaged: {told}; the manifest says " + "{}, {}, {}".format(*stated))
    names = [name for name in manifest["files"] if name not in (ADDED, ADDED_ITEMS, REMOVED, *FUSION_FILES)]
    if base.engine == manifest["backend"]:
        tuples.saved = Saved(base, folder, {name: manifest["files"][name] for name in names})
    return tuples


def write_table(file: Path, table: Any) -> None:
    """A parquet file; opened here, as arrow takes some names for addresses."""
    with open(file, "wb") as opened:
        pq.write_table(table, opened, row_group_size=GROUP_ROWS)


def write_array(file: Path, rows: np.ndarray) -> None:
    """A .npy file; OSError where the disk is full."""
    with open(file, "wb") as opened:
        np.save(opened, np.ascontiguousarray(rows), allow_pickle=False)


def link(source: Path, target: Path) -> None:
    """The same file under a second name; a copy where the system has no such links."""
    try:
        os.link(source, target)
    except OSError:
        copied(source, target)


def copied(source: Path, target: Path) -> None:
    """A file of its own with the same content, on the disk itself."""
    shutil.copyfile(source, target)
    sync(target)
