"""How latents become observations, exactly invertible; and encoders built as each process's inverse is.

`PROCESSES[name](dim, seed)` is the process, `MIRRORS[name](process, seed)` an encoder of the inverse's form whose
numbers are to be learned. `mlp_encoder` is the one that knows nothing of the process.
"""

import math
from collections.abc import Callable
from itertools import pairwise

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

WORST_CONDITION = 2.0
"""Largest condition number of a random linear layer."""


class Process(nn.Module):
    """Latents (n, dim) to observations (n, dim), and back by `inverse`; its random numbers come from `seed`."""

    def __init__(self, dim: int, seed: int = 0):
        super().__init__()
        self.dim = dim

    def inverse(self, x: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
        """The latents of observations."""
        raise NotImplementedError


class Identity(Process):
    """x = z."""

    def forward(self, z: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
        return z

    def inverse(self, x: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
        return x


class Linear(Process):
    """x = A z."""

    def __init__(self, dim: int, seed: int = 0):
        super().__init__(dim)
        self.matrix: Tensor
        self.register_buffer("matrix", well_conditioned(dim, torch.Generator().manual_seed(seed)))

    def forward(self, z: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
        return z @ self.matrix.to(z).T

    def inverse(self, x: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
        return torch.linalg.solve(self.matrix.to(x), x.T).T


class Spiral(Process):
    """The first two coordinates turn by an angle that grows with the last: a twist around the last axis."""

    def __init__(self, dim: int, seed: int = 0, pitch: float = math.pi / 2):
        super().__init__(dim)
        if dim < 3:
            raise ValueError(f"a spiral needs 3 coordinates, got {dim}")
        self.pitch = pitch

    def forward(self, z: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
        return twisted(z, self.pitch)

    def inverse(self, x: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
        return twisted(x, -self.pitch)


class Patches(Process):
    """Each octant of the first three coordinates is scaled by a number of its own and moved to a place of its own."""

    def __init__(self, dim: int, seed: int = 0, distance: float = 1.0):
        super().__init__(dim)
        generator = torch.Generator().manual_seed(seed)
        self.bits = min(dim, 3)
        signs = [torch.tensor([-1.0, 1.0], dtype=torch.float64)] * self.bits
        corners = torch.cartesian_prod(*signs).reshape(-1, self.bits)
        centres = torch.zeros(len(corners), dim, dtype=torch.float64)
        centres[:, : self.bits] = distance * corners
        self.centres: Tensor
        self.scales: Tensor
        self.register_buffer("centres", centres)
        self.register_buffer("scales", 0.5 + torch.rand(len(corners), generator=generator, dtype=torch.float64))

    def forward(self, z: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
        weights = 2 ** torch.arange(self.bits - 1, -1, -1)
        patch = ((z[:, : self.bits] >= 0).long() * weights).sum(1)
        return self.scales.to(z)[patch].unsqueeze(1) * z + self.centres.to(z)[patch]

    def patch(self, x: Float[Tensor, "n d"]) -> Tensor:
        """Which patch an observation lies in: that of the nearest place."""
        return torch.cdist(x, self.centres.to(x)).argmin(1)

    def inverse(self, x: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
        patch = self.patch(x)
        return (x - self.centres.to(x)[patch]) / self.scales.to(x)[patch].unsqueeze(1)


class InvertibleMLP(Process):
    """Square layers without bias, leaky ReLU between them."""

    def __init__(self, dim: int, seed: int = 0, layers: int = 3, slope: float = 0.2):
        super().__init__(dim)
        generator = torch.Generator().manual_seed(seed)
        self.slope = slope
        self.layers: Tensor
        self.register_buffer("layers", torch.stack([well_conditioned(dim, generator) for _ in range(layers)]))

    def forward(self, z: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
        for number, layer in enumerate(self.layers.to(z)):
            z = (F.leaky_relu(z, self.slope) if number else z) @ layer.T
        return z

    def inverse(self, x: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
        for number, layer in enumerate(reversed(self.layers.to(x))):
            x = torch.linalg.solve(layer, (F.leaky_relu(x, 1 / self.slope) if number else x).T).T
        return x


class Unit(nn.Module):
    """Rows scaled to norm 1."""

    def forward(self, rows: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
        return F.normalize(rows, dim=1)


class LearnedTwist(nn.Module):
    """The inverse of a spiral of unknown pitch."""

    def __init__(self) -> None:
        super().__init__()
        self.pitch = nn.Parameter(torch.zeros(()))

    def forward(self, x: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
        return twisted(x, -self.pitch)


class LearnedPatches(nn.Module):
    """The inverse of patches whose places are known roughly and whose scales are not: a shift and a scale a patch."""

    def __init__(self, process: Patches, generator: torch.Generator):
        super().__init__()
        self.process = process
        noise = 0.1 * torch.randn(process.centres.shape, generator=generator)
        self.shifts = nn.Parameter(process.centres.float() + noise)
        self.log_scales = nn.Parameter(torch.zeros(len(process.centres)))

    def forward(self, x: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
        patch = self.process.patch(x)
        return (x - self.shifts[patch]) * torch.exp(self.log_scales)[patch].unsqueeze(1)


def square_layer(dim: int, generator: torch.Generator) -> nn.Linear:
    """A linear layer without bias that starts as a random rotation."""
    layer = nn.Linear(dim, dim, bias=False)
    with torch.no_grad():
        layer.weight.copy_(rotation(dim, generator))
    return layer


def linear_mirror(process: Process, seed: int = 0) -> nn.Module:
    """Of identity and linear: a matrix."""
    return nn.Sequential(square_layer(process.dim, torch.Generator().manual_seed(seed)), Unit())


def spiral_mirror(process: Process, seed: int = 0) -> nn.Module:
    """A twist back, then a matrix."""
    return nn.Sequential(LearnedTwist(), square_layer(process.dim, torch.Generator().manual_seed(seed)), Unit())


def patches_mirror(process: Patches, seed: int = 0) -> nn.Module:
    """The patches back in place, then a matrix."""
    generator = torch.Generator().manual_seed(seed)
    return nn.Sequential(LearnedPatches(process, generator), square_layer(process.dim, generator), Unit())


def invertible_mirror(process: InvertibleMLP, seed: int = 0) -> nn.Module:
    """As many square layers, the inverse leaky ReLU between them."""
    generator = torch.Generator().manual_seed(seed)
    parts: list[nn.Module] = []
    for number in range(len(process.layers)):
        parts += [nn.LeakyReLU(1 / process.slope)] * bool(number) + [square_layer(process.dim, generator)]
    return nn.Sequential(*parts, Unit())


PROCESSES: dict[str, Callable[..., Process]] = {
    "identity": Identity,
    "linear": Linear,
    "spiral": Spiral,
    "patches": Patches,
    "invertible_mlp": InvertibleMLP,
}
MIRRORS: dict[str, Callable[..., nn.Module]] = {
    "identity": linear_mirror,
    "linear": linear_mirror,
    "spiral": spiral_mirror,
    "patches": patches_mirror,
    "invertible_mlp": invertible_mirror,
}


def mlp_encoder(
    dim: int, out: int | None = None, hidden: int = 64, layers: int = 3, unit: bool = True
) -> nn.Sequential:
    """Hidden layers with leaky ReLU and a linear last one; unit rows unless `unit` is False.

    Draws from torch's generator. Biases start at 0: then the rows of a start go all around the sphere, and fewer runs
    end in a folded map.
    """
    widths = [dim, *[hidden] * layers]
    parts: list[nn.Module] = []
    for before, after in pairwise(widths):
        parts += [nn.Linear(before, after), nn.LeakyReLU(0.2)]
    parts += [nn.Linear(widths[-1], dim if out is None else out), *([Unit()] if unit else [])]
    for part in parts:
        if isinstance(part, nn.Linear):
            nn.init.zeros_(part.bias)
    return nn.Sequential(*parts)


def fourier_encoder(dim: int, frequency: float = 15.0, features: int = 256, hidden: int = 64) -> nn.Sequential:
    """A perceptron on random Fourier features, which sees fine structure at once; unit rows.

    Args:
        frequency: standard deviation of the features' frequencies.
    Source: Tancik et al. 2020.
    """
    return nn.Sequential(Waves(dim, features, frequency), *mlp_encoder(features, dim, hidden, layers=2))


class Waves(nn.Module):
    """sin(Wx + b), W normal and b uniform at the start; both are learned."""

    def __init__(self, dim: int, features: int, frequency: float):
        super().__init__()
        self.linear = nn.Linear(dim, features)
        nn.init.normal_(self.linear.weight, std=frequency)
        nn.init.uniform_(self.linear.bias, -math.pi, math.pi)

    def forward(self, x: Float[Tensor, "n d"]) -> Float[Tensor, "n features"]:
        return torch.sin(self.linear(x))


def twisted(rows: Float[Tensor, "n d"], pitch: float | Tensor) -> Float[Tensor, "n d"]:
    """The first two coordinates turned by pitch times the last."""
    angle = pitch * rows[:, -1]
    c, s = torch.cos(angle), torch.sin(angle)
    turned = torch.stack([c * rows[:, 0] - s * rows[:, 1], s * rows[:, 0] + c * rows[:, 1]], dim=1)
    return torch.cat([turned, rows[:, 2:]], dim=1)


def rotation(dim: int, generator: torch.Generator) -> Float[Tensor, "d d"]:
    """A rotation or reflection, uniform over all of them."""
    q, r = torch.linalg.qr(torch.randn(dim, dim, generator=generator, dtype=torch.float64))
    return q * torch.sign(torch.diagonal(r))


def well_conditioned(dim: int, generator: torch.Generator, worst: float = WORST_CONDITION) -> Float[Tensor, "d d"]:
    """A random matrix whose singular values lie between 1 / sqrt(worst) and sqrt(worst)."""
    low, high = -0.5 * math.log(worst), 0.5 * math.log(worst)
    values = torch.exp(low + (high - low) * torch.rand(dim, generator=generator, dtype=torch.float64))
    return rotation(dim, generator) @ torch.diag(values) @ rotation(dim, generator)
