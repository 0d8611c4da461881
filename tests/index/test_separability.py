"""The number that an index returns is the model's score, for every score, split and exact type."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmcl.index import TupleIndex

SPLITS = [(m, stored) for m in (2, 3, 4) for size in range(1, m) for stored in combinations(range(m), size)]


@settings(max_examples=12)
@given(split=st.sampled_from(SPLITS), seed=st.integers(0, 50), kind=st.sampled_from(["sum_of_pairs", "hadamard"]))
def test_index_scores_are_the_scores_of_tuples(
    tmp_path_factory, make_score, unit_embeddings, brute_force, tolerance, split, seed, kind
):
    check_split(
        tmp_path_factory.mktemp("index"), (make_score, unit_embeddings, brute_force, tolerance), split, kind, seed
    )


@pytest.mark.parametrize("split", SPLITS)
def test_index_scores_are_the_scores_of_tuples_for_a_sum_in_every_split(
    tmp_path, make_score, unit_embeddings, brute_force, tolerance, split
):
    check_split(tmp_path, (make_score, unit_embeddings, brute_force, tolerance), split, "pairs_and_hadamard", 3)


def check_split(folder, tools, split, kind, seed):
    """Every exact type, before and after it was saved, against `score(x)` in float64."""
    make_score, unit_embeddings, brute_force, tolerance = tools
    modalities, stored = split
    score = make_score(kind, modalities, 12, seed=seed)
    rows = unit_embeddings(modalities, 60, 12, seed=seed)
    names = list(rows)
    items = {names[i]: rows[names[i]] * (1 + i) for i in stored}  # nothing here depends on norm 1
    queries = {name: rows[name][:7].flip(0) for name in names if name not in items}
    true, bound = brute_force(score, items, queries), tolerance(score, items, queries)
    for factory in ("Flat", "IVF4,Flat", "HNSW8"):
        index = TupleIndex.build(score, items, factory=factory)
        index.save(folder / "index")
        for each in (index, TupleIndex.load(folder / "index")):
            hits = each.search(queries, k=60)
            assert (hits.counts >= 50).all()
            for ids, scores, truth, allowed in zip(hits.ids, hits.scores, true, bound, strict=True):
                there = ids >= 0
                assert (np.abs(scores[there] - truth[ids[there]]) <= allowed[ids[there]]).all()


@pytest.mark.parametrize("queried", [("text",), ("touch",), ("text", "touch")])
def test_modalities_left_out_are_absent(forgiving_kind, queried, make_score, unit_embeddings):
    score, rows = make_score(forgiving_kind, 4, 12), unit_embeddings(4, 40, 12)
    items = {name: rows[name] for name in ("image", "audio")}
    queries = {name: rows[name] for name in queried}
    absent = [name for name in ("text", "touch") if name not in queried]
    expected = (score.query_vectors(queries, absent=absent) @ score.item_vectors(items).T).detach().numpy()
    hits = TupleIndex.build(score, items).search(queries, k=40)
    np.testing.assert_allclose(hits.scores, np.sort(expected, axis=1)[:, ::-1], rtol=1e-4, atol=1e-4)


def test_absent_modality_without_a_neutral_vector_is_named(make_score, unit_embeddings):
    rows = unit_embeddings(4, 10, 12)
    index = TupleIndex.build(make_score("hadamard", 4, 12), {"image": rows["image"]})
    with pytest.raises(KeyError, match=r"touch|audio"):
        index.search({"text": rows["text"]})


def test_an_index_keeps_the_score_it_was_built_with(make_score, unit_embeddings):
    score, rows = make_score("hadamard", 3, 12), unit_embeddings(3, 20, 12)
    index = TupleIndex.build(score, {"image": rows["image"], "audio": rows["audio"]})
    before = index.search({"text": rows["text"]}).scores
    score.weight.data.mul_(3)
    np.testing.assert_array_equal(index.search({"text": rows["text"]}).scores, before)
