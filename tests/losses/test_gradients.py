"""Gradients against finite differences, blockwise against dense, and CLIP's and Symile's own code."""

import open_clip
import pytest
import torch

from mmcl.losses import blockwise, contrastive_loss, joint_loss, pairwise_loss, questions
from mmcl.scores import Hadamard, SumOfPairs

DIM = 3
N = 4
GROUPS = {"image": [0, 1, 0, 2], "audio": [0, 0, 0, 1]}


def seeded():
    return torch.Generator().manual_seed(5)


LOSSES = {
    "each": lambda s, e: contrastive_loss(s, e),
    "tuple": lambda s, e: contrastive_loss(s, e, guess=[("image", "audio")]),
    "tuples": lambda s, e: contrastive_loss(s, e, guess=[("image", "audio"), ("text",)]),
    "shuffled": lambda s, e: contrastive_loss(s, e, candidates="shuffled", generator=seeded()),
    "shuffled tuple": lambda s, e: contrastive_loss(s, e, [("text", "audio")], "shuffled", generator=seeded()),
    "groups": lambda s, e: contrastive_loss(s, e, guess=[("image", "audio"), ("audio",)], groups=GROUPS),
    "blockwise": lambda s, e: contrastive_loss(s, e, block_size=2),
    "blockwise shuffled groups": lambda s, e: contrastive_loss(
        s, e, candidates="shuffled", groups=GROUPS, block_size=3, generator=seeded()
    ),
    "joint": lambda s, e: joint_loss(s, e, generator=seeded()),
}


def leaves_of(score, embeddings):
    """Double-precision copies of the embeddings, and the score's parameters that a full batch uses."""
    rows = {name: value.double().requires_grad_() for name, value in embeddings.items()}
    return rows, [p for name, p in score.named_parameters() if not name.endswith("neutral")]


@pytest.mark.parametrize("loss", LOSSES)
def test_gradients_equal_finite_differences(kind, loss, make_score, unit_embeddings):
    score = make_score(kind, 3, DIM).double()
    rows, parameters = leaves_of(score, unit_embeddings(3, N, DIM))

    def value(*tensors):
        return LOSSES[loss](score, dict(zip(rows, tensors, strict=False)))

    fast = kind != "pairs_and_hadamard"  # a random direction; the sum of both is checked entry by entry
    assert torch.autograd.gradcheck(value, (*rows.values(), *parameters), eps=1e-6, atol=1e-7, fast_mode=fast)


def test_pairwise_gradients_equal_finite_differences(make_score, unit_embeddings):
    score = make_score("sum_of_pairs", 3, DIM).double()
    rows, parameters = leaves_of(score, unit_embeddings(3, N, DIM))

    def value(*tensors):
        return pairwise_loss(score, dict(zip(rows, tensors, strict=False)))

    assert torch.autograd.gradcheck(value, (*rows.values(), *parameters), eps=1e-6, atol=1e-7)


BLOCKED = {
    "each": {},
    "tuples": {"guess": [("image", "text"), ("audio",)]},
    "shuffled": {"candidates": "shuffled"},
    "groups": {"groups": "random"},
    "shuffled groups": {"candidates": "shuffled", "groups": "random", "guess": [("image", "text")]},
}


@pytest.mark.parametrize("options", BLOCKED)
@pytest.mark.parametrize("block_size", [1, 7, 22, 23])
def test_blockwise_equals_dense_in_value_and_gradient(kind, options, block_size, make_score, unit_embeddings):
    score, options = make_score(kind, 3, DIM).double(), dict(BLOCKED[options])
    rows, parameters = leaves_of(score, unit_embeddings(3, 23, DIM))
    if options.get("groups"):
        options["groups"] = {name: torch.randint(0, 6, (23,), generator=seeded()) for name in rows}
    dense = contrastive_loss(score, rows, generator=seeded(), **options)
    blocks = contrastive_loss(score, rows, generator=seeded(), block_size=block_size, **options)
    torch.testing.assert_close(blocks, dense, rtol=1e-13, atol=1e-13)
    leaves = [*rows.values(), *parameters]
    for a, b in zip(torch.autograd.grad(blocks, leaves), torch.autograd.grad(dense, leaves), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-13)


def test_large_batches_are_blocked_without_asking(make_score, unit_embeddings, monkeypatch):
    score, embeddings = make_score("hadamard", 3, DIM), unit_embeddings(3, 23, DIM)
    dense = contrastive_loss(score, embeddings)
    heights, losses_and_mass = [], blockwise.losses_and_mass

    def spy(question, part, *rest):
        heights.append(part.stop - part.start)
        return losses_and_mass(question, part, *rest)

    monkeypatch.setattr(blockwise, "losses_and_mass", spy)
    monkeypatch.setattr(questions, "DENSE_LOGITS", 23 * 23 - 1)
    monkeypatch.setattr(questions, "BLOCK_LOGITS", 10 * 23 + 9)
    monkeypatch.setattr(questions, "LEAST_ROWS", 1)
    torch.testing.assert_close(contrastive_loss(score, embeddings), dense)
    assert heights == [10, 10, 3] * 3


def test_two_modalities_equal_open_clip(unit_embeddings):
    for score in (SumOfPairs(("image", "text"), DIM), Hadamard(("image", "text"), DIM, tied=True)):
        rows = {name: each.requires_grad_() for name, each in unit_embeddings(2, 9, DIM).items()}
        rows["text"] = rows.pop("audio")
        leaves = [*rows.values(), score.logit_scale]
        theirs = open_clip.ClipLoss()(rows["image"], rows["text"], score.logit_scale.exp())
        losses = [contrastive_loss(score, rows)]
        losses += [pairwise_loss(score, rows)] if isinstance(score, SumOfPairs) else []
        for ours in losses:
            torch.testing.assert_close(ours, theirs)
            expected = torch.autograd.grad(theirs, leaves, retain_graph=True)
            for a, b in zip(torch.autograd.grad(ours, leaves), expected, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("m", [3, 4])
def test_shuffled_candidates_equal_symile(m, unit_embeddings):
    """Symile's "n": each modality is the anchor in turn and the others, shuffled one by one, are its candidates."""
    symile = pytest.importorskip("symile")
    rows = {name: each.requires_grad_() for name, each in unit_embeddings(m, 9, DIM).items()}
    score = Hadamard(rows, DIM, temperature=0.2, tied=True)
    leaves = [*rows.values(), score.logit_scale]
    torch.manual_seed(3)
    theirs = symile.Symile("n")(list(rows.values()), score.w[0])
    torch.manual_seed(3)
    others = [tuple(name for name in rows if name != anchor) for anchor in rows]
    ours = contrastive_loss(score, rows, guess=others, candidates="shuffled")
    torch.testing.assert_close(ours, theirs)
    for a, b in zip(torch.autograd.grad(ours, leaves), torch.autograd.grad(theirs, leaves), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_gradients_flow_to_every_parameter_and_to_nothing_else(kind, make_score, unit_embeddings):
    score, embeddings = make_score(kind, 3, DIM), unit_embeddings(3, N, DIM)
    embeddings["image"].requires_grad_()
    contrastive_loss(score, embeddings).backward()
    assert embeddings["image"].grad.abs().sum() > 0
    assert embeddings["audio"].grad is None
    for name, parameter in score.named_parameters():
        if not name.endswith("neutral"):
            assert parameter.grad.abs().sum() > 0, name
