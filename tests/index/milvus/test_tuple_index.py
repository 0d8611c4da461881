"""A tuple index kept in Milvus answers as one in this process does."""

import numpy as np
import pytest

from mmcl.index import TupleIndex

STORED = ("image", "audio")


@pytest.fixture
def queries(unit_rows):
    return unit_rows(25, 16, seed=77).numpy()


def take(items, rows):
    return {name: items[name][rows] for name in STORED}


def test_the_same_calls_give_the_same_answers(build, items, queries, tmp_path):
    uri = str(tmp_path / "tuples.db")
    metadata = {"year": list(range(200))}
    here = build(rows=200, metadata=metadata)
    there = build(rows=200, metadata=metadata, backend="milvus", uri=uri, collection="pairs")
    assert there.info()["backend"] == "milvus"
    for index in (here, there):
        index.remove([3, 4])
        index.add(take(items, [300]), metadata={"year": [7]})
        index.upsert(take(items, [301]), ids=[5], metadata={"year": [8]})
    with pytest.raises(ValueError, match="id 5 "):
        there.add(take(items, [1]), ids=[5])
    there.save(tmp_path / "index")
    for index in (there, TupleIndex.load(tmp_path / "index")):
        for options in ({}, {"where": "year < 50"}, {"where": ("year = ? or year > ?", [7, 190])}):
            expected, hits = (each.search({"text": queries[:5]}, k=10, **options) for each in (here, index))
            np.testing.assert_array_equal(hits.ids, expected.ids)
            np.testing.assert_allclose(hits.scores, expected.scores, rtol=1e-4, atol=1e-5)
            assert hits.metadata == expected.metadata
            assert hits.exact
        assert len(index) == 199
        assert index.get(5) == {"year": 8}
        assert 3 not in index
        assert sorted(index.ids()) == sorted(here.ids())
        np.testing.assert_allclose(index.vectors([0, 5]), here.vectors([0, 5]), rtol=1e-6)


def test_a_bank_goes_along(build, queries, unit_rows, tmp_path):
    bank = {"text": unit_rows(20, 16, seed=3)}
    here = build(rows=50, bank=bank)
    there = build(rows=50, bank=bank, backend="milvus", uri=str(tmp_path / "tuples.db"))
    expected, hits = (each.search({"text": queries[:3]}) for each in (here, there))
    assert hits.kind == "pmi"
    np.testing.assert_array_equal(hits.ids, expected.ids)
    np.testing.assert_allclose(hits.scores, expected.scores, rtol=1e-4, atol=1e-4)


def test_faults_of_the_call_are_named(build, tmp_path, monkeypatch):
    uri = str(tmp_path / "tuples.db")
    with pytest.raises(ValueError, match="needs uri="):
        build(rows=5, backend="milvus")
    with pytest.raises(KeyError, match="unknown backend 'redis'"):
        build(rows=5, backend="redis")
    build(rows=5, backend="milvus", uri=uri)
    with pytest.raises(ValueError, match="collection 'mmcl'.*already.*replace=True"):
        build(rows=5, backend="milvus", uri=uri)
    assert len(build(rows=6, backend="milvus", uri=uri, replace=True)) == 6

    def fail(*_, **__):
        raise RuntimeError("in the middle")

    monkeypatch.setattr("mmcl.index.building.check_metadata", fail)
    with pytest.raises(RuntimeError, match="in the middle"):
        build(rows=5, backend="milvus", uri=uri, collection="half")
    monkeypatch.undo()
    assert len(build(rows=5, backend="milvus", uri=uri, collection="half")) == 5
