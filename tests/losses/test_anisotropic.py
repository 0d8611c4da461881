"""AnInfoNCE and the support-corrected loss: against the definition, InfoNCE, and by blocks."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from mmcl.losses import an_info_nce, an_info_nce_ensemble, info_nce, support_corrected_info_nce

D = torch.float64


def unit(*shape, seed=0):
    return F.normalize(torch.randn(*shape, dtype=D, generator=torch.Generator().manual_seed(seed)), dim=-1)


@given(st.floats(0.05, 5), st.integers(2, 9), st.integers(1, 6), st.integers(0, 99))
def test_equal_concentrations_are_info_nce_on_the_sphere(tau, count, width, seed):
    a, b = unit(count, width, seed=seed), unit(count, width, seed=seed + 1)
    ours = an_info_nce(a, b, torch.full((width,), 1 / tau, dtype=D), reduction="none")
    torch.testing.assert_close(ours, info_nce(a, b, scale=1 / tau, reduction="none"), rtol=1e-10, atol=1e-10)


def loop(a, b, scales, negatives=None):
    losses = []
    for i, row in enumerate(a):
        others = [b[j] for j in range(len(b)) if j != i] if negatives is None else list(negatives[i])
        logits = [float(-0.5 * ((row - other) ** 2 * scales).sum()) for other in (b[i], *others)]
        losses.append(math.log(sum(math.exp(each - logits[0]) for each in logits)))
    return torch.tensor(losses, dtype=D)


@pytest.mark.parametrize("own", [False, True])
def test_an_info_nce_equals_a_loop(own):
    generator = torch.Generator().manual_seed(3)
    a, b = (torch.randn(5, 3, dtype=D, generator=generator) for _ in range(2))
    negatives = torch.randn(5, 4, 3, dtype=D, generator=generator) if own else None
    scales = torch.tensor([0.5, 2.0, 7.0], dtype=D)
    ours = an_info_nce(a, b, scales, negatives, reduction="none")
    torch.testing.assert_close(ours, loop(a, b, scales, negatives), rtol=1e-12, atol=1e-12)


def test_gradients_reach_both_sides_and_the_concentration():
    a, b, scales = unit(5, 3).requires_grad_(), unit(5, 3, seed=1).requires_grad_(), torch.rand(3, dtype=D) + 0.5
    scales.requires_grad_()
    assert torch.autograd.gradcheck(lambda a, b, scales: an_info_nce(a, b, scales), (a, b, scales))
    assert torch.autograd.gradcheck(lambda a, b, scales: an_info_nce(a, b, scales, block_size=2), (a, b, scales))
    dense = torch.autograd.grad(an_info_nce(a, b, scales), (a, b, scales))
    blocks = torch.autograd.grad(an_info_nce(a, b, scales, block_size=2), (a, b, scales))
    for one, other in zip(dense, blocks, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_an_ensemble_is_the_weighted_sum():
    pairs = [(unit(5, 3, seed=seed), unit(5, 3, seed=seed + 9)) for seed in (0, 1)]
    scales = torch.tensor([[1.0, 2, 3], [9, 1, 1]], dtype=D)
    each = [float(an_info_nce(*pair, scale)) for pair, scale in zip(pairs, scales, strict=True)]
    assert float(an_info_nce_ensemble(pairs, scales)) == pytest.approx(sum(each) / 2)
    assert float(an_info_nce_ensemble(pairs, scales, [3, 0.5])) == pytest.approx(3 * each[0] + 0.5 * each[1])
    with pytest.raises(ValueError, match="2 kinds of pairs need as many"):
        an_info_nce_ensemble(pairs, scales[:1])


def test_support_corrected_asks_each_anchor_about_its_own_negatives():
    anchor, positive, negatives = unit(4, 3), unit(4, 3, seed=1), unit(4, 6, 3, seed=2)
    ours = support_corrected_info_nce(anchor, positive, negatives, 0.3, reduction="none")
    for i in range(4):
        logits = torch.stack([anchor[i] @ positive[i], *(negatives[i] @ anchor[i])]) / 0.3
        assert float(ours[i]) == pytest.approx(float(F.cross_entropy(logits, torch.tensor(0))), abs=1e-12)
    same = torch.ones(4, 3, dtype=D)
    value = support_corrected_info_nce(same, same, same.unsqueeze(1).expand(4, 6, 3), 1.0)
    assert float(value) == pytest.approx(math.log(7)), "the positive counts"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: an_info_nce(unit(4, 3), unit(4, 3), torch.ones(2)), r"\(3,\), got \(2,\)"),
        (lambda: an_info_nce(unit(4, 3), unit(4, 3), torch.tensor([1.0, 0, 1])), "entry 1 is 0"),
        (lambda: an_info_nce(unit(4, 3), unit(4, 3), torch.tensor([1.0, 1, torch.inf])), "entry 2 is inf"),
        (lambda: an_info_nce(unit(4, 3), unit(4, 3), torch.ones(3), unit(5, 2)), r"\(4, k, 3\), got \(5, 2\)"),
        (lambda: an_info_nce(unit(1, 3), unit(1, 3), torch.ones(3)), "at least 2 rows"),
        (
            lambda: support_corrected_info_nce(unit(4, 3), unit(4, 3), unit(6, 3), 0.3),
            r"each anchor's own, got \(6, 3\)",
        ),
    ],
)
def test_bad_calls_are_refused_by_name(call, message):
    with pytest.raises(ValueError, match=message):
        call()
