"""Draws of latent worlds: against moments known in closed form, or by weighting uniform draws."""

import math

import pytest
import torch
from scipy.special import iv

from mmcl.synthetic.worlds import (
    CONDITIONALS,
    anisotropic_on_sphere,
    circle_around,
    laplace_around,
    normal_around,
    pairs,
    uniform_box,
    uniform_sphere,
    von_mises,
    von_mises_fisher,
)

N = 40_000


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def close(values, expected):
    """Mean within four standard errors."""
    error = values.std() / math.sqrt(len(values))
    assert abs(float(values.mean()) - expected) < 4 * float(error) + 1e-12


def test_uniform_latents():
    z = uniform_sphere(N, 3, generator())
    torch.testing.assert_close(z.norm(dim=1), torch.ones(N, dtype=torch.float64))
    for each in z.T:
        close(each, 0)
        close(each.square(), 1 / 3)
    box = uniform_box(N, 2, generator())
    assert box.abs().max() <= 1
    close(box.square().sum(1), 2 / 3)


@pytest.mark.parametrize("dim", [2, 3, 5, 10])
@pytest.mark.parametrize("kappa", [0.0, 2.0, 10 / 3, 50.0])
def test_von_mises_fisher_has_its_mean_cosine(dim, kappa):
    z = uniform_sphere(N, dim, generator())
    x = von_mises_fisher(z, kappa, generator(1))
    torch.testing.assert_close(x.norm(dim=1), torch.ones(N, dtype=torch.float64))
    close((z * x).sum(1), iv(dim / 2, kappa) / iv(dim / 2 - 1, kappa) if kappa else 0.0)


@pytest.mark.parametrize("kappa", [0.0, 0.5, 10 / 3, 30.0])
def test_von_mises_has_its_mean_cosine_and_no_side(kappa):
    angles = von_mises(torch.full((N,), kappa, dtype=torch.float64), generator())
    close(angles.cos(), iv(1, kappa) / iv(0, kappa))
    close(angles.sin(), 0.0)


def test_equal_concentrations_are_von_mises_fisher():
    z = uniform_sphere(N, 3, generator())
    x = anisotropic_on_sphere(z, torch.full((3,), 10 / 3), generator(1))
    close((z * x).sum(1), 1 / math.tanh(10 / 3) - 3 / 10)


@pytest.mark.parametrize(("dim", "low", "high"), [(3, 1.0, 5.0), (5, 5.0, 25.0)])
def test_anisotropic_draws_have_the_moments_of_their_density(dim, low, high):
    scales = torch.linspace(low, high, dim, dtype=torch.float64)
    mean = uniform_sphere(1, dim, generator(2))
    x = anisotropic_on_sphere(mean.expand(N, dim), scales, generator(3))
    uniform = uniform_sphere(2_000_000, dim, generator(4))
    weights = torch.softmax(-0.5 * (uniform - mean).square() @ scales, 0)
    for values, on_uniform in ((x, uniform), (x.square(), uniform.square())):
        expected = weights @ on_uniform
        noise = 1 / float(weights.square().sum()) ** 0.5
        for coordinate in range(dim):
            error = values[:, coordinate].std() * (N**-0.5 + noise)
            assert abs(float(values[:, coordinate].mean() - expected[coordinate])) < 4 * float(error)


def test_positives_on_the_slice_keep_its_coordinate():
    z = uniform_sphere(N, 3, generator())
    for by_radius in (False, True):
        x = circle_around(z, 10 / 3, generator(1), by_radius)
        assert torch.equal(x[:, 0], z[:, 0])
        torch.testing.assert_close(x.norm(dim=1), torch.ones(N, dtype=torch.float64))
    k, squared = 10 / 3, 1 - z[:, 0].square()
    cosine = ((x[:, 1:] * z[:, 1:]).sum(1)) / squared
    expected = torch.from_numpy(iv(1, k * squared.numpy()) / iv(0, k * squared.numpy()))
    close(cosine - expected, 0.0)
    flat = circle_around(z, 0.0, generator(2))
    close((flat[:, 1:] * z[:, 1:]).sum(1), 0.0)


def test_box_conditionals_stay_inside_and_follow_their_means():
    z = 0.5 * uniform_box(N, 2, generator())
    scales = torch.tensor([100.0, 400.0])
    normal, laplace = normal_around(z, scales, generator(1)), laplace_around(z, scales, generator(2))
    for x in (normal, laplace):
        assert x.abs().max() <= 1
        close(x[:, 0] - z[:, 0], 0.0)
    close((normal - z)[:, 0].square(), 1 / 100)
    close((laplace - z)[:, 1].abs(), 1 / 400)


@pytest.mark.parametrize("name", CONDITIONALS)
def test_the_same_seed_gives_the_same_pairs(name):
    latents = "box" if name in ("normal", "laplace") else "sphere"
    concentration = 3.0 if name in ("von_mises_fisher", "circle") else torch.tensor([3.0, 4.0, 5.0])
    first = pairs(latents, name, 50, 3, concentration, generator(7))
    second = pairs(latents, name, 50, 3, concentration, generator(7))
    assert all(torch.equal(a, b) for a, b in zip(first, second))
    assert not torch.equal(first[0], first[1])


def test_unknown_worlds_are_refused():
    with pytest.raises(KeyError, match=r"unknown latents 'cube'.*'box', 'sphere'"):
        pairs("cube", "normal", 5, 3, torch.ones(3), generator())
    with pytest.raises(ValueError, match=r"\(3,\) positive numbers"):
        anisotropic_on_sphere(uniform_sphere(5, 3, generator()), torch.tensor([1.0, 0.0, 2.0]), generator())
    with pytest.raises(ValueError, match="kappa must be >= 0"):
        von_mises_fisher(uniform_sphere(5, 3, generator()), -1.0, generator())
