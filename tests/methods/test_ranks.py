"""Methods over processes: loss, gradients and memory after several steps equal one process at the global batch."""

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import mmcl

SCRIPT = Path(__file__).with_name("ranks.py")
RANKS = runpy.run_path(str(SCRIPT))


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.slow)])
def world(request):
    return request.param


@pytest.fixture(scope="module")
def results(world, tmp_path_factory):
    folder = tmp_path_factory.mktemp(f"world{world}")
    environment = os.environ | {"PYTHONPATH": str(Path(mmcl.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), str(rank), str(world), str(folder)],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
    try:
        errors = [process.communicate(timeout=300)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * world, "\n".join(errors)
    return [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(world)]


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
