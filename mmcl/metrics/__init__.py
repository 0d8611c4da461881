"""Metrics: pure functions from scores, embeddings or distributions to numbers."""

from mmcl.metrics.calibration import expected_calibration_error, fit_temperature, log_loss_of_scores, reliability
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
    "expected_calibration_error",
    "fit_temperature",
    "hubness_skew",
    "k_occurrence",
    "log_loss_of_scores",
    "mean_reciprocal_rank",
    "median_rank",
    "mrr_from_hits",
    "ndcg_at_k",
    "recall_at_k",
    "recall_from_hits",
    "reliability",
    "retrieval_report",
]
