"""Folders of an index under any name and from anywhere; files that are damaged, replaced or removed meanwhile."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from mmcl.index import TupleIndex, store

STORED = ("image", "audio")
FILES = ("score.safetensors", "index.faiss", "items.parquet", "added.npy", "added.parquet", "removed.npy")


def take(items, rows):
    return {name: items[name][rows] for name in STORED}


@pytest.mark.parametrize("name", ["a:b", "s3:index", "file:x", "~", "year=2020", "100%", "new\nline", "*", "색인 ü"])
def test_any_relative_name_is_a_folder_here(name, build, items, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    index = build(rows=20, metadata={"row": list(range(20))})
    index.add(take(items, [20]), metadata={"row": [20]})
    index.save(name)
    loaded = TupleIndex.load(Path(name))
    assert loaded.get([3, 20]) == [{"row": 3}, {"row": 20}]
    (tmp_path / "below").mkdir()
    monkeypatch.chdir("below")
    loaded.verify()
    assert len(TupleIndex.load(Path("..") / name)) == 21


def test_another_writer_s_items_are_not_lost_under_another_name_of_the_folder(build, items, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    build(rows=10).save("index")
    (tmp_path / "link").symlink_to("index")
    names = ["index", tmp_path / "index", Path("link"), tmp_path / "below" / ".." / "index"]
    (tmp_path / "below").mkdir()
    for turn, name in enumerate(names):
        one, other = TupleIndex.load("index"), TupleIndex.load("index")
        one.add(take(items, [20]), ids=[100 + turn])
        one.save("index")
        other.add(take(items, [21]), ids=[200 + turn])
        with pytest.raises(ValueError, match="another writer"):
            other.save(name)
        assert len(TupleIndex.load("index")) == 11 + turn


def test_a_damaged_file_is_not_saved_on(build, items, tmp_path):
    """What did not change is linked from the version before, unless that has been cut short since."""
    index = build(rows=20)
    index.save(tmp_path / "index")
    (file,) = (tmp_path / "index").glob("*/index.faiss")
    file.write_bytes(file.read_bytes()[:-100])
    index.add(take(items, [30]))
    index.save(tmp_path / "index")
    loaded = TupleIndex.load(tmp_path / "index")
    assert loaded.ids().tolist() == list(range(21))


@pytest.mark.parametrize("factory", ["Flat", "IVF4,Flat", "HNSW16", "SQ8", "IVF4,PQ4x4,RFlat"])
def test_a_memory_mapped_file_replaced_under_a_reader(factory, build, items, queries, tmp_path):
    build(rows=300, factory=factory, metadata={"row": list(range(300))}).save(tmp_path / "index")
    reader = TupleIndex.load(tmp_path / "index", memory_map=True)
    before = build(rows=300, factory=factory).search({"text": queries}, k=300)
    for rows in (500, 40):
        build(rows=rows, factory=factory).save(tmp_path / "index")
        hits = reader.search({"text": queries}, k=300)
        np.testing.assert_array_equal(hits.ids, before.ids)
        np.testing.assert_array_equal(hits.scores, before.scores)
        assert hits.metadata[3][7] == {"row": hits.ids[3, 7]}
    reader.remove(5)
    reader.add(take(items, [300]), metadata={"row": [300]})
    reader.save(tmp_path / "kept")
    assert TupleIndex.load(tmp_path / "kept").ids().tolist() == [*range(5), *range(6, 301)]
    with pytest.raises(ValueError, match="another writer"):
        reader.save(tmp_path / "index")


@pytest.mark.parametrize("memory_map", [False, True])
@pytest.mark.parametrize("name", FILES)
def test_a_version_whose_files_vanish_while_it_is_read_is_given_up(
    name, memory_map, build, items, tmp_path, monkeypatch
):
    """A writer switches to another version after the checksums, and is removing the old one file by file."""
    path = tmp_path / "index"
    index = build(rows=20)
    index.add(take(items, [30, 31]))
    index.remove([3, 21])
    index.save(path)
    (old,) = path.glob("v-*")
    shutil.copytree(old, tmp_path / "old")
    check, checked = store.check_files, []

    def switch_after(folder, files):
        check(folder, files)
        if not checked:
            build(rows=7).save(path)
            shutil.copytree(tmp_path / "old", old)
            (old / name).unlink()
        checked.append(folder.name)

    monkeypatch.setattr(store, "check_files", switch_after)
    assert len(TupleIndex.load(path, memory_map=memory_map)) == 7
    assert checked[0] == old.name and len(checked) == 2


def test_an_exact_index_is_saved_whole_by_a_machine_without_matrix_units(build, items, tmp_path, monkeypatch):
    """There it becomes another type as it is loaded: its files are no longer those of the vectors."""
    monkeypatch.setattr("mmcl.index.exact_backend.exact_pays", lambda device: True)
    build(rows=20, factory="Exact").save(tmp_path / "index")
    monkeypatch.setattr("mmcl.index.local_files.exact_pays", lambda device: False)
    for left in (19, 18):
        index = TupleIndex.load(tmp_path / "index")
        index.remove(left)
        index.save(tmp_path / "index")
        loaded = TupleIndex.load(tmp_path / "index")
        assert loaded.ids().tolist() == list(range(left))
        np.testing.assert_array_equal(loaded.vectors(range(left)), index.vectors(range(left)))


def test_an_index_that_moves_between_folders_remembers_the_version_of_each(build, items, tmp_path):
    one = build(rows=10)
    one.save(tmp_path / "first")
    other = TupleIndex.load(tmp_path / "first")
    other.add(take(items, [20]))
    other.save(tmp_path / "first")
    one.save(tmp_path / "second")
    with pytest.raises(ValueError, match="another writer"):
        one.save(tmp_path / "first")
    one.save(tmp_path / "second")
    one.save(tmp_path / "first", replace=True)
    assert len(TupleIndex.load(tmp_path / "first")) == 10


def test_files_that_other_users_may_read(build, tmp_path):
    """As the umask says, for every file; the umask itself is the process's and is never touched."""
    build(rows=10).save(tmp_path / "index")
    (tmp_path / "plain").touch()
    wanted = (tmp_path / "plain").stat().st_mode & 0o777
    found = {file.name: file.stat().st_mode & 0o777 for file in (tmp_path / "index").rglob("*.*") if file.is_file()}
    assert {name: mode for name, mode in found.items() if mode != wanted and name != ".lock"} == {}
