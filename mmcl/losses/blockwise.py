"""Cross-entropies over many candidates, block by block of rows, in O(block * candidates) memory.

A block of rows sees all its candidates, so the softmax of its logits is known as soon as they are, and with it both
gradients. The forward pass makes them at once: three matrix products in all, where recomputing the logits would take
four, and nothing larger than a block is held. The values and gradients are those of the dense form.
"""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from mmcl.arrays import full_precision
from mmcl.losses.questions import Question

Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]
"""Of query, item and own_item."""


def blockwise_cross_entropy(question: Question, block: int, mean: bool = True) -> Float[Tensor, "..."]:
    """The mean of `dense_cross_entropy`, or (n,), with `block` rows of logits at a time. Differentiable once.

    Of each row's own loss the gradients are made in the backward pass, from logits made anew.
    """
    tensors = question.query, question.item, question.own_item
    return _Blockwise.apply(*tensors, (question.first, question.keys, question.left_out), block, mean)


class _Blockwise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, item: Tensor, own_item: Any, about: Any, block: int, mean: bool):
        question, wanted = Question(query, item, own_item, *about), ctx.needs_input_grad
        ctx.mean, ctx.about, ctx.block = mean, about, block
        if not mean:
            ctx.save_for_backward(query, item, own_item)
            return pass_over(question, block)[0]
        weights = query.new_full((len(query),), 1 / len(query)) if any(wanted[:3]) else None
        losses, gradients = pass_over(question, block, weights, wanted)
        ctx.save_for_backward(*gradients)
        return losses.mean()

    @staticmethod
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError("a loss by blocks has no second derivatives; pass block_size=n, the rows of the batch")
        if ctx.mean:
            return (*(None if each is None else each * outer for each in ctx.saved_tensors), None, None, None)
        query, item, own_item = ctx.saved_tensors
        question = Question(query, item, own_item, *ctx.about)
        with full_precision(outer.device):
            _, gradients = pass_over(question, ctx.block, outer, ctx.needs_input_grad)
        return (*gradients, None, None, None)


def pass_over(
    question: Question, block: int, weights: Tensor | None = None, wanted: Sequence[bool] = (True, True, True)
) -> tuple[Float[Tensor, " n"], Gradients]:
    """The loss of each row; with weights (n,) of their sum also its gradients, those that are wanted."""
    query, item, own_item = question.query, question.item, question.own_item
    losses = query.new_empty(len(query))
    rows_wanted, item_wanted, own_wanted = (weights is not None and each for each in wanted[:3])
    query_gradient = torch.empty_like(query) if rows_wanted else None
    item_gradient = torch.zeros_like(item) if item_wanted else None
    own_gradient = torch.empty_like(query) if own_wanted and own_item is not None else None
    buffer = query.new_empty(min(block, len(query)), len(item))
    for start in range(0, len(query), block):
        part = slice(start, min(start + block, len(query)))
        rows = query[part]
        logits = torch.mm(rows, item.T, out=buffer[: len(rows)])
        losses[part], mass = losses_and_mass(question, part, logits, None if weights is None else weights[part])
        if mass is None:
            continue
        answers = mass.diagonal(question.first + start)
        own_mass = answers.clone().unsqueeze(1)
        if own_item is not None:  # what stands in the answer's place is no candidate
            answers.zero_()
        if query_gradient is not None:
            torch.mm(mass, item, out=query_gradient[part])
            if own_item is not None:
                query_gradient[part].addcmul_(own_mass, own_item[part])
        if item_gradient is not None:
            item_gradient.addmm_(mass.T, rows)
        if own_gradient is not None:
            torch.mul(own_mass, rows, out=own_gradient[part])
    return losses, (query_gradient, item_gradient, own_gradient)


def losses_and_mass(
    question: Question, part: slice, logits: Float[Tensor, "block candidates"], weights: Tensor | None
) -> tuple[Float[Tensor, " block"], Float[Tensor, "block candidates"] | None]:
    """The losses of a block, and the gradients of their weighted sum by its logits, in the memory of the logits."""
    answers = logits.diagonal(question.first + part.start)
    if question.own_item is not None:
        answers.copy_((question.query[part] * question.own_item[part]).sum(1))
    question.hide(part, logits)
    if question.keys:
        right = logits.masked_fill(~question.right(part), -torch.inf)
        numerator = right.logsumexp(1)
    else:
        right, numerator = None, answers.clone()
    largest = logits.amax(1, keepdim=True)
    mass = logits.sub_(largest).exp_()
    total = mass.sum(1, keepdim=True)
    losses = (largest + total.log()).squeeze(1) - numerator
    if weights is None:
        return losses, None
    mass.mul_(weights.unsqueeze(1) / total)
    if right is None:
        mass.diagonal(question.first + part.start).sub_(weights)
    else:
        mass.addcmul_(right.sub_(numerator.unsqueeze(1)).exp_(), weights.unsqueeze(1), value=-1)
    return losses, mass
