"""Retrieval metrics against hand-counted ranks, a plain loop, and scikit-learn."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from sklearn.metrics import ndcg_score

from mmcl.metrics import (
    best_ranks,
    mean_reciprocal_rank,
    median_rank,
    mrr_from_hits,
    ndcg_at_k,
    recall_at_k,
    recall_from_hits,
    retrieval_report,
)

# Ranks by hand: 1 (the .9), 3 (the .2 of .5, .3, .2), 2 (.6 beats the other right item; .8 is wrong).
SCORES = np.array([[0.9, 0.1, 0.3, 0.2], [0.5, 0.3, 0.1, 0.2], [0.8, 0.6, 0.4, 0.1]])
RELEVANT = np.array([[1, 0, 0, 0], [0, 0, 0, 1], [0, 1, 1, 0]], dtype=bool)


def test_hand_counted_ranks():
    assert best_ranks(SCORES, RELEVANT).tolist() == [1, 3, 2]
    assert [recall_at_k(SCORES, RELEVANT, k) for k in (1, 2, 3, 9)] == pytest.approx([1 / 3, 2 / 3, 1, 1])
    assert mean_reciprocal_rank(SCORES, RELEVANT) == pytest.approx((1 + 1 / 3 + 1 / 2) / 3)
    assert median_rank(SCORES, RELEVANT) == 2.0
    assert median_rank(SCORES[:2], RELEVANT[:2]) == 2.0, "the median of an even number lies between"


def test_report_holds_every_metric():
    report = retrieval_report(SCORES, RELEVANT, ks=(1, 3))
    assert report == pytest.approx(
        {"recall_at_1": 1 / 3, "recall_at_3": 1.0, "mrr": 11 / 18, "median_rank": 2.0, "queries": 3, "items": 4}
    )


def test_indices_mean_one_right_item_a_query():
    answers = np.array([0, 3, 1])
    one_hot = answers[:, None] == np.arange(4)
    assert best_ranks(SCORES, answers).tolist() == best_ranks(SCORES, one_hot).tolist() == [1, 3, 2]
    assert best_ranks(SCORES, torch.tensor([0, 3, 1])).tolist() == [1, 3, 2]
    assert best_ranks(SCORES, torch.tensor([0, 3, 1], dtype=torch.int16)).tolist() == [1, 3, 2]


def test_other_right_items_do_not_push_the_rank_down():
    assert best_ranks([[3.0, 2.0, 1.0]], [[True, True, False]]).tolist() == [1]
    assert best_ranks([[1.0, 1.0, 0.0]], [[True, True, False]]).tolist() == [1], "nor by a tie"


@pytest.mark.parametrize("items", [2, 7])
def test_constant_scores_get_the_worst_rank(items):
    scores, answers = np.zeros((items, items)), np.arange(items)
    assert best_ranks(scores, answers).tolist() == [items] * items
    assert recall_at_k(scores, answers, items - 1) == 0.0
    assert mean_reciprocal_rank(scores, answers) == pytest.approx(1 / items)
    assert best_ranks([[-np.inf] * 3], [1]).tolist() == [3], "also where every item is padding"


def test_ties_count_against_the_query():
    assert best_ranks([[0.5, 0.5, 0.1, 0.9]], [0]).tolist() == [3]


@given(
    arrays(np.int64, (5, 6), elements=st.integers(-2, 2)),
    arrays(np.bool_, (5, 6)).filter(lambda mask: mask.any(axis=1).all()),
)
def test_ranks_equal_a_plain_loop(scores, relevant):
    expected = []
    for row, right in zip(scores.tolist(), relevant.tolist(), strict=True):
        order = sorted(range(6), key=lambda i: (-row[i], right[i]))
        expected.append(1 + next(place for place, i in enumerate(order) if right[i]))
    assert best_ranks(scores, relevant).tolist() == expected
    shuffled = np.random.default_rng(0).permutation(6)
    assert best_ranks(scores[:, shuffled], relevant[:, shuffled]).tolist() == expected, "item order is irrelevant"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_torch_and_numpy_agree(dtype):
    scores = torch.tensor(SCORES).to(dtype).requires_grad_()
    assert retrieval_report(scores, torch.tensor(RELEVANT)) == retrieval_report(scores.detach().double(), RELEVANT)


def test_inputs_are_left_alone():
    scores, relevant = np.asfortranarray(SCORES), RELEVANT.copy()
    for array in (scores, relevant):
        array.flags.writeable = False
    assert retrieval_report(scores[::-1], relevant[::-1]) == retrieval_report(SCORES, RELEVANT)
    assert ndcg_at_k(scores, relevant.astype(">f4"), 2) == ndcg_at_k(SCORES, RELEVANT, 2)


def test_ndcg_by_hand():
    scores, gains = [[3.0, 2.0, 1.0]], [[0, 3, 1]]
    found = 3 / math.log2(3) + 1 / math.log2(4)
    best = 3 + 1 / math.log2(3)
    assert ndcg_at_k(scores, gains, 3) == pytest.approx(found / best)
    assert ndcg_at_k(scores, gains, 2) == pytest.approx(3 / math.log2(3) / best)
    assert ndcg_at_k(scores, gains, 1) == 0.0
    assert ndcg_at_k(gains, gains, 3) == 1.0


@pytest.mark.parametrize("k", [1, 3, 10, 50])
def test_ndcg_equals_sklearn_without_ties(k):
    generator = np.random.default_rng(k)
    scores = generator.permuted(np.tile(np.arange(20.0), (15, 1)), axis=1)
    gains = generator.integers(0, 4, size=(15, 20))
    gains[:, 0] = 1
    assert ndcg_at_k(scores, gains, k) == pytest.approx(ndcg_score(gains, scores, k=k))


def test_ndcg_orders_ties_from_the_lowest_gain():
    gains = [[2, 0, 1]]
    worst = (1 / math.log2(3) + 2 / math.log2(4)) / (2 + 1 / math.log2(3))
    assert ndcg_at_k([[0.0, 0.0, 0.0]], gains, 3) == pytest.approx(worst)
    assert ndcg_at_k([[0.0, 0.0, 0.0]], gains, 1) == 0.0


def test_ranked_lists_give_the_same_recall_and_mrr():
    generator = np.random.default_rng(1)
    scores, answers = generator.standard_normal((30, 12)), generator.integers(0, 12, 30)
    found = np.argsort(-scores, axis=1) == answers[:, None]
    for k in (1, 4, 12):
        assert recall_from_hits(found, k) == recall_at_k(scores, answers, k)
    assert mrr_from_hits(torch.tensor(found), 12) == pytest.approx(mean_reciprocal_rank(scores, answers))


def test_ranked_lists_by_hand():
    found = [[False, True, False], [False, False, False], [True, True, False], [False, False, True]]
    assert [recall_from_hits(found, k) for k in (1, 2, 3)] == [0.25, 0.5, 0.75]
    assert [mrr_from_hits(found, k) for k in (1, 2, 3)] == pytest.approx([0.25, 0.375, (0.5 + 1 + 1 / 3) / 4])


BAD_ROW = np.array([[1.0, 2.0], [1.0, np.nan]])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: recall_at_k(SCORES, np.zeros((3, 4), bool), 1), "query 0 has no relevant item"),
        (lambda: recall_at_k(SCORES, RELEVANT & np.array([[True], [False], [True]]), 1), "query 1 has no relevant"),
        (lambda: median_rank(BAD_ROW, [0, 1]), "row 1 holds NaN"),
        (lambda: ndcg_at_k(BAD_ROW, [[1, 0], [1, 0]], 1), "row 1 holds NaN"),
        (lambda: mean_reciprocal_rank(SCORES, RELEVANT[:2]), r"\(3, 4\).*\(2, 4\)"),
        (lambda: mean_reciprocal_rank(SCORES, RELEVANT.astype(int)), "bool"),
        (lambda: mean_reciprocal_rank(SCORES, [0, 4, 1]), "row 1 names an item outside 0 to 3"),
        (lambda: mean_reciprocal_rank(SCORES, [0, 1, -1]), "row 2 names an item outside"),
        (lambda: mean_reciprocal_rank(SCORES, [0, 1]), r"\(3, 4\).*\(2,\)"),
        (lambda: mean_reciprocal_rank(SCORES[0], [0]), r"\(4,\)"),
        (lambda: mean_reciprocal_rank(SCORES[:0], RELEVANT[:0]), "not empty"),
        (lambda: mean_reciprocal_rank([["a"]], [0]), "numbers"),
        (lambda: ndcg_at_k(SCORES, np.zeros((3, 4)), 2), "query 0 has no relevant item"),
        (lambda: ndcg_at_k(SCORES, -SCORES, 2), "row 0 holds a negative"),
        (lambda: ndcg_at_k(SCORES, np.where(SCORES == 0.4, np.inf, SCORES), 2), "row 2 holds"),
        (lambda: ndcg_at_k(SCORES, SCORES.T, 2), r"\(3, 4\).*\(4, 3\)"),
        (lambda: recall_from_hits(RELEVANT, 5), "depth of 4"),
        (lambda: recall_from_hits(RELEVANT.astype(float), 1), "bool"),
        (lambda: mrr_from_hits(RELEVANT[0], 1), "bool"),
    ],
)
def test_bad_input_is_refused_by_name(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("k", [0, -1, 1.5, True, "1", None])
def test_k_must_be_a_positive_integer(k):
    for metric, second in ((recall_at_k, RELEVANT), (ndcg_at_k, RELEVANT)):
        with pytest.raises(ValueError, match="k must be an integer"):
            metric(SCORES, second, k)
    with pytest.raises(ValueError, match="k must be an integer"):
        recall_from_hits(RELEVANT, k)
    with pytest.raises(ValueError, match="k must be an integer"):
        retrieval_report(SCORES, RELEVANT, ks=(1, k))
