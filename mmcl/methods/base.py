"""What every method shares: an encoder whose features are the result, a head that the loss sees, and two hooks."""

from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, distributed, nn
from torch.nn import functional as F

from mmcl.arrays import as_float_tensor
from mmcl.files import made_folder, save_tensors
from mmcl.losses.gathering import gather_rows, mean_of_ranks
from mmcl.tables import lookup

ENCODER_WEIGHTS = "encoder.safetensors"
NORMS: dict[str, Callable[[int], nn.Module]] = {
    "batch": nn.BatchNorm1d,
    "layer": nn.LayerNorm,
    "none": lambda width: nn.Identity(),
}
"""Between a head's layers. "batch" sees the rows of its own process alone (on GPUs convert to SyncBatchNorm)."""


class Method(nn.Module):
    """A way to train an encoder without, or with few, labels.

    `loss = method(views)`, `loss.backward()`, the optimiser's step over `trained_parameters()`, `method.after_step()`;
    at the start of each epoch `method.start_epoch(features)`. What a method remembers (queues, banks, momentum targets,
    cluster labels) lies in its state_dict, so a checkpoint holds it. Under torch.distributed all ranks' rows count.

    Args:
        encoder: inputs of n rows -> (n, width) features h, which are what is kept and evaluated.
        width: of the features.
    """

    def __init__(self, encoder: nn.Module, width: int):
        super().__init__()
        self.encoder, self.width = encoder, width

    def forward(self, views: Any, rows: Tensor | None = None, labels: Tensor | None = None) -> Tensor:
        """The loss of a batch.

        Args:
            views: two or more augmentations of the same n rows, drawn independently.
            rows: (n,) which rows of the dataset these are; memory banks and cluster labels need them.
            labels: (n,), -1 where unknown; SupCon needs them.
        """
        raise NotImplementedError

    def after_step(self) -> None:
        """What follows an optimiser step: momentum targets, queues, prototypes of norm 1."""

    def start_epoch(self, features: Callable[[], Float[Tensor, "rows width"]]) -> None:
        """What precedes an epoch; features: runs the encoder over the whole dataset, in its order."""

    def fresh_parameters(self) -> list[nn.Parameter]:
        """Those that `start_epoch` has drawn anew: an optimiser must forget what it knows of them."""
        return []

    def save_pretrained(self, folder: str | Path) -> None:
        """Write the encoder's weights, encoder.safetensors, into a folder; heads, targets and queues stay behind."""
        save_tensors(self.encoder.state_dict(), made_folder(folder, "an encoder is saved") / ENCODER_WEIGHTS)

    def trained_parameters(self) -> Iterator[nn.Parameter]:
        """What an optimiser moves: never a momentum target."""
        return (parameter for parameter in self.parameters() if parameter.requires_grad)


def head(
    width: int, out: int, hidden: int | None = None, layers: int = 2, norm: str = "batch", last_norm: bool = False
) -> nn.Sequential:
    """A perceptron for the loss to see: linear, norm, ReLU, ..., linear.

    Args:
        layers: linear ones; 0 for none.
        norm: "batch", "layer" or "none".
        last_norm: a norm without scale and shift after the last layer.
    """
    make = lookup(NORMS, norm, "norm")
    inner = hidden or width
    parts: list[nn.Module] = []
    for number in range(layers):
        last = number == layers - 1
        before, after = width if number == 0 else inner, out if last else inner
        parts.append(nn.Linear(before, after))
        if not last:
            parts += [make(after), nn.ReLU()]
        elif last_norm and norm == "batch":
            parts.append(nn.BatchNorm1d(after, affine=False))
    return nn.Sequential(*parts)


def unit(rows: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
    """Rows of norm 1, at least float32."""
    return F.normalize(as_float_tensor(rows), dim=1)


def together(network: nn.Module, views: Sequence[Tensor]) -> list[Tensor]:
    """All views through a network at once, and apart again."""
    return list(network(torch.cat(list(views))).split([len(view) for view in views]))


def refuse_few_views(views: Any, least: int = 2, most: int | None = None) -> None:
    """ValueError where a method gets another number of views than it can use, or views of different rows."""
    wanted = f"{least}" if most == least else f"at least {least}" if most is None else f"{least} to {most}"
    if isinstance(views, Tensor) or len(views) < least or (most is not None and len(views) > most):
        got = f"one tensor {tuple(views.shape)}" if isinstance(views, Tensor) else f"{len(views)} views"
        raise ValueError(f"expected {wanted} views in a list, got {got}")
    counts = [len(view) for view in views]
    if len(set(counts)) > 1:
        raise ValueError(f"views must be of the same rows, got {counts} rows")


def frozen_copy(module: nn.Module) -> nn.Module:
    """A copy that no gradient and no optimiser moves: a momentum target."""
    return deepcopy(module).requires_grad_(False)


@torch.no_grad()
def follow(target: nn.Module, online: nn.Module, momentum: float) -> None:
    """target = momentum * target + (1 - momentum) * online; buffers, such as running means, are copied."""
    for parameter, towards in zip(target.parameters(), online.parameters(), strict=True):
        parameter.lerp_(towards, 1 - momentum)
    for buffer, seen in zip(target.buffers(), online.buffers(), strict=True):
        buffer.copy_(seen)


def checked_momentum(momentum: float) -> float:
    """In [0, 1]."""
    if not 0 <= momentum <= 1:
        raise ValueError(f"momentum must lie in [0, 1], got {momentum}")
    return momentum


def checked_rows(rows: Tensor | None, count: int, size: int, method: str) -> Tensor:
    """(n,) positions in a dataset of `size` rows; ValueError says what is wrong."""
    if rows is None or tuple(rows.shape) != (count,):
        got = None if rows is None else tuple(rows.shape)
        raise ValueError(f"{method} needs rows, ({count},) positions in the dataset, got {got}")
    if len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < size:
        raise ValueError(f"{method}: rows from {int(rows.min())} to {int(rows.max())}; it was made for {size} rows")
    return rows.long()


def over_ranks(loss: Tensor, rows: int) -> Tensor:
    """A mean over this process's rows as that over the rows of all; gradients are right after averaging over ranks."""
    return mean_of_ranks(loss, rows) if many_ranks() else loss


def of_all_ranks(rows: dict[str, Tensor]) -> tuple[dict[str, Tensor], slice]:
    """(the rows of all processes, where there are several, and which of them are this one's own)."""
    return gather_rows(rows) if many_ranks() else (rows, slice(0, len(next(iter(rows.values())))))


def many_ranks() -> bool:
    """Whether several processes train together."""
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1
