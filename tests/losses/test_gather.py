"""Rows gathered over processes: value and gradients equal one process at the global batch."""

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


@pytest.fixture(
    scope="module", params=[pytest.param(2, marks=pytest.mark.slow), 3, pytest.param(4, marks=pytest.mark.slow)]
)
def world(request):
    return request.param


@pytest.fixture(scope="module")
def results(world, tmp_path_factory):
    """[{case: (loss, gradients averaged over ranks)}] of every rank, each a process of its own."""
    folder = tmp_path_factory.mktemp(f"world{world}")
    environment = os.environ | {"PYTHONPATH": str(Path(mmcl.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(SCRIPT)]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(world), str(folder)], env=environment, stderr=subprocess.PIPE, text=True
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
