"""Metrics under permutations, changes of units and other properties."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.oracles import scores
from tyxe import metrics


class TestProperties:
    @pytest.mark.parametrize("metric", scores.CLASSIFICATION)
    @given(seed=scores.seeds, num_points=scores.sizes)
    @settings(max_examples=20, deadline=None)
    def test_order_of_points_does_not_matter(
        self, metric: Callable[..., Tensor], seed: int, num_points: int
    ) -> None:
        probs, targets = scores.classified(seed, num_points)
        order = torch.randperm(num_points, generator=torch.Generator().manual_seed(seed))
        torch.testing.assert_close(metric(probs[order], targets[order]), metric(probs, targets))

    @pytest.mark.parametrize("metric", scores.CLASSIFICATION)
    def test_order_of_classes_does_not_matter(self, metric: Callable[..., Tensor]) -> None:
        probs, targets = scores.classified(8)
        order = torch.tensor([2, 0, 3, 1])
        permuted = metric(probs[:, order], order.argsort()[targets])
        torch.testing.assert_close(permuted, metric(probs, targets))

    @given(seed=scores.seeds, num_points=scores.sizes, num_classes=st.integers(2, 6))
    @settings(max_examples=50, deadline=None)
    def test_ranges(self, seed: int, num_points: int, num_classes: int) -> None:
        probs, targets = scores.classified(seed, num_points, num_classes)
        assert metrics.nll(probs, targets) >= 0
        assert 0 <= metrics.accuracy(probs, targets) <= 1
        assert 0 <= metrics.brier_score(probs, targets) <= 2
        assert 0 <= metrics.expected_calibration_error(probs, targets) <= 1
        entropy = metrics.predictive_entropy(probs)
        assert entropy.shape == (num_points,)
        assert (entropy >= 0).all()
        assert (entropy <= math.log(num_classes) + 1e-12).all()

    @given(seed=scores.seeds, num_points=scores.sizes, num_bins=st.integers(1, 20))
    @settings(max_examples=50, deadline=None)
    def test_the_curve_keeps_every_point(self, seed: int, num_points: int, num_bins: int) -> None:
        probs, targets = scores.classified(seed, num_points)
        curve = metrics.calibration_curve(probs, targets, num_bins)
        assert len(curve.counts) <= num_bins
        assert (curve.counts > 0).all()
        assert curve.counts.sum() == num_points
        assert (curve.confidence.diff() > 0).all()
        right = (curve.counts * curve.accuracy).sum() / num_points
        torch.testing.assert_close(right, metrics.accuracy(probs, targets))

    @given(st.lists(st.integers(5, 10), min_size=1, max_size=6), st.integers(1, 20))
    @settings(max_examples=50, deadline=None)
    def test_ece_of_a_perfectly_calibrated_classifier_is_zero(
        self, tenths: list[int], num_bins: int
    ) -> None:
        """At confidence k/10, ten points of which k are right."""
        first = torch.tensor(tenths).repeat_interleave(10).double() / 10
        targets = torch.cat([(torch.arange(10) >= k).long() for k in tenths])
        probs = torch.stack([first, 1 - first], -1)
        scores.assert_scalar(metrics.expected_calibration_error(probs, targets, num_bins), 0)

    @given(scores.seeds, scores.sizes, scores.sizes)
    @settings(max_examples=50, deadline=None)
    def test_auroc_of_the_swapped_sets_is_the_complement(
        self, seed: int, num_in: int, num_out: int
    ) -> None:
        pair = scores.scored(seed, num_in, num_out)
        scores.assert_scalar(metrics.ood_auroc(*pair) + metrics.ood_auroc(*pair[::-1]), 1)

    @pytest.mark.parametrize("metric", scores.OOD)
    @given(seed=scores.seeds)
    @settings(max_examples=20, deadline=None)
    def test_only_the_order_of_scores_matters(
        self, metric: Callable[..., Tensor], seed: int
    ) -> None:
        in_scores, out_scores = scores.scored(seed)
        value = metric(in_scores, out_scores)
        assert 0 <= value <= 1
        monotone = metric((3 * in_scores).exp(), (3 * out_scores).exp())
        torch.testing.assert_close(monotone, value)
        torch.testing.assert_close(metric(in_scores.flip(0), out_scores.flip(0)), value)

    @given(seed=scores.seeds, factor=st.floats(0.01, 100), shift=st.floats(-100, 100))
    @settings(max_examples=50, deadline=None)
    def test_change_of_units(self, seed: int, factor: float, shift: float) -> None:
        mean, scale, targets = scores.gaussians(seed)
        moved = (factor * mean + shift, factor * scale, factor * targets + shift)
        crps = metrics.crps_gaussian(mean, scale, targets)
        torch.testing.assert_close(metrics.crps_gaussian(*moved), factor * crps)
        nll = metrics.gaussian_nll(mean, scale, targets)
        torch.testing.assert_close(metrics.gaussian_nll(*moved), nll + math.log(factor))
        rmse = metrics.rmse(mean, targets)
        torch.testing.assert_close(metrics.rmse(moved[0], moved[2]), factor * rmse)

    def test_crps_of_a_narrow_prediction_is_the_absolute_error(self) -> None:
        mean, _, targets = scores.gaussians(9)
        expected = (targets - mean).abs().mean()
        torch.testing.assert_close(metrics.crps_gaussian(mean, 1e-12, targets), expected)

    def test_coverage_of_the_true_model_is_the_level(self) -> None:
        num_points, level = 20_000, 0.9
        targets = torch.randn(num_points, generator=torch.Generator().manual_seed(0))
        value = metrics.interval_coverage(torch.zeros(num_points), 1.0, targets, level)
        standard_error = math.sqrt(level * (1 - level) / num_points)
        assert abs(value - level) < 4 * standard_error

    @pytest.mark.parametrize("metric", scores.GAUSSIAN)
    def test_one_scale_stands_for_all(self, metric: Callable[..., Tensor]) -> None:
        mean, _, targets = scores.gaussians(10)
        expected = metric(mean, torch.full_like(mean, 0.5), targets)
        torch.testing.assert_close(metric(mean, 0.5, targets), expected)
        torch.testing.assert_close(metric(mean, torch.tensor(0.5), targets), expected)

    @pytest.mark.parametrize("metric", scores.GAUSSIAN)
    def test_outputs_are_averaged_like_points(self, metric: Callable[..., Tensor]) -> None:
        matrices = [v.reshape(10, 2) for v in scores.gaussians(11)]
        torch.testing.assert_close(metric(*matrices), metric(*scores.gaussians(11)))
