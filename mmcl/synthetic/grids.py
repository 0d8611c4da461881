"""Continuous joints on a grid: nodes of a quadrature as values, so that sums over the table are integrals.

A `Grid` is a `Joint` whose probabilities are density times weight of the node; all that holds of tables, marginals,
conditionals, divergences and projections, then holds of the densities, to the precision of the quadrature: for analytic
densities it doubles its digits with every doubling of the nodes. Nats throughout.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float64
from torch import Tensor

from mmcl.synthetic.joints import Joint

NODES = 32


@dataclass(frozen=True)
class Grid(Joint):
    """A joint of modalities that are vectors of R^k.

    Args:
        points: {modality: (n_i, k) float64}, the node that stands for each value: what an encoder is given.
    """

    points: dict[str, Tensor]


def from_log_density(
    log_density: Callable[..., Tensor], axes: Sequence[tuple[Any, Any]], modalities: Sequence[str] | None = None
) -> Grid:
    """A grid from an unnormalised log density of m real numbers.

    Args:
        log_density: of m tensors that broadcast to (n_1, ..., n_m).
        axes: (nodes, weights) of a quadrature for each modality, (n_i,) each.
        modalities: names; None: "x1", ..., "xm".
    Raises: ValueError where the density is not finite at some node, or a weight is not positive.
    """
    nodes = [torch.as_tensor(nodes, dtype=torch.float64) for nodes, _ in axes]
    weights = [torch.as_tensor(weights, dtype=torch.float64) for _, weights in axes]
    if any(not (each > 0).all() for each in weights):
        raise ValueError("a quadrature needs weights above 0")
    logs = log_density(*torch.meshgrid(*nodes, indexing="ij"))
    for weight in torch.meshgrid(*[weight.log() for weight in weights], indexing="ij"):
        logs = logs + weight
    if not torch.isfinite(logs).all():
        raise ValueError("the log density must be finite at every node")
    names = tuple(f"x{axis + 1}" for axis in range(len(axes))) if modalities is None else tuple(modalities)
    table = torch.softmax(logs.flatten(), dim=0).reshape(logs.shape)
    return Grid(table, names, {name: node.unsqueeze(1) for name, node in zip(names, nodes, strict=True)})


def legendre(nodes: int = NODES, low: float = -1.0, high: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    """Nodes and weights of Gauss and Legendre on [low, high]; exact for polynomials below the degree 2 * nodes."""
    points, weights = np.polynomial.legendre.leggauss(nodes)
    half = (high - low) / 2
    return low + half * (points + 1), half * weights


def product_density(strength: float = 3.0, m: int = 3, nodes: int = NODES) -> Grid:
    """The density exp(strength * x_1 x_2 ... x_m) on [-1, 1]^m: one interaction, of the order m.

    Whatever is known of fewer than m - 1 others tells at most how large an x is; all of them tell its sign.
    """
    return from_log_density(lambda *x: strength * math.prod(x), [legendre(nodes)] * m)


def sample_product_density(
    count: int, strength: float = 3.0, m: int = 3, generator: torch.Generator | None = None
) -> dict[str, Float64[Tensor, "count 1"]]:
    """{modality: (count, 1)} draws from the density itself, not from a grid; by rejection from the uniform one."""
    drawn, found = torch.empty(0, m, dtype=torch.float64), 0
    while found < count:
        x = 2 * torch.rand(2 * count + 64, m, dtype=torch.float64, generator=generator) - 1
        accepted = torch.rand(len(x), dtype=torch.float64, generator=generator).log()
        drawn = torch.cat([drawn, x[accepted < strength * x.prod(dim=1) - abs(strength)]])
        found = len(drawn)
    return {f"x{axis + 1}": drawn[:count, axis : axis + 1] for axis in range(m)}


def gaussian(correlation: Any, nodes: int = 64, reach: float = 8.0) -> Grid:
    """A Gaussian of m real modalities with unit variances, on [-reach, reach]^m.

    Args:
        correlation: (m, m), positive definite, ones on the diagonal.
        reach: in standard deviations.
    Raises: ValueError where it is no such matrix.
    """
    correlation = checked_correlation(correlation)
    precision = torch.linalg.inv(correlation)

    def log_density(*x: Tensor) -> Tensor:
        stacked = torch.stack(x)
        return -0.5 * torch.einsum("i...,ij,j...->...", stacked, precision, stacked)

    return from_log_density(log_density, [legendre(nodes, -reach, reach)] * len(correlation))


def gaussian_total_correlation(covariance: Any, sizes: Sequence[int] | None = None) -> float:
    """Total correlation of a Gaussian in closed form: (sum_i log det S_ii - log det S) / 2, in nats.

    Nothing of it lies beyond pairs: the log density is a sum over pairs, so a sum of pairs expresses it.

    Args:
        covariance: (k, k), positive definite.
        sizes: of the modalities, which add up to k; None: k modalities of one number each.
    Raises: ValueError where it is not positive definite, or sizes do not add up.
    """
    covariance = torch.as_tensor(covariance, dtype=torch.float64)
    sizes = [1] * len(covariance) if sizes is None else list(sizes)
    if sum(sizes) != len(covariance):
        raise ValueError(f"sizes {sizes} must add up to the {len(covariance)} rows of the covariance")
    blocks, start = [], 0
    for size in sizes:
        blocks.append(covariance[start : start + size, start : start + size])
        start += size
    return (sum(log_determinant(block) for block in blocks) - log_determinant(covariance)) / 2


def log_determinant(covariance: Tensor) -> float:
    """log det; ValueError where the matrix is not symmetric and positive definite."""
    factor, failed = torch.linalg.cholesky_ex(covariance)
    if int(failed) or not torch.allclose(covariance, covariance.T):
        raise ValueError(f"a covariance must be symmetric and positive definite, got {covariance.tolist()}")
    return float(2 * factor.diagonal().log().sum())


def checked_correlation(correlation: Any) -> Float64[Tensor, "m m"]:
    """float64; ValueError where it is no correlation matrix."""
    correlation = torch.as_tensor(correlation, dtype=torch.float64)
    square = correlation.ndim == 2 and correlation.shape[0] == correlation.shape[1] >= 2
    if not square or not torch.allclose(correlation.diagonal(), torch.ones(len(correlation), dtype=torch.float64)):
        raise ValueError(f"a correlation matrix is (m, m) with ones on its diagonal, got {correlation.tolist()}")
    log_determinant(correlation)
    return correlation
