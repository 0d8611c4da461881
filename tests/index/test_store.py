"""On disk: whole or refused by name, replaced in one step, readable wherever the folder goes."""

import json
import os
import shutil
import subprocess
import sys
import threading

import numpy as np
import pytest

from mmcl.index import TupleIndex
from mmcl.index.faiss_files import write_faiss
from mmcl.index.store import content_digest

FILES = ("score.safetensors", "index.faiss", "items.parquet")


@pytest.fixture
def saved(build, tmp_path):
    """An index of 30 items on disk."""
    index = build(rows=30, ids=[f"item {i}" for i in range(30)], metadata={"row": list(range(30))})
    index.save(tmp_path / "index")
    return tmp_path / "index"


def version(folder):
    return folder / json.loads((folder / "manifest.json").read_text())["version"]


def edit_manifest(folder, **changes):
    """Change the manifest as someone would who knows how its checksum is made."""
    manifest = json.loads((folder / "manifest.json").read_text()) | changes | {"sha256": "0" * 64}
    text = json.dumps(manifest, indent=2)
    (folder / "manifest.json").write_text(text.replace("0" * 64, content_digest(text.encode())))


def test_what_is_saved_is_what_is_loaded(saved, build, queries):
    index, loaded = build(rows=30, ids=[f"item {i}" for i in range(30)]), TupleIndex.load(str(saved))
    a, b = index.search({"text": queries}), loaded.search({"text": queries})
    np.testing.assert_array_equal(a.ids, b.ids)
    np.testing.assert_array_equal(a.scores, b.scores)
    assert loaded.modalities == ("image", "audio")
    assert loaded.score.config() == index.score.config()
    assert {**loaded.info(), "columns": []} == index.info()
    assert sorted(file.name for file in version(saved).iterdir()) == sorted(FILES)
    loaded.verify()


def test_manifest_says_what_the_index_is(saved):
    manifest = json.loads((saved / "manifest.json").read_text())
    assert manifest["format_version"] == 2
    assert manifest["factory"] == "Flat"
    assert manifest["modalities"] == ["image", "audio"]
    assert manifest["count"] == 30
    assert manifest["fingerprint"] is None
    assert manifest["score"]["name"] == "sum_of_scores"
    assert manifest["padded_width"] == 34
    assert set(manifest["files"]) == set(FILES)
    json.dumps(TupleIndex.load(saved).info())


@pytest.mark.parametrize("name", [*FILES, "manifest.json"])
@pytest.mark.parametrize("place", [0.0, 0.2, 0.5, 0.9, 1.0])
def test_flipped_byte_is_refused_by_file_name(name, place, saved):
    file = saved / name if name == "manifest.json" else version(saved) / name
    content = bytearray(file.read_bytes())
    content[int(place * (len(content) - 1))] ^= 0x01
    file.write_bytes(content)
    with pytest.raises(ValueError, match=name):
        TupleIndex.load(saved)


@pytest.mark.parametrize("name", [*FILES, "manifest.json"])
@pytest.mark.parametrize("change", [lambda b: b[:-1], lambda b: b[: len(b) // 2], lambda b: b"", lambda b: b + b"junk"])
def test_short_and_long_files_are_refused_by_name(name, change, saved):
    file = saved / name if name == "manifest.json" else version(saved) / name
    file.write_bytes(change(file.read_bytes()))
    with pytest.raises(ValueError, match=name):
        TupleIndex.load(saved)


@pytest.mark.parametrize("name", FILES)
def test_missing_file_is_named(name, saved):
    loaded = TupleIndex.load(saved)
    (version(saved) / name).unlink()
    with pytest.raises(ValueError, match=name):
        TupleIndex.load(saved)
    with pytest.raises(ValueError, match=name):
        loaded.verify()


def test_missing_index_is_named(saved, tmp_path):
    (saved / "manifest.json").unlink()
    for path in (saved, tmp_path / "nowhere"):
        with pytest.raises(FileNotFoundError, match=path.name):
            TupleIndex.load(path)


def test_foreign_format_version_is_refused_by_name(saved, build):
    edit_manifest(saved, format_version=1)
    with pytest.raises(ValueError, match=r"manifest.json has format version 1.*reads 2"):
        TupleIndex.load(saved)
    with pytest.raises(ValueError, match="format version 1"):
        build(rows=3).save(saved)


def test_manifest_that_disagrees_with_the_files_is_refused(saved):
    edit_manifest(saved, count=31)
    with pytest.raises(ValueError, match="30 vectors, 30 ids, 30 not removed; the manifest says 30, 30, 31"):
        TupleIndex.load(saved)


def test_new_save_replaces_the_old_and_removes_it(saved, build):
    old = version(saved)
    build(rows=7).save(saved)
    assert len(TupleIndex.load(saved)) == 7
    assert not old.exists()
    assert [path for path in saved.iterdir() if path.is_dir()] == [version(saved)]


@pytest.mark.parametrize("step", ["os.replace", "os.fsync", "pyarrow.parquet.write_table", "mmcl.index.store.sha256"])
def test_failure_before_the_switch_leaves_the_old_version(step, saved, build, monkeypatch):
    def fail(*_, **__):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(step, fail)
        with pytest.raises(OSError, match="No space"):
            build(rows=7, factory="HNSW8").save(saved)
    assert len(TupleIndex.load(saved)) == 30
    build(rows=7).save(saved)
    assert len(TupleIndex.load(saved)) == 7
    assert len([path for path in saved.iterdir() if path.is_dir()]) == 1


def test_full_disk_under_the_vectors_is_an_error(saved, build, monkeypatch):
    """FAISS's own file writer only prints it."""
    index = build(rows=7)
    monkeypatch.setattr("mmcl.index.faiss_backend.write_faiss", lambda *args: write_faiss(*args, name="/dev/full"))
    with pytest.raises(OSError, match="No space"):
        index.save(saved)
    monkeypatch.undo()
    assert len(TupleIndex.load(saved)) == 30


KILLED = """
import os, sys, numpy as np
from mmcl.index import TupleIndex, store
from mmcl.scores import SumOfPairs
step, path = sys.argv[1:]
def die(*_, **__):
    os._exit(9)
setattr(*{"write": (store, "sync"), "manifest": (store, "write_manifest"), "switch": (os, "replace"),
          "remove": (store.shutil, "rmtree")}[step], die)
TupleIndex.build(SumOfPairs(("a", "b"), 4), {"a": np.eye(4)}).save(path)
"""


@pytest.mark.parametrize("step", ["write", "manifest", "switch", "remove"])
def test_kill_at_any_step_leaves_an_index_that_loads(step, saved, build, tmp_path):
    for path, before in ((saved, 30), (tmp_path / "new", None)):
        if path != saved and step == "remove":
            continue  # a first save removes nothing
        assert subprocess.run([sys.executable, "-c", KILLED, step, path], check=False).returncode == 9
        if before is None:
            with pytest.raises(FileNotFoundError):
                TupleIndex.load(path)
        else:
            assert len(TupleIndex.load(path)) == (4 if step == "remove" else before)
        build(rows=5).save(path)
        assert len(TupleIndex.load(path)) == 5
        assert len([entry for entry in path.iterdir() if entry.is_dir()]) == 1


@pytest.mark.parametrize("name", ["a b", "색인 ü", "deep/er/still", "quote'\"$x"])
def test_any_folder_name_works_and_the_folder_may_move(name, build, tmp_path, queries):
    build(rows=20, factory="IVF4,Flat").save(tmp_path / name)
    moved = tmp_path / "moved 옮김"
    shutil.move(tmp_path / name, moved)
    assert len(TupleIndex.load(moved).search({"text": queries}, nprobe=4)) == 25


def test_folders_and_files_of_others_are_not_overwritten(build, tmp_path):
    index = build(rows=5)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("years of work")
    with pytest.raises(ValueError, match=r"thesis\.tex"):
        index.save(tmp_path / "full")
    assert os.listdir(tmp_path / "full") == ["thesis.tex"]
    (tmp_path / "file").write_text("x")
    with pytest.raises(ValueError, match="is a file"):
        index.save(tmp_path / "file")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "manifest.json").write_text('{"format_version": 1, "shards": []}')
    with pytest.raises(ValueError, match=r"manifest\.json is not the manifest of an index"):
        index.save(tmp_path / "other")
    with pytest.raises(ValueError, match=r"manifest\.json is not the manifest of an index"):
        TupleIndex.load(tmp_path / "other")
    (tmp_path / "empty").mkdir()
    index.save(tmp_path / "empty")
    assert len(TupleIndex.load(tmp_path / "empty")) == 5


def test_readers_see_whole_versions_while_writers_write(saved, build):
    """Two writers and a reader at once: every load is one of the versions, none is torn or missing."""
    indexes, failures = [build(rows=rows) for rows in (11, 12)], []

    def write(index):
        try:
            for _ in range(5):
                index.save(saved, replace=True)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=write, args=(index,)) for index in indexes]
    for thread in threads:
        thread.start()
    seen = set()
    while any(thread.is_alive() for thread in threads):
        seen.add(len(TupleIndex.load(saved)))
    for thread in threads:
        thread.join()
    assert failures == []
    assert seen <= {30, 11, 12}
    assert len(TupleIndex.load(saved)) in (11, 12)


def test_nothing_is_pickled(saved):
    for file in version(saved).iterdir():
        assert b"pickle" not in file.read_bytes()
        assert not file.read_bytes().startswith(b"\x80")
