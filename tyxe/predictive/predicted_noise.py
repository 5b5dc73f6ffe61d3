"""Gaussian outputs that are means and scales of noise: predictions and densities without draws.

Given the outputs for scales, the targets of a point are Gaussian. What is left is an expectation
over these outputs, at nodes that are the same for all points: Gauss-Hermite for one number.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributions as td
from torch import Tensor

from tyxe.data import Targets
from tyxe.likelihoods import HeteroskedasticGaussian
from tyxe.likelihoods.reductions import log_mean_exp
from tyxe.predictive.distributions import (
    PredictiveMixture,
    gaussian_distribution,
    normal_of_numbers,
    over_points,
)
from tyxe.predictive.evaluation import gaussian_log_likelihood, log_normals, semi_definite
from tyxe.predictive.gaussian import GaussianOutputs, gaussian_prediction
from tyxe.predictive.links import square_root
from tyxe.util import at_least_float32, precise

# The mean of the squared scale has a relative error below 1e-7 if the output for the scale has a
# standard deviation of 3, and below 3e-4 if that is 10.
NUM_NODES = 64


def _nodes(size: int, count: int) -> tuple[Tensor, Tensor]:
    """Return nodes `(K, size)` of mean 0 and covariance I, and their weights; at 0 for no draws."""
    if not count:
        return torch.zeros(1, size, device="cpu"), torch.ones(1, device="cpu")
    if size == 1:  # Golub & Welsch (1969)
        off = torch.arange(1, NUM_NODES, dtype=torch.float64, device="cpu").sqrt()
        nodes, vectors = torch.linalg.eigh(off.diag(1) + off.diag(-1))
        return nodes[:, None], vectors[0].square()
    half = max(count // 2, 4 * size)
    uniform = torch.quasirandom.SobolEngine(size, scramble=True, seed=0).draw(half).double()
    normal = torch.special.ndtri(torch.cat([uniform, 1 - uniform]))
    weights = torch.full((2 * half,), 0.5 / half, dtype=torch.float64, device="cpu")
    return torch.linalg.qr(normal).Q * (2 * half) ** 0.5, weights


def _given_scales(
    likelihood: HeteroskedasticGaussian, outputs: GaussianOutputs
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return what the targets are at each node of the outputs `s` for the scales.

    With `s = E[s] + R z` and `S = Cov(f, s) R^-T` it is the mean `E[f] + S z`, the covariance of
    means `Cov(f) - S S^T`, the scale of the noise and the weight of the node.
    """
    mean, size = at_least_float32(outputs.mean), outputs.mean.shape[-1] // 2
    covariance = precise(outputs.covariance)
    nodes, weights = (each.to(covariance) for each in _nodes(size, outputs.options.num_samples))
    root = square_root(covariance[..., size:, size:])
    # Directions whose variance is the covariance's rounding are left out.
    rounding = torch.finfo(outputs.covariance.dtype).eps ** 0.5
    slope = covariance[..., :size, size:] @ torch.linalg.pinv(root, rtol=rounding).mT
    left = covariance[..., :size, :size] - slope @ slope.mT
    if not outputs.options.num_samples:
        left = torch.zeros_like(left)
    moved = (torch.cat([slope, root], -2) @ nodes.mT).movedim(-1, 0)
    loc, noise = likelihood._split(mean + moved.to(mean))
    return loc, left.to(mean), noise, weights.to(mean)


@gaussian_prediction.register
def _(likelihood: HeteroskedasticGaussian, outputs: GaussianOutputs) -> Tensor:
    # The moments need each output alone, and nodes have the moments of a Normal.
    mean, variance = at_least_float32(outputs.mean), at_least_float32(outputs.variance())
    nodes, weights = (each.to(mean) for each in _nodes(1, 1))
    far = variance.clamp_min(0).sqrt() * nodes.view(-1, *[1] * mean.dim())
    return likelihood.aggregate_predictions(mean + far, 0, None, weights)


@gaussian_log_likelihood.register
def _(
    likelihood: HeteroskedasticGaussian,
    outputs: GaussianOutputs,
    targets: Tensor | Targets,
    prediction: Any,
) -> Tensor:
    loc, covariance, noise, weights = _given_scales(likelihood, outputs)
    logs = log_mean_exp(log_normals(likelihood, targets, loc, covariance, noise), 0, weights)
    return logs.view(len(logs), -1).sum(1).to(loc.dtype)


@gaussian_distribution.register
def _(likelihood: HeteroskedasticGaussian, outputs: GaussianOutputs) -> td.Distribution:
    loc, covariance, noise, weights = _given_scales(likelihood, outputs)
    covariance, each = semi_definite(covariance), zip(loc, noise, strict=True)
    parts = [normal_of_numbers(mean, covariance, scale) for mean, scale in each]
    return over_points(PredictiveMixture(parts, weights))
