"""Rows of a batch against each other: SimCLR, SupCon, Barlow Twins."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mmcl.losses.correlation import barlow_twins
from mmcl.losses.pairs import refuse_lonely, triplet
from mmcl.losses.views import as_labels, nt_xent, sup_con
from mmcl.methods.base import Method, head, many_ranks, of_all_ranks, over_ranks, refuse_few_views, together, unit


class SimCLR(Method):
    """The other view of each image among all other views of the batch.

    Args:
        encoder, width: see `Method`.
        dim: of z, which the loss sees; the encoder's h is what is kept.
        temperature: of the loss.
        hidden, layers, norm: of the head.
    Source: Chen et al. 2020.
    """

    def __init__(
        self,
        encoder: nn.Module,
        width: int,
        dim: int = 128,
        temperature: float = 0.5,
        hidden: int | None = None,
        layers: int = 2,
        norm: str = "batch",
    ):
        super().__init__(encoder, width)
        self.head, self.temperature = head(width, dim, hidden, layers, norm), temperature

    def project(self, views: Sequence[Tensor]) -> list[Tensor]:
        """Unit rows z of each view."""
        return [unit(z) for z in together(nn.Sequential(self.encoder, self.head), views)]

    def forward(self, views: Any, rows: Tensor | None = None, labels: Tensor | None = None) -> Tensor:
        refuse_few_views(views)
        z = self.project(views)
        if len(z) == 2:
            return nt_xent(z[0], z[1], self.temperature, gather=many_ranks())
        images = torch.arange(len(z[0]), device=z[0].device) + _first_image(len(z[0]), z[0].device)
        return sup_con(torch.cat(z), images.repeat(len(z)), self.temperature, gather=many_ranks())


class SupCon(SimCLR):
    """SimCLR in which images of one label are each other's positives; an image without a label (-1) has its own views.

    Source: Khosla et al. 2020.
    """

    def __init__(
        self,
        encoder: nn.Module,
        width: int,
        dim: int = 128,
        temperature: float = 0.1,
        hidden: int | None = None,
        layers: int = 2,
        norm: str = "batch",
    ):
        super().__init__(encoder, width, dim, temperature, hidden, layers, norm)

    def forward(self, views: Any, rows: Tensor | None = None, labels: Tensor | None = None) -> Tensor:
        refuse_few_views(views)
        if labels is None:
            raise ValueError("SupCon needs labels, (n,) integers, -1 where an image has none")
        z = self.project(views)
        known = as_labels(labels, len(z[0]), z[0].device)
        alone = torch.arange(len(known), device=known.device) + _first_image(len(known), known.device) + 2**40
        return sup_con(
            torch.cat(z), torch.where(known < 0, alone, known).repeat(len(z)), self.temperature, gather=many_ranks()
        )


class Triplet(SimCLR):
    """Each image's other view nearer than another image of the batch, drawn at random, by a margin.

    Args:
        margin: in squared distance of unit rows, which lies between 0 and 4.
    Source: Schroff et al. 2015, without their choice of hard negatives.
    """

    def __init__(
        self,
        encoder: nn.Module,
        width: int,
        dim: int = 128,
        margin: float = 0.5,
        hidden: int | None = None,
        layers: int = 2,
        norm: str = "batch",
    ):
        super().__init__(encoder, width, dim, hidden=hidden, layers=layers, norm=norm)
        self.margin = margin

    def forward(self, views: Any, rows: Tensor | None = None, labels: Tensor | None = None) -> Tensor:
        refuse_few_views(views, 2, 2)
        refuse_lonely(len(views[0]))
        a, b = self.project(views)
        others = torch.arange(len(a)) + torch.randint(1, len(a), (len(a),))  # never the image itself
        return over_ranks(triplet(a, b, b[others % len(a)], self.margin), len(a))


class BarlowTwins(Method):
    """Features of two views that correlate with themselves alone.

    Args:
        encoder, width: see `Method`.
        dim: features whose correlation the loss takes; many help.
        lambd: weight of what lies off the diagonal.
        hidden, layers, norm: of the head.
    Source: Zbontar et al. 2021.
    """

    def __init__(
        self,
        encoder: nn.Module,
        width: int,
        dim: int = 256,
        lambd: float = 0.005,
        hidden: int | None = None,
        layers: int = 3,
        norm: str = "batch",
    ):
        super().__init__(encoder, width)
        self.head, self.lambd = head(width, dim, hidden, layers, norm), lambd

    def forward(self, views: Any, rows: Tensor | None = None, labels: Tensor | None = None) -> Tensor:
        refuse_few_views(views, 2, 2)
        a, b = together(nn.Sequential(self.encoder, self.head), views)
        return barlow_twins(a, b, self.lambd, gather=many_ranks())


def _first_image(count: int, device: torch.device) -> int:
    """How many images the ranks before this one hold."""
    return of_all_ranks({"images": torch.zeros(count, device=device)})[1].start
