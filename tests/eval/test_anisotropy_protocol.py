"""The anisotropy protocol: what it draws, what it learns in a short run, its verdict."""

import anisotropy as protocol
import pytest
import torch


def test_concentrations_start_equal_and_stay_positive():
    start = torch.tensor([0.5, 15.0, 80.0])
    learned = protocol.Concentrations(start)
    torch.testing.assert_close(learned(), start)
    with torch.no_grad():
        learned.free.fill_(-50.0)
    assert (learned() > 0).all()


def test_pools_give_each_batch_once():
    drawn = []

    def draw(count, generator):
        drawn.append(count)
        return torch.arange(count), torch.arange(count) + len(drawn) * 1000

    batch = protocol.pooled(draw, rows=4, pool=3)
    rows = [batch(torch.Generator()) for _ in range(5)]
    assert drawn == [12, 12]
    assert sorted(torch.cat([first for first, _ in rows[:3]]).tolist()) == list(range(12))
    assert all(len(first) == 4 for first, _ in rows)


def test_recovery_follows_a_permutation_with_signs():
    true = torch.tensor([5.0, 10.0, 20.0])
    order, signs = [2, 0, 1], torch.tensor([1.0, -1.0, 1.0])
    found = protocol.recovery(lambda z: z[:, order] * signs, 3, 2 * true[order], true)
    assert found["mcc"] == pytest.approx(1)
    assert found["ratios"] == pytest.approx([2.0, 2.0, 2.0])
    assert found["order"]
    assert not protocol.recovery(lambda z: z, 3, true.flip(0), true)["order"]


@pytest.mark.slow
def test_a_short_run_tells_the_losses_apart():
    true = torch.tensor([4.0, 40.0, 12.0])
    found = {loss: protocol.mixing("identity", true, loss, 0, steps=2_000) for loss in ("an_info_nce", "info_nce")}
    assert found["an_info_nce"]["mcc"] > found["info_nce"]["mcc"]
    assert found["an_info_nce"]["mcc"] > 0.95
    assert found["an_info_nce"]["order"]


def test_the_verdict_names_what_is_missed():
    row = {"part": "mixing", "world": "identity", "loss": "an_info_nce", "seconds": 50.0, "order": True, "mcc": 0.99}
    row |= {"concentrations": protocol.spread(5).tolist(), "ratios": [1.0, 1.05, 0.95, 1.0, 1.0]}
    assert protocol.failures([row], quick=True) == []
    assert "MCC 0.900" in protocol.failures([row | {"mcc": 0.9}], quick=True)[0]
    assert "off by 0.20" in protocol.failures([row | {"ratios": [1.2, 1, 1, 1, 1]}], quick=True)[0]
    assert "takes 95" in protocol.failures([row | {"seconds": 95.0}], quick=True)[0]
