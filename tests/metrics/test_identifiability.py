"""Recovery of latents: exact cases, what each figure is blind to, and the one map whose R^2 is known."""

import math

import numpy as np
import pytest
import torch

from mmcl.metrics import angle_error, linear_r2, matched_correlations, mean_correlation
from mmcl.synthetic.processes import rotation
from mmcl.synthetic.worlds import uniform_sphere

Z = uniform_sphere(20_000, 3, torch.Generator().manual_seed(0))
TURN = rotation(3, torch.Generator().manual_seed(1))


def test_a_rotation_is_linear_and_keeps_angles_but_mixes_coordinates():
    h = Z @ TURN.T
    assert linear_r2(h, Z) == pytest.approx(1)
    assert angle_error(h[:500], Z[:500]) == pytest.approx(0, abs=1e-12)
    assert mean_correlation(h, Z) < 0.95
    assert mean_correlation(h, Z, weak=True) == pytest.approx(1)


def test_signs_scales_and_order_do_not_matter_to_mcc():
    h = Z[:, [2, 0, 1]] * torch.tensor([-3.0, 0.5, 100.0])
    assert mean_correlation(h, Z) == pytest.approx(1)
    columns, values = matched_correlations(h, Z)
    assert columns.tolist() == [1, 2, 0]
    np.testing.assert_allclose(values, 1)


def test_dropping_the_first_coordinate_leaves_pi_squared_over_16():
    h = torch.nn.functional.normalize(Z[:, 1:], dim=1)
    assert linear_r2(h, Z) == pytest.approx(math.pi**2 / 16, abs=0.01)
    assert linear_r2(h, Z[:, 1:]) == pytest.approx(1.5 * math.pi**2 / 16, abs=0.01), "of the two that are kept"


def test_independent_rows_are_a_third_apart():
    other = uniform_sphere(2_000, 3, torch.Generator().manual_seed(9))
    assert angle_error(other, Z[:2_000]) == pytest.approx(1 / 3, abs=0.01)
    assert linear_r2(other, Z[:2_000]) == pytest.approx(0, abs=0.02)
    assert mean_correlation(other, Z[:2_000]) < 0.06


def test_r2_is_of_rows_that_were_not_fitted():
    """40 numbers that mean nothing fit 50 rows well, and predict the rest badly."""
    noise = np.random.default_rng(0).normal(size=(100, 40))
    assert linear_r2(noise, Z[:100]) < 0
    assert linear_r2(2 * Z + 7, Z) == pytest.approx(1), "with an intercept"


def test_a_constant_coordinate_correlates_with_nothing():
    h = torch.cat([Z[:, :2], torch.ones(len(Z), 1)], dim=1)
    assert mean_correlation(h, Z) == pytest.approx(2 / 3, abs=0.01)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: linear_r2(Z[:5], Z[:6]), r"\(5, 3\) and \(6, 3\)"),
        (lambda: linear_r2(Z[:6], Z[:6]), "leave 3 to fit 4 numbers"),
        (lambda: linear_r2(Z, torch.ones(len(Z), 1)), "latent 0 does not vary"),
        (lambda: mean_correlation(Z[:, :2], Z), "3 latents cannot be matched with 2"),
        (lambda: mean_correlation(Z * torch.nan, Z), "embeddings: row 0 holds NaN"),
    ],
)
def test_bad_calls_are_refused_by_name(call, message):
    with pytest.raises(ValueError, match=message):
        call()
