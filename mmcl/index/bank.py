"""Ranking the stored tuples for a query, by a bank of queries: one more coordinate of the item vectors.

The score is log p(x) / prod_i p(x_i), up to a constant, so it also rewards a tuple whose own parts fit each other. That
is right for judging a tuple. Which stored tuple T goes with a query Q is another question, and its answer is

    log p(x_Q | x_T) / p(x_Q) = score(x_Q, x_T) - log E_{x_Q}[exp score(x_Q, x_T)].

The second term depends on the item alone, so it is one more coordinate beside a 1 in the query: still one inner
product. The expectation is a mean over a bank of b query-side rows; the constant of the score cancels, and the result
is the pointwise mutual information of query and item, in nats. A bank that is too small errs where few of its rows
carry the mean: items that fit hardly any query of the bank.

Where a query has several modalities, the expectation runs over the product of their marginals, since the score is a
ratio to it: the bank's modalities are shuffled against each other. What is ranked is log p(x_Q | x_T) / prod_Q p(x_i),
which differs from the above by a number of the query alone.

Source: querybank normalisation, Bogolin et al. 2022, with the inverted softmax of Smith et al. 2017. (Their dynamic
form leaves a query as it is where its first item is the first of no bank query; one inner product cannot do that.) The
temperature is 1 because the score is a log density ratio: these are the terms of Donsker and Varadhan's bound.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from jaxtyping import Float32
from torch import Tensor

from mmcl.arrays import as_rows, refuse_bad_rows, same_length
from mmcl.scores import Score

ITEM_BLOCK, BANK_BLOCK = 2048, 4096
"""Scores of so many items with so many bank rows are held at a time: 32 MiB."""
SAMPLE = 1024
MOST_DOUBLINGS = 20


def bank_vectors(score: Score, bank: Any, absent: Iterable[str] = (), seed: int = 0) -> Float32[np.ndarray, "b width"]:
    """(b, width) query vectors of the bank.

    Args:
        score: of the index.
        bank: {modality: (b, d) embeddings} of the query modalities. Rows are a sample of the queries to come.
        absent: modalities that stand on neither side; see `Score.query_vectors`.
        seed: of the shuffle that makes several modalities independent of each other; one alone keeps its order.
    Raises: ValueError for no rows, a row with NaN, infinity or only zeros, and lengths or widths that do not fit;
        KeyError for an unknown modality, or an absent one that the score cannot replace. Each names the modality.
    """
    if not isinstance(bank, Mapping):
        raise ValueError(f"bank must be {{query modality: (b, d) embeddings}}, got {type(bank).__name__}")
    if not bank:
        raise ValueError(f"the bank is empty; it takes the query's modalities, some of {list(score.modalities)}")
    rows = {name: as_rows(value, f"bank {name}") for name, value in bank.items()}
    for name, part in rows.items():
        refuse_bad_rows(part, f"bank {name}")
    if not same_length(rows):
        raise ValueError(f"the bank of {list(rows)} has no rows; a few hundred queries are a good start")
    with torch.no_grad():
        vectors = score.query_vectors(shuffled_apart(rows, seed), absent=tuple(absent)).float()
    return refuse_not_finite(vectors, "bank").cpu().numpy()


def with_bank(vectors: Any, bank: Any, scale: float = 1.0) -> Float32[np.ndarray, "n wider"]:
    """(n, width + 1): item vectors, and the coordinate -log mean_b exp <bank_b, vector> behind them.

    Blockwise: O(2048 * 4096) numbers beside input and output, however large n and b are.

    Args:
        vectors: (n, width) item vectors.
        bank: (b, width) from `bank_vectors`.
        scale: of that coordinate; queries divide by it.
    Raises: ValueError for an empty bank, widths that differ, and a row that is not finite.
    """
    items, queries = float_rows(vectors, "item vectors"), float_rows(bank, "bank")
    if not len(queries):
        raise ValueError("the bank has no rows; a few hundred queries are a good start")
    if items.shape[1] != queries.shape[1]:
        raise ValueError(f"item vectors {tuple(items.shape)} and bank {tuple(queries.shape)} differ in width")
    wider = torch.empty(len(items), items.shape[1] + 1)
    wider[:, :-1] = items
    for start in range(0, len(items), ITEM_BLOCK):
        block = items[start : start + ITEM_BLOCK]
        wider[start : start + ITEM_BLOCK, -1] = -scale * log_mean_exp(block, queries)
    return refuse_not_finite(wider, "item vectors with their bank coordinate").numpy()


def query_with_bank(vectors: Any, scale: float = 1.0) -> Float32[np.ndarray, "nq wider"]:
    """(nq, width + 1): query vectors with the 1 / scale that meets the item's coordinate."""
    queries = float_rows(vectors, "query vectors")
    return torch.cat([queries, torch.full((len(queries), 1), 1 / scale)], dim=1).numpy()


def balance(score: Score, stored: Iterable[str], bank: Float32[np.ndarray, "b width"]) -> float:
    """The factor f of the coordinate in items, with 1 / f in place of the 1 in queries, with which codes err least.

    Items vary by nats in that coordinate and by far less in the others, and codes would spend themselves on it: of
    rotated items every coordinate is quantised with an error like the whole variance V + f^2 B, which a query weighs by
    its squared length Q + 1 / f^2. The product is least where f^4 = V / (B Q). V and B are taken of random items, and f
    as a power of two, so that it changes no score by a single bit.
    """
    with torch.no_grad():
        items = score.item_vectors(random_embeddings(stored, score.dim, SAMPLE)).float()
    spread = with_bank(items, bank).var(axis=0)
    product = float(spread[-1]) * float(np.square(bank).sum(axis=1).mean())
    if not (product > 0 and spread[:-1].sum() > 0):
        return 1.0
    doublings = round(math.log2(float(spread[:-1].sum()) / product) / 4)
    return 2.0 ** max(-MOST_DOUBLINGS, min(MOST_DOUBLINGS, doublings))


def random_embeddings(names: Iterable[str], dim: int, count: int, seed: int = 0) -> dict[str, Float32[Tensor, "n d"]]:
    """Unit rows without any direction, of each modality."""
    generator = torch.Generator().manual_seed(seed)
    rows = {name: torch.randn(count, dim, generator=generator) for name in names}
    return {name: torch.nn.functional.normalize(each, dim=1) for name, each in rows.items()}


def log_mean_exp(items: Float32[Tensor, "n width"], bank: Float32[Tensor, "b width"]) -> Float32[Tensor, " n"]:
    """log mean_b exp <bank_b, item> of each item.

    float32 throughout, as the index's own scores are: the largest term is taken out before any exponential, so the sum
    adds only rounding of 1e-7 to the error of one inner product.
    """
    total = torch.full((len(items),), -math.inf)
    for start in range(0, len(bank), BANK_BLOCK):
        scores = items @ bank[start : start + BANK_BLOCK].T
        total = torch.logaddexp(total, scores.logsumexp(dim=1))
    return total - math.log(len(bank))


def shuffled_apart(rows: Mapping[str, Tensor], seed: int) -> dict[str, Tensor]:
    """Every modality after the first in an order of its own: a sample of the product of their marginals."""
    generator = torch.Generator().manual_seed(seed)
    first, *others = sorted(rows)
    orders = {name: torch.randperm(len(rows[name]), generator=generator) for name in others}
    return {first: rows[first]} | {name: rows[name][order.to(rows[name].device)] for name, order in orders.items()}


def float_rows(value: Any, name: str) -> Float32[Tensor, "n width"]:
    """(n, width) finite float32 on the CPU."""
    return refuse_not_finite(as_rows(value, name).detach().to("cpu", torch.float32), name)


def refuse_not_finite(rows: Tensor, name: str) -> Tensor:
    """The rows; ValueError that names the first with NaN or infinity. A row of zeros may be: products can vanish."""
    bad = ~torch.isfinite(rows).all(dim=1)
    if bad.any():
        raise ValueError(f"{name}: row {int(bad.nonzero()[0])} is not finite in float32")
    return rows
