"""Metrics by hand and against scikit-learn, SciPy and naive loops."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, stats
from sklearn import metrics as oracle

from tests.oracles.scores import (
    assert_scalar,
    classified,
    gaussians,
    naive_ece,
    scikit_labels,
    scored,
    seeds,
    sizes,
)
from tyxe import metrics


class TestByHand:
    def test_nll_averages_logs_of_the_targets_probabilities(self) -> None:
        probs = torch.tensor([[0.5, 0.5], [0.25, 0.75]], dtype=torch.float64)
        value = metrics.nll(probs, torch.tensor([0, 0]))
        assert_scalar(value, (math.log(2) + math.log(4)) / 2)

    def test_nll_of_an_impossible_target_is_infinite(self) -> None:
        assert metrics.nll(torch.tensor([[1.0, 0.0]]), torch.tensor([1])) == math.inf

    def test_brier_sums_over_classes(self) -> None:
        probs = torch.tensor([[0.5, 0.3, 0.2]], dtype=torch.float64)
        assert_scalar(metrics.brier_score(probs, torch.tensor([0])), 0.25 + 0.09 + 0.04)

    def test_brier_of_certain_and_wrong_is_two(self) -> None:
        assert metrics.brier_score(torch.tensor([[1.0, 0.0]]), torch.tensor([1])) == 2

    def test_entropy_from_certain_to_uniform(self) -> None:
        probs = torch.tensor([[1, 0, 0, 0], [0.25] * 4, [0.5, 0.5, 0, 0]], dtype=torch.float64)
        expected = torch.tensor([0, math.log(4), math.log(2)], dtype=torch.float64)
        torch.testing.assert_close(metrics.predictive_entropy(probs), expected)

    def test_calibration_curve_leaves_out_empty_bins(self) -> None:
        probs = torch.tensor([[0.55, 0.45], [0.35, 0.65], [0.95, 0.05]], dtype=torch.float64)
        curve = metrics.calibration_curve(probs, torch.tensor([0, 0, 0]), num_bins=5)
        double = {"dtype": torch.float64}
        torch.testing.assert_close(curve.confidence, torch.tensor([0.55, 0.65, 0.95], **double))
        torch.testing.assert_close(curve.accuracy, torch.tensor([1.0, 0.0, 1.0], **double))
        assert curve.counts.tolist() == [1, 1, 1]

    def test_bins_are_closed_on_the_right(self) -> None:
        probs = torch.tensor([[0.5, 0.5], [0.75, 0.25], [1.0, 0.0]])
        curve = metrics.calibration_curve(probs, torch.tensor([0, 0, 0]), num_bins=4)
        assert curve.confidence.tolist() == [0.5, 0.75, 1.0]

    def test_ood_of_infinite_scores(self) -> None:
        pair = (torch.tensor([math.inf]).double(), torch.tensor([-math.inf]).double())
        assert metrics.ood_auroc(*pair) == metrics.ood_aupr(*pair) == 1

    @pytest.mark.parametrize(("z", "level"), [(1.959, 0.95), (0.999, 0.6826894921)])
    def test_coverage_ends_at_the_quantile(self, z: float, level: float) -> None:
        targets = torch.tensor([10 + 2 * z, 10 - 2 * z, 10 + 2 * (z + 2e-3)])
        value = metrics.interval_coverage(torch.full((3,), 10.0), 2.0, targets, level)
        assert_scalar(value, 2 / 3, tolerance=1e-6)


class TestOracles:
    @pytest.mark.parametrize("num_classes", [2, 4])
    def test_nll_is_scikits_log_loss(self, num_classes: int) -> None:
        probs, targets = classified(1, num_classes=num_classes)
        expected = oracle.log_loss(targets, probs.numpy(), labels=range(num_classes))
        assert_scalar(metrics.nll(probs, targets), expected)

    def test_brier_is_twice_scikits_of_two_classes(self) -> None:
        probs, targets = classified(2, num_classes=2)
        expected = 2 * oracle.brier_score_loss(targets, probs[:, 1].numpy())
        assert_scalar(metrics.brier_score(probs, targets), expected)

    def test_accuracy_is_scikits(self) -> None:
        probs, targets = classified(3)
        expected = oracle.accuracy_score(targets, probs.argmax(-1))
        assert_scalar(metrics.accuracy(probs, targets), expected)

    def test_entropy_is_scipys(self) -> None:
        probs, _ = classified(4)
        expected = torch.from_numpy(stats.entropy(probs.numpy(), axis=-1))
        torch.testing.assert_close(metrics.predictive_entropy(probs), expected)

    @given(seeds, sizes, st.integers(2, 5), st.integers(1, 20))
    @settings(max_examples=50, deadline=None)
    def test_ece_is_the_naive_loop(
        self, seed: int, num_points: int, num_classes: int, num_bins: int
    ) -> None:
        probs, targets = classified(seed, num_points, num_classes)
        value = metrics.expected_calibration_error(probs, targets, num_bins)
        assert_scalar(value, naive_ece(probs, targets, num_bins))

    @given(seeds, sizes, sizes)
    @settings(max_examples=50, deadline=None)
    def test_ood_is_scikits_with_ties(self, seed: int, num_in: int, num_out: int) -> None:
        in_scores, out_scores = scored(seed, num_in, num_out)
        labels, scores = scikit_labels(in_scores, out_scores)
        auroc = oracle.roc_auc_score(labels, scores)
        assert_scalar(metrics.ood_auroc(in_scores, out_scores), auroc)
        aupr = oracle.average_precision_score(labels, scores)
        assert_scalar(metrics.ood_aupr(in_scores, out_scores), aupr)

    @pytest.mark.parametrize("target", [-3.0, 0.2, 0.5, 40.0])
    @pytest.mark.parametrize("scale", [0.1, 1.0, 3.0])
    def test_crps_is_its_integral(self, target: float, scale: float) -> None:
        normal = stats.norm(0.5, scale)
        # beyond these ends each integrand is below 1e-20
        low, high = min(0.5 - 10 * scale, target), max(0.5 + 10 * scale, target)
        below = integrate.quad(lambda t: normal.cdf(t) ** 2, low, target, points=[0.5])[0]
        above = integrate.quad(lambda t: normal.sf(t) ** 2, target, high, points=[0.5])[0]
        mean, y = torch.tensor([[0.5], [target]]).double()
        assert_scalar(metrics.crps_gaussian(mean, scale, y), below + above, tolerance=1e-7)

    def test_gaussian_nll_is_torchs(self) -> None:
        mean, scale, targets = gaussians(5)
        expected = -torch.distributions.Normal(mean, scale).log_prob(targets).mean()
        torch.testing.assert_close(metrics.gaussian_nll(mean, scale, targets), expected)

    def test_rmse_is_scikits(self) -> None:
        mean, _, targets = gaussians(6)
        expected = math.sqrt(oracle.mean_squared_error(targets, mean))
        assert_scalar(metrics.rmse(mean, targets), expected)

    @pytest.mark.parametrize("level", [0.1, 0.5, 0.95])
    def test_coverage_is_scipys_interval(self, level: float) -> None:
        mean, scale, targets = gaussians(7, num_points=500)
        low, high = stats.norm(mean.numpy(), scale.numpy()).interval(level)
        expected = np.mean((low <= targets.numpy()) & (targets.numpy() <= high))
        assert_scalar(metrics.interval_coverage(mean, scale, targets, level), expected)
