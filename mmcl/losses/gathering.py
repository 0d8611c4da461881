"""All ranks' rows in one tensor, with gradients, for a contrastive loss over the global batch."""

import torch
from torch import Tensor, distributed


def gather_rows(rows: dict[str, Tensor]) -> tuple[dict[str, Tensor], slice]:
    """Concatenate each tensor's rows over all ranks, in rank order; ranks may hold different numbers of rows.

    The gradient of a gathered row flows back to its own rank, summed over the ranks that used it.
    Returns: the tensors, and which of their rows are this rank's own.
    Raises: RuntimeError where torch.distributed is not initialised.
    """
    if not (distributed.is_available() and distributed.is_initialized()):
        raise RuntimeError("gather=True needs torch.distributed: run under torchrun or accelerate, or leave it out")
    if not rows:
        return {}, slice(0, 0)
    first = next(iter(rows.values()))
    counts = first.new_zeros(distributed.get_world_size(), dtype=torch.long)
    counts[distributed.get_rank()] = len(first)
    distributed.all_reduce(counts)
    sizes = counts.tolist()
    start = sum(sizes[: distributed.get_rank()])
    return {name: _gather(tensor, sizes) for name, tensor in rows.items()}, slice(start, start + len(first))


def mean_over_ranks(loss: Tensor, own: slice, count: int) -> Tensor:
    """The mean over all rows, of each rank's mean over its own.

    Its gradients are those of this rank's part times the number of ranks: averaged over ranks they are the whole's.
    """
    part = loss * ((own.stop - own.start) * distributed.get_world_size() / count)
    whole = part.detach().clone()
    distributed.all_reduce(whole)
    return part + (whole / distributed.get_world_size() - part.detach())


def mean_of_ranks(loss: Tensor, rows: int) -> Tensor:
    """The mean over all rows, of each rank's mean over its own `rows`; see `mean_over_ranks`."""
    total = torch.tensor(rows, device=loss.device)
    distributed.all_reduce(total)
    return mean_over_ranks(loss, slice(0, rows), int(total))


def _gather(tensor: Tensor, sizes: list[int]) -> Tensor:
    padding = tensor.new_zeros(max(sizes) - len(tensor), *tensor.shape[1:])
    parts = _AllGather.apply(torch.cat([tensor, padding]))
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])


class _AllGather(torch.autograd.Function):
    """all_gather of equal shapes; the backward pass sums over ranks and returns this rank's part."""

    @staticmethod
    def forward(ctx, tensor: Tensor) -> tuple[Tensor, ...]:
        parts = [torch.empty_like(tensor) for _ in range(distributed.get_world_size())]
        distributed.all_gather(parts, tensor.contiguous())
        return tuple(parts)

    @staticmethod
    def backward(ctx, *gradients: Tensor) -> Tensor:
        stacked = torch.stack(gradients)
        distributed.all_reduce(stacked)
        return stacked[distributed.get_rank()]
