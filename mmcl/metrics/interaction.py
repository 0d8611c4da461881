"""How much dependence among categories is pairwise, and how much lies beyond pairs: estimates in nats, and exact tests.

Both tests are exact at any sparsity, as a chi-square is not: where there is nothing, the table of counts is one among
equals with the tables that leave all it needs as it is, and how it compares with draws of those is chance alone.

- No dependence at all: columns permuted independently keep every single margin.
- Nothing beyond pairs: a Markov chain among the tables that have the same 2-way margins, which is reversible for their
  distribution given these (a pairwise log-linear model's parameters cancel). From the observed table it runs to a hub,
  and from there as often to each draw: that makes table and draws exchangeable however slowly it mixes (Besag and
  Clifford 1989, parallel method).

Estimates take the mean of the draws for what chance alone gives: with S = sum n log n, S minus its mean over the draws,
over N, is the empirical KL to the projection without its bias (G minus the chain's mean, over 2 N).
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from scipy import special, stats

from mmcl.arrays import as_numpy, same_length
from mmcl.metrics.expressivity import fitted_to_pairs
from mmcl.synthetic.joints import Joint

MAX_CELLS = 50_000
"""Of a table of counts; beyond it nearly every tuple would be seen once, and nothing be learned from counts."""
ARRIVED = 1.5
"""Times the KL by chance alone, degrees of freedom over 2 N, that the tables of a chain which arrived may have to their
fit. Counts around 1 have up to 1.2 times as much, smaller ones less."""
STEPS = (1, 4)
"""By how many counts a move changes cells, at most; taken in turn."""


@dataclass(frozen=True)
class Estimate:
    """Nats, with an interval that ends at 0 or above."""

    nats: float
    low: float
    high: float
    p_value: float
    """Of there being nothing: at least 1 / (draws + 1)."""


@dataclass(frozen=True)
class Interaction:
    """What categories share: `total` = `pairwise` + `beyond` but for rounding and what is clipped at 0."""

    total: Estimate
    pairwise: Estimate
    beyond: Estimate
    rows: int
    sizes: dict[str, int]
    """Categories of each modality."""
    arrived: bool
    """Whether the chain forgot the data. Its moves need four tuples that were seen at the corners of a cube; where one
    category follows from the others, there may be none. It then stays near the data: `beyond` is far below what is
    there, `pairwise` as far above, and a p value of 1 says nothing."""
    drift: float
    """Nats by which `beyond` rose in the second half of the chain's run. Where it is more than a small part of it, the
    chain had not arrived: `beyond` is a lower bound then, and more sweeps come closer."""


def interaction_of_categories(
    values: Mapping[str, Any], draws: int = 199, sweeps: int = 600, level: float = 0.95, seed: int = 0
) -> Interaction:
    """Estimate, with intervals, what categories of two or more modalities share, in pairs and beyond.

    Args:
        values: {modality: (n,) integers, strings or other values}.
        draws: tables of either null distribution; p values are multiples of 1 / (draws + 1).
        sweeps: of the chain from the data to the hub, and from there to each draw.
        level: of the intervals. Their lower end is above 0 only where the exact test rejects at (1 - level) / 2.
    Returns: nats. Memory O(draws * cells).
    Raises: ValueError for one modality, no rows, missing values, or a table of more than 50,000 cells.
    """
    columns, sizes = as_codes(values)
    rows, names = len(columns[0]), list(sizes)
    generator = np.random.default_rng(seed)
    table = counted(columns, tuple(sizes.values()))
    shuffled = np.stack([counted([generator.permutation(c) for c in columns], table.shape) for _ in range(draws)])
    halfway, chained = tables_of_same_pairs(table, draws, sweeps, generator)
    seen, alone, pairs = n_log_n(table[None])[0], n_log_n(shuffled), n_log_n(chained)
    ratios = log_ratios(table, names)
    tail = (1 - level) / 2

    def estimate(high: Any, low: Any, drawn: Any, ratio: np.ndarray, p_value: float) -> Estimate:
        nats = float(np.mean(high - seen) - np.mean(low - seen)) / rows
        spread = math.hypot(float(np.std(ratio)) / math.sqrt(rows), float(np.std(drawn)) / rows)
        reach = float(stats.norm.isf(tail)) * spread
        return Estimate(nats, max(0.0, nats - reach) if p_value <= tail else 0.0, max(0.0, nats + reach), p_value)

    def p_of(drawn: np.ndarray, value: float) -> float:
        return float((1 + (drawn >= value - 1e-9 * abs(value)).sum()) / (len(drawn) + 1))

    dependent, higher = p_of(alone, seen), p_of(pairs, seen)
    beyond = estimate(seen, pairs, pairs, ratios["beyond"], higher)
    from_fit = float(ratios["beyond"].mean()) - beyond.nats  # of the chain's tables, KL to what their pairs tell
    return Interaction(
        total=estimate(seen, alone, alone, ratios["total"], dependent),
        pairwise=estimate(pairs, alone, alone, ratios["pairwise"], p_of(alone, float(np.mean(pairs)))),
        beyond=beyond,
        rows=rows,
        sizes=sizes,
        arrived=from_fit <= ARRIVED * freedom(sizes.values()) / (2 * rows) + 1e-3,
        drift=float(np.mean(n_log_n(halfway)) - np.mean(pairs)) / rows,
    )


def as_codes(values: Mapping[str, Any]) -> tuple[list[Int[np.ndarray, " n"]], dict[str, int]]:
    """Columns as 0, 1, ..., and how many categories each has."""
    if len(values) < 2:
        raise ValueError(f"dependence takes two modalities or more, got {list(values)}")
    arrays = {name: as_numpy(column) for name, column in values.items()}
    if not same_length(arrays):
        raise ValueError("there are no rows")
    codes, sizes = [], {}
    for name, column in arrays.items():
        missing = [row for row, value in enumerate(column.tolist()) if value is None or value != value]
        if column.ndim != 1 or missing:
            told = f"row {missing[0]} has no value" if missing else f"got shape {column.shape}"
            raise ValueError(f"{name}: expected one category a row, {told}")
        found, code = np.unique(column, return_inverse=True)
        codes.append(code)
        sizes[name] = len(found)
    if math.prod(sizes.values()) > MAX_CELLS:
        raise ValueError(
            f"{sizes} make a table of {math.prod(sizes.values()):,} cells, more than {MAX_CELLS:,}: merge rare "
            "categories, or diagnose embeddings of them"
        )
    return codes, sizes


def freedom(sizes: Iterable[int]) -> int:
    """Degrees of freedom beyond pairs: of all cells, less the total, the single margins and the 2-way margins."""
    free = [size - 1 for size in sizes]
    pairs = sum(one * other for one, other in combinations(free, 2))
    return math.prod(size + 1 for size in free) - 1 - sum(free) - pairs


def counted(columns: list[np.ndarray], shape: tuple[int, ...]) -> Int[np.ndarray, "..."]:
    """How often each tuple of codes occurs."""
    flat = np.ravel_multi_index(tuple(columns), shape)
    return np.bincount(flat, minlength=math.prod(shape)).astype(np.int32).reshape(shape)


def n_log_n(tables: Int[np.ndarray, "tables ..."]) -> Float[np.ndarray, " tables"]:
    """Sum of n log n over the cells of each table."""
    return special.xlogy(tables, tables).reshape(len(tables), -1).sum(axis=1)


def tables_of_same_pairs(
    table: Int[np.ndarray, "..."], draws: int, sweeps: int, generator: np.random.Generator
) -> tuple[Int[np.ndarray, "draws ..."], Int[np.ndarray, "draws ..."]]:
    """Tables with the observed one's 2-way margins, exchangeable with it where nothing lies beyond pairs.

    Returns: what the chains were halfway from the hub, and the draws.
    """
    hub = table[None].copy()
    if table.ndim < 3:
        return (np.repeat(hub, draws, axis=0),) * 2
    log_factorials = special.gammaln(np.arange(int(table.sum()) + 2) + 1.0)
    for number in range(sweeps):
        sweep(hub, generator, log_factorials, STEPS[number % len(STEPS)])
    tables = np.repeat(hub, draws, axis=0)
    halfway = tables
    for number in range(sweeps):
        halfway = tables.copy() if number == sweeps // 2 else halfway
        sweep(tables, generator, log_factorials, STEPS[number % len(STEPS)])
    return halfway, tables


def sweep(
    tables: Int[np.ndarray, "tables ..."],
    generator: np.random.Generator,
    log_factorials: Float[np.ndarray, " counts"],
    largest: int,
) -> None:
    """Move counts around in disjoint cubes of 2 x 2 x 2 cells, in place: no 2-way margin changes.

    Which three modalities and which cubes is drawn anew; every cube then takes or leaves a symmetric proposal with the
    Metropolis ratio of prod 1 / n!. So each sweep, and any run of them, is reversible.
    """
    view = np.moveaxis(tables, generator.choice(tables.ndim - 1, 3, replace=False) + 1, (-3, -2, -1))
    halves = [generator.permutation(size)[: size // 2 * 2].reshape(2, -1) for size in view.shape[-3:]]
    corners = [(a, b, c) for a in (0, 1) for b in (0, 1) for c in (0, 1)]
    cells = [(..., *np.ix_(*(half[bit] for half, bit in zip(halves, bits, strict=True)))) for bits in corners]
    now = [view[cell] for cell in cells]
    step = generator.integers(1, largest + 1, now[0].shape, dtype=np.int32)
    step *= 2 * generator.integers(0, 2, now[0].shape, dtype=np.int32) - 1
    proposed = [count + (step if sum(bits) % 2 else -step) for count, bits in zip(now, corners, strict=True)]
    possible = np.minimum.reduce(proposed) >= 0
    ratio = np.zeros(step.shape)
    for count, new in zip(now, proposed, strict=True):
        ratio += log_factorials[count] - log_factorials[np.clip(new, 0, None)]
    taken = possible & (np.log1p(-generator.random(step.shape)) < ratio)
    for cell, count, new in zip(cells, now, proposed, strict=True):
        view[cell] = np.where(taken, new, count)


def log_ratios(table: Int[np.ndarray, "..."], names: list[str]) -> dict[str, Float[np.ndarray, " rows"]]:
    """The influence of each row on the plug-in estimates: log p / prod p_i, and its parts up to and beyond pairs."""
    joint = Joint(torch.as_tensor(table / table.sum()), tuple(names))
    fitted, _ = fitted_to_pairs(torch.full_like(joint.table, 1 / table.size), joint, 1e-7, sweeps=200)
    seen = table > 0
    logs = [each.numpy()[seen] for each in (joint.table.log(), fitted.log(), joint.product_of_marginals().log())]
    parts = {"total": logs[0] - logs[2], "pairwise": logs[1] - logs[2], "beyond": logs[0] - logs[1]}
    return {name: np.repeat(ratio, table[seen]) for name, ratio in parts.items()}
