"""Codes in place of vectors: what they hold, how they age, and how they are ranked anew."""

import numpy as np
import pytest

from mmcl.index import TupleIndex
from mmcl.scores import SumOfPairs


@pytest.mark.parametrize("factory", ["SQ8", "IVF4,SQ8", "HNSW16,SQ8", "SQ4"])
def test_the_one_long_vector_among_many_is_not_clipped(factory, unit_rows):
    rows = unit_rows(300, 16).numpy()
    rows[211] *= 50
    index = TupleIndex.build(SumOfPairs(("a", "b"), 16, temperature=1.0), {"a": rows}, factory=factory)
    step = np.ptp(rows) / (15 if factory == "SQ4" else 255)
    np.testing.assert_allclose(index.vectors(range(300))[:, :16], rows, atol=1.01 * step)
    assert index.search({"b": rows[211]}, k=1).ids.tolist() == [[211]]


def test_codes_that_are_made_anew_for_ever_longer_items_stay_accurate(unit_rows):
    """Each time costs half a step; so the range is widened by more than the item at hand needs."""
    rows = unit_rows(100, 16).numpy()
    longer = [rows[:2] * 1.01**turn for turn in range(1, 101)]
    score = SumOfPairs(("a", "b"), 16, temperature=1.0)
    index = TupleIndex.build(score, {"a": rows}, factory="SQ8")
    for more in longer:
        index.add({"a": more})
        index.compact()
    at_once = TupleIndex.build(score, {"a": np.concatenate([rows, *longer])}, factory="SQ8")
    errors = [np.square(each.vectors(range(100))[:, :16] - rows).mean() ** 0.5 for each in (index, at_once)]
    assert errors[0] < 4 * errors[1]


@pytest.mark.parametrize("k", range(1, 28))
def test_re_ranking_all_codes_is_exact(k, unit_rows):
    """k times a factor, in FAISS's float32, may fall one short of all."""
    score, rows, queries = (
        SumOfPairs(("a", "b"), 4, temperature=1.0),
        unit_rows(27, 4).numpy(),
        unit_rows(20, 4, seed=1),
    )
    index = TupleIndex.build(score, {"a": rows}, factory="PQ2x1,RFlat")
    hits = index.search({"b": queries}, k=k, k_factor=1e6)
    np.testing.assert_allclose(hits.scores, -np.sort(-queries.numpy() @ rows.T, axis=1)[:, :k], atol=1e-6)
