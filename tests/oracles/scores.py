"""Random predictions and scores, and the calibration error point by point."""

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from scipy import integrate
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


def crps_by_quadrature(cdf, low, y, high, inside):
    """The integral of the squared distance to a step at `y`, with points to split it at."""
    below = integrate.quad(lambda t: cdf(t) ** 2, low, y, limit=500, points=inside)[0]
    return below + integrate.quad(lambda t: (1 - cdf(t)) ** 2, y, high, limit=500, points=inside)[0]


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
