"""FAISS takes its fast path, and what the index adds around it costs little."""

import os
import subprocess
import sys
import time

import numpy as np
import pytest

from mmcl.index import TupleIndex
from mmcl.index.faiss_setup import crossover_queries, load_faiss, prefer_faster_path
from mmcl.scores import Hadamard

OPENMP = """
import os, torch
from mmcl.index.faiss_setup import load_faiss
torch.set_num_threads(1)
print(load_faiss().omp_get_max_threads(), os.environ["OMP_WAIT_POLICY"])
"""


@pytest.mark.skipif(not hasattr(os, "RTLD_DEEPBIND"), reason="symbols are shared by glibc alone")
def test_faiss_keeps_its_own_openmp_where_torch_came_first():
    """Torch's was loaded before the wait policy was set, so its threads spin; its settings must not be FAISS's."""
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    environment.pop("OMP_WAIT_POLICY", None)
    run = subprocess.run([sys.executable, "-c", OPENMP], env=environment, capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["2", "passive"]


def test_threshold_follows_the_width_and_is_measured_once():
    crossover_queries.cache_clear()
    prefer_faster_path(256)
    assert 1 <= crossover_queries() <= 64
    assert load_faiss().cvar.distance_compute_blas_threshold == 256 * crossover_queries()
    prefer_faster_path(64)
    assert load_faiss().cvar.distance_compute_blas_threshold == 64 * crossover_queries()
    assert crossover_queries.cache_info().misses == 1
    assert load_faiss().omp_get_max_threads() == int(os.environ["OMP_NUM_THREADS"])


def test_both_paths_give_the_same_answer(monkeypatch, unit_rows):
    rows = unit_rows(500, 32).numpy()
    index = TupleIndex.build(Hadamard(("a", "b"), 32), {"a": rows})
    answers = []
    for crossover in (1, 10**6):
        monkeypatch.setattr("mmcl.index.faiss_setup.crossover_queries", lambda crossover=crossover: crossover)
        answers.append(index.search({"b": rows[:64]}, k=5))
    np.testing.assert_array_equal(answers[0].ids, answers[1].ids)
    np.testing.assert_allclose(answers[0].scores, answers[1].scores, rtol=1e-5)


def test_every_search_sets_the_threshold_for_its_width(unit_rows):
    rows = unit_rows(500, 32).numpy()
    index = TupleIndex.build(Hadamard(("a", "b"), 32), {"a": rows})
    load_faiss().cvar.distance_compute_blas_threshold = 128000
    index.search({"b": rows[:64]})
    assert load_faiss().cvar.distance_compute_blas_threshold == 32 * crossover_queries()


@pytest.mark.nightly
def test_many_queries_are_faster_than_as_installed(unit_rows):
    rows = unit_rows(20000, 128).numpy()
    index = TupleIndex.build(Hadamard(("a", "b"), 128), {"a": rows})
    queries = {"b": rows[:256]}

    def seconds(search):
        times = []
        for _ in range(3):
            start = time.thread_time()
            search()
            times.append(time.thread_time() - start)
        return min(times)

    ours = seconds(lambda: index.search(queries))
    vectors = index._fusion.queries(queries, None, None)
    load_faiss().cvar.distance_compute_blas_threshold = 128000
    assert seconds(lambda: index._tuples.snapshot.base.index.search(vectors, 10)) > ours  # 3 to 10 times with AMX


AROUND = """
import time, torch
import numpy as np
from mmcl.index import TupleIndex
from mmcl.scores import Hadamard
rows = torch.nn.functional.normalize(torch.randn(2000, 64), dim=1).numpy()
index = TupleIndex.build(Hadamard(("a", "b"), 64), {"a": rows}, metadata={"row": list(range(2000))})
inside, search = [], index._tuples.snapshot.base.index.search
def timed(*args, **options):
    start = time.thread_time()
    found = search(*args, **options)
    inside.append(time.thread_time() - start)
    return found
index._tuples.snapshot.base.index.search = timed
for count in (1, 1, 1000):
    times = []
    for _ in range(100):
        start = time.thread_time()
        index.search({"b": rows[:count]})
        times.append(time.thread_time() - start - inside[-1])
    print(1e6 * np.median(times))
"""


@pytest.mark.nightly
def test_little_time_goes_by_outside_the_engine():
    """0.2 ms and 1 us a query of CPU time on a fast core; five times that here, for slow and busy ones."""
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}  # torch's own threads spin where others work
    run = subprocess.run([sys.executable, "-c", AROUND], env=one_thread, capture_output=True, text=True, check=True)
    _, one, thousand = map(float, run.stdout.split())
    assert one < 1000
    assert thousand < 1000 + 5 * 1000
