"""Threads that work alone, and leave the process as it was."""

import os
import subprocess
import sys
import threading

import pytest
import torch

from mmcl.index.workers import alone, in_parallel, thread_count

FORKED = """
import os, torch
from mmcl.index.workers import alone, in_parallel
def results():
    with alone():
        return in_parallel(lambda number: (number, torch.get_num_threads()), 3)
before = torch.get_num_threads()
expected = [(0, 1), (1, 1), (2, 1)]
assert results() == expected, results()
assert torch.get_num_threads() == before
child = os.fork()
if child == 0:
    os._exit(0 if results() == expected else 1)
assert os.waitpid(child, 0)[1] == 0
assert results() == expected
"""


def test_results_come_in_order_from_threads_of_their_own():
    met = threading.Barrier(4, timeout=10)

    def task(number):
        met.wait()  # all four at once, or never
        return number, threading.get_ident()

    results = in_parallel(task, 4)
    assert [number for number, _ in results] == [0, 1, 2, 3]
    assert results[0][1] == threading.get_ident()
    assert len({thread for _, thread in results}) == 4
    assert in_parallel(lambda number: number, 1) == [0]


@pytest.mark.parametrize("failing", [0, 1])
def test_error_of_any_thread_arrives(failing):
    def task(number):
        if number == failing:
            raise ValueError(f"thread {number}")

    with pytest.raises(ValueError, match=f"thread {failing}"):
        in_parallel(task, 2)


def test_limit_ends_with_its_block_also_after_an_error():
    before = torch.get_num_threads()
    inside = []

    def fail():
        with alone():
            inside.append(torch.get_num_threads())
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert inside == [1]
    assert torch.get_num_threads() == before == thread_count(torch.device("cpu"))
    assert thread_count(torch.device("cuda")) == 1


def test_every_thread_is_alone_and_a_forked_child_has_threads_too():
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    run = subprocess.run([sys.executable, "-c", FORKED], env=environment, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
