import json

import datasets
import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from mmcl import MultimodalModel, SumOfPairs, embed
from mmcl import shards as shard_files
from mmcl.encoders import categories, vectors
from mmcl.shards import open_shards, verify_shards


@pytest.fixture
def model():
    torch.manual_seed(0)
    encoders = {"sensor": vectors(3, 4, dropout=0.5), "word": categories(["no", "yes"], 4)}
    return MultimodalModel(encoders, SumOfPairs(("sensor", "word"), 4))


@pytest.fixture
def data():
    rows = {
        "sensor": np.random.default_rng(0).normal(size=(25, 3)).tolist(),
        "word": ["no", "yes", "no", "no", "yes"] * 5,
    }
    return datasets.Dataset.from_dict({**rows, "name": [f"row {row}" for row in range(25)], "year": list(range(25))})


def joined(shards):
    parts = list(shards)
    names = shards.modalities
    return {name: np.concatenate([rows[name] for rows, _ in parts]) for name in names}, [
        row for _, table in parts for row in table.to_pylist()
    ]


def run(model, data, out, **options):
    return embed(model, data, out, batch_size=4, shard_size=10, progress=False, **options)


def test_shards_hold_what_the_model_encodes_in_clip_retrievals_layout(model, data, tmp_path):
    shards = run(model, data, tmp_path)
    names = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.*"))
    expected = [f"{m}_emb/{m}_emb_000{i}.npy" for m in ("sensor", "word") for i in range(3)]
    assert names == sorted([*expected, *(f"metadata/metadata_000{i}.parquet" for i in range(3)), "manifest.json"])
    rows, metadata = joined(shards)
    with torch.no_grad():
        encoded = model.eval().encode({"sensor": data["sensor"][:], "word": data["word"][:]})
    for name, values in encoded.items():
        np.testing.assert_allclose(rows[name], values.numpy(), rtol=0, atol=1e-6)
    assert metadata[13] == {"key": 13, "word": "no", "name": "row 13", "year": 13}
    assert shards.fingerprint == model.fingerprint()
    assert (shards.rows(), verify_shards(tmp_path)) == (25, 25)


def test_an_interrupted_run_goes_on_and_ends_the_same(model, data, tmp_path, monkeypatch):
    run(model, data, tmp_path / "whole")
    kept = shard_files.ShardWriter.write

    def stop_before_the_third(self, embeddings, metadata):
        if len(self.shards) == 2:
            raise KeyboardInterrupt
        kept(self, embeddings, metadata)

    monkeypatch.setattr(shard_files.ShardWriter, "write", stop_before_the_third)
    with pytest.raises(KeyboardInterrupt):
        run(model, data, tmp_path / "broken")
    with pytest.raises(ValueError, match="interrupted; run it again"):
        open_shards(tmp_path / "broken")
    monkeypatch.undo()
    before = (tmp_path / "broken/word_emb/word_emb_0001.npy").stat().st_mtime_ns
    run(model, data, tmp_path / "broken")
    assert (tmp_path / "broken/word_emb/word_emb_0001.npy").stat().st_mtime_ns == before
    for path in sorted((tmp_path / "whole").rglob("*.npy")):
        assert path.read_bytes() == (tmp_path / "broken" / path.relative_to(tmp_path / "whole")).read_bytes()


def test_another_run_is_not_mixed_into_a_folder(model, data, tmp_path):
    run(model, data, tmp_path / "a")
    with pytest.raises(ValueError, match="shards of another run: dtype is 'float32' there, 'float16' here"):
        run(model, data, tmp_path / "a", dtype="float16")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "thesis.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"not empty and holds no manifest.json"):
        run(model, data, tmp_path / "b")


def test_modalities_of_two_folders_join_by_key(model, data, tmp_path):
    run(model, data, tmp_path / "sensor", modalities=["sensor"], key="name")
    order = np.random.default_rng(1).permutation(25)
    run(model, data.select(order), tmp_path / "word", modalities=["word"], key="name")
    together = open_shards({"sensor": tmp_path / "sensor", "word": tmp_path / "word"})
    rows, metadata = joined(together)
    whole, _ = joined(run(model, data, tmp_path / "both", key="name"))
    for name in whole:
        np.testing.assert_allclose(rows[name], whole[name], rtol=0, atol=1e-6)
    assert [row["key"] for row in metadata] == data["name"][:]
    run(model, data.select(range(20)), tmp_path / "few", modalities=["word"], key="name")
    with pytest.raises(KeyError, match=r"no word row of key 'row 20' \(4 of 12"):
        list(open_shards({"sensor": tmp_path / "sensor", "word": tmp_path / "few"}))
    with pytest.raises(ValueError, match="'row 3' stands twice, in rows 0 and 1"):
        run(model, data.select([3, 3, 4]), tmp_path / "twice", modalities=["word"], key="name")
    stream = data.select([3, 3, 4]).to_iterable_dataset()
    run(model, stream, tmp_path / "twice", modalities=["word"], key="name")
    with pytest.raises(ValueError, match="key 'row 3' stands twice"):
        list(open_shards({"sensor": tmp_path / "sensor", "word": tmp_path / "twice"}))


def test_folders_without_manifest_are_read_in_numeric_order_and_mixed_types(tmp_path):
    (tmp_path / "img_emb").mkdir()
    for row, shard in enumerate(("0", "1", "2", "10")):
        dtype = np.float16 if row % 2 else np.float32
        np.save(tmp_path / "img_emb" / f"img_emb_{shard}.npy", np.full((2, 3), float(row), dtype))
    rows, metadata = joined(open_shards(tmp_path))
    assert rows["img"][:, 0].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert rows["img"].dtype == np.float32
    assert len(metadata) == 8


def test_a_shard_a_row_short_is_refused_by_name_and_counts(model, data, tmp_path):
    run(model, data, tmp_path)
    path = tmp_path / "word_emb/word_emb_0001.npy"
    np.save(path, np.load(path)[:-1])
    with pytest.raises(ValueError, match="shard 0001 has differing numbers of rows: metadata 12, sensor 12, word 11"):
        list(open_shards(tmp_path))
    with pytest.raises(ValueError, match="word_emb_0001.npy is missing or differs"):
        verify_shards(tmp_path)
    path.unlink()
    with pytest.raises(FileNotFoundError, match="shard 0001 lacks word"):
        list(open_shards(tmp_path))


def test_a_fault_in_the_data_names_its_row_and_keeps_the_shards_before(model, data, tmp_path):
    words = data["word"][:]
    words[17] = "maybe"
    broken = data.remove_columns("word").add_column("word", words)
    with pytest.raises(ValueError, match="word: row 17: unknown category 'maybe'"):
        run(model, broken, tmp_path)
    assert len(json.loads((tmp_path / "manifest.json").read_text())["shards"]) == 1


def test_options_choose_modalities_columns_and_metadata(model, data, tmp_path):
    renamed = data.rename_column("sensor", "reading")
    shards = run(
        model, renamed, tmp_path, columns={"sensor": "reading"}, modalities=["sensor"], keep=["year"], dtype="float16"
    )
    assert shards.modalities == ("sensor",)
    assert np.load(tmp_path / "sensor_emb/sensor_emb_0000.npy").dtype == np.float16
    assert pq.read_table(tmp_path / "metadata/metadata_0000.parquet").column_names == ["key", "year"]
    with pytest.raises(KeyError, match="no column 'colour' for the metadata"):
        run(model, data, tmp_path / "x", keep=["colour"])
    with pytest.raises(KeyError, match="unknown dtype 'float8'"):
        run(model, data, tmp_path / "x", dtype="float8")


def test_a_stream_embeds_too(model, data, tmp_path):
    whole, _ = joined(run(model, data, tmp_path / "a"))
    streamed, _ = joined(run(model, data.to_iterable_dataset(), tmp_path / "b"))
    for name in whole:
        np.testing.assert_array_equal(whole[name], streamed[name])


def test_running_again_after_the_end_or_just_before_it_is_fine(model, data, tmp_path, monkeypatch):
    run(model, data, tmp_path / "a")
    again, _ = joined(run(model, data, tmp_path / "a"))
    assert len(again["word"]) == 25
    kept = shard_files.ShardWriter.write_manifest

    def die_before_the_end(self, complete):
        if complete:
            raise KeyboardInterrupt
        kept(self, complete)

    monkeypatch.setattr(shard_files.ShardWriter, "write_manifest", die_before_the_end)
    with pytest.raises(KeyboardInterrupt):
        run(model, data, tmp_path / "b")
    monkeypatch.undo()
    assert run(model, data, tmp_path / "b").rows() == 25
    with pytest.raises(ValueError, match="no rows to embed"):
        run(model, data.select([]), tmp_path / "c")
