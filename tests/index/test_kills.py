"""What a killed writer, a full disk and other writers leave: always a whole version, never less than was saved."""

import errno
import io
import json
import os
import resource
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from mmcl.index import TupleIndex, store
from mmcl.scores import Score

ROOT = Path(__file__).parents[2]
FILES = (
    "score.safetensors",
    "bank.npy",
    "items.parquet",
    "index.faiss",
    "added.npy",
    "added.parquet",
    "removed.npy",
    ".manifest.json.draft",
)


def kill(kills, folder, seed):
    """The figures of a run that kills a writer again and again, and checks what is left each time."""
    command = [sys.executable, ROOT / "eval" / "index_kills.py", "--kills", kills, "--seed", seed, "--out", folder]
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "index_kills.json").read_text())


@pytest.mark.slow
def test_a_killed_writer_leaves_what_was_saved(tmp_path):
    figures = kill(5, tmp_path, seed=1)
    assert figures["kills"] >= 5
    assert figures["between the first write and the switch"] >= 3
    assert figures["of indexes side by side"] >= 1


@pytest.mark.nightly
def test_fifty_kills_lose_nothing(tmp_path, capsys):
    figures = kill(50, tmp_path, seed=2)
    with capsys.disabled():
        print(json.dumps(figures))
    assert figures["kills"] >= 50
    assert figures["between the first write and the switch"] >= 30
    assert figures["of indexes side by side"] >= 10


@pytest.fixture
def grown(build, items, queries):
    """grown(): an index whose every file has something in it."""

    def make():
        index = build(rows=300, bank={"text": queries}, metadata={"row": list(range(300))})
        new = {name: items[name][300:400] for name in ("image", "audio")}
        index.add(new, metadata={"row": list(range(300, 400))})
        index.remove(list(range(0, 400, 3)))
        return index

    return make


@pytest.fixture
def full_disk(monkeypatch):
    """full_disk(name): from the moment that a file of this name is opened for writing, no file takes over 10 bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(name):
        def watched(function, path_at):
            def call(*args, **options):
                if Path(str(args[path_at])).name == name:
                    resource.setrlimit(resource.RLIMIT_FSIZE, (10, before[1]))
                return function(*args, **options)

            return call

        monkeypatch.setattr("builtins.open", watched(open, 0))
        monkeypatch.setattr(io, "open", watched(io.open, 0))
        monkeypatch.setattr(pq, "write_table", watched(pq.write_table, 1))
        monkeypatch.setattr(Score, "save", watched(Score.save, 1))

    def undo():
        monkeypatch.undo()
        resource.setrlimit(resource.RLIMIT_FSIZE, before)

    fill.undo = undo
    yield fill
    undo()


def versions(path):
    return [entry for entry in path.iterdir() if entry.is_dir()]


@pytest.mark.parametrize("name", FILES)
def test_a_full_disk_is_an_error_and_the_old_version_stays(name, grown, build, full_disk, tmp_path):
    """The system's limit on file sizes stands in for a full disk: the write itself fails, in whatever library it is."""
    path = tmp_path / "index"
    build(rows=7).save(path)
    index = grown()
    full_disk(name)
    try:
        with pytest.raises(OSError, match="File too large") as error:
            index.save(path)
    finally:
        full_disk.undo()
    assert error.value.errno in (errno.EFBIG, None)  # arrow's errors carry the text alone
    old = TupleIndex.load(path)
    old.verify()
    assert len(old) == 7
    assert len(versions(path)) == 1
    index.save(path)
    new = TupleIndex.load(path)
    assert new.ids().tolist() == index.ids().tolist()
    assert len(versions(path)) == 1


@pytest.mark.parametrize("name", ["index.faiss", "items.parquet"])
def test_a_full_disk_is_an_error_where_files_are_copied_too(name, grown, full_disk, tmp_path, monkeypatch):
    """Some file systems have no hard links."""
    path = tmp_path / "index"
    index = grown()
    index.save(path)

    def no_links(*_):
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", no_links)
    index.remove(1)
    full_disk(name)
    try:
        with pytest.raises(OSError, match="File too large"):
            index.save(path)
    finally:
        full_disk.undo()
    assert 1 in TupleIndex.load(path)
    monkeypatch.setattr(os, "link", no_links)
    index.save(path)
    monkeypatch.undo()
    loaded = TupleIndex.load(path)
    assert 1 not in loaded and len(loaded) == len(index)


@pytest.mark.parametrize("step", ["shutil.rmtree", "mmcl.index.store.sync"])
def test_a_failure_after_the_switch_does_not_lock_the_writer_out(step, build, items, tmp_path, monkeypatch):
    """The new version is there; its own writer must not take it for another's."""
    path = tmp_path / "index"
    index = build(rows=10)
    index.save(path)
    index.add({name: items[name][10:12] for name in ("image", "audio")})
    sync = store.sync

    def fail(target, *_, **__):
        if step == "mmcl.index.store.sync" and Path(target) != path:
            return sync(target)
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(step, fail)
        with suppress(OSError):
            index.save(path)
    assert len(TupleIndex.load(path)) == 12
    index.remove(3)
    index.save(path)
    assert len(TupleIndex.load(path)) == 11
    assert len(versions(path)) == 1


WRITER = """
import sys, numpy as np
from mmcl.index import TupleIndex
from mmcl.scores import SumOfPairs
path, count = sys.argv[1], int(sys.argv[2])
index = TupleIndex.build(SumOfPairs(("a", "b"), 4), {"a": np.tile(np.eye(4), (count, 1))})
print("ready", flush=True)
sys.stdin.readline()
for _ in range(20):
    index.save(path, replace=True)
"""


@pytest.mark.slow
def test_two_processes_write_and_a_third_reads(tmp_path):
    """Also the very first save, for which both come at once."""
    path = tmp_path / "index"
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, path, str(count)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for count in (5, 50)
    ]
    try:
        assert [writer.stdout.readline() for writer in writers] == ["ready\n"] * 2
        for writer in writers:
            print(file=writer.stdin, flush=True)
        seen = set()
        while any(writer.poll() is None for writer in writers):
            if (path / "manifest.json").exists():
                index = TupleIndex.load(path, memory_map=True)
                seen.add(len(index))
                assert index.search({"b": [[1, 0, 0, 0]] * 4}, k=1).counts.tolist() == [1] * 4
        assert [writer.wait() for writer in writers] == [0, 0]
    finally:
        for writer in writers:
            writer.kill()
            writer.wait()
            writer.stdin.close()
            writer.stdout.close()
    assert seen <= {20, 200}
    TupleIndex.load(path).verify()
    assert len(versions(path)) == 1


def test_a_first_save_beside_another_first_save_is_no_foreign_folder(build, tmp_path, monkeypatch):
    """The other's manifest appears between two looks at the folder."""
    path = tmp_path / "index"
    build(rows=5).save(path)
    exists, looks = Path.exists, []

    def not_yet(self, **options):
        if self.name == "manifest.json" and not looks:
            looks.append(self)
            return False
        return exists(self, **options)

    monkeypatch.setattr(Path, "exists", not_yet)
    build(rows=6).save(path)
    assert looks
    assert len(TupleIndex.load(path)) == 6
