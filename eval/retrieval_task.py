"""What `retrieval.py` asks for: distinct queries and items in every direction, and which are right."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import torch
from protocols import DataTable, ProtocolRecipe, Rows, column_values
from pydantic import Field
from scipy.sparse import csr_array

from mmcl.arrays import refuse_unknown
from mmcl.data import EQUAL, group_ids


class RetrievalRecipe(ProtocolRecipe):
    """What to retrieve."""

    data: DataTable
    """The rows that are stored, and asked for."""
    groups: dict[str, str] = Field(default_factory=dict)
    """{modality: "equal" or a column}: values that are one answer; default: equal raw values."""
    factories: list[str] = Field(default=["Flat"], min_length=1)
    """Types of index."""
    absent: bool = True
    """Also directions in which some modalities stand on neither side."""


@dataclass(frozen=True)
class Direction:
    """Distinct queries and items between two sets of modalities, and which item is right for which query.

    query_rows, item_rows: a row of the data that has each one's values.
    right: (queries, answers); answer_of_item: (items,) which answer each item is.
    """

    query: tuple[str, ...]
    items: tuple[str, ...]
    query_rows: np.ndarray
    item_rows: np.ndarray
    right: csr_array
    answer_of_item: np.ndarray

    def relevant(self, start: int, end: int) -> np.ndarray:
        """(end - start, items) bool: the right items of some queries."""
        return self.right[start:end].toarray().astype(bool)[:, self.answer_of_item]


def directions(modalities: Sequence[str], absent: bool) -> Iterator[tuple[tuple[str, ...], tuple[str, ...]]]:
    """(query, items) for all disjoint subsets that are not empty; those that name all modalities first."""
    sides = list(product("qi-", repeat=len(modalities)))
    for places in sorted(sides, key=lambda each: each.count("-")):
        parts = [tuple(n for n, p in zip(modalities, places, strict=True) if p == side) for side in "qi"]
        if all(parts) and (absent or "-" not in places):
            yield parts[0], parts[1]


def codes(columns: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """(a row of each distinct combination of values, which combination each row has)."""
    _, first, inverse = np.unique(np.stack(columns, axis=1), axis=0, return_index=True, return_inverse=True)
    return first, inverse.reshape(-1)


def direction(rows: Rows, groups: Mapping[str, np.ndarray], query: Sequence[str], items: Sequence[str]) -> Direction:
    """Queries, items and right answers, from the rows' values and groups."""
    item_rows, _ = codes([rows.ids[name] for name in items])
    _, answers = codes([groups[name] for name in items])
    if len(query) + len(items) == len(rows.ids):
        query_rows, _ = codes([rows.ids[name] for name in query])
        _, asked = codes([groups[name] for name in query])
        seen = csr_array((np.ones(len(asked), np.int32), (asked, answers)))
        right = seen[asked[query_rows]]
    else:
        query_rows, _ = codes([*(rows.ids[name] for name in query), answers])
        places = (np.arange(len(query_rows)), answers[query_rows])
        right = csr_array((np.ones(len(query_rows), np.int32), places), shape=(len(query_rows), answers.max() + 1))
    return Direction(tuple(query), tuple(items), query_rows, item_rows, right, answers[item_rows])


def taken(rows: Rows, names: Sequence[str], at: np.ndarray) -> dict[str, torch.Tensor]:
    """{modality: vectors of these rows}."""
    return {name: rows.vectors[name][torch.from_numpy(rows.ids[name][at])] for name in names}


def group_codes(dataset: Any, rows: Rows, groups: Mapping[str, str]) -> dict[str, np.ndarray]:
    """{modality: (n,) which answer each row's value is}."""
    refuse_unknown(groups, rows.ids, "groups")
    found = dict(rows.ids)
    for name, column in groups.items():
        if column != EQUAL:
            values = group_ids(column_values(dataset, column, f"groups of {name!r}")).numpy()
            found[name] = np.unique(values, return_inverse=True)[1]
    return found
