"""Indexes that are built on disk, and read from there: the same answers as in memory."""

import json
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mmcl.index import TupleIndex, TupleIndexes
from mmcl.index.stored_table import StoredTable
from mmcl.shards import ShardWriter

STORED = ("image", "audio")
ALL_LISTS = {"Flat": {}, "IVF16,Flat": {"nprobe": 16}, "IVF16,PQ8x4,RFlat": {"nprobe": 16, "k_factor": 70.0}}
ALL_LISTS |= {"MIPS,IVF16,Flat": {"nprobe": 16}, "HNSW32": {"efSearch": 700}, "Exact": {}}


@pytest.fixture
def shards(items, tmp_path):
    """Three modalities in shards of 300, 300 and 100 rows, with metadata."""
    writer = ShardWriter(tmp_path / "emb", {"fingerprint": None})
    for start in (0, 300, 600):
        part = slice(start, min(start + 300, 700))
        rows = range(part.start, part.stop)
        table = {"key": [f"k{row}" for row in rows], "year": [1300 + row if row % 7 else None for row in rows]}
        writer.write({name: items[name][part] for name in ("image", "audio", "text")}, pa.table(table))
    writer.write_manifest(complete=True)
    return tmp_path / "emb"


@pytest.mark.parametrize("factory", ALL_LISTS)
def test_from_shards_or_arrays_into_a_folder(factory, make_score, shards, items, queries, tmp_path):
    score, out = make_score("pairs_and_hadamard", 3, 16), tmp_path / "out"
    expected = TupleIndex.build(score, shards, modalities=STORED, factory="Flat").search({"text": queries})
    stored = {name: items[name] for name in STORED}
    for source, options in ((shards, {"modalities": STORED}), (stored, {"metadata": {"year": range(700)}})):
        index = TupleIndex.build(score, source, factory=factory, out=out, **options)
        hits = index.search({"text": queries}, **ALL_LISTS[factory])
        np.testing.assert_allclose(hits.scores, expected.scores, rtol=1e-4, atol=1e-5)
        np.testing.assert_array_equal(hits.ids, expected.ids)
        if source is shards:
            assert hits.metadata == expected.metadata
            assert index.info()["columns"] == ["key", "year"]
        index.verify()
        assert not (out / ".building").exists()
        again = TupleIndex.load(out).search({"text": queries}, **ALL_LISTS[factory])
        np.testing.assert_array_equal(again.ids, expected.ids)


@pytest.mark.parametrize("factory", ALL_LISTS)
def test_a_memory_mapped_index_lives_as_any_other(factory, make_score, shards, items, queries, tmp_path):
    out = tmp_path / "out"
    index = TupleIndex.build(
        make_score("pairs_and_hadamard", 3, 16), shards, modalities=STORED, factory=factory, out=out
    )
    other = TupleIndex.load(out, memory_map=True)
    index.remove([3, 4])
    index.add({name: items[name][:2] for name in STORED}, metadata={"key": ["new", "newer"]})
    index.save(out)
    assert len(other) == 700
    assert other.get(3) == {"key": "k3", "year": 1303}  # its files are gone, and still open
    index.compact()
    index.save(out)
    for each in (index, TupleIndex.load(out), TupleIndex.load(out, memory_map=True)):
        hits = each.search({"text": queries}, k=702)
        assert (hits.counts == 700).all()
        assert set(hits.ids[0, :700]) == set(range(702)) - {3, 4}
        assert each.get([5, 700, 701]) == [
            {"key": "k5", "year": 1305},
            {"key": "new", "year": None},
            {"key": "newer", "year": None},
        ]


def test_ids_bank_and_rows_of_an_error_count_over_all_shards(make_score, shards, items, unit_rows, queries, tmp_path):
    score, names = make_score("pairs_and_hadamard", 3, 16), [f"n{row}" for row in range(700)]
    options = {"modalities": STORED, "factory": "Flat", "ids": names, "bank": {"text": unit_rows(30, 16, seed=4)}}
    one, other = (
        TupleIndex.build(score, shards, **options),
        TupleIndex.build(score, shards, **options, out=tmp_path / "o"),
    )
    a, b = (index.search({"text": queries}) for index in (one, other))
    np.testing.assert_array_equal(a.ids, b.ids)
    np.testing.assert_allclose(a.scores, b.scores, rtol=1e-5, atol=1e-5)
    assert b.kind == "pmi"
    file = shards / "audio_emb" / "audio_emb_0001.npy"
    rows = np.load(file)
    rows[30] = np.nan
    np.save(file, rows)
    with pytest.raises(ValueError, match="audio: row 330 holds NaN"):
        TupleIndex.build(score, shards, **options, out=tmp_path / "p")


@pytest.mark.parametrize("several", [False, True])
def test_an_index_counts_only_once_its_effort_is_measured(several, make_score, shards, queries, tmp_path, monkeypatch):
    """Whoever loads a folder finds the effort that was asked for, never one that nobody chose."""
    score, out = make_score("pairs_and_hadamard", 3, 16), tmp_path / "out"
    built = partial(TupleIndexes.build, stored=[STORED]) if several else partial(TupleIndex.build, modalities=STORED)
    options = {"factory": "IVF16,Flat", "queries": {"text": queries}, "recall_target": 0.5, "out": out}

    def interrupt(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("mmcl.index.calibrate.fit_effort", interrupt)
        with pytest.raises(KeyboardInterrupt):
            built(score, shards, **options)
        assert not list(out.rglob("manifest.json")), "no version counts"
    with monkeypatch.context() as patch:
        patch.setattr("mmcl.index.disk_build.trained", interrupt)  # the training is not done again
        index = built(score, shards, **options)
    loaded = type(index).load(out)
    index, loaded = (each.storing(STORED) if several else each for each in (index, loaded))
    assert index.search_parameters == loaded.search_parameters
    assert loaded.search_parameters.keys() == {"nprobe"}


def test_an_interrupted_build_goes_on(make_score, shards, queries, tmp_path, monkeypatch):
    score, out = make_score("pairs_and_hadamard", 3, 16), tmp_path / "out"
    options = {"modalities": STORED, "factory": "IVF16,Flat", "out": out}

    def interrupt(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("mmcl.index.disk_build.fill", interrupt)
        with pytest.raises(KeyboardInterrupt):
            TupleIndex.build(score, shards, **options)
    assert not (out / "manifest.json").exists()
    with monkeypatch.context() as patch:
        patch.setattr("mmcl.index.disk_build.trained", interrupt)  # the training is not done again
        index = TupleIndex.build(score, shards, **options)
    expected = TupleIndex.build(score, shards, modalities=STORED, factory="Flat").search({"text": queries})
    np.testing.assert_array_equal(index.search({"text": queries}, nprobe=16).ids, expected.ids)


def test_what_cannot_be_read_again_is_refused(make_score, items, tmp_path):
    score = make_score("pairs_and_hadamard", 3, 16)
    with pytest.raises(ValueError, match="Milvus keeps its tuples itself"):
        TupleIndex.build(score, {"image": items["image"]}, out=tmp_path / "o", backend="milvus", uri="x.db")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("x")
    with pytest.raises(ValueError, match=r"thesis\.tex"):
        TupleIndex.build(score, {"image": items["image"]}, out=tmp_path / "full")


def test_folders_of_clip_retrieval_are_read_as_they_are(make_score, items, queries, tmp_path):
    """img_emb, shards without zero padding, half precision, one of them empty."""
    folder = tmp_path / "clip"
    for name in ("img_emb", "text_emb", "metadata"):
        (folder / name).mkdir(parents=True)
    starts = {0: (0, 100), 1: (100, 100), 2: (100, 250), 10: (250, 300)}
    for number, (start, stop) in starts.items():
        kind = np.float16 if number == 2 else np.float32
        np.save(folder / "img_emb" / f"img_emb_{number}.npy", items["image"][start:stop].astype(kind))
        np.save(folder / "text_emb" / f"text_emb_{number}.npy", items["text"][start:stop])
        captions = [f"caption {row}" for row in range(start, stop)]
        pq.write_table(
            pa.table({"caption": pa.array(captions, pa.string())}), folder / "metadata" / f"metadata_{number}.parquet"
        )
    score = make_score("sum_of_pairs", ("image", "text"), 16)
    half = items["image"][:300].copy()
    half[100:250] = half[100:250].astype(np.float16)
    expected = TupleIndex.build(score, {"image": half}).search({"text": queries})
    for options in ({}, {"out": tmp_path / "out"}):
        hits = TupleIndex.build(score, folder, modalities=["image"], **options).search({"text": queries})
        np.testing.assert_array_equal(hits.ids, expected.ids)
        assert hits.metadata[3][0] == {"caption": f"caption {hits.ids[3, 0]}"}
    np.save(folder / "text_emb" / "text_emb_2.npy", items["text"][100:249])
    with pytest.raises(ValueError, match=r"shard 2 .*150.*149|shard 2 .*149.*150"):
        TupleIndex.build(score, folder, modalities=["text"])


def test_metadata_left_in_its_file_is_the_metadata(tmp_path):
    table = pa.table({"id": range(1000), "a": [f"v{i}" for i in range(1000)], "b": [None, 1.5] * 500})
    pq.write_table(table, tmp_path / "t.parquet", row_group_size=64)
    stored = StoredTable(tmp_path / "t.parquet", ["a", "b"])
    assert (stored.num_rows, stored.column_names) == (1000, ["a", "b"])
    rows = [999, 0, 63, 64, 64, 500]
    assert stored.take(rows).to_pylist() == table.select(["a", "b"]).take(rows).to_pylist()
    assert stored.take([]).num_rows == 0
    (tmp_path / "t.parquet").unlink()
    assert stored.take([700]).to_pylist() == [{"a": "v700", "b": None}]
    assert stored["a"].to_pylist() == table["a"].to_pylist()


def test_manifests_of_both_ways_agree(make_score, shards, tmp_path):
    score = make_score("pairs_and_hadamard", 3, 16)
    TupleIndex.build(score, shards, modalities=STORED, factory="SQ8", out=tmp_path / "a")
    TupleIndex.build(score, shards, modalities=STORED, factory="SQ8").save(tmp_path / "b")
    a, b = (json.loads((tmp_path / name / "manifest.json").read_text()) for name in "ab")
    for manifest in (a, b):
        del manifest["sha256"], manifest["version"]
        manifest["files"] = sorted(manifest["files"])
    assert a == b
