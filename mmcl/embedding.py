"""A dataset through a model -> embedding shards on disk, resumable."""

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from mmcl.arrays import refuse_unknown
from mmcl.batching import BatchMaker
from mmcl.data import column_rows, refuse_missing_column
from mmcl.model import MultimodalModel
from mmcl.modes import evaluating
from mmcl.progress import counting
from mmcl.shards import KEY, EmbeddingShards, ShardWriter, open_shards
from mmcl.tables import lookup

DTYPES = {"float32": np.float32, "float16": np.float16}
Rows = tuple[list[int], dict[str, list]]


def embed(
    model: MultimodalModel,
    dataset: Any,
    out: str | Path,
    columns: Mapping[str, str] | None = None,
    *,
    modalities: Sequence[str] | None = None,
    key: str | None = None,
    keep: Sequence[str] | None = None,
    batch_size: int = 256,
    shard_size: int = 10_000,
    dtype: str = "float32",
    progress: bool = True,
) -> EmbeddingShards:
    """Write one embedding a row and modality into `out`, in clip-retrieval's layout (see `mmcl.shards`).

    A run that was interrupted goes on behind its last whole shard.

    Args:
        model: run in evaluation mode.
        dataset: `datasets.Dataset` or `datasets.IterableDataset`.
        out: folder of the shards.
        columns: {modality: column}; default: columns named as the modalities.
        modalities: those to embed; default: all of the model's.
        key: column of unique values by which shards of different folders are joined; default: the row number. In a
            stream they are only checked when shards are joined.
        keep: columns kept as metadata; default: all of numbers, strings, booleans, dates and times.
        batch_size: rows encoded at once.
        shard_size: rows a shard, rounded up to whole batches.
        dtype: "float32" or "float16", of the files.
    Returns: the shards, ready to be read.
    Raises: KeyError for unknown names; ValueError naming modality and row for a value that cannot be used, and for a
        folder that holds something else.
    """
    names = tuple(modalities or model.modalities)
    refuse_unknown(names, model.modalities, "modalities")
    maker = BatchMaker(model, dataset, columns, modalities=names)
    kept = list(keep) if keep is not None else plain_columns(dataset)
    for column in [*kept, *([key] if key else [])]:
        refuse_missing_column(dataset, column, "the metadata")
    run = {"fingerprint": model.fingerprint(), "dim": model.score.dim, "dtype": dtype, "columns": maker.columns}
    run |= {"key": key, "metadata": kept, "batch_size": batch_size, "shard_size": shard_size, "rows": maker.count}
    number = lookup(DTYPES, dtype, "dtype")
    if key and maker.count is not None:
        refuse_repeated(maker.dataset[key][:], key)
    if maker.count == 0:
        raise ValueError("the dataset has no rows to embed")
    writer = ShardWriter(Path(out), run)
    done = sum(shard["rows"] for shard in writer.shards)
    batches = column_rows(maker.dataset.skip(done), batch_size, done) if done != maker.count else iter(())
    with evaluating(model), counting("embedding", maker.count, done, progress) as advance:
        while shard := list(islice(encoded(maker, batches), math.ceil(shard_size / batch_size))):
            parts = [embeddings for _, embeddings in shard]
            joined = {name: np.concatenate([part[name] for part in parts]).astype(number) for name in names}
            tables = [metadata_table(rows, key, kept) for rows, _ in shard]
            writer.write(joined, pa.concat_tables(tables, promote_options="permissive"))
            advance(sum(table.num_rows for table in tables))
    writer.write_manifest(complete=True)
    return open_shards(out).select(names)


def encoded(maker: BatchMaker, batches: Iterator[Rows]) -> Iterator[tuple[Rows, dict[str, np.ndarray]]]:
    """Each batch with its embeddings {modality: (n, d)}."""
    for positions, values in batches:
        rows = maker.model.encode(maker.batch(positions, values).inputs)
        yield (positions, values), {name: part.float().cpu().numpy() for name, part in rows.items()}


def metadata_table(rows: Rows, key: str | None, kept: Sequence[str]) -> pa.Table:
    """The key (default: the row number) and the kept columns."""
    positions, values = rows
    return pa.table({KEY: values[key] if key else positions, **{name: values[name] for name in kept if name != KEY}})


def refuse_repeated(keys: Sequence[Any], column: str) -> None:
    """ValueError that names the first key that is missing or stands twice."""
    seen: dict[Any, int] = {}
    for row, key in enumerate(keys):
        if key is None:
            raise ValueError(f"key (column {column!r}): row {row} is missing (None)")
        if key in seen:
            raise ValueError(f"key (column {column!r}): {key!r} stands twice, in rows {seen[key]} and {row}")
        seen[key] = row


def plain_columns(dataset: Any) -> list[str]:
    """Columns of single numbers, strings, booleans, dates and times."""
    import datasets

    def plain(feature: Any) -> bool:
        return isinstance(feature, datasets.Value) and "binary" not in feature.dtype

    return [name for name, feature in (dataset.features or {}).items() if plain(feature)]
