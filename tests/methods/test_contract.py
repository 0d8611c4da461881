"""One contract for every method: a loss that trains, hooks, and a state that a checkpoint holds whole."""

import copy

import pytest
import torch

from mmcl.methods import METHODS


@pytest.fixture(params=METHODS)
def name(request):
    return request.param


def step(method, optimiser, batch):
    views, rows, labels = batch
    optimiser.zero_grad()
    loss = method(views, rows=rows, labels=labels)
    loss.backward()
    optimiser.step()
    method.after_step()
    return loss.item()


def optimiser_of(method, lr=0.05):
    return torch.optim.SGD(list(method.trained_parameters()), lr=lr)


def test_the_loss_of_a_batch_falls_and_every_trained_parameter_moves(name, make, batch):
    method = make(name)
    before = {key: value.clone() for key, value in method.named_parameters()}
    optimiser = torch.optim.Adam(list(method.trained_parameters()), lr=1e-2)
    losses = [step(method, optimiser, batch(16)) for _ in range(60)]
    assert sum(losses[-5:]) < sum(losses[:5])
    trained = {id(parameter) for parameter in method.trained_parameters()}
    for key, parameter in method.named_parameters():
        if id(parameter) in trained:
            assert not torch.equal(parameter, before[key]), key


def test_a_state_dict_holds_all_that_a_method_remembers(name, make, batch):
    """Two steps in one go, or with everything but the state_dict lost between them."""
    method, other = make(name), make(name)
    optimiser = optimiser_of(method)
    step(method, optimiser, batch(seed=1))
    other.load_state_dict(copy.deepcopy(method.state_dict()))
    assert set(dict(method.named_buffers())) == set(dict(other.named_buffers()))
    losses = []
    for each in (method, other):
        torch.manual_seed(5)  # as `pretrain` does before each step
        losses.append(step(each, optimiser_of(each), batch(seed=2)))
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    for key, value in method.state_dict().items():
        torch.testing.assert_close(value, other.state_dict()[key], msg=lambda text, key=key: f"{key}: {text}")


def test_inputs_are_not_changed(name, make, batch):
    views, rows, labels = batch()
    given = [view.clone() for view in views]
    make(name)(views, rows=rows, labels=labels)
    assert all(torch.equal(a, b) for a, b in zip(views, given))


def test_one_tensor_in_place_of_views_is_refused(name, make, batch):
    views, rows, labels = batch()
    with pytest.raises(ValueError, match="views in a list, got one tensor"):
        make(name)(views[0], rows=rows, labels=labels)


def test_views_of_different_rows_are_refused(name, make, batch):
    (first, second), rows, labels = batch()
    with pytest.raises(ValueError, match=r"same rows, got \[8, 7\]"):
        make(name)([first, second[:7]], rows=rows, labels=labels)


@pytest.mark.parametrize("name", ["memory_bank", "deep_cluster"])
def test_rows_must_be_of_the_dataset(name, make, batch):
    views, rows, _ = batch()
    method = make(name)
    for given, message in ((None, "needs rows"), (rows[:3], r"\(8,\) positions"), (rows + 40, "made for 40 rows")):
        with pytest.raises(ValueError, match=message):
            method(views, rows=given)
