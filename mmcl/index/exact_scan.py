"""A scan in bfloat16 that loses nothing: every row that may belong to the answer comes out as a candidate.

Each coarse score stands between two bounds of the true one (see `exact_rounding`). A row is a candidate unless its
upper bound lies below the k-th largest lower bound: k rows are certainly better then.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from mmcl.index.exact_rounding import CoarseQueries, CoarseRows
from mmcl.index.workers import in_parallel

BLOCK_SCORES = 2**21
"""Coarse scores that a thread holds at once: 4 MB."""
GATHERED = 2**22
"""Coordinates that are gathered at once: 8 MB."""
GROUP = 16
MASKED, LOWEST, HIGHEST = -(2.0**120), -(2.0**110), 2.0**120
"""A score below all others, a bar below and one above all scores: those stay within 2^109."""


class Candidates(NamedTuple):
    """Pairs of a query and a row with their coarse scores, as three tensors of one length."""

    query: Tensor
    row: Tensor
    score: Tensor

    def where(self, chosen: Tensor) -> "Candidates":
        return Candidates(*(part[chosen] for part in self))


@dataclass(frozen=True, eq=False)
class Bar:
    """What a row must reach to be a candidate; all threads of a scan raise the same.

    Where two threads raise it at once one may undo the other's work: it is lower then than it could be, never too high.
    """

    threshold: Tensor
    """(nq,) float32: k rows certainly have scores of this."""
    crowded: Tensor
    """(nq,) bool: queries with too many candidates; once true it stays."""
    k: int
    limit: int
    """Candidates that a query may have, at least 4 k; a quarter of them in one block."""

    def raise_to(self, threshold: Tensor) -> None:
        torch.maximum(self.threshold, threshold, out=self.threshold)

    def give_up(self, query: Tensor) -> None:
        """These queries get no more candidates."""
        self.crowded[query] = True
        self.threshold[query] = HIGHEST


def candidates(
    coarse: CoarseRows, queries: CoarseQueries, k: int, keep: Tensor | None, limit: int, threads: int
) -> tuple[Tensor, Candidates]:
    """All rows that may be among the k best of each query.

    Args:
        k: at most the number of rows that are kept.
        keep: (n,) bool, the only rows that count; None: all.
        limit: at least 4 k; a query that has more candidates, or a quarter of it in one block, gets none.
    Returns: a threshold (nq,) that k rows certainly reach, on the coarse scale; the candidates.
    """
    count, device = len(queries.rows), coarse.rows.device
    parts = blocks(coarse, BLOCK_SCORES // count, 2 * k, threads, keep)
    nobody = torch.zeros(count, dtype=torch.bool, device=device)
    bar = Bar(torch.full((count,), LOWEST, device=device), nobody, k, limit)

    def scan(thread: int) -> Candidates:
        found, settled = no_candidates(device), count * k
        for part in parts[thread::threads]:
            found = joined(found, scanned(coarse, queries, part, keep, bar))
            if len(found.row) > 2 * settled:
                found = tightened(found, coarse.lengths, queries, bar)
                settled = max(len(found.row), count * k)
        return found

    found = joined(*in_parallel(scan, threads))
    return bar.threshold, tightened(found, coarse.lengths, queries, bar)


def blocks(coarse: CoarseRows, most: int, least: int, threads: int, keep: Tensor | None) -> list[Any]:
    """The rows in blocks of about `most`: slices, or row numbers where most rows do not count and others are gathered.

    There are enough for all threads, as long as each has `least` rows.
    """
    count, width = coarse.rows.shape
    size = max(least, min(most, -(-count // threads)))
    if keep is not None and 2 * int(keep.sum()) < count:
        return list(keep.nonzero()[:, 0].split(max(least, min(size, GATHERED // width))))
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]


def scanned(coarse: CoarseRows, queries: CoarseQueries, part: Any, keep: Tensor | None, bar: Bar) -> Candidates:
    """The candidates of one block of rows."""
    if not isinstance(part, slice):
        scores = products(coarse.rows.index_select(0, part), queries.rows)
        found = block_candidates(scores, coarse.lengths[part], queries, bar)
        return found._replace(row=part[found.row])
    scores = products(coarse.rows[part], queries.rows)
    if keep is not None:
        scores.index_fill_(0, keep[part].logical_not().nonzero()[:, 0], MASKED)
    found = block_candidates(scores, coarse.lengths[part], queries, bar)
    return found._replace(row=found.row + part.start)


def products(rows: Tensor, queries: Tensor) -> Tensor:
    """(b, nq) inner products of (b, width) rows and (nq, width) queries, of type `score_type`."""
    if rows.is_cuda:
        return torch.mm(rows, queries.T, out_dtype=torch.float32)
    if len(queries) == 1:  # two columns take the matrix units, one takes a slower way
        return torch.mm(rows, queries.expand(2, -1).T)[:, :1].contiguous()
    return torch.mm(rows, queries.T)


def block_candidates(scores: Tensor, lengths: Tensor, queries: CoarseQueries, bar: Bar) -> Candidates:
    """The rows of a block, numbered from 0, that reach the bar; it is raised first where too many would.

    Only the best score of each group of rows is compared; few groups have a row that matters. A group's rows are
    spread over the block, so that neighbours, which are often alike, do not share one.

    Args:
        scores: (b, nq) coarse scores.
        lengths: (b,) of the rows, see `CoarseRows`.
    """
    count, group = len(bar.threshold), max(1, min(GROUP, len(scores) // (2 * bar.k)))
    step = -(-len(scores) // group)
    missing = step * group - len(scores)
    if missing:
        scores, lengths = F.pad(scores, (0, 0, 0, missing), value=MASKED), F.pad(lengths, (0, missing))
    groups, longest = scores.view(group, step, count), lengths.view(group, step).amax(0)
    best = groups.amax(0).float()
    hits = (best >= queries.least(bar.threshold, longest.max())).nonzero()
    many = len(hits) > 2 * bar.k * count
    if many:
        if step >= bar.k:
            bar.raise_to(queries.lower(best, longest[:, None]).topk(bar.k, dim=0).values[-1])
        hits = (best >= queries.least(bar.threshold, longest[:, None])).nonzero()
    place, query = hits.unbind(1)
    values = groups.view(group, -1).index_select(1, place * count + query).float()
    good = values >= queries.least(bar.threshold, longest[place], query)
    if many:
        numbers = torch.zeros(count, dtype=torch.int64, device=query.device).index_add_(0, query, good.sum(0))
        bar.give_up((numbers > bar.limit // 4).nonzero()[:, 0])
        good &= ~bar.crowded[query]
    member, hit = good.nonzero().unbind(1)
    found = Candidates(query[hit], place[hit] + step * member, values[member, hit])
    return found.where(found.score >= queries.least(bar.threshold, lengths[found.row], found.query))


def tightened(found: Candidates, lengths: Tensor, queries: CoarseQueries, bar: Bar) -> Candidates:
    """The candidates that still reach the bar, once it is raised to what they allow.

    A query that has too many of them is given up.
    """
    count = len(bar.threshold)
    lengths = lengths[found.row]
    lower = by_query(found.query, queries.lower(found.score, lengths, found.query), count, bar.k, LOWEST)
    bar.raise_to(lower.topk(bar.k, dim=1).values[:, -1])
    found = found.where(found.score >= queries.least(bar.threshold, lengths, found.query))
    bar.give_up((torch.bincount(found.query, minlength=count) > bar.limit).nonzero()[:, 0])
    return found.where(~bar.crowded[found.query])


def no_candidates(device: torch.device) -> Candidates:
    nothing = torch.empty(0, dtype=torch.int64, device=device)
    return Candidates(nothing, nothing, nothing.float())


def joined(*found: Candidates) -> Candidates:
    """All of them."""
    return Candidates(*(torch.cat(parts) for parts in zip(*found, strict=True)))


def by_query(query: Tensor, values: Tensor, count: int, columns: int, fill: float | int) -> Tensor:
    """(count, at least `columns`) table of each query's values in their order, filled up at the end."""
    query, order = query.sort(stable=True)
    counts = torch.bincount(query, minlength=count)
    places = torch.arange(len(query), device=query.device) - (counts.cumsum(0) - counts)[query]
    table = values.new_full((count, max(columns, int(counts.max()))), fill)
    table[query, places] = values[order]
    return table
