"""A whole index built on disk, or several in the same passes: vectors by `disk_build`, ids and metadata shard by shard,
nothing held for long."""

import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from mmcl.files import made_folder
from mmcl.index.building import EXACT
from mmcl.index.disk_build import WORK, build_steps
from mmcl.index.disk_source import ArrayShards, Pass, SharedShards, Steps, Vectors, run_steps, shard_blocks, share
from mmcl.index.faiss_backend import FaissBackend
from mmcl.index.fusion import Fusion
from mmcl.index.item_checks import ID, check_metadata
from mmcl.index.local_files import GROUP_ROWS, ITEMS, about_base, link
from mmcl.index.sources import checked_block
from mmcl.index.store import BUILDING, refuse_foreign_folder, sync, write_version
from mmcl.shards import EmbeddingShards


def build_folder(
    out: Path,
    fusion: Fusion,
    items: Any,
    ids: np.ndarray,
    metadata: pa.Table | None,
    factory: Any,
    device: str,
    about: Mapping[str, Any],
    settle: Callable[[Any], dict[str, Any]],
    progress: bool,
) -> None:
    """Write an index of embeddings that need not fit in memory into the folder `out`, replacing the one there.

    Args:
        items: `EmbeddingShards`, or {modality: (n, d) arrays}, memory-mapped ones too.
        ids: (n,) checked.
        metadata: n rows; None: that of the shards.
        factory: FAISS factory string, or "Exact".
        about: what the manifest says besides the tuples.
        settle: given the backend, returns what else it says, such as the effort of searches. It is asked before the
            index counts: whoever loads it never finds an effort that nobody chose.
    """
    refuse_foreign_folder(made_folder(out, "an index is saved"))
    work = out / BUILDING
    work.mkdir(parents=True, exist_ok=True)
    with one_builder(work):
        vectors = fused_vectors(fusion, shared(items, fusion.modalities), progress)
        ((base, files),) = run_steps([vector_steps(work, vectors, factory, device, state_of(items))])
        columns = write_items(work / ITEMS, ids, items if metadata is None and is_shards(items) else metadata)
        write, facts = draft_of(fusion, base, [work / ITEMS, *files], ids, columns)
        write_version(out, write, {**about, **facts, **settle(base)})
        shutil.rmtree(work)


def is_shards(items: Any) -> bool:
    """Whether these are embedding shards; arrays otherwise."""
    return isinstance(items, EmbeddingShards)


def state_of(items: Any) -> str:
    """What tells these embeddings from others; "" where nothing does."""
    return items.state() if is_shards(items) else ""


def shared(items: Any, modalities: tuple[str, ...]) -> SharedShards:
    """Embedding shards, or arrays, as one index reads them, or several that select some of these modalities."""
    return share(items if is_shards(items) else ArrayShards(items), modalities)


def fused_vectors(fusion: Fusion, shards: SharedShards, progress: bool) -> Vectors:
    """The vectors of embeddings of just the fusion's modalities, read when they are asked for."""

    def fuse(rows: Mapping[str, Any], start: int) -> np.ndarray:
        block = checked_block(rows, dict.fromkeys(rows, True), fusion.score, None, start)
        with torch.no_grad():
            return next(iter(fusion.fused([(block, None)], [], start)))

    return Vectors(shard_blocks(shards, fuse), fusion.width, progress)


def vector_steps(work: Path, vectors: Vectors, factory: Any, device: str, source: str) -> Steps[tuple[Any, list[Path]]]:
    """Write the vectors into `work`; returns the backend, memory-mapped, and its files.

    They stay there: where the rest of a build was interrupted, the next one finds them.
    """
    exact = factory == EXACT
    if exact:
        from mmcl.index.exact_backend import FILE, ExactBackend, exact_pays

        if exact_pays(device):
            yield from exact_steps(work / FILE, vectors)
            return ExactBackend.read(work, factory, vectors.width, {}, memory_map=True), [work / FILE]
    factory = "Flat" if exact else factory
    facts = yield from build_steps(factory, vectors, work, source)
    folder = work / WORK
    return FaissBackend.read(folder, factory, vectors.width, facts, memory_map=True), [folder / "index.faiss"]


def exact_steps(file: Path, vectors: Vectors) -> Steps[None]:
    """Write the vectors as they are."""
    rows = np.lib.format.open_memmap(file, "w+", np.float32, (len(vectors), vectors.width))

    def put(row: int, block: np.ndarray) -> None:
        rows[row : row + len(block)] = block

    yield Pass("fusing", vectors, put)
    rows.flush()
    sync(file)


def draft_of(
    fusion: Fusion, base: Any, files: list[Path], ids: np.ndarray, columns: list[str]
) -> tuple[Callable[[Path], dict[str, Any]], dict[str, Any]]:
    """What writes a version of an index whose files are there already, and what its manifest says of the tuples."""

    def write(folder: Path) -> dict[str, Any]:
        fusion.write(folder)
        for file in files:
            link(file, folder / file.name)
        return {}

    next_id = 0 if ids.dtype == object else int(ids.max(initial=-1)) + 1
    return write, about_base(base) | {"count": len(ids), "rows": len(ids), "next_id": next_id, "columns": columns}


def write_items(file: Path, ids: np.ndarray, metadata: Any) -> list[str]:
    """Ids and metadata, of a table or of shards, as parquet; returns the columns."""
    named = ids.dtype == object
    schema, parts = metadata_parts(metadata, len(ids))
    whole = pa.schema([pa.field(ID, pa.large_string() if named else pa.int64()), *schema])
    start = 0
    with open(file, "wb") as opened, pq.ParquetWriter(opened, whole) as writer:
        for table in parts:
            end = start + table.num_rows
            keys = pa.array(ids[start:end], whole.field(ID).type)
            columns = [keys, *(table[name] for name in schema.names)]
            writer.write_table(pa.table(columns, schema=whole), row_group_size=GROUP_ROWS)
            start = end
    sync(file)
    return schema.names


def metadata_parts(metadata: Any, count: int) -> tuple[pa.Schema, Iterator[pa.Table]]:
    """The schema of all metadata, and its tables one after the other."""
    if metadata is None or isinstance(metadata, pa.Table):
        table = check_metadata(metadata, count) if metadata is None else metadata
        if not table.column_names:
            return table.schema, (empty_table(min(GROUP_ROWS, count - i)) for i in range(0, count, GROUP_ROWS))
        return table.schema, iter([table])
    tables = (metadata.shard_metadata(number) for number in range(len(metadata.shard_rows())))
    schema = pa.unify_schemas([plain(table).schema for table in tables], promote_options="permissive")
    check_metadata(schema.empty_table(), 0)

    def parts() -> Iterator[pa.Table]:
        for number, rows in enumerate(metadata.shard_rows()):
            table = plain(metadata.shard_metadata(number))
            columns = [
                table[name].cast(schema.field(name).type) if name in table.column_names else pa.nulls(rows, kind)
                for name, kind in zip(schema.names, schema.types, strict=True)
            ]
            yield pa.table(columns, schema=schema) if columns else empty_table(rows)

    return schema, parts()


def plain(table: pa.Table) -> pa.Table:
    """Without what its file says about itself."""
    return table.replace_schema_metadata(None)


def empty_table(rows: int) -> pa.Table:
    """Rows without columns."""
    return pa.table({"row": pa.nulls(rows)}).select([])


@contextmanager
def one_builder(work: Path) -> Iterator[None]:
    """TimeoutError where another process builds here."""
    from filelock import FileLock, Timeout

    lock = FileLock(str(work / ".lock"), timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise TimeoutError(
            f"another process is building the index in {work.parent} (it holds {lock.lock_file})"
        ) from None
    try:
        yield
    finally:
        lock.release()
