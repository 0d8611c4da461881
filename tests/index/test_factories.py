"""The contract that every FAISS type keeps, and factory strings that are refused."""

import numpy as np
import pytest
import torch

from mmcl.index import TupleIndex
from mmcl.index.faiss_factory import parts
from mmcl.index.faiss_params import known_parameters
from mmcl.index.faiss_setup import load_faiss
from mmcl.scores import SumOfPairs

EXACT = {"Flat", "IVF16,Flat", "HNSW32", "IVF16,PQ8x4,RFlat"}
EFFORT = {"nprobe": 16, "efSearch": 200, "k_factor": 20.0}
NEEDS_ROWS = {
    "IVF16,Flat": 16,
    "IVF4,PQ2x8,RFlat": 256,
    "PQ8x10": 1024,
    "OPQ4,PQ4x4": 256,
    "IVF8,PQ8x4fs": 16,
    "SQ8": 1,
}


def effort(index):
    """Parameters that make every type look at nearly everything."""
    return {
        name: value for name, value in EFFORT.items() if name in known_parameters(index._tuples.snapshot.base.index)
    }


def test_ranks_close_to_brute_force_before_and_after_load(
    factory, build, make_score, items, queries, brute_force, tmp_path
):
    index = build(factory=factory)
    stored = {name: items[name] for name in ("image", "audio")}
    true = brute_force(make_score("pairs_and_hadamard", 3, 16), stored, {"text": queries})
    index.save(tmp_path / "index")
    loaded = TupleIndex.load(tmp_path / "index")
    for each in (index, loaded):
        hits = each.search({"text": queries}, k=10, **effort(index))
        best = np.sort(true, axis=1)[:, ::-1][:, :10]
        found = np.take_along_axis(true, hits.ids, axis=1)
        # the mean true score of what is found, where 0 is the average item and 1 the best possible
        quality = (found.mean() - true.mean()) / (best.mean() - true.mean())
        assert quality > (0.99 if factory in EXACT else 0.5)
        assert hits.exact is (factory in EXACT)
        assert (np.diff(hits.scores, axis=1) <= 0).all()
    again = loaded.search({"text": queries}, k=10, **effort(index))
    np.testing.assert_array_equal(again.ids, index.search({"text": queries}, k=10, **effort(index)).ids)


@pytest.mark.parametrize("factory", sorted(EXACT))
def test_exact_types_return_the_scores_of_the_model(factory, build, make_score, items, queries, brute_force, tolerance):
    score, stored = make_score("pairs_and_hadamard", 3, 16), {name: items[name] for name in ("image", "audio")}
    hits = build(factory=factory).search({"text": queries}, k=10)
    true, bound = brute_force(score, stored, {"text": queries}), tolerance(score, stored, {"text": queries})
    error = np.abs(hits.scores - np.take_along_axis(true, hits.ids, axis=1))
    assert (error <= np.take_along_axis(bound, hits.ids, axis=1)).all()


def test_longer_vector_wins_for_every_type_also_after_load(factory, tmp_path):
    """Candidates (1, 0) and (10, 0), query (1, 0): by L2 or cosine the second would not win."""
    others = np.random.default_rng(0).normal([0.2, 0.0], 0.05, (640, 2))
    rows = np.concatenate([np.tile([1.0, 0.0], (320, 1)), np.tile([10.0, 0.0], (320, 1)), others])
    factory = factory.replace("PCA12", "PCA2").replace("PQ8", "PQ2").replace("PQ4", "PQ2")
    score = SumOfPairs(("a", "b"), 2, temperature=1.0)
    index = TupleIndex.build(score, {"a": rows}, factory=factory)
    index.save(tmp_path / "index")
    for each in (index, TupleIndex.load(tmp_path / "index")):
        hits = each.search({"b": [1.0, 0.0]}, k=1, **effort(index))
        assert 320 <= hits.ids[0, 0] < 640
        assert hits.scores[0, 0] == pytest.approx(10.0, rel=0.25)


def test_every_part_of_every_index_ranks_by_inner_product(factory, build, tmp_path):
    index = build(factory=factory)
    index.save(tmp_path / "index")
    for each in (index, TupleIndex.load(tmp_path / "index")):
        metrics = [part.metric_type for part in parts(each._tuples.snapshot.base.index)]
        assert metrics == [load_faiss().METRIC_INNER_PRODUCT] * len(metrics)
    assert index.info()["metric"] == "inner product"


@pytest.mark.parametrize("memory_map", [False, True])
def test_stored_vectors_are_read_back_also_after_load(memory_map, factory, build, make_score, items, tmp_path):
    index = build(factory=factory)
    index.save(tmp_path / "index")
    loaded = TupleIndex.load(tmp_path / "index", memory_map=memory_map)
    ids = [699, 3, 3, 0]
    np.testing.assert_array_equal(loaded.vectors(ids), index.vectors(ids))
    with torch.no_grad():
        stored = {name: items[name][ids] for name in ("image", "audio")}
        true = make_score("pairs_and_hadamard", 3, 16).item_vectors(stored).numpy()
    error = np.abs(index.vectors(ids) - true).max()
    assert error == 0 if factory in EXACT else error < 1.5


def test_asking_for_every_item_returns_each_once(factory, build, queries):
    hits = build(factory=factory).search({"text": queries}, k=705)
    for row, count in zip(hits.ids, hits.counts, strict=True):
        assert len(set(row[:count])) == count
        assert (row[:count] >= 0).all()
        assert (row[count:] == -1).all()
    assert (hits.counts == 700).all()  # also those rows of a graph that no path reaches
    assert (hits.scores[:, 700:] == -np.inf).all()


@pytest.mark.parametrize("factory", NEEDS_ROWS)
def test_too_few_training_rows_are_refused_with_both_numbers(factory, build):
    needed = NEEDS_ROWS[factory]
    for rows in {0, min(needed, 700) - 1}:
        with pytest.raises(ValueError, match=rf"{factory}.* {needed} .* {rows}\b"):
            build(factory=factory, rows=rows)
    if needed <= 256:
        assert len(build(factory=factory, rows=needed)) == needed


@pytest.mark.parametrize("factory", ["RQ4x8", "PCA12,Flat"])
def test_what_faiss_refuses_to_train_or_build_is_an_error_with_its_reason(factory, build):
    with pytest.raises(ValueError, match=f"{factory}.*5 items"):
        build(factory=factory, rows=5)


@pytest.mark.parametrize("factory", ["Flat", "HNSW32", "SQfp16", "auto"])
@pytest.mark.parametrize("names", [None, []])
def test_empty_index_answers_with_padding(factory, names, build, queries, tmp_path):
    index = build(factory=factory, rows=0, ids=names)
    index.save(tmp_path / "index")
    for each in (index, TupleIndex.load(tmp_path / "index")):
        hits = each.search({"text": queries}, k=7)
        assert hits.ids.shape == hits.scores.shape == (25, 7)
        assert (hits.ids == -1).all()
        assert (hits.scores == -np.inf).all()
        assert (hits.counts == 0).all()
        assert [list(row) for row in hits] == [[]] * 25
        assert hits.metadata == [[]] * 25
        assert len(each) == 0


@pytest.mark.parametrize("factory", ["PQ16x4", "IVF8,PQ7x4", "OPQ5,PQ5x4", "OPQ12,IVF4,PQ12x4,RFlat", "PQ16x4fs"])
def test_width_is_padded_to_what_the_type_needs(factory, build, queries, tmp_path):
    index = build("sum_of_pairs", factory=factory)  # width 18
    info = index.info()
    assert info["width"] == 18
    assert info["padded_width"] > 18
    index.save(tmp_path / "index")
    np.testing.assert_array_equal(
        index.search({"text": queries}).ids, TupleIndex.load(tmp_path / "index").search({"text": queries}).ids
    )


@pytest.mark.parametrize(
    ("factory", "told"),
    [
        ("L2norm,Flat", "norm"),
        ("IVF16,L2norm,Flat", "norm"),
        ("NSG32", "added"),
        ("IVF16,RQ4x4fs", "no nprobe"),
        ("IDMap,Flat", "ids"),
        ("Flat,IDMap2", "ids"),
        ("ITQ16,Flat", "norm"),
        ("PCAW8,Flat", "inner product"),
        ("SQ8_direct", "whole number"),
        ("HNSW32,PQ6", "another metric"),
        ("LSH", "LSH"),
        ("Nonsense", "Nonsense"),
        ("", "''"),
        ("IVF16", "IVF16"),
        ("IVF0,Flat", "0 of something"),
        ("IVF99999999999,Flat", "IVF99999999999"),
        ("OPQ99999,Flat", "OPQ99999"),
        ("색인", "색인"),
        (None, "None"),
        (5, "5"),
    ],
)
def test_factory_strings_that_break_the_score_or_mean_nothing_are_refused(factory, told, build):
    with pytest.raises(ValueError, match=told) as error:
        build(factory=factory)
    assert repr(factory) in str(error.value)


def test_auto_is_flat(build):
    assert build().info()["factory"] == "Flat"


@pytest.mark.parametrize("factory", ["SQfp16", "HNSW16,SQfp16", "IVF4,SQfp16"])
def test_values_beyond_float16_are_refused_with_their_row(factory):
    rows = torch.eye(8).repeat(10, 1)
    rows[43] *= 1e5
    score = SumOfPairs(("a", "b"), 8)
    with pytest.raises(ValueError, match=r"row 43.*100000"):
        TupleIndex.build(score, {"a": rows}, factory=factory)
    rows[43] /= 10
    assert np.isfinite(TupleIndex.build(score, {"a": rows}, factory=factory).search({"b": rows[43]}).scores).all()


def test_probing_too_few_lists_is_made_up_for(build, queries):
    index = build(factory="IVF64,Flat")
    for k in (50, 300, 700):
        hits = index.search({"text": queries}, k=k, nprobe=1)
        assert (hits.counts == k).all()
    few = index.search({"text": queries}, k=1, nprobe=1)
    assert (few.counts == 1).all()


def test_filled_queries_are_not_searched_again(build, queries):
    """Doubling touches only the under-filled rows: the others keep the answer of the effort that was asked for."""
    index = build(factory="IVF64,Flat")
    k = 12
    alone = [
        index._tuples.snapshot.base.index.search(index._fusion.queries({"text": q}, None, None), k)[1][0]
        for q in queries
    ]
    filled = [number for number, rows in enumerate(alone) if (rows >= 0).all()]
    assert 0 < len(filled) < 25
    hits = index.search({"text": queries}, k=k, nprobe=1)
    np.testing.assert_array_equal(hits.ids[filled], np.stack(alone)[filled])


def test_more_effort_finds_more(build, queries, make_score, items, brute_force):
    true = brute_force(
        make_score("pairs_and_hadamard", 3, 16), {n: items[n] for n in ("image", "audio")}, {"text": queries}
    )
    best = np.argsort(-true, axis=1)[:, :10]
    index = build(factory="IVF32,PQ8x4,RFlat")

    def recall(**parameters):
        ids = index.search({"text": queries}, k=10, **parameters).ids
        return np.mean([len(set(a) & set(b)) / 10 for a, b in zip(ids, best, strict=True)])

    assert recall(nprobe=1) < recall(nprobe=32) < recall(nprobe=32, k_factor=70)
    assert recall(nprobe=32, k_factor=70) == 1


@pytest.mark.parametrize(
    ("factory", "parameters", "told"),
    [
        ("Flat", {"nprobe": 3}, "none"),
        ("IVF4,Flat", {"efSearch": 3}, "nprobe"),
        ("HNSW16", {"nprobe": 3}, "efSearch"),
        ("IVF4,PQ4x4,RFlat", {"probes": 3}, "k_factor.*nprobe"),
        ("IVF4_HNSW8,Flat", {"efsearch": 3}, "quantizer_efSearch"),
        ("IVF4,Flat", {"nprobe": 0}, "nprobe.*0"),
        ("IVF4,Flat", {"nprobe": True}, "nprobe.*True"),
        ("IVF4,Flat", {"nprobe": 2.5}, "nprobe.*2.5"),
        ("IVF4,Flat", {"nprobe": "2"}, "nprobe.*'2'"),
        ("IVF4,PQ4x4,RFlat", {"k_factor": float("nan")}, "k_factor.*nan"),
    ],
)
def test_unknown_and_senseless_parameters_are_refused(factory, parameters, told, build, queries):
    with pytest.raises(ValueError, match=told):
        build(factory=factory).search({"text": queries}, **parameters)


def test_parameters_beyond_what_exists_mean_everything(build, queries):
    for factory, parameters in (("IVF16,Flat", {"nprobe": 10**30}), ("HNSW32", {"efSearch": 10**30})):
        exact = build().search({"text": queries})
        np.testing.assert_array_equal(build(factory=factory).search({"text": queries}, **parameters).ids, exact.ids)
    nested = build(factory="IVF16_HNSW16,PQ4x4,RFlat")
    hits = nested.search({"text": queries}, nprobe=16, quantizer_efSearch=64, k_factor=1e9)
    np.testing.assert_array_equal(hits.ids, exact.ids)
