"""Rows with equal values: summed answers cost nothing and bias nothing."""

import math

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from mmcl.losses import contrastive_loss
from mmcl.scores import SumOfPairs

CLIP = SumOfPairs(("image", "text"), 3, temperature=0.01)
VALUES = torch.tensor([0, 1, 0, 2])


def one_hot(values):
    rows = F.one_hot(values, 3).float()
    return {"image": rows, "text": rows}


def test_perfect_encoders_reach_0_only_with_groups():
    rows = one_hot(VALUES)
    both = {"image": VALUES, "text": VALUES}
    assert contrastive_loss(CLIP, rows, groups=both).item() == pytest.approx(0, abs=1e-6)
    assert contrastive_loss(CLIP, rows).item() == pytest.approx(math.log(2) / 2, rel=1e-5)
    half = contrastive_loss(CLIP, rows, groups={"text": VALUES})
    assert half.item() == pytest.approx(math.log(2) / 4, rel=1e-5), "image has no groups: its rows are all distinct"


def test_a_guessed_tuple_is_equal_where_every_part_is():
    score = SumOfPairs(("image", "audio", "text"), 3, temperature=0.01)
    rows = {**one_hot(VALUES), "audio": torch.zeros(4, 3)}
    guess, images = [("image", "audio")], {"image": VALUES}
    plain = contrastive_loss(score, rows, guess=guess)
    assert contrastive_loss(score, rows, guess=guess, groups=images).item() == plain.item()
    differ = images | {"audio": [0, 1, 2, 3]}
    assert contrastive_loss(score, rows, guess=guess, groups=differ).item() == plain.item()
    same = images | {"audio": [5, 5, 5, 5]}
    assert contrastive_loss(score, rows, guess=guess, groups=same).item() == pytest.approx(0, abs=1e-6)
    assert plain.item() == pytest.approx(math.log(2) / 2, rel=1e-5)


def test_distinct_groups_change_nothing(kind, make_score, unit_embeddings):
    score, embeddings = make_score(kind, 3, 4), unit_embeddings(3, 6, 4)
    groups = {name: [3, 5, 1, 0, 9, 2] for name in embeddings}
    assert torch.equal(contrastive_loss(score, embeddings, groups=groups), contrastive_loss(score, embeddings))


def test_only_equality_of_the_numbers_counts(make_score, unit_embeddings):
    score, embeddings = make_score("hadamard", 3, 4), unit_embeddings(3, 6, 4)
    losses = [
        contrastive_loss(score, embeddings, groups=dict.fromkeys(embeddings, groups))
        for groups in (
            [0, 1, 0, 2, 2, 2],
            torch.tensor([-7, 2**62, -7, 3, 3, 3]),
            np.array([4, 9, 4, 1, 1, 1], np.uint8),
        )
    ]
    assert losses[0] == losses[1] == losses[2]
    assert losses[0] < contrastive_loss(score, embeddings)


@pytest.mark.filterwarnings("error")
def test_groups_in_any_memory_layout(make_score, unit_embeddings):
    score, embeddings = make_score("hadamard", 3, 4), unit_embeddings(3, 6, 4)
    groups = np.array([0, 1, 0, 2, 2, 2])
    expected = contrastive_loss(score, embeddings, groups={"text": groups.tolist()})
    read_only = groups.copy()
    read_only.flags.writeable = False
    for layout in (groups[::-1].copy()[::-1], groups.repeat(2)[::2], groups.astype(">i8"), read_only):
        assert torch.equal(contrastive_loss(score, embeddings, groups={"text": layout}), expected)


def masked_loss(score, rows, groups):
    """The biased alternative: rows equal to the answer leave the denominator."""
    logits = score.query_vectors({"image": rows["image"]}) @ score.item_vectors({"text": rows["text"]}).T
    losses = []
    for table, ids in ((logits, groups["text"]), (logits.T, groups["image"])):
        equal = (ids[:, None] == ids) & ~torch.eye(len(ids), dtype=torch.bool)
        losses.append(-table.masked_fill(equal, -torch.inf).log_softmax(1).diagonal().mean())
    return torch.stack(losses).mean()


def fitted_gap(loss, image, text):
    """Fit free rows for the two values of each modality; the largest score difference between the two texts."""
    score = SumOfPairs(("image", "text"), 2, temperature=1.0)
    generator = torch.Generator().manual_seed(0)
    tables = [torch.randn(2, 2, generator=generator, requires_grad=True) for _ in range(2)]
    optimizer = torch.optim.Adam([*tables, *score.parameters()], lr=0.1)
    for _ in range(120):
        rows = {"image": tables[0][image], "text": tables[1][text]}
        value = loss(score, rows, groups={"image": image, "text": text})
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
    scores = (score.scale * tables[0] @ tables[1].T).detach()
    return (scores[:, 0] - scores[:, 1]).abs().max().item()


def test_grouping_leaves_no_bias_and_masking_does():
    """256 rows of independent values, 13 of 16 of the first kind: the density ratio is 1, so no score differs."""
    kinds = (torch.arange(16) >= 13).long()
    image, text = (grid.reshape(-1) for grid in torch.meshgrid(kinds, kinds, indexing="ij"))
    assert fitted_gap(contrastive_loss, image, text) < 0.1
    assert fitted_gap(lambda score, rows, groups: contrastive_loss(score, rows), image, text) < 0.1
    assert fitted_gap(masked_loss, image, text) > 1


@pytest.mark.parametrize(
    ("groups", "error", "message"),
    [
        ({"audio": [0, 1, 2, 3]}, KeyError, r"'audio'.*groups.*'image', 'text'"),
        ({"text": [0, 1, 2]}, ValueError, r"text.*\(4,\).*\(3,\)"),
        ({"text": [[0], [1], [2], [3]]}, ValueError, r"text.*\(4, 1\)"),
        ({"text": [0.0, 1.0, 2.0, 3.0]}, ValueError, r"text.*integers"),
        ({"text": ["a", "b", "a", "c"]}, ValueError, r"text.*integers"),
    ],
)
def test_groups_that_do_not_fit_are_refused(groups, error, message):
    with pytest.raises(error, match=message):
        contrastive_loss(CLIP, one_hot(VALUES), groups=groups)
