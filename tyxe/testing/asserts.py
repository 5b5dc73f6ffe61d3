"""Assertions whose messages name the broken rule, and whether a density is that of draws."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributions as td
from torch import Tensor

from tyxe.util import is_discrete

# A standard normal exceeds this with probability 2e-9, which allows thousands of comparisons.
STANDARD_ERRORS = 6.0


def assert_close(actual: Tensor, expected: Tensor, what: str, rtol: float = 1e-9) -> None:
    """Assert equality to a relative and absolute tolerance, of rounding in float64 by default."""
    torch.testing.assert_close(
        actual, expected, rtol=rtol, atol=rtol, msg=lambda details: f"{what}: {details}"
    )


def assert_within(actual: Tensor, expected: Tensor, error: Tensor, what: str) -> None:
    """Assert that estimates agree with their expectations to within their standard errors.

    Where a standard error is 0 the estimate has to be exact.
    """
    allowed = STANDARD_ERRORS * error + 1e-6 * expected.abs().clamp_min(1e-6)
    excess = ((actual - expected).abs() / allowed).max().item()
    assert excess <= 1, (
        f"{what}: an estimate is {excess * STANDARD_ERRORS:.1f} standard errors away\n"
        f"estimated {actual}\nexpected {expected}"
    )


def assert_raises(error: type[Exception], function: Callable[[], Any], what: str) -> None:
    """Assert that a call raises an error of one kind."""
    try:
        function()
    except error:
        return
    raise AssertionError(f"{what}: expected {error.__name__}, but nothing was raised")


NUM_DRAWS = 8000
# An integral over more dimensions needs more draws than a test has.
MAX_SIZE = 30


def check_density(q: td.Distribution, what: str, prior: td.Distribution | None = None) -> None:
    """Assert that draws of a continuous distribution have its mean, log_prob and KL to a prior.

    A mean or KL that is not implemented is left out, and so is the density of draws that do not
    vary.
    """
    if is_discrete(q.support):
        return
    draws = q.sample(torch.Size([NUM_DRAWS]))
    mean = _if_implemented(lambda: q.mean)
    if mean is not None and bool(mean.isfinite().all()):
        _assert_mean(draws, mean, f"draws of {what} have another mean than its `mean`")
    if not bool((draws != draws[:1]).any(0).all()):
        return
    if draws[0].numel() <= MAX_SIZE:
        _check_integral(q, draws, f"the density by log_prob of {what} does not integrate to 1")
    kl = None if prior is None else _if_implemented(lambda: td.kl_divergence(q, prior))
    if kl is not None and prior is not None:
        differences = q.log_prob(draws) - prior.log_prob(draws)
        _assert_mean(differences, kl, f"the KL registered for {what} is not E[log q - log p]")


def _if_implemented(call: Callable[[], Tensor]) -> Tensor | None:
    try:
        return call()
    except NotImplementedError:
        return None


def _assert_mean(values: Tensor, expected: Tensor, what: str) -> None:
    error = values.std(0) / math.sqrt(len(values))
    assert_within(values.mean(0), expected, error, what)


def _check_integral(q: td.Distribution, draws: Tensor, what: str) -> None:
    """Assert `E_q[r / q] = 1` for Normals `r` that lie where draws are densest.

    There `q` is not small, whether it has one mode or several. Values are unconstrained first.
    """
    transform = td.biject_to(q.support)
    values = transform.inv(draws)
    slopes = transform.log_abs_det_jacobian(values, draws).reshape(NUM_DRAWS, -1).sum(1)
    log_prob, values = q.log_prob(draws).reshape(NUM_DRAWS, -1).sum(1) + slopes, values.flatten(1)
    half = NUM_DRAWS // 2
    near = _densest(values[:half])
    covariance = near.T.cov().reshape(near.shape[1], near.shape[1])
    for part in (1.0, 0.5):
        normal = td.MultivariateNormal(near.mean(0), part * covariance)
        weights = (normal.log_prob(values[half:]) - log_prob[half:]).exp()
        _assert_mean(weights, torch.ones_like(weights[0]), what)


def _densest(values: Tensor) -> Tensor:
    """Return a tenth of the draws, those that are closest together."""
    width = values.quantile(0.84, dim=0) - values.quantile(0.16, dim=0)
    scaled, count = values / width, len(values) // 10
    distances = torch.cdist(scaled[:1000], scaled)
    radii, members = distances.topk(count, largest=False)
    return values[members[radii[:, -1].argmin()]]
