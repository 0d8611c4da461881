"""All ranks' rows in one tensor, with gradients, for a contrastive loss over the global batch."""

import torch
from torch import Tensor, distributed


def gather_rows(rows: dict[str, Tensor]) -> dict[str, Tensor]:
    """Concatenate each tensor's rows over all ranks, in rank order; ranks may hold different numbers of rows.

    The gradient of a gathered row flows back to its own rank, summed over the ranks that used it.
    Raises: RuntimeError where torch.distributed is not initialised.
    """
    if not (distributed.is_available() and distributed.is_initialized()):
        raise RuntimeError("gather=True needs torch.distributed: run under torchrun or accelerate, or leave it out")
    return {name: _gather(tensor) for name, tensor in rows.items()}


def _gather(tensor: Tensor) -> Tensor:
    counts = [torch.zeros(1, dtype=torch.long, device=tensor.device) for _ in range(distributed.get_world_size())]
    distributed.all_gather(counts, torch.tensor([len(tensor)], device=tensor.device))
    sizes = [int(count) for count in counts]
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
