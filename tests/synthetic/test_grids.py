"""Continuous joints on a grid: closed forms, other integrators, draws from the density itself."""

import math

import numpy as np
import pytest
import torch
from scipy import integrate, special

from mmcl.metrics.expressivity import best_scores, joint_kl, pairwise_floor
from mmcl.synthetic.grids import (
    from_log_density,
    gaussian,
    gaussian_total_correlation,
    legendre,
    product_density,
    sample_product_density,
)

CORRELATION = [[1, 0.6, 0.3], [0.6, 1, -0.2], [0.3, -0.2, 1]]


def products_of(grid):
    """x_1 x_2 ... x_m of every node."""
    return math.prod(torch.meshgrid(*[grid.points[name][:, 0] for name in grid.modalities], indexing="ij"))


def test_two_modalities_by_closed_form():
    """Z / 4 = Shi(b) / b, and every margin is sinh(b x) / (b x) over that."""
    b = 3.0
    mean_exp = special.shichi(b)[0] / b
    grid = product_density(b, m=2)
    x = grid.points["x1"][:, 0]
    weights = torch.as_tensor(legendre()[1]) / 2
    np.testing.assert_allclose(grid.marginal("x1") / weights, torch.sinh(b * x) / (b * x) / mean_exp, rtol=1e-12)


def test_three_modalities_by_another_integrator():
    b = 3.0
    cube = [[-1, 1]] * 3
    total, _ = integrate.nquad(lambda x, y, z: math.exp(b * x * y * z), cube)
    weighted, _ = integrate.nquad(lambda x, y, z: x * y * z * math.exp(b * x * y * z), cube)
    grid = product_density(b)
    assert float((grid.table * products_of(grid)).sum()) == pytest.approx(weighted / total, abs=1e-9)


def test_digits_come_with_nodes():
    few, many = product_density(nodes=12), product_density(nodes=24)
    assert few.total_correlation() == pytest.approx(many.total_correlation(), abs=1e-12)
    assert pairwise_floor(few) == pytest.approx(pairwise_floor(many), abs=1e-9)
    assert 0.88 < pairwise_floor(many) / many.total_correlation() < 0.89


def test_its_best_score_is_the_product_and_what_margins_add():
    grid = product_density(2.0, m=4, nodes=12)
    weights = torch.as_tensor(legendre(12)[1]) / 2
    margins = [(grid.marginal(name) / weights).log() for name in grid.modalities]
    both = sum(torch.meshgrid(*margins, indexing="ij"))
    assert abs(float(joint_kl(grid, 2.0 * products_of(grid) - both))) < 1e-12
    assert abs(float(joint_kl(grid, best_scores(grid)[0]))) < 1e-12


def test_gaussians_by_closed_form_and_by_quadrature():
    assert gaussian_total_correlation([[1, 0.6], [0.6, 1]]) == pytest.approx(-0.5 * math.log(1 - 0.36))
    grid = gaussian(CORRELATION)
    assert grid.total_correlation() == pytest.approx(gaussian_total_correlation(CORRELATION), abs=1e-10)
    assert abs(pairwise_floor(grid, 1e-8)) < 1e-7
    x, y = (grid.points[name][:, 0] for name in ("x1", "x2"))
    assert float((grid.marginal(("x1", "x2")) * x[:, None] * y).sum()) == pytest.approx(0.6)


def test_gaussians_of_several_numbers_a_modality():
    generator = np.random.default_rng(0)
    factor = generator.standard_normal((5, 5))
    covariance = factor @ factor.T
    blocks = [covariance[:2, :2], covariance[2:, 2:]]
    expected = 0.5 * (sum(np.linalg.slogdet(block)[1] for block in blocks) - np.linalg.slogdet(covariance)[1])
    assert gaussian_total_correlation(covariance, [2, 3]) == pytest.approx(expected)


def test_draws_follow_the_density():
    draws = sample_product_density(100_000, strength=3.0, generator=torch.Generator().manual_seed(0))
    assert {name: tuple(rows.shape) for name, rows in draws.items()} == dict.fromkeys(("x1", "x2", "x3"), (100_000, 1))
    grid = product_density(3.0)
    products = products_of(grid)
    expected = float((grid.table * products).sum())
    spread = float((grid.table * products**2).sum()) ** 0.5
    assert float(math.prod(draws.values()).mean()) == pytest.approx(expected, abs=4 * spread / 100_000**0.5)
    x = grid.points["x1"][:, 0]
    squares = float((grid.marginal("x1") * x**2).sum())
    assert float((draws["x1"] ** 2).mean()) == pytest.approx(squares, abs=0.004)
    again = sample_product_density(10, generator=torch.Generator().manual_seed(0))
    assert torch.equal(again["x2"], sample_product_density(10, generator=torch.Generator().manual_seed(0))["x2"])


def test_what_is_no_density_is_refused():
    with pytest.raises(ValueError, match="finite at every node"):
        from_log_density(lambda x, y: (x + y).log(), [legendre(4)] * 2)
    with pytest.raises(ValueError, match="weights above 0"):
        from_log_density(lambda x, y: x + y, [([0.0, 1.0], [1.0, -1.0])] * 2)
    with pytest.raises(ValueError, match="ones on its diagonal"):
        gaussian([[2.0, 0.1], [0.1, 1.0]])
    with pytest.raises(ValueError, match="positive definite"):
        gaussian([[1.0, 1.5], [1.5, 1.0]])
    with pytest.raises(ValueError, match="add up to the 3 rows"):
        gaussian_total_correlation(CORRELATION, [1, 1])
