"""Metrics: pure functions from scores, embeddings or distributions to numbers."""

from mmcl.metrics.calibration import expected_calibration_error, fit_temperature, log_loss_of_scores, reliability
from mmcl.metrics.geometry import (
    alignment,
    effective_rank,
    hardest_negative_share,
    mutual_information_bound,
    same_class_similarity,
    uniformity,
)
from mmcl.metrics.hubness import hubness_skew, k_occurrence
from mmcl.metrics.identifiability import angle_error, linear_r2, matched_correlations, mean_correlation
from mmcl.metrics.probes import linear_probe, weighted_knn
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
    "alignment",
    "angle_error",
    "best_ranks",
    "effective_rank",
    "expected_calibration_error",
    "fit_temperature",
    "hardest_negative_share",
    "hubness_skew",
    "k_occurrence",
    "linear_probe",
    "linear_r2",
    "log_loss_of_scores",
    "matched_correlations",
    "mean_correlation",
    "mean_reciprocal_rank",
    "median_rank",
    "mrr_from_hits",
    "mutual_information_bound",
    "ndcg_at_k",
    "recall_at_k",
    "recall_from_hits",
    "reliability",
    "retrieval_report",
    "same_class_similarity",
    "uniformity",
    "weighted_knn",
]
