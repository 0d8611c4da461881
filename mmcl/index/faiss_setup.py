"""FAISS imported and set so that CPUs run it at full speed.

Two things cost 10x as installed. FAISS 1.15 scans a flat index query by query unless queries * width reaches 128000,
although the matrix product wins from a handful of queries on. And its OpenMP threads wait by spinning, which slows
those that work as soon as the machine has anything else to do.
"""

import functools
import os
import sys
import time
from types import ModuleType

MEASURED_ROWS, MEASURED_WIDTH = 8192, 128
MEASURED_QUERIES = (1, 2, 4, 8, 16, 32)
ALWAYS, NEVER = 1, 2**31 - 1
"""Thresholds at which every search, and none, goes through the matrix product."""


@functools.cache
def load_faiss() -> ModuleType:
    """FAISS, imported on first use, with an OpenMP of its own whose threads sleep while they wait.

    OpenMP reads the wait policy once, as it is loaded. Where torch came first, the symbols of torch's OpenMP would
    also serve FAISS, spinning and all; bound deeply, FAISS keeps to the one in its own wheel.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    if not hasattr(os, "RTLD_DEEPBIND"):  # glibc alone shares symbols in this way
        import faiss

        return faiss
    flags = sys.getdlopenflags()
    sys.setdlopenflags(flags | os.RTLD_DEEPBIND)
    try:
        import faiss
    finally:
        sys.setdlopenflags(flags)
    return faiss


def prefer_faster_path(width: int) -> None:
    """Set the threshold between FAISS's two ways through a flat index for vectors of this width.

    The threshold is one number of the process, in queries * width, while the crossover is a number of queries: so it
    is set before each search.
    """
    load_faiss().cvar.distance_compute_blas_threshold = crossover_queries() * width


@functools.cache
def crossover_queries() -> int:
    """The fewest queries for which the matrix product is no slower than query by query; measured once, in 20 ms.

    On one thread: on a busy machine, waiting for a second one would drown the difference.
    """
    import numpy as np

    faiss = load_faiss()
    rows = np.random.default_rng(0).random((MEASURED_ROWS, MEASURED_WIDTH), dtype=np.float32)
    index = faiss.IndexFlatIP(MEASURED_WIDTH)
    index.add(rows)

    def seconds(count: int, threshold: int) -> float:
        faiss.cvar.distance_compute_blas_threshold = threshold
        times = []
        for _ in range(3):
            start = time.perf_counter()
            index.search(rows[:count], 10)
            times.append(time.perf_counter() - start)
        return min(times)

    threads = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(1)
    try:
        wins = (count for count in MEASURED_QUERIES if seconds(count, ALWAYS) <= seconds(count, NEVER))
        return next(wins, 2 * MEASURED_QUERIES[-1])
    finally:
        faiss.omp_set_num_threads(threads)
