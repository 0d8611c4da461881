"""Rows and queries rounded to bfloat16, and bounds of what that does to their inner products.

For a query q and a row x, rounded to q~ and x~, and any positive weights s of the coordinates, Cauchy and Schwarz give

    |<q, x> - <q~, x~>|  <=  (|s (q - q~)| (1 + e) + |s q| e) |x / s|,    where |(x - x~) / s| <= e |x / s|.

Float32 sums add at most width * 2^-24 of |s q~| |x~ / s| (Higham 2002, section 3.1), and on CPUs each score is rounded
to bfloat16. So every coarse score stands between two bounds of the true one.

Two choices keep the bounds tight. Rows are centred first, which moves all scores of a query alike. And s is how far
each coordinate typically spreads: in fused vectors some coordinates are small and meet large ones of the query.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mmcl.index.workers import alone, in_parallel, thread_count

SAMPLE = 4096
ALL = slice(None)
TINY = torch.finfo(torch.bfloat16).tiny
"""Matrix units take numbers below this for zero."""
LARGEST_EXPONENT = 100
"""Queries are scaled to norms within 2^-100 and 2^100, by powers of two."""
SHORTEST = 2.0**-100
"""The least length of a row, of which float32 can still hold a small share."""


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

    def to_coarse(self, scores: Tensor) -> Tensor:
        """(nq,) true inner products on the scale of the coarse ones, rounded down."""
        moved = (scores - self.shift) * self.scale
        lost = 1e-12 * (scores.abs() + self.shift.abs()) * self.scale
        return (moved - lost - 1e-6 * moved.abs()).float()


def round_rows(exact: Tensor) -> CoarseRows:
    """The coarse copy of (n, width) float32 rows, made block by block.

    Raises: ValueError naming the first row that is not finite.
    """
    count, width = exact.shape
    centre, spread = typical(exact)
    rows = torch.empty(exact.shape, dtype=torch.bfloat16, device=exact.device)
    norms, lengths, losses = torch.empty((3, count), dtype=torch.float64, device=exact.device)
    starts, threads = range(0, count, max(1, 2**17 // width)), thread_count(exact.device)

    def round_part(thread: int) -> None:
        for start in starts[thread::threads]:
            part = slice(start, start + starts.step)
            precise = exact[part].double().sub_(centre)
            rows[part] = rounded(precise)
            norms[part], lengths[part] = precise.norm(dim=1), (precise / spread).norm(dim=1)
            losses[part] = precise.sub_(rows[part]).masked_fill_(rows[part] == 0, 0).div_(spread).norm(dim=1)

    with alone():
        in_parallel(round_part, threads)
    bad = norms.isfinite().logical_not().nonzero()
    if len(bad):
        raise ValueError(f"row {int(bad[0])}: its vector is not finite in float32")
    longest, largest = (max(float(each.max()), TINY) if count else 1.0 for each in (lengths, norms))
    rounding = float((losses / lengths.clamp_min(TINY**2)).max()) if count else 0.0
    shares = (lengths / longest * (1 + 2**-20)).clamp_min(SHORTEST).float()
    return CoarseRows(rows, shares, longest, largest, rounding, centre, spread)


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
