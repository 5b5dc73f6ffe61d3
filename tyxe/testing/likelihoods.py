"""The contract of likelihoods."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pyro.distributions as dist
import pyro.poutine as poutine
import torch
import torch.distributions as td
from torch import Tensor

from tyxe.likelihoods import (
    Bernoulli,
    Categorical,
    Censored,
    HeteroskedasticGaussian,
    HomoskedasticGaussian,
    Likelihood,
    NegativeBinomial,
    Ordinal,
    Poisson,
    StudentT,
    output_hessian,
)
from tyxe.likelihoods.output_hessian import hessian_blocks, sampled_gradient
from tyxe.testing.asserts import assert_close, assert_raises, assert_within
from tyxe.util import without_events

NUM_SAMPLES = 4000


@dataclass(frozen=True)
class LikelihoodCase:
    """A likelihood with predictions and targets to check it on.

    Attributes:
        build: makes the likelihood for a `dataset_size`.
        output_shape: shape of the net's output for one point.
        target_shape: shape of one point's target.
        matches_variance: aggregation keeps the variance of the mixture, and not only its mean.
        matches_mean: aggregation keeps the mean of the mixture, and samples have the mean of their
            distribution. It is False for angles, whose mean direction is no mean of numbers. Then
            variances are not compared either.
    """

    build: Callable[[Any], Likelihood]
    output_shape: tuple[int, ...] = ()
    target_shape: tuple[int, ...] = ()
    matches_variance: bool = True
    matches_mean: bool = True


def _noisy(*shape: int, **noise: Any) -> LikelihoodCase:
    return LikelihoodCase(functools.partial(HomoskedasticGaussian, **noise), shape, shape)


def _censored(dataset_size: Any) -> Likelihood:
    return Censored(HomoskedasticGaussian(dataset_size, scale=0.3))


def _ordinal(dataset_size: Any) -> Likelihood:
    return Ordinal(dataset_size, num_classes=4)


LIKELIHOODS: dict[str, LikelihoodCase] = {
    "Bernoulli": LikelihoodCase(Bernoulli),
    "Bernoulli, column": LikelihoodCase(Bernoulli, (1,), (1,)),
    "Bernoulli, image": LikelihoodCase(functools.partial(Bernoulli, event_dim=1), (2, 3), (2, 3)),
    "Categorical": LikelihoodCase(Categorical, (4,)),
    "Categorical, pixels": LikelihoodCase(Categorical, (2, 3, 4), (2, 3)),
    "Censored": LikelihoodCase(_censored, (2,), (2, 2)),
    "HomoskedasticGaussian": _noisy(2, scale=0.3),
    "HomoskedasticGaussian, flat": _noisy(precision=4.0),
    "HomoskedasticGaussian, scale each": _noisy(3, 2, scale=torch.tensor([0.1, 2.0], device="cpu")),
    "HomoskedasticGaussian, learned": _noisy(1, scale=0.5, learn_scale=True),
    "HomoskedasticGaussian, inferred": _noisy(1, scale=dist.LogNormal(0.0, 0.5)),
    "HomoskedasticGaussian, inferred precision": _noisy(1, precision=dist.Gamma(2.0, 2.0)),
    "HeteroskedasticGaussian": LikelihoodCase(HeteroskedasticGaussian, (2,), (1,)),
    "HeteroskedasticGaussian, image": LikelihoodCase(HeteroskedasticGaussian, (2, 6), (2, 3)),
    "NegativeBinomial": LikelihoodCase(NegativeBinomial, (2,), (2,), matches_variance=False),
    "Ordinal": LikelihoodCase(_ordinal, (1,)),
    "Ordinal, matrix": LikelihoodCase(_ordinal, (3, 1), (3,)),
    "Poisson": LikelihoodCase(Poisson, matches_variance=False),
    "Poisson, matrix": LikelihoodCase(Poisson, (2, 2), (2, 2), matches_variance=False),
    "StudentT": LikelihoodCase(functools.partial(StudentT, scale=0.3, df=9.0), (2,), (2,)),
    "StudentT, inferred": LikelihoodCase(
        functools.partial(StudentT, scale=dist.LogNormal(0.0, 0.5), df=9.0), (1,), (1,)
    ),
}


def check_likelihood(case: LikelihoodCase, num_points: int = 5, num_draws: int = 7) -> None:
    """Assert that all methods of a likelihood agree on one density.

    Args:
        case: the likelihood and its shapes.
        num_points: number of data points.
        num_draws: number of draws to aggregate.

    Example:
        >>> check_likelihood(LikelihoodCase(Categorical, output_shape=(3,)))
    """
    likelihood = case.build(3 * num_points).double()
    predictions = torch.randn(
        num_draws, num_points, *case.output_shape, dtype=torch.float64, device="cpu"
    )
    targets = likelihood.sample(predictions[0], latents=likelihood.prior_means())
    expected = (num_points, *case.target_shape)
    assert targets.shape == expected, f"sample has shape {targets.shape}, expected {expected}"
    _check_dataset_size(case)
    _check_site(likelihood, predictions[0], targets)
    _check_points(likelihood, predictions[0], targets)
    _check_one_draw(likelihood, predictions[:1], targets)
    _check_many_draws(likelihood, predictions, case)
    _check_mixture(likelihood, predictions, targets)
    _check_samples(likelihood, predictions[0], case.matches_mean)
    _check_output_hessian(likelihood, predictions[0])
    _check_wrong_shapes(likelihood, predictions[0], targets)
    _check_dtypes(likelihood, predictions[0], targets)
    _check_missing(likelihood, predictions, targets)
    _check_missing_targets(likelihood, predictions[0], targets)


def _check_dataset_size(case: LikelihoodCase) -> None:
    assert_raises(ValueError, lambda: case.build(0), "dataset_size of 0")
    later = case.build(None)
    assert_raises(ValueError, lambda: later.dataset_size, "dataset_size left out")
    later.dataset_size = 12
    assert later.dataset_size == 12, "dataset_size is kept where it is set later"
    assert case.build(12).dataset_size == 12, "dataset_size is kept"


def _check_missing(likelihood: Likelihood, predictions: Tensor, targets: Tensor) -> None:
    """Assert that a likelihood with variables of its own does not go on without their values."""
    if not likelihood.latent_priors():
        return
    first = predictions[0]
    what = "no value of the likelihood's own variable"
    assert_raises(ValueError, lambda: likelihood.sample(first), what)
    assert_raises(ValueError, lambda: likelihood.log_likelihood(first, targets), what)
    assert_raises(ValueError, lambda: likelihood.aggregate_predictions(predictions), what)


def _check_missing_targets(likelihood: Likelihood, predictions: Tensor, targets: Tensor) -> None:
    """Assert that a target that is NaN is not there."""
    if isinstance(likelihood, Categorical):  # of which floating numbers are probabilities
        return
    holes = targets.double().clone()
    holes[1] = math.nan
    rows = torch.arange(len(targets), device=targets.device) != 1
    for name, method in (("log_likelihood", _scores(likelihood)), ("error", likelihood.error)):
        found = method(predictions, holes, "sum")
        expected = method(predictions[rows], targets[rows], "sum")
        assert_close(found, expected, f"{name} of targets of which one is NaN")


def _check_site(likelihood: Likelihood, predictions: Tensor, targets: Tensor) -> None:
    trace = poutine.trace(likelihood).get_trace(predictions, targets)
    trace.compute_log_prob()
    site = trace.nodes.get(likelihood.data_name)
    assert site is not None, f"there is no site {likelihood.data_name!r}"
    assert site["is_observed"], f"{likelihood.data_name!r} is not observed"
    factor = likelihood.dataset_size / len(targets)
    assert site["scale"] == factor, f"the site's scale is {site['scale']}, expected {factor}"
    own = likelihood.latent_priors()
    nodes = {name: trace.nodes[f"{likelihood.prefix}.{name}"] for name in own}
    latents = {name: node["value"] for name, node in nodes.items()}
    for name, node in nodes.items():
        assert not node["is_observed"], f"{name!r} is not latent"
        assert node["scale"] == 1.0, f"the log-probability of {name!r} is scaled"
        dtype = latents[name].dtype
        assert dtype == predictions.dtype, (
            f"{name!r} is {dtype} after likelihood.to({predictions.dtype}): keep the numbers of "
            "its prior by register_buffer, and make the distribution of them in latent_priors"
        )
    log_likelihood = likelihood.log_likelihood(predictions, targets, "sum", latents)
    assert_close(site["log_prob_sum"], factor * log_likelihood, "the site's log-probability")


def _scores(likelihood: Likelihood) -> Callable[..., Tensor]:
    """Return the log-likelihood at the likelihood's own variables' means."""
    return functools.partial(likelihood.log_likelihood, latents=likelihood.prior_means())


def _check_points(likelihood: Likelihood, predictions: Tensor, targets: Tensor) -> None:
    for name, method in (("log_likelihood", _scores(likelihood)), ("error", likelihood.error)):
        each = method(predictions, targets, "none")
        assert each.shape == targets.shape[:1], f"{name} has shape {each.shape} for the points"
        assert bool(each.isfinite().all()), f"{name} is not finite"
        assert_close(method(predictions, targets), each, f"{name}, no reduction asked for")
        assert_close(method(predictions, targets, "sum"), each.sum(), f"{name}, sum")
        assert_close(method(predictions, targets, "mean"), each.mean(), f"{name}, mean")
        some = method(predictions[1:3], targets[1:3], "none")
        assert_close(some, each[1:3], f"{name} of a point depends on the others")
        assert_raises(ValueError, functools.partial(method, predictions, targets, "max"), name)
    assert bool((likelihood.error(predictions, targets, "none") >= 0).all()), "a negative error"


def _check_one_draw(likelihood: Likelihood, predictions: Tensor, targets: Tensor) -> None:
    combined = _aggregated(likelihood, predictions)
    for what, method in (("distribution", _scores(likelihood)), ("error", likelihood.error)):
        found, expected = (method(one, targets, "none") for one in (combined, predictions[0]))
        assert_close(found, expected, f"aggregating one draw changed its {what}")


def _aggregated(likelihood: Likelihood, predictions: Tensor, dim: int = 0) -> Any:
    draws = predictions.shape[dim]
    latents = {n: v.expand(draws, *v.shape) for n, v in likelihood.prior_means().items()}
    return likelihood.aggregate_predictions(predictions, dim, latents)


def _elementwise(likelihood: Likelihood, predictions: Any) -> td.Distribution:
    means = likelihood.prior_means()
    return without_events(likelihood.predictive_distribution(predictions, means))


def _probabilities(distribution: td.Distribution) -> Tensor:
    return distribution.log_prob(distribution.enumerate_support(expand=False)).exp()


def _check_many_draws(likelihood: Likelihood, predictions: Tensor, case: LikelihoodCase) -> None:
    each = [_elementwise(likelihood, one) for one in predictions]
    combined = _elementwise(likelihood, _aggregated(likelihood, predictions))
    again = _elementwise(likelihood, _aggregated(likelihood, predictions.transpose(0, 1), 1))
    if combined.has_enumerate_support:
        expected = torch.stack([_probabilities(one) for one in each]).mean(0)
        assert_close(_probabilities(combined), expected, "probabilities of the mixture")
        assert_close(_probabilities(again), expected, "draws along dimension 1")
        return
    assert_close(again.mean, combined.mean, "draws along dimension 1")
    if not case.matches_mean:
        return
    means = torch.stack([one.mean for one in each])
    assert_close(combined.mean, means.mean(0), "mean of the mixture")
    if case.matches_variance:
        inner = torch.stack([one.variance for one in each]).mean(0)
        expected = inner + means.var(0, correction=0)
        assert_close(combined.variance, expected, "variance of the mixture")


def _check_mixture(likelihood: Likelihood, predictions: Tensor, targets: Tensor) -> None:
    latents = {
        name: prior.sample(torch.Size([len(predictions)]))
        for name, prior in likelihood.latent_priors().items()
    }
    each = []
    for s, one in enumerate(predictions):
        of_draw = {name: values[s] for name, values in latents.items()}
        each.append(likelihood.log_likelihood(one, targets, "none", of_draw))
    expected = torch.stack(each).logsumexp(0) - math.log(len(predictions))
    actual = likelihood.mixture_log_likelihood(predictions, targets, latents)
    assert_close(actual, expected, "log of the mean probability")


def _check_samples(likelihood: Likelihood, predictions: Tensor, have_mean: bool) -> None:
    drawn = likelihood.sample(predictions, (NUM_SAMPLES,), likelihood.prior_means())
    samples = likelihood.targets_of(drawn)
    distribution = _elementwise(likelihood, predictions)
    if distribution.has_enumerate_support:
        values = distribution.enumerate_support(expand=False)
        expected = _probabilities(distribution)
        frequencies = torch.stack([(samples == value).double().mean(0) for value in values])
        error = (expected * (1 - expected) / NUM_SAMPLES).sqrt()
        assert_within(frequencies, expected, error, "frequencies of samples")
        return
    if not have_mean:
        gradients = _sampled_gradients(likelihood, predictions)
        error = gradients.std(0) / math.sqrt(NUM_SAMPLES)
        zeros = torch.zeros_like(error)
        assert_within(gradients.mean(0), zeros, error, "mean gradient of log_prob at samples")
        return
    mean, variance = distribution.mean, distribution.variance
    error = (variance / NUM_SAMPLES).sqrt()
    assert_within(samples.mean(0), mean, error, "mean of samples")
    squares = (samples - mean).square()
    error = squares.std(0) / math.sqrt(NUM_SAMPLES)
    assert_within(squares.mean(0), variance, error, "variance of samples")


def _check_output_hessian(likelihood: Likelihood, predictions: Tensor) -> None:
    """Compare a registered output Hessian with `E r r^T` over samples, with `r` by autograd."""
    if output_hessian.dispatch(type(likelihood)) is output_hessian.dispatch(object):
        return
    latents = likelihood.prior_means()
    blocks = hessian_blocks(likelihood, predictions, latents)
    expected = torch.stack([torch.block_diag(*of_point) for of_point in blocks])
    gradients = _sampled_gradients(likelihood, predictions)
    products = gradients.unsqueeze(-1) * gradients.unsqueeze(-2)
    # A rare class may have no sample at all: three of its largest products are allowed for.
    largest = gradients.abs().amax((0, 1))
    error = products.std(0) / math.sqrt(NUM_SAMPLES)
    error = error + 3 * largest.outer(largest) / NUM_SAMPLES
    what = "the Fisher information of samples, and the registered output Hessian"
    assert_within(products.mean(0), expected, error, what)


def _sampled_gradients(likelihood: Likelihood, predictions: Tensor) -> Tensor:
    """Return `d log p(y|f) / df` at samples, `(NUM_SAMPLES, n, outputs)`."""
    many = predictions.repeat(NUM_SAMPLES, *[1] * (predictions.dim() - 1))
    found = sampled_gradient(likelihood, many, likelihood.prior_means())
    return found.reshape(NUM_SAMPLES, len(predictions), -1)


def _check_wrong_shapes(likelihood: Likelihood, predictions: Tensor, targets: Tensor) -> None:
    wrong = [targets.unsqueeze(-1), targets.unsqueeze(0), targets[:1], targets[0]]
    for bad in wrong:
        what = f"targets of shape {tuple(bad.shape)} for shape {tuple(targets.shape)}"
        for call in (_scores(likelihood), likelihood.error, likelihood):
            assert_raises(ValueError, functools.partial(call, predictions, bad), what)


def _check_dtypes(likelihood: Likelihood, predictions: Tensor, targets: Tensor) -> None:
    expected = _scores(likelihood)(predictions, targets, "sum")
    whole = bool((targets == targets.round()).all())
    dtypes = [torch.uint8, torch.int16, torch.int32, torch.int64] if whole else [torch.float64]
    if whole and bool((targets <= 1).all()):
        dtypes.append(torch.bool)
    for dtype in dtypes:
        actual = _scores(likelihood)(predictions, targets.to(dtype), "sum")
        assert_close(actual, expected, f"targets of {dtype}")
