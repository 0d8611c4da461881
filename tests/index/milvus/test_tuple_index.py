"""A tuple index is not built in Milvus half, or over another, or nowhere."""

import pytest


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
