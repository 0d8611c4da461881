"""Dependence among categories, in pairs and beyond: estimates near the truth, and no alarm where there is nothing."""

import numpy as np
import pytest
import torch
from scipy import special

from mmcl.metrics.expressivity import pairwise_floor
from mmcl.metrics.interaction import (
    counted,
    freedom,
    interaction_of_categories,
    n_log_n,
    sweep,
    tables_of_same_pairs,
)
from mmcl.synthetic.joints import (
    independent,
    parity,
    planted_mixture,
    random_pairwise,
    random_tensor,
    softened_sum,
    xor_to_identity,
)


def draw(joint, count, seed):
    return joint.sample(count, torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    "joint",
    [planted_mixture(), softened_sum(n=4), xor_to_identity(0.5), random_tensor(n=4, m=4, strength=1.0), parity()],
    ids=["mixture", "softened sum", "xor", "four", "parity"],
)
def test_estimates_are_near_the_truth(joint):
    beyond = pairwise_floor(joint)
    total = joint.total_correlation()
    found = interaction_of_categories(draw(joint, 4000, 0), seed=0)
    assert found.beyond.nats == pytest.approx(beyond, rel=0.1)
    assert found.total.nats == pytest.approx(total, rel=0.1)
    assert found.pairwise.nats == pytest.approx(total - beyond, abs=0.06)
    assert 0 < found.beyond.low < beyond < found.beyond.high
    assert found.beyond.p_value == 1 / 200
    assert found.drift < 0.02
    assert found.arrived
    assert found.pairwise.nats + found.beyond.nats == pytest.approx(found.total.nats)


@pytest.mark.parametrize("joint", [independent(), random_pairwise(n=5), independent(n=12)], ids=["8", "pairs", "12"])
def test_nothing_is_found_beyond_pairs_where_nothing_is(joint):
    """Sparse tables too: of 1728 cells 1000 rows fill less than a half."""
    lows = [interaction_of_categories(draw(joint, 1000, s), 39, 100, seed=s).beyond.low for s in range(20)]
    assert sum(low > 0 for low in lows) <= 3


@pytest.mark.parametrize(("sizes", "free"), [((2, 2, 2), 1), ((3, 4), 0), ((8, 8, 8), 343), ((2, 3, 2, 2), 9)])
def test_degrees_of_freedom_beyond_pairs(sizes, free):
    """Of 2 x 3 x 2 x 2: 23 less 5 single and 9 pairs' is 9."""
    assert freedom(sizes) == free


def test_a_chain_that_cannot_move_says_so():
    """A Latin square of 5 values has no cube with four tuples seen."""
    first, second = np.random.default_rng(0).integers(0, 5, (2, 500))
    found = interaction_of_categories({"a": first, "b": second, "c": (first + second) % 5}, draws=19, sweeps=50)
    assert not found.arrived
    assert (found.beyond.nats, found.beyond.low, found.beyond.p_value) == (0, 0, 1)


def test_independent_categories_share_nothing():
    alarms = 0
    for seed in range(20):
        found = interaction_of_categories(draw(independent(n=6, m=2), 500, seed), seed=seed)
        alarms += found.total.low > 0
        assert found.beyond.nats == 0 and abs(found.total.nats) < 0.05
    assert alarms <= 3


def test_two_modalities_are_all_pairwise():
    joint = random_tensor(m=2)
    found = interaction_of_categories(draw(joint, 4000, 0))
    assert found.pairwise.nats == found.total.nats == pytest.approx(joint.total_correlation(), rel=0.05)
    assert found.pairwise.low > 0 and found.beyond.high < 1e-12


@pytest.mark.parametrize("m", [3, 4])
def test_a_sweep_keeps_every_pair_of_margins_and_moves_counts(m):
    generator = np.random.default_rng(0)
    table = generator.integers(0, 6, (3, 4, 5, 2)[:m]).astype(np.int32)
    tables = np.repeat(table[None], 7, axis=0)
    for number in range(200):
        sweep(tables, generator, special.gammaln(np.arange(table.sum() + 2) + 1.0), 1 + number % 3)
    assert (tables >= 0).all() and (tables != table).any(axis=tuple(range(1, m + 1))).all()
    for first in range(m):
        for second in range(first + 1, m):
            rest = tuple(axis for axis in range(m) if axis not in (first, second))
            expected = np.broadcast_to(table.sum(axis=rest), (7, table.shape[first], table.shape[second]))
            np.testing.assert_array_equal(tables.sum(axis=tuple(axis + 1 for axis in rest)), expected)


def test_the_chain_draws_from_the_distribution_given_the_margins():
    """2 x 2 x 2: one number tells the table, with probability prod 1 / n!, by enumeration."""
    table = np.array([[[3, 2], [4, 1]], [[1, 4], [2, 3]]], np.int32)
    signs = np.array([[[1, -1], [-1, 1]], [[-1, 1], [1, -1]]], np.int32)
    possible = [table + step * signs for step in range(-10, 11) if (table + step * signs >= 0).all()]
    weights = np.exp([-special.gammaln(each + 1).sum() for each in possible])
    _, drawn = tables_of_same_pairs(table, 20_000, 60, np.random.default_rng(0))
    seen = np.array([(drawn == each).all(axis=(1, 2, 3)).mean() for each in possible])
    assert seen.sum() == 1
    np.testing.assert_allclose(seen, weights / weights.sum(), atol=0.015)


def test_categories_may_be_anything_and_names_do_not_count():
    joint = softened_sum(n=3)
    values = draw(joint, 600, 0)
    words = {name: [("갑", "을", "병")[value] for value in column.tolist()] for name, column in values.items()}
    one, other = interaction_of_categories(values), interaction_of_categories(words)
    assert one.sizes == other.sizes == {"x1": 3, "x2": 3, "x3": 3}
    assert one.total.nats == pytest.approx(other.total.nats, abs=0.01)
    again = interaction_of_categories(values)
    assert again == one


def test_counts_by_hand():
    table = counted([np.array([0, 1, 1]), np.array([2, 0, 0])], (2, 3))
    assert table.tolist() == [[0, 0, 1], [2, 0, 0]]
    assert n_log_n(table[None])[0] == pytest.approx(2 * np.log(2))


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"a": [1, 2]}, "two modalities"),
        ({"a": [], "b": []}, "no rows"),
        ({"a": [1, 2], "b": [1]}, "a has 2, b has 1"),
        ({"a": ["x", None], "b": [1, 2]}, "a: .*row 1 has no value"),
        ({"a": [0.5, float("nan")], "b": [1, 2]}, "a: .*row 1 has no value"),
        ({"a": [[1], [2]], "b": [1, 2]}, r"a: .*shape \(2, 1\)"),
        ({"a": range(300), "b": range(300)}, "90,000 cells, more than 50,000: merge rare"),
    ],
)
def test_what_is_no_table_is_refused(values, told):
    with pytest.raises(ValueError, match=told):
        interaction_of_categories(values)


@pytest.mark.slow
@pytest.mark.parametrize("joint", [independent(), random_pairwise()], ids=["independent", "pairwise"])
def test_no_more_alarms_than_promised_in_a_hundred(joint, capsys):
    found = [interaction_of_categories(draw(joint, 4000, seed), seed=seed) for seed in range(100)]
    alarms = sum(each.beyond.low > 0 for each in found)
    with capsys.disabled():
        print(f"\n{alarms} of 100 intervals are above 0; {sum(each.beyond.p_value <= 0.05 for each in found)} p <= .05")
    assert alarms <= 10


@pytest.mark.slow
def test_the_planted_mixture_is_found_every_time():
    joint = planted_mixture()
    for seed in range(20):
        found = interaction_of_categories(draw(joint, 4000, seed), seed=seed)
        assert found.beyond.low > 0
        assert found.beyond.nats == pytest.approx(pairwise_floor(joint), rel=0.1)
