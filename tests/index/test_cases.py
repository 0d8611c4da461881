"""Inputs that have broken indexes elsewhere, one test each; those that have a test beside it are listed here.

The metric is L2, or becomes it by loading  test_factories.py: test_longer_vector_wins_for_every_type_also_after_load
An empty index and 25 queries               test_factories.py: test_empty_index_answers_with_padding
k beyond the items, and k = 4096            test_search_inputs.py: test_any_k_is_filled_as_far_as_items_go
k = 0                                       test_search_inputs.py: test_senseless_k_is_refused
nprobe too small to fill k                  test_factories.py: test_probing_too_few_lists_is_made_up_for
A query of one dimension                    test_search_inputs.py: test_single_vector_is_one_query
The wrong width                             test_search_inputs.py: test_wrong_shapes_are_named
Other precisions and layouts, built         test_search_inputs.py: test_every_layout_gives_the_answer_of_float32
Whole numbers                               test_search_inputs.py: test_integers_are_numbers
NaN, inf and zeros, built or asked          test_search_inputs.py: test_bad_rows_are_named_by_modality_and_row
Half precision overflows                    test_factories.py: test_values_beyond_float16_are_refused_with_their_row
  and as items are added                    test_life.py: test_values_beyond_float16_are_refused_as_they_are_added
Scalar quantisers clip what is added        test_life.py: test_added_values_beyond_a_quantiser_s_range_are_not_clipped
Ids below 0, too large, twice, mixed        test_items.py: test_bad_ids_are_refused_by_name
  and as items are added                    test_life.py: test_refused_changes_change_nothing
Ids that are strings                        test_contract.py: test_a_life_and_a_second_one_from_disk
An id removed and added again               test_contract.py: test_a_life_and_a_second_one_from_disk
Searched one by one and all at once         test_search_inputs.py: test_batched_and_single_queries_agree
The 10 nearest of 60 deleted, then k = 1    test_life.py: test_delete_the_ten_nearest_of_sixty_then_ask_for_one
Deleting from graphs and codes; all         test_life.py: test_every_item_once_and_no_other_through_a_whole_life
Too few items to train on                   test_factories.py: test_too_few_training_rows_are_refused_with_both_numbers
A width that no sub-quantiser divides       test_factories.py: test_width_is_padded_to_what_the_type_needs
A save killed half-way                      test_kills.py: test_fifty_kills_lose_nothing
A full disk                                 test_kills.py: test_a_full_disk_is_an_error_and_the_old_version_stays
A file cut short, or with junk behind it    test_store.py: test_short_and_long_files_are_refused_by_name
A flipped bit                               test_store.py: test_flipped_byte_is_refused_by_file_name
Spaces, other alphabets; a folder moved     test_store.py: test_any_folder_name_works_and_the_folder_may_move
Saved on a GPU, loaded without one          test_devices.py: test_saved_with_gpus_and_loaded_without
Two writers at once                         test_kills.py: test_two_processes_write_and_a_third_reads
  one would undo the other's work           test_saving.py: test_a_writer_does_not_overwrite_what_another_stored
A memory-mapped file replaced               test_folders.py: test_a_memory_mapped_file_replaced_under_a_reader
A reader while a writer saves               test_store.py: test_readers_see_whole_versions_while_writers_write
Searching while adding                      test_threads.py: test_every_answer_of_every_thread_is_one_version
"""

import datetime
import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch

from mmcl.index import TupleIndex
from mmcl.scores import SumOfPairs

STORED = ("image", "audio")
HERE = Path(__file__).parent


def take(items, rows):
    return {name: items[name][rows] for name in STORED}


def test_every_case_listed_above_has_its_test():
    listed = re.findall(r"(test_\w+\.py): (test_\w+)\n", __doc__)
    assert len(listed) == sum("test_" in line for line in __doc__.splitlines())
    for file, name in listed:
        assert f"def {name}(" in (HERE / file).read_text(), name


@pytest.fixture
def layouts(tmp_path):
    """layouts(rows): {name: the same numbers as something else}."""

    def make(rows):
        np.save(tmp_path / "rows.npy", rows)
        wide = np.zeros((2 * len(rows), 3 * rows.shape[1]), rows.dtype)
        wide[::2, ::3] = rows
        return {
            "list": rows.tolist(),
            "float64": rows.astype(np.float64),
            "float16": rows.astype(np.float16),
            "whole numbers": np.int16(8 * rows),
            "strided": wide[::2, ::3],
            "fortran": np.asfortranarray(rows),
            "read-only memory map": np.load(tmp_path / "rows.npy", mmap_mode="r"),
            "tensor": torch.from_numpy(rows.copy()),
        }

    return make


@pytest.mark.parametrize("change", ["add", "upsert"])
def test_lists_and_other_precisions_and_layouts_are_added(change, layouts, make_score, items, queries):
    score = make_score("sum_of_pairs", 3, 16)
    image, audio = (np.round(8 * rows[:40]) / 8 + 0.125 for rows in (items["image"], items["audio"]))
    for name, given in layouts(image).items():
        index = TupleIndex.build(score, {"image": items["image"][:5], "audio": audio[:5]})
        true = 8 * image if name == "whole numbers" else image
        getattr(index, change)({"image": given, "audio": audio}, ids=range(5, 45))
        expected = score.item_vectors({"image": true, "audio": audio}).detach().numpy()
        np.testing.assert_array_equal(index.vectors(range(5, 45)), expected, err_msg=name)


@pytest.mark.parametrize("change", ["add", "upsert"])
@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (lambda rows: np.where(np.arange(16) == 3, np.inf, rows), "audio: row 0 holds an infinite value"),
        (lambda rows: rows * [[1], [0], [1]], "audio: row 1 holds only zeros"),
        (lambda rows: rows[:, :15], r"audio.*16 columns.*\(3, 15\)"),
        (lambda rows: rows[0], "image has 3, audio has 16"),
        (lambda rows: rows[:2], "image has 3, audio has 2"),
    ],
)
def test_bad_rows_are_not_added(change, spoil, told, build, items):
    index = build(rows=20)
    with pytest.raises(ValueError, match=told):
        getattr(index, change)({"image": items["image"][:3], "audio": spoil(items["audio"][:3])}, ids=[20, 21, 22])
    assert len(index) == 20


def test_nothing_may_be_added_also_after_loading(build, items, tmp_path):
    index = build(rows=20, metadata={"year": [2000] * 20})
    index.save(tmp_path / "index")
    for each in (index, TupleIndex.load(tmp_path / "index"), TupleIndex.load(tmp_path / "index", memory_map=True)):
        each.add(take(items, slice(0, 0)))
        each.upsert(take(items, slice(0, 0)), ids=[], metadata={"year": []})
        each.remove([])
        assert each.get([]) == []
        assert each.vectors([]).shape == (0, each.info()["width"])
        assert len(each) == 20


def test_ids_up_to_the_largest_are_exact(build, items, tmp_path):
    """A float64 on the way would round them."""
    ids = [2**53 + 1, 2**63 - 1, 2**53, 0, 2**62 + 1]
    index = build(rows=5, ids=np.array(ids, np.uint64))
    index.remove(2**53)
    index.add(take(items, [7]), ids=[2**53 - 1])
    index.save(tmp_path / "index")
    there = [2**53 + 1, 2**63 - 1, 0, 2**62 + 1, 2**53 - 1]
    for each in (index, TupleIndex.load(tmp_path / "index")):
        assert each.ids().tolist() == there
        assert [key in each for key in (2**53, 2**63, 2**64, -1, 0, 2**62)] == [False] * 4 + [True, False]
        with pytest.raises(KeyError, match=str(2**63)):
            each.remove(2**63)


def test_the_order_of_items_is_that_of_storing_also_after_loading(build, items, queries, tmp_path):
    """Of ids that are in no order, and with equal scores among them."""
    index = build(rows=1, ids=[70])
    for key in (3, 50, 8, 61, 40):
        index.add(take(items, [0]), ids=[key])
    index.remove(50)
    for _ in range(2):
        index.save(tmp_path / "index")
        loaded = TupleIndex.load(tmp_path / "index")
        for each in (index, loaded):
            assert each.ids().tolist() == [70, 3, 8, 61, 40]
        hits, again = (each.search({"text": queries}, k=6) for each in (index, loaded))
        np.testing.assert_array_equal(hits.ids, again.ids)
        assert [sorted(row) for row in hits.ids.tolist()] == [[-1, 3, 8, 40, 61, 70]] * 25
        index.compact()


@pytest.mark.parametrize("named", [False, True])
def test_one_id_and_several_mean_the_same(named, build):
    ids = [f"item {i}" for i in range(9)] if named else list(range(9))
    index = build(rows=9, ids=ids, metadata={"row": list(range(9))})
    assert index.get(ids[4]) == {"row": 4}
    assert index.get([ids[4]]) == [{"row": 4}]
    for several in ([ids[7], ids[2], ids[7]], (ids[7], ids[2], ids[7]), np.array([ids[7], ids[2], ids[7]])):
        assert index.get(several) == [{"row": 7}, {"row": 2}, {"row": 7}]
    np.testing.assert_array_equal(index.vectors(ids[3]), index.vectors(ids)[3:4])
    index.remove([ids[1], ids[1]])
    index.remove(ids[5])
    assert [key in index for key in ids] == [True, False, True, True, True, False, True, True, True]


@pytest.mark.parametrize("collect", [set, iter, dict.fromkeys, pa.array, torch.tensor, list, np.asarray])
def test_several_ids_may_be_in_any_collection(collect, build):
    index = build(rows=9)
    index.remove(collect([3, 1]))
    assert index.ids().tolist() == [0, 2, 4, 5, 6, 7, 8]


@pytest.mark.parametrize("given", [np.int64(3), np.array(3), torch.tensor(3)], ids=["scalar", "array", "tensor"])
def test_a_number_that_is_wrapped_is_one_id(given, build):
    index = build(rows=9, metadata={"row": list(range(9))})
    assert index.get(given) == {"row": 3}
    index.remove(given)
    assert len(index) == 8


def test_items_whose_score_is_beyond_float32_repeat_no_other(build, make_score, unit_rows):
    """FAISS leaves out what scores minus infinity; nothing may stand in its place."""
    rows = unit_rows(40, 8).numpy()
    rows[[7, 9], 0] = -1e19, 1e19
    score = SumOfPairs(("a", "b"), 8, temperature=0.05)
    for factory in ("Flat", "HNSW8", "SQ8"):
        index = TupleIndex.build(score, {"a": rows[:20]}, factory=factory)
        index.add({"a": rows[20:]})
        index.add({"a": rows[7:8]})
        index.remove([3, 30])
        hits = index.search({"b": [1e19, 1, 1, 1, 1, 1, 1, 1]}, k=41)
        ids = hits.ids[0, : hits.counts[0]].tolist()
        assert len(set(ids)) == len(ids) and 3 not in ids and 30 not in ids
        assert ids[0] == 9
        assert (hits.scores[0, hits.counts[0] :] == -np.inf).all()


def test_metadata_columns_of_lists_take_empty_ones_and_others(build, items):
    index = build(rows=2, metadata={"tags": [["new"], []], "more": [[], []]})
    index.add(take(items, [5]), metadata={"tags": [[]], "more": [["x"]]})
    assert index.get([0, 2]) == [{"tags": ["new"], "more": []}, {"tags": [], "more": ["x"]}]


def test_metadata_that_no_search_could_return_is_refused(build):
    with pytest.raises(ValueError, match="'title' of type string_view cannot be stored"):
        build(rows=2, metadata=pa.table({"title": pa.array(["a", "b"], pa.string_view())}))


def test_parameters_that_an_index_keeps_are_checked_too(build, queries):
    for factory, kept, told in (("Flat", {"efSearch": 3}, "unknown.*'efSearch'"), ("IVF4,Flat", {"nprobe": 0}, ">= 1")):
        index = build(factory=factory)
        index.search_parameters = kept
        with pytest.raises(ValueError, match=told):
            index.search({"text": queries})


def test_a_filter_that_keeps_one_in_two_hundred_is_filled_and_exact(factory, build, make_score, items, queries):
    """Also for types that FAISS cannot tell which rows to leave out."""
    index = build(factory=factory, metadata={"rare": [row % 200 == 7 for row in range(700)]})
    there = [7, 207, 407, 607]
    hits = index.search({"text": queries}, k=10, where="rare")
    assert (hits.counts == 4).all()
    assert [sorted(row) for row in hits.ids.tolist()] == [[-1] * 6 + there] * 25
    index.remove(407)
    index.add(take(items, [0, 1]), metadata={"rare": [True, None]})
    hits = index.search({"text": queries}, k=3, where="rare")
    assert all(set(row) <= {7, 207, 607, 700} and len(set(row)) == 3 for row in hits.ids.tolist())


def test_filters_see_none_nan_dates_and_every_alphabet(build, items, tmp_path):
    columns = {
        "price": [1.5, None, float("nan"), 0.0],
        "day": [datetime.date(2024, 2, 29), None, datetime.date(1969, 12, 31), datetime.date(2030, 1, 1)],
        "이름": ["고양이", "it's", None, "🙂 Straße"],
    }
    index = build(rows=4, metadata=columns)
    index.save(tmp_path / "index")
    query = {"text": items["text"][:1]}
    cases = {
        "price < 1": {3},
        "price is null": {1},
        "isnan(price)": {2},
        "day >= DATE '2000-01-01'": {0, 3},
        "day < DATE '1970-01-01'": {2},
        "이름 = '고양이'": {0},
        "이름 LIKE '%🙂%'": {3},
        "이름 = 'it''s' OR id = 0": {0, 1},
        "price > 1000": {2},  # NaN is the largest number
        "price > 1000 AND NOT isnan(price)": set(),
    }
    for each in (index, TupleIndex.load(tmp_path / "index"), TupleIndex.load(tmp_path / "index", memory_map=True)):
        for where, expected in cases.items():
            hits = each.search(query, k=9, where=where)
            assert set(hits.ids[0, : hits.counts[0]].tolist()) == expected, where
        for where in (
            ("이름 = ? AND price = ?", ["🙂 Straße", 0.0]),
            ("day = $day", {"day": datetime.date(2030, 1, 1)}),
            ("list_contains(?, id)", [np.arange(3, 5000)]),
        ):
            assert each.search(query, k=9, where=where).ids[0, :2].tolist() == [3, -1], where
        with pytest.raises(ValueError, match=r"prise.*'price', 'day', '이름'"):
            each.search(query, where="prise < 1")
