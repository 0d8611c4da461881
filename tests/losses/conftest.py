"""Losses of tuples written out as loops in plain Python, from their definitions, without query or item vectors."""

import itertools
import math

import pytest
import torch

from mmcl.scores import SumOfPairs


def dot(a, b):
    return sum(x * y for x, y in zip(a, b, strict=True))


def score_of(score, vectors):
    """The score of one tuple, given as lists in the score's order of modalities."""
    if hasattr(score, "parts"):
        return sum(score_of(part, vectors) for part in score.parts)
    if isinstance(score, SumOfPairs):
        return score.scale.item() * sum(dot(a, b) for a, b in itertools.combinations(vectors, 2))
    factor = math.exp(score.logit_scale.item()) * len(vectors[0]) ** ((len(vectors) - 2) / 2)
    return sum(factor * w * math.prod(column) for w, *column in zip(score.weight.tolist(), *vectors, strict=True))


def log_sum_exp(values):
    peak = max(values)
    return peak + math.log(sum(math.exp(value - peak) for value in values))


def guessing_loss(score, rows, guessed, orders, groups):
    """Mean over rows of -log p(own answer); orders: {guessed modality: permutation} of the candidates."""
    names, losses = score.modalities, []
    for a in range(len(next(iter(rows.values())))):
        every, right = [], []
        for j in range(len(rows[names[0]])):
            shown = {name: j if a == j or not orders else orders[name][j] for name in guessed}
            every.append(score_of(score, [rows[name][shown.get(name, a)] for name in names]))
            same = all(name in groups and groups[name][shown[name]] == groups[name][a] for name in guessed)
            if a == j or same:
                right.append(every[-1])
        losses.append(log_sum_exp(every) - log_sum_exp(right))
    return sum(losses) / len(losses)


@pytest.fixture(scope="session")
def loop_contrastive():
    """contrastive_loss by three loops; seed: of the generator that the shuffles are drawn from."""

    def loss(score, embeddings, guess="each", shuffled=False, groups=None, seed=0):
        rows = {name: torch.as_tensor(embeddings[name]).double().tolist() for name in score.modalities}
        count = len(rows[score.modalities[0]])
        tuples = [(name,) for name in score.modalities] if guess == "each" else guess
        generator, losses = torch.Generator().manual_seed(seed), []
        for names in tuples:
            guessed = [name for name in score.modalities if name in names]
            orders = {name: torch.randperm(count, generator=generator).tolist() for name in guessed} if shuffled else {}
            losses.append(guessing_loss(score, rows, guessed, orders, groups or {}))
        return sum(losses) / len(losses)

    return loss


@pytest.fixture(scope="session")
def loop_joint():
    """joint_loss by loops: for each shuffle, for each modality in the score's order, one randperm."""

    def loss(score, embeddings, negatives, seed):
        rows = {name: torch.as_tensor(embeddings[name]).double().tolist() for name in score.modalities}
        count = len(rows[score.modalities[0]])
        generator, shuffled = torch.Generator().manual_seed(seed), []
        for _ in range(negatives):
            orders = {name: torch.randperm(count, generator=generator).tolist() for name in score.modalities}
            for a in range(count):
                shuffled.append(score_of(score, [rows[name][orders[name][a]] for name in score.modalities]))
        own = [score_of(score, [rows[name][a] for name in score.modalities]) for a in range(count)]
        return log_sum_exp(shuffled) - math.log(len(shuffled)) - sum(own) / count

    return loss


@pytest.fixture(scope="session")
def loop_clip():
    """CLIP's symmetric loss of two lists of rows by loops."""

    def loss(a, b, scale):
        a, b, total = a.tolist(), b.tolist(), 0.0
        for left, right in ((a, b), (b, a)):
            for i, row in enumerate(left):
                logits = [scale * dot(row, other) for other in right]
                total += (log_sum_exp(logits) - logits[i]) / (2 * len(a))
        return total

    return loss
