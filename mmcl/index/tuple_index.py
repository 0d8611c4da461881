"""Tuples of some modalities, retrieved from any of the others by one inner product."""

from collections.abc import Mapping
from functools import partial
from numbers import Integral
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa

from mmcl.index.building import (
    LOCAL,
    MILVUS,
    brought_metadata,
    built_on_disk,
    check_queries,
    check_type,
    chosen_type,
    local_tuples,
    milvus_tuples,
)
from mmcl.index.devices import check_device
from mmcl.index.fusion import Fusion, frozen_copy
from mmcl.index.hits import Hits
from mmcl.index.item_checks import check_ids, check_metadata, check_model, listed, refuse_fingerprint
from mmcl.index.saved_index import BACKENDS, SavedIndex, about_index
from mmcl.index.sources import is_dataset, open_source, refuse_all
from mmcl.scores import Score
from mmcl.tables import lookup


class TupleIndex(SavedIndex):
    """Items of some modalities, ranked by the score's own value with a query of others. Build or load one:

        index = TupleIndex.build(score, {"image": a, "audio": b}, ids=names, metadata={"title": titles})
        hits = index.search({"text": q}, k=10)

    Ranking is always by raw inner product of `score.query_vectors` and `score.item_vectors`. Any number of threads may
    search while one adds or removes: each answer is of one consistent version.
    """

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
        columns: Mapping[str, str] | None = None,
        backend: str = "faiss",
        uri: Any = None,
        collection: str = "mmcl",
        token: str | None = None,
        replace: bool = False,
        queries: Any = None,
        memory_budget: Any = None,
        recall_target: float = 0.95,
        out: Any = None,
        progress: bool = False,
    ) -> "TupleIndex":
        """Fuse and index items.

        Args:
            score: a Score; or a model, whose score and fingerprint are taken now and which encodes raw values. Build
                again after training it further: the items are not encoded anew.
            items: {modality: (n, d) embeddings}; with a model {modality: n raw values} or a `datasets.Dataset` (see
                `columns`; other columns of single values become metadata); or a folder of embedding shards.
            ids: n integers >= 0 or n non-empty strings; default 0..n-1.
            metadata: {column: n values} or a `pyarrow.Table` of n rows, in place of what the items bring along.
            factory: FAISS factory string such as "IVF64,PQ16"; "MIPS," before it adds a coordinate with which lists and
                graphs find their way among items of different lengths. "Exact" is exact search in two stages; "auto"
                chooses by the number of items, their width, `memory_budget` and `recall_target`, and says why in
                `index.reason`.
            device: "cpu"; "cuda", "cuda:N" for one GPU; "cuda:all" to cut the index into pieces for all; "auto" takes a
                GPU where there is one that has this type. `index.device` says which it is.
            bank: {modality: (b, d) embeddings, or raw values for the model} of some hundred queries: items are ranked
                by log p(query | item) / p(query) in place of the score, which also rewards items for how well their
                own parts fit (querybank normalisation, Bogolin et al. 2022). Searches then name those modalities.
            encoded: whether items, and the bank, are embeddings. Default: without a model they are; with one, where
                they are unit rows of the score's width.
            modalities: those of the items to store; default: all of them, which must not be all of the score's.
            columns: {modality: column} of a dataset; default: columns named as the modalities.
            backend: "faiss", in this process; or "milvus", a collection there (extra `milvus`).
            uri: of Milvus: a path that ends in .db runs Milvus Lite in this process, http://host:port is a server or a
                cluster.
            collection: its name there.
            token: "user:password" or an API key of Milvus; never stored.
            replace: drop a collection of that name first, if mmcl made it.
            queries: {query modality: rows}, some hundred true ones: searches then take the least effort that reaches
                `recall_target` with them (see `mmcl.index.tune`). Without them "auto" goes by the bank, or by random
                queries, which may ask for more effort than true ones.
            memory_budget: of "auto", bytes or such as "2GiB" for the vectors, beside ids and metadata; default: no
                limit. Full vectors that do not fit stay on the disk, also after `load`.
            recall_target: of "auto", the share of the true best 10 that searches should find.
            out: build in this folder, as `save` would leave it, of embeddings that need not fit in memory (shards, or
                memory-mapped arrays); what is returned is read from there. A build that was interrupted goes on where
                it stopped.
            progress: show a bar, with `out`.
        Raises: KeyError for an unknown modality, column or backend; ValueError that names the modality and the row, the
            id, the metadata column, or the factory string at fault.
        """
        from mmcl.index.calibrate import settled

        device = check_device(device)
        score, model = (score, None) if isinstance(score, Score) else (check_model(score).score, score)
        source = open_source(items, score, model, modalities, encoded, columns)
        refuse_all(source.modalities, score)
        fingerprint = source.fingerprint if model is None else model.fingerprint()
        refuse_fingerprint(source.fingerprint, fingerprint, "the embedding shards were")
        numbers = check_ids(ids, source.count)
        table = None if metadata is None else check_metadata(metadata, source.count)
        fusion = Fusion(frozen_copy(score), source.modalities)
        fusion = fusion if bank is None else fusion.with_bank(bank, model, encoded)
        where = lookup(BACKENDS, backend, "backend")
        kind = chosen_type(factory, source.count, fusion.width, memory_budget, recall_target, device, where)
        asked = None if queries is None else fusion.embedded_queries(queries, model, encoded)
        if asked is not None:
            check_queries(asked, source.count, where)
        if where == LOCAL:
            check_type(kind.factory, fusion.width, source.count, asked is not None)
        folder = TemporaryDirectory(prefix="mmcl-") if out is None and kind.mapped else None
        if out is not None or folder is not None:
            out = Path(folder.name) / "index" if folder is not None else Path(out)
            about = about_index(fusion, fingerprint)
            settle = partial(settled, fusion, numbers, kind, asked, recall_target, device)
            built_on_disk(source, where, fusion, numbers, table, kind.factory, device, out, about, settle, progress)
            index = cls.load(out, model, device, memory_map=True)
            index._folder = folder
            return index
        if where == MILVUS:
            made = [(collection, fusion, kind.factory)]
            (tuples,) = milvus_tuples(made, source, numbers, table, uri, token, replace)
        else:
            tuples = local_tuples(fusion, source, numbers, table, kind.factory, device)
        index = cls(fusion, tuples)
        index.model, index.fingerprint = model, fingerprint
        index.search_parameters, index.reason = dict(kind.parameters), kind.reason
        return index.tuned(asked, recall_target, True)

    def tuned(self, queries: Any, recall_target: float, encoded: Any = None) -> "TupleIndex":
        """The index itself, with the least effort that reaches a recall@10 (see `mmcl.index.calibrate`)."""
        from mmcl.index.calibrate import fit_effort

        fit_effort(self, queries, recall_target, encoded)
        return self

    def search(self, queries: Any, k: Any = 10, where: Any = None, *, encoded: Any = None, **parameters: Any) -> Hits:
        """The k items of highest score with each query.

        Args:
            queries: {modality: (nq, d) embeddings, or raw values where the index has a model}, any of the modalities
                that are not stored; a single vector, number, string, image or dict is one query, other single values
                go into a list. Those left out are absent (see `Score.query_vectors`).
            k: how many; where there are fewer, `hits.counts` says so.
            where: a condition on metadata columns and `id` in DuckDB's SQL, such as "year >= 2020 and genre = 'rock'",
                or (condition, parameters) with ? or $name in their place. Only items that satisfy it are returned, k of
                them wherever there are.
            encoded: whether queries are embeddings; default as in `build`.
            parameters: FAISS search parameters by name, such as nprobe=32 or efSearch=64.
        Raises: KeyError for an unknown modality, or an absent one that the score cannot replace; ValueError for a
            stored modality, a row that is not finite or only zeros, k that is no integer >= 1, a parameter that this
            type of index does not have, and a condition that is none.
        """
        if isinstance(k, bool) or not isinstance(k, Integral) or k < 1:
            raise ValueError(f"k must be an integer >= 1, got {k!r}")
        parameters = {**self.search_parameters, **parameters}
        self._tuples.check_parameters(parameters)
        vectors = self._fusion.queries(queries, self.model, encoded)
        hits = self._tuples.search(vectors, int(k), where, parameters)
        hits.kind = self.kind
        return hits

    def add(
        self, items: Any, ids: Any = None, metadata: Any = None, *, encoded: Any = None, columns: Any = None
    ) -> None:
        """Store more items; they are found at once.

        Args:
            items: of the stored modalities, in any of the forms that `build` takes.
            ids: new ones, of the kind that the index has; default: the integers behind the largest there ever was.
            metadata: as in `build`; columns that it lacks, or brings along, are None elsewhere.
            encoded, columns: as in `build`.
        Raises: ValueError naming an id that is there already (`upsert` replaces it), or what `build` would name;
            nothing is stored then.
        """
        vectors, table, numbers = self._fused(items, ids, metadata, encoded, columns)
        self._tuples.add(numbers, vectors, table)

    def upsert(self, items: Any, ids: Any, metadata: Any = None, *, encoded: Any = None, columns: Any = None) -> None:
        """Store items, in place of those that have their ids, metadata included; see `add`."""
        if ids is None:
            raise ValueError("upsert needs ids: those of the items to replace, or new ones")
        vectors, table, numbers = self._fused(items, ids, metadata, encoded, columns)
        self._tuples.upsert(numbers, vectors, table)

    def remove(self, ids: Any) -> None:
        """Take out one item or several; KeyError names an id that is not there, and nothing is removed then."""
        self._tuples.remove(listed(ids)[0])

    def compact(self) -> None:
        """Free what removed items still hold, and give added ones their place in the lists or the graph."""
        self._tuples.compact()

    def get(self, ids: Any) -> Any:
        """Metadata: a dict for a single id, a list of dicts in the order of several. KeyError names an unknown id."""
        keys, single = listed(ids)
        found = self._tuples.get(keys)
        return found[0] if single else found

    def ids(self) -> np.ndarray:
        """(n,) ids of all items, in the order in which they were stored (in Milvus ascending)."""
        return self._tuples.ids()

    def vectors(self, ids: Any) -> np.ndarray:
        """(n, width) float32: the fused vectors of these ids, decoded where the type quantises them; see `get`."""
        return self._tuples.vectors(listed(ids)[0])

    def id_of(self, text: str) -> int | str:
        """An id written as text: a number where the ids of this index are numbers."""
        named = self._tuples.named
        if not named and not text.isdecimal():
            raise KeyError(f"no item {text!r}; ids of this index are integers")
        return text if named else int(text)

    def __contains__(self, key: object) -> bool:
        return key in self._tuples

    def __len__(self) -> int:
        return len(self._tuples)

    def __repr__(self) -> str:
        return f"TupleIndex({len(self)} items of {list(self.modalities)}, factory={self._tuples.factory!r})"

    @property
    def score(self) -> Score:
        return self._fusion.score

    @property
    def modalities(self) -> tuple[str, ...]:
        """Those that are stored."""
        return self._fusion.modalities

    @property
    def query_modalities(self) -> tuple[str, ...]:
        """Those that a search may name."""
        return self._fusion.bank_modalities or self._fusion.query_modalities

    @property
    def device(self) -> str:
        """Where searches run."""
        return self._tuples.device

    @property
    def kind(self) -> str:
        """What `hits.scores` are: "score", or with a bank "pmi", log p(query | item) / p(query) in nats."""
        return self._fusion.kind

    def info(self) -> dict[str, Any]:
        """What the index is, JSON-serialisable; `bytes` is the size of its vectors as they are stored."""
        about = {**self._about(), **self._tuples.saving().about()}
        about.pop("engine", None)
        return {**about, "query_modalities": list(self.query_modalities), "bytes": self._tuples.stored_bytes}

    def _fused(
        self, items: Any, ids: Any, metadata: Any, encoded: Any, columns: Any = None
    ) -> tuple[np.ndarray, pa.Table, Any]:
        """Vectors, metadata and checked ids of items to be stored."""
        if isinstance(items, Mapping) and not is_dataset(items, "DatasetDict") and set(items) != set(self.modalities):
            raise ValueError(f"this index stores {list(self.modalities)}; the items have {list(items)}")
        source = open_source(items, self.score, self.model, self.modalities, encoded, columns)
        refuse_fingerprint(source.fingerprint, self.fingerprint, "the embedding shards were")
        numbers = None if ids is None else check_ids(ids, source.count)
        table = None if metadata is None else check_metadata(metadata, source.count)
        collected: list[pa.Table] = []
        blocks = list(self._fusion.items(source, collected))
        vectors = np.concatenate([np.empty((0, self._fusion.width), np.float32), *blocks])
        return vectors, brought_metadata(source, collected) if table is None else table, numbers
