"""Indexes built on disk, shard by shard, and read from it."""

import itertools
import json
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from mmcl.index import disk_build, disk_codes, disk_source
from mmcl.index.disk_build import build_on_disk, trained, training_rows
from mmcl.index.disk_layout import lay_out, leaves
from mmcl.index.disk_source import (
    Pass,
    ShardBlocks,
    Vectors,
    make_passes,
    run_steps,
    sample_rows,
    shard_blocks,
)
from mmcl.index.faiss_backend import FaissBackend
from mmcl.index.faiss_factory import new_faiss_index
from mmcl.index.faiss_files import in_memory, read_faiss, serialised, stored_bytes, write_faiss
from mmcl.index.faiss_setup import load_faiss

WIDTH, ROWS = 16, 1500
CUTS = (0, 400, 400, 900, 1499, ROWS)
ON_DISK = (
    "Flat",
    "SQ8",
    "SQfp16",
    "PQ8x4",
    "RQ2x4",
    "IVF16,Flat",
    "IVF16,SQ8",
    "IVF16,PQ8x4",
    "IVF16_HNSW8,SQfp16",
    "OPQ4,IVF16,PQ4x4",
    "PCA12,IVF16,SQ8",
    "IVF16,PQ8x4,RFlat",
    "PCA12,IVF16,PQ4x4,Refine(SQ8)",
    "MIPS,IVF16,SQ8",
    "IVF300,PQ8x4",
)
IN_MEMORY = ("HNSW16", "PCA12,HNSW16", "OPQ4,PQ4x4fs", "IVF16,PQ8x4fs", "IVF16,PQ8x4fs,RFlat")


@pytest.fixture(scope="module")
def vectors():
    """Rows of very different lengths."""
    generator = np.random.default_rng(0)
    rows = generator.standard_normal((ROWS, WIDTH)) * generator.lognormal(0, 0.5, (ROWS, 1))
    return rows.astype(np.float32)


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    monkeypatch.setattr(disk_source, "BLOCK_BYTES", 4 * WIDTH * 90)
    monkeypatch.setattr(disk_codes, "PART_ROWS", 300)
    monkeypatch.setattr(disk_codes, "MERGE_BYTES", 3000)


def cut(vectors, cuts=CUTS, log=None):
    """Shards of these vectors; the log collects how many rows were read at once."""

    def read(first, last, rows):
        found = vectors[first:last][rows]
        if log is not None:
            log.append(len(found))
        return found

    return [ShardBlocks(b - a, lambda rows, a=a, b=b: read(a, b, rows)) for a, b in itertools.pairwise(cuts)]


def built(folder, vectors, factory, **options):
    about = build_on_disk(factory, WIDTH, cut(vectors), folder, source="v1", **options)
    return FaissBackend(read_faiss(folder, memory_map=True), factory, WIDTH, about["norm"])


@pytest.mark.parametrize("factory", [*ON_DISK, *IN_MEMORY])
def test_the_file_is_the_one_that_faiss_writes_of_the_index_in_memory(factory, vectors, tmp_path):
    about = build_on_disk(factory, WIDTH, cut(vectors), tmp_path)
    source = Vectors(cut(vectors), WIDTH)
    (backend,) = run_steps([trained(factory, source, None, 0)])
    make_passes([Pass("adding", source, lambda _, block: backend._add(backend._stored(block)))])
    assert [path.name for path in tmp_path.iterdir()] == ["index.faiss"]
    assert (tmp_path / "index.faiss").read_bytes() == serialised(backend.index)
    assert about == {"norm": backend.norm}


@pytest.mark.parametrize("factory", ["Flat", "IVF16,Flat", "IVF16,PQ8x4,RFlat", "MIPS,IVF16,Flat"])
def test_scores_are_raw_inner_products_of_the_rows_by_number(factory, vectors, tmp_path):
    backend = built(tmp_path, vectors, factory)
    queries = np.random.default_rng(1).standard_normal((7, WIDTH), dtype=np.float32)
    effort = {"nprobe": 16} if "IVF" in factory else {}
    effort |= {"k_factor": 50.0} if "RFlat" in factory else {}
    scores, rows = backend.search(queries, 10, effort)
    true = queries.astype(np.float64) @ vectors.T.astype(np.float64)
    np.testing.assert_allclose(scores, np.take_along_axis(true, rows, axis=1), rtol=0, atol=1e-4)
    np.testing.assert_allclose(scores, -np.sort(-true, axis=1)[:, :10], rtol=0, atol=1e-4)


def test_the_norm_is_the_longest_rows_and_ranges_hold_all_rows(vectors, tmp_path):
    spread = vectors.copy()
    spread[1450] *= 40  # not in the sample, and far beyond what it shows
    backend = built(tmp_path, spread, "MIPS,SQ8", sample=50)
    assert backend.norm == pytest.approx(np.linalg.norm(spread[1450]))
    np.testing.assert_allclose(backend.vectors(np.array([1450]))[0], spread[1450], atol=np.abs(spread).max() / 100)


@pytest.mark.parametrize("memory_map", [False, True])
@pytest.mark.parametrize("factory", ["Flat", "SQ8", "IVF16,PQ8x4,RFlat", "HNSW16", "PCA12,Flat"])
def test_a_file_is_read_where_it_was_moved_and_outlives_its_removal(factory, memory_map, vectors, tmp_path):
    index = new_faiss_index(factory, WIDTH)
    index.train(vectors)
    index.add(vectors)
    (tmp_path / "a").mkdir()
    assert write_faiss(index, tmp_path / "a") == ["index.faiss"]
    assert stored_bytes(index) == (tmp_path / "a" / "index.faiss").stat().st_size
    moved = (tmp_path / "a").rename(tmp_path / "ein Ordner ü")
    loaded = read_faiss(moved, memory_map)
    (moved / "index.faiss").unlink()
    for found, true in zip(loaded.search(vectors[:5], 9), index.search(vectors[:5], 9)):
        np.testing.assert_array_equal(found, true)
    changed = in_memory(loaded)
    del loaded
    changed.add(vectors[:3])
    assert changed.ntotal == ROWS + 3


def test_many_threads_search_one_mapped_file(vectors, tmp_path):
    backend = built(tmp_path, vectors, "IVF16,PQ8x4,RFlat")
    true = backend.search(vectors[:40], 5, {"nprobe": 4})[1]
    start = threading.Barrier(4)

    def search(first):
        start.wait()
        return [backend.search(vectors[i : i + 1], 5, {"nprobe": 4})[1][0] for i in range(first, 40, 4)]

    with ThreadPoolExecutor(4) as pool:
        for first, found in enumerate(pool.map(search, range(4))):
            np.testing.assert_array_equal(found, true[first::4])


RESIDENT = """
import sys, numpy as np
from pathlib import Path
from mmcl.index.faiss_files import read_faiss
def anonymous():
    return int(next(l.split()[1] for l in open("/proc/self/status") if l.startswith("RssAnon")))
queries = np.ones((2, 64), np.float32)
read_faiss(Path(sys.argv[2])).search(queries, 3)
before = anonymous()
index = read_faiss(Path(sys.argv[1]), memory_map=True)
index.search(queries, 3)
print(anonymous() - before)
"""


def test_a_mapped_index_takes_no_memory_of_its_own(tmp_path):
    rows = np.random.default_rng(0).standard_normal((60000, 64), dtype=np.float32)
    for name, count in (("large", 60000), ("small", 100)):
        index = new_faiss_index("IVF16,Flat", 64)
        index.train(rows[:100])
        index.add(rows[:count])
        (tmp_path / name).mkdir()
        write_faiss(index, tmp_path / name)
    assert (tmp_path / "large" / "index.faiss").stat().st_size > 15 * 2**20
    command = [sys.executable, "-c", RESIDENT, str(tmp_path / "large"), str(tmp_path / "small")]
    kilobytes = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert kilobytes < 2048


@pytest.mark.slow
def test_memory_does_not_grow_with_the_shards(tmp_path):
    """300,000 more vectors are 147 MiB."""
    script = Path(__file__).parents[2] / "eval" / "benchmarks" / "index_memory.py"
    command = [sys.executable, script, "--shards", "2", "8", "--rows", "50000", "--factory", "IVF256,PQ16"]
    subprocess.run([*command, "--out", tmp_path], check=False)
    runs = json.loads((tmp_path / "index_memory.json").read_text())["runs"]
    assert runs["8"]["peak"] < runs["2"]["peak"] + 40
    assert runs["8"]["peak"] < 300


def test_a_broken_or_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"index.faiss is missing"):
        read_faiss(tmp_path)
    (tmp_path / "index.faiss").write_bytes(b"no index at all")
    for memory_map in (False, True):
        with pytest.raises(ValueError, match=r"FAISS cannot read .*index.faiss: "):
            read_faiss(tmp_path, memory_map)


@pytest.mark.parametrize("factory", ["IVF16,PQ8x4,RFlat", "IVF16,Flat", "SQ8", "HNSW16", "IVF16,PQ8x4fs,RFlat"])
@pytest.mark.parametrize("stop", [0, 18, 27])
def test_an_interrupted_build_goes_on_and_ends_the_same(factory, stop, vectors, tmp_path):
    log = []
    build_on_disk(factory, WIDTH, cut(vectors, log=log), tmp_path / "whole", source="v1")

    reads = itertools.count()

    def interrupting(rows):
        if next(reads) == stop:
            raise KeyboardInterrupt
        return rows

    shards = [ShardBlocks(each.rows, lambda rows, each=each: interrupting(each.read(rows))) for each in cut(vectors)]
    if stop < len(log):
        with pytest.raises(KeyboardInterrupt):
            build_on_disk(factory, WIDTH, shards, tmp_path / "broken", source="v1")
        assert not (tmp_path / "broken" / "index.faiss").exists()
    again = []
    build_on_disk(factory, WIDTH, cut(vectors, log=again), tmp_path / "broken", source="v1")
    whole, broken = (tmp_path / name / "index.faiss" for name in ("whole", "broken"))
    assert whole.read_bytes() == broken.read_bytes()
    if (
        factory in ("IVF16,PQ8x4,RFlat", "IVF16,Flat") and stop == 27
    ):  # the sample is not read again, nor the parts that were whole
        assert sum(again) < ROWS - 250


def test_a_build_killed_between_any_two_writes_goes_on(vectors, tmp_path, monkeypatch):
    build_on_disk("IVF16,PQ8x4,RFlat", WIDTH, cut(vectors), tmp_path / "whole")
    synced = os.fsync
    stops = 0
    for stop in itertools.count():
        left = iter(range(stop))

        def die(file, left=left):
            if next(left, None) is None:
                raise KeyboardInterrupt
            synced(file)

        monkeypatch.setattr(os, "fsync", die)
        try:
            build_on_disk("IVF16,PQ8x4,RFlat", WIDTH, cut(vectors), tmp_path / "broken", source="v1")
            break
        except KeyboardInterrupt:
            stops += 1
    assert stops > 3
    whole, broken = (tmp_path / name / "index.faiss" for name in ("whole", "broken"))
    assert whole.read_bytes() == broken.read_bytes()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"factory": "IVF8,PQ8x4"}, "factory is 'IVF16,PQ8x4' there, 'IVF8,PQ8x4' here"),
        ({"seed": 1}, "seed is 0 there, 1 here"),
        ({"sample": 400}, "sample is None there, 400 here"),
        ({"source": "other"}, "source is "),
        ({"cuts": (0, 300, ROWS)}, "source is "),
    ],
)
def test_another_build_is_not_mixed_in(change, told, vectors, tmp_path, monkeypatch):
    options = {"factory": "IVF16,PQ8x4", "cuts": CUTS, "source": "digest of the files"}

    def build(factory, cuts, **more):
        return build_on_disk(factory, WIDTH, cut(vectors, cuts), tmp_path, **more)

    monkeypatch.setattr(disk_build, "fill", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        build(**options)
    monkeypatch.undo()
    with pytest.raises(ValueError, match=f"holds an unfinished build: {told}.*remove the folder"):
        build(**{**options, **change})
    build(**options)


def test_other_vectors_of_the_same_files_are_not_mixed_in(vectors, tmp_path, monkeypatch):
    """As another score makes of them; and without a word about the source nothing is gone on with."""
    monkeypatch.setattr(disk_build, "fill", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    for vectors_of, source in ((vectors, "v1"), (2 * vectors, None)):
        with pytest.raises(KeyboardInterrupt):
            build_on_disk("SQ8", WIDTH, cut(vectors_of), tmp_path / str(source), source=source)
    monkeypatch.undo()
    with pytest.raises(ValueError, match="holds an unfinished build of other vectors"):
        build_on_disk("SQ8", WIDTH, cut(2 * vectors), tmp_path / "v1", source="v1")
    log = []
    build_on_disk("Flat", WIDTH, cut(vectors, log=log), tmp_path / "None")
    assert sum(log) == ROWS + 4


def test_a_full_disk_is_an_error_and_the_build_goes_on_where_there_is_room(vectors, tmp_path, monkeypatch):
    written = disk_codes.write_at
    parts = iter(range(4))

    def full(path, offset, rows):
        if next(parts, None) is None:
            raise OSError(28, "No space left on device", str(path))
        written(path, offset, rows)

    monkeypatch.setattr(disk_codes, "write_at", full)
    with pytest.raises(OSError, match="No space left"):
        built(tmp_path, vectors, "IVF16,PQ8x4")
    assert json.loads((tmp_path / "building" / "state.json").read_text())["parts"] == 1
    monkeypatch.setattr(disk_codes, "write_at", written)
    assert len(built(tmp_path, vectors, "IVF16,PQ8x4")) == ROWS


def test_faiss_writes_to_a_full_disk_with_an_error(vectors, monkeypatch, tmp_path):
    index = new_faiss_index("Flat", WIDTH)
    index.add(vectors)
    (tmp_path / "index.faiss").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        write_faiss(index, tmp_path)


@pytest.mark.parametrize("factory", ["SQfp16", "IVF4,SQfp16"])
def test_a_value_beyond_half_precision_is_refused_by_its_number_in_all_shards(factory, vectors, tmp_path):
    large = vectors.copy()
    large[1203, 5] = 1e5
    with pytest.raises(ValueError, match=r"row 1203: its fused vector reaches 100000, beyond"):
        build_on_disk(factory, WIDTH, cut(large), tmp_path, sample=20, seed=2)


def test_too_few_rows_to_train_on_are_told(vectors, tmp_path):
    with pytest.raises(ValueError, match="needs at least 16 items to be trained on, got 9"):
        build_on_disk("IVF16,Flat", WIDTH, cut(vectors), tmp_path, sample=9)
    with pytest.raises(ValueError, match="FAISS cannot build factory 'NoSuchType'"):
        build_on_disk("NoSuchType", WIDTH, cut(vectors), tmp_path)
    with pytest.raises(ValueError, match=r"from row 0: expected vectors \(1, 17\), got \(1, 16\)"):
        build_on_disk("Flat", 17, cut(vectors), tmp_path)


def test_no_rows_at_all_make_an_empty_index(vectors, tmp_path):
    build_on_disk("auto", WIDTH, cut(vectors[:0], (0, 0, 0)), tmp_path)
    for memory_map in (False, True):
        assert (read_faiss(tmp_path, memory_map).search(vectors[:2], 3)[1] == -1).all()


def test_the_sample_is_distinct_seeded_and_spread_over_all_rows():
    drawn = [sample_rows(1000, 100, np.random.default_rng(seed)) for seed in range(400)]
    assert all(len(set(rows.tolist())) == 100 and (np.diff(rows) > 0).all() for rows in drawn)
    counts = np.bincount(np.concatenate(drawn), minlength=1000)
    # each row is drawn 40 times, give or take sqrt(40 * .9) = 6
    assert abs(counts.std() - 6) < 0.6
    assert abs(counts[:100].mean() - 40) < 3
    np.testing.assert_array_equal(drawn[3], sample_rows(1000, 100, np.random.default_rng(3)))
    np.testing.assert_array_equal(sample_rows(10, 99, np.random.default_rng(0)), np.arange(10))
    assert len(sample_rows(10, 7, np.random.default_rng(0))) == 7


def test_only_the_sample_is_read_for_training(vectors):
    log = []
    found = np.concatenate(list(Vectors(cut(vectors, log=log), WIDTH).sample(120, seed=3)))
    assert sum(log) == 120
    np.testing.assert_array_equal(found, vectors[sample_rows(ROWS, 120, np.random.default_rng(3))])


@pytest.mark.parametrize(
    ("factory", "width", "rows"),
    [
        ("SQ8", 16, 65536),
        ("IVF16,PQ8x4", 16, 65536),
        ("OPQ4,IVF16,PQ4x10", 16, 256 * 1024),
        ("IVF4096,SQ8", 16, 256 * 4096),
        ("IVF4096,SQ8", 128, 128 * 2**20 // 512),
        ("IVF4096,SQ8", 1024, 40 * 4096),
    ],
)
def test_enough_rows_are_sampled_for_lists_and_code_words(factory, width, rows):
    assert training_rows(new_faiss_index(factory, width)) == rows


def test_a_format_that_is_not_known_is_an_error(vectors, monkeypatch):
    index = new_faiss_index("SQ8", WIDTH)
    index.train(vectors)
    monkeypatch.setattr("mmcl.index.disk_layout.serialised", lambda index: b"something else")
    with pytest.raises(RuntimeError, match=rf"FAISS {load_faiss().__version__} writes IndexScalarQuantizer in an unk"):
        lay_out(index, list(leaves(index)), 10)


def test_embedding_shards_are_fused_on_the_way(make_score, unit_embeddings, tmp_path):
    import pyarrow as pa

    from mmcl.index.sources import checked_block, fused_block
    from mmcl.shards import ShardWriter, open_shards

    score, rows = make_score("pairs_and_hadamard", 3, 16), unit_embeddings(3, 700, 16)
    writer = ShardWriter(tmp_path / "shards", {})
    for part in (slice(0, 300), slice(300, 700)):
        keys = pa.table({"key": range(part.start, part.stop)})
        writer.write({name: rows[name][part].numpy() for name in ("image", "audio")}, keys)
    writer.write_manifest(complete=True)
    shards = open_shards(tmp_path / "shards")
    ready = dict.fromkeys(shards.modalities, True)

    def fuse(embeddings, row):
        return fused_block(score, checked_block(embeddings, ready, score, None, row), row).numpy()

    build_on_disk("IVF8,Flat", score.width, shard_blocks(shards, fuse), tmp_path, source=shards.state())
    index = read_faiss(tmp_path, memory_map=True)
    index.nprobe = 8
    queries = score.query_vectors({"text": rows["text"][:9]}).detach().numpy()
    true = queries @ score.item_vectors({name: rows[name] for name in ("image", "audio")}).detach().numpy().T
    scores, found = index.search(queries, 5)
    np.testing.assert_array_equal(found, np.argsort(-true, axis=1)[:, :5])
    np.testing.assert_allclose(scores, np.take_along_axis(true, found, axis=1), rtol=1e-4, atol=1e-5)

    file = tmp_path / "shards" / "audio_emb" / "audio_emb_0001.npy"
    broken = np.load(file)
    broken[123] = 0
    np.save(file, broken)
    for sample in (300, 600):  # whether or not training sees it
        vectors = shard_blocks(open_shards(tmp_path / "shards"), fuse)
        with pytest.raises(ValueError, match="audio: row 423 holds only zeros"):
            build_on_disk("IVF8,Flat", score.width, vectors, tmp_path / str(sample), sample=sample)
