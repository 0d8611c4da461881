import io
import tarfile
from itertools import islice

import datasets
import numpy as np
import pytest
import torch
from PIL import Image

from mmcl import Hadamard, MultimodalModel, SumOfPairs
from mmcl.batching import BatchMaker, batches, planned_steps, shuffled_batches
from mmcl.data import column_rows, group_ids, load_data, modality_columns
from mmcl.encoders import categories, small_image, vectors


def rows(count=10):
    return {"sensor": np.arange(3.0 * count).reshape(count, 3).tolist(), "word": ["no", "yes"] * (count // 2)}


def model():
    return MultimodalModel(
        {"sensor": vectors(3, 4), "word": categories(["no", "yes"], 4)}, SumOfPairs(("sensor", "word"), 4)
    )


def test_every_file_kind_loads_the_same_rows(tmp_path):
    import pandas as pd

    data = datasets.Dataset.from_dict({"word": ["a", "b", "c"], "number": [1, 2, 3]})
    data.to_parquet(tmp_path / "x.parquet")
    data.to_csv(tmp_path / "x.csv")
    data.to_json(tmp_path / "x.jsonl")
    data.save_to_disk(tmp_path / "saved")
    pd.DataFrame(data.to_dict()).to_csv(tmp_path / "x.tsv", sep="\t", index=False)
    for name in ("x.parquet", "x.csv", "x.tsv", "x.jsonl", "saved"):
        loaded = load_data(str(tmp_path / name))
        assert (loaded["word"][:], loaded["number"][:]) == (["a", "b", "c"], [1, 2, 3]), name
    streamed = load_data(str(tmp_path / "x.parquet"), streaming=True)
    assert [row["word"] for row in streamed] == ["a", "b", "c"]


def test_a_folder_of_pictures_and_a_webdataset_tar_load(tmp_path):
    (tmp_path / "pictures").mkdir()
    with tarfile.open(tmp_path / "shard-0.tar", "w") as tar:
        for row in range(3):
            Image.new("RGB", (4, 4), (row * 90, 0, 0)).save(tmp_path / "pictures" / f"{row}.png")
            content = (tmp_path / "pictures" / f"{row}.png").read_bytes()
            for name, value in (("png", content), ("txt", f"row {row}".encode())):
                entry = tarfile.TarInfo(f"{row}.{name}")
                entry.size = len(value)
                tar.addfile(entry, io.BytesIO(value))
    (tmp_path / "pictures" / "metadata.csv").write_text("file_name,word\n0.png,a\n1.png,b\n2.png,c\n")
    folder = load_data(str(tmp_path / "pictures"))
    assert folder["word"][:] == ["a", "b", "c"]
    assert folder[2]["image"].getpixel((0, 0))[0] == 180
    packed = load_data(str(tmp_path / "shard-*.tar"))
    assert packed["txt"][:] == ["row 0", "row 1", "row 2"]
    for source, column in ((folder, "image"), (packed, "png")):
        pair = MultimodalModel({"image": small_image(4, 4), "n": vectors(1, 4)}, SumOfPairs(("image", "n"), 4))
        maker = BatchMaker(pair, source, {"image": column}, modalities=["image"])
        assert maker[[0, 2]].inputs["image"].shape == (2, 3, 4, 4)


def test_a_split_must_be_chosen_where_there_are_several(tmp_path):
    part = datasets.Dataset.from_dict({"word": ["a"]})
    datasets.DatasetDict({"train": part, "test": part}).save_to_disk(tmp_path / "two")
    with pytest.raises(ValueError, match=r"splits \['test', 'train'\]; choose one"):
        load_data(str(tmp_path / "two"))
    with pytest.raises(KeyError, match="no split 'dev'"):
        load_data(str(tmp_path / "two"), split="dev")
    assert load_data(str(tmp_path / "two"), split="test")["word"][:] == ["a"]
    with pytest.raises(FileNotFoundError, match="no data at"):
        load_data(str(tmp_path / "missing.parquet"))


def test_columns_default_to_the_modalities_and_a_missing_one_lists_them():
    data = datasets.Dataset.from_dict({"photo": [1], "text": ["a"]})
    assert modality_columns(data, ("image", "text"), {"image": "photo"}) == {"image": "photo", "text": "text"}
    with pytest.raises(KeyError, match=r"no column 'image' for modality 'image'; the dataset has \['photo', 'text'\]"):
        modality_columns(data, ("image", "text"), None)
    with pytest.raises(KeyError, match="unknown modality 'sound'"):
        modality_columns(data, ("image", "text"), {"sound": "photo"})


def test_groups_are_equal_exactly_where_raw_values_are():
    picture = Image.new("RGB", (2, 2))
    values = ["a", "b", "a", 1, "1", 1.0, b"a", {"bytes": b"a", "path": "x"}, {"bytes": b"a", "path": "y"}, picture]
    ids = group_ids([*values, Image.new("RGB", (2, 2)), Image.new("RGB", (2, 2), "red")]).tolist()
    assert ids[0] == ids[2] and ids[7] == ids[8] and ids[9] == ids[10]
    assert len({*ids[:2], *ids[3:7], ids[9], ids[11]}) == 8
    assert group_ids(["a"]).tolist() == group_ids(["b", "a"]).tolist()[1:]  # the same in every batch


def test_an_epoch_visits_every_row_once_and_ranks_share_it():
    orders = shuffled_batches(20, 4, seed=3)
    first, second = [[next(orders) for _ in range(5)] for _ in range(2)]
    assert sorted(sum(first, [])) == sorted(sum(second, [])) == list(range(20))
    assert first != second
    ranks = [shuffled_batches(21, 5, seed=3, rank=rank, world=2) for rank in range(2)]
    epoch = [next(rank) for _ in range(2) for rank in ranks]
    assert len(set(sum(epoch, []))) == 20


def test_steps_are_counted_over_whole_batches():
    assert planned_steps(100, 3, None, 32, 1, 1) == (3, 9)
    assert planned_steps(100, 3, None, 16, 4, 1) == (1, 4)
    assert planned_steps(100, 3, 7, 32, 1, 1) == (3, 7)
    assert planned_steps(None, 3, 7, 32, 1, 1) == (None, 7)
    with pytest.raises(ValueError, match="100 rows, too few for batch_size 64 on 2 processes"):
        planned_steps(100, 3, None, 64, 1, 2)
    with pytest.raises(ValueError, match="give `steps`"):
        planned_steps(None, 3, None, 32, 1, 1)


@pytest.mark.parametrize("cache", [False, True])
def test_a_batch_holds_the_rows_that_were_asked_for(cache):
    data = datasets.Dataset.from_dict(rows())
    maker = BatchMaker(model(), data, groups={"word": "equal"}, cache=cache)
    batch = maker[[7, 0, 3]]
    assert batch.rows == [7, 0, 3]
    assert torch.equal(batch.inputs["sensor"], torch.tensor([[21.0, 22, 23], [0, 1, 2], [9, 10, 11]]))
    assert batch.inputs["word"].tolist() == [1, 0, 1]
    ids = batch.groups["word"].tolist()
    assert ids[0] == ids[2] != ids[1]


def test_groups_may_come_from_another_column():
    data = datasets.Dataset.from_dict({**rows(4), "place": [5, 6, 5, 7]})
    ids = BatchMaker(model(), data, groups={"sensor": "place"})[[0, 1, 2, 3]].groups["sensor"].tolist()
    assert ids[0] == ids[2] and len(set(ids)) == 3
    with pytest.raises(KeyError, match="no column 'nowhere' for groups of 'word'"):
        BatchMaker(model(), data, groups={"word": "nowhere"})


@pytest.mark.parametrize("cache", [False, True])
def test_a_fault_names_modality_column_and_the_datasets_row(cache):
    values = rows()
    values["word"][7] = "maybe"
    data = datasets.Dataset.from_dict(values).rename_column("word", "answer")
    with pytest.raises(ValueError, match=r"word \(column 'answer'\): row 7: unknown category 'maybe'"):
        BatchMaker(model(), data, {"word": "answer"}, cache=cache)[[1, 7, 2]]


def test_a_fault_met_by_a_worker_reads_the_same():
    values = rows()
    values["word"][7] = "maybe"
    maker = BatchMaker(model(), datasets.Dataset.from_dict(values))
    with pytest.raises(ValueError, match="^word: row 7: unknown category 'maybe'; the categories are no, yes$"):
        list(islice(batches(maker, 10, 0, 2, 0, 1, 0), 1))


def test_a_broken_picture_and_a_missing_one_name_their_row():
    png = io.BytesIO()
    Image.new("RGB", (4, 4)).save(png, "PNG")
    good = {"bytes": png.getvalue(), "path": None}
    pictures = [good, {"bytes": b"no picture", "path": None}, None]
    data = datasets.Dataset.from_dict({"image": pictures, "n": [[0.0]] * 3})
    data = data.cast_column("image", datasets.Image())
    pair = MultimodalModel({"image": small_image(4, 4), "n": vectors(1, 4)}, SumOfPairs(("image", "n"), 4))
    assert BatchMaker(pair, data)[[0]].inputs["image"].shape == (1, 3, 4, 4)
    with pytest.raises(ValueError, match="image: row 1: not an image file"):
        BatchMaker(pair, data)[[0, 1]]
    with pytest.raises(ValueError, match="image: row 2: image is missing"):
        BatchMaker(pair, data)[[0, 2]]


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_go_on_from_any_place(workers):
    maker = BatchMaker(model(), datasets.Dataset.from_dict(rows(20)))
    every = batches(maker, 4, 0, workers, 0, 1, 0)
    seen = [next(every) for _ in range(8)]
    later = batches(maker, 4, 0, workers, 0, 1, 6)
    for batch in seen[6:]:
        again = next(later)
        assert again.rows == batch.rows
        assert torch.equal(again.inputs["sensor"], batch.inputs["sensor"])


def test_a_stream_gives_full_batches_pass_after_pass():
    stream = datasets.Dataset.from_dict(rows(10)).to_iterable_dataset()
    maker = BatchMaker(model(), stream, groups={"word": "equal"})
    source = batches(maker, 4, 0, 0, 0, 1, 0)
    seen = [next(source) for _ in range(5)]
    assert [len(batch.rows) for batch in seen] == [4] * 5
    assert not torch.equal(seen[0].inputs["sensor"], seen[2].inputs["sensor"])
    later = batches(maker, 4, 0, 0, 0, 1, 3)
    assert torch.equal(next(later).inputs["sensor"], seen[3].inputs["sensor"])
    with pytest.raises(ValueError, match="fewer rows than batch_size 16"):
        next(batches(maker, 16, 0, 0, 0, 1, 0))


def test_rows_are_read_in_order_with_a_smaller_last_batch():
    data = datasets.Dataset.from_dict(rows(10))
    read = list(column_rows(data, 4))
    assert [numbers for numbers, _ in read] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert sum((values["word"] for _, values in read), []) == data["word"][:]


def test_three_modalities_share_one_maker():
    names = ("a", "b", "c")
    three = MultimodalModel({name: vectors(1, 4) for name in names}, Hadamard(names, 4))
    data = datasets.Dataset.from_dict({name: [[float(row)] for row in range(6)] for name in names})
    assert set(BatchMaker(three, data)[[1, 2]].inputs) == set(names)


@pytest.mark.parametrize("kind", ["numpy", "torch", None])
def test_groups_and_inputs_do_not_depend_on_the_datasets_format(kind):
    values = {"sensor": [[float(row // 2), 1.0, 2.0] for row in range(12)], "word": ["no", "yes"] * 6}
    data = datasets.Dataset.from_dict(values).with_format(kind)
    batch = BatchMaker(model(), data, groups={"sensor": "equal"})[list(range(12))]
    assert len(set(batch.groups["sensor"].tolist())) == 6
    assert batch.inputs["sensor"][:, 0].tolist() == [row // 2 for row in range(12)]


def test_rows_of_arrays_and_tensors_are_told_apart_to_the_last_digit():
    assert len(set(group_ids(np.random.default_rng(0).normal(size=(50, 3))).tolist())) == 50
    nearly = torch.ones(16, 3) + torch.arange(16)[:, None] * 1e-5
    assert len(set(group_ids(nearly).tolist())) == 16
    assert len(set(group_ids([torch.zeros(3, 64, 64), torch.zeros(3, 64, 64)]).tolist())) == 1


def test_a_transform_is_kept_and_not_cached():
    def double(batch):
        return {**batch, "sensor": (2 * np.array(batch["sensor"])).tolist()}

    data = datasets.Dataset.from_dict(rows(4)).with_transform(double)
    assert BatchMaker(model(), data)[[1]].inputs["sensor"].tolist() == [[6.0, 8.0, 10.0]]
    with pytest.raises(ValueError, match="would freeze the dataset's transform"):
        BatchMaker(model(), data, cache=True)


def test_what_is_no_dataset_is_refused_by_its_kind(tmp_path):
    part = datasets.Dataset.from_dict(rows(4))
    with pytest.raises(ValueError, match=r"got DatasetDict of \['test', 'train'\]; choose one"):
        BatchMaker(model(), datasets.DatasetDict({"train": part, "test": part}))
    with pytest.raises(ValueError, match="expected a datasets.Dataset or IterableDataset, got list"):
        BatchMaker(model(), [{"sensor": [1.0], "word": "no"}])
    (tmp_path / "broken.csv").write_text("a,b\n1,2\n1,2,3,4\n")
    with pytest.raises(ValueError, match="broken.csv cannot be read: "):
        load_data(str(tmp_path / "broken.csv"))


def test_a_missing_value_in_groups_or_categories_names_its_row(tmp_path):
    from mmcl.jobs import distinct_values

    values = {**rows(4), "place": ["x", None, "x", "y"]}
    data = datasets.Dataset.from_dict(values)
    with pytest.raises(ValueError, match=r"groups of 'sensor' \(column 'place'\): row 1 is missing"):
        BatchMaker(model(), data, groups={"sensor": "place"})[[0, 1]]
    with pytest.raises(ValueError, match=r"text \(column 'place'\): row 1 is missing"):
        distinct_values(data, "place", "text")
    assert distinct_values(data, "word", "text") == ["no", "yes"]


def test_what_looks_like_a_path_is_not_asked_of_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    (tmp_path / "notes.txt").write_text("x")
    for source in ("here/modle", "./x", "/no/where", "data.zzz"):
        with pytest.raises(FileNotFoundError, match="no data at"):
            load_data(source)
        with pytest.raises(FileNotFoundError, match="no model folder at"):
            MultimodalModel.from_pretrained(source)
    with pytest.raises(ValueError, match=r"notes.txt: unknown kind of file '.txt'; mmcl reads"):
        load_data("notes.txt")
    (tmp_path / "empty.csv").write_text("")
    (tmp_path / "header.csv").write_text("a,b\n")
    for name in ("empty.csv", "header.csv"):
        with pytest.raises(ValueError, match=f"{name} cannot be read"):
            load_data(name)


def test_a_column_of_single_numbers_is_a_vector_of_width_one():
    pair = MultimodalModel({"a": vectors(1, 4), "b": vectors(1, 4)}, SumOfPairs(("a", "b"), 4))
    data = datasets.Dataset.from_dict({"a": [0.5, 1.5], "b": [1, 2]})
    assert BatchMaker(pair, data)[[1, 0]].inputs["b"].tolist() == [[2.0], [1.0]]
