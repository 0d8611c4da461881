"""Encoders for methods: any classifier of torchvision without its last layer, and frames of sound for CPC."""

from jaxtyping import Float
from torch import Tensor, nn

SMALL = 64
"""Pixels a side up to which a ResNet takes the stem for small pictures: 3 x 3, no pooling."""


def torchvision_encoder(name: str = "resnet18", size: int = 32) -> tuple[nn.Module, int]:
    """A classifier of torchvision, untrained, without its last linear layer, and the width of its features.

    Args:
        name: such as resnet18, resnet50, vit_b_16, convnext_tiny, mobilenet_v3_small.
        size: of the pictures.
    Raises: KeyError listing names that are near.
    """
    from difflib import get_close_matches

    from torchvision import models

    known = models.list_models(module=models)
    if name not in known:
        raise KeyError(f"torchvision has no classifier {name!r}; near: {get_close_matches(name, known, 5, 0.3)}")
    options = {"image_size": size} if name.startswith("vit") else {}
    network = models.get_model(name, weights=None, **options)
    if name.startswith("resne") and size <= SMALL:
        network.conv1 = nn.Conv2d(3, 64, 3, 1, 1, bias=False)
        network.maxpool = nn.Identity()
    path = [path for path, module in network.named_modules() if isinstance(module, nn.Linear)][-1]
    parent, _, last = path.rpartition(".")
    width = network.get_submodule(path).in_features
    setattr(network.get_submodule(parent), last, nn.Identity())
    return network, int(width)


class WaveEncoder(nn.Module):
    """Waves (n, samples) -> (n, steps, width): strided convolutions, a step every product of the strides.

    Args:
        width: of a step's latent.
        strides: of the layers; at 8 kHz (5, 4, 4, 2) make a step of 20 ms.
    Source: van den Oord et al. 2018, section 3.1, with group norm as in wav2vec (Schneider et al. 2019).
    """

    def __init__(self, width: int = 128, strides: tuple[int, ...] = (5, 4, 4, 2)):
        super().__init__()
        self.width = width
        parts: list[nn.Module] = []
        for number, stride in enumerate(strides):
            convolution = nn.Conv1d(width if number else 1, width, 2 * stride, stride, (stride + 1) // 2, bias=False)
            parts += [convolution, nn.GroupNorm(1, width), nn.ReLU()]
        self.layers = nn.Sequential(*parts)

    def forward(self, waves: Float[Tensor, "n samples"]) -> Float[Tensor, "n steps width"]:
        level = waves.std(1, keepdim=True).clamp(min=1e-5)
        return self.layers(((waves - waves.mean(1, keepdim=True)) / level).unsqueeze(1)).transpose(1, 2)
