"""Which score do these data need? How much their modalities share in pairs, and how much beyond, in nats.

{modality: values}, a dataset or embedding shards -> categories or vectors -> counts or small encoders -> advice
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmcl.diagnose_inputs import Values, read_values
from mmcl.metrics.bounds import Bounds, interaction_bounds, settings_for
from mmcl.metrics.interaction import MAX_CELLS, Estimate, Interaction, interaction_of_categories
from mmcl.progress import counting
from mmcl.tables import lookup

REPEATED = 4
"""Rows a category, on the average, below which a column is no column of categories (names, sentences, keys)."""


@dataclass(frozen=True)
class Diagnosis:
    """What the modalities share, in nats with intervals, and which score that asks for."""

    method: str
    """"counts": estimates of it all, from the table of counts. "encoders": lower bounds, from small encoders."""
    total: Estimate
    pairwise: Estimate
    beyond: Estimate
    """What lies beyond pairs: no sum of pairs can say it."""
    rows: int
    kinds: dict[str, str]
    """{modality: what its values were taken for}."""
    score: str | None
    """"hadamard", "sum_of_pairs", or None where the modalities seem independent (see `mmcl list scores`)."""
    advice: str
    limits: str
    """What this cannot tell."""


def diagnose(
    data: Any,
    columns: Mapping[str, str] | None = None,
    method: str = "auto",
    rows: int | None = 20_000,
    level: float = 0.95,
    seed: int = 0,
    progress: bool = False,
) -> Diagnosis:
    """Estimate how much dependence is pairwise and how much is beyond pairs, and say which score to train.

    Args:
        data: {modality: values}, a `datasets.Dataset`, or a folder of embedding shards. Strings, booleans, integers and
            class labels are categories; floats, and rows of numbers, are vectors. Of a dataset also pictures (16 x 16
            grey pixels) and sounds (log-mel frames of their first second): embed them for more.
        columns: {modality: column} of a dataset; its other columns are left out. Default: all columns,
            where there are at most 5. Of shards, the names of their modalities on disk.
        method: "counts" (categories of up to 50,000 possible tuples), "encoders", or "auto": counts where possible, and
            where their chain arrived (it cannot leave data in which one category follows from the others).
        rows: of more, so many are drawn at random; None: all.
        level: of the intervals.
        seed: of all that is random.
        progress: show a bar.
    Returns: see `Diagnosis`.
    Raises: ValueError for values of no known kind, missing ones (with their row), or too few rows; KeyError for an
        unknown column.
    """
    chosen = lookup(METHODS, method, "method")
    values, kinds = read_values(data, columns, rows, seed)
    for name, value in values.items():
        refuse_hopeless(value, name)
    found: Any = None
    run = chosen or ("counts" if countable(values) else "encoders")
    if run == "counts":
        vectors = [name for name, value in values.items() if value.ndim > 1]
        if vectors:
            raise ValueError(f"method 'counts' is for categories, and {vectors[0]!r} has {kinds[vectors[0]]}")
        found = interaction_of_categories(values, level=level, seed=seed)
    if run == "encoders" or (chosen is None and not found.arrived):
        run, found = "encoders", by_encoders(values, level, seed, progress)
    score, advice = advised(found, len(values))
    return Diagnosis(
        method=run,
        total=found.total,
        pairwise=found.pairwise,
        beyond=found.beyond,
        rows=found.rows,
        kinds=kinds,
        score=score,
        advice=advice,
        limits=limits_of(found),
    )


METHODS = {"auto": None, "counts": "counts", "encoders": "encoders"}


def countable(values: Values) -> bool:
    """Whether all are categories, of few enough tuples for a table."""
    if any(value.ndim > 1 for value in values.values()):
        return False
    return math.prod(len(np.unique(value)) for value in values.values()) <= MAX_CELLS


def by_encoders(values: Values, level: float, seed: int, progress: bool) -> Bounds:
    """Bounds from small encoders of categories and standardised vectors."""
    inputs = {name: encodable(value) for name, value in values.items()}
    with counting("fitting", 3 * settings_for(inputs)["steps"], 0, progress) as advance:
        return interaction_bounds(inputs, level=level, seed=seed, report=lambda: advance(1))


def refuse_hopeless(value: np.ndarray, name: str) -> None:
    """ValueError for a modality of which these rows can tell nothing: one value, or categories that hardly repeat."""
    if len(value) and (value == value[0]).all():
        raise ValueError(f"{name}: one value in all {len(value):,} rows, on which nothing can depend; leave it out")
    if value.ndim == 1 and (distinct := len(np.unique(value))) * REPEATED > len(value):
        raise ValueError(
            f"{name}: {distinct:,} distinct values in {len(value):,} rows are too many for categories: take more rows, "
            "merge rare values, or embed them (`mmcl embed`)"
        )


def encodable(value: np.ndarray) -> Tensor:
    """Codes of categories, or vectors of mean 0 and variance 1 in each coordinate (constant ones stay 0)."""
    if value.ndim == 1:
        return torch.from_numpy(np.unique(value, return_inverse=True)[1].astype(np.int64))
    spread = value.std(axis=0)
    return torch.from_numpy((value - value.mean(axis=0)) / np.where(spread > 1e-6, spread, 1)).float()


def advised(found: Interaction | Bounds, modalities: int) -> tuple[str | None, str]:
    """The name of the score to train, and one sentence that says why."""
    bound = isinstance(found, Bounds)
    beyond, pairwise = told(found.beyond, bound), told(found.pairwise, bound)
    if found.beyond.low > 0:
        both = ", or the sum of both scores if the index may be twice as wide" if found.pairwise.low > 0 else ""
        return "hadamard", f"Train Hadamard (H-CLIP): {beyond} lie beyond pairs, which no sum of pairs can say{both}."
    if found.pairwise.low == 0:
        return None, f"Nothing to train on was found: in {found.rows:,} rows these modalities look independent."
    if modalities == 2:
        return "sum_of_pairs", f"Train CLIP (the sum of pairs): two modalities share {pairwise}, all of it in the pair."
    least = "" if bound else f" (at most {found.beyond.high:.3f} nats may be there)"
    return "sum_of_pairs", f"Train the sum of pairs: it can say {pairwise}, and beyond pairs nothing was found{least}."


def told(found: Estimate, bound: bool) -> str:
    """An estimate in words, with its interval."""
    return f"{max(0.0, found.nats):.3f} nats ({found.low:.3f} to {found.high:.3f}{', a lower bound' if bound else ''})"


def limits_of(found: Interaction | Bounds) -> str:
    """What the numbers leave open."""
    if isinstance(found, Bounds):
        return (
            "These are lower bounds: what small encoders cannot learn from these rows is not in them. They speak of "
            "these inputs alone, not of what larger encoders see in the raw data."
        )
    late = " The chain stayed near the data: far more may lie beyond pairs, and less in pairs (use encoders)."
    late = "" if found.arrived else late
    return (
        "It speaks of the categories alone, not of what lies behind them, and cannot tell interaction from a hidden "
        f"cause that all modalities have in common.{late}"
    )
