"""Calibration: whether a class that gets probability p is right in a share p of the cases, and one number to mend it.

Conventions, the same in every function:

- Confidence is the greatest probability of a row; where several classes share it, the one listed first is predicted,
  as in `ZeroShotClassifier.predict`.
- Bins have equal width, and each owns its upper edge: ((b - 1) / bins, b / bins].
"""

from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int
from scipy.optimize import brentq
from scipy.special import logsumexp, softmax

from mmcl.arrays import as_numpy
from mmcl.metrics.retrieval import as_scores, refuse_rows

TEMPERATURES = (1e-3, 1e3)
"""Between these `fit_temperature` looks."""
SUM_TOLERANCE = 1e-3
"""How far a row of probabilities may be from adding up to 1."""


class Reliability(NamedTuple):
    """What a reliability diagram draws, one entry a bin of confidence."""

    counts: Int[np.ndarray, " bins"]
    """Rows."""
    confidence: Float[np.ndarray, " bins"]
    """Mean confidence; NaN in an empty bin."""
    accuracy: Float[np.ndarray, " bins"]
    """Share of right predictions; NaN in an empty bin."""


def reliability(probabilities: Any, labels: Any, bins: Any = 15) -> Reliability:
    """Rows, mean confidence and accuracy of each bin of confidence.

    Args:
        probabilities: (n, classes), each row adding up to 1.
        labels: (n,) integers, the position of the right class.
        bins: of equal width, from 0 to 1.
    Raises: ValueError for shapes that do not fit, rows that are no probabilities, or labels outside the classes, naming
        the row.
    Source: Guo et al. 2017, section 2.
    """
    probabilities = as_probabilities(probabilities)
    labels = as_labels(labels, probabilities.shape)
    if isinstance(bins, bool) or not isinstance(bins, int | np.integer) or bins < 1:
        raise ValueError(f"bins must be an integer of at least 1, got {bins!r}")
    confidence = probabilities.max(axis=1)
    right = probabilities.argmax(axis=1) == labels
    edges = np.arange(1, bins) / bins
    places = np.searchsorted(edges, confidence, side="left")  # a value on an edge belongs to the bin below
    counts = np.bincount(places, minlength=bins)
    rows = np.where(counts > 0, counts, np.nan)
    return Reliability(
        counts,
        np.bincount(places, weights=confidence, minlength=bins) / rows,
        np.bincount(places, weights=right, minlength=bins) / rows,
    )


def expected_calibration_error(probabilities: Any, labels: Any, bins: Any = 15) -> float:
    """Mean over rows of the gap between the accuracy and the confidence of their bin: 0 is best, below 1 is worst.

    Arguments and errors as in `reliability`. Source: Guo et al. 2017, eq. 3.
    """
    counts, confidence, accuracy = reliability(probabilities, labels, bins)
    filled = counts > 0
    return float((counts[filled] * np.abs(accuracy[filled] - confidence[filled])).sum() / counts.sum())


def log_loss_of_scores(scores: Any, labels: Any, temperature: Any = 1.0) -> float:
    """Mean over rows of -log softmax(scores / temperature) at the right class, in nats.

    Args:
        scores: (n, classes), finite.
        labels: (n,) integers, the position of the right class.
    Raises: ValueError for shapes that do not fit, scores that are not finite, a temperature that is not positive.
    """
    scores, labels = scores_and_labels(scores, labels)
    scaled = scores / as_temperature(temperature)
    return float((logsumexp(scaled, axis=1) - scaled[np.arange(len(scaled)), labels]).mean())


def fit_temperature(scores: Any, labels: Any) -> float:
    """The T > 0 for which softmax(scores / T) has the least log loss; predictions stay as they are.

    The loss is convex in 1 / T, so the one place where its slope is zero is found by bisection. Where every row is
    right the loss falls all the way to T = 0, and where scores say less than nothing up to infinity: then the answer
    is the nearer end of `TEMPERATURES`.

    Args:
        scores: (n, classes) of validation rows, not of those to be judged.
        labels: (n,) integers, the position of the right class.
    Raises: as `log_loss_of_scores`.
    Source: Guo et al. 2017, section 4.2 (temperature scaling).
    """
    scores, labels = scores_and_labels(scores, labels)
    true = scores[np.arange(len(scores)), labels]

    def slope(log_inverse: float) -> float:
        """Of the loss, along 1 / T: what the probabilities expect of the scores, less those of the right classes."""
        expected = (softmax(np.exp(log_inverse) * scores, axis=1) * scores).sum(axis=1)
        return float((expected - true).mean())

    low, high = -np.log(TEMPERATURES[1]), -np.log(TEMPERATURES[0])
    if slope(low) >= 0:
        return TEMPERATURES[1]
    if slope(high) <= 0:
        return TEMPERATURES[0]
    return float(np.exp(-brentq(slope, low, high, xtol=1e-12)))


def scores_and_labels(scores: Any, labels: Any) -> tuple[Float[np.ndarray, "n classes"], Int[np.ndarray, " n"]]:
    """Both checked; scores as float64, finite."""
    scores = as_scores(scores).astype(np.float64)
    refuse_rows(~np.isfinite(scores).all(axis=1), "scores: row {} is not finite")
    return scores, as_labels(labels, scores.shape)


def as_probabilities(probabilities: Any) -> Float[np.ndarray, "n classes"]:
    """(n, classes) float64 whose rows add up to 1."""
    array = as_numpy(probabilities)
    if array.dtype.kind != "f" or array.ndim != 2 or 0 in array.shape:
        raise ValueError(f"probabilities must be (rows, classes), not empty, got {array.shape} {array.dtype}")
    array = array.astype(np.float64)
    proper = (array >= 0).all(axis=1) & (np.abs(array.sum(axis=1) - 1) <= SUM_TOLERANCE)  # NaN is neither
    refuse_rows(~proper, "probabilities: row {} holds a negative value or NaN, or does not add up to 1")
    return array


def as_labels(labels: Any, shape: tuple[int, ...]) -> Int[np.ndarray, " n"]:
    """(n,) integers, each the position of a class."""
    array = as_numpy(labels)
    rows, classes = shape
    if array.dtype.kind not in "iu" or array.shape != (rows,):
        raise ValueError(f"labels must be ({rows},) integers, one a row; got {array.shape} {array.dtype}")
    refuse_rows((array < 0) | (array >= classes), f"labels: row {{}} names a class outside 0 to {classes - 1}")
    return array


def as_temperature(temperature: Any) -> float:
    """A positive, finite number."""
    value = float(temperature)
    if not 0 < value < np.inf:
        raise ValueError(f"temperature must be positive, got {temperature!r}")
    return value
