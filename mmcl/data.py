"""Hugging Face datasets: loading, columns of the modalities, groups of equal values."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmcl.arrays import as_numpy, refuse_unknown

EQUAL = "equal"
"""In `groups`: rows whose raw values are equal are one answer."""

LOADERS = {
    ".parquet": "parquet",
    ".csv": "csv",
    ".tsv": "csv",
    ".json": "json",
    ".jsonl": "json",
    ".arrow": "arrow",
    ".tar": "webdataset",
}


def load_data(source: str, split: str | None = None, streaming: bool = False, **options: Any) -> Any:
    """A dataset from a file, a pattern of files, a folder, or a hub id.

    Args:
        source: parquet, csv, tsv, json(l), arrow files or webdataset tars (a pattern such as "shards/*.tar" too); a
            folder that `Dataset.save_to_disk` wrote, or any folder that `datasets` reads (imagefolder, audiofolder,
            files with metadata.csv ...); or a hub id.
        split: of a source with several; may be left out where there is only one.
        streaming: read on the fly, without a copy in the cache.
        options: passed on to `datasets.load_dataset`.
    Raises: FileNotFoundError for a missing path; ValueError listing the splits where one must be chosen, and for a
        file that cannot be read.
    """
    import datasets

    try:
        loaded = read_source(source, streaming, options)
    except (datasets.exceptions.DatasetsError, UnicodeDecodeError) as error:
        cause = str(error.__cause__ or error).strip().splitlines()
        raise ValueError(f"{source} cannot be read: {(cause or ['it is empty'])[0]}") from error
    except ValueError as error:
        raise ValueError(str(error) if source in str(error) else f"{source} cannot be read: {error}") from error
    return one_split(loaded, source, split)


def read_source(source: str, streaming: bool, options: dict[str, Any]) -> Any:
    """What `datasets` makes of the source, with all its splits."""
    import datasets

    path = Path(source)
    if path.suffix in LOADERS:
        if not any(path.parent.glob(path.name)):
            raise FileNotFoundError(f"no data at {source!r}")
        if path.suffix == ".tsv":
            options = {"delimiter": "\t", **options}
        return datasets.load_dataset(LOADERS[path.suffix], data_files=source, streaming=streaming, **options)
    if (path / "dataset_info.json").is_file() or (path / "dataset_dict.json").is_file():
        return datasets.load_from_disk(source)
    if path.is_file():
        raise ValueError(f"{source}: unknown kind of file {path.suffix!r}; mmcl reads {sorted(LOADERS)} and folders")
    if path.is_dir() or not looks_local(source):
        return datasets.load_dataset(source, streaming=streaming, **options)
    raise FileNotFoundError(f"no data at {source!r}")


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
    """The dataset as plain Python values, with images and sounds left as bytes or paths: mmcl decodes them and names
    the row that fails. A transform of the user's (`with_transform`) is kept.

    Raises: ValueError for what is no dataset, and for a DatasetDict, whose splits it lists.
    """
    import datasets

    if isinstance(dataset, Mapping):
        raise ValueError(
            f"expected one dataset, got {type(dataset).__name__} of {sorted(map(str, dataset))}; choose one"
        )
    if not isinstance(dataset, datasets.Dataset | datasets.IterableDataset):
        raise ValueError(f"expected a datasets.Dataset or IterableDataset, got {type(dataset).__name__}")
    if not has_transform(dataset):
        dataset = dataset.with_format(None)
    for name, feature in (dataset.features or {}).items():
        if isinstance(feature, datasets.Image | datasets.Audio) and feature.decode:
            options = {"decode": False}
            dataset = dataset.cast_column(name, type(feature)(**options))
    return dataset


def has_transform(dataset: Any) -> bool:
    """Whether the user set a function that makes the rows."""
    return getattr(dataset, "format", {}).get("type") == "custom"


def named_labels(dataset: Any, column: str) -> list[str] | None:
    """The class names of a label column (folders of pictures have one); None for any other column."""
    import datasets

    feature = (dataset.features or {}).get(column)
    return feature.names if isinstance(feature, datasets.ClassLabel) else None


def as_names(values: Sequence[Any], names: list[str] | None) -> Sequence[Any]:
    """Labels by their class names, None where there is no label (-1); values of any other column as they are."""
    if names is None:
        return values
    return [names[value] if value is not None and value >= 0 else None for value in values]


def looks_local(source: str) -> bool:
    """Whether a path was meant, and not a hub id: what cannot be found there is then no question to the hub."""
    path = Path(source)
    inside = len(path.parts) > 1 and Path(path.parts[0]).is_dir()
    return path.is_absolute() or source.startswith(".") or inside or (len(path.parts) == 1 and bool(path.suffix))


def group_ids(values: Any) -> Tensor:
    """(n,) int64 that are equal exactly where raw values are: the same on every rank and in every batch."""
    seen: dict[int, int] = {}  # datasets share repeated objects, so that most hashing is done once
    ids = []
    values = list(values)  # all of them kept, as a dead object's id is given to the next
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
    if isinstance(value, Tensor):
        value = as_numpy(value)
    if hasattr(value, "tobytes"):  # arrays, PIL images
        return f"array {getattr(value, 'shape', None) or getattr(value, 'size', '')}".encode() + value.tobytes()
    return f"{type(value).__name__} {value!r}".encode()


def column_rows(dataset: Any, batch_size: int, start: int = 0) -> Iterator[tuple[list[int], dict[str, list]]]:
    """(rows counted from `start`, {column: values}) in the dataset's order, the last batch smaller; for streams too."""
    for values in dataset.iter(batch_size=batch_size):
        count = len(next(iter(values.values())))
        yield list(range(start, start + count)), values
        start += count
