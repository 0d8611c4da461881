"""Rows gathered over processes: value and gradients equal one process at the global batch."""

import runpy
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).with_name("ranks.py")
RANKS = runpy.run_path(str(SCRIPT))


@pytest.fixture(
    scope="module", params=[pytest.param(2, marks=pytest.mark.slow), 3, pytest.param(4, marks=pytest.mark.slow)]
)
def world(request):
    return request.param


@pytest.fixture(scope="module")
def results(world, start_ranks):
    """[{case: (loss, gradients averaged over ranks)}] of every rank, each a process of its own."""
    return start_ranks(SCRIPT, world)


@pytest.mark.parametrize("case", [*RANKS["CASES"], *RANKS["VIEWS"]])
def test_gathered_ragged_ranks_equal_one_process(case, world, results):
    count = sum(RANKS["SIZES"][world])
    expected, expected_gradients = RANKS["value_and_gradients"](case, slice(None), count, gather=False)
    for rank in range(world):
        loss, gradients = results[rank][case]
        torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
        assert set(gradients) == set(expected_gradients)
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, expected_gradients[name], rtol=1e-12, atol=1e-12)
            assert gradient.abs().sum() > 0, name
