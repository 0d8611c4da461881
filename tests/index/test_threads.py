"""One index in many threads: every answer is of one version, whole, while others change, compact and save."""

import threading
import time

import numpy as np
import pytest

from mmcl.index import TupleIndex, exact_search, local
from mmcl.index.faiss_backend import FaissBackend

ITEMS, DIM, VERSIONS = 60, 8, 30
FACTORIES = {
    "Flat": {},
    "Exact": {},
    "IVF4,Flat": {"nprobe": 4},
    "IVF4,PQ4x4,RFlat": {"nprobe": 4, "k_factor": 1e6},
    "HNSW8": {"efSearch": 500},
    "MIPS,IVF4,Flat": {"nprobe": 4},
}
FAST = {"Flat", "Exact"}
EXTRA = 1000
"""Ids from here on come and go between the versions."""


class Versions:
    """Items 0..ITEMS-1 in every version: other embeddings each time, and metadata that tells the version."""

    def __init__(self, score, unit_rows):
        self.score = score
        self.rows = {
            name: unit_rows(VERSIONS * ITEMS, DIM, seed).numpy().reshape(VERSIONS, ITEMS, DIM)
            for seed, name in enumerate(("image", "audio"))
        }
        self.queries = unit_rows(3, DIM, seed=9).numpy()
        asked = score.query_vectors({"text": self.queries}).detach().numpy()
        self.vectors = np.stack([score.item_vectors(self.items(v)).detach().numpy() for v in range(VERSIONS)])
        self.scores = np.einsum("qd,vnd->vqn", asked, self.vectors)

    def items(self, version, rows=slice(None)):
        return {name: values[version][rows] for name, values in self.rows.items()}

    def check_answer(self, hits):
        """The version of an answer that holds all items."""
        told = {row["version"] for each in hits for key, _, row in each if key < EXTRA}
        assert len(told) == 1, f"versions {told} in one answer"
        (version,) = told
        for query, row in enumerate(hits):
            scores = {key: value for key, value, _ in row}
            assert len(scores) == len(row) == hits.counts[query], "an id stands twice"
            assert set(range(ITEMS)) <= set(scores), "an item is missing"
            found = [scores[key] for key in range(ITEMS)]
            np.testing.assert_allclose(found, self.scores[version, query], atol=1e-4)
        return version


def write(index, versions, folder):
    """Version after version in one `upsert` each; between them other items come and go, and the index is saved."""
    for version in range(1, VERSIONS):
        extra = EXTRA + version
        index.upsert(versions.items(version), range(ITEMS), {"version": [version] * ITEMS})
        index.add(versions.items(version, [0, 1]), [extra, 2 * extra], {"version": [version] * 2})
        if version % 2:
            index.remove([extra, 2 * extra])
        if version % 5 == 0:
            index.compact()
        if version % 3 == 0:
            index.save(folder)


def ask(index, versions, effort, turn):
    """One consistent answer of any kind; the version it is of."""
    if turn % 4 == 0:
        hits = index.search({"text": versions.queries}, k=ITEMS + 2 * VERSIONS, **effort)
        time.sleep(0.002)  # metadata is looked up later, and is still that of the answer
        return versions.check_answer(hits)
    if turn % 4 == 1:
        where = ("id < ?", [EXTRA])
        hits = index.search({"text": versions.queries}, k=ITEMS + 5, where=where, **effort)
        assert hits.counts.tolist() == [ITEMS] * 3
        return versions.check_answer(hits)
    if turn % 4 == 2:
        vectors = index.vectors(range(ITEMS))
        (version,) = [v for v in range(VERSIONS) if np.allclose(vectors, versions.vectors[v], atol=1e-6)]
        return version
    assert all(key in index for key in range(0, ITEMS, 7))
    assert EXTRA - 1 not in index
    (version,) = {row["version"] for row in index.get(range(ITEMS))}
    return version


@pytest.mark.parametrize(
    "factory", [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in FACTORIES]
)
def test_every_answer_of_every_thread_is_one_version(factory, make_score, unit_rows, tmp_path, monkeypatch):
    """Four threads ask, one writes and one loads what is saved; no thread ever sees an older version after a newer."""
    monkeypatch.setattr(local, "FOLD_ROWS", 50)
    monkeypatch.setattr(exact_search, "FEW_ROWS", 20)
    monkeypatch.setattr("mmcl.index.exact_backend.exact_pays", lambda device: True)
    monkeypatch.setattr("mmcl.index.local_files.exact_pays", lambda device: True)
    versions = Versions(make_score("pairs_and_hadamard", 3, DIM), unit_rows)
    first = {"version": [0] * ITEMS}
    index = TupleIndex.build(versions.score, versions.items(0), metadata=first, factory=factory)
    index.save(tmp_path / "index")
    failures, done, seen = [], threading.Event(), set()

    def guarded(work):
        def run():
            try:
                work()
            except BaseException as error:
                failures.append(error)
                done.set()

        return threading.Thread(target=run)

    def read(start):
        newest, turn = 0, start
        while not done.is_set():
            version = ask(index, versions, FACTORIES[factory], turn)
            assert version >= newest, f"version {version} after {newest}"
            newest, turn = version, turn + 1
            seen.add(version)

    def load():
        newest = 0
        while not done.is_set():
            loaded = TupleIndex.load(tmp_path / "index", memory_map=newest % 2 == 0)
            loaded.verify()
            version = ask(loaded, versions, FACTORIES[factory], turn=0)
            assert version >= newest and version % 3 == 0
            newest = version

    readers = [guarded(lambda start=start: read(start)) for start in range(4)] + [guarded(load)]
    writer = guarded(lambda: write(index, versions, tmp_path / "index"))
    for thread in (*readers, writer):
        thread.start()
    writer.join()
    done.set()
    for reader in readers:
        reader.join()
    assert failures == []
    assert len(seen) > 3
    assert ask(index, versions, FACTORIES[factory], turn=0) == VERSIONS - 1


def test_writers_in_many_threads_take_turns(build, items, tmp_path):
    """Automatic ids are given once, and nothing that a call has stored is lost by another's."""
    index = build(rows=10, ids=range(100_000, 100_010), metadata={"by": [-1] * 10})
    failures = []

    def work(number):
        try:
            for turn in range(12):
                new = {name: items[name][turn : turn + 3] for name in ("image", "audio")}
                index.add(new, metadata={"by": [number] * 3})
                own = 1000 * (number + 1) + turn
                index.upsert({name: rows[:1] for name, rows in new.items()}, [own], {"by": [number]})
                index.save(tmp_path / "index")
                if turn % 2:
                    index.remove([own, own - 1])
                if turn % 4 == number:
                    index.compact()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    ids = index.ids().tolist()
    assert len(ids) == len(set(ids)) == len(index) == 10 + 4 * 12 * 3
    by = [row["by"] for row in index.get(ids)]
    assert [by.count(number) for number in range(-1, 4)] == [10, 36, 36, 36, 36]
    index.save(tmp_path / "index")
    assert TupleIndex.load(tmp_path / "index").ids().tolist() == ids


def test_what_is_written_while_rows_are_read_back_is_whole(tmp_path):
    """Reading a row out of inverted lists makes a map from rows to places first: none half-made may be written."""
    rows = np.random.default_rng(0).standard_normal((600_000, 2), np.float32)
    whole = FaissBackend.build("IVF4,SQ4", 2, [rows])
    for turn in range(30):
        backend = whole.rebuilt(None, rows[:1])
        reader = threading.Thread(target=backend.vectors, args=(np.array([0]),))
        reader.start()
        time.sleep(0.0002 * (turn % 3))
        backend.write(tmp_path)
        reader.join()
        written = FaissBackend.read(tmp_path, backend.factory, 2, backend.about())
        some = np.arange(0, len(rows), 1000)
        np.testing.assert_array_equal(written.vectors(some), whole.vectors(some))
