"""Contrastive methods over one kind of data: what a loss alone cannot hold, such as queues, targets and clusters.

method = MoCo(encoder, width=512)
pretrain(method, ImageSource(dataset, "photo"), epochs=100, out="runs/photos")

or, in a loop of one's own,

loss = method(views)          # then backward and an optimiser step over method.trained_parameters()
method.after_step()
"""

from mmcl.methods.base import Method
from mmcl.methods.clusters import DeepCluster, SwAV
from mmcl.methods.contrast import BarlowTwins, SimCLR, SupCon, Triplet
from mmcl.methods.cpc import CPC
from mmcl.methods.memory import MemoryBank, MoCo
from mmcl.methods.targets import BYOL, SimSiam
from mmcl.methods.training import PretrainResult, PretrainSettings, features, pretrain
from mmcl.methods.views import REGIMES, AudioSource, ImageSource, RandomViews, TensorSource

METHODS: dict[str, type[Method]] = {
    "simclr": SimCLR,
    "memory_bank": MemoryBank,
    "moco": MoCo,
    "byol": BYOL,
    "simsiam": SimSiam,
    "barlow_twins": BarlowTwins,
    "deep_cluster": DeepCluster,
    "swav": SwAV,
    "sup_con": SupCon,
    "triplet": Triplet,
    "cpc": CPC,
}
"""What recipes and `mmcl list methods` choose from. A new method is a class and one row."""

__all__ = [
    "BYOL",
    "CPC",
    "METHODS",
    "REGIMES",
    "AudioSource",
    "BarlowTwins",
    "DeepCluster",
    "ImageSource",
    "MemoryBank",
    "Method",
    "MoCo",
    "PretrainResult",
    "PretrainSettings",
    "RandomViews",
    "SimCLR",
    "SimSiam",
    "SupCon",
    "SwAV",
    "TensorSource",
    "Triplet",
    "features",
    "pretrain",
]
