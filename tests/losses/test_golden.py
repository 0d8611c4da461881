"""Values known in closed form, and the wrong forms of each loss that they tell from the right one."""

import math

import pytest
import torch
from torch.nn import functional as F

from mmcl.losses import (
    barlow_twins,
    byol_regression,
    info_nce,
    moco,
    nt_xent,
    sinkhorn,
    sup_con,
    swapped_predictions,
    swav_swapped,
    triplet,
)
from mmcl.losses.correlation import redundancy
from mmcl.losses.views import next_of_label

D = torch.float64
ON_CIRCLE = {1.0: (1.0, 0.0), 0.0: (0.0, 1.0), -1.0: (-1.0, 0.0)}
"""A unit vector of the plane for each cosine with (1, 0)."""


def rows(*cosines):
    return torch.tensor([ON_CIRCLE[each] for each in cosines], dtype=D)


def anchor_of_nt_xent(tau):
    """Loss of the anchor (1, 0) with cosines 1 (its other view), 0 and -1."""
    a, b = rows(1.0, 0.0), rows(1.0, -1.0)
    return nt_xent(a, b, temperature=tau, reduction="none")[0]


def test_triplet_by_hand():
    anchor = torch.zeros(2, 1, dtype=D)
    positive = torch.full((2, 1), math.sqrt(0.2), dtype=D)
    negative = torch.tensor([[math.sqrt(0.3)], [1.0]], dtype=D, requires_grad=True)
    losses = triplet(anchor, positive, negative, margin=0.5, reduction="none")
    torch.testing.assert_close(losses, torch.tensor([0.4, 0.0], dtype=D))
    losses.sum().backward()
    assert negative.grad[0].abs() > 1
    assert negative.grad[1] == 0, "a negative that is far enough has no gradient"


@pytest.mark.parametrize("count", [2, 4, 100])
def test_equal_logits_give_the_log_of_their_number(count):
    same = torch.ones(count, 3, dtype=D) / math.sqrt(3)
    assert float(info_nce(same, same)) == pytest.approx(math.log(count), abs=1e-12)
    if count == 4:
        assert float(info_nce(same, same)) == pytest.approx(1.386294361, abs=1e-9)


@pytest.mark.parametrize(
    ("tau", "loss", "mass"),
    [
        (0.5, 0.142931628, (0.866813332, 0.117310428, 0.015876240)),
        (1.0, 0.407605964, (0.665240956, 0.244728471, 0.090030573)),
    ],
)
def test_nt_xent_of_three_cosines(tau, loss, mass):
    value = anchor_of_nt_xent(tau)
    assert float(value) == pytest.approx(loss, abs=1e-9)
    assert float(torch.exp(-value)) == pytest.approx(mass[0], abs=1e-9)
    similarities = torch.tensor([1.0, 0.0, -1.0], dtype=D, requires_grad=True)
    direct = F.cross_entropy(similarities / tau, torch.tensor(0))
    direct.backward()
    expected = (torch.tensor(mass, dtype=D) - torch.tensor([1.0, 0.0, 0.0], dtype=D)) / tau
    torch.testing.assert_close(similarities.grad, expected, atol=1e-8, rtol=0)


def test_gradient_by_similarity_is_mass_less_one_over_tau():
    """Through info_nce itself: the gradient of the query is the mix of candidates by (p_j - [j is positive]) / tau."""
    query = rows(1.0).requires_grad_()
    info_nce(query, rows(1.0), rows(0.0, -1.0), scale=1 / 0.5).backward()
    weights = torch.tensor([-0.266373336, 0.234620856, 0.031752480], dtype=D)
    torch.testing.assert_close(query.grad[0], weights @ rows(1.0, 0.0, -1.0), atol=1e-8, rtol=0)


def test_the_wrong_forms_of_nt_xent_are_other_numbers():
    logits = torch.tensor([2.0, 0.0, -2.0], dtype=D)
    negatives_only = float(logits[1:].logsumexp(0) - logits[0])
    self_by_zero = float(torch.cat([logits, torch.zeros(1, dtype=D)]).logsumexp(0) - logits[0])
    assert negatives_only == pytest.approx(-1.873072, abs=1e-6)
    assert self_by_zero == pytest.approx(0.253856, abs=1e-6)
    right = float(anchor_of_nt_xent(0.5))
    assert min(abs(right - negatives_only), abs(right - self_by_zero)) > 0.1


@pytest.mark.parametrize(("images", "expected"), [(2, 1.098612), (8, 2.708050)])
def test_nt_xent_has_one_candidate_less_than_views(images, expected):
    same = torch.ones(images, 4, dtype=D) / 2
    each = nt_xent(same, same, reduction="none")
    assert each.shape == (2 * images,)
    torch.testing.assert_close(each, torch.full_like(each, math.log(2 * images - 1)))
    assert float(each.mean()) == pytest.approx(expected, abs=1e-6)


def test_one_image_alone_is_an_error():
    for loss in (nt_xent, barlow_twins):
        with pytest.raises(ValueError, match="at least 2 rows, got 1"):
            loss(torch.ones(1, 3), torch.ones(1, 3))


@pytest.mark.parametrize(
    ("order", "expected"), [(["a", "a", "b", "b"], [1, 0, 3, 2]), (["a", "b", "a", "b"], [2, 3, 0, 1])]
)
def test_the_positive_of_a_row_follows_the_order_of_views(order, expected):
    labels = torch.tensor([ord(each) for each in order])
    assert next_of_label(labels).tolist() == expected
    embeddings = F.normalize(torch.randn(4, 3, dtype=D), dim=1)
    first, second = [[i for i, each in enumerate(order) if each == name] for name in "ab"]
    a, b = (embeddings[[first[view], second[view]]] for view in (0, 1))
    torch.testing.assert_close(sup_con(embeddings, labels, temperature=0.5), nt_xent(a, b, temperature=0.5))


def test_similarities_of_4096_images_take_256_mib():
    assert (2 * 4096) ** 2 == 67_108_864
    assert (2 * 4096) ** 2 * 4 == 256 * 2**20


def test_barlow_twins_by_hand():
    assert float(redundancy(torch.tensor([[1.0, 0.2], [0.2, 1.0]], dtype=D), 0.005)) == pytest.approx(0.0004, abs=1e-12)
    assert float(redundancy(torch.zeros(7, 7), 0.005)) == 7
    signs = torch.tensor([[1, 1], [1, -1], [-1, 1], [-1, -1]], dtype=D)
    mixed = torch.stack([signs[:, 0], 0.2 * signs[:, 0] + math.sqrt(0.96) * signs[:, 1]], dim=1)
    assert float(barlow_twins(3 * mixed + 5, 7 * mixed - 1)) == pytest.approx(0.0004, abs=1e-12), (
        "scale and mean drop out"
    )
    independent = torch.stack([signs[:, 0], signs[:, 0]], 1), torch.stack([signs[:, 1], signs[:, 1]], 1)
    assert float(barlow_twins(*independent)) == pytest.approx(2.0, abs=1e-12)


def test_a_feature_that_does_not_vary_counts_one_and_has_no_gradient():
    a = torch.randn(6, 3)
    a[:, 1] = 0.1
    a.requires_grad_()
    loss = barlow_twins(a, a.detach().clone(), lambd=0.0)
    assert loss.item() == pytest.approx(1.0, abs=1e-6)
    loss.backward()
    assert a.grad.isfinite().all()
    assert (a.grad[:, 1] == 0).all()


def test_byol_by_hand():
    def at(cosine):
        return torch.tensor([[3 * cosine, 3 * math.sqrt(1 - cosine**2)]], dtype=D)

    target = torch.tensor([[5.0, 0.0]], dtype=D)
    forward, backward = byol_regression(at(0.8), target), byol_regression(at(0.6), target)
    assert float(forward) == pytest.approx(0.4, abs=1e-12)
    assert float(backward) == pytest.approx(0.8, abs=1e-12)
    assert float(forward + backward) == pytest.approx(1.2, abs=1e-12)
    assert float((forward + backward) / 2) == pytest.approx(0.6, abs=1e-12)


def test_targets_get_no_gradient():
    leaves = [torch.randn(4, 3, requires_grad=True) for _ in range(5)]
    byol_regression(leaves[0], leaves[1]).backward()
    moco(leaves[2], leaves[3], leaves[4]).backward()
    assert [leaf.grad is None for leaf in leaves] == [False, True, False, True, True]


@pytest.mark.parametrize("count", [1, 5, 63])
def test_moco_of_equal_rows_counts_the_key_and_the_queue(count):
    same = torch.ones(3, 4, dtype=D) / 2
    queue = torch.ones(count, 4, dtype=D) / 2
    assert float(moco(same, same, queue)) == pytest.approx(math.log(count + 1), abs=1e-12)
    query, key = F.normalize(torch.randn(3, 4, dtype=D), dim=1), F.normalize(torch.randn(3, 4, dtype=D), dim=1)
    queue = F.normalize(torch.randn(count, 4, dtype=D), dim=1)
    logits = torch.cat([(query * key).sum(1, keepdim=True), query @ queue.T], dim=1) / 0.07
    assert logits.shape == (3, 1 + count)
    torch.testing.assert_close(moco(query, key, queue), F.cross_entropy(logits, torch.zeros(3, dtype=torch.long)))


def test_sinkhorn_of_two_rows_and_two_prototypes():
    codes = sinkhorn(torch.eye(2, dtype=D), epsilon=0.01)
    mass = codes / 2  # of the transport plan, prototypes x rows
    assert float(mass.sum()) == pytest.approx(1)
    torch.testing.assert_close(mass.sum(0), torch.full((2,), 0.5, dtype=D))
    torch.testing.assert_close(mass.sum(1), torch.full((2,), 0.5, dtype=D))
    torch.testing.assert_close(codes, torch.eye(2, dtype=D), atol=1e-12, rtol=0)


def test_sinkhorn_balances_prototypes_and_overflows_nowhere():
    scores = torch.randn(40, 5, dtype=D) + torch.tensor([3.0, 0, 0, 0, 0])
    codes = sinkhorn(scores, epsilon=0.5, iterations=200)
    torch.testing.assert_close(codes.sum(1), torch.ones(40, dtype=D))
    torch.testing.assert_close(codes.sum(0), torch.full((5,), 8.0, dtype=D))
    for dtype in (torch.float32, torch.float16):  # exp(1 / .001) is infinite in both
        assert sinkhorn(scores.to(dtype), epsilon=0.001).isfinite().all()


def test_sinkhorn_equals_the_plain_iteration():
    scores = torch.randn(6, 4, dtype=D)
    Q = torch.exp(scores / 0.5).T
    Q = Q / Q.sum()
    for _ in range(3):
        Q = Q / Q.sum(1, keepdim=True) / 4
        Q = Q / Q.sum(0, keepdim=True) / 6
    torch.testing.assert_close(sinkhorn(scores, 0.5, 3), (Q * 6).T)


def test_swav_predicts_each_view_from_the_other():
    a, b = (torch.randn(6, 4, dtype=D, requires_grad=True) for _ in range(2))
    code_a, code_b = sinkhorn(a), sinkhorn(b)
    assert not code_a.requires_grad
    swapped = (
        -(code_a * (b / 0.1).log_softmax(1)).sum(1).mean() - (code_b * (a / 0.1).log_softmax(1)).sum(1).mean()
    ) / 2
    torch.testing.assert_close(swav_swapped(a, b), swapped)
    own = -(code_a * (a / 0.1).log_softmax(1)).sum(1).mean()
    assert abs((own - swapped).item()) > 0.1, "not each view from its own code"
    small = torch.randn(6, 4, dtype=D)
    parts = [(code_a, b), (code_a, small), (code_b, a), (code_b, small)]
    multi = sum(-(code * (each / 0.1).log_softmax(1)).sum(1).mean() for code, each in parts) / 4
    torch.testing.assert_close(swapped_predictions([a, b, small]), multi)


def test_sup_con_takes_the_mean_outside_the_log():
    """One anchor whose two positives have .2 and .6 of the mass, and a negative the rest."""
    logits = torch.tensor([0.2, 0.6, 0.2], dtype=D).log()
    anchor = torch.tensor([[1.0, 0, 0, 0]], dtype=D)
    others = torch.cat([logits.unsqueeze(1), torch.eye(3, dtype=D)], dim=1)
    each = sup_con(torch.cat([anchor, others]), torch.tensor([7, 7, 7, 1]), temperature=1.0, reduction="none")
    assert float(each[0]) == pytest.approx(1.060131768, abs=1e-9)
    assert -math.log((0.2 + 0.6) / 2) == pytest.approx(0.916290732, abs=1e-9), "log of the mean"
    assert -math.log(0.2 + 0.6) == pytest.approx(0.223143551, abs=1e-9), "log of the sum"
    assert each[3] == 0


def test_clip_logits_by_hand():
    rows = torch.eye(2, dtype=D)
    directions = [info_nce(rows, rows, scale=2.0), info_nce(rows, rows, scale=2.0)]
    assert [float(each) for each in directions] == pytest.approx([0.126928011] * 2, abs=1e-9)


def test_with_positives_alone_the_constant_map_is_optimal():
    """-sim / tau is at its least, -1 / tau, for any map that sends both views to one point: the collapse."""
    constant = torch.ones(8, 4, dtype=D) / 2
    assert float(byol_regression(constant, constant)) == pytest.approx(0, abs=1e-12)
    spread = F.normalize(torch.randn(8, 4, dtype=D), dim=1)
    assert float(nt_xent(constant, constant)) > float(nt_xent(spread, spread)), "negatives forbid it"
