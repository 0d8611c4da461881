"""Losses of assignments to prototypes."""

from collections.abc import Sequence
from itertools import product
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from mmcl.arrays import as_rows, full_precision
from mmcl.losses.gathering import gather_rows, mean_of_ranks


@torch.no_grad()
def sinkhorn(scores: Any, epsilon: float = 0.05, iterations: int = 3, gather: bool = False) -> Float[Tensor, "n k"]:
    """Soft assignments of rows to prototypes that use every prototype about equally.

    The Sinkhorn-Knopp iteration on exp(scores / epsilon), in the log domain, so that no score overflows. The mass of
    the transport plan is these rows divided by n; each pass balances the prototypes and then the rows.

    Args:
        scores: (n, k) similarities of rows to prototypes.
        epsilon: the smaller, the harder the assignment.
        iterations: passes.
        gather: balance over the rows of all ranks (torch.distributed); each gets those of its own.
    Returns: (n, k), rows that sum to 1; constants, without a gradient.
    Raises: ValueError for scores of no row, or epsilon or iterations that are not positive.
    Source: Cuturi 2013; as codes, Caron et al. 2020 (SwAV), eq. 3 to 5.
    """
    scores = as_rows(scores, "scores")
    if epsilon <= 0 or iterations < 1:
        raise ValueError(f"epsilon must be > 0 and iterations >= 1, got {epsilon} and {iterations}")
    own = slice(0, len(scores))
    with full_precision(scores.device):
        if gather:
            everyone, own = gather_rows({"scores": scores})
            scores = everyone["scores"]
        if not scores.numel():
            raise ValueError(f"scores must hold rows and prototypes, got {tuple(scores.shape)}")
        mass = scores / epsilon
        for _ in range(iterations):
            mass = mass - mass.logsumexp(0, keepdim=True)
            mass = mass - mass.logsumexp(1, keepdim=True)
        return mass.exp()[own]


def swav_swapped(
    scores_a: Any,
    scores_b: Any,
    temperature: float = 0.1,
    epsilon: float = 0.05,
    iterations: int = 3,
    gather: bool = False,
) -> Float[Tensor, ""]:
    """Cross-entropy of predicting each view's code from the other view, the mean of both directions.

    Args:
        scores_a, scores_b: (n, k) cosines of two views' rows and the prototypes.
        temperature: of the predictions.
        epsilon, iterations, gather: of the codes; see `sinkhorn`.
    Returns: nats.
    Source: Caron et al. 2020 (SwAV), eq. 1 and 2, where it is the sum of both directions.
    """
    return swapped_predictions([scores_a, scores_b], 2, temperature, epsilon, iterations, gather)


def swapped_predictions(
    scores: Sequence[Any],
    coded: int = 2,
    temperature: float = 0.1,
    epsilon: float = 0.05,
    iterations: int = 3,
    gather: bool = False,
) -> Float[Tensor, ""]:
    """The same for any number of views (multi-crop): each of the first `coded` is predicted from every other view.

    Args:
        scores: a (n, k) a view, the large crops first.
        coded: how many views have codes.
    Returns: nats, the mean over pairs of views.
    Source: Caron et al. 2020 (SwAV), eq. 6.
    """
    views = [as_rows(each, f"scores of view {number}") for number, each in enumerate(scores)]
    shapes = {tuple(each.shape) for each in views}
    if len(views) < 2 or not 1 <= coded <= len(views) or len(shapes) != 1:
        raise ValueError(f"expected two or more views of one shape, {coded} of them coded; got {sorted(shapes)}")
    codes = [sinkhorn(each, epsilon, iterations, gather) for each in views[:coded]]
    with full_precision(views[0].device):
        guesses = [(each / temperature).log_softmax(1) for each in views]
        pairs = [(code, guess) for (i, code), (j, guess) in product(enumerate(codes), enumerate(guesses)) if i != j]
        rows = len(views[0])  # a process among several may have none
        loss = torch.stack([-(code * guess).sum() / max(rows, 1) for code, guess in pairs]).mean()
        return mean_of_ranks(loss, rows) if gather else loss
