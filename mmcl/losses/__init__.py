"""Losses: pure functions from embeddings to a number in nats. They never see a model."""

from collections.abc import Callable

from torch import Tensor

from mmcl.losses.anisotropic import an_info_nce, an_info_nce_ensemble, support_corrected_info_nce
from mmcl.losses.clusters import sinkhorn, swapped_predictions, swav_swapped
from mmcl.losses.correlation import barlow_twins
from mmcl.losses.pairs import byol_regression, info_nce, moco, triplet
from mmcl.losses.tuples import contrastive_loss, joint_loss, pairwise_loss
from mmcl.losses.views import nt_xent, sup_con

TUPLE_LOSSES: dict[str, Callable[..., Tensor]] = {
    "contrastive": contrastive_loss,
    "joint": joint_loss,
    "pairwise": pairwise_loss,
}
"""What `fit(loss=...)`, recipes and `mmcl list losses` choose from: (score, embeddings, **options) -> ()."""

PAIR_LOSSES: dict[str, Callable[..., Tensor]] = {
    function.__name__: function
    for function in (
        info_nce,
        nt_xent,
        sup_con,
        moco,
        triplet,
        byol_regression,
        barlow_twins,
        swav_swapped,
        an_info_nce,
        support_corrected_info_nce,
    )
}
"""Losses of one embedding space, (n, d) tensors in: what `mmcl.methods` and programs of one's own are made of."""

__all__ = [
    "PAIR_LOSSES",
    "TUPLE_LOSSES",
    "an_info_nce_ensemble",
    "contrastive_loss",
    "joint_loss",
    "pairwise_loss",
    "sinkhorn",
    "swapped_predictions",
    *PAIR_LOSSES,
]
