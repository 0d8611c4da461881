"""Contrastive predictive coding: what comes next in a sequence, from what has been."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from mmcl.losses.pairs import info_nce
from mmcl.methods.base import Method, over_ranks, refuse_few_views


class CPC(Method):
    """Latents of a sequence's next steps, predicted from an autoregressive context, among those of the whole batch.

    Args:
        encoder: (n, ...) inputs -> (n, steps, width) latents, each of its own stretch of the input.
        width: of the latents.
        context: of the recurrent network's state; the last is what is kept of a sequence.
        ahead: steps that are predicted, each by a matrix of its own.
    Source: van den Oord et al. 2018. The scores are z' W c, not normalised.
    """

    def __init__(self, encoder: nn.Module, width: int, context: int = 128, ahead: int = 4):
        super().__init__(encoder, width)
        if ahead < 1:
            raise ValueError(f"ahead must be at least 1, got {ahead}")
        self.recurrent = nn.GRU(width, context, batch_first=True)
        self.predict = nn.ModuleList([nn.Linear(context, width, bias=False) for _ in range(ahead)])

    def contexts(self, view: Tensor) -> tuple[Float[Tensor, "n steps width"], Float[Tensor, "n steps context"]]:
        """(latents, contexts); the context of a step has seen the latents up to it and none after."""
        latents = self.encoder(view)
        if latents.ndim != 3 or latents.shape[2] != self.width:
            raise ValueError(f"CPC's encoder must give (n, steps, {self.width}), got {tuple(latents.shape)}")
        return latents, self.recurrent(latents)[0]

    def forward(self, views: Any, rows: Tensor | None = None, labels: Tensor | None = None) -> Tensor:
        """Mean over the steps ahead, and over views, of InfoNCE over all positions of this process's batch."""
        refuse_few_views(views, 1)
        losses = []
        for view in views:
            latents, contexts = self.contexts(view)
            if latents.shape[1] <= len(self.predict):
                raise ValueError(f"{latents.shape[1]} steps leave nothing to predict {len(self.predict)} ahead")
            for ahead, predict in enumerate(self.predict, start=1):
                guessed = predict(contexts[:, :-ahead]).flatten(0, 1)
                losses.append(info_nce(guessed, latents[:, ahead:].flatten(0, 1)))
        return over_ranks(torch.stack(losses).mean(), len(views[0]))
