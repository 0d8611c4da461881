"""What a contrastive loss asks: which of all candidates is each row's answer? Its cross-entropy, dense or by blocks."""

from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mmcl.arrays import full_precision

DENSE_LOGITS = 1024**2
"""Logits up to which the whole matrix is built where nobody says otherwise; larger ones are slower than blocks."""
BLOCK_LOGITS, LEAST_ROWS, MOST_ROWS = 2**22, 256, 1024
"""Of a block beyond that: matrix products run at full speed, and what follows them finds the logits in the cache."""


@dataclass(frozen=True)
class Question:
    """`query @ item.T` are the logits; the answer of row a is candidate `first + a`."""

    query: Float[Tensor, "n width"]
    item: Float[Tensor, "candidates width"]
    own_item: Float[Tensor, "n width"] | None = None
    """What stands in the answer's place where it is not the candidate there."""
    first: int = 0
    keys: list[tuple[Int[Tensor, " n"], Int[Tensor, " candidates"]]] = field(default_factory=list)
    """(answer's group, candidate's group) of each guessed modality: candidates equal in all of them are right, too."""
    left_out: Int[Tensor, " n"] | None = None
    """The one candidate that each row does not see, such as the row itself; never the answer."""

    def right(self, part: slice) -> Bool[Tensor, "block candidates"]:
        """Which candidates are right for some rows: their own, and those equal to it in every guessed modality."""
        rows = len(self.query[part])
        right = torch.ones(rows, len(self.item), dtype=torch.bool, device=self.query.device)
        for answer, candidate in self.keys:
            right &= answer[part].unsqueeze(1) == candidate.unsqueeze(0)
        if not self.keys:
            right.zero_()
        right.diagonal(self.first + part.start).fill_(True)
        return right

    def hide(self, part: slice, logits: Float[Tensor, "block candidates"]) -> None:
        """Write -inf where some rows meet the candidate that they do not see."""
        if self.left_out is not None:
            logits.scatter_(1, self.left_out[part].unsqueeze(1), -torch.inf)


def cross_entropy(question: Question, block_size: int | None, mean: bool = True) -> Float[Tensor, "..."]:
    """-log of the softmax mass on the right candidates, in nats.

    Args:
        block_size: rows of logits held at once; None: all of 1024 x 1024 or fewer, else blocks of 256 to 1024 rows.
        mean: over rows; otherwise (n,).
    Raises: ValueError for a block size below 1.
    """
    if block_size is not None and block_size < 1:
        raise ValueError(f"block_size must be at least 1, got {block_size}")
    rows, candidates = len(question.query), len(question.item)
    if block_size is None:
        blocks = min(max(BLOCK_LOGITS // candidates, LEAST_ROWS), MOST_ROWS)
        block_size = rows if rows * candidates <= DENSE_LOGITS else blocks
    with full_precision(question.query.device):
        if block_size < rows:
            from mmcl.losses.blockwise import blockwise_cross_entropy

            return blockwise_cross_entropy(question, block_size, mean)
        losses = dense_cross_entropy(question)
        return losses.sum() / max(rows, 1) if mean else losses  # a process among several may have no row


def dense_cross_entropy(question: Question) -> Float[Tensor, " n"]:
    """The same for each row from one matrix of logits, O(n * candidates) memory; any order of derivatives."""
    logits = question.query @ question.item.T
    if question.own_item is not None:
        own = torch.zeros_like(logits, dtype=torch.bool)
        own.diagonal(question.first).fill_(True)
        true = (question.query * question.own_item).sum(1, keepdim=True)
        logits = torch.where(own, true, logits)
    question.hide(slice(0, len(logits)), logits)
    everything = logits.logsumexp(dim=1)
    if not question.keys:
        return everything - logits.diagonal(question.first)
    right = question.right(slice(0, len(logits)))
    return everything - logits.masked_fill(~right, -torch.inf).logsumexp(dim=1)
