"""Metrics by hand, against scikit-learn, SciPy and naive loops, and under permutations."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from sklearn import metrics as oracle

from tests.oracles import scores
from tests.oracles.scores import assert_scalar, classified, gaussians
from tyxe import metrics


def test_a_target_of_probability_zero():
    probs, targets = torch.tensor([[1.0, 0.0], [0.5, 0.5]]), torch.tensor([1, 0])
    assert metrics.nll(probs, targets) == math.inf
    # Unless the point does not count.
    assert metrics.nll(probs, targets, torch.tensor([0.0, 1.0])) == math.log(2)


def test_bins_are_closed_on_the_right():
    probs = torch.tensor([[0.5, 0.5], [0.75, 0.25], [1.0, 0.0]])
    curve = metrics.calibration_curve(probs, torch.tensor([0, 0, 0]), num_bins=4)
    assert curve.confidence.tolist() == [0.5, 0.75, 1.0]


def test_ood_of_infinite_scores():
    pair = (torch.tensor([math.inf]).double(), torch.tensor([-math.inf]).double())
    assert metrics.ood_auroc(*pair) == metrics.ood_aupr(*pair) == 1


@pytest.mark.parametrize("num_classes", [2, 4])
def test_scores_of_classes_are_scikits(num_classes):
    probs, targets = classified(1, num_classes=num_classes)
    expected = oracle.log_loss(targets, probs.numpy(), labels=range(num_classes))
    assert_scalar(metrics.nll(probs, targets), expected)
    expected = oracle.accuracy_score(targets, probs.argmax(-1))
    assert_scalar(metrics.accuracy(probs, targets), expected)
    expected = (probs - torch.eye(num_classes)[targets]).square().sum(-1).mean().item()
    assert_scalar(metrics.brier_score(probs, targets), expected)


def test_entropy_is_scipys():
    probs = torch.cat([classified(4)[0], torch.eye(4).double()])
    expected = torch.from_numpy(stats.entropy(probs.numpy(), axis=-1))
    torch.testing.assert_close(metrics.predictive_entropy(probs), expected)


@given(scores.seeds, scores.sizes, scores.sizes)
@settings(max_examples=25)
def test_ood_is_scikits_with_ties(seed, num_in, num_out):
    pair = scores.scored(seed, num_in, num_out)
    labels, both = scores.scikit_labels(*pair)
    assert_scalar(metrics.ood_auroc(*pair), oracle.roc_auc_score(labels, both))
    assert_scalar(metrics.ood_aupr(*pair), oracle.average_precision_score(labels, both))


@pytest.mark.parametrize("target", [-3.0, 0.2, 0.5, 40.0])
@pytest.mark.parametrize("scale", [0.1, 1.0, 3.0])
def test_crps_is_its_integral(target, scale):
    normal = stats.norm(0.5, scale)
    # beyond these ends each integrand is below 1e-20
    low, high = min(0.5 - 10 * scale, target), max(0.5 + 10 * scale, target)
    expected = scores.crps_by_quadrature(normal.cdf, low, target, high, [0.5])
    mean, y = torch.tensor([[0.5], [target]]).double()
    assert_scalar(metrics.crps_gaussian(mean, scale, y), expected, tolerance=1e-7)


def test_crps_of_a_narrow_prediction_is_the_absolute_error():
    mean, _, targets = gaussians(9)
    expected = (targets - mean).abs().mean()
    torch.testing.assert_close(metrics.crps_gaussian(mean, 1e-12, targets), expected)


def test_scores_of_numbers_are_those_of_torch_and_scikit():
    mean, scale, targets = gaussians(5)
    expected = -torch.distributions.Normal(mean, scale).log_prob(targets).mean()
    torch.testing.assert_close(metrics.gaussian_nll(mean, scale, targets), expected)
    expected = math.sqrt(oracle.mean_squared_error(targets, mean))
    for shape in ((20,), (10, 2)):
        assert_scalar(metrics.rmse(mean.view(shape), targets.view(shape)), expected)


@pytest.mark.parametrize("level", [0.1, 0.5, 0.95])
def test_coverage_is_scipys_interval(level):
    mean, scale, targets = gaussians(7, num_points=500)
    low, high = stats.norm(mean.numpy(), scale.numpy()).interval(level)
    expected = np.mean((low <= targets.numpy()) & (targets.numpy() <= high))
    assert_scalar(metrics.interval_coverage(mean, scale, targets, level), expected)


@given(scores.seeds, scores.sizes, st.integers(2, 5), st.integers(1, 20))
@settings(max_examples=25)
def test_bins_have_every_point_and_the_naive_error(seed, num_points, num_classes, num_bins):
    probs, targets = classified(seed, num_points, num_classes)
    curve = metrics.calibration_curve(probs, targets, num_bins)
    assert len(curve.counts) <= num_bins
    assert (curve.counts > 0).all()
    assert curve.counts.sum() == num_points
    right = (curve.counts * curve.accuracy).sum() / num_points
    torch.testing.assert_close(right, metrics.accuracy(probs, targets))
    value = metrics.expected_calibration_error(probs, targets, num_bins)
    assert_scalar(value, scores.naive_ece(probs, targets, num_bins))


@pytest.mark.parametrize("metric", scores.GAUSSIAN)
def test_one_scale_stands_for_all_and_outputs_are_averaged_like_points(
    metric,
):
    mean, scale, targets = gaussians(10)
    expected = metric(mean, torch.full_like(mean, 0.5), targets)
    torch.testing.assert_close(metric(mean, 0.5, targets), expected)
    torch.testing.assert_close(metric(mean, torch.tensor(0.5), targets), expected)
    matrices = [v.reshape(10, 2) for v in (mean, scale, targets)]
    torch.testing.assert_close(metric(*matrices), metric(mean, scale, targets))
