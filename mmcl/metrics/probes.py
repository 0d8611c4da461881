"""What features are worth for classification: a linear probe and weighted neighbours, their conventions stated."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from mmcl.arrays import as_numpy

PROBE_CS = (0.001, 0.01, 0.1, 1.0, 10.0, 100.0)
"""Inverse strengths of the ridge that a probe chooses from, on validation rows."""


def linear_probe(
    features: Any, labels: Any, test_features: Any, test_labels: Any, cs: Sequence[float] = PROBE_CS, seed: int = 0
) -> float:
    """Accuracy of a logistic regression on frozen features.

    Features are standardised by the training rows. C is chosen by the accuracy over five stratified folds of the
    training rows (fewer where a class has fewer rows), the smaller at a tie; then all of them are fitted.

    Args:
        features: (n, d); labels: (n,). test_features: (m, d); test_labels: (m,), never seen before the end.
    Returns: share of the test rows that are right.
    Raises: ValueError for rows that do not belong together, fewer than two classes, or a class of one row.
    Source: Chen et al. 2020, appendix B.6, with scikit-learn's solver.
    """
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import GridSearchCV, StratifiedKFold
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    x, y = labelled(features, labels, "features")
    _, counts = np.unique(y, return_counts=True)
    if len(counts) < 2 or counts.min() < 2:
        raise ValueError(f"a probe needs two classes or more, each of two rows or more, got {counts.tolist()} rows")
    folds = StratifiedKFold(min(5, int(counts.min())), shuffle=True, random_state=seed)
    probe = make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000))
    search = GridSearchCV(probe, {"logisticregression__C": sorted(cs)}, cv=folds)
    return float(search.fit(x, y).score(*labelled(test_features, test_labels, "test_features")))


def weighted_knn(
    features: Any, labels: Any, test_features: Any, test_labels: Any, k: int = 20, temperature: float = 0.07
) -> float:
    """Accuracy of the k nearest training rows by cosine, each voting with exp(cosine / temperature).

    Args:
        features: (n, d); labels: (n,). test_features: (m, d); test_labels: (m,). Rows are normalised here.
        k: at most n is used.
    Returns: share of the test rows that are right. Memory O(m n).
    Raises: ValueError for rows that do not belong together, or k below 1.
    Source: Wu et al. 2018, section 3.4; their k is 200, of 1.3 million rows.
    """
    if k < 1:
        raise ValueError(f"k must be at least 1, got {k}")
    x, y = labelled(features, labels, "features")
    tests, answers = labelled(test_features, test_labels, "test_features")
    classes, numbers = np.unique(y, return_inverse=True)
    cosines = _unit(tests) @ _unit(x).T
    k = min(k, len(x))
    near = np.argpartition(-cosines, k - 1, axis=1)[:, :k]
    near_cosines = np.take_along_axis(cosines, near, axis=1)
    weights = np.exp((near_cosines - near_cosines.max(1, keepdims=True)) / temperature)
    votes = np.zeros((len(tests), len(classes)))
    np.add.at(votes, (np.arange(len(tests))[:, None], numbers[near]), weights)
    return float((classes[votes.argmax(1)] == answers).mean())


def labelled(features: Any, labels: Any, name: str) -> tuple[np.ndarray, np.ndarray]:
    """(n, d) float64 and (n,); ValueError names the shapes otherwise, and the first row that is not finite."""
    x, y = as_numpy(features).astype(np.float64), as_numpy(labels)
    if x.ndim != 2 or y.shape != (len(x),) or not len(x):
        raise ValueError(f"{name}: expected (n, d) features and (n,) labels, got {x.shape} and {y.shape}")
    bad = ~np.isfinite(x).all(1)
    if bad.any():
        raise ValueError(f"{name}: row {int(np.flatnonzero(bad)[0])} holds NaN or an infinite value")
    return x, y


def _unit(rows: np.ndarray) -> np.ndarray:
    return rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)
