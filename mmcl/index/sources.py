"""What an index is built from, as blocks of embeddings: arrays, raw values, datasets, embedding shards."""

import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from jaxtyping import Float32
from torch import Tensor

from mmcl.arrays import refuse_bad_rows, refuse_unknown, same_length
from mmcl.scores import Score
from mmcl.values import as_embeddings, encode, is_encoded, row_count, take

BLOCK_ROWS = 65536
RAW_ROWS = 256
"""Raw values are encoded, and datasets decoded, so many at a time."""

Block = tuple[dict[str, Tensor], pa.Table | None]
"""{modality: (rows, d) float32}, and their metadata where the source brings it along."""


@dataclass(frozen=True)
class Source:
    """Checked items: which modalities, how many rows, and the blocks of embeddings in order."""

    modalities: tuple[str, ...]
    count: int
    blocks: Iterable[Block]
    metadata: pa.Table | None = None
    fingerprint: str | None = None
    """Of the model that made the embeddings; None where unknown."""
    shards: Any = None
    """The embedding shards that these are, or the arrays: what can be read again, and in any order."""


def open_source(
    items: Any, score: Score, model: Any, modalities: Any, encoded: Any, columns: Mapping[str, str] | None = None
) -> Source:
    """The source behind `items`; see `TupleIndex.build` for what they may be, besides a source that is open already."""
    if isinstance(items, Source):
        return items
    if columns is not None and not is_dataset(items, "Dataset"):
        raise ValueError(f"columns= names columns of a datasets.Dataset; the items are a {type(items).__name__}")
    if isinstance(items, str | Path) or is_folders(items):
        return shards_source(items, score, modalities)
    if isinstance(items, Mapping) and not is_dataset(items, "DatasetDict"):
        return mapping_source(items, score, model, modalities, encoded)
    if is_dataset(items, "Dataset"):
        return dataset_source(items, score, model, modalities, encoded, columns)
    if is_dataset(items, "DatasetDict"):
        raise ValueError(f"items is a DatasetDict with the splits {sorted(map(str, items))}; pass one of them")
    raise ValueError(
        "items must be {modality: embeddings}, a datasets.Dataset (with a model) or a folder of embedding shards, "
        f"got {type(items).__name__}"
    )


def mapping_source(items: Mapping[str, Any], score: Score, model: Any, modalities: Any, encoded: Any) -> Source:
    """{modality: (n, d) embeddings, or raw values for the model}."""
    names = item_modalities(items, score, modalities, "items")
    values = {name: items[name] for name in names}
    ready = {name: is_encoded(values[name], name, score.dim, model, encoded) for name in names}
    count = same_length({name: range(row_count(value, name)) for name, value in values.items()})

    def blocks() -> Iterator[Block]:
        size = BLOCK_ROWS if all(ready.values()) else RAW_ROWS
        for start in range(0, count, size):
            block = {name: take(value, start, start + size) for name, value in values.items()}
            yield checked_block(block, ready, score, model, start), None
        if not count:  # shapes are checked all the same
            checked_block(values, ready, score, model, 0)

    return Source(names, count, blocks(), shards=values if all(ready.values()) else None)


def dataset_source(
    dataset: Any, score: Score, model: Any, modalities: Any, encoded: Any, columns: Mapping[str, str] | None
) -> Source:
    """A `datasets.Dataset`: the modalities' columns are encoded, others of single values are metadata."""
    from mmcl.data import as_names, named_labels, undecoded
    from mmcl.embedding import plain_columns

    if model is None and not encoded:
        raise ValueError("a dataset is encoded by a model; pass the model in place of the score, or encoded=True")
    present = dataset_columns(dataset, score, modalities, columns)
    names = item_modalities(present, score, modalities, "the dataset")
    used = {name: present[name] for name in names}
    rest = [column for column in plain_columns(dataset) if column not in used.values()]
    metadata = dataset.select_columns(rest).with_format("arrow")[:] if rest else None

    labels = {name: named_labels(dataset, column) for name, column in used.items()}

    def blocks() -> Iterator[Block]:
        start = 0
        ready: dict[str, bool] = {}
        for rows in undecoded(dataset.select_columns(list(dict.fromkeys(used.values())))).iter(batch_size=RAW_ROWS):
            values = {name: as_names(rows[column], labels[name]) for name, column in used.items()}
            ready = ready or {name: is_encoded(values[name], name, score.dim, model, encoded) for name in names}
            block = checked_block(values, ready, score, model, start)
            start += len(block[names[0]])
            yield block, None

    return Source(names, len(dataset), blocks(), metadata)


def dataset_columns(dataset: Any, score: Score, modalities: Any, columns: Mapping[str, str] | None) -> dict[str, str]:
    """{modality: its column}, of all whose columns a dataset has, by default those of the modalities' names.

    Raises: KeyError listing the dataset's columns where one of `modalities` or of `columns` is not there.
    """
    refuse_unknown(columns or {}, score.modalities, "columns")
    named = {name: name for name in score.modalities} | dict(columns or {})
    for name in [*(columns or {}), *([modalities] if isinstance(modalities, str) else modalities or [])]:
        if named.get(name, name) not in dataset.column_names:
            raise KeyError(f"{no_column(dataset, named.get(name, name), name)}, or do not store the modality")
    return {name: column for name, column in named.items() if column in dataset.column_names}


def no_column(dataset: Any, column: str, name: str) -> str:
    """What an error says of a modality whose column a dataset lacks."""
    there = f"no column {column!r} for modality {name!r}; the dataset has {list(dataset.column_names)}"
    return f"{there}: name its column as columns={{{name!r}: ...}}"


def is_folders(items: Any) -> bool:
    """Whether these are {modality: folder of embedding shards}."""
    return isinstance(items, Mapping) and bool(items) and all(isinstance(value, Path) for value in items.values())


def chosen_shards(folder: Any, score: Score, modalities: Any) -> Any:
    """The embedding shards of a folder, or {modality: folder} joined by key, of the modalities to be stored."""
    from mmcl.shards import open_shards

    shards = open_shards(folder, known=score.modalities)
    return shards.select(item_modalities(shards.modalities, score, modalities, str(folder)))


def shards_source(folder: Any, score: Score, modalities: Any) -> Source:
    """Embedding shards, with their metadata."""
    chosen = chosen_shards(folder, score, modalities)
    names = chosen.modalities

    def blocks() -> Iterator[Block]:
        start = 0
        for embeddings, metadata in chosen:
            block = checked_block(embeddings, dict.fromkeys(names, True), score, None, start)
            start += len(block[names[0]])
            yield block, metadata

    return Source(names, chosen.rows(), blocks(), fingerprint=chosen.fingerprint, shards=chosen)


def item_modalities(present: Iterable[str], score: Score, modalities: Any, where: str) -> tuple[str, ...]:
    """Those to be fused, in the score's order."""
    present = list(present)
    if isinstance(modalities, str):
        modalities = (modalities,)
    chosen = present if modalities is None else list(modalities)
    refuse_unknown(chosen, score.modalities, where if modalities is None else "modalities")
    missing = [name for name in chosen if name not in present]
    if missing:
        raise KeyError(f"{where} has no modality {missing[0]!r}; it has {present}")
    if not chosen:
        raise ValueError(f"{where} has none of the modalities {list(score.modalities)}")
    return tuple(name for name in score.modalities if name in chosen)


def refuse_all(stored: Iterable[str], score: Score) -> None:
    """ValueError where the items are of all the score's modalities."""
    if set(stored) == set(score.modalities):
        raise ValueError(
            f"{sorted(stored)} are all the modalities, and none is left to search by; choose those to store with "
            f"modalities=(...), some of {list(score.modalities)}"
        )


def checked_block(
    values: Mapping[str, Any], ready: Mapping[str, bool], score: Score, model: Any, start: int
) -> dict[str, Tensor]:
    """{modality: (rows, d) float32 on the CPU}; errors count rows from `start`."""
    raw = {name: value for name, value in values.items() if not ready[name]}
    rows = {name: as_embeddings(value, name, score.dim, start) for name, value in values.items() if ready[name]}
    rows |= encode(model, raw, score.dim, start) if raw else {}
    for name, part in rows.items():
        refuse_bad_rows(part, name, start)
    same_length(rows)
    return {name: rows[name] for name in values}


@torch.no_grad()
def fused_block(score: Score, block: Mapping[str, Tensor], start: int) -> Float32[Tensor, "rows width"]:
    """(rows, width) item vectors; ValueError where the embeddings' product is not finite in float32."""
    fused = score.item_vectors(block).float()
    bad = (~torch.isfinite(fused).all(dim=1)).nonzero()
    if len(bad):
        raise ValueError(f"row {int(bad[0]) + start}: {list(block)} fuse to a vector that is not finite in float32")
    return fused


def is_dataset(items: Any, name: str) -> bool:
    """Whether `items` is a `datasets.<name>`; whoever passes one has imported the library, which is slow to import."""
    library = sys.modules.get("datasets")
    return library is not None and isinstance(items, getattr(library, name))
