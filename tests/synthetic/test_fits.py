"""Fits of scores to known joints: what each can and cannot express, from the table and from draws alone."""

import math

import pytest
import torch

from mmcl.losses import contrastive_loss
from mmcl.metrics.expressivity import joint_kl, pairwise_conditional_kls, pairwise_floor
from mmcl.scores import Hadamard, SumOfPairs
from mmcl.synthetic.fits import Tilt, fit_by_draws, fit_exactly, tilts
from mmcl.synthetic.grids import product_density
from mmcl.synthetic.joints import parity, random_tensor, softened_sum


def make(kind, joint, dim, **options):
    return lambda: kind(joint.modalities, dim, temperature=0.3, **options)


def test_sum_of_pairs_comes_down_to_log_2_on_parity_and_h_clip_through_it():
    joint = parity()
    (pairs,) = fit_exactly(joint, make(SumOfPairs, joint, 8), steps=400)
    assert float(joint_kl(joint, pairs.scores)) == pytest.approx(math.log(2), abs=1e-6)
    (product,) = fit_exactly(joint, make(Hadamard, joint, 8), steps=400)
    assert float(joint_kl(joint, product.scores)) < 1e-3


def test_sum_of_pairs_reaches_its_floor_and_every_pairwise_conditional():
    joint = random_tensor(n=4)
    for fit in fit_exactly(joint, make(SumOfPairs, joint, 24), seeds=(0, 1), steps=1500):
        assert -1e-9 < float(joint_kl(joint, fit.scores)) - pairwise_floor(joint) < 1e-4
        assert max(pairwise_conditional_kls(joint, fit.scores).values()) < 1e-4


@pytest.mark.parametrize("m", [2, 4, 5])
def test_any_number_of_modalities(m):
    """Two: CLIP."""
    joint = random_tensor(n=3, m=m)
    kind = SumOfPairs if m == 2 else Hadamard
    (fit,) = fit_exactly(joint, make(kind, joint, 64), steps=600)
    assert float(joint_kl(joint, fit.scores)) < 0.002


def test_runs_at_once_are_the_runs_alone():
    joint = softened_sum(n=3)
    together = fit_exactly(joint, make(Hadamard, joint, 6), seeds=(4, 9), steps=40)
    for seed, fit in zip((4, 9), together, strict=True):
        (alone,) = fit_exactly(joint, make(Hadamard, joint, 6), seeds=(seed,), steps=40)
        torch.testing.assert_close(fit.scores, alone.scores)
        torch.testing.assert_close(fit.model(), fit.scores)
    assert not torch.allclose(together[0].scores, together[1].scores)


def test_a_fixed_temperature_stays():
    joint = softened_sum(n=3)
    (fit,) = fit_exactly(joint, make(Hadamard, joint, 6), steps=20, learn_scale=False)
    assert float(fit.model.score.logit_scale.detach().exp()) == pytest.approx(1 / 0.3)
    (fit,) = fit_exactly(joint, make(Hadamard, joint, 6), steps=20)
    assert float(fit.model.score.logit_scale.detach().exp()) != pytest.approx(1 / 0.3)


def test_networks_encode_the_points_of_a_grid():
    grid = product_density(nodes=6)
    options = {"encoder": "mlp", "steps": 400, "lr": 0.005}
    (pairs,) = fit_exactly(grid, make(SumOfPairs, grid, 16), **options)
    (product,) = fit_exactly(grid, make(Hadamard, grid, 16), **options)
    assert float(joint_kl(grid, product.scores)) < 0.005
    assert float(joint_kl(grid, pairs.scores)) > pairwise_floor(grid) - 1e-9 > 0.14


def test_draws_alone_teach_h_clip_the_joint():
    joint = softened_sum(n=4)
    fit = fit_by_draws(joint, make(Hadamard, joint, 16)(), batch_size=256, steps=400, lr=0.03)
    assert float(joint_kl(joint, fit.scores)) < 0.02

    def tuples(score, rows, values):
        return contrastive_loss(score, rows, guess=[("x2", "x3")], candidates="shuffled")

    again = fit_by_draws(joint, make(Hadamard, joint, 16)(), tuples, batch_size=256, steps=400, lr=0.03, seed=3)
    assert float(joint_kl(joint, again.scores)) < 0.05


def test_unknown_encoders_are_refused():
    joint = softened_sum(n=3)
    with pytest.raises(KeyError, match="unknown encoder 'cnn'"):
        Tilt(make(Hadamard, joint, 4)(), joint, "cnn")
    state = torch.get_rng_state()
    tilts(joint, make(Hadamard, joint, 4), [0])
    assert torch.equal(torch.get_rng_state(), state), "seeds of fits leave the caller's generator alone"
