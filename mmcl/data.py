"""Hugging Face datasets: loading, columns of the modalities, groups of equal values."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmcl.arrays import refuse_unknown

EQUAL = "equal"
"""In `groups`: rows whose raw values are equal are one answer."""

LOADERS = {
    ".parquet": "parquet",
    ".csv": "csv",
    ".json": "json",
    ".jsonl": "json",
    ".arrow": "arrow",
    ".tar": "webdataset",
}
LOADERS |= {".tsv": "csv"}


def load_data(source: str, split: str | None = None, streaming: bool = False, **options: Any) -> Any:
    """A dataset from a file, a pattern of files, a folder, or a hub id.

    Args:
        source: parquet, csv, tsv, json(l), arrow files or webdataset tars (a pattern such as "shards/*.tar" too); a
            folder that `Dataset.save_to_disk` wrote, or any folder that `datasets` reads (imagefolder, audiofolder,
            files with metadata.csv ...); or a hub id.
        split: of a source with several; may be left out where there is only one.
        streaming: read on the fly, without a copy in the cache.
        options: passed on to `datasets.load_dataset`.
    Raises: FileNotFoundError for a missing path, ValueError listing the splits where one must be chosen.
    """
    import datasets

    path = Path(source)
    if path.suffix in LOADERS:
        if not any(path.parent.glob(path.name)):
            raise FileNotFoundError(f"no data at {source!r}")
        if path.suffix == ".tsv":
            options = {"delimiter": "\t", **options}
        loaded = datasets.load_dataset(LOADERS[path.suffix], data_files=source, streaming=streaming, **options)
    elif (path / "dataset_info.json").is_file() or (path / "dataset_dict.json").is_file():
        loaded = datasets.load_from_disk(source)
    elif path.is_dir() or not path.is_absolute():
        loaded = datasets.load_dataset(source, streaming=streaming, **options)
    else:
        raise FileNotFoundError(f"no data at {source!r}")
    return one_split(loaded, source, split)


def one_split(loaded: Any, source: str, split: str | None) -> Any:
    """The split asked for, or the only one."""
    if not isinstance(loaded, Mapping):
        if split is not None:
            raise ValueError(f"{source!r} has no splits, yet split {split!r} was asked for")
        return loaded
    if split is None and len(loaded) > 1:
        raise ValueError(f"{source!r} has the splits {sorted(map(str, loaded))}; choose one")
    name = split or next(iter(loaded))
    if name not in loaded:
        raise KeyError(f"{source!r} has no split {name!r}; it has {sorted(map(str, loaded))}")
    return loaded[name]


def modality_columns(dataset: Any, modalities: Sequence[str], columns: Mapping[str, str] | None) -> dict[str, str]:
    """{modality: column}, by default the column of the modality's name; KeyError listing the columns otherwise."""
    refuse_unknown(columns or {}, modalities, "columns")
    chosen = {name: (columns or {}).get(name, name) for name in modalities}
    for name, column in chosen.items():
        refuse_missing_column(dataset, column, f"modality {name!r}")
    return chosen


def refuse_missing_column(dataset: Any, column: str, what: str) -> None:
    """KeyError that lists the dataset's columns."""
    known = dataset.column_names
    if known is not None and column not in known:
        raise KeyError(f"no column {column!r} for {what}; the dataset has {list(known)}")


def undecoded(dataset: Any) -> Any:
    """The dataset with images and sounds left as bytes or paths: mmcl decodes them and names the row that fails."""
    import datasets

    for name, feature in (dataset.features or {}).items():
        if isinstance(feature, datasets.Image | datasets.Audio) and feature.decode:
            options = {"decode": False}
            dataset = dataset.cast_column(name, type(feature)(**options))
    return dataset


def group_ids(values: Sequence[Any]) -> Tensor:
    """(n,) int64 that are equal exactly where raw values are: the same on every rank and in every batch."""
    seen: dict[int, int] = {}  # datasets share repeated objects, so that most hashing is done once
    ids = []
    for value in values:
        if id(value) not in seen:
            seen[id(value)] = int.from_bytes(hashlib.blake2b(value_bytes(value), digest_size=8).digest(), signed=True)
        ids.append(seen[id(value)])
    return torch.tensor(ids, dtype=torch.int64)


def value_bytes(value: Any) -> bytes:
    """The content of a raw value, with its kind."""
    if isinstance(value, Mapping):  # {"bytes", "path"} of images and sounds, {"array", "sampling_rate"}
        if value.get("bytes") is not None:
            return b"file" + value["bytes"]
        return b"dict" + b"\0".join(str(key).encode() + value_bytes(value[key]) for key in sorted(value))
    if isinstance(value, bytes):
        return b"file" + value
    if hasattr(value, "tobytes"):  # arrays, PIL images
        return f"array {getattr(value, 'shape', None) or getattr(value, 'size', '')}".encode() + value.tobytes()
    return f"{type(value).__name__} {value!r}".encode()


def column_rows(dataset: Any, batch_size: int, start: int = 0) -> Iterator[tuple[list[int], dict[str, list]]]:
    """(rows counted from `start`, {column: values}) in the dataset's order, the last batch smaller; for streams too."""
    for values in dataset.iter(batch_size=batch_size):
        count = len(next(iter(values.values())))
        yield list(range(start, start + count)), values
        start += count
