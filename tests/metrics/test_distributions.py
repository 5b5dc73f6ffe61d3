"""Scores of samples, mixtures, intervals and draws; of abstention; weights: against quadrature,
naive loops and scikit-learn."""

import functools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from sklearn import metrics as sk

from tests.oracles.scores import crps_by_quadrature
from tyxe import metrics

DRAWS, N = 7, 6


@pytest.fixture
def numbers():
    means = torch.randn(DRAWS, N, dtype=torch.float64)
    return means, torch.rand(DRAWS, N, dtype=torch.float64) + 0.2, torch.randn(N).double()


def classified(n=60, classes=4):
    logits = torch.randn(n, classes, dtype=torch.float64)
    return logits.softmax(-1), torch.multinomial(logits.softmax(-1), 1)[:, 0]


# --- numbers ------------------------------------------------------------------------------------


def test_crps_of_a_mixture_is_the_integral(numbers):
    means, scales, y = numbers
    expected = [
        crps_by_quadrature(
            lambda t, i=i: float(stats.norm.cdf(t, means[:, i], scales[:, i]).mean()),
            *(-30, float(y[i]), 30),
            inside=[-3, 0, 3],
        )
        for i in range(N)
    ]
    found = metrics.crps_mixture(means, scales, y)
    assert float(found) == pytest.approx(np.mean(expected), rel=1e-6)
    one = metrics.crps_mixture(means[:1], scales[:1], y)
    torch.testing.assert_close(one, metrics.crps_gaussian(means[0], scales[0], y))


def test_crps_of_samples_is_that_of_all_pairs(numbers):
    samples, _, y = numbers
    first = (samples - y).abs().mean(0)
    pairs = (samples[:, None] - samples[None]).abs().mean((0, 1))
    torch.testing.assert_close(metrics.crps_samples(samples, y), (first - 0.5 * pairs).mean())
    narrow = metrics.crps_mixture(samples, 1e-9, y)
    torch.testing.assert_close(metrics.crps_samples(samples, y), narrow)
    # The square of this scale is no number of single precision.
    narrowest = metrics.crps_mixture(samples.float(), 1e-25, y.float())
    torch.testing.assert_close(metrics.crps_samples(samples.float(), y.float()), narrowest)


def test_the_interval_score_is_least_at_the_quantiles():
    y = torch.randn(200_000, dtype=torch.float64)
    level, best = 0.8, stats.norm.ppf(0.9)

    def score(half):
        return float(metrics.interval_score(-half * torch.ones_like(y), half + 0 * y, y, level))

    assert score(best) < min(score(best - 0.15), score(best + 0.15))
    exact = 2 * best + 2 / 0.2 * 2 * (stats.norm.pdf(best) - best * 0.1)
    assert score(best) == pytest.approx(exact, rel=0.01)


def test_pits_are_distribution_functions(numbers):
    means, scales, y = numbers
    expected = stats.norm.cdf(y, means[0], scales[0])
    np.testing.assert_allclose(metrics.gaussian_pit(means[0], scales[0], y), expected, rtol=1e-6)
    found = metrics.sample_pit(means, y)
    by_hand = ((means < y).sum(0) + 0.5) / (DRAWS + 1)
    torch.testing.assert_close(found, by_hand.double())
    assert metrics.sample_pit(torch.zeros(3, 1), torch.zeros(1)).item() == 0.5


def test_quantile_calibration_of_calibrated_predictions():
    y = torch.randn(100_000, dtype=torch.float64)
    zero = torch.zeros_like(y)
    assert metrics.quantile_calibration_error(metrics.gaussian_pit(zero, 1.0, y)) < 0.01
    wide = metrics.quantile_calibration_error(metrics.gaussian_pit(zero, 3.0, y), num_levels=3)
    expected = np.mean([abs(stats.norm.cdf(3 * stats.norm.ppf(q)) - q) for q in (0.25, 0.5, 0.75)])
    assert float(wide) == pytest.approx(expected, abs=0.01)


def test_lppd_is_the_log_of_the_mean():
    each = torch.randn(DRAWS, N, dtype=torch.float64)
    torch.testing.assert_close(metrics.lppd(each), each.exp().mean(0).log().mean())
    assert metrics.lppd(each - 1e4) == pytest.approx(float(metrics.lppd(each)) - 1e4)


# --- classes ------------------------------------------------------------------------------------


def test_adaptive_bins_have_as_many_points():
    probs, y = classified(103)
    curve = metrics.calibration_curve(probs, y, 10, equal_mass=True)
    assert sorted({*curve.counts.tolist()}) == [10, 11]
    assert curve.confidence.diff().min() > 0
    probs, y = probs[:100], y[:100]
    confidence, predicted = probs.max(-1)
    order = confidence.argsort().reshape(10, 10)
    gaps = (predicted == y)[order].double().mean(1) - confidence[order].mean(1)
    even = metrics.adaptive_calibration_error(probs, y, 10)
    assert float(even) == pytest.approx(float(gaps.abs().mean()))


@pytest.mark.parametrize("y", [[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0]])
def test_tied_points_share_their_bins(y):
    """Three points of .6 and one of .8 in two bins: two thirds of a right one in each of them."""
    probs = torch.tensor([[0.6, 0.4]] * 3 + [[0.8, 0.2]], dtype=torch.float64)
    curve = metrics.calibration_curve(probs, torch.tensor(y), 2, equal_mass=True)
    assert curve.counts.tolist() == [2, 2]
    assert curve.confidence.tolist() == pytest.approx([0.6, 0.7])
    assert curve.accuracy.tolist() == pytest.approx([2 / 3, 5 / 6])


@given(seed=st.integers(0, 10**6), n=st.integers(1, 40), bins=st.integers(1, 20))
@settings(max_examples=50)
def test_adaptive_calibration_counts_points_and_not_their_order(seed, n, bins):
    """With many ties, weights that are whole or none, and any number of bins."""
    draw = torch.Generator().manual_seed(seed)
    first = torch.randint(5, 9, (n,), generator=draw).double() / 8
    probs, y = torch.stack([first, 1 - first], -1), torch.randint(2, (n,), generator=draw)
    weights = torch.randint(4, (n,), generator=draw)
    weights[0] += 1

    def error(rows, weights=None):
        return metrics.adaptive_calibration_error(probs[rows], y[rows], bins, weights)

    order, all_rows = torch.randperm(n, generator=draw), torch.arange(n)
    torch.testing.assert_close(error(order, weights[order]), error(all_rows, weights))
    repeated = all_rows.repeat_interleave(weights)
    torch.testing.assert_close(error(all_rows, weights), error(repeated))
    parts = weights * 0.7  # of no whole points: bins of the same mass, whatever the unit
    torch.testing.assert_close(error(all_rows, parts), error(all_rows, parts * 0.1))


def test_risk_coverage_is_the_mean_over_orders_of_ties():
    first = torch.tensor([1.0, 0.75, 0.75, 0.75, 0.5, 0.5, 0.5, 0.5], dtype=torch.float64)
    probs, y = torch.stack([first, 1 - first], -1), torch.tensor([0, 0, 1, 0, 1, 0, 1, 1])
    curve, orders = metrics.risk_coverage_curve(probs, y), []
    for _ in range(2_000):
        order = torch.randperm(8)
        order = order[first[order].argsort(descending=True, stable=True)]
        orders.append(y[order].double().cumsum(0) / torch.arange(1, 9))
    torch.testing.assert_close(curve.risk, torch.stack(orders).mean(0), atol=0.05, rtol=0)
    assert curve.coverage[-1] == 1
    torch.testing.assert_close(metrics.aurc(probs, y), curve.risk.mean())


def test_other_confidences_and_the_best_order():
    probs, y = classified()
    right = (probs.argmax(-1) == y).double()
    best = metrics.aurc(probs, y, right)
    assert best <= metrics.aurc(probs, y) <= metrics.aurc(probs, y, -right)
    entropy = -metrics.predictive_entropy(probs)
    assert metrics.risk_coverage_curve(probs, y, entropy).risk.shape == (60,)


@pytest.mark.parametrize("tpr", [0.5, 0.8, 0.95, 1.0])
def test_fpr_at_tpr_is_that_of_the_roc_curve(tpr):
    inside, outside = torch.randn(200).round(decimals=1) + 1, torch.randn(150).round(decimals=1)
    labels = np.r_[np.ones(200), np.zeros(150)]
    found, rates, _ = sk.roc_curve(labels, torch.cat([inside, outside]), drop_intermediate=False)
    expected = found[np.argmax(rates >= tpr - 1e-9)]
    assert float(metrics.fpr_at_tpr(inside, outside, tpr)) == pytest.approx(expected)


# --- weights ------------------------------------------------------------------------------------


# Metrics of classes; those of numbers, each with what it takes of draws, scales and targets.
OF_CLASSES = [
    metrics.nll,
    metrics.accuracy,
    metrics.brier_score,
    metrics.expected_calibration_error,
    functools.partial(metrics.expected_calibration_error, num_bins=4),
    metrics.adaptive_calibration_error,
    metrics.aurc,
]
OF_NUMBERS = [
    (metrics.gaussian_nll, lambda means, scales, y: (means[0], scales[0], y)),
    (metrics.crps_gaussian, lambda means, scales, y: (means[0], scales[0], y)),
    (metrics.interval_coverage, lambda means, scales, y: (means[0], scales[0], y)),
    (metrics.rmse, lambda means, scales, y: (means[0], y)),
    (metrics.crps_samples, lambda means, scales, y: (means, y)),
    (metrics.crps_mixture, lambda means, scales, y: (means, scales, y)),
    (metrics.lppd, lambda means, scales, y: (means,)),
]


@pytest.mark.parametrize("metric", OF_CLASSES)
def test_a_weight_of_two_is_the_point_twice_for_classes(metric):
    (probs, y), counts = classified(), torch.arange(60) % 4
    for weights in (counts, counts > 0):  # a mask leaves points out
        repeated = metric(*(part.repeat_interleave(weights.long(), 0) for part in (probs, y)))
        torch.testing.assert_close(metric(probs, y, weights=weights), repeated)


@pytest.mark.parametrize("metric", [metrics.nll, metrics.brier_score])
def test_soft_labels_are_the_expectation_over_labels(metric):
    (probs, y), classes = classified(20), torch.eye(4, dtype=torch.float64)
    torch.testing.assert_close(metric(probs, classes[y]), metric(probs, y))
    soft = torch.rand(20, 4, dtype=torch.float64).softmax(-1)
    each = [metric(probs[i : i + 1], torch.tensor([c])) for i in range(20) for c in range(4)]
    expected = (torch.stack(each).view(20, 4) * soft).sum(1).mean()
    if metric is metrics.brier_score:  # a square is not linear: less the variance of the label
        expected = expected - (soft * (1 - soft)).sum(1).mean()
    torch.testing.assert_close(metric(probs, soft), expected)


def test_targets_that_are_nan_are_missing(numbers):
    means, scales, y = (part.view(*part.shape[:-1], N // 2, 2).clone() for part in numbers)
    y[1, 0], y[2] = torch.nan, torch.nan
    kept, ends = ~y.isnan(), (means[0] - 1, means[0] + 1)
    of_targets = [case for case in OF_NUMBERS if case[0] is not metrics.lppd]
    cases = [
        *((metric, given(means, scales, y)) for metric, given in of_targets),
        (metrics.interval_score, (*ends, y)),
        (metrics.quantile_calibration_error, (metrics.gaussian_pit(means[0], scales[0], y),)),
        (metrics.quantile_calibration_error, (metrics.sample_pit(means, y),)),
    ]
    weights = torch.tensor([1.0, 3.0, 2.0])
    how = {"weights": weights[:, None].expand(3, 2)[kept]}
    for metric, parts in cases:
        rest = [part[..., kept] for part in parts]
        torch.testing.assert_close(metric(*parts), metric(*rest))
        torch.testing.assert_close(metric(*parts, weights=weights), metric(*rest, **how))


@pytest.mark.parametrize("metric", [metrics.gaussian_nll, metrics.crps_gaussian])
def test_missing_targets_have_no_gradients_and_are_left_out_when_compiled(metric):
    y, scale = torch.tensor([0.0, torch.nan, 3.0]), torch.ones(3)
    mean = torch.zeros(3, requires_grad=True)
    metric(mean, scale, y).backward()
    assert bool(mean.grad.isfinite().all())
    compiled = torch.compile(metric, backend="eager")
    torch.testing.assert_close(compiled(mean.detach(), scale, y), metric(mean.detach(), scale, y))


@pytest.mark.parametrize(("metric", "given"), OF_NUMBERS)
def test_a_weight_of_two_is_the_point_twice_for_numbers(metric, given, numbers):
    count = torch.arange(N) % 3
    repeated = [part.repeat_interleave(count, -1) for part in numbers]
    torch.testing.assert_close(metric(*given(*numbers), weights=count), metric(*given(*repeated)))


def test_the_area_counts_fractions_of_points():
    probs = torch.rand(9, 3, dtype=torch.float64).softmax(-1)
    y, weights = torch.arange(9) % 3, torch.rand(9, dtype=torch.float64) * 3
    whole = metrics.aurc(probs, y, weights=weights)
    halves = metrics.aurc(probs.repeat(2, 1), y.repeat(2), weights=weights.repeat(2) / 2)
    torch.testing.assert_close(whole, halves)
    curve = metrics.risk_coverage_curve(probs, y, weights=weights.ceil())
    torch.testing.assert_close(metrics.aurc(probs, y, weights=weights.ceil()), curve.risk.mean())
