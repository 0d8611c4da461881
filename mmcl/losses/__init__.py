"""Losses: pure functions from embeddings to a number in nats. They never see a model."""

from collections.abc import Callable

from torch import Tensor

from mmcl.losses.pairs import info_nce
from mmcl.losses.tuples import contrastive_loss, joint_loss, pairwise_loss

TUPLE_LOSSES: dict[str, Callable[..., Tensor]] = {
    "contrastive": contrastive_loss,
    "joint": joint_loss,
    "pairwise": pairwise_loss,
}
"""What `fit(loss=...)`, recipes and `mmcl list losses` choose from: (score, embeddings, **options) -> ()."""

__all__ = ["TUPLE_LOSSES", "contrastive_loss", "info_nce", "joint_loss", "pairwise_loss"]
