"""Views that predict each other without a negative: BYOL with a momentum target, SimSiam with none."""

from typing import Any

import torch
from torch import Tensor, nn

from mmcl.losses.pairs import byol_regression
from mmcl.methods.base import Method, checked_momentum, follow, frozen_copy, head, over_ranks, refuse_few_views


class BYOL(Method):
    """Each view's prediction of the other's projection by a slowly following target, both ways.

    The target gets no gradient and is in no optimiser; `after_step` moves it. Without the predictor the map collapses.

    Args:
        encoder, width: see `Method`; the target starts as a copy.
        dim: of projections.
        momentum: of the target.
        hidden, layers, norm: of projector and predictor.
    Source: Grill et al. 2020.
    """

    def __init__(
        self,
        encoder: nn.Module,
        width: int,
        dim: int = 128,
        momentum: float = 0.99,
        hidden: int | None = None,
        layers: int = 2,
        norm: str = "batch",
    ):
        super().__init__(encoder, width)
        self.head = head(width, dim, hidden, layers, norm)
        self.predictor: nn.Module = head(dim, dim, hidden or width, 2, norm)
        self.target_encoder, self.target_head = frozen_copy(encoder), frozen_copy(self.head)
        self.momentum = checked_momentum(momentum)

    def forward(self, views: Any, rows: Tensor | None = None, labels: Tensor | None = None) -> Tensor:
        """The mean of both directions' 2 - 2 cos."""
        refuse_few_views(views, 2, 2)
        predictions = [self.predictor(self.head(self.encoder(view))) for view in views]
        with torch.no_grad():
            targets = [self.target_head(self.target_encoder(view)) for view in views]
        loss = (byol_regression(predictions[0], targets[1]) + byol_regression(predictions[1], targets[0])) / 2
        return over_ranks(loss, len(views[0]))

    def after_step(self) -> None:
        follow(self.target_encoder, self.encoder, self.momentum)
        follow(self.target_head, self.head, self.momentum)


class SimSiam(Method):
    """Each view's prediction of the other's projection, through which no gradient flows.

    Args:
        encoder, width: see `Method`.
        dim: of projections.
        hidden, layers, norm: of the projector, which ends in a norm without scale; the predictor is a bottleneck.
    Source: Chen and He 2021.
    """

    def __init__(
        self,
        encoder: nn.Module,
        width: int,
        dim: int = 128,
        hidden: int | None = None,
        layers: int = 3,
        norm: str = "batch",
    ):
        super().__init__(encoder, width)
        self.head = head(width, dim, hidden, layers, norm, last_norm=True)
        self.predictor: nn.Module = head(dim, dim, max(dim // 4, 1), 2, norm)

    def forward(self, views: Any, rows: Tensor | None = None, labels: Tensor | None = None) -> Tensor:
        """The mean of both directions' 2 - 2 cos."""
        refuse_few_views(views, 2, 2)
        z = [self.head(self.encoder(view)) for view in views]
        loss = (byol_regression(self.predictor(z[0]), z[1]) + byol_regression(self.predictor(z[1]), z[0])) / 2
        return over_ranks(loss, len(views[0]))
