"""Embedding shards, in the layout of clip-retrieval, with a manifest of our own. Knows no model.

folder/
  manifest.json                         model fingerprint, dim, dtype, counts, checksums
  image_emb/image_emb_0000.npy          (rows, d) of shard 0000
  text_emb/text_emb_0000.npy
  metadata/metadata_0000.parquet        one row each: `key` and the columns that were kept
"""

import functools
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from mmcl.files import made_folder, sha256
from mmcl.shard_files import (
    KEY,
    Folder,
    embedding_path,
    matching_rows,
    metadata_path,
    modality_files,
    read_folder,
    read_metadata,
)

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
SHORT = {"image": "img"}
"""What clip-retrieval calls a modality on disk."""


@dataclass
class ShardWriter:
    """Writes shards one by one; each is whole on disk, and in the manifest, before the next begins.

    Args:
        folder: made where missing. One that holds another run's shards is refused.
        run: what the shards depend on (model fingerprint, rows, shard size ...), JSON-serialisable: an interrupted
            run goes on only where it is the same.
    """

    folder: Path
    run: dict[str, Any]
    shards: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.folder = Path(self.folder)
        if not (self.folder / MANIFEST).is_file():
            if self.folder.is_dir() and any(self.folder.iterdir()):
                raise ValueError(f"{self.folder} is not empty and holds no {MANIFEST}; choose another folder")
            made_folder(self.folder, "embeddings are written")
            return
        manifest = read_manifest(self.folder)
        differing = sorted(key for key in self.run if manifest["run"].get(key) != self.run[key])
        if differing:
            key = differing[0]
            raise ValueError(
                f"{self.folder} holds shards of another run: {key} is {manifest['run'].get(key)!r} there, "
                f"{self.run[key]!r} here; choose another folder or remove it"
            )
        self.shards = manifest["shards"]

    def write(self, embeddings: Mapping[str, np.ndarray], metadata: pa.Table) -> None:
        """Add one shard: {modality: (n, d)} and n rows of metadata with a `key` column."""
        name, files = f"{len(self.shards):04d}", {}
        for modality, rows in embeddings.items():
            if len(rows) != metadata.num_rows:
                raise ValueError(f"shard {name}: {modality} has {len(rows)} rows, metadata {metadata.num_rows}")
            path = embedding_path(self.folder, modality, name)
            path.parent.mkdir(exist_ok=True)
            with open(path, "wb") as file:
                np.save(file, rows, allow_pickle=False)
            files[str(path.relative_to(self.folder))] = sha256(path)
        path = metadata_path(self.folder, name)
        path.parent.mkdir(exist_ok=True)
        pq.write_table(metadata, path)
        files[str(path.relative_to(self.folder))] = sha256(path)
        self.shards.append({"name": name, "rows": metadata.num_rows, "files": files})
        self.write_manifest(complete=False)

    def write_manifest(self, complete: bool) -> None:
        """Replace the manifest in one step."""
        content = {"format_version": FORMAT_VERSION, "complete": complete, "run": self.run, "shards": self.shards}
        draft = self.folder / f"{MANIFEST}.draft"
        draft.write_text(json.dumps(content, indent=2), encoding="utf-8")
        os.replace(draft, self.folder / MANIFEST)


@dataclass(frozen=True)
class EmbeddingShards:
    """Embeddings on disk, read a shard at a time; iterate for ({modality: (n, d) float32}, metadata table)."""

    folders: dict[str, Path]
    """{modality: the folder whose shards hold it}."""
    fingerprint: str | None
    """Of the model that made them; None where no manifest says."""
    names: dict[str, str] = field(default_factory=dict)
    """{modality: its name on disk}, where that is another one."""

    @property
    def modalities(self) -> tuple[str, ...]:
        return tuple(self.folders)

    def select(self, modalities: Sequence[str]) -> "EmbeddingShards":
        """The same rows with fewer modalities; KeyError listing what there is."""
        unknown = [name for name in modalities if name not in self.folders]
        if unknown:
            raise KeyError(f"no embeddings of {unknown[0]!r}; there are {list(self.folders)}")
        return EmbeddingShards({name: self.folders[name] for name in modalities}, self.fingerprint, self.names)

    def __iter__(self) -> Iterator[tuple[dict[str, np.ndarray], pa.Table]]:
        return (self.read_shard(number) for number in range(len(self.shard_rows())))

    def rows(self) -> int:
        """Rows in all shards, by the headers alone."""
        return sum(self.shard_rows())

    def shard_rows(self) -> list[int]:
        """Rows of each shard, in order. Errors name a shard that lacks a modality, or whose files disagree."""
        return [shard.rows for shard in self._first.shards]

    def shard_names(self) -> list[str]:
        """The shards' numbers as they are written."""
        return [shard.name for shard in self._first.shards]

    def read_shard(self, number: int) -> tuple[dict[str, np.ndarray], pa.Table]:
        """All rows of one shard, and its metadata."""
        return self.read_rows(number, slice(None)), read_metadata(self._first.shards[number])

    def read_rows(self, number: int, rows: Any, modalities: Iterable[str] | None = None) -> dict[str, np.ndarray]:
        """{modality: (n, d) float32}: some rows of one shard, by their numbers in it or a slice. No others are read.

        Of all modalities, or of some: which they are does not change which shards and rows there are.
        Where modalities lie in several folders, the shards are the first modality's; rows of the others are found by
        key, wherever they lie. KeyError names the first key that is missing there.
        """
        found = {}
        for name in self.modalities if modalities is None else modalities:
            if name in self._first.widths:
                found[name] = self._first.rows(name, number, rows)
                continue
            start, stop = self._first.starts[number : number + 2]
            wanted = self._places[name][start:stop]
            if (wanted < 0).any():
                key = read_metadata(self._first.shards[number])[KEY][int(np.argmax(wanted < 0))].as_py()
                told = f"{name} row of key {key!r} ({int((wanted < 0).sum())} of {len(wanted)} missing)"
                raise KeyError(f"{self.folders[name]} has no {told}")
            found[name] = self._others[name].scattered(name, wanted[rows])
        return found

    def column(self, name: str) -> list[Any]:
        """One metadata column of all rows, without reading embeddings; KeyError listing the columns there are."""
        values: list[Any] = []
        for shard in self._first.shards:
            metadata = read_metadata(shard)
            if name not in metadata.column_names:
                told = f"shard {shard.name} has no column {name!r}; it has {metadata.column_names}"
                raise KeyError(f"{self._first.path}: {told}")
            values += metadata[name].to_pylist()
        return values

    def shard_metadata(self, number: int) -> pa.Table:
        """The metadata of one shard, without reading embeddings."""
        return read_metadata(self._first.shards[number])

    def metadata(self) -> pa.Table:
        """Of all rows, without reading embeddings; a column that a shard lacks is null there."""
        return pa.concat_tables(map(read_metadata, self._first.shards), promote_options="default")

    def state(self) -> str:
        """Hexadecimal digest of all files' names, sizes and times: another one where any of them was replaced."""
        folders = [self._first, *self._others.values()]
        files = [file for each in folders for shard in each.shards for file in (*shard.files.values(), shard.metadata)]
        stats = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files if file is not None]
        return hashlib.sha256(repr((self.modalities, stats)).encode()).hexdigest()

    @functools.cached_property
    def _first(self) -> Folder:
        """The folder whose shards are counted, with all modalities where it is the only one."""
        folder = self.folders[self.modalities[0]]
        together = len(set(self.folders.values())) == 1
        return self._read(folder, self.modalities if together else self.modalities[:1])

    @functools.cached_property
    def _others(self) -> dict[str, Folder]:
        return {
            name: self._read(self.folders[name], [name]) for name in self.modalities if name not in self._first.widths
        }

    @functools.cached_property
    def _places(self) -> dict[str, np.ndarray]:
        """{modality of another folder: (rows,) where each row's key stands there}."""
        keys = self._first.keys()
        return {name: matching_rows(keys, folder) for name, folder in self._others.items()}

    def _read(self, folder: Path, modalities: Sequence[str]) -> Folder:
        return read_folder(folder, {name: self.names.get(name, name) for name in modalities})


def open_shards(source: Any, names: Mapping[str, str] | None = None, known: Sequence[str] = ()) -> EmbeddingShards:
    """The shards of a folder, or of {modality: folder} joined by key.

    Args:
        source: the folder or folders.
        names: {modality: its name on disk} where that is another one: {"photo": "img"} reads img_emb.
        known: the modalities that the caller knows. Where "image" is one of them, and a folder has no image_emb, its
            img_emb is taken, as clip-retrieval calls it.
    Raises: FileNotFoundError where there are none; ValueError for folders of different models.
    """
    names = dict(names or {})
    if not isinstance(source, Mapping):
        folder = Path(source)
        found = sorted(path.name.removesuffix("_emb") for path in folder.glob("*_emb") if path.is_dir())
        if not found:
            raise FileNotFoundError(f"{folder} holds no embedding shards (folders such as image_emb)")
        called = {name: disk_name(folder, name, names) for name in (*names, *(set(SHORT) & set(known)))}
        called = {name: stem for name, stem in called.items() if name in names or stem in found}
        called |= {stem: stem for stem in found if stem not in called.values()}
        source = dict.fromkeys(sorted(called, key=called.__getitem__), folder)
    folders = {name: Path(folder) for name, folder in source.items()}
    stems = {name: disk_name(folder, name, names) for name, folder in folders.items()}
    for name, folder in folders.items():
        if not modality_files(folder, stems[name]):
            raise FileNotFoundError(
                f"{folder} holds no shards of {name!r} ({stems[name]}_emb/{stems[name]}_emb_0000.npy)"
            )
    return EmbeddingShards(folders, common_fingerprint(set(folders.values())), stems)


def disk_name(folder: Path, name: str, names: Mapping[str, str]) -> str:
    """What a modality is called in a folder: as the caller says, as it is, or in short where only that is there."""
    short = SHORT.get(name, name)
    only_short = (folder / f"{short}_emb").is_dir() and not (folder / f"{name}_emb").is_dir()
    return names.get(name, short if only_short else name)


def common_fingerprint(folders: Iterable[Path]) -> str | None:
    """Of the model that made all of these; None where no manifest says. ValueError where they differ."""
    prints = {}
    for folder in folders:
        if (folder / MANIFEST).is_file():
            manifest = read_manifest(folder)
            if not manifest["complete"]:
                raise ValueError(
                    f"{folder}: the embedding run was interrupted; run it again, it goes on where it stopped"
                )
            prints[folder] = manifest["run"].get("fingerprint")
    if len(set(prints.values())) > 1:
        raise ValueError(f"these folders were made by different models: {sorted(map(str, prints))}")
    return next(iter(prints.values()), None)


def verify_shards(folder: str | Path) -> int:
    """Check every file of a folder with a manifest; returns rows. ValueError names the first file that differs."""
    folder = Path(folder)
    manifest = read_manifest(folder)
    for shard in manifest["shards"]:
        for name, digest in shard["files"].items():
            if not (folder / name).is_file() or sha256(folder / name) != digest:
                raise ValueError(f"{folder / name} is missing or differs from what the manifest says")
    return sum(shard["rows"] for shard in manifest["shards"])


def read_manifest(folder: Path) -> dict[str, Any]:
    """The folder's manifest; ValueError for a foreign format."""
    content = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    if content.get("format_version") != FORMAT_VERSION or "shards" not in content:
        raise ValueError(f"{folder / MANIFEST} is not of embedding shards in format version {FORMAT_VERSION}")
    return content
