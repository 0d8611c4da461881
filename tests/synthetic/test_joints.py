"""Finite joints: published totals, exact marginals and conditionals by loops, draws that follow the table."""

import math
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch

from mmcl.metrics.expressivity import pairwise_floor
from mmcl.synthetic.joints import (
    JOINTS,
    Joint,
    coherent_pairs,
    independent,
    parity,
    planted_mixture,
    product_interaction,
    random_pairwise,
    softened_sum,
    xor_to_identity,
)

SMALL = Joint([[0.1, 0.2, 0.0], [0.3, 0.0, 0.4]], ("a", "b"))


@pytest.mark.parametrize(
    ("name", "nats"), [("softened_sum", 1.5043), ("random_tensor", 1.3249), ("random_pairwise", 1.1870)]
)
def test_total_correlations(name, nats):
    assert JOINTS[name]().total_correlation() == pytest.approx(nats, abs=5e-5)


@pytest.mark.parametrize("name", JOINTS)
@pytest.mark.parametrize("m", [2, 3, 4])
def test_every_joint_is_a_distribution_of_any_number_of_modalities(name, m):
    joint = JOINTS[name](m=m)
    assert joint.table.dtype == torch.float64 and joint.table.ndim == len(joint.modalities) == m
    assert float(joint.table.sum()) == pytest.approx(1, abs=1e-12)
    assert torch.equal(joint.table, JOINTS[name](m=m).table), "the same seed gives the same joint"


def test_marginals_and_conditionals_by_hand():
    np.testing.assert_allclose(SMALL.marginal("a"), [0.3, 0.7])
    np.testing.assert_allclose(SMALL.marginals()["b"], [0.4, 0.2, 0.4])
    np.testing.assert_allclose(SMALL.marginal(("b", "a")), SMALL.table)
    np.testing.assert_allclose(SMALL.conditional("a"), [[0.25, 1, 0], [0.75, 0, 1]])
    np.testing.assert_allclose(SMALL.conditional("b"), [[1 / 3, 2 / 3, 0], [3 / 7, 0, 4 / 7]])
    np.testing.assert_allclose(SMALL.product_of_marginals(), [[0.12, 0.06, 0.12], [0.28, 0.14, 0.28]])
    assert float(SMALL.log_ratio()[0, 1]) == pytest.approx(math.log(0.2 / 0.06))
    assert float(SMALL.log_ratio()[0, 2]) == -math.inf
    by_hand = 0.1 * math.log(0.1 / 0.12) + 0.2 * math.log(0.2 / 0.06) + 0.3 * math.log(0.3 / 0.28)
    assert SMALL.total_correlation() == pytest.approx(by_hand + 0.4 * math.log(0.4 / 0.28))


def test_conditional_of_two_equals_a_plain_loop():
    joint = JOINTS["random_tensor"](n=3, m=4)
    found = joint.conditional(("x4", "x2"))
    for a, b, c, d in product(range(3), repeat=4):
        rest = sum(float(joint.table[a, other, c, last]) for other, last in product(range(3), repeat=2))
        assert float(found[a, b, c, d]) == pytest.approx(float(joint.table[a, b, c, d]) / rest)


def test_a_condition_that_never_happens_has_no_conditional():
    joint = Joint([[0.5, 0.0], [0.5, 0.0]], ("a", "b"))
    np.testing.assert_array_equal(joint.conditional("a"), [[0.5, 0], [0.5, 0]])


def test_softened_sum_and_parity_have_no_dependence_in_pairs():
    for joint in (softened_sum(n=5), parity(), parity(strength=2.0, m=4)):
        pair = joint.marginal(joint.modalities[:2])
        torch.testing.assert_close(pair, torch.full_like(pair, 1 / pair.numel()))
        assert joint.total_correlation() > 0.5


def test_softened_sum_weights():
    table = softened_sum(n=3, strength=2.0).table
    assert float(table[1, 1, 1] / table[1, 1, 0]) == pytest.approx(math.exp(2))
    assert float(table[0, 1, 2]) == float(table[2, 2, 2])


def test_parity_by_hand():
    assert parity().total_correlation() == pytest.approx(math.log(2))
    assert parity().table[0, 0, 0] == parity().table[1, 1, 0] == 0.25 and parity().table[1, 1, 1] == 0
    soft = parity(strength=1.0)
    divergence = float((parity().table * (parity().table / soft.table).log().nan_to_num(neginf=0)).sum())
    assert divergence == pytest.approx(math.log(1 + math.exp(-2)))


def test_independent_is_its_product_of_marginals():
    joint = independent(n=4, m=4)
    torch.testing.assert_close(joint.table, joint.product_of_marginals())
    assert joint.total_correlation() == pytest.approx(0, abs=1e-12)
    assert joint.table.max() > 3 * joint.table.min()


def test_pairwise_weights_have_no_three_way_term():
    for joint in (random_pairwise(n=4), coherent_pairs(n=4)):
        log = joint.table.log()
        for axis in range(3):
            log = log.diff(dim=axis)
        assert log.abs().max() < 1e-9


def test_coherence_favours_equal_parts_and_leaves_the_query_alone():
    plain, coherent = (replace(make(), modalities=("q", "a", "b")) for make in (random_pairwise, coherent_pairs))
    torch.testing.assert_close(coherent.conditional("q"), plain.conditional("q"))
    odds = (coherent.table / plain.table)[0]
    off = ~torch.eye(8, dtype=torch.bool)
    torch.testing.assert_close(odds.diagonal() / odds[off].mean(), torch.full((8,), math.exp(2.5)).double())


def test_draws_follow_the_table_and_the_seed():
    joint = Joint(SMALL.table, ("a", "b"))
    first, again = (joint.sample(40_000, torch.Generator().manual_seed(3)) for _ in range(2))
    assert set(first) == {"a", "b"} and first["a"].dtype == torch.int64 and first["a"].shape == (40_000,)
    assert all(torch.equal(first[name], again[name]) for name in first)
    counts = torch.zeros(2, 3, dtype=torch.float64)
    counts.index_put_((first["a"], first["b"]), torch.ones(40_000, dtype=torch.float64), accumulate=True)
    torch.testing.assert_close(counts / 40_000, joint.table, atol=0.01, rtol=0)
    assert counts[0, 2] == counts[1, 1] == 0, "what has no probability is never drawn"


def test_sizes_may_differ_by_modality():
    joint = Joint(torch.full((2, 3, 5), 1 / 30), ("a", "b", "c"))
    assert [len(each) for each in joint.marginals().values()] == [2, 3, 5]
    assert joint.sample(7)["c"].max() < 5


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: Joint([[0.5, 0.6]], ("a", "b")), ValueError, "sum to 1, got a sum of 1.1"),
        (lambda: Joint([[1.5, -0.5]], ("a", "b")), ValueError, "negative"),
        (lambda: Joint([[math.nan, 1.0]], ("a", "b")), ValueError, "negative"),
        (lambda: Joint([[0.5, 0.5]], ("a", "b", "c")), ValueError, r"3 modalities.*\(1, 2\)"),
        (lambda: Joint([[0.5, 0.5]], ("a", "a")), ValueError, "distinct"),
        (lambda: SMALL.marginal("c"), KeyError, r"'c'.*\['a', 'b'\]"),
        (lambda: SMALL.conditional(()), ValueError, "at least one"),
    ],
)
def test_bad_tables_and_names_are_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_xor_to_identity_by_hand():
    both = xor_to_identity(0.5)
    assert both.table[1, 1, 0] == both.table[1, 1, 1] == 0.125 and both.table[1, 0, 1] == 0.25
    assert both.table[0, 0, 0] == 0.25 and both.table[0, 0, 1] == 0
    assert xor_to_identity(1.0).total_correlation() == pytest.approx(math.log(2))
    torch.testing.assert_close(xor_to_identity(0.0).marginal(("x1", "x3")), 0.5 * torch.eye(2).double())
    wide = xor_to_identity(1.0, bits=3, m=4)
    assert wide.table[5, 3, 6, 0] == 1 / 512 and wide.table.shape == (8, 8, 8, 8)
    with pytest.raises(ValueError, match="from 0 to 1, got 1.5"):
        xor_to_identity(1.5)


def test_the_planted_mixture_has_both_kinds_of_dependence():
    joint = planted_mixture()
    assert pairwise_floor(joint) == pytest.approx(0.6959, abs=5e-5)
    assert joint.total_correlation() == pytest.approx(1.5059, abs=5e-5)
    assert abs(pairwise_floor(planted_mixture(higher=0.0))) < 1e-9


def test_product_interaction_weights():
    table = product_interaction(n=3, strength=2.0).table
    assert float(table[0, 0, 2] / table[0, 0, 0]) == pytest.approx(math.exp(4))
    assert float(table[1, 0, 2]) == float(table[0, 1, 1])
