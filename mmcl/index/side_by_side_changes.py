"""Changes of all indexes that stand side by side, or of none."""

import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np

from mmcl.index.growing import Growing
from mmcl.index.items import Items
from mmcl.index.local import LocalTuples


@contextmanager
def held(indexes: Sequence[Any]) -> Iterator[list[Any]]:
    """The tuples of the indexes, which nobody else in this process changes meanwhile; searches go on."""
    tuples = [index._tuples for index in indexes]
    with ExitStack() as locks:
        for each in tuples:
            locks.enter_context(each._writing if isinstance(each, LocalTuples) else each._connection.writing)
        yield tuples


@contextmanager
def all_or_nothing(indexes: Sequence[Any], keys: Sequence[Any]) -> Iterator[list[Any]]:
    """Their tuples, to be changed: where an error comes up meanwhile, all are what they were before.

    In Milvus the items are written back, for which it has to answer still; columns that they brought along stay.

    Args:
        keys: ids of the items that are changed.
    """
    with held(indexes) as tuples:
        if len({(len(each), numbering(each)) for each in tuples}) > 1:
            refuse_differing(indexes)
        undo = [(undo_locally if isinstance(each, LocalTuples) else undo_in_milvus)(each, keys) for each in tuples]
        try:
            yield tuples
        except BaseException as error:
            for index, back in zip(indexes, undo, strict=True):
                try:
                    back()
                except (OSError, RuntimeError) as failed:
                    error.add_note(f"the index of {index.modalities} could not be taken back, see verify(): {failed}")
            raise


def undo_locally(tuples: LocalTuples, keys: Sequence[Any]) -> Callable[[], None]:
    """What brings them back to what they are now."""
    snapshot, next_id = tuples.snapshot, tuples.next_id

    def undo() -> None:
        if tuples.snapshot is not snapshot:
            tuples.snapshot, tuples.next_id = apart(snapshot), next_id

    return undo


def undo_in_milvus(tuples: Any, keys: Sequence[Any]) -> Callable[[], None]:
    """What brings the items of these ids back to what they are now."""
    from mmcl.index.milvus_collection import METADATA, VECTOR

    rows = tuples._rows
    there = rows.there(list(keys), VECTOR, METADATA)

    def undo() -> None:
        rows.delete([key for key in rows.there(list(keys)) if key not in there])
        vectors = np.array([row[VECTOR] for row in there.values()], np.float32).reshape(-1, tuples.width)
        rows.write(list(there), vectors, [json.dumps(row[METADATA], ensure_ascii=False) for row in there.values()])

    return undo


def numbering(tuples: Any) -> int:
    """The least integer that no item ever had; 0 in Milvus, which finds it anew for each change."""
    return getattr(tuples, "next_id", 0)


def next_ids(tuples: Any, count: int) -> np.ndarray:
    """(count,) ids for items that come without."""
    found: np.ndarray
    found = tuples._next_ids(*([tuples.snapshot] if isinstance(tuples, LocalTuples) else []), count)
    return found


def apart(snapshot: Any) -> Any:
    """The same version with arrays that grow elsewhere: a search may still read what was appended behind the old."""
    items = Items(snapshot.items.ids, snapshot.items.metadata)
    return dataclasses.replace(snapshot, added=Growing(snapshot.added.rows), items=items)


def refuse_differing(indexes: Sequence[Any]) -> None:
    """ValueError where the indexes do not have the same items in the same order, or would number new ones apart."""
    first, *others = (index._tuples for index in indexes)
    ids = first.ids()
    for index, tuples in zip(indexes[1:], others, strict=True):
        if not np.array_equal(ids, tuples.ids()) or numbering(tuples) != numbering(first):
            counts = f"{len(first)} of {list(indexes[0].modalities)}, {len(tuples)} of {list(index.modalities)}"
            raise ValueError(f"the indexes differ in their items ({counts}): one was changed without the others")
