"""A whole index built on disk: vectors by `disk_build`, ids and metadata shard by shard, nothing held for long."""

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from mmcl.index.building import EXACT
from mmcl.index.disk_build import build_on_disk
from mmcl.index.disk_source import ShardBlocks, Vectors, shard_blocks
from mmcl.index.faiss_backend import FaissBackend
from mmcl.index.fusion import Fusion
from mmcl.index.item_checks import ID, check_metadata
from mmcl.index.local_files import GROUP_ROWS, ITEMS, about_base, link
from mmcl.index.sources import checked_block
from mmcl.index.store import BUILDING, refuse_foreign_folder, sync, write_version
from mmcl.shards import EmbeddingShards

ARRAY_ROWS = 65536


def build_folder(
    out: Path,
    fusion: Fusion,
    items: Any,
    ids: np.ndarray,
    metadata: pa.Table | None,
    factory: Any,
    device: str,
    about: Mapping[str, Any],
    progress: bool,
) -> None:
    """Write an index of embeddings that need not fit in memory into the folder `out`, replacing the one there.

    Args:
        items: `EmbeddingShards`, or {modality: (n, d) arrays}, memory-mapped ones too.
        ids: (n,) checked.
        metadata: n rows; None: that of the shards.
        factory: FAISS factory string, or "Exact".
        about: what the manifest says besides the tuples.
    """
    shards = fused_shards(fusion, items)
    if out.is_dir():
        refuse_foreign_folder(out)
    work = out / BUILDING
    work.mkdir(parents=True, exist_ok=True)
    with one_builder(work):
        source = items.state() if isinstance(items, EmbeddingShards) else ""
        base, names = write_vectors(work, fusion, shards, factory, device, source, progress)
        tables = items if isinstance(items, EmbeddingShards) and metadata is None else metadata
        columns = write_items(work / ITEMS, ids, tables)

        def write(folder: Path) -> dict[str, Any]:
            fusion.write(folder)
            for name in (ITEMS, *names):
                link(work / name, folder / name)
            return {}

        count = len(ids)
        next_id = 0 if ids.dtype == object else int(ids.max(initial=-1)) + 1
        tuples = about_base(base) | {"count": count, "rows": count, "next_id": next_id, "columns": columns}
        write_version(out, write, {**about, **tuples})
        shutil.rmtree(work)


def fused_shards(fusion: Fusion, items: Any) -> list[ShardBlocks]:
    """The vectors of embedding shards or arrays, read when they are asked for."""
    score, names = fusion.score, fusion.modalities

    def fuse(rows: Mapping[str, Any], start: int) -> np.ndarray:
        block = checked_block(rows, dict.fromkeys(rows, True), score, None, start)
        with torch.no_grad():
            return next(iter(fusion.fused([(block, None)], [], start)))

    if isinstance(items, EmbeddingShards):
        return shard_blocks(items, fuse)
    count = len(items[names[0]])

    def read(start: int, rows: Any) -> np.ndarray:
        run = isinstance(rows, slice)
        wanted: Any = slice(rows.start + start, rows.stop + start) if run else rows + start
        return fuse({name: items[name][wanted] for name in names}, wanted.start if run else int(wanted[0]))

    def part(start: int) -> ShardBlocks:
        return ShardBlocks(min(ARRAY_ROWS, count - start), lambda rows: read(start, rows))

    return [part(start) for start in range(0, count, ARRAY_ROWS)]


def write_vectors(
    work: Path, fusion: Fusion, shards: list[ShardBlocks], factory: Any, device: str, source: str, progress: bool
) -> tuple[Any, list[str]]:
    """The backend, memory-mapped, and the names of its files."""
    if factory == EXACT:
        from mmcl.index.exact_backend import ExactBackend, exact_pays

        if exact_pays(device):
            file = work / "rows.npy"
            vectors = Vectors(shards, fusion.width, progress)
            rows = np.lib.format.open_memmap(file, "w+", np.float32, (len(vectors), fusion.width))
            for row, block in vectors.blocks("fusing"):
                rows[row : row + len(block)] = block
            rows.flush()
            sync(file)
            return ExactBackend.read(work, factory, fusion.width, {}, memory_map=True), [file.name]
        factory = "Flat"
    facts = build_on_disk(factory, fusion.width, shards, work, source=source, progress=progress)
    return FaissBackend.read(work, factory, fusion.width, facts, memory_map=True), ["index.faiss"]


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
