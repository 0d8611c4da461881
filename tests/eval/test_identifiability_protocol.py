"""The identifiability protocol: its closed forms against sampling, its losses, its verdict."""

import math
import sys

import identifiability as protocol
import pytest
import torch
from torch.nn import functional as F

from mmcl.synthetic.worlds import circle_around, uniform_sphere, von_mises_fisher

KAPPA = 10 / 3
NEGATIVES = 1_000_000


def test_closed_forms_are_those_of_the_theory():
    forms = protocol.closed_forms()
    expected = {
        ("full", "isometry"): -0.906888,
        ("violated", "isometry"): -1.524838,
        ("violated", "aligned and uniform"): -1.898393,
        ("corrected_constant", "isometry"): -0.777786,
        ("corrected_constant", "first dropped"): -0.913901,
        ("corrected_radius", "isometry"): -0.608318,
        ("corrected_radius", "first dropped"): -0.355540,
    }
    for (sampling, what), value in expected.items():
        assert forms[sampling][what] == pytest.approx(value, abs=1e-6)


def dropped(z):
    return F.normalize(z[:, 1:], dim=1)


CASES = [
    ("full", "isometry"),
    ("violated", "isometry"),
    ("violated", "aligned and uniform"),
    ("corrected_constant", "isometry"),
    ("corrected_constant", "first dropped"),
    ("corrected_radius", "isometry"),
    ("corrected_radius", "first dropped"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("sampling", "what"), CASES)
def test_the_sampled_loss_meets_the_closed_form(sampling, what):
    """-kappa E<h, h+> plus the log-partition of its own million negatives, within 3 standard errors."""
    generator = torch.Generator().manual_seed(0)
    z = uniform_sphere(400_000, 3, generator)
    if sampling == "full":
        positive = von_mises_fisher(z, KAPPA, generator)
    else:
        positive = circle_around(z, KAPPA, generator, by_radius=sampling == "corrected_radius")
    map_of = dropped if what == "first dropped" else lambda rows: rows
    h, h_positive = map_of(z), map_of(positive)
    cosines = torch.ones(len(z), dtype=torch.float64) if what.startswith("aligned") else (h * h_positive).sum(1)
    sliced = sampling.startswith("corrected")
    count = 40 if sliced else 2  # the whole sphere looks the same from everywhere, slices are evenly spaced in height
    heights = (2 * torch.arange(count, dtype=torch.float64) + 1) / count - 1
    anchors = torch.stack([heights, (1 - heights.square()).sqrt(), torch.zeros(count)], dim=1)
    partitions, errors = [], []
    for anchor in anchors:  # each with a million negatives of its own
        if sliced:
            negatives = circle_around(anchor.expand(NEGATIVES, 3), 0.0, generator)
        else:
            negatives = uniform_sphere(NEGATIVES, 3, generator)
        weights = torch.exp(KAPPA * map_of(negatives) @ map_of(anchor.unsqueeze(0))[0])
        partitions.append(float(weights.mean().log()))
        errors.append(float(weights.std() / weights.mean()) / NEGATIVES**0.5)
    value = -KAPPA * float(cosines.mean()) + sum(partitions) / count
    error = math.hypot(KAPPA * float(cosines.std()) / len(cosines) ** 0.5, math.hypot(*errors) / count)
    spacing = 1e-3 if sliced and what == "isometry" else 0.0  # of the midpoint rule over 40 heights
    assert abs(value - protocol.closed_forms()[sampling][what]) < 3 * error + spacing


@pytest.mark.parametrize("sampling", ["full", "violated", "corrected_constant", "corrected_radius"])
def test_the_population_loss_of_the_isometry_is_its_closed_form(sampling):
    value = protocol.population_loss(lambda z: z, sampling, torch.Generator().manual_seed(1))
    assert value == pytest.approx(protocol.closed_forms()[sampling]["isometry"], abs=0.06)


def test_batches_of_the_corrected_loss_compare_within_a_slice():
    """Where all embeddings are equal the loss is the log of the candidates, which are those of the slice."""

    def encode(z):
        return torch.tensor([[1.0, 0.0, 0.0]], dtype=z.dtype).expand(len(z), 3)

    loss = protocol.batch_loss(encode, "corrected_constant", 0, torch.Generator().manual_seed(0))
    assert loss.item() == pytest.approx(math.log(protocol.EACH))
    anchors, positives = protocol.drawn("corrected_constant", 4, torch.Generator().manual_seed(0), 8)
    assert len(anchors[:, 0].unique()) == 4
    assert torch.equal(anchors[:, 0], positives[:, 0])


def row(process, sampling, encoder, r2, loss=-1.9):
    return {"process": process, "sampling": sampling, "encoder": encoder, "r2": r2, "loss_less_log_n": loss}


def test_the_verdict_names_what_is_missed():
    good = [row("identity", "full", "mlp", 0.995), row("identity", "violated", "fourier_mlp", 0.05)]
    assert protocol.failures(good) == []
    assert "not in [0.99" in protocol.failures([row("identity", "full", "mlp", 0.98)])[0]
    assert protocol.failures([row("spiral", "full", "mlp", 0.985)]) == []
    assert len(protocol.failures([row("linear", "violated", "fourier_mlp", 0.5, loss=-1.5)])) == 2
    three = [row("identity", "corrected_constant", "mlp", r2) for r2 in (0.6, 0.62, 0.9)]
    assert protocol.failures(three) == [], "the median counts"
    assert protocol.failures(three[2:]) == [], "one seed is no verdict"
    assert len(protocol.failures([*three[1:], three[2]])) == 1


@pytest.mark.slow
def test_the_quick_run_comes_out_as_expected(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["identifiability.py"])
    assert protocol.main(["--quick", "--out", str(tmp_path)])
    assert (tmp_path / "identifiability.json").is_file()
    assert (tmp_path / "identifiability.png").is_file()
    assert "as expected" in capsys.readouterr().out
