"""How much dependence is pairwise, and how much lies beyond pairs, in data of any kind: lower bounds on held-out rows.

For every function f of a tuple, E f - log E' exp(f) is at most the total correlation, where E' runs over the product
of the marginals (Donsker and Varadhan 1975). Its maximum over sums of functions of two modalities each is what is
pairwise; what an f of all modalities at once adds lies beyond. Here f is a score over small encoders:

1. a sum of pairs is fitted, and frozen;
2. a Hadamard score with encoders of its own is added to it, from zero;
3. in another copy a second sum of pairs is added instead, the placebo: it mends what the first one missed.

What lies beyond pairs is bounded by how much more 2 gains than 3 on rows that had no part in either (cross-fitting:
each row is held out once). Errors come from the influence of each row on the bound.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float64, Int
from scipy import stats
from torch import Tensor

from mmcl.arrays import same_length
from mmcl.metrics.additions import Fit, Inputs, Objective, add
from mmcl.metrics.interaction import MAX_CELLS, Estimate
from mmcl.metrics.objectives import Batches, WholeTable, shuffles
from mmcl.scores import Hadamard, Score, SumOfPairs

TEMPERATURE = 0.3
COLUMNS, REPEATS = 2000, 2
"""Tuples of the product of marginals that each held-out row is scored with, and how often they are drawn."""
TABLE, BATCHES = {"folds": 10, "dim": 64, "steps": 300}, {"folds": 5, "dim": 32, "steps": 400}
"""Settings where whole tables are looked at, which costs little, and where batches are."""
LEAST_ROWS, LEAST_FOLDS = 200, 3
STOPPING = 12
"""Of the rows that are not held out, every so manieth decides on stopping."""


@dataclass(frozen=True)
class Bounds:
    """What small encoders found in held-out rows: lower bounds, in nats. `total` = `pairwise` + `beyond`."""

    total: Estimate
    pairwise: Estimate
    beyond: Estimate
    rows: int


def interaction_bounds(
    inputs: Inputs,
    folds: int | None = None,
    dim: int | None = None,
    steps: int | None = None,
    batch_size: int = 256,
    level: float = 0.95,
    seed: int = 0,
    report: Callable[[], None] = lambda: None,
) -> Bounds:
    """Lower bounds, with intervals, of what two or more modalities share, in pairs and beyond.

    Args:
        inputs: {modality: (n,) int64 categories 0, 1, ... or (n, k) float32 vectors, best standardised}.
        folds: at least 3. In each, one part is measured; of the others a twelfth says when to stop, the rest is fitted.
        dim: of the embeddings.
        steps: at most so many a fit; there are three, each of all folds at once.
            Defaults of these three: see `settings_for`.
        level: of the intervals.
        report: called after each step.
    Returns: nats. Memory O(folds * (batch_size^2 + n * dim)).
    Raises: ValueError for one modality, fewer than 200 rows or 3 folds.
    """
    names, rows = tuple(inputs), same_length(inputs)
    usual = settings_for(inputs)
    folds, dim, steps = folds or usual["folds"], dim or usual["dim"], steps or usual["steps"]
    if len(names) < 2:
        raise ValueError(f"dependence takes two modalities or more, got {list(names)}")
    if rows < LEAST_ROWS or folds < LEAST_FOLDS:
        raise ValueError(f"it takes {LEAST_ROWS} rows and {LEAST_FOLDS} folds to hold some out, got {rows} and {folds}")
    generator = torch.Generator().manual_seed(seed)
    parts = list(torch.randperm(rows, generator=generator).tensor_split(folds))
    chosen = fitted_and_stopping(parts)

    def added(kind: Callable[..., Score], base: Fit | None) -> Fit:
        objective: Objective
        if tabled(inputs):
            objective = WholeTable(inputs, base, *chosen)
        else:
            objective = Batches(inputs, base, *chosen, batch_size, generator)
        return add(lambda: kind(names, dim, TEMPERATURE), base, objective, folds, steps, report)

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        base = added(SumOfPairs, None)
        placebo = added(SumOfPairs, base)
        product = placebo if len(names) == 2 else added(Hadamard, base)
    pairs, everything = (measured(fit, base, inputs, parts, seed) for fit in (placebo, product))
    return Bounds(
        total=estimate(everything, parts, level),
        pairwise=estimate(pairs, parts, level),
        beyond=estimate(everything - pairs, parts, level),
        rows=rows,
    )


def fitted_and_stopping(parts: list[Tensor]) -> tuple[Int[Tensor, "k a"], Int[Tensor, "k b"]]:
    """For each part held out: rows of the others to fit to, and to decide on stopping; as many for each."""
    rest = [torch.cat([part for other, part in enumerate(parts) if other != held]) for held in range(len(parts))]
    least = min(map(len, rest))
    together = torch.stack([rows[torch.linspace(0, len(rows) - 1, least).long()] for rows in rest])
    stopping = torch.arange(least) % STOPPING == 0
    return together[:, ~stopping], together[:, stopping]


def settings_for(inputs: Inputs) -> dict[str, int]:
    """Folds, dim and steps of `interaction_bounds` for data of this kind."""
    return TABLE if tabled(inputs) else BATCHES


def tabled(inputs: Inputs) -> bool:
    """Whether all are categories, of few enough tuples to look at each of them."""
    if any(value.ndim > 1 for value in inputs.values()):
        return False
    return math.prod(int(value.max()) + 1 for value in inputs.values()) <= MAX_CELLS


@torch.no_grad()
def measured(fit: Fit, base: Fit | None, inputs: Inputs, parts: list[Tensor], seed: int) -> Float64[Tensor, " n"]:
    """Each row's own share of its fold's bound: the bound of the fold it was held out of, plus its influence on it.

    Z = E' exp(f) is a mean over m sets of tuples, one a modality, in which all values of that modality meet the same
    tuples of the others. The influence of a row x is f(x) - mean f - sum_i (E'[exp(f) | x_i] / Z - 1).
    """
    shares = torch.empty(same_length(inputs), dtype=torch.float64)
    for fold, rows in enumerate(parts):
        module = fit.on_fold(fold)
        held = {name: value[rows] for name, value in inputs.items()}
        encoded = base.on_fold(fold).encode(held) if base else {}
        generator = torch.Generator().manual_seed(seed + fold)
        means: dict[str, list[Tensor]] = {one: [] for one in inputs}
        for _ in range(REPEATS):
            values, products = module(held, encoded, shuffles(inputs, len(rows), generator, COLUMNS))
            for one, each in products.items():
                means[one].append(each.double().logsumexp(1) - math.log(each.shape[1]))
        logs = torch.stack([torch.stack(each).logsumexp(0) - math.log(REPEATS) for each in means.values()])
        log_z = logs.flatten().logsumexp(0) - math.log(logs.numel())
        of_others = ((logs - log_z).exp() - 1).sum(0)
        shares[rows] = values.double() - log_z - of_others
    return shares


def estimate(shares: Float64[Tensor, " n"], parts: list[Tensor], level: float) -> Estimate:
    """The mean of all rows' shares; its error by the rows, or by the folds where these tell of a larger one."""
    nats = float(shares.mean())
    folds = torch.stack([shares[rows].mean() for rows in parts])
    error = max(float(shares.std()) / math.sqrt(len(shares)), float(folds.std()) / math.sqrt(len(folds)))
    reach = float(stats.norm.isf((1 - level) / 2)) * error
    p_value = float(stats.norm.sf(nats / error)) if error > 0 else float(nats <= 0)
    return Estimate(nats, max(0.0, nats - reach), max(0.0, nats + reach), p_value)
