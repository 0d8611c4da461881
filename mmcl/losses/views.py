"""Losses where rows have positives among the batch: the other view of an image, or the rows of its label."""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mmcl.arrays import as_rows, as_tensor, full_precision, same_length, same_precision
from mmcl.losses.gathering import gather_rows, mean_over_ranks
from mmcl.losses.pairs import REDUCTIONS, refuse_lonely
from mmcl.losses.questions import Question, cross_entropy
from mmcl.tables import lookup


def nt_xent(
    view_a: Any,
    view_b: Any,
    temperature: float | Tensor = 0.5,
    reduction: str = "mean",
    block_size: int | None = None,
    gather: bool = False,
) -> Float[Tensor, "..."]:
    """Cross-entropy of finding each row's other view among all other rows of both views (SimCLR).

    Args:
        view_a, view_b: (n, d), row i of both a view of image i, n >= 2; unit norm, as cosines are meant: nothing is
            normalised here.
        temperature: what the similarities are divided by.
        reduction: "mean" over the 2n anchors or "none" for (2n,), those of view_a first.
        block_size: rows of logits held at once; see `info_nce`.
        gather: the views of all ranks are candidates (torch.distributed); see `contrastive_loss`. Mean only.
    Returns: nats; a row has 2n - 1 candidates, its positive among them and itself not, so equal rows give log(2n - 1).
        Dense memory O(n^2), blockwise O(block_size * n).
    Raises: ValueError for shapes that differ, or a lone image.
    Source: Chen et al. 2020 (SimCLR), eq. 1.
    """
    reduce = lookup(REDUCTIONS, reduction, "reduction")
    a = as_rows(view_a, "view_a")
    views = same_precision({"view_a": a, "view_b": as_rows(view_b, "view_b", a.shape[1], a.device)})
    own = slice(0, same_length(views))
    everyone, own = gather_rows(views) if gather else (views, own)
    count = len(everyone["view_a"])
    refuse_lonely(count)
    with full_precision(a.device):
        losses = []
        for view, other in (("view_a", "view_b"), ("view_b", "view_a")):
            item = torch.cat([everyone[other], everyone[view]])
            itself = torch.arange(own.start, own.stop, device=item.device) + count
            question = Question(everyone[view][own] / temperature, item, first=own.start, left_out=itself)
            losses.append(cross_entropy(question, block_size, mean=gather))
        if gather:
            _refuse_none(reduction)
            return mean_over_ranks(torch.stack(losses).mean(), own, count)
        return reduce(torch.cat(losses))


def sup_con(
    embeddings: Any,
    labels: Any,
    temperature: float | Tensor = 0.1,
    reduction: str = "mean",
    block_size: int | None = None,
    gather: bool = False,
) -> Float[Tensor, "..."]:
    """Mean over each row's positives, the other rows of its label, of the cross-entropy of finding that one.

    The mean stands outside the logarithm, and every other row stays in the denominator: other positives, too.

    Args:
        embeddings: (n, d), unit norm; several views of an image are rows of one label. Nothing is normalised here.
        labels: (n,) integers; -1 for a row without a label, which is a candidate and no anchor.
        temperature: what the similarities are divided by.
        reduction: "mean" over the anchors that have a positive, or "none" for (n,), 0 where a row has none.
        block_size: rows of logits held at once; see `info_nce`.
        gather: rows of all ranks are positives and candidates (torch.distributed); see `contrastive_loss`. Mean only.
    Returns: nats. Dense memory O(n^2), blockwise O(block_size * n).
    Raises: ValueError for labels of another shape, or where no row has a positive.
    Source: Khosla et al. 2020, eq. 2 (L_out).
    """
    reduce = lookup(REDUCTIONS, reduction, "reduction")
    rows = as_rows(embeddings, "embeddings")
    groups = as_labels(labels, len(rows), rows.device)
    own = slice(0, len(rows))
    if gather:
        _refuse_none(reduction)
        everyone, own = gather_rows({"rows": rows, "groups": groups})
        rows, groups = everyone["rows"], everyone["groups"]
    following, positives = next_of_label(groups), label_means(rows, groups)
    anchors = (following != torch.arange(len(rows), device=rows.device)).nonzero()[:, 0]
    if not len(anchors):
        raise ValueError("no row shares its label with another, so none has a positive")
    asked = anchors[(anchors >= own.start) & (anchors < own.stop)]
    with full_precision(rows.device):
        query = rows[asked] / temperature
        question = Question(query, *_candidates(rows, following, asked))
        finds_one = cross_entropy(question, block_size, mean=False)
        losses = finds_one + (query * (rows[following[asked]] - positives[asked])).sum(1)
        if gather:
            part = slice(0, len(asked))
            return mean_over_ranks(losses.sum() / max(len(asked), 1), part, len(anchors))
        if reduction == "none":
            return losses.new_zeros(len(rows)).index_copy(0, asked, losses)
        return reduce(losses)


def _candidates(
    rows: Float[Tensor, "n d"], following: Int[Tensor, " n"], asked: Int[Tensor, " k"]
) -> tuple[Float[Tensor, "n d"], None, int, list, Int[Tensor, " k"]]:
    """Of a question: all rows, those that follow the asked ones first, and where each asked row itself stands."""
    others = torch.ones(len(rows), dtype=torch.bool, device=rows.device)
    others[following[asked]] = False
    order = torch.cat([following[asked], others.nonzero()[:, 0]])
    return rows[order], None, 0, [], torch.argsort(order)[asked]


def next_of_label(labels: Int[Tensor, " n"]) -> Int[Tensor, " n"]:
    """The next row of the same label, the first after the last; itself where a row is alone or has label -1."""
    order = torch.argsort(labels, stable=True)
    _, counts = torch.unique_consecutive(labels[order], return_counts=True)
    ends = counts.cumsum(0)
    after = torch.arange(1, len(labels) + 1, device=labels.device)
    after[ends - 1] = ends - counts
    following = torch.empty_like(order)
    following[order] = order[after]
    return torch.where(labels < 0, torch.arange(len(labels), device=labels.device), following)


def label_means(rows: Float[Tensor, "n d"], labels: Int[Tensor, " n"]) -> Float[Tensor, "n d"]:
    """The mean of the other rows of each row's label; of no meaning where there is none."""
    _, place, counts = torch.unique(labels, return_inverse=True, return_counts=True)
    sums = rows.new_zeros(len(counts), rows.shape[1]).index_add(0, place, rows)
    return (sums[place] - rows) / (counts[place] - 1).clamp(min=1).unsqueeze(1)


def as_labels(labels: Any, count: int, device: torch.device | None = None) -> Int[Tensor, " n"]:
    """(n,) labels >= -1, as integers; ValueError names what is wrong."""
    given = as_tensor(labels, device)
    whole = not (given.is_floating_point() or given.is_complex()) and given.dtype != torch.bool
    if tuple(given.shape) != (count,) or not whole:
        raise ValueError(f"labels must be ({count},) integers, got {tuple(given.shape)} {given.dtype}")
    given = given.long()
    if len(given) and given.min() < -1:
        row = int((given < -1).nonzero()[0])
        raise ValueError(f"labels: row {row} is {int(given[row])}; labels are >= 0, or -1 for a row without one")
    return given


def _refuse_none(reduction: str) -> None:
    if reduction == "none":
        raise ValueError("with gather=True the loss is a mean over all ranks; reduction 'none' is for one process")
