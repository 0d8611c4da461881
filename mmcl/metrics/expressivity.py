"""What a score expresses of a known joint: exact divergences over the whole table, in nats.

A score is a tilting function: the model that it makes of the true marginals is q = prod_i p(x_i) exp(score) / Z. All of
it is computed here in the log domain, on tables of one axis a modality (see `mmcl.synthetic.joints`). Continuous
joints come as grids whose nodes carry the weights of a quadrature: the same functions serve them.

The hierarchy: no conditional of the model, of one modality given all others or given one other, is farther from the
true one, averaged over its condition, than the model as a whole is from the joint. A score that gets the joint right
gets every conditional right; one that gets every pairwise conditional right may miss the joint by all that three
modalities share at once.

All this is about infinitely many data, and about what a score can express, not about what training finds.
"""

import math
from collections.abc import Iterable, Mapping
from itertools import combinations
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float64
from torch import Tensor

from mmcl.arrays import as_rows, refuse_unknown, same_precision
from mmcl.scores import Score
from mmcl.synthetic.joints import Joint

Table = Float64[Tensor, "..."]
EARLY, SWEEPS = 1000, 100_000
"""Sweeps of proportional fitting before it is asked why it takes so long, and before it is given up."""


def score_table(score: Score, embeddings: Mapping[str, Any]) -> Float64[Tensor, "..."]:
    """The score of every tuple of values.

    Args:
        score: over m modalities.
        embeddings: {modality: (n_i, d)}, row v the embedding of value v.
    Returns: (n_1, ..., n_m) in the order of the score's modalities, differentiable; one query vector a value of the
        first modality, one item vector a tuple of the others: O(n_1 ... n_m) memory.
    Raises: KeyError for an unknown or missing modality; ValueError for another width.
    """
    refuse_unknown(embeddings, score.modalities)
    missing = [name for name in score.modalities if name not in embeddings]
    if missing:
        raise KeyError(f"embeddings of {missing[0]!r} are missing; a table needs all of {list(score.modalities)}")
    rows = same_precision({name: as_rows(embeddings[name], name, score.dim) for name in score.modalities})
    first, *rest = score.modalities
    counts = [len(rows[name]) for name in rest]
    places = torch.cartesian_prod(*[torch.arange(count) for count in counts]).reshape(-1, len(rest))
    items = score.item_vectors({name: rows[name][places[:, at]] for at, name in enumerate(rest)})
    table = score.query_vectors({first: rows[first]}) @ items.T
    return table.reshape(len(rows[first]), *counts).double()


def log_model(joint: Joint, scores: Any) -> Table:
    """log q of every tuple: the true marginals' product, tilted by exp(score) and normalised. -inf where q is 0.

    Args:
        scores: a number for every tuple, in the shape of the table. Constants do not matter.
    Raises: ValueError for another shape, NaN, or +inf.
    """
    scores = checked_scores(joint, scores)
    logits = joint.product_of_marginals().log() + scores
    return logits - logits.flatten().logsumexp(0)


def joint_kl(joint: Joint, scores: Any) -> Float64[Tensor, ""]:
    """KL(p || q) in nats, differentiable in the scores: what a score over infinitely many data loses of the joint.

    Source: Donsker and Varadhan 1975: total correlation - (E_p score - log E_{prod of marginals} exp(score)).
    """
    return divergence(joint.table, log_model(joint, scores))


def conditional_kl(
    joint: Joint, scores: Any, guessed: str | Iterable[str], given: str | Iterable[str] | None = None
) -> Float64[Tensor, ""]:
    """KL(p(x_guessed | x_given) || q(x_guessed | x_given)), averaged over the true p(x_given), in nats.

    Args:
        guessed: one modality or several.
        given: one or several others; None: all others, the full conditional.
    Raises: KeyError for an unknown modality; ValueError where one is on both sides, or a side is empty.
    """
    guessed = named(joint, guessed)
    rest = tuple(name for name in joint.modalities if name not in guessed)
    given = rest if given is None else named(joint, given)
    if not guessed or not given or set(guessed) & set(given):
        raise ValueError(f"guess some modalities from others, got {list(guessed)} from {list(given)}")
    model = log_model(joint, scores)
    both, condition = (*guessed, *given), given
    return marginal_kl(joint, model, both) - marginal_kl(joint, model, condition)


def full_conditional_kls(joint: Joint, scores: Any) -> dict[str, float]:
    """{modality: `conditional_kl` given all others}: what `contrastive_loss` with guess="each" is after."""
    return {name: float(conditional_kl(joint, scores, name)) for name in joint.modalities}


def pairwise_conditional_kls(joint: Joint, scores: Any) -> dict[tuple[str, str], float]:
    """{(guessed, given): `conditional_kl` of one modality given one other}."""
    pairs = ((one, other) for one in joint.modalities for other in joint.modalities if one != other)
    return {pair: float(conditional_kl(joint, scores, *pair)) for pair in pairs}


def pairwise_floor(joint: Joint, tolerance: float = 1e-10) -> float:
    """The least joint KL, in nats, of any sum of scores of two modalities each: KL to `pairwise_projection`.

    What lies beyond pairs: 0 where every sum of pairs can say it all, as for two modalities.
    """
    return float(divergence(joint.table, pairwise_projection(joint, tolerance).table.log()))


def pairwise_projection(joint: Joint, tolerance: float = 1e-10, sweeps: int = SWEEPS) -> Joint:
    """The distribution of largest entropy that has every 2-way margin of the joint, by iterative proportional fitting.

    Where tuples that never happen leave no distribution with those margins that has them all, fitting gets nowhere; a
    linear program then finds the tuples that can have a probability at all.

    Args:
        tolerance: how far any probability in any of those margins may be off.
        sweeps: through all pairs, at most.
    Raises: ArithmeticError where the margins are not met by then.
    Sources: Deming and Stephan 1940; that it is the best in the pairwise log-linear family, Csiszar 1975.
    """
    fitted = torch.full_like(joint.table, 1 / joint.table.numel())
    fitted, off = fitted_to_pairs(fitted, joint, tolerance, min(sweeps, EARLY))
    if off > tolerance and sweeps > EARLY:
        possible = possible_tuples(joint)
        fitted = possible.double() / possible.sum() if not possible.all() else fitted
        fitted, off = fitted_to_pairs(fitted, joint, tolerance, sweeps - EARLY)
    if off > tolerance:
        raise ArithmeticError(
            f"after {sweeps} sweeps a 2-way margin is still off by {off:.1e}, more than {tolerance:g}"
        )
    return Joint(fitted / fitted.sum(), joint.modalities)


def fitted_to_pairs(fitted: Table, joint: Joint, tolerance: float, sweeps: int) -> tuple[Table, float]:
    """`fitted` scaled to one 2-way margin of the joint after the other, and how far the worst of them was off."""
    rests, off = rests_of_pairs(joint), math.inf
    margins = [margin(joint.table, rest) for rest in rests]
    for _ in range(sweeps):
        off = 0.0
        for rest, wanted in zip(rests, margins, strict=True):
            have = margin(fitted, rest)
            off = max(off, float((have - wanted).abs().max()))
            fitted = fitted * torch.where(have > 0, wanted / have, 0.0)
        if off <= tolerance:
            break
    return fitted, off


def possible_tuples(joint: Joint) -> Bool[Tensor, "..."]:
    """The tuples that have a probability in some distribution with the joint's 2-way margins.

    One linear program: as many as can be are raised to 1 in a multiple of such a distribution.
    """
    from scipy import optimize, sparse

    count, rows, wanted = joint.table.numel(), [], []
    numbers = torch.arange(count).reshape(joint.table.shape)
    for rest in rests_of_pairs(joint):
        margins = margin(joint.table, rest)
        labels = torch.arange(margins.numel()).reshape(margins.shape).expand_as(joint.table).flatten()
        ones = np.ones(count)
        rows.append(sparse.csr_matrix((ones, (labels.numpy(), numbers.flatten().numpy()))))
        wanted.append(margins.flatten().numpy())
    constraints = sparse.vstack(rows)
    nothing = sparse.csr_matrix(constraints.shape)
    equal = sparse.hstack([constraints, nothing, -sparse.csr_matrix(np.concatenate(wanted)[:, None])])
    raised = sparse.hstack([-sparse.eye(count), sparse.eye(count), sparse.csr_matrix((count, 1))])
    found = optimize.linprog(
        np.concatenate([np.zeros(count), -np.ones(count), [0.0]]),
        A_ub=raised,
        b_ub=np.zeros(count),
        A_eq=equal,
        b_eq=np.zeros(constraints.shape[0]),
        bounds=[(0, None)] * count + [(0, 1)] * count + [(1, None)],
    )
    if found.status != 0:
        raise ArithmeticError(f"which tuples can have a probability was not found: {found.message}")
    return torch.as_tensor(found.x[count : 2 * count] > 0.5).reshape(joint.table.shape)


def rests_of_pairs(joint: Joint) -> list[list[int]]:
    """For each pair of modalities the axes of all others."""
    m = len(joint.modalities)
    return [[axis for axis in range(m) if axis not in pair] for pair in combinations(range(m), 2)]


def margin(table: Table, rest: list[int]) -> Table:
    """The table summed over these axes, which stay as 1."""
    return table.sum(dim=rest, keepdim=True) if rest else table


def best_scores(joint: Joint, tolerance: float = 1e-10) -> tuple[Table, Table]:
    """The best table of scores there is, log p / prod p_i, and the best sum of pairs', -inf where each is 0."""
    projected = pairwise_projection(joint, tolerance)
    product = joint.product_of_marginals().log()
    return joint.log_ratio(), torch.where(projected.table > 0, projected.table.log() - product, -math.inf)


def divergence(table: Table, log_other: Table) -> Float64[Tensor, ""]:
    """sum p (log p - log q); 0 log 0 is 0, and inf where q lacks what p has. Not below 0 but by rounding."""
    there = table > 0
    return (table[there] * (table[there].log() - log_other[there])).sum()


def marginal_kl(joint: Joint, log_other: Table, names: tuple[str, ...]) -> Float64[Tensor, ""]:
    """KL between the margins of both on these modalities."""
    rest = [axis for axis, name in enumerate(joint.modalities) if name not in names]
    return divergence(joint.marginal(names), log_other.logsumexp(dim=rest) if rest else log_other)


def checked_scores(joint: Joint, scores: Any) -> Table:
    """`scores` as a float64 table of the joint's shape."""
    scores = torch.as_tensor(scores).double()
    if scores.shape != joint.table.shape:
        raise ValueError(
            f"the joint of {list(joint.modalities)} needs scores {tuple(joint.table.shape)}, got {tuple(scores.shape)}"
        )
    if scores.isnan().any() or (scores == math.inf).any():
        raise ValueError("scores must be numbers below infinity; -inf says that a tuple never happens")
    return scores


def named(joint: Joint, names: str | Iterable[str]) -> tuple[str, ...]:
    """Names as a tuple; KeyError for one that the joint does not have."""
    names = (names,) if isinstance(names, str) else tuple(names)
    refuse_unknown(names, joint.modalities, "the names of a conditional")
    return names
