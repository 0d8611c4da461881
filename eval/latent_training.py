"""What `identifiability.py` and `anisotropy.py` share: training on a latent world, and work over the cores."""

import math
import multiprocessing
import os
import time
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor

Task = TypeVar("Task")
Result = TypeVar("Result")


def train(
    parameters: Iterable[Any],
    loss: Callable[[torch.Generator], Tensor],
    steps: int,
    lr: float,
    seed: int,
    seconds: float = math.inf,
) -> float:
    """Adam with a rate that rises over a tenth of the steps and then falls to 0; returns the seconds it took.

    parameters: of an encoder, or groups of them with an "lr" of their own.
    loss: draws a batch from the generator and returns the loss of it.
    seconds: an end of its own, for protocols that promise a time.
    """
    generator = torch.Generator().manual_seed(seed)
    optimiser = torch.optim.Adam(list(parameters), lr=lr, betas=(0.9, 0.98))
    rates = [group["lr"] for group in optimiser.param_groups]
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, rates, total_steps=steps, pct_start=0.1)
    started = time.perf_counter()
    for _ in range(steps):
        optimiser.zero_grad()
        loss(generator).backward()
        optimiser.step()
        schedule.step()
        if time.perf_counter() - started > seconds:
            break
    return time.perf_counter() - started


def best_of(runs: int, run: Callable[[int], tuple[float, Any]], enough: float = -math.inf) -> tuple[float, Any, int]:
    """The run of the lowest loss, and how many there were: loss alone decides, as no latent is known in earnest.

    run: seed -> (loss, what was trained); enough: a loss at which no further run is made.
    """
    best: tuple[float, Any] | None = None
    for number in range(runs):
        found = run(number)
        best = found if best is None or found[0] < best[0] else best
        if best[0] <= enough:
            break
    assert best is not None
    return best[0], best[1], number + 1


def on_all_cores(work: Callable[[Task], Result], tasks: list[Task], each: Callable[[Result], None]) -> list[Result]:
    """The results in the order of the tasks, a process a core with one thread; `each` is told as they come."""
    workers = min(len(tasks), os.cpu_count() or 1)
    with multiprocessing.get_context("spawn").Pool(workers, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        results = []
        for result in pool.imap(work, tasks):
            each(result)
            results.append(result)
        return results
