"""Torch work on several threads that do not wait for each other.

Torch splits each operation over OpenMP threads, which spin at its end until the last one is done. A search is hundreds
of short operations: as soon as anything else runs on the machine, waiting takes many times as long as the work. Here
every thread does its own blocks from beginning to end, and an operation stays on its thread.
"""

import functools
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from threadpoolctl import ThreadpoolController

Result = TypeVar("Result")


def thread_count(device: torch.device) -> int:
    """As many threads as torch uses in the calling one, which is one where it is `alone`; a GPU is kept busy by one."""
    return torch.get_num_threads() if device.type == "cpu" else 1


@contextmanager
def alone() -> Iterator[None]:
    """Torch operations of the calling thread stay on it; other threads, and this one later, are not affected."""
    torch.get_num_threads()  # a thread's first question sets its number; the limit comes after
    with openmp().limit(limits=1):
        yield


def in_parallel(task: Callable[[int], Result], count: int) -> list[Result]:
    """`task(0)` on the calling thread, `task(1)` to `task(count - 1)` each alone on another; the results in order."""
    if count == 1:
        return [task(0)]
    others = [pool(count - 1).submit(work_alone, task, number) for number in range(1, count)]
    return [task(0), *(other.result() for other in others)]


def work_alone(task: Callable[[int], Result], number: int) -> Result:
    with alone():
        return task(number)


@functools.cache
def pool(count: int) -> ThreadPoolExecutor:
    """Threads that are kept for the next search."""
    return ThreadPoolExecutor(count, "mmcl")


@functools.cache
def openmp() -> Any:
    """The OpenMP libraries of this process. What is set in one is the calling thread's own."""
    return ThreadpoolController().select(user_api="openmp")


if hasattr(os, "register_at_fork"):  # threads do not survive in a child
    os.register_at_fork(after_in_child=pool.cache_clear)
