"""Several indexes built from one pass over the items: in this process or on the disk; their collections' names."""

import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from mmcl.index.building import Type, check_on_disk, local_tuples
from mmcl.index.disk_index import (
    draft_of,
    fused_vectors,
    is_shards,
    one_builder,
    shared,
    state_of,
    vector_steps,
    write_items,
)
from mmcl.index.disk_source import run_steps
from mmcl.index.fusion import Fusion, frozen_copy
from mmcl.index.local_files import ITEMS, copied
from mmcl.index.saved_index import about_index
from mmcl.index.side_by_side_files import Draft, folder_names, refuse_foreign, write_together
from mmcl.index.side_by_side_parts import Names, asked_of, kept, restricted
from mmcl.index.sources import Block, Source
from mmcl.index.store import BUILDING
from mmcl.scores import Score


@dataclass(frozen=True)
class Plan:
    """One of the indexes, all of whose settings are checked."""

    fusion: Fusion
    kind: Type
    queries: dict[str, Any] | None
    """{query modality: (nq, d)} that set its effort."""

    @property
    def modalities(self) -> Names:
        """Those that it stores."""
        return self.fusion.modalities


def builds_on_disk(source: Source, where: str, out: Any, kinds: Iterable[Type]) -> bool:
    """Whether to build on the disk: the caller says so, or the full vectors of some index have to stay there.

    Raises: ValueError where that cannot be.
    """
    on_disk = out is not None or any(kind.mapped for kind in kinds)
    if on_disk:
        check_on_disk(source, where)
    return on_disk


def planned(
    kinds: Mapping[Names, Type], score: Score, bank: dict[str, Any] | None, queries: dict[str, Any] | None
) -> list[Plan]:
    """The plan of each index, from the rows of the bank and of queries that it is searched by."""
    plans, frozen = [], frozen_copy(score)
    for names, kind in kinds.items():
        fusion = Fusion(frozen, names)
        rows = asked_of(names, bank, score, "the bank")
        fusion = fusion if rows is None else fusion.with_bank(rows, None, True)
        asked = asked_of(names, queries, score, "queries")
        if asked is not None:
            fusion._check_names(asked, "queries")
        plans.append(Plan(fusion, kind, asked))
    return plans


def built_in_memory(
    plans: Sequence[Plan], source: Source, ids: np.ndarray, metadata: pa.Table | None, device: str
) -> list[Any]:
    """The tuples of each index in this process; the embeddings are held meanwhile."""
    blocks: list[Block] = []
    built: list[Any] = []
    for plan in plans:
        part = restricted(source, plan.modalities, blocks if built else kept(source.blocks, blocks))
        built.append(local_tuples(plan.fusion, part, ids, metadata, plan.kind.factory, device))
    return built


def build_folders(
    out: Path,
    plans: Sequence[Plan],
    source: Source,
    ids: np.ndarray,
    metadata: pa.Table | None,
    recall_target: float,
    device: str,
    fingerprint: str | None,
    progress: bool,
) -> None:
    """Write all indexes into the folder `out`, as `write_together` does, of embeddings that need not fit in memory.

    Each pass over the embeddings serves all indexes: there are as many as the one with the most of them needs. A build
    that was interrupted goes on where it stopped.

    Args:
        source: of embeddings that can be read again.
        ids: (n,) checked.
        metadata: n rows; None: that of the items.
        recall_target: of "auto", and of a plan's queries.
        device: on which they will be searched.
        fingerprint: of the model.
        progress: show a bar.
    """
    folders = folder_names(plan.modalities for plan in plans)
    refuse_foreign(out, folders)
    from mmcl.index.calibrate import settled

    items, work = source.shards, out / BUILDING
    work.mkdir(parents=True, exist_ok=True)
    with one_builder(work):
        shards, state, steps = shared(items, source.modalities), state_of(items), []
        for folder, plan in zip(folders, plans, strict=True):
            (work / folder).mkdir(exist_ok=True)
            vectors = fused_vectors(plan.fusion, shards.select(plan.modalities), progress)
            steps.append(vector_steps(work / folder, vectors, plan.kind.factory, device, state))
        built = run_steps(steps)
        metadata = source.metadata if metadata is None else metadata
        columns = write_items(work / ITEMS, ids, items if metadata is None and is_shards(items) else metadata)
        drafts: dict[str, Draft] = {}
        for folder, plan, (base, files) in zip(folders, plans, built, strict=True):
            copied(work / ITEMS, work / folder / ITEMS)
            write, facts = draft_of(plan.fusion, base, [work / folder / ITEMS, *files], ids, columns)
            about = {**about_index(plan.fusion, fingerprint), **facts}
            about |= settled(plan.fusion, ids, plan.kind, plan.queries, recall_target, device, base)
            drafts[folder] = write, about, lambda *_: None
        write_together(out, drafts, None, lambda _: None)
        shutil.rmtree(work)


def collection_names(collection: Any, plans: Sequence[Plan]) -> list[str]:
    """A collection for each index: the name, and the modalities behind it, what Milvus does not take in them as _.

    A number follows where two would be alike.
    """
    names: list[str] = []
    for plan in plans:
        name = "_".join([str(collection), *(re.sub(r"[^A-Za-z0-9_]", "_", each) for each in plan.modalities)])
        names.append(f"{name}_{len(names)}" if name in names else name)
    return names
