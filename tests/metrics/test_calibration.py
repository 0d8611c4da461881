"""Calibration against counts by hand, and the temperature against what made the labels."""

import numpy as np
import pytest
import torch
from scipy.optimize import minimize_scalar
from scipy.special import softmax
from sklearn.metrics import log_loss

from mmcl.metrics import expected_calibration_error, fit_temperature, log_loss_of_scores, reliability
from mmcl.metrics.calibration import TEMPERATURES


def two_classes(*confidences):
    """Rows that predict class 0 with these probabilities."""
    return np.array([[each, 1 - each] for each in confidences])


def test_error_by_hand():
    # (0.8, 1]: 0.9 and 0.95, one right: |1/2 - 0.925| = 0.425; (0.6, 0.8]: 0.7, right: 0.3. (2 * 0.425 + 0.3) / 3
    probabilities = two_classes(0.9, 0.95, 0.7)
    assert expected_calibration_error(probabilities, [0, 1, 0], bins=5) == pytest.approx((0.85 + 0.3) / 3)
    # one bin: |2/3 - 0.85|
    assert expected_calibration_error(probabilities, [0, 1, 0], bins=1) == pytest.approx(0.85 - 2 / 3)


def test_bins_by_hand():
    found = reliability(two_classes(0.9, 0.95, 0.7), [0, 1, 0], bins=5)
    assert found.counts.tolist() == [0, 0, 0, 1, 2]
    np.testing.assert_allclose(found.confidence, [np.nan, np.nan, np.nan, 0.7, 0.925])
    np.testing.assert_allclose(found.accuracy, [np.nan, np.nan, np.nan, 1.0, 0.5])


@pytest.mark.parametrize(("confidence", "place"), [(0.75, 2), (0.7500001, 3), (1.0, 3), (0.5, 1), (0.5000001, 2)])
def test_a_bin_owns_its_upper_edge(confidence, place):
    assert reliability(two_classes(confidence), [0], bins=4).counts.tolist() == np.eye(4, dtype=int)[place].tolist()


def test_of_equal_probabilities_the_first_class_is_predicted():
    assert expected_calibration_error([[0.5, 0.5]], [0]) == pytest.approx(0.5)
    assert expected_calibration_error([[0.5, 0.5]] * 2, [0, 1]) == 0.0


def test_certain_and_right_has_no_error_and_certain_and_wrong_all_of_it():
    certain = torch.eye(3)
    assert expected_calibration_error(certain, torch.arange(3)) == 0.0
    assert expected_calibration_error(certain, [1, 2, 0]) == 1.0


def test_labels_drawn_from_the_probabilities_are_calibrated():
    generator = np.random.default_rng(0)
    probabilities = softmax(2 * generator.standard_normal((20_000, 4)), axis=1)
    drawn = (generator.random((20_000, 1)) > probabilities.cumsum(axis=1)).sum(axis=1).clip(max=3)
    assert expected_calibration_error(probabilities, drawn) < 0.015
    sharpened = softmax(3 * np.log(probabilities), axis=1)
    assert expected_calibration_error(sharpened, drawn) > 0.1


@pytest.mark.parametrize("true", [0.2, 1.0, 7.0])
def test_the_temperature_that_made_the_labels_is_found_again(true):
    generator = np.random.default_rng(1)
    scores = 3 * generator.standard_normal((20_000, 5))
    labels = (scores / true + generator.gumbel(size=scores.shape)).argmax(axis=1)
    found = fit_temperature(scores, labels)
    assert found == pytest.approx(true, rel=0.05)
    for other in (0.97 * found, 1.03 * found):
        assert log_loss_of_scores(scores, labels, found) < log_loss_of_scores(scores, labels, other)


def test_the_temperature_equals_a_search_for_the_least_loss():
    generator = np.random.default_rng(2)
    scores, labels = generator.standard_normal((300, 6)), generator.integers(0, 6, 300)
    scores[np.arange(300), labels] += 1
    loss = minimize_scalar(lambda log: log_loss_of_scores(scores, labels, np.exp(log)), bounds=(-3, 3))
    assert fit_temperature(scores, labels) == pytest.approx(np.exp(loss.x), rel=1e-3)
    assert fit_temperature(10 * scores + 4, labels) == pytest.approx(10 * fit_temperature(scores, labels))


def test_temperature_by_hand():
    # one of four rows is wrong by the same margin of 2: p = 3/4, so 2 / T = log 3
    scores = [[2.0, 0.0]] * 4
    assert fit_temperature(scores, [0, 0, 0, 1]) == pytest.approx(2 / np.log(3))
    assert log_loss_of_scores(scores, [0, 0, 0, 1], 2 / np.log(3)) == pytest.approx(
        -(0.75 * np.log(0.75) + 0.25 * np.log(0.25))
    )


def test_without_a_least_loss_the_nearer_end_is_taken():
    assert fit_temperature([[3.0, 0.0], [0.0, 1.0]], [0, 1]) == TEMPERATURES[0]
    assert fit_temperature([[3.0, 0.0], [0.0, 1.0]], [1, 0]) == TEMPERATURES[1]


def test_log_loss_equals_sklearns():
    generator = np.random.default_rng(3)
    scores, labels = generator.standard_normal((50, 4)), generator.integers(0, 4, 50)
    expected = log_loss(labels, softmax(scores / 0.7, axis=1), labels=range(4))
    assert log_loss_of_scores(torch.from_numpy(scores), torch.from_numpy(labels), 0.7) == pytest.approx(expected)
    assert np.isfinite(log_loss_of_scores([[1e4, 0.0]], [1]))


@pytest.mark.parametrize(
    ("probabilities", "labels", "bins", "fault"),
    [
        ([[0.5, 0.5], [0.9, 0.3]], [0, 0], 5, "row 1 .* does not add up"),
        ([[0.5, 0.5], [1.2, -0.2]], [0, 0], 5, "row 1 holds a negative"),
        ([[np.nan, 0.5]], [0], 5, "row 0 holds"),
        ([[1, 0]], [0], 5, "must be"),
        ([0.5, 0.5], [0], 5, "must be"),
        ([[0.5, 0.5]], [2], 5, "row 0 names a class outside 0 to 1"),
        ([[0.5, 0.5]], [0.0], 5, "integers"),
        ([[0.5, 0.5]], [0, 1], 5, r"\(1,\) integers"),
        ([[0.5, 0.5]], [0], 0, "bins must be"),
        ([[0.5, 0.5]], [0], 2.5, "bins must be"),
    ],
)
def test_what_cannot_be_binned_is_refused(probabilities, labels, bins, fault):
    with pytest.raises(ValueError, match=fault):
        expected_calibration_error(np.array(probabilities), labels, bins)


def test_scores_that_cannot_be_judged_are_refused():
    with pytest.raises(ValueError, match="row 1 is not finite"):
        fit_temperature([[0.0, 1.0], [np.inf, 0.0]], [0, 0])
    with pytest.raises(ValueError, match="outside 0 to 1"):
        fit_temperature([[0.0, 1.0]], [-1])
    with pytest.raises(ValueError, match="temperature must be positive"):
        log_loss_of_scores([[0.0, 1.0]], [0], 0)
