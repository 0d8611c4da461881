"""A scan in bfloat16 that loses nothing: every row that may belong to the answer comes out as a candidate.

What rounding costs is bounded by Cauchy and Schwarz. For a query q and a row x, rounded to q~ and x~, and any
positive weights s of the coordinates,

    |<q, x> - <q~, x~>|  <=  (|s (q - q~)| (1 + e) + |s q| e) |x / s|,    where |(x - x~) / s| <= e |x / s|.

Float32 sums add at most width * 2^-24 of |s q~| |x~ / s| (Higham 2002, section 3.1), and on CPUs each score is rounded
to bfloat16. So every coarse score stands between two bounds of the true one, and a row is a candidate unless its upper
bound lies below the k-th largest lower bound: k rows are certainly better then.

Two choices keep the bounds tight. Rows are centred first, which moves all scores of a query alike. And s is how far
each coordinate typically spreads: in fused vectors some coordinates are small and meet large ones of the query.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

BLOCK_SCORES = 2**21
"""Coarse scores held at once: 4 MB on CPUs."""
GROUP = 32
SAMPLE = 4096
ALL = slice(None)
TINY = torch.finfo(torch.bfloat16).tiny
"""Matrix units take numbers below this for zero."""
LARGEST_EXPONENT = 100
MASKED, LOWEST = -(2.0**120), -(2.0**110)
"""Below all coarse scores, which stay within 2^109, and between."""


@dataclass(frozen=True, eq=False)
class CoarseRows:
    """Rows centred and rounded to bfloat16, and what bounds the error."""

    rows: Tensor
    """(n, width) bfloat16."""
    lengths: Tensor
    """(n,) float32: weighted norms |x / s| over the longest, rounded up."""
    longest: float
    largest: float
    """The largest norm |x|."""
    rounding: float
    """e above: 2^-8 at most, usually half of it."""
    centre: Tensor
    """(width,) float64, subtracted from every row."""
    spread: Tensor
    """(width,) float64, s above."""


@dataclass(frozen=True, eq=False)
class CoarseQueries:
    """Queries scaled and rounded to bfloat16, and how far their coarse scores may be off."""

    rows: Tensor
    """(nq, width) bfloat16."""
    margin: Tensor
    """(nq,) float32: error for a row of length 1."""
    floor: Tensor
    """(nq,) float32: error by underflow, for any row."""
    relative: float
    """Error by its own rounding for a score of 1."""
    scale: Tensor
    """(nq,) float64, powers of two that the queries were multiplied by."""
    shift: Tensor
    """(nq,) float64: the centre's inner products."""

    def lower(self, scores: Tensor, lengths: Tensor, query: Any = ALL) -> Tensor:
        """Lower bounds of the true scores of rows with these coarse scores and lengths."""
        return scores - self.relative * scores.abs() - self.floor[query] - self.margin[query] * lengths

    def least(self, threshold: Tensor, lengths: Tensor, query: Any = ALL) -> Tensor:
        """The least coarse score with which a row of this length may reach the threshold."""
        rest = threshold[query] - self.floor[query] - self.margin[query] * lengths
        return rest - 1.01 * self.relative * rest.abs()

    def coarse(self, scores: Tensor) -> Tensor:
        """(nq,) true inner products on the scale of the coarse ones, rounded down."""
        moved = (scores - self.shift) * self.scale
        return (moved - 1e-12 * (scores.abs() + self.shift.abs()) * self.scale - 1e-6 * moved.abs()).float()


class Candidates(NamedTuple):
    """Pairs of a query and a row with their coarse scores, as three tensors of one length."""

    query: Tensor
    row: Tensor
    score: Tensor

    def where(self, chosen: Tensor) -> "Candidates":
        return Candidates(*(part[chosen] for part in self))


def round_rows(exact: Tensor) -> CoarseRows:
    """The coarse copy of (n, width) float32 rows, made block by block.

    Raises: ValueError naming the first row that is not finite.
    """
    count, width = exact.shape
    centre, spread = typical(exact)
    rows = torch.empty(exact.shape, dtype=torch.bfloat16, device=exact.device)
    norms, lengths = torch.empty((2, count), dtype=torch.float64, device=exact.device)
    rounding, size = 0.0, max(1, 2**18 // width)
    for start in range(0, count, size):
        part = slice(start, start + size)
        precise = exact[part].double() - centre
        rows[part] = rounded(precise)
        norms[part], lengths[part] = precise.norm(dim=1), (precise / spread).norm(dim=1)
        if not norms[part].isfinite().all():
            row = start + int(norms[part].isfinite().logical_not().nonzero()[0])
            raise ValueError(f"row {row}: its vector is not finite in float32")
        lost = (precise - rows[part]).masked_fill_(rows[part] == 0, 0).div_(spread).norm(dim=1)
        rounding = max(rounding, float((lost / lengths[part].clamp_min(TINY**2)).max()))
    longest, largest = (max(float(each.max()), TINY) if count else 1.0 for each in (lengths, norms))
    return CoarseRows(rows, (lengths / longest * (1 + 2**-20)).float(), longest, largest, rounding, centre, spread)


def typical(exact: Tensor) -> tuple[Tensor, Tensor]:
    """Centre and spread (width,) float64 of the rows' coordinates, by a sample; few outliers leave them as they are."""
    width = exact.shape[1]
    sample = exact[:: max(1, len(exact) // SAMPLE)].double() if len(exact) else exact.new_zeros((1, width)).double()
    centre = sample.median(dim=0).values.nan_to_num()
    directions = F.normalize(sample - centre, dim=1, eps=TINY)
    return centre, directions.square().mean(dim=0).nan_to_num().add(2**-16 / width).sqrt()


def round_queries(queries: Tensor, coarse: CoarseRows) -> CoarseQueries:
    """Queries (nq, width) float64 for a scan of `coarse`.

    Powers of two bring the largest score near 1: nothing overflows, and little underflows.
    """
    width, spread = queries.shape[1], coarse.spread
    wanted = queries.new_tensor(1 / coarse.largest).log2().clamp(-LARGEST_EXPONENT, LARGEST_EXPONENT)
    scale = (wanted - queries.norm(dim=1).clamp_min(2.0**-149).log2()).round().exp2()
    scaled = queries * scale[:, None]
    rows = rounded(scaled)
    norms, lost = (scaled * spread).norm(dim=1), ((scaled - rows) * spread).norm(dim=1)
    sums = width * 2.0**-22  # four times what rounding needs: tensor cores cut digits off
    margin = norms * coarse.rounding + (lost + sums * (norms + lost)) * (1 + coarse.rounding)
    floor = 4 * TINY * (scaled.norm(dim=1) * width**0.5 + width)
    relative = 0.51 * torch.finfo(score_type(queries.device)).eps + 2**-20
    margin = (1.001 * coarse.longest * margin).float()
    return CoarseQueries(rows, margin, floor.float(), relative, scale, queries @ coarse.centre)


def rounded(rows: Tensor) -> Tensor:
    """(n, width) float64 to bfloat16, with zero for what underflows and the largest for what overflows."""
    largest = torch.finfo(torch.bfloat16).max
    coarse = rows.clamp(-largest, largest).bfloat16()
    return coarse.masked_fill_(coarse.abs() < TINY, 0)


def score_type(device: torch.device) -> torch.dtype:
    """What products of bfloat16 come in: only GPUs return their float32 sums."""
    return torch.float32 if device.type == "cuda" else torch.bfloat16


def products(rows: Tensor, queries: Tensor) -> Tensor:
    """(b, nq) inner products of (b, width) rows and (nq, width) queries."""
    if rows.is_cuda:
        return torch.mm(rows, queries.T, out_dtype=torch.float32)
    if len(queries) == 1:  # two columns take the matrix units, one takes a slower way
        return torch.mm(rows, queries.expand(2, -1).T)[:, :1].contiguous()
    return torch.mm(rows, queries.T)


def candidates(
    coarse: CoarseRows, queries: CoarseQueries, k: int, keep: Tensor | None, limit: int
) -> tuple[Tensor, Candidates]:
    """All rows that may be among the k best of each query.

    Args:
        k: at most the number of rows that are kept.
        keep: (n,) bool, the only rows that count; None: all.
        limit: at least k; a query with more candidates gets none.
    Returns: the threshold (nq,) that the candidates reach, infinite where there are too many; the candidates.
    """
    count, device = len(queries.rows), coarse.rows.device
    threads = workers(device)
    size = max(2 * k, min(BLOCK_SCORES // count, -(-len(coarse.rows) // threads)))
    parts = blocks(len(coarse.rows), size, keep)
    threshold = torch.full((count,), LOWEST, device=device)

    def scan(worker: int) -> Candidates:
        found, settled = NO_CANDIDATES(device), count * k
        for part in parts[worker::threads]:
            found = joined(found, scanned(coarse, queries, part, keep, threshold, k))
            if len(found.row) > 2 * settled:
                found = tightened(found, coarse.lengths, queries, threshold, k, limit)
                settled = max(len(found.row), count * k)
        return found

    found = joined(*run(scan, threads))
    return threshold, tightened(found, coarse.lengths, queries, threshold, k, limit)


def NO_CANDIDATES(device):
    nothing = torch.empty(0, dtype=torch.int64, device=device)
    return Candidates(nothing, nothing, nothing.float())

def joined(*found: Candidates) -> Candidates:
    return Candidates(*(torch.cat(parts) for parts in zip(*found, strict=True)))

def blocks(count: int, size: int, keep: Tensor | None) -> list[Any]:
    if keep is not None and 2 * int(keep.sum()) < count:
        return list(keep.nonzero()[:, 0].split(size))
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]

def scanned(coarse, queries, part, keep, threshold, k):
    if isinstance(part, slice):
        rows, lengths = coarse.rows[part], coarse.lengths[part]
    else:
        rows, lengths = coarse.rows.index_select(0, part), coarse.lengths[part]
    scores = products(rows, queries.rows)
    if keep is not None and isinstance(part, slice):
        scores.index_fill_(0, keep[part].logical_not().nonzero()[:, 0], MASKED)
    group = max(1, min(GROUP, len(rows) // (2 * k)))
    more = block_candidates(scores, lengths, queries, threshold, k, group)
    return more._replace(row=more.row + part.start if isinstance(part, slice) else part[more.row])


def raise_to(threshold, values):
    torch.maximum(threshold, values, out=threshold)

def block_candidates(
    scores: Tensor, lengths: Tensor, queries: CoarseQueries, threshold: Tensor, k: int, group: int
) -> Candidates:
    """The threshold (nq,), raised where this block calls for it, and the block's rows that may reach it.

    Only the best score of each group of rows is compared; few groups have a row that matters. A group's rows are
    spread over the block, so that neighbours, which are often alike, do not share one.
    """
    step = -(-len(scores) // group)
    missing = step * group - len(scores)
    if missing:
        scores, lengths = F.pad(scores, (0, 0, 0, missing), value=MASKED), F.pad(lengths, (0, missing))
    groups, longest = scores.view(group, step, -1), lengths.view(group, step).amax(0)
    best = groups.amax(0).float()
    hits = (best >= queries.least(threshold, longest.max())).nonzero()
    if len(hits) > 2 * k * len(threshold):
        if step >= k:
            raise_to(threshold, queries.lower(best, longest[:, None]).topk(k, dim=0).values[-1])
        hits = (best >= queries.least(threshold, longest[:, None])).nonzero()
    place, query = hits.unbind(1)
    values = groups.view(group, -1).index_select(1, place * len(threshold) + query).float()
    member, hit = (values >= queries.least(threshold, longest[place], query)).nonzero().unbind(1)
    found = Candidates(query[hit], place[hit] + step * member, values[member, hit])
    return found.where(found.score >= queries.least(threshold, lengths[found.row], found.query))


def tightened(
    found: Candidates, lengths: Tensor, queries: CoarseQueries, threshold: Tensor, k: int, limit: int
) -> Candidates:
    """Raise

    Infinite for a query that has more than `limit` of them: it gets none from here on.
    """
    lengths = lengths[found.row]
    lower = by_query(found.query, queries.lower(found.score, lengths, found.query), len(threshold), k, LOWEST)
    raise_to(threshold, lower.topk(k, dim=1).values[:, -1])
    found = found.where(found.score >= queries.least(threshold, lengths, found.query))
    crowded = torch.bincount(found.query, minlength=len(threshold)) > limit
    threshold.masked_fill_(crowded, torch.inf)
    return found.where(~crowded[found.query])


def by_query(query: Tensor, values: Tensor, count: int, columns: int, fill: float) -> Tensor:
    """(count, at least `columns`) table of each query's values in their order, filled up at the end."""
    query, order = query.sort(stable=True)
    counts = torch.bincount(query, minlength=count)
    places = torch.arange(len(query), device=query.device) - (counts.cumsum(0) - counts)[query]
    table = values.new_full((count, max(columns, int(counts.max()))), fill)
    table[query, places] = values[order]
    return table


import functools, os
from concurrent.futures import ThreadPoolExecutor
from threadpoolctl import ThreadpoolController


def workers(device):
    return 1 if device.type == "cuda" else torch.get_num_threads()

@functools.cache
def pool(threads):
    openmp = ThreadpoolController().select(user_api="openmp")
    def alone():
        torch.get_num_threads()
        openmp.limit(limits=1)
    return ThreadPoolExecutor(threads, initializer=alone)

os.register_at_fork(after_in_child=pool.cache_clear)

def run(task, threads):
    if threads == 1:
        return [task(0)]
    return list(pool(threads).map(task, range(threads)))
