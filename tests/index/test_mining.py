"""Near duplicates and hard negatives, against brute force."""

import tracemalloc

import numpy as np
import pytest
import torch

from mmcl.index import TupleIndex
from mmcl.index.mining import hard_negatives, near_duplicates

STORED = ("image", "audio")


@pytest.fixture(scope="module")
def alike(items):
    """200 items: 100 of them near others, at every distance, and of very different lengths."""
    generator = np.random.default_rng(0)
    found, originals = {}, generator.integers(0, 30, 100)
    for name in STORED:
        rows = items[name][:200].astype(np.float64)
        noise = generator.normal(size=(100, 16)) * np.linspace(0, 0.3, 100)[:, None]
        rows[100:] = rows[originals] + noise
        found[name] = (rows * np.exp(generator.normal(size=(200, 1)))).astype(np.float32)
    return found


def true_pairs(vectors, threshold):
    """{(i, j): cosine} of all rows i < j, in float64 and then rounded."""
    vectors = vectors.astype(np.float64)
    found = {}
    for i, row in enumerate(vectors):
        lengths = np.linalg.norm(row) * np.linalg.norm(vectors, axis=1)
        similarities = np.where(lengths > 0, vectors @ row / np.where(lengths > 0, lengths, 1), 0).astype(np.float32)
        found |= {
            (i, j): similarities[j] for j in range(i + 1, len(vectors)) if similarities[j] >= np.float32(threshold)
        }
    return found


def check_pairs(pairs, expected, names=None):
    """The very pairs, each once, best first."""
    named = {(names[i], names[j]) if names else (i, j): value for (i, j), value in expected.items()}
    assert len(pairs) == len(named) == len(pairs.ids)
    assert {(a, b) for a, b, _ in pairs} == set(named)
    np.testing.assert_allclose(pairs.similarities, [named[a, b] for a, b, _ in pairs], atol=1e-6)
    assert (np.diff(pairs.similarities) <= 0).all()


@pytest.mark.parametrize("threshold", [1, 0.95, 0.5, 0, -1])
def test_every_pair_that_is_alike_is_found_once(threshold, make_score, alike):
    index = TupleIndex.build(make_score("hadamard", 3, 16), alike)
    expected = true_pairs(index.score.item_vectors(alike).detach().numpy(), threshold)
    assert len(expected) > (20 if threshold < 1 else -1)
    check_pairs(near_duplicates(index, threshold), expected)


def test_item_vectors_of_every_score_are_compared(kind, make_score, alike):
    index = TupleIndex.build(make_score(kind, 3, 16), alike)
    check_pairs(near_duplicates(index), true_pairs(index.score.item_vectors(alike).detach().numpy(), 0.95))


@pytest.mark.parametrize("batch_size", [7, 64, 199, 200, np.int64(5000)])
def test_blocks_change_nothing(batch_size, make_score, alike):
    index = TupleIndex.build(make_score("hadamard", 3, 16), alike)
    whole, blocks = near_duplicates(index, 0.6), near_duplicates(index, 0.6, batch_size=batch_size)
    np.testing.assert_array_equal(whole.ids, blocks.ids)
    np.testing.assert_array_equal(whole.similarities, blocks.similarities)


def test_every_copy_is_found_however_many_there_are(make_score, items):
    rows = {name: np.concatenate([items[name][:50], np.repeat(items[name][3:4], 80, axis=0)]) for name in STORED}
    rows["image"][60:90] *= np.linspace(0.01, 50, 30, dtype=np.float32)[:, None]  # other lengths, the same direction
    pairs = near_duplicates(TupleIndex.build(make_score("hadamard", 3, 16), rows), 1.0, batch_size=32)
    copies = [3, *range(50, 130)]
    assert {(a, b) for a, b, _ in pairs} == {(a, b) for a in copies for b in copies if a < b}
    assert (pairs.similarities == 1).all()


def test_the_inner_product_would_not_have_found_them(make_score, alike):
    """What the search ranks first is the longest, not the most alike."""
    index = TupleIndex.build(make_score("hadamard", 3, 16), alike)
    vectors = index._tuples.vectors(list(range(200)))
    products = vectors @ vectors.T
    assert (products.argmax(axis=1) == np.arange(200)).mean() < 0.5
    partner = {a: b for a, b, similarity in near_duplicates(index, 0.99)}
    assert len(partner) > 10


def test_vectors_of_zeros_are_like_nothing(make_score):
    eye = np.eye(16, dtype=np.float32)
    rows = {"image": eye[[0, 0, 1, 2, 0]], "audio": eye[[1, 1, 1, 1, 0]]}  # products: 0, 0, e1, 0, e0
    index = TupleIndex.build(make_score("hadamard", 3, 16), rows)
    assert len(near_duplicates(index, 1e-6)) == 0
    assert len(near_duplicates(index, 0)) == 10
    assert (near_duplicates(index, -1).similarities == 0).all()


@pytest.mark.parametrize("scale", [1e-15, 1e9])
def test_lengths_beyond_what_float32_squares_hold(scale, make_score, items):
    """The item vectors, products of two, are about `scale` squared."""
    rows = items["image"][:40].copy()
    rows[20:] = rows[:20] + 0.05 * rows[10:30]
    score, pairs = make_score("hadamard", 3, 16), []
    for size in (1, scale):
        index = TupleIndex.build(score, {"image": rows * size, "audio": np.full_like(rows, size)})
        pairs.append(near_duplicates(index, 0.9))
    assert len(pairs[0]) >= 20
    assert {tuple(each) for each in pairs[0].ids} == {tuple(each) for each in pairs[1].ids}
    np.testing.assert_allclose(pairs[0].similarities, pairs[1].similarities, rtol=1e-6)


@pytest.mark.parametrize("count", [0, 1])
def test_no_pair_without_two_items(count, make_score, items):
    index = TupleIndex.build(make_score("sum_of_pairs", 3, 16), {"image": items["image"][:count]})
    pairs = near_duplicates(index, -1)
    assert pairs.ids.shape == (0, 2)
    assert list(pairs) == []


@pytest.mark.parametrize("factory", ["SQ8", "PQ8x4", "IVF4,Flat", "HNSW8", "IVF4,PQ8x4,RFlat", "MIPS,IVF4,Flat"])
def test_the_vectors_are_those_that_the_type_stores(factory, make_score, alike):
    index = TupleIndex.build(make_score("sum_of_pairs", 3, 16), alike, factory=factory)
    expected = true_pairs(index._tuples.vectors(list(range(200))), 0.9)
    check_pairs(near_duplicates(index, 0.9), expected)
    assert len(expected) > 20


def test_only_what_is_there_now_counts(make_score, alike):
    names = [f"item {i}" for i in range(200)]
    index = TupleIndex.build(make_score("pairs_and_hadamard", 3, 16), alike, ids=names)
    index.remove(names[:20])
    index.upsert({name: rows[[100, 101]] for name, rows in alike.items()}, ids=["item 30", "new"])
    there = [*names[20:30], *names[31:], "item 30", "new"]
    rows = [*range(20, 30), *range(31, 200), 100, 101]
    vectors = index.score.item_vectors({name: each[rows] for name, each in alike.items()}).detach().numpy()
    expected = true_pairs(vectors, 0.8)
    for _ in range(2):
        pairs = near_duplicates(index, 0.8)
        check_pairs(pairs, expected, there)
        assert ("item 100", "item 30") in {(a, b) for a, b, _ in pairs}
        index.compact()


def test_a_bank_makes_no_difference(make_score, alike, queries):
    score = make_score("pairs_and_hadamard", 3, 16)
    plain, banked = (TupleIndex.build(score, alike, bank=bank) for bank in (None, {"text": queries}))
    np.testing.assert_array_equal(near_duplicates(plain, 0.8).ids, near_duplicates(banked, 0.8).ids)


def test_no_matrix_of_all_by_all(make_score, unit_rows):
    index = TupleIndex.build(make_score("hadamard", 2, 8), {"image": unit_rows(3000, 8)})
    tracemalloc.start()
    near_duplicates(index, 0.999, batch_size=200)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 3000 * 3000 / 4  # bytes


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"threshold": 1.01}, "between -1 and 1, got 1.01"),
        ({"threshold": float("nan")}, "nan"),
        ({"threshold": True}, "True"),
        ({"threshold": "high"}, "high"),
        ({"batch_size": 0}, "batch_size must be an integer >= 1"),
        ({"batch_size": 2.5}, "2.5"),
    ],
)
def test_senseless_thresholds_are_refused(options, told, make_score, alike):
    with pytest.raises(ValueError, match=told):
        near_duplicates(TupleIndex.build(make_score("hadamard", 3, 16), alike), **options)


@pytest.fixture(scope="module")
def index(make_score, items):
    return TupleIndex.build(make_score("pairs_and_hadamard", 3, 16), {name: items[name][:300] for name in STORED})


@pytest.fixture(scope="module")
def truth(brute_force, make_score, items, queries):
    """(25, 300) scores in float64."""
    rows = {name: items[name][:300] for name in STORED}
    return brute_force(make_score("pairs_and_hadamard", 3, 16), rows, {"text": queries})


def true_negatives(scores, positives, k, margin=None, relative_margin=None, skip=0, range_max=100):
    """Ids for one query, from the definition."""
    bar = min(scores[each] for each in positives)
    rest = [each for each in np.argsort(-scores) if each not in positives][:range_max]
    if margin is not None:
        rest = [each for each in rest if scores[each] < bar - margin]
    if relative_margin is not None:
        rest = [each for each in rest if scores[each] < bar - relative_margin * abs(bar)]
    return rest[skip : skip + k]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"margin": 0},
        {"margin": 0.5},
        {"relative_margin": 0.05},
        {"relative_margin": np.float32(0.4), "margin": 0.1},
        {"skip": 3},
        {"skip": 2, "margin": 0.2, "range_max": 12},
        {"range_max": 300, "margin": 1.0},
        {"range_max": 100000, "k": 400},
    ],
)
def test_negatives_are_the_best_that_are_let_through(options, index, truth, queries):
    generator = np.random.default_rng(1)
    ranks = np.argsort(-truth, axis=1)
    positives = [ranks[row, generator.integers(0, 40, 1 + row % 3)].tolist() for row in range(25)]
    positives[5], positives[6] = [int(ranks[5, -1])], [int(ranks[6, 0])]  # negative score; the very best
    assert truth[5, positives[5][0]] < 0
    options = {"k": 10} | options
    hits = hard_negatives(index, {"text": queries}, positives, **options)
    assert hits.ids.shape == hits.scores.shape == (25, options["k"])
    assert hits.exact and hits.kind == "score"
    for row in range(25):
        expected = true_negatives(truth[row], set(positives[row]), **options)
        count = hits.counts[row]
        assert hits.ids[row, :count].tolist() == expected
        np.testing.assert_allclose(hits.scores[row, :count], truth[row, expected], rtol=1e-4, atol=1e-4)
        assert (hits.ids[row, count:] == -1).all()
        assert (hits.scores[row, count:] == -np.inf).all()


def test_copies_of_the_positive_are_left_out_by_any_margin(make_score, items, queries):
    rows = {name: np.concatenate([items[name][:40], items[name][[7, 7, 7]]]) for name in STORED}
    index = TupleIndex.build(make_score("sum_of_pairs", 3, 16), rows)
    positives = [7] * 25
    plain = hard_negatives(index, {"text": queries}, positives, k=42)
    assert all({40, 41, 42} <= set(row.tolist()) for row in plain.ids)
    for margin in ({"margin": 0}, {"relative_margin": 0.0}):
        hits = hard_negatives(index, {"text": queries}, positives, k=42, **margin)
        assert not {7, 40, 41, 42} & set(hits.ids.ravel().tolist())


def test_blocks_of_queries_add_up(index, queries, monkeypatch):
    positives = list(range(25))
    whole = hard_negatives(index, {"text": queries}, positives, margin=0.1)
    monkeypatch.setattr("mmcl.index.mining.QUERIES", 4)
    blocks = hard_negatives(index, {"text": queries}, positives, margin=0.1)
    np.testing.assert_array_equal(whole.ids, blocks.ids)
    np.testing.assert_array_equal(whole.scores, blocks.scores)


@pytest.mark.parametrize("factory", ["SQ8", "IVF8,PQ8x4", "HNSW16"])
def test_scores_are_those_of_the_stored_vectors(factory, make_score, items, queries):
    rows = {name: items[name][:300] for name in STORED}
    index = TupleIndex.build(make_score("hadamard", 3, 16), rows, factory=factory)
    effort = {"nprobe": 8} if "IVF" in factory else {}
    hits = hard_negatives(index, {"text": queries}, list(range(25)), margin=0.05, range_max=200, **effort)
    asked = index.score.query_vectors({"text": queries}).detach().numpy().astype(np.float64)
    scores = asked @ index._tuples.vectors(list(range(300))).astype(np.float64).T
    for row in range(25):
        good = hits.ids[row, : hits.counts[row]]
        np.testing.assert_allclose(hits.scores[row, : len(good)], scores[row, good], rtol=1e-6)
        assert (hits.scores[row, : len(good)] < scores[row, row] - 0.05).all()
        assert (np.diff(hits.scores[row, : len(good)]) <= 0).all()
    assert hits.exact == (factory == "HNSW16")


def test_positives_come_in_many_forms(index, queries):
    expected = hard_negatives(index, {"text": queries[:3]}, [[4], [5], [6]]).ids
    for form in (
        [4, 5, 6],
        np.array([4, 5, 6]),
        torch.tensor([[4], [5], [6]]),
        ([4, 4], {5}, np.array([6])),
        (4, 5, 6),
    ):
        np.testing.assert_array_equal(hard_negatives(index, {"text": queries[:3]}, form).ids, expected)
    one = hard_negatives(index, {"text": queries[0]}, 4)
    np.testing.assert_array_equal(one.ids, expected[:1])


def test_named_items_bring_their_metadata(make_score, items, queries):
    names = [f"셋 {i}" for i in range(30)]
    rows = {name: items[name][:30] for name in STORED}
    score = make_score("sum_of_pairs", 3, 16)
    index = TupleIndex.build(score, rows, ids=names, metadata={"row": list(range(30))})
    index.remove(names[:5])
    hits = hard_negatives(index, {"text": queries}, [names[10 + row % 3] for row in range(25)], k=40, where="row < 20")
    for row, answer in enumerate(hits):
        there = {names[i] for i in range(5, 20)} - {names[10 + row % 3]}
        assert {key for key, _, _ in answer} == there
        assert all(names[metadata["row"]] == key for key, _, metadata in answer)
    assert hits.ids[0, -1] == ""
    single = hard_negatives(index, {"text": queries[0]}, names[10], k=40, where="row < 20")
    np.testing.assert_array_equal(single.ids, hits.ids[:1])


def test_a_bank_counts_for_positives_too(make_score, items, queries):
    rows = {name: items[name][:100] for name in STORED}
    index = TupleIndex.build(make_score("hadamard", 3, 16), rows, bank={"text": items["text"][:50]})
    every = index.search({"text": queries}, k=100)
    scores = np.empty((25, 100))
    np.put_along_axis(scores, every.ids, every.scores, axis=1)
    hits = hard_negatives(index, {"text": queries}, list(range(25)), margin=0.1, k=5)
    assert hits.kind == "pmi"
    for row in range(25):
        assert hits.ids[row, : hits.counts[row]].tolist() == true_negatives(scores[row], {row}, 5, margin=0.1)


def test_no_query_has_no_negatives(index, queries):
    hits = hard_negatives(index, {"text": queries[:0]}, [], k=3)
    assert hits.ids.shape == (0, 3)
    assert list(hits) == []


@pytest.mark.parametrize(
    ("positives", "options", "error", "told"),
    [
        ([1, 2], {}, ValueError, "3 queries need the positives of 3, got 2"),
        ([1, 2, 999], {}, KeyError, "query row 2: no item 999"),
        ([1, [2, "two"], 3], {}, KeyError, "query row 1: no item 'two'"),
        ([1, None, 3], {}, KeyError, "query row 1: no item None"),
        ([1, [], 3], {}, ValueError, "query row 1 has no positives"),
        ({0: 1, 1: 2, 2: 3}, {}, ValueError, "got a dict"),
        ([1, 2, 3], {"k": 0}, ValueError, "k must be an integer >= 1"),
        ([1, 2, 3], {"skip": -1}, ValueError, "skip must be an integer >= 0"),
        ([1, 2, 3], {"margin": -0.1}, ValueError, "margin must be a number >= 0"),
        ([1, 2, 3], {"margin": float("nan")}, ValueError, "nan"),
        ([1, 2, 3], {"relative_margin": "5%"}, ValueError, "relative_margin.*5%"),
        ([1, 2, 3], {"k": 90, "skip": 11}, ValueError, "range_max = 100 leaves no 90 items behind 11"),
        ([1, 2, 3], {"range_max": True}, ValueError, "range_max"),
        ([1, 2, 3], {"nprobe": 3}, ValueError, "nprobe"),
    ],
)
def test_senseless_requests_are_refused_by_name(positives, options, error, told, index, queries):
    with pytest.raises(error, match=told):
        hard_negatives(index, {"text": queries[:3]}, positives, **options)
