"""From a source of items to stored tuples: in this process, or in Milvus."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from mmcl.index.faiss_backend import FaissBackend
from mmcl.index.faiss_factory import MIPS, new_faiss_index, refuse_few_rows, returns_own_scores
from mmcl.index.fusion import Fusion
from mmcl.index.item_checks import check_metadata
from mmcl.index.items import Items
from mmcl.index.local import LocalTuples
from mmcl.index.sources import Source

EXACT, AUTO = "Exact", "auto"
LOCAL, MILVUS = "local", "milvus"


@dataclass(frozen=True)
class Type:
    """A type of index, and with which effort it is searched unless told otherwise."""

    factory: Any
    parameters: dict[str, Any] = field(default_factory=dict)
    reason: str | None = None
    """Why "auto" took it."""
    mapped: bool = False
    """Whether its full vectors have to stay on the disk: it fits its memory budget only so."""

    def about(self) -> dict[str, Any]:
        """What the manifest says of it, beside the factory."""
        return {"search_parameters": dict(self.parameters), "reason": self.reason, "mapped": self.mapped}


def chosen_type(
    factory: Any, count: int, width: int, memory_budget: Any, recall_target: float, device: str, backend: str
) -> Type:
    """What "auto" stands for; other factories as they are.

    Raises: ValueError where nothing fits the budget, naming the least that would, and for a budget without "auto".
    """
    from mmcl.index.choose import check_recall, choose_factory, parse_bytes

    check_recall(recall_target)
    if memory_budget is not None and backend != LOCAL:
        raise ValueError("memory_budget is for indexes of this process; Milvus keeps its memory itself")
    if factory != AUTO and memory_budget is not None:
        raise ValueError(f"memory_budget goes with factory='auto', not with {factory!r}, which takes what it takes")
    if factory != AUTO or backend != LOCAL:
        return Type(factory)
    budget = None if memory_budget is None else parse_bytes(memory_budget)
    choice = choose_factory(count, width, budget, recall_target, device)
    return Type(choice.factory, dict(choice.parameters), choice.reason, choice.mapped)


def check_type(factory: Any, width: int, count: int, asked: bool = False) -> None:
    """Refuse a factory of this process before anything is encoded.

    Args:
        asked: whether queries are to set the effort.
    Raises: ValueError where it is none, needs more items to be trained on, or cannot tell what queries should find.
    """
    if factory == EXACT:
        return
    lifted = isinstance(factory, str) and factory.startswith(MIPS)
    index = new_faiss_index(factory, width + lifted)
    refuse_few_rows(index, factory, count)
    if asked and not returns_own_scores(index):
        raise ValueError(
            f"factory {factory!r} holds codes alone, and cannot say what queries= should find; keep full vectors too, "
            f"as '{factory},RFlat' does, or build without queries and call mmcl.index.tune(index, queries, items=...)"
        )


def check_queries(queries: Mapping[str, Any], count: int, where: str) -> None:
    """ValueError where there are no queries {modality: rows}, or no items, to set an effort by, or it is not ours."""
    if where == MILVUS:
        raise ValueError("queries= set the effort of indexes in this process; in Milvus give nprobe or efSearch")
    rows = len(next(iter(queries.values()), ()))
    if not rows or not count:
        raise ValueError(f"tuning takes queries and items; there are {rows} queries and {count} items")


def local_tuples(
    fusion: Fusion, source: Source, ids: np.ndarray, metadata: pa.Table | None, factory: Any, device: str
) -> LocalTuples:
    """Tuples in this process: one pass over the source.

    Args:
        fusion: makes vectors of the source's blocks.
        ids: (n,) checked.
        metadata: n rows; None: what comes along with the items.
        factory: a FAISS factory string, or "Exact".
        device: checked, see `check_device`.
    """
    collected: list[pa.Table] = []
    base = built_base(factory, fusion.width, fusion.items(source, collected), device)
    table = brought_metadata(source, collected) if metadata is None else metadata
    return LocalTuples(base, Items(ids, table))


def built_base(factory: Any, width: int, blocks: Iterable[np.ndarray], device: str) -> Any:
    """The backend of a factory string over these vectors."""
    if factory == EXACT:
        from mmcl.index.exact_backend import ExactBackend, exact_pays

        if exact_pays(device):
            return ExactBackend.build(width, blocks, device)
        factory = "Flat"
    return FaissBackend.build(factory, width, blocks).moved(device)


def milvus_tuples(
    collections: Iterable[tuple[Any, Fusion, Any]],
    source: Source,
    ids: np.ndarray,
    metadata: pa.Table | None,
    uri: Any,
    token: str | None,
    replace: bool,
) -> list[Any]:
    """Tuples in new Milvus collections, (name, fusion, factory) each, stored block by block in one pass over all items.

    Raises: as `MilvusTuples.create`, before anything is encoded. No collection is left where the build fails.
    """
    from mmcl.index.milvus import MilvusTuples

    if uri is None:
        raise ValueError("backend='milvus' needs uri=: a path that ends in .db (Milvus Lite), or http://host:port")
    made: list[tuple[Fusion, Any]] = []
    try:
        for name, fusion, factory in collections:
            named = ids.dtype == object
            made.append((fusion, MilvusTuples.create(uri, name, fusion.width, named, factory, token, replace)))
        for start, embeddings, table in blocks_of(source, metadata):
            for fusion, tuples in made:
                block = {name: embeddings[name] for name in fusion.modalities}
                (vectors,) = fusion.fused([(block, None)], [], start)
                tuples.upsert(ids[start : start + len(vectors)], vectors, table)
        for fusion, tuples in made:
            if not len(ids) and metadata is not None:  # the columns are there, though no item is
                tuples.upsert(ids, np.empty((0, fusion.width), np.float32), metadata)
            tuples.compact()
    except BaseException:
        for _, tuples in made:
            tuples.drop()
        raise
    return [tuples for _, tuples in made]


def opened_milvus(manifest: Mapping[str, Any], width: int, token: str | None) -> Any:
    """The collection that a manifest names."""
    from mmcl.index.milvus import MilvusTuples

    return MilvusTuples.open(manifest["uri"], manifest["collection"], width, token)


def built_on_disk(
    source: Source,
    where: str,
    fusion: Fusion,
    ids: np.ndarray,
    metadata: pa.Table | None,
    factory: Any,
    device: str,
    out: Path,
    about: Mapping[str, Any],
    settle: Callable[[Any], dict[str, Any]],
    progress: bool,
) -> None:
    """Build in a folder, from what can be read again and in pieces; ValueError for other sources."""
    from mmcl.index.disk_index import build_folder

    check_on_disk(source, where)
    metadata = source.metadata if metadata is None else metadata
    build_folder(out, fusion, source.shards, ids, metadata, factory, device, about, settle, progress)


def check_on_disk(source: Source, where: str) -> None:
    """ValueError for what cannot be built on disk."""
    if where != LOCAL:
        raise ValueError("out= is for indexes of this process; Milvus keeps its tuples itself")
    if source.shards is None:
        raise ValueError(
            "an index on disk (out=, or a type that fits memory_budget only so) takes embeddings, as shards or arrays; "
            "`mmcl.embed` makes them of raw values"
        )


def blocks_of(source: Source, metadata: pa.Table | None) -> Iterator[tuple[int, Any, pa.Table]]:
    """(number of its first row, {modality: (rows, d)}, metadata) of each block."""
    start = 0
    for embeddings, brought in source.blocks:
        count = len(next(iter(embeddings.values())))
        if metadata is not None:
            table = metadata.slice(start, count)
        else:
            whole = pa.table({}) if source.metadata is None else source.metadata.slice(start, count)
            table = check_metadata(whole if brought is None else brought, count)
        yield start, embeddings, table
        start += count


def brought_metadata(source: Source, collected: list[pa.Table]) -> pa.Table:
    """The metadata that came along with the items."""
    brought = pa.concat_tables(collected, promote_options="default") if collected else source.metadata
    return check_metadata(brought, source.count)
