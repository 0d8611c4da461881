"""Alignment, uniformity, collapse, shares and bounds: values known by hand."""

import math

import pytest
import torch
from torch.nn import functional as F

from mmcl.losses import info_nce
from mmcl.metrics import (
    alignment,
    effective_rank,
    hardest_negative_share,
    linear_probe,
    mutual_information_bound,
    same_class_similarity,
    uniformity,
    weighted_knn,
)

UNIT = F.normalize(torch.randn(300, 8, generator=torch.Generator().manual_seed(0)), dim=1)


@pytest.mark.parametrize(("tau", "share"), [(0.05, 1.0), (0.1, 0.999955), (0.5, 0.880797), (1.0, 0.731059)])
def test_the_hardest_negatives_share_follows_temperature(tau, share):
    query = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    negatives = torch.tensor([[0.0, 1.0], [-1.0, 0.0]], dtype=torch.float64)
    assert hardest_negative_share(query, query, negatives, tau).item() == pytest.approx(share, abs=1e-6)


def test_the_share_in_a_batch_leaves_the_positive_out():
    rows = torch.eye(3)
    torch.testing.assert_close(hardest_negative_share(rows, rows, temperature=0.1), torch.full((3,), 0.5))


def test_alignment_and_uniformity_by_hand():
    a, b = torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([[1.0, 0.0], [0.0, -1.0]])
    assert alignment(a, b) == pytest.approx(2.0)
    assert uniformity(torch.tensor([[1.0, 0.0], [-1.0, 0.0]])) == pytest.approx(-8.0)
    assert uniformity(torch.ones(5, 4) / 2) == pytest.approx(0, abs=1e-6)
    assert uniformity(UNIT) < -2


def test_collapse_is_seen():
    labels = torch.arange(300) % 10
    assert same_class_similarity(torch.ones(300, 8), labels) == pytest.approx(1, abs=1e-5)
    assert abs(same_class_similarity(UNIT, labels)) < 0.05
    assert effective_rank(torch.ones(300, 8)) == 0
    assert effective_rank(UNIT) == pytest.approx(8, abs=0.1)
    assert effective_rank(UNIT[:, :1] @ torch.ones(1, 8)) == pytest.approx(1, abs=1e-6)
    centres = F.one_hot(labels, 10).float()
    assert same_class_similarity(centres, labels) == pytest.approx(1, abs=1e-5)
    pairs = [(i, j) for i in range(30) for j in range(30) if i != j and labels[i] == labels[j]]
    by_hand = sum(float(UNIT[i] @ UNIT[j]) for i, j in pairs) / len(pairs)
    assert same_class_similarity(UNIT[:30], labels[:30]) == pytest.approx(by_hand, abs=1e-6)


def test_the_bound_on_information_is_at_most_log_n():
    """Of a correlated normal pair with I = 1.2 nats, by the true density ratio."""
    rho, n, generator = math.sqrt(1 - math.exp(-2.4)), 128, torch.Generator().manual_seed(0)
    bounds = []
    for _ in range(200):
        x, noise = torch.randn(2, n, generator=generator, dtype=torch.float64)
        y = rho * x + math.sqrt(1 - rho**2) * noise
        logits = -0.5 * (y - rho * x.unsqueeze(1)) ** 2 / (1 - rho**2) + 0.5 * y**2
        loss = F.cross_entropy(logits, torch.arange(n))
        bounds.append(mutual_information_bound(loss.item(), n))
    mean = sum(bounds) / len(bounds)
    assert 1.1 < mean < 1.2
    assert max(bounds) < math.log(n)
    certain = info_nce(10 * torch.eye(4), 10 * torch.eye(4)).item()
    assert mutual_information_bound(certain, 4) == pytest.approx(math.log(4)), "the cap"
    with pytest.raises(ValueError, match="at least 2 candidates"):
        mutual_information_bound(0.0, 1)


def test_probes_of_separable_and_of_meaningless_features():
    labels = torch.arange(300) % 3
    features = F.one_hot(labels, 3) + 0.1 * UNIT[:, :3]
    split = (features[:200], labels[:200], features[200:], labels[200:])
    assert linear_probe(*split) == 1
    assert weighted_knn(*split) == 1
    noise = (UNIT[:200], labels[:200], UNIT[200:], labels[200:])
    assert linear_probe(*noise) < 0.5
    assert weighted_knn(*noise) < 0.5


def test_neighbours_vote_by_their_cosine():
    features = torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.6, 0.8]])
    test = torch.tensor([[1.0, 0.0]])
    labels, answer = ["near", "far", "far"], ["near"]
    assert weighted_knn(features, labels, test, answer, k=3, temperature=0.07) == 1
    assert weighted_knn(features, labels, test, answer, k=3, temperature=10.0) == 0, "a plain majority"
    assert weighted_knn(features, labels, test, answer, k=1, temperature=10.0) == 1
    with pytest.raises(ValueError, match="k must be at least 1"):
        weighted_knn(features, labels, test, answer, k=0)


def test_a_probe_of_one_row_a_class_is_refused():
    with pytest.raises(ValueError, match="each of two rows or more"):
        linear_probe(UNIT[:3], [0, 1, 2], UNIT[:3], [0, 1, 2])
