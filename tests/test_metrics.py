"""Contracts of `tyxe.metrics`: hand examples, independent oracles, properties, bad inputs."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, stats
from sklearn import metrics as oracle
from torch import Tensor

from tyxe import metrics

CLASSIFICATION = (
    metrics.nll,
    metrics.accuracy,
    metrics.brier_score,
    metrics.expected_calibration_error,
)
OOD = (metrics.ood_auroc, metrics.ood_aupr)
GAUSSIAN = (metrics.gaussian_nll, metrics.crps_gaussian, metrics.interval_coverage)
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)

seeds = st.integers(0, 2**32 - 1)
sizes = st.integers(1, 40)


def classified(seed: int, num_points: int = 50, num_classes: int = 4) -> tuple[Tensor, Tensor]:
    """Random probabilities (float64), sharp and flat ones, and unrelated targets."""
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(num_points, num_classes, generator=generator, dtype=torch.float64)
    return logits.softmax(-1), torch.randint(num_classes, (num_points,), generator=generator)


def scored(seed: int, num_in: int = 30, num_out: int = 20) -> tuple[Tensor, Tensor]:
    """Random scores (float64) on a coarse grid, so that many tie."""
    generator = torch.Generator().manual_seed(seed)
    in_scores = torch.randint(1, 9, (num_in,), generator=generator) / 8
    out_scores = torch.randint(0, 7, (num_out,), generator=generator) / 8
    return in_scores.double(), out_scores.double()


def gaussians(seed: int, num_points: int = 20) -> tuple[Tensor, Tensor, Tensor]:
    """Random means, scales and targets, float64."""
    generator = torch.Generator().manual_seed(seed)
    mean, log_scale, noise = torch.randn(
        3, num_points, generator=generator, dtype=torch.float64
    ).unbind()
    return mean, log_scale.exp(), mean + 2 * noise


def naive_ece(probs: Tensor, targets: Tensor, num_bins: int) -> float:
    """Point by point, bin by bin, in plain Python."""
    points = [(max(p), p.index(max(p)) == y) for p, y in zip(probs.tolist(), targets, strict=True)]
    ece = 0.0
    for b in range(num_bins):
        inside = [q for q in points if b / num_bins < q[0] <= (b + 1) / num_bins]
        if inside:
            confidence = sum(c for c, _ in inside) / len(inside)
            right = sum(bool(r) for _, r in inside) / len(inside)
            ece += len(inside) / len(points) * abs(right - confidence)
    return ece


def scikit_labels(in_scores: Tensor, out_scores: Tensor) -> tuple[np.ndarray, np.ndarray]:
    labels = np.r_[np.ones(len(in_scores)), np.zeros(len(out_scores))]
    return labels, torch.cat([in_scores, out_scores]).numpy()


def assert_scalar(value: Tensor, expected: float, tolerance: float = 1e-12) -> None:
    assert value.shape == ()
    assert value.item() == pytest.approx(expected, rel=tolerance, abs=tolerance)


class TestByHand:
    def test_nll_averages_logs_of_the_targets_probabilities(self) -> None:
        probs = torch.tensor([[0.5, 0.5], [0.25, 0.75]], dtype=torch.float64)
        value = metrics.nll(probs, torch.tensor([0, 0]))
        assert_scalar(value, (math.log(2) + math.log(4)) / 2)

    def test_nll_of_an_impossible_target_is_infinite(self) -> None:
        assert metrics.nll(torch.tensor([[1.0, 0.0]]), torch.tensor([1])) == math.inf

    def test_accuracy_counts(self) -> None:
        probs = torch.tensor([[0.9, 0.1], [0.2, 0.8], [0.6, 0.4]], dtype=torch.float64)
        assert_scalar(metrics.accuracy(probs, torch.tensor([0, 1, 1])), 2 / 3)

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

    def test_one_bin_is_the_gap_of_the_means(self) -> None:
        probs, targets = classified(0)
        gap = metrics.accuracy(probs, targets) - probs.amax(-1).mean()
        ece = metrics.expected_calibration_error(probs, targets, num_bins=1)
        torch.testing.assert_close(ece, gap.abs())

    @pytest.mark.parametrize(
        ("in_scores", "out_scores", "auroc", "aupr"),
        [
            ([0.9, 0.8], [0.1, 0.2], 1.0, 1.0),
            ([0.1, 0.2], [0.9, 0.8], 0.0, (1 / 3 + 2 / 4) / 2),
            ([0.5, 0.5], [0.5, 0.5], 0.5, 0.5),
            ([0.9, 0.6], [0.6, 0.5], 0.875, (1 + 2 / 3) / 2),
            ([math.inf], [-math.inf], 1.0, 1.0),
        ],
        ids=["separated", "reversed", "all tied", "one tie", "infinite"],
    )
    def test_ood(
        self, in_scores: list[float], out_scores: list[float], auroc: float, aupr: float
    ) -> None:
        pair = (torch.tensor(in_scores).double(), torch.tensor(out_scores).double())
        assert_scalar(metrics.ood_auroc(*pair), auroc)
        assert_scalar(metrics.ood_aupr(*pair), aupr)

    def test_rmse(self) -> None:
        value = metrics.rmse(torch.zeros(2).double(), torch.tensor([3.0, 4.0]).double())
        assert_scalar(value, math.sqrt(12.5))

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

    def test_brier_is_the_naive_loop(self) -> None:
        probs, targets = classified(2)
        errors = [
            (p - (c == y)) ** 2
            for row, y in zip(probs.tolist(), targets.tolist(), strict=True)
            for c, p in enumerate(row)
        ]
        assert_scalar(metrics.brier_score(probs, targets), sum(errors) / len(targets))

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


class TestProperties:
    @pytest.mark.parametrize("metric", CLASSIFICATION)
    @given(seed=seeds, num_points=sizes)
    @settings(max_examples=20, deadline=None)
    def test_order_of_points_does_not_matter(
        self, metric: Callable[..., Tensor], seed: int, num_points: int
    ) -> None:
        probs, targets = classified(seed, num_points)
        order = torch.randperm(num_points, generator=torch.Generator().manual_seed(seed))
        torch.testing.assert_close(metric(probs[order], targets[order]), metric(probs, targets))

    @pytest.mark.parametrize("metric", CLASSIFICATION)
    def test_order_of_classes_does_not_matter(self, metric: Callable[..., Tensor]) -> None:
        probs, targets = classified(8)
        order = torch.tensor([2, 0, 3, 1])
        permuted = metric(probs[:, order], order.argsort()[targets])
        torch.testing.assert_close(permuted, metric(probs, targets))

    @given(seed=seeds, num_points=sizes, num_classes=st.integers(2, 6))
    @settings(max_examples=50, deadline=None)
    def test_ranges(self, seed: int, num_points: int, num_classes: int) -> None:
        probs, targets = classified(seed, num_points, num_classes)
        assert metrics.nll(probs, targets) >= 0
        assert 0 <= metrics.accuracy(probs, targets) <= 1
        assert 0 <= metrics.brier_score(probs, targets) <= 2
        assert 0 <= metrics.expected_calibration_error(probs, targets) <= 1
        entropy = metrics.predictive_entropy(probs)
        assert entropy.shape == (num_points,)
        assert (entropy >= 0).all()
        assert (entropy <= math.log(num_classes) + 1e-12).all()

    @given(seed=seeds, num_points=sizes, num_bins=st.integers(1, 20))
    @settings(max_examples=50, deadline=None)
    def test_the_curve_keeps_every_point(self, seed: int, num_points: int, num_bins: int) -> None:
        probs, targets = classified(seed, num_points)
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
        assert_scalar(metrics.expected_calibration_error(probs, targets, num_bins), 0)

    @given(seeds, sizes, sizes)
    @settings(max_examples=50, deadline=None)
    def test_auroc_of_the_swapped_sets_is_the_complement(
        self, seed: int, num_in: int, num_out: int
    ) -> None:
        pair = scored(seed, num_in, num_out)
        assert_scalar(metrics.ood_auroc(*pair) + metrics.ood_auroc(*pair[::-1]), 1)

    @pytest.mark.parametrize("metric", OOD)
    @given(seed=seeds)
    @settings(max_examples=20, deadline=None)
    def test_only_the_order_of_scores_matters(
        self, metric: Callable[..., Tensor], seed: int
    ) -> None:
        in_scores, out_scores = scored(seed)
        value = metric(in_scores, out_scores)
        assert 0 <= value <= 1
        monotone = metric((3 * in_scores).exp(), (3 * out_scores).exp())
        torch.testing.assert_close(monotone, value)
        torch.testing.assert_close(metric(in_scores.flip(0), out_scores.flip(0)), value)

    @given(seed=seeds, factor=st.floats(0.01, 100), shift=st.floats(-100, 100))
    @settings(max_examples=50, deadline=None)
    def test_change_of_units(self, seed: int, factor: float, shift: float) -> None:
        mean, scale, targets = gaussians(seed)
        moved = (factor * mean + shift, factor * scale, factor * targets + shift)
        crps = metrics.crps_gaussian(mean, scale, targets)
        torch.testing.assert_close(metrics.crps_gaussian(*moved), factor * crps)
        nll = metrics.gaussian_nll(mean, scale, targets)
        torch.testing.assert_close(metrics.gaussian_nll(*moved), nll + math.log(factor))
        rmse = metrics.rmse(mean, targets)
        torch.testing.assert_close(metrics.rmse(moved[0], moved[2]), factor * rmse)

    def test_crps_of_a_narrow_prediction_is_the_absolute_error(self) -> None:
        mean, _, targets = gaussians(9)
        expected = (targets - mean).abs().mean()
        torch.testing.assert_close(metrics.crps_gaussian(mean, 1e-12, targets), expected)

    def test_coverage_of_the_true_model_is_the_level(self) -> None:
        num_points, level = 20_000, 0.9
        targets = torch.randn(num_points, generator=torch.Generator().manual_seed(0))
        value = metrics.interval_coverage(torch.zeros(num_points), 1.0, targets, level)
        standard_error = math.sqrt(level * (1 - level) / num_points)
        assert abs(value - level) < 4 * standard_error

    @pytest.mark.parametrize("metric", GAUSSIAN)
    def test_one_scale_stands_for_all(self, metric: Callable[..., Tensor]) -> None:
        mean, _, targets = gaussians(10)
        expected = metric(mean, torch.full_like(mean, 0.5), targets)
        torch.testing.assert_close(metric(mean, 0.5, targets), expected)
        torch.testing.assert_close(metric(mean, torch.tensor(0.5), targets), expected)

    @pytest.mark.parametrize("metric", GAUSSIAN)
    def test_outputs_are_averaged_like_points(self, metric: Callable[..., Tensor]) -> None:
        matrices = [v.reshape(10, 2) for v in gaussians(11)]
        torch.testing.assert_close(metric(*matrices), metric(*gaussians(11)))


class TestDtypesAndDevices:
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize(
        "metric", [*CLASSIFICATION, lambda p, _: metrics.predictive_entropy(p)]
    )
    def test_classification(self, metric: Callable[..., Tensor], dtype: torch.dtype) -> None:
        """Eighths are exact in every dtype, so that all differ by arithmetic alone."""
        generator = torch.Generator().manual_seed(12)
        draws = torch.randint(3, (40, 8), generator=generator)
        probs = torch.nn.functional.one_hot(draws).double().mean(1)
        targets = draws[:, 0]
        value = metric(probs.to(dtype), targets)
        assert value.dtype == torch.promote_types(dtype, torch.float32)
        torch.testing.assert_close(value.double(), metric(probs, targets), rtol=1e-6, atol=1e-6)

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("metric", OOD)
    def test_ood(self, metric: Callable[..., Tensor], dtype: torch.dtype) -> None:
        in_scores, out_scores = scored(13)
        value = metric(in_scores.to(dtype), out_scores.to(dtype))
        assert value.dtype == torch.promote_types(dtype, torch.float32)
        assert_scalar(value, metric(in_scores, out_scores).item(), tolerance=1e-6)

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("metric", GAUSSIAN)
    def test_gaussian(self, metric: Callable[..., Tensor], dtype: torch.dtype) -> None:
        rounded = [v.to(dtype) for v in gaussians(14)]
        value = metric(*rounded)
        assert value.dtype == torch.promote_types(dtype, torch.float32)
        assert_scalar(value, metric(*[v.double() for v in rounded]).item(), tolerance=1e-5)

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_softmax_in_any_dtype_sums_to_one(self, dtype: torch.dtype) -> None:
        logits = 5 * torch.randn(200, 1000, generator=torch.Generator().manual_seed(0))
        metrics.nll(logits.to(dtype).softmax(-1), torch.zeros(200, dtype=torch.long))

    @pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int32, torch.int64])
    def test_integers_of_any_width_are_targets(self, dtype: torch.dtype) -> None:
        probs, targets = classified(15)
        for metric in CLASSIFICATION:
            assert metric(probs, targets.to(dtype)) == metric(probs, targets)

    def test_strided_scores(self) -> None:
        """`torch.searchsorted` warns of them, and warnings are errors."""
        scores = torch.stack(scored(16, 20, 20), -1)
        for metric in OOD:
            expected = metric(scores[:, 0].contiguous(), scores[:, 1].contiguous())
            assert metric(scores[:, 0], scores[:, 1]) == expected

    def test_many_points_stay_exact(self) -> None:
        """A million against a million: neither their product nor a float32 sum is formed."""
        num_points = 1_000_000
        scores = torch.arange(num_points, dtype=torch.float32)
        assert_scalar(metrics.ood_auroc(scores + 0.5, scores), 0.5 + 0.5 / num_points, 1e-7)
        probs = torch.tensor([[0.7, 0.3]]).expand(num_points, 2)
        targets = (torch.arange(num_points) % 10 >= 7).long()
        assert metrics.expected_calibration_error(probs, targets) < 1e-7

    @pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
    def test_cuda(self) -> None:
        for group, inputs in (
            (CLASSIFICATION, classified(17)),
            (OOD, scored(17)),
            (GAUSSIAN, gaussians(17)),
        ):
            for metric in group:
                value = metric(*(v.cuda() for v in inputs))
                assert value.is_cuda
                torch.testing.assert_close(value.cpu(), metric(*inputs))
                with pytest.raises(ValueError, match=r"is on c.*, expected c.*: pass .*\.to\("):
                    metric(*(v.cuda() if i == 0 else v for i, v in enumerate(inputs)))


PROBS = torch.tensor([[0.5, 0.5], [0.25, 0.75]])
TARGETS = torch.tensor([0, 1])
META = torch.zeros(2, dtype=torch.long, device="meta")
BAD_PROBS = {
    "logits": (PROBS + 1, ValueError, r"sum to between 3 and 3, .*logits\.softmax\(-1\)"),
    "negative": (PROBS - 2, ValueError, r"smallest -1\.75, .*logits\.softmax\(-1\)"),
    "infinite": (PROBS / 0, ValueError, r"sum to between inf and inf"),
    "nan": (PROBS * math.nan, ValueError, r"`probs` has 4 NaN entries"),
    "stacked": (PROBS.expand(3, 2, 2), ValueError, r"\(3, 2, 2\), expected \(n, C\).*mean\(0\)"),
    "one class": (PROBS[:, :1], ValueError, r"\(2, 1\), expected.*stack\(\[1 - p, p\], -1\)"),
    "flat": (PROBS[:, 0], ValueError, r"\(2,\), expected \(n, C\)"),
    "empty": (PROBS[:0], ValueError, r"`probs` is empty, of shape \(0, 2\)"),
    "integer": (TARGETS, TypeError, r"torch\.int64, expected floating point: pass probs\.float"),
    "numpy": (PROBS.numpy(), TypeError, r"`probs` is of type ndarray.*torch\.as_tensor\(probs\)"),
}
BAD_TARGETS = {
    "float": (TARGETS.float(), TypeError, r"torch\.float32, expected integer: .*targets\.long"),
    "bool": (TARGETS.bool(), TypeError, r"torch\.bool, expected integer"),
    "list": ([0, 1], TypeError, r"of type list, .*torch\.as_tensor\(targets\)"),
    "longer": (torch.tensor([0, 1, 1]), ValueError, r"shape \(3,\), expected \(2,\)"),
    "column": (TARGETS[:, None], ValueError, r"shape \(2, 1\), .*targets\.squeeze\(-1\)"),
    "one-hot": (torch.eye(2), ValueError, r"shape \(2, 2\), .*targets\.argmax\(-1\)"),
    "too large": (TARGETS + 1, ValueError, r"range over 1\.\.2, expected 0\.\.1 for 2 classes"),
    "negative": (TARGETS - 1, ValueError, r"range over -1\.\.0, expected 0\.\.1"),
    "elsewhere": (META, ValueError, r"on meta, expected cpu, .*targets\.to\(probs\.device\)"),
}
SCORES = torch.tensor([0.1, 0.9])
BAD_SCORES = {
    "probabilities": (PROBS, ValueError, r"shape \(2, 2\), expected \(n,\): .*amax\(-1\)"),
    "empty": (SCORES[:0], ValueError, r"is empty, of shape \(0,\)"),
    "nan": (SCORES * math.nan, ValueError, r"has 2 NaN entries"),
    "integer": (TARGETS, TypeError, r"torch\.int64, expected floating point"),
    "list": ([0.1], TypeError, r"of type list"),
}
BAD_GAUSSIAN = {
    "column": ((SCORES, 1.0, SCORES[:, None]), ValueError, r"targets\.reshape\(mean\.shape\)"),
    "longer": ((SCORES, 1.0, torch.ones(3)), ValueError, r"`targets` has shape \(3,\), .*\(2,\)"),
    "scale's shape": ((SCORES, torch.ones(1), SCORES), ValueError, r"scale\.expand_as\(mean\)"),
    "zero scale": ((SCORES, 0.0, SCORES), ValueError, r"from 0 to 0, .*variance\.sqrt\(\)"),
    "negative scale": ((SCORES, -SCORES, SCORES), ValueError, r"from -0\.9 to -0\.1"),
    "infinite scale": ((SCORES, math.inf, SCORES), ValueError, r"positive and finite"),
    "nan scale": ((SCORES, math.nan, SCORES), ValueError, r"`scale` has 1 NaN"),
    "nan mean": ((SCORES * math.nan, 1.0, SCORES), ValueError, r"`mean` has 2 NaN"),
    "nan target": ((SCORES, 1.0, SCORES * math.nan), ValueError, r"`targets` has 2 NaN"),
    "number": ((SCORES[0], 1.0, SCORES[0]), ValueError, r"mean\.unsqueeze\(0\)"),
    "empty": ((SCORES[:0], 1.0, SCORES[:0]), ValueError, r"`mean` is empty"),
    "integer targets": ((SCORES, 1.0, TARGETS), TypeError, r"pass targets\.float\(\)"),
    "scale's type": ((SCORES, "1", SCORES), TypeError, r"`scale` is of type str"),
}


class TestBadInput:
    @pytest.mark.parametrize("metric", [*CLASSIFICATION, metrics.calibration_curve])
    @pytest.mark.parametrize("case", BAD_PROBS)
    def test_probs(self, metric: Callable[..., Any], case: str) -> None:
        probs, error, message = BAD_PROBS[case]
        with pytest.raises(error, match=message):
            metric(probs, TARGETS)

    @pytest.mark.parametrize("case", BAD_PROBS)
    def test_probs_of_entropy(self, case: str) -> None:
        probs, error, message = BAD_PROBS[case]
        with pytest.raises(error, match=message):
            metrics.predictive_entropy(probs)

    @pytest.mark.parametrize("metric", [*CLASSIFICATION, metrics.calibration_curve])
    @pytest.mark.parametrize("case", BAD_TARGETS)
    def test_targets(self, metric: Callable[..., Any], case: str) -> None:
        targets, error, message = BAD_TARGETS[case]
        with pytest.raises(error, match=message):
            metric(PROBS, targets)

    @pytest.mark.parametrize(
        "metric", [metrics.expected_calibration_error, metrics.calibration_curve]
    )
    def test_bins(self, metric: Callable[..., Any]) -> None:
        with pytest.raises(ValueError, match="`num_bins` is 0, expected at least 1"):
            metric(PROBS, TARGETS, num_bins=0)

    @pytest.mark.parametrize("metric", OOD)
    @pytest.mark.parametrize("case", BAD_SCORES)
    def test_scores(self, metric: Callable[..., Tensor], case: str) -> None:
        scores, error, message = BAD_SCORES[case]
        with pytest.raises(error, match=f"`in_scores`.*{message}"):
            metric(scores, SCORES)
        with pytest.raises(error, match=f"`out_scores`.*{message}"):
            metric(SCORES, scores)

    @pytest.mark.parametrize("metric", GAUSSIAN)
    @pytest.mark.parametrize("case", BAD_GAUSSIAN)
    def test_gaussian(self, metric: Callable[..., Tensor], case: str) -> None:
        inputs, error, message = BAD_GAUSSIAN[case]
        with pytest.raises(error, match=message):
            metric(*inputs)

    def test_rmse_does_not_broadcast(self) -> None:
        with pytest.raises(ValueError, match=r"targets\.reshape\(mean\.shape\)"):
            metrics.rmse(SCORES, SCORES[:, None])

    @pytest.mark.parametrize("level", [0.0, 1.0, 95.0, math.nan])
    def test_level(self, level: float) -> None:
        with pytest.raises(ValueError, match=r"`level` is .*, expected within \(0, 1\)"):
            metrics.interval_coverage(SCORES, 1.0, SCORES, level)
