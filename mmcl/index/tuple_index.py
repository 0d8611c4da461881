"""The index: tuples of some modalities, found from any of the others by one inner product."""

import copy
import functools
from collections.abc import Iterator, Mapping
from numbers import Integral
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from mmcl.arrays import refuse_bad_rows, same_length
from mmcl.index.faiss_backend import FaissBackend
from mmcl.index.hits import Hits
from mmcl.index.items import Items, check_ids, check_metadata
from mmcl.index.sources import Source, fused_block, open_source
from mmcl.index.store import FORMAT_VERSION, read_version, write_version
from mmcl.scores import Score, load_score
from mmcl.values import as_embeddings, as_query, encode, is_encoded


class TupleIndex:
    """Items of some modalities, ranked by the score's own value with a query of others. Build or load one:

        index = TupleIndex.build(score, {"image": a, "audio": b}, ids=names, metadata={"title": titles})
        hits = index.search({"text": q}, k=10)

    Ranking is always by raw inner product of `score.query_vectors` and `score.item_vectors`.
    """

    def __init__(self, score: Score, modalities: tuple[str, ...], items: Items, backend: FaissBackend):
        self.score = score
        self.modalities = modalities
        self.model: Any = None
        self.fingerprint: str | None = None
        self.device = "cpu"
        self._items, self._backend = items, backend
        self._path: Path | None = None

    @classmethod
    def build(
        cls,
        score: Any,
        items: Any,
        ids: Any = None,
        metadata: Any = None,
        factory: Any = "auto",
        device: Any = "cpu",
        bank: Any = None,
        *,
        encoded: Any = None,
        modalities: Any = None,
    ) -> "TupleIndex":
        """Fuse and index items.

        Args:
            score: a Score; or a model, whose score and fingerprint are taken now and which encodes raw values. Build
                again after training it further: the items are not encoded anew.
            items: {modality: (n, d) embeddings}; with a model {modality: n raw values} or a `datasets.Dataset` (columns
                named as modalities; other columns of single values become metadata); or a folder of embedding shards.
            ids: n integers >= 0 or n non-empty strings; default 0..n-1.
            metadata: {column: n values} or a `pyarrow.Table` of n rows, in place of what the items bring along.
            factory: FAISS factory string such as "IVF64,PQ16"; "auto" is "Flat".
            device: "cpu", or "auto" for the same.
            bank: not in this version; items are ranked by the score itself.
            encoded: whether items are embeddings. Default: without a model they are; with one, where they are unit
                rows of the score's width.
            modalities: those of the items to store; default: all of them, which must not be all of the score's.
        Raises: KeyError for an unknown modality; ValueError that names the modality and the row, the id, the metadata
            column, or the factory string at fault.
        """
        device = check_device(device)
        refuse_option("bank", bank, "items are ranked by the score itself")
        score, model = (score, None) if isinstance(score, Score) else (check_model(score).score, score)
        source = open_source(items, score, model, modalities, encoded)
        fingerprint = source.fingerprint if model is None else model.fingerprint()
        refuse_fingerprint(source.fingerprint, fingerprint, "the embedding shards were")
        numbers = check_ids(ids, source.count)
        table = None if metadata is None else check_metadata(metadata, source.count)
        frozen = frozen_copy(score)
        collected: list[pa.Table] = []
        backend = FaissBackend.build(factory, score.width, fused_blocks(frozen, source, collected))
        if table is None:
            brought = pa.concat_tables(collected, promote_options="default") if collected else source.metadata
            table = check_metadata(brought, source.count)
        index = cls(frozen, source.modalities, Items(numbers, table), backend)
        index.model, index.fingerprint, index.device = model, fingerprint, device
        return index

    def search(self, queries: Any, k: Any = 10, where: Any = None, *, encoded: Any = None, **parameters: Any) -> Hits:
        """The k items of highest score with each query.

        Args:
            queries: {modality: (nq, d) embeddings, or raw values where the index has a model}, any of the modalities
                that are not stored; a single vector, number, string, image or dict is one query, other single values
                go into a list. Those left out are absent (see `Score.query_vectors`).
            k: how many; where there are fewer, `hits.counts` says so.
            where: not in this version; filter `hits.metadata`.
            encoded: whether queries are embeddings; default as in `build`.
            parameters: FAISS search parameters by name, such as nprobe=32 or efSearch=64.
        Raises: KeyError for an unknown modality, or an absent one that the score cannot replace; ValueError for a
            stored modality, a row that is not finite or only zeros, k that is no integer >= 1, and a parameter that
            this type of index does not have.
        """
        if isinstance(k, bool) or not isinstance(k, Integral) or k < 1:
            raise ValueError(f"k must be an integer >= 1, got {k!r}")
        refuse_option("where", where, "filter hits.metadata instead")
        self._backend.check_parameters(parameters)
        vectors = self._query_vectors(queries, encoded)
        shape, found = (len(vectors), int(k)), min(int(k), len(self))
        scores, rows = np.full(shape, -np.inf, np.float32), np.full(shape, -1, np.int64)
        if found and len(vectors):
            scores[:, :found], rows[:, :found] = self._backend.search(vectors, found, parameters)
            scores[rows < 0] = -np.inf
        return Hits(self._items, scores, rows, self._backend.exact)

    def get(self, ids: Any) -> Any:
        """Metadata: a dict for a single id, a list of dicts in the order of several. KeyError names an unknown id."""
        single = isinstance(ids, str) or np.ndim(ids) == 0
        keys = [ids] if single else ids.tolist() if hasattr(ids, "tolist") else list(ids)
        found = self._items.metadata_at(np.array([self._items.row(key) for key in keys], np.int64))
        return found[0] if single else found

    def __contains__(self, key: object) -> bool:
        return key in self._items

    def __len__(self) -> int:
        return len(self._items)

    def __repr__(self) -> str:
        return f"TupleIndex({len(self)} items of {list(self.modalities)}, factory={self._backend.factory!r})"

    @property
    def query_modalities(self) -> tuple[str, ...]:
        """Those that a search may name."""
        return tuple(name for name in self.score.modalities if name not in self.modalities)

    def info(self) -> dict[str, Any]:
        """What the index is, JSON-serialisable; `bytes` is the size of its vectors as FAISS stores them."""
        return {**self._about(), "query_modalities": list(self.query_modalities), "bytes": self._bytes}

    def save(self, path: Any) -> None:
        """Write the index into a folder; an index that is there already is replaced in one step, whole or not at all.

        Raises: ValueError where the folder holds something else; OSError where the disk does not take it.
        """
        import pyarrow.parquet as pq

        writers = {
            "score.safetensors": self.score.save,
            "index.faiss": self._write_vectors,
            "items.parquet": lambda file: pq.write_table(self._items.to_table(), file),
        }
        write_version(Path(path), writers, {**self._about(), "score": self.score.config()})
        self._path = Path(path)

    @classmethod
    def load(cls, path: Any, model: Any = None, device: Any = "cpu") -> "TupleIndex":
        """Read an index that `save` wrote, after checking every file's checksum.

        Args:
            path: the folder.
            model: encodes raw queries; it must be the one that the index was built with.
            device: "cpu", or "auto" for the same.
        Raises: FileNotFoundError where there is no index; ValueError that names the damaged or foreign file, or both
            fingerprints of a model that differs.
        """
        device = check_device(device)
        index = read_version(Path(path), cls._read)
        index.device, index._path = device, Path(path)
        if model is not None:
            refuse_fingerprint(index.fingerprint, check_model(model).fingerprint(), f"{path} was")
            if model.score.config() != index.score.config():
                raise ValueError(f"{path} has the score {index.score.config()}, the model {model.score.config()}")
            index.model = model
        return index

    def verify(self) -> None:
        """Check that the parts of the index agree, and the files it was saved to or loaded from with their checksums.

        Raises: ValueError that says what is wrong, naming the file.
        """
        if len(self._backend) != len(self._items):
            raise ValueError(f"{len(self._items)} items, yet {len(self._backend)} vectors")
        if self._backend.width != self.score.width:
            raise ValueError(f"vectors of width {self._backend.width}, yet the score's have {self.score.width}")
        if self._path is not None:
            read_version(self._path, self._read)

    @classmethod
    def _read(cls, folder: Path, manifest: dict[str, Any]) -> "TupleIndex":
        import pyarrow.parquet as pq

        score = frozen_copy(load_score(folder / "score.safetensors"))
        items = Items.from_table(pq.read_table(folder / "items.parquet"))
        with open(folder / "index.faiss", "rb") as file:
            backend = FaissBackend.read(file, manifest["factory"], score.width)
        if not len(backend) == len(items) == manifest["count"]:
            counts = f"{len(backend)} vectors, {len(items)} ids"
            raise ValueError(f"{folder} is damaged: {counts}, the manifest says {manifest['count']}")
        index = cls(score, tuple(manifest["modalities"]), items, backend)
        index.fingerprint = manifest["fingerprint"]
        return index

    def _query_vectors(self, queries: Any, encoded: Any) -> np.ndarray:
        """(nq, width) float32 query vectors of embeddings or raw values."""
        self._check_names(queries)
        values = {name: as_query(value, name, self.model) for name, value in queries.items()}
        ready = {name: is_encoded(value, name, self.score.dim, self.model, encoded) for name, value in values.items()}
        raw = {name: value for name, value in values.items() if not ready[name]}
        rows = {name: as_embeddings(values[name], name, self.score.dim) for name in values if ready[name]}
        rows |= encode(self.model, raw, self.score.dim) if raw else {}
        for name, part in rows.items():
            refuse_bad_rows(part, name)
        same_length(rows)
        absent = tuple(name for name in self.query_modalities if name not in rows)
        with torch.no_grad():
            vectors = self.score.query_vectors(rows, absent=absent).float()
        if not torch.isfinite(vectors).all():
            row = int((~torch.isfinite(vectors).all(dim=1)).nonzero()[0])
            raise ValueError(f"query row {row}: {list(rows)} fuse to a vector that is not finite in float32")
        return vectors.numpy()

    def _check_names(self, queries: Any) -> None:
        """Modalities of a query: at least one, known, not stored."""
        choices = f"a search names some of {list(self.query_modalities)}"
        if not isinstance(queries, Mapping):
            raise ValueError(f"queries must be {{modality: values}}, got {type(queries).__name__}; {choices}")
        for name in queries:
            if name in self.modalities:
                raise ValueError(f"modality {name!r} is stored in this index; {choices}")
            if name not in self.query_modalities:
                raise KeyError(f"unknown modality {name!r} in the query; {choices}")
        if not queries:
            raise ValueError(f"the query is empty; {choices}")

    def _about(self) -> dict[str, Any]:
        """What manifest and `info` share."""
        return {
            "format_version": FORMAT_VERSION,
            "count": len(self),
            "modalities": list(self.modalities),
            "factory": self._backend.factory,
            "metric": "inner product",
            "exact": self._backend.exact,
            "width": self.score.width,
            "padded_width": self._backend.padded_width,
            "fingerprint": self.fingerprint,
            "columns": self._items.metadata.column_names,
        }

    def _write_vectors(self, path: Path) -> None:
        with open(path, "wb") as file:
            self._backend.write(file)

    @functools.cached_property
    def _bytes(self) -> int:
        return self._backend.stored_bytes()


def fused_blocks(score: Score, source: Source, metadata: list[pa.Table]) -> Iterator[np.ndarray]:
    """Item vectors block by block; metadata that comes along is collected into the list."""
    start = 0
    for embeddings, table in source.blocks:
        fused = fused_block(score, embeddings, start).numpy()
        start += len(fused)
        if table is not None:
            metadata.append(table)
        yield fused


def frozen_copy(score: Score) -> Score:
    """The score as an index keeps it, whatever training does to the original."""
    return copy.deepcopy(score).cpu().float().eval().requires_grad_(False)


def check_device(device: Any) -> str:
    """The device that searches run on."""
    if device not in ("cpu", "auto"):
        raise ValueError(f"device must be 'cpu' or 'auto', got {device!r}: this version searches on the CPU")
    return "cpu"


def refuse_option(name: str, value: Any, instead: str) -> None:
    """ValueError where an option is asked for that this version does not have."""
    if value is not None:
        raise ValueError(f"{name}= is not in this version of mmcl: {instead}")


def check_model(model: Any) -> Any:
    """The model; ValueError where it is neither a score nor a model."""
    if not all(hasattr(model, name) for name in ("score", "encode", "fingerprint")):
        raise ValueError(f"expected a Score or a MultimodalModel, got {type(model).__name__}")
    return model


def refuse_fingerprint(theirs: str | None, ours: str | None, what: str) -> None:
    """ValueError where embeddings and model are known to differ, with both fingerprints."""
    if theirs is not None and ours is not None and theirs != ours:
        raise ValueError(
            f"{what} made with another model: its fingerprint is {theirs[:12]}..., this one's {ours[:12]}..."
        )
