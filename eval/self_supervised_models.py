"""Encoders for small pictures, and methods with a part taken away."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mmcl.methods import BYOL, SimCLR, SimSiam

Shape = tuple[int, ...]


def cnn(shape: Shape) -> tuple[nn.Module, int]:
    """Four convolutions, then the mean over places."""
    parts: list[nn.Module] = []
    for before, after, stride in ((shape[0], 32, 1), (32, 48, 1), (48, 96, 2), (96, 128, 2)):
        parts += [nn.Conv2d(before, after, 3, stride, 1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
    return nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten()), 128


def mlp(shape: Shape, width: int = 256) -> tuple[nn.Module, int]:
    """Three layers over the pixels: it knows nothing of places."""
    pixels = shape[0] * shape[1] * shape[2]
    parts: list[nn.Module] = [nn.Flatten()]
    for before in (pixels, width, width):
        parts += [nn.Linear(before, width), nn.BatchNorm1d(width), nn.ReLU()]
    return nn.Sequential(*parts), width


class ViT(nn.Module):
    """Patches, learned places, transformer layers, the mean over patches."""

    def __init__(self, shape: Shape, width: int, layers: int, patch: int):
        super().__init__()
        self.patches = nn.Conv2d(shape[0], width, patch, patch)
        self.places = nn.Parameter(0.02 * torch.randn(1, (shape[1] // patch) * (shape[2] // patch), width))
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, nn.LayerNorm(width), enable_nested_tensor=False)

    def forward(self, images: Tensor) -> Tensor:
        return self.layers(self.patches(images).flatten(2).transpose(1, 2) + self.places).mean(1)


def vit(shape: Shape, width: int = 64, layers: int = 3) -> tuple[nn.Module, int]:
    """A small vision transformer, patches of a quarter of the side."""
    return ViT(shape, width, layers, max(shape[1] // 4, 1)), width


def resnet18(shape: Shape) -> tuple[nn.Module, int]:
    """torchvision's, with the stem that small pictures take: 3x3, no pooling."""
    from torchvision.models import resnet18 as build

    network = build(weights=None)
    network.conv1 = nn.Conv2d(shape[0], 64, 3, 1, 1, bias=False)
    network.maxpool, network.fc = nn.Identity(), nn.Identity()
    return network, 512


ENCODERS: dict[str, Callable[[Shape], tuple[nn.Module, int]]] = {
    "cnn": cnn,
    "mlp": mlp,
    "vit": vit,
    "resnet18": resnet18,
}


class PositivesAlone(SimCLR):
    """SimCLR's numerator: -cos / temperature."""

    def forward(self, views: Any, rows: Tensor | None = None, labels: Tensor | None = None) -> Tensor:
        a, b = self.project(views)
        return -(a * b).sum(1).mean() / self.temperature


class NoStop(SimSiam):
    """SimSiam with a gradient through both sides."""

    def forward(self, views: Any, rows: Tensor | None = None, labels: Tensor | None = None) -> Tensor:
        z = [self.head(self.encoder(view)) for view in views]
        p = [self.predictor(each) for each in z]
        return 2 - sum(F.cosine_similarity(p[i], z[1 - i]).mean() for i in (0, 1))


class NoPredictor(BYOL):
    """BYOL whose projection itself has to meet the target."""

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self.predictor = nn.Identity()


WITHOUT: dict[str, Callable[..., Any]] = {
    "negatives": PositivesAlone,
    "stop_gradient": NoStop,
    "predictor": NoPredictor,
}
