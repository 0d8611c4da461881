"""Folders of embedding shards as people have them: other names, other types, holes, several folders joined by key."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mmcl import shard_files
from mmcl.shards import open_shards


def write(folder, stem, shard, rows):
    (folder / f"{stem}_emb").mkdir(parents=True, exist_ok=True)
    np.save(folder / f"{stem}_emb" / f"{stem}_emb_{shard}.npy", rows)


def write_metadata(folder, shard, columns):
    (folder / "metadata").mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), folder / "metadata" / f"metadata_{shard}.parquet")


def numbered(first, count, width=3, dtype=np.float32):
    """Rows whose every coordinate is the row's number in the whole."""
    return np.repeat(np.arange(first, first + count), width).reshape(count, width).astype(dtype)


@pytest.fixture
def folder(tmp_path):
    """Shards 0, 1, 2, 10 of 4, 0, 3, 5 rows in clip-retrieval's names, some of them float16."""
    start = 0
    for shard, count, dtype in (
        ("0", 4, np.float32),
        ("1", 0, np.float32),
        ("2", 3, np.float16),
        ("10", 5, np.float64),
    ):
        write(tmp_path, "img", shard, numbered(start, count, dtype=dtype))
        write(tmp_path, "text", shard, 100 + numbered(start, count, 2, np.float16))
        write_metadata(tmp_path, shard, {"key": [f"row {row}" for row in range(start, start + count)]})
        start += count
    return tmp_path


def test_a_clip_retrieval_folder_is_read_as_it_is(folder):
    shards = open_shards(folder)
    assert shards.modalities == ("img", "text")
    assert (shards.rows(), shards.shard_rows(), shards.shard_names()) == (12, [4, 0, 3, 5], ["0", "1", "2", "10"])
    parts = list(shards)
    image, text = (np.concatenate([rows[name] for rows, _ in parts]) for name in ("img", "text"))
    np.testing.assert_array_equal(image, numbered(0, 12))
    np.testing.assert_array_equal(text, 100 + numbered(0, 12, 2))
    assert {rows[name].dtype for rows, _ in parts for name in rows} == {np.dtype(np.float32)}
    keys = [f"row {row}" for row in range(12)]
    assert [row["key"] for _, table in parts for row in table.to_pylist()] == keys
    assert shards.metadata().to_pydict() == {"key": keys}
    assert shards.column("key") == keys


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, ["img", "text"]),
        ({"known": ("image", "text", "audio")}, ["image", "text"]),
        ({"names": {"photo": "img"}}, ["photo", "text"]),
        ({"names": {"photo": "img"}, "known": ("image", "text")}, ["photo", "image", "text"]),
    ],
)
def test_img_is_what_the_caller_calls_it(folder, options, expected):
    shards = open_shards(folder, **options)
    assert sorted(shards.modalities) == sorted(expected)
    for name in expected[:-1]:
        np.testing.assert_array_equal(shards.select([name]).read_shard(2)[0][name], numbered(4, 3))


def test_a_folder_given_for_image_may_call_it_img(folder):
    np.testing.assert_array_equal(open_shards({"image": folder}).read_rows(0, slice(1, 3))["image"], numbered(1, 2))
    for shard, count in (("0", 4), ("1", 0), ("2", 3), ("10", 5)):
        write(folder, "image", shard, numbered(50, count))
    assert open_shards({"image": folder}).read_rows(0, [0])["image"][0, 0] == 50
    with pytest.raises(FileNotFoundError, match=r"no shards of 'photo' \(picture_emb/picture_emb_0000.npy"):
        open_shards(folder, names={"photo": "picture"})


def test_rows_are_read_without_the_rest_of_their_shard(folder, monkeypatch):
    shards, load, modes = open_shards(folder), np.load, []
    monkeypatch.setattr(np, "load", lambda path, **options: modes.append(options["mmap_mode"]) or load(path, **options))
    rows = shards.read_rows(3, np.array([4, 0, 2]))
    np.testing.assert_array_equal(rows["img"][:, 0], [11, 7, 9])
    assert modes == ["r", "r"]


def test_a_shard_that_lacks_a_modality_or_metadata_is_named(folder):
    (folder / "text_emb" / "text_emb_2.npy").unlink()
    assert open_shards(folder).select(["img"]).rows() == 12
    with pytest.raises(FileNotFoundError, match=r"shard 2 lacks text \(text_emb_2.npy\)"):
        open_shards(folder).rows()
    with pytest.raises(FileNotFoundError, match="shard 2 lacks text"):
        open_shards(folder).select(["text", "img"]).shard_rows()
    write(folder, "text", "2", numbered(4, 3, 2))
    write(folder, "text", "11", numbered(12, 1, 2))
    with pytest.raises(FileNotFoundError, match="shard 11 lacks img"):
        next(iter(open_shards(folder)))
    (folder / "text_emb" / "text_emb_11.npy").unlink()
    (folder / "metadata" / "metadata_1.parquet").unlink()
    with pytest.raises(FileNotFoundError, match=r"shard 1 lacks metadata \(metadata_1.parquet\), which others have"):
        open_shards(folder).rows()


def test_a_shard_a_row_short_is_refused_before_anything_is_read(folder):
    write(folder, "text", "10", numbered(7, 4, 2))
    for read in (lambda s: s.rows(), lambda s: s.read_rows(0, [0]), lambda s: next(iter(s)), lambda s: s.column("key")):
        with pytest.raises(ValueError, match="shard 10 has differing numbers of rows: metadata 5, img 5, text 4"):
            read(open_shards(folder))


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        (np.zeros(4, np.float32), r"img_emb_0.npy: expected \(rows, d\), got \(4,\)"),
        (np.zeros((4, 1, 3), np.float32), r"img_emb_0.npy: expected \(rows, d\), got \(4, 1, 3\)"),
        (np.zeros((4, 3), np.int64), "img_emb_0.npy: expected float16, float32 or float64, got int64"),
        (np.full((4, 3), None), "img_emb_0.npy: expected float16, float32 or float64, got object"),
        (np.zeros((4, 5), np.float32), "img_emb_1.npy: 3 columns, the shards before have 5"),
    ],
)
def test_files_that_hold_something_else_are_named(folder, rows, told):
    write(folder, "img", "0", rows)
    with pytest.raises(ValueError, match=told):
        open_shards(folder).rows()


def test_damaged_files_are_named(folder):
    file = folder / "img_emb" / "img_emb_2.npy"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"img_emb_2.npy is cut short: it has 145 bytes of 146"):
        open_shards(folder).rows()
    file.write_bytes(b"hello")
    with pytest.raises(ValueError, match=r"img_emb_2.npy is no .npy file"):
        open_shards(folder).rows()
    file.unlink()
    write(folder, "img", "2", numbered(4, 3))
    write(folder, "img", "0002", numbered(4, 3))
    with pytest.raises(ValueError, match="img_emb_0002.npy and img_emb_2.npy have the same number"):
        open_shards(folder).rows()


def test_modalities_may_be_padded_differently_and_empty_lists_are_empty_shards(tmp_path):
    write(tmp_path, "image", "0000", numbered(0, 2))
    write(tmp_path, "image", "0001", np.array([]))
    write(tmp_path, "audio", "0", numbered(0, 2, 5))
    write(tmp_path, "audio", "1", np.empty((0, 5), np.float32))
    shards = open_shards(tmp_path)
    assert [rows["image"].shape for rows, _ in shards] == [(2, 3), (0, 3)]
    assert [rows["audio"].shape for rows, _ in shards] == [(2, 5), (0, 5)]
    assert [table.num_rows for _, table in shards] == [2, 0]


@pytest.fixture
def apart(folder, tmp_path_factory):
    """Audio of the same keys in another folder, in another order and other shards: row i holds 200 + i."""
    other = tmp_path_factory.mktemp("audio")
    order = np.random.default_rng(0).permutation(12)
    for shard, part in enumerate(np.split(order, [5, 5, 9])):
        write(other, "audio", f"{shard:05d}", 200 + np.repeat(part, 4).reshape(-1, 4).astype(np.float32))
        write_metadata(other, f"{shard:05d}", {"key": pa.array([f"row {row}" for row in part], pa.string()), "n": part})
    return {"image": folder, "audio": other}


def test_folders_join_by_key_in_any_order(apart):
    shards = open_shards(apart)
    assert shards.shard_rows() == [4, 0, 3, 5]
    parts = [rows for rows, _ in shards]
    np.testing.assert_array_equal(np.concatenate([rows["image"] for rows in parts]), numbered(0, 12))
    np.testing.assert_array_equal(np.concatenate([rows["audio"] for rows in parts]), 200 + numbered(0, 12, 4))
    some = shards.read_rows(3, np.array([4, 1]))
    np.testing.assert_array_equal(some["audio"][:, 0], [211, 208])
    np.testing.assert_array_equal(shards.read_rows(2, slice(1, 3))["audio"][:, 0], [205, 206])


def test_joining_opens_each_shard_once_for_a_shard(apart, monkeypatch):
    shards, opened = open_shards(apart), []
    whole = shard_files.mapped
    monkeypatch.setattr(shard_files, "mapped", lambda path: opened.append(path.name) or whole(path))
    shards.read_shard(3)
    assert len(opened) == len(set(opened)) <= 1 + 3


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        (["row 0", None, "row 2"], "the key in row 1 of shard 00000 is missing"),
        (["row 0", "row 9", "row 9"], "key 'row 9' stands twice, in shards 00000 and 00000"),
        ([0, 1, 2], r"keys of differing types: \['int64', 'large_string'\]"),
    ],
)
def test_keys_that_do_not_join_are_told(apart, keys, told):
    write(apart["audio"], "audio", "00000", numbered(0, 3, 4))
    write_metadata(apart["audio"], "00000", {"key": keys})
    with pytest.raises(ValueError, match=told):
        list(open_shards(apart))


def test_integer_keys_do_not_join_names(apart):
    for shard, count in (("00000", 5), ("00001", 0), ("00002", 4), ("00003", 3)):
        write_metadata(apart["audio"], shard, {"key": pa.array(range(count), pa.int32())})
    with pytest.raises(ValueError, match="its keys are int64, those to be joined are large_string"):
        list(open_shards(apart))


def test_a_missing_key_or_key_column_is_named(apart):
    write(apart["audio"], "audio", "00003", numbered(0, 1, 4))
    write_metadata(apart["audio"], "00003", {"key": ["row 99"]})
    with pytest.raises(KeyError, match=r"has no audio row of key 'row \d+' \(\d of \d missing\)"):
        list(open_shards(apart))
    write_metadata(apart["audio"], "00003", {"name": ["row 99"]})
    with pytest.raises(ValueError, match="metadata of shard 00003 has no 'key' column"):
        list(open_shards(apart))


def test_the_state_tells_files_that_were_replaced(apart):
    before = open_shards(apart).state()
    assert open_shards(apart).state() == before
    assert open_shards({"image": apart["image"]}).state() != before
    file = apart["audio"] / "audio_emb" / "audio_emb_00002.npy"
    rows = np.load(file)
    file.unlink()
    np.save(file, rows + 1)
    assert open_shards(apart).state() != before
