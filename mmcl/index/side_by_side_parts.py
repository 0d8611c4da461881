"""Which indexes stand side by side, what each is built from, and changes of all or of none."""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import combinations
from typing import Any

import numpy as np

from mmcl.arrays import refuse_unknown
from mmcl.index.fusion import embedded
from mmcl.index.growing import Growing
from mmcl.index.items import Items
from mmcl.index.sources import Block, Source
from mmcl.scores import Score

Names = tuple[str, ...]


def check_stored(stored: Any, score: Score) -> list[Names]:
    """The modalities of each index, in the score's order.

    Raises: KeyError for an unknown modality; ValueError for anything but distinct tuples of some, not all, modalities.
    """
    example = f"stored lists the modalities of each index, such as [{score.modalities[:1]}]"
    if isinstance(stored, str | Mapping) or not isinstance(stored, Iterable):
        raise ValueError(f"{example}; got {stored!r}")
    found: list[Names] = []
    for names in stored:
        if isinstance(names, str) or not isinstance(names, Iterable):
            raise ValueError(f"{example}; got {names!r} in it, which is no tuple of names")
        given = list(names)
        refuse_unknown(given, score.modalities, "stored")
        ordered = tuple(name for name in score.modalities if name in given)
        if not 0 < len(ordered) < len(score.modalities) or len(ordered) < len(given):
            why = "an index stores some of the modalities, each once, and leaves some to search by"
            raise ValueError(f"stored has {tuple(given)}: {why}")
        if ordered in found:
            raise ValueError(f"stored has {ordered} twice")
        found.append(ordered)
    if not found:
        raise ValueError(f"{example}; got none")
    return found


def every_split(present: Names, score: Score) -> list[Names]:
    """Every choice of the present modalities that leaves some of the score's to search by, the largest first."""
    sizes = range(len(present), 0, -1)
    return [names for size in sizes for names in combinations(present, size) if len(names) < len(score.modalities)]


def factory_of_each(factory: Any, stored: Sequence[Names]) -> dict[Names, Any]:
    """{stored modalities: factory}, from one for all or a dict of some; KeyError for a key that is no index."""
    if not isinstance(factory, Mapping):
        return dict.fromkeys(stored, factory)
    chosen: dict[Names, Any] = dict.fromkeys(stored, "auto")
    for key, value in factory.items():
        names = {key} if isinstance(key, str) else set(key)
        same = [each for each in stored if set(each) == names]
        if not same:
            raise KeyError(f"factory names an index of {key!r}; there are {list(stored)}")
        chosen[same[0]] = value
    return chosen


def encoded_bank(bank: Any, score: Score, model: Any, encoded: Any) -> dict[str, Any] | None:
    """{modality: (b, d)} of a bank, its raw values encoded; None where there is none."""
    if bank is None:
        return None
    if not isinstance(bank, Mapping):
        raise ValueError(f"bank must be {{modality: rows}}, got {type(bank).__name__}")
    refuse_unknown(bank, score.modalities, "the bank")
    return dict(embedded(bank, score, model, encoded)) if bank else {}


def bank_for(stored: Names, bank: Mapping[str, Any] | None, score: Score) -> dict[str, Any] | None:
    """Those rows of the bank that are of modalities which an index does not store; ValueError where there are none."""
    if bank is None:
        return None
    asked = {name: rows for name, rows in bank.items() if name not in stored}
    if not asked:
        some = [name for name in score.modalities if name not in stored]
        raise ValueError(f"the bank has {list(bank)}; the index of {stored} is searched by some of {some}")
    return asked


def kept(blocks: Iterable[Block], memory: list[Block]) -> Iterator[Block]:
    """The blocks, each put into `memory` as it passes."""
    for block in blocks:
        memory.append(block)
        yield block


def restricted(source: Source, modalities: Names, blocks: Iterable[Block]) -> Source:
    """The source with some of its modalities, made of these blocks of it."""
    some = (({name: rows[name] for name in modalities}, metadata) for rows, metadata in blocks)
    return dataclasses.replace(source, modalities=modalities, blocks=some, shards=None)


def answers(index: Any, queried: Sequence[str]) -> bool:
    """Whether a `TupleIndex` takes a query of these modalities; one with a bank takes just the bank's."""
    if not queried or not set(queried) <= set(index.query_modalities):
        return False
    return index.kind == "score" or set(queried) == set(index.query_modalities)


def choices(indexes: Iterable[Any]) -> str:
    """What there is to ask, for an error."""
    some = {"score": "some of ", "pmi": ""}
    each = [f"{list(index.modalities)} by {some[index.kind]}{list(index.query_modalities)}" for index in indexes]
    return "there are indexes of " + "; ".join(each)


@contextmanager
def held(indexes: Sequence[Any]) -> Iterator[list[Any]]:
    """The `LocalTuples` of the indexes, which nobody else changes meanwhile; searches go on."""
    tuples = [index._tuples for index in indexes]
    with ExitStack() as locks:
        for each in tuples:
            locks.enter_context(each._writing)
        yield tuples


@contextmanager
def all_or_nothing(indexes: Sequence[Any]) -> Iterator[list[Any]]:
    """Their `LocalTuples`, to be changed: where an error comes up meanwhile, all are what they were before."""
    with held(indexes) as tuples:
        if len({(len(each), each.next_id) for each in tuples}) > 1:
            refuse_differing(indexes)
        before = [(each.snapshot, each.next_id) for each in tuples]
        try:
            yield tuples
        except BaseException:
            for each, (snapshot, next_id) in zip(tuples, before, strict=True):
                if each.snapshot is not snapshot:
                    each.snapshot, each.next_id = apart(snapshot), next_id
            raise


def apart(snapshot: Any) -> Any:
    """The same version with arrays that grow elsewhere: a search may still read what was appended behind the old."""
    items = Items(snapshot.items.ids, snapshot.items.metadata)
    return dataclasses.replace(snapshot, added=Growing(snapshot.added.rows), items=items)


def refuse_differing(indexes: Sequence[Any]) -> None:
    """ValueError where the indexes do not have the same items in the same order, or would number new ones apart."""
    first, *others = (index._tuples for index in indexes)
    ids = first.ids()
    for index, tuples in zip(indexes[1:], others, strict=True):
        if not np.array_equal(ids, tuples.ids()) or tuples.next_id != first.next_id:
            counts = f"{len(first)} of {list(indexes[0].modalities)}, {len(tuples)} of {list(index.modalities)}"
            raise ValueError(f"the indexes differ in their items ({counts}): one was changed without the others")
