"""Whatever cannot be reached, opened or recognised is one error that names it, and never a token."""

import json
import subprocess
import sys
import time

import numpy as np
import pyarrow as pa
import pytest

from mmcl.index.milvus import MilvusTuples
from mmcl.index.milvus_client import Connection

OTHER_PROCESS = """
import sys
from mmcl.index.milvus import MilvusTuples
assert "pymilvus" not in sys.modules and "milvus_lite" not in sys.modules  # both take a second
import os, numpy as np, pyarrow as pa
tuples = MilvusTuples.open(sys.argv[1], "c", 8)
print(len(tuples), tuples.columns, tuples.get([0, 59]))
tuples.add(np.arange(100, 103), np.ones((3, 8), np.float32), pa.table({"row": [7, 8, 9]}))
sys.stdout.flush()
os._exit(9)
"""


@pytest.fixture
def path(tmp_path):
    return tmp_path / "tuples.db"


def index_files(path):
    return list(path.rglob("*.idx"))


def test_the_last_one_to_close_a_path_gives_it_up(path, fill, start_server):
    tuples = fill(MilvusTuples.create(path, "c", 8, named=False), 60)
    again = MilvusTuples.open(str(path), "c", 8)
    tuples.close()
    tuples.close()
    assert len(again) == 60
    with pytest.raises(RuntimeError, match="connection to Milvus at .* is closed"):
        len(tuples)
    again.close()
    process, address = start_server(path)
    with pytest.raises(ConnectionError, match=f"{path} is open elsewhere: .* --host 127.0.0.1"):
        MilvusTuples.open(path, "c", 8)
    served = MilvusTuples.open(address, "c", 8)
    assert served.get([0, 59]) == [{"row": 0}, {"row": 59}]
    served.close()
    process.terminate()
    process.wait()
    MilvusTuples.open(path, "c", 8).close()


@pytest.mark.slow
def test_what_a_killed_process_wrote_is_there(path, fill):
    fill(MilvusTuples.create(path, "c", 8, named=False), 60).close()
    run = subprocess.run([sys.executable, "-c", OTHER_PROCESS, path], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout) == (9, "60 ['row'] [{'row': 0}, {'row': 59}]\n"), run.stderr
    opened = MilvusTuples.open(path, "c", 8)
    assert len(opened) == 63 and opened.get([101]) == [{"row": 8}]
    opened.close()


def test_half_written_index_file_is_built_anew(path, fill, vectors, queries, check_search):
    tuples = fill(MilvusTuples.create(path, "c", 8, named=False, factory="HNSW16"), 60)
    tuples.close()
    MilvusTuples.open(path, "c", 8).close()
    (file,) = index_files(path)
    file.write_bytes(file.read_bytes()[:40])
    opened = MilvusTuples.open(path, "c", 8)
    check_search(opened, dict(enumerate(vectors[:60])), queries, 5)
    opened.close()
    assert len(index_files(path)[0].read_bytes()) > 40


def test_existing_collections_are_replaced_only_when_asked(make, uri, fill):
    tuples = fill(make(), 3)
    with pytest.raises(
        ValueError, match=f"there is a collection '{tuples.collection}' at .* already; open it, or give replace"
    ):
        MilvusTuples.create(uri, tuples.collection, 8, named=False)
    assert len(tuples) == 3
    new = MilvusTuples.create(uri, tuples.collection, 5, named=True, replace=True)
    assert len(new) == 0 and new.info()["width"] == 5
    new.add(np.array(["a"], object), np.ones((1, 5), np.float32), pa.table({}))
    assert new.get(["a"]) == [{}]
    new.close()


def test_foreign_collections_are_neither_opened_nor_replaced(make, uri):
    tuples = make()
    schema = tuples._connection.new_schema()
    from pymilvus import DataType

    schema.add_field("key", DataType.INT64, is_primary=True)
    schema.add_field("embedding", DataType.FLOAT_VECTOR, dim=8)
    name = f"{tuples.collection}_foreign"
    tuples._connection.call("create_collection", collection_name=name, schema=schema)
    for use in (
        lambda: MilvusTuples.open(uri, name, 8),
        lambda: MilvusTuples.create(uri, name, 8, named=False, replace=True),
    ):
        with pytest.raises(ValueError, match=f"'{name}' .*was not made by mmcl: .*'embedding': 'FLOAT_VECTOR'"):
            use()
    assert tuples._connection.call("has_collection", collection_name=name)


def test_what_differs_is_named(make, uri):
    tuples = make(factory="IVF4,Flat")
    with pytest.raises(ValueError, match="its vectors have width 8, not 16"):
        MilvusTuples.open(uri, tuples.collection, 16)
    about = json.loads(tuples._about.to_text())
    for change, reason in (
        ({"factory": "HNSW8"}, "index_type is 'IVF_FLAT', not 'HNSW'; M is None, not 8"),
        ({"factory": "IVF5,Flat"}, "nlist is 4, not 5"),
        ({"format_version": 3}, "property 'mmcl' has format version 3; this version reads 1 and 2"),
    ):
        tuples._rows.call("alter_collection_properties", properties={"mmcl": json.dumps(about | change)})
        with pytest.raises(ValueError, match=f"collection '{tuples.collection}' at .*{reason}"):
            MilvusTuples.open(uri, tuples.collection, 8)
    with pytest.raises(ValueError, match="there is no collection 'nowhere'"):
        MilvusTuples.open(uri, "nowhere", 8)


def test_verify_and_info_say_what_is_there(make, fill):
    tuples = fill(make(factory="IVF4,SQ8"), 3)
    tuples.verify(8)
    with pytest.raises(ValueError, match="its vectors have width 8, not 9"):
        tuples.verify(9)
    info = tuples.info()
    wanted = {"factory": "IVF4,SQ8", "index_type": "IVF_SQ8", "exact": False, "width": 8, "count": 3}
    assert info.items() >= wanted.items() and info["collection"] == tuples.collection and info["columns"] == ["row"]
    assert json.loads(json.dumps(tuples.saving().about())) == {"backend": "milvus", **info}
    assert (tuples.device, tuples.stored_bytes, tuples.named) == ("cpu", 96, False)
    with pytest.raises(ValueError, match="Milvus searches where it runs; use device='cpu'"):
        tuples.move("cuda:0")


@pytest.mark.parametrize("name", ["", "1a", "a-b", "../a", "a" * 256, None, "é"])
def test_collection_names_that_milvus_does_not_take_are_refused(name, path):
    with pytest.raises(ValueError, match=r"a collection is named by .* got "):
        MilvusTuples.create(path, name, 8, named=False)
    assert not path.exists()


def test_wrong_paths_are_named(path, tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no Milvus Lite database at .*tuples.db"):
        MilvusTuples.open(path, "c", 8)
    with pytest.raises(FileNotFoundError, match="there is no folder .*/nowhere to keep tuples.db in"):
        MilvusTuples.create(tmp_path / "nowhere" / "tuples.db", "c", 8, named=False)
    path.write_text("an older Milvus Lite kept its database so")
    with pytest.raises(ValueError, match="tuples.db is a file"):
        MilvusTuples.create(path, "c", 8, named=False)


@pytest.mark.parametrize(
    "uri", ["localhost:19530", "tuples", "ftp://host/x.db", "http://", "http://host:port", "", None, 5], ids=str
)
def test_other_uris_are_refused(uri):
    with pytest.raises(
        ValueError, match=r"uri must be a path that ends in '.db' .*or a server's http://host:port, got "
    ):
        MilvusTuples.create(uri, "c", 8, named=False)


def test_nobody_there_is_said_soon_and_without_the_token():
    start = time.monotonic()
    with pytest.raises(ConnectionError) as raised:
        MilvusTuples.open("http://me:s3cret@127.0.0.1:1/db", "c", 8, token="root:t0ken")
    assert time.monotonic() - start < 15
    message = str(raised.value)
    assert message.startswith("cannot connect to Milvus at http://127.0.0.1:1/db: ")
    assert raised.value.__cause__ is None and raised.value.__suppress_context__
    assert "s3cret" not in message and "t0ken" not in message


def test_token_is_never_shown(uris):
    uri = uris["server"].replace("//", "//me:s3cret@")
    tuples = MilvusTuples.create(uri, "token", 8, named=False, token="root:t0ken", replace=True)
    with pytest.raises(RuntimeError) as refused:
        tuples._rows.call("query", filter='t0ken == "root:t0ken"')
    shown = f"{tuples!r} {tuples.info()} {refused.value}"
    assert "refused query" in shown and "t0ken" not in shown and "s3cret" not in shown
    json.dumps(tuples.info())
    tuples.close()


@pytest.mark.parametrize("package", ["pymilvus", "milvus_lite.adapter.grpc.server"])
def test_missing_packages_are_named_with_the_extra(package, path, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=rf"{package.split('.')[0].replace('_', '.')}: pip install 'mmcl\[milvus\]'"):
        MilvusTuples.create(path, "c", 8, named=False)


@pytest.mark.slow
def test_a_server_that_is_gone_is_an_error_soon(tmp_path, start_server, fill):
    process, address = start_server(tmp_path / "server")
    tuples = fill(MilvusTuples.create(address, "c", 8, named=False), 3)
    process.kill()
    process.wait()
    start = time.monotonic()
    with pytest.raises(ConnectionError, match=f"lost the connection to Milvus at {address}"):
        tuples.get([0])
    assert time.monotonic() - start < 15


def test_milvus_lite_is_not_pinged(tmp_path, monkeypatch):
    """It hangs up on all connections of a process that pings it as pymilvus does, now and then."""
    import grpc

    given, channel = [], grpc.insecure_channel

    def watched(address, options=None, **more):
        given.append(dict(options or []))
        return channel(address, options=options, **more)

    monkeypatch.setattr(grpc, "insecure_channel", watched)
    Connection(str(tmp_path / "tuples.db")).close()
    (options,) = [each for each in given if "grpc.keepalive_time_ms" in each]
    assert options["grpc.keepalive_time_ms"] > 1e9 and not options["grpc.keepalive_permit_without_calls"]
