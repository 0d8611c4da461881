"""Saving: what is shared between versions and folders, and who may write where."""

import os
import shutil

import numpy as np
import pyarrow.parquet as pq
import pytest

from mmcl.index import TupleIndex
from mmcl.scores import SumOfPairs


def take(items, rows):
    return {name: items[name][rows] for name in ("image", "audio")}


def test_save_links_what_did_not_change(build, items, tmp_path):
    index = build(rows=500, factory="HNSW16")
    index.save(tmp_path / "index")

    def inode():
        (version,) = [path for path in (tmp_path / "index").iterdir() if path.is_dir()]
        return (version / "index.faiss").stat().st_ino

    first = inode()
    index.add(take(items, slice(500, 510)))
    index.remove(3)
    index.save(tmp_path / "index")
    assert inode() == first
    loaded = TupleIndex.load(tmp_path / "index")
    loaded.add(take(items, slice(510, 520)))
    loaded.save(tmp_path / "index")
    assert inode() == first
    assert len(TupleIndex.load(tmp_path / "index")) == 519
    loaded.compact()
    loaded.save(tmp_path / "index")
    assert inode() != first
    TupleIndex.load(tmp_path / "index").verify()


def vectors_file(folder):
    (file,) = [*folder.glob("v-*/index.faiss"), *folder.glob("v-*/rows.npy")]
    return file


def flip(file, keep_time=False):
    """One bit, in place."""
    before = file.stat()
    with open(file, "r+b") as opened:
        opened.seek(before.st_size // 2)
        byte = opened.read(1)
        opened.seek(before.st_size // 2)
        opened.write(bytes([byte[0] ^ 1]))
    if keep_time:
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize("factory", ["Flat", "HNSW16", "Exact"])
def test_an_index_in_memory_is_saved_whole_whatever_became_of_its_file(factory, build, queries, tmp_path):
    build(rows=300, factory=factory).save(tmp_path / "index")
    loaded = TupleIndex.load(tmp_path / "index")
    expected = loaded.search({"text": queries}).scores
    flip(vectors_file(tmp_path / "index"), keep_time=True)
    loaded.save(tmp_path / "copy")
    flip(vectors_file(tmp_path / "copy"))
    loaded.save(tmp_path / "copy")
    np.testing.assert_array_equal(TupleIndex.load(tmp_path / "copy").search({"text": queries}).scores, expected)


CHANGES = {
    "saved": lambda index, folder: index.save(folder / "index"),
    "saved elsewhere": lambda index, folder: index.save(folder / "other"),
    "compacted": lambda index, folder: index.compact(),
    "saved where the folder is gone": lambda index, folder: (
        (folder / "index").rename(folder / "moved"),
        index.save(folder / "other"),
    ),
}


@pytest.mark.parametrize("factory", ["Flat", "HNSW16", "Exact"])
@pytest.mark.parametrize("change", CHANGES)
def test_what_was_written_into_a_mapped_file_is_not_taken_for_whole(factory, change, build, tmp_path, monkeypatch):
    build(rows=300, factory=factory).save(tmp_path / "index")
    monkeypatch.chdir(tmp_path)
    mapped = TupleIndex.load("index", memory_map=True)
    monkeypatch.chdir("/")
    mapped.remove(299)
    mapped.save(tmp_path / "before")
    flip(vectors_file(tmp_path / "index"))
    with pytest.raises(ValueError, match=f"{vectors_file(tmp_path / 'index').name} was changed after it was opened"):
        CHANGES[change](mapped, tmp_path)
    TupleIndex.load(tmp_path / "before").verify()


def test_a_mapped_index_outlives_the_folder_it_was_loaded_from(build, queries, tmp_path):
    build(rows=300, factory="HNSW16").save(tmp_path / "index")
    mapped = TupleIndex.load(tmp_path / "index", memory_map=True)
    expected = mapped.search({"text": queries})
    shutil.rmtree(tmp_path / "index")
    mapped.save(tmp_path / "other")
    np.testing.assert_array_equal(TupleIndex.load(tmp_path / "other").search({"text": queries}).ids, expected.ids)


@pytest.mark.parametrize("memory_map", [False, True])
def test_another_folder_gets_files_of_its_own(memory_map, build, items, tmp_path):
    build(rows=100).save(tmp_path / "index")
    index = TupleIndex.load(tmp_path / "index", memory_map=memory_map)
    index.save(tmp_path / "copy")
    one, other = ({f.stat().st_ino for f in (tmp_path / name).rglob("*")} for name in ("index", "copy"))
    assert not one & other
    for file in (tmp_path / "index").glob("v-*/*"):
        file.write_bytes(b"")
    TupleIndex.load(tmp_path / "copy").verify()


def test_metadata_is_written_in_small_groups(build, tmp_path):
    """A memory-mapped index reads a whole group to show one row."""
    score = SumOfPairs(("a", "b"), 2)
    rows = np.ones((20_000, 2), np.float32)
    TupleIndex.build(score, {"a": rows}, metadata={"number": range(20_000)}, factory="Flat").save(tmp_path / "index")
    (file,) = (tmp_path / "index").rglob("items.parquet")
    assert pq.read_metadata(file).num_row_groups == 3
    mapped = TupleIndex.load(tmp_path / "index", memory_map=True)
    assert mapped.get([0, 19_999]) == [{"number": 0}, {"number": 19_999}]


def test_a_writer_does_not_overwrite_what_another_stored(build, items, tmp_path):
    build(rows=10).save(tmp_path / "index")
    one, other = (TupleIndex.load(tmp_path / "index") for _ in range(2))
    one.add(take(items, [20]))
    one.save(tmp_path / "index")
    other.add(take(items, [21]))
    with pytest.raises(ValueError, match="another writer.*load it again"):
        other.save(tmp_path / "index")
    assert len(TupleIndex.load(tmp_path / "index")) == 11
    other.save(tmp_path / "index", replace=True)
    one.save(tmp_path / "elsewhere")
    assert len(TupleIndex.load(tmp_path / "index")) == len(TupleIndex.load(tmp_path / "elsewhere")) == 11


def test_a_second_writer_waits_and_then_says_who_is_in_the_way(build, tmp_path, monkeypatch):
    from filelock import FileLock

    from mmcl.index import store

    index = build(rows=10)
    index.save(tmp_path / "index")
    monkeypatch.setattr(store, "LOCK_SECONDS", 0.2)
    with FileLock(str(tmp_path / "index" / ".lock")), pytest.raises(TimeoutError, match=r"another process.*\.lock"):
        index.save(tmp_path / "index")
    index.save(tmp_path / "index")
