"""Embedding shards on disk, in the layout of clip-retrieval, with a manifest of our own. Knows no model.

folder/
  manifest.json                         model fingerprint, dim, dtype, counts, checksums
  image_emb/image_emb_0000.npy          (rows, d) of shard 0000
  text_emb/text_emb_0000.npy
  metadata/metadata_0000.parquet        one row each: `key` and the columns that were kept
"""

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from mmcl.files import sha256

FORMAT_VERSION = 1
KEY = "key"
MANIFEST = "manifest.json"


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
            self.folder.mkdir(parents=True, exist_ok=True)
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

    @property
    def modalities(self) -> tuple[str, ...]:
        return tuple(self.folders)

    def select(self, modalities: Sequence[str]) -> "EmbeddingShards":
        """The same rows with fewer modalities; KeyError listing what there is."""
        unknown = [name for name in modalities if name not in self.folders]
        if unknown:
            raise KeyError(f"no embeddings of {unknown[0]!r}; there are {list(self.folders)}")
        return EmbeddingShards({name: self.folders[name] for name in modalities}, self.fingerprint)

    def __iter__(self) -> Iterator[tuple[dict[str, np.ndarray], pa.Table]]:
        if len(set(self.folders.values())) == 1:
            return self._by_position()
        return self._by_key()

    def column(self, name: str) -> list[Any]:
        """One metadata column of all rows, without reading embeddings; KeyError listing the columns there are."""
        first, folder = next(iter(self.folders.items()))
        values: list[Any] = []
        for shard in shard_names(folder, first):
            rows = len(np.load(embedding_path(folder, first, shard), mmap_mode="r"))
            metadata = read_metadata(folder, shard, rows)
            if name not in metadata.column_names:
                raise KeyError(f"{folder}: shard {shard} has no column {name!r}; it has {metadata.column_names}")
            values += metadata[name].to_pylist()
        return values

    def rows(self) -> int:
        """Rows in all shards of the first modality, by the headers alone."""
        name, folder = next(iter(self.folders.items()))
        return sum(len(np.load(embedding_path(folder, name, s), mmap_mode="r")) for s in shard_names(folder, name))

    def _by_position(self) -> Iterator[tuple[dict[str, np.ndarray], pa.Table]]:
        folder = next(iter(self.folders.values()))
        first = self.modalities[0]
        for shard in shard_names(folder, first):
            embeddings = {name: read_embeddings(folder, name, shard) for name in self.folders}
            metadata = read_metadata(folder, shard, len(embeddings[first]))
            counts = {"metadata": metadata.num_rows, **{name: len(rows) for name, rows in embeddings.items()}}
            if len(set(counts.values())) > 1:
                told = ", ".join(f"{name} {count}" for name, count in counts.items())
                raise ValueError(f"{folder}: shard {shard} has differing numbers of rows: {told}")
            yield embeddings, metadata

    def _by_key(self) -> Iterator[tuple[dict[str, np.ndarray], pa.Table]]:
        """The first modality's shards as they are; rows of the others found by key, wherever they lie."""
        first, *others = self.modalities
        places = {name: key_places(self.folders[name], name) for name in others}
        for embeddings, metadata in self.select([first])._by_position():
            keys = metadata_keys(metadata, self.folders[first])
            for name in others:
                embeddings[name] = rows_by_key(self.folders[name], name, keys, places[name])
            yield embeddings, metadata


def open_shards(source: Any) -> EmbeddingShards:
    """The shards of a folder, or of {modality: folder} joined by key.

    Raises: FileNotFoundError where there are none; ValueError for folders of different models.
    """
    if not isinstance(source, Mapping):
        folder = Path(source)
        names = sorted(path.name.removesuffix("_emb") for path in folder.glob("*_emb") if path.is_dir())
        if not names:
            raise FileNotFoundError(f"{folder} holds no embedding shards (folders such as image_emb)")
        source = dict.fromkeys(names, folder)
    folders = {name: Path(folder) for name, folder in source.items()}
    for name, folder in folders.items():
        if not shard_names(folder, name):
            raise FileNotFoundError(f"{folder} holds no shards of {name!r} ({name}_emb/{name}_emb_0000.npy)")
    prints = {}
    for folder in set(folders.values()):
        if (folder / MANIFEST).is_file():
            manifest = read_manifest(folder)
            if not manifest["complete"]:
                raise ValueError(
                    f"{folder}: the embedding run was interrupted; run it again, it goes on where it stopped"
                )
            prints[folder] = manifest["run"].get("fingerprint")
    if len(set(prints.values())) > 1:
        raise ValueError(f"these folders were made by different models: {sorted(map(str, prints))}")
    return EmbeddingShards(folders, next(iter(prints.values()), None))


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


def embedding_path(folder: Path, modality: str, shard: str) -> Path:
    return folder / f"{modality}_emb" / f"{modality}_emb_{shard}.npy"


def metadata_path(folder: Path, shard: str) -> Path:
    return folder / "metadata" / f"metadata_{shard}.parquet"


def shard_names(folder: Path, modality: str) -> list[str]:
    """The shards' numbers as they are written, in numeric order: 0, 1, 2, 10 also without zero padding."""
    pattern = re.compile(re.escape(f"{modality}_emb_") + r"(\d+)\.npy")
    found = [match[1] for path in (folder / f"{modality}_emb").glob("*.npy") if (match := pattern.fullmatch(path.name))]
    return sorted(found, key=int)


def read_embeddings(folder: Path, modality: str, shard: str) -> np.ndarray:
    """One shard of one modality as float32."""
    path = embedding_path(folder, modality, shard)
    if not path.is_file():
        raise FileNotFoundError(f"{folder}: shard {shard} lacks {modality} ({path.name})")
    rows = np.load(path, allow_pickle=False)
    if rows.ndim != 2:
        raise ValueError(f"{path}: expected (rows, d), got {rows.shape}")
    return rows.astype(np.float32, copy=False)


def read_metadata(folder: Path, shard: str, rows: int) -> pa.Table:
    """One shard's metadata; without a file, as many empty rows."""
    path = metadata_path(folder, shard)
    return pq.read_table(path) if path.is_file() else pa.table({"row": pa.array(range(rows))}).select([])


def metadata_keys(metadata: pa.Table, folder: Path) -> list[Any]:
    """The `key` column; ValueError where there is none to join by."""
    if KEY not in metadata.column_names:
        raise ValueError(f"{folder}: its metadata has no {KEY!r} column to join modalities of different folders by")
    return metadata[KEY].to_pylist()


def key_places(folder: Path, modality: str) -> dict[Any, tuple[str, int]]:
    """{key: (shard, row)} of a folder; ValueError for a key that stands twice."""
    places: dict[Any, tuple[str, int]] = {}
    for shard in shard_names(folder, modality):
        count = len(np.load(embedding_path(folder, modality, shard), mmap_mode="r"))
        for row, key in enumerate(metadata_keys(read_metadata(folder, shard, count), folder)):
            if key in places:
                raise ValueError(f"{folder}: key {key!r} stands twice, in shards {places[key][0]} and {shard}")
            places[key] = (shard, row)
    return places


def rows_by_key(folder: Path, modality: str, keys: list[Any], places: dict[Any, tuple[str, int]]) -> np.ndarray:
    """(len(keys), d): the rows of these keys. KeyError for one that is missing."""
    lost = [key for key in keys if key not in places]
    if lost:
        raise KeyError(f"{folder} has no {modality} row of key {lost[0]!r} ({len(lost)} of {len(keys)} missing)")
    parts: dict[str, np.ndarray] = {}
    for shard in {places[key][0] for key in keys}:
        parts[shard] = read_embeddings(folder, modality, shard)
    return np.stack([parts[places[key][0]][places[key][1]] for key in keys])
