"""Lower bounds by small encoders: the bound and its error by hand, nothing where nothing is, and beyond pairs."""

import copy
import math

import numpy as np
import pytest
import torch

from mmcl.metrics.additions import Addition, Best, Fit, add
from mmcl.metrics.bounds import estimate, fitted_and_stopping, interaction_bounds, measured
from mmcl.metrics.objectives import Batches, WholeTable, shuffles
from mmcl.scores import Hadamard, SumOfPairs
from mmcl.synthetic.joints import parity, random_pairwise, softened_sum


def draw(joint, count, seed=0):
    return joint.sample(count, torch.Generator().manual_seed(seed))


def as_fit(module, folds=1):
    """The same module on every fold."""
    parameters = {name: torch.stack([value.detach()] * folds) for name, value in module.named_parameters()}
    return Fit(module, parameters, {})


def opened(inputs, score, gate=1.5, below=None):
    module = Addition(inputs, score, below)
    with torch.no_grad():
        module.gate.fill_(gate)
    return module


def test_an_addition_is_the_gate_times_its_score_and_what_is_below():
    inputs = {"a": torch.tensor([0, 1, 2, 1]), "b": torch.randn(4, 3), "c": torch.tensor([1, 0, 0, 1])}
    below = opened(inputs, SumOfPairs(("a", "b", "c"), 8), 0.7)
    encode = copy.deepcopy(below).encode
    module = opened(inputs, Hadamard(("a", "b", "c"), 8), 1.3, below)
    orders = {"a": torch.tensor([2, 0]), "c": torch.tensor([3, 1])}
    encoded = {name: rows.detach() for name, rows in encode(inputs).items()}
    rows, products = module(inputs, encoded, {"b": orders})
    unit = module.encode(inputs)
    torch.testing.assert_close(rows, 1.3 * module.score(unit) + 0.7 * below.score(encoded))
    mixed = {"a": inputs["a"][[2, 0]], "b": inputs["b"][[1, 1]], "c": inputs["c"][[3, 1]]}
    expected = 1.3 * module.score(module.encode(mixed)) + 0.7 * below.score(encode(mixed))
    torch.testing.assert_close(products["b"][1], expected)


def test_an_addition_starts_as_nothing():
    inputs = draw(parity(), 50)
    rows, products = Addition(inputs, Hadamard(tuple(inputs), 8))(inputs, {}, shuffles(inputs, 50, seeded(), 20))
    assert rows.shape == (50,)
    assert not rows.any()
    for each in products.values():
        assert each.shape == (50, 20)
        assert not each.any()


def test_the_bound_of_two_modalities_equals_the_sum_over_all_pairs_of_rows():
    """Every row meets every other, so nothing is drawn."""
    inputs = draw(random_pairwise(n=4, m=2), 60)
    module = opened(inputs, SumOfPairs(tuple(inputs), 8))
    shares = measured(as_fit(module), None, inputs, [torch.arange(60)], seed=0)
    unit = {name: rows.detach().double() for name, rows in module.encode(inputs).items()}
    scores = 1.5 * module.score.scale.detach() * unit["x1"] @ unit["x2"].T
    expected = scores.diagonal().mean() - scores.flatten().logsumexp(0) + 2 * math.log(60)
    assert float(shares.mean()) == pytest.approx(float(expected), abs=1e-5)


def test_the_error_of_a_bound_is_how_much_it_varies():
    """A fixed score on 150 samples: their bounds spread as each of them says they do."""
    joint = softened_sum(n=4)
    module = opened(draw(joint, 500), Hadamard(joint.modalities, 8, temperature=0.3))
    found = []
    for seed in range(150):
        inputs = draw(joint, 300, 100 + seed)
        found.append(measured(as_fit(module), None, inputs, [torch.arange(300)], seed))
    bounds = np.array([float(shares.mean()) for shares in found])
    told = np.array([float(shares.std()) / math.sqrt(300) for shares in found])
    assert np.median(told) == pytest.approx(bounds.std(), rel=0.2)


def test_every_row_is_measured_once_and_never_fitted_to_where_it_is():
    parts = list(torch.randperm(203).tensor_split(5))
    fitted, stopping = fitted_and_stopping(parts)
    assert sorted(torch.cat(parts).tolist()) == list(range(203))
    for fold, held in enumerate(parts):
        used = {*fitted[fold].tolist(), *stopping[fold].tolist()}
        assert not used & set(held.tolist())
        assert not set(fitted[fold].tolist()) & set(stopping[fold].tolist())
        assert len(used) == 162


def test_each_fold_keeps_what_its_own_rows_liked_best():
    inputs = draw(parity(), 20)
    fit = as_fit(Addition(inputs, SumOfPairs(tuple(inputs), 4)), folds=2)
    best = Best.of(fit, torch.zeros(2))
    fit.parameters["gate"] = torch.tensor([3.0, 4.0])
    best.look(fit, torch.tensor([0.5, -0.5]))
    assert best.parameters["gate"].tolist() == [3.0, 0.0]
    assert best.values.tolist() == [0.5, 0.0]
    assert any(best.look(fit, torch.tensor([-1.0, -1.0])) for _ in range(20))


def both_objectives(inputs, base, fitted, stopping):
    return WholeTable(inputs, base, fitted, stopping), Batches(inputs, base, fitted, stopping, 64, seeded())


def seeded():
    return torch.Generator().manual_seed(0)


def test_the_whole_table_is_what_batches_estimate():
    """On three folds, with something below: the bound of all tuples against the bound of tuples that are drawn."""
    inputs = draw(softened_sum(n=4), 1500)
    rows = torch.arange(1500).reshape(3, 500)
    base = as_fit(opened(inputs, SumOfPairs(tuple(inputs), 8), 1.0), folds=3)
    fit = as_fit(opened(inputs, Hadamard(tuple(inputs), 8), 0.5, base.on_fold(0)), folds=3)
    table, batches = both_objectives(inputs, base, rows, rows.roll(1, 0))
    torch.testing.assert_close(table.bound(fit), batches.bound(fit), rtol=0.05, atol=0.02)
    drawn = torch.stack([batches.loss(fit, step).detach() for step in range(100)]).mean(0)
    values = torch.tensor(math.log(64 * 64))  # of a batch's products, whose mean the loss leaves out
    torch.testing.assert_close(drawn - values, table.loss(fit, 0).detach(), rtol=0.05, atol=0.03)


def test_the_bound_of_the_whole_table_by_hand():
    inputs = {"a": torch.tensor([0, 0, 1, 1]), "b": torch.tensor([0, 0, 1, 0])}
    fit = as_fit(opened(inputs, SumOfPairs(("a", "b"), 8)))
    rows = torch.arange(4)[None]
    unit = {
        name: value.detach() for name, value in fit.module.encode({"a": torch.arange(2), "b": torch.arange(2)}).items()
    }
    scores = 1.5 * fit.module.score.scale.detach() * unit["a"] @ unit["b"].T
    joint, product = torch.tensor([[0.5, 0.0], [0.25, 0.25]]), torch.tensor([[0.375, 0.125], [0.375, 0.125]])
    expected = (joint * scores).sum() - (product * scores.exp()).sum().log()
    assert float(WholeTable(inputs, None, rows, rows).bound(fit)) == pytest.approx(float(expected), abs=1e-6)


@pytest.mark.parametrize("kind", [0, 1], ids=["table", "batches"])
def test_folds_are_fitted_as_if_alone(kind):
    """One batch of parameters, and no fold hears of another."""
    inputs = draw(random_pairwise(n=4), 300)
    rows = torch.arange(300).reshape(3, 100)
    objective = both_objectives(inputs, None, rows, rows.roll(1, 0))[kind]
    fit = add(lambda: SumOfPairs(tuple(inputs), 8), None, objective, 3, 40)
    assert len({round(float(gate), 6) for gate in fit.parameters["gate"]}) == 3
    orders = shuffles(inputs, 100, seeded())
    together, _ = fit({name: value[rows] for name, value in inputs.items()}, {}, orders)
    alone, _ = fit.on_fold(1)({name: value[rows[1]] for name, value in inputs.items()}, {}, orders)
    torch.testing.assert_close(together[1], alone)


def test_noise_is_added_to_vectors_alone():
    inputs = {"a": torch.zeros(300, 3), "b": torch.arange(300) % 4}
    rows = torch.arange(300).reshape(3, 100)
    batches = Batches(inputs, None, rows, rows, 64, seeded())
    assert batches._noisy(inputs["a"]).std() == pytest.approx(0.3, rel=0.1)
    assert batches._noisy(inputs["b"]) is inputs["b"]


def test_parity_lies_beyond_pairs():
    found = interaction_bounds(draw(parity(2.0), 1000), folds=4, dim=8, steps=120)
    assert found.beyond.low > 0.3
    assert found.beyond.nats == pytest.approx(parity(2.0).total_correlation(), rel=0.15)
    assert found.pairwise.low == 0
    assert found.total.nats == pytest.approx(found.pairwise.nats + found.beyond.nats)


def test_the_same_seed_gives_the_same_bounds():
    inputs = draw(random_pairwise(n=3, m=2), 300)
    inputs["x2"] = torch.nn.functional.one_hot(inputs["x2"]).float()
    runs = [interaction_bounds(inputs, folds=3, dim=8, steps=15, seed=seed) for seed in (0, 0, 1)]
    assert runs[0] == runs[1] != runs[2]
    assert runs[0].pairwise.nats != 0


def test_two_modalities_hold_nothing_beyond_pairs():
    found = interaction_bounds(draw(random_pairwise(n=4, m=2), 800), folds=3, dim=8, steps=60)
    assert found.pairwise.low > 0
    assert (found.beyond.nats, found.beyond.low, found.beyond.high, found.beyond.p_value) == (0, 0, 0, 1)


def test_an_estimate_is_as_unsure_as_its_folds_are():
    parts = list(torch.arange(300).tensor_split(3))
    shares = torch.cat([torch.full((100,), value, dtype=torch.float64) for value in (0.1, 0.2, 0.6)])
    found = estimate(shares, parts, 0.95)
    assert found.nats == pytest.approx(0.3)
    reach = 1.959964 * np.std([0.1, 0.2, 0.6], ddof=1) / math.sqrt(3)
    assert (found.low, found.high) == pytest.approx((0.3 - reach, 0.3 + reach), rel=1e-4)


def test_what_cannot_be_bounded_is_refused():
    inputs = draw(parity(), 300)
    with pytest.raises(ValueError, match="two modalities"):
        interaction_bounds({"x1": inputs["x1"]})
    with pytest.raises(ValueError, match="200 rows and 3 folds"):
        interaction_bounds({name: value[:100] for name, value in inputs.items()})
    with pytest.raises(ValueError, match="200 rows and 3 folds"):
        interaction_bounds(inputs, folds=2)
    with pytest.raises(ValueError, match="x1 has 300, x2 has 299"):
        interaction_bounds({**inputs, "x2": inputs["x2"][:299]})
