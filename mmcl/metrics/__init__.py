"""Metrics: pure functions from scores, embeddings or distributions to numbers."""

from mmcl.metrics.hubness import hubness_skew, k_occurrence
from mmcl.metrics.retrieval import (
    best_ranks,
    mean_reciprocal_rank,
    median_rank,
    mrr_from_hits,
    ndcg_at_k,
    recall_at_k,
    recall_from_hits,
    retrieval_report,
)

__all__ = [
    "best_ranks",
    "hubness_skew",
    "k_occurrence",
    "mean_reciprocal_rank",
    "median_rank",
    "mrr_from_hits",
    "ndcg_at_k",
    "recall_at_k",
    "recall_from_hits",
    "retrieval_report",
]
