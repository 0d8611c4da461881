"""Losses by blocks: the dense value and gradients wherever there is a block size, in little memory, at any scale."""

import subprocess
import sys

import pytest
import torch
from torch.nn import functional as F

from mmcl.losses import contrastive_loss, info_nce, pairwise_loss
from mmcl.losses.questions import Question, cross_entropy, dense_cross_entropy
from mmcl.scores import SumOfPairs


def leaves(*shapes):
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]


def same_gradients(ours, theirs, inputs, tolerance=1e-12):
    grads = (torch.autograd.grad(loss, inputs, retain_graph=True) for loss in (ours, theirs))
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("block_size", [1, 4, 10, 11, 50])
def test_info_nce_by_blocks_is_cross_entropy(reduction, block_size):
    query, key, scale, weights = leaves((11, 3), (11, 3), (), (11,))
    ours = info_nce(query, key, scale=scale, reduction=reduction, block_size=block_size)
    theirs = F.cross_entropy(scale * query @ key.T, torch.arange(11), reduction=reduction)
    torch.testing.assert_close(ours, theirs, rtol=1e-13, atol=1e-13)
    same_gradients((weights.detach() * ours).sum(), (weights.detach() * theirs).sum(), [query, key, scale])


@pytest.mark.parametrize("options", ["own", "keys", "own and keys", "neither"])
@pytest.mark.parametrize("mean", [True, False])
def test_a_part_of_the_rows_asks_among_all_candidates(options, mean):
    """Rows 4 to 9 of 13, as one process of several has them."""
    query, item, own_item, weights = leaves((5, 3), (13, 3), (5, 3), (5,))
    groups = torch.arange(13) % 4
    question = Question(
        query, item, own_item if "own" in options else None, 4, [(groups[4:9], groups)] if "keys" in options else []
    )
    inputs = [query, item, *([own_item] if "own" in options else [])]
    dense = dense_cross_entropy(question)
    for row in range(5):  # the definition, a row at a time
        logits = [float(query[row].detach() @ each.detach()) for each in item]
        if "own" in options:
            logits[4 + row] = float(query[row].detach() @ own_item[row].detach())
        right = [c == 4 + row or ("keys" in options and c % 4 == (4 + row) % 4) for c in range(13)]
        mass = torch.tensor(logits, dtype=torch.float64).softmax(0)[torch.tensor(right)].sum()
        assert float(dense[row].detach()) == pytest.approx(-float(mass.log()), abs=1e-12)
    outer = torch.ones(()) if mean else weights.detach()
    theirs = dense.mean() if mean else dense
    for block_size in (1, 2, 4):
        ours = cross_entropy(question, block_size, mean)
        torch.testing.assert_close(ours, theirs, rtol=1e-13, atol=1e-13)
        same_gradients((outer * ours).sum(), (outer * theirs).sum(), inputs)


@pytest.mark.parametrize("frozen", ["query", "item"])
def test_a_frozen_side_gets_no_gradient(frozen):
    query, item = leaves((9, 3), (9, 3))
    (query if frozen == "query" else item).requires_grad_(False)
    inputs = [each for each in (query, item) if each.requires_grad]
    same_gradients(info_nce(query, item, block_size=4), info_nce(query, item), inputs)
    with torch.no_grad():
        assert not info_nce(query, item, block_size=4).requires_grad
    torch.testing.assert_close(info_nce(query.detach(), item.detach(), block_size=4), info_nce(query, item))


@pytest.mark.parametrize("size", [1e-3, 1e2, 1e4])
def test_logits_of_any_size_stay_finite(size):
    """Candidates that are right, and far below the best, too: their share is beyond float32's smallest number."""
    query, item = (torch.randn(40, 8, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    query = (size * query).requires_grad_()
    item.requires_grad_()
    question = Question(query, item, keys=[(torch.arange(40) // 3, torch.arange(40) // 3)])
    ours, theirs = cross_entropy(question, 7), cross_entropy(question, 40)
    assert ours.isfinite()
    torch.testing.assert_close(ours, theirs)
    for a, b in zip(*(torch.autograd.grad(loss, (query, item)) for loss in (ours, theirs)), strict=True):
        assert a.isfinite().all()
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5 * size)


@pytest.mark.parametrize("block_size", [1, 4])
def test_pairs_by_blocks_are_pairs(block_size, unit_embeddings):
    score = SumOfPairs(("image", "audio", "text"), 3).double()
    rows = {name: each.double().requires_grad_() for name, each in unit_embeddings(3, 9, 3).items()}
    ours, theirs = pairwise_loss(score, rows, block_size=block_size), pairwise_loss(score, rows)
    torch.testing.assert_close(ours, theirs, rtol=1e-13, atol=1e-13)
    same_gradients(ours, theirs, [*rows.values(), *score.parameters()])


def test_what_blocks_cannot_do_is_said(unit_embeddings):
    query, key = leaves((9, 3), (9, 3))
    with pytest.raises(ValueError, match="block_size must be at least 1, got 0"):
        info_nce(query, key, block_size=0)
    with pytest.raises(ValueError, match="block_size is for the batch's own keys"):
        info_nce(query, key, negatives=key, block_size=4)
    for reduction in ("mean", "none"):
        loss = info_nce(query, key, reduction=reduction, block_size=4).sum()
        with pytest.raises(RuntimeError, match="by blocks has no second derivatives; pass block_size=n"):
            torch.autograd.grad(loss, query, create_graph=True)


def test_autocast_lowers_nothing(unit_embeddings):
    score = SumOfPairs(("image", "audio", "text"), 3)
    rows = {name: each.requires_grad_() for name, each in unit_embeddings(3, 9, 3).items()}
    plain = contrastive_loss(score, rows, block_size=4)
    expected = torch.autograd.grad(plain, list(rows.values()))
    with torch.autocast("cpu", torch.bfloat16):
        cast = contrastive_loss(score, rows, block_size=4)
        found = torch.autograd.grad(cast, list(rows.values()))
        kept = info_nce(rows["image"], rows["text"], reduction="none", block_size=4)
        by_row = torch.autograd.grad(kept.mean(), rows["image"])
    torch.testing.assert_close(cast, plain)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(by_row, torch.autograd.grad(info_nce(rows["image"], rows["text"]), rows["image"]))


PEAK = """
import torch
from pathlib import Path
from mmcl.losses import contrastive_loss
from mmcl.scores import Hadamard
def status(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(field))
def rows(count):
    return {name: torch.randn(count, 32).div(6).requires_grad_() for name in ("a", "b", "c")}
score = Hadamard(("a", "b", "c"), 32)
contrastive_loss(score, rows(64), block_size=8).backward()
batch = rows(8192)
before = status("VmRSS")
Path("/proc/self/clear_refs").write_text("5")
contrastive_loss(score, batch).backward()
print(status("VmHWM") - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="memory of a process is read from /proc")
def test_memory_is_that_of_blocks():
    """One matrix of logits of 8,192 rows takes 256 MiB, and the dense loss of three modalities above 1.5 GiB."""
    run = subprocess.run([sys.executable, "-c", PEAK], capture_output=True, text=True, check=True)
    assert float(run.stdout) < 128
