"""info_nce against a loop, by hand, and what it refuses."""

import math

import numpy as np
import pytest
import torch

from mmcl.losses import info_nce

N, K, DIM = 5, 7, 4


def loop(query, key, candidates, scale):
    """candidates[i]: the other rows that query i is asked about."""
    losses = []
    for q, own, others in zip(query.tolist(), key.tolist(), candidates, strict=True):
        logits = [scale * sum(a * b for a, b in zip(q, row, strict=True)) for row in (own, *others)]
        losses.append(math.log(sum(math.exp(logit - logits[0]) for logit in logits)))
    return torch.tensor(losses, dtype=torch.float64)


@pytest.fixture
def rows(unit_rows):
    return unit_rows(N, DIM, 1, torch.float64), unit_rows(N, DIM, 2, torch.float64)


def negatives_of(kind, key, unit_rows):
    """(what info_nce takes, the other candidates of each query)."""
    if kind == "batch":
        return None, [[row for j, row in enumerate(key.tolist()) if j != i] for i in range(N)]
    if kind == "shared":
        shared = unit_rows(K, DIM, 3, torch.float64)
        return shared, [shared.tolist()] * N
    own = unit_rows(N * K, DIM, 4, torch.float64).reshape(N, K, DIM)
    return own, own.tolist()


KINDS = ["batch", "shared", "own"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scale", [1.0, 12.5, torch.tensor(3.0, dtype=torch.float64)])
def test_info_nce_equals_a_loop(kind, scale, rows, unit_rows):
    query, key = rows
    negatives, candidates = negatives_of(kind, key, unit_rows)
    expected = loop(query, key, candidates, float(scale))
    each = info_nce(query, key, negatives, scale=scale, reduction="none")
    torch.testing.assert_close(each, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(info_nce(query, key, negatives, scale=scale), expected.mean(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_equal_finite_differences(kind, rows, unit_rows):
    negatives, _ = negatives_of(kind, rows[1], unit_rows)
    scale = torch.tensor(2.0, dtype=torch.float64)
    inputs = [each.requires_grad_() for each in (*rows, scale, *([] if negatives is None else [negatives]))]

    def value(query, key, scale, negatives=None):
        return info_nce(query, key, negatives, scale=scale)

    assert torch.autograd.gradcheck(value, tuple(inputs))


@pytest.mark.parametrize("kind", KINDS)
def test_lists_numpy_and_tensors_agree(kind, rows, unit_rows):
    query, key = rows
    negatives, _ = negatives_of(kind, key, unit_rows)
    expected = info_nce(query, key, negatives).item()
    for form in (lambda x: x.tolist(), lambda x: x.numpy(), lambda x: np.asfortranarray(x.numpy()), torch.Tensor.float):
        given = None if negatives is None else form(negatives)
        assert info_nce(form(query), form(key), given).item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("forms", [(np.float32, np.float64), (np.float64, np.float16)])
def test_rows_may_come_in_different_precision(forms, rows):
    query, key = (each.numpy().astype(form) for each, form in zip(rows, forms, strict=True))
    expected, shared = info_nce(*rows).item(), info_nce(rows[0], rows[0], rows[1]).item()
    assert info_nce(query, key).item() == pytest.approx(expected, abs=1e-3)
    assert info_nce(query, query, negatives=key).item() == pytest.approx(shared, abs=1e-3)


def test_clip_logits_by_hand():
    assert info_nce(torch.eye(2), torch.eye(2), scale=2.0).item() == pytest.approx(0.126928011, abs=1e-7)
    one = info_nce([[1.0, 0.0]], [[1.0, 0.0]], negatives=[[0.0, 1.0]], scale=2.0)
    assert one.item() == pytest.approx(0.126928011, abs=1e-7), "one query with a negative of its own is no lone row"


@pytest.mark.parametrize("count", [2, 4, 65])
def test_equal_logits_give_the_log_of_their_number(count):
    assert info_nce(torch.ones(count, 3), torch.ones(count, 3)).item() == pytest.approx(math.log(count))
    shared = info_nce(torch.ones(2, 3), torch.ones(2, 3), negatives=torch.ones(count - 1, 3))
    assert shared.item() == pytest.approx(math.log(count))


def test_a_scale_of_100_stays_finite_in_float16(unit_rows):
    query, key = (unit_rows(N, DIM, seed, torch.float16).requires_grad_() for seed in (1, 2))
    info_nce(query, key, scale=100.0).backward()
    assert query.grad.isfinite().all()
    assert key.grad.isfinite().all()


def test_autocast_changes_nothing(rows, unit_rows):
    query, key = (each.float() for each in rows)
    for kind in KINDS:
        negatives, _ = negatives_of(kind, key, unit_rows)
        negatives = None if negatives is None else negatives.float()
        plain = info_nce(query, key, negatives)
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(info_nce(query, key, negatives), plain)


ONES = torch.ones(N, DIM)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: info_nce(ONES[:1], ONES[:1]), ValueError, "at least 2 rows, got 1"),
        (lambda: info_nce(ONES[:0], ONES[:0]), ValueError, "at least 2 rows, got 0"),
        (lambda: info_nce(ONES, ONES[:3]), ValueError, r"query has 5.*key has 3"),
        (lambda: info_nce(ONES, ONES[:, :3]), ValueError, r"key.*4.*\(5, 3\)"),
        (lambda: info_nce(ONES[0], ONES), ValueError, r"query.*\(4,\)"),
        (lambda: info_nce(ONES, ONES, ONES[:, :3]), ValueError, r"\(k, 4\) or \(5, k, 4\), got \(5, 3\)"),
        (lambda: info_nce(ONES, ONES, torch.ones(3, 2, DIM)), ValueError, r"got \(3, 2, 4\)"),
        (lambda: info_nce(ONES, ONES, ONES[0]), ValueError, r"got \(4,\)"),
        (lambda: info_nce(ONES, ONES, ONES[:0]), ValueError, "no row"),
        (lambda: info_nce(ONES[:0], ONES[:0], ONES), ValueError, "row"),
        (lambda: info_nce(ONES, ONES, reduction="sum"), KeyError, r"reduction 'sum'.*'mean', 'none'"),
        (lambda: info_nce([["a"]], [["b"]]), ValueError, "query"),
    ],
)
def test_bad_calls_are_refused_by_name(call, error, message):
    with pytest.raises(error, match=message):
        call()
