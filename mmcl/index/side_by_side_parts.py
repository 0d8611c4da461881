"""Which indexes stand side by side, what each is built from, and which one answers."""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any

from mmcl.arrays import refuse_unknown
from mmcl.index.building import AUTO, LOCAL, Type, check_type, chosen_type
from mmcl.index.choose import parse_bytes
from mmcl.index.fusion import embedded
from mmcl.index.sources import Block, Source, dataset_columns, is_dataset, no_column, open_source
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


def open_whole(
    items: Any,
    score: Score,
    model: Any,
    stored: Sequence[Names] | None,
    encoded: Any,
    columns: Mapping[str, str] | None,
) -> Source:
    """The source of all modalities that any index stores.

    Raises: KeyError where a dataset lacks the column of one that nobody left out, with all columns that it has.
    """
    if stored is None and is_dataset(items, "Dataset"):
        there = dataset_columns(items, score, None, columns)
        missing = next((name for name in score.modalities if name not in there), None)
        if missing is not None:
            some = every_split(tuple(there), score)
            out = f", or leave the modality out on purpose, as with stored={some}" if some else ""
            raise KeyError(no_column(items, missing, missing) + out)
    union = None if stored is None else list(dict.fromkeys(name for names in stored for name in names))
    return open_source(items, score, model, union, encoded, columns)


def factory_of_each(factory: Any, stored: Sequence[Names]) -> dict[Names, Any]:
    """{stored modalities: factory}, from one for all or a dict of some; KeyError for a key that is no index."""
    if not isinstance(factory, Mapping):
        return dict.fromkeys(stored, factory)
    chosen: dict[Names, Any] = dict.fromkeys(stored, AUTO)
    for key, value in factory.items():
        names = {key} if isinstance(key, str) or not isinstance(key, Iterable) else set(key)
        same = [each for each in stored if set(each) == names]
        if not same:
            raise KeyError(f"factory names an index of {key!r}; there are {list(stored)}")
        chosen[same[0]] = value
    return chosen


def kind_of_each(
    factories: Mapping[Names, Any],
    count: int,
    width: int,
    memory_budget: Any,
    recall_target: float,
    device: str,
    where: str,
    asked: bool = False,
) -> dict[Names, Type]:
    """{stored modalities: type of index}, each checked before anything is encoded.

    Args:
        memory_budget: of those together that "auto" chooses, an equal part each.
        asked: whether queries are to set the effort.
    Raises: ValueError naming the index, and what is wrong with its factory or its part of the budget.
    """
    autos = sum(factory == AUTO for factory in factories.values())
    budget, told = None, ""
    if memory_budget is not None:
        if not autos or where != LOCAL:
            raise ValueError("memory_budget goes with factory='auto' in this process, which none of the indexes has")
        budget = parse_bytes(memory_budget) // autos
        told = f" (memory_budget={memory_budget!r} is for {autos} indexes together, an equal part each)"
    kinds = {}
    for names, factory in factories.items():
        part = budget if factory == AUTO else None
        try:
            kinds[names] = chosen_type(factory, count, width, part, recall_target, device, where)
            if where == LOCAL:
                check_type(kinds[names].factory, width, count, asked)
        except ValueError as error:
            raise ValueError(f"the index of {names}: {error}{told if part else ''}") from None
    return kinds


def encoded_once(rows: Any, score: Score, model: Any, encoded: Any, what: str) -> dict[str, Any] | None:
    """{modality: (b, d)} of a bank or of queries, raw values encoded; None where there are none."""
    if rows is None:
        return None
    if not isinstance(rows, Mapping):
        raise ValueError(f"{what} must be {{modality: rows}}, got {type(rows).__name__}")
    refuse_unknown(rows, score.modalities, what)
    return dict(embedded(rows, score, model, encoded)) if rows else {}


def asked_of(stored: Names, rows: Mapping[str, Any] | None, score: Score, what: str) -> dict[str, Any] | None:
    """Those rows that are of modalities which an index does not store; ValueError where there are none."""
    if rows is None:
        return None
    asked = {name: part for name, part in rows.items() if name not in stored}
    if not asked:
        some = [name for name in score.modalities if name not in stored]
        raise ValueError(f"{what} has {list(rows)}; the index of {stored} is searched by some of {some}")
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
