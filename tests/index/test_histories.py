"""Random histories of an index, each step checked against a dictionary and brute force in float64."""

import itertools
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, settings, strategies
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from mmcl.index import TupleIndex, exact_backend, exact_search, local, local_files

ALL_LISTS, ALL_NODES = {"nprobe": 4}, {"efSearch": 10_000}
FACTORIES = {
    "Flat": {},
    "Exact": {},
    "IVF4,Flat": ALL_LISTS,
    "IVF4,PQ4x4,RFlat": {**ALL_LISTS, "k_factor": 1e6},
    "RR20,IVF4,PQ20x4fs,RFlat": {**ALL_LISTS, "k_factor": 1e6},
    "MIPS,IVF4,Flat": ALL_LISTS,
    "HNSW8": ALL_NODES,
    "MIPS,HNSW8": ALL_NODES,
    "SQ8": {},
}
"""What makes each of them look at every item."""
MILVUS = "Milvus Lite"
FINDS_THE_BEST = {
    MILVUS,
    "Flat",
    "Exact",
    "IVF4,Flat",
    "IVF4,PQ4x4,RFlat",
    "RR20,IVF4,PQ20x4fs,RFlat",
    "MIPS,IVF4,Flat",
}
"""Graphs may end in a local optimum at any effort."""
ESTIMATES = {"SQ8"}
STARTS_EMPTY = {MILVUS, "Flat", "Exact", "HNSW8", "MIPS,HNSW8"}
NIGHTLY_HISTORIES, NIGHTLY_STEPS = 1000, 30
STORED, POOL, DIM, TRAINED_ON = ("image", "audio"), 160, 8, 24
FEW = strategies.lists(strategies.integers(0, POOL - 1), max_size=12)
YEARS = range(1990, 2010)
collection_numbers = itertools.count()
FILTERS = {
    "many": lambda year: (("year >= ?", [year]), lambda row: row["year"] is not None and row["year"] >= year),
    "null": lambda year: (f"year < {year} or year is null", lambda row: row["year"] is None or row["year"] < year),
    "one": lambda year: (f"name = '항목 {year % 9}'", lambda row: row["number"] == year % 9),
}


class Row(dict):
    """What an item carries, and `number`: which embeddings of the pool it has."""

    def __init__(self, number, metadata):
        super().__init__(metadata)
        self.number = number


class Pool:
    """Embeddings to draw items from, and the scores of all of them with all queries."""

    def __init__(self, score, rows, queries, brute_force, tolerance):
        # lengths differ by more than a factor of 10: by L2 or cosine the ranking would be another
        lengths = np.geomspace(0.2, 3, POOL)[:, None]
        self.score = score
        self.rows = {name: np.float32(rows[name] * np.random.default_rng(0).permutation(lengths)) for name in STORED}
        self.queries = {"text": queries}
        self.scores = brute_force(score, self.rows, self.queries)
        self.bounds = tolerance(score, self.rows, self.queries)
        # 8-bit codes, made anew a few times over ranges that grow by at least a quarter: 5 half steps of the widest
        self.vectors = score.item_vectors(self.rows).detach().numpy()
        self.coarseness = 2.5 * 1.5 * np.ptp(self.vectors, axis=0) / 255
        self.coarse_bounds = score.query_vectors(self.queries).detach().abs().numpy() @ self.coarseness

    def items(self, numbers):
        return {name: rows[numbers] for name, rows in self.rows.items()}


class History(RuleBasedStateMachine):
    """The model is a dictionary {id: row}."""

    pool: Pool
    factory: str
    ended = 0
    exact_pays = True
    carries = True
    """Whether items have metadata."""

    def __init__(self):
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="mmcl-history-"))
        self.model, self.saved, self.hits = {}, {}, []
        self.next_id = 0
        """The least integer above all ids so far."""

    def teardown(self):
        shutil.rmtree(self.folder)
        type(self).ended += 1

    @initialize(named=strategies.booleans(), count=strategies.integers(0, 40), year=strategies.sampled_from(YEARS))
    def build(self, named, count, year):
        self.named = named
        least = int(named) if self.factory in STARTS_EMPTY else TRAINED_ON
        numbers = list(range(least + count))
        ids = [self.key(number) for number in numbers] if named else None
        rows = [self.row(number, year) for number in numbers]
        items = self.pool.items(numbers)
        self.index = TupleIndex.build(self.pool.score, items, ids, self.columns(rows), **self.held())
        self.model = {self.key(number): row for number, row in zip(numbers, rows)}
        self.next_id = 0 if named else len(numbers)
        self.check()

    @rule(numbers=FEW, year=strategies.sampled_from(YEARS), automatic=strategies.booleans())
    def add(self, numbers, year, automatic):
        """Also ids that were there once."""
        automatic = automatic and not self.named
        if automatic:
            keys = list(range(self.next_id, self.next_id + len(numbers)))
        else:
            numbers = [number for number in dict.fromkeys(numbers) if self.key(number) not in self.model]
            keys = [self.key(number) for number in numbers]
        rows = [self.row(number, year) for number in numbers]
        self.index.add(self.pool.items(numbers), None if automatic else keys, self.columns(rows))
        self.store(keys, rows)
        self.check()

    @rule(numbers=FEW, shift=strategies.integers(0, 3), year=strategies.sampled_from(YEARS))
    def upsert(self, numbers, shift, year):
        """Known ids get other embeddings, unknown ones come in."""
        numbers = list(dict.fromkeys(numbers))
        keys = [self.key(number) for number in numbers]
        rows = [self.row((number + shift) % POOL, year) for number in numbers]
        self.index.upsert(self.pool.items([row.number for row in rows]), keys, self.columns(rows))
        self.store(keys, rows)
        self.check()

    @precondition(lambda self: self.model)
    @rule(data=strategies.data())
    def remove(self, data):
        keys = data.draw(strategies.lists(strategies.sampled_from(list(self.model)), min_size=1, max_size=20))
        self.index.remove(keys if len(keys) > 1 else keys[0])
        for key in set(keys):
            del self.model[key]
        self.check()

    @rule()
    def remove_all(self):
        self.index.remove(list(self.model))
        self.model.clear()
        self.check()

    @rule(number=strategies.integers(0, POOL - 1))
    def refused(self, number):
        """What fails changes nothing."""
        new = self.key(POOL + 1000)
        if self.model:
            known = next(iter(self.model))
            with pytest.raises(ValueError, match="upsert replaces it"):
                self.index.add(self.pool.items([number, number]), [new, known])
            with pytest.raises(KeyError):
                self.index.remove([known, new])
            if self.carries:
                wrong = {"number": ["text", "text"]}
                with pytest.raises(ValueError, match="'number' holds int64"):
                    self.index.upsert(self.pool.items([number, number]), [known, new], wrong)
        with pytest.raises(KeyError):
            self.index.get([new])
        with pytest.raises(ValueError, match="row 1 holds only zeros"):
            self.index.add({name: rows * [[1], [0]] for name, rows in self.pool.items([number, number]).items()})
        assert new not in self.index
        self.check()

    @rule()
    def compact(self):
        self.index.compact()
        self.check()

    @rule(elsewhere=strategies.booleans())
    def save(self, elsewhere):
        name = "elsewhere" if elsewhere else "index"
        self.index.save(self.folder / name, replace=True)
        self.saved[name] = (dict(self.model), self.next_id)
        self.index.verify()
        assert len([entry for entry in (self.folder / name).iterdir() if entry.is_dir()]) == 1

    @precondition(lambda self: self.saved)
    @rule(data=strategies.data(), memory_map=strategies.booleans(), exact_pays=strategies.booleans())
    def load(self, data, memory_map, exact_pays):
        """Also by a machine without matrix units, where the exact type becomes another."""
        type(self).exact_pays = exact_pays
        name = data.draw(strategies.sampled_from(sorted(self.saved)))
        self.index = TupleIndex.load(self.folder / name, memory_map=memory_map)
        model, self.next_id = self.saved[name]
        self.model = dict(model)
        self.check()

    @rule(k=strategies.integers(1, 12), query=strategies.integers(0, 5))
    def search_with_little_effort(self, k, query):
        """Fewer lists, codes or nodes may miss items, and never return wrong or repeated ones."""
        self.check_hits(self.index.search(self.queries(query), k=k), k, query, set(self.model), whole=False)

    @precondition(lambda self: self.carries)
    @rule(
        k=strategies.integers(1, 200),
        query=strategies.integers(0, 5),
        year=strategies.sampled_from(YEARS),
        kind=strategies.sampled_from(sorted(FILTERS)),
    )
    def search_filtered(self, k, query, year, kind):
        where, meets = FILTERS[kind](year)
        there = {key for key, row in self.model.items() if meets(row)}
        hits = self.index.search(self.queries(query), k=k, where=where, **FACTORIES.get(self.factory, {}))
        self.check_hits(hits, k, query, there, whole=True)

    @rule(query=strategies.integers(0, 5))
    def keep_an_answer(self, query):
        self.hits.append((self.index.search(self.queries(query), k=9), dict(self.model)))

    @rule()
    def look_up_kept_answers(self):
        """Metadata is looked up now, and is that of the time of asking."""
        for hits, model in self.hits:
            assert [[model[key] for key, _, _ in row] for row in hits] == hits.metadata
        self.hits.clear()

    def held(self):
        """How the index is built."""
        return {"factory": self.factory}

    def row(self, number, year):
        metadata = {"number": number, "year": year if year % 7 else None, "name": f"항목 {number}"}
        return Row(number, metadata if self.carries else {})

    def columns(self, rows):
        return {name: [row[name] for row in rows] for name in ("number", "year", "name")} if self.carries else None

    def key(self, number):
        return f"항목 {number}" if self.named else number

    def queries(self, query):
        return {"text": self.pool.queries["text"][query]}

    def store(self, keys, rows):
        self.model.update(zip(keys, rows))
        if not self.named:
            self.next_id = max([self.next_id, *(key + 1 for key in keys)])

    def check(self):
        """Everything that is asked of an index at any moment."""
        index, model = self.index, self.model
        assert len(index) == len(model)
        assert set(index.ids().tolist()) == set(model) and len(index.ids()) == len(model)
        assert index.get(list(model)) == list(model.values())
        assert [index.get(key) for key in list(model)[:3]] == list(model.values())[:3]
        assert all((self.key(number) in index) == (self.key(number) in model) for number in range(0, POOL, 9))
        for k, query in ((len(model) + 3, 0), (5, 1), (1, 2)):
            hits = index.search(self.queries(query), k=k, **FACTORIES.get(self.factory, {}))
            self.check_hits(hits, k, query, set(model), whole=True)
        if model:
            self.check_vectors()

    def check_vectors(self):
        keys = list(self.model)[::-3]
        true = self.pool.vectors[[self.model[key].number for key in keys]]
        close = self.pool.coarseness if self.factory in ESTIMATES else 1e-6
        assert (np.abs(self.index.vectors(keys) - true) <= close).all()

    def check_hits(self, hits, k, query, there, whole):
        """Ids, order, scores and metadata of one query's hits; `there`: the ids that may be found.

        whole: whether every item was looked at, so that as many as there are come back.
        """
        count = min(k, len(there))
        assert hits.counts.tolist() == [count]
        assert hits.ids.shape == hits.scores.shape == (1, k)
        ids, scores = hits.ids[0, :count].tolist(), hits.scores[0, :count]
        assert len(set(ids)) == count and set(ids) <= there
        assert (hits.ids[0, count:] == ("" if self.named else -1)).all()
        assert (hits.scores[0, count:] == -np.inf).all()
        assert (np.diff(scores) <= 0).all()
        assert hits.metadata == [[self.model[key] for key in ids]]
        assert [(key, row) for key, _, row in next(iter(hits))] == [(key, self.model[key]) for key in ids]
        found = [self.model[key].number for key in ids]
        true, bound = self.pool.scores[query], self.pool.bounds[query]
        assert hits.exact is (self.factory not in ESTIMATES)
        slack = self.pool.coarse_bounds[query] if self.factory in ESTIMATES else bound[found]
        assert (np.abs(scores - true[found]) <= slack).all()
        if whole and self.factory in FINDS_THE_BEST:
            best = sorted((true[self.model[key].number] for key in there), reverse=True)[:count]
            assert (np.abs(true[found] - best) <= 2 * bound.max()).all()  # the very items, but for ties


class BareHistory(History):
    """Items have ids alone."""

    carries = False


class MilvusHistory(History):
    """Tuples in a collection of Milvus Lite: what is saved is where they are, what is loaded is their present state."""

    uri: Path

    def held(self):
        self.collection = f"history{next(collection_numbers)}"
        return {"factory": "auto", "backend": "milvus", "uri": self.uri, "collection": self.collection}

    @precondition(lambda self: self.saved)
    @rule(data=strategies.data())
    def load(self, data):
        name = data.draw(strategies.sampled_from(sorted(self.saved)))
        self.index = TupleIndex.load(self.folder / name)
        self.check()

    def teardown(self):
        super().teardown()
        if hasattr(self, "index"):
            self.index._tuples.drop()


@pytest.fixture(scope="module")
def pool(make_score, unit_embeddings, unit_rows, brute_force, tolerance):
    rows = {name: values.numpy() for name, values in unit_embeddings(2, POOL, DIM, seed=5).items()}
    queries = unit_rows(6, DIM, seed=6).numpy()
    return Pool(make_score("pairs_and_hadamard", 3, DIM), rows, queries, brute_force, tolerance)


def run_histories(factory, pool, monkeypatch, histories, steps, kind=History, **more):
    """Number of histories that ran."""
    monkeypatch.setattr(local, "FOLD_ROWS", 8)
    monkeypatch.setattr(exact_search, "FEW_ROWS", 8)
    monkeypatch.setattr(exact_backend, "exact_pays", lambda device: True)
    monkeypatch.setattr(local_files, "exact_pays", lambda device: machine.exact_pays)
    about = {"pool": pool, "factory": factory, "ended": 0}
    machine = type("HistoryOf" + factory, (kind,), {**about, **more})
    options = {"max_examples": histories, "stateful_step_count": steps, "suppress_health_check": list(HealthCheck)}
    run_state_machine_as_test(machine, settings=settings(**options))
    return machine.ended


@pytest.mark.parametrize("factory", FACTORIES)
def test_short_histories_agree_with_a_dictionary(factory, pool, monkeypatch):
    assert run_histories(factory, pool, monkeypatch, histories=20, steps=10) >= 20


@pytest.mark.parametrize("factory", ["Flat", "IVF4,PQ4x4,RFlat"])
def test_items_without_metadata_live_as_long(factory, pool, monkeypatch):
    assert run_histories(factory, pool, monkeypatch, histories=10, steps=10, kind=BareHistory) >= 10


@pytest.mark.nightly
@pytest.mark.parametrize("factory", FACTORIES)
def test_a_thousand_histories_agree_with_a_dictionary(factory, pool, monkeypatch, capsys):
    share = -(-NIGHTLY_HISTORIES // len(FACTORIES))
    count = run_histories(factory, pool, monkeypatch, histories=share, steps=NIGHTLY_STEPS)
    bare = run_histories(factory, pool, monkeypatch, histories=share // 8, steps=NIGHTLY_STEPS, kind=BareHistory)
    with capsys.disabled():
        print(f"\n{factory}: {count} histories of up to {NIGHTLY_STEPS} steps, {bare} more without metadata")
    assert count >= share and bare >= share // 8


@pytest.mark.slow
def test_fifty_histories_in_milvus_agree_with_a_dictionary(pool, monkeypatch, tmp_path, capsys):
    count = run_histories(MILVUS, pool, monkeypatch, 50, 10, MilvusHistory, uri=tmp_path / "lite.db")
    with capsys.disabled():
        print(f"\nMilvus Lite: {count} histories of up to 10 steps")
    assert count >= 50
