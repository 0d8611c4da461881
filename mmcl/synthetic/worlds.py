"""Latent worlds: where latents live, and how the second view of one is drawn. All randomness from one generator.

`processes` maps latents to what an encoder sees. Rows are float64; cast them where a network takes less.
"""

import functools
import math
from collections.abc import Callable

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from mmcl.tables import lookup

MOST_ROUNDS = 10_000
NODES = 96
"""Of the quadrature along a ray; the integrand is a power times a bell."""


def uniform_sphere(count: int, dim: int, generator: torch.Generator) -> Float[Tensor, "n d"]:
    """Rows uniform on the unit sphere of R^dim."""
    return F.normalize(_normal((count, dim), generator), dim=1)


def uniform_box(count: int, dim: int, generator: torch.Generator) -> Float[Tensor, "n d"]:
    """Rows uniform in [-1, 1]^dim."""
    return 2 * _uniform((count, dim), generator) - 1


LATENTS: dict[str, Callable[[int, int, torch.Generator], Tensor]] = {"sphere": uniform_sphere, "box": uniform_box}


def von_mises_fisher(means: Float[Tensor, "n d"], kappa: float, generator: torch.Generator) -> Float[Tensor, "n d"]:
    """One draw around each unit row, density proportional to exp(kappa <mean, x>); kappa >= 0, d >= 2.

    Source: d = 3 in closed form, Ulrich 1984; others by Wood 1994's rejection.
    """
    n, d = means.shape
    if kappa < 0 or d < 2:
        raise ValueError(f"kappa must be >= 0 and rows at least 2 wide, got {kappa} and {d}")
    if d == 3 and kappa:
        u = _uniform((n,), generator)
        heights = 1 + torch.log(u + (1 - u) * math.exp(-2 * kappa)) / kappa
    else:
        heights = _wood_heights(n, d, kappa, generator)
    around = _normal((n, d), generator)
    around = F.normalize(around - (around * means).sum(1, keepdim=True) * means, dim=1)
    rows = heights.unsqueeze(1) * means + (1 - heights.square()).clamp(min=0).sqrt().unsqueeze(1) * around
    return F.normalize(rows, dim=1)


def _wood_heights(count: int, d: int, kappa: float, generator: torch.Generator) -> Float[Tensor, " n"]:
    b = (-2 * kappa + math.sqrt(4 * kappa**2 + (d - 1) ** 2)) / (d - 1)
    x0 = (1 - b) / (1 + b)
    c = kappa * x0 + (d - 1) * math.log(1 - x0**2)

    def propose(rows: Tensor) -> tuple[Tensor, Tensor]:
        z = _beta((d - 1) / 2, (len(rows),), generator)
        w = (1 - (1 + b) * z) / (1 - (1 - b) * z)
        return w.unsqueeze(1), kappa * w + (d - 1) * torch.log(1 - x0 * w) - c

    return _rejection(torch.zeros(count, 1, dtype=torch.float64), propose, generator)[:, 0]


def normal_around(
    means: Float[Tensor, "n d"], concentration: Float[Tensor, " d"], generator: torch.Generator
) -> Float[Tensor, "n d"]:
    """One draw around each row from the normal of precision diag(concentration), kept in the box [-1, 1]^d."""
    scales = concentration.double().rsqrt()
    return _kept_in_box(means, lambda rows: rows + scales * _normal(tuple(rows.shape), generator))


def laplace_around(
    means: Float[Tensor, "n d"], concentration: Float[Tensor, " d"], generator: torch.Generator
) -> Float[Tensor, "n d"]:
    """One draw around each row, density proportional to exp(-<concentration, |x - mean|>), kept in [-1, 1]^d."""

    def draw(rows: Tensor) -> Tensor:
        u = _uniform(tuple(rows.shape), generator) - 0.5
        return rows - u.sign() * torch.log1p(-2 * u.abs()) / concentration.double()

    return _kept_in_box(means, draw)


def anisotropic_on_sphere(
    means: Float[Tensor, "n d"], concentration: Float[Tensor, " d"], generator: torch.Generator
) -> Float[Tensor, "n d"]:
    """One draw on the sphere around each row m, density proportional to exp(-(x - m)' diag(concentration) (x - m) / 2).

    Exact, by rejection from the direction of a normal draw, whose density along a ray is an integral over its length.
    All entries equal to kappa, it is the von Mises-Fisher distribution of that kappa.
    """
    scales = concentration.double()
    if tuple(scales.shape) != (means.shape[1],) or not (scales > 0).all():
        raise ValueError(f"concentration must be ({means.shape[1]},) positive numbers, got {concentration.tolist()}")
    bound = _log_ratio_bound(scales, means.shape[1])

    def propose(rows: Tensor) -> tuple[Tensor, Tensor]:
        x = F.normalize(rows + scales.rsqrt() * _normal(tuple(rows.shape), generator), dim=1)
        a, b = (x.square() @ scales), (x * rows) @ scales
        return x, log_ratio(a, b, rows.shape[1]) - bound

    return _rejection(means.double(), propose, generator)


def log_ratio(a: Float[Tensor, "*n"], b: Float[Tensor, "*n"], d: int) -> Float[Tensor, "*n"]:
    """Log of the target over the proposal, for a = x'Lx and b = x'Lm, up to a constant of the mean."""
    nodes, weights = _legendre()
    longest = (b / a).clamp(min=0) + 9 / a.sqrt() + d**0.5 / a.sqrt()
    r = longest.unsqueeze(-1) * nodes
    exponent = (d - 1) * torch.log(r) - 0.5 * r.square() * a.unsqueeze(-1) + r * b.unsqueeze(-1)
    integral = torch.logsumexp(exponent + torch.log(weights), dim=-1) + torch.log(longest)
    return -0.5 * a + b - integral


def _log_ratio_bound(scales: Float[Tensor, " d"], d: int) -> float:
    """The most that the ratio can be: a lies between the least and the largest scale, |b| below sqrt(a * largest)."""
    a = torch.linspace(float(scales.min()), float(scales.max()), 60, dtype=torch.float64).unsqueeze(1)
    b = torch.linspace(-1, 1, 240, dtype=torch.float64) * torch.sqrt(a * scales.max())
    return float(log_ratio(a.expand_as(b), b, d).max()) + 0.01


def circle_around(
    latents: Float[Tensor, "n 3"], kappa: float, generator: torch.Generator, by_radius: bool = False
) -> Float[Tensor, "n 3"]:
    """One draw around each row of S^2 on its slice: the first coordinate is held, the angle of the others varies.

    Args:
        kappa: of the angle's von Mises distribution; 0 is uniform on the slice.
        by_radius: kappa times the squared radius of the slice, which is the von Mises-Fisher density there.
    """
    height, rest = latents[:, :1], latents[:, 1:]
    radius = rest.norm(dim=1)
    kappas = kappa * radius.square() if by_radius else torch.full_like(radius, kappa)
    angles = torch.atan2(rest[:, 1], rest[:, 0]) + von_mises(kappas, generator)
    return torch.cat([height, radius.unsqueeze(1) * torch.stack([angles.cos(), angles.sin()], dim=1)], dim=1)


def von_mises(kappas: Float[Tensor, " n"], generator: torch.Generator) -> Float[Tensor, " n"]:
    """Angles around 0, density proportional to exp(kappa cos(angle)), a kappa each (Best and Fisher 1979)."""
    tau = 1 + torch.sqrt(1 + 4 * kappas.double().square())
    rho = (tau - torch.sqrt(2 * tau)) / (2 * kappas.double().clamp(min=1e-9))
    r = torch.where(kappas > 1e-6, (1 + rho.square()) / (2 * rho.clamp(min=1e-12)), torch.full_like(rho, torch.inf))

    def propose(rows: Tensor) -> tuple[Tensor, Tensor]:
        kappa, r = rows[:, 0], rows[:, 1]
        z = torch.cos(math.pi * _uniform((len(rows),), generator))
        flat = torch.isinf(r)
        f = torch.where(flat, z, (1 + r * z) / (r + z))
        c = torch.where(flat, torch.zeros_like(z), kappa * (r - f))
        log_accept = torch.where(flat, torch.zeros_like(z), torch.log(c) + 1 - c)
        sign = torch.where(_uniform((len(rows),), generator) < 0.5, -1.0, 1.0)
        return (sign * torch.acos(f.clamp(-1, 1))).unsqueeze(1), log_accept

    return _rejection(torch.stack([kappas.double(), r], dim=1), propose, generator, width=1)[:, 0]


CONDITIONALS: dict[str, Callable[..., Tensor]] = {
    "von_mises_fisher": von_mises_fisher,
    "anisotropic_on_sphere": anisotropic_on_sphere,
    "normal": normal_around,
    "laplace": laplace_around,
    "circle": circle_around,
}
"""How the second view's latent is drawn: (means, concentration, generator) -> rows."""


def pairs(
    latents: str, conditional: str, count: int, dim: int, concentration: float | Tensor, generator: torch.Generator
) -> tuple[Float[Tensor, "n d"], Float[Tensor, "n d"]]:
    """(anchors, positives): latents of a world and the second view of each."""
    z = lookup(LATENTS, latents, "latents")(count, dim, generator)
    return z, lookup(CONDITIONALS, conditional, "conditional")(z, concentration, generator)


def _rejection(
    rows: Float[Tensor, "n d"],
    propose: Callable[[Tensor], tuple[Tensor, Tensor]],
    generator: torch.Generator,
    width: int | None = None,
) -> Float[Tensor, "n w"]:
    """Of each row the first proposal that is accepted; propose: rows -> (proposals, log of the chance)."""
    out = rows.new_empty(len(rows), rows.shape[1] if width is None else width)
    open_rows = torch.arange(len(rows))
    for _ in range(MOST_ROUNDS):
        if not len(open_rows):
            return out
        proposals, log_chance = propose(rows[open_rows])
        taken = torch.log(_uniform((len(open_rows),), generator)) < log_chance
        out[open_rows[taken]] = proposals[taken]
        open_rows = open_rows[~taken]
    raise RuntimeError(f"{len(open_rows)} of {len(rows)} rows found no draw in {MOST_ROUNDS} rounds")


def _kept_in_box(means: Float[Tensor, "n d"], draw: Callable[[Tensor], Tensor]) -> Float[Tensor, "n d"]:
    """Draws again, coordinate by coordinate, what falls outside [-1, 1]."""
    rows = draw(means.double())
    for _ in range(MOST_ROUNDS):
        outside = rows.abs() > 1
        if not outside.any():
            return rows
        rows = torch.where(outside, draw(means.double()), rows)
    raise RuntimeError(f"means outside [-1, 1], or a concentration too small, after {MOST_ROUNDS} rounds")


@functools.cache
def _legendre() -> tuple[Tensor, Tensor]:
    """Nodes and weights of Gauss-Legendre quadrature on [0, 1]."""
    nodes, weights = np.polynomial.legendre.leggauss(NODES)
    return torch.from_numpy((nodes + 1) / 2), torch.from_numpy(weights / 2)


def _normal(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def _uniform(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.rand(shape, generator=generator, dtype=torch.float64)


def _beta(shape: float, size: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Beta(shape, shape), as a ratio of sums of squares."""
    first, second = (_normal((*size, round(2 * shape)), generator).square().sum(-1) for _ in range(2))
    return first / (first + second)
