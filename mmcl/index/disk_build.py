"""Indexes larger than memory: built from shards that are read, encoded and written a block at a time.

A random sample of all shards trains the index. Then every block is encoded, and the codes go where they will stand in
the index's file; those of inverted lists wait beside it, sorted within each part, until all lists are known. Memory
holds the sample while training, and afterwards one block and one part, however many shards there are.

building/
  state.json            what is built, how many rows and parts of it are on the disk, and whether all is
  trained.faiss         the index without rows
  first.npy             the first vector of each shard: another score makes others of the same files
  index.faiss           as it will be
  codes-0.bin           codes of inverted lists, part by part; rows-0.bin and sizes-0.bin are their rows and list sizes
"""

import hashlib
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mmcl.index.disk_codes import Codes
from mmcl.index.disk_layout import lay_out, leaves, tree
from mmcl.index.disk_source import Pass, ShardBlocks, Steps, Vectors, run_steps
from mmcl.index.faiss_backend import FaissBackend
from mmcl.index.faiss_factory import AUTO, MIPS, new_faiss_index, parts, rows_to_train
from mmcl.index.faiss_files import FILE, read_faiss, write_faiss
from mmcl.index.faiss_ranges import quantised, squares, widen_ranges
from mmcl.index.faiss_setup import load_faiss
from mmcl.index.store import sync

WORK, STATE, TRAINED, FIRST = "building", "state.json", "trained.faiss", "first.npy"
LIST_ROWS, MOST_LIST_ROWS = 40, 256
"""Training rows a list."""
WORD_ROWS = 256
"""Training rows a code word."""
SAMPLE_BYTES = 128 * 2**20
"""Of training rows beyond the least."""

State = dict[str, Any]
"""{"settings", "norm", "rows": done, "parts": done}."""


def build_on_disk(
    factory: Any,
    width: int,
    shards: Sequence[ShardBlocks],
    folder: Path,
    *,
    source: str | None = None,
    sample: int | None = None,
    seed: int = 0,
    progress: bool = False,
) -> dict[str, Any]:
    """Write the index of all shards' vectors, in their order, into `folder`, for `FaissBackend.read`.

    A build that was interrupted goes on behind its last whole part when the same is asked for again. What FAISS only
    builds in memory (the graph of HNSW32, the codes of IVF64,PQ16x4fs) is built there, from the start again.

    Args:
        factory: FAISS factory string, "MIPS," and one, or "auto".
        width: of the fused vectors.
        shards: in the order of the rows.
        folder: made where missing; an unfinished build lies in its `building`. One builder at a time.
        source: what tells these vectors from others, such as a digest of their files. Without it, every build starts
            from the beginning.
        sample: rows to train on, drawn from all; default: see `training_rows`.
        seed: of the sample.
        progress: show a bar.
    Returns: what `FaissBackend.read` takes as `about`.
    Raises: ValueError for an unknown factory, too few rows to train on, a row that the type cannot hold, and where the
        folder holds an unfinished build of something else. OSError where the disk is full: make room, build again.
    """
    (about,) = run_steps([build_steps(factory, Vectors(shards, width, progress), folder, source, sample, seed)])
    os.replace(folder / WORK / FILE, folder / FILE)
    shutil.rmtree(folder / WORK)
    return about


def build_steps(
    factory: Any, vectors: Vectors, folder: Path, source: str | None, sample: int | None = None, seed: int = 0
) -> Steps[dict[str, Any]]:
    """`build_on_disk`, pass by pass. The index stays in `building`: asked for again, it is there already."""
    factory = AUTO if factory == "auto" else factory
    width, work = vectors.width, folder / WORK
    settings = {"factory": factory, "width": width, "rows": len(vectors), "sample": sample, "seed": seed}
    settings |= {"source": digest([vectors.starts, source]), "faiss": load_faiss().__version__}
    if not source:
        shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True, exist_ok=True)
    state = read_state(work, settings)
    if state is None:
        backend = yield from trained(factory, vectors, sample, seed)
        write_faiss(backend.index, work, TRAINED)
        sync(work / TRAINED)
        np.save(work / FIRST, vectors.first_rows())
        state = {"settings": settings, "norm": backend.norm, "rows": 0, "parts": 0}
        write_state(work, state)
    elif not np.allclose(np.load(work / FIRST), vectors.first_rows(), rtol=1e-4, atol=1e-6):
        raise ValueError(f"{work} holds an unfinished build of other vectors; remove the folder")
    backend = FaissBackend(read_faiss(work, name=TRAINED), factory, width, state["norm"])
    if not state.get("complete"):
        yield from fill(backend, vectors, work, state)
        sync(work / FILE)
        write_state(work, state | {"complete": True})
    found = read_faiss(work, memory_map=True).ntotal
    if found != len(vectors):
        raise RuntimeError(f"{work / FILE} has {found} rows, and should have {len(vectors)}")
    return backend.about()


def trained(factory: str, vectors: Vectors, sample: int | None, seed: int) -> Steps[FaissBackend]:
    """The index without rows, trained on a random sample. Ranges and lengths are those of all rows."""
    lifted = isinstance(factory, str) and factory.startswith(MIPS)
    index = new_faiss_index(factory, vectors.width + lifted)
    backend, longest = FaissBackend(index, factory, vectors.width), np.zeros(1)

    def measure(row: int, block: np.ndarray) -> None:
        longest[0] = max(longest[0], squares(block).max(initial=0))

    def widen(row: int, block: np.ndarray) -> None:
        widen_ranges(index, backend._stored(block, row))

    if lifted:
        yield Pass("measuring", vectors, measure)
        backend.norm = float(np.sqrt(longest[0]))
    if not index.is_trained:
        train_on_sample(backend, vectors, min(len(vectors), training_rows(index) if sample is None else sample), seed)
    if any(True for _ in quantised(index, np.empty((0, index.d), np.float32))):
        yield Pass("measuring", vectors, widen)
    return backend


def train_on_sample(backend: FaissBackend, vectors: Vectors, size: int, seed: int) -> None:
    """Train on so many random rows, which no other build holds at the same time."""
    rows, filled = np.empty((size, backend.index.d), np.float32), 0
    for block in vectors.sample(size, seed):
        rows[filled : filled + len(block)] = backend._stored(block)
        filled += len(block)
    backend._train(rows)


def training_rows(index: Any) -> int:
    """How many rows to train on.

    At least 40 a list (FAISS warns below 39) and 256 a code word, for which quantisers and rotations look at no more.
    Where 128 MiB hold them, up to 256 a list, FAISS's own limit, in as much more time: of 1024 lists over 400,000 rows
    those that 16 probes visit held .71, .80, .82 and .85 of the 10 best for 20, 40, 80 and 256 rows a list.
    """
    lists = [part.nlist for part in parts(index) if hasattr(part, "nlist")]
    words = [part.pq.ksub for part in parts(index) if hasattr(part, "pq")]
    least = max(WORD_ROWS * max([256, *words]), LIST_ROWS * max([1, *lists]), rows_to_train(index))
    most = MOST_LIST_ROWS * max([1, *lists])
    return max(least, min(most, SAMPLE_BYTES // (4 * index.d)))


def fill(backend: FaissBackend, vectors: Vectors, work: Path, state: State) -> Steps[None]:
    """Write index.faiss, going on behind the last whole part."""
    found, total = list(leaves(backend.index)), len(vectors)
    on_disk = [leaf for leaf in found if not leaf.in_memory]

    def add(row: int, block: np.ndarray) -> None:
        rows = backend._stored(block, row)
        for leaf in found:
            if leaf.in_memory:
                leaf.index.add(leaf.mapped(rows))

    if len(on_disk) < len(found):
        yield Pass("adding", vectors, add)
    if not on_disk:
        for part in tree(backend.index):
            part.ntotal = total
        write_faiss(backend.index, work)
        return
    layout = lay_out(backend.index, on_disk, total)
    codes, file = Codes(work, on_disk, layout), work / FILE
    resumes = len(on_disk) == len(found) and codes.hold(state["parts"], state["rows"])
    if not (resumes and file.is_file() and file.stat().st_size == layout.size):
        state |= {"rows": 0, "parts": 0}
    with open(file, "r+b" if state["rows"] else "wb") as opened:

        def encode(row: int, block: np.ndarray) -> None:
            codes.put(opened, row, backend._stored(block, row))
            end = row + len(block)
            if end - state["rows"] >= codes.part_rows or end == total:
                codes.end_part(opened, state["parts"], state["rows"])
                state.update({"rows": end, "parts": state["parts"] + 1})
                write_state(work, state)

        codes.begin(opened, total)
        yield Pass("encoding", vectors, encode, state["rows"])
        codes.merge(opened, state["parts"], total)


def read_state(work: Path, settings: dict[str, Any]) -> State | None:
    """Of an unfinished build; None where there is none. ValueError where it has other settings."""
    if not (work / STATE).is_file():
        return None
    state = json.loads((work / STATE).read_text(encoding="utf-8"))
    for name, value in settings.items():
        if state["settings"].get(name) != value:
            raise ValueError(
                f"{work} holds an unfinished build: {name} is {state['settings'].get(name)!r} there, {value!r} here; "
                "build that one, or remove the folder"
            )
    return state


def write_state(work: Path, state: State) -> None:
    """Replace the state in one step."""
    draft = work / f"{STATE}.draft"
    draft.write_text(json.dumps(state, indent=2), encoding="utf-8")
    sync(draft)
    os.replace(draft, work / STATE)


def digest(value: Any) -> str:
    """Of what JSON can hold."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()
