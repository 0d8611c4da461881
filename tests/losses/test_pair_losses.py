"""One contract for every loss of pairs: what it takes, its gradients, and what it leaves alone."""

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from mmcl.losses import PAIR_LOSSES

N, DIM = 6, 4
GENERATOR = torch.Generator().manual_seed(0)
A, B, C = (F.normalize(torch.randn(N, DIM, generator=GENERATOR, dtype=torch.float64), dim=1) for _ in range(3))
NEGATIVES = F.normalize(torch.randn(N, 3, DIM, generator=GENERATOR, dtype=torch.float64), dim=2)

ARGUMENTS = {
    "info_nce": ((A, B), {}),
    "nt_xent": ((A, B), {}),
    "sup_con": ((A,), {"labels": [0, 0, 1, 1, -1, 1]}),
    "moco": ((A, B, C), {}),
    "triplet": ((A, B, C), {}),
    "byol_regression": ((A, B), {}),
    "barlow_twins": ((A, B), {}),
    "swav_swapped": ((A, B), {}),
    "an_info_nce": ((A, B), {"concentration": [1.0, 2.0, 3.0, 4.0]}),
    "support_corrected_info_nce": ((A, B, NEGATIVES), {"temperature": 0.3}),
}
CONSTANT = {"moco": (1, 2), "byol_regression": (1,)}
"""Which arguments are constants to the loss."""
CODED = ("swav_swapped",)
"""Whose codes are constants, so that finite differences see more than the gradient."""


def test_every_loss_stands_here():
    assert set(ARGUMENTS) == set(PAIR_LOSSES)


@pytest.fixture(params=PAIR_LOSSES)
def case(request):
    rows, options = ARGUMENTS[request.param]
    return request.param, PAIR_LOSSES[request.param], rows, options


def test_lists_arrays_and_tensors_agree(case):
    _, loss, rows, options = case
    expected = loss(*rows, **options)
    assert expected.shape == ()
    assert expected.isfinite()
    for form in (torch.Tensor.numpy, torch.Tensor.tolist, lambda x: np.asfortranarray(x.numpy()), torch.Tensor.float):
        assert loss(*map(form, rows), **options).item() == pytest.approx(expected.item(), rel=1e-5)


def test_nothing_of_the_caller_is_changed(case):
    _, loss, rows, options = case
    given = [each.clone() for each in rows]
    loss(*given, **options)
    for one, other in zip(given, rows, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", [name for name in PAIR_LOSSES if name not in CODED])
def test_gradients_equal_finite_differences(name):
    loss, (rows, options) = PAIR_LOSSES[name], ARGUMENTS[name]
    moving = [i for i in range(len(rows)) if i not in CONSTANT.get(name, ())]

    def value(*moved):
        arguments = list(rows)
        for place, each in zip(moving, moved, strict=True):
            arguments[place] = each
        return loss(*arguments, **options)

    assert torch.autograd.gradcheck(value, tuple(rows[i].clone().requires_grad_() for i in moving))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_stays_finite(case, dtype):
    _, loss, rows, options = case
    leaves = [each.to(dtype).requires_grad_() for each in rows]
    loss(*leaves, **options).backward()
    for leaf in leaves:
        assert leaf.grad is None or leaf.grad.isfinite().all()


def test_autocast_changes_nothing(case):
    _, loss, rows, options = case
    rows = [each.float() for each in rows]
    plain = loss(*rows, **options)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(loss(*rows, **options), plain)


def test_shapes_that_do_not_fit_are_refused(case):
    _, loss, rows, options = case
    with pytest.raises(ValueError, match="got|same number of rows|two or more views"):
        loss(rows[0][:, :3] if len(rows) == 1 else rows[0], *[each[..., :-1] for each in rows[1:]], **(
            options | ({"labels": [0, 0]} if len(rows) == 1 else {})
        ))  # fmt: skip
    if len(rows) > 1:
        with pytest.raises(ValueError, match="got|same number of rows|two or more views"):
            loss(rows[0], *[each[:-1] for each in rows[1:]], **options)


def test_none_gives_a_value_a_row_whose_mean_is_the_loss(case):
    name, loss, rows, options = case
    if name in ("barlow_twins", "swav_swapped"):
        with pytest.raises(TypeError, match="reduction"):
            loss(*rows, **options, reduction="none")
        return
    each = loss(*rows, **options, reduction="none")
    assert each.shape in ((N,), (2 * N,))
    counted = each[torch.tensor(options["labels"]) >= 0] if "labels" in options else each
    torch.testing.assert_close(counted.mean(), loss(*rows, **options))
