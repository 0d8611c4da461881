"""k-occurrence and its skewness against counts by hand and scipy."""

import numpy as np
import pytest
import torch
from scipy.stats import skew

from mmcl.metrics import hubness_skew, k_occurrence


def test_occurrences_by_hand():
    ids = [[0, 1], [0, 2], [3, 0]]
    assert k_occurrence(ids, 5).tolist() == [3, 1, 1, 1, 0]
    assert k_occurrence(torch.tensor(ids), 4).tolist() == [3, 1, 1, 1]
    assert k_occurrence([[2, -1], [-1, -1]], 3).tolist() == [0, 0, 1], "padding is no item"


def test_skew_by_hand():
    # counts 3, 0, 0: mean 1, third moment (8 - 1 - 1) / 3 = 2, variance (4 + 1 + 1) / 3 = 2
    assert hubness_skew([[0], [0], [0]], 3) == pytest.approx(2 / 2**1.5)


def test_skew_is_zero_without_hubs_and_negative_with_rare_orphans():
    assert hubness_skew([[0], [1], [2]], 3) == 0.0
    assert hubness_skew([[0, 1], [1, 2], [2, 0]], 3) == 0.0
    assert hubness_skew([[0, 1, 2]], 4) < 0 < hubness_skew([[3]], 4)


@pytest.mark.parametrize("k", [1, 5, 20])
def test_skew_equals_scipys_biased_estimate(k):
    generator = np.random.default_rng(k)
    scores = generator.standard_normal((300, 20)) + 2 * generator.standard_normal(20)
    ids = np.argsort(-scores, axis=1)[:, :k]
    counts = [(ids == item).sum() for item in range(20)]
    assert k_occurrence(ids, 20).tolist() == counts
    expected = 0.0 if k == 20 else skew(counts)
    assert hubness_skew(ids, 20) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([[0, 1], [2, 5]], "query 1 names an item outside 0 to 4"),
        ([[-2, 1]], "query 0 names an item outside"),
        ([[0.0, 1.0]], "integers.*float64"),
        ([0, 1], r"\(2,\)"),
        (np.zeros((0, 3), int), r"not empty, got \(0, 3\)"),
        ([["a"]], "integers"),
    ],
)
def test_bad_ids_are_refused_by_query(ids, message):
    for metric in (k_occurrence, hubness_skew):
        with pytest.raises(ValueError, match=message):
            metric(ids, 5)
