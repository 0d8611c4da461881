"""Exact maximum inner product search in two stages: a coarse scan of all rows, then true scores of the candidates."""

from dataclasses import dataclass

import torch
from torch import Tensor

from mmcl.index.exact_rounding import CoarseQueries, CoarseRows, round_queries
from mmcl.index.exact_scan import LOWEST, Candidates, by_query, candidates, joined
from mmcl.index.workers import in_parallel

Found = tuple[Tensor, Tensor]
"""(nq, k) float64 scores and int64 rows, best first."""
QUERIES, ANSWERS = 256, 2**20
"""Queries that are scanned for together: no more, and with no more than so many answers."""
FEW_ROWS = 2048
"""So few rows, or 16 k, are ranked without a coarse scan."""
PAIRS = 2**22
"""Candidates of all queries that are held at once: 100 MB."""


@dataclass(frozen=True, eq=False)
class Stored:
    """What is searched, and by how many threads."""

    exact: Tensor
    """(n, width) float32."""
    coarse: CoarseRows
    """The same rows rounded."""
    threads: int


def exact_search(stored: Stored, queries: Tensor, k: int, keep: Tensor | None) -> Found:
    """The k rows of largest inner product with each query: those that float64 finds, of equal ones the first.

    Args:
        queries: (nq, width) float64.
        k: at least 1, at most the number of rows that are kept.
        keep: (n,) bool, the rows that may be returned; None: all.
    """
    count = len(stored.exact) if keep is None else int(keep.sum())
    size = max(1, min(QUERIES, ANSWERS // k))
    found = []
    for part in queries.split(size):
        if count <= max(FEW_ROWS, 16 * k):
            found.append(brute_force(stored, part, k, keep))
        else:
            found.append(two_stages(stored, part, k, keep))
    scores, rows = zip(*found, strict=True)
    return torch.cat(scores), torch.cat(rows)


def two_stages(stored: Stored, queries: Tensor, k: int, keep: Tensor | None) -> Found:
    """As `exact_search`, by a coarse scan; by brute force for queries that have too many candidates."""
    rows, count = len(stored.exact), len(queries)
    rounded, limit = round_queries(queries, stored.coarse), most_candidates(rows, count, k)
    threshold, found = candidates(stored.coarse, rounded, k, keep, 4 * limit, stored.threads)
    found, true = scored(stored, queries, rounded, found, threshold, k, limit)
    order = (found.query * rows + found.row).argsort()
    query = found.query[order]
    scores, ranks = by_query(query, true[order], count, k, -torch.inf).sort(dim=1, descending=True, stable=True)
    best = by_query(query, found.row[order], count, k, -1).gather(1, ranks[:, :k])
    scores = scores[:, :k].contiguous()
    given_up = (best[:, -1] < 0).nonzero()[:, 0]
    if len(given_up):
        scores[given_up], best[given_up] = brute_force(stored, queries[given_up], k, keep)
    return scores, best


def most_candidates(rows: int, queries: int, k: int) -> int:
    """How many true scores for a query cost no more than brute force, which shares most of its work among queries."""
    worthwhile = max(1024, rows // min(64, 4 * queries))
    return max(4 * k, min(worthwhile, PAIRS // (4 * queries)))


def scored(
    stored: Stored,
    queries: Tensor,
    rounded: CoarseQueries,
    found: Candidates,
    threshold: Tensor,
    k: int,
    limit: int,
) -> tuple[Candidates, Tensor]:
    """Candidates with their true scores; those that cannot win any more are left out.

    Where there are many, the 2 k of best coarse score come first: the k-th of them raises the threshold for the rest.
    A query that has more than `limit` even then is left without any.
    """
    count = len(queries)
    if len(found.row) <= 2 * k * count:
        return found, inner_products(stored, queries, found)
    first = first_by_score(found, count, 2 * k)
    early, late = found.where(first), found.where(~first)
    scores = inner_products(stored, queries, early)
    kth = by_query(early.query, scores, count, k, -torch.inf).topk(k, dim=1).values[:, -1]
    threshold = torch.maximum(threshold, rounded.to_coarse(kth))
    late = late.where(late.score >= rounded.least(threshold, stored.coarse.lengths[late.row], late.query))
    good = torch.bincount(late.query, minlength=count) <= limit
    early, scores, late = early.where(good[early.query]), scores[good[early.query]], late.where(good[late.query])
    return joined(early, late), torch.cat([scores, inner_products(stored, queries, late)])


def first_by_score(found: Candidates, count: int, most: int) -> Tensor:
    """Which candidates are among the `most` best of their query, by coarse score; (candidates,) bool."""
    numbers = torch.arange(len(found.row), device=found.row.device)
    best = by_query(found.query, found.score, count, most, LOWEST).topk(most, dim=1).indices
    chosen = by_query(found.query, numbers, count, most, -1).gather(1, best)
    first = torch.zeros_like(numbers, dtype=torch.bool)
    first[chosen[chosen >= 0]] = True
    return first


def inner_products(stored: Stored, queries: Tensor, pairs: Candidates) -> Tensor:
    """(pairs,) float64 inner products of their queries and rows."""
    size, threads = max(1, 2**17 // queries.shape[1]), stored.threads
    parts = list(zip(pairs.query.split(size), pairs.row.split(size), strict=True))
    scores = queries.new_empty(len(pairs.row))

    def score(thread: int) -> None:
        for number in range(thread, len(parts), threads):
            query, row = parts[number]
            products = stored.exact.index_select(0, row).double().mul_(queries.index_select(0, query))
            torch.sum(products, dim=1, out=scores[number * size : number * size + len(row)])

    in_parallel(score, threads)
    return scores


def brute_force(stored: Stored, queries: Tensor, k: int, keep: Tensor | None) -> Found:
    """As `exact_search`, by the inner products with all rows in float64, block by block."""
    numbers = None if keep is None else keep.nonzero()[:, 0]
    count = len(stored.exact) if numbers is None else len(numbers)
    share = -(-count // stored.threads)

    def rank(thread: int) -> Found:
        start = thread * share
        return ranked(stored.exact, queries, k, numbers, start, min(start + share, count))

    parts = in_parallel(rank, stored.threads)
    scores, order = torch.cat([part[0] for part in parts], dim=1).sort(dim=1, descending=True, stable=True)
    rows = torch.cat([part[1] for part in parts], dim=1).gather(1, order[:, :k])
    return scores[:, :k], rows


def ranked(exact: Tensor, queries: Tensor, k: int, numbers: Tensor | None, start: int, end: int) -> Found:
    """The k best of rows `start` to `end`, of those `numbers` if given; padded by -inf and -1."""
    best = queries.new_full((len(queries), k), -torch.inf)
    rows = torch.full_like(best, -1, dtype=torch.int64)
    size = max(k, 2**20 // max(len(queries), exact.shape[1]))
    for first in range(start, end, size):
        part = slice(first, min(first + size, end))
        block = exact[part] if numbers is None else exact.index_select(0, numbers[part])
        scores = queries @ block.double().T
        entering = scores > best[:, -1:]  # an equal score of a later row does not
        hits = entering.nonzero()
        if len(hits) > 4 * k * len(queries) and len(block) >= k:
            hits = (entering & (scores >= scores.topk(k, dim=1).values[:, -1:])).nonzero()
        query, place = hits.unbind(1)
        new = by_query(query, scores[query, place], len(queries), 0, -torch.inf)
        places = place + first if numbers is None else numbers[place + first]
        best, order = torch.cat([best, new], dim=1).sort(dim=1, descending=True, stable=True)
        rows = torch.cat([rows, by_query(query, places, len(queries), 0, -1)], dim=1).gather(1, order[:, :k])
        best = best[:, :k]
    return best, rows
