"""The files of embedding shards: where they lie, what their headers say, and any of their rows."""

import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

KEY = "key"


@dataclass(frozen=True)
class Shard:
    """One shard of a folder: its number as it is written, and its files."""

    name: str
    rows: int
    files: dict[str, Path]
    """{modality: .npy}."""
    metadata: Path | None


@dataclass(frozen=True)
class Folder:
    """The shards of a folder in numeric order, and how wide each modality is."""

    path: Path
    shards: list[Shard]
    widths: dict[str, int]

    @property
    def starts(self) -> np.ndarray:
        """(shards + 1,) the row that each shard begins with, and the number of all."""
        return np.cumsum([0, *(shard.rows for shard in self.shards)])

    def rows(self, modality: str, number: int, rows: Any) -> np.ndarray:
        """(n, d) float32: these rows (numbers or a slice) of one shard; no others are read."""
        shard = self.shards[number]
        if not shard.rows:
            return np.empty((0, self.widths[modality]), np.float32)
        chosen = mapped(shard.files[modality])[rows]
        return chosen.astype(np.float32, copy=isinstance(rows, slice), subok=False)

    def scattered(self, modality: str, rows: np.ndarray) -> np.ndarray:
        """(n, d) float32: rows by their numbers in the whole folder; each shard is opened once."""
        found = np.empty((len(rows), self.widths[modality]), np.float32)
        order = np.argsort(rows, kind="stable")
        starts = self.starts
        bounds = np.searchsorted(rows[order], starts)
        for number, (first, last) in enumerate(itertools.pairwise(bounds)):
            if first < last:
                places = order[first:last]
                found[places] = self.rows(modality, number, rows[places] - starts[number])
        return found

    def keys(self) -> pa.ChunkedArray:
        """The `key` of every row; ValueError where a shard has none, or a row lacks it."""
        parts = []
        for shard in self.shards:
            names = [] if shard.metadata is None else pq.read_schema(shard.metadata).names
            if KEY not in names:
                raise ValueError(
                    f"{self.path}: the metadata of shard {shard.name} has no {KEY!r} column to join modalities of "
                    "different folders by"
                )
            keys = pq.read_table(shard.metadata, columns=[KEY])[KEY]
            if keys.null_count:
                row = keys.is_null().index(True).as_py()
                raise ValueError(f"{self.path}: the key in row {row} of shard {shard.name} is missing (None)")
            parts.append(keys)
        kinds = {key_kind(part.type) for part in parts if len(part)}
        if len(kinds) > 1:
            raise ValueError(f"{self.path}: keys of differing types: {sorted(map(str, kinds))}")
        kind = next(iter(kinds), pa.int64())
        return pa.chunked_array([chunk for part in parts for chunk in part.cast(kind).chunks], kind)


def key_kind(given: pa.DataType) -> pa.DataType:
    """One type for all strings and one for all integers, so that keys can be compared."""
    if pa.types.is_dictionary(given):
        return key_kind(given.value_type)
    if pa.types.is_string(given) or pa.types.is_large_string(given) or pa.types.is_string_view(given):
        return pa.large_string()
    return pa.int64() if pa.types.is_integer(given) else given


def embedding_path(folder: Path, modality: str, shard: str) -> Path:
    return folder / f"{modality}_emb" / f"{modality}_emb_{shard}.npy"


def metadata_path(folder: Path, shard: str) -> Path:
    return folder / "metadata" / f"metadata_{shard}.parquet"


def numbered(folder: Path, stem: str, ending: str) -> dict[int, Path]:
    """{number: file}, with or without zero padding; ValueError where two files have the same number."""
    pattern = re.compile(re.escape(stem) + r"_(\d+)" + re.escape(ending))
    found: dict[int, Path] = {}
    for path in sorted(folder.glob(f"*{ending}")):
        match = pattern.fullmatch(path.name)
        if match and found.setdefault(int(match[1]), path) != path:
            raise ValueError(f"{folder}: {found[int(match[1])].name} and {path.name} have the same number")
    return found


def modality_files(folder: Path, name: str) -> dict[int, Path]:
    """{number: .npy} of a modality, by its name on disk."""
    return numbered(folder / f"{name}_emb", f"{name}_emb", ".npy")


def read_folder(path: Path, names: Mapping[str, str]) -> Folder:
    """What the headers of a folder's files say.

    Args:
        path: of the folder.
        names: {modality: its name on disk}.
    Raises: FileNotFoundError naming the shard and the modality that it lacks; ValueError naming a file that holds no
        (rows, d) floats, or the shard whose files differ in their number of rows, with all numbers.
    """
    files = {modality: modality_files(path, name) for modality, name in names.items()}
    tables = numbered(path / "metadata", "metadata", ".parquet")
    widths = dict.fromkeys(names, 0)
    shards = []
    for number in sorted({*tables, *(number for each in files.values() for number in each)}):
        there = {modality: each[number] for modality, each in files.items() if number in each}
        label = (next(iter(there.values()), None) or tables[number]).stem.rsplit("_", 1)[1]
        for modality, name in names.items():
            if modality not in there:
                missing = embedding_path(path, name, label).name
                raise FileNotFoundError(f"{path}: shard {label} lacks {modality} ({missing})")
        if tables and number not in tables:
            missing = metadata_path(path, label).name
            raise FileNotFoundError(f"{path}: shard {label} lacks metadata ({missing}), which others have")
        shards.append(read_headers(path, label, there, tables.get(number), widths))
    return Folder(path, shards, widths)


def read_headers(
    path: Path, label: str, files: dict[str, Path], metadata: Path | None, widths: dict[str, int]
) -> Shard:
    """One shard; its widths join those of the shards before. ValueError as in `read_folder`."""
    counts = {} if metadata is None else {"metadata": pq.read_metadata(metadata).num_rows}
    for modality, file in files.items():
        counts[modality], width = npy_shape(file)
        if width and widths[modality] and width != widths[modality]:
            raise ValueError(f"{file}: {width} columns, the shards before have {widths[modality]}")
        widths[modality] = width or widths[modality]
    if len(set(counts.values())) > 1:
        told = ", ".join(f"{name} {count}" for name, count in counts.items())
        raise ValueError(f"{path}: shard {label} has differing numbers of rows: {told}")
    return Shard(label, next(iter(counts.values())), files, metadata)


def npy_shape(path: Path) -> tuple[int, int]:
    """(rows, d) by the header alone; (0, 0) for an empty list. ValueError names a file that is no such array."""
    with open(path, "rb") as file:
        try:
            version = np.lib.format.read_magic(file)
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, _, dtype = read(file)
        except ValueError as error:
            raise ValueError(f"{path} is no .npy file: {error}") from None
        start = file.tell()
    if dtype.kind != "f":
        raise ValueError(f"{path}: expected float16, float32 or float64, got {dtype}")
    if len(shape) != 2 and shape != (0,):
        raise ValueError(f"{path}: expected (rows, d), got {shape}")
    needed = start + int(np.prod(shape)) * dtype.itemsize
    if path.stat().st_size < needed:
        raise ValueError(f"{path} is cut short: it has {path.stat().st_size} bytes of {needed}")
    return (shape[0], shape[1]) if len(shape) == 2 else (0, 0)


def mapped(path: Path) -> np.ndarray:
    """The array of a .npy file, left on the disk until its rows are read."""
    return np.load(path, mmap_mode="r", allow_pickle=False)


def read_metadata(shard: Shard) -> pa.Table:
    """One shard's metadata; without a file, as many empty rows."""
    if shard.metadata is None:
        return pa.table({"row": pa.array(range(shard.rows))}).select([])
    return pq.read_table(shard.metadata)


def matching_rows(keys: pa.ChunkedArray, there: Folder) -> np.ndarray:
    """(n,) the row of each key in a folder, -1 where it has none; ValueError for a key that stands twice there."""
    known = there.keys()
    if len(known) and len(keys) and known.type != keys.type:
        raise ValueError(f"{there.path}: its keys are {known.type}, those to be joined are {keys.type}")
    values = pa.concat_arrays(known.chunks) if known.num_chunks else pa.array([], known.type)
    first = pc.index_in(known, value_set=values).to_numpy()
    again = np.flatnonzero(first != np.arange(len(first)))
    if len(again):
        row = int(again[0])
        shards = [
            there.shards[int(np.searchsorted(there.starts, each, "right")) - 1].name for each in (first[row], row)
        ]
        told = f"stands twice, in shards {shards[0]} and {shards[1]}"
        raise ValueError(f"{there.path}: key {known[row].as_py()!r} {told}")
    return pc.fill_null(pc.index_in(keys, value_set=values), -1).to_numpy().astype(np.int64)
