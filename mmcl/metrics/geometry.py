"""How embeddings lie on the sphere: aligned, uniform, collapsed; and what an InfoNCE loss says of dependence."""

import math
from typing import Any

import torch

from mmcl.arrays import as_rows, same_length, same_precision
from mmcl.losses.views import as_labels


def alignment(view_a: Any, view_b: Any, alpha: float = 2.0) -> float:
    """Mean of |a - b|^alpha over rows that belong together, unit norm; 0 where views agree.

    Source: Wang and Isola 2020, eq. 2.
    """
    rows = _pair(view_a, view_b)
    return float((rows[0] - rows[1]).norm(dim=1).pow(alpha).mean())


def uniformity(embeddings: Any, t: float = 2.0) -> float:
    """Log of the mean of exp(-t |x - y|^2) over pairs of different rows, unit norm; the lower, the more uniform.

    0 where all rows are one point; for rows uniform on a sphere of high dimension near -2t. Memory O(n^2).

    Source: Wang and Isola 2020, eq. 3.
    """
    rows = as_rows(embeddings, "embeddings")
    if len(rows) < 2:
        raise ValueError(f"uniformity needs at least 2 rows, got {len(rows)}")
    squares = torch.nn.functional.pdist(rows).square()
    return float(torch.logsumexp(-t * squares, 0) - math.log(len(squares)))


def mutual_information_bound(loss: float, candidates: int) -> float:
    """log N - InfoNCE, a lower bound on the mutual information of query and key, in nats.

    It holds where the loss is the expectation over batches in which the N - 1 negatives are independent draws of the
    key's marginal; not for mined (hard) negatives, several views of one image, or a queue of other times. It can never
    exceed log N, whatever the information is: reaching that says that N is too small, not what the information is.

    Args:
        loss: InfoNCE in nats.
        candidates: N, the positive among them.
    Source: van den Oord et al. 2018, eq. 10; Poole et al. 2019.
    """
    if candidates < 2 or not math.isfinite(loss):
        raise ValueError(f"expected a finite loss of at least 2 candidates, got {loss} of {candidates}")
    return math.log(candidates) - loss


def hardest_negative_share(query: Any, key: Any, negatives: Any = None, temperature: float = 0.5) -> torch.Tensor:
    """Of each query, the share of the negatives' softmax weight that its hardest one has: the effect of temperature.

    Args:
        query, key: (n, d), rows that belong together, unit norm.
        negatives: (k, d) shared; None for the other keys of the batch.
        temperature: what cosines are divided by.
    Returns: (n,) from 1/k to 1.
    """
    rows = _pair(query, key)
    if negatives is None:
        logits = rows[0] @ rows[1].T / temperature
        logits = logits[~torch.eye(len(logits), dtype=torch.bool)].view(len(logits), -1)
    else:
        logits = rows[0] @ as_rows(negatives, "negatives", rows[0].shape[1]).to(rows[0].dtype).T / temperature
    if not logits.shape[1]:
        raise ValueError("a lone row has no negatives")
    return logits.softmax(1).amax(1)


def same_class_similarity(embeddings: Any, labels: Any) -> float:
    """Mean cosine of different rows of one label; 1 where each class, or everything, is one point. Memory O(n d).

    Raises: ValueError where no two rows share a label (-1 is none).
    """
    rows = torch.nn.functional.normalize(as_rows(embeddings, "embeddings"), dim=1)
    known = as_labels(labels, len(rows), rows.device)
    rows, known = rows[known >= 0], known[known >= 0]
    _, place, counts = torch.unique(known, return_inverse=True, return_counts=True)
    pairs = int((counts * (counts - 1)).sum())
    if not pairs:
        raise ValueError("no two rows share a label")
    sums = rows.new_zeros(len(counts), rows.shape[1]).index_add(0, place, rows)
    return float((sums.square().sum() - rows.square().sum()) / pairs)


def effective_rank(embeddings: Any) -> float:
    """exp of the entropy of the centred rows' singular values, as shares: how many directions are in use.

    Returns: from 1 to d; 0 where all rows are one point.
    Source: Roy and Vetterli 2007.
    """
    rows = as_rows(embeddings, "embeddings").detach().double()
    centred = rows - rows.mean(0)
    values = torch.linalg.svdvals(centred)
    if float(values.max()) <= 1e-9 * max(float(rows.norm()), 1e-300):
        return 0.0
    shares = values / values.sum()
    return float(torch.special.entr(shares).sum().exp())


def _pair(a: Any, b: Any) -> tuple[torch.Tensor, torch.Tensor]:
    first = as_rows(a, "a")
    rows = same_precision({"a": first, "b": as_rows(b, "b", first.shape[1], first.device)})
    if same_length(rows) == 0:
        raise ValueError("no row to measure")
    return rows["a"].detach(), rows["b"].detach()
