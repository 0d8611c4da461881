"""Faults of Milvus Lite and pymilvus that the backend works around: a test that fails here is one to take out there."""

import copy
import json

import numpy as np
import pytest

from mmcl.index.milvus import MilvusTuples
from mmcl.index.milvus_client import OPEN
from mmcl.index.milvus_collection import described_index


@pytest.fixture
def lite(tmp_path):
    return tmp_path / "lite.db"


@pytest.fixture
def client(make):
    """A bare client, and a collection of ours."""
    tuples = make(named=True)
    return tuples._connection._client, tuples.collection


def new_index(client, collection, **parameters):
    client.release_collection(collection)
    client.drop_index(collection, "vector")
    index = client.prepare_index_params(field_name="vector", metric_type="IP", **parameters)
    client.create_index(collection, index, sync=False)
    return client.describe_index(collection, "vector")


@pytest.mark.parametrize("kind", ["IVF_PQ", "DISKANN", "GPU_IVF_FLAT", "SCANN", "NONSENSE"])
def test_index_types_are_accepted_described_and_never_built(kind, client):
    """So what Milvus Lite describes proves nothing: it may build only the types of a list."""
    assert new_index(*client, index_type=kind)["index_type"] == kind


def test_what_lite_would_ignore_is_refused(uri, make):
    collection = f"{make().collection}_pq"
    with pytest.raises(ValueError, match="Milvus Lite accepts IVF_PQ and then searches without it"):
        MilvusTuples.create(uri, collection, 8, named=False, factory="IVF4,PQ4")
    with pytest.raises(ValueError, match="there is no collection"):
        MilvusTuples.open(uri, collection, 8)


def test_numbers_of_an_index_are_dropped(client, make):
    """pymilvus sends them side by side, Milvus Lite reads them under "params"."""
    described = new_index(*client, index_type="IVF_FLAT", params={"nlist": 4})
    assert "4" not in json.dumps(described, default=str)
    ours = make(factory="IVF4,Flat")
    assert described_index(ours._connection, ours.collection)["params"] == {"nlist": 4}


def test_ids_with_quotes_break_the_clients_own_lookups(client):
    connection, collection = client
    connection.upsert(collection, [{"id": "a'b", "vector": [0.0] * 8, "metadata": {}}])
    with pytest.raises(Exception, match="unterminated string"):
        connection.get(collection, ids=["a'b"])
    connection.upsert(collection, [{"id": 'a"b', "vector": [0.0] * 8, "metadata": {}}])
    pages = connection.query_iterator(collection, batch_size=1, output_fields=["id"])
    assert pages.next()[0]["id"] == 'a"b'
    with pytest.raises(Exception, match="unterminated string|expected"):
        pages.next()


def test_nan_in_json_becomes_null(client):
    connection, collection = client
    connection.upsert(collection, [{"id": "a", "vector": [0.0] * 8, "metadata": {"x": np.nan}}])
    assert connection.query(collection, filter='id == "a"', output_fields=["metadata"])[0]["metadata"] == {"x": None}


def test_probing_one_list_finds_too_few(make, queries, fill, build_index):
    tuples = fill(make(factory="IVF16,Flat"), 400)
    build_index(tuples)
    found = tuples._rows.nearest(queries, 400, "", {"nprobe": 1})
    assert max(map(len, found)) < 400


def test_properties_changed_at_once_undo_each_other(lite, monkeypatch):
    """So a server of it has one worker; `LITE_TURN` does the same in this process."""
    tuples = MilvusTuples.create(lite, "at_once", 8, named=False)
    database, copied = OPEN[str(lite.resolve())].database, copy.deepcopy

    def overtaken(schema):
        monkeypatch.undo()
        before = copied(schema)
        database.alter_collection_properties("at_once", {"other": "1"})
        return before

    monkeypatch.setattr(copy, "deepcopy", overtaken)
    database.alter_collection_properties("at_once", {"one": "1"})
    properties = tuples._rows.call("describe_collection")["properties"]
    assert "one" in properties and "other" not in properties
    tuples.close()


def test_server_listens_on_all_addresses_unless_told_otherwise():
    from milvus_lite.adapter.grpc import server

    assert server.DEFAULT_HOST == "0.0.0.0"


def test_server_asks_for_no_password(uris):
    MilvusTuples.create(uris["server"], "anyone", 8, named=False, token="nobody:wrong", replace=True).close()
