"""Methods over processes: loss, gradients and memory after several steps equal one process at the global batch."""

import runpy
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).with_name("ranks.py")
RANKS = runpy.run_path(str(SCRIPT))


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.slow)])
def world(request):
    return request.param


@pytest.fixture(scope="module")
def results(world, start_ranks):
    return start_ranks(SCRIPT, world)


@pytest.mark.parametrize("name", RANKS["OPTIONS"])
def test_ragged_ranks_equal_one_process(name, world, results):
    loss, gradients, state = RANKS["run_steps"](name, slice(None), sum(RANKS["SIZES"][world]), 1)
    for rank in range(world):
        their_loss, their_gradients, their_state = results[rank][name]
        torch.testing.assert_close(their_loss, loss, rtol=1e-10, atol=1e-10)
        for key, gradient in gradients.items():
            torch.testing.assert_close(their_gradients[key], gradient, rtol=1e-9, atol=1e-10)
        for key, value in state.items():
            torch.testing.assert_close(their_state[key], value, rtol=1e-9, atol=1e-10)
