"""Several indexes side by side in Milvus: a collection each, all changed together or none."""

import itertools

import numpy as np
import pytest

from mmcl.index import TupleIndex, TupleIndexes

NAMES = ("image", "audio", "text")
TWO = [("image", "audio"), ("text",)]
numbers = itertools.count()


@pytest.fixture(scope="module")
def score(make_score):
    return make_score("pairs_and_neutral", 3, 16)


@pytest.fixture
def build_all(score, items, uri):
    """build_all(**options): 60 items of two indexes in collections of their own."""
    made = []

    def make(**options):
        options = {"stored": TWO, "collection": f"side{next(numbers)}", "metadata": {"row": list(range(60))}} | options
        rows = {name: items[name][:60] for name in NAMES}
        made.append(TupleIndexes.build(score, rows, backend="milvus", uri=uri, **options))
        return made[-1]

    yield make
    for index in (indexes.storing(stored) for indexes in made for stored in indexes.stored):
        index._tuples.close()


def some(items, rows):
    return {name: items[name][rows] for name in NAMES}


def answers(indexes, items):
    """Ids and metadata that every index gives a few queries."""
    found = []
    for stored in TWO:
        hits = indexes.search({n: items[n][200:203] for n in NAMES if n not in stored}, k=100, target=stored)
        found.append([[(key, row) for key, _, row in answer] for answer in hits])
    return found


def test_they_answer_as_in_this_process_and_are_found_again(build_all, score, items, tmp_path):
    indexes = build_all(collection="photos", replace=True)
    local = TupleIndexes.build(score, some(items, slice(0, 60)), metadata={"row": list(range(60))}, stored=TWO)
    assert answers(indexes, items) == answers(local, items)
    assert [indexes.storing(names).info()["collection"] for names in TWO] == ["photos_image_audio", "photos_text"]
    indexes.save(tmp_path / "all")
    loaded = TupleIndexes.load(tmp_path / "all")
    assert loaded.stored == TWO and answers(loaded, items) == answers(local, items)
    indexes.verify()
    with pytest.raises(ValueError, match="photos_image_audio"):
        build_all(collection="photos")
    for stored in TWO:
        loaded.storing(stored)._tuples.close()


def test_they_change_together(build_all, items):
    indexes = build_all()
    indexes.add(some(items, [60, 61]))
    indexes.upsert(some(items, [70]), ids=[5], metadata={"row": [70]})
    indexes.remove([0, 61])
    expected = {row: row for row in range(1, 61)} | {5: 70}
    for stored in TWO:
        index = indexes.storing(stored)
        assert index.ids().tolist() == sorted(expected)
        true = index.score.item_vectors({name: items[name][list(expected.values())] for name in stored})
        np.testing.assert_allclose(index.vectors(list(expected)), true.detach().numpy(), rtol=1e-5)
    assert indexes.get([5, 60]) == [{"row": 70}, {"row": None}]
    indexes.verify()


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("how", ["add", "upsert", "remove"])
def test_a_change_that_one_refuses_changes_none(how, named, build_all, items, monkeypatch):
    ids = [f"item {row}" for row in range(60)] if named else list(range(60))
    indexes = build_all(ids=ids)
    before = answers(indexes, items)
    new = ["x", "y"] if named else [600, 601]
    keys = {"add": new, "upsert": [ids[7], new[0]], "remove": [ids[7], ids[8]]}[how]

    given = [] if how == "remove" else [some(items, [70, 71])]

    def fail(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(indexes.storing("text")._tuples, how, fail)
        with pytest.raises(KeyboardInterrupt):
            getattr(indexes, how)(*given, ids=keys)
    assert answers(indexes, items) == before
    assert [len(indexes.storing(stored)) for stored in TWO] == [60, 60]
    np.testing.assert_allclose(
        indexes.storing(TWO[0]).vectors([ids[7]]),
        indexes.score.item_vectors({name: items[name][7:8] for name in TWO[0]}).detach().numpy(),
        rtol=1e-5,
    )
    indexes.verify()


def test_a_build_that_fails_leaves_no_collection(build_all, score, items, uri):
    rows = {name: items[name][:20].copy() for name in NAMES}
    rows["text"][7] = np.nan
    options = {"stored": TWO, "backend": "milvus", "uri": uri, "collection": f"side{next(numbers)}"}
    with pytest.raises(ValueError, match="text: row 7 holds NaN"):
        TupleIndexes.build(score, rows, **options)
    with pytest.raises(ValueError, match="IVF4,PQ3"):
        TupleIndexes.build(score, some(items, slice(0, 20)), factory={"text": "IVF4,PQ3"}, **options)
    with pytest.raises(ValueError, match="memory_budget"):
        TupleIndexes.build(score, some(items, slice(0, 20)), memory_budget="1GB", **options)
    made = TupleIndexes.build(score, some(items, slice(0, 20)), **options)
    for index in map(made.storing, TWO):
        index._tuples.drop()


def test_collections_of_names_that_milvus_does_not_take(make_score, unit_rows, uri):
    names = ("a b", "a-b", "ü")
    rows = {name: unit_rows(9, 8, seed) for seed, name in enumerate(names)}
    collection = f"side{next(numbers)}"
    score, stored = make_score("sum_of_pairs", names, 8), [(name,) for name in names]
    indexes = TupleIndexes.build(score, rows, stored=stored, backend="milvus", uri=uri, collection=collection)
    found = [indexes.storing(each).info()["collection"] for each in stored]
    assert found == [f"{collection}_a_b", f"{collection}_a_b_1", f"{collection}__"]
    for each in stored:
        asked = {name: rows[name][:2] for name in names if (name,) != each}
        alone = TupleIndex.build(score, rows, modalities=each, factory="Flat").search(asked, k=3)
        np.testing.assert_array_equal(indexes.search(asked, k=3, target=each).ids, alone.ids)
        indexes.storing(each)._tuples.drop()
