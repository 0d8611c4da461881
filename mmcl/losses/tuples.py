"""Losses of a score over tuples of two or more modalities. Pure functions: embeddings in, one number out.

Each asks the score for query and item vectors only, so one code path serves every score and every m.
"""

import math
from collections.abc import Iterable, Mapping
from itertools import permutations
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from mmcl.arrays import Embeddings, as_rows, as_tensor, refuse_unknown, same_length, same_precision
from mmcl.losses.gathering import gather_rows, mean_over_ranks
from mmcl.losses.pairs import info_nce, refuse_lonely
from mmcl.losses.questions import Question, cross_entropy
from mmcl.scores import Score, SumOfPairs
from mmcl.tables import lookup

Guess = Literal["each"] | Iterable[Iterable[str]]
Rows = dict[str, Tensor]


def contrastive_loss(
    score: Score,
    embeddings: Embeddings,
    guess: Guess = "each",
    candidates: str = "batch",
    groups: Mapping[str, Any] | None = None,
    block_size: int | None = None,
    gather: bool = False,
    generator: torch.Generator | None = None,
) -> Float[Tensor, ""]:
    """Cross-entropy of guessing modalities of each row from all its others, among the batch's rows.

    Args:
        score: any `Score`.
        embeddings: {modality: (n, d)} for every modality, n >= 2.
        guess: "each" guesses every single modality in turn, the mean of the m full conditionals p(x_i | x_-i): at
            m = 2 CLIP's symmetric loss. Or name tuples, such as [("image", "audio")], each guessed from the rest.
        candidates: "batch", the batch's own rows (a guessed tuple keeps its own pairings), or "shuffled", each guessed
            modality permuted on its own and the true row kept in its place.
        groups: {modality: (n,) integers}. Candidates equal to the answer in EVERY guessed modality are the same
            answer: their exponentials are summed in the numerator and stay in the denominator. A modality without
            groups counts as all distinct, a shuffled copy of the row itself too.
        block_size: rows of logits held at once, with the same value and gradients (but no second derivatives). None
            chooses: dense up to 1024 rows.
        gather: use the rows of all ranks as candidates (torch.distributed); each rank asks for its own rows, of which
            ranks may have different numbers. Every rank returns the global loss; gradients of parameters are right
            after averaging over ranks, as DDP does.
        generator: of the shuffles (CPU).
    Returns: mean over guesses and rows, in nats. Dense memory O(n^2) a guess; blockwise O(block_size * n).
    Raises: KeyError for an unknown or missing modality; ValueError for a batch of one, a guess that leaves nothing
        to guess from, or groups of a wrong length.
    Sources: "each" at m = 2, Radford et al. 2021; "shuffled", Saporta et al. 2024 (Symile), section 3; summed
        positives, Khosla et al. 2020, discussion of L_in, without its bias (see `groups`).
    """
    shuffle = lookup({"batch": False, "shuffled": True}, candidates, "candidates")
    rows, groups = _checked(score, embeddings), _checked_groups(score, embeddings, groups)
    own = slice(0, same_length(rows))
    if gather:
        (rows, own), groups = gather_rows(rows), gather_rows(groups)[0]
    count = same_length(rows)
    refuse_lonely(count)
    losses = []
    for guessed in guessed_tuples(score.modalities, guess):
        orders = _permutations(guessed, count, generator) if shuffle else {}
        losses.append(cross_entropy(_question(score, rows, groups, guessed, orders, own), block_size))
    loss = torch.stack(losses).mean()
    return mean_over_ranks(loss, own, count) if gather else loss


def joint_loss(
    score: Score, embeddings: Embeddings, negatives: int = 4, generator: torch.Generator | None = None
) -> Float[Tensor, ""]:
    """`-E[score] + log E exp(score)`, the second mean over the product of marginals, by shuffling each modality.

    An estimate of the joint KL up to the total correlation: its minimum over all functions is minus that.

    Args:
        score: any `Score`.
        embeddings: {modality: (n, d)} for every modality, n >= 2.
        negatives: independent shuffles of the batch, n tuples each.
        generator: of the shuffles (CPU).
    Returns: nats. Memory O(negatives * n * d).
    Source: Donsker and Varadhan 1975; as a loss, Belghazi et al. 2018, eq. 10.
    """
    rows = _checked(score, embeddings)
    count = same_length(rows)
    refuse_lonely(count)
    if negatives < 1:
        raise ValueError(f"negatives must be at least 1, got {negatives}")
    shuffled = []
    for _ in range(negatives):
        orders = _permutations(score.modalities, count, generator)
        shuffled.append(score({name: rows[name][orders[name].to(rows[name].device)] for name in rows}))
    log_mean = torch.cat(shuffled).logsumexp(0) - math.log(negatives * count)
    return log_mean - score(rows).mean()


def pairwise_loss(score: Score, embeddings: Embeddings, block_size: int | None = None) -> Float[Tensor, ""]:
    """Mean over pairs of modalities of CLIP's symmetric loss, as sums of pairs are trained in practice.

    Args:
        score: a `SumOfPairs` (TypeError otherwise).
        embeddings: {modality: (n, d)} for every modality, n >= 2.
        block_size: as in `contrastive_loss`.
    Returns: nats. Dense memory O(n^2) a pair; blockwise O(block_size * n).
    Source: Radford et al. 2021, figure 3, for each pair.
    """
    if not isinstance(score, SumOfPairs):
        raise TypeError(f"pairwise_loss trains SumOfPairs, got {type(score).__name__}; use contrastive_loss")
    rows = _checked(score, embeddings)
    refuse_lonely(same_length(rows))
    pairs = [(rows[a], rows[b]) for a, b in permutations(score.modalities, 2)]
    losses = [info_nce(query, key, scale=score.scale, block_size=block_size) for query, key in pairs]
    return torch.stack(losses).mean()


def guessed_tuples(modalities: tuple[str, ...], guess: Guess) -> list[tuple[str, ...]]:
    """`guess` as a list of name tuples, each in the score's own order of modalities."""
    if isinstance(guess, str):
        return lookup({"each": [(name,) for name in modalities]}, guess, "guess")
    tuples = []
    for names in guess:
        if isinstance(names, str):
            raise TypeError(f"guess must hold tuples of names such as [('image', 'audio')], got the string {names!r}")
        wanted = tuple(names)
        refuse_unknown(wanted, modalities, "guess")
        if not wanted or len(set(wanted)) != len(wanted) or len(wanted) == len(modalities):
            raise ValueError(f"each guess names some, not all, of {list(modalities)}, each once; got {wanted}")
        tuples.append(tuple(name for name in modalities if name in wanted))
    if not tuples:
        raise ValueError("guess holds no tuple; name at least one, such as [('image', 'audio')]")
    return tuples


def _question(
    score: Score, rows: Rows, groups: Rows, guessed: tuple[str, ...], orders: dict[str, Tensor], own: slice
) -> Question:
    """Guessing one tuple of each of the rows `own` from the rest of it, among the tuples of all rows."""
    rest = {name: row[own] for name, row in rows.items() if name not in guessed}
    answers = {name: rows[name] for name in guessed}
    own_item = score.item_vectors({name: row[own] for name, row in answers.items()}) if orders else None
    item = score.item_vectors({name: row[orders[name]] if orders else row for name, row in answers.items()})
    keys = []
    if all(name in groups for name in guessed):
        keys = [(groups[n][own], groups[n][orders[n]] if orders else groups[n]) for n in guessed]
    return Question(score.query_vectors(rest), item, own_item, own.start, keys)


def _permutations(names: Iterable[str], count: int, generator: torch.Generator | None) -> dict[str, Tensor]:
    return {name: torch.randperm(count, generator=generator) for name in names}


def _checked(score: Score, embeddings: Embeddings) -> Rows:
    """The embeddings as tensors, all modalities named, in the score's order."""
    refuse_unknown(embeddings, score.modalities)
    missing = [name for name in score.modalities if name not in embeddings]
    if missing:
        raise KeyError(f"missing modality {missing}; this score takes {list(score.modalities)}")
    device = next(score.parameters()).device
    rows = {name: as_rows(embeddings[name], name, score.dim, device) for name in score.modalities}
    same_length(rows)
    return same_precision(rows)


def is_whole(array: Tensor | np.ndarray) -> bool:
    """Whether the values are integers."""
    if isinstance(array, Tensor):
        return not (array.is_floating_point() or array.is_complex())
    return np.issubdtype(array.dtype, np.integer)


def _checked_groups(score: Score, embeddings: Embeddings, groups: Mapping[str, Any] | None) -> Rows:
    refuse_unknown(groups or {}, score.modalities, "groups")
    checked = {}
    for name, values in (groups or {}).items():
        count = len(embeddings[name])
        array = values if isinstance(values, Tensor) else np.asarray(values)
        if not isinstance(array, Tensor) and array.dtype == object:
            raise ValueError(f"groups[{name!r}] must be ({count},) integers of at most 64 bits, got {array.dtype}")
        if tuple(array.shape) != (count,) or not is_whole(array):
            raise ValueError(f"groups[{name!r}] must be ({count},) integers, got {tuple(array.shape)} {array.dtype}")
        checked[name] = as_tensor(array, next(score.parameters()).device).long()
    return checked
