"""Exact divergences of a score from a joint: by hand, by plain loops, and the best that sums of pairs can do."""

import math
from itertools import permutations, product

import numpy as np
import pytest
import torch

from mmcl.metrics.expressivity import (
    best_scores,
    conditional_kl,
    full_conditional_kls,
    joint_kl,
    log_model,
    pairwise_conditional_kls,
    pairwise_floor,
    pairwise_projection,
    score_table,
)
from mmcl.scores import Hadamard, SumOfPairs
from mmcl.synthetic.joints import JOINTS, Joint, parity, random_tensor, softened_sum


def signs(m):
    table = torch.ones((), dtype=torch.float64)
    for _ in range(m):
        table = table.unsqueeze(-1) * torch.tensor([1.0, -1.0], dtype=torch.float64)
    return table


@pytest.mark.parametrize("m", [2, 3, 5])
@pytest.mark.parametrize("scale", [0.0, 1.0, 5.0, 20.0])
def test_parity_by_its_own_score(scale, m):
    assert abs(float(joint_kl(parity(m=m), scale * signs(m))) - math.log1p(math.exp(-2 * scale))) < 1e-12


@pytest.mark.parametrize(
    ("name", "nats"), [("softened_sum", 1.504251), ("random_tensor", 0.500984), ("random_pairwise", 0.0)]
)
def test_published_floors(name, nats):
    assert pairwise_floor(JOINTS[name]()) == pytest.approx(nats, abs=5e-7)


@pytest.mark.parametrize("m", [3, 4, 5])
def test_no_sum_of_pairs_says_anything_of_parity(m):
    assert pairwise_floor(parity(m=m)) == pytest.approx(math.log(2), abs=1e-12)
    assert pairwise_floor(parity(strength=2.0, m=m)) == pytest.approx(parity(strength=2.0, m=m).total_correlation())


@pytest.mark.parametrize("name", JOINTS)
def test_two_modalities_have_nothing_beyond_pairs(name):
    assert abs(pairwise_floor(JOINTS[name](m=2))) < 1e-9


@pytest.mark.parametrize("name", JOINTS)
@pytest.mark.parametrize("m", [3, 4])
def test_the_projection_keeps_every_pair_of_margins_and_adds_nothing(name, m):
    joint = JOINTS[name](m=m)
    projected = pairwise_projection(joint)
    names = joint.modalities
    for pair in permutations(names, 2):
        np.testing.assert_allclose(projected.marginal(pair), joint.marginal(pair), atol=1e-9)
    # Pythagoras: KL(p || prod) = KL(p || projection) + KL(projection || prod)
    parts = pairwise_floor(joint) + projected.total_correlation()
    assert joint.total_correlation() == pytest.approx(parts, abs=1e-7)
    assert abs(pairwise_floor(projected)) < 1e-8


def test_the_projection_is_log_linear_in_pairs():
    """The third difference of its logarithm is 0 everywhere; that of the joint's own is not."""

    def third_difference(table):
        logs = table.log()
        for axis in range(3):
            logs = logs - logs.select(axis, 0).unsqueeze(axis)
        return float(logs.abs().max())

    joint = random_tensor(n=4)
    assert third_difference(pairwise_projection(joint).table) < 1e-7 < 1 < third_difference(joint.table)


def test_a_projection_that_is_not_reached_is_no_answer():
    with pytest.raises(ArithmeticError, match="after 2 sweeps.* still off by"):
        pairwise_projection(random_tensor(), sweeps=2)


def test_values_that_never_happen_are_no_trouble():
    """The margins of pairs leave no other distribution than the joint, though each pair of (0, 0, 0) happens."""
    table = torch.zeros(3, 3, 3, dtype=torch.float64)
    table[0, 0, 1] = table[1, 0, 0] = table[0, 1, 0] = 1 / 3
    joint = Joint(table, ("a", "b", "c"))
    best, of_pairs = best_scores(joint)
    assert float(joint_kl(joint, best)) == pytest.approx(0, abs=1e-12)
    assert pairwise_projection(joint).table[0, 0, 0] == 0
    assert float(joint_kl(joint, of_pairs)) == pytest.approx(0, abs=1e-9)
    assert float(joint_kl(joint, torch.zeros(3, 3, 3))) == pytest.approx(joint.total_correlation())


def test_the_best_score_is_exact_and_any_constant_goes():
    joint = random_tensor(n=3, m=4)
    best, of_pairs = best_scores(joint)
    assert abs(float(joint_kl(joint, best + 17))) < 1e-12
    assert float(joint_kl(joint, of_pairs)) == pytest.approx(pairwise_floor(joint), abs=1e-8)
    assert float(joint_kl(joint, torch.full_like(best, 3.0))) == pytest.approx(joint.total_correlation())
    assert float(joint_kl(joint, torch.where(torch.arange(3) == 1, -math.inf, best))) == math.inf


def test_conditionals_equal_a_plain_loop():
    joint, scores = (
        random_tensor(n=3, m=4),
        torch.randn(3, 3, 3, 3, generator=torch.Generator().manual_seed(2)).double(),
    )
    q, p = log_model(joint, scores).exp(), joint.table
    assert float(q.sum()) == pytest.approx(1)

    def looped(guessed, given):
        total = 0.0
        for values in product(range(3), repeat=len(guessed) + len(given)):
            at = dict(zip((*guessed, *given), values, strict=True))
            both = tuple(at.get(axis, slice(None)) for axis in range(4))
            condition = tuple(at[axis] if axis in given else slice(None) for axis in range(4))
            of_p, of_q = (float(t[both].sum() / t[condition].sum()) for t in (p, q))
            total += float(p[both].sum()) * math.log(of_p / of_q)
        return total

    names = joint.modalities
    for guessed, given in [((0,), (1,)), ((2,), (0, 1, 3)), ((0, 3), (2,)), ((1, 2), (0, 3))]:
        found = conditional_kl(joint, scores, [names[axis] for axis in guessed], [names[axis] for axis in given])
        assert float(found) == pytest.approx(looped(guessed, given), abs=1e-12)
    full = full_conditional_kls(joint, scores)
    assert full["x3"] == pytest.approx(looped((2,), (0, 1, 3)))
    pairs = pairwise_conditional_kls(joint, scores)
    assert len(pairs) == 12 and pairs["x4", "x2"] == pytest.approx(looped((3,), (1,)))


@pytest.mark.parametrize("name", JOINTS)
def test_no_conditional_is_farther_than_the_joint(name):
    joint = JOINTS[name]()
    for seed in range(3):
        scores = 3 * torch.randn(joint.table.shape, generator=torch.Generator().manual_seed(seed)).double()
        whole = float(joint_kl(joint, scores))
        parts = [*full_conditional_kls(joint, scores).values(), *pairwise_conditional_kls(joint, scores).values()]
        assert all(-1e-12 < part <= whole + 1e-12 for part in parts)


def test_the_best_sum_of_pairs_gets_every_pairwise_conditional_right_and_no_full_one():
    joint = softened_sum()
    _, of_pairs = best_scores(joint)
    assert max(pairwise_conditional_kls(joint, of_pairs).values()) < 1e-9
    assert min(full_conditional_kls(joint, of_pairs).values()) > 1.5


@pytest.mark.parametrize("kind", [SumOfPairs, Hadamard])
@pytest.mark.parametrize("counts", [(2, 3), (2, 3, 4), (2, 3, 2, 4)])
def test_a_table_of_scores_holds_the_score_of_every_tuple(kind, counts):
    torch.manual_seed(0)
    names = tuple("abcd"[: len(counts)])
    score = kind(names, 5, temperature=0.5)
    rows = {name: torch.randn(count, 5, requires_grad=True) for name, count in zip(names, counts, strict=True)}
    table = score_table(score, dict(reversed(rows.items())))
    assert table.shape == counts
    for at in product(*map(range, counts)):
        one = score({name: rows[name][[value]] for name, value in zip(names, at, strict=True)})
        assert float(table[at].detach()) == pytest.approx(float(one.detach()), rel=1e-5, abs=1e-5)
    table.sum().backward()
    assert all(row.grad.abs().sum() > 0 for row in rows.values())


def test_what_does_not_fit_is_refused_by_name():
    joint, score = softened_sum(n=3), Hadamard(("a", "b", "c"), 4)
    rows = torch.randn(3, 4)
    with pytest.raises(KeyError, match="embeddings of 'c' are missing"):
        score_table(score, {"a": rows, "b": rows})
    with pytest.raises(KeyError, match="unknown modality 'z'"):
        score_table(score, {"a": rows, "b": rows, "c": rows, "z": rows})
    with pytest.raises(ValueError, match=r"scores \(3, 3, 3\), got \(3, 3\)"):
        joint_kl(joint, torch.zeros(3, 3))
    with pytest.raises(ValueError, match="below infinity"):
        joint_kl(joint, torch.full((3, 3, 3), math.nan))
    with pytest.raises(KeyError, match="unknown modality 'x9'"):
        conditional_kl(joint, torch.zeros(3, 3, 3), "x9")
    with pytest.raises(ValueError, match=r"got \['x1'\] from \['x1'\]"):
        conditional_kl(joint, torch.zeros(3, 3, 3), "x1", "x1")
