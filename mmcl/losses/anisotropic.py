"""Losses for positives that vary more in some latent directions than in others, or in some not at all."""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from mmcl.arrays import as_float_tensor, as_rows, full_precision, same_length, same_precision
from mmcl.losses.pairs import info_nce


def an_info_nce(
    a: Any,
    b: Any,
    concentration: Any,
    negatives: Any = None,
    reduction: str = "mean",
    block_size: int | None = None,
) -> Float[Tensor, "..."]:
    """InfoNCE whose similarity is -(a - b)' diag(concentration) (a - b) / 2: each direction has its own scale.

    Args:
        a, b: (n, d), rows that belong together.
        concentration: (d,) positive; learned as softplus of free numbers. All equal to 1/tau on the unit sphere, this
            is `info_nce(a, b, scale=1/tau)`.
        negatives, reduction, block_size: as in `info_nce`. Negatives drawn around each anchor with a concentration of
            their own (hard ones) leave the difference of the two to be learned.
    Returns: nats, mean over the rows of a.
    Raises: ValueError for shapes that do not fit, or a concentration that is not positive.
    Source: Rusak et al. 2024 (AnInfoNCE), eq. 4; hard negatives, section 4.2.
    """
    a = as_rows(a, "a")
    scales = checked_concentration(concentration, a.shape[1], a.device)
    rows = same_precision({"a": a, "b": as_rows(b, "b", a.shape[1], a.device)}, like=scales)
    same_length(rows)
    scales = scales.to(rows["a"].dtype)
    with full_precision(a.device):
        query = torch.cat([rows["a"] * scales, torch.ones_like(rows["a"][:, :1])], dim=1)
        if negatives is not None:
            negatives = as_float_tensor(negatives, "negatives", a.device).to(query.dtype)
            if negatives.ndim not in (2, 3) or negatives.shape[-1] != a.shape[1]:
                n, d = a.shape
                raise ValueError(f"negatives must be (k, {d}) or ({n}, k, {d}), got {tuple(negatives.shape)}")
            negatives = lifted(negatives, scales)
        return info_nce(query, lifted(rows["b"], scales), negatives, 1.0, reduction, block_size)


def lifted(rows: Float[Tensor, "*n d"], scales: Float[Tensor, " d"]) -> Float[Tensor, "*n lifted"]:
    """Rows with a coordinate more, so that <(scales * a, 1), lifted(b)> is the similarity of a and b up to a's part."""
    return torch.cat([rows, -0.5 * (rows.square() @ scales).unsqueeze(-1)], dim=-1)


def an_info_nce_ensemble(
    pairs: Sequence[tuple[Any, Any]], concentrations: Any, weights: Sequence[Any] | None = None
) -> Float[Tensor, ""]:
    """A weighted sum of AnInfoNCE losses over one encoder: each kind of positive pair has its own concentration.

    Args:
        pairs: an (a, b) a kind, each (n, d) as in `an_info_nce`; such as one for each augmentation.
        concentrations: (kinds, d) positive.
        weights: of the kinds; default 1 / kinds each.
    Returns: nats.
    Source: Rusak et al. 2024 (AnInfoNCE), section 4.3.
    """
    weights = [1 / max(len(pairs), 1)] * len(pairs) if weights is None else list(weights)
    if not pairs or len(concentrations) != len(pairs) or len(weights) != len(pairs):
        raise ValueError(f"{len(pairs)} kinds of pairs need as many concentrations and weights, got "
                         f"{len(concentrations)} and {len(weights)}")  # fmt: skip
    losses = [an_info_nce(*pair, each) for pair, each in zip(pairs, concentrations, strict=True)]
    return torch.stack([weight * loss for weight, loss in zip(weights, losses, strict=True)]).sum()


def support_corrected_info_nce(
    anchor: Any, positive: Any, negatives: Any, temperature: float | Tensor = 0.3, reduction: str = "mean"
) -> Float[Tensor, "..."]:
    """InfoNCE whose negatives come from where the anchor's positives can be.

    Where augmentations hold some latent coordinate fixed, ordinary negatives differ in it and the loss rewards
    distorted maps; negatives drawn on the anchor's own slice make isometries optimal, though not the only optimum.

    Args:
        anchor, positive: (n, d).
        negatives: (n, k, d), drawn on the slice of each anchor.
        temperature: what the similarities are divided by.
    Returns: nats, mean over anchors; the positive is in the denominator.
    Raises: ValueError for negatives that are not each anchor's own.
    """
    anchor = as_rows(anchor, "anchor")
    negatives = as_float_tensor(negatives, "negatives", anchor.device)
    if negatives.ndim != 3:
        n, d = anchor.shape
        raise ValueError(f"negatives must be ({n}, k, {d}), each anchor's own, got {tuple(negatives.shape)}")
    return info_nce(anchor, positive, negatives, 1 / temperature, reduction)


def checked_concentration(value: Any, width: int, device: torch.device) -> Float[Tensor, " d"]:
    """(d,) finite positive numbers."""
    scales = as_float_tensor(value, "concentration", device)
    if tuple(scales.shape) != (width,):
        raise ValueError(f"concentration must be ({width},), got {tuple(scales.shape)}")
    wrong = ~((scales > 0) & torch.isfinite(scales))
    if wrong.any():
        at = int(wrong.nonzero()[0])
        raise ValueError(f"concentration must be positive; entry {at} is {float(scales[at])}")
    return scales
