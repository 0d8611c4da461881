"""x"""

import numpy as np
import torch
from torch import Tensor
from mmcl.index.exact_scan import *
from mmcl.index.exact_scan import CoarseRows, by_query, candidates, round_queries, round_rows

QUERIES = 256
FEW = 4096


def search(exact, coarse, queries, k, keep):
    n = len(exact)
    scores = torch.full((len(queries), k), -torch.inf)
    rows = torch.full((len(queries), k), -1)
    kept = n if keep is None else int(keep.sum())
    found = min(k, kept)
    for start in range(0, len(queries), QUERIES):
        part = slice(start, start + QUERIES)
        q = queries[part].double()
        if kept <= max(FEW, 16 * k):
            numbers = None if keep is None else keep.nonzero()[:, 0]
            s, r = brute_force(exact, numbers, q, found)
        else:
            s, r = two_stages(exact, coarse, q, found, keep)
        scores[part, :found] = s.float()
        rows[part, :found] = r
    return scores, rows


LIMIT = 2**14
stats = {}


def two_stages(exact, coarse, queries, k, keep):
    count = len(exact)
    rounded = round_queries(queries, coarse)
    threshold, found = candidates(coarse, rounded, k, keep, max(4 * k, LIMIT))
    stats["coarse"] = len(found.row) / len(queries)
    stats["crowded"] = int(threshold.isinf().sum())
    scores, found = rerank(exact, coarse, queries, rounded, threshold, found, k)
    stats["fine"] = len(found.row) / len(queries)
    order = (found.query * count + found.row).argsort()
    scores, rows = (
        by_query(found.query[order], each[order], len(queries), k, fill)
        for each, fill in ((scores, -torch.inf), (found.row, -1))
    )
    scores, order = scores.sort(dim=1, descending=True, stable=True)
    scores, rows = scores[:, :k], rows.gather(1, order[:, :k])
    hard = (rows[:, -1] < 0).nonzero()[:, 0]
    stats["hard"] = len(hard)
    if len(hard):
        numbers = None if keep is None else keep.nonzero()[:, 0]
        scores[hard], rows[hard] = brute_force(exact, numbers, queries[hard], k)
    return scores, rows


def rerank(exact, coarse, queries, rounded, threshold, found, k):
    if len(found.row) <= 2 * k * len(queries):
        return inner_products(exact, queries, found), found
    table = by_query(found.query, found.score, len(queries), 2 * k, LOWEST)
    first = found.score >= table.topk(2 * k, dim=1).values[:, -1][found.query]
    early = found.where(first)
    scores = inner_products(exact, queries, early)
    kth = by_query(early.query, scores, len(queries), k, -torch.inf).topk(k, dim=1).values[:, -1]
    threshold = torch.maximum(threshold, rounded.coarse(kth).nan_to_num(nan=LOWEST, neginf=LOWEST))
    late = found.where(~first)
    late = late.where(late.score >= rounded.least(threshold, coarse.lengths[late.row], late.query))
    crowded = torch.bincount(late.query, minlength=len(queries)) > max(4 * k, 1024, len(exact) // 64)
    late, keep = late.where(~crowded[late.query]), ~crowded[early.query]
    early, scores = early.where(keep), scores[keep]
    return torch.cat([scores, inner_products(exact, queries, late)]), Candidates(
        *(torch.cat(p) for p in zip(early, late))
    )


def inner_products(exact, queries, found):
    size = max(1, 2**17 // exact.shape[1])
    out = [
        exact.index_select(0, r).double().mul_(queries.index_select(0, q)).sum(1)
        for r, q in zip(found.row.split(size), found.query.split(size))
    ]
    return torch.cat(out) if out else queries.new_empty(0)


def brute_force(exact, numbers, queries, k):
    count = len(exact) if numbers is None else len(numbers)
    size = max(k, 2**21 // max(len(queries), exact.shape[1]))
    best = queries.new_full((len(queries), k), -torch.inf)
    rows = torch.full(best.shape, -1, device=queries.device)
    for start in range(0, count, size):
        block = exact[start : start + size] if numbers is None else exact.index_select(0, numbers[start : start + size])
        scores = queries @ block.double().T
        entering = scores > best[:, -1:]
        hits = entering.nonzero()
        if len(hits) > 4 * k * len(queries) and k <= len(block):
            hits = (entering & (scores >= scores.topk(k, dim=1).values[:, -1:])).nonzero()
        query, place = hits.unbind(1)
        more = by_query(query, scores[query, place], len(queries), 1, -torch.inf)
        numb = by_query(query, place + start, len(queries), 1, -1)
        best, order = torch.cat([best, more], 1).sort(dim=1, descending=True, stable=True)
        best, rows = best[:, :k], torch.cat([rows, numb], 1).gather(1, order[:, :k])
    return best, rows if numbers is None else torch.where(rows < 0, rows, numbers[rows])
