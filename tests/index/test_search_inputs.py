"""What a search and a build take, in every layout, and what they refuse by name."""

import re

import numpy as np
import pytest
import torch

from mmcl.index import TupleIndex
from mmcl.scores import SumOfPairs


@pytest.fixture(scope="module")
def index(make_score, items):
    return TupleIndex.build(make_score("pairs_and_hadamard", 3, 16), {name: items[name] for name in ("image", "audio")})


def read_only_map(rows, folder):
    np.save(folder / "rows.npy", rows)
    return np.load(folder / "rows.npy", mmap_mode="r")


def strided(rows):
    wide = np.zeros((2 * len(rows), 3 * rows.shape[1]), rows.dtype)
    wide[::2, ::3] = rows
    return wide[::2, ::3]


def as_numpy(given):
    return given.detach().float().numpy() if isinstance(given, torch.Tensor) else np.asarray(given)


LAYOUTS = {
    "list": lambda rows, _: rows.tolist(),
    "list of arrays": lambda rows, _: list(rows),
    "float64": lambda rows, _: rows.astype(np.float64),
    "float16": lambda rows, _: rows.astype(np.float16),
    "big endian": lambda rows, _: rows.astype(">f4"),
    "fortran": lambda rows, _: np.asfortranarray(rows),
    "strided": lambda rows, _: strided(rows),
    "reversed": lambda rows, _: np.ascontiguousarray(rows[::-1])[::-1],
    "memory map": read_only_map,
    "torch": lambda rows, _: torch.from_numpy(rows.copy()),
    "torch with gradient": lambda rows, _: torch.from_numpy(rows.copy()).requires_grad_(),
    "bfloat16": lambda rows, _: torch.from_numpy(rows.copy()).bfloat16(),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_answer_of_float32(layout, make_score, items, queries, tmp_path):
    score = make_score("pairs_and_hadamard", 3, 16)
    # eighths are the same number in every precision
    image, audio, text = (np.round(8 * rows) / 8 + 0.125 for rows in (items["image"], items["audio"], queries))
    expected = TupleIndex.build(score, {"image": image, "audio": audio}).search({"text": text})
    given, query = LAYOUTS[layout](image, tmp_path), LAYOUTS[layout](text, tmp_path / "..")
    before = as_numpy(given).copy()
    hits = TupleIndex.build(score, {"image": given, "audio": audio}).search({"text": query})
    np.testing.assert_array_equal(hits.ids, expected.ids)
    np.testing.assert_array_equal(hits.scores, expected.scores)
    np.testing.assert_array_equal(as_numpy(given), before)


def test_integers_are_numbers(make_score):
    score = make_score("sum_of_pairs", 2, 4)
    whole = np.arange(1, 41).reshape(10, 4)
    hits = TupleIndex.build(score, {"image": whole}).search({"audio": whole})
    expected = TupleIndex.build(score, {"image": whole.astype(np.float32)}).search({"audio": whole.astype(np.float32)})
    np.testing.assert_array_equal(hits.scores, expected.scores)


@pytest.mark.parametrize("one", [lambda q: q[3], lambda q: q[3].tolist(), lambda q: torch.from_numpy(q[3].copy())])
def test_single_vector_is_one_query(one, index, queries):
    hits = index.search({"text": one(queries)}, k=4)
    assert len(hits) == 1
    np.testing.assert_array_equal(hits.ids, index.search({"text": queries[3:4]}, k=4).ids)


def test_batched_and_single_queries_agree(index, queries):
    batched = index.search({"text": queries}, k=9)
    for row, query in enumerate(queries):
        np.testing.assert_allclose(index.search({"text": query}, k=9).scores[0], batched.scores[row], rtol=1e-4)


@pytest.mark.parametrize("k", [1, np.int64(5), 700, 701, 4096])
def test_any_k_is_filled_as_far_as_items_go(k, index, queries):
    hits = index.search({"text": queries}, k=k)
    assert hits.ids.shape == (25, k)
    assert hits.scores.dtype == np.float32
    assert hits.ids.dtype == np.int64
    assert (hits.counts == min(k, 700)).all()
    assert [len(row) for row in hits] == [min(k, 700)] * 25
    assert (np.diff(hits.scores[:, :700], axis=1) <= 0).all()


@pytest.mark.parametrize("k", [0, -1, True, 2.0, "3", None])
def test_senseless_k_is_refused(k, index, queries):
    with pytest.raises(ValueError, match="k must be"):
        index.search({"text": queries}, k=k)


@pytest.mark.parametrize(
    ("value", "told"),
    [(np.nan, "audio: row 5 holds NaN"), (np.inf, "audio: row 5"), (0, "audio: row 5 holds only zeros")],
)
def test_bad_rows_are_named_by_modality_and_row(value, told, index, make_score, items, queries):
    broken = items["audio"].copy()
    broken[5] = value
    with pytest.raises(ValueError, match=told):
        TupleIndex.build(make_score("hadamard", 3, 16), {"image": items["image"], "audio": broken})
    broken = queries.copy()
    broken[5] = value
    with pytest.raises(ValueError, match=told.replace("audio", "text")):
        index.search({"text": broken})


@pytest.mark.parametrize("size", [1e30, 1e-30, 1e-42])
def test_rows_whose_square_float32_does_not_hold_are_taken(size):
    """Their norm, computed in float32, would be infinite or zero."""
    rows = np.float32(size) * np.eye(3, 4, dtype=np.float32)
    score = SumOfPairs(("a", "b"), 4, temperature=1.0)
    index = TupleIndex.build(score, {"a": rows})
    np.testing.assert_allclose(index.search({"b": np.eye(1, 4)}, k=1).scores, [[np.float32(size)]])
    hits = TupleIndex.build(score, {"a": np.eye(3, 4)}).search({"b": rows[1:2]}, k=1)
    assert hits.ids.tolist() == [[1]]


@pytest.mark.parametrize("value", [1e200, -1e39, 1e-200])
def test_doubles_that_float32_does_not_hold_are_named_by_row(value):
    rows = np.eye(4)
    rows[2] *= value
    score = SumOfPairs(("a", "b"), 4)
    told = f"{{}}: row 2 holds {re.escape(format(value, 'g'))}, which is beyond float32"
    with pytest.raises(ValueError, match=told.format("a")):
        TupleIndex.build(score, {"a": rows})
    with pytest.raises(ValueError, match=told.format("b")):
        TupleIndex.build(score, {"a": np.eye(4)}).search({"b": rows})


def test_bad_row_of_a_later_block_is_counted_from_the_start(make_score, monkeypatch, items):
    monkeypatch.setattr("mmcl.index.sources.BLOCK_ROWS", 64)
    broken = items["image"].copy()
    broken[333, 3] = np.nan
    with pytest.raises(ValueError, match="image: row 333"):
        TupleIndex.build(make_score("hadamard", 3, 16), {"image": broken})


def test_blocks_add_up_to_the_whole(make_score, monkeypatch, items, queries, index):
    monkeypatch.setattr("mmcl.index.sources.BLOCK_ROWS", 64)
    stored = {name: items[name] for name in ("image", "audio")}
    hits = TupleIndex.build(make_score("pairs_and_hadamard", 3, 16), stored).search({"text": queries})
    np.testing.assert_array_equal(hits.ids, index.search({"text": queries}).ids)


def test_products_beyond_float32_are_refused(make_score):
    rows, score = np.full((3, 4), 5e18, np.float32), make_score("hadamard", 4, 4)
    with pytest.raises(ValueError, match=r"row 0.*not finite"):
        TupleIndex.build(score, {"image": rows, "audio": rows, "text": rows})
    index = TupleIndex.build(score, {"image": rows})
    with pytest.raises(ValueError, match=r"query row 0.*not finite"):
        index.search({"text": rows, "audio": rows, "touch": rows})


def test_wrong_shapes_are_named(index, make_score, items):
    score = make_score("hadamard", 3, 16)
    with pytest.raises(ValueError, match=r"image.*16 columns.*\(700, 15\)"):
        TupleIndex.build(score, {"image": items["image"][:, :15]})
    with pytest.raises(ValueError, match="image has 700, audio has 699"):
        TupleIndex.build(score, {"image": items["image"], "audio": items["audio"][:-1]})
    with pytest.raises(ValueError, match=r"text.*16 columns.*\(1, 5\)"):
        index.search({"text": np.ones(5)})
    with pytest.raises(ValueError, match=r"text.*\(2, 3, 16\)"):
        index.search({"text": np.ones((2, 3, 16))})
    with pytest.raises(ValueError, match=r"image.*\(16,\)"):
        TupleIndex.build(score, {"image": items["image"][0]})
    with pytest.raises(ValueError, match=r"image.*15"):
        TupleIndex.build(score, {"image": np.empty((0, 15))})


def test_stored_unknown_and_missing_query_modalities_are_named(index, queries):
    with pytest.raises(ValueError, match=r"'image' is stored.*text"):
        index.search({"image": queries})
    with pytest.raises(KeyError, match=r"smell.*text"):
        index.search({"smell": queries})
    with pytest.raises(ValueError, match=r"empty.*text"):
        index.search({})
    with pytest.raises(ValueError, match=r"ndarray.*text"):
        index.search(queries)


def test_items_of_unknown_or_of_all_modalities_are_refused(make_score, items):
    score = make_score("hadamard", 3, 16)
    with pytest.raises(ValueError, match="none is left"):
        TupleIndex.build(score, items)
    with pytest.raises(KeyError, match=r"smell.*image"):
        TupleIndex.build(score, {"smell": items["image"]})
    with pytest.raises(ValueError, match="none of the modalities"):
        TupleIndex.build(score, {})
    with pytest.raises(ValueError, match="items must be"):
        TupleIndex.build(score, items["image"])
    with pytest.raises(KeyError, match="text"):
        TupleIndex.build(score, {"image": items["image"]}, modalities=("image", "text"))
    with pytest.raises(ValueError, match="Score or a MultimodalModel"):
        TupleIndex.build("score", items)


def test_modalities_choose_what_is_stored(make_score, items, queries, index):
    chosen = TupleIndex.build(make_score("pairs_and_hadamard", 3, 16), items, modalities=("audio", "image"))
    assert chosen.modalities == ("image", "audio")
    np.testing.assert_array_equal(chosen.search({"text": queries}).ids, index.search({"text": queries}).ids)


def test_lists_that_no_path_of_their_graph_reaches_are_searched_too(items, make_score):
    """A graph as coarse quantiser may leave lists out whatever its effort."""
    score = make_score("pairs_and_hadamard", 3, 16)
    stored = {name: np.tile(items[name], (4, 1)) for name in ("image", "audio")}
    index = TupleIndex.build(score, stored, metadata={"row": range(2800)}, factory="IVF128_HNSW2,Flat")
    for where, count in ((None, 2800), ("row % 3 = 0", 934)):
        hits = index.search({"text": items["text"][:4]}, k=2800, where=where, nprobe=128)
        assert hits.counts.tolist() == [count] * 4
        assert all(len(set(row[:count])) == count for row in hits.ids)
