"""What a diagnosis reads: categories (n,) or float32 vectors (n, k) a modality, from values, datasets or shards."""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from mmcl.arrays import as_numpy, refuse_unknown, same_length
from mmcl.data import as_names, modality_columns, named_labels, undecoded

IMAGE_SIZE = 16
SECONDS, MEL_BANDS, HOP = 1.0, 32, 0.02
"""What is heard of a sound: log-mel frames of its beginning."""

MOST_COLUMNS = 5
"""Of a dataset that are all taken for modalities, where nobody names them."""

Values = dict[str, np.ndarray]


def read_values(
    data: Any, columns: Mapping[str, str] | None, rows: int | None, seed: int
) -> tuple[Values, dict[str, str]]:
    """The values of each modality, at most so many rows of them, and {modality: what they were taken for}.

    Raises: see `mmcl.diagnose.diagnose`.
    """
    if rows is not None and rows < 1:
        raise ValueError(f"rows must be at least 1, got {rows}")
    read = reader_of(data)
    count, columns_of = read(data, columns)
    if len(columns_of) < 2:
        raise ValueError(f"dependence takes two modalities or more, got {list(columns_of)}")
    wanted = np.arange(count)
    if rows is not None and count > rows:
        wanted = np.sort(np.random.default_rng(seed).choice(count, rows, replace=False))
    found, kinds = {}, {}
    for name, column in columns_of.items():
        try:
            found[name] = checked(column(wanted))
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
        kinds[name] = kind_of(found[name])
    return found, kinds


Column = Callable[[np.ndarray], Any]
"""Which rows -> their values."""


def reader_of(data: Any) -> Callable[[Any, Mapping[str, str] | None], tuple[int, dict[str, Column]]]:
    """The function that finds the columns in data of this form: (data, columns) -> rows, {modality: column}."""
    if isinstance(data, str | Path):
        return shard_columns
    return dataset_columns if hasattr(data, "column_names") else mapping_columns


def mapping_columns(data: Any, columns: Mapping[str, str] | None) -> tuple[int, dict[str, Column]]:
    """Of {modality: values}."""
    if not isinstance(data, Mapping):
        raise ValueError(f"expected {{modality: values}}, a dataset or a folder of shards, got {type(data).__name__}")
    if columns:
        refuse_unknown(columns.values(), data, "columns")
        data = {name: data[column] for name, column in columns.items()}
    if not data:
        return 0, {}
    return same_length(data), {name: column_of(values) for name, values in data.items()}


def column_of(values: Any) -> Column:
    """Of an array, a tensor or a list."""
    if hasattr(values, "__array__"):
        return as_numpy(values).__getitem__
    return lambda rows: [values[row] for row in rows.tolist()]


def dataset_columns(data: Any, columns: Mapping[str, str] | None) -> tuple[int, dict[str, Column]]:
    """Of a `datasets.Dataset`; columns are read row by row where they are wanted."""
    dataset = undecoded(data)
    if not hasattr(dataset, "__len__"):
        raise ValueError("a stream cannot be drawn from at random; load it without streaming")
    if columns is None and len(dataset.column_names) > MOST_COLUMNS:
        raise ValueError(f"which of the columns {dataset.column_names} are the modalities? Name them (columns=)")
    found = modality_columns(dataset, list(columns or dataset.column_names), columns)

    def column(name: str) -> Column:
        names, encode = named_labels(dataset, name), encoder_of(dataset.features[name])
        return lambda rows: encode(as_names(dataset.select(rows)[name][:], names))

    return len(dataset), {modality: column(name) for modality, name in found.items()}


def shard_columns(data: Any, columns: Mapping[str, str] | None) -> tuple[int, dict[str, Column]]:
    """Of a folder of embedding shards."""
    from mmcl.shards import open_shards

    shards = open_shards(data, names=columns, known=tuple(columns or ("image",)))
    shards = shards.select(list(columns)) if columns else shards
    starts = np.cumsum([0, *shards.shard_rows()])

    def column(name: str) -> Column:
        def read(rows: np.ndarray) -> np.ndarray:
            parts = [rows[(rows >= first) & (rows < last)] - first for first, last in pairwise(starts)]
            return np.concatenate([shards.read_rows(at, part, [name])[name] for at, part in enumerate(parts)])

        return read

    return int(starts[-1]), {name: column(name) for name in shards.modalities}


def encoder_of(feature: Any) -> Callable[[Sequence[Any]], Any]:
    """From raw values of a dataset's column to categories or vectors."""
    import datasets

    for kind, encode in {datasets.Image: grey_pixels, datasets.Audio: mel_frames}.items():
        if isinstance(feature, kind):
            return encode
    return list


def grey_pixels(values: Sequence[Any]) -> np.ndarray:
    """(n, 256) of pictures, each standardised."""
    from mmcl.encoders import small_image

    return standardised(small_image(1, size=IMAGE_SIZE, channels=1).prepare(values))


def mel_frames(values: Sequence[Any]) -> np.ndarray:
    """(n, bands * frames) of sounds, each standardised."""
    from mmcl.encoders import small_audio

    return standardised(small_audio(1, seconds=SECONDS, n_mels=MEL_BANDS, hop=HOP).prepare(values))


def standardised(rows: Any) -> np.ndarray:
    """Flat rows of mean 0 and variance 1: blind to brightness, contrast and gain."""
    flat = as_numpy(rows).reshape(len(rows), -1)
    return (flat - flat.mean(1, keepdims=True)) / np.maximum(flat.std(1, keepdims=True), 1e-5)


def checked(values: Any) -> np.ndarray:
    """(n,) categories or (n, k) finite float32 vectors; floats become vectors of one number."""
    array = values if isinstance(values, np.ndarray) and values.dtype != object else as_array(list(values))
    if array.dtype.kind == "f" or array.ndim > 1:
        array = array.reshape(len(array), -1)
        if array.dtype.kind not in "fiub":
            raise ValueError(f"expected categories or rows of numbers, got {array.dtype} of shape {array.shape}")
        array = array.astype(np.float32)
        bad = ~np.isfinite(array).all(axis=1)
        if bad.any():
            raise ValueError(f"row {int(bad.argmax())} holds NaN or an infinite value, or is missing")
        return array
    return array


def as_array(values: Sequence[Any]) -> np.ndarray:
    """Values of one kind as an array; ValueError names the first row of another kind."""
    missing = [row for row, value in enumerate(values) if value is None]
    if missing:
        raise ValueError(f"row {missing[0]} has no value")
    for row, value in enumerate(values):
        if not isinstance(value, str | bool | int | float | list | np.ndarray | np.generic):
            raise ValueError(
                f"row {row} holds {type(value).__name__}: expected categories (strings, integers), numbers or rows of "
                "numbers; cast pictures and sounds to datasets.Image and datasets.Audio, or embed them (`mmcl embed`)"
            )
    try:
        array = np.asarray(values)
    except ValueError as error:
        raise ValueError("rows of numbers must have one length") from error
    return array


def kind_of(value: np.ndarray) -> str:
    """In a few words."""
    return f"{len(np.unique(value))} categories" if value.ndim == 1 else f"vectors of {value.shape[1]}"
