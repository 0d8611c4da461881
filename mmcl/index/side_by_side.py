"""Several indexes over the same items, each storing other modalities: whatever a query names, one of them answers."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from mmcl.arrays import refuse_unknown
from mmcl.index.building import MILVUS, check_queries, milvus_tuples
from mmcl.index.devices import check_device
from mmcl.index.hits import Hits
from mmcl.index.item_checks import check_ids, check_metadata, check_model, listed, refuse_fingerprint
from mmcl.index.saved_index import BACKENDS
from mmcl.index.side_by_side_build import (
    build_folders,
    builds_on_disk,
    built_in_memory,
    collection_names,
    planned,
)
from mmcl.index.side_by_side_changes import all_or_nothing, held, next_ids
from mmcl.index.side_by_side_parts import (
    Names,
    answers,
    check_stored,
    choices,
    encoded_once,
    every_split,
    factory_of_each,
    kind_of_each,
    open_whole,
    restricted,
)
from mmcl.index.side_by_side_saved import SavedIndexes
from mmcl.index.sources import is_dataset, open_source
from mmcl.index.tuple_index import TupleIndex
from mmcl.scores import Score
from mmcl.tables import lookup


class TupleIndexes(SavedIndexes):
    """Items of several modalities, found from any subset of them. Build or load them:

        indexes = TupleIndexes.build(score, {"image": a, "audio": b, "text": c}, ids=names)
        indexes.search({"text": q})                      # ranks images with their sounds
        indexes.search({"image": p, "audio": r})         # ranks texts
        indexes.search({"image": p}, target=("text",))   # the same, the sound being absent

    `indexes.storing(("image", "audio"))` is the `TupleIndex` of those two, to be read. Changes go through this class:
    all indexes have the same items, and what one of them refuses changes none.
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
        stored: Any = None,
        encoded: Any = None,
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
    ) -> "TupleIndexes":
        """Build every index from one pass over the items: each raw value is encoded once.

        The embeddings are in memory once meanwhile (arrays of the caller's are not copied), beside the indexes. With
        `out`, and in Milvus, a block of them is.

        Args:
            score, items, ids, metadata, device, encoded, columns, backend, uri, token, replace, recall_target,
                progress: as in `TupleIndex.build`; the items are of all modalities that any index stores, and may be of
                all that the score has.
            factory: one for all, or {stored modalities: factory}, "auto" for those it does not name.
            bank, queries: as in `TupleIndex.build`, of any modalities; each index takes those that it does not store,
                and with a bank is searched by just those.
            stored: which indexes, such as [("image", "audio"), ("text",)]. Default: one for each way of dividing the
                modalities, 2^m - 2 of them, so that every query finds the tuples of all the others. Each takes as much
                memory as a `TupleIndex`: from four modalities on, name those that will be asked.
            collection: in Milvus every index is a collection of its own, named so with its modalities behind it, such
                as "mmcl_image_audio".
            memory_budget: of all indexes that "auto" chooses together, an equal part each; the others go beyond it.
            out: build in this folder, as `save` would leave it; see `TupleIndex.build`. Each pass over the embeddings
                serves all indexes.
        Raises: as `TupleIndex.build`, naming the index where only one is at fault, before anything is encoded; KeyError
            for a dataset without the column of a modality, unless `stored` says which there are; ValueError for
            `stored` that is empty, or leaves nothing to search by.
        """
        device, where = check_device(device), lookup(BACKENDS, backend, "backend")
        score, model = (score, None) if isinstance(score, Score) else (check_model(score).score, score)
        chosen = None if stored is None else check_stored(stored, score)
        source = open_whole(items, score, model, chosen, encoded, columns)
        factories = factory_of_each(factory, every_split(source.modalities, score) if chosen is None else chosen)
        fingerprint = source.fingerprint if model is None else model.fingerprint()
        refuse_fingerprint(source.fingerprint, fingerprint, "the embedding shards were")
        numbers = check_ids(ids, source.count)
        table = None if metadata is None else check_metadata(metadata, source.count)
        width = score.width + (bank is not None)
        asked = encoded_once(queries, score, model, encoded, "queries")
        if asked is not None:
            check_queries(asked, source.count, where)
        told = asked is not None
        kinds = kind_of_each(factories, source.count, width, memory_budget, recall_target, device, where, told)
        on_disk = builds_on_disk(source, where, out, kinds.values())
        rows = encoded_once(bank, score, model, encoded, "the bank")
        plans = planned(kinds, score, rows, asked)
        if on_disk:
            folder = TemporaryDirectory(prefix="mmcl-") if out is None else None
            path = Path(out) if folder is None else Path(folder.name) / "indexes"
            build_folders(path, plans, source, numbers, table, recall_target, device, fingerprint, progress)
            indexes = cls.load(path, model, device, memory_map=True)
            for index in indexes._all:
                index._folder = folder
        else:
            if where == MILVUS:
                names = collection_names(collection, plans)
                made = [(name, plan.fusion, plan.kind.factory) for name, plan in zip(names, plans, strict=True)]
                tuples = milvus_tuples(made, source, numbers, table, uri, token, replace)
            else:
                tuples = built_in_memory(plans, source, numbers, table, device)
            found = [TupleIndex(plan.fusion, each) for plan, each in zip(plans, tuples, strict=True)]
            for plan, index in zip(plans, found, strict=True):
                index.model, index.fingerprint = model, fingerprint
                index.search_parameters, index.reason = dict(plan.kind.parameters), plan.kind.reason
                index.tuned(plan.queries, recall_target, encoded=True)
            indexes = cls({index.modalities: index for index in found})
        return indexes

    def search(
        self,
        queries: Any,
        k: Any = 10,
        where: Any = None,
        *,
        target: Any = None,
        encoded: Any = None,
        **parameters: Any,
    ) -> Hits:
        """The k items of highest score with each query, by the index that `index_for` says.

        Args:
            queries, k, where, encoded, parameters: as in `TupleIndex.search`.
            target: the stored modalities of the index that shall answer.
        Raises: as `index_for` and `TupleIndex.search`.
        """
        if not isinstance(queries, Mapping):
            raise ValueError(
                f"the query must be {{modality: values}}, got {type(queries).__name__}; {choices(self._all)}"
            )
        index = self.index_for(queries, target)
        return index.search(queries, k, where, encoded=encoded, **parameters)

    def index_for(self, queried: Iterable[str], target: Any = None) -> TupleIndex:
        """The index that answers a query of these modalities: of those that store none of them the one storing most.

        So every modality is either queried or stored wherever there is such an index; one that is neither is absent,
        see `Score.query_vectors`.

        Args:
            queried: names of modalities.
            target: the stored modalities of the index that shall answer, in any order.
        Raises: KeyError listing the indexes where none answers, or none stores the target; ValueError where several
            store equally many: `target` says which.
        """
        names = [queried] if isinstance(queried, str) else list(queried)
        if target is not None:
            return self.storing(target)
        refuse_unknown(names, self.score.modalities, "the query")
        fitting = [index for index in self._all if answers(index, names)]
        if not fitting:
            raise KeyError(f"no index here answers a query of {names}; {choices(self._all)}")
        most = max(len(index.modalities) for index in fitting)
        best = [index for index in fitting if len(index.modalities) == most]
        if len(best) > 1:
            first, second = (index.modalities for index in best[:2])
            raise ValueError(f"a query of {names} may be answered from {first} or {second}; name one as target={first}")
        return best[0]

    def storing(self, modalities: Any) -> TupleIndex:
        """The index that stores these modalities, named in any order; KeyError lists those there are."""
        single = isinstance(modalities, str) or not isinstance(modalities, Iterable)
        wanted = {modalities} if single else set(modalities)
        for names, index in self._indexes.items():
            if set(names) == wanted:
                return index
        raise KeyError(f"no index here stores {sorted(map(str, wanted))}; {choices(self._all)}")

    def add(
        self, items: Any, ids: Any = None, metadata: Any = None, *, encoded: Any = None, columns: Any = None
    ) -> None:
        """Store more items, of all modalities that any index stores; see `TupleIndex.add`."""
        self._store("add", items, ids, metadata, encoded, columns)

    def upsert(self, items: Any, ids: Any, metadata: Any = None, *, encoded: Any = None, columns: Any = None) -> None:
        """Store items, in place of those that have their ids, metadata included; see `add`."""
        if ids is None:
            raise ValueError("upsert needs ids: those of the items to replace, or new ones")
        self._store("upsert", items, ids, metadata, encoded, columns)

    def remove(self, ids: Any) -> None:
        """Take out one item or several; KeyError names an id that is not there, and nothing is removed then."""
        keys = listed(ids)[0]
        with all_or_nothing(self._all, keys) as changed:
            for tuples in changed:
                tuples.remove(keys)

    def compact(self) -> None:
        """Free what removed items still hold, and give added ones their place in the lists or the graph."""
        for index in self._all:
            index.compact()

    def get(self, ids: Any) -> Any:
        """Metadata: a dict for a single id, a list of dicts in the order of several. KeyError names an unknown id."""
        return self._first.get(ids)

    def __contains__(self, key: object) -> bool:
        return key in self._first

    def __len__(self) -> int:
        """Items, not indexes."""
        return len(self._first)

    def __repr__(self) -> str:
        return f"TupleIndexes({len(self)} items, stored={self.stored})"

    @property
    def score(self) -> Score:
        return self._first.score

    @property
    def stored(self) -> list[Names]:
        """The modalities of each index."""
        return list(self._indexes)

    @property
    def modalities(self) -> Names:
        """Those that any index stores: what `add` takes."""
        return tuple(name for name in self.score.modalities if any(name in names for names in self._indexes))

    def info(self) -> dict[str, Any]:
        """What the indexes are, JSON-serialisable."""
        each = {name: index.info() for name, index in zip(self._names, self._all, strict=True)}
        return {"count": len(self), "bytes": sum(about["bytes"] for about in each.values()), "indexes": each}

    def _store(self, how: str, items: Any, ids: Any, metadata: Any, encoded: Any, columns: Any) -> None:
        if isinstance(items, Mapping) and not is_dataset(items, "DatasetDict") and set(items) != set(self.modalities):
            raise ValueError(f"these indexes store {list(self.modalities)}; the items have {list(items)}")
        source = open_source(items, self.score, self._first.model, self.modalities, encoded, columns)
        refuse_fingerprint(source.fingerprint, self._first.fingerprint, "the embedding shards were")
        blocks = list(source.blocks)
        fused = [index._fused(restricted(source, index.modalities, blocks), ids, metadata, None) for index in self._all]
        with held(self._all) as held_tuples:
            numbers = fused[0][2]
            numbers = next_ids(held_tuples[0], source.count) if numbers is None else numbers
            with all_or_nothing(self._all, numbers.tolist()) as changed:
                for tuples, (vectors, table, _) in zip(changed, fused, strict=True):
                    getattr(tuples, how)(numbers, vectors, table)
