"""Losses of the correlation between features, not rows."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from mmcl.arrays import as_rows, full_precision, same_length, same_precision
from mmcl.losses.gathering import gather_rows
from mmcl.losses.pairs import refuse_lonely


def barlow_twins(a: Any, b: Any, lambd: float = 0.005, gather: bool = False) -> Float[Tensor, ""]:
    """How far the correlation of the features of two views is from the identity.

    Args:
        a, b: (n, d), row i of both a view of image i, n >= 2. Features are centred and scaled over the batch here.
        lambd: weight of the off-diagonal part, in which (i, j) and (j, i) both count.
        gather: correlate over the rows of all ranks (torch.distributed); every rank returns the global loss, and
            gradients of parameters are right after averaging over ranks.
    Returns: sum_i (1 - C_ii)^2 + lambd sum_{i != j} C_ij^2. A feature that does not vary correlates with nothing: it
        counts 1 and has no gradient. Memory O(d^2).
    Raises: ValueError for shapes that differ, or one row, which has no correlation.
    Source: Zbontar et al. 2021 (Barlow Twins), eq. 1 and 2.
    """
    first = as_rows(a, "a")
    rows = same_precision({"a": first, "b": as_rows(b, "b", first.shape[1], first.device)})
    same_length(rows)
    if gather:
        rows, _ = gather_rows(rows)
    refuse_lonely(len(rows["a"]))
    with full_precision(first.device):
        return redundancy(standardised(rows["a"]).T @ standardised(rows["b"]), lambd)


def redundancy(correlation: Float[Tensor, "d d"], lambd: float) -> Float[Tensor, ""]:
    """The loss of a correlation matrix."""
    squares = correlation.square()
    return (1 - correlation.diagonal()).square().sum() + lambd * (squares.sum() - squares.diagonal().sum())


def standardised(rows: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
    """Each feature centred, of length 1 over the batch; zeros where it varies by rounding alone."""
    centred = rows - rows.mean(0)
    lengths = torch.linalg.vector_norm(centred.detach(), dim=0)
    rounding = 4 * torch.finfo(rows.dtype).eps * len(rows) ** 0.5 * rows.detach().abs().amax(0)
    varies = lengths > rounding
    safe = torch.where(varies, centred, torch.ones_like(centred))  # a norm's gradient at zero is not a number
    return torch.where(varies, centred / torch.linalg.vector_norm(safe, dim=0), torch.zeros_like(centred))
