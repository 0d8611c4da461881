"""A model in place of the score: raw values, datasets, shards, fingerprints."""

import sys
from functools import partial

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from mmcl.index import TupleIndex, TupleIndexes

WORDS = ["one", "two", "three", "four", "five", "six", "seven"]


class FakeModel:
    """Encodes strings by a hash of their letters; a vector modality by its direction."""

    def __init__(self, score, print_of="model a"):
        self.score, self.print_of, self.calls = score, print_of, []

    def encode(self, values, batch_size=None):
        self.calls.append({name: len(rows) for name, rows in values.items()})
        assert not torch.is_grad_enabled()
        return {name: torch.stack([self.vector(name, value) for value in rows]) for name, rows in values.items()}

    def vector(self, name, value):
        if not isinstance(value, str):
            return F.normalize(torch.as_tensor(value, dtype=torch.float32), dim=0)
        seed = sum(ord(letter) * 31**i for i, letter in enumerate(name + value)) % 2**31
        return F.normalize(torch.randn(self.score.dim, generator=torch.Generator().manual_seed(seed)), dim=0)

    def fingerprint(self):
        return self.print_of


@pytest.fixture
def model(make_score):
    return FakeModel(make_score("pairs_and_hadamard", 3, 16))


@pytest.fixture
def index(model):
    return TupleIndex.build(model, {"image": WORDS, "audio": WORDS[::-1]}, ids=WORDS)


def test_raw_values_and_their_embeddings_give_the_same_answer(model, index):
    rows = {name: torch.stack([model.vector(name, w) for w in WORDS]) for name in ("image", "text")}
    rows["audio"] = torch.stack([model.vector("audio", word) for word in WORDS[::-1]])
    plain = TupleIndex.build(model.score, {"image": rows["image"], "audio": rows["audio"]}, ids=WORDS)
    mixed = TupleIndex.build(model, {"image": rows["image"].numpy(), "audio": WORDS[::-1]}, ids=WORDS)
    expected = plain.search({"text": rows["text"]}, k=7)
    for each in (index, mixed):
        for query in (WORDS, rows["text"], rows["text"].numpy(), rows["text"].tolist(), rows["text"].double()):
            np.testing.assert_array_equal(each.search({"text": query}, k=7).ids, expected.ids)
    assert index.fingerprint == "model a"


def test_single_raw_value_is_one_query(index, model):
    single = index.search({"text": "seven"}, k=3)
    assert len(single) == 1
    np.testing.assert_array_equal(single.ids, index.search({"text": ["seven"]}, k=3).ids)
    vector = model.vector("text", "seven")
    np.testing.assert_array_equal(single.ids, index.search({"text": vector}, k=3).ids)


def test_rows_that_are_not_unit_count_as_raw_unless_said_otherwise(model, unit_rows):
    rows = 5 * unit_rows(10, 16)
    index = TupleIndex.build(model, {"image": rows, "audio": unit_rows(10, 16, seed=1)})
    assert model.calls == [{"audio": 1}, {"image": 10}]  # one row is tried: the encoder makes the same of it
    exact = TupleIndex.build(model, {"image": rows, "audio": unit_rows(10, 16, seed=1)}, encoded=True)
    assert len(model.calls) == 2
    query = unit_rows(2, 16, seed=2)
    assert not np.allclose(index.search({"text": query}).scores, exact.search({"text": query}).scores)
    model.calls.clear()
    exact.search({"text": query}, encoded=False)
    assert model.calls == [{"text": 2}]
    with pytest.raises(ValueError, match="encoded must be"):
        exact.search({"text": query}, encoded="yes")


def test_unit_rows_that_the_encoder_also_takes_must_be_declared(unit_rows):
    from mmcl import MultimodalModel, SumOfPairs, ZeroShotClassifier
    from mmcl.encoders import categories, vectors

    encoders = {"image": vectors(8, 8), "text": categories(["a", "b"], 8)}
    real = MultimodalModel(encoders, SumOfPairs(("image", "text"), 8))
    rows = unit_rows(5, 8)
    for call in (
        lambda **options: TupleIndex.build(real, {"image": rows}, **options).search({"text": "a"}, k=5).scores,
        lambda **options: ZeroShotClassifier(real, ["a", "b"]).scores({"image": rows}, **options),
    ):
        with pytest.raises(ValueError, match="image: these rows of norm 1 and width 8 may be embeddings or raw values"):
            call()
        assert not np.allclose(call(encoded=True), call(encoded=False))
    queries = TupleIndex.build(real, {"image": rows}, encoded=True)
    assert len(queries.search({"text": ["a", "b"]})) == 2


def test_a_list_of_number_categories_is_a_batch(unit_rows):
    from mmcl import MultimodalModel, SumOfPairs
    from mmcl.encoders import categories

    real = MultimodalModel({"a": categories([0, 1, 2], 8), "b": categories([0, 1], 8)}, SumOfPairs(("a", "b"), 8))
    index = TupleIndex.build(real, {"a": [0, 1, 2, 1]})
    assert len(index.search({"b": [0, 1]})) == len(index.search({"b": np.array([1, 0])})) == 2
    assert len(index.search({"b": 1})) == 1


def test_raw_values_without_a_model_say_how_to_give_one(model, index, tmp_path):
    with pytest.raises(ValueError, match=r"image.*TupleIndex\.build\(model"):
        TupleIndex.build(model.score, {"image": WORDS})
    index.save(tmp_path / "index")
    alone = TupleIndex.load(tmp_path / "index")
    for query in (WORDS, "seven", [[1.0, 2.0], [3.0]], [object()]):
        with pytest.raises(ValueError, match=r"text.*TupleIndex\.load\(path, model=\.\.\.\)"):
            alone.search({"text": query})
    with pytest.raises(ValueError, match=r"TupleIndex\.load\(path, model=\.\.\.\)"):
        alone.search({"text": np.ones((1, 16))}, encoded=False)
    np.testing.assert_array_equal(
        TupleIndex.load(tmp_path / "index", model=model).search({"text": WORDS}).ids, index.search({"text": WORDS}).ids
    )


def test_another_model_is_refused_with_both_fingerprints(model, index, make_score, tmp_path):
    index.save(tmp_path / "index")
    with pytest.raises(ValueError, match=r"model a.*model b"):
        TupleIndex.load(tmp_path / "index", model=FakeModel(model.score, "model b"))
    assert TupleIndex.load(tmp_path / "index").fingerprint == "model a"
    assert TupleIndex.load(tmp_path / "index").info()["fingerprint"] == "model a"
    TupleIndex.build(model.score, {"image": np.eye(16)}).save(tmp_path / "plain")
    TupleIndex.load(tmp_path / "plain", model=FakeModel(model.score, "any"))
    with pytest.raises(ValueError, match="sum_of_pairs"):
        TupleIndex.load(tmp_path / "plain", model=FakeModel(make_score("sum_of_pairs", 3, 16)))


def test_a_real_model_is_run_in_evaluation_mode_and_left_as_it_was(make_score):
    from mmcl import MultimodalModel

    towers = {name: torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5)) for name in ("image", "audio")}
    model = MultimodalModel(towers, make_score("sum_of_pairs", 2, 8))
    model.train()
    model.towers[0].eval()
    modes = [module.training for module in model.modules()]
    index = TupleIndex.build(model, {"image": torch.randn(20, 4)})
    queries = torch.randn(3, 4)
    a, b = (index.search({"audio": queries}) for _ in range(2))
    np.testing.assert_array_equal(a.scores, b.scores)
    assert [module.training for module in model.modules()] == modes
    with pytest.raises(RuntimeError) as error:
        index.search({"audio": torch.randn(3, 5)})
    assert any("encoded=True" in note for note in error.value.__notes__)


def test_raw_values_are_encoded_in_blocks_in_order(model, monkeypatch):
    monkeypatch.setattr("mmcl.index.sources.RAW_ROWS", 3)
    index = TupleIndex.build(model, {"image": WORDS, "audio": WORDS[::-1]}, ids=WORDS)
    assert [call["image"] for call in model.calls] == [3, 3, 1]
    monkeypatch.undo()
    whole = TupleIndex.build(model, {"image": WORDS, "audio": WORDS[::-1]}, ids=WORDS)
    np.testing.assert_array_equal(index.search({"text": WORDS}).ids, whole.search({"text": WORDS}).ids)


@pytest.fixture
def dataset():
    import datasets

    return datasets.Dataset.from_dict(
        {"image": WORDS, "audio": WORDS[::-1], "length": [len(word) for word in WORDS], "parts": [[1]] * 7}
    )


def test_a_dataset_brings_its_modalities_and_metadata(dataset, model, index):
    built = TupleIndex.build(model, dataset, ids=WORDS)
    assert built.modalities == ("image", "audio")
    np.testing.assert_array_equal(built.search({"text": WORDS}).ids, index.search({"text": WORDS}).ids)
    assert built.get(["seven", "one"]) == [{"length": 5}, {"length": 3}]
    shuffled = TupleIndex.build(model, dataset.select([6, 5]), ids=["seven", "six"])
    assert shuffled.get("seven") == {"length": 5}
    own = TupleIndex.build(model, dataset, ids=WORDS, metadata={"row": list(range(7))})
    assert own.get("three") == {"row": 2}


def test_a_dataset_of_all_modalities_needs_a_choice(dataset, model):
    full = dataset.add_column("text", WORDS)
    with pytest.raises(ValueError, match=r"\['audio', 'image', 'text'\].*modalities="):
        TupleIndex.build(model, full)
    index = TupleIndex.build(model, full, modalities=("image",))
    assert index.modalities == ("image",)
    assert index.get(3) == {"audio": "four", "length": 4, "text": "four"}


def test_datasets_that_cannot_be_indexed_are_refused(dataset, model):
    import datasets

    with pytest.raises(ValueError, match="pass the model"):
        TupleIndex.build(model.score, dataset)
    with pytest.raises(ValueError, match=r"splits \['train'\]"):
        TupleIndex.build(model, datasets.DatasetDict({"train": dataset}))
    with pytest.raises(ValueError, match="'id' is reserved"):
        TupleIndex.build(model, dataset.add_column("id", WORDS))
    with pytest.raises(ValueError, match="none of the modalities"):
        TupleIndex.build(model, dataset.select_columns(["length"]))


def test_columns_say_which_a_modality_is(dataset, model, index):
    """Those of other names are metadata, unless `columns` says whose they are."""
    photos = dataset.rename_column("image", "photo")
    built = TupleIndex.build(model, photos, ids=WORDS, columns={"image": "photo"})
    assert built.modalities == ("image", "audio")
    np.testing.assert_array_equal(built.search({"text": WORDS}).scores, index.search({"text": WORDS}).scores)
    assert built.get("seven") == {"length": 5}
    built.add(photos.select([0]), ["again"], columns={"image": "photo"})
    built.upsert(photos.select([1]), ["one"], columns={"image": "photo"})
    assert built.get(["again", "one"]) == [{"length": 3}, {"length": 3}]
    for hits in built.search({"text": WORDS}, k=8):
        found = {key: score for key, score, _ in hits}
        assert found["one"] == pytest.approx(found["two"], rel=1e-5)
    told = r"no column '{}' for modality 'image'; the dataset has \['photo', 'audio', 'length', 'parts'\]: name its "
    with pytest.raises(KeyError, match=told.format("foto") + r"column as columns=\{'image': ...\}"):
        TupleIndex.build(model, photos, columns={"image": "foto"})
    with pytest.raises(KeyError, match=told.format("image")):
        TupleIndex.build(model, photos, modalities=("image", "audio"))
    with pytest.raises(KeyError, match=told.format("image")):
        built.add(photos.select([2]), ["third"])
    with pytest.raises(KeyError, match=r"unknown modality 'imag' in columns"):
        TupleIndex.build(model, photos, columns={"imag": "photo"})
    with pytest.raises(ValueError, match="columns= names columns of a datasets.Dataset; the items are a dict"):
        TupleIndex.build(model, {"image": WORDS}, columns={"image": "photo"})


def test_a_modality_whose_column_is_missing_is_not_left_out_in_silence(dataset, model):
    """Several indexes divide all modalities: one that is not found would be missed only by a search."""
    other = dataset.add_column("words", WORDS)
    with pytest.raises(KeyError, match=r"no column 'text'.*, or leave the modality out on purpose, as with stored=\["):
        TupleIndexes.build(model, other)
    assert TupleIndexes.build(model, other, stored=[("image",)]).stored == [("image",)]
    indexes = TupleIndexes.build(model, other, columns={"text": "words"})
    assert ("image", "text") in indexes.stored
    assert indexes.get(2) == {"length": 5}
    indexes.add(other.select([0]), columns={"text": "words"})
    assert len(indexes) == 8


@pytest.mark.parametrize("factory", ["PQ4x4", "HNSW16,SQ8"])
def test_queries_that_codes_alone_cannot_answer_are_refused_before_anything_is_encoded(model, factory, tmp_path):
    items = {"image": [f"word {row}" for row in range(40)]}
    for built in (TupleIndex.build, partial(TupleIndexes.build, stored=[("image",)])):
        with pytest.raises(ValueError, match=f"factory '{factory}' holds codes alone, .*'{factory},RFlat' does"):
            built(model, items, factory=factory, queries={"text": WORDS})
        with pytest.raises(ValueError, match="there are 0 queries and 40 items"):
            built(model, items, queries={"text": np.empty((0, 16), np.float32)})
        with pytest.raises(ValueError, match="in Milvus give nprobe"):
            built(model, items, backend="milvus", uri=str(tmp_path / "m.db"), queries={"text": WORDS})
    assert all("image" not in call for call in model.calls)


def test_embeddings_in_a_dataset_need_no_model(make_score, unit_rows):
    import datasets

    rows = unit_rows(9, 8)
    dataset = datasets.Dataset.from_dict({"image": rows.tolist(), "name": [str(i) for i in range(9)]})
    index = TupleIndex.build(make_score("sum_of_pairs", 2, 8), dataset, encoded=True)
    plain = TupleIndex.build(make_score("sum_of_pairs", 2, 8), {"image": rows})
    np.testing.assert_array_equal(index.search({"audio": rows}).ids, plain.search({"audio": rows}).ids)
    assert index.get(4) == {"name": "4"}


def shards(folder, rows, fingerprint="model a"):
    """Two shards of images and audio."""
    import pyarrow as pa

    from mmcl.shards import ShardWriter

    writer = ShardWriter(folder, {"fingerprint": fingerprint})
    for part in (slice(0, 4), slice(4, 7)):
        keys = pa.table({"key": WORDS[part]})
        writer.write({name: value[part].numpy() for name, value in rows.items()}, keys)
    writer.write_manifest(complete=True)
    return folder


def test_a_folder_of_shards_is_fused_shard_by_shard(model, unit_embeddings, tmp_path):
    rows = unit_embeddings(3, 7, 16)
    folder = shards(tmp_path / "shards", rows)
    index = TupleIndex.build(model.score, folder, modalities=("image", "audio"), ids=WORDS)
    plain = TupleIndex.build(model.score, {name: rows[name] for name in ("image", "audio")}, ids=WORDS)
    np.testing.assert_array_equal(index.search({"text": rows["text"]}).ids, plain.search({"text": rows["text"]}).ids)
    assert index.get(WORDS) == [{"key": word} for word in WORDS]
    assert index.fingerprint == "model a"
    assert TupleIndex.build(model, str(folder), modalities="image").model is model
    with pytest.raises(ValueError, match=r"modalities="):
        TupleIndex.build(model.score, folder)
    with pytest.raises(ValueError, match=r"model a.*model b"):
        TupleIndex.build(FakeModel(model.score, "model b"), folder, modalities=("image",))


def test_importing_the_index_imports_no_faiss():
    import subprocess

    heavy = ("faiss", "datasets", "transformers", "duckdb")
    code = f"import sys, mmcl.index; print([name for name in {heavy} if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_labels_of_a_dataset_are_indexed_by_their_names():
    import datasets

    from mmcl import MultimodalModel, SumOfPairs
    from mmcl.encoders import categories

    names = ["blue", "red"]
    real = MultimodalModel({"a": categories(names, 8), "b": categories([0, 1], 8)}, SumOfPairs(("a", "b"), 8))
    data = datasets.Dataset.from_dict({"a": [1, 0]}).cast_column("a", datasets.ClassLabel(names=names))
    by_name = TupleIndex.build(real, {"a": ["red", "blue"]}).search({"b": [0, 1]}, k=2)
    np.testing.assert_array_equal(TupleIndex.build(real, data).search({"b": [0, 1]}, k=2).scores, by_name.scores)
