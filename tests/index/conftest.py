"""Small indexes and their brute-force answers; Milvus Lite in this process and as a server on loopback."""

import copy
import socket
import subprocess
import sys

import numpy as np
import pytest

from mmcl.index import TupleIndex

FACTORIES = (
    "Flat",
    "IVF16,Flat",
    "HNSW32",
    "PQ8x4",
    "IVF16,PQ8x4,RFlat",
    "SQ8",
    "SQfp16",
    "OPQ4,IVF4,PQ4x4",
    "PCA12,Flat",
    "HNSW16,SQ8",
    "IVF8,PQ8x4fs",
)


@pytest.fixture(params=FACTORIES)
def factory(request):
    """Every kind of FAISS index that is supported, by its factory string."""
    return request.param


@pytest.fixture(scope="session")
def items(unit_embeddings):
    """700 rows of three modalities of width 16."""
    return {name: rows.numpy() for name, rows in unit_embeddings(3, 700, 16, seed=1).items()}


@pytest.fixture(scope="session")
def queries(unit_rows):
    """25 text queries of width 16."""
    return unit_rows(25, 16, seed=77).numpy()


@pytest.fixture(scope="session")
def build(make_score, items):
    """build(kind="pairs_and_hadamard", rows=700, **options): an index of images and audio."""

    def make(kind="pairs_and_hadamard", rows=700, score=None, **options):
        score = score or make_score(kind, 3, 16)
        return TupleIndex.build(score, {name: items[name][:rows] for name in ("image", "audio")}, **options)

    return make


@pytest.fixture(scope="session")
def brute_force():
    """brute_force(score, items, queries): all scores (nq, n) in float64, tuple by tuple through `score(x)`."""

    def scores(score, items, queries):
        score = copy.deepcopy(score).double()
        count, many = len(next(iter(items.values()))), len(next(iter(queries.values())))
        stacked = {name: np.tile(np.asarray(rows, np.float64), (many, 1)) for name, rows in items.items()}
        stacked |= {name: np.repeat(np.asarray(rows, np.float64), count, 0) for name, rows in queries.items()}
        return score(stacked).detach().numpy().reshape(many, count)

    return scores


@pytest.fixture(scope="session")
def tolerance():
    """tolerance(score, items, queries): the 1e-5 * sum_k |q_k t_k| that float32 allows, (nq, n)."""

    def bound(score, items, queries, absent=()):
        query = score.query_vectors(queries, absent=absent).detach().abs().double()
        item = score.item_vectors(items).detach().abs().double()
        return 1e-5 * (query @ item.T).numpy()

    return bound


@pytest.fixture(scope="session")
def start_server():
    """start_server(folder): (process, address) of a Milvus Lite server.

    Without --host it would listen on all addresses, and it never asks for a token. With more than one worker, writes
    that meet undo each other (see test_faults_of_lite.py).
    """

    def start(folder):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        command = "import sys; from milvus_lite.cmdline import main; sys.exit(main())"
        options = ["server", "--data-dir", str(folder), "--host", "127.0.0.1", "--port", str(port)]
        options += ["--max-workers", "1"]
        started = [sys.executable, "-uc", command, *options]
        process = subprocess.Popen(started, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        assert b"listening on 127.0.0.1" in process.stdout.readline()
        return process, f"http://127.0.0.1:{port}"

    return start


@pytest.fixture(scope="session")
def uris(tmp_path_factory, start_server):
    """{"lite": a path, "server": an address}."""
    folder = tmp_path_factory.mktemp("milvus")
    process, address = start_server(folder / "server")
    yield {"lite": folder / "lite.db", "server": address}
    process.terminate()
    process.wait()
