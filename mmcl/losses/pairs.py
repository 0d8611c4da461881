"""Losses over pairs of embeddings. Pure functions that normalise nothing; natural logarithms throughout."""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from mmcl.arrays import as_float_tensor, as_rows, full_precision, same_length, same_precision
from mmcl.losses.questions import Question, cross_entropy
from mmcl.tables import lookup

REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {"mean": torch.mean, "none": lambda losses: losses}


def info_nce(
    query: Any,
    key: Any,
    negatives: Any = None,
    scale: float | Tensor = 1.0,
    reduction: str = "mean",
    block_size: int | None = None,
) -> Float[Tensor, "..."]:
    """Cross-entropy of finding each query's own key among its candidates, the key itself included.

    Args:
        query, key: (n, d), rows that belong together.
        negatives: None for the other keys of the batch; (k, d) shared by all queries; (n, k, d) for each its own.
        scale: inverse temperature.
        reduction: "mean" over queries or "none" for (n,).
        block_size: without negatives, rows of logits held at once, with the same value and gradients (but no second
            derivatives). None chooses: dense up to 1024 rows.
    Returns: nats. Dense memory O(n * candidates); blockwise O(block_size * n).
    Raises: ValueError for shapes that do not fit, or a batch of one without negatives.
    Source: van den Oord et al. 2018, eq. 4.
    """
    query = as_rows(query, "query")
    rows = same_precision({"query": query, "key": as_rows(key, "key", query.shape[1])})
    query, key = rows["query"], rows["key"]
    if same_length(rows) == 0 and negatives is not None:
        raise ValueError("no row to take the loss of")
    reduce = lookup(REDUCTIONS, reduction, "reduction")
    with full_precision(query.device):
        if negatives is None:
            refuse_lonely(len(query))
            return cross_entropy(Question(scale * query, key), block_size, mean=reduction == "mean")
        if block_size is not None:
            raise ValueError("block_size is for the batch's own keys; with negatives leave it out")
        logits = scale * torch.cat([(query * key).sum(1, keepdim=True), _against(query, negatives)], dim=1)
        own = torch.zeros(len(query), dtype=torch.long, device=query.device)
        return reduce(F.cross_entropy(logits, own, reduction="none"))


def moco(
    query: Any, key: Any, queue: Any, temperature: float | Tensor = 0.07, reduction: str = "mean"
) -> Float[Tensor, "..."]:
    """Cross-entropy of finding each query's key among it and the queue's older keys.

    Args:
        query: (n, d), unit norm.
        key: (n, d) of the momentum encoder; a constant, no gradient flows into it.
        queue: (K, d) older keys, without those of this batch: take the loss before they go in. A constant, too.
        temperature: what the similarities are divided by.
    Returns: nats, from (n, 1 + K) logits whose column 0 is the answer; equal rows give log(K + 1).
    Raises: as `info_nce`; an empty queue leaves no negative.
    Source: He et al. 2020 (MoCo), eq. 1.
    """
    query = as_rows(query, "query")
    key = as_rows(key, "key", query.shape[1], query.device).detach()
    return info_nce(query, key, as_rows(queue, "queue", query.shape[1]).detach(), 1 / temperature, reduction)


def triplet(
    anchor: Any, positive: Any, negative: Any, margin: float = 0.5, reduction: str = "mean"
) -> Float[Tensor, "..."]:
    """How far each negative is from being further away than the positive by `margin`, in squared distance.

    Args:
        anchor, positive, negative: (n, d), rows that belong together.
        margin: in squared Euclidean distance.
    Returns: max(0, |a - p|^2 - |a - n|^2 + margin), without a gradient where it is 0.
    Source: Schroff et al. 2015 (FaceNet), eq. 3.
    """
    reduce = lookup(REDUCTIONS, reduction, "reduction")
    anchor = as_rows(anchor, "anchor")
    others = {"positive": positive, "negative": negative}
    rows = {name: as_rows(each, name, anchor.shape[1], anchor.device) for name, each in others.items()}
    rows = same_precision({"anchor": anchor, **rows})
    if same_length(rows) == 0:
        raise ValueError("no row to take the loss of")
    with full_precision(anchor.device):
        near = (rows["anchor"] - rows["positive"]).square().sum(1)
        far = (rows["anchor"] - rows["negative"]).square().sum(1)
        return reduce(F.relu(near - far + margin))


def byol_regression(prediction: Any, target: Any, reduction: str = "mean") -> Float[Tensor, "..."]:
    """Squared distance of the normalised prediction and target, 2 - 2 cos. Both are normalised here.

    Args:
        prediction: (n, d) of the online network's predictor.
        target: (n, d) of the target network; a constant, no gradient flows into it.
    Returns: from 0 to 4, one direction; a symmetric loss takes it both ways.
    Source: Grill et al. 2020 (BYOL), eq. 2.
    """
    reduce = lookup(REDUCTIONS, reduction, "reduction")
    prediction = as_rows(prediction, "prediction")
    target = as_rows(target, "target", prediction.shape[1], prediction.device).detach()
    rows = same_precision({"prediction": prediction, "target": target})
    if same_length(rows) == 0:
        raise ValueError("no row to take the loss of")
    with full_precision(prediction.device):
        return reduce(2 - 2 * F.cosine_similarity(rows["prediction"], rows["target"]))


def _against(query: Float[Tensor, "n d"], negatives: Any) -> Float[Tensor, "n k"]:
    negatives = as_float_tensor(negatives, "negatives", query.device).to(query.dtype)
    shared, own = negatives.ndim == 2, negatives.ndim == 3
    if not (shared or own) or negatives.shape[-1] != query.shape[1] or (own and len(negatives) != len(query)):
        n, d = query.shape
        raise ValueError(f"negatives must be (k, {d}) or ({n}, k, {d}), got {tuple(negatives.shape)}")
    if negatives.shape[-2] == 0:
        raise ValueError("negatives hold no row; without a negative the loss is constantly 0")
    return query @ negatives.T if shared else torch.einsum("nd,nkd->nk", query, negatives)


def refuse_lonely(count: int) -> None:
    """A batch of one has no negatives: its loss would be silently 0."""
    if count < 2:
        raise ValueError(f"a contrastive loss needs at least 2 rows, got {count}: a lone row has no negatives")
